// Mamba's selective scan on a chunk of tokens of a block of channels, which are the lanes of the vectors. A few states
// of a vector of channels at a time go through all tokens of the chunk, in registers.
#pragma once

#include "chunks.h"
#include "selective_scan.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Letters: S states of a channel, E channels of the block (at most kScanChannels), W channels in a vector; there are at
// most kScanChunk tokens. Rows of [.., E] matrices are kScanChannels apart, those of [.., S] matrices S.
template <class T>
struct ScanBlock {
    static constexpr int W = Simd<T>::W;
    static constexpr int kBackwardStates = 4;  // at a time, at most: as many as registers hold

    int S;
    int padded_states;  // S in whole vectors, for transposing
    int lanes = 0;      // E of this block, padded to whole vectors

    T *u, *dt;  // [tokens, E]
    T* x;       // [tokens, E]: dt * u
    T* y;       // [tokens, E]; backward: its gradient
    T *B, *C;   // [tokens, S]
    T *A, *h;   // [S, E]: rates and states; rows up to padded_states
    T* tile;    // [W, padded_states], for transposing a vector of channels
    T* rows;    // [E, S]: A as the caller has it, or its gradient, as numbers of T

    // backward
    T *dx, *ddt;             // [tokens, E]
    T *dB, *dC;              // [tokens, S]: sums over the block's channels
    T *dA, *dh;              // [S, E]
    T *decay, *kept;         // [tokens, a few states, W]: exp(dt A), and that times the state before
    T *dB_lanes, *dC_lanes;  // [tokens, a few states, W]: sums over vectors of channels

    ScanBlock(Arena& arena, int S, bool backward) : S(S), padded_states(whole_vectors<T>(S)) {
        const size_t tokens = static_cast<size_t>(kScanChunk) * kScanChannels;
        const size_t by_state = static_cast<size_t>(kScanChunk) * S;
        const size_t states = static_cast<size_t>(padded_states) * kScanChannels;
        T** const common[] = {&u, &dt, &x, &y};
        for (T** p : common) *p = arena.take<T>(tokens);
        B = arena.take<T>(by_state);
        C = arena.take<T>(by_state);
        A = arena.take<T>(states);
        h = arena.take<T>(states);
        tile = arena.take<T>(static_cast<size_t>(W) * padded_states);
        rows = arena.take<T>(static_cast<size_t>(kScanChannels) * S);
        if (!backward) return;
        dx = arena.take<T>(tokens);
        ddt = arena.take<T>(tokens);
        dB = arena.take<T>(by_state);
        dC = arena.take<T>(by_state);
        dA = arena.take<T>(states);
        dh = arena.take<T>(states);
        T** const few[] = {&decay, &kept, &dB_lanes, &dC_lanes};
        for (T** p : few) *p = arena.take<T>(static_cast<size_t>(kScanChunk) * kBackwardStates * W);
    }

    // N states from s on of the vector of channels at `lane`, through `count` tokens: y [tokens, W] (+)= C h, h [N, W]
    // moved on.
    template <int N>
    void forward_states(int count, int lane, int s) {
        Vec<T> state[N], rate[N];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            state[i] = load(h + (s + i) * kScanChannels + lane);
            rate[i] = load(A + (s + i) * kScanChannels + lane);
        }
        for (int t = 0; t < count; t++) {
            const int offset = t * kScanChannels + lane;
            const Vec<T> step = load(dt + offset), input = load(x + offset);
            const T *b = B + t * S + s, *c = C + t * S + s;
            Vec<T> out = s == 0 ? Vec<T>{} : load(y + offset);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) {
                state[i] = exp<T>(step * rate[i]) * state[i] + input * b[i];
                out += state[i] * c[i];
            }
            store(y + offset, out);
        }
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) store(h + (s + i) * kScanChannels + lane, state[i]);
    }

    // The same states with their gradients, first forward and then back: h stays as it is before the chunk, dh becomes
    // its gradient. dx, ddt (+)= the part that goes through these states; the lanes of dB and dC are added to.
    template <int N>
    void backward_states(int count, int lane, int s) {
        Vec<T> state[N], rate[N], drate[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            state[i] = load(h + (s + i) * kScanChannels + lane);
            rate[i] = load(A + (s + i) * kScanChannels + lane);
        }
        for (int t = 0; t < count; t++) {
            const int offset = t * kScanChannels + lane;
            const Vec<T> step = load(dt + offset), input = load(x + offset);
            const T* b = B + t * S + s;
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                const Vec<T> a = exp<T>(step * rate[i]), stays = a * state[i];
                store(decay + (t * N + i) * W, a);
                store(kept + (t * N + i) * W, stays);
                state[i] = stays + input * b[i];
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            state[i] = load(dh + (s + i) * kScanChannels + lane);  // from here on the gradient
            drate[i] = Vec<T>{};
        }
        for (int t = count - 1; t >= 0; t--) {
            const int offset = t * kScanChannels + lane;
            const Vec<T> step = load(dt + offset), input = load(x + offset), dout = load(y + offset);
            const T *b = B + t * S + s, *c = C + t * S + s;
            Vec<T> dinput = s == 0 ? Vec<T>{} : load(dx + offset), dstep = s == 0 ? Vec<T>{} : load(ddt + offset);
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                const int few = (t * N + i) * W;
                const Vec<T> stays = load(kept + few), after = stays + input * b[i];
                state[i] += dout * c[i];
                store(dC_lanes + few, load(dC_lanes + few) + dout * after);
                store(dB_lanes + few, load(dB_lanes + few) + state[i] * input);
                dinput += state[i] * b[i];
                const Vec<T> dlog = state[i] * stays;  // of dt A
                drate[i] += dlog * step;
                dstep += dlog * rate[i];
                state[i] *= load(decay + few);
            }
            store(dx + offset, dinput);
            store(ddt + offset, dstep);
        }
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            T* sum = dA + (s + i) * kScanChannels + lane;  // of chunks, each summed by itself: fewer digits are lost
            store(sum, load(sum) + drate[i]);
            store(dh + (s + i) * kScanChannels + lane, state[i]);
        }
    }

    // N states from s on, of all channels.
    template <int N>
    void forward_all_lanes(int count, int s, const Team& team) {
        for (int lane = 0; lane < lanes; lane += W) {
            forward_states<N>(count, lane, s);
            team.prefetcher->fetch(count);
        }
    }

    // The same backward, and the columns s to s + N of dB and dC.
    template <int N>
    void backward_all_lanes(int count, int s, const Team& team) {
        for (int i = 0; i < count * N * W; i++) dB_lanes[i] = dC_lanes[i] = 0;
        for (int lane = 0; lane < lanes; lane += W) {
            backward_states<N>(count, lane, s);
            team.prefetcher->fetch(count);
        }
        for (int t = 0; t < count; t++)
            for (int i = 0; i < N; i++) {
                dB[t * S + s + i] = sum<T>(load(dB_lanes + (t * N + i) * W));
                dC[t * S + s + i] = sum<T>(load(dC_lanes + (t * N + i) * W));
            }
    }

    // `count` tokens: y [tokens, E] from u, dt, B, C, with h [S, E] moved on to after them.
    void forward(int count, const Team& team) {
        multiply(count);
        int s = 0;
        for (; s + 8 <= S; s += 8) forward_all_lanes<8>(count, s, team);
        if (s + 4 <= S) forward_all_lanes<4>(count, s, team), s += 4;
        if (s + 2 <= S) forward_all_lanes<2>(count, s, team), s += 2;
        if (s < S) forward_all_lanes<1>(count, s, team);
    }

    // Gradients from that of y: dx [tokens, E] becomes that of u, ddt [tokens, E] that of dt, dB and dC [tokens, S] are
    // this block's part; dA [S, E] is added to, dh [S, E] moved back to before the tokens. h [S, E] is the state before
    // them.
    void backward(int count, const Team& team) {
        multiply(count);
        int s = 0;
        for (; s + 4 <= S; s += 4) backward_all_lanes<4>(count, s, team);
        if (s + 2 <= S) backward_all_lanes<2>(count, s, team), s += 2;
        if (s < S) backward_all_lanes<1>(count, s, team);
        each_vector(count, [&](int offset) {
            const Vec<T> dinput = load(dx + offset);
            store(ddt + offset, load(ddt + offset) + dinput * load(u + offset));
            store(dx + offset, dinput * load(dt + offset));
        });
    }

    // x [tokens, E] = dt * u
    void multiply(int count) {
        each_vector(count, [&](int offset) { store(x + offset, load(dt + offset) * load(u + offset)); });
    }

    // f(offset) for every vector of a matrix [tokens, E].
    template <class F>
    void each_vector(int count, F f) {
        for (int t = 0; t < count; t++)
            for (int lane = 0; lane < lanes; lane += W) f(t * kScanChannels + lane);
    }

    // out [S, E] = rows [channels, S] transposed, those `row` apart; zero for the channels beyond. Null: all zero.
    void transpose_in(const T* rows, ptrdiff_t row, int channels, T* out) {
        if (rows == nullptr) channels = 0;
        for (int lane = 0; lane < lanes; lane += W) {
            if (S == padded_states && lane + W <= channels) {
                transpose(rows + lane * row, row, S, out + lane, kScanChannels, 0, 1);
                continue;
            }
            for (int i = 0; i < W; i++) {
                const int there = lane + i < channels ? S : 0;
                for (int s = 0; s < padded_states; s++)
                    tile[i * padded_states + s] = s < there ? rows[(lane + i) * row + s] : T(0);
            }
            transpose(tile, padded_states, padded_states, out + lane, kScanChannels, 0, 1);
        }
    }

    // rows [channels, S] = in [S, E] transposed. What lies beyond S in `in` may be anything.
    void transpose_out(const T* in, int channels, T* rows, ptrdiff_t row) {
        for (int lane = 0; lane < channels; lane += W) {
            if (S == padded_states && lane + W <= channels) {
                transpose(in + lane, kScanChannels, W, rows + lane * row, row, 0, S / W);
                continue;
            }
            transpose(in + lane, kScanChannels, W, tile, padded_states, 0, padded_states / W);
            for (int i = 0; i < W && lane + i < channels; i++)
                for (int s = 0; s < S; s++) rows[(lane + i) * row + s] = tile[i * padded_states + s];
        }
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
