// Blocks of device memory, and the sink that moves them to and from a file with cuFile. If cuFile
// refuses, the sink moves them through host memory, so a refusal costs time but no op fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "gds/cufile_shim.h"
#include "gds/gds_mode.h"
#include "gpu/device_memory.h"
#include "gpu/device_queue.h"
#include "mutex.h"

namespace fastckpt {

// Blocks of one size in one piece of device memory. It is registered with cuFile once, since that
// takes milliseconds and space in the device's BAR.
class GdsBlocks {
  public:
    // Throws DeviceError if there is no memory. If cuFile refuses to register it, see refusal().
    GdsBlocks(std::shared_ptr<const cufile::Library> library, std::shared_ptr<DeviceQueue> queue,
              size_t count, size_t block_bytes);
    ~GdsBlocks();
    GdsBlocks(const GdsBlocks&) = delete;
    GdsBlocks& operator=(const GdsBlocks&) = delete;

    size_t count() const { return count_; }
    size_t block_bytes() const { return block_bytes_; }
    uint64_t address(size_t index) const;
    // Whether memory lies in the blocks. CHECKs that it does not lie there in part.
    bool contains(const std::byte* data, size_t nbytes) const;
    // The address of the first block, from which offsets count.
    std::byte* base() const { return base_; }
    // Why cuFile did not register the memory; empty if it did.
    const std::string& refusal() const { return refusal_; }
    const cufile::Library& library() const { return *library_; }
    // A buffer of the host's memory, for what goes through it. Throws std::bad_alloc.
    std::unique_ptr<HostMemory> take_buffer();
    void give_buffer(std::unique_ptr<HostMemory> buffer);
    const std::shared_ptr<DeviceQueue>& queue() const { return queue_; }

  private:
    std::shared_ptr<const cufile::Library> library_;
    const std::shared_ptr<DeviceQueue> queue_;
    const size_t count_, block_bytes_;
    const DeviceMemory memory_;
    std::byte* const base_;
    std::string refusal_;
    Mutex mu_;
    std::vector<std::unique_ptr<HostMemory>> buffers_ GUARDED_BY(mu_);  // free ones
};

// How a file's bytes were moved.
struct GdsReport {
    uint64_t direct_bytes = 0;  // by cuFile, in whichever mode
    uint64_t host_bytes = 0;    // from and to the blocks, through the host's memory
    std::string fallback_reason;
};

// Moves a file's ops whose data lies in the blocks by cuFile, all others, in host memory, by system
// calls. cuFileWrite reads memory at once and in no stream's order: a write may be submitted only
// when the copies that fill the block are done, and a block may be used only when its read has
// finished.
class GdsSink final : public FileSink {
  public:
    // Registers the descriptor. If that is refused, or the file was not opened with O_DIRECT, its
    // ops go through the host.
    GdsSink(int fd, std::shared_ptr<GdsBlocks> blocks, Backend& threads);
    ~GdsSink() override { deregister(); }
    Again handle(Op& op) override { return handle_by(op, transfer_); }

    // Deregisters the descriptor, after its last op has finished and before it is closed.
    GdsReport end();
    // The mode that cuFile claims for the file.
    GdsMode mode() const;

  private:
    ssize_t transfer(const Op& op, std::byte* data, size_t nbytes, uint64_t offset);
    ssize_t by_cufile(const Op& op, std::byte* data, size_t nbytes, uint64_t offset,
                      std::string* refusal) const;
    ssize_t by_host(const Op& op, std::byte* data, size_t nbytes, uint64_t offset,
                    std::string* failure) const;
    std::string move(const Op& op, std::byte* host, std::byte* device, size_t nbytes) const;
    void deregister();

    const int fd_;
    const std::shared_ptr<GdsBlocks> blocks_;
    const Transfer transfer_;
    cufile::Handle handle_ = nullptr;  // null if it is not registered
    mutable Mutex mu_;
    unsigned busy_ GUARDED_BY(mu_) = 0;
    GdsReport report_ GUARDED_BY(mu_);
};

}  // namespace fastckpt
