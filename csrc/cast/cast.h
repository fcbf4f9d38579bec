// Converts floating-point numbers from one dtype to another, with the results of torch's .to() on
// CPUs: rounded to nearest, ties to even, and by way of float32, even from float64. It must not
// know tensors, files or threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastckpt {

// How an item is read or written. The first four are of 1, 2, 4 and 8 bytes of any meaning. What is
// too large for f8_e4m3, which has no infinity, becomes NaN, or with f8_e4m3_finite the largest
// number: versions of torch differ in this.
enum class Dtype : uint8_t {
    raw1,
    raw2,
    raw4,
    raw8,
    f8_e4m3,
    f8_e4m3_finite,
    f8_e5m2,
    f16,
    bf16,
    f32,
    f64,
};
constexpr uint64_t kDtypes = 11;

// The bytes of an item.
size_t width_of(Dtype dtype);

// Whether items of one dtype can become such of another: they are the same, or both are numbers.
bool is_castable(Dtype from, Dtype to);

// Converts `count` items; is_castable(from, to), and the memory does not overlap. Neither has to be
// aligned. Returns how many of them were finite, and are not any more.
uint64_t cast(Dtype from, Dtype to, const void* source, void* target, size_t count);

// The implementations behind cast(), for tests that compare them on one machine.
namespace cast_kernels {

// `cast` may be called only if supported() returns true; it is null if the kernel is for another
// architecture.
struct Kernel {
    const char* name;
    bool (*supported)();
    void (*cast)(Dtype from, Dtype to, const void* source, void* target, size_t count);
};

extern const Kernel portable;
extern const Kernel avx2;
extern const Kernel avx512;

}  // namespace cast_kernels
}  // namespace fastckpt
