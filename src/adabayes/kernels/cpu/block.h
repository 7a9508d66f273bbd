/* A step of AdaBayes-K for one block.
 *
 * Matrices in scratch memory have padded(rows) rows of padded(columns) elements. The padding is zero, so `multiply` needs no
 * code for remainders. */

#define LANES ((int64_t)(VECTOR_BYTES / sizeof(REAL)))
#define STRIP (2 * LANES) /* columns of a product that are computed at a time */
#define vector NAMED(vector)
#define padded NAMED(padded)
#define multiply NAMED(multiply)
#define dot NAMED(dot)
#define subtract_multiple NAMED(subtract_multiple)
#define copy_padded NAMED(copy_padded)
#define transpose NAMED(transpose)
#define as_padded NAMED(as_padded)
#define limit NAMED(limit)
#define prefetch NAMED(prefetch)
#define load_gradient NAMED(load_gradient)
#define load_state NAMED(load_state)
#define store_state NAMED(store_state)
#define move_weights NAMED(move_weights)
#define apply_fixed_point NAMED(apply_fixed_point)
#define learn_factor NAMED(learn_factor)
#define swap NAMED(swap)
#define step_tile NAMED(step_tile)
#define orthonormalize NAMED(orthonormalize)
#define sort_order NAMED(sort_order)
#define refresh_basis NAMED(refresh_basis)
#define carry_over NAMED(carry_over)
#define raise_squares NAMED(raise_squares)
#define step_cluster NAMED(step_cluster)

typedef REAL vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

static inline int64_t padded(int64_t size) { return (size + STRIP - 1) / STRIP * STRIP; }

/* Linear algebra */

/* out = keep * out + scale * A B, where A is m x depth with A[i][k] = a[i * a_row + k * a_column], and B is depth x n. The
 * sizes m and n are rounded up, to ROWS and STRIP: the memory must be there. */
static void multiply(int64_t m, int64_t n, int64_t depth, const REAL *a, int64_t a_row, int64_t a_column, const REAL *b,
                     int64_t b_row, REAL keep, REAL scale, REAL *out, int64_t out_row) {
    for (int64_t j = 0; j < n; j += STRIP) {
        for (int64_t i = 0; i < m; i += ROWS) {
            const REAL *left = a + i * a_row, *right = b + j;
            vector sum[ROWS][2] = {{{0}}};
            for (int64_t k = 0; k < depth; k++) {
                const vector first = *(const vector *)(right + k * b_row);
                const vector second = *(const vector *)(right + k * b_row + LANES);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    const REAL x = left[r * a_row + k * a_column];
                    sum[r][0] += x * first;
                    sum[r][1] += x * second;
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                vector *to = (vector *)(out + (i + r) * out_row + j);
                vector *next = (vector *)(out + (i + r) * out_row + j + LANES);
                *to = keep != 0 ? keep * *to + scale * sum[r][0] : scale * sum[r][0];
                *next = keep != 0 ? keep * *next + scale * sum[r][1] : scale * sum[r][1];
            }
        }
    }
}

static REAL dot(const REAL *a, const REAL *b, int64_t size) {
    vector sums[2] = {{0}};
    for (int64_t i = 0; i < size; i += STRIP) {
        sums[0] += *(const vector *)(a + i) * *(const vector *)(b + i);
        sums[1] += *(const vector *)(a + i + LANES) * *(const vector *)(b + i + LANES);
    }
    const vector both = sums[0] + sums[1];
    REAL sum = 0;
    for (int i = 0; i < LANES; i++) sum += both[i];
    return sum;
}

static void subtract_multiple(REAL *a, REAL scale, const REAL *b, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) *(vector *)(a + i) -= scale * *(const vector *)(b + i);
}

/* Copies an m x n matrix into scratch memory. */
static void copy_padded(REAL *to, const REAL *from, int64_t m, int64_t n, int64_t from_row) {
    const int64_t row = padded(n);
    for (int64_t i = 0; i < m; i++) {
        memcpy(to + i * row, from + i * from_row, (size_t)n * sizeof(REAL));
        memset(to + i * row + n, 0, (size_t)(row - n) * sizeof(REAL));
    }
    memset(to + m * row, 0, (size_t)((padded(m) - m) * row) * sizeof(REAL));
}

/* Writes the transpose of an m x n matrix: n rows of padded(m) elements. */
static void transpose(REAL *restrict to, const REAL *restrict from, int64_t m, int64_t n, int64_t from_row) {
    enum { SQUARE = 16 };
    const int64_t row = padded(m);
    memset(to, 0, (size_t)(padded(n) * row) * sizeof(REAL));
    for (int64_t i = 0; i < m; i += SQUARE)
        for (int64_t j = 0; j < n; j += SQUARE)
            for (int64_t jj = j; jj < j + SQUARE && jj < n; jj++)
                for (int64_t ii = i; ii < i + SQUARE && ii < m; ii++) to[jj * row + ii] = from[ii * from_row + jj];
}

/* Returns a square matrix with padded rows: itself, if its rows need no padding, or a copy. */
static const REAL *as_padded(const REAL *x, int64_t size, REAL *scratch) {
    if (size % STRIP == 0) return x;
    copy_padded(scratch, x, size, size, size);
    return scratch;
}

/* Memory */

/* Limits finite values, so that their sums stay finite. */
static inline REAL limit(REAL g) {
    const REAL size = g < 0 ? -g : g, limited = g < 0 ? -LARGEST_GRADIENT : LARGEST_GRADIENT;
    return size > LARGEST_GRADIENT && size <= LARGEST_REAL ? limited : g;
}

/* Requests the memory of a tile in advance: its rows are too far apart for the processor to guess them. */
static void prefetch(const REAL *from, const tile *s) {
    for (int64_t i = 0; i < s->height; i++)
        for (int64_t j = 0; j < s->width; j += 64 / (int64_t)sizeof(REAL))
            __builtin_prefetch(from + s->offset + i * s->stride + s->column + j);
}

/* Copies a tile of the gradient into scratch memory. */
static void load_gradient(REAL *restrict to, const matrices *x, const tile *s, REAL unscale) {
    const int64_t row = padded(s->n), *offsets = x->column_offsets[s->param];
    for (int64_t i = 0; i < s->height; i++) {
        const REAL *from = (const REAL *)x->grads[s->param] + s->offset + i * s->stride;
        if (offsets)
            for (int64_t j = 0; j < s->width; j++) to[i * row + j] = limit(from[offsets[s->column + j]] * unscale);
        else
            for (int64_t j = 0; j < s->width; j++) to[i * row + j] = limit(from[s->column + j] * unscale);
        memset(to + i * row + s->width, 0, (size_t)(row - s->width) * sizeof(REAL));
    }
    memset(to + s->height * row, 0, (size_t)((padded(s->m) - s->height) * row) * sizeof(REAL));
}

/* Copies a tile of an average into scratch memory. */
static void load_state(REAL *to, const void *state, const tile *s, int state_type) {
    if (state_type != BF16) {
        copy_padded(to, (const REAL *)state + s->state_offset, s->m, s->n, s->state_stride);
        return;
    }
    const int64_t row = padded(s->n);
    memset(to, 0, (size_t)(padded(s->m) * row) * sizeof(REAL));
    for (int64_t i = 0; i < s->m; i++) {
        const uint16_t *from = (const uint16_t *)state + s->state_offset + i * s->state_stride;
        for (int64_t j = 0; j < s->n; j++) to[i * row + j] = from_bf16(from[j]);
    }
}

/* Copies a tile of an average back. bf16 is rounded stochastically, with 16 of the 32 random bits, from bit `shift` on. */
static void store_state(void *state, const REAL *from, const tile *s, int state_type, uint32_t key, int shift) {
    const int64_t row = padded(s->n);
    for (int64_t i = 0; i < s->m; i++) {
        const int64_t at = s->state_offset + i * s->state_stride;
        if (state_type != BF16) {
            memcpy((REAL *)state + at, from + i * row, (size_t)s->n * sizeof(REAL));
            continue;
        }
        uint16_t *to = (uint16_t *)state + at;
        for (int64_t j = 0; j < s->n; j++) {
            const uint32_t random = mix((uint32_t)(at + j) ^ key ^ REFRESH_STREAM);
            to[j] = to_bf16((float)from[i * row + j], random >> shift & 0xffffu);
        }
    }
}

/* Moves the weights of a tile. */
static void move_weights(const matrices *x, const tile *s, const REAL *step, REAL shrink) {
    const int64_t row = padded(s->n), *offsets = x->column_offsets[s->param];
    for (int64_t i = 0; i < s->height; i++) {
        REAL *restrict p = (REAL *)x->params[s->param] + s->offset + i * s->stride;
        const REAL *restrict u = step + i * row;
        if (offsets)
            for (int64_t j = 0; j < s->width; j++) {
                REAL *to = p + offsets[s->column + j];
                *to = *to * shrink - u[j];
            }
        else
            for (int64_t j = 0; j < s->width; j++) p[s->column + j] = p[s->column + j] * shrink - u[j];
    }
}

/* The step */

/* Updates the averages by AdaBayes-FP, and writes its step. Both matrices have padded rows. */
static void apply_fixed_point(const matrices *x, const tile *s, const double *coefficients, const REAL *gradient,
                              REAL *step, uint32_t key) {
    const int64_t row = padded(s->n), bytes = x->state_type == BF16 ? 2 : sizeof(REAL);
    const int is_contiguous = row == s->n && s->n == s->state_stride;
    const int64_t calls = is_contiguous ? 1 : s->m, count = is_contiguous ? s->m * s->n : s->n;
    update *apply = fixed_point_update(x->state_type);
    for (int64_t i = 0; i < calls; i++) {
        const int64_t at = s->state_offset + i * s->state_stride;
        apply(coefficients, step + i * row, gradient + i * row, (char *)x->exp_avgs[s->param] + at * bytes,
              (char *)x->exp_avg_sqs[s->param] + at * bytes, (uint32_t)at, (int32_t)count, 1, 0, key);
    }
}

/* A += weight * G G^T for the left side, C += weight * G^T G for the right one. */
static void learn_factor(const basis *q, const tile *s, const REAL *G, REAL weight, REAL *transposed, REAL *product) {
    const int64_t row = padded(s->n), size = q->size, stride = padded(size);
    const int fits = stride == size; /* so that the product can be added where the factor is */
    REAL *factor = q->factor, *sum = fits ? factor : product;
    if (q->side == 0) {
        transpose(transposed, G, s->m, s->n, row);
        multiply(size, size, s->n, G, row, 1, transposed, padded(s->m), fits, weight, sum, stride);
    } else {
        multiply(size, size, s->m, G, 1, row, G, row, fits, weight, sum, stride);
    }
    if (fits) return;
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = 0; j < size; j++) factor[i * size + j] += product[i * stride + j];
}

static void swap(REAL **a, REAL **b) {
    REAL *before = *a;
    *a = *b;
    *b = before;
}

/* Rotates the gradient of a tile, applies AdaBayes-FP, rotates back and moves the weights; then the factors learn. */
static void step_tile(const matrices *x, const tile *s, const matrix_coefficients *c, REAL *const *scratch, uint32_t key) {
    const int64_t m = s->m, n = s->n, row = padded(n);
    const basis *left = s->left < 0 ? 0 : x->bases + s->left, *right = s->right < 0 ? 0 : x->bases + s->right;
    REAL *G = scratch[0], *now = scratch[1], *other = scratch[2];
    if (s + 1 < x->tiles + x->num_tiles) prefetch((const REAL *)x->grads[s[1].param], s + 1);
    load_gradient(G, x, s, (REAL)c->unscale);
    prefetch((const REAL *)x->params[s->param], s);

    const REAL *Q_A = left ? as_padded(left->basis, m, scratch[3]) : 0;
    const REAL *Q_C = right ? as_padded(right->basis, n, scratch[4]) : 0;
    const REAL *rotated = G;
    if (left) { /* Q_A^T G */
        multiply(m, n, m, Q_A, 1, padded(m), rotated, row, 0, 1, now, row);
        rotated = now;
    }
    if (right) { /* Q_A^T G Q_C */
        multiply(m, n, n, rotated, row, 1, Q_C, row, 0, 1, other, row);
        swap(&now, &other);
    }
    apply_fixed_point(x, s, c->fixed_point, now, other, key); /* U' */
    swap(&now, &other);
    if (left) { /* Q_A U' */
        multiply(m, n, m, Q_A, padded(m), 1, now, row, 0, 1, other, row);
        swap(&now, &other);
    }
    if (right) { /* Q_A U' Q_C^T */
        transpose(scratch[5], Q_C, n, n, row);
        multiply(m, n, n, now, row, 1, scratch[5], row, 0, 1, other, row);
        swap(&now, &other);
    }
    move_weights(x, s, now, (REAL)c->shrink);

    const REAL weight = (REAL)(1 - c->factor_decay);
    if (left && c->learns[0] != 0) learn_factor(left, s, G, weight, other, scratch[5]);
    if (right && c->learns[1] != 0) learn_factor(right, s, G, weight, other, scratch[5]);
}

/* Refreshes */

/* Orthonormalizes the rows of a square matrix, from the first to the last, by Gram-Schmidt, and writes them as columns.
 * Panels of ROWS rows are made orthogonal to all rows before them by products of matrices. A second pass follows where the
 * first one took away more than half of a row, because what is left has more rounding errors then. */
static void orthonormalize(REAL *rows, REAL *columns, int64_t size, REAL *overlaps) {
    const int64_t row = padded(size);
    memset(columns, 0, (size_t)(row * row) * sizeof(REAL));
    for (int64_t first = 0; first < size; first += ROWS) {
        REAL *panel = rows + first * row;
        const int64_t count = size - first < ROWS ? size - first : ROWS;
        int again = 1;
        for (int pass = 0; pass < 2 && again; pass++) {
            REAL before[ROWS];
            for (int64_t i = 0; i < count; i++) before[i] = dot(panel + i * row, panel + i * row, row);
            again = 0;
            if (first) {
                multiply(ROWS, first, size, panel, row, 1, columns, row, 0, 1, overlaps, row);
                multiply(ROWS, size, first, overlaps, row, 1, rows, row, 1, -1, panel, row);
            }
            for (int64_t i = 0; i < count; i++) {
                REAL *x = panel + i * row;
                for (int64_t k = 0; k < i; k++) subtract_multiple(x, dot(x, panel + k * row, row), panel + k * row, row);
                const REAL after = dot(x, x, row), inverse = after > 0 ? 1 / SQRT(after) : 0;
                again |= after < before[i] / 4;
                for (int64_t k = 0; k < row; k++) x[k] *= inverse;
            }
        }
        for (int64_t k = 0; k < size; k++)
            for (int64_t i = 0; i < count; i++) columns[k * row + first + i] = panel[i * row + k];
    }
}

/* Sorts the indices 0, 1, ... by their keys, largest first. Equal keys keep their order. */
static void sort_order(int64_t *order, const REAL *keys, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        int64_t at = i;
        while (at > 0 && keys[order[at - 1]] < keys[i]) order[at] = order[at - 1], at--;
        order[at] = i;
    }
}

/* Takes a step of orthogonal iteration: Q = qr(A Q + SHIFT Q), with columns sorted by their Rayleigh quotients, largest
 * first. Returns the rotation from the old basis to the new one, Q_old^T Q_new; `order` maps new columns to old ones. */
static const REAL *refresh_basis(const basis *q, REAL *const *scratch, int64_t *order) {
    const int64_t size = q->size, row = padded(size);
    REAL *A = q->factor, *Q = q->basis;
    REAL *old = scratch[0], *scaled = scratch[1], *products = scratch[2], *sorted = scratch[3], *new = scratch[4];
    REAL largest = 0, quotients[MAX_SIDE];
    for (int64_t i = 0; i < size * size; i++) {
        A[i] = A[i] - A[i] == 0 ? A[i] : 0; /* an entry that has overflowed starts again */
        const REAL entry = A[i] < 0 ? -A[i] : A[i];
        largest = entry > largest ? entry : largest;
    }
    copy_padded(scaled, A, size, size, size);
    for (int64_t i = 0; i < size * row; i++) scaled[i] /= largest > 0 ? largest : 1;
    copy_padded(old, Q, size, size, size);
    multiply(size, size, size, old, 1, row, scaled, row, 0, 1, products, row); /* row i is A q_i */
    transpose(sorted, old, size, size, row);
    for (int64_t i = 0; i < size; i++) {
        quotients[i] = dot(products + i * row, sorted + i * row, row);
        subtract_multiple(products + i * row, (REAL)-SHIFT, sorted + i * row, row);
    }
    sort_order(order, quotients, size);
    memset(sorted + size * row, 0, (size_t)((row - size) * row) * sizeof(REAL));
    for (int64_t i = 0; i < size; i++)
        memcpy(sorted + i * row, products + order[i] * row, (size_t)row * sizeof(REAL));
    orthonormalize(sorted, new, size, scaled);
    multiply(size, size, size, old, 1, row, new, row, 0, 1, products, row);
    for (int64_t i = 0; i < size; i++) memcpy(Q + i * size, new + i * row, (size_t)size * sizeof(REAL));
    return products;
}

/* Rotates the average M of a tile with a basis, and reorders the averaged squares V. */
static void carry_over(const matrices *x, const tile *s, int side, const REAL *rotation, const int64_t *order,
                       REAL *const *scratch, uint32_t key) {
    const int64_t m = s->m, n = s->n, row = padded(n);
    REAL *old = scratch[0], *new = scratch[1];
    load_state(old, x->exp_avgs[s->param], s, x->state_type);
    if (side == 0) multiply(m, n, m, rotation, 1, padded(m), old, row, 0, 1, new, row);
    else multiply(m, n, n, old, row, 1, rotation, row, 0, 1, new, row);
    store_state(x->exp_avgs[s->param], new, s, x->state_type, key, side ? 0 : 16);
    load_state(old, x->exp_avg_sqs[s->param], s, x->state_type);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) new[i * row + j] = side ? old[i * row + order[j]] : old[order[i] * row + j];
    store_state(x->exp_avg_sqs[s->param], new, s, x->state_type, 0, 0); /* V is only reordered, so rounding changes nothing */
}

/* Raises the averaged squares of a tile to the least that is possible with its average. */
static void raise_squares(const matrices *x, const tile *s, REAL ratio, REAL *const *scratch, uint32_t key) {
    const int64_t row = padded(s->n);
    REAL *M = scratch[0], *V = scratch[1];
    load_state(M, x->exp_avgs[s->param], s, x->state_type);
    load_state(V, x->exp_avg_sqs[s->param], s, x->state_type);
    for (int64_t i = 0; i < s->m * row; i++) {
        const REAL least = ratio * M[i] * M[i];
        V[i] = V[i] < least ? least : V[i];
    }
    store_state(x->exp_avg_sqs[s->param], V, s, x->state_type, ~key, 0);
}

/* Steps all tiles of a cluster, then refreshes the bases that are due. */
static void step_cluster(void *data, int64_t index, int worker) {
    const matrices *x = data;
    const cluster *own = x->clusters + index;
    const tile *tiles = x->tiles + own->first_tile;
    const basis *bases = x->bases + own->first_basis;
    const int64_t param = tiles->param, buffer = x->largest * x->largest;
    const matrix_coefficients *c = (const void *)(x->coefficients + x->rows[param] * x->width);
    const uint32_t key = key_of(x->seed, x->indices[param], c->t);
    REAL *scratch[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) scratch[i] = (REAL *)x->scratch + (worker * BUFFERS + i) * buffer;

    for (int64_t i = 0; i < own->num_bases; i++) {
        REAL *factor = bases[i].factor;
        if (c->learns[bases[i].side] != 0)
            for (int64_t k = 0; k < bases[i].size * bases[i].size; k++) factor[k] *= (REAL)c->factor_decay;
    }
    for (int64_t i = 0; i < own->num_tiles; i++) step_tile(x, tiles + i, c, scratch, key);

    if (c->refresh_every == 0) return;
    const int64_t t = (int64_t)c->t, every = (int64_t)c->refresh_every;
    int refreshed = 0;
    for (int64_t i = 0; i < own->num_bases; i++) {
        int64_t order[MAX_SIDE];
        if ((t - bases[i].index) % every != 0) continue;
        const REAL *rotation = refresh_basis(bases + i, scratch, order);
        for (int64_t k = 0; k < own->num_tiles; k++) {
            const tile *s = tiles + k;
            if ((bases[i].side ? s->right : s->left) == own->first_basis + i)
                carry_over(x, s, (int)bases[i].side, rotation, order, scratch, key);
        }
        refreshed = 1;
    }
    if (refreshed && c->least_ratio > 0)
        for (int64_t k = 0; k < own->num_tiles; k++) raise_squares(x, tiles + k, (REAL)c->least_ratio, scratch, key);
}

#undef LANES
#undef STRIP
#undef vector
#undef padded
#undef multiply
#undef dot
#undef subtract_multiple
#undef copy_padded
#undef transpose
#undef as_padded
#undef limit
#undef prefetch
#undef load_gradient
#undef load_state
#undef store_state
#undef move_weights
#undef apply_fixed_point
#undef learn_factor
#undef swap
#undef step_tile
#undef orthonormalize
#undef sort_order
#undef refresh_basis
#undef carry_over
#undef raise_squares
#undef step_cluster
#undef TYPE
#undef REAL
#undef SQRT
#undef LARGEST_REAL
#undef LARGEST_GRADIENT
