// SPDX-License-Identifier: MIT
// llm.c: a GGUF language model engine in one file.
//
//   ./llm model.gguf "Once upon a time"          cc -O3 -march=native llm.c -lm -lpthread
//
// Read it top to bottom; a token's way through it is file -> weights -> logits -> text:
//
//    1. base         errors, strings, the arena
//    2. GGUF         the file format: metadata and tensors, all checked before they are believed
//    3. model        the table of architectures, hyperparameters, weights
//    4. matmul       threads, int8 activations, matrix x vector and matrix x matrix
//    5. attention    online softmax over the f16 ring
//    6. ops          norms, RoPE, activations, experts, the gated delta rule
//    7. forward      one function for prefill and decode
//    8. session      the KV ring, prefix reuse, the memory plan
//    9. tokenizer    SentencePiece, byte-level BPE, WordPiece
//   10. sampler      penalty, temperature, top-k, top-p, min-p
//   11. generate     the loop around all of it
//   12. main         the command line
//
// Short names: n tokens in this call, pos their first position, l layer, h head, dim = width of
// the residual stream, hd = width of a head, ff = width of the feed-forward layer, W = window.
//
// As a library: #define LLM_NO_MAIN, #include "llm.c". What a program calls is
//
//   bool model_open(Model *, path, Error *)      maps the file; the Model owns maps and tokenizer,
//   void model_close(Model *)                    is read-only afterwards: sessions may share it
//   bool session_open(Session *, const Model *, Options, Error *)
//   void session_close(Session *)                a Session owns its threads, KV cache and scratch
//   const float *session_eval(Session *, ids, n, Error *)    logits after ids[n-1]; NULL: error.
//                                                ids is the whole history: what the cache holds
//                                                of it is reused. Valid until the next call
//   int32_t session_sample(Session *, logits)    draws the next id as Options.sampling says
//   bool session_generate(Session *, ids, n, n_predict, on_token, ctx, Error *)
//
// close accepts zeroed and half-opened structs. Nothing here exits, prints or keeps global state.
#define _GNU_SOURCE   // Linux: sched_getaffinity
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#else
#include <sched.h>
#endif
#include "quant.h"

// ---- 1. base ----

typedef struct { char text[512]; } Error;

// fills e with one line: what was expected, what was found; returns false
__attribute__((format(printf, 2, 3))) static bool fail(Error *e, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
    for (char *c = e->text; *c; c++)   // names come from the file: keep it one printable line
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
    return false;
}

typedef struct { const char *s; size_t n; } Str;   // bytes in the mapped file, no NUL at the end

#define STR_ARG(a) (int)((a).n < 100 ? (a).n : 100), (a).s   // for "%.*s"

static bool str_eq(Str a, const char *b) {
    return a.n == strlen(b) && memcmp(a.s, b, a.n) == 0;
}

static int str_compare(Str a, Str b) {
    int c = memcmp(a.s, b.s, a.n < b.n ? a.n : b.n);
    return c ? c : (a.n > b.n) - (a.n < b.n);
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Hands out pieces of one block, 64-byte aligned. With base NULL it only counts: the plan of a
// session runs once to learn the size and once to place the buffers. Setting `used` back to an
// earlier value lets buffers that never live together share bytes; `peak` remembers the most.
typedef struct { char *base; size_t used, peak; } Arena;

static void *arena_take(Arena *a, size_t count, size_t size) {
    size_t at = a->used;
    a->used += (count * size + 63) / 64 * 64;
    if (a->used > a->peak) a->peak = a->used;
    return a->base ? a->base + at : NULL;
}

// ---- 2. GGUF ----
//
// magic "GGUF" | version | n_tensors | n_meta | metadata: key, type, value | tensors: name, n_dims,
// ne[], type, offset | padding | data. Little endian; a string is a 64-bit length and bytes. The
// file is not trusted: a cursor that fails once and stays failed reads it, each count is bounded
// by the bytes that could hold it, and each tensor must lie inside the file. Nothing is copied:
// strings, arrays and weights are pointers into the map.

enum { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STR,
       GGUF_ARR, GGUF_U64, GGUF_I64, GGUF_F64, GGUF_TYPES };

static const uint8_t gguf_size[GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

typedef struct { Str key; uint32_t type, elem; uint64_t n; const uint8_t *v; } Meta;
typedef struct { Str name; int type, n_dims; int64_t ne[4]; const uint8_t *data; } Tensor;
typedef struct { uint8_t *base; size_t size; } Map;

typedef struct {
    Meta *meta;        // [n_meta] sorted by key, of the first file
    Tensor *tensors;   // [n_tensors] sorted by name, of all files
    Map *maps;         // [n_maps] one per split file
    size_t n_meta, n_tensors, n_maps;
} Gguf;

typedef struct { const uint8_t *p, *end; bool bad; } Cursor;

static uint64_t read_bytes(Cursor *c, size_t n) {   // n = 1, 2, 4, 8
    uint64_t x = 0;
    if (c->bad || (size_t)(c->end - c->p) < n) {
        c->bad = true;
        return 0;
    }
    memcpy(&x, c->p, n);
    c->p += n;
    return x;
}

static void skip_bytes(Cursor *c, uint64_t n) {
    if (c->bad || (uint64_t)(c->end - c->p) < n) c->bad = true;
    else c->p += n;
}

static Str read_str(Cursor *c) {
    uint64_t n = read_bytes(c, 8);
    Str s = {(const char *)c->p, n};
    skip_bytes(c, n);
    return c->bad ? (Str){"", 0} : s;
}

// strings of an array that was checked when the file was opened
static Str str_next(const uint8_t **p) {
    uint64_t n;
    memcpy(&n, *p, 8);
    Str s = {(const char *)*p + 8, n};
    *p += 8 + n;
    return s;
}

static bool read_meta(Cursor *c, Meta *m, Error *e) {
    m->key = read_str(c);
    m->type = m->elem = read_bytes(c, 4);
    m->n = 1;
    if (c->bad) return fail(e, "the file ends inside the metadata keys");
    if (m->type >= GGUF_TYPES)
        return fail(e, "key %.*s: unknown value type %u", STR_ARG(m->key), m->type);
    if (m->type == GGUF_ARR) {
        m->elem = read_bytes(c, 4);
        m->n = read_bytes(c, 8);
        if (m->elem == GGUF_ARR)
            return fail(e, "key %.*s: arrays of arrays are not supported", STR_ARG(m->key));
        if (m->elem >= GGUF_TYPES)
            return fail(e, "key %.*s: unknown element type %u", STR_ARG(m->key), m->elem);
    }
    m->v = c->p;
    size_t least = m->elem == GGUF_STR ? 8 : gguf_size[m->elem];
    if (m->n > (uint64_t)(c->end - c->p) / least)
        return fail(e, "key %.*s: %llu values do not fit into the file", STR_ARG(m->key),
                    (unsigned long long)m->n);
    if (m->elem != GGUF_STR) skip_bytes(c, m->n * least);
    for (uint64_t i = 0; m->elem == GGUF_STR && i < m->n && !c->bad; i++) read_str(c);
    if (c->bad)
        return fail(e, "key %.*s: a value runs past the end of the file", STR_ARG(m->key));
    return true;
}

// the tensor's offset is left in data; it becomes a pointer when the start of the data is known
static bool read_tensor(Cursor *c, Tensor *t, Error *e) {
    t->name = read_str(c);
    uint32_t n_dims = read_bytes(c, 4);
    if (c->bad) return fail(e, "the file ends inside the list of tensors");
    if (n_dims < 1 || n_dims > 4)
        return fail(e, "tensor %.*s: 1 to 4 dimensions expected, found %u", STR_ARG(t->name),
                    n_dims);
    t->n_dims = n_dims;
    for (uint32_t i = 0; i < 4; i++) t->ne[i] = i < n_dims ? (int64_t)read_bytes(c, 8) : 1;
    t->type = read_bytes(c, 4);
    t->data = (const uint8_t *)(uintptr_t)read_bytes(c, 8);
    if (c->bad) return fail(e, "tensor %.*s: its entry is cut off", STR_ARG(t->name));
    for (uint32_t i = 0; i < n_dims; i++)
        if (t->ne[i] < 1 || t->ne[i] > INT32_MAX)
            return fail(e, "tensor %.*s: dimension %u is %lld", STR_ARG(t->name), i,
                        (long long)t->ne[i]);
    if (!quant_name(t->type))
        return fail(e, "tensor %.*s: unknown tensor type %d", STR_ARG(t->name), t->type);
    if (!quant_row_bytes(t->type, t->ne[0]))
        return fail(e, "tensor %.*s: rows of %lld weights are not whole %s blocks",
                    STR_ARG(t->name), (long long)t->ne[0], quant_name(t->type));
    return true;
}

static bool tensor_place(Tensor *t, const Map *map, size_t data, size_t align, Error *e) {
    uint64_t offset = (uintptr_t)t->data, room = map->size - data;
    if (offset % align)
        return fail(e, "tensor %.*s: offset %llu is not a multiple of the alignment %zu",
                    STR_ARG(t->name), (unsigned long long)offset, align);
    if (offset > room)
        return fail(e, "tensor %.*s: offset %llu is past the end of the file", STR_ARG(t->name),
                    (unsigned long long)offset);
    uint64_t size = quant_row_bytes(t->type, t->ne[0]);
    for (int i = 1; i < 4; i++) {
        if ((uint64_t)t->ne[i] > (room - offset) / size)
            return fail(e, "tensor %.*s: larger than what is left of the file: is it truncated?",
                        STR_ARG(t->name));
        size *= t->ne[i];
    }
    t->data = map->base + data + offset;
    return true;
}

static int meta_compare(const void *a, const void *b) {
    return str_compare(((const Meta *)a)->key, ((const Meta *)b)->key);
}

static int tensor_compare(const void *a, const void *b) {
    return str_compare(((const Tensor *)a)->name, ((const Tensor *)b)->name);
}

static const Meta *gguf_find(const Gguf *g, const char *key) {
    Meta m = {.key = {key, strlen(key)}};
    return bsearch(&m, g->meta, g->n_meta, sizeof m, meta_compare);
}

static const Tensor *gguf_tensor(const Gguf *g, const char *name) {
    Tensor t = {.name = {name, strlen(name)}};
    return bsearch(&t, g->tensors, g->n_tensors, sizeof t, tensor_compare);
}

static double meta_float(const Meta *m, uint64_t i) {
    const uint8_t *p = m->v + i * gguf_size[m->elem];
    float f;
    double d;
    if (m->elem == GGUF_F32) return memcpy(&f, p, 4), f;
    if (m->elem == GGUF_F64) return memcpy(&d, p, 8), d;
    uint64_t u = 0;
    memcpy(&u, p, gguf_size[m->elem]);
    switch (m->elem) {
    case GGUF_I8:  return (int8_t)u;
    case GGUF_I16: return (int16_t)u;
    case GGUF_I32: return (int32_t)u;
    case GGUF_I64: return (int64_t)u;
    default:       return u;
    }
}

static int64_t meta_int(const Meta *m, uint64_t i) {   // clamped: counts are checked by their users
    double d = meta_float(m, i);
    return d != d ? 0 : d > 1e15 ? (int64_t)1e15 : d < -1e15 ? (int64_t)-1e15 : (int64_t)d;
}

static int64_t gguf_int(const Gguf *g, const char *key, int64_t otherwise) {
    const Meta *m = gguf_find(g, key);
    return m && m->type != GGUF_STR && m->type != GGUF_ARR ? meta_int(m, 0) : otherwise;
}

static Str gguf_str(const Gguf *g, const char *key) {
    const Meta *m = gguf_find(g, key);
    const uint8_t *p = m && m->type == GGUF_STR ? m->v : NULL;
    return p ? str_next(&p) : (Str){NULL, 0};
}

static bool map_file(const char *path, Map *map, Error *e) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_NONBLOCK);   // a pipe by that name must not block
    if (fd < 0) return fail(e, "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        close(fd);
        return fail(e, "%s: not a regular file", path);
    }
    map->size = st.st_size;
    void *p = map->size ? mmap(NULL, map->size, PROT_READ, MAP_SHARED, fd, 0) : NULL;
    close(fd);
    if (p == MAP_FAILED) return fail(e, "%s: mmap: %s", path, strerror(errno));
    map->base = p;
    if (map->size < 24)
        return fail(e, "%s: %zu bytes are too few for a GGUF file", path, map->size);
    return true;
}

static void gguf_close(Gguf *g) {
    for (size_t i = 0; i < g->n_maps; i++)
        if (g->maps[i].base) munmap(g->maps[i].base, g->maps[i].size);
    free(g->maps);
    free(g->meta);
    free(g->tensors);
    *g = (Gguf){0};
}

// the fixed part of the head; *n_tensors and *n_meta are bounded by the file's size
static bool read_head(Cursor *c, const Map *map, uint64_t *n_tensors, uint64_t *n_meta, Error *e) {
    uint32_t magic = read_bytes(c, 4), version = read_bytes(c, 4);
    if (magic != 0x46554747) return fail(e, "not a GGUF file: it starts with %08x", magic);
    if (version >= 0x01000000) return fail(e, "a big-endian GGUF file; little endian is expected");
    if (version != 2 && version != 3)
        return fail(e, "GGUF version %u; versions 2 and 3 are supported", version);
    *n_tensors = read_bytes(c, 8);
    *n_meta = read_bytes(c, 8);
    // a tensor's entry takes at least 32 bytes, a key with its value at least 13
    if (*n_tensors > map->size / 32)
        return fail(e, "%llu tensors do not fit into the file", (unsigned long long)*n_tensors);
    if (*n_meta > map->size / 13)
        return fail(e, "%llu metadata keys do not fit into the file", (unsigned long long)*n_meta);
    return true;
}

// part i of a model: the metadata of part 0 stays, the tensors of all parts are collected
static bool gguf_read(Gguf *g, const Map *map, int64_t i, Error *e) {
    Cursor c = {map->base, map->base + map->size, false};
    uint64_t n_tensors = 0, n_meta = 0;
    if (!read_head(&c, map, &n_tensors, &n_meta, e)) return false;

    Tensor *t = realloc(g->tensors, (g->n_tensors + n_tensors + 1) * sizeof *t);
    if (t) g->tensors = t;
    Meta *meta = calloc(n_meta + 1, sizeof *meta);
    if (i == 0) g->meta = meta, g->n_meta = n_meta;
    bool ok = t && meta ? true : fail(e, "out of memory");
    for (uint64_t k = 0; ok && k < n_meta; k++) ok = read_meta(&c, &meta[k], e);
    if (ok) qsort(meta, n_meta, sizeof *meta, meta_compare);
    for (uint64_t k = 1; ok && k < n_meta; k++)
        if (!meta_compare(&meta[k - 1], &meta[k]))
            ok = fail(e, "key %.*s appears twice", STR_ARG(meta[k].key));
    const Gguf part = {.meta = meta, .n_meta = ok ? n_meta : 0};
    int64_t align = gguf_int(&part, "general.alignment", 32), no = gguf_int(&part, "split.no", i);
    if (i > 0) free(meta);
    if (ok && (align < 8 || align > 1 << 20 || (align & (align - 1))))
        ok = fail(e, "general.alignment is %lld; a power of two from 8 on is expected",
                  (long long)align);
    if (ok && no != i) ok = fail(e, "this is part %d of a model; open part 1", (int)no + 1);

    t += g->n_tensors;
    for (uint64_t k = 0; ok && k < n_tensors; k++) ok = read_tensor(&c, &t[k], e);
    size_t data = (c.p - map->base + align - 1) / align * align;
    if (data > map->size) data = map->size;
    for (uint64_t k = 0; ok && k < n_tensors; k++) ok = tensor_place(&t[k], map, data, align, e);
    if (ok) g->n_tensors += n_tensors;
    return ok;
}

// opens path and, where it is the first of a split model, all its parts
static bool gguf_open(Gguf *g, const char *path, Error *e) {
    Error why;
    char part[4096];
    int64_t count = 1;
    *g = (Gguf){0};
    for (int64_t i = 0; i < count; i++) {
        Map *maps = realloc(g->maps, (g->n_maps + 1) * sizeof *maps);
        if (!maps) return fail(e, "out of memory");
        g->maps = maps;
        maps[g->n_maps++] = (Map){0};
        size_t stem = strlen(path);
        if (i > 0) {   // NAME-00001-of-00003.gguf
            snprintf(part, sizeof part, "-00001-of-%05d.gguf", (int)count);
            stem -= stem > strlen(part) ? strlen(part) : stem;
            if (strcmp(path + stem, part))
                return fail(e, "%s: a model in %d parts must be named *%s", path, (int)count, part);
        }
        snprintf(part, sizeof part, i ? "%.*s-%05d-of-%05d.gguf" : "%.*s", (int)stem, path,
                 (int)i + 1, (int)count);
        if (!map_file(part, &maps[i], e)) return false;
        if (!gguf_read(g, &maps[i], i, &why)) return fail(e, "%s: %s", part, why.text);
        if (i == 0) count = gguf_int(g, "split.count", 1);
        if (count < 1 || count > 99999) return fail(e, "%s: split.count is out of range", part);
    }
    qsort(g->tensors, g->n_tensors, sizeof *g->tensors, tensor_compare);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (!tensor_compare(&g->tensors[i - 1], &g->tensors[i]))
            return fail(e, "%s: tensor %.*s appears twice", path, STR_ARG(g->tensors[i].name));
    return true;
}

// ---- 3. model ----
//
// One row of ARCHS says how an architecture differs from a plain Llama; the tensors that a file
// has say the rest (biases, QK norms, post-norms, fused QKV or gate-up, experts, sinks, tied
// head). To add an architecture: read its row's values off its reference implementation, add the
// row, run `./llm model.gguf --info`; a tensor under a new name goes into load_layer. Then add
// one line to test.c. RoPE pairing is the usual mistake, and position 0 cannot show it.
//
// Every row was measured against llama.cpp 0.5.0 on random models (f32 weights, 160 tokens, its
// options and special cases): the logits are equal to an NMSE of 1e-6. `verified` says that the
// tests hold recorded logits of llama.cpp for it.

enum { RMS, LAYER, BARE };                    // norm: RMSNorm, LayerNorm, LayerNorm without weights
enum { SILU, GELU, RELU2, SWIGLU_OAI };       // GELU in its tanh form
enum { SOFTMAX = 1, SIGMOID, LATE_SOFTMAX };  // of the router; late: over the chosen alone
enum { NO_ROPE, NORM, NEOX };                 // rotates pairs (2i, 2i+1) or (i, i + n_rot/2)
enum {
    EMBD_SQRT = 1,         // embeddings are multiplied by sqrt(dim)
    WINDOW_4096 = 2,       // sliding window where the file does not say
    CAPPED = 4,            // soft caps of 50 and 30 where the file does not say
    LOCAL_10000 = 8,       // RoPE base of windowed layers where the file does not say
    LOCAL_UNSCALED = 16,   // windowed layers ignore RoPE scaling
    LOCAL_ROPE = 32,       // only windowed layers have RoPE
    ROPE_TUNED = 64,       // no RoPE where rope.scaling.finetuned is false
    QK_NORM_LATE = 128,    // QK norm after RoPE
    LOGIT_DIVIDE = 256,    // logit_scale divides
    MUP = 512,             // scales follow from width and depth where the file does not say
    SCALE_BY_DIM = 1024,   // attention scale is 1/sqrt(dim / n_head), not 1/sqrt(hd)
    ALIBI_8 = 2048,        // ALiBi with a largest bias of 8
    ENCODER = 4096,        // sees the whole text; norms stand after the residual
    DELTA_TILED = 8192,    // value head h reads key head h % n_key, not h / (n_value / n_key)
    GATES_NORMED = 16384,  // weights of the chosen experts are divided by their sum
    GATES_LATE = 32768,    // experts are chosen by raw logits, the softmax is over the chosen
    GEMMA2 = EMBD_SQRT | WINDOW_4096 | CAPPED,
    GEMMA3 = EMBD_SQRT | LOCAL_10000 | LOCAL_UNSCALED,
};

typedef struct {
    const char *name;
    uint8_t norm, act, rope;
    uint8_t local;        // windows: all layers but every local-th; 0: sliding_window is ignored
    uint8_t no_rope;      // every no_rope-th layer has no RoPE
    uint8_t n_layer;      // the row is for the size with so many layers; 0: any
    bool verified;        // the tests meet recorded logits of llama.cpp
    uint16_t flags;
} Arch;

static const Arch ARCHS[] = {
    // name            norm   act         rope    local no_rope n_layer verified flags
    {"llama",          RMS,   SILU,       NORM,    0, 0,  0, true,  GATES_NORMED},
    {"mistral3",       RMS,   SILU,       NORM,    0, 0,  0, true,  GATES_NORMED},
    {"qwen2",          RMS,   SILU,       NEOX,    0, 0,  0, true,  0},
    {"qwen3",          RMS,   SILU,       NEOX,    0, 0,  0, true,  0},
    {"gemma",          RMS,   GELU,       NEOX,    0, 0,  0, true,  EMBD_SQRT},
    {"gemma2",         RMS,   GELU,       NEOX,    2, 0, 46, true,  GEMMA2 | SCALE_BY_DIM},
    {"gemma2",         RMS,   GELU,       NEOX,    2, 0,  0, true,  GEMMA2},
    {"gemma3",         RMS,   GELU,       NEOX,    6, 0, 62, true,  GEMMA3 | SCALE_BY_DIM},
    {"gemma3",         RMS,   GELU,       NEOX,    6, 0,  0, true,  GEMMA3},
    {"phi3",           RMS,   SILU,       NEOX,    0, 0,  0, true,  0},

    {"qwen2moe",       RMS,   SILU,       NEOX,    0, 0,  0, false, 0},
    {"qwen3moe",       RMS,   SILU,       NEOX,    0, 0,  0, true,  GATES_NORMED},
    {"olmoe",          RMS,   SILU,       NEOX,    0, 0,  0, false, 0},
    {"granitemoe",     RMS,   SILU,       NORM,    0, 0,  0, false, LOGIT_DIVIDE | GATES_NORMED},
    {"deepseek",       RMS,   SILU,       NORM,    0, 0,  0, false, 0},
    {"gpt-oss",        RMS,   SWIGLU_OAI, NEOX,    2, 0,  0, true,  GATES_LATE},

    {"qwen35",         RMS,   SILU,       NEOX,    0, 0,  0, true,  DELTA_TILED},
    {"qwen35moe",      RMS,   SILU,       NEOX,    0, 0,  0, false, DELTA_TILED | GATES_NORMED},
    {"qwen3next",      RMS,   SILU,       NEOX,    0, 0,  0, false, GATES_NORMED},

    {"bert",           LAYER, GELU,       NO_ROPE, 0, 0,  0, true,  ENCODER},
    {"nomic-bert",     LAYER, SILU,       NEOX,    0, 0,  0, true,  ENCODER},

    {"olmo",           BARE,  SILU,       NORM,    0, 0,  0, false, 0},
    {"olmo2",          RMS,   SILU,       NEOX,    4, 0,  0, false, LOCAL_UNSCALED},
    {"smollm3",        RMS,   SILU,       NORM,    0, 4,  0, false, 0},
    {"granite",        RMS,   SILU,       NORM,    0, 0,  0, false, ROPE_TUNED | LOGIT_DIVIDE},
    {"minicpm",        RMS,   SILU,       NORM,    0, 0,  0, false, LOGIT_DIVIDE | MUP},
    {"stablelm",       LAYER, SILU,       NEOX,    0, 0,  0, false, 0},
    {"starcoder",      LAYER, GELU,       NO_ROPE, 0, 0,  0, false, 0},
    {"starcoder2",     LAYER, GELU,       NEOX,    0, 0,  0, false, 0},
    {"command-r",      LAYER, SILU,       NORM,    0, 0,  0, false, 0},
    {"cohere2",        LAYER, SILU,       NORM,    4, 0,  0, false, WINDOW_4096 | LOCAL_ROPE},
    {"chatglm",        RMS,   SILU,       NORM,    0, 0,  0, false, 0},
    {"glm4",           RMS,   SILU,       NORM,    0, 0,  0, false, 0},
    {"exaone",         RMS,   SILU,       NEOX,    0, 0,  0, false, 0},
    {"exaone4",        RMS,   SILU,       NEOX,    4, 0, 64, false, WINDOW_4096 | LOCAL_ROPE},
    {"exaone4",        RMS,   SILU,       NEOX,    0, 0,  0, false, 0},
    {"internlm2",      RMS,   SILU,       NORM,    0, 0,  0, false, 0},
    {"baichuan",       RMS,   SILU,       NORM,    0, 0, 32, false, 0},
    {"baichuan",       RMS,   SILU,       NO_ROPE, 0, 0, 40, false, ALIBI_8},
    {"baichuan",       RMS,   SILU,       NO_ROPE, 0, 0,  0, false, 0},
    {"xverse",         RMS,   SILU,       NORM,    0, 0,  0, false, 0},
    {"orion",          LAYER, SILU,       NEOX,    0, 0,  0, false, 0},
    {"nemotron",       LAYER, RELU2,      NEOX,    0, 0,  0, false, 0},
    {"arcee",          RMS,   RELU2,      NORM,    0, 0,  0, false, 0},
    {"phi2",           LAYER, GELU,       NEOX,    0, 0,  0, false, 0},
    {"gpt2",           LAYER, GELU,       NO_ROPE, 0, 0,  0, false, 0},
    {"gptneox",        LAYER, GELU,       NEOX,    0, 0,  0, false, 0},
    {"falcon",         LAYER, GELU,       NEOX,    0, 0,  0, false, 0},
    {"bloom",          LAYER, GELU,       NO_ROPE, 0, 0,  0, false, ALIBI_8},
    {"hunyuan-dense",  RMS,   SILU,       NEOX,    0, 0,  0, false, QK_NORM_LATE},
    {"ernie4_5",       RMS,   SILU,       NORM,    0, 0,  0, false, 0},
    {"seed_oss",       RMS,   SILU,       NEOX,    0, 0,  0, false, 0},
};

typedef struct {
    const Arch *arch;
    int n_layer, n_skip, n_ctx, n_vocab, dim, hd, vd;   // skip: layers that predict further tokens
    float eps, embd_scale, residual_scale, attn_scale, logit_scale;
    float attn_cap, logit_cap, clamp_qkv, alibi;        // 0: none
    float temp_scale;                                   // queries far out are scaled (Ministral 3)
    int window;                                         // of layers that have one
    int rope, n_rot;                                    // pairing, and how many of hd are rotated
    int mrope;                                          // of GLM-4V: to text it is NEOX
    float rope_base, rope_base_local, rope_factor, rope_alpha, rope_attn;
    float yarn_fast, yarn_slow, yarn_log;
    bool yarn;
    int n_ctx_orig;                                     // context length before RoPE scaling
    int n_expert, n_used, gating, gates_normed;         // gating: SOFTMAX ...
    float expert_scale;
    int parallel;                                       // attention and FFN read the same stream
    int conv, n_key, n_value, dk, dv;                   // delta-net: convolution, heads, widths
    int causal, pooling;                                // -1 not said, 0 none, 1 mean, 2 CLS,
                                                        // 3 last
} Config;

// A view of a weight matrix in the file: a tensor, or the rows of one that hold q, an expert, ...
typedef struct {
    const uint8_t *data;                       // [rows] rows of cols weights; NULL: absent
    int type;
    int64_t rows, cols;
    const float *bias;                         // [rows] or NULL
    const float *scale;                        // one factor for the whole product, or NULL
    size_t step;                               // bytes from one expert's matrix to the next
} Matrix;

// weights and biases [n], or NULL; each group of values is normalised by itself, 0: all
typedef struct { const float *w, *b; int n, group; } Norm;

typedef struct {
    int n_head, n_kv, ff;
    int window;                                // 0: the session's
    bool rope, parallel;                       // parallel: attention and FFN read the same stream
    Norm attn_norm, attn_post_norm, ffn_norm, ffn_post_norm;
    Norm q_norm, k_norm;                       // per head (n = hd), per projection, or [head][hd]
    Matrix q, k, v, o;                         // q has 2 x hd rows a head where attention is gated
    const float *sinks;                        // [n_head]
    Matrix gate, up, down;                     // dense FFN, or all experts' with step
    Matrix router, shared_gate, shared_up, shared_down, shared_router;
    Matrix conv_in, z, alpha, beta, beta_alpha, delta_out;   // delta-net; conv_in: q, k, v
    const float *conv, *dt_bias, *a;           // [channels][conv], [n_value], [n_value]
    Norm delta_norm;
} Layer;

struct Tokenizer;

typedef struct {
    Gguf gguf;
    Config config;
    Layer *layers;                             // [n_layer]
    Matrix embd, head;                         // [n_vocab][dim]
    Matrix pos_embd, type_embd;                // learned positions [n_ctx][dim], token type 0
    Norm embd_norm, out_norm;
    const float *freqs, *freqs_long, *freqs_short;   // [n_rot/2] RoPE frequency divisors
    void **owned;                              // [n_owned] vectors converted to f32, rows in order
    size_t n_owned;
    struct Tokenizer *tokenizer;
} Model;

// ---- 4. loading ----
//
// Binds each weight to its bytes in the file and checks all that forward relies on, so that forward
// cannot fail.

// metadata under the architecture's prefix; element l where the value is an array
static const Meta *arch_meta(const Model *m, const char *key) {
    char name[128];
    snprintf(name, sizeof name, "%s.%s", m->config.arch->name, key);
    return gguf_find(&m->gguf, name);
}

static double arch_float(const Model *m, const char *key, double otherwise) {
    const Meta *v = arch_meta(m, key);
    return v && v->type != GGUF_STR && v->type != GGUF_ARR ? meta_float(v, 0) : otherwise;
}

static int64_t arch_int(const Model *m, const char *key, int l, int64_t otherwise) {
    const Meta *v = arch_meta(m, key);
    if (!v || v->elem == GGUF_STR || (v->type == GGUF_ARR && (uint64_t)l >= v->n)) return otherwise;
    return meta_int(v, v->type == GGUF_ARR ? l : 0);
}

// Loading is sticky: after the first error nothing more is done, and that error is told.
typedef struct { Model *m; Error *e; bool ok; int l; } Loader;

static int need_int(Loader *ld, const char *key, int64_t otherwise, int64_t low, int64_t high) {
    int64_t x = arch_int(ld->m, key, ld->l < 0 ? 0 : ld->l, otherwise);
    if (ld->ok && (x < low || x > high))
        ld->ok = fail(ld->e, x == INT64_MIN ? "key %s.%s is missing or not a number"
                      : "key %s.%s is %lld, expected %lld to %lld", ld->m->config.arch->name, key,
                      (long long)x, (long long)low, (long long)high);
    return ld->ok ? x : (int)low;
}

static const Tensor *find_tensor(Loader *ld, const char *name, const char *suffix) {
    char full[128];
    if (ld->l < 0) snprintf(full, sizeof full, "%s%s", name, suffix);
    else snprintf(full, sizeof full, "blk.%d.%s%s", ld->l, name, suffix);
    return ld->ok ? gguf_tensor(&ld->m->gguf, full) : NULL;
}

static void missing(Loader *ld, const char *name) {
    if (!ld->ok) return;
    if (ld->l < 0) ld->ok = fail(ld->e, "tensor %s is missing", name);
    else ld->ok = fail(ld->e, "tensor blk.%d.%s is missing", ld->l, name);
}

static void *own(Loader *ld, size_t size) {   // memory that lives as long as the model
    Model *m = ld->m;
    void **owned = realloc(m->owned, (m->n_owned + 1) * sizeof *owned), *v = NULL;
    if (owned) m->owned = owned;
    if (owned && (v = malloc(size))) m->owned[m->n_owned++] = v;
    else ld->ok = fail(ld->e, "out of memory");
    return v;
}

// n floats; 0: however many there are
static const float *load_vector(Loader *ld, const char *name, const char *suffix, int64_t n) {
    const Tensor *t = find_tensor(ld, name, suffix);
    if (!t) return NULL;
    int64_t have = t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
    if (n && have != n) {
        ld->ok = fail(ld->e, "tensor %.*s: want %lld values, file has %lld", STR_ARG(t->name),
                      (long long)n, (long long)have);
        return NULL;
    }
    if (t->type == 0) return (const float *)t->data;
    float *v = own(ld, have * sizeof *v);
    if (v) quant_dequantize(t->type, t->data, v, have);
    return v;
}

static Norm load_norm(Loader *ld, const char *name, int64_t n) {
    const float *w = load_vector(ld, name, ".weight", n);
    return (Norm){w, load_vector(ld, name, ".bias", n), n, 0};
}

// of q or k: one for all heads [hd], for the whole projection [heads * hd], or [heads][hd]
static Norm load_head_norm(Loader *ld, const char *name, int heads, int hd) {
    const Tensor *t = find_tensor(ld, name, ".weight");
    bool shared = t && t->ne[0] == hd && t->ne[1] == 1;
    Norm w = load_norm(ld, name, shared ? hd : (int64_t)heads * hd);
    w.group = t && t->ne[0] == hd ? hd : 0;
    return w;
}

// a [rows][cols] matrix, or n_expert of them; rows 0: however many the file has
static Matrix load_matrix(Loader *ld, const char *name, int64_t cols, int64_t rows, int n_expert) {
    const Tensor *t = find_tensor(ld, name, ".weight");
    if (!t) return (Matrix){0};
    if (!rows) rows = t->ne[1];
    if (t->ne[0] != cols || t->ne[1] != rows || t->ne[2] != n_expert || t->ne[3] != 1) {
        ld->ok = fail(ld->e, "tensor %.*s: want [%lld,%lld,%d], file has [%lld,%lld,%lld]",
                      STR_ARG(t->name), (long long)cols, (long long)rows, n_expert,
                      (long long)t->ne[0], (long long)t->ne[1], (long long)t->ne[2]);
        return (Matrix){0};
    }
    if (find_tensor(ld, name, ".input_scale"))
        ld->ok = fail(ld->e, "tensor %.*s: input scales are not supported", STR_ARG(t->name));
    return (Matrix){t->data, t->type, rows, cols, load_vector(ld, name, ".bias", rows * n_expert),
                    load_vector(ld, name, ".scale", n_expert),
                    rows * quant_row_bytes(t->type, cols)};
}

static Matrix need_matrix(Loader *ld, const char *name, int64_t cols, int64_t rows, int n_expert) {
    Matrix w = load_matrix(ld, name, cols, rows, n_expert);
    if (!w.data) missing(ld, name);
    return w;
}

// rows first .. first+rows-1 of w, of each expert
static Matrix matrix_rows(Matrix w, int64_t first, int64_t rows) {
    if (w.data) w.data += first * quant_row_bytes(w.type, w.cols);
    if (w.bias) w.bias += first;
    w.rows = rows;
    return w;
}

static Matrix matrix_expert(const Matrix *w, int i) {
    Matrix one = *w;
    one.data += i * w->step;
    if (w->bias) one.bias += i * w->rows;
    if (w->scale) one.scale += i;
    return one;
}

static void load_attention(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    int64_t q = (int64_t)w->n_head * c->hd, k = (int64_t)w->n_kv * c->hd, v = w->n_kv * c->vd;
    Matrix qkv = load_matrix(ld, "attn_qkv", c->dim, 0, 1);
    if (qkv.data) {
        w->q = matrix_rows(qkv, 0, qkv.rows - k - v);
        w->k = matrix_rows(qkv, qkv.rows - k - v, k);
        w->v = matrix_rows(qkv, qkv.rows - v, v);
    } else {
        w->q = need_matrix(ld, "attn_q", c->dim, 0, 1);
        w->k = need_matrix(ld, "attn_k", c->dim, k, 1);
        w->v = need_matrix(ld, "attn_v", c->dim, v, 1);
    }
    if (ld->ok && w->q.rows != q && w->q.rows != 2 * q)
        ld->ok = fail(ld->e, "layer %d: want %lld or %lld rows of attn_q, file has %lld", ld->l,
                      (long long)q, (long long)(2 * q), (long long)w->q.rows);
    w->o = need_matrix(ld, "attn_output", (int64_t)w->n_head * c->vd, c->dim, 1);
    w->sinks = load_vector(ld, "attn_sinks", ".weight", w->n_head);
    w->q_norm = load_head_norm(ld, "attn_q_norm", w->n_head, c->hd);
    w->k_norm = load_head_norm(ld, "attn_k_norm", w->n_kv, c->hd);
}

// rows q, k, v, z of the first key head, of the second, ...: a copy with all q, all k, all v, all z
static Matrix heads_apart(Loader *ld, Matrix w, int heads, int64_t qk, int64_t vz) {
    size_t row = quant_row_bytes(w.type, w.cols), size[] = {qk * row, qk * row, vz * row, vz * row};
    uint8_t *to = own(ld, w.rows * row);
    const uint8_t *from = w.data;
    w.data = to;
    for (int p = 0; to && p < 4; from += size[p++])
        for (int h = 0; h < heads; h++, to += size[p])
            memcpy(to, from + h * (2 * size[0] + 2 * size[2]), size[p]);
    return w;
}

static void load_delta(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    int64_t keys = (int64_t)c->n_key * c->dk, values = (int64_t)c->n_value * c->dv;
    if (ld->ok && (c->n_key < 1 || c->n_value % c->n_key || c->dv < 1 || c->dk < 1 || c->conv < 1))
        ld->ok = fail(ld->e, "layer %d: %d value heads cannot share %d key heads (widths %d, %d)",
                      ld->l, c->n_value, c->n_key, c->dv, c->dk);
    Matrix all = load_matrix(ld, "ssm_in", c->dim, 2 * (keys + values), 1);
    if (all.data) {   // of early files
        all = heads_apart(ld, all, c->n_key, c->dk, values / c->n_key);
        w->conv_in = matrix_rows(all, 0, 2 * keys + values);
        w->z = matrix_rows(all, 2 * keys + values, values);
    } else {
        w->conv_in = need_matrix(ld, "attn_qkv", c->dim, 2 * keys + values, 1);
        w->z = need_matrix(ld, "attn_gate", c->dim, values, 1);
    }
    w->beta_alpha = load_matrix(ld, "ssm_ba", c->dim, 2 * c->n_value, 1);
    if (!w->beta_alpha.data) {
        w->alpha = need_matrix(ld, "ssm_alpha", c->dim, c->n_value, 1);
        w->beta = need_matrix(ld, "ssm_beta", c->dim, c->n_value, 1);
    }
    w->delta_out = need_matrix(ld, "ssm_out", values, c->dim, 1);
    w->conv = load_vector(ld, "ssm_conv1d", ".weight", (2 * keys + values) * c->conv);
    w->dt_bias = load_vector(ld, "ssm_dt", ".bias", c->n_value);
    w->a = load_vector(ld, "ssm_a", "", c->n_value);
    w->delta_norm = load_norm(ld, "ssm_norm", c->dv);
    w->delta_norm.group = c->dv;
    if (!w->dt_bias) missing(ld, "ssm_dt");
    if (!w->a) missing(ld, "ssm_a");
    if (!w->delta_norm.w) missing(ld, "ssm_norm");
}

static void load_ffn(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    int n = c->n_expert;
    w->router = load_matrix(ld, "ffn_gate_inp", c->dim, n, 1);
    if (!w->router.data) {
        w->gate = load_matrix(ld, "ffn_gate", c->dim, w->ff, 1);
        w->up = need_matrix(ld, "ffn_up", c->dim, 0, 1);
        w->down = need_matrix(ld, "ffn_down", w->ff, c->dim, 1);
        int64_t rows = w->up.rows;
        if (!w->gate.data && rows == 2 * w->ff) {   // gate and up in one tensor
            w->gate = matrix_rows(w->up, 0, w->ff);
            w->up = matrix_rows(w->up, w->ff, w->ff);
        } else if (ld->ok && rows != w->ff) {
            ld->ok = fail(ld->e, "tensor blk.%d.ffn_up.weight: want %d rows, file has %lld", ld->l,
                          w->ff, (long long)rows);
        }
        return;
    }
    Matrix both = load_matrix(ld, "ffn_gate_up_exps", c->dim, 0, n);
    w->gate = both.data ? matrix_rows(both, 0, both.rows / 2)
                        : need_matrix(ld, "ffn_gate_exps", c->dim, 0, n);
    w->ff = w->gate.rows;
    w->up = both.data ? matrix_rows(both, w->ff, w->ff)
                      : need_matrix(ld, "ffn_up_exps", c->dim, w->ff, n);
    w->down = need_matrix(ld, "ffn_down_exps", w->ff, c->dim, n);
    w->shared_up = load_matrix(ld, "ffn_up_shexp", c->dim, 0, 1);
    if (w->shared_up.data) {
        w->shared_gate = need_matrix(ld, "ffn_gate_shexp", c->dim, w->shared_up.rows, 1);
        w->shared_down = need_matrix(ld, "ffn_down_shexp", w->shared_up.rows, c->dim, 1);
        w->shared_router = load_matrix(ld, "ffn_gate_inp_shexp", c->dim, 1, 1);
    }
}

static void load_layer(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    w->n_head = need_int(ld, "attention.head_count", INT64_MIN, 1, 1 << 14);
    w->n_kv = need_int(ld, "attention.head_count_kv", w->n_head, 1, w->n_head);
    w->ff = need_int(ld, "feed_forward_length", c->n_expert ? 1 : INT64_MIN, 1, 1 << 20);
    if (ld->ok && w->n_head % w->n_kv)
        ld->ok =
            fail(ld->e, "layer %d: %d heads cannot share %d KV heads", ld->l, w->n_head, w->n_kv);
    w->attn_norm = load_norm(ld, "attn_norm", c->dim);
    w->attn_post_norm = load_norm(ld, "post_attention_norm", c->dim);
    w->ffn_norm = load_norm(ld, "ffn_norm", c->dim);
    w->ffn_post_norm = load_norm(ld, "post_ffw_norm", c->dim);
    if (!w->ffn_norm.w && !w->ffn_post_norm.w) {   // then it is the norm before the FFN
        w->ffn_norm = w->attn_post_norm;
        w->attn_post_norm = (Norm){0};
    }
    Norm second = load_norm(ld, "attn_norm_2", c->dim);
    if (second.w) {   // Falcon 40B: attention has the second norm, the FFN the first
        w->ffn_norm = w->attn_norm;
        w->attn_norm = second;
    }
    if (c->arch->flags & ENCODER) {
        w->attn_post_norm = load_norm(ld, "attn_output_norm", c->dim);
        w->ffn_post_norm = load_norm(ld, "layer_output_norm", c->dim);
    } else if (c->arch->norm != BARE && !w->attn_norm.w && !w->attn_post_norm.w) {
        missing(ld, "attn_norm.weight");
    }
    w->parallel = second.w || c->parallel ||
                  (!w->ffn_norm.w && !w->ffn_post_norm.w && c->arch->norm != BARE);
    if (find_tensor(ld, "ssm_conv1d", ".weight")) load_delta(ld, w);
    else load_attention(ld, w);
    load_ffn(ld, w);
}

// which layers see a window only, and which have RoPE
static void load_pattern(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    const Arch *a = c->arch;
    const Meta *pattern = arch_meta(ld->m, "attention.sliding_window_pattern");
    int size = c->window;
    bool local = a->local > 0 && size > 0;
    if (local && pattern && pattern->type == GGUF_ARR && (uint64_t)ld->l < pattern->n) {
        local = meta_int(pattern, ld->l);
    } else if (local) {
        int period = pattern && pattern->type != GGUF_ARR ? meta_int(pattern, 0) : a->local;
        local = period < 1 || ld->l % period < period - 1;
    }
    w->window = local ? size : 0;
    w->rope = c->rope != NO_ROPE && !(a->no_rope && (ld->l + 1) % a->no_rope == 0) &&
              !(a->flags & LOCAL_ROPE && size > 0 && !local) &&
              !(a->flags & ROPE_TUNED && !arch_int(ld->m, "rope.scaling.finetuned", 0, 1));
}

// Numbers of the metadata, written over the defaults that stand in c before. Where architectures
// are named the key is theirs: llama.cpp ignores it in other files, whatever it says.
#define AT(field) offsetof(Config, field)
#define GRANITE_MINICPM " granite granitemoe minicpm "
static const struct { const char *key, *archs; size_t at; int low, high; } INT_KEYS[] = {
    {"context_length", "", AT(n_ctx), 1, INT_MAX},
    {"attention.key_length", "", AT(hd), 1, 4096},
    {"attention.value_length", "", AT(vd), 1, 4096},
    {"expert_count", "", AT(n_expert), 0, 4096},
    {"expert_used_count", "", AT(n_used), 0, 4096},
    {"expert_gating_func", "", AT(gating), SOFTMAX, LATE_SOFTMAX},
    {"expert_weights_norm", "", AT(gates_normed), 0, 1},
    {"ssm.conv_kernel", "", AT(conv), 0, 64},
    {"ssm.group_count", "", AT(n_key), 0, 1 << 14},
    {"ssm.time_step_rank", "", AT(n_value), 0, 1 << 14},
    {"ssm.state_size", "", AT(dk), 0, 4096},
    {"ssm.inner_size", "", AT(dv), 0, 1 << 20},
    {"attention.causal", "", AT(causal), 0, 1},
    {"pooling_type", "", AT(pooling), 0, 3},
    {"attention.sliding_window", "", AT(window), 0, INT_MAX},
    {"nextn_predict_layers", "", AT(n_skip), 0, 1024},
    {"use_parallel_residual", " gptneox ", AT(parallel), 0, 1},
    {"rope.dimension_sections", " glm4 ", AT(mrope), 0, 4096},
};
static const struct { const char *key, *archs; size_t at; } FLOAT_KEYS[] = {
    {"embedding_scale", GRANITE_MINICPM, AT(embd_scale)},
    {"residual_scale", GRANITE_MINICPM, AT(residual_scale)},
    {"attention.scale", " granite granitemoe ", AT(attn_scale)},
    {"logit_scale", GRANITE_MINICPM "command-r cohere2 ", AT(logit_scale)},
    {"attn_logit_softcapping", " gemma2 ", AT(attn_cap)},
    {"final_logit_softcapping", " gemma2 gemma3 ", AT(logit_cap)},
    {"attention.clamp_kqv", " olmo ", AT(clamp_qkv)},
    {"attention.temperature_scale", " mistral3 ", AT(temp_scale)},
    {"expert_weights_scale", " deepseek ", AT(expert_scale)},
    {"rope.freq_base", "", AT(rope_base)},
    {"rope.freq_base_swa", " gemma2 gemma3 gpt-oss ", AT(rope_base_local)},
    {"rope.scale_linear", "", AT(rope_factor)},
    {"rope.scaling.factor", "", AT(rope_factor)},
    {"rope.scaling.attn_factor", "", AT(rope_attn)},
    {"rope.scaling.alpha", " hunyuan-dense ", AT(rope_alpha)},
    {"rope.scaling.yarn_beta_fast", " mistral3 ", AT(yarn_fast)},
    {"rope.scaling.yarn_beta_slow", " mistral3 ", AT(yarn_slow)},
    {"rope.scaling.yarn_log_multiplier", " mistral3 ", AT(yarn_log)},
};
#undef AT

static bool has_key(const Loader *ld, const char *key, const char *archs) {
    char name[64];
    snprintf(name, sizeof name, " %s ", ld->m->config.arch->name);
    return (!*archs || strstr(archs, name)) && arch_meta(ld->m, key);
}

static void load_keys(Loader *ld) {
    Config *c = &ld->m->config;
    for (size_t i = 0; i < sizeof INT_KEYS / sizeof *INT_KEYS; i++) {
        int *x = (int *)((char *)c + INT_KEYS[i].at);
        if (has_key(ld, INT_KEYS[i].key, INT_KEYS[i].archs) || *x == INT_MIN)
            *x = need_int(ld, INT_KEYS[i].key, INT64_MIN, INT_KEYS[i].low, INT_KEYS[i].high);
    }
    for (size_t i = 0; i < sizeof FLOAT_KEYS / sizeof *FLOAT_KEYS; i++) {
        float *x = (float *)((char *)c + FLOAT_KEYS[i].at),
              y = arch_float(ld->m, FLOAT_KEYS[i].key, 0);
        if (y != 0 && has_key(ld, FLOAT_KEYS[i].key, FLOAT_KEYS[i].archs)) *x = y;   // 0: none
    }
}

static const Arch *find_arch(const Model *m, Str name) {
    char key[128];
    snprintf(key, sizeof key, "%.*s.block_count", STR_ARG(name));
    int64_t n_layer = gguf_int(&m->gguf, key, 0);
    snprintf(key, sizeof key, "%.*s.nextn_predict_layers", STR_ARG(name));
    n_layer -= gguf_int(&m->gguf, key, 0);
    for (size_t i = 0; i < sizeof ARCHS / sizeof *ARCHS; i++)
        if (str_eq(name, ARCHS[i].name) && (!ARCHS[i].n_layer || ARCHS[i].n_layer == n_layer))
            return &ARCHS[i];
    return NULL;
}

static bool load_config(Loader *ld) {
    Model *m = ld->m;
    Config *c = &m->config;
    Str name = gguf_str(&m->gguf, "general.architecture");
    if (!name.s) return fail(ld->e, "key general.architecture is missing");
    const Arch *a = find_arch(m, name);
    if (!a)
        return fail(ld->e, "architecture %.*s is not supported; --help lists those that are",
                    STR_ARG(name));
    if (!m->gguf.n_tensors) return fail(ld->e, "no tensors: this is a vocabulary, not a model");
    c->arch = a;
    int dim = c->dim = need_int(ld, "embedding_length", INT64_MIN, 1, 1 << 20);
    int layers = need_int(ld, "block_count", INT64_MIN, 1, m->gguf.n_tensors);
    int heads = need_int(ld, "attention.head_count", INT64_MIN, 1, 1 << 14), flags = a->flags;
    *c = (Config){
        .arch = a, .dim = dim, .n_ctx = INT_MIN, .hd = dim / heads, .vd = dim / heads,
        .eps = arch_float(m, a->norm == RMS ? "attention.layer_norm_rms_epsilon"
                                            : "attention.layer_norm_epsilon", 1e-5),
        .embd_scale = flags & EMBD_SQRT ? sqrtf(dim) : flags & MUP ? 12 : 1,
        .residual_scale = flags & MUP ? 1.4f / sqrtf(layers) : 1,
        .logit_scale = flags & MUP ? 256.0f / dim : 1,
        .attn_cap = flags & CAPPED ? 50 : 0, .logit_cap = flags & CAPPED ? 30 : 0,
        .alibi = flags & ALIBI_8 ? 8 : 0, .expert_scale = 1,
        .gating = flags & GATES_LATE ? LATE_SOFTMAX : SOFTMAX,
        .gates_normed = !!(flags & GATES_NORMED),
        .causal = !(flags & ENCODER), .pooling = -1, .window = flags & WINDOW_4096 ? 4096 : 0,
        .rope_base = 10000, .rope_factor = 1, .rope_attn = 1, .yarn_fast = 32, .yarn_slow = 1,
    };
    load_keys(ld);
    c->n_layer = layers - c->n_skip;
    c->n_rot = need_int(ld, "rope.dimension_count", c->hd, 0, c->hd);
    c->n_ctx_orig = need_int(ld, "rope.scaling.original_context_length", c->n_ctx, 1, INT_MAX);
    c->rope = c->mrope ? NEOX : a->rope;
    char key[128];
    snprintf(key, sizeof key, "%s.rope.scaling.type", a->name);
    c->yarn = str_eq(gguf_str(&m->gguf, key), "yarn");
    if (str_eq(gguf_str(&m->gguf, key), "none")) c->rope_factor = 1;
    if (c->rope_alpha > 0 && c->hd > 2) c->rope_base *= powf(c->rope_alpha, c->hd / (c->hd - 2.0f));
    if (!c->rope_base_local) c->rope_base_local = flags & LOCAL_10000 ? 10000 : c->rope_base;
    if (!c->attn_scale)
        c->attn_scale = 1 / sqrtf(flags & SCALE_BY_DIM ? dim / (float)heads : c->hd);
    if (flags & LOGIT_DIVIDE) c->logit_scale = 1 / c->logit_scale;
    if (c->n_value) c->dv /= c->n_value;
    if (c->n_layer < 1) return ld->ok && fail(ld->e, "all %d layers are extra ones", layers);
    if (c->n_rot % 2 || !(c->rope_base > 0 && c->rope_base_local > 0))
        return ld->ok && fail(ld->e, "RoPE: %d dimensions at base %g", c->n_rot, c->rope_base);
    if (c->n_used > c->n_expert || (c->n_expert && !c->n_used))
        return ld->ok && fail(ld->e, "%d of %d experts cannot be used", c->n_used, c->n_expert);
    return ld->ok;
}

// binds every weight; all that forward relies on is checked here
static bool weights_load(Model *m, Error *e) {
    Loader ld = {m, e, true, -1};
    Config *c = &m->config;
    if (!load_config(&ld)) return false;
    m->freqs = load_vector(&ld, "rope_freqs", ".weight", c->n_rot / 2);
    m->freqs_long = load_vector(&ld, "rope_factors_long", ".weight", c->n_rot / 2);
    m->freqs_short = load_vector(&ld, "rope_factors_short", ".weight", c->n_rot / 2);
    m->embd = need_matrix(&ld, "token_embd", c->dim, 0, 1);
    m->head = load_matrix(&ld, "output", c->dim, 0, 1);
    if (!m->head.data) m->head = m->embd;
    c->n_vocab = m->head.rows;
    if (ld.ok && m->embd.rows < c->n_vocab)
        return fail(e, "token_embd has %lld rows, output %d", (long long)m->embd.rows, c->n_vocab);
    m->pos_embd = load_matrix(&ld, "position_embd", c->dim, 0, 1);
    m->type_embd = load_matrix(&ld, "token_types", c->dim, 0, 1);
    m->embd_norm = load_norm(&ld, "token_embd_norm", c->dim);
    m->out_norm = load_norm(&ld, "output_norm", c->dim);
    if (!m->out_norm.w && c->arch->norm != BARE && !(c->arch->flags & ENCODER))
        missing(&ld, "output_norm.weight");
    m->layers = calloc(c->n_layer, sizeof *m->layers);
    if (!m->layers) return fail(e, "out of memory");
    for (ld.l = 0; ld.l < c->n_layer && ld.ok; ld.l++) {
        Layer *w = &m->layers[ld.l];
        load_layer(&ld, w);
        load_pattern(&ld, w);
    }
    return ld.ok;
}

// ---- 4. matmul ----
//
// Nearly all time goes here. One token (decode) reads every weight once and uses it once: it runs
// at the speed of memory if codes turn into products fast enough. A chunk (prefill) uses a weight n
// times: panels of weights are decoded once, stay in the cache and meet all rows of the chunk.
// Block formats meet activations rounded to int8 with a scale per 32, so that one instruction
// multiplies up to 64 bytes; float weights meet float activations. How a number is summed never
// depends on the number of threads.

// -- threads --
// `left` counts down from n: whoever gets i > 0 owns task n - i. A claim succeeds only while the
// job is incomplete, so its fields cannot change under a worker that woke up late, and nobody waits
// for workers that found nothing to do. Waiting spins 20 us, more than lies between two products of
// a token, then sleeps.

typedef void Task(void *ctx, int i, int thread);

typedef struct {
    int threads;
    pthread_t *thread;           // [threads - 1]
    pthread_mutex_t lock;
    pthread_cond_t wake;
    Task *fn;
    void *ctx;
    int n;
    atomic_int left, running;    // tasks nobody has claimed (or less), tasks not finished
    atomic_int sleeping, ids;
    atomic_bool quit;
} Pool;

// Denormals cost 100 cycles and weigh nothing: workers, and the caller meanwhile, make them zero.
#if defined(__SSE2__)
#include <immintrin.h>
static uint64_t fp_mode(void) { return _mm_getcsr(); }
static void fp_set(uint64_t mode) { _mm_setcsr(mode); }
enum { FP_FLUSH = 0x8040 };
#elif defined(__aarch64__)
static uint64_t fp_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void fp_set(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
enum { FP_FLUSH = 1 << 24 };
#else
static uint64_t fp_mode(void) { return 0; }
static void fp_set(uint64_t mode) { (void)mode; }
enum { FP_FLUSH = 0 };
#endif

// Linux grants AMX's tile registers on request, to a process before it has threads.
#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__linux__)
#include <sys/syscall.h>
static bool tiles_allow(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#else
static bool tiles_allow(void) { return true; }
#endif

static void pool_wake(Pool *p) {
    if (!atomic_load(&p->sleeping)) return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

static void pool_work(Pool *p, int thread) {
    int left, done = 0;
    for (; (left = atomic_fetch_sub(&p->left, 1)) > 0; done++) p->fn(p->ctx, p->n - left, thread);
    if (done && atomic_fetch_sub(&p->running, done) == done) pool_wake(p);
}

static bool pool_ready(Pool *p, bool caller) {
    if (caller) return atomic_load(&p->running) == 0;
    return atomic_load(&p->left) > 0 || atomic_load(&p->quit);
}

static void pool_wait(Pool *p, bool caller) {
    double until = now() + 20e-6;
    while (!pool_ready(p, caller) && now() < until) continue;
    if (pool_ready(p, caller)) return;
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleeping, 1);
    while (!pool_ready(p, caller)) pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->sleeping, 1);
    pthread_mutex_unlock(&p->lock);
}

static void *pool_thread(void *arg) {
    Pool *p = arg;
    int thread = atomic_fetch_add(&p->ids, 1) + 1;
    fp_set(fp_mode() | FP_FLUSH);
    for (pool_wait(p, false); !atomic_load(&p->quit); pool_wait(p, false)) pool_work(p, thread);
    return NULL;
}

static void pool_close(Pool *p) {
    atomic_store(&p->quit, true);
    pool_wake(p);
    for (int i = 0; i < p->threads - 1; i++) pthread_join(p->thread[i], NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->wake);
    free(p->thread);
}

static bool pool_open(Pool *p, int threads) {
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->thread = calloc(threads, sizeof *p->thread);
    bool ok = p->thread && tiles_allow();
    for (p->threads = 1; ok && p->threads < threads; p->threads += ok)
        ok = !pthread_create(&p->thread[p->threads - 1], NULL, pool_thread, p);
    if (!ok) pool_close(p);
    return ok;
}

// fn(ctx, i, thread) for i = 0..n-1, in any order on any thread; returns when all are done
static void parallel(Pool *p, Task *fn, void *ctx, int n) {
    uint64_t mode = fp_mode();
    fp_set(mode | FP_FLUSH);
    if (p->threads == 1 || n <= 1) {
        for (int i = 0; i < n; i++) fn(ctx, i, 0);
    } else {
        p->fn = fn;
        p->ctx = ctx;
        p->n = n;
        atomic_store(&p->running, n);
        atomic_store(&p->left, n);
        pool_wake(p);
        pool_work(p, 0);
        pool_wait(p, true);
    }
    fp_set(mode);
}

// -- vectors --
// Arithmetic is plain C on compiler vectors as wide as the CPU's; a few words need intrinsics.
// dot_bytes(sum, w, x) adds to each lane four products of bytes, w[0..3] * x[0..3]:
//   VNNI    one instruction; w is unsigned there, so signed codes get CODE_BIAS added
//   AVX2    vpmaddubsw adds pairs of unsigned times signed bytes in 16 bits, where |w| times x
//           with w's sign fits: at most 2 * 128 * 127
//   NEON    sdot, or widening products
// spread(d, i) gives lane j the scale of its 16 weights, d[(i + j) / 4].

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#pragma clang diagnostic ignored "-Wpass-failed"   // where a count is not constant it stays a loop
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#if defined(QUANT_AVX512) && defined(__AVX512VNNI__)
#define SIMD_VNNI
enum { LANES = 16, CODE_BIAS = 128, INT8_TILE = 1 };
#elif defined(QUANT_X86)
enum { LANES = 8, CODE_BIAS = 0, INT8_TILE = 1 };
#elif defined(QUANT_NEON) && defined(__ARM_FEATURE_DOTPROD)
enum { LANES = 4, CODE_BIAS = 0, INT8_TILE = 1 };
#else
enum { LANES = 4, CODE_BIAS = 0, INT8_TILE = 0 };   // n > 1 is faster in float there
#endif
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef int8_t vb __attribute__((vector_size(4 * LANES)));

INLINE vf load_f32(const void *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE vf larger_of(vf a, vf b) {
    vi more = a > b;
    return (vf)(((vi)a & more) | ((vi)b & ~more));
}
INLINE vi load_i32(const void *p) { return (vi)load_f32(p); }
INLINE vf load_bf16(const void *p) {
    typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vi) << 16);
}

#if defined(SIMD_VNNI)
INLINE vf load_f16(const void *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
INLINE vf spread(const float *d, int i) {
    __m512i at = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    at = _mm512_add_epi32(at, _mm512_set1_epi32(i / 4));
    return (vf)_mm512_permutexvar_ps(at, _mm512_loadu_ps(d));
}
#elif defined(QUANT_X86)
INLINE vf load_f16(const void *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    __m256i size = _mm256_abs_epi8((__m256i)w), y = _mm256_sign_epi8((__m256i)x, (__m256i)w);
    return sum + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(size, y), _mm256_set1_epi16(1));
}
INLINE vf spread(const float *d, int i) {
    return (vf)_mm256_set_m128(_mm_set1_ps(d[i / 4 + 1]), _mm_set1_ps(d[i / 4]));
}
#else
INLINE vf spread(const float *d, int i) { return (vf){0} + d[i / 4]; }
#if defined(QUANT_NEON)
INLINE vf load_f16(const void *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
#else
INLINE vf load_f16(const void *p) {
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = quant_half((const uint8_t *)p + 2 * i);
    return v;
}
#endif
#if defined(QUANT_NEON) && defined(__ARM_FEATURE_DOTPROD)
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
}
#elif defined(QUANT_NEON)
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
    int16x8_t lo = vmull_s8(vget_low_s8(a), vget_low_s8(b)), hi = vmull_high_s8(a, b);
    return sum + (vi)vpaddq_s32(vpaddlq_s16(lo), vpaddlq_s16(hi));
}
#else
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    vb a = (vb)w, b = (vb)x;
    for (int i = 0; i < 4 * LANES; i++) sum[i / 4] += a[i] * b[i];
    return sum;
}
#endif
#endif

INLINE float sum_lanes(vf v) {
    typedef float vf4 __attribute__((vector_size(16)));
    vf4 part[LANES / 4], s;
    memcpy(part, &v, sizeof v);
    s = part[0];
    UNROLL for (int i = 1; i < LANES / 4; i++) s += part[i];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

enum { AHEAD = 4096 };   // bytes to prefetch ahead, so that waiting for memory overlaps with work

INLINE void prefetch(const void *p, int bytes) {   // where nothing is mapped it does nothing
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i);
}

// -- activations in int8 --

// 32 floats to codes; returns the scale, rounded to f16 as ggml stores it, and the sums of both
// halves. Positive floats order like their bits, and a float near MAGIC holds an integer in its
// low bits, rounded to the nearest: integer loops, which compilers turn into vector code.
static const float MAGIC = 12582912.0f;   // 1.5 * 2^23
enum { MAGIC_BITS = 0x4b400000 };

static float round_32(const float *x, int8_t *q, int sum[2]) {
    int32_t bits[32], top = 0;
    float most, y[32];
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < 32; i++) {
        int32_t size = bits[i] & 0x7fffffff;
        top = size > top ? size : top;
    }
    memcpy(&most, &top, sizeof most);
    float inverse = most > 0 ? 127 / most : 0;
    for (int i = 0; i < 32; i++) y[i] = x[i] * inverse + MAGIC;
    memcpy(bits, y, sizeof bits);
    for (int i = 0; i < 32; i++) q[i] = (int8_t)bits[i];
    sum[0] = sum[1] = 0;
    for (int i = 0; i < 16; i++) sum[0] += bits[i] - MAGIC_BITS;
    for (int i = 0; i < 16; i++) sum[1] += bits[16 + i] - MAGIC_BITS;
    return quant_f16_to_f32(quant_f32_to_f16(most / 127));
}

// a token's activations, 256 at a time as decoders give weights; s = d * (sum of 16 codes)
typedef struct { int8_t q[256]; float d[16], s[16]; } Act;

static void act_quantize(const float *x, int64_t cols, Act *a) {
    for (int64_t i = 0; i < cols; i += 32) {
        Act *b = a + i / 256;
        int at = i % 256, sum[2];
        if (at == 0 && cols - i < 256) memset(b, 0, sizeof *b);
        float d = round_32(x + i, b->q + at, sum);
        for (int h = 0; h < 2; h++) {
            b->d[at / 16 + h] = d;
            b->s[at / 16 + h] = d * sum[h];
        }
    }
}

// -- matrix x vector --

// Decodes groups of 32 weights, at most 8, of a row from weight `at` on. Such functions are
// constant arguments below: after inlining each format has a loop of its own.
typedef void DecodeFn(const uint8_t *row, int64_t at, int groups, int8_t *q, float *d, float *m);
// out[rows] = consecutive rows times x: floats, or for block formats Act[cols/256]
typedef void RowsFn(const uint8_t *w, int64_t rows, int64_t cols, const void *x, float *out);

// the same, fastest for all 8 groups; what is missing to 8 is zero
INLINE void unpack(DecodeFn *decode, const uint8_t *row, int64_t at, int groups, int8_t *q,
                   float *d, float *m) {
    if (groups == 8) {
        decode(row, at, 8, q, d, m);
        return;
    }
    decode(row, at, groups, q, d, m);
    memset(q + 32 * groups, 0, 32 * (8 - groups));
    memset(d + 2 * groups, 0, 2 * (8 - groups) * sizeof *d);
    memset(m + 2 * groups, 0, 2 * (8 - groups) * sizeof *m);
}

// Sums of 256 weights times activations, in the lanes of sum[0..3]; sum[4]: offsets, or without
// them what CODE_BIAS adds, -CODE_BIAS times d * (sum of activations). With VNNI, 64 weights
// are load, add, dot, convert, permute, fma: on two ports 12 cycles per 256, and the scales 3.
INLINE void dot256(const int8_t *q, const float *d, const float *m, bool offsets, const Act *x,
                   vf sum[5]) {
    float scale[16] __attribute__((aligned(64)));
    UNROLL for (int i = 0; i < 16; i += LANES) {
        vf y = load_f32(d + i) * load_f32(x->d + i);
        memcpy(scale + i, &y, sizeof y);
        if (offsets || CODE_BIAS > 0)
            sum[4] += load_f32((offsets ? m : d) + i) * load_f32(x->s + i);
    }
    UNROLL for (int i = 0; i < 64; i += LANES) {
        vb w = (vb)load_i32(q + 4 * i) ^ (int8_t)(offsets ? 0 : CODE_BIAS);   // + 128
        vi dot = dot_bytes((vi){0}, (vi)w, load_i32(x->q + 4 * i));
        sum[i / LANES % 4] += __builtin_convertvector(dot, vf) * spread(scale, i);
    }
}

INLINE void block_rows(DecodeFn *decode, DecodeFn *tail, int bytes, bool offsets,
                       const uint8_t *w, int64_t rows, int64_t cols, const Act *x, float *out) {
    int8_t q[256] __attribute__((aligned(64)));
    float d[16] __attribute__((aligned(64))), m[16] __attribute__((aligned(64)));
    size_t row = cols / 32 * bytes / 8;
    for (int64_t r = 0; r < rows; r++, w += row) {
        vf sum[5] = {{0}};
        int64_t i = 0;
        for (; i + 256 <= cols; i += 256) {
            prefetch(w + i / 256 * bytes + AHEAD, bytes);
            decode(w, i, 8, q, d, m);
            dot256(q, d, m, offsets, x + i / 256, sum);
        }
        if (i < cols) {
            tail(w, i, (int)(cols - i) / 32, q, d, m);
            dot256(q, d, m, offsets, x + i / 256, sum);
        }
        sum[4] *= offsets ? 1.0f : -CODE_BIAS;
        out[r] = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]) + sum[4]);
    }
}

// four sums hide the latency of fma
INLINE void float_rows(vf load(const void *), int size, const uint8_t *w, int64_t rows,
                       int64_t cols, const float *x, float *out) {
    enum { STEP = 4 * LANES };
    for (int64_t r = 0; r < rows; r++, w += cols * size) {
        vf sum[4] = {{0}};
        int64_t i = 0;
        for (; i + STEP <= cols; i += STEP) {
            prefetch(w + i * size + AHEAD, STEP * size);
            UNROLL for (int j = 0; j < 4; j++)
                sum[j] += load(w + (i + j * LANES) * size) * load_f32(x + i + j * LANES);
        }
        if (i < cols) {
            uint8_t last[4 * STEP] = {0};
            float y[STEP] = {0};
            memcpy(last, w + i * size, (cols - i) * size);
            memcpy(y, x + i, (cols - i) * sizeof *y);
            for (int j = 0; j < 4; j++)
                sum[j] += load(last + j * LANES * size) * load_f32(y + j * LANES);
        }
        out[r] = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

#define QUANT_X(id, name, weights, bytes, per16, offsets)                                          \
    INLINE void decode_at_##name(const uint8_t *row, int64_t at, int groups, int8_t *q, float *d,  \
                                 float *m)                                                         \
    {                                                                                              \
        decode_##name((const block_##name *)row + at / weights, 0, groups, q, d, m);               \
    }                                                                                              \
    static void unpack_##name(const uint8_t *row, int64_t at, int groups, int8_t *q, float *d,     \
                              float *m)                                                            \
    {                                                                                              \
        unpack(decode_at_##name, row, at, groups, q, d, m);                                        \
    }                                                                                              \
    static void rows_##name(const uint8_t *w, int64_t rows, int64_t cols, const void *x,           \
                            float *out)                                                            \
    {                                                                                              \
        block_rows(decode_at_##name, unpack_##name, 256 / weights * bytes, offsets, w, rows,       \
                   cols, x, out);                                                                  \
    }
QUANT_TYPES(QUANT_X)
#undef QUANT_X
#define FLOAT_ROWS(name, size)                                                                     \
    static void rows_##name(const uint8_t *w, int64_t rows, int64_t cols, const void *x,           \
                            float *out)                                                            \
    {                                                                                              \
        float_rows(load_##name, size, w, rows, cols, x, out);                                      \
    }
FLOAT_ROWS(f32, 4)
FLOAT_ROWS(f16, 2)
FLOAT_ROWS(bf16, 2)
#undef FLOAT_ROWS

typedef struct { RowsFn *rows; DecodeFn *unpack; bool per16, offsets; } Format;

static const Format formats[64] = {   // unpack NULL: float weights
    [QUANT_F32] = {rows_f32, NULL, false, false},
    [QUANT_F16] = {rows_f16, NULL, false, false},
    [QUANT_BF16] = {rows_bf16, NULL, false, false},
#define QUANT_X(id, name, weights, bytes, per16, offsets)                                          \
    [id] = {rows_##name, unpack_##name, per16, offsets},
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
};

// -- matrix x matrix --
// out[n][rows] in tiles of 16 rows x some tokens, which stay in registers. Rows lie across the
// lanes and activations are broadcast, so nothing is summed across lanes. A task takes PANEL rows
// of one matrix, DEPTH weights deep at a time: decoded once to the tile's layout, they stay in the
// L2 cache while all tokens pass by; a tile's activations stay in L1 while its rows pass by.

typedef struct { const Matrix *w; const float *x; float *out; int n; } Matmul;

#if defined(SIMD_VNNI) && defined(__AVX512BF16__) && \
    (defined(__AMX_BF16__) || defined(__AMXBF16__))   // gcc, clang
#define SIMD_AMX
enum { DEPTH = 1024 };
#else
enum { DEPTH = 512 };
#endif
enum {
    TILE = 16, VECTORS = TILE / LANES, PANEL = 64, FLOAT_DEPTH = 256, MAX_JOBS = 64,
    FLOAT_TOKENS = LANES == 16 ? 8 : 4,                    // by the number of registers
    TILE_BYTES = TILE * DEPTH * 2, PANEL_BYTES = PANEL / TILE * TILE_BYTES,
};

// n 32-bit words of 16 rows to columns
#if defined(SIMD_VNNI)
// four words at a time: vector i gets rows i, 4+i, 8+i, 12+i, so that transposing 4 x 4 words
// inside 128 bits finishes it
static void transpose(const uint32_t *rows, int stride, int n, uint32_t flip, uint32_t *to) {
    for (int k = 0; k < n; k += 4) {
        __m512i v[4], flips = _mm512_set1_epi32((int)flip);
        UNROLL for (int i = 0; i < 4; i++) {
            const uint32_t *p = rows + stride * i + k;
            v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(p + 4 * stride)), 1);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(p + 8 * stride)), 2);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(p + 12 * stride)), 3);
            v[i] = _mm512_xor_si512(v[i], flips);
        }
        __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
        __m512i c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        _mm512_storeu_si512(to + TILE * k, _mm512_unpacklo_epi64(a, b));
        _mm512_storeu_si512(to + TILE * (k + 1), _mm512_unpackhi_epi64(a, b));
        _mm512_storeu_si512(to + TILE * (k + 2), _mm512_unpacklo_epi64(c, d));
        _mm512_storeu_si512(to + TILE * (k + 3), _mm512_unpackhi_epi64(c, d));
    }
}
#else
static void transpose(const uint32_t *rows, int stride, int n, uint32_t flip, uint32_t *to) {
    for (int i = 0; i < n; i++)
        for (int r = 0; r < TILE; r++) to[TILE * i + r] = rows[stride * r + i] ^ flip;
}
#endif

// adds a tile to out; after the last column comes what stands around the product
static void tile_out(const Matmul *job, int64_t r, int t, int tokens, vf sum[][VECTORS], bool first,
                     bool last) {
    const Matrix *w = job->w;
    int rows = w->rows - r < TILE ? (int)(w->rows - r) : TILE;   // none: a tile past the end
    float scale = last && w->scale ? *w->scale : 1, bias[TILE] = {0}, edge[TILE] = {0};
    if (last && w->bias && rows > 0) memcpy(bias, w->bias + r, rows * sizeof *bias);
    for (int k = 0; k < tokens && t + k < job->n && rows > 0; k++) {
        float *out = job->out + (t + k) * w->rows + r, *y = rows < TILE ? edge : out;
        if (rows < TILE) memcpy(edge, out, rows * sizeof *edge);
        for (int v = 0; v < VECTORS; v++) {
            vf value = sum[k][v] + (first ? (vf){0} : load_f32(y + LANES * v));
            value = value * scale + load_f32(bias + LANES * v);
            memcpy(y + LANES * v, &value, sizeof value);
        }
        if (rows < TILE) memcpy(out, edge, rows * sizeof *edge);
    }
}

// The float tile: total[t] = sum over k of 16 columns at w + k * stride bytes times
// x[t * next + k * step]
INLINE void tile_float(vf load(const void *), int size, const void *w, size_t stride,
                       const float *x, size_t next, size_t step, int depth, int tokens,
                       vf total[][VECTORS]) {
    vf sum[FLOAT_TOKENS][VECTORS] = {{{0}}};   // local, so that it lives in registers
    const char *row = w;
    for (int k = 0; k < depth; k++, row += stride, x += step)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            vf column = load(row + v * LANES * size);
            UNROLL for (int t = 0; t < tokens; t++) sum[t][v] += column * x[t * next];
        }
    memcpy(total, sum, tokens * sizeof *sum);
}

// rows r .. r+15 as columns of floats: float weights, and all where there is no int8 tile
static void panel_float(const Matrix *w, int64_t r, int64_t k, int depth, float *columns) {
    float rows[TILE][FLOAT_DEPTH] = {{0}};
    size_t row_bytes = quant_row_bytes(w->type, w->cols), at = quant_row_bytes(w->type, k);
    for (int j = 0; j < TILE; j++) {
        int64_t row = r + j < w->rows ? r + j : w->rows - 1;
        quant_dequantize(w->type, w->data + row * row_bytes + at, rows[j], depth);
    }
    transpose((uint32_t *)rows, FLOAT_DEPTH, depth, 0, (uint32_t *)columns);
}

// as many tokens from t on as there are registers for; returns how many
static int run_float(const Matmul *job, const float *panel, int64_t r, int64_t k, int depth, int t)
{
    vf sum[FLOAT_TOKENS][VECTORS];
    size_t cols = job->w->cols;
    const float *x = job->x + t * cols + k;
    int left = job->n - t, tokens = left >= FLOAT_TOKENS ? FLOAT_TOKENS : left >= 4 ? 4 : 1;
    if (tokens == FLOAT_TOKENS)
        tile_float(load_f32, 4, panel, 4 * TILE, x, cols, 1, depth, FLOAT_TOKENS, sum);
    else if (tokens == 4) tile_float(load_f32, 4, panel, 4 * TILE, x, cols, 1, depth, 4, sum);
    else tile_float(load_f32, 4, panel, 4 * TILE, x, cols, 1, depth, 1, sum);
    tile_out(job, r, t, tokens, sum, k == 0, k + depth == job->w->cols);
    return tokens;
}

// The tile that takes packed activations has two variants: ActTile (of TOKENS tokens), panel, and
// product.
#if defined(SIMD_AMX)
// One AMX instruction multiplies 16 x 32 with 32 x 16 bf16 numbers, with float sums, in 16 cycles.
// Scales and offsets of block formats vanish into the weights: all formats run alike, and closer to
// the exact product than with int8 activations. A float is the sum of three bf16, an f16 of two:
// float weights take the products of all parts that a float's precision can tell (f16: 5 of 6).
// 2 x 2 tiles share their operands: one load per product.
enum { TOKENS = 32, BLOCK_ROWS = 2 * TILE, MAX_PARTS = 3, TILE_SIZE = 16 * 64 };
typedef struct { uint16_t x[2][16][32]; } ActTile;   // one part of 32 activations of 2 x 16 tokens

static const struct {
    uint8_t palette, start, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
static void tiles_begin(void) { _tile_loadconfig(&tile_config); }
static void tiles_end(void) { _tile_release(); }
static bool tiled(const Matrix *w) { return (void)w, true; }
static int weight_parts(const Matrix *w) {
    return w->type == QUANT_F32 ? 3 : w->type == QUANT_F16 ? 2 : 1;
}
static int act_parts(const Matrix *w) { return formats[w->type].unpack ? 1 : 3; }

INLINE void store_bf16(void *to, vf lo, vf hi) {
    __m512bh v = _mm512_cvtne2ps_pbh((__m512)hi, (__m512)lo);
    memcpy(to, &v, sizeof v);
}
INLINE vf upper_bits(vf x) {   // rounded to bf16, the nearest
    vi odd = (vi)x >> 16 & 1;
    return (vf)(((vi)x + 0x7fff + odd) & -65536);
}
INLINE void store_parts(void *to, size_t next, int parts, vf lo, vf hi) {   // `next` bytes apart
    for (int p = 0; p < parts; p++, lo -= upper_bits(lo), hi -= upper_bits(hi))
        store_bf16((char *)to + p * next, lo, hi);
}

static void act_pack(const Matmul *job, int t, ActTile *a) {
    int64_t cols = job->w->cols;
    int parts = act_parts(job->w);
    for (int64_t i = 0; i < cols; i += 32, a += parts)
        for (int k = 0; k < TOKENS; k++) {
            const float *x = job->x + (t + k < job->n ? t + k : t) * cols + i;
            float edge[32] = {0};
            if (cols - i < 32) x = memcpy(edge, x, (cols - i) * sizeof *x);
            store_parts(a->x[k / 16][k % 16], sizeof *a, parts, load_f32(x), load_f32(x + 16));
        }
}

INLINE void widen_codes(const int8_t *q, const float *d, const float *m, uint16_t *to) {
    for (int g = 0; g < 16; g += 2, q += 32) {
        __m512i lo = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)q));
        __m512i hi = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)q + 1));
        store_bf16(to + 16 * g, (vf)_mm512_cvtepi32_ps(lo) * d[g] + m[g],
                   (vf)_mm512_cvtepi32_ps(hi) * d[g + 1] + m[g + 1]);
    }
}

// rows r .. r+15 from weight k on, as pairs [depth/32][parts][16][16][2]
static void panel_block(const Matrix *w, int64_t r, int64_t k, int depth, uint8_t *panel) {
    size_t row_bytes = quant_row_bytes(w->type, w->cols);
    int parts = weight_parts(w);
    for (int i = 0; i < depth; i += 256) {
        uint16_t rows[MAX_PARTS][TILE][256];
        int some = depth - i < 256 ? depth - i : 256;
        for (int j = 0; j < TILE; j++) {
            int8_t q[256];
            float d[16], m[16], x[256] = {0};
            const uint8_t *row = w->data + (r + j < w->rows ? r + j : w->rows - 1) * row_bytes;
            if (formats[w->type].unpack) {
                formats[w->type].unpack(row, k + i, some / 32, q, d, m);
                widen_codes(q, d, m, rows[0][j]);
            } else {
                quant_dequantize(w->type, row + quant_row_bytes(w->type, k + i), x, some);
                for (int g = 0; g < 256; g += 32)
                    store_parts(&rows[0][j][g], sizeof *rows, parts, load_f32(x + g),
                                load_f32(x + g + 16));
            }
        }
        for (int g = 0; g < (some + 31) / 32; g++)
            for (int p = 0; p < parts; p++, panel += TILE_SIZE)
                transpose((uint32_t *)rows[p] + 16 * g, 128, 16, 0, (uint32_t *)panel);
    }
}

// out[2 * i + j] = 16 x 16 sums of rows a[..].x[i] times the columns of b + j * next, n tiles deep,
// each of so many parts
INLINE void multiply_tiles(const ActTile *a, int a_parts, const uint8_t *b, int b_parts,
                           size_t next, int n, float *const out[4]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < n; k++, a += a_parts)
        for (int i = 0; i < b_parts; i++, b += TILE_SIZE)
            for (int j = 0; j < a_parts - i; j++) {
                _tile_loadd(4, a[j].x[0], 64);
                _tile_loadd(6, b, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, b + next, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, a[j].x[1], 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
    _tile_stored(0, out[0], 64);
    _tile_stored(1, out[1], 64);
    _tile_stored(2, out[2], 64);
    _tile_stored(3, out[3], 64);
}

static void multiply_block(const Matmul *job, const ActTile *a, const uint8_t *panel, int64_t r,
                           int depth, int t, bool first, bool last) {
    vf sum[2][TOKENS][VECTORS];
    float *out[] = {(float *)sum[0][0], (float *)sum[1][0], (float *)sum[0][16],
                    (float *)sum[1][16]};
    int n = (depth + 31) / 32, parts = weight_parts(job->w);
    if (act_parts(job->w) == 1) multiply_tiles(a, 1, panel, 1, TILE_BYTES, n, out);
    else multiply_tiles(a, 3, panel, parts, TILE_BYTES, n, out);
    tile_out(job, r, t, TOKENS, sum[0], first, last);
    tile_out(job, r + TILE, t, TOKENS, sum[1], first, last);
}
#else
// Int8. Dot products start at the bits of MAGIC, so that, seen as floats, they are MAGIC + dot. Per
// 32 weights of 16 rows and a token: 8 dot products, then 3 instructions for the scales, 4 with
// offsets. In AVX-512 that is 512 multiply-adds in 11 instructions, 5 or 6 cycles.
enum { TOKENS = LANES == 16 ? 12 : 4, BLOCK_ROWS = TILE, MAX_PARTS = 1 };
typedef struct {                   // 32 activations of TOKENS tokens
    int8_t q[8][TOKENS][4];
    float d[TOKENS], s[3][TOKENS]; // scale; times the sum of the first 16, the other 16, all
    int32_t start[3][TOKENS];      // of their dot products: MAGIC, less what CODE_BIAS adds
} ActTile;

static void tiles_begin(void) {}
static void tiles_end(void) {}
static bool tiled(const Matrix *w) { return formats[w->type].unpack && INT8_TILE; }
static int act_parts(const Matrix *w) { return (void)w, 1; }

static void act_pack(const Matmul *job, int t, ActTile *a) {
    int64_t cols = job->w->cols;
    for (int64_t i = 0; i < cols; i += 32, a++)
        for (int k = 0; k < TOKENS; k++) {
            int8_t q[32];
            int sum[3];
            a->d[k] = round_32(job->x + (t + k < job->n ? t + k : t) * cols + i, q, sum);
            sum[2] = sum[0] + sum[1];
            UNROLL for (int j = 0; j < 8; j++) memcpy(a->q[j][k], q + 4 * j, 4);
            UNROLL for (int j = 0; j < 3; j++) {
                a->s[j][k] = a->d[k] * sum[j];
                a->start[j][k] = MAGIC_BITS - CODE_BIAS * sum[j];
            }
        }
}

// rows r .. r+15 from weight k on: codes [depth/4][16][4]; scales and offsets [depth/16][16]
static void panel_block(const Matrix *w, int64_t r, int64_t k, int depth, uint8_t *codes) {
    const Format *f = &formats[w->type];
    float *d = (float *)(codes + TILE * DEPTH), *m = d + DEPTH;
    uint32_t flip = f->offsets || !CODE_BIAS ? 0 : 0x80808080;
    size_t row_bytes = quant_row_bytes(w->type, w->cols);
    for (int i = 0; i < depth; i += 256) {
        int8_t q[TILE][256] = {{0}};
        float scale[TILE][16] = {{0}}, offset[TILE][16] = {{0}};
        int groups = depth - i < 256 ? (depth - i) / 32 : 8;
        for (int j = 0; j < TILE; j++) {
            int64_t row = r + j < w->rows ? r + j : w->rows - 1;
            f->unpack(w->data + row * row_bytes, k + i, groups, q[j], scale[j], offset[j]);
        }
        transpose((uint32_t *)q, 64, 8 * groups, flip, (uint32_t *)(codes + TILE * i));
        transpose((uint32_t *)scale, 16, 2 * groups, 0, (uint32_t *)d + i);
        if (f->offsets) transpose((uint32_t *)offset, 16, 2 * groups, 0, (uint32_t *)m + i);
    }
}

INLINE void tile_int8(const uint8_t *w, const ActTile *a, int depth, bool per16, bool offsets,
                      vf total[TOKENS][VECTORS]) {
    vf sum[TOKENS][VECTORS] = {{{0}}};
    const float *d = (const float *)(w + TILE * DEPTH), *m = d + DEPTH;
    int step = per16 ? 16 : 32;
    for (int k = 0; k < depth; k += step, w += TILE * step, d += step, m += step) {
        int part = per16 ? k / 16 % 2 : 2;
        const ActTile *x = a + k / 32;
        vi dot[TOKENS][VECTORS];
        UNROLL for (int t = 0; t < TOKENS; t++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                dot[t][v] = (vi){0} + (offsets ? MAGIC_BITS : x->start[part][t]);
        UNROLL for (int s = 0; s < step / 4; s++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                vi codes = load_i32(w + 4 * (TILE * s + LANES * v));
                UNROLL for (int t = 0; t < TOKENS; t++) {
                    int32_t four;
                    memcpy(&four, x->q[part % 2 * 4 + s][t], 4);
                    dot[t][v] = dot_bytes(dot[t][v], codes, (vi){0} + four);
                }
            }
        UNROLL for (int v = 0; v < VECTORS; v++) {
            vf scale = load_f32(d + LANES * v);
            UNROLL for (int t = 0; t < TOKENS; t++) {
                sum[t][v] += ((vf)dot[t][v] - MAGIC) * scale * x->d[t];
                if (offsets) sum[t][v] += load_f32(m + LANES * v) * x->s[part][t];
            }
        }
    }
    memcpy(total, sum, sizeof sum);
}

static void multiply_block(const Matmul *job, const ActTile *a, const uint8_t *panel, int64_t r,
                      int depth, int t, bool first, bool last) {
    const Format *f = &formats[job->w->type];
    vf sum[TOKENS][VECTORS];
    if (f->per16 && f->offsets) tile_int8(panel, a, depth, true, true, sum);
    else if (f->per16) tile_int8(panel, a, depth, true, false, sum);
    else if (f->offsets) tile_int8(panel, a, depth, false, true, sum);
    else tile_int8(panel, a, depth, false, false, sum);
    tile_out(job, r, t, TOKENS, sum, first, last);
}
#endif

// -- all jobs of a call --

typedef struct {
    const Matmul *jobs;
    const void *act[MAX_JOBS];                // x in the form the product needs; shared by jobs
    int pack[MAX_JOBS + 1];                   // first packing task of each job
    int task[MAX_JOBS + 1], rows[MAX_JOBS];   // first task of each job, rows per task
    uint8_t *panels;                          // [threads][PANEL_BYTES]
} MatmulCall;

// bytes for n rows of x in all, of at most cols columns, in one call's jobs; floats: of weights
static size_t matmul_scratch(size_t n, size_t cols, int threads, bool floats) {
    size_t tiles = n / TOKENS + (n < MAX_JOBS ? n : MAX_JOBS);
    return threads * (size_t)PANEL_BYTES + 64 +
           tiles * (cols / 32 + 8) * (floats ? MAX_PARTS : 1) * sizeof(ActTile);
}

static size_t act_tiles(const Matrix *w, int64_t cols) { return (cols + 31) / 32 * act_parts(w); }

static void pack_task(void *ctx, int i, int thread) {
    MatmulCall *c = ctx;
    int j = 0;
    (void)thread;
    while (i >= c->pack[j + 1]) j++;
    const Matmul *job = &c->jobs[j];
    int64_t tile = i - c->pack[j], cols = job->w->cols;
    if (job->n == 1) act_quantize(job->x, cols, (Act *)c->act[j]);
    else act_pack(job, tile * TOKENS, (ActTile *)c->act[j] + tile * act_tiles(job->w, cols));
}

static void multiply_rows(const Matmul *job, const void *act, int64_t r, int64_t end) {
    const Matrix *w = job->w;
    float scale = w->scale ? *w->scale : 1;
    const uint8_t *first = w->data + r * quant_row_bytes(w->type, w->cols);
    formats[w->type].rows(first, end - r, w->cols, act, job->out + r);
    for (; r < end; r++) job->out[r] = job->out[r] * scale + (w->bias ? w->bias[r] : 0);
}

static void run_panel(const Matmul *job, const void *act, int64_t r, int64_t end, uint8_t *panel) {
    const Matrix *w = job->w;
    bool block = tiled(w);
    int64_t depth = formats[w->type].unpack && block ? DEPTH : FLOAT_DEPTH;
    int64_t step = block ? BLOCK_ROWS : TILE;
    tiles_begin();
    for (int64_t k = 0; k < w->cols; k += depth) {
        int deep = w->cols - k < depth ? (int)(w->cols - k) : (int)depth;
        for (int64_t q = r; q < end; q += TILE) {
            uint8_t *tile = panel + (q - r) / TILE * TILE_BYTES;
            if (block) panel_block(w, q, k, deep, tile);
            else panel_float(w, q, k, deep, (float *)tile);
        }
        for (int t = 0, tokens = TOKENS; t < job->n; t += tokens)
            for (int64_t q = r; q < end; q += step) {
                const uint8_t *tile = panel + (q - r) / TILE * TILE_BYTES;
                const ActTile *a = (const ActTile *)act + t / TOKENS * act_tiles(w, w->cols) +
                                   act_tiles(w, k);
                if (block) multiply_block(job, a, tile, q, deep, t, k == 0, k + deep == w->cols);
                else tokens = run_float(job, (const float *)tile, q, k, deep, t);
            }
    }
    tiles_end();
}

static void matmul_task(void *ctx, int i, int thread) {
    MatmulCall *c = ctx;
    int j = 0;
    while (i >= c->task[j + 1]) j++;
    const Matmul *job = &c->jobs[j];
    int64_t r = (int64_t)(i - c->task[j]) * c->rows[j], end = r + c->rows[j];
    if (end > job->w->rows) end = job->w->rows;
    if (job->n == 1) multiply_rows(job, c->act[j], r, end);
    else run_panel(job, c->act[j], r, end, c->panels + (size_t)thread * PANEL_BYTES);
}

// out[n][rows] = scale * (x[n][cols] * transposed w[rows][cols]) + bias, for each of k jobs at once
static void matmul(Pool *p, void *scratch, const Matmul *jobs, int k) {
    MatmulCall c = {.jobs = jobs, .panels = (uint8_t *)(((uintptr_t)scratch + 63) / 64 * 64)};
    uint8_t *at = c.panels + (size_t)p->threads * PANEL_BYTES;
    for (int j = 0; j < k; j++) {
        const Matmul *job = &jobs[j];
        size_t cols = job->w->cols, row_bytes = quant_row_bytes(job->w->type, cols);
        int same = 0, tiles = job->n == 1 ? 1 : (job->n + TOKENS - 1) / TOKENS;
        bool pack = job->n == 1 ? formats[job->w->type].unpack != NULL : tiled(job->w);
        c.act[j] = job->x;
        c.pack[j + 1] = c.pack[j];
        while (same < j && (jobs[same].x != job->x || jobs[same].n != job->n ||
                            c.act[same] == job->x || (size_t)jobs[same].w->cols != cols ||
                            act_parts(jobs[same].w) != act_parts(job->w))) same++;
        if (pack && same < j) c.act[j] = c.act[same];
        else if (pack) {
            c.act[j] = at;
            c.pack[j + 1] += tiles;
            at += job->n == 1 ? (cols + 255) / 256 * sizeof(Act)
                              : tiles * act_tiles(job->w, cols) * sizeof(ActTile);
        }
        // one token: long runs of memory (128 KB read 10 % faster than 32), but four tasks a thread
        size_t rows = job->n > 1 ? PANEL : larger(131072 / row_bytes, 1);
        size_t fourth = larger(job->w->rows / (4 * p->threads), 1);
        if (job->n == 1 && rows > fourth) rows = fourth;
        c.rows[j] = rows;
        c.task[j + 1] = c.task[j] + (job->n ? (int)((job->w->rows + rows - 1) / rows) : 0);
    }
    parallel(p, pack_task, &c, c.pack[k]);
    parallel(p, matmul_task, &c, c.task[k]);
}
// ---- 5. attention ----
//
// Online softmax (arXiv 1805.02867, 2205.14135): the cache is read in blocks of KEYS rows; each
// query keeps the largest score so far, the sum of exp(score - largest) and the sum of the values
// so weighted, and scales them down when a larger score comes. No n x n buffer. The query heads
// that share a KV head share each block, converted from f16 once.

#if defined(SIMD_AMX)
enum { KEYS = 64, SPLIT = 256, LANE_ROWS = 128, LANE_TILES = 2 };
#else
enum { KEYS = 64, SPLIT = 256, LANE_ROWS = 64, LANE_TILES = 1 };
#endif
static const float LEAST = -1e29f; // largest score so far, before the first; hidden: ten times less

typedef struct {
    const float *q;                // [n][n_head][hd], with RoPE applied
    float *out;                    // [n][n_head][vd]
    const uint16_t *k, *v;         // [n_kv][rows][hd], [n_kv][rows][vd] f16
    const int32_t *pos_k;          // [rows] position in each row, -1: empty
    int rows, pos, n;              // queries at pos .. pos+n-1
    int n_head, n_kv, hd, vd, window, keep;
    bool causal;
    float scale, softcap;          // softcap 0: none
    const float *sinks, *slopes;   // [n_head] or NULL
} Attention;

typedef struct {
    const Attention *a;
    float *parts, *work;           // [n_head][splits] of Part; [threads][work_size]
    size_t work_size;
    int32_t *split;                // [splits] those in which something is visible
    int splits, queries;
} AttentionCall;

// exp to 1e-7: 2^i * e^r with i = x / ln 2 rounded, |r| <= 0.35, by Taylor's series. 0 below -87.7,
// infinite above 88.3. No call and no branch, so that loops over it become vector code.
static inline float exp_fast(float x) {
    x = x < -88 ? -88 : x;
    x = x > 89 ? 89 : x;
    float y = x * 1.44269504f + MAGIC, i = y - MAGIC;
    float r = x - i * 0.693145752f - i * 1.42860677e-6f;
    float p = 1 + r * (1 + r * (0.5f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f +
              r * (1 / 720.0f + r * (1 / 5040.0f)))))));
    int32_t bits;
    memcpy(&bits, &y, sizeof bits);
    bits = (int32_t)((uint32_t)(bits - MAGIC_BITS + 127) << 23);
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

INLINE bool row_visible(const Attention *a, int pos_k, int pos_q) {
    int near = (pos_k <= pos_q) & ((pos_q - pos_k < a->window) | (pos_k < a->keep));
    return (pos_k >= 0) & (near | !a->causal);   // & and |, not && and ||: no branches
}

// of rows r .. r+KEYS-1: does any query at first .. last see any (1), do all see all (2)?
static int block_visible(const Attention *a, int r, int first, int last) {
    int any = 0, all = 1, causal = a->causal;
    for (int j = r; j < r + KEYS && j < a->rows; j++) {
        int p = a->pos_k[j], pinned = p < a->keep;
        any |= (p >= 0) & (((p <= last) & ((first - p < a->window) | pinned)) | !causal);
        all &= (p >= 0) & (((p <= first) & ((last - p < a->window) | pinned)) | !causal);
    }
    return any ? 1 + all : 0;
}

// n products to scores: scaled, capped, less ALiBi's slope times the distance
INLINE void scores_finish(const Attention *a, float *s, int n) {
    for (int i = 0; i < n; i++) s[i] *= a->scale;
    if (a->softcap > 0)   // cap * tanh(s / cap)
        for (int i = 0; i < n; i++)
            s[i] = a->softcap * (1 - 2 / (exp_fast(2 * s[i] / a->softcap) + 1));
}

// out[t][vd] += sum over keys of x[t][key * step] * values[key][vd]
INLINE void add_values(const uint16_t *v, int vd, int keys, const float *x, size_t next,
                       size_t step, int tokens, float *out, size_t stride) {
    uint16_t edge[KEYS][TILE] = {{0}};   // the last columns, where vd is not a multiple of 16
    for (int e = 0; e < vd; e += TILE) {
        vf tile[FLOAT_TOKENS][VECTORS];
        int some = vd - e < TILE ? vd - e : TILE;
        for (int j = 0; some < TILE && j < keys; j++)
            memcpy(edge[j], v + (size_t)j * vd + e, 2 * some);
        tile_float(load_f16, 2, some < TILE ? edge[0] : v + e, 2 * (some < TILE ? TILE : vd), x,
                   next, step, keys, tokens, tile);
        for (int t = 0; t < tokens; t++) {
            const float *add = (const float *)tile[t];
            for (int i = 0; i < some; i++) out[t * stride + e + i] += add[i];
        }
    }
}

// -- many queries --
// 16 queries (of all heads of a KV head) lie across the lanes, so that maxima, sums and masks need
// no sums across lanes: scores are [key][16], results [16][vd]. The keys and values of a block are
// brought into the form that both products take once for all lanes.

static int padded(int width) { return (width + 31) / 32 * 32; }
static size_t packed_bytes(int rows, int width) { return (size_t)rows * padded(width) * 4; }

typedef struct {
    float *out;                    // [16][padded(vd)]
    float top[TILE], sum[TILE], slope[TILE];
    int32_t pos[TILE];
} Lanes;

static void fade_row(float *out, int n, float fade) {
    for (int i = 0; i < n; i++) out[i] *= fade;
}

// scores [keys][16] to weights; what came before fades
static void lanes_softmax(const Attention *a, int r, int keys, bool masked, Lanes *l,
                          float *restrict s) {
    vf top[VECTORS], sum[VECTORS] = {{0}};
    float most[TILE], total[TILE];
    memcpy(top, l->top, sizeof top);
    scores_finish(a, s, keys * TILE);
    for (int j = 0; j < keys; j++) {
        int p = a->pos_k[r + j];
        float *row = s + TILE * j;
        for (int i = 0; a->slopes && i < TILE; i++)
            row[i] -= l->slope[i] * (float)abs(l->pos[i] - p);
        for (int i = 0; masked && i < TILE; i++)
            row[i] = row_visible(a, p, l->pos[i]) ? row[i] : 10 * LEAST;
        UNROLL for (int v = 0; v < VECTORS; v++)
            top[v] = larger_of(top[v], load_f32(row + v * LANES));
    }
    memcpy(most, top, sizeof most);
    for (int j = 0; j < keys; j++) {
        float *row = s + TILE * j;
        for (int i = 0; i < TILE; i++) row[i] = exp_fast(row[i] - most[i]);
        UNROLL for (int v = 0; v < VECTORS; v++) sum[v] += load_f32(row + v * LANES);
    }
    memcpy(total, sum, sizeof total);
    for (int i = 0; i < TILE; i++) {
        float fade = exp_fast(l->top[i] - most[i]);
        l->sum[i] = l->sum[i] * fade + total[i];
        l->top[i] = most[i];
        if (fade < 1) fade_row(l->out + i * padded(a->vd), a->vd, fade);
    }
}

#if defined(SIMD_AMX)
// All in two bf16, as float weights are: three products, and still four times as fast as floats.
// Keys and values, f16, lose nothing; queries and weights keep 17 bits.
// [16][hd] to pairs [hd/32][2][16][16][2]
static void pack_queries(const float *q, int hd, uint32_t *to) {
    for (int i = 0; i < hd; i += 32, to += 2 * TILE_SIZE / 4) {
        uint16_t rows[2][TILE][32];
        for (int k = 0; k < TILE; k++) {
            float x[32] = {0};
            memcpy(x, q + k * hd + i, (hd - i < 32 ? hd - i : 32) * sizeof *x);
            store_parts(rows[0][k], sizeof *rows, 2, load_f32(x), load_f32(x + 16));
        }
        for (int p = 0; p < 2; p++)
            transpose((uint32_t *)rows[p], 16, 16, 0, to + p * TILE_SIZE / 4);
    }
}

// lanes of two floats to pairs of bf16, upper bits and, a tile further, what remains
INLINE void store_pairs(uint32_t *to, vf a, vf b) {
    for (int p = 0; p < 2; p++, to += TILE_SIZE / 4) {
        vf x = upper_bits(a), y = upper_bits(b);
        vi pairs = (vi)_mm512_srli_epi32((__m512i)x, 16) | (vi)y;
        memcpy(to, &pairs, sizeof pairs);
        a -= x;
        b -= y;
    }
}

// keys to rows of ActTile [KEYS/32][hd/32][2], values to pairs of rows [vd/16][KEYS/32][2]
static void pack_block(const Attention *a, const uint16_t *k, const uint16_t *v, int keys,
                       void *to) {
    ActTile *tile = to;
    int deep = padded(a->hd) / 32, wide = padded(a->vd) / 16;
    for (int j = 0; j < KEYS; j++)
        for (int i = 0; i < deep; i++) {
            uint16_t edge[32] = {0}, *row = tile[(j / 32 * deep + i) * 2].x[j / 16 % 2][j % 16];
            const uint16_t *x = k + (size_t)j * a->hd + 32 * i;
            int some = j >= keys ? 0 : a->hd - 32 * i < 32 ? a->hd - 32 * i : 32;
            if (some < 32) x = memcpy(edge, x, 2 * some);
            store_parts(row, sizeof *tile, 2, load_f16(x), load_f16(x + 16));
        }
    uint32_t *pairs = (uint32_t *)(tile + KEYS / 32 * deep * 2);
    for (int i = 0; i < wide; i++)
        for (int j = 0; j < KEYS; j += 2) {
            uint16_t edge[2][16] = {{0}};
            const uint16_t *x[2] = {edge[0], edge[1]};
            int some = a->vd - 16 * i < 16 ? a->vd - 16 * i : 16;
            for (int y = 0; y < 2 && j + y < keys && some > 0; y++) {
                x[y] = v + (size_t)(j + y) * a->vd + 16 * i;
                if (some < 16) x[y] = memcpy(edge[y], x[y], 2 * some);
            }
            store_pairs(pairs + (i * KEYS / 32 + j / 32) * 2 * TILE_SIZE / 4 + j / 2 % 16 * 16,
                        load_f16(x[0]), load_f16(x[1]));
        }
}

static void lanes_block(const Attention *a, int r, int keys, bool masked, const void *q,
                        const void *block, const uint16_t *v, Lanes *l) {
    float s[2][KEYS][TILE] __attribute__((aligned(64))), sum[4][TILE][TILE];
    int deep = padded(a->hd) / 32, width = padded(a->vd);
    const ActTile *k = block;
    const uint8_t *pairs = (const uint8_t *)(k + KEYS / 32 * deep * 2);
    ActTile p[KEYS / 32][2];
    (void)v;
    for (int j = 0; j < KEYS; j += 32) {
        float *out[] = {s[0][j], s[1][j], s[0][j + 16], s[1][j + 16]};
        multiply_tiles(k + j / 32 * deep * 2, 2, q, 2, packed_bytes(TILE, a->hd), deep, out);
    }
    for (int t = 0; t < 2; t++) {
        lanes_softmax(a, r, keys, masked, &l[t], s[t][0]);
        memset(s[t][keys], 0, (KEYS - keys) * sizeof s[t][0]);
        for (int j = 0; j < KEYS; j += 32) {
            uint32_t part[2][TILE][TILE];
            for (int i = 0; i < TILE; i++)
                store_pairs(part[0][i], load_f32(s[t][j + 2 * i]), load_f32(s[t][j + 2 * i + 1]));
            for (int y = 0; y < 2; y++)
                transpose(part[y][0], 16, 16, 0, (uint32_t *)p[j / 32][y].x[t]);
        }
    }
    for (int e = 0; e < width; e += 32, pairs += packed_bytes(KEYS, 32)) {
        float *out[] = {sum[0][0], sum[1][0], sum[2][0], sum[3][0]};
        multiply_tiles(p[0], 2, pairs, 2, packed_bytes(KEYS, 32) / 2, KEYS / 32, out);
        for (int y = 0; y < 4; y++)
            for (int i = 0; i < TILE; i++) {
                float *to = l[y / 2].out + i * width + e + y % 2 * TILE;
                for (int x = 0; x < TILE; x++) to[x] += sum[y][i][x];
            }
    }
}
#else
// Both products are the float tile: K rows, broadcast, with columns of queries; columns of scores,
// broadcast, with V rows.
static void pack_queries(const float *q, int hd, float *to) {   // [16][hd] to [hd][16]
    for (int e = 0; e < hd; e++)
        for (int k = 0; k < TILE; k++) to[TILE * e + k] = q[k * hd + e];
}

static void pack_block(const Attention *a, const uint16_t *k, const uint16_t *v, int keys,
                       float *to) {
    size_t i = 0, n = (size_t)keys * a->hd;
    (void)v;
    for (; i + LANES <= n; i += LANES) {
        vf x = load_f16(k + i);
        memcpy(to + i, &x, sizeof x);
    }
    for (; i < n; i++) to[i] = quant_f16_to_f32(k[i]);
}

static void lanes_block(const Attention *a, int r, int keys, bool masked, const float *q,
                        const float *k, const uint16_t *v, Lanes *l) {
    float s[KEYS * TILE] __attribute__((aligned(64)));
    int width = padded(a->vd);
    vf tile[FLOAT_TOKENS][VECTORS];
    for (int j = 0; j < keys; j += FLOAT_TOKENS) {
        tile_float(load_f32, 4, q, 4 * TILE, k + (size_t)j * a->hd, a->hd, 1, a->hd, FLOAT_TOKENS,
                   tile);
        memcpy(s + TILE * j, tile, sizeof tile);
    }
    lanes_softmax(a, r, keys, masked, l, s);
    for (int i = 0; i < TILE; i += FLOAT_TOKENS)
        add_values(v, a->vd, keys, s + i, 1, TILE, FLOAT_TOKENS, l->out + i * width, width);
}
#endif

// one KV head and `queries` queries of its heads
static void prefill_task(void *ctx, int i, int thread) {
    AttentionCall *c = ctx;
    const Attention *a = c->a;
    int group = a->n_head / a->n_kv, h = i % a->n_kv, first = i / a->n_kv * c->queries;
    int some = a->n - first < c->queries ? a->n - first : c->queries, count = some * group;
    int n_lanes = (count + LANE_TILES * TILE - 1) / (LANE_TILES * TILE) * LANE_TILES;
    int width = padded(a->vd);
    size_t q_size = packed_bytes(TILE, a->hd) / sizeof(float);
    float *rows = c->work + thread * c->work_size, *k = rows + TILE * a->hd;
    float *q = k + (packed_bytes(KEYS, a->hd) + packed_bytes(KEYS, a->vd)) / sizeof(float);
    float *out = q + n_lanes * q_size;
    Lanes *lanes = (Lanes *)(out + (size_t)n_lanes * TILE * width);
    memset(out, 0, (size_t)n_lanes * TILE * width * sizeof *out);
    for (int j = 0; j < n_lanes * TILE; j++) {
        Lanes *l = &lanes[j / TILE];
        int at = j < count ? j : count - 1, lane = j % TILE, head = h * group + at % group,
            query = first + at / group;
        memcpy(rows + lane * a->hd, a->q + ((size_t)query * a->n_head + head) * a->hd,
               a->hd * sizeof *rows);
        l->out = out + (size_t)j / TILE * TILE * width;
        l->top[lane] = LEAST;
        l->sum[lane] = 0;
        l->slope[lane] = a->slopes ? a->slopes[head] : 0;
        l->pos[lane] = a->pos + query;
        if (lane == TILE - 1) pack_queries(rows, a->hd, (void *)(q + j / TILE * q_size));
    }
    tiles_begin();
    for (int r = 0; r < a->rows; r += KEYS) {
        int visible = block_visible(a, r, a->pos + first, a->pos + first + some - 1);
        if (!visible) continue;
        int keys = a->rows - r < KEYS ? a->rows - r : KEYS;
        size_t row = (size_t)h * a->rows + r;
        pack_block(a, a->k + row * a->hd, a->v + row * a->vd, keys, (void *)k);
        for (int j = 0; j < n_lanes; j += LANE_TILES)
            lanes_block(a, r, keys, visible < 2, q + j * q_size, k, a->v + row * a->vd, &lanes[j]);
    }
    tiles_end();
    for (int j = 0; j < count; j++) {
        const Lanes *l = &lanes[j / TILE];
        int lane = j % TILE, head = h * group + j % group;
        float *to = a->out + ((size_t)(first + j / group) * a->n_head + head) * a->vd;
        float sum = l->sum[lane] + (a->sinks ? exp_fast(a->sinks[head] - l->top[lane]) : 0);
        memcpy(to, l->out + lane * width, a->vd * sizeof *to);
        fade_row(to, a->vd, sum > 0 ? 1 / sum : 0);
    }
}

// -- one query --
// A thread takes SPLIT rows of one KV head; the splits of a head are joined at the end. Bound by
// memory: 2 * (hd + vd) bytes per row and KV head, each read once for all its query heads.

typedef struct { float top, sum, out[]; } Part;   // of one head and split

static size_t part_size(const Attention *a) { return 2 + a->vd; }

// scores of `heads` heads with KEYS rows
INLINE void decode_scores(const Attention *a, const float *q, const uint16_t *k, const uint16_t *v,
                          int keys, int heads, float *s) {
    for (int j = 0; j < keys; j++, k += a->hd) {
        prefetch(k + AHEAD / 2, 2 * a->hd);
        prefetch(v + (size_t)j * a->vd, 2 * a->vd);   // needed when the scores are known
        vf sum[4] = {{0}};
        int e = 0;
        for (; e + LANES <= a->hd; e += LANES) {
            vf key = load_f16(k + e);
            UNROLL for (int h = 0; h < heads; h++) sum[h] += key * load_f32(q + h * a->hd + e);
        }
        UNROLL for (int h = 0; h < heads; h++) {
            float rest = 0;
            for (int i = e; i < a->hd; i++) rest += quant_f16_to_f32(k[i]) * q[h * a->hd + i];
            s[h * KEYS + j] = sum_lanes(sum[h]) + rest;
        }
    }
}

static void decode_softmax(const Attention *a, int r, int keys, int head, float *restrict s,
                           Part *restrict part) {
    float slope = a->slopes ? a->slopes[head] : 0, top[TILE], sum[TILE] = {0};
    for (int i = 0; i < TILE; i++) top[i] = part->top;
    scores_finish(a, s, keys);
    for (int j = 0; j < keys; j++) {
        int p = a->pos_k[r + j];
        s[j] = row_visible(a, p, a->pos) ? s[j] - slope * (float)abs(a->pos - p) : 10 * LEAST;
    }
    for (int j = keys; j < KEYS; j++) s[j] = 10 * LEAST;
    for (int j = 0; j < KEYS; j += TILE)
        for (int i = 0; i < TILE; i++) top[i] = s[j + i] > top[i] ? s[j + i] : top[i];
    for (int i = 1; i < TILE; i++) top[0] = top[i] > top[0] ? top[i] : top[0];
    for (int j = 0; j < KEYS; j++) s[j] = exp_fast(s[j] - top[0]);
    for (int j = 0; j < KEYS; j += TILE)
        for (int i = 0; i < TILE; i++) sum[i] += s[j + i];
    for (int i = 1; i < TILE; i++) sum[0] += sum[i];
    float fade = exp_fast(part->top - top[0]);
    part->top = top[0];
    part->sum = part->sum * fade + sum[0];
    if (fade < 1) fade_row(part->out, a->vd, fade);
}

INLINE void decode_heads(const Attention *a, int r, int keys, int head, int heads, float *s,
                         float *parts, size_t stride) {
    size_t row = (size_t)(head / (a->n_head / a->n_kv)) * a->rows + r;
    decode_scores(a, a->q + (size_t)head * a->hd, a->k + row * a->hd, a->v + row * a->vd, keys,
                  heads, s);
    for (int h = 0; h < heads; h++)
        decode_softmax(a, r, keys, head + h, s + h * KEYS, (Part *)(parts + h * stride));
    add_values(a->v + row * a->vd, a->vd, keys, s, KEYS, 1, heads, parts + 2, stride);
}

static void decode_task(void *ctx, int i, int thread) {
    AttentionCall *c = ctx;
    const Attention *a = c->a;
    int group = a->n_head / a->n_kv, h = i % a->n_kv, split = c->split[i / a->n_kv];
    size_t stride = part_size(a) * c->splits;
    float *parts = c->parts + (size_t)h * group * stride + i / a->n_kv * part_size(a);
    float s[4 * KEYS];
    (void)thread;
    for (int g = 0; g < group; g++) {
        float *part = parts + g * stride;
        memset(part, 0, part_size(a) * sizeof *part);
        part[0] = LEAST;
    }
    for (int r = split * SPLIT; r < (split + 1) * SPLIT && r < a->rows; r += KEYS) {
        if (!block_visible(a, r, a->pos, a->pos)) continue;
        int keys = a->rows - r < KEYS ? a->rows - r : KEYS, g = 0;
        for (; g + 4 <= group; g += 4)
            decode_heads(a, r, keys, h * group + g, 4, s, parts + g * stride, stride);
        for (; g + 2 <= group; g += 2)
            decode_heads(a, r, keys, h * group + g, 2, s, parts + g * stride, stride);
        for (; g < group; g++)
            decode_heads(a, r, keys, h * group + g, 1, s, parts + g * stride, stride);
    }
}

static void join_task(void *ctx, int h, int thread) {
    AttentionCall *c = ctx;
    const Attention *a = c->a;
    const float *parts = c->parts + (size_t)h * c->splits * part_size(a);
    float *out = a->out + (size_t)h * a->vd, top = a->sinks ? a->sinks[h] : LEAST;
    (void)thread;
    for (int i = 0; i < c->splits; i++) {
        const float *part = parts + i * part_size(a);
        top = part[0] > top ? part[0] : top;
    }
    float sum = a->sinks ? exp_fast(a->sinks[h] - top) : 0;
    memset(out, 0, a->vd * sizeof *out);
    for (int i = 0; i < c->splits; i++) {
        const float *part = parts + i * part_size(a), fade = exp_fast(part[0] - top);
        sum += part[1] * fade;
        for (int e = 0; part[1] > 0 && e < a->vd; e++) out[e] += part[2 + e] * fade;
    }
    for (int e = 0; e < a->vd; e++) out[e] = sum > 0 ? out[e] / sum : 0;
}

static size_t work_floats(int n_head, int hd, int vd) {   // of a thread
    size_t lanes = n_head + LANE_ROWS + LANE_TILES * TILE, wide = padded(hd) + padded(vd);
    return (TILE + KEYS + lanes) * wide + lanes / TILE * (sizeof(Lanes) / sizeof(float)) + 16;
}

// bytes for layers of at most n_head heads and rings of at most `rows` rows
static size_t attention_scratch(int n_head, int hd, int vd, int rows, int threads) {
    size_t splits = (rows + SPLIT - 1) / SPLIT;
    return 4 * (work_floats(n_head, hd, vd) / 16 * 16 * threads +
                (n_head * (2 + vd) + 1) * splits) +
           64;
}

static void attention(Pool *p, void *scratch, const Attention *a) {
    int group = a->n_head / a->n_kv, queries = group < LANE_ROWS ? LANE_ROWS / group : 1;
    AttentionCall c = {.a = a, .work = scratch, .queries = queries,
                       .work_size = work_floats(a->n_head, a->hd, a->vd) / 16 * 16};
    if (a->n > 1) {
        parallel(p, prefill_task, &c, a->n_kv * ((a->n + queries - 1) / queries));
        return;
    }
    c.split = (int32_t *)(c.work + c.work_size * p->threads);
    c.parts = (float *)c.split + (a->rows + SPLIT - 1) / SPLIT;
    for (int r = 0, last = -1; r < a->rows; r += KEYS)
        if (last != r / SPLIT && block_visible(a, r, a->pos, a->pos))
            c.split[c.splits++] = last = r / SPLIT;
    parallel(p, decode_task, &c, a->n_kv * c.splits);
    parallel(p, join_task, &c, a->n_head);
}

// ---- 7. ops ----
//
// What happens between the matrix products, one token's row at a time: each_row runs a step for
// all rows of a chunk on all threads. Each op has a Metal kernel of the same name.

typedef struct {
    float temp, top_p, min_p, repeat_penalty;
    int top_k, repeat_last_n;
    uint64_t seed;
} Sampling;

typedef struct { float logit; int32_t id; } Candidate;   // for the sampler
typedef struct {
    int window, chunk, threads, keep;   // 0: default
    bool cpu, gpu_block, gpu_int8;      // no GPU; its one-dispatch layers, its int8 prefill
    Sampling sampling;
} Options;

typedef struct {
    uint16_t *k, *v;            // [n_kv][rows][hd], [n_kv][rows][vd] f16; keys with RoPE applied
    int32_t *pos;               // [rows] position in each row, -1: empty
    int rows, window, keep;
    float *conv, *state;        // delta-net: [conv-1][channels], [n_value][dv][dk]
} Cache;

typedef struct Session {
    const Model *m;
    Options o;
    Pool pool;
    bool pool_open;
    void *kv_base, *scratch_base;   // two mappings
    size_t kv_bytes, scratch_bytes;
    Cache *cache;               // [n_layer]
    float *recurrent, *saved;   // all conv and state buffers; a copy from before saved_pos
    size_t n_recurrent;
    int saved_pos;
    int32_t *history;           // [n_history] tokens whose rows the caches hold
    int n_history, history_cap;
    uint64_t rng;
    volatile sig_atomic_t *stop;   // set from outside: ends evaluation between chunks
    // this chunk
    const int32_t *ids;         // [n]
    int n, pos, l;              // tokens, first position, layer
    // scratch: n = up to chunk rows
    float *x;                   // [n][dim] residual stream
    float *h, *out;             // [n][dim] normed input and result of a block
    float *rope[2];             // [n][n_rot] cos, sin pairs: whole context, windowed layers
    double *freq[2];            // [n_rot/2] radians per position
    float rope_mag[2];
    float *q, *k, *v, *att;     // [n][n_head][hd], [n][n_kv][hd], [n][n_kv][vd], [n][n_head][vd]
    float *mix, *z, *ba;        // delta-net: [n][channels], [n][n_value*dv], [n][2*n_value]
    float *decay, *write;       // [n][n_value]
    float *gate, *up;           // FFN: [n][ff]
    float *route, *gathered, *expert_out;   // experts: [n][n_expert], [rows][dim], [rows][dim]
    int32_t *chosen, *order;    // [n][n_used] experts, and the same sorted by expert
    float *weight;              // [n][n_used]
    float *logits;              // [LOGIT_ROWS][n_vocab]
    Candidate *candidates;      // [n_vocab]
    float *slopes;              // [n_head] ALiBi
    void *matmul_scratch, *attention_scratch;
    void *gpu;
} Session;

enum { LOGIT_ROWS = 16 };

typedef void RowFn(Session *s, const Layer *w, int i);
typedef struct { Session *s; const Layer *w; RowFn *fn; } RowCall;

static void row_task(void *ctx, int i, int thread) {
    RowCall *c = ctx;
    (void)thread;
    c->fn(c->s, c->w, i);
}

static void each_row(Session *s, const Layer *w, int n, RowFn *fn) {
    RowCall c = {s, w, fn};
    parallel(&s->pool, row_task, &c, n);
}

// Sums run in 16 independent lanes: that is what lets a compiler use SIMD without -ffast-math.
static float sum16(const float *x, int n, float mean, bool squares) {
    float lane[16] = {0}, sum = 0;
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) {
            float d = x[i + j] - mean;
            lane[j] += squares ? d * d : d;
        }
    for (; i < n; i++) lane[0] += squares ? (x[i] - mean) * (x[i] - mean) : x[i] - mean;
    for (int j = 0; j < 16; j++) sum += lane[j];
    return sum;
}

// RMSNorm (arXiv 1910.07467) or LayerNorm of each group of `group` values of x[n]; the weights
// w[w->n] serve every group, or each its own part
static void norm(float *out, const float *x, int n, const Norm *w, int kind, float eps) {
    int group = w->group ? w->group : n;
    for (int g = 0; g < n; g += group, x += group, out += group) {
        float mean = kind == RMS ? 0 : sum16(x, group, 0, false) / group;
        float scale = 1 / sqrtf(sum16(x, group, mean, true) / group + eps);
        const float *weight = w->w ? w->w + g % w->n : NULL, *bias = w->b ? w->b + g % w->n : NULL;
        for (int i = 0; i < group; i++) out[i] = (x[i] - mean) * scale;
        for (int i = 0; weight && i < group; i++) out[i] *= weight[i];
        for (int i = 0; bias && i < group; i++) out[i] += bias[i];
    }
}

// RoPE (arXiv 2104.09864): turns each pair by its angle at this position
static void rope(float *x, const float *turn, int n_rot, int pairing) {
    int step = pairing == NORM ? 2 : 1, mate = pairing == NORM ? 1 : n_rot / 2;
    for (int i = 0; i < n_rot / 2; i++) {
        float c = turn[2 * i], s = turn[2 * i + 1], *a = x + i * step, *b = a + mate, t = *a;
        *a = t * c - *b * s;
        *b = t * s + *b * c;
    }
}

// Radians per position of each pair, and a factor on the cosines and sines. Scaled models slow
// the angles down: all of them (linear), by a factor each (Llama 3, longrope), or the low
// frequencies more than the high ones (YaRN, arXiv 2309.00071). In double: at position 100,000 a
// float angle is off by 0.005.
static float rope_frequencies(const Model *m, bool local, int window, double *freq) {
    const Config *c = &m->config;
    double base = local ? c->rope_base_local : c->rope_base;
    bool plain_local = local && c->arch->flags & LOCAL_UNSCALED, yarn = c->yarn && !plain_local;
    double scale = plain_local ? 1 : 1.0 / c->rope_factor;
    const float *divide = m->freqs                 ? m->freqs
                          : window > c->n_ctx_orig ? m->freqs_long
                                                   : m->freqs_short;
    double ends[2] = {c->yarn_fast, c->yarn_slow};
    for (int i = 0; i < 2; i++)
        ends[i] = c->n_rot * log(c->n_ctx_orig / (ends[i] * 2 * M_PI)) / (2 * log(base));
    double low = fmax(0, floor(ends[0])), high = fmin(c->n_rot - 1, ceil(ends[1]));
    for (int i = 0; i < c->n_rot / 2; i++) {
        double plain = pow(base, -2.0 * i / c->n_rot) / (divide ? divide[i] : 1);
        double ramp = 1 - fmin(1, fmax(0, (i - low) / fmax(0.001, high - low)));
        freq[i] = yarn ? plain * (scale * (1 - ramp) + ramp) : plain * scale;
    }
    double far = yarn && scale < 1 ? 0.1 * log(1 / scale) : 0;
    return (plain_local ? 1 : c->rope_attn) * (1 + far) / (1 + c->yarn_log * far);
}

// y = act(gate) * up over n values; up alone where there is no gate
QUANT_INLINE void activate_as(float *out, const float *gate, const float *up, int n, int act) {
    const float *x = gate ? gate : up;
    for (int i = 0; i < n; i++) {
        float g = x[i], u = gate ? up[i] : 1, y;
        if (act == SWIGLU_OAI) {   // gpt-oss
            g = g < 7 ? g : 7;
            u = 1 + (u < -7 ? -7 : u > 7 ? 7 : u);
        }
        if (act == RELU2) y = g > 0 ? g * g : 0;
        else if (act == GELU) y = g / (1 + exp_fast(-1.595769122f * (g + 0.044715f * g * g * g)));
        else y = g / (1 + exp_fast(act == SILU ? -g : -1.702f * g));
        out[i] = y * u;
    }
}

static void activate(float *out, const float *gate, const float *up, int n, int act) {
    switch (act) {   // a loop for each, which then is vector code
    case SILU:  activate_as(out, gate, up, n, SILU); break;
    case GELU:  activate_as(out, gate, up, n, GELU); break;
    case RELU2: activate_as(out, gate, up, n, RELU2); break;
    default:    activate_as(out, gate, up, n, SWIGLU_OAI);
    }
}

static void add(float *x, const float *y, int n, float scale) {
    for (int i = 0; i < n; i++) x[i] += y[i] * scale;
}

// ---- 8. mixers ----
//
// Two blocks that take more than a product and an activation: experts, and linear attention.

// -- experts --

// The router's choice for one token: probabilities, the n_used best, their weights.
static void choose_experts(Session *s, const Layer *unused, int i) {
    const Config *c = &s->m->config;
    (void)unused;
    float *p = s->route + (size_t)i * c->n_expert, *weight = s->weight + (size_t)i * c->n_used;
    int32_t *chosen = s->chosen + (size_t)i * c->n_used;
    float top = p[0], sum = 0, scale = c->expert_scale;
    for (int e = 1; e < c->n_expert; e++) top = fmaxf(top, p[e]);
    for (int e = 0; e < c->n_expert && c->gating == SOFTMAX; e++) sum += p[e] = expf(p[e] - top);
    for (int e = 0; e < c->n_expert && c->gating != LATE_SOFTMAX; e++)
        p[e] = c->gating == SOFTMAX ? p[e] / sum : 1 / (1 + expf(-p[e]));
    for (int k = 0; k < c->n_used; k++) {
        int best = -1;
        for (int e = 0; e < c->n_expert; e++) {
            bool taken = false;
            for (int j = 0; j < k; j++) taken |= chosen[j] == e;
            if (!taken && (best < 0 || p[e] > p[best])) best = e;
        }
        chosen[k] = best;
        weight[k] = c->gating == LATE_SOFTMAX ? expf(p[best] - top) : p[best];
    }
    sum = 0;
    for (int k = 0; k < c->n_used; k++) sum += weight[k];
    if (c->gating == LATE_SOFTMAX) scale /= sum;
    else if (c->gates_normed) scale /= fmaxf(sum, 6.103515625e-5f);
    for (int k = 0; k < c->n_used; k++) weight[k] *= scale;
}

static void activate_expert_row(Session *s, const Layer *w, int i) {
    size_t at = (size_t)i * w->ff;
    activate(s->gate + at, s->gate + at, s->up + at, w->ff, s->m->config.arch->act);
}

// Runs `rows` of the sorted order, which belong to whole experts: their tokens side by side, so
// that an expert's weights are read and decoded once for all of them.
static void run_experts(Session *s, const Layer *w, const float *h, const int32_t *order, int rows)
{
    const Config *c = &s->m->config;
    Matrix gate[MAX_JOBS / 2], up[MAX_JOBS / 2], down[MAX_JOBS / 2];
    Matmul in[MAX_JOBS] = {{0}}, back[MAX_JOBS / 2] = {{0}};
    size_t dim = c->dim, ff = w->ff;
    int jobs = 0;
    for (int r = 0, n = 0; r < rows; r += n, jobs++) {
        int e = s->chosen[order[r]];
        for (n = 0; r + n < rows && s->chosen[order[r + n]] == e; n++)
            memcpy(s->gathered + (r + n) * dim, h + order[r + n] / c->n_used * dim,
                   dim * sizeof *h);
        gate[jobs] = matrix_expert(&w->gate, e);
        up[jobs] = matrix_expert(&w->up, e);
        down[jobs] = matrix_expert(&w->down, e);
        in[2 * jobs] = (Matmul){&gate[jobs], s->gathered + r * dim, s->gate + r * ff, n};
        in[2 * jobs + 1] = (Matmul){&up[jobs], s->gathered + r * dim, s->up + r * ff, n};
        back[jobs] = (Matmul){&down[jobs], s->gate + r * ff, s->expert_out + r * dim, n};
    }
    matmul(&s->pool, s->matmul_scratch, in, 2 * jobs);
    each_row(s, w, rows, activate_expert_row);
    matmul(&s->pool, s->matmul_scratch, back, jobs);
    for (int r = 0; r < rows; r++)
        add(s->out + order[r] / c->n_used * dim, s->expert_out + r * dim, dim, s->weight[order[r]]);
}

static void activate_shared_row(Session *s, const Layer *w, int i) {
    int ff = w->shared_up.rows;
    size_t at = (size_t)i * ff;
    activate(s->gate + at, s->gate + at, s->up + at, ff, s->m->config.arch->act);
}

static void add_shared_row(Session *s, const Layer *w, int i) {
    size_t dim = s->m->config.dim;
    float gate = w->shared_router.data ? 1 / (1 + expf(-s->route[i])) : 1;
    add(s->out + i * dim, s->expert_out + i * dim, dim, gate);
}

// the expert that sees every token, with its own weight where there is a router for it
static void shared_expert(Session *s, const Layer *w, const float *h, int n) {
    Matmul in[] = {{&w->shared_gate, h, s->gate, n}, {&w->shared_up, h, s->up, n},
                   {&w->shared_router, h, s->route, n}};
    Matmul back = {&w->shared_down, s->gate, s->expert_out, n};
    matmul(&s->pool, s->matmul_scratch, in, w->shared_router.data ? 3 : 2);
    each_row(s, w, n, activate_shared_row);
    matmul(&s->pool, s->matmul_scratch, &back, 1);
    each_row(s, w, n, add_shared_row);
}

// out = sum of the chosen experts' FFNs. Tokens are sorted by expert (a counting sort, stable, so
// that a token's sum does not depend on its neighbours) and run in batches that fit the buffers.
static void experts(Session *s, const Layer *w, const float *h, int n) {
    const Config *c = &s->m->config;
    Matmul router = {&w->router, h, s->route, n};
    matmul(&s->pool, s->matmul_scratch, &router, 1);
    each_row(s, w, n, choose_experts);
    int rows = n * c->n_used, limit = n > c->n_used ? n : c->n_used, at = 0;
    for (int e = 0; e < c->n_expert; e++)
        for (int i = 0; i < rows; i++)
            if (s->chosen[i] == e) s->order[at++] = i;
    memset(s->out, 0, (size_t)n * c->dim * sizeof *s->out);
    for (int first = 0, last; first < rows; first = last) {
        int jobs = 0;
        last = first;
        for (int next; last < rows && jobs < MAX_JOBS / 2; last = next, jobs++) {
            for (next = last;
                 next < rows && s->chosen[s->order[next]] == s->chosen[s->order[last]];)
                next++;
            if (next - first > limit) break;
        }
        run_experts(s, w, h, s->order + first, last - first);
    }
    if (w->shared_up.data) shared_expert(s, w, h, n);
}

// -- gated delta rule (arXiv 2412.06464) --
//
// A head's memory is a matrix S of dv x dk. A token decays it, asks it for the value stored under
// its key, and writes the difference to its own value:  S *= g;  S += b (v - S k) k';  o = S q.

// causal convolution over time of one block of channels, in place, then SiLU
static void delta_conv(void *ctx, int block, int thread) {
    RowCall *call = ctx;
    Session *s = call->s;
    const Config *c = &s->m->config;
    size_t channels = call->w->conv_in.rows;
    int n = s->n, past = c->conv - 1;
    (void)thread;
    for (size_t ch = block * 64; ch < channels && ch < (size_t)block * 64 + 64; ch++) {
        const float *w = call->w->conv + ch * c->conv;
        float *old = s->cache[s->l].conv + ch, *mix = s->mix + ch, seen[64];
        for (int j = 0; j < past; j++) seen[j] = old[j * channels];
        for (int t = 0; t < n; t++) {   // seen: the raw inputs before t
            float x = mix[t * channels], y = w[past] * x;
            for (int j = 0; j < past; j++) y += w[j] * seen[j];
            for (int j = 1; j < past; j++) seen[j - 1] = seen[j];
            if (past) seen[past - 1] = x;
            mix[t * channels] = y / (1 + expf(-y));
        }
        for (int j = 0; j < past; j++) old[j * channels] = seen[j];
    }
}

// unit keys and queries; decay and write strength of each value head
static void delta_gates_row(Session *s, const Layer *w, int i) {
    const Config *c = &s->m->config;
    float *mix = s->mix + (size_t)i * w->conv_in.rows, *ba = s->ba + (size_t)i * 2 * c->n_value;
    float *decay = s->decay + (size_t)i * c->n_value, *write = s->write + (size_t)i * c->n_value;
    int share = c->n_value / c->n_key;   // value heads of a key head
    for (int h = 0; h < 2 * c->n_key; h++) {
        float *x = mix + (size_t)h * c->dk, length = sqrtf(sum16(x, c->dk, 0, true) + c->eps);
        float scale = (h < c->n_key ? 1 / sqrtf(c->dk) : 1) / length;
        for (int j = 0; j < c->dk; j++) x[j] *= scale;
    }
    for (int h = 0; h < c->n_value; h++) {
        const float *both = ba + h / share * 2 * share + h % share;   // of each key head: b.., a..
        float a = (w->beta_alpha.data ? both[share] : decay[h]) + w->dt_bias[h];
        float b = w->beta_alpha.data ? both[0] : write[h];
        decay[h] = expf(w->a[h] * (a > 20 ? a : log1pf(expf(a))));
        write[h] = 1 / (1 + expf(-b));
    }
}

// One row of S against every token of the chunk: S never leaves the first-level cache, and the
// rows are independent, so prefill and decode are the same recurrence. Per token and row that is
// 4 dk multiply-adds; a 27B hybrid spends some 3 % of a prefill token here.
static void delta_rule(void *ctx, int task, int thread) {
    RowCall *call = ctx;
    Session *s = call->s;
    const Config *c = &s->m->config;
    int channels = call->w->conv_in.rows, h = task / c->dv, r = task % c->dv, dk = c->dk;
    int key = c->arch->flags & DELTA_TILED ? h % c->n_key : h / (c->n_value / c->n_key);
    float *state = s->cache[s->l].state + (size_t)task * dk;
    (void)thread;
    for (int t = 0; t < s->n; t++) {
        const float *mix = s->mix + (size_t)t * channels;
        const float *q = mix + (size_t)key * dk, *k = q + (size_t)c->n_key * dk;
        size_t gate = (size_t)t * c->n_value + h;
        float v = mix[(size_t)2 * c->n_key * dk + task], decay = s->decay[gate];
        float lane[16] = {0}, sum = 0;
        int j = 0;
        for (; j + 16 <= dk; j += 16)
            for (int i = 0; i < 16; i++) lane[i] += (state[j + i] *= decay) * k[j + i];
        for (; j < dk; j++) lane[0] += (state[j] *= decay) * k[j];
        for (int i = 0; i < 16; i++) sum += lane[i], lane[i] = 0;
        float write = s->write[gate] * (v - sum);
        for (j = 0; j + 16 <= dk; j += 16)
            for (int i = 0; i < 16; i++) lane[i] += (state[j + i] += write * k[j + i]) * q[j + i];
        for (; j < dk; j++) lane[0] += (state[j] += write * k[j]) * q[j];
        sum = 0;
        for (int i = 0; i < 16; i++) sum += lane[i];
        s->att[((size_t)t * c->n_value + h) * c->dv + r] = sum;
    }
}

static void delta_out_row(Session *s, const Layer *w, int i) {
    const Config *c = &s->m->config;
    int n = c->n_value * c->dv;
    float *o = s->att + (size_t)i * n, *z = s->z + (size_t)i * n;
    norm(o, o, n, &w->delta_norm, RMS, c->eps);
    activate(o, z, o, n, SILU);
}

static void delta_net(Session *s, const Layer *w, const float *h, int n) {
    const Config *c = &s->m->config;
    RowCall call = {s, w, NULL};
    bool fused = w->beta_alpha.data;
    Matmul in[] = {{&w->conv_in, h, s->mix, n}, {&w->z, h, s->z, n},
                   {fused ? &w->beta_alpha : &w->alpha, h, fused ? s->ba : s->decay, n},
                   {&w->beta, h, s->write, n}};
    Matmul back = {&w->delta_out, s->att, s->out, n};
    matmul(&s->pool, s->matmul_scratch, in, fused ? 3 : 4);
    parallel(&s->pool, delta_conv, &call, (w->conv_in.rows + 63) / 64);
    each_row(s, w, n, delta_gates_row);
    parallel(&s->pool, delta_rule, &call, c->n_value * c->dv);
    each_row(s, w, n, delta_out_row);
    matmul(&s->pool, s->matmul_scratch, &back, 1);
}

// ---- 9. forward ----
//
// Prefill and decode are this one function: n tokens at positions pos .. pos+n-1 through all
// layers, leaving the residual stream in s->x. With n = 1 the products are matrix x vector.

static void embed_row(Session *s, const Layer *unused, int i) {
    const Model *m = s->m;
    const Config *c = &m->config;
    float *x = s->x + (size_t)i * c->dim;
    size_t row = quant_row_bytes(m->embd.type, c->dim);
    (void)unused;
    quant_dequantize(m->embd.type, m->embd.data + s->ids[i] * row, x, c->dim);
    for (int j = 0; c->embd_scale != 1 && j < c->dim; j++) x[j] *= c->embd_scale;
    const Matrix *extra[2] = {&m->pos_embd, &m->type_embd};
    for (int k = 0; k < 2; k++) {   // learned position, token type 0
        float *y = s->h + (size_t)i * c->dim;
        if (!extra[k]->data) continue;
        row = k ? 0 : (s->pos + i) * quant_row_bytes(extra[k]->type, c->dim);
        quant_dequantize(extra[k]->type, extra[k]->data + row, y, c->dim);
        add(x, y, c->dim, 1);
    }
    if (m->embd_norm.w) norm(x, x, c->dim, &m->embd_norm, c->arch->norm, c->eps);
}

// cosines and sines of this position's angles
static void angles_row(Session *s, const Layer *unused, int i) {
    int n_rot = s->m->config.n_rot;
    (void)unused;
    for (int k = 0; k < 2; k++) {
        float *turn = s->rope[k] + (size_t)i * n_rot;
        for (int j = 0; j < n_rot / 2; j++) {
            double angle = (s->pos + i) * s->freq[k][j];
            turn[2 * j] = cos(angle) * s->rope_mag[k];
            turn[2 * j + 1] = sin(angle) * s->rope_mag[k];
        }
    }
}

static void attn_norm_row(Session *s, const Layer *w, int i) {
    const Config *c = &s->m->config;
    size_t at = (size_t)i * c->dim;
    norm(s->h + at, s->x + at, c->dim, &w->attn_norm, c->arch->norm, c->eps);
}

static void ffn_norm_row(Session *s, const Layer *w, int i) {
    const Config *c = &s->m->config;
    size_t at = (size_t)i * c->dim;
    norm(s->h + at, s->x + at, c->dim, &w->ffn_norm, c->arch->norm, c->eps);
}

// x += post_norm(out); an encoder has x = post_norm(x + out)
static void residual(Session *s, const Norm *post, int i) {
    const Config *c = &s->m->config;
    float *x = s->x + (size_t)i * c->dim, *out = s->out + (size_t)i * c->dim;
    bool after = c->arch->flags & ENCODER;
    if (post->w && !after) norm(out, out, c->dim, post, c->arch->norm, c->eps);
    add(x, out, c->dim, c->residual_scale);
    if (post->w && after) norm(x, x, c->dim, post, c->arch->norm, c->eps);
}

static void attn_residual_row(Session *s, const Layer *w, int i) {
    residual(s, &w->attn_post_norm, i);
}

static void ffn_residual_row(Session *s, const Layer *w, int i) {
    residual(s, &w->ffn_post_norm, i);
}

// the first keep rows are pinned, the rest is a ring
static int cache_row(const Cache *c, int pos) {
    return pos < c->keep ? pos : c->keep + (pos - c->keep) % (c->rows - c->keep);
}

static void clamp(float *x, int64_t n, float limit) {
    for (int64_t i = 0; i < n; i++) x[i] = fminf(limit, fmaxf(-limit, x[i]));
}

// norm and rotate one token's q and k, write its k and v into the ring
static void rope_row(Session *s, const Layer *w, int i) {
    const Config *c = &s->m->config;
    Cache *cache = &s->cache[s->l];
    bool late = c->arch->flags & QK_NORM_LATE;
    int pos = s->pos + i, row = cache_row(cache, pos);
    int64_t q_dim = (int64_t)w->n_head * c->hd;
    float *q = s->q + i * q_dim, *k = s->k + i * w->k.rows, *v = s->v + i * w->v.rows;
    const float *turn = s->rope[w->window > 0] + (size_t)i * c->n_rot;
    if (c->clamp_qkv > 0) {
        clamp(q, q_dim, c->clamp_qkv);
        clamp(k, w->k.rows, c->clamp_qkv);
        clamp(v, w->v.rows, c->clamp_qkv);
    }
    for (int p = 0; p < 2; p++) {
        float *x = p ? k : q;
        int heads = p ? w->n_kv : w->n_head;
        const Norm *n = p ? &w->k_norm : &w->q_norm;
        if (n->w && !late) norm(x, x, heads * c->hd, n, c->arch->norm, c->eps);
        for (int h = 0; w->rope && h < heads; h++) rope(x + h * c->hd, turn, c->n_rot, c->rope);
        if (n->w && late) norm(x, x, heads * c->hd, n, c->arch->norm, c->eps);
    }
    float far =
        c->temp_scale ? 1 + c->temp_scale * logf(floorf(pos / (float)c->n_ctx_orig) + 1) : 1;
    for (int j = 0; far != 1 && j < q_dim; j++) q[j] *= far;
    for (int h = 0; h < w->n_kv; h++) {
        uint16_t *kr = cache->k + ((size_t)h * cache->rows + row) * c->hd;
        uint16_t *vr = cache->v + ((size_t)h * cache->rows + row) * c->vd;
        for (int j = 0; j < c->hd; j++) kr[j] = quant_f32_to_f16(k[h * c->hd + j]);
        for (int j = 0; j < c->vd; j++) vr[j] = quant_f32_to_f16(v[h * c->vd + j]);
    }
    cache->pos[row] = pos;
}

// gated attention: a head's query is followed by its gate
static void split_gate_row(Session *s, const Layer *w, int i) {
    int hd = s->m->config.hd;
    for (int h = 0; h < w->n_head; h++) {
        size_t at = (size_t)i * w->n_head + h;
        memcpy(s->q + at * hd, s->mix + 2 * at * hd, hd * sizeof *s->q);
        memcpy(s->z + at * hd, s->mix + (2 * at + 1) * hd, hd * sizeof *s->z);
    }
}

static void gate_row(Session *s, const Layer *w, int i) {
    int n = w->n_head * s->m->config.hd;
    float *att = s->att + (size_t)i * n, *z = s->z + (size_t)i * n;
    for (int j = 0; j < n; j++) att[j] /= 1 + exp_fast(-z[j]);
}

static void attention_block(Session *s, const Layer *w, const float *h, int n) {
    const Config *c = &s->m->config;
    const Cache *cache = &s->cache[s->l];
    bool gated = w->q.rows > (int64_t)w->n_head * c->hd;
    Matmul in[] = {{&w->q, h, gated ? s->mix : s->q, n}, {&w->k, h, s->k, n}, {&w->v, h, s->v, n}};
    Matmul back = {&w->o, s->att, s->out, n};
    Attention a = {.q = s->q, .out = s->att, .k = cache->k, .v = cache->v, .pos_k = cache->pos,
                   .rows = cache->rows, .pos = s->pos, .n = n, .n_head = w->n_head, .n_kv = w->n_kv,
                   .hd = c->hd, .vd = c->vd, .window = cache->window, .keep = cache->keep,
                   .causal = c->causal, .scale = c->attn_scale, .softcap = c->attn_cap,
                   .sinks = w->sinks, .slopes = c->alibi > 0 ? s->slopes : NULL};
    matmul(&s->pool, s->matmul_scratch, in, 3);
    if (gated) each_row(s, w, n, split_gate_row);
    each_row(s, w, n, rope_row);
    attention(&s->pool, s->attention_scratch, &a);
    if (gated) each_row(s, w, n, gate_row);
    matmul(&s->pool, s->matmul_scratch, &back, 1);
}

static void activate_row(Session *s, const Layer *w, int i) {
    size_t at = (size_t)i * w->ff;
    activate(s->up + at, w->gate.data ? s->gate + at : NULL, s->up + at, w->ff,
             s->m->config.arch->act);
}

static void ffn(Session *s, const Layer *w, const float *h, int n) {
    Matmul in[] = {{&w->up, h, s->up, n}, {&w->gate, h, s->gate, n}};
    Matmul back = {&w->down, s->up, s->out, n};
    matmul(&s->pool, s->matmul_scratch, in, w->gate.data ? 2 : 1);
    each_row(s, w, n, activate_row);
    matmul(&s->pool, s->matmul_scratch, &back, 1);
}

static void forward(Session *s, const int32_t *ids, int n, int pos) {
    const Config *c = &s->m->config;
    bool bare = c->arch->norm == BARE;
    s->ids = ids;
    s->n = n;
    s->pos = pos;
    each_row(s, NULL, n, embed_row);
    each_row(s, NULL, n, angles_row);
    for (s->l = 0; s->l < c->n_layer; s->l++) {
        const Layer *w = &s->m->layers[s->l];
        const float *h = w->attn_norm.w || bare ? s->h : s->x;

        // tokens look at each other: attention, or the delta rule's memory
        if (h == s->h) each_row(s, w, n, attn_norm_row);
        if (w->conv_in.data) delta_net(s, w, h, n);
        else attention_block(s, w, h, n);

        // each token alone: the FFN reads the sum, or (parallel) what attention read
        if (!w->parallel) each_row(s, w, n, attn_residual_row);
        if (w->ffn_norm.w || bare) each_row(s, w, n, ffn_norm_row);
        if (w->parallel) each_row(s, w, n, attn_residual_row);
        h = w->ffn_norm.w || bare || w->parallel ? s->h : s->x;
        if (w->router.data) experts(s, w, h, n);
        else ffn(s, w, h, n);
        each_row(s, w, n, ffn_residual_row);
    }
}

static void out_norm_row(Session *s, const Layer *unused, int i) {
    const Config *c = &s->m->config;
    size_t at = (size_t)i * c->dim;
    (void)unused;
    if (s->m->out_norm.w || c->arch->norm == BARE)
        norm(s->h + at, s->x + at, c->dim, &s->m->out_norm, c->arch->norm, c->eps);
    else memcpy(s->h + at, s->x + at, c->dim * sizeof *s->h);
}

// logits of n <= LOGIT_ROWS rows of the last chunk, from row first on, into s->logits
static void head(Session *s, int first, int n) {
    const Config *c = &s->m->config;
    Matmul out = {&s->m->head, s->h + (size_t)first * c->dim, s->logits, n};
    for (int i = first; i < first + n; i++) out_norm_row(s, NULL, i);
    matmul(&s->pool, s->matmul_scratch, &out, 1);
    for (size_t i = 0; i < (size_t)n * c->n_vocab; i++) {
        float y = s->logits[i] * c->logit_scale;
        s->logits[i] = c->logit_cap > 0 ? c->logit_cap * tanhf(y / c->logit_cap) : y;
    }
}

// ---- 8. session ----
//
// The KV cache of a layer is a ring of w + chunk rows: w = the window it sees, and room for a
// chunk, so that writing a chunk overwrites no row that one of its own queries must see. A row
// stores its absolute position, and that alone decides who sees it; keys were rotated at that
// position, so nothing moves when the ring wraps and generation goes on past any limit.

// The one switch of backends: a GPU takes a whole model or nothing, on the same buffers.
#ifdef LLM_METAL
#include "metal.c"
#else
static void gpu_open(Session *s) { (void)s; }
static void gpu_close(Session *s) { (void)s; }
static bool gpu_forward(Session *s, const int32_t *ids, int n, int pos, int first) {
    return (void)s, (void)ids, (void)n, (void)pos, (void)first, false;
}
static bool gpu_head(Session *s, int first, int n) { return (void)s, (void)first, (void)n, false; }
static int32_t gpu_argmax(const Session *s, const float *logits) {
    return (void)s, (void)logits, -1;
}
#endif

// whole pages of 16 KB (what a GPU can share), zeroed when they are first touched; NULL: no memory
static void *pages_alloc(size_t size, void **base, size_t *whole) {
    *whole = size + 2 * 16384;
    *base = size > (size_t)1 << 46 ? MAP_FAILED
            : mmap(NULL, *whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (*base == MAP_FAILED) *base = NULL;
    return *base ? (void *)(((uintptr_t)*base + 16383) & ~(uintptr_t)16383) : NULL;
}

// places every cache; with a counting arena it only adds up
static void plan_caches(Session *s, Arena *a) {
    const Config *c = &s->m->config;
    size_t channels = 2 * (size_t)c->n_key * c->dk + (size_t)c->n_value * c->dv;
    size_t start = a->used;
    s->recurrent = a->base ? (float *)(a->base + start) : NULL;
    for (int l = 0; l < c->n_layer; l++) {
        if (!s->m->layers[l].conv_in.data) continue;
        s->cache[l].conv = arena_take(a, (c->conv - 1) * channels, sizeof(float));
        s->cache[l].state = arena_take(a, (size_t)c->n_value * c->dv * c->dk, sizeof(float));
    }
    s->n_recurrent = (a->used - start) / sizeof(float);
    s->saved = arena_take(a, s->n_recurrent, sizeof(float));
    for (int l = 0; l < c->n_layer; l++) {
        const Layer *w = &s->m->layers[l];
        Cache *cache = &s->cache[l];
        if (w->conv_in.data) continue;
        bool whole = !w->window || w->window >= s->o.window;
        cache->window = whole ? s->o.window : w->window;
        cache->keep = whole ? s->o.keep : 0;
        cache->rows = cache->window + s->o.chunk + cache->keep;
        cache->k = arena_take(a, (size_t)w->n_kv * cache->rows, c->hd * sizeof(uint16_t));
        cache->v = arena_take(a, (size_t)w->n_kv * cache->rows, c->vd * sizeof(uint16_t));
        cache->pos = arena_take(a, cache->rows, sizeof(int32_t));
    }
}

typedef struct { size_t q, k, v, att, mix, z, ff, cols, heads, ring; } Widest;   // over layers

static Widest widest_layer(const Session *s) {
    const Config *c = &s->m->config;
    Widest x = {.cols = c->dim};
    for (int l = 0; l < c->n_layer; l++) {
        const Layer *w = &s->m->layers[l];
        size_t values = w->conv_in.data ? (size_t)c->n_value * c->dv : 0,
               q = (size_t)w->n_head * c->hd;
        x.q = larger(x.q, q);
        x.k = larger(x.k, w->k.rows);
        x.v = larger(x.v, w->v.rows);
        x.att = larger(x.att, larger(values, (size_t)w->n_head * c->vd));
        x.mix = larger(x.mix, larger(w->conv_in.rows, (size_t)w->q.rows > q ? w->q.rows : 0));
        x.z = larger(x.z, larger(values, (size_t)w->q.rows > q ? q : 0));
        x.ff = larger(x.ff, larger(w->ff, w->shared_up.rows));
        x.heads = larger(x.heads, w->n_head);
        x.ring = larger(x.ring, s->cache[l].rows);
    }
    x.cols = larger(x.cols, larger(x.att, x.ff));
    return x;
}

// Every buffer that forward uses. Attention's and the FFN's buffers never live together, nor with
// the logits: they share bytes.
static void plan_scratch(Session *s, Arena *a) {
    const Config *c = &s->m->config;
    Widest w = widest_layer(s);
    size_t n = s->o.chunk, f = sizeof(float), rows = larger(n, c->n_used);
    s->x = arena_take(a, n * c->dim, f);
    s->h = arena_take(a, n * c->dim, f);
    s->out = arena_take(a, n * c->dim, f);
    for (int i = 0; i < 2; i++) {
        s->rope[i] = arena_take(a, n * c->n_rot, f);
        s->freq[i] = arena_take(a, c->n_rot / 2, sizeof(double));
    }
    s->slopes = arena_take(a, s->m->layers[0].n_head, f);
    bool floats = false;
    for (size_t i = 0; i < s->m->gguf.n_tensors; i++) {
        const Tensor *t = &s->m->gguf.tensors[i];
        floats |= t->n_dims > 1 && !formats[t->type].unpack;
    }
    s->matmul_scratch = arena_take(a, 1, matmul_scratch(rows, w.cols, s->o.threads, floats));
    size_t mark = a->used;
    s->attention_scratch =
        arena_take(a, 1, attention_scratch(w.heads, c->hd, c->vd, w.ring, s->o.threads));
    s->q = arena_take(a, n * w.q, f);
    s->k = arena_take(a, n * w.k, f);
    s->v = arena_take(a, n * w.v, f);
    s->att = arena_take(a, n * w.att, f);
    s->mix = arena_take(a, n * w.mix, f);
    s->z = arena_take(a, n * w.z, f);
    s->ba = arena_take(a, n * 2 * c->n_value, f);
    s->decay = arena_take(a, n * c->n_value, f);
    s->write = arena_take(a, n * c->n_value, f);
    a->used = mark;
    s->gate = arena_take(a, rows * w.ff, f);
    s->up = arena_take(a, rows * w.ff, f);
    s->route = arena_take(a, n * larger(c->n_expert, 1), f);
    s->gathered = arena_take(a, c->n_expert ? rows * c->dim : 0, f);
    s->expert_out = arena_take(a, c->n_expert ? rows * c->dim : 0, f);
    s->chosen = arena_take(a, n * c->n_used, sizeof(int32_t));
    s->order = arena_take(a, n * c->n_used, sizeof(int32_t));
    s->weight = arena_take(a, n * c->n_used, f);
    a->used = mark;
    s->logits = arena_take(a, (size_t)LOGIT_ROWS * c->n_vocab, f);
    s->candidates = arena_take(a, c->n_vocab, sizeof *s->candidates);
}

static int count_cpus(void) {   // those this process may run on; performance cores on Apple
    int n = 0;
#ifdef __APPLE__
    size_t size = sizeof n;
    if (sysctlbyname("hw.perflevel0.physicalcpu", &n, &size, NULL, 0)) n = 0;
#elif defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) n = CPU_COUNT(&set);
#endif
    return n > 0 ? n : (int)larger(sysconf(_SC_NPROCESSORS_ONLN), 1);
}

// ALiBi (arXiv 2108.12409): a slope for each head, powers of one ratio; heads beyond a power of
// two take the odd powers of its square root
static void alibi_slopes(float *slope, int n_head, float max_bias) {
    int whole = 1;
    while (2 * whole <= n_head) whole *= 2;
    for (int h = 0; h < n_head; h++)
        slope[h] = h < whole ? exp2f(-max_bias * (h + 1) / whole)
                             : exp2f(-max_bias / 2 * (2 * (h - whole) + 1) / whole);
}

void session_close(Session *s) {
    gpu_close(s);
    if (s->pool_open) pool_close(&s->pool);
    if (s->kv_base) munmap(s->kv_base, s->kv_bytes);
    if (s->scratch_base) munmap(s->scratch_base, s->scratch_bytes);
    free(s->cache);
    free(s->history);
    *s = (Session){0};
}

bool session_open(Session *s, const Model *m, Options o, Error *e) {
    const Config *c = &m->config;
    Arena count = {0}, kv = {0}, scratch = {0};
    *s = (Session){.m = m, .o = o, .saved_pos = -1, .rng = o.sampling.seed};
    if (!s->o.window) s->o.window = c->n_ctx < 4096 ? c->n_ctx : 4096;
    if (!s->o.chunk) s->o.chunk = 512;
    if (!s->o.threads) s->o.threads = count_cpus();
    s->cache = calloc(c->n_layer, sizeof *s->cache);
    if (!s->cache) return fail(e, "out of memory");

    double rows = (double)s->o.window + s->o.chunk + s->o.keep;
    if (rows > INT32_MAX / 2) return fail(e, "a window of %d tokens is too large", s->o.window);
    plan_caches(s, &count);
    kv.base = pages_alloc(count.peak, &s->kv_base, &s->kv_bytes);
    if (!kv.base)
        return fail(e, "no memory for a KV cache of %zu MB; try a smaller -c", count.peak >> 20);
    plan_caches(s, &kv);
    for (int l = 0; l < c->n_layer; l++)
        for (int i = 0; i < s->cache[l].rows; i++) s->cache[l].pos[i] = -1;

    count = (Arena){0};
    plan_scratch(s, &count);
    scratch.base = pages_alloc(count.peak, &s->scratch_base, &s->scratch_bytes);
    if (!scratch.base)
        return fail(e, "no memory for %zu MB of scratch; try a smaller -b", count.peak >> 20);
    plan_scratch(s, &scratch);
    for (int i = 0; i < 2; i++) s->rope_mag[i] = rope_frequencies(m, i, s->o.window, s->freq[i]);
    alibi_slopes(s->slopes, m->layers[0].n_head, c->alibi);
    s->pool_open = pool_open(&s->pool, s->o.threads);
    if (!s->pool_open) return fail(e, "cannot start %d threads", s->o.threads);
    if (!s->o.cpu) gpu_open(s);
    return true;
}

// does every layer still hold all rows that a query at p sees?
static bool rows_resident(const Session *s, int p) {
    for (int l = 0; l < s->m->config.n_layer; l++) {
        const Cache *c = &s->cache[l];
        int first = p - c->window + 1 > 0 ? p - c->window + 1 : 0;
        for (int i = first; c->rows && i < p; i++)
            if (c->pos[cache_row(c, i)] != i) return false;
        for (int i = 0; i < c->keep && i < first; i++)
            if (c->pos[i] != i) return false;
    }
    return true;
}

static void session_truncate(Session *s, int p) {   // forgets positions p and later
    for (int l = 0; l < s->m->config.n_layer; l++)
        for (int i = 0; i < s->cache[l].rows; i++)
            if (s->cache[l].pos[i] >= p) s->cache[l].pos[i] = -1;
    if (s->n_recurrent && p > 0) memcpy(s->recurrent, s->saved, s->n_recurrent * sizeof *s->saved);
    if (s->n_recurrent && p == 0) memset(s->recurrent, 0, s->n_recurrent * sizeof *s->saved);
    if (p == 0) s->saved_pos = -1;
    s->n_history = p;
}

// Prepares the caches to continue after the longest usable part of ids; returns its length.
static int session_reuse(Session *s, const int32_t *ids, int n, int from) {
    int p = 0;
    while (p < s->n_history && p < n && s->history[p] == ids[p]) p++;
    if (p > from) p = from;   // these rows are asked for: at least the last
    if (p == s->n_history) return p;
    if (s->n_recurrent) p = s->saved_pos >= 0 && s->saved_pos <= p ? s->saved_pos : 0;
    if (!rows_resident(s, p)) p = 0;
    session_truncate(s, p);
    return p;
}

typedef bool RowOut(void *ctx, int i, const float *row);   // false stops

// Evaluates ids[0..n-1], reusing what the cache holds, and hands out the logits (or the normed
// residual stream, hidden) of the tokens from .. n-1, in order.
static bool session_run(Session *s, const int32_t *ids, int n, int from, bool hidden, RowOut *fn,
                        void *ctx, Error *e) {
    const Model *m = s->m;
    if (n < 1) return fail(e, "nothing to evaluate: no tokens");
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= m->embd.rows)
            return fail(e, "token id %d is out of range; the model has %lld", ids[i],
                        (long long)m->embd.rows);
    if (m->pos_embd.data && n > m->pos_embd.rows)
        return fail(e, "position %d is past the model's %lld learned positions", n - 1,
                    (long long)m->pos_embd.rows);
    if (n > s->history_cap) {
        int32_t *h = realloc(s->history, (size_t)n * 2 * sizeof *h);
        if (!h) return fail(e, "out of memory for %d tokens", n);
        s->history = h;
        s->history_cap = 2 * n;
    }
    int p = session_reuse(s, ids, n, from);
    bool save = s->n_recurrent && n - p > 1;
    while (p < n) {
        int left = n - p, count = left < s->o.chunk ? left : s->o.chunk;
        if (save && left > 1 && count == left) count--;   // stop once before the last token
        if (save && left == 1) {
            memcpy(s->saved, s->recurrent, s->n_recurrent * sizeof *s->saved);
            s->saved_pos = p;
        }
        if (s->stop && *s->stop) return fail(e, "interrupted");
        int first = from > p ? from - p : 0;   // row of this chunk
        if (first > count) first = count;
        bool gpu = gpu_forward(s, ids + p, count, p, hidden ? count : first);
        if (!gpu) forward(s, ids + p, count, p);
        memcpy(s->history + p, ids + p, count * sizeof *ids);
        s->n_history = p + count;
        for (int i = first; i < count; i++) {
            int row = (i - first) % LOGIT_ROWS,
                rows = count - i < LOGIT_ROWS ? count - i : LOGIT_ROWS;
            const float *out = s->logits + (size_t)row * m->config.n_vocab;
            if (hidden) out_norm_row(s, NULL, i);
            else if (row == 0 && !(gpu && i == first) && !gpu_head(s, i, rows)) head(s, i, rows);
            if (!fn(ctx, p + i, hidden ? s->h + (size_t)i * m->config.dim : out))
                return fail(e, "stopped");
        }
        p += count;
    }
    return true;
}

static bool keep_logits(void *ctx, int i, const float *logits) {
    (void)i;
    *(const float **)ctx = logits;
    return true;
}

const float *session_eval(Session *s, const int32_t *ids, int n, Error *e) {
    const float *logits = NULL;
    return session_run(s, ids, n, n - 1, false, keep_logits, &logits, e) ? logits : NULL;
}

// ---- appendix: Unicode ----
//
// UTF-8, and tables of the Unicode standard for the tokenizers: sorted ranges of characters with a
// value. A range is two or three numbers: twice the gap since the range before, plus 1 if there are
// more characters than one; how many more; the change of the value against the range before (0,
// -1, 1, -2... as 0, 1, 2, 3...). Each line starts afresh, so that a binary search over the lines
// finds the one to read. A number is base 60, digits from '#' on; higher digits come first, are
// base 32 and begin where those 60 end.

static const char *const UNICODE_CLASSES[] = {   // the index into "ulcxNMPSsC" below
    "$+5$'$$4%#$$%&#%$($#%$&$$,&$$'$%%$$$$<.$%/#%#$#%$<.#-#%#$#%$('#$$<%#$#&$'%#$$$%#*#)#%#'$&&$$(",
    "e#1#,$$+#%#(#$#)$%&#'$9*#-$A,#-$b1,#%$&$$&%$b>$#%$=$$4%$&+$.*$0+$'*$)+#*#+#*$3+$`V&$&(#%#+$$,",
    "|K)$%$#+#*,$-#,#+$%*%#&6#&`9##-$a5,#-$)&$aP(&H#'%$()$K($$)(%%&O&#%#$#%$$$#%$$$#%#$4=&,&#$$)",
    "`r0(5$%&$$$#%$$$$$%$-&#%#)$%($M($7'$,$$&'$$(#'$`I&#)#($)'#+#&$(&$$&$$'#'$&&$$&$,%$%$$$+#*$0)",
    "`{15#.#'$@&$='(`?&$-'#&@,%$C$$+'$$&#+$%$#(''$$'$8*$&'#&$+'#&$%'#&$''(1%&;($%''%&-(.:##+$(*&$/",
    "ah8*-$L&$:'#+$C*$X&$%'#&$4'#&$)'$,&$$'$$%$,&#'$2($%'&*&($#(8#&)#%#*&#''#&$)'($#(%##&3',$&&%#",
    "as8$-(,$$$$$$+$(($$)#*#)#$(%#&(&,$#(8#&)#&$#&$#&$#''&'#,$#(%#)#2&&%#2,%$$%$%&#'#%8%$&+&&%#&8#",
    "az$))&$#&'#''#&$*'&%#&%#'&B$#$$'(,$#'#%1*$('&%#&*&($#(8#&)#&$#&'#''#&$)'($#(%#2%#,$&&%#$$'(,$",
    "b`G1#*$(%7%#&&(#*%#&&#*$#%#&$#*$#*%#*.#,''*%#&&#'&/'@/$$*).'&$*&&%#&9#&2#''#&$)'&%#&&#2$#&%&",
    "bhA)($#$$'(,$1'$)&#)#*$%'#%$*(&%#&9#&,#&'#''#&$)'&%#&&#2$#0$&&$#$$'(,$&$$#'<&#$+&&%#&K#$$'#&",
    "bp$)-&%#&&##&#+,%*#'$)$$%$$$'(5$#)$(*&%'&4&*:#&+#%#()#)',(#%#&*#0,$($%#%<R(#'$$&$)'+'$)*$*'#%",
    "by,,+$$'`2$(%#&'#&:#%#&,##'$$&$+'#&('#%#&)'&,$(&$`'#$%+$1$#%#$$%%$$&$('$6(#)#&#'#&#'#&$&%$$$",
    "ca,*)&F#,6'#%$$$$'&$-'&F#&*'#&$('&$#$'$$&%$$$`2M($6'#&$,%$('$(($&'$&&$%'#&$%'$$&$)'$%&$&'$/&",
    "ckX.-#&#'$,$$&%$$'$H,%%-#(M##)$dC(&&#()#%#&&#(K#&&#(C#&&#()#%#&&#(1#&[#&&#(`)#(%'$+%$6&*2$$,+",
    "df@`<'((#'+$i6(#+#$$3(#-$<,$$)*`1($%)$%&$*$24#$&'65&$%'$$%64($$'</&&%#&$'<V&$B'$%%#($%)#%#*#'",
    "ejP,+0,#0-'$%$#+#*$,$0`?$2'#$$'$D&#'#&.`,#8A#&.',.#+'*$$$,&$@$('#:N#,<#0-%*D)$9*$''($%$W($,'",
    "f`(?-'#$,$0,#0)'#($()(A$`J'#$Q&$3'$*&*,%$)'$,%$+&$+'$$$&%$$@&$/'$$&$,%$N$$0'4&%$F($6'*'%$,&",
    "fpB%)$,%$F$$$)$+(2M$(%#$*+4%$#%$7$$&&#'$(&#'$$&$%'#&.N$$`%%$/$#%$D$$G%$`&'$cH(((#(H#((#(*#%#",
    "gjE'%#&A#(W#&)##-#,$%-$%,&)#$%-$&,((#&%-$/,$%-(%,&)#$$-&-%$'%$:($$'$'%#$$6&#%$/$#%$.$#'$'%&,#",
    "gsS+#$((%$%)$$$#($,%$%)$$$&/(*C+BC&B$'#,$&-#,$$-$,,#-#,$%-$',$(-#,#-#,#-#,#-$&,#-$(,$&%#$$$-",
    "gzH&'$'-$',$&-#,#-$U($$&$''$$),e2#$&$$?%$$$$c.%V-#N^($`4)$8($i2)$0$$@&$S)$$$$A%$,$$eM%$8$$`%%",
    "jd(&/$B%$$$$e0%(B#&`O#$a&,$$%$`M$$(-$&,$%)$$(.&+#&$$'$H(%#-#(Z#1##)?$$9&6)#&)#&)#&)#&)#&)#&)#",
    "kf0))&B'$Q%#($B)$$%$.$`,<%&`?#<bD#X2##%$%&#%$$*#%$,'$$%$.$#%$+($(%#%$'($$+$%($$$#)$$%&`<*($'",
    "k}R$1$%*#)$`@(#)$&(.M#&`D#&$+$&($,)$B*$F+9#$2*$A+&,($@)$*(#)$1($B)$,($I)$1($d6)$blV*$`&+$jp3*",
    "`j{4Y16P*$$)$c?($%)$2($,%$$$LP$#%$&'#%$,$#%#($>$$$%$$'$`,&$,%$$%$(%49%$+*$$+$`4,#%$9$#%$$+$&,",
    "`ktV^).$#%#&'#T2##'$%&#'$&&#'$9&$''$&'#&*($$&)0V*$&)4$$$T&$4'4$%$,&04%$(&$%)#(#)$$(#'$,$$>$",
    "`lb<*-$$%$9($/'9%$?(*&'$Q&$0'$/%%($,%,$'$'(#'$,&$,%$'$&K#$0'6%&#'$*&$$'(,$(&'$9($%+#*$%'$T&#'",
    "`loE)$%'$$&$$'$'&$$'#&#'#&T%#$$)$-($''$$%$%($$'8(&((#((#6)#&)#&M##+$0*$$+,`6,$E%$*'#%$$$(,$",
    "`lzPdy.)<9#,S#,ckR/$e(.(`P#`4)$<'#-%#'$,&#+$/*&'#%#&$#&$#&`R#$3+De%*$$)$2%$`&*(X#1+`(.*$&+$2&",
    "abw$,/02$$E%&0##%#$$%%%$#%$$$,'(&a1#'/&%(#%$($#%$&$$,&$$'$%%$$$$<*$%+#%#$#%$<,#+#%#$#%$)$$`?(",
    "ace@()((#((#(%#*)+&)#8%'$$&(.*&<#&5#&$#&1#(0#`,a%#.%),O&*+)$[($3)$$($%)&/#)#`FO##&c8?&*S#A'",
    "ad`*=+,B$$&%66$#%$*$#%.H$$''.@&%)$F(,*##)$'&`<`6&$`4%(,%0F&,F#,J%4V#9)$-(&1#&)#&$#&-#&1#&)#",
    "adx>$)a2d-#68#8*#T(#&L#&+#a6(#'#&N#&$#)#(9#%)$*&$9$$$+$)($A$4+%`H5$&$#.'%$8$$(%)'$<(-)a,Z(,$%",
    "aezL$)$2%(P##$$%'&$#.&#$&&&%#&?#(%'+#$+$2+'2?($$%#'$?($%%`(*$#+$>*$$','$$)'6X(*))$8((*%$5$.*%",
    "afiL4)2&)<)&aL`/$`VU$>U#2('$F$$&'4,$hTA#&L$&$'#%($(aB%'$?&$,%#$48#$-'$&$$''P4($&'$&%`47($)%",
    "ago$9)6%'$W&$1'$)%,@&#%$$&$$'#&6&'$O&$-'$$%#)$&(#$7+(;.2,%0%%$F&$0'&,$$&'#($$'#&4E##'$$%#(6%'",
    "ag|^R)$0'$&&$&)$&$#%$$$$,$#$#)#($%)&6&:4$&;#$.'$(%#$$$&#'a()&%#&&#&1#&,##)0Q($.'.,$0&%&*&($#",
    "ahj68)&)#&$#&'#&$'#&$)'($#(%#'&/'.'&$$'()#*'#cJW&$4'$&&$')$,&$$'%##$$%&`$R#$6'$$&#)#(4,%dDQ$",
    "ai`F)-(+#$9%$&($$'`,R&$3'$%%#(:,%0/'JM($/'#&#)0,&`T=$(1',.$$%'#%$)*e.N#$1'#%b8`&*$5'<*$'#(*#",
    "ai}F$)&:#$('&$#(&##&#'#&$$'$%%6,&a8*$(I#$)'()##&#)#(#'Y&$,'$J&$)'#&$&'$*%#$3&$-'$P&$2'$%%#(",
    "ajjL'/>`/(2,)g0+(&G#$*'&*##&$')8?&*$'$@((8'&0#a>)&&$#&H#$(')#&$#&)##&#'4,$0($&$#&B#$''&$#&'#",
    "akd')2,%i85$$&'$$%2$$#&#'$/&&D#$)'*'#$/%$,&aW$B7%$?)=$$n8(b<`U%&'':b2(avX`G#$$)>pV($2/#*$(&",
    "aqeJ1-cdLhM&g~Rh?#2A#&,%,$'$`5(&,%0@$(''#%8R($)'$'%$&%$&*#)#%8,(&)#&7$.5#u\\`&#$9%$&'b:`1(+'",
    "b`};)$Y'2&#$/&a,$##)#(#':$#@be2&4sH#`<+#hhV&#&)#&$#&cU#A#^%#'#@&#4eF#ak\\`Q#./#*+#2,#'+$$&#%",
    "buq,&5c{LP*(9#6`Z'a$c(#8I#(^#$'&$%'$(&$*+$**$$'$)&$@'$&&$`#'N`(#$%&#'c(6(<6#<`=)6;(cB`;$&`-#",
    "b{}X$)'#($#(&#&.#%#&)#&`'#&&#(*#&)#&>#&&#&'#%#*)#&dJ#(;##+$;*#+$A*#+$;*#+$A*#+$;*#+$A*#+$;*#+",
    "b|vTA)#+$;*#+$**(T%$gB)$Y&$&'$T&$*'#&$0'#&$$'$'$B'$&1#`cTA&0(#f*)'&3#()#&$#&'#.`$&`)'bPO&*)'",
    "c_i:))(,%+$#+iL@*#'FN&$&'$,$-)n@>*$&'$,$wP)$&&#&$#&1#&b3#(+%$)%`:`*($))#&,,%,$'y.]&#)$%(#)$&(",
    "cbm^O+#)$1(e@&$&=#&$#%#'#&,#&&#%#%#/#+#%#%#&%#&$#%#'#%#%#%#%#&$#%#(&#&)#&&#&&#%#&,#&3#.%#&'#",
    "cb|.3)`P$+h$N#,`J#<1#(1#&1#&G#8/($aK)`X?#>N#,+#2$#@(#d,o:#,3#*/#*`]#,`E#0.#+#B.#,Z#4,#0J#4@#",
    "ceqL$1aHdJ#<0#(/#*+#2P#&)#40#,+#2+#2a=#&Y#`2,(`a8uf^$`(ad0#0bL#(b_$#@b{C#Bi8#aq0h$#`q0aq5#",
    "ep}<adV)vdl9/`$`F#c4b^*abw$`ac0+(`ac0#",
};

static const char *const UNICODE_LOWER[] = {   // what to add; 0, -1: pairs, upper even, odd
    "a.<`'b:9#&)#`*R`&#eH&(eI&2$&P%#c$$(c#'f%$&e^#eW$$eX$$eW$$eV%aK#c)#%$$eR#eW#'%+#&$$e\\'f%#'%%",
    "lX(##f3$$f4#f5($f2#f3$$f4$$f3$&f2#f7$$f4($#/'$$(#)$$&#'$4(&4%%'$&&#b0#`9$J`W#c6&4c7/jfU$$jfV",
    "r)d<#jl-($jfP#e>#gS#'$,a8hH&#($#1bW/aF&%$%Y&$$&3`$&+#`-R4:2+`^($`]#.$$1&%c6$2f#$B`F`HD`&4X##A",
    "`gF0$&`F%&H`Gb_6HfoC%#-#w(`6`_|7$(`gn.ah<MbcB(%#iLa@bc33f|T&`Ff|U4*24(#8*#4*#4(#9#%#%#%#4*#",
    "gl(*24*#4*#4$#$$a.#a-:&aD#aE:$%$$b&<$b'$$b>#bA:$c$$$'#bYhYfy2){V#c%/gs7`B2:J$Dz2<Y`|8RO`H$`F",
    "jyOje(#fe]#fe<((jdC#jf4#`%#`*#%&$jf;&$$2$jg>$`JjgA2&$*$%`_j(P#H>#c@0#(`$#6&$#`cxL$,`cxO*$$",
    "`ktQ`k`6(&`k`7(6##`ka2#8#+#7#(%`K#R#M#`k~I$2}Z#`F#`k_H#feQ$&`cz=.$%,&#Z$$vfT<`)`gNJ3cDF#d0-$",
    "adv81`5&)#&$#`z$UUbdRB`&uxHB#`_u<D'",
};

static const char *const UNICODE_BASE[] = {   // the character without its accents
    "e<(a-%'$&'$&+%-$'%(&/#+((3%'$&'$&+%-$'%(&/#+%##`V#`'#`&#`'#`&#`'#^#`'#`&#`'#`&#`'#`&#`'#`$#`'",
    "h+a5#`'#`&#`'#`&#`'#`&#`'#`&#`'#^#`'#`&#`'#`&#`'#`&#`'#`$#`''`$#`'#`&#`'#`&#`'#`&#`'#`&)%#`'",
    "i7aA#`'%`$#`'#`&#`'#`&#`'+^#`'#`&#`'#`&#`')`$#`'#`&#`'#`&#`''\\#`'#`&#`'#`&#`'#`$#`'#`&#`'#`&",
    "jMbU#`&#`'#`$#`'#`&#`''`$#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#^#`'#^#`'#`&#%#`'#`&#`'#`&#`'`)`<",
    "lYbM=V#`'[`N#`'#R#`'#V#`'#V#`'#`&#`'#`&#`'#`&#`'#`&#`'%`N#`'#`&#`'#b9#`''d4#`'#Z#`'#Z#`'#`&",
    "o=bM#i[#f5#q:)`,#`''T#`'#`@#`'#b9#`'#>#`'#e(#`'#`&#`'#Z#`'#`&#`'#Z#`'#`&#`'#V#`'#`&#`'#\\#`'",
    "pKaO#`'#\\#`'#`&#`'#`*#`'#`$#`''`>#`'/`4#`'#Z#`'#N#`'#`&#`'#`&#`'#`&#`'#N#`'g[tE#%%G#8`EaH5t2",
    "}%dG#wU#w6#w?#'#'%/%/#+#CU`&#;#;#+#'#'#;U:#;#.#/#+,$5`>$a1%&)<+K#&#978`%`'P$(%&)`-+Z#&#9Q`I#%",
    "`gE`aW#`'=`2#`'#`&#`''X#`''d=#%#e@#`'#`$#`''`$#`'#`&#`'#V#`''dK#%#e2#`'#`:#`'#`&#`'#`&#`'#Z",
    "`i5`cA'Z#`'hX$nW#`)#`(#`-d)cI%JCErYr[13')`-^#%#%#-#-#%#5#+bF$d'A`2#%%=aQc9'/`+`*#%#-'AfQh?($#",
    "b_[a}]#%`SbO`Q`O#%#$c)c3b]c%0$1&$#c/c3#%#$cMcY&%#jWk%57+-+-+-;X5`I%##a-%%3a.E`)57+-+-+-;XbGc]",
    "feGfeE%'%'%'%')+`7`9%'''#%%)v7fe<#`'#`$#`'#`&#`'#`&#`'#`$#`'#`$#`'#`&#`'#`&#`'#`&#`'#`&#`'#`$",
    "g_Mb9#`&#`'#`&#`'#`&#`'#`&#`'#`$#`'#`$#`'#`$#`'#`&#`'#`&#`'#`&#`'#`&#`'#`$#`'#`&#`'#^#`'#`&",
    "g`MbE#`&#`'#`$#`'#`&#`'#`&#`'#`&#`'#`$#`'#`&#`'#`&#`'#`$#`'#`&#`'#`&#`'#`&#`'#`$#`'#`&#`'#`&",
    "gaMbM#`&#`'#`$#`'#`&#`'#^#`'#`&#`'#`&#`'#`&#`'#`$#`'#`&#`'#`&#`'#`&#`'#`&#`'#`$#`'#`&#`'#`&",
    "gbMbW#`&#`'#`$#`'#`&#`'#`&#`'#`&#`'#`&#`'#`$#`'#`&#`'#`$#`'#`&#`'#`&#`'#`&#`'#`&#`'#`$#`'#`&",
    "gcMc##`$#`'#`$#`'#`&#`'#`&#`'#F#;#)#'%gO+iF#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&",
    "gdYb1#`&#`'#`&#`'#`&#`'#Z#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#Z#`'#`&#`'#V#`'#`&#`'",
    "ge[aI#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#`&#`'#V#`'#`&#`'#`&#`'#`&#`'#`&#`'",
    "gf[aU#`'#`&#`'#Z#`'#`&#`'#`&#`'#`&#`'0*z?$*`&$(`/((`&(*`+$*`&$*`+$*`&$(`3((`&(*`3%`&%#%#%#",
    "gjP*`_5$*`&$$3$$+$$'$$'$$/$$/$$+(*R$*`&$*`3$*`&$*`K$*`&$'3&$#$'`&%`7'y,$%y)&$#$$`*$%'$%fo3",
    "gn@&~Q($#$&`&&%fq5$&foT$$*$$+$&`&#*$$x8#a:(%|)&$#$$`:$%7#x0'gj+#%hOfpZ){N#6bKg{1#'G'`#a##+#&",
    "ha3ha1+-')QS%'WQ'1''%)Oha@%hb77J#haL#'#hb;#%'=#%')#%/)#%'1#%')#%`+Y#/#%#'`G`D#%#K#%/`'#%#%#%",
    "hk%kxW#%a`I`k*`m9`m7%'%'%'%'%'%'%'%'%'%'%'')%'%'0$1&$)&$)&$)&$)O`P5aY=?%'%'%'%'%'%'%'%'%'%'%'",
    "l_-l_+%'%'0$1&$)&$)&$)&$)O`P'a=#%#%#%)9`_xJhRgo\\$hR%$hR%$hR%$hR%$hR%$hR%$hR%$hR%$hR%$hR%$hR%",
    "`te\\hRcp?$hR%$hR%$hR%$hR%$hR%$hR%g{K`_z;#h}B#ir[#p*#f~L#gu8#`oI$$se)#qvT#na+#oa>#`_%#ai'#dmA",
    "aal5`a_-#`x;#kI#iG#a_Q#ig\\#y=#~[#xQ#cjM#bo=#agQ#sbL#`i1#eh%#`{A#dj3#ek5#pg^#c}Q#dyO#}I#ih<",
    "aam'`as##`tE#j_L#aeU#`t]#`nC#f}?#pl&#qM#hU#cwO#`rM#`|Q#`h5#alK#`r9#aW#a_I#an%#`c-#tM#h~:#g)",
    "aamU``o##`sE#c`]#b`]#dfP#li8#`s=#fyC#`b+#bw:#`uK#di;#av)#oq(#}/#bsU#`_1#i5#bwC#gS#el?#p~P#ke-",
    "aanGtyC#B#iw##~##`sY#c}##a|@#iz0#`|=#gx?#oeD#bsO#`bE#de%#o5#hd(#ib7#i~V#cfS#cu2#ge9#`}B#eh[",
    "aao9uiQ#`f5#gd=#bp7#`u=#gf^#hqW#hj^#ap:#go1#giT#cvI#ii8#v5#b/#e`W#dm'#`n/#afE#`zI#ow6#j)#`k5",
    "aap+xi##`y=#av1#am3#fr5#`g=#`bI#`U#si0#dk)#`g%#hqA#l`B#yC#bO#u/#axY#q7#zO#`kU#`bC#t-#b|E#av.",
    "aap[`el]#yY#pk8#cK#p[#fn5#ekG#o3#ju<#i##}'#ad]#cl7#ai\\#hw$#ac]#`i'#nE#s7#df+#e)#a~A#dO#cx#",
    "aaqO`gg/#aO#e[#rj(#jfE#el##`iS#mj<#c{H#rW#a}C#aM#anS#`dI#aaC#`e##b|K#ba+#c_E#neD#kuG#q`0#dqO",
    "aarAzv%#`l3#jE#`m5#j/#y/#`fI#fh##q|8#cm]#l}/#qvX#bm7#cnA#gzO#ku8#mM#`y1#b`G#hiI#qf8#o/#af+",
    "aas3zf%#iA#jC#`c-#`{U#nW#apU#anK#G#ak)#`j;#q`,#fiA#fb(#f|=#vO#cs7#cm-#`oK#r?#mtF#`s[#djI#`{L",
    "aat'`_yK#k7#arR#q8#fc1#od&#l~K#l`^#`L#bjM#`bI#e|]#g{4#cu-#`uN#ixU#`z,#bvA#bkV#jkB#brT#`e;'u/",
    "aat[zi3'dnJ#g{+#}[#sW#`+#1#`;#f})#faZ#xE%`u%%`hS'`kS#eE)abS#=#`?#`eS#blB#`pY#q},#i=#b;#kK#Y",
    "aav)ue]#rG#bA#b3#nO#b?#~W#7#`b;#f'#`3#b7#{M#cY#dU#oK#`i/#d=#gS#rG#e5#oQ#`dU#dQ#9#$#3#/#1#`G#%",
    "aaw+`_r/#a-#iI#qS#M#`W#i-#cY#o3$$cK#n[#`g5#c?#k)#`W#lK#`Q#uW#c7#`wY#h?#a##mzZ#c_t)#bvu&'lz2",
    "aax)tx1#aD#o2#n)#`]#iY#`M#uA#a:#a3#a=#t'#a]#cU#C#h##eG#~3#1#cS#a3#h]#b[#a6#c?#`B#cW#a/#l7#a[",
    "aay)yw'#gK#hC#d=#+#`]#`b5#a-#l%#lK#B#aY#g;#j/#`t)#`m>#c'#c)#iY#c]#`Q#fC#'#dM#E#U#aW#6#l/#o-",
    "aaz)``_##e1#f?#d)#j##eI#{-#d1#}/#n/#a5#C#hY#`Y#`@#`S#(#D#aC#aM#kO#qK#i?#hU#f9#`a7#b=#bU#c=#`/",
    "aa{)`gp=#`G#w1#`eO#bguW#.#baM#cemJ#`e1#`)#clj/#axU#ha1#b~{2#aAa1`g~H%U8&4$%T#%#%#%#%#%#%%'#%",
    "aa~S`p[#%#%%'%'#%%'#%%'#%#%#%#%#L#*#7#5dtMafbY%'?7c7cK#%p^$pQk0$k7%#g9gA#%|O|O`pb9`pb3$(%aWb1",
    "b{e3b{e/#$#%#$#%ammYbfiD#,#5#br}]#brt:#aG#=#a9#c##`%#aG#R#foD#b{d/#bso<#1#C#I#bsdA#bzyP#fsO",
    "eiu%tvY#bse7#bsd^#=#w2#wC#5#cxsG#cxq>#?#fwJ#fyC#9#`?#-#fyN#f|;#'#Y#O#9#%#E#`K#3#5#U#7$%'#bs~9",
    "eiv)|~?#fs>#M#bteC#bte*#/#M#d'#b:#C#`'#`[#aS#W#a1#C$$`)#M#G#3#A#j7#h&#h)#eF#`-#`dP#`yY#hF#`3",
    "eiw+vn9#c6#dE#$#c)#bumK#buk6#-#A#K#3#a+#buvK#a/#but2#`E#;#aH#cO#hmJ#?#hrG$$`S#bva?#bu}$#M#A#;",
    "eix)cnw3#bvf0#1#{-#z0#hwD#hyI#?#aO#`L#bvy9#bvs4#bvs9#bvqZ#(#E#b9#%#i`L#iaG#`=#M#`?#ic@#calY",
    "eix[na##ie##)#)#K#cy{##cyy2$$bwqQ#bnf^$$hhD#if4#ce|9#kq/#che*#5#igR#ii9#`M#7#`+#cC#in,#^#ioS",
    "eiyScq{;#bxaD#c5#+#'#&#`C#K#`/#>#9#`E#K#+#W#9#a/#aS#`-#c+#bxo[#bxpD#a,#bG#Y#b1#bxrI#bxpD#b(#Z",
    "eizSno?#jg9#M#`%#`2#jeP#jl]#]#byhC#bydD#h1#dT#joB#jq[#jr@#`.#e`C#)#duQ#b6#e}=#of&#hkO#+#/#a%",
    "ei{KzpM#byx'#ceoV#j|9#bX#eU#`M#bysC#bys0#bL#g-#kb\\#kdA#b1#a9#e7#byt-#byr>#kn$#kp9#bza7#bz_H",
    "ei|;oaG#kq3#`A#Y#%#bzl;#fzR#f~=#bzk*#bzz+#bzv8#?#b:#dU#`7#`Y#`R#`7#A#=#bzs%#bzuN#g9#a)#lc(",
    "ei}1|p=#*#bzvS#bz}J#k=#bzu[#`G#bztF#bU#X#(#ln(#loK#`M#.#`S#bjz?#bju:#b{`##bz}(#b{h%#b{c8#=#Y",
    "ei~%czeK#b{tF#M#b{}[#f=#b{}N#E#mb,#mc%$$mbH#mh%#M#M#K#a5#mi(#ml)#b|rS#b|qZ#b|u##b|s6#bqdU",
    "ei~S~n?#b}h)#Q#cK#ckz^#;#msK#b}kQ#$#`5#W#b}l@$$%#`=#mtX#mw'#mvH#aK#clvM#b}{0#a'#a+#m|(#cmeA",
    "ej_I`_j;#b~gK#`=#b~g.#b'#nc*#ne]#7#-#b~w]$$h]#b~|H#ndN#cnk%#b~~(#)#njR#cnpY#b~|2#noF#np7#,#]",
    "ej`=da_/#c_q0#nq.#ntC#`]#a1#nw$#cox/#`%#cow^#co|W#c_{P#c`_+#c_~0#b9#9#c`h1#a=#c`gH#c`l'#c`kB",
    "eja+cuf=#cccF#of9#aM#og2#oi1#igT#cj~C#?#l{V#5#brs(#)#bs'#s`L#oq7#.#G#kwV#kxC#'#7#`9#caf+#caf,",
    "eja]`a}U#a7#a?#cF#d+#`;#bO#gJ#b]#'#C#caf3#i5#c^#crbB#p_/#'#`-#cb|?#cbyV#car?#crtT#+#cry+#hI",
    "ejbSqo9#phQ#;#9#'#a+#`(#c?#`>#d%#aL#a1#Y#po@#prC#`'#pr>#puI#)#cbvG#cbrN#1#pwT#pxQ#umX#cysY#e+",
    "ejcMqzK#5#qa]#aE#d1#eQ#ccj5#ccg<#O#b##b'#ccv/#~wX#bcz@#@#`O#bd`C#bcxZ#b7#ce_W#Y#cdu,#b)#`'",
    "ejdAdkqG#cd{8#hA#d5#%#b&#kM#[#cejY#cd~<#sg.#shK#ceiK#cypH#snY#ne\\#ni-#ce~##f)#czsJ#3#ssG",
    "eje1do_7#c{aZ#c{fG$$cfrD#`##cf{-#cft^#suX#sx3#c/#Y#a##sz.#c|u?#cgq&#i'#e5#tk0#`%#tmO#chm)",
    "eje]soS#c}}5#gU#c9#chpR#tuD#twI#-#1#7#1#`1#ciiU",
};

enum { UTF8_BAD = 0xFFFD };

static size_t utf8_length(char first) {
    uint8_t c = first;
    return c < 0xC0 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

// the character at s; one bad byte reads as U+FFFD. Overlong forms and surrogates pass.
static uint32_t utf8_decode(const char *s, size_t n, size_t *used) {
    size_t len = utf8_length(s[0]);
    uint32_t c = len == 1 ? (uint8_t)s[0] : s[0] & (0x7Fu >> len);
    bool ok = len <= n && (len == 1 ? c < 0x80 : (uint8_t)s[0] < 0xF8);
    for (size_t i = 1; ok && i < len; i++) {
        ok = (s[i] & 0xC0) == 0x80;
        c = c << 6 | (s[i] & 0x3F);
    }
    ok = ok && c <= 0x10FFFF;
    *used = ok ? len : 1;
    return ok ? c : UTF8_BAD;
}

static size_t utf8_encode(uint32_t c, char *out) {
    size_t len = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = len - 1; i > 0; i--, c >>= 6) out[i] = 0x80 | (c & 0x3F);
    out[0] = len == 1 ? c : c | (0xF00 >> len & 0xFF);
    return len;
}

// was c, decoded from `used` bytes, proper UTF-8?
static bool utf8_valid(uint32_t c, size_t used) {
    char s[4];
    return utf8_encode(c, s) == used && c - 0xD800 >= 0x800;
}

static uint32_t range_number(const char **s) {
    uint32_t high = 0;
    for (; **s >= '#' + 60; ++*s) high = high * 32 + (**s - '#' - 60);
    return high * 60 + (*(*s)++ - '#');
}

// the value of character c in a table of n lines
static int32_t range_value(const char *const *line, size_t n, uint32_t c, int32_t otherwise) {
    size_t low = 0;
    while (n - low > 1) {
        size_t mid = (low + n) / 2;
        const char *s = line[mid];
        if (range_number(&s) / 2 <= c) low = mid;
        else n = mid;
    }
    const char *s = line[low];
    uint32_t next = 0;
    int32_t value = 0;
    while (*s) {
        uint32_t gap = range_number(&s), first = next + gap / 2;
        uint32_t last = gap & 1 ? first + range_number(&s) : first, change = range_number(&s);
        value += change & 1 ? -(int32_t)(change / 2) - 1 : (int32_t)(change / 2);
        if (c <= last) return c >= first ? value : otherwise;
        next = last + 1;
    }
    return otherwise;
}

#define CLASS(letter) (1ull << ((letter) & 63))   // the letters that the tokenizer's rules use
#define COUNT(array) (sizeof(array) / sizeof *(array))

static const struct { char letter; uint32_t first, last; } MORE_CLASSES[] = {
    {' ', ' ', ' '}, {'/', '/', '/'}, {'d', '0', '9'}, {'n', '\n', '\n'}, {'r', '\n', '\n'},
    {'r', '\r', '\r'}, {'f', '$', '$'}, {'f', '+', '+'}, {'f', '<', '>'}, {'f', '^', '^'},
    {'f', '|', '|'}, {'f', '~', '~'}, {'t', '`', '`'}, {'a', '!', '/'}, {'a', ':', '@'},
    {'a', '[', '`'}, {'a', '{', '~'}, {'p', '!', '/'}, {'p', ':', '~'}, {'p', 0x2018, 0x201F},
    {'p', 0x3001, 0x3002}, {'p', 0xFF01, 0xFF0F}, {'p', 0xFF1A, 0xFF5E}, {'k', 0x3040, 0x30FF},
    {'k', 0x4E00, 0x9FA5}, {'K', 0x800, 0x9FA5}, {'K', 0xAC00, 0xD7FF}, {'h', 0x3400, 0x4DBF},
    {'h', 0x4E00, 0x9FFF}, {'h', 0xF900, 0xFAFF}, {'h', 0x20000, 0x2A6DF}, {'h', 0x2A700, 0x2B81F},
    {'h', 0x2B920, 0x2CEAF}, {'h', 0x2F800, 0x2FA1F}, {'b', '!', '!'}, {'b', '(', ')'},
    {'b', ',', ','}, {'b', '.', '.'}, {'b', '?', '?'}, {'b', '|', '|'}, {'b', 0x60C, 0x60C},
    {'b', 0x6D4, 0x6D4}, {'b', 0x964, 0x964}, {'b', 0x2026, 0x2026}, {'b', 0x3001, 0x3002},
    {'b', 0xFF0C, 0xFF0C},
};

static uint64_t unicode_classes(uint32_t c) {
    int32_t k = range_value(UNICODE_CLASSES, COUNT(UNICODE_CLASSES), c, 10);
    uint64_t set = CLASS("ulcxNMPSsCO"[k]) | (k < 4 ? CLASS('L') : 0);
    if (k == 8 && c >= 0x80) return set;   // the lists above know such a space only as white space
    for (size_t i = 0; i < COUNT(MORE_CLASSES); i++)
        if (c >= MORE_CLASSES[i].first && c <= MORE_CLASSES[i].last)
            set |= CLASS(MORE_CLASSES[i].letter);
    return set;
}

// BERT's spelling of a character; 0: none
static uint32_t unicode_fold(uint32_t c, bool lower_case, bool strip_accents) {
    if (strip_accents) c = range_value(UNICODE_BASE, COUNT(UNICODE_BASE), c, c);
    uint64_t set = unicode_classes(c), drop = CLASS('C') | (strip_accents ? CLASS('M') : 0);
    if (c == UTF8_BAD || set & drop) return 0;
    int32_t d = range_value(UNICODE_LOWER, COUNT(UNICODE_LOWER), c, INT32_MAX);
    if (!lower_case || d == INT32_MAX) return c;
    return d == 0 ? c | 1 : d == -1 ? c + (c & 1) : c + d;
}
// ---- 9. tokenizer ----
//
// Text becomes ids in four steps: special tokens are cut out; rules split the rest into words; a
// word is spelled as the vocabulary does; its parts join, two neighbours at a time, for as long as
// the vocabulary knows their union. llama.cpp is the measure, to the last id.
//
//                         words            spelling                          what joins first
//   SentencePiece, llama  the whole text   a space is U+2581                 highest score
//   BPE, gpt2             by the rules     a byte is a printable character   earliest merge
//   BPE, gemma4           lines            a space is U+2581                 earliest merge
//   WordPiece, bert       by a rule        lower case, no accents            (longest token)

// Byte-level BPE spells a byte that prints as itself, the other 68 as U+0100 to U+0143.
static uint32_t byte_to_char(uint8_t b) {
    return b < 33 ? b + 256 : b >= 127 && b <= 160 ? b + 162 : b == 173 ? 323 : b;
}

// A dictionary of the file's own strings: a hash table over their numbers. Of equal strings the
// first counts. The merges of BPE are such strings, too: "left right".
typedef struct {
    uint32_t *slot;   // [mask + 1] 1 + number of a string, 0: empty; at most half are used
    Str *str;         // [n] in the same block, pointing into the map
    uint32_t n, mask;
    size_t longest;   // bytes of the longest string
} Dictionary;

// the slot of a string, or the empty one that would be its own; NULL: strings made to collide
static uint32_t *dictionary_slot(const Dictionary *d, Str s) {
    uint64_t h = 0xCBF29CE484222325;   // FNV-1a
    for (size_t i = 0; i < s.n; i++) h = (h ^ (uint8_t)s.s[i]) * 0x100000001B3;
    for (int probe = 0; probe < 1000; probe++) {
        uint32_t *slot = &d->slot[(h + probe) & d->mask];
        if (!*slot || !str_compare(d->str[*slot - 1], s)) return slot;
    }
    return NULL;
}

static int32_t dictionary_find(const Dictionary *d, const char *s, size_t n) {   // -1: not there
    const uint32_t *slot = dictionary_slot(d, (Str){s, n});
    return slot ? (int32_t)*slot - 1 : -1;
}

// The rules: regular expressions, each splits the pieces that the one before left. Alternatives
// are tried in order, quantifiers are greedy, what lies between two matches is a piece as well. A
// letter is a class of characters:
//
//   u A-Z   l a-z   c other cased letters   x other letters   L all letters   N numbers   M marks
//   P punctuation   S symbols   s white space   C control   d 0-9   n \n   r \r \n   / slash
//   f $+<=>^~|   t `   h Chinese   a ASCII punctuation   p, k, K DeepSeek's punctuation and CJK
//   b BLOOM's punctuation
//
// [..] one of, [^..] none of; ? * + as usual, 3 one to three times; ! white space or the end
// follows; ' one of 's 't 're 've 'm 'll 'd, i the same in any case, ~ the same or nothing;
// $ alone: the white space at the end of a piece.
//
// Flags: a word that is a token needs no joining; BOS is added; only spaces are spelled anew.
enum { PRE_WHOLE = 1, PRE_BOS = 2, PRE_SPACES = 4 };
typedef struct { const char *names; int flags; const char *rule[7]; } PreTokenizer;

#define RULE_GPT2   "'| ?L+| ?N+| ?[^sLN]+|s+!|s+"
#define RULE_LLAMA3 "i|[^rLN]?L+|N3| ?[^sLN]+r*|s*r+|s+!|s+"

static const PreTokenizer PRE_TOKENIZERS[] = {   // by the names that tokenizer.ggml.pre may have
    {"(SentencePiece)", PRE_SPACES | PRE_BOS, {NULL}},
    {"(WordPiece)", PRE_SPACES, {"[hPft]|[^shPft]+"}},
    {"default", 0, {"[Pf]+", RULE_GPT2, "N+", "ddd"}},
    {"gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 jina-es jina-de jina-v2-es "
     "jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert",
     0, {RULE_GPT2}},
    {"starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", 0, {"N", RULE_GPT2}},
    {"falcon", 0, {"[Pft]+", RULE_GPT2, "ddd"}},
    {"llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     PRE_WHOLE | PRE_BOS, {RULE_LLAMA3}},
    {"dbrx smaug-bpe glm4 chatglm-bpe", 0, {RULE_LLAMA3}},
    {"qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", 0,
     {"i|[^rLN]?L+|N| ?[^sLN]+r*|s*r+|s+!|s+"}},
    {"seed-coder", 0, {"i|[^rLN]?L+|N| ?[^sLN]+|s*r+|s+!|s+"}},
    {"bloom poro-chat gpt3-finnish", 0, {" ?[^sb]+"}},
    {"qwen35", 0, {"i|[^rLN]?[LM]+|N| ?[^sLMN]+r*|s*r+|s+!|s+"}},
    {"tekken", PRE_WHOLE | PRE_BOS,
     {"[^rLN]?[ucx]*[lcx]+|[^rLN]?[ucx]+[lcx]*|N| ?[^sLN]+[r/]*|s*r+|s+!|s+"}},
    {"gpt-4o llama4 kanana2 talkie minimax-m2", 0,
     {"[^rLN]?[ucx]*[lcx]+~|[^rLN]?[ucx]+[lcx]*~|N3| ?[^sLN]+[r/]*|s*r+|s+!|s+"}},
    {"deepseek-llm", 0, {"r", "s?[ulc]+", "s?p+", "$", "K+", "N+"}},
    {"deepseek-coder", 0, {"r", "s?L+", "s?P+", "K+", "N"}},
    {"deepseek-v3 hunyuan-dense joyai-llm hy_v4", 0,
     {"N3", "k+", "a[ul]+|[^rLPS]?[LM]+| ?[PS]+r*|s*r+|s+!|s+"}},
    {"gemma4 granite-embed-multi-311m", PRE_SPACES | PRE_BOS, {"[^n]+|n+"}},
};

enum { TOKENIZER_NONE, TOKENIZER_SPM, TOKENIZER_BPE, TOKENIZER_WPM };
enum { TOKEN_NORMAL = 1, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER, TOKEN_UNUSED, TOKEN_BYTE,
       TOKEN_EOG = 16, TOKEN_TYPE = 15 };   // EOG is a flag beside the type
enum { SPECIAL_TYPES = 1 << TOKEN_USER | 1 << TOKEN_CONTROL | 1 << TOKEN_UNKNOWN };
enum { SPM_SPACE = 0x2581, RAW_BYTE = 0x110000 };   // RAW_BYTE + b: a byte of SentencePiece's text

typedef struct Tokenizer {
    int kind;
    int32_t bos, eos, unk, sep;      // -1: there is none
    bool add_bos, add_eos;           // WordPiece adds sep in the place of eos
    bool space_prefix;               // text begins with a space
    bool lower_case, strip_accents;  // WordPiece
    int32_t n_vocab;
    const char *note;                // NULL, or what the user should know
    const PreTokenizer *pre;
    const Meta *scores;              // SentencePiece: [n_vocab]
    Dictionary tokens, merges;
    uint8_t *type;                   // [n_vocab]
    uint8_t *special_length;         // [tokens.longest + 1] in the same block: of so many bytes
    bool special_first[256];         // is, and with this byte begins, a token that may be cut out
    size_t piece_max;                // most bytes that detokenize writes at once
} Tokenizer;

static int32_t token_find(const Tokenizer *t, const char *text) {   // -1: there is none
    return t->n_vocab ? dictionary_find(&t->tokens, text, strlen(text)) : -1;
}

typedef struct { int32_t *id; size_t n; } Tokens;   // free(id) when done
typedef struct { uint64_t set; uint32_t c; bool cut; } Char;   // its classes; does a piece begin?

typedef struct {
    const Tokenizer *t;
    Tokens *out;
    Char *ch;         // a fragment of the text
    char *text;       // [n_text] a word of it, spelled; what follows is scratch
    uint32_t *part;   // [n_text] bytes of the part of the word that begins here, 0: none does
    uint64_t *cost;   // [2 * n_text] of joining, a tree
    size_t n_text;
    int types;        // of tokens that are cut out of the text, 1 << TOKEN_...
    bool space;       // the next fragment is to begin with one
} Work;

static size_t contraction_length(const Char *ch, size_t n, bool any_case) {
    if (n < 2 || ch[0].c != '\'') return 0;
    uint32_t fold = any_case ? 32 : 0, a = ch[1].c | fold, b = n > 2 ? ch[2].c | fold : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

// The end of the match of the alternative `rule` at ch, or NULL; the piece ends at `end`.
// Backtracks as regular expressions do: an item takes all it can, then less and less.
static Char *rule_match(const char *rule, Char *ch, Char *end) {
    if (!*rule || *rule == '|') return ch;
    if (*rule == '!')
        return ch == end || ch->set & CLASS('s') ? rule_match(rule + 1, ch, end) : NULL;
    if (*rule == '\'' || *rule == 'i' || *rule == '~') {
        size_t n = contraction_length(ch, end - ch, *rule != '\'');
        return n || *rule == '~' ? rule_match(rule + 1, ch + n, end) : NULL;
    }
    bool none = *rule == '[' && rule[1] == '^';
    uint64_t set = *rule == '[' ? 0 : CLASS(*rule);
    if (!set)
        for (rule += 1 + none; *rule != ']'; rule++) set |= CLASS(*rule);
    char many = *++rule;
    ptrdiff_t least = many != '?' && many != '*', n = 0;
    ptrdiff_t most = many == '*' || many == '+' ? end - ch : many == '3' ? 3 : 1;
    if (many && strchr("?*+3", many)) rule++;
    while (n < most && ch + n < end && !(ch[n].set & set) == none) n++;
    for (; n >= least; n--) {
        Char *match = rule_match(rule, ch + n, end);
        if (match) return match;
    }
    return NULL;
}

// one expression on one piece: marks where its matches begin and end
static void piece_split(const char *rule, Char *ch, Char *end) {
    if (*rule == '$') {
        for (; end > ch && end[-1].set & CLASS('s'); end--);
        end->cut = 1;
        return;
    }
    while (ch < end) {
        Char *match = NULL;
        for (const char *r = rule; r && !match; r = strchr(r, '|'), r += r != NULL)
            match = rule_match(r, ch, end);
        if (match) ch->cut = match->cut = 1;
        ch = match ? match : ch + 1;
    }
}

// Joining. A word is a row of parts, at first its characters. The leaves of a tree hold what it
// costs to join the part at a byte with the next one, other nodes the lesser of their children: the
// root is the cheapest pair, of equal ones the leftmost. Joining two parts changes three leaves: a
// word of n bytes takes O(n log n).
static void pair_update(Work *w, uint32_t i) {
    const Tokenizer *t = w->t;
    uint32_t a = w->part[i], b = i + a < w->n_text ? w->part[i + a] : 0, cost = 0;
    char *s = w->text + i, *merge = w->text + w->n_text;
    int32_t found = -1;
    if (a && b && t->kind == TOKENIZER_SPM) {
        found = dictionary_find(&t->tokens, s, a + b);
        float loss = found < 0 ? 0 : 0 - meta_float(t->scores, found);
        memcpy(&cost, &loss, 4);   // as an integer that compares as the float does
        cost ^= cost >> 31 ? UINT32_MAX : 0x80000000;
    } else if (a && b && a + b < t->merges.longest) {
        memcpy(merge, s, a);
        merge[a] = ' ';
        memcpy(merge + a + 1, s + a, b);
        cost = found = dictionary_find(&t->merges, merge, a + 1 + b);
    }
    uint64_t *tree = w->cost;
    size_t k = w->n_text + i;
    tree[k] = found < 0 ? UINT64_MAX : (uint64_t)cost << 32 | i;
    for (; k > 1; k /= 2) tree[k / 2] = tree[k] < tree[k ^ 1] ? tree[k] : tree[k ^ 1];
}

// joins the parts of a word; each is a token, or its bytes are
static void word_join(Work *w) {
    const Tokenizer *t = w->t;
    uint32_t *part = w->part;
    size_t n = w->n_text;
    bool whole = t->pre->flags & PRE_WHOLE ||
                 (t->kind == TOKENIZER_BPE && w->text[0] == '\n');   // Gemma 4's empty lines
    whole = whole && dictionary_find(&t->tokens, w->text, n) >= 0;
    memset(part, 0, n * sizeof *part);
    memset(w->cost, -1, 2 * n * sizeof *w->cost);
    for (size_t i = 0; i < n; i += part[i]) {
        size_t len = whole ? n : utf8_length(w->text[i]);
        part[i] = len < n - i ? len : n - i;
    }
    for (size_t i = 0; i < n; i += part[i]) pair_update(w, i);
    while (w->cost[1] != UINT64_MAX) {
        uint32_t a = w->cost[1], b = a + part[a], before = a ? a - 1 : 0;
        while (!part[before]) before--;
        part[a] += part[b];
        part[b] = 0;
        pair_update(w, b);
        pair_update(w, a);
        pair_update(w, before);
    }
    for (size_t i = 0; i < n; i += part[i]) {
        int32_t id = dictionary_find(&t->tokens, w->text + i, part[i]);
        if (id >= 0) w->out->id[w->out->n++] = id;
        for (size_t k = i; id < 0 && k < i + part[i]; k++) {
            char hex[8];
            snprintf(hex, sizeof hex, "<0x%02X>", (uint8_t)w->text[k]);
            int32_t byte = t->pre->flags & PRE_SPACES ? token_find(t, hex) : -1;
            if (byte < 0) byte = dictionary_find(&t->tokens, w->text + k, 1);
            if (byte < 0 && t->kind == TOKENIZER_SPM) byte = t->unk;
            if (byte >= 0) w->out->id[w->out->n++] = byte;
        }
    }
}

// WordPiece: the longest token, again and again; a word that cannot be spelled so is unknown
static void word_pieces(Work *w) {
    const Dictionary *d = &w->t->tokens;
    size_t before = w->out->n;
    for (size_t i = 0, n; i < w->n_text; i += n) {
        int32_t id = -1;
        n = w->n_text - i < d->longest ? w->n_text - i : d->longest;
        while (n > 0 && (id = dictionary_find(d, w->text + i, n)) < 0) n--;
        if (id < 0) w->out->n = before, id = w->t->unk, n = w->n_text;
        if (id >= 0) w->out->id[w->out->n++] = id;
    }
}

// decodes a fragment, splits it by the rules, spells each word and looks for its tokens
static void fragment_tokenize(Work *w, const char *s, size_t n) {
    const Tokenizer *t = w->t;
    bool spm = t->kind == TOKENIZER_SPM, wpm = t->kind == TOKENIZER_WPM;
    bool spaces = t->pre->flags & PRE_SPACES;
    Char *ch = w->ch, *end = ch, *next;
    if (w->space) *end++ = (Char){.c = ' ', .cut = true};
    for (size_t i = 0, used; i < n; i += used) {
        uint32_t c = utf8_decode(s + i, n - i, &used);
        if (spm && c != ' ') c = RAW_BYTE + (uint8_t)s[i], used = 1;   // bytes are kept as they are
        if (wpm) c = unicode_fold(c, t->lower_case, t->strip_accents);
        *end = (Char){spm ? 0 : unicode_classes(c), c, end == ch};
        end += c || !wpm;
    }
    end->cut = true;
    for (const char *const *rule = t->pre->rule; *rule; rule++)
        for (Char *k = ch; k < end; k = next) {
            for (next = k + 1; !next->cut;) next++;
            piece_split(*rule, k, next);
        }
    for (; ch < end; ch++) {
        if (ch->cut) w->n_text = wpm ? utf8_encode(SPM_SPACE, w->text) : 0;
        char bytes[4] = {ch->c}, *to = w->text + w->n_text;
        size_t len = 1;
        if (ch->c < RAW_BYTE) len = utf8_encode(spaces && ch->c == ' ' ? SPM_SPACE : ch->c, bytes);
        for (size_t i = 0; i < len; i++)
            if (spaces) *to++ = bytes[i];
            else to += utf8_encode(byte_to_char(bytes[i]), to);
        w->n_text = to - w->text;
        if (!ch[1].cut) continue;
        if (!wpm) word_join(w);
        else if (!(ch->set & CLASS('s'))) word_pieces(w);
    }
    w->space = false;
}

// Cuts special tokens of up to len bytes out of a text, longer ones first wherever they stand.
static void text_tokenize(Work *w, const char *s, size_t n, size_t len) {
    const Tokenizer *t = w->t;
    for (len = len < n ? len : n; len > 0; len--) {
        for (size_t i = 0; t->special_length[len] && i + len <= n; i++) {
            if (!t->special_first[(uint8_t)s[i]]) continue;
            int32_t id = dictionary_find(&t->tokens, s + i, len);
            if (id < 0 || !(w->types >> (t->type[id] & TOKEN_TYPE) & 1)) continue;
            text_tokenize(w, s, i, len - 1);
            w->out->id[w->out->n++] = id;
            w->space = t->space_prefix;
            s += i + len, n -= i + len, i = -1;
        }
    }
    if (n) fragment_tokenize(w, s, n);
}

// Appends the ids of text to out. add_special: the first and last tokens that the metadata asks
// for; parse_special: text such as <|im_start|> means the token. False: e says why.
static bool tokenize(const Tokenizer *t, const char *text, size_t n, bool add_special,
                     bool parse_special, Tokens *out, Error *e) {
    if (t->kind == TOKENIZER_NONE) return fail(e, "the model has no tokenizer: give it --tokens");
    if (n > 1 << 28) return fail(e, "%zu bytes of text are too many", n);
    size_t m = 6 * n + 8;   // a bad byte reads as U+FFFD: three bytes, each may be spelled as two
    int32_t *id = realloc(out->id, (out->n + m) * sizeof *id);
    if (id) out->id = id;
    Work w = {.t = t, .out = out, .types = parse_special ? SPECIAL_TYPES : 1 << TOKEN_USER};
    int32_t before = out->n ? out->id[out->n - 1] : -1;   // a space only after special tokens
    w.space = t->space_prefix && (before < 0 || before >= t->n_vocab ||
                                  SPECIAL_TYPES >> (t->type[before] & TOKEN_TYPE) & 1);
    w.cost = malloc(m * (2 * sizeof *w.cost + sizeof *w.part + 2) + (n + 2) * sizeof *w.ch);
    if (!id || !w.cost) return free(w.cost), fail(e, "out of memory");
    w.ch = (Char *)(w.cost + 2 * m);
    w.part = (uint32_t *)(w.ch + n + 2);
    w.text = (char *)(w.part + m);
    if (add_special && t->add_bos) out->id[out->n++] = t->bos;
    text_tokenize(&w, text, n, t->tokens.longest);
    if (add_special && t->add_eos) out->id[out->n++] = t->kind == TOKENIZER_WPM ? t->sep : t->eos;
    free(w.cost);
    return true;
}

static bool token_is_eog(const Tokenizer *t, int32_t id) {   // does generation end here?
    return id >= 0 && id < t->n_vocab && t->type[id] & TOKEN_EOG;
}

// Zero where a text begins; started where it continues another, so that SentencePiece's space in
// front of the first word stays.
typedef struct { char pending[4]; size_t n; bool started; } Detokenizer;

// the characters that are whole after one more byte; a byte that is not UTF-8 becomes U+FFFD
static size_t utf8_push(Detokenizer *d, char byte, char *out) {
    size_t n = 0, used;
    if ((byte & 0xC0) != 0x80)
        for (; d->n; d->n--) n += utf8_encode(UTF8_BAD, out + n);
    d->pending[d->n++] = byte;
    if (d->n < utf8_length(d->pending[0])) return n;
    uint32_t c = utf8_decode(d->pending, d->n, &used);
    if (!utf8_valid(c, used)) c = UTF8_BAD, used = 1;
    for (; d->n; d->n -= used) n += utf8_encode(c, out + n);
    return n;
}

// Writes the text of a token to out (room: t->piece_max), whole characters only; returns its
// bytes. Control tokens have no text.
static size_t detokenize(const Tokenizer *t, Detokenizer *d, int32_t id, char *out) {
    int type = id >= 0 && id < t->n_vocab ? t->type[id] & TOKEN_TYPE : TOKEN_UNUSED;
    if (type != TOKEN_NORMAL && type != TOKEN_USER && type != TOKEN_BYTE) return 0;
    bool strip = !d->started && t->space_prefix, spaces = t->pre->flags & PRE_SPACES;
    Str s = t->tokens.str[id];
    size_t n = 0, used;
    d->started = true;
    if (type == TOKEN_BYTE && s.n == 6)   // <0x0A>
        return utf8_push(d, strtol((char[]){s.s[3], s.s[4], 0}, NULL, 16), out);
    for (size_t i = 0; i < s.n; i += used) {
        uint32_t c = utf8_decode(s.s + i, s.n - i, &used);
        int byte = spaces && c == SPM_SPACE ? ' ' : -1;   // -1: it spells itself
        for (int b = 0; b < 256 && !spaces; b++)
            if (byte_to_char(b) == c) byte = b;
        if (type == TOKEN_USER) byte = -1;
        if (strip && i == 0 && byte == ' ') continue;
        if (byte >= 0) n += utf8_push(d, byte, out + n);
        for (size_t k = 0; byte < 0 && k < used; k++) n += utf8_push(d, s.s[i + k], out + n);
    }
    return n;
}

// Types of tokens known by their spelling, as metadata often lacks or mistakes them: ends of
// generation, control tokens, marks inside a turn. `with`: only where that token is, too.
static const struct { int type; const char *with, *names[36]; } KNOWN_TOKENS[] = {
    {TOKEN_CONTROL | TOKEN_EOG, NULL,
     {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
      "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
      "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
      "<｜end▁of▁sentence｜>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
      "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"}},
    {TOKEN_CONTROL, NULL,
     {"<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
      "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
      "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
      "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<|prefix|>", "<|suffix|>",
      "<|middle|>"}},
    {TOKEN_USER, NULL, {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"}},
    {TOKEN_USER, "<|return|>", {"<|end|>"}},   // gpt-oss
    {TOKEN_USER, "<|calls|>", {"<|end|>"}},   // Solar
    {TOKEN_NORMAL, "<|tool_response>", {"</s>"}},   // Gemma 4
};

// what holds where the metadata is silent
static const struct { const char *name, *pre; Tokenizer t; } MODELS[] = {
    {"none", NULL, {TOKENIZER_NONE, .bos = -1, .eos = -1, .unk = -1, .sep = -1}},
    {"no_vocab", NULL, {TOKENIZER_NONE, .bos = -1, .eos = -1, .unk = -1, .sep = -1}},
    {"llama", "(SentencePiece)", {TOKENIZER_SPM, .bos = 1, .eos = 2, .unk = 0, .sep = -1}},
    {"bert", "(WordPiece)", {TOKENIZER_WPM, .bos = 101, .eos = -1, .unk = 100, .sep = 102}},
    {"gpt2", NULL, {TOKENIZER_BPE, .bos = 11, .eos = 11, .unk = -1, .sep = -1}},
    {"gemma4", "gemma4", {TOKENIZER_BPE, .bos = -1, .eos = -1, .unk = -1, .sep = -1}},
};

// an array of n entries, of any number if n is 0
static const Meta *vocab_array(const Gguf *g, const char *key, uint32_t elem, size_t n, Error *e) {
    const Meta *m = gguf_find(g, key);
    const char *of = elem == GGUF_STR ? "strings" : elem == GGUF_F32 ? "f32" : "i32";
    if (!m) return fail(e, "%s is missing", key), NULL;
    if (m->type != GGUF_ARR || m->elem != elem)
        return fail(e, "%s must be an array of %s", key, of), NULL;
    if (n && m->n != n)
        return fail(e, "%s has %lld entries for %zu tokens", key, (long long)m->n, n), NULL;
    return m;
}

static bool dictionary_open(Dictionary *d, const Gguf *g, const char *key, Error *e) {
    const Meta *m = vocab_array(g, key, GGUF_STR, 0, e);
    size_t size = 16;
    if (!m) return false;
    if (m->n < 1 || m->n > 1 << 24) return fail(e, "%s has %lld entries", key, (long long)m->n);
    while (size < 2 * m->n) size *= 2;
    *d = (Dictionary){.n = m->n, .mask = size - 1};
    d->slot = calloc(1, size * sizeof *d->slot + m->n * sizeof *d->str);
    if (!d->slot) return fail(e, "out of memory");
    d->str = (Str *)(d->slot + size);
    const uint8_t *p = m->v;
    for (uint32_t i = 0; i < d->n; i++) {
        Str s = d->str[i] = str_next(&p);
        uint32_t *slot = dictionary_slot(d, s);
        if (!slot) return fail(e, "%s: made to collide", key);
        if (s.n > d->longest) d->longest = s.n;
        if (s.n && !*slot) *slot = i + 1;
    }
    return true;
}

static bool tokenizer_vocab(Tokenizer *t, const Gguf *g, Error *e) {
    const char *key = "tokenizer.ggml.token_type";
    const Meta *types = gguf_find(g, key);
    if (!dictionary_open(&t->tokens, g, "tokenizer.ggml.tokens", e)) return false;
    t->n_vocab = t->tokens.n;
    t->piece_max = 3 * (t->tokens.longest + 4);
    t->type = calloc(t->n_vocab + t->tokens.longest + 1, 1);
    if (!t->type) return fail(e, "out of memory");
    t->special_length = t->type + t->n_vocab;
    if (types && !vocab_array(g, key, GGUF_I32, t->n_vocab, e)) return false;
    for (int32_t i = 0; i < t->n_vocab; i++) {
        int64_t type = types ? meta_int(types, i) : TOKEN_NORMAL;
        t->type[i] = type >= TOKEN_NORMAL && type <= TOKEN_BYTE ? type : TOKEN_UNUSED;
    }
    if (t->kind == TOKENIZER_SPM)
        t->scores = vocab_array(g, "tokenizer.ggml.scores", GGUF_F32, t->n_vocab, e);
    if (t->kind != TOKENIZER_BPE) return t->kind == TOKENIZER_WPM || t->scores;
    if (!dictionary_open(&t->merges, g, "tokenizer.ggml.merges", e)) return false;
    for (uint32_t i = 0; i < t->merges.n; i++) {
        Str s = t->merges.str[i];
        if (s.n < 3 || !memchr(s.s + 1, ' ', s.n - 2))
            return fail(e, "merge %u, '%.*s', is not two strings", i, STR_ARG(s));
    }
    return true;
}

// what the metadata says about special tokens, and what is known of them without
static bool tokenizer_special(Tokenizer *t, const Gguf *g, Error *e) {
    static const char *const keys[] = {"cls", "bos", "unknown", "seperator",   // the rest end it
                                       "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"};
    int32_t *const kept[] = {&t->bos, &t->bos, &t->unk, &t->sep, &t->eos};
    bool wpm = t->kind == TOKENIZER_WPM, spm = t->kind == TOKENIZER_SPM;
    for (size_t i = !wpm; i < COUNT(keys); i++) {
        int64_t id = i < COUNT(kept) && *kept[i] < t->n_vocab ? *kept[i] : -1;
        char key[64];
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", keys[i]);
        const Meta *m = gguf_find(g, key);
        if (m && (m->type == GGUF_STR || m->type == GGUF_ARR))
            return fail(e, "%s must be a number", key);
        if (m) id = meta_int(m, 0);
        if (id == UINT32_MAX) id = -1;   // none
        if (id < -1 || id >= t->n_vocab)
            return fail(e, "%s is %lld, but there are %d tokens", key, (long long)id, t->n_vocab);
        if (i < COUNT(kept)) *kept[i] = id;
        if (i >= 4 && id >= 0) t->type[id] |= TOKEN_EOG;
    }
    // BERT's files do not say so, Gemma 4's say no and mean yes
    bool forced = wpm || (!spm && t->pre->flags & PRE_SPACES);
    t->add_bos = forced || gguf_int(g, "tokenizer.ggml.add_bos_token", t->pre->flags & PRE_BOS);
    t->add_eos = wpm || gguf_int(g, "tokenizer.ggml.add_eos_token", false);
    t->space_prefix = spm && gguf_int(g, "tokenizer.ggml.add_space_prefix", true);
    t->lower_case = gguf_int(g, "tokenizer.ggml.normalizer.lowercase", true);
    t->strip_accents = gguf_int(g, "tokenizer.ggml.normalizer.strip_accents", t->lower_case);
    if ((t->add_bos && t->bos < 0) || (t->add_eos && (wpm ? t->sep : t->eos) < 0))
        return fail(e, "text is to begin or end with a token, but tokenizer.ggml lacks its id");
    for (size_t i = 0; i < COUNT(KNOWN_TOKENS); i++) {
        if (KNOWN_TOKENS[i].with && token_find(t, KNOWN_TOKENS[i].with) < 0) continue;
        for (const char *const *name = KNOWN_TOKENS[i].names; *name; name++) {
            int32_t id = token_find(t, *name);
            if (id >= 0) t->type[id] = KNOWN_TOKENS[i].type;
        }
    }
    for (int32_t i = 0; i < t->n_vocab; i++) {
        Str s = t->tokens.str[i];
        if (!s.n || !(SPECIAL_TYPES >> (t->type[i] & TOKEN_TYPE) & 1)) continue;
        t->special_first[(uint8_t)s.s[0]] = true;
        t->special_length[s.n] = true;
    }
    return true;
}

// g must stay open as long as t. False: e says what is missing, wrong or unknown.
static bool tokenizer_open(Tokenizer *t, const Gguf *g, Error *e) {
    Str model = gguf_str(g, "tokenizer.ggml.model"), pre = gguf_str(g, "tokenizer.ggml.pre");
    size_t i = 0;
    *t = (Tokenizer){0};
    if (!model.s) return fail(e, "tokenizer.ggml.model is missing");
    while (i < COUNT(MODELS) && !str_eq(model, MODELS[i].name)) i++;
    if (i == COUNT(MODELS))
        return fail(e, "tokenizer.ggml.model '%.*s' is not one of llama, gpt2, gemma4, bert, none",
                    STR_ARG(model));
    *t = MODELS[i].t;
    if (t->kind == TOKENIZER_NONE) return true;
    if (MODELS[i].pre) pre = (Str){MODELS[i].pre, strlen(MODELS[i].pre)};
    else if (!pre.n) t->note = "tokenizer.ggml.pre is missing: 'default' is assumed";
    if (!pre.n) pre = (Str){"default", 7};
    for (i = 0; i < COUNT(PRE_TOKENIZERS); i++)
        for (const char *s = PRE_TOKENIZERS[i].names, *end; *s; s = end + (*end == ' ')) {
            end = s + strcspn(s, " ");
            if (!str_compare((Str){s, end - s}, pre)) t->pre = &PRE_TOKENIZERS[i];
        }
    if (!t->pre) return fail(e, "tokenizer.ggml.pre '%.*s' is unknown", STR_ARG(pre));
    return tokenizer_vocab(t, g, e) && tokenizer_special(t, g, e);
}

static void tokenizer_close(Tokenizer *t) {
    free(t->tokens.slot);
    free(t->merges.slot);
    free(t->type);
    *t = (Tokenizer){0};
}
// ---- 10. sampler ----
//
// Stages over one array of candidates, each a function that reorders or shortens it: penalty,
// temperature, top-k, top-p, min-p; then greedy choice or a draw. llama.cpp tempers last; here
// the cuts see the tempered distribution. Nothing sorts a whole vocabulary: sort_top moves the k
// best to the front, one comparison for each of the others.

static int best_first(const void *a, const void *b) {   // ties: the lower id
    const Candidate *x = a, *y = b;
    return x->logit == y->logit ? (x->id > y->id) - (x->id < y->id) : x->logit < y->logit ? 1 : -1;
}

// The k best of n to the front, in order: what the k-th best so far does not beat gathers behind
// it, and is sorted in when there are k of them.
static void sort_top(Candidate *c, size_t n, size_t k) {
    size_t gathered = k;
    qsort(c, k, sizeof *c, best_first);
    for (size_t i = k; i < n; i++) {
        if (c[i].logit < c[k - 1].logit) continue;
        Candidate x = c[i];
        c[i] = c[gathered];
        c[gathered++] = x;
        if (gathered < 2 * k) continue;
        qsort(c, gathered, sizeof *c, best_first);
        gathered = k;
    }
    qsort(c, gathered, sizeof *c, best_first);
}

// Positive logits are divided, negative ones multiplied; each id of the last tokens once: what is
// done is marked by a negative id. c[i].id == i on entry.
static void sample_penalty(Candidate *c, size_t n, const int32_t *last, int n_last, float penalty) {
    for (int i = 0; i < n_last; i++) {
        if ((size_t)last[i] >= n || c[last[i]].id < 0) continue;
        c[last[i]].logit *= c[last[i]].logit > 0 ? 1 / penalty : penalty;
        c[last[i]].id = -1;
    }
    for (int i = 0; i < n_last; i++)
        if ((size_t)last[i] < n) c[last[i]].id = last[i];
}

static void sample_temperature(Candidate *c, size_t n, float temp) {
    for (size_t i = 0; i < n; i++) c[i].logit /= temp;
}

static size_t sample_top_k(Candidate *c, size_t n, int k) {
    if (k <= 0 || (size_t)k >= n) return n;
    sort_top(c, n, k);
    return k;
}

static float best_logit(const Candidate *c, size_t n) {
    float top = c[0].logit;
    for (size_t i = 1; i < n; i++) top = c[i].logit > top ? c[i].logit : top;
    return top;
}

// adds up weights, e to the logit less the best, until they are enough; how many that takes
static size_t weigh(const Candidate *c, size_t n, double enough, double *sum) {
    float top = best_logit(c, n);
    size_t i = 0;
    *sum = 0;
    do *sum += exp_fast(c[i++].logit - top);
    while (i < n && *sum < enough);
    return i;
}

// the fewest best candidates that hold a share p of the probability
static size_t sample_top_p(Candidate *c, size_t n, float p) {
    if (p >= 1) return n;
    double total, sum;
    weigh(c, n, INFINITY, &total);
    for (size_t k = 128;; k *= 8) {
        if (k > n) k = n;
        sort_top(c, n, k);
        size_t enough = weigh(c, k, p * total, &sum);
        if (sum >= p * total || k == n) return enough;
    }
}

// drops what is less likely than p times the best
static size_t sample_min_p(Candidate *c, size_t n, float p) {
    if (p <= 0) return n;
    float least = best_logit(c, n) + logf(p);
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (c[i].logit >= least) c[kept++] = c[i];
    return kept;
}

static double random_unit(uint64_t *state) {   // splitmix64, in [0, 1)
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return ((z ^ z >> 31) >> 11) * 0x1p-53;
}

static int32_t sample_draw(const Candidate *c, size_t n, uint64_t *rng) {
    double total, sum;
    weigh(c, n, INFINITY, &total);
    return c[weigh(c, n, random_unit(rng) * total, &sum) - 1].id;
}

// last[n_last]: the tokens that the penalty sees; c: room for n_vocab candidates
static int32_t sample(const Sampling *o, const float *logits, size_t n, const int32_t *last,
                      int n_last, uint64_t *rng, Candidate *c) {
    for (size_t i = 0; i < n; i++)   // NaN never wins
        c[i] = (Candidate){logits[i] == logits[i] ? logits[i] : -FLT_MAX, i};
    sample_penalty(c, n, last, n_last, o->repeat_penalty);
    if (o->temp <= 0) {
        size_t best = 0;
        for (size_t i = 1; i < n; i++) best = c[i].logit > c[best].logit ? i : best;
        return best;
    }
    sample_temperature(c, n, o->temp);
    n = sample_top_k(c, n, o->top_k);
    n = sample_top_p(c, n, o->top_p);
    n = sample_min_p(c, n, o->min_p);
    return sample_draw(c, n, rng);
}

int32_t session_sample(Session *s, const float *logits) {
    const Sampling *o = &s->o.sampling;
    int n = o->repeat_last_n;
    int32_t id = o->temp <= 0 && o->repeat_penalty == 1 ? gpu_argmax(s, logits) : -1;
    if (id >= 0) return id;
    if (n < 0 || n > s->n_history) n = s->n_history;
    return sample(o, logits, s->m->config.n_vocab, s->history + s->n_history - n, n, &s->rng,
                  s->candidates);
}

// ---- 11. generate ----

static bool tokens_add(Tokens *t, int32_t id) {
    int32_t *more = realloc(t->id, (t->n + 1) * sizeof *more);
    if (!more) return false;
    t->id = more;
    t->id[t->n++] = id;
    return true;
}

void model_close(Model *m) {
    for (size_t i = 0; i < m->n_owned; i++) free(m->owned[i]);
    if (m->tokenizer) tokenizer_close(m->tokenizer);
    free(m->tokenizer);
    free(m->owned);
    free(m->layers);
    gguf_close(&m->gguf);
    *m = (Model){0};
}

// the file and its tokenizer; weights only where the file has them (vocabularies have none)
static bool vocab_open(Model *m, const char *path, Error *e) {
    Error why;
    *m = (Model){0};
    if (!gguf_open(&m->gguf, path, e)) return false;
    m->tokenizer = calloc(1, sizeof *m->tokenizer);
    if (!m->tokenizer) return fail(e, "out of memory");
    return tokenizer_open(m->tokenizer, &m->gguf, &why) || fail(e, "%s: %s", path, why.text);
}

bool model_open(Model *m, const char *path, Error *e) {
    Error why;
    if (!vocab_open(m, path, e)) return false;
    return weights_load(m, &why) || fail(e, "%s: %s", path, why.text);
}

// Generates up to n_predict ids (-1: no limit) after ids[0..n-1]; on_token gets each, returning
// false to stop. An end-of-generation id ends it and is not handed out.
bool session_generate(Session *s, const int32_t *ids, int n, int n_predict,
                      bool (*on_token)(void *ctx, int32_t id), void *ctx, Error *e) {
    Tokens all = {0};
    bool ok = true;
    for (int i = 0; ok && i < n; i++) ok = tokens_add(&all, ids[i]) || fail(e, "out of memory");
    while (ok && n_predict-- != 0) {
        const float *logits = session_eval(s, all.id, all.n, e);
        int32_t id = logits ? session_sample(s, logits) : -1;
        ok = logits != NULL;
        if (!ok || token_is_eog(s->m->tokenizer, id) || !on_token(ctx, id)) break;
        ok = tokens_add(&all, id) || fail(e, "out of memory");
    }
    free(all.id);
    return ok;
}

// ---- 12. main ----

#ifndef LLM_NO_MAIN

#define VERSION "1.0"

typedef struct {
    const char *model, *prompt, *file, *tokens, *logits, *ppl;
    int n_predict, bench_prompt, bench_decode;
    bool chat, special, hide_prompt, tokenize, embed, bench, info, seeded;
    Options o;
} Cli;

static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig) {
    (void)sig;
    interrupted = 1;
}

// -- options --

typedef enum { SWITCH, TEXT, INTEGER, NUMBER, SEED, PAIR } OptionKind;
typedef struct {
    const char *name;
    OptionKind kind;
    size_t at;
    double low, high;
    const char *value, *help;
} Option;

#define AT(field) offsetof(Cli, field)
#define PICK(field) offsetof(Cli, o.sampling.field)
static const Option OPTIONS[] = {
    {"-m", TEXT, AT(model), 0, 0, "MODEL", "the model, as the first argument"},
    {"-p", TEXT, AT(prompt), 0, 0, "PROMPT", "the prompt, as the second argument"},
    {"-f", TEXT, AT(file), 0, 0, "FILE", "prompt from a file, - for standard input"},
    {"-i", SWITCH, AT(chat), 0, 0, "", "chat: the model's own template, turn after turn"},
    {"-n", INTEGER, AT(n_predict), -1, INT_MAX, "N", "tokens to generate (256); -1: until the end"},
    {"-c", INTEGER, AT(o.window), 1, INT_MAX, "N", "attention window (4096 or the model's less)"},
    {"-b", INTEGER, AT(o.chunk), 1, 1 << 20, "N", "tokens of a prefill chunk (512)"},
    {"-t", INTEGER, AT(o.threads), 1, 1024, "N", "CPU threads (the CPUs this process may run on)"},
    {"--temp", NUMBER, PICK(temp), -FLT_MAX, FLT_MAX, "T", "temperature (0.8); 0 is greedy"},
    {"--top-k", INTEGER, PICK(top_k), 0, INT_MAX, "K", "the K likeliest tokens only (40); 0 all"},
    {"--top-p", NUMBER, PICK(top_p), 0, 1, "P", "the likeliest that hold a share P (0.95); 1 all"},
    {"--min-p", NUMBER, PICK(min_p), 0, 1, "P", "those at least P as likely as the best (0.05)"},
    {"--repeat-penalty", NUMBER, PICK(repeat_penalty), FLT_MIN, FLT_MAX, "R", "1.0: none"},
    {"--repeat-last-n", INTEGER, PICK(repeat_last_n), -1, INT_MAX, "N",
     "what it sees (64); -1: all"},
    {"--seed", SEED, PICK(seed), 0, 0, "S", "same seed, same text (from the clock)"},
    {"--keep", INTEGER, AT(o.keep), 0, INT_MAX, "N", "pin the first N tokens in the window"},
    {"--special", SWITCH, AT(special), 0, 0, "", "parse special tokens in PROMPT"},
    {"--no-display-prompt", SWITCH, AT(hide_prompt), 0, 0, "", "print the continuation alone"},
    {"--cpu", SWITCH, AT(o.cpu), 0, 0, "", "do not use the GPU"},
    {"--tokenize", SWITCH, AT(tokenize), 0, 0, "", "print the token ids of PROMPT"},
    {"--tokens", TEXT, AT(tokens), 0, 0, "A,B,C", "token ids instead of PROMPT, as they are"},
    {"--logits", TEXT, AT(logits), 0, 0, "FILE", "write float32 logits of every token"},
    {"--embed", SWITCH, AT(embed), 0, 0, "", "print the pooled embedding of PROMPT"},
    {"--ppl", TEXT, AT(ppl), 0, 0, "FILE", "perplexity of a text"},
    {"--bench", PAIR, AT(bench), 0, 0, "[P,N]",
     "speed of P (512) prompt, N (128) generated tokens"},
    {"--info", SWITCH, AT(info), 0, 0, "", "metadata, architecture, formats, memory plan"},
};

static void print_usage(void) {
    puts("usage: llm MODEL.gguf [PROMPT] [options]   completes PROMPT");
    for (size_t i = 0; i < sizeof OPTIONS / sizeof *OPTIONS; i++) {
        int n = printf("  %s %s", OPTIONS[i].name, OPTIONS[i].value);
        printf("%*s%s\n", n < 26 ? 26 - n : 1, "", OPTIONS[i].help);
    }
    printf("  -h, --help, --version\narchitectures:");
    for (size_t i = 0, column = 14; i < sizeof ARCHS / sizeof *ARCHS; i++) {
        if (i && !strcmp(ARCHS[i].name, ARCHS[i - 1].name)) continue;
        if (column + strlen(ARCHS[i].name) > 98) column = printf("\n ");
        column += printf(" %s", ARCHS[i].name);
    }
    putchar('\n');
}

// a whole number or any number, nothing around it
static bool parse_number(const char *text, bool whole, double low, double high, double *x) {
    char *end;
    *x = whole ? (double)strtoll(text, &end, 10) : strtof(text, &end);
    return end != text && !*end && !isspace((unsigned char)*text) && *x >= low && *x <= high;
}

static bool parse_value(Cli *cli, const Option *o, const char *text, Error *e) {
    void *at = (char *)cli + o->at;
    double x = 0;
    bool ok = o->kind == TEXT || o->kind == SEED ||
              parse_number(text, o->kind == INTEGER, o->low, o->high, &x);
    if (o->kind == TEXT) *(const char **)at = text;
    if (o->kind == INTEGER) *(int *)at = x;
    if (o->kind == NUMBER) *(float *)at = x;
    if (o->kind == SEED) {
        *(uint64_t *)at = strtoull(text, NULL, 10);
        ok = *text && !text[strspn(text, "0123456789")];
        cli->seeded = true;
    }
    return ok || fail(e, "%s: '%s' is not a value it takes; see --help", o->name, text);
}

// "P,N" behind --bench, if that is what comes
static bool parse_pair(Cli *cli, const char *text) {
    double p, n;
    char first[16] = "";
    const char *comma = text ? strchr(text, ',') : NULL;
    if (comma) snprintf(first, sizeof first, "%.*s", (int)(comma - text), text);
    if (!comma || !parse_number(first, true, 1, 1 << 24, &p) ||
        !parse_number(comma + 1, true, 1, 1 << 24, &n)) return false;
    cli->bench_prompt = p;
    cli->bench_decode = n;
    return true;
}

// "1,2,3"; ids NULL: only checks the form
static bool parse_tokens(const char *list, Tokens *ids, Error *e) {
    for (char *end; *list; list = end + (*end == ',')) {
        long long id = strtoll(list, &end, 10);
        if (!isdigit((unsigned char)*list) || (*end && (*end != ',' || !end[1])))
            return fail(e, "--tokens: '%.20s' is not a list of token ids", list);
        if (id > INT_MAX) id = INT_MAX;   // no vocabulary is so large
        if (ids && !tokens_add(ids, id)) return fail(e, "out of memory");
    }
    return true;
}

static bool parse_options(Cli *cli, int argc, char **argv, Error *e) {
    const char *word[2];
    int words = 0, used = 0;
    for (int i = 1, options = 1; i < argc; i++) {
        const char *arg = argv[i];
        const Option *o = NULL;
        if (options && !strcmp(arg, "--")) {
            options = 0;
        } else if (!options || arg[0] != '-' || !arg[1]) {
            if (words == 2) return fail(e, "'%s': one MODEL and one PROMPT are expected", arg);
            word[words++] = arg;
        } else {
            for (size_t k = 0; k < sizeof OPTIONS / sizeof *OPTIONS; k++)
                if (!strcmp(arg, OPTIONS[k].name)) o = &OPTIONS[k];
            if (!o) return fail(e, "unknown option %s; see --help", arg);
            bool flag = o->kind == SWITCH || o->kind == PAIR;
            if (flag) *(bool *)((char *)cli + o->at) = true;
            if (o->kind == PAIR && i + 1 < argc && parse_pair(cli, argv[i + 1])) i++;
            if (!flag && ++i == argc) return fail(e, "%s needs a value; see --help", arg);
            if (!flag && !parse_value(cli, o, argv[i], e)) return false;
        }
    }
    if (!cli->model && words) cli->model = word[used++];
    int prompts = !!cli->prompt + !!cli->file + !!cli->tokens + words - used;
    if (prompts > 1) return fail(e, "two prompts: give one of PROMPT, -p, -f, --tokens");
    if (used < words) cli->prompt = word[used];
    if (!cli->model) return fail(e, "no MODEL.gguf given; see --help");
    if (cli->tokens && !parse_tokens(cli->tokens, NULL, e)) return false;
    return prompts || cli->chat || cli->ppl || cli->bench || cli->info ||
           fail(e, "no PROMPT given; see --help");
}

// -- prompt --

typedef struct { char *s; size_t n; } Text;

static bool read_file(const char *path, Text *t, Error *e) {
    bool in = !strcmp(path, "-");
    FILE *f = in ? stdin : fopen(path, "rb");
    size_t cap = 1 << 16, got;
    *t = (Text){malloc(cap), 0};
    while (f && t->s && (got = fread(t->s + t->n, 1, cap - t->n, f)) > 0) {
        t->n += got;
        char *more = t->n == cap ? realloc(t->s, cap *= 2) : t->s;
        if (!more) free(t->s);
        t->s = more;
    }
    int error = !f || ferror(f) ? errno : 0;
    if (f && !in) fclose(f);
    if (!t->s) return fail(e, "out of memory");
    return !error || fail(e, "%s: %s", path, strerror(error));
}

static bool check_utf8(const char *s, size_t n, Error *e) {
    for (size_t i = 0, used; i < n; i += used) {
        uint32_t c = utf8_decode(s + i, n - i, &used);
        if (!utf8_valid(c, used))
            return fail(e, "the prompt is not UTF-8: byte %zu is 0x%02x", i, (unsigned char)s[i]);
    }
    return true;
}

// the prompt's bytes (for display) and its ids, from whichever option gave it
static bool load_prompt(const Cli *cli, const Model *m, Text *text, Tokens *ids, Error *e) {
    if (cli->tokens) return parse_tokens(cli->tokens, ids, e);
    if (cli->file && !read_file(cli->file, text, e)) return false;
    if (cli->prompt) {
        *text = (Text){strdup(cli->prompt), strlen(cli->prompt)};
        if (!text->s) return fail(e, "out of memory");
    }
    return check_utf8(text->s, text->n, e) &&
           tokenize(m->tokenizer, text->s, text->n, true, cli->special, ids, e);
}

// -- modes --

static double peak_megabytes(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
#ifdef __APPLE__
    return u.ru_maxrss / 1048576.0;
#else
    return u.ru_maxrss / 1024.0;
#endif
}

static double matrix_bytes(const Matrix *w) {
    return w->data ? (double)w->rows * quant_row_bytes(w->type, w->cols) : 0;
}

// what one token reads: each weight once (experts: the chosen), one embedding row, the KV rows
static double token_bytes(const Session *s, int pos) {
    const Config *c = &s->m->config;
    double sum = matrix_bytes(&s->m->head) + quant_row_bytes(s->m->embd.type, c->dim);
    for (int l = 0; l < c->n_layer; l++) {
        const Layer *w = &s->m->layers[l];
        const Matrix *one[] = {&w->q,         &w->k,           &w->v,
                               &w->o,         &w->router,      &w->shared_gate,
                               &w->shared_up, &w->shared_down, &w->shared_router,
                               &w->conv_in,   &w->z,           &w->alpha,
                               &w->beta,      &w->beta_alpha,  &w->delta_out};
        const Matrix *ffn[] = {&w->gate, &w->up, &w->down};
        for (size_t i = 0; i < sizeof one / sizeof *one; i++) sum += matrix_bytes(one[i]);
        for (int i = 0; i < 3; i++) sum += matrix_bytes(ffn[i]) * (w->router.data ? c->n_used : 1);
        sum += 4.0 * c->dim * 2;
        int seen = pos + 1 < s->cache[l].window ? pos + 1 : s->cache[l].window;
        sum += 2.0 * seen * (w->k.rows + w->v.rows);
        if (w->conv_in.data) sum += 8.0 * c->n_value * c->dv * c->dk;
    }
    return sum;
}

typedef struct {
    const Cli *cli;
    Session *s;
    Detokenizer text;
    char *piece;           // [piece_max]
    int n;
    double start, first;   // when evaluation began, when the first token came
} Printer;

static bool print_token(void *ctx, int32_t id) {
    Printer *p = ctx;
    const Tokenizer *t = p->s->m->tokenizer;
    if (p->n++ == 0) p->first = now();
    if (t->kind == TOKENIZER_NONE) printf(p->n > 1 ? " %d" : "%d", id);
    else fwrite(p->piece, 1, detokenize(t, &p->text, id, p->piece), stdout);
    fflush(stdout);
    return !interrupted && !ferror(stdout);
}

static void print_statistics(const Printer *p, int n_prompt) {
    double end = now(), prefill = (p->n ? p->first : end) - p->start, decode = end - p->first;
    double speed = p->n > 1 ? (p->n - 1) / decode : 0;
    fprintf(stderr,
            "prefill %d tokens %.1f tok/s, decode %d tokens %.1f tok/s %.1f GB/s, peak %.0f MB, "
            "seed %llu\n",
            n_prompt, n_prompt / prefill, p->n, speed,
            speed * token_bytes(p->s, p->s->n_history) * 1e-9, peak_megabytes(),
            (unsigned long long)p->cli->o.sampling.seed);
}

static int run_completion(const Cli *cli, Session *s, const Text *text, const Tokens *ids, Error *e)
{
    const Tokenizer *t = s->m->tokenizer;
    Printer p = {.cli = cli, .s = s, .piece = malloc(t->piece_max + 16), .start = now()};
    if (!p.piece) return fail(e, "out of memory");
    p.first = p.start;
    p.text.started = text->n > 0;
    if ((size_t)s->o.window < ids->n)
        fprintf(stderr,
                "note: the first %zu tokens of the prompt are out of sight; -c %zu keeps them\n",
                ids->n - s->o.window, ids->n);
    if (!cli->hide_prompt && text->n) fwrite(text->s, 1, text->n, stdout);
    if (!cli->hide_prompt) fflush(stdout);
    bool ok = cli->n_predict
                  ? session_generate(s, ids->id, ids->n, cli->n_predict, print_token, &p, e)
                  : session_eval(s, ids->id, ids->n, e) != NULL;
    if (ok || p.n) putchar('\n');
    free(p.piece);
    if (!ok && !interrupted) return false;
    print_statistics(&p, ids->n);
    return true;
}

// -- chat --

// A chat template is a Jinja program in the metadata. As llama.cpp does by default, the family is
// recognised by a word that only its templates have, and the turns are written from this table.
static const struct { const char *mark, *start, *user, *reply, *end; } CHATS[] = {
    {"<|im_start|>", "", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n",
     "<|im_end|>\n"},
    {"<|start_header_id|>", "", "<|start_header_id|>user<|end_header_id|>\n\n",
     "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"},
    {"<start_of_turn>", "", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n",
     "<end_of_turn>\n"},
    {"<|channel|>", "", "<|start|>user<|message|>", "<|end|><|start|>assistant", "<|end|>"},
    {"<|start_of_role|>", "", "<|start_of_role|>user<|end_of_role|>",
     "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"},
    {"<|START_OF_TURN_TOKEN|>", "", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
     "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"},
    {"<｜User｜>", "", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"},
    {"[gMASK]", "[gMASK]<sop>", "<|user|>\n", "<|assistant|>\n", ""},
    {"[|assistant|]", "", "[|user|]", "\n[|assistant|]", "[|endofturn|]\n"},
    {"<|end|>", "", "<|user|>\n", "<|end|>\n<|assistant|>\n", "<|end|>\n"},
    {"<|user|>", "", "<|user|>\n", "</s>\n<|assistant|>\n", "</s>\n"},
    {"[INST]", "", "[INST]", " [/INST]", "</s>"},
};

typedef struct { Printer p; Tokens ids; } Chat;

static bool chat_token(void *ctx, int32_t id) {
    Chat *c = ctx;
    return tokens_add(&c->ids, id) && print_token(&c->p, id);
}

// one turn: the user's text between the template's words; only those may be special tokens
static bool chat_turn(const Cli *cli, Chat *c, int kind, const char *user, size_t n, Error *e) {
    Session *s = c->p.s;
    const Tokenizer *t = s->m->tokenizer;
    bool first = c->ids.n == 0;
    char before[128];
    snprintf(before, sizeof before, "%s%s", first ? CHATS[kind].start : CHATS[kind].end,
             CHATS[kind].user);
    if (first && t->add_bos && !tokens_add(&c->ids, t->bos)) return fail(e, "out of memory");
    if (!check_utf8(user, n, e) || !tokenize(t, before, strlen(before), false, true, &c->ids, e) ||
        !tokenize(t, user, n, false, false, &c->ids, e) ||
        !tokenize(t, CHATS[kind].reply, strlen(CHATS[kind].reply), false, true, &c->ids, e))
        return false;
    c->p.text = (Detokenizer){.started = true};
    size_t prompt = c->ids.n;
    int32_t *copy = malloc(prompt * sizeof *copy);
    if (!copy) return fail(e, "out of memory");
    memcpy(copy, c->ids.id, prompt * sizeof *copy);   // ids grow while the copy is read
    bool ok = session_generate(s, copy, prompt, cli->n_predict, chat_token, c, e);
    free(copy);
    putchar('\n');
    return ok;
}

static bool run_chat(const Cli *cli, Session *s, const Text *text, Error *e) {
    Str template = gguf_str(&s->m->gguf, "tokenizer.chat_template");
    if (!template.n) return fail(e, "the model has no chat template; -i needs one");
    int n_kinds = sizeof CHATS / sizeof *CHATS, kind = 0;
    while (kind < n_kinds &&
           !memmem(template.s, template.n, CHATS[kind].mark, strlen(CHATS[kind].mark)))
        kind++;
    if (kind == n_kinds)
        return fail(e, "the model's chat template is of an unknown family");
    Chat c = {
        .p = {
            .cli = cli, .s = s, .piece = malloc(s->m->tokenizer->piece_max + 16), .start = now()}};
    bool ok = c.p.piece ? true : fail(e, "out of memory"), ask = isatty(STDIN_FILENO);
    char *line = NULL;
    size_t cap = 0;
    if (ok && text->s) ok = chat_turn(cli, &c, kind, text->s, text->n, e);
    while (ok && !interrupted) {
        if (ask) fputs("> ", stderr);
        ssize_t n = getline(&line, &cap, stdin);
        if (n < 0) break;
        if (n > 0 && line[n - 1] == '\n') n--;
        if (n > 0) ok = chat_turn(cli, &c, kind, line, n, e);
    }
    if (ok) print_statistics(&c.p, c.ids.n - c.p.n);
    free(line);
    free(c.p.piece);
    free(c.ids.id);
    return ok;
}

static bool write_row(void *ctx, int i, const float *logits) {
    struct { FILE *f; int n; } *out = ctx;
    (void)i;
    return fwrite(logits, sizeof *logits, out->n, out->f) == (size_t)out->n;
}

static bool run_logits(const Cli *cli, Session *s, const Tokens *ids, Error *e) {
    struct { FILE *f; int n; } out = {fopen(cli->logits, "wb"), s->m->config.n_vocab};
    if (!out.f) return fail(e, "%s: %s", cli->logits, strerror(errno));
    bool ok = session_run(s, ids->id, ids->n, 0, false, write_row, &out, e);
    bool bad = ferror(out.f) | fclose(out.f);
    if (bad) ok = fail(e, "%s: cannot be written whole", cli->logits);
    struct stat st;
    if (!ok && !stat(cli->logits, &st) && S_ISREG(st.st_mode)) remove(cli->logits);
    return ok;
}

typedef struct { const int32_t *ids; int n, n_vocab; double nll, squares; long count; } Perplexity;

static bool score_row(void *ctx, int i, const float *logits) {
    Perplexity *p = ctx;
    if (i + 1 == p->n) return true;
    float top = logits[0];
    double sum = 0;
    for (int k = 1; k < p->n_vocab; k++) top = fmaxf(top, logits[k]);
    for (int k = 0; k < p->n_vocab; k++) sum += exp_fast(logits[k] - top);
    double nll = log(sum) + top - logits[p->ids[i + 1]];
    p->nll += nll;
    p->squares += nll * nll;
    p->count++;
    return !interrupted;
}

static bool run_ppl(const Cli *cli, Session *s, Error *e) {
    const Tokenizer *t = s->m->tokenizer;
    Text text = {0};
    Tokens ids = {0};
    size_t n = s->o.window;
    bool ok = read_file(cli->ppl, &text, e) && check_utf8(text.s, text.n, e) &&
              tokenize(t, text.s, text.n, true, cli->special, &ids, e);
    if (ok && ids.n < 2 * n)
        ok = fail(e, "%s: %zu tokens; perplexity at -c %zu takes at least %zu", cli->ppl, ids.n, n,
                  2 * n);
    Perplexity p = {.n = n, .n_vocab = s->m->config.n_vocab};
    size_t windows = ok ? ids.n / n : 0;
    for (size_t w = 0; w < windows && ok; w++) {
        int32_t *window = ids.id + w * n;
        if (t->add_bos) window[0] = t->bos;
        p.ids = window;
        session_truncate(s, 0);
        ok = session_run(s, window, n, n / 2, false, score_row, &p, e);
    }
    if (ok && !p.count) ok = fail(e, "-c %zu leaves no token to score", n);
    if (ok) {
        double mean = p.nll / p.count, spread = p.squares / p.count - mean * mean;
        double error = p.count > 1 ? sqrt(fmax(spread, 0) / (p.count - 1)) : 0;
        printf("ppl %.4f +- %.4f tokens %zu windows %zu\n", exp(mean), exp(mean) * error, ids.n,
               windows);
    }
    free(text.s);
    free(ids.id);
    return ok;
}

typedef struct { int pooling, last; double *x; size_t dim; } Pooled;

// sums up rows; prints the result, L2-normalised, on one line: after each row if pooling is none
static bool pool_row(void *ctx, int i, const float *x) {
    Pooled *p = ctx;
    double length = 0;
    for (size_t j = 0; j < p->dim; j++)
        p->x[j] = p->pooling == 1 ? p->x[j] + x[j] : p->pooling == 2 && i > 0 ? p->x[j] : x[j];
    if (p->pooling && i < p->last) return true;
    for (size_t j = 0; j < p->dim; j++) length += p->x[j] * p->x[j];
    for (size_t j = 0; j < p->dim; j++)
        printf(j ? " %.9g" : "%.9g", length > 0 ? p->x[j] / sqrt(length) : 0.0);
    putchar('\n');
    return true;
}

// pooling as the metadata says; not said: the last token of a causal model, an encoder's mean
static bool run_embedding(Session *s, const Tokens *ids, Error *e) {
    const Config *c = &s->m->config;
    int pooling = c->pooling >= 0 ? c->pooling : c->causal ? 3 : 1;
    Pooled p = {pooling, (int)ids->n - 1, calloc(c->dim, sizeof(double)), c->dim};
    if (!p.x) return fail(e, "out of memory");
    bool ok = session_run(s, ids->id, ids->n, 0, true, pool_row, &p, e);
    free(p.x);
    return ok;
}

typedef struct { const uint64_t *words; size_t part; uint64_t *sums; } Reading;

static void read_part(void *ctx, int i, int thread) {
    Reading *r = ctx;
    const uint64_t *p = r->words + i * r->part;
    uint64_t sum[32] = {0};
    (void)thread;
    for (size_t k = 0; k < r->part; k += 32) {
        prefetch((const char *)(p + k) + AHEAD, 256);
        for (int j = 0; j < 32; j++) sum[j] += p[k + j];
    }
    for (int j = 0; j < 32; j++) r->sums[i] += sum[j];
}

// bytes per second that all threads together read from memory
static double read_bandwidth(Session *s, const uint64_t *words, size_t bytes) {
    uint64_t sums[64] = {0};
    Reading r = {words, bytes / 8 / 64, sums};
    double start = now();
    parallel(&s->pool, read_part, &r, 64);
    volatile uint64_t keep = sums[0];   // the sums must be made
    (void)keep;
    return bytes / (now() - start);
}

static bool run_bench(const Cli *cli, Session *s, Error *e) {
    enum { RUNS = 5 };
    int n_prompt = cli->bench_prompt, total = n_prompt + cli->bench_decode + 1, n = n_prompt;
    size_t bytes = (size_t)512 << 20;
    uint64_t *words = malloc(bytes), rng = 1;
    int32_t *ids = malloc(total * sizeof *ids);
    if (!words || !ids) return free(words), free(ids), fail(e, "out of memory");
    memset(words, 1, bytes);
    for (int i = 0; i < total; i++) ids[i] = random_unit(&rng) * s->m->config.n_vocab;

    // a first chunk touches weights and scratch, so that the rest measures neither disk nor kernel
    bool ok = session_eval(s, ids, n < s->o.chunk ? n : s->o.chunk, e);
    session_truncate(s, 0);
    double start = now(), decode = 0, best = 0, moved = 0;
    ok = ok && session_eval(s, ids, n, e);
    double prefill = now() - start;
    for (int run = 0; run < RUNS && ok; run++) {
        int end = n_prompt + (int)((int64_t)cli->bench_decode * (run + 1) / RUNS);
        start = now();
        for (; n < end && ok; moved += token_bytes(s, n - 1)) ok = session_eval(s, ids, ++n, e);
        decode += now() - start;
        best = fmax(best, read_bandwidth(s, words, bytes));
    }
    free(words);
    free(ids);
    if (!ok) return false;
    printf("prefill %d tokens %.1f tok/s\n", n_prompt, n_prompt / prefill);
    printf("decode %d tokens %.1f tok/s %.1f GB/s %.1f %% of %.1f GB/s\n", cli->bench_decode,
           cli->bench_decode / decode, moved / decode * 1e-9, 100 * moved / decode / best,
           best * 1e-9);
    return true;
}

static void print_meta(const Meta *m) {
    const uint8_t *p = m->v;
    printf("%.*s = ", STR_ARG(m->key));
    if (m->type == GGUF_ARR) printf("[%llu] ", (unsigned long long)m->n);
    for (uint64_t i = 0; i < m->n && i < 4; i++) {
        Str s = m->elem == GGUF_STR ? str_next(&p) : (Str){"", 0};
        if (i) printf(", ");
        if (m->elem != GGUF_STR) printf("%.9g", meta_float(m, i));
        for (size_t k = 0; k < s.n && k < 60; k++)
            putchar((unsigned char)s.s[k] < ' ' ? ' ' : s.s[k]);
        if (s.n > 60) printf("...");
    }
    printf(m->n > 4 ? ", ...\n" : "\n");
}

static void print_info(const Model *m, const Session *s) {
    const Config *c = &m->config;
    double weights = 0;
    for (size_t i = 0; i < m->gguf.n_meta; i++) print_meta(&m->gguf.meta[i]);
    printf("\narchitecture %s%s: %d layers, dim %d, head %d, vocabulary %d, context %d\n",
           c->arch->name, c->arch->verified ? "" : " (unverified: no golden output)", c->n_layer,
           c->dim, c->hd, c->n_vocab, c->n_ctx);
    for (int type = 0; type < 64; type++) {
        const char *name = quant_name(type);
        double bytes = 0;
        int count = 0;
        for (size_t i = 0; name && i < m->gguf.n_tensors; i++) {
            const Tensor *t = &m->gguf.tensors[i];
            if (t->type != type) continue;
            bytes += (double)quant_row_bytes(type, t->ne[0]) * t->ne[1] * t->ne[2] * t->ne[3];
            count++;
        }
        weights += bytes;
        if (count)
            printf("format %s: %d tensors, %.1f MB\n", name, count, bytes / 1048576);
    }
    printf("memory: weights %.1f MB mapped, KV cache %.1f MB for a window of %d, scratch %.1f MB\n",
           weights / 1048576, s->kv_bytes / 1048576.0, s->o.window, s->scratch_bytes / 1048576.0);
}

static bool run_tokenize(const Cli *cli, Model *m, Error *e) {
    Text text = {0};
    Tokens ids = {0};
    bool ok = vocab_open(m, cli->model, e) && load_prompt(cli, m, &text, &ids, e);
    for (size_t i = 0; ok && i < ids.n; i++) printf(i ? " %d" : "%d", ids.id[i]);
    if (ok) putchar('\n');
    free(text.s);
    free(ids.id);
    return ok;
}

// everything that needs the weights
static bool run_model(Cli *cli, Model *m, Session *s, Error *e) {
    Text text = {0};
    Tokens ids = {0};
    if (!model_open(m, cli->model, e)) return false;
    const Config *c = &m->config;
    const Tokenizer *t = m->tokenizer;
    bool prompt = cli->prompt || cli->file || cli->tokens, encoder = c->arch->flags & ENCODER;
    bool ok = !prompt || load_prompt(cli, m, &text, &ids, e);
    if (cli->chat && t->kind == TOKENIZER_NONE) ok = fail(e, "-i: the model has no tokenizer");
    if (ok && encoder && !cli->embed && !cli->info)
        ok = fail(e, "%s: %s is an encoder; use --embed", cli->model, c->arch->name);
    if (ok && prompt && !ids.n && !cli->tokens && t->bos >= 0)
        ok = tokens_add(&ids, t->bos) || fail(e, "out of memory");
    if (ok && prompt && !ids.n)
        ok = fail(e, cli->tokens ? "--tokens is empty"
                                 : "the prompt is empty and the model has no BOS token");
    if (encoder) cli->o.window = cli->o.chunk = larger(ids.n, 1); // it sees the whole text at once
    ok = ok && session_open(s, m, cli->o, e);
    if (ok) s->stop = &interrupted;
    if (!ok) ;
    else if (cli->info) print_info(m, s);
    else if (cli->ppl) ok = run_ppl(cli, s, e);
    else if (cli->bench) ok = run_bench(cli, s, e);
    else if (cli->embed) ok = run_embedding(s, &ids, e);
    else if (cli->logits) ok = run_logits(cli, s, &ids, e);
    else if (cli->chat) ok = run_chat(cli, s, &text, e);
    else ok = run_completion(cli, s, &text, &ids, e);
    if (ok && t->note) fprintf(stderr, "note: %s\n", t->note);
    if (ok && cli->o.window > c->n_ctx)
        fprintf(stderr, "note: -c %d is larger than the model's context of %d\n", cli->o.window,
                c->n_ctx);
    free(text.s);
    free(ids.id);
    return ok;
}

int main(int argc, char **argv) {
    Cli cli = {.n_predict = 256, .bench_prompt = 512, .bench_decode = 128,
               .o.sampling = {.temp = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f,
                              .repeat_penalty = 1, .repeat_last_n = 64}};
    Error e = {""};
    Model m = {0};
    Session s = {0};
    struct timespec t;
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++) {
        if (!strcmp(argv[i], "-h") || !strcmp(argv[i], "--help")) return print_usage(), 0;
        if (!strcmp(argv[i], "--version")) return puts("llm " VERSION), 0;
    }
    if (!parse_options(&cli, argc, argv, &e)) return fprintf(stderr, "llm: %s\n", e.text), 2;
    clock_gettime(CLOCK_REALTIME, &t);
    if (!cli.seeded) cli.o.sampling.seed = (uint64_t)t.tv_sec * 1000003 ^ t.tv_nsec;
    signal(SIGINT, on_interrupt);
    bool ok = cli.tokenize ? run_tokenize(&cli, &m, &e) : run_model(&cli, &m, &s, &e);
    if (ok && (fflush(stdout) || ferror(stdout)))
        ok = fail(&e, "standard output: %s", strerror(errno));
    session_close(&s);
    model_close(&m);
    if (interrupted) return 130;
    if (!ok) fprintf(stderr, "llm: %s\n", e.text);
    return !ok;
}

#endif   // LLM_NO_MAIN

