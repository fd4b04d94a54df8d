// A few threads that work on the same chunk. A team of one waits for nobody.
#pragma once

#include <sched.h>

namespace gsa {
namespace GSA_ISA {
namespace {

struct Gate {
    // On cache lines of their own: everybody spins on `round`.
    alignas(64) int waiting = 0;
    alignas(64) int round = 0;
};

struct Team {
    int rank = 0, size = 1;
    Gate* gate = nullptr;

    // This member's share of `count` equal pieces of work.
    int begin(int count) const { return static_cast<int>(static_cast<long>(count) * rank / size); }
    int end(int count) const { return static_cast<int>(static_cast<long>(count) * (rank + 1) / size); }

    // Until all members are here. What they wrote before is then visible to all.
    void wait() const {
        if (size == 1) return;
        const int round = __atomic_load_n(&gate->round, __ATOMIC_RELAXED);
        if (__atomic_add_fetch(&gate->waiting, 1, __ATOMIC_ACQ_REL) == size) {
            __atomic_store_n(&gate->waiting, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&gate->round, round + 1, __ATOMIC_RELEASE);
            return;
        }
        // A member may have lost its core to another process: after a while, make room for it.
        for (int spins = 0; __atomic_load_n(&gate->round, __ATOMIC_ACQUIRE) == round; spins++)
            if (spins > 2000) sched_yield();
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
