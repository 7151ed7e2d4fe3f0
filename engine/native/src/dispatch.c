/* Chooses the instruction set once, and forwards. Compiled without any -m flag. */
#include <stddef.h>
#include <string.h>
#include "kernels.h"

CV_DECLARE_KERNELS(generic)
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
CV_DECLARE_KERNELS(avx2)
CV_DECLARE_KERNELS(avx512)
#if defined(CV_HAVE_AVX512BF16)
CV_DECLARE_KERNELS(avx512bf16)
#endif
#if defined(CV_HAVE_AMX)
void cv_linear_amx(const cv_linear *);
#endif
#if defined(CV_HAVE_AVX512VNNI)
void cv_linear_avx512vnni(const cv_linear *);
#endif
#if defined(CV_HAVE_AVXVNNI)
void cv_linear_avxvnni(const cv_linear *);
#endif

static uint64_t enabled_states(void) { /* what the operating system saves on a context switch (XCR0) */
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (uint64_t)d << 32 | a;
}
static int has_state(uint64_t bits) { return (enabled_states() & bits) == bits; }

static uint32_t leaf7(int sub, int reg) {
    uint32_t r[4] = {0};
    if (!__get_cpuid_count(7, (uint32_t)sub, &r[0], &r[1], &r[2], &r[3])) return 0;
    return r[reg];
}
static int has_avx2(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA) || !(c & bit_F16C)) return 0;
    return has_state(0x6) && (leaf7(0, 1) & 1u << 5);
}
static int has_avx512(void) { /* F, DQ, BW, VL */
    const uint32_t wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    return has_avx2() && has_state(0xe6) && (leaf7(0, 1) & wanted) == wanted;
}
static int has_avxvnni(void) { return has_avx2() && (leaf7(1, 0) & 1u << 4); }
static int has_avx512vnni(void) { return has_avx512() && (leaf7(0, 2) & 1u << 11); }
static int has_avx512bf16(void) { return has_avx512vnni() && (leaf7(1, 0) & 1u << 5); }

/* Linux gives a process tiles when it asks for them, and a sandbox may not. */
static int may_use_tiles(void) {
#if defined(SYS_arch_prctl)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA);
#else
    return 0;
#endif
}
static int has_amx(void) { /* TILE, BF16, INT8 */
    const uint32_t wanted = 1u << 24 | 1u << 22 | 1u << 25;
    return has_avx512bf16() && has_state(0x60000) && (leaf7(0, 3) & wanted) == wanted && may_use_tiles();
}
#endif

static int always(void) { return 1; }

/* Best first. */
static const struct { const char *name; int (*supported)(void); cv_kernels kernels; } TABLE[] = {
#if defined(__x86_64__)
#if defined(CV_HAVE_AMX)
    {"amx", has_amx, CV_KERNEL_TABLE_WITH(avx512bf16, cv_linear_amx)},
#endif
#if defined(CV_HAVE_AVX512BF16)
    {"avx512bf16", has_avx512bf16, CV_KERNEL_TABLE(avx512bf16)},
#endif
#if defined(CV_HAVE_AVX512VNNI)
    {"avx512vnni", has_avx512vnni, CV_KERNEL_TABLE_WITH(avx512, cv_linear_avx512vnni)},
#endif
    {"avx512", has_avx512, CV_KERNEL_TABLE(avx512)},
#if defined(CV_HAVE_AVXVNNI)
    {"avxvnni", has_avxvnni, CV_KERNEL_TABLE_WITH(avx2, cv_linear_avxvnni)},
#endif
    {"avx2", has_avx2, CV_KERNEL_TABLE(avx2)},
#endif
    {"generic", always, CV_KERNEL_TABLE(generic)},
};
static int chosen = -1;

static int choice(void) {
    if (chosen < 0) {
        int best = 0; /* nobody else may see one that is not supported */
        while (!TABLE[best].supported()) best++;
        chosen = best;
    }
    return chosen;
}

const cv_kernels *cv_kernels_in_use(void) { return &TABLE[choice()].kernels; }

int32_t cv_abi_version(void) { return CV_ABI_VERSION; }
const char *cv_isa(void) { return TABLE[choice()].name; }
int32_t cv_use_isa(const char *name) {
    for (int i = 0; i < (int)(sizeof TABLE / sizeof TABLE[0]); i++)
        if (!strcmp(TABLE[i].name, name) && TABLE[i].supported()) return chosen = i, 0;
    return -1;
}

void cv_run_attention(const cv_attention *c) { cv_kernels_in_use()->attention(c); }
void cv_run_kv_write(const cv_kv_write *c) { cv_kernels_in_use()->kv_write(c); }
void cv_run_linear(const cv_linear *c) { cv_kernels_in_use()->linear(c); }
void cv_run_linears(const cv_linears *c) {
    const cv_kernels *kernels = cv_kernels_in_use();
#pragma omp parallel for schedule(dynamic, 1) /* each product then has one thread */
    for (int64_t i = 0; i < c->count; i++) {
        cv_linear each = c->first;
        each.x = (const char *)each.x + i * c->x_step, each.weight = (const char *)each.weight + i * c->weight_step;
        each.y = (char *)each.y + i * c->y_step;
        kernels->linear(&each);
    }
}
void cv_run_conv(const cv_conv *c) { cv_kernels_in_use()->conv(c); }
void cv_run_delta(const cv_delta *c) { cv_kernels_in_use()->delta(c); }
void cv_run_ssd(const cv_ssd *c) { cv_kernels_in_use()->ssd(c); }
void cv_run_gated_norm(const cv_gated_norm *c) { cv_kernels_in_use()->gated_norm(c); }
void cv_run_rms_norm(const cv_rms_norm *c) { cv_kernels_in_use()->rms_norm(c); }
void cv_run_rope(const cv_rope *c) { cv_kernels_in_use()->rope(c); }
void cv_run_sample(const cv_sample *c) { cv_kernels_in_use()->sample(c); }
void cv_run_silu_mul(const cv_silu_mul *c) { cv_kernels_in_use()->silu_mul(c); }

void cv_pack_linear(const void *w, void *packed, int64_t n, int64_t k, int64_t w_stride, int32_t dtype) {
    const int64_t panels = (n + CV_PANEL - 1) / CV_PANEL, even = (k + 1) / 2 * 2;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t j = 0; j < CV_PANEL; j++) {
            const int64_t row = p * CV_PANEL + j;
            if (dtype == CV_BFLOAT16) {
                uint16_t *to = (uint16_t *)packed + p * even * CV_PANEL;
                for (int64_t i = 0; i < even; i++)
                    to[(i / 2 * CV_PANEL + j) * 2 + i % 2] =
                        row < n && i < k ? ((const uint16_t *)w)[row * w_stride + i] : 0;
            } else {
                float *to = (float *)packed + p * k * CV_PANEL;
                for (int64_t i = 0; i < k; i++)
                    to[i * CV_PANEL + j] = row < n ? ((const float *)w)[row * w_stride + i] : 0.0f;
            }
        }
}
