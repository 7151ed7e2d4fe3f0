/* Vectors of floats as wide as the instruction set this file is compiled for, and the
 * few operations the kernels need, written with GCC's (and clang's) vector extension so
 * that one source serves every instruction set. Only the bfloat16 dot product differs.
 */
#ifndef CONVEYOR_SIMD_H
#define CONVEYOR_SIMD_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
enum { VL = 16 };
#elif defined(__AVX__)
enum { VL = 8 };
#else
enum { VL = 4 };
#endif

#if defined(__AVX512F__)
#define CV_VECTOR_BYTES 64
#elif defined(__AVX__)
#define CV_VECTOR_BYTES 32
#else
#define CV_VECTOR_BYTES 16
#endif

typedef float vf __attribute__((vector_size(CV_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(CV_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(CV_VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(CV_VECTOR_BYTES / 2)));

INLINE vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vu vu_load(const void *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE vf vf_set(float x) { return x - (vf){0}; } /* x - 0 is x for every x; 0 + x is not */
INLINE vf vf_select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
#if defined(__AVX512F__)
INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vf_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); } /* b if one of them is NaN */
INLINE vf vf_min(vf a, vf b) { return vf_select(a < b, a, b); }
#endif

/* a * b + c, rounded once where there is an instruction for it: GCC fuses only what lies in one block. */
INLINE vf vf_fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vi vi_lanes(void) {
    vi lanes;
    for (int i = 0; i < VL; i++) lanes[i] = i;
    return lanes;
}

/* Every lane of v next to the lane `step` away from it. */
INLINE vf vf_exchange(vf v, int step) {
#if defined(__clang__)
    vf moved;
    for (int i = 0; i < VL; i++) moved[i] = v[i ^ step];
    return moved;
#else
    return __builtin_shuffle(v, vi_lanes() ^ step);
#endif
}
INLINE float vf_sum(vf v) {
    for (int step = VL / 2; step > 0; step /= 2) v += vf_exchange(v, step);
    return v[0];
}
INLINE float vf_highest(vf v) {
    for (int step = VL / 2; step > 0; step /= 2) v = vf_max(v, vf_exchange(v, step));
    return v[0];
}

/* Lanes of a and b: those of b are numbered from VL on. */
INLINE vu vu_pick(vu a, vu b, vi lanes) {
#if defined(__clang__)
    vu picked;
    for (int i = 0; i < VL; i++) picked[i] = lanes[i] < VL ? a[lanes[i]] : b[lanes[i] - VL];
    return picked;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
}
/* rows[i][j] becomes rows[j][i]: in each pass blocks of `step` trade places across the diagonal. */
INLINE void vu_transpose(vu rows[VL]) {
#pragma GCC unroll 4
    for (int step = 1; step < VL; step *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) {
            if (i & step) continue;
            const vi right = (vi_lanes() & step) != 0;
            const vu a = rows[i], b = rows[i + step];
            rows[i] = vu_pick(a, b, vi_lanes() + (right & (VL - step)));
            rows[i + step] = vu_pick(a, b, vi_lanes() + (right & VL) + (~right & step));
        }
}
/* Lane i becomes the sum of the i-th part of all `count` vectors, where each has VL / count parts, one after another. */
INLINE vf vf_sums(vf *v, const int count) {
#pragma GCC unroll 4
    for (int half = count / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) {
            const vi lanes = (vi_lanes() & -half) * 2 + (vi_lanes() & (half - 1));
            const vu a = (vu)v[2 * i], b = (vu)v[2 * i + 1];
            v[i] = (vf)vu_pick(a, b, lanes) + (vf)vu_pick(a, b, lanes + half);
        }
    return v[0];
}

/* bfloat16 is the upper half of a float. Rounding is to nearest even; NaN stays NaN. */
INLINE float bf16_to_f32(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE uint16_t f32_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE vf vf_from_bf16(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
INLINE vf vf_from_f16(const void *p) { /* no infinity, no NaN */
    vh h;
    memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    const vu wide = __builtin_convertvector(h, vu), bits = (wide & 0x7fff) << 13, sign = (wide & 0x8000) << 16;
    const vf normal = (vf)(bits + (112u << 23)), tiny = (vf)(bits + (113u << 23)) - 0x1p-14f;
    return (vf)((vu)vf_select((vi)bits < 1 << 23, tiny, normal) | sign);
#endif
}
INLINE vi vi_from_i8(const void *p) { /* GCC 12 would widen bytes lane by lane */
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    typedef int8_t vb __attribute__((vector_size(VL)));
    vb b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vi);
#endif
}
INLINE vf vf_from_i8(const void *p) { return __builtin_convertvector(vi_from_i8(p), vf); }
INLINE void vf_to_bf16(uint16_t *p, vf v) {
#if defined(__AVX512BF16__)
    const __m256bh h = _mm512_cvtneps_pbh((__m512)v); /* makes what is smaller than 1.2e-38 zero, as its products do */
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (bits >> 16) | 0x40;
    vi is_nan = v != v;
    vh h = __builtin_convertvector(((vu)is_nan & nan) | (~(vu)is_nan & rounded), vh);
#endif
    memcpy(p, &h, sizeof h);
}

/* Values stored as dtype, computed as float. `bf16` is a constant wherever these are inlined. */
INLINE vf vf_get(const int bf16, const void *p, int64_t i) {
    return bf16 ? vf_from_bf16((const uint16_t *)p + i) : vf_load((const float *)p + i);
}
INLINE void vf_put(const int bf16, void *p, int64_t i, vf v) {
    if (bf16) vf_to_bf16((uint16_t *)p + i, v);
    else vf_store((float *)p + i, v);
}
INLINE float f_get(const int bf16, const void *p, int64_t i) {
    return bf16 ? bf16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}
INLINE void f_put(const int bf16, void *p, int64_t i, float v) {
    if (bf16) ((uint16_t *)p)[i] = f32_to_bf16(v);
    else ((float *)p)[i] = v;
}
INLINE const void *at(const int bf16, const void *p, int64_t i) { return (const char *)p + i * (bf16 ? 2 : 4); }
INLINE void *at_mut(const int bf16, void *p, int64_t i) { return (char *)p + i * (bf16 ? 2 : 4); }

/* Two neighbouring bfloat16 values of the operand that is broadcast. Where the CPU multiplies
 * bfloat16 pairs they stay as they are; elsewhere they wait as floats. */
#if defined(__AVX512BF16__)
typedef uint32_t pair;
INLINE pair pair_make(uint16_t lo, uint16_t hi) { return (uint32_t)lo | (uint32_t)hi << 16; }
INLINE vf vf_dot2(vf acc, pair a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)((vu){0} + a), (__m512bh)b);
}
INLINE void pairs_of(const uint16_t *row, int64_t pairs, pair *to) { memcpy(to, row, (size_t)pairs * sizeof *to); }
INLINE void pairs_spread(pair *to, vu words) { memcpy(to, &words, sizeof words); }
/* Stores v as pairs, i values behind p: may be where v was read as floats, or before it. */
INLINE void pairs_put(void *p, int64_t i, vf v) { vf_to_bf16((uint16_t *)p + i, v); }
#else
typedef struct { float lo, hi; } pair;
INLINE pair pair_make(uint16_t lo, uint16_t hi) { return (pair){bf16_to_f32(lo), bf16_to_f32(hi)}; }
INLINE vf vf_dot2(vf acc, pair a, vu b) {
    acc += vf_set(a.lo) * (vf)(b << 16);
    return acc + vf_set(a.hi) * (vf)(b & 0xffff0000u);
}
INLINE void pairs_of(const uint16_t *row, int64_t pairs, pair *to) {
    for (int64_t i = 0; i < pairs; i++) to[i] = pair_make(row[2 * i], row[2 * i + 1]);
}
/* A pair of each word. */
INLINE void pairs_spread(pair *to, vu words) {
    const vu lo = words << 16, hi = words & 0xffff0000u;
    const vi half = vi_lanes() / 2, side = vi_lanes() % 2 * VL;
    const vu first = vu_pick(lo, hi, half + side), second = vu_pick(lo, hi, half + side + VL / 2);
    memcpy(to, &first, sizeof first);
    memcpy(to + VL / 2, &second, sizeof second);
}
INLINE void pairs_put(void *p, int64_t i, vf v) { vf_store((float *)p + i, v); }
#endif

/* e^x to about 2 units in the last place (Cephes expf); far below -87 it is 0. */
INLINE vf vf_exp(vf x) {
    vf bounded = vf_max(vf_set(-110.0f), vf_min(vf_set(89.0f), x)); /* NaN stays */
#if defined(__AVX512F__)
    vf n = (vf)_mm512_roundscale_ps((__m512)(bounded * 1.44269504088896341f), 0);
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = bounded * 1.44269504088896341f + magic;
    vf n = shifted - magic;
#endif
    vf r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = vf_set(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vi power = ((vi)shifted - (vi)vf_set(magic) + 127) << 23;
    return vf_select(x < -87.0f, (vf){0}, p * (vf)power); /* a product, so that NaN stays NaN */
#endif
}
INLINE vf vf_tanh(vf x) { return 1.0f - 2.0f / (vf_exp(2.0f * x) + 1.0f); }

/* Memory that a thread keeps between calls, so that no step pays for page faults. */
INLINE void *scratch_grow(void **memory, size_t *held, size_t wanted) {
    if (wanted > *held) {
        free(*memory);
        *held = (wanted + 4095) & ~(size_t)4095;
        *memory = aligned_alloc(4096, *held);
        if (!*memory) abort(); /* a few hundred KiB, in a layer tens of MiB: nothing sensible is left to do */
    }
    return *memory;
}
#endif
