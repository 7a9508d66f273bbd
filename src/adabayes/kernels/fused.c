/* One optimizer step over many tensors at once, on the CPU.
 *
 * Plain C that knows nothing of Python or torch: pointers, lengths, numbers. The elements of all tensors are numbered
 * consecutively in units of 64, and threads take equal shares of that range, so that a thousand small tensors cost what one
 * large one does. Every element is computed by itself, and nothing is contracted or reordered (-ffp-contract=off), so
 * results do not depend on the number of threads, on the instruction set, or on where a share begins.
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

#define ABI_VERSION 6
#define UNIT 64
#define SHARE (32768 / UNIT) /* units that are worth a thread */
#define MAX_THREADS 256

#define LONGEST (1 << 30) /* elements in one call of an update, whose index has 32 bits for speed */

enum dtype { F32, F64, BF16, F16, DTYPES };
static const int64_t SIZES[DTYPES] = {[F32] = 4, [F64] = 8, [BF16] = 2, [F16] = 2};

typedef struct {
    int64_t count;          /* tensors */
    void *const *params;
    const void *const *grads;
    void *const *exp_avgs;
    void *const *second_states; /* gain, or exp_avg_sq */
    void *const *steps;
    const int64_t *numels;
    const int64_t *indices; /* of each tensor among all of the optimizer's, for the random generator */
    int32_t param_type, state_type, step_type, threads;
    int32_t round_params;   /* stochastically */
    int64_t seed;
} tensors;

typedef struct {
    double unscale;         /* of the gradients: one over GradScaler's scale */
    double beta1, beta2;
    double shrink;          /* weight decay */
    double rate;            /* of the step, beside gain and bias corrections; negative to ascend */
} common_numbers;

typedef struct {
    common_numbers common;
    double forget, noise;   /* of the gain between two gradients: gain + (noise - forget * gain) */
    double information;     /* curvature per squared gradient */
    double half;            /* 0.5 / lr_sgd: for the start of a filter */
    double slope;           /* rms gradient to precision at the start: 1 / lr; 0 to start at lr_sgd */
    double memory;          /* in steps; 0 if it follows from the numbers above */
} adabayes_numbers;

typedef struct {
    common_numbers common;
    double eps;
    double centred, cautious; /* whether: not 0 */
} adabayes_fp_numbers;

typedef struct {
    double first, second;   /* 1 - beta^step */
    double step;
} bias_corrections;

/* Numbers of 16 bits */

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

/* A random generator that is a function of seed, tensor, step and element; random_bits.py has the same, number for
 * number. Neighbours get numbers that are spread evenly (multiples of a constant); over the steps, the key makes those
 * of one element independent. That is all that rounding needs, and it costs a sixth of the loop. */

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

/* The updates, for each pair of types */

#define NAME_(update, param, state) update##_##param##_##state
#define NAME(update, param, state) NAME_(update, param, state)

#define REAL float
#define SQRT sqrtf
#define LARGEST FLT_MAX
#define STATE_NAME f32
#define STATE_C float
#define LOAD_STATE(x) (x)
#define STORE_STATE(x, random) (x)

#include "params.h"

#undef STATE_NAME
#undef STATE_C
#undef LOAD_STATE
#undef STORE_STATE
#define STATE_NAME bf16
#define STATE_C uint16_t
#define LOAD_STATE(x) from_bf16(x)
#define STORE_STATE(x, random) to_bf16(x, (random) & 0xffffu)

#include "params.h"

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
#include "update.h"

typedef void update(const void *numbers, const bias_corrections *bias, void *restrict p, const void *restrict g,
                    void *restrict m, void *restrict s, uint32_t first, int32_t count, int round_params, uint32_t key);

static update *const adabayes_updates[DTYPES][DTYPES] = {
    [F32] = {[F32] = adabayes_f32_f32, [BF16] = adabayes_f32_bf16},
    [F64] = {[F64] = adabayes_f64_f64},
    [BF16] = {[F32] = adabayes_bf16_f32, [BF16] = adabayes_bf16_bf16},
    [F16] = {[F32] = adabayes_f16_f32, [BF16] = adabayes_f16_bf16},
};

static update *const adabayes_fp_updates[DTYPES][DTYPES] = {
    [F32] = {[F32] = adabayes_fp_f32_f32, [BF16] = adabayes_fp_f32_bf16},
    [F64] = {[F64] = adabayes_fp_f64_f64},
    [BF16] = {[F32] = adabayes_fp_bf16_f32, [BF16] = adabayes_fp_bf16_bf16},
    [F16] = {[F32] = adabayes_fp_f16_f32, [BF16] = adabayes_fp_f16_bf16},
};

/* Sharing the work */

typedef struct {
    const tensors *t;
    const void *numbers;
    update *apply;
    int64_t units;
    int shares;
    int next; /* first share that no thread has taken yet */
} job;

/* The last elements of a tensor, too few for whole vectors, which would be done one by one: so in a unit of their own,
 * filled up with zeros. Most of a small tensor's time is saved so. */
static void apply_to_rest(const job *j, int64_t i, const bias_corrections *bias, int64_t from, int64_t to, uint32_t key) {
    const tensors *t = j->t;
    const int64_t size_p = SIZES[t->param_type], size_s = SIZES[t->state_type];
    char *p = (char *)t->params[i] + from * size_p, *m = (char *)t->exp_avgs[i] + from * size_s;
    char *s = (char *)t->second_states[i] + from * size_s;
    const char *g = (const char *)t->grads[i] + from * size_p;
    const size_t bytes_p = (size_t)((to - from) * size_p), bytes_s = (size_t)((to - from) * size_s);
    _Alignas(64) char unit[4][UNIT * 8] = {{0}};
    memcpy(unit[0], p, bytes_p);
    memcpy(unit[1], g, bytes_p);
    memcpy(unit[2], m, bytes_s);
    memcpy(unit[3], s, bytes_s);
    j->apply(j->numbers, bias, unit[0], unit[1], unit[2], unit[3], (uint32_t)from, UNIT, t->round_params, key);
    memcpy(p, unit[0], bytes_p);
    memcpy(m, unit[2], bytes_s);
    memcpy(s, unit[3], bytes_s);
}

static double step_of(const tensors *t, int64_t i) {
    return t->step_type == F64 ? *(const double *)t->steps[i] : *(const float *)t->steps[i];
}

static void take_shares(void *data) {
    job *j = data;
    const tensors *t = j->t;
    const common_numbers *c = j->numbers;
    bias_corrections bias = {1, 1, 0};
    double last_step = -1; /* most tensors have the same count, and a power takes longer than a small tensor */
    for (;;) {
        int64_t share = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (share >= j->shares) return;
        int64_t from = share * j->units / j->shares, to = (share + 1) * j->units / j->shares;
        for (int64_t i = 0, first = 0; i < t->count && first < to; i++) {
            int64_t units = (t->numels[i] + UNIT - 1) / UNIT, last = first + units;
            if (last > from) {
                int64_t begin = from > first ? (from - first) * UNIT : 0;
                int64_t end = to < last ? (to - first) * UNIT : t->numels[i];
                double step = step_of(t, i);
                if (step != last_step) {
                    bias = (bias_corrections){1 - pow(c->beta1, step), 1 - pow(c->beta2, step), step};
                    last_step = step;
                }
                uint32_t key = key_of(t->seed, t->indices[i], step);
                int64_t whole = end - (end - begin) % UNIT;
                for (int64_t at = begin; at < whole; at += LONGEST) {
                    int32_t count = (int32_t)(whole - at < LONGEST ? whole - at : LONGEST);
                    int64_t p = at * SIZES[t->param_type], s = at * SIZES[t->state_type];
                    j->apply(j->numbers, &bias, (char *)t->params[i] + p, (const char *)t->grads[i] + p,
                             (char *)t->exp_avgs[i] + s, (char *)t->second_states[i] + s, (uint32_t)at, count,
                             t->round_params, key);
                }
                if (whole < end) apply_to_rest(j, i, &bias, whole, end, key);
            }
            first = last;
        }
    }
}

/* GOMP_parallel of the OpenMP runtime that torch has brought, if any: its threads are there already, and so are not
 * more than the machine has cores. Without it, threads of our own for the time of a step. */
typedef void gomp_parallel(void (*)(void *), void *, unsigned, unsigned);
static gomp_parallel *team = 0;

EXPORT void adabayes_set_team(void *function) { team = (gomp_parallel *)function; }

static void *take_shares_in_thread(void *data) {
    take_shares(data);
    return 0;
}

/* Let threads work until all shares are taken. */
static void share_out(void (*work)(void *), void *(*in_thread)(void *), job *j) {
    if (j->shares == 1) {
        work(j);
    } else if (team) {
        team(work, j, (unsigned)j->shares, 0);
    } else {
#if !defined(_WIN32)
        pthread_t others[MAX_THREADS];
        int started = 0;
        while (started < j->shares - 1 && !pthread_create(&others[started], 0, in_thread, j)) started++;
        work(j); /* including the shares of threads that could not be started */
        for (int i = 0; i < started; i++) pthread_join(others[i], 0);
#else
        (void)in_thread;
        work(j);
#endif
    }
}

static int shares_of(const tensors *t, int64_t units) {
    int64_t worth = units / SHARE + 1;
    int threads = t->threads < 1 ? 1 : t->threads > MAX_THREADS ? MAX_THREADS : t->threads;
    return worth < threads ? (int)worth : threads;
}

static int run(const tensors *t, const void *numbers, update *const (*updates)[DTYPES]) {
    if (t->param_type < 0 || t->param_type >= DTYPES || t->state_type < 0 || t->state_type >= DTYPES) return 1;
    update *apply = updates[t->param_type][t->state_type];
    if (!apply) return 1;
    job j = {t, numbers, apply, 0, 1, 0};
    for (int64_t i = 0; i < t->count; i++) {
        if (t->step_type == F64) *(double *)t->steps[i] += 1;
        else *(float *)t->steps[i] += 1;
        j.units += (t->numels[i] + UNIT - 1) / UNIT;
    }
    j.shares = shares_of(t, j.units);
    share_out(take_shares, take_shares_in_thread, &j);
    return 0;
}

EXPORT int adabayes_step(const tensors *t, const adabayes_numbers *c) { return run(t, c, adabayes_updates); }

EXPORT int adabayes_fp_step(const tensors *t, const adabayes_fp_numbers *c) {
    return run(t, c, adabayes_fp_updates);
}

/* The minimum of a step: reads four arrays and writes three of them. The benchmark compares steps with it. */
static CLONES void stream(const void *unused, const bias_corrections *bias, void *restrict p, const void *restrict g,
                          void *restrict m, void *restrict s, uint32_t first, int32_t count, int round_params,
                          uint32_t key) {
    float *a = p, *b = m, *c = s;
    const float *d = g;
    (void)unused, (void)bias, (void)first, (void)round_params, (void)key;
    for (int32_t i = 0; i < count; i++) {
        a[i] += d[i];
        b[i] += d[i];
        c[i] += d[i];
    }
}

EXPORT int adabayes_stream(const tensors *t, const common_numbers *c) {
    static update *const only[DTYPES][DTYPES] = {[F32] = {[F32] = stream}};
    return run(t, c, only);
}

EXPORT int adabayes_abi_version(void) { return ABI_VERSION; }

EXPORT const char *adabayes_instruction_set(void) {
#if HAS_CLONES
    if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4 (AVX-512)";
    if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3 (AVX2)";
    return "x86-64 (SSE2)";
#elif defined(__x86_64__)
    return "x86-64, as the compiler was told";
#elif defined(__aarch64__)
    return "aarch64 (NEON)";
#else
    return "the compiler's default";
#endif
}
