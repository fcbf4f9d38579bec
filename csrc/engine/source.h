// Fills a job's blocks with the bytes of an image, or with their difference from an earlier one,
// and checksums them: from the host's memory, converted if need be; from devices, by copies that
// are queued and arrive later; or within a device (GDS).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/arena.h"
#include "engine/block.h"
#include "engine/checksums.h"
#include "engine/image.h"
#include "gds/gds_stage.h"
#include "mutex.h"

namespace fastckpt {

// The bytes that devices have copied for a job, and how long that took them.
struct DeviceCopies {
    uint64_t nbytes = 0;
    double seconds = 0;
};

class Source {
  public:
    // The image and the checksums stay where they are. `queueing` is held while a batch's copies
    // are queued: if those of two were mixed, the time of both would count for each. With `gds`,
    // blocks that lie on its device as a whole are staged there.
    Source(const Image& image, Checksums& sums, Arena& arena, Mutex& queueing,
           std::shared_ptr<GdsStage> gds);

    // Whether the block that begins here is staged on its device.
    bool is_direct(uint64_t begin) const;
    // Whether it begins on a device, and comes to the host, so that it may be one of a batch.
    bool is_batched(uint64_t begin) const {
        return !image_.devices.empty() && image_.device_of(*image_.at(begin)) != nullptr &&
               !is_direct(begin);
    }

    // The next three are called without the engine's mutex.
    // Fills a batch's blocks; or, if it is_arriving() then, has queued the copies of bytes on
    // devices, and copied those of the host.
    void fill(Batch& batch);
    // Waits until a batch's bytes have arrived, or a device has failed.
    void await(Batch& batch) const;
    // Checksums a block that has arrived.
    void sum(Block& block) { copy(block); }

    // Adds up how long each device was busy with a batch.
    void account(const Batch& batch) REQUIRES(engine_state);
    DeviceCopies device_copies() const REQUIRES(engine_state);

  private:
    // A device's work for this job, by the device's clock, in seconds since a first mark.
    struct Clocked {
        DeviceQueue::Mark origin;
        double since = 0;  // it was busy from here
        double until = 0;  // to here without a break
        double busy = 0;
        uint64_t nbytes = 0;
    };

    void copy(Block& block);
    uint32_t copy_piece(Block& block, const Segment& segment, uint64_t begin, uint64_t end) const;
    uint32_t copy_host(Block& block, const Segment& segment, uint64_t begin, uint64_t end) const;
    uint32_t subtract_base(Block& block, uint64_t begin, uint64_t end) const;
    void look_at_numbers(Block& block) const;
    void gather(Batch& batch);
    void list_copies(Block& block, Batch& batch);
    void queue(Arrival& arrival, Batch& batch) const;
    void gather_direct(Batch& batch);
    uint32_t direct_crc(Block& block, uint64_t begin, uint64_t nbytes) const;

    const Image& image_;
    Checksums& sums_;
    Arena& arena_;
    Mutex& queueing_;
    const std::shared_ptr<GdsStage> gds_;     // null: everything comes to the host
    std::map<DeviceQueue*, Clocked> clocks_;  // used under engine_state, but for `origin`
};

}  // namespace fastckpt
