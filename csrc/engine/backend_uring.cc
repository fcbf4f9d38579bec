// The io_uring backend: one ring, driven by one thread that submits and reaps. It knows liburing;
// it does not know who submitted an op or why. Built without liburing, it only says so.
#include "engine/backend.h"

#if FASTCKPT_WITH_URING

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>

#include "check.h"
#include "mutex.h"

namespace fastckpt {

namespace {

constexpr unsigned kRefusalsMax = 100;
constexpr auto kReapPause = std::chrono::milliseconds(10);

std::string why_unavailable(const char* call, int error) {
    std::string why = std::string(call) + " failed with " + std::strerror(error);
    if (error == EPERM)
        why += " (sysctl kernel.io_uring_disabled, or the container's seccomp profile, forbids it)";
    if (error == ENOSYS) why += " (the kernel or the sandbox has no io_uring)";
    if (error == ENOMEM) why += " (RLIMIT_MEMLOCK or memory is too small for a ring: ulimit -l)";
    return why;
}

class UringBackend final : public Backend {
  public:
    explicit UringBackend(unsigned depth) : depth_(depth) {
        CHECK(depth_ > 0);
        wake_fd_ = eventfd(0, EFD_CLOEXEC);
        if (wake_fd_ < 0)
            throw BackendUnavailable(std::string("eventfd failed with ") + std::strerror(errno));
        Lock lock(mu_);
        try {
            thread_ = std::thread([this] { run(); });
        } catch (...) {  // it could not be started
            ::close(wake_fd_);
            throw;
        }
        // The ring's own thread sets it up: IORING_SETUP_SINGLE_ISSUER binds a ring to its creator.
        ready_.wait(lock, [&]() REQUIRES(mu_) { return setup_done_; });
        if (setup_error_ != 0) {
            lock.unlock();
            thread_.join();
            ::close(wake_fd_);
            throw BackendUnavailable(why_unavailable(setup_call_, setup_error_));
        }
    }
    ~UringBackend() override { close(); }

    void submit(Op* op) override {
        {
            const Lock lock(mu_);
            CHECK(!closing_);
            queue_.push_back(op);
        }
        wake();
    }

    void withdraw(const Patience* job) override {
        std::vector<Op*> withdrawn;
        {
            const Lock lock(mu_);
            if (closing_) return;  // nothing is left that the caller could wait for
            const auto left = std::stable_partition(
                queue_.begin(), queue_.end(), [&](const Op* op) { return op->patience != job; });
            withdrawn.assign(left, queue_.end());
            queue_.erase(left, queue_.end());
            withdrawn_.push_back(job);  // the ring's thread sees to the others
            wake();
        }
        for (Op* op : withdrawn) end(op);
    }

    void close() override {
        {
            const Lock lock(mu_);
            if (closing_) return;
            closing_ = true;
        }
        wake();
        thread_.join();
        ::close(wake_fd_);
    }

    const char* name() const override { return "io_uring"; }

  private:
    void wake() {
        const uint64_t one = 1;
        CHECK(::write(wake_fd_, &one, sizeof one) == sizeof one);
        ready_.notify_one();  // if it waits without the ring
    }

    // Tries the newest flags first; a kernel that does not know one answers EINVAL. DEFER_TASKRUN
    // (6.1) keeps completion work on this thread instead of interrupting the trainer's:
    // io_uring_setup(2).
    int setup() {
        const unsigned ladder[] = {
            IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_CLAMP,
            IORING_SETUP_COOP_TASKRUN | IORING_SETUP_CLAMP, IORING_SETUP_CLAMP, 0};
        int error = EINVAL;
        for (const unsigned flags : ladder) {
            error = -io_uring_queue_init(depth_ + 1, &ring_, flags);
            if (error != EINVAL) break;
        }
        if (error != 0) return error;
        setup_call_ = "io_uring_enter";
        error = -try_nop();
        if (error != 0) io_uring_queue_exit(&ring_);
        return error;
    }

    // Runs one operation: a sandbox may allow io_uring_setup and filter io_uring_enter.
    int try_nop() {
        io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
        if (sqe == nullptr) return -ENOMEM;
        io_uring_prep_nop(sqe);
        const int submitted = io_uring_submit_and_wait(&ring_, 1);
        if (submitted < 0) return submitted;
        io_uring_cqe* cqe = nullptr;
        const int waited = io_uring_wait_cqe(&ring_, &cqe);
        if (waited < 0) return waited;
        const int result = cqe->res;
        io_uring_cqe_seen(&ring_, cqe);
        return result;
    }

    void arm_wake() {
        io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
        CHECK(sqe != nullptr);
        io_uring_prep_read(sqe, wake_fd_, &wake_value_, sizeof wake_value_, 0);
        io_uring_sqe_set_data(sqe, nullptr);
        unsubmitted_.push_back(nullptr);
        wake_armed_ = true;
    }

    void arm(Op* op) {
        io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
        CHECK(sqe != nullptr);
        std::byte* data = op->data + op->done;
        const auto nbytes = static_cast<unsigned>(op->nbytes - op->done);
        const uint64_t offset = op->offset + op->done;
        if (op->kind == Op::Kind::write)
            io_uring_prep_write(sqe, op->fd, data, nbytes, offset);
        else
            io_uring_prep_read(sqe, op->fd, data, nbytes, offset);
        io_uring_sqe_set_data(sqe, op);
        unsubmitted_.push_back(op);
        in_flight_.push_back(op);
    }

    static void end(Op* op) {
        op->error = ECANCELED;
        finish(*op);
    }

    // Ends a job's ops that wait for another attempt, and asks the kernel to cancel those in flight
    // (io_uring_prep_cancel(3); a kernel before 5.5, or a device at work, refuses).
    void cancel(const Patience* job) {
        for (auto it = later_.begin(); it != later_.end();) {
            Op* const op = it->second;
            it = op->patience == job ? later_.erase(it) : std::next(it);
            if (op->patience == job) end(op);
        }
        for (Op* op : in_flight_) {
            if (op->patience != job) continue;
            io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
            if (sqe == nullptr) {
                io_uring_submit(&ring_);
                note_submitted();
                sqe = io_uring_get_sqe(&ring_);
            }
            if (sqe == nullptr) return;
            io_uring_prep_cancel(sqe, op, 0);
            io_uring_sqe_set_data(sqe, &withdrawn_);
            unsubmitted_.push_back(nullptr);
        }
    }

    void run() {
        const int error = setup();
        {
            const Lock lock(mu_);
            setup_error_ = error;
            setup_done_ = true;
        }
        ready_.notify_one();
        if (error != 0) return;
        unsigned failures = 0;  // in a row
        while (fill()) {
            const int submitted = submit_and_wait();
            note_submitted();
            if (submitted >= 0 || submitted == -EINTR || submitted == -EAGAIN ||
                submitted == -EBUSY || submitted == -ETIME) {
                failures = 0;
            } else if (++failures > kRefusalsMax) {
                run_without_ring();
                break;
            } else {  // memory may be short for a moment: 0.5 s in all
                std::this_thread::sleep_for(std::chrono::microseconds(100 * failures));
            }
            reap();
        }
        io_uring_queue_exit(&ring_);
    }

    void note_submitted() {
        while (unsubmitted_.size() > io_uring_sq_ready(&ring_)) unsubmitted_.pop_front();
    }

    // Waits for a completion, or until an op is to be attempted again.
    int submit_and_wait() {
        if (later_.empty()) return io_uring_submit_and_wait(&ring_, 1);
        const auto left = later_.begin()->first - std::chrono::steady_clock::now();
        const auto ns = std::max<int64_t>(0, left / std::chrono::nanoseconds(1));
        __kernel_timespec time{ns / 1'000'000'000, ns % 1'000'000'000};
        io_uring_cqe* cqe = nullptr;
        return io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &time, nullptr);
    }

    // Transfers by system calls what the kernel no longer takes by the ring, until close(). What it
    // has taken ends by itself.
    void run_without_ring() {
        for (Op* op : unsubmitted_) {
            if (op == nullptr) continue;
            in_flight_.erase(std::find(in_flight_.begin(), in_flight_.end(), op));
            later_.emplace(std::chrono::steady_clock::time_point{}, op);
        }
        while (Op* const op = next_without_ring()) {
            if (const Again again = carry_out(*op, transfer_by_syscall))
                later_.emplace(*again, op);
            else
                finish(*op);
        }
    }

    // Waits for an op; null when close() was called and nothing is left to do.
    Op* next_without_ring() {
        for (;;) {
            reap();
            if (!later_.empty() && is_due(later_.begin()->first)) {
                Op* const op = later_.begin()->second;
                later_.erase(later_.begin());
                return op;
            }
            Lock lock(mu_);
            withdrawn_.clear();  // each ends with its next attempt
            const bool idle = in_flight_.empty() && later_.empty();
            if (idle)
                ready_.wait(lock, [this]() REQUIRES(mu_) { return closing_ || !queue_.empty(); });
            else if (queue_.empty())
                ready_.wait_for(lock, kReapPause);
            if (!queue_.empty()) {
                Op* const op = queue_.front();
                queue_.pop_front();
                return op;
            }
            if (idle) return nullptr;
        }
    }

    // Puts waiting ops on the ring; false when close() was called and nothing is left to do.
    bool fill() {
        if (!wake_armed_) arm_wake();
        for (; in_flight_.size() < depth_ && !later_.empty() && is_due(later_.begin()->first);
             later_.erase(later_.begin()))
            arm(later_.begin()->second);
        Lock lock(mu_);
        // First, since another job may have the address of one that is gone by then.
        for (std::vector<const Patience*> jobs; !withdrawn_.empty(); jobs.clear()) {
            jobs.swap(withdrawn_);
            lock.unlock();
            for (const Patience* job : jobs) cancel(job);
            lock.lock();
        }
        while (in_flight_.size() < depth_ && !queue_.empty()) {
            arm(queue_.front());
            queue_.pop_front();
        }
        return !closing_ || !in_flight_.empty() || !later_.empty();
    }

    void reap() {
        io_uring_cqe* cqe = nullptr;
        while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
            void* const data = io_uring_cqe_get_data(cqe);
            const int result = cqe->res;
            io_uring_cqe_seen(&ring_, cqe);
            if (data == nullptr) wake_armed_ = false;
            if (data == nullptr || data == &withdrawn_) continue;
            auto* op = static_cast<Op*>(data);
            in_flight_.erase(std::find(in_flight_.begin(), in_flight_.end(), op));
            if (const Again again = advance(*op, result))
                later_.emplace(*again, op);
            else
                finish(*op);
        }
    }

    const unsigned depth_;
    int wake_fd_ = -1;
    std::thread thread_;

    // Touched by the ring's thread only.
    io_uring ring_{};
    uint64_t wake_value_ = 0;
    bool wake_armed_ = false;
    std::vector<Op*> in_flight_;
    std::multimap<std::chrono::steady_clock::time_point, Op*> later_;
    std::deque<Op*> unsubmitted_;  // on the ring, but not taken by the kernel; null: no op's

    const char* setup_call_ = "io_uring_setup";  // written before setup_done_

    Mutex mu_;
    std::condition_variable ready_;
    std::deque<Op*> queue_ GUARDED_BY(mu_);
    std::vector<const Patience*> withdrawn_
        GUARDED_BY(mu_);  // its address is the data of cancellations
    bool setup_done_ GUARDED_BY(mu_) = false;
    int setup_error_ GUARDED_BY(mu_) = 0;
    bool closing_ GUARDED_BY(mu_) = false;
};

}  // namespace

std::shared_ptr<Backend> uring_backend(unsigned depth) {
    return std::make_shared<UringBackend>(depth);
}

}  // namespace fastckpt

#else

namespace fastckpt {

std::shared_ptr<Backend> uring_backend(unsigned) {
    throw BackendUnavailable(
        "fastckpt was built without liburing (install liburing-dev and build again)");
}

}  // namespace fastckpt

#endif
