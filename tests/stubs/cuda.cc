// A CUDA driver over host memory: the functions that csrc/gpu/cuda_shim.h asks libcuda.so.1 for,
// with streams that are threads, so that order and overlap are real, and a clock of its own, so
// that times are exact: an operation takes what stub_configure() says, copies of one direction
// share a link, the host takes no time. A module has one kernel, that of csrc/crc32/crc32_kernel.h,
// compiled for the host. Built by the tests, which steer it by the stub_*() functions; it must not
// know who calls.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/crc32/crc32_kernel.h"

namespace {

// What a stream takes before a further call waits, as measured on an H100 with driver 580.
constexpr size_t kPendingMax = 1021, kRecordsMax = 56;
constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kNotReady = 600,
              kIllegalAddress = 700;
enum Kind { kToHost, kToDevice, kKernel, kRecord, kWait, kOnDevice, kLaunch };

struct Event {
    uint64_t asked = 0;          // records asked for
    std::set<uint64_t> pending;  // of these; on several streams they end in any order
    double at_us = 0;            // of the last one done

    bool done(uint64_t number) const { return pending.count(number) == 0; }
};

struct Work {
    Kind kind;
    std::byte* target = nullptr;
    const std::byte* source = nullptr;
    size_t nbytes = 0;
    int value = 0;
    double took_us = 0;
    std::shared_ptr<Event> event = {};  // a caller may destroy one that streams still wait for
    uint64_t number = 0;
    bool pinned = true;
    bool follows = false;  // another one of its batch
    std::function<void()> launched = {};
};

struct Done {
    int kind;
    uint64_t stream;
    double begin_us, end_us;
    uint64_t nbytes;
};

struct Failing {
    int after, times, result;
    std::thread::id caller;  // whose calls fail; of no thread: those of all
    int failed = 0;
};

// Never destroyed: the default stream's thread waits on them until the process is gone, and
// destroying a condition variable waits for who waits.
std::mutex& mu = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
// State below is protected by mu.
double latency_us = 0, bytes_per_us = 0;
double link_free_us[2] = {0, 0};
bool held = false;
int capturing = 0;
int contexts = 0, streams_made = 0, streams_alive = 0, events_alive = 0;
std::map<std::string, Failing> failing;
std::map<std::string, int> calls;
std::set<std::string> silent;  // functions that do not return
int unanswered = 0;            // calls of these
size_t pending_max = 0;        // operations of one stream
int waited = 0;                // calls that waited for a stream to take another
std::map<std::byte*, size_t> registered;
std::map<unsigned long long, size_t> allocated;
std::set<void*> modules;
struct Stream;
std::set<Stream*>& streams = *new std::set<Stream*>;  // but for the default one
int wrong_crcs = 0;
std::vector<Done> log_;

thread_local std::vector<void*> current;

struct Stream {
    std::deque<Work> queue;
    size_t pending = 0;  // operations of these, a batch as one
    size_t records = 0;  // events among them
    bool busy = false, closing = false;
    double now_us = 0;
    uint64_t id = 0;
    std::thread thread;

    Stream() : thread([this] { run(); }) {}
    ~Stream() {
        {
            const std::lock_guard lock(mu);
            closing = true;
        }
        changed.notify_all();
        thread.join();
    }

    bool may_begin() const {
        if (queue.empty()) return false;
        const Work& work = queue.front();
        if (work.kind == kWait) return work.event->done(work.number);
        return !(held && (work.kind == kToHost || work.kind == kToDevice));
    }

    void run() {
        std::unique_lock lock(mu);
        for (;;) {
            changed.wait(lock, [&] { return may_begin() || (closing && queue.empty()); });
            if (queue.empty()) return;
            const Work work = queue.front();
            busy = true;
            lock.unlock();
            if (work.kind == kLaunch)
                work.launched();
            else if (work.kind == kKernel)
                std::memset(work.target, work.value, work.nbytes);
            else if (work.nbytes > 0)
                std::memcpy(work.target, work.source, work.nbytes);
            lock.lock();
            finish(work);
            queue.pop_front();
            if (!work.follows) --pending;
            if (work.kind == kRecord) --records;
            busy = false;
            changed.notify_all();
        }
    }

    void finish(const Work& work) {
        double begin = now_us, took = work.took_us;
        if (work.kind == kWait) now_us = std::max(now_us, work.event->at_us);
        if (work.kind == kRecord) {
            work.event->pending.erase(work.number);
            work.event->at_us = now_us;
        }
        if (work.kind == kToHost || work.kind == kToDevice) {
            begin = std::max(begin, link_free_us[work.kind]);
            const double rate = work.pinned ? bytes_per_us : bytes_per_us / 2;
            took = (work.follows ? 0 : latency_us) +
                   (rate > 0 ? static_cast<double>(work.nbytes) / rate : 0);
            link_free_us[work.kind] = begin + took;
        }
        if (work.kind == kWait || work.kind == kRecord) return;
        now_us = begin + took;
        log_.push_back({work.kind, id, begin, now_us, work.nbytes});
    }
};

Stream* default_stream() {
    static Stream* const stream = new Stream;  // lives as long as the process, as the real one does
    return stream;
}

Stream* of(void* stream) {
    return stream == nullptr ? default_stream() : static_cast<Stream*>(stream);
}

// A device that is lost ends what has begun or may begin, and carries out nothing more of what is
// queued: its memory may be freed when the error is known.
void lose(std::unique_lock<std::mutex>& lock) {
    const auto here = std::this_thread::get_id();
    const auto of_all = [](auto what) {
        for (Stream* stream : streams) what(*stream);
        what(*default_stream());
    };
    const auto goes_on = [&] {
        bool found = false;
        of_all([&](const Stream& stream) {
            found =
                found || (stream.thread.get_id() != here && (stream.busy || stream.may_begin()));
        });
        return found;
    };
    changed.wait(lock, [&] { return !goes_on(); });
    of_all([](Stream& stream) {
        for (Work& work : stream.queue) {
            work.nbytes = 0;
            if (work.kind == kLaunch) work.launched = [] {};
        }
    });
}

// Counts the call, and says what it shall fail with.
int enter(const char* name, bool needs_context = true) {
    std::unique_lock lock(mu);
    ++calls[name];
    if (silent.count(name) > 0) {
        ++unanswered;
        changed.notify_all();
        changed.wait(lock, [&] { return silent.count(name) == 0; });
        --unanswered;
    }
    if (needs_context && current.empty()) return kInvalidContext;
    const auto found = failing.find(name);
    if (found == failing.end()) return kSuccess;
    Failing& failure = found->second;
    const bool meant =
        failure.caller == std::thread::id{} || failure.caller == std::this_thread::get_id();
    if (!meant) return kSuccess;
    if (failure.after > 0) {
        --failure.after;
        return kSuccess;
    }
    if (failure.times == 0) return kSuccess;
    if (failure.times > 0) --failure.times;
    ++failure.failed;
    const int result = failure.result;
    if (failure.times < 0 && result == kIllegalAddress) lose(lock);
    return result;
}

void queue(void* stream, Work work) {
    Stream& taking = *of(stream);
    const bool records = work.kind == kRecord;
    const auto is_full = [&] {
        return (!work.follows && taking.pending == kPendingMax) ||
               (records && taking.records == kRecordsMax);
    };
    {
        std::unique_lock lock(mu);
        if (is_full()) {
            ++waited;
            changed.wait(lock, [&] { return !is_full(); });
        }
        if (records) ++taking.records;
        if (!work.follows) pending_max = std::max(pending_max, ++taking.pending);
        taking.queue.push_back(work);
    }
    changed.notify_all();
}

void drain(Stream* stream) {
    std::unique_lock lock(mu);
    changed.wait(lock, [&] { return stream->queue.empty() && !stream->busy; });
}

bool is_pinned(const std::byte* memory, size_t nbytes) {
    const std::lock_guard lock(mu);
    for (const auto& [begin, size] : registered)
        if (memory >= begin && memory + nbytes <= begin + size) return true;
    return false;
}

// An event as callers know it.
std::shared_ptr<Event> event_of(void* event) {
    return *static_cast<std::shared_ptr<Event>*>(event);
}

int copy(const char* name, Kind kind, void* target, const void* source, size_t nbytes,
         void* stream) {
    if (const int result = enter(name)) return result;
    if (target == nullptr || source == nullptr) return kInvalidValue;
    Work work{kind};
    work.target = static_cast<std::byte*>(target);
    work.source = static_cast<const std::byte*>(source);
    work.nbytes = nbytes;
    work.pinned = is_pinned(kind == kToHost ? work.target : work.source, nbytes);
    queue(stream, work);
    if (!work.pinned) drain(of(stream));  // from pageable memory the caller waits
    return kSuccess;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int cuInit(unsigned) { return enter("cuInit", false); }

EXPORT int cuDriverGetVersion(int* version) {
    *version = 12040;
    return enter("cuDriverGetVersion", false);
}

EXPORT int cuGetErrorName(int result, const char** text) {
    *text = result == 2                 ? "CUDA_ERROR_OUT_OF_MEMORY"
            : result == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                        : "CUDA_ERROR_UNKNOWN";
    return kSuccess;
}

EXPORT int cuGetErrorString(int result, const char** text) {
    *text = result == 2                 ? "out of memory"
            : result == kIllegalAddress ? "an illegal memory access"
                                        : "unknown";
    return kSuccess;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
    if (const int result = enter("cuDeviceGet", false)) return result;
    *device = ordinal;
    return ordinal < 4 ? kSuccess : 101;
}

EXPORT int cuDeviceGetPCIBusId(char* text, int nbytes, int device) {
    if (const int result = enter("cuDeviceGetPCIBusId", false)) return result;
    std::strncpy(text, ("0000:0" + std::to_string(device) + ":00.0").c_str(),
                 static_cast<size_t>(nbytes));
    return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
    if (const int result = enter("cuDevicePrimaryCtxRetain", false)) return result;
    const std::lock_guard lock(mu);
    ++contexts;
    *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
    return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int) {
    if (const int result = enter("cuDevicePrimaryCtxRelease_v2", false)) return result;
    const std::lock_guard lock(mu);
    --contexts;
    return kSuccess;
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
    if (const int result = enter("cuCtxPushCurrent_v2", false)) return result;
    current.push_back(context);
    return kSuccess;
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
    if (current.empty()) return kInvalidContext;
    *context = current.back();
    current.pop_back();
    return kSuccess;
}

EXPORT int cuMemHostRegister_v2(void* memory, size_t nbytes, unsigned) {
    if (const int result = enter("cuMemHostRegister_v2")) return result;
    const std::lock_guard lock(mu);
    return registered.emplace(static_cast<std::byte*>(memory), nbytes).second ? kSuccess : 712;
}

EXPORT int cuMemHostUnregister(void* memory) {
    if (const int result = enter("cuMemHostUnregister")) return result;
    const std::lock_guard lock(mu);
    return registered.erase(static_cast<std::byte*>(memory)) == 1 ? kSuccess : 713;
}

EXPORT int cuStreamCreate(void** stream, unsigned) {
    if (const int result = enter("cuStreamCreate")) return result;
    auto* made = new Stream;
    const std::lock_guard lock(mu);
    made->id = static_cast<uint64_t>(++streams_made);
    ++streams_alive;
    streams.insert(made);
    *stream = made;
    return kSuccess;
}

EXPORT int cuStreamSynchronize(void* stream) {
    if (const int result = enter("cuStreamSynchronize")) return result;
    drain(of(stream));
    return kSuccess;
}

EXPORT int cuStreamDestroy_v2(void* stream) {
    if (const int result = enter("cuStreamDestroy_v2")) return result;
    {
        const std::lock_guard lock(mu);
        streams.erase(static_cast<Stream*>(stream));
    }
    delete static_cast<Stream*>(stream);
    const std::lock_guard lock(mu);
    --streams_alive;
    return kSuccess;
}

EXPORT int cuStreamIsCapturing(void*, int* status) {
    if (const int result = enter("cuStreamIsCapturing")) return result;
    const std::lock_guard lock(mu);
    *status = capturing;
    return kSuccess;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
    static thread_local int mine = 0;
    std::swap(mine, *mode);
    return enter("cuThreadExchangeStreamCaptureMode", false);
}

EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    if (const int result = enter("cuStreamWaitEvent")) return result;
    Work work{kWait};
    work.event = event_of(event);
    {
        const std::lock_guard lock(mu);
        work.number = work.event->asked;
    }
    queue(stream, work);
    return kSuccess;
}

EXPORT int cuEventCreate(void** event, unsigned) {
    if (const int result = enter("cuEventCreate")) return result;
    const std::lock_guard lock(mu);
    ++events_alive;
    *event = new std::shared_ptr<Event>(new Event);
    return kSuccess;
}

EXPORT int cuEventDestroy_v2(void* event) {
    if (const int result = enter("cuEventDestroy_v2")) return result;
    const std::lock_guard lock(mu);
    --events_alive;
    delete static_cast<std::shared_ptr<Event>*>(event);
    return kSuccess;
}

EXPORT int cuEventRecord(void* event, void* stream) {
    if (const int result = enter("cuEventRecord")) return result;
    Work work{kRecord};
    work.event = event_of(event);
    {
        const std::lock_guard lock(mu);
        work.number = ++work.event->asked;
        work.event->pending.insert(work.number);
    }
    queue(stream, work);
    return kSuccess;
}

EXPORT int cuEventQuery(void* event) {
    if (const int result = enter("cuEventQuery")) return result;
    const std::lock_guard lock(mu);
    const auto asked = event_of(event);
    return asked->done(asked->asked) ? kSuccess : kNotReady;
}

EXPORT int cuEventSynchronize(void* event) {
    if (const int result = enter("cuEventSynchronize")) return result;
    const auto asked = event_of(event);
    std::unique_lock lock(mu);
    changed.wait(lock, [&] { return asked->done(asked->asked); });
    return kSuccess;
}

EXPORT int cuEventElapsedTime(float* ms, void* begin, void* end) {
    if (const int result = enter("cuEventElapsedTime")) return result;
    const std::lock_guard lock(mu);
    *ms = static_cast<float>((event_of(end)->at_us - event_of(begin)->at_us) / 1e3);
    return kSuccess;
}

EXPORT int cuMemcpyDtoHAsync_v2(void* target, unsigned long long source, size_t nbytes,
                                void* stream) {
    return copy("cuMemcpyDtoHAsync_v2", kToHost, target, reinterpret_cast<const void*>(source),
                nbytes, stream);
}

struct CopyAttributes {
    int source_order, hints[4];
    unsigned flags;
};

EXPORT int cuMemcpyBatchAsync(unsigned long long* targets, unsigned long long* sources,
                              size_t* sizes, size_t count, CopyAttributes* attributes,
                              size_t* first_copies, size_t attributes_count, size_t* failed,
                              void* stream) {
    if (const int result = enter("cuMemcpyBatchAsync")) return result;
    if (stream == nullptr || count == 0 || attributes_count != 1 || first_copies[0] != 0 ||
        attributes->source_order != 1 || attributes->flags > 1)
        return kInvalidValue;
    for (*failed = 0; *failed < count; ++*failed) {
        auto* target = reinterpret_cast<std::byte*>(targets[*failed]);
        if (!is_pinned(target, sizes[*failed])) return kInvalidValue;
        Work work{kToHost};
        work.target = target;
        work.source = reinterpret_cast<const std::byte*>(sources[*failed]);
        work.nbytes = sizes[*failed];
        work.follows = *failed > 0;
        queue(stream, work);
    }
    return kSuccess;
}

EXPORT int cuMemcpyHtoDAsync_v2(unsigned long long target, const void* source, size_t nbytes,
                                void* stream) {
    return copy("cuMemcpyHtoDAsync_v2", kToDevice, reinterpret_cast<void*>(target), source, nbytes,
                stream);
}

EXPORT int cuMemcpyDtoDAsync_v2(unsigned long long target, unsigned long long source, size_t nbytes,
                                void* stream) {
    if (const int result = enter("cuMemcpyDtoDAsync_v2")) return result;
    Work work{kOnDevice};
    work.target = reinterpret_cast<std::byte*>(target);
    work.source = reinterpret_cast<const std::byte*>(source);
    work.nbytes = nbytes;
    queue(stream, work);
    return kSuccess;
}

EXPORT int cuMemAlloc_v2(unsigned long long* address, size_t nbytes) {
    if (const int result = enter("cuMemAlloc_v2")) return result;
    if (nbytes == 0) return kInvalidValue;
    // As a device's: aligned to 256 bytes, and here to no more.
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(512, (nbytes + 1023) / 512 * 512));
    *address = reinterpret_cast<unsigned long long>(memory + 256);
    const std::lock_guard lock(mu);
    allocated[*address] = nbytes;
    return kSuccess;
}

EXPORT int cuMemFree_v2(unsigned long long address) {
    if (const int result = enter("cuMemFree_v2")) return result;
    std::unique_lock lock(mu);
    if (allocated.erase(address) != 1) return kInvalidValue;
    changed.wait(lock, [] {
        return std::all_of(streams.begin(), streams.end(), [](const Stream* stream) {
            return stream->queue.empty() && !stream->busy;
        });
    });
    std::free(reinterpret_cast<std::byte*>(address) - 256);
    return kSuccess;
}

EXPORT int cuModuleLoadData(void** module, const void* image) {
    if (const int result = enter("cuModuleLoadData")) return result;
    const std::string text = static_cast<const char*>(image);
    if (text.rfind(".version", 0) != 0) return 218;
    auto* made = new std::string(text);
    const std::lock_guard lock(mu);
    modules.insert(made);
    *module = made;
    return kSuccess;
}

EXPORT int cuModuleUnload(void* module) {
    if (const int result = enter("cuModuleUnload")) return result;
    const std::lock_guard lock(mu);
    if (modules.erase(module) != 1) return kInvalidValue;
    delete static_cast<std::string*>(module);
    return kSuccess;
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
    if (const int result = enter("cuModuleGetFunction")) return result;
    const auto& text = *static_cast<std::string*>(module);
    if (text.find(".entry " + std::string(name) + "(") == std::string::npos) return 500;
    *function = module;
    return kSuccess;
}

EXPORT int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          void* stream, void** parameters, void** extra) {
    if (const int result = enter("cuLaunchKernel")) return result;
    namespace kernel = fastckpt::gpu_crc32;
    int wrong = 0;
    {
        const std::lock_guard state(mu);
        if (modules.count(function) != 1) return kInvalidValue;
        wrong = wrong_crcs;
    }
    if (grid_x == 0 || grid_y * grid_z * block_y * block_z != 1 || shared != 0 ||
        block_x != kernel::kThreads || extra != nullptr)
        return kInvalidValue;
    const auto given = *static_cast<const kernel::Work*>(parameters[0]);
    Work work{kLaunch};
    work.launched = [given, grid_x, wrong] {
        kernel::run(given, grid_x);
        if (wrong != 0) ++*reinterpret_cast<kernel::Word*>(given.states);
    };
    queue(stream, work);
    return kSuccess;
}

// --- for tests

// Memory of the device that is not freed, its bytes, modules that are loaded.
EXPORT void stub_memory(uint64_t* out) {
    const std::lock_guard lock(mu);
    out[0] = allocated.size();
    out[1] = 0;
    for (const auto& [address, nbytes] : allocated) out[1] += nbytes;
    out[2] = modules.size();
}

// Whether the calling thread has a context.
EXPORT int stub_has_context() { return current.empty() ? 0 : 1; }

// Whether kernels compute something else.
EXPORT void stub_miscalculate(int wrong) {
    const std::lock_guard lock(mu);
    wrong_crcs = wrong;
}

EXPORT void stub_configure(double new_latency_us, double new_bytes_per_us) {
    const std::lock_guard lock(mu);
    latency_us = new_latency_us;
    bytes_per_us = new_bytes_per_us;
    link_free_us[0] = link_free_us[1] = default_stream()->now_us = 0;
    log_.clear();
    pending_max = 0;
    waited = 0;
    calls.clear();
    failing.clear();
}

// After so many calls, so many (-1: all) fail with a result; with `here`, of the calls that the
// calling thread makes.
EXPORT void stub_fail(const char* name, int after, int times, int result, int here) {
    const std::lock_guard lock(mu);
    failing[name] = {after, times, result, here ? std::this_thread::get_id() : std::thread::id{}};
}

// How many calls have failed since stub_fail() asked for it.
EXPORT int stub_failed(const char* name) {
    const std::lock_guard lock(mu);
    const auto found = failing.find(name);
    return found == failing.end() ? 0 : found->second.failed;
}

// While silent, calls of a function do not return, as those that wait for the driver's locks.
EXPORT void stub_silence(const char* name, int is_silent) {
    {
        const std::lock_guard lock(mu);
        if (is_silent != 0)
            silent.insert(name);
        else
            silent.erase(name);
    }
    changed.notify_all();
}

// Waits for so many calls that do not return.
EXPORT void stub_await_silence(int count) {
    std::unique_lock lock(mu);
    changed.wait(lock, [count] { return unanswered >= count; });
}

// The most operations that a stream held at a time, and how many calls waited for a full one.
EXPORT void stub_pending(uint64_t* out) {
    const std::lock_guard lock(mu);
    out[0] = pending_max;
    out[1] = static_cast<uint64_t>(waited);
}

// While held, no copy begins.
EXPORT void stub_hold(int hold) {
    {
        const std::lock_guard lock(mu);
        held = hold != 0;
    }
    changed.notify_all();
}

EXPORT void stub_capture(int status) {
    const std::lock_guard lock(mu);
    capturing = status;
}

// A kernel that fills memory and takes so long.
EXPORT void stub_kernel(void* stream, void* target, size_t nbytes, int value, double took_us) {
    Work work{kKernel};
    work.target = static_cast<std::byte*>(target);
    work.nbytes = nbytes;
    work.value = value;
    work.took_us = took_us;
    queue(stream, work);
}

// A stream of whoever computes; not counted as alive.
EXPORT void* stub_stream() {
    auto* made = new Stream;
    const std::lock_guard lock(mu);
    made->id = static_cast<uint64_t>(++streams_made);
    return made;
}

EXPORT void stub_stream_free(void* stream) { delete static_cast<Stream*>(stream); }

EXPORT double stub_synchronize(void* stream) {
    drain(of(stream));
    const std::lock_guard lock(mu);
    return of(stream)->now_us;
}

EXPORT int stub_calls(const char* name) {
    const std::lock_guard lock(mu);
    return calls[name];
}

// Copies up to `count` entries of the log; returns how many there are.
EXPORT size_t stub_log(Done* out, size_t count) {
    const std::lock_guard lock(mu);
    std::copy_n(log_.begin(), std::min(count, log_.size()), out);
    return log_.size();
}

// What is alive: contexts, streams, events, registered ranges, registered bytes.
EXPORT void stub_alive(uint64_t* out) {
    const std::lock_guard lock(mu);
    uint64_t nbytes = 0;
    for (const auto& [begin, size] : registered) nbytes += size;
    const uint64_t values[] = {static_cast<uint64_t>(contexts),
                               static_cast<uint64_t>(streams_alive),
                               static_cast<uint64_t>(events_alive), registered.size(), nbytes};
    std::copy(std::begin(values), std::end(values), out);
}
