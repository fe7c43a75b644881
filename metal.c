// SPDX-License-Identifier: MIT
// metal.c: llm.c's forward pass on a GPU, in plain C; llm.c includes it with LLM_METAL for Apple's
// GPUs, with LLM_CUDA for NVIDIA's. Apple's side has run on a GPU in software alone, in the tests.
//
// In come a Session and the ids of a chunk; out come logits in s->logits, and new rows and states
// in the session's caches. kernels.metal says what a kernel computes; here stands which kernels
// run, in what order and on which buffers. Read section 6 first, whose run_layer is
// forward_layer of llm.c once more; then run_products, run_gemv and run_gemm in 5.
//
//    1. the device, 2. NVIDIA, 3. Apple   buffers and dispatches, by each system's functions
//    4. what both share      memory, variants of kernels, and the way to the device
//    5. operations           a few dispatches each, from embeddings to experts
//    6. forward              layers, logits, and what happens if the GPU fails
//    7. open                 what the GPU lacks, its memory, the first pass
//
// llm.c has the prototypes of what it calls, gpu_attach to gpu_copy. The CPU does the work if there
// is no GPU, if it lacks what a model needs (gpu_lacks, memory), or after a driver's call failed.
#define METAL_HOST
#include "kernels.metal"
#undef METAL_HOST

_Static_assert((int)DELTA_LAYOUT == DELTA_ROWS, "");   // the state as llm.c has it

// ---- 1. the device ----
//
// The functions device_* stand here twice, for NVIDIA and for Apple. All that other code knows is
// whether the GPU has copies of the host's memory (DEVICE_COPIES), g->cores and g->room.

// tiles of gemm and flash_attention: buffers, tokens, threadgroup memory; SOFT_*: of the tests' GPU
#if defined(LLM_CUDA) || defined(LARGE_TILES)
enum { TILE_BUFFERS = 2, GEMM_TOKENS = 128, SHARED_BYTES = 99 << 10,
       SOFT_CORES = 5, SOFT_ROOM = 227 << 10 };
#else
enum { TILE_BUFFERS = 1, GEMM_TOKENS = 64, SHARED_BYTES = 32 << 10, SOFT_CORES = 0, SOFT_ROOM = 0 };
#endif
enum { MAX_PIPELINES = 512, MAX_BOUND = 16, EARLY_LAYERS = 4, SPLIT_LAYERS = 8, MAX_SPLITS = 32,
       LONG_LAUNCH = 64 << 10, OWN_COLS = 16384, SPARE_BYTES = 512 << 20, SENT_TOKENS = 64,
       MAX_SENT = 32 };
// memory of the host, and what stands for it on the device: a buffer (Apple), a copy (NVIDIA)
typedef struct { char *base; size_t size; void *buffer; } Shared;

// one dispatch; bound: buffers 0 to n - 1, NULL where the variant ignores one (n: its arguments)
typedef struct {
    const char *kernel;
    const void *bound[MAX_BOUND];
    int n;
    size_t groups, threads, shared;   // threadgroups; threads and shared floats of each
    int constant[N_CONSTANTS];
} Dispatch;
// a kernel compiled for the dispatches that have the function constants of this one
typedef struct { Dispatch d; size_t threads; void *state; } Variant;   // threads: at most
// groups and threads of a Dispatch with a SIMD-group for each of n
#define UNITS(n) div_up(n, UNIT_SIMDGROUPS), UNIT_SIMDGROUPS * SIMD_LANES

typedef struct Device Device;
typedef struct Gpu {
    Device *device;
    Shared *shared;             // [n_shared] own, maps of the file, owned weights, cache, scratch
    Variant pipeline[MAX_PIPELINES];
    int n_shared, n_pipelines;
    size_t longest;             // bytes that a buffer may have
    int cores, room;            // NVIDIA: its cores; bytes of threadgroup memory. Apple: 0
    size_t many;                // of more bytes of weights a core, a launch is long
    int own_cols;               // more columns of a few tokens' inputs are packed by ring_inputs
    Pool *pool;                 // the session's, for the compiler
    Map own;                    // memory for what follows
    int32_t *now, *ids;         // [NOW_COUNTS + FEW * n_head], see kernels.metal; [chunk] tokens
    uint16_t *halves;           // [rows][row_halves of an input], which gemm reads
    float *powers;              // [rows] see halve
    float *gate, *up;           // of experts: [chunk * n_used][ff]; gate also takes their results
    int32_t *place, *tiles;     // [chunk * n_used], [tiles][3] of sort_choices
    float *conv;                // inputs of delta_rule, see run_rule
    float *inputs;              // [chunk][n_layer][per_layer]
    float *packed;              // what ring_inputs makes of the inputs of a few tokens
    float *parts;               // [FEW][n_head][slices][vd + 2] of a long KV ring, see Spread
    int sure;                   // tokens of the last pass before its guesses
    int cpu_ffns;               // the FFNs of this many layers, the first, run on the CPU,
    Shared sent;                // but a chunk's here, where one after the other is sent; or empty
    int sent_tokens;            // the fewest tokens of such a chunk
    bool few;                   // the pass is of a few tokens: NVIDIA's launches may start early
    bool dry;                   // what is encoded will not run
    char why[300];              // what went wrong first, or empty
} Gpu;

// keeps the first message of what went wrong; more: what the system says about it, or NULL
static bool gpu_fail(Gpu *g, const char *what, const char *more) {
    if (!g->why[0] && more) snprintf(g->why, sizeof g->why, "%s: %s", what, more);
    else if (!g->why[0]) snprintf(g->why, sizeof g->why, "%s", what);
    for (char *c = g->why; *c; c++)
        if ((unsigned char)*c < ' ') *c = ' ';   // a compiler's message may have many lines
    return false;
}

static const Shared *gpu_find(const Gpu *g, const void *p) {   // the memory that p points into
    int i = g->n_shared - 1;
    while (i >= 0 && (size_t)((const char *)p - g->shared[i].base) >= g->shared[i].size) i--;
    assert(i >= 0);   // all memory of a session is shared when it is opened
    return &g->shared[i];
}

#ifdef LLM_CUDA
// ---- 2. NVIDIA ----
//
// CUDA's driver and compiler are found at run time. A buffer is a copy in the GPU's memory, which
// device_send brings up to date for the GPU, and device_fetch for the host. Each variant of a
// kernel is compiled by itself; $XDG_CACHE_HOME/llm or ~/.cache/llm keeps its code, named by a hash
// of its sources and the GPU's architecture. From compute capability 9.0 on a few tokens' launches
// start early (programmatic dependent launch): a launch begins when all threadgroups of the one
// before it have called next_may_start. It waits for its input at once, or where its kernel does.

#include <dlfcn.h>
#include <sys/stat.h>
typedef struct { int id, pad, value[16]; } LaunchAttribute;
typedef struct {
    unsigned groups[3], threads[3], shared;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned n;
} Launch;
#define DRIVER(X) \
    X(cuInit, (unsigned)) X(cuDeviceGetCount, (int *)) X(cuDeviceGetAttribute, (int *, int, int)) \
    X(cuCtxCreate_v2, (void **, unsigned, int)) X(cuCtxDestroy_v2, (void *)) \
    X(cuCtxSetCurrent, (void *)) X(cuGetErrorString, (int, const char **)) \
    X(cuMemGetInfo_v2, (size_t *, size_t *)) X(cuMemAlloc_v2, (char **, size_t)) \
    X(cuMemFree_v2, (char *)) X(cuMemHostRegister_v2, (void *, size_t, unsigned)) \
    X(cuStreamCreate, (void **, unsigned)) X(cuStreamSynchronize, (void *)) \
    X(cuMemsetD8Async, (char *, unsigned char, size_t, void *)) \
    X(cuMemcpyAsync, (void *, const void *, size_t, void *)) \
    X(cuModuleLoadData, (void **, const void *)) \
    X(cuModuleGetFunction, (void **, void *, const char *)) \
    X(cuFuncSetAttribute, (void *, int, int)) \
    X(cuLaunchKernelEx, (const Launch *, void *, void **, void **)) \
    X(cuStreamBeginCapture_v2, (void *, int)) X(cuStreamEndCapture, (void *, void **)) \
    X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long)) \
    X(cuGraphLaunch, (void *, void *)) X(cuGraphExecDestroy, (void *)) X(cuGraphDestroy, (void *))
#define COMPILER(X) \
    X(nvrtcCreateProgram, (void **, const char *, const char *, int, const char *const *, \
                           const char *const *)) \
    X(nvrtcCompileProgram, (void *, int, const char *const *)) \
    X(nvrtcGetProgramLogSize, (void *, size_t *)) X(nvrtcGetProgramLog, (void *, char *)) \
    X(nvrtcGetCUBINSize, (void *, size_t *)) X(nvrtcGetCUBIN, (void *, char *)) \
    X(nvrtcDestroyProgram, (void **)) X(nvrtcVersion, (int *, int *))
enum { DEVICE_COPIES = 1, COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76, CORES = 16, CORE_SHARED = 97,
       COPY_BYTES = 64 << 20, STREAM_NON_BLOCKING = 1, CAPTURE_RELAXED = 2, NO_DEVICE = 100,
       MAX_SHARED_BYTES = 8, LAUNCH_EARLY = 6, GPU_CHUNK = 2048, GRAPHS = 8 * FEW };

// what a launch binds, as in kernels.metal
typedef struct { char *buffer[MAX_BOUND], bytes[512]; } Bound;
// malloc'ed; n 0: bytes are the compiler's errors; kept: from a file, or that one was refused
typedef struct { size_t n; char *bytes; bool kept; } Code;

// launches with this key, or NULL; last: the key of the latest pass of its place without a graph
typedef struct { void *launches; uint64_t key, last; } Graph;
struct Device {
#define X(name, types) int (*name) types;
    DRIVER(X) COMPILER(X)
#undef X
    void *context, *stream;
    Graph graph[GRAPHS + 1];    // [n] of n tokens, [FEW * i + n] those in nextn block i (1 ..)
    Graph *captured;            // what launches are captured for, or NULL
    bool early;                 // the launches of a few tokens may start early
    bool after_copy;            // but the next one follows a copy, or a pause
    char arch[32], compiler[32];
    Code code[MAX_PIPELINES];   // compiled, but not loaded yet
};

// kernels.metal and quant.h as texts inside this program
__asm__(".data\n.weak kernels_text, quant_text\nkernels_text: .incbin \"kernels.metal\"\n.byte 0\n"
        "quant_text: .incbin \"quant.h\"\n.byte 0\n.previous\n");
extern const char kernels_text[] __asm__("kernels_text"), quant_text[] __asm__("quant_text");

// calls the driver: cuda(g, cuMemFree_v2, address) is false, and g->why says why, if that failed
#define cuda(g, name, ...) cuda_check(g, (g)->device->name(__VA_ARGS__), #name)
static bool cuda_check(Gpu *g, int error, const char *name) {
    const char *text = NULL;
    char number[32];
    snprintf(number, sizeof number, "error %d", error);
    if (error && g->device->cuGetErrorString) g->device->cuGetErrorString(error, &text);
    return !error || gpu_fail(g, name, text ? text : number);
}

// Opens the first of n libraries that can be opened. Where one exists but does not open, says so.
static void *cuda_library(Gpu *g, const char *const *names, size_t n) {
    for (size_t i = 0; i < n; i++) {
        void *library = dlopen(names[i], RTLD_NOW);
        if (library) return g->why[0] = 0, library;
        const char *error = dlerror();   // "NAME: ... No such file ..", or another file's name
        if (!strstr(error, names[i]) || !strstr(error, "No such file"))
            gpu_fail(g, "a library of CUDA does not open", error);
    }
    return NULL;
}

// Finds the libraries and the first GPU. If there is no driver or no GPU, it fails without a
// message: then the CPU does the work, as a matter of course.
static bool device_open(Gpu *g) {
    static const char *const drivers[] = {"libcuda.so.1"}, *const compilers[] = {
        "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2",
        "/usr/local/cuda/lib64/libnvrtc.so"};
    void *from = cuda_library(g, drivers, COUNT(drivers));
    const char *missing = NULL;
    int devices = 0, error, major, minor, version = 0, part = 0;   // of the compiler
    Device *d = g->device = calloc(1, sizeof *d);
    g->longest = SIZE_MAX / 2;
    if (!from || !d) return false;
#define X(name, types) missing = (*(void **)&d->name = dlsym(from, #name)) ? missing : #name;
    DRIVER(X)
    error = d->cuInit ? d->cuInit(0) : 0;
    if (error == NO_DEVICE || !cuda_check(g, error, "cuInit")) return false;
    if (missing) return gpu_fail(g, "the NVIDIA driver has no function", missing);
    if (!cuda(g, cuDeviceGetCount, &devices) || !devices) return false;
    from = cuda_library(g, compilers, COUNT(compilers));
    if (!from)
        return gpu_fail(g, "there is an NVIDIA GPU, but no libnvrtc, which compiles for it",
                        "install libnvrtc12 or cuda-nvrtc-12-8, or a later one");
    COMPILER(X)
#undef X
    if (missing) return gpu_fail(g, "libnvrtc has no function", missing);
    bool ok = cuda(g, cuCtxCreate_v2, &d->context, 0, 0) &&
              cuda(g, cuStreamCreate, &d->stream, STREAM_NON_BLOCKING) &&
              cuda(g, cuDeviceGetAttribute, &major, COMPUTE_MAJOR, 0) &&
              cuda(g, cuDeviceGetAttribute, &minor, COMPUTE_MINOR, 0) &&   // 7.x lacks cp.async
              (major > 7 || gpu_fail(g, "its compute capability is below 8.0", NULL)) &&
              cuda(g, cuDeviceGetAttribute, &g->cores, CORES, 0) &&
              cuda(g, cuDeviceGetAttribute, &g->room, CORE_SHARED, 0) &&   // of a threadgroup
              cuda(g, nvrtcVersion, &version, &part);
    d->early = ok && major > 8 && version > 11;   // older compilers lack bulk copies
    if (ok) snprintf(d->arch, sizeof d->arch, "-arch=sm_%d%d", major, minor);
    snprintf(d->compiler, sizeof d->compiler, "%d.%d", version, part);
    return ok;
}

static size_t device_room(Gpu *g) {   // bytes of its memory that are free
    size_t room = 0, all;
    return cuda(g, cuMemGetInfo_v2, &room, &all) ? room : 0;
}

static void device_release(Gpu *g) {   // frees buffers; the context frees the rest
    for (int i = 0; i < g->n_shared; i++) g->device->cuMemFree_v2(g->shared[i].buffer);
}

static void device_close(Gpu *g) {
    Device *d = g->device;
    if (d && d->context) {
        d->cuCtxSetCurrent(d->context);
        device_release(g);
        for (size_t i = 0; i < COUNT(d->graph); i++)
            if (d->graph[i].launches) d->cuGraphExecDestroy(d->graph[i].launches);
        d->cuCtxDestroy_v2(d->context);
    }
    free(d);
}

// copies between host and GPU, or on the GPU: their addresses tell which
static bool cuda_copy(Gpu *g, void *to, const void *from, size_t bytes) {
    Device *d = g->device;
    d->after_copy = true;
    return !g->why[0] && cuda(g, cuCtxSetCurrent, d->context) &&
           cuda(g, cuMemcpyAsync, to, from, bytes, d->stream);
}

// Makes the GPU's copy of s: zeros, or if `filled` what the host has, with progress on a terminal.
static bool device_buffer(Gpu *g, Shared *s, bool filled) {
    // gemv_ring copies 16 bytes at a time, up to 15 after the last row
    if (!cuda(g, cuMemAlloc_v2, (char **)&s->buffer, s->size + 16)) return false;
    if (!filled) return cuda(g, cuMemsetD8Async, s->buffer, 0, s->size, g->device->stream);
    bool talks = isatty(2) && s->size > 2 * COPY_BYTES;
    double start = now();
    for (size_t at = 0, n; at < s->size; at += n) {
        n = s->size - at < COPY_BYTES ? s->size - at : COPY_BYTES;
        if (!cuda_copy(g, (char *)s->buffer + at, s->base + at, n)) return false;
        char text[80];
        snprintf(text, sizeof text, "to the GPU: %zu of %zu MB, %.1f GB/s", (at + n) >> 20,
                 s->size >> 20, (at + n) / 1e9 / (now() - start));
        if (talks) show_progress(text);
    }
    if (talks) show_progress("");
    return true;
}

static char *device_address(const Gpu *g, const void *p) {
    const Shared *at = gpu_find(g, p);
    return (char *)at->buffer + ((const char *)p - at->base);
}

// How a variant is compiled. Registers are given out so that `fit` threadgroups of so many threads
// are on a core at once: gemv needs many loads under way; some of gemm and flash_attention compute
// while others wait; the next launch is to fit beside gemv_ring, attention and what runs between.
// shared: bytes of threadgroup memory (0: what all have); waits: for its input itself, later.
typedef struct { const char *kernel; size_t threads; int fit, shared; bool waits; } Build;
static Build cuda_build(const Gpu *g, const Dispatch *d) {
    const int *c = d->constant;
    int own = d->threads, usual = own > 256 ? 1024 : 256;
    int gemv = gemv_rows(c[C_FORMAT_0], GEMV_ROWS, 0, false) > 2 ? 512 : 768;
    bool narrow = c[C_HEAD_DIM] <= NARROW_MAX, one = c[C_LANE_GROUPS] == 1 && c[C_TEAMS] == 1;
    const Build builds[] = {
        {"gemv", own, (c[C_TOKENS] > 1 ? 384 : gemv) / own, 0, false},
        {"gemv_ring", own, 1 + one, g->room, true},
        {"ring_inputs", own, 1 + one, g->room, true},
        {"gemm", own, 512 / own, SHARED_BYTES, false},
        {"flash_attention", own, c[C_HEAD_DIM] > 128 ? 2 : 3, SHARED_BYTES, false},
        {"attention", usual, 1 + (c[C_MERGES] && narrow), 0, true},
        {"rope", usual, 1 + (c[C_MERGES] && narrow), 0, false},
        {d->kernel, usual, 1, 0, false}};
    const Build *b = builds;
    while (strcmp(b->kernel, d->kernel)) b++;
    return *b;
}

// The source of a variant: its constants, and a function that calls the kernel.
static void cuda_source(const Gpu *g, const Dispatch *d, char *s) {
    Build b = cuda_build(g, d);
#define X(name) s += sprintf(s, "#define VALUE_C_%s %d\n", #name, d->constant[C_##name]);
    FUNCTION_CONSTANTS(X)
#undef X
    s += sprintf(s, "#define EARLY %d\n#include \"kernels.metal\"\n"
                 "extern \"C\" __global__ void __launch_bounds__(%zu, %d)\n"
                 "run_%s(const __grid_constant__ Bound x) {\n    next_may_start();\n%s    %s(",
                 g->device->early, b.threads, b.fit, d->kernel,
                 b.waits ? "" : "    input_wait();\n", d->kernel);
    for (int i = 0; i < d->n; i++) s += sprintf(s, "x.buffer[%d], ", i);
    sprintf(s, "Any{(void *)x.bytes}, (float *)shared_bytes, blockIdx.x, threadIdx.x,\n"
            "        blockDim.x / 32, threadIdx.x / 32, threadIdx.x %% 32);\n}\n");   // PLACE
}

// The path of a variant's file, whose name is a hash of the sources and the compiler's version.
// False: there is no place to keep it, or the folder is another user's, whose code we do not run.
static bool cuda_path(const Gpu *g, const char *source, char *path, size_t size) {
    const char *texts[] = {g->device->arch, g->device->compiler, quant_text, kernels_text, source};
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    uint64_t hash = 0xcbf29ce484222325;
    struct stat folder;
    bool own = cache && *cache == '/';
    if (!own && !(home && *home == '/')) return false;
    for (size_t i = 0; i < COUNT(texts); i++)
        hash = hash_text(hash, (Str){texts[i], strlen(texts[i])});
    int n = own ? snprintf(path, size, "%s", cache) : snprintf(path, size, "%s/.cache", home);
    if (n > (int)size - 40) return false;
    mkdir(path, 0700);
    n += snprintf(path + n, size - n, "/llm");
    mkdir(path, 0700);
    if (stat(path, &folder) || folder.st_uid != geteuid()) return false;
    snprintf(path + n, size - n, "/%016llx", (unsigned long long)hash);
    return true;
}

static Code cuda_cached(const char *path) {   // empty if the file is missing or damaged
    Code c = {0};
    Map file = {0};
    uint64_t hash;
    if (map_file(&file, path, &(Error){{0}})) {
        size_t n = file.size - sizeof hash;
        memcpy(&hash, file.base + n, sizeof hash);
        bool intact = hash == hash_text(0, (Str){(char *)file.base, n});
        c.kept = intact && (c.bytes = malloc(n));
        if (c.kept) memcpy(c.bytes, file.base, c.n = n);
    }
    if (file.base) munmap(file.base, file.size);
    return c;
}

static void cuda_keep(const char *path, Code c) {   // the file gets its name when it is complete
    char draft[600];
    uint64_t hash = hash_text(0, (Str){c.bytes, c.n});
    snprintf(draft, sizeof draft, "%s.%d", path, (int)getpid());
    int fd = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
    bool written = write(fd, c.bytes, c.n) == (ssize_t)c.n &&
                   write(fd, &hash, sizeof hash) == sizeof hash;
    if (fd >= 0 && (close(fd) || !written || rename(draft, path))) unlink(draft);
}

static void device_compile(Task t) {   // variant number t.i, if it is not loaded
    Gpu *g = t.ctx;
    Device *d = g->device;
    Code *c = &d->code[t.i];
    const char *texts[] = {kernels_text, quant_text, ""};
    const char *names[] = {"kernels.metal", "quant.h", "stdint.h"};
    const char *options[] = {d->arch, "-default-device", "-std=c++17", "-w"};
    char source[4000], path[512];
    void *program;
    if (g->pipeline[t.i].state) return;
    cuda_source(g, &g->pipeline[t.i].d, source);
    bool keeps = cuda_path(g, source, path, sizeof path);
    if (keeps && !c->kept) *c = cuda_cached(path);
    if (c->bytes || d->nvrtcCreateProgram(&program, source, "pipeline", 3, texts, names)) return;
    size_t size = 0;
    bool ok = !d->nvrtcCompileProgram(program, 4, options);
    if (!ok) d->nvrtcGetProgramLogSize(program, &size);
    else ok = !d->nvrtcGetCUBINSize(program, &size);
    c->bytes = calloc(size + 1, 1);
    if (c->bytes && ok) c->n = d->nvrtcGetCUBIN(program, c->bytes) ? 0 : size;
    else if (c->bytes) d->nvrtcGetProgramLog(program, c->bytes);
    d->nvrtcDestroyProgram(&program);
    if (c->n && keeps) cuda_keep(path, *c);
}

static void device_load(Gpu *g, int i) {   // variant number i, if it is not loaded
    Variant *p = &g->pipeline[i];
    Build b = cuda_build(g, &p->d);
    Code *c = &g->device->code[i];
    void *module;
    char name[64];
    if (p->state) return;
    int error = !g->why[0] && c->n ? g->device->cuModuleLoadData(&module, c->bytes) : 0;
    if (error && c->kept) {   // an image that the driver refuses is compiled anew
        free(c->bytes);
        *c = (Code){.kept = true};
        device_compile((Task){.ctx = g, .i = i});
        error = c->n ? g->device->cuModuleLoadData(&module, c->bytes) : 0;
    }
    snprintf(name, sizeof name, "run_%s", p->d.kernel);   // so that profilers tell them apart
    if (!c->n) gpu_fail(g, p->d.kernel, c->bytes ? c->bytes : "it is not compiled");
    else if (!g->why[0] && cuda_check(g, error, "cuModuleLoadData") &&
             cuda(g, cuModuleGetFunction, &p->state, module, name) && b.shared)
        cuda(g, cuFuncSetAttribute, p->state, MAX_SHARED_BYTES, b.shared);
    p->threads = b.threads;
    free(c->bytes);
    *c = (Code){0};
}

static void device_begin(Gpu *g) { cuda(g, cuCtxSetCurrent, g->device->context); }

// Launches what an earlier pass launched, with one call, if its graph at this place of Device has
// the same key. Else returns false, and what follows becomes a graph if the pass has one token, or
// if the latest pass of this place without a graph had this key. (A graph costs as much as a pass,
// and guesses have many lengths.) Place 0, a chunk's, and those after the last have no graph.
static bool device_again(Gpu *g, int place, uint64_t key) {
    Device *d = g->device;
    if (!place || place > GRAPHS || g->why[0]) return false;
    Graph *graph = &d->graph[place];
    if (graph->launches && graph->key == key)
        return cuda(g, cuGraphLaunch, graph->launches, d->stream);
    bool captures = place % FEW == 1 || graph->last == key;
    graph->last = key;
    if (captures && cuda(g, cuStreamBeginCapture_v2, d->stream, CAPTURE_RELAXED))
        d->captured = graph;
    return false;
}

static void cuda_recorded(Gpu *g) {   // makes a graph of what was captured, and launches it
    Device *d = g->device;
    Graph *graph = d->captured;
    void *captured = NULL;
    if (!graph) return;
    if (graph->launches) d->cuGraphExecDestroy(graph->launches);
    *graph = (Graph){NULL, graph->last, graph->last};
    d->captured = NULL;
    if (cuda(g, cuStreamEndCapture, d->stream, &captured) && !g->why[0] &&
        cuda(g, cuGraphInstantiateWithFlags, &graph->launches, captured, 0))
        cuda(g, cuGraphLaunch, graph->launches, d->stream);
    if (captured) d->cuGraphDestroy(captured);
}

static void device_dispatch(Gpu *g, const Variant *p, const Dispatch *d, const void *a, size_t n) {
    Bound x;
    assert(n <= sizeof x.bytes);
    for (int i = 0; i < d->n; i++)
        x.buffer[i] = d->bound[i] ? device_address(g, d->bound[i]) : NULL;
    memcpy(x.bytes, a, n);
    static const LaunchAttribute early = {LAUNCH_EARLY, 0, {1}};
    Device *device = g->device;
    Launch launch = {{d->groups, 1, 1}, {d->threads, 1, 1}, 16 * div_up(d->shared, 4),
                     device->stream, &early, device->early && g->few && !device->after_copy};
    device->after_copy = false;
    cuda(g, cuLaunchKernelEx, &launch, p->state, (void *[]){&x}, NULL);
}

static void device_send(Gpu *g, const void *p, size_t bytes) {
    if (bytes) cuda_copy(g, device_address(g, p), p, bytes);
}

static bool device_fetch(Gpu *g, void *p, size_t bytes) {
    Device *d = g->device;
    cuda_recorded(g);
    if (bytes) cuda_copy(g, p, device_address(g, p), bytes);
    d->after_copy = true;
    return cuda(g, cuStreamSynchronize, d->stream) && !g->why[0];
}

// pins it, so it is fetched faster
static void device_often(Gpu *g, void *p, size_t n) { g->device->cuMemHostRegister_v2(p, n, 0); }

static void device_copy(Gpu *g, void *to, const void *from, size_t bytes) {
    cuda_copy(g, device_address(g, to), device_address(g, from), bytes);
}

static void device_keep(UNUSED Gpu *g) {}   // its memory is its own
#else
// ---- 3. Apple: Objective-C, by hand ----
//
// The host and the GPU share all memory, so nothing is sent, and to fetch is to wait.
//
// A method is a C function, found by name. It must be called through its exact type: on arm64 a
// variadic call passes its arguments elsewhere. Apple's rules of ownership: we release what "new",
// "alloc", "Copy" or "Create" returns; all other objects belong to the autorelease pool.

typedef void *id, *SEL;
typedef void (*IMP)(void);
typedef struct { size_t width, height, depth; } MTLSize;

id MTLCreateSystemDefaultDevice(void), MTLCopyAllDevices(void);
id objc_getClass(const char *), object_getClass(id);
SEL sel_registerName(const char *);
IMP class_getMethodImplementation(id, SEL);
void *objc_autoreleasePoolPush(void);
void objc_autoreleasePoolPop(void *);

// X(name for send, selector, result, parameters after object and selector); NSUInteger: size_t
#define METHODS(X) \
    X(make, "new", id) X(retain, "retain", id) X(release, "release", void) \
    X(string, "stringWithUTF8String:", id, const char *) X(utf8, "UTF8String", const char *) \
    X(count, "count", size_t) X(object_at, "objectAtIndex:", id, size_t) \
    X(set_fast_math, "setFastMathEnabled:", void, bool) X(new_queue, "newCommandQueue", id) \
    X(max_length, "maxBufferLength", size_t) \
    X(new_library, "newLibraryWithSource:options:error:", id, id, id, id *) \
    X(set_constant, "setConstantValue:type:atIndex:", void, const void *, size_t, size_t) \
    X(new_function, "newFunctionWithName:constantValues:error:", id, id, id, id *) \
    X(new_pipeline, "newComputePipelineStateWithFunction:error:", id, id, id *) \
    X(simd_width, "threadExecutionWidth", size_t) \
    X(max_threads, "maxTotalThreadsPerThreadgroup", size_t) \
    X(share_pages, "newBufferWithBytesNoCopy:length:options:deallocator:", id, \
      void *, size_t, size_t, id) \
    X(new_residency, "newResidencySetWithDescriptor:error:", id, id, id *) \
    X(add_allocation, "addAllocation:", void, id) X(request, "requestResidency", void) \
    X(add_residency, "addResidencySet:", void, id) \
    X(commands, "commandBufferWithUnretainedReferences", id) \
    X(encoder, "computeCommandEncoder", id) \
    X(set_pipeline, "setComputePipelineState:", void, id) \
    X(set_buffer, "setBuffer:offset:atIndex:", void, id, size_t, size_t) \
    X(set_bytes, "setBytes:length:atIndex:", void, const void *, size_t, size_t) \
    X(set_shared, "setThreadgroupMemoryLength:atIndex:", void, size_t, size_t) \
    X(dispatch, "dispatchThreadgroups:threadsPerThreadgroup:", void, MTLSize, MTLSize) \
    X(blit_encoder, "blitCommandEncoder", id) \
    X(copy, "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:", void, \
      id, size_t, id, size_t, size_t) \
    X(end_encoding, "endEncoding", void) X(commit, "commit", void) \
    X(wait, "waitUntilCompleted", void) X(status, "status", size_t) X(error, "error", id) \
    X(describe, "localizedDescription", id)

#define X(name, selector, R, ...) \
    typedef R send_##name(id, SEL, ##__VA_ARGS__); \
    static SEL sel_##name(void) { \
        static SEL sel; \
        return sel ? sel : (sel = sel_registerName(selector)); \
    }
METHODS(X)
#undef X

static size_t nil_method(void) { return 0; }   // a message to nil returns 0

// sends the message `name` to an object: looks its method up, and calls it
#define send(name, object, ...) ({ \
    id to_ = (object); \
    SEL sel_ = sel_##name(); \
    IMP code_ = to_ ? class_getMethodImplementation(object_getClass(to_), sel_) : (IMP)nil_method; \
    ((send_##name *)code_)(to_, sel_, ##__VA_ARGS__); })

// quant.h and kernels.metal as one text inside this program
__asm__(".data\nmetal_source: .incbin \"quant.h\"\n"
        ".incbin \"kernels.metal\"\n.byte 0\n.previous\n");
extern const char metal_source[] __asm__("metal_source");

enum { DEVICE_COPIES = 0, MTLDataTypeInt = 29, MTLCommandBufferStatusCompleted = 4,
       MTLStorageModeShared = 0, MAX_COMMANDS = 2 * MAX_SPLITS, GPU_CHUNK = 512 };
struct Device {
    id device, queue, library, encoder, commands[MAX_COMMANDS];
    int n_commands;             // command buffers of this pass
    void *pool;                 // autorelease pool of device_open, or of a pass
    id error[MAX_PIPELINES];    // why a variant does not compile, retained
    // what the encoder has: a message costs 50 ns, and a token would need some 3,000
    const char *bound[MAX_BOUND + 1];
    const Variant *variant;
    size_t shared;
};

// gpu_fail, with an NSError
static bool metal_fail(Gpu *g, const char *what, id error) {
    return gpu_fail(g, what, send(utf8, send(describe, error)));
}

static bool device_open(Gpu *g) {   // also compiles the kernels
    id error = NULL;
    Device *d = g->device = calloc(1, sizeof *d);
    if (!d) return gpu_fail(g, "out of memory", NULL);
    d->pool = objc_autoreleasePoolPush();
    // under ssh or tmux there is no default device, but there may be others
    d->device = MTLCreateSystemDefaultDevice();
    id all = d->device ? NULL : MTLCopyAllDevices();
    if (send(count, all)) d->device = send(retain, send(object_at, all, 0));
    send(release, all);
    if (!d->device) return gpu_fail(g, "no Metal device", NULL);
    g->longest = send(max_length, d->device);
    g->cores = SOFT_CORES;
    g->room = SOFT_ROOM;
    d->queue = send(new_queue, d->device);
    if (!d->queue) return gpu_fail(g, "no command queue", NULL);
    id text = send(string, objc_getClass("NSString"), metal_source);
    id options = send(make, objc_getClass("MTLCompileOptions"));
    send(set_fast_math, options, false);   // the kernels must tell NaN from numbers
    if (isatty(2)) show_progress("compiling the GPU's kernels");
    d->library = send(new_library, d->device, text, options, &error);
    if (isatty(2)) show_progress("");
    send(release, options);
    return d->library || metal_fail(g, "kernels.metal", error);   // error is also set by warnings
}

static size_t device_room(UNUSED Gpu *g) { return SIZE_MAX; }   // it is the host's

static void device_release(Gpu *g) {   // releases variants and buffers
    for (int i = 0; i < g->n_pipelines; i++) send(release, g->pipeline[i].state);
    for (int i = 0; i < g->n_shared; i++) send(release, g->shared[i].buffer);
}

static void device_close(Gpu *g) {
    Device *d = g->device;
    if (!d) return;
    if (d->pool) objc_autoreleasePoolPop(d->pool);
    device_release(g);
    send(release, d->library);
    send(release, d->queue);
    send(release, d->device);
    free(d);
}

static bool device_buffer(Gpu *g, Shared *s, UNUSED bool filled) {   // in whole pages
    size_t page = sysconf(_SC_PAGESIZE);
    s->size = (s->size + page - 1) / page * page;
    if (s->size > g->longest) return false;
    s->buffer = send(share_pages, g->device->device, s->base, s->size, MTLStorageModeShared, NULL);
    return s->buffer != NULL;
}

static void device_compile(Task t) {   // variant number t.i, if it is not compiled
    Gpu *g = t.ctx;
    Variant *p = &g->pipeline[t.i];
    id error = NULL;
    if (p->state) return;
    void *pool = objc_autoreleasePoolPush();   // the thread's
    id name = send(string, objc_getClass("NSString"), p->d.kernel);
    id values = send(make, objc_getClass("MTLFunctionConstantValues"));
    for (size_t i = 0; i < N_CONSTANTS; i++)
        send(set_constant, values, &p->d.constant[i], MTLDataTypeInt, i);
    id function = send(new_function, g->device->library, name, values, &error);
    p->state = function ? send(new_pipeline, g->device->device, function, &error) : NULL;
    if (!p->state) g->device->error[t.i] = send(retain, error);
    send(release, function);
    send(release, values);
    objc_autoreleasePoolPop(pool);
}

static void device_load(Gpu *g, int i) {   // says why variant number i is not compiled, if so
    Variant *p = &g->pipeline[i];
    id *error = &g->device->error[i];
    if (!p->state) metal_fail(g, p->d.kernel, *error);
    else if (send(simd_width, p->state) != SIMD_LANES)
        gpu_fail(g, "SIMD-groups are not 32 wide", NULL);
    send(release, *error);
    *error = NULL;
    p->threads = send(max_threads, p->state);
}

static void metal_commit(Gpu *g) {
    Device *d = g->device;
    if (!d->encoder) return;
    send(end_encoding, d->encoder);
    send(commit, d->commands[d->n_commands - 1]);
}

static void device_begin(Gpu *g) {   // one more command buffer
    Device *d = g->device;
    if (!d->pool) d->pool = objc_autoreleasePoolPush();
    metal_commit(g);
    id commands = send(commands, d->queue);
    d->encoder = send(encoder, commands);
    memset(d->bound, 0, sizeof d->bound);
    d->variant = NULL;
    d->shared = 0;
    if (d->encoder) d->commands[d->n_commands++] = commands;
    else gpu_fail(g, "no command encoder", NULL);
}

static bool device_again(UNUSED Gpu *g, UNUSED int place, UNUSED uint64_t key) { return false; }

static bool device_fetch(Gpu *g, UNUSED void *p, UNUSED size_t bytes) {
    Device *d = g->device;
    metal_commit(g);
    for (int i = 0; i < d->n_commands; i++) {
        send(wait, d->commands[i]);
        if (send(status, d->commands[i]) != MTLCommandBufferStatusCompleted)
            metal_fail(g, "the GPU stopped", send(error, d->commands[i]));
    }
    if (d->pool) objc_autoreleasePoolPop(d->pool);
    d->pool = d->encoder = NULL;
    d->n_commands = 0;
    return !g->why[0];
}

static void device_dispatch(Gpu *g, const Variant *p, const Dispatch *d, const void *a, size_t n) {
    Device *device = g->device;
    id encoder = device->encoder;
    size_t shared = d->shared ? 16 * div_up(d->shared, 4) : 16;   // Metal wants some
    if (p != device->variant) send(set_pipeline, encoder, p->state);
    device->variant = p;
    for (int i = 0; i < d->n; i++) {
        const char *from = d->bound[i] ? d->bound[i] : g->shared[0].base;   // Metal wants one
        const Shared *at = gpu_find(g, from);
        if (from != device->bound[i]) send(set_buffer, encoder, at->buffer, from - at->base, i);
        device->bound[i] = from;
    }
    send(set_bytes, encoder, a, n, d->n);
    device->bound[d->n] = NULL;
    if (shared != device->shared) send(set_shared, encoder, shared, 0);
    device->shared = shared;
    send(dispatch, encoder, ((MTLSize){d->groups, 1, 1}), ((MTLSize){d->threads, 1, 1}));
}

static void device_send(UNUSED Gpu *g, UNUSED const void *p, UNUSED size_t bytes) {}
static void device_often(UNUSED Gpu *g, UNUSED void *p, UNUSED size_t bytes) {}

static void device_copy(Gpu *g, void *to, const void *from, size_t bytes) {   // in its own encoder
    Device *d = g->device;
    const Shared *a = gpu_find(g, from), *b = gpu_find(g, to);
    if (!d->encoder) return;
    send(end_encoding, d->encoder);
    d->encoder = send(blit_encoder, d->commands[d->n_commands - 1]);
    send(copy, d->encoder, a->buffer, (const char *)from - a->base, b->buffer,
         (char *)to - b->base, bytes);
}

// Keeps all buffers wired, or gigabytes may have to be wired anew after a pause. Before macOS 15
// there is no such class, and messages to nil do nothing.
static void device_keep(Gpu *g) {
    id error = NULL, descriptor = send(make, objc_getClass("MTLResidencySetDescriptor"));
    id set = descriptor ? send(new_residency, g->device->device, descriptor, &error) : NULL;
    for (int i = 0; i < g->n_shared; i++) send(add_allocation, set, g->shared[i].buffer);
    send(commit, set);
    send(request, set);
    if (set) send(add_residency, g->device->queue, set);
    send(release, set);
    send(release, descriptor);
}
#endif

// ---- 4. what both share ----

// Waits for the GPU, as device_fetch does for p [bytes]. False: something failed since device_open.
static bool device_wait(Gpu *g) { return device_fetch(g, NULL, 0); }

// lets the GPU see memory of the host, which is filled or all zeros
static bool gpu_share(Gpu *g, Map map, bool filled) {
    Shared *more = realloc(g->shared, (g->n_shared + 1 + MAX_SENT) * sizeof *more);
    if (!more) return false;
    g->shared = more;
    more[g->n_shared] = (Shared){(char *)map.base, map.size, NULL};
    bool ok = device_buffer(g, &more[g->n_shared], filled);
    g->n_shared += ok;
    return ok;
}

// the variant of d's kernel with d's function constants; gpu_ready compiles it
static const Variant *gpu_pipeline(Gpu *g, const Dispatch *d) {
    Variant *p = g->pipeline, *end = p + g->n_pipelines;
    for (; p < end; p++)
        if (!strcmp(p->d.kernel, d->kernel) &&
            !memcmp(p->d.constant, d->constant, sizeof d->constant)) return p;
    if (g->n_pipelines == MAX_PIPELINES) return gpu_fail(g, "too many kernel variants", NULL), NULL;
    g->pipeline[g->n_pipelines++] = (Variant){*d, 0, NULL};
    return p;
}

// Is this variant compiled? If not, all that are missing are, on all threads.
static bool gpu_ready(Gpu *g, const Variant *p) {
    if (p->state) return true;
    if (isatty(2)) show_progress("compiling the GPU's kernels");
    parallel(g->pool, device_compile, g, g->n_pipelines);
    for (int i = 0; i < g->n_pipelines; i++) device_load(g, i);
    if (isatty(2)) show_progress("");
    return !g->why[0];
}

// Also called after a failure, which it prints in one line; without s->gpu the CPU does the work.
static void gpu_close(Session *s) {
    Gpu *g = s->gpu;
    if (!g) return;
    if (g->why[0]) fprintf(stderr, "note: running on the CPU: %s\n", g->why);
    device_close(g);
    if (g->own.base) munmap(g->own.base, g->own.size);
    free(g->shared);
    free(g);
    s->gpu = NULL;
}

static void gpu_dispatch(Gpu *g, const Dispatch *d, const void *args, size_t size) {
    const Variant *p = g->why[0] ? NULL : gpu_pipeline(g, d);
    Dispatch fits = *d;
    if (!p || g->dry || !gpu_ready(g, p)) return;
    if (d->threads > p->threads && !strcmp(d->kernel, "sort_choices"))   // it takes any number
        fits.threads = p->threads / SIMD_LANES * SIMD_LANES;
    if (fits.threads > p->threads) gpu_fail(g, "it has too few threads for a kernel", NULL);
    else device_dispatch(g, p, &fits, args, size);
}

// gpu_dispatch of a Dispatch with these fields
#define run_kernel(s, args, ...) \
    gpu_dispatch((s)->gpu, &(Dispatch){__VA_ARGS__}, &(args), sizeof(args))

// ---- 5. operations ----

// threads for n values: whole SIMD-groups, and at most `most` threads
static int threads_for(int n, int most) {
    return n < most ? div_up(n, SIMD_LANES) * SIMD_LANES : most;
}

static int gemm_tokens(int n) {   // in a tile, for n tokens
    int tile = GEMM_MIN;
    while (tile < n && tile < GEMM_TOKENS) tile *= 2;
    return tile;
}

// What becomes of a product and its bias, or of a norm's result: see finish in kernels.metal
typedef struct {
    int kind;                // how it meets `other`
    const float *other;
    float factor;            // before that
    float softcap, limit;    // of a product, or 0; limit: of what is stored, or the GLU's factors
    float scale;             // of a norm's result, at the end; 0: none
    int step;                // floats from a norm's result to the next one; 0: no gaps
    int from, to;            // a norm reads or writes s->states, so many after the pass's position
} Epilogue;
static const Epilogue STORE = {.kind = EPILOGUE_STORE, .factor = 1};

// rows of floats, and the RMSNorm that gemv is still to apply to them, or NULL
typedef struct { const float *x; const Norm *norm; } Input;

// Binds w and its bias as buffers i and bias + i (NO_BIAS: which no kernel has), and sets arguments
// and constants. Rows may begin at any byte: the multiple of 16 before them is bound, and kernels
// get the difference. `experts`: w is the first one's, and kernels read a factor for each.
enum { NO_BIAS = MAX_BOUND - 4 };
static void bind_matrix(Dispatch *d, struct kernel_matrix *to, int i, const Matrix *w, int bias,
                        bool experts) {
    int row = quant_row_bytes(w->type, w->cols), start = (uintptr_t)w->data % 16;
    float scale = w->scale && !experts ? *w->scale : 1;
    to[i] = (struct kernel_matrix){start, row, w->rows, scale, w->step, w->step / row,
                                   output_step(w), 0};   // as in matrix_expert
    d->bound[i] = w->data - start;
    d->bound[bias + i] = w->bias;
    d->constant[C_FORMAT_0 + i] = w->type;
    d->constant[C_BIASES] |= (w->bias != NULL) << i;
    d->constant[C_SCALES] |= (experts && w->scale) << i;
    d->constant[C_RAGGED] |= w->cols % 32 != 0;
}

// x[n][cols] = scale * rows g->ids[n] of w[0], plus rows of w[1] (positions), w[2] (types), if any
static void run_embed(Session *s, const Matrix *const *w, float scale, float *x, int n) {
    struct embed_args a = {.cols = w[0]->cols};
    Dispatch d = {"embed", {[3] = s->gpu->ids, s->gpu->now, x}, 6, n, SIMD_LANES, 0, {0}};
    for (int i = 0; i < 3; i++)
        if (w[i] && w[i]->data) bind_matrix(&d, a.w, i, w[i], NO_BIAS, false);
    a.w[0].scale *= scale;
    gpu_dispatch(s->gpu, &d, &a, sizeof a);
}

static int norm_bits(const Norm *w) {
    return !w ? 0 : NORM_ANY | (w->w != NULL) * NORM_WEIGHTS | (w->b != NULL) * NORM_BIAS;
}

// y[n][cols] = norm(x), or without w x itself, with the epilogue; kind: a NORM_*
static void run_norm(Session *s, const float *x, const Norm *w, int kind, int cols, float *y, int n,
                     Epilogue e) {
    const Norm none = {0};
    int bits = norm_bits(w);
    if (!w) w = &none;
    struct norm_args a = {.cols = cols, .groups = w->n > cols ? w->n / cols : 1,
                          .eps = w->eps > 0 ? w->eps : s->m->config.eps, .factor = e.factor,
                          .scale = e.scale != 0 ? e.scale : 1, .from = e.from, .to = e.to,
                          .step = e.step ? e.step : cols,
                          .states = e.from || e.to ? s->o.chunk : 0};
    run_kernel(s, a, "norm", {x, w->w, w->b, e.other, y, s->gpu->now}, 6, n,
               threads_for(div_up(cols, 4), NORM_THREADS), NORM_FLOATS,
               {[C_NORMED] = bits, [C_CENTRED] = kind != NORM_RMS,
                [C_EPILOGUE] = e.kind, [C_RAGGED] = cols % 32 != 0});
}

// products of up to three matrices with one input
typedef struct {
    const Matrix *const *w;  // [k]
    int k;
    Input in;
    float *const *y;         // y[i][n][rows] = w[i] in; the GLU makes y[0] of two
    int n;
    Epilogue e;
    int experts;             // y has rows for the choices of n tokens, as gemm says, or for heads
} Products;
static int n_results(const Products *p) { return p->e.kind == EPILOGUE_GLU ? 1 : p->k; }

// buffers of gemv and gemm, in the order of their parameters; the first three are matrices
enum { AT_BIAS = 3, AT_X = 6, AT_Y = 8, AT_OTHER = 11, AT_SCALES = 13,
       GEMV_NORM = 7, GEMV_CHOSEN = 12, GEMV_BUFFERS = 15,
       GEMM_POWERS = 7, GEMM_ORDER = 12, GEMM_TILES = 14, GEMM_BUFFERS = 15 };

// Binds what gemv and gemm have in common. If there are less than three matrices, the others get
// the last one's format, since matrices of one format share their code.
static void bind_products(Session *s, Dispatch *d, struct product_args *a, const Products *p) {
    const Layer *l = &s->m->layers[s->l];
    int each = 1;   // l is no layer after the last one: of the output
    if (p->experts) each = p->experts == EXPERTS_HEADS ? l->n_head : l->n_used;
    *a = (struct product_args){
        .cols = p->w[0]->cols, .x_step = input_step(p->w[0]), .tokens = p->n,
        .eps = s->m->config.eps, .each = each,
        .factor = p->e.factor, .end = {.softcap = p->e.softcap, .limit = p->e.limit}};
    if (p->e.kind == EPILOGUE_ACT)
        a->end = (struct finish_args){0, 0, l->xielu.alpha_n, l->xielu.alpha_p, l->xielu.beta,
                                      l->xielu.eps};
    d->bound[AT_X] = p->in.x;
    d->bound[AT_OTHER] = p->e.other;
    d->constant[C_EPILOGUE] = p->e.kind;
    d->constant[C_SOFTCAPPED] = p->e.softcap > 0;
    if (p->e.limit > 0) d->constant[C_LIMITED] = 1 + s->m->config.limit_first;
    d->constant[C_ACTIVATION] = s->m->config.act;
    d->constant[C_EXPERTS] = p->experts;
    for (int i = p->k; i < 3; i++) d->constant[C_FORMAT_0 + i] = p->w[p->k - 1]->type;
    for (int i = 0; i < p->k; i++) {
        bind_matrix(d, a->w, i, p->w[i], AT_BIAS, p->experts);
        if (p->experts) d->bound[AT_SCALES + i] = p->w[i]->scale;
        if (i < n_results(p)) d->bound[AT_Y + i] = p->y[i];
    }
}

static bool is_float(const Matrix *w) { return quant_row_bytes(w->type, 1); }   // else: in blocks

// tokens that gemv and gemv_ring compute for n, some of them in vain
static int tokens_for(int n) {
    if (n > 4) return FEW;
    return n > 2 ? 4 : n;
}

// as many of gemv_ring's slots as `room` bytes of threadgroup memory have
static int ring_slots(struct product_args *a, int lane_groups, int tokens, int teams, int room) {
    a->set_floats = ring_set(a->cols, lane_groups, tokens);
    room -= 4 * at_slots(teams, a->set_floats, a->input_sets);
    return smaller(room / (teams * RING_TILE * a->stride), RING_SLOTS);
}

// What gemv_ring runs for up to `few` tokens, with `room` bytes: a->few of them (0: none), with
// a->input_sets and a->slots. per_token: a token's inputs for its experts, which run as for one
// token, or 0. Else weights meet all tokens, or half, in the first of these ways with enough slots:
// beside the next launch, as for one token; with two teams and all memory; with one.
typedef struct { int tokens, teams, room; } RingPlan;   // TOKENS, TEAMS, bytes
static RingPlan plan_ring(const Gpu *g, struct product_args *a, int few, int per_token,
                          int lane_groups, int room) {
    enum { MANY = 4, LEAST = 2 };   // slots
    const struct { int teams, room, slots; } ways[] = {
        {1, lane_groups == 1 ? room : 0, MANY}, {2, g->room, LEAST}, {1, g->room, LEAST}};
    for (int tokens = per_token ? 1 : tokens_for(few); tokens > 1; tokens /= 2)
        for (size_t i = 0; i < COUNT(ways); i++) {
            int teams = ways[i].teams, most = ways[i].room;
            a->few = smaller(few, tokens);
            a->input_sets = 1;   // of all tokens
            a->slots = ring_slots(a, lane_groups, tokens, teams, most);
            if (a->slots >= ways[i].slots) return (RingPlan){tokens, teams, most};
        }
    for (a->few = per_token ? few : 1; a->few; a->few--) {
        int inputs = per_token * a->few;   // a threadgroup has rows of its share and one more
        a->input_sets = inputs > 1 ? smaller(div_up(inputs, g->cores) + 1, inputs) : 1;
        a->slots = ring_slots(a, lane_groups, 1, 1, room);
        if (a->slots >= LEAST) break;
    }
    return (RingPlan){1, 1, room};
}

// Into which pieces are rows cut, and how far do those of a slot lie apart?
static void cut_rows(const Products *p, struct product_args *a, int lane_groups, int piece) {
    a->piece_cols = a->stride = 0;
    for (int i = 0; i < p->k; i++) {
        int cols = ring_cols(a->cols, a->w[i].row_bytes, lane_groups, piece);
        a->piece_cols = larger(a->piece_cols, smaller(cols, a->cols));
    }
    for (int i = 0; i < p->k; i++) {
        a->w[i].piece_bytes = quant_row_bytes(p->w[i]->type, a->piece_cols);
        a->stride = larger(a->stride, ring_stride(a->w[i].piece_bytes));
    }
    a->pieces = div_up(a->cols, a->piece_cols);
}

// packs the inputs of a few tokens for gemv_ring, which then reads them instead
static void pack_inputs(Gpu *g, Dispatch *d, struct product_args a, int lane_groups, int tokens) {
    bool normed = d->constant[C_NORMED];   // then a worker needs all squares of its columns
    a.threadgroups = RING_WORKERS * (normed ? 1 : div_up(a.cols, ring_turn(lane_groups)));
    Dispatch b = {.kernel = "ring_inputs", .n = 3, .groups = a.few * a.threadgroups,
                  .threads = SIMD_LANES,
                  .bound = {d->bound[AT_X], d->bound[GEMV_NORM], g->packed},
                  .constant = {[C_NORMED] = d->constant[C_NORMED], [C_LANE_GROUPS] = lane_groups,
                               [C_TOKENS] = tokens, [C_TEAMS] = 1}};
    gpu_dispatch(g, &b, &a, sizeof a);
    d->bound[AT_X] = g->packed;
    d->constant[C_PACKED] = 1;
}

// gemv_ring for as many of up to FEW tokens as it has room for, whose number it returns. 0: it
// cannot compute this product, which is gemv's then. For one token, on an H100:
//   a launch is           a core's 227 KB have          LANE_GROUPS
//   short                 112 KB of this and the next   1
//   long, of wide rows    210 KB, and a cache           2
//   long, of other rows   two threadgroups' 112 KB      1
// Cores of little memory have smaller pieces, for more slots, and LANE_GROUPS 1.
// Whether it is long does not depend on tokens: so each gets the bits that it has alone.
static int run_ring(Session *s, const Products *p, Dispatch *d, struct product_args *a) {
    Gpu *g = s->gpu;
    uint64_t bytes = 0, rows = 0;   // of a token
    int per_token = p->experts == EXPERTS_SORTED ? a->each : p->experts != EXPERTS_NONE;
    if (!g->room || p->n > FEW || p->experts == EXPERTS_HEADS) return 0;
    for (int i = 0; i < p->k; i++) {
        if (is_float(p->w[i])) return 0;
        bytes += (uint64_t)a->w[i].row_bytes * p->w[i]->rows * a->each;
        if (i < n_results(p)) rows += (uint64_t)p->w[i]->rows * a->each;
    }
    if (rows * FEW * 2 * g->cores >> 32) return 0;   // they are multiplied by threadgroups
    bool longer = bytes / g->cores > g->many, small = g->room < 128 << 10;
    bool wide = longer && !small && a->cols >= ring_turn(2) && a->cols % 64 == 0;
    int lane_groups = wide ? 2 : 1;
    int room = wide ? smaller(210 << 10, g->room) : smaller(112 << 10, (g->room - 1024) / 2);
    cut_rows(p, a, lane_groups, small ? RING_PIECE / 2 : RING_PIECE);
    plan_ring(g, a, 1, per_token, lane_groups, room);
    if (!a->few) room = g->room;
    RingPlan plan = plan_ring(g, a, p->n, per_token, lane_groups, room);
    if (!a->few) return 0;
    assert(!d->constant[C_NORMED] || a->input_sets <= FEW);   // squares has room for these
    a->outputs = p->experts ? a->few * a->each : 1;
    if (p->experts) rows *= a->few;
    a->threadgroups = g->cores;
    if (longer && lane_groups == 1 && plan.room <= g->room / 2) a->threadgroups *= 2;
    if (a->threadgroups > (int)rows) a->threadgroups = rows;   // each has a row
    d->kernel = "gemv_ring";
    d->groups = a->threadgroups;
    d->threads = (plan.teams * RING_WORKERS + RING_COPIERS) * SIMD_LANES;
    d->shared = at_slots(plan.teams, a->set_floats, a->input_sets);
    d->shared += a->slots * plan.teams * RING_TILE * a->stride / 4;
    d->constant[C_LANE_GROUPS] = lane_groups;
    d->constant[C_TOKENS] = plan.tokens;
    d->constant[C_TEAMS] = plan.teams;
    if (plan.tokens > 1 && plan.tokens * a->cols > g->own_cols)
        pack_inputs(g, d, *a, lane_groups, plan.tokens);
    gpu_dispatch(g, d, a, sizeof *a);
    return a->few;
}

// gemv for some of the first of p.n tokens, whose number it returns: for all of a chunk that meet a
// router, for all heads; for a few of others, but for one that meets experts
static int run_units(Session *s, const Products *p, Dispatch *d, struct product_args *a) {
    bool heads = p->experts == EXPERTS_HEADS;
    bool floats = is_float(p->w[0]) && is_float(p->w[p->k - 1]);   // only a GLU may have both
    int n = heads || p->n > FEW ? p->n : 1, all = 0;
    int nsg = floats ? GEMV_SIMDGROUPS : STAGED_SIMDGROUPS;
    a->few = floats ? p->n : smaller(p->n, STAGED_TOKENS);
    if (p->experts || p->n > FEW) a->few = 1;
    a->outputs = n * a->each;
    for (int i = 0; i < p->k; i++) all += p->w[i]->rows * (heads ? a->each : a->outputs);
    int most = gemv_most(all), tokens = tokens_for(a->few);
    for (int i = 0; i < n_results(p); i++)
        a->per_output += gemv_grid(p->w[i]->type, p->w[i]->rows, most, tokens,
                                   p->e.kind == EPILOGUE_GLU, nsg);
    d->groups = a->per_output * a->outputs;
    d->threads = nsg * SIMD_LANES;
    d->shared = floats ? 0 : staged_floats(p->w[0]->cols, tokens);
    d->constant[C_TOKENS] = tokens;
    d->constant[C_UNIT_ROWS] = most;
    gpu_dispatch(s->gpu, d, a, sizeof *a);
    return n * a->few;   // n is 1 for a few tokens, a->few for a router's or heads'
}

static void run_gemv(Session *s, Products p) {   // for up to FEW tokens, or n of a router
    for (int i = 1; i < p.k && p.e.kind != EPILOGUE_GLU; i++)   // floats and blocks apart
        if (is_float(p.w[i]) != is_float(p.w[0])) {
            Products more = p;
            more.w += i, more.y += i, more.k -= p.k = i;
            run_gemv(s, more);
        }
    const int32_t *chosen = s->chosen;
    float *y[3];
    memcpy(y, p.y, n_results(&p) * sizeof *y);
    p.y = y;
    for (int done; p.n > 0; p.n -= done) {
        struct product_args a;
        Dispatch d = {.kernel = "gemv", .n = GEMV_BUFFERS,
                      .constant = {[C_NORMED] = norm_bits(p.in.norm)}};
        bind_products(s, &d, &a, &p);
        if (p.in.norm) d.bound[GEMV_NORM] = p.in.norm->w;
        if (p.experts) d.bound[GEMV_CHOSEN] = chosen;
        done = run_ring(s, &p, &d, &a);
        if (!done) done = run_units(s, &p, &d, &a);
        p.in.x += done * (p.experts == EXPERTS_SORTED ? a.each : 1) * input_step(p.w[0]);
        if (p.e.other) p.e.other += done * output_step(p.w[0]);
        for (int i = 0; i < n_results(&p); i++) y[i] += done * a.each * output_step(p.w[i]);
        if (p.experts) chosen += done * a.each;
    }
}

// tokens in a tile of gemm for the experts of n tokens, by how many an expert gets on average
static int experts_tile(const Session *s, int n) {
    return gemm_tokens(n * s->m->layers[s->l].n_used / s->m->config.n_expert);
}

// First makes halves of the input; without one (NULL) those of the product before serve again. The
// tile is as large as it can be while there are enough threadgroups for the GPU.
static void run_gemm(Session *s, Products p) {
    enum { FILL = 100 };
    Gpu *g = s->gpu;
    struct product_args a;
    bool chosen = p.experts == EXPERTS_GATHER || p.experts == EXPERTS_SORTED;
    int tile = chosen ? experts_tile(s, p.n) : gemm_tokens(p.n), rows = GEMM_ROWS;
    Dispatch d = {.kernel = "gemm", .n = GEMM_BUFFERS, .constant = {[C_BUFFERS] = TILE_BUFFERS}};
    bind_products(s, &d, &a, &p);
    if (chosen) d.bound[GEMM_TILES] = g->tiles, d.bound[GEMM_ORDER] = s->order;
    struct halve_args b = {a.cols, a.x_step};
    if (p.in.x)
        run_kernel(s, b, "halve", {p.in.x, g->halves, g->powers}, 3,
                   p.n * (p.experts == EXPERTS_GATHER ? 1 : a.each),
                   threads_for(div_up(row_halves(a.cols), 4), NORM_THREADS), NORM_FLOATS,
                   {[C_RAGGED] = a.cols % 32 != 0});
    d.bound[AT_X] = g->halves;
    d.bound[GEMM_POWERS] = g->powers;
    size_t each = p.experts == EXPERTS_HEADS ? a.each : 1, all = 0;   // rows of all matrices
    for (int i = 0; i < p.k; i++) all += p.w[i]->rows * each;
    if (all / rows * div_up(p.n, tile) < FILL) rows /= 2;
    if (all / rows * div_up(p.n, tile) < FILL && tile > 64 && !chosen) tile = 64;
    a.tiles = chosen ? expert_tiles(p.n * a.each, s->m->config.n_expert, tile) : div_up(p.n, tile);
    for (int i = 0; i < p.k; i++) d.groups += div_up(p.w[i]->rows, rows) * a.tiles * each;
    d.threads = 2 * rows;
    d.shared = gemm_floats(tile, rows, TILE_BUFFERS);
    d.constant[C_TILE_TOKENS] = tile;
    d.constant[C_TILE_ROWS] = rows;
    gpu_dispatch(g, &d, &a, sizeof a);
}

// Up to FEW tokens run as in decode, so that each has the bits that it has alone; run_ring and
// run_units say which weights they read once. In an encoder a token sees later ones.
static bool is_few(const Session *s, int n) { return n == 1 || (n <= FEW && s->m->config.causal); }

static void run_any(Session *s, Products p) {
    if (is_few(s, p.n)) run_gemv(s, p);
    else run_gemm(s, p);
}

static void run_products(Session *s, const Matrix *const *w, int k, Input in, float *const *y,
                         int n, Epilogue e) {
    run_any(s, (Products){w, k, in, y, n, e, EXPERTS_NONE});
}

static void run_product(Session *s, const Matrix *w, Input in, float *y, int n, Epilogue e) {
    run_products(s, &w, 1, in, &y, n, e);
}

// norm(x), if the model has this norm: gemv applies an RMSNorm; others, and a chunk's, go into h
static Input run_input(Session *s, const float *x, const Norm *w, float *h, int n) {
    const Config *c = &s->m->config;
    if (!w->w && c->norm != NORM_BARE) return (Input){x, NULL};
    bool rms = c->norm == NORM_RMS && !w->b;
    if (is_few(s, n) && rms && !c->inputs_weighed) return (Input){x, w};
    run_norm(s, x, w, c->norm, c->dim, h, n, STORE);
    return (Input){h, NULL};
}

static bool is_gated(const Layer *w) {   // a gate after each head's query
    return !w->k_b.data && w->q.rows > (int64_t)w->n_head * w->hd;
}

// How attention's work is spread, with `used` rows in the KV ring. A threadgroup has some query
// heads of one KV head. For a few tokens it has a slice of the ring, too. The heads of one token
// are apart as long as the GPU has room for all. Slices double as the ring fills, up to a limit, so
// launches seldom change; query_slices says how many of them a query takes.
typedef struct { int heads, slices; } Spread;   // slices: at most
static int spread_groups(const Layer *w, int heads) {   // threadgroups for a slice of a token
    return div_up(w->n_head / w->n_kv, heads) * w->n_kv;
}
static Spread attention_spread(const Layer *w, int used, bool few) {
    Spread x = {smaller(w->n_head / w->n_kv, ATTENTION_HEADS), 1};
    int each = attention_slice(w->hd, w->vd);
    if (!few) return x;
    while (x.slices < ATTENTION_FILL && x.slices * each < used) x.slices *= 2;
    if (w->n_head * x.slices <= ATTENTION_FILL) x.heads = 1;
    int fill = ATTENTION_FILL / spread_groups(w, x.heads);
    x.slices = larger(smaller(x.slices, fill), 1);
    return x;
}

// what rope, attention and flash_attention bind: each has a stretch of this list as parameters
enum { AT_V_NEW, AT_ANGLES, AT_Q_NORM, AT_K_NORM, AT_Q_BIAS, AT_K_BIAS, AT_K_NEW, AT_Q, AT_K, AT_V,
       AT_POS_K, AT_NOW, AT_SLOPES, AT_SINKS, AT_OUT, AT_PARTS };

// runs one of them, whose stretch goes from buffer `from` to buffer `to` of d
static void run_stretch(Gpu *g, const Dispatch *d, const struct attention_args *a,
                        const char *kernel, int from, int to, size_t groups, size_t threads,
                        size_t shared) {
    Dispatch part = {kernel, {NULL}, to - from + 1, groups, threads, shared, {0}};
    memcpy(part.bound, d->bound + from, part.n * sizeof *d->bound);
    memcpy(part.constant, d->constant, sizeof d->constant);
    gpu_dispatch(g, &part, a, sizeof *a);
}

// flash_attention for a chunk of n tokens, or false: too few, or a tile has no room in its memory
static bool run_flash(Session *s, const Layer *w, Dispatch *d, const struct attention_args *a) {
    bool latent = w->k_b.data;
    int buffers = TILE_BUFFERS, shared;
    do shared = flash_floats(w->hd, w->vd, latent, buffers);
    while (shared > SHARED_BYTES / 4 && --buffers);
    if (a->n < FLASH_MIN || !buffers) return false;
    int queries = FLASH_QUERIES / flash_split(w->hd, w->vd, buffers);
    d->constant[C_BUFFERS] = buffers;
    run_stretch(s->gpu, d, a, "flash_attention", AT_Q, AT_OUT,
                (size_t)div_up(a->n, queries) * w->n_head, FLASH_THREADS, shared);
    return true;
}

// QK norm, RoPE, the write to the cache, and s->att[n][n_head][vd]. One token takes one dispatch,
// more take two (rope, then attention); norms of whole projections and of values have their own,
// and so has the merge of a KV ring's slices, unless attention merges them itself.
static void run_attention(Session *s, const Layer *w, int n) {
    const Config *c = &s->m->config;
    Gpu *g = s->gpu;
    Cache *kv = &s->cache[s->l];
    const Norm *qn = &w->q_norm, *kn = &w->k_norm, bare = {0};
    bool few = is_few(s, n), own = w->k.rows, latent = w->k_b.data;
    bool merges = few && g->room && own && !latent;
    Spread spread = attention_spread(w, smaller(s->pos + n, kv->rows), few);
    int fused = few && own && !latent ? 1 + (n > 1) : 0;   // see FUSED
    bool q_whole = qn->w && !qn->group, k_whole = kn->w && !kn->group;
    int lanes = attention_lanes(w->hd, w->vd), nsg = attention_most(w->hd, w->vd);
    int heads = n > 1 ? smaller(w->n_head / w->n_kv, ATTENTION_HEADS) : spread.heads;
    struct attention_args a = {
        .n = n, .n_head = w->n_head, .n_kv = w->n_kv, .n_rot = w->n_rot, .sinks = w->sinks != NULL,
        .rows = kv->rows, .window = kv->window, .keep = kv->keep, .span = c->span,
        .slices = spread.slices, .q_step = qn->n > w->hd ? w->hd : 0,
        .k_step = kn->n > w->hd ? w->hd : 0,
        .eps = c->eps, .scale = c->attn_scale, .softcap = c->attn_cap,
        .sharpen_scale = c->span && w->rope != ROPE_NONE ? 0 : c->sharpen_scale,
        .sharpen_length = c->sharpen_length, .sharpen_next = c->span > 0};
    float *q = is_gated(w) ? s->mix : s->q;
    Dispatch d = {
        .bound = {s->v, s->angles[w->window ? WINDOWED : FULL], qn->w, kn->w, qn->b, kn->b, s->k, q,
                  kv->k, kv->v, kv->pos, g->now, s->slopes, w->sinks, s->att, g->parts},
        .constant = {[C_SOFTCAPPED] = c->attn_cap > 0, [C_HEAD_DIM] = w->hd,
                     [C_VALUE_DIM] = w->vd, [C_VALUE_STEP] = latent ? w->hd : w->vd,
                     [C_QUERY_HEADS] = heads, [C_ROW_LANES] = lanes,
                     [C_PAIRING] = w->rope, [C_CENTRED] = c->norm != NORM_RMS,
                     [C_QK_NORMED] = (qn->w && !q_whole) | (kn->w && !k_whole) << 1,
                     [C_QK_LATE] = c->qk_norm_late, [C_FUSED] = fused, [C_MERGES] = merges,
                     [C_BIASES] = (qn->b != NULL) | (kn->b != NULL) << 1,
                     [C_GATED] = q != s->q, [C_ALIBI] = c->alibi > 0, [C_CAUSAL] = c->causal,
                     [C_SPANS] = c->span && w->window}};
    if (q_whole) run_norm(s, q, qn, c->norm, w->n_head * w->hd, q, n, STORE);
    if (k_whole && own) run_norm(s, s->k, kn, c->norm, w->n_kv * w->hd, s->k, n, STORE);
    if (c->values_normed && own)
        run_norm(s, s->v, &bare, NORM_RMS, w->vd, s->v, n * w->n_kv, STORE);
    struct attention_args b = a;   // of rope, which caches no keys if another layer's are read
    if (!own) b.n_kv = 0;
    if (fused != 1 && !latent)
        run_stretch(g, &d, &b, "rope", AT_V_NEW, AT_NOW, UNITS(n * (w->n_head + 2 * b.n_kv)), 0);
    if (few || !run_flash(s, w, &d, &a))
        run_stretch(g, &d, &a, "attention", AT_V_NEW, AT_PARTS,
                    (size_t)n * spread_groups(w, heads) * spread.slices, nsg * SIMD_LANES,
                    attention_floats(heads, w->hd, w->vd, nsg, lanes));
    if (spread.slices == 1 || merges) return;
    run_kernel(s, a, "attention_merge", {q, g->now, w->sinks, g->parts, s->att}, 5,
               div_up(n * w->n_head * w->vd, MERGE_THREADS), MERGE_THREADS, 0,
               {[C_HEAD_DIM] = w->hd, [C_VALUE_DIM] = w->vd, [C_GATED] = q != s->q});
}

// x[n] times gates in s->z, each of which serves `each` numbers
static void run_gate_heads(Session *s, float *x, int n, int each, bool softplus) {
    struct gate_args a = {n, each, softplus};
    run_kernel(s, a, "gate_heads", {x, s->z}, 2, div_up(n, MERGE_THREADS), MERGE_THREADS, 0, {0});
}

// y[n][n_head][..] = each head's matrix times x[n][n_head][..]
static void run_heads(Session *s, const Matrix *w, const float *x, float *y, int n) {
    int n_head = s->m->layers[s->l].n_head;
    Matrix one = *w;   // steps from head to head
    one.x_step /= n_head;
    one.out_step /= n_head;
    w = &one;
    run_any(s, (Products){&w, 1, {x, NULL}, &y, n, STORE, EXPERTS_HEADS});
}

static void run_latent_row(Session *s, const Layer *w, int n) {   // as latent_row, for n tokens
    const Config *c = &s->m->config;
    const Cache *kv = &s->cache[s->l];
    struct attention_args a = {.n = n, .n_head = w->n_head, .n_rot = w->n_rot, .rows = kv->rows,
                               .keep = kv->keep, .q_step = w->q.rows / w->n_head, .eps = c->eps,
                               .sharpen_scale = c->sharpen_scale,
                               .sharpen_length = c->sharpen_length};
    run_kernel(s, a, "latent_row", {s->mix, s->q, s->k, kv->k, kv->pos, w->latent_norm.w,
                                    s->angles[w->window ? WINDOWED : FULL], s->gpu->now}, 8,
               UNITS(n * (w->n_head + 1)), 0,
               {[C_HEAD_DIM] = w->hd, [C_VALUE_DIM] = w->vd, [C_PAIRING] = w->rope});
}

// x[n][n_head][width] times gates, which are a product of their own and go to s->z
static void run_gates(Session *s, const Layer *w, Input in, float *x, int width, int n) {
    run_product(s, &w->attn_gate, in, s->z, n, STORE);
    int each = w->attn_gate.rows > w->n_head ? 1 : width;
    run_gate_heads(s, x, n * w->n_head * width, each, s->m->config.softplus_gates);
}

// s->mix[n][n_head][v] by latent attention, as in latent_attention
static void run_latent(Session *s, const Layer *w, Input in, int n) {
    bool two = w->q_a.data;
    const Matrix *m[2] = {&w->k, two ? &w->q_a : &w->q};
    float *to[2] = {s->k, two ? s->z : s->mix};
    run_products(s, m, 2, in, to, n, STORE);
    bool few = is_few(s, n);
    if (two && !few) run_norm(s, s->z, &w->q_a_norm, NORM_RMS, w->q_a.rows, s->z, n, STORE);
    Input z = {s->z, few ? &w->q_a_norm : NULL};
    if (two) run_product(s, &w->q, z, s->mix, n, STORE);
    run_latent_row(s, w, n);
    run_heads(s, &w->k_b, s->mix, s->q, n);
    run_attention(s, w, n);
    run_heads(s, &w->v_b, s->att, s->mix, n);
    if (w->attn_gate.data) run_gates(s, w, in, s->mix, w->v_b.rows, n);
}

// y[n][ff] = activation(gate in) * (up in), or activation(up in) without a gate, whose product goes
// to h[n][ff] for a chunk. Experts have n * n_used rows. limit: of activation(gate in) and up in.
static void run_ffn(Session *s, const Matrix *gate, const Matrix *up, Input in, float *h, float *y,
                    int n, int experts, float limit) {
    const Matrix *pair[2] = {gate, up};
    Epilogue glu = {.kind = EPILOGUE_GLU, .other = h, .factor = 1, .limit = limit};
    Epilogue act = {.kind = EPILOGUE_ACT, .factor = 1};
    int k = gate->data ? 2 : 1;   // matrices, the last of the pair
    Products p = {pair + 2 - k, k, in, &y, n, k > 1 ? glu : act, experts};
    if (is_few(s, n)) return run_gemv(s, p);
    if (k > 1) run_gemm(s, (Products){&gate, 1, in, &h, n, STORE, experts});
    if (k > 1) in.x = NULL;
    run_gemm(s, (Products){&up, 1, in, &y, n, p.e, experts});
}

static void run_inputs(Session *s, int n) {   // s->gate = activation(s->gate) * the layer's inputs
    const Config *c = &s->m->config;
    struct input_args a = {n, c->per_layer, c->n_layer * c->per_layer};
    run_kernel(s, a, "gate_inputs", {s->gate, s->inputs + s->l * c->per_layer}, 2,
               div_up(n * a.cols, MERGE_THREADS), MERGE_THREADS, 0, {[C_ACTIVATION] = c->act});
}

// The router's choice, and the chosen experts up to their last product, in g->up. The shared expert
// gets as far in s->up; its router's product goes to s->gathered.
static void run_choice(Session *s, const Layer *w, Input in, int n) {
    const Config *c = &s->m->config;
    const Matrix *routers[2] = {&w->router, &w->shared_router};
    float *to[2] = {s->route, s->gathered};
    struct choose_args a = {c->n_expert, w->n_used, c->gating == SIGMOID, c->weights_normed,
                            c->n_group, c->n_group_used, c->weights_scale};
    Input x = in;   // first the router's, then the experts'
    int first = c->routed_first, end = w->shared_router.data ? 2 : 1, from = EXPERTS_GATHER;
    if (w->router_norm.w) x = run_input(s, s->x, &w->router_norm, s->gathered, n);
    Products products = {routers + first, end - first, x, to + first, n, STORE, EXPERTS_NONE};
    if (first < end) run_gemv(s, products);
    run_kernel(s, a, "choose_experts", {s->route, w->router_bias, s->chosen, s->weight}, 4, n,
               SIMD_LANES, c->n_group, {[C_BIASES] = w->router_bias != NULL});
    if (w->shared_up.data)
        run_ffn(s, &w->shared_gate, &w->shared_up, in, s->gate, s->up, n, EXPERTS_NONE,
                w->limit_ffn);
    bool few = is_few(s, n);
    if (!few) {
        int all = n * w->n_used, tile = experts_tile(s, n);
        struct sort_args b = {all, c->n_expert, expert_tiles(all, c->n_expert, tile), tile};
        run_kernel(s, b, "sort_choices", {s->chosen, s->order, s->gpu->place, s->gpu->tiles}, 4, 1,
                   SORT_THREADS, larger(c->n_expert, SORT_THREADS), {0});
    }
    if (w->expert_norm.w) x = run_input(s, s->x, &w->expert_norm, s->gathered, n);
    if (w->squeeze.data) {
        run_product(s, &w->squeeze, x, s->squeezed, n, STORE);
        x = (Input){s->squeezed, NULL};
    }
    if (c->inputs_weighed) {   // each choice has an input of its own
        struct weigh_inputs_args b = {w->up.cols, w->n_used, !few};
        run_kernel(s, b, "weigh_inputs", {x.x, s->order, s->weight, s->gpu->gate}, 4,
                   n * w->n_used, threads_for(b.dim, NORM_THREADS), 0, {0});
        x.x = s->gpu->gate;
        from = EXPERTS_SORTED;
    }
    run_ffn(s, &w->gate, &w->up, x, s->gpu->gate, s->gpu->up, n, from, w->limit_experts);
}

// y[n][dim] = the epilogue of experts' weighted sum, plus the shared expert's result if it has data
static void run_experts_sum(Session *s, const Layer *w, const Matrix *shared, float *y, int n,
                            Epilogue e) {
    Gpu *g = s->gpu;
    const Matrix *down = &w->down;
    struct weigh_args a = {down->rows, w->n_used, shared->data != NULL,
                           w->shared_router.data != NULL, !is_few(s, n), e.factor};
    run_any(s, (Products){&down, 1, {g->up, NULL}, &g->gate, n, STORE, EXPERTS_SORTED});
    if (a.joined) run_product(s, shared, (Input){s->up, NULL}, s->expert_out, n, STORE);
    run_kernel(s, a, "weigh_experts", {g->gate, s->weight, g->place, s->expert_out, s->gathered,
                                       e.other, y}, 7, n, threads_for(down->rows, NORM_THREADS), 0,
               {[C_EPILOGUE] = e.kind});
}

// The same, where other steps may follow: unsqueeze widens the sum of squeezed experts, and
// the shared expert is added; if both results are normed (Gemma 4), each has a product and a norm.
static void run_experts_end(Session *s, const Layer *w, float *y, int n, Epilogue e) {
    const Matrix none = {0}, *shared = &w->shared_down;
    Input up = {s->up, NULL};   // of the shared expert
    Epilogue add = {.kind = EPILOGUE_ADD, .other = y, .factor = e.factor};
    if (w->unsqueeze.data) {
        run_experts_sum(s, w, &none, s->squeezed_sum, n, STORE);
        run_product(s, &w->unsqueeze, (Input){s->squeezed_sum, NULL}, y, n, e);
        if (shared->data) run_product(s, shared, up, y, n, add);
    } else if (w->expert_post.w) {
        run_experts_sum(s, w, &none, y, n, STORE);
        run_product(s, shared, up, s->expert_out, n, STORE);
        run_norm(s, y, &w->expert_post, NORM_RMS, s->m->config.dim, y, n, STORE);
        run_norm(s, s->expert_out, &w->shared_post, NORM_RMS, s->m->config.dim, y, n, add);
    } else run_experts_sum(s, w, shared, y, n, e);
}

// The rule for n tokens of a pass or, from row `first` of inputs on, for guesses that stood. The
// inputs: n or FEW rows of the convolution's results, as many of alpha, and of beta. A few tokens
// have the layer's own, which stay until its next pass.
static void run_rule(Session *s, const Layer *w, int n, int first) {
    const Config *c = &s->m->config;
    bool joint = w->beta_alpha.data, asks = w->mixer == MIX_DELTA, kda = c->kda;
    bool guesses = s->o.draft > 0 && n > 1 && !first;   // there may be some
    int block = is_few(s, n) ? 1 : BLOCK_MAX, rows = larger(n, FEW);
    const float *conv = n > FEW ? s->gpu->conv : s->kept + s->l * s->n_kept;
    const float *alpha = conv + rows * w->conv_in.rows;
    const float *beta = joint ? alpha : alpha + rows * c->n_value * larger(c->kda, 1);
    struct delta_args b = {n, first, guesses, c->n_key, c->n_value, c->dv, c->key_tiled,
                           (joint + 1) * c->n_value, c->eps, c->kda_lower};
    if (joint) alpha += c->n_value;   // in each row
    run_kernel(s, b, "delta_rule", {s->cache[s->l].state, conv, alpha, beta, w->dt_bias, w->a,
                                    s->att, s->z, w->skip, s->gpu->now}, 10,
               c->n_value * div_up(c->dv, DELTA_UNIT * UNIT_SIMDGROUPS),
               UNIT_SIMDGROUPS * SIMD_LANES, delta_floats(c->dk, block, kda),
               {[C_HEAD_DIM] = c->dk, [C_ASKS] = asks, [C_BLOCK] = block, [C_CHANNELS] = kda});
}

// Returns [n][n_value][dv] or, of a short convolution, which has neither rule nor norm,
// [n][channels]. KDA has q, k and v in three matrices. An alpha or z with an _a takes two products.
static const float *run_recurrent(Session *s, const Layer *w, Input in, int n) {
    const Config *c = &s->m->config;
    bool asks = w->mixer == MIX_DELTA, gated = w->mixer == MIX_CONV, kda = c->kda;
    bool joint = w->beta_alpha.data, two = w->alpha_a.data, z_two = w->z_a.data;
    int channels = w->conv_in.rows, past = c->conv - 1, values = c->n_value * c->dv;
    float *conv = n > FEW ? s->gpu->conv : s->kept + s->l * s->n_kept;   // see run_rule
    float *alpha = conv + larger(n, FEW) * channels;
    float *mix = s->mix + (size_t)past * channels, *z_in = s->att + n * w->alpha_a.rows;
    const Matrix *m[4] = {&w->conv_in, &w->z, &w->alpha, &w->beta};
    float *to[4] = {mix, s->z, gated ? s->att : alpha,
                    alpha + larger(n, FEW) * c->n_value * larger(c->kda, 1)};
    if (z_two) m[1] = &w->z_a, to[1] = z_in;
    if (joint) m[2] = &w->beta_alpha;
    if (two) m[2] = &w->alpha_a, to[2] = s->att;
    if (kda) {   // three matrices in place of conv_in, whose results lie side by side
        const Matrix *qkv[3] = {&w->q, &w->k, &w->v};
        float *side[3] = {mix, mix + w->q.rows, mix + 2 * w->q.rows};
        run_products(s, qkv, 3, in, side, n, STORE);
        run_products(s, m + 1, 3, in, to + 1, n, STORE);
    } else run_products(s, m, asks && !joint ? 2 : 3, in, to, n, STORE);
    if (asks && !joint && !kda) run_products(s, m + 2, 2, in, to + 2, n, STORE);
    if (two) run_product(s, &w->alpha, (Input){s->att, NULL}, alpha, n, STORE);
    if (z_two) run_product(s, &w->z, (Input){z_in, NULL}, s->z, n, STORE);
    struct conv_args a = {n, channels, past, s->o.draft > 0};
    run_kernel(s, a, "delta_conv", {s->mix, s->cache[s->l].conv, w->conv, w->conv_bias,
                                    s->att, s->z, conv, s->gpu->now}, 8,
               UNITS(div_up(channels, SIMD_LANES) * div_up(n, CONV_TOKENS)), 0,
               {[C_BIASES] = w->conv_bias != NULL, [C_GATED] = gated});
    if (gated) return conv;
    run_rule(s, w, n, 0);
    int cols = asks ? c->dv : values / c->n_key, rows = n * values / cols;
    Epilogue gate = {.kind = EPILOGUE_GLU, .other = s->z, .factor = 1};
    if (w->delta_norm.w)
        run_norm(s, s->att, &w->delta_norm, NORM_RMS, cols, s->att, rows,
                 asks && !kda ? gate : STORE);
    if (kda) run_gate_heads(s, s->att, n * values, 1, false);
    return s->att;
}

// The rest of a layer after attention, a dispatch a token, if --gpu block asks and ffn_block can
static bool run_block(Session *s, const Layer *w, int n) {
    const Config *c = &s->m->config;
    const Matrix *m[4] = {&w->o, &w->gate, &w->up, &w->down};
    struct product_args a = {.cols = w->o.cols, .eps = c->eps, .factor = 1};
    Dispatch d = {"ffn_block", {[4] = s->att, w->ffn_norm.w, s->x, s->gate}, 8, 1, BLOCK_THREADS,
                  0, {[C_ACTIVATION] = c->act, [C_EPILOGUE] = EPILOGUE_GLU,
                      [C_NORMED] = norm_bits(&w->ffn_norm), [C_UNIT_ROWS] = GEMV_ROWS}};
    bool fits = s->o.gpu_block && !w->attn_post_norm.w && !w->ffn_post_norm.w && !w->side_by_side &&
                w->gate.data && w->ffn_norm.w && !w->ffn_norm.b && !w->router.data &&
                !w->mixer && !w->k_b.data && !w->input_gate.data && w->limit_ffn <= 0 &&
                !w->o.bias && !w->gate.bias && !w->up.bias && !w->down.bias &&
                c->norm == NORM_RMS && c->residual_scale == 1;
    for (int i = 0; fits && i < 4; i++) bind_matrix(&d, a.w, i, m[i], NO_BIAS, false);
    const Variant *p = fits ? gpu_pipeline(s->gpu, &d) : NULL;
    if (!p || !gpu_ready(s->gpu, p) || p->threads < BLOCK_THREADS) return false;
    for (int t = 0; t < n; t++) {
        d.bound[4] = s->att + (size_t)t * w->o.cols;
        d.bound[6] = s->x + (size_t)t * c->dim;
        gpu_dispatch(s->gpu, &d, &a, sizeof a);
    }
    return true;
}

// ---- 6. forward ----
//
// A pass encodes all its dispatches in the order in which they run, and waits for them at its end.
// The CPU may run the FFNs of the first layers. The GPU lacks their matrices then, but for those
// that run again in later layers (Nanbeige), and has all else.

static int file_layers(const Model *m) { return m->config.n_layer / m->config.n_loops; }

// the layer of the file whose FFN has a matrix, or -1
static int ffn_of(const Tensor *t) {
    Str rest = t->name;
    bool ffn = t->ne[1] > 1 && str_cut(&rest, "blk.") && memmem(rest.s, rest.n, ".ffn_", 5);
    return ffn ? atoi(rest.s) : -1;
}

static bool gpu_reads(const Session *s, const Tensor *t) {   // does the GPU have a copy?
    int l = ffn_of(t), repeated = s->m->config.n_layer - file_layers(s->m);
    return l < 0 || l + repeated >= s->gpu->cpu_ffns;
}

// bytes that it takes where it is sent
static size_t sent_bytes(const Tensor *t) { return ((size_t)tensor_bytes(t) + 255) / 256 * 256; }

// The end of a block: y[n][dim] = base + post(w in), or, in an encoder, post(base + w in); then
// attn_norm_2 of that plus base, if there is one, and at a layer's end its scale. tmp [n][dim] is
// scratch. If w is NULL, the experts' sum takes the place of w in.
typedef struct {
    const Matrix *w;
    const float *in, *base;
    const Norm *post;
    float *tmp, *y;
} Residual;
static void run_residual(Session *s, const Layer *l, Residual r, int n) {
    const Config *c = &s->m->config;
    const Norm *last = l->input_gate.data ? &l->input_norm : &l->ffn_post_norm;   // of a layer
    bool again = r.post == &l->attn_post_norm && l->attn_norm_2.w;
    bool sum_last = r.post->w && !c->encoder;   // after the norm
    Epilogue add = {.kind = EPILOGUE_ADD, .other = r.base, .factor = c->residual_scale};
    float *to = again ? r.tmp : r.y;
    float *product = sum_last ? r.tmp : to;
    if (r.w) run_product(s, r.w, (Input){r.in, NULL}, product, n, sum_last ? STORE : add);
    else run_experts_end(s, l, product, n, sum_last ? STORE : add);
    if (r.post == last && l->out_scale) add.scale = *l->out_scale;
    if (sum_last) run_norm(s, product, r.post, c->norm, c->dim, to, n, add);
    else if (r.post->w) run_norm(s, to, r.post, c->norm, c->dim, to, n, again ? add : STORE);
    if (again) run_norm(s, to, &l->attn_norm_2, c->norm, c->dim, r.y, n, STORE);
}

// Does the CPU run this layer's FFN for n tokens?
static bool is_apart(const Session *s, const Layer *w, int n) {
    bool sent = s->gpu->sent.size && n >= s->gpu->sent_tokens;   // its weights go to the GPU
    return w->up.data && s->l < s->gpu->cpu_ffns && !sent;
}

static void run_ffn_apart(Session *s, int n) {   // the stream goes to the CPU and back
    Gpu *g = s->gpu;
    size_t bytes = (size_t)n * s->m->config.dim * sizeof *s->x;
    if (g->dry || !device_fetch(g, s->x, bytes)) return;
    s->n = n;
    forward_ffn(s);
    device_begin(g);
    device_send(g, s->x, bytes);
}

// Sends matrices of a layer's FFN that the GPU lacks, so that a chunk's FFN runs there: the CPU
// would take longer. gpu_find knows them until their number is set back.
static void send_ffn(Session *s) {
    Gpu *g = s->gpu;
    const Gguf *file = s->m->gguf;
    int known = g->n_shared;
    size_t at = 0;
    for (size_t i = 0; i < file->n_tensors && !g->dry; i++) {
        const Tensor *t = &file->tensors[i];
        size_t bytes = tensor_bytes(t);
        if (gpu_reads(s, t) || ffn_of(t) != s->l % file_layers(s->m)) continue;
        assert(g->n_shared < known + MAX_SENT);   // no FFN that llm knows has more matrices
        g->shared[g->n_shared++] = (Shared){(char *)t->data, bytes, (char *)g->sent.buffer + at};
        device_send(g, t->data, bytes);
        at += sent_bytes(t);
    }
}

// One layer, as forward_layer. If attention and FFN stand side by side, both read s->x, so x plus
// attention's result waits in s->out; so it does if a recurrent mixer stands beside attention.
static void run_layer(Session *s, const Layer *w, int n) {
    const Matrix *qkv[3] = {&w->q, &w->k, &w->v};
    float *to[3] = {is_gated(w) ? s->mix : s->q, s->k, s->v};
    float *sum = w->side_by_side ? s->out : s->x, *base = s->x;
    bool moe = w->router.data, latent = w->k_b.data, both = w->n_kv && w->mixer;
    const Norm none = {0}, *post = both ? &none : &w->attn_post_norm;   // of attention
    Epilogue clamped = {.factor = 1, .limit = s->m->config.clamp_qkv};   // Q, K and V
    if (moe && s->m->config.routed_first)
        run_gemv(s, (Products){(const Matrix *[]){&w->router}, 1, {s->x, NULL}, &s->route, n, STORE,
                               EXPERTS_NONE});
    Input in = run_input(s, s->x, &w->attn_norm, s->normed, n);
    if (w->n_kv) {
        if (latent) run_latent(s, w, in, n);
        else run_products(s, qkv, w->k.rows ? 3 : 1, in, to, n, clamped);
        if (!latent) run_attention(s, w, n);
        if (!latent && w->attn_gate.data) run_gates(s, w, in, s->att, w->vd, n);
        if (is_few(s, n) && !is_apart(s, w, n) && run_block(s, w, n)) return;
        run_residual(s, w, (Residual){.w = &w->o, .in = latent ? s->mix : s->att, .post = post,
                                      .base = s->x, .tmp = s->out, .y = both ? s->out : sum}, n);
        if (both) base = s->out;
    }
    if (w->mixer) {
        const float *result = run_recurrent(s, w, in, n);
        run_residual(s, w, (Residual){.w = &w->delta_out, .in = result, .post = &w->attn_post_norm,
                                      .base = base, .tmp = both ? s->normed : s->out, .y = sum}, n);
    }
    if (!w->up.data) return;
    int known = s->gpu->n_shared;
    if (is_apart(s, w, n)) run_ffn_apart(s, n);
    else {
        if (s->l < s->gpu->cpu_ffns) send_ffn(s);
        if ((w->n_kv || w->mixer) && (!w->side_by_side || w->ffn_norm.w))
            in = run_input(s, s->x, &w->ffn_norm, s->normed, n);
        if (moe) run_choice(s, w, in, n);
        else run_ffn(s, &w->gate, &w->up, in, s->gate, s->up, n, EXPERTS_NONE, w->limit_ffn);
        run_residual(s, w, (Residual){.w = moe ? NULL : &w->down, .in = s->up, .base = sum,
                                      .post = &w->ffn_post_norm, .tmp = s->normed, .y = s->x}, n);
    }
    s->gpu->n_shared = known;
    if (!w->input_gate.data) return;
    run_product(s, &w->input_gate, (Input){s->x, NULL}, s->gate, n, STORE);
    run_inputs(s, n);
    run_residual(s, w, (Residual){.w = &w->input_proj, .in = s->gate, .post = &w->input_norm,
                                  .base = s->x, .tmp = s->out, .y = s->x}, n);
}

static void run_best(Session *s, int n, int rows) {   // of rows of n logits, see Best
    struct best_args a = {n, rows};
    run_kernel(s, a, "best_ids", {s->logits, s->best}, 2, UNITS(rows * best_parts(n)), 0, {0});
}

// s->logits[n][n_vocab] for n rows of x from `first` on; of a few, which are sampled, also s->best
static void run_output(Session *s, int first, int n) {
    const Config *c = &s->m->config;
    size_t at = (size_t)first * c->dim;
    Input in = run_input(s, s->x + at, &s->m->out_norm, s->normed + at, n);
    run_product(s, &s->m->output, in, s->logits, n,
                (Epilogue){.factor = c->logit_scale, .softcap = c->logit_cap});
    if (n <= FEW) run_best(s, c->n_vocab, n);
}

// keeps norm(x), or x itself, as states of n positions from the `first` of this pass on
static void run_states(Session *s, const float *x, const Norm *w, int first, int n) {
    run_norm(s, x, w, s->m->config.norm, s->m->config.dim, s->states, n,
             (Epilogue){.factor = 1, .to = s->o.chunk + first});
}

// nextn_forward and nextn_best, but for what is left to gpu_best; l: the block's layer
static void run_nextn(Session *s, int l, int n) {
    const Config *c = &s->m->config;
    const Layer *w = &s->m->layers[l];
    const Matrix *embd[3] = {&w->embd};
    float *x = s->x + (size_t)(n - 1) * c->dim, *h = s->normed;   // of the last token
    int kind = c->nextn_layer_norm ? NORM_LAYER : c->norm;
    Epilogue pair = {.factor = 1, .step = 2 * c->dim}, scaled = {.factor = c->logit_scale};
    run_embed(s, embd, 1, s->x, n);
    run_norm(s, s->x, &w->embd_norm, c->norm, c->dim, s->normed, n, pair);
    pair.from = s->o.chunk - 1;   // a token's state is the one before it
    run_norm(s, s->states, &w->state_norm, c->norm, c->dim, s->normed + c->dim, n, pair);
    s->l = l;
    run_product(s, &w->joint, (Input){s->normed, NULL}, s->x, n, STORE);
    run_layer(s, w, n);
    run_norm(s, x, &w->out_norm, kind, c->dim, h, 1, STORE);
    run_product(s, &w->output, (Input){h, NULL}, s->logits, 1, scaled);
    // a whole chunk ends where the state before it stands, which blocks that run later still read
    if (l == c->n_layer || n < s->o.chunk) run_states(s, c->nextn_raw ? x : h, NULL, n - 1, 1);
    run_best(s, w->output.rows, 1);
}

// Sends what a pass of n tokens reads besides weights and caches. The rows of caches `from` to
// end-1 get their positions, but not in a warm-up, which has no ids: then no query ever sees them.
// Returns a hash of all that changes a few tokens' dispatches in these layers.
static uint64_t send_tokens(Session *s, const int32_t *ids, int n, int pos, int from, int end) {
    Gpu *g = s->gpu;
    const Config *c = &s->m->config;
    uint64_t key = from;
    s->pos = pos;
    g->few = is_few(s, n);
    g->now[NOW_POS] = pos;
    g->now[NOW_PLACED] = ids != NULL;
    g->now[NOW_STOOD] = ids ? pos - s->seen : 0;
    g->now[NOW_GUESSES] = s->guesses;
    for (int i = 0; i < n; i++) g->ids[i] = ids ? ids[i] : 0;
    for (int l = from; l < end; l++) {
        Cache *kv = &s->cache[l];
        if (!kv->rows) continue;
        Spread x = attention_spread(&s->m->layers[l], smaller(pos + n, kv->rows), true);
        key = (key ^ (x.slices << 8 | x.heads)) * 0x100000001b3;
        for (int i = 0; ids && i < n; i++) kv->pos[cache_row(kv, pos + i)] = pos + i;
    }
    each_row(s, angles_row, NULL, n);
    device_send(g, g->now, (char *)(g->ids + n) - (char *)g->now);   // its counts are 0
    device_send(g, s->angles[FULL], (size_t)n * c->n_rot[FULL] * sizeof(float));
    device_send(g, s->angles[WINDOWED], (size_t)n * c->n_rot[WINDOWED] * sizeof(float));
    return key;
}

// embedding, and the layers' own inputs
static void run_embeddings(Session *s, int n) {
    const Model *m = s->m;
    const Config *c = &m->config;
    const Matrix *embd[3] = {&m->embd, &m->pos_embd, &m->type_embd}, *layers[3] = {&m->layer_embd};
    run_embed(s, embd, c->embd_scale, s->x, n);
    if (c->per_layer) {   // see layer_inputs_row
        run_embed(s, layers, sqrtf(c->per_layer / 2.0f), s->inputs, n);
        run_product(s, &m->layer_proj, (Input){s->x, NULL}, s->gpu->inputs, n,
                    (Epilogue){.factor = 1 / sqrtf(c->dim)});
        run_norm(s, s->gpu->inputs, &m->layer_norm, NORM_RMS, c->per_layer, s->inputs,
                 n * c->n_layer,
                 (Epilogue){.kind = EPILOGUE_ADD, .other = s->inputs, .factor = sqrtf(0.5f)});
    }
    if (c->embd_normed || m->embd_norm.w)
        run_norm(s, s->x, &m->embd_norm, c->norm, c->dim, s->x, n, STORE);
}

static void run_layers(Session *s, int from, int end, int n) {
    const Model *m = s->m;
    const Config *c = &m->config;
    int split = c->n_layer / MAX_SPLITS + SPLIT_LAYERS;
    if (!from) run_embeddings(s, n);
    for (s->l = from; s->l < end; s->l++) {
        const Layer *w = &m->layers[s->l];
        run_layer(s, w, n);
        bool done = is_apart(s, w, n) && !w->input_gate.data;   // an FFN that ends the layer has it
        if (w->last_norm.w && !done)
            run_norm(s, s->x, &w->last_norm, c->norm, c->dim, s->x, n, STORE);
        // Apple's GPU begins on these layers while the next are encoded
        int layers = s->l + 1;
        if (n > 1 ? layers % split == 0 : layers == EARLY_LAYERS) device_begin(s->gpu);
    }
    if (end == c->n_layer && s->n_cache > end)
        run_states(s, s->x, c->nextn_raw ? NULL : &m->out_norm, 0, n);
}

// The end of a pass: fetches its logits, and the best of them, which lie before them. Returns
// whether the GPU has done its work. If not, it is closed. The CPU evaluates the history again if
// what came of it lay in the GPU's memory, or a recurrent state may have changed half-way.
static bool gpu_finish(Session *s, int rows) {
    int pos = s->pos, end = s->history.n, guesses = s->guesses;
    size_t known = rows <= FEW ? rows : 0, n_vocab = s->m->config.n_vocab;
    Best *from = s->best + (FEW + 1 - known) * best_parts(n_vocab);
    size_t bytes = rows ? (char *)(s->logits + rows * n_vocab) - (char *)from : 0;
    bool ok = device_fetch(s->gpu, from, bytes);
    s->n_best = ok ? known : 0;
    if (!ok) gpu_close(s);
    if (ok || (!DEVICE_COPIES && !s->n_recurrent)) return ok;
    session_truncate(s, 0);
    s->guesses = 0;   // the history has none
    for (int p = 0, n; p < end; p += n) {
        n = smaller((p < pos ? pos : end) - p, s->o.chunk);   // chunks as before: one begins at pos
        forward(s, s->history.id + p, n, p);
        s->seen = p + n;
    }
    s->guesses = guesses;
    s->history.n = end;
    s->nextn_pos = larger(end, 1);   // what the blocks knew is lost
    return false;
}

// Layers whose FFNs run on the CPU are no part of a graph.
static bool gpu_forward(Session *s, const int32_t *ids, int n, int pos, int first) {
    const Config *c = &s->m->config;
    Gpu *g = s->gpu;
    int rows = smaller(n - first, LOGIT_ROWS);
    if (!g) return false;
    device_begin(g);
    // in recurrent states, the guesses of the last pass that stood
    for (s->l = 0; pos > s->seen && s->l < c->n_layer; s->l++)
        if (s->cache[s->l].state) run_rule(s, &s->m->layers[s->l], pos - s->seen, g->sure);
    uint64_t key = send_tokens(s, ids, n, pos, 0, c->n_layer);
    if (g->cpu_ffns) run_layers(s, 0, g->cpu_ffns, n);
    g->sure = n - s->guesses;
    if (!device_again(g, g->few ? n : 0, key + rows)) {
        run_layers(s, g->cpu_ffns, c->n_layer, n);
        if (rows > 0) run_output(s, first, rows);
    }
    return gpu_finish(s, rows);
}

static bool gpu_logits(Session *s, int first, int n) {
    if (!s->gpu) return false;
    device_begin(s->gpu);
    run_output(s, first, n);
    return gpu_finish(s, n);
}

// nextn_forward. A GPU that fails here leaves no best id, so guesses end; the next pass closes it.
static bool gpu_nextn(Session *s, int block, const int32_t *ids, int n, int pos) {
    Gpu *g = s->gpu;
    int l = s->m->config.n_layer + block;
    size_t parts = best_parts(s->m->layers[l].output.rows);
    Best *best = s->best + FEW * parts;
    if (!g) return false;
    device_begin(g);
    uint64_t key = send_tokens(s, ids, n, pos, l, l + 1);
    if (!device_again(g, g->few ? FEW * (block + 1) + n : 0, key)) run_nextn(s, l, n);
    s->l = l;
    s->n_best = 0;
    if (!device_fetch(g, best, parts * sizeof *best)) best->sum = NAN;
    return true;
}

static bool gpu_best(const Session *s, int32_t *id, double *chance) {
    double sum = 0;
    if (!s->gpu) return false;
    size_t parts = best_parts(s->m->layers[s->l].output.rows);
    const Best *p = s->best + FEW * parts, *end = p + parts, *best = p;
    for (const Best *q = p; q < end; q++)
        if (q->logit > best->logit) best = q;
    for (; p < end; p++) sum += p->sum * exp(p->logit - best->logit);
    *id = best->id;
    *chance /= sum;
    return true;
}

static bool gpu_fetch(Session *s, void *p, size_t bytes, Error *e) {
    if (!s->gpu || device_fetch(s->gpu, p, bytes)) return true;
    return fail(e, "the GPU's results are lost: %s", s->gpu->why);
}

static void gpu_store(Session *s, bool states) {
    if (!s->gpu || !s->gpu->n_shared) return;   // gpu_open sends everything
    for (int l = 0; l < s->n_cache; l++)
        device_send(s->gpu, s->cache[l].pos, s->cache[l].rows * sizeof *s->cache[l].pos);
    if (states) device_send(s->gpu, s->recurrent, s->n_recurrent * sizeof *s->recurrent);
}

static bool gpu_copy(Session *s, float *to, const float *from, size_t bytes) {
    if (!s->gpu || !DEVICE_COPIES) return false;   // all memory is the host's, too
    device_copy(s->gpu, to, from, bytes);
    return device_wait(s->gpu);
}

// ---- 7. open ----
//
// gpu_attach finds a GPU and says how long a chunk it takes; gpu_open shares all memory with it
// and compiles the kernels. Either closes the GPU if it fails.

// What the GPU cannot run of layers from .. end-1, or NULL. Heads must fit registers, and are read
// four numbers at a time. A layer's scale, or its own inputs, come after the norm at its end. A
// convolution reads the tokens of two threads at most.
static const char *gpu_lacks(const Model *m, int from, int end) {
    const Config *c = &m->config;
    if (c->conv > CONV_TOKENS + 1) return "convolution";
    for (int l = from; l < end; l++) {
        const Layer *w = &m->layers[l];
        int most = w->hd > w->vd ? w->hd : w->vd;
        if (most > HEAD_MAX || c->dk > NARROW_MAX) return "head size";
        if (w->hd % 4 || w->vd % 4 || w->alpha_a.rows % 4) return "head size";
        bool scaled = w->out_scale || c->per_layer, by_norm = w->ffn_post_norm.w && w->up.data;
        if (w->out_scale && *w->out_scale == 0) return "layer_output_scale";
        if (scaled && (!by_norm || c->encoder)) return "layer_output_scale";
        if (!w->up.data && (w->attn_post_norm.w || w->ffn_post_norm.w)) return "post-norms";
        if (w->k_b.data && (w->k_b.x_step / w->n_head) % 4) return "head size";
        if (w->k_b.scale || w->v_b.scale || w->k_b.bias || w->v_b.bias) return "head's scales";
        bool whole = w->q_norm.w && !w->q_norm.group;
        if (whole && (c->qk_norm_late || is_gated(w))) return "QK norm";   // in no model
        if (c->clamp_qkv > 0 && is_gated(w)) return "gates";   // nor this
    }
    for (size_t i = 0; i < m->gguf->n_tensors; i++)
        if ((uintptr_t)m->gguf->tensors[i].data % 16) return "alignment";
    return NULL;
}

// Places what only the GPU needs in an arena, which may only count the bytes.
static void plan_gpu(Session *s, Arena *a) {
    Gpu *g = s->gpu;
    const Config *c = &s->m->config;
    size_t n = s->o.chunk, choices = n * c->n_used, wide = 0, ff = 0, out = 0, parts = 0, conv = 0;
    size_t heads = 0;
    for (size_t i = 0; i < s->m->gguf->n_tensors; i++)
        if (s->m->gguf->tensors[i].ne[1] > 1)
            wide = larger(wide, row_halves(s->m->gguf->tensors[i].ne[0]));
    for (int l = 0; l < s->n_cache; l++) {
        const Layer *w = &s->m->layers[l];
        int slices = w->n_kv ? attention_spread(w, s->cache[l].rows, true).slices : 0;
        parts = larger(parts, (size_t)FEW * w->n_head * slices * (w->vd + 2));
        heads = larger(heads, w->n_head);
        if (w->router.data) ff = larger(ff, w->ff), out = larger(out, w->down.rows);
        if (w->mixer) conv = larger(conv, w->conv_in.rows + c->n_value * (1 + larger(c->kda, 1)));
        if (w->k_b.data)   // both kinds of rows that each head has
            wide = larger(wide, w->n_head * row_halves(larger(w->k_b.cols, w->v_b.cols)));
    }
    if (g->room)
        g->packed = arena_take(a, FEW * RING_WORKERS + ring_set(wide, 2, FEW), sizeof *g->packed);
    g->now = arena_take(a, NOW_COUNTS + FEW * heads, sizeof *g->now);
    g->ids = arena_take(a, n, sizeof *g->ids);   // after now, see send_tokens
    g->parts = arena_take(a, parts, sizeof *g->parts);
    g->inputs = arena_take(a, n * c->n_layer * c->per_layer, sizeof *g->inputs);
    wide = larger(n * wide, choices * row_halves(c->inputs_weighed ? larger(ff, out) : ff));
    g->halves = arena_take(a, wide, sizeof *g->halves);
    g->powers = arena_take(a, wide / GEMM_K, sizeof *g->powers);   // rows have that at least
    g->gate = arena_take(a, choices * larger(ff, out), sizeof *g->gate);
    g->up = arena_take(a, choices * ff, sizeof *g->up);
    g->conv = arena_take(a, n * conv, sizeof *g->conv);
    g->place = arena_take(a, choices, sizeof *g->place);
    g->tiles = arena_take(a, 3 * expert_tiles(choices, c->n_expert, GEMM_MIN), sizeof *g->tiles);
}

// Shares a map as one buffer, or as several if Metal does not take one so long: each ends where a
// tensor begins that does not fit. Two may have a page in common: gpu_find takes the later one.
static bool share_map(Gpu *g, const Gguf *file, const Map *map) {
    size_t page = sysconf(_SC_PAGESIZE), most = g->longest / page * page;
    uint8_t *stop = map->base + map->size, *from = map->base, *next;
    for (; from < stop; from = next) {
        uint8_t *base = map->base + (from - map->base) / page * page;
        next = stop;
        for (size_t i = 0; (size_t)(stop - base) > most && i < file->n_tensors; i++) {
            const Tensor *t = &file->tensors[i];
            uint8_t *p = (uint8_t *)t->data, *end = p + (size_t)tensor_bytes(t);
            if (p >= from && p < next && end > base + most) next = p;
        }
        if (next == from || !gpu_share(g, (Map){base, next - base}, true)) return false;
    }
    return true;
}

// Shares whole files or, with a GPU that has copies, the stretches of tensors that it reads.
static bool share_weights(Session *s) {
    const Gguf *file = s->m->gguf;
    bool ok = true;
    Map part = {0};
    for (size_t i = 0; ok && !DEVICE_COPIES && i < file->n_maps; i++)
        ok = share_map(s->gpu, file, &file->maps[i]);
    for (size_t i = 0; ok && DEVICE_COPIES && i < file->n_tensors; i++) {
        const Tensor *t = &file->tensors[i];
        uint8_t *p = (uint8_t *)t->data, *end = part.base + part.size;
        if (!gpu_reads(s, t)) continue;
        bool next = p >= end && p < end + 4096;   // but for padding
        if (!next) ok = !part.base || gpu_share(s->gpu, part, true);
        if (!next) part.base = p;
        part.size = p - part.base + (size_t)tensor_bytes(t);
    }
    return ok && (!part.base || gpu_share(s->gpu, part, true));
}

// Shares all that kernels access: g->own, the files, weights that were changed, cache and scratch.
static bool share_all(Session *s) {
    Gpu *g = s->gpu;
    const Model *m = s->m;
    Map sent = {NULL, g->cpu_ffns ? g->sent.size : 0};   // no memory of the host is its own
    bool ok = place_plan(s, plan_gpu, &g->own, "scratch", &(Error){{0}}) &&
              gpu_share(g, g->own, false) && share_weights(s);
    if (ok && sent.size) ok = gpu_share(g, sent, false);
    if (ok && sent.size) g->sent = g->shared[g->n_shared - 1];
    for (size_t i = 0; ok && i < m->n_owned; i++) ok = gpu_share(g, m->owned[i], true);
    ok = ok && gpu_share(g, s->kv, false) && gpu_share(g, s->scratch, false);
    return ok || gpu_fail(g, "it cannot take this much memory", NULL);
}

// Finds the variants that passes of these lengths need, by encoding them dry: nothing runs. At the
// end one token runs, whose row no query ever sees: all variants are compiled together, and weights
// get into memory. The lengths: a whole chunk; 1,024, 512 and 256, where gemm may take smaller
// tiles; those with tiles of 128 (NVIDIA), 64, 32 and 16 tokens; those that TOKENS may be; the
// first token of a text; a token with a full KV ring, taken in slices.
static void warm_up(Session *s) {
    int n[] = {s->o.chunk, 1024, 512, 256, 65, 64, 32, FEW + 1, FEW, 4, 2, 1, 1, 1};
    int last = COUNT(n) - 1, full = s->o.window + s->o.chunk + s->o.keep;
    for (int i = 0; s->gpu && i <= last; i++) {
        int rows = n[i] < s->o.chunk ? n[i] : s->o.chunk;
        s->gpu->dry = i < last;
        device_begin(s->gpu);
        send_tokens(s, NULL, rows, i == last - 1 ? full : 0, 0, s->n_cache);
        run_layers(s, 0, s->m->config.n_layer, rows);
        run_output(s, 0, rows < LOGIT_ROWS ? rows : LOGIT_ROWS);
        for (int l = s->m->config.n_layer; l < s->n_cache; l++) run_nextn(s, l, rows);
        gpu_finish(s, 0);
    }
    memset(s->recurrent, 0, s->n_recurrent * sizeof *s->recurrent);
    gpu_store(s, true);
}

static UNUSED double gpu_bytes(const Session *s) {   // of what the GPU sees, or has a copy of
    double bytes = 0;
    for (int i = 0; i < s->gpu->n_shared; i++) bytes += s->gpu->shared[i].size;
    return bytes;
}

// Bytes a second that copies inside the GPU's memory read and write; 0: there is no GPU, or no
// room. The first call shares p [n], whole pages, or the part of it that there is room for.
static UNUSED double gpu_rate(Session *s, void *p, size_t n) {
    enum { COPIES = 8 };
    Gpu *g = s->gpu;
    if (!g) return 0;
    while (device_room(g) < n) n /= 2;
    if (g->shared[g->n_shared - 1].base == p) n = g->shared[g->n_shared - 1].size;
    else if (!gpu_share(g, (Map){p, n}, false)) {
        g->why[0] = 0;   // the model stays on the GPU
        return 0;
    }
    device_begin(g);
    double start = now();
    for (int i = 0; !g->why[0] && i < COPIES; i++) device_copy(g, (char *)p + n / 2, p, n / 2);
    if (device_wait(g)) return COPIES * (double)n / (now() - start);
    gpu_close(s);
    return 0;
}

static UNUSED int gpu_layers(const Session *s) {   // that the GPU runs
    return s->gpu ? s->m->config.n_layer - s->gpu->cpu_ffns : 0;
}

// Bytes of memory that the GPU needs if the CPU has the first FFNs, with chunks of n tokens; and
// some to spare, for compiled kernels, graphs and what other programs take.
static double gpu_need(Session *s, int cpu_ffns, int n) {
    void (*const plans[])(Session *, Arena *) = {plan_caches, plan_scratch, plan_gpu};
    const Model *m = s->m;
    double need = SPARE_BYTES;
    s->gpu->cpu_ffns = cpu_ffns;
    s->o.chunk = n;
    for (size_t i = 0; i < COUNT(plans); i++) {
        Arena a = {0};
        plans[i](s, &a);
        need += a.peak;
    }
    if (cpu_ffns) need += s->gpu->sent.size;
    for (size_t i = 0; i < m->n_owned; i++) need += m->owned[i].size;
    for (size_t i = 0; i < m->gguf->n_tensors; i++)
        if (gpu_reads(s, &m->gguf->tensors[i])) need += tensor_bytes(&m->gguf->tensors[i]);
    return need;
}

static size_t ffn_bytes(const Model *m, int l) {   // where the FFN of the file's layer l is sent
    size_t bytes = 0;
    for (size_t i = 0; i < m->gguf->n_tensors; i++)
        if (ffn_of(&m->gguf->tensors[i]) == l) bytes += sent_bytes(&m->gguf->tensors[i]);
    return bytes;
}

// The default is GPU_CHUNK, halved until all fits into the GPU's memory, but not below 512: the
// larger, the fewer times weights are read and launches begin. If even that does not fit, as many
// of the last layers' FFNs run on the GPU as do.
static int gpu_attach(Session *s) {
    const char *lacks = gpu_lacks(s->m, 0, s->m->config.n_layer);
    Gpu *g = s->gpu = calloc(1, sizeof *g);
    if (!g) return 0;
    *g = (Gpu){.pool = s->pool, .many = LONG_LAUNCH, .own_cols = OWN_COLS,
               .sent_tokens = SENT_TOKENS};
    bool ok = device_open(g);
    if (ok && lacks) ok = gpu_fail(g, "the GPU path does not know this model's", lacks);
    int chunk = GPU_CHUNK, own = s->o.chunk, all = s->m->config.n_layer, most = s->o.gpu_layers;
    int k = most && most < all ? all - most : 0;
    int end = s->m->config.routed_first ? 0 : all;
    for (int l = 0; l < all; l++)
        if (s->m->layers[l].side_by_side) end = 0;
    if (ok && k > end) ok = gpu_fail(g, "a part of this model's layers cannot run on the CPU",
                                     "their FFNs read what attention reads");
    if (!ok) return gpu_close(s), 0;
    if (gpu_lacks(s->m, all, s->n_cache)) s->n_cache = all;
    for (int l = 0; l < file_layers(s->m) && DEVICE_COPIES; l++)
        g->sent.size = larger(g->sent.size, ffn_bytes(s->m, l));
    double room = device_room(g), need;
    while (chunk > 512 && gpu_need(s, k, chunk) >= room) chunk /= 2;
    while ((need = gpu_need(s, k, own ? own : chunk)) >= room && k < end) k++;
    s->o.chunk = own;
    if (need < room) return chunk;
    char text[100];
    snprintf(text, sizeof text, "%.0f MB are free, and %.0f would be needed%s", room / 1048576,
             need / 1048576, end ? ", with all FFNs on the CPU" : "");
    gpu_fail(g, "the GPU has too little memory", text);
    return gpu_close(s), 0;
}

static void gpu_open(Session *s) {
    if (!share_all(s)) return gpu_close(s);
    device_send(s->gpu, s->slopes, s->m->config.n_head * sizeof *s->slopes);
    device_keep(s->gpu);
    device_often(s->gpu, s->best, (char *)s->candidates - (char *)s->best);   // and the logits
    if (s->gpu->cpu_ffns) device_often(s->gpu, s->x, s->o.chunk * s->m->config.dim * sizeof *s->x);
    if (!s->gpu->room) s->o.draft = smaller(s->o.draft, STAGED_TOKENS - 1);   // of one launch
    bool each = !s->gpu->room && s->m->config.n_expert;   // gemv reads each token's experts
    if (each || s->o.gpu_block) s->o.draft = 0;   // guesses would cost as much as tokens
    if (!s->o.draft) s->n_cache = s->m->config.n_layer;
    warm_up(s);
}
