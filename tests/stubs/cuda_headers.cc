// Compiled where NVIDIA's cuda.h is at hand, and never run: what csrc/gpu/cuda_shim.h declares of
// the driver is what that header declares. Handles are opaque pointers there and here; enumerations
// are as wide as our integers.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "gpu/cuda_shim.h"

namespace {

template <typename Ours, typename Theirs>
constexpr bool same_value() {
    if (std::is_pointer_v<Ours> != std::is_pointer_v<Theirs>) return false;
    return sizeof(Ours) == sizeof(Theirs) &&
           std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
}

// Of a pointer also what it points to, where both tell.
template <typename Ours, typename Theirs>
constexpr bool same() {
    if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
        using Our = std::remove_pointer_t<Ours>;
        using Their = std::remove_pointer_t<Theirs>;
        if constexpr (std::is_scalar_v<Our> && std::is_scalar_v<Their>)
            return std::is_const_v<Our> == std::is_const_v<Their> &&
                   same_value<std::remove_const_t<Our>, std::remove_const_t<Their>>();
        else
            return std::is_void_v<Our> == std::is_void_v<Their>;
    } else {
        return same_value<Ours, Theirs>();
    }
}

template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
constexpr bool same_function(OurResult (*)(Ours...), TheirResult (*)(Theirs...)) {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs))
        return false;
    else
        return same<OurResult, TheirResult>() && (same<Ours, Theirs>() && ...);
}

using namespace fastckpt::cuda;
static_assert(kSuccess == CUDA_SUCCESS && kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);

#define SAME(name, symbol, arguments)                                       \
    static_assert(same_function(static_cast<Result(*) arguments>(nullptr),  \
                                static_cast<decltype(&::symbol)>(nullptr)), \
                  #symbol " is declared otherwise");
FASTCKPT_CUDA_FUNCTIONS(SAME)

#if CUDA_VERSION >= 12080
static_assert(kSourceInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(kCopyBesideCompute == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
static_assert(sizeof(CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(CopyAttributes, source_order) ==
              offsetof(CUmemcpyAttributes, srcAccessOrder));
static_assert(offsetof(CopyAttributes, source_hint) == offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(CopyAttributes, target_hint) == offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
#endif
#if CUDA_VERSION >= 12080 && CUDA_VERSION < 13000
FASTCKPT_CUDA_LATER_FUNCTIONS(SAME)
#endif

}  // namespace
