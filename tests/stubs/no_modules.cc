// Preloaded where NVIDIA's libcufile runs over the stub of the driver: /proc/modules is an empty
// file. Where there is none, as in many virtual machines, that library waits for it for ever; where
// nvidia-fs is loaded, it would be asked to read the memory of a GPU that there is not.
#include <dlfcn.h>
#include <fcntl.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace {

const char* shown(const char* path) {
    return path != nullptr && std::strcmp(path, "/proc/modules") == 0 ? "/dev/null" : path;
}

template <typename Function>
Function next(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define FOPEN(name)                                                                \
    extern "C" FILE* name(const char* path, const char* mode) {                    \
        static const auto real = next<FILE* (*)(const char*, const char*)>(#name); \
        return real(shown(path), mode);                                            \
    }
FOPEN(fopen)
FOPEN(fopen64)

#define OPEN(name)                                                            \
    extern "C" int name(const char* path, int flags, ...) {                   \
        static const auto real = next<int (*)(const char*, int, ...)>(#name); \
        va_list rest;                                                         \
        va_start(rest, flags);                                                \
        const int mode = va_arg(rest, int);                                   \
        va_end(rest);                                                         \
        return real(shown(path), flags, mode);                                \
    }
OPEN(open)
OPEN(open64)

extern "C" int access(const char* path, int mode) noexcept {
    static const auto real = next<int (*)(const char*, int)>("access");
    return real(shown(path), mode);
}
