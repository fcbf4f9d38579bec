// Writes blocks whose bytes belong to many places of a file: converts them to the file's dtypes,
// gathers what is adjacent there, and writes it, checksummed, without Python. It knows bytes,
// offsets and dtypes; it must not know tensors, nor who else writes to the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cast/cast.h"
#include "engine/backend.h"

namespace fastckpt {

// Where the bytes of one image belong in one file.
class Scatterer {
  public:
    // Items [begin, end) of the image, in bytes, which go to rows of `count` runs, each of `size`
    // items and `stride` items after the one before. Dtypes are those of the image and the file.
    struct Items {
        uint64_t begin;
        uint64_t end;
        uint64_t held;
        uint64_t stored;
        uint64_t first_row;
        uint64_t size;
        uint64_t count;
        uint64_t stride;
    };
    // What was written: how many bytes, and what they contribute to the CRC-32 of the file. That is
    // the exclusive or of all contributions and of the CRC-32 of as many zeros.
    struct Written {
        uint64_t nbytes;
        uint32_t crc;
    };

    // The items cover the image in order; `rows` are the offsets in the file at which rows begin,
    // which has file_nbytes. No item may lie across two blocks of the image.
    Scatterer(uint64_t file_nbytes, std::vector<Items> items, std::vector<uint64_t> rows);

    // Writes the bytes of an op, whose offset is the image's, and sets op.error. With op.direct,
    // what fills no pages goes to `buffered`, a descriptor of the same file without O_DIRECT, or
    // everything if that is little. Several threads may call it at once. If it has to be called
    // again, op.done says how many bytes of the file were written.
    Again write(Op& op, int buffered, const Transfer& transfer);

    // What the ops that succeeded have written, which is counted once for each op.
    Written written() const;

    // The offset of the first page that one of its runs fills, and is written with O_DIRECT.
    std::optional<uint64_t> whole_page() const;

  private:
    class Window;
    int write_through(Window& window, const Op& op) const;

    const uint64_t file_nbytes_;
    const std::vector<Items> items_;
    const std::vector<uint64_t> rows_;
    mutable std::mutex mu_;
    Written written_{0, 0};  // protected by mu_
};

// Has a file's scatterer write the ops for it, on threads of its own.
class ScatterBackend final : public Backend {
  public:
    // `transfer` makes each attempt to write.
    ScatterBackend(unsigned threads, Transfer transfer);
    ~ScatterBackend() override { close(); }

    // Says which scatterer writes the ops for fd, until remove(). With `buffered`, a descriptor of
    // the same file, fd has O_DIRECT; the ops themselves are not direct.
    void add(int fd, std::shared_ptr<Scatterer> scatterer, std::optional<int> buffered);
    void remove(int fd);

    void submit(Op* op) override { threads_->submit(op); }
    void withdraw(const Patience* job) override { threads_->withdraw(job); }
    void close() override { threads_->close(); }
    const char* name() const override { return threads_->name(); }

  private:
    struct Placed {
        std::shared_ptr<Scatterer> scatterer;
        std::optional<int> buffered;
    };
    Again handle(Op& op);

    const Transfer transfer_;
    std::mutex mu_;
    std::map<int, Placed> files_;  // protected by mu_

    const std::shared_ptr<Backend> threads_;  // last, since they use all of the above
};

}  // namespace fastckpt
