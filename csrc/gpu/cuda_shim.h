// Loads the CUDA driver at run time with dlopen, so that the build needs neither headers nor a
// toolkit. It declares the few functions of libcuda.so.1 that staging needs. It knows the names and
// types of this interface (CUDA 11 to 13), but not the data that is copied.
// tests/stubs/cuda_headers.cc compares it with NVIDIA's cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastckpt::cuda {

using Result = int;                        // CUresult
using Device = int;                        // CUdevice
using DeviceAddress = unsigned long long;  // CUdeviceptr
using Context = struct ContextTag*;        // CUcontext: the primary one, as torch's
using Stream = struct StreamTag*;          // CUstream; also torch's cuda_stream
using Event = struct EventTag*;            // CUevent
using Module = struct ModuleTag*;          // CUmodule
using Function = struct FunctionTag*;      // CUfunction

constexpr Result kSuccess = 0;
constexpr Result kDeinitialized = 4;  // the driver has shut down, at exit
constexpr Result kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingSync = 1;  // a waiting thread sleeps instead of spinning
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;  // for the contexts of all devices
constexpr int kCaptureModeRelaxed = 2;
constexpr int kSourceInStreamOrder = 1;     // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
constexpr unsigned kCopyBesideCompute = 1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

// CUmemcpyAttributes. Locations are hints, which only managed memory needs.
struct CopyAttributes {
    int source_order;
    int source_hint[2], target_hint[2];
    unsigned flags;
};

// Name here, name in the library, arguments. All return a Result.
#define FASTCKPT_CUDA_FUNCTIONS(X)                                                             \
    X(init, cuInit, (unsigned flags))                                                          \
    X(driver_version, cuDriverGetVersion, (int* version))                                      \
    X(error_name, cuGetErrorName, (Result result, const char** text))                          \
    X(error_string, cuGetErrorString, (Result result, const char** text))                      \
    X(device_get, cuDeviceGet, (Device * device, int ordinal))                                 \
    X(device_pci_bus_id, cuDeviceGetPCIBusId, (char* text, int nbytes, Device device))         \
    X(primary_context_retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))    \
    X(primary_context_release, cuDevicePrimaryCtxRelease_v2, (Device device))                  \
    X(context_push, cuCtxPushCurrent_v2, (Context context))                                    \
    X(context_pop, cuCtxPopCurrent_v2, (Context * context))                                    \
    X(host_register, cuMemHostRegister_v2, (void* memory, size_t nbytes, unsigned flags))      \
    X(host_unregister, cuMemHostUnregister, (void* memory))                                    \
    X(stream_create, cuStreamCreate, (Stream * stream, unsigned flags))                        \
    X(stream_destroy, cuStreamDestroy_v2, (Stream stream))                                     \
    X(stream_synchronize, cuStreamSynchronize, (Stream stream))                                \
    X(stream_wait_event, cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))      \
    X(stream_is_capturing, cuStreamIsCapturing, (Stream stream, int* status))                  \
    X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))                   \
    X(event_create, cuEventCreate, (Event * event, unsigned flags))                            \
    X(event_record, cuEventRecord, (Event event, Stream stream))                               \
    X(event_query, cuEventQuery, (Event event))                                                \
    X(event_synchronize, cuEventSynchronize, (Event event))                                    \
    X(event_elapsed, cuEventElapsedTime, (float* ms, Event begin, Event end))                  \
    X(event_destroy, cuEventDestroy_v2, (Event event))                                         \
    X(copy_to_host, cuMemcpyDtoHAsync_v2,                                                      \
      (void* target, DeviceAddress source, size_t nbytes, Stream stream))                      \
    X(copy_to_device, cuMemcpyHtoDAsync_v2,                                                    \
      (DeviceAddress target, const void* source, size_t nbytes, Stream stream))                \
    X(copy_on_device, cuMemcpyDtoDAsync_v2,                                                    \
      (DeviceAddress target, DeviceAddress source, size_t nbytes, Stream stream))              \
    X(mem_alloc, cuMemAlloc_v2, (DeviceAddress * address, size_t nbytes))                      \
    X(mem_free, cuMemFree_v2, (DeviceAddress address))                                         \
    X(module_load_data, cuModuleLoadData, (Module * module, const void* image))                \
    X(module_unload, cuModuleUnload, (Module module))                                          \
    X(module_get_function, cuModuleGetFunction,                                                \
      (Function * function, Module module, const char* name))                                  \
    X(launch_kernel, cuLaunchKernel,                                                           \
      (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
       unsigned block_y, unsigned block_z, unsigned shared_nbytes, Stream stream,              \
       void** parameters, void** extra))

// Functions of drivers since CUDA 12.8; null in older ones. Later headers give this name to another
// function, but the libraries still have this one.
#define FASTCKPT_CUDA_LATER_FUNCTIONS(X)                                                          \
    X(copy_batch, cuMemcpyBatchAsync,                                                             \
      (DeviceAddress * targets, DeviceAddress * sources, size_t* sizes, size_t count,             \
       CopyAttributes* attributes, size_t* first_copies, size_t attributes_count, size_t* failed, \
       Stream stream))

// Thrown if there is no driver that can be used; the text says why.
class Unavailable : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The functions of one library: see NVIDIA's CUDA Driver API reference manual.
class Driver {
  public:
    // Loads `library` ("libcuda.so.1") and initialises it. Throws Unavailable.
    explicit Driver(const std::string& library);
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;
    // The library stays loaded, because of its threads and exit handlers.

    // "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
    std::string text(Result result) const;
    int version() const;

#define FASTCKPT_CUDA_MEMBER(name, symbol, arguments) Result(*name) arguments = nullptr;
    FASTCKPT_CUDA_FUNCTIONS(FASTCKPT_CUDA_MEMBER)
    FASTCKPT_CUDA_LATER_FUNCTIONS(FASTCKPT_CUDA_MEMBER)
#undef FASTCKPT_CUDA_MEMBER
};

}  // namespace fastckpt::cuda
