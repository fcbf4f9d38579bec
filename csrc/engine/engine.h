// The engine moves blocks: memory -> staging block -> file (WriteJob) and file -> staging block ->
// memory (ReadStream), and checksums each block on the way. It knows bytes, addresses, file
// descriptors and offsets; it does not know formats, tensors, file names or commits.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "cast/cast.h"
#include "engine/arena.h"
#include "engine/backend.h"
#include "engine/non_finite.h"
#include "engine/token_bucket.h"
#include "gds/gds_stage.h"
#include "gpu/device_queue.h"

namespace fastckpt {

using Clock = std::chrono::steady_clock;

// A run of the image's bytes and its address in memory. Segments cover the image in order, without
// gaps.
struct Segment {
    uint64_t offset;
    uint64_t nbytes;
    uint64_t address;
};

// Four bytes of the image that receive the little-endian CRC-32 of a segment. They lie in the next
// segment, and are written whatever that segment's memory holds there. Slots of one segment follow
// each other. The CRC-32 of a slot beyond the image is only reported.
struct Slot {
    uint64_t offset;
    uint64_t segment;
};

// The dtypes of a segment's items in memory and in the image, if these differ. Its memory is the
// host's, and no item lies across two blocks.
struct Conversion {
    uint64_t segment;
    uint64_t held;
    uint64_t staged;
};

// Addresses [begin, end) of a device, and the queue that copies for it. By unified addressing no
// other memory has these addresses.
struct DeviceRange {
    uint64_t begin;
    uint64_t end;
    std::shared_ptr<DeviceQueue> queue;
};

// The bytes that devices have copied for a job, and how long that took them.
struct DeviceCopies {
    uint64_t nbytes;
    double seconds;
};

struct Failure {
    Op::Kind kind = Op::Kind::write;
    uint64_t offset = 0;
    int error = 0;  // errno, or the driver's code of a copy; 0 means no failure
};

// The number of arena blocks that the jobs of one save may hold together, and do hold.
class Allowance {
  public:
    explicit Allowance(size_t blocks) : blocks_(std::max<size_t>(1, blocks)) {}
    size_t blocks() const { return blocks_; }

  private:
    friend class WriteJob;
    const size_t blocks_;
    // State below is protected by the engine's mutex.
    size_t held_ = 0;
    size_t held_max_ = 0;
};

// What can be written without being staged, since whoever writes has it already. Chunks begin at
// multiples of chunk_bytes, which divides the engine's blocks.
class Known {
  public:
    virtual ~Known() = default;
    virtual size_t chunk_bytes() const = 0;
    // The CRC-32 of a chunk of the image, given in memory that nobody changes, if it is known. Then
    // the job's sink sees to it, and gets ops whose `data` has nothing there: null if nothing of
    // the op was staged.
    virtual std::optional<uint32_t> crc_if_known(uint64_t offset, const std::byte* bytes,
                                                 size_t nbytes) = 0;
};

// For how long a job that others have to get on has not got on, and what it waits for.
struct Standstill {
    double seconds = 0;    // 0: it waits for nothing but its caller, or for tokens
    bool writing = false;  // for writes that are under way; else for memory
    uint64_t offset = 0;   // in the file, of the first of these
};

class Engine;

// At i, how many writes had at most 2^i bytes, and more than 2^(i-1).
using WriteCounts = std::array<uint64_t, 32>;

// Returns which of these ascending ranges an address lies in; null if it is the host's.
const DeviceRange* range_of(const std::vector<DeviceRange>& ranges, uint64_t address);

// A piece of a verified block on its way to the reader's memory, and how many pieces are left.
struct Copy {
    std::byte* target;
    const std::byte* source;
    size_t nbytes;
    size_t* pieces_left;
};

// An image, or an interval of one, on its way to a file. Made by Engine::stage.
class WriteJob : public std::enable_shared_from_this<WriteJob> {
  public:
    ~WriteJob();
    // Begins to write the blocks, staged already or later: the image's first byte to file_offset of
    // fd, which stays open until wait_written() returns true. With `direct`, file_offset is a
    // multiple of 4096 and the last block is padded with zeros to 4096: the caller cuts the file to
    // its size. Writes that a server refuses are tried again for `patience`. With a bucket, blocks
    // are written in its grains, of whole pages, as it has tokens; without one, whole and at once.
    // Called once.
    void write_to(int fd, uint64_t file_offset, std::shared_ptr<Sink> sink, bool direct,
                  std::chrono::nanoseconds patience = {},
                  std::shared_ptr<TokenBucket> bucket = nullptr);
    // True when all copies are done or queued on their devices, or the job failed; false after
    // `timeout`.
    bool wait_queued(std::chrono::duration<double> timeout);
    // True when the sources are no longer read, because all is copied or the job failed; false
    // after `timeout`.
    bool wait_staged(std::chrono::duration<double> timeout);
    // True when no transfer is outstanding, successful or not; false after `timeout`.
    bool wait_written(std::chrono::duration<double> timeout);
    // Valid after the waits above.
    Failure failure();
    uint64_t nbytes_written();
    std::vector<uint32_t> block_crcs();
    std::vector<uint32_t> slot_crcs();
    // The most that all jobs which share this one's allowance held together.
    size_t blocks_held_max();
    // How long blocks that were ready to be written waited for the bucket.
    double tokens_waited_s();
    // How long nothing was copied because no block of memory was free.
    double memory_waited_s();
    // The writes that succeeded, a write of several attempts as one.
    WriteCounts writes();
    // The driver's code if staging memory could not be pinned, or 0. Valid after wait_queued().
    int pin_error();
    // Valid after wait_staged().
    DeviceCopies device_copies();
    // For each of the number runs, how many are not finite. Valid after wait_staged().
    std::vector<uint64_t> non_finite();
    // Stages and submits no further block. Transfers in flight complete; the job then counts as
    // failed with ECANCELED, unless every block was submitted before.
    void cancel();
    // As cancel(), also if every block was submitted; what the sink has not begun, or can stop,
    // ends at once. The rest holds its memory until wait_written() returns true: it may never.
    void give_up();
    Standstill standstill();

  private:
    friend class Engine;
    struct Block;
    struct Batch;
    enum class State : uint8_t { waiting, copied, sealed, written };

    WriteJob(Engine& engine, std::vector<Segment> segments, std::vector<Slot> slots,
             std::vector<DeviceRange> devices, std::shared_ptr<GdsStage> gds,
             std::shared_ptr<Allowance> allowance, unsigned stagers_limit,
             std::vector<NumberRun> numbers, std::vector<Conversion> conversions,
             std::shared_ptr<Known> known);
    void check_plan() const;
    void check_numbers() const;
    void check_conversions() const;
    const Conversion* conversion_of(const Segment& segment) const;
    uint64_t block_nbytes(size_t index) const;
    bool wants_stager() const;
    bool has_used_allowance() const;
    void note_no_memory();
    bool queued() const;
    bool sources_released() const;
    bool finished() const;
    Block& claim(std::byte* memory, size_t direct);
    bool is_direct(size_t index) const;
    bool wants_direct() const;
    bool wants_copies() const;
    void gather_direct(Batch& batch);
    uint32_t direct_crc(Block& block, uint64_t begin, uint64_t nbytes) const;
    struct Arrival;
    void gather(Batch& batch);
    void gather(Block& block, Batch& batch, std::vector<std::pair<Block*, const Segment*>>& host);
    void queue(Arrival& arrival, Batch& batch);
    void gathered(Batch& batch);
    bool arrived(Batch& batch, bool wait);
    void start_clocks();
    void account(const Batch& batch);
    void copy(Block& block);
    void copy_from(Block& block, uint64_t at);
    uint64_t pass_known(Block& block) const;
    bool fetch(uint64_t begin, uint64_t end, std::byte* target) const;
    void look_at_numbers(Block& block, const std::byte* bytes, uint64_t first, uint64_t end) const;
    void copied(Block& block);
    uint32_t copy_host(std::byte* target, const Segment& segment, uint64_t begin, uint64_t end,
                       uint32_t crc) const;
    uint32_t copy_piece(Block& block, const Segment& segment, uint64_t begin, uint64_t end,
                        uint32_t crc) const;
    void describe(int64_t slot, uint32_t crc);
    bool holds_slot(size_t index, uint64_t begin, uint64_t end) const;
    void copy_header(Block& block, const Segment& segment, uint64_t begin, uint64_t end);
    void seal_ready_blocks();
    void submit_ready_blocks();
    void submit(Block& block, uint64_t begin, uint64_t end);
    uint64_t part_end(const Block& block) const;
    void note_wait(std::optional<Clock::time_point> later);
    void seal(Block& block);
    void patch(Block& block, uint64_t begin, uint64_t end) const;
    void fail(const Failure& failure);
    void release(Block& block);
    void on_written(Block& block);

    Engine& engine_;
    const std::vector<Segment> segments_;
    const std::vector<Slot> slots_;
    const std::vector<DeviceRange> devices_;  // ascending
    const std::shared_ptr<GdsStage> gds_;     // null: everything comes to the host
    const std::shared_ptr<Allowance> allowance_;
    const unsigned stagers_limit_;
    const std::vector<NumberRun> numbers_;  // ascending
    const std::vector<Conversion> conversions_;
    const std::shared_ptr<Known> known_;  // null: everything is staged
    uint64_t nbytes_ = 0;
    std::vector<int64_t> slot_of_segment_;  // the first one; -1: none

    // State below is protected by the engine's mutex, except slot_crcs_ of segments that lie in one
    // block: that block's stager writes them before it takes the mutex.
    std::vector<std::unique_ptr<Block>> blocks_;
    std::vector<uint32_t> block_crcs_;
    std::vector<uint32_t> slot_crcs_;
    std::vector<uint64_t> non_finite_;
    size_t next_claim_ = 0;
    size_t next_seal_ = 0;
    size_t next_submit_ = 0;
    int fd_ = -1;
    uint64_t file_offset_ = 0;
    std::shared_ptr<Sink> sink_;  // null until write_to()
    bool direct_ = false;
    Patience patience_;
    std::shared_ptr<TokenBucket> bucket_;         // null: nothing limits the rate
    std::optional<Clock::time_point> tokens_at_;  // when to ask again for tokens, if it has to
    Clock::time_point waits_since_;
    Clock::duration tokens_waited_{};
    std::optional<Clock::time_point> no_memory_since_;
    Clock::duration memory_waited_{};
    WriteCounts writes_{};
    size_t stagers_ = 0;
    size_t arriving_ = 0;  // blocks whose bytes are on their way from devices
    int pin_error_ = 0;
    // A device's work for this job, by the device's clock, in seconds since a first mark.
    struct Clocked {
        DeviceQueue::Mark origin;
        double since = 0;  // it was busy from here
        double until = 0;  // to here without a break
        double busy = 0;
        uint64_t nbytes = 0;
    };
    std::map<DeviceQueue*, Clocked> clocks_;
    size_t blocks_held_ = 0;       // those that have memory
    size_t blocks_under_way_ = 0;  // claimed, and not written yet
    size_t ops_under_way_ = 0;
    Clock::time_point moved_at_;     // when an op ended, or the first of several began
    uint32_t open_segment_crc_ = 0;  // of the segment that crosses the last sealed block's end
    uint64_t nbytes_written_ = 0;
    Failure failure_;
};

// `count` runs of nbytes each in a file, a stride apart, and their addresses, also a stride apart.
struct Run {
    uint64_t offset;
    uint64_t address;
    uint64_t nbytes;
    uint64_t count;
    uint64_t offset_stride;
    uint64_t address_stride;
};

// A window of verified blocks that moves over a file's wanted blocks, for one reader at a time.
// Made by Engine::read. Reading after close() throws std::invalid_argument.
class ReadStream {
  public:
    ~ReadStream();
    // Waits for the blocks and copies [offset, offset + nbytes) to target; false on failure() or
    // corrupt_block(). The window stays full ahead of a reader in file order; reading elsewhere
    // moves it.
    bool read(std::byte* target, uint64_t offset, uint64_t nbytes);
    // Copies runs, which lie in wanted blocks, best in file order. `devices`, ascending, says which
    // addresses are devices': bytes for them have arrived when arrive() or close() returns. False
    // as above.
    bool read_runs(const std::vector<Run>& runs, const std::vector<DeviceRange>& devices = {});
    // Waits for bytes on their way to devices. False on failure().
    bool arrive();
    Failure failure();
    // After read() returned false with failure().error == 0: the first block whose checksum is
    // wrong.
    int64_t corrupt_block();
    // Bytes of the file that were read or are being read.
    uint64_t nbytes_read();
    // Tells that one reader uses both streams, one at a time, until either is closed: while it
    // waits for memory, the other stream gives its own back and reads those blocks again later.
    void beside(ReadStream& other);
    void close();

  private:
    friend class Engine;
    struct Block;
    ReadStream(Engine& engine, int fd, uint64_t nbytes, std::vector<uint32_t> crcs,
               std::vector<uint32_t> wanted, bool direct, size_t window_blocks,
               std::shared_ptr<GdsStage> gds);
    size_t block_count() const;
    size_t index_at(size_t place) const;
    size_t place_of(size_t index) const;
    void check_open() const;
    Block* pin(std::unique_lock<std::mutex>& lock, uint64_t offset);
    bool send(Block& block, const std::shared_ptr<DeviceQueue>& queue, uint64_t target,
              const std::byte* source, uint64_t nbytes);
    void depart(Block& block);
    bool reclaim(std::unique_lock<std::mutex>& lock, bool wait);
    void note(uint64_t offset, cuda::Result result);
    void fail(uint64_t offset, cuda::Result result);
    void move_window(size_t first);
    void drop(size_t place);
    std::byte* acquire();
    void release(std::byte* memory);
    bool drop_last_ready();
    bool give_way(std::unique_lock<std::mutex>& lock);
    void fill_window();
    void on_read(Block& block);
    void verify(Block& block);
    void verify_direct(Block& block);
    void settle(Block& block);
    void copy_out(std::unique_lock<std::mutex>& lock, std::byte* target, const std::byte* source,
                  size_t nbytes);

    Engine& engine_;
    const int fd_;
    const uint64_t nbytes_;
    const std::vector<uint32_t> crcs_;    // of all blocks of the file; empty: nothing is verified
    const std::vector<uint32_t> wanted_;  // blocks to read, ascending; empty: all
    std::shared_ptr<Sink> sink_;          // reset by close()
    const bool direct_;
    const size_t window_blocks_;
    std::shared_ptr<GdsStage> gds_;  // null: blocks are the arena's; reset by close()

    // State below is protected by the engine's mutex.
    // By place, which is the block's number among the wanted ones; null outside the window.
    std::vector<std::unique_ptr<Block>> blocks_;
    size_t window_first_ = 0;  // a place
    uint64_t nbytes_read_ = 0;
    size_t held_ = 0;         // blocks
    size_t outstanding_ = 0;  // held blocks in transfer or being verified
    struct Departing;
    std::deque<Departing> departing_;  // held blocks that devices read, in the order of their marks
    std::vector<ReadStream*> beside_;  // streams of the same reader
    bool closed_ = false;
    Failure failure_;
    int64_t corrupt_block_ = -1;
};

// The threads, the arena, and the jobs and streams that use them, which it outlives.
class Engine {
  public:
    Engine(size_t arena_bytes, size_t block_bytes, unsigned stagers);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Begins to stage `segments`; WriteJob::write_to() says where they are written. `conversions`,
    // by ascending segments, say which are converted on the way. At most
    // `stagers_limit` threads serve the job. It holds at most the blocks that `allowance` has left;
    // where jobs share one, write_to() must not wait for another job's blocks, or both may wait for
    // ever. The segments' memory stays valid until wait_staged() returns true. `devices` says which
    // of it is devices'. With `gds`, blocks that lie on its device as a whole are staged there: its
    // blocks have this engine's size, and write_to()'s sink can write them. Of `numbers`, those
    // that are not finite are counted as they are staged, which with `gds` nobody on the host sees.
    // Of a block in the host's memory, the chunks up to the first that is not `known` are only
    // read; such a job has no slots and converts nothing.
    std::shared_ptr<WriteJob> stage(std::vector<Segment> segments, std::vector<Slot> slots,
                                    std::vector<DeviceRange> devices, std::shared_ptr<GdsStage> gds,
                                    std::shared_ptr<Allowance> allowance, unsigned stagers_limit,
                                    std::vector<NumberRun> numbers = {},
                                    std::vector<Conversion> conversions = {},
                                    std::shared_ptr<Known> known = nullptr);

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
    void run();
    // Keeps the backends of a sink. Returns what a job or stream holds of it: nothing of a backend.
    std::shared_ptr<Sink> keep(const std::shared_ptr<Sink>& sink);
    // Each does one piece of work, with the lock released meanwhile, since a call of the driver may
    // wait for others; false if there is none.
    bool stage_one(std::unique_lock<std::mutex>& lock);
    bool arrive_one(std::unique_lock<std::mutex>& lock, bool wait);
    bool sum_one(std::unique_lock<std::mutex>& lock);
    bool verify_one(std::unique_lock<std::mutex>& lock);
    bool copy_one(std::unique_lock<std::mutex>& lock);
    void submit_due();
    void rest(std::unique_lock<std::mutex>& lock);
    size_t batch_blocks(const std::byte* first);

    const unsigned stagers_;
    std::vector<std::thread> threads_;
    std::mutex queueing_mu_;  // held while a batch's copies are queued; mu_ is never taken under it
    std::mutex mu_;
    // State below is protected by mu_, and so is that of every job and stream.
    std::condition_variable changed_;  // any change that a waiter may wait for
    Arena arena_;
    std::deque<std::shared_ptr<WriteJob>> jobs_;  // with blocks left to stage
    // Batches on their way from devices, about in the order in which they were queued.
    std::deque<std::pair<std::shared_ptr<WriteJob>, std::shared_ptr<WriteJob::Batch>>> arriving_;
    std::deque<std::pair<std::shared_ptr<WriteJob>, WriteJob::Block*>> arrived_;  // to be summed
    bool arrival_awaited_ = false;  // one thread waits for a device; the others do other work
    std::deque<std::pair<ReadStream*, ReadStream::Block*>> to_verify_;
    std::deque<Copy> to_copy_;
    std::deque<std::shared_ptr<WriteJob>> waiting_for_tokens_;
    bool clock_minded_ = false;  // one thread waits until the first of these may take tokens
    // Every backend used, until close(): if an op held the last reference, the backend's own thread
    // would destroy the backend, and wait for itself.
    std::vector<std::shared_ptr<Backend>> backends_;
    size_t streams_open_ = 0;
    size_t ops_outstanding_ = 0;
    Clock::time_point moved_at_;  // when the last op ended
    bool closing_ = false;
};

}  // namespace fastckpt
