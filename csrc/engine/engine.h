// The engine moves blocks: memory -> staging block -> file (WriteJob) and file -> staging block ->
// memory (ReadStream), checksumming each block on the way. It knows bytes, addresses, file
// descriptors and offsets; it does not know formats, tensors, file names or when a checkpoint is
// committed.
#pragma once

#include <algorithm>
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

#include "engine/arena.h"
#include "engine/backend.h"
#include "engine/token_bucket.h"
#include "gds/gds_stage.h"
#include "gpu/device_queue.h"

namespace fastckpt {

using Clock = std::chrono::steady_clock;

// A run of the image's bytes and where they lie in memory. Segments cover the image in order,
// without gaps.
struct Segment {
    uint64_t offset;
    uint64_t nbytes;
    uint64_t address;
};

// Four bytes of the image that hold the little-endian CRC-32 of an earlier segment. They lie in a
// later segment than the one they describe, and their place in that segment's memory is not read.
// Slots of one segment follow each other. A slot beyond the image is reported and filled in
// nowhere.
struct Slot {
    uint64_t offset;
    uint64_t segment;
};

// Addresses [begin, end) are a device's, and this queue copies from there. Unified addressing sees
// to it that no other memory has them.
struct DeviceRange {
    uint64_t begin;
    uint64_t end;
    std::shared_ptr<DeviceQueue> queue;
};

// What devices have copied for a job, and how long that took them.
struct DeviceCopies {
    uint64_t nbytes;
    double seconds;
};

struct Failure {
    Op::Kind kind = Op::Kind::write;
    uint64_t offset = 0;
    int error = 0;  // errno, for a copy the driver's code; 0 means no failure
};

// How many blocks of the arena the jobs of one save may hold together, and do.
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

class Engine;

// The one of these ranges, ascending, that an address belongs to; null if it is the host's.
const DeviceRange* range_of(const std::vector<DeviceRange>& ranges, uint64_t address);

// A piece of a verified block on its way to the reader's memory, and the count of pieces still to
// go.
struct Copy {
    std::byte* target;
    const std::byte* source;
    size_t nbytes;
    size_t* pieces_left;
};

// One image, or one interval of it, on its way to one file descriptor. Made by Engine::stage.
class WriteJob : public std::enable_shared_from_this<WriteJob> {
  public:
    ~WriteJob();
    // Says where the blocks go, those staged already and those to come: the image's first byte to
    // file_offset of fd. With `direct`, file_offset is a multiple of 4096 and the last block is
    // padded with zeros to 4096: the caller cuts the file to its size. fd stays open until
    // wait_written() returns true. Writes that a server refuses are tried again for `patience`.
    // With a bucket, blocks go in its grains, of whole pages, as it has tokens; without one, at
    // once and whole. Called once.
    void write_to(int fd, uint64_t file_offset, std::shared_ptr<Backend> backend, bool direct,
                  std::chrono::nanoseconds patience = {},
                  std::shared_ptr<TokenBucket> bucket = nullptr);
    // True when all copies were done or are queued on their devices, or the job failed; false after
    // `timeout`.
    bool wait_queued(std::chrono::duration<double> timeout);
    // True when the sources are no longer read, because all was copied or the job failed; false
    // after `timeout`.
    bool wait_staged(std::chrono::duration<double> timeout);
    // True when no transfer is outstanding, successful or not; false after `timeout`.
    bool wait_written(std::chrono::duration<double> timeout);
    // Valid after the waits above.
    Failure failure();
    uint64_t nbytes_written();
    std::vector<uint32_t> block_crcs();
    std::vector<uint32_t> slot_crcs();
    // By all jobs that share this one's allowance, together.
    size_t blocks_held_max();
    // How long blocks that were ready to be written waited for the bucket.
    double tokens_waited_s();
    // Why staging memory of this job is not pinned: the driver's code, or 0. After wait_queued().
    int pin_error();
    // After wait_staged().
    DeviceCopies device_copies();
    // Stages no further block. What is in flight completes; the job then counts as failed with
    // ECANCELED.
    void cancel();

  private:
    friend class Engine;
    struct Block;
    enum class State : uint8_t { waiting, copied, sealed };

    WriteJob(Engine& engine, std::vector<Segment> segments, std::vector<Slot> slots,
             std::vector<DeviceRange> devices, std::shared_ptr<GdsStage> gds,
             std::shared_ptr<Allowance> allowance, unsigned stagers_limit);
    void check_plan() const;
    uint64_t block_nbytes(size_t index) const;
    bool wants_stager() const;
    bool queued() const;
    bool sources_released() const;
    bool finished() const;
    Block& claim(std::byte* memory, size_t direct);
    bool is_direct(size_t index) const;
    bool wants_direct() const;
    void gather_direct(Block& block);
    uint32_t direct_crc(Block& block, uint64_t begin, uint64_t nbytes) const;
    void gather(Block& block);
    struct Arrival;
    Arrival* arrive_by(Block& block, DeviceQueue* queue);
    void gathered(Block& block);
    bool is_arriving(const Block& block) const;
    bool arrived(const Block& block) const;
    void await(Block& block);
    void start_clocks();
    void account(const Block& block);
    void discard_clocks();
    bool is_lost(const Block& block) const;
    void copy(Block& block);
    void copied(Block& block);
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
    void on_written(Block& block);

    Engine& engine_;
    const std::vector<Segment> segments_;
    const std::vector<Slot> slots_;
    const std::vector<DeviceRange> devices_;  // ascending
    const std::shared_ptr<GdsStage> gds_;     // null: everything comes to the host
    const std::shared_ptr<Allowance> allowance_;
    const unsigned stagers_limit_;
    bool several_queues_ = false;
    uint64_t nbytes_ = 0;
    std::vector<int64_t> slot_of_segment_;  // the first one; -1: none

    // State below is protected by the engine's mutex, but for slot_crcs_ of segments that lie in
    // one block: those are written by that block's stager before it takes the mutex.
    std::vector<std::unique_ptr<Block>> blocks_;
    std::vector<uint32_t> block_crcs_;
    std::vector<uint32_t> slot_crcs_;
    size_t next_claim_ = 0;
    size_t next_seal_ = 0;
    size_t next_submit_ = 0;
    int fd_ = -1;
    uint64_t file_offset_ = 0;
    Backend* backend_ = nullptr;  // owned by the engine; null until write_to()
    bool direct_ = false;
    Patience patience_;
    std::shared_ptr<TokenBucket> bucket_;         // null: nothing limits the rate
    std::optional<Clock::time_point> tokens_at_;  // while there are none: when to ask again
    Clock::time_point waits_since_;
    Clock::duration tokens_waited_{};
    size_t stagers_ = 0;
    size_t arriving_ = 0;  // blocks whose bytes are on their way from devices
    int pin_error_ = 0;
    // What a device did for this job, by its own clock, in seconds since a first mark.
    struct Clocked {
        DeviceQueue::Mark origin = nullptr;
        double since = 0;  // busy without a break
        double until = 0;
        double busy = 0;
        uint64_t nbytes = 0;
    };
    std::map<DeviceQueue*, Clocked> clocks_;
    size_t blocks_held_ = 0;
    uint32_t open_segment_crc_ = 0;  // of the segment that crosses the last sealed block's end
    uint64_t nbytes_written_ = 0;
    Failure failure_;
};

// `count` runs of nbytes each in a file, a stride apart, and where in memory they go, also a stride
// apart.
struct Run {
    uint64_t offset;
    uint64_t address;
    uint64_t nbytes;
    uint64_t count;
    uint64_t offset_stride;
    uint64_t address_stride;
};

// A window of verified blocks that moves over a file's wanted blocks, for one reader at a time.
// Made by Engine::read.
class ReadStream {
  public:
    ~ReadStream();
    // Copies [offset, offset + nbytes) to target, waiting for the blocks; false on failure().
    // Reading on in order keeps the window full ahead of the reader; reading elsewhere moves the
    // window.
    bool read(std::byte* target, uint64_t offset, uint64_t nbytes);
    // Copies runs, which lie in wanted blocks; best in file order. `devices`, ascending, says which
    // of the memory is no host memory: what goes there has arrived when close() returns, or
    // arrive() is true. False as above.
    bool read_runs(const std::vector<Run>& runs, const std::vector<DeviceRange>& devices = {});
    // Waits for what is on its way to devices. False on failure().
    bool arrive();
    Failure failure();
    // After read() returned false with failure().error == 0: the first block whose checksum is
    // wrong.
    int64_t corrupt_block();
    // Bytes of the file that were read so far, or are being read.
    uint64_t nbytes_read();
    // Both streams are one reader's, which asks one of them at a time: while it waits for memory,
    // the other's is given back, to be read again when it is asked for. Until either is closed.
    void beside(ReadStream& other);
    void close();

  private:
    friend class Engine;
    struct Block;
    ReadStream(Engine& engine, int fd, uint64_t nbytes, std::vector<uint32_t> crcs,
               std::vector<uint32_t> wanted, Backend* backend, bool direct, size_t window_blocks,
               std::shared_ptr<GdsStage> gds);
    size_t block_count() const;
    size_t index_at(size_t place) const;
    size_t place_of(size_t index) const;
    Block* pin(std::unique_lock<std::mutex>& lock, uint64_t offset);
    bool send(Block& block, const std::shared_ptr<DeviceQueue>& queue, uint64_t target,
              const std::byte* source, uint64_t nbytes);
    void depart(Block& block);
    bool reclaim(std::unique_lock<std::mutex>& lock, bool wait);
    void finish(uint64_t begin, std::vector<std::pair<DeviceQueue*, cuda::Event>>& departures);
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
    const std::vector<uint32_t> crcs_;    // of every block of the file; empty: nothing is verified
    const std::vector<uint32_t> wanted_;  // blocks to read, ascending; empty: all
    Backend* const backend_;              // owned by the engine
    const bool direct_;
    const size_t window_blocks_;
    std::shared_ptr<GdsStage> gds_;  // null: blocks are the arena's; given up by close()

    // State below is protected by the engine's mutex.
    // By place, which is the block's number among the wanted ones; null outside the window.
    std::vector<std::unique_ptr<Block>> blocks_;
    size_t window_first_ = 0;  // a place
    uint64_t nbytes_read_ = 0;
    size_t held_ = 0;         // blocks
    size_t outstanding_ = 0;  // of these, in transfer or being verified
    struct Departing;
    std::deque<Departing> departing_;  // of these, read by devices, in the order of their marks
    std::vector<ReadStream*> beside_;  // of the same reader
    bool closed_ = false;
    Failure failure_;
    int64_t corrupt_block_ = -1;
};

// Outlives its jobs and streams.
class Engine {
  public:
    Engine(size_t arena_bytes, size_t block_bytes, unsigned stagers);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Starts to stage `segments`; WriteJob::write_to() says where they are written. At most
    // `stagers_limit` threads serve the job, and as many blocks of the arena as `allowance` has
    // left, which may be other jobs' too: each of them is given its file without waiting for
    // another's blocks. The memory of the segments stays valid until wait_staged() returns true.
    // `devices` says which of it is no host memory. With `gds`, blocks that lie on its device as a
    // whole are staged there; they are as long as this engine's, and the backend that write_to() is
    // given can write them.
    std::shared_ptr<WriteJob> stage(std::vector<Segment> segments, std::vector<Slot> slots,
                                    std::vector<DeviceRange> devices, std::shared_ptr<GdsStage> gds,
                                    std::shared_ptr<Allowance> allowance, unsigned stagers_limit);

    // Starts to read [0, nbytes) of fd; crcs holds the CRC-32 of every block, or is empty; `wanted`
    // holds the numbers of the blocks that will be asked for, ascending, or is empty for all. fd
    // stays open until close(). With `gds`, blocks are its device's, all that is asked for goes
    // there, and the backend can read them; they are as long as this engine's.
    std::shared_ptr<ReadStream> read(int fd, uint64_t nbytes, std::vector<uint32_t> crcs,
                                     std::vector<uint32_t> wanted, std::shared_ptr<Backend> backend,
                                     bool direct, size_t window_blocks,
                                     std::shared_ptr<GdsStage> gds);

    // Backs bytes [begin, end) of the arena with pages, and pins them where a pinner is given;
    // false if that was refused.
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
    void keep(const std::shared_ptr<Backend>& backend);
    // Each does one piece of work, releasing the lock meanwhile; false if there is none.
    bool stage_one(std::unique_lock<std::mutex>& lock);
    bool arrive_one(std::unique_lock<std::mutex>& lock, bool wait);
    bool verify_one(std::unique_lock<std::mutex>& lock);
    bool copy_one(std::unique_lock<std::mutex>& lock);
    void rest(std::unique_lock<std::mutex>& lock);

    const unsigned stagers_;
    std::vector<std::thread> threads_;
    std::mutex queueing_mu_;  // held while a block's copies are queued; mu_ is not taken under it
    std::mutex mu_;
    // State below is protected by mu_, and so is that of every job and stream.
    std::condition_variable changed_;  // any change that a waiter may wait for
    Arena arena_;
    std::deque<std::shared_ptr<WriteJob>> jobs_;  // with blocks left to stage
    // Blocks on their way from devices, in the order in which they were queued.
    std::deque<std::pair<std::shared_ptr<WriteJob>, WriteJob::Block*>> arriving_;
    bool arrival_awaited_ = false;  // by one thread: the others have better to do
    std::deque<std::pair<ReadStream*, ReadStream::Block*>> to_verify_;
    std::deque<Copy> to_copy_;
    std::deque<std::shared_ptr<WriteJob>> waiting_for_tokens_;
    bool clock_minded_ = false;  // by one thread, for all of these
    // Every backend used, until close(): if the last reference went with an op, the backend's own
    // thread would have to wait for itself.
    std::vector<std::shared_ptr<Backend>> backends_;
    size_t streams_open_ = 0;
    size_t ops_outstanding_ = 0;
    bool closing_ = false;
};

}  // namespace fastckpt
