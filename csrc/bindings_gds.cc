// The part of the extension module for cuFile and checksums on devices. It converts arguments and
// releases the GIL around all waits.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <condition_variable>
#include <mutex>

#include "bindings_gil.h"
#include "crc32/crc32_gpu.h"
#include "gds/gds_sink.h"
#include "gds/gds_stage.h"

namespace py = pybind11;

namespace fastckpt {

void bind_gds(py::module_& m);

namespace {

using OpRow = std::tuple<std::string, int, uint64_t, size_t, uint64_t, bool>;
using OpEnd = std::tuple<size_t, int, int>;

// Submits ops (kind, fd, address, nbytes, offset, direct), waits until all have finished, and
// returns the bytes, errno and retries of each.
std::vector<OpEnd> run_ops(Sink& sink, const std::vector<OpRow>& rows) {
    std::vector<Op> ops(rows.size());
    std::mutex mu;
    std::condition_variable ended;
    size_t left = ops.size();
    for (size_t i = 0; i < ops.size(); ++i) {
        const auto& [kind, fd, address, nbytes, offset, direct] = rows[i];
        ops[i].kind = kind == "write" ? Op::Kind::write : Op::Kind::read;
        ops[i].fd = fd;
        ops[i].data = reinterpret_cast<std::byte*>(address);
        ops[i].nbytes = nbytes;
        ops[i].offset = offset;
        ops[i].direct = direct;
        ops[i].finished = [&](Op&) {
            const std::lock_guard lock(mu);
            if (--left == 0) ended.notify_one();
        };
    }
    for (Op& op : ops) sink.submit(&op);
    std::unique_lock lock(mu);
    ended.wait(lock, [&] { return left == 0; });
    std::vector<OpEnd> ends;
    for (const Op& op : ops) ends.emplace_back(op.done, op.error, op.retries);
    return ends;
}

std::vector<Crc32Gpu::Range> ranges_of(const std::vector<std::pair<uint64_t, uint64_t>>& rows) {
    std::vector<Crc32Gpu::Range> ranges;
    for (const auto& [address, nbytes] : rows) {
        if (nbytes > Crc32Gpu::kRangeBytesMax) throw py::value_error("a range is too long");
        ranges.push_back({address, nbytes});
    }
    return ranges;
}

// Waits for the CRCs of ranges of device memory, and returns them.
std::vector<uint32_t> crcs(Crc32Gpu& gpu, const std::shared_ptr<DeviceQueue>& queue,
                           const std::vector<Crc32Gpu::Range>& ranges) {
    size_t count = 0;
    for (const auto& range : ranges) count += Crc32Gpu::words(range);
    if (count == 0) return std::vector<uint32_t>(ranges.size(), 0);
    const HostMemory memory(queue, count * sizeof(uint32_t));
    auto* words = reinterpret_cast<uint32_t*>(memory.data());
    queue->require(gpu.queue(ranges.data(), ranges.size(), words), "CRC-32");
    DeviceQueue::Mark mark;
    queue->require(queue->mark(&mark), "CRC-32");
    queue->require(queue->wait(mark), "CRC-32");
    std::vector<uint32_t> found;
    for (const auto& range : ranges) {
        found.push_back(Crc32Gpu::crc(range, words));
        words += Crc32Gpu::words(range);
    }
    return found;
}

py::tuple as_tuple(const GdsMode& mode) { return py::make_tuple(mode.name(), mode.why); }

void bind_cufile(py::module_& m) {
    const py::call_guard<WithoutGil> nogil;
    py::register_exception<cufile::Unavailable>(m, "CufileUnavailable");
    py::class_<cufile::Library, std::shared_ptr<cufile::Library>>(
        m, "CufileLibrary", py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](const std::string& path, std::shared_ptr<cuda::Driver> driver,
                         const std::string& modules) {
                 return std::make_shared<cufile::Library>(path, std::move(driver), modules);
             }),
             py::arg("path"), py::arg("driver"), py::arg("modules") = "/proc/modules", nogil)
        .def("text", [](const cufile::Library& library, int code,
                        int cuda) { return library.text({code, cuda}); })
        .def("mode",
             [](const cufile::Library& library, const std::string& file_system) {
                 return as_tuple(gds_mode(library.properties(), file_system));
             })
        .def_property_readonly("version", &cufile::Library::version);
    m.def("file_system_of", &file_system_of);
}

void bind_backend(py::module_& m) {
    const py::call_guard<WithoutGil> nogil;
    py::class_<GdsBlocks, std::shared_ptr<GdsBlocks>>(m, "GdsBlocks",
                                                      py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](std::shared_ptr<cufile::Library> library,
                         std::shared_ptr<DeviceQueue> queue, size_t count, size_t block_bytes) {
                 return std::make_shared<GdsBlocks>(std::move(library), std::move(queue), count,
                                                    block_bytes);
             }),
             nogil)
        .def("address", &GdsBlocks::address)
        .def_property_readonly("count", &GdsBlocks::count)
        .def_property_readonly("block_bytes", &GdsBlocks::block_bytes)
        .def_property_readonly("refusal", &GdsBlocks::refusal);
    py::class_<GdsSink, Sink, std::shared_ptr<GdsSink>>(m, "GdsSink",
                                                        py::release_gil_before_calling_cpp_dtor())
        .def(py::init<int, std::shared_ptr<GdsBlocks>, Backend&>(), py::keep_alive<1, 4>(), nogil)
        .def("end",
             [](GdsSink& sink) {
                 GdsReport report;
                 {
                     WithoutGil release;
                     report = sink.end();
                 }
                 return py::make_tuple(report.direct_bytes, report.host_bytes,
                                       report.fallback_reason);
             })
        .def("mode", [](const GdsSink& sink) { return as_tuple(sink.mode()); });
    py::class_<GdsStage, std::shared_ptr<GdsStage>>(m, "GdsStage",
                                                    py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](std::shared_ptr<GdsBlocks> blocks) {
                 return std::make_shared<GdsStage>(std::move(blocks));
             }),
             nogil);
    m.def("run_ops", &run_ops, nogil);
}

}  // namespace

void bind_gds(py::module_& m) {
    bind_cufile(m);
    bind_backend(m);
    py::class_<Crc32Gpu, std::shared_ptr<Crc32Gpu>>(m, "Crc32Gpu",
                                                    py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](std::shared_ptr<DeviceQueue> queue) {
                 return std::make_shared<Crc32Gpu>(std::move(queue));
             }),
             py::call_guard<WithoutGil>())
        .def("crcs", [](Crc32Gpu& gpu, const std::shared_ptr<DeviceQueue>& queue,
                        const std::vector<std::pair<uint64_t, uint64_t>>& rows) {
            const auto ranges = ranges_of(rows);
            WithoutGil release;
            return crcs(gpu, queue, ranges);
        });
}

}  // namespace fastckpt
