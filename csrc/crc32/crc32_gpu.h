// CRC-32 of ranges of device memory, computed where they are. Responsible for the kernel on one
// device, for what it is given, and for making CRCs of what it leaves; it must not know what the
// ranges are. Values are those of crc32.h; how the kernel divides the work is in crc32_kernel.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "gpu/device_memory.h"
#include "gpu/device_queue.h"

namespace fastckpt {

class Crc32Gpu {
  public:
    struct Range {
        uint64_t address = 0;
        uint64_t nbytes = 0;
    };

    // Loads the kernel, and compares what it makes of known bytes with what the CPU makes of them.
    // Throws cuda::Unavailable, with the reason, if the driver does not take it or it is wrong.
    explicit Crc32Gpu(std::shared_ptr<DeviceQueue> queue);
    ~Crc32Gpu();
    Crc32Gpu(const Crc32Gpu&) = delete;
    Crc32Gpu& operator=(const Crc32Gpu&) = delete;

    static constexpr uint64_t kRangeBytesMax = uint64_t{256} << 20;

    // How many words are left for a range: one for each 64 KiB, and none for an empty one.
    static size_t words(const Range& range);
    // Queues the computation for ranges, at any addresses; their bytes are those that copies queued
    // before have left. Words of one range after the other stand in `words`, host memory (pinned,
    // or this waits), once a later mark is reached; it stays valid until then. From any thread.
    cuda::Result queue(const Range* ranges, size_t count, uint32_t* words);
    // The CRC of a range's bytes, from its words.
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
    DeviceMemory states_;  // of one launch: the next comes after they were copied, in stream order
    std::mutex mu_;        // keeps a launch and its copy together
};

}  // namespace fastckpt
