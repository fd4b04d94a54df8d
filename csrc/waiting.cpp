#include "waiting.h"

#include <ctime>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <pthread.h>
#endif

#include "crowd.h"

namespace gsa {
namespace {

// How long a thread keeps its core while it waits. Partners that have cores of their own come within microseconds, and
// falling asleep would cost more. Where other processes want the cores, a partner may be gone for milliseconds, and
// whoever spins that long loses its own core, too.
constexpr int kSpinMicroseconds = 200, kCrowdedMicroseconds = 5;
constexpr int kLooksPerClock = 16;  // reading the clock takes longer than looking

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#ifdef __linux__

// Sleeps unless the value is another one already; may return for no reason.
void sleep_while(Signal& signal, uint32_t value) {
    syscall(SYS_futex, &signal.value, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(Signal& signal) { syscall(SYS_futex, &signal.value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

#else

// One place to sleep for all: whoever wakes looks whether it was meant.
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t condition = PTHREAD_COND_INITIALIZER;

void sleep_while(Signal& signal, uint32_t value) {
    pthread_mutex_lock(&mutex);
    if (value_of(signal) == value) pthread_cond_wait(&condition, &mutex);
    pthread_mutex_unlock(&mutex);
}

void wake_all(Signal&) {
    pthread_mutex_lock(&mutex);  // nobody is between looking and sleeping now
    pthread_mutex_unlock(&mutex);
    pthread_cond_broadcast(&condition);
}

#endif

// A sleeper counts itself before it looks at the value for the last time, and the value changes before sleepers are
// counted: in this order for all threads, so one of the two notices the other.
void wake_sleepers(Signal& signal) {
    if (__atomic_load_n(&signal.sleepers, __ATOMIC_SEQ_CST) != 0) wake_all(signal);
}

}  // namespace

int64_t microseconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<int64_t>(now.tv_sec) * 1000000 + now.tv_nsec / 1000;
}

uint32_t value_of(const Signal& signal) { return __atomic_load_n(&signal.value, __ATOMIC_ACQUIRE); }

void set(Signal& signal, uint32_t value) {
    __atomic_store_n(&signal.value, value, __ATOMIC_SEQ_CST);
    wake_sleepers(signal);
}

bool replace(Signal& signal, uint32_t from, uint32_t to) {
    if (!__atomic_compare_exchange_n(&signal.value, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE)) return false;
    wake_sleepers(signal);
    return true;
}

void spin_while(const Signal& signal, uint32_t value, int64_t end) {
    do {
        for (int look = 0; look < kLooksPerClock; look++) {
            if (value_of(signal) != value) return;
            relax();
        }
    } while (microseconds_now() < end);
}

void wait_while(Signal& signal, uint32_t value) {
    spin_while(signal, value, microseconds_now() + (crowded() ? kCrowdedMicroseconds : kSpinMicroseconds));
    if (value_of(signal) != value) return;
    __atomic_add_fetch(&signal.sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&signal.value, __ATOMIC_SEQ_CST) == value) sleep_while(signal, value);
    __atomic_sub_fetch(&signal.sleepers, 1, __ATOMIC_SEQ_CST);
}

void forget_sleepers() {
#ifndef __linux__
    mutex = PTHREAD_MUTEX_INITIALIZER;
    condition = PTHREAD_COND_INITIALIZER;
#endif
}

}  // namespace gsa
