/* The update rules, for elements of one tensor.
 *
 * Included without PARAM_NAME, this file declares the rules and their coefficients, which kernels/coefficients.py derives
 * and explains. Then it is included once for each pair of types, to define a function for each rule. */

#if !defined(PARAM_NAME)

#define ADABAYES(X)                                                                                                \
    X(weight) X(beta1) X(shrink) X(size) X(forget) X(noise) X(information) X(half) X(slope) X(h_constant)          \
    X(h_slope) X(memory_slope) X(memory)

#define ADABAYES_FP(X)                                                                                             \
    X(weight) X(beta1) X(shrink) X(size) X(square_weight) X(beta2) X(inside) X(outside) X(scale) X(centred)        \
    X(cautious)

#define RULES(X) X(adabayes, ADABAYES) X(adabayes_fp, ADABAYES_FP)

#else

#define RULE(rule)                                                                                                 \
    CLONES static void NAME(rule, PARAM_NAME, STATE_NAME)(                                                         \
        const double *coefficients, void *restrict param, const void *restrict grad, void *restrict exp_avg,       \
        void *restrict second_state, uint32_t first, int32_t count, int returns_step, int round_params, uint32_t key)

/* Declares a coefficient as a constant of the type in which the rule computes. */
#define CONSTANT(name) const REAL name = (REAL)c->name;

/* Defines the random bits of element i, for its state and for its parameter. */
#define RANDOM_BITS                                                                                                \
    const uint32_t element = (first + (uint32_t)i) ^ key;                                                          \
    const uint32_t state_bits = mix(element), param_bits = mix(element ^ PARAM_STREAM);                            \
    (void)state_bits, (void)param_bits

/* Moves the weight, or returns the step without reading the weight. */
#define MOVE(step)                                                                                                 \
    const REAL moved = returns_step ? (step) : (REAL)LOAD_PARAM(p[i]) * shrink - (step);                           \
    p[i] = STORE_PARAM(moved, param_bits)

/* AdaBayes. Predict: gain + (noise - forget * gain). Update: prior / (1 + prior * B g^2). A filter that has not started,
 * whose state is all zero, starts at the fixed point of its first gradient (or, if slope is 0, at lr_sgd). With MEMORY,
 * the filter remembers a number of steps n, and its gain becomes gain / (h + sqrt(h^2 + (gain g / lr)^2 / n)) with
 * h = (1 - (1 - gain / lr_sgd) / n) / 2. The root of 1/n is part of memory_slope, to keep squares small. Rounding must
 * not take the prior below the noise. */
#define ADABAYES_LOOP(MAY_START, MEMORY, from)                                                                     \
    for (int32_t i = from; i < from + UNIT; i++) {                                                                 \
        RANDOM_BITS;                                                                                               \
        const REAL gi = (REAL)LOAD_PARAM(g[i]);                                                                    \
        const REAL old = (REAL)LOAD_STATE(m[i]), before = (REAL)LOAD_STATE(s[i]);                                  \
        const REAL mean = beta1 * old + weight * gi;                                                               \
        const int unstarted = MAY_START && before == 0 && old == 0;                                                \
        const REAL slope_g = slope * gi;                                                                           \
        const REAL started = unstarted ? 1 / (half + SQRT(half * half + slope_g * slope_g)) : before;              \
        const REAL next = started + (noise - forget * started), prior = next < noise ? noise : next;               \
        const REAL gain = started < (REAL)LEAST_GAIN ? (REAL)LEAST_GAIN : started;                                 \
        const REAL h = h_constant + h_slope * gain, memory_g = memory_slope * gi * gain;                           \
        const REAL posterior = MEMORY ? gain / (h + SQRT(h * h + memory_g * memory_g))                             \
                                      : prior / (1 + prior * (information * gi * gi));                             \
        MOVE(size *(posterior * mean));                                                                            \
        m[i] = STORE_STATE(mean, state_bits);                                                                      \
        s[i] = STORE_STATE(unstarted && gi == 0 && slope != 0 ? 0 : posterior, state_bits >> 16);                  \
    }

RULE(adabayes) {
    const adabayes_coefficients *c = (const adabayes_coefficients *)coefficients;
    PARAM_C *p = param;
    const PARAM_C *g = grad;
    STATE_C *m = exp_avg, *s = second_state;
    ADABAYES(CONSTANT)
    (void)round_params;

    /* Starting a filter costs a root, and few filters have not started: so this is done only in units that have one. */
    for (int32_t from = 0; from < count; from += UNIT) {
        int unstarted = 0;
        for (int32_t i = from; i < from + UNIT; i++) unstarted |= LOAD_STATE(s[i]) == 0;
        if (memory != 0) {
            if (unstarted) {
                ADABAYES_LOOP(1, 1, from)
            } else {
                ADABAYES_LOOP(0, 1, from)
            }
        } else if (unstarted) {
            ADABAYES_LOOP(1, 0, from)
        } else {
            ADABAYES_LOOP(0, 0, from)
        }
    }
}

/* AdaBayes-FP. With CENTRED, the squares are those of the gradient's difference from its average. With CAUTIOUS, a weight
 * does not move if its average does not have the sign of the newest gradient. */
#define ADABAYES_FP_LOOP(CENTRED, CAUTIOUS)                                                                        \
    for (int32_t i = 0; i < count; i++) {                                                                          \
        RANDOM_BITS;                                                                                               \
        const REAL gi = (REAL)LOAD_PARAM(g[i]);                                                                    \
        const REAL old = (REAL)LOAD_STATE(m[i]), before = (REAL)LOAD_STATE(v[i]);                                  \
        const REAL mean = beta1 * old + weight * gi;                                                               \
        const REAL seen = CENTRED ? gi - old * scale : gi;                                                         \
        const REAL product = square_weight * (seen * seen); /* the square may overflow */                          \
        const REAL square = before * beta2 + (product <= LARGEST ? product : square_weight * seen * seen);         \
        const int opposed = CAUTIOUS && (((mean > 0) & (gi <= 0)) | ((mean < 0) & (gi >= 0)));                     \
        const REAL moving = opposed ? 0 : mean;                                                                    \
        MOVE(size *(moving / (SQRT(square + inside) + outside)));                                                  \
        m[i] = STORE_STATE(mean, state_bits);                                                                      \
        v[i] = STORE_STATE(square, state_bits >> 16);                                                              \
    }

RULE(adabayes_fp) {
    const adabayes_fp_coefficients *c = (const adabayes_fp_coefficients *)coefficients;
    PARAM_C *p = param;
    const PARAM_C *g = grad;
    STATE_C *m = exp_avg, *v = second_state;
    ADABAYES_FP(CONSTANT)
    (void)round_params;

    if (centred != 0) {
        if (cautious != 0) {
            ADABAYES_FP_LOOP(1, 1)
        } else {
            ADABAYES_FP_LOOP(1, 0)
        }
    } else if (cautious != 0) {
        ADABAYES_FP_LOOP(0, 1)
    } else {
        ADABAYES_FP_LOOP(0, 0)
    }
}

#undef RULE
#undef CONSTANT
#undef RANDOM_BITS
#undef MOVE
#undef ADABAYES_LOOP
#undef ADABAYES_FP_LOOP
#undef PARAM_NAME
#undef PARAM_C
#undef LOAD_PARAM
#undef STORE_PARAM

#endif
