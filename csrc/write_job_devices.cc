// WriteJob's blocks whose bytes, or some of them, lie on devices: copies are queued, and summed up
// once they have arrived. See engine.h for the contract.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>

#include "check.h"
#include "write_block.h"

namespace fastckpt {

DeviceQueue* WriteJob::device_of(uint64_t address) const {
    const auto after =
        std::upper_bound(devices_.begin(), devices_.end(), address,
                         [](uint64_t at, const DeviceRange& range) { return at < range.begin; });
    if (after == devices_.begin() || address >= std::prev(after)->end) return nullptr;
    return std::prev(after)->queue.get();
}

// Queues the copies of what lies on devices, and where there is any, copies the rest beside it: the
// checksums then wait until all has arrived.
void WriteJob::gather(Block& block) {
    if (devices_.empty()) return;
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), block.begin,
                                    [](uint64_t at, const Segment& s) { return at < s.offset; });
    std::vector<const Segment*> on_host;
    std::vector<DeviceQueue*> queues;
    const auto place = [&](const Segment& s) {
        const uint64_t begin = std::max(block.begin, s.offset);
        const uint64_t nbytes = std::min(block.end, s.offset + s.nbytes) - begin;
        return std::tuple(block.memory + (begin - block.begin), s.address + (begin - s.offset),
                          nbytes);
    };
    for (--segment; segment != segments_.end() && segment->offset < block.end; ++segment) {
        DeviceQueue* queue = device_of(segment->address);
        if (queue == nullptr) {
            on_host.push_back(&*segment);
            continue;
        }
        if (queues.empty() && block.device_error == cuda::kSuccess)
            block.pin_error = engine_.arena_.pin(block.memory, devices_.front().queue);
        if (std::find(queues.begin(), queues.end(), queue) == queues.end()) queues.push_back(queue);
        const auto [target, source, nbytes] = place(*segment);
        if (block.device_error == cuda::kSuccess)
            block.device_error = queue->copy_to_host(target, source, nbytes);
    }
    if (queues.empty()) return;
    for (DeviceQueue* queue : queues) {
        DeviceQueue::Mark mark = nullptr;
        const cuda::Result result = queue->mark(&mark);
        if (result == cuda::kSuccess) block.marks.emplace_back(queue, mark);
        if (block.device_error == cuda::kSuccess) block.device_error = result;
    }
    for (const Segment* s : on_host) {
        const auto [target, source, nbytes] = place(*s);
        std::memcpy(target, reinterpret_cast<const std::byte*>(source), nbytes);
    }
}

void WriteJob::gathered(Block& block) {
    CHECK(stagers_ > 0);
    --stagers_;
    ++arriving_;
    if (pin_error_ == 0) pin_error_ = block.pin_error;
}

bool WriteJob::is_arriving(const Block& block) const { return block.is_arriving(); }

bool WriteJob::is_lost(const Block& block) const { return block.device_error != cuda::kSuccess; }

bool WriteJob::arrived(const Block& block) const {
    return std::all_of(block.marks.begin(), block.marks.end(), [](const auto& mark) {
        return mark.first->query(mark.second) != cuda::kNotReady;
    });
}

void WriteJob::await(Block& block) {
    for (const auto& [queue, mark] : block.marks) {
        const cuda::Result result = queue->wait(mark);
        queue->discard(mark);
        if (block.device_error == cuda::kSuccess) block.device_error = result;
    }
}

}  // namespace fastckpt
