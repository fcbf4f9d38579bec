// Numbers of 32 bits rounded to bf16. It must not know where they come from or what becomes of
// them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastckpt {

// Rounds `count` floating-point numbers of 4 bytes to bf16: to the nearest, of two that are equally
// near to the one whose last bit is 0. What is not a number becomes 0x7fc0, whatever its bits were.
// Items may lie at any address.
void round_to_bf16(const uint8_t* items, size_t count, uint8_t* rounded);

}  // namespace fastckpt
