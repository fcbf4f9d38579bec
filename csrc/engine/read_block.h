// A block of a ReadStream, and what devices still copy from. Shared by the files that implement the
// stream, and by nobody else.
#pragma once

#include <utility>
#include <vector>

#include "engine/engine.h"

namespace fastckpt {

using Departure = std::pair<DeviceQueue*, DeviceQueue::Mark>;

// A block's way: reading, verifying, ready. One that leaves the window while on its way is freed
// when it arrives; one that devices copy from, when they have.
struct ReadStream::Block {
    enum class State : uint8_t { reading, verifying, ready };
    size_t place = 0;
    uint64_t begin = 0;  // in the file
    uint64_t nbytes = 0;
    std::byte* memory = nullptr;
    State state = State::reading;
    bool dropped = false;
    bool corrupt = false;
    std::vector<DeviceQueue*> queues;   // that were given copies since the last mark
    std::vector<Departure> departures;  // places in queues after which nobody copies from it
    Op op;
};

struct ReadStream::Departing {
    std::byte* memory;
    uint64_t begin;
    std::vector<Departure> departures;
};

}  // namespace fastckpt
