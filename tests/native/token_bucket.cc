// The token bucket by a clock of its own: what it grants in a time, whoever asks and however late.
// Knows its header alone; must not know the engine.
#include "engine/token_bucket.h"

#include <cstdio>
#include <cstdlib>
#include <random>

namespace {

using fastckpt::TokenBucket;
using Time = TokenBucket::Time;
using Seconds = std::chrono::duration<double>;

int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "token_bucket: not so: %s\n", what);
    ++failures;
}

double seconds(Time::duration d) { return Seconds(d).count(); }

Time after(Time time, double s) {
    return time + std::chrono::duration_cast<Time::duration>(Seconds(s));
}

// Takes grains for so long, waking as late as `late` says; returns how many bytes it got.
template <typename Late>
uint64_t granted(TokenBucket& bucket, Time& now, double for_s, uint64_t grain, Late late) {
    const Time end = after(now, for_s);
    uint64_t nbytes = 0;
    while (now < end) {
        const auto when = bucket.take(grain, now);
        if (when) {
            expect(*when > now, "it asks to wait for what is yet to come");
            now = after(*when, late());
        } else {
            nbytes += grain;
        }
    }
    return nbytes;
}

void keeps_its_rate() {
    TokenBucket bucket(1e6, 10'000);
    Time now{std::chrono::hours(1)};
    const uint64_t got = granted(bucket, now, 10, 10'000, [] { return 0.0; });
    expect(got >= 10'000'000 && got <= 10'020'000, "ten seconds of a rate, and two grains");
}

void catches_up() {
    TokenBucket bucket(1e6, 10'000);  // a grain is 10 ms
    std::mt19937 random(7);
    std::uniform_real_distribution<double> late(0.0, 0.009);
    Time now{};
    const uint64_t got = granted(bucket, now, 10, 10'000, [&] { return late(random); });
    expect(got >= 9'980'000 && got <= 10'020'000, "who wakes late by less than a grain loses none");
}

void saves_nothing_up() {
    TokenBucket bucket(1e6, 10'000);
    Time now{};
    granted(bucket, now, 1, 10'000, [] { return 0.0; });
    now = after(now, 3600);
    const uint64_t got = granted(bucket, now, 0.001, 10'000, [] { return 0.0; });
    expect(got <= 20'000, "an idle hour is no credit");
}

void is_shared() {
    TokenBucket bucket(1e6, 10'000);
    Time now{};
    uint64_t got[2] = {0, 0};
    const Time end = after(now, 5);
    while (now < end) {
        Time next = end;
        for (uint64_t& own : got) {
            const auto when = bucket.take(10'000, now);
            if (!when) own += 10'000;
            next = std::min(next, when.value_or(now));
        }
        now = std::max(next, after(now, 1e-6));
    }
    expect(got[0] + got[1] <= 5'020'000, "two who share a bucket have its rate together");
    expect(got[0] + got[1] >= 4'980'000, "and all of it");
}

void changes_its_rate() {
    TokenBucket bucket(1e6, 10'000);
    Time now{};
    granted(bucket, now, 1, 10'000, [] { return 0.0; });
    bucket.set(5e6, 50'000, now);
    const uint64_t got = granted(bucket, now, 2, 50'000, [] { return 0.0; });
    expect(got >= 9'900'000 && got <= 10'100'000, "the new rate counts at once");
    expect(bucket.grain_bytes() == 50'000, "and the new grain");
    TokenBucket crawling(1, 1);
    crawling.take(10'000, now);  // paid for in some three hours
    crawling.set(1e6, 10'000, now);
    const auto when = crawling.take(1, now + std::chrono::milliseconds(1));
    expect(!when, "what is owed is paid at the new rate");
}

void notices_a_new_rate() {
    TokenBucket bucket(1, 1);
    Time now{std::chrono::hours(1)};
    bucket.take(10'000, now);  // paid for in some three hours
    const auto when = bucket.take(1, now);
    expect(when && seconds(*when - now) <= 0.1, "who waits asks again soon");
    bucket.set(1e18, 1 << 23, now);
    if (when) expect(!bucket.take(1 << 23, *when), "a rate that was lifted no longer counts");
    bucket.set(1e6, 10'000, *when);
    expect(!bucket.take(10'000, *when), "and nothing is owed for what was written meanwhile");
}

void bears_any_rate() {
    TokenBucket slow(1e-9, 4096);
    Time now{std::chrono::hours(1)};
    slow.take(1 << 23, now);
    const auto when = slow.take(1, now);
    if (when) expect(seconds(*when - now) > 0, "a time that fits, at a rate of nearly nothing");
    TokenBucket fast(1e18, 1 << 23);
    for (int i = 0; i < 100; ++i) expect(!fast.take(1 << 23, now), "no wait at any practical rate");
}

}  // namespace

int main() {
    keeps_its_rate();
    catches_up();
    saves_nothing_up();
    is_shared();
    changes_its_rate();
    notices_a_new_rate();
    bears_any_rate();
    std::printf("token_bucket: %d failures\n", failures);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
