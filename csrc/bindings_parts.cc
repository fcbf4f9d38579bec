// The part of the extension module that hands blocks to a client which is used from Python: it
// sees each as a buffer, and lets go of the buffer when its bytes were sent.
#include <pybind11/pybind11.h>

#include <cerrno>
#include <string>

#include "bindings_gil.h"
#include "engine/parts.h"

namespace py = pybind11;

namespace fastckpt {

namespace {

int add_copy(Parts& parts, const py::buffer& bytes, uint64_t offset) {
    const py::buffer_info info = bytes.request();
    const WithoutGil release;
    return parts.add(std::string(static_cast<const char*>(info.ptr),
                                 static_cast<size_t>(info.size * info.itemsize)),
                     offset);
}

py::object take(Parts& parts) {
    std::unique_ptr<Part> part;
    int error = 0;
    {
        const WithoutGil release;
        part = parts.take(&error);
    }
    if (error != 0) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
    if (part == nullptr) return py::none();
    return py::memoryview(py::cast(std::move(part)));
}

}  // namespace

void bind_parts(py::module_& m) {
    const py::call_guard<WithoutGil> nogil;
    // Its end takes the engine's mutex.
    py::class_<Part>(m, "Part", py::buffer_protocol(), py::release_gil_before_calling_cpp_dtor())
        .def_buffer([](Part& part) {
            return py::buffer_info(static_cast<const uint8_t*>(part.data()),
                                   static_cast<ssize_t>(part.nbytes()), /*readonly=*/true);
        });
    py::class_<Parts, std::shared_ptr<Parts>>(m, "Parts", py::release_gil_before_calling_cpp_dtor())
        .def(py::init<size_t, size_t>(), py::arg("part_bytes"), py::arg("copies_max"))
        .def("add", &add_copy)
        .def("take", &take)
        .def("end", &Parts::end, nogil)
        .def("fail", &Parts::fail, nogil)
        .def("nbytes", &Parts::nbytes, nogil)
        .def("taken", &Parts::taken, nogil);
    m.def(
        "parts_sink",
        [](Backend& threads, std::shared_ptr<Parts> parts) {
            return std::shared_ptr<Sink>(std::make_shared<PartsSink>(threads, std::move(parts)));
        },
        py::keep_alive<0, 1>());
}

}  // namespace fastckpt
