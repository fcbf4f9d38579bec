// CRCs of pieces become those of blocks and segments. See checksums.h.
#include "engine/checksums.h"

#include <algorithm>

#include "check.h"

namespace fastckpt {

Checksums::Checksums(const Image& image, size_t blocks)
    : image_(image),
      slot_of_segment_(image.segments.size(), -1),
      blocks_(blocks),
      slots_(image.slots.size()) {
    const auto& slots = image.slots;
    for (size_t i = 0; i < slots.size(); ++i) {
        int64_t& first = slot_of_segment_[slots[i].segment];
        CHECK(first < 0 || slots[i - 1].segment == slots[i].segment);
        if (first < 0) first = static_cast<int64_t>(i);
    }
    // A segment with a slot is copied and checksummed as it is, so it cannot hold a slot itself.
    for (const Slot& slot : slots)
        CHECK(slot.offset >= image.nbytes() || slot_of_segment_[slot.segment + 1] < 0);
}

// Notes the CRC of a segment for all of its slots, given the first one.
void Checksums::describe(int64_t slot, uint32_t crc) {
    const auto& slots = image_.slots;
    const uint64_t segment = slots[static_cast<size_t>(slot)].segment;
    for (auto i = static_cast<size_t>(slot); i < slots.size() && slots[i].segment == segment; ++i)
        slots_[i] = crc;
}

bool Checksums::holds_slot(const Segment& segment, uint64_t begin, uint64_t end) const {
    const size_t number = image_.number_of(segment);
    const int64_t first = number > 0 ? slot_of_segment_[number - 1] : -1;
    if (first < 0) return false;
    for (auto i = static_cast<size_t>(first); i < image_.slots.size(); ++i) {
        const Slot& slot = image_.slots[i];
        if (slot.segment != number - 1) return false;
        if (slot.offset < end && slot.offset + Slot::kBytes > begin) return true;
    }
    return false;
}

void Checksums::add(Block& block, const Segment& segment, uint64_t begin, uint64_t end,
                    uint32_t crc) {
    block.append(crc, end - begin);
    const int64_t slot = slot_of_segment_[image_.number_of(segment)];
    if (slot < 0) return;
    const bool began_earlier = segment.offset < block.begin;
    const bool goes_on = segment.end() > block.end;
    if (began_earlier) block.head_crc = crc;
    if (goes_on) block.tail_crc = crc;
    if (!began_earlier && !goes_on) describe(slot, crc);
}

void Checksums::add_slots(Block& block, const Segment& segment, uint64_t begin, uint64_t end) {
    CHECK(!block.is_direct());
    if (image_.segments[image_.number_of(segment) - 1].offset < block.begin) {
        CHECK(!block.has_late());
        block.late_begin = begin;
        block.late_end = end;
        return;
    }
    patch(block, begin, end);
    block.append(crc32(0, block.at(begin), end - begin), end - begin);
}

// Writes CRCs into the slots, or parts of slots, that lie in [begin, end) of the block.
void Checksums::patch(Block& block, uint64_t begin, uint64_t end) const {
    const auto& slots = image_.slots;
    auto slot = std::lower_bound(slots.begin(), slots.end(), begin, [](const Slot& s, uint64_t at) {
        return s.offset + Slot::kBytes <= at;
    });
    for (; slot != slots.end() && slot->offset < end; ++slot) {
        const uint32_t crc = slots_[static_cast<size_t>(slot - slots.begin())];
        for (uint64_t i = 0; i < Slot::kBytes; ++i) {
            const uint64_t at = slot->offset + i;
            if (at >= begin && at < end) *block.at(at) = static_cast<std::byte>(crc >> (8 * i));
        }
    }
}

void Checksums::seal(Block& block) {
    const Segment& first = *image_.at(block.begin);
    const int64_t slot = slot_of_segment_[image_.number_of(first)];
    const bool first_is_open = first.offset < block.begin && slot >= 0;
    if (first_is_open) {
        const uint64_t nbytes = std::min(first.end(), block.end) - block.begin;
        open_segment_crc_ = crc32_combine(open_segment_crc_, block.head_crc, nbytes);
        if (first.end() <= block.end) describe(slot, open_segment_crc_);
    }
    // If the last segment goes on, it is the open one from here.
    if (!first_is_open || first.end() <= block.end) open_segment_crc_ = block.tail_crc;
    RunCrc crc = block.before;
    if (block.has_late()) {
        patch(block, block.late_begin, block.late_end);
        const uint64_t nbytes = block.late_end - block.late_begin;
        crc.append(crc32(0, block.at(block.late_begin), nbytes), nbytes);
        if (block.after.nbytes > 0) crc.append(block.after.crc, block.after.nbytes);
    }
    CHECK(crc.nbytes == block.nbytes());
    blocks_[block.index] = crc.crc;
}

}  // namespace fastckpt
