/* Scores of keys that lie as rows, as values do: those of latent attention, whose values are the first numbers of its
 * keys. A vector holds one key's dimensions, or, for bfloat16, those of two keys. Included by attention.c.
 */
#ifndef CONVEYOR_LATENT_H
#define CONVEYOR_LATENT_H
#include "conveyor_native.h"
#include "simd.h"

/* Sums of products for one vector of bfloat16 words: of its two keys apart (2), or in halves of one vector (1). */
#if defined(__AVX512BF16__)
enum { SIDES = 1 };
INLINE void dot_two(vf *acc, const float *q, vu words) {
    const vu from = (vu)(vi_lanes() % (VL / 2) * 4 + vi_lanes() / (VL / 2)); /* two even halves, then two odd ones */
    const __m512i apart = _mm512_permutexvar_epi16((__m512i)(from | (from + 2) << 16), (__m512i)words);
    *acc = (vf)_mm512_dpbf16_ps((__m512)*acc, (__m512bh)vu_load(q), (__m512bh)apart);
}
#else
enum { SIDES = 2 };
INLINE void dot_two(vf *acc, const float *q, vu words) {
    const vf values = vf_load(q);
    acc[0] += values * (vf)(words << 16);
    acc[1] += values * (vf)(words & 0xffff0000u);
}
#endif
#if defined(__AVX512F__)
enum { SPAN = 4 }; /* sums of one row that are in registers at once */
#else
enum { SPAN = 2 };
#endif

/* The query in the form that the scores need, `width` words: floats, or for dot_two each 16 dimensions twice. */
INLINE void query_across(const int bf16, const void *q, int64_t dim, int64_t width, float *to) {
    for (int64_t d = 0; d < width; d++) {
        const uint16_t half = bf16 && d < dim ? ((const uint16_t *)q)[d] : 0;
        if (bf16 && SIDES == 1) {
            uint16_t *twice = (uint16_t *)to + d / VL * 2 * VL + d % VL;
            twice[0] = twice[VL] = half;
        } else {
            to[d] = bf16 ? bf16_to_f32(half) : d < dim ? ((const float *)q)[d] : 0.0f;
        }
    }
}

/* scores[m rows, 16] = q k^T for one block; rows of scores are `stride` apart, those of q and of keys `width`. */
INLINE void score_rows(const int bf16, const int m, const float *q, const float *block, int64_t width, int64_t stride,
                       float *scores) {
    const int sides = bf16 ? SIDES : 1, n = SPAN / sides, lines = bf16 ? CV_BLOCK / 2 : CV_BLOCK;
    const int each = lines * sides * VL / CV_BLOCK; /* sums that become one vector of scores */
    vf sums[ROWS][CV_BLOCK];
    for (int line = 0; line < lines; line += n) {
        vf acc[ROWS][SPAN];
        for (int i = 0; i < m; i++)
            for (int j = 0; j < SPAN; j++) acc[i][j] = (vf){0};
        for (int64_t d = 0; d < width; d += VL)
            for (int j = 0; j < n; j++) {
                const float *keys = block + (line + j) * width + d;
                for (int i = 0; i < m; i++) {
                    if (bf16) dot_two(&acc[i][j * sides], q + i * width + d, vu_load(keys));
                    else acc[i][j] += vf_load(q + i * width + d) * vf_load(keys);
                }
            }
        for (int i = 0; i < m; i++)
            for (int j = 0; j < SPAN; j++) sums[i][line * sides + j] = acc[i][j];
    }
    for (int i = 0; i < m; i++)
        for (int v = 0; v < CV_BLOCK / VL; v++) vf_store(scores + i * stride + v * VL, vf_sums(sums[i] + v * each, each));
}
#endif
