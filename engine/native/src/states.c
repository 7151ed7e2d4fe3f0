/* Token mixers that keep a state of fixed size for each row: a short causal convolution, the gated delta rule, Mamba-2
 * (SSD) and their gated norm. Each sequence of a step goes on from its row's state and leaves the new one there; without
 * tokens, it leaves the state as it is. A state is computed in parts that fit into the first cache, each of them over all
 * tokens of its sequence. */
#include <math.h>
#include "kernels.h"
#include "simd.h"

enum { TILE = 4, TAPS_MAX = 8, SIZE_MAX_ = 512 };

INLINE vf silu(vf x) { return x / (1.0f + vf_exp(-x)); }
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); } /* as in torch */

INLINE void conv_channels(const int bf16, const cv_conv *c, int64_t seq, int64_t channel) {
    const cv_state_rows *r = &c->rows;
    const int64_t n = c->channels, taps = c->taps, end = r->query_start[seq + 1];
    const int64_t state = r->rows[seq] * taps * n + channel;
    if (r->query_start[seq] == end) return;
    vf held[TAPS_MAX], weight[TAPS_MAX];
    for (int64_t k = 0; k < taps; k++) {
        held[k] = r->fresh[seq] ? (vf){0} : vf_get(bf16, c->state, state + k * n);
        weight[k] = vf_load(c->weight + k * n + channel);
    }
    for (int64_t t = r->query_start[seq]; t < end; t++) {
        vf x = vf_get(bf16, c->x, t * c->x_stride + channel);
        if (c->before) x *= vf_get(bf16, c->before, t * c->x_stride + channel);
        vf y = c->bias ? vf_load(c->bias + channel) : (vf){0};
        for (int64_t k = 1; k < taps; k++) held[k - 1] = held[k];
        held[taps - 1] = x;
        for (int64_t k = 0; k < taps; k++) y += held[k] * weight[k];
        if (c->silu) y = silu(y);
        if (c->after) y *= vf_get(bf16, c->after, t * c->x_stride + channel);
        vf_put(bf16, c->y, t * n + channel, y);
    }
    for (int64_t k = 0; k < taps; k++) vf_put(bf16, c->state, state + k * n, held[k]);
}

void CV_NAME(cv_conv)(const cv_conv *c) {
    const int64_t parts = c->channels / VL, work = c->rows.num_seqs * parts;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < work; i++) {
        if (c->dtype == CV_BFLOAT16) conv_channels(1, c, i / parts, i % parts * VL);
        else conv_channels(0, c, i / parts, i % parts * VL);
    }
}

/* Reads n numbers as floats, and returns the factor that makes their norm 1. */
INLINE float read_unit(const int bf16, const void *from, int64_t at_, int64_t n, float *to) {
    vf squares = {0};
    for (int64_t i = 0; i < n; i += VL) {
        const vf v = vf_get(bf16, from, at_ + i);
        vf_store(to + i, v);
        squares += v * v;
    }
    return 1.0f / sqrtf(vf_sum(squares) + 1e-6f);
}

/* One token of `width` vectors of columns of a head's state. */
INLINE void delta_token(const int bf16, const int width, const cv_delta *c, float *state, int64_t t, int64_t head,
                        int64_t column) {
    const int64_t dk = c->key_dim, dv = c->value_dim, of = head / (c->value_heads / c->key_heads);
    float q[SIZE_MAX_], k[SIZE_MAX_];
    const int64_t from = t * c->qkv_stride, keys = c->key_heads * dk;
    const float q_unit = read_unit(bf16, c->qkv, from + of * dk, dk, q) / sqrtf((float)dk);
    const float k_unit = read_unit(bf16, c->qkv, from + keys + of * dk, dk, k);
    const float step = softplus(f_get(bf16, c->a, t * c->a_stride + head) + c->dt_bias[head]);
    const float decay = expf(c->decay[head] * step);
    const float beta = c->beta_scale / (1.0f + expf(-f_get(bf16, c->b, t * c->b_stride + head)));
    vf of_k[TILE] = {{0}}, of_q[TILE] = {{0}}, both = {0};
    for (int64_t i = 0; i < dk; i += VL) both += vf_load(q + i) * vf_load(k + i);
    for (int64_t i = 0; i < dk; i++)
        for (int j = 0; j < width; j++) {
            const vf s = vf_load(state + i * dv + j * VL);
            of_k[j] += s * k[i];
            of_q[j] += s * q[i];
        }
    const float together = vf_sum(both) * q_unit * k_unit;
    vf change[TILE];
    for (int j = 0; j < width; j++) {
        const vf v = vf_get(bf16, c->qkv, from + 2 * keys + head * dv + column + j * VL);
        change[j] = (v - of_k[j] * (decay * k_unit)) * beta;
        vf_put(bf16, c->y, (t * c->value_heads + head) * dv + column + j * VL,
               of_q[j] * (decay * q_unit) + change[j] * together);
        change[j] *= k_unit;
    }
    for (int64_t i = 0; i < dk; i++)
        for (int j = 0; j < width; j++) {
            float *s = state + i * dv + j * VL;
            vf_store(s, vf_load(s) * decay + change[j] * k[i]);
        }
}

INLINE void delta_columns(const int bf16, const int width, const cv_delta *c, int64_t seq, int64_t head, int64_t column) {
    const cv_state_rows *r = &c->rows;
    if (r->query_start[seq] == r->query_start[seq + 1]) return;
    float *state = c->state + ((r->rows[seq] * c->value_heads + head) * c->key_dim) * c->value_dim + column;
    if (r->fresh[seq])
        for (int64_t i = 0; i < c->key_dim; i++)
            for (int j = 0; j < width; j++) vf_store(state + i * c->value_dim + j * VL, (vf){0});
    for (int64_t t = r->query_start[seq]; t < r->query_start[seq + 1]; t++)
        delta_token(bf16, width, c, state, t, head, column);
}

INLINE void delta_head(const int bf16, const cv_delta *c, int64_t seq, int64_t head) {
    int64_t column = 0;
    for (; column + TILE * VL <= c->value_dim; column += TILE * VL) delta_columns(bf16, TILE, c, seq, head, column);
    for (; column < c->value_dim; column += VL) delta_columns(bf16, 1, c, seq, head, column);
}

void CV_NAME(cv_delta)(const cv_delta *c) {
    const int64_t work = c->rows.num_seqs * c->value_heads;
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t i = 0; i < work; i++) {
        if (c->dtype == CV_BFLOAT16) delta_head(1, c, i / c->value_heads, i % c->value_heads);
        else delta_head(0, c, i / c->value_heads, i % c->value_heads);
    }
}

INLINE void ssd_token(const int bf16, const cv_ssd *c, float *state, int64_t t, int64_t head, int is_bounded) {
    const int64_t n = c->size, of = head / (c->heads / c->groups), x = t * c->xbc_stride;
    const int64_t b_at = x + c->heads * c->head_dim + of * n, c_at = b_at + c->groups * n;
    float b[SIZE_MAX_], out[SIZE_MAX_];
    for (int64_t i = 0; i < n; i += VL) {
        vf_store(b + i, vf_get(bf16, c->xbc, b_at + i));
        vf_store(out + i, vf_get(bf16, c->xbc, c_at + i));
    }
    float step = softplus(f_get(bf16, c->dt, t * c->dt_stride + head) + c->dt_bias[head]);
    if (is_bounded) step = fminf(fmaxf(step, c->step_min), c->step_max);
    const float decay = expf(step * c->decay[head]);
    for (int64_t p = 0; p < c->head_dim; p++) {
        const float value = f_get(bf16, c->xbc, x + head * c->head_dim + p), added = value * step;
        vf sum = {0};
        for (int64_t i = 0; i < n; i += VL) {
            const vf s = vf_load(state + p * n + i) * decay + vf_load(b + i) * added;
            vf_store(state + p * n + i, s);
            sum += s * vf_load(out + i);
        }
        f_put(bf16, c->y, (t * c->heads + head) * c->head_dim + p, vf_sum(sum) + c->direct[head] * value);
    }
}

INLINE void ssd_head(const int bf16, const cv_ssd *c, int64_t seq, int64_t head) {
    const cv_state_rows *r = &c->rows;
    const int64_t begin = r->query_start[seq], end = r->query_start[seq + 1], numbers = c->head_dim * c->size;
    float *state = c->state + (r->rows[seq] * c->heads + head) * numbers;
    if (begin == end) return;
    if (r->fresh[seq]) memset(state, 0, (size_t)numbers * sizeof *state);
    for (int64_t t = begin; t < end; t++) ssd_token(bf16, c, state, t, head, r->fresh[seq] || end - begin > 1);
}

void CV_NAME(cv_ssd)(const cv_ssd *c) {
    const int64_t work = c->rows.num_seqs * c->heads;
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t i = 0; i < work; i++) {
        if (c->dtype == CV_BFLOAT16) ssd_head(1, c, i / c->heads, i % c->heads);
        else ssd_head(0, c, i / c->heads, i % c->heads);
    }
}

INLINE void gated_norm_row(const int bf16, const cv_gated_norm *c, int64_t x, int64_t gate, int64_t weight) {
    vf squares = {0};
    for (int64_t i = 0; i < c->size; i += VL) {
        vf v = vf_get(bf16, c->x, x + i);
        if (!c->norm_first) v *= silu(vf_get(bf16, c->gate, gate + i));
        squares += v * v;
    }
    const float inverse = 1.0f / sqrtf(vf_sum(squares) / (float)c->size + c->eps);
    for (int64_t i = 0; i < c->size; i += VL) {
        const vf v = vf_get(bf16, c->x, x + i) * silu(vf_get(bf16, c->gate, gate + i));
        vf_put(bf16, c->y, x + i, v * inverse * vf_load(c->weight + weight + i));
    }
}

void CV_NAME(cv_gated_norm)(const cv_gated_norm *c) {
    const int64_t work = c->tokens * c->groups;
#pragma omp parallel for schedule(static) if (work * c->size > 16384)
    for (int64_t i = 0; i < work; i++) {
        const int64_t token = i / c->groups, group = i % c->groups;
        const int64_t gate = token * c->gate_stride + group * c->size, weight = group * c->weight_stride;
        if (c->dtype == CV_BFLOAT16) gated_norm_row(1, c, i * c->size, gate, weight);
        else gated_norm_row(0, c, i * c->size, gate, weight);
    }
}
