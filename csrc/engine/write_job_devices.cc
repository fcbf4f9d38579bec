// WriteJob's blocks with bytes on devices: their copies are queued, and checksummed when they have
// arrived. See engine.h for the contract.
#include <algorithm>
#include <mutex>
#include <tuple>

#include "check.h"
#include "engine/write_block.h"

namespace fastckpt {

// Queues the copies of bytes on devices. If there are any, it also copies the host's bytes: the
// checksums are then taken when all have arrived.
void WriteJob::gather(Block& block) {
    if (devices_.empty()) return;
    if (block.is_direct()) return gather_direct(block);
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), block.begin,
                                    [](uint64_t at, const Segment& s) { return at < s.offset; });
    std::vector<const Segment*> on_host;
    // Blocks queue their copies one after the other: if those of two were mixed, the time of both
    // would count for each.
    std::unique_lock queueing(engine_.queueing_mu_, std::defer_lock);
    const auto place = [&](const Segment& s) {
        const uint64_t begin = std::max(block.begin, s.offset);
        const uint64_t nbytes = std::min(block.end, s.offset + s.nbytes) - begin;
        return std::tuple(block.memory + (begin - block.begin), s.address + (begin - s.offset),
                          nbytes);
    };
    for (--segment; segment != segments_.end() && segment->offset < block.end; ++segment) {
        const DeviceRange* device = range_of(devices_, segment->address);
        if (device == nullptr) {
            on_host.push_back(&*segment);
            continue;
        }
        DeviceQueue* queue = device->queue.get();
        if (!queueing.owns_lock()) {
            block.pin_error = engine_.arena_.pin(block.memory, devices_.front().queue);
            queueing.lock();
        }
        const auto [target, source, nbytes] = place(*segment);
        Arrival* arrival = arrive_by(block, queue);
        if (arrival == nullptr) break;
        arrival->copies.push_back({target, source, nbytes});
        arrival->nbytes += nbytes;
    }
    for (Arrival& arrival : block.arrivals) {
        if (block.device_error == cuda::kSuccess)
            block.device_error = arrival.queue->copy_to_host(arrival.copies);
        arrival.copies = {};
        const cuda::Result result = arrival.queue->mark(&arrival.end);
        if (result != cuda::kSuccess) arrival.queue->wait_all();  // before the memory is another's
        if (block.device_error == cuda::kSuccess) block.device_error = result;
    }
    if (block.arrivals.empty()) return;
    queueing.unlock();
    for (const Segment* s : on_host) {
        const uint64_t begin = std::max(block.begin, s->offset);
        const uint64_t end = std::min(block.end, s->offset + s->nbytes);
        copy_host(block.memory + (begin - block.begin), *s, begin, end, 0);
    }
}

// Returns the block's arrival by a queue, begun here if there is none; null if the device refuses.
WriteJob::Arrival* WriteJob::arrive_by(Block& block, DeviceQueue* queue) {
    for (Arrival& arrival : block.arrivals)
        if (arrival.queue == queue) return &arrival;
    Arrival arrival{queue, nullptr, nullptr, 0, 0, 0, {}};
    block.device_error = queue->mark(&arrival.begin);
    if (block.device_error != cuda::kSuccess) return nullptr;
    block.arrivals.push_back(arrival);
    return &block.arrivals.back();
}

void WriteJob::gathered(Block& block) {
    CHECK(stagers_ > 0);
    --stagers_;
    ++arriving_;
    if (pin_error_ == 0) pin_error_ = block.pin_error;
}

bool WriteJob::is_arriving(const Block& block) const { return block.is_arriving(); }

bool WriteJob::is_lost(const Block& block) const { return block.device_error != cuda::kSuccess; }

// Returns whether a block's bytes have arrived or its device has failed; with `wait`, waits until
// it is so. Called without the mutex.
bool WriteJob::arrived(Block& block, bool wait) {
    for (Arrival& arrival : block.arrivals) {
        DeviceQueue& queue = *arrival.queue;
        if (arrival.end == nullptr) continue;
        const cuda::Result result = wait ? queue.wait(arrival.end) : queue.query(arrival.end);
        if (result == cuda::kNotReady) return false;
        if (block.device_error == cuda::kSuccess) block.device_error = result;
        const DeviceQueue::Mark& origin = clocks_.at(&queue).origin;
        if (block.device_error != cuda::kSuccess || origin == nullptr) continue;
        arrival.begin_s = queue.seconds(origin, arrival.begin);
        arrival.end_s = queue.seconds(origin, arrival.end);
    }
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
void WriteJob::account(const Block& block) {
    for (const Arrival& arrival : block.arrivals) {
        Clocked& clock = clocks_[arrival.queue];
        if (block.device_error == cuda::kSuccess && clock.origin != nullptr) {
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
