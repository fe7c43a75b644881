// SPDX-License-Identifier: MIT
// metal.c: llm.c's forward pass on an Apple GPU, in plain C. llm.c includes it under LLM_METAL,
// after its own forward. It has not met Apple hardware: the tests run it on a software device.
//
// The seam is four functions, which return false where the CPU is to do the work:
//
//   gpu_open(s)                          called once a session's buffers are placed
//   gpu_forward(s, ids, n, pos, first)   as forward; then as head for the rows from `first` on,
//                                        in the same command buffer (first = n: no logits)
//   gpu_head(s, first, n)                as head, for further rows of the last chunk
//   gpu_close(s)
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

id MTLCreateSystemDefaultDevice(void);
id MTLCopyAllDevices(void);
id objc_getClass(const char *);
id object_getClass(id);
SEL sel_registerName(const char *);
IMP class_getMethodImplementation(id, SEL);
void *objc_autoreleasePoolPush(void);
void objc_autoreleasePoolPop(void *);

// name here, selector, result, parameters. NSUInteger is size_t.
#define METHODS(X) \
    X(make, "new", id, (id, SEL)) \
    X(retain, "retain", id, (id, SEL)) \
    X(release, "release", void, (id, SEL)) \
    X(string, "stringWithUTF8String:", id, (id, SEL, const char *)) \
    X(utf8, "UTF8String", const char *, (id, SEL)) \
    X(describe, "localizedDescription", id, (id, SEL)) \
    X(count, "count", size_t, (id, SEL)) \
    X(object_at, "objectAtIndex:", id, (id, SEL, size_t)) \
    X(set_fast_math, "setFastMathEnabled:", void, (id, SEL, bool)) \
    X(new_queue, "newCommandQueue", id, (id, SEL)) \
    X(max_length, "maxBufferLength", size_t, (id, SEL)) \
    X(new_library, "newLibraryWithSource:options:error:", id, (id, SEL, id, id, id *)) \
    X(set_constant, "setConstantValue:type:atIndex:", void, (id, SEL, const void *, size_t, size_t)) \
    X(new_function, "newFunctionWithName:constantValues:error:", id, (id, SEL, id, id, id *)) \
    X(new_pipeline, "newComputePipelineStateWithFunction:error:", id, (id, SEL, id, id *)) \
    X(simd_width, "threadExecutionWidth", size_t, (id, SEL)) \
    X(max_threads, "maxTotalThreadsPerThreadgroup", size_t, (id, SEL)) \
    X(new_buffer, "newBufferWithLength:options:", id, (id, SEL, size_t, size_t)) \
    X(share_pages, "newBufferWithBytesNoCopy:length:options:deallocator:", id, \
      (id, SEL, void *, size_t, size_t, id)) \
    X(contents, "contents", void *, (id, SEL)) \
    X(commands, "commandBuffer", id, (id, SEL)) \
    X(encoder, "computeCommandEncoder", id, (id, SEL)) \
    X(set_pipeline, "setComputePipelineState:", void, (id, SEL, id)) \
    X(set_buffer, "setBuffer:offset:atIndex:", void, (id, SEL, id, size_t, size_t)) \
    X(set_bytes, "setBytes:length:atIndex:", void, (id, SEL, const void *, size_t, size_t)) \
    X(set_shared, "setThreadgroupMemoryLength:atIndex:", void, (id, SEL, size_t, size_t)) \
    X(dispatch, "dispatchThreadgroups:threadsPerThreadgroup:", void, (id, SEL, MTLSize, MTLSize)) \
    X(end_encoding, "endEncoding", void, (id, SEL)) \
    X(commit, "commit", void, (id, SEL)) \
    X(wait, "waitUntilCompleted", void, (id, SEL)) \
    X(status, "status", size_t, (id, SEL)) \
    X(error, "error", id, (id, SEL))

#define X(name, selector, R, types) typedef R send_##name types;
METHODS(X)
#undef X
#define X(name, selector, R, types) SEND_##name,
enum { METHODS(X) N_METHODS };
#undef X

#define send(g, name, object, ...) ({ \
    id to_ = (object); \
    SEL sel_ = (g)->sel[SEND_##name]; \
    ((send_##name *)class_getMethodImplementation(object_getClass(to_), sel_))(to_, sel_, ##__VA_ARGS__); })

enum { MTLDataTypeInt = 29, MTLCommandBufferStatusCompleted = 4, MTLStorageModeShared = 0 };

// quant.h and kernels.metal, as one text
__asm__(".data\n"
        "metal_source:\n"
        ".incbin \"quant.h\"\n"
        ".incbin \"kernels.metal\"\n"
        ".byte 0\n"
        ".previous\n");
extern const char metal_source[] __asm__("metal_source");

// ---- device ----

enum { MAX_PIPELINES = 96, MAX_COMMANDS = 32, MAX_BOUND = 12, SPLIT_LAYERS = 8 };
enum {   // function constants, numbered as in kernels.metal
    C_FORMAT_0, C_FORMAT_1, C_FORMAT_2, C_FORMAT_3, C_RAGGED, C_NORMED, C_BIASES, C_EPILOGUE,
    C_ACTIVATION, C_SOFTCAPPED, C_HEAD_DIM, C_PAIRING, C_QK_NORMED, C_FUSED, C_CAUSAL,
    C_TILE_TOKENS, C_INT8, N_CONSTANTS
};

typedef struct { const char *base; size_t size; id buffer; } Shared;   // memory that the GPU sees
typedef struct { const char *kernel; int constant[N_CONSTANTS]; id state; size_t threads; } Pipeline;

typedef struct {
    SEL sel[N_METHODS];
    id device, queue, library, encoder, commands[MAX_COMMANDS];
    void *pool;                 // autoreleased objects of one forward
    Shared *shared;             // [n_shared] maps of the file, KV cache, scratch, small vectors
    Pipeline pipeline[MAX_PIPELINES];
    int n_shared, n_pipelines, n_commands;
    int32_t *ids, *best;        // [chunk] tokens; [1] argmax of the last logits
    int8_t *codes;              // [chunk][widest input], if int8 is asked for
    float *scales;              // [chunk][widest input / 32][3]
    const float *best_of;       // the logits that best is the argmax of
    char why[200];              // the first thing that went wrong
} Gpu;

static Gpu *gpu_new(void)
{
    static const char *const selectors[] = {
#define X(name, selector, R, types) selector,
        METHODS(X)
#undef X
    };
    Gpu *g = calloc(1, sizeof *g);
    for (int i = 0; g && i < N_METHODS; i++) g->sel[i] = sel_registerName(selectors[i]);
    return g;
}

static bool gpu_fail(Gpu *g, const char *what, id error)
{
    id text = error ? send(g, describe, error) : NULL;
    if (!g->why[0])
        snprintf(g->why, sizeof g->why, "%s%s%s", what, text ? ": " : "",
                 text ? send(g, utf8, text) : "");
    for (char *c = g->why; *c; c++)
        if ((unsigned char)*c < ' ') *c = ' ';   // a compiler's message has many lines; ours one
    return false;
}

static id gpu_string(Gpu *g, const char *s)
{
    return send(g, string, objc_getClass("NSString"), s);
}

// There may be no default device though there is a device: over ssh, or in tmux.
static id gpu_device(Gpu *g)
{
    id one = MTLCreateSystemDefaultDevice();
    if (one) return one;
    id all = MTLCopyAllDevices();
    if (!all) return NULL;
    if (send(g, count, all)) one = send(g, retain, send(g, object_at, all, 0));
    send(g, release, all);
    return one;
}

static bool gpu_library(Gpu *g)
{
    id error = NULL;
    g->device = gpu_device(g);
    if (!g->device) return gpu_fail(g, "no Metal device", NULL);
    g->queue = send(g, new_queue, g->device);
    id options = send(g, make, objc_getClass("MTLCompileOptions"));
    send(g, set_fast_math, options, false);
    g->library = send(g, new_library, g->device, gpu_string(g, metal_source), options, &error);
    send(g, release, options);   // an error may hold mere warnings: what counts is the library
    return g->queue && g->library ? true : gpu_fail(g, "kernels.metal", error);
}

// makes whole pages, or a new buffer (base NULL), known to the GPU; returns its address
static void *gpu_share(Gpu *g, void *base, size_t size)
{
    size_t unit = base ? sysconf(_SC_PAGESIZE) : 16, whole = (size + unit - 1) / unit * unit;
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

static const Shared *gpu_find(const Gpu *g, const void *p)
{
    for (int i = 0; i < g->n_shared; i++)
        if ((const char *)p >= g->shared[i].base && (const char *)p < g->shared[i].base + g->shared[i].size)
            return &g->shared[i];
    return NULL;
}

// the variant of a kernel that these constants make, compiled on first use
static const Pipeline *gpu_pipeline(Gpu *g, const char *kernel, const int *constant)
{
    for (int i = 0; i < g->n_pipelines; i++) {
        Pipeline *p = &g->pipeline[i];
        if (!strcmp(p->kernel, kernel) && !memcmp(p->constant, constant, sizeof p->constant)) return p;
    }
    if (g->n_pipelines == MAX_PIPELINES) return gpu_fail(g, "too many kernel variants", NULL), NULL;
    Pipeline *p = &g->pipeline[g->n_pipelines];
    id error = NULL, values = send(g, make, objc_getClass("MTLFunctionConstantValues"));
    for (size_t i = 0; i < N_CONSTANTS; i++)
        send(g, set_constant, values, &constant[i], MTLDataTypeInt, i);
    id function = send(g, new_function, g->library, gpu_string(g, kernel), values, &error);
    p->state = function ? send(g, new_pipeline, g->device, function, &error) : NULL;
    if (function) send(g, release, function);
    send(g, release, values);
    if (!p->state) return gpu_fail(g, kernel, error), NULL;
    if (send(g, simd_width, p->state) != 32) gpu_fail(g, "SIMD-groups are not 32 wide", NULL);
    p->kernel = kernel;
    memcpy(p->constant, constant, sizeof p->constant);
    p->threads = send(g, max_threads, p->state);
    g->n_pipelines++;
    return p;
}

static void gpu_commands(Gpu *g)   // one more command buffer, and its encoder
{
    id commands = send(g, commands, g->queue);
    g->commands[g->n_commands++] = commands;
    g->encoder = send(g, encoder, commands);
}

static void gpu_begin(Gpu *g)
{
    g->pool = objc_autoreleasePoolPush();
    g->n_commands = 0;
    gpu_commands(g);
}

static void gpu_commit(Gpu *g)
{
    send(g, end_encoding, g->encoder);
    send(g, commit, g->commands[g->n_commands - 1]);
}

// Also after a failure: told in one line, and the CPU does the rest.
static void gpu_close(Session *s)
{
    Gpu *g = s->gpu;
    if (!g) return;
    if (g->why[0]) fprintf(stderr, "note: running on the CPU: %s\n", g->why);
    for (int i = 0; i < g->n_pipelines; i++) send(g, release, g->pipeline[i].state);
    for (int i = 0; i < g->n_shared; i++) send(g, release, g->shared[i].buffer);
    if (g->library) send(g, release, g->library);
    if (g->queue) send(g, release, g->queue);
    if (g->device) send(g, release, g->device);
    free(g->shared);
    free(g);
    s->gpu = NULL;
}

// runs all that was encoded
static bool gpu_wait(Gpu *g)
{
    gpu_commit(g);
    for (int i = 0; i < g->n_commands; i++) {
        send(g, wait, g->commands[i]);
        if (send(g, status, g->commands[i]) != MTLCommandBufferStatusCompleted)
            gpu_fail(g, "the GPU stopped", send(g, error, g->commands[i]));
    }
    objc_autoreleasePoolPop(g->pool);
    return !g->why[0];
}

static bool gpu_end(Session *s)
{
    bool ok = gpu_wait(s->gpu);
    if (!ok) gpu_close(s);
    return ok;
}

// One dispatch: buffers in order, then the arguments. NULL stands for what the variant ignores.
typedef struct {
    const char *kernel;
    const void *bound[MAX_BOUND];
    int n;
    size_t groups, threads, shared;
    int constant[N_CONSTANTS];
} Dispatch;

static void gpu_dispatch(Gpu *g, const Dispatch *d, const void *args, size_t size)
{
    const Pipeline *p = g->why[0] ? NULL : gpu_pipeline(g, d->kernel, d->constant);
    if (!p) return;
    if (d->threads > p->threads) {
        gpu_fail(g, "a kernel needs more threads than the GPU gives it", NULL);
        return;
    }
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
static struct kernel_matrix matrix_args(const Matrix *w)
{
    return (struct kernel_matrix){(uintptr_t)w->data % 16, quant_row_bytes(w->type, w->cols), w->rows,
                                  w->scale ? *w->scale : 1};
}

static const void *matrix_base(const Matrix *w)
{
    return w->data - (uintptr_t)w->data % 16;
}

static void run_embed(Session *s, int n)
{
    const Matrix *w = &s->m->embd;
    Gpu *g = s->gpu;
    struct embed_args a = {matrix_args(w), w->cols};
    a.w.scale *= s->m->config.embd_scale;
    Dispatch d = {"embed", {matrix_base(w), g->ids, s->x}, 3, n, 32, 0,
                  {[C_FORMAT_0] = w->type, [C_RAGGED] = w->cols % 32 != 0}};
    gpu_dispatch(g, &d, &a, sizeof a);
}

static void run_norm(Session *s, const float *x, const Norm *w, float *y, int n, int epilogue)
{
    struct norm_args a = {s->m->config.dim, s->m->config.eps};
    size_t threads = a.cols < 256 ? (a.cols + 31) / 32 * 32 : 256;
    Dispatch d = {"rms_norm", {x, w->w, y}, 3, n, threads, 32, {[C_EPILOGUE] = epilogue}};
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

// y[i] = w[i] x for up to three matrices, x normalised by `norm` if there is one
static void run_gemv(Session *s, const Matrix *const *w, int k, const float *x, const Norm *norm,
                     float *const *y, int epilogue, float softcap, float scale)
{
    struct gemv_args a = {.cols = w[0]->cols, .eps = s->m->config.eps, .softcap = softcap};
    Dispatch d = {"gemv", {[6] = x, norm ? norm->w : NULL}, 11, 0, 32 * GEMV_SIMDGROUPS, 0,
                  {[C_RAGGED] = a.cols % 32 != 0, [C_NORMED] = norm != NULL, [C_EPILOGUE] = epilogue,
                   [C_SOFTCAPPED] = softcap > 0}};
    size_t units = 0;
    for (int i = 0; i < k; i++) {
        a.w[i] = matrix_args(w[i]);
        a.w[i].scale *= scale;
        d.bound[i] = matrix_base(w[i]);
        d.bound[3 + i] = w[i]->bias;
        d.bound[8 + i] = y[i];
        d.constant[C_FORMAT_0 + i] = w[i]->type;
        d.constant[C_BIASES] |= (w[i]->bias != NULL) << i;
        units += (w[i]->rows + gemv_rows(w[i]->type) - 1) / gemv_rows(w[i]->type);
    }
    d.groups = (units + GEMV_SIMDGROUPS - 1) / GEMV_SIMDGROUPS;
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

static void run_glu(Session *s, const Layer *w, float *y)
{
    struct gemv_args a = {{matrix_args(&w->gate), matrix_args(&w->up)}, w->gate.cols,
                          s->m->config.eps, 0};
    size_t tile = gemv_rows(w->gate.type) * GEMV_SIMDGROUPS;
    Dispatch d = {"gemv_glu", {matrix_base(&w->gate), matrix_base(&w->up), w->gate.bias, w->up.bias, s->x,
                               w->ffn_norm.w, y}, 7, (w->ff + tile - 1) / tile, 32 * GEMV_SIMDGROUPS, 0,
                  {[C_FORMAT_0] = w->gate.type, w->up.type, [C_RAGGED] = a.cols % 32 != 0, [C_NORMED] = 1,
                   [C_BIASES] = (w->gate.bias != NULL) | (w->up.bias != NULL) << 1,
                   [C_ACTIVATION] = s->m->config.arch->act}};
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

// y = x w' for n tokens; INT8 where asked for and the format is one of blocks
static void run_gemm(Session *s, const Matrix *w, const float *x, const float *gate, float *y, int n,
                     int epilogue, float softcap, float scale)
{
    Gpu *g = s->gpu;
    int tile = n > 8 ? 32 : 8, type = w->type;
    bool floats = type == FORMAT_F32 || type == FORMAT_F16 || type == FORMAT_BF16;
    bool int8 = g->codes && tile == 32 && !floats;
    if (int8) {
        struct quantize_args q = {n * (w->cols / 32)};
        Dispatch d = {"quantize", {x, g->codes, g->scales}, 3, (q.groups + 3) / 4, 128, 0, {0}};
        gpu_dispatch(g, &d, &q, sizeof q);
    }
    struct gemm_args a = {matrix_args(w), w->cols, n, softcap};
    size_t rows = (w->rows + GEMM_ROWS - 1) / GEMM_ROWS, tokens = (n + tile - 1) / tile;
    a.w.scale *= scale;
    Dispatch d = {"gemm", {matrix_base(w), w->bias, x, int8 ? g->codes : NULL, int8 ? g->scales : NULL,
                  gate, y}, 7, rows * tokens, 128, 8192, {[C_FORMAT_0] = type, [C_RAGGED] = a.cols % 32 != 0,
                  [C_BIASES] = w->bias != NULL, [C_EPILOGUE] = epilogue,
                  [C_ACTIVATION] = s->m->config.arch->act, [C_SOFTCAPPED] = softcap > 0,
                  [C_TILE_TOKENS] = tile, [C_INT8] = int8}};
    gpu_dispatch(g, &d, &a, sizeof a);
}

// RoPE, cache write and attention: fused for one token, in two dispatches for more
static void run_attention(Session *s, const Layer *w, int n)
{
    const Config *c = &s->m->config;
    Cache *cache = &s->cache[s->l];
    struct attention_args a = {n, s->pos, w->n_head, w->n_kv, c->n_rot, w->sinks != NULL, cache->rows,
                               s->pos + n < cache->rows ? s->pos + n : cache->rows, cache->window,
                               cache->keep, c->eps, c->attn_scale, c->attn_cap};
    const float *turn = s->rope[w->window > 0], *qn = w->q_norm.w, *kn = w->k_norm.w;
    int nsg = a.used > 112 ? 8 : (a.used + 15) / 16;
    int pairing = !w->rope ? ROPE_NONE : c->arch->rope == NORM ? ROPE_PAIRS : ROPE_HALVES;
    Dispatch d = {"attention", {s->q, s->k, s->v, cache->k, cache->v, cache->pos, qn, kn, turn, w->sinks,
                  s->att}, 11, (size_t)n * w->n_head, 32 * nsg, ((2 + nsg) * c->hd + 2 * nsg) * sizeof(float),
                  {[C_SOFTCAPPED] = c->attn_cap > 0, [C_HEAD_DIM] = c->hd, [C_PAIRING] = pairing,
                   [C_QK_NORMED] = qn != NULL, [C_FUSED] = n == 1, [C_CAUSAL] = c->causal}};
    if (n > 1) {
        size_t heads = (size_t)n * (w->n_head + 2 * w->n_kv);
        Dispatch r = {"rope", {s->q, s->k, s->v, cache->k, cache->v, qn, kn, turn}, 8, (heads + 3) / 4, 128,
                      0, {0}};
        memcpy(r.constant, d.constant, sizeof r.constant);
        gpu_dispatch(s->gpu, &r, &a, sizeof a);
    }
    if (n >= 8) {
        d = (Dispatch){"flash_attention", {s->q, cache->k, cache->v, cache->pos, w->sinks, s->att}, 6,
                       (size_t)(n + 31) / 32 * w->n_head, 128, (16 * c->hd + 4 * 320) * sizeof(float),
                       {[C_SOFTCAPPED] = c->attn_cap > 0, [C_HEAD_DIM] = c->hd, [C_CAUSAL] = c->causal}};
    }
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

// ---- forward ----

// The single-dispatch half of a layer, where it is asked for and fits: see kernels.metal
static bool run_block(Session *s, const Layer *w)
{
    const Config *c = &s->m->config;
    const Matrix *m[4] = {&w->o, &w->gate, &w->up, &w->down};
    struct block_args a = {.inner = w->o.cols, .dim = c->dim, .ff = w->ff, .eps = c->eps};
    Dispatch d = {"ffn_block", {[4] = s->att, w->ffn_norm.w, s->x, s->gate}, 8, 1, 1024,
                  (32 + BLOCK_DIM) * sizeof(float), {[C_ACTIVATION] = c->arch->act}};
    bool fits = s->o.gpu_block && c->dim <= BLOCK_DIM && c->dim <= w->ff && !w->attn_post_norm.w && !w->ffn_post_norm.w;
    for (int i = 0; i < 4; i++) {
        fits = fits && !m[i]->bias;
        a.w[i] = matrix_args(m[i]);
        d.bound[i] = matrix_base(m[i]);
        d.constant[C_FORMAT_0 + i] = m[i]->type;
        d.constant[C_RAGGED] |= m[i]->cols % 32 != 0;
    }
    const Pipeline *p = fits ? gpu_pipeline(s->gpu, d.kernel, d.constant) : NULL;
    if (!p || p->threads < 1024) return false;
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
    return true;
}

// one token: five dispatches, seven with post-norms
static void decode_layer(Session *s, const Layer *w)
{
    const Matrix *qkv[3] = {&w->q, &w->k, &w->v}, *o = &w->o, *down = &w->down;
    float *to[3] = {s->q, s->k, s->v};
    const Norm *post[2] = {&w->attn_post_norm, &w->ffn_post_norm};
    float *sum[2] = {post[0]->w ? s->out : s->x, post[1]->w ? s->out : s->x};
    int epilogue[2] = {post[0]->w ? EPILOGUE_STORE : EPILOGUE_ADD, post[1]->w ? EPILOGUE_STORE : EPILOGUE_ADD};
    run_gemv(s, qkv, 3, s->x, &w->attn_norm, to, EPILOGUE_STORE, 0, 1);
    run_attention(s, w, 1);
    if (run_block(s, w)) return;
    run_gemv(s, &o, 1, s->att, NULL, &sum[0], epilogue[0], 0, 1);
    if (post[0]->w) run_norm(s, s->out, post[0], s->x, 1, EPILOGUE_ADD);
    run_glu(s, w, s->up);
    run_gemv(s, &down, 1, s->up, NULL, &sum[1], epilogue[1], 0, 1);
    if (post[1]->w) run_norm(s, s->out, post[1], s->x, 1, EPILOGUE_ADD);
}

// n tokens: norm, Q, K, V, RoPE, attention, Wo, norm, gate, up, down, and the post-norms
static void prefill_layer(Session *s, const Layer *w, int n)
{
    const Norm *post[2] = {&w->attn_post_norm, &w->ffn_post_norm};
    float *sum[2] = {post[0]->w ? s->out : s->x, post[1]->w ? s->out : s->x};
    int epilogue[2] = {post[0]->w ? EPILOGUE_STORE : EPILOGUE_ADD, post[1]->w ? EPILOGUE_STORE : EPILOGUE_ADD};
    run_norm(s, s->x, &w->attn_norm, s->h, n, EPILOGUE_STORE);
    run_gemm(s, &w->q, s->h, NULL, s->q, n, EPILOGUE_STORE, 0, 1);
    run_gemm(s, &w->k, s->h, NULL, s->k, n, EPILOGUE_STORE, 0, 1);
    run_gemm(s, &w->v, s->h, NULL, s->v, n, EPILOGUE_STORE, 0, 1);
    run_attention(s, w, n);
    run_gemm(s, &w->o, s->att, NULL, sum[0], n, epilogue[0], 0, 1);
    if (post[0]->w) run_norm(s, s->out, post[0], s->x, n, EPILOGUE_ADD);
    run_norm(s, s->x, &w->ffn_norm, s->h, n, EPILOGUE_STORE);
    run_gemm(s, &w->gate, s->h, NULL, s->gate, n, EPILOGUE_STORE, 0, 1);
    run_gemm(s, &w->up, s->h, s->gate, s->up, n, EPILOGUE_GLU, 0, 1);
    run_gemm(s, &w->down, s->up, NULL, sum[1], n, epilogue[1], 0, 1);
    if (post[1]->w) run_norm(s, s->out, post[1], s->x, n, EPILOGUE_ADD);
}

// logits of n rows; for one row also which is the largest
static void run_head(Session *s, int first, int n)
{
    const Config *c = &s->m->config;
    const Matrix *w = &s->m->head;
    Gpu *g = s->gpu;
    float *x = s->x + (size_t)first * c->dim, *h = s->h + (size_t)first * c->dim;
    if (n > 1) {
        run_norm(s, x, &s->m->out_norm, h, n, EPILOGUE_STORE);
        run_gemm(s, w, h, NULL, s->logits, n, EPILOGUE_STORE, c->logit_cap, c->logit_scale);
        return;
    }
    run_gemv(s, &w, 1, x, &s->m->out_norm, &s->logits, EPILOGUE_STORE, c->logit_cap, c->logit_scale);
    struct argmax_args a = {c->n_vocab};
    size_t threads = a.n < 1024 ? (a.n + 31) / 32 * 32 : 1024;
    Dispatch d = {"argmax", {s->logits, g->best}, 2, 1, threads, 2 * 32 * sizeof(float), {0}};
    gpu_dispatch(g, &d, &a, sizeof a);
    g->best_of = s->logits;
}

// live: the rows are marked with their positions. The warm-up's are not, so nobody sees them.
static void run_layers(Session *s, const int32_t *ids, int n, int pos, bool live)
{
    Gpu *g = s->gpu;
    int n_layer = s->m->config.n_layer, split = n_layer / MAX_COMMANDS + 1;
    if (split < SPLIT_LAYERS) split = SPLIT_LAYERS;
    s->n = n;
    s->pos = pos;
    g->best_of = NULL;
    memcpy(g->ids, ids, n * sizeof *ids);
    each_row(s, NULL, n, angles_row);
    run_embed(s, n);
    for (s->l = 0; s->l < n_layer; s->l++) {
        Cache *cache = &s->cache[s->l];
        for (int i = 0; live && i < n; i++) cache->pos[cache_row(cache, pos + i)] = pos + i;
        if (n == 1) decode_layer(s, &s->m->layers[s->l]);
        else prefill_layer(s, &s->m->layers[s->l], n);
        if (n == 1 || s->l % split != split - 1 || s->l + 1 == n_layer) continue;
        gpu_commit(g);   // the GPU begins while the rest is encoded
        gpu_commands(g);
    }
}

static bool gpu_forward(Session *s, const int32_t *ids, int n, int pos, int first)
{
    if (!s->gpu) return false;
    gpu_begin(s->gpu);
    run_layers(s, ids, n, pos, true);
    if (first < n) run_head(s, first, n - first < LOGIT_ROWS ? n - first : LOGIT_ROWS);
    return gpu_end(s);
}

static bool gpu_head(Session *s, int first, int n)
{
    if (!s->gpu) return false;
    gpu_begin(s->gpu);
    run_head(s, first, n);
    return gpu_end(s);
}

// the id of the largest of these logits if the GPU found it, or -1
static int32_t gpu_argmax(const Session *s, const float *logits)
{
    const Gpu *g = s->gpu;
    return g && logits && g->best_of == logits ? *g->best : -1;
}

// ---- open ----

// NULL, or what this model has that the GPU path does not do
static const char *gpu_lacks(const Model *m)
{
    const Config *c = &m->config;
    if (c->arch->norm != RMS || c->arch->flags & (ENCODER | QK_NORM_LATE)) return "its norms";
    if (c->arch->act > RELU2) return "its activation";
    if (m->pos_embd.data || m->type_embd.data || m->embd_norm.w) return "its embedding";
    if (c->hd != c->vd || c->hd % 32 || c->hd > HEAD_MAX || c->n_rot % 2) return "its head size";
    if (c->residual_scale != 1 || c->clamp_qkv > 0 || c->temp_scale || c->alibi > 0) return "its scales";
    if (!m->out_norm.w || m->out_norm.b) return "its norms";
    for (int l = 0; l < c->n_layer; l++) {
        const Layer *w = &m->layers[l];
        if (w->conv_in.data || w->router.data) return "its layers";
        if (w->parallel || !w->attn_norm.w || !w->ffn_norm.w || !w->gate.data) return "its layers";
        if (w->q.rows != (int64_t)w->n_head * c->hd) return "gated attention";
        const Norm *norms[] = {&w->attn_norm, &w->ffn_norm, &w->attn_post_norm, &w->ffn_post_norm,
                               &w->q_norm, &w->k_norm};
        for (int i = 0; i < 6; i++) {
            if (norms[i]->b) return "its norms";
            if (i >= 4 && norms[i]->w && (norms[i]->group != c->hd || norms[i]->n != c->hd))
                return "its QK norms";
        }
        if (!w->q_norm.w != !w->k_norm.w) return "its QK norms";
    }
    return NULL;
}

// A vector that was converted when the file was loaded lies outside the maps: the GPU gets a copy.
// Its address is looked up, so the copy goes under the original's address.
static bool share_vector(Gpu *g, const float *v, size_t n)
{
    if (!v || gpu_find(g, v)) return true;
    void *copy = gpu_share(g, NULL, n * sizeof *v);
    if (!copy) return false;
    memcpy(copy, v, n * sizeof *v);
    g->shared[g->n_shared - 1].base = (const char *)v;
    g->shared[g->n_shared - 1].size = n * sizeof *v;
    return true;
}

static bool share_vectors(Gpu *g, const Model *m)
{
    bool ok = share_vector(g, m->out_norm.w, m->out_norm.n);
    for (int l = 0; l < m->config.n_layer; l++) {
        const Layer *w = &m->layers[l];
        const Norm *norms[] = {&w->attn_norm, &w->ffn_norm, &w->attn_post_norm, &w->ffn_post_norm,
                               &w->q_norm, &w->k_norm};
        const Matrix *matrices[] = {&w->q, &w->k, &w->v, &w->o, &w->gate, &w->up, &w->down};
        for (int i = 0; i < 6; i++) ok = ok && share_vector(g, norms[i]->w, norms[i]->n);
        for (int i = 0; i < 7; i++) ok = ok && share_vector(g, matrices[i]->bias, matrices[i]->rows);
        ok = ok && share_vector(g, w->sinks, w->n_head);
    }
    return ok;
}

static bool share_all(Session *s)
{
    Gpu *g = s->gpu;
    const Gguf *f = &s->m->gguf;
    size_t n = s->o.chunk, wide = 0;
    bool ok = true;
    g->ids = gpu_share(g, NULL, n * sizeof *g->ids);
    g->best = gpu_share(g, NULL, sizeof *g->best);
    for (size_t i = 0; i < f->n_maps; i++) ok = ok && gpu_share(g, f->maps[i].base, f->maps[i].size);
    ok = ok && gpu_share(g, s->kv_base, s->kv_bytes) && gpu_share(g, s->scratch_base, s->scratch_bytes);
    for (int l = 0; s->o.gpu_int8 && l < s->m->config.n_layer; l++) {
        const Layer *w = &s->m->layers[l];
        const Matrix *inputs[] = {&w->q, &w->o, &w->down};
        for (int i = 0; i < 3; i++) wide = (size_t)inputs[i]->cols > wide ? (size_t)inputs[i]->cols : wide;
    }
    if (wide) {
        g->codes = gpu_share(g, NULL, n * wide);
        g->scales = gpu_share(g, NULL, n * (wide / 32) * 3 * sizeof *g->scales);
        ok = ok && g->codes && g->scales;
    }
    return (ok && g->ids && g->best && share_vectors(g, s->m)) || gpu_fail(g, "no memory for it", NULL);
}

static bool gpu_open(Session *s)
{
    const char *lacks = gpu_lacks(s->m);
    int32_t none = 0;
    Gpu *g = s->gpu = gpu_new();
    if (!g) return false;
    void *pool = objc_autoreleasePoolPush();
    if (lacks) snprintf(g->why, sizeof g->why, "the GPU path does not know %s yet", lacks);
    bool ok = !lacks && gpu_library(g) && share_all(s);
    objc_autoreleasePoolPop(pool);
    if (!ok) {
        gpu_close(s);
        return false;
    }
    gpu_begin(g);   // warm-up: one token on a row that nobody sees compiles what decoding needs
    run_layers(s, &none, 1, 0, false);
    run_head(s, 0, 1);
    return gpu_end(s);
}
