// CRC-32 as defined by zip and zlib (polynomial 0xEDB88320, bit-reflected, inverted before and
// after), alone or fused with a copy, computed by the fastest kernel that the CPU supports.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastckpt {

// Continues `crc` (0 to begin) over `n` bytes of `data`; equal to zlib.crc32(data, crc).
uint32_t crc32(uint32_t crc, const void* data, size_t n);

// Copies `n` bytes from `source` to `target`, which must not overlap, and continues `crc` over
// them. Each byte is loaded once, so that the result is the CRC of the bytes stored even if another
// thread writes to `source` meanwhile. Stores bypass the cache if the kernel can do so; they come
// before any store that follows the call.
uint32_t crc32_copy(void* target, const void* source, size_t n, uint32_t crc);

// The CRC of a concatenation, from the CRCs of its two parts and the length of the second in bytes.
uint32_t crc32_combine(uint32_t crc1, uint32_t crc2, uint64_t nbytes2);

// The kernel that crc32 and crc32_copy use here: "vpclmulqdq", "pclmul" or "portable".
const char* crc32_kernel();

// The implementations behind the functions above, for tests that compare them on one machine.
namespace crc32_kernels {

// `crc32` and `crc32_copy` may be called only if supported() returns true; they are null if the
// kernel is for another architecture.
struct Kernel {
    const char* name;
    bool (*supported)();
    uint32_t (*crc32)(uint32_t crc, const void* data, size_t n);
    uint32_t (*crc32_copy)(void* target, const void* source, size_t n, uint32_t crc);
};

extern const Kernel portable;    // table look-ups, 16 bytes a step
extern const Kernel pclmul;      // PCLMULQDQ + SSE4.1, 64 bytes a step
extern const Kernel vpclmulqdq;  // VPCLMULQDQ + AVX-512F, 256 bytes a step

}  // namespace crc32_kernels
}  // namespace fastckpt
