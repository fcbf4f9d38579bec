// How the parts of the extension module that are called for each of 100,000 tensors speak to
// Python's C API: new references, failed calls, and attributes by names that are interned once.
#pragma once

#include <pybind11/pybind11.h>

namespace fastckpt {

namespace py = pybind11;

// Takes ownership of a new reference; throws the Python error if there is none.
inline py::object owned(PyObject* made) {
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

// Throws the Python error if a call has failed.
inline int done(int result) {
    if (result < 0) throw py::error_already_set();
    return result;
}

// A name of an attribute or method.
class Name {
  public:
    explicit Name(const char* text) : text_(owned(PyUnicode_InternFromString(text))) {}

    py::object of(py::handle object) const {
        return owned(PyObject_GetAttr(object.ptr(), text_.ptr()));
    }
    py::object call(py::handle object) const {
        return owned(PyObject_CallMethodNoArgs(object.ptr(), text_.ptr()));
    }
    bool is_in(py::handle object) const { return PyObject_HasAttr(object.ptr(), text_.ptr()) == 1; }
    bool is_true(py::handle object) const { return truth(of(object)); }
    bool says(py::handle object) const { return truth(call(object)); }

    static bool truth(const py::object& value) { return done(PyObject_IsTrue(value.ptr())) == 1; }

  private:
    const py::object text_;
};

}  // namespace fastckpt
