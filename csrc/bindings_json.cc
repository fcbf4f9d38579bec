// The part of the extension module that reads JSON.
//
// formats/strict_json.py says what it has to refuse. Python's own reader calls back for each object
// and each number that may be wrong, which takes most of the time in which a file with 100,000
// tensors is opened.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "bindings_names.h"
#include "check.h"

namespace py = pybind11;

namespace fastckpt {

void bind_json(py::module_& m);

namespace {

constexpr size_t kNumberCharactersMax = 32;  // no format here has longer numbers
constexpr size_t kShortDigits = 18;          // as many fit 64 bits
constexpr size_t kSharedBytesMax = 32;
constexpr Py_ssize_t kShownBytes = 24;
constexpr int kDepthMax = 200;  // of lists and objects, which are read on the stack of C

template <class... Values>
[[noreturn]] void refuse(const char* format, Values... values) {
    PyErr_Format(PyExc_ValueError, format, values...);
    throw py::error_already_set();
}

bool is_digit(char character) { return character >= '0' && character <= '9'; }

// What short texts that were met stand for: most are names that every object has, or shapes that
// many tensors have.
class Shared {
  public:
    static bool takes(size_t nbytes) { return nbytes <= kSharedBytesMax; }

    // Returns what a text stands for, which is null if it was not met; the caller sets it then.
    py::object& of(const char* begin, size_t nbytes) {
        uint32_t hash = 2166136261;
        for (size_t k = 0; k < nbytes; ++k)
            hash = (hash ^ static_cast<uint8_t>(begin[k])) * 16777619;
        auto& [content, meaning] = known_[hash % known_.size()];
        if (content.compare(0, content.npos, begin, nbytes) != 0) {
            meaning = py::object();
            content.assign(begin, nbytes);
        }
        return meaning;
    }

  private:
    std::array<std::pair<std::string, py::object>, 256> known_;
};

class Reader {
  public:
    // The bytes, which are UTF-8, end with a zero. `columns` are the members of the outermost
    // object that are lists of objects, and the names of the members of these.
    Reader(const char* begin, size_t nbytes, const py::dict& columns)
        : begin_(begin), at_(begin), end_(begin + nbytes), columns_(columns) {}

    py::object run() {
        if (std::strncmp(at_, "\xEF\xBB\xBF", 3) == 0) refuse("it begins with a BOM");
        py::object found = value();
        next();
        if (at_ != end_) fail("Extra data");
        return found;
    }

  private:
    [[noreturn]] void fail(const char* expected) const {
        const py::object found = owned(PyUnicode_DecodeUTF8(
            at_, std::min<Py_ssize_t>(end_ - at_, kShownBytes), "backslashreplace"));
        refuse("%s at byte %zd, found %A", expected, static_cast<Py_ssize_t>(at_ - begin_),
               found.ptr());
    }

    // Passes white space over, and returns the character behind it; a zero at the end.
    char next() {
        while (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t') ++at_;
        return *at_;
    }

    // Passes a comma over, or the closing character; returns whether it was the comma.
    bool goes_on(char closing) {
        const char found = next();
        if (found != ',' && found != closing) fail("Expecting ','");
        ++at_;
        if (found == closing) --depth_;
        return found == ',';
    }

    // Passes over the beginning of an object or a list.
    void enter() {
        if (++depth_ > kDepthMax) {
            PyErr_SetString(PyExc_RecursionError, "lists and objects are nested too deeply");
            throw py::error_already_set();
        }
        ++at_;
    }

    bool closes(char closing) {
        if (next() != closing) return false;
        ++at_;
        --depth_;
        return true;
    }

    py::object value() {
        switch (next()) {
            case '"':
                return text();
            case '{':
                return object();
            case '[':
                return list();
            case 't':
                return literal("true", py::bool_(true));
            case 'f':
                return literal("false", py::bool_(false));
            case 'n':
                return literal("null", py::none());
            default:
                return number();
        }
    }

    py::object literal(const char* word, py::object stands_for) {
        const size_t nbytes = std::strlen(word);
        if (std::strncmp(at_, word, nbytes) != 0) fail("Expecting value");
        at_ += nbytes;
        return stands_for;
    }

    py::object object() {
        enter();
        py::dict made;
        if (closes('}')) return std::move(made);
        Py_ssize_t count = 0;
        do {
            if (next() != '"') fail("Expecting a name");
            const py::object name = text();
            if (next() != ':') fail("Expecting ':'");
            ++at_;
            done(PyDict_SetItem(made.ptr(), name.ptr(), member(name).ptr()));
            ++count;
        } while (goes_on('}'));
        if (PyDict_GET_SIZE(made.ptr()) != count) refuse("an object has a name twice");
        return std::move(made);
    }

    py::object member(const py::object& name) {
        if (depth_ != 1 || next() != '[') return value();
        PyObject* const names = PyDict_GetItemWithError(columns_.ptr(), name.ptr());
        if (names == nullptr) return value();
        CHECK(PyTuple_CheckExact(names) && PyTuple_GET_SIZE(names) > 0);
        const char* const begin = at_;
        py::object found = columns(py::reinterpret_borrow<py::tuple>(names));
        if (found) return found;
        at_ = begin;
        depth_ = 1;
        return list();
    }

    // Reads a list of objects, each with these members in this order, without making the objects;
    // returns a list for each name, or null if there is another object.
    py::object columns(const py::tuple& names) {
        py::tuple made(names.size());
        for (size_t k = 0; k < names.size(); ++k) {
            CHECK(PyUnicode_CheckExact(names[k].ptr()));
            made[k] = py::list();
        }
        enter();
        if (closes(']')) return std::move(made);
        do {
            if (next() != '{') return {};
            enter();
            for (size_t k = 0; k < names.size(); ++k) {
                if (next() != '"' || PyUnicode_Compare(text().ptr(), names[k].ptr()) != 0)
                    return {};
                if (next() != ':') fail("Expecting ':'");
                ++at_;
                done(PyList_Append(PyTuple_GET_ITEM(made.ptr(), k), value().ptr()));
                if (goes_on('}') != (k + 1 < names.size())) return {};
            }
        } while (goes_on(']'));
        return std::move(made);
    }

    py::object list() {
        enter();
        const size_t nbytes = numbers_nbytes();
        if (nbytes == 0) return items();
        py::object& known = lists_.of(at_, nbytes);
        if (!known) return known = items();
        at_ += nbytes;
        --depth_;
        return known;
    }

    // Returns the bytes up to the end of a list, if it is short and of numbers without blanks; else
    // 0.
    size_t numbers_nbytes() const {
        size_t nbytes = 0;
        while (is_digit(at_[nbytes]) || at_[nbytes] == ',')
            if (!Shared::takes(++nbytes)) return 0;
        return at_[nbytes] == ']' ? nbytes + 1 : 0;
    }

    py::object items() {
        if (closes(']')) return py::list();
        const size_t from = items_.size();
        do {
            items_.push_back(value());
        } while (goes_on(']'));
        py::object made = owned(PyList_New(static_cast<Py_ssize_t>(items_.size() - from)));
        for (size_t at = from; at < items_.size(); ++at) {
            PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(at - from),
                            items_[at].release().ptr());
        }
        items_.resize(from);
        return made;
    }

    py::object number() {
        const char* const begin = at_;
        const bool is_negative = *at_ == '-';
        if (is_negative) ++at_;
        if (!is_digit(*at_)) fail("Expecting value");
        const char* const first = at_;
        uint64_t found = 0;
        for (; is_digit(*at_); ++at_) found = 10 * found + static_cast<uint64_t>(*at_ - '0');
        const auto digits = static_cast<size_t>(at_ - first);
        if (*first == '0' && digits > 1) fail("Expecting no digit behind a zero");
        const bool is_real = pass_fraction();
        if (!is_real && digits <= kShortDigits) {
            const auto small = static_cast<int64_t>(found);
            return owned(PyLong_FromLongLong(is_negative ? -small : small));
        }
        const auto characters = static_cast<size_t>(at_ - begin);
        const std::string text(begin, std::min(characters, kNumberCharactersMax));
        if (characters > kNumberCharactersMax)
            refuse("the number %s... is too long: it has %zu digits", text.c_str(), characters);
        if (!is_real) return owned(PyLong_FromString(text.c_str(), nullptr, 10));
        const double real = PyOS_string_to_double(text.c_str(), nullptr, nullptr);
        if (!std::isfinite(real)) refuse("the number %s is too large", text.c_str());
        return owned(PyFloat_FromDouble(real));
    }

    // Passes over what a number has behind its integer; returns whether it has that.
    bool pass_fraction() {
        const char* const begin = at_;
        if (*at_ == '.') {
            ++at_;
            pass_digits();
        }
        if (*at_ == 'e' || *at_ == 'E') {
            ++at_;
            if (*at_ == '+' || *at_ == '-') ++at_;
            pass_digits();
        }
        return at_ != begin;
    }

    void pass_digits() {
        if (!is_digit(*at_)) fail("Expecting a digit");
        while (is_digit(*at_)) ++at_;
    }

    // Passes over the characters of a text that stand for themselves.
    void pass_plain() {
        while (*at_ != '"' && *at_ != '\\' && static_cast<uint8_t>(*at_) >= ' ') ++at_;
        if (at_ == end_) fail("Expecting the end of a text");
        if (static_cast<uint8_t>(*at_) < ' ') fail("Expecting no control character");
    }

    py::object text() {
        const char* begin = ++at_;
        pass_plain();
        if (*at_ == '"') return plain(begin, static_cast<size_t>(at_++ - begin));
        std::string content;  // UTF-8, but for the halves of surrogate pairs
        for (; *at_ != '"'; pass_plain()) {
            content.append(begin, at_);
            put(content, escaped());
            begin = at_;
        }
        content.append(begin, at_++);
        const auto nbytes = static_cast<Py_ssize_t>(content.size());
        return owned(PyUnicode_DecodeUTF8(content.data(), nbytes, "surrogatepass"));
    }

    py::object plain(const char* begin, size_t nbytes) {
        const auto made = [&] {
            return owned(PyUnicode_DecodeUTF8(begin, static_cast<Py_ssize_t>(nbytes), nullptr));
        };
        if (!Shared::takes(nbytes)) return made();
        py::object& known = texts_.of(begin, nbytes);
        if (!known) known = made();
        return known;
    }

    // Returns the character that an escape stands for, and passes that over.
    uint32_t escaped() {
        constexpr const char* kLetters = "\"\\/bfnrt";
        constexpr const char* kMeanings = "\"\\/\b\f\n\r\t";
        ++at_;
        if (*at_ == 'u') {
            const uint32_t first = unit();
            if (first < 0xD800 || first > 0xDBFF || at_[0] != '\\' || at_[1] != 'u') return first;
            const char* const behind = at_++;
            const uint32_t second = unit();
            if (second >= 0xDC00 && second <= 0xDFFF)
                return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
            at_ = behind;
            return first;
        }
        const char* const letter = *at_ == '\0' ? nullptr : std::strchr(kLetters, *at_);
        if (letter == nullptr) fail("Expecting an escape");
        ++at_;
        return static_cast<uint8_t>(kMeanings[letter - kLetters]);
    }

    // Returns the number behind the "u" of an escape, and passes it over.
    uint32_t unit() {
        uint32_t found = 0;
        for (int k = 0; k < 4; ++k) {
            const char digit = *++at_;
            const char lower = static_cast<char>(digit | 0x20);
            const bool is_letter = lower >= 'a' && lower <= 'f';
            if (!is_digit(digit) && !is_letter) fail("Expecting a hex digit");
            found = 16 * found + static_cast<uint32_t>(is_letter ? lower - 'a' + 10 : digit - '0');
        }
        ++at_;
        return found;
    }

    static void put(std::string& content, uint32_t code) {
        const auto low = [&](int shift) {
            return static_cast<char>(0x80 | (code >> shift & 0x3F));
        };
        if (code < 0x80) {
            content += static_cast<char>(code);
        } else if (code < 0x800) {
            content += {static_cast<char>(0xC0 | code >> 6), low(0)};
        } else if (code < 0x10000) {
            content += {static_cast<char>(0xE0 | code >> 12), low(6), low(0)};
        } else {
            content += {static_cast<char>(0xF0 | code >> 18), low(12), low(6), low(0)};
        }
    }

    const char* const begin_;
    const char* at_;
    const char* const end_;
    const py::dict columns_;
    int depth_ = 0;
    std::vector<py::object> items_;  // of the lists that are open
    Shared texts_, lists_;
};

}  // namespace

void bind_json(py::module_& m) {
    m.def(
        "read_json",
        [](const py::str& text, const py::dict& columns) {
            Py_ssize_t nbytes = 0;
            const char* const content = PyUnicode_AsUTF8AndSize(text.ptr(), &nbytes);
            if (content == nullptr) throw py::error_already_set();
            return Reader(content, static_cast<size_t>(nbytes), columns).run();
        },
        py::arg("text"), py::arg("columns"));
}

}  // namespace fastckpt
