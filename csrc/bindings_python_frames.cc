// The part of the extension module that reads the stacks and clocks of Python's threads.
//
// Python code cannot walk another thread's stack: that thread may go on between two frames, or even
// within a step, if the new frame object starts the garbage collector. Here no Python code runs, so
// no other thread gets the GIL meanwhile.
#include <pybind11/pybind11.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fastckpt {

void bind_python_frames(py::module_& m);

namespace {

// Keeps the garbage collector from running as long as this lives.
class NoCollecting {
  public:
    NoCollecting() : was_enabled_(PyGC_Disable() == 1) {}
    ~NoCollecting() {
        if (was_enabled_) PyGC_Enable();
    }
    NoCollecting(const NoCollecting&) = delete;
    NoCollecting& operator=(const NoCollecting&) = delete;

  private:
    const bool was_enabled_;
};

int lasti_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(frame);
#else
    return py::handle(reinterpret_cast<PyObject*>(frame)).attr("f_lasti").cast<int>();
#endif
}

// Returns, by the ident of each thread but the caller's, its frames with their current
// instructions, the innermost first.
py::dict thread_stacks() {
    const NoCollecting paused;
    const auto own = py::int_(PyThread_get_thread_ident());
    py::dict tops = py::module_::import("sys").attr("_current_frames")();
    py::dict stacks;
    for (const auto& [ident, top] : tops) {
        if (own.equal(ident)) continue;
        py::list stack;
        auto frame = py::reinterpret_borrow<py::object>(top);
        while (frame) {
            auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
            stack.append(py::make_tuple(frame, lasti_of(raw)));
            frame = py::reinterpret_steal<py::object>(
                reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
        }
        stacks[ident] = std::move(stack);
    }
    return stacks;
}

// Returns the idents of all threads but the caller's, each with its clock, as far as is known.
std::vector<std::pair<py::object, clockid_t>> clocks_of_others() {
    std::vector<std::pair<py::object, clockid_t>> clocks;
#if defined(__linux__)
    const auto own = PyThread_get_thread_ident();
    // While this thread holds the GIL, no thread that has frames can end, nor can its clock.
    py::dict tops = py::module_::import("sys").attr("_current_frames")();
    for (const auto& [key, top] : tops) {
        const auto ident = key.cast<unsigned long>();
        clockid_t clock;
        if (ident == own || pthread_getcpuclockid(static_cast<pthread_t>(ident), &clock) != 0)
            continue;
        clocks.emplace_back(py::reinterpret_borrow<py::object>(key), clock);
    }
#endif
    return clocks;
}

// Returns, by the ident of each thread but the caller's, the CPU time it has used, in seconds, if
// that is known.
py::dict thread_seconds() {
    const NoCollecting paused;
    py::dict seconds;
    for (const auto& [ident, clock] : clocks_of_others()) {
        timespec used{};
        if (clock_gettime(clock, &used) != 0) continue;
        seconds[ident] =
            static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
    }
    return seconds;
}

// Whether a thread sleeps in a system call that waits for input, a connection or a child. No
// operation of torch does; one may wait for its own threads (futex) or for a GPU (poll, ioctl).
bool waits_for_input(pid_t tid) {
    char text[64];
    std::snprintf(text, sizeof text, "/proc/self/task/%d/syscall", static_cast<int>(tid));
    const int fd = ::open(text, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;  // the thread has ended, or this kernel does not tell
    const ssize_t nbytes = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    if (nbytes <= 0) return false;
    text[nbytes] = 0;
    char* end = text;
    const long number = std::strtol(text, &end, 10);
    if (end == text) return false;  // it is running
    switch (number) {
        case SYS_read:
        case SYS_readv:
        case SYS_recvfrom:
        case SYS_recvmsg:
        case SYS_accept:
        case SYS_accept4:
        case SYS_epoll_pwait:
#if defined(SYS_epoll_wait)
        case SYS_epoll_wait:
#endif
        case SYS_wait4:
        case SYS_waitid:
            return true;
        default:
            return false;
    }
}

// Returns the idents of those threads but the caller's that wait for input, as far as is known.
py::list threads_waiting_for_input() {
    const NoCollecting paused;
    py::list waiting;
    for (const auto& [ident, clock] : clocks_of_others()) {
        // The clock of a thread is its number, inverted, above three bits (posix-timers.h in
        // Linux).
        if (waits_for_input(~(clock >> 3))) waiting.append(ident);
    }
    return waiting;
}

std::atomic<uint64_t> main_thread_turns{0};

// Asks the main thread to count a turn between two of its instructions; false if it cannot be asked
// now.
bool ask_main_thread() {
    const auto count = [](void*) -> int {
        main_thread_turns.fetch_add(1);
        return 0;
    };
    return Py_AddPendingCall(count, nullptr) == 0;
}

}  // namespace

void bind_python_frames(py::module_& m) {
    m.def("thread_stacks", &thread_stacks);
    m.def("thread_seconds", &thread_seconds);
    m.def("threads_waiting_for_input", &threads_waiting_for_input);
    m.def("ask_main_thread", &ask_main_thread);
    m.def("main_thread_turns", [] { return main_thread_turns.load(); });
}

}  // namespace fastckpt
