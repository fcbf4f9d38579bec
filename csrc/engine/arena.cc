// The staging arena's pages (huge pages, fork, population, pinning): see arena.h.
#include "engine/arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <new>
#include <system_error>
#include <thread>

#include "check.h"
#include "engine/backend.h"

namespace fastckpt {

namespace {

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // of Linux 5.14
#endif

// Touches each page, which changes no content. A fault in user mode holds the lock of this mapping
// alone (Linux 6.4 and later), whereas madvise(MADV_POPULATE_WRITE) holds that of the process's
// memory, for which its allocations wait: training beside it took 1.3 to 1.4 times as long.
// A save may write to the same page meanwhile.
__attribute__((no_sanitize("thread"))) void populate(std::byte* begin, size_t nbytes) {
    constexpr size_t kPageBytes = 4096;
    auto* bytes = reinterpret_cast<volatile uint8_t*>(begin);  // else it might be left out
    for (size_t at = 0; at < nbytes; at += kPageBytes)
        __atomic_fetch_or(bytes + at, uint8_t{0}, __ATOMIC_RELAXED);
}

// Takes pages that are not there yet from this node, while it has some: mbind(2). Advice only.
void prefer_node(void* memory, size_t nbytes, int node) {
    constexpr int kPreferred = 1;  // MPOL_PREFERRED, linux/mempolicy.h
    constexpr int kNodesMax = 64;
    if (node < 0 || node >= kNodesMax) return;
    const unsigned long mask = 1UL << node;
    syscall(SYS_mbind, memory, nbytes, kPreferred, &mask, kNodesMax + 1, 0);
}

}  // namespace

Arena::Arena(size_t budget_bytes, size_t block_bytes)
    : block_bytes_(block_bytes),
      blocks_(std::max<size_t>(1, budget_bytes / block_bytes)),
      nbytes_(blocks_ * block_bytes_) {
    CHECK(block_bytes_ >= 4096 && block_bytes_ % 4096 == 0);
    void* mapped = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(mapped);
    // Huge pages cost some forty times fewer faults when a block is first touched. Advice only.
    madvise(base_, nbytes_, MADV_HUGEPAGE);
    // A child of fork() lacks the engine's threads and cannot use these pages. If it had them, a
    // copy-on-write during a direct write could corrupt data (open(2), NOTES).
    madvise(base_, nbytes_, MADV_DONTFORK);
    free_.reserve(blocks_);
    for (size_t i = 0; i < blocks_; ++i) free_.push_back(base_ + i * block_bytes_);
    pins_.resize((blocks_ + kPinnedBlocks - 1) / kPinnedBlocks);
}

Arena::Arena(int fd, size_t nbytes, size_t block_bytes)
    : block_bytes_(block_bytes),
      blocks_((nbytes + block_bytes - 1) / block_bytes),
      nbytes_(page_from(nbytes)) {
    CHECK(nbytes > 0);
    void* mapped = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category());
    base_ = static_cast<std::byte*>(mapped);
    madvise(base_, nbytes_, MADV_DONTFORK);
    // The kernel enters a file's pages at a third of what a fault for each costs. It holds the lock
    // of the process's memory meanwhile, so it gets few at a time. Before Linux 5.14 they fault.
    constexpr size_t kAtOnce = size_t{1} << 20;
    for (size_t at = 0; at < nbytes_; at += kAtOnce) {
        const size_t n = std::min(kAtOnce, nbytes_ - at);
        if (madvise(base_ + at, n, MADV_POPULATE_WRITE) == 0) continue;
        const int error = errno;
        if (error == EINVAL) break;
        munmap(base_, nbytes_);
        throw std::system_error(error, std::generic_category());
    }
    pins_.resize((blocks_ + kPinnedBlocks - 1) / kPinnedBlocks);
}

Arena::~Arena() {
    CHECK(in_use_max_ == 0 || free_.size() == blocks_);
    if (getpid() != pid_) return;  // a child of fork() does not have these pages
    unpin();
    munmap(base_, nbytes_);
}

std::byte* Arena::acquire() {
    if (free_.empty()) return nullptr;
    // So the process touches, and keeps, only as many pages as a save needs at a time; and blocks
    // that are taken one after the other mostly lie side by side, where one copy may fill several.
    std::pop_heap(free_.begin(), free_.end(), std::greater<>{});
    std::byte* block = free_.back();
    free_.pop_back();
    in_use_max_ = std::max(in_use_max_, blocks_in_use());
    return block;
}

void Arena::release(std::byte* block) {
    CHECK(block >= base_ && static_cast<size_t>(block - base_) % block_bytes_ == 0);
    CHECK(static_cast<size_t>(block - base_) / block_bytes_ < blocks_ && free_.size() < blocks_);
    free_.push_back(block);
    std::push_heap(free_.begin(), free_.end(), std::greater<>{});
}

size_t Arena::part_of(const std::byte* block) const {
    return static_cast<size_t>(block - base_) / block_bytes_ / kPinnedBlocks;
}

bool Arena::in_one_part(const std::byte* one, const std::byte* other) const {
    return part_of(one) == part_of(other);
}

bool Arena::needs_pin(const std::byte* block) {
    const Lock lock(pin_mu_);
    return pin_error_ == 0 && pins_[part_of(block)] != Pin::done;
}

int Arena::pin(const std::byte* block, const std::shared_ptr<Pinner>& pinner) {
    const size_t part = part_of(block);
    Lock lock(pin_mu_);
    pin_ended_.wait(lock, [&]() REQUIRES(pin_mu_) { return pins_[part] != Pin::under_way; });
    if (pins_[part] == Pin::done || pin_error_ != 0) return pin_error_;
    pins_[part] = Pin::under_way;
    const size_t first = part * kPinnedBlocks;
    std::byte* memory = at(first);
    const size_t nbytes = std::min(kPinnedBlocks * block_bytes_, nbytes_ - first * block_bytes_);
    if (pinner_ == nullptr) {
        pinner_ = pinner;
        prefer_node(base_, nbytes_, pinner->node());
    }
    const auto chosen = pinner_;
    lock.unlock();
    populate(memory, nbytes);  // faster than page by page while pinning
    const int error = chosen->pin(memory, nbytes);
    lock.lock();
    pins_[part] = error == 0 ? Pin::done : Pin::none;
    if (pin_error_ == 0) pin_error_ = error;
    pin_ended_.notify_all();
    return pin_error_;
}

int Arena::pin(size_t begin, size_t end, const std::shared_ptr<Pinner>& pinner) {
    const size_t last = std::min(blocks_, end / block_bytes_);
    int result = 0;
    for (size_t i = begin / block_bytes_; i < last && result == 0; i += kPinnedBlocks)
        result = pin(base_ + i * block_bytes_, pinner);
    return result;
}

void Arena::unpin() {
    Lock lock(pin_mu_);
    pin_ended_.wait(lock, [&]() REQUIRES(pin_mu_) {
        return std::find(pins_.begin(), pins_.end(), Pin::under_way) == pins_.end();
    });
    for (size_t part = 0; part < pins_.size(); ++part)
        if (pins_[part] == Pin::done) pinner_->unpin(base_ + part * kPinnedBlocks * block_bytes_);
    pins_.assign(pins_.size(), Pin::none);
    pinner_ = nullptr;
}

void Arena::prefault(size_t begin, size_t end, unsigned threads) const {
    CHECK(threads > 0);
    const size_t last = std::min(blocks_, end / block_bytes_);
    std::atomic<size_t> next{begin / block_bytes_};
    const auto work = [&] {
        for (size_t i = next++; i < last; i = next++)
            populate(base_ + i * block_bytes_, block_bytes_);
    };
    std::vector<std::thread> workers;
    try {
        for (unsigned t = 1; t < threads; ++t) workers.emplace_back(work);
    } catch (const std::system_error&) {
        // Fewer threads do the same work.
    }
    work();
    for (auto& worker : workers) worker.join();
}

}  // namespace fastckpt
