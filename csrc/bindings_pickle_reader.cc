// The part of the extension module that interprets pickles of plain values.
//
// formats/plain_pickle.py says what it has to do and which bounds hold. It makes values of Python's
// own types, and calls only what it is given: nothing that a pickle names is looked up here.
// Written in Python, it took most of the time in which a file with very many tensors is opened.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "bindings_pickle_state.h"

namespace py = pybind11;

namespace fastckpt {

void bind_pickle_reader(py::module_& m);

namespace pickle {
namespace {

constexpr Py_ssize_t kNameCharactersMax = 1000;  // whoever is told of a global keeps a copy
constexpr int kProtocolMax = 5;
constexpr uint64_t kOpsPerSignalCheck = 1 << 16;

// The state of one read. Its functions for opcodes return false for those of others.
class Machine {
  public:
    Machine(const py::bytes& content, py::object find, py::object named, py::dict records,
            const Words& words)
        : find_(std::move(find)),
          named_(std::move(named)),
          words_(words),
          bytes_(content, words),
          bounds_(bytes_.nbytes(), std::move(records), words) {}

    py::tuple run() {
        for (uint64_t count = 1;; ++count) {
            if (count % kOpsPerSignalCheck == 0) done(PyErr_CheckSignals());
            const uint8_t op = bytes_.byte();
            if (op == '.') return py::make_tuple(stack_.pop(), bytes_.at());  // STOP
            if (!moves(op) && !makes_value(op) && !makes_container(op) && !makes_object(op))
                refuse(op);
        }
    }

  private:
    [[noreturn]] void refuse(uint8_t op) {
        PyObject* const name = PyDict_GetItemWithError(words_.opcodes.ptr(), py::int_(op).ptr());
        if (name != nullptr) fail(words_.refused, "the opcode %S", name);
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        fail(PyExc_ValueError, "byte %zu is no opcode", bytes_.at() - 1);
    }

    // The stack, the memo, and what surrounds the pickle
    bool moves(uint8_t op) {
        switch (op) {
            case 0x72:  // LONG_BINPUT
                stack_.top();
                memo_.put(bytes_.number<uint32_t>(), stack_.top());
                return true;
            case 0x71:  // BINPUT
                stack_.top();
                memo_.put(bytes_.byte(), stack_.top());
                return true;
            case 0x94:  // MEMOIZE
                memo_.put(memo_.size(), stack_.top());
                return true;
            case 0x68:  // BINGET
                return stack_.push(memo_.get(bytes_.byte()));
            case 0x6A:  // LONG_BINGET
                return stack_.push(memo_.get(bytes_.number<uint32_t>()));
            case 0x28:  // MARK
                stack_.put_mark();
                return true;
            case 0x30:  // POP
                return stack_.drop(stack_.is_empty() ? stack_.marked() : stack_.last(1));
            case 0x31:  // POP_MARK
                return stack_.drop(stack_.marked());
            case 0x32:  // DUP
                return stack_.push(stack_.top());
            case 0x80:  // PROTO
                check_protocol(bytes_.byte());
                return true;
            case 0x95:  // FRAME
                if (bytes_.number<uint64_t>() > bytes_.left())
                    fail(PyExc_ValueError, "a frame is longer than the bytes that follow");
                return true;
            default:
                return false;
        }
    }

    static void check_protocol(int protocol) {
        if (protocol > kProtocolMax) fail(PyExc_ValueError, "protocol %i is not known", protocol);
    }

    bool makes_value(uint8_t op) {
        switch (op) {
            case 0x4B:  // BININT1
                return stack_.push(owned(PyLong_FromLong(bytes_.byte())));
            case 0x58:  // BINUNICODE
                return stack_.push(bytes_.text(bytes_.number<uint32_t>()));
            case 0x4D:  // BININT2
                return stack_.push(owned(PyLong_FromLong(bytes_.number<uint16_t>())));
            case 0x4A:  // BININT
                return stack_.push(owned(PyLong_FromLong(bytes_.number<int32_t>())));
            case 0x4E:  // NONE
                return stack_.push(py::none());
            case 0x88:  // NEWTRUE
                return stack_.push(py::bool_(true));
            case 0x89:  // NEWFALSE
                return stack_.push(py::bool_(false));
            case 0x47:  // BINFLOAT
                return stack_.push(bytes_.real());
            case 0x8A:  // LONG1
                return stack_.push(bytes_.integer(bytes_.byte()));
            case 0x8B:  // LONG4
                return stack_.push(bytes_.integer(bytes_.number<uint32_t>()));
            case 0x8C:  // SHORT_BINUNICODE
                return stack_.push(bytes_.text(bytes_.byte()));
            case 0x8D:  // BINUNICODE8
                return stack_.push(bytes_.text(bytes_.number<uint64_t>()));
            case 0x43:  // SHORT_BINBYTES
                return stack_.push(bytes_.bytes(bytes_.byte()));
            case 0x42:  // BINBYTES
                return stack_.push(bytes_.bytes(bytes_.number<uint32_t>()));
            case 0x8E:  // BINBYTES8
                return stack_.push(bytes_.bytes(bytes_.number<uint64_t>()));
            case 0x96: {  // BYTEARRAY8
                const py::object found = bytes_.bytes(bytes_.number<uint64_t>());
                return stack_.push(owned(PyByteArray_FromObject(found.ptr())));
            }
            default:
                return false;
        }
    }

    bool makes_container(uint8_t op) {
        switch (op) {
            case 0x74:  // TUPLE
                return stack_.push(stack_.as_tuple(stack_.marked()));
            case 0x29:  // EMPTY_TUPLE
                return stack_.push(py::tuple());
            case 0x85:  // TUPLE1
                return make_tuple(1);
            case 0x86:  // TUPLE2
                return make_tuple(2);
            case 0x87:  // TUPLE3
                return make_tuple(3);
            case 0x5D:  // EMPTY_LIST
                return stack_.push(py::list());
            case 0x7D:  // EMPTY_DICT
                return stack_.push(py::dict());
            case 0x8F:  // EMPTY_SET
                return stack_.push(py::set());
            case 0x6C:  // LIST
                return make<&Machine::append>(py::list(), stack_.marked());
            case 0x64:  // DICT
                return make<&Machine::put_items>(py::dict(), stack_.marked());
            case 0x91:  // FROZENSET
                return make<&Machine::add>(owned(PyFrozenSet_New(nullptr)), stack_.marked());
            case 0x61:  // APPEND
                return put_below<&Machine::append>(stack_.last(1));
            case 0x65:  // APPENDS
                return put_below<&Machine::append>(stack_.marked());
            case 0x73:  // SETITEM
                return put_below<&Machine::put_items>(stack_.last(2));
            case 0x75:  // SETITEMS
                return put_below<&Machine::put_items>(stack_.marked());
            case 0x90:  // ADDITEMS
                return put_below<&Machine::add_items>(stack_.marked());
            default:
                return false;
        }
    }

    bool make_tuple(size_t count) {
        const size_t from = stack_.last(count - 1);
        stack_.below(from);  // throws if there is none
        return stack_.push(stack_.as_tuple(from - 1));
    }

    // Puts values into a new container, and pushes that.
    template <bool (Machine::*put)(py::handle, size_t)>
    bool make(py::object target, size_t from) {
        (this->*put)(target, from);
        return stack_.push(std::move(target));
    }

    // Puts values into what lies below them.
    template <bool (Machine::*put)(py::handle, size_t)>
    bool put_below(size_t from) {
        const py::object target = stack_.below(from);
        return is_a(target, words_.ignored) ? stack_.drop(from) : (this->*put)(target, from);
    }

    bool append(py::handle target, size_t from) {
        if (!PyList_CheckExact(target.ptr()))
            fail(PyExc_ValueError, "it appends to a value that is not a list");
        for (size_t at = from; at < stack_.end(); ++at)
            done(PyList_Append(target.ptr(), stack_[at].ptr()));
        return stack_.drop(from);
    }

    bool put_items(py::handle target, size_t from) {
        const bool is_dict = PyDict_CheckExact(target.ptr());
        if (!is_dict && !is_a(target, words_.ordered_dict))
            fail(PyExc_ValueError, "it puts items into a value that is not a dict");
        for (size_t at = from; at + 1 < stack_.end(); at += 2) {
            PyObject *const name = stack_[at].ptr(), *const value = stack_[at + 1].ptr();
            if (!PyUnicode_CheckExact(name)) bounds_.key(name);
            done(is_dict ? PyDict_SetItem(target.ptr(), name, value)
                         : PyObject_SetItem(target.ptr(), name, value));
        }
        if ((stack_.end() - from) % 2 != 0)
            fail(PyExc_ValueError, "zip() argument 2 is shorter than argument 1");
        return stack_.drop(from);
    }

    bool add_items(py::handle target, size_t from) {
        if (!is_a(target, reinterpret_cast<PyObject*>(&PySet_Type)))
            fail(PyExc_ValueError, "it adds items to a value that is not a set");
        return add(target, from);
    }

    bool add(py::handle target, size_t from) {
        for (size_t at = from; at < stack_.end(); ++at) {
            bounds_.key(stack_[at]);
            done(PySet_Add(target.ptr(), stack_[at].ptr()));
        }
        return stack_.drop(from);
    }

    bool makes_object(uint8_t op) {
        switch (op) {
            case 0x52:  // REDUCE
                return call();
            case 0x51:  // BINPERSID
                return name();
            case 0x81:  // NEWOBJ
                return make_instance();
            case 0x92: {  // NEWOBJ_EX
                const py::object names = stack_.pop(), arguments = stack_.pop();
                const py::object kind = stack_.pop();
                if (is_a(kind, words_.ignored)) return push_ignored(kind);
                fail(words_.refused, "an instance that is made with named arguments");
            }
            case 0x62:  // BUILD
                return change();
            case 0x63: {  // GLOBAL
                const auto [module, module_nbytes] = bytes_.line();
                const auto [name, name_nbytes] = bytes_.line();
                const py::object first =
                    owned(PyUnicode_DecodeUTF8(module, module_nbytes, nullptr));
                return find(first, owned(PyUnicode_DecodeUTF8(name, name_nbytes, nullptr)));
            }
            case 0x93: {  // STACK_GLOBAL
                const py::object name = stack_.pop(), module = stack_.pop();
                if (!PyUnicode_CheckExact(name.ptr()) || !PyUnicode_CheckExact(module.ptr()))
                    fail(PyExc_ValueError, "the name of a global is not text");
                return find(module, name);
            }
            default:
                return false;
        }
    }

    bool push_ignored(py::handle like) {
        const py::object name = words_.name.of(like);
        return stack_.push(owned(PyObject_CallOneArg(words_.ignored.ptr(), name.ptr())));
    }

    bool find(const py::object& module, const py::object& name) {
        const Py_ssize_t characters =
            std::max(PyUnicode_GET_LENGTH(module.ptr()), PyUnicode_GET_LENGTH(name.ptr()));
        if (characters > kNameCharactersMax)
            fail(PyExc_ValueError, "the name of a global has %zd characters", characters);
        py::object found =
            owned(PyObject_CallFunctionObjArgs(find_.ptr(), module.ptr(), name.ptr(), nullptr));
        if (done(PyObject_IsInstance(found.ptr(), words_.instance.ptr())) == 1) bounds_.note(found);
        return stack_.push(std::move(found));
    }

    bool call() {
        const py::object arguments = stack_.pop(), called = stack_.pop();
        if (is_a(called, words_.ignored)) return push_ignored(called);
        if (!is_a(called, words_.callee))
            fail(words_.refused, "a call of something that may not be called");
        if (!PyTuple_CheckExact(arguments.ptr()))
            fail(PyExc_ValueError, "the arguments of a call are not a tuple");
        bounds_.call(arguments);
        const py::object make = words_.make.of(called);
        return stack_.push(owned(PyObject_Call(make.ptr(), arguments.ptr(), nullptr)));
    }

    bool name() {
        if (named_.is_none()) fail(words_.refused, "the opcode BINPERSID");
        py::object& value = stack_.top();
        value = owned(PyObject_CallOneArg(named_.ptr(), value.ptr()));
        return true;
    }

    bool make_instance() {
        const py::object arguments = stack_.pop(), named = stack_.pop();
        if (is_a(named, words_.ignored)) return push_ignored(named);
        if (!is_a(named, words_.instance))
            fail(words_.refused, "an instance of something that may have no instances");
        const py::object kind = words_.kind.of(named);
        if (done(PyObject_RichCompareBool(arguments.ptr(), py::tuple().ptr(), Py_NE)) == 1) {
            const py::object its = words_.type_name.of(kind);
            fail(PyExc_ValueError, "a %S is made with arguments", its.ptr());
        }
        return stack_.push(owned(PyObject_CallOneArg(words_.bare.ptr(), kind.ptr())));
    }

    bool change() {
        const py::object state = stack_.pop();
        const py::object target = stack_.top();
        if (is_a(target, words_.ignored)) return true;
        const py::handle record = bounds_.record(target);
        const py::object its = words_.type_name.of(type_of(target));
        if (!record) {
            if (is_a(target, words_.instance)) fail(words_.refused, "a change of a class");
            fail(words_.refused, "a change of a %S", its.ptr());
        }
        const py::object take = words_.take.of(record);
        if (!take.is_none()) {
            owned(PyObject_CallFunctionObjArgs(take.ptr(), target.ptr(), state.ptr(), nullptr));
            return true;
        }
        if (!PyDict_CheckExact(state.ptr()))
            fail(PyExc_ValueError, "the attributes of a %S are not a dict", its.ptr());
        bounds_.copy(length(state));
        PyObject *name, *value;
        for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &name, &value) != 0;) {
            if (!PyUnicode_CheckExact(name))
                fail(PyExc_ValueError, "an attribute's name in a %S is not text", its.ptr());
        }
        done(PyDict_Update(words_.attributes.of(target).ptr(), state.ptr()));
        return true;
    }

    const py::object find_, named_;
    const Words& words_;
    Bytes bytes_;
    Bounds bounds_;
    Stack stack_;
    Memo memo_;
};

}  // namespace
}  // namespace pickle

void bind_pickle_reader(py::module_& m) {
    m.def(
        "read_pickle",
        [](const py::bytes& content, py::object find, py::object named, py::dict records,
           const py::dict& words) {
            const pickle::Words all(words);
            return pickle::Machine(content, std::move(find), std::move(named), std::move(records),
                                   all)
                .run();
        },
        py::arg("content"), py::arg("find"), py::arg("named"), py::arg("records"),
        py::arg("words"));
}

}  // namespace fastckpt
