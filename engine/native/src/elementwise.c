/* RMSNorm, rotary position embedding, both of heads, SiLU * up, and the KV cache write.
 * All compute in float and round once, at the store. */
#include "kernels.h"
#include "simd.h"

INLINE float inverse_rms(const int bf16, const void *x, int64_t n, float eps) {
    const int64_t whole = n - n % VL;
    vf squares = {0};
    for (int64_t i = 0; i < whole; i += VL) { vf v = vf_get(bf16, x, i); squares += v * v; }
    float sum = vf_sum(squares);
    for (int64_t i = whole; i < n; i++) { float v = f_get(bf16, x, i); sum += v * v; }
    return 1.0f / __builtin_sqrtf(sum / (float)n + eps);
}

INLINE void rms_norm_row(const int bf16, const cv_rms_norm *c, const void *x, void *y) {
    const int64_t n = c->size, whole = n - n % VL;
    const float inverse = inverse_rms(bf16, x, n, c->eps);
    for (int64_t i = 0; i < whole; i += VL)
        vf_put(bf16, y, i, vf_get(bf16, x, i) * inverse * (vf_get(bf16, c->weight, i) + c->offset));
    for (int64_t i = whole; i < n; i++)
        f_put(bf16, y, i, f_get(bf16, x, i) * inverse * (f_get(bf16, c->weight, i) + c->offset));
}

void CV_NAME(cv_rms_norm)(const cv_rms_norm *c) {
    const int64_t rows = c->outer * c->inner;
#pragma omp parallel for schedule(static) if (rows * c->size > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t from = r / c->inner * c->outer_stride + r % c->inner * c->inner_stride;
        if (c->dtype == CV_BFLOAT16) rms_norm_row(1, c, at(1, c->x, from), at_mut(1, c->y, r * c->size));
        else rms_norm_row(0, c, at(0, c->x, from), at_mut(0, c->y, r * c->size));
    }
}

INLINE void rope_head(const int bf16, const cv_rope *c, const void *x, const void *cos, const void *sin, void *y) {
    const int64_t half = c->rotary / 2, whole = half - half % VL;
    for (int64_t i = 0; i < whole; i += VL) {
        vf a = vf_get(bf16, x, i), b = vf_get(bf16, x, i + half);
        vf_put(bf16, y, i, a * vf_get(bf16, cos, i) - b * vf_get(bf16, sin, i));
        vf_put(bf16, y, i + half, b * vf_get(bf16, cos, i + half) + a * vf_get(bf16, sin, i + half));
    }
    for (int64_t i = whole; i < half; i++) {
        float a = f_get(bf16, x, i), b = f_get(bf16, x, i + half);
        f_put(bf16, y, i, a * f_get(bf16, cos, i) - b * f_get(bf16, sin, i));
        f_put(bf16, y, i + half, b * f_get(bf16, cos, i + half) + a * f_get(bf16, sin, i + half));
    }
    if (y != x)
        memcpy(at_mut(bf16, y, c->rotary), at(bf16, x, c->rotary), (size_t)(c->head_dim - c->rotary) * (bf16 ? 2 : 4));
}

INLINE void rope_token(const int bf16, const cv_rope *c, int64_t t) {
    const void *cos = at(bf16, c->cos, t * c->rotary), *sin = at(bf16, c->sin, t * c->rotary);
    for (int64_t h = 0; h < c->heads; h++)
        rope_head(bf16, c, at(bf16, c->x, t * c->token_stride + h * c->head_stride), cos, sin,
                  at_mut(bf16, c->y, (t * c->heads + h) * c->head_dim));
}

void CV_NAME(cv_rope)(const cv_rope *c) {
#pragma omp parallel for schedule(static) if (c->tokens * c->heads * c->head_dim > 16384)
    for (int64_t t = 0; t < c->tokens; t++) {
        if (c->dtype == CV_BFLOAT16) rope_token(1, c, t);
        else rope_token(0, c, t);
    }
}

/* One head of queries or keys, in place. With a norm it is first rounded as the norm rounds its result. */
INLINE void prepare_head(const int bf16, const cv_heads *c, void *x, const void *weight, int64_t token) {
    const cv_rms_norm norm = {.weight = weight, .size = c->head_dim, .eps = c->eps, .offset = c->offset};
    const cv_rope rope = {.head_dim = c->head_dim, .rotary = c->rotary};
    if (weight) rms_norm_row(bf16, &norm, x, x);
    rope_head(bf16, &rope, x, at(bf16, c->cos, token * c->rotary), at(bf16, c->sin, token * c->rotary), x);
}

INLINE void prepare_heads(const int bf16, const cv_heads *c, int64_t token) {
    const int64_t all = c->heads + 2 * c->kv_heads;
    for (int64_t h = 0; h < c->heads + c->kv_heads; h++)
        prepare_head(bf16, c, at_mut(bf16, c->qkv, (token * all + h) * c->head_dim),
                     h < c->heads ? c->q_weight : c->k_weight, token);
}

void CV_NAME(cv_heads)(const cv_heads *c) {
#pragma omp parallel for schedule(static) if (c->tokens * c->heads * c->head_dim > 16384)
    for (int64_t t = 0; t < c->tokens; t++) {
        if (c->dtype == CV_BFLOAT16) prepare_heads(1, c, t);
        else prepare_heads(0, c, t);
    }
}

INLINE vf silu(vf x) { return x / (1.0f + vf_exp(-x)); }

INLINE void silu_mul_row(const int bf16, const void *gate, const void *up, void *y, int64_t n) {
    const int64_t whole = n - n % VL;
    for (int64_t i = 0; i < whole; i += VL) vf_put(bf16, y, i, silu(vf_get(bf16, gate, i)) * vf_get(bf16, up, i));
    for (int64_t i = whole; i < n; i++)
        f_put(bf16, y, i, silu(vf_set(f_get(bf16, gate, i)))[0] * f_get(bf16, up, i));
}

void CV_NAME(cv_silu_mul)(const cv_silu_mul *c) {
#pragma omp parallel for schedule(static) if (c->rows * c->size > 16384)
    for (int64_t r = 0; r < c->rows; r++) {
        if (c->dtype == CV_BFLOAT16)
            silu_mul_row(1, at(1, c->x, r * c->x_stride), at(1, c->x, r * c->x_stride + c->size),
                         at_mut(1, c->y, r * c->size), c->size);
        else
            silu_mul_row(0, at(0, c->x, r * c->x_stride), at(0, c->x, r * c->x_stride + c->size),
                         at_mut(0, c->y, r * c->size), c->size);
    }
}

/* One token of one head. Keys are scattered into columns (16 tokens side by side), and values into a row, in bfloat16
 * side by side with those of the neighbouring token. Padding is zero where it is multiplied like the rest. */
INLINE void kv_write_one(const int bf16, const cv_kv_write *c, int64_t token, int64_t head) {
    const int64_t slot = c->slots[token], block = slot / CV_BLOCK, column = slot % CV_BLOCK;
    const int64_t even = (c->head_dim + 1) & ~(int64_t)1, columns = c->k_cache ? c->value_dim : c->head_dim;
    const int64_t width = (columns + 15) & ~(int64_t)15, page = block * c->num_kv_heads + head;
    const void *k = at(bf16, c->k, token * c->k_token_stride + head * c->k_head_stride);
    const void *row = c->k_cache ? at(bf16, c->v, token * c->v_token_stride + head * c->v_head_stride) : k;
    void *k_page = at_mut(bf16, c->k_cache, page * even * CV_BLOCK);
    for (int64_t d = 0; c->k_cache && d < even; d++) {
        const int real = d < c->head_dim;
        if (bf16) ((uint16_t *)k_page)[(d / 2 * CV_BLOCK + column) * 2 + d % 2] = real ? ((const uint16_t *)k)[d] : 0;
        else ((float *)k_page)[d * CV_BLOCK + column] = real ? ((const float *)k)[d] : 0.0f;
    }
    void *v_page = at_mut(bf16, c->v_cache, page * CV_BLOCK * width);
    for (int64_t d = 0; d < width; d++) {
        const int real = d < columns;
        if (bf16) ((uint16_t *)v_page)[(column / 2 * width + d) * 2 + column % 2] = real ? ((const uint16_t *)row)[d] : 0;
        else ((float *)v_page)[column * width + d] = real ? ((const float *)row)[d] : 0.0f;
    }
}

void CV_NAME(cv_kv_write)(const cv_kv_write *c) {
    const int64_t work = c->tokens * c->num_kv_heads;
#pragma omp parallel for schedule(static) if (work * c->head_dim > 16384)
    for (int64_t i = 0; i < work; i++) {
        const int64_t token = i / c->num_kv_heads, head = i % c->num_kv_heads;
        if (c->slots[token] < 0) continue;
        if (c->dtype == CV_BFLOAT16) kv_write_one(1, c, token, head);
        else kv_write_one(0, c, token, head);
    }
}
