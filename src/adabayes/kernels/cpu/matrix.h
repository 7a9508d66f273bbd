/* The data of matrix.c, which Python fills in: kernels/cpu/matrix.py has the same fields. */
#include <stdint.h>

/* A rectangle of a block that is processed at a time: the block itself, or, if one of its sides is long and not rotated, a
 * part of it. */
typedef struct {
    int64_t param;         /* index of the parameter */
    int64_t offset;        /* of the first row in the parameter */
    int64_t stride;        /* elements from one row to the next in the parameter */
    int64_t column;        /* index of the first column in the matrix */
    int64_t height, width; /* of the part that lies inside the parameter; zeros fill up the rest */
    int64_t m, n;          /* size */
    int64_t state_offset;  /* of the first element in the averages */
    int64_t state_stride;  /* elements from one row to the next in the averages */
    int64_t left, right;   /* indices of the bases, or -1 for a side that is not rotated */
} tile;

/* One side of a block, or of several blocks that share it. */
typedef struct {
    int64_t side;   /* 0: left, 1: right */
    int64_t size;
    int64_t index;  /* among the bases of this side: refreshed when t - index is a multiple of refresh_every */
    void *factor;   /* A or C */
    void *basis;    /* Q_A or Q_C */
} basis;

/* Tiles and the bases that they share. One thread processes them, so results do not depend on the number of threads. */
typedef struct {
    int64_t first_tile, num_tiles;
    int64_t first_basis, num_bases;
} cluster;

/* The coefficients of a step, for all parameters with the same step count. Those of AdaBayes-FP follow in memory. */
typedef struct {
    double t;
    double unscale;       /* undoes the scaling of gradients by a GradScaler */
    double shrink;        /* factor of the weights: weight decay */
    double learns[2];     /* whether the factors of each side learn from this gradient */
    double factor_decay;  /* of the factors that learn */
    double refresh_every; /* steps between two refreshes; 0 for no refresh at this step */
    double least_ratio;   /* lower bound on V / M^2 after a refresh */
    double fixed_point[];
} matrix_coefficients;

typedef struct {
    int64_t num_clusters, num_tiles;
    const cluster *clusters;
    const tile *tiles;
    const basis *bases;
    void *const *params;
    const void *const *grads;  /* with the layout of the parameter */
    const int64_t *const *column_offsets; /* of each column within a row of the parameter; 0 if consecutive */
    void *const *exp_avgs;     /* M, in the eigenbasis: a stack of blocks */
    void *const *exp_avg_sqs;  /* V, likewise */
    const int64_t *indices;    /* of each parameter among all of the optimizer's, for the random generator */
    const int64_t *rows;       /* index of each parameter's row of coefficients */
    const double *coefficients;
    int64_t width;             /* of a row of coefficients */
    void *scratch;             /* for each thread, BUFFERS matrices of size `largest` */
    int64_t largest;           /* the largest side of a tile, a multiple of 32 */
    int64_t seed;
    int32_t param_type, state_type, threads;
} matrices;

#define BUFFERS 7
