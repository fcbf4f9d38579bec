// Compiled where NVIDIA's cufile.h is at hand (of CUDA 12 or later), and never run: what
// csrc/gds/cufile_shim.h declares of cuFile is what that header declares. Handles and structures
// behind pointers are opaque there and here; the layouts of structures are compared member by
// member.
#include <cufile.h>

#include <cstddef>
#include <type_traits>

#include "gds/cufile_shim.h"

namespace {

namespace ours = fastckpt::cufile;

template <typename T>
constexpr size_t size_of() {
    if constexpr (std::is_void_v<T>)
        return 0;
    else
        return sizeof(T);
}

template <typename Ours, typename Theirs>
constexpr bool same() {
    if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
        using Our = std::remove_pointer_t<Ours>;
        using Their = std::remove_pointer_t<Theirs>;
        return std::is_const_v<Our> == std::is_const_v<Their> &&
               std::is_void_v<Our> == std::is_void_v<Their> &&
               std::is_class_v<Our> == std::is_class_v<Their>;
    } else {
        return std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
               std::is_class_v<Ours> == std::is_class_v<Theirs> &&
               std::is_signed_v<Ours> == std::is_signed_v<Theirs> &&
               size_of<Ours>() == size_of<Theirs>();
    }
}

template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
constexpr bool same_function(OurResult (*)(Ours...), TheirResult (*)(Theirs...)) {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs))
        return false;
    else
        return same<OurResult, TheirResult>() && (same<Ours, Theirs>() && ...);
}

#define SAME(result, name, symbol, arguments)                               \
    static_assert(same_function(static_cast<result(*) arguments>(nullptr),  \
                                static_cast<decltype(&::symbol)>(nullptr)), \
                  #symbol " is declared otherwise");
using ours::Descriptor, ours::Error, ours::Handle, ours::Properties;
FASTCKPT_CUFILE_FUNCTIONS(SAME)
FASTCKPT_CUFILE_OPTIONAL(SAME)

#define SAME_CODE(code, name, meaning) static_assert(code == ::CU_FILE_##name, #name);
FASTCKPT_CUFILE_ERRORS(SAME_CODE)

#define SAME_MEMBER(our, our_member, their, their_member)                       \
    static_assert(offsetof(our, our_member) == offsetof(their, their_member) && \
                      sizeof(our::our_member) == sizeof(their::their_member),   \
                  #their_member " stands elsewhere");
SAME_MEMBER(Error, code, CUfileError_t, err)
SAME_MEMBER(Error, cuda, CUfileError_t, cu_err)
static_assert(sizeof(Error) == sizeof(CUfileError_t));
SAME_MEMBER(Descriptor, type, CUfileDescr_t, type)
SAME_MEMBER(Descriptor, handle, CUfileDescr_t, handle)
SAME_MEMBER(Descriptor, handle.fd, CUfileDescr_t, handle.fd)
SAME_MEMBER(Descriptor, file_system_calls, CUfileDescr_t, fs_ops)
static_assert(sizeof(Descriptor) == sizeof(CUfileDescr_t));
SAME_MEMBER(Properties, nvfs.major_version, CUfileDrvProps_t, nvfs.major_version)
SAME_MEMBER(Properties, nvfs.minor_version, CUfileDrvProps_t, nvfs.minor_version)
SAME_MEMBER(Properties, nvfs.poll_threshold, CUfileDrvProps_t, nvfs.poll_thresh_size)
SAME_MEMBER(Properties, nvfs.max_direct_io, CUfileDrvProps_t, nvfs.max_direct_io_size)
SAME_MEMBER(Properties, nvfs.status, CUfileDrvProps_t, nvfs.dstatusflags)
SAME_MEMBER(Properties, nvfs.control, CUfileDrvProps_t, nvfs.dcontrolflags)
SAME_MEMBER(Properties, features, CUfileDrvProps_t, fflags)
SAME_MEMBER(Properties, max_device_pinned, CUfileDrvProps_t, max_device_pinned_mem_size)
static_assert(sizeof(CUfileDrvProps_t) <= sizeof(Properties), "they may write beyond ours");

static_assert(ours::kHandleOfDescriptor == CU_FILE_HANDLE_TYPE_OPAQUE_FD);
static_assert(int{ours::kLustre} == CU_FILE_LUSTRE_SUPPORTED);
static_assert(int{ours::kWekaFs} == CU_FILE_WEKAFS_SUPPORTED);
static_assert(int{ours::kNfs} == CU_FILE_NFS_SUPPORTED);
static_assert(int{ours::kGpfs} == CU_FILE_GPFS_SUPPORTED);
static_assert(int{ours::kNvme} == CU_FILE_NVME_SUPPORTED);
static_assert(int{ours::kNvmeOf} == CU_FILE_NVMEOF_SUPPORTED);
static_assert(int{ours::kScsi} == CU_FILE_SCSI_SUPPORTED);
static_assert(int{ours::kScaleFlux} == CU_FILE_SCALEFLUX_CSD_SUPPORTED);
static_assert(int{ours::kNvMesh} == CU_FILE_NVMESH_SUPPORTED);
static_assert(int{ours::kBeeGfs} == CU_FILE_BEEGFS_SUPPORTED);
static_assert(int{ours::kNvmeP2p} == CU_FILE_NVME_P2P_SUPPORTED);
static_assert(int{ours::kScateFs} == CU_FILE_SCATEFS_SUPPORTED);
#ifdef CU_FILE_RDMA_ERR_BASE  // CUDA 13
static_assert(int{ours::kVirtioFs} == CU_FILE_VIRTIOFS_SUPPORTED);
static_assert(int{ours::kPanFs} == CU_FILE_PANFS_SUPPORTED);
static_assert(ours::kPosixMode == CU_FILE_VANILLA_POSIX_IO_MODE);
static_assert(ours::kP2pFeature == CU_FILE_P2P_SUPPORTED);
#endif

}  // namespace
