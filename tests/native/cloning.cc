// The cloning sink without Python: files written at once by one engine, in front of threads that
// write, with clones that are refused and writes that fail by chance. Meant for the sanitizers, and
// checks every byte besides. Knows the engine's headers; must not know formats.
#include "engine/cloning.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "engine/engine.h"

namespace {

using fastckpt::Allowance;
using fastckpt::Cloner;
using fastckpt::CloneSink;
using fastckpt::Engine;
using fastckpt::Op;
using fastckpt::Polyval;
using Bytes = std::vector<std::byte>;
using Random = std::mt19937;

constexpr size_t kChunk = 4096;
constexpr size_t kBlock = 16 * kChunk;
constexpr std::chrono::duration<double> kLongest{60};
constexpr Polyval kKey = {1, 2, 3};

std::atomic<int> failures{0};

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "cloning: not so: %s\n", what);
    ++failures;
}

size_t below(Random& random, size_t limit) { return random() % limit; }

// A file in memory.
class File {
  public:
    explicit File(const Bytes& content) : fd_(memfd_create("cloning", MFD_CLOEXEC)) {
        if (fd_ < 0) std::abort();
        expect(
            pwrite(fd_, content.data(), content.size(), 0) == static_cast<ssize_t>(content.size()),
            "a file is made");
    }
    ~File() { ::close(fd_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int fd() const { return fd_; }
    Bytes content(size_t nbytes) const {
        Bytes read(nbytes);
        expect(pread(fd_, read.data(), nbytes, 0) == static_cast<ssize_t>(nbytes),
               "a file is read");
        return read;
    }

  private:
    const int fd_;
};

int clone_by_copy(int target, int source, uint64_t offset, uint64_t nbytes) {
    Bytes copy(nbytes);
    const auto at = static_cast<off_t>(offset);
    const ssize_t n = pread(source, copy.data(), nbytes, at);
    return n == pwrite(target, copy.data(), nbytes, at) ? 0 : EIO;
}

// A file that is compared with an old one, of which it keeps some chunks.
struct Version {
    Version(Random& random, std::atomic<int>& clones_left)
        : old(kBlock + below(random, 5 * kBlock)), source(old), target(Bytes(old.size())) {
        for (auto& byte : old) byte = static_cast<std::byte>(random());
        expect(pwrite(source.fd(), old.data(), old.size(), 0) > 0, "a file is filled");
        now = old;
        const size_t changes = below(random, 3) == 0 ? old.size() / kChunk : below(random, 9);
        for (size_t i = 0; i < changes; ++i) now[below(random, now.size())] ^= std::byte{1};
        Cloner::Hashes hashes;
        for (size_t at = 0; at < old.size(); at += kChunk)
            hashes.push_back(fastckpt::polyval(fastckpt::PolyvalKey(kKey), &old[at],
                                               std::min(kChunk, old.size() - at)));
        cloner = std::make_shared<Cloner>(
            old.size(), kBlock, kChunk, kKey, source.fd(), std::move(hashes),
            [&clones_left](int to, int from, uint64_t offset, uint64_t nbytes) {
                if (clones_left.fetch_sub(1) <= 0) return EXDEV;
                return clone_by_copy(to, from, offset, nbytes);
            });
    }
    Bytes old;
    Bytes now;
    File source;
    File target;
    std::shared_ptr<Cloner> cloner;
    std::shared_ptr<fastckpt::WriteJob> job;
};

void write_versions(Random& random) {
    std::atomic<int> clones_left{below(random, 2) == 0 ? 1 << 20 : int(below(random, 30))};
    std::atomic<int> writes_left{below(random, 2) == 0 ? 1 << 20 : int(below(random, 30))};
    auto writing = [&writes_left](const Op& op, std::byte* data, size_t nbytes, uint64_t offset) {
        if (writes_left.fetch_sub(1) <= 0) return ssize_t{-ENOSPC};
        return fastckpt::transfer_by_syscall(op, data, (nbytes + 1) / 2, offset);
    };
    const auto inner = fastckpt::threads_backend(3, 0, writing);
    const auto hashing = fastckpt::threads_backend(2);
    Engine engine(4 * kBlock, kBlock, 2);
    std::vector<std::unique_ptr<Version>> versions;
    for (int i = 0; i < 3; ++i) {
        auto& version = *versions.emplace_back(std::make_unique<Version>(random, clones_left));
        const auto address = reinterpret_cast<uint64_t>(version.now.data());
        version.job = engine.stage({{{0, version.now.size(), address}}, {}, {}, {}, {}},
                                   std::make_shared<Allowance>(1 + below(random, 3)), 2, nullptr,
                                   below(random, 2) == 0 ? version.cloner : nullptr);
        version.job->write_to(version.target.fd(), 0,
                              std::make_shared<CloneSink>(*inner, *hashing, version.cloner), false);
    }
    if (below(random, 4) == 0) versions[0]->job->cancel();
    for (auto& version : versions) {
        expect(version->job->wait(fastckpt::WriteJob::Stage::written, kLongest),
               "a job ends in time");
        const int error = version->job->failure().error;
        expect(error == 0 || error == ENOSPC || error == ECANCELED, "a job fails as its writes do");
        if (error != 0) continue;
        expect(version->target.content(version->now.size()) == version->now, "bytes are right");
        const int refusal = version->cloner->refusal().first;
        expect(refusal == 0 || refusal == EXDEV, "a refusal is told");
        expect(!version->cloner->loss(), "what was not staged is found in the old file");
    }
    engine.close();
}

}  // namespace

int main() {
    Random random(20261124);
    for (int round = 0; round < 60; ++round) write_versions(random);
    std::printf("cloning: %d failures\n", failures.load());
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
