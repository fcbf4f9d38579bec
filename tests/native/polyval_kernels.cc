// Hash kernels against the worked example of RFC 8452 and against each other: every short length at
// several alignments, on memory with nothing readable beyond it. Knows polyval.h; must not know who
// hashes what.
#include "polyval/polyval.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

namespace {

using fastckpt::Polyval;
using fastckpt::PolyvalKey;
using fastckpt::polyval_kernels::Kernel;

int failures = 0;

void expect(bool condition, const Kernel& kernel, size_t nbytes, size_t skew) {
    if (condition) return;
    std::fprintf(stderr, "%s: %zu bytes, skew %zu\n", kernel.name, nbytes, skew);
    ++failures;
}

// RFC 8452, Appendix A.
constexpr Polyval kKey = {0x25, 0x62, 0x93, 0x47, 0x58, 0x92, 0x42, 0x76,
                          0x1d, 0x31, 0xf8, 0x26, 0xba, 0x4b, 0x75, 0x7b};
constexpr uint8_t kWords[32] = {0x4f, 0x4f, 0x95, 0x66, 0x8c, 0x83, 0xdf, 0xb6, 0x40, 0x17, 0x62,
                                0xbb, 0x2d, 0x01, 0xa2, 0x62, 0xd1, 0xa2, 0x4d, 0xdd, 0x27, 0x21,
                                0xd0, 0x06, 0xbb, 0xe4, 0x5f, 0x20, 0xd3, 0xc9, 0xf3, 0x62};
constexpr Polyval kHash = {0xf7, 0xa3, 0xb4, 0x7b, 0x84, 0x61, 0x19, 0xfa,
                           0xe5, 0xb7, 0x86, 0x6c, 0xf5, 0xe5, 0xb7, 0x7e};

void check(const Kernel& kernel, size_t nbytes, size_t skew, std::mt19937& random) {
    // Allocated to the byte, so that the address sanitizer sees the first access beyond it.
    const std::unique_ptr<uint8_t[]> memory(new uint8_t[nbytes + skew]);
    uint8_t* const data = &memory[0] + skew;
    for (size_t i = 0; i < nbytes; ++i) data[i] = static_cast<uint8_t>(random());
    Polyval key;
    for (auto& byte : key) byte = static_cast<uint8_t>(random());
    const PolyvalKey powers(key);
    const Polyval wanted = fastckpt::polyval_kernels::portable.polyval(powers, data, nbytes, {});
    expect(kernel.polyval(powers, data, nbytes, {}) == wanted, kernel, nbytes, skew);
    const size_t half = nbytes / 32 * 16;
    const Polyval state = kernel.polyval(powers, data, half, {});
    expect(kernel.polyval(powers, data + half, nbytes - half, state) == wanted, kernel, nbytes,
           skew);
}

}  // namespace

int main() {
    std::mt19937 random(20261123);
    int supported = 0;
    for (const Kernel* kernel :
         {&fastckpt::polyval_kernels::portable, &fastckpt::polyval_kernels::pclmul,
          &fastckpt::polyval_kernels::vpclmulqdq}) {
        if (!kernel->supported()) continue;
        ++supported;
        expect(kernel->polyval(PolyvalKey(kKey), kWords, sizeof kWords, {}) == kHash, *kernel,
               sizeof kWords, 0);
        for (size_t nbytes = 0; nbytes < 400; ++nbytes)
            for (const size_t skew : {0, 1, 17}) check(*kernel, nbytes, skew, random);
        for (int i = 0; i < 100; ++i) check(*kernel, random() % 20000, random() % 64, random);
    }
    if (supported == 0) ++failures;
    std::printf("polyval_kernels: %d kernels, %d failures\n", supported, failures);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
