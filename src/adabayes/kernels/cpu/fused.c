/* One optimizer step over many tensors at once, on the CPU.
 *
 * Plain C that knows nothing of Python or torch: pointers, lengths, coefficients. The elements of all tensors are numbered
 * consecutively in units of 64, and threads take equal chunks of that range, so a thousand small tensors cost as much as
 * one large one. Elements are independent, and nothing is contracted or reordered (-ffp-contract=off), so results do not
 * depend on the number of threads, on the instruction set, or on where a chunk begins.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(_WIN32)
#include <pthread.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* One binary that is fast on every x86-64 machine: the loader picks the best of three (sanitizers cannot). */
#if !defined(PLAIN) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define HAS_CLONES 1
#else
#define CLONES
#define HAS_CLONES 0
#endif

#define ABI_VERSION 7
#define UNIT 64
#define MIN_CHUNK (32768 / UNIT) /* fewest units that are worth a thread */
#define MAX_THREADS 256

#define LONGEST (1 << 30) /* elements in one call of a rule, which indexes them with 32 bits for speed */

enum dtype { F32, F64, BF16, F16, DTYPES };
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

/* 16-bit floating point */

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float from_bf16(uint16_t x) { return as_float((uint32_t)x << 16); }

/* Adds `carry` below the last bit that stays: 0x7fff and the last bit to round to nearest even, 16 random bits to round
 * up with the probability of the remainder. That keeps infinities; a nan could carry over into a number. */
static inline uint16_t to_bf16(float x, uint32_t carry) {
    return (uint16_t)((x == x ? as_bits(x) + carry : 0x7fc00000u) >> 16);
}

static inline uint32_t nearest_even(float x) { return 0x7fffu + ((as_bits(x) >> 16) & 1u); }

static inline float from_f16(uint16_t x) {
    uint32_t magnitude = (uint32_t)(x & 0x7fffu) << 13;
    uint32_t special = (x & 0x7c00u) == 0x7c00u;
    float scaled = as_float(magnitude) * 0x1p112f; /* moves the exponent's bias, also of subnormals */
    uint32_t bits = special ? magnitude | 0x7f800000u : as_bits(scaled);
    return as_float(bits | (uint32_t)(x & 0x8000u) << 16);
}

static inline uint16_t to_f16(float x) {
    uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u; /* the addition rounds */
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = magnitude >= 0x47800000u ? special : magnitude < 0x38800000u ? subnormal : normal;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

/* A random generator that is a function of seed, tensor, step and element; random_bits.py computes the same bits.
 * Neighbouring elements get evenly spread values (multiples of a constant). Over the steps, the key makes the values of
 * one element independent. Rounding needs no more than that, and it costs a sixth of the loop. */

static inline uint32_t mix(uint32_t x) {
    x *= 0x9e3779b1u;
    return x ^ x >> 16;
}

static uint32_t scatter(uint32_t x) { /* for keys: Wellons's lowbias32 */
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0xd35a2d97u;
    return x ^ x >> 15;
}

static uint32_t key_of(int64_t seed, int64_t index, double step) {
    uint32_t key = scatter((uint32_t)seed) ^ (uint32_t)(seed >> 32);
    key = scatter(key + (uint32_t)index);
    return scatter(key + (uint32_t)(int64_t)step);
}

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

typedef void update(const double *coefficients, void *restrict p, const void *restrict g, void *restrict m,
                    void *restrict s, uint32_t first, int32_t count, int returns_step, int round_params, uint32_t key);

/* Splitting the work among threads */

typedef struct {
    const tensors *t;
    update *apply;
    int64_t width;  /* coefficients in a row */
    int64_t units;
    int chunks;
    int next;       /* the first chunk that no thread has taken yet */
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

static void take_chunks(void *data) {
    job *j = data;
    const tensors *t = j->t;
    for (;;) {
        int64_t chunk = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (chunk >= j->chunks) return;
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
                             (char *)t->second_states[i] + s, (uint32_t)at, count, t->returns_step, t->round_params,
                             key);
                }
                if (rest < end) apply_to_rest(j, i, c, rest, end, key);
            }
            first = last;
        }
    }
}

/* GOMP_parallel of the OpenMP runtime that torch has loaded, if any: its threads exist already, and there are not more of
 * them than cores. Without it, the kernels start their own threads for the time of a step. */
typedef void gomp_parallel(void (*)(void *), void *, unsigned, unsigned);
static gomp_parallel *team = 0;

EXPORT void adabayes_set_team(void *function) { team = (gomp_parallel *)function; }

static void *take_chunks_in_thread(void *data) {
    take_chunks(data);
    return 0;
}

/* Lets threads work until all chunks are taken. */
static void run_threads(job *j) {
    if (j->chunks == 1) {
        take_chunks(j);
    } else if (team) {
        team(take_chunks, j, (unsigned)j->chunks, 0);
    } else {
#if !defined(_WIN32)
        pthread_t others[MAX_THREADS];
        int started = 0;
        while (started < j->chunks - 1 && !pthread_create(&others[started], 0, take_chunks_in_thread, j)) started++;
        take_chunks(j); /* including the chunks of threads that could not be started */
        for (int i = 0; i < started; i++) pthread_join(others[i], 0);
#else
        (void)take_chunks_in_thread;
        take_chunks(j);
#endif
    }
}

static int num_chunks(const tensors *t, int64_t units) {
    int64_t worth = units / MIN_CHUNK + 1;
    int threads = t->threads < 1 ? 1 : t->threads > MAX_THREADS ? MAX_THREADS : t->threads;
    return worth < threads ? (int)worth : threads;
}

static int execute(const tensors *t, int64_t width, update *const (*updates)[DTYPES]) {
    if (t->param_type < 0 || t->param_type >= DTYPES || t->state_type < 0 || t->state_type >= DTYPES) return 1;
    update *apply = updates[t->param_type][t->state_type];
    if (!apply) return 1;
    job j = {t, apply, width, 0, 1, 0};
    for (int64_t i = 0; i < t->num_tensors; i++) j.units += (t->numels[i] + UNIT - 1) / UNIT;
    j.chunks = num_chunks(t, j.units);
    run_threads(&j);
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
