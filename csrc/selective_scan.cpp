// Mamba's selective scan for one instruction set: this file is compiled once for each. A unit of work is a block of
// channels on its way through a run of sequences.
#include "selective_scan.h"

#include "parallel.h"
#include "selective_scan_block.h"

namespace gsa {
namespace GSA_ISA {
namespace {

int padded_channels(const GsaSelectiveScan& call) {
    return (call.u.width + kScanPadding - 1) / kScanPadding * kScanPadding;
}

// Sums over the channels of a block, and over the tokens of a run; added up when all units are done.
template <class T>
struct ScanSums {
    T *dB, *dC;  // [blocks, tokens of all sequences, S]
    T* dA;       // [runs, blocks, S, kScanChannels]

    ScanSums(Arena& arena, const GsaSelectiveScan& call, bool backward, const ScanPlan& plan) {
        if (!backward) return;
        const size_t S = call.B.width, blocks = plan.blocks, tokens = plan.first_token[call.shape.sequences];
        dB = arena.take<T>(blocks * tokens * S);
        dC = arena.take<T>(blocks * tokens * S);
        dA = arena.take<T>(plan.runs * blocks * S * kScanChannels);
    }
};

template <class T>
struct ScanUnit {
    const GsaSelectiveScan& call;
    const ScanPlan& plan;
    const ScanSums<T>& sums;
    ScanBlock<T> block;
    int index, first, channels;  // of the block: its number, its first channel and how many
    Prefetcher prefetcher;
    Team team;
    bool bad_gates = false;  // whether a rate was above 0, a length below 0, or one of them NaN

    ScanUnit(Arena& arena, const GsaSelectiveScan& call, bool backward, const ScanPlan& plan, const ScanSums<T>& sums)
        : call(call), plan(plan), sums(sums), block(arena, call.B.width, backward), index(0), first(0), channels(0) {
        team.prefetcher = &prefetcher;
    }

    void choose(int number) {
        index = number;
        first = number * kScanChannels;
        const int left = call.u.width - first, padded = padded_channels(call) - first;
        channels = left < kScanChannels ? left : kScanChannels;
        block.lanes = padded < kScanChannels ? padded : kScanChannels;
        if (call.A.type == (sizeof(T) == 8 ? GSA_FLOAT64 : GSA_FLOAT32)) {
            block.transpose_in(static_cast<const T*>(call.A.data) + first * call.A.head, call.A.head, channels,
                               block.A);
        } else {
            for (int i = 0; i < channels; i++)
                read(call.A, (first + i) * call.A.head, T(1), block.rows + i * block.S, block.S);
            block.transpose_in(block.rows, block.S, channels, block.A);
        }
    }

    int chunks(int64_t n) const {
        return static_cast<int>((call.shape.stops[n] - call.shape.starts[n] + kScanChunk - 1) / kScanChunk);
    }

    HeadChunk chunk_at(int64_t n, int index) const {
        const int64_t start = call.shape.starts[n] + static_cast<int64_t>(index) * kScanChunk;
        const int64_t left = call.shape.stops[n] - start;
        const int count = left < kScanChunk ? static_cast<int>(left) : kScanChunk;
        return {call.shape.rows[n], start, count, count, 0};
    }

    // The block's channels of a tensor [B, T, 1, E].
    GsaTensor mine(const GsaTensor& x) const {
        const int size = x.type == GSA_FLOAT64 ? 8 : x.type == GSA_FLOAT32 ? 4 : 2;
        GsaTensor part = x;
        part.data = static_cast<char*>(x.data) + static_cast<int64_t>(first) * size;
        part.width = channels;
        return part;
    }

    // Of the block's channels, after `choose`.
    void check_rates() {
        bool bad = false;
        for (int s = 0; s < block.S; s++)
            for (int e = 0; e < channels; e++) bad |= !(block.A[s * kScanChannels + e] <= 0);
        bad_gates |= bad;
    }

    // Of the chunk that was read last; what is padded is 0.
    void check_lengths(int count) {
        typename Simd<T>::Int bad{};
        for (int t = 0; t < count; t++)
            for (int e = 0; e < block.lanes; e += Simd<T>::W) bad |= ~(load(block.dt + t * kScanChannels + e) >= T(0));
        bad_gates |= !none<T>(bad);
    }

    void read_chunk(const HeadChunk& chunk, bool backward) {
        read_rows(team, mine(call.u), chunk, 1, T(1), block.u, kScanChannels, block.lanes);
        read_rows(team, mine(call.dt), chunk, 1, T(1), block.dt, kScanChannels, block.lanes);
        read_rows(team, call.B, chunk, 1, T(1), block.B, block.S, block.S);
        read_rows(team, call.C, chunk, 1, T(1), block.C, block.S, block.S);
        if (backward) read_rows(team, mine(call.d_y), chunk, 1, T(1), block.y, kScanChannels, block.lanes);
    }

    // Says which rows come next.
    void prefetch(const HeadChunk& chunk, bool backward) {
        prefetcher.clear();
        prefetch_rows(team, mine(call.u), chunk, 1);
        prefetch_rows(team, mine(call.dt), chunk, 1);
        if (backward) prefetch_rows(team, mine(call.d_y), chunk, 1);
    }

    // The block's part [channels, S] of state n of `states` [N, E, S].
    template <class P>
    P* state(P* states, int64_t n) const {
        return states == nullptr ? nullptr : states + (n * call.u.width + first) * block.S;
    }

    // to [S, channels] = the block's part of state n of `from` [N, E, S], or zero if that is null.
    void read_state(const void* from, int64_t n, T* to) {
        block.transpose_in(state(static_cast<const T*>(from), n), block.S, channels, to);
    }

    void write_state(const T* from, void* to, int64_t n) {
        block.transpose_out(from, channels, state(static_cast<T*>(to), n), block.S);
    }

    // Row s of this block's columns in mark `number` of call.kept [marks, S, padded_channels].
    T* mark(int64_t number, int s) const {
        return static_cast<T*>(call.kept) + (number * block.S + s) * padded_channels(call) + first;
    }

    void forward(int64_t n) {
        read_state(call.initial, n, block.h);
        for (int c = 0; c < chunks(n); c++) {
            const HeadChunk chunk = chunk_at(n, c);
            if (call.kept != nullptr)
                for (int s = 0; s < block.S; s++)
                    __builtin_memcpy(mark(plan.first_mark[n] + c, s), block.h + s * kScanChannels,
                                     sizeof(T) * block.lanes);
            read_chunk(chunk, false);
            check_lengths(chunk.count);
            if (c + 1 < chunks(n)) prefetch(chunk_at(n, c + 1), false);
            block.forward(chunk.count, team);
            write_rows(team, block.y, kScanChannels, T(1), chunk, 1, mine(call.y));
        }
        write_state(block.h, call.final, n);
    }

    void backward(int64_t n) {
        const int64_t tokens = plan.first_token[call.shape.sequences];
        read_state(call.dfinal, n, block.dh);
        for (int c = chunks(n) - 1; c >= 0; c--) {
            const HeadChunk chunk = chunk_at(n, c);
            for (int s = 0; s < block.S; s++)
                __builtin_memcpy(block.h + s * kScanChannels, mark(plan.first_mark[n] + c, s), sizeof(T) * block.lanes);
            read_chunk(chunk, true);
            if (c > 0) prefetch(chunk_at(n, c - 1), true);
            block.backward(chunk.count, team);
            write_rows(team, block.dx, kScanChannels, T(1), chunk, 1, mine(call.du));
            write_rows(team, block.ddt, kScanChannels, T(1), chunk, 1, mine(call.d_dt));
            const int64_t token = index * tokens + plan.first_token[n] + static_cast<int64_t>(c) * kScanChunk;
            __builtin_memcpy(sums.dB + token * block.S, block.dB, sizeof(T) * block.S * chunk.count);
            __builtin_memcpy(sums.dC + token * block.S, block.dC, sizeof(T) * block.S * chunk.count);
        }
        write_state(block.dh, call.dinitial, n);
    }

    // Block `number` of all sequences of a run.
    void walk(int run, int number, bool backward_too) {
        choose(number);
        if (!backward_too) check_rates();
        const size_t states = static_cast<size_t>(block.S) * kScanChannels;
        if (backward_too)
            for (size_t i = 0; i < states; i++) block.dA[i] = 0;
        prefetcher.clear();
        for (int64_t n = plan.first_sequence[run]; n < plan.first_sequence[run + 1]; n++) {
            if (backward_too)
                backward(n);
            else
                forward(n);
        }
        if (backward_too)
            __builtin_memcpy(sums.dA + (static_cast<size_t>(run) * plan.blocks + number) * states, block.dA,
                             sizeof(T) * states);
    }

    // The sums of all blocks, for a share of the tokens, and of all runs, for a share of the blocks.
    void finish(int rank, int size) {
        const int64_t tokens = plan.first_token[call.shape.sequences];
        const int64_t from = tokens * rank / size, to = tokens * (rank + 1) / size;
        for (int64_t n = 0; n < call.shape.sequences; n++) {
            const int64_t before = plan.first_token[n], after = plan.first_token[n + 1];
            for (int64_t i = from > before ? from : before; i < (to < after ? to : after); i++) {
                const int64_t t = call.shape.starts[n] + i - before;
                add_blocks(sums.dB, i, tokens, call.dB, call.shape.rows[n] * call.dB.batch + t * call.dB.time);
                add_blocks(sums.dC, i, tokens, call.dC, call.shape.rows[n] * call.dC.batch + t * call.dC.time);
            }
        }
        for (int64_t b = plan.blocks * rank / size; b < static_cast<int64_t>(plan.blocks) * (rank + 1) / size; b++) {
            choose(static_cast<int>(b));
            const size_t states = static_cast<size_t>(block.S) * kScanChannels;
            __builtin_memcpy(block.dA, sums.dA + b * states, sizeof(T) * states);
            for (int run = 1; run < plan.runs; run++) {
                const T* part = sums.dA + (static_cast<size_t>(run) * plan.blocks + b) * states;
                for (size_t i = 0; i < states; i++) block.dA[i] += part[i];
            }
            block.transpose_out(block.dA, channels, block.rows, block.S);
            for (int i = 0; i < channels; i++)
                write(block.rows + i * block.S, T(1), call.dA, (first + i) * call.dA.head);
        }
    }

    // The sum of a token's rows in `parts` [blocks, tokens, S], to the row of `out` that begins at `offset`.
    void add_blocks(const T* parts, int64_t token, int64_t tokens, const GsaTensor& out, int64_t offset) {
        T* total = block.B;
        for (int s = 0; s < block.S; s++) total[s] = parts[token * block.S + s];
        for (int b = 1; b < plan.blocks; b++)
            for (int s = 0; s < block.S; s++) total[s] += parts[(b * tokens + token) * block.S + s];
        write(total, T(1), out, offset);
    }
};

template <class T>
struct Scan {
    const GsaSelectiveScan& call;
    bool backward;
    const ScanPlan& plan;
    ScanSums<T> sums;
    char* memory;
    size_t per_thread;
    int64_t next;            // unit that nobody works on yet
    bool bad_gates = false;  // of any unit

    ScanUnit<T> unit(int rank) const {
        Arena arena;
        arena.base = memory + static_cast<size_t>(rank) * per_thread;
        return ScanUnit<T>(arena, call, backward, plan, sums);
    }

    static void thread(void* context, int rank, int) {
        Scan& scan = *static_cast<Scan*>(context);
        ScanUnit<T> unit = scan.unit(rank);
        for (;;) {
            const int64_t number = __atomic_fetch_add(&scan.next, 1, __ATOMIC_RELAXED);
            if (number >= static_cast<int64_t>(scan.plan.runs) * scan.plan.blocks) break;
            unit.walk(static_cast<int>(number / scan.plan.blocks), static_cast<int>(number % scan.plan.blocks),
                      scan.backward);
        }
        if (unit.bad_gates) __atomic_store_n(&scan.bad_gates, true, __ATOMIC_RELAXED);
    }

    static void finish(void* context, int rank, int size) {
        const Scan& scan = *static_cast<Scan*>(context);
        scan.unit(rank).finish(rank, size);
    }
};

template <class T>
ScanMemory size_for(const GsaSelectiveScan& call, bool backward, const ScanPlan& plan) {
    Arena shared, own;
    const ScanSums<T> sums(shared, call, backward, plan);
    ScanBlock<T>(own, call.B.width, backward);
    return {shared.used + 64, own.used + 64};  // apart from the neighbour's
}

template <class T>
bool run(const GsaSelectiveScan& call, bool backward, const ScanPlan& plan, int threads, char* memory,
         ScanMemory size) {
    Arena shared;
    shared.base = memory;
    Scan<T> scan{call, backward, plan, ScanSums<T>(shared, call, backward, plan), memory + size.shared, size.per_thread,
                 0};
    as_they_come(threads, Scan<T>::thread, &scan);
    if (backward) as_team(threads, Scan<T>::finish, &scan);
    return !scan.bad_gates;
}

ScanMemory size(const GsaSelectiveScan& call, bool backward, const ScanPlan& plan) {
    return call.shape.wide ? size_for<double>(call, backward, plan) : size_for<float>(call, backward, plan);
}

bool compute(const GsaSelectiveScan& call, bool backward, const ScanPlan& plan, int threads, char* memory,
             ScanMemory size) {
    return call.shape.wide ? run<double>(call, backward, plan, threads, memory, size)
                           : run<float>(call, backward, plan, threads, memory, size);
}

}  // namespace

extern const ScanKernels scan_kernels;
const ScanKernels scan_kernels = {size, compute};

}  // namespace GSA_ISA
}  // namespace gsa
