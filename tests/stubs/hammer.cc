// A thread that writes to memory which others read. Built by the tests; it must not know who reads.
#include <cstdint>

// Writes two words in turn to an address, until the word at `stop` is not zero.
extern "C" void hammer(volatile uint32_t* target, uint32_t one, uint32_t other,
                       const volatile uint32_t* stop) {
    while (*stop == 0) {
        *target = one;
        *target = other;
    }
}
