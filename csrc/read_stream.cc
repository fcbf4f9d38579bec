// ReadStream: keeps a window of blocks ahead of a reader, verifies each against its CRC-32 and
// copies out what is asked for. See engine.h for the contract; knows no format.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "check.h"
#include "crc32.h"
#include "engine.h"

namespace fastckpt {

namespace {
constexpr uint64_t kDirectAlign = 4096;

// A large target is memory that its owner has just allocated and nobody touched: with huge pages
// its faults cost a fraction, and they, not the device, would limit a load. Advice only.
void advise_huge(std::byte* target, uint64_t nbytes) {
    constexpr uint64_t kHugePage = uint64_t{2} << 20;
    const auto begin = (reinterpret_cast<uint64_t>(target) + kHugePage - 1) / kHugePage * kHugePage;
    const auto end = (reinterpret_cast<uint64_t>(target) + nbytes) / kHugePage * kHugePage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace

// A block's way: reading, verifying, ready. One that leaves the window while on its way is freed
// when it arrives.
struct ReadStream::Block {
    enum class State : uint8_t { reading, verifying, ready };
    size_t index = 0;
    uint64_t nbytes = 0;
    std::byte* memory = nullptr;
    State state = State::reading;
    bool dropped = false;
    bool corrupt = false;
    Op op;
};

ReadStream::ReadStream(Engine& engine, int fd, uint64_t nbytes, std::vector<uint32_t> crcs,
                       Backend* backend, bool direct, size_t window_blocks)
    : engine_(engine),
      fd_(fd),
      nbytes_(nbytes),
      crcs_(std::move(crcs)),
      backend_(backend),
      direct_(direct),
      window_blocks_(std::max<size_t>(1, window_blocks)) {
    const size_t block_bytes = engine_.block_bytes();
    blocks_.resize((nbytes_ + block_bytes - 1) / block_bytes);
    CHECK(fd_ >= 0 && backend_ != nullptr);
    CHECK(crcs_.empty() || crcs_.size() == blocks_.size());
}

// A stream that was closed may be freed after the engine.
ReadStream::~ReadStream() {
    if (!closed_) close();
}

void ReadStream::fill_window() {
    const size_t end = std::min(blocks_.size(), window_first_ + window_blocks_);
    for (size_t index = window_first_; index < end && failure_.error == 0; ++index) {
        if (blocks_[index] != nullptr) continue;
        std::byte* memory = acquire();
        // The reader waits for the first block: rather than wait for memory that this stream holds
        // itself, give up the block that is needed last.
        if (memory == nullptr && index == window_first_ && drop_last_ready()) memory = acquire();
        if (memory == nullptr) return;
        auto block = std::make_unique<Block>();
        const uint64_t begin = index * engine_.block_bytes();
        block->index = index;
        block->memory = memory;
        block->nbytes = std::min<uint64_t>(engine_.block_bytes(), nbytes_ - begin);
        const uint64_t padded = (block->nbytes + kDirectAlign - 1) / kDirectAlign * kDirectAlign;
        block->op.kind = Op::Kind::read;
        block->op.fd = fd_;
        block->op.data = memory;
        block->op.nbytes = direct_ ? padded : block->nbytes;
        block->op.offset = begin;
        block->op.direct = direct_;
        Block* raw = block.get();
        block->op.finished = [this, raw](Op&) { on_read(*raw); };
        blocks_[index] = std::move(block);
        ++outstanding_;
        ++engine_.ops_outstanding_;
        backend_->submit(&raw->op);
    }
}

void ReadStream::on_read(Block& block) {
    std::lock_guard lock(engine_.mu_);
    CHECK(engine_.ops_outstanding_ > 0);
    --engine_.ops_outstanding_;
    // The file is shorter than it was when its end was read: someone truncated it.
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

// Without the mutex: the block is this stager's until it is settled.
void ReadStream::verify(Block& block) const {
    block.corrupt = crc32(0, block.memory, block.nbytes) != crcs_[block.index];
}

void ReadStream::settle(Block& block) {
    CHECK(outstanding_ > 0);
    --outstanding_;
    block.state = Block::State::ready;
    if (block.corrupt && !block.dropped &&
        (corrupt_block_ < 0 || corrupt_block_ > static_cast<int64_t>(block.index)))
        corrupt_block_ = static_cast<int64_t>(block.index);
    if (block.dropped) drop(block.index);
}

void ReadStream::drop(size_t index) {
    Block* block = blocks_[index].get();
    if (block == nullptr) return;
    if (block->state != Block::State::ready) {
        block->dropped = true;
        return;
    }
    engine_.arena_.release(block->memory);
    --held_;
    blocks_[index].reset();
    engine_.changed_.notify_all();
}

// Blocks that left the window while on their way count as well: a stream holds no more than
// promised.
std::byte* ReadStream::acquire() {
    if (held_ == window_blocks_) return nullptr;
    std::byte* memory = engine_.arena_.acquire();
    if (memory != nullptr) ++held_;
    return memory;
}

bool ReadStream::drop_last_ready() {
    const size_t end = std::min(blocks_.size(), window_first_ + window_blocks_);
    for (size_t index = end; index-- > window_first_;) {
        if (blocks_[index] == nullptr || blocks_[index]->state != Block::State::ready) continue;
        drop(index);
        return true;
    }
    return false;
}

void ReadStream::move_window(size_t first) {
    const size_t old_end = std::min(blocks_.size(), window_first_ + window_blocks_);
    for (size_t index = window_first_; index < old_end; ++index)
        if (index < first || index >= first + window_blocks_) drop(index);
    window_first_ = first;
    const size_t end = std::min(blocks_.size(), first + window_blocks_);
    for (size_t index = first; index < end; ++index)
        if (blocks_[index] != nullptr) blocks_[index]->dropped = false;
}

bool ReadStream::read(std::byte* target, uint64_t offset, uint64_t nbytes) {
    CHECK(nbytes <= nbytes_ && offset <= nbytes_ - nbytes);
    const size_t block_bytes = engine_.block_bytes();
    const uint64_t end = offset + nbytes;
    advise_huge(target, nbytes);
    while (offset < end) {
        const size_t index = offset / block_bytes;
        Block* block = nullptr;
        {
            std::unique_lock lock(engine_.mu_);
            CHECK(!closed_);
            move_window(index);
            engine_.changed_.wait(lock, [&] {
                // Arena blocks may have come free since: whoever waits asks again.
                fill_window();
                block = blocks_[index].get();
                const bool arrived = block != nullptr && block->state == Block::State::ready;
                return arrived || failure_.error != 0;
            });
            if (failure_.error != 0) return false;
            if (block->corrupt) {
                corrupt_block_ = static_cast<int64_t>(index);
                return false;
            }
            // Only this reader moves the window, so the block stays while it is copied.
            const uint64_t begin = index * block_bytes;
            const uint64_t n = std::min(end, begin + block->nbytes) - offset;
            copy_out(lock, target, block->memory + (offset - begin), n);
            target += n;
            offset += n;
            if (offset == begin + block->nbytes && index + 1 < blocks_.size()) {
                move_window(index + 1);
                fill_window();
            }
        }
    }
    return true;
}

// Copies on this thread and on the stagers that have nothing better to do: what takes time is not
// the copy but the page faults of memory that is touched for the first time.
void ReadStream::copy_out(std::unique_lock<std::mutex>& lock, std::byte* target,
                          const std::byte* source, size_t nbytes) {
    constexpr size_t kPiece = size_t{1} << 20;
    size_t pieces_left = 0;
    for (size_t at = 0; at < nbytes; at += kPiece) {
        ++pieces_left;
        engine_.to_copy_.push_back(
            {target + at, source + at, std::min(kPiece, nbytes - at), &pieces_left});
    }
    if (pieces_left > 1) engine_.changed_.notify_all();
    // Pieces of another reader may come first; somebody then does ours.
    while (pieces_left > 0 && engine_.copy_one(lock)) {
    }
    engine_.changed_.wait(lock, [&] { return pieces_left == 0; });
}

Failure ReadStream::failure() {
    std::lock_guard lock(engine_.mu_);
    return failure_;
}

int64_t ReadStream::corrupt_block() {
    std::lock_guard lock(engine_.mu_);
    return corrupt_block_;
}

void ReadStream::close() {
    std::unique_lock lock(engine_.mu_);
    if (closed_) return;
    closed_ = true;
    for (size_t index = 0; index < blocks_.size(); ++index) drop(index);
    engine_.changed_.notify_all();
    engine_.changed_.wait(lock, [&] { return outstanding_ == 0; });
    CHECK(engine_.streams_open_ > 0);
    --engine_.streams_open_;
    engine_.changed_.notify_all();
}

}  // namespace fastckpt
