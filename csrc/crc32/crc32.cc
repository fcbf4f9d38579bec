// The CRC-32 kernels and the choice between them: they compute the checksum, with or without a
// copy, at memory speed and identically on every CPU. See crc32.h.
#include "crc32/crc32.h"

#include <array>
#include <cstring>

#include "cpu.h"
#include "crc32/crc32_polynomial.h"

namespace fastckpt {

using namespace crc32_polynomial;

namespace {

// ---- Portable kernel: slicing by 16 ----

using ByteTable = std::array<uint32_t, 256>;

// kTables[k][b] is the state that byte b leaves once k zero bytes have followed it.
constexpr std::array<ByteTable, 16> make_tables() {
    std::array<ByteTable, 16> tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t state = byte;
        for (auto& table : tables) {
            for (int bit = 0; bit < 8; ++bit) state = times_x(state);
            table[byte] = state;
        }
    }
    return tables;
}

alignas(64) constexpr std::array<ByteTable, 16> kTables = make_tables();

// Keeps the compiler from loading a copied value twice: the copy and the checksum must see the same
// bytes even if the source is being written to.
template <bool kCopy, typename T>
inline T load_once(const uint8_t* source) {
    T value;
    std::memcpy(&value, source, sizeof value);
    if constexpr (kCopy) asm("" : "+r"(value));
    return value;
}

// The state left by the 8 bytes of `word` once `kFollowing` zero bytes have followed them.
template <int kFollowing>
inline uint32_t look_up(uint64_t word) {
    return kTables[kFollowing + 7][word & 0xff] ^ kTables[kFollowing + 6][word >> 8 & 0xff] ^
           kTables[kFollowing + 5][word >> 16 & 0xff] ^ kTables[kFollowing + 4][word >> 24 & 0xff] ^
           kTables[kFollowing + 3][word >> 32 & 0xff] ^ kTables[kFollowing + 2][word >> 40 & 0xff] ^
           kTables[kFollowing + 1][word >> 48 & 0xff] ^ kTables[kFollowing][word >> 56];
}

template <bool kCopy>
uint32_t update_portable(uint32_t state, uint8_t* target, const uint8_t* source, size_t n) {
    for (; n >= 16; n -= 16, source += 16) {
        const uint64_t first = load_once<kCopy, uint64_t>(source);
        const uint64_t second = load_once<kCopy, uint64_t>(source + 8);
        if constexpr (kCopy) {
            std::memcpy(target, &first, 8);
            std::memcpy(target + 8, &second, 8);
            target += 16;
        }
        state =
            look_up<8>(cpu::little_endian(first) ^ state) ^ look_up<0>(cpu::little_endian(second));
    }
    for (; n > 0; --n, ++source) {
        const uint32_t byte = load_once<kCopy, uint8_t>(source);
        if constexpr (kCopy) *target++ = static_cast<uint8_t>(byte);
        state = kTables[0][(state ^ byte) & 0xff] ^ (state >> 8);
    }
    return state;
}

#if defined(__x86_64__)

// ---- Folding kernels ----
//
// The method of V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel white paper, 2009. A 128-bit block B that is followed by `distance` more bits
// contributes B * x^distance to the message; modulo the polynomial that equals a 128-bit value that
// can be added to the block `distance` bits further on, which makes B itself superfluous. Several
// accumulators hide the latency of the multiplication. At the end one block is left whose CRC is
// that of all bytes folded into it; the tables finish it, which spares the Barrett reduction.

// The factors of a block's two halves. A block's low half holds its higher powers, hence the
// 64 bits between the two. The carry-less product of two reflected operands stands one bit low and
// a 32-bit constant stands 32 bits low in its 64-bit lane; shifting the constant left by one
// compensates for the first, subtracting 32 from the exponent for the second.
struct FoldBy {
    uint64_t low;
    uint64_t high;
};

constexpr FoldBy fold_by(uint64_t distance) {
    return {static_cast<uint64_t>(power(kX, distance + 64 - 32)) << 1,
            static_cast<uint64_t>(power(kX, distance - 32)) << 1};
}

constexpr FoldBy kFold128 = fold_by(128);
constexpr FoldBy kFold512 = fold_by(512);
constexpr FoldBy kFold2048 = fold_by(2048);

// The white paper's own constants for this polynomial.
static_assert(kFold512.low == 0x154442bd4 && kFold512.high == 0x1c6e41596);
static_assert(kFold128.low == 0x1751997d0 && kFold128.high == 0x0ccaa009e);

// Both kernels align their stores to the cache line: a streaming store that fills part of a line
// costs a read of the rest.
constexpr size_t kLine = 64;

inline size_t bytes_to_line(const void* target) {
    return -reinterpret_cast<uintptr_t>(target) % kLine;
}

// Shorter copies use the tables, since waiting for streamed stores to reach memory would take
// longer. This leaves a whole step of the wider kernel after aligning.
constexpr size_t kLeastStreamed = 320;

// How far ahead a copy prefetches its source. The processor's own prefetching ends with each page
// of 4 KiB, and then waits for the next one's address, which takes long in a virtual machine. So
// lines of the next page are prefetched, and one of a later page for its address alone. On an AMD
// EPYC (Genoa) with such pages both together copy a third more in the same time.
constexpr size_t kBytesAhead = 2048;
constexpr size_t kPageBytes = 4096;
constexpr size_t kPagesAhead = 8;

// Prefetches at the beginning of a step of kStep bytes. Addresses behind the source never fault.
template <size_t kStep>
FASTCKPT_SSE FASTCKPT_INLINE void prefetch(const uint8_t* source) {
    for (size_t line = 0; line < kStep; line += kLine)
        _mm_prefetch(reinterpret_cast<const char*>(source + kBytesAhead + line), _MM_HINT_NTA);
    if (reinterpret_cast<uintptr_t>(source) % kPageBytes < kStep)
        _mm_prefetch(reinterpret_cast<const char*>(source + kPagesAhead * kPageBytes), _MM_HINT_T0);
}

template <bool kCopy>
FASTCKPT_SSE FASTCKPT_INLINE __m128i take_block(uint8_t* target, const uint8_t* source) {
    __m128i block = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    if constexpr (kCopy) {
        asm("" : "+x"(block));  // as in load_once
        _mm_stream_si128(reinterpret_cast<__m128i*>(target), block);
    }
    return block;
}

FASTCKPT_SSE FASTCKPT_INLINE __m128i constants_sse(FoldBy by) {
    return _mm_set_epi64x(static_cast<int64_t>(by.high), static_cast<int64_t>(by.low));
}

FASTCKPT_SSE FASTCKPT_INLINE __m128i fold_sse(__m128i block, __m128i by, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(block, by, 0x00);
    const __m128i high = _mm_clmulepi64_si128(block, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Folds the remaining bytes into `block`, which stands for all before it, and reduces it.
template <bool kCopy>
FASTCKPT_SSE FASTCKPT_INLINE uint32_t finish(__m128i block, uint8_t* target, const uint8_t* source,
                                             size_t n) {
    const __m128i by128 = constants_sse(kFold128);
    for (; n >= 16; n -= 16, source += 16) {
        block = fold_sse(block, by128, take_block<kCopy>(target, source));
        if constexpr (kCopy) target += 16;
    }
    if constexpr (kCopy) _mm_sfence();
    alignas(16) uint8_t bytes[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes), block);
    const uint32_t state = update_portable<false>(0, nullptr, bytes, sizeof bytes);
    return update_portable<kCopy>(state, target, source, n);
}

template <bool kCopy>
FASTCKPT_SSE uint32_t update_pclmul(uint32_t state, uint8_t* target, const uint8_t* source,
                                    size_t n) {
    constexpr size_t kStep = 64;
    if (n < (kCopy ? kLeastStreamed : kStep)) {
        return update_portable<kCopy>(state, target, source, n);
    }
    if constexpr (kCopy) {
        const size_t head = bytes_to_line(target);
        state = update_portable<true>(state, target, source, head);
        target += head;
        source += head;
        n -= head;
    }
    __m128i blocks[4];
    const auto advance = [&] {
        if constexpr (kCopy) target += kStep;
        source += kStep;
        n -= kStep;
    };
    for (size_t i = 0; i < 4; ++i) blocks[i] = take_block<kCopy>(target + 16 * i, source + 16 * i);
    blocks[0] = _mm_xor_si128(blocks[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    advance();
    const __m128i by512 = constants_sse(kFold512);
    while (n >= kStep) {
        if constexpr (kCopy) prefetch<kStep>(source);
        for (size_t i = 0; i < 4; ++i) {
            blocks[i] =
                fold_sse(blocks[i], by512, take_block<kCopy>(target + 16 * i, source + 16 * i));
        }
        advance();
    }
    const __m128i by128 = constants_sse(kFold128);
    for (size_t i = 1; i < 4; ++i) blocks[i] = fold_sse(blocks[i - 1], by128, blocks[i]);
    return finish<kCopy>(blocks[3], target, source, n);
}

template <bool kCopy>
FASTCKPT_AVX512 FASTCKPT_INLINE __m512i take_line(uint8_t* target, const uint8_t* source) {
    __m512i line = _mm512_loadu_si512(source);
    if constexpr (kCopy) {
        asm("" : "+v"(line));  // as in load_once
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target), line);
    }
    return line;
}

FASTCKPT_AVX512 FASTCKPT_INLINE __m512i constants_avx512(FoldBy by) {
    const int64_t low = static_cast<int64_t>(by.low);
    const int64_t high = static_cast<int64_t>(by.high);
    return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

FASTCKPT_AVX512 FASTCKPT_INLINE __m512i fold_avx512(__m512i line, __m512i by, __m512i next) {
    constexpr int kXor3 = 0x96;
    const __m512i low = _mm512_clmulepi64_epi128(line, by, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(line, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, kXor3);
}

template <bool kCopy>
FASTCKPT_AVX512 uint32_t update_vpclmulqdq(uint32_t state, uint8_t* target, const uint8_t* source,
                                           size_t n) {
    constexpr size_t kStep = 256;
    static_assert(kLeastStreamed >= kStep + kLine);
    if (n < (kCopy ? kLeastStreamed : kStep)) return update_pclmul<kCopy>(state, target, source, n);
    if constexpr (kCopy) {
        const size_t head = bytes_to_line(target);
        state = update_portable<true>(state, target, source, head);
        target += head;
        source += head;
        n -= head;
    }

    __m512i lines[4];
    const auto advance = [&] {
        if constexpr (kCopy) target += kStep;
        source += kStep;
        n -= kStep;
    };
    for (size_t i = 0; i < 4; ++i) lines[i] = take_line<kCopy>(target + 64 * i, source + 64 * i);
    lines[0] = _mm512_xor_si512(lines[0],
                                _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, static_cast<int64_t>(state)));
    advance();
    const __m512i by2048 = constants_avx512(kFold2048);
    while (n >= kStep) {
        if constexpr (kCopy) prefetch<kStep>(source);
        for (size_t i = 0; i < 4; ++i) {
            lines[i] =
                fold_avx512(lines[i], by2048, take_line<kCopy>(target + 64 * i, source + 64 * i));
        }
        advance();
    }
    const __m512i by512 = constants_avx512(kFold512);
    for (size_t i = 1; i < 4; ++i) lines[i] = fold_avx512(lines[i - 1], by512, lines[i]);
    alignas(64) __m128i blocks[4];
    _mm512_store_si512(blocks, lines[3]);
    const __m128i by128 = constants_sse(kFold128);
    for (size_t i = 1; i < 4; ++i) blocks[i] = fold_sse(blocks[i - 1], by128, blocks[i]);
    return finish<kCopy>(blocks[3], target, source, n);
}

#endif  // defined(__x86_64__)

// ---- Dispatch ----

using Update = uint32_t(uint32_t state, uint8_t* target, const uint8_t* source, size_t n);

template <Update* kUpdate>
uint32_t checksum(uint32_t crc, const void* data, size_t n) {
    return ~kUpdate(~crc, nullptr, static_cast<const uint8_t*>(data), n);
}

template <Update* kUpdate>
uint32_t checksum_copy(void* target, const void* source, size_t n, uint32_t crc) {
    return ~kUpdate(~crc, static_cast<uint8_t*>(target), static_cast<const uint8_t*>(source), n);
}

}  // namespace

namespace crc32_kernels {

// constexpr definitions of the header's externs: initialised before any code runs.
constexpr Kernel portable = {"portable", cpu::always, checksum<update_portable<false>>,
                             checksum_copy<update_portable<true>>};
#if defined(__x86_64__)
constexpr Kernel pclmul = {"pclmul", cpu::has_pclmul, checksum<update_pclmul<false>>,
                           checksum_copy<update_pclmul<true>>};
constexpr Kernel vpclmulqdq = {"vpclmulqdq", cpu::has_vpclmulqdq,
                               checksum<update_vpclmulqdq<false>>,
                               checksum_copy<update_vpclmulqdq<true>>};
#else
constexpr Kernel pclmul = {"pclmul", cpu::has_pclmul, nullptr, nullptr};
constexpr Kernel vpclmulqdq = {"vpclmulqdq", cpu::has_vpclmulqdq, nullptr, nullptr};
#endif

}  // namespace crc32_kernels

namespace {

const crc32_kernels::Kernel& chosen() {
    using namespace crc32_kernels;
    static const Kernel& kernel = cpu::first_of({&vpclmulqdq, &pclmul, &portable});
    return kernel;
}

// ---- Combination ----

// The polynomial is primitive, so x has order 2^32 - 1, and lengths count modulo that.
constexpr uint64_t kOrder = 0xFFFFFFFFu;
static_assert(power(kX, kOrder) == kOne);
// kShifts[k][d] shifts a state by d * 256^k bytes.
constexpr std::array<ByteTable, 4> make_shifts() {
    std::array<ByteTable, 4> shifts{};
    uint32_t unit = kX8;
    for (auto& shift : shifts) {
        shift[0] = kOne;
        for (size_t digit = 1; digit < 256; ++digit) {
            shift[digit] = multiply(shift[digit - 1], unit);
        }
        unit = multiply(shift[255], unit);
    }
    return shifts;
}

constexpr std::array<ByteTable, 4> kShifts = make_shifts();

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, size_t n) { return chosen().crc32(crc, data, n); }

uint32_t crc32_copy(void* target, const void* source, size_t n, uint32_t crc) {
    return chosen().crc32_copy(target, source, n, crc);
}

uint32_t crc32_combine(uint32_t crc1, uint32_t crc2, uint64_t nbytes2) {
    uint64_t length = nbytes2 % kOrder;
    for (const auto& shift : kShifts) {
        const size_t digit = length & 0xff;
        if (digit != 0) crc1 = multiply(shift[digit], crc1);
        length >>= 8;
    }
    return crc1 ^ crc2;
}

const char* crc32_kernel() { return chosen().name; }

}  // namespace fastckpt
