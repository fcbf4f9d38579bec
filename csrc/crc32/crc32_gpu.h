// CRC-32 of ranges of device memory, computed on the device. It loads and launches the kernel of
// crc32_kernel.h, and combines the kernel's words into CRCs like those of crc32.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "gpu/device_memory.h"
#include "gpu/device_queue.h"
#include "mutex.h"

namespace fastckpt {

class Crc32Gpu {
  public:
    struct Range {
        uint64_t address = 0;
        uint64_t nbytes = 0;
    };

    // Loads the kernel, and compares its CRCs of known bytes with the CPU's. Throws
    // cuda::Unavailable, with the reason, if the driver does not take it or a CRC is wrong.
    explicit Crc32Gpu(std::shared_ptr<DeviceQueue> queue);
    ~Crc32Gpu();
    Crc32Gpu(const Crc32Gpu&) = delete;
    Crc32Gpu& operator=(const Crc32Gpu&) = delete;

    static constexpr uint64_t kRangeBytesMax = uint64_t{256} << 20;

    // How many words a range gets: one for each chunk of 64 KiB that it touches.
    static size_t words(const Range& range);
    // Queues the computation for ranges at any addresses, after all copies queued before. When a
    // later mark is reached, `words` holds the words of one range after the other; this host memory
    // stays valid until then (if it is not pinned, this call waits). Callable from any thread.
    cuda::Result queue(const Range* ranges, size_t count, uint32_t* words);
    // The CRC of a range's bytes, made of its words.
    static uint32_t crc(const Range& range, const uint32_t* words);

  private:
    cuda::Result launch(const Range* ranges, size_t count, size_t words, uint32_t* target);
    void load();
    void unload();
    void check();

    const std::shared_ptr<DeviceQueue> queue_;
    cuda::Module module_ = nullptr;
    cuda::Function function_ = nullptr;
    DeviceMemory tables_;
    DeviceMemory states_;  // one launch's; by stream order the next comes after they were copied
    Mutex mu_;             // held over a launch and its copy
};

}  // namespace fastckpt
