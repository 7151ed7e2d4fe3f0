/* The C interface of Conveyor's CPU kernels, called from Python through ctypes
 * (engine/conveyor_engine/execution/native/__init__.py mirrors every declaration here).
 *
 * Rules of the interface: plain C, no Python, no torch. The caller owns every
 * buffer and has checked every shape; a kernel checks nothing and returns nothing.
 * dtype is one of CV_FLOAT32, CV_BFLOAT16. Strides count elements.
 *
 * Kernels are compiled once per instruction set (see kernels.h); dispatch.c picks
 * the best one that the CPU and the operating system support when it is first used.
 */
#ifndef CONVEYOR_NATIVE_H
#define CONVEYOR_NATIVE_H
#include <stdint.h>

#define CV_ABI_VERSION 19
#define CV_EXPORT __attribute__((visibility("default")))

enum { CV_FLOAT32 = 0, CV_BFLOAT16 = 1 };
/* Further types, of scales only. */
enum { CV_FLOAT16 = 2, CV_INT8 = 3 };

/* Tokens in a KV block. Part of the layout, so it is not a parameter. */
enum { CV_BLOCK = 16 };
/* Output columns in one panel of packed weights. */
enum { CV_PANEL = 32 };
/* Values of k that share the factor of scales in CV_INT8. */
enum { CV_SUPER = 256 };

/* Paged attention over sequences packed one after another.
 *   q        rows of head_dim values at q + head * q_head_stride + token * q_token_stride
 *   out      [tokens, num_heads, value_dim], contiguous
 *   k_cache  bfloat16: [block, kv_head, ceil(head_dim / 2), 16, 2]; float32: [block, kv_head, head_dim', 16],
 *            head_dim' = head_dim rounded up to even
 *   v_cache  bfloat16: [block, kv_head, 8, width, 2]; float32: [block, kv_head, 16, width],
 *            width = value_dim rounded up to 16. If k_cache is null, the values are the first value_dim numbers of the
 *            keys, which v_cache has in rows of head_dim rounded up to 16 (latent attention)
 *   query_start [num_seqs + 1], seq_lens [num_seqs] (tokens in the cache, the queries included),
 *   block_tables [num_seqs, table_stride]
 *   causal   1: a query sees the tokens up to itself; 0: its whole sequence
 *   window   it sees no further back than its last `window` tokens, itself included, nor, if not causal, further ahead;
 *            0 = all
 *   softcap  scores become softcap * tanh(score / softcap); 0 = off
 *   sinks    [num_heads] scores without a value, one in each softmax; null = none
 *   ends     [tokens] where the keys end that each query sees, in place of `causal`; not descending within a sequence,
 *            nor past seq_lens; null = by `causal` */
typedef struct {
    const void *q;
    void *out;
    const void *k_cache, *v_cache;
    const int32_t *query_start, *seq_lens, *block_tables;
    const float *sinks;
    const int32_t *ends;
    int64_t q_head_stride, q_token_stride, table_stride;
    int64_t num_seqs, num_heads, num_kv_heads, head_dim, value_dim;
    int32_t dtype, causal, window;
    float scale, softcap;
} cv_attention;

/* Writes keys and values of `tokens` tokens to their slots (block * 16 + offset; a negative slot is skipped). If k_cache
 * is null, writes the keys to v_cache, see cv_attention. */
typedef struct {
    const void *k, *v;
    void *k_cache, *v_cache;
    const int64_t *slots;
    int64_t k_head_stride, k_token_stride, v_head_stride, v_token_stride;
    int64_t tokens, num_kv_heads, head_dim, value_dim;
    int32_t dtype;
} cv_kv_write;

/* y[rows, n] = x[rows, k] W^T + bias + residual, W packed by cv_pack_linear; bias and residual may be null. The residual
 * lies as y does, and may be y. If `added` is not null, y gets what it describes too. W may be a part of a packed matrix:
 * panels of it, or the values from an even one on of all panels. packed_k is the k of the packed matrix. dtype is that of
 * x, y, bias and residual.
 *
 * With bits, W is whole numbers: scale * (number - zero), with a scale for each output and `group` of k, which k is a
 * multiple of. x is then rounded to 8 bits by row and group, or 256 of k with scales in CV_INT8. W lies as
 * [panel, group of k]:
 *   numbers  8 bits: [group / 4, 32, 4]; 4 bits: [group / 8, 32, 4], of which the low half is 4 k and the high half the
 *            next 4; 5 and 6 bits: so the low 4 bits, and then the others, [group / 32, 32, 4] with 1 bit of 8 times 4 k,
 *            lowest first, or [group / 16, 32, 4] with 2 bits of 4 times 4 k
 *   scales   [32], of scale_dtype
 *   zeros    int16 [32] if has_zeros; otherwise all are half of 2^bits
 *   minima   int8 [32] if has_minima: W is scale * number - minimum, and has no zeros
 * Scales and minima in CV_INT8 are multiplied by factors, which lie behind the groups of a panel:
 *   factors  float16 [k / 256, 1 + has_minima, 32] */
typedef struct {
    const void *x, *weight, *bias, *residual;
    void *y;
    int64_t rows, n, k, packed_k, x_stride, y_stride, group;
    int32_t dtype, bits, scale_dtype, has_zeros, has_minima;
    const struct cv_added *added;
} cv_linear;

/* LoRA adapters of a product: the rows' inputs, already reduced, and what they are multiplied by. Each row has an adapter,
 * whose columns begin in some panel and end in the same or a later one. Adapters change `slices` of the outputs.
 *   own     [rows, 2]: the first column of the row's adapter and the one behind its last (equal: it has none)
 *   kept    [rows, panels, slices, 32]: the columns of the row's panels, from the one in which its own begin; others' are 0
 *   ups     for each slice B^T, packed [size of the slice, columns] so that its panels are those of the product: before
 *           and behind the slice, its first and last panel are 0
 *   outputs where each slice begins in the product's outputs */
typedef struct cv_added {
    const int32_t *own;
    const void *kept;
    const cv_linear *ups;
    const int64_t *outputs;
    int64_t slices, panels;
} cv_added;

/* `count` products of one shape. From each to the next, x, weight and y are so many bytes further on. */
typedef struct {
    cv_linear first;
    int64_t count, x_step, weight_step, y_step;
} cv_linears;

/* LoRA adapters of a product, side by side in `columns` columns, a whole number of panels. Adapters change `slices` of
 * the outputs, in which they have matrices of their own. Of the products, the caller sets weight, n, k, packed_k and
 * dtype.
 *   down    A^T, packed [columns / 32, slices, 32] outputs, so that a panel of all slices is in one piece
 *   ups, outputs as in cv_added */
typedef struct {
    cv_linear down;
    const cv_linear *ups;
    const int64_t *outputs;
    int64_t slices;
} cv_adapters;

/* Neighbouring tokens, and the panels that they use: each from the first to the one behind the last. */
typedef struct {
    int64_t first_token, end_token, first_panel, end_panel;
} cv_share;

/* The columns that a step's tokens use: own [tokens, 2], each token's first column and the one behind its last (equal:
 * it has none). The shares hold all of them; several may have the same tokens. A token's columns lie in at most so many
 * panels. */
typedef struct {
    const int32_t *own;
    const cv_share *shares;
    int64_t num_shares, panels;
} cv_columns;

/* Computes the product and what the rows' adapters add to it; nothing if no row has one. */
typedef struct {
    const cv_linear *product;
    const cv_adapters *adapters;
    const cv_columns *columns;
} cv_adapt;

/* y = x / rms(x) * (offset + weight) over the last dimension of x[outer, inner, size]; y is contiguous. */
typedef struct {
    const void *x, *weight;
    void *y;
    int64_t outer, inner, size, outer_stride, inner_stride;
    int32_t dtype;
    float eps, offset;
} cv_rms_norm;

/* Rotates the first `rotary` of head_dim values of every head, halves paired (the GPT-NeoX form).
 *   x rows at x + token * token_stride + head * head_stride; cos, sin [tokens, rotary]; y [tokens, heads, head_dim] */
typedef struct {
    const void *x, *cos, *sin;
    void *y;
    int64_t tokens, heads, head_dim, rotary, token_stride, head_stride;
    int32_t dtype;
} cv_rope;

/* Norms the heads of queries and keys, each by its own weight (null: not), and rotates them as cv_rope does, in place.
 *   qkv [tokens, heads + 2 * kv_heads, head_dim]: queries, keys, values; cos, sin [tokens, rotary] */
typedef struct {
    void *qkv;
    const void *q_weight, *k_weight, *cos, *sin;
    int64_t tokens, heads, kv_heads, head_dim, rotary;
    int32_t dtype;
    float eps, offset;
} cv_heads;

/* y[rows, size] = silu(gate) * up, gate = x[:, :size], up = x[:, size:2 * size]. */
typedef struct {
    const void *x;
    void *y;
    int64_t rows, size, x_stride;
    int32_t dtype;
} cv_silu_mul;

/* Adds up the gated MLPs (experts) that a router chose for each token: y[t] = sum of shares[t, j] * expert chosen[t, j]
 * of x[t]. Each token's experts differ; a number that no expert has adds nothing.
 *   x, y     [tokens, hidden], contiguous
 *   chosen, shares [tokens, per_token]
 *   gate_up, down  the products of the first expert, [2 * size, hidden] and [hidden, size], with all that they need but
 *                  x, y and rows; the weights of each further expert lie so many bytes behind */
typedef struct {
    const void *x;
    const int64_t *chosen;
    const float *shares;
    void *y;
    int64_t tokens, experts, per_token, gate_up_bytes, down_bytes;
    cv_linear gate_up, down;
} cv_experts;

/* best[r] = the largest of logits[r]; infinity if one is NaN. tokens[r] = the first that is as large, or, where
 * temperature >= greedy_below, where the cumulated exp(x), x = (logits[r] - best[r]) / temperature, pass
 * uniforms[r] * below_one of their sum; x < floor counts nothing. Any token where best[r] is not finite.
 *   draws [rows, 2]: temperature, floor */
typedef struct {
    const void *logits;
    const float *draws, *uniforms;
    float *best;
    int64_t *tokens;
    int64_t rows, vocab_size, row_stride;
    int32_t dtype;
    float greedy_below, below_one;
} cv_sample;

/* The sequences of a step, packed one after another, in a layer that keeps a state for each row.
 *   query_start [num_seqs + 1], rows [num_seqs] (where a sequence's state is), fresh [num_seqs] (1: it begins with zeros)
 * The sizes below are multiples of 16, those of heads and states at most 512. */
typedef struct {
    const int32_t *query_start;
    const int64_t *rows;
    const uint8_t *fresh;
    int64_t num_seqs;
} cv_state_rows;

/* y[tokens, channels] = after * act(bias + the causal convolution of x * before), act SiLU or none.
 *   x, before, after [tokens, channels] with x_stride; before, after and bias may be null
 *   weight [taps, channels], at most 8 taps; state [row, taps, channels], the last inputs */
typedef struct {
    cv_state_rows rows;
    const void *x, *before, *after;
    const float *weight, *bias;
    void *state, *y;
    int64_t channels, taps, x_stride;
    int32_t dtype, silu;
} cv_conv;

/* The gated delta rule, y [tokens, value_heads, value_dim]; queries and keys get the norm 1.
 *   qkv [tokens, qkv_stride]: queries and keys of key_heads * key_dim, values of value_heads * value_dim
 *   a, b [tokens, value_heads]: the state is multiplied by exp(decay * softplus(a + dt_bias)); a token counts
 *   beta_scale * sigmoid(b)
 *   state [row, value_heads, key_dim, value_dim] */
typedef struct {
    cv_state_rows rows;
    const void *qkv, *a, *b;
    const float *decay, *dt_bias;
    float *state;
    void *y;
    int64_t qkv_stride, a_stride, b_stride, key_heads, value_heads, key_dim, value_dim;
    int32_t dtype;
    float beta_scale;
} cv_delta;

/* Mamba-2, y [tokens, heads, head_dim].
 *   xbc [tokens, xbc_stride]: values of heads * head_dim, B and C of groups * size; dt [tokens, heads]
 *   decay, direct, dt_bias [heads]; state [row, heads, head_dim, size]
 *   step_min, step_max bound softplus(dt + dt_bias), but not that of a single token which goes on, as in transformers */
typedef struct {
    cv_state_rows rows;
    const void *xbc, *dt;
    const float *decay, *direct, *dt_bias;
    float *state;
    void *y;
    int64_t xbc_stride, dt_stride, heads, head_dim, groups, size;
    int32_t dtype;
    float step_min, step_max;
} cv_ssd;

/* y[tokens, groups, size] = the RMS norm of each group of x, times SiLU(gate) after the norm (norm_first) or before.
 *   gate [tokens, groups * size] with gate_stride; weight [size] of all groups (weight_stride 0) or [groups, size] */
typedef struct {
    const void *x, *gate;
    const float *weight;
    void *y;
    int64_t tokens, groups, size, gate_stride, weight_stride;
    int32_t dtype, norm_first;
    float eps;
} cv_gated_norm;

/* A decoder layer up to attention, and from there; each takes what the one before it gives. columns is null in a step
 * without adapters; a product that no adapter changes has none. */
typedef struct {
    cv_rms_norm norm;
    cv_linear qkv;
    cv_heads heads;
    const cv_adapters *qkv_adapters;
    const cv_columns *columns;
} cv_before_attention;

typedef struct {
    cv_linear out;
    cv_rms_norm norm;
    cv_linear gate_up;
    cv_silu_mul activation;
    cv_linear down;
    const cv_adapters *out_adapters, *gate_up_adapters, *down_adapters;
    const cv_columns *columns;
} cv_after_attention;

/* A step's tokens in the paged cache: slots [tokens] as for cv_kv_write, the rest as for cv_attention. */
typedef struct {
    const int64_t *slots;
    const int32_t *query_start, *seq_lens, *block_tables;
    int64_t tokens, num_seqs, table_stride;
} cv_step;

/* y[tokens, hidden] = the layer of x, with keys and values in the cache. Of the parts, the caller sets what stays the
 * same from step to step, the caches among it; the kernels set what they hand to each other. y may be x. */
typedef struct {
    cv_before_attention before;
    cv_kv_write write;
    cv_attention attention;
    cv_after_attention after;
    const cv_step *step;
    int64_t table; /* the step's, see cv_layers */
    const void *x;
    void *y;
} cv_layer;

/* y[tokens, hidden] = the layers of x, one after the other; cos, sin [tokens, rotary] are each one's rotation. */
typedef struct {
    cv_layer *const *layers;
    const cv_step *steps; /* one for each block table */
    const cv_columns *columns; /* may be null, as above */
    const void *x, *cos, *sin;
    void *y;
    int64_t count, rotary;
} cv_layers;

CV_EXPORT int32_t cv_abi_version(void);
/* Name of the instruction set in use: generic, avx2, avxvnni, avx512, avx512vnni, avx512bf16 or amx. */
CV_EXPORT const char *cv_isa(void);
/* Uses another instruction set (for tests); -1 when it was not compiled or the CPU lacks it. */
CV_EXPORT int32_t cv_use_isa(const char *name);

CV_EXPORT void cv_run_attention(const cv_attention *);
CV_EXPORT void cv_run_kv_write(const cv_kv_write *);
CV_EXPORT void cv_run_linear(const cv_linear *);
CV_EXPORT void cv_run_linears(const cv_linears *);
CV_EXPORT void cv_run_adapt(const cv_adapt *);
CV_EXPORT void cv_run_rms_norm(const cv_rms_norm *);
CV_EXPORT void cv_run_rope(const cv_rope *);
CV_EXPORT void cv_run_sample(const cv_sample *);
CV_EXPORT void cv_run_silu_mul(const cv_silu_mul *);
CV_EXPORT void cv_run_conv(const cv_conv *);
CV_EXPORT void cv_run_delta(const cv_delta *);
CV_EXPORT void cv_run_ssd(const cv_ssd *);
CV_EXPORT void cv_run_gated_norm(const cv_gated_norm *);
CV_EXPORT void cv_run_experts(const cv_experts *);
CV_EXPORT void cv_run_before_attention(const cv_before_attention *);
CV_EXPORT void cv_run_after_attention(const cv_after_attention *);
CV_EXPORT void cv_run_layers(const cv_layers *);
/* Seconds of products, norms, heads, activation, cache write and attention in the three calls above, since this was
 * last called. */
CV_EXPORT void cv_take_layer_seconds(double seconds[6]);

/* Packs W[n, k] (row stride in elements) into ceil(n / 32) panels of 32 columns, zero padded:
 * bfloat16 [panel, ceil(k / 2), 32, 2], float32 [panel, k, 32]. */
CV_EXPORT void cv_pack_linear(const void *w, void *packed, int64_t n, int64_t k, int64_t w_stride, int32_t dtype);
#endif
