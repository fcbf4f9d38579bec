// Rounding by integers, in loops that compilers vectorize. See rounding.h.
#include "rounding/rounding.h"

#include <algorithm>
#include <cstring>

namespace fastckpt {
namespace {

constexpr size_t kItems = 512;  // at a time

uint16_t rounded_of(uint32_t bits) {
    // Half of the last place that stays, less one where that place is even. The carry may reach the
    // exponent, which is then right, too: up to infinity.
    const uint32_t sum = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const bool is_number = (bits & 0x7FFFFFFF) <= 0x7F800000;
    return static_cast<uint16_t>(is_number ? sum : 0x7FC0);
}

}  // namespace

void round_to_bf16(const uint8_t* items, size_t count, uint8_t* rounded) {
    uint32_t taken[kItems];
    uint16_t made[kItems];
    for (size_t begin = 0; begin < count; begin += kItems) {
        const size_t n = std::min(kItems, count - begin);
        std::memcpy(taken, items + begin * sizeof *taken, n * sizeof *taken);
        for (size_t i = 0; i < n; ++i) made[i] = rounded_of(taken[i]);
        std::memcpy(rounded + begin * sizeof *made, made, n * sizeof *made);
    }
}

}  // namespace fastckpt
