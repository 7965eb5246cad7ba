// What the programs have in common that compare C files with plain loops in double, for random shapes. They need no Python
// and no OpenMP, so they run under sanitizers and emulators: three threads of pthreads take the part of torch's.
//
//     cc -O1 -g -fsanitize=address,undefined -I KERNELS decode_check.c -lpthread -lm -o check && ./check 1 20
//
// Arguments: the first and the last seed. Each prints its largest errors; exit code 1 if one is too large.

#pragma once

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

// threads

enum { COUNT = 3 };
static pthread_barrier_t meeting;
static __thread int own_number;
static void (*shared_work)(void *);
static void *shared_data;

static void *run_one(void *number)
{
    own_number = (int)(long)number;
    shared_work(shared_data);
    return 0;
}

static void run_all(void (*work)(void *), void *data, unsigned count, unsigned flags)
{
    (void)count, (void)flags;
    pthread_t others[COUNT];
    shared_work = work, shared_data = data;
    for (long number = 0; number < COUNT; number++) pthread_create(others + number, 0, run_one, (void *)number);
    for (long number = 0; number < COUNT; number++) pthread_join(others[number], 0);
}

static void meet(void) { pthread_barrier_wait(&meeting); }
static int number_of_thread(void) { return own_number; }
static int count_of_threads(void) { return COUNT; }

// random numbers, and memory that is just large enough

static uint64_t state;

static uint32_t drawn(uint32_t below_this)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below_this;
}

static double uniform(void) { return drawn(1 << 20) / (double)(1 << 19) - 1; }

static double worse(double largest, double error) // unlike fmax, NaN stays
{
    return largest != largest || error <= largest ? largest : error;
}

static void *room(long bytes) // the system's again at the end of the process
{
    void *memory;
    if (posix_memalign(&memory, 64, bytes ? bytes : 64)) abort();
    memset(memory, 0xff, bytes); // NaN: nothing may be read before it is written
    return memory;
}

#ifdef LANES // numbers.h
static number *numbers(long count, double scale, double center)
{
    number *made = room(count * sizeof(number));
    for (long index = 0; index < count; index++) made[index] = nearest(center + scale * uniform());
    return made;
}
#endif

// the program

static int check_seeds(int count, char **arguments, int (*is_right)(void))
{
    if (count != 3) return 2;
    Threads of_this = {run_all, meet, number_of_thread, count_of_threads, count_of_threads};
    pthread_barrier_init(&meeting, 0, COUNT);
    use_threads(&of_this);
    int failed = 0;
    for (long seed = atol(arguments[1]); seed <= atol(arguments[2]); seed++) {
        state = seed * 7919 + 1;
        for (int skip = 0; skip < 8; skip++) drawn(2);
        printf("seed %ld: ", seed);
        failed |= !is_right();
    }
    return failed;
}
