// Threads. Work runs on the OpenMP threads that torch already has, so that the two never compete for the cores.
#pragma once

namespace gsa {

typedef void (*Work)(void* context, int rank, int size);

// Calls work(context, rank, size) on up to `threads` threads at once, the calling one among them, and returns when all
// are done. `size` is the number that really run, which may be smaller than asked for.
void parallel(int threads, Work work, void* context);

// Threads that pay: starting one costs about as much as a million operations.
inline int useful_threads(int threads, double operations) {
    const double most = operations / 1e6;
    return threads < most ? threads : most < 1 ? 1 : static_cast<int>(most);
}

}  // namespace gsa
