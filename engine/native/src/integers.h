/* Products with weights of 4 to 8 bits (conveyor_native.h has their layout). Rows are rounded to 8 bits by group of k,
 * each group by its own largest number, so that an outlier makes only its own group coarse. The sum of a group is a
 * whole number, exact on every instruction set; only what is added up over groups is rounded. Where scales are whole
 * numbers too, rows are rounded by CV_SUPER, as llama.cpp's are, so that sums of so many inputs can be whole numbers.
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

/* Words of four numbers of a row, which are broadcast. Where 16 bits are multiplied there are two: the first and third
 * number, the second and fourth. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
INLINE int quad_words(const int bits) { return (void)bits, 1; }
#elif defined(__AVX2__)
INLINE int quad_words(const int bits) { return bits == 8 ? 2 : 1; }
#else
INLINE int quad_words(const int bits) { return (void)bits, 2; }
#endif
INLINE uint32_t two(int8_t lo, int8_t hi) { return (uint32_t)(uint16_t)lo | (uint32_t)(uint16_t)hi << 16; }
INLINE void quad_put(const int words, const int8_t *n, uint32_t *to) {
    if (words == 1) memcpy(to, n, 4);
    else to[0] = two(n[0], n[2]), to[1] = two(n[1], n[3]);
}

/* acc + the four products of each lane. */
INLINE vu vu_dot4(vu acc, const uint32_t *a, vu b) {
#if defined(__AVX512VNNI__)
    return (vu)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)b, (__m512i)((vu){0} + *a));
#elif defined(__AVXVNNI__)
    return (vu)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)b, (__m256i)((vu){0} + *a));
#else
    const vu even = b & 0x00ff00ffu, odd = b >> 8 & 0x00ff00ffu;
#if defined(__AVX512F__)
    return acc + (vu)_mm512_madd_epi16((__m512i)even, (__m512i)((vu){0} + a[0]))
               + (vu)_mm512_madd_epi16((__m512i)odd, (__m512i)((vu){0} + a[1]));
#elif defined(__AVX2__)
    return acc + (vu)_mm256_madd_epi16((__m256i)even, (__m256i)((vu){0} + a[0]))
               + (vu)_mm256_madd_epi16((__m256i)odd, (__m256i)((vu){0} + a[1]));
#else
    return acc + (even & 0xffff) * (uint32_t)(int16_t)a[0] + (even >> 16) * (uint32_t)((int32_t)a[0] >> 16)
               + (odd & 0xffff) * (uint32_t)(int16_t)a[1] + (odd >> 16) * (uint32_t)((int32_t)a[1] >> 16);
#endif
#endif
}

/* Without an instruction for four products, those of less than 8 bits are added up in both halves of a lane, for so many
 * quads until they are widened: 127 * 15 * 2 * 8, 127 * 31 * 2 * 4 and 127 * 63 * 2 * 2 are less than 2^15. */
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
INLINE int is_narrow(const int bits) { return bits != 8; }
INLINE int64_t narrow_quads(const int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : INT64_MAX; }
INLINE vu vu_narrow(const int bits, vu sums, const uint32_t *a, vu b) {
    if (bits == 8) return vu_dot4(sums, a, b);
#if defined(__AVX512F__)
    sums = (vu)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)b, (__m512i)((vu){0} + *a)));
#else
    sums = (vu)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)b, (__m256i)((vu){0} + *a)));
#endif
    __asm__("" : "+v"(sums)); /* otherwise GCC adds products to products first, and runs out of registers */
    return sums;
}
/* scale: in both halves of a lane. */
INLINE vu vu_widen(const int bits, vu sums, vu scale) {
    if (bits == 8) return sums;
#if defined(__AVX512F__)
    return (vu)_mm512_madd_epi16((__m512i)sums, (__m512i)scale);
#else
    return (vu)_mm256_madd_epi16((__m256i)sums, (__m256i)scale);
#endif
}
#else
INLINE int is_narrow(const int bits) { return (void)bits, 0; }
INLINE int64_t narrow_quads(const int bits) { return (void)bits, INT64_MAX; }
INLINE vu vu_narrow(const int bits, vu sums, const uint32_t *a, vu b) { return (void)bits, vu_dot4(sums, a, b); }
INLINE vu vu_widen(const int bits, vu sums, vu scale) { return (void)bits, (void)scale, sums; }
#endif

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

/* What is taken off the products: half of 2^bits for each number, a zero, or a minimum for each input. HALVES are
 * MIDDLES that are taken off in both halves of a lane. The sums of a group of Q6_K fit there: 127 * 32 * 8 at most. */
enum { MIDDLES, ZEROS, MINIMA, HALVES };
INLINE int taken_from(const cv_linear *c) {
    if (c->scale_dtype != CV_INT8) return c->has_zeros ? ZEROS : MIDDLES;
    return is_narrow(c->bits) && c->bits == 6 && c->group == 16 && !c->has_minima ? HALVES : MINIMA;
}

/* What a row keeps for each group: its scale, and what the products change by the sum of its numbers, of `height` rows
 * side by side. That is the sum times half of -2^bits, which is added, for HALVES in two parts; the sum, if weights have
 * zeros; or the scale times the sum, a float, if they have minima. */
typedef struct { float *scales; int32_t *totals; int64_t height; } factors;
INLINE factors factors_at(char *p, int64_t groups, int64_t height) {
    return (factors){(float *)p, (int32_t *)p + groups * height, height};
}

/* numbers[k] of row `i`. A group with infinity or NaN has the scale NaN. */
INLINE void round_row(const int bf16, const void *x, const cv_linear *c, int8_t *numbers, factors f, int64_t i) {
    typedef int8_t vb __attribute__((vector_size(VL)));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    const int64_t span = c->scale_dtype == CV_INT8 ? CV_SUPER : c->group;
    const int taken = taken_from(c);
    float inverse = 0, scale = 0;
    for (int64_t from = 0, at = i; from < c->k; from += c->group, at += f.height) {
        if (from % span == 0) {
            vf most = {0}, broken = {0};
            for (int64_t j = from; j < from + span; j += VL) {
                const vf v = vf_get(bf16, x, j);
                most = vf_max(most, (vf)((vu)v & 0x7fffffffu));
                broken += v - v;
            }
            const float highest = vf_highest(most);
            inverse = highest > 1e-30f ? 127.0f / highest : 0.0f;
            scale = highest / 127.0f + vf_sum(broken);
        }
        vi total = {0};
        for (int64_t j = from; j < from + c->group; j += VL) {
            const vi rounded = (vi)(vf_get(bf16, x, j) * inverse + magic) - (vi)vf_set(magic);
            const vb narrow = __builtin_convertvector(rounded, vb);
            memcpy(numbers + j, &narrow, sizeof narrow);
            total += rounded;
        }
        int32_t of_halves[2] = {0, 0}; /* of a quad's first two numbers and last two */
        for (int l = 0; l < VL; l++) of_halves[l / 2 % 2] += total[l];
        const int32_t sum = of_halves[0] + of_halves[1], middle = 1 << (c->bits - 1);
        const float shift = scale * (float)sum;
        f.scales[at] = scale;
        if (taken == MINIMA) memcpy(f.totals + at, &shift, sizeof shift);
        else if (taken == HALVES)
            f.totals[at] = (int32_t)((uint32_t)(-of_halves[1] * middle) << 16 | (-of_halves[0] * middle & 0xffff));
        else f.totals[at] = taken == ZEROS ? sum : -sum * middle;
    }
}

/* What some columns of a panel have for a group. */
typedef struct { vf scales, minima; vi zeros; } of_columns;
/* tail: behind the group's numbers; factors: those of the group's block. */
INLINE of_columns columns_at(const cv_linear *c, const char *tail, const char *factors, int column) {
    of_columns of = {{0}, {0}, {0}};
    if (c->scale_dtype == CV_INT8) {
        of.scales = vf_from_i8(tail + column) * vf_from_f16(factors + column * 2);
        of.minima = of.scales * (float)(1 << (c->bits - 1));
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

/* The dots of a row and a group begin with this. at: the group's place of the row. */
INLINE vu first_dots(const int taken, factors f, int64_t at) {
    return (vu){0} + (taken == MIDDLES ? (uint32_t)f.totals[at] : 0);
}

INLINE vf take_minima(const of_columns *of, factors f, int64_t at, vf sum) {
    float shift;
    memcpy(&shift, f.totals + at, sizeof shift);
    return vf_fma(of->minima, vf_set(-shift), sum);
}
INLINE vf add_dots(const of_columns *of, factors f, int64_t at, vu dots, vf sum) {
    return vf_fma(__builtin_convertvector((vi)dots, vf), of->scales * f.scales[at], sum);
}
/* sum + what these dots are worth. */
INLINE vf add_group(const int taken, const of_columns *of, factors f, int64_t at, vu dots, vf sum) {
    if (taken == MINIMA) sum = take_minima(of, f, at, sum);
    else if (taken == ZEROS) dots -= (vu)of->zeros * (uint32_t)f.totals[at];
    return add_dots(of, f, at, dots, sum);
}

#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)
/* sums[m, vecs * VL] of m rows and some columns of a panel. by_block: MINIMA or HALVES if dots are added up over
 * CV_SUPER, and otherwise -1. unpacked: the panel's numbers in 8 bits, if it reads them. */
INLINE void quads_span(const int bits, const int by_block, const int reads_unpacked, const int m, const int vecs,
                       const uint32_t *a, factors f, const cv_linear *c, const char *panel, const char *unpacked,
                       int column, const char *next, int64_t rate, float *sums) {
    const int64_t bytes = group_bytes(c), groups = c->k / c->group, together = CV_SUPER / c->group;
    const int64_t quads = c->group / 4, most = by_block == HALVES ? quads : narrow_quads(bits); /* added up narrowly */
    const int words = quad_words(bits), taken = taken_from(c), blocks = by_block >= 0;
    const int each = bits == 8 ? 1 : 2; /* quads of a line */
    const char *numbers = panel, *factors = panel + groups * bytes;
    vf whole[6][4];
    vu acc[6][4], rest[4];
    EACH(i, m) EACH(v, vecs) whole[i][v] = (vf){0};
    for (int64_t g = 0; g < groups; g++, numbers += bytes) {
        if (!blocks) EACH(i, m) EACH(v, vecs) acc[i][v] = first_dots(taken, f, g * f.height + i);
        else if (g % together == 0) EACH(i, m) EACH(v, vecs) acc[i][v] = (vu){0};
        const char *line = (reads_unpacked ? unpacked + g * quads * LINE : numbers) + column * 4;
        const char *high_line = line + low_lines(bits, c) * LINE, *tail = numbers + numbers_bytes(c);
        for (int64_t q = 0; q < quads;) {
            const int64_t end = quads - q < most ? quads : q + most;
            vu narrow[6][4];
            EACH(i, m) EACH(v, vecs)
                narrow[i][v] = (vu){0} + (by_block == HALVES ? (uint32_t)f.totals[g * f.height + i] : 0);
            for (; q < end; q += each, line += reads_unpacked ? 2 * LINE : LINE, next += rate) {
                if (m <= 2) bring(next, rate);
                else __builtin_prefetch(next, 0, 2);
                EACH(second, each) {
                    vu four[4];
                    EACH(v, vecs) {
                        four[v] = vu_load(line + (reads_unpacked ? second * LINE : 0) + v * VL * 4);
                        if (bits == 8 || reads_unpacked) continue;
                        four[v] = four[v] >> 4 * second & 0x0f0f0f0fu;
                        if (bits == 4) continue;
                        if (!second && q / 2 % lines_each(bits) == 0) rest[v] = vu_load(high_line + v * VL * 4);
                        else if (!second) rest[v] >>= 2 * (bits - 4);
                        four[v] |= high_bits(bits, second, rest[v]);
                    }
                    EACH(i, m) EACH(v, vecs) narrow[i][v] = vu_narrow(bits, narrow[i][v], a + words * i, four[v]);
                    a += words * m;
                }
                if (bits != 4 && q / 2 % lines_each(bits) == 0) high_line += LINE;
            }
            EACH(v, vecs) {
                const vu scale = blocks ? (vu)vi_from_i8(tail + column + v * VL) : (vu){0} + 1;
                EACH(i, m) acc[i][v] += vu_widen(bits, narrow[i][v], scale << 16 | (scale & 0xffff));
            }
        }
        const char *of_block = factors + g * c->group / CV_SUPER * factors_bytes(c);
        EACH(v, by_block == HALVES ? 0 : vecs) {
            const of_columns of = columns_at(c, tail, of_block, column + v * VL);
            if (by_block == MINIMA) EACH(i, m) whole[i][v] = take_minima(&of, f, g * f.height + i, whole[i][v]);
            else EACH(i, m) whole[i][v] = add_group(taken, &of, f, g * f.height + i, acc[i][v], whole[i][v]);
        }
        if (blocks && g % together == together - 1) EACH(v, vecs) {
            const of_columns of = {vf_from_f16(of_block + (column + v * VL) * 2), {0}, {0}};
            EACH(i, m) whole[i][v] = add_dots(&of, f, g * f.height + i, acc[i][v], whole[i][v]);
        }
    }
    EACH(i, m) EACH(v, vecs) vf_store(sums + i * CV_PANEL + column + v * VL, whole[i][v]);
}

INLINE void quads_pack(const int words, const int8_t *numbers, int64_t k, int m, int i, uint32_t *a) {
    for (int64_t s = 0; s < k / 4; s++) quad_put(words, numbers + 4 * s, a + (s * m + i) * words);
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

/* Rows computed at once, and how many of them leave registers for a whole panel. */
#if defined(__AVX512F__)
enum { QUAD_ROWS = 6, FEW_QUAD_ROWS = 6 };
#else
enum { QUAD_ROWS = 4, FEW_QUAD_ROWS = VL == 8 ? 2 : 0 };
#endif
/* Whether tiles of so many rows read a panel's numbers of less than 8 bits from where they were unpacked. */
INLINE int reads_unpacked(const int bits, const int64_t rows) { return is_narrow(bits) && rows > FEW_QUAD_ROWS; }

/* sums[m, CV_PANEL] of rounded rows, whose quads lie before their factors. */
INLINE void quads_of(const int bits, const int by_block, int m, const char *rows, const cv_linear *c, const char *panel,
                     const char *unpacked, const char *next, int64_t rate, float *sums) {
    const uint32_t *a = (const uint32_t *)rows;
    const factors f = factors_at((char *)(a + m * c->k / 4 * quad_words(bits)), c->k / c->group, m);
    for (int column = 0; column < CV_PANEL; column += m > FEW_QUAD_ROWS ? 2 * VL : CV_PANEL) {
        switch (m) {
#define CV_CASE(n) \
        case n: \
            quads_span(bits, by_block, reads_unpacked(bits, n), n, n > FEW_QUAD_ROWS ? 2 : CV_PANEL / VL, a, f, \
                       c, panel, unpacked, column, next, rate, sums); \
            break;
            CV_CASE(1) CV_CASE(2) CV_CASE(3) CV_CASE(4)
#if defined(__AVX512F__)
            CV_CASE(5) CV_CASE(6)
#endif
        }
    }
}

static void quad_sums(int m, const char *rows, const cv_linear *c, const char *panel, const char *unpacked,
                      const char *next, int64_t rate, float *sums) {
    const int by_block = is_narrow(c->bits) && c->scale_dtype == CV_INT8 ? taken_from(c) : -1;
    switch (c->bits) {
#undef CV_CASE
#define CV_CASE(bits) \
    case bits: \
        if (is_narrow(bits) && by_block == MINIMA) quads_of(bits, MINIMA, m, rows, c, panel, unpacked, next, rate, sums); \
        else if (is_narrow(bits) && bits == 6 && by_block == HALVES) \
            quads_of(bits, HALVES, m, rows, c, panel, unpacked, next, rate, sums); \
        else quads_of(bits, -1, m, rows, c, panel, unpacked, next, rate, sums); \
        break;
        CV_CASE(4) CV_CASE(5) CV_CASE(6) CV_CASE(8)
    }
}
#undef CV_CASE

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
INLINE void byte_tiles_sums(const int taken, int m, const char *a, factors f, const cv_linear *c, const char *panel,
                            const char *unpacked, const char *next, int64_t rate, float *sums) {
    (void)taken, (void)m, (void)a, (void)f, (void)c, (void)panel, (void)unpacked, (void)next, (void)rate, (void)sums;
}
#endif
#endif
