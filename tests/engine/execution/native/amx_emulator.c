/* AMX on a CPU that has AVX512 alone: there its instructions raise SIGILL, whose handler in this file executes them on
 * tiles in memory, as Intel defines them (Software Developer's Manual, volume 2). Those that the kernels use are known.
 * Whatever else comes, and whatever a CPU with AMX would refuse, ends the process with a message.
 *
 * A thread's tiles are found by a pointer in static thread memory, which a handler may read; 8 KiB would not fit there.
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, LINE = 64 };
enum { NONE, X66, XF3, XF2 }; /* the prefix that a VEX encoding stands for */

typedef struct {
    int configured;
    uint16_t line_bytes[TILES];
    uint8_t rows[TILES];
    uint8_t data[TILES][ROWS][LINE];
} tiles;

typedef struct { /* of VEX.128.0F38.W0, behind whose opcode stands a ModRM byte */
    const uint8_t *start, *modrm;
    int prefix, opcode, mod, reg, rm, third;
    int x_is_set, b_is_set; /* the registers of an address may be r8 to r15 */
    int64_t *registers;
} instruction;

static __thread tiles *mine __attribute__((tls_model("initial-exec")));
static int messages = STDERR_FILENO;
static int64_t products, in_use;

static void __attribute__((noreturn, format(printf, 2, 3))) fail(const instruction *i, const char *why, ...) {
    char text[256];
    va_list values;
    va_start(values, why);
    int n = vsnprintf(text, sizeof text, why, values);
    va_end(values);
    dprintf(messages, "emulated AMX: %.*s; the instruction:", n, text);
    for (int b = 0; b < 10; b++) dprintf(messages, " %02x", i->start[b]);
    dprintf(messages, "\n");
    _exit(1);
}

static int64_t value_of(const instruction *i, int number) {
    static const int ORDER[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return i->registers[ORDER[number]];
}

/* Reads the address that ModRM stands for; index * scale, of which tiles make a stride, by itself. Gives the end of the
 * instruction. */
static const uint8_t *read_address(const instruction *i, char **base, int64_t *index) {
    const uint8_t *next = i->modrm + 1;
    int64_t from = 0;
    int32_t far;
    *index = 0;
    if (i->rm == 4) {
        const int sib = *next++, low = sib & 7, scaled = (sib >> 3 & 7) | i->x_is_set << 3;
        if (scaled != 4) *index = value_of(i, scaled) << (sib >> 6);
        if (low != 5 || i->mod) from = value_of(i, low | i->b_is_set << 3);
    } else if (i->rm != 5 || i->mod) {
        from = value_of(i, i->rm | i->b_is_set << 3);
    }
    if (i->mod == 1) from += (int8_t)*next++;
    if (i->mod == 2 || (i->mod == 0 && (i->rm == 5 || (i->rm == 4 && (i->modrm[1] & 7) == 5)))) {
        memcpy(&far, next, 4), next += 4, from += far;
        if (i->mod == 0 && i->rm == 5) from += (int64_t)next; /* from the next instruction on */
    }
    *base = (char *)from;
    return next;
}

static void configure(const instruction *i, const char *memory) {
    struct { uint8_t palette, start_row, reserved[14]; uint16_t line_bytes[16]; uint8_t rows[16]; } shape;
    _Static_assert(sizeof shape == 64, "what LDTILECFG reads");
    memcpy(&shape, memory, sizeof shape);
    if (shape.palette != 1) fail(i, "LDTILECFG of palette %d", shape.palette);
    if (shape.start_row) fail(i, "LDTILECFG with a first row, which is not emulated");
    for (int n = 0; n < 14; n++)
        if (shape.reserved[n]) fail(i, "LDTILECFG with reserved bytes");
    for (int n = 0; n < 16; n++) {
        if (shape.line_bytes[n] > (n < TILES ? LINE : 0) || shape.rows[n] > (n < TILES ? ROWS : 0))
            fail(i, "LDTILECFG of tile %d with %d rows of %d bytes", n, shape.rows[n], shape.line_bytes[n]);
        if (!shape.line_bytes[n] != !shape.rows[n]) fail(i, "LDTILECFG of tile %d with rows or bytes alone", n);
    }
    if (!mine->configured) __atomic_add_fetch(&in_use, 1, __ATOMIC_RELAXED);
    memset(mine, 0, sizeof *mine);
    mine->configured = 1;
    memcpy(mine->line_bytes, shape.line_bytes, sizeof mine->line_bytes);
    memcpy(mine->rows, shape.rows, sizeof mine->rows);
}

static void release(void) {
    if (mine->configured) __atomic_sub_fetch(&in_use, 1, __ATOMIC_RELAXED);
    memset(mine, 0, sizeof *mine);
}

static int usable(const instruction *i, int tile) {
    if (!mine->configured) fail(i, "no tiles are configured");
    if (tile >= TILES || !mine->rows[tile]) fail(i, "tile %d is not configured", tile);
    return tile;
}

static void move(const instruction *i, char *memory, int64_t stride) {
    const int tile = usable(i, i->reg);
    for (int row = 0; row < mine->rows[tile]; row++, memory += stride) {
        if (i->prefix == XF3) memcpy(memory, mine->data[tile][row], mine->line_bytes[tile]);
        else memcpy(mine->data[tile][row], memory, mine->line_bytes[tile]);
    }
}

/* Refuses tiles that a product of pairs or quads, each in 4 bytes, would not take. */
static void check_shapes(const instruction *i, int to, int a, int b) {
    const tiles *t = mine;
    if (to == a || to == b || a == b) fail(i, "a product with a tile twice");
    if (t->line_bytes[to] % 4 || t->line_bytes[a] % 4 || t->line_bytes[b] % 4) fail(i, "a product with half a pair");
    if (t->rows[to] != t->rows[a] || t->line_bytes[to] != t->line_bytes[b] || t->line_bytes[a] / 4 != t->rows[b])
        fail(i, "a product with shapes that do not fit");
}

/* TDPBF16PS: even and odd products are summed apart, then both added to the sum. Rounds to nearest even; what is
 * subnormal is zero, going in and coming out. */
static void __attribute__((noinline)) multiply(const instruction *i) {
    const int to = usable(i, i->reg), a = usable(i, i->rm), b = usable(i, i->third);
    const tiles *t = mine;
    check_shapes(i, to, a, b);
    const __mmask16 columns = (__mmask16)((1u << t->line_bytes[to] / 4) - 1);
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    for (int row = 0; row < t->rows[to]; row++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int k = 0; k < t->rows[b]; k++) {
            int32_t pair;
            memcpy(&pair, t->data[a][row] + 4 * k, 4);
            const __m512i left = _mm512_set1_epi32(pair), right = _mm512_loadu_si512(t->data[b][k]);
            even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                                   _mm512_castsi512_ps(_mm512_slli_epi32(right, 16)), even);
            odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(left, upper)),
                                  _mm512_castsi512_ps(_mm512_and_si512(right, upper)), odd);
        }
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(t->data[to][row]), _mm512_add_ps(even, odd));
        _mm512_mask_storeu_ps(mine->data[to][row], columns, sum);
    }
    __atomic_add_fetch(&products, 1, __ATOMIC_RELAXED);
}

/* TDPBSUD: sums of four products of signed numbers in rows and unsigned ones in columns, in 32 bits. */
static void multiply_bytes(const instruction *i) {
    const int to = usable(i, i->reg), a = usable(i, i->rm), b = usable(i, i->third);
    check_shapes(i, to, a, b);
    for (int row = 0; row < mine->rows[to]; row++) {
        const int8_t *left = (const int8_t *)mine->data[a][row];
        uint32_t *sums = (uint32_t *)mine->data[to][row];
        for (int k = 0; k < mine->rows[b] * 4; k++)
            for (int column = 0; column < mine->line_bytes[to] / 4; column++)
                sums[column] += (uint32_t)(left[k] * mine->data[b][k / 4][4 * column + k % 4]);
    }
    __atomic_add_fetch(&products, 1, __ATOMIC_RELAXED);
}

/* Gives the next instruction. */
static const uint8_t *execute(const instruction *i) {
    const uint8_t *next = i->modrm + 1;
    char *memory = 0;
    int64_t stride = 0;
    const int of_memory = i->mod != 3;
    if (of_memory) next = read_address(i, &memory, &stride);
    if (i->opcode == 0x5c && i->prefix == XF3 && !of_memory) return multiply(i), next;
    if (i->opcode == 0x5e && i->prefix == XF3 && !of_memory) return multiply_bytes(i), next;
    if (i->third) fail(i, "a third register where there is none");
    if (i->opcode == 0x49 && i->prefix == NONE && of_memory && !i->reg) return configure(i, memory + stride), next;
    if (i->opcode == 0x49 && i->prefix == NONE && *i->modrm == 0xc0) return release(), next;
    if (i->opcode == 0x49 && i->prefix == XF2 && !of_memory && !i->rm)
        return memset(mine->data[usable(i, i->reg)], 0, ROWS * LINE), next;
    if (i->opcode == 0x4b && i->prefix != NONE && of_memory && i->rm == 4) return move(i, memory, stride), next;
    fail(i, "unknown");
}

static void handle(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    _mm_setcsr(0x9fc0); /* nearest even, subnormals are zero, no traps; what it was comes back with the return */
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *at = (const uint8_t *)registers[REG_RIP];
    instruction i = {.start = at, .modrm = at + 4, .registers = (int64_t *)registers};
    if (at[0] != 0xc4 || (at[1] & 0x9f) != 0x82 || (at[2] & 0x84)) fail(&i, "unknown");
    i.x_is_set = !(at[1] & 0x40), i.b_is_set = !(at[1] & 0x20);
    i.prefix = at[2] & 3, i.third = ~at[2] >> 3 & 15, i.opcode = at[3];
    i.mod = at[4] >> 6, i.reg = at[4] >> 3 & 7, i.rm = at[4] & 7;
    if (i.mod == 3 && (i.x_is_set || i.b_is_set)) fail(&i, "a tile beyond the eighth");
    if (!mine) {
        mine = mmap(0, sizeof *mine, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mine == MAP_FAILED) fail(&i, "no memory");
    }
    registers[REG_RIP] = (greg_t)execute(&i);
}

/* Messages go to what is standard error now. */
int emulate_amx(void) {
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO};
    messages = dup(STDERR_FILENO);
    return sigaction(SIGILL, &action, 0);
}
/* Products of tiles since then, in all threads. */
int64_t emulated_products(void) { return __atomic_load_n(&products, __ATOMIC_RELAXED); }
/* Threads that have configured tiles and not released them. */
int64_t threads_with_tiles(void) { return __atomic_load_n(&in_use, __ATOMIC_RELAXED); }
