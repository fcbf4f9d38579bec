// Compares blocks by their hashes, clones what is equal, and divides a write into what is left of
// it. See cloning.h for the contract.
#include "engine/cloning.h"

#include <linux/fs.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>

#include "check.h"
#include "crc32/crc32.h"
#include "mutex.h"

namespace fastckpt {

namespace {

// So many chunks of a block are hashed first. If each of them has changed, so has the block, most
// likely, and hashing the others would be for nothing.
constexpr size_t kSamples = 8;
// Whoever waits for copies of memory is not to wait for their hashes, too.
constexpr int kNiceness = 10;
// Hash and checksum take turns at so many bytes, which the first-level cache still holds.
constexpr size_t kTurn = 8 << 10;

// The hash of a chunk that was not hashed. It is equal to nothing: a chunk that has this hash by
// chance is written.
constexpr Polyval unknown() {
    Polyval hash{};
    for (auto& byte : hash) byte = 0xff;
    return hash;
}
constexpr Polyval kUnknown = unknown();

}  // namespace

int clone_by_ioctl(int target, int source, uint64_t offset, uint64_t nbytes) {
    file_clone_range range{};
    range.src_fd = source;
    range.src_offset = range.dest_offset = offset;
    range.src_length = nbytes;
    return ioctl(target, FICLONERANGE, &range) == 0 ? 0 : errno;
}

Cloner::Cloner(uint64_t nbytes, size_t block_bytes, size_t chunk_bytes, const Polyval& key,
               int other, Hashes old, Clone clone, Transfer read)
    : nbytes_(nbytes),
      block_bytes_(block_bytes),
      chunk_bytes_(chunk_bytes),
      key_(key),
      other_(other),
      old_(std::move(old)),
      clone_(std::move(clone)),
      read_(std::move(read)) {
    CHECK(nbytes > 0 && chunk_bytes > 0 && block_bytes % chunk_bytes == 0);
    hashes_.assign((nbytes + chunk_bytes - 1) / chunk_bytes, kUnknown);
    cloned_.assign((nbytes + block_bytes - 1) / block_bytes, 0);
    taken_ = cloned_;
    unstaged_.assign(cloned_.size(), 0);
    CHECK(old_.size() <= hashes_.size());
}

std::optional<uint32_t> Cloner::crc_if_known(uint64_t offset, const std::byte* bytes,
                                             size_t nbytes) {
    const size_t chunk = offset / chunk_bytes_;
    if (chunk >= old_.size() || old_[chunk] == kUnknown) return std::nullopt;
    Polyval hash{};
    uint32_t crc = 0;
    for (size_t at = 0; at < nbytes; at += kTurn) {
        const size_t n = std::min(kTurn, nbytes - at);
        hash = polyval(key_, bytes + at, n, hash);
        crc = crc32(crc, bytes + at, n);
    }
    // The hash of what is staged is taken of that, since the chunk may be another one by then.
    if (hash != old_[chunk]) return std::nullopt;
    hashes_[chunk] = hash;
    ++unstaged_[offset / block_bytes_];
    return crc;
}

Cloner::Rest Cloner::rest(const Op& op) {
    CHECK(op.kind == Op::Kind::write && op.offset % block_bytes_ == 0 && op.offset < nbytes_);
    const uint64_t end = std::min(nbytes_, op.offset + op.nbytes);  // without padding
    CHECK(end - op.offset <= block_bytes_);
    const size_t first = op.offset / chunk_bytes_;
    const size_t last = (end + chunk_bytes_ - 1) / chunk_bytes_;
    const size_t block = op.offset / block_bytes_;
    const size_t staged = first + unstaged_[block];
    if (staged < last) compare(op, first, staged, last);
    Rest left;
    const auto leave = [&](Ranges& ranges, size_t from, size_t to) {
        const size_t begin = from * chunk_bytes_ - op.offset;
        if (ranges.empty() || ranges.back().second != begin) ranges.emplace_back(begin, begin);
        ranges.back().second = to == last ? op.nbytes : to * chunk_bytes_ - op.offset;
    };
    for (size_t chunk = first, next; chunk < last; chunk = next) {
        const bool equal = is_equal(chunk);
        for (next = chunk + 1; next < last && is_equal(next) == equal;) ++next;
        const uint64_t from = chunk * chunk_bytes_;
        const uint64_t to = std::min<uint64_t>(end, next * chunk_bytes_);
        if (equal && clone(op.fd, from, to - from)) {
            cloned_[block] += to - from;
            taken_[block] += to - from;
            continue;
        }
        const size_t known = std::clamp(staged, chunk, next);
        if (chunk < known) {
            leave(left.of_other, chunk, known);
            taken_[block] += std::min<uint64_t>(end, known * chunk_bytes_) - from;
        }
        if (known < next) leave(left.staged, known, next);
    }
    return left;
}

// Hashes those chunks of a block that are worth it, of the ones that were staged.
void Cloner::compare(const Op& op, size_t first, size_t staged, size_t last) {
    const size_t stride = std::max<size_t>(1, (last - first) / kSamples);
    bool any_equal = false;
    for (size_t chunk = first; chunk < last; chunk += stride) {
        if (chunk >= staged) hash(op, chunk);
        any_equal = any_equal || is_equal(chunk);
    }
    const bool is_new = first >= old_.size();  // the next file is compared with it
    if (!any_equal && !is_new) return;
    for (size_t chunk = staged; chunk < last; ++chunk)
        if ((chunk - first) % stride != 0) hash(op, chunk);
}

void Cloner::hash(const Op& op, size_t chunk) {
    const uint64_t begin = chunk * chunk_bytes_;
    const uint64_t end = std::min<uint64_t>(nbytes_, begin + chunk_bytes_);
    hashes_[chunk] = polyval(key_, op.data + (begin - op.offset), end - begin);
}

bool Cloner::is_equal(size_t chunk) const {
    return chunk < old_.size() && hashes_[chunk] == old_[chunk] && old_[chunk] != kUnknown;
}

bool Cloner::clone(int fd, uint64_t offset, uint64_t nbytes) {
    if (refusal().first != 0) return false;
    const int error = clone_(fd, other_, offset, nbytes);
    if (error == 0) return true;
    const Lock lock(mu_);
    if (refusal_.first == 0) refusal_ = {error, offset};
    return false;
}

bool Cloner::fetch(uint64_t offset, std::byte* bytes, size_t nbytes) {
    if (loss()) return false;
    Op op;
    op.kind = Op::Kind::read;
    op.fd = other_;
    op.data = bytes;
    op.nbytes = nbytes;
    op.offset = offset;
    while (const Again again = carry_out(op, read_)) std::this_thread::sleep_until(*again);
    const bool is_whole = op.error == 0 && op.done == nbytes;
    if (is_whole && polyval(key_, bytes, nbytes) == old_[offset / chunk_bytes_]) return true;
    const Lock lock(mu_);
    if (!loss_) loss_ = {op.error, offset};
    return false;
}

std::optional<Cloner::Loss> Cloner::loss() const {
    const Lock lock(mu_);
    return loss_;
}

std::pair<int, uint64_t> Cloner::refusal() const {
    const Lock lock(mu_);
    return refusal_;
}

// A write of which parts are under way. Each part holds it, so that the last one frees it.
struct CloneSink::Divided {
    Divided(Op& op, size_t count) : whole(op), parts(count), left(count) {}
    void on_part_written(const Op& part);

    Mutex mu;
    // State below is protected by mu until `whole` is finished.
    Op& whole;
    std::vector<Op> parts;
    size_t left;
};

void CloneSink::withdraw(const Patience* job) {
    FileSink::withdraw(job);
    inner_.withdraw(job);
}

std::vector<std::shared_ptr<Backend>> CloneSink::backends() {
    return {inner_.shared_from_this(), FileSink::backends().front()};
}

Again CloneSink::handle(Op& op) {
    const Cloner::Rest left = cloner_->rest(op);
    for (const auto& [begin, end] : left.of_other) bring(op, begin, end);
    if (op.error == 0 && !left.staged.empty()) {
        divide(op, left.staged);
    } else {
        if (op.error == 0) op.done = op.nbytes;
        finish(op);
    }
    return std::nullopt;
}

// Makes `part` the bytes from `begin` on of an op, `nbytes` of them.
void take_part(Op& part, const Op& whole, size_t begin, size_t nbytes) {
    part.kind = whole.kind;
    part.fd = whole.fd;
    part.data = whole.data + begin;
    part.nbytes = nbytes;
    part.offset = whole.offset + begin;
    part.direct = whole.direct;
    part.patience = whole.patience;
}

// Writes bytes [begin, end) of an op, which are not in memory, chunk by chunk, so that little
// memory is taken. What cannot be fetched is a Loss, which the cloner tells.
void CloneSink::bring(Op& whole, size_t begin, size_t end) {
    const size_t chunk_bytes = cloner_->chunk_bytes();
    const std::unique_ptr<std::byte, void (*)(void*)> memory(
        static_cast<std::byte*>(std::aligned_alloc(kPageBytes, chunk_bytes)), std::free);
    CHECK(memory != nullptr);
    for (size_t at = begin; at < end && whole.error == 0; at += chunk_bytes) {
        const size_t nbytes = std::min(chunk_bytes, end - at);
        const uint64_t offset = whole.offset + at;
        const size_t content = std::min<uint64_t>(nbytes, cloner_->nbytes() - offset);
        if (!cloner_->fetch(offset, memory.get(), content)) return;
        std::memset(memory.get() + content, 0, nbytes - content);
        Op part;
        take_part(part, whole, at, nbytes);
        part.data = memory.get();
        const auto written = std::make_shared<std::promise<void>>();
        part.finished = [written](Op&) { written->set_value(); };
        inner_.submit(&part);
        written->get_future().wait();
        whole.error = part.error;
        whole.done = at + part.done;
    }
}

void CloneSink::divide(Op& whole, const Cloner::Ranges& ranges) {
    const auto divided = std::make_shared<Divided>(whole, ranges.size());
    for (size_t i = 0; i < ranges.size(); ++i) {
        const auto [begin, end] = ranges[i];
        Op& part = divided->parts[i];
        take_part(part, whole, begin, end - begin);
        part.finished = [divided](Op& op) { divided->on_part_written(op); };
    }
    Backend& inner = inner_;  // the last part may end this object
    for (Op& part : divided->parts) inner.submit(&part);
}

void CloneSink::Divided::on_part_written(const Op& part) {
    CHECK(part.error != 0 || part.done == part.nbytes);
    {
        const Lock lock(mu);
        if (part.error != 0 && whole.error == 0) {
            whole.error = part.error;
            whole.done = part.offset + part.done - whole.offset;
        }
        if (--left > 0) return;
    }
    if (whole.error == 0) whole.done = whole.nbytes;
    finish(whole);
}

}  // namespace fastckpt
