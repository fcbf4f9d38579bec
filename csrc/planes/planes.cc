// Byte planes by loops that compilers vectorize: one plane at a time, of items that the first-level
// cache holds. Those that split are compiled for what every CPU has, and for AVX2. See planes.h.
#include "planes/planes.h"

#include <algorithm>
#include <cstring>

#define FASTCKPT_INLINE inline __attribute__((always_inline))

namespace fastckpt {
namespace {

constexpr size_t kItems = 512;  // at a time

template <typename T>
FASTCKPT_INLINE void split(const uint8_t* items, size_t count, bool turned,
                           uint8_t* const* planes) {
    constexpr int kTop = 8 * sizeof(T) - 1;
    T taken[kItems];
    for (size_t begin = 0; begin < count; begin += kItems) {
        const size_t n = std::min(kItems, count - begin);
        std::memcpy(taken, items + begin * sizeof(T), n * sizeof(T));
        if (turned) {
            for (size_t i = 0; i < n; ++i)
                taken[i] = static_cast<T>(taken[i] << 1 | taken[i] >> kTop);
        }
        for (size_t p = 0; p < sizeof(T); ++p) {
            uint8_t* const plane = planes[p] + begin;
            for (size_t i = 0; i < n; ++i) plane[i] = static_cast<uint8_t>(taken[i] >> 8 * p);
        }
    }
}

template <typename T>
void join(const uint8_t* const* planes, size_t count, bool turned, uint8_t* items) {
    constexpr int kTop = 8 * sizeof(T) - 1;
    T made[kItems];
    for (size_t begin = 0; begin < count; begin += kItems) {
        const size_t n = std::min(kItems, count - begin);
        for (size_t i = 0; i < n; ++i) made[i] = planes[0][begin + i];
        for (size_t p = 1; p < sizeof(T); ++p) {
            const uint8_t* const plane = planes[p] + begin;
            for (size_t i = 0; i < n; ++i)
                made[i] = static_cast<T>(made[i] | static_cast<T>(plane[i]) << 8 * p);
        }
        if (turned) {
            for (size_t i = 0; i < n; ++i) made[i] = static_cast<T>(made[i] >> 1 | made[i] << kTop);
        }
        std::memcpy(items + begin * sizeof(T), made, n * sizeof(T));
    }
}

FASTCKPT_INLINE void split_any(const uint8_t* items, size_t count, size_t width, bool turned,
                               uint8_t* const* planes) {
    if (width == 1) std::memcpy(planes[0], items, count);
    if (width == 2) split<uint16_t>(items, count, turned, planes);
    if (width == 4) split<uint32_t>(items, count, turned, planes);
    if (width == 8) split<uint64_t>(items, count, turned, planes);
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) void split_avx2(const uint8_t* items, size_t count, size_t width,
                                                bool turned, uint8_t* const* planes) {
    split_any(items, count, width, turned, planes);
}

bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
}

#endif  // defined(__x86_64__)

}  // namespace

bool has_planes(size_t width) { return width == 1 || width == 2 || width == 4 || width == 8; }

void split_planes(const uint8_t* items, size_t count, size_t width, bool turned,
                  uint8_t* const* planes) {
#if defined(__x86_64__)
    if (has_avx2()) return split_avx2(items, count, width, turned, planes);
#endif
    split_any(items, count, width, turned, planes);
}

void join_planes(const uint8_t* const* planes, size_t count, size_t width, bool turned,
                 uint8_t* items) {
    if (width == 1) std::memcpy(items, planes[0], count);
    if (width == 2) join<uint16_t>(planes, count, turned, items);
    if (width == 4) join<uint32_t>(planes, count, turned, items);
    if (width == 8) join<uint64_t>(planes, count, turned, items);
}

}  // namespace fastckpt
