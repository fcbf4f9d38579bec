// The order of a job's blocks: they wait for memory, are staged, sealed in file order, and written
// as there are tokens; or given up. See write_job.h for the contract.
#include "engine/write_job.h"

#include <cerrno>
#include <utility>

#include "check.h"
#include "engine/engine.h"

namespace fastckpt {

namespace {
// Returns the smallest i, up to that of the last WriteCounts, for which 2^i is at least n.
size_t log2_up(uint64_t n) {
    size_t i = 0;
    while (i + 1 < std::tuple_size_v<WriteCounts> && (uint64_t{1} << i) < n) ++i;
    return i;
}

Image checked(Image image, uint64_t block_bytes) {
    image.check(block_bytes);
    return image;
}
}  // namespace

WriteJob::WriteJob(Engine& engine, Image image, std::shared_ptr<GdsStage> gds,
                   std::shared_ptr<Allowance> allowance, unsigned stagers_limit,
                   std::shared_ptr<Arena> landing)
    : engine_(engine),
      image_(checked(std::move(image), engine.block_bytes())),
      gds_(std::move(gds)),
      allowance_(std::move(allowance)),
      stagers_limit_(std::max(1U, stagers_limit)),
      landing_(std::move(landing)),
      arena_(landing_ == nullptr ? engine.arena_ : *landing_),
      sums_(image_, (image_.nbytes() + engine.block_bytes() - 1) / engine.block_bytes()),
      source_(image_, sums_, arena_, engine.queueing_mu_, gds_) {
    CHECK(arena_.block_bytes() == engine.block_bytes());
    CHECK(landing_ == nullptr ||
          (gds_ == nullptr && page_from(image_.nbytes()) == landing_->nbytes()));
    blocks_.resize(sums_.of_blocks().size());
    report_.non_finite.assign(image_.numbers.size(), 0);
}

WriteJob::~WriteJob() { CHECK(blocks_held_ == 0); }

bool WriteJob::has_reached(Stage stage) const {
    if (stagers_ > 0 || !is_claimed()) return false;
    return stage == Stage::queued ||
           (arriving_ == 0 && (stage == Stage::staged || blocks_under_way_ == 0));
}

// ---- Staging ----

// Begins to count the time until claim(), if no thread copies for this job.
void WriteJob::note_no_memory() {
    if (!std::exchange(has_lacked_memory_, true)) submit_ready_blocks();
    if (stagers_ == 0 && !no_memory_since_) no_memory_since_ = Clock::now();
}

std::shared_ptr<Batch> WriteJob::take_batch() {
    if (is_claimed() || stagers_ == stagers_limit_ || has_used_allowance()) return nullptr;
    const auto joins_batch = [this]() REQUIRES(engine_state) {
        return !is_claimed() && source_.is_batched(next_claim_ * engine_.block_bytes());
    };
    const bool is_batch = joins_batch();
    Block* block = claim();
    if (block == nullptr) {
        note_no_memory();
        return nullptr;
    }
    ++stagers_;
    const auto batch = std::make_shared<Batch>();
    batch->blocks.push_back(block);
    const size_t most = is_batch ? engine_.batch_blocks(arena_, block->memory) : 1;
    while (batch->blocks.size() < most && !has_used_allowance() && joins_batch() &&
           (block = claim()) != nullptr)
        batch->blocks.push_back(block);
    return batch;
}

// Returns the next block, with memory; null if there is none that it can have.
Block* WriteJob::claim() {
    auto block = std::make_unique<Block>();
    block->index = next_claim_;
    block->begin = block->index * engine_.block_bytes();
    block->end = std::min(image_.nbytes(), block->begin + engine_.block_bytes());
    if (source_.is_direct(block->begin))
        block->direct = gds_->acquire();
    else
        block->memory = landing_ == nullptr ? arena_.acquire() : arena_.at(block->index);
    if (block->memory == nullptr && !block->is_direct()) return nullptr;
    if (no_memory_since_) memory_waited_ += Clock::now() - *no_memory_since_;
    no_memory_since_.reset();
    ++blocks_under_way_;
    ++blocks_held_;
    if (landing_ == nullptr)
        allowance_->held_max_ = std::max(allowance_->held_max_, ++allowance_->held_);
    blocks_[next_claim_] = std::move(block);
    return blocks_[next_claim_++].get();
}

void WriteJob::filled(const std::shared_ptr<Batch>& batch) {
    if (!batch->is_arriving()) return copied(*batch->blocks.front());
    CHECK(stagers_ > 0);
    --stagers_;
    arriving_ += batch->blocks.size();
    if (report_.pin_error == 0) report_.pin_error = batch->pin_error;
    engine_.arriving_.emplace_back(shared_from_this(), batch);
}

void WriteJob::arrived(const Batch& batch) {
    source_.account(batch);
    for (Block* block : batch.blocks) engine_.arrived_.emplace_back(shared_from_this(), block);
}

void WriteJob::copied(Block& block) {
    block.state = Block::State::copied;
    if (block.device_error != cuda::kSuccess)
        fail({Op::Kind::copy, block.begin, block.device_error});
    for (const auto& [run, count] : block.non_finite) report_.non_finite[run] += count;
    report_.lossy.insert(block.lossy.begin(), block.lossy.end());
    size_t& under_way = block.is_arriving ? arriving_ : stagers_;
    CHECK(under_way > 0);
    --under_way;
    seal_ready_blocks();
}

// Seals blocks in file order, as far as they are copied.
void WriteJob::seal_ready_blocks() {
    for (; next_seal_ < blocks_.size(); ++next_seal_) {
        Block* block = blocks_[next_seal_].get();
        if (block == nullptr || block->state != Block::State::copied) break;
        if (failure_.error == 0) sums_.seal(*block);
        block->state = Block::State::sealed;
    }
    submit_ready_blocks();
}

// ---- Writing ----

void WriteJob::write_to(int fd, uint64_t file_offset, std::shared_ptr<Sink> sink, bool direct,
                        std::chrono::nanoseconds patience, std::shared_ptr<TokenBucket> bucket) {
    const EngineLock lock(engine_.mu_);
    CHECK(sink_ == nullptr && sink != nullptr && fd >= 0);
    CHECK(!direct || file_offset % kPageBytes == 0);
    CHECK(bucket == nullptr || bucket->grain_bytes() % kPageBytes == 0);
    fd_ = fd;
    file_offset_ = file_offset;
    sink_ = engine_.keep(sink);
    direct_ = direct;
    patience_.whole = patience;
    bucket_ = std::move(bucket);
    submit_ready_blocks();
    engine_.changed_.notify_all();
}

void WriteJob::land() {
    const EngineLock lock(engine_.mu_);
    CHECK(sink_ == nullptr && landing_ != nullptr);
    is_landed_ = true;
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
            block.submitted = block.nbytes();
            ++next_submit_;
            if (block.parts_under_way == 0) on_written(block);
            continue;
        }
        if (is_landed_) {
            block.submitted = block.nbytes();
            ++next_submit_;
            report_.nbytes_written += block.nbytes();
            on_written(block);
            continue;
        }
        if (sink_ == nullptr || is_held_back()) break;
        const uint64_t begin = block.submitted;
        const uint64_t end = part_end(block);
        if (bucket_ != nullptr) later = bucket_->take(end - begin, Clock::now());
        if (later) break;
        block.submitted = end;
        if (end == block.nbytes()) ++next_submit_;
        submit(block, begin, end);
    }
    note_wait(later);
}

// Returns where the part of a block that is submitted next ends, counted from the block's begin. A
// block of device memory is registered and written as a whole.
uint64_t WriteJob::part_end(const Block& block) const {
    if (bucket_ == nullptr || block.is_direct()) return block.nbytes();
    return std::min(block.nbytes(), block.submitted + std::max(kPageBytes, bucket_->grain_bytes()));
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
    Op& part = block.parts.emplace_back();
    part.kind = Op::Kind::write;
    part.fd = fd_;
    part.data = block.is_direct() ? reinterpret_cast<std::byte*>(gds_->address(block.direct))
                                  : block.memory + begin;
    part.nbytes = (direct_ ? page_from(end) : end) - begin;
    part.offset = file_offset_ + block.begin + begin;
    part.direct = direct_;
    part.patience = &patience_;
    // The op owns the job until it ends, so that a caller may drop the job at any time.
    part.finished = [self = shared_from_this(), &block, nbytes = end - begin](Op& op) {
        self->on_part_written(block, nbytes, op);
    };
    ++block.parts_under_way;
    ++engine_.ops_outstanding_;
    if (++ops_under_way_ == 1) moved_at_ = Clock::now();
    sink_->submit(&part);
}

void WriteJob::on_part_written(Block& block, uint64_t nbytes, const Op& op) {
    const EngineLock lock(engine_.mu_);
    CHECK(engine_.ops_outstanding_ > 0 && block.parts_under_way > 0 && ops_under_way_ > 0);
    --engine_.ops_outstanding_;
    --block.parts_under_way;
    --ops_under_way_;
    moved_at_ = engine_.moved_at_ = Clock::now();
    if (op.error != 0) {
        fail({Op::Kind::write, op.offset + op.done, op.error});
    } else {
        CHECK(op.done == op.nbytes);
        report_.nbytes_written += nbytes;
        ++report_.writes[log2_up(op.nbytes)];
    }
    if (failure_.error != 0) submit_ready_blocks();  // gives up what waits for tokens
    const bool all = block.submitted == block.nbytes() && block.parts_under_way == 0;
    if (all && block.state == Block::State::sealed) on_written(block);
    engine_.changed_.notify_all();
}

void WriteJob::on_written(Block& block) {
    CHECK(block.state == Block::State::sealed && blocks_under_way_ > 0);
    release(block);
    block.state = Block::State::written;
    --blocks_under_way_;
}

// Gives a block's memory back.
void WriteJob::release(Block& block) {
    CHECK(block.memory != nullptr || block.is_direct());
    if (block.is_direct())
        gds_->release(std::exchange(block.direct, GdsStage::kNone));
    else if (std::byte* memory = std::exchange(block.memory, nullptr); landing_ == nullptr)
        arena_.release(memory);
    CHECK(blocks_held_ > 0);
    --blocks_held_;
    if (landing_ != nullptr) return;
    CHECK(allowance_->held_ > 0);
    --allowance_->held_;
}

void WriteJob::fail(const Failure& failure) {
    if (failure_.error == 0) failure_ = failure;
    patience_.end.store(1);  // long ago, since nothing of this job is worth another try
}

}  // namespace fastckpt
