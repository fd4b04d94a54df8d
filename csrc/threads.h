// Threads that end with the process.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

namespace gsa {

// For debuggers and top.
inline void name_thread(const char* name) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), name);
#elif defined(__APPLE__)
    pthread_setname_np(name);
#endif
}

// Processors that the process may use, which can be fewer than the machine has.
inline long usable_processors() {
#if defined(__linux__)
    cpu_set_t usable;
    if (sched_getaffinity(getpid(), sizeof(usable), &usable) == 0) return CPU_COUNT(&usable);
#endif
    return sysconf(_SC_NPROCESSORS_ONLN);
}

// Lets the calling thread run on all of them; a new thread has only those of the thread that started it.
inline void use_every_core() {
#if defined(__linux__)
    cpu_set_t usable;
    if (sched_getaffinity(getpid(), sizeof(usable), &usable) == 0) sched_setaffinity(0, sizeof(usable), &usable);
#endif
}

// Whether a thread could be started that runs body(data).
inline bool start_thread(void* (*body)(void*), void* data) {
    // Signals are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const int code = pthread_create(&thread, nullptr, body, data);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (code == 0) pthread_detach(thread);
    return code == 0;
}

}  // namespace gsa
