// The extension module fastckpt._engine. Only this file and bindings_*.cc know Python. It converts
// arguments, releases the GIL around all waits, and turns failures into plain values, whose meaning
// Python decides.
#include <fcntl.h>
#include <linux/stat.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "bindings_gil.h"
#include "cast/cast.h"
#include "check.h"
#include "crc32/crc32.h"
#include "engine/engine.h"
#include "engine/scattered_writes.h"
#include "planes/planes.h"

namespace py = pybind11;

namespace fastckpt {

void bind_gds(py::module_& m);            // bindings_gds.cc
void bind_parts(py::module_& m);          // bindings_parts.cc
void bind_python_frames(py::module_& m);  // bindings_python_frames.cc

namespace {

// Copies a contiguous buffer of native uint64 columns into structs of the same layout.
template <typename Row>
std::vector<Row> rows(const py::buffer& buffer) {
    const py::buffer_info info = buffer.request();
    const size_t nbytes = static_cast<size_t>(info.size * info.itemsize);
    if (nbytes % sizeof(Row) != 0) throw py::value_error("the buffer has no whole number of rows");
    std::vector<Row> out(nbytes / sizeof(Row));
    if (nbytes > 0) std::memcpy(out.data(), info.ptr, nbytes);
    return out;
}

py::object failure_or_none(const Failure& failure) {
    if (failure.error == 0) return py::none();
    const char* const kinds[] = {"read", "write", "copy"};
    return py::make_tuple(kinds[static_cast<int>(failure.kind)], failure.offset, failure.error);
}

// Keeps a function of which a backend thread may drop the last reference, which needs the GIL.
std::shared_ptr<py::function> kept(py::function function) {
    return {new py::function(std::move(function)), [](py::function* f) {
                py::gil_scoped_acquire gil;
                delete f;
            }};
}

// Returns the errno of what a Python function has raised; EIO for any error that has none.
int number_of(py::error_already_set& error, const char* where) {
    if (error.matches(PyExc_OSError)) {
        const py::object number = error.value().attr("errno");
        if (py::isinstance<py::int_>(number) && number.cast<int>() != 0) return number.cast<int>();
    }
    error.discard_as_unraisable(where);
    return EIO;
}

// Wraps a function (kind, fd, memory, offset) -> bytes moved, which may raise OSError.
Transfer python_transfer(py::function function) {
    const auto held = kept(std::move(function));
    return [held](const Op& op, std::byte* data, size_t nbytes, uint64_t offset) -> ssize_t {
        py::gil_scoped_acquire gil;
        const auto* kind = op.kind == Op::Kind::write ? "write" : "read";
        const auto view =
            py::memoryview::from_memory(static_cast<void*>(data), static_cast<ssize_t>(nbytes));
        try {
            return (*held)(kind, op.fd, view, offset).cast<ssize_t>();
        } catch (py::error_already_set& error) {
            return -number_of(error, "fastckpt transfer");
        } catch (const py::cast_error&) {
            return -EIO;  // the function returned no number
        }
    };
}

void raise_os_error(int number) {
    if (number == 0) return;
    errno = number;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
}

void allocate(int fd, uint64_t nbytes) {
    int error = 0;
    {
        WithoutGil nogil;
        do {
            error = fallocate(fd, 0, 0, static_cast<off_t>(nbytes)) == 0 ? 0 : errno;
        } while (error == EINTR);
    }
    raise_os_error(error);
}

struct LastWords {
    pid_t pid = 0;
    int fd = -1;
    std::string text;
};

// Runs in exit(), when Python has ended. glibc lets a handler call exit() again: those that are
// left run, and the process ends with the new status.
void say_last_words(int status, void* given) {
    const auto& words = *static_cast<const LastWords*>(given);
    if (words.pid != getpid()) return;  // another process has been forked since
    const int shown = (status & 0xff) == 0 ? 1 : status & 0xff;
    if (words.fd >= 0) dprintf(words.fd, "%s: exit status %d\n", words.text.c_str(), shown);
    if (shown != (status & 0xff)) std::exit(shown);
}

// Has this process end with status 1 in the place of 0, after it has written `text` to fd, unless
// that is -1. The last call counts.
void fail_exit(int fd, const py::bytes& text) {
    static LastWords* words = nullptr;  // never freed: it is read when all else has been
    if (words == nullptr) {
        words = new LastWords;
        on_exit(say_last_words, words);
    }
    *words = {getpid(), fd, text};
}

// Returns how many bytes of a file are in the page cache; -1 before Linux 6.5: cachestat(2).
int64_t cached_bytes(int fd, uint64_t nbytes) {
#ifndef SYS_cachestat
    constexpr long SYS_cachestat = 451;
#endif
    struct {
        uint64_t offset, nbytes;
    } range{0, nbytes};
    struct {
        uint64_t cached, dirty, writeback, evicted, recently_evicted;
    } stat{};
    if (syscall(SYS_cachestat, fd, &range, &stat, 0) != 0) return -1;
    return static_cast<int64_t>(stat.cached) * sysconf(_SC_PAGESIZE);
}

// Binds a function that returns the kernels that this CPU offers, by name.
template <typename Kernel, typename Bind>
void bind_kernels(py::module_& m, const char* name, std::initializer_list<const Kernel*> kernels,
                  Bind bind) {
    m.def(name, [kernels = std::vector<const Kernel*>(kernels), bind] {
        py::dict bound;
        for (const Kernel* kernel : kernels)
            if (kernel->supported()) bound[kernel->name] = bind(*kernel);
        return bound;
    });
}

using CrcFunction = uint32_t (*)(uint32_t, const void*, size_t);

uint32_t crc_of(CrcFunction function, const py::buffer& data, uint32_t crc) {
    const py::buffer_info info = data.request();
    WithoutGil nogil;
    return function(crc, info.ptr, static_cast<size_t>(info.size * info.itemsize));
}

void bind_crc(py::module_& m) {
    m.def(
        "crc32", [](const py::buffer& data, uint32_t crc) { return crc_of(crc32, data, crc); },
        py::arg("data"), py::arg("crc") = 0);
    m.def("crc32_combine", &crc32_combine);
    m.def("crc32_kernel", &crc32_kernel);
    using namespace crc32_kernels;
    bind_kernels(m, "crc32_kernels", {&portable, &pclmul, &vpclmulqdq}, [](const Kernel& kernel) {
        return py::cpp_function(
            [&kernel](const py::buffer& data) { return crc_of(kernel.crc32, data, 0); });
    });
}

// Buffers of one byte for each of some items, and the addresses of their bytes.
struct Planes {
    Planes(const std::vector<py::buffer>& buffers, const py::buffer_info& items, bool writable) {
        if (!has_planes(buffers.size())) throw py::value_error("planes must be 1, 2, 4 or 8");
        for (const auto& buffer : buffers) {
            held.push_back(buffer.request(writable));
            const auto nbytes = held.back().size * held.back().itemsize;
            if (nbytes * static_cast<ssize_t>(buffers.size()) != items.size * items.itemsize)
                throw py::value_error("planes and items differ in their bytes");
            bytes.push_back(static_cast<uint8_t*>(held.back().ptr));
        }
        count = static_cast<size_t>(held[0].size * held[0].itemsize);
    }
    std::vector<py::buffer_info> held;
    std::vector<uint8_t*> bytes;
    size_t count = 0;
};

void bind_planes(py::module_& m) {
    m.def("split_planes",
          [](const py::buffer& items, bool turned, const std::vector<py::buffer>& planes) {
              const py::buffer_info from = items.request();
              const Planes to(planes, from, /*writable=*/true);
              WithoutGil nogil;
              split_planes(static_cast<const uint8_t*>(from.ptr), to.count, to.bytes.size(), turned,
                           to.bytes.data());
          });
    m.def("join_planes",
          [](const std::vector<py::buffer>& planes, bool turned, const py::buffer& items) {
              const py::buffer_info to = items.request(/*writable=*/true);
              const Planes from(planes, to, /*writable=*/false);
              WithoutGil nogil;
              join_planes(from.bytes.data(), from.count, from.bytes.size(), turned,
                          static_cast<uint8_t*>(to.ptr));
          });
}

using Seconds = std::chrono::duration<double>;

// A job as Python owns it. If an exception parts the two before anybody has given the job up, this
// destructor does, so that the job neither keeps its memory nor reads its sources any more.
class OwnedJob {
  public:
    explicit OwnedJob(std::shared_ptr<WriteJob> job) : job_(std::move(job)) {}
    OwnedJob(const OwnedJob&) = delete;
    OwnedJob& operator=(const OwnedJob&) = delete;
    ~OwnedJob() {
        const Seconds patience(10);  // with writes that may never end, and keep what they use
        job_->give_up();
        while (!job_->wait(WriteJob::Stage::staged, patience)) {
        }
        job_->wait(WriteJob::Stage::written, patience);
    }
    WriteJob* operator->() const { return job_.get(); }

  private:
    const std::shared_ptr<WriteJob> job_;
};

// Returns a function that waits until a job has reached a stage.
auto waiting(WriteJob::Stage stage) {
    return [stage](OwnedJob& job, double s) { return job->wait(stage, Seconds(s)); };
}

// Returns a function that returns a part of a job's report.
template <typename Part>
auto reported(Part JobReport::* part) {
    return [part](OwnedJob& job) { return job->report().*part; };
}

void bind_jobs(py::module_& m) {
    const py::call_guard<WithoutGil> nogil;
    py::class_<TokenBucket, std::shared_ptr<TokenBucket>>(m, "TokenBucket")
        .def(py::init<double, uint64_t>(), py::arg("bytes_per_s"), py::arg("grain_bytes"))
        .def(
            "set",
            [](TokenBucket& bucket, double bytes_per_s, uint64_t grain_bytes) {
                bucket.set(bytes_per_s, grain_bytes);
            },
            py::arg("bytes_per_s"), py::arg("grain_bytes"));
    py::class_<OwnedJob>(m, "WriteJob", py::release_gil_before_calling_cpp_dtor())
        .def("wait_queued", waiting(WriteJob::Stage::queued), nogil)
        .def("wait_staged", waiting(WriteJob::Stage::staged), nogil)
        .def("wait_written", waiting(WriteJob::Stage::written), nogil)
        .def(
            "write_to",
            [](OwnedJob& job, int fd, uint64_t file_offset, std::shared_ptr<Sink> sink, bool direct,
               double patience_s, std::shared_ptr<TokenBucket> bucket) {
                job->write_to(
                    fd, file_offset, std::move(sink), direct,
                    std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(patience_s)),
                    std::move(bucket));
            },
            py::arg("fd"), py::arg("file_offset"), py::arg("sink"), py::arg("direct"),
            py::arg("patience_s") = 0.0, py::arg("bucket") = nullptr, nogil)
        .def(
            "land", [](OwnedJob& job) { job->land(); }, nogil)
        .def("nbytes_written", reported(&JobReport::nbytes_written))
        .def("writes", reported(&JobReport::writes))
        .def("tokens_waited_s", reported(&JobReport::tokens_waited_s))
        .def("memory_waited_s", reported(&JobReport::memory_waited_s))
        .def("blocks_held_max", reported(&JobReport::blocks_held_max))
        .def("pin_error", reported(&JobReport::pin_error))
        .def("non_finite", reported(&JobReport::non_finite))
        .def("lossy", reported(&JobReport::lossy))
        .def("device_copies",
             [](OwnedJob& job) {
                 const DeviceCopies copies = job->report().device_copies;
                 return py::make_tuple(copies.nbytes, copies.seconds);
             })
        .def("failure", [](OwnedJob& job) { return failure_or_none(job->failure()); })
        .def("block_crcs", [](OwnedJob& job) { return job->block_crcs(); })
        .def("slot_crcs", [](OwnedJob& job) { return job->slot_crcs(); })
        .def("base_crcs", [](OwnedJob& job) { return job->base_crcs(); })
        .def(
            "cancel", [](OwnedJob& job) { job->cancel(); }, nogil)
        .def(
            "give_up", [](OwnedJob& job) { job->give_up(); }, nogil)
        .def("standstill", [](OwnedJob& job) {
            const Standstill found = job->standstill();
            return py::make_tuple(found.seconds, found.writing, found.offset);
        });
}

void bind_streams(py::module_& m) {
    const py::call_guard<WithoutGil> nogil;
    py::class_<ReadStream, std::shared_ptr<ReadStream>>(m, "ReadStream",
                                                        py::release_gil_before_calling_cpp_dtor())
        .def("readinto",
             [](ReadStream& stream, const py::buffer& target, uint64_t offset) {
                 const py::buffer_info info = target.request(/*writable=*/true);
                 WithoutGil release;
                 return stream.read(static_cast<std::byte*>(info.ptr), offset,
                                    static_cast<uint64_t>(info.size * info.itemsize));
             })
        .def(
            "read_runs",
            [](ReadStream& stream, const py::buffer& runs, std::vector<DeviceRange> devices,
               bool xors) {
                const auto run_rows = rows<Run>(runs);
                WithoutGil release;
                return stream.read_runs(run_rows, devices, xors);
            },
            py::arg("runs"), py::arg("devices") = std::vector<DeviceRange>(),
            py::arg("xors") = false)
        .def("arrive", &ReadStream::arrive, nogil)
        .def("beside", &ReadStream::beside, nogil)
        .def("nbytes_read", &ReadStream::nbytes_read)
        .def("failure", [](ReadStream& stream) { return failure_or_none(stream.failure()); })
        .def("corrupt_block", &ReadStream::corrupt_block)
        .def("close", &ReadStream::close, nogil);
}

void bind_devices(py::module_& m) {
    const py::call_guard<WithoutGil> nogil;
    py::register_exception<cuda::Unavailable>(m, "DeviceUnavailable");
    auto error = py::register_exception<DeviceError>(m, "DeviceError");
    py::register_exception<StreamCaptured>(m, "StreamCaptured", error);
    py::class_<cuda::Driver, std::shared_ptr<cuda::Driver>>(m, "CudaDriver")
        .def(py::init<const std::string&>(), py::arg("library"), nogil)
        .def("text", &cuda::Driver::text)
        .def_property_readonly("version", &cuda::Driver::version);
    py::class_<DeviceQueue, std::shared_ptr<DeviceQueue>>(m, "DeviceQueue",
                                                          py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](std::shared_ptr<cuda::Driver> driver, int ordinal) {
                 return std::make_shared<DeviceQueue>(std::move(driver), ordinal);
             }),
             nogil)
        .def("follow", &DeviceQueue::follow, nogil)
        .def("close", &DeviceQueue::close, nogil)
        .def("lead", &DeviceQueue::lead, nogil)
        .def_property_readonly("bus_id", &DeviceQueue::bus_id);
    py::class_<DeviceQueue::Wait>(m, "Wait", py::release_gil_before_calling_cpp_dtor())
        .def("seconds", &DeviceQueue::Wait::seconds, nogil);
    py::class_<DeviceRange>(m, "DeviceRange")
        .def(py::init([](uint64_t begin, uint64_t end, std::shared_ptr<DeviceQueue> queue) {
            return DeviceRange{begin, end, std::move(queue)};
        }))
        .def_readonly("queue", &DeviceRange::queue)
        .def_readonly("begin", &DeviceRange::begin)
        .def_readonly("end", &DeviceRange::end);
}

void bind_sinks(py::module_& m) {
    const py::call_guard<WithoutGil> nogil;
    py::class_<Sink, std::shared_ptr<Sink>>(m, "Sink", py::release_gil_before_calling_cpp_dtor())
        .def_property_readonly("name", &Sink::name);
    py::class_<Backend, Sink, std::shared_ptr<Backend>>(m, "Backend",
                                                        py::release_gil_before_calling_cpp_dtor())
        .def("close", &Backend::close, nogil);
    m.def("threads_backend", [](unsigned threads) { return threads_backend(threads); }, nogil);
    m.def("uring_backend", &uring_backend, nogil);
    m.def(
        "callback_backend",
        [](py::function transfer, unsigned threads) {
            return threads_backend(threads, python_transfer(std::move(transfer)));
        },
        py::arg("transfer"), py::arg("threads") = 1);
    m.def(
        "callback_sink",
        [](Backend& threads, py::function transfer) {
            return std::shared_ptr<Sink>(
                callback_sink(threads, python_transfer(std::move(transfer))));
        },
        py::keep_alive<0, 1>());
}

void bind_engine(py::module_& m) {
    const py::call_guard<WithoutGil> nogil;
    py::class_<Arena, std::shared_ptr<Arena>>(m, "Landing",
                                              py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](int fd, size_t nbytes, size_t block_bytes) {
                 return std::make_shared<Arena>(fd, nbytes, block_bytes);
             }),
             py::arg("fd"), py::arg("nbytes"), py::arg("block_bytes"), nogil)
        .def_property_readonly("nbytes", &Arena::nbytes);
    py::class_<Allowance, std::shared_ptr<Allowance>>(m, "Allowance")
        .def(py::init<size_t>(), py::arg("blocks"))
        .def_property_readonly("blocks", &Allowance::blocks);
    py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine",
                                                py::release_gil_before_calling_cpp_dtor())
        .def(py::init<size_t, size_t, unsigned>(), py::arg("arena_bytes"), py::arg("block_bytes"),
             py::arg("stagers"), nogil)
        .def(
            "stage",
            [](Engine& engine, const py::buffer& segments, const py::buffer& slots,
               std::shared_ptr<Allowance> allowance, unsigned stagers_limit,
               std::vector<DeviceRange> devices, std::shared_ptr<GdsStage> gds,
               const py::buffer& numbers, const py::buffer& conversions,
               std::shared_ptr<Arena> landing, uint64_t base) {
                Image image{rows<Segment>(segments),
                            rows<Slot>(slots),
                            std::move(devices),
                            rows<NumberRun>(numbers),
                            rows<Conversion>(conversions),
                            reinterpret_cast<std::byte*>(base)};
                WithoutGil release;
                return std::make_unique<OwnedJob>(engine.stage(std::move(image),
                                                               std::move(allowance), stagers_limit,
                                                               std::move(gds), std::move(landing)));
            },
            py::arg("segments"), py::arg("slots"), py::arg("allowance"), py::arg("stagers_limit"),
            py::arg("devices") = std::vector<DeviceRange>(), py::arg("gds") = nullptr,
            py::arg("numbers") = py::bytes(), py::arg("conversions") = py::bytes(),
            py::arg("landing") = nullptr, py::arg("base") = 0,
            py::keep_alive<0, 1>())  // whose mutex a job takes as it ends
        .def(
            "read",
            [](Engine& engine, int fd, uint64_t nbytes, std::vector<uint32_t> crcs,
               std::shared_ptr<Sink> sink, bool direct, size_t window_blocks,
               std::vector<uint32_t> wanted, std::shared_ptr<GdsStage> gds) {
                WithoutGil release;
                return engine.read(fd, nbytes, std::move(crcs), std::move(wanted), std::move(sink),
                                   direct, window_blocks, std::move(gds));
            },
            py::arg("fd"), py::arg("nbytes"), py::arg("crcs"), py::arg("sink"), py::arg("direct"),
            py::arg("window_blocks"), py::arg("wanted") = std::vector<uint32_t>(),
            py::arg("gds") = nullptr,
            py::keep_alive<0, 1>())  // whose mutex a closed stream still takes
        .def(
            "prefault",
            [](Engine& engine, size_t begin, size_t end, unsigned threads,
               const std::shared_ptr<DeviceQueue>& pinner) {
                return engine.prefault(begin, end, threads, pinner);
            },
            py::arg("begin"), py::arg("end"), py::arg("threads"), py::arg("pinner") = nullptr,
            nogil)
        .def_property_readonly("block_bytes", &Engine::block_bytes)
        .def_property_readonly("arena_blocks", &Engine::arena_blocks)
        .def("arena_blocks_in_use", &Engine::arena_blocks_in_use)
        .def("arena_blocks_in_use_max", &Engine::arena_blocks_in_use_max)
        .def("close", &Engine::close, nogil);
}

// Casts all items of one buffer into another.
void cast_into(const cast_kernels::Kernel& kernel, unsigned from, unsigned to,
               const py::buffer& items, const py::buffer& into) {
    const py::buffer_info source = items.request(), target = into.request(/*writable=*/true);
    if (from >= kDtypes || to >= kDtypes) throw py::value_error("no such dtype");
    const auto held = static_cast<Dtype>(from), stored = static_cast<Dtype>(to);
    if (!is_castable(held, stored)) throw py::value_error("no cast between these dtypes");
    const auto count = static_cast<size_t>(source.size * source.itemsize) / width_of(held);
    if (static_cast<size_t>(target.size * target.itemsize) != count * width_of(stored))
        throw py::value_error("the buffers differ in their items");
    WithoutGil nogil;
    kernel.cast(held, stored, source.ptr, target.ptr, count);
}

void bind_scattered_writes(py::module_& m) {
    py::class_<Scatterer, std::shared_ptr<Scatterer>>(m, "Scatterer")
        .def(py::init([](uint64_t file_nbytes, const py::buffer& items, const py::buffer& offsets) {
                 return std::make_shared<Scatterer>(file_nbytes, rows<Scatterer::Items>(items),
                                                    rows<uint64_t>(offsets));
             }),
             py::arg("file_nbytes"), py::arg("items"), py::arg("rows"))
        .def("written",
             [](const Scatterer& scatterer) {
                 const Scatterer::Written written = scatterer.written();
                 return py::make_tuple(written.nbytes, written.crc);
             })
        .def("lossy", &Scatterer::lossy)
        .def("whole_page", &Scatterer::whole_page);
    py::class_<ScatterSink, Sink, std::shared_ptr<ScatterSink>>(
        m, "ScatterSink", py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](Backend& threads, std::shared_ptr<Scatterer> scatterer,
                         std::optional<int> buffered, std::optional<py::function> transfer) {
                 return std::make_shared<ScatterSink>(
                     threads, std::move(scatterer), buffered,
                     transfer ? python_transfer(std::move(*transfer)) : transfer_by_syscall);
             }),
             py::arg("threads"), py::arg("scatterer"), py::arg("buffered") = std::nullopt,
             py::arg("transfer") = std::nullopt, py::keep_alive<1, 2>());
    using namespace cast_kernels;
    bind_kernels(m, "cast_kernels", {&portable, &avx2, &avx512}, [](const Kernel& kernel) {
        return py::cpp_function(
            [&kernel](unsigned from, unsigned to, const py::buffer& items, const py::buffer& into) {
                cast_into(kernel, from, to, items, into);
            });
    });
}

}  // namespace

PYBIND11_MODULE(_engine, m) {
    m.doc() = "fastckpt's engine: staging arena, block writes and verified block reads.";
    py::register_exception<BackendUnavailable>(m, "BackendUnavailable");
    bind_crc(m);
    bind_planes(m);
    bind_jobs(m);
    bind_streams(m);
    bind_devices(m);
    bind_sinks(m);
    bind_engine(m);
    bind_scattered_writes(m);
    bind_gds(m);
    bind_parts(m);
    bind_python_frames(m);
    m.def("allocate", &allocate, "fallocate(2) of [0, nbytes); raises OSError");
    m.def("cached_bytes", &cached_bytes);
    m.def("fail_exit", &fail_exit, "on_exit(3): a status of 0 becomes 1, after these last words");
}

}  // namespace fastckpt
