#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>

#include "native.h"

namespace gsa {
namespace {

// GOMP_parallel and its companions, from the OpenMP library that torch has loaded.
typedef void (*ForkJoin)(void (*)(void*), void*, unsigned, unsigned);
typedef int (*Query)();
ForkJoin fork_join = nullptr;
Query thread_num = nullptr;
Query num_threads = nullptr;

// OpenMP's threads do not survive a fork, and their library does not notice: a child must not wait for them.
std::atomic<bool> forked{false};

struct Call {
    Work work;
    void* context;
};

void enter(void* data) {
    const Call& call = *static_cast<Call*>(data);
    call.work(call.context, thread_num(), num_threads());
}

// Without OpenMP: threads that live as long as the call.

constexpr int kMaxMembers = 256;

struct Crew {
    Call call;
    std::atomic<int> size{0};  // 0 while it gathers
};

struct Recruit {
    Crew* crew;
    int rank;
};

void* serve(void* data) {
    Recruit* me = static_cast<Recruit*>(data);
    int size;
    while ((size = me->crew->size.load(std::memory_order_acquire)) == 0) sched_yield();
    me->crew->call.work(me->crew->call.context, me->rank, size);
    return nullptr;
}

void run_on_new_threads(int threads, const Call& call) {
    if (threads > kMaxMembers) threads = kMaxMembers;
    Crew crew;
    crew.call = call;
    pthread_t members[kMaxMembers];
    Recruit recruits[kMaxMembers];
    int size = 1;
    for (; size < threads; size++) {
        recruits[size] = {&crew, size};
        if (pthread_create(&members[size], nullptr, serve, &recruits[size]) != 0) break;
    }
    crew.size.store(size, std::memory_order_release);
    call.work(call.context, 0, size);
    for (int i = 1; i < size; i++) pthread_join(members[i], nullptr);
}

}  // namespace

void parallel(int threads, Work work, void* context) {
    Call call{work, context};
    if (threads <= 1) {
        work(context, 0, 1);
    } else if (fork_join != nullptr && !forked.load(std::memory_order_relaxed)) {
        fork_join(enter, &call, static_cast<unsigned>(threads), 0);
    } else {
        run_on_new_threads(threads, call);
    }
}

}  // namespace gsa

extern "C" void gsa_use_openmp(void* gomp_parallel, void* omp_get_thread_num, void* omp_get_num_threads) {
    using namespace gsa;
    static bool watching = false;
    if (!watching) {
        pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
        watching = true;
    }
    fork_join = reinterpret_cast<ForkJoin>(gomp_parallel);
    thread_num = reinterpret_cast<Query>(omp_get_thread_num);
    num_threads = reinterpret_cast<Query>(omp_get_num_threads);
}
