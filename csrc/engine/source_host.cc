// Copies from the host's memory, which are checksummed in the same pass, and the sums of all that
// has been copied. See source.h for the contract.
#include <algorithm>
#include <cstring>
#include <optional>

#include "cast/cast.h"
#include "check.h"
#include "engine/source.h"

namespace fastckpt {

namespace {
constexpr size_t kConvertedAtOnce = 16 << 10;  // which the first-level cache holds
}  // namespace

Source::Source(const Image& image, Checksums& sums, Arena& arena, Mutex& queueing,
               std::shared_ptr<GdsStage> gds, std::shared_ptr<Cloner> known)
    : image_(image),
      sums_(sums),
      arena_(arena),
      queueing_(queueing),
      gds_(std::move(gds)),
      known_(std::move(known)) {
    const size_t block_bytes = arena_.block_bytes();
    CHECK(gds_ == nullptr || (gds_->block_bytes() == block_bytes && image.numbers.empty()));
    CHECK(known_ == nullptr || (image.slots.empty() && image.conversions.empty() &&
                                block_bytes % known_->chunk_bytes() == 0));
    // Marks on each device the moment from which its clock counts.
    for (const DeviceRange& range : image_.devices) {
        Clocked& clock = clocks_[range.queue.get()];
        if (clock.origin == nullptr) range.queue->mark(&clock.origin);
    }
}

void Source::fill(Batch& batch) {
    gather(batch);
    if (batch.is_arriving()) return;
    Block& block = *batch.blocks.front();
    block.known = pass_known(block);
    if (!block.is_known()) copy(block, block.begin + block.known);
}

// Copies what a block has from `from` on, unless it has arrived, and checksums it.
void Source::copy(Block& block, uint64_t from) {
    image_.for_pieces(from, block.end, [&](const Segment& segment, uint64_t begin, uint64_t end) {
        if (!sums_.holds_slot(segment, begin, end))
            return sums_.add(block, segment, begin, end, copy_piece(block, segment, begin, end));
        const auto* source = reinterpret_cast<const std::byte*>(segment.address_of(begin));
        if (!block.is_arriving) std::memcpy(block.at(begin), source, end - begin);
        sums_.add_slots(block, segment, begin, end);
    });
    if (block.is_direct()) return;  // it has whole pages
    // A direct write, if one is chosen later, writes whole pages: without what was here before.
    const uint64_t nbytes = block.nbytes();
    std::memset(block.memory + nbytes, 0, page_from(nbytes) - nbytes);
    look_at_numbers(block, block.at(from), from, block.end);
}

// Returns the CRC-32 of a piece.
uint32_t Source::copy_piece(Block& block, const Segment& segment, uint64_t begin,
                            uint64_t end) const {
    if (block.is_direct()) return direct_crc(block, begin, end - begin);
    if (block.is_arriving) return crc32(0, block.at(begin), end - begin);
    return copy_host(block, segment, begin, end);
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

// Looks at a block, chunk by chunk, until one is not known; returns how many bytes that passes. The
// memory may change meanwhile, so hash, CRC-32 and numbers are all taken of one copy, in the cache.
uint64_t Source::pass_known(Block& block) const {
    if (known_ == nullptr) return 0;
    std::vector<std::byte> chunk(known_->chunk_bytes());
    uint64_t at = block.begin;
    while (at < block.end) {
        const uint64_t end = std::min<uint64_t>(block.end, at + chunk.size());
        if (!fetch(at, end, chunk.data())) break;
        const std::optional<uint32_t> crc = known_->crc_if_known(at, chunk.data(), end - at);
        if (!crc) break;
        block.append(*crc, end - at);
        look_at_numbers(block, chunk.data(), at, end);
        at = end;
    }
    return at - block.begin;
}

// Copies bytes [begin, end) of the image to `target`; returns false if some lie on a device.
bool Source::fetch(uint64_t begin, uint64_t end, std::byte* target) const {
    bool is_on_host = true;
    image_.for_pieces(begin, end, [&](const Segment& segment, uint64_t from, uint64_t to) {
        is_on_host = is_on_host && image_.device_of(segment) == nullptr;
        if (!is_on_host) return;
        std::memcpy(target + (from - begin),
                    reinterpret_cast<const std::byte*>(segment.address_of(from)), to - from);
    });
    return is_on_host;
}

// Counts the numbers of bytes [first, end) of the image, which are a block's, that are not finite.
void Source::look_at_numbers(Block& block, const std::byte* bytes, uint64_t first,
                             uint64_t end) const {
    const auto& numbers = image_.numbers;
    auto run = std::upper_bound(numbers.begin(), numbers.end(), first,
                                [](uint64_t at, const NumberRun& r) { return at < r.end; });
    for (; run != numbers.end() && run->begin < end; ++run) {
        const uint64_t begin = std::max(first, run->begin);
        const uint64_t nbytes = std::min(end, run->end) - begin;
        const uint64_t count =
            count_non_finite(bytes + (begin - first), nbytes, run->width, run->mask);
        if (count > 0) block.non_finite.emplace_back(run - numbers.begin(), count);
    }
}

}  // namespace fastckpt
