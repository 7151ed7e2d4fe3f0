/* Products of bfloat16 by AMX, whose eight registers hold tiles of 16 lines of 64 bytes. TDPBF16PS adds to 16 x 16 sums
 * what 16 rows of 32 values give with 16 columns, whose pairs of k lie side by side, as in half of a panel of packed
 * weights. It takes 16 cycles, in which the second-level cache gives one tile at best: so two tiles of rows are
 * multiplied by two of columns at a time, and each tile that is read serves two products.
 */
#ifndef CONVEYOR_TILES_H
#define CONVEYOR_TILES_H
#include "kernels.h"
#include "simd.h"

enum { TILE_ROWS = 16, TILE_K = 32, TILE_LINE = 64, TILE_BYTES = TILE_ROWS * TILE_LINE };
enum { ROWS_BY_TILES = 2 * TILE_ROWS }; /* rows of x computed at once */

INLINE void bring(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += TILE_LINE) __builtin_prefetch(from + i, 0, 2);
}

#if defined(__AMX_BF16__)
enum { PANEL_LINE = 2 * TILE_LINE, PANEL_STEP = TILE_K / 2 * PANEL_LINE };
_Static_assert(PANEL_LINE == CV_PANEL * 4, "a panel is two tiles wide; a row of sums is as long as a row of its pairs");

/* k in whole tiles: other products go by pairs. */
INLINE int tiles_fit(const cv_linear *c) { return c->dtype == CV_BFLOAT16 && c->k % TILE_K == 0; }

/* All registers are whole tiles, or those of rows and columns have `k_bytes` of k. What a thread's registers are is set
 * for each call: oneDNN sets them too. */
INLINE void tiles_begin(int64_t k_bytes) {
    typedef struct { uint8_t palette, start_row, reserved[14]; uint16_t line_bytes[16]; uint8_t rows[16]; } registers;
    _Static_assert(sizeof(registers) == 64, "what LDTILECFG reads");
    const uint16_t line = (uint16_t)k_bytes;
    const uint8_t rows = (uint8_t)(k_bytes / 4);
    const registers shape = {
        .palette = 1,
        .line_bytes = {TILE_LINE, TILE_LINE, TILE_LINE, TILE_LINE, line, line, TILE_LINE, TILE_LINE},
        .rows = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, rows, rows},
    };
    _tile_loadconfig(&shape);
}
INLINE void tiles_end(void) { _tile_release(); }

/* Lays m rows of x into tiles, those of 16 rows one after another. Rows that the last 16 lack stay what they were: each
 * row of a tile makes sums of its own, and theirs are not stored. */
INLINE void tiles_pack(const uint16_t *x, int64_t stride, int m, int64_t k, char *a) {
    for (int row = 0; row < m; row++) {
        char *line = a + row / TILE_ROWS * TILE_ROWS * k * 2 + row % TILE_ROWS * TILE_LINE;
        for (int64_t i = 0; i < k; i += TILE_K, line += TILE_BYTES) memcpy(line, x + row * stride + i, TILE_LINE);
    }
    __asm__ volatile("" ::: "memory"); /* the compiler does not see that tiles are read from it */
}

/* Registers: 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns. `whole`, whether tiles hold 64 numbers of 8 bits, signed
 * in rows and unsigned in columns, and `both`, whether there is a second tile of rows, are constants. */
INLINE void sums_of(const int whole, const int both, const char *a, const char *below, const char *b, int64_t steps,
                    const char *next, int64_t rate, const int onto, void *sums) {
    if (onto) {
        _tile_loadd(0, sums, PANEL_LINE);
        _tile_loadd(1, (char *)sums + TILE_LINE, PANEL_LINE);
        if (both) {
            _tile_loadd(2, (char *)sums + TILE_ROWS * PANEL_LINE, PANEL_LINE);
            _tile_loadd(3, (char *)sums + TILE_ROWS * PANEL_LINE + TILE_LINE, PANEL_LINE);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (both) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(4, a + s * TILE_BYTES, TILE_LINE);
        _tile_loadd(6, b + s * PANEL_STEP, PANEL_LINE);
        _tile_loadd(7, b + s * PANEL_STEP + TILE_LINE, PANEL_LINE);
        if (both) _tile_loadd(5, below + s * TILE_BYTES, TILE_LINE);
        if (whole) {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (both && whole) {
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        } else if (both) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        bring(next + s * rate, rate);
    }
    _tile_stored(0, sums, PANEL_LINE);
    _tile_stored(1, (char *)sums + TILE_LINE, PANEL_LINE);
    if (both) {
        _tile_stored(2, (char *)sums + TILE_ROWS * PANEL_LINE, PANEL_LINE);
        _tile_stored(3, (char *)sums + TILE_ROWS * PANEL_LINE + TILE_LINE, PANEL_LINE);
    }
}

/* sums[m, CV_PANEL] of m packed rows and a panel; `onto`: added to them. In every step `rate` bytes of what comes next are
 * brought nearer. A row's sums are made in one order, whatever m is. */
INLINE void tiles_sums(int m, const char *a, const char *b, int64_t k, const char *next, int64_t rate, const int onto,
                       float *sums) {
    const char *below = a + k / TILE_K * TILE_BYTES;
    if (m > TILE_ROWS) sums_of(0, 1, a, below, b, k / TILE_K, next, rate, onto, sums);
    else sums_of(0, 0, a, below, b, k / TILE_K, next, rate, onto, sums);
}
#else
INLINE int tiles_fit(const cv_linear *c) { return (void)c, 0; }
INLINE void tiles_begin(int64_t k_bytes) { (void)k_bytes; }
INLINE void tiles_end(void) {}
INLINE void tiles_pack(const uint16_t *x, int64_t stride, int m, int64_t k, char *a) {
    (void)x, (void)stride, (void)m, (void)k, (void)a;
}
INLINE void tiles_sums(int m, const char *a, const char *b, int64_t k, const char *next, int64_t rate, const int onto,
                       float *sums) {
    (void)m, (void)a, (void)b, (void)k, (void)next, (void)rate, (void)onto, (void)sums;
}
#endif
#endif
