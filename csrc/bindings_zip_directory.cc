// The part of the extension module that reads the central directory of a zip file.
//
// formats/zip_records.py finds the directory, and says what the structures are. Here each record is
// looked at, of which there may be 100,000.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "bindings_names.h"

namespace py = pybind11;

namespace fastckpt {

void bind_zip_directory(py::module_& m);

namespace {

constexpr size_t kFixedBytes = 46;  // of an entry
constexpr uint64_t kWide = 0xFFFFFFFF;
constexpr uint32_t kMagic = 0x02014B50;

uint64_t number(const char* at, size_t nbytes) {
    uint64_t value = 0;
    for (size_t k = 0; k < nbytes; ++k) value |= uint64_t{static_cast<uint8_t>(at[k])} << (8 * k);
    return value;
}

// Takes the next of the numbers of 64 bits in the extra field of zip64, if `value` says that it is
// there; throws if it is not.
void widen(uint64_t& value, const char*& at, const char* end) {
    if (value != kWide) return;
    if (end - at < 8) throw py::value_error("a record lacks its size or offset of 64 bits");
    value = number(at, 8);
    at += 8;
}

// Finds the extra field of zip64 among those of an entry.
void widen_all(uint64_t& nbytes, uint64_t& stored, uint64_t& offset, const char* at,
               const char* end) {
    while (end - at >= 4) {
        const uint64_t kind = number(at, 2), size = number(at + 2, 2);
        at += 4;
        const char* const its_end = static_cast<size_t>(end - at) < size ? end : at + size;
        if (kind == 1) {
            widen(nbytes, at, its_end);
            widen(stored, at, its_end);
            return widen(offset, at, its_end);
        }
        at = its_end;
    }
}

// Returns the names of at most `count` records, and offsets, sizes, CRC-32s and methods of
// compression: as many as there are.
py::tuple zip_directory(const py::bytes& data, uint64_t count) {
    const char* at = PyBytes_AS_STRING(data.ptr());
    const char* const end = at + PyBytes_GET_SIZE(data.ptr());
    py::list names, offsets, sizes, crcs, methods;
    for (; count > 0 && end - at >= static_cast<ptrdiff_t>(kFixedBytes); --count) {
        if (number(at, 4) != kMagic) break;
        const uint64_t name_nbytes = number(at + 28, 2), extra_nbytes = number(at + 30, 2);
        const uint64_t left = static_cast<size_t>(end - at) - kFixedBytes;
        if (left < name_nbytes + extra_nbytes + number(at + 32, 2))
            throw py::value_error("a record ends behind the directory");
        uint64_t stored = number(at + 20, 4), nbytes = number(at + 24, 4);
        uint64_t offset = number(at + 42, 4);
        const char* const name = at + kFixedBytes;
        const char* const extra = name + name_nbytes;
        if (nbytes == kWide || offset == kWide)
            widen_all(nbytes, stored, offset, extra, extra + extra_nbytes);
        names.append(
            owned(PyUnicode_DecodeUTF8(name, static_cast<Py_ssize_t>(name_nbytes), "replace")));
        offsets.append(offset);
        sizes.append(nbytes);
        crcs.append(number(at + 16, 4));
        methods.append(number(at + 10, 2));
        at = extra + extra_nbytes + number(at + 32, 2);
    }
    return py::make_tuple(names, offsets, sizes, crcs, methods);
}

}  // namespace

void bind_zip_directory(py::module_& m) {
    m.def("zip_directory", &zip_directory, py::arg("data"), py::arg("count"));
}

}  // namespace fastckpt
