// A token bucket that limits the rate of writes, in bytes per second, in grains. It knows times and
// numbers of bytes, but not the data or the waiting threads.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

#include "mutex.h"

namespace fastckpt {

// A token bucket that several jobs share. Tokens taken are paid for at the rate. A job may take
// some while at most one grain is unpaid, so that one that wakes late catches up, and no burst is
// longer than two grains. Safe to use from several threads.
class TokenBucket {
  public:
    using Time = std::chrono::steady_clock::time_point;

    TokenBucket(double bytes_per_s, uint64_t grain_bytes) { set(bytes_per_s, grain_bytes); }

    // Sets the rate, also for tokens that are not paid for: a slow job does not delay later ones.
    void set(double bytes_per_s, uint64_t grain_bytes, std::optional<Time> at = std::nullopt) {
        const Lock lock(mu_);
        // Under the lock: what was taken after `now` would count as owed, at whatever rate.
        const Time now = at.value_or(std::chrono::steady_clock::now());
        if (paid_at_ > now) {
            const std::chrono::duration<double> owed = paid_at_ - now;
            paid_at_ = now + cost_at(bytes_per_s, owed.count() * bytes_per_s_);
        }
        bytes_per_s_ = bytes_per_s;
        grain_bytes_ = grain_bytes;
    }

    // Takes nbytes, or says when to ask again: soon, since the rate may have changed by then.
    std::optional<Time> take(uint64_t nbytes, Time now) {
        const Lock lock(mu_);
        const auto ahead = cost(grain_bytes_);
        if (paid_at_ > now + ahead) return std::min<Time>(paid_at_ - ahead, now + kLook);
        paid_at_ = std::max(paid_at_, now) + cost(nbytes);
        return std::nullopt;
    }

    // The most bytes that are written at a time.
    uint64_t grain_bytes() const {
        const Lock lock(mu_);
        return grain_bytes_;
    }

  private:
    static constexpr std::chrono::milliseconds kLook{100};

    Time::duration cost(uint64_t nbytes) const REQUIRES(mu_) {
        return cost_at(bytes_per_s_, static_cast<double>(nbytes));
    }

    static Time::duration cost_at(double bytes_per_s, double nbytes) {
        constexpr double kLongest = 1e8;  // seconds, so that any rate gives a time that fits
        const double seconds = nbytes / bytes_per_s;
        return std::chrono::duration_cast<Time::duration>(
            std::chrono::duration<double>(std::min(seconds, kLongest)));
    }

    mutable Mutex mu_;
    double bytes_per_s_ GUARDED_BY(mu_) = 1;
    uint64_t grain_bytes_ GUARDED_BY(mu_) = 0;
    Time paid_at_ GUARDED_BY(mu_){};  // when all tokens taken are paid for
};

}  // namespace fastckpt
