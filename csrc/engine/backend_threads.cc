// The threads backend and its kin, and the rules that all backends share: what a short transfer, a
// retry and an error mean. It knows pread/pwrite; it does not know who submitted an op or why.
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <map>

#include "check.h"
#include "engine/backend.h"
#include "mutex.h"

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x00000080  // include/uapi/linux/fs.h, Linux 6.14
#endif

namespace fastckpt {

namespace {

constexpr int kRetriesMax = 100;

// Whether a server has answered that credentials (a Kerberos ticket, say) or a handle are expired.
bool is_refusal(ssize_t result) {
    return result == -EACCES || result == -EPERM || result == -EKEYEXPIRED || result == -ESTALE;
}

// Writes a range back; returns 0, or an errno with which the op must end.
//
// That may be the error of any earlier write to the file: the wait returns it once for this file
// description, and the sync before the commit will not tell it again
// (file_check_and_advance_wb_err). So it is never one that advance() tries again: the bytes that
// are lost are not this op's.
int write_back(int fd, uint64_t offset, size_t nbytes, unsigned flags) {
    if (sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes), flags) == 0)
        return 0;
    const int error = errno;
    // Without flags it does nothing: where that fails, too, a sandbox refuses the call itself.
    if (sync_file_range(fd, 0, 0, 0) != 0) return 0;
    return error == EINTR || error == EAGAIN || is_refusal(-error) ? EIO : error;
}

// Writes back the block just written and drops the one `kWindow` behind it, so that a checkpoint
// does not evict the training job's data set from the page cache. Returns as write_back().
int drop_behind(int fd, uint64_t offset, size_t nbytes) {
    constexpr uint64_t kWindow = uint64_t{64} << 20;
    const int error = write_back(fd, offset, nbytes, SYNC_FILE_RANGE_WRITE);
    if (error != 0 || offset < kWindow) return error;
    const uint64_t behind = offset - kWindow;
    const unsigned wait =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    if (const int lost = write_back(fd, behind, nbytes, wait)) return lost;
    // It drops clean pages only, and is advice.
    posix_fadvise(fd, static_cast<off_t>(behind), static_cast<off_t>(nbytes), POSIX_FADV_DONTNEED);
    return 0;
}

ssize_t write_buffered(int fd, std::byte* data, size_t nbytes, uint64_t offset) {
    static std::atomic<bool> dontcache_refused{false};
    const iovec iov{data, nbytes};
    if (!dontcache_refused.load(std::memory_order_relaxed)) {
        const ssize_t n = pwritev2(fd, &iov, 1, static_cast<off_t>(offset), RWF_DONTCACHE);
        if (n >= 0 || (errno != EOPNOTSUPP && errno != EINVAL)) return n < 0 ? -errno : n;
        // EOPNOTSUPP is this file system's answer, EINVAL that of a kernel without the flag.
        if (errno == EINVAL) dontcache_refused.store(true, std::memory_order_relaxed);
    }
    const ssize_t n = pwrite(fd, data, nbytes, static_cast<off_t>(offset));
    if (n < 0) return -errno;
    const int lost = drop_behind(fd, offset, static_cast<size_t>(n));
    return lost != 0 ? -lost : n;
}

class ThreadsBackend final : public Backend {
  public:
    ThreadsBackend(unsigned threads, Transfer transfer) : transfer_(std::move(transfer)) {
        CHECK(threads > 0);
        try {
            for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
        } catch (...) {  // a thread could not be started: those that were must end first
            close();
            throw;
        }
    }
    ~ThreadsBackend() override { close(); }

    void submit(Op* op) override {
        {
            const Lock lock(mu_);
            CHECK(!closing_);
            queue_.push_back(op);
        }
        wake_.notify_one();
    }

    void withdraw(const Patience* job) override {
        std::vector<Op*> withdrawn;
        {
            const Lock lock(mu_);
            for (auto it = later_.begin(); it != later_.end();)
                if (it->second->patience == job) {
                    withdrawn.push_back(it->second);
                    it = later_.erase(it);
                } else {
                    ++it;
                }
            const auto left = std::stable_partition(
                queue_.begin(), queue_.end(), [&](const Op* op) { return op->patience != job; });
            withdrawn.insert(withdrawn.end(), left, queue_.end());
            queue_.erase(left, queue_.end());
        }
        for (Op* op : withdrawn) {
            op->error = ECANCELED;
            finish(*op);
        }
        wake_.notify_all();
    }

    void close() override {
        {
            const Lock lock(mu_);
            if (closing_) return;
            closing_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    const char* name() const override { return "threads"; }

  private:
    void run() {
        while (Op* const op = next()) {
            FileSink* const sink = op->sink;
            const Again again = sink ? sink->handle(*op) : handle_by(*op, transfer_);
            if (!again) continue;
            {
                const Lock lock(mu_);
                later_.emplace(*again, op);
            }
            wake_.notify_one();  // a thread that waits for longer than this
        }
    }

    // Waits for an op; null when close() was called and nothing is left to do.
    Op* next() {
        Lock lock(mu_);
        for (;;) {
            if (!later_.empty() && is_due(later_.begin()->first)) {
                Op* const op = later_.begin()->second;
                later_.erase(later_.begin());
                return op;
            }
            if (!queue_.empty()) {
                Op* const op = queue_.front();
                queue_.pop_front();
                return op;
            }
            if (!later_.empty())
                wake_.wait_until(lock, later_.begin()->first);
            else if (closing_)
                return nullptr;
            else
                wake_.wait(lock);
        }
    }

    const Transfer transfer_;
    std::vector<std::thread> threads_;
    Mutex mu_;
    std::condition_variable wake_;
    std::deque<Op*> queue_ GUARDED_BY(mu_);
    std::multimap<std::chrono::steady_clock::time_point, Op*> later_ GUARDED_BY(mu_);
    bool closing_ GUARDED_BY(mu_) = false;
};

class CallbackSink final : public FileSink {
  public:
    CallbackSink(Backend& threads, Transfer transfer)
        : FileSink(threads), transfer_(std::move(transfer)) {}
    Again handle(Op& op) override { return handle_by(op, transfer_); }

  private:
    const Transfer transfer_;
};

}  // namespace

ssize_t transfer_by_syscall(const Op& op, std::byte* data, size_t nbytes, uint64_t offset) {
    if (op.kind == Op::Kind::write && !op.direct && !op.stays)
        return write_buffered(op.fd, data, nbytes, offset);
    const auto at = static_cast<off_t>(offset);
    const ssize_t n = op.kind == Op::Kind::write ? pwrite(op.fd, data, nbytes, at)
                                                 : pread(op.fd, data, nbytes, at);
    return n < 0 ? -errno : n;
}

namespace {

// Returns when to try again what was refused; null if it is not worth another try.
Again renewal(Patience& patience) {
    constexpr auto kPause = std::chrono::milliseconds(250);
    const auto now = std::chrono::steady_clock::now();
    const auto since = now.time_since_epoch();
    int64_t none = 0;
    patience.end.compare_exchange_strong(none,
                                         (since + patience.whole) / std::chrono::nanoseconds(1));
    const auto left = std::chrono::nanoseconds(patience.end.load()) - since;
    if (left.count() <= 0) return std::nullopt;
    return now + std::min<std::chrono::nanoseconds>(left, kPause);
}

constexpr Again kAtOnce = std::chrono::steady_clock::time_point{};
constexpr Again kNever = std::nullopt;

}  // namespace

Again advance(Op& op, ssize_t result) {
    if (op.kind == Op::Kind::write && op.patience != nullptr) {
        if (is_refusal(result))
            if (const Again again = renewal(*op.patience)) return again;
        // A job that has failed has set its end to 1: no write that succeeds gives it time again.
        int64_t end = op.patience->end.load();
        while (result > 0 && end > 1 && !op.patience->end.compare_exchange_weak(end, 0)) {
        }
    }
    // What is left of it is worth nothing, and its descriptor may be closed soon.
    const bool is_withdrawn = op.patience != nullptr && op.patience->is_over();
    if (is_withdrawn && (result == -EINTR || result == -EAGAIN)) {
        op.error = ECANCELED;
        return kNever;
    }
    if (result == -EINTR || result == -EAGAIN) {
        if (++op.retries <= kRetriesMax) {
            // EAGAIN may mean that memory or a queue is short: wait longer each time, 0.5 s in all.
            if (result == -EINTR) return kAtOnce;
            return std::chrono::steady_clock::now() + std::chrono::microseconds(100 * op.retries);
        }
        op.error = static_cast<int>(-result);
        return kNever;
    }
    if (result < 0) {
        op.error = static_cast<int>(-result);
        return kNever;
    }
    auto moved = static_cast<size_t>(result);
    CHECK(moved <= op.nbytes - op.done);
    if (op.kind == Op::Kind::read) {
        op.done += moved;
        // A direct read that ends off the alignment has reached the end of the file.
        const bool at_end = moved == 0 || (op.direct && moved % kPageBytes != 0);
        return op.done == op.nbytes || at_end ? kNever : kAtOnce;
    }
    // A short direct write goes on from its last aligned byte: writing a sector twice is harmless.
    if (op.direct && op.done + moved < op.nbytes) moved -= moved % kPageBytes;
    op.done += moved;
    if (op.done == op.nbytes) return kNever;
    // Many attempts without progress are an error that the file system did not name.
    if (moved == 0 && ++op.retries > kRetriesMax) {
        op.error = EIO;
        return kNever;
    }
    if (is_withdrawn) op.error = ECANCELED;
    return is_withdrawn ? kNever : kAtOnce;
}

Again carry_out(Op& op, const Transfer& transfer) {
    Again again;
    do {
        const size_t nbytes = op.nbytes - op.done;
        again = advance(op, transfer(op, op.data + op.done, nbytes, op.offset + op.done));
    } while (is_due(again));
    return again;
}

Again handle_by(Op& op, const Transfer& transfer) {
    const Again again = carry_out(op, transfer);
    if (!again) finish(op);
    return again;
}

std::shared_ptr<Backend> threads_backend(unsigned threads, Transfer transfer) {
    return std::make_shared<ThreadsBackend>(threads, std::move(transfer));
}

std::shared_ptr<FileSink> callback_sink(Backend& threads, Transfer transfer) {
    return std::make_shared<CallbackSink>(threads, std::move(transfer));
}

}  // namespace fastckpt
