/* Names of the kernels of one instruction set. Every .c file that includes simd.h is
 * compiled several times, each with its own -m flags and -DCV_ISA=<name>, which becomes
 * the suffix of its symbols. dispatch.c declares all of them through CV_DECLARE_KERNELS. */
#ifndef CONVEYOR_KERNELS_H
#define CONVEYOR_KERNELS_H
#include "conveyor_native.h"

typedef struct {
    void (*attention)(const cv_attention *);
    void (*conv)(const cv_conv *);
    void (*delta)(const cv_delta *);
    void (*gated_norm)(const cv_gated_norm *);
    void (*heads)(const cv_heads *);
    void (*kv_write)(const cv_kv_write *);
    void (*linear)(const cv_linear *);
    void (*rms_norm)(const cv_rms_norm *);
    void (*rope)(const cv_rope *);
    void (*sample)(const cv_sample *);
    void (*silu_mul)(const cv_silu_mul *);
    void (*ssd)(const cv_ssd *);
} cv_kernels;

const cv_kernels *cv_kernels_in_use(void);

#define CV_PASTE_(a, b) a##_##b
#define CV_PASTE(a, b) CV_PASTE_(a, b)
#define CV_NAME(base) CV_PASTE(base, CV_ISA)

#define CV_DECLARE_KERNELS(isa)                     \
    void cv_attention_##isa(const cv_attention *);  \
    void cv_conv_##isa(const cv_conv *);            \
    void cv_delta_##isa(const cv_delta *);          \
    void cv_gated_norm_##isa(const cv_gated_norm *); \
    void cv_heads_##isa(const cv_heads *);          \
    void cv_kv_write_##isa(const cv_kv_write *);    \
    void cv_linear_##isa(const cv_linear *);        \
    void cv_rms_norm_##isa(const cv_rms_norm *);    \
    void cv_rope_##isa(const cv_rope *);            \
    void cv_sample_##isa(const cv_sample *);        \
    void cv_silu_mul_##isa(const cv_silu_mul *);    \
    void cv_ssd_##isa(const cv_ssd *);

#define CV_KERNEL_TABLE(isa) CV_KERNEL_TABLE_WITH(isa, cv_linear_##isa)
#define CV_KERNEL_TABLE_WITH(isa, linear) \
    {cv_attention_##isa, cv_conv_##isa, cv_delta_##isa, cv_gated_norm_##isa, cv_heads_##isa, cv_kv_write_##isa, linear, \
     cv_rms_norm_##isa, cv_rope_##isa, cv_sample_##isa, cv_silu_mul_##isa, cv_ssd_##isa}
#endif
