// Copies between one GPU and the host, on a stream of our own beside those that compute. Knows the
// order of streams, and which memory is pinned; it does not know blocks, files or tensors.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/arena.h"
#include "gpu/cuda_shim.h"

namespace fastckpt {

// The driver refused; `result` is its code.
struct DeviceError : std::runtime_error {
    DeviceError(const std::string& text, cuda::Result code)
        : std::runtime_error(text), result(code) {}
    cuda::Result result;
};

// A stream is being captured into a CUDA graph: it cannot be ordered with what is not captured.
struct StreamCaptured : DeviceError {
    using DeviceError::DeviceError;
};

// Copies are done in the order in which they were queued. Callable from any thread; what is given a
// stream takes its number as torch tells it (cuda_stream; 0 is the legacy default stream).
class DeviceQueue : public Pinner, public std::enable_shared_from_this<DeviceQueue> {
  public:
    // For the device that torch numbers so in this process. Throws DeviceError.
    DeviceQueue(std::shared_ptr<const cuda::Driver> driver, int ordinal);
    ~DeviceQueue() override;
    // Gives everything back; what is called from then on fails. Nothing is in flight. Idempotent.
    void close();
    DeviceQueue(const DeviceQueue&) = delete;
    DeviceQueue& operator=(const DeviceQueue&) = delete;

    // The device's primary context on this thread, for as long as this lives: for calls of the
    // driver, or of a library upon it, that are not among those below.
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

    // A place in a stream: reached once all before it is done.
    using Mark = cuda::Event;

    // How long a stream was kept waiting.
    class Wait {
      public:
        explicit Wait(std::shared_ptr<DeviceQueue> queue) : queue_(std::move(queue)) {}
        ~Wait();
        Wait(const Wait&) = delete;
        Wait& operator=(const Wait&) = delete;
        // Negative while it still waits.
        double seconds() const;

      private:
        friend class DeviceQueue;
        const std::shared_ptr<DeviceQueue> queue_;
        Mark before_ = nullptr, after_ = nullptr;
    };

    // What is queued from now on begins when the stream has done what it was given so far. Throws
    // DeviceError; StreamCaptured.
    void follow(uint64_t stream);
    // What the stream is given from now on begins when all that was queued so far is done; the
    // caller does not wait. Throws DeviceError; StreamCaptured.
    std::unique_ptr<Wait> lead(uint64_t stream);

    struct CopyToHost {
        std::byte* target;
        uint64_t source;
        size_t nbytes;
    };

    // These report the driver's result. Host memory stays valid until a later mark is reached.
    cuda::Result copy_to_host(std::byte* target, uint64_t source, size_t nbytes);
    // In one call where the driver has one for that: small copies cost less than their calls.
    cuda::Result copy_to_host(const std::vector<CopyToHost>& copies);
    cuda::Result copy_to_device(uint64_t target, const std::byte* source, size_t nbytes);
    cuda::Result copy_on_device(uint64_t target, uint64_t source, size_t nbytes);
    // Parameters are copied before this returns.
    cuda::Result launch(cuda::Function function, unsigned blocks, unsigned threads,
                        void** parameters);
    // Leaves a null mark where it fails.
    cuda::Result mark(Mark* made);
    // kNotReady if it was not reached yet.
    cuda::Result query(Mark mark);
    // Waits, asleep. On any error what was queued may never be done: the device is lost.
    cuda::Result wait(Mark mark);
    // Waits for all that was queued, where no mark is to be had.
    cuda::Result wait_all();
    // Gives the mark back.
    void discard(Mark mark);
    // From one mark, which was reached, to another.
    double seconds(Mark begin, Mark end);

    // The name on its bus, such as "0000:1b:00.0"; empty if unknown.
    std::string bus_id();
    const cuda::Driver& driver() const { return *driver_; }
    // Throws DeviceError unless it is kSuccess, naming what failed.
    void require(cuda::Result result, const char* what) const;

    int pin(void* memory, size_t nbytes) override;
    void unpin(void* memory) override;
    int node() override;

  private:
    void require_uncaptured(cuda::Stream stream) const;
    void record(cuda::Stream stream, Mark* made);
    cuda::Result take(Mark* mark);
    cuda::Result batch(const std::vector<CopyToHost>& copies);

    const std::shared_ptr<const cuda::Driver> driver_;
    const int ordinal_;
    cuda::Device device_ = 0;
    cuda::Context context_ = nullptr;
    cuda::Stream stream_ = nullptr;
    std::mutex mu_;
    std::vector<Mark> idle_;  // under mu_
    std::atomic<bool> closed_{false};
    std::atomic<bool> batches_{true};  // until the driver refuses one
};

}  // namespace fastckpt
