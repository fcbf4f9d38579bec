// The staging arena: one anonymous mapping cut into equal blocks, with a hard budget in bytes. It
// owns the pages and knows which blocks are free; it does not know what is staged in them, and it
// does not lock (its owner does).
#pragma once

#include <cstddef>
#include <vector>

namespace fastckpt {

class Arena {
  public:
    // Reserves address space only; pages come when a block is first used. budget_bytes is rounded
    // down to whole blocks, at least one. Throws std::bad_alloc if the address space is refused.
    Arena(size_t budget_bytes, size_t block_bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // A free block, or nullptr when the budget is spent. The block used last is given first: it is
    // the warmest.
    std::byte* acquire();
    void release(std::byte* block);

    // Backs bytes [begin, end) of the arena, cut to whole blocks and to its size, with pages, by
    // `threads` threads; false if the kernel refused. Callable without the owner's lock: it changes
    // no content and populating a page twice is harmless.
    bool prefault(size_t begin, size_t end, unsigned threads) const;

    size_t block_bytes() const { return block_bytes_; }
    size_t blocks() const { return blocks_; }
    size_t blocks_in_use() const { return blocks_ - free_.size(); }
    size_t blocks_in_use_max() const { return in_use_max_; }

  private:
    const size_t block_bytes_;
    const size_t blocks_;
    std::byte* base_ = nullptr;
    std::vector<std::byte*> free_;
    size_t in_use_max_ = 0;
};

}  // namespace fastckpt
