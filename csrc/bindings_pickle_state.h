// What an interpreter of pickles holds: the bytes, the stack, the memo, and what is left of the
// bounds. It must not know opcodes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "bindings_names.h"

namespace fastckpt::pickle {

constexpr int kKeyDepthMax = 8;  // of tuples in a key that is a tuple: hash() recurses on the stack
constexpr uint64_t kKeyBitsMax = 64;  // of a key that is an int, which is hashed anew each time
constexpr int64_t kHashesPerByte = 64;

template <class... Values>
[[noreturn]] void fail(py::handle kind, const char* format, Values... values) {
    PyErr_Format(kind.ptr(), format, values...);
    throw py::error_already_set();
}

inline PyObject* type_of(py::handle value) {
    return reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()));
}

inline bool is_a(py::handle value, py::handle type) { return type_of(value) == type.ptr(); }

inline bool has_length(py::handle value, const Name& len) {
    const PyTypeObject* const type = Py_TYPE(value.ptr());
    return (type->tp_as_sequence != nullptr && type->tp_as_sequence->sq_length != nullptr) ||
           (type->tp_as_mapping != nullptr && type->tp_as_mapping->mp_length != nullptr) ||
           len.is_in(value);
}

inline int64_t length(py::handle value) {
    const Py_ssize_t count = PyObject_Size(value.ptr());
    if (count < 0) throw py::error_already_set();
    return count;
}

// Memory that Python counts as its own.
template <class T>
struct PythonMemory {
    using value_type = T;
    PythonMemory() = default;
    template <class Other>
    explicit PythonMemory(const PythonMemory<Other>& /*other*/) {}
    T* allocate(size_t count) {
        if (auto* const made = static_cast<T*>(PyMem_Malloc(count * sizeof(T)))) return made;
        throw std::bad_alloc();
    }
    void deallocate(T* memory, size_t /*count*/) { PyMem_Free(memory); }
    bool operator==(const PythonMemory& /*other*/) const { return true; }
    bool operator!=(const PythonMemory& /*other*/) const { return false; }
};

template <class T>
using Vector = std::vector<T, PythonMemory<T>>;

// What a pickle has put aside, by numbers that mostly count from 0, but may be any.
class Memo {
  public:
    size_t size() const { return counted_.size() + others_.size(); }

    void put(size_t number, py::object value) {
        if (number < counted_.size()) {
            counted_[number] = std::move(value);
        } else if (number == counted_.size()) {
            if (others_.size() != 0) others_.attr("pop")(number, nullptr);
            counted_.push_back(std::move(value));
        } else {
            others_[py::int_(number)] = std::move(value);
        }
    }

    // Throws a KeyError if there is none.
    py::object get(size_t number) const {
        return number < counted_.size() ? counted_[number] : others_[py::int_(number)];
    }

  private:
    Vector<py::object> counted_;
    py::dict others_;
};

// The words of plain_pickle.py, and what else it passes that is the same for all pickles.
struct Words {
    explicit Words(const py::dict& of)
        : callee(of["callee"]),
          instance(of["instance"]),
          ignored(of["ignored"]),
          refused(of["refused"]),
          ordered_dict(of["ordered_dict"]),
          struct_error(of["struct_error"]),
          vars(of["vars"]),
          bare(of["bare"]),
          opcodes(of["opcodes"]) {}

    const py::object callee, instance, ignored, refused, ordered_dict, struct_error, vars, bare;
    const py::dict opcodes;  // the names of all
    const Name make{"make"}, kind{"kind"}, take{"take"}, name{"name"}, type_name{"__name__"};
    const Name attributes{"__dict__"}, len{"__len__"};
};

// The bytes of a pickle, read from the front.
class Bytes {
  public:
    Bytes(const py::bytes& content, const Words& words)
        : begin_(PyBytes_AS_STRING(content.ptr())),
          nbytes_(static_cast<size_t>(PyBytes_GET_SIZE(content.ptr()))),
          words_(words) {}

    size_t nbytes() const { return nbytes_; }
    size_t at() const { return at_; }
    size_t left() const { return nbytes_ - at_; }

    uint8_t byte() {
        if (at_ == nbytes_) fail(PyExc_IndexError, "index out of range");
        return static_cast<uint8_t>(begin_[at_++]);
    }

    // Returns a number, whose first byte is the lowest.
    template <class Number>
    Number number() {
        const size_t nbytes = sizeof(Number);
        if (left() < nbytes) {
            fail(words_.struct_error,
                 "unpack_from requires a buffer of at least %zu bytes for unpacking %zu bytes at "
                 "offset %zu (actual buffer size is %zu)",
                 at_ + nbytes, nbytes, at_, nbytes_);
        }
        at_ += nbytes;
        return static_cast<Number>(lowest_first(begin_ + at_ - nbytes, nbytes));
    }

    const char* span(uint64_t nbytes) {
        if (nbytes > left()) {
            fail(PyExc_ValueError, "it claims %llu bytes from %zu on, which is more than it has",
                 static_cast<unsigned long long>(nbytes), at_);
        }
        at_ += nbytes;
        return begin_ + at_ - nbytes;
    }

    py::object text(uint64_t nbytes) {
        const char* const found = span(nbytes);
        return owned(PyUnicode_DecodeUTF8(found, static_cast<Py_ssize_t>(nbytes), "surrogatepass"));
    }

    py::object bytes(uint64_t nbytes) {
        const char* const found = span(nbytes);
        return owned(PyBytes_FromStringAndSize(found, static_cast<Py_ssize_t>(nbytes)));
    }

    py::object integer(uint64_t nbytes) {
        if (nbytes > sizeof(int64_t)) {
            const auto type = py::handle(reinterpret_cast<PyObject*>(&PyLong_Type));
            return type.attr("from_bytes")(bytes(nbytes), "little", py::arg("signed") = true);
        }
        const char* const found = span(nbytes);
        uint64_t value = lowest_first(found, nbytes);
        const bool is_negative = nbytes > 0 && (found[nbytes - 1] & 0x80) != 0;
        if (is_negative && nbytes < sizeof value) value |= ~uint64_t{0} << (8 * nbytes);
        return owned(PyLong_FromLongLong(static_cast<int64_t>(value)));
    }

    py::object real() {
        const auto stored = __builtin_bswap64(number<uint64_t>());
        double value;
        std::memcpy(&value, &stored, sizeof value);
        return owned(PyFloat_FromDouble(value));
    }

    // Returns what comes before the next end of a line.
    std::pair<const char*, Py_ssize_t> line() {
        const char* const found = begin_ + at_;
        const auto* const end = static_cast<const char*>(std::memchr(found, '\n', left()));
        if (end == nullptr) fail(PyExc_ValueError, "subsection not found");
        at_ = static_cast<size_t>(end - begin_) + 1;
        return {found, end - found};
    }

  private:
    static uint64_t lowest_first(const char* bytes, size_t count) {
        uint64_t value = 0;
        for (size_t k = 0; k < count; ++k)
            value |= uint64_t{static_cast<uint8_t>(bytes[k])} << (8 * k);
        return value;
    }

    const char* const begin_;
    const size_t nbytes_;
    const Words& words_;
    size_t at_ = 0;
};

// The values that are being put together. Only those above the last mark can be reached.
class Stack {
  public:
    bool push(py::object value) {
        values_.push_back(std::move(value));
        return true;
    }

    py::object pop() {
        const size_t from = last(1);
        py::object value = std::move(values_[from]);
        values_.pop_back();
        return value;
    }

    py::object& top() { return below(values_.size()); }

    bool is_empty() const { return values_.size() == mark(); }
    void put_mark() { marks_.push_back(values_.size()); }
    size_t end() const { return values_.size(); }
    py::object& operator[](size_t at) { return values_[at]; }

    // Takes the last mark away, and returns where the values above it begin.
    size_t marked() {
        if (marks_.empty()) fail(PyExc_IndexError, "pop from empty list");
        const size_t from = marks_.back();
        marks_.pop_back();
        return from;
    }

    // Returns where the last `count` values begin.
    size_t last(size_t count) {
        if (values_.size() - mark() < count) fail(PyExc_IndexError, "pop from empty list");
        return values_.size() - count;
    }

    // Returns the value below the one at `from`.
    py::object& below(size_t from) {
        if (from == mark()) fail(PyExc_IndexError, "list index out of range");
        return values_[from - 1];
    }

    // Lets go of the values from there on.
    bool drop(size_t from) {
        values_.resize(from);
        return true;
    }

    py::object as_tuple(size_t from) {
        py::object made = owned(PyTuple_New(static_cast<Py_ssize_t>(values_.size() - from)));
        for (size_t at = from; at < values_.size(); ++at) {
            PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(at - from),
                             values_[at].release().ptr());
        }
        drop(from);
        return made;
    }

  private:
    size_t mark() const { return marks_.empty() ? 0 : marks_.back(); }

    Vector<py::object> values_;
    Vector<size_t> marks_;
};

// What is left of what a pickle may make others do.
class Bounds {
  public:
    // A pickler writes each element once, in at least a byte, before it is copied: whoever needs
    // more copies than there are bytes copies the same values over and over.
    Bounds(size_t nbytes, py::dict records, const Words& words)
        : records_(std::move(records)),
          words_(words),
          copies_(static_cast<int64_t>(nbytes)),
          hashes_(kHashesPerByte * static_cast<int64_t>(nbytes)) {}

    // What stands for the class of a value, if the pickle has named it; borrowed.
    PyObject* record(py::handle value) const {
        PyObject* const found = PyDict_GetItemWithError(records_.ptr(), type_of(value));
        if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
        return found;
    }

    void note(py::handle instance) { records_[words_.kind.of(instance)] = instance; }

    void copy(int64_t count) {
        if (count > copies_) fail(PyExc_ValueError, "it copies the same values over and over");
        copies_ -= count;
    }

    // Counts the copies that a call makes of its arguments; throws if it makes too many.
    void call(py::handle arguments) {
        constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
        int64_t count = PyTuple_GET_SIZE(arguments.ptr());
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(arguments.ptr()); ++k) {
            const py::handle argument = PyTuple_GET_ITEM(arguments.ptr(), k);
            const int64_t its = has_length(argument, words_.len) ? length(argument) : 0;
            count = its > kMost - count ? kMost : count + its;
        }
        copy(count);
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(arguments.ptr()); ++k) {
            PyObject* const argument = PyTuple_GET_ITEM(arguments.ptr(), k);
            if (!PyList_CheckExact(argument)) continue;  // it may become a set
            for (Py_ssize_t at = 0; at < PyList_GET_SIZE(argument); ++at)
                key(PyList_GET_ITEM(argument, at));
        }
    }

    // Throws if hashing and comparing a value takes unbounded time.
    void key(py::handle value, int depth = kKeyDepthMax) {
        py::object parts;
        if (record(value) != nullptr) {
            const py::object members = owned(PyObject_CallOneArg(words_.vars.ptr(), value.ptr()));
            parts = owned(PyMapping_Values(members.ptr()));
        } else if (PyTuple_Check(value.ptr()) || PyFrozenSet_Check(value.ptr())) {
            parts = py::reinterpret_borrow<py::object>(value);
        } else if (Py_TYPE(value.ptr())->tp_hash == PyObject_HashNotImplemented) {
            fail(PyExc_ValueError, "a key is a list, a dict or a set");
        } else {
            if (PyLong_CheckExact(value.ptr())) check_bits(value);
            return;
        }
        hash(length(parts));
        if (depth == 0 || hashes_ < 0)
            fail(PyExc_ValueError, "a key is nested too deeply, or used too often");
        parts = owned(PySequence_Fast(parts.ptr(), "no parts"));
        for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(parts.ptr()); ++k) {
            PyObject* const part = PySequence_Fast_GET_ITEM(parts.ptr(), k);
            if (PyUnicode_CheckExact(part) || PyBytes_CheckExact(part)) {
                hash(length(part));  // of a key in a message or a name
            } else {
                key(part, depth - 1);
            }
        }
    }

  private:
    void hash(int64_t count) { hashes_ = hashes_ < 0 ? hashes_ : hashes_ - count; }

    static void check_bits(py::handle number) {
        int overflow = 0;
        PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
        if (overflow == 0) return;
        const py::object bits = number.attr("bit_length")();
        if (bits.cast<uint64_t>() > kKeyBitsMax)
            fail(PyExc_ValueError, "a key is a number of %S bits", bits.ptr());
    }

    const py::dict records_;  // of the classes named so far
    const Words& words_;
    int64_t copies_, hashes_;
};

}  // namespace fastckpt::pickle
