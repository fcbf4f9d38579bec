// Counts floating-point numbers that are infinite or NaN, by their bits. It knows only bytes and
// bit masks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastckpt {

// Numbers of equal width, 1, 2, 4 or 8 bytes, in the bytes [begin, end) of an image: begin is a
// multiple of the width. A number is not finite if all bits of the mask are set in it.
struct NumberRun {
    uint64_t begin;
    uint64_t end;
    uint64_t width;
    uint64_t mask;
};

uint64_t count_non_finite(const std::byte* bytes, uint64_t nbytes, uint64_t width, uint64_t mask);

}  // namespace fastckpt
