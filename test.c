// SPDX-License-Identifier: MIT
// test.c: all tests of the project, in one program.
//
//   ./test                 runs them            ./test --list     names them
//   ./test NAME...         runs those           ./test --quick    does less of what is slow
//   ./test llm ARGUMENTS   is the engine itself, so that a sanitizer sees the command line too
//   ./test model TYPE FILE writes a model for `make bench`
//
// A test compares with outputs recorded from llama.cpp (golden/), with the plain engine of llm.c's
// Part I, or with a reference in double written here from the formula. Models that no golden file
// covers are written by the tests themselves, with random weights, into a directory of their own.
// To add a test: a function `static void test_X(void)` that calls CHECK, and a row in TESTS.
#ifdef LLM_METAL
#undef _FORTIFY_SOURCE   // its longjmp forbids the GPU in software to change stacks
#endif
#define _GNU_SOURCE
#include <stdlib.h>
static size_t allocations;   // of the engine: forward makes none
#define malloc(n) (allocations++, malloc(n))
#define calloc(n, size) (allocations++, calloc(n, size))
#define realloc(p, n) (allocations++, realloc(p, n))
#define main llm_main
#include "llm.c"
#undef main
#undef malloc
#undef calloc
#undef realloc
#include <regex.h>
#include <setjmp.h>
#include <sys/wait.h>

// ==== harness ====

enum { MOST = 256 };

static struct {
    int checks, failures;                  // of the running test
    bool quick;
    char dir[64];                          // scratch files live here
    const char *program;                   // the command line under test
    uint32_t seed;
    jmp_buf end;                           // of the running test, after which all this is freed:
    void **memory;                         // [n_memory]
    Session *sessions[MOST];
    Model *models[MOST];
    int n_memory, n_sessions, n_models;
} test;

__attribute__((format(printf, 4, 5)))
static bool check(bool ok, const char *file, int line, const char *format, ...) {
    va_list args;
    test.checks++;
    if (ok || test.failures++ >= 10) return ok;
    printf("  %s:%d: ", file, line);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    return ok;
}

#define CHECK(ok, ...) check((ok), __FILE__, __LINE__, __VA_ARGS__)
#define REQUIRE(ok, ...) (CHECK(ok, __VA_ARGS__) ? (void)0 : longjmp(test.end, 1))   // or no more

static void *need(size_t size) {   // zeroed, until the end of the test
    test.memory = realloc(test.memory, (test.n_memory + 1) * sizeof *test.memory);
    void *p = test.memory ? calloc(size + 1, 1) : NULL;
    REQUIRE(p, "out of memory");
    return test.memory[test.n_memory++] = p;
}

static void clean_up(void) {
    while (test.n_sessions) session_close(test.sessions[--test.n_sessions]);
    while (test.n_models) model_close(test.models[--test.n_models]);
    while (test.n_memory) free(test.memory[--test.n_memory]);
}

static Model *open_model(const char *path) {
    Model *m = need(sizeof *m);
    Error e = {""};
    REQUIRE(test.n_models < MOST, "too many models");
    test.models[test.n_models++] = m;
    REQUIRE(model_open(m, path, &e), "%s", e.text);
    return m;
}

// on the CPU: the GPU in software is slow, and has tests of its own
static Session *open_session(const Model *m, Options o) {
    Session *s = need(sizeof *s);
    Error e = {""};
    o.cpu = true;
    REQUIRE(test.n_sessions < MOST, "too many sessions");
    test.sessions[test.n_sessions++] = s;
    REQUIRE(session_open(s, m, o, &e), "%s", e.text);
    return s;
}

static uint32_t random_bits(void) {
    test.seed = test.seed * 1664525u + 1013904223u;
    return test.seed >> 8;
}

static float noise(void) { return random_bits() / 8388608.0f - 1; }   // -1 .. 1

static float *noise_array(size_t n, float scale) {
    float *x = need(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = noise() * scale;
    return x;
}

// sum (got - want)^2 / sum want^2; a NaN makes it a NaN, which passes no limit
static double nmse_double(const float *got, const double *want, size_t n) {
    double error = 0, power = 0;
    for (size_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        power += want[i] * want[i];
    }
    return error / (power + 1e-300);
}

static double nmse(const float *got, const float *want, size_t n) {
    double *w = need(n * sizeof *w);
    for (size_t i = 0; i < n; i++) w[i] = want[i];
    return nmse_double(got, w, n);
}

static double squares(const float *x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sum;
}

static double half_value(uint16_t h) {   // IEEE binary16
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double x = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    if (exponent == 31) x = mantissa ? NAN : INFINITY;
    return h & 0x8000 ? -x : x;
}

static void *read_all(const char *path, size_t *n) {   // a whole file, with a NUL behind it
    FILE *f = fopen(path, "rb");
    struct stat st;
    REQUIRE(f && !fstat(fileno(f), &st), "%s: cannot be read", path);
    char *data = need(st.st_size + 1);
    *n = fread(data, 1, st.st_size, f);
    fclose(f);
    return data;
}

__attribute__((format(printf, 1, 2))) static char *text_of(const char *format, ...) {
    va_list args;
    char *s = need(1024);
    va_start(args, format);
    vsnprintf(s, 1024, format, args);
    va_end(args);
    return s;
}

static char *scratch(const char *name) { return text_of("%s/%s", test.dir, name); }

// ---- references, in double ----

// each group of values by itself; w NULL: x itself
static void reference_norm(double *out, const float *x, int n, const Norm *w, int kind, float eps) {
    int width = w && w->group ? w->group : n;
    for (int g = 0; g < n; g += width) {
        double mean = 0, var = 0;
        for (int i = g; i < g + width && kind != RMS; i++) mean += x[i] / (double)width;
        for (int i = g; i < g + width; i++) var += (x[i] - mean) * (x[i] - mean) / width;
        for (int i = g; i < g + width; i++) {
            out[i] = w ? (x[i] - mean) / sqrt(var + eps) : x[i];
            if (w && w->w) out[i] *= w->w[i % w->n];
            if (w && w->b) out[i] += w->b[i % w->n];
        }
    }
}

static double reference_activation(int act, double g, double u, bool gate) {
    double inner = sqrt(2 / M_PI) * (g + 0.044715 * g * g * g), clipped = fmin(g, 7);
    double y = act == SILU ? g / (1 + exp(-g)) : act == GELU ? 0.5 * g * (1 + tanh(inner))
               : act == RELU2 ? (g > 0 ? g * g : 0) : clipped / (1 + exp(-1.702 * clipped));
    return y * (!gate ? 1 : act == SWIGLU_OAI ? fmin(7, fmax(-7, u)) + 1 : u);
}

typedef struct { Matrix m; float *f; } RandomMatrix;   // f: the weights as floats

// ---- a writer of GGUF files ----

typedef struct { uint8_t *p; size_t n, cap; } Bytes;

static void put(Bytes *b, const void *data, size_t n) {
    if (b->n + n >= b->cap) {
        uint8_t *old = b->p;
        b->cap = 2 * b->cap + n + 256;
        b->p = need(b->cap);
        memcpy(b->p, old ? old : b->p, b->n);
    }
    if (data) memcpy(b->p + b->n, data, n);   // else zeros
    b->n += n;
}

static void put_int(Bytes *b, uint64_t x, size_t size) { put(b, &x, size); }

static void put_text(Bytes *b, const char *s) {
    put_int(b, strlen(s), 8);
    put(b, s, strlen(s));
}

// How a broken file differs from a good one; the writer applies it.
enum { GOOD, BYTES, CUT, KEY, NEW_KEY, NO_KEY, TWICE, NO_TENSOR, DIM, TYPE, OFFSET };
typedef struct {
    const char *expect;   // part of the message
    int how;              // BYTES: a is where, b how many
                          // CUT: a bytes behind the metadata remain; b: none at all
    const char *name;     // of the key or tensor; the bytes
    int64_t a, b;         // KEY: type, value; DIM: which (-1: their number), size
    const char *text;     // KEY: a string's value
} Spoil;

typedef struct {
    Bytes meta, tensors, data;
    uint64_t n_meta, n_tensors;
    uint32_t version, align;      // 0: 3 and 32
    uint32_t part, parts, seen;   // of a split file: every parts-th tensor; 0: all
    bool wide;                    // two heads of 32 instead of four of 16
    Spoil spoil;
} Writer;

static bool spoils(const Writer *w, int how, const char *name) {
    return w->spoil.how == how && !strcmp(w->spoil.name, name);
}

static void put_key(Writer *w, const char *key, uint32_t type, const void *value, size_t size) {
    const Spoil *s = &w->spoil;
    bool change = spoils(w, KEY, key) || spoils(w, NEW_KEY, key);
    if (spoils(w, NO_KEY, key) || (w->part && strncmp(key, "split.", 6))) return;
    for (int i = 0; i <= spoils(w, TWICE, key); i++, w->n_meta++) {
        put_text(&w->meta, key);
        put_int(&w->meta, change ? s->a : type, 4);
        if (!change) put(&w->meta, value, size);
        else if (s->text) put_text(&w->meta, s->text);
        else put_int(&w->meta, s->b, s->a < GGUF_TYPES && gguf_size[s->a] ? gguf_size[s->a] : 8);
    }
}

static void key_int(Writer *w, const char *key, uint32_t x) { put_key(w, key, GGUF_U32, &x, 4); }
static void key_float(Writer *w, const char *key, float x) { put_key(w, key, GGUF_F32, &x, 4); }

static void key_text(Writer *w, const char *key, const char *s) {
    Bytes b = {0};
    put_text(&b, s);
    put_key(w, key, GGUF_STR, b.p, b.n);
}

static void key_array(Writer *w, const char *key, uint32_t elem, uint64_t n, const void *x,
                      size_t bytes) {
    Bytes b = {0};
    put_int(&b, elem, 4);
    put_int(&b, n, 8);
    put(&b, x, bytes);
    put_key(w, key, GGUF_ARR, b.p, b.n);
}

// the strings between the commas of s
static void key_strings(Writer *w, const char *key, const char *s) {
    Bytes all = {0};
    uint64_t n = 0;
    for (; s; n++) {
        size_t length = strcspn(s, ",");
        put_int(&all, length, 8);
        put(&all, s, length);
        s = s[length] ? s + length + 1 : NULL;
    }
    key_array(w, key, GGUF_STR, n, all.p, all.n);
}

// NULL: no such key
static void key_vocab(Writer *w, const char *model, const char *pre, const char *tokens,
                      const char *merges) {
    key_text(w, "tokenizer.ggml.model", model);
    if (pre) key_text(w, "tokenizer.ggml.pre", pre);
    if (tokens) key_strings(w, "tokenizer.ggml.tokens", tokens);
    if (merges) key_strings(w, "tokenizer.ggml.merges", merges);
}

// a tensor's row in the list
static void put_entry(Writer *w, const char *name, int dims, const int *ne, int type, size_t at) {
    const Spoil *s = &w->spoil;
    bool dim = spoils(w, DIM, name);
    put_text(&w->tensors, name);
    put_int(&w->tensors, dim && s->a < 0 ? s->b : dims, 4);
    for (int d = 0; d < dims; d++) put_int(&w->tensors, dim && s->a == d ? s->b : ne[d], 8);
    put_int(&w->tensors, spoils(w, TYPE, name) ? s->a : type, 4);
    put_int(&w->tensors, spoils(w, OFFSET, name) ? (uint64_t)s->a : at, 8);
    w->n_tensors++;
}

// random f32 weights around `mean`, ne[2] matrices of ne[1] rows of ne[0]; 0 ends the dimensions
static void put_tensor(Writer *w, const char *name, const int ne[3], float mean, float scale) {
    int dims = 1 + (ne[1] > 0) + (ne[2] > 0);
    size_t n = ne[0] * (ne[1] ? ne[1] : 1) * (ne[2] ? ne[2] : 1);
    float *x = noise_array(n, scale);
    for (size_t i = 0; i < n; i++) x[i] += mean;
    bool elsewhere = w->parts && w->seen++ % w->parts != w->part;
    int copies = elsewhere || spoils(w, NO_TENSOR, name) ? 0 : 1 + spoils(w, TWICE, name);
    for (; copies > 0; copies--) {
        put(&w->data, NULL, -w->data.n % (w->align ? w->align : 32));
        put_entry(w, name, dims, ne, QUANT_F32, w->data.n);
        put(&w->data, x, n * sizeof *x);
    }
}

// the whole file; returns the size of what stands before the data
static size_t write_gguf(Writer *w, const char *path) {
    Bytes b = {0};
    if (w->spoil.how == NEW_KEY) put_key(w, w->spoil.name, 0, NULL, 0);
    put(&b, "GGUF", 4);
    put_int(&b, w->version ? w->version : 3, 4);
    put_int(&b, w->n_tensors, 8);
    put_int(&b, w->n_meta, 8);
    put(&b, w->meta.p, w->meta.n);
    size_t cut = b.n + w->spoil.a;
    put(&b, w->tensors.p, w->tensors.n);
    put(&b, NULL, -b.n % (w->align ? w->align : 32));
    size_t head = b.n;
    put(&b, w->data.p, w->data.n);
    if (w->spoil.how == BYTES) memcpy(b.p + w->spoil.a, w->spoil.name, w->spoil.b);
    if (w->spoil.how == CUT) b.n = w->spoil.b ? 0 : cut;
    FILE *f = fopen(path, "wb");
    REQUIRE(f && fwrite(b.p, 1, b.n, f) == b.n && !fclose(f), "%s: cannot be written", path);
    return head;
}

// ---- models of random weights ----
//
// What tensors a model has is told by letters:
//   f fused QKV  b its biases  o bias of attn_output  B of the FFN  O of the head  n of norms
//   0 norms without weights  p norms behind attention and FFN only  t there, too  1 no norm before
//   the FFN, it runs beside attention  2 two norms for that  a it is called post_attention_norm
//   k K j norm of q and k: of [hd], [heads * hd], [heads][hd]   i sinks
//   g FFN without gate  u gate and up fused  x experts  m theirs fused  s shared expert  S its gate
//   r the router's bias  P learned positions  N norm of the embedding  T no head  E encoder
//   d linear attention in even layers, gated attention in odd ones  D with ssm_ba
//   y with ssm_in, as early files  Y with both: attn_qkv counts  v QKV with gates fused
// and, of the program: l a linear layer, ^ tensors that are in no layer.

enum { WIDTH = 32, HEADS = 4, KV_HEADS = 2, HEAD = 16, FF = 48, VOCAB = 64 };

// name:dimensions:letters, of which x must be there, !x must not, and +x brings a bias
static const char PARTS[] =
    "token_embd:32,64:^ position_embd:32,96:^P token_types:32,2:^E token_embd_norm:32:^N+n "
    "output_norm:32:^!0!E+n output:32,64:^!T!E+O attn_norm:32:!0!p!E+n attn_norm_2:32:2+n "
    "ffn_norm:32:!0!p!E!1!a+n post_attention_norm:32:a+n post_attention_norm:32:p+n "
    "post_attention_norm:32:t+n post_ffw_norm:32:p+n post_ffw_norm:32:t+n attn_output_norm:32:E+n "
    "layer_output_norm:32:E+n attn_qkv:32,128:f+b attn_q:32,64:!f!d+b attn_q:32,128:d!l!v "
    "attn_qkv:32,192:dv!l attn_k:32,32:!f!l!v+b attn_v:32,32:!f!l!v+b attn_output:64,32:!l+o "
    "attn_q_norm:16:k!l attn_k_norm:16:k!l attn_q_norm:64:K attn_k_norm:32:K attn_q_norm:16,4:j "
    "attn_k_norm:16,2:j attn_sinks:4:i attn_qkv:32,64:l!y attn_gate:32,32:l!y ssm_in:32,96:ly "
    "ssm_in:32,96:lY ssm_ba:32,8:lD ssm_alpha:32,4:l!D ssm_beta:32,4:l!D ssm_conv1d:4,64:l "
    "ssm_dt.bias:4:l ssm_a:4:l ssm_norm:8:l ssm_out:32,32:l "
    "ffn_gate:32,48:!x!g!u+B ffn_up:32,48:!x!u+B ffn_up:32,96:u+B ffn_down:48,32:!x+B "
    "ffn_gate_inp:32,6:x+B ffn_gate_up_exps:32,96,6:xm ffn_gate_exps:32,48,6:x!m+B "
    "ffn_up_exps:32,48,6:x!m+B ffn_down_exps:48,32,6:x+B ffn_gate_shexp:32,48:s "
    "exp_probs_b.bias:6:r ffn_up_shexp:32,48:s ffn_down_shexp:48,32:s ffn_gate_inp_shexp:32:S";

typedef struct {
    const char *arch;
    int n_layer;
    const char *letters, *keys;   // keys: more metadata, "name=1 name=0.5"; with a point: a float
} Shape;

static void put_part(Writer *w, const char *prefix, const char *part, const char *letters) {
    char name[64], *full, bias = 0;
    int ne[3] = {0};
    const char *c = strchr(part, ':');
    snprintf(name, sizeof name, "%.*s", (int)(c - part), part);
    for (int i = 0; i < 3 && (i == 0 || *c == ','); i++) ne[i] = strtol(c + 1, (char **)&c, 10);
    if (w->wide && ne[0] == HEAD) ne[0] = 2 * HEAD, ne[1] /= 2;   // a norm of q or k
    for (c++; *c; c++) {
        bool not = *c == '!';
        if (*c == '+') bias = *++c;
        else if (!strchr(letters, *(c += not)) != not) return;
    }
    bool vector = strchr(name, '.') || !strcmp(name, "ssm_a"), norm = !vector && !ne[1];
    full = text_of("%s%s%s", prefix, name, vector ? "" : ".weight");
    // such that a product is about as large as its input
    float scale = vector ? 0.4f : norm ? 0.3f : strstr(name, "token_") ? 1 : 1.7f / sqrtf(ne[0]);
    put_tensor(w, full, ne, vector ? -0.5f : norm, scale);
    if (bias && strchr(letters, bias))
        put_tensor(w, text_of("%s%s.bias", prefix, name), (int[3]){ne[!norm], ne[2]}, 0, 0.3f);
}

static void put_parts(Writer *w, const char *prefix, const char *letters) {
    char all[sizeof PARTS], *rest;
    memcpy(all, PARTS, sizeof all);
    for (char *p = strtok_r(all, " ", &rest); p; p = strtok_r(NULL, " ", &rest))
        if (!strchr(p, '^') == !strchr(letters, '^')) put_part(w, prefix, p, letters);
}

static void put_keys(Writer *w, const char *arch, const char *keys) {
    char *rest, *key = strtok_r(text_of("%s", keys), " ", &rest);
    for (; key; key = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(key, '='), *name = text_of("%s.%.*s", arch, (int)(value - key), key);
        if (strchr(value, '.')) key_float(w, name, atof(value + 1));
        else key_int(w, name, atoi(value + 1));
    }
}

static void put_model(Writer *w, const Shape *m) {
    key_int(w, "general.alignment", w->align ? w->align : 32);
    key_text(w, "general.architecture", m->arch);
    put_keys(w, m->arch, text_of("block_count=%d context_length=96 embedding_length=32 "
        "vocab_size=64 feed_forward_length=48 attention.head_count=%d attention.head_count_kv=%d "
        "attention.key_length=%d attention.value_length=%d attention.layer_norm_epsilon=.00001 "
        "attention.layer_norm_rms_epsilon=.00001 %s", m->n_layer, HEADS >> w->wide,
        KV_HEADS >> w->wide, HEAD << w->wide, HEAD << w->wide, m->keys));
    put_parts(w, "", text_of("^%s", m->letters));
    for (int l = 0; l < m->n_layer; l++)
        put_parts(w, text_of("blk.%d.", l), text_of("%s%s", m->letters,
                  strchr(m->letters, 'd') && l % 2 == 0 ? "l" : ""));
}

#define DELTA_KEYS "ssm.conv_kernel=4 ssm.state_size=8 ssm.group_count=2 ssm.time_step_rank=4 " \
    "ssm.inner_size=32 full_attention_interval=2 "
#define EXPERT_KEYS "expert_count=6 expert_used_count=2 expert_feed_forward_length=48 "
#define WINDOW_KEYS "attention.sliding_window=9 "

static const Model *random_model(const Shape *shape, bool wide) {
    Writer w = {.wide = wide};
    put_model(&w, shape);
    key_text(&w, "tokenizer.ggml.model", "none");
    write_gguf(&w, scratch("random.gguf"));
    return open_model(scratch("random.gguf"));
}

// For `make bench`: the shape of Qwen3-0.6B, weights of one type, no vocabulary. Norms are ones,
// bytes of weights 0 to 31: wherever a format has f16 scales, they are below 1/128.
static int write_bench_model(const char *type_name, const char *path) {
    static const struct { const char *name; int n, ne[2]; } parts[] = {
        {"output_norm", 1, {1024}}, {"blk.%d.attn_norm", 28, {1024}},
        {"blk.%d.ffn_norm", 28, {1024}}, {"blk.%d.attn_q_norm", 28, {128}},
        {"blk.%d.attn_k_norm", 28, {128}}, {"blk.%d.attn_q", 28, {1024, 2048}},
        {"blk.%d.attn_k", 28, {1024, 1024}}, {"blk.%d.attn_v", 28, {1024, 1024}},
        {"blk.%d.attn_output", 28, {2048, 1024}}, {"blk.%d.ffn_gate", 28, {1024, 3072}},
        {"blk.%d.ffn_up", 28, {1024, 3072}}, {"blk.%d.ffn_down", 28, {3072, 1024}},
        {"token_embd", 1, {1024, 151936}}};
    int weights = quant_type_from_name(type_name);
    if (weights < 0) return printf("%s is not a format\n", type_name), 2;
    Writer w = {0};
    size_t norms = 0, all = 0;
    key_text(&w, "general.architecture", "qwen3");
    key_text(&w, "tokenizer.ggml.model", "none");
    put_keys(&w, "qwen3", "block_count=28 context_length=40960 embedding_length=1024 "
             "feed_forward_length=3072 attention.head_count=16 attention.head_count_kv=8 "
             "attention.key_length=128 attention.value_length=128 rope.freq_base=1000000. "
             "attention.layer_norm_rms_epsilon=.000001 vocab_size=151936");
    for (size_t k = 0; k < sizeof parts / sizeof *parts; k++)
        for (int l = 0; l < parts[k].n; l++) {
            const int *ne = parts[k].ne;
            int type = ne[1] ? weights : QUANT_F32;
            put_entry(&w, text_of("%s.weight", text_of(parts[k].name, l)), 1 + (ne[1] > 0), ne,
                      type, all);
            all += (quant_row_bytes(type, ne[0]) * larger(ne[1], 1) + 31) / 32 * 32;
            if (!ne[1]) norms = all;
        }
    for (size_t i = 0; i < norms; i += 4) put(&w.data, &(float){1}, 4);
    write_gguf(&w, path);
    FILE *f = fopen(path, "ab");
    for (size_t i = norms; f && i < all; i++) putc_unlocked(random_bits() & 31, f);
    if (!f || ferror(f) || fclose(f)) return printf("%s: cannot be written\n", path), 1;
    return 0;
}

typedef struct { const Session *s; float *to; size_t n; } Rows;   // s: a row is of its logits

static bool keep_row(void *ctx, int i, const float *row) {
    Rows *out = ctx;
    size_t at = out->s ? row - out->s->logits : 0;
    CHECK(at % out->n == 0 && at / out->n < LOGIT_ROWS, "token %d: the logits are a copy", i);
    memcpy(out->to + i * out->n, row, out->n * sizeof *row);
    return true;
}

// logits of ids[from..n-1], or of an encoder its vectors, into rows[from..n-1]
static void get_rows(Session *s, const int32_t *ids, int n, int from, float *rows) {
    Error e = {""};
    const Config *c = &s->m->config;
    bool hidden = c->arch->flags & ENCODER;
    Rows out = {hidden ? NULL : s, rows, hidden ? c->dim : c->n_vocab};
    CHECK(session_run(s, ids, n, from, hidden, keep_row, &out, &e), "%s", e.text);
}

// logits of ids[0..n-1] from a new session with these options
static float *logits_of(const Model *m, const int32_t *ids, int n, Options o) {
    float *rows = need((size_t)n * m->config.n_vocab * sizeof *rows);
    get_rows(open_session(m, o), ids, n, 0, rows);
    session_close(test.sessions[--test.n_sessions]);
    return rows;
}

// ==== formats ====

// golden/quants has 2,048 weights of each format with ggml's floats. The first half are quantised
// Gaussian numbers; the rest is random bytes, whose scales may be huge.
static const int FORMATS[] = {QUANT_F32, QUANT_F16, QUANT_BF16,
#define QUANT_X(id, name, weights, bytes, per16, bias) id,
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
};
enum { N_FORMATS = sizeof FORMATS / sizeof *FORMATS, GOLDEN = 2048 };

static int format_block(int type) {   // weights per block
    int n = 1;
    while (!quant_row_bytes(type, n)) n++;
    return n;
}

// f32 has no file: bf16's floats are its blocks
static void golden_blocks(int type, uint8_t **blocks, float **floats) {
    const char *name = quant_name(type == QUANT_F32 ? QUANT_BF16 : type);
    size_t n, m;
    *floats = read_all(text_of("golden/quants/%s.f32", name), &m);
    *blocks = read_all(text_of("golden/quants/%s.%s", name, type ? "blocks" : "f32"), &n);
    REQUIRE(m == 4 * GOLDEN && n == quant_row_bytes(type, GOLDEN), "%s: sizes", name);
}

static void decode(int type, const uint8_t *b, int g, int n, int8_t *q, float *d, float *m) {
    switch (type) {
#define QUANT_X(id, name, weights, bytes, per16, bias) \
    case id: decode_##name((const block_##name *)b, g, n, q, d, m); break;
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
    }
}

// a GPU lane asks for one group, the CPU for all eight: the same answers, codes in their order
static void check_groups(int type, const uint8_t *b) {
    float d[16], m[16], d1[2], m1[2];
    int8_t q[256], q1[32];
    decode(type, b, 0, 8, q, d, m);
    for (int g = 0; g < 8; g++) {
        decode(type, b, g, 1, q1, d1, m1);
        bool same = !memcmp(d1, d + 2 * g, 8) && !memcmp(m1, m + 2 * g, 8);
        for (int i = 0; i < 32; i++) same = same && q1[i] == q[i / 8 * 64 + g * 8 + i % 8];
        CHECK(same, "%s: group %d", quant_name(type), g);
    }
}

static void test_formats(void) {
    for (int f = 0; f < N_FORMATS; f++) {
        int type = FORMATS[f], differ = 0;
        const char *name = quant_name(type);
        uint8_t *blocks;
        float *want, *got = need(4 * GOLDEN);
        golden_blocks(type, &blocks, &want);
        size_t bytes = quant_row_bytes(type, GOLDEN), one = format_block(type);
        for (int shift = 0; shift < 4; shift++) {   // any address will do
            uint8_t *copy = need(bytes + shift);
            memcpy(copy + shift, blocks, bytes);
            CHECK(quant_dequantize(type, copy + shift, got, GOLDEN), "%s is refused", name);
            for (int i = 0; i < GOLDEN; i++) differ += memcmp(&got[i], &want[i], 4) != 0;
            CHECK(!differ, "%s at +%d: %d weights are not ggml's", name, shift, differ);
        }
        got[one] = 77;
        CHECK(quant_dequantize(type, blocks, got, one) && got[one] == 77, "%s: one block", name);
        CHECK(one == 1 || !quant_dequantize(type, blocks, got, one + 1), "%s: %zu", name, one + 1);
        for (size_t at = 0; one > 1 && at < bytes; at += quant_row_bytes(type, 256))
            check_groups(type, blocks + at);
    }
}

static void test_formats_names(void) {
    int known = 0;
    for (int type = -3; type < 300; type++) {
        const char *name = quant_name(type);
        known += name != NULL;
        CHECK(!name == !quant_row_bytes(type, 256), "type %d: a name or a size", type);
        if (!name) continue;
        char *upper = text_of("%s", name);
        for (int i = 0; upper[i]; i++) upper[i] = toupper(upper[i]);
        bool back = quant_type_from_name(name) == type && quant_type_from_name(upper) == type;
        CHECK(back, "%s is not found by its name", name);
    }
    CHECK(known == N_FORMATS, "%d formats have names, %d are listed", known, N_FORMATS);
    CHECK(quant_type_from_name("q4_k_m") == -1 && quant_type_from_name("") == -1, "no names");
    CHECK(!quant_row_bytes(QUANT_F32, SIZE_MAX / 2) && !quant_row_bytes(12, 128), "no sizes");
}

// FNV-1a over 16-bit entries, low byte first; the sums are those of ggml's tables
static void test_formats_grids(void) {
    static const struct { const char *name; const uint16_t *grid; int n; uint32_t sum; } grids[] = {
        {"iq2_xxs", quant_grid_iq2_xxs, 256, 0x0e66d01d},
        {"iq2_xs", quant_grid_iq2_xs, 512, 0xf65db7a3},
        {"iq2_s", quant_grid_iq2_s, 1024, 0xa1eb5434},
        {"iq3_xxs", quant_grid_iq3_xxs, 256, 0xcfe32cc2},
        {"iq3_s", quant_grid_iq3_s, 512, 0x111129e2},
        {"iq1", quant_grid_iq1, 2048, 0xfd6cbae4}};
    for (int g = 0; g < 6; g++) {
        uint32_t sum = 2166136261u;
        for (int i = 0; i < 2 * grids[g].n; i++)
            sum = (sum ^ (grids[g].grid[i / 2] >> 8 * (i % 2) & 255)) * 16777619u;
        CHECK(sum == grids[g].sum, "%s: %08x, want %08x", grids[g].name, sum, grids[g].sum);
    }
}

static void test_halves(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        double want = half_value(h), next = half_value(h + 1), tie = (want + next) / 2;
        float got = quant_f16_to_f32(h);
        CHECK(want != want ? got != got : got == want, "half %04x: %g, want %g", h, got, want);
        if (want != want || isinf(want)) continue;
        CHECK(quant_f32_to_f16(got) == h, "half %04x does not return", h);
        if (isinf(next)) continue;
        CHECK(quant_f32_to_f16(tie) == h + h % 2, "half %04x: a tie goes to the even one", h);
        CHECK(quant_f32_to_f16(nextafterf(tie, next)) == h + 1, "half %04x: above the tie", h);
    }
    CHECK(quant_f32_to_f16(65520) == 0x7c00 && quant_f32_to_f16(-1e30f) == 0xfc00, "too large");
    CHECK(isnan(half_value(quant_f32_to_f16(NAN))), "NaN");
}

// ---- matmul ----

// a block of random bytes, drawn until its weights f are of ordinary size
static void random_block(int type, uint8_t *bytes, float *f) {
    int block = format_block(type);
    float top = 0, x = noise();
    uint16_t half = quant_f32_to_f16(x);
    while (!(top > 1e-3f && top < 8)) {
        for (size_t i = 0; i < quant_row_bytes(type, block); i++) bytes[i] = random_bits();
        if (type == QUANT_F32) memcpy(bytes, &x, 4);
        if (type == QUANT_F16) memcpy(bytes, &half, 2);
        if (type == QUANT_BF16) memcpy(bytes, (char *)&x + 2, 2);   // little endian: the upper half
        quant_dequantize(type, bytes, f, block);
        top = block == 1 ? 1 : 0;
        for (int i = 0; i < block; i++) top = fabsf(f[i]) <= top ? top : fabsf(f[i]);
    }
}

// A matrix at data: the quantised Gaussian numbers of golden/quants in random order, with ggml's
// floats, or 64 different blocks of random bytes.
static RandomMatrix random_matrix(uint8_t *data, int type, int rows, int cols, bool golden) {
    int block = format_block(type), different = golden ? GOLDEN / 2 / block : 64;
    size_t bytes = quant_row_bytes(type, block), n = (size_t)rows * cols / block;
    uint8_t *pool = need(different * bytes);
    float *pool_f = need(different * block * sizeof(float)), *f = need(n * block * sizeof *f);
    if (golden) golden_blocks(type, &pool, &pool_f);
    for (int i = 0; i < different && !golden; i++)
        random_block(type, pool + i * bytes, pool_f + i * block);
    for (size_t i = 0; i < n; i++) {
        int k = random_bits() % different;
        memcpy(data + i * bytes, pool + k * bytes, bytes);
        memcpy(f + i * block, pool_f + k * block, block * sizeof *f);
    }
    return (RandomMatrix){{.data = data, .type = type, .rows = rows, .cols = cols}, f};
}

static void *aligned(size_t n) { return (void *)(((uintptr_t)need(n + 64) + 63) & ~(uintptr_t)63); }

static void run_matmul(Pool *p, const Matmul *jobs, int k) {   // in exactly what it counts
    Arena a = {0};
    matmul(p, &a, jobs, k);
    size_t counted = a.peak;
    a = (Arena){.base = aligned(counted), .size = counted};
    matmul(p, &a, jobs, k);
    CHECK(a.peak == counted && !a.used, "matmul counts %zu bytes, takes %zu", counted, a.peak);
}

// Two jobs in one call share x, one has bias and scale; several thread counts. `exact`: activations
// that int8 holds exactly (integers up to 127, 127 in every 32) leave only rounding. Errors are
// measured against what the outputs would be if no products cancelled, so that a row whose sum
// happens to be near 0 does not count more than others.
static double check_matmul(int type, int64_t rows, int64_t cols, int n, bool exact) {
    static const int threads[] = {1, 2, 3, 8};
    float *x = noise_array(n * cols, 1), *out[2], *first[2], *want[2], scale = 0.75f;
    double power[2] = {0}, worst = 0;
    RandomMatrix w[2];
    for (int64_t i = 0; i < n * cols && exact; i++)
        x[i] = i % 32 ? rintf(x[i] * 127) / 64 : 127.0f / 64;
    for (int k = 0; k < 2; k++) {
        int r = k ? 20 : rows;
        w[k] = random_matrix(need(quant_row_bytes(type, r * cols)), type, r, cols, true);
        if (k == 0) w[k].m.bias = noise_array(rows, 1);
        if (k == 0) w[k].m.scale = &scale;
        out[k] = need(n * r * sizeof(float));
        first[k] = need(n * r * sizeof(float));
        want[k] = need(n * r * sizeof(float));
        plain_matmul(&(Matmul){&w[k].m, x, want[k], n}, need(cols * sizeof(float)));
        for (int i = 0; i < n * r; i++)
            power[k] += squares(w[k].f + i % r * cols, cols) * squares(x + i / r * cols, cols);
    }
    for (int t = 0; t < 4; t += 1 + test.quick) {
        Matmul jobs[2] = {{&w[0].m, x, out[0], n}, {&w[1].m, x, out[1], n}};
        Pool *pool = pool_open(threads[t]);
        REQUIRE(pool, "%d threads", threads[t]);
        run_matmul(pool, jobs, 2);
        pool_close(pool);
        for (int k = 0; k < 2; k++) {
            size_t all = n * w[k].m.rows;
            double error = 0;
            if (t == 0) memcpy(first[k], out[k], all * sizeof(float));
            bool same = !memcmp(first[k], out[k], all * sizeof(float));
            CHECK(same, "%s, %d rows: %d threads differ", quant_name(type), n, threads[t]);
            for (size_t i = 0; i < all; i++) error += pow(out[k][i] - want[k][i], 2);
            error /= power[k] / cols;
            worst = error <= worst ? worst : error;   // a NaN stays
        }
    }
    return worst;
}

#ifdef SIMD_AMX
static const double MATMUL_EXACT = 2e-5;   // both are rounded to bf16
#else
static const double MATMUL_EXACT = 1e-7;
#endif
#ifdef LLM_PLAIN
enum { INT8_TILE = 0 };
#endif

static void test_matmul(void) {
    static const int counts[] = {1, 2, 7, 33};
    for (int f = 0; f < N_FORMATS; f++) {
        int type = FORMATS[f];
        const char *name = quant_name(type);
        bool floats = format_block(type) == 1, whole = format_block(type) > 128;
        double limit = floats ? 1e-8 : 1e-4;   // int8 rounds by max/254 at most: 1.6e-5 on average
        for (int i = 0; i < 4; i += 1 + test.quick) {
            int64_t rows = test.quick ? 19 : 37, cols = floats ? 525 : whole ? 512 : 640;
            double noisy = check_matmul(type, rows, cols, counts[i], false);
            double exact = check_matmul(type, 2 * rows, 256, counts[i], true);
            CHECK(noisy < limit, "%s, n = %d: NMSE %.2g", name, counts[i], noisy);
            CHECK(exact < MATMUL_EXACT, "%s, n = %d: exact %.2g", name, counts[i], exact);
            if (i == 2) printf("  %-8s NMSE %.1e, where int8 is exact %.1e\n", name, noisy, exact);
        }
        float x[512], y[2];   // NaN in, NaN out, and nothing that overflows
        for (int i = 0; i < 512; i++) x[i] = NAN;
        RandomMatrix w = random_matrix(need(quant_row_bytes(type, 256)), type, 1, 256, true);
        Pool *pool = pool_open(1);
        for (int n = 1; n <= 2; n++) run_matmul(pool, &(Matmul){&w.m, x, y, n}, 1);
        pool_close(pool);
        CHECK(isnan(y[0]) && isnan(y[1]), "%s: NaN becomes %g, %g", name, y[0], y[1]);
    }
}

// ==== GGUF ====

// a small Llama with a tokenizer, good but for the writer's Spoil; returns the size of its head
static size_t write_tiny(Writer *w, const char *path) {
    put_model(w, &(Shape){"llama", 1, "", ""});
    key_vocab(w, "gpt2", "default", "a,b,ab,<s>", "a b");
    key_int(w, "tokenizer.ggml.bos_token_id", 3);
    key_int(w, "tokenizer.ggml.eos_token_id", 3);
    if (w->parts) key_int(w, "split.count", w->parts);
    if (w->parts) key_int(w, "split.no", w->part);
    return write_gguf(w, path);
}

static void refused(const char *path, const char *says) {
    Model m = {0};
    Error e = {""};
    bool opened = model_open(&m, path, &e);
    model_close(&m);
    CHECK(!opened && strstr(e.text, says), "want '%s', got '%s'", says, e.text);
}

// version 2, other alignments, three files: the same logits
static void test_gguf_variants(void) {
    static const int32_t ids[] = {1, 5, 9, 33, 60, 2, 7};
    char *split[3];
    float *want = NULL;
    for (int i = 0; i < 7; i++) {
        Writer w = {.version = 2 + (i != 1), .align = i == 2 ? 64 : i == 3 ? 8 : 32};
        char *path = scratch("variant.gguf");
        if (i >= 4) {
            w.parts = 3;
            w.part = i - 4;
            path = split[i - 4] = scratch(text_of("split-0000%d-of-00003.gguf", i - 3));
        }
        test.seed = 1;
        write_tiny(&w, path);
        if (i == 4 || i == 5) continue;
        const Model *m = open_model(i == 6 ? split[0] : path);
        float *got = logits_of(m, ids, 7, (Options){.threads = 1});
        if (!want) want = got;
        CHECK(!memcmp(got, want, 7 * VOCAB * sizeof *got), "variant %d differs", i);
    }
    refused(split[1], "part 2");
    remove(split[2]);
    refused(split[0], "00003-of-00003");
}

static const Spoil BROKEN[] = {
    {"not a GGUF file", BYTES, "GGML", 0, 4, NULL}, {"big-endian", BYTES, "\0\0\0\3", 4, 4, NULL},
    {"version 1", BYTES, "\1\0\0", 4, 4, NULL},
    {"9223372036854775807 tensors", BYTES, "\xff\xff\xff\xff\xff\xff\xff\x7f", 8, 8, NULL},
    {"18446744073709551615 metadata", BYTES, "\xff\xff\xff\xff\xff\xff\xff\xff", 16, 8, NULL},
    {"tensor : the file ends inside the list of tensors", CUT, "", 4, 0, NULL},
    {"token_embd.weight: the file ends inside the list", CUT, "", 31, 0, NULL},
    {"ends inside the metadata", BYTES, "\xff\xff\xff\xff\xff\xff\xff\xff", 24, 8, NULL},
    {"unknown value type 13", KEY, "llama.block_count", 13, 0, NULL},
    {"runs past the end", KEY, "general.architecture", GGUF_STR, (int64_t)1 << 62, NULL},
    {"arrays of arrays", KEY, "llama.block_count", GGUF_ARR, GGUF_ARR, NULL},
    {"unknown element type 99", KEY, "llama.block_count", GGUF_ARR, 99, NULL},
    {"values do not fit", KEY, "llama.block_count", GGUF_ARR, ((int64_t)1 << 56) + GGUF_F64, NULL},
    {"llama.block_count appears twice", TWICE, "llama.block_count", 0, 0, NULL},
    {"alignment is 0, want a power of two", KEY, "general.alignment", GGUF_U32, 0, NULL},
    {"a power of two", KEY, "general.alignment", GGUF_U32, 48, NULL},
    {"this is part 3", NEW_KEY, "split.no", GGUF_U16, 2, NULL},
    {"split.count is out of range", NEW_KEY, "split.count", GGUF_U16, 0, NULL},
    {"must be named", NEW_KEY, "split.count", GGUF_U16, 2, NULL},
    {"1 to 4 dimensions", DIM, "output.weight", -1, 5, NULL},
    {"dimension 1 is 0", DIM, "output.weight", 1, 0, NULL},
    {"unknown tensor type 4", TYPE, "output.weight", 4, 0, NULL},
    {"not whole q4_K blocks", TYPE, "output.weight", 12, 0, NULL},
    {"not a multiple of the alignment", OFFSET, "output.weight", 8, 0, NULL},
    {"past the end of the file", OFFSET, "output.weight", (int64_t)1 << 40, 0, NULL},
    {"is it truncated", DIM, "output.weight", 1, 1 << 30, NULL},
    {"output.weight appears twice", TWICE, "output.weight", 0, 0, NULL},
    {"general.architecture is missing", NO_KEY, "general.architecture", 0, 0, NULL},
    {"architecture mamba is not supported", KEY, "general.architecture", GGUF_STR, 0, "mamba"},
    {"block_count is missing", NO_KEY, "llama.block_count", 0, 0, NULL},
    {"context_length: want a number", KEY, "llama.context_length", GGUF_STR, 0, "8"},
    {"embedding_length is 0, expected 1", KEY, "llama.embedding_length", GGUF_U32, 0, NULL},
    {"head_count_kv: want a number", KEY, "llama.attention.head_count_kv", GGUF_STR, 0, "2"},
    {"epsilon: want", KEY, "llama.attention.layer_norm_rms_epsilon", GGUF_F32, 0x7fc00000, NULL},
    {"key_length is 5000, expected", KEY, "llama.attention.key_length", GGUF_U32, 5000, NULL},
    {"3 KV heads", KEY, "llama.attention.head_count_kv", GGUF_U32, 3, NULL},
    {"RoPE: 3 dimensions", NEW_KEY, "llama.rope.dimension_count", GGUF_U32, 3, NULL},
    {"tensor token_embd.weight is missing", NO_TENSOR, "token_embd.weight", 0, 0, NULL},
    {"tensor blk.0.attn_v.weight is missing", NO_TENSOR, "blk.0.attn_v.weight", 0, 0, NULL},
    {"tensor output_norm.weight is missing", NO_TENSOR, "output_norm.weight", 0, 0, NULL},
    {"want 32 values", DIM, "blk.0.ffn_norm.weight", 0, 16, NULL},
    {"want [32,32,1,1], file has [32,16,1,1]", DIM, "blk.0.attn_k.weight", 1, 16, NULL},
    {"want [32,64,1,1], file has [32,63,1,1]", DIM, "blk.0.attn_q.weight", 1, 63, NULL},
    {"want [32,48,1,1], file has [32,47,1,1]", DIM, "blk.0.ffn_up.weight", 1, 47, NULL},
    {"token_embd has 32 rows, output 64", DIM, "token_embd.weight", 1, 32, NULL},
    {"tokenizer.ggml.model is missing", NO_KEY, "tokenizer.ggml.model", 0, 0, NULL},
    {"'rwkv' is not one of", KEY, "tokenizer.ggml.model", GGUF_STR, 0, "rwkv"},
    {"'nonesuch' is unknown", KEY, "tokenizer.ggml.pre", GGUF_STR, 0, "nonesuch"},
    {"tokenizer.ggml.tokens is missing", NO_KEY, "tokenizer.ggml.tokens", 0, 0, NULL},
    {"must be an array of strings", KEY, "tokenizer.ggml.merges", GGUF_U32, 7, NULL},
    {"tokenizer.ggml.scores is missing", KEY, "tokenizer.ggml.model", GGUF_STR, 0, "llama"},
    {"must be a number", KEY, "tokenizer.ggml.bos_token_id", GGUF_STR, 0, "3"},
    {"is 9, but there are 4 tokens", KEY, "tokenizer.ggml.bos_token_id", GGUF_U32, 9, NULL},
    {"0 bytes are too few", CUT, "", 0, 1, NULL},
};

static void test_gguf_broken(void) {
    int rows = sizeof BROKEN / sizeof *BROKEN;
    for (int i = 0; i < rows; i++) {
        Writer w = {.spoil = BROKEN[i]};
        write_tiny(&w, scratch("broken.gguf"));
        refused(scratch("broken.gguf"), BROKEN[i].expect);
        for (int k = 0; k < i; k++)
            CHECK(strcmp(BROKEN[i].expect, BROKEN[k].expect), "row %d is row %d", i, k);
    }
    printf("  %d distinct messages, of which %d did not come\n", rows, test.failures);
    CHECK(rows - test.failures >= 40, "fewer than 40 messages");
}

// cut anywhere, and with any byte of the head changed: refused, or it runs; never a crash
static void test_gguf_hostile(void) {
    static const int32_t ids[] = {1, 2, 3};
    const char *path = scratch("hostile.gguf");
    size_t size;
    Writer w = {0};
    size_t head = write_tiny(&w, path);
    uint8_t *whole = read_all(path, &size);
    int ran = 0, step = test.quick ? 5 : 1, fd = open(path, O_RDWR);
    for (size_t i = 0; i < 3 * head; i += step) {
        uint8_t byte = i % 3 == 0 ? whole[i / 3] ^ 1 : i % 3 == 1 ? 0xff : 0;
        Model m = {0};
        Session s = {0};
        Error e = {""};
        Options o = {.window = 8, .chunk = 2, .threads = 1, .cpu = true};
        REQUIRE(pwrite(fd, &byte, 1, i / 3) == 1, "pwrite");
        bool ok = model_open(&m, path, &e) && session_open(&s, &m, o, &e) &&
                  session_eval(&s, ids, 3, &e);
        CHECK(ok || e.text[0], "byte %zu: no message", i / 3);
        ran += ok;
        session_close(&s);
        model_close(&m);
        REQUIRE(pwrite(fd, whole + i / 3, 1, i / 3) == 1, "pwrite");
    }
    for (size_t cut = size; cut-- > 0; cut -= cut > head ? cut % 997 : 0) {
        REQUIRE(!ftruncate(fd, cut), "ftruncate");
        refused(path, "");
    }
    close(fd);
    printf("  each of %zu bytes changed thrice: %d files still ran\n", head, ran);
}

// an expert of a matrix that is the lower half of its tensor: biases lie as far apart as weights
static void test_gguf_experts(void) {
    static const float data[8], bias[8];
    Matrix both = {(const uint8_t *)data, QUANT_F32, 4, 1, bias, NULL, 4 * sizeof *data};
    Matrix up = matrix_rows(both, 2, 2), one = matrix_expert(&up, 1);
    CHECK(one.data == (const uint8_t *)(data + 6) && one.bias == bias + 6, "not the second's up");
}

// ==== ops ====

// ---- attention ----

typedef struct {
    const char *what;
    int n_head, n_kv, hd, vd, pos, n, rows, window, keep;
    bool causal, sinks, slopes;
    float softcap;
    int n_rot, pairing;   // these and what follows: of what the GPU does at once
    bool normed;
} AttentionCase;

static const AttentionCase ATTENTION[] = {
    {"plain", 4, 4, 32, 32, 0, 20, 40, 40, 0, true, .softcap = 0},
    {"one query, grouped heads", 8, 2, 64, 64, 90, 1, 100, 100, 0, true, .softcap = 0},
    {"all heads share one", 6, 1, 128, 128, 33, 7, 64, 64, 0, true, .softcap = 0},
    {"odd widths", 3, 3, 37, 21, 10, 9, 30, 30, 0, true, .softcap = 0},
    {"window, wrapped ring", 4, 2, 16, 16, 75, 5, 17, 12, 0, true, .softcap = 0},
    {"window and pinned rows", 4, 2, 16, 16, 75, 5, 22, 12, 5, true, .softcap = 0},
    {"soft cap", 4, 2, 32, 32, 50, 3, 64, 64, 0, true, .softcap = 5},
    {"sinks", 8, 2, 32, 32, 50, 3, 64, 20, 0, true, .sinks = true},
    {"ALiBi", 6, 3, 32, 32, 50, 4, 64, 64, 0, true, .slopes = true},
    {"whole text", 4, 4, 32, 32, 0, 30, 40, 40, 0, false, .softcap = 0},
    {"whole text, ALiBi, cap", 4, 4, 32, 32, 0, 30, 40, 40, 0, false, .slopes = true, .softcap = 8},
    {"long", 6, 3, 64, 64, 700, 2, 800, 800, 0, true, .sinks = true},
    {"wide heads", 2, 1, 256, 256, 200, 40, 300, 300, 0, true, .softcap = 0},
    {"seven heads share one", 14, 2, 80, 48, 300, 1, 310, 200, 0, true, .softcap = 0},
};

static uint16_t *half_noise(size_t n) {
    uint16_t *x = need(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = quant_f32_to_f16(noise());
    return x;
}

// The ring is as it stands after the last of the new tokens, with a hole now and then.
static Attention attention_of(const AttentionCase *t) {
    int32_t *pos = need(t->rows * sizeof *pos);
    Cache c = {.rows = t->rows, .keep = t->keep};
    memset(pos, -1, t->rows * sizeof *pos);
    for (int p = 0; p < t->pos + t->n; p++) {
        int row = p < t->keep ? p : t->keep + (p - t->keep) % (t->rows - t->keep);
        pos[row] = p < t->pos && p % 11 == 3 ? -1 : p;
        CHECK(cache_row(&c, p) == row, "position %d: row %d, not %d", p, cache_row(&c, p), row);
    }
    float *extra = noise_array(t->n_head, 2);
    for (int h = 0; h < t->n_head && t->slopes; h++) extra[h] = exp2f(-h - 1);
    return (Attention){.q = noise_array((size_t)t->n * t->n_head * t->hd, 3), .rows = t->rows,
                       .k = half_noise((size_t)t->n_kv * t->rows * t->hd), .pos_k = pos,
                       .v = half_noise((size_t)t->n_kv * t->rows * t->vd), .pos = t->pos, .n = t->n,
                       .n_head = t->n_head, .n_kv = t->n_kv, .hd = t->hd, .vd = t->vd,
                       .window = t->window, .keep = t->keep, .causal = t->causal,
                       .scale = 1 / sqrtf(t->hd), .softcap = t->softcap,
                       .sinks = t->sinks ? extra : NULL, .slopes = t->slopes ? extra : NULL};
}

static double *attention_wanted(Attention a) {
    size_t n = (size_t)a.n * a.n_head * a.vd;
    double *want = need(n * sizeof *want);
    a.out = need(n * sizeof *a.out);
    plain_attention(&a, need(a.rows * sizeof(float)));
    for (size_t i = 0; i < n; i++) want[i] = a.out[i];
    return want;
}

static void run_attention_cpu(Pool *p, const Attention *x) {
    Arena a = {0};
    attention(p, &a, x);
    size_t counted = a.peak;
    a = (Arena){.base = aligned(counted), .size = counted};
    attention(p, &a, x);
    CHECK(a.peak <= counted && !a.used, "attention counts %zu bytes, takes %zu", counted, a.peak);
}

// all queries, and then the last alone
static double check_attention(const AttentionCase *t) {
    size_t one = (size_t)t->n_head * t->vd, n_out = t->n * one;
    float *first = NULL;
    Attention a = attention_of(t), last = a;
    double worst = 0, *want = attention_wanted(a);
    last.q += (size_t)(t->n - 1) * t->n_head * t->hd;
    last.pos += t->n - 1;
    last.n = 1;
    for (int threads = 1; threads <= 3; threads += 1 + test.quick) {
        Pool *pool = pool_open(threads);
        REQUIRE(pool, "%d threads", threads);
        a.out = need((n_out + one) * sizeof *a.out);
        last.out = a.out + n_out;
        if (!first) first = a.out;
        run_attention_cpu(pool, &a);
        run_attention_cpu(pool, &last);
        pool_close(pool);
        bool same = !memcmp(first, a.out, (n_out + one) * sizeof *first);
        CHECK(same, "%s: %d threads differ", t->what, threads);
        double error = nmse_double(a.out, want, n_out);
        worst = error <= worst ? worst : error;
        error = nmse_double(last.out, want + n_out - one, one);
        worst = error <= worst ? worst : error;
    }
    return worst;
}

static void test_attention(void) {
    for (size_t i = 0; i < sizeof ATTENTION / sizeof *ATTENTION; i++) {
        double error = check_attention(&ATTENTION[i]);
        // exponentials to 1e-6, values summed in f32; a CPU with half dot products rounds q
        CHECK(error < 1e-7, "%s: NMSE %.2g", ATTENTION[i].what, error);
        printf("  %-26s NMSE %.1e\n", ATTENTION[i].what, error);
    }
}

// ---- row by row ----

static void test_norms(void) {
    enum { N = 75 };
    for (int k = 0; k < 6; k++) {   // three kinds; over all values, or in groups of 25
        int kind = k % 3, group = k / 3 * 25;
        float *x = noise_array(N, 2), out[N];
        double want[N];   // weights for each group, or for all its own:
        Norm n = {noise_array(N, 1), noise_array(N, 1), kind == RMS && group ? group : N, group};
        if (kind == BARE) n.w = NULL;
        if (kind != LAYERNORM) n.b = NULL;
        for (int i = 0; i < N; i++) x[i] += 0.5f;
        norm(out, x, N, &n, kind, 1e-3f);
        reference_norm(want, x, N, &n, kind, 1e-3f);
        double error = nmse_double(out, want, N);
        CHECK(error < 1e-12, "kind %d, group %d: NMSE %.2g", kind, group, error);
    }
}

// worked out by hand: four heads have slopes of 2^-2 to 2^-8, two more 2^-1 and 2^-3; hunyuan's
// base is 10,000 * 1,000^(16/14)
static void test_alibi_and_alpha(void) {
    static const float want[] = {1 / 4.0f, 1 / 16.0f, 1 / 64.0f, 1 / 256.0f, 1 / 2.0f, 1 / 8.0f};
    float slope[6];
    for (int n = 4; n <= 6; n++) {
        alibi_slopes(slope, n, 8);
        for (int h = 0; h < n; h++) CHECK(slope[h] == want[h], "%d heads: %g", n, slope[h]);
    }
    Shape hunyuan = {"hunyuan-dense", 1, "kT", "rope.scaling.alpha=1000."};
    double base = random_model(&hunyuan, false)->config.rope_base;
    CHECK(fabs(base / 26826957.95 - 1) < 1e-6, "hunyuan's base is %.10g", base);
    for (int i = 0; i < 2; i++) {   // as llama.cpp's graph of both does
        Shape experts = {i ? "minicpm" : "granite", 1, "xT", EXPERT_KEYS};
        CHECK(random_model(&experts, false)->config.gates_normed, "%s", experts.arch);
    }
}

static void test_activations(void) {
    enum { N = 400 };
    double worst = 0, want[N];
    for (int act = SILU; act <= SWIGLU_OAI; act++)
        for (int gate = act == SWIGLU_OAI; gate < 2; gate++) {
            float *g = noise_array(N, 12), *u = noise_array(N, 9), out[N];
            activate(out, gate ? g : NULL, u, N, act);
            for (int i = 0; i < N; i++)
                want[i] = reference_activation(act, gate ? g[i] : u[i], u[i], gate);
            double error = nmse_double(out, want, N);
            CHECK(error < 1e-11, "activation %d: NMSE %.2g", act, error);
        }
    for (double x = -87; x < 88; x += 0.00731)
        worst = fmax(worst, fabs(exp_fast(x) / exp((float)x) - 1));
    CHECK(worst < 1e-6, "exp_fast is off by %.2g", worst);
    CHECK(exp_fast(-1000) < 1e-37f && exp_fast(-INFINITY) < 1e-37f && exp_fast(0) == 1, "its ends");
    printf("  exp_fast: relative error %.1e\n", worst);
}

// ==== models ====

// ---- golden models: logits of llama.cpp on the same weights in f32 ----

typedef struct {
    const Model *m;
    int32_t ids[64];
    int n;
    float *want;    // logits, or of an encoder the vector
    double limit;   // three times llama.cpp's own distance from the same weights in f32
} Golden;

// NAME.gguf, or the first of two parts: its own metadata, the weights of another model
static Golden golden_model(const char *name) {
    char *path = text_of("golden/archs/%s.gguf", name), *end;
    size_t size;
    if (access(path, R_OK)) path = text_of("golden/archs/%s-00001-of-00002.gguf", name);
    Golden g = {.m = open_model(path), .limit = 1e-4};
    const char *s = read_all(text_of("golden/archs/%s.tokens", name), &size);
    for (; g.n < 64 && (g.ids[g.n] = strtol(s, &end, 10), end > s); g.n++) s = end + (*end == ',');
    bool encoder = g.m->config.arch->flags & ENCODER;
    g.want = read_all(text_of("golden/archs/%s.%s", name, encoder ? "embd" : "logits"), &size);
    size_t numbers = encoder ? 64 : (size_t)g.n * g.m->config.n_vocab;
    REQUIRE(size == numbers * sizeof *g.want, "%s: %zu", name, size);
    if (encoder) return g;
    const char *own = read_all(text_of("golden/archs/%s.nmse", name), &size);
    g.limit = fmax(g.limit, 3 * atof(own));
    return g;
}

static void test_golden_models(void) {
    static const char *const names[] = {   // *-heads: six value heads on two, h % 2 and h / 3
        "llama", "llama-linear", "llama3-freqs", "mistral3", "qwen2", "qwen2-yarn", "qwen3",
        "gemma", "gemma2", "gemma3", "phi3", "phi3-long", "phi3-short", "llama-moe", "qwen3moe",
        "gpt-oss", "qwen35", "llama.q4_0", "qwen2.q5_1", "gemma3.iq4_nl", "gpt-oss.mxfp4",
        "llama256.q4_K_M", "qwen2-256.q2_K", "glm4moe", "qwen35-heads", "qwen3next-heads"};
    static const int chunks[] = {48, 1, 7, 5};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        Golden g = golden_model(names[i]);
        double worst = 0;
        for (int k = 0; k < (test.quick ? 3 : 4); k++) {
            Options o = {.chunk = chunks[k], .threads = 1 + k % 2};
            double error = nmse(logits_of(g.m, g.ids, g.n, o), g.want, g.n * g.m->config.n_vocab);
            bool ok = error <= g.limit;
            CHECK(ok, "%s -b %d: NMSE %.2g > %.2g", names[i], o.chunk, error, g.limit);
            worst = fmax(worst, error);
        }
        printf("  %-16s NMSE %.1e, limit %.1e\n", names[i], worst, g.limit);
    }
}

static void test_golden_encoders(void) {
    static const char *const names[] = {"bert", "nomic-bert"};
    for (int i = 0; i < 2; i++) {
        Golden g = golden_model(names[i]);
        float rows[64 * 64], mean[64] = {0};
        get_rows(open_session(g.m, (Options){.window = g.n, .chunk = g.n}), g.ids, g.n, 0, rows);
        for (int j = 0; j < 64 * g.n; j++) mean[j % 64] += rows[j] / g.n;
        double error = nmse(mean, g.want, 64);
        CHECK(error < g.limit, "%s: NMSE %.2g", names[i], error);
        printf("  %-16s NMSE %.1e, limit %.1e\n", names[i], error, g.limit);
    }
}

// ---- the storyteller ----

static void test_story_greedy(void) {
    size_t size;
    int32_t ids[128], next[128];
    double margin[128];
    int n = 0, differ = 0;
    const Model *m = open_model("golden/story.gguf");
    const char *line = strchr(read_all("golden/story.greedy.tsv", &size), '\n');
    for (; line && line[1]; line = strchr(line + 1, '\n'), n++)
        if (sscanf(line, "%*d %d %d %*f %lf", &ids[n], &next[n], &margin[n]) != 3) break;
    REQUIRE(n == 65, "%d positions", n);
    if (test.quick) n = 20;
    for (int chunk = 1; chunk <= 512; chunk += 511) {
        float *row = logits_of(m, ids, n, (Options){.chunk = chunk, .window = 128});
        for (int i = 0; i < n; i++, row += m->config.n_vocab) {
            int best = 0;
            for (int k = 1; k < m->config.n_vocab; k++) best = row[k] > row[best] ? k : best;
            differ += best != next[i];
            bool fine = best == next[i] || margin[i] <= 0.3;
            CHECK(fine, "position %d: %d, llama.cpp %d by %.2f", i, best, next[i], margin[i]);
        }
    }
    printf("  %d positions twice, %d differ where the margin is below 0.3\n", n, differ);
}

// ---- every architecture ----
//
// No golden says that most of these rows are right. What is tested is that every tensor which such
// a file has is read, and that prefill, decode and prefix reuse agree.

static const Shape SHAPES[] = {
    {"llama", 3, "x", EXPERT_KEYS},
    {"mistral3", 3, "", "attention.temperature_scale=0.1 rope.scaling.original_context_length=8"},
    {"qwen2", 3, "bT", ""}, {"qwen3", 3, "kT", ""}, {"gemma", 3, "T", ""},
    {"gemma2", 4, "tT", WINDOW_KEYS}, {"gemma2", 46, "tT", WINDOW_KEYS},
    {"gemma3", 6, "tk", WINDOW_KEYS "rope.scaling.factor=4."}, {"gemma3", 62, "tkT", WINDOW_KEYS},
    {"phi3", 3, "fu", ""}, {"qwen2moe", 3, "bxsS", EXPERT_KEYS}, {"qwen3moe", 3, "kx", EXPERT_KEYS},
    {"olmoe", 3, "Kx", EXPERT_KEYS},
    {"granitemoe", 3, "xs", EXPERT_KEYS "embedding_scale=3. residual_scale=0.5 logit_scale=2."},
    {"deepseek", 3, "xs", EXPERT_KEYS "expert_weights_scale=2."},
    {"glm4moe", 3, "abxsr", EXPERT_KEYS "expert_weights_norm=1 expert_weights_scale=2."},
    {"dots1", 3, "kxsr", EXPERT_KEYS "expert_gating_func=1"}, {"minimax-m2", 3, "Kxr", EXPERT_KEYS},
    {"ernie4_5-moe", 3, "xsr", EXPERT_KEYS}, {"bailingmoe", 3, "xs", EXPERT_KEYS},
    {"hunyuan-moe", 3, "kxs", EXPERT_KEYS}, {"gpt-oss", 4, "boaxBi", EXPERT_KEYS WINDOW_KEYS},
    {"qwen35", 4, "dak", DELTA_KEYS "rope.dimension_count=8"},
    {"qwen35moe", 4, "dakxsS", DELTA_KEYS EXPERT_KEYS},
    {"qwen3next", 4, "dDakxmsS", DELTA_KEYS EXPERT_KEYS},
    {"qwen3next", 4, "dDyakx", DELTA_KEYS EXPERT_KEYS},
    {"qwen3next", 4, "dDYakx", DELTA_KEYS EXPERT_KEYS}, {"qwen35", 4, "dvak", DELTA_KEYS},
    {"bert", 3, "nboBgENP", "attention.causal=0"}, {"nomic-bert", 3, "nfEN", "attention.causal=0"},
    {"olmo", 3, "0T", "attention.clamp_kqv=1."}, {"olmo2", 4, "pK", WINDOW_KEYS},
    {"smollm3", 4, "T", ""},
    {"granite", 3, "T", "embedding_scale=3. residual_scale=0.5 logit_scale=2. attention.scale=0.2"},
    {"minicpm", 3, "T", ""}, {"stablelm", 3, "n1j", "rope.dimension_count=4"},
    {"starcoder", 3, "nboBgfPT", ""}, {"starcoder2", 3, "nboBgT", ""},
    {"command-r", 3, "1jT", "logit_scale=0.5"}, {"cohere2", 4, "1T", WINDOW_KEYS "logit_scale=0.5"},
    {"chatglm", 3, "fbu", "rope.dimension_count=8"}, {"glm4", 3, "tbu", "rope.dimension_count=8"},
    {"exaone", 3, "T", ""}, {"exaone4", 3, "pk", ""}, {"exaone4", 64, "pk", WINDOW_KEYS},
    {"internlm2", 3, "", ""}, {"baichuan", 3, "", ""}, {"baichuan", 32, "", ""},
    {"baichuan", 40, "", ""}, {"xverse", 3, "", ""}, {"orion", 3, "n", ""},
    {"nemotron", 3, "ng", "rope.dimension_count=8"}, {"arcee", 3, "g", ""},
    {"phi2", 3, "nboBg1O", "rope.dimension_count=8"}, {"gpt2", 3, "nboBgfPT", ""},
    {"gptneox", 3, "nboBgf", "rope.dimension_count=4 use_parallel_residual=1"},
    {"falcon", 3, "nf1g2T", ""}, {"bloom", 3, "nboBgfNT", ""},
    {"hunyuan-dense", 3, "kT", "rope.scaling.alpha=1000."}, {"ernie4_5", 3, "T", ""},
    {"seed_oss", 3, "ab", ""},
};

// the last token's logits, or an encoder's vector for it
static void last_row(Session *s, const int32_t *ids, int n, float row[VOCAB]) {
    bool encoder = s->m->config.arch->flags & ENCODER;
    get_rows(s, ids, n, n - 1, row - (n - 1) * (encoder ? WIDTH : VOCAB));
}

// Are all tensors used? The file is mapped: each is changed there, and must change the last row.
static void check_tensors_used(Session *s, const int32_t *ids, int n, const float *want) {
    const Gguf *g = &s->m->gguf;
    int fd = open(scratch("random.gguf"), O_RDWR);
    for (size_t i = 0; i < g->n_tensors; i++) {
        const Tensor *t = &g->tensors[i];
        size_t count = t->ne[0] * t->ne[1] * t->ne[2], at = t->data - g->maps[0].base;
        float *old = need(4 * count), *changed = need(4 * count), got[VOCAB] = {0};
        int layer = -1;
        sscanf(t->name.s, "blk.%d.", &layer);
        if (layer > 1 && layer < s->m->config.n_layer - 1) continue;
        bool copied = strstr(t->name.s, "ssm_in.") == t->name.s + 6;   // or there is attn_qkv
        memcpy(old, t->data, 4 * count);
        for (size_t k = 0; k < count; k++) changed[k] = 0.2f - old[k];
        ssize_t wrote = pwrite(fd, changed, 4 * count, at);
        session_truncate(s, 0);
        last_row(s, ids, n, got);
        wrote += pwrite(fd, old, 4 * count, at);
        bool right = !memcmp(got, want, sizeof got) == copied && wrote == (ssize_t)(8 * count);
        CHECK(right, "%s: %.*s is not used", s->m->config.name, STR_ARG(t->name));
    }
    close(fd);
}

static double check_shape(const Shape *shape) {
    enum { N = 20 };
    int32_t ids[N], other[N];
    float whole[VOCAB] = {0}, single[VOCAB] = {0}, changed[VOCAB], back[VOCAB] = {0};
    const Model *m = random_model(shape, false);
    bool encoder = m->config.arch->flags & ENCODER;
    Session *s = open_session(m, (Options){.threads = 2, .window = 64, .chunk = 64});
    for (int i = 0; i < N; i++) ids[i] = random_bits() % VOCAB;
    for (int i = 0; i < N; i++) other[i] = i < 9 ? ids[i] : (int)(random_bits() % VOCAB);
    last_row(s, ids, N, whole);
    last_row(open_session(m, (Options){.threads = 1, .chunk = encoder ? N : 1}), ids, N, single);
    last_row(s, other, N, changed);   // another end, and back: the first part is reused
    last_row(s, ids, N, back);
    double error = fmax(nmse(single, whole, VOCAB), nmse(back, whole, VOCAB));
    CHECK(isfinite(whole[0]) && whole[0] != whole[1], "%s: %g", shape->arch, whole[0]);
    CHECK(memcmp(changed, whole, sizeof whole), "%s: the text does not matter", shape->arch);
    CHECK(error < 1e-6, "%s, %d layers: NMSE %.2g", shape->arch, shape->n_layer, error);
    if (!test.quick) check_tensors_used(s, ids, N, whole);
    clean_up();
    return error;
}

static void test_every_architecture(void) {
    double worst = 0;
    for (size_t i = 0; i < COUNT(SHAPES); i++)
        if (!test.quick || SHAPES[i].n_layer < 8) worst = fmax(worst, check_shape(&SHAPES[i]));
    for (size_t k = 0; k < sizeof ARCHS / sizeof *ARCHS; k++) {
        int n = ARCHS[k].n_layer;
        char *rest, *name = strtok_r(text_of("%s", ARCHS[k].names), " *", &rest);
        for (bool found = false; name; name = strtok_r(NULL, " *", &rest), found = false) {
            for (size_t i = 0; i < COUNT(SHAPES); i++)
                found |= !strcmp(name, SHAPES[i].arch) && (!n || n == SHAPES[i].n_layer);
            CHECK(found, "%s with %d layers has no shape here", name, n);
        }
    }
    printf("  prefill, decode and reuse agree to NMSE %.1e, limit 1e-6\n", worst);
}

// ==== sessions ====

// Far past the window: rings wrap more than twice, prompts come in several chunk sizes, then token
// by token. The reference is one pass over the whole text in a single chunk, which fits the rings:
// nothing wraps, and the mask (tested with attention) is all that hides a token.
static void test_ring(void) {
    static const Shape shapes[] = {{"llama", 2, "", ""}, {"gemma2", 4, "t", WINDOW_KEYS},
                                   {"gpt-oss", 2, "boaxBi", EXPERT_KEYS WINDOW_KEYS}};
    enum { N = 90, WINDOW = 24 };
    int32_t ids[N];
    for (int i = 0; i < N; i++) ids[i] = random_bits() % VOCAB;
    for (int a = 0; a < 3; a++) {
        const Model *m = random_model(&shapes[a], false);
        float *full = logits_of(m, ids, N, (Options){.window = N, .chunk = N}), got[N * VOCAB];
        for (int keep = 0; keep <= 3; keep += 3) {
            Options o = {.window = WINDOW, .chunk = N, .keep = keep, .threads = 1};
            float *want = logits_of(m, ids, N, o);
            double unlike = nmse(full, want, N * VOCAB), worst = 0;
            CHECK(unlike > 1e-3, "%s: a window changes nothing", shapes[a].arch);
            for (o.chunk = 1; o.chunk <= 16; o.chunk = 4 * o.chunk - 1) {
                Session *s = open_session(m, o);
                get_rows(s, ids, 37, 0, got);
                for (int n = 38; n <= N; n++) get_rows(s, ids, n, n - 1, got);
                double error = nmse(got, want, N * VOCAB);
                // going back: what the rings still hold is reused, what they lost is run again
                for (int back = N - 2; back > 3; back -= 17) {
                    const float *row = want + (back - 1) * VOCAB;
                    get_rows(s, ids, back, back - 1, got);
                    error = fmax(error, nmse(got + (back - 1) * VOCAB, row, VOCAB));
                }
                CHECK(error < 1e-6, "%s -b %d: NMSE %.2g", shapes[a].arch, o.chunk, error);
                worst = fmax(worst, error);
            }
            printf("  %-7s keep %d: NMSE %.1e, limit 1e-6; without a window it would be %.0e\n",
                   shapes[a].arch, keep, worst, unlike);
        }
    }
}

static void test_chunks_and_threads(void) {
    static const char *const names[] = {"llama", "llama-moe", "qwen35", "gemma3.iq4_nl",
                                        "llama256.q4_K_M"};
    static const int chunks[] = {1, 7, 64}, threads[] = {2, 3, 8};
    for (int i = 0; i < (test.quick ? 3 : 5); i++) {
        Golden g = golden_model(names[i]);
        double worst = 0;
        size_t size = (size_t)g.n * g.m->config.n_vocab;
        float *one = logits_of(g.m, g.ids, g.n, (Options){.threads = 1, .chunk = 11});
        for (int k = 0; k < 3; k++) {
            float *got = logits_of(g.m, g.ids, g.n, (Options){.chunk = chunks[k], .threads = 2});
            worst = fmax(worst, nmse(got, one, size));
            got = logits_of(g.m, g.ids, g.n, (Options){.threads = threads[k], .chunk = 11});
            bool same = !memcmp(got, one, size * sizeof *got);
            CHECK(same, "%s: %d threads differ from one", names[i], threads[k]);
        }
        // one token alone has int8 activations; several may have none: on AMX, and without tiles
        double limit = i < 3 ? 1e-6 : MATMUL_EXACT > 1e-7 || !INT8_TILE ? 2e-3 : 1e-3;
        CHECK(worst < limit, "%s: chunk sizes differ by %.2g", names[i], worst);
        printf("  %-16s chunk sizes differ by NMSE %.1e\n", names[i], worst);
    }
}

// A recurrent state cannot go back; a snapshot lets an answer be made again without its prompt.
static void test_regenerate(void) {
    enum { PROMPT = 30 };
    Golden g = golden_model("qwen35");
    const Model *m = g.m;
    int32_t *ids = g.ids, n = g.n;
    Session *s = open_session(m, (Options){.threads = 1});
    size_t v = m->config.n_vocab, at = (PROMPT - 1) * v;
    float *fresh = logits_of(m, ids, n, (Options){.threads = 1}), *got = need(n * v * sizeof *got);
    for (int again = 0; again < 3; again++) {
        get_rows(s, ids, PROMPT, PROMPT - 1, got);   // again: only its last token is computed
        for (int k = PROMPT + 1; k <= n; k++) get_rows(s, ids, k, k - 1, got);
        double error = nmse(got + at, fresh + at, n * v - at);
        CHECK(error < 1e-6, "answer %d differs by %.2g", again, error);
        memset(got, 0, n * v * sizeof *got);
    }
    CHECK(s->saved_pos == PROMPT - 1, "the snapshot is at %d", s->saved_pos);
    memset(s->saved, 0, s->n_recurrent * sizeof *s->saved);
    get_rows(s, ids, PROMPT, PROMPT - 1, got);
    CHECK(nmse(got + at, fresh + at, v) > 1e-4, "the snapshot is not used");
    ids[3] ^= 1;                                     // an early change: everything again
    get_rows(s, ids, PROMPT, PROMPT - 1, got);
    fresh = logits_of(m, ids, PROMPT, (Options){.threads = 1});
    CHECK(nmse(got + at, fresh + at, v) < 1e-6, "a changed prompt");
}

static volatile sig_atomic_t fourth;

static bool collect(void *ctx, int32_t id) {   // up to 12
    Tokens *t = ctx;
    bool ok = tokens_add(t, id) && t->n < 12;
    fourth = t->n == 4;
    return ok;
}

static void test_session_refusals(void) {
    // 96 learned positions
    const Model *m = random_model(&(Shape){"gpt2", 2, "nboBgfP", ""}, false);
    Session *s = open_session(m, (Options){.window = 96, .sampling.seed = 4}), huge = {0};
    Error e = {""};
    Tokens out = {0};
    int32_t ids[97] = {1, 2, 3}, bad[] = {1, VOCAB, -1};
    CHECK(!session_eval(s, bad, 2, &e) && strstr(e.text, "token id 64"), "%s", e.text);
    CHECK(!session_eval(s, bad + 2, 1, &e) && strstr(e.text, "token id -1"), "%s", e.text);
    CHECK(!session_eval(s, ids, 0, &e) && strstr(e.text, "no tokens"), "%s", e.text);
    CHECK(!session_eval(s, ids, 97, &e) && strstr(e.text, "learned positions"), "%s", e.text);
    CHECK(session_eval(s, ids, 96, &e), "%s", e.text);
    CHECK(session_generate(s, ids, 3, 9, collect, &out, &e) && out.n == 9, "%zu ids", out.n);
    out.n = 0;
    CHECK(session_generate(s, ids, 3, -1, collect, &out, &e) && out.n == 12, "%zu ids", out.n);
    out.n = 0;
    CHECK(!session_generate(s, ids, 94, 9, collect, &out, &e) && out.n == 3, "%zu ids", out.n);
    // an interrupt ends generation at the next evaluation, and evaluation before its first chunk
    s->stop = &fourth;
    out.n = 0;
    CHECK(!session_generate(s, ids, 3, 50, collect, &out, &e) && out.n == 4, "%zu ids", out.n);
    CHECK(strstr(e.text, "interrupted") && !session_eval(s, ids, 3, &e), "%s", e.text);
    Options o = {.window = INT_MAX, .chunk = 1 << 20, .cpu = true};
    CHECK(!session_open(&huge, m, o, &e) && strstr(e.text, "too large"), "%s", e.text);
    // an encoder's text is one chunk, and nothing of another text is reused
    m = random_model(&(Shape){"bert", 3, "nboBgENP", ""}, false);
    float a[VOCAB], b[VOCAB];
    s = open_session(m, (Options){.chunk = 8});
    CHECK(!session_eval(s, ids, 9, &e) && strstr(e.text, "in a chunk of 8"), "%s", e.text);
    last_row(s, ids, 8, a);
    ids[3] = 9;
    last_row(s, ids, 8, a);
    last_row(open_session(m, (Options){.chunk = 8}), ids, 8, b);
    CHECK(!memcmp(a, b, WIDTH * sizeof *a), "an encoder reuses a prefix");
    size_t before = allocations;
    for (int i = 0; i < 1000; i++) CHECK(tokens_add(&out, i), "no room");
    CHECK(allocations - before < 12, "%zu allocations for 1,000 ids", allocations - before);
    session_close(&huge);
    session_close(&huge);   // closing again is no harm
    free(out.id);
}

// ==== sampler ====

static Candidate *five(Candidate c[5]) {   // probabilities .249 .012 .056 .678 .005
    static const float logits[] = {2, -1, 0.5f, 3, -2};
    for (int i = 0; i < 5; i++) c[i] = (Candidate){logits[i], i};
    return c;
}

static void test_sampler_stages(void) {
    static const int32_t last[] = {3, 1, 3, 3, 99, -7};
    Candidate c[5];
    sample_penalty(five(c), 5, last, 6, 2);   // 3 / 2 once, -1 * 2; ids that are none do nothing
    static const float penalised[] = {2, -2, 0.5f, 1.5f, -2};
    for (int i = 0; i < 5; i++)
        CHECK(c[i].id == i && c[i].logit == penalised[i], "penalty: %d %g", c[i].id, c[i].logit);
    sample_temperature(five(c), 5, 0.5f);
    CHECK(c[0].logit == 4 && c[4].logit == -4, "temperature");
    CHECK(sample_top_k(five(c), 5, 3) == 3 && c[1].id == 0 && c[2].id == 2, "top-k: ids 3 0 2");
    CHECK(sample_top_k(five(c), 5, 0) == 5 && sample_top_k(c, 5, 9) == 5, "top-k off");
    CHECK(sample_top_p(five(c), 5, 0.67f) == 1 && c[0].id == 3, "top-p .67");
    CHECK(sample_top_p(five(c), 5, 0.69f) == 2 && c[1].id == 0, "top-p .69");
    CHECK(sample_top_p(five(c), 5, 0.98f) == 3 && c[2].id == 2, "top-p .98");
    CHECK(sample_top_p(five(c), 5, 0) == 1 && sample_top_p(c, 5, 1) == 5, "top-p at its ends");
    CHECK(sample_min_p(five(c), 5, 0.05f) == 3 && c[1].id == 2 && c[2].id == 3, "min-p: ids 0 2 3");
    CHECK(sample_min_p(five(c), 5, 0) == 5 && sample_min_p(c, 5, 1) == 1, "min-p at its ends");
}

static int32_t draw(Sampling o, const float *x, int n, uint64_t *rng) {
    static const int32_t last[] = {1, 2};
    Candidate c[8];
    return sample(&o, x, n, last, 2, rng, c);
}

static void test_sampler_choice(void) {
    static const float x[] = {1, 4, 4, 2, NAN, -INFINITY, 3.9f}, nothing[] = {NAN, NAN, NAN};
    uint64_t a = 7, b = 7;
    int counts[7] = {0}, n = test.quick ? 20000 : 200000;
    Sampling greedy = {.repeat_penalty = 1}, cold = {.temp = -1, .repeat_penalty = 1};
    Sampling all = {.temp = 1, .top_p = 1, .repeat_penalty = 1}, fresh = {.repeat_penalty = 2};
    Sampling one = {.temp = 1, .top_p = 1, .repeat_penalty = 1, .top_k = 1};
    CHECK(draw(greedy, x, 7, &a) == 1, "greedy takes the lower of two equal ids");
    CHECK(draw(fresh, x, 7, &a) == 6, "the penalty comes before the greedy choice");
    CHECK(draw(cold, x, 7, &a) == 1, "a temperature below 0 is greedy");
    CHECK(a == b, "greedy takes no random number");
    CHECK(draw(one, x, 7, &a) == 1, "top-k 1");
    CHECK((uint32_t)draw(all, nothing, 3, &a) < 3, "nothing but NaN");
    a = b;
    for (int i = 0; i < n; i++) {
        int32_t id = draw(all, x, 7, &a);
        CHECK(id == draw(all, x, 7, &b), "the same seed, another draw");
        counts[(uint32_t)id < 7 ? id : 4]++;
    }
    // tempered, two logits of 0 and 2 have shares of .38 and .62: a top-p of .8 keeps both
    Sampling hot = {.temp = 4, .top_p = 0.8f, .repeat_penalty = 1};
    int low = 0;
    for (int i = 0; i < 100; i++) low += draw(hot, (float[]){0, 2}, 2, &a) == 0;
    CHECK(low > 9 && low < 91, "temperature after top-p: %d draws of 100", low);
    double total = 0;
    for (int i = 0; i < 7; i++) total += i == 4 ? 0 : exp(x[i]);
    for (int i = 0; i < 7; i++) {
        double p = i == 4 ? 0 : exp(x[i]) / total, five_sigma = 5 * sqrt(p * (1 - p) * n) + 0.5;
        CHECK(fabs(counts[i] - p * n) < five_sigma, "id %d: %d draws of %.0f", i, counts[i], p * n);
    }
}

// the session's sampler: seeded once, the first token drawn like every other, repeat_last_n
static void test_sampler_session(void) {
    const Model *m = random_model(&(Shape){"llama", 1, "", ""}, false);
    Error e = {""};
    int32_t ids[6][9] = {{1, 2, 3}};
    bool first_differs = false;
    for (int run = 0; run < 6; run++) {   // three seeds, twice
        Options o = {.sampling = {.temp = 3, .top_p = 1, .repeat_penalty = 1, .seed = run / 2 + 1}};
        Session *s = open_session(m, o);
        memcpy(ids[run], ids[0], 3 * sizeof **ids);
        for (int n = 3; n < 9; n++)
            ids[run][n] = session_sample(s, session_eval(s, ids[run], n, &e));
        bool same = !memcmp(ids[run], ids[run & ~1], sizeof *ids);
        CHECK(same, "seed %d: two runs differ", run / 2 + 1);
        first_differs |= ids[run][3] != ids[0][3];
    }
    CHECK(first_differs, "three seeds, one first token");
    float logits[VOCAB] = {[7] = 4, [6] = 3, [5] = 2, [1] = 1};
    for (int last_n = -1; last_n < 3; last_n++) {   // the penalty sees all of 5 6 7, none, 7, 6 7
        Options o = {.sampling = {.repeat_penalty = 1e6f, .repeat_last_n = last_n}};
        Session *s = open_session(m, o);
        CHECK(session_eval(s, (int32_t[]){5, 6, 7}, 3, &e), "%s", e.text);
        int32_t id = session_sample(s, logits), want = last_n < 0 ? 1 : 7 - last_n;
        CHECK(id == want, "repeat_last_n %d: id %d, want %d", last_n, id, want);
    }
}

// ---- tokenizer ----

static const struct { const char *gguf, *tsv; } TOK_GOLDENS[] = {
    {"golden/tok/spm.gguf", "golden/tok/spm.tsv"}, {"golden/story.gguf", "golden/tok/bpe.tsv"},
    {"golden/archs/bert.gguf", "golden/tok/wpm.tsv"},
};

typedef struct { Gguf g; Tokenizer t; Error e; } TokVocab;

static bool tok_open(TokVocab *v, const char *path) {
    *v = (TokVocab){.e = {""}};
    return gguf_open(&v->g, path, &v->e) && tokenizer_open(&v->t, &v->g, &v->e);
}

static bool tok_write(TokVocab *v, Writer *w) {
    write_gguf(w, scratch("vocab.gguf"));
    return tok_open(v, scratch("vocab.gguf"));
}

static void tok_close(TokVocab *v) {
    tokenizer_close(&v->t);
    gguf_close(&v->g);
}

// Every line of the recordings; then the ids turned into text again, a token at a time.
static void test_tokenizer_goldens(void) {
    for (size_t k = 0; k < 3; k++) {
        TokVocab v;
        size_t size;
        const char *tsv = TOK_GOLDENS[k].tsv;
        REQUIRE(tok_open(&v, TOK_GOLDENS[k].gguf), "%s: %s", TOK_GOLDENS[k].gguf, v.e.text);
        char *p = read_all(tsv, &size), *text = need(size), *back = need(size), *end;
        char *piece = need(v.t.piece_max);
        int lines = 0;
        for (; *p; p += *p == '\n', lines++) {
            Tokens ids = {0};
            Detokenizer d = {0};
            size_t n = 0, n_back = 0, i = 0;
            for (unsigned byte; *p != '\t' && sscanf(p, "%2x", &byte) == 1; p += 2)
                text[n++] = byte;
            CHECK(tokenize(&v.t, text, n, true, false, &ids, &v.e), "%s", v.e.text);
            for (p++; *p != '\n'; p = end + (*end == ' '), i++) {
                int32_t id = strtol(p, &end, 10);
                REQUIRE(end > p, "%s line %d: not an id", tsv, lines + 1);
                CHECK(i < ids.n && ids.id[i] == id, "%s line %d: id %zu", tsv, lines + 1, i);
            }
            CHECK(i == ids.n, "%s line %d: %zu ids", tsv, lines + 1, ids.n);
            for (i = 0; i < ids.n; i++) {
                size_t len = detokenize(&v.t, &d, ids.id[i], piece);
                CHECK(!len || ((piece[0] & 0xC0) != 0x80 && n_back + len < size), "whole");
                memcpy(back + n_back, piece, len);
                n_back += len;
            }
            if (k < 2) CHECK(n == n_back && !memcmp(text, back, n), "line %d back", lines + 1);
            free(ids.id);
        }
        CHECK(lines == 35, "%s: %d lines", tsv, lines);
        tok_close(&v);
    }
}

// Words, by hand from the regular expressions of each family; | stands between them.
static void test_tokenizer_rules(void) {
    static const struct { const char *pre, *words; } rules[] = {
        {"gpt-2", "It|'s| I|'|LL| 1234|  | x|\n\n| ,;|\t"},
        {"llama-bpe", "It|'s| I|'LL| |123|4|  | x|\n\n| ,;|\t"},
        {"qwen2", "don|'T| |1|2|  |\ty|!?\n\n|.x| \u00E9"}, {"qwen35", "a\u0301b| \u0301c|1|2"},
        {"default", "a|+|b|123|456|78|."}, {"falcon", "a|`+|b|123|45| |678|."},
        {"starcoder", "a|1|2| |3| b|'s|'s|\n"}, {"gpt-4o", "Hello's|World|ABC'LL| |123|4|;/"},
        {"tekken", "Hello|World|HTTPs| \u00C0|B|1|2|;/\n/\n"},
        {"deepseek-llm", "ab| \u00C9\u00E9| !?|\n|漢字|12|  "},
        {"deepseek-coder", "ab| |漢| !?|1|2|\r|\n"},
        {"deepseek-v3", "123|4|漢字かな|.x| !\n|ab\u0301"},
        {"gemma4", "a  b c|\n\n|d"}, {"exaone4", "x| y"}, {"smaug-bpe", "112|3"}, {"phi-2", "a| b"},
    };
    for (size_t k = 0; k < sizeof rules / sizeof *rules; k++) {
        Char ch[256] = {{0}};
        char expected[256] = {0};
        TokVocab v;
        Writer w = {0};
        key_vocab(&w, "gpt2", rules[k].pre, "a,b,c,d,e,f,g,h,i,j,k,l", "a b");
        REQUIRE(tok_write(&v, &w), "%s", v.e.text);
        size_t n = 0;
        for (const char *s = rules[k].words; *s;) {
            if (*s == '|') expected[n] = 1, s++;
            size_t used;
            ch[n].c = utf8_decode(s, strlen(s), &used);
            ch[n].set = unicode_classes(ch[n].c);
            n++;
            s += used;
        }
        ch[0].cut = ch[n].cut = true;
        for (const char *const *rule = v.t.pre->rule; *rule; rule++)
            for (size_t i = 0, end; i < n; i = end) {
                for (end = i + 1; !ch[end].cut;) end++;
                piece_split(*rule, ch + i, ch + end);
            }
        for (size_t i = 1; i < n; i++)
            CHECK(ch[i].cut == expected[i], "%s: %s at %zu", rules[k].pre, rules[k].words, i);
        tok_close(&v);
    }
}

static void test_unicode_tables(void) {
    static const struct { const char *name, *const *line; size_t n; uint32_t sum; } tables[] = {
        {"classes", UNICODE_CLASSES, COUNT(UNICODE_CLASSES), 0x826c8596},
        {"lower", UNICODE_LOWER, COUNT(UNICODE_LOWER), 0x98f57bbe},
        {"base", UNICODE_BASE, COUNT(UNICODE_BASE), 0x22a399d2}};
    for (int t = 0; t < 3; t++) {
        uint32_t sum = 2166136261u;
        for (uint32_t c = 0; c <= 0x10FFFF; c++) {
            uint32_t value = range_value(tables[t].line, tables[t].n, c, INT32_MIN);
            for (int b = 0; b < 32; b += 8) sum = (sum ^ (value >> b & 255)) * 16777619u;
        }
        CHECK(sum == tables[t].sum, "%s: %08x, want %08x", tables[t].name, sum, tables[t].sum);
    }
    // letters, an accent, a Hangul syllable, an ideograph, a wide space, a private character
    static const struct { uint32_t c; char class; uint32_t lower, base; } chars[] = {
        {'A', 'u', 'a', 'A'}, {0xC9, 'c', 0xE9, 'E'}, {0x301, 'M', 0x301, 0},
        {0xD55C, 'x', 0xD55C, 0x1112}, {0x4E00, 'x', 0x4E00, 0x4E00}, {0x3000, 's', 0x3000, 0x3000},
        {0xE000, 'C', 0, 0}};
    for (size_t i = 0; i < COUNT(chars); i++) {
        uint32_t c = chars[i].c, lower = unicode_fold(c, true, false);
        uint32_t base = unicode_fold(c, false, true);
        char class = "ulcxNMPSsCO"[range_value(UNICODE_CLASSES, COUNT(UNICODE_CLASSES), c, 10)];
        CHECK(class == chars[i].class && lower == chars[i].lower && base == chars[i].base,
            "U+%04X: class %c, lower case U+%04X, base U+%04X", c, class, lower, base);
    }
}

// ids of text as decimal numbers
static const char *tok_ids(const Tokenizer *t, const char *text, size_t n, bool add, bool special) {
    static char out[512];
    Tokens ids = {0};
    Error e;
    size_t at = 0;
    out[0] = 0;
    CHECK(tokenize(t, text, n, add, special, &ids, &e), "%s", e.text);
    for (size_t i = 0; i < ids.n && at < 480; i++) at += sprintf(out + at, " %d", ids.id[i]);
    free(ids.id);
    return out;
}

static void test_tokenizer_special(void) {
    static const int32_t types[] = {1, 1, 1, 3, 4, 4, 1, 3, 2, 1, 1, 4, 3};
    TokVocab v;
    Writer w = {0};
    key_vocab(&w, "gpt2", "gpt-2",
              "a,b,ab,<s>,bb,bbb,<|im_end|>,</x>,<u>,<|eot_id|>,c,<PRE>,<|start|>", "a b");
    key_array(&w, "tokenizer.ggml.token_type", GGUF_I32, 13, types, sizeof types);
    key_int(&w, "tokenizer.ggml.eos_token_id", 7);
    key_int(&w, "tokenizer.ggml.bos_token_id", 3);
    key_int(&w, "tokenizer.ggml.add_bos_token", 1);
    REQUIRE(tok_write(&v, &w), "%s", v.e.text);
    // user-defined tokens are always cut out, the longest first; control tokens on request
    CHECK(!strcmp(tok_ids(&v.t, "abbbbb", 6, true, false), " 3 0 5 4"), "user-defined");
    CHECK(!strcmp(tok_ids(&v.t, "ab<s>", 5, false, true), " 2 3"), "parsed");
    CHECK(!strcmp(tok_ids(&v.t, "a<u>b", 5, false, true), " 0 8 1"), "unknown, parsed");
    CHECK(!strcmp(tok_ids(&v.t, "c<s>", 4, false, false), " 10"), "bytes without tokens: nothing");
    CHECK(!strcmp(tok_ids(&v.t, "<PRE>a<|start|>", 15, false, false), " 0 12"), "known");
    CHECK(!strcmp(tok_ids(&v.t, "", 0, true, false), " 3"), "empty");
    for (int32_t id = -2; id < 13; id++)
        CHECK(token_is_eog(&v.t, id) == (id == 6 || id == 7 || id == 9), "eog %d", id);
    CHECK(token_find(&v.t, "bbb") == 5 && token_find(&v.t, "x") == -1, "find");
    tok_close(&v);
}

// bytes of a character arrive one by one; what cannot become one is U+FFFD
static void test_tokenizer_streaming(void) {
    static const struct { int32_t id; const char *text; } steps[] = {
        {7, ""}, {0, "x"}, {0, " x"}, {1, ""}, {2, ""}, {3, ""}, {4, "😀"}, {5, "a"}, {1, ""},
        {5, "\uFFFDa"}, {4, "\uFFFD"}, {6, ""}, {0, " x"}, {1, ""}, {8, "\uFFFD\u00E9"}};
    static const int32_t types[] = {1, 6, 6, 6, 6, 1, 3, 2, 1};
    static const float scores[9];
    char out[128];
    TokVocab v;
    Writer w = {0};
    Detokenizer d = {0};
    key_vocab(&w, "llama", NULL, "\u2581x,<0xF0>,<0x9F>,<0x98>,<0x80>,a,<s>,<u>,\u00E9", NULL);
    key_array(&w, "tokenizer.ggml.token_type", GGUF_I32, 9, types, sizeof types);
    key_array(&w, "tokenizer.ggml.scores", GGUF_F32, 9, scores, sizeof scores);
    REQUIRE(tok_write(&v, &w) && v.t.piece_max <= sizeof out, "%s", v.e.text);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        size_t n = detokenize(&v.t, &d, steps[i].id, out);
        CHECK(n == strlen(steps[i].text) && !memcmp(out, steps[i].text, n), "step %zu", i);
    }
    d = (Detokenizer){.started = true};
    CHECK(detokenize(&v.t, &d, 0, out) == 2, "a continuation keeps its space");
    CHECK(!strcmp(tok_ids(&v.t, "x😀\xFF", 6, true, false), " 1 0 1 2 3 4 0"), "bytes");
    CHECK(!strcmp(tok_ids(&v.t, "\xC1\xA1", 2, false, false), " 0 0 0 0 0"), "overlong");
    tok_close(&v);
}

static void test_tokenizer_refusals(void) {
    static const struct { const char *model, *pre, *tokens, *merges, *key, *says; } bad[] = {
        {"t5", "gpt-2", "a,b", "a b", NULL, "'t5'"},
        {"rwkv", "gpt-2", "a,b", "a b", NULL, "'rwkv'"},
        {"gpt2", "gpt-9", "a,b", "a b", NULL, "'gpt-9'"},
        {"gpt2", "gpt-2", "a,b", "a b,ab", NULL, "merge 1"},
        {"gpt2", "gpt-2", NULL, "a b", NULL, "tokens is missing"},
        {"gpt2", "gpt-2", "a,b", NULL, NULL, "merges is missing"},
        {"llama", NULL, "a,b", NULL, NULL, "scores"}, {"bert", NULL, "a", NULL, NULL, "token"},
        {"gpt2", "gpt-2", "a,b", "a b", "tokenizer.ggml.token_type", "token_type"},
        {"gpt2", "gpt-2", "a,b", "a b", "tokenizer.ggml.eos_token_id", "eos_token_id"},
        {"gpt2", "gpt-2", "a,b", "a b", "tokenizer.ggml.bos_token_id", "bos_token_id"},
        {"gpt2", NULL, "a,b,,a", "a b", NULL, NULL},   // empty and repeated tokens are no error
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        TokVocab v;
        Writer w = {0};
        const char *key = bad[i].key, *says = bad[i].says;
        key_vocab(&w, bad[i].model, bad[i].pre, bad[i].tokens, bad[i].merges);
        if (key && strstr(key, "_id")) key_int(&w, key, 2);   // past the end
        else if (key) key_array(&w, key, GGUF_I32, 3, (int32_t[]){2, 1, 1}, 12);   // for 2 tokens
        bool ok = tok_write(&v, &w);
        if (says) CHECK(!ok && strstr(v.e.text, says), "%s: %s", says, v.e.text);
        else CHECK(ok && v.t.note && token_find(&v.t, "a") == 0, "missing pre: %s", v.e.text);
        tok_close(&v);
    }
}

// a megabyte without a break takes seconds at most; quadratic joining would take hours
static void test_tokenizer_linear(void) {
    static const char *const patterns[] = {"a", " ", "ab", "\xD0\xB1", "\xFF", " \n"};
    const size_t n = test.quick ? 1 << 13 : 1 << 20;
    char *text = need(n);
    for (size_t k = 0; k < 3; k++) {
        TokVocab v;
        const char *name = TOK_GOLDENS[k].gguf;
        REQUIRE(tok_open(&v, name), "%s", v.e.text);
        for (size_t p = 0; p < sizeof patterns / sizeof *patterns; p++) {
            Tokens ids = {0};
            for (size_t i = 0; i < n; i++) text[i] = patterns[p][i % strlen(patterns[p])];
            double start = now();
            CHECK(tokenize(&v.t, text, n, true, false, &ids, &v.e), "%s", v.e.text);
            double took = now() - start;
            CHECK(took < 10, "%s: pattern %zu takes %.1f s", name, p, took);
            free(ids.id);
        }
        tok_close(&v);
    }
}

// ==== chat templates ====

// What each template must print for the conversation below; «» enclose what is marked, what
// others than the model wrote. "!" begins what the line of an error must hold.
static const struct { const char *what, *text, *want; } TEMPLATES[] = {
    {"a newline at the end", "a\r\nb\n", "a\nb"},
    {"trim_blocks, lstrip_blocks", "  {% if 1 %}\n  x\n  {% endif %}\ny {# #}\n {{ 1 }}\n.",
     "  x\ny  1\n."},
    {"signs at tags", "a {%- if 1 -%} b {%+ endif +%}\nc {{- 1 -}} d", "ab \nc1d"},
    {"raw", "{% raw %}{{ x }}{% endraw %}\n{% raw -%} y {%- endraw %}", "{{ x }}y"},
    {"set is local in for, not in if", "{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{{ x }}"
     "{% endfor %}{{ x }}{% if 1 %}{% set x = 3 %}{% endif %}{{ x }}", "213"},
    {"targets", "{% set a, b = 1, 3 %}{{ b }}{% set n = namespace(v=1) %}"
     "{% for i in [4, 5] %}{% set n.v = n.v + i %}{% endfor %}{{ n.v }}", "310"},
    {"set of a block", "{% set x | upper %}a{{ messages[0].content }}{% endset %}{{ x }}",
     "A«BE BRIEF.»"},
    {"loop", "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ loop.last }}"
     "{{ loop.previtem.role if not loop.first }} {% endfor %}",
     "1False 2Falseuser 3Trueassistant "},
    {"break, continue, else", "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
     "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}{% for i in x %}{% else %}-"
     "{% endfor %}", "02-"},
    {"turns", "{% for i in 'ab' %}{{ loop.previtem|d('-') ~ loop.cycle(1, 2) }}{{ x }}"
     "{% set x = i %}{% endfor %}", "-1a2"},
    {"macro", "{% macro f(n, s='-') %}{{ n }}{% if n %}{{ s }}{{ f(n - 1, s=s) }}{% endif %}"
     "{% endmacro %}{{ f(2) }}{{ f(1, s=messages[0].content[:2]) }}", "2-1-01«Be»0"},
    {"blocks", "{% macro f() %}<{{ caller(1) }}>{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}"
     "{% filter upper %}a{% endfilter %}{% generation %}b{% set x = 2 %}{% endgeneration %}{{ x }}",
     "<1>Ab"},
    {"printing", "{{ [none, true, 1.0, 1e16, 'it\\'s', \"\\n\", ('a',), {'k': 0.1}] }}",
     "[None, True, 1.0, 1e+16, \"it's\", '\\n', ('a',), {'k': 0.1}]"},
    {"operators", "{{ -7 // 2 }}{{ -7 % 3 }}{{ 7 / 2 }} {{ 2 ** 3 ** 2 }}{{ 'a' * 2 ~ (1 < 2 < 2)}}"
     "{{ not 3 in [3] or 1 == 1.0 }}{{ 'a' if 0 else 'b' if 0 else 'c' }}{{ x.y if 0 else 2 }}",
     "-423.5 64aaFalseTruec2"},
    {"slices", "{{ 'Größe'[::-1] ~ 'Größe'[-3:-1] ~ [1, 2, 3][::2] }}", "eßörGöß[1, 3]"},
    {"undefined", "{{ x }}{{ x|length }}{{ x is defined }}{{ x|d('y') }}{{ messages[9] }}"
     "{{ messages[0].no }}", "0Falsey"},
    {"members", "{{ {'items': 1}['items'] ~ {}.get('b', 2) ~ messages[-4].role }}", "12system"},
    {"marks survive", "{{ '<|' + messages[0].role + '|>' ~ messages[0].content[3:6] }}"
     " {{ messages[1].content.strip().split(' ')|join('-')|replace('<', '[') }}"
     "{{ messages[2].content }}{{ messages[1].content|tojson }}{{ '%s' % messages[3].content }}",
     "<|system|>«bri» «Hi»-[«b>»<x>Yo\"« Hi <b>»\\n\"«End.»"},
    {"splitting", "{{ ' a  b '.split() + 'a,b,c'.rsplit(',', 1) }}", "['a', 'b', 'a,b', 'c']"},
    {"filters of lists", "{{ messages|map(attribute='role')|unique|list }}"
     "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
     "{{ [3, 1, 2]|sort(reverse=true) }}{{ {'b': 1, 'a': 2}|dictsort }}{{ [1, 2]|sum }}",
     "['system', 'user', 'assistant']2[3, 2, 1][('a', 2), ('b', 1)]3"},
    {"a generator is true", "{{ 1 if []|map('upper') }}", "1"},
    {"JSON", "{{ {'a': [1, 'é\"'], 'b': {}}|tojson }}{{ {'a': [1]}|tojson(indent=1) }}",
     "{\"a\": [1, \"é\\\"\"], \"b\": {}}{\n \"a\": [\n  1\n ]\n}"},
    {"formats", "{{ '%05.1f|%3s|%i%%'|format(2.25, 'a', 7) }}{{ '{0}{x:.1f}{{'.format('b', x=1) }}",
     "002.2|  a|7%b1.0{"},
    {"what it is given", "{{ bos_token ~ eos_token ~ strftime_now('%d %b %Y') ~ (tools is none) }}",
     "<s></s>22 Nov 2026False"},
    {"a text that grows", "{% set n = namespace(s='') %}{% for i in range(50000) %}"
     "{% set n.s = n.s + '0123456789' %}{% endfor %}{{ n.s|length }}", "500000"},
    {"an error names its line", "\n\n{{ x.y }}", "!line 3: 'x' is undefined"},
    {"raise_exception", "{{ raise_exception('no\n' ~ messages[3].role) }}", "!: no?user"},
    {"an unknown tag", "{% if 0 %}{% fetch %}{% endif %}", "!unexpected fetch"},
    {"an unknown filter", "{{ 1 if 1 else x|fetch }}{{ 'x'|fetch }}", "!no filter 'fetch'"},
    {"types", "{{ 'a' + 1 }}", "!str + int is not possible"},
    {"no end", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "!nested too deeply"},
    {"too long", "{% for i in range(99999) %}{% for j in range(999) %}{{ 1 in [] }}{% endfor %}"
     "{% endfor %}", "!too"},
    {"too large", "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s * 9 %}"
     "{% endfor %}", "!too much memory"},
};

static void test_chat_templates(void) {
    static const ChatMessage messages[] = {{{"system", 6}, {"Be brief.", 9}}, {{"user", 4},
        {" Hi <b>\n", 8}}, {{"assistant", 9}, {"<x>Yo", 5}}, {{"user", 4}, {"End.", 4}}};
    setenv("SOURCE_DATE_EPOCH", "1795305600", 1);
    for (size_t i = 0; i < COUNT(TEMPLATES); i++) {
        Str text = {TEMPLATES[i].text, strlen(TEMPLATES[i].text)};
        const char *want = TEMPLATES[i].want;
        Rendered r;
        Error e = {""};
        bool ok = template_render(text, messages, 4, (Str){"<s>", 3}, (Str){"</s>", 4}, -1, &r, &e);
        char *got = need(5 * r.n + 8), *end = got;
        for (size_t k = 0; k <= r.n; k++) {
            bool before = k && r.mark[k - 1], now = k < r.n && r.mark[k];
            if (before != now) end = stpcpy(end, now ? "«" : "»");
            if (k < r.n) *end++ = r.text[k];
        }
        bool right = *want == '!' ? !ok && strstr(e.text, want + 1) : ok && !strcmp(got, want);
        CHECK(right, "%s: %s%s", TEMPLATES[i].what, got, e.text);
        rendered_free(&r);
    }
    unsetenv("SOURCE_DATE_EPOCH");
}

// ==== the command line ====

static struct { int status; char *out, *err; size_t n; } cli;

// runs llm in a shell: $S is the storyteller, $G golden/archs, $D the scratch directory
static void llm(const char *before, const char *arguments) {
    const char *in = strchr(before, '|') ? "" : "</dev/null";
    const char *out = strchr(arguments, '>') ? "" : ">$D/out";
    setenv("S", "golden/story.gguf", 1);
    setenv("G", "golden/archs", 1);
    setenv("D", test.dir, 1);
    const char *command = text_of("%s %s %s %s", before, test.program, arguments, in);
    int status = system(text_of("%s %s 2>$D/err", command, out));
    cli.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    cli.err = read_all(scratch("err"), &cli.n);
    cli.out = read_all(scratch("out"), &cli.n);
}

static bool matches(const char *text, const char *pattern) {
    regex_t r;
    bool ok = !regcomp(&r, pattern, REG_EXTENDED | REG_NOSUB) && !regexec(&r, text, 0, NULL, 0);
    regfree(&r);
    return ok;
}

// one line on stderr that names what is wrong, and nothing on stdout
static void check_refusal(int status, const char *arguments, const char *says) {
    llm("", arguments);
    const char *end = strchr(cli.err, '\n');
    CHECK(cli.status == status, "llm %s: exit %d", arguments, cli.status);
    CHECK(end && !end[1] && !cli.n, "llm %s: not one line: '%s%s'", arguments, cli.err, cli.out);
    CHECK(strstr(cli.err, says), "llm %s: '%s'", arguments, cli.err);
}

static void test_cli_refusals(void) {
    // each word of these must be named
    static const char *const options[] = {
        "-q", "--temperature", "-n", "-n abc", "-n 99999999999", "-n -2", "-c 0", "-b 0", "-t 0",
        "--temp nan", "--temp ''", "--top-k -1", "--top-p 1.5", "--min-p -0.1",
        "--repeat-penalty 0", "--repeat-last-n -2", "--seed 1x", "--seed 18446744073709551616",
        "--keep -1"};
    static const struct { int status; const char *arguments, *says; } bad[] = {
        {2, "", "MODEL"}, {2, "$S", "PROMPT"}, {2, "$S one two", "two"},
        {2, "$S one -p two", "prompts"}, {2, "$S -f x --tokens 1", "prompts"},
        {2, "$S one two three", "prompts"}, {2, "$S --tokens 1,x", "x"},
        {2, "$S --tokens ''", "--tokens"}, {2, "$S -i --tokens 1", "-i"},
        {2, "$S --bench 16", "--bench"}, {2, "$S hi --gpu fast", "fast"},
        {2, "$S --bench 16,0", "16,0"}, {1, "nowhere.gguf hi", "nowhere.gguf"},
        {1, "golden hi", "not a regular file"}, {1, "/dev/null hi", "not a regular file"},
        {1, "golden/story.txt hi", "not a GGUF file"}, {1, "$S -f nowhere.txt", "nowhere.txt"},
        {1, "$S -f golden", "golden"}, {1, "$S \"$(printf 'ab\\377')\"", "byte 2"},
        {1, "$S \"$(printf '\\355\\240\\200')\"", "byte 0"}, {1, "$S --tokens 1,2048", "2048"},
        {1, "$S --ppl nowhere.txt", "nowhere.txt"},
        {1, "$S --ppl golden/tok/bpe.tsv -c 4096", "4096"},
        {1, "$S hi --logits nowhere/x", "nowhere/x"}, {1, "$S -i", "template"},
        {1, "$G/llama.gguf hi", "tokenizer"}, {1, "$G/bert.gguf hi", "--embed"},
        {1, "golden/tok/spm.gguf hi", "no tensors"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        check_refusal(bad[i].status, bad[i].arguments, bad[i].says);
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char *rest, *word = strtok_r(text_of("%s", options[i]), " ", &rest);
        check_refusal(2, text_of("$S hi %s", options[i]), word);
        for (; word; word = strtok_r(NULL, " ", &rest))
            CHECK(strstr(cli.err, word), "llm $S hi %s: '%s'", options[i], cli.err);
    }
}

#define TENTHS "[0-9]+\\.[0-9]"
// what is printed, to the letter
static void test_cli_output(void) {
    static const struct { const char *before, *arguments, *pattern; } good[] = {
        {"", "--version", "^llm [0-9.]+\n$"}, {"", "--help", "^usage: llm MODEL"},
        {"", "$S --tokenize 'Once upon a time'", "^1656 329 659 258 530\n$"},
        {"", "--tokenize -p 'Once upon a time' -m $S", "^1656 329 659 258 530\n$"},
        {"printf 'Once upon a time' |", "$S -f - --tokenize", "^1656 329 659 258 530\n$"},
        {"", "$S --tokenize ''", "^\n$"}, {"", "golden/tok/spm.gguf --tokenize ''", "^1\n$"},
        {"", "$S --tokenize -- --help", "^[0-9 ]+\n$"},
        {"", "$S --tokenize -p --help", "^[0-9 ]+\n$"},
        {"printf 'a\\000b' |", "$S -f - --tokenize", "^64 188 65\n$"},
        {"", "x.gguf --help", "^usage: llm MODEL"}, {"", "$S 'Once upon' -n 0", "^Once upon\n$"},
        {"", "$S 'Once upon' -n 3 -n 0", "^Once upon\n$"},
        {"", "$G/llama.gguf --tokens 1,2,3 -n 5 --temp 0", "^[0-9]+( [0-9]+){4}\n$"},
        {"", "$S --ppl golden/story.txt -c 128",
             "^ppl 6\\.[56][0-9]{3} \\+- 0\\.[0-9]{4} tokens [0-9]+ windows [0-9]+\n$"},
        {"", "$S --bench 16,8", "^prefill 16 tokens " TENTHS " tok/s\ndecode 8 tokens " TENTHS
             " tok/s " TENTHS " GB/s " TENTHS " % of " TENTHS " GB/s\n$"},
        {"", "$S --info", "qwen3.*2048.*q4_K.*cache .* MB\n.*FFN .*logits .*KV.*without sharing"},
        {"", "$S Once -n 1 --gpu chain --seed 1", "^Once.*\n$"},
        {"", "$G/bert.gguf --embed hello", "^-?[0-9.e-]+( -?[0-9.e-]+){63}\n$"},
        {"", "$S --embed hello", "^-?[0-9.e-]+( -?[0-9.e-]+){255}\n$"},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        llm(good[i].before, good[i].arguments);
        CHECK(cli.status == 0, "llm %s: exit %d: %s", good[i].arguments, cli.status, cli.err);
        CHECK(matches(cli.out, good[i].pattern), "llm %s: '%s'", good[i].arguments, cli.out);
    }
    llm("", "--help");
    int lines = 0;
    for (const char *s = cli.out; *s; s++) lines += *s == '\n';
    CHECK(lines <= 40, "--help has %d lines: more than a screen", lines);
    for (size_t i = 0; i < sizeof ARCHS / sizeof *ARCHS; i++)
        CHECK(strstr(cli.out, ARCHS[i].names), "--help does not list %s", ARCHS[i].names);
}

static void test_cli_completion(void) {
    static const char *const same[] = {
        "$S 'Once upon a time' -n 20 --seed 7", "-n 20 --seed 7 -p 'Once upon a time' -m $S -t 1",
        "$S --tokens 1656,329,659,258,530 -n 20 --seed 7",
        "$S 'Once upon a time' -n 20 --seed 7 --no-display-prompt"};
    const char *first = NULL;
    for (int i = 0; i < 4; i++) {
        llm("", same[i]);
        if (!first) first = cli.out;
        CHECK(cli.status == 0 && cli.n && cli.out[cli.n - 1] == '\n', "exit %d", cli.status);
        bool equal = !strcmp(cli.out, first + (i < 2 ? 0 : 16));
        CHECK(equal, "%s: '%s', not '%s'", same[i], cli.out, first);
        bool said = matches(cli.err, "prefill .*tok/s.*decode .*tok/s.*GB/s.*peak .*MB.*seed 7\n$");
        CHECK(said, "statistics: '%s'", cli.err);
    }
    CHECK(!strncmp(first, "Once upon a time", 16), "no prompt: '%s'", first);
    llm("", "$S 'Once upon a time' -n 20");   // the seed comes from the clock
    CHECK(strcmp(cli.out, first), "no --seed, and the same text");
    llm("", "$S 'Once upon a time' -n 2 -c 2000");
    CHECK(matches(cli.err, "^note: -c 2000 .* 1024\nprefill .*\n$"), "'%s'", cli.err);
    llm("", "$S 'Once upon a time' -n 2 -c 3");
    CHECK(matches(cli.err, "^note: .* 2 tokens .*-c 5 .*\nprefill .*\n$"), "'%s'", cli.err);
    llm("printf 'a\\000b' |", "$S -f - -n 0");
    CHECK(cli.n == 4 && !memcmp(cli.out, "a\0b\n", 4), "a NUL: %zu bytes", cli.n);
    llm("", "$S 'Once upon a time' -n 5 >/dev/full");
    CHECK(cli.status == 1 && strstr(cli.err, "standard output"), "%d: '%s'", cli.status, cli.err);
}

// perplexity as llama-perplexity has it; a mean of an encoder's rows as llama.cpp's, signs and all
static void test_cli_numbers(void) {
    static const struct { int n; double want; } known[] = {{128, 6.5600}, {256, 6.1828}};
    for (int k = 0; k < (test.quick ? 1 : 2); k++) {
        llm("", text_of("$S --ppl golden/story.txt -c %d", known[k].n));
        double ppl = atof(cli.out + 4), want = known[k].want;
        CHECK(fabs(ppl / want - 1) < 0.005, "-c %d: %.4f, want %.4f", known[k].n, ppl, want);
        printf("  -c %d: perplexity %.4f, llama.cpp %.4f, limit 0.5 %%\n", known[k].n, ppl, want);
    }
    Golden g = golden_model("bert");
    char *ids = text_of("%d", g.ids[0]), *end;
    for (int i = 1; i < g.n; i++) ids = text_of("%s,%d", ids, g.ids[i]);
    llm("", text_of("$G/bert.gguf --embed --tokens %s", ids));
    double length = sqrt(squares(g.want, 64)), worst = 0;
    for (int i = 0; i < 64; i++, cli.out = end)
        worst = fmax(worst, fabs(strtod(cli.out, &end) - g.want[i] / length));
    CHECK(worst < 1e-3, "--embed is off by %.1e", worst);
}

// the storyteller with a chat template, in the place of its description
static void write_chat_model(void) {
    static const char old[] = "general.description", key[] = "tokenizer.chat_template";
    static const char mark[] = "{{ <|im_start|> }}";
    size_t n, old_length;
    Bytes b = {0};
    char *file = read_all("golden/story.gguf", &n);
    char *at = memmem(file, n, old, strlen(old));
    memcpy(&old_length, at + strlen(old) + 4, 8);
    put_text(&b, key);
    put_int(&b, GGUF_STR, 4);
    put_int(&b, old_length - (sizeof key - sizeof old), 8);
    put(&b, mark, strlen(mark));
    memcpy(at - 8, b.p, b.n);
    FILE *f = fopen(scratch("chat.gguf"), "wb");
    REQUIRE(f && fwrite(file, 1, n, f) == n && !fclose(f), "chat.gguf cannot be written");
}

static void test_cli_chat(void) {
    write_chat_model();
    llm("printf 'one\\n\\ntwo' |", "$D/chat.gguf -i -n 9 --seed 1");
    const char *first = cli.out;
    CHECK(matches(first, "^.+\n.+\n$"), "not two replies: '%s'", first);
    CHECK(matches(cli.err, "^prefill .* decode 18 tokens .*\n$"), "statistics: '%s'", cli.err);
    llm("echo two |", "$D/chat.gguf one -i -n 9 --seed 1");
    CHECK(!strcmp(cli.out, first), "PROMPT as the first message: '%s', not '%s'", cli.out, first);
    llm("printf 'a\\377' |", "$D/chat.gguf -i");
    CHECK(cli.status == 1 && strstr(cli.err, "byte 1"), "%d: '%s'", cli.status, cli.err);
}

static void test_cli_logits(void) {
    static const int32_t ids[] = {1656, 329, 659, 258, 530};
    size_t n;
    const Model *m = open_model("golden/story.gguf");
    float *want = logits_of(m, ids, 5, (Options){.chunk = 3, .window = 4096});
    llm("", "$S 'Once upon a time' -b 3 --logits $D/rows");
    float *got = read_all(scratch("rows"), &n);
    bool same = n == 5 * 2048 * sizeof *got && nmse(got, want, 5 * 2048) < 1e-9;
    CHECK(same, "%zu bytes of logits, exit %d", n, cli.status);
    llm("trap '' XFSZ; ulimit -f 1;", "$S 'Once upon a time' --logits $D/cut");
    CHECK(cli.status == 1 && strstr(cli.err, "cut"), "no room: exit %d, '%s'", cli.status, cli.err);
    CHECK(access(scratch("cut"), F_OK), "a part of the logits was left behind");
}

// Ctrl-C while it speaks or, in a chat, waits for the user: statistics, exit 130
static void test_cli_interrupt(void) {
    static const char *const arguments[] = {"golden/story.gguf Once -n 100000000 -c 64",
                                            "$D/chat.gguf Once -n 20 -i <>$D/nobody"};
    write_chat_model();
    setenv("D", test.dir, 1);
    CHECK(!mkfifo(scratch("nobody"), 0600), "no FIFO");
    for (int a = 0; a < 2; a++) {
        const char *shell = "rm -f $D/stopped; exec %s %s >$D/stopped 2>$D/said";
        char *command = text_of(shell, test.program, arguments[a]);
        size_t n = 0;
        int status = 0;
        pid_t child = fork();
        if (child == 0) _exit(execl("/bin/sh", "sh", "-c", command, NULL));
        for (int i = 0; i < 600 && n < 20; i++) {   // until it speaks
            struct stat st;
            usleep(50000);
            n = stat(scratch("stopped"), &st) ? 0 : st.st_size;
        }
        kill(child, SIGINT);
        waitpid(child, &status, 0);
        const char *said = read_all(scratch("said"), &n);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 130, "status %x, not exit 130", status);
        CHECK(matches(said, "prefill .*decode .*seed [0-9]+\n$"), "'%s'", said);
    }
}

// ==== a GPU in software ====
//
// kernels.metal runs here as it stands, and metal.c links here as it stands: three layers let it.
//    a. the emulator: threads of a threadgroup are fibers, switched at barriers and simd_* calls
//    b. the Metal library: the words and functions of Metal that kernels.metal uses, as C macros
//    c. the software Metal device behind the eight Objective-C functions that metal.c calls
//
// Threadgroups run one after another. A fiber switches only at a rendezvous: a barrier, or a
// SIMD-group function; which one goes on is the schedule's choice. Each schedule drives one
// thread (then its SIMD-group) as far as it can get, so that a missing barrier shows as a wrong
// result under one order or another; built with -fsanitize=thread, each fiber is a thread to the
// sanitizer and only barriers order memory: a race is reported under any. A barrier that some
// threads miss, lanes that part before a simd_* call: errors at once, with the line.
#ifdef LLM_METAL
#ifndef __APPLE__   // there the real device takes the place of all this
#undef _FORTIFY_SOURCE   // its longjmp forbids changing stacks
#include <dlfcn.h>
#include <setjmp.h>
#include <ucontext.h>
#if __has_include(<valgrind/memcheck.h>)
#include <valgrind/memcheck.h>
#else
#define VALGRIND_MAKE_MEM_UNDEFINED(a, n) 0
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define TSAN(x) x
#define HIDDEN __attribute__((no_sanitize("thread"), noinline))   // the emulator itself
#else
#define TSAN(x)
#define HIDDEN __attribute__((noinline))
#endif

// ---- the emulator ----

enum { SIMD = 32, MAX_THREADS = 1024, BEHIND = 64 };
enum { STACK = 4 << 20 };   // stacks so far apart that valgrind tells them apart
#define LINE(site) ((site) & 0xffff)
enum { FORWARD, REVERSE, RANDOM, ORDERS };

typedef struct {
    jmp_buf go;
    ucontext_t start;
    const char *op;                              // the rendezvous it waits at
    int site, turn, begun;
    union { double x; float m[4]; } slot[2];     // what it left there; two, for fast lanes
    void *fiber;
} EmuThread;

static struct {
    int order;
    uint32_t seed;
    int threads, groups, now, alive, waiting;    // size, SIMD-groups, running thread, ...
    int first;                                   // its thread 0 is t[first]
    uint32_t live[SIMD], ready[SIMD], simd[SIMD], active[SIMD];   // [SIMD-group] a bit a lane
    uint32_t released[SIMD], folded[SIMD];       // rendezvous so far, and the last that was folded
    double fold[SIMD];
    int tg;                                      // this threadgroup
    uint8_t *shared;                             // its memory
    void (*kernel)(void *);
    void *argument;
    int bar_site;                                // the barrier that threads wait at
    jmp_buf host;
    char *stacks;
    char error[200];
    EmuThread t[MAX_THREADS];
    char order_tg, order_sg[SIMD], begin, done;  // addresses, for happens-before
    void *host_fiber;
} emu;

#define EMU(i) emu.t[(emu.first + (i)) % MAX_THREADS]

__attribute__((format(printf, 1, 2), noreturn)) HIDDEN static void emu_fail(const char *format, ...)
{
    va_list v;
    va_start(v, format);
    vsnprintf(emu.error, sizeof emu.error, format, v);
    va_end(v);
    TSAN(__tsan_switch_to_fiber(emu.host_fiber, __tsan_switch_to_fiber_no_sync);)
    _longjmp(emu.host, 1);
}

HIDDEN static uint32_t emu_random(void) { return (emu.seed = emu.seed * 1664525u + 12345) >> 8; }

HIDDEN static int emu_bit(uint32_t m) {   // one of the bits of m, by the schedule
    if (emu.order == FORWARD) return __builtin_ctz(m);
    if (emu.order == REVERSE) return 31 - __builtin_clz(m);
    for (int skip = emu_random() % __builtin_popcount(m); skip--;) m &= m - 1;
    return __builtin_ctz(m);
}

HIDDEN static void emu_switch(void) {   // give way to whichever thread is next
    uint32_t some = 0;
    int old = emu.now, next;
    for (int g = 0; g < emu.groups; g++) some |= (uint32_t)(emu.ready[g] != 0) << g;
    if (!some)
        emu_fail("deadlock: %s line %d waits for threads that will not come", EMU(old).op,
                 LINE(EMU(old).site));
    next = emu_bit(some);
    next = next * SIMD + emu_bit(emu.ready[next]);
    if (next == old) return;
    emu.now = next;
    if (old >= 0 && _setjmp(EMU(old).go)) return;
    TSAN(__tsan_switch_to_fiber(EMU(next).fiber, __tsan_switch_to_fiber_no_sync);)
    if (EMU(next).begun) _longjmp(EMU(next).go, 1);
    EMU(next).begun = 1;
    setcontext(&EMU(next).start);
}

HIDDEN static void emu_release_simd(int g) {   // have all live lanes come to the same place?
    if (!emu.live[g] || emu.simd[g] != emu.live[g]) return;
    int one = __builtin_ctz(emu.live[g]);
    EmuThread *a = &EMU(g * SIMD + one);
    for (int i = 0; i < SIMD; i++) {
        EmuThread *b = &EMU(g * SIMD + i);
        if (emu.live[g] >> i & 1 && a->site != b->site)
            emu_fail("divergence: lane %d at %s line %d, lane %d at %s line %d", one, a->op,
                     LINE(a->site), i, b->op, LINE(b->site));
    }
    emu.active[g] = emu.ready[g] = emu.simd[g];
    emu.simd[g] = 0;
    emu.released[g]++;
}

// Waits until every live lane of this SIMD-group has come; returns which they are
HIDDEN static uint32_t emu_simd(const char *op, int site) {
    EmuThread *t = &EMU(emu.now);
    int g = emu.now / SIMD;
    uint32_t bit = 1u << emu.now % SIMD;
    t->op = op;
    t->site = site;
    emu.ready[g] &= ~bit;
    emu.simd[g] |= bit;
    emu_release_simd(g);
    emu_switch();
    return emu.active[g];
}

HIDDEN static uint32_t emu_give(const char *op, int site, double x) {   // holds float and int
    EMU(emu.now).turn ^= 1;
    EMU(emu.now).slot[EMU(emu.now).turn].x = x;
    return emu_simd(op, site);
}

// Runs in lane order, by whichever lane comes first; op is simd_sum, simd_max or simd_min.
HIDDEN static double emu_fold(const char *op, int site, double x) {
    int g = emu.now / SIMD;
    uint32_t active = emu_give(op, site, x);
    if (emu.folded[g] == emu.released[g]) return emu.fold[g];
    emu.folded[g] = emu.released[g];
    for (int i = 0, n = 0; i < SIMD; i++) {
        if (!(active >> i & 1)) continue;
        double a = emu.fold[g], b = EMU(g * SIMD + i).slot[EMU(emu.now).turn].x;
        a = op[6] == 'u' ? a + b : op[6] == 'a' ? (a > b ? a : b) : (a < b ? a : b);
        emu.fold[g] = n++ ? a : b;
    }
    return emu.fold[g];
}

HIDDEN static double emu_take(const char *op, int site, double x, int lane) {
    uint32_t active = emu_give(op, site, x);
    if (lane < 0 || lane >= SIMD || !(active >> lane & 1))
        emu_fail("%s line %d reads lane %d, which is not active", op, LINE(site), lane);
    return EMU(emu.now / SIMD * SIMD + lane).slot[EMU(emu.now).turn].x;
}

HIDDEN static int emu_lane(void) { return emu.now % SIMD; }

// Of an 8 x 8 matrix each lane holds two neighbours in a row, as it is on Apple's GPUs.
HIDDEN static int emu_row(int lane) { return lane / 16 * 4 + lane / 2 % 4; }
HIDDEN static int emu_col(int lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }
HIDDEN static int emu_holder(int row, int col) {
    return row / 4 * 16 + col / 4 * 8 + row % 4 * 2 + col / 2 % 2;
}

HIDDEN static void emu_multiply(int site, const float *ab, const float *c, float *d) {
    EmuThread *t = &EMU(emu.now);
    t->turn ^= 1;
    memcpy(t->slot[t->turn].m, ab, sizeof t->slot[0].m);
    if (emu_simd("simdgroup_multiply", site) != ~0u)
        emu_fail("simdgroup_multiply line %d without all 32 lanes", LINE(site));
    int base = emu.now / SIMD * SIMD, row = emu_row(emu_lane()), col = emu_col(emu_lane());
    float sum[2] = {c[0], c[1]};
    for (int k = 0; k < 8; k++) {
        float a = EMU(base + emu_holder(row, k)).slot[t->turn].m[k % 2];
        const float *b = EMU(base + emu_holder(k, col)).slot[t->turn].m + 2;
        sum[0] += a * b[0];
        sum[1] += a * b[1];
    }
    d[0] = sum[0];
    d[1] = sum[1];
}

HIDDEN static void emu_simd_barrier(const char *flags, int site) {
    TSAN(char *order = &emu.order_sg[emu.now / SIMD];)
    TSAN(if (!strstr(flags, "mem_none")) __tsan_release(order);)
    (void)flags;
    emu_simd("simdgroup_barrier", site);
    TSAN(if (!strstr(flags, "mem_none")) __tsan_acquire(order);)
}

HIDDEN static void emu_barrier(const char *flags, int site) {
    EmuThread *t = &EMU(emu.now);
    t->op = "threadgroup_barrier";
    t->site = site;
    if (emu.alive != emu.threads)
        emu_fail("threadgroup_barrier line %d: %d threads have left the kernel", LINE(site),
                 emu.threads - emu.alive);
    if (emu.waiting && emu.bar_site != site)
        emu_fail("divergence: threadgroup_barrier line %d, and others at line %d", LINE(site),
                 LINE(emu.bar_site));
    TSAN(if (!strstr(flags, "mem_none")) __tsan_release(&emu.order_tg);)
    (void)flags;
    emu.bar_site = site;
    emu.ready[emu.now / SIMD] &= ~(1u << emu.now % SIMD);
    if (++emu.waiting == emu.threads) {
        emu.waiting = 0;
        for (int g = 0; g < emu.groups; g++) emu.ready[g] = emu.live[g];
    }
    emu_switch();
    TSAN(if (!strstr(flags, "mem_none")) __tsan_acquire(&emu.order_tg);)
}

HIDDEN static void emu_fiber(void) {
    for (;;) {                                   // a fiber lives on, for the next threadgroup
        TSAN(__tsan_acquire(&emu.begin);)
        emu.kernel(emu.argument);
        TSAN(__tsan_release(&emu.done);)
        int g = emu.now / SIMD;
        uint32_t bit = 1u << emu.now % SIMD;
        emu.live[g] &= ~bit;
        emu.ready[g] &= ~bit;
        if (emu.waiting)
            emu_fail("a thread leaves the kernel while %d wait at threadgroup_barrier line %d",
                     emu.waiting, LINE(emu.bar_site));
        emu_release_simd(g);
        if (--emu.alive) {
            emu_switch();
            continue;
        }
        if (_setjmp(EMU(emu.now).go)) continue;
        TSAN(__tsan_switch_to_fiber(emu.host_fiber, __tsan_switch_to_fiber_no_sync);)
        _longjmp(emu.host, 2);
    }
}

HIDDEN static void emu_start(int i) {   // make thread i's fiber, or take it again
    EmuThread *t = &EMU(i);
    if (t->begun) return;
    if (!emu.stacks)
        emu.stacks = mmap(NULL, (size_t)MAX_THREADS * STACK, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TSAN(if (t->fiber) __tsan_destroy_fiber(t->fiber);)
    TSAN(t->fiber = __tsan_create_fiber(0);)
    getcontext(&t->start);
    t->start.uc_stack.ss_sp = emu.stacks + (size_t)(t - emu.t) * STACK;
    t->start.uc_stack.ss_size = STACK;
    makecontext(&t->start, emu_fiber, 0);
}

HIDDEN static void emu_threadgroup(void) {
    emu.groups = (emu.threads + SIMD - 1) / SIMD;
    emu.alive = emu.threads;
    emu.waiting = 0;
    TSAN(emu.host_fiber = __tsan_get_current_fiber();)
    TSAN(__tsan_release(&emu.begin);)
    TSAN(emu.first = (emu.first + emu.threads) % MAX_THREADS;)   // no order between neighbours
    for (int i = 0; i < emu.threads; i++) emu_start(i);
    for (int g = 0; g < emu.groups; g++) {
        int lanes = emu.threads - g * SIMD;
        emu.live[g] = emu.ready[g] = lanes < SIMD ? (1u << lanes) - 1 : ~0u;
        emu.simd[g] = 0;
    }
    emu.now = -1;
    if (!_setjmp(emu.host)) emu_switch();
}

// Runs a grid: the kernel is called once a thread, with emu.tg and emu.now saying which. Returns
// what went wrong, or NULL. Threadgroup memory is all NaN and marked undefined, and so is what
// stands behind it, which must stay so.
HIDDEN static const char *emu_run(int groups, int threads, size_t bytes, void (*kernel)(void *),
                                  void *argument) {
    long shift = emu_random(), step = groups % 7919 ? 7919 : 1;   // a prime: visits each once
    uint8_t *all = memset(malloc(groups * (bytes + BEHIND)), 0xff, groups * (bytes + BEHIND));
    emu.error[0] = 0;
    emu.threads = threads;
    emu.kernel = kernel;
    emu.argument = argument;
    for (int i = 0; i < groups && !emu.error[0]; i++) {
        emu.tg = emu.order == FORWARD ? i : emu.order == REVERSE ? groups - 1 - i
                 : (int)((i * step + shift) % groups);
        emu.shared = all + i * (bytes + BEHIND);
        (void)VALGRIND_MAKE_MEM_UNDEFINED(emu.shared, bytes);
        emu_threadgroup();
        for (int k = 0; k < BEHIND && !emu.error[0]; k++)
            if (emu.shared[bytes + k] != 0xff)
                snprintf(emu.error, sizeof emu.error, "a write past threadgroup memory");
    }
    TSAN(__tsan_acquire(&emu.done);)             // only now: threadgroups are not ordered
    free(all);
    if (!emu.error[0]) return NULL;
    for (int i = 0; i < MAX_THREADS; i++) emu.t[i].begun = 0;   // abandoned midway: start afresh
    return emu.error;
}

// ---- the Metal library ----

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef struct { half e[2]; } simdgroup_half8x8;   // a lane's two elements of an 8 x 8 matrix
typedef struct { float e[2]; } simdgroup_float8x8;

#define kernel
#define device
#define constant
#define threadgroup
#define thread
#define rsqrt(x) (1.0f / sqrtf(x))
#define max(a, b) ({ __typeof__((a) + 0) a_ = (a), b_ = (b); a_ > b_ ? a_ : b_; })
#define min(a, b) ({ __typeof__((a) + 0) a_ = (a), b_ = (b); a_ < b_ ? a_ : b_; })
#define clamp(x, a, b) min(max(x, a), b)
#define threadgroup_barrier(flags) emu_barrier(#flags, SITE)
#define simdgroup_barrier(flags) emu_simd_barrier(#flags, SITE)

#define SITE (__COUNTER__ << 16 | __LINE__)   // two calls on a line are two places
#define simd_sum(x) emu_fold("simd_sum", SITE, x)
#define simd_max(x) emu_fold("simd_max", SITE, x)
#define simd_min(x) emu_fold("simd_min", SITE, x)
#define simd_shuffle(x, i) emu_take("simd_shuffle", SITE, x, i)
#define simd_shuffle_xor(x, i) emu_take("simd_shuffle_xor", SITE, x, emu_lane() ^ (i))

#define EMU_ROW emu_row(emu_lane())
#define EMU_COL emu_col(emu_lane())
#define EMU_AT(n, turned, i) \
    ((turned) ? (EMU_COL + (i)) * (n) + EMU_ROW : EMU_ROW * (n) + EMU_COL + (i))
#define EMU_LOAD5(m, p, n, origin, turned) \
    ({ for (int i_ = 0; i_ < 2; i_++) (m).e[i_] = (p)[EMU_AT(n, turned, i_)]; })
#define EMU_LOAD3(m, p, n) EMU_LOAD5(m, p, n, 0, 0)
#define EMU_6TH(a, b, c, d, e, f, ...) f
#define simdgroup_load(...) EMU_6TH(__VA_ARGS__, EMU_LOAD5, 0, EMU_LOAD3)(__VA_ARGS__)
#define simdgroup_store(m, p, n) \
    ({ for (int i_ = 0; i_ < 2; i_++) (p)[EMU_AT(n, 0, i_)] = (m).e[i_]; })
#define simdgroup_float8x8(x) \
    ((simdgroup_float8x8){{EMU_ROW == EMU_COL ? (x) : 0, EMU_ROW == EMU_COL + 1 ? (x) : 0}})
#define simdgroup_multiply_accumulate(d, a, b, c) \
    emu_multiply(SITE, (float[4]){(a).e[0], (a).e[1], (b).e[0], (b).e[1]}, (c).e, (d).e)
#define simdgroup_multiply(d, a, b) \
    simdgroup_multiply_accumulate(d, a, b, ((simdgroup_float8x8){{0, 0}}))

#pragma GCC diagnostic ignored "-Wattributes"   // [[buffer(0)]] and its kin
#define attention metal_attention               // names that llm.c and the tests use, too
#define norm metal_norm
#define rope metal_rope
#include "kernels.metal"
#undef attention
#undef norm
#undef rope
#undef kernel
#undef device
#undef constant
#undef threadgroup
#undef thread

// ---- the software Metal device ----
//
// Kernels run when waitUntilCompleted is sent: a host that reads too early sees the old data.
// Positions of arguments come from the [[attributes]] in the source text; compiled kernels are
// found by name in this program (link with -rdynamic). The generic call passes one word a
// parameter: right on x86-64 and arm64 Linux. A buffer ends where its page ends, with nothing
// mapped behind: whoever reads on is stopped.

enum { BINDINGS = 31, PARAMS = 20, RECORDS = 4096, PAGE = 16384 };
enum { P_BUFFER, P_SHARED, KINDS = 7 };          // a kernel's parameters:
static const char *const soft_kinds[KINDS] = {
    "buffer", "shared_memory", "threadgroup_position_in_grid", "thread_index_in_threadgroup",
    "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup"};

struct SoftClass;
typedef struct { struct SoftObject *buffer; char *p; } SoftBind;
typedef struct SoftRun {
    struct SoftObject *pipeline;
    SoftBind bind[BINDINGS];
    size_t shared;
    MTLSize groups, threads;
    struct SoftRun *next;
} SoftRun;
typedef struct SoftObject {                      // any object; few fields, several uses
    const struct SoftClass *isa;
    int refs, n_params, status;
    char name[32];
    struct SoftObject *a;                        // what it keeps alive
    void *p, *pages;                             // a string's, buffer's, library's bytes
    size_t n;
    bool mine;                                   // p is ours to free
    struct { int kind, index; } param[PARAMS];
    struct { bool set; int value; } constant[N_CONSTANTS];
    SoftRun now, *runs, **last;                  // an encoder's state, a command buffer's work
} SoftObject;
typedef struct { const char *name, *type; void *code; } SoftMethod;
typedef struct SoftClass {
    const struct SoftClass *isa;
    const char *name;
    const SoftMethod *method;
} SoftClass;

static struct {
    int live, faults, pools, pooled;             // objects; misuse of the API; open pools
    int buffers, commits, n_run;                 // made since the test reset them
    SoftObject *pool[1000];                      // NULL marks where a pool begins
    struct { SoftObject *pipeline; void *bound[16]; } run[RECORDS];   // the recorder
    const char *broken;                          // the method that is to fail, or NULL,
    int after;                                   // this many calls from now, and from then on
    int hasty;                                   // stop at the first failure; 2: few formats
} soft;

__attribute__((format(printf, 1, 2))) static void soft_fault(const char *format, ...) {
    va_list v;
    va_start(v, format);
    fprintf(stderr, "software Metal: ");
    vfprintf(stderr, format, v);
    fprintf(stderr, "\n");
    va_end(v);
    soft.faults++;
}

static bool soft_breaks(const char *method) {
    return soft.broken && !strcmp(soft.broken, method) && soft.after-- <= 0;
}

static SoftObject *soft_new(const SoftClass *c) {
    SoftObject *o = calloc(1, sizeof *o);
    o->isa = c;
    o->refs = 1;
    o->last = &o->runs;
    soft.live++;
    return o;
}

static SoftObject *soft_retain(SoftObject *o) {
    o->refs++;
    return o;
}

static void soft_release(SoftObject *o) {
    if (!o || --o->refs) return;
    for (SoftRun *r = o->runs, *next; r; r = next) {
        next = r->next;
        soft_release(r->pipeline);
        for (int i = 0; i < BINDINGS; i++) soft_release(r->bind[i].buffer);
        free(r);
    }
    for (int i = 0; i < BINDINGS; i++) soft_release(o->now.bind[i].buffer);
    if (o->mine) free(o->p);
    if (o->pages) munmap(o->pages, (o->n + PAGE - 1) / PAGE * PAGE + PAGE);
    soft_release(o->a);
    free(o);
    soft.live--;
}

static SoftObject *soft_autorelease(SoftObject *o) {
    if (!soft.pools) soft_fault("%s autoreleased with no pool in place", o->isa->name);
    return soft.pool[soft.pooled++] = o;
}

void *objc_autoreleasePoolPush(void) {
    soft.pools++;
    soft.pool[soft.pooled++] = NULL;
    return &soft.pool[soft.pooled - 1];
}

void objc_autoreleasePoolPop(void *pool) {
    soft.pools--;
    while (&soft.pool[soft.pooled] != pool) soft_release(soft.pool[--soft.pooled]);
}

static const SoftClass NSString, NSError, NSArray, MTLCompileOptions, MTLFunctionConstantValues,
    Device, Buffer, Library, Function, PipelineState, Queue, Commands, Encoder;

static id soft_child(const SoftClass *c, id parent) {   // keeps its parent alive
    SoftObject *o = soft_new(c);
    o->a = soft_retain(parent);
    return o;
}

static id soft_string(const SoftClass *c, const char *s) {
    SoftObject *o = soft_new(c);
    o->p = strdup(s);
    o->mine = true;
    return soft_autorelease(o);
}

// Methods. A class's own ("+") and its instances' ("-") share a table.
#define M(R, name, ...) static R soft_##name(id self, SEL sel, ##__VA_ARGS__)
#define SELF ((SoftObject *)self)
#pragma GCC diagnostic ignored "-Wunused-parameter"   // self and the method's name

M(id, class_new) { return soft_new(self); }
M(void, object_release) { soft_release(self); }
M(id, object_retain) { return soft_retain(self); }
M(id, string_with, const char *s) { return soft_string(self, s); }
M(const char *, utf8) { return SELF->p; }
M(id, description) { return soft_string(&NSString, SELF->p); }
M(size_t, count) { return SELF->a != NULL; }
M(id, object_at, size_t i) { return i ? NULL : SELF->a; }
M(void, set_fast, bool fast) { SELF->status = !fast; }
M(id, new_queue) { return soft_child(&Queue, self); }
M(size_t, width) { return 32; }
M(size_t, max_threads) { return 1024; }
M(size_t, max_length) { return (size_t)1 << 40; }
M(void *, contents) { return SELF->p; }
M(void, set_pipeline, id pipeline) { SELF->now.pipeline = pipeline; }
M(void, end_encoding) { SELF->a->status = 1; }
M(size_t, get_status) { return SELF->status; }
M(id, get_error) { return soft_string(&NSError, SELF->p ? SELF->p : "it\ndid not run"); }
M(id, new_commands) { return soft_autorelease(soft_child(&Commands, self)); }
M(id, new_encoder) { return soft_autorelease(soft_child(&Encoder, self)); }

M(void, set_constant, const void *p, size_t type, size_t i) {
    if (i >= N_CONSTANTS || type != 29) return soft_fault("constant %zu of type %zu", i, type);
    SELF->constant[i].set = true;
    memcpy(&SELF->constant[i].value, p, sizeof(int));
}

M(id, new_library, id source, id options, id *error) {
    SoftObject *o = soft_new(&Library);
    if (!((SoftObject *)options)->status) soft_fault("fast math is on");
    o->p = strdup(((SoftObject *)source)->p);
    o->mine = true;
    for (char *c = o->p; (c = strstr(c, "//")); )
        while (*c && *c != '\n') *c++ = ' ';
    if (!strstr(o->p, "\nconstant int name [[function_constant(C_##name)]];"))
        soft_fault("function constants have other numbers than in metal.c");
    return o;
}

M(id, new_function, id name, id constants, id *error) {
    const char *want = ((SoftObject *)name)->p, *s = SELF->p;
    size_t n = strlen(want);
    int commas = 0;
    while ((s = strstr(s, "kernel void ")) && (s += 12, strncmp(s, want, n) || s[n] != '(')) ;
    if (!s) return *error = soft_string(&NSError, "no such kernel"), NULL;
    SoftObject *f = soft_child(&Function, self);
    memcpy(f->constant, ((SoftObject *)constants)->constant, sizeof f->constant);
    snprintf(f->name, sizeof f->name, "metal_%s", want);
    f->p = dlsym(RTLD_DEFAULT, f->name);
    snprintf(f->name, sizeof f->name, "%s", want);
    if (!f->p) f->p = dlsym(RTLD_DEFAULT, want);
    if (!f->p) soft_fault("kernel %s is not in this program: link with -rdynamic", want);
    for (s += n + 1; *s && *s != '{'; s++) {     // an attribute: [[name]] or [[name(index)]]
        commas += *s == ',';
        if (s[0] != '[' || s[1] != '[') continue;
        char attr[40] = "";
        int kind = 0, i = f->n_params++ % PARAMS;
        sscanf(s, "[[%39[a-z_](%d)]]", attr, &f->param[i].index);
        while (kind < KINDS && strcmp(attr, soft_kinds[kind])) kind++;
        if (kind == KINDS || i == PARAMS - 1) soft_fault("%s: cannot read %.20s", want, s);
        f->param[i].kind = kind;
    }
    if (commas != f->n_params - 1) soft_fault("%s: a parameter has no attribute", want);
    return f;
}

M(id, new_pipeline, id function, id *error) {
    SoftObject *f = function;
    for (int i = 0; i < N_CONSTANTS; i++)
        if (!f->constant[i].set) soft_fault("%s: constant %d is not set", f->name, i);
    return soft_child(&PipelineState, f);
}

static SoftObject *soft_buffer(size_t bytes, size_t align) {
    SoftObject *o = soft_new(&Buffer);
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    o->n = bytes;
    o->pages = mmap(NULL, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    mprotect((char *)o->pages + whole, PAGE, PROT_NONE);
    o->p = (char *)o->pages + (whole - bytes) / align * align;
    return o;
}

M(id, new_buffer, size_t bytes, size_t options) {
    if (options || !bytes) soft_fault("newBufferWithLength: %zu options %zu", bytes, options);
    soft.buffers++;
    return soft_buffer(bytes, 16);
}

M(id, new_buffer_no_copy, void *p, size_t bytes, size_t options, id deallocator) {
    size_t page = sysconf(_SC_PAGESIZE);
    if ((uintptr_t)p % page || bytes % page || !bytes || options || deallocator)
        soft_fault("bytesNoCopy: %p, %zu are not whole pages", p, bytes);
    SoftObject *o = soft_new(&Buffer);
    o->p = p;
    o->n = bytes;
    soft.buffers++;
    return o;
}

M(void, set_shared, size_t n, size_t i) {
    if (n % 16 || n > 32768 || i) soft_fault("threadgroup memory: %zu bytes at index %zu", n, i);
    SELF->now.shared = n;
}

static void soft_bind(SoftObject *encoder, SoftObject *buffer, size_t offset, size_t i) {
    SoftBind *b = &encoder->now.bind[i % BINDINGS];
    if (i >= BINDINGS || offset >= buffer->n || offset % 4)
        soft_fault("setBuffer: offset %zu of %zu, index %zu", offset, buffer->n, i);
    soft_release(b->buffer);
    *b = (SoftBind){buffer, (char *)buffer->p + offset};
}

M(void, set_buffer, id b, size_t at, size_t i) { soft_bind(self, soft_retain(b), at, i); }

M(void, set_bytes, const void *p, size_t n, size_t i) {
    SoftObject *o = soft_buffer(n, 4);           // exactly so many, to catch a longer struct
    if (n > 4096) soft_fault("setBytes: %zu bytes", n);
    soft_bind(self, o, 0, i);
    memcpy(o->p, p, n);
}

M(void, dispatch, MTLSize groups, MTLSize threads) {
    SoftObject *commands = SELF->a;
    if (!SELF->now.pipeline || !groups.width || !threads.width || threads.width > 1024 ||
        groups.height * groups.depth * threads.height * threads.depth != 1)
        return soft_fault("dispatch: %zu groups of %zu threads", groups.width, threads.width);
    SoftRun *r = malloc(sizeof *r);
    *r = SELF->now;
    r->groups = groups;
    r->threads = threads;
    soft_retain(r->pipeline);
    for (int i = 0; i < BINDINGS; i++)
        if (r->bind[i].buffer) soft_retain(r->bind[i].buffer);
    *commands->last = r;
    commands->last = &r->next;
    if (soft.n_run == RECORDS) return;
    soft.run[soft.n_run].pipeline = r->pipeline;
    for (int i = 0; i < 16; i++) soft.run[soft.n_run].bound[i] = r->bind[i].p;
    soft.n_run++;
}

M(void, commit) {
    if (SELF->status != 1) soft_fault("commit before endEncoding, or twice");
    SELF->status = 2;
    soft.commits++;
}

HIDDEN static void soft_kernel(void *argument) {   // one thread of a dispatch
    SoftRun *r = argument;
    SoftObject *f = r->pipeline->a;
    int t = emu.now;
    intptr_t v[PARAMS] = {0}, of[KINDS] = {0, (intptr_t)emu.shared, emu.tg, t, t % SIMD, t / SIMD,
                                           emu.groups};   // as soft_kinds
    for (int i = 0; i < f->n_params; i++)
        v[i] = f->param[i].kind ? of[f->param[i].kind] : (intptr_t)r->bind[f->param[i].index].p;
    typedef intptr_t W;
    ((void (*)(W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W))f->p)(
        v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13],
        v[14], v[15], v[16], v[17], v[18], v[19]);
}

static const char *soft_ready(SoftRun *r) {   // set function constants; is all bound?
    SoftObject *f = r->pipeline->a;
#define X(name) name = f->constant[C_##name].value;
    FUNCTION_CONSTANTS(X)
#undef X
    for (int i = 0; i < f->n_params; i++) {
        if (f->param[i].kind == P_BUFFER && !r->bind[f->param[i].index].p)
            return "a buffer is not bound";
        if (f->param[i].kind == P_SHARED && !r->shared) return "threadgroup memory has no length";
    }
    return NULL;
}

M(void, wait_completed) {
    const char *bad = NULL;
    if (SELF->status >= 4) return;
    if (SELF->status != 2) soft_fault("waitUntilCompleted before commit");
    for (SoftRun *r = SELF->runs; r && !bad; r = r->next)
        if (!(bad = soft_ready(r)))
            bad = emu_run(r->groups.width, r->threads.width, r->shared, soft_kernel, r);
    SELF->status = bad ? 5 : 4;
    if (!bad) return;
    SELF->p = strdup(bad);
    SELF->mine = true;
}

// Apple's prototypes. A function of another type does not compile; the casts of metal.c are
// compared with these strings by soft_prototypes.
#define METHOD(name, R, types, code) \
    {name, #R " " #types, (void *)_Generic(soft_##code, R(*) types: soft_##code)},
#define SOFT_CLASS(c, text, ...) \
    static const SoftClass c = {&c, text, (const SoftMethod[]){ __VA_ARGS__ \
        METHOD("retain", id, (id, SEL), object_retain) \
        METHOD("release", void, (id, SEL), object_release) {0}}};
SOFT_CLASS(NSString, "NSString",
    METHOD("stringWithUTF8String:", id, (id, SEL, const char *), string_with)
    METHOD("UTF8String", const char *, (id, SEL), utf8))
SOFT_CLASS(NSError, "NSError", METHOD("localizedDescription", id, (id, SEL), description))
SOFT_CLASS(NSArray, "NSArray",
    METHOD("count", size_t, (id, SEL), count)
    METHOD("objectAtIndex:", id, (id, SEL, size_t), object_at))
SOFT_CLASS(MTLCompileOptions, "MTLCompileOptions",
    METHOD("new", id, (id, SEL), class_new)
    METHOD("setFastMathEnabled:", void, (id, SEL, bool), set_fast))
SOFT_CLASS(MTLFunctionConstantValues, "MTLFunctionConstantValues",
    METHOD("new", id, (id, SEL), class_new)
    METHOD("setConstantValue:type:atIndex:", void, (id, SEL, const void *, size_t, size_t),
           set_constant))
SOFT_CLASS(Device, "MTLDevice",
    METHOD("newCommandQueue", id, (id, SEL), new_queue)
    METHOD("maxBufferLength", size_t, (id, SEL), max_length)
    METHOD("newLibraryWithSource:options:error:", id, (id, SEL, id, id, id *), new_library)
    METHOD("newComputePipelineStateWithFunction:error:", id, (id, SEL, id, id *), new_pipeline)
    METHOD("newBufferWithLength:options:", id, (id, SEL, size_t, size_t), new_buffer)
    METHOD("newBufferWithBytesNoCopy:length:options:deallocator:", id,
           (id, SEL, void *, size_t, size_t, id), new_buffer_no_copy))
SOFT_CLASS(Buffer, "MTLBuffer", METHOD("contents", void *, (id, SEL), contents))
SOFT_CLASS(Library, "MTLLibrary",
    METHOD("newFunctionWithName:constantValues:error:", id, (id, SEL, id, id, id *), new_function))
SOFT_CLASS(Function, "MTLFunction",)
SOFT_CLASS(PipelineState, "MTLComputePipelineState",
    METHOD("threadExecutionWidth", size_t, (id, SEL), width)
    METHOD("maxTotalThreadsPerThreadgroup", size_t, (id, SEL), max_threads))
SOFT_CLASS(Queue, "MTLCommandQueue", METHOD("commandBuffer", id, (id, SEL), new_commands))
SOFT_CLASS(Commands, "MTLCommandBuffer",
    METHOD("computeCommandEncoder", id, (id, SEL), new_encoder)
    METHOD("commit", void, (id, SEL), commit)
    METHOD("waitUntilCompleted", void, (id, SEL), wait_completed)
    METHOD("status", size_t, (id, SEL), get_status)
    METHOD("error", id, (id, SEL), get_error))
SOFT_CLASS(Encoder, "MTLComputeCommandEncoder",
    METHOD("setComputePipelineState:", void, (id, SEL, id), set_pipeline)
    METHOD("setBuffer:offset:atIndex:", void, (id, SEL, id, size_t, size_t), set_buffer)
    METHOD("setBytes:length:atIndex:", void, (id, SEL, const void *, size_t, size_t), set_bytes)
    METHOD("setThreadgroupMemoryLength:atIndex:", void, (id, SEL, size_t, size_t), set_shared)
    METHOD("dispatchThreadgroups:threadsPerThreadgroup:", void, (id, SEL, MTLSize, MTLSize),
           dispatch)
    METHOD("endEncoding", void, (id, SEL), end_encoding))

static const SoftClass *const soft_classes[] = {
    &NSString, &NSError, &NSArray, &MTLCompileOptions, &MTLFunctionConstantValues, &Device, &Buffer,
    &Library, &Function, &PipelineState, &Queue, &Commands, &Encoder};
enum { CLASSES = sizeof soft_classes / sizeof *soft_classes };

id MTLCreateSystemDefaultDevice(void) {
    bool none = soft_breaks("MTLCreateSystemDefaultDevice") || soft_breaks("MTLCopyAllDevices");
    return none ? NULL : soft_new(&Device);
}

id MTLCopyAllDevices(void) {
    SoftObject *o = soft_new(&NSArray);
    if (!soft_breaks("MTLCopyAllDevices")) o->a = soft_new(&Device);
    return o;
}

SEL sel_registerName(const char *name) { return (SEL)name; }
id object_getClass(id object) { return (id)((SoftObject *)object)->isa; }

id objc_getClass(const char *name) {
    for (int i = 0; i < CLASSES; i++)
        if (!strcmp(soft_classes[i]->name, name)) return (id)soft_classes[i];
    return NULL;
}

static id soft_fails(void) { return NULL; }

IMP class_getMethodImplementation(id class, SEL sel) {
    const SoftClass *c = class;
    if (soft_breaks(sel)) return (IMP)soft_fails;
    for (const SoftMethod *m = c->method; m->name; m++)
        if (!strcmp(m->name, sel)) return (IMP)m->code;
    soft_fault("%s has no method %s", c->name, (char *)sel);
    abort();
}

static bool soft_has(const char *selector, const char *type) {
    for (int i = 0; i < CLASSES; i++)
        for (const SoftMethod *m = soft_classes[i]->method; m->name; m++)
            if (!strcmp(m->name, selector) && !strcmp(m->type, type)) return true;
    return CHECK(false, "%s %s is not its type", selector, type);
}

// how many methods of metal.c's table have not Apple's prototype
static int soft_prototypes(void) {
    int wrong = 0;
#define X(name, selector, R, types) wrong += !soft_has(selector, #R " " #types);
    METHODS(X)
#undef X
    return wrong;
}

#endif

// ==== tests of kernels.metal and metal.c ====
//
// Kernels, each against a reference in double written from the formula, over all formats, ragged
// sizes and three schedules; whole models through metal.c against the CPU; failures of the host;
// and mutants: all of this again on broken copies, to see that it notices.

#ifdef __APPLE__
// The real device: threads run in an order of its own, nothing is recorded, no call fails.
enum { FORWARD, ORDERS, RECORDER = 0 };
typedef struct SoftObject {
    const char *name;
    struct SoftObject *a;
    struct { int value; } constant[N_CONSTANTS];
} SoftObject;
static struct {
    int live, faults, pools, buffers, commits, n_run, after, hasty;
    struct { SoftObject *pipeline; void *bound[16]; } run[1];
    const char *broken;
} soft;
static struct { int order; } emu;
static int soft_prototypes(void) { return 0; }
#else
enum { RECORDER = 1 };
#endif

// ---- kernels ----

// pairs of the first n_rot values turn, each by the cosine and sine of an angle
static void reference_rope(double *out, const double *x, int n, int n_rot, int pairing,
                           const float *turn) {
    memcpy(out, x, n * sizeof *x);
    bool pairs = pairing == ROPE_PAIRS;
    for (int p = 0; pairing != ROPE_NONE && p < n_rot / 2; p++) {
        int a = pairs ? 2 * p : p, b = pairs ? a + 1 : a + n_rot / 2;
        out[a] = x[a] * turn[2 * p] - x[b] * turn[2 * p + 1];
        out[b] = x[a] * turn[2 * p + 1] + x[b] * turn[2 * p];
    }
}

// row r of factor * w's scale * (w . x) + w's bias; size, or NULL: the sum of the absolute products
static double reference_row(const RandomMatrix *w, int r, const double *x, double factor,
                            double *size) {
    const float *f = w->f + r * w->m.cols;
    double sum = 0, all = 0;
    for (int i = 0; i < w->m.cols; i++) {
        sum += f[i] * x[i];
        all += fabs(f[i] * x[i]);
    }
    if (size) *size = all;
    return factor * (w->m.scale ? *w->m.scale : 1) * sum + (w->m.bias ? w->m.bias[r] : 0);
}

// Each test fills its own Model and Layer, and calls the function of metal.c that a model would.
typedef struct { Gpu *g; Arch arch; Model m; Layer w; Session s; } Lab;

static const char *const orders[] = {"forward", "reverse", "random"};

#define LAB_CHECK(ok, format, ...) CHECK(ok, format ", %s", __VA_ARGS__, orders[emu.order])

static Lab lab(Gpu *g) {
    return (Lab){.g = g, .arch = {.act = SILU},
                 .m = {.config = {.eps = 1e-5f, .attn_scale = 0.2f}}};
}

// runs what was encoded since lab_begin; structs point into the Lab, so only where it stays
static Session *lab_begin(Lab *x) {
    x->m.config.arch = &x->arch;
    x->s.m = &x->m;
    x->s.gpu = x->g;
    gpu_begin(x->g);
    return &x->s;
}

static void lab_end(Lab *x, const char *what) {
    bool ok = gpu_wait(x->g);
    LAB_CHECK(ok, "%s: %s", what, x->g->why);
    x->g->why[0] = 0;
}

static void *lab_bytes(Gpu *g, size_t n) {   // ending where nothing is mapped behind
    return (char *)gpu_share(g, NULL, (n + 15) / 16 * 16) + -n % 16;
}

static float *lab_floats(Gpu *g, size_t n, float scale) {
    float *x = lab_bytes(g, n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * noise();
    return x;
}

static Norm lab_norm(Gpu *g, int n, int group) {
    return (Norm){lab_floats(g, n, 1), NULL, n, group};
}

static void lab_drop(Gpu *g) {   // frees all buffers and variants
    while (g->n_shared) send(g, release, g->shared[--g->n_shared].buffer);
    while (g->n_pipelines) send(g, release, g->pipeline[--g->n_pipelines].state);
}

// got against want, errors relative to size (NULL: 1): the sum of the absolute products
static void lab_compare(const char *name, int type, const float *got, const double *want,
                        const double *size, size_t n, double limit) {
    double worst = 0;
    for (size_t i = 0; i < n && worst == worst; i++) {   // a NaN sticks
        double e = fabs(got[i] - want[i]) / (size ? size[i] + 1e-3 : 1);
        if (!(e <= worst)) worst = e;
    }
    LAB_CHECK(worst <= limit, "%s %s: error %.2g, limit %.0e", name,
              type < 0 ? "" : quant_name(type), worst, limit);
}

// columns that a format allows and a tiling does not like
static int format_cols(int type, bool wide) {
    int block = format_block(type);
    if (!wide) return block == 1 ? 101 : block == 32 ? 96 : block;
    return block == 1 ? 1061 : block == 32 ? 1056 : block == 256 ? 1280 : 1152;
}

static int other_format(int type) {   // for the same columns
    switch (format_block(type)) {
    case 1: return type == FORMAT_F16 ? FORMAT_BF16 : FORMAT_F16;
    case 32: return type == FORMAT_Q8_0 ? 2 : FORMAT_Q8_0;
    case 256: return type == 12 ? 14 : 12;
    }
    return type;
}

// It starts a few bytes behind an aligned address, as tensors do.
static RandomMatrix lab_matrix(Gpu *g, int type, int rows, int cols) {
    int skew = format_block(type) == 1 ? 4 : 6;
    size_t bytes = quant_row_bytes(type, (size_t)rows * cols);
    return random_matrix((uint8_t *)lab_bytes(g, bytes + skew) + skew, type, rows, cols, false);
}

static void kernel_embed(Gpu *g, int type) {
    enum { V = 7, N = 3 };
    Lab x = lab(g);
    int cols = format_cols(type, true);
    RandomMatrix w = lab_matrix(g, type, V, cols);
    double *want = need(N * cols * sizeof *want);
    x.m.embd = w.m;
    x.m.config.embd_scale = 3;
    x.s.x = lab_floats(g, N * cols, 1);
    g->ids = memcpy(lab_bytes(g, N * sizeof *g->ids), (int32_t[N]){6, 0, 3}, N * sizeof *g->ids);
    for (int i = 0; i < N * cols; i++)
        want[i] = 3 * w.f[(size_t)g->ids[i / cols] * cols + i % cols];
    run_embed(lab_begin(&x), N);
    lab_end(&x, "embed");
    lab_compare("embed", type, x.s.x, want, NULL, N * cols, 2e-6);
}

// three matrices of one input with norm and biases; one with residual and soft cap; gate and up
static void kernel_gemv(Gpu *g, int type) {
    static const int rows[3] = {13, 13, 3};
    static const char *const names[] = {"gemv", "gemv add", "gemv glu"};   // by epilogue
    Lab x = lab(g);
    int cols = format_cols(type, true), act = type % 3;
    RandomMatrix w[3];
    float *in = lab_floats(g, cols, 1), *y[3], scale = 1.5f;
    double xs[1280], want[13], size[13];
    const Matrix *m[3];
    Norm norm = lab_norm(g, cols, 0);
    x.arch.act = act;
    for (int i = 0; i < 3; i++) {   // the second is of another format
        w[i] = lab_matrix(g, i == 1 ? other_format(type) : type, rows[i], cols);
        w[i].m.bias = i == 1 ? NULL : lab_floats(g, rows[i], 1);
        w[i].m.scale = i == 1 ? NULL : &scale;
        y[i] = lab_floats(g, rows[i], 9);
        m[i] = &w[i].m;
    }
    for (int k = EPILOGUE_STORE; k <= EPILOGUE_GLU; k++) {
        bool add = k == EPILOGUE_ADD, glu = k == EPILOGUE_GLU;
        float cap = add ? 2 : 0, factor = glu ? 1 : 2, before[13];
        if (glu) w[1].m.bias = lab_floats(g, rows[1], 1);
        memcpy(before, y[0], sizeof before);
        reference_norm(xs, in, cols, add ? NULL : &norm, RMS, 1e-5);
        run_gemv(lab_begin(&x), m, 3 - (k > 0) - add, in, add ? NULL : &norm, y, k, cap, factor);
        lab_end(&x, names[k]);
        for (int i = 0; i < (k ? 1 : 3); i++) {
            for (int r = 0; r < rows[i]; r++) {
                double a, b, v = reference_row(&w[i], r, xs, factor, &a), u = 1;
                if (glu) u = reference_row(&w[1], r, xs, 1, &b);
                want[r] = glu ? reference_activation(act, v, u, true)
                          : add ? before[r] + cap * tanh(v / cap) : v;
                size[r] = glu ? (a + 1) * (b + 1) * (act == RELU2 ? a + 1 : 1) : 3 * a + 10;
            }
            lab_compare(names[k], type, y[i], want, size, rows[i], 1e-6);
        }
    }
}

// n tokens: 37 take tiles of 32, 5 tiles of 8. Epilogues in turn: bias, residual and cap, GLU.
static void lab_gemm(Gpu *g, int type, int n, bool int8, const char *name) {
    enum { ROWS = 71 };
    Lab x = lab(g);
    int cols = format_cols(type, false), way = (type + n) % (EPILOGUE_GLU + 1);
    RandomMatrix w = lab_matrix(g, type, ROWS, cols);
    float *in = lab_floats(g, n * cols, 1), *y = lab_floats(g, n * ROWS, 1),
          *gate = lab_floats(g, n * ROWS, 2), cap = way == EPILOGUE_ADD ? 3 : 0;
    double *want = need(2 * n * ROWS * sizeof *want), *size = want + n * ROWS, xs[256];
    w.m.bias = way == EPILOGUE_STORE ? lab_floats(g, ROWS, 1) : NULL;
    for (int i = 0; int8 && i < n * cols; i++)   // inputs that their codes represent exactly
        in[i] = i % 32 == 5 ? 127 / 64.0f : rintf(127 * in[i]) / 64;
    for (int i = 0; !int8 && i < ROWS * cols; i++) w.f[i] = (float)(_Float16)w.f[i];
    g->codes = int8 ? lab_bytes(g, n * cols) : NULL;
    g->scales = int8 ? lab_floats(g, n * (cols / 32) * 3, 1) : NULL;
    for (int i = 0; i < n * ROWS; i++) {
        if (i % ROWS == 0) reference_norm(xs, in + i / ROWS * cols, cols, NULL, RMS, 0);
        double v = reference_row(&w, i % ROWS, xs, 2, &size[i]);
        want[i] = way == EPILOGUE_STORE ? v : way == EPILOGUE_ADD ? y[i] + cap * tanh(v / cap)
                  : reference_activation(SILU, gate[i], v, true);
        size[i] = 3 * size[i] + 10;
    }
    run_gemm(lab_begin(&x), &w.m, in, gate, y, n, way, cap, 2);
    lab_end(&x, name);
    lab_compare(name, type, y, want, size, n * ROWS, 1e-6);
    g->codes = NULL;
}

static void kernel_gemm(Gpu *g, int type) {
    lab_gemm(g, type, 37, false, "gemm");
    lab_gemm(g, type, 5, false, "gemm few");
    if (format_block(type) > 1) lab_gemm(g, type, 33, true, "gemm int8");
}

static void lab_ffn_block(Gpu *g, int type, int inner, int dim, int ff) {
    Lab x = lab(g);
    RandomMatrix wo = lab_matrix(g, type, dim, inner), gate = lab_matrix(g, type, ff, dim);
    RandomMatrix up = lab_matrix(g, other_format(type), ff, dim);
    RandomMatrix down = lab_matrix(g, type, dim, ff);
    double *att = need((inner + 3 * dim + 2 * ff) * sizeof *att), *n = att + inner, *want = n + dim;
    double *size = want + dim, *h = size + dim, *h_size = h + ff;
    float *sum = need(dim * sizeof *sum);
    x.m.config.dim = dim;
    x.w = (Layer){.ff = ff, .o = wo.m, .gate = gate.m, .up = up.m, .down = down.m,
                  .ffn_norm = lab_norm(g, dim, 0)};
    x.s = (Session){.o.gpu_block = true, .att = lab_floats(g, inner, 0.01f),
                    .x = lab_floats(g, dim, 1), .gate = lab_floats(g, ff + dim, 1)};
    reference_norm(att, x.s.att, inner, NULL, RMS, 0);
    for (int r = 0; r < dim; r++) sum[r] = x.s.x[r] + reference_row(&wo, r, att, 1, NULL);
    reference_norm(n, sum, dim, &x.w.ffn_norm, RMS, 1e-5);
    for (int r = 0; r < ff; r++) {
        double a, b, v = reference_row(&gate, r, n, 1, &a), u = reference_row(&up, r, n, 1, &b);
        h[r] = reference_activation(SILU, v, u, true);
        h_size[r] = a * b;
    }
    for (int r = 0; r < dim; r++) {
        want[r] = sum[r] + reference_row(&down, r, h, 1, NULL);
        reference_row(&down, r, h_size, 1, &size[r]);
        size[r] += 10;
    }
    bool fits = run_block(lab_begin(&x), &x.w);
    LAB_CHECK(fits, "ffn_block does not take dim %d", dim);
    lab_end(&x, "ffn_block");
    lab_compare("ffn_block", type, x.s.x, want, size, dim, 1e-6);
}

static void kernel_block(Gpu *g, int type) {
    lab_ffn_block(g, type, 256, 256, 256);
    if (type == FORMAT_F16) lab_ffn_block(g, type, 33, 64, 100);
    if (type == FORMAT_F16) lab_ffn_block(g, type, 64, 1024, 1056);
    if (type == FORMAT_Q8_0) lab_ffn_block(g, type, 64, 64, 96);
    if (type == FORMAT_Q8_0) lab_ffn_block(g, type, 64, 1024, 1056);
    if (type == 12) lab_ffn_block(g, type, 256, 1024, 1280);   // q4_K
}

// Attention: rows of an old ring, then n new tokens through rope and attention, or (n >= 8)
// flash_attention, or (n = 1) the fused kernel. Rows that are empty hold NaN.
static const AttentionCase GPU_ATTENTION[] = {   // heads kv hd hd pos n rows window keep
    {"", 4, 2, 128, 128, 0, 1, 20, 16, 0, true, .n_rot = 128, ROPE_HALVES, .normed = true},
    {"", 4, 2, 32, 32, 77, 1, 30, 21, 3, true, .n_rot = 32, ROPE_PAIRS},
    {"", 2, 1, 64, 64, 150, 1, 160, 140, 0, true, true, false, 5, 32, ROPE_HALVES, .normed = true},
    {"", 2, 2, 96, 96, 9, 1, 40, 5, 2, true, true, .n_rot = 96, ROPE_HALVES},
    {"", 1, 1, 256, 256, 5, 1, 16, 16, 0, true, false, false, 20, 256, ROPE_NONE, false},
    {"", 4, 2, 96, 96, 31, 5, 29, 20, 4, true, true, .n_rot = 48, ROPE_PAIRS, .normed = true},
    {"", 4, 2, 32, 32, 0, 37, 80, 40, 0, true, .n_rot = 32, ROPE_PAIRS},
    {"", 2, 1, 64, 64, 100, 37, 103, 50, 6, true, true, false, 5, 64, ROPE_HALVES, .normed = true},
    {"", 2, 2, 128, 128, 40, 9, 50, 24, 0, true, .n_rot = 96, ROPE_HALVES, .normed = true},
    {"", 2, 1, 32, 32, 0, 19, 30, 8, 0, false, .n_rot = 32, ROPE_NONE},
    {"", 1, 1, 256, 256, 10, 8, 40, 64, 0, true, .n_rot = 256, ROPE_HALVES},
    {"", 2, 1, 32, 32, 5, 1, 16, 0, 0, true, .n_rot = 32, ROPE_PAIRS},   // sees nothing
    {"", 2, 1, 32, 32, 5, 9, 16, 0, 0, true, .n_rot = 32, ROPE_PAIRS},
    // the first of rows 0..31, and the first of rows 32..63
    {"", 2, 1, 32, 32, 130, 9, 80, 5, 1, true, .n_rot = 32, ROPE_PAIRS},
    {"", 2, 1, 32, 32, 24, 9, 80, 40, 0, true, .n_rot = 32, ROPE_PAIRS},
};

static void naive_head(const AttentionCase *t, const float *x, const Norm *norm, const float *turn,
                       double *out) {
    double v[256];
    reference_norm(v, x, t->hd, norm->w ? norm : NULL, RMS, 1e-5);
    reference_rope(out, v, t->hd, t->n_rot, t->pairing, turn);
}

static void lab_attention(Gpu *g, const AttentionCase *t) {
    int hd = t->hd, H = t->n_head, KV = t->n_kv, n = t->n, ring = KV * t->rows * hd;
    int all = n * H * hd;
    Lab x = lab(g);
    Attention a = attention_of(t);   // what is wanted: q, k and v as they will be
    float loud = t->pos + n == 1 ? 300 : 1;   // of one key the weight is 1, whatever its score
    double *q = need(all * sizeof *q), head[256], e = 0;
    Cache c = {lab_bytes(g, 2 * ring), lab_bytes(g, 2 * ring), lab_bytes(g, 4 * t->rows), t->rows,
               t->window, t->keep, NULL, NULL};
    memcpy(c.pos, a.pos_k, 4 * t->rows);
    for (int i = 0; i < ring; i++) {
        bool empty = c.pos[i / hd % t->rows] < 0;
        c.k[i] = empty ? 0x7e00 : a.k[i];
        c.v[i] = empty ? 0x7e00 : a.v[i];
    }
    Config *config = &x.m.config;
    config->rope = t->pairing == ROPE_NONE ? ROPE_HALVES : t->pairing;   // the layer has none
    config->hd = config->vd = hd;
    config->n_rot = t->n_rot;
    config->attn_cap = t->softcap;
    config->causal = t->causal;
    x.w = (Layer){.n_head = H, .n_kv = KV, .rotated = t->pairing != ROPE_NONE};
    if (t->normed) x.w.q_norm = (Norm){lab_floats(g, hd, loud), NULL, hd, hd};
    if (t->normed) x.w.k_norm = lab_norm(g, hd, hd);
    if (t->sinks) a.sinks = x.w.sinks = lab_floats(g, H, 3);
    a.scale = config->attn_scale;
    x.s = (Session){.cache = &c, .pos = t->pos, .q = lab_floats(g, all, 1),
                    .k = lab_floats(g, n * KV * hd, 1), .v = lab_floats(g, n * KV * hd, 1),
                    .att = lab_floats(g, all, 1), .angles = {lab_floats(g, n * t->n_rot, 1)}};
    float *want_q = (float *)a.q;
    uint16_t *want_k = (uint16_t *)a.k, *want_v = (uint16_t *)a.v;
    for (int i = 0; i < n * (H + KV); i++) {   // rotated queries; new keys and values in their rows
        int token = i / (H + KV), h = i % (H + KV), kv = h - H;
        bool query = h < H;
        size_t from = (query ? token * H + h : token * KV + kv) * hd,
               at = (kv * t->rows + cache_row(&c, t->pos + token)) * hd;
        naive_head(t, (query ? x.s.q : x.s.k) + from, query ? &x.w.q_norm : &x.w.k_norm,
                   x.s.angles[0] + token * t->n_rot, head);
        for (int j = 0; j < hd; j++) {
            if (query) q[from + j] = want_q[from + j] = head[j];
            if (query) continue;
            want_k[at + j] = quant_f32_to_f16(head[j]);
            want_v[at + j] = quant_f32_to_f16(x.s.v[from + j]);
        }
    }
    const char *name = text_of("%s, case %d", n >= 8 ? "flash_attention" : "attention",
                               (int)(t - GPU_ATTENTION));
    run_attention(lab_begin(&x), &x.w, n);
    lab_end(&x, name);
    lab_compare(name, -1, x.s.att, attention_wanted(a), NULL, all, n >= 8 ? 2e-3 : 3e-4);
    if (n > 1) lab_compare("rope", -1, x.s.q, q, NULL, all, 1e-5);
    for (int i = 0; i < ring; i++)
        if (c.pos[i / hd % t->rows] >= 0)
            e = fmax(e, fmax(fabs(half_value(c.k[i]) - half_value(a.k[i])),
                             fabs(half_value(c.v[i]) - half_value(a.v[i]))));
    LAB_CHECK(e < 4e-3, "%s: its cache is off by %g", name, e);
}

static void kernel_attention(Gpu *g, int unused) {
    (void)unused;
    for (size_t i = 0; i < sizeof GPU_ATTENTION / sizeof *GPU_ATTENTION; i++)
        lab_attention(g, &GPU_ATTENTION[i]);
}

static void kernel_norms(Gpu *g, int unused) {
    enum { N = 3 };
    static const int sizes[] = {1000, 64, 45};
    (void)unused;
    for (int k = 0; k < 3; k++) {
        int n = sizes[k];
        Lab x = lab(g);
        float *in = lab_floats(g, N * n, 2), *y = lab_floats(g, N * n, 1);
        Norm w = {lab_floats(g, n, 1), lab_floats(g, n, 1), n, 0};
        double *want = need(N * n * sizeof *want);
        struct norm_args a = {n, 1e-5f};
        Dispatch d = {"norm", {in, w.w, w.b, y}, 4, N, NORM_THREADS, NORM_FLOATS,
                      {[C_CENTRED] = 1, [C_BIASES] = 1}};
        reference_norm(want, in, N * n, &(Norm){w.w, NULL, n, n}, RMS, 1e-5);
        for (int i = 0; i < N * n; i++) want[i] += y[i];
        x.m.config.dim = n;
        run_norm(lab_begin(&x), in, &w, y, N, EPILOGUE_ADD);
        lab_end(&x, "norm");
        lab_compare("norm", -1, y, want, NULL, N * n, 1e-5);
        for (int i = 0; i < N * n; i++) in[i] += 30;   // a mean that is large beside the deviation
        reference_norm(want, in, N * n, &(Norm){w.w, w.b, n, n}, LAYERNORM, 1e-5);
        gpu_dispatch(lab_begin(&x)->gpu, &d, &a, sizeof a);
        lab_end(&x, "norm centred");
        lab_compare("norm centred", -1, y, want, NULL, N * n, 3e-5);
    }
}

static void kernel_argmax(Gpu *g, int unused) {
    (void)unused;
    for (int n = 700; n < 6000; n += 4303)
        for (int nan = 0; nan < 2; nan++) {
            Lab x = lab(g);
            struct argmax_args a = {n};
            float *in = lab_floats(g, n, 1);
            int32_t *best = lab_bytes(g, 4);
            Dispatch d = {"argmax", {in, best}, 2, 1, threads_for(n, ARGMAX_THREADS),
                          ARGMAX_FLOATS, {0}};
            for (int i = 0; i < n; i++) in[i] -= 5;
            in[n - 2] = in[n / 2 + 1] = in[n - 1] = in[(n / 2 + 1025) % n] = -2;
            for (int i = 0; nan && i < n; i++) in[i] = NAN;
            gpu_dispatch(lab_begin(&x)->gpu, &d, &a, sizeof a);
            lab_end(&x, "argmax");
            LAB_CHECK(*best == (nan ? 0 : n / 2 + 1), "argmax of %d: %d", n, *best);
        }
}

// What must have run, as the recorder saw it: variants of kernels, and how many formats of each.
static const struct { const char *name; int formats; } VARIANTS[] = {
    {"embed", 28}, {"gemv", 28}, {"gemv glu", 28}, {"gemm", 28}, {"gemm few", 28},
    {"gemm int8", 25}, {"quantize", 1}, {"ffn_block", 28}, {"norm", 1}, {"norm centred", 1},
    {"rope", 1}, {"attention", 1}, {"flash_attention", 1}, {"argmax", 1},
};
enum { N_VARIANTS = sizeof VARIANTS / sizeof *VARIANTS };

// marks what was dispatched since the test reset the recorder
static void note_variants(bool ran[N_VARIANTS][N_FORMATS]) {
    for (int r = 0; r < soft.n_run; r++) {
        const SoftObject *f = soft.run[r].pipeline->a;
        bool glu = !strcmp(f->name, "gemv") && f->constant[C_EPILOGUE].value == EPILOGUE_GLU;
        char name[64];
        snprintf(name, sizeof name, "%s%s%s%s%s", f->name, f->constant[C_INT8].value ? " int8" : "",
                 f->constant[C_TILE_TOKENS].value == GEMM_FEW ? " few" : "", glu ? " glu" : "",
                 f->constant[C_CENTRED].value ? " centred" : "");
        for (int v = 0; v < N_VARIANTS; v++)
            for (int t = 0; t < N_FORMATS && !strcmp(VARIANTS[v].name, name); t++)
                ran[v][t] |= f->constant[C_FORMAT_0].value == FORMATS[t];
    }
}

static void check_variants(bool ran[N_VARIANTS][N_FORMATS]) {
    char name[40];
    for (const char *s = metal_source; (s = strstr(s, "\nkernel void ")); s++) {
        bool known = false;
        sscanf(s, "\nkernel void %39[a-z_0-9]", name);
        for (int v = 0; v < N_VARIANTS; v++) known |= !strcmp(VARIANTS[v].name, name);
        CHECK(known, "kernel %s has no row in VARIANTS", name);
    }
    for (int v = 0; v < N_VARIANTS; v++) {
        int count = 0, want = VARIANTS[v].formats;
        for (int t = 0; t < N_FORMATS; t++) count += ran[v][t];
        printf("  %-16s %2d of %2d formats\n", VARIANTS[v].name, count, want);
        CHECK(count == want, "%s: %d formats of %d", VARIANTS[v].name, count, want);
    }
}

static void check_counters(void) {
    CHECK(soft.live == 0 && soft.pools == 0, "%d objects leak, %d pools are open", soft.live,
          soft.pools);
    CHECK(soft.faults == 0, "%d misuses of the API", soft.faults);
}

// In order to add a kernel: its test, and a row here and in VARIANTS.
static const struct { void (*fn)(Gpu *g, int type); bool formats; } KERNEL_TESTS[] = {
    {kernel_embed, true}, {kernel_gemv, true}, {kernel_gemm, true}, {kernel_block, true},
    {kernel_attention, false}, {kernel_norms, false}, {kernel_argmax, false},
};

// every kernel and format in each schedule; with --quick each format in one of them, in turn
static void test_metal_kernels(void) {
    bool ran[N_VARIANTS][N_FORMATS] = {{0}};
    Gpu *g = gpu_new();
    void *pool = objc_autoreleasePoolPush();
    bool ok = gpu_library(g);
    CHECK(ok, "%s", g->why);
    objc_autoreleasePoolPop(pool);
    for (int i = 0; i < N_FORMATS * ORDERS; i++) {
        int type = FORMATS[i / ORDERS];
        bool few = type < 2 || type == 7 || type == 8 || type == 12;
        emu.order = i % ORDERS;
        for (size_t k = 0; ok && k < sizeof KERNEL_TESTS / sizeof *KERNEL_TESTS; k++) {
            bool formats = KERNEL_TESTS[k].formats, turn = i / ORDERS % ORDERS == emu.order;
            if (formats ? test.quick && !turn : i >= ORDERS) continue;
            if (soft.hasty && (test.failures || (soft.hasty == 2 && !few))) continue;
            soft.n_run = 0;
            KERNEL_TESTS[k].fn(g, type);
            note_variants(ran);
            lab_drop(g);
            clean_up();
        }
    }
    emu.order = FORWARD;
    Session s = {.gpu = g};
    gpu_close(&s);
    if (RECORDER && soft.hasty < 2) check_variants(ran);
    CHECK(soft_prototypes() == 0, "prototypes differ from Apple's");
    check_counters();
}

// ---- whole models ----

static bool has_codes(const Matrix *w) { return !quant_row_bytes(w->type, 1); }

// dispatches of n tokens of which `rows` want logits: 5 a layer for one token, 11 for a chunk, one
// more for each post-norm, and for each product in integers; embedding; norm and gemm, or gemv and
// argmax, for each 16 rows of logits
static int expected_dispatches(const Session *s, int n, int rows) {
    const Model *m = s->m;
    int total = 1 + (rows + LOGIT_ROWS - 1) / LOGIT_ROWS * 2;
    for (int l = 0; l < m->config.n_layer; l++) {
        const Layer *w = &m->layers[l];
        const Matrix *all[] = {&w->q, &w->k, &w->v, &w->o, &w->gate, &w->up, &w->down};
        total += n > 1 ? 11 : s->o.gpu_block && !w->attn_post_norm.w ? 3 : 5;
        total += (w->attn_post_norm.w != NULL) + (w->ffn_post_norm.w != NULL);
        for (int i = 0; i < 7; i++) total += s->o.gpu_int8 && n > GEMM_FEW && has_codes(all[i]);
    }
    for (int r = rows; r > GEMM_FEW; r -= LOGIT_ROWS)
        total += s->o.gpu_int8 && has_codes(&m->output);
    return total;
}

// Logits of ids[from .. n-1], into `to`. The GPU's recorder must have seen exactly the dispatches
// of the chunks after position p (a fall-back to the CPU is a failure), in so many command buffers,
// and nothing is allocated but the history of tokens.
static void eval_rows(Session *s, const int32_t *ids, int n, int from, int p, float *to) {
    int want = 0, commits = 0, buffers = soft.buffers, layers = s->m->config.n_layer;
    bool gpu = !s->o.cpu && RECORDER;
    size_t allowed = allocations + (n + 1 > (int)s->history.room);
    for (int left; p < n; p += left) {
        left = n - p < s->o.chunk ? n - p : s->o.chunk;
        int rows = p + left <= from ? 0 : p < from ? p + left - from : left;
        want += expected_dispatches(s, left, rows);
        commits += 1 + (left > 1) * layers / (layers / MAX_COMMANDS + SPLIT_LAYERS);
        commits += rows > 0 ? (rows - 1) / LOGIT_ROWS : 0;
    }
    soft.n_run = soft.commits = 0;
    get_rows(s, ids, n, from, to - from * s->m->config.n_vocab);
    CHECK(!s->o.cpu == !!s->gpu, "%s: the GPU gave up", s->m->config.name);
    CHECK(!gpu || (s->gpu && soft.n_run == want), "%d dispatches, expected %d", soft.n_run, want);
    CHECK(!gpu || soft.commits == commits, "%d commits, expected %d", soft.commits, commits);
    CHECK(!gpu || soft.buffers == buffers, "%d buffers made in forward", soft.buffers - buffers);
    CHECK(allocations == allowed, "%zu allocations in forward", allocations - allowed);
    for (int l = 0; l < layers; l++)
        for (int r = 0; r < s->cache[l].rows; r++)
            CHECK(s->cache[l].pos[r] < n, "layer %d: a row of the future", l);
}

// One token: each weight matrix is bound by one dispatch, which reads it once; so are K and V.
static void check_reads(const Session *s) {
    for (int l = 0; l <= s->m->config.n_layer; l++) {
        const Layer *w = &s->m->layers[l];
        const Matrix *all[] = {&w->q, &w->k, &w->v, &w->o, &w->gate, &w->up, &w->down};
        bool last = l == s->m->config.n_layer;
        for (int i = 0; i < (last ? 1 : 9); i++) {
            const void *p = i < 7 ? matrix_base(last ? &s->m->output : all[i])
                          : i == 7 ? s->cache[l].k : s->cache[l].v;
            int times = 0;
            for (int r = 0; r < soft.n_run; r++) {
                bool row = !strcmp(soft.run[r].pipeline->a->name, "embed");   // one row of the head
                for (int b = 0; b < 12 && !row; b++) times += soft.run[r].bound[b] == p;
            }
            CHECK(times == 1, "layer %d: operand %d is read %d times", l, i, times);
        }
    }
}

// stderr goes to a file; what came there, and to the screen again
static int mute(void) {
    int old = dup(2), fd = open(scratch("said"), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    dup2(fd, 2);
    close(fd);
    return old;
}

static const char *unmute(int old) {
    size_t n;
    dup2(old, 2);
    close(old);
    return read_all(scratch("said"), &n);
}

static bool one_line(const char *said) {
    const char *end = strchr(said, '\n');
    return end && !end[1];
}

// on the GPU if it takes the model, else with a line that says what is wrong
static bool open_gpu(Session *s, const Model *m, Options o) {
    Error e = {{0}};
    int old = mute();
    bool ok = session_open(s, m, o, &e);
    const char *said = unmute(old), *name = m->config.name;
    CHECK(ok, "%s: %s", name, e.text);
    CHECK(!s->o.cpu && s->gpu ? !*said : s->o.cpu || one_line(said), "%s says '%s'", name, said);
    for (int l = 0; l < m->config.n_layer; l++)   // a warm-up leaves no trace
        for (int r = 0; r < s->cache[l].rows; r++)
            CHECK(s->cache[l].pos[r] == -1, "%s: row %d is taken", name, r);
    return s->gpu != NULL;
}

// A prompt in chunks, then token by token; then cut back and on again. `far`: how far from the
// golden logits (NULL: none) both may be; `near`: how far GPU and CPU may be from each other.
// False if the GPU does not take the model.
static bool compare_model(const Model *m, Options o, const int32_t *ids, int n, const float *golden,
                          double far, double near) {
    Session s[2];
    size_t V = m->config.n_vocab;
    const char *name = m->config.name;
    float *logits = need(2 * n * V * sizeof *logits), *of[2] = {logits, logits + n * V};
    int prompt = n * 5 / 6, best = 0, cut = n - 4;
    o.threads = 1;
    bool opened = open_gpu(&s[0], m, o);
    o.cpu = true;
    open_gpu(&s[1], m, o);
    for (int cpu = 0; opened && cpu < 2; cpu++) {
        eval_rows(&s[cpu], ids, prompt, 0, 0, of[cpu]);
        for (int i = prompt; i < n; i++) eval_rows(&s[cpu], ids, i + 1, i, i, of[cpu] + i * V);
        if (!cpu && s[0].gpu && !o.gpu_block && RECORDER) check_reads(&s[0]);
    }
    for (size_t i = 1; i < V; i++) best = s[0].logits[i] > s[0].logits[best] ? (int)i : best;
    CHECK(!opened || gpu_argmax(&s[0], s[0].logits) == best, "%s: argmax %d", name, best);
    CHECK(gpu_argmax(&s[0], s[0].logits + V) == -1, "%s: the argmax of other logits", name);
    double d = nmse(of[0], of[1], n * V), g = golden && opened ? nmse(of[0], golden, n * V) : 0;
    CHECK(d <= near, "%s: GPU and CPU differ by %.1e, limit %.0e", name, d, near);
    CHECK(g <= far, "%s: %.1e from golden, limit %.0e", name, g, far);
    for (int cpu = 0; opened && cpu < 2; cpu++) {
        int p = rows_resident(&s[cpu], cut - 1) ? cut - 1 : 0;
        eval_rows(&s[cpu], ids, cut, cut - 1, p, of[cpu]);
        eval_rows(&s[cpu], ids, n, n - 2, cut, of[cpu] + V);
        CHECK(gpu_argmax(&s[cpu], s[cpu].logits) == -1, "%s: the argmax of two rows", name);
        session_truncate(&s[cpu], 0);
        eval_rows(&s[cpu], ids, prompt, prompt - 1, 0, of[cpu] + 3 * V);
    }
    d = nmse(of[0], of[1], 4 * V);
    CHECK(d <= 4 * near, "%s: with a prefix reused, they differ by %.1e", name, d);
    session_close(&s[0]);
    session_close(&s[1]);
    return opened;
}

static const char *const GPU_MODELS[] = {   // the first three with --quick
    "llama", "gemma2", "gemma3.iq4_nl", "gemma3", "phi3", "llama256.q4_K_M", "mistral3", "qwen2",
    "qwen3", "gemma", "llama3-freqs", "llama-linear", "qwen2-yarn", "phi3-long", "phi3-short",
    "llama.q4_0", "qwen2.q5_1", "qwen2-256.q2_K"};

static void test_metal_models(void) {
    int models = test.quick ? 3 : (int)(sizeof GPU_MODELS / sizeof *GPU_MODELS);
    for (int i = 0; i < models; i++) {
        const char *name = GPU_MODELS[i];
        Golden g = golden_model(name);
        int n = test.quick ? 18 : g.n;
        double near = strchr(name, '.') ? g.limit : 1e-5;
        Options whole = {.chunk = 64}, ring = {.chunk = 7, .window = 10, .keep = 2};
        emu.order = i % ORDERS;
        bool ok = compare_model(g.m, whole, g.ids, n, g.want, g.limit, near);
        ok = ok && compare_model(g.m, ring, g.ids, n, NULL, g.limit, near);
        whole.gpu_block = i < 2;   // the second has post-norms, which rule it out
        whole.gpu_int8 = strchr(name, '.');
        if (whole.gpu_block || whole.gpu_int8)
            ok = ok && compare_model(g.m, whole, g.ids, 18, g.want, g.limit, near);
        CHECK(ok, "the GPU does not take %s", name);
        clean_up();
        if (soft.hasty && test.failures) break;
    }
    emu.order = FORWARD;
    if (test.quick) return check_counters();
    const Model *story = open_model("golden/story.gguf");
    int32_t ids[12];
    for (int i = 0; i < 12; i++) ids[i] = 7 * i + 1;
    bool ok = compare_model(story, (Options){.chunk = 9, .window = 64}, ids, 12, NULL, 0, 1e-4);
    CHECK(ok, "the GPU does not take the story");
    check_counters();
}

// The models of SHAPES, with random weights, but for those with sinks or delta nets, whose heads
// have other sizes: the GPU equals the CPU, or leaves the model to it with one line. The deep ones
// take several command buffers.
static void test_metal_shapes(void) {
    enum { N = 20, TAKEN = 15 };
    int taken = 0, tried = 0;
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++) {
        int32_t ids[N];
        int layers = SHAPES[i].n_layer;
        bool other = strpbrk(SHAPES[i].letters, "id");   // sinks, delta nets
        if (other || (layers > 8 && (layers > 40 ? layers != 46 : test.quick))) continue;
        const Model *m = random_model(&SHAPES[i], true);
        for (int k = 0; k < N; k++) ids[k] = random_bits() % VOCAB;
        Options o = {.chunk = 9, .window = 64};
        bool ok = compare_model(m, o, ids, N, NULL, 0, 1e-5);
        taken += ok && layers < 8;
        tried += layers < 8;
        if (ok) printf("  %s", SHAPES[i].arch);
        clean_up();
        if (soft.hasty && test.failures) return;
    }
    printf("\n  %d of %d architectures run on the GPU\n", taken, tried);
    CHECK(taken == TAKEN, "%d architectures run on the GPU, not %d", taken, TAKEN);
    check_counters();
}

// ---- failures ----

// A method that fails, at open or later, and what the one line says; NULL: all goes well.
static const struct { const char *method, *says; bool later; } FAILURES[] = {
    {"MTLCreateSystemDefaultDevice", NULL, false},   // there still is MTLCopyAllDevices
    {"MTLCopyAllDevices", "no Metal device", false},
    {"newCommandQueue", "no command queue", false},
    {"newLibraryWithSource:options:error:", "kernels.metal", false},
    {"newFunctionWithName:constantValues:error:", "note", true},
    {"newComputePipelineStateWithFunction:error:", "note", true},
    {"threadExecutionWidth", "SIMD-groups are not 32 wide", true},
    {"maxTotalThreadsPerThreadgroup", "too few threads", true},
    {"newBufferWithLength:options:", "memory", false},
    {"newBufferWithBytesNoCopy:length:options:deallocator:", "memory", false},
    {"maxBufferLength", "memory", false},
    {"commandBuffer", "no command encoder", true},
    {"computeCommandEncoder", "no command encoder", true},
    {"waitUntilCompleted", "the GPU stopped: it did not run", true},
};

// The GPU fails at open (later < 0) or after so many calls in the text, chunks and tokens of it.
static void lab_failure(const Model *m, int which, int later, const float *want) {
    enum { N = 40 };
    const char *method = FAILURES[which].method, *says = FAILURES[which].says;
    int32_t ids[N];
    size_t V = m->config.n_vocab;
    float *got = need(N * V * sizeof *got);
    Session s;
    Error e = {{0}};
    Rows c = {&s, got, V};
    for (int i = 0; i < N; i++) ids[i] = 5 * i % V;
    int old = mute();
    soft.broken = later < 0 ? method : NULL;
    soft.after = 0;
    bool ok = session_open(&s, m, (Options){.threads = 1, .chunk = 18}, &e);
    soft.broken = method;
    soft.after = later;
    if (says && later < 0) soft.broken = NULL;
    ok = ok && session_run(&s, ids, N - 1, 0, false, keep_row, &c, &e);
    ok = ok && session_run(&s, ids, N, N - 1, false, keep_row, &c, &e);
    bool failed = !s.gpu;
    session_close(&s);
    soft.broken = NULL;
    const char *said = unmute(old), *note = says ? "note: running on the CPU: " : "";
    bool told = says ? one_line(said) && strstr(said, says) : !*said;
    double error = want ? nmse(got, want, N * V) : 0;
    CHECK(ok && failed == !!says, "%s, %d: %s", method, later, e.text);
    CHECK(told && !strncmp(said, note, strlen(note)), "%s, %d, says '%s'", method, later, said);
    CHECK(error <= 1e-5, "%s, %d: %.1e from what comes of no failure", method, later, error);
}

static void test_metal_failures(void) {
    static const char *const refused[] = {"gpt-oss", "qwen35", "bert", "nomic-bert", "llama-moe",
                                          "qwen3moe"};
    const Model *m = golden_model("llama").m;
    int32_t ids[40];
    for (int i = 0; i < 40; i++) ids[i] = 5 * i % m->config.n_vocab;
    float *want = logits_of(m, ids, 40, (Options){.threads = 1});
    for (size_t i = 0; RECORDER && i < sizeof FAILURES / sizeof *FAILURES; i++)
        for (int later = -1; later < (FAILURES[i].later ? 4 : 0); later++)
            lab_failure(m, i, later, want);
    Model other = *m;
    other.n_owned = 1;
    CHECK(gpu_lacks(&other), "vectors outside the file on the GPU");
    for (int hd = 32; hd <= 288; hd += 16) {
        other = *m;
        other.config.hd = other.config.vd = hd;
        bool refused = !strcmp(gpu_lacks(&other) ? gpu_lacks(&other) : "", "head size");
        CHECK(refused == (hd % 32 || hd > 256), "heads of %d", hd);
    }
    for (int i = 0; i < 6; i++) {
        Session s;
        bool on_gpu = open_gpu(&s, golden_model(refused[i]).m, (Options){0});
        CHECK(!on_gpu, "%s runs on the GPU", refused[i]);
        session_close(&s);
    }
    check_counters();
}

#endif

// ==== lint ====
//
// Metal's address spaces and library as declarations for `clang++ -fsyntax-only`: gcc and the
// emulator do not see a pointer in the wrong space, an ambiguous max or a double. `make lint` puts
// this before quant.h and kernels.metal, and searches the syntax tree for what C++ allows and Metal
// does not. thread is volatile so that a pointer without an address space shows there.
#ifdef METAL_LINT
#define kernel
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread volatile
namespace metal {}
typedef signed char int8_t;
typedef unsigned char uchar, uint8_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef unsigned long ulong, uint64_t, size_t;
typedef long int64_t;
typedef _Float16 half;
struct ulong2 { ulong2(ulong); };
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T, class U> T as_type(U);

#define EACH(T) T max(T, T); T min(T, T); T clamp(T, T, T);   // an int with a uint is ambiguous
EACH(short) EACH(ushort) EACH(int) EACH(uint) EACH(half) EACH(float) EACH(long) EACH(ulong)
#define REAL(T) T exp(T); T exp2(T); T rsqrt(T); T sqrt(T); T tanh(T); T fabs(T); T rint(T);
REAL(half) REAL(float)
#define LANES(T) T simd_sum(T); T simd_max(T); T simd_min(T); T simd_shuffle(T, ushort); \
    T simd_shuffle_xor(T, ushort);
LANES(short) LANES(ushort) LANES(int) LANES(uint) LANES(half) LANES(float)

template <class T> struct simdgroup_matrix {
    simdgroup_matrix();
    explicit simdgroup_matrix(T);
    simdgroup_matrix(const volatile simdgroup_matrix &);
    void operator=(const simdgroup_matrix &) volatile;
};
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<float> simdgroup_float8x8;
#define IN(space)                                                                                  \
    template <class T>                                                                             \
    void simdgroup_load(volatile simdgroup_matrix<T> &, const space T *, ulong = 8, ulong2 = 0,    \
                        bool = false);                                                             \
    template <class T>                                                                             \
    void simdgroup_store(const volatile simdgroup_matrix<T> &, space T *, ulong = 8, ulong2 = 0,   \
                         bool = false);
IN(device)
IN(threadgroup) template <class D, class A, class B>
void simdgroup_multiply_accumulate(volatile simdgroup_matrix<D> &,
                                   const volatile simdgroup_matrix<A> &,
                                   const volatile simdgroup_matrix<B> &,
                                   const volatile simdgroup_matrix<D> &);
template <class D, class A, class B>
void simdgroup_multiply(volatile simdgroup_matrix<D> &, const volatile simdgroup_matrix<A> &,
                        const volatile simdgroup_matrix<B> &);
#pragma GCC poison vertex fragment                                                                 \
    object_data double goto register new delete virtual throw try catch
#pragma GCC poison typeid dynamic_cast printf
#endif

// ==== mutants ====
//
// Do the tests notice? `make mutants` compiles copies of kernels.metal and metal.c that hold every
// mistake at once, each asleep until its number is in `mutant`, and runs the tests of the GPU once
// a mistake: each barrier and simdgroup call left out, each bound moved by one (and each min left
// out), each index and wide offset one further, each simd_* function giving a lane its own value;
// of metal.c also each message that is sent for its effect, and the table below. A mutant that no
// test notices is a failure, unless it is listed as equivalent, with the reason.
#ifdef LLM_METAL

typedef struct {
    const char *kind;
    size_t at, cut, end;   // where it begins, what it replaces there, where it ends
    char before[200];      // text for what is cut; behind the end stands `after`
    const char *after;
    bool equivalent;       // as the table says
} Mutant;

// The line holds the first text; the mutant begins with the second.
static const struct { const char *line, *at, *why; } EQUIVALENT[] = {
    {"return n < most ?", "most ?", "both give `most`"},
    {"return n > GEMM_FEW ?", "GEMM_FEW ?", "8 tokens fit either tile"},
    {"return nsg < ATTENTION_SIMDGROUPS", "ATTENTION", "at equality both are the same"},
    {"        for (int r = 0; r < R", "R;", "past the caller's array: AddressSanitizer sees it"},
    {"else if (unit < n2)", "n2)", "a unit past the end reads the last row and writes nothing"},
    {"if (unit >= n0)", "n0)", "a unit past the end reads the last row and writes nothing"},
    {"return pos < a->keep ?", "a->keep ?", "at pos = keep both are row keep"},
    {"if (sg > 0) return;", "0)", "then all SIMD-groups write the same"},
    {"!FUSED || sg > 0 ||", "0 ||", "then all SIMD-groups write the same"},
    {"r < a->used; r += nsg", "a->used", "attention_rows looks again"},
    {"for (int i = 0; i < 16; i++) {", "16", "past the thread's array: AddressSanitizer sees it"},
    {"i < FLASH_QUERIES * HEAD_DIM;", "FLASH_Q", "the float behind the tile is a score to be made"},
    {"d < HEAD_DIM / 8; d++)", "HEAD_DIM", "an unused matrix; at 256 AddressSanitizer sees it"},
    {"min(t0 + FLASH_QUERIES, a->n)", "min(", "a tile too many is masked"},
    {"// scores are there", "simdgroup_barrier", "shuffles follow here; `make tsan` sees it"},
    {"r0 < a->used; r0 +=", "a->used", "nothing is seen in a tile past the end"},
    {"g->why[0]", "0]", "a message is longer than a letter"},
    {"*c < ' '", "' '", "a blank becomes a blank"},
    {"i < g->n_shared; i++", "g->n_shared", "all memory is found before the end"},
    {"(const char *)p < at->base + at->size", "at->base +", "nothing begins at the end of memory"},
    {"i < g->n_pipelines; i++) send", "g->n_pipelines", "what comes next is NULL"},
    {"i < d->n; i++", "d->n", "the arguments take that place afterwards"},
    {": g->shared[0].base", "0]", "any memory stands for what is ignored"},
    {"s->pos + n < kv->rows ?", "kv->rows ?", "at equality both are the same"},
    {"if (n >= FLASH_MIN)", "FLASH_MIN)", "either kernel serves 8 tokens"},
    {"n - first < LOGIT_ROWS ?", "LOGIT_ROWS ?", "at equality both are the same"},
    {"i >= 4 && norms", "4 &&", "the norm of k is of the kind of q's"},
    {"c->arch->act > RELU2", "RELU2", "no architecture has it with a gate"},
    {"i < s->m->gguf.n_tensors", "s->m->gguf", "a tensor more is there, all zeros"},
    {"= &s->m->gguf.tensors[i]", "i]", "the widest tensor is not the first"},
    {"t->ne[0] > (int64_t)wide", "0]", "rows for columns: more room than needed"},
    {"ne[0] > (int64_t)wide", "(int64_t)wide", "at equality both are the same"},
};

// mistakes of metal.c: an expression, the text behind it, and what stands in its place
static const char *const MISTAKES[][3] = {
    {"one ? NULL : MTLCopyAllDevices()", "", "NULL"}, {"MTLCommandBufferStatusCompleted", ")", "5"},
    {"from - at->base", "", "0"}, {"(sizeof(float) * d->shared + 15) / 16 * 16", "", "16"},
    {"(uintptr_t)w->data % 16", ", quant", "0"}, {"w->scale ? *w->scale : 1", "", "1"},
    {"s->m->config.embd_scale", "", "1"}, {"w->cols % 32 != 0", "}};", "0"},
    {"a.cols % 32 != 0", ", [C_NORMED]", "0"}, {"norm != NULL", ",", "0"},
    {"(w[i]->bias != NULL)", "", "0"},
    {"div_up(units, GEMV_SIMDGROUPS)", "", "units / GEMV_SIMDGROUPS"},
    {"div_up(w->rows, GEMM_ROWS)", "", "w->rows / GEMM_ROWS"}, {"div_up(n, tile)", "", "n / tile"},
    {"a.cols % 32 != 0", ",\n                   [C_BIASES]", "0"},
    {"w->bias != NULL", ", [C_EPILOGUE]", "0"}, {"m[i]->cols % 32 != 0", ";", "0"},
    {"w->sinks != NULL", "", "0"}, {"kv->window", ", kv->keep", "kv->rows"},
    {"kv->keep", ", c->eps", "0"}, {"c->rope", " : PAIRING_NONE", "PAIRING_NEIGHBOURS"},
    {"w->rotated", " ? c->rope", "true"}, {"q_norm != NULL", ",", "0"},
    {"n == 1", ", [C_CAUSAL]", "0"}, {"c->causal", "}};", "1"},
    {"s->m->config.arch->act", "}};", "0"}, {"c->arch->act", "}};", "1"},
    {"post->w", " ? EPILOGUE", "0"}, {"c->logit_cap", ", c->logit_scale);\n    } else", "0"},
    {"n == 1", " ? y : NULL", "1"}, {"live", " && i < n", "true"},
    {"g->best_of == logits", "", "1"}, {"n_layer / MAX_COMMANDS", " + SPLIT", "100"},
    {"w->router.data", " ||", "0"}, {"s->o.gpu_block", " &&", "1"},
    {"w->attn_post_norm.w || w->ffn_post_norm.w", ";", "false"},
    {"c->residual_scale != 1", "", "0"}, {"m->n_owned", "", "0"},
};
enum { N_MISTAKES = sizeof MISTAKES / sizeof *MISTAKES };

// What the copies include. A bound is the next number, of integers or of floats.
static const char MUTANTS_H[] =
    "static int mutant = -1;\n"
    "static inline float mutant_float(float x, int by) {\n"
    "    return __builtin_nextafterf(x, by * __builtin_inff());\n}\n"
    "static inline long mutant_int(long x, int by) { return x + by; }\n"
    "#define MUTANT(k) (mutant == (k))\n"
    "#define MUTANT_SET(k) (mutant = (k))\n"
    "#define MUTANT_CALL(k, f, x, ...) (MUTANT(k) ? (x) : f(x, ##__VA_ARGS__))\n"
    "#define MUTANT_BOUND(k, x, by) (MUTANT(k) ? (__typeof__((x) + 0))_Generic((x), \\\n"
    "    float: mutant_float, default: mutant_int)(x, by) : (x))\n";

// an array being declared: the line begins with a type, the name has no owner, and no variable is
// in the brackets
static bool is_declaration(const char *line, const char *open) {
    static const char *const types[] = {"float ", "int", "simdgroup_", "struct ", "const ", "id ",
        "size_t ", "char ", "static ", "void ", "typedef ", "SEL ", "Variant "};
    bool typed = false;
    const char *name = open;
    for (const char *c = open; *c != ']'; c++)
        if (islower((unsigned char)*c)) return false;
    while (isalnum((unsigned char)name[-1]) || name[-1] == '_') name--;
    line += strspn(line, " ");
    for (int i = 0; i < 13; i++) typed |= !strncmp(line, types[i], strlen(types[i]));
    return typed && name[-1] != '>' && name[-1] != '.';
}

// where the index or operand that begins at s ends
static const char *operand_end(const char *s, const char *ends) {
    for (int depth = 0;; s++) {
        bool both = !strncmp(s, "&&", 2) || !strncmp(s, "||", 2);
        if (depth == 0 && (strchr(ends, *s) || (both && ends[1]))) return s;
        depth += (*s == '(' || *s == '[') - (*s == ')' || *s == ']');
    }
}

static void add_mutant(Mutant *all, int *n, const char *kind, size_t at, const char *name,
                       const char *before) {
    Mutant *m = &all[*n];
    *m = (Mutant){kind, at, strlen(name), 0, "", "", false};
    snprintf(m->before, sizeof m->before, before, *n, (int)strlen(name) - 1, name);
    ++*n;
}

// Adds the mutants that begin at s[i] of the line.
static void mutants_at(const char *s, size_t i, const char *line, Mutant *all, int *n) {
    static const char *const bounds[] = {" < ", " <= ", " > ", " >= "};
    static const char *const calls[] = {"min(", "simd_sum(", "simd_max(", "simd_min(",
                                        "simd_shuffle(", "simd_shuffle_xor("};
    static const char *const statements[] = {"threadgroup_barrier(", "simdgroup_barrier(",
        "simdgroup_load(", "simdgroup_store(", "simdgroup_multiply", "send(g, "};
    const char *back = s + i;
    while (back > line && back[-1] == ' ') back--;
    bool word = isalnum((unsigned char)s[i - 1]) || s[i - 1] == '_';
    bool statement = back == line || back[-1] == ')';
    for (int k = 0; statement && k < 6; k++)
        if (!strncmp(s + i, statements[k], strlen(statements[k])))
            add_mutant(all, n, "call", i, "", "if (!MUTANT(%d)) ");
    bool index = s[i] == '[' && (word || strchr(")]", s[i - 1])) && s[i + 1] != ']';
    if (index && !is_declaration(line, s + i)) {
        add_mutant(all, n, "index", i + 1, "", "MUTANT(%d) + (");
        all[*n - 1].end = operand_end(s + i + 1, "]") - s;
        all[*n - 1].after = ")";
    }
    if (!strncmp(s + i, "(ulong)", 7) && s[i - 1] != '[')
        add_mutant(all, n, "offset", i, "", "MUTANT(%d) + ");
    for (int k = 0; !word && k < 6; k++)
        if (!strncmp(s + i, calls[k], strlen(calls[k])))
            add_mutant(all, n, "simd or min", i, calls[k], "MUTANT_CALL(%d, %.*s, ");
    for (int k = 0; k < 4; k++) {
        size_t length = strlen(bounds[k]);
        if (strncmp(s + i, bounds[k], length)) continue;
        add_mutant(all, n, "bound", i + length, "", "MUTANT_BOUND(%d, ");
        all[*n - 1].end = operand_end(s + i + length, ",;?:])}") - s;
        all[*n - 1].after = k == 0 || k == 3 ? ", 1)" : ", -1)";
    }
}

// all mutants of a text, from a line on; the numbers go on from n
static int find_mutants(const char *s, const char *from, bool host, Mutant *all, int n) {
    const char *line = strstr(s, from);
    for (size_t i = line - s; s[i]; i++) {
        if (s[i] == '\n') line = s + i + 1;
        if (s[i] == '"') while (s[++i] != '"') ;
        if (s[i] == '#' || (s[i] == '/' && s[i + 1] == '/'))
            while (s[i + 1] && s[i + 1] != '\n') i++;
        else mutants_at(s, i, line, all, &n);
    }
    for (int k = 0; host && k < N_MISTAKES; k++) {
        char text[200];
        snprintf(text, sizeof text, "%s%s", MISTAKES[k][0], MISTAKES[k][1]);
        const char *at = strstr(s, text);
        if (!CHECK(at, "metal.c has no %s", text)) continue;
        add_mutant(all, &n, "table", at - s, "", "(MUTANT(%d) ? ");
        snprintf(strchr(all[n - 1].before, 0), 100, "%s : ", MISTAKES[k][2]);
        all[n - 1].end = at - s + strlen(MISTAKES[k][0]);
        all[n - 1].after = ")";
    }
    return n;
}

// the copy; of mutants that end at one place, the last to begin ends first
static void write_mutants(const char *path, const char *s, const Mutant *m, int n) {
    FILE *f = fopen(path, "w");
    REQUIRE(f, "%s: cannot be written", path);
    for (size_t i = 0; s[i]; i++) {
        size_t cut = 0;
        for (int k = n - 1; k >= 0; k--)
            if (m[k].end == i) fputs(m[k].after, f);
        for (int k = 0; k < n; k++)
            if (m[k].at == i) fputs(m[k].before, f), cut += m[k].cut;
        if (cut) i += cut - 1;
        else fputc(s[i], f);
    }
    fclose(f);
}

static const char *line_of(const char *s, size_t at) {   // where it begins
    while (at && s[at - 1] != '\n') at--;
    return s + at;
}

static void show_mutant(const char *s, const Mutant *m, int number, const char *what) {
    const char *start = line_of(s, m->at);
    int line = 1;
    for (const char *c = s; c < start; c++) line += *c == '\n';
    printf("%s: %d, line %d, %s at '%.12s':\n    %.*s\n", what, number, line, m->kind, s + m->at,
           (int)strcspn(start, "\n"), start);
    fflush(stdout);
}

static bool is_equivalent(const char *s, const Mutant *m) {
    const char *start = line_of(s, m->at), *end = strchr(start, '\n');
    for (size_t i = 0; i < sizeof EQUIVALENT / sizeof *EQUIVALENT; i++) {
        const char *at = strstr(start, EQUIVALENT[i].line);
        bool here = at && at < end;
        if (here && !strncmp(s + m->at, EQUIVALENT[i].at, strlen(EQUIVALENT[i].at))) return true;
    }
    return false;
}

#ifndef MUTANT_SET
#define MUTANT_SET(number) (void)(number)   // the program itself has no mutants
#endif

// In a child of its own: exits with 0 if no test notices. Number -1: no mistake.
static pid_t run_mutant(int number, int slot) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid) return pid;
    MUTANT_SET(number);
    test.quick = true;
    snprintf(test.dir, sizeof test.dir, "test_mutants.d/%d", slot);
    mkdir(test.dir, 0700);
    setrlimit(RLIMIT_CPU, &(struct rlimit){60, 60});   // it may hang
    int out = open(scratch("out"), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    dup2(out, 1);
    dup2(out, 2);
    for (soft.hasty = 2; soft.hasty && !setjmp(test.end); soft.hasty--) {
        if (!test.failures) test_metal_kernels();
        if (!test.failures) test_metal_models();
        if (!test.failures && soft.hasty == 2) test_metal_failures();
        if (!test.failures && soft.hasty == 1) test_metal_shapes();
    }
    fflush(stdout);
    _exit(test.failures > 0);
}

// `./test mutants DIR` writes the copies to DIR; without DIR, in the program built there, runs all,
// one for each CPU at a time, or those numbered from .. to - 1, listed as equivalent or not
static int metal_mutants(int argc, char **argv) {
    static Mutant all[1500];
    size_t size;
    char *kernels = read_all("kernels.metal", &size), *host = read_all("metal.c", &size);
    int k = find_mutants(kernels, "// ---- 1. ", false, all, 0);
    int n = find_mutants(host, "// ---- device", true, all, k), status = 1;
    if (argc == 1) {
        FILE *f = fopen(text_of("%s/mutants.h", argv[0]), "w");
        if (!f || fputs(MUTANTS_H, f) < 0 || fclose(f)) return 1;
        write_mutants(text_of("%s/kernels.metal", argv[0]), kernels, all, k);
        write_mutants(text_of("%s/metal.c", argv[0]), host, all + k, n - k);
        return test.failures > 0;
    }
    if (waitpid(run_mutant(-1, 0), &status, 0) < 0 || status) return printf("not well\n"), 1;
    int from = argc > 1 ? atoi(argv[0]) : 0, to = argc > 1 ? atoi(argv[1]) : n, survived = 0;
    int same = 0, cpus = sysconf(_SC_NPROCESSORS_ONLN);
    for (int i = from; i < to; i++) {
        all[i].equivalent = argc == 0 && is_equivalent(i < k ? kernels : host, &all[i]);
        same += all[i].equivalent;
    }
    for (int cpu = 0; cpu < cpus; cpu++) {   // a process each, for every cpus-th mutant
        int unnoticed = 0;
        if (fork()) continue;
        for (int i = from + cpu; i < to; i += cpus) {
            if (!all[i].equivalent) waitpid(run_mutant(i, cpu), &status, 0);
            if (all[i].equivalent || status) continue;
            show_mutant(i < k ? kernels : host, &all[i], i, "SURVIVED");
            unnoticed++;
        }
        _exit(unnoticed < 255 ? unnoticed : 255);
    }
    while (wait(&status) > 0) survived += WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    printf("%d mutants: %d noticed, %d equivalent, %d survived\n", to - from,
           to - from - same - survived, same, survived);
    return survived > 0;
}

#endif

// ==== the table of tests ====

typedef struct { const char *name; void (*fn)(void); } Test;

#define T(name) {#name, test_##name},
static const Test TESTS[] = {
    T(formats) T(formats_names) T(formats_grids) T(halves) T(matmul) T(attention) T(norms)
    T(alibi_and_alpha) T(activations) T(gguf_variants) T(gguf_broken) T(gguf_hostile)
    T(gguf_experts) T(golden_models) T(golden_encoders) T(story_greedy) T(every_architecture)
    T(ring) T(chunks_and_threads) T(regenerate) T(session_refusals) T(sampler_stages)
    T(sampler_choice) T(sampler_session) T(unicode_tables) T(tokenizer_goldens) T(tokenizer_rules)
    T(tokenizer_special) T(tokenizer_streaming) T(tokenizer_refusals) T(tokenizer_linear)
    T(chat_templates)
    T(cli_refusals) T(cli_output) T(cli_completion) T(cli_numbers) T(cli_chat) T(cli_logits)
    T(cli_interrupt)
#ifdef LLM_METAL
    T(metal_kernels) T(metal_models) T(metal_shapes) T(metal_failures)
#endif
};
#undef T
enum { N_TESTS = sizeof TESTS / sizeof *TESTS };

static bool run_test(const Test *t) {
    double start = now();
    test.checks = test.failures = 0;
    test.seed = 1;
    printf("%s\n", t->name);
    fflush(stdout);
    if (!setjmp(test.end)) t->fn();
    clean_up();
    if (test.failures) printf("  FAILED: %d of %d checks", test.failures, test.checks);
    else printf("  ok: %d checks", test.checks);
    printf(", %.1f s\n", now() - start);
    return test.failures == 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "llm")) return llm_main(argc - 1, argv + 1);
    if (argc > 3 && !strcmp(argv[1], "model")) return write_bench_model(argv[2], argv[3]);
#ifdef LLM_METAL
    if (argc > 1 && !strcmp(argv[1], "mutants")) return metal_mutants(argc - 2, argv + 2);
#endif
    int named = 0, known = 0, passed = 0, failed = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick")) test.quick = true;
        else if (strcmp(argv[i], "--list")) named++;
        else {
            for (int t = 0; t < N_TESTS; t++) puts(TESTS[t].name);
            return 0;
        }
    }
    char self[1024], clear[128];
    snprintf(self, sizeof self, "%s llm --cpu", argv[0]);
    test.program = getenv("LLM") ? getenv("LLM") : self;
    snprintf(test.dir, sizeof test.dir, "/tmp/llm-test-XXXXXX");
    if (!mkdtemp(test.dir)) return perror(test.dir), 1;
    for (int t = 0; t < N_TESTS; t++) {
        bool chosen = !named;
        for (int i = 1; i < argc; i++) chosen |= !strcmp(argv[i], TESTS[t].name);
        known += named && chosen;
        if (!chosen) continue;
        if (run_test(&TESTS[t])) passed++;
        else failed++;
    }
    if (known < named) failed += printf("no such test among the names given; see --list\n") > 0;
    snprintf(clear, sizeof clear, "rm -rf '%s'", test.dir);
    if (system(clear)) printf("%s: cannot be removed\n", test.dir);
    free(test.memory);
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed > 0;
}
