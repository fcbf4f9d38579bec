// What callers ask of a job: to end it, to wait, and how it has gone. See write_job.h.
#include <algorithm>
#include <cerrno>

#include "check.h"
#include "engine/engine.h"

namespace fastckpt {

namespace {
double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }
}  // namespace

void WriteJob::cancel() {
    const EngineLock lock(engine_.mu_);
    patience_.end.store(1);  // no write is tried again
    if (next_submit_ < blocks_.size()) fail({Op::Kind::write, file_offset_, ECANCELED});
    submit_ready_blocks();
    engine_.changed_.notify_all();
}

void WriteJob::give_up() {
    std::shared_ptr<Sink> sink;
    {
        const EngineLock lock(engine_.mu_);
        if (has_reached(Stage::written)) return;
        fail({Op::Kind::write, file_offset_, ECANCELED});
        submit_ready_blocks();
        engine_.changed_.notify_all();
        sink = sink_;
    }
    if (sink != nullptr) sink->withdraw(&patience_);  // which takes the mutex for each op
}

Standstill WriteJob::standstill() {
    const EngineLock lock(engine_.mu_);
    if (sink_ == nullptr || has_reached(Stage::written)) return {};
    const auto now = Clock::now();
    if (ops_under_way_ > 0) {
        // A server that refuses has answered.
        if (std::chrono::nanoseconds(patience_.end.load()) > now.time_since_epoch()) return {};
        const auto first = std::find_if(blocks_.begin(), blocks_.end(), [](const auto& block) {
            return block != nullptr && block->parts_under_way > 0;
        });
        CHECK(first != blocks_.end());
        return {seconds(now - moved_at_), true, file_offset_ + (*first)->begin};
    }
    // Others may hold the memory for long, as long as they get on.
    if (!no_memory_since_ || !engine_.waiting_for_tokens_.empty()) return {};
    return {seconds(now - std::max(*no_memory_since_, engine_.moved_at_)), false, 0};
}

bool WriteJob::wait(Stage stage, std::chrono::duration<double> timeout) {
    EngineLock lock(engine_.mu_);
    return engine_.changed_.wait_for(lock, timeout,
                                     [&]() REQUIRES(engine_state) { return has_reached(stage); });
}

Failure WriteJob::failure() {
    const EngineLock lock(engine_.mu_);
    return failure_;
}

JobReport WriteJob::report() {
    const EngineLock lock(engine_.mu_);
    JobReport report = report_;
    report.tokens_waited_s = seconds(tokens_waited_);
    report.memory_waited_s = seconds(memory_waited_);
    report.blocks_held_max = allowance_->held_max_;
    report.device_copies = source_.device_copies();
    return report;
}

std::vector<uint32_t> WriteJob::block_crcs() {
    const EngineLock lock(engine_.mu_);
    CHECK(next_seal_ == blocks_.size());
    return sums_.of_blocks();
}

std::vector<uint32_t> WriteJob::base_crcs() {
    const EngineLock lock(engine_.mu_);
    CHECK(next_seal_ == blocks_.size() && image_.base != nullptr);
    std::vector<uint32_t> crcs;
    for (const auto& block : blocks_) crcs.push_back(block->base.crc);
    return crcs;
}

std::vector<uint32_t> WriteJob::slot_crcs() {
    const EngineLock lock(engine_.mu_);
    CHECK(next_seal_ == blocks_.size());
    return sums_.of_slots();
}

}  // namespace fastckpt
