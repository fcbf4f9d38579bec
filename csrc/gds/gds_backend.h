// Blocks of device memory, and a backend that moves them to and from files by cuFile, or through
// the host's memory if cuFile refuses: a refusal costs time and never an op. It must not know what
// the blocks hold, which op comes next, or when a block's contents are complete.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/backend.h"
#include "gds/cufile_shim.h"
#include "gds/gds_mode.h"
#include "gpu/device_memory.h"
#include "gpu/device_queue.h"

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
    const std::shared_ptr<DeviceQueue>& queue() const { return queue_; }

  private:
    std::shared_ptr<const cufile::Library> library_;
    const std::shared_ptr<DeviceQueue> queue_;
    const size_t count_, block_bytes_;
    const DeviceMemory memory_;
    std::byte* const base_;
    std::string refusal_;
};

// How a file's bytes were moved.
struct GdsReport {
    uint64_t direct_bytes = 0;  // by cuFile, in whichever mode
    uint64_t host_bytes = 0;    // from and to the blocks, through the host's memory
    std::string fallback_reason;
};

// Moves ops whose data lies in the blocks by cuFile, all others, in host memory, by system calls.
// cuFileWrite reads memory at once and in no stream's order: a write may be submitted only when the
// copies that fill the block are done, and a block may be used only when its read has finished.
class GdsBackend final : public Backend {
  public:
    GdsBackend(std::shared_ptr<GdsBlocks> blocks, unsigned threads);
    ~GdsBackend() override;

    void submit(Op* op) override;
    void withdraw(const Patience* job) override { threads_->withdraw(job); }
    void close() override;
    const char* name() const override { return "gds"; }

    // Registers a descriptor, before its first op with data in the blocks. If that is refused, or
    // the file was not opened with O_DIRECT, its ops go through the host.
    void begin_file(int fd);
    // Deregisters a descriptor, after its last such op has finished and before it is closed. The
    // report is empty for one that was not begun.
    GdsReport end_file(int fd);
    // Why cuFile first refused any file; empty if it did not.
    std::string fallback_reason() const;
    // The mode that cuFile claims for a file.
    GdsMode mode(int fd) const;

  private:
    struct File {
        cufile::Handle handle = nullptr;  // null if it was not registered
        unsigned busy = 0;
        GdsReport report;
    };

    ssize_t transfer(const Op& op, std::byte* data, size_t nbytes, uint64_t offset);
    ssize_t by_cufile(cufile::Handle handle, const Op& op, std::byte* data, size_t nbytes,
                      uint64_t offset, std::string* refusal) const;
    ssize_t by_host(const Op& op, std::byte* data, size_t nbytes, uint64_t offset,
                    std::string* failure);
    std::string move(const Op& op, std::byte* host, std::byte* device, size_t nbytes) const;
    std::unique_ptr<HostMemory> take_buffer();
    void refuse(File& file, const std::string& reason);
    void deregister(const File& file) const;

    const std::shared_ptr<GdsBlocks> blocks_;
    mutable std::mutex mu_;
    // State below is protected by mu_.
    std::unordered_map<int, File> files_;
    std::vector<std::unique_ptr<HostMemory>> buffers_;  // one for each thread that needed one
    std::string first_refusal_;
    // The last member, so that its threads end before the others are destroyed.
    const std::shared_ptr<Backend> threads_;
};

std::shared_ptr<GdsBackend> gds_backend(std::shared_ptr<GdsBlocks> blocks, unsigned threads);

}  // namespace fastckpt
