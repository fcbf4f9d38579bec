// WriteJob's blocks with bytes on devices: their copies are queued, and checksummed when they have
// arrived. See engine.h for the contract.
#include <algorithm>
#include <mutex>
#include <utility>

#include "check.h"
#include "engine/write_block.h"

namespace fastckpt {

// Whether the next block begins on a device, and so may be one of a batch.
bool WriteJob::wants_copies() const {
    if (devices_.empty() || next_claim_ == blocks_.size() || has_used_allowance()) return false;
    auto segment =
        std::upper_bound(segments_.begin(), segments_.end(), next_claim_ * engine_.block_bytes(),
                         [](uint64_t at, const Segment& s) { return at < s.offset; });
    --segment;
    return range_of(devices_, segment->address) != nullptr && !wants_direct();
}

// Queues the copies of bytes on devices. If there are any, it also copies the host's bytes: the
// checksums are then taken when all have arrived.
void WriteJob::gather(Batch& batch) {
    if (devices_.empty()) return;
    if (batch.blocks.front()->is_direct()) return gather_direct(batch);
    std::vector<std::pair<Block*, const Segment*>> on_host;
    for (Block* block : batch.blocks) gather(*block, batch, on_host);
    if (batch.arrivals.empty()) return;
    {
        // Batches queue their copies one after the other: if those of two were mixed, the time of
        // both would count for each.
        const std::lock_guard queueing(engine_.queueing_mu_);
        for (Arrival& arrival : batch.arrivals) queue(arrival, batch);
    }
    for (Block* block : batch.blocks) block->is_arriving = true;
    for (const auto& [block, s] : on_host) {
        const uint64_t begin = std::max(block->begin, s->offset);
        const uint64_t end = std::min(block->end, s->offset + s->nbytes);
        copy_host(block->memory + (begin - block->begin), *s, begin, end, 0);
    }
}

// Lists the copies that a block needs, and what it has on the host.
void WriteJob::gather(Block& block, Batch& batch,
                      std::vector<std::pair<Block*, const Segment*>>& host) {
    bool is_pinned = false;
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), block.begin,
                                    [](uint64_t at, const Segment& s) { return at < s.offset; });
    for (--segment; segment != segments_.end() && segment->offset < block.end; ++segment) {
        const DeviceRange* device = range_of(devices_, segment->address);
        if (device == nullptr) {
            host.emplace_back(&block, &*segment);
            continue;
        }
        if (!std::exchange(is_pinned, true)) {
            const int error = engine_.arena_.pin(block.memory, devices_.front().queue);
            if (batch.pin_error == 0) batch.pin_error = error;
        }
        const uint64_t begin = std::max(block.begin, segment->offset);
        const uint64_t nbytes = std::min(block.end, segment->offset + segment->nbytes) - begin;
        std::byte* const target = block.memory + (begin - block.begin);
        const uint64_t source = segment->address + (begin - segment->offset);
        auto arrival =
            std::find_if(batch.arrivals.begin(), batch.arrivals.end(),
                         [&](const Arrival& each) { return each.queue == device->queue.get(); });
        if (arrival == batch.arrivals.end()) {
            arrival = batch.arrivals.emplace(arrival);
            arrival->queue = device->queue.get();
        }
        arrival->nbytes += nbytes;
        // What goes on from the block before is one copy with it, if that is possible.
        auto& copies = arrival->copies;
        if (!copies.empty() && begin > segment->offset && begin == block.begin &&
            copies.back().source + copies.back().nbytes == source &&
            copies.back().target + copies.back().nbytes == target &&
            engine_.arena_.in_one_part(target - 1, target))
            copies.back().nbytes += nbytes;
        else
            copies.push_back({target, source, nbytes});
    }
}

void WriteJob::queue(Arrival& arrival, Batch& batch) {
    cuda::Result& error = batch.device_error;
    const auto copies = std::move(arrival.copies);
    if (error != cuda::kSuccess) return;
    error = arrival.queue->mark_begin(&arrival.begin);
    if (error != cuda::kSuccess) return;
    error = arrival.queue->copy_to_host(copies);
    const cuda::Result result = arrival.queue->mark(&arrival.end);
    if (result != cuda::kSuccess) arrival.queue->wait_all();  // before the memory is another's
    if (error == cuda::kSuccess) error = result;
}

void WriteJob::gathered(Batch& batch) {
    CHECK(stagers_ > 0);
    --stagers_;
    arriving_ += batch.blocks.size();
    if (pin_error_ == 0) pin_error_ = batch.pin_error;
}

// Returns whether a batch's bytes have arrived or a device has failed; with `wait`, waits until it
// is so. Called without the mutex.
bool WriteJob::arrived(Batch& batch, bool wait) {
    for (Arrival& arrival : batch.arrivals) {
        DeviceQueue& queue = *arrival.queue;
        if (arrival.end == nullptr) continue;
        const cuda::Result result = wait ? queue.wait(arrival.end) : queue.query(arrival.end);
        if (result == cuda::kNotReady) return false;
        if (batch.device_error == cuda::kSuccess) batch.device_error = result;
        const DeviceQueue::Mark& origin = clocks_.at(&queue).origin;
        if (batch.device_error != cuda::kSuccess || origin == nullptr) continue;
        arrival.begin_s = queue.seconds(origin, arrival.begin);
        arrival.end_s = queue.seconds(origin, arrival.end);
    }
    for (Block* block : batch.blocks) block->device_error = batch.device_error;
    return true;
}

// Marks on each device the moment from which its clock counts.
void WriteJob::start_clocks() {
    for (const DeviceRange& range : devices_) {
        Clocked& clock = clocks_[range.queue.get()];
        if (clock.origin == nullptr) range.queue->mark(&clock.origin);
    }
}

// Adds up how long each device was busy with this job. If several threads queue at once, the times
// of blocks overlap, and come only roughly in their order.
void WriteJob::account(const Batch& batch) {
    for (const Arrival& arrival : batch.arrivals) {
        Clocked& clock = clocks_[arrival.queue];
        if (batch.device_error != cuda::kSuccess || clock.origin == nullptr) continue;
        const double begin = arrival.begin_s, end = arrival.end_s;
        if (begin > clock.until || clock.nbytes == 0) {
            clock.since = clock.until = begin;
        } else if (begin < clock.since) {
            clock.busy += clock.since - begin;
            clock.since = begin;
        }
        clock.busy += std::max(0.0, end - clock.until);
        clock.until = std::max(clock.until, end);
        clock.nbytes += arrival.nbytes;
    }
}

// Devices copy at the same time, so the slowest one's time counts.
DeviceCopies WriteJob::device_copies() {
    const std::lock_guard lock(engine_.mu_);
    DeviceCopies copies{0, 0};
    for (const auto& [queue, clock] : clocks_) {
        copies.nbytes += clock.nbytes;
        copies.seconds = std::max(copies.seconds, clock.busy);
    }
    return copies;
}

}  // namespace fastckpt
