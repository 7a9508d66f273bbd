/* Splits work among threads. */
#include <stdint.h>

#define MAX_THREADS 256

/* Calls work(data, item, worker) for all items from 0 to count - 1, on at most `threads` threads. An item is taken by
 * whichever thread is free. `worker`, below `threads`, tells apart the calls that may run at the same time. */
void parallel_for(int64_t count, int threads, void (*work)(void *data, int64_t item, int worker), void *data);
