// Gathers converted items in windows of the file, and writes each of these with O_DIRECT as far as
// it fills pages. See scattered_writes.h for the contract.
#include "engine/scattered_writes.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "check.h"
#include "crc32/crc32.h"

namespace fastckpt {

namespace {

// What is gathered before it is written. It stays in a core's cache until it has its checksum.
constexpr size_t kWindowBytes = size_t{1} << 20;
// Less is not worth a write of its own beside those of the pages that it fills in part. It stays in
// the page cache until the file is synced, since neighbours may write to the same pages.
constexpr uint64_t kLeastDirect = 64 << 10;

// The memory of a thread's windows.
std::byte* window_memory() {
    struct Free {
        void operator()(std::byte* memory) const { std::free(memory); }
    };
    thread_local std::unique_ptr<std::byte, Free> memory;
    if (memory == nullptr)
        memory.reset(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, kWindowBytes)));
    return memory.get();
}

}  // namespace

// A range of the file that is being gathered, in memory aligned as it is: a window's, or where the
// op has it, if that is in one piece and needs no conversion.
class Scatterer::Window {
  public:
    Window(Op& op, int buffered, const Transfer& transfer, uint64_t file_nbytes)
        : op_(op),
          buffered_(buffered),
          transfer_(transfer),
          file_nbytes_(file_nbytes),
          memory_(window_memory()),
          from_(memory_),
          written_before_(op.done) {}

    // Adds items that belong at an offset of the file; returns 0, or the errno of a write.
    int add(uint64_t offset, Dtype held, Dtype stored, const std::byte* source, uint64_t count) {
        if (memory_ == nullptr) return ENOMEM;
        std::byte* const here = op_.data + (source - op_.data);
        const bool goes_on = in_place_ && offset == end_ && here == from_ + (end_ - begin_);
        if (held == stored && (goes_on || is_in_place(offset, here, count * width_of(held)))) {
            if (!goes_on) {
                if (const int error = flush()) return error;
                begin_from(offset, here);
            }
            end_ += count * width_of(held);
            return 0;
        }
        return gather(offset, held, stored, source, count);
    }

    // Writes what was gathered; returns 0, or errno.
    int flush() {
        if (begin_ == end_) return 0;
        // The register itself, from none of the inversions that the CRC of whole data begins with.
        const uint32_t crc = ~crc32(~uint32_t{0}, from_, end_ - begin_);
        written_.crc ^= crc32_combine(crc, 0, file_nbytes_ - end_);
        written_.nbytes += end_ - begin_;
        const uint64_t first = page_from(begin_), last = page_at(end_);
        int error = 0;
        if (!op_.direct || last < first + kLeastDirect) {
            error = write(begin_, end_, false);
        } else {
            error = write(first, last, true);
            if (error == 0) error = write(begin_, first, false);
            if (error == 0) error = write(last, end_, false);
        }
        begin_ = end_;
        return error;
    }

    const Written& written() const { return written_; }
    // Notes that items of this number have been added.
    void end_items(uint64_t number) {
        if (std::exchange(lost_, 0) > 0) lossy_.push_back(number);
    }
    const std::vector<uint64_t>& lossy() const { return lossy_; }
    // When all of it is to be attempted again, if a write has to.
    const Again& again() const { return again_; }

  private:
    // Whether bytes can be written with O_DIRECT from where they are, and are worth it.
    bool is_in_place(uint64_t offset, const std::byte* bytes, uint64_t nbytes) const {
        return op_.direct &&
               reinterpret_cast<uintptr_t>(bytes) % kPageBytes == offset % kPageBytes &&
               page_from(offset) + kLeastDirect <= page_at(offset + nbytes);
    }

    int gather(uint64_t offset, Dtype held, Dtype stored, const std::byte* source, uint64_t count) {
        if (offset != end_ || in_place_) {
            if (const int error = flush()) return error;
            begin_from(offset);
        }
        const size_t wide = width_of(held), narrow = width_of(stored);
        while (count > 0) {
            const uint64_t base = page_at(begin_);
            if (end_ == base + kWindowBytes) {
                if (const int error = flush()) return error;
                begin_from(end_);
                continue;
            }
            const uint64_t some = std::min(count, (base + kWindowBytes - end_) / narrow);
            lost_ += cast(held, stored, source, from_ + (end_ - begin_), some);
            end_ += some * narrow;
            source += some * wide;
            count -= some;
        }
        return 0;
    }

    void begin_from(uint64_t offset, std::byte* in_place = nullptr) {
        in_place_ = in_place != nullptr;
        from_ = in_place_ ? in_place : memory_ + offset % kPageBytes;
        begin_ = end_ = offset;
    }

    int write(uint64_t begin, uint64_t end, bool direct) {
        if (begin == end) return 0;
        Op part;
        part.kind = Op::Kind::write;
        part.fd = direct || !op_.direct ? op_.fd : buffered_;
        part.data = from_ + (begin - begin_);
        part.nbytes = end - begin;
        part.offset = begin;
        part.direct = direct;
        part.stays = end - begin < kLeastDirect;
        part.patience = op_.patience;
        part.done = std::min(part.nbytes, written_before_);
        written_before_ -= part.done;
        op_.done -= part.done;
        if (part.done < part.nbytes) {
            part.retries = std::exchange(op_.retries, 0);  // where an earlier call has ended
            again_ = carry_out(part, transfer_);
            if (again_) op_.retries = part.retries;
        }
        op_.done += part.done;
        return again_ ? EAGAIN : part.error;
    }

    Op& op_;
    const int buffered_;
    const Transfer& transfer_;
    const uint64_t file_nbytes_;
    std::byte* const memory_;
    std::byte* from_;  // the memory of what was gathered
    bool in_place_ = false;
    uint64_t begin_ = 0;
    uint64_t end_ = 0;
    Written written_{0, 0};
    uint64_t lost_ = 0;  // of the current items
    std::vector<uint64_t> lossy_;
    size_t written_before_;  // bytes of the file, in this order, by an earlier call
    Again again_;
};

Scatterer::Scatterer(uint64_t file_nbytes, std::vector<Items> items, std::vector<uint64_t> rows)
    : file_nbytes_(file_nbytes), items_(std::move(items)), rows_(std::move(rows)) {
    uint64_t end = 0, row = 0;
    for (const Items& each : items_) {
        CHECK(each.held < kDtypes && each.stored < kDtypes);
        const auto held = static_cast<Dtype>(each.held), stored = static_cast<Dtype>(each.stored);
        CHECK(is_castable(held, stored));
        CHECK(each.begin == end && each.end > end && each.begin % width_of(held) == 0);
        CHECK(each.size > 0 && each.count > 0 && each.first_row == row);
        const uint64_t row_nbytes = each.size * each.count * width_of(held);
        CHECK((each.end - each.begin) % row_nbytes == 0);
        row += (each.end - each.begin) / row_nbytes;
        CHECK(row <= rows_.size());
        for (uint64_t i = each.first_row; i < row; ++i) {
            const uint64_t last = (each.count - 1) * each.stride + each.size;
            CHECK(rows_[i] % width_of(stored) == 0);
            CHECK(rows_[i] + last * width_of(stored) <= file_nbytes_);
        }
        end = each.end;
    }
    CHECK(row == rows_.size());
}

Again Scatterer::write(Op& op, int buffered, const Transfer& transfer) {
    CHECK(op.kind == Op::Kind::write);
    Window window(op, buffered, transfer, file_nbytes_);
    op.error = write_through(window, op);
    if (window.again()) {
        op.error = 0;
        return window.again();
    }
    op.done = op.error == 0 ? op.nbytes : 0;
    if (op.error != 0) return std::nullopt;
    const Lock lock(mu_);
    written_.nbytes += window.written().nbytes;
    written_.crc ^= window.written().crc;
    lossy_.insert(window.lossy().begin(), window.lossy().end());
    return std::nullopt;
}

// Writes what an op has; returns 0, or errno.
int Scatterer::write_through(Window& window, const Op& op) const {
    const uint64_t end = op.offset + op.nbytes;
    auto each = std::upper_bound(items_.begin(), items_.end(), op.offset,
                                 [](uint64_t at, const Items& items) { return at < items.end; });
    for (; each != items_.end() && each->begin < end; ++each) {
        const auto held = static_cast<Dtype>(each->held), stored = static_cast<Dtype>(each->stored);
        const uint64_t wide = width_of(held), narrow = width_of(stored);
        const uint64_t from = std::max(each->begin, op.offset), to = std::min(each->end, end);
        CHECK((from - each->begin) % wide == 0 && (to - from) % wide == 0);
        const std::byte* source = op.data + (from - op.offset);
        const uint64_t last = (to - each->begin) / wide;
        for (uint64_t item = (from - each->begin) / wide, count; item < last; item += count) {
            const uint64_t run = item / each->size, inside = item % each->size;
            const uint64_t along = run % each->count * each->stride + inside;
            const uint64_t offset = rows_[each->first_row + run / each->count] + along * narrow;
            count = std::min(each->size - inside, last - item);
            if (const int error = window.add(offset, held, stored, source, count)) return error;
            source += count * wide;
        }
        window.end_items(each - items_.begin());
    }
    return window.flush();
}

Scatterer::Written Scatterer::written() const {
    const Lock lock(mu_);
    return written_;
}

std::set<uint64_t> Scatterer::lossy() const {
    const Lock lock(mu_);
    return lossy_;
}

std::optional<uint64_t> Scatterer::whole_page() const {
    for (const Items& each : items_) {
        const uint64_t narrow = width_of(static_cast<Dtype>(each.stored));
        const uint64_t offset = rows_[each.first_row];
        if (page_from(offset) + kLeastDirect <= page_at(offset + each.size * narrow))
            return page_from(offset);
    }
    return std::nullopt;
}

ScatterSink::ScatterSink(Backend& threads, std::shared_ptr<Scatterer> scatterer,
                         std::optional<int> buffered, Transfer transfer)
    : FileSink(threads),
      scatterer_(std::move(scatterer)),
      buffered_(buffered),
      transfer_(std::move(transfer)) {}

Again ScatterSink::handle(Op& op) {
    op.direct = buffered_.has_value();
    const Again again = scatterer_->write(op, buffered_.value_or(-1), transfer_);
    if (!again) finish(op);
    return again;
}

}  // namespace fastckpt
