// The part of the extension module that a pickler of a large state calls some twenty times for each
// tensor: the two methods persistent_id and reducer_override, for plain tensors and their storages.
//
// formats/torch_pickle.py says what they have to do, and takes over wherever they do not know.
// Written in Python, they made the capture of a state take 1.4 times as long.
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "bindings_names.h"

namespace py = pybind11;

namespace fastckpt {

void bind_pickler(py::module_& m);

namespace {

struct Names {
    const Name dict{"__dict__"}, hooks{"_backward_hooks"}, cdata{"_cdata"}, version{"_version"};
    const Name data_ptr{"data_ptr"}, dtype{"dtype"}, inference{"is_inference"}, layout{"layout"};
    const Name is_cpu{"is_cpu"}, is_cuda{"is_cuda"}, nbytes{"nbytes"}, neg{"is_neg"};
    const Name nested{"is_nested"}, offset{"storage_offset"}, requires_grad{"requires_grad"};
    const Name shape{"shape"}, storage{"untyped_storage"}, stride{"stride"};
    // Literals of torch's, which a pickle names once: it knows what it has met by its identity.
    const py::handle word = PyUnicode_InternFromString("storage");
    const py::handle cpu = PyUnicode_InternFromString("cpu");
};

const Names& names() {
    static const Names* const all = new Names();  // lives as long as the interpreter
    return *all;
}

// What is the same for all pickles of a process; the names are those of torch_pickle.py.
struct Facts {
    explicit Facts(const py::dict& of)
        : tensor(of["tensor"]),
          parameter(of["parameter"]),
          strided(of["strided"]),
          storage_types(of["storage_types"]),
          never_storages(of["never_storages"]),
          ordered_dict(of["ordered_dict"]),
          rebuild(of["rebuild"]),
          empty_dict(py::make_tuple(ordered_dict, py::tuple())),
          location_tag(of["location_tag"]),
          tags_cpu_first(of["tags_cpu_first"]().cast<bool>()),
          has_version(of["has_version"]),
          typed(of["typed"]) {}

    py::object tensor, parameter, strided;
    py::dict storage_types;
    py::object never_storages, ordered_dict, rebuild;
    py::tuple empty_dict;
    py::object location_tag;
    bool tags_cpu_first;  // location_tag says "cpu" to all storages of the CPU
    py::object has_version, typed;
};

// The hooks of one pickler.
class Hooks {
  public:
    // `of_torch` is torch's persistent_id; with `reduces`, plain tensors are reduced here.
    Hooks(const py::dict& facts, const py::dict& tables, py::object of_torch, bool reduces,
          py::object met, py::object noted, py::object uncounted)
        : facts_(std::make_unique<Facts>(facts)),
          keys_(tables["id_map"]),
          storages_(tables["serialized_storages"]),
          dtypes_(tables["storage_dtypes"]),
          of_torch_(std::move(of_torch)),
          reduces_(reduces),
          met_(std::move(met)),
          noted_(std::move(noted)),
          uncounted_(std::move(uncounted)) {}

    py::object persistent_id(py::handle object) {
        if (pending_storage_.ptr() != object.ptr()) {
            auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
            if (done(PySet_Contains(facts_->never_storages.ptr(), type)) == 1) return py::none();
            return noted_storage(object, of_torch_(object));
        }
        pending_storage_ = py::object();  // the pickler holds it
        py::object name = name_of(object);
        if (name) return noted_storage(object, std::move(name));
        return noted_storage(object, of_torch_(facts_->typed(object, pending_dtype_)));
    }

    py::object reduced(py::handle object) {
        auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
        if (type == facts_->ordered_dict.ptr()) {
            const bool is_bare =
                reduces_ && PyObject_Size(object.ptr()) == 0 && !names().dict.is_true(object);
            return is_bare ? facts_->empty_dict : not_implemented();  // every tensor has this one
        }
        auto* const tensor = reinterpret_cast<PyTypeObject*>(facts_->tensor.ptr());
        if (!PyType_IsSubtype(Py_TYPE(object.ptr()), tensor)) return not_implemented();
        if (!noted_.is_none()) note(object, type);
        return reduces_ && type == facts_->tensor.ptr() ? reduced_tensor(object)
                                                        : not_implemented();
    }

    // Lets go of all objects: these functions are in a circle with torch's class.
    void release() {
        facts_.reset();
        keys_ = storages_ = dtypes_ = py::dict();
        of_torch_ = met_ = noted_ = uncounted_ = py::none();
        pending_storage_ = pending_dtype_ = py::object();
    }

    bool is_released() const { return facts_ == nullptr; }

  private:
    static py::object not_implemented() {
        return py::reinterpret_borrow<py::object>(Py_NotImplemented);
    }

    // Notes a tensor and its version counter.
    void note(py::handle tensor, PyObject* type) {
        const bool is_plain = type == facts_->tensor.ptr() || type == facts_->parameter.ptr();
        const py::object known = is_plain ? py::object() : facts_->has_version(tensor);
        if (is_plain ? names().inference.says(tensor) : known.is_none()) {
            uncounted_.cast<py::list>().append(tensor);
        } else if (is_plain || Name::truth(known)) {
            const py::object version = names().version.of(tensor);
            const py::object row = owned(PyTuple_Pack(2, tensor.ptr(), version.ptr()));
            done(PyList_Append(noted_.ptr(), row.ptr()));
        }
    }

    // Returns what a plain tensor's __reduce_ex__ does, with the storage itself in the place of a
    // TypedStorage; for others NotImplemented.
    py::object reduced_tensor(py::handle tensor) {
        const Names& name = names();
        const py::object dtype = name.dtype.of(tensor);
        pending_is_cpu_ = name.is_cpu.is_true(tensor);
        const bool is_plain =
            name.layout.of(tensor).is(facts_->strided) && facts_->storage_types.contains(dtype) &&
            (pending_is_cpu_ || name.is_cuda.is_true(tensor)) && !name.dict.is_true(tensor) &&
            !name.hooks.is_true(tensor) && !name.neg.says(tensor) && !name.nested.is_true(tensor);
        if (!is_plain) return not_implemented();
        const py::object shape = name.shape.of(tensor);  // of a class derived from tuple
        const py::object size = owned(PyTuple_GetSlice(shape.ptr(), 0, PyTuple_Size(shape.ptr())));
        const py::object stride = name.stride.call(tensor), offset = name.offset.call(tensor);
        const py::object has_grad = name.requires_grad.of(tensor);
        const py::object no_hooks = owned(PyObject_CallNoArgs(facts_->ordered_dict.ptr()));
        py::object storage = name.storage.call(tensor);
        const py::object values = owned(PyTuple_Pack(6, storage.ptr(), offset.ptr(), size.ptr(),
                                                     stride.ptr(), has_grad.ptr(), no_hooks.ptr()));
        // The pickler asks for the persistent_id of this function first, if it is new, and then for
        // that of the storage, before it meets another tensor.
        pending_storage_ = std::move(storage);
        pending_dtype_ = dtype;
        return owned(PyTuple_Pack(2, facts_->rebuild.ptr(), values.ptr()));
    }

    // Returns what torch's persistent_id does, and notes the storage in torch's tables; nothing if
    // torch objects to it.
    py::object name_of(py::handle storage) {
        const Names& name = names();
        const py::object address = name.data_ptr.call(storage);
        if (Name::truth(address)) {
            PyObject* const known =
                PyDict_SetDefault(dtypes_.ptr(), address.ptr(), pending_dtype_.ptr());
            if (known == nullptr) throw py::error_already_set();
            if (known != pending_dtype_.ptr()) return py::object();
        }
        const py::object cdata = name.cdata.of(storage);
        auto key =
            py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(keys_.ptr(), cdata.ptr()));
        if (!key) {
            if (PyErr_Occurred() != nullptr) throw py::error_already_set();
            key = py::str(py::int_(keys_.size()));
            keys_[cdata] = key;
        }
        storages_[key] = storage;
        const py::tuple kind = facts_->storage_types[pending_dtype_];
        const auto numel = name.nbytes.call(storage).cast<uint64_t>() / kind[1].cast<uint64_t>();
        const bool is_cpu = pending_is_cpu_ && facts_->tags_cpu_first;
        const auto location =
            is_cpu ? py::reinterpret_borrow<py::object>(name.cpu) : facts_->location_tag(storage);
        return py::make_tuple(name.word, kind[0], key, location, numel);
    }

    // Notes by the name of its record a storage that has been given a name; returns the name.
    py::object noted_storage(py::handle object, py::object name) {
        if (met_.is_none() || name.is_none()) return name;
        const py::object storage = py::getattr(object, "_untyped_storage", object);
        met_[py::str("data/") + name[py::int_(2)]] = storage;
        return name;
    }

    std::unique_ptr<Facts> facts_;
    py::dict keys_, storages_, dtypes_;  // torch's tables of the storages that it meets
    py::object of_torch_;
    bool reduces_;
    py::object met_, noted_, uncounted_;
    py::object pending_storage_, pending_dtype_;  // of the tensor that was reduced last
    bool pending_is_cpu_ = false;
};

template <py::object (Hooks::*method)(py::handle)>
PyObject* call(PyObject* capsule, PyObject* object) {
    auto* const hooks = static_cast<Hooks*>(PyCapsule_GetPointer(capsule, nullptr));
    if (hooks == nullptr) return nullptr;
    try {
        if (hooks->is_released()) throw std::runtime_error("this pickler has ended");
        return (hooks->*method)(object).release().ptr();
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

PyMethodDef persistent_id_def{"persistent_id", call<&Hooks::persistent_id>, METH_O, nullptr};
PyMethodDef reducer_override_def{"reducer_override", call<&Hooks::reduced>, METH_O, nullptr};

// The hooks as functions of Python, which are called without pybind11's conversions.
class PicklerHooks {
  public:
    PicklerHooks(const py::dict& facts, const py::dict& tables, py::object of_torch, bool reduces,
                 py::object met, py::object noted, py::object uncounted)
        : capsule_(new Hooks(facts, tables, std::move(of_torch), reduces, std::move(met),
                             std::move(noted), std::move(uncounted)),
                   nullptr, [](PyObject* capsule) {
                       delete static_cast<Hooks*>(PyCapsule_GetPointer(capsule, nullptr));
                   }) {}

    py::object function(PyMethodDef& definition) const {
        return owned(PyCFunction_New(&definition, capsule_.ptr()));
    }

    void release() { capsule_.get_pointer<Hooks>()->release(); }

  private:
    py::capsule capsule_;
};

}  // namespace

void bind_pickler(py::module_& m) {
    using Object = py::object;
    py::class_<PicklerHooks>(m, "PicklerHooks")
        .def(py::init<const py::dict&, const py::dict&, Object, bool, Object, Object, Object>(),
             py::arg("facts"), py::arg("tables"), py::arg("of_torch"), py::arg("reduces"),
             py::arg("met"), py::arg("noted"), py::arg("uncounted"))
        .def_property_readonly(
            "persistent_id",
            [](const PicklerHooks& hooks) { return hooks.function(persistent_id_def); })
        .def_property_readonly(
            "reducer_override",
            [](const PicklerHooks& hooks) { return hooks.function(reducer_override_def); })
        .def("release", &PicklerHooks::release);
}

}  // namespace fastckpt
