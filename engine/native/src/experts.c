/* Mixtures of experts: pairs of a token and an expert are sorted by expert, so that each expert's weights are read once
 * for all of its tokens (MegaBlocks, arXiv 2211.15841). The products are those of linear.c, one expert after another.
 * Compiled without any -m flag. Called from one thread at a time. */
#include "kernels.h"
#include "simd.h"

/* Pairs and rows of one expert that are computed at once. They limit the memory of a long prompt. */
enum { PAIRS_MAX = 4096, ROWS_MAX = 256 };

typedef struct {
    int64_t *ends;   /* [experts]: behind the last pair of each expert, in their order */
    int64_t *places; /* [tokens, per_token]: where each pair is in this order; -1: nowhere */
    char *in, *out;  /* [pairs, hidden] in this order */
    char *gated, *active; /* [ROWS_MAX, 2 * size] and half of it */
} room;

static void sort_pairs(const cv_experts *c, const room *r) {
    const int64_t pairs = c->tokens * c->per_token;
    memset(r->ends, 0, (size_t)c->experts * sizeof *r->ends);
    for (int64_t i = 0; i < pairs; i++)
        if (c->chosen[i] >= 0 && c->chosen[i] < c->experts) r->ends[c->chosen[i]]++;
    for (int64_t e = 0, sum = 0; e < c->experts; e++) {
        const int64_t number = r->ends[e];
        r->ends[e] = sum; /* the beginning; each pair moves it on */
        sum += number;
    }
    for (int64_t i = 0; i < pairs; i++)
        r->places[i] = c->chosen[i] >= 0 && c->chosen[i] < c->experts ? r->ends[c->chosen[i]]++ : -1;
}

static void gather(const cv_experts *c, const room *r, int64_t row_bytes) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < c->tokens * c->per_token; i++)
        if (r->places[i] >= 0)
            memcpy(r->in + r->places[i] * row_bytes, (const char *)c->x + i / c->per_token * row_bytes, (size_t)row_bytes);
}

static void run_expert(const cv_experts *c, const room *r, int64_t expert, int64_t row, int64_t rows, int64_t row_bytes) {
    const cv_kernels *kernels = cv_kernels_in_use();
    cv_linear gate_up = c->gate_up, down = c->down;
    gate_up.x = r->in + row * row_bytes, gate_up.y = r->gated, gate_up.rows = rows;
    gate_up.weight = (const char *)gate_up.weight + expert * c->gate_up_bytes;
    const cv_silu_mul activation = {r->gated, r->active, rows, down.k, gate_up.n, down.dtype};
    down.x = r->active, down.y = r->out + row * row_bytes, down.rows = rows;
    down.weight = (const char *)down.weight + expert * c->down_bytes;
    kernels->linear(&gate_up);
    kernels->silu_mul(&activation);
    kernels->linear(&down);
}

INLINE void add_up(const int bf16, const cv_experts *c, const room *r, int64_t token) {
    const int64_t hidden = c->down.n, first = token * c->per_token, whole = hidden - hidden % VL;
    for (int64_t h = 0; h < whole; h += VL) {
        vf sum = {0};
        for (int64_t j = first; j < first + c->per_token; j++)
            if (r->places[j] >= 0) sum += vf_get(bf16, r->out, r->places[j] * hidden + h) * vf_set(c->shares[j]);
        vf_put(bf16, c->y, token * hidden + h, sum);
    }
    for (int64_t h = whole; h < hidden; h++) {
        float sum = 0;
        for (int64_t j = first; j < first + c->per_token; j++)
            if (r->places[j] >= 0) sum += f_get(bf16, r->out, r->places[j] * hidden + h) * c->shares[j];
        f_put(bf16, c->y, token * hidden + h, sum);
    }
}

static void run_tokens(const cv_experts *c) {
    static __thread void *memory;
    static __thread size_t held;
    const int64_t value_bytes = c->down.dtype == CV_BFLOAT16 ? 2 : 4, row_bytes = c->down.n * value_bytes;
    const int64_t pairs = c->tokens * c->per_token, number_bytes = (int64_t)sizeof(int64_t) * (c->experts + pairs);
    const int64_t gated_bytes = ROWS_MAX * c->gate_up.n * value_bytes;
    room r;
    r.in = scratch_grow(&memory, &held, (size_t)(2 * pairs * row_bytes + gated_bytes / 2 * 3 + number_bytes + 8));
    r.out = r.in + pairs * row_bytes, r.gated = r.out + pairs * row_bytes, r.active = r.gated + gated_bytes;
    r.ends = (int64_t *)(((uintptr_t)r.active + (size_t)gated_bytes / 2 + 7) & ~(uintptr_t)7);
    r.places = r.ends + c->experts;
    sort_pairs(c, &r);
    gather(c, &r, row_bytes);
    for (int64_t e = 0, row = 0; e < c->experts; e++)
        for (int64_t rows; row < r.ends[e]; row += rows) {
            rows = r.ends[e] - row < ROWS_MAX ? r.ends[e] - row : ROWS_MAX;
            run_expert(c, &r, e, row, rows, row_bytes);
        }
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < c->tokens; token++) {
        if (c->down.dtype == CV_BFLOAT16) add_up(1, c, &r, token);
        else add_up(0, c, &r, token);
    }
}

void cv_run_experts(const cv_experts *c) {
    const int64_t most = c->per_token < PAIRS_MAX ? PAIRS_MAX / c->per_token : 1;
    const int64_t row_bytes = c->down.n * (c->down.dtype == CV_BFLOAT16 ? 2 : 4);
    for (int64_t first = 0; first < c->tokens; first += most) {
        cv_experts part = *c;
        part.tokens = c->tokens - first < most ? c->tokens - first : most;
        part.x = (const char *)c->x + first * row_bytes, part.y = (char *)c->y + first * row_bytes;
        part.chosen = c->chosen + first * c->per_token, part.shares = c->shares + first * c->per_token;
        run_tokens(&part);
    }
}
