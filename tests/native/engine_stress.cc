// The engine under load without Python: threads that write and read through one engine at once over
// each backend, from memory of the host and of devices, whose driver is the tests' stub, with
// faults injected by a callback backend and by the driver. Meant for the sanitizers, and checks
// every byte besides. Knows the engine's headers; must not know formats.
#include "engine/engine.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../stubs/cuda.cc"
#include "crc32/crc32.h"
#include "gpu/device_queue.h"

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#else
#define UNDER_TSAN 0
#endif

namespace {

using fastckpt::Allowance;
using fastckpt::Backend;
using fastckpt::DeviceRange;
using fastckpt::Engine;
using fastckpt::Op;
using fastckpt::Segment;
using fastckpt::Slot;
using Bytes = std::vector<std::byte>;
using Random = std::mt19937;
using Queues = std::vector<std::shared_ptr<fastckpt::DeviceQueue>>;

constexpr size_t kBlockBytes = 8192;
constexpr std::chrono::duration<double> kLongest{60};

std::atomic<int> failures{0};

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "engine_stress: not so: %s\n", what);
    ++failures;
}

size_t below(Random& random, size_t limit) { return random() % limit; }

// Memory that is a device's, to the engine.
DeviceRange range_on(const std::shared_ptr<fastckpt::DeviceQueue>& queue, const Bytes& memory) {
    const auto address = reinterpret_cast<uint64_t>(memory.data());
    return {address, address + memory.size(), queue};
}

// A source of image bytes, what the engine is told about it, and the bytes that must come out. With
// queues, about half of the sources are on their devices.
struct Plan {
    Queues queues;
    std::vector<Bytes> sources;
    std::vector<Segment> segments;
    std::vector<Slot> slots;
    std::vector<DeviceRange> devices;
    Bytes image;

    fastckpt::Image described(std::vector<fastckpt::NumberRun> numbers = {}) const {
        return {segments, slots, devices, std::move(numbers), {}};
    }

    void add(Random& random, size_t nbytes) {
        Bytes source(nbytes);
        for (auto& each : source) each = static_cast<std::byte>(random());
        const auto address = reinterpret_cast<uint64_t>(source.data());
        segments.push_back({image.size(), nbytes, address});
        if (!queues.empty() && below(random, 2) == 0) {
            const auto at = std::find_if(devices.begin(), devices.end(),
                                         [&](const auto& each) { return each.begin > address; });
            devices.insert(at, range_on(queues[below(random, queues.size())], source));
        }
        image.insert(image.end(), source.begin(), source.end());
        sources.push_back(std::move(source));
    }

    void add_described(Random& random, size_t nbytes) {
        add(random, nbytes);
        const uint32_t crc = fastckpt::crc32(0, sources.back().data(), nbytes);
        const size_t holder_nbytes = 4 + below(random, 300);
        const uint64_t at = image.size() + below(random, holder_nbytes - 3);
        add(random, holder_nbytes);
        slots.push_back({at, segments.size() - 2});
        for (int i = 0; i < 4; ++i) image[at + i] = static_cast<std::byte>(crc >> (8 * i));
    }

    // Sources are overwritten once the engine says that it no longer reads them.
    void scribble() {
        for (auto& source : sources) std::fill(source.begin(), source.end(), std::byte{0xEE});
    }
};

Plan random_plan(Random& random, const Queues& queues = {}) {
    Plan plan;
    plan.queues = queues;
    const size_t pieces = 1 + below(random, 12);
    for (size_t i = 0; i < pieces; ++i) {
        const size_t nbytes = 1 + below(random, below(random, 3) == 0 ? 3 * kBlockBytes : 200);
        if (below(random, 3) == 0)
            plan.add(random, nbytes);
        else
            plan.add_described(random, nbytes);
    }
    return plan;
}

std::vector<uint32_t> block_crcs(const Bytes& image) {
    std::vector<uint32_t> crcs;
    for (size_t at = 0; at < image.size(); at += kBlockBytes)
        crcs.push_back(
            fastckpt::crc32(0, image.data() + at, std::min(kBlockBytes, image.size() - at)));
    return crcs;
}

// A file without a name, gone when it is closed.
class File {
  public:
    File() {
        std::string path = std::string(P_tmpdir) + "/fastckpt-stress-XXXXXX";
        fd_ = mkostemp(path.data(), O_CLOEXEC);
        if (fd_ < 0) {
            std::perror(path.c_str());
            std::exit(EXIT_FAILURE);
        }
        unlink(path.c_str());
    }
    ~File() { ::close(fd_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int fd() const { return fd_; }

  private:
    int fd_;
};

// The numbers before the first slot, of any width, as runs for the engine.
std::vector<fastckpt::NumberRun> random_numbers(Random& random, const Plan& plan) {
    const uint64_t known = plan.slots.empty() ? plan.image.size() : plan.slots[0].offset;
    const uint64_t width = uint64_t{1} << below(random, 4);
    const uint64_t end = known / width * width;
    const uint64_t middle = below(random, end / width + 1) * width;
    std::vector<fastckpt::NumberRun> runs;
    if (middle > 0) runs.push_back({0, middle, width, 0x3});
    if (middle < end) runs.push_back({middle, end, width, 0x81});
    return runs;
}

std::vector<uint64_t> counts_of(const Bytes& image,
                                const std::vector<fastckpt::NumberRun>& numbers) {
    std::vector<uint64_t> counts;
    for (const auto& run : numbers) {
        const auto mask = static_cast<std::byte>(run.mask);
        counts.push_back(0);
        for (uint64_t at = run.begin; at < run.end; at += run.width)
            counts.back() += (image[at] & mask) == mask;
    }
    return counts;
}

void write_plan(Engine& engine, const std::shared_ptr<Backend>& backend, int fd, Random& random,
                Plan& plan) {
    const size_t held = 1 + below(random, 5);
    const auto threads = static_cast<unsigned>(1 + below(random, 3));
    const auto numbers = random_numbers(random, plan);
    auto job = engine.stage(plan.described(numbers), std::make_shared<Allowance>(held), threads);
    std::shared_ptr<fastckpt::TokenBucket> bucket;  // a third of the jobs waits for tokens
    if (below(random, 3) == 0) bucket = std::make_shared<fastckpt::TokenBucket>(4e6, 4096);
    job->write_to(fd, 0, backend, false, {}, bucket);
    expect(job->wait(fastckpt::WriteJob::Stage::staged, kLongest), "a job is staged in time");
    expect(job->failure().error == 0, "a job succeeds");
    expect(job->block_crcs() == block_crcs(plan.image), "block checksums are right");
    expect(job->report().non_finite == counts_of(plan.image, numbers), "numbers are counted right");
    plan.scribble();
    expect(job->wait(fastckpt::WriteJob::Stage::written, kLongest), "a job is written in time");
    expect(job->report().nbytes_written == plan.image.size(), "all bytes are written");
}

void read_back(Engine& engine, const std::shared_ptr<Backend>& backend, int fd, Random& random,
               const Bytes& image, const Queues& queues = {}) {
    auto crcs = block_crcs(image);
    const bool damaged = below(random, 4) == 0;
    const size_t bad = below(random, crcs.size());
    if (damaged) crcs[bad] ^= 1;
    auto stream =
        engine.read(fd, image.size(), crcs, {}, backend, false, 1 + below(random, 6), nullptr);
    for (int i = 0; i < 5; ++i) {
        const size_t offset = below(random, image.size());
        Bytes target(below(random, image.size() - offset + 1));
        bool read = false;
        if (queues.empty() || target.empty()) {
            read = stream->read(target.data(), offset, target.size());
        } else {
            const auto range = range_on(queues[below(random, queues.size())], target);
            read = stream->read_runs({{offset, range.begin, target.size(), 1, 0, 0}}, {range});
            expect(stream->arrive(), "bytes arrive on a device");
        }
        const size_t end = offset + target.size();
        const bool touched =
            !target.empty() && offset / kBlockBytes <= bad && (end - 1) / kBlockBytes >= bad;
        expect(read == !(damaged && touched), "a read succeeds iff its blocks are sound");
        if (read)
            expect(std::equal(target.begin(), target.end(), image.begin() + offset),
                   "what is read is what was written");
        else
            expect(stream->corrupt_block() == static_cast<int64_t>(bad), "the bad block is named");
    }
    if (below(random, 2) == 0) stream->close();
}

// Writers and readers on several threads over the given backends, for `seconds`.
void work_together(const std::vector<std::shared_ptr<Backend>>& backends, double seconds,
                   const Queues& queues = {}) {
    Engine engine(6 * kBlockBytes, kBlockBytes, 3);
    const auto end = fastckpt::Clock::now() + std::chrono::duration<double>(seconds);
    std::atomic<int> rounds{0};
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 5; ++seed)
        threads.emplace_back([&, seed] {
            Random random(seed);
            while (fastckpt::Clock::now() < end && failures == 0) {
                const File file;
                Plan plan = random_plan(random, queues);
                write_plan(engine, backends[below(random, backends.size())], file.fd(), random,
                           plan);
                read_back(engine, backends[below(random, backends.size())], file.fd(), random,
                          plan.image, queues);
                ++rounds;
            }
        });
    for (auto& thread : threads) thread.join();
    engine.close();
    expect(engine.arena_blocks_in_use() == 0, "every block came back");
    expect(engine.arena_blocks_in_use_max() <= engine.arena_blocks(), "the budget is kept");
    std::printf("engine_stress: %s%s%s, %d rounds\n", backends[0]->name(),
                backends.size() > 1 ? " and others" : "", queues.empty() ? "" : " and devices",
                rounds.load());
}

// Transfers that are short, interrupted and refused by chance; one in `fatal` fails for good.
std::shared_ptr<Backend> faulty_backend(unsigned seed, unsigned fatal) {
    auto random = std::make_shared<Random>(seed);
    return fastckpt::threads_backend(
        1,
        [random, fatal](const Op& op, std::byte* data, size_t nbytes, uint64_t offset) -> ssize_t {
            switch (below(*random, 8)) {
                case 0:
                    return -EINTR;
                case 1:
                    return below(*random, 10) == 0 ? -EAGAIN : -EINTR;
                case 2:
                    nbytes = 1 + below(*random, nbytes);
                    break;
                default:
                    break;
            }
            if (fatal != 0 && below(*random, fatal) == 0) return -ENOSPC;
            return fastckpt::transfer_by_syscall(op, data, nbytes, offset);
        });
}

// Reads a file that may be short or not there yet. The stream is gone before anybody waits for a
// job: while it is open, it keeps blocks.
void read_in_vain(Engine& engine, const std::shared_ptr<Backend>& backend, int fd, size_t nbytes) {
    auto stream = engine.read(fd, nbytes, {}, {}, backend, false, 3, nullptr);
    Bytes target(nbytes);
    if (!stream->read(target.data(), 0, nbytes))
        expect(stream->failure().error != 0, "a failed read says why");
}

// Jobs and streams that fail, are cancelled or are dropped, beside others that must not notice.
void fail_together(double seconds) {
    const auto end = fastckpt::Clock::now() + std::chrono::duration<double>(seconds);
    std::atomic<int> failed{0};
    int engines = 0;
    const auto sound = fastckpt::threads_backend(2);
    const auto faulty = faulty_backend(99, 9);
    while (fastckpt::Clock::now() < end && failures == 0) {
        Engine engine(4 * kBlockBytes, kBlockBytes, 3);
        std::vector<std::thread> threads;
        for (unsigned number = 0; number < 4; ++number)
            threads.emplace_back([&, number] {
                Random random(number + 1000U * static_cast<unsigned>(engines));
                const File file;
                Plan plan = random_plan(random);
                if (number == 0) {
                    write_plan(engine, sound, file.fd(), random, plan);
                    return;
                }
                auto job = engine.stage(plan.described(), std::make_shared<Allowance>(2), 2);
                job->write_to(file.fd(), 0, faulty, false);
                if (number == 1) job->cancel();
                read_in_vain(engine, faulty, file.fd(), plan.image.size());
                expect(job->wait(fastckpt::WriteJob::Stage::staged, kLongest),
                       "a failed job is staged in time");
                plan.scribble();
                expect(job->wait(fastckpt::WriteJob::Stage::written, kLongest),
                       "a failed job ends in time");
                const int error = job->failure().error;
                expect(error == 0 || error == ENOSPC || error == ECANCELED, "the error is ours");
                expect((job->report().nbytes_written == plan.image.size()) == (error == 0),
                       "a job succeeds iff everything was written");
                if (error != 0) ++failed;
            });
        for (auto& thread : threads) thread.join();
        engine.close();
        expect(engine.arena_blocks_in_use() == 0, "every block came back");
        ++engines;
    }
    expect(failed > 0, "something failed");
    std::printf("engine_stress: faults, %d engines, %d failed jobs\n", engines, failed.load());
}

// An arena of one block that many jobs and streams have to share.
void share_one_block(const std::shared_ptr<Backend>& backend) {
    Engine engine(kBlockBytes, kBlockBytes, 3);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed)
        threads.emplace_back([&, seed] {
            Random random(seed);
            for (int i = 0; i < 10; ++i) {
                const File file;
                Plan plan = random_plan(random);
                write_plan(engine, backend, file.fd(), random, plan);
                read_back(engine, backend, file.fd(), random, plan.image);
            }
        });
    for (auto& thread : threads) thread.join();
    engine.close();
    expect(engine.arena_blocks_in_use_max() == 1, "one block serves all");
    std::printf("engine_stress: one block, %s\n", backend->name());
}

// Jobs whose device refuses a call, sooner or later, beside others that must not notice.
void refuse_together(const std::shared_ptr<Backend>& backend, const Queues& queues) {
    constexpr int kRefused = 700;
    constexpr std::array kCalls{"cuMemcpyDtoHAsync_v2", "cuMemcpyBatchAsync", "cuEventRecord",
                                "cuEventQuery", "cuEventSynchronize"};
    int refused = 0;
    for (int after = 0; after < 30; ++after) {
        const char* const call = kCalls[after % kCalls.size()];
        stub_fail(call, after / static_cast<int>(kCalls.size()), -1, kRefused, 0);
        Engine engine(4 * kBlockBytes, kBlockBytes, 3);
        std::atomic<int> failed{0};
        std::vector<std::thread> threads;
        for (unsigned number = 0; number < 3; ++number)
            threads.emplace_back([&, number] {
                Random random(number + 10U * static_cast<unsigned>(after));
                const File file;
                Plan plan = random_plan(random, number == 0 ? Queues{} : queues);
                if (number == 0) return write_plan(engine, backend, file.fd(), random, plan);
                auto job = engine.stage(plan.described(), std::make_shared<Allowance>(2), 2);
                job->write_to(file.fd(), 0, backend, false);
                expect(job->wait(fastckpt::WriteJob::Stage::staged, kLongest),
                       "a refused job is staged in time");
                plan.scribble();
                expect(job->wait(fastckpt::WriteJob::Stage::written, kLongest),
                       "a refused job ends in time");
                const int error = job->failure().error;
                expect(error == 0 || error == kRefused, "the error is the driver's");
                if (error != 0) ++failed;
            });
        for (auto& thread : threads) thread.join();
        stub_fail(call, 0, 0, 0, 0);
        engine.close();
        expect(engine.arena_blocks_in_use() == 0, "every block came back");
        refused += failed;
    }
    expect(refused > 0, "a device refused something");
    std::printf("engine_stress: devices that refuse, %d failed jobs\n", refused);
}

// A sink whose ops take cores: those of `threads`. It looks how much of an image is in memory when
// the first op comes, that of the first block.
class Client final : public fastckpt::FileSink {
  public:
    Client(Backend& threads, const Bytes& image, size_t blocks)
        : FileSink(threads), image_(image), nbytes_(blocks * kBlockBytes) {}
    bool takes_cores() const override { return true; }
    void submit(Op* op) override {
        if (!has_begun_)
            expect(std::memcmp(op->data, image_.data(), nbytes_) == 0,
                   "what is staged waits until all is, or memory lacks");
        has_begun_ = true;
        FileSink::submit(op);
    }
    fastckpt::Again handle(Op& op) override {
        op.done = op.nbytes;
        finish(op);
        return std::nullopt;
    }

  private:
    const Bytes& image_;
    const size_t nbytes_;
    bool has_begun_ = false;  // under the engine's lock
};

// A job whose writes take cores, with memory for some of its four blocks.
void hold_back(const std::shared_ptr<Backend>& threads, size_t blocks) {
    Engine engine(blocks * kBlockBytes, kBlockBytes, 1);
    Random random(static_cast<unsigned>(blocks));
    Plan plan;
    plan.add(random, 4 * kBlockBytes);
    const File file;
    auto job = engine.stage(plan.described(), std::make_shared<Allowance>(4), 1);
    job->write_to(file.fd(), 0, std::make_shared<Client>(*threads, plan.image, blocks), false);
    expect(job->wait(fastckpt::WriteJob::Stage::written, kLongest), "a job is written in time");
    expect(job->report().nbytes_written == plan.image.size(), "all bytes are written");
    engine.close();
    std::printf("engine_stress: held back, %zu blocks of memory\n", blocks);
}

std::shared_ptr<Backend> ring_or_nothing() {
    // What the kernel writes is invisible to the thread sanitizer, and would look like a race.
    if (UNDER_TSAN) return nullptr;
    try {
        return fastckpt::uring_backend(4);
    } catch (const fastckpt::BackendUnavailable& error) {
        std::printf("engine_stress: without io_uring: %s\n", error.what());
        return nullptr;
    }
}

// Runs one stage; a hang is a failure that says where.
void run(const char* stage, const std::function<void()>& body) {
    std::atomic<bool> done{false};
    std::thread watch([&] {
        const auto end = fastckpt::Clock::now() + std::chrono::seconds(60);
        while (!done && fastckpt::Clock::now() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        if (done) return;
        std::fprintf(stderr, "engine_stress: hangs in: %s\n", stage);
        std::_Exit(EXIT_FAILURE);
    });
    body();
    done = true;
    watch.join();
}

}  // namespace

int main() {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const auto threads = fastckpt::threads_backend(3);
    const auto ring = ring_or_nothing();
    const auto interrupted = faulty_backend(7, 0);
    run("threads", [&] { work_together({threads}, 1.0); });
    if (ring != nullptr) run("io_uring", [&] { work_together({ring}, 1.0); });
    if (ring != nullptr) run("both", [&] { work_together({ring, threads, interrupted}, 1.0); });
    run("short and interrupted", [&] { work_together({interrupted, threads}, 1.0); });
    run("one block, threads", [&] { share_one_block(threads); });
    if (ring != nullptr) run("one block, io_uring", [&] { share_one_block(ring); });
    run("faults", [&] { fail_together(1.5); });
    const auto driver = std::make_shared<fastckpt::cuda::Driver>("");  // this program's own
    Queues queues;
    for (int device = 0; device < 2; ++device)
        queues.push_back(std::make_shared<fastckpt::DeviceQueue>(driver, device));
    run("held back", [&] {
        for (const size_t blocks : {1, 2, 4}) hold_back(threads, blocks);
    });
    run("devices", [&] { work_together({threads}, 1.0, queues); });
    run("devices that refuse", [&] { refuse_together(threads, queues); });
    for (const auto& queue : queues) queue->close();
    for (const auto& backend : {threads, ring, interrupted})
        if (backend != nullptr) backend->close();
    std::printf("engine_stress: %d failures\n", failures.load());
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
