// The description of the bytes that a job stages: their addresses in memory, and their checksum
// slots and conversions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/non_finite.h"
#include "gpu/device_queue.h"

namespace fastckpt {

// A run of the image's bytes and its address in memory. Segments cover the image in order, without
// gaps.
struct Segment {
    uint64_t offset;
    uint64_t nbytes;
    uint64_t address;

    uint64_t end() const { return offset + nbytes; }
    // The address of a byte of the image.
    uint64_t address_of(uint64_t at) const { return address + (at - offset); }
};

// Four bytes of the image that receive the little-endian CRC-32 of a segment. They lie in the next
// segment, and are written whatever that segment's memory holds there. Slots of one segment follow
// each other. The CRC-32 of a slot beyond the image is only reported.
struct Slot {
    static constexpr uint64_t kBytes = 4;
    uint64_t offset;
    uint64_t segment;
};

// The dtypes of a segment's items in memory and in the image, if these differ. Its memory is the
// host's, and no item lies across two blocks.
struct Conversion {
    uint64_t segment;
    uint64_t held;
    uint64_t staged;
};

// Addresses [begin, end) of a device, and the queue that copies for it. By unified addressing no
// other memory has these addresses.
struct DeviceRange {
    uint64_t begin;
    uint64_t end;
    std::shared_ptr<DeviceQueue> queue;
};

// Returns which of these ascending ranges an address lies in; null if it is the host's.
const DeviceRange* range_of(const std::vector<DeviceRange>& ranges, uint64_t address);

struct Image {
    std::vector<Segment> segments;
    std::vector<Slot> slots;
    std::vector<DeviceRange> devices;     // ascending
    std::vector<NumberRun> numbers;       // ascending; those that are not finite are counted
    std::vector<Conversion> conversions;  // by ascending segments
    // Memory of nbytes() with an earlier image, or null. Then the difference of the two, by XOR, is
    // staged, and the memory receives this image.
    std::byte* base = nullptr;

    // CHECKs all of this.
    void check(uint64_t block_bytes) const;
    uint64_t nbytes() const { return segments.back().end(); }
    size_t number_of(const Segment& segment) const { return &segment - segments.data(); }
    // The device of a segment; null if it is the host's.
    const DeviceRange* device_of(const Segment& segment) const {
        return devices.empty() ? nullptr : range_of(devices, segment.address);
    }
    // How a segment is converted; null if it is copied as it is.
    const Conversion* conversion_of(const Segment& segment) const;
    // The segment that has a byte of the image.
    const Segment* at(uint64_t offset) const;

    // Calls visit(segment, from, to) for each segment of bytes [begin, end) of the image, of which
    // it has [from, to).
    template <typename Visit>
    void for_pieces(uint64_t begin, uint64_t end, Visit&& visit) const {
        for (const Segment* segment = at(begin); begin < end; ++segment) {
            const uint64_t to = std::min(end, segment->end());
            visit(*segment, begin, to);
            begin = to;
        }
    }

  private:
    void check_numbers(uint64_t block_bytes) const;
    void check_conversions(uint64_t block_bytes) const;
};

}  // namespace fastckpt
