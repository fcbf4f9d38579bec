// Memory that is owned: of a device, and of the host for copies to and from it. It knows how each
// is taken and given back; it does not know what is kept there.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "gpu/device_queue.h"

namespace fastckpt {

// Freed with this, for which the queue must be open; the driver then waits for what still uses it.
class DeviceMemory {
  public:
    // Throws DeviceError.
    DeviceMemory(std::shared_ptr<DeviceQueue> queue, size_t nbytes) : queue_(std::move(queue)) {
        const DeviceQueue::Current current(*queue_);
        queue_->require(current.result(), "context");
        queue_->require(queue_->driver().mem_alloc(&address_, nbytes), "memory");
    }
    ~DeviceMemory() {
        const DeviceQueue::Current current(*queue_);
        if (current.result() == cuda::kSuccess) queue_->driver().mem_free(address_);
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    uint64_t address() const { return address_; }

  private:
    const std::shared_ptr<DeviceQueue> queue_;
    cuda::DeviceAddress address_ = 0;
};

// Begins and ends on pages, as direct I/O wants it; pinned where that is possible, which is faster
// and no more.
class HostMemory {
  public:
    // Throws std::bad_alloc.
    HostMemory(std::shared_ptr<DeviceQueue> queue, size_t nbytes)
        : queue_(std::move(queue)),
          nbytes_((nbytes + kPage - 1) / kPage * kPage),
          data_(static_cast<std::byte*>(
              mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
        if (data_ == MAP_FAILED) throw std::bad_alloc();
        // As the arena: a child's copy-on-write would move what a device writes to.
        madvise(data_, nbytes_, MADV_DONTFORK);
        pinned_ = queue_->pin(data_, nbytes_) == cuda::kSuccess;
    }
    ~HostMemory() {
        if (pinned_) queue_->unpin(data_);
        munmap(data_, nbytes_);
    }
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;
    std::byte* data() const { return data_; }
    size_t nbytes() const { return nbytes_; }

  private:
    static constexpr size_t kPage = 4096;
    const std::shared_ptr<DeviceQueue> queue_;
    const size_t nbytes_;
    std::byte* const data_;
    bool pinned_ = false;
};

}  // namespace fastckpt
