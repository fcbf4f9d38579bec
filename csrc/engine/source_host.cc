// Copies from the host's memory, which are checksummed in the same pass, and the sums of all that
// has been copied. See source.h for the contract.
#include <algorithm>
#include <cstring>

#include "cast/cast.h"
#include "check.h"
#include "engine/source.h"

namespace fastckpt {

namespace {
constexpr size_t kConvertedAtOnce = 16 << 10;  // which the first-level cache holds
constexpr size_t kSubtractedAtOnce = 16 << 10;
}  // namespace

Source::Source(const Image& image, Checksums& sums, Arena& arena, Mutex& queueing,
               std::shared_ptr<GdsStage> gds)
    : image_(image), sums_(sums), arena_(arena), queueing_(queueing), gds_(std::move(gds)) {
    CHECK(gds_ == nullptr ||
          (gds_->block_bytes() == arena_.block_bytes() && image.numbers.empty()));
    // Marks on each device the moment from which its clock counts.
    for (const DeviceRange& range : image_.devices) {
        Clocked& clock = clocks_[range.queue.get()];
        if (clock.origin == nullptr) range.queue->mark(&clock.origin);
    }
}

void Source::fill(Batch& batch) {
    gather(batch);
    if (!batch.is_arriving()) copy(*batch.blocks.front());
}

// Copies what a block has, unless it has arrived, and checksums it.
void Source::copy(Block& block) {
    image_.for_pieces(
        block.begin, block.end, [&](const Segment& segment, uint64_t begin, uint64_t end) {
            if (!sums_.holds_slot(segment, begin, end))
                return sums_.add(block, segment, begin, end,
                                 copy_piece(block, segment, begin, end));
            const auto* source = reinterpret_cast<const std::byte*>(segment.address_of(begin));
            if (!block.is_arriving) std::memcpy(block.at(begin), source, end - begin);
            sums_.add_slots(block, segment, begin, end);
        });
    if (block.is_direct()) return;  // it has whole pages
    // A direct write, if one is chosen later, writes whole pages: without what was here before.
    const uint64_t nbytes = block.nbytes();
    std::memset(block.memory + nbytes, 0, page_from(nbytes) - nbytes);
    look_at_numbers(block);
}

// Returns the CRC-32 of a piece.
uint32_t Source::copy_piece(Block& block, const Segment& segment, uint64_t begin,
                            uint64_t end) const {
    if (block.is_direct()) return direct_crc(block, begin, end - begin);
    if (block.is_arriving && image_.base == nullptr) return crc32(0, block.at(begin), end - begin);
    const uint32_t crc = block.is_arriving ? 0 : copy_host(block, segment, begin, end);
    return image_.base == nullptr ? crc : subtract_base(block, begin, end);
}

// Exchanges staged bytes [begin, end) of the image for their difference from the base, which
// receives them. Returns the CRC-32 of the difference.
uint32_t Source::subtract_base(Block& block, uint64_t begin, uint64_t end) const {
    std::byte* const target = block.at(begin);
    std::byte* const base = image_.base + begin;
    std::byte difference[kSubtractedAtOnce];
    uint32_t crc = 0, base_crc = 0;
    for (uint64_t at = 0; at < end - begin; at += sizeof difference) {
        const uint64_t n = std::min<uint64_t>(sizeof difference, end - begin - at);
        for (uint64_t i = 0; i < n; ++i) difference[i] = target[at + i] ^ base[at + i];
        base_crc = crc32_copy(base + at, target + at, n, base_crc);
        crc = crc32_copy(target + at, difference, n, crc);
    }
    block.base.append(base_crc, end - begin);
    return crc;
}

// Copies bytes [begin, end) of the image, which are a segment's, from the host's memory, converted
// if need be. Returns their CRC-32.
uint32_t Source::copy_host(Block& block, const Segment& segment, uint64_t begin,
                           uint64_t end) const {
    std::byte* const target = block.at(begin);
    const auto* source = reinterpret_cast<const std::byte*>(segment.address);
    const uint64_t first = begin - segment.offset, nbytes = end - begin;
    const Conversion* const conversion = image_.conversion_of(segment);
    if (conversion == nullptr) return crc32_copy(target, source + first, nbytes, 0);
    const auto held = static_cast<Dtype>(conversion->held);
    const auto staged = static_cast<Dtype>(conversion->staged);
    const uint64_t wide = width_of(held), narrow = width_of(staged);
    source += first / narrow * wide;
    std::byte some[kConvertedAtOnce];
    uint32_t crc = 0;
    uint64_t lost = 0;
    for (uint64_t at = 0; at < nbytes; at += sizeof some) {
        const uint64_t n = std::min<uint64_t>(sizeof some, nbytes - at);
        lost += cast(held, staged, source + at / narrow * wide, some, n / narrow);
        crc = crc32_copy(target + at, some, n, crc);
    }
    if (lost > 0) block.lossy.push_back(image_.number_of(segment));
    return crc;
}

// Counts the numbers of a staged block that are not finite.
void Source::look_at_numbers(Block& block) const {
    const auto& numbers = image_.numbers;
    auto run = std::upper_bound(numbers.begin(), numbers.end(), block.begin,
                                [](uint64_t at, const NumberRun& r) { return at < r.end; });
    for (; run != numbers.end() && run->begin < block.end; ++run) {
        const uint64_t begin = std::max(block.begin, run->begin);
        const uint64_t nbytes = std::min(block.end, run->end) - begin;
        const uint64_t count = count_non_finite(block.at(begin), nbytes, run->width, run->mask);
        if (count > 0) block.non_finite.emplace_back(run - numbers.begin(), count);
    }
}

}  // namespace fastckpt
