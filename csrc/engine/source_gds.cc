// Blocks that never come to the host: they are copied and checksummed on their device, and written
// by cuFile. See source.h for the contract, gds_stage.h for the blocks.
#include <algorithm>

#include "engine/source.h"

namespace fastckpt {

// Whether all of the block's bytes lie on the staging device, in whole pages. Then no slot is among
// them, since slots lie in headers, which are host memory.
bool Source::is_direct(uint64_t begin) const {
    const uint64_t end = std::min(image_.nbytes(), begin + arena_.block_bytes());
    if (gds_ == nullptr || (end - begin) % kPageBytes != 0) return false;
    size_t words = 0;
    bool is_there = true;
    image_.for_pieces(begin, end, [&](const Segment& segment, uint64_t from, uint64_t to) {
        const DeviceRange* range = image_.device_of(segment);
        is_there = is_there && range != nullptr && range->queue == gds_->queue();
        words += Crc32Gpu::words({from - begin, to - from}) + 1;  // the address may need one more
    });
    return is_there && words <= GdsStage::kWords;
}

// Queues the copies within the device, and the checksums of the copied bytes.
void Source::gather_direct(Batch& batch) {
    Block& block = *batch.blocks.front();
    cuda::Result& error = batch.device_error;
    block.is_arriving = true;
    DeviceQueue& queue = *gds_->queue();
    const uint64_t address = gds_->address(block.direct);
    const Lock queueing(queueing_);
    Arrival arrival;
    arrival.queue = &queue;
    error = queue.mark_begin(&arrival.begin);
    if (error != cuda::kSuccess) return;
    std::vector<Crc32Gpu::Range> ranges;
    image_.for_pieces(
        block.begin, block.end, [&](const Segment& segment, uint64_t begin, uint64_t end) {
            const uint64_t target = address + (begin - block.begin);
            if (error == cuda::kSuccess)
                error = queue.copy_on_device(target, segment.address_of(begin), end - begin);
            ranges.push_back({target, end - begin});
            arrival.nbytes += end - begin;
        });
    if (error == cuda::kSuccess)
        error = gds_->crc().queue(ranges.data(), ranges.size(), gds_->words(block.direct));
    const cuda::Result marked = queue.mark(&arrival.end);
    if (marked != cuda::kSuccess) queue.wait_all();  // before the memory is another block's
    if (error == cuda::kSuccess) error = marked;
    batch.arrivals.push_back(arrival);
}

// Returns the checksum of a block's next piece; called in the order in which they were queued.
uint32_t Source::direct_crc(Block& block, uint64_t begin, uint64_t nbytes) const {
    const Crc32Gpu::Range range{gds_->address(block.direct) + (begin - block.begin), nbytes};
    const uint32_t* words = gds_->words(block.direct) + block.words_used;
    block.words_used += Crc32Gpu::words(range);
    return Crc32Gpu::crc(range, words);
}

}  // namespace fastckpt
