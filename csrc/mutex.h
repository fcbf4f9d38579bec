// Mutexes whose protected data is declared. Where clang is installed, `make check` verifies the
// declarations with -Wthread-safety: only a holder of the mutex uses a member that is GUARDED_BY
// it, or calls a function that REQUIRES it. For other compilers it is a std::mutex.
#pragma once

#include <mutex>

#if defined(__clang__)
#define FASTCKPT_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define FASTCKPT_ATTRIBUTE(...)
#endif
#define GUARDED_BY(...) FASTCKPT_ATTRIBUTE(guarded_by(__VA_ARGS__))
#define REQUIRES(...) FASTCKPT_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define ACQUIRES(...) FASTCKPT_ATTRIBUTE(acquire_capability(__VA_ARGS__), no_thread_safety_analysis)
#define RELEASES(...) FASTCKPT_ATTRIBUTE(release_capability(__VA_ARGS__), no_thread_safety_analysis)

namespace fastckpt {

class FASTCKPT_ATTRIBUTE(capability("mutex")) Mutex : public std::mutex {};

// Holds a mutex, also for a std::condition_variable that waits.
class FASTCKPT_ATTRIBUTE(scoped_lockable) Lock : public std::unique_lock<std::mutex> {
  public:
    explicit Lock(Mutex& mutex) ACQUIRES(mutex) : std::unique_lock<std::mutex>(mutex) {}
    ~Lock() RELEASES() {}
    void lock() ACQUIRES() { std::unique_lock<std::mutex>::lock(); }
    void unlock() RELEASES() { std::unique_lock<std::mutex>::unlock(); }
};

// The state of an engine, its jobs and its streams. There may be several engines, whose mutexes are
// one for the analysis: a job's is its engine's, which clang could not know.
class FASTCKPT_ATTRIBUTE(capability("mutex")) EngineState {};
inline EngineState engine_state;

// Holds the mutex of an engine.
class FASTCKPT_ATTRIBUTE(scoped_lockable) EngineLock : public std::unique_lock<std::mutex> {
  public:
    explicit EngineLock(std::mutex& mutex) ACQUIRES(engine_state)
        : std::unique_lock<std::mutex>(mutex) {}
    ~EngineLock() RELEASES() {}
};

// Gives an engine's mutex up for as long as it lives.
class FASTCKPT_ATTRIBUTE(scoped_lockable) EngineUnlock {
  public:
    explicit EngineUnlock(EngineLock& lock) RELEASES(engine_state) : lock_(lock) { lock_.unlock(); }
    ~EngineUnlock() RELEASES() { lock_.lock(); }

  private:
    EngineLock& lock_;
};

}  // namespace fastckpt
