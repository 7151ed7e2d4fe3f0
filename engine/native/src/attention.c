/* Paged attention that reads every key and value once per group of query rows, by the
 * online softmax of FlashAttention-2 (Dao 2023, algorithm 1) with the query heads that share a KV
 * head (GQA) and several query tokens packed into one tile of rows. One kernel serves
 * decode (one query token) and prefill or a chunk of it (many).
 */
#include "kernels.h"
#include "simd.h"

#include <omp.h>

#if defined(__AVX512F__)
enum { ROWS = 6, BLOCKS = 4, VECS = 4 }; /* 6 x 4 accumulators */
#elif defined(__AVX__)
enum { ROWS = 4, BLOCKS = 1, VECS = 2 };
#else
enum { ROWS = 2, BLOCKS = 1, VECS = 2 };
#endif
#include "latent.h"
enum { WIDE = 2 * VECS }; /* vectors of half as many rows, as one token has */
enum {
    LANES = CV_BLOCK / VL,         /* vectors per block of keys */
    CHUNK = 8 * CV_BLOCK,          /* keys per step of the softmax */
    TILE = 48,                     /* query rows per unit of work, at most, unless one token has more heads */
};

/* One unit of work: `tokens` queries of one sequence, the query heads of one KV head, or of a part of its group. */
typedef struct {
    int64_t seq, kv_head, first_token, tokens;
    int64_t group, rows, first_position; /* position of the first query token in its sequence */
} unit;

/* Where the keys and values of a step of the softmax lie: of `count` blocks, and from there on of the last one. */
typedef struct {
    const void *k[CHUNK / CV_BLOCK], *v[CHUNK / CV_BLOCK];
    int count;
} chunk;

/* A thread's memory: rows x (query, scores, output, maximum, sum). */
typedef struct {
    void *q;
    float *scores, *out, *highest, *sum;
} tile;

INLINE int64_t even_dim(int64_t d) { return (d + 1) & ~(int64_t)1; }
INLINE int64_t padded_width(int64_t d) { return (d + 15) & ~(int64_t)15; }
/* Numbers of a row of v_cache. */
INLINE int64_t row_width(const cv_attention *c) { return padded_width(c->k_cache ? c->value_dim : c->head_dim); }
/* Words of a query in a tile, and of bfloat16 pairs as many. */
INLINE int64_t query_width(const cv_attention *c) { return c->k_cache ? even_dim(c->head_dim) : row_width(c); }

/* scores[m rows, n blocks x 16] = q k^T for blocks[0..n). `ahead` are read soon: a processor foresees no other page. */
INLINE void score_span(const int bf16, const int m, const int n, const void *q, const void *const *blocks,
                       const void *const *ahead, int64_t dim, float *scores) {
    vf acc[ROWS][BLOCKS * LANES];
    const int64_t steps = bf16 ? dim / 2 : dim;
    for (int i = 0; i < m; i++)
        for (int v = 0; v < n * LANES; v++) acc[i][v] = (vf){0};
    for (int64_t s = 0; s < steps; s++) {
        for (int b = 0; ahead && b < n; b++) __builtin_prefetch((const float *)ahead[b] + s * CV_BLOCK);
        for (int v = 0; v < n * LANES; v++) {
            const float *k = (const float *)blocks[v / LANES] + s * CV_BLOCK + v % LANES * VL;
            if (bf16) {
                const vu words = vu_load(k);
                for (int i = 0; i < m; i++) acc[i][v] = vf_dot2(acc[i][v], ((const pair *)q)[i * steps + s], words);
            } else {
                const vf keys = vf_load(k);
                for (int i = 0; i < m; i++) acc[i][v] += vf_set(((const float *)q)[i * steps + s]) * keys;
            }
        }
    }
    for (int i = 0; i < m; i++)
        for (int v = 0; v < n * LANES; v++) vf_store(scores + i * CHUNK + v * VL, acc[i][v]);
}

/* A step of value_span for bfloat16; `which` keys of the pair count. */
INLINE void value_step(const int m, const int n, const float *weights, int64_t step, const uint32_t *row,
                       const uint32_t which, vf (*acc)[WIDE]) {
    for (int v = 0; v < n; v++) {
        const vu words = vu_load(row + v * VL) & which;
        for (int i = 0; i < m; i++)
            acc[i][v] = vf_dot2(acc[i][v], ((const pair *)(weights + i * CHUNK))[step], words);
    }
}

/* out[m rows, n vectors] += weights[m rows, keys] v[keys, n vectors], at one column offset. For bfloat16 two keys are a
 * step, and a row's weights are pairs. */
INLINE void value_span(const int bf16, const int m, const int n, const float *weights, const void *const *blocks,
                       const void *const *ahead, int64_t keys, int64_t stride, int64_t width, int64_t column, float *out) {
    enum { STEP = 2, STEPS = CV_BLOCK / STEP, FIRST = 0xffff };
    vf acc[ROWS][WIDE];
    for (int i = 0; i < m; i++)
        for (int v = 0; v < n; v++) acc[i][v] = vf_load(out + i * width + column + v * VL);
    if (bf16) {
        for (int64_t s = 0; s < keys / STEP; s++) {
            const int64_t place = s % STEPS * stride + column;
            for (int v = 0; ahead && v < n * VL; v += CV_BLOCK)
                __builtin_prefetch((const uint32_t *)ahead[s / STEPS] + place + v);
            value_step(m, n, weights, s, (const uint32_t *)blocks[s / STEPS] + place, ~0u, acc);
        }
        if (keys % STEP) {
            const int64_t s = keys / STEP;
            const uint32_t *row = (const uint32_t *)blocks[s / STEPS] + s % STEPS * stride + column;
            value_step(m, n, weights, s, row, FIRST, acc);
        }
    } else {
        for (int64_t t = 0; t < keys; t++) {
            const float *row = (const float *)blocks[t / CV_BLOCK] + t % CV_BLOCK * stride + column;
            for (int v = 0; v < n; v++) {
                const vf values = vf_load(row + v * VL);
                for (int i = 0; i < m; i++) acc[i][v] += vf_set(weights[i * CHUNK + t]) * values;
            }
        }
    }
    for (int i = 0; i < m; i++)
        for (int v = 0; v < n; v++) vf_store(out + i * width + column + v * VL, acc[i][v]);
}

INLINE void scores_of(const int bf16, const int m, const void *q, const void *const *blocks, const void *const *ahead,
                      int count, int64_t dim, float *scores) {
    int b = 0;
    for (; b + BLOCKS <= count; b += BLOCKS)
        score_span(bf16, m, BLOCKS, q, blocks + b, ahead ? ahead + b : NULL, dim, scores + b * CV_BLOCK);
    for (; b < count; b++) score_span(bf16, m, 1, q, blocks + b, ahead ? ahead + b : NULL, dim, scores + b * CV_BLOCK);
}

INLINE void values_of(const int bf16, const int m, const float *weights, const void *const *blocks,
                      const void *const *ahead, int64_t keys, int64_t stride, int64_t width, float *out) {
    int64_t column = 0;
    for (; 2 * m <= ROWS && column + WIDE * VL <= width; column += WIDE * VL)
        value_span(bf16, m, WIDE, weights, blocks, ahead, keys, stride, width, column, out);
    for (; column + VECS * VL <= width; column += VECS * VL)
        value_span(bf16, m, VECS, weights, blocks, ahead, keys, stride, width, column, out);
    for (; column < width; column += VL) value_span(bf16, m, 1, weights, blocks, ahead, keys, stride, width, column, out);
}

/* Masks, scales and exponentiates one row of scores in place (for bfloat16 they become pairs); rescales what the row
 * has summed so far. Keys [from, to) of the chunk are visible. */
INLINE void softmax_row(const int bf16, const cv_attention *c, float *scores, int64_t from, int64_t to, int64_t keys,
                        int64_t width, float *highest, float *sum, float *out) {
    const vf minus_infinity = vf_set(-__builtin_inff());
    if (c->softcap > 0)
        for (int64_t t = 0; t < keys; t += VL)
            vf_store(scores + t, vf_tanh(vf_load(scores + t) * c->scale / c->softcap) * c->softcap);
    if (from > 0 || to < keys)
        for (int64_t t = 0; t < keys; t += VL) {
            const vi position = vi_lanes() + (int32_t)t;
            const vi visible = (position >= (int32_t)from) & (position < (int32_t)to);
            vf_store(scores + t, vf_select(visible, vf_load(scores + t), minus_infinity));
        }
    const float scale = c->softcap > 0 ? 1.0f : c->scale;
    vf top = minus_infinity;
    for (int64_t t = 0; t < keys; t += VL) top = vf_max(vf_load(scores + t), top);
    const float chunk_top = vf_highest(top) * scale, new_top = chunk_top > *highest ? chunk_top : *highest;
    if (new_top == -__builtin_inff()) { /* nothing visible yet */
        memset(scores, 0, (size_t)keys * sizeof *scores);
        return;
    }
    vf total = {0};
    for (int64_t t = 0; t < keys; t += VL) {
        const vf p = vf_exp(vf_load(scores + t) * scale - new_top);
        if (bf16) pairs_put(scores, t, p);
        else vf_store(scores + t, p);
        total += p;
    }
    if (new_top != *highest) {
        const float factor = vf_exp(vf_set(*highest - new_top))[0];
        *sum *= factor;
        for (int64_t d = 0; d < width; d += VL) vf_store(out + d, vf_load(out + d) * factor);
        *highest = new_top;
    }
    *sum += vf_sum(total);
}

INLINE void load_queries(const int bf16, const cv_attention *c, const unit *u, tile *w) {
    const int64_t dim = query_width(c);
    const int64_t first_row = c->query_start[u->seq] + u->first_token;
    for (int64_t r = 0; r < u->rows; r++) {
        const int64_t head = u->kv_head * u->group + r % u->group;
        const void *q = at(bf16, c->q, head * c->q_head_stride + (first_row + r / u->group) * c->q_token_stride);
        if (!c->k_cache) {
            query_across(bf16, q, c->head_dim, dim, (float *)w->q + r * dim);
        } else if (bf16) {
            pair *to = (pair *)w->q + r * dim / 2;
            pairs_of(q, c->head_dim / 2, to);
            if (c->head_dim % 2) to[dim / 2 - 1] = pair_make(((const uint16_t *)q)[c->head_dim - 1], 0);
        } else {
            float *to = (float *)w->q + r * dim;
            memcpy(to, q, (size_t)c->head_dim * sizeof *to);
            if (c->head_dim % 2) to[c->head_dim] = 0.0f;
        }
    }
}

INLINE void store_outputs(const int bf16, const cv_attention *c, const unit *u, const tile *w) {
    const int64_t width = padded_width(c->value_dim), whole = c->value_dim - c->value_dim % VL;
    const int64_t first_row = c->query_start[u->seq] + u->first_token;
    for (int64_t r = 0; r < u->rows; r++) {
        const int64_t head = u->kv_head * u->group + r % u->group;
        void *out = at_mut(bf16, c->out, ((first_row + r / u->group) * c->num_heads + head) * c->value_dim);
        const float inverse = 1.0f / w->sum[r];
        for (int64_t d = 0; d < whole; d += VL) vf_put(bf16, out, d, vf_load(w->out + r * width + d) * inverse);
        for (int64_t d = whole; d < c->value_dim; d++) f_put(bf16, out, d, w->out[r * width + d] * inverse);
    }
}

INLINE chunk chunk_at(const int bf16, const cv_attention *c, const unit *u, int64_t first, int64_t last) {
    const int32_t *table = c->block_tables + u->seq * c->table_stride;
    const int64_t rest = last - first + 1;
    chunk found = {.count = rest < 0 ? 0 : rest < CHUNK / CV_BLOCK ? (int)rest : CHUNK / CV_BLOCK};
    for (int i = 0; i < CHUNK / CV_BLOCK; i++) {
        const int64_t kv_head = u->kv_head * u->group * c->num_kv_heads / c->num_heads;
        const int64_t page = table[i < found.count ? first + i : last] * c->num_kv_heads + kv_head;
        found.k[i] = c->k_cache ? at(bf16, c->k_cache, page * even_dim(c->head_dim) * CV_BLOCK) : NULL;
        found.v[i] = at(bf16, c->v_cache, page * row_width(c) * CV_BLOCK);
    }
    return found;
}

/* The end of the keys that the query at this position sees. */
INLINE int64_t end_of(const cv_attention *c, const unit *u, int64_t position) {
    const int64_t length = c->seq_lens[u->seq];
    if (c->ends) return c->ends[c->query_start[u->seq] + u->first_token + position - u->first_position];
    if (c->causal) return position + 1;
    return c->window > 0 && position + c->window < length ? position + c->window : length;
}

/* One chunk of keys for m rows of the unit. The first ones to read it bring what is read after it. */
INLINE void attend_rows(const int bf16, const int m, const cv_attention *c, const unit *u, tile *w, int64_t row,
                        int64_t first_key, const chunk *here, const chunk *next) {
    const int64_t dim = query_width(c), width = padded_width(c->value_dim);
    const int64_t keys = (int64_t)here->count * CV_BLOCK;
    const int64_t q_bytes = dim * (bf16 && c->k_cache ? (int64_t)sizeof(pair) / 2 : (int64_t)sizeof(float));
    const char *q = (const char *)w->q + row * q_bytes;
    float *scores = w->scores;
    if (c->k_cache) scores_of(bf16, m, q, here->k, row ? NULL : here->v, here->count, dim, scores);
    else for (int b = 0; b < here->count; b++)
        score_rows(bf16, m, (const float *)q, here->v[b], dim, CHUNK, scores + b * CV_BLOCK);
    for (int i = 0; i < m; i++) {
        const int64_t position = u->first_position + (row + i) / u->group;
        const int64_t oldest = c->window > 0 ? position - c->window + 1 : 0;
        const int64_t end = end_of(c, u, position);
        softmax_row(bf16, c, scores + i * CHUNK, oldest - first_key, end - first_key, keys, width,
                    w->highest + row + i, w->sum + row + i, w->out + (row + i) * width);
    }
    /* Never multiply by what lies past the sequence's end: 0 x NaN is NaN. */
    const int64_t length = c->seq_lens[u->seq] - first_key;
    values_of(bf16, m, scores, here->v, row ? NULL : c->k_cache ? next->k : next->v, keys < length ? keys : length,
              row_width(c), width, w->out + row * width);
}

INLINE void attend(const int bf16, const cv_attention *c, const unit *u, tile *w) {
    const int64_t width = padded_width(c->value_dim);
    const int64_t last_key = end_of(c, u, u->first_position + u->tokens - 1) - 1;
    const int64_t last = last_key / CV_BLOCK;
    int64_t oldest = c->window > 0 ? u->first_position - c->window + 1 : 0;
    if (oldest < 0) oldest = 0;
    load_queries(bf16, c, u, w);
    memset(w->out, 0, (size_t)(u->rows * width) * sizeof(float));
    for (int64_t r = 0; r < u->rows; r++) {
        w->highest[r] = c->sinks ? c->sinks[u->kv_head * u->group + r % u->group] : -__builtin_inff();
        w->sum[r] = c->sinks ? 1 : 0;
    }
    chunk here = chunk_at(bf16, c, u, oldest / CV_BLOCK, last);
    for (int64_t b = oldest / CV_BLOCK; b <= last; b += CHUNK / CV_BLOCK) {
        const chunk next = chunk_at(bf16, c, u, b + CHUNK / CV_BLOCK, last);
        for (int64_t row = 0; row < u->rows; row += ROWS) {
            const int m = (int)(u->rows - row < ROWS ? u->rows - row : ROWS);
            switch (m) {
#define CV_CASE(n) case n: attend_rows(bf16, n, c, u, w, row, b * CV_BLOCK, &here, &next); break;
                CV_CASE(1) CV_CASE(2)
#if defined(__AVX__)
                CV_CASE(3) CV_CASE(4)
#endif
#if defined(__AVX512F__)
                CV_CASE(5) CV_CASE(6)
#endif
            }
        }
        here = next;
    }
    store_outputs(bf16, c, u, w);
}

/* Lays the tile's arrays out in the thread's memory, each on its own cache lines. */
INLINE tile tile_in(char *memory, int64_t rows, int64_t width) {
    tile w;
    w.out = (float *)memory;
    w.scores = w.out + rows * width;
    w.highest = w.scores + ROWS * CHUNK;
    w.sum = w.highest + rows + VL;
    w.q = w.sum + rows + VL;
    return w;
}

/* Finds the unit with this index: sequences in order, then KV heads, then tiles of query tokens. */
INLINE unit unit_at(const cv_attention *c, const int64_t *starts, int64_t group, int64_t tile_tokens, int64_t index) {
    int64_t low = 0, high = c->num_seqs - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (starts[middle] <= index) low = middle;
        else high = middle - 1;
    }
    unit u;
    const int64_t queries = c->query_start[low + 1] - c->query_start[low];
    const int64_t tiles = (queries + tile_tokens - 1) / tile_tokens;
    u.seq = low;
    u.kv_head = (index - starts[low]) / tiles;
    u.first_token = (index - starts[low]) % tiles * tile_tokens;
    u.tokens = queries - u.first_token < tile_tokens ? queries - u.first_token : tile_tokens;
    u.group = group;
    u.rows = u.tokens * u.group;
    u.first_position = c->seq_lens[low] - queries + u.first_token;
    return u;
}

/* How many query heads of a KV head are a unit: all, but few enough where one KV head is all there is, as in latent
 * attention, that a tile holds them and no thread is idle. */
static int64_t heads_of_unit(const cv_attention *c) {
    int64_t group = c->num_heads / c->num_kv_heads;
    const int64_t threads = omp_get_max_threads();
    while (!c->k_cache && group % 2 == 0 && group / 2 >= ROWS
           && (group > TILE || c->num_seqs * c->num_heads < threads * group))
        group /= 2;
    return group;
}

void CV_NAME(cv_attention)(const cv_attention *c) {
    const int64_t group = heads_of_unit(c), parts = c->num_heads / group;
    const int64_t tile_tokens = group > TILE ? 1 : TILE / group;
    const int64_t tile_rows = tile_tokens * group;
    const int64_t dim = query_width(c), width = padded_width(c->value_dim);
    int64_t *starts = malloc((size_t)(c->num_seqs + 1) * sizeof *starts);
    if (!starts) abort();
    starts[0] = 0;
    for (int64_t s = 0; s < c->num_seqs; s++) {
        const int64_t queries = c->query_start[s + 1] - c->query_start[s];
        starts[s + 1] = starts[s] + (queries + tile_tokens - 1) / tile_tokens * parts;
    }
#pragma omp parallel
    {
        static __thread void *memory;
        static __thread size_t held;
        const size_t floats = (size_t)(tile_rows * (width + 2 * dim + 2) + ROWS * CHUNK + 4 * VL);
        tile w = tile_in(scratch_grow(&memory, &held, floats * sizeof(float)), tile_rows, width);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < starts[c->num_seqs]; i++) {
            const unit u = unit_at(c, starts, group, tile_tokens, i);
            if (c->dtype == CV_BFLOAT16) attend(1, c, &u, &w);
            else attend(0, c, &u, &w);
        }
    }
    free(starts);
}
