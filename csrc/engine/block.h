// A block that a job moves, and the batch that it is staged in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "crc32/crc32.h"
#include "engine/backend.h"
#include "gds/gds_stage.h"
#include "gpu/device_queue.h"

namespace fastckpt {

// A CRC of consecutive bytes, extended at its end.
struct RunCrc {
    uint32_t crc = 0;
    uint64_t nbytes = 0;

    void append(uint32_t other, uint64_t other_nbytes) {
        crc = nbytes == 0 ? other : crc32_combine(crc, other, other_nbytes);
        nbytes += other_nbytes;
    }
};

// A block waits, is copied, sealed in file order, and written.
struct Block {
    enum class State : uint8_t { waiting, copied, sealed, written };
    size_t index = 0;
    uint64_t begin = 0;  // image bytes [begin, end)
    uint64_t end = 0;
    std::byte* memory = nullptr;      // of the arena, or
    size_t direct = GdsStage::kNone;  // the number of a block of device memory
    size_t words_used = 0;            // of its checksums on the device
    State state = State::waiting;
    // The block's bytes are before ++ [late_begin, late_end) ++ after. The late ones hold slots of
    // the segment that was open when the block began, whose CRC is known only when the blocks
    // before this one are sealed.
    RunCrc before;
    uint64_t late_begin = 0;
    uint64_t late_end = 0;
    RunCrc after;
    RunCrc base;               // of the block's bytes before the base was subtracted from them
    uint32_t head_crc = 0;     // of the first segment's bytes in this block, if it began earlier
    uint32_t tail_crc = 0;     // of the last segment's bytes in this block, if it goes on
    bool is_arriving = false;  // or has arrived, from devices
    cuda::Result device_error = cuda::kSuccess;
    std::deque<Op> parts;    // as submitted; a deque, since an op must stay where it is
    uint64_t submitted = 0;  // bytes
    size_t parts_under_way = 0;

    std::vector<std::pair<size_t, uint64_t>> non_finite;  // of which run how many
    std::vector<uint64_t> lossy;  // segments whose conversion has left numbers not finite

    uint64_t nbytes() const { return end - begin; }
    // The memory of a byte of the image.
    std::byte* at(uint64_t offset) const { return memory + (offset - begin); }
    bool is_direct() const { return direct != GdsStage::kNone; }
    bool has_late() const { return late_end != 0; }
    void append(uint32_t crc, uint64_t n) { (has_late() ? after : before).append(crc, n); }
};

// The copies of one device into a batch's blocks, between two marks in the device's queue.
struct Arrival {
    DeviceQueue* queue = nullptr;
    DeviceQueue::Mark begin;
    DeviceQueue::Mark end;  // null if the device refused it
    uint64_t nbytes = 0;
    double begin_s = 0, end_s = 0;  // by the device's clock, since the job's first mark
    std::vector<DeviceQueue::CopyToHost> copies;  // until they are queued
};

// Consecutive blocks that one stager takes. What comes from devices is queued, and arrives, at
// once.
struct Batch {
    std::vector<Block*> blocks;
    std::vector<Arrival> arrivals;
    cuda::Result device_error = cuda::kSuccess;
    int pin_error = 0;

    bool is_arriving() const { return !arrivals.empty() || device_error != cuda::kSuccess; }
};

}  // namespace fastckpt
