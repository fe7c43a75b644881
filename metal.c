// SPDX-License-Identifier: MIT
// metal.c: llm.c's forward pass on an Apple GPU, in plain C; llm.c includes it under LLM_METAL. It
// has not met Apple hardware: the tests run it on a software device. The seam, false or -1 where
// the CPU is to do the work:
//
//   gpu_open(s), gpu_close(s)            around a session's life
//   gpu_forward(s, ids, n, pos, first)   as forward; then as head for the rows from `first` on,
//                                        in the same command buffer (first = n: no logits)
//   gpu_head(s, first, n)                as head, for further rows of the last chunk
//
// Weights, KV cache and scratch are the CPU's own pages, shared with the GPU without a copy. So the
// CPU can take over after any failure, in the middle of a text: everything it needs is in place.
#include <assert.h>
#define METAL_HOST
#include "kernels.metal"
#undef METAL_HOST

// ---- Objective-C, by hand ----
//
// A method is a C function found by name. Each call goes through its exact type, for arguments of
// a call through (...) travel differently on arm64. Apple's rules of ownership: what "new", "alloc"
// and "Copy" or "Create" return is ours to release, all else belongs to the autorelease pool.

typedef void *id, *SEL;
typedef void (*IMP)(void);
typedef struct { size_t width, height, depth; } MTLSize;

id MTLCreateSystemDefaultDevice(void), MTLCopyAllDevices(void);
id objc_getClass(const char *), object_getClass(id);
SEL sel_registerName(const char *);
IMP class_getMethodImplementation(id, SEL);
void *objc_autoreleasePoolPush(void);
void objc_autoreleasePoolPop(void *);

// name here, selector, result, parameters. NSUInteger is size_t.
#define METHODS(X) \
    X(make, "new", id, (id, SEL)) X(retain, "retain", id, (id, SEL)) \
    X(release, "release", void, (id, SEL)) X(count, "count", size_t, (id, SEL)) \
    X(string, "stringWithUTF8String:", id, (id, SEL, const char *)) \
    X(utf8, "UTF8String", const char *, (id, SEL)) \
    X(describe, "localizedDescription", id, (id, SEL)) \
    X(object_at, "objectAtIndex:", id, (id, SEL, size_t)) \
    X(set_fast_math, "setFastMathEnabled:", void, (id, SEL, bool)) \
    X(new_queue, "newCommandQueue", id, (id, SEL)) \
    X(max_length, "maxBufferLength", size_t, (id, SEL)) \
    X(new_library, "newLibraryWithSource:options:error:", id, (id, SEL, id, id, id *)) \
    X(set_constant, "setConstantValue:type:atIndex:", void, \
      (id, SEL, const void *, size_t, size_t)) \
    X(new_function, "newFunctionWithName:constantValues:error:", id, (id, SEL, id, id, id *)) \
    X(new_pipeline, "newComputePipelineStateWithFunction:error:", id, (id, SEL, id, id *)) \
    X(simd_width, "threadExecutionWidth", size_t, (id, SEL)) \
    X(max_threads, "maxTotalThreadsPerThreadgroup", size_t, (id, SEL)) \
    X(new_buffer, "newBufferWithLength:options:", id, (id, SEL, size_t, size_t)) \
    X(share_pages, "newBufferWithBytesNoCopy:length:options:deallocator:", id, \
      (id, SEL, void *, size_t, size_t, id)) \
    X(contents, "contents", void *, (id, SEL)) X(commands, "commandBuffer", id, (id, SEL)) \
    X(encoder, "computeCommandEncoder", id, (id, SEL)) \
    X(set_pipeline, "setComputePipelineState:", void, (id, SEL, id)) \
    X(set_buffer, "setBuffer:offset:atIndex:", void, (id, SEL, id, size_t, size_t)) \
    X(set_bytes, "setBytes:length:atIndex:", void, (id, SEL, const void *, size_t, size_t)) \
    X(set_shared, "setThreadgroupMemoryLength:atIndex:", void, (id, SEL, size_t, size_t)) \
    X(dispatch, "dispatchThreadgroups:threadsPerThreadgroup:", void, (id, SEL, MTLSize, MTLSize)) \
    X(end_encoding, "endEncoding", void, (id, SEL)) X(commit, "commit", void, (id, SEL)) \
    X(wait, "waitUntilCompleted", void, (id, SEL)) X(status, "status", size_t, (id, SEL)) \
    X(error, "error", id, (id, SEL))

#define X(name, selector, R, types) typedef R send_##name types;
METHODS(X)
#undef X
#define X(name, selector, R, types) SEND_##name,
enum { METHODS(X) N_METHODS };
#undef X

// a message to nil is answered with 0, as in Objective-C
static size_t nil_method(void) {
    return 0;
}

#define send(g, name, object, ...) ({ \
    id to_ = (object); \
    SEL sel_ = (g)->sel[SEND_##name]; \
    IMP code_ = to_ ? class_getMethodImplementation(object_getClass(to_), sel_) : (IMP)nil_method; \
    ((send_##name *)code_)(to_, sel_, ##__VA_ARGS__); })

enum { MTLDataTypeInt = 29, MTLCommandBufferStatusCompleted = 4, MTLStorageModeShared = 0 };

// quant.h and kernels.metal, as one text
__asm__(".data\nmetal_source: .incbin \"quant.h\"\n"
        ".incbin \"kernels.metal\"\n.byte 0\n.previous\n");
extern const char metal_source[] __asm__("metal_source");

// ---- device ----

enum { MAX_PIPELINES = 96, MAX_COMMANDS = 32, MAX_BOUND = 12, SPLIT_LAYERS = 8 };
enum {   // function constants, numbered as in kernels.metal
    C_FORMAT_0, C_FORMAT_1, C_FORMAT_2, C_FORMAT_3, C_RAGGED, C_NORMED, C_BIASES, C_EPILOGUE,
    C_ACTIVATION, C_SOFTCAPPED, C_HEAD_DIM, C_PAIRING, C_QK_NORMED, C_FUSED, C_CAUSAL,
    C_TILE_TOKENS, C_INT8, N_CONSTANTS
};

typedef struct { const char *base; size_t size; id buffer; } Shared;   // memory that the GPU sees
typedef struct { const char *kernel; int constant[N_CONSTANTS]; size_t threads; id state; } Variant;

typedef struct {
    SEL sel[N_METHODS];
    id device, queue, library, encoder, commands[MAX_COMMANDS];
    void *pool;                 // autoreleased objects of one forward
    Shared *shared;             // [n_shared] maps of the file, KV cache, scratch, small vectors
    Variant pipeline[MAX_PIPELINES];
    int n_shared, n_pipelines, n_commands;
    int32_t *ids, *best;        // [chunk] tokens; [1] argmax of the last logits
    int8_t *codes;              // [chunk][widest input], if int8 is asked for
    float *scales;              // [chunk][widest input / 32][3]
    const float *best_of;       // the logits that best is the argmax of
    char why[200];              // the first thing that went wrong
} Gpu;

static Gpu *gpu_new(void) {
    static const char *const selectors[] = {
#define X(name, selector, R, types) selector,
        METHODS(X)
#undef X
    };
    Gpu *g = calloc(1, sizeof *g);
    for (int i = 0; g && i < N_METHODS; i++) g->sel[i] = sel_registerName(selectors[i]);
    return g;
}

static bool gpu_fail(Gpu *g, const char *what, id error) {
    const char *text = send(g, utf8, send(g, describe, error));
    if (!g->why[0])
        snprintf(g->why, sizeof g->why, "%s%s%s", what, text ? ": " : "", text ? text : "");
    for (char *c = g->why; *c; c++)
        if ((unsigned char)*c < ' ') *c = ' ';   // a compiler's message has many lines; ours one
    return false;
}

// There may be no default device though there is a device: over ssh, or in tmux.
static id gpu_device(Gpu *g) {
    id one = MTLCreateSystemDefaultDevice(), all = one ? NULL : MTLCopyAllDevices();
    if (send(g, count, all)) one = send(g, retain, send(g, object_at, all, 0));
    send(g, release, all);
    return one;
}

static bool gpu_library(Gpu *g) {
    id error = NULL, text = send(g, string, objc_getClass("NSString"), metal_source);
    g->device = gpu_device(g);
    if (!g->device) return gpu_fail(g, "no Metal device", NULL);
    g->queue = send(g, new_queue, g->device);
    id options = send(g, make, objc_getClass("MTLCompileOptions"));
    send(g, set_fast_math, options, false);
    g->library = send(g, new_library, g->device, text, options, &error);
    send(g, release, options);   // an error may hold mere warnings: what counts is the library
    if (!g->queue) return gpu_fail(g, "no command queue", NULL);
    return g->library ? true : gpu_fail(g, "kernels.metal", error);
}

// makes whole pages, or a new buffer (base NULL), known to the GPU; returns its address
static void *gpu_share(Gpu *g, void *base, size_t size) {
    size_t unit = base ? sysconf(_SC_PAGESIZE) : 1, whole = (size + unit - 1) / unit * unit;
    Shared *more = realloc(g->shared, (g->n_shared + 1) * sizeof *more);
    if (!more) return NULL;
    g->shared = more;
    if (whole > send(g, max_length, g->device)) return NULL;
    id buffer = base ? send(g, share_pages, g->device, base, whole, MTLStorageModeShared, NULL)
                     : send(g, new_buffer, g->device, whole, MTLStorageModeShared);
    if (!buffer) return NULL;
    if (!base) base = send(g, contents, buffer);
    g->shared[g->n_shared++] = (Shared){base, whole, buffer};
    return base;
}

static const Shared *gpu_find(const Gpu *g, const void *p) {
    for (int i = 0; i < g->n_shared; i++) {
        const Shared *at = &g->shared[i];
        if ((const char *)p >= at->base && (const char *)p < at->base + at->size) return at;
    }
    return NULL;
}

// the variant of a kernel that these constants make, compiled on first use
static const Variant *gpu_pipeline(Gpu *g, const char *kernel, const int *constant) {
    for (int i = 0; i < g->n_pipelines; i++) {
        Variant *p = &g->pipeline[i];
        bool same = !strcmp(p->kernel, kernel);
        if (same && !memcmp(p->constant, constant, sizeof p->constant)) return p;
    }
    if (g->n_pipelines == MAX_PIPELINES) return gpu_fail(g, "too many kernel variants", NULL), NULL;
    Variant *p = &g->pipeline[g->n_pipelines];
    id error = NULL, name = send(g, string, objc_getClass("NSString"), kernel);
    id values = send(g, make, objc_getClass("MTLFunctionConstantValues"));
    for (size_t i = 0; i < N_CONSTANTS; i++)
        send(g, set_constant, values, &constant[i], MTLDataTypeInt, i);
    id function = send(g, new_function, g->library, name, values, &error);
    p->state = function ? send(g, new_pipeline, g->device, function, &error) : NULL;
    send(g, release, function);
    send(g, release, values);
    if (!p->state) return gpu_fail(g, kernel, error), NULL;
    if (send(g, simd_width, p->state) != 32) gpu_fail(g, "SIMD-groups are not 32 wide", NULL);
    p->kernel = kernel;
    memcpy(p->constant, constant, sizeof p->constant);
    p->threads = send(g, max_threads, p->state);
    g->n_pipelines++;
    return p;
}

static void gpu_commands(Gpu *g) {   // one more command buffer, and its encoder
    id commands = send(g, commands, g->queue);
    g->encoder = send(g, encoder, commands);
    if (g->encoder) g->commands[g->n_commands++] = commands;
    else gpu_fail(g, "no command encoder", NULL);
}

static void gpu_begin(Gpu *g) {
    g->pool = objc_autoreleasePoolPush();
    g->n_commands = 0;
    gpu_commands(g);
}

static void gpu_commit(Gpu *g) {
    if (!g->encoder) return;
    send(g, end_encoding, g->encoder);
    send(g, commit, g->commands[g->n_commands - 1]);
}

// Also after a failure: told in one line, and the CPU does the rest.
static void gpu_close(Session *s) {
    Gpu *g = s->gpu;
    if (!g) return;
    if (g->why[0]) fprintf(stderr, "note: running on the CPU: %s\n", g->why);
    for (int i = 0; i < g->n_pipelines; i++) send(g, release, g->pipeline[i].state);
    for (int i = 0; i < g->n_shared; i++) send(g, release, g->shared[i].buffer);
    send(g, release, g->library);
    send(g, release, g->queue);
    send(g, release, g->device);
    free(g->shared);
    free(g);
    s->gpu = NULL;
}

// runs all that was encoded
static bool gpu_wait(Gpu *g) {
    gpu_commit(g);
    for (int i = 0; i < g->n_commands; i++) {
        send(g, wait, g->commands[i]);
        if (send(g, status, g->commands[i]) != MTLCommandBufferStatusCompleted)
            gpu_fail(g, "the GPU stopped", send(g, error, g->commands[i]));
    }
    objc_autoreleasePoolPop(g->pool);
    return !g->why[0];
}

static bool gpu_end(Session *s) {
    bool ok = gpu_wait(s->gpu);
    if (!ok) gpu_close(s);
    return ok;
}

// One dispatch: buffers in order, then the arguments. NULL stands for what the variant ignores.
typedef struct {
    const char *kernel;
    const void *bound[MAX_BOUND];
    int n;
    size_t groups, threads, shared;   // the grid; bytes of threadgroup memory
    int constant[N_CONSTANTS];
} Dispatch;

static void gpu_dispatch(Gpu *g, const Dispatch *d, const void *args, size_t size) {
    const Variant *p = g->why[0] ? NULL : gpu_pipeline(g, d->kernel, d->constant);
    if (!p) return;
    if (d->threads > p->threads) gpu_fail(g, "it has too few threads for a kernel", NULL);
    if (d->threads > p->threads) return;
    send(g, set_pipeline, g->encoder, p->state);
    for (int i = 0; i < d->n; i++) {
        const char *from = d->bound[i] ? d->bound[i] : g->shared[0].base;
        const Shared *at = gpu_find(g, from);
        assert(at);   // all memory of a session is shared when it is opened
        send(g, set_buffer, g->encoder, at->buffer, from - at->base, i);
    }
    send(g, set_bytes, g->encoder, args, size, d->n);
    if (d->shared) send(g, set_shared, g->encoder, (d->shared + 15) / 16 * 16, 0);
    send(g, dispatch, g->encoder, ((MTLSize){d->groups, 1, 1}), ((MTLSize){d->threads, 1, 1}));
}

// ---- operations: each is one dispatch ----

// A matrix begins anywhere; the address bound is the multiple of 16 before it.
static struct kernel_matrix matrix_args(const Matrix *w, float scale) {
    return (struct kernel_matrix){(uintptr_t)w->data % 16, quant_row_bytes(w->type, w->cols),
                                  w->rows, scale * (w->scale ? *w->scale : 1)};
}

static const void *matrix_base(const Matrix *w) {
    return w->data - (uintptr_t)w->data % 16;
}

static void run_embed(Session *s, int n) {
    const Matrix *w = &s->m->embd;
    Gpu *g = s->gpu;
    struct embed_args a = {matrix_args(w, s->m->config.embd_scale), w->cols};
    Dispatch d = {"embed", {matrix_base(w), g->ids, s->x}, 3, n, 32, 0,
                  {[C_FORMAT_0] = w->type, [C_RAGGED] = w->cols % 32 != 0}};
    gpu_dispatch(g, &d, &a, sizeof a);
}

static void run_norm(Session *s, const float *x, const Norm *w, float *y, int n, int epilogue) {
    struct norm_args a = {s->m->config.dim, s->m->config.eps};
    size_t threads = a.cols < 256 ? (a.cols + 31) / 32 * 32 : 256;
    Dispatch d = {"rms_norm", {x, w->w, y}, 3, n, threads, 32, {[C_EPILOGUE] = epilogue}};
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

// y[i] = scale * w[i] x for up to three matrices, x normalised by `norm` if there is one; or
// (EPILOGUE_GLU) y[0] = act(w[0] x) * w[1] x
static void run_gemv(Session *s, const Matrix *const *w, int k, const float *x, const Norm *norm,
                     float *const *y, int epilogue, float cap, float scale) {
    bool glu = epilogue == EPILOGUE_GLU;
    struct gemv_args a = {.cols = w[0]->cols, .eps = s->m->config.eps, .softcap = cap};
    Dispatch d = {glu ? "gemv_glu" : "gemv", {[6] = x, norm ? norm->w : NULL}, 11, 0,
                  32 * GEMV_SIMDGROUPS, 0,
                  {[C_RAGGED] = a.cols % 32 != 0, [C_NORMED] = norm != NULL,
                   [C_EPILOGUE] = epilogue, [C_SOFTCAPPED] = cap > 0,
                   [C_ACTIVATION] = s->m->config.arch->act}};
    size_t units = 0;
    for (int i = 0; i < k; i++) {
        int rows = gemv_rows(w[i]->type);
        a.w[i] = matrix_args(w[i], scale);
        d.bound[i] = matrix_base(w[i]);
        d.bound[3 + i] = w[i]->bias;
        d.bound[8 + i] = glu ? y[0] : y[i];
        d.constant[C_FORMAT_0 + i] = w[i]->type;
        d.constant[C_BIASES] |= (w[i]->bias != NULL) << i;
        if (i == 0 || !glu) units += (w[i]->rows + rows - 1) / rows;
    }
    d.groups = (units + GEMV_SIMDGROUPS - 1) / GEMV_SIMDGROUPS;
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

// y = scale * x w' for n tokens; in integers where that is asked for and the format has codes
static void run_gemm(Session *s, const Matrix *w, const float *x, const float *gate, float *y,
                     int n, int epilogue, float cap, float scale) {
    Gpu *g = s->gpu;
    int tile = n > 8 ? 32 : 8;
    bool int8 = g->codes && tile == 32 && !quant_row_bytes(w->type, 1);   // no row of one: blocks
    if (int8) {
        struct quantize_args q = {n * (w->cols / 32)};
        Dispatch d = {"quantize", {x, g->codes, g->scales}, 3, (q.groups + 3) / 4, 128, 0, {0}};
        gpu_dispatch(g, &d, &q, sizeof q);
    }
    struct gemm_args a = {matrix_args(w, scale), w->cols, n, cap};
    size_t rows = (w->rows + GEMM_ROWS - 1) / GEMM_ROWS, tokens = (n + tile - 1) / tile;
    Dispatch d = {"gemm", {matrix_base(w), w->bias, x, int8 ? g->codes : NULL,
                           int8 ? g->scales : NULL, gate, y}, 7, rows * tokens, 128, 8192,
                  {[C_FORMAT_0] = w->type, [C_RAGGED] = a.cols % 32 != 0,
                   [C_BIASES] = w->bias != NULL, [C_EPILOGUE] = epilogue,
                   [C_ACTIVATION] = s->m->config.arch->act, [C_SOFTCAPPED] = cap > 0,
                   [C_TILE_TOKENS] = tile, [C_INT8] = int8}};
    gpu_dispatch(g, &d, &a, sizeof a);
}

// RoPE, cache write and attention: fused for one token, in two dispatches for more
static void run_attention(Session *s, const Layer *w, int n) {
    const Config *c = &s->m->config;
    Cache *kv = &s->cache[s->l];
    int used = s->pos + n < kv->rows ? s->pos + n : kv->rows;
    int nsg = used > 112 ? 8 : (used + 15) / 16;
    struct attention_args a = {n, s->pos, w->n_head, w->n_kv, c->n_rot, w->sinks != NULL, kv->rows,
                               used, kv->window, kv->keep, c->eps, c->attn_scale, c->attn_cap};
    const float *angles = s->rope[w->window > 0], *q_norm = w->q_norm.w, *k_norm = w->k_norm.w;
    Dispatch r = {"rope", {s->q, s->k, s->v, kv->k, kv->v, q_norm, k_norm, angles}, 8,
                  ((size_t)n * (w->n_head + 2 * w->n_kv) + 3) / 4, 128, 0,
                  {[C_SOFTCAPPED] = c->attn_cap > 0, [C_HEAD_DIM] = c->hd,
                   [C_PAIRING] = !w->rope ? ROPE_NONE
                                 : c->rope == NORM ? ROPE_PAIRS : ROPE_HALVES,
                   [C_QK_NORMED] = q_norm != NULL, [C_FUSED] = n == 1, [C_CAUSAL] = c->causal}};
    Dispatch d = {"attention", {s->q, s->k, s->v, kv->k, kv->v, kv->pos, q_norm, k_norm, angles,
                                w->sinks, s->att}, 11, (size_t)n * w->n_head, 32 * nsg,
                  ((2 + nsg) * c->hd + 2 * nsg) * sizeof(float), {0}};
    if (n >= 8)
        d = (Dispatch){"flash_attention", {s->q, kv->k, kv->v, kv->pos, w->sinks, s->att}, 6,
                       (size_t)(n + 31) / 32 * w->n_head, 128,
                       (16 * c->hd + 4 * 320) * sizeof(float), {0}};
    memcpy(d.constant, r.constant, sizeof d.constant);
    if (n > 1) gpu_dispatch(s->gpu, &r, &a, sizeof a);
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

// The single-dispatch half of a layer, where it is asked for and fits: see kernels.metal
static bool run_block(Session *s, const Layer *w) {
    const Config *c = &s->m->config;
    const Matrix *m[4] = {&w->o, &w->gate, &w->up, &w->down};
    struct block_args a = {.inner = w->o.cols, .dim = c->dim, .ff = w->ff, .eps = c->eps};
    Dispatch d = {"ffn_block", {[4] = s->att, w->ffn_norm.w, s->x, s->gate}, 8, 1, 1024,
                  (32 + BLOCK_DIM) * sizeof(float), {[C_ACTIVATION] = c->arch->act}};
    bool post = w->attn_post_norm.w || w->ffn_post_norm.w;
    bool fits = s->o.gpu_block && c->dim <= BLOCK_DIM && c->dim <= w->ff && !post;
    for (int i = 0; i < 4; i++) {
        fits = fits && !m[i]->bias;
        a.w[i] = matrix_args(m[i], 1);
        d.bound[i] = matrix_base(m[i]);
        d.constant[C_FORMAT_0 + i] = m[i]->type;
        d.constant[C_RAGGED] |= m[i]->cols % 32 != 0;
    }
    const Variant *p = fits ? gpu_pipeline(s->gpu, d.kernel, d.constant) : NULL;
    if (!p || p->threads < 1024) return false;
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
    return true;
}

// ---- forward ----

// x += w in, or x += norm(w in)
static void run_residual(Session *s, const Matrix *w, const float *in, const Norm *post, int n) {
    float *y = post->w ? s->out : s->x;
    int epilogue = post->w ? EPILOGUE_STORE : EPILOGUE_ADD;
    if (n == 1) run_gemv(s, &w, 1, in, NULL, &y, epilogue, 0, 1);
    else run_gemm(s, w, in, NULL, y, n, epilogue, 0, 1);
    if (post->w) run_norm(s, s->out, post, s->x, n, EPILOGUE_ADD);
}

// One token: five dispatches, seven with post-norms. A chunk: eleven or thirteen.
static void run_layer(Session *s, const Layer *w, int n) {
    const Matrix *qkv[3] = {&w->q, &w->k, &w->v}, *pair[2] = {&w->gate, &w->up};
    float *to[3] = {s->q, s->k, s->v};
    if (n == 1) run_gemv(s, qkv, 3, s->x, &w->attn_norm, to, EPILOGUE_STORE, 0, 1);
    else run_norm(s, s->x, &w->attn_norm, s->h, n, EPILOGUE_STORE);
    for (int i = 0; n > 1 && i < 3; i++)
        run_gemm(s, qkv[i], s->h, NULL, to[i], n, EPILOGUE_STORE, 0, 1);
    run_attention(s, w, n);
    if (n == 1 && run_block(s, w)) return;
    run_residual(s, &w->o, s->att, &w->attn_post_norm, n);
    if (n == 1) {
        run_gemv(s, pair, 2, s->x, &w->ffn_norm, &s->up, EPILOGUE_GLU, 0, 1);
    } else {
        run_norm(s, s->x, &w->ffn_norm, s->h, n, EPILOGUE_STORE);
        run_gemm(s, &w->gate, s->h, NULL, s->gate, n, EPILOGUE_STORE, 0, 1);
        run_gemm(s, &w->up, s->h, s->gate, s->up, n, EPILOGUE_GLU, 0, 1);
    }
    run_residual(s, &w->down, s->up, &w->ffn_post_norm, n);
}

// logits of n rows; for one row also which is the largest
static void run_head(Session *s, int first, int n) {
    const Config *c = &s->m->config;
    const Matrix *w = &s->m->head;
    const Norm *norm = &s->m->out_norm;
    Gpu *g = s->gpu;
    float *x = s->x + (size_t)first * c->dim, *h = s->h + (size_t)first * c->dim, *y = s->logits;
    struct argmax_args a = {c->n_vocab};
    size_t threads = a.n < 1024 ? (a.n + 31) / 32 * 32 : 1024;
    Dispatch d = {"argmax", {y, g->best}, 2, 1, threads, 2 * 32 * sizeof(float), {0}};
    g->best_of = n == 1 ? y : NULL;
    if (n > 1) {
        run_norm(s, x, norm, h, n, EPILOGUE_STORE);
        run_gemm(s, w, h, NULL, y, n, EPILOGUE_STORE, c->logit_cap, c->logit_scale);
    } else {
        run_gemv(s, &w, 1, x, norm, &y, EPILOGUE_STORE, c->logit_cap, c->logit_scale);
        gpu_dispatch(g, &d, &a, sizeof a);
    }
}

// live: the rows are marked with their positions. The warm-up's are not, so nobody sees them.
static void run_layers(Session *s, const int32_t *ids, int n, int pos, bool live) {
    Gpu *g = s->gpu;
    int n_layer = s->m->config.n_layer, split = n_layer / MAX_COMMANDS + SPLIT_LAYERS;
    s->pos = pos;
    g->best_of = NULL;
    memcpy(g->ids, ids, n * sizeof *ids);
    each_row(s, NULL, n, angles_row);
    run_embed(s, n);
    for (s->l = 0; s->l < n_layer; s->l++) {
        Cache *cache = &s->cache[s->l];
        for (int i = 0; live && i < n; i++) cache->pos[cache_row(cache, pos + i)] = pos + i;
        run_layer(s, &s->m->layers[s->l], n);
        if (n == 1 || (s->l + 1) % split) continue;
        gpu_commit(g);   // the GPU begins while the rest is encoded
        gpu_commands(g);
    }
}

static bool gpu_forward(Session *s, const int32_t *ids, int n, int pos, int first) {
    if (!s->gpu) return false;
    gpu_begin(s->gpu);
    run_layers(s, ids, n, pos, true);
    if (first < n) run_head(s, first, n - first < LOGIT_ROWS ? n - first : LOGIT_ROWS);
    return gpu_end(s);
}

static bool gpu_head(Session *s, int first, int n) {
    if (!s->gpu) return false;
    gpu_begin(s->gpu);
    run_head(s, first, n);
    return gpu_end(s);
}

// the id of the largest of these logits if the GPU found it, or -1
static int32_t gpu_argmax(const Session *s, const float *logits) {
    const Gpu *g = s->gpu;
    return g && logits && g->best_of == logits ? *g->best : -1;
}

// ---- open ----

static const char *layer_lacks(const Config *c, const Layer *w) {
    const Norm *norms[] = {&w->attn_norm, &w->ffn_norm, &w->attn_post_norm, &w->ffn_post_norm,
                           &w->q_norm, &w->k_norm};
    if (w->conv_in.data || w->router.data || w->parallel) return "layers";
    if (!w->attn_norm.w || !w->ffn_norm.w || !w->gate.data) return "layers";
    if (w->q.rows != (int64_t)w->n_head * c->hd) return "gated attention";
    for (int i = 0; i < 6; i++) {
        bool per_head = norms[i]->group == c->hd && norms[i]->n == c->hd;
        if (norms[i]->b || (i >= 4 && norms[i]->w && !per_head)) return "norms";
    }
    return !w->q_norm.w != !w->k_norm.w ? "norms" : NULL;
}

// NULL, or what of this model the kernels do not do
static const char *gpu_lacks(const Model *m) {
    const Config *c = &m->config;
    const char *lacks = c->arch->act > RELU2 ? "activation" : NULL;
    if (c->arch->norm != RMS || c->arch->flags & (ENCODER | QK_NORM_LATE)) return "norms";
    if (m->pos_embd.data || m->type_embd.data || m->embd_norm.w) return "embedding";
    if (c->hd != c->vd || c->hd % 32 || c->hd > HEAD_MAX) return "head size";
    if (c->residual_scale != 1 || c->clamp_qkv > 0 || c->temp_scale || c->alibi > 0)
        return "scales";
    if (!m->out_norm.w || m->out_norm.b) return "norms";
    if (m->n_owned) return "vectors, which are not f32";   // copies, outside the maps
    if (gguf_int(&m->gguf, "general.alignment", 32) % 4) return "alignment";
    for (int l = 0; !lacks && l < c->n_layer; l++) lacks = layer_lacks(c, &m->layers[l]);
    return lacks;
}

static bool share_all(Session *s) {
    Gpu *g = s->gpu;
    const Map *maps = s->m->gguf.maps;
    size_t n = s->o.chunk, wide = 0;
    for (size_t i = 0; s->o.gpu_int8 && i < s->m->gguf.n_tensors; i++) {
        const Tensor *t = &s->m->gguf.tensors[i];
        if (t->ne[0] > (int64_t)wide) wide = t->ne[0];
    }
    wide = (wide + 31) / 32 * 32;
    g->best = gpu_share(g, NULL, 16 + n * (sizeof *g->ids + wide / 32 * (12 + 32)));
    bool ok = g->best != NULL;
    for (size_t i = 0; ok && i < s->m->gguf.n_maps; i++)
        ok = gpu_share(g, maps[i].base, maps[i].size);
    ok = ok && gpu_share(g, s->kv_base, s->kv_bytes);
    ok = ok && gpu_share(g, s->scratch_base, s->scratch_bytes);
    if (!ok) return gpu_fail(g, "it cannot take this much memory", NULL);
    g->ids = g->best + 4;
    g->scales = (float *)(g->ids + n);
    g->codes = wide ? (int8_t *)(g->scales + n * (wide / 32) * 3) : NULL;
    return true;
}

static bool gpu_open(Session *s) {
    const char *lacks = gpu_lacks(s->m);
    int32_t none = 0;
    Gpu *g = s->gpu = gpu_new();
    if (!g) return false;
    void *pool = objc_autoreleasePoolPush();
    if (lacks) snprintf(g->why, sizeof g->why, "the GPU path does not know this model's %s", lacks);
    bool ok = !lacks && gpu_library(g) && share_all(s);
    objc_autoreleasePoolPop(pool);
    if (!ok) return gpu_close(s), false;
    gpu_begin(g);   // warm-up: one token on a row that nobody sees compiles what decoding needs
    run_layers(s, &none, 1, 0, false);
    run_head(s, 0, 1);
    return gpu_end(s);
}
