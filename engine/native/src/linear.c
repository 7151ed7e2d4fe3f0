/* y = x W^T + bias + residual with the weights packed in panels of 32 columns, so that they are read
 * once, in order, whatever the number of rows: the same kernel is a matrix-vector product
 * for one row and a blocked matrix product (Goto, van de Geijn 2008) for a prompt.
 *
 * bfloat16 weights stay bfloat16 in memory. A CPU without bfloat16 instructions widens them
 * in registers (a shift or a mask) and multiplies in float, which is several times faster
 * than the emulation in oneDNN there; with AVX512-BF16 two products are added at a time, with
 * AMX a tile of them (tiles.h).
 */
#include <omp.h>
#include "integers.h"
#include "kernels.h"
#include "simd.h"
#include "tiles.h"

/* How a product is computed: of floats, of pairs of bfloat16, of tiles of them; of four whole numbers, of tiles. */
enum { FLOATS, PAIRS, TILES, QUADS, BYTE_TILES };

#if defined(__AVX512F__)
enum { ROWS = 12, BF16_ROWS = 12, VECS = 2 }; /* 24 of 32 registers accumulate */
#elif defined(__AVX__)
/* 12 or 8 of 16: both halves of widened weights take registers too */
enum { ROWS = 6, BF16_ROWS = 4, VECS = 2 };
#else
enum { ROWS = 4, BF16_ROWS = 4, VECS = 2 };
#endif
_Static_assert((int)ROWS <= (int)VL, "a tile's rows are packed through vectors, a lane for each");
_Static_assert((int)ROWS <= (int)ROWS_BY_TILES, "a buffer of sums serves all");
enum { SPAN = VECS * VL }; /* columns computed at once; a panel is a whole number of spans */

/* Rows of x that a thread keeps packed: about half of its second-level cache, which is 2 MiB where there is AMX. */
#if defined(__AMX_BF16__)
enum { PACKED_BYTES = 1024 * 1024 };
#else
enum { PACKED_BYTES = 512 * 1024 };
#endif

/* What is read after this: `rate` bytes of it are brought into the second-level cache in every step. */
typedef struct { const char *from; int64_t rate; } ahead;

/* sums[m, SPAN] = a[k, m] b[k, SPAN], one span of a panel; `onto`: += . Steps: pairs of k for bfloat16. */
INLINE void span_sums(const int bf16, const int m, const void *a, const void *b, int64_t steps, const ahead *next,
                      const int onto, float *sums) {
    vf acc[ROWS][VECS];
    for (int i = 0; i < m; i++)
        for (int v = 0; v < VECS; v++) acc[i][v] = onto ? vf_load(sums + i * CV_PANEL + v * VL) : (vf){0};
    for (int64_t s = 0; s < steps; s++) {
        __builtin_prefetch(next->from + s * next->rate, 0, 2);
        if (bf16) {
            vu words[VECS];
            for (int v = 0; v < VECS; v++) words[v] = vu_load((const uint32_t *)b + s * CV_PANEL + v * VL);
            for (int i = 0; i < m; i++)
                for (int v = 0; v < VECS; v++) acc[i][v] = vf_dot2(acc[i][v], ((const pair *)a)[s * m + i], words[v]);
        } else {
            vf cols[VECS];
            for (int v = 0; v < VECS; v++) cols[v] = vf_load((const float *)b + s * CV_PANEL + v * VL);
            for (int i = 0; i < m; i++)
                for (int v = 0; v < VECS; v++) acc[i][v] += vf_set(((const float *)a)[s * m + i]) * cols[v];
        }
    }
    for (int i = 0; i < m; i++)
        for (int v = 0; v < VECS; v++) vf_store(sums + i * CV_PANEL + v * VL, acc[i][v]);
}

/* The number of rows must be a constant for the accumulators to live in registers. */
INLINE void tile_sums(const int bf16, int m, const void *a, const void *b, int64_t steps, const ahead *next,
                      const int onto, float *sums) {
    for (int c = 0; c < CV_PANEL; c += SPAN) {
        const void *cols = (const uint32_t *)b + c; /* a pair and a float both take 4 bytes */
        switch (m) {
#define CV_CASE(n) case n: span_sums(bf16, n, a, cols, steps, next, onto, sums + c); break;
            CV_CASE(1) CV_CASE(2) CV_CASE(3) CV_CASE(4)
#if defined(__AVX__)
            CV_CASE(5) CV_CASE(6)
#endif
#if defined(__AVX512F__)
            CV_CASE(7) CV_CASE(8) CV_CASE(9) CV_CASE(10) CV_CASE(11) CV_CASE(12)
#endif
        }
    }
}

/* a[step, m] from m <= VL rows of x, the last pair padded with zero. Writes up to VL - m values behind the last ones. */
INLINE void pack_rows(const int bf16, const void *x, int64_t stride, int m, int64_t k, void *a) {
    const int64_t steps = bf16 ? k / 2 : k, whole = steps - steps % VL;
    for (int64_t s = 0; s < whole; s += VL) {
        vu words[VL]; /* a pair and a float both take 4 bytes */
        for (int i = 0; i < VL; i++) words[i] = i < m ? vu_load(at(bf16, x, i * stride) + s * 4) : (vu){0};
        vu_transpose(words);
        for (int i = 0; i < VL; i++) {
            if (bf16) pairs_spread((pair *)a + (s + i) * m, words[i]);
            else vf_store((float *)a + (s + i) * m, (vf)words[i]);
        }
    }
    for (int i = 0; i < m; i++) {
        if (bf16) {
            const uint16_t *row = (const uint16_t *)x + i * stride;
            pair *to = (pair *)a + i;
            for (int64_t s = whole; s < steps; s++) to[s * m] = pair_make(row[2 * s], row[2 * s + 1]);
            if (k % 2) to[steps * m] = pair_make(row[k - 1], 0);
        } else {
            const float *row = (const float *)x + i * stride;
            float *to = (float *)a + i;
            for (int64_t s = whole; s < steps; s++) to[s * m] = row[s];
        }
    }
}

INLINE void store_tile(const int bf16, const cv_linear *c, const float *sums, int64_t row, int m, int64_t column) {
    const int64_t width = c->n - column < CV_PANEL ? c->n - column : CV_PANEL;
    for (int i = 0; i < m; i++) {
        const int64_t from = (row + i) * c->y_stride + column;
        void *y = at_mut(bf16, c->y, from);
        const void *residual = c->residual ? at(bf16, c->residual, from) : 0;
        for (int64_t j = 0; j < width; j += VL) {
            const int64_t left = width - j;
            if (left >= VL) {
                vf v = vf_load(sums + i * CV_PANEL + j);
                if (c->bias) v += vf_get(bf16, c->bias, column + j);
                if (residual) v += vf_get(bf16, residual, j);
                vf_put(bf16, y, j, v);
            } else {
                for (int64_t l = j; l < width; l++)
                    f_put(bf16, y, l, sums[i * CV_PANEL + l] + (c->bias ? f_get(bf16, c->bias, column + l) : 0.0f)
                                          + (residual ? f_get(bf16, residual, l) : 0.0f));
            }
        }
    }
}

/* Lays m rounded rows of x as the products want them: quads [k / 4, m] or tiles, then the factors. */
static void pack_rounded(const int how, const int bf16, const cv_linear *c, const void *x, int m, char *numbers, char *a) {
    const int64_t groups = c->k / c->group;
    const factors f = how == BYTE_TILES ? factors_at(a + ROWS_BY_TILES * c->k, groups, ROWS_BY_TILES)
                                        : factors_at(a + m * c->k / 4 * quad_words(c->bits) * 4, groups, m);
    for (int i = 0; i < m; i++) {
        const void *row = at(bf16, x, i * c->x_stride);
        if (bf16) round_row(1, row, c, (int8_t *)numbers, f, i);
        else round_row(0, row, c, (int8_t *)numbers, f, i);
        if (how == BYTE_TILES) byte_tiles_pack((int8_t *)numbers, c->k, i, a);
        else quads_pack(quad_words(c->bits), (int8_t *)numbers, c->k, m, i, (uint32_t *)a);
    }
}

/* How the rows are cut: `blocks` of about equal height, each cut into tiles of about equal height, or AMX's. A panel is
 * read in `steps`. */
typedef struct { int64_t blocks, block_rows, tile, row_bytes, steps; } plan;

INLINE plan plan_rows(const int how, const cv_linear *c) {
    plan p;
    const int64_t most = how == FLOATS ? ROWS : how == PAIRS ? BF16_ROWS : how == QUADS ? QUAD_ROWS : ROWS_BY_TILES;
    const int64_t whole = c->bits ? c->k / c->group * 8 : 0; /* bytes of a row's factors */
    p.steps = how == FLOATS ? c->k : how == QUADS ? c->k / (c->bits == 8 ? 4 : 8) : c->bits ? c->k / 4 : (c->k + 1) / 2;
    p.row_bytes = how == QUADS        ? c->k * quad_words(c->bits) + whole
                  : how == BYTE_TILES ? c->k + whole
                  : how == PAIRS      ? p.steps * (int64_t)sizeof(pair)
                                      : p.steps * 4; /* in tiles a pair takes as much as a float */
    const int64_t low = c->added ? c->added->panels * c->added->slices * CV_PANEL * 4 : 0;
    int64_t height = PACKED_BYTES / (p.row_bytes + low) / most * most;
    if (height < most) height = most;
    p.blocks = (c->rows + height - 1) / height;
    p.block_rows = (c->rows + p.blocks - 1) / p.blocks;
    const int64_t tiles = (p.block_rows + most - 1) / most;
    const int whole_tiles = how == TILES || how == BYTE_TILES;
    p.tile = whole_tiles ? most : (p.block_rows + tiles - 1) / tiles;
    if (whole_tiles) p.block_rows = tiles * most; /* but for the last rows of all */
    return p;
}

INLINE int64_t bytes_of_panel(const int how, const cv_linear *c) {
    if (c->bits) return integers_bytes(c);
    return (how == FLOATS ? c->packed_k : (c->packed_k + 1) / 2) * CV_PANEL * 4;
}

/* Lays the rows from `first` to `end` of x into `a`, tile by tile. `spare` holds k bytes. */
INLINE void pack_block(const int how, const int bf16, const cv_linear *c, const plan *p, int64_t first, int64_t end,
                       char *spare, char *a) {
    for (int64_t r = first; r < end; r += p->tile, a += p->tile * p->row_bytes) {
        const int m = (int)(end - r < p->tile ? end - r : p->tile);
        const void *x = at(bf16, c->x, r * c->x_stride);
        if (how == TILES) tiles_pack(x, c->x_stride, m, c->k, a);
        else if (how == FLOATS || how == PAIRS) pack_rows(bf16, x, c->x_stride, m, c->k, a);
        else pack_rounded(how, bf16, c, x, m, spare, a);
    }
}

static void byte_tile_sums(int m, const char *rows, const cv_linear *c, const char *panel, const char *unpacked,
                           const ahead *next, float *sums) {
    const factors f = factors_at((char *)rows + ROWS_BY_TILES * c->k, c->k / c->group, ROWS_BY_TILES);
    const int64_t rate = next->rate * TILE_K / 2;
    switch (taken_from(c)) {
#undef CV_CASE
#define CV_CASE(taken) \
    case taken: byte_tiles_sums(taken, m, rows, f, c, panel, unpacked, next->from, rate, sums); break;
        CV_CASE(MIDDLES) CV_CASE(ZEROS) CV_CASE(MINIMA)
    }
}

/* sums[m, CV_PANEL] of packed rows and the panel at b, of which `unpacked` are the numbers of less than 8 bits. */
INLINE void compute_tile(const int how, const int bf16, const cv_linear *c, const plan *p, int m, const char *rows,
                         const char *b, const char *unpacked, const ahead *next, float *sums) {
    if (how == TILES) tiles_sums(m, rows, b, c->k, next->from, next->rate * TILE_K / 2, 0, sums);
    else if (how == QUADS) quad_sums(m, rows, c, b, unpacked, next->from, next->rate, sums);
    else if (how == BYTE_TILES) byte_tile_sums(m, rows, c, b, unpacked, next, sums);
    else tile_sums(bf16, m, rows, b, p->steps, next, 0, sums);
}

/* Rows of adapters (cv_added) are computed in tiles of this height, of which each row takes so many bytes for a panel. */
INLINE int64_t low_height(const int how, const int bf16) { return how == TILES ? ROWS_BY_TILES : bf16 ? BF16_ROWS : ROWS; }
INLINE int64_t low_row_bytes(const int how, const int bf16) {
    return how == TILES || !bf16 ? CV_PANEL * 4 : CV_PANEL / 2 * (int64_t)sizeof(pair);
}

/* Columns of a panel that rows of a tile use, from an even one on. */
typedef struct { int32_t panel, first, end; } low_panel;

/* For each tile: the number of panels that its rows use, and these; behind them, the rows of each panel and slice. */
typedef struct { int64_t head, each, bytes; } low_plan;
INLINE low_plan plan_low(const int how, const int bf16, const cv_linear *c, int64_t tile) {
    if (!c->added) return (low_plan){0};
    const int64_t all = c->added->ups->packed_k / CV_PANEL, most = tile * c->added->panels;
    const int64_t panels = most < all ? most : all;
    low_plan p = {.each = tile * low_row_bytes(how, bf16)};
    p.head = ((1 + panels) * (int64_t)sizeof(low_panel) + 63) / 64 * 64;
    p.bytes = p.head + panels * c->added->slices * p.each;
    return p;
}

/* own: of m rows, see cv_columns. */
static int32_t find_panels(const int32_t *own, int m, low_panel *found) {
    int32_t count = 0;
    for (const int32_t *behind = own + 2 * m; own < behind; own += 2)
        for (int32_t panel = own[0] / CV_PANEL; own[0] < own[1] && panel * CV_PANEL < own[1]; panel++) {
            const int32_t start = panel * CV_PANEL, left = own[1] + own[1] % 2 - start;
            const int32_t first = own[0] < start ? 0 : (own[0] - start) / 2 * 2, end = left < CV_PANEL ? left : CV_PANEL;
            int32_t at = 0;
            while (at < count && found[at].panel != panel) at++;
            if (at == count) found[count++] = (low_panel){panel, first, end};
            if (first < found[at].first) found[at].first = first;
            if (end > found[at].end) found[at].end = end;
        }
    return count;
}

/* Lays the tile of m rows from `row` on. */
static void pack_low(const int how, const int bf16, const cv_linear *c, const low_plan *p, int64_t row, int m, char *tile) {
    const cv_added *added = c->added;
    const int32_t *own = added->own + 2 * row;
    const int64_t bytes = bf16 ? 2 : 4, whole = CV_PANEL * bytes;
    low_panel *panels = (low_panel *)tile + 1;
    const int32_t count = *(int32_t *)tile = find_panels(own, m, panels);
    const int height = (int)low_height(how, bf16);
    char same[ROWS_BY_TILES * CV_PANEL * 4] __attribute__((aligned(64)));
    char *to = tile + p->head;
    for (const low_panel *of = panels; of < panels + count; of++)
        for (int64_t slice = 0; slice < added->slices; slice++, to += p->each) {
            for (int64_t r = 0; r < m; r++) {
                const int64_t at = of->panel - own[2 * r] / CV_PANEL;
                const int64_t from = ((row + r) * added->panels + at) * added->slices + slice;
                const int has = own[2 * r] < own[2 * r + 1] && at >= 0 && of->panel * CV_PANEL < own[2 * r + 1];
                if (has) memcpy(same + r * whole, (const char *)added->kept + from * whole, (size_t)whole);
                else memset(same + r * whole, 0, (size_t)whole);
            }
            for (int r = 0; r < m; r += height) {
                const int rows = m - r < height ? m - r : height;
                const char *x = same + r * whole + of->first * bytes;
                if (how == TILES) tiles_pack((const uint16_t *)same, CV_PANEL, rows, CV_PANEL, to);
                else if (bf16) pack_rows(1, x, CV_PANEL, rows, of->end - of->first, to + r * low_row_bytes(how, 1));
                else pack_rows(0, x, CV_PANEL, rows, of->end - of->first, to + r * low_row_bytes(how, 0));
            }
        }
}

/* sums[m, CV_PANEL] += what adapters add to the outputs of panel j. */
INLINE void add_low(const int how, const int bf16, const cv_linear *c, const low_plan *p, int m, const char *tile, int64_t j,
                    float *sums) {
    const cv_added *added = c->added;
    const low_panel *panels = (const low_panel *)tile + 1, *behind = panels + *(const int32_t *)tile;
    const int64_t bytes = bf16 ? 2 : 4;
    const int height = (int)low_height(how, bf16);
    const ahead none = {tile, 0};
    for (int64_t slice = 0; panels < behind && slice < added->slices; slice++) {
        const cv_linear *up = added->ups + slice;
        const int64_t begin = added->outputs[slice];
        if (begin >= (j + 1) * CV_PANEL || begin + up->n <= j * CV_PANEL) continue;
        const char *weight = (const char *)up->weight + (j - begin / CV_PANEL) * up->packed_k * CV_PANEL * bytes;
        const char *rows = tile + p->head + slice * p->each;
        for (const low_panel *of = panels; of < behind; of++, rows += added->slices * p->each) {
            if (how == TILES) {
                tiles_sums(m, rows, weight + of->panel * CV_PANEL * CV_PANEL * bytes, CV_PANEL, tile, 0, 1, sums);
                continue;
            }
            const char *b = weight + (of->panel * CV_PANEL + of->first) * CV_PANEL * bytes;
            const int64_t steps = (of->end - of->first) / (bf16 ? 2 : 1);
            for (int r = 0; r < m; r += height)
                tile_sums(bf16, m - r < height ? m - r : height, rows + r * low_row_bytes(how, bf16), b, steps, &none, 1,
                          sums + r * CV_PANEL);
        }
    }
}

static void unpack_numbers(const cv_linear *c, const char *panel, char *to) {
    if (c->bits == 4) unpack_panel(4, c, panel, to);
    else if (c->bits == 5) unpack_panel(5, c, panel, to);
    else unpack_panel(6, c, panel, to);
}

/* One thread's part of the product. Panels are shared out in chunks, enough to balance threads, few enough to reuse
 * packed rows. */
INLINE void share(const int how, const int bf16, const cv_linear *c) {
    static __thread void *memory;
    static __thread size_t held;
    const plan p = plan_rows(how, c);
    const int64_t panels = (c->n + CV_PANEL - 1) / CV_PANEL, panel_bytes = bytes_of_panel(how, c);
    const int64_t threads = omp_get_num_threads();
    int64_t chunk = panels * p.blocks / (16 * threads);
    chunk = chunk < 1 ? 1 : chunk > panels ? panels : chunk;
    const int64_t chunks = (panels + chunk - 1) / chunk;
    const int unpacks = how == BYTE_TILES ? c->bits < 8 : how == QUADS && reads_unpacked(c->bits, p.tile);
    const int64_t unpacked_bytes = unpacks ? c->k * CV_PANEL : 0;
    const low_plan l = plan_low(how, bf16, c, p.tile);
    const int64_t tiles = (p.block_rows + p.tile - 1) / p.tile, low_bytes = tiles * l.bytes;
    char *low = scratch_grow(&memory, &held, (size_t)(low_bytes + unpacked_bytes + p.block_rows * p.row_bytes
                                                      + (int64_t)sizeof(pair) * VL + c->k));
    char *unpacked = low + low_bytes, *a = unpacked + unpacked_bytes, *spare = a + p.block_rows * p.row_bytes;
    int64_t packed = -1;
    float sums[ROWS_BY_TILES * CV_PANEL] __attribute__((aligned(64)));
    if (how == TILES) tiles_begin(TILE_LINE);
    if (how == BYTE_TILES) tiles_begin(c->group < TILE_LINE ? c->group : TILE_LINE);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t unit = 0; unit < p.blocks * chunks; unit++) {
        const int64_t block = unit / chunks, first = block * p.block_rows;
        const int64_t end = first + p.block_rows < c->rows ? first + p.block_rows : c->rows;
        if (block != packed) {
            if (c->added)
                for (int64_t r = first, t = 0; r < end; r += p.tile, t++)
                    pack_low(how, bf16, c, &l, r, (int)(end - r < p.tile ? end - r : p.tile), low + t * l.bytes);
            pack_block(how, bf16, c, &p, first, end, spare, a), packed = block;
        }
        int64_t last = (unit % chunks + 1) * chunk;
        if (last > panels) last = panels;
        for (int64_t j = unit % chunks * chunk; j < last; j++) {
            const char *b = (const char *)c->weight + j * panel_bytes;
            if (unpacks) unpack_numbers(c, b, unpacked);
            /* After this panel comes the next one or, past a chunk for each other thread, the first of another. */
            int64_t then = j + 1 < last ? j + 1 : j + 1 + (threads - 1) * chunk;
            if (then >= panels) then = panels - 1;
            const int64_t reads = (end - first + p.tile - 1) / p.tile * p.steps;
            ahead next = {(const char *)c->weight + then * panel_bytes, reads ? (panel_bytes + reads - 1) / reads : 0};
            for (int64_t r = first; r < end; r += p.tile) {
                const int m = (int)(end - r < p.tile ? end - r : p.tile);
                const char *rows = a + (r - first) * p.row_bytes;
                compute_tile(how, bf16, c, &p, m, rows, b, unpacks ? unpacked : 0, &next, sums);
                next.from += p.steps * next.rate;
                if (c->added) add_low(how, bf16, c, &l, m, low + (r - first) / p.tile * l.bytes, j, sums);
                store_tile(bf16, c, sums, r, m, j * CV_PANEL);
            }
        }
    }
    if (how == TILES || how == BYTE_TILES) tiles_end();
}

void CV_NAME(cv_linear)(const cv_linear *c) {
    if (c->rows == 0) return; /* a step that samples nothing has no rows for the output layer */
    const int bf16 = c->dtype == CV_BFLOAT16;
#pragma omp parallel
    { /* the compiler must know how within: it sees the region as a function of its own */
        if (c->bits && byte_tiles_fit(c)) share(BYTE_TILES, bf16, c);
        else if (c->bits) share(QUADS, bf16, c);
        else if (tiles_fit(c)) share(TILES, 1, c);
        else if (bf16) share(PAIRS, 1, c);
        else share(FLOATS, 0, c);
    }
}
