// A few threads that work on the same chunk, and what a thread has yet to read. A team of one waits for nobody.
#pragma once

#include <cstddef>

#include "waiting.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Where the members of a team wait until all have come. The numbers have cache lines of their own, because everybody
// looks at `round`.
struct Barrier {
    alignas(64) int waiting = 0;  // members that have come in this round
    alignas(64) Signal round;     // goes up when all have come
};

// Rows of memory that will be read next, in spans of rows a stride apart. They are fetched into the cache bit by bit
// while something is computed: every row starts somewhere else, which the processor cannot foresee.
class Prefetcher {
   public:
    void clear() { count_ = span_ = row_ = line_ = 0; }

    // `rows` rows of so many bytes, `stride` bytes apart.
    void add(const char* base, ptrdiff_t stride, int rows, ptrdiff_t bytes) {
        if (count_ < kSpans && rows > 0) spans_[count_++] = {base, stride, rows, static_cast<int>((bytes + 63) / 64)};
    }

    // The next so many lines of 64 bytes.
    void fetch(int lines) {
        while (lines > 0 && span_ < count_) {
            const Span& s = spans_[span_];
            const char* p = s.base + row_ * s.stride;
            for (; lines > 0 && line_ < s.lines; lines--, line_++) __builtin_prefetch(p + 64 * line_, 0, 2);
            if (line_ < s.lines) return;
            line_ = 0;
            if (++row_ < s.rows) continue;
            row_ = 0;
            span_++;
        }
    }

   private:
    struct Span {
        const char* base;
        ptrdiff_t stride;
        int rows, lines;
    };
    static constexpr int kSpans = 64;  // what is more is not fetched ahead
    Span spans_[kSpans];
    int count_ = 0, span_ = 0, row_ = 0, line_ = 0;
};

struct Team {
    int rank = 0, size = 1;
    Barrier* barrier = nullptr;
    Prefetcher* prefetcher = nullptr;

    // This member's share of `count` equal pieces of work.
    int begin(int count) const { return static_cast<int>(static_cast<long>(count) * rank / size); }
    int end(int count) const { return static_cast<int>(static_cast<long>(count) * (rank + 1) / size); }

    // Until all members are here. What they wrote before is then visible to all.
    void wait() const {
        if (size == 1) return;
        const uint32_t round = value_of(barrier->round);
        if (__atomic_add_fetch(&barrier->waiting, 1, __ATOMIC_ACQ_REL) == size) {
            __atomic_store_n(&barrier->waiting, 0, __ATOMIC_RELAXED);
            set(barrier->round, round + 1);
        } else {
            wait_while(barrier->round, round);
        }
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
