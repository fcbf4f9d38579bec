// Frames of literals keep within their memory: any bytes, any capacity, allocated to the byte, so
// that the address sanitizer sees the first access beyond. What a decoder makes of the frames is
// tested in Python.
// Knows literals.h; must not know planes.
#include "planes/literals.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

namespace {

// Bytes of `symbols` values, the later ones rarer by a power.
std::vector<uint8_t> drawn(size_t count, size_t symbols, double power, std::mt19937& random) {
    std::uniform_real_distribution<double> share;
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes)
        byte = static_cast<uint8_t>(static_cast<double>(symbols) * std::pow(share(random), power));
    bytes.shrink_to_fit();
    return bytes;
}

// The size of a frame in memory of just this capacity, which it must not exceed.
size_t put(const std::vector<uint8_t>& bytes, size_t capacity) {
    const std::unique_ptr<uint8_t[]> target(new uint8_t[capacity]);
    return fastckpt::put_literals(bytes.data(), bytes.size(), target.get(), capacity);
}

bool check(const std::vector<uint8_t>& bytes, std::mt19937& random) {
    const size_t most = bytes.size() + bytes.size() / 1024 + 64, size = put(bytes, most);
    if (size == 0 || size > most) return false;
    for (int i = 0; i < 4; ++i) {
        const size_t capacity = random() % (size + 64), nbytes = put(bytes, capacity);
        if (nbytes != 0 && (nbytes != size || nbytes > capacity)) return false;
    }
    return put(bytes, size - 1) == 0;
}

}  // namespace

int main() {
    std::mt19937 random(20240229);
    int failures = 0;
    for (size_t count = 1; count < 300; ++count)
        if (!check(drawn(count, 1 + random() % 256, 3, random), random)) ++failures;
    for (int i = 0; i < 300; ++i) {
        const auto power = static_cast<double>(1 + random() % 20);
        const size_t count = 1 + random() % 100000, symbols = 1 + random() % 256;
        if (!check(drawn(count, symbols, power, random), random)) ++failures;
    }
    std::printf("literals: %d failures\n", failures);
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
