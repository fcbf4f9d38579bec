// Devices for torch whose memory is the host's: tensors lie on them, move to and from them, are
// views, are pickled with their name, and everything else is computed on the CPU. So the ways of
// tensors on GPUs can be gone without one: their memory is copied by the stub of the driver
// (cuda.cc). What torch copies or computes is done at once, after what the current stream has been
// given. Loaded by torch.ops.load_library; it must not know what is tested.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
const c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

using Sizes = c10::IntArrayRef;
using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using Device = std::optional<c10::Device>;
using Flag = std::optional<bool>;
using Format = std::optional<c10::MemoryFormat>;

std::atomic<int64_t> alive{0};
std::atomic<void (*)(int)> before_copy{nullptr};
thread_local bool computes = false;
thread_local c10::DeviceIndex current = 0;

void give_back(void* memory) {
    if (memory != nullptr) --alive;
    std::free(memory);
}

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* memory = nullptr;
        if (nbytes > 0) {
            memory = std::aligned_alloc(512, (nbytes + 511) / 512 * 512);
            ++alive;
        }
        return {memory, memory, &give_back, c10::Device(kKind, current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void* target, const void* source, size_t nbytes) const override {
        std::memcpy(target, source, nbytes);
    }
};
Memory memory;
REGISTER_ALLOCATOR(kKind, &memory)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    bool isBuilt() const { return true; }
    bool isAvailable() const { return true; }
    c10::Device getDeviceFromPtr(void*) const override { return {kKind, 0}; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        const c10::DeviceGuard guard(storage.device());
        c10::DataPtr grown = memory.allocate(nbytes);
        std::memcpy(grown.get(), storage.data(), std::min(nbytes, storage.nbytes()));
        storage.set_data_ptr_noswap(std::move(grown));
        storage.set_nbytes(nbytes);
    }
};
Hooks hooks;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kKind; }
    c10::Device getDevice() const override { return {kKind, current}; }
    c10::Device exchangeDevice(c10::Device device) const override {
        return {kKind, std::exchange(current, device.index())};
    }
    void setDevice(c10::Device device) const override { current = device.index(); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        current = device.index();
    }
    c10::Stream getStream(c10::Device device) const noexcept override {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

at::Tensor empty(Sizes sizes, Dtype dtype, Layout, Device device, Flag, Format format) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(sizes, &memory, kKey, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, Dtype dtype, Layout, Device device, Flag) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(sizes, strides, &memory, kKey,
                                             c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& tensor) {
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                         tensor.options().device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
    const bool queued = computes || (!source.is_cpu() && !target.is_cpu());
    if (void (*wait)(int) = before_copy.load()) wait(queued);
    const at::Tensor into = target.is_cpu() ? target : on_cpu(target);
    into.copy_(source.is_cpu() ? source : on_cpu(source));
    return target;
}

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage storage, int64_t offset, Sizes sizes,
                        Sizes strides) {
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    if (strides.size() == sizes.size())
        impl->set_sizes_and_strides(sizes, strides);
    else
        impl->set_sizes_contiguous(sizes);
    return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, c10::Storage storage) {
    const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
    return set_storage(tensor, std::move(storage), 0, count, {});
}

const at::Tensor& resize(const at::Tensor& tensor, Sizes sizes, Format) {
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(sizes);
    const auto items = static_cast<size_t>(impl->storage_offset() + impl->numel());
    const size_t nbytes = items * impl->itemsize();
    if (nbytes > impl->storage().nbytes()) hooks.resizePrivateUse1Bytes(impl->storage(), nbytes);
    return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    if (source.sizes() != target.sizes()) resize(target, source.sizes(), {});
    return copy_from(source, target, false);
}

void compute_on_cpu(const c10::OperatorHandle& op, c10::Stack* stack) {
    const bool within = std::exchange(computes, true);
    at::native::cpu_fallback(op, stack);
    computes = within;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", TORCH_FN(empty));
    m.impl("empty_strided", TORCH_FN(empty_strided));
    m.impl("resize_", TORCH_FN(resize));
    m.impl("_copy_from", TORCH_FN(copy_from));
    m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    m.impl("view", TORCH_FN(at::native::view));
    m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
    m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

const bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    return true;
}();

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}

// How many pieces of memory tensors hold.
extern "C" __attribute__((visibility("default"))) int64_t stub_pieces_alive() { return alive; }

// Called before every copy of torch's own: waits for the current stream. It is told whether a GPU
// would queue the copy, while the host goes on.
extern "C" __attribute__((visibility("default"))) void stub_before_copy(void (*wait)(int)) {
    before_copy = wait;
}
