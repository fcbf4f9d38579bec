// Splits items into byte planes and joins them again: plane p has byte p of each item, beginning
// with the lowest byte.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastckpt {

// Whether items may have this many bytes: 1, 2, 4 or 8.
bool has_planes(size_t width);

// Splits `count` items of `width` bytes into `width` planes of `count` bytes. If `turned`, each
// item is rotated left by one bit before: the sign of a floating-point number then stands below its
// mantissa, and an exponent of eight bits fills the last plane. Items may lie at any address.
void split_planes(const uint8_t* items, size_t count, size_t width, bool turned,
                  uint8_t* const* planes);

// Undoes split_planes.
void join_planes(const uint8_t* const* planes, size_t count, size_t width, bool turned,
                 uint8_t* items);

}  // namespace fastckpt
