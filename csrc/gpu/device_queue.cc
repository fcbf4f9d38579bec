// Streams and events of one device: see device_queue.h.
#include "gpu/device_queue.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <utility>

namespace fastckpt {

// The former context becomes current again afterwards, since the thread may be torch's. The capture
// mode is relaxed for this thread, since otherwise many calls would break a capture of another one.
DeviceQueue::Current::Current(const DeviceQueue& queue)
    : driver_(*queue.driver_),
      result_(queue.closed_ ? cuda::kDeinitialized : driver_.context_push(queue.context_)) {
    if (result_ == cuda::kSuccess) driver_.exchange_capture_mode(&mode_);
}

DeviceQueue::Current::~Current() {
    if (result_ != cuda::kSuccess) return;
    cuda::Context popped = nullptr;
    driver_.exchange_capture_mode(&mode_);
    driver_.context_pop(&popped);
}

namespace {
cuda::Stream as_stream(uint64_t stream) { return reinterpret_cast<cuda::Stream>(stream); }
}  // namespace

DeviceQueue::DeviceQueue(std::shared_ptr<const cuda::Driver> driver, int ordinal)
    : driver_(std::move(driver)), ordinal_(ordinal) {
    require(driver_->device_get(&device_, ordinal), "device");
    require(driver_->primary_context_retain(&context_, device_), "primary context");
    const Current current(*this);
    cuda::Result result = current.result();
    if (result == cuda::kSuccess)
        result = driver_->stream_create(&stream_, cuda::kStreamNonBlocking);
    if (result != cuda::kSuccess) {
        driver_->primary_context_release(device_);
        require(result, "stream");
    }
}

DeviceQueue::~DeviceQueue() { close(); }

// At exit the driver may have shut down: then it refuses all calls, and nothing is left to free.
void DeviceQueue::close() {
    {
        const Current current(*this);
        const Lock lock(mu_);
        if (closed_.exchange(true)) return;
        for (const cuda::Event event : idle_) driver_->event_destroy(event);
        idle_.clear();
        driver_->stream_destroy(stream_);
    }
    driver_->primary_context_release(device_);
}

void DeviceQueue::require(cuda::Result result, const char* what) const {
    if (result == cuda::kSuccess) return;
    throw DeviceError(
        "cuda:" + std::to_string(ordinal_) + ": " + what + ": " + driver_->text(result), result);
}

cuda::Result DeviceQueue::take(Mark* made) {
    cuda::Event event = nullptr;
    {
        const Lock lock(mu_);
        if (!idle_.empty()) {
            event = idle_.back();
            idle_.pop_back();
        }
    }
    if (event == nullptr) {
        const cuda::Result result = driver_->event_create(&event, cuda::kEventBlockingSync);
        if (result != cuda::kSuccess) return result;
    }
    // It lets go of the queue when it is called: last_ may keep it for longer.
    *made = Mark(event, [queue = shared_from_this()](cuda::Event used) mutable {
        std::exchange(queue, nullptr)->discard(used);
    });
    return cuda::kSuccess;
}

void DeviceQueue::require_uncaptured(cuda::Stream stream) const {
    int capturing = 0;
    require(driver_->stream_is_capturing(stream, &capturing), "stream");
    if (capturing != 0)
        throw StreamCaptured(
            "cuda:" + std::to_string(ordinal_) + ": the stream is being captured into a CUDA graph",
            cuda::kSuccess);
}

void DeviceQueue::record(cuda::Stream stream, Mark* made) {
    require(take(made), "event");
    require(driver_->event_record(made->get(), stream), "order of streams");
}

void DeviceQueue::follow(uint64_t stream) {
    const Current current(*this);
    require(current.result(), "context");
    require_uncaptured(as_stream(stream));
    note_work();
    Mark mark;  // the stream waits for the event as it was recorded before that call
    record(as_stream(stream), &mark);
    require(driver_->stream_wait_event(stream_, mark.get(), 0), "order of streams");
}

std::unique_ptr<DeviceQueue::Wait> DeviceQueue::lead(uint64_t stream) {
    const Current current(*this);
    require(current.result(), "context");
    require_uncaptured(as_stream(stream));
    auto wait = std::make_unique<Wait>(shared_from_this());
    record(as_stream(stream), &wait->before_);
    {
        Mark mark;
        record(stream_, &mark);
        require(driver_->stream_wait_event(as_stream(stream), mark.get(), 0), "order of streams");
    }
    record(as_stream(stream), &wait->after_);
    return wait;
}

double DeviceQueue::Wait::seconds() const {
    return queue_->query(after_) == cuda::kNotReady ? -1 : queue_->seconds(before_, after_);
}

cuda::Result DeviceQueue::copy_to_host(std::byte* target, uint64_t source, size_t nbytes) {
    const Current current(*this);
    if (current.result() != cuda::kSuccess) return current.result();
    note_work();
    return driver_->copy_to_host(target, source, nbytes, stream_);
}

cuda::Result DeviceQueue::copy_to_host(const std::vector<CopyToHost>& copies) {
    if (copies.size() > 1 && driver_->copy_batch != nullptr && batches_) {
        // It may have failed because of unpinned memory or a limit: copy all again, one by one.
        if (batch(copies) == cuda::kSuccess) return cuda::kSuccess;
        batches_ = false;
    }
    cuda::Result result = cuda::kSuccess;
    for (const CopyToHost& copy : copies)
        if (result == cuda::kSuccess) result = copy_to_host(copy.target, copy.source, copy.nbytes);
    return result;
}

cuda::Result DeviceQueue::batch(const std::vector<CopyToHost>& copies) {
    const Current current(*this);
    if (current.result() != cuda::kSuccess) return current.result();
    note_work();
    std::vector<cuda::DeviceAddress> targets, sources;
    std::vector<size_t> sizes;
    for (const CopyToHost& copy : copies) {
        targets.push_back(reinterpret_cast<uint64_t>(copy.target));
        sources.push_back(copy.source);
        sizes.push_back(copy.nbytes);
    }
    cuda::CopyAttributes attributes{
        cuda::kSourceInStreamOrder, {0, 0}, {0, 0}, cuda::kCopyBesideCompute};
    size_t first = 0, failed = 0;
    return driver_->copy_batch(targets.data(), sources.data(), sizes.data(), copies.size(),
                               &attributes, &first, 1, &failed, stream_);
}

cuda::Result DeviceQueue::copy_to_device(uint64_t target, const std::byte* source, size_t nbytes) {
    const Current current(*this);
    if (current.result() != cuda::kSuccess) return current.result();
    note_work();
    return driver_->copy_to_device(target, source, nbytes, stream_);
}

cuda::Result DeviceQueue::copy_on_device(uint64_t target, uint64_t source, size_t nbytes) {
    const Current current(*this);
    if (current.result() != cuda::kSuccess) return current.result();
    note_work();
    return driver_->copy_on_device(target, source, nbytes, stream_);
}

cuda::Result DeviceQueue::launch(cuda::Function function, unsigned blocks, unsigned threads,
                                 void** parameters) {
    const Current current(*this);
    if (current.result() != cuda::kSuccess) return current.result();
    note_work();
    return driver_->launch_kernel(function, blocks, 1, 1, threads, 1, 1, 0, stream_, parameters,
                                  nullptr);
}

cuda::Result DeviceQueue::mark(Mark* made) {
    const Current current(*this);
    if (current.result() != cuda::kSuccess) return current.result();
    const cuda::Result result = take(made);
    if (result != cuda::kSuccess) return result;
    const cuda::Result recorded = driver_->event_record(made->get(), stream_);
    if (recorded != cuda::kSuccess) made->reset();
    const Lock lock(mu_);
    last_ = *made;
    return recorded;
}

cuda::Result DeviceQueue::mark_begin(Mark* made) {
    {
        const Lock lock(mu_);
        *made = last_.lock();
    }
    if (*made != nullptr && query(*made) == cuda::kNotReady) return cuda::kSuccess;
    made->reset();
    return mark(made);
}

void DeviceQueue::note_work() {
    const Lock lock(mu_);
    last_.reset();
}

cuda::Result DeviceQueue::query(const Mark& mark) {
    const Current current(*this);
    if (current.result() != cuda::kSuccess) return current.result();
    return settled(driver_->event_query(mark.get()));
}

cuda::Result DeviceQueue::wait(const Mark& mark) {
    const Current current(*this);
    if (current.result() != cuda::kSuccess) return current.result();
    return settled(driver_->event_synchronize(mark.get()));
}

cuda::Result DeviceQueue::settled(cuda::Result result) {
    if (result != cuda::kSuccess && result != cuda::kNotReady)
        driver_->stream_synchronize(stream_);  // a device that is lost refuses at once
    return result;
}

cuda::Result DeviceQueue::wait_all() {
    const Current current(*this);
    return current.result() == cuda::kSuccess ? driver_->stream_synchronize(stream_)
                                              : current.result();
}

void DeviceQueue::discard(cuda::Event event) {
    const Lock lock(mu_);
    if (closed_)
        driver_->event_destroy(event);  // the driver finds its context by itself
    else
        idle_.push_back(event);
}

double DeviceQueue::seconds(const Mark& begin, const Mark& end) {
    const Current current(*this);
    float ms = 0;
    const bool known = current.result() == cuda::kSuccess &&
                       driver_->event_elapsed(&ms, begin.get(), end.get()) == cuda::kSuccess;
    return known ? static_cast<double>(ms) / 1e3 : 0;
}

std::string DeviceQueue::bus_id() {
    char text[32] = {};
    const auto result = driver_->device_pci_bus_id(text, sizeof text, device_);
    return result == cuda::kSuccess ? text : "";
}

// Reads the node from sysfs (sysfs-bus-pci); -1 if the machine has only one or does not tell.
int DeviceQueue::node() {
    std::string name = bus_id();
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    std::ifstream file("/sys/bus/pci/devices/" + name + "/numa_node");
    int found = -1;
    return file >> found ? found : -1;
}

int DeviceQueue::pin(void* memory, size_t nbytes) {
    const Current current(*this);
    if (current.result() != cuda::kSuccess) return current.result();
    return driver_->host_register(memory, nbytes, cuda::kHostRegisterPortable);
}

void DeviceQueue::unpin(void* memory) {
    const Current current(*this);
    if (current.result() == cuda::kSuccess) driver_->host_unregister(memory);
}

}  // namespace fastckpt
