// Owners of device memory, and of host memory for copies to and from a device. They do not know the
// memory's contents.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "gpu/device_queue.h"

namespace fastckpt {

// Memory of a device. The destructor frees it if the queue is open; the driver waits for its users.
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

// Memory of the host, aligned to pages for direct I/O, and pinned for speed if possible.
class HostMemory {
  public:
    // Throws std::bad_alloc.
    HostMemory(std::shared_ptr<DeviceQueue> queue, size_t nbytes)
        : queue_(std::move(queue)),
          nbytes_((nbytes + kPage - 1) / kPage * kPage),
          data_(static_cast<std::byte*>(
              mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
        if (data_ == MAP_FAILED) throw std::bad_alloc();
        // As in the arena: after a fork, a copy-on-write would move pages that a device writes to.
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
