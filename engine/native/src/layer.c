/* Decoder layers in one call, or one in two, before and after attention: between their kernels there is no Python.
 * Compiled without any -m flag. Called from one thread at a time. */
#include <omp.h>
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

enum { PIECE = 64 }; /* tokens of a share that one thread reduces */

static int64_t count_pieces(const cv_share *of) { return (of->end_token - of->first_token + PIECE - 1) / PIECE; }

static cv_share find_piece(const cv_share *of, int64_t piece) {
    for (; piece >= count_pieces(of); of++) piece -= count_pieces(of);
    const int64_t first = of->first_token + piece * PIECE, end = first + PIECE < of->end_token ? first + PIECE : of->end_token;
    return (cv_share){first, end, of->first_panel, of->end_panel};
}

/* kept: as in cv_added; reduced [row, panel, slice, 32], of the share's panels. Rows whose adapter lies in others are left
 * out. Not a product with 0: one adapter's infinity would become others' NaN. */
static void keep_own(const char *reduced, char *kept, const int32_t *own, const cv_share *share, int64_t slices,
                     int64_t panels, int64_t bytes) {
    const int64_t start = share->first_panel, width = share->end_panel - start, whole = CV_PANEL * bytes;
    for (int64_t row = 0; row < share->end_token - share->first_token; row++) {
        const int64_t first = own[2 * row], end = own[2 * row + 1];
        if (first >= end || first / CV_PANEL < start || first / CV_PANEL >= share->end_panel) continue;
        memset(kept + row * panels * slices * whole, 0, (size_t)(panels * slices * whole));
        for (int64_t column = first, next; column < end; column = next) {
            const int64_t panel = column / CV_PANEL, at = column % CV_PANEL * bytes;
            next = (panel + 1) * CV_PANEL < end ? (panel + 1) * CV_PANEL : end;
            const char *from = reduced + (row * width + panel - start) * slices * whole + at;
            char *to = kept + (row * panels + panel - first / CV_PANEL) * slices * whole + at;
            for (int64_t slice = 0; slice < slices; slice++)
                memcpy(to + slice * whole, from + slice * whole, (size_t)((next - column) * bytes));
        }
    }
}

static void reduce_piece(const cv_linear *product, const cv_adapters *adapters, const cv_columns *columns,
                         const cv_share *share, char *kept) {
    static __thread void *memory;
    static __thread size_t held;
    const int64_t rows = share->end_token - share->first_token, slices = adapters->slices, first = share->first_token;
    const int64_t width = (share->end_panel - share->first_panel) * slices * CV_PANEL;
    const int64_t bytes = product->dtype == CV_BFLOAT16 ? 2 : 4;
    cv_linear down = adapters->down;
    const int64_t panel_bytes = (down.packed_k + (bytes == 2 && down.packed_k % 2)) * CV_PANEL * bytes;
    down.x = (const char *)product->x + first * product->x_stride * bytes;
    down.y = scratch_grow(&memory, &held, (size_t)(rows * width * bytes));
    down.x_stride = product->x_stride, down.rows = rows, down.n = down.y_stride = width;
    down.weight = (const char *)down.weight + share->first_panel * slices * panel_bytes;
    cv_kernels_in_use()->linear(&down);
    keep_own(down.y, kept + first * columns->panels * slices * CV_PANEL * bytes, columns->own + 2 * first, share, slices,
             columns->panels, bytes);
}

/* Returns what the adapters add to the product. Many pieces are shared out among the threads; of few, each is computed by
 * all of them. */
static cv_added reduce(const cv_linear *product, const cv_adapters *adapters, const cv_columns *columns) {
    static __thread void *memory;
    static __thread size_t held;
    const int64_t bytes = product->dtype == CV_BFLOAT16 ? 2 : 4;
    char *kept = scratch_grow(
        &memory, &held, (size_t)(product->rows * columns->panels * adapters->slices * CV_PANEL * bytes));
    int64_t pieces = 0;
    for (int64_t i = 0; i < columns->num_shares; i++) pieces += count_pieces(columns->shares + i);
#pragma omp parallel for schedule(dynamic, 1) if (pieces >= 2 * omp_get_max_threads())
    for (int64_t piece = 0; piece < pieces; piece++) {
        const cv_share share = find_piece(columns->shares, piece);
        reduce_piece(product, adapters, columns, &share, kept);
    }
    return (cv_added){columns->own, kept, adapters->ups, adapters->outputs, adapters->slices, columns->panels};
}

static void run_product(const cv_linear *c, const cv_adapters *adapters, const cv_columns *columns) {
    cv_linear product = *c;
    cv_added added;
    if (adapters && columns && columns->panels) added = reduce(c, adapters, columns), product.added = &added;
    cv_kernels_in_use()->linear(&product);
}

void cv_run_adapt(const cv_adapt *c) {
    if (c->columns->panels) run_product(c->product, c->adapters, c->columns);
}

void cv_run_before_attention(const cv_before_attention *c) {
    const cv_kernels *k = cv_kernels_in_use();
    double t = now();
    k->rms_norm(&c->norm), t = charge(NORMS, t);
    run_product(&c->qkv, c->qkv_adapters, c->columns), t = charge(PRODUCTS, t);
    k->heads(&c->heads), charge(HEADS, t);
}

void cv_run_after_attention(const cv_after_attention *c) {
    const cv_kernels *k = cv_kernels_in_use();
    double t = now();
    run_product(&c->out, c->out_adapters, c->columns), t = charge(PRODUCTS, t);
    k->rms_norm(&c->norm), t = charge(NORMS, t);
    run_product(&c->gate_up, c->gate_up_adapters, c->columns), t = charge(PRODUCTS, t);
    k->silu_mul(&c->activation), t = charge(ACTIVATION, t);
    run_product(&c->down, c->down_adapters, c->columns), charge(PRODUCTS, t);
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
        layer->before.columns = layer->after.columns = c->columns;
        layer->step = c->steps + layer->table, layer->x = i ? c->y : c->x, layer->y = c->y;
        run_layer(layer);
    }
}

void cv_take_layer_seconds(double seconds[KINDS]) {
    for (int i = 0; i < KINDS; i++) seconds[i] = spent[i], spent[i] = 0;
}
