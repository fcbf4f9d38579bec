// The interface below the engine: a sink moves one block between memory and a file descriptor, and
// reports the result. A backend is a sink for a mount, with its own threads; the sink of an open
// file uses a backend's threads. Sinks know bytes, descriptors and offsets, but not arenas, images
// or checkpoints.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fastckpt {

// For how long writes of one job that a server refuses are tried again: a refusal for lack of valid
// credentials changes nothing, and a ticket may be renewed.
struct Patience {
    std::chrono::nanoseconds whole{0};
    // When it ends, in nanoseconds of the steady clock; 0 while nothing is refused, 1 when the job
    // has failed.
    std::atomic<int64_t> end{0};

    bool is_over() const { return end.load() == 1; }
};

// What O_DIRECT transfers is made of: memory, offsets and sizes are multiples of this.
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t page_at(uint64_t offset) { return offset / kPageBytes * kPageBytes; }
constexpr uint64_t page_from(uint64_t offset) { return page_at(offset + kPageBytes - 1); }

class FileSink;

struct Op {
    enum class Kind { read, write, copy };  // copy: by a device, which is no backend's operation
    Kind kind = Kind::write;
    int fd = -1;
    std::byte* data = nullptr;
    size_t nbytes = 0;
    uint64_t offset = 0;
    // fd was opened with O_DIRECT: data, nbytes and offset are multiples of kPageBytes.
    bool direct = false;
    // What is written without O_DIRECT stays in the page cache until the file is synced.
    bool stays = false;

    Patience* patience = nullptr;  // null: refusals are final

    FileSink* sink = nullptr;  // which has the op handled; null: the backend does

    // Set by whoever transfers. At the end of the file a read ends with done < nbytes and no error.
    size_t done = 0;
    int error = 0;  // errno, 0 for none
    int retries = 0;

    // Called once, when done or error is final, on a backend thread or the one that withdraws it.
    // Must not block on another Op.
    std::function<void(Op&)> finished;
};

struct Failure {
    Op::Kind kind = Op::Kind::write;
    uint64_t offset = 0;
    int error = 0;  // errno, or the driver's code of a copy; 0 means no failure
};

// Reports the end of an op. It moves the callback out of the op first, which that may free.
inline void finish(Op& op) {
    const auto finished = std::move(op.finished);
    finished(op);
}

// When an op is to be attempted again; null: its end has come. A backend lets the time pass without
// holding a thread, since one op must not delay others.
using Again = std::optional<std::chrono::steady_clock::time_point>;
inline bool is_due(const Again& again) {
    return again && *again <= std::chrono::steady_clock::now();
}

// Updates op.done and op.error after a transfer returned `result` (bytes, or -errno).
Again advance(Op& op, ssize_t result);

// Thrown for a backend that does not work here; the text says why.
struct BackendUnavailable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Backend;

// Where the ops of a file go.
class Sink {
  public:
    virtual ~Sink() = default;
    // Takes an op, which must stay at its address until finished, and does not wait for it.
    virtual void submit(Op* op) = 0;
    // Ends with ECANCELED those ops of a job, known by its patience, that no thread has begun, and
    // those in the kernel that it can still cancel. The others end when the kernel is done.
    virtual void withdraw(const Patience* job) = 0;
    virtual const char* name() const = 0;
    // Whether its ops take the cores that staging needs, so that they had better come after it.
    virtual bool takes_cores() const { return false; }
    // The backend whose threads its ops use.
    virtual std::shared_ptr<Backend> backend() = 0;
};

// A sink with threads, for all files of a mount.
class Backend : public Sink, public std::enable_shared_from_this<Backend> {
  public:
    std::shared_ptr<Backend> backend() override { return shared_from_this(); }
    // Finishes all ops submitted, then stops its threads. Idempotent; submit() must not follow.
    virtual void close() = 0;
};

// Makes one attempt of an op; returns bytes or -errno. For codecs, object stores and cuFile.
using Transfer =
    std::function<ssize_t(const Op& op, std::byte* data, size_t nbytes, uint64_t offset)>;

// The attempt by system calls. Buffered writes do not stay in the page cache, unless op.stays.
ssize_t transfer_by_syscall(const Op& op, std::byte* data, size_t nbytes, uint64_t offset);

// Handles ops on `threads` threads, in the order of submission: each by its sink, or without one by
// `transfer`.
std::shared_ptr<Backend> threads_backend(unsigned threads, Transfer transfer = transfer_by_syscall);

// One ring on one thread, at most `depth` transfers in flight. Throws BackendUnavailable when the
// build, the kernel or the sandbox has no io_uring.
std::shared_ptr<Backend> uring_backend(unsigned depth);

// The way of one open file's ops, which it handles itself, on the threads of a threads_backend. The
// end of an op may end it, so nothing of it is touched after finish().
class FileSink : public Sink {
  public:
    // Somebody else keeps the threads for as long: an op's end comes on one of them, which would
    // wait for itself if it ended them.
    explicit FileSink(Backend& threads) : threads_(threads) {}
    void submit(Op* op) override {
        op->sink = this;
        threads_.submit(op);
    }
    void withdraw(const Patience* job) override { threads_.withdraw(job); }
    const char* name() const override { return threads_.name(); }
    std::shared_ptr<Backend> backend() override { return threads_.shared_from_this(); }
    // Sees to the op's end, unless it says when it wants the op again. Called by a thread for each
    // op.
    virtual Again handle(Op& op) = 0;

  private:
    Backend& threads_;
};

// Handles ops by `transfer`.
std::shared_ptr<FileSink> callback_sink(Backend& threads, Transfer transfer);

// Calls `transfer` until op.done or op.error is final, which it does not report, or until it has to
// be called later.
Again carry_out(Op& op, const Transfer& transfer);

// Does the same, and reports the end.
Again handle_by(Op& op, const Transfer& transfer);

}  // namespace fastckpt
