// Loads cuFile (GPUDirect Storage) at run time with dlopen, so that the build needs no headers. It
// declares the few functions of libcufile.so.0 that move data between device memory and files. It
// knows the names, types and error numbers of this interface (CUDA 11 to 13), but not the data, or
// the handling of failures. tests/stubs/cufile_headers.cc compares it with NVIDIA's cufile.h.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

#include "gpu/cuda_shim.h"

namespace fastckpt::cufile {

struct Error {  // CUfileError_t, returned by value
    int code;   // CUfileOpError
    cuda::Result cuda;
};

using Handle = void*;  // CUfileHandle_t

constexpr int kHandleOfDescriptor = 1;

struct Descriptor {  // CUfileDescr_t
    int type;
    union {
        int fd;
        void* handle;
    } handle;
    const void* file_system_calls;  // for file systems without the kernel; null
};

struct Properties {  // CUfileDrvProps_t
    struct {
        unsigned major_version, minor_version;  // of nvidia-fs; 0.0 if it is not loaded
        size_t poll_threshold, max_direct_io;
        unsigned status;   // bits: kinds of storage that the driver serves
        unsigned control;  // bits: cuFile's configuration
    } nvfs;
    unsigned features;  // bits
    unsigned max_device_cache, per_buffer_cache, max_device_pinned, max_batch_io;
    unsigned max_batch_io_timeout_ms;
    unsigned later[32];  // room for fields of later releases
};

// Bits of Properties::nvfs.status.
enum Storage : unsigned {
    kLustre = 0,
    kWekaFs = 1,
    kNfs = 2,
    kGpfs = 3,
    kNvme = 4,
    kNvmeOf = 5,
    kScsi = 6,
    kScaleFlux = 7,
    kNvMesh = 8,
    kBeeGfs = 9,
    kNvmeP2p = 11,  // up to CUDA 12
    kScateFs = 12,
    kVirtioFs = 13,  // this and the next from CUDA 13 on
    kPanFs = 14,
};
constexpr unsigned kPosixMode = 2;   // a bit of Properties::nvfs.control
constexpr unsigned kP2pFeature = 4;  // a bit of Properties::features

// Number, name, meaning. Numbers above 5038 differ between releases.
#define FASTCKPT_CUFILE_ERRORS(X)                                                              \
    X(5001, DRIVER_NOT_INITIALIZED, "nvidia-fs is not loaded, and compat mode is not allowed") \
    X(5002, DRIVER_INVALID_PROPS, "invalid property")                                          \
    X(5003, DRIVER_UNSUPPORTED_LIMIT, "a property is out of range")                            \
    X(5004, DRIVER_VERSION_MISMATCH, "nvidia-fs and libcufile do not fit together")            \
    X(5005, DRIVER_VERSION_READ_ERROR, "nvidia-fs does not tell its version")                  \
    X(5006, DRIVER_CLOSING, "the driver is shutting down")                                     \
    X(5007, PLATFORM_NOT_SUPPORTED, "no GPUDirect Storage on this platform")                   \
    X(5008, IO_NOT_SUPPORTED, "no GPUDirect Storage for this file")                            \
    X(5009, DEVICE_NOT_SUPPORTED, "no GPUDirect Storage for this GPU")                         \
    X(5010, NVFS_DRIVER_ERROR, "nvidia-fs refused a call")                                     \
    X(5011, CUDA_DRIVER_ERROR, "the CUDA driver refused a call")                               \
    X(5012, CUDA_POINTER_INVALID, "no device memory")                                          \
    X(5013, CUDA_MEMORY_TYPE_INVALID, "memory of a kind that is not supported")                \
    X(5014, CUDA_POINTER_RANGE_ERROR, "beyond the end of an allocation")                       \
    X(5015, CUDA_CONTEXT_MISMATCH, "another CUDA context")                                     \
    X(5016, INVALID_MAPPING_SIZE, "more than may be pinned")                                   \
    X(5017, INVALID_MAPPING_RANGE, "beyond what is mapped")                                    \
    X(5018, INVALID_FILE_TYPE, "no regular file")                                              \
    X(5019, INVALID_FILE_OPEN_FLAG, "the file was opened with flags that are not supported")   \
    X(5020, DIO_NOT_SET, "the file was not opened with O_DIRECT")                              \
    X(5022, INVALID_VALUE, "an invalid argument")                                              \
    X(5023, MEMORY_ALREADY_REGISTERED, "the memory is registered already")                     \
    X(5024, MEMORY_NOT_REGISTERED, "the memory is not registered")                             \
    X(5025, PERMISSION_DENIED, "no permission for the driver or the file")                     \
    X(5026, DRIVER_ALREADY_OPEN, "the driver is open already")                                 \
    X(5027, HANDLE_NOT_REGISTERED,                                                             \
      "the file's disk is unknown: cuFile needs udev's entry for it in /run/udev, which a "    \
      "container gets by mounting the host's, and serves no tmpfs")                            \
    X(5028, HANDLE_ALREADY_REGISTERED, "the file is registered already")                       \
    X(5029, DEVICE_NOT_FOUND, "there is no such GPU")                                          \
    X(5030, INTERNAL_ERROR, "an internal error")                                               \
    X(5031, GETNEWFD_FAILED, "no more file descriptors")                                       \
    X(5033, NVFS_SETUP_ERROR, "nvidia-fs could not be set up")                                 \
    X(5034, IO_DISABLED, "cufile.json turns GPUDirect Storage off for this file")              \
    X(5035, BATCH_SUBMIT_FAILED, "a batch could not be submitted")                             \
    X(5036, GPU_MEMORY_PINNING_FAILED, "device memory could not be pinned")                    \
    X(5037, BATCH_FULL, "the batch is full")                                                   \
    X(5038, ASYNC_NOT_SUPPORTED, "no transfers in a stream's order")

#define FASTCKPT_CUFILE_CODE(code, name, meaning) name = code,
enum Code : int { FASTCKPT_CUFILE_ERRORS(FASTCKPT_CUFILE_CODE) };
#undef FASTCKPT_CUFILE_CODE

// Result, name here, name in the library, arguments. Transfers return bytes, -1 and errno if the
// file system failed, or a negated Code.
#define FASTCKPT_CUFILE_FUNCTIONS(X)                                                        \
    X(Error, driver_open, cuFileDriverOpen, ())                                             \
    X(Error, driver_properties, cuFileDriverGetProperties, (Properties * properties))       \
    X(Error, handle_register, cuFileHandleRegister, (Handle * handle, Descriptor * file))   \
    X(void, handle_deregister, cuFileHandleDeregister, (Handle handle))                     \
    X(Error, buf_register, cuFileBufRegister, (const void* base, size_t nbytes, int flags)) \
    X(Error, buf_deregister, cuFileBufDeregister, (const void* base))                       \
    X(ssize_t, read, cuFileRead,                                                            \
      (Handle handle, void* base, size_t nbytes, off_t offset, off_t base_offset))          \
    X(ssize_t, write, cuFileWrite,                                                          \
      (Handle handle, const void* base, size_t nbytes, off_t offset, off_t base_offset))

// Functions that a release may lack; they are null then.
#define FASTCKPT_CUFILE_OPTIONAL(X)                     \
    X(Error, driver_close_v2, cuFileDriverClose_v2, ()) \
    X(Error, driver_close_v1, cuFileDriverClose, ())    \
    X(Error, get_version, cuFileGetVersion, (int* version))

// Thrown if there is no cuFile that can be used; the text says why.
class Unavailable : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The functions of one library, whose driver is open as long as this lives: see NVIDIA's cuFile API
// reference. After fork() a child must not use them.
class Library {
  public:
    // Loads `path` ("libcufile.so.0") and opens its driver. Throws Unavailable, even if `modules`
    // cannot be read: cuFileDriverOpen of 1.15 to 1.20 looks for nvidia-fs there and never returns.
    Library(const std::string& path, std::shared_ptr<const cuda::Driver> driver,
            const std::string& modules = "/proc/modules");
    ~Library();
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;
    // The library stays loaded, because of its threads and exit handlers.

    // "CU_FILE_CUDA_DRIVER_ERROR (5011): the CUDA driver refused a call: CUDA_ERROR_..."
    std::string text(Error error) const;
    // The text for a transfer that returned `result` and set errno.
    std::string transfer_text(ssize_t result, int error_number) const;
    // 1140 for 1.14; 0 if the library does not tell.
    int version() const;
    // Zeros if the library refuses.
    Properties properties() const;

#define FASTCKPT_CUFILE_MEMBER(result, name, symbol, arguments) result(*name) arguments = nullptr;
    FASTCKPT_CUFILE_FUNCTIONS(FASTCKPT_CUFILE_MEMBER)
    FASTCKPT_CUFILE_OPTIONAL(FASTCKPT_CUFILE_MEMBER)
#undef FASTCKPT_CUFILE_MEMBER

  private:
    const std::shared_ptr<const cuda::Driver> driver_;
    bool opened_ = false;
};

}  // namespace fastckpt::cufile
