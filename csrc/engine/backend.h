// The seam below the engine: a backend moves one block between memory and a file descriptor and
// reports how it ended. It knows bytes, descriptors and offsets; it does not know arenas, images or
// checkpoints.
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

struct Op {
    enum class Kind { read, write, copy };  // copy: by a device, which is no backend's operation
    Kind kind = Kind::write;
    int fd = -1;
    std::byte* data = nullptr;
    size_t nbytes = 0;
    uint64_t offset = 0;
    // fd was opened with O_DIRECT: data, nbytes and offset are multiples of 4096.
    bool direct = false;
    // What is written without O_DIRECT stays in the page cache until the file is synced.
    bool stays = false;

    Patience* patience = nullptr;  // null: refusals are final

    // Set by the backend. At the end of the file a read ends with done < nbytes and no error.
    size_t done = 0;
    int error = 0;  // errno, 0 for none
    int retries = 0;

    // Called once, when done or error is final, on a backend thread or the one that withdraws it.
    // Must not block on another Op.
    std::function<void(Op&)> finished;
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

class Backend {
  public:
    virtual ~Backend() = default;
    // Takes an op, which must stay at its address until finished, and does not wait for it.
    virtual void submit(Op* op) = 0;
    // Ends with ECANCELED those ops of a job, known by its patience, that no thread has begun, and
    // those in the kernel that it can still cancel. The others end when the kernel is done.
    virtual void withdraw(const Patience* job) = 0;
    // Finishes all ops submitted, then stops its threads. Idempotent; submit() must not follow.
    virtual void close() = 0;
    virtual const char* name() const = 0;
};

// Transfers with pread/pwrite on `threads` threads, in the order of submission.
std::shared_ptr<Backend> threads_backend(unsigned threads);

// One ring on one thread, at most `depth` transfers in flight. Throws BackendUnavailable when the
// build, the kernel or the sandbox has no io_uring.
std::shared_ptr<Backend> uring_backend(unsigned depth);

// Calls `transfer` for each attempt, on `threads` threads: for codecs, cuFile and test doubles.
using Transfer =
    std::function<ssize_t(const Op& op, std::byte* data, size_t nbytes, uint64_t offset)>;
std::shared_ptr<Backend> callback_backend(Transfer transfer, unsigned threads = 1);

// Calls `transfer` until op.done or op.error is final, which it does not report, or until it has to
// be called later.
Again carry_out(Op& op, const Transfer& transfer);

// Hands each op to a function, on `threads` threads and in the order of submission. The function
// sees to the op's end, unless it says when it wants the op again. The threads' niceness is raised
// by `niceness`.
using Handle = std::function<Again(Op&)>;
std::shared_ptr<Backend> handing_backend(Handle handle, unsigned threads, int niceness = 0);

// Makes one attempt of an op by system calls; returns bytes or -errno. Buffered writes do not stay
// in the page cache, unless op.stays.
ssize_t transfer_by_syscall(const Op& op, std::byte* data, size_t nbytes, uint64_t offset);

}  // namespace fastckpt
