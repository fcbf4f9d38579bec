// A block of a ReadStream, and memory that devices still copy from. Only the files that implement
// the stream include this.
#pragma once

#include <utility>
#include <vector>

#include "engine/engine.h"

namespace fastckpt {

using Departure = std::pair<DeviceQueue*, DeviceQueue::Mark>;

// A block's stages: reading, verifying, ready. A block that leaves the window earlier is freed when
// it is ready; one that devices copy from, when they have copied.
struct ReadStream::Block {
    enum class State : uint8_t { reading, verifying, ready };
    size_t place = 0;
    uint64_t begin = 0;  // in the file
    uint64_t nbytes = 0;
    std::byte* memory = nullptr;
    State state = State::reading;
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
