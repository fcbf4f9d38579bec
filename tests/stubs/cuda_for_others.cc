// The stub of the CUDA driver with what others ask of one: NVIDIA's libcufile, which opens it by
// its name, libcuda.so.1, and the tests' way to hardware (tests/kit/hardware.py). What cuFile only
// looks for where nvidia-fs is not loaded says that it is not supported. It must not know who
// calls.
#include <dlfcn.h>

#include <chrono>
#include <utility>

#include "cuda.cc"

namespace {

using Address = unsigned long long;
constexpr int kNotFound = 500, kNotSupported = 801;
// Attributes of a pointer, of a device.
enum { kContext = 1, kMemoryType, kDevicePointer, kIsManaged = 8, kOrdinal, kRangeStart = 11 };
enum { kRangeSize = kRangeStart + 1, kMapped };
enum { kBus = 33, kSlot = 34, kMajor = 75 };
constexpr unsigned kInDevice = 2, kAtLeast = 0;

template <typename Value>
void give(void* out, Value value) {
    std::memcpy(out, &value, sizeof value);
}

// The allocation that an address of the device lies in; {0, 0} if there is none.
std::pair<Address, size_t> allocation_of(Address address) {
    const std::lock_guard lock(mu);
    const auto after = allocated.upper_bound(address);
    if (after == allocated.begin()) return {0, 0};
    const auto [begin, nbytes] = *std::prev(after);
    return address < begin + nbytes ? std::pair{begin, nbytes} : std::pair{Address{0}, size_t{0}};
}

int copy_any(const char* name, Address target, Address source, size_t nbytes, void* stream) {
    if (const int result = enter(name)) return result;
    Work work{kOnDevice};
    work.target = reinterpret_cast<std::byte*>(target);
    work.source = reinterpret_cast<const std::byte*>(source);
    work.nbytes = nbytes;
    queue(stream, work);
    return kSuccess;
}

int copy_and_wait(const char* name, Address target, Address source, size_t nbytes) {
    if (const int result = copy_any(name, target, source, nbytes, nullptr)) return result;
    drain(default_stream());
    return kSuccess;
}

}  // namespace

EXPORT int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
    Dl_info here{};
    dladdr(reinterpret_cast<void*>(&cuGetProcAddress_v2), &here);
    static void* const self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(self, (std::string(name) + "_v2").c_str());
    if (*function == nullptr) *function = dlsym(self, name);
    if (status != nullptr) *status = *function == nullptr ? 1 : 0;
    return *function == nullptr ? kNotFound : kSuccess;
}

EXPORT int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

EXPORT int cuDeviceGetCount(int* count) {
    *count = 1;
    return enter("cuDeviceGetCount", false);
}

EXPORT int cuDeviceGetName(char* text, int nbytes, int) {
    std::strncpy(text, "stub", static_cast<size_t>(nbytes));
    return enter("cuDeviceGetName", false);
}

EXPORT int cuDeviceGetUuid(void* uuid, int device) {
    std::memset(uuid, device, 16);
    return enter("cuDeviceGetUuid", false);
}

EXPORT int cuDeviceGetUuid_v2(void* uuid, int device) { return cuDeviceGetUuid(uuid, device); }

EXPORT int cuDeviceTotalMem_v2(size_t* nbytes, int) {
    *nbytes = size_t{80} << 30;
    return enter("cuDeviceTotalMem_v2", false);
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == kMajor ? 9 : attribute == kBus ? device : 0;
    return enter("cuDeviceGetAttribute", false);
}

EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return enter("cuDevicePrimaryCtxGetState", false);
}

EXPORT int cuCtxGetCurrent(void** context) {
    *context = current.empty() ? nullptr : current.back();
    return enter("cuCtxGetCurrent", false);
}

EXPORT int cuCtxSetCurrent(void* context) {
    if (!current.empty()) current.pop_back();
    if (context != nullptr) current.push_back(context);
    return enter("cuCtxSetCurrent", false);
}

EXPORT int cuCtxCreate_v2(void** context, unsigned, int device) {
    *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
    current.push_back(*context);
    return enter("cuCtxCreate_v2", false);
}

EXPORT int cuCtxDestroy_v2(void* context) {
    if (!current.empty() && current.back() == context) current.pop_back();
    return enter("cuCtxDestroy_v2", false);
}

EXPORT int cuCtxGetDevice(int* device) {
    if (const int result = enter("cuCtxGetDevice")) return result;
    *device = static_cast<int>(reinterpret_cast<intptr_t>(current.back())) - 1;
    return kSuccess;
}

EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return enter("cuCtxGetStreamPriorityRange");
}

EXPORT int cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
    return cuStreamCreate(stream, flags);
}

EXPORT int cuMemHostAlloc(void** memory, size_t nbytes, unsigned) {
    if (const int result = enter("cuMemHostAlloc")) return result;
    *memory = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    return kSuccess;
}

EXPORT int cuMemAllocHost_v2(void** memory, size_t nbytes) {
    return cuMemHostAlloc(memory, nbytes, 0);
}

EXPORT int cuMemFreeHost(void* memory) {
    std::free(memory);
    return enter("cuMemFreeHost");
}

EXPORT int cuMemHostGetDevicePointer_v2(Address* address, void* memory, unsigned) {
    *address = reinterpret_cast<Address>(memory);
    return enter("cuMemHostGetDevicePointer_v2");
}

EXPORT int cuPointerGetAttribute(void* out, int attribute, Address address) {
    if (const int result = enter("cuPointerGetAttribute")) return result;
    const auto [begin, nbytes] = allocation_of(address);
    if (nbytes == 0) return kInvalidValue;
    switch (attribute) {
        case kContext:
            give(out, reinterpret_cast<void*>(1));
            break;
        case kMemoryType:
            give(out, kInDevice);
            break;
        case kDevicePointer:
            give(out, address);
            break;
        case kIsManaged:
        case kOrdinal:
            give(out, 0);
            break;
        case kRangeStart:
            give(out, begin);
            break;
        case kRangeSize:
            give(out, nbytes);
            break;
        case kMapped:
            give(out, 1);
            break;
        default:
            return kNotSupported;
    }
    return kSuccess;
}

EXPORT int cuPointerGetAttributes(unsigned count, int* attributes, void** out, Address address) {
    for (unsigned i = 0; i < count; ++i)
        if (const int result = cuPointerGetAttribute(out[i], attributes[i], address)) return result;
    return kSuccess;
}

EXPORT int cuMemGetAddressRange_v2(Address* out, size_t* size, Address address) {
    if (const int result = enter("cuMemGetAddressRange_v2")) return result;
    const auto [begin, nbytes] = allocation_of(address);
    if (nbytes == 0) return kNotFound;
    if (out != nullptr) *out = begin;
    if (size != nullptr) *size = nbytes;
    return kSuccess;
}

EXPORT int cuMemcpy(Address target, Address source, size_t nbytes) {
    return copy_and_wait("cuMemcpy", target, source, nbytes);
}

EXPORT int cuMemcpyAsync(Address target, Address source, size_t nbytes, void* stream) {
    return copy_any("cuMemcpyAsync", target, source, nbytes, stream);
}

EXPORT int cuMemcpyDtoH_v2(void* target, Address source, size_t nbytes) {
    return copy_and_wait("cuMemcpyDtoH_v2", reinterpret_cast<Address>(target), source, nbytes);
}

EXPORT int cuMemcpyHtoD_v2(Address target, const void* source, size_t nbytes) {
    return copy_and_wait("cuMemcpyHtoD_v2", target, reinterpret_cast<Address>(source), nbytes);
}

EXPORT int cuPointerSetAttribute(const void*, int, Address) {
    return enter("cuPointerSetAttribute");
}

EXPORT int cuMemsetD8Async(Address target, unsigned char value, size_t nbytes, void* stream) {
    if (const int result = enter("cuMemsetD8Async")) return result;
    stub_kernel(stream, reinterpret_cast<void*>(target), nbytes, value, 0);
    return kSuccess;
}

// Nothing tells the stream that the host has changed the word: it looks.
EXPORT int cuStreamWaitValue32_v2(void* stream, Address word, uint32_t value, unsigned flags) {
    if (const int result = enter("cuStreamWaitValue32_v2")) return result;
    if (word % sizeof value != 0 || flags != kAtLeast) return kInvalidValue;
    Work work{kLaunch};
    work.launched = [at = reinterpret_cast<const uint32_t*>(word), value] {
        while (static_cast<int32_t>(__atomic_load_n(at, __ATOMIC_ACQUIRE) - value) < 0)
            std::this_thread::sleep_for(std::chrono::microseconds(100));
    };
    queue(stream, work);
    return kSuccess;
}

#define NOT_SUPPORTED(name)   \
    EXPORT int name() {       \
        enter(#name, false);  \
        return kNotSupported; \
    }
NOT_SUPPORTED(cuCtxEnablePeerAccess)
NOT_SUPPORTED(cuDeviceCanAccessPeer)
NOT_SUPPORTED(cuIpcCloseMemHandle)
NOT_SUPPORTED(cuIpcGetEventHandle)
NOT_SUPPORTED(cuIpcGetMemHandle)
NOT_SUPPORTED(cuIpcOpenEventHandle)
NOT_SUPPORTED(cuIpcOpenMemHandle_v2)
NOT_SUPPORTED(cuLaunchHostFunc)
NOT_SUPPORTED(cuMemAllocManaged)
NOT_SUPPORTED(cuMemGetHandleForAddressRange)
NOT_SUPPORTED(cuMemcpyPeer)
NOT_SUPPORTED(cuMemcpyPeerAsync)
NOT_SUPPORTED(cuMemsetD8_v2)
NOT_SUPPORTED(cuGetExportTable)
NOT_SUPPORTED(cuStreamWaitValue32)
NOT_SUPPORTED(cuStreamWriteValue32)
NOT_SUPPORTED(cuStreamWriteValue32_v2)
