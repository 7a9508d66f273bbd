#include "threads.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "export.h"

typedef struct {
    int64_t count;
    int64_t next; /* the first item that no thread has taken yet */
    int workers;  /* threads that have begun */
    void (*work)(void *, int64_t, int);
    void *data;
} job;

static void take_items(void *data) {
    job *j = data;
    int worker = __atomic_fetch_add(&j->workers, 1, __ATOMIC_RELAXED);
    for (;;) {
        int64_t item = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (item >= j->count) return;
        j->work(j->data, item, worker);
    }
}

/* GOMP_parallel of the OpenMP runtime that torch has loaded, if any: its threads exist already, and there are not more of
 * them than cores. Without it, the kernels start their own threads for the time of a step. */
typedef void gomp_parallel(void (*)(void *), void *, unsigned, unsigned);
static gomp_parallel *team = 0;

EXPORT void adabayes_set_team(void *function) { team = (gomp_parallel *)function; }

static void *take_items_in_thread(void *data) {
    take_items(data);
    return 0;
}

void parallel_for(int64_t count, int threads, void (*work)(void *, int64_t, int), void *data) {
    job j = {count, 0, 0, work, data};
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > count) threads = (int)count;
    if (threads <= 1) {
        take_items(&j);
    } else if (team) {
        team(take_items, &j, (unsigned)threads, 0);
    } else {
#if !defined(_WIN32)
        pthread_t others[MAX_THREADS];
        int started = 0;
        while (started < threads - 1 && !pthread_create(&others[started], 0, take_items_in_thread, &j)) started++;
        take_items(&j); /* including the items of threads that could not be started */
        for (int i = 0; i < started; i++) pthread_join(others[i], 0);
#else
        (void)take_items_in_thread;
        take_items(&j);
#endif
    }
}
