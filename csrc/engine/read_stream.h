// Reads a file into memory, through a window of verified blocks that moves over the blocks that its
// reader requests. It does not know formats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "engine/backend.h"
#include "engine/image.h"
#include "gds/gds_stage.h"
#include "gpu/device_queue.h"
#include "mutex.h"

namespace fastckpt {

class Engine;

// A mark in a queue after which nobody copies from a block.
using Departure = std::pair<DeviceQueue*, DeviceQueue::Mark>;

// `count` runs of nbytes each in a file, a stride apart, and their addresses, also a stride apart.
struct Run {
    uint64_t offset;
    uint64_t address;
    uint64_t nbytes;
    uint64_t count;
    uint64_t offset_stride;
    uint64_t address_stride;
};

// For one reader at a time. Made by Engine::read. Reading after close() throws
// std::invalid_argument.
class ReadStream {
  public:
    ~ReadStream();
    // Waits for the blocks and copies [offset, offset + nbytes) to target; false on failure() or
    // corrupt_block(). The window stays full ahead of a reader in file order; reading elsewhere
    // moves it.
    bool read(std::byte* target, uint64_t offset, uint64_t nbytes);
    // Copies runs, which lie in wanted blocks, best in file order. `devices`, ascending, says which
    // addresses are devices': bytes for them have arrived when arrive() or close() returns. False
    // as above; targets may have been written to by then. Without O_DIRECT, blocks that one run
    // takes whole are read to their target, and verified there. With `xors` the bytes are not
    // copied: their XOR with the targets', which are the host's, takes the targets' place.
    bool read_runs(const std::vector<Run>& runs, const std::vector<DeviceRange>& devices = {},
                   bool xors = false);
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
    size_t index_at(size_t place) const;
    size_t place_of(size_t index) const;
    void check_open() const REQUIRES(engine_state);
    Block* pin(EngineLock& lock, uint64_t offset) REQUIRES(engine_state);
    bool send(Block& block, const std::shared_ptr<DeviceQueue>& queue, uint64_t target,
              const std::byte* source, uint64_t nbytes);
    void depart(Block& block);
    bool reclaim(EngineLock& lock, bool wait) REQUIRES(engine_state);
    void note(uint64_t offset, cuda::Result result) REQUIRES(engine_state);
    void fail(uint64_t offset, cuda::Result result);
    void move_window(size_t first) REQUIRES(engine_state);
    void drop(size_t place) REQUIRES(engine_state);
    void aim(const std::vector<Run>& runs, const std::vector<DeviceRange>& devices);
    std::byte* aimed_at(uint64_t begin, uint64_t nbytes) const REQUIRES(engine_state);
    void land();
    std::byte* acquire() REQUIRES(engine_state);
    void release(std::byte* memory) REQUIRES(engine_state);
    bool drop_last_ready() REQUIRES(engine_state);
    bool give_way(EngineLock& lock) REQUIRES(engine_state);
    void fill_window() REQUIRES(engine_state);
    void on_read(Block& block);
    void verify(Block& block);
    void verify_direct(Block& block);
    void settle(Block& block) REQUIRES(engine_state);

    Engine& engine_;
    const int fd_;
    const uint64_t nbytes_;
    const size_t block_count_;
    const std::vector<uint32_t> crcs_;    // of all blocks of the file; empty: nothing is verified
    const std::vector<uint32_t> wanted_;  // blocks to read, ascending; empty: all
    std::shared_ptr<Sink> sink_;          // reset by close()
    const bool direct_;
    const size_t window_blocks_;
    std::shared_ptr<GdsStage> gds_;  // null: blocks are the arena's; reset by close()

    // By place, which is the block's number among the wanted ones; null outside the window.
    std::vector<std::unique_ptr<Block>> blocks_ GUARDED_BY(engine_state);
    size_t window_first_ GUARDED_BY(engine_state) = 0;  // a place
    uint64_t nbytes_read_ GUARDED_BY(engine_state) = 0;
    size_t held_ GUARDED_BY(engine_state) = 0;         // blocks
    size_t outstanding_ GUARDED_BY(engine_state) = 0;  // held blocks in transfer or being verified
    // Runs of the reader's present call that take whole blocks, in file order.
    std::vector<Run> aims_ GUARDED_BY(engine_state);
    size_t landing_ GUARDED_BY(engine_state) = 0;  // outstanding blocks whose memory is a target
    struct Departing;
    std::deque<Departing> departing_
        GUARDED_BY(engine_state);  // held blocks that devices read, in the order of their marks
    std::vector<ReadStream*> beside_ GUARDED_BY(engine_state);  // streams of the same reader
    bool closed_ GUARDED_BY(engine_state) = false;
    Failure failure_ GUARDED_BY(engine_state);
    int64_t corrupt_block_ GUARDED_BY(engine_state) = -1;
};

// A block's stages: reading, verifying, ready. A block that leaves the window earlier is freed when
// it is ready; one that devices copy from, when they have copied.
struct ReadStream::Block {
    enum class State : uint8_t { reading, verifying, ready };
    size_t place = 0;
    uint64_t begin = 0;  // in the file
    uint64_t nbytes = 0;
    std::byte* memory = nullptr;
    State state = State::reading;
    bool aimed = false;  // the memory is the reader's, as long as it is in its call
    bool dropped = false;
    bool corrupt = false;
    std::vector<DeviceQueue*> queues;   // those that were given copies since the last mark
    std::vector<Departure> departures;  // marks in queues after which nobody copies from it
    Op op;
};

struct ReadStream::Departing {
    std::byte* memory;
    uint64_t begin;
    std::vector<Departure> departures;
};

}  // namespace fastckpt
