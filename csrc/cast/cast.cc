// Casts by loops without branches, which compilers vectorize: items become floats, which the
// first-level cache holds, and these the other items. See cast.h.
#include "cast/cast.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "cpu.h"
#include "engine/non_finite.h"

namespace fastckpt {
namespace {

constexpr size_t kItems = 512;  // at a time
constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kInfinity = 0x7f800000u;  // of float32, as all numbers of that name below
constexpr uint32_t kQuiet = 0x00400000u;
constexpr int kMantissa = 23;
constexpr int kBias = 127;

FASTCKPT_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

FASTCKPT_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Without a branch, into which the compiler would move the sums and products of floats, and then
// vectorize nothing.
FASTCKPT_INLINE uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = -static_cast<uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

// A format of fewer bits: after the sign, an exponent with a bias, then the mantissa.
template <typename Bits, int mantissa, int bias, uint32_t infinity, uint32_t nan>
struct Narrow {
    using Item = Bits;
    static constexpr int kDropped = kMantissa - mantissa;
    static constexpr int kSignShift = 32 - 8 * static_cast<int>(sizeof(Bits));

    // Larger numbers become `infinity`, which stands for NaN in a format that has none.
    static FASTCKPT_INLINE Bits from_float(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t size = bits & ~kSign;
        // Adding half of the last place, or one less if that place is even, rounds the rest.
        const uint32_t rounded = size + ((1u << (kDropped - 1)) - 1) + (size >> kDropped & 1);
        const uint32_t normal = (rounded >> kDropped) - ((kBias - bias) << mantissa);
        // The processor rounds subnormal numbers, as the last places of a sum.
        constexpr uint32_t kUnit = (kBias + 1 - bias - mantissa + kMantissa) << kMantissa;
        const uint32_t subnormal = bits_of(float_of(size) + float_of(kUnit)) - kUnit;
        constexpr uint32_t kLeastNormal = (kBias + 1 - bias) << kMantissa;
        uint32_t result = choose(normal > infinity, infinity, normal);
        result = choose(size < kLeastNormal, subnormal, result);
        result = choose(size > kInfinity, nan_of(size), result);
        return static_cast<Bits>(result | (bits & kSign) >> kSignShift);
    }

    static FASTCKPT_INLINE uint32_t nan_of(uint32_t size) {
        constexpr bool kHasPayload = sizeof(Bits) > 1;
        constexpr uint32_t kMask = (1u << mantissa) - 1;
        return kHasPayload ? nan | (size >> kDropped & kMask) : nan;
    }

    static FASTCKPT_INLINE float to_float(Bits item) {
        const uint32_t bits = static_cast<uint32_t>(item) << kSignShift;
        const uint32_t size = (bits & ~kSign) >> (kSignShift - kDropped);
        // The product is exact, also of subnormal numbers.
        const float scale = float_of(static_cast<uint32_t>(2 * kBias - bias) << kMantissa);
        const uint32_t finite = bits_of(float_of(size) * scale);
        constexpr uint32_t kLargest = infinity << kDropped;
        const uint32_t quiet = choose(size > kLargest || infinity == nan, kQuiet, 0);
        const uint32_t result = choose(size >= kLargest, size | kInfinity | quiet, finite);
        return float_of(result | (bits & kSign));
    }
};

using Half = Narrow<uint16_t, 10, 15, 0x7c00, 0x7e00>;
using E4M3 = Narrow<uint8_t, 3, 7, 0x7f, 0x7f>;
struct E4M3Finite : E4M3 {
    static FASTCKPT_INLINE uint8_t from_float(float value) {
        return Narrow<uint8_t, 3, 7, 0x7e, 0x7f>::from_float(value);
    }
};
using E5M2 = Narrow<uint8_t, 2, 15, 0x7c, 0x7f>;

template <uint16_t nan>
struct Brain {
    using Item = uint16_t;
    static FASTCKPT_INLINE uint16_t from_float(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return static_cast<uint16_t>((bits & ~kSign) > kInfinity ? nan : rounded);
    }
    static FASTCKPT_INLINE float to_float(uint16_t item) {
        return float_of(static_cast<uint32_t>(item) << 16);
    }
};

struct Double {
    using Item = double;
    static FASTCKPT_INLINE double from_float(float value) { return value; }
    static FASTCKPT_INLINE float to_float(double item) { return static_cast<float>(item); }
};

template <typename Item>
FASTCKPT_INLINE Item item_at(const uint8_t* items, size_t i) {
    Item item;
    std::memcpy(&item, items + i * sizeof item, sizeof item);
    return item;
}

template <typename Format>
FASTCKPT_INLINE void widen(const uint8_t* source, float* __restrict floats, size_t n) {
    for (size_t i = 0; i < n; ++i)
        floats[i] = Format::to_float(item_at<typename Format::Item>(source, i));
}

template <typename Format>
FASTCKPT_INLINE void narrow(const uint8_t* floats, uint8_t* __restrict target, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        const auto item = Format::from_float(item_at<float>(floats, i));
        std::memcpy(target + i * sizeof item, &item, sizeof item);
    }
}

// Returns n items as floats, where they are, if they are floats, or in `floats`.
FASTCKPT_INLINE const uint8_t* read(Dtype from, const uint8_t* source, float* floats, size_t n) {
    if (from == Dtype::f32) return source;
    if (from == Dtype::bf16) widen<Brain<0x7fc0>>(source, floats, n);
    if (from == Dtype::f16) widen<Half>(source, floats, n);
    if (from == Dtype::f64) widen<Double>(source, floats, n);
    if (from == Dtype::f8_e4m3 || from == Dtype::f8_e4m3_finite) widen<E4M3>(source, floats, n);
    if (from == Dtype::f8_e5m2) widen<E5M2>(source, floats, n);
    return reinterpret_cast<const uint8_t*>(floats);
}

FASTCKPT_INLINE void write(Dtype from, Dtype to, const uint8_t* floats, uint8_t* target, size_t n) {
    if (to == Dtype::f32) std::memcpy(target, floats, n * sizeof(float));
    // torch has two ways to write NaN; docs/reference/format.md has the first, which stays here.
    if (to == Dtype::bf16 && from == Dtype::f32) narrow<Brain<0xffff>>(floats, target, n);
    if (to == Dtype::bf16 && from != Dtype::f32) narrow<Brain<0x7fc0>>(floats, target, n);
    if (to == Dtype::f16) narrow<Half>(floats, target, n);
    if (to == Dtype::f64) narrow<Double>(floats, target, n);
    if (to == Dtype::f8_e4m3) narrow<E4M3>(floats, target, n);
    if (to == Dtype::f8_e4m3_finite) narrow<E4M3Finite>(floats, target, n);
    if (to == Dtype::f8_e5m2) narrow<E5M2>(floats, target, n);
}

FASTCKPT_INLINE void cast_items(Dtype from, Dtype to, const void* source, void* target,
                                size_t count) {
    CHECK(is_castable(from, to));
    const size_t wide = width_of(from), narrow = width_of(to);
    if (from == to) {
        std::memcpy(target, source, count * wide);
        return;
    }
    float floats[kItems];
    for (size_t begin = 0; begin < count; begin += kItems) {
        const size_t n = std::min(kItems, count - begin);
        const auto* const from_here = static_cast<const uint8_t*>(source) + begin * wide;
        const uint8_t* const items = read(from, from_here, floats, n);
        write(from, to, items, static_cast<uint8_t*>(target) + begin * narrow, n);
    }
}

void cast_portable(Dtype from, Dtype to, const void* source, void* target, size_t count) {
    cast_items(from, to, source, target, count);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void cast_avx2(Dtype from, Dtype to, const void* source,
                                               void* target, size_t count) {
    cast_items(from, to, source, target, count);
}

__attribute__((target("avx2,avx512f,avx512bw,avx512vl"))) void cast_avx512(Dtype from, Dtype to,
                                                                           const void* source,
                                                                           void* target,
                                                                           size_t count) {
    cast_items(from, to, source, target, count);
}
#else
constexpr void (*cast_avx2)(Dtype, Dtype, const void*, void*, size_t) = nullptr;
constexpr void (*cast_avx512)(Dtype, Dtype, const void*, void*, size_t) = nullptr;
#endif

}  // namespace

namespace cast_kernels {

constexpr Kernel portable = {"portable", cpu::always, cast_portable};
constexpr Kernel avx2 = {"avx2", cpu::has_avx2, cast_avx2};
constexpr Kernel avx512 = {"avx512", cpu::has_avx512_bw_vl, cast_avx512};

}  // namespace cast_kernels

namespace {

// Counts the items, numbers, that are not finite: these have all bits of their dtype's mask.
uint64_t non_finite(Dtype dtype, const void* items, size_t count) {
    constexpr uint64_t kMasks[kDtypes] = {
        0, 0, 0, 0, 0x7f, 0x7f, 0x7c, 0x7c00, 0x7f80, 0x7f800000, 0x7ff0000000000000,
    };
    const size_t width = width_of(dtype);
    return count_non_finite(static_cast<const std::byte*>(items), count * width, width,
                            kMasks[static_cast<size_t>(dtype)]);
}

}  // namespace

size_t width_of(Dtype dtype) {
    constexpr uint8_t kWidths[kDtypes] = {1, 2, 4, 8, 1, 1, 1, 2, 2, 4, 8};
    return kWidths[static_cast<size_t>(dtype)];
}

bool is_castable(Dtype from, Dtype to) {
    return from == to || (from >= Dtype::f8_e4m3 && to >= Dtype::f8_e4m3);
}

uint64_t cast(Dtype from, Dtype to, const void* source, void* target, size_t count) {
    using namespace cast_kernels;
    static const Kernel& kernel = cpu::first_of({&avx512, &avx2, &portable});
    kernel.cast(from, to, source, target, count);
    if (from == to || width_of(to) > width_of(from)) return 0;
    const uint64_t after = non_finite(to, target, count);
    return after == 0 ? 0 : after - std::min(after, non_finite(from, source, count));
}

}  // namespace fastckpt
