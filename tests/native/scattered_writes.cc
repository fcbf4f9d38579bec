// The scattering sink without Python: several images written at once into one file, converted,
// by writes that are short and interrupted by chance. Meant for the sanitizers, and checks every
// byte besides. Knows the engine's headers; must not know formats.
#include "engine/scattered_writes.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "crc32/crc32.h"
#include "engine/engine.h"

namespace {

using fastckpt::Allowance;
using fastckpt::Dtype;
using fastckpt::Engine;
using fastckpt::Op;
using fastckpt::Scatterer;
using fastckpt::ScatterSink;
using fastckpt::Segment;

constexpr size_t kBlock = 64 << 10;
constexpr size_t kRanks = 3;
constexpr uint64_t kRows = 500;
constexpr uint64_t kColumns = 333;  // of each rank
constexpr std::chrono::duration<double> kLongest{60};

std::atomic<int> failures{0};
std::atomic<unsigned> attempts{0};

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "scattering: not so: %s\n", what);
    ++failures;
}

ssize_t write_some(const Op& op, std::byte* data, size_t nbytes, uint64_t offset) {
    const unsigned attempt = attempts++;
    if (attempt % 7 == 3) return -EINTR;
    const size_t some = attempt % 5 == 1 ? 1 + nbytes / 3 : nbytes;
    const ssize_t n = pwrite(op.fd, data, some, static_cast<off_t>(offset));
    return n < 0 ? -errno : n;
}

float value_at(uint64_t row, uint64_t column) {
    return static_cast<float>(row * 1000 + column) / 64.0F - 999.0F;
}

// Columns of a matrix of float32, which the file holds as `stored`, row by row.
struct Rank {
    explicit Rank(uint64_t number, Dtype stored) {
        for (uint64_t row = 0; row < kRows; ++row)
            for (uint64_t column = 0; column < kColumns; ++column)
                values.push_back(value_at(row, number * kColumns + column));
        const uint64_t width = fastckpt::width_of(stored);
        const Scatterer::Items items{0,
                                     values.size() * sizeof(float),
                                     static_cast<uint64_t>(Dtype::f32),
                                     static_cast<uint64_t>(stored),
                                     0,
                                     kColumns,
                                     kRows,
                                     kRanks * kColumns};
        scatterer = std::make_shared<Scatterer>(kRows * kRanks * kColumns * width,
                                                std::vector<Scatterer::Items>{items},
                                                std::vector<uint64_t>{number * kColumns * width});
    }
    std::vector<float> values;
    std::shared_ptr<Scatterer> scatterer;
};

void write_matrix(Dtype stored) {
    const size_t width = fastckpt::width_of(stored);
    const size_t count = kRows * kRanks * kColumns;
    const int fd = memfd_create("scattering", MFD_CLOEXEC);
    if (fd < 0) std::abort();
    const auto allowance = std::make_shared<Allowance>(8);
    Engine engine(8 * kBlock, kBlock, 2);
    std::vector<Rank> ranks;
    std::vector<int> descriptors;
    for (uint64_t number = 0; number < kRanks; ++number) ranks.emplace_back(number, stored);
    const auto threads = fastckpt::threads_backend(3);
    std::vector<std::shared_ptr<fastckpt::WriteJob>> jobs;
    for (Rank& rank : ranks) {
        descriptors.push_back(dup(fd));
        const auto sink =
            std::make_shared<ScatterSink>(*threads, rank.scatterer, std::nullopt, write_some);
        const Segment segment{0, rank.values.size() * sizeof(float),
                              reinterpret_cast<uint64_t>(rank.values.data())};
        jobs.push_back(engine.stage({{segment}, {}, {}, {}, {}}, allowance, 2));
        jobs.back()->write_to(descriptors.back(), 0, sink, false);
    }
    uint64_t written = 0;
    uint32_t crc = 0;
    for (size_t i = 0; i < kRanks; ++i) {
        expect(jobs[i]->wait(fastckpt::WriteJob::Stage::written, kLongest), "a job ends");
        expect(jobs[i]->failure().error == 0, "a job succeeds");
        ::close(descriptors[i]);
        written += ranks[i].scatterer->written().nbytes;
        crc ^= ranks[i].scatterer->written().crc;
    }
    engine.close();
    threads->close();

    std::vector<float> values;
    for (uint64_t row = 0; row < kRows; ++row)
        for (uint64_t column = 0; column < kRanks * kColumns; ++column)
            values.push_back(value_at(row, column));
    std::vector<std::byte> wanted(count * width), found(count * width), zeros(count * width);
    fastckpt::cast(Dtype::f32, stored, values.data(), wanted.data(), count);
    const ssize_t n = pread(fd, found.data(), found.size(), 0);
    expect(n == static_cast<ssize_t>(found.size()) && found == wanted, "the file is the matrix");
    expect(written == found.size(), "each byte is counted once");
    crc ^= fastckpt::crc32(0, zeros.data(), zeros.size());
    expect(crc == fastckpt::crc32(0, found.data(), found.size()), "parts have the file's checksum");
    ::close(fd);
}

// All pairs, also with items that end anywhere and with any bits.
void cast_everything() {
    std::vector<std::byte> source(1031 * 8), target(1031 * 8);
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 167 >> 3);
    for (const auto* kernel : {&fastckpt::cast_kernels::portable, &fastckpt::cast_kernels::avx2}) {
        if (!kernel->supported()) continue;
        for (uint64_t from = 0; from < fastckpt::kDtypes; ++from)
            for (uint64_t to = 0; to < fastckpt::kDtypes; ++to) {
                const auto held = static_cast<Dtype>(from), stored = static_cast<Dtype>(to);
                if (!fastckpt::is_castable(held, stored)) continue;
                kernel->cast(held, stored, source.data(), target.data(), 1031);
                kernel->cast(held, stored, source.data() + 1, target.data() + 1, 1030);
            }
    }
}

}  // namespace

int main() {
    cast_everything();
    for (const Dtype stored : {Dtype::bf16, Dtype::f16, Dtype::f8_e5m2, Dtype::f32, Dtype::f64})
        write_matrix(stored);
    return failures == 0 ? 0 : 1;
}
