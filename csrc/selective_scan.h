// What selective_scan.cpp provides per instruction set.
#pragma once

#include <cstddef>

#include "native.h"

namespace gsa {

constexpr int kScanChunk = 64;     // tokens between two states that are kept for the backward pass
constexpr int kScanChannels = 64;  // in a block: what one thread works on at a time
constexpr int kScanPadding = 16;   // channels are padded to a multiple of it, which every vector divides

// What follows from the shape alone: never from the number of threads, so that no sum depends on it.
struct ScanPlan {
    const int64_t* first_mark;      // of each sequence, among the states kept
    const int64_t* first_token;     // of each sequence, among those of all sequences; and the number of all
    const int64_t* first_sequence;  // of each run, and the number of all
    int runs;                       // of sequences that a thread walks through one after another
    int blocks;                     // of channels
};

// Working memory: `shared` by all threads, then one piece `per_thread`.
struct ScanMemory {
    size_t shared, per_thread;
};

// What computes says whether rates A were at most 0 and lengths dt at least 0, none of them NaN.
struct ScanKernels {
    ScanMemory (*size)(const GsaSelectiveScan&, bool backward, const ScanPlan&);
    bool (*compute)(const GsaSelectiveScan&, bool backward, const ScanPlan&, int threads, char* memory, ScanMemory);
};

}  // namespace gsa
