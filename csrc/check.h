// An assertion for programming errors that is always enabled. Python builds extensions with NDEBUG,
// which removes assert(), but an engine must not process checkpoint bytes after an invariant is
// broken.
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
