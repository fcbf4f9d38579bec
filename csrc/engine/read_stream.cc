// ReadStream: keeps a window of wanted blocks ahead of a reader, verifies each against its CRC-32
// and copies out the bytes asked for. See engine.h for the contract; it knows no format.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "check.h"
#include "crc32/crc32.h"
#include "engine/engine.h"

namespace fastckpt {

namespace {

// A large target is usually new memory that nobody has touched. Its page faults, not the device,
// would limit a load, and with huge pages they cost a fraction. This is advice only.
void advise_huge(std::byte* target, uint64_t nbytes) {
    constexpr uint64_t kHugePage = uint64_t{2} << 20;
    const auto begin = (reinterpret_cast<uint64_t>(target) + kHugePage - 1) / kHugePage * kHugePage;
    const auto end = (reinterpret_cast<uint64_t>(target) + nbytes) / kHugePage * kHugePage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace

ReadStream::ReadStream(Engine& engine, int fd, uint64_t nbytes, std::vector<uint32_t> crcs,
                       std::vector<uint32_t> wanted, bool direct, size_t window_blocks,
                       std::shared_ptr<GdsStage> gds)
    : engine_(engine),
      fd_(fd),
      nbytes_(nbytes),
      block_count_((nbytes + engine.block_bytes() - 1) / engine.block_bytes()),
      crcs_(std::move(crcs)),
      wanted_(std::move(wanted)),
      direct_(direct),
      window_blocks_(std::max<size_t>(1, window_blocks)),
      gds_(std::move(gds)) {
    blocks_.resize(wanted_.empty() ? block_count_ : wanted_.size());
    CHECK(fd_ >= 0);
    CHECK(crcs_.empty() || crcs_.size() == block_count_);
    for (size_t place = 0; place < wanted_.size(); ++place)
        CHECK(wanted_[place] < block_count_ && (place == 0 || wanted_[place - 1] < wanted_[place]));
}

size_t ReadStream::index_at(size_t place) const { return wanted_.empty() ? place : wanted_[place]; }

size_t ReadStream::place_of(size_t index) const {
    if (wanted_.empty()) return index;
    const auto found = std::lower_bound(wanted_.begin(), wanted_.end(), index);
    CHECK(found != wanted_.end() && *found == index);
    return static_cast<size_t>(found - wanted_.begin());
}

ReadStream::~ReadStream() {
    if (!closed_) close();  // a closed one may outlive the engine
}

void ReadStream::fill_window() {
    const size_t end = std::min(blocks_.size(), window_first_ + window_blocks_);
    for (size_t place = window_first_; place < end && failure_.error == 0; ++place) {
        if (blocks_[place] != nullptr) continue;
        const uint64_t begin = index_at(place) * engine_.block_bytes();
        const uint64_t nbytes = std::min<uint64_t>(engine_.block_bytes(), nbytes_ - begin);
        std::byte* target = aimed_at(begin, nbytes);
        std::byte* memory = target != nullptr ? target : acquire();
        // The reader waits for the first block, and must not wait for memory that its own stream
        // holds: give up the block that is needed last.
        if (memory == nullptr && place == window_first_ && drop_last_ready()) memory = acquire();
        if (memory == nullptr) return;
        auto block = std::make_unique<Block>();
        block->place = place;
        block->begin = begin;
        block->memory = memory;
        block->nbytes = nbytes;
        block->aimed = target != nullptr;
        block->op.kind = Op::Kind::read;
        block->op.fd = fd_;
        block->op.data = memory;
        block->op.nbytes = direct_ ? page_from(block->nbytes) : block->nbytes;
        block->op.offset = begin;
        block->op.direct = direct_;
        Block* raw = block.get();
        block->op.finished = [this, raw](Op&) { on_read(*raw); };
        nbytes_read_ += raw->nbytes;
        blocks_[place] = std::move(block);
        ++outstanding_;
        landing_ += raw->aimed;
        ++engine_.ops_outstanding_;
        sink_->submit(&raw->op);
    }
}

void ReadStream::on_read(Block& block) {
    const EngineLock lock(engine_.mu_);
    CHECK(engine_.ops_outstanding_ > 0);
    --engine_.ops_outstanding_;
    // The file is shorter than when its end was read: somebody has truncated it.
    if (block.op.error == 0 && block.op.done < block.nbytes) block.op.error = ENODATA;
    if (block.op.error != 0 && failure_.error == 0)
        failure_ = {Op::Kind::read, block.op.offset + block.op.done, block.op.error};
    if (block.op.error != 0 || crcs_.empty() || block.dropped) {
        settle(block);
    } else {
        block.state = Block::State::verifying;
        engine_.to_verify_.emplace_back(this, &block);
    }
    engine_.changed_.notify_all();
}

// Called without the mutex: only this stager uses the block until it is settled.
void ReadStream::verify(Block& block) {
    if (gds_ != nullptr) return verify_direct(block);
    block.corrupt =
        crc32(0, block.memory, block.nbytes) != crcs_[block.begin / engine_.block_bytes()];
}

void ReadStream::settle(Block& block) {
    CHECK(outstanding_ > 0);
    --outstanding_;
    landing_ -= block.aimed;
    block.state = Block::State::ready;
    const auto index = static_cast<int64_t>(block.begin / engine_.block_bytes());
    if (block.corrupt && !block.dropped && (corrupt_block_ < 0 || corrupt_block_ > index))
        corrupt_block_ = index;
    if (block.dropped) drop(block.place);
}

void ReadStream::drop(size_t place) {
    Block* block = blocks_[place].get();
    if (block == nullptr) return;
    if (block->state != Block::State::ready) {
        block->dropped = true;
        return;
    }
    if (block->aimed) {
        // Nothing is to be given back.
    } else if (block->departures.empty()) {
        release(block->memory);
    } else {
        departing_.push_back({block->memory, block->begin, std::move(block->departures)});
    }
    blocks_[place].reset();
    engine_.changed_.notify_all();
}

// Returns memory for a block, or null. Blocks that left the window during their read still count,
// so that a stream holds no more than window_blocks_.
std::byte* ReadStream::acquire() {
    if (held_ == window_blocks_) return nullptr;
    std::byte* memory = nullptr;
    if (gds_ == nullptr) {
        memory = engine_.arena_.acquire();
    } else if (const size_t number = gds_->acquire(); number != GdsStage::kNone) {
        memory = reinterpret_cast<std::byte*>(gds_->address(number));
    }
    if (memory != nullptr) ++held_;
    return memory;
}

void ReadStream::release(std::byte* memory) {
    if (gds_ == nullptr) {
        engine_.arena_.release(memory);
    } else {
        gds_->release(gds_->number(memory));
    }
    --held_;
}

bool ReadStream::drop_last_ready() {
    const size_t end = std::min(blocks_.size(), window_first_ + window_blocks_);
    for (size_t place = end; place-- > window_first_;) {
        const Block* block = blocks_[place].get();
        if (block == nullptr || block->state != Block::State::ready || block->aimed) continue;
        drop(place);
        return true;
    }
    return false;
}

// Gives back the memory of all blocks, of those in transfer when they arrive. Returns whether any
// came free at once.
bool ReadStream::give_way(EngineLock& lock) {
    const size_t held = held_;
    const size_t end = std::min(blocks_.size(), window_first_ + window_blocks_);
    for (size_t place = window_first_; place < end; ++place) drop(place);
    while (!departing_.empty()) reclaim(lock, true);
    return held_ < held;
}

void ReadStream::beside(ReadStream& other) {
    const EngineLock lock(engine_.mu_);
    CHECK(&engine_ == &other.engine_ && this != &other);
    check_open();
    other.check_open();
    beside_.push_back(&other);
    other.beside_.push_back(this);
}

void ReadStream::move_window(size_t first) {
    const size_t old_end = std::min(blocks_.size(), window_first_ + window_blocks_);
    for (size_t place = window_first_; place < old_end; ++place)
        if (place < first || place >= first + window_blocks_) drop(place);
    window_first_ = first;
    const size_t end = std::min(blocks_.size(), first + window_blocks_);
    for (size_t place = first; place < end; ++place)
        if (blocks_[place] != nullptr) blocks_[place]->dropped = false;
}

void ReadStream::check_open() const {
    if (closed_) throw std::invalid_argument("read of a closed stream");
}

// Moves the window to the block that holds `offset` and waits for it; null on failure. The block
// stays until the reader, who alone moves the window, pins another one.
ReadStream::Block* ReadStream::pin(EngineLock& lock, uint64_t offset) {
    const size_t place = place_of(offset / engine_.block_bytes());
    Block* block = nullptr;
    check_open();
    move_window(place);
    for (;;) {
        // Arena blocks may have come free meanwhile: ask again.
        reclaim(lock, false);
        check_open();  // once more, since another thread may close it while this one waits
        fill_window();
        block = blocks_[place].get();
        if (failure_.error != 0 || (block != nullptr && block->state == Block::State::ready)) break;
        // A device tells nobody that it has copied: wait for it if the memory that it reads lacks.
        if (block == nullptr && reclaim(lock, true)) continue;
        // A reader that waits for memory holds none in its other streams, lest two such readers
        // wait for each other.
        bool gave_way = false;
        if (block == nullptr)
            for (ReadStream* other : beside_) gave_way |= other->give_way(lock);
        if (gave_way) continue;
        engine_.changed_.wait(lock);
    }
    if (failure_.error != 0) return nullptr;
    if (block->corrupt) {
        corrupt_block_ = static_cast<int64_t>(block->begin / engine_.block_bytes());
        return nullptr;
    }
    return block;
}

bool ReadStream::read(std::byte* target, uint64_t offset, uint64_t nbytes) {
    const auto address = reinterpret_cast<uint64_t>(target);
    if (!read_runs({{offset, address, nbytes, 1, 0, 0}})) return false;
    // A block that was read to its end is given back at once, and the window moves on.
    const size_t block_bytes = engine_.block_bytes();
    const uint64_t end = offset + nbytes;
    if (nbytes == 0 || (end % block_bytes != 0 && end != nbytes_)) return true;
    const EngineLock lock(engine_.mu_);
    const size_t next = place_of((end - 1) / block_bytes) + 1;
    if (next < blocks_.size()) {
        move_window(next);
        fill_window();
    }
    return true;
}

// Notes which blocks the runs take whole. A block is in its target before it is verified, so no run
// may write there as well; nor may one go back to where an earlier one has been, since blocks would
// then be read to their target once more, and perhaps not be asked for: all go through the arena.
void ReadStream::aim(const std::vector<Run>& runs, const std::vector<DeviceRange>& devices) {
    if (direct_ || gds_ != nullptr || !devices.empty()) return;
    struct Target {
        uint64_t begin, end;
        bool aimed;
    };
    std::vector<Run> aims;
    std::vector<Target> targets;
    uint64_t read = 0,
             aimed_read = 0;  // the ends, in the file, of all runs so far and of aimed ones
    for (const Run& run : runs) {
        if (run.nbytes == 0 || run.count == 0) continue;
        const bool aimed = run.count == 1 && run.nbytes >= engine_.block_bytes();
        if (run.offset < (aimed ? read : aimed_read)) return;
        read = std::max(read, run.offset + (run.count - 1) * run.offset_stride + run.nbytes);
        if (aimed) aims.push_back(run);
        if (aimed) aimed_read = read;
        const uint64_t nbytes = (run.count - 1) * run.address_stride + run.nbytes;
        targets.push_back({run.address, run.address + nbytes, aimed});
    }
    if (aims.empty()) return;
    const auto by_target = [](const Target& a, const Target& b) { return a.begin < b.begin; };
    std::sort(targets.begin(), targets.end(), by_target);
    uint64_t end = 0, aimed_end = 0;  // of all, and of those before this one
    for (const Target& target : targets) {
        if (target.begin < (target.aimed ? end : aimed_end)) return;
        end = std::max(end, target.end);
        if (target.aimed) aimed_end = target.end;
    }
    for (const Run& run : aims) advise_huge(reinterpret_cast<std::byte*>(run.address), run.nbytes);
    const EngineLock lock(engine_.mu_);
    aims_ = std::move(aims);
}

// Returns where a block is to be read to as a whole, or null.
std::byte* ReadStream::aimed_at(uint64_t begin, uint64_t nbytes) const {
    const auto before = [](uint64_t offset, const Run& run) { return offset < run.offset; };
    const auto next = std::upper_bound(aims_.begin(), aims_.end(), begin, before);
    if (next == aims_.begin()) return nullptr;
    const Run& run = *std::prev(next);
    if (begin + nbytes > run.offset + run.nbytes) return nullptr;
    return reinterpret_cast<std::byte*>(run.address + (begin - run.offset));
}

// Ends what aim() began: afterwards nothing is on its way to a target.
void ReadStream::land() {
    EngineLock lock(engine_.mu_);
    if (aims_.empty()) return;
    aims_.clear();
    const size_t end = std::min(blocks_.size(), window_first_ + window_blocks_);
    for (size_t place = window_first_; place < end; ++place)
        if (blocks_[place] != nullptr && blocks_[place]->aimed) drop(place);
    engine_.changed_.wait(lock, [&]() REQUIRES(engine_state) { return landing_ == 0; });
}

bool ReadStream::read_runs(const std::vector<Run>& runs, const std::vector<DeviceRange>& devices,
                           bool xors) {
    CHECK(!xors || devices.empty());
    struct Flight {
        ReadStream& stream;
        ~Flight() { stream.land(); }
    } const flight{*this};
    if (!xors) aim(runs, devices);
    Block* block = nullptr;
    for (const Run& run : runs) {
        const DeviceRange* device = range_of(devices, run.address);
        if (run.nbytes == 0 || run.count == 0) continue;
        CHECK(gds_ == nullptr || (device != nullptr && device->queue == gds_->queue()));
        CHECK(run.nbytes <= nbytes_ && run.offset <= nbytes_ - run.nbytes);
        CHECK(run.count == 1 ||
              run.offset_stride <= (nbytes_ - run.nbytes - run.offset) / (run.count - 1));
        for (uint64_t i = 0; i < run.count; ++i) {
            uint64_t offset = run.offset + i * run.offset_stride;
            const uint64_t end = offset + run.nbytes;
            auto* target = reinterpret_cast<std::byte*>(run.address + i * run.address_stride);
            if (run.nbytes >= Engine::kPieceBytes && device == nullptr)
                advise_huge(target, run.nbytes);
            while (offset < end) {
                const bool held = block != nullptr && offset >= block->begin &&
                                  offset < block->begin + block->nbytes;
                if (!held) {
                    if (block != nullptr) depart(*block);
                    EngineLock lock(engine_.mu_);
                    block = pin(lock, offset);
                    if (block == nullptr) return false;
                }
                const uint64_t n = std::min(end, block->begin + block->nbytes) - offset;
                const std::byte* source = block->memory + (offset - block->begin);
                if (xors) {
                    for (uint64_t at = 0; at < n; ++at) target[at] ^= source[at];
                } else if (source == target) {
                    // The block was read to where it belongs.
                } else if (device != nullptr) {
                    const auto address = reinterpret_cast<uint64_t>(target);
                    if (!send(*block, device->queue, address, source, n)) break;
                } else if (n < Engine::kPieceBytes) {
                    std::memcpy(target, source, n);
                } else {
                    EngineLock lock(engine_.mu_);
                    engine_.copy(lock, target, source, n);
                }
                target += n;
                offset += n;
            }
            if (offset < end) break;  // a device refused
        }
    }
    if (block != nullptr) depart(*block);
    return devices.empty() || failure().error == 0;
}

Failure ReadStream::failure() {
    const EngineLock lock(engine_.mu_);
    return failure_;
}

uint64_t ReadStream::nbytes_read() {
    const EngineLock lock(engine_.mu_);
    return nbytes_read_;
}

int64_t ReadStream::corrupt_block() {
    const EngineLock lock(engine_.mu_);
    return corrupt_block_;
}

void ReadStream::close() {
    EngineLock lock(engine_.mu_);
    if (closed_) return;
    closed_ = true;
    for (ReadStream* other : beside_)
        other->beside_.erase(std::find(other->beside_.begin(), other->beside_.end(), this));
    beside_.clear();
    for (size_t place = 0; place < blocks_.size(); ++place) drop(place);
    engine_.changed_.notify_all();
    engine_.changed_.wait(lock, [&]() REQUIRES(engine_state) { return outstanding_ == 0; });
    while (held_ > 0)  // a reader on another thread may have taken one from the list, to ask
        if (!reclaim(lock, true)) engine_.changed_.wait(lock);
    CHECK(engine_.streams_open_ > 0);
    --engine_.streams_open_;
    engine_.changed_.notify_all();
    const auto gds = std::move(gds_);  // so that whoever still holds the stream keeps no GPU memory
    const auto sink = std::move(sink_);
    lock.unlock();
}

}  // namespace fastckpt
