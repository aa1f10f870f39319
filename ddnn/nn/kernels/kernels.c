/* The element-wise parts of a training step in bf16, and preconditioning in bf16 and float32. Float32 needs AVX-512, the
 * functions of bf16 need its bf16 instructions too.
 *
 * Each function does in one pass over memory what ddnn.nn.kernels describes, and what PyTorch does in several. Values
 * are widened to float32, worked on there, and rounded once, to nearest even. NaN gives NaN (and a
 * row with one a loss of NaN), infinity its limit to within 2^-126; subnormal numbers become 0 where they are rounded
 * to bf16.
 *
 * Elsewhere than on x86-64 with GCC or Clang there is only ddnn_kernels_supported, which gives 0.
 */

#include <stdint.h>

#ifndef DDNN_SOURCE
#define DDNN_SOURCE "unknown"
#endif

/* SHA-256 of this file as it was when it was compiled. */
const char *ddnn_kernels_source(void) { return DDNN_SOURCE; }

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <math.h>

#define FLOAT32 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, AHEAD = 1024 };

/* What this processor can run: 0 nothing, 1 the functions of float32, 2 all. */
int ddnn_kernels_supported(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 0;
    return __builtin_cpu_supports("avx512bf16") ? 2 : 1;
}

/* The lanes that hold some of the `left` values from here on. */
FLOAT32 INLINE __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1u); }

BF16 INLINE __m512 widen(__mmask16 on, const uint16_t *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(on, from)), 16));
}

BF16 INLINE void narrow(uint16_t *to, __mmask16 on, __m512 values) {
    _mm256_mask_storeu_epi16(to, on, (__m256i)_mm512_cvtneps_pbh(values));
}

/* e^x, to 1e-5 of itself (4e-6 for |x| < 5) where neither it nor its inverse leaves float32; beyond that it stays at
 * the limit. */
BF16 INLINE __m512 exponential(__m512 x) {
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)); /* min and max give their second operand for NaN */
    t = _mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_max_ps(_mm512_set1_ps(-126.0f), t));
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(t, whole);
    __m512 p = _mm512_set1_ps(1.3333558e-3f); /* Taylor series of 2^f, |f| <= 1/2 */
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* 1 / x by an estimate and a step of Newton's; x is 1 or more and less than 2^127. */
BF16 INLINE __m512 inverse(__m512 x) {
    __m512 y = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
}

/* out (n, columns) <- (frames at `rows` of the store, spliced + shift) * scale. A spliced frame is `columns` floats of
 * the store from `row * dim` on, of which there are `windows`; shift and scale have `columns` floats, or are null.
 * Returns -1 where a row is not one of them, else 0. */
BF16 int64_t ddnn_gather_spliced(const float *store, int64_t windows, int64_t dim, int64_t columns, const int64_t *rows,
                         int64_t n, int64_t first, const float *shift, const float *scale, uint16_t *out) {
    for (int64_t i = 0; i < n; i++, out += columns) {
        const int64_t row = rows[i] + first;
        if (row < 0 || row >= windows) return -1;
        const float *from = store + row * dim;
        for (int64_t j = 0; j < columns; j += LANES) {
            __mmask16 on = lanes(columns - j);
            __m512 v = _mm512_maskz_loadu_ps(on, from + j);
            if (shift) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(on, shift + j));
            if (scale) v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(on, scale + j));
            narrow(out + j, on, v);
        }
    }
    return 0;
}

/* y (rows, columns) <- 1 / (1 + e^-(y + bias)); bias (columns). */
BF16 void ddnn_sigmoid(uint16_t *y, int64_t rows, int64_t columns, const float *bias) {
    const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-1.0f);
    for (int64_t i = 0; i < rows; i++, y += columns)
        for (int64_t j = 0; j < columns; j += LANES) {
            __mmask16 on = lanes(columns - j);
            __m512 v = _mm512_add_ps(widen(on, y + j), _mm512_maskz_loadu_ps(on, bias + j));
            narrow(y + j, on, inverse(_mm512_add_ps(one, exponential(_mm512_mul_ps(minus, v)))));
        }
}

/* d <- d y (1 - y), n values. */
BF16 void ddnn_sigmoid_backward(uint16_t *d, const uint16_t *y, int64_t n) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 on = lanes(n - i);
        __m512 v = widen(on, y + i);
        narrow(d + i, on, _mm512_mul_ps(widen(on, d + i), _mm512_mul_ps(_mm512_sub_ps(one, v), v)));
    }
}

/* sums (columns) <- the sum over the rows of d (rows, columns), each times its weight, rounded to bf16. The weights
 * (rows) may be null. */
BF16 void ddnn_column_sums(const uint16_t *d, int64_t rows, int64_t columns, const float *weights, uint16_t *sums) {
    for (int64_t j = 0; j < columns; j += 4 * LANES) {
        __mmask16 on[4];
        __m512 sum[4];
        for (int k = 0; k < 4; k++) {
            on[k] = columns - j > k * LANES ? lanes(columns - j - k * LANES) : 0;
            sum[k] = _mm512_setzero_ps();
        }
        for (int64_t i = 0; i < rows; i++) {
            const __m512 weight = _mm512_set1_ps(weights ? weights[i] : 1.0f);
            for (int k = 0; k < 4; k++)
                sum[k] = _mm512_fmadd_ps(weight, widen(on[k], d + i * columns + j + k * LANES), sum[k]);
        }
        for (int k = 0; k < 4; k++) narrow(sums + j + k * LANES, on[k], sum[k]);
    }
}

/* to (rows, columns) <- from, its rows `stride` floats apart, with a 1 after each row where `one`; norms (rows) <- the
 * Euclidean norms of the rows of `to`, the 1 with them. */
BF16 void ddnn_bf16_to_float32_rows(const uint16_t *from, int64_t rows, int64_t columns, float *to, int64_t stride, int one,
                          float *norms) {
    for (int64_t i = 0; i < rows; i++, from += columns, to += stride) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t j = 0; j < columns; j += LANES) {
            __mmask16 on = lanes(columns - j);
            __m512 v = widen(on, from + j);
            _mm512_mask_storeu_ps(to + j, on, v);
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        if (one) to[columns] = 1.0f;
        norms[i] = sqrtf(_mm512_reduce_add_ps(squares) + (one ? 1.0f : 0.0f));
    }
}

/* to (rows, columns) <- from, rounded; norms (rows) <- the Euclidean norms of the rows of `from`. Where `last` is not
 * null the rows of `from` have one value more, which goes there (rows) and not to `to`. */
BF16 void ddnn_float32_to_bf16_rows(const float *from, int64_t rows, int64_t columns, int64_t stride, uint16_t *to, float *last,
                           float *norms) {
    for (int64_t i = 0; i < rows; i++, from += stride, to += columns) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t j = 0; j < columns; j += LANES) {
            __mmask16 on = lanes(columns - j);
            __m512 v = _mm512_maskz_loadu_ps(on, from + j);
            narrow(to + j, on, v);
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        float sum = _mm512_reduce_add_ps(squares);
        if (last) {
            last[i] = from[columns];
            sum += last[i] * last[i];
        }
        norms[i] = sqrtf(sum);
    }
}

/* Preconditioning works on BLOCK rows at a time, and of these on some that leave the sums in registers. Factors of its
 * products are bf16 in pairs, as the processor wants them: for H = X W^T pairs of neighbouring columns of W, for H W
 * pairs of its rows, a group of GROUP columns after another. Of the first LEADING directions H W takes away nearly all
 * (all but 4 / D of the mean of X, say, which is the same in every row): there what rounding has cut from H and W comes
 * in a further pair, H's rounded value times W's rest and H's rest times W's rounded value. */
enum { BLOCK = 16, MANY = 8, SOME = 4, VECTORS = 5, GROUP = 4 * LANES, CHUNK = 64, LEADING = 2 };

BF16 INLINE __m512bh twice(const uint16_t *pair) {
    uint32_t both;
    __builtin_memcpy(&both, pair, sizeof both);
    return (__m512bh)_mm512_set1_epi32((int)both);
}

/* h (rows, width) += x (rows, pairs of columns, their starts `columns` apart) w (pairs, width); of h and w so many
 * vectors. */
BF16 INLINE void add_products(float *h, int64_t width, const uint16_t *x, int64_t columns, const uint32_t *w, int64_t pairs,
                         const int rows, const int vectors) {
    __m512 sum[MANY][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) sum[i][v] = _mm512_loadu_ps(h + i * width + v * LANES);
    for (int64_t p = 0; p < pairs; p++, w += width, x += 2) {
        __m512bh factor[VECTORS];
        for (int v = 0; v < vectors; v++) factor[v] = (__m512bh)_mm512_loadu_si512(w + v * LANES);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vectors; v++)
                sum[i][v] = _mm512_dpbf16_ps(sum[i][v], factor[v], twice(x + i * columns));
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(h + i * width + v * LANES, sum[i][v]);
}

/* The same for any number of rows, up to BLOCK, and all of the width: the function `name` by `add`, of x and w of these
 * types. Of few vectors more rows at a time. */
#define WITH(add, vectors) \
    case vectors: \
        done = vectors < 3 && left >= MANY ? MANY : left >= SOME ? SOME : 1; \
        if (vectors < 3 && done == MANY) add(to, width, of, columns, w + from, n, MANY, vectors); \
        else if (done == SOME) add(to, width, of, columns, w + from, n, SOME, vectors); \
        else add(to, width, of, columns, w + from, n, 1, vectors); \
        break;
#define PROJECT(target, name, add, x_type, w_type) \
    target static void name(float *h, int64_t width, const x_type *x, int64_t columns, const w_type *w, int64_t n, \
                          int64_t rows) { \
        for (int64_t from = 0, p = 0; from < width; from += p * LANES) { \
            p = (width - from) / LANES; \
            if (p > VECTORS) p = VECTORS; \
            for (int64_t i = 0, done = 1; i < rows; i += done) { \
                float *to = h + i * width + from; \
                const x_type *of = x + i * columns; \
                const int64_t left = rows - i; \
                switch (p) { WITH(add, 1) WITH(add, 2) WITH(add, 3) WITH(add, 4) WITH(add, 5) } \
            } \
        } \
    }
PROJECT(BF16, project, add_products, uint16_t, uint32_t)

/* x (rows, left columns, or GROUP) <- x + h w; h (rows, width), w (pairs, GROUP); squares (rows, LANES) += those of x. */
BF16 INLINE void add_projection(uint16_t *x, int64_t columns, int64_t left, const uint16_t *h, int64_t width,
                           const uint32_t *w, int64_t pairs, float *squares, const int rows) {
    enum { PARTS = GROUP / LANES };
    __m512 sum[SOME][PARTS];
    __mmask16 on[PARTS];
    for (int v = 0; v < PARTS; v++) on[v] = left > v * LANES ? lanes(left - v * LANES) : 0;
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < PARTS; v++) sum[i][v] = widen(on[v], x + i * columns + v * LANES);
    for (int64_t p = 0; p < pairs; p++, w += GROUP) {
        __m512bh factor[PARTS];
        for (int v = 0; v < PARTS; v++) factor[v] = (__m512bh)_mm512_loadu_si512(w + v * LANES);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < PARTS; v++)
                sum[i][v] = _mm512_dpbf16_ps(sum[i][v], factor[v], twice(h + i * width + 2 * p));
    }
    for (int i = 0; i < rows; i++) {
        __m512 square = _mm512_loadu_ps(squares + i * LANES);
        for (int v = 0; v < PARTS; v++) {
            square = _mm512_mask3_fmadd_ps(sum[i][v], sum[i][v], square, on[v]);
            narrow(x + i * columns + v * LANES, on[v], sum[i][v]);
        }
        _mm512_storeu_ps(squares + i * LANES, square);
    }
}

/* j (rank, left columns, or GROUP; its rows `dim` apart) += h x of n rows of x; h (rank, BLOCK), of which those beyond n
 * are 0. */
BF16 INLINE void add_scatter(float *j, int64_t dim, int64_t rank, const uint16_t *h, const uint16_t *x, int64_t columns,
                        int64_t left, int64_t n) {
    enum { PARTS = GROUP / LANES };
    __m512i pairs[BLOCK / 2][PARTS]; /* of rows */
    __mmask16 on[PARTS];
    for (int v = 0; v < PARTS; v++) on[v] = left > v * LANES ? lanes(left - v * LANES) : 0;
    for (int64_t i = 0; i < BLOCK; i += 2)
        for (int v = 0; v < PARTS; v++) {
            const uint16_t *from = x + i * columns + v * LANES;
            __m512i one = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(i < n ? on[v] : 0, from));
            __m512i other = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(i + 1 < n ? on[v] : 0, from + columns));
            pairs[i / 2][v] = _mm512_or_si512(one, _mm512_slli_epi32(other, 16));
        }
    for (int64_t k = 0; k < rank; k += SOME) {
        __m512 sum[SOME][PARTS];
        float *to[SOME]; /* beyond the last row it is the last row again, and not stored */
        for (int i = 0; i < SOME; i++) {
            to[i] = j + (k + i < rank ? k + i : rank - 1) * dim;
            for (int v = 0; v < PARTS; v++) sum[i][v] = _mm512_maskz_loadu_ps(on[v], to[i] + v * LANES);
        }
        for (int p = 0; p < BLOCK / 2; p++)
            for (int i = 0; i < SOME; i++) {
                const __m512bh both = twice(h + (k + i) * BLOCK + 2 * p);
                for (int v = 0; v < PARTS; v++) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], (__m512bh)pairs[p][v], both);
            }
        for (int i = 0; i < SOME && k + i < rank; i++)
            for (int v = 0; v < PARTS; v++) _mm512_mask_storeu_ps(to[i] + v * LANES, on[v], sum[i][v]);
    }
}

/* Where the parts of the memory of ddnn_precondition lie, in bytes from its start; `size`: of all. */
struct plan {
    int64_t width, low_width; /* of H, rounded up, and of its factors in H W */
    int64_t pairs, plain_pairs, row_pairs, groups; /* of columns of W; of its rows, and with those of rests; of columns */
    int64_t columns_w, rows_w, last_w, h, low_h, turned_h, two, size;
};

static struct plan make_plan(int64_t columns, int64_t one, int64_t rank) {
    struct plan p;
    const int64_t dim = columns + one;
    p.width = (rank + LANES - 1) / LANES * LANES;
    p.pairs = (dim + 1) / 2;
    p.plain_pairs = (rank + 1) / 2;
    p.row_pairs = p.plain_pairs + (rank < LEADING ? rank : LEADING);
    p.low_width = 2 * ((p.row_pairs + LANES - 1) / LANES * LANES);
    p.groups = (dim + GROUP - 1) / GROUP;
    p.columns_w = 0;
    p.rows_w = p.columns_w + p.pairs * p.width * 4;
    p.last_w = p.rows_w + p.groups * GROUP * p.row_pairs * 4;
    p.h = p.last_w + p.width * 4;
    p.low_h = p.h + BLOCK * p.width * 4;
    p.turned_h = p.low_h + BLOCK * p.low_width * 2;
    p.two = p.turned_h + BLOCK * p.width * 2;
    p.size = p.two + 2 * p.groups * GROUP * 2;
    return p;
}

int64_t ddnn_precondition_memory(int64_t columns, int64_t one, int64_t rank) {
    return make_plan(columns, one, rank).size;
}

/* Pairs of what rounding has cut from the values, rounded, and the rounded values. */
BF16 INLINE __m512i with_rest(__m512 values, __m256i rounded) {
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
    const __m256i rest = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(values, _mm512_castsi512_ps(high)));
    return _mm512_or_si512(_mm512_cvtepu16_epi32(rest), high);
}

/* W (rank, dim) as both products want it, and its last column, which stays as it is. */
BF16 static void pack(const float *w, int64_t rank, int64_t dim, struct plan p, char *memory) {
    uint32_t *by_columns = (uint32_t *)(memory + p.columns_w), *by_rows = (uint32_t *)(memory + p.rows_w);
    float *last = (float *)(memory + p.last_w);
    const int64_t padded = p.groups * GROUP;
    uint16_t *two = (uint16_t *)(memory + p.two);
    __builtin_memset(by_columns, 0, (size_t)(p.pairs * p.width * 4));
    for (int64_t k = 0; k < p.width; k++) last[k] = 0.0f;
    for (int64_t k = 0; k < rank; k += 2) {
        const int both = k + 1 < rank;
        for (int64_t j = 0; j < padded; j += LANES) {
            __mmask16 on = j < dim ? lanes(dim - j) : 0;
            __m512 one = _mm512_maskz_loadu_ps(on, w + k * dim + j);
            __m512 other = both ? _mm512_maskz_loadu_ps(on, w + (k + 1) * dim + j) : _mm512_setzero_ps();
            __m256i low = (__m256i)_mm512_cvtneps_pbh(one), high = (__m256i)_mm512_cvtneps_pbh(other);
            _mm256_storeu_si256((__m256i *)(two + j), low);
            _mm256_storeu_si256((__m256i *)(two + padded + j), high);
            __m512i pair = _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
            uint32_t *group = by_rows + j / GROUP * p.row_pairs * GROUP + j % GROUP;
            _mm512_storeu_si512(group + k / 2 * GROUP, pair);
            for (int64_t m = k; m < k + 2 && m < p.row_pairs - p.plain_pairs; m++)
                _mm512_storeu_si512(group + (p.plain_pairs + m) * GROUP, with_rest(m > k ? other : one, m > k ? high : low));
        }
        for (int64_t i = 0; i < p.pairs; i++) {
            __builtin_memcpy(by_columns + i * p.width + k, two + 2 * i, 4);
            __builtin_memcpy(by_columns + i * p.width + k + 1, two + padded + 2 * i, 4);
        }
        last[k] = w[k * dim + dim - 1];
        if (both) last[k + 1] = w[(k + 1) * dim + dim - 1];
    }
}

/* Of a block of n rows: whole (rows, rank), from row i on, <- h (n, width), and back, the rest of h 0. */
FLOAT32 static void keep_projection(float *whole, int64_t rank, const float *h, int64_t width, int64_t i, int64_t n) {
    for (int64_t k = 0; k < n; k++) __builtin_memcpy(whole + (i + k) * rank, h + k * width, (size_t)rank * 4);
}

FLOAT32 static void load_projection(const float *whole, int64_t rank, float *h, int64_t width, int64_t i, int64_t n) {
    __builtin_memset(h, 0, (size_t)(n * width * 4));
    for (int64_t k = 0; k < n; k++) __builtin_memcpy(h + k * width, whole + (i + k) * rank, (size_t)rank * 4);
}

/* X <- X - H W, H = X W^T, W rounded, H rounded, sums in float32; X is x (rows, columns), with a column of ones where
 * dim is columns + 1, of which `last` (rows) gets what becomes of it; w (rank, dim). before, after (rows) <- the
 * Euclidean norms of the rows of X; j (rank, dim) <- the rounded H^T X where it is not null. Where `after` is null H is
 * only computed, into whole_h (rows, rank), and where `before` is null it is only removed, from there; else whole_h is
 * null. memory: as many bytes as ddnn_precondition_memory says. */
BF16 void ddnn_precondition(uint16_t *x, int64_t rows, int64_t columns, const float *w, int64_t rank, int64_t dim,
                            float *whole_h, float *before, float *after, float *last, float *j, char *memory) {
    const int one = dim > columns;
    const struct plan p = make_plan(columns, one, rank);
    pack(w, rank, dim, p, memory);
    const uint32_t *by_columns = (const uint32_t *)(memory + p.columns_w);
    float *h = (float *)(memory + p.h);
    uint16_t *low = (uint16_t *)(memory + p.low_h), *turned = (uint16_t *)(memory + p.turned_h);
    const int64_t whole = columns / 2;
    if (j) __builtin_memset(j, 0, (size_t)(rank * dim * 4));
    for (int64_t i = 0; i < rows; i += BLOCK, x += BLOCK * columns) {
        const int64_t n = rows - i < BLOCK ? rows - i : BLOCK;
        uint16_t rest[BLOCK][2]; /* the columns beyond the last whole pair */
        float squares[BLOCK][LANES];
        for (int64_t k = 0; k < n; k++) {
            __m512 square = _mm512_setzero_ps();
            for (int64_t c = 0; c < columns; c += LANES) {
                __m512 v = widen(lanes(columns - c), x + k * columns + c);
                square = _mm512_fmadd_ps(v, v, square);
            }
            if (before) before[i + k] = sqrtf(_mm512_reduce_add_ps(square) + (float)one);
            rest[k][0] = rest[k][1] = 0;
            if (columns % 2) rest[k][0] = x[k * columns + columns - 1];
            if (one) rest[k][columns % 2] = 0x3f80; /* 1 */
            _mm512_storeu_ps(squares[k], _mm512_setzero_ps());
        }
        if (before) {
            for (int64_t k = 0; k < n * p.width; k += LANES) _mm512_storeu_ps(h + k, _mm512_setzero_ps());
            for (int64_t c = 0; c < whole; c += CHUNK)
                project(h, p.width, x + 2 * c, columns, by_columns + c * p.width, whole - c < CHUNK ? whole - c : CHUNK, n);
            if (p.pairs > whole) project(h, p.width, rest[0], 2, by_columns + whole * p.width, 1, n);
            if (!after) {
                keep_projection(whole_h, rank, h, p.width, i, n);
                continue;
            }
        } else
            load_projection(whole_h, rank, h, p.width, i, n);
        for (int64_t k = 0; k < n; k++) {
            uint16_t *to = low + k * p.low_width;
            for (int64_t m = 0; m < p.low_width; m += LANES) {
                __m512 v = m < p.width ? _mm512_loadu_ps(h + k * p.width + m) : _mm512_setzero_ps();
                narrow(to + m, 0xffff, _mm512_sub_ps(_mm512_setzero_ps(), v));
            }
            for (int64_t m = 0; m < p.row_pairs - p.plain_pairs; m++) {
                const __m512 rounded = widen(1, to + m), v = _mm512_set1_ps(-h[k * p.width + m]);
                to[2 * (p.plain_pairs + m)] = to[m];
                narrow(to + 2 * (p.plain_pairs + m) + 1, 1, _mm512_sub_ps(v, rounded));
            }
        }
        if (j) {
            for (int64_t k = 0; k < p.width; k++)
                for (int64_t m = 0; m < BLOCK; m++) turned[k * BLOCK + m] = m < n ? low[m * p.low_width + k] ^ 0x8000 : 0;
            for (int64_t c = 0; c < columns; c += GROUP)
                add_scatter(j + c, dim, rank, turned, x + c, columns, columns - c, n);
            for (int64_t k = 0; one && k < rank; k++)
                j[k * dim + columns] += _mm512_reduce_add_ps(widen(0xffff, turned + k * BLOCK));
        }
        for (int64_t c = 0; c < columns; c += GROUP) {
            const uint32_t *group = (const uint32_t *)(memory + p.rows_w) + c * p.row_pairs;
            int64_t m = 0;
            for (; m + SOME <= n; m += SOME)
                add_projection(x + m * columns + c, columns, columns - c, low + m * p.low_width, p.low_width, group,
                               p.row_pairs, squares[m], SOME);
            for (; m < n; m++)
                add_projection(x + m * columns + c, columns, columns - c, low + m * p.low_width, p.low_width, group,
                               p.row_pairs, squares[m], 1);
        }
        for (int64_t k = 0; k < n; k++) {
            float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(squares[k]));
            if (one) {
                __m512 v = _mm512_setzero_ps();
                for (int64_t m = 0; m < p.width; m += LANES)
                    v = _mm512_fmadd_ps(_mm512_loadu_ps(h + k * p.width + m),
                                        _mm512_loadu_ps((const float *)(memory + p.last_w) + m), v);
                last[i + k] = 1.0f - _mm512_reduce_add_ps(v);
                sum += last[i + k] * last[i + k];
            }
            after[i + k] = sqrtf(sum);
        }
    }
}

/* The same in float32, of which nothing is rounded: h (rows, width) += x (rows, n columns, their starts `columns` apart)
 * w (n, width); of h and w so many vectors. */
FLOAT32 INLINE void add_products_float32(float *h, int64_t width, const float *x, int64_t columns, const float *w, int64_t n,
                                 const int rows, const int vectors) {
    __m512 sum[MANY][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) sum[i][v] = _mm512_loadu_ps(h + i * width + v * LANES);
    for (int64_t c = 0; c < n; c++, w += width, x++) {
        __m512 factor[VECTORS];
        for (int v = 0; v < vectors; v++) factor[v] = _mm512_loadu_ps(w + v * LANES);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vectors; v++)
                sum[i][v] = _mm512_fmadd_ps(_mm512_set1_ps(x[i * columns]), factor[v], sum[i][v]);
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(h + i * width + v * LANES, sum[i][v]);
}

PROJECT(FLOAT32, project_float32, add_products_float32, float, float)

/* x (rows, left columns, or GROUP) <- x - h w; h (rows, rank, their starts `width` apart), w (rank, GROUP); squares
 * (rows, LANES) += those of x. */
FLOAT32 INLINE void subtract_projection(float *x, int64_t columns, int64_t left, const float *h, int64_t width, const float *w,
                                int64_t rank, float *squares, const int rows) {
    enum { PARTS = GROUP / LANES };
    __m512 sum[SOME][PARTS];
    __mmask16 on[PARTS];
    for (int v = 0; v < PARTS; v++) on[v] = left > v * LANES ? lanes(left - v * LANES) : 0;
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < PARTS; v++) sum[i][v] = _mm512_maskz_loadu_ps(on[v], x + i * columns + v * LANES);
    for (int64_t k = 0; k < rank; k++, w += GROUP) {
        __m512 factor[PARTS];
        for (int v = 0; v < PARTS; v++) factor[v] = _mm512_loadu_ps(w + v * LANES);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < PARTS; v++)
                sum[i][v] = _mm512_fnmadd_ps(_mm512_set1_ps(h[i * width + k]), factor[v], sum[i][v]);
    }
    for (int i = 0; i < rows; i++) {
        __m512 square = _mm512_loadu_ps(squares + i * LANES);
        for (int v = 0; v < PARTS; v++) {
            square = _mm512_mask3_fmadd_ps(sum[i][v], sum[i][v], square, on[v]);
            _mm512_mask_storeu_ps(x + i * columns + v * LANES, on[v], sum[i][v]);
        }
        _mm512_storeu_ps(squares + i * LANES, square);
    }
}

/* j (rank, left columns, or GROUP; its rows `dim` apart) += h^T x of n rows of x; h (n, rank, their starts `width`
 * apart). */
FLOAT32 INLINE void add_scatter_float32(float *j, int64_t dim, int64_t rank, const float *h, int64_t width, const float *x,
                                int64_t columns, int64_t left, int64_t n) {
    enum { PARTS = GROUP / LANES };
    __mmask16 on[PARTS];
    for (int v = 0; v < PARTS; v++) on[v] = left > v * LANES ? lanes(left - v * LANES) : 0;
    for (int64_t k = 0; k < rank; k += SOME) {
        __m512 sum[SOME][PARTS];
        float *to[SOME]; /* beyond the last row it is the last row again, and not stored; h is 0 there, up to its width */
        for (int i = 0; i < SOME; i++) {
            to[i] = j + (k + i < rank ? k + i : rank - 1) * dim;
            for (int v = 0; v < PARTS; v++) sum[i][v] = _mm512_maskz_loadu_ps(on[v], to[i] + v * LANES);
        }
        for (int64_t m = 0; m < n; m++) {
            __m512 row[PARTS];
            for (int v = 0; v < PARTS; v++) row[v] = _mm512_maskz_loadu_ps(on[v], x + m * columns + v * LANES);
            for (int i = 0; i < SOME; i++)
                for (int v = 0; v < PARTS; v++)
                    sum[i][v] = _mm512_fmadd_ps(_mm512_set1_ps(h[m * width + k + i]), row[v], sum[i][v]);
        }
        for (int i = 0; i < SOME && k + i < rank; i++)
            for (int v = 0; v < PARTS; v++) _mm512_mask_storeu_ps(to[i] + v * LANES, on[v], sum[i][v]);
    }
}

int64_t ddnn_precondition_float32_memory(int64_t columns, int64_t one, int64_t rank) {
    const int64_t width = (rank + LANES - 1) / LANES * LANES, dim = columns + one;
    return 4 * ((dim + BLOCK) * width + (columns + GROUP - 1) / GROUP * GROUP * rank);
}

/* As ddnn_precondition, of x and j in float32. */
FLOAT32 void ddnn_precondition_float32(float *x, int64_t rows, int64_t columns, const float *w, int64_t rank, int64_t dim,
                                    float *whole_h, float *before, float *after, float *last, float *j, char *memory) {
    const int one = dim > columns;
    const int64_t width = (rank + LANES - 1) / LANES * LANES;
    float *h = (float *)memory, *by_columns = h + BLOCK * width, *by_rows = by_columns + dim * width;
    for (int64_t c = 0; c < dim; c += LANES) /* in squares: fewer writes apart */
        for (int64_t k = 0; k < width; k++)
            for (int64_t m = c; m < c + LANES && m < dim; m++) by_columns[m * width + k] = k < rank ? w[k * dim + m] : 0.0f;
    for (int64_t c = 0; c < columns; c += GROUP)
        for (int64_t k = 0; k < rank; k++)
            for (int v = 0; v < GROUP; v += LANES) {
                const __mmask16 on = columns - c > v ? lanes(columns - c - v) : 0;
                _mm512_storeu_ps(by_rows + c * rank + k * GROUP + v, _mm512_maskz_loadu_ps(on, w + k * dim + c + v));
            }
    const float *ones = by_columns + columns * width; /* their row of the transposed W */
    if (j) __builtin_memset(j, 0, (size_t)(rank * dim * 4));
    for (int64_t i = 0; i < rows; i += BLOCK, x += BLOCK * columns) {
        const int64_t n = rows - i < BLOCK ? rows - i : BLOCK;
        float squares[BLOCK][LANES];
        for (int64_t m = 0; m < n; m++) {
            __m512 square = _mm512_setzero_ps();
            for (int64_t c = 0; c < columns; c += LANES) {
                __m512 v = _mm512_maskz_loadu_ps(lanes(columns - c), x + m * columns + c);
                square = _mm512_fmadd_ps(v, v, square);
            }
            if (before) before[i + m] = sqrtf(_mm512_reduce_add_ps(square) + (float)one);
            _mm512_storeu_ps(squares[m], _mm512_setzero_ps());
            for (int64_t k = 0; k < width; k += LANES)
                _mm512_storeu_ps(h + m * width + k, one ? _mm512_loadu_ps(ones + k) : _mm512_setzero_ps());
        }
        if (before) {
            for (int64_t c = 0; c < columns; c += CHUNK)
                project_float32(h, width, x + c, columns, by_columns + c * width, columns - c < CHUNK ? columns - c : CHUNK, n);
            if (!after) {
                keep_projection(whole_h, rank, h, width, i, n);
                continue;
            }
        } else
            load_projection(whole_h, rank, h, width, i, n);
        for (int64_t c = 0; c < columns; c += GROUP) {
            int64_t m = 0;
            if (j) add_scatter_float32(j + c, dim, rank, h, width, x + c, columns, columns - c, n);
            for (; m + SOME <= n; m += SOME)
                subtract_projection(x + m * columns + c, columns, columns - c, h + m * width, width, by_rows + c * rank, rank,
                                    squares[m], SOME);
            for (; m < n; m++)
                subtract_projection(x + m * columns + c, columns, columns - c, h + m * width, width, by_rows + c * rank, rank,
                                    squares[m], 1);
        }
        for (int64_t m = 0; m < n; m++) {
            float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(squares[m]));
            if (one) {
                __m512 v = _mm512_setzero_ps();
                for (int64_t k = 0; k < width; k += LANES)
                    v = _mm512_fmadd_ps(_mm512_loadu_ps(h + m * width + k), _mm512_loadu_ps(ones + k), v);
                last[i + m] = 1.0f - _mm512_reduce_add_ps(v);
                sum += last[i + m] * last[i + m];
                for (int64_t k = 0; j && k < rank; k++) j[k * dim + columns] += h[m * width + k];
            }
            after[i + m] = sqrtf(sum);
        }
    }
}

/* Softmax and cross-entropy of each row of x (rows, pdfs): its derivative by x into d, the sum over the rows into loss;
 * returns how many rows have their label as the first of the largest, -1 where a label is none of the pdfs. `e` holds
 * pdfs floats. */
BF16 int64_t ddnn_cross_entropy(const uint16_t *x, const int64_t *labels, int64_t rows, int64_t pdfs, uint16_t *d,
                                double *loss, float *e) {
    int64_t right = 0;
    *loss = 0.0;
    for (int64_t i = 0; i < rows; i++, x += pdfs, d += pdfs) {
        const int64_t label = labels[i];
        if (label < 0 || label >= pdfs) return -1;
        __m512 largest = _mm512_set1_ps(-INFINITY);
        for (int64_t j = 0; j < pdfs; j += LANES) {
            __mmask16 on = lanes(pdfs - j);
            __m512 v = widen(on, x + j);
            _mm512_mask_storeu_ps(e + j, on, v);
            largest = _mm512_mask_max_ps(largest, on, largest, v);
        }
        const float max = _mm512_reduce_max_ps(largest);
        const float own = e[label] - max;
        int64_t best = 0; /* a row of NaN has none: then it ends at pdfs */
        while (best < pdfs && e[best] != max) best++;
        right += best == label;

        const __m512 shift = _mm512_set1_ps(max);
        __m512 sums = _mm512_setzero_ps();
        for (int64_t j = 0; j < pdfs; j += LANES) {
            __mmask16 on = lanes(pdfs - j);
            __m512 v = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(on, e + j), shift));
            _mm512_mask_storeu_ps(e + j, on, v);
            sums = _mm512_mask_add_ps(sums, on, sums, v);
        }
        const float sum = _mm512_reduce_add_ps(sums);
        *loss -= (double)(own - logf(sum));
        const __m512 scale = _mm512_set1_ps(1.0f / sum);
        for (int64_t j = 0; j < pdfs; j += LANES) {
            __mmask16 on = lanes(pdfs - j);
            narrow(d + j, on, _mm512_mul_ps(_mm512_maskz_loadu_ps(on, e + j), scale));
        }
        narrow(d + label, 1, _mm512_set1_ps(e[label] / sum - 1.0f));
    }
    return right;
}

/* w <- keep w - rate g;  low <- w, rounded; n values. w is fetched ahead: it comes from beyond the caches. */
BF16 void ddnn_sgd_update(float *w, uint16_t *low, const uint16_t *g, int64_t n, float rate, float keep) {
    const __m512 minus_rate = _mm512_set1_ps(-rate), kept = _mm512_set1_ps(keep);
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 on = lanes(n - i);
        _mm_prefetch((const char *)(w + i + AHEAD), _MM_HINT_T0);
        __m512 v = _mm512_mul_ps(kept, _mm512_maskz_loadu_ps(on, w + i));
        v = _mm512_fmadd_ps(minus_rate, widen(on, g + i), v);
        _mm512_mask_storeu_ps(w + i, on, v);
        narrow(low + i, on, v);
    }
}

#else

int ddnn_kernels_supported(void) { return 0; }

#endif
