// Transfers by cuFile, and through the host instead: see gds_sink.h.
#include "gds/gds_sink.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "check.h"

namespace fastckpt {

namespace {

constexpr size_t kDevicePage = 65536;  // a GPU pins memory in units of this
constexpr size_t kBufferBytes = size_t{8} << 20;
constexpr int kInterruptionsMax = 8;

bool ends_at(int fd, uint64_t offset) {
    struct stat status{};
    return fstat(fd, &status) == 0 && static_cast<uint64_t>(status.st_size) == offset;
}

uint64_t number(const std::byte* data) { return reinterpret_cast<uint64_t>(data); }

std::byte* aligned(uint64_t address) {
    return reinterpret_cast<std::byte*>((address + kDevicePage - 1) / kDevicePage * kDevicePage);
}

}  // namespace

GdsBlocks::GdsBlocks(std::shared_ptr<const cufile::Library> library,
                     std::shared_ptr<DeviceQueue> queue, size_t count, size_t block_bytes)
    : library_(std::move(library)),
      queue_(std::move(queue)),
      count_(count),
      block_bytes_(block_bytes),
      memory_(queue_, count * block_bytes + kDevicePage),
      base_(aligned(memory_.address())) {
    CHECK(count > 0 && block_bytes > 0 && block_bytes % kPageBytes == 0);
    const DeviceQueue::Current current(*queue_);
    queue_->require(current.result(), "context");
    const cufile::Error error = library_->buf_register(base_, count_ * block_bytes_, 0);
    if (error.code != 0) refusal_ = "cuFileBufRegister: " + library_->text(error);
}

GdsBlocks::~GdsBlocks() {
    const DeviceQueue::Current current(*queue_);
    if (refusal_.empty()) library_->buf_deregister(base_);
    library_.reset();  // who closes cuFile needs a context: without, its pinned memory stays pinned
}

uint64_t GdsBlocks::address(size_t index) const {
    CHECK(index < count_);
    return number(base_) + index * block_bytes_;
}

bool GdsBlocks::contains(const std::byte* data, size_t nbytes) const {
    const uint64_t begin = number(base_), end = begin + count_ * block_bytes_;
    const uint64_t first = number(data), last = first + nbytes;
    if (last <= begin || first >= end) return false;
    CHECK(first >= begin && last <= end);
    return true;
}

std::unique_ptr<HostMemory> GdsBlocks::take_buffer() {
    {
        const Lock lock(mu_);
        if (!buffers_.empty()) {
            auto taken = std::move(buffers_.back());
            buffers_.pop_back();
            return taken;
        }
    }
    return std::make_unique<HostMemory>(queue_, std::min(kBufferBytes, block_bytes_));
}

void GdsBlocks::give_buffer(std::unique_ptr<HostMemory> buffer) {
    const Lock lock(mu_);
    buffers_.push_back(std::move(buffer));
}

GdsSink::GdsSink(int fd, std::shared_ptr<GdsBlocks> blocks, Backend& threads)
    : FileSink(threads),
      fd_(fd),
      blocks_(std::move(blocks)),
      transfer_([this](const Op& op, std::byte* data, size_t nbytes, uint64_t offset) {
          return transfer(op, data, nbytes, offset);
      }) {
    const int flags = fcntl(fd, F_GETFL);
    report_.fallback_reason = blocks_->refusal();
    if (report_.fallback_reason.empty() && (flags == -1 || (flags & O_DIRECT) == 0))
        report_.fallback_reason = "the file was not opened with O_DIRECT";
    if (!report_.fallback_reason.empty()) return;
    const DeviceQueue::Current current(*blocks_->queue());
    cufile::Descriptor descriptor{};
    descriptor.type = cufile::kHandleOfDescriptor;
    descriptor.handle.fd = fd;
    const cufile::Error error = blocks_->library().handle_register(&handle_, &descriptor);
    if (error.code == 0) return;
    handle_ = nullptr;
    report_.fallback_reason = "cuFileHandleRegister: " + blocks_->library().text(error);
}

GdsReport GdsSink::end() {
    const Lock lock(mu_);
    CHECK(busy_ == 0);
    deregister();
    return report_;
}

GdsMode GdsSink::mode() const {
    {
        const Lock lock(mu_);
        if (!report_.fallback_reason.empty()) return {false, report_.fallback_reason};
    }
    return gds_mode(blocks_->library().properties(), file_system_of(fd_));
}

void GdsSink::deregister() {
    if (handle_ == nullptr) return;
    const DeviceQueue::Current current(*blocks_->queue());
    blocks_->library().handle_deregister(std::exchange(handle_, nullptr));
}

// Makes one attempt; returns bytes or -errno. If cuFile refuses, the host does it at once.
ssize_t GdsSink::transfer(const Op& op, std::byte* data, size_t nbytes, uint64_t offset) {
    if (!blocks_->contains(data, nbytes)) return transfer_by_syscall(op, data, nbytes, offset);
    Lock lock(mu_);
    const bool direct = report_.fallback_reason.empty();
    ++busy_;
    lock.unlock();

    std::string refusal;
    ssize_t direct_result = 0, host_result = 0;
    if (direct) direct_result = by_cufile(op, data, nbytes, offset, &refusal);
    const bool by_hand = !direct || !refusal.empty();
    if (by_hand) host_result = by_host(op, data, nbytes, offset, &refusal);

    lock.lock();
    if (report_.fallback_reason.empty()) report_.fallback_reason = refusal;
    report_.direct_bytes +=
        by_hand ? 0 : static_cast<uint64_t>(std::max<ssize_t>(direct_result, 0));
    report_.host_bytes += static_cast<uint64_t>(std::max<ssize_t>(host_result, 0));
    --busy_;
    return by_hand ? host_result : direct_result;
}

// Returns bytes or -EINTR; or sets `refusal`, and nothing counts as transferred.
ssize_t GdsSink::by_cufile(const Op& op, std::byte* data, size_t nbytes, uint64_t offset,
                           std::string* refusal) const {
    const cufile::Library& library = blocks_->library();
    const bool write = op.kind == Op::Kind::write;
    const auto at = static_cast<off_t>(offset);
    const auto within = static_cast<off_t>(data - blocks_->base());
    const DeviceQueue::Current current(*blocks_->queue());
    if (current.result() != cuda::kSuccess) {
        *refusal = "context: " + blocks_->queue()->driver().text(current.result());
        return 0;
    }
    errno = 0;
    const ssize_t result = write ? library.write(handle_, blocks_->base(), nbytes, at, within)
                                 : library.read(handle_, blocks_->base(), nbytes, at, within);
    const int error = errno;
    const bool at_end = result == 0 && !write;
    // Part of a page counts as the end of the file for a direct read, so it must be at the end.
    const bool torn = result > 0 && static_cast<size_t>(result) < nbytes &&
                      result % kPageBytes != 0 && !ends_at(op.fd, offset + result);
    if (!torn && (at_end || (result > 0 && static_cast<size_t>(result) <= nbytes))) return result;
    if (result == -1 && error == EINTR && op.retries < kInterruptionsMax) return -EINTR;
    *refusal = std::string(write ? "cuFileWrite: " : "cuFileRead: ") +
               (torn         ? "part of a page"
                : result > 0 ? "more bytes than asked for"
                             : library.transfer_text(result, error));
    return 0;
}

// Moves at most a buffer's size. If the device fails, returns -EIO and sets `failure`.
ssize_t GdsSink::by_host(const Op& op, std::byte* data, size_t nbytes, uint64_t offset,
                         std::string* failure) const {
    std::unique_ptr<HostMemory> buffer;
    try {
        buffer = blocks_->take_buffer();
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
    size_t count = std::min(nbytes, buffer->nbytes());
    ssize_t result = 0;
    std::string refusal;
    if (op.kind == Op::Kind::write) {
        refusal = move(op, buffer->data(), data, count);
        if (refusal.empty()) result = transfer_by_syscall(op, buffer->data(), count, offset);
    } else {
        result = transfer_by_syscall(op, buffer->data(), count, offset);
        if (result > 0) refusal = move(op, buffer->data(), data, static_cast<size_t>(result));
    }
    if (!refusal.empty()) {
        result = -EIO;
        if (failure->empty()) *failure = refusal;
    }
    blocks_->give_buffer(std::move(buffer));
    return result;
}

// Copies, and waits until that is done. If the wait fails, the copy may still write to the buffer
// when the next op has it; but that op fails too, since the device keeps such an error.
std::string GdsSink::move(const Op& op, std::byte* host, std::byte* device, size_t nbytes) const {
    DeviceQueue& queue = *blocks_->queue();
    cuda::Result result = op.kind == Op::Kind::write
                              ? queue.copy_to_host(host, number(device), nbytes)
                              : queue.copy_to_device(number(device), host, nbytes);
    DeviceQueue::Mark mark;
    if (result == cuda::kSuccess) result = queue.mark(&mark);
    if (result == cuda::kSuccess) result = queue.wait(mark);
    return result == cuda::kSuccess ? "" : "copy: " + queue.driver().text(result);
}

}  // namespace fastckpt
