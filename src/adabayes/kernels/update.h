/* The two updates of a run of elements of one tensor, for the types that the includer has set. Not guarded: included
 * once for each pair of types. */

CLONES static void NAME(adabayes, PARAM_NAME, STATE_NAME)(const void *coefficients, const bias_corrections *bias,
        void *restrict param,
                                                          const void *restrict grad, void *restrict exp_avg,
                                                          void *restrict gain, uint32_t first,
                                                          int32_t count, int asleep, int round_params, uint32_t key) {
    const adabayes_coefficients *c = coefficients;
    PARAM_C *p = param;
    const PARAM_C *g = grad;
    STATE_C *m = exp_avg, *s = gain;
    const double unscale = c->common.unscale; /* goes into what the gradient is multiplied with */
    const REAL shrink = (REAL)c->common.shrink;
    const REAL weight = (REAL)((1 - c->common.beta1) * unscale), beta1 = (REAL)c->common.beta1;
    const REAL loss = (REAL)c->loss, noise = (REAL)c->noise;
    const REAL information = (REAL)(c->information * unscale * unscale);
    const REAL half = (REAL)c->half, slope = (REAL)(c->slope * unscale);
    const REAL size = (REAL)(c->scale / bias->first);
    (void)round_params;

#define BODY(ASLEEP, from, to)                                                                                     \
    for (int32_t i = from; i < to; i++) {                                                                          \
        const uint32_t who = (first + (uint32_t)i) ^ key, random = mix(who), more = mix(who ^ PARAM_STREAM);              \
        const REAL gi = (REAL)LOAD_PARAM(g[i]);                                                                    \
        const REAL old = (REAL)LOAD_STATE(m[i]), before = (REAL)LOAD_STATE(s[i]);                                  \
        const REAL mean = beta1 * old + weight * gi;                                                               \
        const int sleeping = ASLEEP && before == 0 && old == 0;                                                    \
        const REAL line = slope * gi;                                                                              \
        const REAL begun = sleeping ? 1 / (half + SQRT(half * half + line * line)) : before;                       \
        const REAL next = begun + (noise - loss * begun), prior = next < noise ? noise : next;                     \
        const REAL posterior = prior / (1 + prior * (information * gi * gi));                                      \
        const REAL moved = (REAL)LOAD_PARAM(p[i]) * shrink - size * (posterior * mean);                            \
        p[i] = STORE_PARAM(moved, more);                                                                           \
        m[i] = STORE_STATE(mean, random);                                                                          \
        s[i] = STORE_STATE(sleeping && gi == 0 && slope != 0 ? 0 : posterior, random >> 16);                       \
        (void)random, (void)more;                                                                                  \
    }
    if (!asleep) {
        BODY(0, 0, count)
        return;
    }
    /* Few weights sleep after the first step, and to begin a filter costs a root: so block by block, where one is. */
    for (int32_t from = 0; from < count; from += BLOCK) {
        const int32_t to = count - from < BLOCK ? count : from + BLOCK;
        int any = 0;
        for (int32_t i = from; i < to; i++) any |= LOAD_STATE(s[i]) == 0;
        if (any) {
            BODY(1, from, to)
        } else {
            BODY(0, from, to)
        }
    }
#undef BODY
}

CLONES static void NAME(adabayes_fp, PARAM_NAME, STATE_NAME)(const void *coefficients, const bias_corrections *bias,
        void *restrict param,
                                                             const void *restrict grad, void *restrict exp_avg,
                                                             void *restrict exp_avg_sq,
                                                             uint32_t first, int32_t count, int asleep, int round_params,
                                                             uint32_t key) {
    const adabayes_fp_coefficients *c = coefficients;
    PARAM_C *p = param;
    const PARAM_C *g = grad;
    STATE_C *m = exp_avg, *v = exp_avg_sq;
    const double unscale = c->common.unscale; /* goes into what the gradient is multiplied with */
    const REAL shrink = (REAL)c->common.shrink;
    const REAL weight = (REAL)((1 - c->common.beta1) * unscale), beta1 = (REAL)c->common.beta1;
    const REAL beta2 = (REAL)c->common.beta2, weight2 = (REAL)((1 - c->common.beta2) * unscale * unscale);
    /* The denominator and the step are both multiplied by the root of v's bias correction. */
    const double root = sqrt(bias->second), outer = root * (c->eps / 2);
    const REAL inside = (REAL)(outer * outer), outside = (REAL)outer;
    const REAL size = (REAL)(c->lr * root / bias->first);
    (void)asleep, (void)round_params;

    for (int32_t i = 0; i < count; i++) {
        const uint32_t who = (first + (uint32_t)i) ^ key, random = mix(who), more = mix(who ^ PARAM_STREAM);
        const REAL gi = (REAL)LOAD_PARAM(g[i]);
        const REAL old = (REAL)LOAD_STATE(m[i]), before = (REAL)LOAD_STATE(v[i]);
        const REAL mean = beta1 * old + weight * gi;
        const REAL square = before * beta2 + weight2 * (gi * gi);
        const REAL moved = (REAL)LOAD_PARAM(p[i]) * shrink - size * (mean / (SQRT(square + inside) + outside));
        p[i] = STORE_PARAM(moved, more);
        m[i] = STORE_STATE(mean, random);
        v[i] = STORE_STATE(square, random >> 16);
        (void)random, (void)more;
    }
}

#undef PARAM_NAME
#undef PARAM_C
#undef LOAD_PARAM
#undef STORE_PARAM
