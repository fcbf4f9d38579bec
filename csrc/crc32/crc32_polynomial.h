// Arithmetic modulo the CRC-32 polynomial, which shifts checksums; also usable at compile time.
//
// All polynomials over GF(2) are bit-reflected: the most significant bit of a 32-bit value is the
// coefficient of x^0. A "state" is the CRC register itself, without the inversions that zlib's
// convention applies at both ends.
#pragma once

#include <cstdint>

namespace fastckpt::crc32_polynomial {

constexpr uint32_t kPolynomial = 0xEDB88320u;
constexpr uint32_t kOne = 0x80000000u;  // x^0
constexpr uint32_t kX = 0x40000000u;    // x^1
constexpr uint32_t kX8 = 0x00800000u;   // x^8, one byte's worth of shifting

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0); }

// This has no branches, since the bits of a CRC would make them unpredictable.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int degree = 0; degree < 32; ++degree) {
        product ^= b & -(a >> 31);
        a <<= 1;
        b = times_x(b);
    }
    return product;
}

constexpr uint32_t power(uint32_t base, uint64_t exponent) {
    uint32_t result = kOne;
    for (; exponent != 0; exponent >>= 1) {
        if ((exponent & 1) != 0) result = multiply(result, base);
        base = multiply(base, base);
    }
    return result;
}

}  // namespace fastckpt::crc32_polynomial
