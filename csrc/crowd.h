// Whether other processes want the cores, too.
#pragma once

namespace gsa {

typedef void (*ForkJoin)(void (*)(void*), void*, unsigned, unsigned);

// OpenMP's, whose threads are to sleep soon in a crowd.
void tell_of_openmp(ForkJoin fork_join);

// Starts to watch how long the threads of this process wait for a core, if nobody does yet; whoever will use so many
// threads calls it.
void watch_crowd(int threads);

// Whether they have waited much lately: then waiting threads sleep soon, those of torch as well.
bool crowded();

}  // namespace gsa
