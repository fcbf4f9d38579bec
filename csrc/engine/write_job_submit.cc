// Submits a WriteJob's sealed blocks to the sink, as fast as the bucket allows, or gives them
// up. See engine.h for the contract.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "check.h"
#include "engine/write_block.h"

namespace fastckpt {

namespace {
constexpr uint64_t kDirectAlign = 4096;

// Returns the smallest i, up to that of the last WriteCounts, for which 2^i is at least n.
size_t log2_up(uint64_t n) {
    size_t i = 0;
    while (i + 1 < std::tuple_size_v<WriteCounts> && (uint64_t{1} << i) < n) ++i;
    return i;
}
}  // namespace

void WriteJob::write_to(int fd, uint64_t file_offset, std::shared_ptr<Sink> sink, bool direct,
                        std::chrono::nanoseconds patience, std::shared_ptr<TokenBucket> bucket) {
    std::lock_guard lock(engine_.mu_);
    CHECK(sink_ == nullptr && sink != nullptr && fd >= 0);
    CHECK(!direct || file_offset % kDirectAlign == 0);
    CHECK(bucket == nullptr || bucket->grain_bytes() % kDirectAlign == 0);
    fd_ = fd;
    file_offset_ = file_offset;
    sink_ = engine_.keep(sink);
    direct_ = direct;
    patience_.whole = patience;
    bucket_ = std::move(bucket);
    submit_ready_blocks();
    engine_.changed_.notify_all();
}

// Submits sealed blocks once there is a sink, as far as there are tokens; frees them if the job
// failed.
void WriteJob::submit_ready_blocks() {
    std::optional<Clock::time_point> later;
    while (next_submit_ < next_seal_ && !later) {
        Block& block = *blocks_[next_submit_];
        if (failure_.error != 0) {
            block.submitted = block.end - block.begin;
            ++next_submit_;
            if (block.parts_under_way == 0) on_written(block);
            continue;
        }
        if (sink_ == nullptr) break;
        const uint64_t begin = block.submitted;
        const uint64_t end = part_end(block);
        if (bucket_ != nullptr) later = bucket_->take(end - begin, Clock::now());
        if (later) break;
        block.submitted = end;
        if (end == block.end - block.begin) ++next_submit_;
        submit(block, begin, end);
    }
    note_wait(later);
}

// Returns where the part of a block that is submitted next ends, counted from the block's begin. A
// block of device memory is registered and written as a whole.
uint64_t WriteJob::part_end(const Block& block) const {
    const uint64_t nbytes = block.end - block.begin;
    if (bucket_ == nullptr || block.is_direct()) return nbytes;
    return std::min(nbytes, block.submitted + std::max(kDirectAlign, bucket_->grain_bytes()));
}

// Updates the engine's list of jobs that wait for tokens, and how long this one has waited.
void WriteJob::note_wait(std::optional<Clock::time_point> later) {
    const auto now = Clock::now();
    if (tokens_at_) tokens_waited_ += now - waits_since_;
    waits_since_ = now;
    const bool listed = tokens_at_.has_value();
    tokens_at_ = later;
    if (later.has_value() == listed) return;
    auto& list = engine_.waiting_for_tokens_;
    if (later)
        list.push_back(shared_from_this());
    else
        list.erase(std::find_if(list.begin(), list.end(),
                                [this](const auto& job) { return job.get() == this; }));
    engine_.changed_.notify_all();  // a thread may have to wait for the tokens, or no longer
}

void WriteJob::submit(Block& block, uint64_t begin, uint64_t end) {
    const uint64_t padded = (end + kDirectAlign - 1) / kDirectAlign * kDirectAlign;
    Op& part = block.parts.emplace_back();
    part.kind = Op::Kind::write;
    part.fd = fd_;
    part.data = block.is_direct() ? reinterpret_cast<std::byte*>(gds_->address(block.direct))
                : block.memory == nullptr ? nullptr  // all of it is known
                                          : block.memory + begin;
    part.nbytes = (direct_ ? padded : end) - begin;
    part.offset = file_offset_ + block.begin + begin;
    part.direct = direct_;
    part.patience = &patience_;
    // The op owns the job until it ends, so that a caller may drop the job at any time.
    part.finished = [this, self = shared_from_this(), &block, nbytes = end - begin](Op& op) {
        Engine& engine = engine_;
        std::lock_guard lock(engine.mu_);
        CHECK(engine.ops_outstanding_ > 0 && block.parts_under_way > 0 && ops_under_way_ > 0);
        --engine.ops_outstanding_;
        --block.parts_under_way;
        --ops_under_way_;
        moved_at_ = engine.moved_at_ = Clock::now();
        if (op.error != 0)
            fail({Op::Kind::write, op.offset + op.done, op.error});
        else
            CHECK(op.done == op.nbytes);
        if (op.error == 0) {
            nbytes_written_ += nbytes;
            ++writes_[log2_up(op.nbytes)];
        }
        if (failure_.error != 0) submit_ready_blocks();  // gives up what waits for tokens
        const bool all = block.submitted == block.end - block.begin;
        if (all && block.parts_under_way == 0 && block.state == State::sealed) on_written(block);
        engine.changed_.notify_all();
    };
    ++block.parts_under_way;
    ++engine_.ops_outstanding_;
    if (++ops_under_way_ == 1) moved_at_ = Clock::now();
    sink_->submit(&part);
}

double WriteJob::tokens_waited_s() {
    std::lock_guard lock(engine_.mu_);
    return std::chrono::duration<double>(tokens_waited_).count();
}

double WriteJob::memory_waited_s() {
    std::lock_guard lock(engine_.mu_);
    return std::chrono::duration<double>(memory_waited_).count();
}

WriteCounts WriteJob::writes() {
    std::lock_guard lock(engine_.mu_);
    return writes_;
}

void WriteJob::cancel() {
    std::lock_guard lock(engine_.mu_);
    patience_.end.store(1);  // no write is tried again
    if (next_submit_ < blocks_.size()) fail({Op::Kind::write, file_offset_, ECANCELED});
    submit_ready_blocks();
    engine_.changed_.notify_all();
}

void WriteJob::give_up() {
    std::shared_ptr<Sink> sink;
    {
        std::lock_guard lock(engine_.mu_);
        if (finished()) return;
        fail({Op::Kind::write, file_offset_, ECANCELED});
        submit_ready_blocks();
        engine_.changed_.notify_all();
        sink = sink_;
    }
    if (sink != nullptr) sink->withdraw(&patience_);  // which takes the mutex for each op
}

Standstill WriteJob::standstill() {
    std::lock_guard lock(engine_.mu_);
    if (sink_ == nullptr || finished()) return {};
    const auto now = Clock::now();
    const auto since = [now](Clock::time_point then) {
        return std::chrono::duration<double>(now - then).count();
    };
    if (ops_under_way_ > 0) {
        // A server that refuses has answered.
        if (std::chrono::nanoseconds(patience_.end.load()) > now.time_since_epoch()) return {};
        const auto first = std::find_if(blocks_.begin(), blocks_.end(), [](const auto& block) {
            return block != nullptr && block->parts_under_way > 0;
        });
        CHECK(first != blocks_.end());
        return {since(moved_at_), true, file_offset_ + (*first)->begin};
    }
    // Others may hold the memory for long, as long as they get on.
    if (!no_memory_since_ || !engine_.waiting_for_tokens_.empty()) return {};
    return {since(std::max(*no_memory_since_, engine_.moved_at_)), false, 0};
}

}  // namespace fastckpt
