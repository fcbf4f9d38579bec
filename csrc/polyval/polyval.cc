// The POLYVAL kernels and the choice between them. See polyval.h.
//
// dot(a, b) is the RFC's product a * b * x^-128 modulo x^128 + x^127 + x^126 + x^121 + 1, and the
// hash is S_j = dot(S_j-1 + X_j, key). Unrolled, S_j+n = dot(S_j + X_j+1, key^n) + dot(X_j+2,
// key^n-1) + ... + dot(X_j+n, key), where powers are by dot(). So the folding kernels add the plain
// products of a step up and reduce them once.
#include "polyval/polyval.h"

#include <cstring>

#include "cpu.h"

namespace fastckpt {

namespace {

constexpr size_t kWord = 16;  // bytes

// ---- Portable kernel: four bits at a time ----

// The coefficient of x^i is bit i of `low`, or bit i - 64 of `high`.
struct Element {
    uint64_t low;
    uint64_t high;
};

constexpr Element sum(Element a, Element b) { return {a.low ^ b.low, a.high ^ b.high}; }

constexpr Element times_x(Element a) {
    const uint64_t carry = -(a.high >> 63);
    return {(a.low << 1) ^ (carry & 1),
            (a.high << 1 | a.low >> 63) ^ (carry & 0xC200000000000000u)};
}

constexpr Element over_x(Element a) {
    const uint64_t carry = -(a.low & 1);
    return {a.low >> 1 | a.high << 63, (a.high >> 1) ^ (carry & 0xE100000000000000u)};
}

// kOverflow[n] is n * x^128.
constexpr std::array<Element, 16> make_overflow() {
    std::array<Element, 16> overflow{};
    for (uint64_t n = 0; n < 16; ++n) {
        overflow[n] = {0, n << 60};
        for (int i = 0; i < 4; ++i) overflow[n] = times_x(overflow[n]);
    }
    return overflow;
}

constexpr std::array<Element, 16> kOverflow = make_overflow();

Element load(const uint8_t* bytes) {
    uint64_t halves[2];
    std::memcpy(halves, bytes, kWord);
    return {cpu::little_endian(halves[0]), cpu::little_endian(halves[1])};
}

Polyval stored(Element a) {
    const uint64_t halves[2] = {cpu::little_endian(a.low), cpu::little_endian(a.high)};
    Polyval bytes;
    std::memcpy(bytes.data(), halves, kWord);
    return bytes;
}

// The products of one factor with all elements of four bits.
class Table {
  public:
    explicit Table(Element factor) {
        for (int i = 0; i < 128; ++i) factor = over_x(factor);
        multiples_[1] = factor;
        for (size_t k = 2; k < 16; ++k)
            multiples_[k] =
                k % 2 == 0 ? times_x(multiples_[k / 2]) : sum(multiples_[k - 1], factor);
    }

    Element dot(Element a) const {
        Element product{};
        for (const uint64_t half : {a.high, a.low}) {
            for (int shift = 60; shift >= 0; shift -= 4) {
                const Element carry = kOverflow[product.high >> 60];
                product = {product.low << 4, product.high << 4 | product.low >> 60};
                product = sum(sum(product, carry), multiples_[half >> shift & 15]);
            }
        }
        return product;
    }

  private:
    std::array<Element, 16> multiples_{};
};

Polyval polyval_portable(const PolyvalKey& key, const void* data, size_t n, const Polyval& state) {
    const Table table(load(key.powers.back().data()));
    const auto* source = static_cast<const uint8_t*>(data);
    Element hash = load(state.data());
    while (n > 0) {
        uint8_t word[kWord] = {};
        const size_t taken = n < kWord ? n : kWord;
        std::memcpy(word, source, taken);
        hash = table.dot(sum(hash, load(word)));
        source += taken;
        n -= taken;
    }
    return stored(hash);
}

#if defined(__x86_64__)

// ---- Folding kernels ----

// A sum of products that is not reduced yet: low + middle * x^64 + high * x^128.
struct Products {
    __m128i low;
    __m128i middle;
    __m128i high;
};

FASTCKPT_SSE FASTCKPT_INLINE Products none() {
    return {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
}

FASTCKPT_SSE FASTCKPT_INLINE void add_product(Products& products, __m128i a, __m128i b) {
    const __m128i cross =
        _mm_xor_si128(_mm_clmulepi64_si128(a, b, 0x01), _mm_clmulepi64_si128(a, b, 0x10));
    products.low = _mm_xor_si128(products.low, _mm_clmulepi64_si128(a, b, 0x00));
    products.middle = _mm_xor_si128(products.middle, cross);
    products.high = _mm_xor_si128(products.high, _mm_clmulepi64_si128(a, b, 0x11));
}

// Returns products * x^-128. By Montgomery's method: a multiple of the polynomial is added that
// clears the low 64 bits, which can then be dropped; twice.
FASTCKPT_SSE FASTCKPT_INLINE __m128i reduced(const Products& products) {
    const __m128i polynomial = _mm_set_epi64x(static_cast<int64_t>(0xC200000000000000u), 1);
    __m128i low = _mm_xor_si128(products.low, _mm_slli_si128(products.middle, 8));
    const __m128i high = _mm_xor_si128(products.high, _mm_srli_si128(products.middle, 8));
    for (int i = 0; i < 2; ++i) {
        const __m128i cleared = _mm_clmulepi64_si128(low, polynomial, 0x10);
        low = _mm_xor_si128(_mm_shuffle_epi32(low, 0x4E), cleared);
    }
    return _mm_xor_si128(low, high);
}

FASTCKPT_SSE FASTCKPT_INLINE __m128i dot(__m128i a, __m128i b) {
    Products products = none();
    add_product(products, a, b);
    return reduced(products);
}

FASTCKPT_SSE FASTCKPT_INLINE __m128i word_at(const uint8_t* source) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

constexpr size_t kWords = 8;  // in a step of the kernel without AVX-512

FASTCKPT_SSE Polyval polyval_pclmul(const PolyvalKey& key, const void* data, size_t n,
                                    const Polyval& state) {
    __m128i powers[kWords];  // from key^kWords to key
    for (size_t i = 0; i < kWords; ++i)
        powers[i] = word_at(key.powers[PolyvalKey::kPowers - kWords + i].data());
    const auto* source = static_cast<const uint8_t*>(data);
    __m128i hash = word_at(state.data());
    for (; n >= kWords * kWord; n -= kWords * kWord, source += kWords * kWord) {
        Products products = none();
        add_product(products, _mm_xor_si128(hash, word_at(source)), powers[0]);
        for (size_t i = 1; i < kWords; ++i)
            add_product(products, word_at(source + i * kWord), powers[i]);
        hash = reduced(products);
    }
    for (; n >= kWord; n -= kWord, source += kWord)
        hash = dot(_mm_xor_si128(hash, word_at(source)), powers[kWords - 1]);
    if (n > 0) {
        uint8_t word[kWord] = {};
        std::memcpy(word, source, n);
        hash = dot(_mm_xor_si128(hash, word_at(word)), powers[kWords - 1]);
    }
    Polyval bytes;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes.data()), hash);
    return bytes;
}

FASTCKPT_AVX512 FASTCKPT_INLINE __m128i sum_of_lanes(__m512i lanes) {
    alignas(64) __m128i words[4];
    _mm512_store_si512(words, lanes);
    return _mm_xor_si128(_mm_xor_si128(words[0], words[1]), _mm_xor_si128(words[2], words[3]));
}

// How far ahead the source is prefetched, in lines and in pages for their addresses alone: the
// processor's own prefetching ends with each page, and a step is so long that few of the next one's
// loads are under way. On an AMD EPYC (Turin) in a virtual machine, 2.2 GB take 36 ms on two
// threads instead of 48.
constexpr size_t kBytesAhead = 4096;
constexpr size_t kPageBytes = 4096;
constexpr size_t kPagesAhead = 4;

// Karatsuba's method spares one product in four: the middle one is that of the sums of the halves,
// less the other two.
FASTCKPT_AVX512 Polyval polyval_vpclmulqdq(const PolyvalKey& key, const void* data, size_t n,
                                           const Polyval& state) {
    constexpr size_t kLine = 64, kLines = 8, kStep = kLines * kLine;
    constexpr int kXor3 = 0x96;
    constexpr auto kSwapHalves = static_cast<_MM_PERM_ENUM>(0x4E);
    static_assert(kStep == PolyvalKey::kPowers * kWord);
    const auto* source = static_cast<const uint8_t*>(data);
    __m128i hash = word_at(state.data());
    for (; n >= kStep; n -= kStep, source += kStep) {
        if (reinterpret_cast<uintptr_t>(source) % kPageBytes < kStep)
            _mm_prefetch(reinterpret_cast<const char*>(source + kPagesAhead * kPageBytes),
                         _MM_HINT_T0);
        __m512i low = _mm512_setzero_si512(), middle = low, high = low;
        for (size_t i = 0; i < kLines; ++i) {
            const size_t at = i * kLine;
            _mm_prefetch(reinterpret_cast<const char*>(source + kBytesAhead + at), _MM_HINT_T0);
            __m512i line = _mm512_loadu_si512(source + at);
            if (i == 0) line = _mm512_xor_si512(line, _mm512_zextsi128_si512(hash));
            const __m512i by = _mm512_load_si512(&key.powers[at / kWord]);
            const __m512i by_sum = _mm512_load_si512(&key.sums[at / kWord]);
            // Masked by all ones, since GCC 12 takes the plain form's undefined operand for a
            // fault.
            const __m512i swapped = _mm512_maskz_shuffle_epi32(0xFFFF, line, kSwapHalves);
            const __m512i sum = _mm512_xor_si512(line, swapped);
            low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128(line, by, 0x00));
            middle = _mm512_xor_si512(middle, _mm512_clmulepi64_epi128(sum, by_sum, 0x00));
            high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128(line, by, 0x11));
        }
        middle = _mm512_ternarylogic_epi64(middle, low, high, kXor3);
        hash = reduced({sum_of_lanes(low), sum_of_lanes(middle), sum_of_lanes(high)});
    }
    Polyval bytes;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes.data()), hash);
    return n > 0 ? polyval_pclmul(key, source, n, bytes) : bytes;
}

#endif  // defined(__x86_64__)

}  // namespace

namespace polyval_kernels {

// constexpr definitions of the header's externs: initialised before any code runs.
constexpr Kernel portable = {"portable", cpu::always, polyval_portable};
#if defined(__x86_64__)
constexpr Kernel pclmul = {"pclmul", cpu::has_pclmul, polyval_pclmul};
constexpr Kernel vpclmulqdq = {"vpclmulqdq", cpu::has_vpclmulqdq, polyval_vpclmulqdq};
#else
constexpr Kernel pclmul = {"pclmul", cpu::has_pclmul, nullptr};
constexpr Kernel vpclmulqdq = {"vpclmulqdq", cpu::has_vpclmulqdq, nullptr};
#endif

}  // namespace polyval_kernels

namespace {

const polyval_kernels::Kernel& chosen() {
    using namespace polyval_kernels;
    static const Kernel& kernel = cpu::first_of({&vpclmulqdq, &pclmul, &portable});
    return kernel;
}

}  // namespace

PolyvalKey::PolyvalKey(const Polyval& key) {
    const Element factor = load(key.data());
    const Table table(factor);
    Element power = factor;
    for (size_t i = kPowers; i-- > 0; power = table.dot(power)) {
        powers[i] = stored(power);
        sums[i] = stored({power.low ^ power.high, power.low ^ power.high});
    }
}

Polyval polyval(const PolyvalKey& key, const void* data, size_t n, const Polyval& state) {
    return chosen().polyval(key, data, n, state);
}

}  // namespace fastckpt
