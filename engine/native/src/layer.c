/* A decoder layer in two calls, before and after attention, so that between its kernels there is no Python.
 * Compiled without any -m flag. Called from one thread at a time. */
#include <time.h>
#include "kernels.h"

enum { PRODUCTS, NORMS, HEADS, ACTIVATION, KINDS };
static double spent[KINDS];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Charges the time since `since` to the kind; returns the time. */
static double charge(int kind, double since) {
    const double end = now();
    spent[kind] += end - since;
    return end;
}

void cv_run_before_attention(const cv_before_attention *c) {
    const cv_kernels *k = cv_kernels_in_use();
    double t = now();
    k->rms_norm(&c->norm), t = charge(NORMS, t);
    k->linear(&c->qkv), t = charge(PRODUCTS, t);
    k->heads(&c->heads), charge(HEADS, t);
}

void cv_run_after_attention(const cv_after_attention *c) {
    const cv_kernels *k = cv_kernels_in_use();
    double t = now();
    k->linear(&c->out), t = charge(PRODUCTS, t);
    k->rms_norm(&c->norm), t = charge(NORMS, t);
    k->linear(&c->gate_up), t = charge(PRODUCTS, t);
    k->silu_mul(&c->activation), t = charge(ACTIVATION, t);
    k->linear(&c->down), charge(PRODUCTS, t);
}

void cv_take_layer_seconds(double seconds[KINDS]) {
    for (int i = 0; i < KINDS; i++) seconds[i] = spent[i], spent[i] = 0;
}
