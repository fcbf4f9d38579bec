// Frames of zstd (RFC 8878) that have literals only: each byte becomes its Huffman code, and no
// repeats are searched. That is what the exponents of numbers gain from, at several times the speed
// of a search. Any decoder of zstd reads them. It must not know what the bytes are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastckpt {

// Fills target with a frame of `count` bytes, at most 2^32 - 1, which states its content size.
// Returns the size of the frame, or 0 if it would have more than `capacity` bytes.
size_t put_literals(const uint8_t* source, size_t count, uint8_t* target, size_t capacity);

}  // namespace fastckpt
