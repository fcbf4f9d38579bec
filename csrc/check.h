// Always-on assertion for programmer errors. Python builds extensions with NDEBUG, which turns
// assert() into nothing; an engine that moves checkpoint bytes must not run on after an invariant
// broke. Knows nothing of anything else.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace fastckpt {

[[noreturn]] inline void check_failed(const char* condition, const char* file, int line) {
    std::fprintf(stderr, "fastckpt: CHECK failed: %s at %s:%d\n", condition, file, line);
    std::abort();
}

}  // namespace fastckpt

#define CHECK(condition)                                              \
    do {                                                              \
        if (!(condition)) [[unlikely]]                                \
            ::fastckpt::check_failed(#condition, __FILE__, __LINE__); \
    } while (0)
