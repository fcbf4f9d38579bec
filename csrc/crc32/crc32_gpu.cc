// Launches the kernel of crc32_kernel.h, and checks it: see crc32_gpu.h.
#include "crc32/crc32_gpu.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "crc32/crc32.h"
#include "crc32/crc32_kernel.h"
#include "crc32/crc32_ptx.h"

namespace fastckpt {

namespace {

namespace kernel = gpu_crc32;

constexpr size_t kStates = Crc32Gpu::kRangeBytesMax / kernel::kChunk + 1;  // of a launch
constexpr uint32_t kOne = 0x80000000u;

// Returns a state after nbytes zero bytes, which is the linear part of crc32_combine.
uint32_t shifted(uint32_t state, uint64_t nbytes) { return crc32_combine(state, 0, nbytes); }

kernel::Tables make_tables() {
    kernel::Tables tables{};
    for (unsigned k = 0; k < 4; ++k)
        for (unsigned byte = 0; byte < 256; ++byte)
            tables.row[k][byte] = shifted(byte << 8 * k, kernel::kRow);
    for (unsigned thread = 0; thread < kernel::kThreads; ++thread)
        tables.place[thread] = shifted(kOne, kernel::kRow - thread * kernel::kGranule - 12);
    return tables;
}

uint64_t first_cut(const Crc32Gpu::Range& range) {
    return range.address / kernel::kGranule * kernel::kGranule + kernel::kChunk;
}

}  // namespace

size_t Crc32Gpu::words(const Range& range) {
    if (range.nbytes == 0) return 0;
    const uint64_t end = range.address + range.nbytes, cut = first_cut(range);
    return end <= cut ? 1 : 1 + (end - cut + kernel::kChunk - 1) / kernel::kChunk;
}

// The kernel's states begin as zero. zlib's begins as all ones and is inverted, which is done here.
uint32_t Crc32Gpu::crc(const Range& range, const uint32_t* words) {
    const uint64_t end = range.address + range.nbytes;
    uint64_t begin = range.address, cut = first_cut(range);
    uint32_t state = ~0u;
    for (; begin < end; begin = std::min(cut, end), cut += kernel::kChunk)
        state = crc32_combine(state, *words++, std::min(cut, end) - begin);
    return ~state;
}

Crc32Gpu::Crc32Gpu(std::shared_ptr<DeviceQueue> queue)
    : queue_(std::move(queue)),
      tables_(queue_, sizeof(kernel::Tables)),
      states_(queue_, kStates * sizeof(uint32_t)) {
    try {
        load();
        check();
    } catch (...) {
        unload();
        throw;
    }
}

Crc32Gpu::~Crc32Gpu() { unload(); }

void Crc32Gpu::unload() {
    const DeviceQueue::Current current(*queue_);
    if (module_ != nullptr && current.result() == cuda::kSuccess)
        queue_->driver().module_unload(module_);
}

void Crc32Gpu::load() {
    const cuda::Driver& driver = queue_->driver();
    cuda::Result result = cuda::kSuccess;
    {
        const DeviceQueue::Current current(*queue_);
        result = current.result();
        if (result == cuda::kSuccess) result = driver.module_load_data(&module_, kCrc32Ptx);
        if (result == cuda::kSuccess)
            result = driver.module_get_function(&function_, module_, "fastckpt_crc32");
    }
    if (result != cuda::kSuccess)
        throw cuda::Unavailable("the driver does not take the CRC-32 kernel: " +
                                driver.text(result));
}

// Checks every kind of chunk: whole rows, ragged ends, less than 16 bytes. The host's memory is
// freed last, since freeing the device's waits for copies that an error has left behind.
void Crc32Gpu::check() {
    constexpr size_t kBytes = 3 * kernel::kChunk, kWordsMax = 16;
    const HostMemory host(queue_, kBytes + sizeof(kernel::Tables) + kWordsMax * sizeof(uint32_t));
    const DeviceMemory device(queue_, kBytes);
    std::byte* const tables = host.data() + kBytes;
    auto* const found = reinterpret_cast<uint32_t*>(tables + sizeof(kernel::Tables));
    uint32_t random = 1;
    for (size_t i = 0; i < kBytes; ++i) {
        random = random * 1664525u + 1013904223u;
        host.data()[i] = static_cast<std::byte>(random >> 24);
    }
    const kernel::Tables made = make_tables();
    std::memcpy(tables, &made, sizeof made);
    const std::pair<size_t, size_t> bounds[] = {{0, kBytes}, {1, kBytes - 1},       {15, 16},
                                                {17, 30},    {5, kernel::kRow + 3}, {8, 8}};
    std::vector<Range> ranges;
    size_t count = 0;
    for (const auto& [begin, end] : bounds) {
        ranges.push_back({device.address() + begin, end - begin});
        count += words(ranges.back());
    }
    CHECK(count <= kWordsMax);
    DeviceQueue::Mark mark;
    cuda::Result result = queue_->copy_to_device(tables_.address(), tables, sizeof made);
    if (result == cuda::kSuccess)
        result = queue_->copy_to_device(device.address(), host.data(), kBytes);
    if (result == cuda::kSuccess) result = queue(ranges.data(), ranges.size(), found);
    if (result == cuda::kSuccess) result = queue_->mark(&mark);
    if (result == cuda::kSuccess) result = queue_->wait(mark);
    if (result != cuda::kSuccess)
        throw cuda::Unavailable("the CRC-32 kernel: " + queue_->driver().text(result));
    const uint32_t* next = found;
    for (size_t i = 0; i < ranges.size(); next += words(ranges[i++])) {
        const uint32_t here = crc(ranges[i], next);
        const uint32_t there = crc32(0, host.data() + bounds[i].first, ranges[i].nbytes);
        if (here != there)
            throw cuda::Unavailable(
                "the GPU's CRC-32 of known bytes is wrong: " + std::to_string(here) +
                " where the CPU has " + std::to_string(there));
    }
}

cuda::Result Crc32Gpu::queue(const Range* ranges, size_t count, uint32_t* target) {
    std::vector<Range> batch;
    size_t batch_words = 0;
    const auto flush = [&] {
        const cuda::Result result = launch(batch.data(), batch.size(), batch_words, target);
        target += batch_words;
        batch.clear();
        batch_words = 0;
        return result;
    };
    for (size_t i = 0; i < count; ++i) {
        const size_t needed = words(ranges[i]);
        CHECK(ranges[i].nbytes <= kRangeBytesMax);
        if (needed == 0) continue;
        if (batch.size() == kernel::kRangesMax || batch_words + needed > kStates)
            if (const cuda::Result result = flush(); result != cuda::kSuccess) return result;
        batch.push_back(ranges[i]);
        batch_words += needed;
    }
    return batch.empty() ? cuda::kSuccess : flush();
}

cuda::Result Crc32Gpu::launch(const Range* ranges, size_t count, size_t words, uint32_t* target) {
    kernel::Work work{};
    work.tables = tables_.address();
    work.states = states_.address();
    work.count = count;
    unsigned chunk = 0;
    for (size_t i = 0; i < count; ++i) {
        work.ranges[i] = {ranges[i].address, ranges[i].address + ranges[i].nbytes, chunk, 0};
        chunk += static_cast<unsigned>(Crc32Gpu::words(ranges[i]));
    }
    CHECK(chunk == words);
    void* parameters[] = {&work};
    const Lock lock(mu_);
    const cuda::Result result = queue_->launch(function_, chunk, kernel::kThreads, parameters);
    if (result != cuda::kSuccess) return result;
    return queue_->copy_to_host(reinterpret_cast<std::byte*>(target), states_.address(),
                                words * sizeof(uint32_t));
}

}  // namespace fastckpt
