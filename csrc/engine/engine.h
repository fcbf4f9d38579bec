// The engine moves blocks: memory -> staging block -> file (WriteJob) and file -> staging block ->
// memory (ReadStream). It checksums each block during the move. It knows bytes, addresses, file
// descriptors and offsets, but not formats, tensors, file names or commits.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/arena.h"
#include "engine/backend.h"
#include "engine/read_stream.h"
#include "engine/write_job.h"
#include "mutex.h"

namespace fastckpt {

// The threads, the arena, and the jobs and streams that use them, which it outlives.
class Engine {
  public:
    Engine(size_t arena_bytes, size_t block_bytes, unsigned stagers);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Begins to stage an image; WriteJob::write_to() says where it is written. At most
    // `stagers_limit` threads serve the job. It holds at most the blocks that `allowance` has left;
    // where jobs share one, write_to() must not wait for another job's blocks, or both may wait for
    // ever. The image's memory stays valid until all is staged. `gds` is as Source's; write_to()'s
    // sink can write its blocks. A `landing` has room for all of the image, whose blocks are then
    // staged there, at their places; nobody else changes it until the job has ended.
    std::shared_ptr<WriteJob> stage(Image image, std::shared_ptr<Allowance> allowance,
                                    unsigned stagers_limit, std::shared_ptr<GdsStage> gds = nullptr,
                                    std::shared_ptr<Arena> landing = nullptr);

    // Begins to read [0, nbytes) of fd, which stays open until close(). crcs holds the CRC-32 of
    // every block, or nothing; `wanted` the ascending numbers of the blocks that will be asked for,
    // or nothing for all. With `gds`, blocks are its device's, have this engine's size, and go only
    // to that device; the sink can read them.
    std::shared_ptr<ReadStream> read(int fd, uint64_t nbytes, std::vector<uint32_t> crcs,
                                     std::vector<uint32_t> wanted, std::shared_ptr<Sink> sink,
                                     bool direct, size_t window_blocks,
                                     std::shared_ptr<GdsStage> gds);

    // Backs bytes [begin, end) of the arena with pages, and pins them if there is a pinner; false
    // if the device refused to.
    bool prefault(size_t begin, size_t end, unsigned threads,
                  const std::shared_ptr<Pinner>& pinner);
    size_t block_bytes() const { return arena_.block_bytes(); }
    size_t arena_blocks() const { return arena_.blocks(); }
    size_t arena_blocks_in_use();
    size_t arena_blocks_in_use_max();
    // Waits for every job and stream, then stops the threads. Idempotent.
    void close();

  private:
    friend class WriteJob;
    friend class ReadStream;
    static constexpr size_t kPieceBytes = size_t{1} << 20;  // of a copy that several threads share
    // A piece of one, and how many are left.
    struct Piece {
        std::byte* target;
        const std::byte* source;
        size_t nbytes;
        size_t* left;
    };

    void run();
    // Keeps the backend of a sink. Returns what a job or stream holds of it: nothing of a backend.
    std::shared_ptr<Sink> keep(const std::shared_ptr<Sink>& sink) REQUIRES(engine_state);
    // Each does one piece of work, with the lock released meanwhile, since a call of the driver may
    // wait for others; false if there is none.
    bool stage_one(EngineLock& lock) REQUIRES(engine_state);
    bool arrive_one(EngineLock& lock) REQUIRES(engine_state);
    bool sum_one(EngineLock& lock) REQUIRES(engine_state);
    bool verify_one(EngineLock& lock) REQUIRES(engine_state);
    bool copy_one(EngineLock& lock) REQUIRES(engine_state);
    // Copies verified bytes to their reader, on this thread and on idle stagers: page faults in
    // memory that is touched for the first time, which take most of the time, then overlap.
    void copy(EngineLock& lock, std::byte* target, const std::byte* source, size_t nbytes)
        REQUIRES(engine_state);
    void submit_due() REQUIRES(engine_state);
    void rest(EngineLock& lock) REQUIRES(engine_state);
    size_t batch_blocks(Arena& arena, const std::byte* first) REQUIRES(engine_state);

    const unsigned stagers_;
    std::vector<std::thread> threads_;
    Mutex queueing_mu_;  // held while a batch's copies are queued; mu_ is never taken under it
    std::mutex mu_;
    // What it protects, and of jobs and streams, is engine_state.
    std::condition_variable changed_;  // any change that a waiter may wait for
    Arena arena_;                      // whose blocks are taken and given back under engine_state
    std::deque<std::shared_ptr<WriteJob>> jobs_
        GUARDED_BY(engine_state);  // with blocks left to stage
    // Batches on their way from devices, about in the order in which they were queued.
    std::deque<std::pair<std::shared_ptr<WriteJob>, std::shared_ptr<Batch>>> arriving_
        GUARDED_BY(engine_state);
    std::deque<std::pair<std::shared_ptr<WriteJob>, Block*>> arrived_
        GUARDED_BY(engine_state);  // to be summed
    bool arrival_awaited_ GUARDED_BY(engine_state) =
        false;  // one thread waits for a device; the others do other work
    std::deque<std::pair<ReadStream*, ReadStream::Block*>> to_verify_ GUARDED_BY(engine_state);
    std::deque<Piece> to_copy_ GUARDED_BY(engine_state);
    std::deque<std::shared_ptr<WriteJob>> waiting_for_tokens_ GUARDED_BY(engine_state);
    bool clock_minded_ GUARDED_BY(engine_state) =
        false;  // one thread waits until the first of these may take tokens
    // Every backend used, until close(): if an op held the last reference, the backend's own thread
    // would destroy the backend, and wait for itself.
    std::vector<std::shared_ptr<Backend>> backends_ GUARDED_BY(engine_state);
    size_t streams_open_ GUARDED_BY(engine_state) = 0;
    size_t ops_outstanding_ GUARDED_BY(engine_state) = 0;
    Clock::time_point moved_at_ GUARDED_BY(engine_state);  // when the last op ended
    bool closing_ GUARDED_BY(engine_state) = false;
};

}  // namespace fastckpt
