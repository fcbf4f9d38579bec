// The source of the CUDA kernel that computes the CRC-32 of ranges of device memory. NVRTC compiles
// it to crc32_ptx.h (crc32_kernel.py), and the tests' driver stub runs it as plain C++. It divides
// a chunk among threads. It must not know streams or blocks, and it has no includes, because NVRTC
// has no header files.
//
// 256 threads read a chunk as rows of 4096 bytes, 16 bytes per thread, so that loads are coalesced.
// A thread moves from one row to the next with one look-up per byte, in tables of the state that a
// byte becomes after 4096 zero bytes. The last row ends with the chunk's last complete 16 bytes.
// Bytes missing at the beginning of the first row count as zero, which does not change a zero
// state. At the end each thread multiplies its state by the power of x for its place in the row;
// the sum of these products is the chunk's state. One thread adds the last bytes, at most 15. The
// caller does the inversions of zlib's convention.
//
// Estimated, not measured: look-ups in shared memory, with the bank conflicts of random bytes,
// allow 9 bytes per clock and multiprocessor, which is 2 TB/s on an H100. A block of 8 MiB has 128
// chunks of 16 rows, and each row costs a memory access: together about 10 microseconds with the
// launch, which is several hundred GB/s.
#ifndef FASTCKPT_CRC32_KERNEL_H
#define FASTCKPT_CRC32_KERNEL_H

#ifdef __CUDACC__
#define FASTCKPT_DEVICE __device__ inline
#else
#define FASTCKPT_DEVICE inline
#endif

namespace fastckpt::gpu_crc32 {

using Word = unsigned;
using Address = unsigned long long;

// These are enumerations, because NVRTC makes variables of typed constants.
enum : unsigned {
    kThreads = 256,
    kGranule = 16,
    kRow = kThreads * kGranule,
    kChunk = 16 * kRow,
    kRangesMax = 128,          // a kernel's parameters have 4 KiB at most
    kPolynomial = 0xEDB88320,  // reflected
};
enum : Address { kWhole = ~Address{kGranule - 1} };

struct Range {
    Address begin, end;
    unsigned first_chunk;  // of all chunks of the launch
    unsigned unused;
};

// The kernel's parameter, by value. Each chunk has a block of threads. Chunks are numbered through
// all ranges, none of which is empty.
struct Work {
    Address tables;  // of Tables
    Address states;  // of a Word for each chunk: its state, begun as zero
    Address count;
    Range ranges[kRangesMax];
};

struct Tables {
    Word row[4][256];      // [k][b]: the state that b in byte k becomes after kRow zero bytes
    Word place[kThreads];  // x^(8n), n: bytes from the last word of a thread's granule to the end
};

struct Shared {
    Word row[4][256];
    Word states[kThreads];
};

// Bytes that may be of any type elsewhere.
struct __attribute__((may_alias, aligned(16))) Granule {
    Word words[4];
};

struct Chunk {
    Address begin, end;
};

// Cuts chunks at multiples of 16 bytes, so that only a range's ends are ragged.
FASTCKPT_DEVICE Chunk chunk_of(const Work& work, unsigned number) {
    unsigned low = 0, high = static_cast<unsigned>(work.count);
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if (work.ranges[middle].first_chunk <= number)
            low = middle;
        else
            high = middle;
    }
    const Address range_begin = work.ranges[low].begin, range_end = work.ranges[low].end;
    const Address begin =
        (range_begin & kWhole) + Address{number - work.ranges[low].first_chunk} * kChunk;
    const Address end = begin + kChunk;
    return {begin < range_begin ? range_begin : begin, end < range_end ? end : range_end};
}

FASTCKPT_DEVICE Word times_x(Word a) { return (a >> 1) ^ (kPolynomial & (0u - (a & 1u))); }

FASTCKPT_DEVICE Word multiply(Word a, Word b) {
    Word product = 0;
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (int degree = 0; degree < 32; ++degree) {
        product ^= b & (0u - (a >> 31));
        a <<= 1;
        b = times_x(b);
    }
    return product;
}

FASTCKPT_DEVICE Word after_a_word(Word state) {
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (int bit = 0; bit < 32; ++bit) state = times_x(state);
    return state;
}

FASTCKPT_DEVICE unsigned byte_at(Address at) { return *reinterpret_cast<const unsigned char*>(at); }

FASTCKPT_DEVICE Granule load(Address at) { return *reinterpret_cast<const Granule*>(at); }

// Loads a granule in which bytes before `begin` count as zero, and are not touched.
FASTCKPT_DEVICE Granule load_from(Address at, Address begin) {
    if (at >= begin) return load(at);
    Granule granule = {};
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (Address i = begin - at; i < kGranule; ++i) {
        const unsigned byte = byte_at(at + i) << (8 * (i % 4));
        // Without an index, since registers cannot be indexed.
        granule.words[0] |= i / 4 == 0 ? byte : 0;
        granule.words[1] |= i / 4 == 1 ? byte : 0;
        granule.words[2] |= i / 4 == 2 ? byte : 0;
        granule.words[3] |= i / 4 == 3 ? byte : 0;
    }
    return granule;
}

// The steps for a chunk. All threads finish one before the next begins.

FASTCKPT_DEVICE void begin_chunk(Shared& shared, unsigned thread, const Work& work) {
    const Tables& tables = *reinterpret_cast<const Tables*>(work.tables);
    for (int k = 0; k < 4; ++k) shared.row[k][thread] = tables.row[k][thread];
}

FASTCKPT_DEVICE Word after_a_row(const Shared& shared, Word state) {
    return shared.row[0][state & 0xff] ^ shared.row[1][state >> 8 & 0xff] ^
           shared.row[2][state >> 16 & 0xff] ^ shared.row[3][state >> 24];
}

FASTCKPT_DEVICE void sum_rows(Shared& shared, unsigned thread, const Work& work, Chunk chunk) {
    const Address first = chunk.begin & kWhole, last = chunk.end & kWhole;
    const auto granules = static_cast<unsigned>((last - first) / kGranule);
    const unsigned rows = (granules + kThreads - 1) / kThreads;
    const unsigned lacking = rows * kThreads - granules;
    Granule sum = {}, next = {};
    if (rows > 0 && thread >= lacking)
        next = load_from(first + Address{thread - lacking} * kGranule, chunk.begin);
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (unsigned row = 1; row <= rows; ++row) {
        const Granule granule = next;
        if (row < rows)  // the load goes on during the look-ups
            next = load(first + (Address{row} * kThreads + thread - lacking) * kGranule);
        for (int k = 0; k < 4; ++k)
            sum.words[k] = after_a_row(shared, sum.words[k]) ^ granule.words[k];
    }
    Word state = sum.words[0];
    for (int k = 1; k < 4; ++k) state = after_a_word(state) ^ sum.words[k];
    const Tables& tables = *reinterpret_cast<const Tables*>(work.tables);
    shared.states[thread] = multiply(state, tables.place[thread]);
}

FASTCKPT_DEVICE void add(Shared& shared, unsigned thread, unsigned threads_left) {
    if (thread < threads_left) shared.states[thread] ^= shared.states[thread + threads_left];
}

FASTCKPT_DEVICE void end_chunk(const Shared& shared, unsigned thread, const Work& work, Chunk chunk,
                               unsigned number) {
    if (thread != 0) return;
    Word state = shared.states[0];
    const Address last = chunk.end & kWhole;
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (Address at = last < chunk.begin ? chunk.begin : last; at < chunk.end; ++at) {
        state ^= byte_at(at);
#ifdef __CUDACC__
#pragma unroll 1
#endif
        for (int bit = 0; bit < 8; ++bit) state = times_x(state);
    }
    reinterpret_cast<Word*>(work.states)[number] = state;
}

#ifdef __CUDACC__

extern "C" __global__ void __launch_bounds__(kThreads) fastckpt_crc32(Work work) {
    __shared__ Shared shared;
    const unsigned thread = threadIdx.x;
    const Chunk chunk = chunk_of(work, blockIdx.x);
    begin_chunk(shared, thread, work);
    __syncthreads();
    sum_rows(shared, thread, work, chunk);
#pragma unroll 1
    for (unsigned left = kThreads / 2; left > 0; left /= 2) {
        __syncthreads();
        add(shared, thread, left);
    }
    __syncthreads();
    end_chunk(shared, thread, work, chunk, blockIdx.x);
}

#else

// Does the kernel's work on one thread of the host.
inline void run(const Work& work, unsigned chunks) {
    static thread_local Shared shared;
    for (unsigned number = 0; number < chunks; ++number) {
        const Chunk chunk = chunk_of(work, number);
        for (unsigned i = 0; i < kThreads; ++i) begin_chunk(shared, i, work);
        for (unsigned i = 0; i < kThreads; ++i) sum_rows(shared, i, work, chunk);
        for (unsigned left = kThreads / 2; left > 0; left /= 2)
            for (unsigned i = 0; i < kThreads; ++i) add(shared, i, left);
        for (unsigned i = 0; i < kThreads; ++i) end_chunk(shared, i, work, chunk, number);
    }
}

#endif

}  // namespace fastckpt::gpu_crc32

#undef FASTCKPT_DEVICE
#endif  // FASTCKPT_CRC32_KERNEL_H
