// Threads: those of torch's OpenMP while the machine is calm. In a crowd, and in a forked child, the engine's own,
// which sleep between calls; a call does not wait for one that has not come.
#pragma once

namespace gsa {

typedef void (*Work)(void* context, int rank, int size);

// Calls work(context, rank, size) on up to `threads` threads at once, the calling one among them, and returns when all
// are done. `size` is the number that really run, which may be smaller than asked for: they may wait for each other.
void as_team(int threads, Work work, void* context);

// For work whose pieces belong to whoever takes them first: the calling thread begins at once, others up to `threads`
// take part as they come. Of the engine's own, those that have not come when nothing is left are not waited for. `rank`
// is below `threads`, `size` means nothing. Nobody may wait for another, and work must return only when no piece is
// left to take.
void as_they_come(int threads, Work work, void* context);

// Work that is worth a thread: where it has a core of its own, and where other processes want the cores, too. There
// every meeting may be with a thread that has just lost its core, and takes milliseconds then.
struct Worth {
    double calm, crowded;
};

// Threads that pay, of those that may be used, for a call of so much work.
int useful_threads(int threads, double work, Worth per_thread);

// Of the operators, in operations: some ten and a few hundred microseconds.
constexpr Worth kOperations{1e6, 1e7};

}  // namespace gsa
