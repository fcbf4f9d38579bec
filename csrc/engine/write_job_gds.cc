// WriteJob's blocks that never come to the host: they are copied and checksummed on their device,
// and written by cuFile. See engine.h for the contract, gds_stage.h for the blocks.
#include <algorithm>

#include "check.h"
#include "engine/write_block.h"

namespace fastckpt {

namespace {
constexpr uint64_t kDirectAlign = 4096;
}

// Whether all of a block's bytes lie on the staging device, in whole pages. Then no slot is among
// them, since slots lie in headers, which are host memory.
bool WriteJob::is_direct(size_t index) const {
    if (gds_ == nullptr) return false;
    const uint64_t begin = index * engine_.block_bytes();
    const uint64_t end = begin + block_nbytes(index);
    if ((end - begin) % kDirectAlign != 0) return false;
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), begin,
                                    [](uint64_t at, const Segment& s) { return at < s.offset; });
    size_t words = 0;
    for (--segment; segment != segments_.end() && segment->offset < end; ++segment) {
        const DeviceRange* range = range_of(devices_, segment->address);
        if (range == nullptr || range->queue != gds_->queue()) return false;
        const uint64_t from = std::max(begin, segment->offset);
        const uint64_t to = std::min(end, segment->offset + segment->nbytes);
        words += Crc32Gpu::words({from - begin, to - from}) + 1;  // the address may need one more
    }
    return words <= GdsStage::kWords;
}

bool WriteJob::wants_direct() const { return is_direct(next_claim_); }

// Queues the copies within the device, and the checksums of the copied bytes.
void WriteJob::gather_direct(Batch& batch) {
    Block& block = *batch.blocks.front();
    cuda::Result& error = batch.device_error;
    block.is_arriving = true;
    DeviceQueue& queue = *gds_->queue();
    const uint64_t address = gds_->address(block.direct);
    const std::lock_guard queueing(engine_.queueing_mu_);
    Arrival arrival;
    arrival.queue = &queue;
    error = queue.mark_begin(&arrival.begin);
    if (error != cuda::kSuccess) return;
    std::vector<Crc32Gpu::Range> ranges;
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), block.begin,
                                    [](uint64_t at, const Segment& s) { return at < s.offset; });
    for (--segment; segment != segments_.end() && segment->offset < block.end; ++segment) {
        const uint64_t begin = std::max(block.begin, segment->offset);
        const uint64_t end = std::min(block.end, segment->offset + segment->nbytes);
        const uint64_t target = address + (begin - block.begin);
        const uint64_t source = segment->address + (begin - segment->offset);
        if (error == cuda::kSuccess) error = queue.copy_on_device(target, source, end - begin);
        ranges.push_back({target, end - begin});
        arrival.nbytes += end - begin;
    }
    if (error == cuda::kSuccess)
        error = gds_->crc().queue(ranges.data(), ranges.size(), gds_->words(block.direct));
    const cuda::Result marked = queue.mark(&arrival.end);
    if (marked != cuda::kSuccess) queue.wait_all();  // before the memory is another block's
    if (error == cuda::kSuccess) error = marked;
    batch.arrivals.push_back(arrival);
}

// Returns the checksum of a block's next piece; called in the order in which they were queued.
uint32_t WriteJob::direct_crc(Block& block, uint64_t begin, uint64_t nbytes) const {
    const Crc32Gpu::Range range{gds_->address(block.direct) + (begin - block.begin), nbytes};
    const uint32_t* words = gds_->words(block.direct) + block.words_used;
    block.words_used += Crc32Gpu::words(range);
    return Crc32Gpu::crc(range, words);
}

}  // namespace fastckpt
