/* Runs each CPU kernel on numbers that are the same everywhere, and prints a name and the results, a kernel a line.
 * The test compares the lines of two processors. Argument: float32 or bfloat16. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "conveyor_native.h"

enum { ROWS = 5, K = 96, N = 70, HEADS = 4, KV_HEADS = 2, DIM = 32, BLOCKS = 4, VALUES = 16384 };

static uint32_t state = 1;
static int dtype;

static float next(void) { /* in [-1, 1), rounded to what bfloat16 holds */
    state = state * 1664525u + 1013904223u;
    float x = (float)(int32_t)state / 2147483648.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0xffff0000u;
    memcpy(&x, &bits, 4);
    return x;
}

static void *fill(int64_t count) {
    void *of = calloc(VALUES, 4);
    for (int64_t i = 0; i < count; i++) {
        float x = next();
        if (dtype == CV_FLOAT32) ((float *)of)[i] = x;
        else memcpy((char *)of + 2 * i, (char *)&x + 2, 2);
    }
    return of;
}

static void print(const char *name, const void *of, int64_t count) {
    printf("%s", name);
    for (int64_t i = 0; i < count; i++) {
        float x = 0;
        if (dtype == CV_FLOAT32) x = ((const float *)of)[i];
        else memcpy((char *)&x + 2, (const char *)of + 2 * i, 2);
        printf(" %.6g", x);
    }
    printf("\n");
}

int main(int count, char **arguments) {
    if (count != 2 || cv_use_isa("generic")) return 1;
    dtype = strcmp(arguments[1], "float32") ? CV_BFLOAT16 : CV_FLOAT32;
    void *y = calloc(VALUES, 4), *packed = calloc(VALUES, 4), *x = fill(ROWS * 2 * K);
    cv_pack_linear(fill(N * K), packed, N, K, K, dtype);
    cv_linear linear = {x, packed, fill(N), fill(ROWS * N), y, ROWS, N, K, K, K, N, 0, dtype, 0, 0, 0};
    cv_run_linear(&linear);
    print("linear", y, ROWS * N);
    cv_rms_norm norm = {x, fill(K), y, ROWS, 1, K, K, K, dtype, 1e-5f, 1.0f};
    cv_run_rms_norm(&norm);
    print("rms_norm", y, ROWS * K);
    cv_silu_mul activation = {x, y, ROWS, K, 2 * K, dtype};
    cv_run_silu_mul(&activation);
    print("silu_mul", y, ROWS * K);
    cv_rope rope = {fill(ROWS * HEADS * DIM), fill(ROWS * DIM), fill(ROWS * DIM), y, ROWS, HEADS, DIM, DIM,
                    HEADS * DIM, DIM, dtype};
    cv_run_rope(&rope);
    print("rope", y, ROWS * HEADS * DIM);
    int64_t slots[ROWS], width = KV_HEADS * DIM;
    int32_t starts[] = {0, ROWS}, lengths[] = {ROWS}, tables[BLOCKS] = {2, 1, 0, 3};
    for (int i = 0; i < ROWS; i++) slots[i] = 2 * CV_BLOCK + i;
    void *keys = calloc(VALUES, 4), *values = calloc(VALUES, 4);
    cv_kv_write write = {fill(ROWS * width), fill(ROWS * width), keys, values, slots, DIM, width, DIM, width,
                         ROWS, KV_HEADS, DIM, DIM, dtype};
    cv_run_kv_write(&write);
    cv_attention attention = {.q = fill(ROWS * HEADS * DIM), .out = y, .k_cache = keys, .v_cache = values,
        .query_start = starts, .seq_lens = lengths, .block_tables = tables, .q_head_stride = DIM,
        .q_token_stride = HEADS * DIM, .table_stride = BLOCKS, .num_seqs = 1, .num_heads = HEADS,
        .num_kv_heads = KV_HEADS, .head_dim = DIM, .value_dim = DIM, .dtype = dtype, .causal = 1, .scale = 0.2f};
    cv_run_attention(&attention);
    print("attention", y, ROWS * HEADS * DIM);
    float draws[] = {0, -80, 0.5f, -80}, uniforms[] = {0.3f, 0.7f}, best[2];
    int64_t tokens[2];
    cv_sample sample = {x, draws, uniforms, best, tokens, 2, K, K, dtype, 1e-5f, 1 - 1e-6f};
    cv_run_sample(&sample);
    printf("sample %d %d\n", (int)tokens[0], (int)tokens[1]);
    return 0;
}
