// SPDX-License-Identifier: MIT
// metal.c: llm.c's forward pass on an Apple GPU, in plain C; llm.c includes it under LLM_METAL. It
// has never run on Apple hardware: the tests run it on a device made of software. llm.c calls
//
//   gpu_open(s), gpu_close(s)            when a session begins and ends
//   gpu_forward(s, ids, n, pos, first)   instead of forward, and of output_logits for the rows from
//                                        `first` on (n: for none), all in one command buffer
//   gpu_logits(s, first, n)              instead of output_logits, for further rows of the chunk
//   gpu_argmax(s, logits)                for the id of the largest of these logits
//
// When one of them returns false, or gpu_argmax -1, the CPU does the work: there is no GPU, or the
// kernels lack something that the model needs, or a call of Metal has failed. The CPU can take over
// in the middle of a text, because both use the same pages of weights, KV cache and scratch.
#include <assert.h>
#define METAL_HOST
#include "kernels.metal"
#undef METAL_HOST

// the kernels take llm.c's activations and pairings as they are
_Static_assert((int)ACT_SILU == SILU && (int)ACT_GELU == GELU && (int)ACT_RELU2 == RELU2, "");
_Static_assert((int)PAIRING_NONE == ROPE_NONE && (int)PAIRING_NEIGHBOURS == ROPE_PAIRS &&
               (int)PAIRING_HALVES == ROPE_HALVES, "");

// ---- Objective-C, by hand ----
//
// A method is a C function, found by name. It must be called through its exact type: on arm64 the
// arguments of a variadic call travel in other places. Apple's rules of ownership: what "new",
// "alloc", "Copy" or "Create" returns is ours to release; all else belongs to the autorelease pool.

typedef void *id, *SEL;
typedef void (*IMP)(void);
typedef struct { size_t width, height, depth; } MTLSize;

id MTLCreateSystemDefaultDevice(void), MTLCopyAllDevices(void);
id objc_getClass(const char *), object_getClass(id);
SEL sel_registerName(const char *);
IMP class_getMethodImplementation(id, SEL);
void *objc_autoreleasePoolPush(void);
void objc_autoreleasePoolPop(void *);

// X(name here, selector, result, parameters), where NSUInteger is size_t
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

static size_t nil_method(void) { return 0; }   // what answers a message to nil

// sends the message `name` to an object: looks its method up, and calls it
#define send(g, name, object, ...) ({ \
    id to_ = (object); \
    SEL sel_ = (g)->sel[SEND_##name]; \
    IMP code_ = to_ ? class_getMethodImplementation(object_getClass(to_), sel_) : (IMP)nil_method; \
    ((send_##name *)code_)(to_, sel_, ##__VA_ARGS__); })

enum { MTLDataTypeInt = 29, MTLCommandBufferStatusCompleted = 4, MTLStorageModeShared = 0 };

// quant.h and kernels.metal as one text inside this program
__asm__(".data\nmetal_source: .incbin \"quant.h\"\n"
        ".incbin \"kernels.metal\"\n.byte 0\n.previous\n");
extern const char metal_source[] __asm__("metal_source");

// ---- device ----

enum { MAX_PIPELINES = 96, MAX_COMMANDS = 32, MAX_BOUND = 14, SPLIT_LAYERS = 8 };
typedef struct { const char *base; size_t size; id buffer; } Shared;   // with the CPU
typedef struct { const char *kernel; int constant[N_CONSTANTS]; size_t threads; id state; } Variant;

typedef struct {
    SEL sel[N_METHODS];
    id device, queue, library, encoder, commands[MAX_COMMANDS];
    void *pool;                 // of the objects that a forward autoreleases
    Shared *shared;             // [n_shared] maps of the file, KV cache, scratch, small vectors
    Variant pipeline[MAX_PIPELINES];
    int n_shared, n_pipelines, n_commands;   // n_commands: of this forward
    int32_t *ids, *best;        // [chunk] tokens; [1] argmax of the last logits
    int8_t *codes;              // [chunk][widest input] if int8 is asked for, else NULL
    float *scales;              // [chunk][widest input / 32][3], for quantize
    const float *coded;         // the input that they are of, or NULL
    const float *best_of;       // the logits whose argmax `best` is, or NULL
    char why[200];              // what went wrong first, or empty
} Gpu;

static Gpu *gpu_new(void) {
    Gpu *g = calloc(1, sizeof *g);
#define X(name, selector, R, types) if (g) g->sel[SEND_##name] = sel_registerName(selector);
    METHODS(X)
#undef X
    return g;
}

// notes what went wrong, unless something did before; error: what Metal says about it, or NULL
static bool gpu_fail(Gpu *g, const char *what, id error) {
    const char *text = send(g, utf8, send(g, describe, error));
    if (!g->why[0])
        snprintf(g->why, sizeof g->why, "%s%s%s", what, text ? ": " : "", text ? text : "");
    for (char *c = g->why; *c; c++)
        if ((unsigned char)*c < ' ') *c = ' ';   // a compiler's message may have many lines
    return false;
}

// Under ssh or tmux there is no default device, but there may be a device all the same.
static id gpu_device(Gpu *g) {
    id one = MTLCreateSystemDefaultDevice(), all = one ? NULL : MTLCopyAllDevices();
    if (send(g, count, all)) one = send(g, retain, send(g, object_at, all, 0));
    send(g, release, all);
    return one;
}

static bool gpu_library(Gpu *g) {   // compiles the kernels
    id error = NULL, text = send(g, string, objc_getClass("NSString"), metal_source);
    g->device = gpu_device(g);
    if (!g->device) return gpu_fail(g, "no Metal device", NULL);
    g->queue = send(g, new_queue, g->device);
    id options = send(g, make, objc_getClass("MTLCompileOptions"));
    send(g, set_fast_math, options, false);   // the kernels must tell NaN from numbers
    g->library = send(g, new_library, g->device, text, options, &error);
    send(g, release, options);
    if (!g->queue) return gpu_fail(g, "no command queue", NULL);
    return g->library ? true : gpu_fail(g, "kernels.metal", error);   // error alone: a warning
}

// lets the GPU see the pages of base[size], or (base NULL) a new buffer; returns its address
static void *gpu_share(Gpu *g, void *base, size_t size) {
    size_t unit = base ? sysconf(_SC_PAGESIZE) : 1, whole = (size + unit - 1) / unit * unit;
    Shared *more = realloc(g->shared, (g->n_shared + 1) * sizeof *more);
    if (!more) return NULL;
    g->shared = more;
    if (whole > send(g, max_length, g->device)) return NULL;   // the longest buffer it takes
    id buffer = base ? send(g, share_pages, g->device, base, whole, MTLStorageModeShared, NULL)
                     : send(g, new_buffer, g->device, whole, MTLStorageModeShared);
    if (!buffer) return NULL;
    if (!base) base = send(g, contents, buffer);
    g->shared[g->n_shared++] = (Shared){base, whole, buffer};
    return base;
}

static const Shared *gpu_find(const Gpu *g, const void *p) {   // what p points into
    for (int i = 0; i < g->n_shared; i++) {
        const Shared *at = &g->shared[i];
        if ((const char *)p >= at->base && (const char *)p < at->base + at->size) return at;
    }
    return NULL;
}

// a kernel with these function constants, compiled when it is first asked for
static const Variant *gpu_pipeline(Gpu *g, const char *kernel, const int *constant) {
    for (int i = 0; i < g->n_pipelines; i++) {
        Variant *p = &g->pipeline[i];
        if (strcmp(p->kernel, kernel)) continue;
        if (!memcmp(p->constant, constant, sizeof p->constant)) return p;
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
    if (send(g, simd_width, p->state) != SIMD_LANES)
        gpu_fail(g, "SIMD-groups are not 32 wide", NULL);
    p->kernel = kernel;
    memcpy(p->constant, constant, sizeof p->constant);
    p->threads = send(g, max_threads, p->state);
    g->n_pipelines++;
    return p;
}

static void gpu_commands(Gpu *g) {   // begins one more command buffer
    id commands = send(g, commands, g->queue);
    g->encoder = send(g, encoder, commands);
    if (g->encoder) g->commands[g->n_commands++] = commands;
    else gpu_fail(g, "no command encoder", NULL);
}

static void gpu_begin(Gpu *g) {   // what is encoded from here on, gpu_wait runs
    g->pool = objc_autoreleasePoolPush();
    g->n_commands = 0;
    gpu_commands(g);
}

static void gpu_commit(Gpu *g) {   // the GPU may start on what was encoded
    if (!g->encoder) return;
    send(g, end_encoding, g->encoder);
    send(g, commit, g->commands[g->n_commands - 1]);
}

// Also called after a failure: one line tells which, and without s->gpu the CPU does the work.
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

static bool gpu_wait(Gpu *g) {   // false if anything failed since gpu_open
    gpu_commit(g);
    for (int i = 0; i < g->n_commands; i++) {
        send(g, wait, g->commands[i]);
        if (send(g, status, g->commands[i]) != MTLCommandBufferStatusCompleted)
            gpu_fail(g, "the GPU stopped", send(g, error, g->commands[i]));
    }
    objc_autoreleasePoolPop(g->pool);
    return !g->why[0];
}

static bool gpu_end(Session *s) {   // gpu_wait; after a failure the session has no GPU
    bool ok = gpu_wait(s->gpu);
    if (!ok) gpu_close(s);
    return ok;
}

// one dispatch: buffers 0 to n - 1, NULL where the variant ignores one; then come the arguments
typedef struct {
    const char *kernel;
    const void *bound[MAX_BOUND];
    int n;
    size_t groups, threads, shared;   // threadgroups; for each its threads, and floats it shares
    int constant[N_CONSTANTS];
} Dispatch;

static void gpu_dispatch(Gpu *g, const Dispatch *d, const void *args, size_t size) {
    const Variant *p = g->why[0] ? NULL : gpu_pipeline(g, d->kernel, d->constant);
    if (!p) return;
    if (d->threads > p->threads) gpu_fail(g, "it has too few threads for a kernel", NULL);
    if (d->threads > p->threads) return;
    send(g, set_pipeline, g->encoder, p->state);
    for (int i = 0; i < d->n; i++) {
        const char *from = d->bound[i] ? d->bound[i] : g->shared[0].base;   // Metal wants some
        const Shared *at = gpu_find(g, from);
        assert(at);   // all memory of a session is shared when it is opened
        send(g, set_buffer, g->encoder, at->buffer, from - at->base, i);
    }
    send(g, set_bytes, g->encoder, args, size, d->n);
    if (d->shared) send(g, set_shared, g->encoder, (sizeof(float) * d->shared + 15) / 16 * 16, 0);
    send(g, dispatch, g->encoder, ((MTLSize){d->groups, 1, 1}), ((MTLSize){d->threads, 1, 1}));
}

// ---- operations ----
//
// Each encodes one dispatch, or two where it says so; kernels.metal says what a kernel computes.

// A matrix may begin at any byte. What is bound is the multiple of 16 before it.
static struct kernel_matrix matrix_args(const Matrix *w, float scale) {
    return (struct kernel_matrix){(uintptr_t)w->data % 16, quant_row_bytes(w->type, w->cols),
                                  w->rows, scale * (w->scale ? *w->scale : 1)};
}

static const void *matrix_base(const Matrix *w) { return w->data - (uintptr_t)w->data % 16; }

static void run_embed(Session *s, int n) {   // s->x[n][dim] = rows g->ids[n] of the embedding
    const Matrix *w = &s->m->embd;
    Gpu *g = s->gpu;
    struct embed_args a = {matrix_args(w, s->m->config.embd_scale), w->cols};
    Dispatch d = {"embed", {matrix_base(w), g->ids, s->x}, 3, n, SIMD_LANES, 0,
                  {[C_FORMAT_0] = w->type, [C_RAGGED] = w->cols % 32 != 0}};
    gpu_dispatch(g, &d, &a, sizeof a);
}

// y[n][dim] = norm(x), or += that
static void run_norm(Session *s, const float *x, const Norm *w, float *y, int n, int epilogue) {
    struct norm_args a = {s->m->config.dim, s->m->config.eps};
    Dispatch d = {"norm", {x, w->w, NULL, y}, 4, n, threads_for(a.cols, NORM_THREADS), NORM_FLOATS,
                  {[C_EPILOGUE] = epilogue}};
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

// y[i] = scale * w[i] x for up to three matrices, with x normalised first if there is a norm; or
// (EPILOGUE_GLU) y[0] = activation(w[0] x) * (w[1] x)
static void run_gemv(Session *s, const Matrix *const *w, int k, const float *x, const Norm *norm,
                     float *const *y, int epilogue, float cap, float scale) {
    struct gemv_args a = {.cols = w[0]->cols, .eps = s->m->config.eps, .softcap = cap};
    Dispatch d = {"gemv", {[6] = x, norm ? norm->w : NULL}, 11, 0, GEMV_SIMDGROUPS * SIMD_LANES,
                  GEMV_SIMDGROUPS * X_FLOATS,
                  {[C_RAGGED] = a.cols % 32 != 0, [C_NORMED] = norm != NULL,
                   [C_EPILOGUE] = epilogue, [C_SOFTCAPPED] = cap > 0,
                   [C_ACTIVATION] = s->m->config.arch->act}};
    bool glu = epilogue == EPILOGUE_GLU;
    int units = 0;
    for (int i = 0; i < k; i++) {
        a.w[i] = matrix_args(w[i], scale);
        d.bound[i] = matrix_base(w[i]);
        d.bound[3 + i] = w[i]->bias;
        d.bound[8 + i] = glu ? y[0] : y[i];
        d.constant[C_FORMAT_0 + i] = w[i]->type;
        d.constant[C_BIASES] |= (w[i]->bias != NULL) << i;
        if (i == 0 || !glu) units += gemv_units(w[i]->type, w[i]->rows);
    }
    d.groups = div_up(units, GEMV_SIMDGROUPS);
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

static bool has_codes(const Matrix *w) { return !quant_row_bytes(w->type, 1); }

// g->codes of x[n][cols] for the next products of x, with the matrices w[k], if they can be of
// integers: that takes more than a few tokens and formats with codes, which have no row of a
// single weight
static void run_quantize(Session *s, const Matrix *const *w, int k, const float *x, int n) {
    Gpu *g = s->gpu;
    struct quantize_args a = {n * (w[0]->cols / 32)};
    Dispatch d = {"quantize", {x, g->codes, g->scales}, 3, div_up(a.groups, UNIT_SIMDGROUPS),
                  UNIT_SIMDGROUPS * SIMD_LANES, 0, {0}};
    g->coded = g->codes && n > GEMM_FEW ? x : NULL;
    for (int i = 0; i < k; i++)
        if (!has_codes(w[i])) g->coded = NULL;
    if (g->coded) gpu_dispatch(g, &d, &a, sizeof a);
}

// y[i][n][rows] = scale * x w[i]' for up to three matrices, with the epilogue
static void run_gemm(Session *s, const Matrix *const *w, int k, const float *x, const float *gate,
                     float *const *y, int n, int epilogue, float cap, float scale) {
    Gpu *g = s->gpu;
    bool int8 = g->coded == x;
    int tile = int8 ? GEMM_SOME : gemm_tokens(n);
    struct gemm_args a = {.cols = w[0]->cols, .tokens = n, .softcap = cap};
    Dispatch d = {"gemm", {[6] = x, g->codes, int8 ? g->scales : NULL, gate}, 13, 0, GEMM_THREADS,
                  gemm_floats(tile),
                  {[C_RAGGED] = a.cols % 32 != 0, [C_EPILOGUE] = epilogue, [C_INT8] = int8,
                   [C_ACTIVATION] = s->m->config.arch->act, [C_SOFTCAPPED] = cap > 0,
                   [C_TILE_TOKENS] = tile}};
    for (int i = 0; i < k; i++) {
        a.w[i] = matrix_args(w[i], scale);
        d.bound[i] = matrix_base(w[i]);
        d.bound[3 + i] = w[i]->bias;
        d.bound[10 + i] = y[i];
        d.constant[C_FORMAT_0 + i] = w[i]->type;
        d.constant[C_BIASES] |= (w[i]->bias != NULL) << i;
        d.groups += (size_t)div_up(w[i]->rows, GEMM_ROWS) * div_up(n, tile);
    }
    gpu_dispatch(g, &d, &a, sizeof a);
}

// RoPE, the write to the cache, and s->att[n][n_head][hd]: one dispatch for one token, else two
static void run_attention(Session *s, const Layer *w, int n) {
    const Config *c = &s->m->config;
    Cache *kv = &s->cache[s->l];
    int used = s->pos + n < kv->rows ? s->pos + n : kv->rows, nsg = attention_simdgroups(used);
    struct attention_args a = {n, s->pos, w->n_head, w->n_kv, c->n_rot, w->sinks != NULL, kv->rows,
                               used, kv->window, kv->keep, c->eps, c->attn_scale, c->attn_cap};
    const float *angles = s->angles[w->window > 0], *q_norm = w->q_norm.w, *k_norm = w->k_norm.w;
    Dispatch r = {"rope", {s->q, s->k, s->v, kv->k, kv->v, q_norm, k_norm, angles}, 8,
                  div_up(n * (w->n_head + 2 * w->n_kv), UNIT_SIMDGROUPS),
                  UNIT_SIMDGROUPS * SIMD_LANES, 0,
                  {[C_SOFTCAPPED] = c->attn_cap > 0, [C_HEAD_DIM] = c->hd,
                   [C_PAIRING] = w->rotated ? c->rope : PAIRING_NONE,
                   [C_QK_NORMED] = q_norm != NULL, [C_FUSED] = n == 1, [C_CAUSAL] = c->causal}};
    Dispatch d = {"attention", {s->q, s->k, s->v, kv->k, kv->v, kv->pos, q_norm, k_norm, angles,
                                w->sinks, s->att}, 11, (size_t)n * w->n_head, nsg * SIMD_LANES,
                  attention_floats(c->hd, nsg), {0}};
    if (n >= FLASH_MIN)
        d = (Dispatch){"flash_attention", {s->q, kv->k, kv->v, kv->pos, w->sinks, s->att}, 6,
                       (size_t)div_up(n, FLASH_QUERIES) * w->n_head, FLASH_THREADS,
                       flash_floats(c->hd), {0}};
    memcpy(d.constant, r.constant, sizeof d.constant);
    if (n > 1) gpu_dispatch(s->gpu, &r, &a, sizeof a);
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

// The rest of a layer after attention in one dispatch, if it is asked for and ffn_block can do it
static bool run_block(Session *s, const Layer *w) {
    const Config *c = &s->m->config;
    const Matrix *m[4] = {&w->o, &w->gate, &w->up, &w->down};
    struct block_args a = {.inner = w->o.cols, .dim = c->dim, .ff = w->ff, .eps = c->eps};
    Dispatch d = {"ffn_block", {[4] = s->att, w->ffn_norm.w, s->x, s->gate}, 8, 1, BLOCK_DIM,
                  BLOCK_FLOATS, {[C_ACTIVATION] = c->arch->act}};
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
    if (!p || p->threads < BLOCK_DIM) return false;   // the compiler may allow fewer threads
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
    return true;
}

// ---- forward ----

// x[n][dim] += w in, or x += post(w in) where there is a post-norm
static void run_residual(Session *s, const Matrix *w, const float *in, const Norm *post, int n) {
    float *y = post->w ? s->out : s->x;
    int epilogue = post->w ? EPILOGUE_STORE : EPILOGUE_ADD;
    if (n == 1) run_gemv(s, &w, 1, in, NULL, &y, epilogue, 0, 1);
    else run_quantize(s, &w, 1, in, n);
    if (n > 1) run_gemm(s, &w, 1, in, NULL, &y, n, epilogue, 0, 1);
    if (post->w) run_norm(s, s->out, post, s->x, n, EPILOGUE_ADD);
}

// 5 dispatches for one token, 9 for a chunk, and one more for each post-norm, and for each of four
// inputs whose products are of integers
static void run_layer(Session *s, const Layer *w, int n) {
    const Matrix *qkv[3] = {&w->q, &w->k, &w->v}, *pair[2] = {&w->gate, &w->up};
    float *to[3] = {s->q, s->k, s->v};
    if (n == 1) {
        run_gemv(s, qkv, 3, s->x, &w->attn_norm, to, EPILOGUE_STORE, 0, 1);
    } else {
        run_norm(s, s->x, &w->attn_norm, s->h, n, EPILOGUE_STORE);
        run_quantize(s, qkv, 3, s->h, n);
        run_gemm(s, qkv, 3, s->h, NULL, to, n, EPILOGUE_STORE, 0, 1);
    }
    run_attention(s, w, n);
    if (n == 1 && run_block(s, w)) return;
    run_residual(s, &w->o, s->att, &w->attn_post_norm, n);
    if (n == 1) {
        run_gemv(s, pair, 2, s->x, &w->ffn_norm, &s->up, EPILOGUE_GLU, 0, 1);
    } else {
        run_norm(s, s->x, &w->ffn_norm, s->h, n, EPILOGUE_STORE);
        run_quantize(s, pair, 2, s->h, n);
        run_gemm(s, &pair[0], 1, s->h, NULL, &s->gate, n, EPILOGUE_STORE, 0, 1);
        run_gemm(s, &pair[1], 1, s->h, s->gate, &s->up, n, EPILOGUE_GLU, 0, 1);
    }
    run_residual(s, &w->down, s->up, &w->ffn_post_norm, n);
}

// s->logits[n][n_vocab] for n rows of x from `first` on; of a single row also the argmax
static void run_output(Session *s, int first, int n) {
    const Config *c = &s->m->config;
    const Matrix *w = &s->m->output;
    const Norm *norm = &s->m->out_norm;
    Gpu *g = s->gpu;
    float *x = s->x + (size_t)first * c->dim, *h = s->h + (size_t)first * c->dim, *y = s->logits;
    struct argmax_args a = {c->n_vocab};
    Dispatch d = {"argmax", {y, g->best}, 2, 1, threads_for(a.n, ARGMAX_THREADS), ARGMAX_FLOATS,
                  {0}};
    g->best_of = n == 1 ? y : NULL;
    if (n > 1) {
        run_norm(s, x, norm, h, n, EPILOGUE_STORE);
        run_quantize(s, &w, 1, h, n);
        run_gemm(s, &w, 1, h, NULL, &y, n, EPILOGUE_STORE, c->logit_cap, c->logit_scale);
    } else {
        run_gemv(s, &w, 1, x, norm, &y, EPILOGUE_STORE, c->logit_cap, c->logit_scale);
        gpu_dispatch(g, &d, &a, sizeof a);
    }
}

// Embedding and all layers. The rows of the cache get their positions if they are `live`; those of
// the warm-up get none, so that no query ever sees them.
static void run_layers(Session *s, const int32_t *ids, int n, int pos, bool live) {
    Gpu *g = s->gpu;
    int n_layer = s->m->config.n_layer, split = n_layer / MAX_COMMANDS + SPLIT_LAYERS;
    s->pos = pos;
    g->best_of = NULL;
    memcpy(g->ids, ids, n * sizeof *ids);
    parallel(s->pool, angles_row, s, NULL, n);
    run_embed(s, n);
    for (s->l = 0; s->l < n_layer; s->l++) {
        Cache *cache = &s->cache[s->l];
        for (int i = 0; live && i < n; i++) cache->pos[cache_row(cache, pos + i)] = pos + i;
        run_layer(s, &s->m->layers[s->l], n);
        if (n == 1 || (s->l + 1) % split) continue;
        gpu_commit(g);   // the GPU begins on these layers while the next are encoded
        gpu_commands(g);
    }
}

static bool gpu_forward(Session *s, const int32_t *ids, int n, int pos, int first) {
    if (!s->gpu) return false;
    gpu_begin(s->gpu);
    run_layers(s, ids, n, pos, true);
    if (first < n) run_output(s, first, n - first < LOGIT_ROWS ? n - first : LOGIT_ROWS);
    return gpu_end(s);
}

static bool gpu_logits(Session *s, int first, int n) {
    if (!s->gpu) return false;
    gpu_begin(s->gpu);
    run_output(s, first, n);
    return gpu_end(s);
}

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
    if (w->q.rows != (int64_t)w->n_head * c->hd) return "gated attention";   // queries and gates
    for (int i = 0; i < 6; i++) {
        bool per_head = norms[i]->group == c->hd && norms[i]->n == c->hd;
        if (norms[i]->b || (i >= 4 && norms[i]->w && !per_head)) return "norms";
    }
    return !w->q_norm.w != !w->k_norm.w ? "norms" : NULL;   // of both, or of none
}

// what this model has that the kernels do not know, or NULL
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
    if (gguf_int(&m->gguf, "general.alignment", 32) % 16) return "alignment";
    for (int l = 0; !lacks && l < c->n_layer; l++) lacks = layer_lacks(c, &m->layers[l]);
    return lacks;
}

// Shares all that kernels read or write: a buffer of our own (g->best, ids, scales, codes), the
// files of the model, KV cache and scratch.
static bool share_all(Session *s) {
    Gpu *g = s->gpu;
    const Map *maps = s->m->gguf.maps;
    size_t n = s->o.chunk, wide = 0;
    for (size_t i = 0; s->o.gpu_int8 && i < s->m->gguf.n_tensors; i++) {
        const Tensor *t = &s->m->gguf.tensors[i];
        if (t->ne[0] > (int64_t)wide) wide = t->ne[0];
    }
    wide = (wide + 31) / 32 * 32;   // columns of the widest input, as whole groups
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

static void gpu_open(Session *s) {
    const char *lacks = gpu_lacks(s->m);
    int32_t none = 0;
    Gpu *g = s->gpu = gpu_new();
    if (!g) return;
    void *pool = objc_autoreleasePoolPush();
    if (lacks) snprintf(g->why, sizeof g->why, "the GPU path does not know this model's %s", lacks);
    bool ok = !lacks && gpu_library(g) && share_all(s);
    objc_autoreleasePoolPop(pool);
    if (!ok) return gpu_close(s);
    gpu_begin(g);   // warm-up: a token in a row that no query sees compiles what decode needs
    run_layers(s, &none, 1, 0, false);
    run_output(s, 0, 1);
    gpu_end(s);
}
