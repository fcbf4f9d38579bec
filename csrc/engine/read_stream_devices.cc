// ReadStream's copies to devices: a block stays until no device copies from it, while the next ones
// are read; and checksums of blocks that were read to a device. See engine.h for the contract.
#include <algorithm>

#include "check.h"
#include "engine/engine.h"

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
    DeviceQueue::Mark mark;
    if (result == cuda::kSuccess) result = queue.mark(&mark);
    if (result == cuda::kSuccess) result = queue.wait(mark);
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
        DeviceQueue::Mark mark;
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

// Called under the engine's mutex.
void ReadStream::note(uint64_t offset, cuda::Result result) {
    if (result != cuda::kSuccess && failure_.error == 0)
        failure_ = {Op::Kind::copy, offset, result};
}

void ReadStream::fail(uint64_t offset, cuda::Result result) {
    const EngineLock lock(engine_.mu_);
    note(offset, result);
}

namespace {
// Returns how copies ended, or kNotReady while one goes on; with `wait`, waits for their end.
cuda::Result end_of(const std::vector<Departure>& departures, bool wait) {
    cuda::Result first = cuda::kSuccess;
    for (const auto& [queue, mark] : departures) {
        const cuda::Result result = wait ? queue->wait(mark) : queue->query(mark);
        if (result == cuda::kNotReady) return result;
        if (first == cuda::kSuccess) first = result;
    }
    return first;
}
}  // namespace

// Gives back memory that devices have copied from, in the order of their copies; with `wait`, waits
// for the first if there is none. Called under the engine's mutex, which it releases to ask the
// driver. Returns whether there was any.
bool ReadStream::reclaim(EngineLock& lock, bool wait) {
    bool any = false;
    while (!departing_.empty()) {
        Departing first = std::move(departing_.front());  // close() on another thread takes others
        departing_.pop_front();
        cuda::Result result = cuda::kSuccess;
        {
            const EngineUnlock unlocked(lock);
            result = end_of(first.departures, wait && !any);
        }
        if (result == cuda::kNotReady) {
            departing_.push_front(std::move(first));
            break;
        }
        note(first.begin, result);
        release(first.memory);
        any = true;
    }
    if (any || closed_) engine_.changed_.notify_all();
    return any;
}

bool ReadStream::arrive() {
    EngineLock lock(engine_.mu_);
    for (size_t place = 0; place < blocks_.size(); ++place) {
        Block* block = blocks_[place].get();
        if (block == nullptr || block->departures.empty()) continue;
        const auto departures = block->departures;
        const uint64_t begin = block->begin;
        cuda::Result result = cuda::kSuccess;
        {
            const EngineUnlock unlocked(lock);
            result = end_of(departures, true);
        }
        note(begin, result);
        // It may have left the window meanwhile: close() on another thread.
        if (blocks_[place] != nullptr) blocks_[place]->departures.clear();
    }
    while (!departing_.empty()) reclaim(lock, true);
    return failure_.error == 0;
}

}  // namespace fastckpt
