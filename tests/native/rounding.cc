// Rounding to bf16 against the neighbours of each number, compared by their distance: every short
// length, at odd addresses, on memory with nothing readable or writable beyond it.
// Knows rounding.h; must not know who rounds what.
#include "rounding/rounding.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>

namespace {

double value_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The nearest number whose lower half is 0; infinity counts as the power of two that it stands for.
uint16_t nearest(uint32_t bits) {
    if (std::isnan(value_of(bits))) return 0x7FC0;
    const uint32_t low = bits >> 16, high = low + 1;
    if (std::isinf(value_of(bits))) return static_cast<uint16_t>(low);
    double above = value_of(high << 16);
    if (std::isinf(above)) above = std::copysign(std::ldexp(1.0, 128), above);
    const double to_low = std::abs(value_of(bits) - value_of(low << 16));
    const double to_high = std::abs(above - value_of(bits));
    if (to_low == to_high) return static_cast<uint16_t>(low % 2 == 0 ? low : high);
    return static_cast<uint16_t>(to_low < to_high ? low : high);
}

// Allocated to the byte, so that the address sanitizer sees the first access beyond it.
struct Exact {
    Exact(size_t nbytes, size_t skew)
        : memory(new uint8_t[nbytes + skew]), data(&memory[0] + skew) {}
    std::unique_ptr<uint8_t[]> memory;
    uint8_t* data;
};

bool check(size_t count, std::mt19937& random) {
    constexpr uint32_t kLower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    const size_t skew = random() % 4;
    const Exact items(4 * count, skew), rounded(2 * count, 3 - skew);
    for (size_t i = 0; i < count; ++i) {
        const auto bits = static_cast<uint32_t>(random() << 16 | kLower[random() % 6]);
        std::memcpy(items.data + 4 * i, &bits, 4);
    }
    fastckpt::round_to_bf16(items.data, count, rounded.data);
    for (size_t i = 0; i < count; ++i) {
        uint32_t bits;
        uint16_t found;
        std::memcpy(&bits, items.data + 4 * i, 4);
        std::memcpy(&found, rounded.data + 2 * i, 2);
        if (found == nearest(bits)) continue;
        std::printf("%08x of %zu became %04x, not %04x\n", bits, count, found, nearest(bits));
        return false;
    }
    return true;
}

}  // namespace

int main() {
    std::mt19937 random(1);
    bool right = true;
    for (size_t count = 0; count < 1100; ++count) right = right && check(count, random);
    right = right && check(1 << 18, random);
    std::printf("rounding: %s\n", right ? "right" : "WRONG");
    return right ? 0 : 1;
}
