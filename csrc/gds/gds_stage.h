// Blocks of device memory that a job or a read stream uses instead of the arena's. Tensors are
// copied and checksums are computed within the device, and cuFile moves the blocks. It knows which
// blocks are free, but not their contents. The engine must lock it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "crc32/crc32_gpu.h"
#include "gds/gds_sink.h"

namespace fastckpt {

class GdsStage {
  public:
    // Throws cuda::Unavailable if the device cannot compute checksums, and std::bad_alloc.
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
    // The host memory that receives the words of a block's checksums.
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
