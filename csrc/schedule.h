// Who computes what: sequences and heads on all threads. Walk goes through some heads of a sequence, on a team:
//     Walk(arena, call, backward, plan, group); forward(team, n, from, to), backward(team, n, from, to)
//     bad_gates(): whether a gate was above 0 or NaN, of those that this member has read
//     state_bytes(call): what a head holds on to from chunk to chunk
#pragma once

#include "arena.h"
#include "operator.h"
#include "parallel.h"
#include "team.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Heads in a unit of work: several, so that what lies side by side in memory is read at about the same time, while
// their states fit in the cache and there is a unit for every thread.
template <class Walk>
int heads_at_once(const typename Walk::Call& call, const Plan& plan) {
    const int64_t fitting = (256 << 10) / static_cast<int64_t>(Walk::state_bytes(call));
    const int64_t sharing = call.shape.sequences * call.shape.heads / plan.threads;
    int64_t heads = fitting < sharing ? fitting : sharing;
    if (heads > call.shape.heads) heads = call.shape.heads;
    return heads < 1 ? 1 : static_cast<int>(heads);
}

template <class Walk>
size_t working_memory(const typename Walk::Call& call, bool backward, const Plan& plan) {
    Arena arena;
    Walk(arena, call, backward, plan, heads_at_once<Walk>(call, plan));
    return arena.used + 64;  // apart from the neighbour's
}

constexpr int kMaxTeams = 64;

// All sequences and heads on all threads. A unit of work is a sequence with a group of its heads. Where whole units
// would leave threads without work, a few threads form a team and share one.
template <class Walk>
struct Schedule {
    const typename Walk::Call& call;
    bool backward;
    const Plan& plan;
    char* memory;
    size_t per_thread;
    int group;          // heads in a unit
    Barrier* barriers;  // one per team
    int64_t units = 0;
    int64_t next = 0;        // unit that nobody works on yet
    int64_t together = 0;    // the first so many units are for teams
    bool bad_gates = false;  // whether a gate was above 0, or NaN

    int64_t groups() const { return (call.shape.heads + group - 1) / group; }
    int64_t length(int64_t unit) const {
        const int64_t n = plan.order[unit / groups()];
        return call.shape.stops[n] - call.shape.starts[n];
    }

    void work(Team team, char* space, int64_t unit) {
        Arena arena;
        arena.base = space;
        Prefetcher prefetcher;
        team.prefetcher = &prefetcher;
        Walk walk(arena, call, backward, plan, group);
        const int from = static_cast<int>(unit % groups()) * group;
        const int to = from + group < call.shape.heads ? from + group : call.shape.heads;
        if (backward)
            walk.backward(team, plan.order[unit / groups()], from, to);
        else
            walk.forward(team, plan.order[unit / groups()], from, to);
        if (walk.bad_gates()) __atomic_store_n(&bad_gates, true, __ATOMIC_RELAXED);
    }

    // How many of the (sorted) units are better shared: those longer than a fair share of all that is left, and those
    // that would be left over at the end.
    void share(int threads) {
        int64_t left = 0;
        for (int64_t u = 0; u < units; u++) left += length(u);
        together = 0;
        while (together < units && together < threads && length(together) * threads > left) left -= length(together++);
        if (units < 4 * threads && units % threads > together) together = units % threads;
        if (threads == 1) together = 0;
    }

    static void thread(void* context, int rank, int size) {
        Schedule& s = *static_cast<Schedule*>(context);
        int64_t shared = s.together;
        if (size == 1) shared = 0;
        if (shared > size) shared = size;
        if (shared > 0) {
            const int members = size / static_cast<int>(shared), mine = rank / members;
            if (mine < shared) {
                const Team team{rank % members, members, &s.barriers[mine]};
                team.wait();  // nobody may still be busy in this memory
                s.work(team, s.memory + static_cast<size_t>(mine) * members * s.per_thread, mine);
                team.wait();
            }
        }
        for (;;) {
            const int64_t unit = shared + __atomic_fetch_add(&s.next, 1, __ATOMIC_RELAXED);
            if (unit >= s.units) return;
            s.work(Team{}, s.memory + static_cast<size_t>(rank) * s.per_thread, unit);
        }
    }
};

// The whole call; whether all gates were good.
template <class Walk>
bool run_all(const typename Walk::Call& call, bool backward, const Plan& plan, char* memory, size_t per_thread) {
    Barrier barriers[kMaxTeams];
    Schedule<Walk> schedule{call, backward, plan, memory, per_thread, heads_at_once<Walk>(call, plan), barriers};
    schedule.units = call.shape.sequences * schedule.groups();
    schedule.share(plan.threads < kMaxTeams ? plan.threads : kMaxTeams);
    (schedule.together > 0 ? as_team : as_they_come)(plan.threads, Schedule<Walk>::thread, &schedule);
    return !schedule.bad_gates;
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
