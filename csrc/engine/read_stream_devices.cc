// ReadStream's copies to devices: a block stays until no device copies from it, while the next ones
// are read; and checksums of blocks that were read to a device. See engine.h for the contract.
#include <algorithm>

#include "check.h"
#include "engine/read_block.h"

namespace fastckpt {

// Queues a copy from a block that the reader holds.
bool ReadStream::send(Block& block, const std::shared_ptr<DeviceQueue>& queue, uint64_t target,
                      const std::byte* source, uint64_t nbytes) {
    cuda::Result result = cuda::kSuccess;
    if (gds_ != nullptr) {
        result = queue->copy_on_device(target, reinterpret_cast<uint64_t>(source), nbytes);
    } else {
        engine_.arena_.pin(block.memory, queue);  // if it is refused, the copy is only slower
        result = queue->copy_to_device(target, source, nbytes);
    }
    if (std::find(block.queues.begin(), block.queues.end(), queue.get()) == block.queues.end())
        block.queues.push_back(queue.get());
    if (result == cuda::kSuccess) return true;
    fail(block.begin, result);
    return false;
}

// Waits, without the mutex, for the device's checksum of a block.
void ReadStream::verify_direct(Block& block) {
    DeviceQueue& queue = *gds_->queue();
    const size_t number = gds_->number(block.memory);
    const Crc32Gpu::Range range{gds_->address(number), block.nbytes};
    cuda::Result result = gds_->crc().queue(&range, 1, gds_->words(number));
    DeviceQueue::Mark mark = nullptr;
    if (result == cuda::kSuccess) result = queue.mark(&mark);
    if (result == cuda::kSuccess) result = queue.wait(mark);
    if (mark != nullptr) queue.discard(mark);
    if (result == cuda::kSuccess) {
        const uint32_t crc = Crc32Gpu::crc(range, gds_->words(number));
        block.corrupt = crc != crcs_[block.begin / engine_.block_bytes()];
        return;
    }
    queue.wait_all();  // before another block uses the words
    fail(block.begin, result);
}

// Marks where in their queues the copies from a block end, when the reader leaves the block.
void ReadStream::depart(Block& block) {
    for (DeviceQueue* queue : block.queues) {
        DeviceQueue::Mark mark = nullptr;
        const cuda::Result result = queue->mark(&mark);
        if (result == cuda::kSuccess) {
            block.departures.emplace_back(queue, mark);
        } else {
            queue->wait_all();  // before the memory is another block's
            fail(block.begin, result);
        }
    }
    block.queues.clear();
}

void ReadStream::fail(uint64_t offset, cuda::Result result) {
    const std::lock_guard lock(engine_.mu_);
    if (failure_.error == 0) failure_ = {Op::Kind::copy, offset, result};
}

// Gives back memory that devices have copied from, in the order of their copies; with `wait`, waits
// for the first if there is none. Called under the engine's mutex, which waiting releases. Returns
// whether there was any.
bool ReadStream::reclaim(std::unique_lock<std::mutex>& lock, bool wait) {
    bool any = false;
    while (!departing_.empty()) {
        Departing& first = departing_.front();
        const auto reached = [](const Departure& departure) {
            return departure.first->query(departure.second) != cuda::kNotReady;
        };
        if (!std::all_of(first.departures.begin(), first.departures.end(), reached)) {
            if (!wait || any) break;
            lock.unlock();  // only the reader, which is here, takes from the front
            for (const auto& [queue, mark] : first.departures) queue->wait(mark);
            lock.lock();
        }
        finish(first.begin, first.departures);
        release(first.memory);
        departing_.pop_front();
        any = true;
    }
    if (any) engine_.changed_.notify_all();
    return any;
}

// Notes errors of copies whose marks were reached. Called under the engine's mutex.
void ReadStream::finish(uint64_t begin, std::vector<Departure>& departures) {
    for (const auto& [queue, mark] : departures) {
        const cuda::Result result = queue->query(mark);
        queue->discard(mark);
        if (result != cuda::kSuccess && failure_.error == 0)
            failure_ = {Op::Kind::copy, begin, result};
    }
    departures.clear();
}

bool ReadStream::arrive() {
    std::unique_lock lock(engine_.mu_);
    for (size_t place = 0; place < blocks_.size(); ++place) {
        Block* block = blocks_[place].get();
        if (block == nullptr || block->departures.empty()) continue;
        lock.unlock();
        for (const auto& [queue, mark] : block->departures) queue->wait(mark);
        lock.lock();
        finish(block->begin, block->departures);
    }
    while (!departing_.empty()) reclaim(lock, true);
    return failure_.error == 0;
}

}  // namespace fastckpt
