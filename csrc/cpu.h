// CPU features, and the choice of a function's fastest kernel that the CPU supports.
#pragma once

#include <cstdint>
#include <initializer_list>

// For what is compiled once for each kernel.
#define FASTCKPT_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <immintrin.h>
#define FASTCKPT_SSE __attribute__((target("pclmul,sse4.1")))
#define FASTCKPT_AVX512 __attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq")))
#endif

namespace fastckpt::cpu {

inline bool always() { return true; }

#if defined(__x86_64__)
inline bool has_avx2() {
    __builtin_cpu_init();  // a constructor of another unit may come first
    return __builtin_cpu_supports("avx2") != 0;
}
inline bool has_avx512_bw_vl() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}
inline bool has_pclmul() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}
inline bool has_vpclmulqdq() {
    return has_pclmul() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("vpclmulqdq");
}
#else
inline bool has_avx2() { return false; }
inline bool has_avx512_bw_vl() { return false; }
inline bool has_pclmul() { return false; }
inline bool has_vpclmulqdq() { return false; }
#endif

inline uint64_t little_endian(uint64_t value) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(value);
#else
    return value;
#endif
}

// The first kernel that is supported here; one is.
template <typename Kernel>
const Kernel& first_of(std::initializer_list<const Kernel*> kernels) {
    const Kernel* const* kernel = kernels.begin();
    while (!(*kernel)->supported()) ++kernel;
    return **kernel;
}

}  // namespace fastckpt::cpu
