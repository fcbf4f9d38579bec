// Clones what a file has in common with another one, so that both share it on the disk, in front of
// the backend that writes the rest. It knows bytes, descriptors, offsets and hashes; it does not
// know which file the other one is, nor checksums.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/backend.h"
#include "polyval/polyval.h"

namespace fastckpt {

// Has a range of `target` share its blocks with the same range of `source`: FICLONERANGE, or a test
// double. Returns errno, or 0.
using Clone = std::function<int(int target, int source, uint64_t offset, uint64_t nbytes)>;
int clone_by_ioctl(int target, int source, uint64_t offset, uint64_t nbytes);

// The comparison of one file with another, block by block, by the hashes of chunks.
class Cloner {
  public:
    // The file has `nbytes`; the last block and the last chunk may be shorter than the others.
    // `other` is the file to clone from, and `old` the hashes of its chunks under `key`, as
    // hashes() returns them, as far as they can be cloned; with "" everything is left to write.
    Cloner(uint64_t nbytes, size_t block_bytes, size_t chunk_bytes, const Polyval& key, int other,
           std::string old, Clone clone);

    // Clones the chunks of a block that the other file has in the same place, and returns what is
    // left to write: runs [begin, end) of the op's bytes. Called by several threads, each with a
    // block of its own. After the first clone that fails, everything is left to write.
    using Parts = std::vector<std::pair<size_t, size_t>>;
    Parts rest(const Op& op);

    // Valid after the last block.
    // The hashes of all chunks, of 16 bytes each; kUnknown stands for those that were not computed.
    const std::string& hashes() const { return hashes_; }
    // The bytes that were cloned of each block.
    const std::vector<uint64_t>& cloned() const { return cloned_; }
    // The errno and the offset of the clone that failed first; 0 if none has.
    std::pair<int, uint64_t> refusal() const;

  private:
    void hash(const std::byte* data, size_t nbytes, size_t first, size_t chunk);
    bool is_equal(size_t chunk) const;
    bool hash_block(const std::byte* data, size_t nbytes, size_t first, size_t count);
    bool clone(int fd, uint64_t offset, uint64_t nbytes);

    const uint64_t nbytes_;
    const size_t block_bytes_;
    const size_t chunk_bytes_;
    const Polyval key_;
    const int other_;
    const std::string old_;
    const Clone clone_;
    // Each block's thread writes its own part of these.
    std::string hashes_;
    std::vector<uint64_t> cloned_;
    std::atomic<bool> refused_{false};
    mutable std::mutex mu_;
    std::pair<int, uint64_t> refusal_{0, 0};  // protected by mu_
};

// Has a file's cloner see each write, and passes what that leaves on to another backend.
class CloningBackend final : public Backend {
  public:
    CloningBackend(std::shared_ptr<Backend> inner, unsigned threads);
    void add(int fd, std::shared_ptr<Cloner> cloner);
    void remove(int fd);  // no write to it is under way
    void submit(Op* op) override { threads_->submit(op); }
    void close() override { threads_->close(); }
    const char* name() const override { return "cloning"; }

  private:
    void handle(Op& op);

    const std::shared_ptr<Backend> inner_;
    std::mutex mu_;
    std::map<int, std::shared_ptr<Cloner>> cloners_;  // protected by mu_
    const std::shared_ptr<Backend> threads_;          // last, since its threads use the others
};

}  // namespace fastckpt
