// SPDX-License-Identifier: MIT
// test.c: all tests of the project, in one program.
//
// The Makefile builds it in several ways; TEST is one of them, such as ./test_native.
//
//   TEST                   runs them            TEST --list     names them
//   TEST NAME...           runs those           TEST --quick    does less, twice still less
//   TEST llm ARGUMENTS     is the engine itself, so that a sanitizer sees the command line too
//   TEST model TYPE FILE [SHAPE]   writes a model for `make bench`, `make scenarios`
//   TEST scenario ...      is one run of `make scenarios`
//   TEST answer ...        says what guesses are worth where the answer is known
//
// A test compares with outputs recorded from llama.cpp (golden/), with the plain engine of llm.c's
// Part I, or with a reference in double written here from the formula. Models that no golden file
// covers are written by the tests themselves, with random weights, into a directory of their own.
//
// To add a test: a function `static void test_X(void)` that calls CHECK, and T(X) in TESTS. To add
// an architecture: a row in SHAPES; every_architecture and arch_lists say what else has to know it.
// To add a kernel: a function that runs it in a Lab, and a row in KERNEL_TESTS; if llm.c has its
// name, too, a #define before kernels.metal. To add a format: ggml's floats for 2,048 weights in
// golden/quants, NAME.blocks and NAME.f32; what else tests formats reads QUANT_TYPES.
#if defined(LLM_METAL) || defined(SOFT_DRIVER)
#undef _FORTIFY_SOURCE   // its longjmp forbids the GPU in software to change stacks
#endif
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

// What the engine allocates, be it memory, maps or threads: how often it asked, the number of the
// request that fails (0: none), the most bytes, and how many it has not given back.
static size_t allocations, failing, largest;
static long living;

static bool granted(size_t n) {
    if (n > largest) largest = n;
    return errno = ENOMEM, ++allocations != failing;
}
static void *born(void *p) { return living += p && p != MAP_FAILED, p; }
static void freed(void *p) { living -= p != NULL, free(p); }

static void *resized(void *p, size_t n) {
    void *q = granted(n) ? realloc(p, n) : NULL;
    living += q && !p;
    return q;
}

#ifdef LLM_FUZZ   // which then catches reads past the end of a file
static void *map_copy(size_t n, int fd) {
    void *p = calloc(n, 1);
    return p && (fd < 0 || pread(fd, p, n, 0) == (ssize_t)n) ? p : MAP_FAILED;
}
#define mmap(p, n, prot, flags, fd, at) born(map_copy(n, fd))
#define munmap(p, n) freed(p)
#else
#define mmap(p, n, prot, flags, fd, at) \
    born(granted(0) && !((flags) & MAP_SHARED) ? mmap(p, n, prot, flags, fd, at) : MAP_FAILED)
#define munmap(p, n) (living--, munmap(p, n))
#endif
#define pthread_create(...) (granted(0) && !pthread_create(__VA_ARGS__) ? living++, 0 : ENOMEM)
#define pthread_join(...) (living--, pthread_join(__VA_ARGS__))
#define malloc(n) born(granted(n) ? malloc(n) : NULL)
#define calloc(n, size) born(granted((n) * (size)) ? calloc(n, size) : NULL)
#define realloc(p, n) resized(p, n)
#define aligned_alloc(align, n) born(granted(n) ? aligned_alloc(align, n) : NULL)
#define free(p) freed(p)
#define main llm_main
#ifdef SOFT_DRIVER   // metal.c finds its libraries here
#include <dlfcn.h>
static void *soft_library(const char *name), *soft_symbol(void *from, const char *name);
#define dlopen(name, how) soft_library(name)
#define dlsym soft_symbol
#endif
#include "llm.c"
#undef main
#undef dlopen
#undef dlsym
#undef mmap
#undef munmap
#undef malloc
#undef calloc
#undef realloc
#undef free
#include <glob.h>
#include <regex.h>
#include <sys/wait.h>
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"   // a row may end before them
#pragma GCC diagnostic ignored "-Wunused-parameter"   // of callbacks, of PLACE, of methods

// ==== harness ====

static struct {
    int checks, failures;                  // of the running test
    int quick;
    char dir[200];                         // scratch files live here
    uint32_t seed;
    jmp_buf end;                           // of the running test
    struct { void (*close)(void *); void *p; } *owned;   // [n_owned], which it leaves to clean_up
    int n_owned;
} test;

__attribute__((format(printf, 4, 5)))
static bool check(bool ok, const char *what, int line, const char *format, ...) {
    va_list args;
    test.checks++;
    if (ok || test.failures++ >= 10) return ok;
    printf("  %s:%d: %s: ", __FILE__, line, what);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    return ok;
}

#define CHECK(ok, ...) check((ok), #ok, __LINE__, __VA_ARGS__)
#define REQUIRE(ok, ...) (CHECK(ok, __VA_ARGS__) ? (void)0 : longjmp(test.end, 1))   // else it ends
#define MUST(fn, ...) ({ /* calls what takes an Error as well */ \
    Error e_ = {""}; \
    __typeof__(fn(__VA_ARGS__, &e_)) result_ = fn(__VA_ARGS__, &e_); \
    REQUIRE(result_, #fn ": %s", e_.text); \
    result_; })

static void close_model(void *m) { model_close(m); }
static void close_session(void *s) { session_close(s); }

static void at_end(void (*close)(void *), void *p) {
    test.owned = realloc(test.owned, (test.n_owned + 1) * sizeof *test.owned);
    REQUIRE(test.owned && p, "out of memory");
    test.owned[test.n_owned].close = close;
    test.owned[test.n_owned++].p = p;
}

static void *need(size_t size) {   // zeroed, until the end of the test
    void *p = calloc(size + 1, 1);
    at_end(free, p);
    return p;
}

static void clean_up(void) {
    while (test.n_owned--) test.owned[test.n_owned].close(test.owned[test.n_owned].p);
    test.n_owned = 0;
}

static Model *load(const char *path, bool weights) {
    Model *m = need(sizeof *m);
    at_end(close_model, m);
    MUST(model_load, m, path, weights);
    return m;
}

static Model *open_model(const char *path) { return load(path, true); }
static const Tokenizer *open_tokenizer(const char *path) { return load(path, false)->tokenizer; }

// on the CPU: the GPU in software is slow, and has tests of its own
static Session *open_session(const Model *m, Options o) {
    Session *s = need(sizeof *s);
    o.cpu = true;
    at_end(close_session, s);
    MUST(session_open, s, m, o);
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

static double squares(const float *x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sum;
}

// sum (got - want)^2 / sum want^2; a NaN makes it a NaN, which passes no limit
static double nmse(const float *got, const float *want, size_t n) {
    double error = 0;
    for (size_t i = 0; i < n; i++) error += pow((double)got[i] - want[i], 2);
    return error / (squares(want, n) + 1e-300);
}

static double half_value(uint16_t h) {   // IEEE binary16
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double x = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    if (exponent == 31) x = mantissa ? NAN : INFINITY;
    return h & 0x8000 ? -x : x;
}

static void *read_all(const char *path, size_t *size) {   // a whole file, with a NUL behind it
    FILE *f = fopen(path, "rb");
    struct stat st;
    REQUIRE(f && !fstat(fileno(f), &st), "%s: cannot be read", path);
    char *data = need(st.st_size + 1);
    size_t n = fread(data, 1, st.st_size, f);
    if (size) *size = n;
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

static char *copy_of(const char *s) { return strcpy(need(strlen(s)), s); }

#define EACH_WORD(word, text, between) /* of what these characters part */ \
    for (char *rest_, *word = strtok_r(copy_of(text), between, &rest_); word; \
         word = strtok_r(NULL, between, &rest_))

static char *scratch(const char *name) { return text_of("%s/%s", test.dir, name); }

enum { PAGE = 16384 };
static size_t whole_pages(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

// n bytes in whole pages, with nothing mapped behind: whoever reads on is stopped
static char *guarded(size_t n) {
    size_t whole = whole_pages(n);
    char *p = mmap(NULL, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    mprotect(p + whole, PAGE, PROT_NONE);
    return p + whole - n;
}
static void unguard(char *p, size_t n) { munmap(p + n - whole_pages(n), whole_pages(n) + PAGE); }

// ---- references, in double ----

// each group of values by itself
static void reference_norm(float *out, const float *x, int n, const Norm *w, int kind, float eps) {
    int width = w->group ? w->group : n;
    for (int g = 0; g < n; g += width) {
        double mean = 0, var = 0;
        for (int i = g; i < g + width && kind != NORM_RMS; i++) mean += x[i] / (double)width;
        for (int i = g; i < g + width; i++) var += (x[i] - mean) * (x[i] - mean) / width;
        for (int i = g; i < g + width; i++) {
            double y = (x[i] - mean) / sqrt(var + eps);
            if (w->w) y *= w->w[i % w->n];
            out[i] = w->b ? y + w->b[i % w->n] : y;
        }
    }
}

static const Layer XIELU = {.xielu = {0.4f, -0.6f, 0.5f, -0.1f}};   // numbers of it
static double reference_activation(int act, double g, double u, bool gate) {
    double y = NAN, clipped = fmin(g, 7);
    if (act == ACT_SILU) y = g / (1 + exp(-g));
    if (act == ACT_GELU) y = 0.5 * g * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
    if (act == ACT_RELU2) y = pow(fmax(g, 0), 2);
    if (act == ACT_RELU) y = fmax(g, 0);
    if (act == ACT_XIELU && g > 0) y = log1p(exp(XIELU.xielu.alpha_p)) * g * g + g / 2;
    if (act == ACT_XIELU && g <= 0)
        y = (log1p(exp(XIELU.xielu.alpha_n)) + 0.5) * (expm1(fmin(g, -0.1)) - g) + g / 2;
    if (act == ACT_SWIGLU_OAI) {
        y = clipped / (1 + exp(-1.702 * clipped));
        u = fmin(7, fmax(-7, u)) + 1;
    }
    return gate ? y * u : y;
}

static void write_file(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    REQUIRE(f && fwrite(data, 1, n, f) == n && !fclose(f), "%s: cannot be written", path);
}

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
enum { GOOD, BYTES, CUT, KEY, NEW_KEY, NO_KEY, TWICE, NEW_TENSOR, NO_TENSOR, RENAME, DIM,
       FOLD, TYPE, OFFSET };
typedef struct {
    const char *expect;   // part of the message
    int how;              // BYTES: a is where, b how many
                          // FOLD: [n] becomes [n/b,b], [n,m] becomes [n,m/b,1,b]
                          // CUT: a bytes behind the metadata remain; b: of the whole file
                          // NEW_TENSOR: of a values; RENAME: to text
                          // TYPE: b: its bytes, too; text: a new tensor of one value
    const char *name;     // of the key or tensor; the bytes
    int64_t a, b;         // KEY: type, value; DIM: which (-1: their number), size
    const char *text;     // KEY: a string's value, or the strings of an array
} Spoil;

typedef struct {
    Bytes meta, tensors, data;
    uint64_t n_meta, n_tensors;
    uint32_t version, align;      // 0: 3 and 32
    uint32_t part, parts, seen;   // of a split file: every parts-th tensor; 0: all
    bool merged;                  // from several parts, whose keys are left
    int pass, type;               // of a large model: 1: what is f32, 2: weights of this type,
    uint64_t later;               // whose bytes are to follow; 0: all, in f32
    float norm;                   // the value of its norms; 0: random ones around 1
    Spoil spoil;
} Writer;

static Bytes strings(const char *s) {   // an array of those between the commas
    Bytes b = {0};
    uint64_t n = 1;
    for (const char *c = s; *c; c++) n += *c == ',';
    put_int(&b, GGUF_STR, 4);
    put_int(&b, n, 8);
    for (; n > 0; n--) {
        size_t length = strcspn(s, ",");
        put_int(&b, length, 8);
        put(&b, s, length);
        s += length + 1;
    }
    return b;
}

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
        Bytes array = change && s->text && s->a == GGUF_ARR ? strings(s->text) : (Bytes){0};
        if (!change) put(&w->meta, value, size);
        else if (array.n) put(&w->meta, array.p, array.n);
        else if (s->text) put_text(&w->meta, s->text);
        else put_int(&w->meta, s->b, s->a < GGUF_TYPES && gguf_size[s->a] ? gguf_size[s->a] : 8);
    }
}

static void key_text(Writer *w, const char *key, const char *s) {
    Bytes b = {0};
    put_text(&b, s);
    put_key(w, key, GGUF_STR, b.p, b.n);
}

static void key_array(Writer *w, const char *key, int type, int n, const void *x, size_t bytes) {
    Bytes b = {0};
    put_int(&b, type, 4);
    put_int(&b, n, 8);
    put(&b, x, bytes);
    put_key(w, key, GGUF_ARR, b.p, b.n);
}

// pre, merges NULL: no such key
static void key_vocab(Writer *w, const char *model, const char *pre, const char *tokens,
                      const char *merges) {
    key_text(w, "tokenizer.ggml.model", model);
    if (pre) key_text(w, "tokenizer.ggml.pre", pre);
    Bytes t = strings(tokens), m = strings(merges ? merges : "");
    put_key(w, "tokenizer.ggml.tokens", GGUF_ARR, t.p, t.n);
    if (merges) put_key(w, "tokenizer.ggml.merges", GGUF_ARR, m.p, m.n);
}

// a tensor's row in the list
static void put_entry(Writer *w, const char *name, const int ne[3], int type, size_t at) {
    const Spoil *s = &w->spoil;
    bool dim = spoils(w, DIM, name);
    int fold = spoils(w, FOLD, name) ? s->b : 1, dims = 1 + (ne[1] > 0) + (ne[2] > 0);
    int vector[] = {ne[0] / fold, fold}, matrix[] = {ne[0], ne[1] / fold, 1, fold};
    if (fold > 1) {
        ne = dims == 1 ? vector : matrix;
        dims *= 2;
    }
    put_text(&w->tensors, spoils(w, RENAME, name) ? s->text : name);
    put_int(&w->tensors, dim && s->a < 0 ? s->b : dims, 4);
    for (int d = 0; d < dims; d++) put_int(&w->tensors, dim && s->a == d ? s->b : ne[d], 8);
    put_int(&w->tensors, spoils(w, TYPE, name) ? s->a : type, 4);
    put_int(&w->tensors, spoils(w, OFFSET, name) ? (uint64_t)s->a : at, 8);
    w->n_tensors++;
}

static size_t size_of(const int ne[3]) { return ne[0] * larger(ne[1], 1) * larger(ne[2], 1); }

// f32 weights, ne[2] matrices of ne[1] rows of ne[0]; 0 ends the dimensions
static void put_weights(Writer *w, const char *name, const int ne[3], const float *x) {
    bool elsewhere = w->parts && w->seen++ % w->parts != w->part;
    int copies = elsewhere || spoils(w, NO_TENSOR, name) ? 0 : 1 + spoils(w, TWICE, name);
    for (; copies > 0; copies--) {
        put(&w->data, NULL, -w->data.n % (w->align ? w->align : 32));
        put_entry(w, name, ne, QUANT_F32, w->data.n);
        const Spoil *s = &w->spoil;   // a smaller shape has fewer bytes, too
        size_t bytes = size_of(ne) * sizeof *x;
        if (spoils(w, DIM, name) && s->a >= 0 && s->b < ne[s->a]) bytes = bytes / ne[s->a] * s->b;
        if (spoils(w, TYPE, name) && s->b) bytes = quant_row_bytes(s->a, size_of(ne));
        put(&w->data, x, bytes);
    }
}

// random weights around `mean`; all are halves, which is what a GPU's tiles make of them
static void put_tensor(Writer *w, const char *name, const int ne[3], float mean, float scale) {
    if (w->pass == 2) {
        put(&w->data, NULL, -w->data.n % 32);
        put_entry(w, name, ne, w->type, w->data.n + w->later);
        w->later += (quant_row_bytes(w->type, size_of(ne)) + 31) / 32 * 32;
        return;
    }
    float *x = noise_array(size_of(ne), scale);
    for (size_t i = 0; i < size_of(ne); i++) x[i] = quant_f16_to_f32(quant_f32_to_f16(x[i] + mean));
    put_weights(w, name, ne, x);
}

static size_t write_gguf(Writer *w, const char *path) {   // returns the size before the data
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
    if (w->spoil.how == CUT) b.n = w->spoil.b ? (size_t)w->spoil.a : cut;
    write_file(path, b.p, b.n);
    return head;
}

// ---- models of random weights ----
//
// Letters say what tensors a model has:
//   f fused QKV  b its biases  o bias of attn_output  B of the FFN  O of the head  n of norms
//   0 norms without weights  p norms behind attention and FFN only  t there, too  1 no norm before
//   the FFN, it runs beside attention  2 two norms for that  a it is called post_attention_norm
//   k K j norm of q and k: of [hd], [heads * hd], [heads][hd]   i sinks
//   g FFN without gate  u gate and up fused  x experts  m theirs fused  s shared expert  S its gate
//   r the router's bias  P learned positions  N norm of the embedding  T no head  E encoder
//   d linear attention in even layers, gated attention in odd ones  D with ssm_ba
//   v QKV with gates fused   c latent attention  q its queries in two steps  y keys, values fused
//   e experts beside a dense FFN  z per-layer inputs  h a norm again  w attn_output_norm of the FFN
//   M a state space  C a short convolution  H either in even layers, attention in odd ones
//   3 layers of a state space, attention or an FFN alone, in turn  L latent experts
//   Q the norm of the embedding is that of the output  F no norm before the first attention
//   I dense layers behind an embedding  R factors of RoPE's frequencies  G V a gate for each head
//   of attention, for each value  A U KDA in even layers (A: alpha and z of two matrices each),
//   latent attention in odd ones
//   9 post-norms whose names lack .weight  J q, k, v and z of linear attention in one
//   4 a layer with both blocks, one with an FFN alone, one with nothing, in turn
//   5 the last layer is a nextn block, 55 the last two are  6 biases of q, k and v
// and, of the program: l a linear layer, 8 one with KDA, 7 a nextn block, ^ tensors that are in no
// layer, = what is always f32, Z W Y a layer without attention, without a recurrent mixer, without
// FFN, X without attn_norm.

enum { WIDTH = 32, HEADS = 4, KV_HEADS = 2, HEAD = 16, FF = 48, VOCAB = 64 };

// name:dimensions:letters, of which x must be there, !x must not, and +x brings a bias
static const char PARTS[] =
    "token_embd:32,64:^ dense_2:32,40:^I dense_3:40,24:^I position_embd:32,96:^P "
    "token_types:32,2:^E rope_freqs:8:^R token_embd_norm:32:^N+n output_norm:32:^!0!E!Q+n "
    "output:32,64:^!T!E+O attn_norm:32:!0!p!E!X+n attn_norm_2:32:2+n ffn_norm:32:!0!p!E!1!a!w+n "
    "post_attention_norm:32:a+n post_attention_norm:32:p+n post_attention_norm:32:t+n "
    "post_ffw_norm:32:p+n post_ffw_norm:32:t+n post_attention_norm:32:9 post_ffw_norm:32:9 "
    "attn_output_norm:32:E+n attn_output_norm:32:w attn_norm_2:32:h+n layer_output_norm:32:E+n "
    "attn_qkv:32,128:f+b attn_q:32,64:!f!d!q!8+b attn_q:32,128:d!l!v attn_q_a:32,24:q!8 "
    "attn_q_a_norm:24:q!8 attn_q_b:24,64:q!8 attn_kv_a_mqa:32,28:c attn_kv_a_norm:20:c "
    "attn_kv_b:20,96:y attn_k_b:8,20,4:c!y attn_v_b:20,16,4:c!y attn_qkv:32,192:dv!l "
    "attn_k:32,32:!f!l!v!c+b attn_v:32,32:!f!l!v!c+b attn_output:64,32:!l!8+o attn_q_norm:16:k!l "
    "attn_k_norm:16:k!l attn_q_norm:64:K attn_k_norm:32:K attn_q_norm:16,4:j attn_k_norm:16,2:j "
    "attn_sinks:4:i attn_qkv:32,64:l!J attn_gate:32,32:l!J ssm_ba:32,8:lD ssm_alpha:32,4:l!D "
    "ssm_beta:32,4:l!D ssm_conv1d:4,64:l ssm_dt.bias:4:l ssm_a:4:l ssm_norm:8:l ssm_out:32,32:l "
    "ffn_gate:32,48:e ffn_up:32,48:e ffn_down:48,32:e ffn_gate_inp.scale:32:e "
    "ffn_down_exps.scale:6:e pre_ffw_norm_2:32:e post_ffw_norm_1:32:e post_ffw_norm_2:32:e "
    "per_layer_token_embd:24,64:^z per_layer_model_proj:32,24:^z per_layer_proj_norm:6:^z "
    "inp_gate:32,6:z proj:6,32:z post_norm:32:z layer_output_scale:1:z ffn_gate:32,48:!x!g!u+B "
    "ffn_up:32,48:!x!u+B ffn_up:32,96:u+B ffn_down:48,32:!x+B ffn_gate_inp:32,6:x+B "
    "ffn_gate_up_exps:32,96,6:xm ffn_gate_exps:32,48,6:x!m!g+B ffn_up_exps:32,48,6:x!m!L+B "
    "ffn_down_exps:48,32,6:x!L+B ffn_gate_shexp:32,48:s!g exp_probs_b.bias:6:r "
    "ffn_up_shexp:32,48:s ffn_down_shexp:48,32:s ffn_gate_inp_shexp:32:S ffn_latent_down:32,20:L "
    "ffn_up_exps:20,48,6:L ffn_down_exps:48,20,6:L ffn_latent_up:20,32:L ssm_in:32,138:M "
    "ssm_conv1d:3,102:M+M ssm_dt.bias:6:M ssm_a:6:M ssm_d:6:M ssm_norm:10,3:M ssm_out:30,32:M "
    "shortconv.in_proj:32,96:C shortconv.conv:3,32:C shortconv.out_proj:32,32:C attn_gate:32,4:G!8 "
    "attn_gate:32,64:V!8 attn_q:32,32:8 attn_output:32,32:8 ssm_conv1d_q:4,32:=8 "
    "ssm_conv1d_k:4,32:=8 ssm_conv1d_v:4,32:=8 ssm_f_a:32,480:8A ssm_f_b:480,32:8A "
    "ssm_f_a:32,32:8!A ssm_g_a:32,480:8A ssm_g_b:480,32:8A ssm_g_a:32,32:8!A ssm_beta:32,4:8 "
    "ssm_a:4:8 ssm_dt.bias:32:8 ssm_norm:8:8 ssm_in:32,96:lJ nextn.eh_proj:64,32:7 "
    "nextn.enorm:32:7 nextn.hnorm:32:7 attn_q.bias:64:6 attn_k.bias:32:6 attn_v.bias:32:6";

typedef struct {
    const char *arch;
    int n_layer;
    const char *letters, *keys;   // keys: more metadata, "name=1 name=0.5"; with a point: a float
} Shape;

static void put_part(Writer *w, const char *prefix, const char *part, const char *letters) {
    char name[64], *full, bias = 0;
    bool small = false;
    int ne[3] = {0};
    const char *c = strchr(part, ':');
    snprintf(name, sizeof name, "%.*s", (int)(c - part), part);
    for (int i = 0; i < 3 && (i == 0 || *c == ','); i++) ne[i] = strtol(c + 1, (char **)&c, 10);
    for (c++; *c; c++) {
        bool not = *c == '!';
        if (*c == '=') small = true;
        else if (*c == '+') bias = *++c;
        else if (!strchr(letters, *(c += not)) != not) return;
    }
    bool vector = strstr(name, ".bias") || strstr(name, ".scale") || !strcmp(name, "ssm_a") ||
                  !strcmp(name, "ssm_d");
    bool norm = !vector && !ne[1], ffn = strstr(name, "ffn") || !strncmp(name, "exp", 3);
    bool attn = !strncmp(name, "attn", 4) && strcmp(name, "attn_norm");
    bool mixer = !strncmp(name, "ssm_", 4) || !strncmp(name, "short", 5);
    if (strchr(letters, ffn ? 'Y' : attn ? 'Z' : mixer ? 'W' : '-')) return;
    if (w->pass && (w->pass == 2) == (small || !ne[1])) return;
    bool plain = vector || (!strncmp(name, "post", 4) && strchr(letters, '9'));
    full = text_of("%s%s%s", prefix, name, plain ? "" : ".weight");
    // such that a product is about as large as its input
    float scale = vector ? 0.4f : norm ? 0.3f : strstr(name, "token_") ? 1 : 1.7f / sqrtf(ne[0]);
    if (norm && w->norm) put_tensor(w, full, ne, w->norm, 0);
    else put_tensor(w, full, ne, vector ? -0.5f : norm, scale);
    if (bias && strchr(letters, bias))
        put_tensor(w, text_of("%s%s.bias", prefix, name), (int[3]){ne[!norm], ne[2]}, 0, 0.3f);
}

static void put_parts(Writer *w, const char *parts, const char *prefix, const char *letters) {
    EACH_WORD(p, parts, " ")
        if (!strchr(p, '^') == !strchr(letters, '^')) put_part(w, prefix, p, letters);
}

static void put_keys(Writer *w, const char *arch, const char *keys) {
    EACH_WORD(key, keys, " ") {
        char *value = strchr(key, '='), *name = text_of("%s.%.*s", arch, (int)(value - key), key);
        int32_t each[24], n = 0;
        if (strstr(text_of(" %s", rest_), text_of(" %.*s=", (int)(value - key), key))) continue;
        for (char *c = value; n < 24 && (n == 0 || *c == ',');) each[n++] = strtol(c + 1, &c, 10);
        float x = atof(value + 1);
        if (n > 1) key_array(w, name, GGUF_I32, n, each, n * sizeof *each);
        else if (strchr(value, '.')) put_key(w, name, GGUF_F32, &x, 4);
        else put_key(w, name, GGUF_U32, each, 4);
    }
}

static void put_model(Writer *w, const Shape *m) {
    put_keys(w, "general", text_of("alignment=%d", w->align ? w->align : 32));
    key_text(w, "general.architecture", m->arch);
    put_keys(w, m->arch, text_of("block_count=%d context_length=96 embedding_length=32 "
        "vocab_size=64 feed_forward_length=48 attention.head_count=%d attention.head_count_kv=%d "
        "attention.key_length=%d attention.value_length=%d attention.layer_norm_epsilon=.00001 "
        "attention.layer_norm_rms_epsilon=.00001 %s", m->n_layer, HEADS, KV_HEADS, HEAD, HEAD,
        m->keys));
    put_parts(w, PARTS, "", text_of("^%s", m->letters));
    for (int l = 0; l < m->n_layer; l++) {
        const char *kind = strchr(m->letters, 'd') && l % 2 == 0 ? "l" : "";
        if (strchr(m->letters, 'H')) kind = l % 2 ? "W" : "Z";
        if (strchr(m->letters, '3')) kind = (const char *[]){"ZY", "WY", "ZW"}[l % 3];
        if (strchr(m->letters, 'F') && l == 0) kind = "X";
        if (strpbrk(m->letters, "AU")) kind = l % 2 ? "c" : "8";
        if (strchr(m->letters, '5') && l == m->n_layer - 1) kind = "7";
        if (strstr(m->letters, "55") && l == m->n_layer - 2) kind = "7";
        if (strchr(m->letters, '4')) kind = (const char *[]){"", "ZX", "ZXY"}[l % 3];
        put_parts(w, PARTS, text_of("blk.%d.", l), text_of("%s%s", m->letters, kind));
    }
    const Spoil *s = &w->spoil;
    if (s->how == NEW_TENSOR) put_tensor(w, s->name, (int[3]){s->a}, 1, 0.1f);
    if (s->how == TYPE && s->text) put_tensor(w, s->text, (int[3]){1}, 1, 0.1f);
}

#define DELTA_KEYS "ssm.conv_kernel=4 ssm.state_size=8 ssm.group_count=2 ssm.time_step_rank=4 " \
    "ssm.inner_size=32 full_attention_interval=2 "
#define SPACE_KEYS "ssm.conv_kernel=3 ssm.state_size=12 ssm.group_count=3 ssm.time_step_rank=6 " \
    "ssm.inner_size=30 "
#define ALONE_KEYS SPACE_KEYS "attention.head_count_kv=0,2,0 feed_forward_length=0,0,48 "
#define EXPERT_KEYS "expert_count=6 expert_used_count=2 expert_feed_forward_length=48 "
#define WINDOW_KEYS "attention.sliding_window=9 "
#define GEMMA4_KEYS WINDOW_KEYS "attention.key_length_swa=16 attention.value_length_swa=16 "
#define LATENT_KEYS "attention.kv_lora_rank=20 rope.dimension_count=8 "
#define DSA_KEYS LATENT_KEYS "attention.indexer.top_k=96 "
#define NEXTN_KEY "nextn_predict_layers=1 "
#define STEP_KEYS WINDOW_KEYS "attention.sliding_window_pattern=2 swiglu_clamp_shexp=0.4 "
#define KDA_KEYS LATENT_KEYS "kda.head_dim=8 ssm.conv_kernel=4 attention.head_count_kv=0,1,0 " \
    "expert_gating_func=2 "
#define XIELU_KEYS "xielu.alpha_n=.4 xielu.alpha_p=-.6 xielu.beta=.5 xielu.eps=-.1 "
#define COHERE_KEYS "leading_dense_block_count=1 logit_scale=0.5 "
#define GROUP_KEYS "expert_gating_func=2 expert_group_count=3 expert_group_used_count=2 "

static void write_model(Writer *w, const Shape *shape, const char *path) {   // without a vocabulary
    put_model(w, shape);
    key_text(w, "tokenizer.ggml.model", "none");
    write_gguf(w, path);
}

static const Model *random_model(const Shape *shape) {
    write_model(&(Writer){0}, shape, scratch("random.gguf"));
    return open_model(scratch("random.gguf"));
}

// For `make bench` and `make scenarios`: models in the shape of Qwen3-0.6B, without a vocabulary.
// The name of a shape begins with the letter of its layers; three in four of a hybrid are linear: l
#define BENCH_HEADS \
    "attention.head_count_kv=8 attention.key_length=128 attention.value_length=128 "
static const struct { const char *name, *arch, *keys; } BENCH_SHAPES[] = {
    {"dense", "qwen3", BENCH_HEADS}, {"experts", "qwen3moe", BENCH_HEADS
     "expert_count=64 expert_used_count=8 expert_feed_forward_length=256"},
    {"hybrid", "qwen35", BENCH_HEADS "full_attention_interval=4 ssm.conv_kernel=4 "
     "ssm.state_size=128 ssm.group_count=16 ssm.time_step_rank=16 ssm.inner_size=2048 "
     "rope.dimension_sections=24,20,20,0"},   // which llama.cpp wants
    {"vectors", "nomic-bert", "attention.head_count_kv=16 attention.key_length=64 "
     "attention.value_length=64 attention.layer_norm_epsilon=.000001 attention.causal=0"},
    {"mamba", "mamba2", "attention.head_count=0 feed_forward_length=0 ssm.conv_kernel=4 "
     "ssm.state_size=128 ssm.group_count=1 ssm.time_step_rank=32 ssm.inner_size=2048"},
    {"compressed", "deepseek2", "attention.head_count_kv=1 attention.q_lora_rank=768 "   // latent
     "attention.kv_lora_rank=512 attention.key_length=576 attention.value_length=512 "
     "attention.key_length_mla=320 attention.value_length_mla=256 rope.dimension_count=64 "
     "leading_dense_block_count=28 expert_feed_forward_length=1 expert_shared_count=0"},
};
// Their tensors, in the notation above.
static const char BENCH_PARTS[] =
    "output_norm:1024:^!v token_types:1024,2:^=v token_embd_norm:1024:^v+v attn_norm:1024:!v "
    "ffn_norm:1024:!v!h!m post_attention_norm:1024:h attn_q_norm:128:!v!l!m!c "
    "attn_k_norm:128:!v!l!m!c ffn_gate_inp:1024,64:=e attn_output_norm:1024:v+v "
    "layer_output_norm:1024:v+v attn_q:1024,2048:!v!h!m!c attn_q:1024,4096:h!l "
    "attn_k:1024,1024:!v!l!m!c attn_v:1024,1024:!v!l!m!c attn_qkv:1024,3072:v "
    "attn_output:2048,1024:!v!l!m!c attn_output:1024,1024:v attn_qkv:1024,6144:l "
    "attn_gate:1024,2048:l ssm_alpha:1024,16:l ssm_beta:1024,16:l ssm_out:2048,1024:l "
    "ssm_conv1d:4,6144:=l ssm_dt.bias:16:l ssm_a:16:l ssm_norm:128:l ssm_in:1024,4384:m "
    "ssm_conv1d:4,2304:=m+m ssm_dt.bias:32:m ssm_a:1,32:=m ssm_d:1,32:=m ssm_norm:2048,1:=m "
    "ssm_out:2048,1024:m attn_q_a:1024,768:c attn_q_a_norm:768:c attn_q_b:768,5120:c "
    "attn_kv_a_mqa:1024,576:c attn_kv_a_norm:512:c attn_k_b:256,512,16:c attn_v_b:512,256,16:c "
    "attn_output:4096,1024:c ffn_gate:1024,3072:!e!m ffn_up:1024,3072:!e!m ffn_down:3072,1024:!e!m "
    "ffn_gate_exps:1024,256,64:e ffn_up_exps:1024,256,64:e ffn_down_exps:256,1024,64:e "
    "token_embd:1024,151936:^";

// Weights are bytes of 0 to 31: wherever a format has f16 scales, they are below 1/128. Norms of
// 2^-22 leave tokens as different as their embeddings are, so that they choose different experts.
static void write_bench_model(char **arg) {   // TYPE FILE [SHAPE]
    const char *path = arg[1], *shape = arg[2] ? arg[2] : "dense";
    size_t k = 0;
    while (k < COUNT(BENCH_SHAPES) && strcmp(BENCH_SHAPES[k].name, shape)) k++;
    Writer w = {.type = quant_type_from_name(arg[0]), .norm = *shape == 'e' ? 0x1p-22f : 1};
    REQUIRE(w.type >= 0 && k < COUNT(BENCH_SHAPES), "%s %s: no such model", arg[0], shape);
    const char *arch = BENCH_SHAPES[k].arch;
    key_text(&w, "general.architecture", arch);
    key_text(&w, "tokenizer.ggml.model", "none");
    put_keys(&w, arch, text_of("block_count=28 context_length=40960 embedding_length=1024 "
             "feed_forward_length=3072 attention.head_count=16 rope.freq_base=1000000. "
             "attention.layer_norm_rms_epsilon=.000001 vocab_size=151936 %s",
             BENCH_SHAPES[k].keys));
    for (w.pass = 1; w.pass <= 2; w.pass++) {
        put_parts(&w, BENCH_PARTS, "", text_of("^%c", *shape));
        for (int l = 0; l < 28; l++)
            put_parts(&w, BENCH_PARTS, text_of("blk.%d.", l),
                      text_of("%c%s", *shape, *shape == 'h' && l % 4 != 3 ? "l" : ""));
    }
    write_gguf(&w, path);
    FILE *f = fopen(path, "ab");
    for (; f && w.later > 0; w.later--) putc_unlocked(random_bits() & 31, f);
    REQUIRE(f && !ferror(f) && !fclose(f), "%s: cannot be written", path);
}

// KIND FILE PROMPT ANSWER WINDOW CHUNK THREADS. Prints milliseconds to the first token, tokens a
// second of prompt and of answer, and MB at most. KIND: load, with the opening of the model; warm;
// embed, an encoder's vectors; reuse and again, a second turn of ANSWER tokens behind the prompt.
static void run_scenario(char **arg) {
    bool embed = !strcmp(arg[0], "embed"), reuse = !strcmp(arg[0], "reuse");
    bool second = reuse || !strcmp(arg[0], "again");
    int n = atoi(arg[2]), answer = atoi(arg[3]), warm = n;
    Options o = {.window = atoi(arg[4]), .chunk = atoi(arg[5]), .threads = atoi(arg[6])};
    int32_t *ids = need((n + answer) * sizeof *ids);
    if (!o.window) o.window = n + answer;   // all of the text
    for (int i = 0; i < n + answer; i++) ids[i] = random_bits() % 100000;
    double start = now(), first;
    Session *s = open_session(open_model(arg[1]), o);
    if (strcmp(arg[0], "load")) {   // the first turn; or to touch weights and scratch
        if (!second && n > s->o.chunk) warm = s->o.chunk;
        MUST(session_run, s, (Request){ids, warm, warm - 1, embed, NULL, NULL});
        if (!reuse) session_truncate(s, 0);
        start = now();
    }
    if (second) n += answer;
    int given = reuse ? answer : n;
    if (second) answer = 0;
    MUST(session_run, s, (Request){ids, n, n - 1, embed, NULL, NULL});
    first = now() - start;
    for (int i = 1; i <= answer; i++) MUST(session_eval, s, ids, n + i);
    printf("ours %.1f %.1f ", 1000 * first, given / first);
    printf(answer ? "%.1f " : "- ", answer / (now() - start - first));
    printf("%.0f\n", peak_mb());
}

// KIND FILE PROMPT ANSWER THREADS (0: on the GPU): what guesses are worth where an answer is known,
// as the best logits are given to its ids. KIND: edit, the prompt again but for every 25th id;
// quote, 16 ids of the prompt after 16 new ones; chat, only new ones.
typedef struct { Session *s; const int32_t *answer; int before, made, passes; } Dictation;
static bool dictate(void *ctx, int reused, int done, int n) {
    Dictation *d = ctx;
    int rows = n - d->before - d->made + 1;   // n counts guesses
    if (done < n) return ++d->passes;
    for (int k = 0; k < rows; k++)
        d->s->logits[(size_t)k * d->s->m->config.n_vocab + d->answer[d->made + k]] += 1e9f;
    return true;   // a NaN stays one
}
static bool count_id(void *ctx, int32_t id) { return ++((Dictation *)ctx)->made; }

static void run_answer(char **arg) {
    const Model *m = open_model(arg[1]), *story = open_model("golden/story.gguf");
    int n = atoi(arg[2]), answer = atoi(arg[3]), threads = atoi(arg[4]);
    Map text;
    Tokens t = {0};
    MUST(map_file, &text, "golden/story.txt");
    MUST(tokenize, story->tokenizer, (char *)text.base, text.size, NULL, 0, &t);
    REQUIRE((int)t.n >= n + answer + FEW && n >= answer, "the text has %zu ids", t.n);
    for (int i = 0; i < answer; i++) {
        bool again = (*arg[0] == 'e' && i % 25) || (*arg[0] == 'q' && i / 16 % 2);
        if (again) t.id[n + i] = t.id[i];
    }
    for (int draft = 0; draft < FEW; draft += FEW - 1) {
        Options o = {.threads = threads, .cpu = threads > 0, .draft = draft};
        Session s;
        o.window = n + answer + FEW;
        MUST(session_open, &s, m, o);
        MUST(session_eval, &s, t.id, n - 1);
        Dictation d = {&s, t.id + n, n, 0, 0};
        s.on_chunk = dictate;
        s.ctx = &d;
        double start = now();
        MUST(session_generate, &s, t.id, n, answer, (OnToken){count_id, &d});
        printf("%s, --draft %d: %d tokens in %d passes, %.1f tok/s\n", arg[0], draft, d.made,
               d.passes, d.made / (now() - start));
        session_close(&s);
    }
    free(t.id);
    munmap(text.base, text.size);
}

typedef struct { const Session *s; float *to; size_t n; } Rows;   // s: the rows are its logits

static bool keep_row(void *ctx, int i, const float *row) {
    Rows *out = ctx;
    size_t at = out->s ? row - out->s->logits : 0;
    CHECK(at % out->n == 0 && at / out->n < LOGIT_ROWS, "token %d: the logits are a copy", i);
    memcpy(out->to + i * out->n, row, out->n * sizeof *row);
    return true;
}

// logits of ids[from..n-1], or an encoder's vectors
static void get_rows(Session *s, const int32_t *ids, int n, int from, float *rows) {
    const Config *c = &s->m->config;
    bool hidden = c->encoder;
    int width = hidden ? c->dim : c->n_vocab;
    Rows out = {hidden ? NULL : s, rows - from * width, width};
    MUST(session_run, s, (Request){ids, n, from, hidden, keep_row, &out});
}

static void last_row(Session *s, const int32_t *ids, int n, float *row) {
    get_rows(s, ids, n, n - 1, row);
}

// logits of ids[0..n-1] from a new session with these options
static float *logits_of(const Model *m, const int32_t *ids, int n, Options o) {
    float *rows = need((size_t)n * m->config.n_vocab * sizeof *rows);
    Session *s = open_session(m, o);
    get_rows(s, ids, n, 0, rows);
    session_close(s);
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
enum { N_FORMATS = COUNT(FORMATS), GOLDEN = 2048 };

static int format_block(int type) {   // weights per block
    int n = 1;
    while (!quant_row_bytes(type, n)) n++;
    return n;
}

static void test_formats(void) {
    for (int f = 0; f < N_FORMATS; f++) {
        int type = FORMATS[f], differ = 0;
        const char *name = quant_name(type);
        const char *file = quant_name(type ? type : QUANT_BF16);   // whose floats are f32's blocks
        size_t bytes = quant_row_bytes(type, GOLDEN), one = format_block(type), n, m;
        float *want = read_all(text_of("golden/quants/%s.f32", file), &m), *got = need(4 * GOLDEN);
        const char *kind = type ? "blocks" : "f32";
        uint8_t *blocks = read_all(text_of("golden/quants/%s.%s", file, kind), &n);
        REQUIRE(m == 4 * GOLDEN && n == bytes, "%s: sizes", name);
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
        CHECK(quant_type_from_name(name) == type, "%s", name);
        CHECK(quant_type_from_name(upper) == type, "%s", upper);
    }
    CHECK(known == N_FORMATS, "%d formats have names, %d are listed", known, N_FORMATS);
    CHECK(quant_type_from_name("q4_k_m") == -1 && quant_type_from_name("") == -1, "no names");
    CHECK(!quant_row_bytes(QUANT_F32, SIZE_MAX / 2) && !quant_row_bytes(12, 128), "no sizes");
}

static uint32_t fnv_1a(uint32_t sum, uint32_t x, int bytes) {   // low byte first
    for (; bytes > 0; bytes--, x >>= 8) sum = (sum ^ (x & 255)) * 16777619u;
    return sum;
}

static void test_formats_grids(void) {   // the sums of ggml's tables
    static const struct { const char *name; const uint16_t *grid; int n; uint32_t sum; } grids[] = {
#define GRID(name, sum) {#name, quant_grid_##name, COUNT(quant_grid_##name), sum}
        GRID(iq2_xxs, 0x0e66d01d), GRID(iq2_xs, 0xf65db7a3), GRID(iq2_s, 0xa1eb5434),
        GRID(iq3_xxs, 0xcfe32cc2), GRID(iq3_s, 0x111129e2), GRID(iq1, 0xfd6cbae4)};
#undef GRID
    for (int g = 0; g < 6; g++) {
        uint32_t sum = 2166136261u;
        for (int i = 0; i < grids[g].n; i++) sum = fnv_1a(sum, grids[g].grid[i], 2);
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

// Are the weights of a block of ordinary size? A single one may be small.
static bool block_ordinary(int type, const uint8_t *bytes) {
    int block = format_block(type);
    float f[256], top = block == 1 ? 1 : 0;
    quant_dequantize(type, bytes, f, block);
    for (int i = 0; i < block; i++) top = fabsf(f[i]) <= top ? top : fabsf(f[i]);
    return top > 1e-3f && top < 8;
}

static void random_block(int type, uint8_t *bytes) {   // drawn until it is ordinary
    float x = noise();
    uint16_t half = quant_f32_to_f16(x);
    do {
        for (size_t i = 0; i < quant_row_bytes(type, format_block(type)); i++)
            bytes[i] = random_bits();
        if (type == QUANT_F32) memcpy(bytes, &x, 4);
        if (type == QUANT_F16) memcpy(bytes, &half, 2);
        if (type == QUANT_BF16) memcpy(bytes, (char *)&x + 2, 2);   // little endian: the upper half
    } while (!block_ordinary(type, bytes));
}

// a matrix at data, of 64 different blocks of random bytes
static Matrix random_matrix(uint8_t *data, int type, int64_t rows, int64_t cols) {
    enum { DIFFERENT = 64 };
    size_t block = format_block(type), bytes = quant_row_bytes(type, block);
    uint8_t *pool = need(DIFFERENT * bytes);
    for (int i = 0; i < DIFFERENT; i++) random_block(type, pool + i * bytes);
    for (size_t i = 0; i < rows * cols / block; i++)
        memcpy(data + i * bytes, pool + random_bits() % DIFFERENT * bytes, bytes);
    return (Matrix){.data = data, .type = type, .rows = rows, .cols = cols};
}

static float *floats_of(const Matrix *w) {
    size_t n = w->rows * w->cols;
    float *f = need(n * sizeof *f);
    quant_dequantize(w->type, w->data, f, n);
    return f;
}

// makes all blocks of a matrix one block whose bytes are `byte` where they can be: codes at limits
static void extreme_codes(const Matrix *w, uint8_t byte) {
    size_t block = format_block(w->type), bytes = quant_row_bytes(w->type, block);
    uint8_t *data = (uint8_t *)w->data;
    random_block(w->type, data);
    for (size_t i = 0; i < bytes; i++) {
        uint8_t was = data[i];
        data[i] = byte;
        if (!block_ordinary(w->type, data)) data[i] = was;
    }
    for (size_t i = 1; i < w->rows * w->cols / block; i++) memcpy(data + i * bytes, data, bytes);
}

static void *aligned(size_t n) { return (void *)(((uintptr_t)need(n + 64) + 63) & ~(uintptr_t)63); }

// runs matmul or attention in as many bytes as it counts; yields how many of them it never used
#define RUN_COUNTED(op, p, ...) ({ \
    Arena a_ = {0}; \
    op(p, &a_, __VA_ARGS__); \
    a_ = (Arena){.base = aligned(a_.peak), .size = a_.peak}; \
    op(p, &a_, __VA_ARGS__); \
    CHECK(!a_.used, #op " keeps %zu bytes", (size_t)a_.used); \
    a_.size - a_.peak; })   /* more would fail an assert */

// Two jobs in one call share x, one has bias and scale; several thread counts. `exact`: activations
// that int8 holds exactly (integers up to 127, 127 in every 32) leave only rounding; with codes at
// their limits (2, 3) all are 127, the most that sums of 16 bits must hold. Errors are measured
// against what the outputs would be if no products cancelled: a sum near 0 counts as any other.
static void check_matmul(int type, int64_t rows, int64_t cols, int n, int exact, double limit) {
    static const int threads[] = {1, 2, 3, 8};
    float *x = noise_array(n * cols, 1), *out[2], *first[2], *want[2], scale = 0.75f;
    const char *name = quant_name(type);
    double power[2];
    Matrix w[2];
    for (int64_t i = 0; i < n * cols && exact; i++)
        x[i] = i % 32 && exact < 2 ? rintf(x[i] * 127) / 64 : 127.0f / 64;
    for (int k = 0; k < 2; k++) {
        int r = k ? 1 + rows / 2 : rows;
        w[k] = random_matrix(need(quant_row_bytes(type, r * cols)), type, r, cols);
        if (exact > 1) extreme_codes(&w[k], exact > 2 ? 0 : 0xff);
        if (k == 0) w[k].bias = noise_array(rows, 1);
        if (k == 0) w[k].scale = &scale;
        want[k] = need(n * r * sizeof(float));
        plain_matmul(&(Matmul){&w[k], x, want[k], n}, need(cols * sizeof(float)));
        power[k] = squares(floats_of(&w[k]), r * cols) * squares(x, n * cols);   // of all rows
    }
    for (int t = 0; t < 4; t += 1 + !!test.quick) {
        Pool *pool = pool_open(threads[t]);
        REQUIRE(pool, "%d threads", threads[t]);
        if (t == 0 && exact && pool->amx) limit *= 200;   // it rounds all to bf16
        for (int k = 0; k < 2; k++) out[k] = noise_array(n * w[k].rows, INFINITY);
        Matmul jobs[2] = {{&w[0], x, out[0], n}, {&w[1], x, out[1], n}};
        CHECK(!RUN_COUNTED(matmul, pool, jobs, 2), "matmul counts more than it takes");
        pool_close(pool);
        for (int k = 0; k < 2; k++) {
            size_t all = n * w[k].rows;
            double error = 0;
            if (t == 0) first[k] = out[k];
            CHECK(!memcmp(first[k], out[k], 4 * all), "%s of %d, %d threads", name, n, threads[t]);
            for (size_t i = 0; i < all; i++) error += pow(out[k][i] - want[k][i], 2);
            error /= power[k] / cols;
            CHECK(error < limit, "%s of %d, exact %d: NMSE %.2g", name, n, exact, error);
        }
    }
}

static void test_matmul(void) {
    static const int counts[] = {1, 2, 7, 33};
    for (int f = 0; f < N_FORMATS; f++) {
        int type = FORMATS[f];
        bool floats = format_block(type) == 1, whole = format_block(type) > 128;
        double limit = type == QUANT_F32 ? 1e-12 : floats ? 1e-10 : 1e-4;   // int8: max/254 at most
        for (int i = 0; i < 4; i += 1 + !!test.quick) {
            int64_t rows = test.quick ? 19 : 37, cols = floats ? 525 : whole ? 512 : 640;
            check_matmul(type, rows, cols, counts[i], 0, limit);
            check_matmul(type, 2 * rows, 256, counts[i], 1, 1e-7);
        }
        for (int i = 0; i < 4 && !floats; i++)   // one block, so that what is rounded adds up
            check_matmul(type, 19, 256, i / 2 ? 33 : 1, 2 + i % 2, 256e-7);
        float x[512], y[2];   // NaN in, NaN out, and nothing that overflows
        for (int i = 0; i < 512; i++) x[i] = NAN;
        Matrix w = random_matrix(need(quant_row_bytes(type, 256)), type, 1, 256);
        Pool *pool = pool_open(1);
        for (int n = 1; n <= 2; n++)
            CHECK(!RUN_COUNTED(matmul, pool, &((Matmul){&w, x, y, n}), 1), "bytes of %d", n);
        pool_close(pool);
        CHECK(isnan(y[0]) && isnan(y[1]), "type %d: NaN becomes %g, %g", type, y[0], y[1]);
    }
    // f16 and Q4_0: more columns than a panel is deep, for so many tokens that the last tasks have
    // half as many; more columns than a task packs, for one token
    for (int type = QUANT_F16; type <= QUANT_F16 + 1; type++) {
        check_matmul(type, 99, 2304, 300, 0, 1e-4);
        check_matmul(type, 99, 8448, 1, 0, 1e-4);
    }
}

// ==== GGUF ====

// a small Llama with a tokenizer, good but for the writer's Spoil; returns the size of its head
static size_t write_tiny(Writer *w, const char *path) {
    put_model(w, &(Shape){"llama", 1, "", ""});
    key_vocab(w, "gpt2", "default", "a,b,ab,<s>", "a b");
    put_keys(w, "tokenizer.ggml", "token_type=1,1,1,3 bos_token_id=3 eos_token_id=3");
    if (w->parts || w->merged) put_keys(w, "split", text_of("count=%d no=%d", w->parts, w->part));
    return write_gguf(w, path);
}

static void refused(const char *path, const char *says) {
    Model m = {0};
    Error e = {""};
    bool opened = model_open(&m, path, &e);
    model_close(&m);
    CHECK(!opened && strstr(e.text, says), "want '%s', got '%s'", says, e.text);
}

// version 2, other alignments, three files, or these merged: the same logits
static void test_gguf_variants(void) {
    static const int32_t ids[] = {1, 5, 9, 33, 60, 2, 7};
    static const Writer variants[] = {{.version = 3}, {.version = 2}, {.align = 64}, {.align = 8},
        {.merged = true}, {.parts = 3, .part = 2}, {.parts = 3, .part = 1}, {.parts = 3}};
    float *want = NULL;
    for (size_t i = 0; i < COUNT(variants); i++) {
        Writer w = variants[i];
        const char *path = scratch(text_of("v-0000%d-of-00003.gguf", w.part + 1));
        test.seed = 1;
        write_tiny(&w, path);
        if (w.part) continue;   // the first is to come
        float *got = logits_of(open_model(path), ids, 7, (Options){.threads = 1});
        if (!want) want = got;
        CHECK(!memcmp(got, want, 7 * VOCAB * sizeof *got), "variant %zu differs", i);
    }
    rename(scratch("v-00002-of-00003.gguf"), scratch("v-00003-of-00003.gguf"));
    refused(scratch("v-00001-of-00003.gguf"), "00002-of-00003.gguf (part 2 of 3): No such");
    refused(scratch("v-00003-of-00003.gguf"), "part 2, expected 1: renamed? Open *-00001-of-00003");
}

static const Spoil BROKEN[] = {
    {"it starts with 47474d4c", BYTES, "GGML", 0, 4}, {"big-endian", BYTES, "\0\0\0\3", 4, 4},
    {"version 1;", BYTES, "\1\0\0", 4, 4}, {"version 544434464;", BYTES, " is ", 4, 4},
    {"9223372036854775807 tensors", BYTES, "\xff\xff\xff\xff\xff\xff\xff\x7f", 8, 8},
    {"18446744073709551615 metadata", BYTES, "\xff\xff\xff\xff\xff\xff\xff\xff", 16, 8},
    {"tensor : the file ends inside the list of tensors", CUT, "", 4},
    {"token_embd.weight: the file ends inside the list", CUT, "", 31},
    {"ends inside the metadata", BYTES, "\xff\xff\xff\xff\xff\xff\xff\xff", 24, 8},
    {"unknown value type 13", KEY, "llama.block_count", 13, 0},
    {"runs past the end", KEY, "general.architecture", GGUF_STR, (int64_t)1 << 62},
    {"arrays of arrays", KEY, "llama.block_count", GGUF_ARR, GGUF_ARR},
    {"unknown element type 99", KEY, "llama.block_count", GGUF_ARR, 99},
    {"values do not fit", KEY, "llama.block_count", GGUF_ARR, ((int64_t)1 << 56) + GGUF_F64},
    {"llama.block_count appears twice", TWICE, "llama.block_count"},
    {"alignment is 0, want a power of two", KEY, "general.alignment", GGUF_U32, 0},
    {"a power of two", KEY, "general.alignment", GGUF_U32, 48},
    {"a power of two", KEY, "general.alignment", GGUF_STR, 0, "32"},
    {"alignment is 2097152, want", KEY, "general.alignment", GGUF_U32, 1 << 21},
    {"says part 3, expected 1", NEW_KEY, "split.no", GGUF_U16, 2},
    {"split.count is out of range", NEW_KEY, "split.count", GGUF_I16, -1},
    {"must be named", NEW_KEY, "split.count", GGUF_U16, 2},
    {"found 5", DIM, "output.weight", -1, 5}, {"found 0", DIM, "output.weight", -1, 0},
    {"tensor token_embd.weight holds nothing", DIM, "token_embd.weight", 1},
    {"token_embd.weight: not at offset 0", OFFSET, "token_embd.weight", 32},
    {"dimension 1 is 2147483648", DIM, "output.weight", 1, (int64_t)1 << 31},
    {"unknown tensor type 99", TYPE, "output.weight", 99},
    {"type 36 is I2_S of bitnet.cpp or IQ4_NL_4_4, which GGUF", TYPE, "output.weight", 36},
    {"type 4 is Ollama's first MXFP4", TYPE, "output.weight", 4},
    {"not whole q4_K blocks", TYPE, "output.weight", 12},
    {"not a multiple of the alignment", OFFSET, "output.weight", 8},
    {"output.weight: 8320 bytes of f32, but the offset of blk.0.attn_norm.weight leaves it 8192",
     DIM, "output.weight", 1, 65},
    {"output.weight: 4096 bytes of f16, but the offset of blk.0.attn_norm.weight leaves it 8192",
     TYPE, "output.weight", 1},
    {"leaves it -", OFFSET, "blk.0.attn_k.weight"}, {"is it truncated", CUT, "", 4000},
    {"output.weight appears twice", TWICE, "output.weight"}, {"0 bytes are too few", CUT, "", 0, 1},
    {"4 bytes are too few", CUT, "", 4, 1}, {"8 bytes are too few", CUT, "", 8, 1},
    {"no language model", KEY, "general.architecture", GGUF_STR, 0, "clip"},
    {"no language model", NEW_KEY, "general.type", GGUF_STR, 0, "adapter"},
    {"architecture mamba is not supported", KEY, "general.architecture", GGUF_STR, 0, "mamba"},
    {"context_length: want a number", KEY, "llama.context_length", GGUF_STR, 0, "8"},
    {"embedding_length is 0, expected 1", KEY, "llama.embedding_length", GGUF_U32, 0},
    {"head_count_kv: want a number", KEY, "llama.attention.head_count_kv", GGUF_STR, 0, "2"},
    {"epsilon: want", KEY, "llama.attention.layer_norm_rms_epsilon", GGUF_F32, 0x7fc00000},
    {"rope.scaling.type 'dynamic'", NEW_KEY, "llama.rope.scaling.type", GGUF_STR, 0, "dynamic"},
    {"key_length is 5000, expected", KEY, "llama.attention.key_length", GGUF_U32, 5000},
    {"3 KV heads", KEY, "llama.attention.head_count_kv", GGUF_U32, 3},
    {"RoPE: 3 dimensions", NEW_KEY, "llama.rope.dimension_count", GGUF_U32, 3},
    {"want 32 values", DIM, "blk.0.ffn_norm.weight", 0, 16},
    {"want [32,32,1,1], file has [32,16,1,1]", DIM, "blk.0.attn_k.weight", 1, 16},
    {"want [32,64,1,1], file has [32,63,1,1]", DIM, "blk.0.attn_q.weight", 1, 63},
    {"want [32,48,1,1], file has [32,47,1,1]", DIM, "blk.0.ffn_up.weight", 1, 47},
    {"token_embd has 32 rows, output 64", DIM, "token_embd.weight", 1, 32},
    {"'rwkv' is not one of", KEY, "tokenizer.ggml.model", GGUF_STR, 0, "rwkv"},
    {"must be an array of strings", KEY, "tokenizer.ggml.merges", GGUF_U32, 7},
    {"tokenizer.ggml.scores is missing", KEY, "tokenizer.ggml.model", GGUF_STR, 0, "t5"},
    {"merge 1, 'ab', is not", KEY, "tokenizer.ggml.merges", GGUF_ARR, 0, "a b,ab"},
    {"4 entries for 3 tokens", KEY, "tokenizer.ggml.tokens", GGUF_ARR, 0, "a,b,ab"},
    {"must be an array of numbers", KEY, "tokenizer.ggml.token_type", GGUF_ARR, 0, "1,1,1,3"},
    {"lacks its id", KEY, "tokenizer.ggml.model", GGUF_STR, 0, "bert"},
    {"must be a number", KEY, "tokenizer.ggml.bos_token_id", GGUF_STR, 0, "3"},
};

static void check_broken(Spoil s) {
    write_tiny(&(Writer){.spoil = s}, scratch("broken.gguf"));
    refused(scratch("broken.gguf"), s.expect);
}

static void test_gguf_broken(void) {
    for (size_t i = 0; i < COUNT(BROKEN); i++) check_broken(BROKEN[i]);
    EACH_WORD(key, "general.architecture llama.block_count llama.attention.layer_norm_rms_epsilon "
              "tokenizer.ggml.model tokenizer.ggml.tokens tokenizer.ggml.merges", " ")
        check_broken((Spoil){text_of("%s is missing", key), NO_KEY, key});
    EACH_WORD(name, "token_embd.weight blk.0.attn_v.weight output_norm.weight", " ")
        check_broken((Spoil){text_of("tensor %s is missing", name), NO_TENSOR, name});
}

// cut anywhere, and with any byte of the head changed: refused, or it runs; never a crash
static void test_gguf_hostile(void) {
    static const int32_t ids[] = {1, 2, 3};
    const char *path = scratch("hostile.gguf");
    size_t size;
    Writer w = {0};
    size_t head = write_tiny(&w, path);
    uint8_t *whole = read_all(path, &size);
    int step = test.quick ? 5 : 1, fd = open(path, O_RDWR);
    for (size_t i = 0; i < 3 * head; i += step) {
        uint8_t byte = (uint8_t[]){whole[i / 3] ^ 1, 0xff, 0}[i % 3];
        Model m = {0};
        Session s = {0};
        Error e = {""};
        Options o = {.window = 8, .chunk = 2, .threads = 1, .cpu = true};
        REQUIRE(pwrite(fd, &byte, 1, i / 3) == 1, "pwrite");
        bool ok = model_open(&m, path, &e) && session_open(&s, &m, o, &e) &&
                  session_eval(&s, ids, 3, &e);
        CHECK(ok || e.text[0], "byte %zu: no message", i / 3);
        session_close(&s);
        model_close(&m);
        REQUIRE(pwrite(fd, whole + i / 3, 1, i / 3) == 1, "pwrite");
    }
    char *end = guarded(size) + size;   // what is behind it cannot be read
    for (size_t cut = size; cut-- > 0; cut -= cut > head ? cut % 997 : 0) {
        Gguf g = {0};
        Map map = {memcpy(end - cut, whole, cut), cut};
        REQUIRE(!ftruncate(fd, cut), "ftruncate");
        refused(path, "");
        CHECK(cut < 24 || !gguf_read(&g, &map, 0, &(Error){""}), "%zu bytes are read", cut);
        gguf_close(&g);
    }
    unguard(end - size, size);
    close(fd);
}

typedef struct { Shape shape; Spoil spoil; } Odd;   // a model, and how its file differs

static const Model *odd_model(const Odd *v) {   // refused with what it expects, or opened
    const char *path = scratch("odd-model.gguf");
    test.seed = 1;
    write_model(&(Writer){.spoil = v->spoil}, &v->shape, path);
    if (!v->spoil.expect) return open_model(path);
    refused(path, v->spoil.expect);
    return NULL;
}

// What only some architectures have: it is refused, or does no harm (a norm [8] given as [4,2]).
#define ACT_KEY "modern-bert.hidden_activation"
#define NO_EPS(arch) {NULL, NO_KEY, arch ".attention.layer_norm_rms_epsilon"}
static void test_gguf_shapes(void) {
    static const Odd rows[] = {
        {{"qwen35", 2, "dak", DELTA_KEYS}, {NULL}},
        {{"qwen35", 2, "dak", DELTA_KEYS}, {NULL, FOLD, "blk.0.ssm_norm.weight", 0, 2}},
        {{"modern-bert", 2, "fuNTF", ""}, {NULL, NEW_KEY, ACT_KEY, GGUF_STR, 0, "silu"}},
        {{"gemma3", 2, "tk", "context_length=131072 rope.global.freq_base=7.5"}, NO_EPS("gemma3")},
        {{"gemma3", 2, "tk", "context_length=131071 mm.tokens_per_image=9"}, {NULL}},
        {{"gemma3", 2, "tk", "context_length=131072"}, {NULL}},   // not Ollama's
        {{"deepseekocr", 3, "xs", EXPERT_KEYS}, NO_EPS("deepseekocr")},
        {{"glmocr", 1, "tb", "rope.mrope_section=2,3,3 rope.partial_rotary_factor=0.5"}, {NULL,
          RENAME, "blk.0.post_ffw_norm.weight", .text = "blk.0.post_ffn_norm.weight"}},
        {{"modern-bert", 2, "fuNTF", ""}, {"'relu2' is", NEW_KEY, ACT_KEY, GGUF_STR, 0, "relu2"}},
        {{"qwen35", 2, "dak", DELTA_KEYS "attention.value_length=8"}, {"file has [32,128"}},
        {{"qwen35", 2, "dak", "ssm.conv_kernel=4 ssm.state_size=4096 ssm.group_count=1 "
          "ssm.time_step_rank=4096 ssm.inner_size=4096"}, {"a state of 1073741824"}},
        {{"cohere2", 4, "1T", "logit_scale=0.5"}, {"sliding_window is missing"}},
        {{"gemma-embedding", 2, "tkTI", WINDOW_KEYS},
         {"tensor dense_3", NO_TENSOR, "dense_2.weight"}},
        {{"command-r", 3, "1jT", ""}, {NULL}},
        {{"bloom", 2, "nboBgfNT", "attention.head_count=4,2"}, {"ALiBi: want 4 heads a layer"}},
        {{"llama", 3, "", "attention.head_count=4,4"}, {"has 2 values for 3 layers"}},
        {{"llama", 3, "", "attention.head_count=4,4,4,4"}, {"has 4 values for 3 layers"}},
        {{"llama", 3, "", "feed_forward_length=64,64,64,64"}, {"has 4 values for 3 layers"}},
        {{"qwen2vl", 1, "b", "rope.dimension_sections=2,2,2,2,0"}, {"has 5 values, want 4"}},
        {{"qwen25vl", 1, "b", "rope.mrope_section=2,2,2,2,0"}, {"has 5 values, want 4"}},
        {{"llama", 2, "", "attention.head_count=0"}, {"0 heads of 16 and 16 values"}},
        {{"llama", 2, "Y", "feed_forward_length=48"}, {"ffn_up.weight is missing"}},
        {{"mamba2", 2, "ZY", "feed_forward_length=0"}, {"attn_q.weight is missing"}},
        {{"mamba2", 2, "MZY", SPACE_KEYS "ssm.group_count=4"}, {"6 value heads cannot"}},
        {{"mamba2", 2, "MZY", SPACE_KEYS "ssm.inner_size=36"}, {"want [32,150,1,1]"}},
        {{"mamba2", 2, "MZY", SPACE_KEYS "ssm.conv_kernel=0"}, {"causal convolution"}},
        {{"nemotron_h_moe", 3, "3Mg1xL", ALONE_KEYS EXPERT_KEYS "expert_used_count=0,0,7"},
         {"a token uses 7 of 6"}},
        {{"llama", 3, "", "attention.head_count_kv=2,0,2"}, {"layer 1: 4 heads of 16"}},
        {{"qwen3moe", 2, "kxL", EXPERT_KEYS}, {"latent experts with a gate"}},
        {{"nemotron_h_moe", 3, "3Mg1xmL", ALONE_KEYS EXPERT_KEYS}, {"[20,96,6,1]"}},
        {{"deepseek2", 2, "cy", "rope.dimension_count=16"}, {"heads of 16 (16 rotated)"}},
        {{"lfm2", 2, "HCkNQ", ""}, {"shortconv.l_cache is missing"}},
        {{"gemma4", 2, "akxe", EXPERT_KEYS GEMMA4_KEYS}, {"post_ffw_norm"}},
        {{"lfm2", 2, "HCkNQ", "shortconv.l_cache=3 attention.causal=0"}, {"a causal"}},
        {{"mamba2", 2, "MZY", SPACE_KEYS "ssm.group_count=2 ssm.state_size=18"}, {"norm's shape"}},
        {{"spark2_5", 4, "GT", WINDOW_KEYS "attention.sliding_window_pattern=4 "
          "rope.dimension_count_swa=18"}, {"in windows 18 of 16"}},
        {{"llama", 2, "x", EXPERT_KEYS "expert_count=4097"}, {"is 4097, expected 0 to 4096"}},
        {{"llama", 1, "x", EXPERT_KEYS "expert_count=5"}, {"want [32,48,5,1], file has [32,48,6",
          DIM, "blk.0.ffn_gate_inp.weight", 1, 5}},
        {{"llama", 2, "x", EXPERT_KEYS GROUP_KEYS "expert_group_used_count=4"}, {"4 of 3 groups"}},
        {{"llama", 2, "x", EXPERT_KEYS GROUP_KEYS "expert_used_count=3 expert_group_used_count=1"},
         {"uses 3 of 6 experts"}},
    };
    static const int32_t ids[] = {1, 5, 9};
    static const float ollamas[][5] = {{1e-6f, 7.5f, 8, 16}, {1e-5f, 1e6f, 1, 16},   // rows 3 to 7
                     {1e-5f, 1e4f, 1, 16}, {1e-6f, 1e4f, 1, 16}, {1e-5f, 1e4f, 1, 8}};
    float *got[2];
    for (size_t i = 0; i < COUNT(rows); i++) {
        const Model *m = odd_model(&rows[i]);
        if (i > 2 && i < 8) {
            const Config *c = &m->config;
            float x[] = {c->eps, c->rope_base[FULL], c->rope_factor, c->n_rot[FULL], c->rope};
            CHECK(!memcmp(x, ollamas[i - 3], sizeof x), "row %zu, of Ollama's", i);
        }
        if (i < 2) got[i] = logits_of(m, ids, 3, (Options){.threads = 1});
        if (i == 2) CHECK(m->config.act == ACT_SILU, "it is not SiLU");
    }
    CHECK(!memcmp(got[0], got[1], 3 * VOCAB * sizeof(float)), "a folded norm differs");
    CHECK(!find_str((Str){"llama gemma", 11}, "llama gemma"), "two names are taken for one");
}

// Nothing in a file is passed over, but for some tensors of a Llama, and nothing that such a model
// has may be missing.
static const char PASSED_OVER[] =
    "mm.0.weight v.blk.0.attn_gate.weight a.position_embd.weight cls.output.weight mtp.fc.weight "
    "s.blk.0.weight model.vision_tower.std_bias blk.1.attn_q.input_scale";
static const char NO_PART[] =
    "x.vis_attn_qkv.weight blk.2.attn_q.bias blk.0.ffn_up_gate.weight output_scale.weight "
    "blk.1.v.weight position_embd.weight blk.1.attn_q.input_scales blk.1.indexer.k.weight";
#define LLAMA {"llama", 2, "", ""}
#define NEXTN {"llama", 3, "5", NEXTN_KEY}
static const Odd WHOLE[] = {
    {LLAMA, {NULL, NEW_TENSOR, "mark", 0}},   // it holds nothing
    {{"lfm2", 2, "HCkNQ", "shortconv.l_cache=3 feed_forward_length=40"}, {NULL}},   // it is 48
    {{"llama", 1, "", ""}, {NULL, RENAME, "blk.0.attn_output.weight",
                            .text = "blk.0.attn_out.weight"}},   // Ollama's name
    {{"gemma3", 1, "tk", WINDOW_KEYS "attention.sliding_window_pattern=1,1"}, {NULL}},
    {{"glm4moelite", 2, "cq", LATENT_KEYS "attention.key_length_mla=28 "   // of the latent row:
      "attention.value_length_mla=20"}, {NULL}},   // other files have it the other way round
    {{"cogvlm", 1, "f", ""}, {NULL, NEW_TENSOR, "blk.0.vis_attn_qkv.weight", 8}},
    {{"mamba2", 2, "MZY", SPACE_KEYS}, {NULL}},   // with a feed_forward_length, no FFN
    {NEXTN, {"blk.3.nextn.eh_proj.weight: no part", NEW_TENSOR, "blk.3.nextn.eh_proj.weight", 8}},
    {{"qwen2", 2, "f6T", ""}, {NULL}},
    {{"llama", 1, "5", NEXTN_KEY}, {"no layers, only MTP blocks"}},
    {{"llama", 2, "0YZ5", NEXTN_KEY}, {"no layers, only MTP blocks"}},   // the layer has no tensors
    {{"qwen3", 2, "", NEXTN_KEY}, {"attn_q_norm.weight is missing; blk.1 has no nextn.eh_proj"}},
    {LLAMA, {"token_embd: bias or scale", NEW_TENSOR, "token_embd.bias", 64}},
    {{"gpt2", 1, "nboBgfP", ""}, {"bias or scale", NEW_TENSOR, "position_embd.bias", 96}},
    {{"gpt2", 1, "nboBgfP", ""}, {"bias or scale", NEW_TENSOR, "position_embd.scale", 1}},
    {LLAMA, {"file has [32,32,1,2]", FOLD, "output.weight", 0, 2}},
    {LLAMA, {"want 8 values, file has 9", NEW_TENSOR, "rope_freqs.weight", 9}},
    // NVFP4's scales (type 40) may be left out
    {LLAMA, {NULL, TYPE, "blk.1.attn_output.weight", 40, 1, "blk.1.attn_output.scale"}},
    {LLAMA, {"attn_k_norm.weight is missing", NEW_TENSOR, "blk.0.attn_q_norm.weight", 16}},
    {LLAMA, {"attn_q_norm.weight is missing", NEW_TENSOR, "blk.0.attn_k_norm.weight", 16}},
    {LLAMA, {NULL, NEW_KEY, "llama.rope.scaling.type", GGUF_STR, 0, ""}},
    {{"llama", 2, "", "rope.freq_base=7,9"}, {"want a number"}},
    {{"gemma3", 1, "tk", ""}, {"attn_norm.weight is missing", NO_TENSOR, "blk.0.attn_norm.weight"}},
    {LLAMA, {"0.attn_q.scale is missing; layer 1 has it", NEW_TENSOR, "blk.1.attn_q.scale", 1}},
    {{"llama", 3, "b", ""}, {"1.attn_k.bias is missing; layer 0", NO_TENSOR, "blk.1.attn_k.bias"}},
    {LLAMA, {"1.ffn_gate.weight is", NO_TENSOR, "blk.1.ffn_gate.weight"}},
    {LLAMA, {"1.ffn_norm.weight is", NO_TENSOR, "blk.1.ffn_norm.weight"}},
    {{"llama", 2, "g", ""}, {"blk.0.ffn_gate.weight is missing"}},
    {{"llama", 2, "1", ""}, {"blk.0.ffn_norm.weight is missing"}},
    {{"gemma4", 4, "tkR", GEMMA4_KEYS "attention.shared_kv_layers=2"}, {NULL}},
    {{"gemma4", 1, "tTkxeR", EXPERT_KEYS GEMMA4_KEYS}, {NULL, RENAME,
      "blk.0.ffn_down_exps.scale", 0, 0, "blk.0.ffn_gate_inp.per_expert_scale"}},
    {{"cohere2", 2, "1T", WINDOW_KEYS "logit_scale=1."}, {NULL}},
    {{"deepseek2", 2, "cq", LATENT_KEYS}, {NULL}},   // none of its layers has experts
    {{"glm4moe", 3, "abxsr", EXPERT_KEYS}, {"blk.2.exp_probs_b.bias is", NO_TENSOR,
                                            "blk.2.exp_probs_b.bias"}},
    // the one layer without a window may have no values of its own, one of two may not
    {{"gemma4", 2, "tkR", GEMMA4_KEYS "attention.sliding_window_pattern=2"},
     {NULL, NO_TENSOR, "blk.1.attn_v.weight"}},
    {{"gemma4", 4, "tkR", GEMMA4_KEYS "attention.sliding_window_pattern=2"},
     {"blk.3.attn_v.weight is", NO_TENSOR, "blk.3.attn_v.weight"}},
    {{"qwen3", 2, "", ""}, {"tensor attn_q_norm.weight is missing"}},
    {{"qwen3moe", 2, "kxg", EXPERT_KEYS}, {"ffn_gate_exps.weight is missing"}},
    {{"gemma4", 2, "tk", GEMMA4_KEYS}, {"rope_freqs.weight is missing"}},
    {{"gpt-oss", 2, "boaxB", EXPERT_KEYS WINDOW_KEYS}, {"attn_sinks"}},
    {{"gptoss", 2, "boaxBim", EXPERT_KEYS WINDOW_KEYS}, {"gate and up are interleaved"}},
    {{"gpt-oss", 2, "boaxBi", EXPERT_KEYS WINDOW_KEYS},
     {"blk.1.attn_sinks.weight is", NO_TENSOR, "blk.1.attn_sinks.weight"}},
    {{"phi3", 2, "fu", ""},
     {"rope_factors_long.weight is missing", NEW_TENSOR, "rope_factors_short.weight", 8}},
    {{"qwen3next", 2, "dDJak", DELTA_KEYS}, {"bias", NEW_TENSOR, "blk.0.ssm_in.bias", 96}},
    {{"kimi-linear", 3, "Ayxsr", EXPERT_KEYS KDA_KEYS}, {"blk.1.attn_k_b.weight is missing"}},
    {{"llama4", 2, "", "attention.sliding_window=0"}, {"spans need a causal window"}},
    {{"apertus", 2, "kg", ""}, {"key apertus.xielu.alpha_n is missing"}},
    {{"apertus", 2, "k", XIELU_KEYS}, {"layer 0: xIELU with gates"}},
    {{"deci", 3, "", "feed_forward_length=48,0,48"}, {"blk.1.attn_k.weight: no part of a deci"}},
    {{"cohere2moe", 2, "1Tx", EXPERT_KEYS WINDOW_KEYS COHERE_KEYS},
     {"rms_epsilon is missing", NO_KEY, "cohere2moe.attention.layer_norm_rms_epsilon"}},
    {{"glm-dsa", 2, "cq", DSA_KEYS}, {NULL, NEW_TENSOR, "blk.1.indexer.k.weight", 8}},
    {{"bailingmoe3", 3, "U", KDA_KEYS "kda.gate_lower_bound=-5. kda.safe_gate=0"}, {"safe"}},
};

#define BASE(kind) offsetof(Config, rope_base[kind])
static void test_gguf_whole(void) {
    // another engine's names for numbers; of cogvlm it is ignored; hunyuan: 1e4 * 1e3^(16/14)
    static const struct { Shape shape; size_t at; double want; } names[] = {
        {{"mistral3", 2, "", "rope.scaling.beta_fast=7.5"}, offsetof(Config, yarn_fast), 7.5},
        {{"mistral3", 2, "", "rope.scaling.beta_slow=7.5"}, offsetof(Config, yarn_slow), 7.5},
        {{"mistral3", 2, "", "rope.scaling.mscale_all_dim=7.5"}, offsetof(Config, yarn_log), 7.5},
        {{"mistral3", 2, "", "rope.scaling_beta=7.5"}, offsetof(Config, sharpen_scale), 7.5},
        {{"gemma3", 2, "tk", "rope.global.freq_base=7.5"}, BASE(FULL), 7.5},
        {{"gemma3", 2, "tk", "rope.local.freq_base=7.5"}, BASE(WINDOWED), 7.5},
        {{"gemma3", 2, "tk", "rope.freq_base_swa=500."}, BASE(WINDOWED), 500},
        {{"laguna", 2, "Vk", "rope.swa.freq_base=7.5"}, BASE(WINDOWED), 7.5},
        {{"cogvlm", 2, "f", "rope.freq_base=7.5"}, BASE(FULL), 1e4},
        {{"hunyuan-dense", 1, "kT", "rope.scaling.alpha=1000."}, BASE(FULL), 26826957.95},
    };
    EACH_WORD(type, "none default", " ") {
        Odd v = {{"llama", 2, "", "rope.scaling.factor=4."},
                 {NULL, NEW_KEY, "llama.rope.scaling.type", GGUF_STR, 0, type}};
        CHECK(odd_model(&v)->config.rope_factor == 1, "a factor beside the type %s", type);
    }
    double read[4];   // bytes of a token, by loops: each reads all layers, of 48 x 32 and more
    for (int i = 1; i < 4; i++) {
        const char *keys = text_of("num_loops=%d skip_loop_final_norm=%d", i, i < 3);
        const Model *m = random_model(&(Shape){"nanbeige", 3, "T", keys});
        read[i] = token_bytes(open_session(m, (Options){.threads = 1}), 0);
        CHECK(!m->layers[2].last_norm.w == (i < 3), "%d loops: a norm between them, or none", i);
    }
    CHECK(read[3] - read[2] == read[2] - read[1] && read[2] - read[1] > 3 * 3 * 48 * 32 * 4, "%g "
          "%g %g bytes", read[1], read[2], read[3]);
    for (size_t i = 0; i < COUNT(WHOLE); i++) odd_model(&WHOLE[i]);
    EACH_WORD(name, PASSED_OVER, " ") odd_model(&(Odd){LLAMA, {NULL, NEW_TENSOR, name, 8}});
    EACH_WORD(name, NO_PART, " ")
        odd_model(&(Odd){LLAMA, {text_of("%s: no part of", name), NEW_TENSOR, name, 8}});
    for (size_t i = 0; i < COUNT(names); i++) {
        const Config *c = &random_model(&names[i].shape)->config;
        float got = *(const float *)((const char *)c + names[i].at);
        CHECK(fabs(got / names[i].want - 1) < 1e-6, "%s: %.10g", names[i].shape.keys, got);
    }
}

// ==== ops ====

// ---- attention ----

typedef struct {
    const char *what;     // letters, see below; all but v are for the GPU
    int n_head, n_kv, hd, vd, pos, n, rows, window, keep;
    bool causal, sinks, slopes;
    float softcap;
    int n_rot, pairing;   // RoPE on the GPU; n_rot 0: not there, too much for one in software
} AttentionCase;

// A ring as it stands after the last of the new tokens. On the GPU these go through rope and
// attention, or (n >= 8) flash_attention, or (n = 1) the fused kernel; rows that are empty hold NaN
// there. Letters: q k norm of the heads of Q, of K  w of all at once  o each head its own  b with
// bias  c LayerNorm  l after RoPE  g gated  t temperature  v values that begin keys
static const AttentionCase ATTENTION[] = {   // heads kv hd vd pos n rows window keep
    {"", 3, 3, 37, 21, 10, 9, 30, 30, 0, true, .n_rot = 0},
    {"", 4, 4, 32, 32, 0, 30, 40, 40, 0, false, .slopes = true, .softcap = 8},
    {"", 6, 3, 64, 64, 700, 2, 800, 800, 0, true, .sinks = true},
    {"", 2, 1, 256, 256, 90, 150, 300, 300, 0, true, .n_rot = 0},
    {"", 14, 2, 80, 48, 300, 1, 310, 200, 0, true, .n_rot = 0},
    {"qk", 4, 2, 128, 128, 0, 1, 20, 16, 0, true, .n_rot = 128, ROPE_HALVES},
    {"", 4, 2, 32, 32, 77, 1, 30, 21, 3, true, .n_rot = 32, ROPE_PAIRS},
    {"qk", 2, 1, 64, 64, 150, 1, 160, 140, 0, true, true, false, 5, 32, ROPE_HALVES},
    {"", 1, 1, 256, 256, 5, 1, 16, 16, 0, true, false, false, 20, 256, ROPE_NONE},
    {"qk", 4, 2, 96, 96, 31, 5, 29, 20, 4, true, true, .n_rot = 48, ROPE_PAIRS},
    {"", 4, 2, 32, 32, 0, 37, 80, 40, 0, true, .n_rot = 32, ROPE_PAIRS},
    {"qk", 2, 1, 64, 64, 100, 37, 103, 50, 6, true, true, false, 5, 64, ROPE_HALVES},
    {"", 2, 1, 32, 32, 0, 19, 30, 8, 0, false, .n_rot = 32, ROPE_NONE},
    {"", 1, 1, 256, 256, 10, 8, 40, 64, 0, true, .n_rot = 256, ROPE_HALVES},
    {"", 2, 1, 32, 32, 5, 1, 16, 0, 0, true, .n_rot = 32, ROPE_PAIRS},   // sees nothing
    {"", 2, 1, 32, 32, 5, 9, 16, 0, 0, true, .n_rot = 32, ROPE_PAIRS},
    // the first of rows 0..31, and the first of rows 32..63
    {"", 2, 1, 32, 32, 130, 9, 80, 5, 1, true, .n_rot = 32, ROPE_PAIRS},
    {"", 2, 1, 32, 32, 24, 9, 80, 40, 0, true, .n_rot = 32, ROPE_PAIRS},
    // wide groups, other sizes, and what is rare
    {"", 8, 2, 80, 48, 40, 1, 50, 50, 0, true, .n_rot = 80, ROPE_HALVES},
    {"", 8, 2, 80, 48, 40, 9, 50, 50, 0, true, .n_rot = 80, ROPE_HALVES},
    {"g", 10, 2, 100, 100, 33, 1, 40, 40, 0, true, .n_rot = 20, ROPE_PAIRS},
    {"g", 10, 2, 100, 100, 33, 9, 50, 50, 0, true, .n_rot = 20, ROPE_PAIRS},
    {"qklct", 14, 2, 12, 8, 33, 1, 40, 40, 0, true, true, .n_rot = 12, ROPE_HALVES},
    {"qklct", 14, 2, 12, 8, 33, 9, 50, 50, 0, true, true, .n_rot = 12, ROPE_HALVES},
    {"", 32, 2, 4, 20, 33, 1, 40, 40, 0, true, false, true, .n_rot = 4, ROPE_HALVES},
    {"", 32, 2, 4, 20, 33, 9, 50, 50, 0, true, false, true, 5, .n_rot = 4, ROPE_HALVES},
    {"", 142, 2, 4, 4, 20, 1, 30, 30, 0, true, .n_rot = 4, ROPE_HALVES},
    {"", 142, 2, 4, 4, 20, 8, 28, 30, 0, true, .n_rot = 4, ROPE_HALVES},
    {"qwb", 3, 3, 112, 64, 33, 1, 40, 40, 0, true, .n_rot = 112, ROPE_HALVES},
    {"kwgbc", 4, 2, 20, 20, 33, 5, 40, 40, 0, true, .n_rot = 12, ROPE_HALVES},
    {"qkobct", 4, 2, 36, 64, 33, 1, 40, 40, 0, true, .n_rot = 36, ROPE_HALVES},
    {"kobg", 4, 2, 20, 20, 33, 9, 50, 50, 0, true, .n_rot = 12, ROPE_HALVES},
    {"q", 2, 1, 192, 128, 20, 9, 40, 40, 0, true, .n_rot = 64, ROPE_HALVES},
    {"v", 20, 1, 576, 512, 40, 9, 90, 60, 0, true, .n_rot = 0},
    {"k", 3, 1, 320, 300, 20, 1, 30, 30, 0, true, .n_rot = 64, ROPE_HALVES},
    {"k", 3, 1, 320, 300, 20, 9, 30, 30, 0, true, .n_rot = 64, ROPE_HALVES},
    // long rings, in slices
    {"g", 2, 1, 16, 16, 900, 1, 620, 700, 2, true, true, .n_rot = 16, ROPE_HALVES},
    {"t", 5, 1, 64, 4, 600, 1, 900, 90, 0, true, false, true, .n_rot = 16, ROPE_PAIRS},
    // a few tokens: with 1 and 2 slices, with as many as there may be, with a ring that has wrapped
    {"", 4, 2, 256, 256, 28, 7, 90, 90, 0, true, .n_rot = 256, ROPE_HALVES},
    {"qk", 80, 1, 192, 128, 250, 3, 260, 260, 0, true, .n_rot = 64, ROPE_HALVES},
    {"g", 4, 2, 256, 256, 118, 7, 80, 60, 3, true, true, .n_rot = 256, ROPE_HALVES},
    {"", 8, 4, 32, 32, 272, 8, 300, 242, 0, true, .n_rot = 0},   // the first sees more splits
};

static uint16_t *half_noise(size_t n) {
    uint16_t *x = need(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = quant_f32_to_f16(noise());
    return x;
}

static Attention attention_of(const AttentionCase *t) {
    int32_t *pos = need(t->rows * sizeof *pos);
    Cache c = {.rows = t->rows, .keep = t->keep};
    memset(pos, -1, t->rows * sizeof *pos);
    for (int p = 0; p < t->pos + t->n; p++) {
        int row = p < t->keep ? p : t->keep + (p - t->keep) % (t->rows - t->keep);
        pos[row] = p < t->pos && p % 11 == 3 ? -1 : p;   // an empty row now and then
        CHECK(cache_row(&c, p) == row, "position %d: row %d, not %d", p, cache_row(&c, p), row);
    }
    float *extra = noise_array(t->n_head, 2);
    for (int h = 0; h < t->n_head && t->slopes; h++) extra[h] = exp2f(-h - 1);
    uint16_t *k = half_noise((size_t)t->n_kv * t->rows * t->hd);
    bool inside = strchr(t->what, 'v');
    uint16_t *v = inside ? k : half_noise((size_t)t->n_kv * t->rows * t->vd);
    int v_step = inside ? t->hd : t->vd;
    for (int r = 0; r < t->n_kv * t->rows; r++) {   // an empty row was beyond f16
        uint16_t *value = v + r * v_step;
        for (int i = 0; pos[r % t->rows] < 0 && i < t->vd; i++) value[i] = 0x7c00;
        cache_finite(value, t->vd, inside ? value + t->vd : k + r * t->hd);
    }
    return (Attention){.q = noise_array((size_t)t->n * t->n_head * t->hd, 3), .rows = t->rows,
                       .k = k, .pos_k = pos, .pos = t->pos, .n = t->n, .softcap = t->softcap,
                       .v = v, .n_head = t->n_head, .n_kv = t->n_kv, .hd = t->hd, .vd = t->vd,
                       .v_step = v_step, .window = t->window, .keep = t->keep,
                       .ahead = t->causal ? 0 : t->window - 1, .scale = 1 / sqrtf(t->hd),
                       .sinks = t->sinks ? extra : NULL, .slopes = t->slopes ? extra : NULL};
}

// all queries, and then the last alone; of a few each, which has the same bits
static void check_attention(int i) {
    const AttentionCase *t = &ATTENTION[i];
    size_t one = (size_t)t->n_head * t->vd, n_out = t->n * one;
    float *first = NULL, *want = need(n_out * sizeof *want);
    Attention a = attention_of(t);
    a.out = want;
    plain_attention(&a, need(a.rows * sizeof(float)));
    for (int threads = 1; threads <= 3; threads += 1 + !!test.quick) {
        Pool *pool = pool_open(threads);
        REQUIRE(pool, "%d threads", threads);
        a.out = need(2 * n_out * sizeof *a.out);
        if (!first) first = a.out;
        RUN_COUNTED(attention, pool, &a);
        for (int k = t->n > FEW ? t->n - 1 : 0; k < t->n; k++) {
            Attention alone = a;
            alone.n = 1;
            alone.pos += k;
            alone.q += k * t->n_head * t->hd;
            alone.out += n_out + k * one;
            RUN_COUNTED(attention, pool, &alone);
        }
        pool_close(pool);
        CHECK(t->n > FEW || !memcmp(a.out, a.out + n_out, 4 * n_out), "case %d: not as alone", i);
        CHECK(!memcmp(first, a.out, 8 * n_out), "case %d: %d threads differ", i, threads);
        double error = nmse(a.out, want, n_out);
        error += nmse(a.out + 2 * n_out - one, want + n_out - one, one);
        // exponentials to 1e-6, values summed in f32; a CPU with half dot products rounds q
        CHECK(error < 1e-7, "case %d: NMSE %.2g", i, error);
    }
}

static void test_attention(void) {
    for (size_t i = 0; i < COUNT(ATTENTION); i++) check_attention(i);
    // by hand: a window of 3 that ends with the query, one of 3 on each side; key 0 pinned, -1 none
    static const char *const seen[2] = {"x..xxx...", "x..xxxxx."};
    for (int k = -1; k < 9; k++)
        for (int both = 0; both < 2; both++) {
            Attention a = {.window = 3, .ahead = 2 * both, .keep = 1};
            CHECK(attention_sees(&a, 5, k) == (k >= 0 && seen[both][k] == 'x'), "key %d", k);
        }
    Shape windows = {"modern-bert", 4, "fuNTF", WINDOW_KEYS};   // half of 9 on each side
    const Layer *w = random_model(&windows)->layers;
    CHECK(!w[0].window && w[1].window == 5 && w[2].window == 5 && !w[3].window, "modern-bert");
}

// ---- row by row ----

static void test_norms(void) {
    enum { N = 75 };
    for (int k = 0; k < 6; k++) {   // three kinds; over all values, or in groups of 25
        int kind = k % 3, group = k / 3 * 25;
        float *x = noise_array(N, 2), out[N], want[N];
        // weights for each group, or for all its own
        int size = kind == NORM_RMS && group ? group : N;
        Norm n = {noise_array(N, 1), noise_array(N, 1), size, group};
        if (kind == NORM_BARE) n.w = NULL;
        if (kind != NORM_LAYER) n.b = NULL;
        for (int i = 0; i < N; i++) x[i] += 0.5f;
        norm(out, x, N, &n, kind, 1e-3f);
        reference_norm(want, x, N, &n, kind, 1e-3f);
        double error = nmse(out, want, N);
        CHECK(error < 1e-12, "kind %d, group %d: NMSE %.2g", kind, group, error);
    }
}

// by hand: four heads have slopes of 2^-2 to 2^-8, two more 2^-1, 2^-3
static void test_positions(void) {
    static const float want[] = {1 / 4.0f, 1 / 16.0f, 1 / 64.0f, 1 / 256.0f, 1 / 2.0f, 1 / 8.0f};
    float slope[6];
    for (int n = 4; n <= 6; n++) {
        alibi_slopes(slope, n, 8);
        for (int h = 0; h < n; h++) CHECK(slope[h] == want[h], "%d heads: %g", n, slope[h]);
    }
    EACH_WORD(arch, "minicpm granite", " ")   // as llama.cpp's graph of both does
        CHECK(random_model(&(Shape){arch, 1, "xT", EXPERT_KEYS "logit_scale=1."})
              ->config.weights_normed, "%s", arch);
    Shape lfm2 = {"lfm2", 2, "HCkNQ", WINDOW_KEYS "shortconv.l_cache=3"};
    CHECK(random_model(&lfm2)->layers[1].window == 9, "lfm2 has no window");
    // of eight pairs some stand still, as in llama.cpp
    static const struct { Shape shape; int still; } sections[] = {
        {{"hunyuan_vl", 1, "k", "rope.dimension_sections=2,2,2,2"}, 0xc0},
        {{"qwen3vl", 1, "k", "rope.dimension_sections=2,3,3,0"}, 0x40}};
    for (int i = 0; i < 2; i++) {
        Session *s = open_session(random_model(&sections[i].shape), (Options){.threads = 1});
        int still = 0;
        for (int k = 0; k < 8; k++) still |= (s->freq[0][k] == 0) << k;
        CHECK(still == sections[i].still, "%s: pairs %x", sections[i].shape.arch, still);
    }
    const Model *phi3 = open_model("golden/archs/phi3-long-00001-of-00002.gguf");
    double near[64], far[64];
    rope_frequencies(phi3, FULL, phi3->config.n_ctx_orig, near);
    rope_frequencies(phi3, FULL, phi3->config.n_ctx_orig + 1, far);
    CHECK(near[1] != far[1], "phi3: long factors at the original length, or none behind it");
    Shape ocr = {"deepseek2-ocr", 1, "", "rope.dimension_count=8 rope.scaling.factor=4."};
    const Model *plain = random_model(&ocr);   // only the scores know of the factor
    float factor = rope_frequencies(plain, FULL, 0, far), score = plain->config.attn_scale;
    CHECK(*far == 1 && factor == 1 && plain->config.n_rot[FULL] == HEAD, "ocr %g %g", *far, factor);
    CHECK(fabs(score * 4 - pow(1 + log(4) / 10, 2)) < 1e-6, "ocr: a scale of %g", score);
}

static void test_activations(void) {
    enum { N = 400 };
    double worst = 0;
    for (int act = 0; act < ACT_COUNT; act++)
        for (int gate = act == ACT_SWIGLU_OAI; gate < 1 + (act != ACT_XIELU); gate++) {
            float *g = noise_array(N, 12), *u = noise_array(N, 9), out[N], want[N];
            if (act == ACT_XIELU) xielu(memcpy(out, u, sizeof out), N, &XIELU);
            else activate(out, gate ? g : NULL, u, N, act);
            for (int i = 0; i < N; i++)
                want[i] = reference_activation(act, gate ? g[i] : u[i], u[i], gate);
            double error = nmse(out, want, N);
            CHECK(error < 1e-11, "activation %d: NMSE %.2g", act, error);
        }
    for (double x = -87; x < 88; x += 0.00731)
        worst = fmax(worst, fabs(exp_fast(x) / exp((float)x) - 1));
    CHECK(worst < 1e-6, "exp_fast is off by %.2g", worst);
    CHECK(log1p_exp(100) == 100, "softplus(100) is %g", log1p_exp(100));
    CHECK(exp_fast(-1000) < 1e-37f && exp_fast(-INFINITY) < 1e-37f && exp_fast(0) == 1, "its ends");
}

// ==== models ====

// ---- golden models: logits of llama.cpp on the same weights in f32 ----

typedef struct {
    const Model *m;
    int32_t ids[80];
    int n;
    float *want;    // logits, or of an encoder the vector
    double limit;   // quantised: three times llama.cpp's own distance from the same weights in f32
} Golden;

// NAME.gguf, or the first of two parts: its own metadata, the weights of another model
static Golden golden_model(const char *name) {
    char *path = text_of("golden/archs/%s.gguf", name), *end;
    size_t size;
    if (access(path, R_OK)) path = text_of("golden/archs/%s-00001-of-00002.gguf", name);
    Golden g = {.m = open_model(path), .limit = 1e-5};
    const char *s = read_all(text_of("golden/archs/%s.tokens", name), NULL);
    for (; g.n < 80 && (g.ids[g.n] = strtol(s, &end, 10), end > s); g.n++) s = end + (*end == ',');
    bool encoder = g.m->config.encoder;
    g.want = read_all(text_of("golden/archs/%s.%s", name, encoder ? "embd" : "logits"), &size);
    size_t numbers = encoder ? (size_t)g.m->config.dim : (size_t)g.n * g.m->config.n_vocab;
    REQUIRE(size == numbers * sizeof *g.want, "%s: %zu", name, size);
    if (!strchr(name, '.')) return g;
    g.limit = fmax(1e-4, 3 * atof(read_all(text_of("golden/archs/%s.nmse", name), NULL)));
    return g;
}

// distance from llama.cpp's logits, or from the mean of an encoder's vectors
static double golden_error(const Model *m, const float *rows, int n, const float *golden) {
    int dim = m->config.dim;
    float *mean = need(dim * sizeof *mean);
    if (m->config.causal) return nmse(rows, golden, (size_t)n * m->config.n_vocab);
    for (int i = 0; i < n * dim; i++) mean[i % dim] += rows[i] / n;
    return nmse(mean, golden, dim);
}

// calls fn with the name of every `step`-th
static void each_golden_model(void (*fn)(const char *name), int step) {
    glob_t found;
    REQUIRE(!glob("golden/archs/*.tokens", 0, NULL, &found), "no golden models");
    CHECK(found.gl_pathc == 63, "%zu golden models", (size_t)found.gl_pathc);
    for (size_t i = 0; i < found.gl_pathc; i += step) {
        const char *file = strrchr(found.gl_pathv[i], '/') + 1;
        fn(text_of("%.*s", (int)(strrchr(file, '.') - file), file));
        clean_up();
    }
    globfree(&found);
}

static void check_golden(const char *name) {
    Golden g = golden_model(name);
    int runs = g.m->config.causal ? 2 : 1;   // an encoder takes a text in one chunk
    int chunks[] = {runs == 2 ? 48 : g.n, 1};
    double worst = 0;
    CHECK(g.m->config.verified, "%s lacks its star in ARCHS", g.m->config.name);
    for (int k = 0; k < runs; k++) {
        Options o = {.chunk = chunks[k], .threads = 1 + k};
        double error = golden_error(g.m, logits_of(g.m, g.ids, g.n, o), g.n, g.want);
        CHECK(error <= g.limit, "%s -b %d: NMSE %.2g > %.2g", name, o.chunk, error, g.limit);
        worst = fmax(worst, error);
    }
    printf("  %-16s NMSE %.1e, limit %.1e\n", name, worst, g.limit);
}

static void test_golden_models(void) { each_golden_model(check_golden, 1); }

// Chunks of up to FEW tokens: each token's logits are the bytes that it has alone.
static void check_few(const char *name) {
    static const int chunks[] = {1, 2, 3, 5, 8};
    Golden g = golden_model(name);
    float *want = NULL;
    int runs = test.quick ? 5 : 10;   // in a window, then in all
    if (test.quick) g.n = smaller(g.n, 32);
    for (int k = 0; g.m->config.causal && k < runs; k++) {
        Options o = {.window = k < 5 ? 19 : 0, .chunk = chunks[k % 5], .threads = 1 + k % 2};
        o.keep = k < 5 ? 2 : 0;
        float *got = logits_of(g.m, g.ids, g.n, o);
        if (k % 5 == 0) want = got;
        bool same = !memcmp(got, want, (size_t)g.n * g.m->config.n_vocab * sizeof *got);
        CHECK(same, "%s -c %d: -b %d has other bits than -b 1", name, o.window, o.chunk);
    }
    // behind a long text few tokens take more scratch than a chunk of many
    Session *s = open_session(g.m, (Options){.window = 5000, .chunk = FEW + 1}), few = *s;
    few.op_scratch = (Arena){0};
    forward(&few, NULL, FEW, 0);
    CHECK(few.op_scratch.peak <= s->op_scratch.size, "%s: few tokens lack scratch", name);
}

static void test_few_tokens(void) { each_golden_model(check_few, test.quick > 1 ? 4 : 1); }

// ---- guesses ----

typedef struct { Tokens made; size_t most; int passes, stop; } Told;   // by session_generate
static bool tell_id(void *ctx, int32_t id) {
    Told *t = ctx;
    return tokens_add(&t->made, id) && t->made.n < t->most;
}
static bool tell_pass(void *ctx, int reused, int done, int n) {
    Told *t = ctx;
    t->passes += done < n;
    return done == n || t->passes != t->stop;   // Ctrl-C
}

// Generates behind ids [n], which get what is made, and evaluates NEXT more tokens, a chunk of
// another turn. Returns the logits of the last, followed by the state of the generator.
enum { NEXT = FEW + 4 };
typedef Session *Opener(const Model *m, Options o);
static float *tell(const Model *m, Options o, int32_t *ids, int n, int max, Told *t, Opener *open) {
    float *row = need((m->config.n_vocab + 2) * sizeof *row);
    Session *s = open(m, o);
    s->on_chunk = tell_pass;
    s->ctx = t;
    OnToken to = {tell_id, t};
    bool ok = session_generate(s, ids, n, max, to, &(Error){""});
    memcpy(ids + n, t->made.id, t->made.n * sizeof *ids);
    int made = t->made.n;
    if (!ok && t->passes == t->stop)
        ok = session_generate(s, ids, n + made, max - made, to, &(Error){""});
    CHECK(ok, "a text");
    t->stop = 0;
    memcpy(row + m->config.n_vocab, &s->rng, sizeof s->rng);
    memcpy(ids + n + made, t->made.id + made, (t->made.n - made) * sizeof *ids);
    for (int i = 0; i < NEXT; i++) ids[n + t->made.n + i] = 1 + i;
    last_row(s, ids, n + t->made.n + NEXT, row);
    session_close(s);
    freed(t->made.id);
    return row;
}

// With and without guesses a text and what comes after it are the same bytes, by as many draws,
// whatever ends it: the number of ids asked for, on_token, an end-of-generation id, an interrupt.
static int texts_shorter;   // in passes
static void same_text(const Model *m, Options o, const int32_t *ids, int n, int max, Opener *open) {
    int32_t text[2][400];
    size_t most = o.sampling.seed % 4 == 1 ? 9 + o.sampling.seed : 500;
    Told told[2] = {{.most = most}, {.most = most, .stop = 5 + o.sampling.seed}};
    float *rows[2];
    for (int k = 0; k < 2; k++, o.draft = 1 + o.sampling.seed % 7) {
        memcpy(text[k], ids, n * sizeof *ids);
        rows[k] = tell(m, o, text[k], n, max, &told[k], open);
    }
    bool same = told[0].made.n == told[1].made.n &&
                !memcmp(text[0], text[1], (n + told->made.n) * sizeof *ids) &&
                !memcmp(rows[0], rows[1], (m->config.n_vocab + 2) * sizeof **rows);
    CHECK(same, "%s seed %d: guesses change it", m->config.name, (int)o.sampling.seed);
    texts_shorter += told[1].passes < told[0].passes;
}

static void make_sure(Model *m) {   // nextn blocks, of all that they guess
    for (int b = 0; b < m->config.n_nextn; b++) {
        Norm *w = &m->layers[m->config.n_layer + b].out_norm;
        float *large = need(w->n * sizeof *large);
        for (int i = 0; i < w->n; i++) large[i] = 1e6f * w->w[i];
        w->w = large;
    }
}

static void check_guesses(const char *name) {
    Golden g = golden_model(name);
    make_sure((Model *)g.m);
    int runs = test.quick ? 1 : 24;
    for (int run = 0; g.m->config.causal && run < runs; run++) {
        Sampling how = {.temp = run % 3 * 0.15f, .top_p = 1, .repeat_penalty = run % 4 ? 1 : 1.05f,
                        .repeat_last_n = run % 2 ? -1 : 9, .seed = run};
        Options o = {.window = run % 5 ? 0 : 12, .keep = run % 10 ? 0 : 2, .threads = 1,
                     .chunk = (int[]){512, 3, 8, 1, 5, 6}[run % 6], .sampling = how};
        for (int i = 5; i < 16; i++) g.ids[i] = g.ids[i - 5];   // it repeats itself
        same_text(g.m, o, g.ids, 16, 60 + run % 2, open_session);
    }
}

static void test_guesses(void) {
    int step = test.quick > 1 ? 4 : 1, least = test.quick ? 5 / step : 20;
    texts_shorter = 0;
    each_golden_model(check_guesses, step);
    CHECK(texts_shorter > least, "guesses stood in %d texts", texts_shorter);
    printf("  guesses stood in %d texts\n", texts_shorter);
    // a text that on_token ends where a guess falls: the chunk that follows begins where it ended
    Golden g = golden_model("lfm2moe");
    for (int i = 0; i < 12; i++) g.ids[i] = 5 + i % 4;
    for (int seed = 1; seed < (test.quick ? 9 : 60); seed += 4) {
        Sampling how = {.temp = 0.3f, .top_p = 1, .repeat_penalty = 1, .seed = seed};
        same_text(g.m, (Options){.threads = 1, .chunk = 64, .sampling = how}, g.ids, 12, 90,
                  open_session);
    }
    // greedy, this model repeats itself: an end-of-generation id comes as a guess
    int32_t ids[300] = {1656, 329, 659, 258, 530};
    const Model *m = open_model("golden/story.gguf");
    Told told = {.most = 290};
    tell(m, (Options){.threads = 1}, ids, 5, 260, &told, open_session);
    m->tokenizer->type[ids[240]] |= TOKEN_EOG;
    same_text(m, (Options){.threads = 1, .sampling.seed = 6}, ids, 230, 60, open_session);
    // answers that are known, and their passes: up to any end, past a damaged id, which falls as a
    // guess before it stands, and up to the last position of a model
    enum { PROMPT = 60, ANSWER = 200, BAD = 45 };
    static const struct { Shape shape; int n_predict, made, passes; const char *says; } known[] = {
        {{"llama", 1, "", ""}, ANSWER, ANSWER, 92, ""},
        {{"llama", 1, "", ""}, -1, 36, 18, "at token 95 "},
        {{"gpt2", 1, "nboBgfP", ""}, -1, 37, 18, "96 learned positions"},
        {{"glm-dsa", 1, "cq", DSA_KEYS}, -1, 37, 18, "beyond 96"},
        {{"llama", 1, "", ""}, ANSWER, ANSWER, 186, ""}};   // two turns
    for (size_t k = 0; k < COUNT(known); k++) {
        Model model = *random_model(&known[k].shape);
        float *embd = memcpy(need(4 * VOCAB * WIDTH), model.embd.data, 4 * VOCAB * WIDTH);
        int32_t text[PROMPT + ANSWER + FEW], *answer = text + PROMPT;
        Error e = {""};
        if (k == 1) embd[BAD * WIDTH] = NAN;
        model.embd.data = (uint8_t *)embd;
        for (int i = 0; i < PROMPT; i++) text[i] = i * i % 59;   // 24 and 35 are BAD
        for (int i = 0; i < ANSWER + FEW; i++) answer[i] = i * i % 41 > 4 ? text[i] : 60 + i % 3;
        Session *s = open_session(&model, (Options){.window = 4, .threads = 1, .draft = FEW - 1});
        Dictation d = {s, answer, PROMPT, 0, 0};
        s->on_chunk = dictate;
        s->ctx = &d;
        for (int turn = k == 4; turn >= 0; turn--) {
            d = (Dictation){s, answer + turn, PROMPT, 0, d.passes};
            session_generate(s, text, PROMPT, known[k].n_predict, (OnToken){count_id, &d}, &e);
        }
        bool right = d.made == known[k].made && d.passes == known[k].passes;
        CHECK(right && strstr(e.text, known[k].says), "%d in %d, '%s'", d.made, d.passes, e.text);
    }
}

// ---- nextn blocks ----

// llama.cpp's logits of the block for each token but the first (.mtp), row by row, then with rows
// that come late; and what it guesses behind so many tokens (.drafts).
static void check_nextn(const char *name) {
    Golden g = golden_model(name);
    size_t size, n_vocab = g.m->config.n_vocab;
    const float *want = read_all(text_of("golden/archs/%s.mtp", name), &size);
    char *text = read_all(text_of("golden/archs/%s.drafts", name), NULL);
    float *got = need(size);
    Session *s;
    REQUIRE(size == (g.n - 1) * n_vocab * sizeof *got, "%s: %zu", name, size);
    for (int k = 0; k < 2; k++) {
        s = open_session(g.m, (Options){.chunk = k ? 7 : 80, .threads = 1 + k, .draft = 1});
        for (int n = 1; n < g.n; n += k ? 17 : 1) {   // 17: two whole chunks
            MUST(session_eval, s, g.ids, n);
            nextn_follow(s, g.ids, n + 1);
            double chance = 0.5, sum = 0;   // of guesses before
            float *row = got + (n - 1) * n_vocab, scale = g.m->config.logit_scale;
            int best = nextn_best(s, &chance);
            for (size_t i = 0; i < n_vocab; i++) row[i] = s->logits[i] * scale;
            for (size_t i = 0; i < n_vocab; i++) sum += exp(row[i] - row[best]);
            CHECK(fabs(chance * sum - 0.5) < 1e-5, "%s: a chance of %g", name, chance);
            REQUIRE(tokens_room(&s->history, n + 1 + FEW), "out of memory");
            CHECK(draft_ids(s, n + 1, 1) == (chance >= 0.2), "%s: unsure, it guesses", name);
        }
        double error = nmse(got, want, size / sizeof *got);
        CHECK(error <= g.limit, "%s: NMSE of the block %.2g", name, error);
        session_close(s);
    }
    make_sure((Model *)g.m);
    s = open_session(g.m, (Options){.threads = 1, .draft = FEW - 1});
    EACH_WORD(line, text, "\n") {
        int n = strtol(line, &line, 10);
        MUST(session_eval, s, g.ids, n - 1);
        REQUIRE(tokens_room(&s->history, n + FEW), "out of memory");
        s->history.id[n - 1] = g.ids[n - 1];
        int end = n + draft_ids(s, n, FEW - 1);
        for (Cache *c = s->cache + g.m->config.n_layer + 1; c < s->cache + s->n_cache; c++)
            CHECK(c->pos[cache_row(c, n)] == n, "%s: a later block lacks the first guess", name);
        for (line++; *line; n++) {
            int id = strtol(line, &line, 10);
            CHECK(n < end && s->history.id[n] == id, "%s: guess %d is not %d", name, n, id);
        }
    }
    const Norm *w = &g.m->layers[s->l].out_norm;
    double sum = 0;
    ((Model *)g.m)->config.nextn_layer_norm = true;   // Nemotron-H's, of the mean 0
    nextn_best(s, &(double){1});
    for (int i = 0; i < w->n; i++) sum += s->normed[i] / w->w[i];
    CHECK(fabs(sum) < 1e-3, "%s: no LayerNorm", name);
    session_close(s);
}

// A block that is the only layer again, and gets embeddings of length 1 as they are, says what the
// layer will say, but for the first token. `wrong`: it says something else.
static Session *agreeing(const Shape *shape, bool wrong, Told *t) {
    enum { BYTES_OF = VOCAB * WIDTH * sizeof(float) };
    Model *m = memcpy(need(sizeof *m), random_model(shape), sizeof *m);
    Layer *w = m->layers = memcpy(need(2 * sizeof *w), m->layers, sizeof *w);
    float *embd = memcpy(need(BYTES_OF), m->embd.data, BYTES_OF), *joint = need(BYTES_OF);
    for (int i = 0; i < VOCAB; i++)
        norm(embd + i * WIDTH, embd + i * WIDTH, WIDTH, &(Norm){0}, NORM_RMS, 0);
    for (int i = 0; i < WIDTH; i++) joint[i * (2 * WIDTH + 1)] = 1;
    m->embd.data = (uint8_t *)embd;
    w[1] = w[0];
    w[1].source = 1;
    w[1].joint = (Matrix){.data = (uint8_t *)joint, .rows = WIDTH, .cols = 2 * WIDTH};
    w[1].embd = m->embd;
    w[1].output = wrong ? m->embd : m->output;
    w[1].out_norm = m->out_norm;
    m->config.n_nextn = 1;
    make_sure(m);
    Session *s = open_session(m, (Options){.window = 5, .threads = 1, .draft = FEW - 1});
    s->on_chunk = tell_pass;
    s->ctx = t;
    return s;
}

// Blocks see all, unless an array says otherwise, and RoPE turns their heads. What is not known of
// one leaves it idle.
#define COHERE EXPERT_KEYS WINDOW_KEYS COHERE_KEYS NEXTN_KEY
static void check_blocks(void) {
    static const struct { Odd odd; int n; const char *why; } blocks[] = {
        {{{"cohere2moe", 4, "1Txs5", COHERE}}, 1, ""},
        {{{"cohere2moe", 3, "1Txs5", COHERE "attention.sliding_window_pattern=1,1"}}, 1, ""},
        {{{"llama", 2, "H5", NEXTN_KEY "attention.head_count_kv=0,2"}}, 1, ""},   // wider
        {{{"llama", 2, "", "block_count=16002 nextn_predict_layers=16000"}}, 0, ""},
        {{NEXTN, {NULL, NEW_TENSOR, "blk.2.layer_output_norm.weight", 32}}, 1, ""},   // MiMo's
        {{{"llama", 3, "5", NEXTN_KEY "attention.head_count_kv=2,2"}}, 0, "or one a layer"},
        {{NEXTN, {NULL, DIM, "blk.2.nextn.eh_proj.weight", 0, 63}}, 0, "want [64,32,1,1]"},
        {{NEXTN, {NULL, DIM, "blk.2.attn_k.weight", 1, 31}}, 0, "want [32,32,1,1]"},
        {{NEXTN, {NULL, NO_TENSOR, "blk.2.nextn.hnorm.weight"}}, 0, "hnorm.weight is missing"},
        {{NEXTN, {NULL, NO_TENSOR, "blk.2.nextn.eh_proj.weight"}}, 0, "2 has no nextn.eh_proj"},
        {{NEXTN, {NULL, NEW_TENSOR, "blk.2.odd.weight", 8}}, 0, "blk.2.odd.weight: unknown"},
        {{{"llama", 4, "55", "nextn_predict_layers=2"}, {NULL, NEW_TENSOR, "blk.3.a", 8}}, 1, ".a"},
        // no block runs without attention or FFN, several times, with an input of its own, in an
        // encoder, or recurrent (that one alone has experts)
        {{{"llama", 3, "5Z", NEXTN_KEY "attention.head_count_kv=0,0,0"}}},
        {{{"llama", 3, "5Y", NEXTN_KEY "feed_forward_length=0"}}},
        {{{"nanbeige", 3, "T5", NEXTN_KEY "num_loops=2"}}},
        {{{"gemma4", 5, "tTkzR5", GEMMA4_KEYS NEXTN_KEY "embedding_length_per_layer_input=6"}}},
        {{{"llama-embed", 3, "5", NEXTN_KEY}}},
        {{{"nemotron_h_moe", 3, "3Mg1xsr5", ALONE_KEYS EXPERT_KEYS NEXTN_KEY
           "attention.head_count_kv=0,2,2"}, {NULL, NEW_TENSOR, "blk.2.ffn_norm.weight", 32}}}};
    for (size_t k = 0; k < COUNT(blocks); k++) {
        largest = 0;
        const Model *m = odd_model(&blocks[k].odd);
        const Layer *w = &m->layers[m->config.n_layer];
        const char *why = blocks[k].why ? blocks[k].why : "unlike a causal layer";
        CHECK(m->config.n_nextn == blocks[k].n && strstr(m->nextn_idle.text, why) &&
              largest < 1 << 20, "%zu: '%s'", k, m->nextn_idle.text);
        if (!blocks[k].n) continue;
        Options o = {.window = 50000, .chunk = FEW, .draft = 1, .threads = 1};
        Session *s = open_session(m, o), block = *s;
        block.op_scratch = (Arena){0};
        nextn_forward(&block, 0, NULL, FEW, 0);
        bool room = block.op_scratch.peak <= s->op_scratch.size && s->k - s->q >= w->q.rows;
        CHECK(w->rope != ROPE_NONE && !w->window && room, "%zu: a window, or no room", k);
        o.chunk = 1;
        CHECK(open_session(m, o)->n_cache == w - m->layers, "-b 1 opens blocks");
    }
}

static void test_nextn(void) {
    check_nextn("cohere2moe-mtp");   // behind the norm, experts, side by side
    check_nextn("step35-mtp");       // before the norm, three blocks
    check_nextn("qwen35-mtp");       // a hybrid, a head of the block's own
    // caches keep in step: guesses stand, also on a turn that goes back, and late after a rest
    static const Shape shapes[] = {{"llama", 1, "", ""}, {"deepseek2", 1, "cq", LATENT_KEYS},
                                   {"qwen3moe", 1, "kx", EXPERT_KEYS}};
    int32_t ids[60];
    for (int i = 0; i < 60; i++) ids[i] = i * i % 61;
    for (size_t k = 0; k < COUNT(shapes) + 1; k++) {
        Told told = {.most = 500};
        bool wrong = k == COUNT(shapes);   // guesses that never stand rest, for ever longer
        Session *s = agreeing(&shapes[k % COUNT(shapes)], wrong, &told);
        for (int turn = 0; turn < 3; turn++, told.passes = 0) {
            if (turn == 2) s->rest = 30;
            session_generate(s, ids, 20 + 9 * turn, wrong ? 200 : 64, (OnToken){tell_id, &told},
                             &(Error){""});
            CHECK(wrong || told.passes <= (turn == 2 ? 45 : 14), "%zu: %d passes", k, told.passes);
        }
        CHECK(wrong == (s->pause >= 28), "a rest is %d", s->pause);
        for (int i = 0; i < 2; i++, ids[48]++)   // a text that differs: rows before it are made
            MUST(session_eval, s, ids, 50);
        CHECK(s->cache[1].pos[cache_row(&s->cache[1], 47)] == 47, "a row of the block is missing");
        freed(told.made.id);
        // it repeats itself: lookup goes first, a hint that may not run does not stop the block
        memcpy(ids + 50, ids, 5 * sizeof *ids);
        MUST(session_eval, s, ids, 55);
        s->rest = 0;
        for (int most = 0; most < 2; most++) {
            Guesses g = {.most = most, .hint = -1};
            guess_next(s, &g, 55, -1);
            CHECK(g.looked_up == most && g.drafted == !most && g.run > 0, "%d guesses", g.run);
        }
        s->rest = 9;   // which gives up rows
        s->nextn_pos = 1;
        guess_next(s, &(Guesses){.hint = -1}, 55, -1);
        CHECK(s->nextn_pos == 55 - 32, "rows from %d on are kept", s->nextn_pos);
    }
    static const int paid[][3] = {{2000, 0, 11}, {600, 1, 577}, {50, 0, 15}};
    Session pays = {.m = random_model(shapes), .n_cache = 2};
    Guesses one = {.run = 1};
    for (int k = 0, tries = 0; k < 3; k++, tries = 0) {   // of so many passes, if guesses stand
        one.stood = paid[k][1];
        for (int i = 0; i < paid[k][0]; i++) tries += one.drafted = nextn_pays(&pays, &one);
        CHECK(tries == paid[k][2], "%d tries in %d passes", tries, paid[k][0]);
    }
    Shape lite = {"deepseek2", 48, "cyxs5", EXPERT_KEYS LATENT_KEYS NEXTN_KEY};
    CHECK(random_model(&lite)->config.gating == SIGMOID, "47 layers and a block are not 47");
    check_blocks();
}

// ---- every architecture ----
//
// Most of these rows have no golden output. What is tested is that every tensor of such a file is
// read, and that prefill, decode and prefix reuse agree.

static const Shape SHAPES[] = {
    {"llama", 3, "x", EXPERT_KEYS},
    {"mistral3", 3, "", "attention.temperature_scale=0.1 rope.scaling.original_context_length=8"},
    {"qwen2", 3, "bT", ""}, {"qwen3", 3, "kT", ""}, {"gemma", 3, "T", ""}, {"qwen2", 3, "f6T", ""},
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
    {"qwen3next", 4, "dDakxmsS", DELTA_KEYS EXPERT_KEYS}, {"qwen35", 4, "dvak", DELTA_KEYS},
    {"bert", 3, "nboBgENP", "attention.causal=0"}, {"nomic-bert", 3, "nfEN", "attention.causal=0"},
    {"olmo", 3, "0T", "attention.clamp_kqv=1."}, {"olmo2", 4, "pK", WINDOW_KEYS},
    {"smollm3", 4, "T", ""},
    {"granite", 3, "T", "embedding_scale=3. residual_scale=0.5 logit_scale=2. attention.scale=0.2"},
    {"minicpm", 3, "T", ""}, {"stablelm", 3, "n1j", "rope.dimension_count=4"},
    {"starcoder", 3, "nboBgfPT", ""}, {"starcoder2", 3, "nboBgT", ""},
    {"command-r", 3, "1jT", "logit_scale=0.5"}, {"cohere2", 4, "1T", WINDOW_KEYS "logit_scale=0.5"},
    {"chatglm", 3, "fbu", "rope.dimension_count=8"}, {"glm4", 3, "tbu", "rope.dimension_count=8"},
    {"exaone", 3, "T", ""}, {"exaone4", 3, "pk", ""}, {"exaone4", 64, "pk", WINDOW_KEYS},
    {"internlm2", 8, "", ""}, {"baichuan", 3, "", ""}, {"baichuan", 32, "", ""},
    {"baichuan", 40, "", ""}, {"xverse", 3, "", ""}, {"orion", 3, "n", ""},
    {"nemotron", 3, "ng", "rope.dimension_count=8"}, {"arcee", 3, "g", ""},
    {"phi2", 3, "nboBg1O", "rope.dimension_count=8"}, {"gpt2", 3, "nboBgfPT", ""},
    {"gptneox", 3, "nboBgf", "rope.dimension_count=4 use_parallel_residual=1"},
    {"falcon", 3, "nf1g2T", ""}, {"bloom", 3, "nboBgfNT", ""},
    {"hunyuan-dense", 3, "kT", "rope.scaling.alpha=1000."}, {"ernie4_5", 3, "T", ""},
    {"seed_oss", 3, "ab", ""},
    {"mamba2", 3, "MZY", SPACE_KEYS "attention.head_count=0 feed_forward_length=0"},
    {"nemotron_h", 3, "3Mg1oB", ALONE_KEYS "rope.dimension_count=13"},
    {"nemotron_h_moe", 3, "3Mg1xsrL", ALONE_KEYS EXPERT_KEYS "expert_weights_scale=2."},
    {"nemotron_h_moe", 3, "3Mg1xrB", ALONE_KEYS EXPERT_KEYS "expert_weights_norm=1"},
    {"granitehybrid", 4, "HMxs", SPACE_KEYS EXPERT_KEYS "logit_scale=2. residual_scale=.5"},
    {"falcon-h1", 3, "M", SPACE_KEYS}, {"lfm2", 4, "HCkNQ", WINDOW_KEYS "shortconv.l_cache=3"},
    {"lfm2moe", 4, "HCkNQxr", EXPERT_KEYS "shortconv.l_cache=3 expert_gating_func=2"},
    {"gemma4", 4, "tTkxezR", EXPERT_KEYS GEMMA4_KEYS
     "embedding_length_per_layer_input=6 attention.sliding_window_pattern=2"},
    {"gemma4", 6, "tkR", GEMMA4_KEYS}, {"deepseek2", 3, "cqxsr", EXPERT_KEYS LATENT_KEYS GROUP_KEYS
     "attention.temperature_scale=0.1 attention.temperature_length=8"},
    {"deepseek2", 47, "cyxs", EXPERT_KEYS LATENT_KEYS "expert_weights_norm=1"},
    {"mistral4", 3, "cqx", EXPERT_KEYS LATENT_KEYS}, {"plm", 3, "cyg", LATENT_KEYS},
    {"minicpm3", 3, "cqy", LATENT_KEYS}, {"qwen2vl", 3, "b", ""}, {"qwen3vl", 3, "k", ""},
    {"qwen3vlmoe", 3, "kx", EXPERT_KEYS}, {"hunyuan_vl", 3, "kT", ""}, {"paddleocr", 3, "T", ""},
    {"bailingmoe2", 3, "fkxsr", EXPERT_KEYS GROUP_KEYS "rope.dimension_count=8"},
    {"exaone-moe", 4, "kxsr", EXPERT_KEYS WINDOW_KEYS "expert_gating_func=2"},
    {"hy_v3", 3, "kxsr", EXPERT_KEYS}, {"plamo", 3, "1", ""}, {"pangu-embedded", 3, "bo", ""},
    {"mimo2", 6, "ixr", EXPERT_KEYS WINDOW_KEYS "attention.value_scale=0.5 rope.dimension_count=8"},
    {"mellum", 4, "kx", EXPERT_KEYS WINDOW_KEYS}, {"jais2", 3, "nboBg", ""},
    {"dbrx", 3, "fxw", EXPERT_KEYS "attention.clamp_kqv=1."}, {"llama-embed", 3, "", ""},
    {"granite_swa", 4, "ixs", EXPERT_KEYS WINDOW_KEYS "logit_scale=2. attention.rope_pattern=1"},
    {"jina-bert-v2", 3, "nboBuENhK", ""}, {"gemma-embedding", 6, "tkT", WINDOW_KEYS},
    {"modern-bert", 4, "fuNTF", WINDOW_KEYS "attention.causal=0"},
    {"neo-bert", 3, "fu", ""}, {"openelm", 3, "fkT", ""}, {"phimoe", 3, "nboxO", EXPERT_KEYS},
    {"qwen", 3, "fb", "feed_forward_length=96"}, {"llama4", 4, "xs", EXPERT_KEYS WINDOW_KEYS},
    {"plamo3", 8, "fk9u", WINDOW_KEYS}, {"codeshell", 3, "nboBgf", ""}, {"maincoder", 3, "k", ""},
    {"mpt", 3, "nfgT", "attention.max_alibi_bias=8. attention.clamp_kqv=1."}, {"refact", 3, "", ""},
    {"nomic-bert-moe", 3, "nfbBEgN", ""}, {"jina-bert-v3", 3, "nfboBEgN", ""},
    {"jais", 3, "nbofB", "attention.max_alibi_bias=8."}, {"deepseek2-ocr", 3, "xs", EXPERT_KEYS},
    {"glm-dsa", 3, "cqxsr", EXPERT_KEYS DSA_KEYS}, {"deepseek32", 3, "cqxsr", EXPERT_KEYS DSA_KEYS},
    {"muse-glimmer", 4, "ktV", WINDOW_KEYS "logit_scale=0.5"}, {"step35", 4, "k", STEP_KEYS},
    {"spark2_5", 4, "GT", WINDOW_KEYS "attention.sliding_window_pattern=4"}, {"cogvlm", 3, "f", ""},
    {"laguna", 4, "kGxsr", EXPERT_KEYS WINDOW_KEYS "rope.dimension_count_swa=8"},
    {"afmoe", 4, "ktVxsr", EXPERT_KEYS WINDOW_KEYS "expert_weights_norm=1"},
    {"step35", 4, "kGRxsr", EXPERT_KEYS STEP_KEYS "swiglu_clamp_exp=0.2"},
    {"kimi-linear", 3, "Axsr", EXPERT_KEYS KDA_KEYS}, {"eurobert", 3, "T", ""},
    {"bailingmoe3", 3, "UVxsrq", EXPERT_KEYS KDA_KEYS "kda.gate_lower_bound=-5."},
    {"cohere2moe", 5, "1Txs", EXPERT_KEYS WINDOW_KEYS COHERE_KEYS},
    {"maple", 4, "kx", EXPERT_KEYS WINDOW_KEYS "attention.sliding_window_pattern=1,1,0,1 "
     "rope.dimension_count=8 swiglu_clamp_exp=0.7"},
    {"deci", 6, "4", "attention.head_count=4,0,0,4,0,0 attention.head_count_kv=2,0,0,2,0,0 "
     "feed_forward_length=48,48,0,48,48,0"}, {"nanbeige", 3, "T", "num_loops=2"},
    {"smallthinker", 5, "xT", EXPERT_KEYS WINDOW_KEYS "expert_gating_func=2"},
    {"apertus", 3, "kg", XIELU_KEYS},
};

// Are all tensors used? The file is mapped: a change to a tensor in it must change the last row.
static void check_tensors_used(Session *s, const int32_t *ids, int n, const float *want) {
    const Gguf *g = s->m->gguf;
    int fd = open(scratch("random.gguf"), O_RDWR);
    for (size_t i = 0; i < g->n_tensors; i++) {
        const Tensor *t = &g->tensors[i];
        size_t count = t->ne[0] * t->ne[1] * t->ne[2], at = t->data - g->maps[0].base;
        float *old = need(4 * count), *changed = need(4 * count), got[VOCAB] = {0};
        int layer = -1;
        sscanf(t->name.s, "blk.%d.", &layer);
        if (layer > 1 && layer < s->m->config.n_layer - 1) continue;
        const char *name = text_of("%.*s", STR_ARG(t->name));   // read, or copied, beforehand:
        if (!strncmp(name, "rope_", 5) || strstr(name, ".ssm_conv1d_") || strstr(name, ".ssm_ba."))
            continue;
        memcpy(old, t->data, 4 * count);
        bool right = false;
        for (int tries = 1; !right && tries < 9; tries++) {   // a router's bias may change nothing
            for (size_t k = 0; k < count; k++) changed[k] = 0.2f * tries - tries * old[k];
            ssize_t wrote = pwrite(fd, changed, 4 * count, at);
            session_truncate(s, 0);
            last_row(s, ids, n, got);
            wrote += pwrite(fd, old, 4 * count, at);
            right = memcmp(got, want, sizeof got) && wrote == (ssize_t)(8 * count);
        }
        CHECK(right, "%s: %.*s is not used", s->m->config.name, STR_ARG(t->name));
    }
    close(fd);
}

static double check_shape(const Shape *shape) {
    enum { N = 20 };
    int32_t ids[N], other[N];
    float whole[VOCAB] = {0}, single[VOCAB] = {0}, changed[VOCAB], back[VOCAB] = {0};
    float threads[VOCAB] = {0};
    const Model *m = random_model(shape);
    bool encoder = !m->config.causal;
    Session *s = open_session(m, (Options){.threads = 2, .window = 64, .chunk = 64});
    for (int i = 0; i < N; i++) ids[i] = random_bits() % VOCAB;
    for (int i = 0; i < N; i++) other[i] = i < 9 ? ids[i] : (int)(random_bits() % VOCAB);
    last_row(s, ids, N, whole);
    last_row(open_session(m, (Options){.threads = 1, .chunk = encoder ? N : 1}), ids, N, single);
    last_row(open_session(m, (Options){.threads = 7, .window = 64, .chunk = 64}), ids, N, threads);
    last_row(s, other, N, changed);   // another end, and back: the first part is reused
    last_row(s, ids, N, back);
    double error = fmax(nmse(single, whole, VOCAB), nmse(back, whole, VOCAB));
    CHECK(isfinite(whole[0]) && whole[0] != whole[1], "%s: %g", shape->arch, whole[0]);
    CHECK(memcmp(changed, whole, sizeof whole), "%s: the text does not matter", shape->arch);
    CHECK(!memcmp(threads, whole, sizeof whole), "%s: 7 threads differ from 2", shape->arch);
    CHECK(error < 1e-6, "%s, %d layers: NMSE %.2g", shape->arch, shape->n_layer, error);
    if (!test.quick) check_tensors_used(s, ids, N, whole);
    clean_up();
    return error;
}

// The NUMBERS that names of ARCHS imply, for a width of 64, a head of 16 and four layers, or as
// many as stand here. 0, or another name: as in the last row.
static const char *const NUMBERS[] = {"embd_scale", "attn_scale", "rope_base[WINDOWED]", "attn_cap",
    "logit_cap", "window", "alibi", "residual_scale", "logit_scale", "local_unscaled and _plain"};
static const struct { const char *name; int n_layer; float x[10]; } IMPLIED[] = {
    {"gemma", 0, {8}}, {"gemma2", 46, {8, 0.125f, 0, 50, 30, 4096}},
    {"gemma2", 0, {8, 0, 0, 50, 30, 4096}}, {"gemma3", 62, {8, 0.125f, 10000, [9] = 1}},
    {"gemma3", 0, {8, 0, 10000, [9] = 1}}, {"gemma-embedding", 0, {8, 0, 10000, [9] = 1}},
    {"gemma4", 0, {8, 1, 10000, 0, 30, [9] = 1}}, {"modern-bert", 0, {0, 0, 10000, [9] = 1}},
    {"exaone4", 64, {[5] = 4096}}, {"baichuan", 40, {[6] = 8}}, {"bloom", 0, {[6] = 8}},
    {"jina-bert-v2", 0, {[6] = 8}}, {"refact", 0, {[6] = 8}}, {"laguna", 0, {[9] = 2}},
    {"llama4", 0, {[5] = 8192}}, {"step35", 0, {0, 0, 10000, [9] = 1}}, {"afmoe", 0, {8}},
    {"muse-glimmer", 0, {[4] = 30, [9] = 1}}, {"jais", 0, {0, 0.0625f}}, {"mellum", 0, {[9] = 2}},
    {"minicpm", 0, {12, [7] = 0.7f, 4}}, {"minicpm3", 0, {12, [7] = 0.7f, 4}},
    {"mimo2", 0, {0, 0, 10000, [9] = 1}}, {"plamo3", 0, {0, 0, 10000, [9] = 1}},
    {"olmo2", 0, {[9] = 2}}, {"", 0, {1, 0.25f, 500, 0, 0, 0, 0, 1, 1}}};

static void check_aliases(void) {   // the same weights under Ollama's name give the same logits
    enum { N = 20 };
    int32_t ids[N] = {1, 2, 3, 5, 8, 13, 21, 34, 55};
    for (size_t k = 0; k < COUNT(ALIASES); k++) {
        Shape shape = *SHAPES;
        for (size_t i = 0; strcmp(shape.arch, ALIASES[k].ours); i++) shape = SHAPES[i];
        float *want = logits_of(odd_model(&(Odd){shape}), ids, N, (Options){.threads = 1});
        shape.arch = ALIASES[k].name;
        const Model *m = odd_model(&(Odd){shape});
        float *got = logits_of(m, ids, N, (Options){.threads = 1});
        size_t bytes = (size_t)N * m->config.n_vocab * sizeof *got;
        CHECK(!memcmp(got, want, bytes), "%s: other logits", shape.arch);
        CHECK(m->config.yarn == ALIASES[k].yarn, "%s: YaRN", shape.arch);
    }
}

static void check_names(void) {   // has every name of ARCHS a shape, and its numbers?
    for (size_t k = 0; k < COUNT(ARCHS); k++) {
        int n = ARCHS[k].n_layer, plain = COUNT(IMPLIED) - 1;
        Config c = ARCHS[k].c;
        c.dim = 64;
        c.n_head = 1;
        c.hd = 16;
        c.rope_base[FULL] = 500;
        c.n_layer = n ? n : 4;
        imply_config(&c, &ARCHS[k]);
        float x[] = {c.embd_scale, c.attn_scale, c.rope_base[WINDOWED], c.attn_cap, c.logit_cap,
                     c.window, c.alibi, c.residual_scale, c.logit_scale,
                     c.local_unscaled + c.local_no_mag};
        EACH_WORD(name, ARCHS[k].names, " *") {
            bool found = false;
            int rows = 0;   // for any number of layers, which --help shows
            for (size_t i = 0; i < COUNT(SHAPES); i++)
                found |= !strcmp(name, SHAPES[i].arch) && (!n || n == SHAPES[i].n_layer);
            CHECK(found, "%s, of %d layers (0: of any): add a row to SHAPES here", name, n);
            for (size_t i = 0; i < COUNT(ARCHS); i++)
                rows += !ARCHS[i].n_layer && find_str(str(name), ARCHS[i].names);
            CHECK(rows == 1, "ARCHS has %d rows for %s of any layers, not 1", rows, name);
            int i = 0;
            while (i < plain && (n != IMPLIED[i].n_layer || strcmp(name, IMPLIED[i].name))) i++;
            for (int j = 0; j < 10; j++) {
                float want = IMPLIED[IMPLIED[i].x[j] ? i : plain].x[j];
                CHECK(x[j] == want, "%s, of %d layers (0: of any): %s is %g, not %g; if that is "
                      "right, IMPLIED here must have it", name, n, NUMBERS[j], x[j], want);
            }
        }
    }
}

static void test_every_architecture(void) {
    check_aliases();
    double worst = 0;
    for (size_t i = 0; i < COUNT(SHAPES); i += test.quick > 1 ? 3 : 1)
        if (!test.quick || SHAPES[i].n_layer <= 8) worst = fmax(worst, check_shape(&SHAPES[i]));
    check_names();
    printf("  prefill, decode and reuse agree to NMSE %.1e, limit 1e-6\n", worst);
}

// ---- the lists of architectures ----
//
// A row of KEYS or NEEDS lists the architectures whose files have a key, or always a tensor. Who
// should be there follows from SHAPES: in the list of a tensor those that have it, in that of a key
// those that give it. LISTS says what differs. `asked` (NULL: as said): of a tensor only those with
// one of these letters should be there, of a key all of them; ~ stands for a window, "" for nobody.
// `without`: not these, whose files have no such key, or may lack the tensor.
#define GATES_AS_ROW "dbrx ernie4_5-moe gemma4 gpt-oss granite_swa granitehybrid granitemoe " \
    "hunyuan-moe llama llama4 maple mellum mimo2 olmoe phimoe qwen2moe qwen35moe qwen3moe " \
    "qwen3next qwen3vlmoe "   // what their row of ARCHS says of experts is all that there is
#define ONE_ROPE "cohere2 cohere2moe exaone-moe exaone4 granite_swa lfm2 mellum olmo2 "
static const struct { const char *name, *asked, *without; } LISTS[] = {
    {"expert_gating_func", "x", GATES_AS_ROW "bailingmoe deepseek nemotron_h_moe"},
    {"expert_weights_norm", "x", GATES_AS_ROW "deepseek kimi-linear lfm2moe minimax-m2 "
     "smallthinker"},
    {"expert_weights_scale", "x", GATES_AS_ROW "lfm2moe minimax-m2 smallthinker"},
    {"rope.freq_base_swa", "~", ONE_ROPE},
    {"rope.dimension_count_swa", "~", ONE_ROPE "gemma-embedding gemma2 gemma3 gpt-oss llama4 "
     "mimo2 modern-bert plamo3 smallthinker"},
    {"shortconv.l_cache", "C", NULL}, {"kda.head_dim", "AU", NULL},
    {"attn_norm.weight", "t9", "afmoe muse-glimmer plamo3"},   // others are refused without it
    {"ffn_norm.weight", "t9", "afmoe muse-glimmer plamo3"},
    {"output.weight", "", NULL},   // may be token_embd.weight in any
    {"attn_q_norm.weight", NULL, "command-r jina-bert-v2 stablelm step35"},
    {"attn_gate.weight", NULL, "qwen35 qwen35moe qwen3next step35"},
    {"post_attention_norm.weight", NULL, "gpt-oss"}, {"attn_output_norm.weight", NULL, "dbrx"},
    {"attn_norm.bias", NULL, "mpt"}, {"attn_output.bias", NULL, "bert jina-bert-v3 nemotron_h"},
    {"attn_qkv.bias", NULL, "bloom chatglm gpt2 gptneox jina-bert-v3 nomic-bert-moe starcoder"},
    {"output.bias", NULL, "phi2"}, {"attn_sinks.weight", NULL, "mimo2"},
    {"exp_probs_b.bias", NULL, "bailingmoe2 deepseek2 deepseek32 dots1 ernie4_5-moe exaone-moe "
     "glm-dsa hy_v3 mimo2 step35"}, {"rope_freqs.weight", NULL, "step35"},
    {"ffn_up_shexp.weight", NULL, "cohere2moe ernie4_5-moe exaone-moe glm4moe granite_swa "
     "granitehybrid granitemoe hy_v3 llama4 nemotron_h_moe"},
    {"ffn_gate_inp.bias", NULL, "nemotron_h_moe"},
    {"ffn_up_exps.bias", NULL, "nemotron_h_moe"}, {"ffn_down_exps.bias", NULL, "nemotron_h_moe"},
    {"ffn_down.bias", NULL, "bert jina-bert-v3 nemotron_h nomic-bert-moe"},
    {"token_embd_norm.weight", NULL, "lfm2 lfm2moe"},
    {"ssm_conv1d.bias", NULL, "falcon-h1 granitehybrid nemotron_h nemotron_h_moe"},
    {"ssm_norm.weight", NULL, "bailingmoe3 falcon-h1 kimi-linear qwen35 qwen35moe qwen3next"},
    {NULL},
};

static void check_known(const char *archs, const char *of) {
    EACH_WORD(arch, archs ? archs : "", " *") {
        bool known = !strcmp(arch, "all");
        for (size_t i = 0; i < COUNT(ARCHS); i++) known |= !!find_str(str(arch), ARCHS[i].names);
        CHECK(known, "the list of %s has %s, which ARCHS does not have: a typo?", of, arch);
    }
}

// Is a shape in the list of a key or tensor if it should be? has: it gives the key, has the tensor.
static void check_list(const Shape *s, const char *table, const char *name, const char *archs,
                       bool has) {
    const char *window = strstr(s->keys, ".sliding_window=") ? "~" : "";
    size_t at = 0;
    while (LISTS[at].name && strcmp(LISTS[at].name, name)) at++;
    bool is_key = !strcmp(table, "KEYS"), listed = find_str(str(s->arch), archs);
    if (LISTS[at].asked && (is_key || has))
        has = strpbrk(text_of("%s%s", s->letters, window), LISTS[at].asked);
    bool without = find_str(str(s->arch), LISTS[at].without);
    CHECK(!has || listed || without, "%s: add it to the list of %s in %s, or, if its files may "
          "lack that, to the one in LISTS here", s->arch, name, table);
    CHECK(!listed || !without, "%s: the list of %s in %s has it, so take it out of the one in "
          "LISTS here", s->arch, name, table);
}

static void test_arch_lists(void) {
    for (size_t i = 0; i < COUNT(LISTS); i++) check_known(LISTS[i].without, LISTS[i].name);
    for (size_t i = 0; i < COUNT(NEEDS); i++) check_known(NEEDS[i].archs, NEEDS[i].name);
    for (size_t i = 0; i < COUNT(KEYS); i++) check_known(KEYS[i].archs, KEYS[i].key);
    for (const Shape *s = SHAPES; s < SHAPES + COUNT(SHAPES); s++) {
        write_model(&(Writer){0}, s, scratch("random.gguf"));
        Loader ld = {.m = load(scratch("random.gguf"), false), .ok = true};
        for (size_t i = 0; i < COUNT(NEEDS); i++) {
            bool met = false;
            for (int l = -1; l < s->n_layer; l++) met |= !!layer_tensor(&ld, l, NEEDS[i].name, "");
            check_list(s, "NEEDS", NEEDS[i].name, NEEDS[i].archs, met);
        }
        for (const Key *k = KEYS; k < KEYS + COUNT(KEYS); k++)
            if (!find_str(str("all"), k->archs))
                check_list(s, "KEYS", k->key, k->archs,
                           strstr(text_of(" %s", s->keys), text_of(" %s=", k->key)));
        clean_up();
    }
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
        const Model *m = random_model(&shapes[a]);
        float *full = logits_of(m, ids, N, (Options){.window = N, .chunk = N}), got[N * VOCAB];
        for (int keep = 0; keep <= 3; keep += 3) {
            Options o = {.window = WINDOW, .chunk = N, .keep = keep, .threads = 1};
            float *want = logits_of(m, ids, N, o);
            double unlike = nmse(full, want, N * VOCAB), worst = 0;
            CHECK(unlike > 1e-3, "%s: a window changes nothing", shapes[a].arch);
            for (o.chunk = 1; o.chunk <= 16; o.chunk = 4 * o.chunk - 1) {
                Session *s = open_session(m, o);
                get_rows(s, ids, 37, 0, got);
                for (int n = 38; n <= N; n++) last_row(s, ids, n, got + (n - 1) * VOCAB);
                double error = nmse(got, want, N * VOCAB);
                // going back: what the rings still hold is reused, what they lost is run again
                for (int back = N - 2; back > 3; back -= 17) {
                    last_row(s, ids, back, got);
                    error = fmax(error, nmse(got, want + (back - 1) * VOCAB, VOCAB));
                }
                CHECK(error < 1e-6, "%s -b %d: NMSE %.2g", shapes[a].arch, o.chunk, error);
                worst = fmax(worst, error);
            }
            printf("  %-7s keep %d: NMSE %.1e, limit 1e-6; without a window it would be %.0e\n",
                   shapes[a].arch, keep, worst, unlike);
        }
    }
    // Llama 4: the eighth query is sharpened; tokens see no other chunk, their experts half of them
    Model m = *random_model(&(Shape){"llama4", 4, "x", EXPERT_KEYS WINDOW_KEYS});
    float two[] = {2, 2, 2, 2, 2, 2}, *full = logits_of(&m, ids, 8, (Options){.threads = 1}), *got;
    m.config.span = m.config.sharpen_length = m.config.window /= 1024;   // 8, not the file's 9
    got = logits_of(&m, ids, 8, (Options){.threads = 1});
    CHECK(nmse(got, full, 7 * VOCAB) < 1e-9 && nmse(got, full, 8 * VOCAB) > 1e-7, "eighth");
    m.config.n_layer = 3;   // all have chunks
    full = logits_of(&m, ids, N, (Options){.chunk = N});
    for (Layer *w = m.layers; w < m.layers + 3; w++) w->q.scale = w->gate.scale = w->up.scale = two;
    m.config.weights_scale = 0.5f;
    got = logits_of(&m, ids + 16, N - 16, (Options){.chunk = 5});
    CHECK(nmse(got, full + 16 * VOCAB, (N - 16) * VOCAB) < 1e-6, "chunks of attention");
    // gates whose sum is below 2^-14 are divided by that, not by the sum
    float low[] = {-20, -20, -20, -20, -20, -20};
    for (Layer *w = m.layers; w < m.layers + 3; w++) w->router.bias = low;
    m.config.weights_scale = 0x1p14f;
    full = logits_of(&m, ids, N, (Options){.chunk = N});
    m.config.weights_scale = 1;
    m.config.weights_normed = true;
    got = logits_of(&m, ids, N, (Options){.chunk = N});
    CHECK(!memcmp(got, full, N * VOCAB * sizeof *got), "a small sum of gates");
    for (int c = 8; c <= 10; c++) {   // Gemma's window is 9: the smaller one counts
        Options o = {.window = c, .keep = 2};
        const Cache *cache = open_session(random_model(&shapes[1]), o)->cache;
        CHECK(cache->window == fmin(c, 9) && cache->keep == (c > 9 ? 0 : 2), "-c %d", c);
    }
}

static volatile sig_atomic_t fourth;
static bool before_fourth(void *ctx, int reused, int done, int n) { return !fourth; }

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
        for (int k = PROMPT; k <= n; k++)   // again: of the prompt only its last token is computed
            last_row(s, ids, k, got + (k - PROMPT) * v);
        double error = nmse(got, fresh + at, n * v - at);
        CHECK(error < 1e-6, "answer %d differs by %.2g", again, error);
        memset(got, 0, n * v * sizeof *got);
    }
    CHECK(s->saved_pos == PROMPT - 1, "the snapshot is at %d", s->saved_pos);
    memset(s->saved, 0, s->n_recurrent * sizeof *s->saved);
    last_row(s, ids, PROMPT, got);
    CHECK(nmse(got, fresh + at, v) > 1e-4, "the snapshot is not used");
    ids[3] ^= 1;                                     // an early change: everything again
    last_row(s, ids, PROMPT, got);
    fresh = logits_of(m, ids, PROMPT, (Options){.threads = 1});
    CHECK(nmse(got, fresh + at, v) < 1e-6, "a changed prompt");
    session_truncate(s, 0);                          // its snapshot is of no use to another one,
    ids[3] ^= 1;                                     // which makes none while it comes one by one
    for (int k = 1; k <= PROMPT + 9; k++) last_row(s, ids, k, got);
    last_row(s, ids, PROMPT, got);
    fresh = logits_of(m, ids, PROMPT, (Options){.threads = 1});
    CHECK(nmse(got, fresh + at, v) < 1e-6, "the snapshot of a text that is gone");
    fourth = 1;
    ids[3] ^= 1;
    s->on_chunk = before_fourth;
    CHECK(!session_eval(s, ids, PROMPT, &(Error){""}) && !s->history.n, "it is not interrupted");
    fourth = 0;
    last_row(s, ids, 2, got);
    CHECK(s->saved_pos == 1, "two tokens: the snapshot is at %d", s->saved_pos);
}

static bool collect(void *ctx, int32_t id) {   // up to 12
    Tokens *t = ctx;
    bool ok = tokens_add(t, id) && t->n < 12;
    fourth = t->n == 4;
    return ok;
}

static void test_session_refusals(void) {
    // 96 learned positions
    const Model *m = random_model(&(Shape){"gpt2", 2, "nboBgfP", ""});
    Session *s = open_session(m, (Options){.window = 96, .sampling.seed = 4}), huge = {0};
    Error e = {""};
    Tokens out = {0};
    int32_t ids[97] = {1, 2, 3}, bad[] = {1, VOCAB, -1};
    CHECK(!session_eval(s, bad, 2, &e) && strstr(e.text, "token id 64"), "%s", e.text);
    CHECK(!session_eval(s, bad + 2, 1, &e) && strstr(e.text, "token id -1"), "%s", e.text);
    CHECK(!session_eval(s, ids, 0, &e) && strstr(e.text, "no tokens"), "%s", e.text);
    CHECK(!session_eval(s, ids, 97, &e) && strstr(e.text, "learned positions"), "%s", e.text);
    CHECK(session_eval(s, ids, 96, &e), "%s", e.text);
    // an interrupt ends generation at the next evaluation, and evaluation before its first chunk
    static const struct { int n, predict; bool ok, interrupted; size_t made; } runs[] = {
        {3, 9, 1, 0, 9}, {3, -1, 1, 0, 12}, {94, 9, 0, 0, 3}, {3, 50, 0, 1, 4}};
    for (int i = 0; i < 4; i++) {
        out.n = 0;
        s->on_chunk = runs[i].interrupted ? before_fourth : NULL;
        OnToken to = {collect, &out};
        bool ok = session_generate(s, ids, runs[i].n, runs[i].predict, to, &e);
        CHECK(ok == runs[i].ok && out.n == runs[i].made, "run %d: %zu ids", i, out.n);
    }
    CHECK(strstr(e.text, "interrupted") && !session_eval(s, ids, 3, &e), "%s", e.text);
    Options o = {.window = INT_MAX, .chunk = 1 << 20, .cpu = true};
    CHECK(!session_open(&huge, m, o, &e) && strstr(e.text, "out of range"), "%s", e.text);
    s = open_session(random_model(&(Shape){"glm-dsa", 1, "cq", DSA_KEYS}), (Options){.window = 99});
    CHECK(s->o.window == 96 && !session_eval(s, ids, 97, &e) && strstr(e.text, "beyond 96"), "96");
    // an encoder's text is one chunk, and nothing of another text is reused
    m = random_model(&(Shape){"bert", 3, "nboBgENP", ""});
    float a[VOCAB], b[VOCAB];
    s = open_session(m, (Options){.chunk = 8});
    CHECK(!session_eval(s, ids, 9, &e) && strstr(e.text, "in a chunk of 8"), "%s", e.text);
    last_row(s, ids, 8, a);
    ids[3] = 9;
    last_row(s, ids, 8, a);
    last_row(open_session(m, (Options){.chunk = 8}), ids, 8, b);
    CHECK(!memcmp(a, b, WIDTH * sizeof *a), "an encoder reuses a prefix");
    // a model whose weights are not numbers: logits and hidden rows are refused
    Model nan = *random_model(&(Shape){"llama", 1, "", ""});
    float nothing[WIDTH];
    for (int i = 0; i < WIDTH; i++) nothing[i] = NAN;
    nan.out_norm.w = nothing;
    s = open_session(&nan, (Options){.threads = 1});
    CHECK(!session_eval(s, ids, 3, &e) && strstr(e.text, "token 2 the model yields"), "%s", e.text);
    Request pooled = {ids, 3, .hidden = true};
    CHECK(!session_run(s, pooled, &e) && strstr(e.text, "NaN"), "%s", e.text);
    size_t before = allocations;
    for (int i = 0; i < 1000; i++) CHECK(tokens_add(&out, i), "no room");
    CHECK(allocations - before < 12, "%zu allocations for 1,000 ids", allocations - before);
    session_close(&huge);
    session_close(&huge);   // closing again is no harm
    free(out.id);
}

// the golden model with n bytes of a tensor set to 0xFF, which makes floats NaN, in a file `to`
static const Model *damaged(const char *name, const Model *m, const void *at, size_t n,
                            const char *to) {
    size_t size;
    uint8_t *file = read_all(text_of("golden/archs/%s.gguf", name), &size);
    memset(file + ((const uint8_t *)at - m->gguf->maps[0].base), 0xFF, n);
    write_file(scratch(to), file, size);
    return open_model(scratch(to));
}

// A text with a damaged token, or of a model with damaged values, is an error. It leaves nothing
// behind: texts that begin like it, and one in which none sees the token any more, have their bits.
static void check_damage(const char *name, Session *open(const Model *m, Options o)) {
    enum { BAD = 5, LONG = 60 };
    static const int chunks[] = {1, 8, 30};   // the ways of attention
    const Model *m = open_model(text_of("golden/archs/%s.gguf", name));
    const Layer *w = m->layers;
    size_t row = quant_row_bytes(m->embd.type, m->embd.cols);
    while (!w->n_kv) w++;
    const void *value = w->k_b.data ? w->latent_norm.w : (const void *)w->v.data;
    const Model *token = damaged(name, m, m->embd.data + BAD * row, row, "token.gguf");
    const Model *values = damaged(name, m, value, 4, "values.gguf");
    for (int k = 0; k < 3; k++) {
        Options o = {.window = 8, .chunk = chunks[k], .threads = 1};
        Session *s = open(token, o), *fresh = open(token, o);
        int32_t good[LONG], bad[LONG];
        size_t bytes = m->config.n_vocab * sizeof(float);
        Error e = {""};
        for (int i = 0; i < LONG; i++) bad[i] = good[i] = 6 + i;
        bad[3] = BAD;
        CHECK(!session_eval(s, bad, 8, &e) && strstr(e.text, "NaN"), "%s: '%s'", name, e.text);
        for (int n = 1; n <= 9; n++) {
            bool forgets = n == 9;
            if (forgets && s->n_recurrent) continue;   // a state sees all of the text
            if (forgets) session_truncate(s, 0);
            if (forgets) session_truncate(fresh, 0);   // the same chunks: as many tokens an expert
            const float *got = session_eval(s, forgets ? bad : good, forgets ? LONG : n, &e);
            const float *want = session_eval(fresh, good, forgets ? LONG : n, &e);
            CHECK(got && want && !memcmp(got, want, bytes), "%s -b %d: %d", name, o.chunk, n);
        }
        session_close(s);
        session_close(fresh);
        s = open(values, o);
        CHECK(!session_eval(s, good, 8, &e), "%s -b %d: damaged values", name, o.chunk);
        session_close(s);
    }
}

static const char *const DAMAGED[] = {"llama", "gpt-oss", "deepseek2-old", "falcon-h1", "qwen35"};
static void test_session_damage(void) {
    for (size_t i = 0; i < COUNT(DAMAGED); i++) check_damage(DAMAGED[i], open_session);
    // what bounds a number leaves a NaN alone, and so does a router's choice
    float x[] = {NAN, -9, 9}, up[] = {1, NAN, 9};
    clamp(x, 3, 2);
    activate_limited(&(Config){.act = ACT_RELU2}, x, up, 3, 2);
    CHECK(isnan(up[0]) && isnan(up[1]) && up[2] == 4, "%g %g %g", up[0], up[1], up[2]);
    for (int act = 0; act < ACT_COUNT; act++) {
        if (act == ACT_XIELU) continue;   // has a function of its own
        activate(up, &(float){NAN}, &(float){1}, 1, act);
        activate(up + 1, &(float){1}, &(float){NAN}, 1, act);
        CHECK(isnan(up[0]) && isnan(up[1]), "activation %d: %g %g", act, up[0], up[1]);
    }
    Model m = *golden_model("llama-moe").m;
    float bias[] = {0, 0, 0, NAN, 0, 0, 0, 0};
    for (int l = 0; l < m.config.n_layer; l++) m.layers[l].router_bias = bias;
    Session *s = open_session(&m, (Options){.threads = 1});
    CHECK(!session_eval(s, (int32_t[]){1, 2}, 2, &(Error){""}), "a router's NaN is not seen");
    for (float cap = 1; cap < 2e9f; cap *= 10) {   // a soft cap is tanhf, however large
        double worst = 0;
        for (float v = -40; v < 40; v += 0.37f) {
            float y = v, want = cap * tanhf(v / cap);
            soft_cap(&y, 1, cap);
            worst = fmax(worst, fabs(y / want - 1));
        }
        CHECK(worst < 1e-6, "cap %g: %.1e", cap, worst);
    }
}

// ==== sampler ====

static Candidate *five(Candidate c[5]) {   // probabilities .249 .012 .056 .678 .005
    static const float logits[] = {2, -1, 0.5f, 3, -2};
    for (int i = 0; i < 5; i++) c[i] = (Candidate){logits[i], i};
    return c;
}

static void test_sampler_stages(void) {
    static int32_t last[] = {3, 1, 3, 4, 3, 99, -7};
    Candidate c[5];
    static const float before[] = {2, -1, 0.5f, 3, NAN}, after[] = {2, -2, 0.5f, 1.5f, -INFINITY};
    Draw d = {before, 5, &(Best){3}, {0}, {0}, 1};
    int kept = sample_candidates(c, &d, 0);
    sample_penalty(c, 5, before, (Tokens){last, 7, 7}, 2);   // 3 / 2 once, -1 * 2; 99 is no id
    for (int i = 0; i < 5; i++)
        CHECK(kept == 5 && c[i].id == i && c[i].logit == after[i], "penalty: %g", c[i].logit);
    sample_temperature(five(c), 5, 0.5f);
    CHECK(c[0].logit == 4 && c[4].logit == -4, "temperature");
    CHECK(sample_top_k(five(c), 5, 3) == 3 && c[1].id == 0 && c[2].id == 2, "top-k: ids 3 0 2");
    CHECK(sample_top_k(five(c), 5, 5) == 5 && c[0].id == 3 && c[4].id == 4, "top-k of all: sorted");
    CHECK(sample_top_k(five(c), 5, 0) == 5 && sample_top_k(c, 5, 9) == 5, "top-k off");
    CHECK(sample_top_p(five(c), 5, 0.67f) == 1 && c[0].id == 3, "top-p .67");
    CHECK(sample_top_p(five(c), 5, 0.69f) == 2 && c[1].id == 0, "top-p .69");
    CHECK(sample_top_p(five(c), 5, 0.98f) == 3 && c[2].id == 2, "top-p .98");
    CHECK(sample_top_p(five(c), 5, 0) == 1 && c->id == 3 && sample_top_p(c, 5, 1) == 5, "its ends");
    CHECK(sample_min_p(five(c), 5, 0.05f) == 3 && c[1].id == 2 && c[2].id == 3, "min-p: ids 0 2 3");
    CHECK(sample_min_p(five(c), 5, 0) == 5 && sample_min_p(c, 5, 1) == 1, "min-p at its ends");
    CHECK(sample_min_p(five(c), 4, 0.5f) == 1 && c[0].id == 3, "min-p: the last is the best");
    Candidate many[300];   // the top in order, and each still there once
    int sum = 0, wrong = 0;
    for (int i = 0; i < 300; i++) many[i] = (Candidate){noise(), i};
    sample_top_k(many, 300, 20);
    for (int i = 0; i < 300; i++) {
        sum += many[i].id;
        wrong += i > 0 && many[i].logit > many[i < 20 ? i - 1 : 19].logit;
    }
    CHECK(sum == 300 * 299 / 2 && !wrong, "top-k of many: %d, %d", sum, wrong);
    for (int i = 0; i < 300; i++) many[i].logit = 0;
    CHECK(sample_top_p(many, 300, 0.9f) == 270, "top-p of many");
}

// candidates: those that are left out are not among the k best, however many are equal, or fall
static void test_sampler_candidates(void) {
    enum { N = 40 * BEST_IDS - 7, LAST = 30, NEVER = 3 };
    static Candidate all[N], some[N];
    static float l[N + 1];
    static Best best[40];
    int most = 0;
    for (int run = 0; run < 40; run++) {
        int n = run % 4 ? N - run : 256 + 60 * run, steps = 1 << (run + 5) % 12;
        int32_t last[LAST], never[NEVER];
        if (run % 4 == 1) n = 64 * (run + 3) - 1;
        for (int i = 0; i < n; i++) {
            l[i] = run % 5 ? roundf(steps * noise()) : i % 3 ? -INFINITY : NAN;
            if (run % 10 == 0 && i / 500 % 3 == 0) l[i] = noise();
            all[i] = (Candidate){isnan(l[i]) ? -INFINITY : l[i], i};
        }
        l[n] = INFINITY;   // no id has it
        if (run % 3 == 0) l[n - 1] = all[n - 1].logit = 1e6f;
        find_best(best, l, n);
        qsort(all, n, sizeof *all, best_first);
        for (int i = 0; i < LAST; i++)
            last[i] = run % 2 ? all[i * (run % 4)].id : 7 * i % (n + 9) - 2;
        for (int i = 0; i < NEVER; i++) never[i] = i ? all[5 * i].id : n;
        for (int fall = 0; fall < 2; fall++) {
            Draw d = {l, n, best, {last, fall * LAST, 0}, {never, fall * NEVER, 0}, 2};
            for (int i = 0; i < n; i++) all[i] = (Candidate){isnan(l[i]) ? -INFINITY : l[i], i};
            sample_penalty(all, n, l, d.recent, 2);
            sample_penalty(all, n, l, d.banned, INFINITY);
            qsort(all, n, sizeof *all, best_first);
            for (int k = 0; k < N; k = 2 * k + 1) {
                for (int i = 0; i < N; i++) some[i] = (Candidate){INFINITY, -1};   // scratch
                int kept = sample_candidates(some, &d, k), front = k && k < kept ? k : kept;
                int least = k && k < n ? k : n;
                sample_penalty(some, kept, l, d.recent, 2);
                sample_penalty(some, kept, l, d.banned, INFINITY);
                sort_top(some, kept, front);
                CHECK(kept >= least && !memcmp(some, all, least * sizeof *all),
                      "%d of %d: %d are candidates", k, n, kept);
                if (k == 15 && run == 6) most = kept;
            }
        }
    }
    CHECK(most < 100, "%d of %d are candidates for 15", most, N);
    for (int i = 0; i < N; i++) l[i] = noise();
    find_best(best, l, N);
    int32_t each[40];   // the best of its BEST_IDS falls
    for (int i = 0; i < 40; i++)
        for (int k = each[i] = i * BEST_IDS; k < (i + 1) * BEST_IDS && k < N; k++)
            if (l[k] > l[each[i]]) each[i] = k;
    most = sample_candidates(some, &(Draw){l, N, best, {each, 40, 0}, {0}, 1.1f}, 15);
    CHECK(most < N / 4, "%d of %d are candidates when all of the best fall", most, N);
}

static int32_t draw(Sampling o, const float *x, int n, uint64_t *rng) {
    static int32_t last[] = {1, 2};
    Candidate c[8];
    Best best;
    find_best(&best, x, n);
    return sample(&o, c, &(Draw){x, n, &best, {last, 2, 2}, {0}, o.repeat_penalty}, rng);
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
    cold.temp = 1e-38f;
    CHECK(draw(cold, x, 7, &a) == 1, "and one that overflows logits");
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
    const Model *m = random_model(&(Shape){"llama", 1, "", ""});
    int32_t ids[6][9] = {{1, 2, 3}};
    bool first_differs = false;
    for (int run = 0; run < 6; run++) {   // three seeds, twice
        Options o = {.sampling = {.temp = 3, .top_p = 1, .repeat_penalty = 1, .seed = run / 2 + 1}};
        Session *s = open_session(m, o);
        memcpy(ids[run], ids[0], 3 * sizeof **ids);
        for (int n = 3; n < 9; n++)
            ids[run][n] = session_sample(s, MUST(session_eval, s, ids[run], n));
        CHECK(!memcmp(ids[run], ids[run & ~1], sizeof *ids), "seed %d: two texts", run / 2 + 1);
        first_differs |= ids[run][3] != ids[0][3];
    }
    CHECK(first_differs, "three seeds, one first token");
    float logits[VOCAB] = {[7] = 4, [6] = 3, [5] = 2, [1] = 1};
    for (int last_n = -1; last_n < 3; last_n++) {   // the penalty sees all of 5 6 7, none, 7, 6 7
        Options o = {.sampling = {.repeat_penalty = 1e6f, .repeat_last_n = last_n}};
        Session *s = open_session(m, o);
        MUST(session_eval, s, (int32_t[]){5, 6, 7}, 3);
        int32_t id = session_sample(s, logits), want = last_n < 0 ? 1 : 7 - last_n;
        CHECK(id == want, "repeat_last_n %d: id %d, want %d", last_n, id, want);
    }
    for (int strings = 0; strings < 2; strings++) {   // ids that are never said; strings are none
        static const int32_t never[] = {0, -1, VOCAB, 7};
        const char *key = "tokenizer.ggml.suppress_tokens", *path = scratch("never.gguf");
        Writer w = {.spoil = {NULL, strings ? KEY : GOOD, key, GGUF_ARR, 0, "a,b"}};
        key_array(&w, key, GGUF_I32, 4, never, sizeof never);
        write_model(&w, &(Shape){"llama", 1, "", ""}, path);
        Options o = {.sampling = {.temp = 8, .top_p = 1, .repeat_penalty = 1}};
        Session *s = open_session(open_model(path), o);
        Candidate all[VOCAB + 1] = {[VOCAB] = {5, 5}};   // one behind the last
        int said[VOCAB] = {0};
        s->candidates = all;
        for (int i = 0; i < 1000; i++) said[session_sample(s, logits)]++;
        bool both = said[0] && said[7], one = said[0] || said[7];
        CHECK(strings ? both : !one, "ids 0 and 7 are said %d and %d times", said[0], said[7]);
        CHECK(all[VOCAB].logit == 5, "the logit of no id becomes %g", all[VOCAB].logit);
    }
}

// ---- tokenizer ----

// golden/GGUF.gguf and golden/tok/TSV.tsv; the last two change text
static const struct { const char *gguf, *tsv; } TOK_GOLDENS[] = {
    {"tok/spm", "spm"}, {"story", "bpe"}, {"tok/afmoe", "afmoe"}, {"tok/spark2_5", "spark2_5"},
    {"archs/bert", "wpm"}, {"tok/unigram", "unigram"}};

// of a file with these keys and what w has
static const Tokenizer *vocabulary(Writer *w, const char *model, const char *pre,
                                   const char *tokens, const char *merges, const char *keys) {
    key_vocab(w, model, pre, tokens, merges);
    put_keys(w, "tokenizer.ggml", keys);
    write_gguf(w, scratch("vocab.gguf"));
    return open_tokenizer(scratch("vocab.gguf"));
}

// want: the ids of text [n], as decimal numbers; NULL: any
static void tokens_are(const Tokenizer *t, const char *s, size_t n, const void *mark, int how,
                       const char *want) {
    Tokens ids = {0};
    MUST(tokenize, t, s, n, mark, how, &ids);
    char *got = need(12 * ids.n), *end = got;
    for (size_t i = 0; i < ids.n; i++) end += sprintf(end, "%s%d", i ? " " : "", ids.id[i]);
    free(ids.id);
    if (want) CHECK(!strcmp(got, want), "%.*s: %s, not %s", (int)n, s, got, want);
}

// Every line of the recordings; then the ids turned into text again, a token at a time.
static void test_tokenizer_goldens(void) {
    for (size_t k = 0; k < COUNT(TOK_GOLDENS); k++) {
        const Tokenizer *t = open_tokenizer(text_of("golden/%s.gguf", TOK_GOLDENS[k].gguf));
        size_t size;
        int lines = 0;
        const char *all = read_all(text_of("golden/tok/%s.tsv", TOK_GOLDENS[k].tsv), &size);
        char *text = need(size), *back = need(size), *piece = need(t->detokenize_max);
        EACH_WORD(line, all, "\n") {
            char *ids = line + strcspn(line, "\t"), *end;
            Detokenizer d = {0};
            size_t n = 0, n_back = 0;
            *ids++ = 0;
            for (unsigned byte; sscanf(line + 2 * n, "%2x", &byte) == 1;) text[n++] = byte;
            tokens_are(t, text, n, NULL, TOKENS_ADD, ids);
            for (long id; id = strtol(ids, &end, 10), end > ids; ids = end) {
                size_t len = detokenize(t, &d, id, piece);
                CHECK(!len || ((piece[0] & 0xC0) != 0x80 && n_back + len < size), "whole");
                memcpy(back + n_back, piece, len);
                n_back += len;
            }
            lines++;
            if (k < 4) CHECK(n == n_back && !memcmp(text, back, n), "line %d back", lines);
        }
        CHECK(lines == 35, "%s: %d lines", TOK_GOLDENS[k].tsv, lines);
    }
}

// Words, by hand from the regular expressions of each family; | stands between them.
static void test_tokenizer_rules(void) {
    static const struct { const char *pre, *words, *arch; } rules[] = {
        {"gpt-2", "It|'s| I|'|LL| 1234|  | x|\n\n| ,;|\t"}, {"minicpm5", "It|'S|123|4| ab|!\n\n|x"},
        {"qwen35", "a\u0301b| \u0301c|1|2"}, {"falcon", "a|`+|b|123|45| |678|."}, {"phi-2", "a| b"},
        {"default", "a|+|b|123|456|78|."}, {"deepseek-llm", "ab| \u00C9\u00E9| !?|\n|漢字|12|  "},
        {"qwen2", "don|'T| |1|2|  |\ty|!?\n\n|.x| \u00E9"}, {NULL, "HTTPs|World|B|1|2", "mistral3"},
        {"starcoder", "a|1|2| |3| b|'s|'s|\n"}, {"jais-2", "a|        |    |  | b|\t\n"},
        {"viking", "a|1|2| b|.|x"}, {"afmoe", "12|345|a|㐀ﾊเເកကᄀꀀ가一|กb|!|⼀"},
        {"gpt-4o", "Hello's|World|ABC'LL| |123|4|;/|ա|Աբ| हिन्दी𝐚|𝐀ℂa"},
        {"tekken", "Hello|World|HTTPs| \u00C0Bд|Пр|1|2|;/\n/\n"}, {"laguna", "a| |\n|c|1|2"},
        {"youtu", "가ㄱ|漢か|，。|ㄅ|ab|Ab|1|2"}, {"default", "ABC'LL| |123|4|;/", "gptoss"},
        {"whitespace", "ab漢,|  \n|c"}, {"granite-embed-multi-97m", "Hello|World| a\u0301b|123|4"},
        {"deepseek-coder", "ab| |漢| !?|1|2|\r|\n"}, {"bailingmoe", "It|'S|1|2| ab|!\n\n|x| \n\n"},
        {"deepseek-v3", "123|4|漢字かな|.x| !\n|ab\u0301|(=|~|'"}, {"gemma4", "a  b c|\n\n|d"},
        {"tiny_aya", "a|1|234|567| | |²|3|456|"
                     ".|199|0|s| |7|x| |१००|०|_|127| |१|०००"},
        {"superbpe", "a b|1|234|567|x|89|123|.|²345"}, {"default", "It|'s| |123|4|!\n", "lfm2moe"},
        {"kimi-k2", "漢字\U0002B820\U0002CEB0々|か|.x|Xกั้น|漢|"
                    "12|A's| |123|4| !\n\n|\u0378\u0378"},
        {"exaone-moe", "ab a\u0301 cd| | x|1|2|!\n|\n"}, {"default", "ABC'LL| |123|4|;/", "llama4"},
        {"exaone4", "x| y"}, {"smaug-bpe", "112|3"}, {"qwen2", "don|'T| |1|2", "llama4"},
        {"llama-bpe", "It|'s| I|'LL| |123|4|  | x|\n\n| ,;|\t"}, {"", "It|'s| |123|4|!\n", "deci"},
    };
    char *llama3 = memset(need(128100), ',', 128009);   // its token 128009 tells the rules
    strcpy(llama3 + 128009, "<|eot_id|>,a,b");
    for (size_t k = 0; k < COUNT(rules); k++) {
        Char ch[256] = {{0}};
        char got[512] = "", *to = got;
        Writer w = {0};
        const char *arch = rules[k].arch, *pre = rules[k].pre, *tokens = "a,b,c,d,e,f,g,h,i,j,k,l";
        key_text(&w, "general.architecture", arch ? arch : "qwen2");
        if (k + 1 == COUNT(rules)) tokens = llama3;
        const Tokenizer *t = vocabulary(&w, "gpt2", pre, tokens, "a b", "");
        CHECK(!*t->note == (arch || strcmp(pre, "default")), "%s: '%s'", arch, t->note);
        size_t n = 0, used;
        for (const char *s = rules[k].words; *s; s += used) {
            uint32_t c = utf8_decode(s, strlen(s), &used);
            if (c != '|') ch[n++] = (Char){unicode_classes(c), c, false};
        }
        ch[0].cut = ch[n].cut = true;
        for (const char *const *rule = t->pre->rule; *rule; rule++)
            for (size_t i = 0, end; i < n; i = end) {
                for (end = i + 1; !ch[end].cut;) end++;
                piece_split(*rule, ch + i, ch + end);
            }
        for (size_t i = 0; i < n; i++) {
            if (i && ch[i].cut) *to++ = '|';
            to += utf8_encode(ch[i].c, to);
        }
        CHECK(!strcmp(got, rules[k].words), "%s: %s, not %s", pre, got, rules[k].words);
    }
}

static void test_unicode_tables(void) {
    // FNV-1a over the values of all characters, INT32_MIN where a table has none. Another program
    // has the sums from UnicodeData.txt 15.1, by the rules in llm.c's appendix.
    static const struct { const char *name, *const *line; size_t n; uint32_t sum; } tables[] = {
        {"classes", UNICODE_CLASSES, COUNT(UNICODE_CLASSES), 0xd589e06a},
        {"lower", UNICODE_LOWER, COUNT(UNICODE_LOWER), 0x98f57bbe},
        {"base", UNICODE_BASE, COUNT(UNICODE_BASE), 0x22a399d2}};
    for (int t = 0; t < 3; t++) {
        uint32_t sum = 2166136261u;
        for (uint32_t c = 0; c <= 0x10FFFF; c++)
            sum = fnv_1a(sum, range_value(tables[t].line, tables[t].n, c, INT32_MIN), 4);
        CHECK(sum == tables[t].sum, "%s: %08x, want %08x", tables[t].name, sum, tables[t].sum);
    }
}

static void test_tokenizer_special(void) {
    // User-defined tokens are always cut out, the longest first, control tokens on request. What a
    // user wrote (mark 1) gives user-defined tokens, but no control tokens and no parts of turns.
    static const struct { const char *text, *mark, *ids; int flags; } cases[] = {
        {"abbbbb", NULL, "3 0 5 4", TOKENS_ADD}, {"ab<s>", NULL, "2 3", TOKENS_SPECIAL},
        {"a<u>b", NULL, "0 8 1", TOKENS_SPECIAL}, {"<PRE>a<|start|>", NULL, "0 12"},
        {"c<s><v>", NULL, "10"},   // bytes without tokens: nothing
        {"", NULL, "3", TOKENS_ADD},
        {"bb<s><s>abbb<u>", "\0\0\0\0\0\1\1\1\1\1\1\1\1\1\1", "4 3 0 5", TOKENS_SPECIAL},
        {"<s>bb<|start|>", "\0\0\0\1\1\1\1\1\1\1\1\1\1\1", "3 4 0", TOKENS_SPECIAL},
        {"<s><s>", "\0\0\1\0\0\0", "3", TOKENS_SPECIAL}};
    Writer w = {0}, phi = {0};
    put_tensor(&w, "token_embd.weight", (int[3]){8, 13}, 0, 1);   // has no <v>
    const Tokenizer *t = vocabulary(&w, "gpt2", "gpt-2",
        "a,b,ab,<s>,bb,bbb,<|im_end|>,</x>,<u>,<|eot_id|>,c,<PRE>,<|start|>,<v>", "a b",
        "token_type=1,1,1,3,4,4,1,3,2,1,1,4,3,4 eos_token_id=7 bos_token_id=3 add_bos_token=1 "
        "eos_token_ids=7,10");
    CHECK(!*t->note, "%s", t->note);
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *text = cases[i].text;
        tokens_are(t, text, strlen(text), cases[i].mark, cases[i].flags, cases[i].ids);
    }
    for (int32_t id = -2; id < 13; id++)
        CHECK(token_is_eog(t, id) == (id == 6 || id == 7 || id == 9 || id == 10), "eog %d", id);
    CHECK(token_find(t, "bbb") == 5 && token_find(t, "x") == -1, "find");
    // empty and repeated tokens are no error
    t = vocabulary(&(Writer){0}, "gpt2", NULL, "a,b,,a", "a b", "");
    CHECK(*t->note && token_find(t, "a") == 0, "no pre");
    // behind Phi-3's special tokens, but for three, white space is dropped
    key_text(&phi, "general.name", "A PHI-3 of ours");
    key_array(&phi, "tokenizer.ggml.token_type", GGUF_U32, 6, (uint32_t[]){1, 1, 3, 3, 1, 1}, 24);
    t = vocabulary(&phi, "gpt2", "gpt-2", "a,b,<s>,<u>,Ċ,Ġ", "a b", "eos_token_ids=1,6,0");
    CHECK(strstr(t->note, "has 6, but there are 6 tokens") && token_is_eog(t, 0), "'%s'", t->note);
    tokens_are(t, "a\n<u> \n\tb<s>\nb", 15, NULL, TOKENS_SPECIAL, "0 4 3 1 2 4 1");
    for (int merges = 0; merges < 2; merges++) {   // Ollama calls Gemma 4's `llama`
        t = vocabulary(&(Writer){0}, "llama", "gemma4", "a,b,ab,<s>", merges ? "a b" : NULL,
                       "bos_token_id=3 scores=0,0,0,0");
        CHECK(t->kind == (merges ? TOKENIZER_BPE : TOKENIZER_SPM), "Gemma 4's other name, or not");
    }
    // white space is no word; without scores the leftmost joins
    t = vocabulary(&(Writer){0}, "whitespace", "whitespace",
                   "a,b,ab, ,é,é漢,<s>", "a b,é 漢", "");
    tokens_are(t, " ab  B é漢\na\n", 14, NULL, TOKENS_ADD, "2 5 0");
    t = vocabulary(&(Writer){0}, "llama", NULL, "<u>,a,b,ab,▁,▁a", NULL, "");
    tokens_are(t, "ab", 2, NULL, 0, "5 2");
    // the ids of special tokens lie outside the vocabulary: a note, and defaults
    t = vocabulary(&(Writer){0}, "gpt2", "gpt-2", "a,b", "a b", "bos_token_id=2 eos_token_id=9");
    CHECK(strstr(t->note, "bos_token_id is 2, but there are 2 tokens"), "'%s'", t->note);
    CHECK(t->bos == -1 && t->eos == -1, "%d %d", t->bos, t->eos);
    for (int32_t id = -1; id < 3; id += 3)   // no such tokens: no text, no type
        CHECK(!token_at(t, id).text.n && !token_is(t, id, ~(1 << TOKEN_UNUSED)), "outside");
}

// bytes of a character arrive one by one; what cannot become one is U+FFFD
static void test_tokenizer_streaming(void) {
    static const struct { int32_t id; const char *text; } steps[] = {
        {7, ""}, {0, "x"}, {0, " x"}, {1, ""}, {2, ""}, {3, ""}, {4, "😀"}, {5, "a"}, {1, ""},
        {5, "\uFFFDa"}, {4, "\uFFFD"}, {6, ""}, {0, " x"}, {1, ""}, {8, "\uFFFD\u00E9"}};
    char out[128];
    Detokenizer d = {0};
    const Tokenizer *t = vocabulary(&(Writer){0}, "llama", NULL,
        "\u2581x,<0xF0>,<0x9F>,<0x98>,<0x80>,a,<s>,<u>,\u00E9", NULL,
        "token_type=1,6,6,6,6,1,3,2,1 scores=0,0,0,0,0,0,0,0,0");
    REQUIRE(t->detokenize_max <= sizeof out, "%zu bytes a token", t->detokenize_max);
    for (size_t i = 0; i < COUNT(steps); i++) {
        size_t n = detokenize(t, &d, steps[i].id, out);
        CHECK(n == strlen(steps[i].text) && !memcmp(out, steps[i].text, n), "step %zu", i);
    }
    d = (Detokenizer){.started = true};
    CHECK(detokenize(t, &d, 0, out) == 2, "a continuation keeps its space");
    tokens_are(t, "x😀\xFF", 6, NULL, TOKENS_ADD, "1 0 1 2 3 4 0");
    tokens_are(t, "\xC1\xA1", 2, NULL, 0, "0 0 0 0 0");   // overlong
}

// By hand. Our table replaces A by "a ", AA and 2 by nothing, B by "[T]"; nodes end before that of
// D, and strings before that of 0. Others, of n bytes, are broken.
static void test_tokenizer_unigram(void) {
    static const struct { uint32_t size, node[324]; char s[12]; } ours = {1296, {0x600,
        [257] = 0x941, [259] = 0x80000006, [304] = 0x530, 0x8000000B, 0x532, 0x8000000A,
        [320] = 0x80000004, 0x541, 0x542, 0x80000007}, "D\21\0\0a \0[T]"};
#define CHARSMAP "tokenizer.ggml.precompiled_charsmap"
    static const struct { const char *text, *want, *keys; size_t n; Spoil spoil; } cases[] = {
        {" a  b", "7 3 3 5 1"}, {"xx\xC1\xA1zz", "2 8 1"}, {"aba", "4 11 1"}, {"\0\0", "s:", "", 3},
        {"aDa0a2b", "4 2 4 2 6 1"}, {"\4\0\0\0abc", "2 1", "", 8},   // a trie, and no strings
        {"AAAAAb", "4 3 5 1"}, {"<s>xxa[T]b", "0 2 4 9 5 1"}, {"B\xFF", "9 10 1"},
        {"  a", "3 3 7 1", "add_space_prefix=1"}, {"", "0 1", "add_bos_token=1 bos_token_id=0"},
        {"a  Ab [T] b ", "7 7 3 5 9 3 5 1", "remove_extra_whitespaces=1"},
        {"\0\0\0\0\0\0\0", "s (INT32)", "", 8, {NULL, KEY, CHARSMAP, GGUF_I32, 7}},
        {"\0\0\0\0\0\0\0", "s, not text (base64)", "", 8,
         {NULL, KEY, CHARSMAP, GGUF_ARR, 0, "Q,U,J,D"}},
        {"\3\0\0\0abc", "s:", "", 8}, {"\10\0\0\0abc", "s:", "", 8}, {"\0\0\0\0abc", "s:", "", 7}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *text = cases[i].text, *want = cases[i].want, *path = scratch("t5.gguf");
        size_t n = cases[i].n ? cases[i].n : 1311;
        Writer w = {.spoil = cases[i].spoil};
        key_vocab(&w, "t5", NULL, "<s>,</s>,<unk>,▁,a,b,ab,▁a,zz,[T],\uFFFD,ba,xx", NULL);
        put_keys(&w, "tokenizer.ggml", text_of("scores=0,0,0,-4,-3,-3,-5,-6,-20,-50,-6,-5,-10000 "
                 "token_type=3,3,2,1,1,1,1,1,5,4,1,1,5 %s", cases[i].keys ? cases[i].keys : ""));
        key_array(&w, CHARSMAP, GGUF_I8, n, n > 9 ? (char *)&ours : text, n);
        write_gguf(&w, path);
        if (*want == 's') refused(path, want);
        else tokens_are(open_tokenizer(path), text, strlen(text), NULL, ~0, want);
    }
    for (int i = 0; i < 4; i++) {
        static const float scores[] = {INFINITY, 0, -INFINITY, 0, NAN, 0, 0, 0};
        Writer w = {0};
        key_vocab(&w, "t5", NULL, i < 3 ? "a,b" : memset(need(8194), 'a', 8193), NULL);
        key_array(&w, "tokenizer.ggml.scores", GGUF_F32, 2, scores + 2 * i, 8);
        write_gguf(&w, scratch("t5.gguf"));
        refused(scratch("t5.gguf"), i < 3 ? "token 0 has a score of" : "a string of 8193 bytes");
    }
}

// a megabyte without a break takes seconds at most; quadratic joining would take hours
static void test_tokenizer_linear(void) {
    static const char *const patterns[] = {"a", " ", "ab", "\xD0\xB1", "\xFF", " \n"};
    const size_t n = test.quick ? 1 << 13 : 1 << 20;
    char *text = need(n);
    for (size_t k = 0; k < COUNT(TOK_GOLDENS); k++) {
        const Tokenizer *t = open_tokenizer(text_of("golden/%s.gguf", TOK_GOLDENS[k].gguf));
        for (size_t p = 0; p < COUNT(patterns); p++) {
            for (size_t i = 0; i < n; i++) text[i] = patterns[p][i % strlen(patterns[p])];
            double start = now();
            tokens_are(t, text, n, NULL, TOKENS_ADD, NULL);
            double took = now() - start;
            CHECK(took < 10, "%s: pattern %zu takes %.1f s", TOK_GOLDENS[k].gguf, p, took);
        }
    }
    Char *ch = need((n + 1) * sizeof *ch);   // white space in powers of two, of a long run
    double start = now();
    for (size_t i = 0; i < n; i++) ch[i] = (Char){CLASS('s') | CLASS(' '), ' ', i == 0};
    piece_split("s*r+|s=9!|s", ch, ch + n);   // as in Jais 2's rule
    CHECK(ch[512].cut && now() - start < 1, "jais-2: %.1f s", now() - start);
}

// ==== chat templates ====

static const ChatMessage TALK[] = {{{"system", 6}, {"Be brief.", 9}}, {{"user", 4},
    {" Hi <b>\n", 8}}, {{"assistant", 9}, {"<x>Yo", 5}}, {{"user", 4}, {"End.", 4}}};

// golden/templates.tsv has a template a line, a tab, and what it must print for this conversation,
// in which control characters stand as their pictures (U+2400 on).
static void control_characters(char *s) {   // puts them where their pictures stand
    char *to = s;
    for (; *s; s++) {
        bool picture = s[0] == '\xE2' && s[1] == '\x90';
        if (picture) s += 2;
        *to++ = picture ? *s & 0x1F : *s;
    }
    *to = 0;
}

static void each_template(const char *all, void (*fn)(const char *text, const char *want)) {
    int n = 0;
    EACH_WORD(line, all, "\n") {
        char *want = strchr(line, '\t');
        *want++ = 0;
        control_characters(line);
        control_characters(want);
        fn(line, want);
        n++;
    }
    CHECK(n == 112, "%d templates", n);
}

// «» enclose what is marked, which others than the model wrote. "!" begins a part of an error.
static void check_template(const char *text, const char *want) {
    Rendered r;
    Error e = {""};
    if (test.quick && strstr(text, "1000000")) return;   // slow
    bool ok = template_render(str(text), TALK, 4, str("<s>"), str("</s>"), -1, &r, &e);
    char *got = need(5 * r.n + 8), *end = got;
    for (size_t k = 0; k <= r.n; k++) {
        bool before = k && r.mark[k - 1], now = k < r.n && r.mark[k];
        if (before != now) end = stpcpy(end, now ? "«" : "»");
        if (k < r.n) *end++ = r.text[k];
    }
    bool right = *want == '!' ? !ok && strstr(e.text, want + 1) : ok && !strcmp(got, want);
    CHECK(right, "%s: %s%s", text, got, e.text);
    rendered_free(&r);
}

static void *render_all(void *all) {
    static const char *const deep[][2] = {{"{{", " not"}, {"{{", "("}, {"{{", "["}, {"{{", " -"},
        {"", "{% if 1 %}"}, {"{% if 0 %}", "{% elif 0 %}"}, {"{{", "0 if 1 else "}};
    for (size_t i = 0; i < COUNT(deep); i++) {
        char *text = need(40000), *end = stpcpy(text, deep[i][0]);
        Error e = {""};
        for (int k = 0; k < 3000; k++) end = stpcpy(end, deep[i][1]);
        template_render(str(text), TALK, 4, NOTHING, NOTHING, -1, &(Rendered){0}, &e);
        CHECK(strstr(e.text, "nested too deeply"), "3000 times %s: %s", deep[i][1], e.text);
    }
    each_template(all, check_template);
    return NULL;
}

static void test_chat_templates(void) {   // with as little stack as llm.c says that a call takes
    pthread_t thread;
    pthread_attr_t small;
    char *all = read_all("golden/templates.tsv", NULL);
    setenv("SOURCE_DATE_EPOCH", "1795305600", 1);
    setenv("LOCPATH", test.dir, 1);   // the program around writes 1,5, if localedef knows how
    if (!system("localedef -c -i de_DE -f UTF-8 $D/de_DE.UTF-8 >$D/out 2>&1"))
        CHECK(setlocale(LC_ALL, "de_DE.UTF-8"), "no locale");
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 512 << 10);
    REQUIRE(!pthread_create(&thread, &small, render_all, all), "no thread");
    pthread_join(thread, NULL);
    pthread_attr_destroy(&small);
    setlocale(LC_ALL, "C");
    unsetenv("SOURCE_DATE_EPOCH");
}

static bool take_any(void *ctx, int32_t id) { return id >= 0; }

// Each allocation from a file to its first words fails once: a line says so, and nothing is left.
static void check_allocations(const Shape *shape, const char *vocabulary) {
    Writer w = {.spoil = {NULL, TYPE, "output_norm.weight", QUANT_F16, 1}};   // it is copied
    put_model(&w, shape);
    key_vocab(&w, vocabulary, NULL, "a,b,ab", "a b");
    put_keys(&w, "tokenizer.ggml", "scores=-3,-3,-5");   // unigram's
    const char *path = scratch("way.gguf");
    write_gguf(&w, path);
    ChatMessage hi = {{"user", 4}, {"Hi", 2}};
    Str template = {"{{ messages[0].content * 30000 }}", 33};
    bool reached = true;
    for (size_t k = 1; reached; k++) {
        Model m = {0};
        Session s = {0};
        Tokens ids = {0};
        Rendered r = {0};
        Error e = {""};
        Options o = {.threads = 3, .window = 8, .chunk = 2, .cpu = true};
        long before = living;
        allocations = 0;
        failing = k;
        bool ok = model_open(&m, path, &e) && session_open(&s, &m, o, &e) &&
                  tokenize(m.tokenizer, "abba", 4, NULL, TOKENS_SPECIAL, &ids, &e) &&
                  session_generate(&s, ids.id, ids.n, 20, (OnToken){.fn = take_any}, &e) &&
                  template_render(template, &hi, 1, (Str){"", 0}, (Str){"", 0}, -1, &r, &e);
        session_close(&s);
        model_close(&m);
        rendered_free(&r);
        freed(ids.id);
        failing = 0;
        reached = allocations >= k;
        bool said = strstr(e.text, "memory") || strstr(e.text, "start 3 threads");
        CHECK(ok != reached && said == reached, "allocation %zu: '%s'", k, e.text);
        CHECK(living == before, "allocation %zu: %ld are left behind", k, living - before);
        if (!reached) printf("  %zu allocations failed, one at a time\n", k - 1);
    }
}

static void test_allocations(void) {
    check_allocations(&(Shape){"qwen3next", 2, "dDakxsS", DELTA_KEYS EXPERT_KEYS}, "gpt2");
    check_allocations(&(Shape){"kimi-linear", 3, "Axsr", EXPERT_KEYS KDA_KEYS}, "t5");
    // short texts take little, and what does not fit into a size_t is counted, but never taken
    Arena a = {0};
    arena_take(&a, 1ull << 33, 3);
    CHECK(a.peak == 3ull << 33 && !resize(NULL, SIZE_MAX / 8 + 2, 8), "a size wraps");
    Rendered r = {0};
    Cli reads = {0}, lists = {.failure = 2};
    failing = allocations + 1;
    bool ok = parse_options(&lists, 4, (char *[]){"llm", "m", "--tokens", "1,2", NULL});
    CHECK(!ok && lists.failure == 1 && strstr(lists.e.text, "memory"), "%s", lists.e.text);
    failing = largest = 0;
    CHECK(read_file(&reads, "golden/archs/bert.tokens", &reads.said), "%s", reads.e.text);
    Str template = str("{{ messages[0].content }}");
    MUST(template_render, template, TALK, 1, NOTHING, NOTHING, -1, &r);
    CHECK(reads.said.n && largest < 40 << 20, "%zu bytes for a short text", largest);
    rendered_free(&r);
    freed(reads.said.s);
}

// ==== the command line ====

static struct { int status; const char *out, *err; } cli;

// Runs a command: llm is what is tested, $S the storyteller, $G golden/archs, $C scratch in $D.
static void shell(const char *command) {
    const char *within = "llm() { $LLM \"$@\"; }; (%s) </dev/null >$D/out 2>$D/err";
    int status = system(text_of(within, command));
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) raise(SIGINT);   // Ctrl-C ends us, too
    cli.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    cli.out = read_all(scratch("out"), NULL);
    cli.err = read_all(scratch("err"), NULL);
}

static bool matches(const char *text, const char *pattern) {
    regex_t r;
    bool ok = !regcomp(&r, pattern, REG_EXTENDED | REG_NOSUB) && !regexec(&r, text, 0, NULL, 0);
    regfree(&r);
    return ok;
}

// its exit status, and patterns of what it prints and of what it says on stderr
static void check_llm(const char *command, int status, const char *out, const char *err) {
    shell(command);
    bool right = cli.status == status && matches(cli.out, out) && matches(cli.err, err);
    CHECK(right, "%s: exit %d, '%s', '%s'", command, cli.status, cli.out, cli.err);
}

// one line on stderr that names what is wrong, and nothing on stdout
static void check_refusal(int status, const char *arguments, const char *says) {
    check_llm(text_of("llm %s", arguments), status, "^$", text_of("^[^\n]*%s[^\n]*\n$", says));
}

static void test_cli_refusals(void) {
    // the message must name both words
    static const char *const options[] = {
        "-q", "--temperature", "-n", "-n abc", "-n 99999999999", "-n -2", "-c 0", "-b 0", "-t 0",
        "--temp nan", "--temp ''", "--top-k -1", "--top-p 1.5", "--min-p -0.1",
        "--repeat-penalty 0", "--repeat-last-n -2", "--seed 1x", "--seed 18446744073709551616",
        "--keep -1"};
    static const struct { int status; const char *words, *says; } bad[] = {
        {2, "", "MODEL"}, {2, "$S", "PROMPT.*-f -"}, {2, "$S one two", "two"},
        {2, "$S one -p two", "prompts"}, {2, "$S -f x --tokens 1", "prompts"},
        {2, "$S -f x -f y", "two prompts: -f"}, {2, "$S -p x -p y", "two prompts: -p"},
        {2, "$S hi -ngl 99", "-ngl: use --gpu N, .* GPU"}, {2, "$S hi --temp=1", "use --temp T,"},
        {2, "$S hi --model x", "use -m MODEL"}, {2, "$S '- item'", "put -- before a PROMPT"},
        {2, "$S hi -c 0", "'0': .*the model's"}, {2, "$S hi --seed -1", "'-1': .*clock"},
        {2, "$S --tokens 1,", "'1,'"}, {2, "$S --tokens 1,,2", "'1,,2'"},
        {1, "$S -f $D/text --logits $D/text", "not overwritten"},
        {1, "$D/model hi --logits $D/model", "not overwritten"},
        {1, "$S --logits $D/text -f - <$D/text", "not overwritten"},
        {2, "$S one --ppl x", "prompts"}, {1, "$S hi --keep 2147483647", "2147483647 pinned"},
        {2, "$S --bench x", "--bench.*PROMPT"}, {2, "$S --bench 512x128", "--bench takes P,N"},
        {2, "$S hi --info", "--info.*PROMPT"}, {2, "$S --info --bench 1,1", "two modes.*--info"},
        {2, "$S --chat a --embed", "two modes"}, {2, "$S a --embed --tokenize", "two modes"},
        {2, "$S a -v", "-v.*--info"}, {2, "$S one two three", "prompts"}, {1, "$S -i", "template"},
        {2, "$S a --template x", "--template"}, {1, "$S --chat a --template nowhere", "nowhere"},
        {2, "$S one -f x --tokens 1", "prompts"}, {2, "$S --tokens ''", "--tokens"},
        {2, "$S --tokens 9999999999", "to 2147483647"}, {2, "$S --tokens 1,x", "x"},
        {2, "$S -i --tokens 1", "-i"}, {2, "$S --bench 16", "--bench.*two whole numbers"},
        {2, "$S hi --gpu fast", "fast"}, {2, "$S --bench 16,0", "16,0"},
        {1, "nowhere.gguf hi", "nowhere.gguf"}, {1, "golden hi", "not a regular file"},
        {1, "/dev/null hi", "not a regular file"}, {1, "golden/story.txt hi", "not a GGUF file"},
        {1, "$S -f nowhere.txt", "nowhere.txt"}, {1, "$S -f golden", "golden"},
        {1, "$S \"$(printf 'ab\\377')\"", "byte 2"}, {1, "$S --tokens 1,2048", "2048"},
        {1, "$S \"$(printf '\\355\\240\\200')\"", "byte 0"}, {1, "$G/llama.gguf hi", "tokenizer"},
        {1, "$S --ppl nowhere.txt", "nowhere.txt"}, {1, "$S hi --logits nowhere/x", "nowhere/x"},
        {1, "$S --ppl golden/tok/bpe.tsv -c 4096", "4096"}, {1, "$G/bert.gguf hi", "--embed"},
        {1, "golden/tok/spm.gguf hi", "no tensors"},
        {1, "$D/rules hi", "'ours' is unknown.*--tokens"},
    };
    Writer w = {.spoil = {NULL, KEY, "tokenizer.ggml.pre", GGUF_STR, 0, "ours"}};
    write_tiny(&w, scratch("rules"));
    shell("cp $S $D/model; echo hi >$D/text");
    for (size_t i = 0; i < COUNT(bad); i++) check_refusal(bad[i].status, bad[i].words, bad[i].says);
    for (size_t i = 0; i < COUNT(options); i++) {
        int name = strcspn(options[i], " ");
        const char *value = options[i] + name + (options[i][name] == ' ');
        const char *says = text_of("%.*s[^\n]*%s", name, options[i], value);
        check_refusal(2, text_of("$S hi %s", options[i]), says);
    }
    check_llm("cmp $S $D/model && cat $D/text", 0, "^hi\n$", "^$");
    check_llm("llm $D/rules --tokens '0, 2 ' -n 1", 0, "",
              "^note: .*'ours'[^\n]*\nprefill [^\n]*\n$");
    check_llm("llm golden/tok/spm.gguf --info", 0,
              "^([a-z0-9_.]+ = [^\n]*\n)+\nno tensors[^\n]*\n$", "^$");
    check_llm("llm $S hi -n 1 --keep 1024 --gpu block --cpu", 0, "^hi[^\n]*\n$",
              "^note: --gpu block[^\n]*CPU\nnote: --keep 1024[^\n]*\nprefill 2 tokens [0-9.]* "
              "tok/s, decode 1 tokens in 0 passes, peak [^\n]*\n$");
    // the model is cut while it is mapped: once a pipe has taken more than it holds, llm reads it
    check_llm("cp $S $D/cut; (yes | head -n 99999; : >$D/cut) | llm $D/cut -f - -n 1", 1, "^$",
              "^llm: [^\n]*truncated\\?\n$");
}

#define TENTHS "[0-9]+\\.[0-9]"
static void test_cli_output(void) {   // to the letter
    static const struct { const char *command, *pattern; } good[] = {
        {"llm --version", "^llm [0-9.]+\n$"}, {"llm x.gguf --help", "^usage: llm MODEL"},
        {"llm $S --tokenize 'Once upon a time' && llm --tokenize -p 'Once upon a time' -m $S && "
         "for end in '' '\\n' '\\r\\n'; do printf \"Once upon a time$end\" | "   // a line's end
         "llm $S -f - --tokenize || exit; done", "^(1656 329 659 258 530\n){5}$"},
        {"printf 'Once upon a time\n\n' | llm $S -f - --tokenize", "^1656 329 659 258 530 198\n$"},
        {"printf '\357\273\277Once upon a time' | llm $S -f - --tokenize",   // a BOM
         "^1656 329 659 258 530\n$"},
        {"printf 'upon a time\n' | llm $S Once -f - -n 0", "^Once\nupon a time\n$"},
        {"llm $S --tokenize ''", "^\n$"}, {"llm golden/tok/spm.gguf --tokenize ''", "^1\n$"},
        {"llm golden/tok/spm.gguf --tokenize --special '<s>a'", "^1 [0-9]{2,}\n$"},
        {"llm $S --tokenize -- --help", "^[0-9 ]+\n$"},
        {"llm $S --tokenize -p --help", "^[0-9 ]+\n$"},
        {"printf 'a\\000b' | llm $S -f - --tokenize", "^64 188 65\n$"},
        {"llm $S 'Once upon' -n 0", "^Once upon\n$"},
        {"llm $S 'Once upon' -n 3 -n 0", "^Once upon\n$"},
        {"llm $G/llama.gguf --tokens 1,2,3 -n 5 --temp 0", "^[0-9]+( [0-9]+){4}\n$"},
        {"llm $S --bench 16,8", "^prefill 16 tokens " TENTHS " tok/s\ndecode 8 tokens " TENTHS
         " tok/s " TENTHS " GB/s " TENTHS " % of " TENTHS " GB/s\n$"},
        {"llm $S --info", "^([a-z0-9_.]+ = [^\n]*\n){10}\nformat .*q4_K.*\narchitecture qwen3.*2048"
         ".*KV cache .* MB.*scratch .* MB\n"},
        {"llm $S --info -v", "\ntokenizer.ggml.tokens = .2048. ! \" # \\$ ...\n"},
        {"llm $S Once -n 1 --gpu chain --seed 1", "^Once.*\n$"},
        {"llm $G/bert.gguf --embed hello", "^-?[0-9.e-]+( -?[0-9.e-]+){63}\n$"},
        {"llm $S --embed hello", "^-?[0-9.e-]+( -?[0-9.e-]+){255}\n$"},
        {"cd $D && : >llm && p=\"$PWD/it's ours\" && for goal in install uninstall; do "
         "make -sf \"$OLDPWD/Makefile\" -o llm PREFIX=\"$p\" $goal && ls \"$p/bin\"; done",
         "^llm\n$"},
        {"! for c in 'cc -std=c11 -x c' 'c++ -std=c++17 -x c++'; do for o in -DQUANT_PLAIN "
         "-DQUANT_WORDS -mf16c\\ -mavx2 -march=native; do $(echo $c $o) -fsyntax-only -Wpedantic "
         "-Wconversion -Wsign-conversion quant.h 2>&1; done; done | grep quant.h:.*warning", "^$"},
        {"llm --help", "^usage: llm MODEL([^\n]*\n){1,45}$"},   // no more than a screen
        {"llm --help -v", "^usage: llm MODEL.*\nfamilies"},
    };
    for (size_t i = 0; i < COUNT(good); i++) check_llm(good[i].command, 0, good[i].pattern, "");
    for (size_t i = 0; i < COUNT(ARCHS); i++)
        EACH_WORD(s, ARCHS[i].names, " ")
            CHECK(strstr(cli.out, text_of(" %s", s)), "--help -v does not list %s", s);
}

static void test_cli_completion(void) {
    static const char *const same[] = {
        "llm $S 'Once upon a time' -n 20 --seed 7",
        "llm -n 20 --seed 7 -p 'Once upon a time' -m $S -t 1",
        "llm $S --tokens 1656,329,659,258,530 -n 20 --seed 7",
        "llm $S 'Once upon a time' -n 20 --seed 7 --no-display-prompt"};
    const char *first = NULL;
    for (int i = 0; i < 4; i++) {
        check_llm(same[i], 0, i < 2 ? "^Once upon a time.*\n$" : "\n$",
                  "prefill .*tok/s.*decode .*tok/s.*GB/s.*peak .*MB.*seed 7, cpu\n$");
        if (!first) first = cli.out;
        CHECK(!strcmp(cli.out, first + (i < 2 ? 0 : 16)), "'%s', not '%s'", cli.out, first);
    }
    shell("llm $S 'Once upon a time' -n 20");   // the seed comes from the clock
    CHECK(strcmp(cli.out, first), "no --seed, and the same text");
    check_llm("llm $S Once -n 2 -c 2000", 0, "", "^note: -c 2000 .* 1024\nprefill .*\n$");
    check_llm("llm $S 'Once upon a time' -n 2 -c 3 2>&1", 0,   // said before it is read
              "^note: .* 2 tokens .*-c 5[^\n]*\nOnce upon a time.*\nprefill", "");
    check_llm("printf 'a\\000b' | llm $S -f - -n 0 | tr '\\000' 0", 0, "^a0b\n$", "");
    check_llm("llm $S Once -n 5 >/dev/full", 1, "^$", "standard output");
    check_llm("llm --help >/dev/full", 1, "^$", "standard output");
}

static void write_ids(Writer *w, const char *name, const char *keys) {   // a model that prints ids
    test.seed = 1;
    write_model(w, &(Shape){"llama", 2, "", keys}, scratch(name));
}

// What a file asks for stands behind the user's options; what the engine does not use is said.
static void test_cli_wishes(void) {
#define MADE "temp=3. top_k=9 top_p=0.9 min_p=0.02 penalty_repeat=1.5 penalty_last_n=7"
    static const struct { const char *sampling, *options, *same; } wishes[] = {
        {"top_p=1.5", "", "--top-p 1"},   // as far as the option goes
        {MADE, "--temp 0 --repeat-penalty 1", "--temp 0"},
        {MADE, "", "--temp 3 --top-k 9 --top-p 0.9 --min-p 0.02 --repeat-penalty 1.5 "
         "--repeat-last-n 7"}};
    const char *command = "llm $D/%s --tokens 1,2,3 -n 30 --seed 5 %s", *got = NULL;
    Writer plain = {0}, ranks = {0}, odd = {.spoil = {NULL, NEW_TENSOR, "mtp.fc.weight", 8}};
    write_ids(&plain, "plain.gguf", "");
    for (size_t i = 0; i < COUNT(wishes); i++) {
        Writer made = {0};
        put_keys(&made, "general.sampling", wishes[i].sampling);
        write_ids(&made, "made.gguf", "attention.sliding_window_pattern=1,0");
        check_llm(text_of(command, "made.gguf", wishes[i].options), 0, "^[0-9]+( [0-9]+){29}\n$",
                  "^prefill");
        got = cli.out;
        shell(text_of(command, "plain.gguf", wishes[i].same));
        CHECK(!strcmp(got, cli.out), "%s: '%s', want '%s'", wishes[i].sampling, got, cli.out);
    }
    shell(text_of(command, "plain.gguf", ""));
    CHECK(strcmp(got, cli.out), "the file's sampling is ignored");
    check_llm("llm $D/made.gguf --info", 0, "general.sampling.temp = 3\n", "^$");
    put_keys(&odd, "general.sampling", "xtc_threshold=0.5 penalty_repeat=0.");
    write_ids(&odd, "odd.gguf", "rope.scaling.odd=1 rope.scaling.yarn_ext_factor=1. other=1 "
              "rope.scaling.yarn_beta_fast=32. rope.scaling.yarn_beta_slow=32. "
              "attention.sliding_window_pattern=1,0,1");
    check_llm("llm $D/odd.gguf --tokens 1 -n 1", 0, "",
              "^note: key general.sampling.penalty_repeat is not used\n"
              "note: key general.sampling.xtc_threshold is not used\n"
              "note: key llama.attention.sliding_window_pattern has 3 values for 2 layers\n"
              "note: key llama.rope.scaling.odd is not used\n"
              "note: key llama.rope.scaling.yarn_beta_slow is not used\n"
              "note: a nextn \\(MTP\\) block, [^\n]*: tensor mtp.fc.weight: unknown\nprefill");
    check_llm("llm $G/nemotron_h_moe.gguf --info", 0,
              "\nnextn \\(MTP\\) blocks: 1, of 0.1 MB, guess ids below 128\n.*KV cache 0.5 MB", "");
    check_llm("llm $G/nemotron_h_moe.gguf --info -n 0", 0, "KV cache 0.3 MB", "");   // not opened
    check_llm("llm $G/cohere2moe-base-*1-*2.gguf --tokens 1 -n 1", 0, "",
              "^note: key cohere2moe.rope.freq_base_swa is not used\nprefill");
    write_ids(&ranks, "ranks.gguf", "attention.odd=1 pooling_type=4 expert_shared_count=0");
    check_llm("llm $D/ranks.gguf --tokens 1 -n 1", 0, "^[0-9]+\n$",
              "^note: key llama.attention.odd is not used\nprefill");
    check_refusal(1, "$D/ranks.gguf --tokens 1 --embed", "pooling_type 4");
    random_model(&(Shape){"nomic-bert", 1, "nfEN", "context_length=3"});
    check_llm("llm $D/random.gguf --tokens 1,2,3,4 --embed", 0, "", "^note: .* 4 .*context of 3\n");
}

// Does --embed print the n numbers of `want`, brought to a length of 1?
static void check_embedding(const char *arguments, const float *want, int n, double limit) {
    double length = sqrt(squares(want, n));
    shell(text_of("llm --embed %s", arguments));
    for (char *end = (char *)cli.out; n > 0; n--, want++) {
        double got = strtod(end, &end);
        CHECK(fabs(got - *want / length) < limit, "--embed: %g, not %g", got, *want / length);
    }
}

// perplexity as llama-perplexity has it; a mean of an encoder's rows as llama.cpp's, signs and all
static void test_cli_numbers(void) {
    static const struct { int n; double want; } known[] = {{128, 6.5600}, {256, 6.1828}};
    for (int k = 0; k < (test.quick ? 1 : 2); k++) {
        check_llm(text_of("llm $S --ppl golden/story.txt -c %d", known[k].n), 0,
                  "^ppl 6\\.[0-9]{4} \\+- 0\\.[0-9]{4} tokens [0-9]+ windows [0-9]+\n$", "");
        double ppl = atof(cli.out + 4), want = known[k].want;
        CHECK(fabs(ppl / want - 1) < 0.005, "-c %d: %.4f, want %.4f", known[k].n, ppl, want);
        printf("  -c %d: perplexity %.4f, llama.cpp %.4f, limit 0.5 %%\n", known[k].n, ppl, want);
    }
    const Model *story = open_model("golden/story.gguf");   // one of its ids gets a damaged logit
    size_t row_bytes = quant_row_bytes(story->output.type, story->output.cols);
    const uint8_t *last = story->output.data + (story->output.rows - 1) * row_bytes;
    damaged("../story", story, last, row_bytes, "nan.gguf");
    check_llm("llm $D/nan.gguf --ppl golden/story.txt -c 64", 1, "^$", "^llm: at token .* a NaN:");
    const float *want = golden_model("bert").want;
    check_embedding("$G/bert.gguf --tokens $(cat $G/bert.tokens)", want, 64, 1e-3);
    Shape shape = {"gemma-embedding", 1, "tkTI", WINDOW_KEYS "pooling_type=3"};
    const Model *m = random_model(&shape);
    float row[3 * WIDTH], y[40], z[24], w[40];
    Session *s = open_session(m, (Options){.threads = 1});
    Rows rows = {NULL, row, WIDTH};
    session_run(s, (Request){(int32_t[]){5, 6, 7}, 3, 0, true, keep_row, &rows}, &(Error){""});
    plain_matmul(&(Matmul){&m->dense[0], row + 2 * WIDTH, y, 1}, w);
    plain_matmul(&(Matmul){&m->dense[1], y, z, 1}, w);
    check_embedding("$D/random.gguf --tokens 5,6,7", z, 24, 1e-6);
    Cli pooled = {.m = *m, .ids = {(int32_t[]){5}, 1}, .work = need(4 * WIDTH * sizeof(double))};
    pooled.m.out_norm.w = noise_array(WIDTH, INFINITY);
    CHECK(session_open(&pooled.s, &pooled.m, (Options){.cpu = true}, &pooled.e) &&
          !run_embedding(&pooled) && strstr(pooled.e.text, "length is"), "%s", pooled.e.text);
    session_close(&pooled.s);
    Score beyond = {(int32_t[]){0, VOCAB}, VOCAB};   // an id that has no logit
    CHECK(score_row(&beyond, 0, noise_array(VOCAB + 1, 1)) && isinf(beyond.nll), "%g", beyond.nll);
}

// A model that repeats itself: after a word of `chain` comes the next one, whatever stood before.
// Embedding and output are one-hot, and the layer between adds nothing. Tokens are the ASCII
// characters and some words; the last row is `nobody`. <think> and </think> are of type `thoughts`.
static void write_scripted(const char *to, const char *template, const char *chain, int thoughts) {
    enum { D = 128, CONTROL = 96, DEFINED = 104, WORDS = 108 };   // where these tokens begin
    static const char *const parts[] = {"attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v",
                                        "attn_output", "ffn_gate", "ffn_up", "ffn_down"};
    char all[1024] = "\u0120,\u010A", *name[D];
    int32_t n = 0, from = -1, next;
    int64_t types[D];
    float *embd = need(D * D * sizeof *embd), *output = need(D * D * sizeof *output);
    Writer w = {0};
    for (char c = '!'; c <= '~'; c++) sprintf(all + strlen(all), ",%c", c == ',' ? ' ' : c);
    strcat(all, ",<s>,<|im_start|>,<|im_end|>,<|user|>,<|assistant|>,<|message|>,<|channel|>,"
           "<|return|>,<think>,</think>,<|end|>,<|start|>,hm,yes,analysis,"
           "<|start|>assistant<|channel|>final<|message|>,\u011B,\u00C2,\u013D");   // ESC, CSI
    key_text(&w, "general.architecture", "llama");
    put_keys(&w, "llama", "block_count=1 context_length=4096 embedding_length=128 "
             "feed_forward_length=128 attention.head_count=4 "
             "attention.layer_norm_rms_epsilon=.00001");
    key_vocab(&w, "gpt2", "gpt-2", all, "y z");
    EACH_WORD(s, all, ",") {
        types[n] = n < CONTROL || n >= WORDS ? 1 : 3;
        if (n >= DEFINED && n < WORDS) types[n] = 4;
        if (strstr(s, "think>")) types[n] = thoughts;
        embd[n * D + n] = 1;
        name[n++] = s;
    }
    for (int i = n; i < D; i++) name[i] = i == D - 1 ? "nobody" : "";
    embd[D * D - 1] = 1;
    EACH_WORD(word, chain, " ") {
        for (next = 0; strcmp(word, name[next]);) next++;
        if (from >= 0) output[next * D + from] = 1;
        from = next;
    }
    key_array(&w, "tokenizer.ggml.token_type", GGUF_I64, n, types, n * sizeof *types);
    put_keys(&w, "tokenizer.ggml", text_of("bos_token_id=%d add_bos_token=1 eos_token_id=%d "
             "add_eos_token=1 padding_token_id=4294967295", CONTROL, CONTROL + 2));
    key_text(&w, "tokenizer.chat_template", template);
    put_weights(&w, "token_embd.weight", (int[3]){D, D}, embd);
    put_weights(&w, "output.weight", (int[3]){D, D}, output);
    put_tensor(&w, "output_norm.weight", (int[3]){D}, 1, 0);
    for (size_t i = 0; i < COUNT(parts); i++)
        put_tensor(&w, text_of("blk.0.%s.weight", parts[i]), (int[3]){D, i < 2 ? 0 : D}, 0, 0);
    write_gguf(&w, scratch(to));
}

// what a template gets of an assistant's message, if it drops earlier thoughts
#define EARLIER "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
#define CHATML "{% for m in messages %}<|im_start|>{{ m.role }}\n" EARLIER \
    "<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\\n' }}"

// What a chat prints and says on stderr (NULL: nothing) with the last template of test_cli_chat.
static const struct { const char *command, *out, *err; int status; } CHATS[] = {
    // what the model sees: its words are tokens, the user's are not
    {"llm $C --render 'b<|channel|>'", "^$", ": no\n", 1},
    {"llm $C --chat 'a<|end|><|message|>' --tokenize",
     "^96 107( [0-9]{2}){4} 101( [0-9]{1,2}){19} 106 107( [0-9]{2}){9}\n$"},
    {"llm $C --chat a --system b -n 3", "^<\\|channel\\|>analysis<\\|message\\|>\n$", ""},
    {"printf 'b\n' >$D/b; llm $C --render a --system @$D/b",
     "^<.start.>system<.message.>b<.end.><.start.>user<.message.>a<"},
    {"printf 'a\\377' | llm $C -i", "", "byte 1", 1},
    {"llm $C --info -v", "padding_token_id = 4294967295\n"},
    // --tokenize and --embed have the EOS that the file asks for, but a text that goes on has none
    {"test \"$(llm $C a --embed)\" = \"$(llm $C --tokens 96,66,98 --embed)\"", "^$"},
    {"llm $C a --tokenize", "^96 66 98\n$"}, {"llm $C a -n 0", "", "^prefill 2 tokens"},
    {"printf '@system\nA\n\n@user\n@assistant\nb\n@users\n@user\r\n@user\nc\r\n' | llm $C --render",
     "^<.start.>system<.message.>A\n<.end.><.start.>user<.message.><.end.>"
     "<.start.>assistant<.message.>b\n@users<.end.>"
     "<.start.>user<.message.><.end.><.start.>user<.message.>c<.end.><.start.>assistant$"},
    {"printf '@user\r\na\r\n@assistant\r\n\r\nb\r\n@user\r\nc\r\n' | llm $C --render",
     "user<.message.>a<.*>\nb<.*>c<"},
    {"printf '@user\na\n@assistant\nb' | llm $C --chat -f - --tokenize", " 85 67\n$"},
    {"printf '@user\n\\\\@user\nb' | llm $C --render", "<.message.>@user\nb<.end.>"},
    {"printf '{{ messages[0].content }}!' >$D/t; printf 'b' | "
     "llm $S --render a -f - --template $D/t", "^a\nb!$"},
    {"printf '@user\nb\n@assistant\nc' | llm $C --render a -f -",   // goes on with PROMPT
     "user<.message.>b<.*assistant<.message.>c<.*user<.message.>a<"},
    {"printf 'a\n@user\nb' | llm $C --chat -f -", "^$", "two prompts:.*@user\n$", 2},
    {"llm $C --chat a --render && llm $C -i a --render", "a<.*a<"},
    // what cannot be saved is an error, and what was saved before stays, also behind a link
    {"mkdir -m 777 $D/w; printf '\357\273\277a\n/save '$D/w'\nb' | llm $C -i -c 8 -n 1", "",
     "^note: [^\n]*--keep[^\n]*\nllm: [^\n]*/w: Is a directory\n$", 1},
    {"cp $C $D/m; printf 'a\n/save '$D/m | llm $D/m -i -n 0; cmp $C $D/m", "",
     "not overwritten\n$"},
    // a pipe stays one, a long name is no trouble, and another name keeps what was there
    {"mkfifo $D/w/p; cat $D/w/p & printf 'a\n/save '$D/w/p | llm $C -i -n 0; wait; test -p $D/w/p",
     "^\n@user\na\n@assistant\n\n$", "^prefill"},
    {"for i in 9 230; do n=$D/w/$(printf %${i}s | tr ' ' n); : >$n; ln $n $D/w/h$i; "
     "printf $i'\n/save '$n | llm $C -i -n 0 2>&1 >$D/o; done; cat $D/w/[hn]*; ls $D/w | cut -c-2",
     "^(pre[^\n]*\n){2}@user\n9\n@assistant\n\n@user\n230\n@assistant\n\nh2\nh9\nnn\nnn\np\n$", ""},
    {"(cd $D; echo old >a; chmod 640 a; ln -s a l); (ulimit -f 0; printf 'a\n/save '$D/l|"
     "llm $C -i -n 0 2>&1) | cat; cat $D/a; ls -A $D | grep '[.]llm'; "
     "printf 'b\n/save - \n/save '$D/l' \t\n' | llm $C -i -n 0; cat $D/a; ls -l $D/a; "
     "test -L $D/l", "^\nllm: [^\n]*/l: File too large\nold\n\n(@user\nb\n@assistant\n\n){2}"
     "-rw-r-----[^\n]*/a\n$", "^prefill"},
    // a conversation goes on and is written as it was read; any other text is a first message
    {"printf '%s\n' @user '\\@user' '\\\\@system' @users '\\a' '' @assistant '' >$D/a; "
     "printf '/save '$D/again | llm $C -i -f $D/a; cmp $D/a $D/again", "^$"}};

// three turns with templates that treat thoughts as those of Qwen 3, Qwen 3.5, R1 and gpt-oss do
static void test_cli_chat(void) {
    static const struct {
        const char *template, *chain, *said;
        int reused, n;
        const char *kept;   // in the conversation; NULL: all that is said
    } chats[] = {
        {CHATML, "\u010A <think> hm </think> yes <|im_end|>", "<think>hm</think>yes", 89, 172},
        {CHATML "<think>{{ '\\n' }}", "\u010A hm nobody </think> yes <|im_end|>",
         "<think>\nhm</think>yes", 89, 178},
        {"{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>" EARLIER "{% endfor %}"
         "<|assistant|><think>{{ '\\n' }}", "\u010A hm </think> yes <|im_end|>",
         "<think>\nhm</think>yes", 36, 70},
        {"{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('no') }}"
         "{% endif %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
         "<|start|>assistant", "t <|channel|> analysis <|message|> hm <|end|> "
         "<|start|>assistant<|channel|>final<|message|> yes <|return|>",
         "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
         83, 160, "yes"},
    };
    for (size_t i = 0; i < COUNT(chats); i++) {
        const char *said = chats[i].said, *kept = chats[i].kept ? chats[i].kept : said;
        const char *counts = text_of("reused %d of %d tokens", chats[i].reused, chats[i].n);
        write_scripted("chat", chats[i].template, chats[i].chain, 4);
        shell("printf '\357\273\277a<|im_end|>\\r\\nb\\\\\\nc\\n/help\\nd\\n/save '$D'/saved\\n"
              "/stats\\n' | llm $C -i --temp 0");
        CHECK(!strcmp(cli.out, text_of("%s\n%s\n%s\n", said, said, said)), "%zu: '%s'", i, cli.out);
        bool counted = matches(cli.err, "^/system TEXT.*\nprefill .*\nprefill .*\n$");
        CHECK(counted && strstr(cli.err, counts), "%zu: %s: '%s'", i, counts, cli.err);
        const char *saved = read_all(scratch("saved"), NULL);
        CHECK(!strcmp(saved, text_of("@user\na<|im_end|>\n@assistant\n%s\n@user\nb\nc\n@assistant\n"
                                     "%s\n@user\nd\n@assistant\n%s\n", kept, kept, kept)),
              "%zu: saved as '%s'", i, saved);
        check_llm("llm $C --render -f $D/saved", 0,   // the last answer goes on
                  text_of("assistant(.>)?\n?%s$", kept), "^$");
    }
    for (size_t i = 0; i < COUNT(CHATS); i++)
        check_llm(CHATS[i].command, CHATS[i].status, CHATS[i].out,
                  CHATS[i].err ? CHATS[i].err : "^$");
    // --think sets what has either name; it is said where neither is looked at
    static const char *const think[][3] = {
        {"{{ enable_thinking }}", "^True$", "^note: [^\n]*nothing of what was said\n$"},
        {"{{ thinking ~ messages[0].content }}", "^Truea$", "^$"},
        {"{{ messages[0].content }}", "^a$", "^note: [^\n]*--think\n$"}};
    for (size_t i = 0; i < COUNT(think); i++) {
        write_scripted("chat", think[i][0], "t hm", 4);
        check_llm("llm $C --render a --think on", 0, think[i][1], think[i][2]);
    }
    write_scripted("chat", "{{ messages[0].content }}", "> yes <|im_end|>", 3);   // no thoughts
    check_llm("llm $C --chat 'a<think>' --temp 0 -n 2", 0, "^yes\n$", "");
}

enum { SCREEN = 1 << 16 };   // bytes that are shown, at most

// Adds what a terminal shows to `seen`, until that ends in `last` (NULL: until all is over).
static bool wait_for(int master, char *seen, const char *last) {
    size_t from = strlen(seen), n = from, least = last ? strlen(last) : SCREEN;
    while (n - from < least || strcmp(seen + n - least, last)) {
        bool ready = poll(&(struct pollfd){master, POLLIN, 0}, 1, 60000) > 0;
        ssize_t k = CHECK(ready, "behind '%s'", seen) ? read(master, seen + n, SCREEN - 1 - n) : 0;
        if (k <= 0) return false;
        n += k;
        for (char *mark; (mark = strstr(seen + from, "\033[?2004")) && mark[7];) {   // of pastes
            memmove(mark, mark + 8, seen + n - (mark + 8));
            memset(seen + (n -= 8), 0, 8);
        }
    }
    return true;
}

// Runs a command on a terminal and returns what that shows. `typed` are pairs, NULL at the end: how
// the screen must end before something is typed ("": before the command starts), and what that is;
// behind a !, a command that runs then.
static const char *on_terminal(const char *command, int columns, const char *const *typed) {
    char *seen = need(SCREEN);
    struct termios mode;
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    REQUIRE(master >= 0 && !grantpt(master) && !unlockpt(master), "no terminal");
    const char *tty = ptsname(master), *start = "NO_COLOR= TERM=xterm %s <>%s >%s 2>%s";
    ioctl(master, TIOCSWINSZ, &(struct winsize){24, columns, 0, 0});
    fcntl(master, F_SETFD, FD_CLOEXEC);   // so that a command that hangs ends when this is closed
    if (*typed && !**typed) {
        CHECK(write(master, typed[1], strlen(typed[1])) > 0, "nothing can be typed");
        wait_for(master, seen, "\n");   // the terminal's echo
        typed += 2;
    }
    FILE *child = popen(text_of(start, command, tty, tty, tty), "r");
    REQUIRE(child, "no shell");
    for (; *typed; typed += 2) {
        if (!CHECK(wait_for(master, seen, *typed), "%s: %s, not %s", command, seen, *typed)) break;
        if (*typed[1] == '!') CHECK(!system(typed[1] + 1), "%s fails", typed[1]);
        else CHECK(write(master, typed[1], strlen(typed[1])) > 0, "nothing can be typed");
    }
    wait_for(master, seen, NULL);
    tcgetattr(master, &mode);
    CHECK((mode.c_lflag & ICANON) && (mode.c_lflag & ECHO), "%s leaves another mode", command);
    close(master);
    pclose(child);
    return seen;
}

// A terminal shows a prompt, progress that fits and is wiped, thoughts that are dimmed.
static void test_cli_terminal(void) {
    char *cut = memset(need(5001), 'a', 5000);
    cut[4999] = '\n';
    const char *wrapped = "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq";
    const char *known = "sh -c 'sh -c \"echo \\$\\$ >$D/pid; exec $LLM $D/%s\"; echo $?'";
    const struct { const char *command; int columns; const char *typed[11], *pattern; } shown[] = {
        {text_of(known, "chat -i"), 80, {"> ", "half", "half", "!kill $(cat $D/pid)"},
         "> half\r\n130\r\n$"},
        {text_of(known, "silent --chat a -n -1 --temp 0"), 80, {"hm", "!kill $(cat $D/pid)"},
         "^\033\\[2mhm\033\\[0m.*143\r\n$"},
        {"$LLM $D/gpt --chat a --temp 0", 80, {NULL}, "^\033\\[2mhm\033\\[0myes\r\n"},
        {"sh -c 'stty -echo; $LLM $C -i --temp 0; stty echo'", 80,
         {"> ", "a\n", "\r\n> ", "/bye\n"}, "^> \033\\[2mhm"},
        {"$LLM $C -i", 20,
         {"> ", wrapped, wrapped + 18, "\25Z", "> Z", "\3", "\r\n> ", "\4"},
         "> q{18}\r\nq{20}\033\\[A\r\033\\[J> Z\r\033\\[J> Z\r\n> \r\n$"},
        {"TERM=dumb $LLM $C -i", 80, {"> ", "ab", "ab", "\177", "\r> a", "\3", "\r\n> ", "\4"},
         "> ab(\r {79}\r> a){2}\r\n> "},
        {"$LLM $C -i --temp 0", 80, {"> ", "a\n", "\r\n> ", "\4"},
         "^> a\r\n\033\\[2mhm</think>\033\\[0myes.*\n> .*reused 0 of"},
        {"$LLM $D/control --temp 0", 80, {"", "a\n", "\r\n> ", "\4"},   // no PROMPT: a chat
         "> \033\\[2mhm\033\\[0myes.*\n> .*reused 0 of"},
        {"$LLM $C -i", 80, {"", cut, "\r\n> ", "\4"}, "> llm: the terminal cut[^\n]*\n> \r\n$"},
        {"$LLM $C -i", 80, {"", "a\\\n", "> > ", "half", "half", "\3", "\r\n> ", "\4"},
         "> > half\r\033\\[J> half\r\n> \r\n$"},
        {"setsid -cw sh -mc '$LLM $C -i; stty -a; fg; stty -a; fg'", 80,
         {"> ", "half", "half", "\32", "\n> half", "\25\32", "\r\n> ", "\4"},
         " icanon.* echo .*> half.* icanon.* echo .*\n> \r\n$"},
        {"$LLM $C a -n 1", 80, {NULL}, "note: --chat answers"},
        {"$LLM $D/acts --chat a --temp 0", 80, {NULL}, "^hm  yes\r\nprefill"},
        {"TERM=dumb $LLM $C --chat aa -b 9 --temp 0", 80, {NULL},
         "^[^\033]*prefill 9[^\033]*hm</think>yes[^\033]*$"},
        {"NO_COLOR=1 $LLM $C --chat a --temp 0", 80, {NULL}, "^<think>\r\nhm</think>yes[^\033]*$"},
        {"$LLM $S", 80, {NULL}, "^llm: no PROMPT given[^\r]*template; see --help\r\n$"},
        {text_of(known, "endless -i -n -1 --temp 0"), 80,   // Ctrl-S, Ctrl-C, Ctrl-Q
         {"> ", "a\n", "hm", "\23", "", "!sleep .2; kill -INT $(cat $D/pid)", "", "\21",
          "\r\n> ", "\4"}, "^> a\r\n(hm)+\r\n> \r\nprefill[^\n]*\n0\r\n$"},
        {"sh -c 'trap \"\" HUP; sh -c \"echo \\$\\$ >$D/pid; exec $LLM $C -i\"; echo $?'", 80,
         {"> ", "!kill -HUP $(cat $D/pid)", "", "/bye\n"}, "> /bye\r\n0\r\n$"},
        {"sh -c '$LLM $D/control -i --temp 0 >$D/o 2>$D/e; cat $D/o'", 80,
         {"> ", "a\n", "a\r\n> ", "\4"}, "^> a\r\n> \r\n<think>hm</think>yes\r\n$"},
        {"setsid -wc sh -mc 'stty -echo; $LLM $D/control -i & until jobs >$D/o; "
         "grep -q topped $D/o; do sleep .05; done; stty echo; fg'", 80,
         {"> ", "ab", "ab", "\3", "\r\n> ", "\4"}, "> ab\r\n> \r\n"},
        {"$LLM $S 'Once upon a time' -b 2 -n 1 -t 1", 20, {NULL},
         "\r {19}\rprefill 2 of 5 toke\r {19}\rprefill 4 of 5 toke\r {19}\r"}};
    write_scripted("control", CHATML, "\u010A <think> hm </think> yes <|im_end|>", 3);
    check_llm("llm $D/control --chat a --temp 0", 0, "^<think>hm</think>yes\n$", "");
    const char *t = "{{ messages[0].content }}t";
    write_scripted("gpt", t, "t <|channel|> analysis <|message|> hm <|end|> yes <|return|>", 4);
    write_scripted("endless", CHATML, "\u010A hm hm", 4);
    write_scripted("acts", t, "t hm \u011B \u00C2 \u013D yes <|return|>", 4);
    // thinks without end or words
    write_scripted("silent", "{{ messages[0].content }}t<think>", "<think> hm <s> <s>", 4);
    write_scripted("chat", CHATML "<think>{{ '\\n' }}", "\u010A hm </think> yes <|im_end|>", 4);
    for (size_t i = 0; i < COUNT(shown); i++) {
        if (!strncmp(shown[i].command, "setsid", 6) && system("setsid -w true 2>$D/e")) continue;
        const char *seen = on_terminal(shown[i].command, shown[i].columns, shown[i].typed);
        CHECK(matches(seen, shown[i].pattern), "%s: '%s'", shown[i].command, seen);
    }
}

// What is typed, and what the message is (NULL: there is none yet). Last comes what fails.
static void test_cli_editing(void) {
    char *system = need(6000);
    static const char *const keys[][2] = {
        {"one two-x  three\33b\33[1;5D\33[D\33f!\1\6\33[3~\5\bX\2Y\r", "oe two-x!  threYX"},
        {"one two-x  three\27\33\177\1\33d\33[F\33OD\33OD\13\r", " tw"},
        {"to\33[A\33[A+\33[B\25new\20\20\16\16\16!\r", "to!"},
        {"\20\20\20\r", "oe two-x!  threYX+"},
        {"\33[200~\4ab\rc\25\33[201~d\33\re\33[H\33[HX\r", "ab\nXcd\ne"},
        {"\u00E9\ba\U0001F469\U0001F4BB\33[Db\14\r", "a\U0001F469b\U0001F4BB"},
        {"wrong\25ab\u00E9\177x\bc\4 dd\27\033[1;6A\033OPe\033\u00E9\n", "abc e"}, {"half\3", NULL},
        {"one\ntwo\r\nthree\033[[A\n", "one\ntwo\nthree"}, {"x\033[A\n", "one\ntwo\nthree"},
        {"/nothing x\\\n", NULL}, {"@user\n", "/nothing x\n\\@user"},
        {"Gr\374\n", NULL}, {"b\n", NULL}, {"/system s\n", NULL}};
    const char *typed[2 * COUNT(keys) + 8] = {NULL}, **next = typed, *want = "";
    memset(memcpy(system, "/system ", 8) + 8, 'x', 5000);   // a long line
    system[5008] = '\n';
    for (size_t i = 0; i < COUNT(keys); i++) {
        *next++ = i ? "\r\n> " : "> ";
        *next++ = keys[i][0];
        if (keys[i][1]) want = text_of("%s@user\n%s\n@assistant\nyes\n", want, keys[i][1]);
    }
    for (int i = 0; i < 3; i++) {
        const char *last[] = {system, text_of("/save %s\r", scratch("saved")), "\4"};
        *next++ = "\r\n> ";
        *next++ = last[i];
    }
    write_scripted("chat", "{% if messages[0].content == 's' or messages[-1].content == 'b' %}"
                   "{{ raise_exception('no') }}{% endif %}" CHATML, "\u010A yes <|im_end|>", 4);
    const char *seen = on_terminal("$LLM $C -i --temp 0", 80, typed);
    CHECK(matches(seen, "byte 2 is 0xfc[^\n]*\r\n> (.*: no;[^\n]*\r\n> ){2}"), "%s", seen);
    const char *saved = read_all(scratch("saved"), NULL);
    bool same = !strncmp(saved + 8, system + 8, 5001) && !strcmp(saved + 5009, want);
    CHECK(same, "'%s', not '%s': %s", saved, want, seen);
    // a mistyped command is answered; what only begins as one goes to the model, unless refused
    check_llm("echo be >$D/of; printf '/hlep\n/sytem x\n/sav\n /x\n/etc/x\n/no_think a\n"
              "/system @'$D'/of\n/save '$D/saved | llm $C -i --temp 0", 0, "^yes\nyes\nyes\n$",
              "^(/system TEXT[^&]*\n/help[^&]*stops an answer\n){3}prefill");
    check_llm("cat $D/saved", 0, "^@system\nbe\n@user\n /x\n(@[^/]*\n@user\n/[^\n]*\n){2}", "^$");
    // thoughts that -n cuts are closed
    write_scripted("chat", CHATML "<think>", "<think> hm hm", 4);
    check_llm("printf 'a\n/save '$D/saved | llm $C -i -n 3 --temp 0; cat $D/saved", 0,
              "@assistant\n<think>hmhmhm</think>\n$", "^prefill");
}

static void test_cli_logits(void) {
    static const int32_t ids[] = {1656, 329, 659, 258, 530};
    size_t n;
    const Model *m = open_model("golden/story.gguf");
    float *want = logits_of(m, ids, 5, (Options){.chunk = 3, .window = 4096});
    shell("llm $S 'Once upon a time' -b 3 --logits $D/rows && "
          "llm $S 'Once upon a time' -b 3 --logits - | cmp - $D/rows");
    float *got = read_all(scratch("rows"), &n);
    bool same = n == 5 * 2048 * sizeof *got && nmse(got, want, 5 * 2048) < 1e-9 && !cli.status;
    CHECK(same, "%zu bytes of logits, exit %d", n, cli.status);
    // no part is left behind, and a link stays
    check_llm("ln -s gone $D/link; echo a >$D/old; (ulimit -f 1; for i in part link old; do "
              "llm $S 'Once upon a time' --logits $D/$i; done); ls -A $D | grep '[.]llm'; "
              "! test -e $D/part && test -L $D/link && ! test -e $D/gone && cat $D/old", 0, "^a\n$",
              "^(llm: [^\n]*/(part|link|old): File too large\n){3}$");
}

static bool stop_at_4(void *ctx, int reused, int done, int n) {   // as a second Ctrl-C does
    interrupted = done == 4 ? LEAVE : 0;
    return on_chunk(ctx, reused, done, n);
}

static void see_signals(Task t) {   // two threads have a task each; the pool's sees its own faults
    atomic_int *seen = t.ctx;
    sigset_t set;
    for (atomic_fetch_add(seen, 1); atomic_load(seen) < 2;) sched_yield();
    pthread_sigmask(SIG_BLOCK, NULL, &set);
    if (t.thread && sigismember(&set, SIGTERM) && !sigismember(&set, SIGBUS)) seen[1] = 1;
}

// what depends on who runs llm: signals, a pipe, rights
static void test_cli_hosts(void) {
    int status = 0, ends[2];
    atomic_int seen[2] = {0};
    Pool *pool = pool_open(2);
    parallel(pool, see_signals, seen, 2);
    pool_close(pool);
    CHECK(seen[1], "the pool's threads take the host's signals");
    // a pipe that does not block, and is read late
    REQUIRE(!pipe(ends) && !fcntl(ends[1], F_SETFL, O_NONBLOCK), "no pipe");
    if (!fork()) {
        dup2(ends[1], STDOUT_FILENO);
        _exit(system("printf %200000s | tr ' ' a | $LLM $S --tokenize -f -") != 0);
    }
    close(ends[1]);
    size_t n = 0;
    char part[4096];
    usleep(300000);
    for (ssize_t k; (k = read(ends[0], part, sizeof part)) > 0;) n += k;
    close(ends[0]);
    wait(&status);
    CHECK(n > 100000 && !status, "%zu bytes, %d", n, status);
    // a file that may not be written is not replaced
    shell("chmod 711 $D; mkdir -m 777 $D/x");
    if (!fork()) {
        if (!getuid()) (void)!setuid(65534);
        close(open(scratch("x/a"), O_CREAT | O_WRONLY, 0444));
        _exit(chat_save(&(Cli){0}, scratch("x/a")));
    }
    wait(&status);
    CHECK(!status, "a file of mode 444 was replaced");
}

static void test_cli_machines(void) {   // what depends on where llm runs
    static const struct { const char *change; int cpus; } quotas[] = {   // of eight CPUs
        {"mkdir -p proc/self $C/a/b $C/cpu,cpuacct", 8}, {"echo 0::/a/b >proc/self/cgroup", 8},
        {"echo max 100000 >$C/a/b/cpu.max", 8}, {"echo 200001 100000 >$C/a/cpu.max", 3},
        {"echo 1 100000 >$C/cpu.max", 1}, {"echo 4:cpu,cpuacct:/gone >proc/self/cgroup", 8},
        {"cd $C/cpu,cpuacct; echo 99999 >cpu.cfs_period_us; echo 200000 >cpu.cfs_quota_us", 3},
        {"echo -1 >$C/cpu,cpuacct/cpu.cfs_quota_us", 8}};
    for (size_t i = 0; i < COUNT(quotas); i++) {
        shell(text_of("cd $D; C=sys/fs/cgroup; %s", quotas[i].change));
        int n = within_quota(test.dir, 8);
        CHECK(n == quotas[i].cpus, "%s: %d CPUs", quotas[i].change, n);
    }
    int status = 0;
    if (!fork()) {   // meets SIGHUP behind nohup, and an instruction that this CPU lacks
        dup2(open(scratch("err"), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDERR_FILENO);
        signal(SIGHUP, SIG_IGN);
        llm_main(1, (char *[]){"llm", NULL});
        raise(SIGHUP);   // what was ignored still is
        _exit(raise(SIGILL));
    }
    wait(&status);
    int died = 0;   // of SIGINT, if that is what ended it
    if (!fork()) _exit((interrupted = STOP, llm_main(1, (char *[]){"llm", NULL})));
    wait(&died);
    CHECK(WIFSIGNALED(died) && WTERMSIG(died) == SIGINT, "status %d", died);
    const char *says = read_all(scratch("err"), NULL);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1 &&
          matches(says, "^llm: no [^\n]*\nllm: this CPU lacks[^\n]*\n$"), "%d '%s'", status, says);
}

// Ctrl-C during a completion (greedy, without end), or in a chat that waits for the user (after 20
// times "hm" and a newline): statistics, exit 130. During an answer in a chat: the chat goes on.
static void test_cli_interrupt(void) {
    static const struct { const char *command, *typed; int status; } runs[] = {
        {"exec $LLM $S Once -n 100000000 -c 64 --temp 0", "", 130},
        {"exec $LLM $C Once -n 20 -i <>$D/nobody", "", 130},
        {"exec $LLM $C Once -i <>$D/nobody", "/bye\\n", 0},
        {"trap \"\" INT; exec $LLM $C Once -n 20 -i <>$D/nobody", "/bye\\n", 0}};
    write_scripted("chat", CHATML, "Ċ hm hm", 4);
    CHECK(!mkfifo(scratch("nobody"), 0600), "no FIFO");
    for (int a = 0; a < 4; a++)
        check_llm(text_of(": >$D/said; (for i in $(seq 600); do sleep .05; "
                          "test $(wc -c <$D/said) -lt 41 || break; done; kill -INT $(cat $D/pid); "
                          "printf '%s' 1<>$D/nobody) & sh -c 'echo $$ >$D/pid; %s >$D/said'",
                          runs[a].typed, runs[a].command),
                  runs[a].status, "", "prefill .*decode .*seed [0-9]+, cpu\n$");
    // a prompt that is refused or interrupted counts as far as it came
    Cli c = {.m = *open_model("golden/story.gguf"), .n_predict = 1};
    REQUIRE(session_open(&c.s, &c.m, (Options){.chunk = 2, .cpu = true}, &c.e), "%s", c.e.text);
    c.s.on_chunk = stop_at_4;
    c.s.ctx = &c;
    for (int32_t id = 5; id < 10; id++) CHECK(tokens_add(&c.ids, id), "out of memory");
    CHECK(!reply(&c) && c.n_prompts == 4 && c.n_decoded == 0, "%zu, %zu", c.n_prompts, c.n_decoded);
    interrupted = 0;
    c.ids.id[0] = -1;
    CHECK(!reply(&c) && c.n_prompts == 4 && c.n_decoded == 0, "%zu, %zu", c.n_prompts, c.n_decoded);
    c.s.on_chunk = on_chunk;   // an answer for which there is no memory
    c.ids.id[0] = c.n_message = 1;
    c.e.text[0] = 0;
    c.work = need(c.m.tokenizer->detokenize_max);
    CHECK(reply(&c), "%s", c.e.text);
    freed(c.answer.s);
    c.answer = (Text){0};
    failing = allocations + 1;
    CHECK(!reply(&c) && strstr(c.e.text, "memory"), "%s", c.e.text);
    failing = c.n_message = 0;
    c.s.on_chunk = stop_at_4;
    c.template = (Text){"{{ 'Once upon a time' }}", 24};
    CHECK(chat_add(&c, str("user"), &c.said) && !chat_answer(&c) && interrupted == LEAVE,
          "a second Ctrl-C is forgotten: %s", c.e.text);
    interrupted = 0;
    session_close(&c.s);
    freed(c.ids.id);
    freed(c.message);
}

// ==== a GPU in software ====
//
// kernels.metal runs here as it stands, and metal.c links here as it stands: three layers let it.
//    a. the emulator: threads of a threadgroup are fibers, switched at barriers and simd_* calls
//    b. the Metal library: the words and functions of Metal that kernels.metal uses, as C macros
//    c. the software Metal device behind the eight Objective-C functions that metal.c calls, or
//       CUDA's driver, whose GPU has memory of its own
//
// Threadgroups run one after another. A fiber switches only at a rendezvous: a barrier, or a
// SIMD-group function; which one goes on is the schedule's choice. Each schedule drives one
// thread (then its SIMD-group) as far as it can get, so that a missing barrier shows as a wrong
// result under one order or another; built with -fsanitize=thread, each fiber is a thread to the
// sanitizer and only barriers order memory: a race is reported under any. A barrier that some
// threads miss, lanes that part before a simd_* call: errors at once, with the line.
#if (defined(LLM_CUDA) && !defined(SOFT_DRIVER)) || (defined(LLM_METAL) && defined(__APPLE__))
#define REAL_GPU
#endif
#if defined(LLM_METAL) || defined(LLM_CUDA)
#ifdef REAL_GPU   // threads run in an order of the device's own, and nothing is recorded
enum { FORWARD, ORDERS, RECORDS = 1, RECORDER = 0, SOFT_CUDA = 0 };
#elif defined(LLM_CUDA)
enum { FORWARD, REVERSE, RANDOM, ORDERS, RECORDS = 1, RECORDER = 0, SOFT_CUDA = 1 };
#else
enum { FORWARD, REVERSE, RANDOM, ORDERS, RECORDS = 16384, RECORDER = 1, SOFT_CUDA = 0 };
#endif
static struct {
    int order;                                   // the schedule
    _Atomic int live, faults, pools;             // objects; misuse of the API; open pools
    int resident;                                // buffers of a set that was asked for
    int buffers, commits, n_run;                 // made since the test reset them
    struct { const char *kernel; const int *constant; void *bound[16]; } run[RECORDS];
    const char *broken;                          // the method or function that fails, or NULL
    int calls, failing;                          // CUDA's; the number of the one that fails, or 0
    size_t longest;                              // that a buffer may be, or 0
} soft;

// What an earlier launch has still to write: in a kernel that says itself when it waits, it is 0
// until a thread does. So a thread that reads it without waiting is seen, under one order at least.
enum { MAX_LATE = 100 };
static struct { void *p, *kept; size_t n; } soft_late[MAX_LATE];
static int n_late;

#ifndef REAL_GPU   // which takes the place of all this
#include <dlfcn.h>
#include <ucontext.h>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define TSAN(x) x
#define HIDDEN __attribute__((no_sanitize("thread", "address")))   // the emulator itself
#else
#define TSAN(x)
#define HIDDEN __attribute__((no_sanitize("address")))
#endif

// ---- the emulator ----

enum { SIMD = 32, MAX_THREADS = 1024, BEHIND = 64 };
// stacks so far apart that valgrind tells them apart; each begins at other lines of a cache
enum { STACK = 4 << 20, SHIFT = 17 * 64 };

#if defined(__clang__) && !defined(__x86_64__)
#define emu_stay(place) _setjmp(place)
#define emu_go(place) _longjmp(place, 1)
#else   // fewer instructions: the compiler keeps what the code needs
#define emu_stay(place) __builtin_setjmp((void *)(place))
#define emu_go(place) __builtin_longjmp((void *)(place), 1)
#endif

typedef struct {
    const char *op;                              // the rendezvous it waits at
    int site, begun;
    jmp_buf place;
    void *fiber;
} EmuThread;

typedef float Float8 __attribute__((vector_size(32)));
typedef struct { float a[64]; Float8 b[8], c[8]; } EmuProduct;   // a b is added to c

typedef struct {                                 // a SIMD-group
    uint32_t live, ready, simd, active, polls;   // a bit a lane; simd: it waits at site; polls:
                                                 // for an mbarrier
    uint32_t released, folded;                   // rendezvous so far, and the last that was folded
    int site;
    double fold, slot[2][SIMD];                  // what lanes leave there: two, in turn, as fast
    EmuProduct product[2];                       // lanes are at the next one already
    uint32_t left[2][SIMD][4], right[2][SIMD][2];   // operands of multiply_bytes
} EmuGroup;

static struct {
    uint32_t seed, now, first;                   // running thread; thread 0 is t[first]
    uint32_t ready;                              // a bit a SIMD-group: is one of its lanes?
    int threads, groups, alive, waiting;         // size, SIMD-groups, ...
    int tg;                                      // this threadgroup
    uint8_t *shared;                             // its memory
    void *argument;
    int bar_site;                                // the barrier that threads wait at
    int workers;                                 // threads of a workers_barrier, or 0 so far
    jmp_buf host;
    ucontext_t start;
    char *stacks;
    char error[200];
    EmuGroup group[SIMD];
    EmuThread t[MAX_THREADS];
    char order_tg, order_sg[SIMD], begin, done;  // addresses, for happens-before
    void *host_fiber;
} emu;

#define EMU(i) emu.t[(emu.first + (i)) % MAX_THREADS]
#define GROUP emu.group[emu.now / SIMD]
#define LANE (emu.now % SIMD)

__attribute__((noreturn)) HIDDEN static void emu_fail(int site, const char *op, const char *why) {
    snprintf(emu.error, sizeof emu.error, "line %d: %s: %s", site & 0xffff, op, why);
    TSAN(__tsan_switch_to_fiber(emu.host_fiber, __tsan_switch_to_fiber_no_sync);)
    emu_go(emu.host);
}

HIDDEN static uint32_t emu_random(void) { return (emu.seed = emu.seed * 1664525u + 12345) >> 8; }

HIDDEN static inline int emu_bit(uint32_t m) {   // one of the bits of m, by the schedule
    if (soft.order == FORWARD) return __builtin_ctz(m);
    if (soft.order == REVERSE) return 31 - __builtin_clz(m);
    for (int skip = emu_random() % __builtin_popcount(m); skip--;) m &= m - 1;
    return __builtin_ctz(m);
}

static void emu_fiber(void), soft_kernel(void *argument);

HIDDEN __attribute__((noinline)) static void emu_enter(EmuThread *t) {
    if (!t->begun) {                             // make its fiber
        TSAN(if (t->fiber) __tsan_destroy_fiber(t->fiber);)
        TSAN(t->fiber = __tsan_create_fiber(0);)
        getcontext(&emu.start);
        emu.start.uc_stack.ss_sp = emu.stacks + (size_t)(t - emu.t) * STACK;
        emu.start.uc_stack.ss_size = STACK - (t - emu.t) * SHIFT;
        makecontext(&emu.start, emu_fiber, 0);
    }
    TSAN(__tsan_switch_to_fiber(t->fiber, __tsan_switch_to_fiber_no_sync);)
    if (t->begun++) emu_go(t->place);
    setcontext(&emu.start);
}

HIDDEN static void emu_switch(void) {   // give way to whichever thread is next
    EmuThread *old = &EMU(emu.now);
    if (!emu.ready) emu_fail(old->site, old->op, "deadlock: it waits for the others");
    int g = emu_bit(emu.ready);
    emu.now = g * SIMD + emu_bit(emu.group[g].ready);
    EmuThread *next = &EMU(emu.now);
    if (next != old && !emu_stay(old->place)) emu_enter(next);
}

HIDDEN static inline void emu_ready(EmuGroup *g, uint32_t lanes) {
    uint32_t bit = 1u << (g - emu.group);
    emu.ready = lanes ? emu.ready | bit : emu.ready & ~bit;
    g->ready = lanes;
}

HIDDEN static inline void emu_park(const char *op, int site) {   // until it is made ready again
    EMU(emu.now).op = op;
    EMU(emu.now).site = site;
    emu_ready(&GROUP, GROUP.ready & ~(1u << LANE));
}

HIDDEN static inline void emu_release(EmuGroup *g) {   // have all live lanes come?
    if (!g->live || g->simd != g->live) return;
    g->active = g->simd;
    g->simd = 0;
    g->released++;
    emu_ready(g, g->active);
}

// Waits until every live lane of this SIMD-group has come; returns which they are
HIDDEN static uint32_t emu_simd(const char *op, int site) {
    EmuGroup *g = &GROUP;
    if (!g->simd) g->site = site;
    if (site != g->site) emu_fail(site, op, "divergence: other lanes are elsewhere");
    g->simd |= 1u << LANE;
    emu_park(op, site);
    emu_release(g);
    emu_switch();
    return g->active;
}
HIDDEN static void emu_whole(const char *op, int site) {
    if (emu_simd(op, site) != ~0u) emu_fail(site, op, "it lacks some of the 32 lanes");
}

HIDDEN static uint32_t emu_give(const char *op, int site, double x) {   // holds float and int
    GROUP.slot[GROUP.released % 2][LANE] = x;
    return emu_simd(op, site);
}

// simd_sum, simd_max or simd_min: in lane order, by whichever lane comes first
HIDDEN static double emu_fold(const char *op, int site, double x) {
    uint32_t active = emu_give(op, site, x);
    EmuGroup *g = &GROUP;
    if (g->folded == g->released) return g->fold;
    g->folded = g->released;
    const double *left = g->slot[(g->released - 1) % 2];
    for (g->fold = left[__builtin_ctz(active)]; active &= active - 1;) {
        double a = g->fold, b = left[__builtin_ctz(active)];
        if (op[6] == 'u') g->fold = a + b;
        else if (op[6] == 'a') g->fold = a > b ? a : b;
        else g->fold = a < b ? a : b;
    }
    return g->fold;
}

HIDDEN static double emu_take(const char *op, int site, double x, int lane) {
    uint32_t active = emu_give(op, site, x);
    bool there = lane >= 0 && lane < SIMD && active >> lane & 1;
    if (!there) emu_fail(site, op, "it reads a lane that is not active");
    return GROUP.slot[(GROUP.released - 1) % 2][lane];
}

// Of an 8 x 8 matrix each lane holds two neighbours in a row, as it is on Apple's GPUs.
HIDDEN static inline int emu_row(void) { return LANE / 16 * 4 + LANE / 2 % 4; }
HIDDEN static inline int emu_col(void) { return LANE / 8 % 2 * 4 + LANE % 2 * 2; }

HIDDEN static void emu_multiply(int site, float *a, float *b, const float *c, float *d) {
    EmuGroup *g = &GROUP;
    EmuProduct *p = &g->product[g->released % 2];
    int at = emu_row() * 8 + emu_col();
    memcpy(p->a + at, a, 2 * sizeof *a);
    memcpy((float *)p->b + at, b, 2 * sizeof *b);
    memcpy((float *)p->c + at, c, 2 * sizeof *c);
    emu_whole("simdgroup_multiply", site);
    for (int i = g->folded == g->released ? 64 : 0; i < 64; i++)   // as emu_fold does
        p->c[i / 8] += p->a[i] * p->b[i % 8];
    g->folded = g->released;
    memcpy(d, (float *)p->c + at, 2 * sizeof *d);
}

HIDDEN static void emu_multiply_bytes(int site, int *c, const uint32_t *a, const uint32_t *b) {
    int lane = LANE, turn = GROUP.released % 2;
    uint32_t (*left)[4] = GROUP.left[turn], (*right)[2] = GROUP.right[turn];
    memcpy(left[lane], a, sizeof *left);
    memcpy(right[lane], b, sizeof *right);
    emu_whole("multiply_bytes", site);
    for (int i = 0; i < 4; i++) {
        int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; k++) {
            int from = k % 16 / 4, upper = k / 16;
            const int8_t *x = (int8_t *)&left[row * 4 + from][i / 2 + 2 * upper];
            const int8_t *y = (int8_t *)&right[column * 4 + from][upper];
            c[i] += x[k % 4] * y[k % 4];
        }
    }
}

HIDDEN static void emu_simd_barrier(int site) {
    TSAN(__tsan_release(&emu.order_sg[emu.now / SIMD]);)
    emu_simd("simdgroup_barrier", site);
    TSAN(__tsan_acquire(&emu.order_sg[emu.now / SIMD]);)
}

HIDDEN static void emu_barrier(int site) {
    bool apart = emu.waiting && emu.bar_site != site;
    if (emu.alive != emu.threads) emu_fail(site, "threadgroup_barrier", "threads have left");
    if (apart) emu_fail(site, "threadgroup_barrier", "divergence: others wait at another one");
    TSAN(__tsan_release(&emu.order_tg);)
    emu.bar_site = site;
    emu_park("threadgroup_barrier", site);
    if (++emu.waiting == emu.threads) {
        emu.waiting = 0;
        for (EmuGroup *g = emu.group; g < emu.group + emu.groups; g++) emu_ready(g, g->live);
    }
    emu_switch();
    TSAN(__tsan_acquire(&emu.order_tg);)
}

// mbarriers: whoever waits for one goes on, to look again, when a phase of any has ended
typedef struct { uint16_t count, pending; uint32_t phase; } mbarrier;
HIDDEN static void mbarrier_init(mbarrier *b, int count) { *b = (mbarrier){count, count, 0}; }
HIDDEN static void mbarrier_arrive(mbarrier *b) {
    TSAN(__tsan_release(b);)
    if (!b->pending) emu_fail(0, "mbarrier", "more arrivals than it counts");
    if (--b->pending) return;
    b->pending = b->count;
    b->phase++;
    for (EmuGroup *g = emu.group; g < emu.group + emu.groups; g++, g[-1].polls = 0)
        emu_ready(g, g->ready | g->polls);
}
HIDDEN static void emu_wait(mbarrier *b, int parity, int site) {
    while ((b->phase & 1) == (uint32_t)parity) {
        GROUP.polls |= 1u << LANE;
        emu_park("mbarrier_wait", site);
        emu_switch();
    }
    TSAN(__tsan_acquire(b);)
}
// a share of a copy, done at once; all are multiples of 16, and the bytes are there to read
static void mbarrier_copy(mbarrier *b, uint8_t *to, const uint8_t *from, int bytes, int i, int n) {
    uintptr_t all = (uintptr_t)from | (uintptr_t)to | bytes;
    if (all % 16 || i < 0 || i >= n) emu_fail(0, "mbarrier_copy", "alignment, or share");
    for (i *= 16; i < bytes; i += 16 * n) memcpy(to + i, from + i, 16);
    mbarrier_arrive(b);
}
HIDDEN static void emu_workers(int threads, int site) {   // a barrier of some threads
    static mbarrier b;
    if (!emu.workers) b = (mbarrier){threads, threads, 0};
    emu.workers = threads;
    uint32_t parity = b.phase & 1;
    mbarrier_arrive(&b);
    emu_wait(&b, parity, site);
}

static int n_hidden;   // of soft_late
HIDDEN static void soft_show(void) {
    for (; n_hidden; n_hidden--) {
        char *to = soft_late[n_hidden - 1].p, *from = soft_late[n_hidden - 1].kept;
        for (size_t i = 0; i < soft_late[n_hidden - 1].n; i++) to[i] = from[i];   // none sees it
        free(from);
    }
}
static UNUSED void soft_hide(void) {
    for (n_hidden = 0; n_hidden < n_late; n_hidden++) {
        size_t n = soft_late[n_hidden].n;
        soft_late[n_hidden].kept = memcpy(malloc(n), soft_late[n_hidden].p, n);
        memset(soft_late[n_hidden].p, 0, n);
    }
}

static int emu_count(int32_t *p) {               // orders threadgroups' memory
    TSAN(__tsan_release(p);)
    TSAN(__tsan_acquire(p);)
    return (*p)++;
}

HIDDEN static void emu_fiber(void) {
    for (;;) {                                   // a fiber lives on, for the next threadgroup
        TSAN(__tsan_acquire(&emu.begin);)
        soft_kernel(emu.argument);
        TSAN(__tsan_release(&emu.done);)
        EmuGroup *g = &GROUP;
        g->live &= ~(1u << LANE);
        emu_ready(g, g->ready & ~(1u << LANE));
        if (emu.waiting) emu_fail(emu.bar_site, "threadgroup_barrier", "a thread leaves instead");
        emu_release(g);
        if (--emu.alive) {
            emu_switch();
            continue;
        }
        if (emu_stay(EMU(emu.now).place)) continue;
        TSAN(__tsan_switch_to_fiber(emu.host_fiber, __tsan_switch_to_fiber_no_sync);)
        emu_go(emu.host);
    }
}

HIDDEN static void emu_threadgroup(void) {
    emu.groups = (emu.threads + SIMD - 1) / SIMD;
    emu.alive = emu.threads;
    emu.waiting = emu.ready = emu.workers = 0;
    TSAN(emu.host_fiber = __tsan_get_current_fiber();)
    TSAN(__tsan_release(&emu.begin);)
    TSAN(emu.first = (emu.first + emu.threads) % MAX_THREADS;)   // no order between neighbours
    for (EmuGroup *g = emu.group; g < emu.group + emu.groups; g++) {
        int lanes = emu.threads - (g - emu.group) * SIMD;
        g->live = lanes < SIMD ? (1u << lanes) - 1 : ~0u;
        g->simd = g->polls = 0;
        emu_ready(g, g->live);
    }
    emu.now = emu_bit(emu.ready);
    emu.now = emu.now * SIMD + emu_bit(emu.group[emu.now].ready);
    if (!emu_stay(emu.host)) emu_enter(&EMU(emu.now));
}

// Runs a grid: soft_kernel once a thread, emu.tg and emu.now say which. Returns what went wrong, or
// NULL. Threadgroup memory is NaN; so is what stands behind it, and must stay so.
HIDDEN static const char *emu_run(int groups, int threads, size_t bytes, void *argument) {
    long shift = emu_random(), step = groups % 7919 ? 7919 : 1;   // a prime: visits each once
    uint8_t *all = memset(malloc(groups * (bytes + BEHIND)), 0xfe, groups * (bytes + BEHIND));
    if (!emu.stacks)
        emu.stacks = mmap(NULL, (size_t)MAX_THREADS * STACK, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    emu.error[0] = 0;
    emu.threads = threads;
    emu.argument = argument;
    for (int i = 0; i < groups && !emu.error[0]; i++) {
        emu.tg = soft.order == FORWARD ? i : soft.order == REVERSE ? groups - 1 - i
                 : (int)((i * step + shift) % groups);
        emu.shared = all + i * (bytes + BEHIND);
        emu_threadgroup();
        for (int k = 0; k < BEHIND && !emu.error[0]; k++)
            if (emu.shared[bytes + k] != 0xfe)
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
typedef _Float16 half;   // libc has ushort, uint, ulong
typedef half half4 __attribute__((vector_size(8)));
typedef float float2 __attribute__((vector_size(8)));
typedef float float4 __attribute__((vector_size(16)));
typedef uint uint2 __attribute__((vector_size(8)));
typedef uint uint4 __attribute__((vector_size(16)));
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
#define threadgroup_barrier(flags) emu_barrier(SITE)   // flags: no kernel has mem_none
#define simdgroup_barrier(flags) emu_simd_barrier(SITE)
#define mbarrier_wait(b, parity) emu_wait(b, parity, SITE)
#define workers_barrier(threads) emu_workers(threads, SITE)
#define copy_threads(n) (soft.order == FORWARD ? 1 : (n))   // in bulk, or shared
#define HAS_RING
#define input_wait() soft_show()
#define as_other(p) (p)
#define bits_of(x) quant_u32((const uint8_t *)&(float){x})
#define multiply_bytes(c, a, b) emu_multiply_bytes(SITE, c, a, b)
#define count_up(p) emu_count(p)

#define SITE (__COUNTER__ << 16 | __LINE__)   // two calls on a line are two places
#define simd_sum(x) emu_fold("simd_sum", SITE, x)
#define simd_max(x) emu_fold("simd_max", SITE, x)
#define simd_min(x) emu_fold("simd_min", SITE, x)
#define simd_shuffle(x, i) emu_take("simd_shuffle", SITE, x, i)
#define simd_shuffle_xor(x, i) emu_take("simd_shuffle_xor", SITE, x, LANE ^ (i))

#define EMU_AT(n, turned, i) \
    ((turned) ? (emu_col() + (i)) * (n) + emu_row() : emu_row() * (n) + emu_col() + (i))
#define simdgroup_load(m, p, n, ...) /* nothing, or an origin of 0 and whether it is turned */ \
    ({ for (int i_ = 0; i_ < 2; i_++) \
        (m).e[i_] = (p)[EMU_AT(n, ((int[2]){__VA_ARGS__})[1], i_)]; })
#define simdgroup_store(m, p, n) \
    ({ for (int i_ = 0; i_ < 2; i_++) (p)[EMU_AT(n, 0, i_)] = (m).e[i_]; })
#define simdgroup_float8x8(x) \
    ((simdgroup_float8x8){{emu_row() == emu_col() ? (x) : 0, emu_row() == emu_col() + 1 ? (x) : 0}})
#define simdgroup_multiply_accumulate(d, a, b, c) \
    emu_multiply(SITE, (float[2]){(a).e[0], (a).e[1]}, (float[2]){(b).e[0], (b).e[1]}, (c).e, (d).e)
#define simdgroup_multiply(d, a, b) \
    simdgroup_multiply_accumulate(d, a, b, ((simdgroup_float8x8){{0, 0}}))

#pragma GCC diagnostic ignored "-Wattributes"   // [[shared_memory]] and its kin
#undef QUANT_UNROLL
#define QUANT_UNROLL                            // it would cost time to compile, and warnings
#define attention metal_attention               // names that llm.c and the tests use, too
#define norm metal_norm
#define rope metal_rope
#define choose_experts metal_choose_experts
#define latent_row metal_latent_row
#define sort_choices metal_sort_choices
#define delta_conv metal_delta_conv
#define delta_rule metal_delta_rule
#include "kernels.metal"
#undef norm
#undef rope
#undef latent_row
#undef kernel
#undef device
#undef constant

// ---- what both software devices share ----

static bool soft_check(bool ok, const char *rule) {
    if (!ok) fprintf(stderr, "software GPU: not %s\n", rule);
    soft.faults += !ok;
    return ok;
}
#define soft_must(ok) soft_check((ok), #ok)   // what the API demands

enum { BINDINGS = 31, PARAMS = 24, PLACES = 6 };
static intptr_t soft_values[PARAMS];   // of the dispatch that runs: its buffers, n_values in all
static int n_values;

HIDDEN static void soft_kernel(void *argument) {   // one thread of it
    intptr_t t = emu.now, *v = soft_values;   // PLACE, in kernels.metal, has the same order:
    intptr_t place[PLACES] = {(intptr_t)emu.shared, emu.tg, t, emu.groups, t / SIMD, t % SIMD};
    memcpy(v + n_values, place, sizeof place);
    typedef intptr_t W;
    ((void (*)(W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W))argument)(
        v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13],
        v[14], v[15], v[16], v[17], v[18], v[19], v[20], v[21], v[22], v[23]);
}

static void *soft_find(const char *kernel) {   // in this program: link with -rdynamic
    char symbol[64];
    snprintf(symbol, sizeof symbol, "metal_%s", kernel);
    void *p = dlsym(RTLD_DEFAULT, symbol);
    if (!p) p = dlsym(RTLD_DEFAULT, kernel);
    soft_must(p && "the kernel is in this program");
    return p;
}

#ifndef LLM_CUDA
// ---- the software Metal device ----
//
// Kernels run when waitUntilCompleted is sent: a host that reads too early sees the old data. How
// many buffers a kernel has is read in the source; compiled kernels are found by name (link with
// -rdynamic). The call passes one word a parameter: right on x86-64 and arm64 Linux.

typedef struct SoftClass { const struct SoftClass *isa; const char *name; } SoftClass;
typedef struct { struct SoftObject *buffer; char *p; } SoftBind;
typedef struct SoftRun {
    struct SoftObject *pipeline;
    SoftBind bind[BINDINGS];
    size_t shared;
    MTLSize groups, threads;
    struct SoftRun *next;
} SoftRun;
typedef struct SoftObject {                      // any object; few fields, several uses
    const SoftClass *isa;
    _Atomic int refs;
    int n_buffers, status;                       // n_buffers: of a kernel, the last: arguments
    char name[32];
    struct SoftObject *a;                        // what it keeps alive
    void *p;                                     // a string's, buffer's, library's bytes
    size_t n;
    bool mine, guarded;                          // p is ours to free or unguard
    bool set[N_CONSTANTS];
    int constant[N_CONSTANTS];
    SoftRun now, *runs, **last;                  // an encoder's state, a command buffer's work
} SoftObject;

static __thread SoftObject *pooled[1000];        // of a thread; NULL marks where a pool begins
static __thread int n_pooled;

#define SOFT_CLASS(name) name = {&name, #name}
static const SoftClass SOFT_CLASS(NSObject), SOFT_CLASS(NSString), SOFT_CLASS(NSError),
    SOFT_CLASS(NSArray), SOFT_CLASS(MTLCompileOptions), SOFT_CLASS(MTLFunctionConstantValues),
    SOFT_CLASS(MTLDevice), SOFT_CLASS(MTLBuffer), SOFT_CLASS(MTLLibrary), SOFT_CLASS(MTLFunction),
    SOFT_CLASS(MTLComputePipelineState), SOFT_CLASS(MTLCommandQueue), SOFT_CLASS(MTLCommandBuffer),
    SOFT_CLASS(MTLComputeCommandEncoder), SOFT_CLASS(MTLBlitCommandEncoder),
    SOFT_CLASS(MTLResidencySet), SOFT_CLASS(MTLResidencySetDescriptor);

static bool soft_breaks(const char *method) { return soft.broken && !strcmp(soft.broken, method); }

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
    if (o->guarded) unguard(o->p, o->n);
    soft_release(o->a);
    free(o);
    soft.live--;
}

static SoftObject *soft_autorelease(SoftObject *o) {
    soft_must(n_pooled > 0);
    return pooled[n_pooled++] = o;
}

void *objc_autoreleasePoolPush(void) {
    soft.pools++;
    pooled[n_pooled] = NULL;
    return &pooled[n_pooled++];
}
void objc_autoreleasePoolPop(void *pool) {
    soft.pools--;
    while (&pooled[n_pooled] != pool) soft_release(pooled[--n_pooled]);
}

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

// Methods of a class, or of several (NSObject), with Apple's prototypes: metal.c's must be equal.
#define X(name, selector, R, ...) static send_##name method_##name;
METHODS(X)
#undef X
#define M(class, R, name, ...) static const SoftClass *const of_##name = &class; \
    static R method_##name(id self, SEL sel, ##__VA_ARGS__)
#define SELF ((SoftObject *)self)

M(NSObject, id, make) { return soft_new(self); }
M(NSObject, void, release) { soft_release(self); }
M(NSObject, id, retain) { return soft_retain(self); }
M(NSString, id, string, const char *s) { return soft_string(self, s); }
M(NSString, const char *, utf8) { return SELF->p; }
M(NSError, id, describe) { return soft_string(&NSString, SELF->p); }
M(NSArray, size_t, count) { return SELF->a != NULL; }
M(NSArray, id, object_at, size_t i) { return i ? NULL : SELF->a; }
M(MTLCompileOptions, void, set_fast_math, bool fast) { SELF->status = !fast; }
M(MTLDevice, id, new_queue) { return soft_child(&MTLCommandQueue, self); }
M(MTLComputePipelineState, size_t, simd_width) { return 32; }
M(MTLComputePipelineState, size_t, max_threads) {   // a kernel that does not say 1,024 gets fewer
    return strcmp(SELF->a->name, "ffn_block") ? 640 : 1024;
}
M(MTLDevice, id, new_residency, id how, id *error) { return soft_child(&MTLResidencySet, self); }
M(MTLResidencySet, void, add_allocation, id buffer) {
    soft_must(((SoftObject *)buffer)->isa == &MTLBuffer);
    SELF->n_buffers++;
}
M(MTLResidencySet, void, request) { soft.resident = SELF->n_buffers; }
M(MTLCommandQueue, void, add_residency, id set) { soft_must(((SoftObject *)set)->n_buffers > 0); }
M(MTLDevice, size_t, max_length) { return soft.longest ? soft.longest : (size_t)1 << 40; }
M(MTLComputeCommandEncoder, void, set_pipeline, id pipeline) { SELF->now.pipeline = pipeline; }
M(NSObject, void, end_encoding) { SELF->a->status = 1; }
M(MTLCommandBuffer, size_t, status) { return SELF->status; }
M(MTLCommandBuffer, id, error) { return soft_string(&NSError, SELF->p ?: "it\ndid not run"); }
M(MTLCommandQueue, id, commands) { return soft_autorelease(soft_child(&MTLCommandBuffer, self)); }
M(MTLCommandBuffer, id, encoder) {
    return soft_autorelease(soft_child(&MTLComputeCommandEncoder, self));
}

M(MTLCommandBuffer, id, blit_encoder) {
    soft_must(SELF->status-- == 1);   // one encoder at a time
    return soft_autorelease(soft_child(&MTLBlitCommandEncoder, self));
}

M(MTLBlitCommandEncoder, void, copy, id from, size_t at, id to, size_t to_at, size_t n) {
    SoftObject *a = from, *b = to;
    bool inside = at <= a->n && n <= a->n - at && to_at <= b->n && n <= b->n - to_at;
    if (soft_must(inside && n % 4 == 0)) memcpy((char *)b->p + to_at, (char *)a->p + at, n);
}

M(MTLFunctionConstantValues, void, set_constant, const void *p, size_t type, size_t i) {
    if (!soft_must(i < N_CONSTANTS && type == 29)) return;
    SELF->set[i] = true;
    memcpy(&SELF->constant[i], p, sizeof(int));
}

M(MTLDevice, id, new_library, id source, id options, id *error) {
    SoftObject *o = soft_new(&MTLLibrary);
    soft_must(((SoftObject *)options)->status);   // fast math is off
    o->p = strdup(((SoftObject *)source)->p);
    o->mine = true;
    for (char *c = o->p; (c = strstr(c, "//")); )
        while (*c && *c != '\n') *c++ = ' ';
    soft_must(strstr(o->p, "\nconstant int name [[function_constant(C_##name)]];"));
    return o;
}

M(MTLLibrary, id, new_function, id name, id constants, id *error) {
    const char *want = ((SoftObject *)name)->p, *s = SELF->p;
    size_t n = strlen(want);
    while ((s = strstr(s, "kernel void ")) && (s += 12, strncmp(s, want, n) || s[n] != '(')) ;
    if (!s) return *error = soft_string(&NSError, "no such kernel"), NULL;
    SoftObject *f = soft_child(&MTLFunction, self);
    memcpy(f->set, ((SoftObject *)constants)->set, sizeof f->set);
    memcpy(f->constant, ((SoftObject *)constants)->constant, sizeof f->constant);
    snprintf(f->name, sizeof f->name, "%s", want);
    f->p = soft_find(want);
    for (; *s && *s != '{'; s++) f->n_buffers += *s == ',';
    soft_must(f->n_buffers + PLACES <= PARAMS && !strncmp(s - 7, "PLACE) ", 7));
    return f;
}

M(MTLDevice, id, new_pipeline, id function, id *error) {
    SoftObject *f = function;
    for (int i = 0; i < N_CONSTANTS; i++) soft_must(f->set[i]);
    return soft_child(&MTLComputePipelineState, f);
}

M(MTLDevice, id, share_pages, void *p, size_t bytes, size_t options, id deallocator) {
    size_t page = sysconf(_SC_PAGESIZE);
    soft_must((uintptr_t)p % page == 0 && bytes % page == 0 && bytes && !options && !deallocator);
    SoftObject *o = soft_new(&MTLBuffer);
    o->p = p;
    o->n = bytes;
    soft.buffers++;
    return o;
}

M(MTLComputeCommandEncoder, void, set_shared, size_t n, size_t i) {
    soft_must(n % 16 == 0 && n <= (size_t)larger(SHARED_BYTES, SOFT_ROOM) && i == 0);
    SELF->now.shared = n;
}

static void soft_bind(SoftObject *encoder, SoftObject *buffer, size_t offset, size_t i) {
    SoftBind *b = &encoder->now.bind[i % BINDINGS];
    soft_must(i < BINDINGS && offset < buffer->n && offset % 4 == 0);
    soft_release(b->buffer);
    *b = (SoftBind){buffer, (char *)buffer->p + offset};
}

M(MTLComputeCommandEncoder, void, set_buffer, id b, size_t at, size_t i) {
    soft_bind(self, soft_retain(b), at, i);
}

M(MTLComputeCommandEncoder, void, set_bytes, const void *p, size_t n, size_t i) {
    SoftObject *o = soft_new(&MTLBuffer);
    o->p = guarded(o->n = n);                    // exactly so many, to catch a longer struct
    o->guarded = true;
    soft_must(n <= 4096);
    soft_bind(self, o, 0, i);
    memcpy(o->p, p, n);
}

M(MTLComputeCommandEncoder, void, dispatch, MTLSize groups, MTLSize threads) {
    SoftObject *commands = SELF->a;
    bool flat = groups.height * groups.depth * threads.height * threads.depth == 1;
    bool some = groups.width && threads.width && threads.width <= 1024;
    if (!soft_must(SELF->now.pipeline && flat && some)) return;
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
    soft.run[soft.n_run].kernel = r->pipeline->a->name;
    soft.run[soft.n_run].constant = r->pipeline->a->constant;
    for (int i = 0; i < 16; i++)   // what is behind is another kernel's
        soft.run[soft.n_run].bound[i] = i < r->pipeline->a->n_buffers ? r->bind[i].p : NULL;
    soft.n_run++;
}

M(NSObject, void, commit) {
    if (SELF->isa == &MTLResidencySet) return;
    soft_must(SELF->status == 1);   // endEncoding came before, and no commit
    SELF->status = 2;
    soft.commits++;
}

static const char *soft_ready(SoftRun *r) {   // set function constants; is all bound?
    SoftObject *f = r->pipeline->a;
#define X(name) name = f->constant[C_##name];
    FUNCTION_CONSTANTS(X)
#undef X
    n_values = f->n_buffers;
    for (int i = 0; i < n_values; i++)
        if (!(soft_values[i] = (intptr_t)r->bind[i].p)) return "a buffer is not bound";
    return r->shared ? NULL : "threadgroup memory has no length";
}

M(MTLCommandBuffer, void, wait) {
    const char *bad = NULL;
    if (SELF->status >= 4) return;
    soft_must(SELF->status == 2);   // committed
    for (SoftRun *r = SELF->runs; r && !bad; r = r->next)
        if (!(bad = soft_ready(r))) {
            const char *name = r->pipeline->a->name;
            if (!strcmp(name, "gemv_ring") || !strcmp(name, "attention")) soft_hide();
            bad = emu_run(r->groups.width, r->threads.width, r->shared, r->pipeline->a->p);
            if (!bad && n_hidden) bad = "no thread has waited for its input";
            soft_show();
        }
    SELF->status = bad ? 5 : 4;
    if (!bad) return;
    SELF->p = strdup(bad);
    SELF->mine = true;
}

#define X(name, selector, R, ...) {&of_##name, selector, (void *)method_##name},
static const struct { const SoftClass *const *of; const char *name; void *code; } soft_methods[] = {
    METHODS(X)
};
#undef X

id MTLCreateSystemDefaultDevice(void) {
    bool none = soft_breaks("MTLCreateSystemDefaultDevice") || soft_breaks("MTLCopyAllDevices");
    return none ? NULL : soft_new(&MTLDevice);
}
id MTLCopyAllDevices(void) {
    SoftObject *o = soft_new(&NSArray);
    if (!soft_breaks("MTLCopyAllDevices")) o->a = soft_new(&MTLDevice);
    return o;
}

SEL sel_registerName(const char *name) { return (SEL)name; }
id object_getClass(id object) { return (id)((SoftObject *)object)->isa; }

id objc_getClass(const char *name) {   // that has methods of its own
    static const SoftClass *const c[] = {&NSString, &MTLCompileOptions, &MTLFunctionConstantValues,
                                         &MTLResidencySetDescriptor};
    for (int i = 0; i < 4; i++)
        if (!strcmp(c[i]->name, name)) return (id)c[i];
    return NULL;
}

IMP class_getMethodImplementation(id class, SEL sel) {
    if (soft_breaks(sel)) return (IMP)nil_method;
    for (size_t i = 0; i < COUNT(soft_methods); i++)
        if ((*soft_methods[i].of == class || *soft_methods[i].of == &NSObject) &&
            !strcmp(soft_methods[i].name, sel)) return (IMP)soft_methods[i].code;
    fprintf(stderr, "%s has no method %s\n", ((SoftClass *)class)->name, (char *)sel);
    abort();
}
#else
// ---- the software CUDA driver ----
//
// With SOFT_DRIVER metal.c finds libcuda and libnvrtc in this program (link with -rdynamic). A
// buffer is memory of its own, as on a GPU: it begins as NaNs, and nothing is mapped behind it.
// What the host fetches is there when it has waited. A program is compiled to its source, in which
// a module finds its kernel, constants and threads. AddressSanitizer sees what is not freed.

#define X(name, types) int name types;
DRIVER(X) COMPILER(X)
#undef X
#define metal_source kernels_text
#define FAILS soft_fails(__func__)               // and what is freed or ended is so even then
enum { REFUSED = 719, PLAIN_SHARED = 48 << 10 };
typedef struct SoftKernel {                      // a variant of a kernel
    struct SoftKernel *next;
    void *code;
    char name[32];
    int constant[N_CONSTANTS], n_buffers;
    size_t threads, shared;                      // at most
} SoftKernel;
typedef struct { const SoftKernel *kernel; Launch how; Bound bound; } SoftLaunch;
typedef struct { SoftLaunch launch[300]; int n; } SoftGraph;
typedef struct {                                 // what is current in a thread; its stream
    struct { char *p; size_t n; } memory[999];
    struct { void *p, *to; size_t n; } fetched;
    SoftKernel *kernels;
    SoftGraph *capture;
    bool launched;                               // this came last
} SoftContext;
static __thread SoftContext *current;
static const char *stopped;                      // why a launch was

static bool soft_fails(const char *name) {       // is it this call's turn?
    return ++soft.calls == soft.failing || (soft.broken && !strcmp(name, soft.broken));
}

static int soft_gone(void *p) { return free(p), soft_fails(__func__); }

static int soft_memory(const char *p) {          // the number of a buffer that has p, or -1
    int i = COUNT(current->memory) - 1;
    while (i >= 0 && (size_t)(p - current->memory[i].p) >= current->memory[i].n) i--;
    return i;
}

// Does a call that is no launch fail, which begins work of a stream?
static bool soft_works(const char *name, const void *stream) {
    soft_must(stream == current && !current->capture);
    current->launched = false;
    return soft_fails(name);
}

static void soft_launch(const SoftLaunch *l) {
    const SoftKernel *k = l->kernel;
#define X(name) name = k->constant[C_##name];
    FUNCTION_CONSTANTS(X)
#undef X
    for (int i = 0; i < k->n_buffers; i++) soft_values[i] = (intptr_t)l->bound.buffer[i];
    soft_values[k->n_buffers] = (intptr_t)l->bound.bytes;
    n_values = k->n_buffers + 1;
    const char *bad = emu_run(*l->how.groups, *l->how.threads, l->how.shared, k->code);
    if (bad) stopped = bad;
}

int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGetCount(int *n) { return *n = 1, FAILS; }
int cuDeviceGetAttribute(int *x, int which, int device) {
    static const int of[] = {[COMPUTE_MAJOR] = 9, [CORES] = SOFT_CORES, [CORE_SHARED] = SOFT_ROOM};
    return *x = of[which], FAILS;
}
int cuGetErrorString(int error, const char **text) { return *text = stopped, 0; }
int cuCtxSetCurrent(void *context) { return current = context, FAILS; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    if (FAILS) return REFUSED;
    return !(*context = current = calloc(1, sizeof *current));
}
int cuCtxDestroy_v2(void *context) {
    for (SoftKernel *k; (k = current->kernels); free(k)) current->kernels = k->next;
    return soft_gone(current);
}

int cuMemGetInfo_v2(size_t *room, size_t *all) {
    return *room = *all = soft.longest ? soft.longest : 1ul << 40, FAILS;
}
int cuMemAlloc_v2(char **p, size_t n) {
    int i = 0;
    if (FAILS) return REFUSED;
    while (current->memory[i].n) i++;
    current->memory[i].n = n = (n + 255) / 256 * 256;
    *p = current->memory[i].p = memset(guarded(n), 0xfe, n);
    return 0;
}
int cuMemFree_v2(char *p) {
    int i = soft_memory(p);
    unguard(p, current->memory[i].n);
    return current->memory[i].n = 0, FAILS;
}
int cuMemHostRegister_v2(void *p, size_t n, unsigned flags) { return FAILS; }
int cuMemsetD8Async(char *to, unsigned char x, size_t n, void *stream) {
    return soft_works(__func__, stream) || !memset(to, x, n);
}
int cuMemcpyAsync(void *to, const void *from, size_t n, void *stream) {
    if (soft_works(__func__, stream)) return REFUSED;
    if (soft_memory(to) >= 0) return !memcpy(to, from, n);
    soft_must(!current->fetched.p);   // one copy, and then a wait for it
    current->fetched.p = memcpy(malloc(n), from, current->fetched.n = n);
    return !(current->fetched.to = to);
}
int cuStreamCreate(void **stream, unsigned flags) { return *stream = current, FAILS; }
int cuStreamSynchronize(void *stream) {
    bool fails = soft_works(__func__, stream) || stopped;
    if (current->fetched.p) memcpy(current->fetched.to, current->fetched.p, current->fetched.n);
    free(current->fetched.p);
    current->fetched.p = NULL;
    return fails ? REFUSED : 0;
}

int cuModuleLoadData(void **module, const void *image) {
    const char *s = image, *at = strstr(s, "\nrun_");
    if (FAILS || !at) return REFUSED;
    SoftKernel *k = *module = calloc(1, sizeof *k);
    k->next = current->kernels;
    current->kernels = k;
    sscanf(at, "\nrun_%31[a-z_]", k->name);
    k->code = soft_find(k->name);
    while ((at = strstr(at + 1, "x.buffer["))) k->n_buffers++;
    k->threads = atoi(strstr(s, "bounds__(") + 9);
    k->shared = PLAIN_SHARED;
#define X(c) k->constant[C_##c] = atoi(strstr(s, "VALUE_C_" #c " ") + sizeof "VALUE_C_" #c);
    FUNCTION_CONSTANTS(X)
#undef X
    return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    return *function = module, FAILS || strcmp(name + 4, ((SoftKernel *)module)->name);
}
int cuFuncSetAttribute(void *function, int which, int value) {
    ((SoftKernel *)function)->shared = value;
    return FAILS || which != MAX_SHARED_BYTES || value > SOFT_ROOM;
}
int cuLaunchKernelEx(const Launch *l, void *function, void **args, void **extra) {
    SoftLaunch launch = {function, *l, *(Bound *)args[0]};
    const SoftKernel *k = function;
    if (FAILS) return REFUSED;
    soft_must(*l->groups && *l->threads && *l->threads <= k->threads && l->shared <= k->shared);
    soft_must(l->stream == current && (!l->n || current->launched));   // else it starts too early
    if (current->capture) current->capture->launch[current->capture->n++] = launch;
    else soft_launch(&launch);
    return !(current->launched = true);
}

int cuStreamBeginCapture_v2(void *stream, int mode) {
    return FAILS || !(current->capture = calloc(1, sizeof *current->capture));
}
int cuStreamEndCapture(void *stream, void **graph) {
    *graph = current->capture;
    return current->capture = NULL, FAILS;
}
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
    return FAILS || !(*exec = memcpy(malloc(sizeof(SoftGraph)), graph, sizeof(SoftGraph)));
}
int cuGraphLaunch(void *exec, void *stream) {
    const SoftGraph *graph = exec;
    if (soft_works(__func__, stream)) return REFUSED;
    for (int i = 0; i < graph->n; i++) soft_launch(&graph->launch[i]);
    return 0;
}
int cuGraphDestroy(void *graph) { return soft_gone(graph); }
int cuGraphExecDestroy(void *exec) { return soft_gone(exec); }

int nvrtcCreateProgram(void **program, const char *source, const char *name, int n,
                       const char *const *texts, const char *const *names) {
    return FAILS || !(*program = strdup(source));
}
int nvrtcCompileProgram(void *program, int n, const char *const *options) { return FAILS; }
int nvrtcGetProgramLogSize(void *program, size_t *n) { return *n = 1, FAILS; }
int nvrtcGetProgramLog(void *program, char *log) { return *log = '?', FAILS; }
int nvrtcGetCUBINSize(void *program, size_t *n) { return *n = strlen(program) + 1, FAILS; }
int nvrtcGetCUBIN(void *program, char *image) { return strcpy(image, program), FAILS; }
int nvrtcDestroyProgram(void **program) { return soft_gone(*program); }
int nvrtcVersion(int *major, int *minor) { return *major = 13, FAILS; }

static void *soft_library(const char *name) {
    bool missing = soft.broken && strstr(name, soft.broken);
    return dlopen(missing ? text_of("%s/%s", test.dir, name) : NULL, RTLD_NOW);
}
static void *soft_symbol(void *from, const char *name) {
    bool missing = soft.broken && strstr("cuGraphDestroy nvrtcGetCUBIN", soft.broken);
    return missing && !strcmp(name, soft.broken) ? NULL : dlsym(from, name);
}
#endif
#endif

// ==== tests of kernels.metal and metal.c ====

#ifdef LLM_CUDA
static void check_cache(const Model *m) {   // images that the driver refuses are compiled anew
    setenv("XDG_CACHE_HOME", test.dir, 1);
    for (int run = 0; run < 3; run++) {
        Session s;
        glob_t files = {0};
        bool ok = session_open(&s, m, (Options){0}, &(Error){""}) && s.gpu;
        session_close(&s);
        CHECK(ok && !glob(scratch("llm/*"), 0, NULL, &files), "run %d fails", run);
        for (size_t i = 0; i < files.gl_pathc; i++)
            cuda_keep(files.gl_pathv[i], (Code){64, need(64), false});
        globfree(&files);
    }
}
#else
static void check_cache(const Model *unused) {}
#endif

// ---- kernels ----

// stdout (1) or stderr (2) goes to a file; what came there, and to the screen again
static int mute(int stream) {
    int old = dup(stream), fd = open(scratch("said"), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    fflush(stdout);
    dup2(fd, stream);
    close(fd);
    return old;
}
static const char *unmute(int stream, int old) {
    fflush(stdout);
    dup2(old, stream);
    close(old);
    return read_all(scratch("said"), NULL);
}

static void round_floats(float *x, size_t n) {   // to halves, as a tile of gemm has them
    for (size_t i = 0; i < n; i++) x[i] = (float)(_Float16)x[i];
}

// w x for n tokens, summed as doubles; halves: of weights as a tile has them
static float *product_of(const Matrix *w, const float *x, int n, bool halves) {
    float *out = need(n * w->rows * sizeof *out), *f = floats_of(w);
    if (halves) round_floats(f, w->rows * w->cols);
    for (int i = 0; i < n * w->rows; i++) {
        const float *row = f + i % w->rows * w->cols, *in = x + i / w->rows * w->cols;
        double sum = 0;
        for (int j = 0; j < w->cols; j++) sum += (double)row[j] * in[j];
        out[i] = sum * (w->scale ? *w->scale : 1) + (w->bias ? w->bias[i % w->rows] : 0);
    }
    return out;
}

// Each test fills its own Model and Layer, and calls the function of metal.c that a model would.
typedef struct { Gpu *g; Model m; Layer w; Session s; } Lab;

static const char *const orders[] = {"forward", "reverse", "random"};

#define LAB_CHECK(ok, format, ...) CHECK(ok, format ", %s", __VA_ARGS__, orders[soft.order])

static Gpu *lab_open(void) {
    Gpu *g = calloc(1, sizeof *g);
    *g = (Gpu){.many = LONG_LAUNCH, .own_cols = OWN_COLS};
    REQUIRE(device_open(g), "%s", g->why);
    g->pool = pool_open(RECORDER ? 1 : count_cpus());
    return g;
}
static void lab_close(Gpu *g) {
    pool_close(g->pool);
    gpu_close(&(Session){.gpu = g});
}

static Lab lab(Gpu *g) { return (Lab){.g = g, .m.config = {.eps = 1e-5f, .residual_scale = 1}}; }

static void *lab_bytes(Gpu *g, size_t n) {
    char *p = guarded(n);
    gpu_share(g, (Map){(uint8_t *)p + n - whole_pages(n), whole_pages(n)}, false);
    return p;
}

static float *lab_floats(Gpu *g, size_t n, float scale) {
    float *x = lab_bytes(g, n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * noise();
    return x;
}

static Session *lab_session(Lab *x) {   // its structs point into the Lab, so only where it stays
    x->m.layers = &x->w;
    x->s.m = &x->m;
    x->s.gpu = x->g;
    return &x->s;
}

static Session *lab_begin(Lab *x) {   // lab_end runs what is encoded from here on
    lab_session(x);
    soft.n_run = 0;
    x->g->now = lab_bytes(x->g, (NOW_COUNTS + FEW * 64) * sizeof *x->g->now);   // zeros
    x->g->halves = lab_bytes(x->g, 2 << 17);   // more than gemm ever takes here
    x->g->powers = lab_floats(x->g, (1 << 17) / GEMM_K, 1);
    x->g->packed = lab_bytes(x->g, 4 << 17);
    x->g->now[NOW_POS] = x->s.pos;
    x->g->now[NOW_PLACED] = 1;
    device_begin(x->g);
    for (int i = 0; i < x->g->n_shared; i++)
        device_send(x->g, x->g->shared[i].base, x->g->shared[i].size);
    return &x->s;
}

static int times_run(const char *kernel) {   // since the recorder was reset
    int times = 0;
    for (int r = 0; r < soft.n_run; r++) times += !strcmp(soft.run[r].kernel, kernel);
    return times;
}

// Has the ring made the products of n tokens? A real GPU records no kernels: what it can, it does.
static bool ring_ran(const Gpu *g, int type, int n) {
    if (RECORDER) return times_run("gemv_ring") > 0;
    return g->room > 0 && n <= FEW && format_block(type) > 1;
}

// n floats that launches before those of the Lab will have written; see soft_hide
static void lab_late(const void *p, size_t n) {
    soft_late[n_late].p = (void *)p;
    soft_late[n_late].n = n * sizeof(float);
    n_late += n > 0;
}

static char kernels_run[1000];   // names of those that a Lab has run, each between blanks
static void lab_end(Lab *x, const char *what) {
    for (int i = 0; i < x->g->n_shared; i++)
        device_fetch(x->g, x->g->shared[i].base, x->g->shared[i].size);
    LAB_CHECK(device_wait(x->g), "%s: %s", what, x->g->why);
    n_late = 0;
    x->g->why[0] = 0;
    for (int r = 0; r < soft.n_run; r++) {
        const char *name = text_of(" %s ", soft.run[r].kernel);
        if (!strstr(kernels_run, name)) strcat(kernels_run, name);
    }
}

static void lab_tile(const char *what, int tile, bool experts) {   // gemm's, in tokens
    for (int r = 0; r < soft.n_run; r++) {
        const int *constant = soft.run[r].constant;
        if (strcmp(soft.run[r].kernel, "gemm") || experts != !!constant[C_EXPERTS]) continue;
        LAB_CHECK(constant[C_TILE_TOKENS] == tile, "%s: tile", what);
    }
}

static Norm lab_norm(Gpu *g, int n, int each) { return (Norm){lab_floats(g, n, 1), NULL, n, each}; }

static void lab_free(Gpu *g) {   // all buffers; on Apple variants, too
    device_release(g);
    for (int i = 0; i < g->n_shared; i++) unguard(g->shared[i].base, g->shared[i].size);
    g->n_shared = 0;
}

static void lab_drop(Gpu *g) {   // and all variants
    lab_free(g);
    g->n_pipelines = 0;
}

#ifdef LLM_CUDA
// Runs a test of kernels without launching anything, and makes the variants that it will need.
static void lab_rehearse(Gpu *g, void (*fn)(Gpu *g, int type), int type) {
    int out = mute(1), checks = test.checks, failures = test.failures;
    g->dry = true;
    fn(g, type);
    g->dry = false;
    unmute(1, out);
    lab_free(g);
    test.checks = checks;
    test.failures = failures;
}
#endif

// the average error, as a share of what is wanted; a single one may be thrice that; type -1: none
static void lab_compare(const char *name, int type, const float *got, const float *want, size_t n,
                        double limit) {
    double size = sqrt(squares(want, n) / n) + 1e-30, average = sqrt(nmse(got, want, n)), most = 0;
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs((double)got[i] - want[i]) / size);
    LAB_CHECK(average <= limit && most <= 3 * limit, "%s %s: error %.2g, at most %.2g, limit %.0e",
              name, type < 0 ? "" : quant_name(type), average, most, limit);
}

static int format_cols(int type, bool wide) {   // a format allows them, no tiling likes them
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
static Matrix lab_matrix(Gpu *g, int type, int rows, int cols) {
    int block = quant_row_bytes(type, format_block(type));
    int skew = format_block(type) == 1 || block % 16 == 0 ? 0 : block % 4 ? 6 : 4;
    size_t bytes = quant_row_bytes(type, (size_t)rows * cols);
    return random_matrix((uint8_t *)lab_bytes(g, bytes + skew) + skew, type, rows, cols);
}

static void kernel_embed(Gpu *g, int type) {
    enum { V = 7, N = 3, POS = 2 };
    Lab x = lab(g);
    int cols = format_cols(type, true);
    Matrix w = lab_matrix(g, type, V, cols), p = lab_matrix(g, other_format(type), V, cols);
    Matrix first = lab_matrix(g, type, 2, cols);
    const float *a = floats_of(&w), *b = floats_of(&p), *c = floats_of(&first);
    float *want = need(N * cols * sizeof *want);
    x.s = (Session){.pos = POS, .x = lab_floats(g, N * cols, 1)};
    g->ids = memcpy(lab_bytes(g, N * sizeof *g->ids), (int32_t[N]){6, 0, 3}, N * sizeof *g->ids);
    for (int i = 0; i < N * cols; i++)
        want[i] = 3 * a[g->ids[i / cols] * cols + i % cols] + b[POS * cols + i] + c[i % cols];
    run_embed(lab_begin(&x), (const Matrix *[]){&w, &p, &first}, 3, x.s.x, N);
    lab_end(&x, "embed");
    lab_compare("embed", type, x.s.x, want, N * cols, 1e-6);
}

// What gemv_ring makes of n inputs: after their norm, if they have one, 32 numbers become codes of
// up to 127, as in round_32 where a CPU has one instruction for a product and a sum.
static float *lab_rounded(const float *x, const Norm *norm, int n, int cols) {
    float *to = need(n * cols * sizeof *to);
    for (int i = 0; i < n * cols; i++) to[i] = norm && norm->w ? x[i] * norm->w[i % cols] : x[i];
    for (int i = 0; i < n * cols; i += 32) {
        const float *row = x + i / cols * cols;
        double scale = norm ? 1 / sqrt(squares(row, cols) / cols + 1e-5) : 1;
        float most = 0;
        for (int j = i; j < i + 32; j++) most = fmaxf(most, fabsf(to[j]));
        for (int j = i; j < i + 32; j++) {
            float code = fmaf(to[j], most > 1e-36f ? 127 / most : 0, ROUNDER) - ROUNDER;
            to[j] = code * scale * most / 127;
        }
    }
    return to;
}

// v[i] = factor * w[i] x, limited; or v[0] after the epilogue
static void lab_wanted(const Matrix *const *w, int k, const float *x, int n, int act, Epilogue e,
                       float **v) {
    bool one = n <= FEW, add = e.kind == EPILOGUE_ADD, glu = e.kind == EPILOGUE_GLU;
    for (int i = 0; i < k; i++) {
        v[i] = product_of(w[i], x, n, !one);
        for (int j = 0; j < n * w[i]->rows; j++) {
            v[i][j] *= e.factor;
            if (e.kind == EPILOGUE_STORE) v[i][j] = fmaxf(-e.limit, fminf(v[i][j], e.limit));
        }
    }
    for (int j = 0; j < n * w[0]->rows && e.kind != EPILOGUE_STORE; j++)
        v[0][j] = add ? e.other[j] + e.softcap * tanh(v[0][j] / e.softcap)
                  : reference_activation(act, glu && !one ? e.other[j] : v[0][j],
                                         glu && one ? v[1][j] : v[0][j], glu);
}

// The product of n tokens: three matrices with bias, scale and a limit; one with residual and soft
// cap; gate and up, of which gemm gets the gate as it is; one with an activation. gemv norms it.
static void lab_product(Gpu *g, int type, int cols, int n, int way, int tile) {
    bool one = n <= FEW, add = way == EPILOGUE_ADD, glu = way == EPILOGUE_GLU;
    const int rows[3] = {one ? 13 : 71, one ? 13 : 5, 3};
    int k = way == EPILOGUE_STORE ? 3 : 1 + (glu && one), act = type % 4;
    float scale = 1.5f, cap = 0, factor = glu ? 1 : 2;
    float wide = act == ACT_SWIGLU_OAI ? 12 : 1;   // its clamp at 7 must show
    float *in = lab_floats(g, n * cols, 1), *other = lab_floats(g, n * rows[0], wide), *y[3], *v[3];
    const char *name = text_of("%s of %d, tile %d", one ? "gemv" : "gemm", n, tile);
    float *normed = in;
    const Matrix *m[3];
    Matrix w[3];
    Norm norm = lab_norm(g, cols, 0);
    Lab x = lab(g);
    if (type % 3 == 0) act = way == EPILOGUE_ACT ? ACT_XIELU : ACT_RELU;
    x.w = XIELU;
    x.m.config.act = act;
    x.m.config.causal = true;
    x.m.config.dim = cols;
    x.m.config.norm = type % 3;
    if (type % 2) norm.b = lab_floats(g, cols, 1);
    if (x.m.config.norm == NORM_BARE) norm.w = NULL;
    for (int i = 0; i < 32 && one; i++) in[i] *= 1e-37f;   // 127 / the largest has no float
    if (one && !add) normed = need(4 * n * cols);
    for (int i = 0; normed != in && i < n; i++)
        reference_norm(normed + i * cols, in + i * cols, cols, &norm, x.m.config.norm, 1e-5f);
    if (!one) round_floats(in, n * cols);
    for (int i = 0; i < k; i++) {   // the second is of another format
        w[i] = lab_matrix(g, i == 1 ? other_format(type) : type, rows[i], cols);
        w[i].bias = i == 1 && !glu ? NULL : lab_floats(g, rows[i], wide);
        w[i].scale = i == 1 ? NULL : &scale;
        m[i] = &w[i];
        y[i] = lab_floats(g, n * rows[i], 9);
    }
    if (add || way == EPILOGUE_STORE) {   // neither idle nor a step
        const float *y = product_of(&w[0], normed, n, !one);
        cap = factor * sqrt(squares(y, n * rows[0]) / (n * rows[0]));
    }
    lab_begin(&x);
    lab_late(in, n * cols);
    g->many = way % 2 ? 0 : LONG_LAUNCH;   // in both shapes of gemv_ring
    g->own_cols = way / 2 ? 0 : OWN_COLS;   // with inputs in both forms
    bool twice = RECORDER && SOFT_ROOM && cols == 6144 && n == FEW;   // room for half of them
    int room = twice || (way ^ n) & 2 ? SHARED_BYTES : SOFT_ROOM;   // for few slots, or many
    if (RECORDER) g->room = smaller(SOFT_ROOM, room);
    if (add) lab_late(other, n * rows[0]);
    Epilogue e = {.kind = way, .other = other, .factor = factor, .softcap = add ? cap : 0,
                  .limit = add ? 0 : cap};
    Input input = {in, NULL};
    if (one && !add) input = run_input(&x.s, in, &norm, lab_floats(g, n * cols, 1), n);
    run_products(&x.s, m, k, input, y, n, e);
    lab_end(&x, name);
    lab_tile(name, tile, false);
    if (twice) LAB_CHECK(times_run("gemv_ring") == 2, "%s: not in two launches", name);
    const float *bytes = ring_ran(g, type, n) ? lab_rounded(input.x, input.norm, n, cols) : normed;
    lab_wanted(m, k, bytes, n, act, e, v);
    // where a real GPU has no room for slots of wide rows, the product was gemv's after all
    if (!RECORDER && nmse(y[0], v[0], n * rows[0]) > 1e-9)
        lab_wanted(m, k, normed, n, act, e, v);
    for (int i = 0; i < (glu ? 1 : k); i++)
        lab_compare(name, type, y[i], v[i], n * rows[i], 1e-5);
}

static void kernel_gemv(Gpu *g, int type) {
    for (int way = EPILOGUE_STORE; way <= EPILOGUE_ACT; way++) {
        lab_product(g, type, format_cols(type, true), 1, way, 0);
        lab_product(g, type, format_cols(type, true), FEW - way, way, 0);
        lab_product(g, type, format_cols(type, true), 2 + way % 3, way, 0);
        if (type == 2 && way < 2) lab_product(g, type, 6144, way ? FEW : 3, way, 0);
        if (format_block(type) == 1) lab_product(g, type, 1056, 1, way, 0);
        if (type == FORMAT_Q8_0 || type == 12) lab_product(g, type, STAGED_COLS + 256, 1, way, 0);
    }
}

static void kernel_gemm(Gpu *g, int type) {   // 67 tokens take two tiles of 64, 40 take one
    int cols = format_cols(type, false), way = type % 4, block = format_block(type);
    lab_product(g, type, cols, block < 256 ? 67 : 40, way, 64);
    lab_product(g, type, cols, 20, (way + 1) % 4, 32);
    lab_product(g, type, cols, FEW + 1, (way + 2) % 4, GEMM_MIN);
    if (block == 1) lab_product(g, type, 160, FEW + 1, way, GEMM_MIN);
}

static void lab_ffn_block(Gpu *g, int type, int inner, int dim, int ff) {
    Lab x = lab(g);
    float *normed = need(dim * sizeof *normed), *h = need(ff * sizeof *h);
    x.m.config.dim = dim;
    x.w = (Layer){.ff = ff, .o = lab_matrix(g, type, dim, inner),
                  .gate = lab_matrix(g, type, ff, dim),
                  .up = lab_matrix(g, other_format(type), ff, dim),
                  .down = lab_matrix(g, type, dim, ff), .ffn_norm = lab_norm(g, dim, 0)};
    x.s = (Session){.o.gpu_block = true, .att = lab_floats(g, inner, 0.01f),
                    .x = lab_floats(g, dim, 1), .gate = lab_floats(g, ff, 1)};
    float *sum = product_of(&x.w.o, x.s.att, 1, false);
    add_scaled(sum, x.s.x, dim, 1);
    norm(normed, sum, dim, &x.w.ffn_norm, NORM_RMS, 1e-5f);
    const float *gate = product_of(&x.w.gate, normed, 1, false);
    activate(h, gate, product_of(&x.w.up, normed, 1, false), ff, ACT_SILU);
    float *want = product_of(&x.w.down, h, 1, false);
    add_scaled(want, sum, dim, 1);
    LAB_CHECK(run_block(lab_begin(&x), &x.w, 1), "ffn_block does not take dim %d", dim);
    lab_end(&x, "ffn_block");
    lab_compare("ffn_block", type, x.s.x, want, dim, 1e-5);
}

static void kernel_block(Gpu *g, int type) {
    lab_ffn_block(g, type, 256, 256, 256);
    if (type == FORMAT_F16) lab_ffn_block(g, type, 33, 65, 101);
    if (type == FORMAT_Q8_0) lab_ffn_block(g, type, 64, 64, 96);
    if (type == FORMAT_F16 || type == FORMAT_Q8_0) lab_ffn_block(g, type, 64, 1024, 1056);
    if (type == 12) lab_ffn_block(g, type, 256, 1024, 1280);   // q4_K
}

static float *lab_copy(Gpu *g, const float *x, size_t n) {
    return memcpy(lab_bytes(g, n * sizeof *x), x, n * sizeof *x);
}

static void lab_compare_ring(const char *name, const uint16_t *got, const uint16_t *want,
                             const Cache *c, int n_kv, int dim) {
    int wrong = 0;
    for (int i = 0; i < n_kv * c->rows * dim; i++)
        if (c->pos[i / dim % c->rows] >= 0)
            wrong += !(fabs(half_value(got[i]) - half_value(want[i])) < 4e-3);
    LAB_CHECK(!wrong, "%s: its cache is off at %d places", name, wrong);
}

static void lab_heads(Lab *x, const AttentionCase *t) {   // one layer, and its activations
    Gpu *g = x->g;
    int hd = t->hd, vd = t->vd, H = t->n_head, KV = t->n_kv, n = t->n;
    bool gated = strchr(t->what, 'g'), whole = strchr(t->what, 'w'), own = strchr(t->what, 'o');
    x->m.config = (Config){
        .norm = strchr(t->what, 'c') ? NORM_LAYER : NORM_RMS, .eps = 1e-5f, .attn_scale = 0.2f,
        .qk_norm_late = strchr(t->what, 'l'),
        .n_rot = {t->n_rot}, .attn_cap = t->softcap, .causal = t->causal,
        .alibi = t->slopes, .sharpen_length = 8,
        .sharpen_scale = strchr(t->what, 't') ? 0.7f : 0};
    x->w = (Layer){.n_head = H, .n_kv = KV, .hd = hd, .vd = vd, .n_rot = t->n_rot,
                   .rope = t->pairing, .q.rows = H * hd * (1 + gated),
                   .k.rows = KV * hd, .v.rows = KV * vd, .o.cols = H * vd,
                   .sinks = t->sinks ? lab_floats(g, H, 3) : NULL};
    for (int k = 0; k < 2; k++) {
        int size = whole || own ? (k ? KV : H) * hd : hd;
        float loud = k == 0 && t->pos + n == 1 ? 300 : 1;   // of one key the weight is 1
        if (strchr(t->what, "qk"[k]))
            *(k ? &x->w.k_norm : &x->w.q_norm) = (Norm){lab_floats(g, size, loud),
                strchr(t->what, 'b') ? lab_floats(g, size, 1) : NULL, size, whole ? 0 : hd};
    }
    x->s = (Session){.pos = t->pos, .k = lab_floats(g, n * KV * hd, 1),
                     .v = lab_floats(g, n * KV * vd, 1), .att = lab_floats(g, n * H * vd, 1),
                     .q = lab_floats(g, n * H * hd, 1), .mix = lab_floats(g, n * H * hd * 2, 1),
                     .z = lab_floats(g, n * H * hd, 1), .angles = {lab_floats(g, n * t->n_rot, 1)}};
    int slices = attention_spread(&x->w, t->rows, true).slices;
    g->parts = lab_floats(g, FEW * H * slices * (vd + 2), 1);
}

static void lab_attention(Gpu *g, const AttentionCase *t) {
    int hd = t->hd, vd = t->vd, H = t->n_head, KV = t->n_kv, n = t->n, ring = KV * t->rows;
    bool gated = strchr(t->what, 'g');
    Lab x = lab(g);
    Attention a = attention_of(t);   // k, v and pos_k will be the CPU's ring
    Cache c = {lab_bytes(g, 2 * ring * hd), lab_bytes(g, 2 * ring * vd), lab_bytes(g, 4 * t->rows),
               t->rows, t->window, t->keep, NULL, NULL}, want = c;
    want.k = (uint16_t *)a.k;
    want.v = (uint16_t *)a.v;
    want.pos = (int32_t *)a.pos_k;
    memcpy(c.pos, a.pos_k, 4 * t->rows);
    for (int i = 0; i < ring * hd; i++) c.k[i] = c.pos[i / hd % t->rows] < 0 ? 0x7e00 : a.k[i];
    for (int i = 0; i < ring * vd; i++) c.v[i] = c.pos[i / vd % t->rows] < 0 ? 0x7e00 : a.v[i];
    lab_heads(&x, t);
    x.s.cache = &c;
    x.s.slopes = t->slopes ? lab_copy(g, a.slopes, H) : NULL;
    Session cpu = *lab_session(&x);
    cpu.cache = &want;
    a.q = cpu.q = lab_copy(g, x.s.q, n * H * hd);
    cpu.k = lab_copy(g, x.s.k, n * KV * hd);
    cpu.v = lab_copy(g, x.s.v, n * KV * vd);
    a.out = cpu.att = lab_floats(g, n * H * vd, 1);
    a.scale = x.m.config.attn_scale;
    a.sinks = x.w.sinks;
    for (int i = 0; gated && i < n; i++) split_gate_row(&cpu, &x.w, i);
    for (int i = 0; i < n; i++) heads_row(&cpu, &x.w, i);
    plain_attention(&a, need(a.rows * sizeof(float)));
    for (int i = 0; gated && i < n; i++) gate_row(&cpu, &x.w, i);
    const char *name = text_of("attention, case %d", (int)(t - ATTENTION));
    for (int i = 0; n > 1 && is_few(lab_session(&x), n) && i < n * KV; i++) {   // what rope writes
        size_t row = (size_t)(i / n) * c.rows + cache_row(&c, t->pos + i % n);
        lab_late(c.k + row * hd, hd / 2);
        lab_late(c.v + row * vd, vd / 2);
    }
    lab_late(x.s.q, n * H * hd);
    lab_late(x.s.k, n * KV * hd);
    lab_late(x.s.v, n * KV * vd);
    lab_late(x.s.mix, gated ? n * H * hd * 2 : 0);
    run_attention(lab_begin(&x), &x.w, n);
    lab_end(&x, name);
    lab_compare(name, -1, x.s.att, cpu.att, n * H * vd, n >= FLASH_MIN ? 7e-4 : 1e-4);
    bool roped = n > 1 && !is_few(&x.s, n) && !gated;
    if (roped) lab_compare("rope", -1, x.s.q, cpu.q, n * H * hd, 3e-6);
    lab_compare_ring(name, c.k, want.k, &c, KV, hd);
    lab_compare_ring(name, c.v, want.v, &c, KV, vd);
}

static void kernel_attention(Gpu *g, int unused) {
    for (size_t i = 0; i < COUNT(ATTENTION); i++)
        if (ATTENTION[i].n_rot) lab_attention(g, &ATTENTION[i]);
}

static void kernel_norms(Gpu *g, int unused) {   // of each kind, by way of each epilogue
    enum { N = 3 };
    static const int sizes[] = {1000, 64, 45};
    for (int k = 0; k < 12; k++) {
        int n = sizes[k % 3], kind = k % 2 ? NORM_LAYER : NORM_RMS, way = k / 3 % EPILOGUE_ACT;
        Lab x = lab(g);
        float *in = lab_floats(g, N * n, 2), *y = lab_floats(g, N * n, 1);
        float *other = lab_floats(g, N * n, 1), factor = way ? 0.5f : 1;
        Norm w = {k % 4 ? lab_floats(g, n, 1) : NULL, k % 5 ? lab_floats(g, n, 1) : NULL, n, n};
        float *want = need(N * n * sizeof *want);
        for (int i = 0; i < N * n && kind; i++) in[i] += 30;   // a mean larger than the deviation
        reference_norm(want, in, N * n, &w, kind, 1e-5);
        for (int i = 0; i < N * n; i++) {
            want[i] *= factor;
            if (way == EPILOGUE_ADD) want[i] += other[i];
            if (way == EPILOGUE_GLU) want[i] = reference_activation(ACT_SILU, other[i], want[i], 1);
        }
        run_norm(lab_begin(&x), in, &w, kind, n, y, N,
                 (Epilogue){.kind = way, .other = other, .factor = factor});
        lab_end(&x, "norm");
        lab_compare("norm", -1, y, want, N * n, 1e-5);
    }
}

static void close_pool(void *p) { pool_close(p); }
static Session lab_cpu(const Lab *x, Session s, const Layer *w) {   // runs an op of llm.c
    Model *m = memcpy(need(sizeof *m), &x->m, sizeof *m);
    m->layers = (Layer *)w;
    s.m = m;
    s.pool = pool_open(1);
    at_end(close_pool, s.pool);
    s.op_scratch = (Arena){.base = aligned(1 << 24), .size = 1 << 24};
    return s;
}

// experts of gemv_ring, each product from the inputs that the GPU had for it
static void lab_ring_experts(const Lab *x, const float *in, const Norm *lazy, const float *weight,
                             const float *other, const float *y, int type) {
    const Session *s = &x->s;
    const Layer *w = &x->w;
    const Epilogue GLU = {.kind = EPILOGUE_GLU, .factor = 1};
    bool weighed = x->m.config.inputs_weighed;
    int n = s->n, dim = x->m.config.dim, ff = w->ff, used = w->n_used, choices = n * used;
    for (int c = 0; c < choices + (w->shared_up.data ? n : 0); c++) {
        bool own = c < choices;
        int t = own ? c / used : c - choices, e = own ? s->chosen[c] : 0;
        Matrix gate = own ? matrix_expert(&w->gate, e) : w->shared_gate;
        Matrix up = own ? matrix_expert(&w->up, e) : w->shared_up;
        Matrix down = own ? matrix_expert(&w->down, e) : w->shared_down;
        float *v[2], *rounded = lab_rounded(in + t * dim, lazy, 1, dim);
        const float *h = own ? x->g->up + c * ff : s->up + t * ff;
        const float *out = own ? x->g->gate + c * dim : s->expert_out + t * dim;
        const float *want = product_of(&down, lab_rounded(h, NULL, 1, ff), 1, false);
        for (int i = 0; own && weighed && i < dim; i++) rounded[i] *= weight[c];
        lab_wanted((const Matrix *[]){&gate, &up}, 2, rounded, 1, x->m.config.act, GLU, v);
        lab_compare("experts, up", type, h, v[0], ff, 1e-5);
        lab_compare("experts, down", type, out, want, dim, 1e-5);
    }
    float *want = need(n * dim * sizeof *want);
    for (int i = 0; i < n * dim; i++) {
        int t = i / dim;
        double sum = 0, own = w->shared_router.data ? 1 / (1 + exp(-s->gathered[t])) : 1;
        for (int c = t * used; c < (t + 1) * used; c++)
            sum += (weighed ? 1.0 : weight[c]) * x->g->gate[c * dim + i % dim];
        if (w->shared_up.data) sum += s->expert_out[i] * own;
        want[i] = other[i] + 0.5 * sum;
    }
    for (int t = 0; t < n; t++) lab_compare("a sum", type, y + t * dim, want + t * dim, dim, 1e-5);
}

#define EXPERTS(w) {&w.gate, &w.up, &w.down, &w.shared_gate, &w.shared_up, &w.shared_down}

// n experts, of which a token uses 3, and maybe a shared one. Two experts are equal, or all: then
// the first are chosen.
static Layer lab_experts_layer(Gpu *g, int type, int n, Matrix router, const float *scales) {
    int ff = router.cols, both = 1 + type % 2;   // one tensor for gate and up
    float *route = (float *)router.data;
    memcpy(route + 4 * ff, route + 2 * ff, 4 * ff);
    for (int e = 1; e < n && type == FORMAT_F16; e++) memcpy(route + e * ff, route, 4 * ff);
    Layer w = {.ff = ff, .n_used = 3, .router = matrix_rows(router, 0, n),
               .router_bias = type % 4 ? NULL : lab_floats(g, n, 0.3f)};
    Matrix *const m[] = EXPERTS(w);
    for (int i = 0; i < (type % 3 ? 6 : 3); i++) {
        int format = (i < 3) == (i % 3 != 1) ? type : other_format(type);
        int rows = i < 2 ? both * ff : ff, many = i < 3 ? n : 1;
        bool joint = i == 1 && both > 1, biased = (type % 3 == 1) == (i > 2);
        *m[i] = joint ? matrix_rows(w.gate, ff, ff) : lab_matrix(g, format, many * rows, ff);
        if (biased && !joint) m[i]->bias = lab_floats(g, many * rows, 1);
        m[i]->step = rows * quant_row_bytes(m[i]->type, ff);
        m[i]->rows = ff;
        if (scales && i < 3) m[i]->scale = scales + i;
    }
    if (type % 3 && type % 4 > 1) w.shared_router = matrix_rows(router, n, 1);
    return w;
}

// The layer with its weights as floats, for the CPU; halves: as gemm has them.
static Layer experts_as_floats(Layer w, int n, bool halves) {
    Matrix *const m[] = EXPERTS(w);
    for (int i = 0; i < (w.shared_up.data ? 6 : 3); i++) {
        Matrix all = *m[i];   // from the first expert's rows to the last one's
        size_t step = all.step / quant_row_bytes(all.type, all.cols);   // in rows
        if (i < 3) all.rows += (n - 1) * step;
        float *f = floats_of(&all);
        if (halves) round_floats(f, all.rows * all.cols);
        m[i]->data = (uint8_t *)f;
        m[i]->type = QUANT_F32;
        m[i]->step = step * all.cols * sizeof *f;
    }
    return w;
}

static void lab_run_experts(Lab *x, const float *in, const Norm *lazy, const float *other,
                            float *y) {
    Gpu *g = x->g;
    int n = x->s.n, experts = x->m.config.n_expert, choices = n * x->w.n_used;
    int tiles = expert_tiles(choices, experts, GEMM_MIN);
    g->gate = lab_floats(g, choices * x->w.ff, 1);
    g->up = lab_floats(g, choices * x->w.ff, 1);
    g->place = lab_bytes(g, 4 * choices);
    g->tiles = lab_bytes(g, 12 * tiles);
    for (int i = 0; i < tiles; i++)   // left from another layer
        memcpy(g->tiles + 3 * i, (int32_t[3]){experts - 1, 0, 1}, 12);
    lab_late(x->s.chosen, choices);
    run_choice(lab_begin(x), &x->w, (Input){in, lazy}, n);
    Epilogue add = {.kind = EPILOGUE_ADD, .other = other, .factor = 0.5f};
    run_experts_end(&x->s, &x->w, y, n, add);
    lab_end(x, "experts");
}

// n tokens, each with its experts. The CPU has their weights as floats.
static void lab_experts(Gpu *g, int type, int n) {
    enum { USED = 3 };
    const int E = type == FORMAT_F16 ? 40 : 7;
    Lab x = lab(g);
    int dim = format_cols(type, false), choices = n * USED, rows = larger(n, USED);
    bool chunk = n > FEW, inputs = type % 4 == 1 || type == FORMAT_F32;   // are weighed
    if (chunk) test.seed = type;   // other tests' draws must not decide how near the limit it comes
    Matrix router = lab_matrix(g, FORMAT_F32, E + 1, dim);
    float *scales = type % 5 ? NULL : lab_floats(g, E + 2, 2), *other = lab_floats(g, n * dim, 1);
    float *in = lab_floats(g, n * dim, 1), *y = lab_floats(g, n * dim, 1);
    if (chunk) round_floats(in, n * dim);
    else if (format_block(type) > 1)   // none is near the middle of two codes, whatever its weight
        memcpy(in, lab_rounded(in, NULL, n, dim), n * dim * sizeof *in);
    Norm weights = lab_norm(g, dim, 0);
    x.w = lab_experts_layer(g, type, E, router, scales);
    const Norm *lazy = chunk || inputs ? NULL : &weights;
    x.m.config = (Config){.dim = dim, .eps = 1e-5f, .n_expert = E, .act = type % 4, .causal = true,
                          .gating = 1 + type % 2, .weights_normed = type % 3 > 0,
                          .weights_scale = 1.5f, .inputs_weighed = inputs};
    x.s = (Session){.n = n, .normed = memcpy(need(4 * n * dim), in, 4 * n * dim),
                    .route = lab_floats(g, n * E, 1), .gathered = lab_floats(g, rows * dim, 1),
                    .chosen = lab_bytes(g, 4 * choices), .order = lab_bytes(g, 4 * choices),
                    .weight = lab_floats(g, choices, 1), .out = need(4 * n * dim),
                    .expert_out = lab_floats(g, rows * dim, 1),
                    .gate = lab_floats(g, rows * dim, 1), .up = lab_floats(g, rows * dim, 1)};
    Layer floats = experts_as_floats(x.w, E, chunk);
    Session cpu = lab_cpu(&x, x.s, &floats);
    for (int i = 0; lazy && i < n; i++)
        norm(x.s.normed + i * dim, in + i * dim, dim, lazy, NORM_RMS, 1e-5f);
    experts(&cpu);
    for (int i = 0; i < n * dim; i++) cpu.out[i] = other[i] + 0.5f * cpu.out[i];
    int32_t *chosen = memcpy(need(4 * choices), cpu.chosen, 4 * choices);
    float *weight = memcpy(need(4 * choices), cpu.weight, 4 * choices);
    lab_run_experts(&x, in, lazy, other, y);
    if (chunk) lab_tile("experts", n < 50 ? GEMM_MIN : 32, true);
    if (ring_ran(g, type, n)) {
        LAB_CHECK(!memcmp(chosen, x.s.chosen, 4 * choices), "%s: others", "experts");
        lab_ring_experts(&x, in, lazy, weight, other, y, type);
        return;
    }
    // what a chunk's products read is rounded to 11 bits, a token at a time
    for (int i = 0; i < n; i++)
        lab_compare(chunk ? "gemm experts" : "experts", type, y + i * dim, cpu.out + i * dim, dim,
                    chunk ? (1 + inputs) * 1e-3 : 1e-5);
    if (type > FORMAT_F16) return;
    in[0] = NAN;   // some expert is chosen, whatever the scores
    run_choice(lab_begin(&x), &x.w, (Input){in, NULL}, n);
    lab_end(&x, "experts of NaN");
}

static void kernel_experts(Gpu *g, int type) {
    lab_experts(g, type, 1);
    if (RECORDER && SOFT_CORES) g->cores = type % 2 ? SOFT_CORES : 1;   // one has all inputs
    lab_experts(g, type, 2 + type % (FEW - 1));
    if (RECORDER) g->cores = SOFT_CORES;
    lab_experts(g, type, type == FORMAT_F32 ? 50 : FEW + 1);
}

typedef struct {   // kda: each channel has a decay; -1: with a bound
    int n_key, n_value, dk, dv, conv;
    bool tiled, joint;   // joint: the rows of beta and alpha are one matrix
    int mixer, kda;
} DeltaCase;
static const DeltaCase DELTAS[] = {
    {2, 4, 20, 12, 4, false, false, MIX_DELTA}, {2, 6, 33, 72, 3, true, true, MIX_DELTA},
    {1, 2, 256, 8, 2, false, true, MIX_DELTA}, {3, 3, 128, 5, 4, true, false, MIX_DELTA},
    {2, 2, 40, 40, 4, false, false, MIX_DELTA, 1}, {3, 3, 128, 128, 3, false, false, MIX_DELTA, -1},
    {2, 6, 24, 5, 4, .mixer = MIX_SPACE}, {1, 3, 128, 80, 2, .mixer = MIX_SPACE},
    {3, 3, 256, 9, 64, .mixer = MIX_SPACE}, {1, 1, 1, 90, 3, .mixer = MIX_CONV},
    {1, 1, 1, 7, 64, .mixer = MIX_CONV}};

// N tokens on the CPU; on the GPU all at once, or 2 and then each by itself
static void lab_delta(Gpu *g, const DeltaCase *d, int first) {
    enum { DIM = 40 };
    const int N = d == DELTAS || d->kda ? 70 : FEW + 5;   // more than run together
    Lab x = lab(g);
    bool conv = d->mixer == MIX_CONV, delta = d->mixer == MIX_DELTA;
    int values = d->n_value * d->dv, channels = conv ? values : 2 * d->n_key * d->dk + values;
    int past = d->conv - 1, group = delta ? d->dv : values / d->n_key;
    Config *c = &x.m.config;
    *c = (Config){.causal = true, .eps = 1e-5f, .dim = DIM, .conv = d->conv, .n_key = d->n_key,
                  .dk = d->dk, .n_value = d->n_value, .dv = d->dv, .kda = d->kda ? d->dk : 0,
                  .kda_lower = d->kda < 0 ? -5 : 0, .key_tiled = d->tiled};
    int decays = d->n_value * (d->kda ? d->dk : 1);
    size_t n_conv = past * channels, n_state = conv ? 0 : delta_state_size(c);
    size_t all = n_conv + n_state;
    x.w = (Layer){.mixer = d->mixer, .conv_in = lab_matrix(g, FORMAT_F16, channels, DIM),
                  .z = lab_matrix(g, FORMAT_F16, values, DIM),
                  .conv = lab_floats(g, channels * d->conv, d->conv > 4 ? 0.1f : 1),
                  .dt_bias = lab_floats(g, decays, 2), .a = lab_floats(g, d->n_value, 1),
                  .delta_norm = lab_norm(g, delta ? group : values, group),
                  .delta_out = lab_matrix(g, FORMAT_F16, DIM, values)};
    if (!delta) x.w.skip = lab_floats(g, d->n_value, 1);
    if (d->mixer == MIX_SPACE) x.w.conv_bias = lab_floats(g, channels, 1);
    x.w.alpha = lab_matrix(g, FORMAT_F16, conv ? values : decays, DIM);
    x.w.beta = lab_matrix(g, FORMAT_F16, 2 * d->n_value, DIM);
    if (d->joint) x.w.beta_alpha = x.w.beta;
    if (d->joint) x.w.alpha = matrix_rows(x.w.beta, d->n_value, d->n_value);
    x.w.beta.rows = d->n_value;
    for (int i = 0; d->kda && i < 3; i++) {
        Matrix *m = (Matrix *[]){&x.w.q, &x.w.k, &x.w.v}[i];
        *m = matrix_rows(x.w.conv_in, i * values, values);
        m->out_step = channels;
    }
    for (int h = 0; h < d->n_value; h++) ((float *)x.w.a)[h] -= d->kda < 0 ? -2 : 1;   // it decays
    float *in = lab_floats(g, N * DIM, 1), *state = lab_floats(g, all, 1);
    g->conv = lab_floats(g, N * (channels + decays + d->n_value), 1);
    float *got = need(N * values * sizeof *got), *old = memcpy(need(4 * all), state, 4 * all);
    Cache two[2] = {{.conv = old, .state = old + n_conv}, {.conv = state, .state = state + n_conv}};
    x.s = (Session){.cache = &two[0], .n = N, .normed = in, .out = need(4 * N * DIM),
                    .mix = lab_floats(g, (N + past) * channels, 1),
                    .z = lab_floats(g, N * values, 1), .att = lab_floats(g, N * values, 1),
                    .decay = lab_floats(g, N * decays, 1),
                    .strength = lab_floats(g, N * d->n_value, 1),
                    .kept = lab_floats(g, FEW * (channels + decays + d->n_value), 1)};
    round_floats(in, N * DIM);
    Session cpu = lab_cpu(&x, x.s, &x.w);
    cpu.pool->amx = false;   // keeps but 17 bits of activations that meet f16
    recurrent(&cpu);
    float *want = memcpy(need(4 * N * values), x.s.att, 4 * N * values);
    x.s.cache = &two[1];
    for (int t = 0, n; t < N; t += n) {
        n = t > 0 ? 1 : fmin(first, N);
        const float *to = run_recurrent(lab_begin(&x), &x.w, (Input){in + t * DIM, NULL}, n);
        lab_end(&x, "delta_rule");
        memcpy(got + t * values, to, n * values * sizeof *got);
    }
    for (size_t i = 0; i < n_state; i++)   // rows that no head has may hold anything
        if (i / DELTA_ROWS / d->dk % delta_strips(c) * DELTA_ROWS + i % DELTA_ROWS >= (size_t)d->dv)
            state[n_conv + i] = old[n_conv + i];
    lab_compare("the states of delta_rule", -1, state, old, all, 1e-5);
    lab_compare("delta_rule", -1, got, want, N * values, 1e-5);
}

static void kernel_delta(Gpu *g, int unused) {
    for (size_t i = 0; i < COUNT(DELTAS); i++) {
        lab_delta(g, &DELTAS[i], 70);
        lab_delta(g, &DELTAS[i], 2);
    }
}

static void check_counters(void) {
    clean_up();
    CHECK(!soft.live && !soft.pools && !soft.faults, "%d objects leak, %d pools are open, the API "
          "is misused %d times", soft.live, soft.pools, soft.faults);
}

static void lab_heads_product(Gpu *g, int type, bool few) {
    enum { H = 3, N = 2, ROWS = 20 };
    Lab x = lab(g);
    int cols = format_cols(type, false), in = cols + 4, out = ROWS + 8;
    Matrix heads = matrix_rows(lab_matrix(g, type, H * ROWS, cols), 0, ROWS);
    heads.step = ROWS * quant_row_bytes(type, cols);
    heads.x_step = H * in;
    heads.out_step = H * out;
    float *from = lab_floats(g, N * H * in, 1), *y = lab_floats(g, N * H * out, 1);
    float *want = lab_copy(g, y, N * H * out);
    round_floats(from, N * H * in);
    for (int i = 0; i < N * H; i++) {
        Matrix one = matrix_expert(&heads, i % H);
        memcpy(want + i * out, product_of(&one, from + i * in, 1, !few), ROWS * sizeof *want);
    }
    x.w.n_head = H;
    x.m.config.causal = few;
    run_heads(lab_begin(&x), &heads, from, y, N);
    lab_end(&x, "head products");
    lab_compare("head products", type, y, want, N * H * out, 1e-5);
}

static void kernel_latent(Gpu *g, int unused) {   // its row of the cache, and a layer's inputs
    for (int few = 0; few < 2; few++) {
        lab_heads_product(g, QUANT_F16, few);
        lab_heads_product(g, FORMAT_Q8_0, few);
        lab_heads_product(g, quant_type_from_name("q4_K"), few);
    }
    enum { H = 3, N = 2, LORA = 20, ROT = 12, HD = 30, ROWS = 9, POS = 5, P = 40 };
    for (int pairing = ROPE_HALVES; pairing <= ROPE_NONE; pairing++) {
        Lab x = lab(g);
        x.m.config = (Config){.act = ACT_GELU, .eps = 1e-5f, .sharpen_scale = 0.7f,
                              .sharpen_length = 2, .per_layer = P, .n_layer = 1};
        x.w = (Layer){.n_head = H, .hd = LORA + ROT, .vd = LORA, .n_rot = ROT, .q.rows = H * HD,
                      .rope = pairing, .latent_norm = lab_norm(g, LORA, LORA)};
        Cache c = {.k = lab_bytes(g, 2 * ROWS * x.w.hd), .pos = lab_bytes(g, 4 * ROWS), ROWS};
        Cache want = c;
        x.s = (Session){.pos = POS, .k = lab_floats(g, N * x.w.hd, 3), .cache = &c,
                        .mix = lab_floats(g, N * H * HD, 1), .q = lab_floats(g, N * H * x.w.hd, 1),
                        .angles = {lab_floats(g, N * ROT, 1)}, .gate = lab_floats(g, N * P, 1),
                        .inputs = lab_floats(g, N * P, 1)};
        Session cpu = *lab_session(&x);
        want.k = lab_bytes(g, 2 * ROWS * x.w.hd);
        memset(c.pos, -1, 4 * ROWS);
        want.pos = memset(lab_bytes(g, 4 * ROWS), -1, 4 * ROWS);
        cpu.cache = &want;
        cpu.mix = lab_copy(g, x.s.mix, N * H * HD);
        cpu.q = lab_copy(g, x.s.q, N * H * x.w.hd);
        cpu.k = lab_copy(g, x.s.k, N * x.w.hd);
        cpu.gate = lab_copy(g, x.s.gate, N * P);
        for (int i = 0; i < N; i++) latent_row(&cpu, &x.w, i);
        for (int i = 0; i < N; i++) layer_input_row(&cpu, &x.m.config, i);
        run_latent_row(lab_begin(&x), &x.w, N);
        run_inputs(&x.s, N);
        lab_end(&x, "latent_row");
        for (int i = HD; i <= 2 * N * H * HD; i += HD)   // nobody reads what is rotated there
            memset((i > N * H * HD ? cpu.mix - N * H * HD : x.s.mix) + i - ROT, 0, 4 * ROT);
        lab_compare("latent queries", -1, x.s.mix, cpu.mix, N * H * HD, 1e-6);
        lab_compare("latent rotated", -1, x.s.q, cpu.q, N * H * x.w.hd, 1e-5);
        lab_compare("inputs", -1, x.s.gate, cpu.gate, N * P, 1e-5);
        lab_compare_ring("latent_row", c.k, want.k, &want, 1, x.w.hd);
        LAB_CHECK(!memcmp(c.pos, want.pos, 4 * ROWS), "positions of %s", "latent rows");
    }
}

static void kernel_best(Gpu *g, int unused) {   // of equals the first
    enum { N = 2 * BEST_IDS + 77, BEST = BEST_IDS + 7 };
    Lab x = lab(g);
    float *logits = lab_floats(g, 2 * N, 1);
    Best found[3];
    double sum = 0, chance = 1;
    int32_t id = -1;
    x.w.output.rows = N;
    logits[BEST] = logits[BEST + 33] = 2;
    for (int i = 0; i < N; i++) sum += exp(logits[i] - 2);
    x.s.best = (Best *)lab_floats(g, 9 * (FEW + 1), 1);
    x.s.logits = logits;
    find_best(found, logits + N, N);
    lab_begin(&x);
    run_best(&x.s, N, 2);
    lab_end(&x, "best_ids");
    for (int i = 0; i < 3; i++)
        LAB_CHECK(x.s.best[3 * FEW - 3 + i].logit == found[i].logit, "row 1: %g", found[i].logit);
    gpu_best(&x.s, &id, &chance);
    LAB_CHECK(id == BEST && fabs(chance * sum - 1) < 1e-5, "best id %d, %.6f", id, chance * sum);
}

// formats: of each format in turn
static const struct { void (*fn)(Gpu *g, int type); bool formats; } KERNEL_TESTS[] = {
    {kernel_embed, true}, {kernel_gemv, true}, {kernel_gemm, true}, {kernel_block, true},
    {kernel_experts, true}, {kernel_attention, false}, {kernel_norms, false},
    {kernel_delta, false}, {kernel_latent, false}, {kernel_best, false},
};

// every kernel and format in each schedule; with --quick each format in one of them, in turn; with
// a second --quick one format in four, and all else in one schedule
static void test_metal_kernels(void) {
    Gpu *g = lab_open();
    for (int i = 0; i < N_FORMATS * ORDERS; i++) {
        soft.order = i % ORDERS;
#ifdef LLM_CUDA
        for (size_t k = 0; k < COUNT(KERNEL_TESTS); k++)
            if (KERNEL_TESTS[k].formats || !i)
                lab_rehearse(g, KERNEL_TESTS[k].fn, FORMATS[i / ORDERS]);
#endif
        for (size_t k = 0; k < COUNT(KERNEL_TESTS); k++) {
            bool formats = KERNEL_TESTS[k].formats, turn = i / ORDERS % ORDERS == soft.order;
            if (formats ? test.quick && !turn : i >= ORDERS) continue;
            if (test.quick > 1 && (formats ? i / ORDERS % 4 : i)) continue;
            test.seed = 1 + i;   // numbers of its own, whatever ran before
            KERNEL_TESTS[k].fn(g, FORMATS[i / ORDERS]);
            lab_drop(g);
            clean_up();
        }
    }
    soft.order = FORWARD;
    lab_close(g);
#ifndef REAL_GPU
    for (const char *at = metal_source; (at = strstr(at, "\nkernel void ")); at++) {
        const char *name = text_of("%.*s", (int)strcspn(at + 13, "("), at + 13);
        if (strstr(name, SOFT_CORES ? "attention_merge" : "ring")) continue;   // no use
        CHECK(strstr(kernels_run, text_of(" %s ", name)), "%s: add its test to KERNEL_TESTS", name);
    }
#endif
    check_counters();
}

// ---- whole models ----

typedef struct { int chunks, tokens; } Pass;

static bool count_chunk(void *ctx, int reused, int done, int n) {
    *(Pass *)ctx = (Pass){((Pass *)ctx)->chunks + (done < n), n - reused};
    return true;
}

// The GPU has done all of a pass: each chunk and each product of its options. A token is one
// command buffer, and a chunk several if there are many layers. No buffer was made.
static void check_pass(const Session *s, Pass pass) {
    const Config *c = &s->m->config;
    const Layer *w = s->m->layers;
    int alone = 0;   // tokens in chunks of a few: each has an ffn_block of its own
    for (int p = 0, n; p < pass.tokens; p += n) {
        n = smaller(s->o.chunk, pass.tokens - p);
        if (n <= FEW) alone += n;
    }
    bool token = pass.tokens == 1, deep = c->n_layer >= SPLIT_LAYERS + c->n_layer / MAX_SPLITS;
    bool block = s->o.gpu_block && !w->attn_post_norm.w && w->limit_ffn <= 0;
    CHECK(times_run("embed") == pass.chunks * (1 + !!c->per_layer), "%s: not each chunk", c->name);
    int early = token && c->n_layer >= EARLY_LAYERS;
    bool right = token ? soft.commits == 1 + early : !deep || soft.commits > pass.chunks;
    CHECK(right || s->gpu->cpu_ffns, "%s: %d commits", c->name, soft.commits);
    CHECK(times_run("ffn_block") == block * alone * c->n_layer, "%s: --gpu block", c->name);
    CHECK(!soft.buffers, "%d buffers made in forward", soft.buffers);
}

// get_rows, which allocates nothing but the history of tokens
static void eval_rows(Session *s, const int32_t *ids, int n, int from, float *to) {
    Pass pass = {0};
    size_t allowed = allocations + (n + 1 > (int)s->history.room);
    s->on_chunk = count_chunk;
    s->ctx = &pass;
    soft.n_run = soft.commits = soft.buffers = 0;
    int variants = s->gpu ? s->gpu->n_pipelines : 0;
    get_rows(s, ids, n, from, to);
    CHECK(!s->o.cpu == !!s->gpu, "%s: the GPU gave up", s->m->config.name);
    int late = s->gpu ? s->gpu->n_pipelines - variants : 0;
    CHECK(!late || s->gpu->cpu_ffns, "%d variants were not in the warm-up", late);
    if (!s->o.cpu && RECORDER) check_pass(s, pass);
    CHECK(allocations == allowed, "%zu allocations in forward", allocations - allowed);
    for (int l = 0; l < s->m->config.n_layer; l++)
        for (int r = 0; r < s->cache[l].rows; r++)
            CHECK(s->cache[l].pos[r] < n, "layer %d: a row of the future", l);
}

// One token: no more than one dispatch (but embed's) reads a matrix, or in each loop one.
static void check_reads(const Session *s) {
    for (size_t i = 0; i < s->m->gguf->n_tensors; i++) {
        const Tensor *t = &s->m->gguf->tensors[i];
        int times = 0;
        for (int r = 0; r < soft.n_run; r++) {
            bool reads = false;
            for (int b = 0; b < 16 && strcmp(soft.run[r].kernel, "embed"); b++)
                reads |= soft.run[r].bound[b] == (char *)t->data - (uintptr_t)t->data % 16;
            times += reads;
        }
        CHECK(t->ne[1] < 2 || times <= s->m->config.n_loops, "%.*s", STR_ARG(t->name));
    }
}

static bool one_line(const char *said) {
    const char *end = strchr(said, '\n');
    return end && !end[1];
}

// on the GPU if it takes the model, else with a line that says what is wrong
static Session *open_gpu(const Model *m, Options o) {
    Session *s = need(sizeof *s);
    Error e = {{0}};
    at_end(close_session, s);
    int old = mute(2);
    bool ok = session_open(s, m, o, &e);
    const char *said = unmute(2, old), *name = m->config.name;
    CHECK(ok, "%s: %s", name, e.text);
    CHECK(!s->o.cpu && s->gpu ? !*said : s->o.cpu || one_line(said), "%s says '%s'", name, said);
    for (int l = 0; l < m->config.n_layer; l++)   // a warm-up leaves no trace
        for (int r = 0; r < s->cache[l].rows; r++)
            CHECK(s->cache[l].pos[r] == -1, "%s: row %d is taken", name, r);
    CHECK(squares(s->recurrent, s->n_recurrent) == 0, "%s: a state is not zero", name);
    return s;
}

static void check_best(const Session *s) {   // a GPU's of each row
    size_t V = s->m->config.n_vocab, parts = best_parts(V);
    Best *want = need(parts * sizeof *want);
    bool same = s->n_best > 0;
    for (size_t row = 0; row < s->n_best; row++) {
        find_best(want, s->logits + row * V, V);
        const Best *known = s->best + (FEW - row) * parts;
        for (size_t i = 0; i < parts; i++) same &= want[i].logit == known[i].logit;
    }
    CHECK(same, "%s: the best of %zu rows are others", s->m->config.name, s->n_best);
}

// A prompt in chunks, then token by token; then cut back and on again. An encoder: its whole text
// again and again, and a text of one token. `far`: how far from the golden output (NULL: none) both
// may be; `near`: how far GPU and CPU may be from each other.
static void compare_model(const Model *m, Options o, const int32_t *ids, int n, const float *golden,
                          double far, double near) {
    bool encoder = !m->config.causal, opened = true;
    size_t V = m->config.encoder ? m->config.dim : m->config.n_vocab;
    const char *name = m->config.name;
    float *logits = need(2 * (n + 5) * V * sizeof *logits), *of[2] = {logits, logits + (n + 5) * V};
    float *again[2] = {of[0] + (n + 1) * V, of[1] + (n + 1) * V};
    int prompt = encoder ? n : n * 5 / 6, cut = n - 4;
    o.threads = 1;
    if (encoder) o.chunk = n;
    for (int cpu = 0; opened && cpu < 2; cpu++) {
        o.cpu = cpu;
        Session *s = open_gpu(m, o);
        opened = cpu || s->gpu;
        if (s->gpu) s->gpu->sent_tokens = FEW + 1;   // of a part of a model
        eval_rows(s, ids, prompt, 0, of[cpu]);
        for (int i = prompt; i < n; i++) eval_rows(s, ids, i + 1, i, of[cpu] + i * V);
        if (encoder) eval_rows(s, ids, 1, 0, of[cpu] + n * V);
        if (s->gpu && !o.gpu_block && !o.gpu_layers && RECORDER) check_reads(s);
        eval_rows(s, ids, cut, cut - 1, again[cpu]);
        eval_rows(s, ids, n, n - 2, again[cpu] + V);
        if (s->gpu && !m->config.encoder) check_best(s);
        session_truncate(s, 0);
        eval_rows(s, ids, prompt, prompt - 1, again[cpu] + 3 * V);
        session_close(s);
    }
    double d = nmse(of[0], of[1], (n + 1) * V), reused = nmse(again[0], again[1], 4 * V);
    double g = golden && opened ? golden_error(m, of[0], n, golden) : 0;
    CHECK(d <= near, "%s: GPU and CPU differ by %.1e, limit %.0e", name, d, near);
    CHECK(g <= far, "%s: %.1e from golden, limit %.0e", name, g, far);
    CHECK(reused <= 4 * near, "%s: with a prefix reused, they differ by %.1e", name, reused);
    CHECK(opened, "the GPU does not take %s of %d layers", name, m->config.n_layer);
}

// How many tokens there are before one for which two experts are closer than `margin` at the edge
// of the router's choice, so that rounding decides: AMX, with 17 bits, moves a score of qwen3moe by
// 4e-5, halves move it more. A router's bias counts only there: a small one must change nothing.
static int before_tie(const Model *m, Options o, const int32_t *ids, int n, float margin) {
    const Config *c = &m->config;
    if (!c->n_expert) return n;
    float *want = logits_of(m, ids, n, o);
    for (int k = 0; k < 6 && n; k++) {   // an expert's number has three bits
        const float *old[64];
        for (int l = 0; l < c->n_layer; l++) {
            float *bias = need(c->n_expert * sizeof *bias);
            old[l] = m->layers[l].router_bias;
            for (int e = 0; e < c->n_expert; e++)
                bias[e] = (old[l] ? old[l][e] : 0) + ((e >> k / 2 & 1) == k % 2 ? margin : 0);
            m->layers[l].router_bias = bias;
        }
        float *got = logits_of(m, ids, n, o);
        for (int i = 0; i < n; i++)
            if (nmse(got + i * c->n_vocab, want + i * c->n_vocab, c->n_vocab) > 1e-5) n = i;
        for (int l = 0; l < c->n_layer; l++) m->layers[l].router_bias = old[l];
    }
    return n;
}

// On the GPU, too, a few tokens have the bits that each has alone: in a window; behind a chunk,
// where the slices of attention change at 256 tokens; in all. Nor do guesses change a text.
static bool gpu_guesses;   // or they would cost as much as tokens
static void check_few_gpu(const Model *m, const int32_t *first, int n, int layers) {
    static const int few[] = {1, FEW, 1, 5, 1, 3};
    enum { N = 14, CHUNK = 246 };
    size_t V = m->config.n_vocab;
    bool longer = SOFT_CORES && !layers && !strcmp(m->config.name, "llama");
    int ids[CHUNK + N];
    float *rows[2] = {need(N * V * sizeof **rows), need(N * V * sizeof **rows)};
    for (int i = 0; i < CHUNK + N; i++) ids[i] = first[i % n];
    for (int k = 0; m->config.causal && k < 6; k++) {
        int before = k / 2 == 1 ? CHUNK : 0;
        if (before && !longer) continue;
        Options o = {.chunk = larger(before, few[k]), .window = k < 2 ? 10 : 0, .keep = 2,
                     .threads = 1, .gpu_layers = layers};
        Session *s = open_gpu(m, o);
        gpu_guesses |= s->gpu && (s->gpu->room || !m->config.n_expert);
        if (before) eval_rows(s, ids, before, before - 1, rows[k % 2]);
        for (int i = 0; i < N; i += few[k])
            eval_rows(s, ids, before + smaller(i + few[k], N), before + i, rows[k % 2] + i * V);
        bool same = k % 2 == 0 || !memcmp(rows[0], rows[1], N * V * sizeof **rows);
        CHECK(same, "%s -c %d: %d tokens have other bits", m->config.name, o.window, few[k]);
    }
    if (!m->config.causal) return;
    Options o = {.chunk = FEW, .keep = 2, .threads = 1, .draft = 2, .gpu_layers = layers};
    Session *s = open_gpu(m, o);
    Rows c = {s, rows[1], V};
    last_row(s, ids, 4, rows[1]);
    bool may = s->o.draft && tokens_room(&s->history, 16);   // guess
    for (int p = 4; may && p < 12; p += 2) {   // one of two guesses stands
        Request r = {s->history.id, p + 3, p, .fn = keep_row, .ctx = &c, .guesses = 2};
        memcpy(s->history.id, ids, (p + 2) * sizeof *ids);
        s->history.id[p + 2] = !ids[p + 2];
        CHECK(session_run(s, r, &(Error){""}), "%s", m->config.name);
        s->history.n = p + 2;
    }
    CHECK(!may || !memcmp(rows[0] + 4 * V, rows[1] + 4 * V, 8 * V * sizeof **rows),
          "%s: bits behind a guess", m->config.name);
    Sampling how = {.top_p = 1, .repeat_penalty = 1, .seed = 3};
    for (int i = 0; i < 16; i++) ids[i] = first[i % 5];
    if (m->config.n_nextn) ((Model *)m)->config.logit_scale *= 1e6f;   // blocks are sure
    o = (Options){.threads = 1, .sampling = how, .gpu_layers = layers};
    same_text(m, o, ids, 16, 32, open_gpu);
}

// Nextn blocks say on the GPU what they say on the CPU, for tokens and for a guess behind each.
static void compare_nextn(const Model *m, const int32_t *ids, int n, double near) {
    enum { STEPS = 8 };
    int V = m->layers[m->config.n_layer].output.rows, best[2][STEPS];
    float *rows = need(2 * STEPS * V * sizeof *rows), *row = rows;
    for (int cpu = 0; cpu < 2; cpu++) {
        Options o = {.threads = 1, .cpu = cpu, .chunk = 7, .window = 10, .keep = 2, .draft = 1};
        Session *s = open_gpu(m, o);
        if (s->n_cache == m->config.n_layer) return;   // guesses would cost as much as tokens
        for (int k = 0, i = n - STEPS; k < STEPS; k++, row += V) {
            if (k % 2) nextn_forward(s, m->config.n_nextn > 1, ids + i + 1, 1, i + 1);
            else MUST(session_eval, s, ids, i += k / 2);
            if (k % 2 == 0) nextn_follow(s, ids, i + 1);
            best[cpu][k] = nextn_best(s, &(double){1});
            gpu_fetch(s, s->logits, V * sizeof *row, &(Error){""});
            for (int v = 0; v < V; v++) row[v] = s->logits[v] * (cpu ? m->config.logit_scale : 1);
        }
    }
    double d = nmse(rows, rows + STEPS * V, STEPS * V);
    CHECK(d <= near && !memcmp(best[0], best[1], sizeof best[0]), "%s: blocks on GPU and CPU "
          "differ by %.1e, or in the best id", m->config.name, d);
}

static void check_golden_gpu(const char *name) {
    static const char quick[] = "gemma2 gemma3.iq4_nl gpt-oss.mxfp4 qwen35 cohere2moe-mtp "
                                "step35-mtp";
    static const char least[] = "llama qwen35-mtp deepseek2-v3.q8_0";
    static int order;
    bool chosen = find_str(str(name), least) || (test.quick < 2 && find_str(str(name), quick));
    if (test.quick && !chosen) return;
    Golden g = golden_model(name);
    int n = test.quick ? 18 : g.n;
    g.limit = fmax(g.limit, 4e-5);   // a chunk's products take halves: 2.0e-5 was seen in gemma4
    Options whole = {.chunk = 64}, ring = {.chunk = 7, .window = 10, .keep = 2};
    // experts chosen by codes are far from those by floats, which only golden logits can judge
    bool ringed = g.m->config.causal && !(g.m->config.n_expert && strchr(name, '.'));
    float margin = g.n > 64 ? 4e-4f : 1e-4f;   // halves move the scores of laguna by 3e-4
    soft.order = order++ % ORDERS;
    if (ringed) n = before_tie(g.m, whole, g.ids, n, margin);
    compare_model(g.m, whole, g.ids, n, g.want, g.limit, g.limit);
    if (ringed) n = before_tie(g.m, ring, g.ids, smaller(n, 24), margin);   // it wraps at 20
    if (ringed) compare_model(g.m, ring, g.ids, n, NULL, g.limit, g.limit);
    // the second has post-norms, the third limits in an FFN: both rule a block out
    whole.gpu_block = strstr(" llama gemma2 step35-clamp.f16 ", text_of(" %s ", name));
    if (whole.gpu_block) compare_model(g.m, whole, g.ids, 18, g.want, g.limit, g.limit);
    Options split = {.chunk = 64, .gpu_layers = 1};   // all FFNs but the last on the CPU
    bool parted = !g.m->config.routed_first && !g.m->layers->side_by_side && g.m->config.causal;
    if (parted) compare_model(g.m, split, g.ids, smaller(n, 18), g.want, g.limit, g.limit);
    if (n < smaller(g.n, 18)) printf("  %s: %d tokens\n", name, n);
    if (g.m->config.n_nextn) compare_nextn(g.m, g.ids, n, g.limit);
    bool few = test.quick < 2 || (SOFT_CUDA && !strchr(name, '.'));
    if (few && (chosen || SOFT_CORES)) check_few_gpu(g.m, g.ids, n, 0);
    if (few && parted && !strcmp(name, "llama")) check_few_gpu(g.m, g.ids, n, 1);
    soft.order = FORWARD;
}

static void test_metal_models(void) {
    texts_shorter = 0;
    each_golden_model(check_golden_gpu, 1);
    CHECK(texts_shorter || !gpu_guesses || test.quick > 1, "no guess stood on the GPU");
    printf("  guesses stood in %d texts\n", texts_shorter);
    int step = test.quick > 1 ? 6 : 1;
    for (size_t i = 0; i < COUNT(DAMAGED) && !SOFT_CUDA; i += step)
        check_damage(DAMAGED[i], open_gpu);
    check_counters();
}

// The models of SHAPES: the GPU equals the CPU. The deep ones take several command buffers.
static void test_metal_shapes(void) {
    enum { N = 20 };
    for (size_t i = 0; i < COUNT(SHAPES); i++) {
        int32_t ids[N];
        if (SHAPES[i].n_layer > 40 ? test.quick : SHAPES[i].n_layer > 8) continue;
        Model m = *random_model(&SHAPES[i]);
        Options o = {.chunk = 9, .window = 64};
        int n;
        if (m.config.span) {
            m.config.span = m.config.sharpen_length = m.config.window = 8;
            m.config.sharpen_scale = 2;
        }
        do for (int k = 0; k < N; k++) ids[k] = random_bits() % VOCAB;
        while ((n = before_tie(&m, o, ids, N, 1e-3f)) < 10);
        compare_model(&m, o, ids, n, NULL, 0, 4e-5);   // 5.8e-6 was seen
        clean_up();
    }
    check_counters();
}

// ---- failures ----

// A function of the GPU's system that fails, what the one line says (NULL: all goes well; empty:
// nothing is said, and the CPU runs), and when.
enum { OPENING, ALWAYS };   // at open; there or later. Of CUDA, each call fails in turn
static const struct { const char *method, *says; int when; } FAILURES[] = {
#ifdef LLM_CUDA
    {"libcuda", "", OPENING}, {"libnvrtc", "but no libnvrtc, which", OPENING},
    {"cuGraphDestroy", "the NVIDIA driver has no function: cuGraphDestroy", OPENING},
    {"nvrtcGetCUBIN", "libnvrtc has no function: nvrtcGetCUBIN", OPENING},
    {"cuStreamSynchronize", "cuStreamSynchronize", ALWAYS},   // states were written
#else
    {"MTLCreateSystemDefaultDevice", NULL, OPENING},   // there still is MTLCopyAllDevices
    {"MTLCopyAllDevices", "no Metal device", OPENING},
    {"newCommandQueue", "no command queue", OPENING},
    {"newLibraryWithSource:options:error:", "kernels.metal", OPENING},
    {"newFunctionWithName:constantValues:error:", "note", OPENING},   // at open all are made
    {"newComputePipelineStateWithFunction:error:", "note", OPENING},
    {"threadExecutionWidth", "SIMD-groups are not 32 wide", OPENING},
    {"maxTotalThreadsPerThreadgroup", "too few threads", OPENING},
    {"newBufferWithBytesNoCopy:length:options:deallocator:", "memory", OPENING},
    {"maxBufferLength", "memory", OPENING},
    {"commandBufferWithUnretainedReferences", "no command encoder", ALWAYS},
    {"computeCommandEncoder", "no command encoder", ALWAYS},
    {"waitUntilCompleted", "the GPU stopped: it did not run", ALWAYS},
    {"status", "the GPU stopped: it did not run", ALWAYS},   // after states were written
#endif
};

enum { FAILING = 21 };   // tokens

// The GPU fails at open (later < 0), or from one of these chunks and tokens of a text on; row < 0:
// in call -row of CUDA's driver, which may be harmless. Returns whether there were so many.
static bool lab_failure(const Model *m, int row, int later, const int32_t *ids, const float *want) {
    static const int ends[] = {9, 18, FAILING - 1, FAILING};
    const char *method = row < 0 ? NULL : FAILURES[row].method;
    const char *says = row < 0 ? NULL : FAILURES[row].says;
    size_t V = m->config.n_vocab;
    float *got = need(FAILING * V * sizeof *got);
    Session s;
    Error e = {{0}};
    Rows c = {&s, got, V};
    int old = mute(2);
    soft.broken = later < 0 ? method : NULL;
    soft.calls = 0;
    soft.failing = row < 0 ? -row : 0;
    Options o = {.threads = 1, .chunk = 9, .draft = 1, .gpu_layers = row % 2 != 0};
    bool ok = session_open(&s, m, o, &e);
    if (says && !SOFT_CUDA) soft.broken = NULL;
    for (int k = 0; k < 4; k++) {
        if (k == later) soft.broken = method;
        if (ok && k) nextn_follow(&s, ids, ends[k - 1] + 1);
        Request r = {ids, ends[k], k ? ends[k - 1] : 0, .fn = keep_row, .ctx = &c};
        if (ok && k == 2 && tokens_room(&s.history, FAILING)) {   // a guess, which stands
            r.ids = memcpy(s.history.id, ids, ends[2] * sizeof *ids);
            r.guesses = 1;
        }
        ok = ok && session_run(&s, r, &e);
    }
    bool failed = !s.gpu;
    session_close(&s);
    soft.broken = NULL;
    soft.failing = 0;
    const char *said = unmute(2, old), *note = says && *says ? "note: running on the CPU: " : "";
    bool told = *note ? one_line(said) && strstr(said, says) : !*said;
    if (row < 0) {   // one note, or none is needed
        says = failed ? "" : NULL;
        told = failed ? one_line(said) : !*said;
        note = failed && *said ? "note: running on the CPU: " : "";
        method = text_of("call %d", -row);
    }
    double error = nmse(got, want, FAILING * V);
    CHECK(ok && failed == !!says, "%s, %d: %s", method, later, e.text);
    CHECK(told && !strncmp(said, note, strlen(note)), "%s, %d, says '%s'", method, later, said);
    CHECK(error <= 1e-5, "%s, %d: %.1e from what comes of no failure", method, later, error);
    return soft.calls >= -row;
}

// A file that is longer than a buffer may be: each tensor lies whole in one of several buffers.
static void check_cut(const Model *m) {
    static const int32_t ids[] = {1, 8, 15, 22, 29, 36, 43, 50, 57, 64, 71, 78};
    Options o = {.chunk = 9, .window = 64, .threads = 1};
    soft.longest = 3 << 19;
    Gpu *g = open_gpu(m, o)->gpu;
    for (size_t i = 0; g && i < m->gguf->n_tensors; i++) {
        const Tensor *t = &m->gguf->tensors[i];
        const Shared *in = gpu_find(g, t->data);
        bool whole = (const char *)t->data + (size_t)tensor_bytes(t) <= in->base + in->size;
        CHECK(whole && in->size <= soft.longest, "%.*s is cut", STR_ARG(t->name));
    }
    CHECK(g && g->n_shared == 6, "it has not %d buffers", 6);
    CHECK(soft.resident == 6, "%d buffers are kept resident", soft.resident);
    if (!test.quick) compare_model(m, o, ids, 12, NULL, 0, 1e-4);
    soft.longest = 0;
}

// what measures the GPU's memory: copies of the first half of a buffer to the second
static void check_rate(const Model *m) {
    enum { SIZE = 1 << 20 };
    Session *s = open_gpu(m, (Options){.threads = 1});
    char *p = guarded(SIZE);
    double first = gpu_rate(s, p, SIZE);
    for (int i = 0; i < SIZE; i++) p[i] = i >> 12;
    if (s->gpu) device_send(s->gpu, p, SIZE);
    double rate = gpu_rate(s, p, SIZE);
    if (s->gpu) device_fetch(s->gpu, p, SIZE);
    soft.broken = "newBufferWithBytesNoCopy:length:options:deallocator:";
    gpu_rate(s, p + SIZE / 2, SIZE / 2);
    soft.broken = NULL;
    CHECK(s->gpu, "the model leaves a GPU that has no more room");
    CHECK(first > 0 && rate > 0 && !memcmp(p, p + SIZE / 2, SIZE / 2), "%.3g bytes/s", rate);
    session_close(s);
    unguard(p, SIZE);
}

static void check_parts(const Model *m) {   // scratch for the slices of a long ring
    Model one = *m;
    const Layer *w = m->layers;
    one.config.n_layer = 1;
    Session *s = open_gpu(&one, (Options){.chunk = 9, .window = 2000});
    int slices = s->gpu ? attention_spread(w, s->cache[0].rows, true).slices : 0;
    long room = s->gpu ? (float *)s->gpu->halves - s->gpu->parts : 0;
    long extra = room - FEW * w->n_head * slices * (m->config.vd + 2);
    CHECK(slices > 1 && extra >= 0 && extra < 64, "%ld floats for %d slices", room, slices);
    int most = attention_spread(w, INT_MAX, true).slices;   // of a window that is refused later
    CHECK(most >= slices && most <= ATTENTION_FILL, "%d slices at most", most);
    session_close(s);
}

// A GPU with memory of its own has as many FFNs as fit, and some to spare, or none, with a note.
static void check_fit(const Model *m) {
    Options o = {.chunk = 9, .window = 64, .threads = 1};
    Session *s = open_gpu(m, o);
    double need[3] = {0}, spare = SPARE_BYTES - (64 << 10), shared = gpu_bytes(s);   // maps: pages
    for (int k = 0; k < 3; k++) need[k] = gpu_need(s, k * m->config.n_layer / 2, o.chunk);
    CHECK(need[0] >= shared + spare && need[2] < need[0], "needs %.0f", need[0]);
    session_close(s);
    for (int k = 0; k < 3; k++) {
        soft.longest = need[k] + 1;
        s = open_gpu(m, o);
        int first = s->gpu->cpu_ffns;
        CHECK(gpu_bytes(s) + spare < soft.longest, "%d: %.0f bytes", k, gpu_bytes(s));
        CHECK(!first || gpu_need(s, first - 1, o.chunk) >= soft.longest, "%d: %d", k, first);
        session_close(s);
    }
    for (int k = 0; k < 2; k++) {
        o.gpu_layers = k;
        soft.longest = k ? 0 : need[2];
        int old = mute(2);
        Session none;
        bool opened = session_open(&none, k ? golden_model("smallthinker").m : m, o, &(Error){""});
        const char *said = unmute(2, old), *want = k ? "cannot run on the CPU: " : "too little mem";
        CHECK(opened && !none.gpu && one_line(said) && strstr(said, want), "says %s", said);
        session_close(&none);
    }
    soft.longest = 0;
}

static void test_metal_failures(void) {
    const Model *models[2] = {golden_model("llama").m, golden_model("qwen35-mtp").m};
    const Model *m = models[0];
    // late: the one of two layers (2: none) that has a QK norm of all after RoPE; conv: its taps
    static const struct { int hd, dk, late, conv; const char *says; } lacks[] = {
        {80, 128, 2, 17, NULL}, {256, 256, 2, 4, NULL}, {82, 128, 2, 4, "head size"},
        {580, 128, 2, 4, "head size"}, {80, 257, 2, 4, "head size"}, {80, 128, 0, 4, "QK norm"},
        {80, 128, 1, 4, "QK norm"}, {80, 128, 2, 18, "convolution"}};
    int32_t ids[FAILING];
    for (int i = 0; i < FAILING; i++) ids[i] = 5 * i % m->config.n_vocab;
    for (int k = 0; k < 2; k++) {
        if (SOFT_CUDA && k) setenv("HOME", "", 1);   // images are not kept, so all are compiled
        float *want = logits_of(models[k], ids, FAILING, (Options){.threads = 1});
        for (size_t i = k ? COUNT(FAILURES) - 1 : 0; ORDERS > 1 && i < COUNT(FAILURES); i++) {
            int end = FAILURES[i].when == OPENING ? 0 : 4;
            for (int later = -1; later < end; later += 1 + (test.quick > 1))
                lab_failure(models[k], i, later, ids, want);
        }
        for (int call = 1; SOFT_CUDA && k && lab_failure(models[k], -call, -1, ids, want);)
            call += 1 + call / 6;
    }
    if (RECORDER) check_cut(open_model("golden/story.gguf"));
    if (SOFT_CUDA) check_fit(open_model("golden/story.gguf"));
    if (SOFT_CUDA) check_fit(golden_model("llama4").m);   // has weights of its own
    check_parts(m);
    check_rate(m);
    for (size_t i = 0; i < COUNT(lacks); i++) {
        Model other = *m;
        Layer layers[3] = {{0}};
        other.config.qk_norm_late = true;
        layers[lacks[i].late].q_norm.w = (float[]){1};
        for (int l = 0; l < 3; l++) layers[l].hd = layers[l].vd = lacks[i].hd;
        other.config.dk = lacks[i].dk;
        other.config.conv = lacks[i].conv;
        other.config.n_layer = 2;
        other.layers = layers;
        const char *says = gpu_lacks(&other, 0, 2), *want = lacks[i].says;
        CHECK(want ? says && !strcmp(says, want) : !says, "row %zu: %s", i, says ? says : "none");
    }
    Gguf file = {.tensors = &(Tensor){.data = (uint8_t *)m->embd.data + 8}, .n_tensors = 1};
    Model other = *m;
    other.gguf = &file;
    CHECK(gpu_lacks(&other, 0, 2), "a tensor at a multiple of 8");
    Session *s = open_gpu(m, (Options){.threads = 1});
    Error e = {""};
    snprintf(s->gpu->why, sizeof s->gpu->why, "no copy");
    CHECK(!hidden_rows(s, 0, 1, &e) && strstr(e.text, "no copy"), "a failed copy: '%s'", e.text);
    s->gpu->why[0] = 0;
    check_cache(m);
    check_counters();
}

#ifdef LLM_CUDA
// ---- how fast ----
//
// `make bench-cuda` calls metal.c's functions on more operands in turn than fit the GPU's cache. A
// row has the best time of seven, and a second's bytes of weights or K and V, or its operations.

static const char *bench_only;   // rows with that in their names
// a buffer that holds n bytes again and again
static void *bench_fill(Gpu *g, size_t bytes, const void *pattern, size_t n) {
    char *p = lab_bytes(g, (bytes + 15) / 16 * 16);
    for (size_t at = 0; at < bytes; at += n) memcpy(p + at, pattern, smaller(n, bytes - at));
    device_send(g, p, bytes);
    return p;
}

static float *bench_floats(Gpu *g, size_t n) {
    return bench_fill(g, n * sizeof(float), noise_array(4096, 1), 4096 * sizeof(float));
}

static Matrix bench_matrix(Gpu *g, int type, int64_t rows, int64_t cols) {
    size_t bytes = quant_row_bytes(type, cols);
    Matrix m = random_matrix(need(8 * bytes), type, 8, cols);
    m.data = bench_fill(g, rows * bytes, m.data, 8 * bytes);
    m.rows = rows;
    return m;
}

// The operands of a row: a product's matrices, or (m NULL) the session's caches; n tokens
typedef struct { Matrix *m; const float *in; float *out; int n; } Bench;

static void run_operand(Session *s, const Bench *b, int i) {
    const Matrix *one = b->m + i;
    s->l = b->m ? 0 : i;
    if (b->m) run_products(s, &one, 1, (Input){b->in, NULL}, (float **)&b->out, b->n, STORE);
    else run_attention(s, s->m->layers, b->n);
}

// prints how long an operand takes; much: its bytes, or for several tokens its operations
static void bench_run(Lab *x, const char *name, const Bench *b, int operands, double much) {
    double best = 1e9;
    Session *s = lab_session(x);
    for (int turn = 0; turn < 8; turn++) {   // the first one warms up
        device_wait(x->g);
        double start = now();
        for (int i = 0; i < operands; i++) run_operand(s, b, i);
        device_wait(x->g);
        if (turn && now() - start < best) best = now() - start;
    }
    double rate = much * operands / best;
    CHECK(!x->g->why[0], "%s", x->g->why);
    printf("%s %.1f us %.2f %s\n", name, 1e6 * best / operands, rate / (b->n > 1 ? 1e12 : 1e9),
           b->n > 1 ? "TFLOP/s" : "GB/s");
    fflush(stdout);
    lab_drop(x->g);
    clean_up();
}

static void bench_product(Gpu *g, const char *name, int type, int64_t rows, int64_t cols, int n) {
    double bytes = quant_row_bytes(type, cols) * rows;
    int copies = 1 + 4e8 / bytes;
    Lab x = lab(g);
    if (!strstr(name, bench_only)) return;
    Bench b = {need(copies * sizeof *b.m), bench_floats(g, n * cols), bench_floats(g, n * rows), n};
    x.m.config.causal = true;
    g->packed = bench_floats(g, 1 << 20);
    g->halves = (uint16_t *)bench_floats(g, n * cols / 2);
    g->powers = bench_floats(g, n);
    for (int i = 0; i < copies; i++) b.m[i] = bench_matrix(g, type, rows, cols);
    bench_run(&x, name, &b, copies, n > 1 ? 2.0 * n * rows * cols : bytes);
}

// attention of n tokens after `rows - n`
static void bench_attention(Gpu *g, int H, int hd, int rows, int n) {
    enum { KV = 8, COPIES = 8 };
    const char *name = text_of("%sattention %d heads of %d, %d rows", n > 1 ? "flash " : "", H, hd,
                               rows);
    double bytes = 4.0 * KV * rows * hd, flop = 4.0 * hd * H * n * (rows - (n - 1) / 2.0);
    int32_t *pos = need(rows * sizeof *pos), now[NOW_COUNTS + FEW * 64] = {[NOW_POS] = rows - n};
    Cache c[COPIES];
    Lab x = lab(g);
    if (!strstr(name, bench_only)) return;
    for (int i = 0; i < rows; i++) pos[i] = i;
    AttentionCase t = {.n_head = H, .n_kv = KV, .hd = hd, .vd = hd, .pos = rows - n, .n = n,
                       .rows = rows, .causal = true, .n_rot = hd, .what = ""};
    lab_heads(&x, &t);
    x.s.cache = c;
    g->now = bench_fill(g, sizeof now, now, sizeof now);
    for (int i = 0; i < COPIES; i++)
        c[i] = (Cache){.k = (void *)bench_matrix(g, FORMAT_F16, KV * rows, hd).data,
                       .v = (void *)bench_matrix(g, FORMAT_F16, KV * rows, hd).data,
                       .pos = bench_fill(g, 4 * rows, pos, 4 * rows), rows, rows};
    bench_run(&x, name, &(Bench){.n = n}, COPIES, n > 1 ? flop : bytes);
}

static void bench_all(char **arg) {
    static const int heads[][4] = {{32, 128, 1024, 1}, {32, 128, 8192, 1}, {32, 64, 2048, 512},
        {32, 128, 8192, 2048}, {32, 128, 2048, 512}, {16, 256, 2048, 512}};
    Gpu *g = lab_open();
    bench_only = *arg ? *arg : "";
    for (int i = 0; i < N_FORMATS; i++) {
        int type = FORMATS[i];
        const char *f = quant_name(type);
        static const int sizes[][3] = {{4096, 4096, 1}, {14336, 4096, 1}, {131072, 4096, 1},
            {4096, 4096, 512}, {14336, 4096, 2048}, {1024, 3072, 512}};
        for (const int *k = *sizes; k < *sizes + 3 * COUNT(sizes); k += 3)
            bench_product(g, text_of("%s %s %dx%dx%d", k[2] > 1 ? "gemm" : "gemv", f, k[0], k[1],
                                     k[2]), type, k[0], k[1], k[2]);
    }
    for (const int *k = *heads; k < *heads + 4 * COUNT(heads); k += 4)
        bench_attention(g, k[0], k[1], k[2], k[3]);
    lab_close(g);
}
#endif
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
#define VECTORS(T) typedef T T##2 __attribute__((ext_vector_type(2))); \
    typedef T T##4 __attribute__((ext_vector_type(4)));
VECTORS(half) VECTORS(float) VECTORS(uint)
struct ulong2 { ulong2(ulong); };
enum class mem_flags { mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T, class U> T as_type(U) { static_assert(sizeof(T) == sizeof(U), ""); return T(); }

// an int with a uint is ambiguous
#define EACH(T) T max(T, T); T min(T, T); T clamp(T, T, T); T abs(T);
EACH(short) EACH(ushort) EACH(int) EACH(uint) EACH(half) EACH(float) EACH(long) EACH(ulong)
#define REAL(T) T exp(T); T exp2(T); T rsqrt(T); T sqrt(T); T tanh(T); T fabs(T); T log(T); \
    T floor(T); T ldexp(T, int); int ilogb(T); T fma(T, T, T);
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
template <class T> using Out = volatile simdgroup_matrix<T> &;
template <class T> using In = const volatile simdgroup_matrix<T> &;
#define MOVE(space) \
    template <class T> void simdgroup_load(Out<T>, const space T *, ulong = 8, ulong2 = 0, \
                                           bool = false); \
    template <class T> void simdgroup_store(In<T>, space T *, ulong = 8, ulong2 = 0, bool = false);
MOVE(device) MOVE(threadgroup)
template <class D, class A, class B>
void simdgroup_multiply_accumulate(Out<D>, In<A>, In<B>, In<D>);
template <class D, class A, class B> void simdgroup_multiply(Out<D>, In<A>, In<B>);
// the words of gemv_ring
#define HAS_RING
typedef ulong mbarrier;
int copy_threads(int);
void next_may_start(), input_wait(), workers_barrier(int);
void mbarrier_init(threadgroup mbarrier *, int), mbarrier_arrive(threadgroup mbarrier *),
    mbarrier_wait(threadgroup mbarrier *, int),
    mbarrier_copy(threadgroup mbarrier *, threadgroup uchar *, device const uchar *, int, int, int),
    multiply_bytes(thread int *, thread const uint *, thread const uint *);
int count_up(device int *);
uint bits_of(float);
threadgroup float *as_other(device float *);
device const uchar *as_other(threadgroup const uchar *);
#pragma GCC poison vertex fragment object_data double goto register new delete virtual throw try
#pragma GCC poison catch typeid dynamic_cast printf
#endif

// ==== fuzzing ====
//
// `make fuzz` gives each of these targets to libFuzzer, which changes files that the writer of this
// file made, and keeps what reaches new code. An input is refused or works; the fuzzer looks for
// crashes, leaks, long runs, and reads or writes where they are not allowed.

#ifdef LLM_FUZZ
static bool fuzz_tokenize(const Tokenizer *t, const uint8_t *data, size_t size) {
    Tokens ids = {0};
    Error e;
    bool ok = tokenize(t, (const char *)data, size, NULL, size & 3, &ids, &e);
    for (size_t i = 0; i < ids.n; i++)
        if (ids.id[i] < 0 || ids.id[i] >= t->n_vocab) abort();
    freed(ids.id);
    return ok;
}

static bool fuzz_detokenize(const Tokenizer *t, const uint8_t *data, size_t size) {   // 2: an id
    char *out = malloc(t->detokenize_max);
    Detokenizer d = {0};
    for (size_t i = 1; i < size; i += 2)
        detokenize(t, &d, (data[i - 1] << 8 | data[i]) % (t->n_vocab + 8) - 4, out);
    free(out);
    return true;
}

// within limits that make a thousand runs a second
static bool fuzz_template(const Tokenizer *t, const uint8_t *data, size_t size) {
    static char block[1 << 20];
    Str text = {(const char *)data, size}, bos = {"<s>", 3}, eos = {"", 0};
    Rendered r = {0};
    Error e;
    Template run = {.e = &e, .steps = 50000, .memory = sizeof block / 2, .size = sizeof block / 2,
                    .block = block};
    return template_run(&run, text, TALK, size % 5, bos, eos, (int)(size % 3) - 1, size % 2, &r);
}

static const struct FuzzTarget {   // without a function: the input is a file
    const char *name;
    bool (*run)(const Tokenizer *t, const uint8_t *data, size_t size);
} FUZZ_TARGETS[] = {{"loader", NULL}, {"vocabulary", NULL}, {"tokenize", fuzz_tokenize},
                    {"detokenize", fuzz_detokenize}, {"template", fuzz_template}};
static struct {
    const struct FuzzTarget *target;
    char path[96];                           // of the model that is tried
    int file;
    float weights[1 << 16];
    const Tokenizer *tokenizer[COUNT(PRE_TOKENIZERS)];
    size_t tried, worked;
} fuzz = {.target = FUZZ_TARGETS};

// The input is a file up to its weights, and how many bytes these have. A model evaluates 6 tokens;
// a vocabulary gets the end of the input as text, and as ids.
static bool fuzz_file(const uint8_t *data, size_t size) {
    static const int32_t ids[4] = {0, 1, 1, 0};
    Options o = {.window = 5, .chunk = 3, .keep = 1, .threads = 1, .cpu = true,
                 .sampling = {1, .top_p = 0.9f, 0.1f, 1.1f, .top_k = 9, .repeat_last_n = 2}};
    Model m = {0};
    Session s = {0};
    Error e;
    bool loader = fuzz.target == FUZZ_TARGETS;
    uint32_t head = size - 4, rest, n = size < 200 ? size : 200;
    if (size < 4) return false;
    memcpy(&rest, data + head, 4);
    rest %= sizeof fuzz.weights;
    bool ok = pwrite(fuzz.file, data, head, 0) >= 0 && !ftruncate(fuzz.file, head + rest) &&
              pwrite(fuzz.file, fuzz.weights, rest, head) >= 0;
    ok = ok && model_load(&m, fuzz.path, loader, &e);
    if (!m.config.causal) o.chunk = 6;
    if (ok && loader)
        ok = session_open(&s, &m, o, &e) &&
             session_generate(&s, ids, 4, 3, (OnToken){.fn = take_any}, &e);
    else if (ok && m.tokenizer->kind != TOKENIZER_NONE)
        ok = fuzz_tokenize(m.tokenizer, data + size - n, n) &&
             fuzz_detokenize(m.tokenizer, data + size - n, n);
    session_close(&s);
    model_close(&m);
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    long before = living;
    const Tokenizer *t = fuzz.tokenizer[size ? data[size - 1] % COUNT(fuzz.tokenizer) : 0];
    fuzz.worked += fuzz.target->run ? fuzz.target->run(t, data, size) : fuzz_file(data, size);
    fuzz.tried++;
    if (living != before) abort();
    return 0;
}

static void fuzz_seed(const char *text, const char *want) {
    static int n;   // some that end in an error run until the steps are used up
    if (*want != '!') write_file(scratch(text_of("template-%d", n++)), text, strlen(text));
}

static void fuzz_end(void) {
    printf("%s: %zu tried, %zu not refused\n", fuzz.target->name, fuzz.tried, fuzz.worked);
}

// The last argument is the inputs' directory, named after the target. It is given the first inputs:
// each architecture, and behind them each tokenizer alone.
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    static const char *const kinds[] = {"llama", "bert", "gpt2", "t5"};
    if (setjmp(test.end)) abort();
    snprintf(test.dir, sizeof test.dir, "%s", (*argv)[*argc - 1]);
    while (strcmp(strrchr(test.dir, '/') + 1, fuzz.target->name)) fuzz.target++;
    snprintf(fuzz.path, sizeof fuzz.path, "%s.model", test.dir);
    fuzz.file = open(fuzz.path, O_RDWR | O_CREAT, 0600);
    memcpy(fuzz.weights, noise_array(COUNT(fuzz.weights), 0.5f), sizeof fuzz.weights);
    for (size_t i = 0; i < COUNT(SHAPES) + COUNT(PRE_TOKENIZERS); i++) {
        size_t k = i < COUNT(SHAPES) ? i % COUNT(PRE_TOKENIZERS) : i - COUNT(SHAPES);
        const char *names = PRE_TOKENIZERS[k].names, *path = scratch(text_of("%zu", i));
        Writer w = {0};
        Shape shape = SHAPES[i % COUNT(SHAPES)];
        shape.n_layer = 2;
        if (i < COUNT(SHAPES)) put_model(&w, &shape);
        key_vocab(&w, kinds[k < 4 ? k : 2], text_of("%.*s", (int)strcspn(names, " "), names),
                  "a,b,ab,<s>,</s>,<unk>,\u2581,\u2581a,<0xF0>,<0x9F>,<0xZZ>,##b,\xFF\xFE,\u0120,"
                  "\u010A,\u0120a,1,12,\u00E9,\u6F22,,<|im_end|>,x", "a b,\u0120 a,ab \u0120a");
        key_array(&w, "tokenizer.ggml.scores", GGUF_F32, 23, fuzz.weights, 23 * sizeof(float));
        put_keys(&w, "tokenizer.ggml", "bos_token_id=3 cls_token_id=3 seperator_token_id=3 "
                 "token_type=1,2,3,3,3,3,1,2,3,4,5,6,1,2,3,4,5,6,1,2,3,4,5");
        uint32_t rest = w.data.n;
        w.data.n = 0;
        put_int(&w.data, rest, 4);
        write_gguf(&w, path);
        if (i >= COUNT(SHAPES)) fuzz.tokenizer[k] = open_tokenizer(path);
    }
    each_template(read_all("golden/templates.tsv", NULL), fuzz_seed);
    return atexit(fuzz_end);
}
#define main test_main   // libFuzzer has one
#endif

// ==== the table of tests ====

typedef struct { const char *name; void (*fn)(void); } Test;

#define T(name) {#name, test_##name},   // the Makefile reads these rows, too
static const Test TESTS[] = {
    T(formats) T(formats_names) T(formats_grids) T(halves) T(matmul)
    T(attention) T(norms) T(positions) T(activations)
    T(gguf_variants) T(gguf_broken) T(gguf_hostile) T(gguf_shapes) T(gguf_whole)
    T(golden_models) T(few_tokens) T(guesses) T(nextn) T(every_architecture) T(arch_lists) T(ring)
    T(regenerate) T(session_refusals) T(session_damage)
    T(sampler_stages) T(sampler_candidates) T(sampler_choice) T(sampler_session)
    T(unicode_tables) T(tokenizer_goldens) T(tokenizer_rules) T(tokenizer_special)
    T(tokenizer_streaming) T(tokenizer_unigram) T(tokenizer_linear) T(chat_templates) T(allocations)
    T(cli_refusals) T(cli_output) T(cli_completion) T(cli_wishes) T(cli_numbers) T(cli_chat)
    T(cli_terminal) T(cli_editing) T(cli_logits) T(cli_interrupt) T(cli_hosts) T(cli_machines)
#if defined(LLM_METAL) || defined(LLM_CUDA)
    T(metal_kernels) T(metal_models) T(metal_shapes) T(metal_failures)
#endif
};
#undef T

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

static int run_alone(void (*fn)(char **), char **arg) {   // what is no test
    if (!setjmp(test.end)) fn(arg);
    clean_up();
    return test.failures;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    int named = 0, passed = 0, failed = 0;
    if (!strcmp(mode, "llm")) return llm_main(argc - 1, argv + 1);
    signal(SIGINT, SIG_DFL);   // a shell's background job ignores it; the tests press Ctrl-C
    if (!strcmp(mode, "model") && argc > 3) return run_alone(write_bench_model, argv + 2);
    if (!strcmp(mode, "scenario") && argc == 9) return run_alone(run_scenario, argv + 2);
    if (!strcmp(mode, "answer") && argc == 7) return run_alone(run_answer, argv + 2);
#ifdef LLM_CUDA
    Gpu gpu = {0};
    bool found = device_open(&gpu);
    device_close(&gpu);
    if (!found) return puts("there is no NVIDIA GPU\n0 passed, 0 failed, 1 skipped"), 0;
    if (!strcmp(mode, "--bench")) return run_alone(bench_all, argv + 2);
#endif
    for (size_t t = 0; t < COUNT(TESTS) && !strcmp(mode, "--list"); t++) puts(TESTS[t].name);
    if (!strcmp(mode, "--list")) return 0;
    for (int i = 1; i < argc; i++) *(strcmp(argv[i], "--quick") ? &named : &test.quick) += 1;
    const char *tmp = getenv("TMPDIR");
    if (!tmp || strchr(tmp, ' ')) tmp = P_tmpdir;   // commands have $D without quotes
    snprintf(test.dir, sizeof test.dir, "%s/llm-test-%d-%ld", tmp, getpid(), (long)time(NULL));
    if (mkdir(test.dir, 0700)) return perror(test.dir), 1;
#ifdef SOFT_DRIVER   // whose images are of no use to a GPU
    setenv("HOME", test.dir, 1);
    unsetenv("XDG_CACHE_HOME");
#endif
    setenv("LLM", text_of("%s llm --cpu", argv[0]), 0);   // for the tests of the command line
    setenv("S", "golden/story.gguf", 1);
    setenv("G", "golden/archs", 1);
    setenv("D", test.dir, 1);
    setenv("C", scratch("chat"), 1);
    for (size_t t = 0; t < COUNT(TESTS); t++) {
        bool chosen = !named;
        for (int i = 1; i < argc; i++) chosen |= !strcmp(argv[i], TESTS[t].name);
        if (chosen) *(run_test(&TESTS[t]) ? &passed : &failed) += 1;
    }
    if (passed + failed < named) failed += puts("no such test among those named; see --list") > 0;
    if (system("rm -rf \"$D\"")) printf("%s: cannot be removed\n", test.dir);
    free(test.owned);
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed > 0;
}
