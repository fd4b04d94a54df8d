#include "parallel.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "crowd.h"
#include "native.h"
#include "threads.h"
#include "waiting.h"

namespace gsa {
namespace {

constexpr int kMaxHelpers = 1023;
// How long a call waits for all of its helpers. One that sleeps needs about 50 microseconds to come; one whose core is
// busy with another process may need milliseconds, and work begins without it.
constexpr int kGatherMicroseconds = 200;

// States of a helper. Resting: it sleeps. Called: a call wants it, and may still dismiss it. Joined: it has come; in a
// team it waits for the others. Working: the team works.
enum : uint32_t { kResting, kCalled, kJoined, kWorking };

// A thread that sleeps between calls. It is never freed, since the thread may look at it at any time.
struct Helper {
    alignas(64) Signal state;
    Work work;
    void* context;
    int rank, size;
    bool in_team;
    Helper* next;
};

// GOMP_parallel and its companions, from the OpenMP library that torch has loaded.
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

void forget_all();

void prepare_for_forks() {
    static std::atomic<bool> prepared{false};
    if (!prepared.load(std::memory_order_relaxed) && !prepared.exchange(true))
        pthread_atfork(nullptr, nullptr, forget_all);
}

// Whether the threads of torch's OpenMP did it: they do, so that the two never compete for the cores, unless other
// processes are in the way.
bool on_openmp(int threads, Work work, void* context) {
    prepare_for_forks();
    if (forked.load(std::memory_order_relaxed)) return false;
    watch_crowd(threads);
    if (fork_join == nullptr || crowded()) return false;
    Call call{work, context};
    fork_join(enter, &call, static_cast<unsigned>(threads), 0);
    return true;
}

bool every_thread = false;           // whatever the work
thread_local int threads_asked = 1;  // by the last call

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
Helper* resting = nullptr;  // those that no call has
int helpers = 0;            // how many there are

void* serve(void* data) {
    Helper& me = *static_cast<Helper*>(data);
    name_thread("gsa helper");
    use_every_core();  // and not just those of the thread that happened to call first
    for (;;) {
        wait_while(me.state, kResting);
        if (!replace(me.state, kCalled, kJoined)) continue;
        if (me.in_team) wait_while(me.state, kJoined);
        me.work(me.context, me.rank, me.size);
        set(me.state, kResting);
    }
    return nullptr;
}

// Threads do not survive a fork: a child starts with none.
void forget_all() {
    forked.store(true);
    forget_sleepers();
    mutex = PTHREAD_MUTEX_INITIALIZER;
    resting = nullptr;
    helpers = 0;
}

Helper* start() {
    void* space = nullptr;
    if (posix_memalign(&space, alignof(Helper), sizeof(Helper)) != 0) return nullptr;
    Helper* helper = new (space) Helper{};
    if (!start_thread(serve, helper)) {
        std::free(space);
        return nullptr;
    }
    helpers++;
    return helper;
}

// Up to `count` helpers that no other call has. There are never more than one call has asked for: calls at the same
// time share them, as they share the cores.
int take(Helper** taken, int count) {
    if (count < 1) return 0;
    if (count > kMaxHelpers) count = kMaxHelpers;
    int got = 0;
    pthread_mutex_lock(&mutex);
    for (; got < count; got++) {
        Helper* helper = resting;
        if (helper != nullptr)
            resting = helper->next;
        else if (helpers >= count || (helper = start()) == nullptr)
            break;
        taken[got] = helper;
    }
    pthread_mutex_unlock(&mutex);
    return got;
}

void give_back(Helper** taken, int count) {
    if (count == 0) return;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < count; i++) {
        taken[i]->next = resting;
        resting = taken[i];
    }
    pthread_mutex_unlock(&mutex);
}

}  // namespace

int useful_threads(int threads, double work, Worth per_thread) {
    const double most = work / (crowded() ? per_thread.crowded : per_thread.calm);
    if (every_thread || most >= threads) return threads;
    return most < 1 ? 1 : static_cast<int>(most);
}

void as_team(int threads, Work work, void* context) {
    threads_asked = threads;
    if (threads <= 1) return work(context, 0, 1);
    if (on_openmp(threads, work, context)) return;
    Helper* taken[kMaxHelpers];
    Helper* joined[kMaxHelpers + 1];
    const int got = take(taken, threads - 1);
    for (int i = 0; i < got; i++) {
        taken[i]->in_team = true;
        set(taken[i]->state, kCalled);
    }
    int size = 1;
    const int64_t end = microseconds_now() + kGatherMicroseconds;
    for (int i = 0; i < got; i++) {
        spin_while(taken[i]->state, kCalled, end);
        if (!replace(taken[i]->state, kCalled, kResting)) joined[size++] = taken[i];
    }
    for (int rank = 1; rank < size; rank++) {
        joined[rank]->work = work;
        joined[rank]->context = context;
        joined[rank]->rank = rank;
        joined[rank]->size = size;
        set(joined[rank]->state, kWorking);
    }
    work(context, 0, size);
    for (int rank = 1; rank < size; rank++) wait_while(joined[rank]->state, kWorking);
    give_back(taken, got);
}

void as_they_come(int threads, Work work, void* context) {
    threads_asked = threads;
    if (threads <= 1) return work(context, 0, 1);
    if (on_openmp(threads, work, context)) return;
    Helper* taken[kMaxHelpers];
    const int got = take(taken, threads - 1);
    for (int i = 0; i < got; i++) {
        taken[i]->in_team = false;
        taken[i]->work = work;
        taken[i]->context = context;
        taken[i]->rank = i + 1;
        taken[i]->size = threads;
        set(taken[i]->state, kCalled);
    }
    work(context, 0, threads);
    for (int i = 0; i < got; i++)
        if (!replace(taken[i]->state, kCalled, kResting)) wait_while(taken[i]->state, kJoined);
    give_back(taken, got);
}

}  // namespace gsa

extern "C" void gsa_use_openmp(void* gomp_parallel, void* omp_get_thread_num, void* omp_get_num_threads, int gnu) {
    using namespace gsa;
    prepare_for_forks();  // now, since a child may be the first to call
    fork_join = reinterpret_cast<ForkJoin>(gomp_parallel);
    thread_num = reinterpret_cast<Query>(omp_get_thread_num);
    num_threads = reinterpret_cast<Query>(omp_get_num_threads);
    tell_of_openmp(gnu ? fork_join : nullptr);
}

extern "C" void gsa_use_every_thread(int yes) { gsa::every_thread = yes != 0; }

extern "C" int gsa_threads_asked(void) { return gsa::threads_asked; }

extern "C" void gsa_watch_crowd(int threads) { gsa::watch_crowd(threads); }
