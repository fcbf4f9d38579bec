// Releases the GIL while the extension module waits, even while the interpreter shuts down.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace fastckpt {

// Releases the GIL for its lifetime, as py::gil_scoped_release does. If the interpreter has ended
// meanwhile, because nobody waited for this thread, the thread sleeps until the process ends.
// Python does so itself from 3.14 on; before, it calls pthread_exit, whose unwinding ends the
// process by std::terminate in the first destructor that it meets, which may be this one.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {  // by pthread_exit, and nothing else
            for (;;) pause();
        }
    }

  private:
    PyThreadState* state_;
};

}  // namespace fastckpt
