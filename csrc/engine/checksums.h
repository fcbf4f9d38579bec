// Computes the CRC-32 of each block of an image, and of each segment that has slots, and writes the
// latter into the slots. The stager of a block adds its pieces, and one thread at a time seals
// blocks in file order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/block.h"
#include "engine/image.h"

namespace fastckpt {

class Checksums {
  public:
    // The image stays where it is.
    Checksums(const Image& image, size_t blocks);

    // Whether bytes [begin, end) of a segment hold a slot.
    bool holds_slot(const Segment& segment, uint64_t begin, uint64_t end) const;
    // Adds the block's next piece, which is a segment's and has this CRC.
    void add(Block& block, const Segment& segment, uint64_t begin, uint64_t end, uint32_t crc);
    // Adds a piece that holds slots, as copied, and fills these in, now or in seal().
    void add_slots(Block& block, const Segment& segment, uint64_t begin, uint64_t end);
    // Completes the CRC of a segment that ends here, then the block's own, which both depend on the
    // blocks before.
    void seal(Block& block);

    // Valid when all blocks are sealed.
    const std::vector<uint32_t>& of_blocks() const { return blocks_; }
    const std::vector<uint32_t>& of_slots() const { return slots_; }

  private:
    void describe(int64_t slot, uint32_t crc);
    void patch(Block& block, uint64_t begin, uint64_t end) const;

    const Image& image_;
    std::vector<int64_t> slot_of_segment_;  // the first one; -1: none
    std::vector<uint32_t> blocks_;
    std::vector<uint32_t> slots_;
    uint32_t open_segment_crc_ = 0;  // of the segment that crosses the last sealed block's end
};

}  // namespace fastckpt
