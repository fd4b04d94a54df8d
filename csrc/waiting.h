// A number that threads wait on: for a moment they look again and again, then they sleep until it changes.
#pragma once

#include <cstdint>

namespace gsa {

// Plain numbers and no member functions that a compiler would copy into every kernel. All access goes through the
// functions below; nothing of it may lie in memory that is gone while another thread still changes or waits for it.
struct Signal {
    uint32_t value = 0;
    uint32_t sleepers = 0;
};

uint32_t value_of(const Signal& signal);

// Gives it another value; those who sleep wake up. What was written before is visible to whoever sees the new value.
void set(Signal& signal, uint32_t value);

// The same, if the value is `from`; otherwise false, and nothing changes.
bool replace(Signal& signal, uint32_t from, uint32_t to);

// Returns once the value is another one.
void wait_while(Signal& signal, uint32_t value);

// Of a clock that only goes forward.
int64_t microseconds_now();

// Returns once the value is another one, or the clock has come to `end`; without sleep.
void spin_while(const Signal& signal, uint32_t value, int64_t end);

// In the child of a fork: whoever slept is gone, and nobody holds what they slept on.
void forget_sleepers();

}  // namespace gsa
