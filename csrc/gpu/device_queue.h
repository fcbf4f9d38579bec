// Copies between a GPU and the host, on a separate stream from the computation. It knows the order
// of streams, but not blocks, files or tensors.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/arena.h"
#include "gpu/cuda_shim.h"
#include "mutex.h"

namespace fastckpt {

// Thrown if the driver refuses; `result` is its code.
struct DeviceError : std::runtime_error {
    DeviceError(const std::string& text, cuda::Result code)
        : std::runtime_error(text), result(code) {}
    cuda::Result result;
};

// Thrown if a stream is being captured into a CUDA graph: then it has no order with other work.
struct StreamCaptured : DeviceError {
    using DeviceError::DeviceError;
};

// Does copies in the order in which they were queued. A stream takes 56 events such as these, and
// 1,021 calls that copy, a batch of thousands among them (no document says so; an H100 with driver
// 580 does, benchmarks/results/gpu-2026-11-26/queue.txt); a further one waits, in the call, until
// the GPU has done one. So whoever must not wait queues few and large ones. Callable from any
// thread. Streams are given by torch's number (cuda_stream; 0 is the legacy default stream).
class DeviceQueue : public Pinner, public std::enable_shared_from_this<DeviceQueue> {
  public:
    // `ordinal` is torch's number of the device in this process. Throws DeviceError.
    DeviceQueue(std::shared_ptr<const cuda::Driver> driver, int ordinal);
    ~DeviceQueue() override;
    // Frees everything; nothing may be in flight, and later calls fail. Idempotent.
    void close();
    DeviceQueue(const DeviceQueue&) = delete;
    DeviceQueue& operator=(const DeviceQueue&) = delete;

    // Makes the device's primary context this thread's as long as this lives, for calls of the
    // driver or of libraries that use it.
    class Current {
      public:
        explicit Current(const DeviceQueue& queue);
        ~Current();
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;
        // Unless it is kSuccess, there is no context.
        cuda::Result result() const { return result_; }

      private:
        const cuda::Driver& driver_;
        const cuda::Result result_;
        int mode_ = cuda::kCaptureModeRelaxed;
    };

    // A place in a stream, reached when all work before it is done. Its event is used again when
    // the last copy of it is gone, which calls the driver only after close().
    using Mark = std::shared_ptr<cuda::EventTag>;

    // How long a stream waited for copies.
    class Wait {
      public:
        explicit Wait(std::shared_ptr<DeviceQueue> queue) : queue_(std::move(queue)) {}
        Wait(const Wait&) = delete;
        Wait& operator=(const Wait&) = delete;
        // Negative while it still waits.
        double seconds() const;

      private:
        friend class DeviceQueue;
        const std::shared_ptr<DeviceQueue> queue_;
        Mark before_, after_;
    };

    // Makes copies queued from now on wait for the work that the stream has now. Throws
    // DeviceError, StreamCaptured.
    void follow(uint64_t stream);
    // Makes work given to the stream from now on wait for all copies queued so far; the caller does
    // not wait. Throws DeviceError, StreamCaptured. Copies queued later cannot be waited for: an
    // event that is not yet recorded makes no stream wait (cuStreamWaitEvent), and a wait for a
    // word of memory (cuStreamWaitValue32) makes an order that "is not visible to CUDA" and "may
    // deadlock the application" (CUDA Driver API, Stream Memory Operations), as where streams share
    // one channel (CUDA_DEVICE_MAX_CONNECTIONS=1): the copies would stand behind the wait for them.
    std::unique_ptr<Wait> lead(uint64_t stream);

    struct CopyToHost {
        std::byte* target;
        uint64_t source;
        size_t nbytes;
    };

    // These report the driver's result. Host memory stays valid until a later mark is reached.
    cuda::Result copy_to_host(std::byte* target, uint64_t source, size_t nbytes);
    // Uses one call for all if the driver has it: small copies cost less than their calls.
    cuda::Result copy_to_host(const std::vector<CopyToHost>& copies);
    cuda::Result copy_to_device(uint64_t target, const std::byte* source, size_t nbytes);
    cuda::Result copy_on_device(uint64_t target, uint64_t source, size_t nbytes);
    // Parameters are copied before this returns.
    cuda::Result launch(cuda::Function function, unsigned blocks, unsigned threads,
                        void** parameters);
    // Sets `made` to null if it fails.
    cuda::Result mark(Mark* made);
    // Marks where the next copies begin: by the last mark, if the device has not reached it and
    // nothing was queued since, which saves an operation.
    cuda::Result mark_begin(Mark* made);
    // kNotReady if it was not reached yet. If this or wait() reports an error, no copy queued
    // before is under way any more.
    cuda::Result query(const Mark& mark);
    // Sleeps until it is reached.
    cuda::Result wait(const Mark& mark);
    // Waits for all copies queued, if there is no mark to wait for.
    cuda::Result wait_all();
    // The time between two marks that were reached; 0 if it is not known.
    double seconds(const Mark& begin, const Mark& end);

    // The device's name on its bus, such as "0000:1b:00.0"; empty if it is not known.
    std::string bus_id();
    const cuda::Driver& driver() const { return *driver_; }
    // Throws a DeviceError that names what failed, unless the result is kSuccess.
    void require(cuda::Result result, const char* what) const;

    int pin(void* memory, size_t nbytes) override;
    void unpin(void* memory) override;
    int node() override;

  private:
    void require_uncaptured(cuda::Stream stream) const;
    void record(cuda::Stream stream, Mark* made);
    cuda::Result take(Mark* made);
    cuda::Result settled(cuda::Result result);
    void discard(cuda::Event event);
    void note_work();
    cuda::Result batch(const std::vector<CopyToHost>& copies);

    const std::shared_ptr<const cuda::Driver> driver_;
    const int ordinal_;
    cuda::Device device_ = 0;
    cuda::Context context_ = nullptr;
    cuda::Stream stream_ = nullptr;
    Mutex mu_;
    std::vector<cuda::Event> idle_ GUARDED_BY(mu_);
    std::weak_ptr<cuda::EventTag> last_ GUARDED_BY(mu_);  // a mark after which nothing was queued
    std::atomic<bool> closed_{false};
    std::atomic<bool> batches_{true};  // until the driver refuses one
};

}  // namespace fastckpt
