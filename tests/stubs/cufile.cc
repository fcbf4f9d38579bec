// A libcufile.so.0 over host memory: the functions that csrc/gds/cufile_shim.h asks for, by pread
// and pwrite. It keeps count of what is registered and refuses what is not, refuses threads without
// a CUDA context, and does on demand what a real one does on bad days: fails, in its own way or the
// file system's, or transfers less than it was asked for. Built by the tests, which steer it by the
// stub_*() functions; it must not know who calls.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

struct Error {
    int code, cuda;
};

struct Descriptor {
    int type;
    union {
        int fd;
        void* handle;
    } handle;
    const void* calls;
};

struct Properties {
    unsigned major_version, minor_version;
    size_t poll_threshold, max_direct_io;
    unsigned status, control;
    unsigned features, rest[5];
};

struct File {
    int fd;
};

struct Failing {
    int after, times, code, number;
};

constexpr int kInvalidValue = 5022, kRegistered = 5023, kNotRegistered = 5024, kNoHandle = 5027;
constexpr int kNoContext = 5047, kNotOpen = 5001, kInvalidFlag = 5019;
// The open flags with which a real one takes no file. fcntl(2) keeps them as they were given.
constexpr int kRefused = O_NOFOLLOW | O_NONBLOCK | O_APPEND | (O_TMPFILE & ~O_DIRECTORY);

std::mutex mu;
// State below is protected by mu.
int opened = 0;
bool pinned = false;  // host memory, for transfers of blocks that were registered
std::map<std::string, Failing> failing;
std::map<std::string, int> calls;
std::map<const char*, size_t> buffers;
std::set<void*> files;
size_t most = 0;
Properties properties{};
int (*has_context)() = nullptr;

// Counts the call, and says what it shall fail with: a code of cuFile's, and a CUresult or an
// errno.
Error enter(const char* name) {
    ++calls[name];
    const auto found = failing.find(name);
    if (found == failing.end()) return {0, 0};
    Failing& failure = found->second;
    if (failure.after > 0) {
        --failure.after;
        return {0, 0};
    }
    if (failure.times == 0) return {0, 0};
    if (failure.times > 0) --failure.times;
    return {failure.code, failure.number};
}

Error enter_with_context(const char* name) {
    const Error error = enter(name);
    if (error.code != 0) return error;
    if (opened == 0) return {kNotOpen, 0};
    if (has_context != nullptr && has_context() == 0) return {kNoContext, 0};
    return {0, 0};
}

// What a transfer may move: bytes; or a negative result, with errno set.
ssize_t begin_transfer(const char* name, void* handle, const void* base, size_t nbytes,
                       off_t offset, off_t base_offset) {
    const std::lock_guard lock(mu);
    const Error error = enter_with_context(name);
    if (error.code == 1) {  // the file system's
        errno = error.cuda;
        return -1;
    }
    if (error.code != 0) return -error.code;
    if (files.count(handle) != 1) return -kNoHandle;
    const auto found = buffers.find(static_cast<const char*>(base));
    if (found == buffers.end()) return -kNotRegistered;
    if (offset < 0 || base_offset < 0 || static_cast<size_t>(base_offset) + nbytes > found->second)
        return -kInvalidValue;
    return static_cast<ssize_t>(most == 0 ? nbytes : std::min(nbytes, most));
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Error cuFileDriverOpen() {
    const std::lock_guard lock(mu);
    const Error error = enter("cuFileDriverOpen");
    if (error.code == 0) ++opened;
    return error;
}

EXPORT Error cuFileDriverClose_v2() {
    const std::lock_guard lock(mu);
    const bool may_unpin = has_context == nullptr || has_context() != 0;
    if (may_unpin || !pinned) --opened;  // else something stays, and a real one does not tell
    pinned = false;
    return enter("cuFileDriverClose");
}

EXPORT Error cuFileDriverGetProperties(Properties* out) {
    const std::lock_guard lock(mu);
    *out = properties;
    return enter("cuFileDriverGetProperties");
}

EXPORT Error cuFileHandleRegister(void** handle, Descriptor* descriptor) {
    const std::lock_guard lock(mu);
    const Error error = enter_with_context("cuFileHandleRegister");
    if (error.code != 0) return error;
    if (descriptor->type != 1 || descriptor->calls != nullptr) return {kInvalidValue, 0};
    const int flags = fcntl(descriptor->handle.fd, F_GETFL);
    if (flags == -1) return {kInvalidValue, 0};
    if ((flags & kRefused) != 0) return {kInvalidFlag, 0};
    *handle = new File{descriptor->handle.fd};
    files.insert(*handle);
    return {0, 0};
}

EXPORT void cuFileHandleDeregister(void* handle) {
    const std::lock_guard lock(mu);
    ++calls["cuFileHandleDeregister"];
    if (files.erase(handle) == 1) delete static_cast<File*>(handle);
}

EXPORT Error cuFileBufRegister(const void* base, size_t nbytes, int) {
    const std::lock_guard lock(mu);
    const Error error = enter_with_context("cuFileBufRegister");
    if (error.code != 0) return error;
    if (reinterpret_cast<uintptr_t>(base) % 65536 != 0) return {kInvalidValue, 0};
    const bool made = buffers.emplace(static_cast<const char*>(base), nbytes).second;
    pinned = true;
    return {made ? 0 : kRegistered, 0};
}

EXPORT Error cuFileBufDeregister(const void* base) {
    const std::lock_guard lock(mu);
    const Error error = enter_with_context("cuFileBufDeregister");
    if (error.code != 0) return error;
    return {buffers.erase(static_cast<const char*>(base)) == 1 ? 0 : kNotRegistered, 0};
}

EXPORT ssize_t cuFileRead(void* handle, void* base, size_t nbytes, off_t offset,
                          off_t base_offset) {
    const ssize_t may = begin_transfer("cuFileRead", handle, base, nbytes, offset, base_offset);
    if (may < 0) return may;
    return pread(static_cast<File*>(handle)->fd, static_cast<char*>(base) + base_offset,
                 static_cast<size_t>(may), offset);
}

EXPORT ssize_t cuFileWrite(void* handle, const void* base, size_t nbytes, off_t offset,
                           off_t base_offset) {
    const ssize_t may = begin_transfer("cuFileWrite", handle, base, nbytes, offset, base_offset);
    if (may < 0) return may;
    return pwrite(static_cast<File*>(handle)->fd, static_cast<const char*>(base) + base_offset,
                  static_cast<size_t>(may), offset);
}

#ifndef STUB_OLD  // what old releases lack
EXPORT Error cuFileGetVersion(int* version) {
    const std::lock_guard lock(mu);
    *version = 1140;
    return enter("cuFileGetVersion");
}
#endif

// --- for tests

// Forgets calls and failures; `driver` is the CUDA stub, which is loaded.
EXPORT void stub_configure(const char* driver) {
    const std::lock_guard lock(mu);
    failing.clear();
    calls.clear();
    most = 0;
    properties = {};
    void* library = dlopen(driver, RTLD_NOW | RTLD_LOCAL);
    has_context = library == nullptr
                      ? nullptr
                      : reinterpret_cast<int (*)()>(dlsym(library, "stub_has_context"));
}

// After so many calls, so many (-1: all) fail with a code of cuFile's and a CUresult, or, code 1,
// with an errno.
EXPORT void stub_fail(const char* name, int after, int times, int code, int number) {
    const std::lock_guard lock(mu);
    failing[name] = {after, times, code, number};
}

// A transfer moves so many bytes at most; 0: all.
EXPORT void stub_at_most(size_t nbytes) {
    const std::lock_guard lock(mu);
    most = nbytes;
}

EXPORT void stub_properties(unsigned major_version, unsigned minor_version, unsigned status,
                            unsigned control, unsigned features) {
    const std::lock_guard lock(mu);
    properties.major_version = major_version;
    properties.minor_version = minor_version;
    properties.status = status;
    properties.control = control;
    properties.features = features;
}

EXPORT int stub_calls(const char* name) {
    const std::lock_guard lock(mu);
    return calls[name];
}

// What is alive: opened drivers, files, buffers.
EXPORT void stub_alive(uint64_t* out) {
    const std::lock_guard lock(mu);
    out[0] = static_cast<uint64_t>(opened);
    out[1] = files.size();
    out[2] = buffers.size();
}
