// Writes an image, or an interval of an image, to a file. It keeps track of the blocks that wait,
// are staged or are being written, and of their limits in memory and tokens.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "engine/block.h"
#include "engine/checksums.h"
#include "engine/image.h"
#include "engine/source.h"
#include "engine/token_bucket.h"
#include "mutex.h"

namespace fastckpt {

using Clock = std::chrono::steady_clock;

// The number of arena blocks that the jobs of one save may hold together, and do hold.
class Allowance {
  public:
    explicit Allowance(size_t blocks) : blocks_(std::max<size_t>(1, blocks)) {}
    size_t blocks() const { return blocks_; }

  private:
    friend class WriteJob;
    const size_t blocks_;
    size_t held_ GUARDED_BY(engine_state) = 0;
    size_t held_max_ GUARDED_BY(engine_state) = 0;
};

// For how long a job that others have to get on has not got on, and what it waits for.
struct Standstill {
    double seconds = 0;    // 0: it waits for nothing but its caller, or for tokens
    bool writing = false;  // for writes that are under way; else for memory
    uint64_t offset = 0;   // in the file, of the first of these
};

// At i, how many writes had at most 2^i bytes, and more than 2^(i-1).
using WriteCounts = std::array<uint64_t, 32>;

// What a job has done so far.
struct JobReport {
    uint64_t nbytes_written = 0;
    WriteCounts writes{};        // that succeeded, one of several attempts as one
    double tokens_waited_s = 0;  // how long blocks that were ready waited for the bucket
    double memory_waited_s = 0;  // how long nothing was copied for lack of a block of memory
    size_t blocks_held_max = 0;  // by all jobs that share this one's allowance together
    // The driver's code if staging memory could not be pinned, or 0. Valid when all is queued.
    int pin_error = 0;
    // The rest is valid when all is staged.
    DeviceCopies device_copies;
    std::vector<uint64_t> non_finite;  // for each of the number runs, how many are not finite
    std::set<uint64_t> lossy;          // segments whose conversion has left numbers not finite
};

class Engine;

// Made by Engine::stage.
class WriteJob : public std::enable_shared_from_this<WriteJob> {
  public:
    // A job that has failed reaches each when nothing of it is under way any more.
    enum class Stage {
        queued,   // all copies are done, or queued on their devices
        staged,   // the sources are no longer read
        written,  // no transfer is outstanding
    };

    ~WriteJob();
    // Begins to write the blocks, staged already or later: the image's first byte to file_offset of
    // fd, which stays open until all is written. With `direct`, file_offset is a multiple of 4096
    // and the last block is padded with zeros to 4096: the caller cuts the file to its size. Writes
    // that a server refuses are tried again for `patience`. With a bucket, blocks are written in
    // its grains, of whole pages, as it has tokens; without one, whole and at once. Called once.
    void write_to(int fd, uint64_t file_offset, std::shared_ptr<Sink> sink, bool direct,
                  std::chrono::nanoseconds patience = {},
                  std::shared_ptr<TokenBucket> bucket = nullptr);
    // Says instead that the image begins at the begin of the file that it lands in: each block
    // counts as written once it is sealed. Called once, of a job with a `landing`.
    void land();
    // Returns false if the stage was not reached within `timeout`.
    bool wait(Stage stage, std::chrono::duration<double> timeout);
    Failure failure();
    JobReport report();
    // Valid when all is staged, without failure.
    std::vector<uint32_t> block_crcs();
    std::vector<uint32_t> slot_crcs();
    // Of the blocks of the image itself, if it has a base.
    std::vector<uint32_t> base_crcs();
    // Stages and submits no further block. Transfers in flight complete; the job then counts as
    // failed with ECANCELED, unless every block was submitted before.
    void cancel();
    // As cancel(), also if every block was submitted; what the sink has not begun, or can stop,
    // ends at once. The rest holds its memory until all is written, which may never be.
    void give_up();
    Standstill standstill();

  private:
    friend class Engine;

    WriteJob(Engine& engine, Image image, std::shared_ptr<GdsStage> gds,
             std::shared_ptr<Allowance> allowance, unsigned stagers_limit,
             std::shared_ptr<Arena> landing);
    bool has_reached(Stage stage) const REQUIRES(engine_state);
    // Whether no further block will be staged.
    bool is_claimed() const REQUIRES(engine_state) {
        return failure_.error != 0 || next_claim_ == blocks_.size();
    }
    bool has_used_allowance() const REQUIRES(engine_state) {
        return landing_ == nullptr && allowance_->held_ >= allowance_->blocks_;
    }
    void note_no_memory() REQUIRES(engine_state);
    // Whether what is staged waits until all is: callers wait for that, and there is memory.
    bool is_held_back() const REQUIRES(engine_state) {
        return sink_->takes_cores() && !has_lacked_memory_ && !is_claimed();
    }
    // Takes blocks for a stager, with memory for them; null if there are none, or no memory.
    std::shared_ptr<Batch> take_batch() REQUIRES(engine_state);
    Block* claim() REQUIRES(engine_state);
    // Notes that a batch was filled, or is arriving; has arrived; that a block is copied.
    void filled(const std::shared_ptr<Batch>& batch) REQUIRES(engine_state);
    void arrived(const Batch& batch) REQUIRES(engine_state);
    void copied(Block& block) REQUIRES(engine_state);
    void seal_ready_blocks() REQUIRES(engine_state);
    void submit_ready_blocks() REQUIRES(engine_state);
    uint64_t part_end(const Block& block) const REQUIRES(engine_state);
    void note_wait(std::optional<Clock::time_point> later) REQUIRES(engine_state);
    void submit(Block& block, uint64_t begin, uint64_t end) REQUIRES(engine_state);
    void on_part_written(Block& block, uint64_t nbytes, const Op& op);
    void on_written(Block& block) REQUIRES(engine_state);
    void release(Block& block) REQUIRES(engine_state);
    void fail(const Failure& failure) REQUIRES(engine_state);

    Engine& engine_;
    const Image image_;
    const std::shared_ptr<GdsStage> gds_;
    const std::shared_ptr<Allowance> allowance_;
    const unsigned stagers_limit_;
    // Has the memory of each block, which takes none of the engine's; null: the engine has.
    const std::shared_ptr<Arena> landing_;
    Arena& arena_;

    // These are used under engine_state, but for what they do to a block that a stager has.
    Checksums sums_;
    Source source_;

    std::vector<std::unique_ptr<Block>> blocks_ GUARDED_BY(engine_state);
    size_t next_claim_ GUARDED_BY(engine_state) = 0;
    size_t next_seal_ GUARDED_BY(engine_state) = 0;
    size_t next_submit_ GUARDED_BY(engine_state) = 0;
    int fd_ GUARDED_BY(engine_state) = -1;
    uint64_t file_offset_ GUARDED_BY(engine_state) = 0;
    std::shared_ptr<Sink> sink_ GUARDED_BY(engine_state);  // null until write_to()
    bool is_landed_ GUARDED_BY(engine_state) = false;
    bool direct_ GUARDED_BY(engine_state) = false;
    Patience patience_;
    std::shared_ptr<TokenBucket> bucket_ GUARDED_BY(engine_state);  // null: nothing limits the rate
    std::optional<Clock::time_point> tokens_at_
        GUARDED_BY(engine_state);  // when to ask again for tokens, if it has to
    Clock::time_point waits_since_ GUARDED_BY(engine_state);
    Clock::duration tokens_waited_ GUARDED_BY(engine_state){};
    std::optional<Clock::time_point> no_memory_since_ GUARDED_BY(engine_state);
    bool has_lacked_memory_ GUARDED_BY(engine_state) = false;
    Clock::duration memory_waited_ GUARDED_BY(engine_state){};
    size_t stagers_ GUARDED_BY(engine_state) = 0;
    size_t arriving_ GUARDED_BY(engine_state) =
        0;  // blocks whose bytes are on their way from devices
    size_t blocks_held_ GUARDED_BY(engine_state) = 0;       // those that have memory
    size_t blocks_under_way_ GUARDED_BY(engine_state) = 0;  // claimed, and not written yet
    size_t ops_under_way_ GUARDED_BY(engine_state) = 0;
    Clock::time_point moved_at_
        GUARDED_BY(engine_state);  // when an op ended, or the first of several began
    JobReport report_ GUARDED_BY(engine_state);
    Failure failure_ GUARDED_BY(engine_state);
};

}  // namespace fastckpt
