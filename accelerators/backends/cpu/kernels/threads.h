// Threads of torch's OpenMP. Its functions are called by pointers that Python finds in torch's libraries, so a file needs
// no OpenMP of the compiler, and there is no second pool of threads that would stall the first.

#pragma once

typedef struct {
    void (*parallel)(void (*work)(void *), void *data, unsigned count, unsigned flags); // GOMP_parallel; count 0: all
    void (*barrier)(void);                                                              // GOMP_barrier
    int (*number)(void), (*count)(void), (*most)(void); // omp_get_thread_num, _num_threads and _max_threads
} Threads;

static Threads threads;

void use_threads(const Threads *of) { threads = *of; }

typedef struct {
    long first, end;
} Range;

// The part of `pieces` pieces that this thread works on.
static inline Range share(long pieces)
{
    const long number = threads.number(), count = threads.count();
    return (Range){pieces * number / count, pieces * (number + 1) / count};
}
