// Canonical Huffman codes for each block of a frame, whose weights are described by a code of their
// own. The names are those of RFC 8878: "state", "weight", "stream". See literals.h.
#include "planes/literals.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "check.h"

#define FASTCKPT_INLINE inline __attribute__((always_inline))

namespace fastckpt {
namespace {

// The exponents of a row of numbers are more alike than those of a tensor, so that small blocks
// gain more; each costs the description of its codes, and a decoder their table.
constexpr size_t kBlockBytes = 32 << 10;
constexpr uint32_t kMagic = 0xFD2FB528;
constexpr uint8_t kSizeOfFourBytes = 0xA0;  // with a single segment: the window is the content
constexpr size_t kFrameHeaderBytes = 9, kBlockHeaderBytes = 3;
constexpr size_t kCountMin = 16;  // of a block that is not raw
enum BlockType : uint32_t { kRaw = 0, kRepeated = 1, kCompressed = 2 };

constexpr size_t kSymbols = 256;
constexpr uint32_t kBitsMax = 11;  // of a code
constexpr size_t kStreams = 4;
constexpr size_t kStreamBytes = kBlockBytes / kStreams * kBitsMax / 8 + 8;
constexpr size_t kJumpBytes = 2 * (kStreams - 1);
constexpr size_t kLiteralsHeaderBytes = 5;  // of four streams, and sizes of 18 bits
constexpr size_t kDescriptionMax = 128;     // its first byte is below this, and tells its size

using Counts = std::array<uint32_t, kSymbols>;
using Lengths = std::array<uint8_t, kSymbols>;  // of codes, 0 for none

void store(uint8_t* target, uint64_t value, size_t nbytes) {
    for (size_t i = 0; i < nbytes; ++i) target[i] = static_cast<uint8_t>(value >> 8 * i);
}

// Stores the eight bytes of a value, the lowest first.
inline void store_word(uint8_t* target, uint64_t value) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    std::memcpy(target, &value, sizeof value);
}

uint32_t log2_of(uint32_t value) { return 31 - static_cast<uint32_t>(__builtin_clz(value)); }

// Bits that are read from their end on: the first one that was put is the last one that is read.
class BitWriter {
  public:
    explicit BitWriter(uint8_t* target) : begin_(target), at_(target) {}
    void put(uint32_t value, uint32_t nbits) {
        bits_ |= uint64_t{value} << nbits_;
        for (nbits_ += nbits; nbits_ >= 8; nbits_ -= 8, bits_ >>= 8)
            *at_++ = static_cast<uint8_t>(bits_);
    }
    // Fills the last byte with zeros; returns how many bytes there are.
    size_t end() {
        if (nbits_ > 0) *at_++ = static_cast<uint8_t>(bits_);
        return static_cast<size_t>(at_ - begin_);
    }

  private:
    uint8_t* const begin_;
    uint8_t* at_;
    uint64_t bits_ = 0;
    uint32_t nbits_ = 0;
};

// ---- The lengths of codes ----

Counts counted(const uint8_t* source, size_t count) {
    // Equal bytes in a row would wait for one another in a single table.
    constexpr size_t kTables = 8;
    static_assert(kBlockBytes / kTables + kTables <= UINT16_MAX);
    uint16_t tables[kTables][kSymbols] = {};
    size_t i = 0;
    for (; i + kTables <= count; i += kTables) {
        uint64_t word;
        std::memcpy(&word, source + i, sizeof word);
        for (size_t k = 0; k < kTables; ++k) ++tables[k][word >> 8 * k & 0xff];
    }
    for (; i < count; ++i) ++tables[0][source[i]];
    Counts counts{};
    for (const auto& table : tables)
        for (size_t s = 0; s < kSymbols; ++s) counts[s] += table[s];
    return counts;
}

// Whether a code may make a block worth decoding, by the chance that two of its bytes are equal:
// the entropy is no less than what that tells.
bool may_gain(const Counts& counts, size_t count) {
    uint64_t equal = 0;  // pairs
    for (const uint32_t each : counts) equal += uint64_t{each} * each;
    constexpr double kChance = 0.004645340292979;  // 2^-7.75: of 8 bits, 1/32 less
    return static_cast<double>(equal) > kChance * static_cast<double>(count * count);
}

// Makes codes no longer than kBitsMax, and so long that they fill the space of codes again.
// `symbols` are those with a code, the rarest first.
void limit(Lengths& lengths, const uint8_t* symbols, size_t n) {
    const auto room_of = [&](uint8_t symbol) { return 1 << (kBitsMax - lengths[symbol]); };
    int excess = -(1 << kBitsMax);
    for (size_t i = 0; i < n; ++i) {
        uint8_t& length = lengths[symbols[i]];
        length = std::min<uint8_t>(length, kBitsMax);
        excess += room_of(symbols[i]);
    }
    while (excess > 0) {  // the longest that may become longer, of these the rarest
        size_t longest = n;
        for (size_t i = 0; i < n; ++i) {
            if (lengths[symbols[i]] == kBitsMax) continue;
            if (longest == n || lengths[symbols[i]] > lengths[symbols[longest]]) longest = i;
        }
        ++lengths[symbols[longest]];
        excess -= room_of(symbols[longest]);
    }
    // Whatever is left is a multiple of the room of the longest codes, so one always fits.
    for (size_t i = n; excess < 0; i = i == 1 ? n : i - 1) {
        if (room_of(symbols[i - 1]) > -excess) continue;
        excess += room_of(symbols[i - 1]);
        --lengths[symbols[i - 1]];
    }
}

// Returns the lengths of an optimal code of symbols of which two or more occur.
Lengths lengths_of(const Counts& counts) {
    uint32_t keys[kSymbols];  // a count and its symbol
    size_t n = 0;
    for (size_t s = 0; s < kSymbols; ++s)
        if (counts[s] > 0) keys[n++] = counts[s] << 8 | static_cast<uint32_t>(s);
    std::sort(keys, keys + n);
    // Nodes are the symbols, the rarest first, and then those that join two, which become ascending
    // by themselves; the last one is the root.
    uint32_t weights[2 * kSymbols], parents[2 * kSymbols], depths[2 * kSymbols];
    for (size_t i = 0; i < n; ++i) weights[i] = keys[i] >> 8;
    size_t symbol = 0, joined = n;
    for (size_t node = n; node < 2 * n - 1; ++node) {
        const auto take = [&] {
            const bool is_symbol =
                symbol < n && (joined == node || weights[symbol] <= weights[joined]);
            const size_t taken = is_symbol ? symbol++ : joined++;
            parents[taken] = static_cast<uint32_t>(node);
            return weights[taken];
        };
        const uint32_t first = take();
        weights[node] = first + take();
    }
    Lengths lengths{};
    uint8_t symbols[kSymbols];
    depths[2 * n - 2] = 0;
    for (size_t i = 2 * n - 2; i-- > 0;) depths[i] = depths[parents[i]] + 1;
    for (size_t i = 0; i < n; ++i) {
        symbols[i] = static_cast<uint8_t>(keys[i]);
        lengths[symbols[i]] = static_cast<uint8_t>(depths[i]);
    }
    if (depths[0] > kBitsMax) limit(lengths, symbols, n);
    return lengths;
}

// ---- The description of codes ----

constexpr uint32_t kLog = 6, kStates = 1 << kLog;  // of the code of weights
constexpr size_t kWeights = kBitsMax + 1;          // their values
using Shares = std::array<uint32_t, kWeights>;     // how many states a weight has

// A code of weights, in which a state stands for one weight, and passes on to the next state.
class WeightCode {
  public:
    explicit WeightCode(const Shares& shares) {
        uint8_t weights[kStates];
        constexpr uint32_t kStep = (kStates >> 1) + (kStates >> 3) + 3;
        for (uint32_t weight = 0, at = 0; weight < kWeights; ++weight)
            for (uint32_t i = 0; i < shares[weight]; ++i, at = (at + kStep) % kStates)
                weights[at] = static_cast<uint8_t>(weight);
        Shares next = shares;
        for (uint32_t state = 0; state < kStates; ++state) {
            const uint32_t number = next[weights[state]]++;
            const uint32_t nbits = kLog - log2_of(number);
            bits_[state] = static_cast<uint8_t>(nbits);
            const uint32_t least = (number << nbits) - kStates;
            for (uint32_t after = least; after < least + (1 << nbits); ++after)
                before_[weights[state]][after] = static_cast<uint8_t>(state);
            // The first state of a weight takes the most bits, and so ends what is decoded.
            if (number == shares[weights[state]]) last_[weights[state]] = state;
        }
    }

    uint32_t last(uint8_t weight) const { return last_[weight]; }

    // Puts what leads to a state from the state of a weight, and returns the latter.
    uint32_t step(BitWriter& bits, uint8_t weight, uint32_t after) const {
        const uint32_t state = before_[weight][after];
        // What a state leads to begins at a multiple of how many these are.
        bits.put(after & ((1u << bits_[state]) - 1), bits_[state]);
        return state;
    }

  private:
    uint8_t bits_[kStates];
    uint8_t before_[kWeights][kStates];
    uint32_t last_[kWeights];
};

// Returns shares of the states that are like those of the weights, of which two or more occur.
Shares shares_of(const uint8_t* weights, size_t n) {
    Shares shares{};
    for (size_t i = 0; i < n; ++i) ++shares[weights[i]];
    uint32_t left = kStates;
    for (uint32_t& share : shares) {
        if (share > 0) share = std::max<uint32_t>(1, share * kStates / static_cast<uint32_t>(n));
        left -= share;  // may be below zero, and wrap around
    }
    *std::max_element(shares.begin(), shares.end()) += left;
    return shares;
}

void put_shares(BitWriter& bits, const Shares& shares) {
    bits.put(kLog - 5, 4);
    uint32_t left = kStates + 1, threshold = kStates, nbits = kLog + 1;
    for (size_t weight = 0; left > 1; ++weight) {
        const uint32_t share = shares[weight];
        const uint32_t shorter = 2 * threshold - 1 - left;  // values that take a bit less
        const uint32_t value = share + 1 >= threshold ? share + 1 + shorter : share + 1;
        bits.put(value, nbits - (value < shorter));
        left -= share;
        for (; left < threshold; threshold >>= 1) --nbits;
        if (share > 0) continue;
        size_t zeros = 0;
        for (; shares[weight + 1] == 0; ++weight) ++zeros;
        for (; zeros >= 3; zeros -= 3) bits.put(3, 2);
        bits.put(static_cast<uint32_t>(zeros), 2);
    }
}

// Fills target, of kDescriptionMax, with the weights of all symbols but the last that has a code;
// returns how many bytes these are, or 0 if they cannot be described.
size_t put_weights(const Lengths& lengths, uint8_t* target) {
    uint8_t weights[kSymbols];
    const uint32_t longest = *std::max_element(lengths.begin(), lengths.end());
    size_t n = 0;
    for (size_t s = 0; s < kSymbols; ++s) {
        weights[s] = static_cast<uint8_t>(lengths[s] > 0 ? longest + 1 - lengths[s] : 0);
        if (lengths[s] > 0) n = s;
    }
    if (n < 2 || std::count(weights, weights + n, weights[0]) == static_cast<int>(n)) {
        if (n > kDescriptionMax) return 0;  // of one value, for which there is no code
        target[0] = static_cast<uint8_t>(kDescriptionMax - 1 + n);
        for (size_t i = 0; i < n; i += 2)
            target[1 + i / 2] =
                static_cast<uint8_t>(weights[i] << 4 | (i + 1 < n ? weights[i + 1] : 0));
        return 1 + (n + 1) / 2;
    }
    uint8_t described[2 * kSymbols];
    const Shares shares = shares_of(weights, n);
    BitWriter header(described);
    put_shares(header, shares);
    const size_t header_nbytes = header.end();
    const WeightCode code(shares);
    BitWriter bits(described + header_nbytes);
    uint32_t states[2];  // of the weights at even and odd places
    states[(n - 1) % 2] = code.last(weights[n - 1]);
    states[n % 2] = code.last(weights[n - 2]);
    for (size_t i = n - 2; i-- > 0;) states[i % 2] = code.step(bits, weights[i], states[i % 2]);
    bits.put(states[1], kLog);
    bits.put(states[0], kLog);
    bits.put(1, 1);
    const size_t nbytes = header_nbytes + bits.end();
    if (nbytes >= kDescriptionMax) return 0;
    target[0] = static_cast<uint8_t>(nbytes);
    std::memcpy(target + 1, described, nbytes);
    return 1 + nbytes;
}

// ---- Codes ----

// A code in the highest bits, and how many these are in the lowest byte.
using Codes = std::array<uint64_t, kSymbols>;

Codes codes_of(const Lengths& lengths) {
    uint32_t of_length[kBitsMax + 2] = {}, next[kBitsMax + 2] = {};
    for (const uint8_t length : lengths) ++of_length[length];
    for (uint32_t length = kBitsMax; length > 0; --length)
        next[length] = (next[length + 1] + (length < kBitsMax ? of_length[length + 1] : 0)) >> 1;
    Codes codes{};
    for (size_t s = 0; s < kSymbols; ++s)
        if (const uint32_t length = lengths[s])
            codes[s] = uint64_t{next[length]++} << (64 - length) | length;
    return codes;
}

// Bytes become the codes of a stream from the last one on, by `put`. It is copied where many
// follow, so that the compiler keeps it in registers.
struct Stream {
    const uint8_t* from;  // the end of what is left
    uint8_t* to;
    uint64_t bits;  // the highest ones are yet to be stored
    uint64_t nbits;

    // Puts so many codes. Each shifts what stands before it down, so that the lowest byte of a code
    // falls out at the bottom: with 7 bits left and four codes, 51 bits at the top are right.
    template <int kCodes>
    FASTCKPT_INLINE void put(const Codes& codes) {
        static_assert(7 + kCodes * kBitsMax <= 56);
        for (int i = 1; i <= kCodes; ++i) {
            const uint64_t code = codes[from[-i]];
            bits = bits >> (code & 63) | code;
            nbits += code;
        }
        from -= kCodes;
        nbits &= 63;
        store_word(to, bits >> 1 >> (63 - nbits));
        to += nbits / 8;
        nbits %= 8;
    }
    // Marks the end of the bits, and returns where the bytes end.
    uint8_t* end() {
        *to = static_cast<uint8_t>(bits >> 1 >> (63 - nbits) | uint64_t{1} << nbits);
        return to + 1;
    }
};

// Puts four times as many codes of two streams, which do not wait for one another.
FASTCKPT_INLINE void put_both(Stream& one, Stream& other, size_t fours, const Codes& codes) {
    Stream first = one, second = other;
    for (; fours > 0; --fours) {
        first.put<4>(codes);
        second.put<4>(codes);
    }
    one = first;
    other = second;
}

// Fills target with the streams of a block; returns their size.
FASTCKPT_INLINE size_t put_streams_by(const uint8_t* source, size_t count, const Codes& codes,
                                      uint8_t* target) {
    uint8_t bytes[kStreams][kStreamBytes];
    Stream streams[kStreams];
    const size_t of_each = (count + kStreams - 1) / kStreams;
    const size_t of_last = count - (kStreams - 1) * of_each;
    for (size_t k = 0; k < kStreams; ++k) {
        size_t left = k + 1 < kStreams ? of_each : of_last;
        streams[k] = {source + k * of_each + left, bytes[k], 0, 0};
        for (; left > of_last / 4 * 4; --left) streams[k].put<1>(codes);
    }
    for (size_t k = 0; k < kStreams; k += 2)
        put_both(streams[k], streams[k + 1], of_last / 4, codes);
    size_t end = kJumpBytes;
    for (size_t k = 0; k < kStreams; ++k) {
        const auto nbytes = static_cast<size_t>(streams[k].end() - bytes[k]);
        if (k + 1 < kStreams) store(target + 2 * k, nbytes, 2);
        std::memcpy(target + end, bytes[k], nbytes);
        end += nbytes;
    }
    return end;
}

#if defined(__x86_64__)

__attribute__((target("bmi2"))) size_t put_streams_bmi2(const uint8_t* source, size_t count,
                                                        const Codes& codes, uint8_t* target) {
    return put_streams_by(source, count, codes, target);
}

bool has_bmi2() {
    static const bool has = __builtin_cpu_supports("bmi2");
    return has;
}

#endif  // defined(__x86_64__)

size_t put_streams(const uint8_t* source, size_t count, const Codes& codes, uint8_t* target) {
#if defined(__x86_64__)
    if (has_bmi2()) return put_streams_bmi2(source, count, codes, target);
#endif
    return put_streams_by(source, count, codes, target);
}

// ---- Blocks ----

size_t put_block_header(uint8_t* target, bool is_last, BlockType type, size_t nbytes) {
    store(target, is_last | type << 1 | nbytes << 3, kBlockHeaderBytes);
    return kBlockHeaderBytes;
}

// Fills target with a block; returns its size, or 0 if it would have more than `capacity` bytes.
size_t put_block(const uint8_t* source, size_t count, bool is_last, uint8_t* target,
                 size_t capacity) {
    if (std::memcmp(source, source + 1, count - 1) == 0) {  // all are equal
        if (capacity < kBlockHeaderBytes + 1) return 0;
        put_block_header(target, is_last, kRepeated, count);
        target[kBlockHeaderBytes] = source[0];
        return kBlockHeaderBytes + 1;
    }
    const auto put_raw = [&]() -> size_t {
        if (capacity < kBlockHeaderBytes + count) return 0;
        put_block_header(target, is_last, kRaw, count);
        std::memcpy(target + kBlockHeaderBytes, source, count);
        return kBlockHeaderBytes + count;
    };
    if (count < kCountMin) return put_raw();
    const Counts counts = counted(source, count);
    if (!may_gain(counts, count)) return put_raw();
    const Lengths lengths = lengths_of(counts);
    uint8_t description[kDescriptionMax];
    const size_t described = put_weights(lengths, description);
    size_t nbits = 0;
    for (size_t s = 0; s < kSymbols; ++s) nbits += counts[s] * lengths[s];
    // With the ends of streams, and the number of sequences, which is none.
    const size_t most =
        kLiteralsHeaderBytes + described + kJumpBytes + nbits / 8 + 2 * kStreams + 1;
    if (described == 0 || most > count - count / 32) return put_raw();
    if (capacity < kBlockHeaderBytes + most) return 0;
    uint8_t* const literals = target + kBlockHeaderBytes;
    uint8_t* const coded = literals + kLiteralsHeaderBytes;
    std::memcpy(coded, description, described);
    const size_t nbytes =
        described + put_streams(source, count, codes_of(lengths), coded + described);
    constexpr uint64_t kHuffman = 2, kSizesOf18Bits = 3;
    store(literals, kHuffman | kSizesOf18Bits << 2 | count << 4 | nbytes << 22,
          kLiteralsHeaderBytes);
    coded[nbytes] = 0;  // sequences
    const size_t size = kLiteralsHeaderBytes + nbytes + 1;
    CHECK(size <= most);
    return put_block_header(target, is_last, kCompressed, size) + size;
}

}  // namespace

size_t put_literals(const uint8_t* source, size_t count, uint8_t* target, size_t capacity) {
    CHECK(count > 0 && count <= UINT32_MAX);
    if (capacity < kFrameHeaderBytes) return 0;
    store(target, kMagic, 4);
    target[4] = kSizeOfFourBytes;
    store(target + 5, count, 4);
    size_t end = kFrameHeaderBytes;
    for (size_t begin = 0; begin < count; begin += kBlockBytes) {
        const size_t some = std::min(kBlockBytes, count - begin);
        const size_t size =
            put_block(source + begin, some, begin + some == count, target + end, capacity - end);
        if (size == 0) return 0;
        end += size;
    }
    return end;
}

}  // namespace fastckpt
