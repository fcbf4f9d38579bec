// Loops that the compiler turns into vector instructions: sums are of the numbers' own width. See
// non_finite.h for the contract.
#include "engine/non_finite.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "check.h"

namespace fastckpt {

namespace {

// As many as a sum of one byte can count.
constexpr uint64_t kStretch = std::numeric_limits<uint8_t>::max();

template <typename Word>
uint64_t count(const std::byte* bytes, uint64_t numbers, uint64_t wide_mask) {
    const auto mask = static_cast<Word>(wide_mask);
    uint64_t found = 0;
    for (uint64_t begin = 0; begin < numbers; begin += kStretch) {
        const uint64_t end = std::min(numbers, begin + kStretch);
        Word sum = 0;
        for (uint64_t i = begin; i < end; ++i) {
            Word word;
            std::memcpy(&word, bytes + i * sizeof(Word), sizeof(Word));
            sum = static_cast<Word>(sum + ((word & mask) == mask ? 1 : 0));
        }
        found += sum;
    }
    return found;
}

}  // namespace

uint64_t count_non_finite(const std::byte* bytes, uint64_t nbytes, uint64_t width, uint64_t mask) {
    CHECK(nbytes % width == 0);
    const uint64_t numbers = nbytes / width;
    if (width == 1) return count<uint8_t>(bytes, numbers, mask);
    if (width == 2) return count<uint16_t>(bytes, numbers, mask);
    if (width == 4) return count<uint32_t>(bytes, numbers, mask);
    CHECK(width == 8);
    return count<uint64_t>(bytes, numbers, mask);
}

}  // namespace fastckpt
