/* Decoder layers in one call, or one in two, before and after attention: between their kernels there is no Python.
 * Compiled without any -m flag. Called from one thread at a time. */
#include <time.h>
#include "kernels.h"
#include "simd.h"

enum { PRODUCTS, NORMS, HEADS, ACTIVATION, WRITE, ATTENTION, KINDS };
static double spent[KINDS];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Charges the time since `since` to the kind; returns the time. */
static double charge(int kind, double since) {
    const double end = now();
    spent[kind] += end - since;
    return end;
}

void cv_run_before_attention(const cv_before_attention *c) {
    const cv_kernels *k = cv_kernels_in_use();
    double t = now();
    k->rms_norm(&c->norm), t = charge(NORMS, t);
    k->linear(&c->qkv), t = charge(PRODUCTS, t);
    k->heads(&c->heads), charge(HEADS, t);
}

void cv_run_after_attention(const cv_after_attention *c) {
    const cv_kernels *k = cv_kernels_in_use();
    double t = now();
    k->linear(&c->out), t = charge(PRODUCTS, t);
    k->rms_norm(&c->norm), t = charge(NORMS, t);
    k->linear(&c->gate_up), t = charge(PRODUCTS, t);
    k->silu_mul(&c->activation), t = charge(ACTIVATION, t);
    k->linear(&c->down), charge(PRODUCTS, t);
}

/* Hands the projections to the cache and to attention, in whose layout they lie. */
static void wire_attention(cv_layer *c, char *qkv, void *attended, int64_t value_bytes) {
    const cv_step *s = c->step;
    cv_kv_write *w = &c->write;
    cv_attention *a = &c->attention;
    const int64_t dim = a->head_dim, row = (a->num_heads + 2 * a->num_kv_heads) * dim;
    a->q = qkv, a->out = attended, a->q_head_stride = dim, a->q_token_stride = row;
    a->query_start = s->query_start, a->seq_lens = s->seq_lens, a->block_tables = s->block_tables;
    a->num_seqs = s->num_seqs, a->table_stride = s->table_stride;
    w->k = qkv + a->num_heads * dim * value_bytes, w->v = (const char *)w->k + a->num_kv_heads * dim * value_bytes;
    w->k_head_stride = w->v_head_stride = dim, w->k_token_stride = w->v_token_stride = row;
    w->slots = s->slots, w->tokens = s->tokens;
}

static void run_layer(cv_layer *c) {
    static __thread void *memory;
    static __thread size_t held;
    cv_before_attention *before = &c->before;
    cv_after_attention *after = &c->after;
    const int64_t tokens = c->step->tokens, value_bytes = before->norm.dtype == CV_BFLOAT16 ? 2 : 4;
    const int64_t hidden = before->norm.size, projected = before->qkv.n, heads = after->out.k;
    const int64_t gated = after->gate_up.n, active = after->activation.size, unit = tokens * value_bytes;
    char *normed = scratch_grow(&memory, &held, (size_t)(unit * (hidden + projected + heads + gated + active)));
    char *qkv = normed + unit * hidden, *attended = qkv + unit * projected;
    char *gate_up = attended + unit * heads, *activated = gate_up + unit * gated;

    before->norm.x = c->x, before->norm.y = normed, before->qkv.x = normed;
    before->qkv.y = before->heads.qkv = qkv;
    before->norm.outer = before->qkv.rows = before->heads.tokens = tokens;
    cv_run_before_attention(before);

    wire_attention(c, qkv, attended, value_bytes);
    const int64_t real = c->step->query_start[c->step->num_seqs];
    memset(attended + real * heads * value_bytes, 0, (size_t)((tokens - real) * heads * value_bytes)); /* padding */
    double t = now();
    cv_kernels_in_use()->kv_write(&c->write), t = charge(WRITE, t);
    cv_kernels_in_use()->attention(&c->attention), charge(ATTENTION, t);

    after->out.x = attended, after->out.residual = c->x;
    after->out.y = after->norm.x = after->down.residual = after->down.y = c->y;
    after->norm.y = after->gate_up.x = normed;
    after->gate_up.y = after->activation.x = gate_up;
    after->activation.y = after->down.x = activated;
    after->out.rows = after->norm.outer = after->gate_up.rows = after->activation.rows = after->down.rows = tokens;
    cv_run_after_attention(after);
}

void cv_run_layers(const cv_layers *c) {
    for (int64_t i = 0; i < c->count; i++) {
        cv_layer *layer = c->layers[i];
        cv_heads *heads = &layer->before.heads;
        heads->cos = c->cos, heads->sin = c->sin, heads->rotary = c->rotary;
        layer->step = c->step, layer->x = i ? c->y : c->x, layer->y = c->y;
        run_layer(layer);
    }
}

void cv_take_layer_seconds(double seconds[KINDS]) {
    for (int i = 0; i < KINDS; i++) seconds[i] = spent[i], spent[i] = 0;
}
