/* The element-wise parts of a training step in bf16, on processors with AVX-512 and its bf16 instructions.
 *
 * Each function does in one pass over memory what ddnn.nn.kernels describes, and what PyTorch does in several. Values
 * are widened to float32, worked on there, and rounded once, to nearest even. NaN gives NaN (and a
 * row with one a loss of NaN), infinity its limit to within 2^-126; subnormal numbers become 0 where they are rounded
 * to bf16.
 *
 * Elsewhere than on x86-64 with GCC or Clang there is only ddnn_kernels_supported, which says no.
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

#define FAST __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define INSIDE FAST static inline __attribute__((always_inline))

enum { LANES = 16, AHEAD = 1024 };

int ddnn_kernels_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

/* The lanes that hold some of the `left` values from here on. */
INSIDE __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1u); }

INSIDE __m512 widen(__mmask16 on, const uint16_t *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(on, from)), 16));
}

INSIDE void narrow(uint16_t *to, __mmask16 on, __m512 values) {
    _mm256_mask_storeu_epi16(to, on, (__m256i)_mm512_cvtneps_pbh(values));
}

/* e^x, to 1e-5 of itself (4e-6 for |x| < 5) where neither it nor its inverse leaves float32; beyond that it stays at
 * the limit. */
INSIDE __m512 exponential(__m512 x) {
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
INSIDE __m512 inverse(__m512 x) {
    __m512 y = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
}

/* out (n, columns) <- (frames at `rows` of the store, spliced + shift) * scale. A spliced frame is `columns` floats of
 * the store from `row * dim` on, of which there are `windows`; shift and scale have `columns` floats, or are null.
 * Returns -1 where a row is not one of them, else 0. */
FAST int64_t ddnn_gather_spliced(const float *store, int64_t windows, int64_t dim, int64_t columns, const int64_t *rows,
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
FAST void ddnn_sigmoid(uint16_t *y, int64_t rows, int64_t columns, const float *bias) {
    const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-1.0f);
    for (int64_t i = 0; i < rows; i++, y += columns)
        for (int64_t j = 0; j < columns; j += LANES) {
            __mmask16 on = lanes(columns - j);
            __m512 v = _mm512_add_ps(widen(on, y + j), _mm512_maskz_loadu_ps(on, bias + j));
            narrow(y + j, on, inverse(_mm512_add_ps(one, exponential(_mm512_mul_ps(minus, v)))));
        }
}

/* d <- d y (1 - y), n values. */
FAST void ddnn_sigmoid_backward(uint16_t *d, const uint16_t *y, int64_t n) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 on = lanes(n - i);
        __m512 v = widen(on, y + i);
        narrow(d + i, on, _mm512_mul_ps(widen(on, d + i), _mm512_mul_ps(_mm512_sub_ps(one, v), v)));
    }
}

/* sums (columns) <- the sum over the rows of d (rows, columns), each times its weight, rounded to bf16. The weights
 * (rows) may be null. */
FAST void ddnn_column_sums(const uint16_t *d, int64_t rows, int64_t columns, const float *weights, uint16_t *sums) {
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
FAST void ddnn_bf16_to_float32_rows(const uint16_t *from, int64_t rows, int64_t columns, float *to, int64_t stride, int one,
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
FAST void ddnn_float32_to_bf16_rows(const float *from, int64_t rows, int64_t columns, int64_t stride, uint16_t *to, float *last,
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

/* Softmax and cross-entropy of each row of x (rows, pdfs): its derivative by x into d, the sum over the rows into loss;
 * returns how many rows have their label as the first of the largest, -1 where a label is none of the pdfs. `e` holds
 * pdfs floats. */
FAST int64_t ddnn_cross_entropy(const uint16_t *x, const int64_t *labels, int64_t rows, int64_t pdfs, uint16_t *d,
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
FAST void ddnn_sgd_update(float *w, uint16_t *low, const uint16_t *g, int64_t n, float rate, float keep) {
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
