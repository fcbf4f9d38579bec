// Clones what a file has in common with another one, so that both share it on the disk, in front of
// the backend that writes the rest. What the other file has already as it lies in memory is not
// even staged. It knows bytes, descriptors, offsets and hashes; it must not know which file the
// other one is, nor the checksums of that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/backend.h"
#include "mutex.h"
#include "polyval/polyval.h"

namespace fastckpt {

// Has a range of `target` share its blocks with the same range of `source`; returns errno, or 0.
using Clone = std::function<int(int target, int source, uint64_t offset, uint64_t nbytes)>;
int clone_by_ioctl(int target, int source, uint64_t offset, uint64_t nbytes);

// The comparison of one file with another, block by block, by the hashes of chunks.
class Cloner {
  public:
    using Hashes = std::vector<Polyval>;
    // Ranges [begin, end) of an op's bytes, ascending.
    using Ranges = std::vector<std::pair<size_t, size_t>>;
    // What is left to write of an op: ranges that were staged, and chunks that were not, since the
    // other file has them; they are fetched from there.
    struct Rest {
        Ranges staged;
        Ranges of_other;
    };
    // A failure to read the other file: errno, or 0 if a chunk is not what its hash says; and
    // where.
    using Loss = std::pair<int, uint64_t>;

    // The file has `nbytes`; its last block and its last chunk may be shorter than the others.
    // `other` is the file to clone from, which stays open, and `old` are the hashes of its chunks
    // under `key`, as hashes() returns them, as far as they can be cloned; with none, everything is
    // left to write.
    Cloner(uint64_t nbytes, size_t block_bytes, size_t chunk_bytes, const Polyval& key, int other,
           Hashes old, Clone clone, Transfer read = transfer_by_syscall);

    uint64_t nbytes() const { return nbytes_; }
    size_t chunk_bytes() const { return chunk_bytes_; }
    // The CRC-32 of a chunk, given in memory that nobody changes, if the other file has it. Called
    // for the first chunks of a block in their order. They are not staged then: the op has nothing
    // at `data` for them, and null if nothing of it was staged.
    std::optional<uint32_t> crc_if_known(uint64_t offset, const std::byte* bytes, size_t nbytes);

    // Clones the chunks of a block that the other file has in the same place, and returns what is
    // left to write, with the padding of a direct op. After the first clone that fails, that is
    // everything. Several threads may call it at once, each with a block of its own.
    Rest rest(const Op& op);
    // Reads a chunk of the other file, at an offset, and verifies it; false after a Loss.
    bool fetch(uint64_t offset, std::byte* bytes, size_t nbytes);

    // Valid after the last block.
    // The hashes of all chunks; kUnknown stands for those that were not computed.
    const Hashes& hashes() const { return hashes_; }
    // The bytes that were cloned of each block.
    const std::vector<uint64_t>& cloned() const { return cloned_; }
    // The bytes of each block that are the other file's, cloned or fetched.
    const std::vector<uint64_t>& taken() const { return taken_; }
    // The first loss: the file is not what it was to be.
    std::optional<Loss> loss() const;
    // The errno and the offset of the first clone that failed; 0 if none has.
    std::pair<int, uint64_t> refusal() const;

  private:
    void hash(const Op& op, size_t chunk);
    bool is_equal(size_t chunk) const;
    void compare(const Op& op, size_t first, size_t staged, size_t last);
    bool clone(int fd, uint64_t offset, uint64_t nbytes);

    const uint64_t nbytes_;
    const size_t block_bytes_;
    const size_t chunk_bytes_;
    const PolyvalKey key_;
    const int other_;
    const Hashes old_;
    const Clone clone_;
    const Transfer read_;
    // Each block's thread writes its own part of these.
    Hashes hashes_;
    std::vector<size_t> unstaged_;  // chunks at the begin of each block
    std::vector<uint64_t> cloned_;
    std::vector<uint64_t> taken_;
    mutable Mutex mu_;
    std::pair<int, uint64_t> refusal_ GUARDED_BY(mu_){0, 0};
    std::optional<Loss> loss_ GUARDED_BY(mu_);
};

// Has a cloner see each write to a file, and passes what that leaves on to a backend.
class CloneSink final : public FileSink {
  public:
    // `threads` hash and clone; `inner` is kept for as long as they are.
    CloneSink(Backend& inner, Backend& threads, std::shared_ptr<Cloner> cloner)
        : FileSink(threads), inner_(inner), cloner_(std::move(cloner)) {}
    void withdraw(const Patience* job) override;
    std::vector<std::shared_ptr<Backend>> backends() override;
    Again handle(Op& op) override;

  private:
    struct Divided;
    void bring(Op& whole, size_t begin, size_t end);
    void divide(Op& whole, const Cloner::Ranges& ranges);

    Backend& inner_;
    const std::shared_ptr<Cloner> cloner_;
};

}  // namespace fastckpt
