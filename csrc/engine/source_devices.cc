// Copies from devices, which are queued, and arrive later. See source.h for the contract.
#include <algorithm>
#include <mutex>
#include <utility>

#include "engine/source.h"

namespace fastckpt {

// Queues the copies of bytes on devices. If there are any, it also copies the host's bytes: the
// checksums are then taken when all have arrived.
void Source::gather(Batch& batch) {
    if (image_.devices.empty()) return;
    if (batch.blocks.front()->is_direct()) return gather_direct(batch);
    for (Block* block : batch.blocks) list_copies(*block, batch);
    if (batch.arrivals.empty()) return;
    {
        const Lock queueing(queueing_);
        for (Arrival& arrival : batch.arrivals) queue(arrival, batch);
    }
    for (Block* block : batch.blocks) {
        block->is_arriving = true;
        image_.for_pieces(block->begin, block->end,
                          [&](const Segment& segment, uint64_t begin, uint64_t end) {
                              if (image_.device_of(segment) == nullptr)
                                  copy_host(*block, segment, begin, end);
                          });
    }
}

// Lists the copies that a block needs, and pins its memory if there are any.
void Source::list_copies(Block& block, Batch& batch) {
    bool is_pinned = false;
    image_.for_pieces(
        block.begin, block.end, [&](const Segment& segment, uint64_t begin, uint64_t end) {
            const DeviceRange* device = image_.device_of(segment);
            if (device == nullptr) return;
            if (!std::exchange(is_pinned, true)) {
                const int error = arena_.pin(block.memory, image_.devices.front().queue);
                if (batch.pin_error == 0) batch.pin_error = error;
            }
            auto& arrivals = batch.arrivals;
            auto arrival = std::find_if(arrivals.begin(), arrivals.end(), [&](const Arrival& each) {
                return each.queue == device->queue.get();
            });
            if (arrival == arrivals.end()) {
                arrival = arrivals.emplace(arrival);
                arrival->queue = device->queue.get();
            }
            std::byte* const target = block.at(begin);
            const uint64_t source = segment.address_of(begin);
            arrival->nbytes += end - begin;
            // What goes on from the block before is one copy with it, if that is possible.
            auto& copies = arrival->copies;
            if (!copies.empty() && begin > segment.offset && begin == block.begin &&
                copies.back().source + copies.back().nbytes == source &&
                copies.back().target + copies.back().nbytes == target &&
                arena_.in_one_part(target - 1, target))
                copies.back().nbytes += end - begin;
            else
                copies.push_back({target, source, end - begin});
        });
}

void Source::queue(Arrival& arrival, Batch& batch) const {
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

void Source::await(Batch& batch) const {
    for (Arrival& arrival : batch.arrivals) {
        DeviceQueue& queue = *arrival.queue;
        if (arrival.end == nullptr) continue;
        const cuda::Result result = queue.wait(arrival.end);
        if (batch.device_error == cuda::kSuccess) batch.device_error = result;
        const DeviceQueue::Mark& origin = clocks_.at(&queue).origin;
        if (batch.device_error != cuda::kSuccess || origin == nullptr) continue;
        arrival.begin_s = queue.seconds(origin, arrival.begin);
        arrival.end_s = queue.seconds(origin, arrival.end);
    }
    for (Block* block : batch.blocks) block->device_error = batch.device_error;
}

// If several threads queue at once, the times of blocks overlap, and come only roughly in their
// order.
void Source::account(const Batch& batch) {
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
DeviceCopies Source::device_copies() const {
    DeviceCopies copies;
    for (const auto& [queue, clock] : clocks_) {
        copies.nbytes += clock.nbytes;
        copies.seconds = std::max(copies.seconds, clock.busy);
    }
    return copies;
}

}  // namespace fastckpt
