// Passes the parts of an object to a client, which sends them in order, without copying complete
// parts. It knows the order of blocks and when each block may be reused, but not the client.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "engine/backend.h"
#include "mutex.h"

namespace fastckpt {

class Parts;

// Bytes that are being sent: of an op, which ends with this object, or a copy.
class Part {
  public:
    Part(std::shared_ptr<Parts> parts, Op* op) : parts_(std::move(parts)), op_(op) {}
    explicit Part(std::string copy) : copy_(std::move(copy)) {}
    ~Part();
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

    void* data() { return op_ != nullptr ? static_cast<void*>(op_->data) : copy_.data(); }
    size_t nbytes() const { return op_ != nullptr ? op_->nbytes : copy_.size(); }

  private:
    const std::shared_ptr<Parts> parts_;
    Op* const op_ = nullptr;
    std::string copy_;
};

class Parts : public std::enable_shared_from_this<Parts> {
  public:
    // An op that is no whole part is copied when its turn comes, since the client would keep it
    // until the rest of the part is there.
    Parts(size_t part_bytes, size_t copies_max)
        : part_bytes_(part_bytes), copies_max_(copies_max) {}

    // Takes an op; returns false if this has failed, and the op with it.
    bool add(Op* op);
    // Takes a copy. Waits while more than copies_max bytes of copies are here, unless it comes
    // next. Returns the error with which this has failed, or 0.
    int add(std::string copy, uint64_t offset);
    // Waits for what comes next. Returns null after the last, or with an error (an errno): that
    // with which this has failed, or ESPIPE if something was missing when the end was told.
    std::unique_ptr<Part> take(int* error);
    // Tells that all was added.
    void end();
    // Ends all ops that were not taken, and those that follow. The first error counts.
    void fail(int error);
    // Ends the ops of a job that were not taken, with ECANCELED.
    void withdraw(const Patience* job);

    int error();
    uint64_t nbytes();  // that were added
    uint64_t taken();

  private:
    struct Piece {
        Op* op = nullptr;
        std::string copy;
    };

    const size_t part_bytes_;
    const size_t copies_max_;
    Mutex mu_;
    std::condition_variable next_is_here_;
    std::condition_variable has_room_;
    std::map<uint64_t, Piece> pieces_ GUARDED_BY(mu_);  // by offset
    size_t copied_bytes_ GUARDED_BY(mu_) = 0;
    uint64_t nbytes_ GUARDED_BY(mu_) = 0;
    uint64_t at_ GUARDED_BY(mu_) = 0;
    bool is_whole_ GUARDED_BY(mu_) = false;
    int error_ GUARDED_BY(mu_) = 0;
};

// The way of an engine's blocks into parts; `threads` end what comes after a failure.
class PartsSink final : public FileSink {
  public:
    PartsSink(Backend& threads, std::shared_ptr<Parts> parts)
        : FileSink(threads), parts_(std::move(parts)) {}
    void submit(Op* op) override;
    void withdraw(const Patience* job) override;
    // A client divides bytes, and may encrypt them, and copies them to a socket.
    bool takes_cores() const override { return true; }
    Again handle(Op& op) override;

  private:
    const std::shared_ptr<Parts> parts_;
};

}  // namespace fastckpt
