// The part of the extension module that stands for storages and tensors in torch's pickles.
//
// lazy/torch_names.py says what these are, and describes each form that tensors have; here is what
// is done for each tensor. An interpreter of pickles calls it.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <utility>

#include "bindings_pickle_state.h"
#include "check.h"

namespace py = pybind11;

namespace fastckpt {

void bind_torch_names(py::module_& m);

namespace pickle {
namespace {

const char* const kViews = "fastckpt.torch_views";
constexpr Py_ssize_t kIdParts = 5;  // ("storage", class, key, location, number of elements)
constexpr Py_ssize_t kViewParts = 6;
constexpr size_t kFormsMax = 256;  // remembered: tuples can be made that all have one hash

[[noreturn]] void refuse(const char* what) { fail(PyExc_ValueError, what); }

// Returns an int from 0 to below 2^63; throws what() if this is none.
int64_t number(py::handle value, const char* what) {
    if (!PyLong_CheckExact(value.ptr())) refuse(what);
    int overflow = 0;
    const int64_t found = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow != 0 || found < 0) refuse(what);
    return found;
}

// Tells whether a value is an int of at most 64 bits.
bool is_short(PyObject* value) {
    int overflow = 0;
    return PyLong_CheckExact(value) &&
           (PyLong_AsLongLongAndOverflow(value, &overflow), overflow == 0);
}

// Tells whether this is a value of which a state has many, and which holds no tensor.
bool is_atom(PyObject* value) {
    return value == Py_None || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
           PyUnicode_CheckExact(value) || PyBool_Check(value);
}

// Returns what a key adds to a name, if that is a number or a text that stands there as it is; else
// null.
py::object component(PyObject* key) {
    if (is_short(key)) return owned(PyObject_Str(key));
    if (!PyUnicode_CheckExact(key)) return {};
    const Py_ssize_t end = PyUnicode_GET_LENGTH(key);
    if (PyUnicode_FindChar(key, '/', 0, end, 1) != -1) return {};
    if (PyUnicode_FindChar(key, '~', 0, end, 1) != -1) return {};
    return py::reinterpret_borrow<py::object>(key);
}

// Returns the product of two numbers, or the highest number if that is higher.
int64_t product(int64_t count, int64_t itemsize) {
    int64_t found = 0;
    const bool is_higher = __builtin_mul_overflow(count, itemsize, &found);
    return is_higher ? std::numeric_limits<int64_t>::max() : found;
}

class Views {
  public:
    explicit Views(const py::dict& of)
        : storage_(of["storage"]),
          view_(of["view"]),
          dtype_(of["dtype"]),
          prefix_(of["prefix"]),
          itemsizes_(of["itemsizes"]),
          form_(of["form"]),
          otherwise_(of["otherwise"]),
          placeholder_(of["placeholder"]),
          key_word_(of["word"]),
          dtype_word_("dtype"),
          shape_word_("shape"),
          node_characters_(of["node_characters"].cast<int64_t>()) {}

    // Returns the storage of a persistent id.
    py::object storage(py::handle id) const {
        const char* const what = "a persistent id is not that of a storage";
        if (!PyTuple_CheckExact(id.ptr()) || PyTuple_GET_SIZE(id.ptr()) != kIdParts) refuse(what);
        const py::handle word = PyTuple_GET_ITEM(id.ptr(), 0), kind = PyTuple_GET_ITEM(id.ptr(), 1);
        if (!PyUnicode_CheckExact(word.ptr()) ||
            PyUnicode_CompareWithASCIIString(word.ptr(), "storage") != 0)
            refuse(what);
        const py::handle key = PyTuple_GET_ITEM(id.ptr(), 2);
        if (!PyUnicode_CheckExact(key.ptr())) refuse("a storage has no name or size");
        const int64_t size = number(PyTuple_GET_ITEM(id.ptr(), 4), "a storage has no name or size");
        const bool is_typed = is_a(kind, dtype_);
        const py::object nbytes =
            owned(PyLong_FromLongLong(is_typed ? product(size, itemsize(kind)) : size));
        const py::handle dtype = is_typed ? kind : py::handle(Py_None);
        const py::object record = owned(PyUnicode_Concat(prefix_.ptr(), key.ptr()));
        return made(storage_, owned(PyTuple_Pack(3, record.ptr(), dtype.ptr(), nbytes.ptr())));
    }

    // Returns a view of a storage; `given` is its dtype, or None for that of the storage.
    py::object view(py::handle storage, py::handle offset, py::handle shape, py::handle strides,
                    py::handle given) {
        if (!is_a(storage, storage_)) refuse("a tensor has no storage, or no dtype");
        const py::handle record = PyTuple_GET_ITEM(storage.ptr(), 0);
        const py::handle dtype = given.is_none() ? PyTuple_GET_ITEM(storage.ptr(), 1) : given.ptr();
        if (!is_a(dtype, dtype_)) refuse("a tensor has no storage, or no dtype");
        const py::object form = form_of(dtype, shape, strides);
        const int64_t span = PyLong_AsLongLong(PyTuple_GET_ITEM(form.ptr(), 1));
        const int64_t begin =
            product(number(offset, "the place of a tensor is not a number"), itemsize(dtype));
        int64_t nbytes = 0;
        if (span != 0 && __builtin_add_overflow(begin, span, &nbytes))
            nbytes = std::numeric_limits<int64_t>::max();
        if (nbytes > PyLong_AsLongLong(PyTuple_GET_ITEM(storage.ptr(), 2)) ||
            nbytes == std::numeric_limits<int64_t>::max())
            refuse("a tensor reaches beyond its storage");
        const py::object first = owned(PyLong_FromLongLong(begin));
        const py::object all = owned(PyLong_FromLongLong(nbytes));
        return made(view_, owned(PyTuple_Pack(4, PyTuple_GET_ITEM(form.ptr(), 0), record.ptr(),
                                              first.ptr(), all.ptr())));
    }

    // Returns a tensor that is rebuilt with other arguments.
    py::object otherwise(py::handle arguments) const {
        return owned(PyObject_Call(otherwise_.ptr(), arguments.ptr(), nullptr));
    }

    // Names the tensors among the items of a node, up to an item that is none or takes more;
    // returns that, or None behind the last, and how many characters of names are left.
    py::tuple named(py::handle items, py::handle prefix, const py::dict& tensors, py::handle kinds,
                    int64_t left) const {
        CHECK(PyIter_Check(items.ptr()) && PyUnicode_CheckExact(prefix.ptr()));
        CHECK(PyDict_CheckExact(tensors.ptr()));
        CHECK(kinds.is_none() || PyDict_CheckExact(kinds.ptr()));
        for (;;) {
            py::object item = py::reinterpret_steal<py::object>(PyIter_Next(items.ptr()));
            if (!item && PyErr_Occurred() != nullptr) throw py::error_already_set();
            if (!item) return py::make_tuple(py::none(), left);
            if (!PyTuple_CheckExact(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 2)
                refuse("an item is not a key and a value");
            const py::object key = component(PyTuple_GET_ITEM(item.ptr(), 0));
            const py::handle value = PyTuple_GET_ITEM(item.ptr(), 1);
            if (!key) return py::make_tuple(item, left);
            if (is_atom(value.ptr())) continue;
            const py::object tensor = is_a(value, view_) ? py::reinterpret_borrow<py::object>(value)
                                                         : placeholder(value, kinds);
            if (!tensor) return py::make_tuple(item, left);
            const py::object name = owned(PyUnicode_Concat(prefix.ptr(), key.ptr()));
            const int64_t characters = PyUnicode_GET_LENGTH(name.ptr()) + node_characters_;
            if (characters > left) return py::make_tuple(item, left);
            const size_t count = tensors.size();
            if (PyDict_SetDefault(tensors.ptr(), name.ptr(), tensor.ptr()) == nullptr)
                throw py::error_already_set();
            if (tensors.size() == count) return py::make_tuple(item, left);  // the name was there
            left -= characters;
        }
    }

  private:
    // Returns the tensor that a placeholder stands for, if its dtype and shape are among `kinds`;
    // else null. Whether a placeholder is malformed is told elsewhere.
    py::object placeholder(py::handle value, py::handle kinds) const {
        if (kinds.is_none() || !PyDict_CheckExact(value.ptr())) return {};
        PyObject* const key = PyDict_GetItemWithError(value.ptr(), key_word_.ptr());
        if (key == nullptr || !PyUnicode_CheckExact(key) || !PyUnicode_IS_ASCII(key)) return {};
        PyObject* const dtype = PyDict_GetItemWithError(value.ptr(), dtype_word_.ptr());
        PyObject* const shape = PyDict_GetItemWithError(value.ptr(), shape_word_.ptr());
        if (dtype == nullptr || !PyUnicode_CheckExact(dtype)) return {};
        if (shape == nullptr || !PyList_CheckExact(shape)) return {};
        for (Py_ssize_t dim = 0; dim < PyList_GET_SIZE(shape); ++dim)
            if (!is_short(PyList_GET_ITEM(shape, dim))) return {};
        const py::object sizes = owned(PyList_AsTuple(shape));
        const py::object kind = owned(PyTuple_Pack(2, dtype, sizes.ptr()));
        PyObject* const known = PyDict_GetItemWithError(kinds.ptr(), kind.ptr());
        if (known == nullptr) {
            if (PyErr_Occurred() != nullptr) throw py::error_already_set();
            return {};
        }
        CHECK(PyTuple_CheckExact(known) && PyTuple_GET_SIZE(known) == 2);
        return made(placeholder_, owned(PyTuple_Pack(3, key, PyTuple_GET_ITEM(known, 0),
                                                     PyTuple_GET_ITEM(known, 1))));
    }

    static py::object made(const py::object& kind, const py::object& parts) {
        const py::object arguments = owned(PyTuple_Pack(1, parts.ptr()));
        auto* const type = reinterpret_cast<PyTypeObject*>(kind.ptr());
        return owned(PyTuple_Type.tp_new(type, arguments.ptr(), nullptr));
    }

    int64_t itemsize(py::handle dtype) const {
        PyObject* const found = PyDict_GetItemWithError(itemsizes_.ptr(), dtype.ptr());
        if (found == nullptr) refuse("a tensor has no storage, or no dtype");
        return PyLong_AsLongLong(found);
    }

    // Returns what torch_names.py calls a form, and the bytes from the first element to the last.
    py::object form_of(py::handle dtype, py::handle shape, py::handle strides) {
        const bool fits = PyTuple_CheckExact(shape.ptr()) && PyTuple_CheckExact(strides.ptr());
        if (!fits || PyTuple_GET_SIZE(shape.ptr()) != PyTuple_GET_SIZE(strides.ptr()))
            refuse("a tensor has not as many strides as dimensions");
        // Before anything else is done with these: hash() recurses on the stack of C, and takes the
        // longer for a number, the more bits that has.
        for (Py_ssize_t dim = 0; dim < PyTuple_GET_SIZE(shape.ptr()); ++dim) {
            if (!is_short(PyTuple_GET_ITEM(shape.ptr(), dim)) ||
                !is_short(PyTuple_GET_ITEM(strides.ptr(), dim)))
                refuse("the place of a tensor is not a number");
        }
        const py::object kind = owned(PyTuple_Pack(3, dtype.ptr(), shape.ptr(), strides.ptr()));
        if (PyObject* const known = PyDict_GetItemWithError(forms_.ptr(), kind.ptr()))
            return py::reinterpret_borrow<py::object>(known);
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        py::object form = owned(PyObject_Call(form_.ptr(), kind.ptr(), nullptr));
        if (forms_.size() == kFormsMax) forms_.clear();
        forms_[kind] = form;
        return form;
    }

    const py::object storage_, view_, dtype_, prefix_;
    const py::dict itemsizes_;
    const py::object form_, otherwise_;
    const py::object placeholder_;                      // the type of what a placeholder is read as
    const py::str key_word_, dtype_word_, shape_word_;  // the names of its members
    const int64_t node_characters_;                     // what each name counts beside its own
    py::dict forms_;
};

Views* views_of(PyObject* capsule) {
    auto* const views = static_cast<Views*>(PyCapsule_GetPointer(capsule, kViews));
    if (views == nullptr) throw py::error_already_set();
    return views;
}

template <py::object (*function)(Views&, PyObject*)>
PyObject* call(PyObject* capsule, PyObject* argument) {
    try {
        return function(*views_of(capsule), argument).release().ptr();
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

py::object storage(Views& views, PyObject* id) { return views.storage(id); }

py::object view(Views& views, PyObject* arguments) {
    PyObject *storage, *offset, *shape, *strides, *dtype;
    if (!PyArg_UnpackTuple(arguments, "view", 5, 5, &storage, &offset, &shape, &strides, &dtype))
        throw py::error_already_set();
    return views.view(storage, offset, shape, strides, dtype);
}

// The tensor of torch._utils._rebuild_tensor_v2, which may have attributes behind six arguments.
py::object rebuilt(Views& views, PyObject* arguments) {
    if (PyTuple_GET_SIZE(arguments) != kViewParts) return views.otherwise(arguments);
    PyObject** const parts = PySequence_Fast_ITEMS(arguments);
    return views.view(parts[0], parts[1], parts[2], parts[3], Py_None);
}

py::object named(Views& views, PyObject* arguments) {
    PyObject *items, *prefix, *tensors, *kinds, *left;
    if (!PyArg_UnpackTuple(arguments, "named", 5, 5, &items, &prefix, &tensors, &kinds, &left))
        throw py::error_already_set();
    const int64_t characters = PyLong_AsLongLong(left);
    if (characters == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return views.named(items, prefix, py::reinterpret_borrow<py::dict>(tensors), kinds, characters);
}

PyMethodDef storage_def{"storage", call<storage>, METH_O, nullptr};
PyMethodDef rebuilt_def{"rebuilt", call<rebuilt>, METH_VARARGS, nullptr};
PyMethodDef view_def{"view", call<view>, METH_VARARGS, nullptr};
PyMethodDef named_def{"named", call<named>, METH_VARARGS, nullptr};

}  // namespace
}  // namespace pickle

void bind_torch_names(py::module_& m) {
    // Returns the four functions of Views, as functions of Python, which are called without
    // pybind11's conversions.
    m.def(
        "torch_views",
        [](const py::dict& words) {
            auto views = std::make_unique<pickle::Views>(words);
            const py::capsule capsule(views.get(), pickle::kViews, [](PyObject* object) {
                delete static_cast<pickle::Views*>(PyCapsule_GetPointer(object, pickle::kViews));
            });
            views.release();
            return py::make_tuple(owned(PyCFunction_New(&pickle::storage_def, capsule.ptr())),
                                  owned(PyCFunction_New(&pickle::rebuilt_def, capsule.ptr())),
                                  owned(PyCFunction_New(&pickle::view_def, capsule.ptr())),
                                  owned(PyCFunction_New(&pickle::named_def, capsule.ptr())));
        },
        py::arg("words"));
}

}  // namespace fastckpt
