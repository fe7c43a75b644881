// SPDX-License-Identifier: MIT
// test.c: all tests of the project, in one program.
//
//   ./test                 runs them            ./test --list     names them
//   ./test NAME...         runs those           ./test --quick    leaves out what is slow
//   ./test llm ARGUMENTS   is the engine itself, so that a sanitizer sees the command line too
//
// A test compares with outputs recorded from llama.cpp (golden/), or with a reference written here
// from the formula, in double, that uses nothing of llm.c. Models that no golden file covers are
// written by the tests themselves, with random weights, into a directory of their own. To add a
// test: a function `static void test_X(void)` that calls CHECK, and a row in TESTS at the end.
#ifdef LLM_METAL
#undef _FORTIFY_SOURCE   // its longjmp forbids the GPU in software to change stacks
#endif
#define main llm_main
#include "llm.c"
#undef main
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
static bool check(bool ok, const char *file, int line, const char *format, ...)
{
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

static void *need(size_t size)   // zeroed, until the end of the test
{
    test.memory = realloc(test.memory, (test.n_memory + 1) * sizeof *test.memory);
    void *p = test.memory ? calloc(size + 1, 1) : NULL;
    REQUIRE(p, "out of memory");
    return test.memory[test.n_memory++] = p;
}

static void clean_up(void)
{
    while (test.n_sessions) session_close(test.sessions[--test.n_sessions]);
    while (test.n_models) model_close(test.models[--test.n_models]);
    while (test.n_memory) free(test.memory[--test.n_memory]);
}

static Model *open_model(const char *path)
{
    Model *m = need(sizeof *m);
    Error e = {""};
    REQUIRE(test.n_models < MOST, "too many models");
    test.models[test.n_models++] = m;
    REQUIRE(model_open(m, path, &e), "%s", e.text);
    return m;
}

// on the CPU: the GPU in software is slow, and has tests of its own
static Session *open_session(const Model *m, Options o)
{
    Session *s = need(sizeof *s);
    Error e = {""};
    o.cpu = true;
    REQUIRE(test.n_sessions < MOST, "too many sessions");
    test.sessions[test.n_sessions++] = s;
    REQUIRE(session_open(s, m, o, &e), "%s", e.text);
    return s;
}

static uint32_t random_bits(void)
{
    test.seed = test.seed * 1664525u + 1013904223u;
    return test.seed >> 8;
}

static float noise(void) { return random_bits() / 8388608.0f - 1; }   // -1 .. 1

static float *noise_array(size_t n, float scale)
{
    float *x = need(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = noise() * scale;
    return x;
}

// sum (got - want)^2 / sum want^2; a NaN makes it a NaN, which passes no limit
static double nmse_double(const float *got, const double *want, size_t n)
{
    double error = 0, power = 0;
    for (size_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        power += want[i] * want[i];
    }
    return error / (power + 1e-300);
}

static double nmse(const float *got, const float *want, size_t n)
{
    double *w = malloc(n * sizeof *w);
    for (size_t i = 0; i < n; i++) w[i] = want[i];
    double error = nmse_double(got, w, n);
    free(w);
    return error;
}

static double half_value(uint16_t h)   // IEEE binary16
{
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double x = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    if (exponent == 31) x = mantissa ? NAN : INFINITY;
    return h & 0x8000 ? -x : x;
}

static void *read_all(const char *path, size_t *n)   // a whole file, with a NUL behind it
{
    FILE *f = fopen(path, "rb");
    struct stat st;
    REQUIRE(f && !fstat(fileno(f), &st), "%s: cannot be read", path);
    char *data = need(st.st_size + 1);
    *n = fread(data, 1, st.st_size, f);
    fclose(f);
    return data;
}

__attribute__((format(printf, 1, 2))) static char *text_of(const char *format, ...)
{
    va_list args;
    char *s = need(1024);
    va_start(args, format);
    vsnprintf(s, 1024, format, args);
    va_end(args);
    return s;
}

static char *scratch(const char *name) { return text_of("%s/%s", test.dir, name); }

// ---- a writer of GGUF files ----

typedef struct { uint8_t *p; size_t n, cap; } Bytes;

static void put(Bytes *b, const void *data, size_t n)
{
    if (b->n + n > b->cap) {
        uint8_t *old = b->p;
        b->cap = 2 * b->cap + n + 256;
        b->p = need(b->cap);
        memcpy(b->p, old ? old : b->p, b->n);
    }
    if (data) memcpy(b->p + b->n, data, n);   // else zeros
    b->n += n;
}

static void put_int(Bytes *b, uint64_t x, size_t size) { put(b, &x, size); }

static void put_text(Bytes *b, const char *s)
{
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
    Spoil spoil;
} Writer;

static bool spoils(const Writer *w, int how, const char *name)
{
    return w->spoil.how == how && !strcmp(w->spoil.name, name);
}

static void put_key(Writer *w, const char *key, uint32_t type, const void *value, size_t size)
{
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

static void key_text(Writer *w, const char *key, const char *s)
{
    Bytes b = {0};
    put_text(&b, s);
    put_key(w, key, GGUF_STR, b.p, b.n);
}

static void key_strings(Writer *w, const char *key, int n, const char *const *s)
{
    Bytes b = {0};
    put_int(&b, GGUF_STR, 4);
    put_int(&b, n, 8);
    for (int i = 0; i < n; i++) put_text(&b, s[i]);
    put_key(w, key, GGUF_ARR, b.p, b.n);
}

// random f32 weights around `mean`, ne[2] matrices of ne[1] rows of ne[0]; 0 ends the dimensions
static void put_tensor(Writer *w, const char *name, const int ne[3], float mean, float scale)
{
    int dims = 1 + (ne[1] > 0) + (ne[2] > 0);
    size_t n = ne[0] * (ne[1] ? ne[1] : 1) * (ne[2] ? ne[2] : 1);
    const Spoil *s = &w->spoil;
    float *x = noise_array(n, scale);
    for (size_t i = 0; i < n; i++) x[i] += mean;
    bool elsewhere = w->parts && w->seen++ % w->parts != w->part, dim = spoils(w, DIM, name);
    int copies = elsewhere || spoils(w, NO_TENSOR, name) ? 0 : 1 + spoils(w, TWICE, name);
    for (; copies > 0; copies--, w->n_tensors++) {
        put(&w->data, NULL, -w->data.n % (w->align ? w->align : 32));
        put_text(&w->tensors, name);
        put_int(&w->tensors, dim && s->a < 0 ? s->b : dims, 4);
        for (int d = 0; d < dims; d++) put_int(&w->tensors, dim && s->a == d ? s->b : ne[d], 8);
        put_int(&w->tensors, spoils(w, TYPE, name) ? s->a : QUANT_F32, 4);
        put_int(&w->tensors, spoils(w, OFFSET, name) ? (uint64_t)s->a : w->data.n, 8);
        put(&w->data, x, n * sizeof *x);
    }
}

// the whole file; returns the size of what stands before the data
static size_t write_gguf(Writer *w, const char *path)
{
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
//   P learned positions  N norm of the embedding  T no head  E encoder
//   d linear attention in even layers, gated attention in odd ones  D with ssm_ba
// and, of the program: l a linear layer, ^ tensors that are in no layer.

enum { WIDTH = 32, HEADS = 4, KV_HEADS = 2, HEAD = 16, FF = 48, VOCAB = 64 };

// name:dimensions:letters, of which x must be there, !x must not, and +x brings a bias
static const char PARTS[] =
    "token_embd:32,64:^ position_embd:32,96:^P token_types:32,2:^E token_embd_norm:32:^N+n "
    "output_norm:32:^!0!E+n output:32,64:^!T!E+O attn_norm:32:!0!p!E+n attn_norm_2:32:2+n "
    "ffn_norm:32:!0!p!E!1!a+n post_attention_norm:32:a+n post_attention_norm:32:p+n "
    "post_attention_norm:32:t+n post_ffw_norm:32:p+n post_ffw_norm:32:t+n attn_output_norm:32:E+n "
    "layer_output_norm:32:E+n attn_qkv:32,128:f+b attn_q:32,64:!f!d+b attn_q:32,128:d!l "
    "attn_k:32,32:!f!l+b attn_v:32,32:!f!l+b attn_output:64,32:!l+o attn_q_norm:16:k!l "
    "attn_k_norm:16:k!l attn_q_norm:64:K attn_k_norm:32:K attn_q_norm:16,4:j attn_k_norm:16,2:j "
    "attn_sinks:4:i attn_qkv:32,64:l attn_gate:32,32:l ssm_ba:32,8:lD ssm_alpha:32,4:l!D "
    "ssm_beta:32,4:l!D ssm_conv1d:4,64:l ssm_dt.bias:4:l ssm_a:4:l ssm_norm:8:l ssm_out:32,32:l "
    "ffn_gate:32,48:!x!g!u+B ffn_up:32,48:!x!u+B ffn_up:32,96:u+B ffn_down:48,32:!x+B "
    "ffn_gate_inp:32,6:x+B ffn_gate_up_exps:32,96,6:xm ffn_gate_exps:32,48,6:x!m+B "
    "ffn_up_exps:32,48,6:x!m+B ffn_down_exps:48,32,6:x+B ffn_gate_shexp:32,48:s "
    "ffn_up_shexp:32,48:s ffn_down_shexp:48,32:s ffn_gate_inp_shexp:32:S";

typedef struct {
    const char *arch;
    int n_layer;
    const char *letters, *keys;   // keys: more metadata, "name=1 name=0.5"; with a point: a float
} Shape;

static void put_part(Writer *w, const char *prefix, const char *part, const char *letters)
{
    char name[64], *full, bias = 0;
    int ne[3] = {0};
    const char *c = strchr(part, ':');
    snprintf(name, sizeof name, "%.*s", (int)(c - part), part);
    for (int i = 0; i < 3 && (i == 0 || *c == ','); i++) ne[i] = strtol(c + 1, (char **)&c, 10);
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

static void put_parts(Writer *w, const char *prefix, const char *letters)
{
    char all[sizeof PARTS], *rest;
    memcpy(all, PARTS, sizeof all);
    for (char *p = strtok_r(all, " ", &rest); p; p = strtok_r(NULL, " ", &rest))
        if (!strchr(p, '^') == !strchr(letters, '^')) put_part(w, prefix, p, letters);
}

static void put_keys(Writer *w, const char *arch, const char *keys)
{
    char *rest, *key = strtok_r(text_of("%s", keys), " ", &rest);
    for (; key; key = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(key, '='), *name = text_of("%s.%.*s", arch, (int)(value - key), key);
        if (strchr(value, '.')) key_float(w, name, atof(value + 1));
        else key_int(w, name, atoi(value + 1));
    }
}

static void put_model(Writer *w, const Shape *m)
{
    key_int(w, "general.alignment", w->align ? w->align : 32);
    key_text(w, "general.architecture", m->arch);
    put_keys(w, m->arch, text_of("block_count=%d context_length=96 embedding_length=32 vocab_size=64 "
        "feed_forward_length=48 attention.head_count=4 attention.head_count_kv=2 "
        "attention.key_length=16 attention.value_length=16 attention.layer_norm_epsilon=.00001 "
        "attention.layer_norm_rms_epsilon=.00001 %s", m->n_layer, m->keys));
    put_parts(w, "", text_of("^%s", m->letters));
    for (int l = 0; l < m->n_layer; l++)
        put_parts(w, text_of("blk.%d.", l), text_of("%s%s", m->letters,
                  strchr(m->letters, 'd') && l % 2 == 0 ? "l" : ""));
}

static const Model *random_model(const Shape *shape)
{
    Writer w = {0};
    put_model(&w, shape);
    key_text(&w, "tokenizer.ggml.model", "none");
    write_gguf(&w, scratch("random.gguf"));
    return open_model(scratch("random.gguf"));
}

typedef struct { float *to; size_t n; } Rows;

static bool keep_row(void *ctx, int i, const float *row)
{
    Rows *out = ctx;
    memcpy(out->to + i * out->n, row, out->n * sizeof *row);
    return true;
}

// logits of ids[from..n-1] into rows[from..n-1]
static void run_rows(Session *s, const int32_t *ids, int n, int from, float *rows)
{
    Error e = {""};
    Rows out = {rows, s->m->config.n_vocab};
    CHECK(session_run(s, ids, n, from, false, keep_row, &out, &e), "%s", e.text);
}

// logits of ids[0..n-1] from a new session with these options
static float *logits_of(const Model *m, const int32_t *ids, int n, Options o)
{
    float *rows = need((size_t)n * m->config.n_vocab * sizeof *rows);
    run_rows(open_session(m, o), ids, n, 0, rows);
    session_close(test.sessions[--test.n_sessions]);
    return rows;
}

// ==== formats ====

// All formats, and the rows of weights that the tests multiply: golden/quants has 2,048 weights of
// each with ggml's floats. The first half of them are quantised Gaussian numbers; the rest is random
// bytes, whose scales may be huge.
static const int FORMATS[] = {
#define QUANT_X(id, name, weights, bytes, per16, offsets) id,
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
    QUANT_F32, QUANT_F16, QUANT_BF16};
enum { N_FORMATS = sizeof FORMATS / sizeof *FORMATS, GOLDEN = 2048 };

// blocks and floats of a format; f32 has no file: its blocks are bf16's floats
static void golden_blocks(int type, uint8_t **blocks, float **floats)
{
    char path[128];
    size_t n, m;
    snprintf(path, sizeof path, "golden/quants/%s.f32", type == QUANT_F32 ? "bf16" : quant_name(type));
    *floats = read_all(path, &m);
    snprintf(path, sizeof path, "golden/quants/%s.%s", type == QUANT_F32 ? "bf16" : quant_name(type),
             type == QUANT_F32 ? "f32" : "blocks");
    *blocks = read_all(path, &n);
    CHECK(m == 4 * GOLDEN && n == quant_row_bytes(type, GOLDEN), "%s: %zu and %zu bytes", path, n, m);
}

static void test_formats_golden(void)
{
    for (int f = 0; f < N_FORMATS; f++) {
        int type = FORMATS[f];
        uint8_t *blocks;
        float *want, *got = need(4 * GOLDEN);
        golden_blocks(type, &blocks, &want);
        size_t bytes = quant_row_bytes(type, GOLDEN), one = 1;
        while (!quant_row_bytes(type, one)) one++;
        for (int shift = 0; shift < 4; shift++) {   // any address will do
            uint8_t *copy = need(bytes + shift);
            memcpy(copy + shift, blocks, bytes);
            CHECK(quant_dequantize(type, copy + shift, got, GOLDEN), "%s refused", quant_name(type));
            for (int i = 0; i < GOLDEN; i++)
                if (!CHECK(!memcmp(&got[i], &want[i], 4), "%s at +%d: weight %d is %.9g, ggml has %.9g",
                           quant_name(type), shift, i, got[i], want[i])) break;
            free(copy);
        }
        CHECK(one == 1 || !quant_dequantize(type, blocks, got, one + 1), "%s: %zu weights", quant_name(type), one + 1);
        got[one] = 77;
        CHECK(quant_dequantize(type, blocks, got, one) && got[one] == 77, "%s: one block writes more", quant_name(type));
        free(blocks);
        free(want);
        free(got);
    }
}

static void test_formats_names(void)
{
    int known = 0;
    for (int type = -3; type < 300; type++) {
        const char *name = quant_name(type);
        char upper[16] = "";
        known += name != NULL;
        CHECK(!name == !quant_row_bytes(type, 256), "type %d: a name or a size", type);
        for (int i = 0; name && name[i]; i++) upper[i] = toupper(name[i]);
        CHECK(!name || (quant_type_from_name(name) == type && quant_type_from_name(upper) == type), "%s", upper);
    }
    CHECK(known == N_FORMATS, "%d formats have names, %d are listed", known, N_FORMATS);
    CHECK(quant_type_from_name("q4_k_m") == -1 && quant_type_from_name("") == -1, "names that are none");
    CHECK(!quant_row_bytes(QUANT_F32, SIZE_MAX / 2) && !quant_row_bytes(12, 128), "sizes that cannot be");
}

// FNV-1a of 16-bit entries, low byte first; the sums are those of ggml's tables
static void check_grid(const char *name, const uint16_t *grid, int n, uint32_t want)
{
    uint32_t sum = 2166136261u;
    for (int i = 0; i < 2 * n; i++) sum = (sum ^ (i % 2 ? grid[i / 2] >> 8 : grid[i / 2] & 255)) * 16777619u;
    CHECK(sum == want, "%s: sum %08x, want %08x", name, sum, want);
}

static void test_formats_grids(void)
{
    check_grid("iq2_xxs", quant_grid_iq2_xxs, 256, 0x0e66d01d);
    check_grid("iq2_xs", quant_grid_iq2_xs, 512, 0xf65db7a3);
    check_grid("iq2_s", quant_grid_iq2_s, 1024, 0xa1eb5434);
    check_grid("iq3_xxs", quant_grid_iq3_xxs, 256, 0xcfe32cc2);
    check_grid("iq3_s", quant_grid_iq3_s, 512, 0x111129e2);
    check_grid("iq1", quant_grid_iq1, 2048, 0xfd6cbae4);
}

// a GPU lane asks for one group, a row's tail for some, the CPU for all eight: the same answers
static void decode(int type, const uint8_t *b, int g, int n, int8_t *q, float *d, float *m)
{
    switch (type) {
#define QUANT_X(id, name, weights, bytes, per16, offsets) \
    case id: decode_##name((const block_##name *)b, g, n, q, d, m); break;
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
    }
}

static void test_formats_groups(void)
{
    for (int f = 0; f < N_FORMATS - 3; f++) {
        uint8_t *blocks;
        float *want, d[16], m[16], d1[16], m1[16];
        int8_t q[256], q1[256];
        golden_blocks(FORMATS[f], &blocks, &want);
        for (int b = 0; b < GOLDEN / 256; b++) {
            const uint8_t *at = blocks + b * quant_row_bytes(FORMATS[f], 256);
            decode(FORMATS[f], at, 0, 8, q, d, m);
            for (int g = 0; g < 8; g++)
                for (int n = 1; g + n <= 8; n++) {
                    decode(FORMATS[f], at, g, n, q1, d1, m1);
                    CHECK(!memcmp(q1, q + 32 * g, 32 * n) && !memcmp(d1, d + 2 * g, 8 * n) &&
                          !memcmp(m1, m + 2 * g, 8 * n), "%s: groups %d+%d", quant_name(FORMATS[f]), g, n);
                }
        }
        free(blocks);
        free(want);
    }
}

static void test_formats_halves(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        double want = half_value(h);
        float got = quant_f16_to_f32(h);
        CHECK(want != want ? got != got : got == want, "half %04x: %g, want %g", h, got, want);
        if (want != want || isinf(want)) continue;
        CHECK(quant_f32_to_f16(got) == h, "half %04x does not return", h);
        if ((h & 0x7fff) == 0x7bff) continue;
        double next = half_value(h + 1), mid = (want + next) / 2;   // ties go to the even one
        CHECK(quant_f32_to_f16(mid) == (h % 2 ? h + 1 : h), "half %04x: the tie", h);
        CHECK(quant_f32_to_f16(nextafterf(mid, next)) == h + 1, "half %04x: above the tie", h);
    }
    CHECK(quant_f32_to_f16(65520) == 0x7c00 && quant_f32_to_f16(-1e30f) == 0xfc00, "too large for a half");
    CHECK(isnan(half_value(quant_f32_to_f16(NAN))), "NaN");
}

// ---- matmul ----

typedef struct { uint8_t *data; float *values; Matrix w; } Weights;   // values: [rows][cols]

// golden blocks in random order
static Weights weights_of(int type, int64_t rows, int64_t cols)
{
    uint8_t *blocks;
    float *floats;
    size_t unit = 32, bytes = quant_row_bytes(type, rows * cols);
    golden_blocks(type, &blocks, &floats);
    while (!quant_row_bytes(type, unit)) unit += 32;
    Weights w = {need(bytes), need(rows * cols * sizeof(float)), {0}};
    for (size_t i = 0; i < rows * cols / unit; i++) {
        size_t from = random_bits() % (GOLDEN / 2 / unit), size = quant_row_bytes(type, unit);
        memcpy(w.data + i * size, blocks + from * size, size);
        memcpy(w.values + i * unit, floats + from * unit, unit * sizeof(float));
    }
    w.w = (Matrix){.data = w.data, .type = type, .rows = rows, .cols = cols};
    free(blocks);
    free(floats);
    return w;
}

// Returns what an output's square would be if no products cancelled, summed: errors are measured
// against that, so that a row whose sum happens to be near 0 does not count more than others.
static double naive_matmul(const Weights *w, const float *x, double *out, int n)
{
    double power = 0;
    for (int i = 0; i < n; i++)
        for (int64_t r = 0; r < w->w.rows; r++) {
            double sum = 0, weights = 0, inputs = 0;
            for (int64_t c = 0; c < w->w.cols; c++) {
                double v = w->values[r * w->w.cols + c], u = x[i * w->w.cols + c];
                sum += v * u;
                weights += v * v;
                inputs += u * u;
            }
            out[i * w->w.rows + r] = (w->w.scale ? *w->w.scale : 1) * sum + (w->w.bias ? w->w.bias[r] : 0);
            power += weights * inputs / w->w.cols;
        }
    return power;
}

// Two jobs in one call, sharing x, one with bias and scale, on several thread counts. `exact`:
// activations that int8 holds exactly (integers up to 127, 127 in every 32) leave only rounding.
static void check_matmul(int type, int64_t rows, int64_t cols, int n, bool exact, double *worst)
{
    static const int threads[] = {1, 2, 3, 8};
    Weights w[2] = {weights_of(type, rows, cols), weights_of(type, rows / 2 + 1, cols)};
    float *x = noise_array(n * cols, 1), *bias = noise_array(rows, 1), scale = 0.75f, *out[2], *first[2];
    double *want[2], power[2];
    w[0].w.bias = bias;
    w[0].w.scale = &scale;
    for (int64_t i = 0; exact && i < n * cols; i++) x[i] = i % 32 ? rintf(x[i] * 127) / 64 : 127.0f / 64;
    for (int k = 0; k < 2; k++) {
        size_t size = n * w[k].w.rows;
        want[k] = need(size * sizeof(double));
        out[k] = need(size * sizeof(float));
        first[k] = need(size * sizeof(float));
        power[k] = naive_matmul(&w[k], x, want[k], n);
    }
    for (int t = 0; t < 4; t += 1 + test.quick) {
        Pool pool = {0};
        Matmul jobs[2] = {{&w[0].w, x, out[0], n}, {&w[1].w, x, out[1], n}};
        void *memory = need(matmul_scratch(n, cols, threads[t]) + 64);
        CHECK(pool_open(&pool, threads[t]), "%d threads", threads[t]);
        matmul(&pool, (void *)(((uintptr_t)memory + 63) & ~(uintptr_t)63), jobs, 2);
        pool_close(&pool);
        free(memory);
        for (int k = 0; k < 2; k++) {
            size_t size = n * w[k].w.rows;
            if (t == 0) memcpy(first[k], out[k], size * sizeof(float));
            CHECK(!memcmp(first[k], out[k], size * sizeof(float)), "%s: %d threads differ", quant_name(type), threads[t]);
            double error = 0;
            for (size_t i = 0; i < size; i++) error += (out[k][i] - want[k][i]) * (out[k][i] - want[k][i]);
            CHECK(error == error, "%s: NaN", quant_name(type));
            *worst = fmax(*worst, error / power[k]);
        }
    }
    for (int k = 0; k < 2; k++) {
        free(w[k].data);
        free(w[k].values);
        free(want[k]);
        free(out[k]);
        free(first[k]);
    }
    free(x);
    free(bias);
}

#ifdef SIMD_AMX
static const double MATMUL_EXACT = 1e-5;   // weights rounded to bf16
#else
static const double MATMUL_EXACT = 1e-7;
#endif

static void test_matmul(void)
{
    static const int counts[] = {1, 2, 7, 33};
    for (int f = 0; f < N_FORMATS; f++) {
        int type = FORMATS[f];
        bool floats = type == QUANT_F32 || type == QUANT_F16 || type == QUANT_BF16;
        int64_t unit = floats ? 1 : 32, tail = floats ? 13 : 32;
        while (!quant_row_bytes(type, unit)) unit *= 2;
        double noisy = 0, exact = 0;
        for (int i = 0; i < 4; i += 1 + test.quick) {
            int64_t cols = 512 + (unit < 256) * (tail + unit - 1) / unit * unit;
            check_matmul(type, test.quick ? 19 : 37, cols, counts[i], false, &noisy);
            check_matmul(type, test.quick ? 18 : 70, test.quick ? 256 : cols - cols % 256, counts[i], true, &exact);
        }
        // int8 activations: an error of max/254 at most, 1/sqrt(3) of that on average
        CHECK(noisy < (floats ? 1e-8 : 1e-4), "%s: NMSE %.2g", quant_name(type), noisy);
        CHECK(exact < MATMUL_EXACT, "%s: NMSE %.2g where int8 is exact", quant_name(type), exact);
        printf("  %-8s NMSE %.1e, %.1e where int8 activations are exact\n", quant_name(type), noisy, exact);
    }
}

// ==== GGUF ====

static const Shape TINY = {"llama", 1, 0, NULL};

// a small Llama with a tokenizer, good but for the writer's Spoil; returns the size of its head
static size_t write_tiny(Writer *w, const char *path)
{
    static const char *const tokens[] = {"a", "b", "ab", "<s>"}, *const merges[] = {"a b"};
    put_model(w, &TINY);
    key_text(w, "tokenizer.ggml.model", "gpt2");
    key_text(w, "tokenizer.ggml.pre", "default");
    key_strings(w, "tokenizer.ggml.tokens", 4, tokens);
    key_strings(w, "tokenizer.ggml.merges", 1, merges);
    key_int(w, "tokenizer.ggml.bos_token_id", 3);
    key_int(w, "tokenizer.ggml.eos_token_id", 3);
    if (w->parts) key_int(w, "split.count", w->parts);
    if (w->parts) key_int(w, "split.no", w->part);
    return write_gguf(w, path);
}

static float *tiny_logits(const char *path)
{
    static const int32_t ids[] = {1, 5, 9, 33, 60, 2, 7};
    Model m = {0};
    Error e = {""};
    CHECK(model_open(&m, path, &e), "%s", e.text);
    float *rows = e.text[0] ? need(7 * VOCAB * sizeof *rows) : logits_of(&m, ids, 7, (Options){.threads = 1});
    model_close(&m);
    return rows;
}

static void test_gguf_variants(void)
{
    char path[128];
    Writer w = {0};
    uint32_t seed = test.seed;
    write_tiny(&w, scratch(path, "plain.gguf"));
    float *want = tiny_logits(path);
    for (int i = 0; i < 3; i++) {
        w = (Writer){.version = i == 0 ? 2 : 3, .align = i == 1 ? 64 : i == 2 ? 8 : 32};
        test.seed = seed;
        write_tiny(&w, scratch(path, "variant.gguf"));
        float *got = tiny_logits(path);
        CHECK(!memcmp(got, want, 7 * VOCAB * sizeof *got), "variant %d differs", i);
        free(got);
    }
    for (int part = 0; part < 3; part++) {
        char name[64];
        w = (Writer){.part = part, .parts = 3};
        test.seed = seed;
        snprintf(name, sizeof name, "split-0000%d-of-00003.gguf", part + 1);
        write_tiny(&w, scratch(path, name));
    }
    float *got = tiny_logits(scratch(path, "split-00001-of-00003.gguf"));
    CHECK(!memcmp(got, want, 7 * VOCAB * sizeof *got), "three parts differ from the whole");
    free(got);
    free(want);
    Model m = {0};
    Error e = {""};
    CHECK(!model_open(&m, scratch(path, "split-00002-of-00003.gguf"), &e) && strstr(e.text, "part 2"), "%s", e.text);
    model_close(&m);
    remove(scratch(path, "split-00003-of-00003.gguf"));
    CHECK(!model_open(&m, scratch(path, "split-00001-of-00003.gguf"), &e) && strstr(e.text, "00003-of"), "%s", e.text);
    model_close(&m);
}

static const Spoil BROKEN[] = {
    {"not a GGUF file", BYTES, "GGML", 0, 4, NULL},
    {"big-endian", BYTES, "\0\0\0\3", 4, 4, NULL},
    {"version 1", BYTES, "\1\0\0", 4, 4, NULL},
    {"tensors do not fit", BYTES, "\xff\xff\xff\xff\xff\xff\xff\x7f", 8, 8, NULL},
    {"metadata keys do not fit", BYTES, "\xff\xff\xff\xff\xff\xff\xff\xff", 16, 8, NULL},
    {"ends inside the list of tensors", CUT, "", 4, 0, NULL},
    {"its entry is cut off", CUT, "", 31, 0, NULL},
    {"ends inside the metadata", BYTES, "\xff\xff\xff\xff\xff\xff\xff\xff", 24, 8, NULL},
    {"unknown value type 13", KEY, "llama.block_count", 13, 0, NULL},
    {"runs past the end", KEY, "general.architecture", GGUF_STR, (int64_t)1 << 62, NULL},
    {"arrays of arrays", KEY, "llama.block_count", GGUF_ARR, GGUF_ARR, NULL},
    {"unknown element type 99", KEY, "llama.block_count", GGUF_ARR, 99, NULL},
    {"values do not fit", KEY, "llama.block_count", GGUF_ARR, ((int64_t)1 << 56) + GGUF_F64, NULL},
    {"llama.block_count appears twice", TWICE, "llama.block_count", 0, 0, NULL},
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
    {"context_length is missing or not a number", KEY, "llama.context_length", GGUF_STR, 0, "8"},
    {"embedding_length is 0, expected 1", KEY, "llama.embedding_length", GGUF_U32, 0, NULL},
    {"3 KV heads", KEY, "llama.attention.head_count_kv", GGUF_U32, 3, NULL},
    {"RoPE: 3 dimensions", NEW_KEY, "llama.rope.dimension_count", GGUF_U32, 3, NULL},
    {"tensor token_embd is missing", NO_TENSOR, "token_embd.weight", 0, 0, NULL},
    {"tensor blk.0.attn_v is missing", NO_TENSOR, "blk.0.attn_v.weight", 0, 0, NULL},
    {"tensor output_norm.weight is missing", NO_TENSOR, "output_norm.weight", 0, 0, NULL},
    {"want 32 values", DIM, "blk.0.ffn_norm.weight", 0, 16, NULL},
    {"want [32,32,1], file has [32,16,1]", DIM, "blk.0.attn_k.weight", 1, 16, NULL},
    {"want 64 or 128 rows", DIM, "blk.0.attn_q.weight", 1, 63, NULL},
    {"want 48 rows, file has 47", DIM, "blk.0.ffn_up.weight", 1, 47, NULL},
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

static void test_gguf_broken(void)
{
    char path[128];
    int reached = 0, rows = sizeof BROKEN / sizeof *BROKEN;
    scratch(path, "broken.gguf");
    for (int i = 0; i < rows; i++) {
        Model m = {0};
        Error e = {""};
        Writer w = {.spoil = BROKEN[i]};
        write_tiny(&w, path);
        bool opened = model_open(&m, path, &e);
        model_close(&m);
        reached += CHECK(!opened && strstr(e.text, BROKEN[i].expect), "want '%s', got '%s'", BROKEN[i].expect, e.text);
        for (int k = 0; k < i; k++) CHECK(strcmp(BROKEN[i].expect, BROKEN[k].expect), "'%s' is twice here", BROKEN[i].expect);
    }
    printf("  %d distinct messages\n", reached);
    CHECK(reached >= 40, "%d messages", reached);
}

// cut anywhere, and with any byte of the head changed: refused, or it runs; never a crash
static void test_gguf_hostile(void)
{
    char path[128];
    size_t size;
    Writer w = {0};
    Error e = {""};
    size_t head = write_tiny(&w, scratch(path, "hostile.gguf"));
    uint8_t *whole = read_all(path, &size);
    int opened = 0, step = test.quick ? 5 : 1, fd = open(path, O_RDWR);
    for (size_t i = 0; i < head; i += step)
        for (int k = 0; k < 3; k++) {
            static const int32_t ids[] = {1, 2, 3};
            uint8_t byte = k == 0 ? whole[i] ^ 1 : k == 1 ? 0xff : 0;
            Model m = {0};
            CHECK(pwrite(fd, &byte, 1, i) == 1, "pwrite");
            e.text[0] = 0;
            if (model_open(&m, path, &e)) {
                Session s = {0};
                bool ok = session_open(&s, &m, (Options){.window = 8, .chunk = 2, .threads = 1, .cpu = true}, &e);
                if (ok && session_eval(&s, ids, 3, &e)) opened++;
                session_close(&s);
            } else CHECK(e.text[0], "byte %zu: no message", i);
            model_close(&m);
            CHECK(pwrite(fd, whole + i, 1, i) == 1, "pwrite");
        }
    for (size_t cut = size; cut-- > 0; cut -= cut > head ? cut % 997 : 0) {
        Model m = {0};
        CHECK(!ftruncate(fd, cut) && !model_open(&m, path, &e) && e.text[0], "cut to %zu bytes: %s", cut, e.text);
        model_close(&m);
    }
    close(fd);
    free(whole);
    printf("  %zu bytes of head changed thrice, %d files still ran\n", head, opened);
}

// a cursor that has failed stays failed
static void test_gguf_cursor(void)
{
    static const uint8_t bytes[] = {1, 0, 0, 0, 0, 0, 0, 0, 'x', 9};
    Cursor c = {bytes, bytes + sizeof bytes, false};
    Str s = read_str(&c);
    CHECK(s.n == 1 && *s.s == 'x' && !c.bad, "a string");
    CHECK(read_bytes(&c, 2) == 0 && c.bad, "two bytes of one");
    CHECK(read_bytes(&c, 1) == 0 && read_str(&c).n == 0 && c.bad, "one byte after the failure");
    c = (Cursor){bytes + 1, bytes + sizeof bytes, false};
    CHECK(read_str(&c).n == 0 && c.bad, "a string of 2^56 bytes");
}

// ==== ops ====

// ---- attention ----

typedef struct {
    const char *what;
    int n_head, n_kv, hd, vd, pos, n, rows, window, keep;
    bool causal, sinks, slopes;
    float softcap;
} AttentionCase;

static const AttentionCase ATTENTION[] = {
    {"plain", 4, 4, 32, 32, 0, 20, 40, 40, 0, true, false, false, 0},
    {"one query, grouped heads", 8, 2, 64, 64, 90, 1, 100, 100, 0, true, false, false, 0},
    {"all heads share one", 6, 1, 128, 128, 33, 7, 64, 64, 0, true, false, false, 0},
    {"odd widths", 3, 3, 37, 21, 10, 9, 30, 30, 0, true, false, false, 0},
    {"window, wrapped ring", 4, 2, 16, 16, 75, 5, 17, 12, 0, true, false, false, 0},
    {"window and pinned rows", 4, 2, 16, 16, 75, 5, 22, 12, 5, true, false, false, 0},
    {"soft cap", 4, 2, 32, 32, 50, 3, 64, 64, 0, true, false, false, 5},
    {"sinks", 8, 2, 32, 32, 50, 3, 64, 20, 0, true, true, false, 0},
    {"ALiBi", 6, 3, 32, 32, 50, 4, 64, 64, 0, true, false, true, 0},
    {"whole text", 4, 4, 32, 32, 0, 30, 40, 40, 0, false, false, false, 0},
    {"whole text, ALiBi, cap", 4, 4, 32, 32, 0, 30, 40, 40, 0, false, false, true, 8},
    {"long", 2, 1, 64, 64, 700, 2, 800, 800, 0, true, true, false, 0},
    {"wide heads", 2, 1, 256, 256, 200, 40, 300, 300, 0, true, false, false, 0},
};

static void naive_attention(const Attention *a, int i, int h, double *out)
{
    int kv = h / (a->n_head / a->n_kv), pos = a->pos + i;
    double total = a->sinks ? exp(a->sinks[h]) : 0;
    for (int j = 0; j < a->vd; j++) out[j] = 0;
    for (int r = 0; r < a->rows; r++) {
        int at = a->pos_k[r];
        double score = 0;
        if (at < 0 || (a->causal && (at > pos || (pos - at >= a->window && at >= a->keep)))) continue;
        for (int j = 0; j < a->hd; j++)
            score += a->q[((size_t)i * a->n_head + h) * a->hd + j] *
                     half_value(a->k[((size_t)kv * a->rows + r) * a->hd + j]);
        score *= a->scale;
        if (a->softcap > 0) score = a->softcap * tanh(score / a->softcap);
        if (a->slopes) score -= a->slopes[h] * abs(at - pos);
        double p = exp(score);
        total += p;
        for (int j = 0; j < a->vd; j++) out[j] += p * half_value(a->v[((size_t)kv * a->rows + r) * a->vd + j]);
    }
    for (int j = 0; j < a->vd; j++) out[j] /= total;
}

static uint16_t *half_noise(size_t n)
{
    uint16_t *x = need(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = quant_f32_to_f16(noise());
    return x;
}

static double check_attention(const AttentionCase *t, int threads, float *first)
{
    size_t n_out = (size_t)t->n * t->n_head * t->vd;
    float *q = noise_array((size_t)t->n * t->n_head * t->hd, 3), *extra = noise_array(t->n_head, 2);
    uint16_t *k = half_noise((size_t)t->n_kv * t->rows * t->hd), *v = half_noise((size_t)t->n_kv * t->rows * t->vd);
    int32_t *pos = need(t->rows * sizeof *pos);
    float *out = need(n_out * sizeof *out);
    double *want = need(n_out * sizeof *want);
    void *memory = need(attention_scratch(t->n_head, t->hd, t->vd, t->rows, threads) + 64);
    Pool pool = {0};
    // the ring after every position up to the last was written; some rows are empty
    for (int r = 0; r < t->rows; r++) pos[r] = -1;
    for (int p = 0; p < t->pos + t->n; p++) pos[p < t->keep ? p : t->keep + (p - t->keep) % (t->rows - t->keep)] = p;
    if (t->rows > 24) pos[3] = -1;
    for (int h = 0; h < t->n_head && t->slopes; h++) extra[h] = exp2f(-h - 1);
    Attention a = {.q = q, .out = out, .k = k, .v = v, .pos_k = pos, .rows = t->rows, .pos = t->pos, .n = t->n,
                   .n_head = t->n_head, .n_kv = t->n_kv, .hd = t->hd, .vd = t->vd, .window = t->window,
                   .keep = t->keep, .causal = t->causal, .scale = 1 / sqrtf(t->hd), .softcap = t->softcap,
                   .sinks = t->sinks ? extra : NULL, .slopes = t->slopes ? extra : NULL};
    pool_open(&pool, threads);
    attention(&pool, (void *)(((uintptr_t)memory + 63) & ~(uintptr_t)63), &a);
    pool_close(&pool);
    for (int i = 0; i < t->n * t->n_head; i++) naive_attention(&a, i / t->n_head, i % t->n_head, want + i * t->vd);
    if (threads == 1) memcpy(first, out, n_out * sizeof *out);
    CHECK(!memcmp(first, out, n_out * sizeof *out), "%s: %d threads differ", t->what, threads);
    double error = nmse_double(out, want, n_out);
    void *all[] = {q, extra, k, v, pos, out, want, memory};
    for (int i = 0; i < 8; i++) free(all[i]);
    return error;
}

static void test_attention(void)
{
    for (size_t i = 0; i < sizeof ATTENTION / sizeof *ATTENTION; i++) {
        const AttentionCase *t = &ATTENTION[i];
        float *first = need((size_t)t->n * t->n_head * t->vd * sizeof *first);
        double worst = 0;
        for (int threads = 1; threads <= 3; threads += 1 + test.quick) {
            test.seed = i + 1;
            worst = fmax(worst, check_attention(t, threads, first));
        }
        // exponentials to 1e-6, values summed in f32; a CPU with half dot products rounds q
        CHECK(worst < 1e-7, "%s: NMSE %.2g", t->what, worst);
        printf("  %-26s NMSE %.1e\n", t->what, worst);
        free(first);
    }
}

// ---- row by row ----

static void test_norms(void)
{
    enum { N = 75 };
    for (int kind = RMS; kind <= BARE; kind++)
        for (int group = 0; group <= 25; group += 25) {
            float *x = noise_array(N, 2), *w = noise_array(N, 1), *b = noise_array(N, 1), out[N];
            double want[N];
            int width = group ? group : N, n_w = group == 25 && kind == RMS ? 25 : N;   // one for all groups, or each its own
            Norm n = {kind == BARE ? NULL : w, kind == LAYER ? b : NULL, n_w, group};
            for (int i = 0; i < N; i++) x[i] += 0.5f;
            norm(out, x, N, &n, kind, 1e-3f);
            for (int i = 0; i < N; i++) {
                double mean = 0, var = 0;
                for (int j = i / width * width, k = 0; k < width; k++) mean += x[j + k] / (double)width;
                if (kind == RMS) mean = 0;
                for (int j = i / width * width, k = 0; k < width; k++) var += (x[j + k] - mean) * (x[j + k] - mean) / width;
                want[i] = (x[i] - mean) / sqrt(var + 1e-3) * (n.w ? w[i % n_w] : 1) + (n.b ? b[i % n_w] : 0);
            }
            CHECK(nmse_double(out, want, N) < 1e-12, "kind %d group %d: NMSE %.2g", kind, group, nmse_double(out, want, N));
            free(x);
            free(w);
            free(b);
        }
}

// angles of a model with these hyperparameters, the pair turned by them, against the formulas
static void check_rope(const char *what, Config c, const float *factors, int window, const double *want, double magnitude)
{
    Model m = {.config = c, .freqs_long = factors, .freqs_short = factors ? factors + 32 : NULL};
    Arch arch = {.flags = 0};
    double freq[32];
    m.config.arch = &arch;
    float got = rope_frequencies(&m, false, window, freq);
    CHECK(fabs(got - magnitude) < 1e-6, "%s: magnitude %.8g, want %.8g", what, got, magnitude);
    for (int i = 0; i < c.n_rot / 2; i++)
        CHECK(fabs(freq[i] - want[i]) < 1e-6 * want[i], "%s: pair %d: %.9g, want %.9g", what, i, freq[i], want[i]);
}

static void test_rope_frequencies(void)
{
    Config c = {.hd = 64, .n_rot = 64, .rope_base = 10000, .rope_base_local = 10000, .rope_factor = 1, .rope_attn = 1,
                .n_ctx_orig = 4096, .yarn_fast = 32, .yarn_slow = 1};
    double want[32];
    float factors[64];
    for (int i = 0; i < 32; i++) want[i] = pow(10000, -i / 32.0);
    check_rope("plain", c, NULL, 100, want, 1);
    for (int i = 0; i < 32; i++) want[i] /= 4;
    c.rope_factor = 4;
    check_rope("linear", c, NULL, 100, want, 1);
    // YaRN: pairs that turn more than 32 times in 4,096 tokens stay, those with less than one turn are slowed
    double low = floor(32 * log(4096 / (32 * 2 * M_PI)) / log(10000)), high = ceil(32 * log(4096 / (2 * M_PI)) / log(10000));
    for (int i = 0; i < 32; i++) {
        double slowed = fmin(1, fmax(0, (i - low) / (high - low)));
        want[i] = pow(10000, -i / 32.0) * (slowed / 4 + 1 - slowed);
    }
    c.yarn = true;
    check_rope("yarn", c, NULL, 100, want, 1 + 0.1 * log(4));
    c.yarn = false;
    c.rope_factor = 1;
    c.rope_attn = 1.19;
    for (int side = 0; side < 2; side++) {   // the first 32 factors are for long windows
        for (int i = 0; i < 64; i++) factors[i] = 1 + i;
        for (int i = 0; i < 32; i++) want[i] = pow(10000, -i / 32.0) / (1 + i + 32 * side);
        check_rope(side ? "short" : "long", c, factors, side ? 4096 : 4097, want, 1.19);
    }
}

static void test_rope(void)
{
    for (int pairing = NORM; pairing <= NEOX; pairing++) {
        enum { HD = 24, ROT = 16 };
        float *x = noise_array(HD, 1), turn[ROT], got[HD];
        double want[HD];
        for (int i = 0; i < HD; i++) want[i] = x[i];
        for (int i = 0; i < ROT / 2; i++) {
            double angle = 37 * pow(10000, -2.0 * i / ROT);
            int a = pairing == NORM ? 2 * i : i, b = pairing == NORM ? 2 * i + 1 : i + ROT / 2;
            turn[2 * i] = cos(angle);
            turn[2 * i + 1] = sin(angle);
            want[a] = x[a] * cos(angle) - x[b] * sin(angle);
            want[b] = x[a] * sin(angle) + x[b] * cos(angle);
        }
        memcpy(got, x, sizeof got);
        rope(got, turn, ROT, pairing);
        CHECK(nmse_double(got, want, HD) < 1e-12, "pairing %d: NMSE %.2g", pairing, nmse_double(got, want, HD));
        free(x);
    }
}

static double reference_activation(int act, double g, double u, bool gate)
{
    double inner = sqrt(2 / M_PI) * (g + 0.044715 * g * g * g), clipped = fmin(g, 7);
    double y = act == SILU ? g / (1 + exp(-g)) : act == GELU ? 0.5 * g * (1 + tanh(inner))
               : act == RELU2 ? (g > 0 ? g * g : 0) : clipped / (1 + exp(-1.702 * clipped));
    return y * (!gate ? 1 : act == SWIGLU_OAI ? fmin(7, fmax(-7, u)) + 1 : u);
}

static void test_activations(void)
{
    enum { N = 400 };
    for (int act = SILU; act <= SWIGLU_OAI; act++)
        for (int gate = act == SWIGLU_OAI; gate < 2; gate++) {
            float *g = noise_array(N, 12), *u = noise_array(N, 9), out[N];
            double want[N];
            activate(out, gate ? g : NULL, u, N, act);
            for (int i = 0; i < N; i++) want[i] = reference_activation(act, gate ? g[i] : u[i], u[i], gate);
            CHECK(nmse_double(out, want, N) < 1e-11, "act %d: NMSE %.2g", act, nmse_double(out, want, N));
            free(g);
            free(u);
        }
    double worst = 0;
    for (double x = -87; x < 88; x += 0.00731) worst = fmax(worst, fabs(exp_fast(x) / exp((float)x) - 1));
    CHECK(worst < 1e-6, "exp_fast is off by %.2g", worst);
    CHECK(exp_fast(-1000) < 1e-37f && exp_fast(-INFINITY) < 1e-37f && exp_fast(0) == 1, "exp_fast at its ends");
    printf("  exp_fast: relative error %.1e\n", worst);
}

// ==== models ====

// ---- golden models: logits of llama.cpp on the same weights in f32 ----

static const char *const GOLDEN_MODELS[] = {
    "llama", "llama-linear", "llama3-freqs", "mistral3", "qwen2", "qwen2-yarn", "qwen3", "gemma", "gemma2",
    "gemma3", "phi3", "phi3-long", "phi3-short", "llama-moe", "qwen3moe", "gpt-oss", "qwen35", "llama.q4_0",
    "qwen2.q5_1", "gemma3.iq4_nl", "gpt-oss.mxfp4", "llama256.q4_K_M", "qwen2-256.q2_K"};

// NAME.gguf, or the first of two parts: its own metadata, the weights of another model
static bool open_golden(Model *m, const char *name)
{
    char path[128];
    Error e = {""};
    snprintf(path, sizeof path, "golden/archs/%s.gguf", name);
    if (access(path, R_OK)) snprintf(path, sizeof path, "golden/archs/%s-00001-of-00002.gguf", name);
    return CHECK(model_open(m, path, &e), "%s", e.text);
}

static int golden_tokens(const char *name, int32_t ids[64])
{
    char path[128];
    size_t size;
    int n = 0;
    snprintf(path, sizeof path, "golden/archs/%s.tokens", name);
    char *text = read_all(path, &size), *s = text;
    for (char *end; n < 64 && (ids[n] = strtol(s, &end, 10), end > s); n++) s = end + (*end == ',');
    free(text);
    return n;
}

static void test_golden_models(void)
{
    static const int chunks[] = {48, 1, 7, 5};
    for (size_t i = 0; i < sizeof GOLDEN_MODELS / sizeof *GOLDEN_MODELS; i++) {
        const char *name = GOLDEN_MODELS[i];
        char path[128];
        int32_t ids[64];
        size_t size;
        double worst = 0;
        Model m = {0};
        if (open_golden(&m, name)) {
            int n = golden_tokens(name, ids);
            snprintf(path, sizeof path, "golden/archs/%s.logits", name);
            float *want = read_all(path, &size);
            snprintf(path, sizeof path, "golden/archs/%s.nmse", name);
            char *text = read_all(path, &(size_t){0});
            double limit = fmax(1e-4, 3 * atof(text));
            if (CHECK(size == n * m.config.n_vocab * sizeof *want, "%s: %zu bytes of logits", name, size))
                for (int k = 0; k < (test.quick ? 2 : 4); k++) {
                    float *got = logits_of(&m, ids, n, (Options){.chunk = chunks[k], .threads = 1 + k % 2});
                    double error = nmse(got, want, size / sizeof *want);
                    CHECK(error <= limit, "%s -b %d: NMSE %.2g, limit %.2g", name, chunks[k], error, limit);
                    worst = fmax(worst, error);
                    free(got);
                }
            printf("  %-16s NMSE %.1e, limit %.1e, llama.cpp itself %s", name, worst, limit, text);
            free(text);
            free(want);
        }
        model_close(&m);
    }
}

static bool pool_mean(void *ctx, int i, const float *row)
{
    double *sum = ctx;
    (void)i;
    for (int j = 0; j < 64; j++) sum[j] += row[j];
    return true;
}

static void test_golden_encoders(void)
{
    static const char *const names[] = {"bert", "nomic-bert"};
    for (int i = 0; i < 2; i++) {
        char path[128];
        int32_t ids[64];
        size_t size;
        Model m = {0};
        Session s = {0};
        Error e = {""};
        double sum[64] = {0};
        int n = golden_tokens(names[i], ids);
        snprintf(path, sizeof path, "golden/archs/%s.embd", names[i]);
        float *want = read_all(path, &size);
        if (open_golden(&m, names[i]) && open_session(&s, &m, (Options){.window = n, .chunk = n}) &&
            CHECK(session_run(&s, ids, n, 0, true, pool_mean, sum, &e), "%s", e.text)) {
            double dot = 0, a = 0, b = 0, error = 0;
            for (int j = 0; j < 64; j++) {
                sum[j] /= n;
                dot += sum[j] * want[j];
                a += sum[j] * sum[j];
                b += want[j] * want[j];
                error += (sum[j] - want[j]) * (sum[j] - want[j]);
            }
            CHECK(error / b < 1e-4, "%s: NMSE %.2g", names[i], error / b);
            printf("  %-16s NMSE %.1e, limit 1.0e-04, cosine %.8f\n", names[i], error / b, dot / sqrt(a * b));
        }
        session_close(&s);
        model_close(&m);
        free(want);
    }
}

// ---- the storyteller ----

static void test_story_greedy(void)
{
    size_t size;
    Error e = {""};
    Model m = {0};
    int32_t ids[128], next[128];
    double margin[128];
    int n = 0, differ = 0;
    char *text = read_all("golden/story.greedy.tsv", &size);
    for (char *line = strchr(text, '\n'); line && line[1]; line = strchr(line + 1, '\n'), n++)
        if (sscanf(line, "%*d %d %d %*f %lf", &ids[n], &next[n], &margin[n]) != 3) break;
    free(text);
    if (!CHECK(n == 65, "%d positions", n) || !CHECK(model_open(&m, "golden/story.gguf", &e), "%s", e.text)) return;
    if (test.quick) n = 20;
    for (int chunk = 1; chunk <= 512; chunk += 511) {
        float *rows = logits_of(&m, ids, n, (Options){.chunk = chunk, .window = 128});
        for (int i = 0; i < n; i++) {
            int best = 0;
            for (int k = 1; k < m.config.n_vocab; k++)
                if (rows[i * m.config.n_vocab + k] > rows[i * m.config.n_vocab + best]) best = k;
            differ += best != next[i];
            CHECK(best == next[i] || margin[i] <= 0.3, "position %d: %d, llama.cpp %d by %.3f", i, best, next[i], margin[i]);
        }
        free(rows);
    }
    printf("  %d positions twice, %d differ where the margin is below 0.3\n", n, differ);
    model_close(&m);
}

typedef struct { const int32_t *ids; int n, n_vocab, count; double sum; } Surprise;

static bool add_surprise(void *ctx, int i, const float *row)
{
    Surprise *p = ctx;
    double total = 0;
    if (i + 1 == p->n) return true;
    for (int k = 0; k < p->n_vocab; k++) total += exp(row[k]);
    p->sum += log(total) - row[p->ids[i + 1]];
    p->count++;
    return true;
}

// perplexity as llama-perplexity has it: windows of n tokens, the second half of each scored
static void test_story_perplexity(void)
{
    static const struct { int n; double want; } known[] = {{128, 6.5600}, {256, 6.1828}};
    size_t size;
    Error e = {""};
    Model m = {0};
    Tokens ids = {0};
    char *text = read_all("golden/story.txt", &size);
    if (!CHECK(model_open(&m, "golden/story.gguf", &e), "%s", e.text)) return;
    CHECK(tokenize(m.tokenizer, text, size, true, false, &ids, &e), "%s", e.text);
    for (int k = 0; k < 2; k++) {
        int n = known[k].n;
        Surprise p = {.n = n, .n_vocab = m.config.n_vocab};
        Session s = {0};
        open_session(&s, &m, (Options){.window = n});
        for (size_t at = 0; at + n <= ids.n; at += n) {
            p.ids = ids.id + at;
            session_truncate(&s, 0);
            CHECK(session_run(&s, p.ids, n, n / 2, false, add_surprise, &p, &e), "%s", e.text);
        }
        double ppl = exp(p.sum / p.count);
        CHECK(fabs(ppl / known[k].want - 1) < 0.005, "-c %d: %.4f, want %.4f", n, ppl, known[k].want);
        printf("  -c %d: perplexity %.4f, llama.cpp %.4f, limit 0.5 %%\n", n, ppl, known[k].want);
        session_close(&s);
    }
    free(text);
    free(ids.id);
    model_close(&m);
}

// ---- every architecture ----
//
// No golden says that these rows are right; what is tested is that every tensor that such a file
// has is read, and that prefill, decode and prefix reuse agree.

#define GPT_LIKE NORM_BIAS | QKV_BIAS | OUT_BIAS | FFN_BIAS | NO_GATE
#define DELTA_KEYS "ssm.conv_kernel=4 ssm.state_size=8 ssm.group_count=2 ssm.time_step_rank=4 ssm.inner_size=32 " \
    "full_attention_interval=2"
#define EXPERT_KEYS "expert_count=6 expert_used_count=2 expert_feed_forward_length=48"
static const Shape SHAPES[] = {
    {"llama", 3, EXPERTS, EXPERT_KEYS},
    {"mistral3", 3, 0, "attention.temperature_scale=0.1 rope.scaling.original_context_length=8"},
    {"qwen2", 3, QKV_BIAS | TIED, NULL},
    {"qwen3", 3, QK_HEAD | TIED, NULL},
    {"gemma", 3, TIED, NULL},
    {"gemma2", 4, POST_TOO | TIED, "attention.sliding_window=9"},
    {"gemma2", 46, POST_TOO | TIED, "attention.sliding_window=9"},
    {"gemma3", 6, POST_TOO | QK_HEAD, "attention.sliding_window=9 rope.scaling.factor=4."},
    {"gemma3", 62, POST_TOO | QK_HEAD | TIED, "attention.sliding_window=9"},
    {"phi3", 3, FUSED_QKV | FUSED_FFN, NULL},
    {"qwen2moe", 3, QKV_BIAS | EXPERTS | SHARED | SHARED_GATE, EXPERT_KEYS},
    {"qwen3moe", 3, QK_HEAD | EXPERTS, EXPERT_KEYS},
    {"olmoe", 3, QK_FULL | EXPERTS, EXPERT_KEYS},
    {"granitemoe", 3, EXPERTS | SHARED, EXPERT_KEYS " embedding_scale=3. residual_scale=0.5 logit_scale=2. attention.scale=0.2"},
    {"deepseek", 3, EXPERTS | SHARED, EXPERT_KEYS " expert_weights_scale=2."},
    {"gpt-oss", 4, QKV_BIAS | OUT_BIAS | POST_IS_PRE | EXPERTS | FFN_BIAS | SINKS, EXPERT_KEYS " attention.sliding_window=9"},
    {"qwen35", 4, DELTA | POST_IS_PRE | QK_HEAD, DELTA_KEYS " rope.dimension_count=8"},
    {"qwen35moe", 4, DELTA | POST_IS_PRE | QK_HEAD | EXPERTS | SHARED | SHARED_GATE, DELTA_KEYS " " EXPERT_KEYS},
    {"qwen3next", 4, DELTA | DELTA_BA | POST_IS_PRE | QK_HEAD | EXPERTS | MERGED | SHARED | SHARED_GATE, DELTA_KEYS " " EXPERT_KEYS},
    {"bert", 3, GPT_LIKE | ENCODES | EMBD_NORM | POSITIONS, "attention.causal=0"},
    {"nomic-bert", 3, NORM_BIAS | FUSED_QKV | ENCODES | EMBD_NORM, "attention.causal=0"},
    {"olmo", 3, NO_NORM | TIED, "attention.clamp_kqv=1."},
    {"olmo2", 4, POST_ONLY | QK_FULL, "attention.sliding_window=9"},
    {"smollm3", 4, TIED, NULL},
    {"granite", 3, TIED, "embedding_scale=3. residual_scale=0.5 logit_scale=2. attention.scale=0.2"},
    {"minicpm", 3, TIED, NULL},
    {"stablelm", 3, NORM_BIAS | ONE_NORM | QK_EACH, "rope.dimension_count=4"},
    {"starcoder", 3, GPT_LIKE | FUSED_QKV | POSITIONS | TIED, NULL},
    {"starcoder2", 3, GPT_LIKE | TIED, NULL},
    {"command-r", 3, ONE_NORM | QK_EACH | TIED, "logit_scale=0.5"},
    {"cohere2", 4, ONE_NORM | TIED, "logit_scale=0.5 attention.sliding_window=9"},
    {"chatglm", 3, FUSED_QKV | QKV_BIAS | FUSED_FFN, "rope.dimension_count=8"},
    {"glm4", 3, POST_TOO | QKV_BIAS | FUSED_FFN, "rope.dimension_count=8"},
    {"exaone", 3, TIED, NULL},
    {"exaone4", 3, POST_ONLY | QK_HEAD, NULL},
    {"exaone4", 64, POST_ONLY | QK_HEAD, "attention.sliding_window=9"},
    {"internlm2", 3, 0, NULL},
    {"baichuan", 3, 0, NULL},
    {"baichuan", 32, 0, NULL},
    {"baichuan", 40, 0, NULL},
    {"xverse", 3, 0, NULL},
    {"orion", 3, NORM_BIAS, NULL},
    {"nemotron", 3, NORM_BIAS | NO_GATE, "rope.dimension_count=8"},
    {"arcee", 3, NO_GATE, NULL},
    {"phi2", 3, GPT_LIKE | ONE_NORM | HEAD_BIAS, "rope.dimension_count=8"},
    {"gpt2", 3, GPT_LIKE | FUSED_QKV | POSITIONS | TIED, NULL},
    {"gptneox", 3, GPT_LIKE | FUSED_QKV, "rope.dimension_count=4 use_parallel_residual=1"},
    {"falcon", 3, NORM_BIAS | FUSED_QKV | ONE_NORM | NO_GATE | SECOND_NORM | TIED, NULL},
    {"bloom", 3, GPT_LIKE | FUSED_QKV | EMBD_NORM | TIED, NULL},
    {"hunyuan-dense", 3, QK_HEAD | TIED, "rope.scaling.alpha=1000."},
    {"ernie4_5", 3, TIED, NULL},
    {"seed_oss", 3, POST_IS_PRE | QKV_BIAS, NULL},
};

// the last token's logits, or an encoder's vector for it
static bool keep_last(void *ctx, int i, const float *row)
{
    struct { float *to; size_t n; } *out = ctx;
    (void)i;
    memcpy(out->to, row, out->n * sizeof *row);
    return true;
}

static void last_row(Session *s, const int32_t *ids, int n, float *row)
{
    Error e = {""};
    bool hidden = s->m->config.arch->flags & ENCODER;
    struct { float *to; size_t n; } out = {row, hidden ? WIDTH : VOCAB};
    CHECK(session_run(s, ids, n, n - 1, hidden, keep_last, &out, &e), "%s", e.text);
}

// Are all tensors used? The file is mapped: each is changed there, and must change the last row.
static void check_tensors_used(Session *s, const char *path, const int32_t *ids, int n, const float *want)
{
    const Gguf *g = &s->m->gguf;
    int fd = open(path, O_RDWR);
    for (size_t i = 0; i < g->n_tensors; i++) {
        const Tensor *t = &g->tensors[i];
        size_t count = t->ne[0] * t->ne[1] * t->ne[2], at = t->data - g->maps[0].base;
        float *old = need(count * sizeof *old), *changed = need(count * sizeof *old), got[VOCAB] = {0};
        int layer = -1;
        sscanf(t->name.s, "blk.%d.", &layer);
        memcpy(old, t->data, count * sizeof *old);
        for (size_t k = 0; k < count; k++) changed[k] = 0.2f - old[k];
        if (layer <= 1 || layer == s->m->config.n_layer - 1) {
            CHECK(pwrite(fd, changed, 4 * count, at) == (ssize_t)(4 * count), "pwrite");
            session_truncate(s, 0);
            last_row(s, ids, n, got);
            CHECK(pwrite(fd, old, 4 * count, at) == (ssize_t)(4 * count), "pwrite");
            CHECK(memcmp(got, want, sizeof got), "%s: %.*s is not used", s->m->config.arch->name, STR_ARG(t->name));
        }
        free(old);
        free(changed);
    }
    close(fd);
}

static double check_shape(const Shape *shape)
{
    enum { N = 20 };
    int32_t ids[N], other[N];
    float whole[VOCAB] = {0}, got[VOCAB] = {0};
    char path[128];
    Error e = {""};
    Model m = {0};
    Session s = {0}, single = {0};
    double worst = 0;
    for (int i = 0; i < N; i++) ids[i] = random_bits() % VOCAB;
    memcpy(other, ids, sizeof ids);
    for (int i = 9; i < N; i++) other[i] = random_bits() % VOCAB;
    if (!open_random(&m, shape) || !open_session(&s, &m, (Options){.threads = 2})) return 1;
    open_session(&single, &m, (Options){.chunk = m.config.arch->flags & ENCODER ? N : 1, .threads = 1});
    last_row(&s, ids, N, whole);
    CHECK(nmse(whole, whole, VOCAB) == 0 && isfinite(whole[0]) && whole[0] != whole[1], "%s: %g", shape->arch, whole[0]);
    last_row(&single, ids, N, got);                     // token by token
    worst = fmax(worst, nmse(got, whole, VOCAB));
    for (int k = 0; k < 2 && m.config.causal; k++) {   // another end, and back: the prefix is reused
        last_row(&s, k ? ids : other, N, got);
        if (k == 0) CHECK(nmse(got, whole, VOCAB) > 1e-3, "%s: the text does not matter", shape->arch);
    }
    worst = fmax(worst, nmse(got, whole, VOCAB));
    CHECK(worst < 1e-6, "%s, %d layers: NMSE %.2g", shape->arch, shape->n_layer, worst);
    if (!test.quick) check_tensors_used(&s, scratch(path, "random.gguf"), ids, N, whole);
    session_close(&s);
    session_close(&single);
    model_close(&m);
    return worst;
}

static void test_every_architecture(void)
{
    int n_shapes = sizeof SHAPES / sizeof *SHAPES;
    double worst = 0;
    for (int i = 0; i < n_shapes; i++)
        if (!test.quick || SHAPES[i].n_layer < 8) worst = fmax(worst, check_shape(&SHAPES[i]));
    for (size_t k = 0; k < sizeof ARCHS / sizeof *ARCHS; k++) {
        bool found = false;
        for (int i = 0; i < n_shapes; i++)
            found |= !strcmp(ARCHS[k].name, SHAPES[i].arch) && (!ARCHS[k].n_layer || ARCHS[k].n_layer == SHAPES[i].n_layer);
        CHECK(found, "%s with %d layers has no shape here", ARCHS[k].name, ARCHS[k].n_layer);
    }
    printf("  %d models: prefill, decode and reuse agree to NMSE %.1e, limit 1e-6\n", n_shapes, worst);
}

// ==== sessions ====

// ---- a model in double, from the formulas ----
//
// Embedding, then per layer RMSNorm, RoPE, grouped attention, RMSNorm, gated FFN, over the whole
// text at once: the mask is a condition on two positions. gemma2 without its post-norms and soft
// caps is such a model with windows in the even layers.
typedef struct { const Model *m; int n, window, keep; double *x; } Naive;

static const float *tensor_of(const Model *m, int l, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, l < 0 ? "%s.weight" : "blk.%2$d.%1$s.weight", name, l);
    const Tensor *t = gguf_tensor(&m->gguf, full);
    CHECK(t, "%s", full);
    return (const float *)t->data;
}

static void naive_product(double *out, const float *w, const double *x, int cols, int rows)
{
    for (int r = 0; r < rows; r++) {
        out[r] = 0;
        for (int c = 0; c < cols; c++) out[r] += w[r * cols + c] * x[c];
    }
}

static void naive_norm(double *out, const double *x, const float *w)
{
    double sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += x[i] * x[i];
    for (int i = 0; i < WIDTH; i++) out[i] = x[i] / sqrt(sum / WIDTH + 1e-5) * w[i];
}

static void naive_rope(double *x, int heads, int pos, bool neox)
{
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < HEAD / 2; i++) {
            double angle = pos * pow(10000, -2.0 * i / HEAD), *a = x + h * HEAD + (neox ? i : 2 * i);
            double *b = a + (neox ? HEAD / 2 : 1), t = *a;
            *a = t * cos(angle) - *b * sin(angle);
            *b = t * sin(angle) + *b * cos(angle);
        }
}

static void naive_layer(const Naive *s, int l, bool gemma)
{
    const Model *m = s->m;
    double *q = need(s->n * Q * sizeof *q), *k = need(s->n * KV * sizeof *k), *v = need(s->n * KV * sizeof *v);
    bool local = gemma && l % 2 == 0 && 9 < s->window;
    double h[WIDTH], gate[FF], up[FF], out[Q];
    for (int i = 0; i < s->n; i++) {
        naive_norm(h, s->x + i * WIDTH, tensor_of(m, l, "attn_norm"));
        naive_product(q + i * Q, tensor_of(m, l, "attn_q"), h, WIDTH, Q);
        naive_product(k + i * KV, tensor_of(m, l, "attn_k"), h, WIDTH, KV);
        naive_product(v + i * KV, tensor_of(m, l, "attn_v"), h, WIDTH, KV);
        naive_rope(q + i * Q, HEADS, i, gemma);
        naive_rope(k + i * KV, KV_HEADS, i, gemma);
    }
    for (int i = 0; i < s->n; i++) {
        for (int head = 0; head < HEADS; head++) {
            double total = 0, *o = out + head * HEAD;
            memset(o, 0, HEAD * sizeof *o);
            for (int j = 0; j <= i; j++) {
                double score = 0;
                if (i - j >= (local ? 9 : s->window) && (local || j >= s->keep)) continue;
                for (int d = 0; d < HEAD; d++) score += q[i * Q + head * HEAD + d] * k[j * KV + head / 2 * HEAD + d];
                total += score = exp(score / sqrt(HEAD));
                for (int d = 0; d < HEAD; d++) o[d] += score * v[j * KV + head / 2 * HEAD + d];
            }
            for (int d = 0; d < HEAD; d++) o[d] /= total;
        }
        naive_product(h, tensor_of(m, l, "attn_output"), out, Q, WIDTH);
        for (int d = 0; d < WIDTH; d++) s->x[i * WIDTH + d] += h[d];
        naive_norm(h, s->x + i * WIDTH, tensor_of(m, l, "ffn_norm"));
        naive_product(gate, tensor_of(m, l, "ffn_gate"), h, WIDTH, FF);
        naive_product(up, tensor_of(m, l, "ffn_up"), h, WIDTH, FF);
        for (int d = 0; d < FF; d++) up[d] *= reference_activation(gemma ? GELU : SILU, gate[d], 0, false);
        naive_product(h, tensor_of(m, l, "ffn_down"), up, FF, WIDTH);
        for (int d = 0; d < WIDTH; d++) s->x[i * WIDTH + d] += h[d];
    }
    free(q);
    free(k);
    free(v);
}

static double *naive_logits(const Model *m, const int32_t *ids, int n, int window, int keep)
{
    bool gemma = !strcmp(m->config.arch->name, "gemma2");
    Naive s = {m, n, window, keep, need(n * WIDTH * sizeof(double))};
    double *logits = need(n * VOCAB * sizeof *logits), h[WIDTH];
    for (int i = 0; i < n * WIDTH; i++)
        s.x[i] = tensor_of(m, -1, "token_embd")[ids[i / WIDTH] * WIDTH + i % WIDTH] * (gemma ? sqrt(WIDTH) : 1);
    for (int l = 0; l < m->config.n_layer; l++) naive_layer(&s, l, gemma);
    for (int i = 0; i < n; i++) {
        naive_norm(h, s.x + i * WIDTH, tensor_of(m, -1, "output_norm"));
        naive_product(logits + i * VOCAB, tensor_of(m, -1, "output"), h, WIDTH, VOCAB);
    }
    free(s.x);
    return logits;
}

// far past the window: rings wrap more than twice, tokens come in prompts of several lengths and
// one by one; the reference sees the whole text at once
static void test_ring(void)
{
    static const Shape shapes[] = {{"llama", 2, 0, NULL}, {"gemma2", 4, 0, "attention.sliding_window=9 "
        "attn_logit_softcapping=0 final_logit_softcapping=0"}};
    enum { N = 90, WINDOW = 24 };
    int32_t ids[N];
    for (int i = 0; i < N; i++) ids[i] = random_bits() % VOCAB;
    for (int a = 0; a < 2; a++) {
        Model m = {0};
        if (!open_random(&m, &shapes[a])) return;
        for (int keep = 0; keep <= 3; keep += 3)
            for (int chunk = 1; chunk <= 16; chunk = 4 * chunk - 1) {
                Session s = {0};
                Error e = {""};
                float rows[N * VOCAB];
                open_session(&s, &m, (Options){.window = WINDOW, .chunk = chunk, .keep = keep, .threads = 1});
                run_rows(&s, ids, 37, 0, rows);
                for (int n = 38; n <= N; n++) run_rows(&s, ids, n, n - 1, rows);
                double *want = naive_logits(&m, ids, N, WINDOW, keep), error = nmse_double(rows, want, N * VOCAB);
                CHECK(error < 1e-5, "%s, keep %d, -b %d: NMSE %.2g", shapes[a].arch, keep, chunk, error);
                double *full = naive_logits(&m, ids, N, N, 0), other = nmse_double(rows, full, N * VOCAB);
                CHECK(other > 1e-3, "%s: without a window NMSE is only %.2g: this test sees nothing", shapes[a].arch, other);
                printf("  %-6s keep %d, -b %-2d NMSE %.1e, limit 1e-5; with no window it would be %.2f\n", shapes[a].arch, keep,
                       chunk, error, other);
                // going back: what the rings still hold is reused, what they do not is run again
                for (int back = N - 2; back > 3; back -= 17) {
                    run_rows(&s, ids, back, back - 1, rows);
                    error = nmse_double(rows + (back - 1) * VOCAB, want + (back - 1) * VOCAB, VOCAB);
                    CHECK(error < 1e-5, "%s back to %d: NMSE %.2g", shapes[a].arch, back, error);
                }
                session_close(&s);
                free(want);
                free(full);
            }
        model_close(&m);
    }
}

static void test_chunks_and_threads(void)
{
    static const char *const names[] = {"llama", "llama-moe", "qwen35", "gemma3.iq4_nl", "llama256.q4_K_M"};
    static const int chunks[] = {1, 7, 64};
    for (int i = 0; i < (test.quick ? 3 : 5); i++) {
        Model m = {0};
        int32_t ids[64];
        if (!open_golden(&m, names[i])) return;
        int n = golden_tokens(names[i], ids), size = n * m.config.n_vocab;
        float *whole = logits_of(&m, ids, n, (Options){.threads = 1});
        double worst = 0;
        for (int k = 0; k < 3; k++) {
            float *got = logits_of(&m, ids, n, (Options){.chunk = chunks[k], .threads = 2});
            worst = fmax(worst, nmse(got, whole, size));
            free(got);
        }
        CHECK(worst < (i < 3 ? 1e-6 : 1e-3), "%s: NMSE %.2g between chunk sizes", names[i], worst);
        for (int threads = 2; threads <= (test.quick ? 2 : 8); threads += 1 + (threads > 2) * 4) {
            float *got = logits_of(&m, ids, n, (Options){.threads = threads, .chunk = 11});
            float *one = logits_of(&m, ids, n, (Options){.threads = 1, .chunk = 11});
            CHECK(!memcmp(got, one, size * sizeof *got), "%s: %d threads differ from one", names[i], threads);
            free(got);
            free(one);
        }
        printf("  %-16s chunk sizes differ by NMSE %.1e\n", names[i], worst);
        free(whole);
        model_close(&m);
    }
}

// A recurrent state cannot go back; a snapshot lets an answer be made again without its prompt.
static void test_regenerate(void)
{
    Model m = {0};
    Session s = {0};
    Error e = {""};
    int32_t ids[64];
    if (!open_golden(&m, "qwen35") || !open_session(&s, &m, (Options){.threads = 1})) return;
    int n = golden_tokens("qwen35", ids), prompt = 30, v = m.config.n_vocab;
    float *fresh = logits_of(&m, ids, n, (Options){.threads = 1}), *rows = need(n * v * sizeof *rows);
    run_rows(&s, ids, prompt, prompt - 1, rows);
    for (int again = 0; again < 2; again++) {
        for (int k = prompt + 1; k <= n; k++) run_rows(&s, ids, k, k - 1, rows);
        CHECK(nmse(rows + (prompt - 1) * v, fresh + (prompt - 1) * v, (n - prompt + 1) * v) < 1e-6, "answer %d differs", again);
        memset(rows, 0, n * v * sizeof *rows);
        run_rows(&s, ids, prompt, prompt - 1, rows);   // the same prompt: one token is computed
        CHECK(nmse(rows + (prompt - 1) * v, fresh + (prompt - 1) * v, v) < 1e-6, "the prompt's last row differs");
    }
    CHECK(s.saved_pos == prompt - 1, "the snapshot is at %d", s.saved_pos);
    memset(s.saved, 0, s.n_recurrent * sizeof *s.saved);   // so it is the snapshot that is used
    run_rows(&s, ids, prompt, prompt - 1, rows);
    CHECK(nmse(rows + (prompt - 1) * v, fresh + (prompt - 1) * v, v) > 1e-4, "the snapshot is not used");
    ids[3] ^= 1;                                           // an early change: everything again
    run_rows(&s, ids, prompt, prompt - 1, rows);
    float *changed = logits_of(&m, ids, prompt, (Options){.threads = 1});
    CHECK(nmse(rows + (prompt - 1) * v, changed + (prompt - 1) * v, v) < 1e-6, "a changed prompt");
    free(changed);
    free(fresh);
    free(rows);
    session_close(&s);
    model_close(&m);
}

static bool collect(void *ctx, int32_t id)
{
    Tokens *t = ctx;
    return tokens_add(t, id) && t->n < 12;
}

static void test_session_refusals(void)
{
    Model m = {0};
    Session s = {0};
    Error e = {""};
    Tokens out = {0};
    int32_t ids[97] = {1, 2, 3}, bad[] = {1, VOCAB}, negative[] = {-1};
    if (!open_random(&m, &(Shape){"gpt2", 2, NORM_BIAS | FUSED_QKV | POSITIONS | NO_GATE, NULL})) return;
    open_session(&s, &m, (Options){.window = 96, .sampling.seed = 4});
    CHECK(!session_eval(&s, bad, 2, &e) && strstr(e.text, "token id 64"), "%s", e.text);
    CHECK(!session_eval(&s, negative, 1, &e) && strstr(e.text, "token id -1"), "%s", e.text);
    CHECK(!session_eval(&s, ids, 0, &e) && strstr(e.text, "no tokens"), "%s", e.text);
    CHECK(!session_eval(&s, ids, 97, &e) && strstr(e.text, "learned positions"), "%s", e.text);
    CHECK(session_eval(&s, ids, 96, &e), "%s", e.text);
    CHECK(session_generate(&s, ids, 3, 9, collect, &out, &e) && out.n == 9, "%zu ids, %s", out.n, e.text);
    out.n = 0;
    CHECK(session_generate(&s, ids, 3, -1, collect, &out, &e) && out.n == 12, "stopped after %zu", out.n);
    out.n = 0;
    CHECK(!session_generate(&s, ids, 94, 9, collect, &out, &e) && strstr(e.text, "learned positions"), "%s", e.text);
    session_close(&s);
    CHECK(!session_open(&s, &m, (Options){.window = INT_MAX, .chunk = 1 << 20, .cpu = true}, &e) && strstr(e.text, "too large"), "%s", e.text);
    session_close(&s);
    session_close(&(Session){0});
    model_close(&m);
    model_close(&m);
    free(out.id);
}

// ==== sampler ====

static void fill(Candidate *c, const float *logits, int n)
{
    for (int i = 0; i < n; i++) c[i] = (Candidate){logits[i], i};
}

static void test_sampler_stages(void)
{
    static const float x[] = {2, -1, 0.5f, 3, -2};
    static const int32_t last[] = {3, 1, 3, 3, 99, -7};
    Candidate c[5];
    fill(c, x, 5);
    sample_penalty(c, 5, last, 6, 2);   // 3 / 2 once, -1 * 2; ids that are none do nothing
    CHECK(c[3].logit == 1.5f && c[1].logit == -2 && c[0].logit == 2 && c[2].logit == 0.5f, "penalty: %g %g", c[3].logit, c[1].logit);
    for (int i = 0; i < 5; i++) CHECK(c[i].id == i, "penalty: id %d at %d", c[i].id, i);
    fill(c, x, 5);
    sample_temperature(c, 5, 0.5f);
    CHECK(c[0].logit == 4 && c[4].logit == -4, "temperature");
    fill(c, x, 5);
    CHECK(sample_top_k(c, 5, 3) == 3 && c[0].id == 3 && c[1].id == 0 && c[2].id == 2, "top-k: %d %d %d", c[0].id, c[1].id, c[2].id);
    fill(c, x, 5);
    CHECK(sample_top_k(c, 5, 0) == 5 && sample_top_k(c, 5, 5) == 5 && sample_top_k(c, 5, 9) == 5 && c[0].id == 0, "top-k off");
    // shares of 2, -1, .5, 3, -2: .249 .012 .056 .678 .005
    fill(c, x, 5);
    CHECK(sample_top_p(c, 5, 0.67f) == 1 && c[0].id == 3, "top-p .67");
    fill(c, x, 5);
    CHECK(sample_top_p(c, 5, 0.69f) == 2 && c[1].id == 0, "top-p .69");
    fill(c, x, 5);
    CHECK(sample_top_p(c, 5, 0.98f) == 3 && c[2].id == 2, "top-p .98");
    fill(c, x, 5);
    CHECK(sample_top_p(c, 5, 0) == 1 && sample_top_p(c, 5, 1) == 5, "top-p at its ends");
    fill(c, x, 5);   // relative to the best: .368 .018 .082 1 .007
    CHECK(sample_min_p(c, 5, 0.05f) == 3 && sample_min_p(c, 3, 0.5f) == 1 && c[0].id == 3, "min-p");
    fill(c, x, 5);
    CHECK(sample_min_p(c, 5, 0) == 5 && sample_min_p(c, 5, 1) == 1, "min-p at its ends");
}

static int32_t draw(Sampling o, const float *x, int n, const int32_t *last, int n_last, uint64_t *rng)
{
    Candidate c[64];
    return sample(&o, x, n, last, n_last, rng, c);
}

static void test_sampler_choice(void)
{
    static const float x[] = {1, 4, 4, 2, NAN, -INFINITY, 3.9f};
    static const int32_t last[] = {1, 2};
    uint64_t a = 7, b = 7;
    int counts[7] = {0}, n = test.quick ? 20000 : 200000;
    Sampling greedy = {.temp = 0, .repeat_penalty = 1}, all = {.temp = 1, .top_p = 1, .repeat_penalty = 1};
    CHECK(draw(greedy, x, 7, NULL, 0, &a) == 1, "greedy takes the lower of two equal ids");
    greedy.repeat_penalty = 2;
    CHECK(draw(greedy, x, 7, last, 2, &a) == 6, "the penalty comes before the greedy choice");
    CHECK(a == 7, "greedy takes no random number");
    CHECK(draw((Sampling){.temp = -1, .repeat_penalty = 1}, x, 7, NULL, 0, &a) == 1, "a temperature below 0 is greedy");
    CHECK(draw((Sampling){.temp = 1, .top_k = 1, .top_p = 1, .repeat_penalty = 1}, x, 7, NULL, 0, &a) == 1, "top-k 1");
    static const float nothing[] = {NAN, NAN, NAN};
    int32_t id = draw(all, nothing, 3, NULL, 0, &a);
    CHECK(id >= 0 && id < 3, "all NaN gives id %d", id);
    a = b;
    for (int i = 0; i < n; i++) {
        int32_t first = draw(all, x, 7, NULL, 0, &a);
        CHECK(first == draw(all, x, 7, NULL, 0, &b), "the same seed, another draw");
        counts[first < 0 || first > 6 ? 4 : first]++;
    }
    double total = 0;
    for (int i = 0; i < 7; i++) total += i == 4 ? 0 : exp(x[i]);
    for (int i = 0; i < 7; i++) {
        double p = i == 4 ? 0 : exp(x[i]) / total, limit = 5 * sqrt(p * (1 - p) * n) + 0.5;   // five sigma
        CHECK(fabs(counts[i] - p * n) < limit, "id %d was drawn %d times, expected %.0f", i, counts[i], p * n);
    }
}

// sort_top against a plain sort, ties included
static int plain_order(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;
    return x->logit != y->logit ? (x->logit < y->logit) - (x->logit > y->logit) : x->id - y->id;
}

static void test_sampler_order(void)
{
    enum { N = 300 };
    Candidate c[N], sorted[N];
    for (int k = 1; k <= N; k += 23) {
        for (int i = 0; i < N; i++) c[i] = (Candidate){random_bits() % 50, i};
        memcpy(sorted, c, sizeof c);
        qsort(sorted, N, sizeof *sorted, plain_order);
        sort_top(c, N, k);
        for (int i = 0; i < k; i++) CHECK(c[i].id == sorted[i].id, "the best %d: id %d at %d", k, c[i].id, i);
    }
}

// the session's sampler: seeded once, the first token drawn like every other, repeat_last_n
static void test_sampler_session(void)
{
    Model m = {0};
    Error e = {""};
    int32_t ids[6][9] = {{1, 2, 3}};
    bool first_differs = false;
    if (!open_random(&m, &(Shape){"llama", 1, 0, NULL})) return;
    for (int run = 0; run < 6; run++) {
        Session s = {0};
        Options o = {.threads = 1, .sampling = {.temp = 3, .top_p = 1, .repeat_penalty = 1, .seed = run / 2 + 1}};
        open_session(&s, &m, o);
        memcpy(ids[run], ids[0], 3 * sizeof **ids);
        for (int n = 3; n < 9; n++) ids[run][n] = session_sample(&s, session_eval(&s, ids[run], n, &e));
        if (run % 2) CHECK(!memcmp(ids[run], ids[run - 1], sizeof *ids), "seed %d: two runs differ", run / 2 + 1);
        first_differs |= ids[run][3] != ids[0][3];
        session_close(&s);
    }
    CHECK(first_differs, "three seeds, one first token");
    int32_t chosen[3];
    for (int k = 0; k < 3; k++) {   // greedy, and a penalty that sees the last token only, or all
        Session s = {0};
        Options o = {.threads = 1, .sampling = {.repeat_penalty = k ? 1e6f : 1, .repeat_last_n = k == 1 ? 1 : -1}};
        open_session(&s, &m, o);
        int32_t text[3] = {k ? chosen[0] : 5, 6, 7};
        if (k == 1) text[0] = 5;
        chosen[k] = session_sample(&s, session_eval(&s, text, 3, &e));
        for (int i = 0; i < 3; i++) CHECK(k == 0 || (k == 1 && i < 2) || chosen[k] != text[i], "run %d repeats %d", k, text[i]);
        session_close(&s);
    }
    model_close(&m);
}

static void test_sampler_speed(void)
{
    enum { N = 151936 };
    float *x = noise_array(N, 8);
    Candidate *c = need(N * sizeof *c);
    Sampling o = {.temp = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1.1f};
    uint64_t rng = 1;
    double best = 1;
    for (int k = 0; k < 2; k++, o.top_k = 0) {
        for (int i = 0; i < (test.quick ? 2 : 10); i++) {
            double start = now();
            sample(&o, x, N, (int32_t[]){1, 2, 3}, 3, &rng, c);
            best = fmin(best, now() - start);
        }
        printf("  151,936 candidates, top-k %d: %.2f ms\n", o.top_k, 1e3 * best);
        CHECK(best < 0.5, "%.3f s for one token", best);
        best = 1;
    }
    free(x);
    free(c);
}
// ---- tokenizer ----

typedef struct { const char *gguf, *tsv; } TokGolden;
static const TokGolden TOK_GOLDENS[] = {
    {"golden/tok/spm.gguf", "golden/tok/spm.tsv"},
    {"golden/story.gguf", "golden/tok/bpe.tsv"},
    {"golden/archs/bert.gguf", "golden/tok/wpm.tsv"},
};

// a vocabulary in memory: keys are added one by one, then tok_open opens it
typedef struct {
    Gguf g;
    Meta meta[16];
    uint8_t data[8192];
    size_t n;
    Tokenizer t;
    Error e;
} TokVocab;

static void tok_put(TokVocab *v, const void *p, size_t n)
{
    memcpy(v->data + v->n, p, n);
    v->n += n;
}

// a string, or with `array` the strings between the commas of s
static void tok_key(TokVocab *v, const char *key, const char *s, bool array)
{
    Meta *m = &v->meta[v->g.n_meta++];
    *m = (Meta){{key, strlen(key)}, array ? GGUF_ARR : GGUF_STR, GGUF_STR, 0, v->data + v->n};
    for (; s; m->n++) {
        uint64_t n = array ? strcspn(s, ",") : strlen(s);
        tok_put(v, &n, 8);
        tok_put(v, s, n);
        s = s[n] ? s + n + 1 : NULL;
    }
}

// n 32-bit numbers of type elem; n = 0: one that is no array
static void tok_num(TokVocab *v, const char *key, uint32_t elem, const void *x, size_t n)
{
    v->meta[v->g.n_meta++] = (Meta){{key, strlen(key)}, n ? GGUF_ARR : elem, elem, n ? n : 1,
                                    v->data + v->n};
    tok_put(v, x, n ? 4 * n : 4);
}

static bool tok_open(TokVocab *v)
{
    v->g.meta = v->meta;
    qsort(v->meta, v->g.n_meta, sizeof *v->meta, meta_compare);
    return tokenizer_open(&v->t, &v->g, &v->e);
}

static void tok_vocab(TokVocab *v, const char *model, const char *pre, const char *tokens,
                      const char *merges)
{
    *v = (TokVocab){.n = 0};
    tok_key(v, "tokenizer.ggml.model", model, false);
    if (pre) tok_key(v, "tokenizer.ggml.pre", pre, false);
    if (tokens) tok_key(v, "tokenizer.ggml.tokens", tokens, true);
    if (merges) tok_key(v, "tokenizer.ggml.merges", merges, true);
}

// Every line of the recordings; then the ids turned into text again, a token at a time.
static void test_tokenizer_goldens(void)
{
    for (size_t k = 0; k < 3; k++) {
        Gguf g;
        Tokenizer t;
        Error e;
        static char line[65536], text[32768], back[32768];
        FILE *f = fopen(TOK_GOLDENS[k].tsv, "r");
        CHECK(f && gguf_open(&g, TOK_GOLDENS[k].gguf, &e), "%s", TOK_GOLDENS[k].gguf);
        CHECK(tokenizer_open(&t, &g, &e), "%s: %s", TOK_GOLDENS[k].gguf, e.text);
        char *piece = malloc(t.piece_max);
        int lines = 0;
        for (; fgets(line, sizeof line, f); lines++) {
            size_t n = 0, n_back = 0, i = 0;
            char *p = line;
            for (unsigned byte; *p != '\t' && sscanf(p, "%2x", &byte) == 1; p += 2)
                text[n++] = byte;
            Tokens ids = {0};
            CHECK(tokenize(&t, text, n, true, false, &ids, &e), "%s", e.text);
            for (char *end; strtol(p, &end, 10), end != p; p = end, i++)
                CHECK(i < ids.n && ids.id[i] == strtol(p, NULL, 10), "%s line %d: id %zu",
                      TOK_GOLDENS[k].tsv, lines + 1, i);
            CHECK(i == ids.n, "%s line %d: %zu ids", TOK_GOLDENS[k].tsv, lines + 1, ids.n);
            Detokenizer d = {0};
            for (i = 0; i < ids.n; i++) {
                size_t len = detokenize(&t, &d, ids.id[i], piece);
                CHECK(!len || ((piece[0] & 0xC0) != 0x80 && n_back + len < sizeof back), "whole");
                memcpy(back + n_back, piece, len);
                n_back += len;
            }
            if (k < 2) CHECK(n == n_back && !memcmp(text, back, n), "line %d back", lines + 1);
            free(ids.id);
        }
        CHECK(lines == 35, "%s: %d lines", TOK_GOLDENS[k].tsv, lines);
        free(piece);
        fclose(f);
        tokenizer_close(&t);
        gguf_close(&g);
    }
}

// Words, by hand from the regular expressions of each family; | stands between them.
static void test_tokenizer_rules(void)
{
    static const struct { const char *pre, *words; } rules[] = {
        {"gpt-2", "It|'s| I|'|LL| 1234|  | x|\n\n| ,;|\t"},
        {"llama-bpe", "It|'s| I|'LL| |123|4|  | x|\n\n| ,;|\t"},
        {"qwen2", "don|'T| |1|2|  |\ty|!?\n\n|.x| \u00E9"},
        {"qwen35", "a\u0301b| \u0301c|1|2"},
        {"default", "a|+|b|123|456|78|."},
        {"falcon", "a|`+|b|123|45| |678|."},
        {"starcoder", "a|1|2| |3| b|'s|'s|\n"},
        {"tekken", "Hello|World|HTTPs| \u00C0|B|1|2|;/\n/\n"},
        {"gpt-4o", "Hello's|World|ABC'LL| |123|4|;/"},
        {"deepseek-llm", "ab| \u00C9\u00E9| !?|\n|漢字|12|  "},
        {"deepseek-coder", "ab| |漢| !?|1|2|\r|\n"},
        {"deepseek-v3", "123|4|漢字かな|.x| !\n|ab\u0301"},
        {"gemma4", "a  b c|\n\n|d"},
        {"exaone4", "x| y"}, {"smaug-bpe", "112|3"}, {"phi-2", "a| b"},
    };
    for (size_t k = 0; k < sizeof rules / sizeof *rules; k++) {
        static Char ch[256];
        static char expected[256];
        TokVocab v;
        tok_vocab(&v, "gpt2", rules[k].pre, "a,b,c,d,e,f,g,h,i,j,k,l", "a b");
        CHECK(tok_open(&v), "%s", v.e.text);
        size_t n = 0, n_words = 1;
        memset(ch, 0, sizeof ch);
        memset(expected, 0, sizeof expected);
        for (const char *s = rules[k].words; *s;) {
            if (*s == '|') expected[n] = 1, n_words++, s++;
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
        tokenizer_close(&v.t);
    }
}

// ids of text as decimal numbers
static const char *tok_ids(const Tokenizer *t, const char *text, size_t n, bool add, bool special)
{
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

static void test_tokenizer_special(void)
{
    TokVocab v;
    const int32_t types[] = {1, 1, 1, 3, 4, 4, 1, 3, 2, 1, 1}, eos = 7, yes = 1, bos = 3;
    tok_vocab(&v, "gpt2", "gpt-2", "a,b,ab,<s>,bb,bbb,<|im_end|>,</x>,<u>,<|eot_id|>,c", "a b");
    tok_num(&v, "tokenizer.ggml.token_type", GGUF_I32, types, 11);
    tok_num(&v, "tokenizer.ggml.eos_token_id", GGUF_I32, &eos, 0);
    tok_num(&v, "tokenizer.ggml.bos_token_id", GGUF_I32, &bos, 0);
    tok_num(&v, "tokenizer.ggml.add_bos_token", GGUF_I32, &yes, 0);
    CHECK(tok_open(&v), "%s", v.e.text);
    // user-defined tokens are always cut out, the longest first; control tokens on request
    CHECK(!strcmp(tok_ids(&v.t, "abbbbb", 6, true, false), " 3 0 5 4"), "user-defined");
    CHECK(!strcmp(tok_ids(&v.t, "ab<s>", 5, false, true), " 2 3"), "parsed");
    CHECK(!strcmp(tok_ids(&v.t, "a<u>b", 5, false, true), " 0 8 1"), "unknown, parsed");
    CHECK(!strcmp(tok_ids(&v.t, "c<s>", 4, false, false), " 10"), "bytes without tokens: nothing");
    CHECK(!strcmp(tok_ids(&v.t, "", 0, true, false), " 3"), "empty");
    for (int32_t id = -2; id < 13; id++)
        CHECK(token_is_eog(&v.t, id) == (id == 6 || id == 7 || id == 9), "eog %d", id);
    CHECK(token_find(&v.t, "bbb") == 5 && token_find(&v.t, "x") == -1, "find");
    tokenizer_close(&v.t);
}

// bytes of a character arrive one by one; what cannot become one is U+FFFD
static void test_tokenizer_streaming(void)
{
    static const struct { int32_t id; const char *text; } steps[] = {
        {7, ""}, {0, "x"}, {0, " x"}, {1, ""}, {2, ""}, {3, ""}, {4, "😀"}, {5, "a"}, {1, ""},
        {5, "\uFFFDa"}, {4, "\uFFFD"}, {6, ""}, {0, " x"}};
    const int32_t types[] = {1, 6, 6, 6, 6, 1, 3, 2};
    const float scores[8] = {0};
    char out[128];
    TokVocab v;
    Detokenizer d = {0};
    tok_vocab(&v, "llama", NULL, "\u2581x,<0xF0>,<0x9F>,<0x98>,<0x80>,a,<s>,<u>", NULL);
    tok_num(&v, "tokenizer.ggml.token_type", GGUF_I32, types, 8);
    tok_num(&v, "tokenizer.ggml.scores", GGUF_F32, scores, 8);
    CHECK(tok_open(&v) && v.t.piece_max <= sizeof out, "%s", v.e.text);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        size_t n = detokenize(&v.t, &d, steps[i].id, out);
        CHECK(n == strlen(steps[i].text) && !memcmp(out, steps[i].text, n), "step %zu", i);
    }
    d = (Detokenizer){.started = true};
    CHECK(detokenize(&v.t, &d, 0, out) == 2, "a continuation keeps its space");
    CHECK(!strcmp(tok_ids(&v.t, "x😀\xFF", 6, true, false), " 1 0 1 2 3 4 0"), "bytes");
    tokenizer_close(&v.t);
}

static void test_tokenizer_refusals(void)
{
    static const struct { const char *model, *pre, *tokens, *merges, *says; } bad[] = {
        {"t5", "gpt-2", "a,b", "a b", "'t5'"}, {"rwkv", "gpt-2", "a,b", "a b", "'rwkv'"},
        {"gpt2", "gpt-9", "a,b", "a b", "'gpt-9'"}, {"gpt2", "gpt-2", "a,b", "a b,ab", "merge 1"},
        {"gpt2", "gpt-2", NULL, "a b", "tokens is missing"}, {"bert", NULL, "a", NULL, "token"},
        {"gpt2", "gpt-2", "a,b", NULL, "merges is missing"}, {"llama", NULL, "a,b", NULL, "scores"},
    };
    TokVocab v;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        tok_vocab(&v, bad[i].model, bad[i].pre, bad[i].tokens, bad[i].merges);
        CHECK(!tok_open(&v) && strstr(v.e.text, bad[i].says), "%s: %s", bad[i].says, v.e.text);
        tokenizer_close(&v.t);
    }
    static const char *const keys[] = {"token_type", "eos_token_id", "bos_token_id"};
    for (size_t i = 0; i < 3; i++) {   // 3 types for 2 tokens, ids past the end
        const int32_t x[] = {2, 1, 1};
        char key[64];
        snprintf(key, sizeof key, "tokenizer.ggml.%s", keys[i]);
        tok_vocab(&v, "gpt2", "gpt-2", "a,b", "a b");
        tok_num(&v, key, GGUF_I32, x, i ? 0 : 3);
        CHECK(!tok_open(&v) && strstr(v.e.text, keys[i]), "%s: %s", keys[i], v.e.text);
        tokenizer_close(&v.t);
    }
    tok_vocab(&v, "gpt2", NULL, "a,b,,a", "a b");   // empty and repeated tokens are no error
    CHECK(tok_open(&v) && v.t.note && token_find(&v.t, "a") == 0, "missing pre: %s", v.e.text);
    tokenizer_close(&v.t);
}

// a megabyte without a break takes seconds at most; quadratic joining would take hours
static void test_tokenizer_linear(void)
{
    static const char *const patterns[] = {"a", " ", "ab", "\xD0\xB1", "\xFF", " \n"};
    const size_t n = getenv("TEST_SMALL") ? 1 << 13 : 1 << 20;
    char *text = malloc(n);
    for (size_t k = 0; k < 3; k++) {
        Gguf g;
        Tokenizer t;
        Error e;
        CHECK(gguf_open(&g, TOK_GOLDENS[k].gguf, &e) && tokenizer_open(&t, &g, &e), "%s", e.text);
        for (size_t p = 0; p < sizeof patterns / sizeof *patterns; p++) {
            for (size_t i = 0; i < n; i++) text[i] = patterns[p][i % strlen(patterns[p])];
            Tokens ids = {0};
            double start = now();
            CHECK(tokenize(&t, text, n, true, false, &ids, &e), "%s", e.text);
            CHECK(now() - start < 10, "%s: pattern %zu takes %.1f s", TOK_GOLDENS[k].gguf, p,
                  now() - start);
            free(ids.id);
        }
        tokenizer_close(&t);
        gguf_close(&g);
    }
    free(text);
}

// ==== the command line ====

static struct { int status; char *out, *err; size_t n; } cli;

// runs llm in a shell: $S is the storyteller, $G golden/archs, $D the scratch directory
static void llm(const char *before, const char *arguments)
{
    char command[1024], path[128], end[128] = "";
    setenv("S", "golden/story.gguf", 1);
    setenv("G", "golden/archs", 1);
    setenv("D", test.dir, 1);
    free(cli.out);
    free(cli.err);
    snprintf(end, sizeof end, "%s 2>%s/err", strstr(before, "|") ? "" : "</dev/null", test.dir);
    snprintf(command, sizeof command, "%s %s %s >%s/out %s", before, test.program, arguments, test.dir, end);
    if (strchr(arguments, '>')) snprintf(command, sizeof command, "%s %s %s %s", before, test.program, arguments, end);
    int status = system(command);
    cli.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    cli.err = read_all(scratch(path, "err"), &cli.n);
    cli.out = read_all(scratch(path, "out"), &cli.n);
}

static bool matches(const char *text, const char *pattern)
{
    regex_t r;
    bool ok = !regcomp(&r, pattern, REG_EXTENDED | REG_NOSUB) && !regexec(&r, text, 0, NULL, 0);
    regfree(&r);
    return ok;
}

static void test_cli_refusals(void)
{
    static const struct { int status; const char *arguments, *says; } bad[] = {
        {2, "", "MODEL"},
        {2, "$S", "PROMPT"},
        {2, "$S hi -q", "-q"},
        {2, "$S hi --temperature 1", "--temperature"},
        {2, "$S hi -n", "-n"},
        {2, "$S hi -n abc", "abc"},
        {2, "$S hi -n 99999999999", "99999999999"},
        {2, "$S hi -n -2", "-2"},
        {2, "$S hi -c 0", "-c"},
        {2, "$S hi -b 0", "-b"},
        {2, "$S hi -t 0", "-t"},
        {2, "$S hi --temp nan", "nan"},
        {2, "$S hi --temp ''", "--temp"},
        {2, "$S hi --top-k -1", "--top-k"},
        {2, "$S hi --top-p 1.5", "1.5"},
        {2, "$S hi --min-p -0.1", "--min-p"},
        {2, "$S hi --repeat-penalty 0", "--repeat-penalty"},
        {2, "$S hi --repeat-last-n -2", "--repeat-last-n"},
        {2, "$S hi --seed 1x", "1x"},
        {2, "$S hi --keep -1", "--keep"},
        {2, "$S one two", "two"},
        {2, "$S one -p two", "prompts"},
        {2, "$S -f x --tokens 1", "prompts"},
        {2, "$S --tokens 1,x", "x"},
        {1, "nowhere.gguf hi", "nowhere.gguf"},
        {1, "golden hi", "not a regular file"},
        {1, "/dev/null hi", "not a regular file"},
        {1, "golden/story.txt hi", "not a GGUF file"},
        {1, "$S -f nowhere.txt", "nowhere.txt"},
        {1, "$S -f golden", "golden"},
        {1, "$S \"$(printf 'ab\\377')\"", "byte 2"},
        {1, "$S \"$(printf '\\355\\240\\200')\"", "byte 0"},
        {1, "$S --tokens 1,2048", "2048"},
        {1, "$S --ppl nowhere.txt", "nowhere.txt"},
        {1, "$S --ppl golden/tok/bpe.tsv -c 4096", "4096"},
        {1, "$S hi --logits nowhere/x", "nowhere/x"},
        {1, "$S -i", "template"},
        {1, "$G/llama.gguf hi", "tokenizer"},
        {1, "$G/bert.gguf hi", "--embed"},
        {1, "golden/tok/spm.gguf hi", "no tensors"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        llm("", bad[i].arguments);
        CHECK(cli.status == bad[i].status, "llm %s: exit %d, want %d", bad[i].arguments, cli.status, bad[i].status);
        const char *end = strchr(cli.err, '\n');
        CHECK(end && !end[1] && !cli.n, "llm %s: one line on stderr, nothing else: '%s%s'", bad[i].arguments, cli.err, cli.out);
        CHECK(strstr(cli.err, bad[i].says), "llm %s: '%s' does not say '%s'", bad[i].arguments, cli.err, bad[i].says);
    }
}

// what is printed, to the letter
static void test_cli_output(void)
{
    static const struct { const char *before, *arguments, *pattern; } good[] = {
        {"", "--version", "^llm [0-9.]+\n$"},
        {"", "--help", "^usage: llm MODEL"},
        {"", "nowhere.gguf --help", "^usage: llm MODEL"},
        {"", "$S --tokenize 'Once upon a time'", "^1656 329 659 258 530\n$"},
        {"", "--tokenize -p 'Once upon a time' -m $S", "^1656 329 659 258 530\n$"},
        {"printf 'Once upon a time' |", "$S -f - --tokenize", "^1656 329 659 258 530\n$"},
        {"", "$S --tokenize ''", "^\n$"},
        {"", "golden/tok/spm.gguf --tokenize ''", "^1\n$"},
        {"", "$S --tokenize -- --help", "^[0-9 ]+\n$"},
        {"", "$S 'Once upon' -n 0", "^Once upon\n$"},
        {"", "$S 'Once upon' -n 3 -n 0", "^Once upon\n$"},
        {"", "$G/llama.gguf --tokens 1,2,3 -n 5 --temp 0", "^[0-9]+( [0-9]+){4}\n$"},
        {"", "$S --ppl golden/story.txt -c 128", "^ppl 6\\.[56][0-9]{3} \\+- 0\\.[0-9]{4} tokens [0-9]+ windows [0-9]+\n$"},
        {"", "$S --bench 16,8", "^prefill 16 tokens [0-9]+\\.[0-9] tok/s\n"
             "decode 8 tokens [0-9]+\\.[0-9] tok/s [0-9]+\\.[0-9] GB/s [0-9]+\\.[0-9] % of [0-9]+\\.[0-9] GB/s\n$"},
        {"", "$S --info", "qwen3.*2048.*q4_K.*KV"},
        {"", "$G/bert.gguf --embed hello", "^-?[0-9.e-]+( -?[0-9.e-]+){63}\n$"},
        {"", "$S --embed hello", "^-?[0-9.e-]+( -?[0-9.e-]+){255}\n$"},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        llm(good[i].before, good[i].arguments);
        CHECK(cli.status == 0, "llm %s: exit %d: %s", good[i].arguments, cli.status, cli.err);
        CHECK(matches(cli.out, good[i].pattern), "llm %s: '%s' is not '%s'", good[i].arguments, cli.out, good[i].pattern);
    }
    llm("", "--help");
    int lines = 0;
    for (const char *s = cli.out; *s; s++) lines += *s == '\n';
    CHECK(lines <= 40, "--help has %d lines: more than a screen", lines);
    for (size_t i = 0; i < sizeof ARCHS / sizeof *ARCHS; i++) CHECK(strstr(cli.out, ARCHS[i].name), "--help: %s", ARCHS[i].name);
}

static void test_cli_completion(void)
{
    static const char *const same[] = {"$S 'Once upon a time' -n 20 --seed 7", "-n 20 --seed 7 -p 'Once upon a time' -m $S -t 1",
        "$S --tokens 1656,329,659,258,530 -n 20 --seed 7", "$S 'Once upon a time' -n 20 --seed 7 --no-display-prompt"};
    char first[4096] = "";
    for (int i = 0; i < 4; i++) {
        llm("", same[i]);
        CHECK(cli.status == 0 && cli.n && cli.out[cli.n - 1] == '\n' && cli.n < sizeof first, "%s: exit %d", same[i], cli.status);
        CHECK(matches(cli.err, "prefill .*tok/s.*decode .*tok/s.*GB/s.*peak .*MB.*seed 7\n$"), "statistics: '%s'", cli.err);
        if (i == 0) CHECK(!strncmp(cli.out, "Once upon a time", 16), "no prompt: '%s'", cli.out);
        if (i == 0) memcpy(first, cli.out, cli.n);
        CHECK(!strcmp(cli.out, first + (i < 2 ? 0 : 16)), "%s: '%s', not '%s'", same[i], cli.out, first);
    }
    llm("", "$S 'Once upon a time' -n 20");   // the seed comes from the clock
    CHECK(strcmp(cli.out, first), "no --seed, and the same text");
    llm("", "$S 'Once upon a time' -n 5 >/dev/full");
    CHECK(cli.status == 1 && strstr(cli.err, "standard output"), "full standard output: exit %d, '%s'", cli.status, cli.err);
}

static void test_cli_logits(void)
{
    static const int32_t ids[] = {1656, 329, 659, 258, 530};
    char path[128];
    size_t n;
    Error e = {""};
    Model m = {0};
    llm("", "$S 'Once upon a time' -b 3 --logits $D/rows");
    float *got = read_all(scratch(path, "rows"), &n);
    if (CHECK(model_open(&m, "golden/story.gguf", &e), "%s", e.text)) {
        float *want = logits_of(&m, ids, 5, (Options){.chunk = 3, .window = 4096});
        CHECK(n == 5 * 2048 * sizeof *got && nmse(got, want, 5 * 2048) < 1e-9, "%zu bytes of logits, exit %d", n, cli.status);
        free(want);
    }
    model_close(&m);
    free(got);
    llm("trap '' XFSZ; ulimit -f 1;", "$S 'Once upon a time' --logits $D/cut");
    CHECK(cli.status == 1 && strstr(cli.err, "cut"), "no room: exit %d, '%s'", cli.status, cli.err);
    CHECK(access(scratch(path, "cut"), F_OK), "a part of the logits was left behind");
}

// Ctrl-C ends generation: statistics, exit 130
static void test_cli_interrupt(void)
{
    char path[128], command[512];
    size_t n = 0;
    snprintf(command, sizeof command, "exec %s golden/story.gguf Once -n 100000000 -c 64", test.program);
    pid_t child = fork();
    if (child == 0) {
        if (freopen(scratch(path, "stopped"), "w", stdout) && freopen(scratch(path, "said"), "w", stderr))
            execl("/bin/sh", "sh", "-c", command, NULL);
        _exit(127);
    }
    for (int i = 0; i < 600 && n < 40; i++) {   // until it speaks
        usleep(50000);
        struct stat st;
        n = stat(scratch(path, "stopped"), &st) ? 0 : st.st_size;
    }
    int status = 0;
    kill(child, SIGINT);
    waitpid(child, &status, 0);
    char *said = read_all(scratch(path, "said"), &n);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 130, "exit %d", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    CHECK(matches(said, "prefill .*decode .*seed [0-9]+\n$"), "'%s'", said);
    free(said);
}

// ==== a GPU in software ====
//
// kernels.metal runs here as it stands, and metal.c links here as it stands: three layers let it.
//    a. the Metal library: the words and functions of Metal that kernels.metal uses, as C macros
//    b. the emulator: threads of a threadgroup are fibers, switched at barriers and simd_* calls
//    c. the software Metal device behind the eight Objective-C functions that metal.c calls
//
// Threadgroups run one after another. A fiber switches only at a rendezvous: a barrier, or a
// SIMD-group function; which one goes on is the schedule's choice. Each schedule drives one
// thread (then its SIMD-group) as far as it can get, so that a missing barrier shows as a wrong
// result under one order or another; built with -fsanitize=thread, each fiber is a thread to the
// sanitizer and only barriers order memory: a race is reported under any. A barrier that some
// threads miss, lanes that part before a simd_* call: errors at once, with the line.
//
// Layer a is also compiled alone with a broken copy of kernels.metal, by `./test mutants`, which
// cuts it out by the two marks below.
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

// >>> Metal library
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef struct { half e[2]; } simdgroup_half8x8;   // a lane's two elements of an 8 x 8 matrix
typedef struct { float e[2]; } simdgroup_float8x8;

enum { SIMD = 32 };
#define SITE (__COUNTER__ << 16 | __LINE__)   // two calls on a line are two places

void emu_barrier(const char *flags, int site);
void emu_simd_barrier(const char *flags, int site);
float emu_fold_float(const char *op, int site, float x);
int emu_fold_int(const char *op, int site, int x);
float emu_take_float(const char *op, int site, float x, int lane);
int emu_take_int(const char *op, int site, int x, int lane);
void emu_multiply(int site, const float *ab, const float *c, float *d);
int emu_lane(void);

static inline float emu_as_float(uint32_t x)
{
    union { uint32_t i; float f; } u = {x};
    return u.f;
}

#define kernel
#define device
#define constant
#define threadgroup
#define thread
#define as_float(x) emu_as_float(x)
#define rsqrt(x) (1.0f / sqrtf(x))
#define exp(x) expf(x)
#define exp2(x) exp2f(x)
#define tanh(x) tanhf(x)
#define rint(x) rintf(x)
#define fabs(x) fabsf(x)
#define max(a, b) ({ __typeof__((a) + 0) a_ = (a), b_ = (b); a_ > b_ ? a_ : b_; })
#define min(a, b) ({ __typeof__((a) + 0) a_ = (a), b_ = (b); a_ < b_ ? a_ : b_; })
#define clamp(x, a, b) min(max(x, a), b)
#define threadgroup_barrier(flags) emu_barrier(#flags, SITE)
#define simdgroup_barrier(flags) emu_simd_barrier(#flags, SITE)

#define EMU_FOLD(op, x) _Generic((x), float: emu_fold_float, default: emu_fold_int)(op, SITE, x)
#define EMU_TAKE(op, x, i) _Generic((x), float: emu_take_float, default: emu_take_int)(op, SITE, x, i)
#define simd_sum(x) EMU_FOLD("simd_sum", x)
#define simd_max(x) EMU_FOLD("simd_max", x)
#define simd_min(x) EMU_FOLD("simd_min", x)
#define simd_shuffle(x, i) EMU_TAKE("simd_shuffle", x, i)
#define simd_shuffle_xor(x, i) EMU_TAKE("simd_shuffle_xor", x, emu_lane() ^ (i))

// Lane l holds row l / 4, columns l % 4 * 2 and the next. (Apple's layout differs; a kernel
// cannot tell unless it uses thread_elements().)
#define EMU_ROW (emu_lane() / 4)
#define EMU_COL (emu_lane() % 4 * 2)
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
// <<< Metal library

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wattributes"   // [[buffer(0)]] and its kin
#define attention metal_attention               // names that llm.c and the tests use, too
#define layer_norm metal_layer_norm
#define rope metal_rope
#include "kernels.metal"
#undef attention
#undef layer_norm
#undef rope
#pragma GCC diagnostic pop
#undef kernel
#undef device
#undef constant
#undef threadgroup
#undef thread
#undef rsqrt
#undef exp
#undef exp2
#undef tanh
#undef rint
#undef fabs
#undef max
#undef min
#undef clamp

// ---- the emulator ----

enum { MAX_THREADS = 1024, STACK = 4 << 20 };   // stacks so far apart that valgrind tells them apart
#define LINE(site) ((site) & 0xffff)
enum { FORWARD, REVERSE, RANDOM, ORDERS };

typedef struct {
    jmp_buf go;
    ucontext_t start;
    const char *op;                              // the rendezvous it waits at
    int site, turn, begun;
    union { float f; int i; float m[4]; } slot[2];   // what it left there; two, for fast lanes
    void *fiber;
} EmuThread;

static struct {
    int order;
    uint32_t seed;
    int threads, groups, now, alive, waiting;    // size, SIMD-groups, running thread, ...
    int first;                                   // its thread 0 is t[first]
    uint32_t live[SIMD], ready[SIMD], simd[SIMD], active[SIMD];   // [SIMD-group] a bit a lane
    uint32_t released[SIMD], folded[SIMD];       // rendezvous so far, and the last that was folded
    union { float f; int i; } fold[SIMD];
    int tg;                                      // this threadgroup
    void *shared;                                // its memory
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

HIDDEN static uint32_t emu_random(void)
{
    return (emu.seed = emu.seed * 1664525u + 1013904223u) >> 8;
}

HIDDEN static int emu_bit(uint32_t m)            // one of the bits of m, by the schedule
{
    if (emu.order == FORWARD) return __builtin_ctz(m);
    if (emu.order == REVERSE) return 31 - __builtin_clz(m);
    for (int skip = emu_random() % __builtin_popcount(m); skip--;) m &= m - 1;
    return __builtin_ctz(m);
}

HIDDEN static void emu_switch(void)              // give way to whichever thread is next
{
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

HIDDEN static void emu_release_simd(int g)       // have all live lanes come to the same place?
{
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

// Where this thread leaves what others will read at its next rendezvous
#define EMU_SLOT(i) (EMU(i).slot[EMU(i).turn])

// Waits until every live lane of this SIMD-group has come; returns which they are
HIDDEN static uint32_t emu_simd(const char *op, int site)
{
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

// Folds run in lane order, by whichever lane comes first; op is simd_sum, simd_max or simd_min.
#define EMU_FOLD_FUNCTION(T, field) \
    HIDDEN T emu_fold_##T(const char *op, int site, T x) \
    { \
        int g = emu.now / SIMD; \
        EMU(emu.now).turn ^= 1; \
        EMU_SLOT(emu.now).field = x; \
        uint32_t active = emu_simd(op, site); \
        if (emu.folded[g] == emu.released[g]) return emu.fold[g].field; \
        emu.folded[g] = emu.released[g]; \
        emu.fold[g].field = x; \
        for (int i = 0, n = 0; i < SIMD; i++) { \
            if (!(active >> i & 1)) continue; \
            T a = emu.fold[g].field, b = EMU(g * SIMD + i).slot[EMU(emu.now).turn].field; \
            a = op[6] == 'u' ? a + b : op[6] == 'a' ? (a > b ? a : b) : (a < b ? a : b); \
            emu.fold[g].field = n++ ? a : b; \
        } \
        return emu.fold[g].field; \
    } \
    HIDDEN T emu_take_##T(const char *op, int site, T x, int lane) \
    { \
        EMU(emu.now).turn ^= 1; \
        EMU_SLOT(emu.now).field = x; \
        uint32_t active = emu_simd(op, site); \
        if (lane < 0 || lane >= SIMD || !(active >> lane & 1)) \
            emu_fail("%s line %d reads lane %d, which is not active", op, LINE(site), lane); \
        return EMU(emu.now / SIMD * SIMD + lane).slot[EMU(emu.now).turn].field; \
    }
EMU_FOLD_FUNCTION(float, f)
EMU_FOLD_FUNCTION(int, i)

HIDDEN int emu_lane(void)
{
    return emu.now % SIMD;
}

HIDDEN void emu_multiply(int site, const float *ab, const float *c, float *d)
{
    EmuThread *t = &EMU(emu.now);
    t->turn ^= 1;
    memcpy(t->slot[t->turn].m, ab, sizeof t->slot[0].m);
    if (emu_simd("simdgroup_multiply", site) != ~0u)
        emu_fail("simdgroup_multiply line %d without all 32 lanes", LINE(site));
    int base = emu.now / SIMD * SIMD, row = emu.now % SIMD / 4, col = emu.now % 4;
    float sum[2] = {c[0], c[1]};
    for (int k = 0; k < 8; k++) {
        float a = EMU(base + row * 4 + k / 2).slot[t->turn].m[k % 2];
        const float *b = EMU(base + k * 4 + col).slot[t->turn].m + 2;
        sum[0] += a * b[0];
        sum[1] += a * b[1];
    }
    d[0] = sum[0];
    d[1] = sum[1];
}

HIDDEN void emu_simd_barrier(const char *flags, int site)
{
    TSAN(char *order = &emu.order_sg[emu.now / SIMD];)
    TSAN(if (!strstr(flags, "mem_none")) __tsan_release(order);)
    (void)flags;
    emu_simd("simdgroup_barrier", site);
    TSAN(if (!strstr(flags, "mem_none")) __tsan_acquire(order);)
}

HIDDEN void emu_barrier(const char *flags, int site)
{
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

HIDDEN static void emu_fiber(void)
{
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

HIDDEN static void emu_start(int i)              // make thread i's fiber, or take it again
{
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

HIDDEN static void emu_threadgroup(void)
{
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
    if (!_setjmp(emu.host)) {
        emu.now = -1;
        emu_switch();
    }
}

// Runs a grid: the kernel is called once a thread, with emu.tg and emu.now saying which. Returns
// what went wrong, or NULL. Threadgroup memory is exactly so long, all NaN and marked undefined.
HIDDEN static const char *emu_run(int groups, int threads, size_t bytes, void (*kernel)(void *),
                                  void *argument)
{
    long shift = emu_random(), step = groups % 7919 ? 7919 : 1;   // a prime: visits each once
    void **block = calloc(groups, sizeof *block);
    emu.error[0] = 0;
    emu.threads = threads;
    emu.kernel = kernel;
    emu.argument = argument;
    for (int i = 0; i < groups && !emu.error[0]; i++) {
        emu.tg = emu.order == FORWARD ? i : emu.order == REVERSE ? groups - 1 - i
                 : (int)((i * step + shift) % groups);
        emu.shared = block[i] = malloc(bytes);
        memset(emu.shared, 0xff, bytes);
        (void)VALGRIND_MAKE_MEM_UNDEFINED(emu.shared, bytes);
        emu_threadgroup();
    }
    TSAN(__tsan_acquire(&emu.done);)             // only now: threadgroups are not ordered
    for (int i = 0; i < groups; i++) free(block[i]);
    free(block);
    if (!emu.error[0]) return NULL;
    for (int i = 0; i < MAX_THREADS; i++) emu.t[i].begun = 0;   // abandoned midway: start afresh
    return emu.error;
}

// ---- the software Metal device ----
//
// Kernels run when waitUntilCompleted is sent: a host that reads too early sees the old data.
// Positions of arguments come from the [[attributes]] in the source text; compiled kernels and
// function constants are found by name in this program (link with -rdynamic) or in soft.kernels.
// The generic call passes one word a parameter: right on x86-64 and arm64 Linux.

enum { BINDINGS = 31, PARAMS = 20, CONSTANTS = 24, RECORDS = 4096 };
enum { P_BUFFER, P_SHARED, P_TG, P_TID, P_LANE, P_SG, P_NSG, KINDS };   // what a kernel's parameter is
static const char *const soft_kinds[KINDS] = {"buffer", "shared_memory", "threadgroup_position_in_grid",
    "thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup"};

struct SoftClass;
typedef struct { struct SoftObject *buffer; char *p; size_t n; } SoftBind;
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
    void *p;                                     // a string's, buffer's, library's bytes
    size_t n;
    bool mine;                                   // p is ours to free
    struct { int kind, index; } param[PARAMS];
    struct { bool set; int value; } constant[CONSTANTS];
    SoftRun now, *runs, **last;                  // an encoder's state, a command buffer's work
} SoftObject;
typedef struct { const char *name, *type; void *code; } SoftMethod;
typedef struct SoftClass { const struct SoftClass *isa; const char *name; const SoftMethod *method; } SoftClass;

static struct {
    int live, faults, pools, pooled;             // objects; misuse of the API; open pools
    int buffers, commits, n_run;                 // made since the test reset them
    SoftObject *pool[1000];                      // NULL marks where a pool begins
    struct { SoftObject *pipeline; void *bound[16]; } run[RECORDS];
    void *kernels;                               // a library of broken kernels, or NULL
    const char *broken;                          // the method that is to fail, or NULL
    bool no_default;                             // as in some sessions without a screen
} soft;

__attribute__((format(printf, 1, 2))) static void soft_fault(const char *format, ...)
{
    va_list v;
    va_start(v, format);
    fprintf(stderr, "software Metal: ");
    vfprintf(stderr, format, v);
    fprintf(stderr, "\n");
    va_end(v);
    soft.faults++;
}

static bool soft_breaks(const char *method)
{
    return soft.broken && !strcmp(soft.broken, method);
}

static SoftObject *soft_new(const SoftClass *c)
{
    SoftObject *o = calloc(1, sizeof *o);
    o->isa = c;
    o->refs = 1;
    o->last = &o->runs;
    soft.live++;
    return o;
}

static SoftObject *soft_retain(SoftObject *o)
{
    o->refs++;
    return o;
}

static void soft_release(SoftObject *o)
{
    if (!o || --o->refs) return;
    for (SoftRun *r = o->runs, *next; r; r = next) {
        next = r->next;
        soft_release(r->pipeline);
        for (int i = 0; i < BINDINGS; i++) {
            if (!r->bind[i].buffer) free(r->bind[i].p);
            soft_release(r->bind[i].buffer);
        }
        free(r);
    }
    for (int i = 0; i < BINDINGS; i++)
        if (!o->now.bind[i].buffer) free(o->now.bind[i].p);
    if (o->mine) free(o->p);
    soft_release(o->a);
    free(o);
    soft.live--;
}

static SoftObject *soft_autorelease(SoftObject *o)
{
    if (!soft.pools) soft_fault("%s autoreleased with no pool in place", o->isa->name);
    soft.pool[soft.pooled++] = o;
    return o;
}

void *objc_autoreleasePoolPush(void)
{
    soft.pools++;
    soft.pool[soft.pooled++] = NULL;
    return &soft.pool[soft.pooled - 1];
}

void objc_autoreleasePoolPop(void *pool)
{
    soft.pools--;
    while (&soft.pool[soft.pooled] != pool) soft_release(soft.pool[--soft.pooled]);
}

static const SoftClass NSString, NSError, NSArray, MTLCompileOptions, MTLFunctionConstantValues,
    Device, Buffer, Library, Function, PipelineState, Queue, Commands, Encoder;

static id soft_child(const SoftClass *c, id parent)   // keeps its parent alive
{
    SoftObject *o = soft_new(c);
    o->a = soft_retain(parent);
    return o;
}

static id soft_string(const SoftClass *c, const char *s)
{
    SoftObject *o = soft_new(c);
    o->p = strdup(s);
    o->mine = true;
    return soft_autorelease(o);
}

// Methods. A class's own ("+") and its instances' ("-") share a table.
#define M(R, name, ...) static R soft_##name(id self, SEL sel, ##__VA_ARGS__)
#define SELF ((SoftObject *)self)
#define UNUSED (void)self, (void)sel

M(id, class_new) { UNUSED; return soft_new(self); }
M(void, object_release) { UNUSED; soft_release(self); }
M(id, object_retain) { UNUSED; return soft_retain(self); }
M(id, string_with, const char *s) { UNUSED; return soft_string(self, s); }
M(const char *, utf8) { UNUSED; return SELF->p; }
M(id, description) { UNUSED; return soft_string(&NSString, SELF->p); }
M(size_t, count) { UNUSED; return SELF->a != NULL; }
M(void, set_fast, bool fast) { UNUSED; if (fast) soft_fault("fast math is on"); }
M(id, new_queue) { UNUSED; return soft_child(&Queue, self); }
M(size_t, width) { UNUSED; return 32; }
M(size_t, max_threads) { UNUSED; return soft_breaks("maxTotalThreadsPerThreadgroup") ? 64 : 1024; }
M(size_t, max_length) { UNUSED; return soft_breaks("maxBufferLength") ? 4096 : (size_t)1 << 40; }
M(void *, contents) { UNUSED; return SELF->p; }
M(id, new_commands) { UNUSED; return soft_autorelease(soft_child(&Commands, self)); }
M(id, new_encoder) { UNUSED; return soft_autorelease(soft_child(&Encoder, self)); }
M(void, set_pipeline, id pipeline) { UNUSED; SELF->now.pipeline = pipeline; }
M(void, end_encoding) { UNUSED; SELF->a->status = 1; }
M(size_t, get_status) { UNUSED; return SELF->status; }
M(id, get_error) { UNUSED; return SELF->p ? soft_string(&NSError, SELF->p) : NULL; }

M(id, object_at, size_t i)
{
    UNUSED;
    if (i) soft_fault("objectAtIndex: %zu", i);
    return SELF->a;
}

M(void, set_constant, const void *p, size_t type, size_t i)
{
    UNUSED;
    if (i >= CONSTANTS || type != 29) {          // MTLDataTypeInt
        soft_fault("function constant %zu of type %zu", i, type);
        return;
    }
    SELF->constant[i].set = true;
    memcpy(&SELF->constant[i].value, p, sizeof(int));
}

M(id, new_library, id source, id options, id *error)
{
    SoftObject *o = soft_new(&Library);
    (void)options;
    UNUSED;
    char *s = o->p = strdup(((SoftObject *)source)->p);
    o->mine = true;
    for (char *c = s; (c = strstr(c, "//")); )
        while (*c && *c != '\n') *c++ = ' ';
    if (strstr(s, "kernel void ") && !soft_breaks("newLibraryWithSource:options:error:")) return o;
    *error = soft_string(&NSError, "no kernel in the source");
    soft_release(o);
    return NULL;
}

// a kernel or function constant, of the broken library if there is one
static void *soft_symbol(const char *name)
{
    char renamed[80];
    snprintf(renamed, sizeof renamed, "metal_%s", name);
    if (soft.kernels) return dlsym(soft.kernels, name);
    void *p = dlsym(RTLD_DEFAULT, renamed);
    return p ? p : dlsym(RTLD_DEFAULT, name);
}

M(id, new_function, id name, id constants, id *error)
{
    const char *want = ((SoftObject *)name)->p, *s = SELF->p;
    size_t n = strlen(want);
    int commas = 0;
    UNUSED;
    while ((s = strstr(s, "kernel void ")) && (s += 12, strncmp(s, want, n) || s[n] != '(')) ;
    if (!s) {
        *error = soft_string(&NSError, "no such kernel");
        return NULL;
    }
    SoftObject *f = soft_child(&Function, self);
    memcpy(f->constant, ((SoftObject *)constants)->constant, sizeof f->constant);
    f->p = soft_symbol(want);
    snprintf(f->name, sizeof f->name, "%s", want);
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

// Walks the function constants of a library: name and index of the next one; NULL at the end
static const char *soft_next_constant(const char *s, char name[64], int *index)
{
    s = strstr(s, "[[function_constant(");
    if (!s) return NULL;
    const char *e = s;
    sscanf(s, "[[function_constant(%d", index);
    while (e[-1] == ' ') e--;
    while (e[-1] != ' ') e--;
    sscanf(e, "%63[A-Za-z0-9_]", name);
    return s + 1;
}

M(id, new_pipeline, id function, id *error)
{
    SoftObject *f = function;
    char name[64];
    int index;
    UNUSED;
    for (const char *s = f->a->p; (s = soft_next_constant(s, name, &index)); )
        if (index < 0 || index >= CONSTANTS || !f->constant[index].set) {
            *error = soft_string(&NSError, name);
            return NULL;
        }
    if (!soft_breaks("newComputePipelineStateWithFunction:error:")) return soft_child(&PipelineState, f);
    *error = soft_string(&NSError, "broken");
    return NULL;
}

M(id, new_buffer, size_t bytes, size_t options)
{
    UNUSED;
    if (options || !bytes) soft_fault("newBufferWithLength: %zu options %zu", bytes, options);
    if (soft_breaks("newBufferWithLength:options:")) return NULL;
    SoftObject *o = soft_new(&Buffer);
    o->p = calloc(1, o->n = bytes);
    o->mine = true;
    soft.buffers++;
    return o;
}

M(id, new_buffer_no_copy, void *p, size_t bytes, size_t options, id deallocator)
{
    UNUSED;
    size_t page = sysconf(_SC_PAGESIZE);
    if ((uintptr_t)p % page || bytes % page || !bytes || options || deallocator)
        soft_fault("bytesNoCopy: %p, %zu are not whole pages", p, bytes);
    if (soft_breaks("newBufferWithBytesNoCopy:length:options:deallocator:")) return NULL;
    SoftObject *o = soft_new(&Buffer);
    o->p = p;
    o->n = bytes;
    soft.buffers++;
    return o;
}

M(void, set_shared, size_t n, size_t i)
{
    UNUSED;
    if (n % 16 || n > 32768 || i) soft_fault("threadgroup memory: %zu bytes at index %zu", n, i);
    SELF->now.shared = n;
}

static SoftBind *soft_slot(SoftObject *encoder, size_t i)
{
    if (i >= BINDINGS) soft_fault("buffer index %zu", i);
    SoftBind *b = &encoder->now.bind[i < BINDINGS ? i : 0];
    if (!b->buffer) free(b->p);
    return b;
}

M(void, set_buffer, id buffer, size_t offset, size_t i)
{
    SoftObject *b = buffer;
    UNUSED;
    if (!b || offset >= b->n || offset % 4) soft_fault("setBuffer: %p offset %zu", buffer, offset);
    else *soft_slot(self, i) = (SoftBind){b, (char *)b->p + offset, b->n - offset};
}

M(void, set_bytes, const void *p, size_t n, size_t i)
{
    UNUSED;
    if (n > 4096) soft_fault("setBytes: %zu bytes", n);
    SoftBind *b = soft_slot(self, i);
    *b = (SoftBind){NULL, malloc(n), n};         // exactly so many, to catch a longer struct
    memcpy(b->p, p, n);
}

M(void, dispatch, MTLSize groups, MTLSize threads)
{
    SoftObject *commands = SELF->a;
    SoftRun *r = malloc(sizeof *r);
    UNUSED;
    *r = SELF->now;
    if (!r->pipeline || groups.height * groups.depth * threads.height * threads.depth != 1 ||
        !groups.width || !threads.width || threads.width > 1024) {
        soft_fault("dispatch: %zu groups of %zu threads", groups.width, threads.width);
        free(r);
        return;
    }
    r->groups = groups;
    r->threads = threads;
    soft_retain(r->pipeline);
    for (int i = 0; i < BINDINGS; i++) {
        if (r->bind[i].buffer) soft_retain(r->bind[i].buffer);
        else if (r->bind[i].p) r->bind[i].p = memcpy(malloc(r->bind[i].n), r->bind[i].p, r->bind[i].n);
    }
    *commands->last = r;
    commands->last = &r->next;
    if (soft.n_run == RECORDS) return;
    soft.run[soft.n_run].pipeline = r->pipeline;
    for (int i = 0; i < 16; i++) soft.run[soft.n_run].bound[i] = r->bind[i].p;
    soft.n_run++;
}

M(void, commit)
{
    UNUSED;
    if (SELF->status != 1) soft_fault("commit before endEncoding, or twice");
    SELF->status = 2;
    soft.commits++;
}

HIDDEN static void soft_kernel(void *argument)   // one thread of a dispatch
{
    SoftRun *r = argument;
    SoftObject *f = r->pipeline->a;
    int t = emu.now;
    intptr_t v[PARAMS] = {0}, of[KINDS] = {[P_SHARED] = (intptr_t)emu.shared, [P_TG] = emu.tg, [P_TID] = t,
        [P_LANE] = t % SIMD, [P_SG] = t / SIMD, [P_NSG] = emu.groups};
    for (int i = 0; i < f->n_params; i++)
        v[i] = f->param[i].kind ? of[f->param[i].kind] : (intptr_t)r->bind[f->param[i].index].p;
    typedef intptr_t W;
    ((void (*)(W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W))f->p)(
        v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14],
        v[15], v[16], v[17], v[18], v[19]);
}

static const char *soft_ready(SoftRun *r)        // set function constants; is all bound?
{
    SoftObject *f = r->pipeline->a;
    char name[64];
    int index;
    for (const char *s = f->a->p; (s = soft_next_constant(s, name, &index)); ) {
        int *constant = soft_symbol(name);
        if (constant) *constant = f->constant[index].value;
    }
    for (int i = 0; i < f->n_params; i++) {
        if (f->param[i].kind == P_BUFFER && !r->bind[f->param[i].index].p) return "a buffer is not bound";
        if (f->param[i].kind == P_SHARED && !r->shared) return "threadgroup memory has no length";
    }
    return NULL;
}

M(void, wait_completed)
{
    const char *bad = soft_breaks("waitUntilCompleted") ? "broken" : NULL;
    UNUSED;
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
#define METHOD(name, R, types, code) {name, #R " " #types, (void *)_Generic(soft_##code, R (*)types: soft_##code)}
#define SOFT_CLASS(c, text, ...) static const SoftClass c = {&c, text, (const SoftMethod[]){__VA_ARGS__ \
    METHOD("retain", id, (id, SEL), object_retain), METHOD("release", void, (id, SEL), object_release), {0}}};
SOFT_CLASS(NSString, "NSString",
    METHOD("stringWithUTF8String:", id, (id, SEL, const char *), string_with),
    METHOD("UTF8String", const char *, (id, SEL), utf8),)
SOFT_CLASS(NSError, "NSError", METHOD("localizedDescription", id, (id, SEL), description),)
SOFT_CLASS(NSArray, "NSArray",
    METHOD("count", size_t, (id, SEL), count),
    METHOD("objectAtIndex:", id, (id, SEL, size_t), object_at),)
SOFT_CLASS(MTLCompileOptions, "MTLCompileOptions",
    METHOD("new", id, (id, SEL), class_new),
    METHOD("setFastMathEnabled:", void, (id, SEL, bool), set_fast),)
SOFT_CLASS(MTLFunctionConstantValues, "MTLFunctionConstantValues",
    METHOD("new", id, (id, SEL), class_new),
    METHOD("setConstantValue:type:atIndex:", void, (id, SEL, const void *, size_t, size_t), set_constant),)
SOFT_CLASS(Device, "MTLDevice",
    METHOD("newCommandQueue", id, (id, SEL), new_queue),
    METHOD("maxBufferLength", size_t, (id, SEL), max_length),
    METHOD("newLibraryWithSource:options:error:", id, (id, SEL, id, id, id *), new_library),
    METHOD("newComputePipelineStateWithFunction:error:", id, (id, SEL, id, id *), new_pipeline),
    METHOD("newBufferWithLength:options:", id, (id, SEL, size_t, size_t), new_buffer),
    METHOD("newBufferWithBytesNoCopy:length:options:deallocator:", id,
           (id, SEL, void *, size_t, size_t, id), new_buffer_no_copy),)
SOFT_CLASS(Buffer, "MTLBuffer", METHOD("contents", void *, (id, SEL), contents),)
SOFT_CLASS(Library, "MTLLibrary",
    METHOD("newFunctionWithName:constantValues:error:", id, (id, SEL, id, id, id *), new_function),)
SOFT_CLASS(Function, "MTLFunction",)
SOFT_CLASS(PipelineState, "MTLComputePipelineState",
    METHOD("threadExecutionWidth", size_t, (id, SEL), width),
    METHOD("maxTotalThreadsPerThreadgroup", size_t, (id, SEL), max_threads),)
SOFT_CLASS(Queue, "MTLCommandQueue", METHOD("commandBuffer", id, (id, SEL), new_commands),)
SOFT_CLASS(Commands, "MTLCommandBuffer",
    METHOD("computeCommandEncoder", id, (id, SEL), new_encoder),
    METHOD("commit", void, (id, SEL), commit),
    METHOD("waitUntilCompleted", void, (id, SEL), wait_completed),
    METHOD("status", size_t, (id, SEL), get_status),
    METHOD("error", id, (id, SEL), get_error),)
SOFT_CLASS(Encoder, "MTLComputeCommandEncoder",
    METHOD("setComputePipelineState:", void, (id, SEL, id), set_pipeline),
    METHOD("setBuffer:offset:atIndex:", void, (id, SEL, id, size_t, size_t), set_buffer),
    METHOD("setBytes:length:atIndex:", void, (id, SEL, const void *, size_t, size_t), set_bytes),
    METHOD("setThreadgroupMemoryLength:atIndex:", void, (id, SEL, size_t, size_t), set_shared),
    METHOD("dispatchThreadgroups:threadsPerThreadgroup:", void, (id, SEL, MTLSize, MTLSize), dispatch),
    METHOD("endEncoding", void, (id, SEL), end_encoding),)

static const SoftClass *const soft_classes[] = {&NSString, &NSError, &NSArray, &MTLCompileOptions,
    &MTLFunctionConstantValues, &Device, &Buffer, &Library, &Function, &PipelineState, &Queue, &Commands,
    &Encoder};
enum { CLASSES = sizeof soft_classes / sizeof *soft_classes };

id MTLCreateSystemDefaultDevice(void)
{
    return soft.no_default ? NULL : soft_new(&Device);
}

id MTLCopyAllDevices(void)
{
    SoftObject *o = soft_new(&NSArray);
    if (!soft_breaks("MTLCopyAllDevices")) o->a = soft_new(&Device);
    return o;
}

SEL sel_registerName(const char *name)
{
    return (SEL)name;
}

id object_getClass(id object)
{
    return (id)((SoftObject *)object)->isa;
}

id objc_getClass(const char *name)
{
    for (int i = 0; i < CLASSES; i++)
        if (!strcmp(soft_classes[i]->name, name)) return (id)soft_classes[i];
    return NULL;
}

IMP class_getMethodImplementation(id class, SEL sel)
{
    const SoftClass *c = class;
    for (const SoftMethod *m = c->method; m->name; m++)
        if (!strcmp(m->name, sel)) return (IMP)m->code;
    soft_fault("%s has no method %s", c->name, (char *)sel);
    abort();
}

// Does every method of metal.c's table have Apple's prototype?
static int soft_prototypes(void)
{
    static const char *const table[][2] = {
#define X(name, selector, R, types) {selector, #R " " #types},
        METHODS(X)
#undef X
    };
    int wrong = 0;
    for (size_t t = 0; t < sizeof table / sizeof *table; t++) {
        bool right = false;
        for (int i = 0; i < CLASSES; i++)
            for (const SoftMethod *m = soft_classes[i]->method; m->name; m++)
                right |= !strcmp(m->name, table[t][0]) && !strcmp(m->type, table[t][1]);
        if (!right) fprintf(stderr, "%s %s is not its type\n", table[t][0], table[t][1]);
        wrong += !right;
    }
    return wrong;
}
#undef M
#undef SELF
#undef UNUSED
#undef METHOD
#undef SOFT_CLASS

// ==== tests of kernels.metal and metal.c ====
//
// Kernels, each against a reference in double written from the formula, over all formats, ragged
// sizes and three schedules; whole models through metal.c against the CPU; failures of the host;
// and mutants: all of this again on broken copies, to see that it notices.

// ---- kernels ----

// Each test fills its own Model and Layer, and calls the function of metal.c that a model would.
typedef struct { Gpu *g; Arch arch; Model m; Layer w; Session s; } Lab;

static const char *const orders[] = {"forward", "reverse", "random"};

#define LAB_CHECK(ok, format, ...) CHECK(ok, format ", %s", __VA_ARGS__, orders[emu.order])

static Lab lab(Gpu *g)
{
    Lab x = {.g = g, .arch = {.act = SILU}, .m = {.config = {.eps = 1e-5f, .attn_scale = 0.2f}}};
    return x;
}

// runs what was encoded since lab_begin; structs point into the Lab, so only where it stays
static Session *lab_begin(Lab *x)
{
    x->m.config.arch = &x->arch;
    x->s.m = &x->m;
    x->s.gpu = x->g;
    gpu_begin(x->g);
    return &x->s;
}

static void lab_end(Lab *x, const char *what)
{
    bool ok = gpu_wait(x->g);
    LAB_CHECK(ok, "%s: %s", what, x->g->why);
    x->g->why[0] = 0;
}

static void *lab_bytes(Gpu *g, size_t n)
{
    return gpu_share(g, NULL, n);
}

static float *lab_floats(Gpu *g, size_t n, float scale)
{
    float *x = lab_bytes(g, n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * noise();
    return x;
}

static Norm lab_norm(Gpu *g, int n, int group)
{
    return (Norm){lab_floats(g, n, 1), NULL, n, group};
}

static void lab_drop(Gpu *g)   // frees all buffers and variants
{
    while (g->n_shared) send(g, release, g->shared[--g->n_shared].buffer);
    while (g->n_pipelines) send(g, release, g->pipeline[--g->n_pipelines].state);
}

// got against want, errors relative to size (NULL: 1): the sum of the absolute products
static void lab_compare(const char *name, int type, const float *got, const double *want,
                        const double *size, size_t n, double limit)
{
    double worst = 0;
    for (size_t i = 0; i < n && worst == worst; i++) {   // a NaN sticks
        double e = fabs(got[i] - want[i]) / (size ? size[i] + 1e-3 : 1);
        if (!(e <= worst)) worst = e;
    }
    LAB_CHECK(worst <= limit, "%s %s: error %.2g, limit %.0e", name, type < 0 ? "" : quant_name(type),
              worst, limit);
}

// ggml's numbers of all formats, floats first
static const int GPU_FORMATS[] = {0, 1, 30,
#define X(id, name, weights, bytes, per16, offsets) id,
    QUANT_TYPES(X)
#undef X
};
enum { N_GPU_FORMATS = sizeof GPU_FORMATS / sizeof *GPU_FORMATS };

static int format_block(int type)   // weights per block
{
    switch (type) {
#define X(id, name, weights, bytes, per16, offsets) case id: return weights;
    QUANT_TYPES(X)
#undef X
    }
    return 1;
}

// columns that a format allows and a tiling does not like
static int format_cols(int type, bool wide)
{
    int block = format_block(type);
    if (!wide) return block == 1 ? 101 : block == 32 ? 96 : block;
    return block == 1 ? 1061 : block == 32 ? 1056 : block == 256 ? 1280 : 1152;
}

// a block of random bytes, drawn until its weights f are of ordinary size
static void random_block(int type, uint8_t *bytes, float *f)
{
    int block = format_block(type);
    float top = 0, x = noise();
    uint16_t half = quant_f32_to_f16(x);
    size_t n = quant_row_bytes(type, block);
    while (!(top > 1e-3f && top < 8)) {
        for (size_t i = 0; i < n; i++) bytes[i] = random_bits();
        if (type == FORMAT_F32) memcpy(bytes, &x, 4);
        if (type == FORMAT_F16) memcpy(bytes, &half, 2);
        if (type == FORMAT_BF16) memcpy(bytes, (char *)&x + 2, 2);   // little endian: the upper half
        quant_dequantize(type, bytes, f, block);
        top = block == 1 ? 1 : 0;
        for (int i = 0; i < block; i++) top = fabsf(f[i]) <= top ? top : fabsf(f[i]);
    }
}

typedef struct { Matrix m; float *f; } LabMatrix;   // f: the weights as floats

// A random matrix, of 64 different blocks. It starts a few bytes behind an aligned address, as
// tensors do.
static LabMatrix lab_matrix(Gpu *g, int type, int rows, int cols)
{
    enum { DIFFERENT = 64 };
    int block = format_block(type), skew = block == 1 ? 4 : 6;
    size_t bytes = quant_row_bytes(type, block), n = (size_t)rows * cols / block;
    uint8_t *data = (uint8_t *)lab_bytes(g, n * bytes + skew) + skew;
    uint8_t *pool = need(DIFFERENT * bytes);
    float *pool_f = need(DIFFERENT * block * sizeof(float)), *f = lab_bytes(g, n * block * sizeof *f);
    for (int i = 0; i < DIFFERENT; i++) random_block(type, pool + i * bytes, pool_f + i * block);
    for (size_t i = 0; i < n; i++) {
        int k = random_bits() % DIFFERENT;
        memcpy(data + i * bytes, pool + k * bytes, bytes);
        memcpy(f + i * block, pool_f + k * block, block * sizeof *f);
    }
    free(pool);
    free(pool_f);
    return (LabMatrix){{.data = data, .type = type, .rows = rows, .cols = cols}, f};
}

// row . x in double; size: the sum of absolute products
static double lab_dot(const LabMatrix *w, int row, const double *x, bool as_half, double *size)
{
    double sum = 0, all = 0;
    for (int i = 0; i < w->m.cols; i++) {
        float f = w->f[(size_t)row * w->m.cols + i];
        if (as_half) f = (float)(_Float16)f;
        sum += f * x[i];
        all += fabs(f * x[i]);
    }
    if (size) *size = all;
    return sum;
}

// x / rms(x) * w, w NULL: 1; eps < 0: x itself
static void metal_norm(double *out, const float *x, const float *w, int n, double eps)
{
    double s = 0;
    for (int i = 0; i < n; i++) s += (double)x[i] * x[i];
    s = eps < 0 ? 1 : 1 / sqrt(s / n + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * s * (w ? w[i] : 1);
}

static double naive_act(double x, int act)
{
    if (act == SILU) return x / (1 + exp(-x));
    if (act == GELU) return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    return x > 0 ? x * x : 0;
}

static void kernel_embed(Gpu *g, int type)
{
    enum { V = 7, N = 3 };
    Lab x = lab(g);
    int cols = format_cols(type, true);
    LabMatrix w = lab_matrix(g, type, V, cols);
    double *want = need(N * cols * sizeof *want);
    x.m.embd = w.m;
    x.m.config.embd_scale = 3;
    x.s.x = lab_floats(g, N * cols, 1);
    g->ids = lab_bytes(g, N * sizeof *g->ids);
    memcpy(g->ids, (int32_t[N]){6, 0, 3}, N * sizeof *g->ids);
    for (int i = 0; i < N * cols; i++) want[i] = 3 * w.f[(size_t)g->ids[i / cols] * cols + i % cols];
    run_embed(lab_begin(&x), N);
    lab_end(&x, "embed");
    lab_compare("embed", type, x.s.x, want, NULL, N * cols, 2e-6);
    free(want);
}

// three matrices of one input with norm and biases; then one with residual and soft cap
static void kernel_gemv(Gpu *g, int type)
{
    static const int rows[3] = {13, 5, 3};
    Lab x = lab(g);
    int cols = format_cols(type, true);
    LabMatrix w[3];
    float *in = lab_floats(g, cols, 1), *y[3], scale = 1.5f;
    double xs[1280], want[13], size[13];
    const Matrix *m[3];
    Norm norm = lab_norm(g, cols, 0);
    for (int i = 0; i < 3; i++) {   // the second is of another format, if this one's columns allow
        int other = format_block(type) == 32 ? FORMAT_Q8_0 : format_block(type) == 256 ? 12 : type;
        w[i] = lab_matrix(g, i == 1 ? other : type, rows[i], cols);
        w[i].m.bias = i == 1 ? NULL : lab_floats(g, rows[i], 1);
        w[i].m.scale = i == 2 ? &scale : NULL;
        y[i] = lab_floats(g, rows[i], 9);
        m[i] = &w[i].m;
    }
    for (int add = 0; add < 2; add++) {
        float cap = add ? 2 : 0, before[13];
        memcpy(before, y[0], sizeof before);
        run_gemv(lab_begin(&x), m, add ? 1 : 3, in, add ? NULL : &norm, y, add ? EPILOGUE_ADD : EPILOGUE_STORE, cap, 2);
        lab_end(&x, "gemv");
        metal_norm(xs, in, add ? NULL : norm.w, cols, add ? -1 : 1e-5);
        for (int i = 0; i < (add ? 1 : 3); i++) {
            for (int r = 0; r < rows[i]; r++) {
                double v = 2 * (i == 2 ? scale : 1) * lab_dot(&w[i], r, xs, false, &size[r]);
                v += w[i].m.bias ? w[i].m.bias[r] : 0;
                want[r] = add ? before[r] + cap * tanh(v / cap) : v;
                size[r] = 3 * size[r] + 10;
            }
            lab_compare(add ? "gemv add" : "gemv", type, y[i], want, size, rows[i], 1e-6);
        }
    }
}

static void kernel_glu(Gpu *g, int type)
{
    enum { FF = 13 };
    Lab x = lab(g);
    int cols = format_cols(type, true), act = type % 3;
    LabMatrix gate = lab_matrix(g, type, FF, cols), up = lab_matrix(g, type, FF, cols);
    float *in = lab_floats(g, cols, 1), *y = lab_floats(g, FF, 1);
    Norm norm = lab_norm(g, cols, 0);
    double xs[1280], want[FF], size[FF];
    up.m.bias = lab_floats(g, FF, 1);
    x.arch.act = act;
    run_gemv(lab_begin(&x), (const Matrix *[]){&gate.m, &up.m}, 2, in, &norm, &y, EPILOGUE_GLU, 0, 1);
    lab_end(&x, "gemv_glu");
    metal_norm(xs, in, norm.w, cols, 1e-5);
    for (int r = 0; r < FF; r++) {
        double a, b, v = lab_dot(&gate, r, xs, false, &a), u = lab_dot(&up, r, xs, false, &b) + up.m.bias[r];
        want[r] = naive_act(v, act) * u;
        size[r] = (a + 1) * (b + 1) * (act == RELU2 ? a + 1 : 1);
    }
    lab_compare("gemv_glu", type, y, want, size, FF, 1e-6);
}

// n tokens: 37 take tiles of 32, 5 tiles of 8. Epilogues in turn: bias, residual and cap, GLU.
static void lab_gemm(Gpu *g, int type, int n, bool int8)
{
    enum { ROWS = 71 };
    Lab x = lab(g);
    int cols = format_cols(type, false), way = (type + n) % 3;
    LabMatrix w = lab_matrix(g, type, ROWS, cols);
    float *in = lab_floats(g, n * cols, 1), *y = lab_floats(g, n * ROWS, 1), *gate = lab_floats(g, n * ROWS, 2);
    double *want = need(2 * n * ROWS * sizeof *want), *size = want + n * ROWS, cap = way == 1 ? 3 : 0, xs[256];
    w.m.bias = way == 0 ? lab_floats(g, ROWS, 1) : NULL;
    for (int i = 0; int8 && i < n * cols; i++)   // inputs that their codes represent exactly
        in[i] = i % 32 == 5 ? 127 / 64.0f : rintf(127 * in[i]) / 64;
    g->codes = int8 ? lab_bytes(g, n * cols) : NULL;
    g->scales = int8 ? lab_floats(g, n * (cols / 32) * 3, 1) : NULL;
    for (int i = 0; i < n * ROWS; i++) {
        int r = i % ROWS;
        metal_norm(xs, in + i / ROWS * cols, NULL, cols, -1);
        double v = 2 * lab_dot(&w, r, xs, !int8, &size[i]) + (way == 0 ? w.m.bias[r] : 0);
        want[i] = way == 0 ? v : way == 1 ? y[i] + cap * tanh(v / cap) : naive_act(gate[i], SILU) * v;
        size[i] = 3 * size[i] + 10;
    }
    run_gemm(lab_begin(&x), &w.m, in, gate, y, n, way == 0 ? EPILOGUE_STORE : way == 1 ? EPILOGUE_ADD : EPILOGUE_GLU,
             cap, 2);
    lab_end(&x, "gemm");
    lab_compare(int8 ? "gemm int8" : n > 8 ? "gemm" : "gemm few", type, y, want, size, n * ROWS, 1e-6);
    g->codes = NULL;
    free(want);
}

static void kernel_gemm(Gpu *g, int type)
{
    lab_gemm(g, type, 37, false);
    lab_gemm(g, type, 5, false);
    if (format_block(type) > 1) lab_gemm(g, type, 33, true);
}

static void lab_ffn_block(Gpu *g, int type, int inner, int dim, int ff)
{
    Lab x = lab(g);
    LabMatrix wo = lab_matrix(g, type, dim, inner), gate = lab_matrix(g, type, ff, dim);
    LabMatrix up = lab_matrix(g, type, ff, dim), down = lab_matrix(g, type, dim, ff);
    double *att = need((inner + 3 * dim + 2 * ff) * sizeof *att), *n = att + inner, *want = n + dim;
    double *size = want + dim, *h = size + dim, *h_size = h + ff;
    float *sum = need(dim * sizeof *sum);
    x.m.config.dim = dim;
    x.w = (Layer){.ff = ff, .o = wo.m, .gate = gate.m, .up = up.m, .down = down.m, .ffn_norm = lab_norm(g, dim, 0)};
    x.s = (Session){.o.gpu_block = true, .att = lab_floats(g, inner, 0.01f), .x = lab_floats(g, dim, 1),
                    .gate = lab_floats(g, ff + dim, 1)};
    metal_norm(att, x.s.att, NULL, inner, -1);
    for (int r = 0; r < dim; r++) sum[r] = x.s.x[r] + lab_dot(&wo, r, att, false, NULL);
    metal_norm(n, sum, x.w.ffn_norm.w, dim, 1e-5);
    for (int r = 0; r < ff; r++) {
        double a, b, v = lab_dot(&gate, r, n, false, &a), u = lab_dot(&up, r, n, false, &b);
        h[r] = naive_act(v, SILU) * u;
        h_size[r] = a * b;
    }
    for (int r = 0; r < dim; r++) {
        want[r] = sum[r] + lab_dot(&down, r, h, false, NULL);
        lab_dot(&down, r, h_size, false, &size[r]);
        size[r] += 10;
    }
    bool fits = run_block(lab_begin(&x), &x.w);
    LAB_CHECK(fits, "ffn_block does not take dim %d", dim);
    lab_end(&x, "ffn_block");
    lab_compare("ffn_block", type, x.s.x, want, size, dim, 1e-6);
    free(att);
    free(sum);
}

static void kernel_block(Gpu *g, int type)
{
    lab_ffn_block(g, type, 256, 256, 256);
    if (type == FORMAT_F16) lab_ffn_block(g, type, 33, 64, 100);
    if (type == FORMAT_Q8_0) lab_ffn_block(g, type, 64, 64, 96);
    if (type == FORMAT_Q8_0) lab_ffn_block(g, type, 64, 1024, 1056);
    if (type == 12) lab_ffn_block(g, type, 256, 1024, 1280);   // q4_K
}

// Attention: rows of an old ring, then n new tokens through rope and attention, or (n >= 8)
// flash_attention, or (n = 1) the fused kernel. Rows that are empty hold NaN.
typedef struct {
    int n, hd, n_rot, pairing, n_head, n_kv, pos, rows, window, keep;
    bool normed, sinks, causal;
    float cap;
} MetalCase;

static const MetalCase ATTENTIONS[] = {   // n hd rot pairing heads kv pos rows window keep
    {1, 128, 128, NEOX, 4, 2, 0, 20, 16, 0, true, false, true, 0},
    {1, 32, 32, NORM, 4, 2, 77, 30, 21, 3, false, false, true, 0},
    {1, 64, 32, NEOX, 2, 1, 150, 160, 140, 0, true, true, true, 5},
    {1, 96, 96, NEOX, 2, 2, 9, 40, 5, 2, false, true, true, 0},
    {1, 256, 256, NO_ROPE, 1, 1, 5, 16, 16, 0, false, false, true, 20},
    {5, 96, 48, NORM, 4, 2, 31, 29, 20, 4, true, true, true, 0},
    {37, 32, 32, NORM, 4, 2, 0, 80, 40, 0, false, false, true, 0},
    {37, 64, 64, NEOX, 2, 1, 100, 103, 50, 6, true, true, true, 5},
    {9, 128, 96, NEOX, 2, 2, 40, 50, 24, 0, true, false, true, 0},
    {19, 32, 32, NO_ROPE, 2, 1, 0, 30, 8, 0, false, false, false, 0},
    {8, 256, 256, NEOX, 1, 1, 10, 40, 64, 0, false, false, true, 0},
};

static void naive_head(const MetalCase *t, const float *x, const float *norm, const float *turn, double *out)
{
    double v[256];
    metal_norm(v, x, norm, t->hd, norm ? 1e-5 : -1);
    memcpy(out, v, t->hd * sizeof *v);
    for (int p = 0; t->pairing != NO_ROPE && p < t->n_rot / 2; p++) {
        int a = t->pairing == NORM ? 2 * p : p, b = t->pairing == NORM ? 2 * p + 1 : p + t->n_rot / 2;
        out[a] = v[a] * turn[2 * p] - v[b] * turn[2 * p + 1];
        out[b] = v[a] * turn[2 * p + 1] + v[b] * turn[2 * p];
    }
}

// one query and head over all rows k, v of its ring
static void metal_reference(const MetalCase *t, const double *q, const double *k, const double *v,
                            const int32_t *pos_k, int pos, const float *sink, double *out)
{
    double sum = sink ? exp(*sink) : 0;
    memset(out, 0, t->hd * sizeof *out);
    for (int r = 0; r < t->rows; r++, k += t->hd, v += t->hd) {
        int back = pos - pos_k[r];
        double dot = 0;
        if (pos_k[r] < 0 || (t->causal && (back < 0 || (back >= t->window && pos_k[r] >= t->keep)))) continue;
        for (int i = 0; i < t->hd; i++) dot += 0.2 * k[i] * q[i];
        double e = exp(t->cap > 0 ? t->cap * tanh(dot / t->cap) : dot);
        sum += e;
        for (int i = 0; i < t->hd; i++) out[i] += e * v[i];
    }
    for (int i = 0; i < t->hd; i++) out[i] /= sum;
}

// a ring as it stands after pos + n tokens, with a hole now and then; empty rows hold NaN
static Cache lab_cache(Gpu *g, const MetalCase *t, double *k, double *v)
{
    int n = t->n_kv * t->rows * t->hd;
    Cache c = {lab_bytes(g, 2 * n), lab_bytes(g, 2 * n), lab_bytes(g, 4 * t->rows), t->rows, t->window, t->keep,
               NULL, NULL};
    for (int r = 0; r < t->rows; r++) c.pos[r] = -1;
    for (int p = 0; p < t->pos + t->n; p++) c.pos[cache_row(&c, p)] = p < t->pos && p % 11 == 3 ? -1 : p;
    for (int i = 0; i < n; i++) {
        bool empty = c.pos[i / t->hd % t->rows] < 0;
        c.k[i] = empty ? 0x7e00 : quant_f32_to_f16(noise());
        c.v[i] = empty ? 0x7e00 : quant_f32_to_f16(noise());
        k[i] = half_value(c.k[i]);
        v[i] = half_value(c.v[i]);
    }
    return c;
}

static void lab_attention(Gpu *g, const MetalCase *t)
{
    int hd = t->hd, H = t->n_head, KV = t->n_kv, n = t->n, ring = KV * t->rows * hd, all = n * H * hd;
    Lab x = lab(g);
    double *q = need((2 * all + 2 * ring) * sizeof *q), *want = q + all, *k = want + all, *v = k + ring, e = 0;
    Cache c = lab_cache(g, t, k, v);
    Config *config = &x.m.config;
    x.arch.rope = t->pairing;
    config->hd = config->vd = hd;
    config->n_rot = t->n_rot;
    config->attn_cap = t->cap;
    config->causal = t->causal;
    x.w = (Layer){.n_head = H, .n_kv = KV, .rope = t->pairing != NO_ROPE};
    if (t->normed) x.w.q_norm = lab_norm(g, hd, hd);
    if (t->normed) x.w.k_norm = lab_norm(g, hd, hd);
    if (t->sinks) x.w.sinks = lab_floats(g, H, 3);
    x.s = (Session){.cache = &c, .pos = t->pos, .q = lab_floats(g, all, 1), .k = lab_floats(g, n * KV * hd, 1),
                    .v = lab_floats(g, n * KV * hd, 1), .att = lab_floats(g, all, 1),
                    .rope = {lab_floats(g, n * t->n_rot, 1)}};
    for (int i = 0; i < n * (H + KV); i++) {   // rotated queries; new keys and values in their rows
        int token = i / (H + KV), h = i % (H + KV), kv = h - H;
        const float *turn = x.s.rope[0] + token * t->n_rot;
        size_t from = ((size_t)token * KV + kv) * hd, at = ((size_t)kv * t->rows + cache_row(&c, t->pos + token)) * hd;
        if (h < H) naive_head(t, x.s.q + (token * H + h) * hd, x.w.q_norm.w, turn, q + (token * H + h) * hd);
        else naive_head(t, x.s.k + from, x.w.k_norm.w, turn, k + at);
        for (int j = 0; h >= H && j < hd; j++) {
            k[at + j] = (double)(_Float16)k[at + j];
            v[at + j] = (double)(_Float16)x.s.v[from + j];
        }
    }
    for (int i = 0; i < n * H; i++) {
        int h = i % H, kv = h / (H / KV) * t->rows * hd;
        metal_reference(t, q + i * hd, k + kv, v + kv, c.pos, t->pos + i / H, t->sinks ? x.w.sinks + h : NULL,
                        want + i * hd);
    }
    char name[80];
    snprintf(name, sizeof name, "%s, case %d", n >= 8 ? "flash_attention" : "attention", (int)(t - ATTENTIONS));
    run_attention(lab_begin(&x), &x.w, n);
    lab_end(&x, name);
    lab_compare(name, -1, x.s.att, want, NULL, all, n >= 8 ? 2e-3 : 3e-4);
    if (n > 1) lab_compare("rope", -1, x.s.q, q, NULL, all, 1e-5);
    for (int i = 0; i < ring; i++)
        if (c.pos[i / hd % t->rows] >= 0) e = fmax(e, fmax(fabs(half_value(c.k[i]) - k[i]), fabs(half_value(c.v[i]) - v[i])));
    LAB_CHECK(e < 4e-3, "%s: its cache is off by %g", name, e);
    free(q);
}

static void kernel_attention(Gpu *g, int unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof ATTENTIONS / sizeof *ATTENTIONS; i++) lab_attention(g, &ATTENTIONS[i]);
}

static void kernel_norms(Gpu *g, int unused)
{
    static const int sizes[] = {1000, 64, 45};
    (void)unused;
    for (int k = 0; k < 3; k++) {
        enum { N = 3 };
        int n = sizes[k];
        Lab x = lab(g);
        float *in = lab_floats(g, N * n, 2), *y = lab_floats(g, N * n, 1);
        Norm w = {lab_floats(g, n, 1), lab_floats(g, n, 1), n, 0};
        double *want = need(N * n * sizeof *want);
        struct norm_args a = {n, 1e-5f};
        Dispatch d = {"layer_norm", {in, w.w, w.b, y}, 4, N, 256, 32, {0}};
        for (int i = 0; i < N; i++) metal_norm(want + i * n, in + i * n, w.w, n, 1e-5);
        for (int i = 0; i < N * n; i++) want[i] += y[i];
        x.m.config.dim = n;
        run_norm(lab_begin(&x), in, &w, y, N, EPILOGUE_ADD);
        lab_end(&x, "rms_norm");
        lab_compare("rms_norm", -1, y, want, NULL, N * n, 1e-5);
        for (int i = 0; i < N * n; i++) in[i] += 30;   // a mean that is large beside the deviation
        for (int i = 0; i < N; i++) {
            double mean = 0, var = 0;
            for (int j = 0; j < n; j++) mean += in[i * n + j] / (double)n;
            for (int j = 0; j < n; j++) var += (in[i * n + j] - mean) * (in[i * n + j] - mean) / n;
            for (int j = 0; j < n; j++)
                want[i * n + j] = (in[i * n + j] - mean) / sqrt(var + 1e-5) * w.w[j] + w.b[j];
        }
        gpu_dispatch(lab_begin(&x)->gpu, &d, &a, sizeof a);
        lab_end(&x, "layer_norm");
        lab_compare("layer_norm", -1, y, want, NULL, N * n, 3e-5);
        free(want);
    }
}

static void kernel_argmax(Gpu *g, int unused)
{
    (void)unused;
    for (int n = 700; n < 6000; n += 4303)
        for (int nan = 0; nan < 2; nan++) {
            Lab x = lab(g);
            struct argmax_args a = {n};
            float *in = lab_floats(g, n, 1);
            int32_t *best = lab_bytes(g, 4);
            Dispatch d = {"argmax", {in, best}, 2, 1, 1024, 256, {0}};
            in[n - 2] = in[n / 2 + 1] = in[n - 1] = 2;
            for (int i = 0; nan && i < n; i++) in[i] = NAN;
            gpu_dispatch(lab_begin(&x)->gpu, &d, &a, sizeof a);
            lab_end(&x, "argmax");
            LAB_CHECK(*best == (nan ? 0 : n / 2 + 1), "argmax of %d: %d", n, *best);
        }
}

// In order to add a kernel: its test, and a row here.
static const struct { const char *name; void (*fn)(Gpu *g, int type); bool formats; } KERNEL_TESTS[] = {
    {"embed", kernel_embed, true},
    {"gemv", kernel_gemv, true},
    {"gemv_glu", kernel_glu, true},
    {"gemm quantize", kernel_gemm, true},
    {"ffn_block", kernel_block, true},
    {"rope attention flash_attention", kernel_attention, false},
    {"rms_norm layer_norm", kernel_norms, false},
    {"argmax", kernel_argmax, false},
};
enum { N_KERNEL_TESTS = sizeof KERNEL_TESTS / sizeof *KERNEL_TESTS };

// Every kernel of the source, and every format of each that decodes weights, must have run.
static int kernels_missing(const bool ran[N_KERNEL_TESTS][N_GPU_FORMATS])
{
    int missing = 0;
    char name[40];
    for (const char *s = metal_source; (s = strstr(s, "\nkernel void ")); s++) {
        bool known = false;
        sscanf(s, "\nkernel void %39[a-z_0-9]", name);
        for (int i = 0; i < N_KERNEL_TESTS; i++) {
            const char *at = strstr(KERNEL_TESTS[i].name, name);
            known |= at && (at[strlen(name)] == ' ' || !at[strlen(name)]);
        }
        missing += !CHECK(known, "kernel %s has no test", name);
    }
    for (int i = 0; i < N_KERNEL_TESTS; i++) {
        int count = 0, want = KERNEL_TESTS[i].formats ? N_GPU_FORMATS : 1;
        for (int t = 0; t < N_GPU_FORMATS; t++) count += ran[i][t];
        printf("  %-32s%s %d of %d\n", KERNEL_TESTS[i].name, KERNEL_TESTS[i].formats ? "formats" : "", count, want);
        missing += !CHECK(count == want, "%s: %d formats of %d", KERNEL_TESTS[i].name, count, want);
    }
    return missing;
}

// every kernel and format in each schedule; with --quick each format in one of them, in turn
static void run_kernels(const char *only, bool ran[N_KERNEL_TESTS][N_GPU_FORMATS])
{
    Gpu *g = gpu_new();
    void *pool = objc_autoreleasePoolPush();
    bool ok = gpu_library(g);
    CHECK(ok, "%s", g->why);
    objc_autoreleasePoolPop(pool);
    for (int k = 0; ok && k < N_KERNEL_TESTS; k++) {
        if (only && !strstr(KERNEL_TESTS[k].name, only)) continue;
        for (int i = 0; i < (KERNEL_TESTS[k].formats ? N_GPU_FORMATS * ORDERS : ORDERS); i++) {
            emu.order = i % ORDERS;
            if (test.quick && KERNEL_TESTS[k].formats && i / ORDERS % ORDERS != emu.order) continue;
            KERNEL_TESTS[k].fn(g, GPU_FORMATS[i / ORDERS]);
            ran[k][i / ORDERS] = true;
            lab_drop(g);
        }
    }
    emu.order = FORWARD;
    Session s = {.gpu = g};
    gpu_close(&s);
}

static void test_metal_kernels(void)
{
    bool ran[N_KERNEL_TESTS][N_GPU_FORMATS] = {{0}};
    run_kernels(NULL, ran);
    kernels_missing(ran);
    CHECK(soft_prototypes() == 0, "prototypes differ from Apple's");
    CHECK(soft.live == 0 && soft.pools == 0, "%d objects leak, %d pools are open", soft.live, soft.pools);
    CHECK(soft.faults == 0, "%d misuses of the API", soft.faults);
}

// ---- whole models ----

// dispatches of n tokens of which `rows` want logits
static int expected_dispatches(const Model *m, int n, int rows, bool block)
{
    int each = n > 1 ? 11 : block ? 3 : 5, total = 1;   // 1: the embedding
    for (int l = 0; l < m->config.n_layer; l++)
        total += each + (m->layers[l].attn_post_norm.w != NULL) + (m->layers[l].ffn_post_norm.w != NULL);
    return total + (rows + LOGIT_ROWS - 1) / LOGIT_ROWS * 2;   // norm and gemm, or gemv and argmax
}

static bool copy_row(void *ctx, int i, const float *logits)
{
    float **to = ctx;
    memcpy(*to, logits, 128 * sizeof **to);
    *to += 128;
    return (void)i, true;
}

// Logits of ids[from .. n-1], into `to`. The GPU's recorder must have seen exactly the dispatches
// of the chunks after position p: a fall-back to the CPU is a failure, so is a buffer made.
static void eval_rows(Session *s, const int32_t *ids, int n, int from, int p, float *to)
{
    Error e = {{0}};
    int want = 0, buffers = soft.buffers;
    bool gpu = !s->o.cpu;
    for (int left; p < n; p += left) {
        left = n - p < s->o.chunk ? n - p : s->o.chunk;
        want += expected_dispatches(s->m, left, p + left <= from ? 0 : p < from ? p + left - from : left, s->o.gpu_block);
    }
    soft.n_run = 0;
    bool ok = session_run(s, ids, n, from, false, copy_row, &to, &e);
    CHECK(ok, "%s", e.text);
    CHECK(!gpu || (s->gpu && soft.n_run == want), "%d dispatches, expected %d", soft.n_run, want);
    CHECK(!gpu || soft.buffers == buffers, "%d buffers made in forward", soft.buffers - buffers);
}

// One token: each weight matrix is bound by one dispatch, which reads it once; so are K and V.
static void check_reads(const Session *s)
{
    size_t bytes = 0, want = 0;
    for (int l = 0; l < s->m->config.n_layer; l++) {
        const Layer *w = &s->m->layers[l];
        const Matrix *all[] = {&w->q, &w->k, &w->v, &w->o, &w->gate, &w->up, &w->down};
        const void *rings[] = {s->cache[l].k, s->cache[l].v};
        for (int i = 0; i < 9; i++) {
            const void *p = i < 7 ? matrix_base(all[i]) : rings[i - 7];
            size_t size = i < 7 ? all[i]->rows * quant_row_bytes(all[i]->type, all[i]->cols) : 0;
            want += size;
            int times = 0;
            for (int r = 0; r < soft.n_run; r++)
                for (int b = 0; b < 12; b++) times += soft.run[r].bound[b] == p;
            bytes += times * size;
            CHECK(times == 1, "layer %d: operand %d is read %d times", l, i, times);
        }
    }
    CHECK(bytes == want, "%zu bytes of weights read for a token, of %zu", bytes, want);
}

// A prompt in chunks, then token by token; then cut back and on again. `far`: how far from the
// golden logits (NULL: none) both may be; `near`: how far GPU and CPU may be from each other.
static void compare_model(const Model *m, Options o, const int32_t *ids, int n, const float *golden, double far, double near)
{
    Session s[2];
    Error e = {{0}};
    float *logits = need(2 * n * 128 * sizeof *logits), *of[2] = {logits, logits + n * 128};
    int prompt = n * 5 / 6;
    o.threads = 1;
    for (int cpu = 0; cpu < 2; cpu++) {
        o.cpu = cpu;
        bool ok = session_open(&s[cpu], m, o, &e);
        CHECK(ok && (cpu || s[0].gpu), "%s: the GPU does not open %s", m->config.arch->name, e.text);
        eval_rows(&s[cpu], ids, prompt, 0, 0, of[cpu]);
        for (int i = prompt; i < n; i++) eval_rows(&s[cpu], ids, i + 1, i, i, of[cpu] + i * 128);
        if (!cpu) check_reads(&s[0]);
    }
    int best = 0;
    for (int i = 1; i < 128; i++) best = s[0].logits[i] > s[0].logits[best] ? i : best;
    CHECK(gpu_argmax(&s[0], s[0].logits) == best, "argmax %d", best);
    double d = nmse(of[0], of[1], n * 128), g = golden && !o.window ? nmse(of[0], golden, n * 128) : 0;
    CHECK(d <= near, "%s: GPU and CPU differ by %.1e, limit %.0e", m->config.arch->name, d, near);
    CHECK(g <= far, "%s: %.1e from golden, limit %.0e", m->config.arch->name, g, far);
    for (int cpu = 0; cpu < 2; cpu++) {
        int cut = n - 4, p = rows_resident(&s[cpu], cut - 1) ? cut - 1 : 0;
        eval_rows(&s[cpu], ids, cut, cut - 1, p, of[cpu]);
        eval_rows(&s[cpu], ids, n, n - 2, cut, of[cpu]);
    }
    d = nmse(of[0], of[1], 2 * 128);
    CHECK(d <= 4 * near, "%s: with a prefix reused, they differ by %.1e", m->config.arch->name, d);
    session_close(&s[0]);
    session_close(&s[1]);
    free(logits);
}

static const char *const GPU_MODELS[] = {"llama", "gemma2", "gemma3", "phi3", "llama256.q4_K_M",   // --quick: these
    "mistral3", "qwen2", "qwen3", "gemma", "llama3-freqs", "llama-linear", "qwen2-yarn", "phi3-long", "phi3-short",
    "llama.q4_0", "qwen2.q5_1", "gemma3.iq4_nl", "qwen2-256.q2_K"};

static void test_metal_models(void)
{
    enum { N = 48 };
    for (size_t i = 0; i < (test.quick ? 5 : sizeof GPU_MODELS / sizeof *GPU_MODELS); i++) {
        char path[120], *tokens, *at;
        int32_t ids[N];
        size_t size;
        Model m;
        Error e = {{0}};
        bool floats = !strchr(GPU_MODELS[i], '.');
        snprintf(path, sizeof path, "golden/archs/%s.tokens", GPU_MODELS[i]);
        at = tokens = read_all(path, &size);
        for (int k = 0; k < N; k++) ids[k] = strtol(at + (*at == ','), &at, 10);
        snprintf(path, sizeof path, "golden/archs/%s.nmse", GPU_MODELS[i]);
        char *text = read_all(path, &size);
        double far = 3 * atof(text) > 1e-4 ? 3 * atof(text) : 1e-4, near = floats ? 1e-5 : far;
        snprintf(path, sizeof path, "golden/archs/%s.logits", GPU_MODELS[i]);
        float *golden = read_all(path, &size);
        snprintf(path, sizeof path, "golden/archs/%s.gguf", GPU_MODELS[i]);
        if (access(path, R_OK)) snprintf(path, sizeof path, "golden/archs/%s-00001-of-00002.gguf", GPU_MODELS[i]);
        int n = test.quick ? 18 : N;
        if (!CHECK(model_open(&m, path, &e), "%s", e.text)) return;
        compare_model(&m, (Options){.chunk = 64}, ids, n, golden, far, near);
        compare_model(&m, (Options){.chunk = 7, .window = 10, .keep = 2}, ids, n, NULL, far, near);
        if (i == 0) compare_model(&m, (Options){.chunk = 9, .gpu_block = true}, ids, 18, golden, far, near);
        model_close(&m);
        free(tokens);
        free(text);
        free(golden);
    }
    CHECK(soft.live == 0 && soft.pools == 0 && soft.faults == 0, "%d objects leak, %d pools are open, %d misuses",
          soft.live, soft.pools, soft.faults);
}

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
#define IN(space) \
    template <class T> void simdgroup_load(volatile simdgroup_matrix<T> &, const space T *, ulong = 8, \
                                           ulong2 = 0, bool = false); \
    template <class T> void simdgroup_store(const volatile simdgroup_matrix<T> &, space T *, ulong = 8, \
                                            ulong2 = 0, bool = false);
IN(device) IN(threadgroup)
template <class D, class A, class B>
void simdgroup_multiply_accumulate(volatile simdgroup_matrix<D> &, const volatile simdgroup_matrix<A> &,
                                   const volatile simdgroup_matrix<B> &, const volatile simdgroup_matrix<D> &);
template <class D, class A, class B>
void simdgroup_multiply(volatile simdgroup_matrix<D> &, const volatile simdgroup_matrix<A> &,
                        const volatile simdgroup_matrix<B> &);
#pragma GCC poison vertex fragment object_data double goto register new delete virtual throw try catch
#pragma GCC poison typeid dynamic_cast printf
#endif

// ==== the table of tests ====

typedef struct { const char *name; void (*fn)(void); bool slow; } Test;   // slow: not with --quick

static const Test TESTS[] = {
    {"formats_golden", test_formats_golden, false},
    {"formats_names", test_formats_names, false},
    {"formats_grids", test_formats_grids, false},
    {"formats_groups", test_formats_groups, false},
    {"formats_halves", test_formats_halves, false},
    {"matmul", test_matmul, false},
    {"attention", test_attention, false},
    {"norms", test_norms, false},
    {"rope_frequencies", test_rope_frequencies, false},
    {"rope", test_rope, false},
    {"activations", test_activations, false},
    {"gguf_variants", test_gguf_variants, false},
    {"gguf_broken", test_gguf_broken, false},
    {"gguf_hostile", test_gguf_hostile, false},
    {"gguf_cursor", test_gguf_cursor, false},
    {"golden_models", test_golden_models, false},
    {"golden_encoders", test_golden_encoders, false},
    {"story_greedy", test_story_greedy, false},
    {"story_perplexity", test_story_perplexity, true},
    {"every_architecture", test_every_architecture, false},
    {"ring", test_ring, false},
    {"chunks_and_threads", test_chunks_and_threads, false},
    {"regenerate", test_regenerate, false},
    {"session_refusals", test_session_refusals, false},
    {"sampler_stages", test_sampler_stages, false},
    {"sampler_choice", test_sampler_choice, false},
    {"sampler_order", test_sampler_order, false},
    {"sampler_session", test_sampler_session, false},
    {"sampler_speed", test_sampler_speed, false},
    {"tokenizer_goldens", test_tokenizer_goldens, false},
    {"tokenizer_rules", test_tokenizer_rules, false},
    {"tokenizer_special", test_tokenizer_special, false},
    {"tokenizer_streaming", test_tokenizer_streaming, false},
    {"tokenizer_refusals", test_tokenizer_refusals, false},
    {"tokenizer_linear", test_tokenizer_linear, true},
#ifdef LLM_METAL
    {"metal_kernels", test_metal_kernels, false},
    {"metal_models", test_metal_models, false},
#endif
#ifdef LLM_METAL
    {"metal_kernels", test_metal_kernels, false},
    {"metal_models", test_metal_models, false},
#endif
    {"cli_refusals", test_cli_refusals, false},
    {"cli_output", test_cli_output, false},
    {"cli_completion", test_cli_completion, false},
    {"cli_logits", test_cli_logits, false},
    {"cli_interrupt", test_cli_interrupt, false},
};
enum { N_TESTS = sizeof TESTS / sizeof *TESTS };

static bool run_test(const Test *t)
{
    double start = now();
    test.checks = test.failures = 0;
    test.seed = 1;
    printf("%s\n", t->name);
    fflush(stdout);
    t->fn();
    if (test.failures) printf("  FAILED: %d of %d checks", test.failures, test.checks);
    else printf("  ok: %d checks", test.checks);
    printf(", %.1f s\n", now() - start);
    return test.failures == 0;
}

static int remove_scratch(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", test.dir);
    return system(command);
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "llm")) return llm_main(argc - 1, argv + 1);
    char self[PATH_MAX + 8];
    int named = 0, known = 0, passed = 0, failed = 0, skipped = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick")) test.quick = true;
        else if (strcmp(argv[i], "--list")) named++;
        else {
            for (int t = 0; t < N_TESTS; t++) printf("%s%s\n", TESTS[t].name, TESTS[t].slow ? " (slow)" : "");
            return 0;
        }
    }
    snprintf(self, sizeof self, "%s llm --cpu", argv[0]);
    test.program = getenv("LLM") ? getenv("LLM") : self;
    const char *tmp = getenv("TMPDIR");
    snprintf(test.dir, sizeof test.dir, "%s/llm-test-XXXXXX", tmp && strlen(tmp) < 40 ? tmp : "/tmp");
    if (!mkdtemp(test.dir)) return perror(test.dir), 1;
    for (int t = 0; t < N_TESTS; t++) {
        bool chosen = !named;
        for (int i = 1; i < argc; i++) chosen |= !strcmp(argv[i], TESTS[t].name);
        known += named && chosen;
        if (!chosen) continue;
        if (TESTS[t].slow && test.quick) {
            skipped++;
            printf("%s\n  skipped: too slow here\n", TESTS[t].name);
        } else if (run_test(&TESTS[t])) passed++;
        else failed++;
    }
    if (known < named) failed += printf("no such test among the names given; see --list\n") > 0;
    if (remove_scratch()) printf("%s: cannot be removed\n", test.dir);
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0;
}
