#include "crowd.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "native.h"
#include "threads.h"
#include "waiting.h"

namespace gsa {
namespace {

constexpr int kWindowMilliseconds = 50;
constexpr double kCrowded = 0.15;  // of a window, waited by all threads together
constexpr double kCalm = 0.05;
constexpr int kCalmWindows = 10;  // in a row, before the machine counts as calm again
// Threads that sleep and wake wait a little for cores even where nobody else wants them. So a crowd is also doubted
// after so many windows: calm is tried, and if that was wrong the next doubt comes later.
constexpr int kFirstDoubt = 20, kLastDoubt = 80;

// What is believed, window by window.
struct Belief {
    bool crowded = false;
    int calm = 0;   // windows in a row with little waiting
    int since = 0;  // windows since the belief changed
    int doubt = kFirstDoubt;

    void see(double share) {
        calm = share > kCalm ? 0 : calm + 1;
        since++;
        if (!crowded && share > kCrowded) {
            doubt = since > kCalmWindows ? kFirstDoubt : doubt * 2 < kLastDoubt ? doubt * 2 : kLastDoubt;
            change();
        } else if (crowded && (calm >= kCalmWindows || since >= doubt)) {
            change();
        }
    }

    void change() {
        crowded = !crowded;
        since = 0;
    }
};

std::atomic<bool> crowd{false};
std::atomic<bool> watching{false};
std::atomic<bool> decided{false};  // by a caller, for tests
ForkJoin omp_fork_join = nullptr;
int omp_threads = 2;
constexpr long kMaxSleepers = 64;  // more would cost more than they save, and OpenMP ends a process that has no room

// Nanoseconds that all threads of this process have waited for a core while they could run; -1 where the system does
// not tell. Linux does, in the second number of a thread's schedstat.
int64_t waited() {
    DIR* tasks = opendir("/proc/self/task");
    if (tasks == nullptr) return -1;
    int64_t sum = -1;
    while (const dirent* task = readdir(tasks)) {
        if (task->d_name[0] == '.') continue;
        char name[64], text[96];
        std::snprintf(name, sizeof(name), "/proc/self/task/%.20s/schedstat", task->d_name);
        const int file = open(name, O_RDONLY | O_CLOEXEC);
        if (file < 0) continue;
        const ssize_t size = read(file, text, sizeof(text) - 1);
        close(file);
        if (size <= 0) continue;
        text[size] = 0;
        char* second = nullptr;
        std::strtoll(text, &second, 10);
        sum = (sum < 0 ? 0 : sum) + std::strtoll(second, nullptr, 10);
    }
    closedir(tasks);
    return sum;
}

int64_t larger_of(int64_t a, int64_t b) { return a < b ? b : a; }

int64_t nanoseconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// OpenMP's threads spin for milliseconds while they wait, and lose their cores over it when others want them. GNU's
// library spins for some microseconds only as soon as there are more OpenMP threads than processors. A team of sleepers
// that belongs to another thread brings that about, as long as that thread lives.
Signal sleepers_wanted;

void* hold_sleepers(void*) {
    const long extra = usable_processors() - omp_threads, team = extra > 0 ? extra + 2 : 2;
    if (team > kMaxSleepers) return nullptr;
    name_thread("gsa sleepers");
    omp_fork_join([](void*) {}, nullptr, static_cast<unsigned>(team), 0);
    wait_while(sleepers_wanted, 1);
    return nullptr;
}

void decide(bool now_crowded) {
    if (crowd.exchange(now_crowded) == now_crowded || omp_fork_join == nullptr) return;
    set(sleepers_wanted, now_crowded ? 1 : 0);
    if (now_crowded) start_thread(hold_sleepers, nullptr);
}

void* watch(void*) {
    name_thread("gsa watch");
    int64_t before = waited(), then = nanoseconds_now();
    Belief belief;
    belief.since = kCalmWindows;
    int64_t pause = kWindowMilliseconds * 1000000;
    while (before >= 0) {
        const timespec window{static_cast<time_t>(pause / 1000000000), static_cast<long>(pause % 1000000000)};
        nanosleep(&window, nullptr);
        const int64_t began = nanoseconds_now(), after = waited(), now = nanoseconds_now();
        // Looking takes longer the more threads there are: not more than about 1% of the time.
        pause = larger_of(kWindowMilliseconds * 1000000, 100 * (now - began));
        if (after < 0) continue;  // no file was to be had just now
        const double share = static_cast<double>(after - before) / static_cast<double>(now - then);
        belief.see(share);
        if (!decided.load()) decide(belief.crowded);
        before = after;
        then = now;
    }
    return nullptr;
}

// Threads do not survive a fork: a child starts as if nothing had been watched.
void forget() {
    watching.store(false);
    crowd.store(false);
    omp_fork_join = nullptr;
    sleepers_wanted = Signal{};
}

}  // namespace

void tell_of_openmp(ForkJoin fork_join) { omp_fork_join = fork_join; }

void watch_crowd(int threads) {
    if (watching.load(std::memory_order_relaxed) || watching.exchange(true)) return;
    static std::atomic<bool> registered{false};
    if (!registered.exchange(true)) pthread_atfork(nullptr, nullptr, forget);
    omp_threads = threads;
    if (!start_thread(watch, nullptr)) watching.store(false);
}

bool crowded() { return crowd.load(std::memory_order_relaxed); }

}  // namespace gsa

extern "C" int gsa_crowded(void) { return gsa::crowded(); }

extern "C" void gsa_assume_crowd(int crowd) {
    gsa::decided.store(crowd >= 0);
    if (crowd >= 0) gsa::decide(crowd != 0);
}

extern "C" void gsa_believe(const double* shares, int count, int* crowded) {
    gsa::Belief belief;
    for (int i = 0; i < count; i++) {
        belief.see(shares[i]);
        crowded[i] = belief.crowded;
    }
}
