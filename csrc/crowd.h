// Whether other processes want the cores, too.
#pragma once

namespace gsa {

typedef void (*ForkJoin)(void (*)(void*), void*, unsigned, unsigned);

// That of GNU's OpenMP, whose threads are to sleep soon in a crowd; null: torch has another, which is left alone.
void tell_of_openmp(ForkJoin fork_join);

// Starts to watch how long the threads of this process wait for a core, if nobody does yet. `threads` is how many the
// caller will use.
void watch_crowd(int threads);

// Whether they have waited much lately: then waiting threads sleep soon, those of torch as well.
bool crowded();

}  // namespace gsa
