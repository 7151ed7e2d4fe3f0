/* The best token of each row of logits, or one drawn from all of them: the row is read once for the best,
 * once more for the weights, and a slice of it for the token. As sampling/draw.py does with torch's operations. */
#include "kernels.h"
#include "simd.h"

enum { SLICES = 64 };

typedef struct { const void *row; int64_t begin, end; } slice;

INLINE slice take_slice(const void *row, int64_t size, int64_t length, int64_t i) {
    const int64_t end = (i + 1) * length;
    return (slice){row, i * length, end < size ? end : size};
}

/* Behind the end there is nothing, which is minus infinity. */
INLINE vf read_logits(const int bf16, slice s, int64_t i) {
    if (s.end - i >= VL) return vf_get(bf16, s.row, i);
    vf v = vf_set(-__builtin_inff());
    for (int64_t l = 0; l < s.end - i; l++) v[l] = f_get(bf16, s.row, i + l);
    return v;
}

/* Infinity if one of them is NaN. */
INLINE float find_largest(const int bf16, slice s) {
    vf largest = vf_set(-__builtin_inff());
    vi nan = {0};
    for (int64_t i = s.begin; i < s.end; i += VL) {
        const vf v = read_logits(bf16, s, i);
        largest = vf_max(v, largest);
        nan |= v != v;
    }
    return vf_highest(vf_select(nan, vf_set(__builtin_inff()), largest));
}

INLINE int64_t find_first(const int bf16, slice s, float value) {
    for (int64_t i = s.begin; i < s.end; i++)
        if (f_get(bf16, s.row, i) == value) return i;
    return s.begin;
}

/* How a row is drawn: the inverse of its temperature, and the logarithm of the least weight that counts (min_p). */
typedef struct { float best, inverse, floor; } scale;

/* The best has 1. */
INLINE vf weigh(vf logits, scale by) {
    const vf x = (logits - by.best) * by.inverse;
    return vf_select(x < vf_set(by.floor), (vf){0}, vf_exp(x));
}

INLINE float sum_weights(const int bf16, slice s, scale by) {
    vf sum = {0};
    for (int64_t i = s.begin; i < s.end; i += VL) sum += weigh(read_logits(bf16, s, i), by);
    return vf_sum(sum);
}

/* Where the cumulated weights pass the target; where rounding leads past the end, the last token with a weight. */
INLINE int64_t find_passed(const int bf16, slice s, scale by, double target) {
    int64_t last = s.begin;
    for (int64_t i = s.begin; i < s.end; i += VL) {
        const vf weights = weigh(read_logits(bf16, s, i), by);
        for (int l = 0; l < VL; l++) {
            if (weights[l] <= 0) continue;
            last = i + l;
            if (target < (double)weights[l]) return last;
            target -= (double)weights[l];
        }
    }
    return last;
}

INLINE int64_t draw(const int bf16, const cv_sample *c, int64_t r, const void *row, int64_t length, int64_t slices) {
    const scale by = {c->best[r], 1.0f / c->draws[2 * r], c->draws[2 * r + 1]};
    float sums[SLICES];
    double total = 0;
    for (int64_t i = 0; i < slices; i++) {
        sums[i] = sum_weights(bf16, take_slice(row, c->vocab_size, length, i), by);
        total += (double)sums[i];
    }
    double target = (double)c->uniforms[r] * total * (double)c->below_one;
    int64_t i = 0;
    for (; i < slices - 1 && target >= (double)sums[i]; i++) target -= (double)sums[i];
    return find_passed(bf16, take_slice(row, c->vocab_size, length, i), by, target);
}

INLINE void sample_row(const int bf16, const cv_sample *c, int64_t r) {
    const void *row = at(bf16, c->logits, r * c->row_stride);
    const int64_t length = ((c->vocab_size + SLICES - 1) / SLICES + 15) & ~(int64_t)15;
    const int64_t slices = (c->vocab_size + length - 1) / length;
    float best = -__builtin_inff();
    slice of_best = take_slice(row, c->vocab_size, length, 0);
    for (int64_t i = 0; i < slices; i++) {
        const slice s = take_slice(row, c->vocab_size, length, i);
        const float largest = find_largest(bf16, s);
        if (largest > best) best = largest, of_best = s;
    }
    c->best[r] = best;
    const int draws = c->draws[2 * r] >= c->greedy_below && best - best == 0; /* the last: it is finite */
    c->tokens[r] = draws ? draw(bf16, c, r, row, length, slices) : find_first(bf16, of_best, best);
}

void CV_NAME(cv_sample)(const cv_sample *c) {
#pragma omp parallel for schedule(dynamic, 1) if (c->rows > 1 && c->rows * c->vocab_size > 16384)
    for (int64_t r = 0; r < c->rows; r++) {
        if (c->dtype == CV_BFLOAT16) sample_row(1, c, r);
        else sample_row(0, c, r);
    }
}
