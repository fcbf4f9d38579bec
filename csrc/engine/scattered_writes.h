// Writes blocks whose bytes belong to many places in a file: converts the bytes to the file's
// dtypes, gathers bytes that are adjacent in the file, and checksums and writes them without
// Python. It knows only bytes, offsets and dtypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "cast/cast.h"
#include "engine/backend.h"
#include "mutex.h"

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

    // Which of the items, by their number, are no longer finite in part, since they were converted.
    std::set<uint64_t> lossy() const;

    // The offset of the first page that one of its runs fills, and is written with O_DIRECT.
    std::optional<uint64_t> whole_page() const;

  private:
    class Window;
    int write_through(Window& window, const Op& op) const;

    const uint64_t file_nbytes_;
    const std::vector<Items> items_;
    const std::vector<uint64_t> rows_;
    mutable Mutex mu_;
    Written written_ GUARDED_BY(mu_){0, 0};
    std::set<uint64_t> lossy_ GUARDED_BY(mu_);
};

// Has a scatterer write the ops for a file. With `buffered`, a descriptor of the same file, that of
// the ops has O_DIRECT; the ops themselves are not direct.
class ScatterSink final : public FileSink {
  public:
    // `transfer` makes each attempt to write.
    ScatterSink(Backend& threads, std::shared_ptr<Scatterer> scatterer, std::optional<int> buffered,
                Transfer transfer = transfer_by_syscall);
    Again handle(Op& op) override;

  private:
    const std::shared_ptr<Scatterer> scatterer_;
    const std::optional<int> buffered_;
    const Transfer transfer_;
};

}  // namespace fastckpt
