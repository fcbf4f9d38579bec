// An arena: one mapping that is divided into equal blocks. It maps anonymous memory with a hard
// budget in bytes, or a file in which blocks are staged at their own offsets. It knows which
// blocks are free, but not their contents. Its owner must lock it.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "mutex.h"

namespace fastckpt {

// Locks pages of memory, so that a device can copy to and from them.
class Pinner {
  public:
    virtual ~Pinner() = default;
    // Returns 0, or the device's error.
    virtual int pin(void* memory, size_t nbytes) = 0;
    virtual void unpin(void* memory) = 0;
    // The NUMA node nearest to the device, or -1 if it is not known.
    virtual int node() = 0;
};

class Arena {
  public:
    static constexpr size_t kPinnedBlocks = 16;  // of a part, which is pinned at once

    // Reserves address space only; a block gets pages when it is first used. budget_bytes is
    // rounded down to whole blocks, at least one. Throws std::bad_alloc.
    Arena(size_t budget_bytes, size_t block_bytes);
    // Maps the first bytes of a file in memory, which has all their pages and keeps them for as
    // long; blocks are found by at(). Throws std::system_error.
    Arena(int fd, size_t nbytes, size_t block_bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // The free block with the lowest address, or nullptr when the budget is spent.
    std::byte* acquire();
    void release(std::byte* block);
    // The memory of a block by its number.
    std::byte* at(size_t index) const { return base_ + index * block_bytes_; }

    // Backs bytes [begin, end) of the arena, cut to whole blocks and to its size, with pages, by
    // `threads` threads. Callable without the owner's lock, since it changes no content.
    void prefault(size_t begin, size_t end, unsigned threads) const;

    // Pins the part of the arena that a block lies in, once, so that blocks which no device needs
    // stay unpinned. Returns 0, or the first refusal, after which nothing more is pinned and copies
    // are slower. Called without the owner's lock, by several threads for different parts at once.
    int pin(const std::byte* block, const std::shared_ptr<Pinner>& pinner);
    // Whether pin() would still have to pin a block's part.
    bool needs_pin(const std::byte* block);
    // Whether two blocks lie in the same part. No copy may cross the parts' bounds: the driver
    // knows each by a registration of its own.
    bool in_one_part(const std::byte* one, const std::byte* other) const;
    // Does the same for the blocks in bytes [begin, end) of the arena.
    int pin(size_t begin, size_t end, const std::shared_ptr<Pinner>& pinner);

    // Unpins everything; no device may copy to or from it any more.
    void unpin();

    size_t nbytes() const { return nbytes_; }
    size_t block_bytes() const { return block_bytes_; }
    size_t blocks() const { return blocks_; }
    size_t blocks_in_use() const { return blocks_ - free_.size(); }
    size_t blocks_in_use_max() const { return in_use_max_; }

  private:
    size_t part_of(const std::byte* block) const;

    const size_t block_bytes_;
    const size_t blocks_;
    const size_t nbytes_;  // mapped, of whole pages
    const pid_t pid_ = getpid();
    std::byte* base_ = nullptr;
    std::vector<std::byte*> free_;  // a heap, the lowest address first
    size_t in_use_max_ = 0;

    Mutex pin_mu_;
    enum class Pin : uint8_t { none, under_way, done };
    std::condition_variable pin_ended_;
    std::shared_ptr<Pinner> pinner_ GUARDED_BY(pin_mu_);
    std::vector<Pin> pins_ GUARDED_BY(pin_mu_);  // by part
    int pin_error_ GUARDED_BY(pin_mu_) = 0;
};

}  // namespace fastckpt
