// A sync_file_range(2) in front of the C library's that fails on demand, as the kernel's does when
// something written earlier did not reach the disk; and writes that are refused RWF_DONTCACHE, as
// file systems do where the engine calls it. Preloaded by the tests, which steer it by
// write_back_fail(); it must not know who calls.
#include <fcntl.h>
#include <sys/uio.h>

#include <atomic>
#include <cerrno>

namespace {

std::atomic<int> error{0};
std::atomic<bool> is_forbidden{false};

}  // namespace

// The next call that waits fails with this errno, once; with `forbidden`, all calls do.
extern "C" void write_back_fail(int number, int forbidden) {
    error = number;
    is_forbidden = forbidden != 0;
}

extern "C" int sync_file_range(int, off64_t, off64_t, unsigned flags) {
    const bool waits = (flags & SYNC_FILE_RANGE_WAIT_AFTER) != 0;
    const int number = is_forbidden ? error.load() : waits ? error.exchange(0) : 0;
    if (number == 0) return 0;
    errno = number;
    return -1;
}

extern "C" ssize_t pwritev2(int, const iovec*, int, off64_t, int) {
    errno = EOPNOTSUPP;
    return -1;
}
