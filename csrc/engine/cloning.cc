// Compares blocks by their hashes, clones what is equal, and divides a write into what is left of
// it. See cloning.h for the contract.
#include "engine/cloning.h"

#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>

#include "check.h"

namespace fastckpt {

namespace {

constexpr size_t kHash = sizeof(Polyval);
// The hash of a chunk that was not hashed. A real one is equal to it once in 2^128 times, and then
// its chunk is written.
constexpr char kUnknown = '\xff';
// So many chunks of a block are hashed first. If each of them has changed, so has the block, most
// likely, and hashing the others would be for nothing.
constexpr size_t kSamples = 8;
// Whoever waits for copies of memory is not to wait for their hashes, too.
constexpr int kLowPriority = 10;

// The parts of a write that are under way. Each holds it, so that the last one frees it.
struct UnderWay {
    std::deque<Op> ops;  // a deque, since an op must stay where it is
    std::mutex mu;
    size_t left = 0;  // protected by mu, as is the whole op's outcome
};

void submit_parts(Op& whole, const Cloner::Parts& parts, Backend& inner) {
    const auto under_way = std::make_shared<UnderWay>();
    under_way->left = parts.size();
    for (const auto& [begin, end] : parts) {
        Op& part = under_way->ops.emplace_back();
        part.kind = whole.kind;
        part.fd = whole.fd;
        part.data = whole.data + begin;
        part.nbytes = end - begin;
        part.offset = whole.offset + begin;
        part.direct = whole.direct;
        part.patience = whole.patience;
        part.finished = [under_way, &whole, begin = begin](Op& op) {
            {
                std::lock_guard lock(under_way->mu);
                if (op.error != 0 && whole.error == 0) {
                    whole.error = op.error;
                    whole.done = begin + op.done;
                }
                if (--under_way->left > 0) return;
            }
            if (whole.error == 0) whole.done = whole.nbytes;
            finish(whole);
        };
    }
    for (Op& part : under_way->ops) inner.submit(&part);
}

}  // namespace

int clone_by_ioctl(int target, int source, uint64_t offset, uint64_t nbytes) {
    file_clone_range range{};
    range.src_fd = source;
    range.src_offset = range.dest_offset = offset;
    range.src_length = nbytes;
    return ioctl(target, FICLONERANGE, &range) == 0 ? 0 : errno;
}

Cloner::Cloner(uint64_t nbytes, size_t block_bytes, size_t chunk_bytes, const Polyval& key,
               int other, std::string old, Clone clone)
    : nbytes_(nbytes),
      block_bytes_(block_bytes),
      chunk_bytes_(chunk_bytes),
      key_(key),
      other_(other),
      old_(std::move(old)),
      clone_(std::move(clone)),
      hashes_((nbytes + chunk_bytes - 1) / chunk_bytes * kHash, kUnknown),
      cloned_((nbytes + block_bytes - 1) / block_bytes) {
    CHECK(nbytes > 0 && chunk_bytes > 0 && block_bytes % chunk_bytes == 0);
}

// Hashes a chunk of the block whose first one is `first`.
void Cloner::hash(const std::byte* data, size_t nbytes, size_t first, size_t chunk) {
    const size_t begin = (chunk - first) * chunk_bytes_;
    const Polyval value = polyval(key_, data + begin, std::min(chunk_bytes_, nbytes - begin));
    std::copy(value.begin(), value.end(), &hashes_[chunk * kHash]);
}

bool Cloner::is_equal(size_t chunk) const {
    const size_t at = chunk * kHash;
    if (at + kHash > old_.size()) return false;
    const char* const own = &hashes_[at];
    return std::memcmp(own, &old_[at], kHash) == 0 &&
           std::any_of(own, own + kHash, [](char byte) { return byte != kUnknown; });
}

// Hashes what is worth it; returns whether any chunk may be equal.
bool Cloner::hash_block(const std::byte* data, size_t nbytes, size_t first, size_t count) {
    const size_t stride = std::max<size_t>(1, count / kSamples);
    bool any_equal = false;
    for (size_t i = 0; i < count; i += stride) {
        hash(data, nbytes, first, first + i);
        any_equal = any_equal || is_equal(first + i);
    }
    const bool is_new = first * kHash >= old_.size();  // the next file is compared with it
    if (!any_equal && !is_new) return false;
    for (size_t i = 0; i < count; ++i)
        if (i % stride != 0) hash(data, nbytes, first, first + i);
    return any_equal;
}

bool Cloner::clone(int fd, uint64_t offset, uint64_t nbytes) {
    if (refused_.load()) return false;
    const int error = clone_(fd, other_, offset, nbytes);
    if (error == 0) return true;
    std::lock_guard lock(mu_);
    if (!refused_.exchange(true)) refusal_ = {error, offset};
    return false;
}

Cloner::Parts Cloner::rest(const Op& op) {
    CHECK(op.kind == Op::Kind::write && op.offset % block_bytes_ == 0 && op.offset < nbytes_);
    const auto nbytes = static_cast<size_t>(std::min<uint64_t>(op.nbytes, nbytes_ - op.offset));
    CHECK(nbytes <= block_bytes_);
    const size_t first = op.offset / chunk_bytes_;
    const size_t count = (nbytes + chunk_bytes_ - 1) / chunk_bytes_;
    if (!hash_block(op.data, nbytes, first, count)) return {{0, op.nbytes}};
    Parts parts;
    uint64_t cloned = 0;
    for (size_t begin = 0, end; begin < count; begin = end) {
        const bool equal = is_equal(first + begin);
        for (end = begin + 1; end < count && is_equal(first + end) == equal;) ++end;
        const size_t from = begin * chunk_bytes_, to = std::min(nbytes, end * chunk_bytes_);
        if (equal && clone(op.fd, op.offset + from, to - from))
            cloned += to - from;
        else
            parts.emplace_back(from, to == nbytes ? op.nbytes : to);  // with a direct op's padding
    }
    cloned_[op.offset / block_bytes_] = cloned;
    return parts;
}

std::pair<int, uint64_t> Cloner::refusal() const {
    std::lock_guard lock(mu_);
    return refusal_;
}

CloningBackend::CloningBackend(std::shared_ptr<Backend> inner, unsigned threads)
    : inner_(std::move(inner)),
      threads_(handing_backend([this](Op& op) { handle(op); }, threads, name())) {}

void CloningBackend::add(int fd, std::shared_ptr<Cloner> cloner) {
    std::lock_guard lock(mu_);
    cloners_[fd] = std::move(cloner);
}

void CloningBackend::remove(int fd) {
    std::lock_guard lock(mu_);
    cloners_.erase(fd);
}

void CloningBackend::handle(Op& op) {
    static thread_local const int priority = nice(kLowPriority);  // on Linux, of this thread alone
    static_cast<void>(priority);
    std::shared_ptr<Cloner> cloner;
    {
        std::lock_guard lock(mu_);
        cloner = cloners_.at(op.fd);
    }
    const Cloner::Parts parts = cloner->rest(op);
    if (!parts.empty()) {
        submit_parts(op, parts, *inner_);
        return;
    }
    op.done = op.nbytes;
    finish(op);
}

}  // namespace fastckpt
