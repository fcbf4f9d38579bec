// How fast bytes may go: so many a second, in grains. It knows time as it is told, and numbers of
// bytes; it does not know what is moved, nor who waits.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>

namespace fastckpt {

// A token bucket that several jobs share. What was taken has to be paid for at the rate; who asks
// may be one grain ahead of that, so that a late waker catches up, and no burst is longer than two
// grains. Safe to use from several threads.
class TokenBucket {
  public:
    using Time = std::chrono::steady_clock::time_point;

    TokenBucket(double bytes_per_s, uint64_t grain_bytes) { set(bytes_per_s, grain_bytes); }

    // From now on this rate, also for what was taken before and is not paid for: a job that went at
    // a crawl holds up nobody after it.
    void set(double bytes_per_s, uint64_t grain_bytes,
             Time now = std::chrono::steady_clock::now()) {
        const std::lock_guard lock(mu_);
        if (paid_at_ > now) {
            const std::chrono::duration<double> owed = paid_at_ - now;
            paid_at_ = now + cost_at(bytes_per_s, owed.count() * bytes_per_s_);
        }
        bytes_per_s_ = bytes_per_s;
        grain_bytes_ = grain_bytes;
    }

    // Takes nbytes, or says when to ask again.
    std::optional<Time> take(uint64_t nbytes, Time now) {
        const std::lock_guard lock(mu_);
        const auto ahead = cost(grain_bytes_);
        if (paid_at_ > now + ahead) return paid_at_ - ahead;
        paid_at_ = std::max(paid_at_, now) + cost(nbytes);
        return std::nullopt;
    }

    // What is moved at a time.
    uint64_t grain_bytes() const {
        const std::lock_guard lock(mu_);
        return grain_bytes_;
    }

  private:
    Time::duration cost(uint64_t nbytes) const {
        return cost_at(bytes_per_s_, static_cast<double>(nbytes));
    }

    static Time::duration cost_at(double bytes_per_s, double nbytes) {
        constexpr double kLongest = 1e8;  // seconds; no rate makes a time that does not fit
        const double seconds = nbytes / bytes_per_s;
        return std::chrono::duration_cast<Time::duration>(
            std::chrono::duration<double>(std::min(seconds, kLongest)));
    }

    mutable std::mutex mu_;
    // State below is protected by mu_.
    double bytes_per_s_ = 1;
    uint64_t grain_bytes_ = 0;
    Time paid_at_{};  // when all that was taken is paid for
};

}  // namespace fastckpt
