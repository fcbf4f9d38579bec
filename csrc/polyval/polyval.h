// POLYVAL of RFC 8452, a universal hash over GF(2^128), by the fastest kernel that the CPU offers.
// It must not know what is hashed, or where keys come from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fastckpt {

// An element of the field: the coefficient of x^i is bit i % 8 of byte i / 8.
using Polyval = std::array<uint8_t, 16>;

// A key with its powers, which are for those who hash much under it.
struct PolyvalKey {
    explicit PolyvalKey(const Polyval& key);
    static constexpr size_t kPowers = 32;
    // powers[i] is key^(kPowers - i) by the RFC's dot(), so that the last one is the key. sums[i]
    // has, twice, the sum of the halves of powers[i].
    alignas(64) std::array<Polyval, kPowers> powers;
    alignas(64) std::array<Polyval, kPowers> sums;
};

// Returns POLYVAL(key, X_1, X_2, ...) of the 16-byte words of `data`, the last of them filled up
// with zeros. With `state`, the hash of whole words that came before, it goes on from there. Two
// inputs of the same `n` bytes that differ, and were not chosen by the key, have the same hash
// under at most n / 16, rounded up, of the 2^128 keys: their difference is a polynomial of that
// degree in the key. Under the key 0 every hash is 0.
Polyval polyval(const PolyvalKey& key, const void* data, size_t n, const Polyval& state = {});

// The implementations behind polyval(), for tests that compare them on one machine.
namespace polyval_kernels {

// `polyval` may be called only if supported() returns true; it is null if the kernel is for another
// architecture.
struct Kernel {
    const char* name;
    bool (*supported)();
    Polyval (*polyval)(const PolyvalKey& key, const void* data, size_t n, const Polyval& state);
};

extern const Kernel portable;    // table look-ups, half a byte a step
extern const Kernel pclmul;      // PCLMULQDQ + SSE4.1, 128 bytes a step
extern const Kernel vpclmulqdq;  // VPCLMULQDQ + AVX-512F, 512 bytes a step

}  // namespace polyval_kernels
}  // namespace fastckpt
