// Byte planes against shifts of one item at a time: every short length, every width, turned or not,
// at odd addresses, on memory with nothing readable or writable beyond it.
// Knows planes.h; must not know who splits what.
#include "planes/planes.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace {

// Allocated to the byte, so that the address sanitizer sees the first access beyond it.
struct Exact {
    Exact(size_t nbytes, size_t skew)
        : memory(new uint8_t[nbytes + skew]), data(&memory[0] + skew) {}
    std::unique_ptr<uint8_t[]> memory;
    uint8_t* data;
};

uint64_t item_at(const uint8_t* data, size_t width, bool turned) {
    uint64_t item = 0;
    for (size_t p = 0; p < width; ++p) item |= static_cast<uint64_t>(data[p]) << 8 * p;
    if (!turned) return item;
    const uint64_t all = ~uint64_t{0} >> (64 - 8 * width);
    return (item << 1 | item >> (8 * width - 1)) & all;
}

bool check(size_t count, size_t width, bool turned, std::mt19937& random) {
    const size_t skew = random() % 8;
    const Exact items(count * width, skew), joined(count * width, 7 - skew);
    for (size_t i = 0; i < count * width; ++i) items.data[i] = static_cast<uint8_t>(random());
    std::vector<Exact> planes;
    std::vector<uint8_t*> to;
    for (size_t p = 0; p < width; ++p)
        to.push_back(planes.emplace_back(count, (skew + p) % 8).data);
    fastckpt::split_planes(items.data, count, width, turned, to.data());
    for (size_t i = 0; i < count; ++i) {
        const uint64_t wanted = item_at(items.data + i * width, width, turned);
        for (size_t p = 0; p < width; ++p) {
            if (to[p][i] != (wanted >> 8 * p & 0xff)) return false;
        }
    }
    fastckpt::join_planes(to.data(), count, width, turned, joined.data);
    return std::memcmp(items.data, joined.data, count * width) == 0;
}

}  // namespace

int main() {
    std::mt19937 random(20240229);
    int failures = 0;
    for (const size_t width : {1, 2, 4, 8}) {
        for (const bool turned : {false, true}) {
            if (turned && width == 1) continue;
            for (size_t count = 1; count < 1100; ++count)
                if (!check(count, width, turned, random)) ++failures;
            for (int i = 0; i < 20; ++i)
                if (!check(1 + random() % 50000, width, turned, random)) ++failures;
        }
    }
    if (fastckpt::has_planes(0) || fastckpt::has_planes(3) || !fastckpt::has_planes(8)) ++failures;
    std::printf("planes: %d failures\n", failures);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
