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
//    4. loading      which bytes of the file are which weights
//    5. matmul       threads, int8 activations, matrix x vector and matrix x matrix
//    6. attention    online softmax over the f16 ring
//    7. ops          norms, RoPE, activations
//    8. mixers       FFN, experts, the gated delta rule
//    9. forward      one function for prefill and decode
//   10. session      the KV ring, prefix reuse, the memory plan
//   11. tokenizer    SentencePiece, byte-level BPE, WordPiece; before it the tables of Unicode
//   12. sampler      penalty, temperature, top-k, top-p, min-p
//   13. generate     the loop around all of it
//   14. main         the command line
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
#define RSS_PER_MB 1048576.0   // ru_maxrss counts bytes there, kilobytes elsewhere
#else
#include <sched.h>
#define RSS_PER_MB 1024.0
#endif
#include "quant.h"
// ==== Part I: the engine =========================================================================
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

static bool is_word(const char *word, const char *words) {   // of a list: "llama mistral3"
    for (size_t n = strlen(word), k; *words; words += k + (words[k] == ' ')) {
        k = strcspn(words, " ");
        if (k == n && !memcmp(words, word, n)) return true;
    }
    return false;
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

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
typedef struct { Str name; int type, n_dims, ne[4]; uint64_t offset; const uint8_t *data; } Tensor;
typedef struct { uint8_t *base; size_t size; } Map;

typedef struct {
    Meta *meta;        // [n_meta] sorted by key, of the first file
    Tensor *tensors;   // [n_tensors] sorted by name, of all files
    Map *maps;         // [n_maps] one per split file
    size_t n_meta, n_tensors, n_maps;
} Gguf;

typedef struct { const uint8_t *p, *end; bool bad; } Cursor;

// the next n bytes; NULL where the file ends before them, and from then on
static const void *take(Cursor *c, uint64_t n) {
    if (n > (uint64_t)(c->end - c->p)) c->bad = true;
    if (c->bad) return NULL;
    c->p += n;
    return c->p - n;
}

static uint64_t read_bytes(Cursor *c, size_t n) {   // n = 1, 2, 4, 8
    uint64_t x = 0;
    const void *p = take(c, n);
    if (p) memcpy(&x, p, n);
    return x;
}

static Str read_str(Cursor *c) {
    uint64_t n = read_bytes(c, 8);
    const char *s = take(c, n);
    return s ? (Str){s, n} : (Str){"", 0};
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
    if (m->type == GGUF_ARR) {
        m->elem = read_bytes(c, 4);
        m->n = read_bytes(c, 8);
        if (m->elem == GGUF_ARR) return fail(e, "arrays of arrays are not supported");
    }
    m->v = c->p;
    if (c->bad) return fail(e, "the file ends inside the metadata");
    if (m->elem >= GGUF_TYPES)
        return fail(e, "unknown %s type %u", m->type == GGUF_ARR ? "element" : "value", m->elem);
    if (m->n > (uint64_t)(c->end - c->p))
        return fail(e, "%zu values do not fit into the file", (size_t)m->n);
    take(c, m->n * gguf_size[m->elem]);
    for (uint64_t i = 0; m->elem == GGUF_STR && i < m->n && !c->bad; i++) read_str(c);
    return !c->bad || fail(e, "its value runs past the end of the file");
}

static bool read_tensor(Cursor *c, Tensor *t, Error *e) {
    uint64_t ne[4] = {1, 1, 1, 1};
    t->name = read_str(c);
    t->n_dims = read_bytes(c, 4);
    for (int i = 0; i < t->n_dims && i < 4; i++) ne[i] = read_bytes(c, 8);
    t->type = read_bytes(c, 4);
    t->offset = read_bytes(c, 8);
    if (c->bad) return fail(e, "the file ends inside the list of tensors");
    if (t->n_dims < 1 || t->n_dims > 4)
        return fail(e, "1 to 4 dimensions expected, found %d", t->n_dims);
    for (int i = 0; i < 4; i++) {
        if (ne[i] < 1 || ne[i] > INT32_MAX)
            return fail(e, "dimension %d is %zu, expected 1 to %d", i, (size_t)ne[i], INT32_MAX);
        t->ne[i] = ne[i];
    }
    if (!quant_name(t->type)) return fail(e, "unknown tensor type %d", t->type);
    if (!quant_row_bytes(t->type, t->ne[0]))
        return fail(e, "rows of %d weights are not whole %s blocks", t->ne[0], quant_name(t->type));
    return true;
}

static double tensor_bytes(const Tensor *t) {
    return (double)quant_row_bytes(t->type, t->ne[0]) * t->ne[1] * t->ne[2] * t->ne[3];
}

// finds the tensor's bytes, all in the map; offsets count from `start`
static bool tensor_place(Tensor *t, const Map *map, size_t start, size_t align, Error *e) {
    size_t at = t->offset;
    double size = tensor_bytes(t), room = (double)map->size - start - at;
    if (at % align) return fail(e, "offset %zu is not a multiple of the alignment %zu", at, align);
    if (room < 0) return fail(e, "offset %zu is past the end of the file", at);
    if (size > room) return fail(e, "%.0f bytes, the file has %.0f: is it truncated?", size, room);
    t->data = map->base + start + at;
    return true;
}

// of Meta and Tensor, which begin with their names
static int name_compare(const void *a, const void *b) {
    const Str *x = a, *y = b;
    int c = memcmp(x->s, y->s, x->n < y->n ? x->n : y->n);
    return c ? c : (x->n > y->n) - (x->n < y->n);
}

static bool sort_names(void *items, size_t n, size_t size, const char *what, Error *e) {
    qsort(items, n, size, name_compare);
    for (char *p = items; n > 1; n--, p += size)
        if (!name_compare(p, p + size))
            return fail(e, "%s %.*s appears twice", what, STR_ARG(*(Str *)p));
    return true;
}

static const Meta *gguf_find(const Gguf *g, const char *key) {
    Str name = {key, strlen(key)};
    return bsearch(&name, g->meta, g->n_meta, sizeof *g->meta, name_compare);
}

static double meta_float(const Meta *m, uint64_t i) {
    union { uint64_t u; int8_t i8; int16_t i16; int32_t i32; int64_t i64; float f; double d; } x;
    x.u = 0;
    memcpy(&x, m->v + i * gguf_size[m->elem], gguf_size[m->elem]);
    switch (m->elem) {
    case GGUF_I8:  return x.i8;
    case GGUF_I16: return x.i16;
    case GGUF_I32: return x.i32;
    case GGUF_I64: return x.i64;
    case GGUF_F32: return x.f;
    case GGUF_F64: return x.d;
    default:       return x.u;
    }
}

static int64_t meta_int(const Meta *m, uint64_t i) {   // clamped: counts are checked by their users
    return fmin(fmax(meta_float(m, i), -1e15), 1e15);
}

static int64_t gguf_int(const Gguf *g, const char *key, int64_t otherwise) {
    const Meta *m = gguf_find(g, key);
    return m && gguf_size[m->type] ? meta_int(m, 0) : otherwise;
}

static Str meta_str(const Meta *m) {   // without a text: {NULL, 0}
    const uint8_t *p = m && m->type == GGUF_STR ? m->v : NULL;
    return p ? str_next(&p) : (Str){NULL, 0};
}

static Str gguf_str(const Gguf *g, const char *key) { return meta_str(gguf_find(g, key)); }

static bool map_file(Map *map, const char *path, Error *e) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_NONBLOCK);   // a pipe by that name must not block
    if (fd < 0) return fail(e, "%s", strerror(errno));
    bool regular = !fstat(fd, &st) && S_ISREG(st.st_mode);
    map->size = regular ? st.st_size : 0;
    void *p = map->size ? mmap(NULL, map->size, PROT_READ, MAP_SHARED, fd, 0) : NULL;
    close(fd);
    if (!regular) return fail(e, "not a regular file");
    if (p == MAP_FAILED) return fail(e, "mmap: %s", strerror(errno));
    map->base = p;
    return map->size >= 24 || fail(e, "%zu bytes are too few for a GGUF file", map->size);
}

static void gguf_close(Gguf *g) {
    for (size_t i = 0; i < g->n_maps; i++)
        if (g->maps[i].base) munmap(g->maps[i].base, g->maps[i].size);
    free(g->maps);
    free(g->meta);
    free(g->tensors);
    *g = (Gguf){0};
}

// part i of a model: the tensors of all parts are collected, the metadata of part 0 alone
static bool gguf_read(Gguf *g, const Map *map, int i, Error *e) {
    Error why;
    Cursor c = {map->base, map->base + map->size, false};
    uint32_t magic = read_bytes(&c, 4), version = read_bytes(&c, 4);
    uint64_t n_tensors = read_bytes(&c, 8), n_meta = read_bytes(&c, 8);
    if (magic != 0x46554747) return fail(e, "not a GGUF file: it starts with %08x", magic);
    if (version >= 0x01000000) return fail(e, "a big-endian GGUF file; little endian is expected");
    if (version != 2 && version != 3)
        return fail(e, "GGUF version %u; versions 2 and 3 are supported", version);
    // a tensor's entry takes at least 32 bytes, a key with its value at least 13
    if (n_tensors > map->size / 32 || n_meta > map->size / 13)
        return fail(e, "%zu tensors and %zu metadata keys do not fit into %zu bytes",
                    (size_t)n_tensors, (size_t)n_meta, map->size);
    Meta *m = realloc(g->meta, (g->n_meta + n_meta + 1) * sizeof *m);
    if (m) g->meta = m;
    Tensor *t = realloc(g->tensors, (g->n_tensors + n_tensors + 1) * sizeof *t);
    if (t) g->tensors = t;
    if (!m || !t) return fail(e, "out of memory");

    m += g->n_meta;
    t += g->n_tensors;
    for (size_t k = 0; k < n_meta; k++)
        if (!read_meta(&c, &m[k], &why))
            return fail(e, "key %.*s: %s", STR_ARG(m[k].key), why.text);
    if (!sort_names(m, n_meta, sizeof *m, "key", e)) return false;
    Gguf part = {.meta = m, .n_meta = n_meta};
    int64_t align = gguf_int(&part, "general.alignment", 32), no = gguf_int(&part, "split.no", i);
    if (align < 8 || align > 1 << 20 || (align & (align - 1)))
        return fail(e, "general.alignment is %.0f, want a power of two from 8 on", (double)align);
    if (no != i) return fail(e, "this is part %d of a model; open part 1", (int)no + 1);
    for (size_t k = 0; k < n_tensors; k++)
        if (!read_tensor(&c, &t[k], &why))
            return fail(e, "tensor %.*s: %s", STR_ARG(t[k].name), why.text);
    size_t start = (c.p - map->base + align - 1) / align * align;
    for (size_t k = 0; k < n_tensors; k++)
        if (!tensor_place(&t[k], map, start, align, &why))
            return fail(e, "tensor %.*s: %s", STR_ARG(t[k].name), why.text);
    g->n_tensors += n_tensors;
    if (i == 0) g->n_meta = n_meta;
    return true;
}

// opens path and, where it is the first of a split model, all its parts
static bool gguf_open(Gguf *g, const char *path, Error *e) {
    char part[4096], tail[64];
    Error why;
    int64_t count = 1;
    int stem = 0;
    *g = (Gguf){0};
    for (int i = 0; i < count; i++) {
        snprintf(part, sizeof part, "%.*s-%05d-of-%05d.gguf", stem, path, i + 1, (int)count);
        const char *name = i ? part : path;
        Map *maps = realloc(g->maps, (i + 1) * sizeof *maps);
        if (!maps) return fail(e, "out of memory");
        g->maps = maps;
        maps[g->n_maps++] = (Map){0};
        if (!map_file(&maps[i], name, &why) || !gguf_read(g, &maps[i], i, &why))
            return fail(e, "%s: %s", name, why.text);
        count = gguf_int(g, "split.count", 1);
        if (count < 1 || count > 99999) return fail(e, "%s: split.count is out of range", path);
        snprintf(tail, sizeof tail, "-00001-of-%05d.gguf", (int)count);
        stem = larger(strlen(path), strlen(tail)) - strlen(tail);
        if (count > 1 && strcmp(path + stem, tail))
            return fail(e, "%s: a model in %d parts must be named *%s", path, (int)count, tail);
    }
    return sort_names(g->tensors, g->n_tensors, sizeof(Tensor), "tensor", &why) ||
           fail(e, "%s: %s", path, why.text);
}

// ---- 3. model ----
//
// A row of ARCHS says how its architectures differ from a plain Llama; the tensors that a file
// has say the rest (biases, QK norms, post-norms, fused QKV or gate-up, experts, sinks, tied
// head). To add an architecture: read its row's values off its reference implementation, add its
// name to the row that has them, or such a row, run `./llm model.gguf --info`; a tensor under a new
// name goes into load_layer, a key into load_config. Then add one line to test.c. RoPE pairing is
// the usual mistake, and position 0 cannot show it.
//
// Every row was measured against llama.cpp 0.5.0 on random models (f32 weights, 160 tokens, its
// options and special cases): the logits are equal to an NMSE of 1e-6 (but for ernie4_5's
// attn_output.bias, ignored there). For those in VERIFIED the tests hold llama.cpp's logits.

enum { RMS, LAYER, BARE };                    // norm: RMSNorm, LayerNorm, LayerNorm without weights
enum { SILU, GELU, RELU2, SWIGLU_OAI };       // GELU in its tanh form
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
    GEMMA2 = EMBD_SQRT | WINDOW_4096 | CAPPED,
    GEMMA3 = EMBD_SQRT | LOCAL_10000 | LOCAL_UNSCALED,
};

typedef struct {
    const char *names;            // "llama mistral3"
    uint8_t norm, act, rope;
    uint16_t flags;
    uint8_t local;                // windows: all layers but every local-th; 0: they are ignored
    uint8_t no_rope;              // every no_rope-th layer has no RoPE
    uint8_t n_layer;              // the row is for the size with so many layers; 0: any other
} Arch;

static const Arch ARCHS[] = {
    {"ernie4_5-moe llama mistral3", RMS, SILU, NORM, .flags = GATES_NORMED},
    {"baichuan", RMS, SILU, NORM, .n_layer = 32},
    {"baichuan", RMS, SILU, NO_ROPE, .flags = ALIBI_8, .n_layer = 40},
    {"baichuan", RMS, SILU, NO_ROPE, .flags = 0},
    {"bailingmoe chatglm deepseek ernie4_5 glm4 internlm2 xverse", RMS, SILU, NORM, .flags = 0},
    {"smollm3", RMS, SILU, NORM, .no_rope = 4},
    {"granite", RMS, SILU, NORM, .flags = ROPE_TUNED | LOGIT_DIVIDE},
    {"granitemoe", RMS, SILU, NORM, .flags = LOGIT_DIVIDE | GATES_NORMED},
    {"minicpm", RMS, SILU, NORM, .flags = LOGIT_DIVIDE | MUP},
    {"arcee", RMS, RELU2, NORM, .flags = 0},
    {"olmo", BARE, SILU, NORM, .flags = 0},
    {"command-r", LAYER, SILU, NORM, .flags = 0},
    {"cohere2", LAYER, SILU, NORM, .flags = WINDOW_4096 | LOCAL_ROPE, .local = 4},
    {"exaone4", RMS, SILU, NEOX, .flags = WINDOW_4096 | LOCAL_ROPE, .local = 4, .n_layer = 64},
    {"exaone exaone4 olmoe phi3 qwen2 qwen2moe qwen3 seed_oss", RMS, SILU, NEOX, .flags = 0},
    {"dots1 glm4moe", RMS, SILU, NEOX, .flags = 0},
    {"minimax-m2 qwen3moe qwen3next", RMS, SILU, NEOX, .flags = GATES_NORMED},
    {"qwen35", RMS, SILU, NEOX, .flags = DELTA_TILED},
    {"qwen35moe", RMS, SILU, NEOX, .flags = DELTA_TILED | GATES_NORMED},
    {"hunyuan-dense", RMS, SILU, NEOX, .flags = QK_NORM_LATE},
    {"hunyuan-moe", RMS, SILU, NEOX, .flags = QK_NORM_LATE | GATES_NORMED},
    {"olmo2", RMS, SILU, NEOX, .flags = LOCAL_UNSCALED, .local = 4},
    {"gpt-oss", RMS, SWIGLU_OAI, NEOX, .flags = GATES_NORMED, .local = 2},
    {"gemma", RMS, GELU, NEOX, .flags = EMBD_SQRT},
    {"gemma2", RMS, GELU, NEOX, .flags = GEMMA2 | SCALE_BY_DIM, .local = 2, .n_layer = 46},
    {"gemma2", RMS, GELU, NEOX, .flags = GEMMA2, .local = 2},
    {"gemma3", RMS, GELU, NEOX, .flags = GEMMA3 | SCALE_BY_DIM, .local = 6, .n_layer = 62},
    {"gemma3", RMS, GELU, NEOX, .flags = GEMMA3, .local = 6},
    {"orion stablelm", LAYER, SILU, NEOX, .flags = 0},
    {"falcon gptneox phi2 starcoder2", LAYER, GELU, NEOX, .flags = 0},
    {"nemotron", LAYER, RELU2, NEOX, .flags = 0},
    {"gpt2 starcoder", LAYER, GELU, NO_ROPE, .flags = 0},
    {"bloom", LAYER, GELU, NO_ROPE, .flags = ALIBI_8},
    {"bert", LAYER, GELU, NO_ROPE, .flags = ENCODER},
    {"nomic-bert", LAYER, SILU, NEOX, .flags = ENCODER},
};

static const char VERIFIED[] = "bert gemma gemma2 gemma3 glm4moe gpt-oss llama mistral3 nomic-bert "
                               "phi3 qwen2 qwen3 qwen35 qwen3moe";

typedef struct {
    char name[32];                             // of the architecture
    const Arch *arch;
    int n_layer, n_ctx, n_vocab, dim, hd, vd;
    float eps, embd_scale, residual_scale, attn_scale, logit_scale;
    float attn_cap, logit_cap, clamp_qkv, alibi;   // 0: none
    float temp_scale;                          // queries far out are scaled (Ministral 3)
    int window;                                // of layers that have one
    int rope, n_rot;                           // pairing, and how many of hd are rotated
    float rope_base, rope_base_local, rope_factor, rope_attn, yarn_fast, yarn_slow, yarn_log;
    bool yarn;
    int n_ctx_orig;                            // context length before RoPE scaling
    int n_expert, n_used;
    float gates_scale;
    bool sigmoid, gates_normed;                // how logits become experts' weights
    int parallel;                              // attention and FFN read the same stream
    int conv, n_key, n_value, dk, dv;          // delta-net: convolution, heads, widths
    int causal, pooling;                       // -1 not said, 0 none, 1 mean, 2 CLS, 3 last
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
    const float *sinks, *router_bias;          // [n_head]; [n_expert], for the choice only
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
// cannot fail. Loading is sticky: after the first error nothing more is found; that one is told.

typedef struct {
    Model *m;
    Error *e;
    bool ok;
    int l;                    // the layer, or -1
    char prefix[24];          // of its tensors: "blk.0."
} Loader;

static void load_delta(Loader *ld, Layer *w);   // Part II

#define refuse(ld, ...) ((ld)->ok = (ld)->ok && fail((ld)->e, __VA_ARGS__))   // the first error

// metadata under the architecture's prefix
static const Meta *arch_meta(const Loader *ld, const char *key) {
    char name[128];
    snprintf(name, sizeof name, "%s.%s", ld->m->config.name, key);
    return gguf_find(&ld->m->gguf, name);
}

// a number, or this layer's in an array
static double load_number(Loader *ld, const char *key, double otherwise) {
    const Meta *v = arch_meta(ld, key);
    if (!v) return otherwise;
    uint64_t i = v->type == GGUF_ARR && ld->l > 0 ? ld->l : 0;
    double x = v->elem != GGUF_STR && i < v->n ? meta_float(v, i) : NAN;
    if (!isfinite(x)) refuse(ld, "key %.*s: want a number, or one a layer", STR_ARG(v->key));
    return x;
}

enum { REQUIRED = INT_MIN };   // no other value will do

static int load_int(Loader *ld, const char *key, int otherwise, int low, int high) {
    double x = load_number(ld, key, otherwise);
    const char *prefix = ld->m->config.name;
    if (x == REQUIRED) refuse(ld, "key %s.%s is missing", prefix, key);
    else if (!(x >= low && x <= high))
        refuse(ld, "key %s.%s is %.15g, expected %d to %d", prefix, key, x, low, high);
    return ld->ok ? x : low;
}

// Where architectures are named the key is theirs: llama.cpp ignores it in other files, whatever
// it says. 0 is as good as no key.
static float load_float(Loader *ld, const char *key, const char *archs, float otherwise) {
    bool counts = !*archs || is_word(ld->m->config.name, archs);
    double x = counts ? load_number(ld, key, 0) : 0;
    return x != 0 ? x : otherwise;
}

static const Tensor *find_tensor(const Loader *ld, const char *name, const char *suffix) {
    const Gguf *g = &ld->m->gguf;
    char full[128];
    Str key = {full, snprintf(full, sizeof full, "%s%s%s", ld->prefix, name, suffix)};
    return ld->ok ? bsearch(&key, g->tensors, g->n_tensors, sizeof(Tensor), name_compare) : NULL;
}

static void need_data(Loader *ld, const void *data, const char *name, const char *suffix) {
    if (!data) refuse(ld, "tensor %s%s%s is missing", ld->prefix, name, suffix);
}

static void *own(Loader *ld, size_t size) {   // memory that lives as long as the model
    Model *m = ld->m;
    void **owned = realloc(m->owned, (m->n_owned + 1) * sizeof *owned);
    if (owned) m->owned = owned;
    void *v = owned ? malloc(size) : NULL;
    if (v) m->owned[m->n_owned++] = v;
    else refuse(ld, "out of memory");
    return v;
}

// n floats; 0: however many there are
static const float *load_vector(Loader *ld, const char *name, const char *suffix, size_t n) {
    const Tensor *t = find_tensor(ld, name, suffix);
    if (!t) return NULL;
    size_t have = (size_t)t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
    if (n && have != n)
        refuse(ld, "tensor %.*s: want %zu values, file has %zu", STR_ARG(t->name), n, have);
    if (!ld->ok) return NULL;
    if (t->type == QUANT_F32) return (const float *)t->data;
    float *v = own(ld, have * sizeof *v);
    if (v) quant_dequantize(t->type, t->data, v, have);
    return v;
}

// n weights; for heads one for all [n], one each [heads][n], or the whole projection [heads * n]
static Norm load_norm(Loader *ld, const char *name, int heads, int n) {
    const Tensor *t = find_tensor(ld, name, ".weight");
    bool by_head = t && t->ne[0] == n;
    int size = by_head && t->ne[1] == 1 ? n : heads * n;
    const float *w = load_vector(ld, name, ".weight", size);
    return (Norm){w, load_vector(ld, name, ".bias", size), size, by_head ? n : 0};
}

// a [rows][cols] matrix, or n of them; rows 0: however many the file has
static Matrix load_matrix(Loader *ld, const char *name, int cols, int rows, int n) {
    const Tensor *t = find_tensor(ld, name, ".weight");
    if (!t) return (Matrix){0};
    const int *ne = t->ne;
    if (!rows) rows = ne[1];
    if (ne[0] != cols || ne[1] != rows || ne[2] != n || ne[3] != 1)
        refuse(ld, "tensor %.*s: want [%d,%d,%d,1], file has [%d,%d,%d,%d]",
               STR_ARG(t->name), cols, rows, n, ne[0], ne[1], ne[2], ne[3]);
    if (find_tensor(ld, name, ".input_scale"))
        refuse(ld, "tensor %.*s: input scales are not supported", STR_ARG(t->name));
    if (!ld->ok) return (Matrix){0};
    const float *bias = load_vector(ld, name, ".bias", (size_t)rows * n);
    const float *scale = load_vector(ld, name, ".scale", n);
    return (Matrix){t->data, t->type, rows, cols, bias, scale,
                    rows * quant_row_bytes(t->type, cols)};
}

static Matrix need_matrix(Loader *ld, const char *name, int cols, int rows, int n) {
    Matrix w = load_matrix(ld, name, cols, rows, n);
    need_data(ld, w.data, name, ".weight");
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
    one.data += i * w->step;   // w may be a part of its tensor's rows
    if (w->bias) one.bias += i * (w->step / quant_row_bytes(w->type, w->cols));
    if (w->scale) one.scale += i;
    return one;
}

typedef struct { const char *name; int rows; Matrix *w; } Piece;

// matrices over the residual stream: one below the other in one tensor, or each in its own
static void load_fused(Loader *ld, const char *name, int n_expert, const Piece *part, int n) {
    int cols = ld->m->config.dim, rows = 0, at = 0;
    for (int i = 0; i < n; i++) rows += part[i].rows;
    Matrix all = load_matrix(ld, name, cols, rows, n_expert);
    for (int i = 0; i < n; at += part[i++].rows)
        *part[i].w = all.data ? matrix_rows(all, at, part[i].rows)
                              : need_matrix(ld, part[i].name, cols, part[i].rows, n_expert);
}

static void load_attention(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    const Tensor *fused = find_tensor(ld, "attn_qkv", ".weight");
    const Tensor *first = fused ? fused : find_tensor(ld, "attn_q", ".weight");
    int q = w->n_head * c->hd, k = w->n_kv * c->hd, v = w->n_kv * c->vd;
    if (first && first->ne[1] == 2 * q + (fused ? k + v : 0)) q *= 2;   // attention is gated
    load_fused(ld, "attn_qkv", 1,
               (Piece[]){{"attn_q", q, &w->q}, {"attn_k", k, &w->k}, {"attn_v", v, &w->v}}, 3);
    w->o = need_matrix(ld, "attn_output", w->n_head * c->vd, c->dim, 1);
    w->sinks = load_vector(ld, "attn_sinks", ".weight", w->n_head);
    w->q_norm = load_norm(ld, "attn_q_norm", w->n_head, c->hd);
    w->k_norm = load_norm(ld, "attn_k_norm", w->n_kv, c->hd);
}
static void load_ffn(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    w->router = load_matrix(ld, "ffn_gate_inp", c->dim, c->n_expert, 1);
    w->router_bias = load_vector(ld, "exp_probs_b", ".bias", c->n_expert);
    if (!w->router.data) {
        const Tensor *up = find_tensor(ld, "ffn_up", ".weight");
        w->gate = load_matrix(ld, "ffn_gate", c->dim, w->ff, 1);
        if (!w->gate.data && up && up->ne[1] == 2 * w->ff)   // one tensor for gate and up
            load_fused(ld, "ffn_up", 1, (Piece[]){{"", w->ff, &w->gate}, {"", w->ff, &w->up}}, 2);
        else w->up = need_matrix(ld, "ffn_up", c->dim, w->ff, 1);
        w->down = need_matrix(ld, "ffn_down", w->ff, c->dim, 1);
        return;
    }
    const Tensor *down = find_tensor(ld, "ffn_down_exps", ".weight");
    need_data(ld, down, "ffn_down_exps", ".weight");
    int n = c->n_expert, ff = w->ff = down && down->ne[0] < 1 << 30 ? down->ne[0] : 1;
    load_fused(ld, "ffn_gate_up_exps", n,
               (Piece[]){{"ffn_gate_exps", ff, &w->gate}, {"ffn_up_exps", ff, &w->up}}, 2);
    w->down = need_matrix(ld, "ffn_down_exps", ff, c->dim, n);
    w->shared_up = load_matrix(ld, "ffn_up_shexp", c->dim, 0, 1);
    if (!w->shared_up.data) return;
    ff = w->shared_up.rows;
    w->shared_gate = need_matrix(ld, "ffn_gate_shexp", c->dim, ff, 1);
    w->shared_down = need_matrix(ld, "ffn_down_shexp", ff, c->dim, 1);
    w->shared_router = load_matrix(ld, "ffn_gate_inp_shexp", c->dim, 1, 1);
}

static void load_layer(Loader *ld, Layer *w) {
    static const char key[] = "attention.sliding_window_pattern";   // a period, or one bool a layer
    const Config *c = &ld->m->config;
    const Arch *a = c->arch;
    bool bare = a->norm == BARE, windows = a->local && c->window, local = windows;
    w->n_head = load_int(ld, "attention.head_count", REQUIRED, 1, 1 << 14);
    w->n_kv = load_int(ld, "attention.head_count_kv", w->n_head, 1, w->n_head);
    w->ff = load_int(ld, "feed_forward_length", c->n_expert ? 1 : REQUIRED, 1, 1 << 20);
    if (w->n_head % w->n_kv)
        refuse(ld, "layer %d: %d heads cannot share %d KV heads", ld->l, w->n_head, w->n_kv);
    w->attn_norm = load_norm(ld, "attn_norm", 1, c->dim);
    w->attn_post_norm = load_norm(ld, "post_attention_norm", 1, c->dim);
    w->ffn_norm = load_norm(ld, "ffn_norm", 1, c->dim);
    w->ffn_post_norm = load_norm(ld, "post_ffw_norm", 1, c->dim);
    if (!w->ffn_norm.w && !w->ffn_post_norm.w) {   // then it is the norm before the FFN
        w->ffn_norm = w->attn_post_norm;
        w->attn_post_norm = (Norm){0};
    }
    Norm second = load_norm(ld, "attn_norm_2", 1, c->dim);
    if (second.w) {   // Falcon 40B: attention has the second norm, the FFN the first
        w->ffn_norm = w->attn_norm;
        w->attn_norm = second;
    }
    if (a->flags & ENCODER) {
        w->attn_post_norm = load_norm(ld, "attn_output_norm", 1, c->dim);
        w->ffn_post_norm = load_norm(ld, "layer_output_norm", 1, c->dim);
    } else if (!bare && !w->attn_post_norm.w) {
        need_data(ld, w->attn_norm.w, "attn_norm", ".weight");
    }
    bool no_ffn_norm = !w->ffn_norm.w && !w->ffn_post_norm.w && !bare;
    w->parallel = second.w || c->parallel || no_ffn_norm;
    if (find_tensor(ld, "ssm_conv1d", ".weight")) load_delta(ld, w);
    else load_attention(ld, w);
    load_ffn(ld, w);
    // which layers see a window only, and which have RoPE
    const Meta *pattern = arch_meta(ld, key);
    int period = windows ? load_int(ld, key, a->local, 0, INT_MAX) : 0;
    if (pattern && pattern->type == GGUF_ARR) local = period;
    else if (period) local = ld->l % period < period - 1;
    w->window = local ? c->window : 0;
    w->rope = c->rope != NO_ROPE && !(a->no_rope && (ld->l + 1) % a->no_rope == 0) &&
              !(a->flags & LOCAL_ROPE && windows && !local);
}

// the first row of ARCHS that has the file's architecture and size
static bool load_arch(Loader *ld) {
    Model *m = ld->m;
    Config *c = &m->config;
    Str name = gguf_str(&m->gguf, "general.architecture");
    if (!name.s) return refuse(ld, "key general.architecture is missing");
    snprintf(c->name, sizeof c->name, "%.*s", STR_ARG(name));
    double layers = load_number(ld, "block_count", 0) - load_number(ld, "nextn_predict_layers", 0);
    for (size_t i = 0; i < sizeof ARCHS / sizeof *ARCHS && !c->arch; i++)
        if (is_word(c->name, ARCHS[i].names) && (!ARCHS[i].n_layer || ARCHS[i].n_layer == layers))
            c->arch = &ARCHS[i];
    if (!c->arch || !str_eq(name, c->name))
        return refuse(ld, "architecture %.*s is not supported; --help lists those that are",
                      STR_ARG(name));
    if (!m->gguf.n_tensors)
        return refuse(ld, "no tensors: this is a vocabulary, not a model");
    return ld->ok;
}

static void load_rope(Loader *ld) {
    Config *c = &ld->m->config;
    const Arch *a = c->arch;
    bool sections = load_float(ld, "rope.dimension_sections", "glm4", 0) > 0;   // NEOX, to text
    bool untuned = a->flags & ROPE_TUNED && !load_number(ld, "rope.scaling.finetuned", 1);
    c->rope = sections ? NEOX : untuned ? NO_ROPE : a->rope;
    c->n_rot = load_int(ld, "rope.dimension_count", c->hd, 0, c->hd);
    c->n_ctx_orig = load_int(ld, "rope.scaling.original_context_length", c->n_ctx, 1, INT_MAX);
    c->rope_base = load_float(ld, "rope.freq_base", "", 10000);
    float alpha = load_float(ld, "rope.scaling.alpha", "hunyuan-dense", 0);
    if (alpha > 0 && c->hd > 2) c->rope_base *= powf(alpha, c->hd / (c->hd - 2.0f));
    c->rope_base_local = load_float(ld, "rope.freq_base_swa", "gemma2 gemma3 gpt-oss",
                                   a->flags & LOCAL_10000 ? 10000 : c->rope_base);
    c->rope_factor = load_float(ld, "rope.scale_linear", "", 1);
    c->rope_factor = load_float(ld, "rope.scaling.factor", "", c->rope_factor);
    c->rope_attn = load_float(ld, "rope.scaling.attn_factor", "", 1);
    c->yarn_fast = load_float(ld, "rope.scaling.yarn_beta_fast", "mistral3", 32);
    c->yarn_slow = load_float(ld, "rope.scaling.yarn_beta_slow", "mistral3", 1);
    c->yarn_log = load_float(ld, "rope.scaling.yarn_log_multiplier", "mistral3", 0);
    Str type = meta_str(arch_meta(ld, "rope.scaling.type"));
    c->yarn = str_eq(type, "yarn");
    if (str_eq(type, "none")) c->rope_factor = 1;
    if (c->n_rot % 2 || !(c->rope_base > 0 && c->rope_base_local > 0))
        refuse(ld, "RoPE: %d dimensions at base %g", c->n_rot, c->rope_base);
}

static void load_config(Loader *ld) {
    Config *c = &ld->m->config;
    int flags = c->arch->flags;
    bool mup = flags & MUP, capped = flags & CAPPED;
    int layers = load_int(ld, "block_count", REQUIRED, 1, ld->m->gguf.n_tensors);
    c->n_layer = layers - load_int(ld, "nextn_predict_layers", 0, 0, layers - 1);
    c->dim = load_int(ld, "embedding_length", REQUIRED, 1, 1 << 20);
    c->n_ctx = load_int(ld, "context_length", REQUIRED, 1, INT_MAX);
    c->eps = load_number(ld, c->arch->norm == RMS ? "attention.layer_norm_rms_epsilon"
                                                 : "attention.layer_norm_epsilon", 1e-5);
    c->embd_scale = flags & EMBD_SQRT ? sqrtf(c->dim) : mup ? 12 : 1;
    c->embd_scale = load_float(ld, "embedding_scale", "granite granitemoe minicpm", c->embd_scale);
    c->residual_scale = load_float(ld, "residual_scale", "granite granitemoe minicpm",
                                  mup ? 1.4f / sqrtf(layers) : 1);
    c->logit_scale = load_float(ld, "logit_scale", "granite granitemoe minicpm command-r cohere2",
                               mup ? 256.0f / c->dim : 1);
    if (flags & LOGIT_DIVIDE) c->logit_scale = 1 / c->logit_scale;
    c->logit_cap = load_float(ld, "final_logit_softcapping", "gemma2 gemma3", capped ? 30 : 0);
    c->pooling = load_int(ld, "pooling_type", -1, -1, 3);
    // attention
    int heads = load_int(ld, "attention.head_count", REQUIRED, 1, 1 << 14);
    c->hd = load_int(ld, "attention.key_length", c->dim / heads, 1, 4096);
    c->vd = load_int(ld, "attention.value_length", c->dim / heads, 1, 4096);
    c->window = flags & WINDOW_4096 ? 4096 : 0;
    c->window = load_int(ld, "attention.sliding_window", c->window, 0, INT_MAX);
    c->causal = load_int(ld, "attention.causal", !(flags & ENCODER), 0, 1);
    c->parallel = load_float(ld, "use_parallel_residual", "gptneox", 0) > 0;
    c->attn_scale = 1 / sqrtf(flags & SCALE_BY_DIM ? c->dim / (float)heads : c->hd);
    c->attn_scale = load_float(ld, "attention.scale", "granite granitemoe", c->attn_scale);
    c->attn_cap = load_float(ld, "attn_logit_softcapping", "gemma2", capped ? 50 : 0);
    c->clamp_qkv = load_float(ld, "attention.clamp_kqv", "olmo", 0);
    c->temp_scale = load_float(ld, "attention.temperature_scale", "mistral3", 0);
    c->alibi = flags & ALIBI_8 ? 8 : 0;
    load_rope(ld);
    // experts
    c->n_expert = load_int(ld, "expert_count", 0, 0, 4096);
    c->n_used = load_int(ld, "expert_used_count", 0, c->n_expert > 0, c->n_expert);
    load_int(ld, "expert_group_count", 0, 0, 1);   // a choice of groups first: not supported
    c->gates_scale = load_float(ld, "expert_weights_scale", "bailingmoe deepseek dots1 glm4moe", 1);
    c->gates_normed = flags & GATES_NORMED ||
                      load_float(ld, "expert_weights_norm", "bailingmoe dots1 glm4moe", 0) > 0;
    c->sigmoid = is_word(c->name, "dots1 glm4moe minimax-m2") &&
                 load_int(ld, "expert_gating_func", 2, 1, 2) == 2;   // 1: softmax
    // delta-net
    c->conv = load_int(ld, "ssm.conv_kernel", 0, 0, 64);
    c->n_key = load_int(ld, "ssm.group_count", 0, 0, 1 << 14);
    c->n_value = load_int(ld, "ssm.time_step_rank", 0, 0, 1 << 14);
    c->dk = load_int(ld, "ssm.state_size", 0, 0, 4096);
    c->dv = load_int(ld, "ssm.inner_size", 0, 0, 1 << 20) / (c->n_value ? c->n_value : 1);
}

static bool weights_load(Model *m, Error *e) {
    Loader ld = {.m = m, .e = e, .ok = true, .l = -1};
    Config *c = &m->config;
    if (load_arch(&ld)) load_config(&ld);
    if (!ld.ok) return false;
    m->freqs = load_vector(&ld, "rope_freqs", ".weight", c->n_rot / 2);
    m->freqs_long = load_vector(&ld, "rope_factors_long", ".weight", c->n_rot / 2);
    m->freqs_short = load_vector(&ld, "rope_factors_short", ".weight", c->n_rot / 2);
    m->embd = need_matrix(&ld, "token_embd", c->dim, 0, 1);
    m->head = load_matrix(&ld, "output", c->dim, 0, 1);
    if (!m->head.data) m->head = m->embd;
    c->n_vocab = m->head.rows;
    if (m->embd.rows < c->n_vocab)
        refuse(&ld, "token_embd has %d rows, output %d", (int)m->embd.rows, c->n_vocab);
    m->pos_embd = load_matrix(&ld, "position_embd", c->dim, 0, 1);
    m->type_embd = load_matrix(&ld, "token_types", c->dim, 0, 1);
    m->embd_norm = load_norm(&ld, "token_embd_norm", 1, c->dim);
    m->out_norm = load_norm(&ld, "output_norm", 1, c->dim);
    if (c->arch->norm != BARE && !(c->arch->flags & ENCODER))
        need_data(&ld, m->out_norm.w, "output_norm", ".weight");
    m->layers = calloc(c->n_layer, sizeof *m->layers);
    if (!m->layers) refuse(&ld, "out of memory");
    for (ld.l = 0; ld.l < c->n_layer && ld.ok; ld.l++) {
        snprintf(ld.prefix, sizeof ld.prefix, "blk.%d.", ld.l);
        load_layer(&ld, &m->layers[ld.l]);
    }
    return ld.ok;
}
// ---- 5. the session ----
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
    float *conv, *state;        // delta-net: [conv-1][channels], [n_value][blocks][dk][DELTA_ROWS]
} Cache;

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

// ---- 6. what the other parts provide ----
typedef struct { const Matrix *w; const float *x; float *out; int n; } Matmul;
enum { MAX_JOBS = 64 };
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

static bool pool_open(Pool *p, int threads);
static void pool_close(Pool *p);
static void parallel(Pool *p, Task *fn, void *ctx, int n);
static size_t matmul_scratch(size_t n, size_t cols, int threads, bool floats);
static void matmul(Pool *p, void *scratch, const Matmul *jobs, int k);
static size_t attention_scratch(int n_head, int hd, int vd, int rows, int threads);
static void attention(Pool *p, void *scratch, const Attention *a);
static void narrow(const float *x, int n, uint16_t *to);
static size_t delta_state_floats(const Config *c);
static void delta_net(Session *s, const Layer *w, int n);
static void experts(Session *s, const Layer *w, int n);
static bool tokenizer_load(Model *m, Error *e);
static void tokenizer_close(struct Tokenizer *t);
static bool token_is_eog(const struct Tokenizer *t, int32_t id);
static const float MAGIC = 12582912.0f;   // 1.5 * 2^23
enum { MAGIC_BITS = 0x4b400000 };
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
// ---- 7. ops ----
//
// What happens between the matrix products, one token's row at a time: each_row runs a step for
// all rows of a chunk on all threads. Each op has a Metal kernel of the same name.


typedef void RowFn(Session *s, const void *of, int i);   // of: the layer or norm it belongs to
typedef struct { Session *s; const void *of; RowFn *fn; } RowCall;

static void row_task(void *ctx, int i, int thread) {
    RowCall *c = ctx;
    (void)thread;
    c->fn(c->s, c->of, i);
}

static void each_row(Session *s, const void *of, int n, RowFn *fn) {
    RowCall c = {s, of, fn};
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

typedef struct { const Matrix *gate, *up, *down; } Ffn;

static void activate_row(Session *s, const void *of, int i) {
    const Ffn *f = of;
    size_t ff = f->up->rows, at = i * ff;
    const float *gate = f->gate->data ? s->gate + at : NULL;
    activate(s->up + at, gate, s->up + at, ff, s->m->config.arch->act);
}

static void ffn(Session *s, const Ffn *f, float *out, int n) {   // of s->h
    Matmul in[] = {{f->up, s->h, s->up, n}, {f->gate, s->h, s->gate, n}};
    Matmul back = {f->down, s->up, out, n};
    matmul(&s->pool, s->matmul_scratch, in, f->gate->data ? 2 : 1);
    each_row(s, f, n, activate_row);
    matmul(&s->pool, s->matmul_scratch, &back, 1);
}
// ---- 8. forward ----
//
// Prefill and decode are this one function: n tokens at positions pos .. pos+n-1 through all
// layers, leaving the residual stream in s->x. With n = 1 the products are matrix x vector.

static void embed_row(Session *s, const void *unused, int i) {
    const Model *m = s->m;
    const Config *c = &m->config;
    float *x = s->x + (size_t)i * c->dim, *y = s->h + (size_t)i * c->dim;
    size_t row = quant_row_bytes(m->embd.type, c->dim);
    (void)unused;
    quant_dequantize(m->embd.type, m->embd.data + s->ids[i] * row, x, c->dim);
    for (int j = 0; c->embd_scale != 1 && j < c->dim; j++) x[j] *= c->embd_scale;
    const Matrix *extra[2] = {&m->pos_embd, &m->type_embd};
    for (int k = 0; k < 2; k++) {   // learned position, token type 0
        if (!extra[k]->data) continue;
        row = k ? 0 : (s->pos + i) * quant_row_bytes(extra[k]->type, c->dim);
        quant_dequantize(extra[k]->type, extra[k]->data + row, y, c->dim);
        add(x, y, c->dim, 1);
    }
    if (m->embd_norm.w) norm(x, x, c->dim, &m->embd_norm, c->arch->norm, c->eps);
}

// cosines and sines of this position's angles
static void angles_row(Session *s, const void *unused, int i) {
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

// h = norm(x), or x where there is no norm
static void norm_row(Session *s, const void *of, int i) {
    const Config *c = &s->m->config;
    const Norm *w = of;
    float *x = s->x + (size_t)i * c->dim, *h = s->h + (size_t)i * c->dim;
    if (w->w || c->arch->norm == BARE) norm(h, x, c->dim, w, c->arch->norm, c->eps);
    else memcpy(h, x, c->dim * sizeof *h);
}

// x += post_norm(out); an encoder has x = post_norm(x + out)
static void residual_row(Session *s, const void *of, int i) {
    const Config *c = &s->m->config;
    const Norm *post = of;
    float *x = s->x + (size_t)i * c->dim, *out = s->out + (size_t)i * c->dim;
    bool after = c->arch->flags & ENCODER;
    if (post->w && !after) norm(out, out, c->dim, post, c->arch->norm, c->eps);
    add(x, out, c->dim, c->residual_scale);
    if (post->w && after) norm(x, x, c->dim, post, c->arch->norm, c->eps);
}

// the first keep rows are pinned, the rest is a ring
static int cache_row(const Cache *c, int pos) {
    return pos < c->keep ? pos : c->keep + (pos - c->keep) % (c->rows - c->keep);
}

static void clamp(float *x, int64_t n, float limit) {   // 0: none
    for (int64_t i = 0; i < n && limit > 0; i++) x[i] = fminf(limit, fmaxf(-limit, x[i]));
}

// norm and rotate one token's q and k, write its k and v into the ring
static void rope_row(Session *s, const void *of, int i) {
    const Layer *w = of;
    const Config *c = &s->m->config;
    Cache *cache = &s->cache[s->l];
    bool late = c->arch->flags & QK_NORM_LATE;
    int pos = s->pos + i, row = cache_row(cache, pos);
    int64_t q_dim = (int64_t)w->n_head * c->hd;
    float *q = s->q + i * q_dim, *k = s->k + i * w->k.rows, *v = s->v + i * w->v.rows;
    const float *turn = s->rope[w->window > 0] + (size_t)i * c->n_rot;
    clamp(v, w->v.rows, c->clamp_qkv);
    for (int p = 0; p < 2; p++) {
        float *x = p ? k : q;
        int heads = p ? w->n_kv : w->n_head;
        const Norm *n = p ? &w->k_norm : &w->q_norm;
        clamp(x, heads * c->hd, c->clamp_qkv);
        if (n->w && !late) norm(x, x, heads * c->hd, n, c->arch->norm, c->eps);
        for (int h = 0; w->rope && h < heads; h++) rope(x + h * c->hd, turn, c->n_rot, c->rope);
        if (n->w && late) norm(x, x, heads * c->hd, n, c->arch->norm, c->eps);
    }
    float far =
        c->temp_scale ? 1 + c->temp_scale * logf(floorf(pos / (float)c->n_ctx_orig) + 1) : 1;
    for (int j = 0; far != 1 && j < q_dim; j++) q[j] *= far;
    for (int h = 0; h < w->n_kv; h++) {
        size_t at = (size_t)h * cache->rows + row;
        narrow(k + h * c->hd, c->hd, cache->k + at * c->hd);
        narrow(v + h * c->vd, c->vd, cache->v + at * c->vd);
    }
    cache->pos[row] = pos;
}

// gated attention: a head's query is followed by its gate
static void split_gate_row(Session *s, const void *of, int i) {
    const Layer *w = of;
    int hd = s->m->config.hd;
    for (int h = 0; h < w->n_head; h++) {
        size_t at = (size_t)i * w->n_head + h;
        memcpy(s->q + at * hd, s->mix + 2 * at * hd, hd * sizeof *s->q);
        memcpy(s->z + at * hd, s->mix + (2 * at + 1) * hd, hd * sizeof *s->z);
    }
}

static void gate_row(Session *s, const void *of, int i) {
    const Layer *w = of;
    int n = w->n_head * s->m->config.hd;
    float *att = s->att + (size_t)i * n, *z = s->z + (size_t)i * n;
    for (int j = 0; j < n; j++) att[j] /= 1 + exp_fast(-z[j]);
}

static void attention_block(Session *s, const Layer *w, int n) {
    const Config *c = &s->m->config;
    const Cache *cache = &s->cache[s->l];
    bool gated = w->q.rows > (int64_t)w->n_head * c->hd;
    Matmul in[] = {{&w->q, s->h, gated ? s->mix : s->q, n}, {&w->k, s->h, s->k, n},
                   {&w->v, s->h, s->v, n}};
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

static void forward(Session *s, const int32_t *ids, int n, int pos) {
    const Config *c = &s->m->config;
    s->ids = ids;
    s->n = n;
    s->pos = pos;
    each_row(s, NULL, n, embed_row);
    each_row(s, NULL, n, angles_row);
    for (s->l = 0; s->l < c->n_layer; s->l++) {
        const Layer *w = &s->m->layers[s->l];

        // tokens look at each other: attention, or the delta rule's memory
        each_row(s, &w->attn_norm, n, norm_row);
        if (w->conv_in.data) delta_net(s, w, n);
        else attention_block(s, w, n);

        // each token alone: the FFN reads the sum, or (parallel) the stream that attention read
        if (!w->parallel) each_row(s, &w->attn_post_norm, n, residual_row);
        if (!w->parallel || w->ffn_norm.w) each_row(s, &w->ffn_norm, n, norm_row);
        if (w->parallel) each_row(s, &w->attn_post_norm, n, residual_row);
        if (w->router.data) experts(s, w, n);
        else ffn(s, &(Ffn){&w->gate, &w->up, &w->down}, s->out, n);
        each_row(s, &w->ffn_post_norm, n, residual_row);
    }
}

// logits of n <= LOGIT_ROWS rows of the last chunk, from row first on, into s->logits
static void head(Session *s, int first, int n) {
    const Config *c = &s->m->config;
    Matmul out = {&s->m->head, s->h + (size_t)first * c->dim, s->logits, n};
    for (int i = first; i < first + n; i++) norm_row(s, &s->m->out_norm, i);
    matmul(&s->pool, s->matmul_scratch, &out, 1);
    bool plain = c->logit_scale == 1 && c->logit_cap <= 0;
    for (size_t i = 0; i < (size_t)n * c->n_vocab && !plain; i++) {
        float y = s->logits[i] * c->logit_scale;
        s->logits[i] = c->logit_cap > 0 ? c->logit_cap * tanhf(y / c->logit_cap) : y;
    }
}
// ---- 9. session ----
//
// The KV cache of a layer is a ring of w + chunk rows: w = the window it sees, and room for a
// chunk, so that writing a chunk overwrites no row that one of its own queries must see. A row
// stores its absolute position, and that alone decides who sees it; keys were rotated at that
// position, so nothing moves when the ring wraps and generation goes on past any limit.

// The one switch of backends: a GPU takes a whole model or nothing, on the same buffers.
#ifdef LLM_METAL
#include "metal.c"
#else
#define gpu_open(s) (void)(s)
#define gpu_close(s) (void)(s)
#define gpu_forward(...) false
#define gpu_head(...) false
#define gpu_argmax(...) (-1)
#endif

// places every cache; with a counting arena it only adds up
static void plan_caches(Session *s, Arena *a) {
    const Config *c = &s->m->config;
    size_t channels = 2 * (size_t)c->n_key * c->dk + (size_t)c->n_value * c->dv;
    size_t start = a->used;
    s->recurrent = arena_take(a, 0, 0);
    for (int l = 0; l < c->n_layer; l++) {
        if (!s->m->layers[l].conv_in.data) continue;
        s->cache[l].conv = arena_take(a, (c->conv - 1) * channels, sizeof(float));
        s->cache[l].state = arena_take(a, delta_state_floats(c), sizeof(float));
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

// Every buffer that forward uses, for the widest layer. Attention's and the FFN's buffers never
// live together, nor with the logits: they share bytes.
static void plan_scratch(Session *s, Arena *a) {
    const Config *c = &s->m->config;
    size_t n = s->o.chunk, f = sizeof(float), rows = larger(n, c->n_used);
    size_t heads = 0, k = 0, v = 0, att = 0, mix = 0, z = 0, ff = 0, ring = 0;
    bool floats = false;
    for (int l = 0; l < c->n_layer; l++) {
        const Layer *w = &s->m->layers[l];
        size_t values = w->conv_in.data ? (size_t)c->n_value * c->dv : 0;
        size_t q = (size_t)w->n_head * c->hd, gated = (size_t)w->q.rows > q ? q : 0;
        heads = larger(heads, w->n_head);
        k = larger(k, w->k.rows);
        v = larger(v, w->v.rows);
        att = larger(att, larger(values, (size_t)w->n_head * c->vd));
        mix = larger(mix, larger(w->conv_in.rows, 2 * gated));
        z = larger(z, larger(values, gated));
        ff = larger(ff, larger(w->ff, w->shared_up.rows));
        ring = larger(ring, s->cache[l].rows);
    }
    for (size_t i = 0; i < s->m->gguf.n_tensors; i++) {
        const Tensor *t = &s->m->gguf.tensors[i];
        floats |= t->n_dims > 1 && quant_row_bytes(t->type, 1);
    }
    size_t widest = larger(c->dim, larger(att, ff));
    s->matmul_scratch = arena_take(a, 1, matmul_scratch(rows, widest, s->o.threads, floats));
    s->x = arena_take(a, n * c->dim, f);
    s->h = arena_take(a, n * c->dim, f);
    s->out = arena_take(a, n * c->dim, f);
    for (int i = 0; i < 2; i++) {
        s->rope[i] = arena_take(a, n * c->n_rot, f);
        s->freq[i] = arena_take(a, c->n_rot / 2, sizeof(double));
    }
    s->slopes = arena_take(a, s->m->layers[0].n_head, f);
    size_t mark = a->used;
    s->attention_scratch =
        arena_take(a, 1, attention_scratch(heads, c->hd, c->vd, ring, s->o.threads));
    s->q = arena_take(a, n * heads * c->hd, f);
    s->k = arena_take(a, n * k, f);
    s->v = arena_take(a, n * v, f);
    s->att = arena_take(a, n * att, f);
    s->mix = arena_take(a, (n + c->conv) * mix, f);
    s->z = arena_take(a, n * z, f);
    s->ba = arena_take(a, n * 2 * c->n_value, f);
    s->decay = arena_take(a, n * c->n_value, f);
    s->write = arena_take(a, n * c->n_value, f);
    a->used = mark;
    s->gate = arena_take(a, rows * ff, f);
    s->up = arena_take(a, rows * ff, f);
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
        slope[h] = exp2f(-max_bias * (h < whole ? h + 1 : h - whole + 0.5f) / whole);
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

// Runs a plan to learn the size, and again to place the buffers: in whole pages of 16 KB (what a
// GPU can share), zeroed when they are first touched.
static bool place_plan(Session *s, void (*plan)(Session *, Arena *), void **base, size_t *bytes,
                       const char *what, Error *e) {
    Arena a = {0};
    plan(s, &a);
    *bytes = a.peak + 2 * 16384;
    void *p = a.peak > (size_t)1 << 46 ? MAP_FAILED
              : mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (p == MAP_FAILED) return fail(e, "no memory for %zu MB of %s", a.peak >> 20, what);
    *base = p;
    a = (Arena){.base = (char *)(((uintptr_t)p + 16383) & ~(uintptr_t)16383)};
    plan(s, &a);
    return true;
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
    *s = (Session){.m = m, .o = o, .rng = o.sampling.seed};
    if (!s->o.window) s->o.window = c->n_ctx < 4096 ? c->n_ctx : 4096;
    if (!s->o.chunk) s->o.chunk = 512;
    if (!s->o.threads) s->o.threads = count_cpus();
    s->cache = calloc(c->n_layer, sizeof *s->cache);
    if (!s->cache) return fail(e, "out of memory");
    double rows = (double)s->o.window + s->o.chunk + s->o.keep;
    if (rows > INT32_MAX / 2) return fail(e, "a window of %d tokens is too large", s->o.window);
    if (!place_plan(s, plan_caches, &s->kv_base, &s->kv_bytes, "KV cache; try a smaller -c", e) ||
        !place_plan(s, plan_scratch, &s->scratch_base, &s->scratch_bytes,
                    "scratch; try a smaller -b", e))
        return false;
    session_truncate(s, 0);
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
            if (hidden) norm_row(s, &m->out_norm, i);
            else if (row == 0 && !(gpu && i == first) && !gpu_head(s, i, rows)) head(s, i, rows);
            if (fn && !fn(ctx, p + i, hidden ? s->h + (size_t)i * m->config.dim : out))
                return fail(e, "stopped");
        }
        p += count;
    }
    return true;
}

const float *session_eval(Session *s, const int32_t *ids, int n, Error *e) {
    return session_run(s, ids, n, n - 1, false, NULL, NULL, e) ? s->logits : NULL;
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

// last[n_last]: the tokens that the penalty sees; c: room for n_vocab candidates
static int32_t sample(const Sampling *o, const float *logits, size_t n, const int32_t *last,
                      int n_last, uint64_t *rng, Candidate *c) {
    double total, sum;
    for (size_t i = 0; i < n; i++)   // NaN never wins
        c[i] = (Candidate){logits[i] == logits[i] ? logits[i] : -FLT_MAX, i};
    sample_penalty(c, n, last, n_last, o->repeat_penalty);
    if (o->temp <= 0) {
        sort_top(c, n, 1);
        return c[0].id;
    }
    sample_temperature(c, n, o->temp);
    n = sample_top_k(c, n, o->top_k);
    n = sample_top_p(c, n, o->top_p);
    n = sample_min_p(c, n, o->min_p);
    weigh(c, n, INFINITY, &total);
    return c[weigh(c, n, random_unit(rng) * total, &sum) - 1].id;
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

typedef struct { int32_t *id; size_t n; } Tokens;   // free(id) when done

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

// the file, its tokenizer and, unless they are not wanted, its weights
static bool model_load(Model *m, const char *path, bool weights, Error *e) {
    Error why;
    *m = (Model){0};
    if (!gguf_open(&m->gguf, path, e)) return false;
    bool ok = tokenizer_load(m, &why) && (!weights || weights_load(m, &why));
    return ok || fail(e, "%s: %s", path, why.text);
}

bool model_open(Model *m, const char *path, Error *e) { return model_load(m, path, true, e); }

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
// ==== Part II: more mixers =======================================================================
// ---- 12. experts ----
// The router's choice for one token: probabilities, the n_used best, their weights.
static void choose_experts(Session *s, const void *of, int i) {
    const Config *c = &s->m->config;
    const float *bias = ((const Layer *)of)->router_bias;
    float *p = s->route + (size_t)i * c->n_expert, *weight = s->weight + (size_t)i * c->n_used;
    int32_t *chosen = s->chosen + (size_t)i * c->n_used;
    float top = p[0], all = 0, sum = 0, scale = c->gates_scale;
    for (int e = 1; e < c->n_expert; e++) top = fmaxf(top, p[e]);
    for (int e = 0; e < c->n_expert; e++)
        all += p[e] = c->sigmoid ? 1 / (1 + expf(-p[e])) : expf(p[e] - top);
    for (int e = 0; e < c->n_expert && !c->sigmoid; e++) p[e] /= all;
    for (int e = 0; e < c->n_expert; e++) {   // the best so far, sorted, and their scores
        float score = p[e] + (bias ? bias[e] : 0);
        int k = e < c->n_used ? e : c->n_used - 1;
        if (e > k && !(score > weight[k])) continue;
        for (; k > 0 && score > weight[k - 1]; k--) {
            chosen[k] = chosen[k - 1];
            weight[k] = weight[k - 1];
        }
        chosen[k] = e;
        weight[k] = score;
    }
    for (int k = 0; k < c->n_used; k++) sum += weight[k] = p[chosen[k]];
    if (c->gates_normed) scale /= fmaxf(sum, 6.103515625e-5f);
    for (int k = 0; k < c->n_used; k++) weight[k] *= scale;
}

// Runs the first experts of the sorted order, as many as fit the buffers; returns how many rows. An
// expert's tokens stand side by side: its weights are read and decoded once for all of them.
static int run_experts(Session *s, const Layer *w, const int32_t *order, int left, int limit) {
    const Config *c = &s->m->config;
    Matrix gate[MAX_JOBS / 2], up[MAX_JOBS / 2], down[MAX_JOBS / 2];
    Matmul in[MAX_JOBS] = {{0}}, back[MAX_JOBS / 2] = {{0}};
    size_t dim = c->dim, ff = w->ff;
    int jobs = 0, rows = 0;
    for (int n = 1; rows < left && jobs < MAX_JOBS / 2; rows += n, jobs++) {
        int r = rows, e = s->chosen[order[r]];
        for (n = 1; r + n < left && s->chosen[order[r + n]] == e;) n++;
        if (r + n > limit) break;
        for (int i = r; i < r + n; i++)
            memcpy(s->gathered + i * dim, s->h + order[i] / c->n_used * dim, 4 * dim);
        gate[jobs] = matrix_expert(&w->gate, e);
        up[jobs] = matrix_expert(&w->up, e);
        down[jobs] = matrix_expert(&w->down, e);
        in[2 * jobs] = (Matmul){&gate[jobs], s->gathered + r * dim, s->gate + r * ff, n};
        in[2 * jobs + 1] = (Matmul){&up[jobs], s->gathered + r * dim, s->up + r * ff, n};
        back[jobs] = (Matmul){&down[jobs], s->up + r * ff, s->expert_out + r * dim, n};
    }
    matmul(&s->pool, s->matmul_scratch, in, 2 * jobs);
    each_row(s, &(Ffn){gate, up, down}, rows, activate_row);
    matmul(&s->pool, s->matmul_scratch, back, jobs);
    for (int r = 0; r < rows; r++)
        add(s->out + order[r] / c->n_used * dim, s->expert_out + r * dim, dim, s->weight[order[r]]);
    return rows;
}

// the expert that sees every token, with its own weight where there is a router for it
static void add_shared_row(Session *s, const void *of, int i) {
    const Layer *w = of;
    size_t dim = s->m->config.dim;
    float gate = w->shared_router.data ? 1 / (1 + expf(-s->route[i])) : 1;
    add(s->out + i * dim, s->expert_out + i * dim, dim, gate);
}

static void shared_expert(Session *s, const Layer *w, int n) {
    Matmul router = {&w->shared_router, s->h, s->route, n};
    if (w->shared_router.data) matmul(&s->pool, s->matmul_scratch, &router, 1);
    ffn(s, &(Ffn){&w->shared_gate, &w->shared_up, &w->shared_down}, s->expert_out, n);
    each_row(s, w, n, add_shared_row);
}

// out = sum of the chosen experts' FFNs. Tokens are sorted by expert (a counting sort, stable, so
// that a token's sum does not depend on its neighbours) and run in batches that fit the buffers.
static void experts(Session *s, const Layer *w, int n) {
    const Config *c = &s->m->config;
    Matmul router = {&w->router, s->h, s->route, n};
    matmul(&s->pool, s->matmul_scratch, &router, 1);
    each_row(s, w, n, choose_experts);
    int rows = n * c->n_used, limit = n > c->n_used ? n : c->n_used, at = 0;
    for (int e = 0; e < c->n_expert; e++)
        for (int i = 0; i < rows; i++)
            if (s->chosen[i] == e) s->order[at++] = i;
    memset(s->out, 0, (size_t)n * c->dim * sizeof *s->out);
    for (int i = 0; i < rows;) i += run_experts(s, w, s->order + i, rows - i, limit);
    if (w->shared_up.data) shared_expert(s, w, n);
}
// ---- 13. the gated delta rule ----
// early files: rows q, k, v, z of the first key head, of the second, ...; a copy has all q, all k,
// all v, all z
static void heads_apart(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    size_t row = quant_row_bytes(w->z.type, w->z.cols), qk = c->dk * row;
    size_t vz = w->z.rows / c->n_key * row, size[] = {qk, qk, vz, vz};
    const uint8_t *from = w->conv_in.data;
    uint8_t *to = own(ld, c->n_key * 2 * (qk + vz));
    w->conv_in.data = to;
    w->z.data = to ? to + w->conv_in.rows * row : NULL;
    for (int p = 0; to && p < 4; from += size[p++])
        for (int h = 0; h < c->n_key; h++, to += size[p])
            memcpy(to, from + h * 2 * (qk + vz), size[p]);
}

static void load_delta(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    int keys = c->n_key * c->dk, values = c->n_value * c->dv, qkv = 2 * keys + values;
    if (c->n_key < 1 || c->n_value < 1 || c->n_value % c->n_key || !keys || !values || !c->conv)
        refuse(ld, "layer %d: %d value heads cannot share %d key heads (widths %d, %d)",
               ld->l, c->n_value, c->n_key, c->dv, c->dk);
    load_fused(ld, "ssm_in", 1,
               (Piece[]){{"attn_qkv", qkv, &w->conv_in}, {"attn_gate", values, &w->z}}, 2);
    if (find_tensor(ld, "ssm_in", ".weight")) heads_apart(ld, w);
    w->beta_alpha = load_matrix(ld, "ssm_ba", c->dim, 2 * c->n_value, 1);
    if (!w->beta_alpha.data) {
        w->alpha = need_matrix(ld, "ssm_alpha", c->dim, c->n_value, 1);
        w->beta = need_matrix(ld, "ssm_beta", c->dim, c->n_value, 1);
    }
    w->delta_out = need_matrix(ld, "ssm_out", values, c->dim, 1);
    w->conv = load_vector(ld, "ssm_conv1d", ".weight", (size_t)qkv * c->conv);
    w->dt_bias = load_vector(ld, "ssm_dt", ".bias", c->n_value);
    w->a = load_vector(ld, "ssm_a", "", c->n_value);
    w->delta_norm = load_norm(ld, "ssm_norm", 1, c->dv);
    need_data(ld, w->dt_bias, "ssm_dt", ".bias");
    need_data(ld, w->a, "ssm_a", "");
    need_data(ld, w->delta_norm.w, "ssm_norm", ".weight");
}
// -- gated delta rule (arXiv 2412.06464) --
//
// A head's memory is a matrix S of dv x dk. A token decays it, asks it for the value stored under
// its key, and writes the difference to its own value:  S *= g;  S += b (v - S k) k';  o = S q.
static size_t delta_state_floats(const Config *c);
static void delta_rule(void *ctx, int task, int thread);
static int delta_blocks(const Config *c);
enum { CONV_BLOCK = 64 };

// Causal convolution over time of one block of channels, then SiLU. The rows before the chunk come
// first, so that token t's inputs begin in row t, where its result is put.
static void delta_conv(void *ctx, int block, int thread) {
    Session *s = ctx;
    const Layer *w = &s->m->layers[s->l];
    size_t channels = w->conv_in.rows, first = (size_t)block * CONV_BLOCK;
    int n = s->n, past = s->m->config.conv - 1;
    int width = channels - first < CONV_BLOCK ? channels - first : CONV_BLOCK;
    float *old = s->cache[s->l].conv + first, *mix = s->mix + first, tap[64][CONV_BLOCK];
    (void)thread;
    for (int j = 0; j <= past; j++)
        for (int i = 0; i < width; i++) tap[j][i] = w->conv[(first + i) * (past + 1) + j];
    for (int j = 0; j < past; j++) memcpy(mix + j * channels, old + j * channels, 4 * width);
    for (int t = 0; t < n; t++) {
        float y[CONV_BLOCK] = {0}, *x = mix + t * channels;
        for (size_t i = 0; i < sizeof y; i += 64) __builtin_prefetch((char *)(x + (past + 8) * channels) + i);
        for (int j = 0; j <= past; j++)
            for (int i = 0; i < width; i++) y[i] += tap[j][i] * x[j * channels + i];
        activate(x, NULL, y, width, SILU);
    }
    for (int j = 0; j < past; j++) memcpy(old + j * channels, mix + (n + j) * channels, 4 * width);
}

// unit keys and queries; decay and write strength of each value head
static void delta_gates_row(Session *s, const void *of, int i) {
    const Layer *w = of;
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
static void delta_out_row(Session *s, const void *of, int i) {
    const Config *c = &s->m->config;
    int n = c->n_value * c->dv;
    float *o = s->att + (size_t)i * n, *z = s->z + (size_t)i * n;
    norm(o, o, n, of, RMS, c->eps);
    activate(o, z, o, n, SILU);
}

static void delta_net(Session *s, const Layer *w, int n) {
    const Config *c = &s->m->config;
    bool fused = w->beta_alpha.data;
    float *mix = s->mix + (c->conv - 1) * w->conv_in.rows;   // behind the rows before the chunk
    Matmul in[] = {{&w->conv_in, s->h, mix, n}, {&w->z, s->h, s->z, n},
                   {fused ? &w->beta_alpha : &w->alpha, s->h, fused ? s->ba : s->decay, n},
                   {&w->beta, s->h, s->write, n}};
    Matmul back = {&w->delta_out, s->att, s->out, n};
    matmul(&s->pool, s->matmul_scratch, in, fused ? 3 : 4);
    parallel(&s->pool, delta_conv, s, (w->conv_in.rows + CONV_BLOCK - 1) / CONV_BLOCK);
    each_row(s, w, n, delta_gates_row);
    parallel(&s->pool, delta_rule, s, c->n_value * delta_blocks(c));
    each_row(s, &w->delta_norm, n, delta_out_row);
    matmul(&s->pool, s->matmul_scratch, &back, 1);
}
// ==== Part III: text =============================================================================
// ---- 14. UTF-8 ----
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

static int32_t range_value(const char *const *line, size_t n, uint32_t c, int32_t otherwise);
static uint64_t unicode_classes(uint32_t c);
static uint32_t unicode_fold(uint32_t c, bool lower_case, bool strip_accents);
#define CLASS(letter) (1ull << ((letter) & 63))   // the letters that the tokenizer's rules use

// ---- 15. tokenizer ----
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
        if (!*slot || !name_compare(&d->str[*slot - 1], &s)) return slot;
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
static const struct { int type; const char *with, *names; } KNOWN_TOKENS[] = {
    {TOKEN_CONTROL | TOKEN_EOG, NULL,
     "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> </s> "
     "<|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
     "<turn|> <|tool_response> [e~[ <｜end▁of▁sentence｜> <|fim_pad|> <fim-pad> <fim_pad> "
     "<PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"},
    {TOKEN_CONTROL, NULL,
     "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> "
     "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> "
     "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> "
     "<|prefix|> <|suffix|> <|middle|>"},
    {TOKEN_USER, NULL, "<|channel|> <|message|> <|start|> <|constrain|>"},
    {TOKEN_USER, "<|return|>", "<|end|>"},   // gpt-oss
    {TOKEN_USER, "<|calls|>", "<|end|>"},   // Solar
    {TOKEN_NORMAL, "<|tool_response>", "</s>"},   // Gemma 4
};

// what holds where the metadata is silent
static const struct { const char *names, *pre; Tokenizer t; } MODELS[] = {
    {"none no_vocab", NULL, {TOKENIZER_NONE, .bos = -1, .eos = -1, .unk = -1, .sep = -1}},
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
        for (const char *name = KNOWN_TOKENS[i].names, *end; *name; name = end + (*end == ' ')) {
            end = name + strcspn(name, " ");
            int32_t id = dictionary_find(&t->tokens, name, end - name);
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
    char name[64];
    size_t i = 0;
    *t = (Tokenizer){0};
    if (!model.s) return fail(e, "tokenizer.ggml.model is missing");
    snprintf(name, sizeof name, "%.*s", STR_ARG(model));
    while (i < COUNT(MODELS) && !is_word(name, MODELS[i].names)) i++;
    if (i == COUNT(MODELS))
        return fail(e, "tokenizer.ggml.model '%s' is not one of llama, gpt2, gemma4, bert, none",
                    name);
    *t = MODELS[i].t;
    if (t->kind == TOKENIZER_NONE) return true;
    if (MODELS[i].pre) pre = (Str){MODELS[i].pre, strlen(MODELS[i].pre)};
    else if (!pre.n) t->note = "tokenizer.ggml.pre is missing: 'default' is assumed";
    if (!pre.n) pre = (Str){"default", 7};
    snprintf(name, sizeof name, "%.*s", STR_ARG(pre));
    for (i = 0; i < COUNT(PRE_TOKENIZERS); i++)
        if (is_word(name, PRE_TOKENIZERS[i].names)) t->pre = &PRE_TOKENIZERS[i];
    if (!t->pre) return fail(e, "tokenizer.ggml.pre '%s' is unknown", name);
    return tokenizer_vocab(t, g, e) && tokenizer_special(t, g, e);
}

static bool tokenizer_load(Model *m, Error *e) {
    m->tokenizer = calloc(1, sizeof *m->tokenizer);
    if (!m->tokenizer) return fail(e, "out of memory");
    return tokenizer_open(m->tokenizer, &m->gguf, e);
}

static void tokenizer_close(Tokenizer *t) {
    free(t->tokens.slot);
    free(t->merges.slot);
    free(t->type);
    *t = (Tokenizer){0};
}
// ==== Part IV: speed =============================================================================
// ---- 16. matmul ----
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
//   VNNI    one instruction; w is unsigned there, so signed codes get a bias added
//   AVX2    vpmaddubsw adds pairs of unsigned times signed bytes in 16 bits, where |w| times x
//           with w's sign fits: at most 2 * 128 * 127
//   NEON    sdot, or widening products
// evens and odds give each pair of lanes its first and its second number; pair_sums(a, b) are the
// sums of a's pairs, then of b's.

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
typedef uint8_t vub __attribute__((vector_size(4 * LANES)));

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
INLINE void store_f16(void *p, vf v) { _mm256_storeu_si256(p, _mm512_cvtps_ph((__m512)v, 0)); }
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
INLINE vf pair_sums(vf a, vf b) {
    const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)even, (__m512)b) +
           (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)(even + 1), (__m512)b);
}
INLINE vf evens(vf v) { return (vf)_mm512_moveldup_ps((__m512)v); }
INLINE vf odds(vf v) { return (vf)_mm512_movehdup_ps((__m512)v); }
#elif defined(QUANT_X86)
INLINE vf load_f16(const void *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE void store_f16(void *p, vf v) { _mm_storeu_si128(p, _mm256_cvtps_ph((__m256)v, 0)); }
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    __m256i size = _mm256_abs_epi8((__m256i)w), y = _mm256_sign_epi8((__m256i)x, (__m256i)w);
    return sum + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(size, y), _mm256_set1_epi16(1));
}
INLINE vf pair_sums(vf a, vf b) {
    __m256d sums = (__m256d)_mm256_hadd_ps((__m256)a, (__m256)b);   // in halves: a b a b
    return (vf)_mm256_permute4x64_pd(sums, 0xd8);
}
INLINE vf evens(vf v) { return (vf)_mm256_moveldup_ps((__m256)v); }
INLINE vf odds(vf v) { return (vf)_mm256_movehdup_ps((__m256)v); }
#else
INLINE vf pair_sums(vf a, vf b) {
    return (vf){a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]};
}
INLINE vf evens(vf v) { return (vf){v[0], v[0], v[2], v[2]}; }
INLINE vf odds(vf v) { return (vf){v[1], v[1], v[3], v[3]}; }
#if defined(QUANT_NEON)
INLINE vf load_f16(const void *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
INLINE void store_f16(void *p, vf v) {
    vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)v)));
}
#else
INLINE vf load_f16(const void *p) {
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = quant_half((const uint8_t *)p + 2 * i);
    return v;
}
INLINE void store_f16(void *p, vf v) {
    for (int i = 0; i < LANES; i++) ((uint16_t *)p)[i] = quant_f32_to_f16(v[i]);
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
    UNROLL for (int n = LANES; n > 1; n /= 2) v = pair_sums(v, v);
    return v[0];
}
INLINE vf sum_each(vf v[LANES]) {   // lane i: the sum of v[i]'s lanes
    UNROLL for (int n = LANES / 2; n; n /= 2)
        UNROLL for (int i = 0; i < n; i++) v[i] = pair_sums(v[2 * i], v[2 * i + 1]);
    return v[0];
}

// Weights come from memory once: they are asked for before their turn. A core's L1 keeps some 16
// requests in flight, which at 100 ns is 10 GB/s; its L2 keeps 48. So L2 is asked first.
enum { NEAR = 2048, FAR = 8192 };   // bytes ahead

INLINE void prefetch(const void *p, int bytes) {   // where nothing is mapped it does nothing
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i);
}
INLINE void prefetch_l2(const void *p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}
INLINE void prefetch_ahead(const void *p, int bytes) {
    prefetch((const char *)p + NEAR, bytes);
    prefetch_l2((const char *)p + FAR, bytes);
}

// -- activations in int8 --

// 32 floats to codes; returns the scale, rounded to f16 as ggml stores it, and the sums of both
// halves. Positive floats order like their bits, and a float near MAGIC holds an integer in its
// low bits, rounded to the nearest: integer loops, which compilers turn into vector code.

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
    uint32_t total[2] = {0, 0};   // unsigned, as NaN's bits overflow
    for (int i = 0; i < 16; i++) total[0] += (uint32_t)bits[i] - MAGIC_BITS;
    for (int i = 0; i < 16; i++) total[1] += (uint32_t)bits[16 + i] - MAGIC_BITS;
    memcpy(sum, total, sizeof total);
    return quant_f16_to_f32(quant_f32_to_f16(most / 127));
}

// A token's activations, 256 at a time and in the decoders' order: eight k of 32 numbers is
// q[k][..]. s = d * (sum of 16 codes).
typedef struct { int8_t q[4][8][8]; float d[16], s[16]; } Act;

static void act_quantize(const float *x, int64_t cols, Act *a) {
    for (int64_t i = 0; i < cols; i += 32) {
        Act *b = a + i / 256;
        int8_t q[32];
        int g = i / 32 % 8, sum[2];
        if (g == 0 && cols - i < 256) memset(b, 0, sizeof *b);
        float d = round_32(x + i, q, sum);
        UNROLL for (int k = 0; k < 4; k++) memcpy(b->q[k][g], q + 8 * k, 8);
        for (int h = 0; h < 2; h++) {
            b->d[2 * g + h] = d;
            b->s[2 * g + h] = d * sum[h];
        }
    }
}

// -- matrix x vector --

// Decodes 256 weights of a row. Such functions are constant arguments below: after inlining each
// format has a loop of its own.
#define DECODE_ARGS const uint8_t *b, int8_t *q, float *d, float *m
typedef void DecodeFn(DECODE_ARGS);
// out[rows] = consecutive rows times x: floats, or for block formats Act[cols/256]
#define ROWS_ARGS const uint8_t *w, int64_t rows, int64_t cols, const void *x, float *out
typedef void RowsFn(ROWS_ARGS);

// the end of a row, less than 256 weights, with zeros behind
static const uint8_t *padded_256(int type, const uint8_t *b, int64_t left, uint8_t copy[272]) {
    memset(copy, 0, 272);
    return memcpy(copy, b, quant_row_bytes(type, left));
}

// Sums of 256 weights times activations. Codes and activations lie so that a lane meets numbers of
// one scale only: four dot products (or two, where scales stand per 16) are added as integers
// before they are converted and scaled. sum[0]: products; sum[1]: offsets, or without them what
// the bias adds, which is to be taken off -bias times.
INLINE void dot256(const int8_t *q, const float *d, const float *m, bool per16, int bias,
                   const Act *x, vf sum[2]) {
    UNROLL for (int i = 0; i < 16; i += LANES) {
        vf scale = load_f32(d + i) * load_f32(x->d + i);
        vi dot[2] = {{0}};
        if (!bias || CODE_BIAS > 0) sum[1] += load_f32((bias ? d : m) + i) * load_f32(x->s + i);
        UNROLL for (int k = 0; k < 4; k++) {
            vub w = (vub)load_i32(q + 64 * k + 4 * i) + (uint8_t)(CODE_BIAS ? bias : 0);
            int part = per16 ? k / 2 : 0;
            dot[part] = dot_bytes(dot[part], (vi)w, load_i32(x->q[k][i / 2]));
        }
        vf first = __builtin_convertvector(dot[0], vf), other = __builtin_convertvector(dot[1], vf);
        sum[0] += first * (per16 ? evens(scale) : scale);
        if (per16) sum[0] += other * odds(scale);
    }
}

INLINE void block_rows(DecodeFn *decode, DecodeFn *tail, int type, int bytes, bool per16, int bias,
                       const uint8_t *w, int64_t rows, int64_t cols, const Act *x, float *out) {
    uint8_t last[272];
    int8_t q[256] __attribute__((aligned(64)));
    float d[16] __attribute__((aligned(64))), m[16] __attribute__((aligned(64)));
    for (int64_t r = 0; r < rows; r++, w += cols / 32 * bytes / 8) {
        vf sum[2] = {{0}};
        const uint8_t *b = w;
        const Act *a = x;
        for (; b < w + cols / 256 * bytes; b += bytes, a++) {
            prefetch_ahead(b, bytes);
            decode(b, q, d, m);
            dot256(q, d, m, per16, bias, a, sum);
        }
        if (cols % 256) {
            tail(padded_256(type, b, cols % 256, last), q, d, m);
            dot256(q, d, m, per16, bias, a, sum);
        }
        out[r] = sum_lanes(sum[0] + sum[1] * (bias ? -(float)bias : 1));
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
            prefetch_ahead(w + i * size, STEP * size);
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

#define QUANT_X(id, name, weights, bytes, per16, bias)                                             \
    INLINE void inline_##name(DECODE_ARGS) { decode_##name((const void *)b, 0, 8, q, d, m); }      \
    static void unpack_##name(DECODE_ARGS) { inline_##name(b, q, d, m); }                          \
    static void rows_##name(ROWS_ARGS) {                                                           \
        block_rows(inline_##name, unpack_##name, id, 256 / weights * bytes, per16, bias, w, rows,  \
                   cols, x, out);                                                                  \
    }
QUANT_TYPES(QUANT_X)
#undef QUANT_X
#define FLOAT_ROWS(name, size)                                                                     \
    static void rows_##name(ROWS_ARGS) {                                                           \
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
#define QUANT_X(id, name, weights, bytes, per16, bias)                                             \
    [id] = {rows_##name, unpack_##name, per16, !bias},
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
};

// weights k .. k+255 of row r
static void unpack_row(const Matrix *w, int64_t r, int64_t k, int8_t *q, float *d, float *m) {
    uint8_t last[272];
    const uint8_t *b = w->data + r * quant_row_bytes(w->type, w->cols);
    b += quant_row_bytes(w->type, k);
    if (w->cols - k < 256) b = padded_256(w->type, b, w->cols - k, last);
    formats[w->type].unpack(b, q, d, m);
}

// -- matrix x matrix --
// out[n][rows] in tiles of 16 rows x some tokens, which stay in registers. Rows lie across the
// lanes and activations are broadcast, so nothing is summed across lanes. A task takes PANEL rows
// of one matrix, DEPTH weights deep at a time: decoded once to the tile's layout, they stay in the
// L2 cache while all tokens pass by; a tile's activations stay in L1 while its rows pass by.

#if defined(SIMD_VNNI) && defined(__AVX512BF16__) && \
    (defined(__AMX_BF16__) || defined(__AMXBF16__))   // gcc, clang
#define SIMD_AMX
enum { DEPTH = 1024, PANEL = 256 };
#else
enum { DEPTH = 512, PANEL = 64 };
#endif
enum {
    TILE = 16, VECTORS = TILE / LANES, FLOAT_DEPTH = 256,
    FLOAT_TOKENS = LANES == 16 ? 8 : 4,                    // by the number of registers
    TILE_BYTES = TILE * DEPTH * 2, PANEL_BYTES = PANEL / TILE * TILE_BYTES,
};

// n 32-bit words of 16 rows to columns
#if defined(SIMD_VNNI)
// four words at a time: vector i gets rows i, 4+i, 8+i, 12+i, so that transposing 4 x 4 words
// inside 128 bits finishes it
static void transpose(const uint32_t *rows, int stride, int n, uint32_t *to) {
    for (int k = 0; k < n; k += 4) {
        __m512i v[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const uint32_t *p = rows + stride * i + k;
            v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(p + 4 * stride)), 1);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(p + 8 * stride)), 2);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(p + 12 * stride)), 3);
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
static void transpose(const uint32_t *rows, int stride, int n, uint32_t *to) {
    for (int i = 0; i < n; i++)
        for (int r = 0; r < TILE; r++) to[TILE * i + r] = rows[stride * r + i];
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
    vf sum[FLOAT_TOKENS][VECTORS];   // local, so that it lives in registers
    const char *row = w;
    memset(sum, 0, tokens * sizeof *sum);
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
    transpose((uint32_t *)rows, FLOAT_DEPTH, depth, (uint32_t *)columns);
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
    typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
    vu bits = (vu)x;
    return (vf)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
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

// half of group g: two eights
INLINE vf half_group(const int8_t *q, const float *d, const float *m, int g, int half) {
    const uint8_t *code = (const uint8_t *)q + 128 * half + 8 * g;
    __m512i v = _mm512_cvtepi8_epi32((__m128i)quant_join(quant_u64(code), quant_u64(code + 64)));
    return (vf)_mm512_cvtepi32_ps(v) * d[2 * g + half] + m[2 * g + half];
}

// rows r .. r+15 from weight k on, as pairs [depth/32][parts][16][16][2]
static void panel_block(const Matrix *w, int64_t r, int64_t k, int depth, uint8_t *panel) {
    size_t row_bytes = quant_row_bytes(w->type, w->cols);
    int parts = weight_parts(w);
    for (int i = 0; i < depth; i += 256) {
        size_t at = quant_row_bytes(w->type, k + i);
        uint16_t rows[MAX_PARTS][TILE][256] __attribute__((aligned(64)));
        int some = depth - i < 256 ? depth - i : 256;
        for (int j = 0; j < TILE; j++) {
            int64_t row = r + j < w->rows ? r + j : w->rows - 1;
            int8_t q[256];
            float d[16], m[16], x[256];
            if (formats[w->type].unpack) {
                unpack_row(w, row, k + i, q, d, m);
                for (int g = 0; g < 8; g++)
                    store_bf16(&rows[0][j][32 * g], half_group(q, d, m, g, 0),
                               half_group(q, d, m, g, 1));
                continue;
            }
            memset(x + (some - 1) / 32 * 32, 0, 32 * sizeof *x);
            quant_dequantize(w->type, w->data + row * row_bytes + at, x, some);
            for (int g = 0; g < some; g += 32)
                store_parts(&rows[0][j][g], sizeof *rows, parts, load_f32(x + g),
                            load_f32(x + g + 16));
        }
        for (int g = 0; g < some; g += 32)
            for (int p = 0; p < parts; p++, panel += TILE_SIZE)
                transpose((uint32_t *)&rows[p][0][g], 128, 16, (uint32_t *)panel);
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

// rows r .. r+15 from weight k on: codes [depth/4][16][4], in the decoders' order; scales and
// offsets [depth/16][16]
static void panel_block(const Matrix *w, int64_t r, int64_t k, int depth, uint8_t *codes) {
    const Format *f = &formats[w->type];
    float *d = (float *)(codes + TILE * DEPTH), *m = d + DEPTH;
    for (int i = 0; i < depth; i += 256) {
        int8_t q[TILE][256];
        float scale[TILE][16], offset[TILE][16];
        for (int j = 0; j < TILE; j++) {
            int64_t row = r + j < w->rows ? r + j : w->rows - 1;
            unpack_row(w, row, k + i, q[j], scale[j], offset[j]);
            for (int c = 0; c < 256 && !f->offsets; c++) q[j][c] ^= CODE_BIAS;   // adds it
        }
        transpose((uint32_t *)q, 64, 64, (uint32_t *)(codes + TILE * i));
        transpose((uint32_t *)scale, 16, 16, (uint32_t *)d + i);
        if (f->offsets) transpose((uint32_t *)offset, 16, 16, (uint32_t *)m + i);
    }
}

INLINE void tile_int8(const uint8_t *w, const ActTile *a, int depth, bool per16, bool offsets,
                      vf total[TOKENS][VECTORS]) {
    vf sum[TOKENS][VECTORS] = {{{0}}};
    const float *d = (const float *)(w + TILE * DEPTH), *m = d + DEPTH;
    int step = per16 ? 16 : 32;
    for (int k = 0; k < depth; k += step, d += step, m += step) {
        int part = per16 ? k / 16 % 2 : 2;
        const ActTile *x = a + k / 32;
        const uint8_t *eights = w + TILE * (k / 256 * 256 + k % 256 / 32 * 8 + part % 2 * 128);
        vi dot[TOKENS][VECTORS];
        UNROLL for (int t = 0; t < TOKENS; t++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                dot[t][v] = (vi){0} + (offsets ? MAGIC_BITS : x->start[part][t]);
        UNROLL for (int s = 0; s < step / 4; s++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                vi codes = load_i32(eights + TILE * (s / 2 * 64 + s % 2 * 4) + 4 * LANES * v);
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

static size_t act_tiles(int64_t cols) { return (cols + 31) / 32; }   // of one part

// bytes for n rows of x in all, of at most cols columns, in one call's jobs; floats: of weights
static size_t matmul_scratch(size_t n, size_t cols, int threads, bool floats) {
    size_t tiles = n / TOKENS + (n < MAX_JOBS ? n : MAX_JOBS);
    return threads * (size_t)PANEL_BYTES + 64 +
           tiles * act_tiles(cols) * (floats ? MAX_PARTS : 1) * sizeof(ActTile);
}

static void pack_task(void *ctx, int i, int thread) {
    MatmulCall *c = ctx;
    int j = 0;
    (void)thread;
    while (i >= c->pack[j + 1]) j++;
    const Matmul *job = &c->jobs[j];
    int64_t tile = i - c->pack[j], cols = job->w->cols;
    size_t at = tile * act_tiles(cols) * act_parts(job->w);
    if (job->n == 1) act_quantize(job->x, cols, (Act *)c->act[j]);
    else act_pack(job, tile * TOKENS, (ActTile *)c->act[j] + at);
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
                const ActTile *a = (const ActTile *)act +
                                   (t / TOKENS * act_tiles(w->cols) + act_tiles(k)) * act_parts(w);
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
                              : tiles * act_tiles(cols) * act_parts(job->w) * sizeof(ActTile);
        }
        // one token: long runs of memory (128 KB read 10 % faster than 32), but tasks for all
        size_t rows = job->n > 1 ? PANEL : larger(524288 / row_bytes, 1), least = BLOCK_ROWS;
        if (job->n == 1) least = 1;
        while (rows > least && rows * 2 * p->threads > (size_t)job->w->rows) rows /= 2;
        c.rows[j] = rows;
        c.task[j + 1] = c.task[j] + (job->n ? (int)((job->w->rows + rows - 1) / rows) : 0);
    }
    parallel(p, pack_task, &c, c.pack[k]);
    parallel(p, matmul_task, &c, c.task[k]);
}
// ---- 17. attention ----
//
// Online softmax (arXiv 1805.02867, 2205.14135): the cache is read in blocks of KEYS rows; each
// query keeps the largest score so far, the sum of exp(score - largest) and the sum of the values
// so weighted, and scales them down when a larger score comes. No n x n buffer. The query heads
// that share a KV head share each block, converted from f16 once.

#if defined(SIMD_AMX)
enum { KEYS = 128, LANE_ROWS = 256, LANE_TILES = 2 };
#else
enum { KEYS = 64, LANE_ROWS = 64, LANE_TILES = 1 };
#endif
enum { FEW = 32, SPLIT = 8 };      // one query: rows at a time, and how often for a part
static const float LEAST = -1e29f; // largest score so far, before the first; hidden: ten times less


typedef struct {
    const Attention *a;
    float *parts, *work;           // [n_head][splits] of Part; [threads][work_size]
    size_t work_size;
    int32_t *block;                // [blocks] first rows of the FEW where something is visible
    int blocks, splits, run, queries;
    int end;                       // rows from here on are empty: a ring fills in order
    atomic_int *missing;           // [n_kv] parts
} AttentionCall;


// scores, or where the query does not see the key nearly minus infinity
INLINE vf hide(const Attention *a, vf score, vi key, vi query) {
    vi near = (key <= query) & ((query - key < a->window) | (key < a->keep));
    vi seen = (near | -!a->causal) & (key >= 0);
    return (vf)(((vi)score & seen) | ((vi)((vf){0} + 10 * LEAST) & ~seen));
}

// of rows r .. r+n-1: does any query at first .. last see any (1), do all see all (2)?
static int block_visible(const Attention *a, int r, int n, int first, int last) {
    int any = 0, all = 1, causal = a->causal;
    for (int j = r; j < r + n && j < a->rows; j++) {
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
        UNROLL for (int v = 0; v < VECTORS; v++) {
            vf x = load_f32(row + v * LANES);
            if (masked) x = hide(a, x, (vi){0} + p, load_i32(l->pos + v * LANES));
            memcpy(row + v * LANES, &x, sizeof x);
            top[v] = larger_of(top[v], x);
        }
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
            transpose((uint32_t *)rows[p], 16, 16, to + p * TILE_SIZE / 4);
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
                transpose(part[y][0], 16, 16, (uint32_t *)p[j / 32][y].x[t]);
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

// out[t][width] += sum over keys of x[key][t] * values[key][vd], FLOAT_TOKENS rows
static void add_values(const Attention *a, const uint16_t *v, int keys, const float *x, float *out,
                       int width) {
    uint16_t edge[KEYS][TILE] = {{0}};   // the last columns, where vd is not a multiple of 16
    for (int e = 0; e < a->vd; e += TILE) {
        vf tile[FLOAT_TOKENS][VECTORS];
        int some = a->vd - e < TILE ? a->vd - e : TILE;
        for (int j = 0; some < TILE && j < keys; j++)
            memcpy(edge[j], v + (size_t)j * a->vd + e, 2 * some);
        tile_float(load_f16, 2, some < TILE ? edge[0] : v + e, 2 * (some < TILE ? TILE : a->vd), x,
                   1, TILE, keys, FLOAT_TOKENS, tile);
        for (int t = 0; t < FLOAT_TOKENS; t++)
            for (int i = 0; i < some; i++) out[t * width + e + i] += ((float *)tile[t])[i];
    }
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
        add_values(a, v, keys, s + i, l->out + i * width, width);
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
    for (int r = 0; r < c->end; r += KEYS) {
        int visible = block_visible(a, r, KEYS, a->pos + first, a->pos + first + some - 1);
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
// Bound by memory: 2 * (hd + vd) bytes per row and KV head, each read once for all its query heads.
// FEW rows at a time, keys and then values, both as they lie; each asks for its like in the next
// block, so that memory never waits for arithmetic (128 rows at a time, column by column, read at
// 60 % of its bandwidth; this at 75). SPLIT blocks of a head make a Part; whoever finishes the last
// part of a head joins them.

typedef struct { float top, sum, out[]; } Part;   // of one head and split

static size_t part_size(const Attention *a) { return 2 + a->vd; }

// scores of `keys` keys with `heads` heads
INLINE void decode_scores(const Attention *a, const float *q, const uint16_t *k,
                          const uint16_t *next, int keys, int heads, float s[][FEW]) {
    vf sum[4][FEW];
    int whole = a->hd / LANES * LANES;
    for (int j = 0; j < keys; j++, k += a->hd, next += a->hd) {
        vf total[4] = {{0}};
        prefetch_l2(next, 2 * a->hd);
        for (int e = 0; e < whole; e += LANES) {
            vf key = load_f16(k + e);
            UNROLL for (int h = 0; h < heads; h++) total[h] += key * load_f32(q + h * a->hd + e);
        }
        UNROLL for (int h = 0; h < heads; h++) {
            for (int e = whole; e < a->hd; e++)
                total[h][0] += quant_f16_to_f32(k[e]) * q[h * a->hd + e];
            sum[h][j] = total[h];
        }
    }
    for (int h = 0; h < heads; h++) {
        for (int j = keys; j < FEW; j++) sum[h][j] = (vf){0};
        for (int j = 0; j < FEW; j += LANES) {
            vf x = sum_each(&sum[h][j]);
            memcpy(s[h] + j, &x, sizeof x);
        }
    }
}

// scores to weights; what came before fades
static void decode_softmax(const Attention *a, const int32_t *pos, int head, float *restrict s,
                           Part *restrict part) {
    float slope = a->slopes ? a->slopes[head] : 0, top = part->top;
    vf most = {0}, sum = {0};
    scores_finish(a, s, FEW);
    for (int j = 0; slope > 0 && j < FEW; j++) s[j] -= slope * (float)abs(a->pos - pos[j]);
    UNROLL for (int j = 0; j < FEW; j += LANES) {
        vf x = hide(a, load_f32(s + j), load_i32(pos + j), (vi){0} + a->pos);
        memcpy(s + j, &x, sizeof x);
        most = j ? larger_of(most, x) : x;
    }
    UNROLL for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (int j = 0; j < FEW; j++) s[j] = exp_fast(s[j] - top);
    UNROLL for (int j = 0; j < FEW; j += LANES) sum += load_f32(s + j);
    float fade = exp_fast(part->top - top);
    part->top = top;
    part->sum = part->sum * fade + sum_lanes(sum);
    if (fade < 1) fade_row(part->out, a->vd, fade);
}

// out[heads][..] += weights * values, `wide` vectors of a row in registers
INLINE void decode_columns(const Attention *a, const uint16_t *v, const uint16_t *next, int keys,
                           int heads, int wide, float s[][FEW], float *out, size_t stride) {
    vf sum[4][8];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < wide; i++) sum[h][i] = load_f32(out + h * stride + i * LANES);
    for (int j = 0; j < keys; j++, v += a->vd, next += a->vd) {
        prefetch_l2(next, 2 * wide * LANES);
        UNROLL for (int i = 0; i < wide; i++) {
            vf value = load_f16(v + i * LANES);
            UNROLL for (int h = 0; h < heads; h++) sum[h][i] += value * s[h][j];
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < wide; i++)
            memcpy(out + h * stride + i * LANES, &sum[h][i], sizeof(vf));
}

INLINE void decode_values(const Attention *a, const uint16_t *v, const uint16_t *next, int keys,
                          int heads, float s[][FEW], float *out, size_t stride) {
    int e = 0, wide = heads == 4 || LANES == 8 ? 4 : 8;   // by the number of registers
    for (; e + wide * LANES <= a->vd; e += wide * LANES)
        decode_columns(a, v + e, next + e, keys, heads, wide, s, out + e, stride);
    for (; e + LANES <= a->vd; e += LANES)
        decode_columns(a, v + e, next + e, keys, heads, 1, s, out + e, stride);
    for (int h = 0; h < heads && e < a->vd; h++)
        for (int j = 0; j < keys; j++)
            for (int i = e; i < a->vd; i++)
                out[h * stride + i] += s[h][j] * quant_f16_to_f32(v[j * a->vd + i]);
}

// block b of KV head h, with so many of its query heads from g on
INLINE void decode_heads(const AttentionCall *c, int h, int b, int g, int heads, float *parts) {
    const Attention *a = c->a;
    int r = c->block[b], keys = a->rows - r < FEW ? a->rows - r : FEW;
    int head = h * (a->n_head / a->n_kv) + g;
    size_t row = (size_t)h * a->rows + r, stride = part_size(a) * c->splits, next = row;
    int32_t pos[FEW];
    float s[4][FEW];
    if (g == 0 && b + 1 < c->blocks) next = row - r + c->block[b + 1];
    else if (g == 0 && h + 1 < a->n_kv) next = row - r + a->rows + c->block[0];
    memset(pos, -1, sizeof pos);
    memcpy(pos, a->pos_k + r, keys * sizeof *pos);
    parts += g * stride;
    decode_scores(a, a->q + (size_t)head * a->hd, a->k + row * a->hd, a->k + next * a->hd, keys,
                  heads, s);
    for (int i = 0; i < heads; i++)
        decode_softmax(a, pos, head + i, s[i], (Part *)(parts + i * stride));
    decode_values(a, a->v + row * a->vd, a->v + next * a->vd, keys, heads, s, parts + 2, stride);
}

static void decode_join(const AttentionCall *c, int h) {
    const Attention *a = c->a;
    const float *parts = c->parts + (size_t)h * c->splits * part_size(a);
    float *out = a->out + (size_t)h * a->vd, top = a->sinks ? a->sinks[h] : LEAST;
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

// `run` parts, one head's after the other's
static void decode_task(void *ctx, int i, int thread) {
    AttentionCall *c = ctx;
    const Attention *a = c->a;
    int group = a->n_head / a->n_kv, end = (i + 1) * c->run, all = a->n_kv * c->splits;
    size_t stride = part_size(a) * c->splits;
    (void)thread;
    for (int u = i * c->run; u < end && u < all; u++) {
        int h = u / c->splits, split = u % c->splits;
        float *parts = c->parts + h * group * stride + split * part_size(a);
        for (int g = 0; g < group; g++) {
            memset(parts + g * stride, 0, part_size(a) * sizeof *parts);
            parts[g * stride] = LEAST;
        }
        for (int b = split * SPLIT; b < (split + 1) * SPLIT && b < c->blocks; b++) {
            int g = 0;
            for (; g + 4 <= group; g += 4) decode_heads(c, h, b, g, 4, parts);
            for (; g + 2 <= group; g += 2) decode_heads(c, h, b, g, 2, parts);
            for (; g < group; g++) decode_heads(c, h, b, g, 1, parts);
        }
        bool last = atomic_fetch_sub(&c->missing[h], 1) == 1;
        for (int g = 0; last && g < group; g++) decode_join(c, h * group + g);
    }
}

static size_t work_floats(int n_head, int hd, int vd) {   // of a thread
    size_t lanes = n_head + LANE_ROWS + LANE_TILES * TILE, wide = padded(hd) + padded(vd);
    return (TILE + KEYS + lanes) * wide + lanes / TILE * (sizeof(Lanes) / sizeof(float)) + 16;
}

// bytes for layers of at most n_head heads and rings of at most `rows` rows
static size_t attention_scratch(int n_head, int hd, int vd, int rows, int threads) {
    size_t blocks = (rows + FEW - 1) / FEW, splits = (blocks + SPLIT - 1) / SPLIT;
    return 4 * (work_floats(n_head, hd, vd) / 16 * 16 * threads + n_head * (2 + vd) * splits +
                blocks + n_head) + 64;
}

static void attention(Pool *p, void *scratch, const Attention *a) {
    int group = a->n_head / a->n_kv, queries = group < LANE_ROWS ? LANE_ROWS / group : 1;
    AttentionCall c = {.a = a, .work = scratch, .queries = queries,
                       .end = a->pos + a->n < a->rows ? a->pos + a->n : a->rows,
                       .work_size = work_floats(a->n_head, a->hd, a->vd) / 16 * 16};
    if (a->n > 1) {
        parallel(p, prefill_task, &c, a->n_kv * ((a->n + queries - 1) / queries));
        return;
    }
    c.block = (int32_t *)(c.work + c.work_size * p->threads);
    c.missing = (atomic_int *)(c.block + (a->rows + FEW - 1) / FEW);
    c.parts = (float *)(c.missing + a->n_kv);
    for (int r = 0; r < c.end; r += FEW)
        if (block_visible(a, r, FEW, a->pos, a->pos)) c.block[c.blocks++] = r;
    c.splits = (c.blocks + SPLIT - 1) / SPLIT;
    for (int h = 0; h < a->n_kv; h++) atomic_init(&c.missing[h], c.splits);
    c.run = (int)larger(a->n_kv * c.splits / (4 * p->threads), 1);   // long runs, but for all
    parallel(p, decode_task, &c, (a->n_kv * c.splits + c.run - 1) / c.run);
}
static void narrow(const float *x, int n, uint16_t *to) {   // to f16
    int i = 0;
    for (; i + LANES <= n; i += LANES) store_f16(to + i, load_f32(x + i));
    for (; i < n; i++) to[i] = quant_f32_to_f16(x[i]);
}
// ---- the delta rule ----

enum { DELTA_ROWS = 4 * LANES };
static int delta_blocks(const Config *c) { return (c->dv + DELTA_ROWS - 1) / DELTA_ROWS; }

static size_t delta_state_floats(const Config *c) {
    return (size_t)c->n_value * delta_blocks(c) * c->dk * DELTA_ROWS;
}

// A task has DELTA_ROWS rows of S, side by side in the vectors' lanes, and runs over the chunk's
// tokens: prefill and decode are one recurrence, and S stays in L1. The pass that writes a token
// reads for its query and the next token's key: 4 dk dv multiply-adds, 65,536 for 128 x 128. The
// chunked (WY) form takes 70,000 with chunks of 64, and a triangular inverse.
static void delta_rule(void *ctx, int task, int thread) {
    enum { V = DELTA_ROWS / LANES };
    Session *s = ctx;
    const Config *c = &s->m->config;
    int blocks = delta_blocks(c), h = task / blocks, r = task % blocks * DELTA_ROWS, dk = c->dk;
    int key = c->arch->flags & DELTA_TILED ? h % c->n_key : h / (c->n_value / c->n_key);
    size_t channels = s->m->layers[s->l].conv_in.rows;
    size_t bytes = (c->dv - r < DELTA_ROWS ? c->dv - r : DELTA_ROWS) * sizeof(float);
    float *state = s->cache[s->l].state + (size_t)task * dk * DELTA_ROWS;
    const float *q = s->mix + (size_t)key * dk, *k = q + (size_t)c->n_key * dk;
    const float *value = s->mix + (size_t)2 * c->n_key * dk + h * c->dv + r;
    vf asked[V] = {{0}};
    (void)thread;
    for (int j = 0; j < dk; j++)
        UNROLL for (int v = 0; v < V; v++)
            asked[v] += load_f32(state + j * DELTA_ROWS + v * LANES) * k[j];
    for (int t = 0; t < s->n; t++, q += channels, k += channels, value += channels) {
        const float *next = t + 1 < s->n ? k + channels : k;
        size_t gate = (size_t)t * c->n_value + h;
        float g = s->decay[gate], b = s->write[gate];
        vf write[V] = {{0}}, out[V] = {{0}}, ask[V] = {{0}};
        prefetch(q + 2 * channels, dk * sizeof *q);
        prefetch(k + 2 * channels, dk * sizeof *k);
        memcpy(write, value, bytes);
        UNROLL for (int v = 0; v < V; v++) write[v] = (write[v] - asked[v] * g) * b;
        for (int j = 0; j < dk; j++) {
            UNROLL for (int v = 0; v < V; v++) {
                float *at = state + j * DELTA_ROWS + v * LANES;
                vf row = load_f32(at) * g + write[v] * k[j];
                memcpy(at, &row, sizeof row);
                out[v] += row * q[j];
                ask[v] += row * next[j];
            }
        }
        memcpy(asked, ask, sizeof ask);
        memcpy(s->att + gate * c->dv + r, out, bytes);
    }
}
// ==== Part V: main ===============================================================================
// ---- 18. main ----

#ifndef LLM_NO_MAIN

typedef struct {
    // what was asked for
    const char *model, *file, *logits, *ppl;
    const char *prompt;              // [n_prompt] bytes, for --ppl those of its file
    size_t n_prompt;
    int n_predict;
    bool help, version, chat, special, hide_prompt, tokenize, embed, info;
    Tokens bench;                    // P and N
    Options o;
    // what it takes to answer
    Error e;
    Model m;
    Session s;
    char *text;                      // of a file
    Tokens ids;                      // of the prompt, and the n_new that followed
    size_t n_new;
    void *work;                      // of one mode: a piece of text, an embedding, ...
    FILE *out;
    Detokenizer detokenizer;
    double first, prefill, decode;   // when the first new token came; seconds before and after
} Cli;

static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig) { interrupted = sig; }

enum { SWITCH, TEXT, NUMBER, INTEGER, SEED, LIST, PAIR };
typedef struct {
    const char *usage;   // name and value
    int kind;
    size_t at;
    double low, high;
    const char *help;
} Option;

#define AT(field) offsetof(Cli, field)
#define PICK(field) offsetof(Cli, o.sampling.field)
static const Option OPTIONS[] = {
    {"-m MODEL", TEXT, AT(model), 0, 0, "the model, as the first argument"},
    {"-p PROMPT", TEXT, AT(prompt), 0, 0, "the prompt, as the second argument"},
    {"-f FILE", TEXT, AT(file), 0, 0, "prompt from a file, - for standard input"},
    {"-i", SWITCH, AT(chat), 0, 0, "chat: the model's own template, turn after turn"},
    {"-n N", INTEGER, AT(n_predict), -1, INT_MAX, "tokens to generate (256); -1: until the end"},
    {"-c N", INTEGER, AT(o.window), 1, INT_MAX, "attention window (4096 or the model's less)"},
    {"-b N", INTEGER, AT(o.chunk), 1, 1 << 20, "tokens of a prefill chunk (512)"},
    {"-t N", INTEGER, AT(o.threads), 1, 1024, "CPU threads (the CPUs this process may run on)"},
    {"--temp T", NUMBER, PICK(temp), -FLT_MAX, FLT_MAX, "temperature (0.8); 0 is greedy"},
    {"--top-k K", INTEGER, PICK(top_k), 0, INT_MAX, "the K likeliest tokens only (40); 0 all"},
    {"--top-p P", NUMBER, PICK(top_p), 0, 1, "the likeliest that hold a share P (0.95); 1 all"},
    {"--min-p P", NUMBER, PICK(min_p), 0, 1, "those at least P as likely as the best (0.05)"},
    {"--repeat-penalty R", NUMBER, PICK(repeat_penalty), FLT_MIN, FLT_MAX, "1.0 is none"},
    {"--repeat-last-n N", INTEGER, PICK(repeat_last_n), -1, INT_MAX, "for the last N (64); -1 all"},
    {"--seed S", SEED, PICK(seed), 0, 0x1p64, "same seed, same text (from the clock)"},
    {"--keep N", INTEGER, AT(o.keep), 0, INT_MAX, "pin the first N tokens in the window"},
    {"--special", SWITCH, AT(special), 0, 0, "parse special tokens in PROMPT"},
    {"--no-display-prompt", SWITCH, AT(hide_prompt), 0, 0, "print the continuation alone"},
    {"--cpu", SWITCH, AT(o.cpu), 0, 0, "do not use the GPU"},
    {"--tokenize", SWITCH, AT(tokenize), 0, 0, "print the token ids of PROMPT"},
    {"--tokens A,B,C", LIST, AT(ids), 0, 0x1p64, "token ids instead of PROMPT, as they are"},
    {"--logits FILE", TEXT, AT(logits), 0, 0, "write float32 logits of every token"},
    {"--embed", SWITCH, AT(embed), 0, 0, "print the pooled embedding of PROMPT"},
    {"--ppl FILE", TEXT, AT(ppl), 0, 0, "perplexity of a text"},
    {"--bench [P,N]", PAIR, AT(bench), 1, 1 << 24, "speed of P (512) tokens in, N (128) out"},
    {"--info", SWITCH, AT(info), 0, 0, "metadata, architecture, formats, memory plan"},
    {"-h", SWITCH, AT(help), 0, 0, "this page"},
    {"--help", SWITCH, AT(help), 0, 0, "this page"},
    {"--version", SWITCH, AT(version), 0, 0, "llm 1.0"},
};

static bool print_usage(void) {
    printf("usage: llm MODEL.gguf [PROMPT] [options]   completes PROMPT");
    for (const Option *o = OPTIONS; o < OPTIONS + COUNT(OPTIONS); o++)
        printf("\n  %-22s %s", o->usage, o->help);
    printf("\narchitectures:");
    for (size_t i = 0, column = 99; i < COUNT(ARCHS); i++) {
        if (ARCHS[i].n_layer) continue;   // another row has the same name
        if (column + strlen(ARCHS[i].names) > 98) column = printf("\n ") - 1;
        column += printf(" %s", ARCHS[i].names);
    }
    return putchar('\n'), true;
}

// one text, one number, or numbers with commas between them
static bool parse_value(Cli *c, const Option *o, const char *text) {
    void *at = (char *)c + o->at;
    Tokens *list = o->kind >= LIST ? at : NULL;
    char *end;
    if (o->kind == SWITCH) *(bool *)at = true;
    if (o->kind == TEXT) *(const char **)at = text;
    if (o->kind <= TEXT) return true;
    if (list) list->n = 0;
    do {
        errno = 0;
        uint64_t whole = strtoull(text, &end, 10);
        double x = *text == '-' ? -(double)-whole : (double)whole;
        if (o->kind == NUMBER) x = strtof(text, &end);
        else if (errno) return false;
        if (end == text || isspace((uint8_t)*text) || !(x >= o->low && x <= o->high)) return false;
        if (o->kind == NUMBER) *(float *)at = x;
        if (o->kind == INTEGER) *(int *)at = x;
        if (o->kind == SEED) *(uint64_t *)at = whole;
        if (list && !tokens_add(list, fmin(x, INT_MAX))) return false;
        text = end + 1;
    } while (list && *end == ',');
    return !*end && (o->kind != PAIR || list->n == 2);
}

static bool parse_options(Cli *c, int argc, char **argv) {
    const char *word[3] = {NULL, NULL, NULL};
    for (int i = 1, words = 0, ended = 0; i < argc; i++) {
        const char *arg = argv[i], *value = argv[i + 1];
        const Option *o = OPTIONS, *end = OPTIONS + COUNT(OPTIONS);
        size_t n = strlen(arg);
        bool option = !ended && arg[0] == '-' && arg[1];
        if (!option) word[words < 2 ? words++ : 2] = arg;
        ended = ended || !strcmp(arg, "--");
        if (!option || ended) continue;
        while (o < end && (strncmp(arg, o->usage, n) || (o->usage[n] && o->usage[n] != ' '))) o++;
        if (o == end) return fail(&c->e, "unknown option %s; see --help", arg);
        bool pair = value && (strchr(value, ',') || !value[strspn(value, "0123456789")]);
        if (o->kind == PAIR && !pair) value = "512,128";
        else if (o->kind != SWITCH) i++;
        if (i == argc) return fail(&c->e, "%s needs a value; see --help", arg);
        if (!parse_value(c, o, value))
            return fail(&c->e, "%s: expected %s from %.10g to %.10g, not '%s'", o->usage,
                        o->kind == NUMBER ? "a number" : "whole numbers", o->low, o->high, value);
    }
    const char **prompt = c->model ? word : word + 1;
    if (!c->model) c->model = word[0];
    int prompts = !!c->prompt + !!c->file + !!c->ids.id + !!prompt[0] + !!prompt[1];
    if (prompt[0]) c->prompt = prompt[0];
    if (c->help || c->version) return true;
    if (c->chat && c->ids.id) return fail(&c->e, "-i takes text, not --tokens");
    if (prompts > 1) return fail(&c->e, "two prompts: give one of PROMPT, -p, -f, --tokens");
    if (!c->model) return fail(&c->e, "no MODEL.gguf given; see --help");
    return prompts || c->chat || c->ppl || c->bench.id || c->info ||
           fail(&c->e, "no PROMPT given; see --help");
}

static bool read_file(Cli *c, const char *path) {
    const size_t most = (1 << 28) + 1;   // what tokenize refuses; memory is taken as it is filled
    FILE *f = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    c->prompt = c->text = malloc(most);
    c->n_prompt = f && c->text ? fread(c->text, 1, most, f) : 0;
    bool ok = (f && c->text && !ferror(f)) || fail(&c->e, "%s: %s", path, strerror(errno));
    if (f && f != stdin) fclose(f);
    return ok;
}

static bool check_utf8(Cli *c, const char *s, size_t n) {
    for (size_t i = 0, used; i < n; i += used) {
        uint32_t character = utf8_decode(s + i, n - i, &used);
        if (!utf8_valid(character, used))
            return fail(&c->e, "the text is not UTF-8: byte %zu is 0x%02x", i, (uint8_t)s[i]);
    }
    return true;
}

// the text that was given, if one was, and its ids
static bool load_prompt(Cli *c) {
    const Tokenizer *t = c->m.tokenizer;
    const char *file = c->ppl ? c->ppl : c->file;
    if (file && !read_file(c, file)) return false;
    if (!file && c->prompt) c->n_prompt = strlen(c->prompt);
    if (!c->prompt || c->chat) return true;
    c->ids.n = 0;
    if (!check_utf8(c, c->prompt, c->n_prompt)) return false;
    if (!tokenize(t, c->prompt, c->n_prompt, true, c->special, &c->ids, &c->e)) return false;
    if (c->ids.n || c->tokenize) return true;
    if (t->bos < 0) return fail(&c->e, "the prompt is empty and the model has no BOS token");
    return tokens_add(&c->ids, t->bos) || fail(&c->e, "out of memory");
}

// what one token reads: each weight once (experts: the chosen), one embedding row, the KV rows
static double token_bytes(const Session *s, int pos) {
    const Model *m = s->m;
    const Config *k = &m->config;
    double sum = 0;
    for (size_t i = 0; i < m->gguf.n_tensors; i++) {
        const Tensor *t = &m->gguf.tensors[i];
        bool layer = t->name.n > 4 && !memcmp(t->name.s, "blk.", 4);
        bool expert = memmem(t->name.s, t->name.n, "_exps.", 6);
        bool row = t->data == m->pos_embd.data || t->data == m->embd.data;
        if (layer && atoi(t->name.s + 4) >= k->n_layer) continue;   // it predicts further tokens
        if (row && t->data != m->head.data) sum += quant_row_bytes(t->type, t->ne[0]);
        else sum += tensor_bytes(t) * (expert ? (double)k->n_used / k->n_expert : 1);
    }
    for (int l = 0; l < k->n_layer; l++) {
        int most = s->cache[l].window + s->cache[l].keep, seen = pos < most ? pos + 1 : most;
        sum += 2.0 * seen * m->layers[l].n_kv * (k->hd + k->vd);
    }
    return sum;
}

static bool print_token(void *ctx, int32_t id) {
    Cli *c = ctx;
    const Tokenizer *t = c->m.tokenizer;
    if (!c->first) c->first = now();
    if (t->kind == TOKENIZER_NONE) printf(c->n_new ? " %d" : "%d", id);
    else fwrite(c->work, 1, detokenize(t, &c->detokenizer, id, c->work), stdout);
    fflush(stdout);
    c->n_new++;
    return tokens_add(&c->ids, id) && !interrupted && !ferror(stdout);
}

// evaluates c->ids, adds and prints what follows
static bool reply(Cli *c) {
    size_t n = c->ids.n;
    double start = now();
    c->first = 0;
    fflush(stdout);
    bool ok = c->n_predict
                  ? session_generate(&c->s, c->ids.id, n, c->n_predict, print_token, c, &c->e)
                  : session_eval(&c->s, c->ids.id, n, &c->e) != NULL;
    double end = now();
    if (!c->first) c->first = end;
    c->prefill += c->first - start;
    c->decode += end - c->first;
    if (ok || interrupted || c->ids.n > n) putchar('\n');
    fflush(stdout);
    return ok;
}

// what goes to stderr when all went well
static void print_notes(const Cli *c) {
    const Session *s = &c->s;
    struct rusage usage;
    int n = c->ids.n - c->n_new, window = s->o.window, n_ctx = c->m.config.n_ctx;
    double speed = s->n_history > n ? (s->n_history - n) / c->decode : 0;
    if (c->m.tokenizer->note) fprintf(stderr, "note: %s\n", c->m.tokenizer->note);
    if (c->o.window > n_ctx && s->m)
        fprintf(stderr, "note: -c %d is larger than the model's context of %d\n", window, n_ctx);
    if (n > window && s->m && !c->ppl && !c->bench.id)
        fprintf(stderr, "note: the first %d tokens of the prompt are out of sight; "
                "-c %d keeps them\n", n - window, n);
    if (!c->prefill) return;
    getrusage(RUSAGE_SELF, &usage);
    fprintf(stderr, "prefill %d tokens %.1f tok/s, decode %zu tokens %.1f tok/s %.1f GB/s, "
            "peak %.0f MB, seed %llu\n", n, n / c->prefill, c->n_new, speed,
            speed * token_bytes(s, s->n_history) * 1e-9, usage.ru_maxrss / RSS_PER_MB,
            (unsigned long long)c->o.sampling.seed);
}

// A chat template is a Jinja program in the metadata. As llama.cpp does by default, the family is
// recognised by a word that only its templates have, and a turn is written from this table: % is
// where the user's text stands, then the reply. The start comes before the first turn.
typedef struct { const char *mark, *start, *turn; } ChatFamily;
static const ChatFamily CHATS[] = {
    {"<|im_start|>", "", "<|im_start|>user\n%<|im_end|>\n<|im_start|>assistant\n%<|im_end|>\n"},
    {"<|start_header_id|>", "", "<|start_header_id|>user<|end_header_id|>\n\n%<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n%<|eot_id|>"},
    {"<start_of_turn>", "",
     "<start_of_turn>user\n%<end_of_turn>\n<start_of_turn>model\n%<end_of_turn>\n"},
    {"<|channel|>", "", "<|start|>user<|message|>%<|end|><|start|>assistant%<|end|>"},
    {"<|start_of_role|>", "", "<|start_of_role|>user<|end_of_role|>%<|end_of_text|>\n"
     "<|start_of_role|>assistant<|end_of_role|>%<|end_of_text|>\n"},
    {"<|START_OF_TURN_TOKEN|>", "", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>%<|END_OF_TURN_TOKEN|>"
     "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>%<|END_OF_TURN_TOKEN|>"},
    {"<｜User｜>", "", "<｜User｜>%<｜Assistant｜>%<｜end▁of▁sentence｜>"},
    {"[gMASK]", "[gMASK]<sop>", "<|user|>\n%<|assistant|>\n%"},
    {"[|assistant|]", "", "[|user|]%\n[|assistant|]%[|endofturn|]\n"},
    {"<|end|>", "", "<|user|>\n%<|end|>\n<|assistant|>\n%<|end|>\n"},
    {"<|user|>", "", "<|user|>\n%</s>\n<|assistant|>\n%</s>\n"},
    {"[INST]", "", "[INST]% [/INST]%</s>"},
};

// one turn: the user's text between the template's words; only those may be special tokens
static bool chat_turn(Cli *c, const ChatFamily *f, const char *user, size_t n) {
    const Tokenizer *t = c->m.tokenizer;
    const char *middle = strchr(f->turn, '%') + 1, *end = strchr(middle, '%');
    bool first = c->ids.n == 0;
    char before[128];
    snprintf(before, sizeof before, "%s%.*s", first ? f->start : end + 1,
             (int)(middle - 1 - f->turn), f->turn);
    if (first && t->add_bos && !tokens_add(&c->ids, t->bos)) return fail(&c->e, "out of memory");
    c->detokenizer = (Detokenizer){.started = true};
    return check_utf8(c, user, n) &&
           tokenize(t, before, strlen(before), false, true, &c->ids, &c->e) &&
           tokenize(t, user, n, false, false, &c->ids, &c->e) &&
           tokenize(t, middle, end - middle, false, true, &c->ids, &c->e) && reply(c);
}

static bool run_chat(Cli *c) {
    Str template = gguf_str(&c->m.gguf, "tokenizer.chat_template");
    const ChatFamily *f = CHATS, *end = CHATS + COUNT(CHATS);
    if (!template.n) return fail(&c->e, "the model has no chat template; -i needs one");
    while (f < end && !memmem(template.s, template.n, f->mark, strlen(f->mark))) f++;
    if (f == end) return fail(&c->e, "the model's chat template is of an unknown family");
    char *line = NULL;
    size_t room = 0;
    bool ok = !c->prompt || chat_turn(c, f, c->prompt, c->n_prompt);
    while (ok && !interrupted && !ferror(stdout)) {
        if (isatty(STDIN_FILENO)) fputs("> ", stderr);
        ssize_t n = getline(&line, &room, stdin);
        if (n < 0) break;
        if (line[n - 1] == '\n') n--;
        if (n > 0) ok = chat_turn(c, f, line, n);
    }
    free(line);
    return ok;
}

static bool write_row(void *ctx, int i, const float *logits) {
    Cli *c = ctx;
    size_t n = c->m.config.n_vocab;
    (void)i;
    return fwrite(logits, sizeof *logits, n, c->out) == n;
}

static bool run_logits(Cli *c) {
    struct stat st;
    c->out = fopen(c->logits, "wb");
    if (!c->out) return fail(&c->e, "%s: %s", c->logits, strerror(errno));
    bool ok = session_run(&c->s, c->ids.id, c->ids.n, 0, false, write_row, c, &c->e);
    if (ferror(c->out) | fclose(c->out)) ok = fail(&c->e, "%s: cannot be written whole", c->logits);
    if (!ok && !stat(c->logits, &st) && S_ISREG(st.st_mode)) remove(c->logits);
    return ok;
}

typedef struct { const int32_t *ids; int n_vocab, count; double nll, squares; } Score;

static bool score_row(void *ctx, int i, const float *logits) {
    Score *p = ctx;
    float top = logits[0];
    double sum = 0;
    for (int k = 1; k < p->n_vocab; k++) top = fmaxf(top, logits[k]);
    for (int k = 0; k < p->n_vocab; k++) sum += exp_fast(logits[k] - top);
    int32_t next = p->ids[i + 1];
    double nll = log(sum) + top - (next < p->n_vocab ? logits[next] : -INFINITY);
    p->nll += nll;
    p->squares += nll * nll;
    p->count++;
    return true;
}

static bool run_ppl(Cli *c) {
    const Tokenizer *t = c->m.tokenizer;
    size_t n = c->s.o.window, windows = c->ids.n / n;
    Score p = {.ids = c->ids.id, .n_vocab = c->m.config.n_vocab};
    if (windows < 2 || n < 3)
        return fail(&c->e, "%s: %zu tokens; at -c %zu perplexity takes %zu at least", c->ppl,
                    c->ids.n, n, larger(2 * n, 6));
    for (size_t w = 0; w < windows; w++, p.ids += n) {
        if (t->add_bos) c->ids.id[w * n] = t->bos;
        session_truncate(&c->s, 0);
        if (!session_run(&c->s, p.ids, n - 1, n / 2, false, score_row, &p, &c->e)) return false;
    }
    double mean = p.nll / p.count, variance = fmax(p.squares / p.count - mean * mean, 0);
    printf("ppl %.4f +- %.4f tokens %zu windows %zu\n", exp(mean),
           exp(mean) * sqrt(variance / larger(p.count - 1, 1)), c->ids.n, windows);
    return true;
}

// Pooling as the metadata says; not said: the last token of a causal model, an encoder's mean.
// Prints the result, L2-normalised; without pooling each row is one.
static bool pool_row(void *ctx, int i, const float *row) {
    enum { NONE, MEAN, CLS, LAST };
    Cli *c = ctx;
    const Config *k = &c->m.config;
    int pooling = k->pooling >= 0 ? k->pooling : k->causal ? LAST : MEAN;
    double *x = c->work, length = 0;
    for (int j = 0; j < k->dim && (i == 0 || pooling != CLS); j++)
        x[j] = row[j] + (pooling == MEAN ? x[j] : 0);
    if (pooling != NONE && i + 1 < (int)c->ids.n) return true;
    for (int j = 0; j < k->dim; j++) length += x[j] * x[j];
    for (int j = 0; j < k->dim; j++)
        printf(j ? " %.9g" : "%.9g", length > 0 ? x[j] / sqrt(length) : 0.0);
    putchar('\n');
    return true;
}

enum { RUNS = 5, SLICES = 1024, SLICE = 512 << 10 };   // reads a memory of so many slices, in bytes

static void read_slice(void *ctx, int i, int thread) {
    uint64_t *p = (uint64_t *)((char *)ctx + (size_t)i * SLICE), sum[32] = {0};
    (void)thread;
    for (size_t k = 0; k < SLICE / sizeof *p; k += 32) {
        prefetch_ahead(p + k, 256);
        for (int j = 0; j < 32; j++) sum[j] += p[k + j];
    }
    for (int j = 0; j < 32; j++) p[0] += sum[j];   // so that the sums must be made
}

static bool run_bench(Cli *c) {
    Session *s = &c->s;
    int n_prompt = c->bench.id[0], n_decode = c->bench.id[1], n = n_prompt;
    double decode = 0, best = 0, moved = 0, memory = (double)SLICES * SLICE;
    for (uint64_t rng = 1; c->ids.n < (size_t)n_prompt + n_decode;)
        if (!tokens_add(&c->ids, random_unit(&rng) * c->m.config.n_vocab))
            return fail(&c->e, "out of memory");

    // a first chunk touches weights and scratch, so that the rest measures neither disk nor kernel
    memset(c->work, 1, memory);
    if (!session_eval(s, c->ids.id, n < s->o.chunk ? n : s->o.chunk, &c->e)) return false;
    session_truncate(s, 0);
    double start = now();
    if (!session_eval(s, c->ids.id, n, &c->e)) return false;
    double prefill = now() - start;
    for (int run = 1; run <= RUNS; run++) {
        start = now();
        while (n < n_prompt + (int64_t)n_decode * run / RUNS)
            if (!session_eval(s, c->ids.id, ++n, &c->e)) return false;
        decode += now() - start;
        start = now();
        parallel(&s->pool, read_slice, c->work, SLICES);
        best = fmax(best, memory / (now() - start));
    }
    while (n > n_prompt) moved += token_bytes(s, --n);
    printf("prefill %d tokens %.1f tok/s\n", n_prompt, n_prompt / prefill);
    printf("decode %d tokens %.1f tok/s %.1f GB/s %.1f %% of %.1f GB/s\n", n_decode,
           n_decode / decode, moved / decode * 1e-9, 100 * moved / decode / best, best * 1e-9);
    return true;
}

static void print_meta(const Meta *m) {
    const uint8_t *p = m->v;
    printf("%.*s =", STR_ARG(m->key));
    if (m->type == GGUF_ARR) printf(" [%llu]", (unsigned long long)m->n);
    for (uint64_t i = 0; i < m->n && i < 4; i++) {
        Str s = m->elem == GGUF_STR ? str_next(&p) : (Str){"", 0};
        putchar(' ');
        if (m->elem != GGUF_STR) printf("%.9g", meta_float(m, i));
        for (size_t k = 0; k < s.n && k < 60; k++) putchar((uint8_t)s.s[k] < ' ' ? ' ' : s.s[k]);
        if (s.n > 60) printf("...");
    }
    printf(m->n > 4 ? " ...\n" : "\n");
}

static bool print_info(const Cli *c) {
    const Config *k = &c->m.config;
    const Gguf *g = &c->m.gguf;
    double weights = 0;
    for (size_t i = 0; i < g->n_meta; i++) print_meta(&g->meta[i]);
    printf("\narchitecture %s%s: %d layers, dim %d, head %d, vocabulary %d, context %d\n",
           k->name, is_word(k->name, VERIFIED) ? "" : " (unverified: no golden output)", k->n_layer,
           k->dim, k->hd, k->n_vocab, k->n_ctx);
    for (int type = 0; type < 64; type++) {
        double size = 0;
        int count = 0;
        for (const Tensor *t = g->tensors; t < g->tensors + g->n_tensors; t++) {
            if (t->type != type) continue;
            size += tensor_bytes(t) / 1048576;
            count++;
        }
        if (count) printf("format %s: %d tensors, %.1f MB\n", quant_name(type), count, size);
        weights += size;
    }
    printf("memory: weights %.1f MB mapped, KV cache %.1f MB for a window of %d, scratch %.1f MB\n",
           weights, c->s.kv_bytes / 1048576.0, c->s.o.window, c->s.scratch_bytes / 1048576.0);
    return true;
}

static bool run(Cli *c) {
    Model *m = &c->m;
    if (c->help) return print_usage();
    if (c->version) return puts("llm 1.0"), true;
    if (!model_load(m, c->model, !c->tokenize, &c->e)) return false;
    if (!load_prompt(c)) return false;
    if (c->tokenize) {
        for (size_t i = 0; i < c->ids.n; i++) printf(i ? " %d" : "%d", c->ids.id[i]);
        return putchar('\n'), true;
    }
    if (m->config.arch->flags & ENCODER) {
        if (!c->embed && !c->info)
            return fail(&c->e, "%s: %s is an encoder; use --embed", c->model, m->config.name);
        c->o.window = c->o.chunk = c->ids.n;   // it sees the whole text at once
    }
    if (!session_open(&c->s, m, c->o, &c->e)) return false;
    c->s.stop = &interrupted;
    size_t work = larger(m->config.dim * sizeof(double), m->tokenizer->piece_max);
    c->work = calloc(1, c->bench.id ? (size_t)SLICES * SLICE : work);
    if (!c->work) return fail(&c->e, "out of memory");
    if (c->info) return print_info(c);
    if (c->ppl) return run_ppl(c);
    if (c->bench.id) return run_bench(c);
    if (c->embed) return session_run(&c->s, c->ids.id, c->ids.n, 0, true, pool_row, c, &c->e);
    if (c->logits) return run_logits(c);
    if (c->chat) return run_chat(c);
    if (c->prompt && !c->hide_prompt) fwrite(c->prompt, 1, c->n_prompt, stdout);
    c->detokenizer.started = c->n_prompt > 0;
    return reply(c);
}

int main(int argc, char **argv) {
    Cli c = {.n_predict = 256,
             .o.sampling = {.temp = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f,
                            .repeat_penalty = 1, .repeat_last_n = 64, .seed = now() * 1e9}};
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, NULL);   // ends reads, too
    bool asked = parse_options(&c, argc, argv), ok = asked && run(&c);
    if (ok && (fflush(stdout) || ferror(stdout)))
        ok = fail(&c.e, "standard output: %s", strerror(errno));
    if (c.m.tokenizer && (ok || interrupted)) print_notes(&c);
    if (!ok && !interrupted) fprintf(stderr, "llm: %s\n", c.e.text);
    session_close(&c.s);
    model_close(&c.m);
    free(c.text);
    free(c.ids.id);
    free(c.bench.id);
    free(c.work);
    return interrupted ? 130 : ok ? 0 : asked ? 1 : 2;
}

#endif   // LLM_NO_MAIN

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
