/* Products with weights of 4 to 8 bits (conveyor_native.h has their layout). Rows are rounded to 8 bits by group of k,
 * each group by its own largest number, so that an outlier makes only its own group coarse. The sum of a group is a
 * whole number, exact on every instruction set; only what is added up over groups is rounded.
 *
 * Weights are unsigned and rows signed, as VPDPBUSD and TDPBSUD want them. What a zero point takes off is zero times the
 * sum of the row's numbers, which is known before.
 */
#ifndef CONVEYOR_INTEGERS_H
#define CONVEYOR_INTEGERS_H
#include "kernels.h"
#include "simd.h"
#include "tiles.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Four numbers of a row, which are broadcast. Without an instruction for four products they wait as 16 bits: the first
 * and third, the second and fourth. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
typedef uint32_t quad;
INLINE quad quad_make(const int8_t *n) { quad q; memcpy(&q, n, sizeof q); return q; }
#else
typedef struct { uint32_t even, odd; } quad;
INLINE uint32_t two(int8_t lo, int8_t hi) { return (uint32_t)(uint16_t)lo | (uint32_t)(uint16_t)hi << 16; }
INLINE quad quad_make(const int8_t *n) { return (quad){two(n[0], n[2]), two(n[1], n[3])}; }
#endif

/* acc + the four products of each lane. */
INLINE vu vu_dot4(vu acc, quad a, vu b) {
#if defined(__AVX512VNNI__)
    return (vu)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)b, (__m512i)((vu){0} + a));
#elif defined(__AVXVNNI__)
    return (vu)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)b, (__m256i)((vu){0} + a));
#else
    const vu even = b & 0x00ff00ffu, odd = b >> 8 & 0x00ff00ffu;
#if defined(__AVX512F__)
    return acc + (vu)_mm512_madd_epi16((__m512i)even, (__m512i)((vu){0} + a.even))
               + (vu)_mm512_madd_epi16((__m512i)odd, (__m512i)((vu){0} + a.odd));
#elif defined(__AVX2__)
    return acc + (vu)_mm256_madd_epi16((__m256i)even, (__m256i)((vu){0} + a.even))
               + (vu)_mm256_madd_epi16((__m256i)odd, (__m256i)((vu){0} + a.odd));
#else
    return acc + (even & 0xffff) * (uint32_t)(int16_t)a.even + (even >> 16) * (uint32_t)((int32_t)a.even >> 16)
               + (odd & 0xffff) * (uint32_t)(int16_t)a.odd + (odd >> 16) * (uint32_t)((int32_t)a.odd >> 16);
#endif
#endif
}

enum { LINE = CV_PANEL * 4 }; /* bytes of four k of a panel in 8 bits, or of the low 4 bits of eight */

/* Numbers of 5 and 6 bits have the bits above the low 4 behind these. So many lines of low bits share one of high bits. */
INLINE int lines_each(const int bits) { return bits == 5 ? 4 : bits == 6 ? 2 : 1; }
INLINE int64_t low_lines(const int bits, const cv_linear *c) { return c->group / (bits == 8 ? 4 : 8); }
/* The high bits of the first or second four of the eight k of a line, above the low ones. */
INLINE vu high_bits(const int bits, const int second, vu rest) {
    return rest << (second ? 8 - bits : 4) & (bits == 5 ? 0x10101010u : 0x30303030u);
}

INLINE int64_t numbers_bytes(const cv_linear *c) { return c->group * 4 * c->bits; }
INLINE int64_t scale_bytes(const cv_linear *c) {
    return c->scale_dtype == CV_FLOAT32 ? 4 : c->scale_dtype == CV_INT8 ? 1 : 2;
}
INLINE int64_t group_bytes(const cv_linear *c) {
    return numbers_bytes(c) + CV_PANEL * (scale_bytes(c) + (c->has_zeros ? 2 : 0) + (c->has_minima ? 1 : 0));
}
INLINE int64_t factors_bytes(const cv_linear *c) { /* of CV_SUPER inputs */
    return c->scale_dtype == CV_INT8 ? CV_PANEL * 2 * (1 + c->has_minima) : 0;
}
INLINE int64_t integers_bytes(const cv_linear *c) { /* of a panel */
    return c->k / c->group * group_bytes(c) + c->k / CV_SUPER * factors_bytes(c);
}

/* What a row keeps for each group: its scale, and what the products change by the sum of its numbers, of `height` rows
 * side by side. That is the sum times half of -2^bits, which is added; the sum, if weights have zeros; or the scale times
 * the sum, a float, if they have minima. */
typedef struct { float *scales; int32_t *totals; int64_t height; } factors;
INLINE factors factors_at(char *p, int64_t groups, int64_t height) {
    return (factors){(float *)p, (int32_t *)p + groups * height, height};
}

/* numbers[k] of row `i`. A group with infinity or NaN has the scale NaN. */
INLINE void round_row(const int bf16, const void *x, const cv_linear *c, int8_t *numbers, factors f, int64_t i) {
    typedef int8_t vb __attribute__((vector_size(VL)));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    for (int64_t from = 0, g = 0; from < c->k; from += c->group, g++) {
        vf most = {0}, broken = {0};
        for (int64_t j = from; j < from + c->group; j += VL) {
            const vf v = vf_get(bf16, x, j);
            most = vf_max(most, (vf)((vu)v & 0x7fffffffu));
            broken += v - v;
        }
        const float highest = vf_highest(most), inverse = highest > 1e-30f ? 127.0f / highest : 0.0f;
        vi total = {0};
        for (int64_t j = from; j < from + c->group; j += VL) {
            const vi rounded = (vi)(vf_get(bf16, x, j) * inverse + magic) - (vi)vf_set(magic);
            const vb narrow = __builtin_convertvector(rounded, vb);
            memcpy(numbers + j, &narrow, sizeof narrow);
            total += rounded;
        }
        int32_t sum = 0;
        for (int l = 0; l < VL; l++) sum += total[l];
        const float scale = highest / 127.0f + vf_sum(broken), shift = scale * (float)sum;
        f.scales[g * f.height + i] = scale;
        if (c->has_minima) memcpy(f.totals + g * f.height + i, &shift, sizeof shift);
        else f.totals[g * f.height + i] = c->has_zeros ? sum : -sum * (1 << (c->bits - 1));
    }
}

/* What some columns of a panel have for a group. */
typedef struct { vf scales, minima; vi zeros; } of_columns;
/* tail: behind the group's numbers; factors: those of the group's block. */
INLINE of_columns columns_at(const cv_linear *c, const char *tail, const char *factors, int column) {
    of_columns of = {{0}, {0}, {0}};
    if (c->scale_dtype == CV_INT8) {
        of.scales = vf_from_i8(tail + column) * vf_from_f16(factors + column * 2);
        if (c->has_minima)
            of.minima = vf_from_i8(tail + CV_PANEL + column) * vf_from_f16(factors + (CV_PANEL + column) * 2);
    } else if (c->scale_dtype == CV_FLOAT16) {
        of.scales = vf_from_f16(tail + column * 2);
    } else {
        of.scales = vf_get(c->scale_dtype == CV_BFLOAT16, tail, column);
    }
    if (c->has_zeros) {
        typedef int16_t signed_vh __attribute__((vector_size(VL * 2)));
        signed_vh stored;
        memcpy(&stored, tail + CV_PANEL * scale_bytes(c) + column * 2, sizeof stored);
        of.zeros = __builtin_convertvector(stored, vi);
    }
    return of;
}

/* What is taken off the products. */
enum { MIDDLES, ZEROS, MINIMA };
INLINE int taken_from(const cv_linear *c) { return c->has_minima ? MINIMA : c->has_zeros ? ZEROS : MIDDLES; }

/* The dots of a row and a group begin with this. at: the group's place of the row. */
INLINE vu first_dots(const int taken, factors f, int64_t at) {
    return (vu){0} + (taken == MIDDLES ? (uint32_t)f.totals[at] : 0);
}

/* sum + what these dots are worth. */
INLINE vf add_group(const int taken, const of_columns *of, factors f, int64_t at, vu dots, vf sum) {
    if (taken == MINIMA) {
        float shift;
        memcpy(&shift, f.totals + at, sizeof shift);
        sum -= of->minima * shift;
    } else if (taken == ZEROS) {
        dots -= (vu)of->zeros * (uint32_t)f.totals[at];
    }
    return sum + __builtin_convertvector((vi)dots, vf) * (of->scales * f.scales[at]);
}

/* sums[m, VECS * VL] of m rows and some columns of a panel. */
INLINE void quads_span(const int bits, const int m, const quad *a, factors f, const cv_linear *c, const char *panel,
                       int column, const char *next, int64_t rate, float *sums) {
    enum { VECS = 2 };
    const int64_t lines = low_lines(bits, c), bytes = group_bytes(c), groups = c->k / c->group;
    const char *numbers = panel, *factors = panel + groups * bytes;
    const int taken = taken_from(c);
    vf whole[6][VECS];
    for (int i = 0; i < m; i++)
        for (int v = 0; v < VECS; v++) whole[i][v] = (vf){0};
    for (int64_t g = 0; g < groups; g++, numbers += bytes) {
        vu acc[6][VECS];
        for (int i = 0; i < m; i++)
            for (int v = 0; v < VECS; v++) acc[i][v] = first_dots(taken, f, g * f.height + i);
        const char *high_line = numbers + lines * LINE + column * 4;
        vu rest[VECS];
        for (int64_t line = 0; line < lines; line++, next += rate, a += bits == 8 ? m : 2 * m) {
            __builtin_prefetch(next, 0, 2);
            vu words[VECS];
            for (int v = 0; v < VECS; v++) words[v] = vu_load(numbers + line * LINE + (column + v * VL) * 4);
            if (bits == 8) {
                for (int i = 0; i < m; i++)
                    for (int v = 0; v < VECS; v++) acc[i][v] = vu_dot4(acc[i][v], a[i], words[v]);
            } else {
                vu low[VECS], high[VECS];
                for (int v = 0; v < VECS; v++) low[v] = words[v] & 0x0f0f0f0fu, high[v] = words[v] >> 4 & 0x0f0f0f0fu;
                if (bits != 4) {
                    const int first = line % lines_each(bits) == 0;
                    for (int v = 0; v < VECS; v++) {
                        rest[v] = first ? vu_load(high_line + v * VL * 4) : rest[v] >> 2 * (bits - 4);
                        low[v] |= high_bits(bits, 0, rest[v]), high[v] |= high_bits(bits, 1, rest[v]);
                    }
                    if (first) high_line += LINE;
                }
                for (int i = 0; i < m; i++)
                    for (int v = 0; v < VECS; v++)
                        acc[i][v] = vu_dot4(vu_dot4(acc[i][v], a[i], low[v]), a[m + i], high[v]);
            }
        }
        for (int v = 0; v < VECS; v++) {
            const char *of_block = factors + g * c->group / CV_SUPER * factors_bytes(c);
            const of_columns of = columns_at(c, numbers + numbers_bytes(c), of_block, column + v * VL);
            for (int i = 0; i < m; i++) whole[i][v] = add_group(taken, &of, f, g * f.height + i, acc[i][v], whole[i][v]);
        }
    }
    for (int i = 0; i < m; i++)
        for (int v = 0; v < VECS; v++) vf_store(sums + i * CV_PANEL + column + v * VL, whole[i][v]);
}

INLINE void quads_pack(const int8_t *numbers, int64_t k, int m, int i, quad *a) {
    for (int64_t s = 0; s < k / 4; s++) a[s * m + i] = quad_make(numbers + 4 * s);
}

#if defined(__AMX_INT8__)
enum { BYTES_K = 64 }; /* of a tile; groups of 32 are half a tile's lines */
/* For so few rows, unpacking for tiles takes longer than the products; half tiles take more of them. */
enum { FEW_ROWS = 4, FEW_ROWS_OF_HALVES = 16 };

INLINE int byte_tiles_fit(const cv_linear *c) {
    const int halves = c->group == BYTES_K / 2;
    return c->rows > (halves ? FEW_ROWS_OF_HALVES : FEW_ROWS) && c->k % BYTES_K == 0 && (halves || c->group % BYTES_K == 0);
}

/* Row i of packed numbers, as tiles_pack lays rows. */
INLINE void byte_tiles_pack(const int8_t *numbers, int64_t k, int i, char *a) {
    char *line = a + i / TILE_ROWS * TILE_ROWS * k + i % TILE_ROWS * TILE_LINE;
    for (int64_t j = 0; j < k; j += BYTES_K, line += TILE_BYTES) memcpy(line, numbers + j, TILE_LINE);
    __asm__ volatile("" ::: "memory"); /* the compiler does not see that tiles are read from it */
}

/* to[k / 4, 32, 4]: a panel's numbers of less than 8 bits, each in 8 bits. */
INLINE void unpack_panel(const int bits, const cv_linear *c, const char *panel, char *to) {
    const int64_t lines = low_lines(bits, c), each = lines_each(bits);
    for (int64_t g = 0; g < c->k / c->group; g++, panel += group_bytes(c))
        for (int64_t line = 0; line < lines; line++, to += 2 * LINE)
            for (int64_t i = 0; i < LINE; i += VL * 4) {
                const vu words = vu_load(panel + line * LINE + i);
                vu low = words & 0x0f0f0f0fu, high = words >> 4 & 0x0f0f0f0fu;
                if (bits != 4) {
                    const char *high_line = panel + (lines + line / each) * LINE + i;
                    const vu rest = vu_load(high_line) >> (int)(line % each) * 2 * (bits - 4);
                    low |= high_bits(bits, 0, rest), high |= high_bits(bits, 1, rest);
                }
                memcpy(to + i, &low, sizeof low);
                memcpy(to + LINE + i, &high, sizeof high);
            }
    __asm__ volatile("" ::: "memory");
}

/* sums[m, CV_PANEL] += what the dots [m, CV_PANEL] of a group are worth. */
INLINE void add_groups(const int taken, int m, const cv_linear *c, const char *panel, int64_t groups, int64_t g,
                       factors f, const int32_t *dots, float *sums) {
    const char *tail = panel + g * group_bytes(c) + numbers_bytes(c);
    const char *of_block = panel + groups * group_bytes(c) + g * c->group / CV_SUPER * factors_bytes(c);
    for (int j = 0; j < CV_PANEL; j += VL) {
        const of_columns of = columns_at(c, tail, of_block, j);
#pragma GCC unroll 4
        for (int i = 0; i < m; i++) {
            const int64_t at = g * f.height + i;
            float *sum = sums + i * CV_PANEL + j;
            const vu whole = vu_load(dots + i * CV_PANEL + j) + first_dots(taken, f, at);
            vf_store(sum, add_group(taken, &of, f, at, whole, vf_load(sum)));
        }
    }
}

/* sums[m, CV_PANEL] of m packed rows and a panel, of which `unpacked` are the numbers of less than 8 bits. A group's dots are read
 * after those of the next one are stored: a load waits until the stores of tiles have reached the cache. */
INLINE void byte_tiles_sums(const int taken, int m, const char *a, factors f, const cv_linear *c, const char *panel,
                            const char *unpacked, const char *next, int64_t rate, float *sums) {
    const int64_t steps = (c->group + BYTES_K - 1) / BYTES_K, bytes = group_bytes(c), groups = c->k / c->group;
    int32_t dots[2][ROWS_BY_TILES * CV_PANEL] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)(m * CV_PANEL) * sizeof *sums);
    for (int64_t g = 0; g < groups; g++) {
        const char *b = unpacked ? unpacked + g * c->group * CV_PANEL : panel + g * bytes;
        const int64_t k = g * c->group;
        const char *rows = a + k / BYTES_K * TILE_BYTES + k % BYTES_K, *lower = rows + TILE_ROWS * c->k;
        if (m > TILE_ROWS) sums_of(1, 1, rows, lower, b, steps, next, rate, 0, dots[g % 2]);
        else sums_of(1, 0, rows, lower, b, steps, next, rate, 0, dots[g % 2]);
        __asm__ volatile("" ::: "memory");
        next += steps * rate;
        if (g) add_groups(taken, m, c, panel, groups, g - 1, f, dots[(g - 1) % 2], sums);
    }
    add_groups(taken, m, c, panel, groups, groups - 1, f, dots[(groups - 1) % 2], sums);
}
#else
INLINE int byte_tiles_fit(const cv_linear *c) { return (void)c, 0; }
INLINE void byte_tiles_pack(const int8_t *numbers, int64_t k, int i, char *a) { (void)numbers, (void)k, (void)i, (void)a; }
INLINE void unpack_panel(const int bits, const cv_linear *c, const char *panel, char *to) {
    (void)bits, (void)c, (void)panel, (void)to;
}
INLINE void byte_tiles_sums(const int taken, int m, const char *a, factors f, const cv_linear *c, const char *panel,
                            const char *unpacked, const char *next, int64_t rate, float *sums) {
    (void)taken, (void)m, (void)a, (void)f, (void)c, (void)panel, (void)unpacked, (void)next, (void)rate, (void)sums;
}
#endif
#endif
