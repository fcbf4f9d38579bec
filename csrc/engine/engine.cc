// The engine's threads, which stage the first job that can go on and verify blocks that were read.
// See engine.h.
#include "engine/engine.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "check.h"

namespace fastckpt {

Engine::Engine(size_t arena_bytes, size_t block_bytes, unsigned stagers)
    : stagers_(std::max(1U, stagers)), arena_(arena_bytes, block_bytes) {
    try {
        for (unsigned i = 0; i < stagers_; ++i) threads_.emplace_back([this] { run(); });
    } catch (...) {  // a thread could not be started: those that were must end before this object
        close();
        throw;
    }
}

Engine::~Engine() { close(); }

std::shared_ptr<WriteJob> Engine::stage(Image image, std::shared_ptr<Allowance> allowance,
                                        unsigned stagers_limit, std::shared_ptr<GdsStage> gds,
                                        std::shared_ptr<Arena> landing) {
    std::shared_ptr<WriteJob> job(new WriteJob(*this, std::move(image), std::move(gds),
                                               std::move(allowance), stagers_limit,
                                               std::move(landing)));
    {
        const EngineLock lock(mu_);
        CHECK(!closing_);
        // A job of one block is the end of a file, or its samples: someone waits for it, and the
        // others lose little.
        if (job->blocks_.size() == 1)
            jobs_.push_front(job);
        else
            jobs_.push_back(job);
    }
    changed_.notify_all();
    return job;
}

std::shared_ptr<ReadStream> Engine::read(int fd, uint64_t nbytes, std::vector<uint32_t> crcs,
                                         std::vector<uint32_t> wanted, std::shared_ptr<Sink> sink,
                                         bool direct, size_t window_blocks,
                                         std::shared_ptr<GdsStage> gds) {
    CHECK(gds == nullptr || gds->block_bytes() == block_bytes());
    std::shared_ptr<ReadStream> stream(new ReadStream(*this, fd, nbytes, std::move(crcs),
                                                      std::move(wanted), direct, window_blocks,
                                                      std::move(gds)));
    const EngineLock lock(mu_);
    CHECK(!closing_ && sink != nullptr);
    stream->sink_ = keep(sink);
    ++streams_open_;
    stream->fill_window();
    return stream;
}

bool Engine::prefault(size_t begin, size_t end, unsigned threads,
                      const std::shared_ptr<Pinner>& pinner) {
    arena_.prefault(begin, end, threads);
    return pinner == nullptr || arena_.pin(begin, end, pinner) == 0;
}

std::shared_ptr<Sink> Engine::keep(const std::shared_ptr<Sink>& sink) {
    const std::shared_ptr<Backend> backend = sink->backend();
    if (std::find(backends_.begin(), backends_.end(), backend) == backends_.end())
        backends_.push_back(backend);
    return backend == sink ? std::shared_ptr<Sink>(std::shared_ptr<Sink>(), sink.get()) : sink;
}

void Engine::run() {
    EngineLock lock(mu_);
    for (;;) {
        submit_due();
        // What still lies in the state comes before what has arrived from it: callers wait for it.
        if (verify_one(lock) || copy_one(lock) || stage_one(lock) || sum_one(lock) ||
            arrive_one(lock))
            continue;
        if (closing_ && jobs_.empty() && to_verify_.empty() && arriving_.empty()) return;
        rest(lock);
    }
}

// Waits for something to do. One of the waiting threads also submits the blocks that wait for
// tokens when these are due.
void Engine::rest(EngineLock& lock) {
    if (waiting_for_tokens_.empty() || clock_minded_) return changed_.wait(lock);
    auto first = Clock::time_point::max();
    for (const auto& job : waiting_for_tokens_) first = std::min(first, *job->tokens_at_);
    clock_minded_ = true;
    changed_.wait_until(lock, first);
    clock_minded_ = false;
    submit_due();
    // This thread may have work now, so another one has to wait for the tokens.
    if (!waiting_for_tokens_.empty()) changed_.notify_all();
}

// Submits the blocks whose tokens are due. Each thread does so before each piece of work: while
// there is always more to stage, none rests.
void Engine::submit_due() {
    if (waiting_for_tokens_.empty()) return;
    const auto now = Clock::now();
    const auto jobs = waiting_for_tokens_;  // a copy, since jobs leave the list and join its end
    for (const auto& job : jobs)
        if (job->tokens_at_ && *job->tokens_at_ <= now) job->submit_ready_blocks();
}

bool Engine::verify_one(EngineLock& lock) {
    if (to_verify_.empty()) return false;
    auto [stream, block] = to_verify_.front();
    to_verify_.pop_front();
    {
        const EngineUnlock unlocked(lock);
        stream->verify(*block);
    }
    stream->settle(*block);
    changed_.notify_all();
    return true;
}

bool Engine::copy_one(EngineLock& lock) {
    if (to_copy_.empty()) return false;
    const Piece piece = to_copy_.front();
    to_copy_.pop_front();
    {
        const EngineUnlock unlocked(lock);
        std::memcpy(piece.target, piece.source, piece.nbytes);
    }
    if (--*piece.left == 0) changed_.notify_all();
    return true;
}

void Engine::copy(EngineLock& lock, std::byte* target, const std::byte* source, size_t nbytes) {
    size_t left = 0;
    for (size_t at = 0; at < nbytes; at += kPieceBytes, ++left)
        to_copy_.push_back({target + at, source + at, std::min(kPieceBytes, nbytes - at), &left});
    if (left > 1) changed_.notify_all();
    // Pieces of another reader may come first; other threads may copy some of ours.
    while (left > 0 && copy_one(lock)) {
    }
    changed_.wait(lock, [&] { return left == 0; });
}

bool Engine::stage_one(EngineLock& lock) {
    // Jobs with no block left to claim leave the queue, as do those that failed.
    const auto left =
        std::remove_if(jobs_.begin(), jobs_.end(),
                       [](const auto& job) REQUIRES(engine_state) { return job->is_claimed(); });
    if (left != jobs_.end()) {
        jobs_.erase(left, jobs_.end());
        changed_.notify_all();  // close() waits for the queue to be empty
    }
    for (const auto& job : jobs_)
        if (job->has_used_allowance()) job->note_no_memory();
    // The first job that can go on: one whose block belongs in a GPU's memory may find none there
    // while the host has some, or the other way round.
    std::shared_ptr<WriteJob> job;
    std::shared_ptr<Batch> batch;
    for (auto each = jobs_.begin(); batch == nullptr && each != jobs_.end(); ++each)
        batch = (job = *each)->take_batch();
    if (batch == nullptr) return false;
    {
        const EngineUnlock unlocked(lock);
        job->source_.fill(*batch);
    }
    job->filled(batch);
    changed_.notify_all();
    return true;
}

// Returns how many blocks to take at once from devices, given the first one's memory. Each batch
// ends with an event, of which a stream takes few, so their size doubles with every 4 that wait: of
// 8,192 blocks, 44 batches wait at most. A part that is not pinned yet is one stager's, so that
// others pin the next ones meanwhile.
size_t Engine::batch_blocks(Arena& arena, const std::byte* first) {
    constexpr size_t kBatchesOfOneSize = 4, kDoublingsMax = 16;
    const size_t doublings = std::min(arriving_.size() / kBatchesOfOneSize, kDoublingsMax);
    const size_t blocks = size_t{1} << doublings;
    return arena.needs_pin(first) ? std::max(blocks, Arena::kPinnedBlocks) : blocks;
}

bool Engine::arrive_one(EngineLock& lock) {
    if (arriving_.empty() || arrival_awaited_) return false;
    const auto [job, batch] = arriving_.front();
    arrival_awaited_ = true;
    {
        const EngineUnlock unlocked(lock);
        job->source_.await(*batch);
    }
    arrival_awaited_ = false;
    changed_.notify_all();  // another thread may wait for a device while this one does other work
    arriving_.pop_front();
    job->arrived(*batch);
    return true;
}

bool Engine::sum_one(EngineLock& lock) {
    if (arrived_.empty()) return false;
    const auto [job, block] = arrived_.front();
    arrived_.pop_front();
    {
        const EngineUnlock unlocked(lock);
        if (block->device_error == cuda::kSuccess) job->source_.sum(*block);
    }
    job->copied(*block);
    changed_.notify_all();
    return true;
}

size_t Engine::arena_blocks_in_use() {
    const EngineLock lock(mu_);
    return arena_.blocks_in_use();
}

size_t Engine::arena_blocks_in_use_max() {
    const EngineLock lock(mu_);
    return arena_.blocks_in_use_max();
}

void Engine::close() {
    {
        EngineLock lock(mu_);
        if (closing_) return;
        changed_.wait(lock, [&]() REQUIRES(engine_state) {
            return jobs_.empty() && to_verify_.empty() && ops_outstanding_ == 0 &&
                   streams_open_ == 0 && arena_.blocks_in_use() == 0;
        });
        closing_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
    std::vector<std::shared_ptr<Backend>> backends;
    {
        const EngineLock lock(mu_);
        backends.swap(backends_);
    }
    backends.clear();
    arena_.unpin();
}

}  // namespace fastckpt
