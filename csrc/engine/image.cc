// What must hold for an image, and where its bytes are. See image.h.
#include "engine/image.h"

#include <iterator>

#include "cast/cast.h"
#include "check.h"

namespace fastckpt {

const DeviceRange* range_of(const std::vector<DeviceRange>& ranges, uint64_t address) {
    const auto after =
        std::upper_bound(ranges.begin(), ranges.end(), address,
                         [](uint64_t at, const DeviceRange& range) { return at < range.begin; });
    if (after == ranges.begin() || address >= std::prev(after)->end) return nullptr;
    return &*std::prev(after);
}

const Segment* Image::at(uint64_t offset) const {
    const auto after =
        std::upper_bound(segments.begin(), segments.end(), offset,
                         [](uint64_t at, const Segment& s) { return at < s.offset; });
    CHECK(after != segments.begin());
    return &*std::prev(after);
}

const Conversion* Image::conversion_of(const Segment& segment) const {
    const auto found = std::lower_bound(
        conversions.begin(), conversions.end(), number_of(segment),
        [](const Conversion& each, uint64_t wanted) { return each.segment < wanted; });
    return found != conversions.end() && found->segment == number_of(segment) ? &*found : nullptr;
}

void Image::check(uint64_t block_bytes) const {
    CHECK(!segments.empty());
    uint64_t expected = 0;
    for (const Segment& segment : segments) {
        CHECK(segment.offset == expected && segment.nbytes > 0 && segment.address != 0);
        expected += segment.nbytes;
    }
    uint64_t slots_end = 0;
    for (const Slot& slot : slots) {
        CHECK(slot.segment < segments.size() && slot.offset >= slots_end);
        slots_end = slot.offset + Slot::kBytes;
        if (slot.offset >= expected) continue;  // it lies beyond the image
        CHECK(slot.segment + 1 < segments.size());
        const Segment& holder = segments[slot.segment + 1];
        CHECK(slot.offset >= holder.offset && slots_end <= holder.end());
    }
    check_numbers(block_bytes);
    check_conversions(block_bytes);
    CHECK(base == nullptr || (slots.empty() && numbers.empty()));
}

// No number crosses the end of a block.
void Image::check_numbers(uint64_t block_bytes) const {
    uint64_t end = 0;
    for (const NumberRun& run : numbers) {
        CHECK(run.width > 0 && block_bytes % run.width == 0);
        CHECK(run.begin >= end && run.end > run.begin && run.end <= nbytes());
        CHECK(run.begin % run.width == 0 && run.end % run.width == 0);
        end = run.end;
    }
}

void Image::check_conversions(uint64_t block_bytes) const {
    for (const Conversion& each : conversions) {
        CHECK(&each == conversions.data() || each.segment > (&each)[-1].segment);
        CHECK(each.segment < segments.size() && each.held < kDtypes && each.staged < kDtypes);
        const auto staged = static_cast<Dtype>(each.staged);
        CHECK(is_castable(static_cast<Dtype>(each.held), staged));
        const Segment& segment = segments[each.segment];
        CHECK(device_of(segment) == nullptr);
        const uint64_t width = width_of(staged);
        CHECK(segment.offset % width == 0 && segment.nbytes % width == 0);
        CHECK(block_bytes % width == 0);
    }
    CHECK(conversions.empty() || slots.empty());  // what holds a slot is copied as it is
}

}  // namespace fastckpt
