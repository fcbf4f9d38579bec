// Blocks of device memory that a job stages in, or a stream reads into, instead of the arena's: a
// copy within the device frees the tensor or fills it, checksums are computed where the block lies,
// and cuFile moves it. Knows which blocks are free; it does not know what is staged in them, and it
// does not lock (the engine does).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "crc32/crc32_gpu.h"
#include "gds/gds_file.h"

namespace fastckpt {

class GdsStage {
  public:
    // Of all these blocks. Throws cuda::Unavailable if checksums cannot be computed there, and
    // std::bad_alloc.
    explicit GdsStage(std::shared_ptr<GdsBlocks> blocks);
    ~GdsStage();
    GdsStage(const GdsStage&) = delete;
    GdsStage& operator=(const GdsStage&) = delete;

    static constexpr size_t kWords = 1024;  // for the checksums of one block
    static constexpr size_t kNone = SIZE_MAX;

    // The number of a free block, or kNone.
    size_t acquire();
    void release(size_t number);

    uint64_t address(size_t number) const { return blocks_->address(number); }
    // The block that begins at an address.
    size_t number(const std::byte* block) const;
    // Where the words of a block's checksums arrive.
    uint32_t* words(size_t number) const;
    size_t block_bytes() const { return blocks_->block_bytes(); }
    const std::shared_ptr<DeviceQueue>& queue() const { return blocks_->queue(); }
    Crc32Gpu& crc() { return crc_; }

  private:
    const std::shared_ptr<GdsBlocks> blocks_;
    Crc32Gpu crc_;
    const HostMemory words_;
    std::vector<size_t> free_;
};

}  // namespace fastckpt
