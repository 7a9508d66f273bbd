/* One optimizer step over many tensors at once, on the CPU.
 *
 * Plain C that knows nothing of Python or torch: pointers, lengths, coefficients. The elements of all tensors are numbered
 * consecutively in units of 64, and threads take equal chunks of that range, so a thousand small tensors cost as much as
 * one large one. Elements are independent, and nothing is contracted or reordered (-ffp-contract=off), so results do not
 * depend on the number of threads, on the instruction set, or on where a chunk begins.
 */
#include <float.h>
#include <math.h>

#include "export.h"
#include "fused.h"
#include "low_precision.h"
#include "threads.h"

/* One binary that is fast on every x86-64 machine: the loader picks the best of three (sanitizers cannot). */
#if !defined(PLAIN) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define HAS_CLONES 1
#else
#define CLONES
#define HAS_CLONES 0
#endif

#define ABI_VERSION 8
#define UNIT 64
#define MIN_CHUNK (32768 / UNIT) /* fewest units that are worth a thread */

#define LONGEST (1 << 30) /* elements in one call of a rule, which indexes them with 32 bits for speed */

static const int64_t SIZES[DTYPES] = {[F32] = 4, [F64] = 8, [BF16] = 2, [F16] = 2};

typedef struct {
    int64_t num_tensors;
    void *const *params;        /* with returns_step, memory that receives the step */
    const void *const *grads;
    void *const *exp_avgs;
    void *const *second_states; /* gain, or exp_avg_sq */
    const int64_t *numels;
    const int64_t *indices;     /* index of each tensor among all of the optimizer's, for the random generator */
    const double *counts;       /* step count of each tensor, including this step */
    const int64_t *rows;        /* index of each tensor's row of coefficients */
    const double *coefficients;
    int32_t param_type, state_type, threads;
    int32_t returns_step;       /* compute the step instead of moving the parameters */
    int32_t round_params;       /* round bf16 parameters stochastically */
    int64_t seed;
} tensors;

/* A struct with the coefficients of each rule, as doubles in the order of their names */
#include "rules.h"
#define FIELD(name) double name;
#define DECLARE(rule, COEFFICIENTS) typedef struct { COEFFICIENTS(FIELD) } rule##_coefficients;
RULES(DECLARE)

#define LEAST_GAIN 1e-30 /* as in rates.py */
#define PARAM_STREAM 0x9e3779b9u /* keeps the bits of parameters apart from those of state */

/* The rules, for each pair of types */

#define NAME_(rule, param, state) rule##_##param##_##state
#define NAME(rule, param, state) NAME_(rule, param, state)

#define REAL float
#define SQRT sqrtf
#define LARGEST FLT_MAX
#define STATE_NAME f32
#define STATE_C float
#define LOAD_STATE(x) (x)
#define STORE_STATE(x, random) (x)

#include "types.h"

#undef STATE_NAME
#undef STATE_C
#undef LOAD_STATE
#undef STORE_STATE
#define STATE_NAME bf16
#define STATE_C uint16_t
#define LOAD_STATE(x) from_bf16(x)
#define STORE_STATE(x, random) to_bf16(x, (random) & 0xffffu)

#include "types.h"

#undef REAL
#undef SQRT
#undef LARGEST
#undef STATE_NAME
#undef STATE_C
#undef LOAD_STATE
#undef STORE_STATE
#define REAL double
#define SQRT sqrt
#define LARGEST DBL_MAX
#define STATE_NAME f64
#define STATE_C double
#define LOAD_STATE(x) (x)
#define STORE_STATE(x, random) (x)

#define PARAM_NAME f64
#define PARAM_C double
#define LOAD_PARAM(x) (x)
#define STORE_PARAM(x, random) (x)
#include "rules.h"

/* Splitting the work among threads */

typedef struct {
    const tensors *t;
    update *apply;
    int64_t width;  /* coefficients in a row */
    int64_t units;
    int64_t chunks;
} job;

/* Applies a rule to the last elements of a tensor, which do not fill a unit. The compiler would process them one by one;
 * in a unit filled up with zeros, they are processed as vectors, which saves most of a small tensor's time. */
static void apply_to_rest(const job *j, int64_t i, const double *c, int64_t from, int64_t to, uint32_t key) {
    const tensors *t = j->t;
    const int64_t size_p = SIZES[t->param_type], size_s = SIZES[t->state_type];
    char *p = (char *)t->params[i] + from * size_p, *m = (char *)t->exp_avgs[i] + from * size_s;
    char *s = (char *)t->second_states[i] + from * size_s;
    const char *g = (const char *)t->grads[i] + from * size_p;
    const size_t bytes_p = (size_t)((to - from) * size_p), bytes_s = (size_t)((to - from) * size_s);
    _Alignas(64) char unit[4][UNIT * 8] = {{0}};
    if (!t->returns_step) memcpy(unit[0], p, bytes_p);
    memcpy(unit[1], g, bytes_p);
    memcpy(unit[2], m, bytes_s);
    memcpy(unit[3], s, bytes_s);
    j->apply(c, unit[0], unit[1], unit[2], unit[3], (uint32_t)from, UNIT, t->returns_step, t->round_params, key);
    memcpy(p, unit[0], bytes_p);
    memcpy(m, unit[2], bytes_s);
    memcpy(s, unit[3], bytes_s);
}

static void step_chunk(void *data, int64_t chunk, int worker) {
    const job *j = data;
    const tensors *t = j->t;
    (void)worker;
    int64_t from = chunk * j->units / j->chunks, to = (chunk + 1) * j->units / j->chunks;
    for (int64_t i = 0, first = 0; i < t->num_tensors && first < to; i++) {
        int64_t units = (t->numels[i] + UNIT - 1) / UNIT, last = first + units;
        if (last > from) {
            int64_t begin = from > first ? (from - first) * UNIT : 0;
            int64_t end = to < last ? (to - first) * UNIT : t->numels[i];
            const double *c = t->coefficients + t->rows[i] * j->width;
            uint32_t key = key_of(t->seed, t->indices[i], t->counts[i]);
            int64_t rest = end - (end - begin) % UNIT; /* where the last, incomplete unit begins */
            for (int64_t at = begin; at < rest; at += LONGEST) {
                int32_t count = (int32_t)(rest - at < LONGEST ? rest - at : LONGEST);
                int64_t p = at * SIZES[t->param_type], s = at * SIZES[t->state_type];
                j->apply(c, (char *)t->params[i] + p, (const char *)t->grads[i] + p, (char *)t->exp_avgs[i] + s,
                         (char *)t->second_states[i] + s, (uint32_t)at, count, t->returns_step, t->round_params, key);
            }
            if (rest < end) apply_to_rest(j, i, c, rest, end, key);
        }
        first = last;
    }
}

static int64_t num_chunks(const tensors *t, int64_t units) {
    int64_t worth = units / MIN_CHUNK + 1, threads = t->threads < 1 ? 1 : t->threads;
    return worth < threads ? worth : threads;
}

static int execute(const tensors *t, int64_t width, update *const (*updates)[DTYPES]) {
    if (t->param_type < 0 || t->param_type >= DTYPES || t->state_type < 0 || t->state_type >= DTYPES) return 1;
    update *apply = updates[t->param_type][t->state_type];
    if (!apply) return 1;
    job j = {t, apply, width, 0, 1};
    for (int64_t i = 0; i < t->num_tensors; i++) j.units += (t->numels[i] + UNIT - 1) / UNIT;
    j.chunks = num_chunks(t, j.units);
    parallel_for(j.chunks, (int)j.chunks, step_chunk, &j);
    return 0;
}

/* Adds 1 to each step count, a tensor of fp32 or fp64, and copies the new counts. */
EXPORT void adabayes_count_steps(int64_t count, int type, void *const *steps, double *counts) {
    for (int64_t i = 0; i < count; i++) {
        if (type == F64) *(double *)steps[i] += 1;
        else *(float *)steps[i] += 1;
    }
    for (int64_t i = 0; i < count; i++) /* a tensor that occurs twice has its last count */
        counts[i] = type == F64 ? *(double *)steps[i] : *(float *)steps[i];
}

/* Exports a rule: a function that takes a step, and the names of its coefficients in the order in which it reads them. */
#define NAME_OF(name) #name " "
#define EXPORT_RULE(rule, COEFFICIENTS)                                                                            \
    static update *const rule##_updates[DTYPES][DTYPES] = {                                                        \
        [F32] = {[F32] = rule##_f32_f32, [BF16] = rule##_f32_bf16},                                                \
        [F64] = {[F64] = rule##_f64_f64},                                                                          \
        [BF16] = {[F32] = rule##_bf16_f32, [BF16] = rule##_bf16_bf16},                                             \
        [F16] = {[F32] = rule##_f16_f32, [BF16] = rule##_f16_bf16},                                                \
    };                                                                                                             \
    EXPORT int rule##_step(const tensors *t) {                                                                     \
        return execute(t, sizeof(rule##_coefficients) / sizeof(double), rule##_updates);                               \
    }                                                                                                              \
    EXPORT const char *rule##_coefficient_names(void) { return COEFFICIENTS(NAME_OF); }
RULES(EXPORT_RULE)

update *fixed_point_update(int state_type) { return adabayes_fp_updates[state_type == F64 ? F64 : F32][state_type]; }

/* The memory traffic of a step without its arithmetic: reads four arrays and writes three. The benchmark compares steps
 * with it. */
static CLONES void stream(const double *unused, void *restrict p, const void *restrict g, void *restrict m,
                          void *restrict s, uint32_t first, int32_t count, int returns_step, int round_params,
                          uint32_t key) {
    float *a = p, *b = m, *c = s;
    const float *d = g;
    (void)unused, (void)first, (void)returns_step, (void)round_params, (void)key;
    for (int32_t i = 0; i < count; i++) {
        a[i] += d[i];
        b[i] += d[i];
        c[i] += d[i];
    }
}

EXPORT int adabayes_stream_step(const tensors *t) {
    static update *const only[DTYPES][DTYPES] = {[F32] = {[F32] = stream}};
    return execute(t, 0, only);
}

EXPORT int adabayes_abi_version(void) { return ABI_VERSION; }

EXPORT const char *adabayes_instruction_set(void) {
#if HAS_CLONES
    if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4 (AVX-512)";
    if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3 (AVX2)";
    return "x86-64 (SSE2)";
#elif defined(__x86_64__)
    return "x86-64 (chosen by the compiler)";
#elif defined(__aarch64__)
    return "aarch64 (NEON)";
#else
    return "the compiler's default";
#endif
}
