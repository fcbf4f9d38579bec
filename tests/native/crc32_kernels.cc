// Checksum kernels against a bit-by-bit CRC-32: every short length at every alignment, with and
// without a copy, chained and combined, on memory with nothing readable or writable beyond it.
// Knows crc32.h; must not know who checksums what.
#include "crc32/crc32.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace {

using fastckpt::crc32_kernels::Kernel;

int failures = 0;

void expect(bool condition, const char* what, const Kernel& kernel, size_t nbytes, size_t skew) {
    if (condition) return;
    std::fprintf(stderr, "%s: %s, %zu bytes, skew %zu\n", kernel.name, what, nbytes, skew);
    ++failures;
}

uint32_t reference(uint32_t crc, const uint8_t* data, size_t nbytes) {
    crc = ~crc;
    for (size_t i = 0; i < nbytes; ++i) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320U : 0);
    }
    return ~crc;
}

// Allocated to the byte, so that the address sanitizer sees the first access beyond it.
struct Exact {
    Exact(size_t nbytes, size_t skew)
        : memory(new uint8_t[nbytes + skew]), data(&memory[0] + skew) {}
    std::unique_ptr<uint8_t[]> memory;
    uint8_t* data;
};

void check(const Kernel& kernel, size_t nbytes, size_t skew, std::mt19937& random) {
    const Exact source(nbytes, skew);
    const Exact target(nbytes, (skew * 7) % 64);
    for (size_t i = 0; i < nbytes; ++i) source.data[i] = static_cast<uint8_t>(random());
    const auto begin = static_cast<uint32_t>(random());
    const uint32_t wanted = reference(begin, source.data, nbytes);
    expect(kernel.crc32(begin, source.data, nbytes) == wanted, "checksum", kernel, nbytes, skew);
    std::memset(target.data, 0x5a, nbytes);
    expect(kernel.crc32_copy(target.data, source.data, nbytes, begin) == wanted,
           "checksum of a copy", kernel, nbytes, skew);
    expect(std::memcmp(target.data, source.data, nbytes) == 0, "copy", kernel, nbytes, skew);
    const size_t first = nbytes == 0 ? 0 : random() % nbytes;
    const uint32_t half = kernel.crc32(begin, source.data, first);
    expect(kernel.crc32(half, source.data + first, nbytes - first) == wanted, "chain", kernel,
           nbytes, skew);
    const uint32_t rest = kernel.crc32(0, source.data + first, nbytes - first);
    expect(fastckpt::crc32_combine(half, rest, nbytes - first) == wanted, "combination", kernel,
           nbytes, skew);
}

}  // namespace

int main() {
    std::mt19937 random(20240229);
    int supported = 0;
    for (const Kernel* kernel :
         {&fastckpt::crc32_kernels::portable, &fastckpt::crc32_kernels::pclmul,
          &fastckpt::crc32_kernels::vpclmulqdq}) {
        if (!kernel->supported()) continue;
        ++supported;
        for (size_t nbytes = 0; nbytes < 800; ++nbytes)
            for (const size_t skew : {0, 1, 8, 17, 63}) check(*kernel, nbytes, skew, random);
        for (int i = 0; i < 100; ++i) check(*kernel, random() % 50000, random() % 64, random);
    }
    if (supported == 0) ++failures;
    std::printf("crc32_kernels: %d kernels, %d failures\n", supported, failures);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
