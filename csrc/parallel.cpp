#include "parallel.h"

#include <pthread.h>
#include <signal.h>

#include <cstdlib>
#include <new>

#include "native.h"
#include "waiting.h"

namespace gsa {
namespace {

constexpr int kMaxHelpers = 1023;
// How long a call waits for its helpers. One that sleeps needs about 50 microseconds to come; one whose core is busy
// with another process may need milliseconds, and work begins without it.
constexpr int kGatherMicroseconds = 200;

// What a helper is at: resting until it is called, then it joins unless it is dismissed before, and works, in a team
// only when all have come.
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

bool every_thread = false;           // whatever the work
thread_local int threads_asked = 1;  // by the last call

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
Helper* resting = nullptr;  // those that no call has
int helpers = 0;            // how many there are

void* serve(void* data) {
    Helper& me = *static_cast<Helper*>(data);
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
    mutex = PTHREAD_MUTEX_INITIALIZER;
    resting = nullptr;
    helpers = 0;
}

Helper* start() {
    static bool watching = false;
    if (!watching) pthread_atfork(nullptr, nullptr, forget_all);
    watching = true;
    void* space = nullptr;
    if (posix_memalign(&space, alignof(Helper), sizeof(Helper)) != 0) return nullptr;
    Helper* helper = new (space) Helper{};
    // Signals are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const int code = pthread_create(&thread, nullptr, serve, helper);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (code != 0) {
        std::free(space);
        return nullptr;
    }
    pthread_detach(thread);
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

int useful_threads(int threads, double work, double per_thread) {
    const double most = work / per_thread;
    if (every_thread || most >= threads) return threads;
    return most < 1 ? 1 : static_cast<int>(most);
}

void as_team(int threads, Work work, void* context) {
    threads_asked = threads;
    Helper* taken[kMaxHelpers];
    Helper* joined[kMaxHelpers + 1];
    const int got = take(taken, threads - 1);
    for (int i = 0; i < got; i++) {
        taken[i]->in_team = true;
        set(taken[i]->state, kCalled);
    }
    int size = 1;
    for (int i = 0; i < got; i++) {
        spin_while(taken[i]->state, kCalled, kGatherMicroseconds);
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

extern "C" void gsa_use_every_thread(int yes) { gsa::every_thread = yes != 0; }

extern "C" int gsa_threads_asked(void) { return gsa::threads_asked; }
