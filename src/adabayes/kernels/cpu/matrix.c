/* A step of AdaBayes-K for many blocks at once, on the CPU: adabayes_k_rule, from optim/adabayes_k.py.
 *
 * Matrix products of blocks that stay in the cache are two to three times as fast here as through a BLAS library, and one
 * call serves all blocks of all parameters. One thread processes a block from beginning to end, so the kernel's results do
 * not depend on the number of threads. They do depend on the instruction set, which decides how sums are grouped.
 */
#include "matrix.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "export.h"
#include "fused.h"
#include "low_precision.h"
#include "threads.h"

#define SHIFT 1e-4 /* as in eigenbasis.py */
#define MAX_SIDE 256
#define REFRESH_STREAM 0x85ebca6bu /* keeps the random bits of refreshes apart from those of steps */

#define JOIN_(name, type, level) name##_##type##_##level
#define JOIN(name, type, level) JOIN_(name, type, level)
#define NAMED(name) JOIN(name, TYPE, LEVEL)

/* One set of functions for each type and for each level of instructions */

#if !defined(PLAIN) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define HAS_LEVELS 1

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define LEVEL v4
#define VECTOR_BYTES 64
#define ROWS 8
#include "block_types.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define LEVEL v3
#define VECTOR_BYTES 32
#define ROWS 4
#include "block_types.h"
#pragma GCC pop_options
#endif

#define LEVEL plain
#define VECTOR_BYTES 16
#define ROWS 4
#include "block_types.h"

typedef void step_cluster(void *data, int64_t index, int worker);

EXPORT int adabayes_k_step(const matrices *x) {
    int is_double = x->param_type == F64;
    if (x->param_type != F32 && x->param_type != F64) return 1;
    if (x->state_type != x->param_type && (is_double || x->state_type != BF16)) return 1;
    if (x->largest > MAX_SIDE) return 1;
    step_cluster *step = is_double ? step_cluster_f64_plain : step_cluster_f32_plain;
#if defined(HAS_LEVELS)
    if (__builtin_cpu_supports("x86-64-v4")) step = is_double ? step_cluster_f64_v4 : step_cluster_f32_v4;
    else if (__builtin_cpu_supports("x86-64-v3")) step = is_double ? step_cluster_f64_v3 : step_cluster_f32_v3;
#endif
    parallel_for(x->num_clusters, x->threads, step, (void *)x);
    return 0;
}

EXPORT int64_t adabayes_k_largest_side(void) { return MAX_SIDE; }

EXPORT int64_t adabayes_k_buffers(void) { return BUFFERS; }
