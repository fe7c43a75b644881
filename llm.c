// SPDX-License-Identifier: MIT
// llm.c: an engine for language models in GGUF files (llama.cpp's file format), in this file,
// quant.h and, for a GPU, metal.c: a book to be read from the front.
//
//   cc -O3 -march=native llm.c -o llm -lm -lpthread
//   ./llm model.gguf "Once upon a time"
//
// Part I is the model: how tokens become logits, and logits the next token, in plain C. It has what
// a Llama needs; where another family differs it calls, as a rule, a function of Part III. Section
// 7 says in plain loops what the two large operations compute, the matrix product and attention;
// the fast ones are in Part V. With -DLLM_PLAIN every model runs on the plain loops.
//
//   I    the model     base, types, prototypes, ops, forward, session, sampler, generate
//   II   the file      GGUF, architectures, loading
//   III  the others    experts, recurrent layers, latent attention, ...; a session's memory
//   IV   text          tokenizer, chat templates
//   V    speed         threads, products in tiles, attention, AMX, the GPU, selection, guesses
//   VI   main          the command line, conversations, modes; an appendix, Unicode
//
// Short names: n is the number of tokens in a call, or a length, pos the position of the first, l a
// layer, h a head and hd its width, dim the width of the residual stream (the vector per token that
// all layers add to), ff the width of a feed-forward network (FFN); m is a Model, c its Config (in
// the sampler candidates), s a Session (one conversation), w weights (a Layer, a Matrix), e an
// Error. A shape lists its outermost dimension first: x [n][dim] is n rows of dim floats. A prompt
// runs in chunks of tokens, and row i of a chunk is token i's. The KV cache holds the keys and
// values of earlier tokens, so that each is made only once.
//
// As a library: #define LLM_NO_MAIN, #include "llm.c" before any other header. A program calls
//
//   bool model_open(Model *, path, Error *)
//       maps the file. The Model is read-only from then on, so sessions may share it. (On an NVIDIA
//       GPU each session has a copy of the weights, and its calls leave its CUDA context current.)
//   bool session_open(Session *, const Model *, Options, Error *)
//       a Session owns its threads, KV cache and scratch
//   void session_close(Session *), model_close(Model *)
//       in this order, also after a failed open; a zeroed struct is fine
//   const float *session_eval(Session *, ids, n, Error *)
//       returns the logits, a score for each id that may come next, valid until the next call;
//       NULL: an error. ids is the whole text so far; ids that are cached are not run again, the
//       last one excepted
//   int32_t session_sample(Session *, logits)
//       draws the next id, as Options.sampling says
//   bool session_generate(Session *, ids, n, n_predict, OnToken, Error *)
//       evaluates ids, and hands out one id after the other of what follows them
//   tokens_add, tokenize, detokenize, template_render: see Part IV; free(ids.id) frees Tokens
//
// But for asserts only Part VI ends the program, and only Part VI prints. (Loading onto a GPU shows
// progress on a terminal, and a GPU that fails says why on stderr.) A call takes less than 512 KB
// of stack.
#undef _GNU_SOURCE    // a host's flags may define it, too
#define _GNU_SOURCE   // Linux: memmem (templates, modes), strcasestr (tokenizer), sched_getaffinity
#define _FILE_OFFSET_BITS 64   // sizes of files also where an address has 32 bits
#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef LLM_PLAIN
#define QUANT_PLAIN            // no SIMD in the formats either
#endif
#include "quant.h"             // weights in blocks of a few bits each
#define INLINE QUANT_INLINE    // always inlined
#define UNUSED __attribute__((unused))   // perhaps; no warning then
#define API static UNUSED      // functions for programs that include this file

// ==== Part I: the model =========================================================================

// ---- 1. base ----

typedef struct { char text[512]; } Error;

// Writes one line, what was expected and what was found, and returns false: `return fail(e, ...)`.
__attribute__((format(printf, 2, 3))) static bool fail(Error *e, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
    // names come from the file: no control character reaches a terminal, nor does U+0080 to U+009F
    for (uint8_t *c = (uint8_t *)e->text; *c; c++)
        if (*c < ' ' || *c == 127) *c = '?';
        else if (*c == 0xC2 && c[1] >= 0x80 && c[1] < 0xA0) c[0] = c[1] = '?';
    return false;
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct { uint8_t *base; size_t size; } Map;   // bytes: a mapped file, or memory
// hands out pieces of one block of memory (section 23); in bytes; peak: the most that was in use
typedef struct { char *base; uint64_t size, used, peak; } Arena;

typedef struct { int32_t *id; size_t n, room; } Tokens;   // a list of ids that grows by doubling

// ---- 2. the types of a model ----
//
// A model is its numbers, a Config, and its weights: a Layer for each layer, and what comes before
// the first layer and after the last. Part II fills them from a file, and checks all that Part I
// relies on. Each type begins with what a Llama has (Llama 1, 2 and 3). Skip what is below "other
// families": in a Llama it changes nothing.

enum { ROPE_HALVES, ROPE_PAIRS, ROPE_NONE };   // what makes a pair, see rope; a Llama: ROPE_PAIRS
enum { NORM_RMS, NORM_LAYER, NORM_BARE };      // RMSNorm (a Llama); LayerNorm, or without weights
enum { FULL, WINDOWED };   // a layer sees all of the session's window, or fewer tokens (Gemma 3)

typedef struct {
    int n_layer;               // layers that run
    int dim;                   // width of the residual stream
    int n_vocab;               // token ids that have a logit
    int n_ctx;                 // tokens of the longest text in training
    int n_head, hd, vd;        // of layers in general, for Part II; forward reads each Layer's own
    int n_rot[2];              // values of a head that RoPE turns: in FULL, in WINDOWED layers
    float rope_base[2];        // of RoPE's frequencies in these: often 10000 or more
    int norm;                  // NORM_RMS
    float eps;                 // added under the root of a norm
    float attn_scale;          // factor of attention's scores: 1/sqrt(hd)

    // -- other families --
    char name[32];             // of the architecture
    bool verified;             // its logits are checked against llama.cpp's
    int rope, act;             // of layers with RoPE: ROPE_HALVES, _PAIRS; ACT_SILU, ...
    bool limit_first;          // the gate is clamped before its activation, not after (Maple)
    int n_loops;               // how often the file's layers run; n_layer counts all (Nanbeige)
    int n_nextn;               // blocks behind the layers that guess further tokens, see section 22
    bool nextn_raw, nextn_layer_norm;   // they read the bare stream (Step 3.5); end in a LayerNorm
    bool causal;               // a token does not see later ones; false in encoders
    bool encoder;              // norms follow the residual sum, and there are no logits (BERT)
    int pooling;               // of an embedding: -1 unsaid, 0 none, 1 mean, 2 first token, 3 last
    float embd_scale;          // factor of the embeddings (Gemma)
    bool embd_normed;          // embeddings are normed, without weights (Muse)
    float residual_scale;      // factor of what a block adds to the stream (Granite)
    float logit_scale, logit_cap;   // factor of the logits (Granite); their soft cap (Gemma 2) or 0
    int window;                // tokens that a query sees in windowed layers, itself included
    int span;                  // instead, it sees its own span of this many tokens (Llama 4); or 0
    int n_exact;               // up to this many tokens sparse attention sees all (DeepSeek); or 0
    float attn_cap;            // soft cap of the scores (Gemma 2); 0: none
    float clamp_qkv;           // q, k and v are held within -clamp_qkv .. clamp_qkv (OLMo); 0: not
    bool qk_norm_late;         // queries and keys are normed after RoPE, not before (Hunyuan)
    bool values_normed;        // values are normed, too, without weights (Gemma 4)
    bool softplus_gates;       // gates pass softplus, not a sigmoid (Laguna)
    float value_scale;         // factor of attention's result (MiMo 2)
    // positions, see Part III
    bool local_unscaled;       // windowed layers ignore the scaling below, except rope_mag;
    bool local_no_mag;         // they ignore rope_mag, too
    int n_ctx_orig;            // n_ctx before the scaling
    float rope_factor, rope_mag;   // frequencies are divided by it; factor of cosines and sines
    bool yarn;                 // YaRN slows low frequencies only, see rope_scaling
    float yarn_fast, yarn_slow, yarn_log;
    int section[4];            // M-RoPE: pairs for an image's time, height, width; the last: unused
    bool sections_mixed;       // the sections take turns (Qwen3-VL)
    float alibi;               // ALiBi's largest bias (BLOOM), see alibi_slopes; 0: no ALiBi
    float sharpen_scale;       // far out queries grow (Ministral 3), see sharpen; 0: not
    int sharpen_length;        // tokens after which they do
    // experts
    int n_expert, n_used;      // in a layer; that a token uses at most
    int n_group, n_group_used; // experts stand in groups, of which a token uses some (DeepSeek)
    bool routed_first;         // the router reads the stream before attention (SmallThinker)
    int gating;                // SOFTMAX or SIGMOID
    bool weights_normed;       // the weights of the chosen experts are divided by their sum
    float weights_scale;       // factor of their weights
    float router_scale;        // factor of the router's product, if its input is normed (Gemma 4)
    bool inputs_weighed;       // an expert's weight is a factor of its input, not result (Llama 4)
    // recurrent mixers
    int conv;                  // taps of the convolution: inputs that it sees
    int n_key, n_value;        // key heads and value heads
    int dk, dv;                // width of a key, of a value
    bool key_tiled;            // value head h reads key head h % n_key, not h / (n_value / n_key)
    int kda;                   // width of a head whose channels each have a decay (Kimi); or 0
    float kda_lower;           // below 0: a decay is exp(kda_lower * sigmoid(..)); 0: no bound
    // latent attention (DeepSeek), layers' own inputs (Gemma 4)
    int lora;                  // width of the latent
    int latent_hd, latent_vd;  // widths of the queries and values that it stands for
    int per_layer;             // width of each layer's own input; 0: none
} Config;

// A view of a weight matrix: a tensor, or some rows of one (q of a fused q, k, v; an expert)
typedef struct {
    const uint8_t *data;       // [rows] rows of cols weights; NULL: there is none
    int type;                  // of the weights, as ggml (llama.cpp's library) numbers the formats
    int64_t rows, cols;
    // -- other families: NULL or 0 in a Llama --
    const float *bias;         // [rows], or [experts][rows]
    const float *scale;        // [1] factor of the product, or [experts]
    size_t step;               // bytes from one expert's matrix to the next
    int x_step, out_step;      // floats from one token's input (output) to the next; 0: cols (rows)
} Matrix;

// The weights w [n] of a norm and, in other families, biases b [n]. What is normed:
//   group = 0,  n = dim           a row of the stream: a Llama has no other norms
//   group = hd, n = hd            each head of a query or key, all with the same weights
//   group = hd, n = n_head * hd   each head, with weights of its own
//   group = 0,  n = n_head * hd   all heads as one row
typedef struct { const float *w, *b; int n, group; float eps; } Norm;   // eps 0: the model's

typedef struct {
    int n_head, n_kv;          // query heads, key-value heads; n_kv 0: no attention
    int hd, vd;                // width of a head's query and key; of its value (in a Llama hd)
    int n_rot;                 // Config's of its kind, FULL or WINDOWED
    int rope;                  // ROPE_PAIRS; ROPE_NONE in layers without RoPE (SmolLM3)
    int window;                // tokens that a query sees; 0: Options.window, a FULL layer
    int ff;                    // width of the FFN, or of an expert
    // in the order of use
    Norm attn_norm;            // [dim]
    Matrix q;                  // [n_head * hd][dim]
    Matrix k;                  // [n_kv * hd][dim]
    Matrix v;                  // [n_kv * vd][dim]
    Matrix o;                  // [dim][n_head * vd]
    Norm ffn_norm;             // [dim]
    Matrix gate, up;           // [ff][dim] each
    Matrix down;               // [dim][ff]

    // -- other families --
    int source;                // the layer whose cache it reads; in a Llama itself
    bool side_by_side;         // attention and FFN read the same stream (GPT-NeoX)
    Norm attn_post_norm, ffn_post_norm;   // [dim] of attention's result, of the FFN's (Gemma 2)
    Norm attn_norm_2, last_norm;   // [dim] after attention (JinaBERT), after the layer (Nanbeige)
    const float *out_scale;    // [1] factor of the stream after the layer (Gemma 4), or NULL
    Norm q_norm, k_norm;       // of heads, see Norm (Qwen 3); n 0: none
    Matrix attn_gate;          // [n_head or n_head * vd][dim] gates of attention, if q has none
    const float *sinks;        // [n_head] a score beside those of the keys (gpt-oss), or NULL
    float limit_ffn, limit_experts;   // of act(gate) and up (Step 3.5); 0: none
    struct { float alpha_n, alpha_p, beta, eps; } xielu;   // (Apertus)
    // experts: gate, up and down hold those of all, a step apart
    int n_used;                // experts that a token uses
    Matrix router;             // [n_expert][dim]
    const float *router_bias;  // [n_expert] for the choice only, or NULL
    Matrix shared_gate, shared_up, shared_down;   // an FFN for every token
    Matrix shared_router;      // [1][dim] makes its weight
    Matrix squeeze, unsqueeze;   // [wide][dim], [dim][wide]: experts read fewer numbers
    Norm router_norm, expert_norm, expert_post, shared_post;   // [dim] (Gemma 4, see load_experts)
    // latent attention, where there is a k_b
    Matrix q_a;                // [q.cols][dim]: q is two products
    Norm q_a_norm, latent_norm;   // [q.cols], [lora]
    Matrix k_b, v_b;           // of each head [lora][latent_hd - n_rot], [latent_vd][lora]
    // a recurrent mixer
    int mixer;                 // MIX_NONE, or one in place of attention or beside it
    Matrix conv_in;            // [channels][dim] what passes the convolution
    const float *conv, *conv_bias;   // [channels][taps], [channels]
    Matrix z, z_a;             // [n_value * dv][..] gates; where z is two products, the first
    Matrix alpha, alpha_a;     // [n_value][..] decays; where alpha is two products, the first
    Matrix beta, beta_alpha;   // [n_value][dim] how strongly it writes; both, if in one matrix
    const float *dt_bias, *a, *skip;   // [n_value]; KDA: dt_bias [n_value][dk]
    Norm delta_norm;           // [dv]
    Matrix delta_out;          // [dim][n_value * dv]
    // its own input
    Matrix input_gate, input_proj;   // [per_layer][dim], [dim][per_layer]
    Norm input_norm;           // [dim]
    Norm embd_norm, state_norm, out_norm;   // of a block that guesses further tokens: [dim]
    Matrix joint, embd, output;   // [dim][2 * dim] makes its input; its own, or the model's
} Layer;

typedef struct {
    Config config;
    Matrix embd;               // [n_vocab or more][dim]
    Layer *layers;             // [n_layer], and blocks that guess further tokens
    Norm out_norm;             // [dim]
    Matrix output;             // [n_vocab][dim]; it may be embd
    struct Gguf *gguf;         // the file
    struct Tokenizer *tokenizer;   // see Part IV
    Tokens suppressed;         // ids that are never sampled
    const float *freqs;        // [n_rot/2] divisors of RoPE's frequencies (Llama 3.1), or NULL

    // -- other families --
    Map *owned;                // [n_owned] copies of weights that had to be changed
    size_t n_owned;
    const float *freqs_long, *freqs_short;   // [n_rot/2] divisors, of which one is taken (Phi 3)
    Norm embd_norm;            // [dim] of the embeddings (BLOOM)
    Matrix pos_embd;           // [n_ctx][dim] learned positions (GPT-2), or none
    Matrix type_embd;          // its first row is added to each embedding (BERT), or none
    Matrix dense[2];           // of the pooled embedding, one after the other (Gemma)
    Matrix layer_embd, layer_proj;   // [ids][n_layer * per_layer], [n_layer * per_layer][dim]
    Norm layer_norm;           // [per_layer]
    Error nextn_idle;          // why the file's nextn blocks do not run, or ""
} Model;

// ---- 3. the types of a session ----

typedef struct {               // no defaults: all 0 is greedy
    float temp;                // temperature; 0: greedy
    int top_k;                 // 0: off
    float top_p;               // 1: off; 0: the best alone
    float min_p;               // 0: off
    float repeat_penalty;      // 0, 1: off
    int repeat_last_n;         // tokens that the penalty sees, the prompt's too; 0: none, -1: all
    uint64_t seed;
} Sampling;

// Guesses (speculative decoding, section 40): up to FEW tokens, the last one and guesses of those
// to come, run through the model in one pass. Each gets the same logits, to the last bit, as if it
// ran alone, so guesses never change the text.
enum { FEW = 8 };

typedef struct {               // 0: the default, here in brackets
    int window;                // tokens that a query sees, itself included (n_ctx, at most 4096)
    int keep;                  // first tokens that all see, except in layers of smaller windows (0)
    int chunk;                 // tokens of the prompt that run at once (512; on a GPU more)
    int threads;               // (all CPUs)
    int draft;                 // most tokens that are guessed at once, at most FEW - 1 (0: none)
    bool cpu, gpu_block;       // no GPU; on a GPU, half a layer in one launch
    int gpu_layers;            // most layers whose FFN, too, a GPU runs (as many as fit)
    Sampling sampling;         // (greedy)
} Options;

enum { LOGIT_ROWS = 16 };      // rows of logits that are made at once: their buffer is large

// What one layer remembers of earlier tokens: their keys and values, in a ring of rows, see
// cache_row. (A recurrent mixer remembers the last inputs of its convolution, and a state.)
typedef struct {
    uint16_t *k;               // [n_kv][rows][hd] f16, with RoPE applied
    uint16_t *v;               // [n_kv][rows][vd] f16; latent attention: v == k
    int32_t *pos;              // [rows] position in each row, -1: empty
    int rows;
    int window, keep;          // a query sees `window` tokens and the first `keep`
    float *conv, *state;       // [taps-1 + FEW][channels]; the recurrent state, see Part III
} Cache;

typedef struct { float logit; int32_t id; } Candidate;   // for the next token (or an expert group)
typedef struct { bool (*fn)(void *ctx, int32_t id); void *ctx; } OnToken;   // fn: false stops
typedef struct Pool Pool;      // threads

typedef struct Session {
    const Model *m;
    Options o;
    Pool *pool;
    Map kv, scratch;           // memory of the caches; of all other buffers
    Cache *cache;              // [n_cache]
    int n_cache;               // n_layer, and the blocks that guess further tokens, if they run
    Tokens history;            // the text evaluated so far, and room for one more token
    uint64_t rng;
    struct Gpu *gpu;           // see metal.c; NULL: the CPU does the work
    // unless NULL, called before each chunk and at the end; false stops. Of the text's n tokens
    // `reused` were cached before session_run, and `done` are cached now
    bool (*on_chunk)(void *ctx, int reused, int done, int n);
    void *ctx;
    // what forward works on, for its row functions (section 4)
    const int32_t *ids;        // [n] tokens of the chunk
    int n, pos, l;             // how many; position of the first; layer
    // its buffers, for the n tokens of a chunk. Those marked 1, those marked 2 and those marked 3
    // are never in use together, so they lie in the same memory
    float *x;                  // [n][dim] the residual stream
    float *normed;             // [n][dim] the normed copy of x that attention or the FFN reads
    float *out;                // [n][dim] what attention or the FFN adds to x
    float *q, *k, *v;          // 1: [n][n_head][hd], [n][n_kv][hd], [n][n_kv][vd]
    float *att;                // 1: [n][n_head][vd] what the heads give, before the matrix o
    float *gate, *up;          // 2: [n][ff]
    float *logits;             // 3: [LOGIT_ROWS][n_vocab]
    Candidate *candidates;     // 3: [n_vocab] of the sampler
    float *angles[2];          // [n][n_rot] cos, sin pairs, of FULL layers and of WINDOWED ones
    double *freq[2];           // [n_rot/2] radians per position
    float rope_mag[2];         // a factor of the cosines and sines: 1 in a Llama
    Arena op_scratch;          // of matmul and attention

    // -- a short way for the sampler, section 39; guesses, section 40 --
    struct Best *best;         // the largest of each 256 logits, see session_best
    size_t n_best;             // so many rows of logits have their `best` from a GPU
    int guesses;               // the last tokens of the chunk that are only guessed
    float *states;             // [chunk][dim] what nextn blocks read, see section 22
    int nextn_pos, loss, rest, pause;   // see nextn_follow; nextn_pays
    // -- other families -- rows: choices of experts that run at once, n or, if that is more, n_used
    float *slopes;             // [n_head] of ALiBi
    float *inputs;             // [n][n_layer][per_layer] each layer's own
    float *mix;                // [n][n_head][2 * hd] q with gates, or latent queries; of recurrent
                               // mixers [conv-1 + n][channels]
    float *z;                  // [n][..] gates; of latent attention the input of q
    float *strength, *decay;   // [n][n_value] of the delta rule; decay in KDA [n][n_value][dk]
    float *route;              // [n][n_expert] the logits of a router
    int32_t *chosen;           // [n][n_used] a token's experts, the best first: its choices
    float *weight;             // [n][n_used] of the choices
    int32_t *order;            // [n * n_used] indices of all choices, sorted by expert
    float *gathered, *expert_out;     // [rows][dim or wide] what experts read; their results
    float *squeezed, *squeezed_sum;   // [n][wide] the experts' input, squeezed; their sum
    float *recurrent;          // [n_recurrent] conv and state of all layers
    size_t n_recurrent, n_kept;   // floats; n_kept: of a layer
    float *saved;              // [n_recurrent] a copy, the snapshot
    int saved_pos;             // where the snapshot was made; -1: there is none
    float *kept, *trial;       // [n_layer][n_kept] the guesses' inputs; one layer's state for them
    int seen;                  // tokens of the history that the states have seen: no guesses
} Session;

// ---- 4. what other parts provide to forward ----

// A row function does a step of forward for row i of a chunk; arg is what the step reads, a Norm, a
// Layer or NULL. RowFn is a function's type: `static RowFn f` declares f. each_row calls one for i
// = 0 .. n-1, on all threads.
typedef void RowFn(Session *s, const void *arg, size_t i);
static void each_row(Session *s, RowFn *fn, const void *arg, int n);

// A matrix product of n tokens, out [n][rows] = x [n][cols] * transposed w: see plain_matmul.
// matmul runs k <= MAX_JOBS of them at the same time, and takes scratch from the arena.
enum { MAX_JOBS = 64 };
typedef struct { const Matrix *w; const float *x; float *out; int n; } Matmul;
static void matmul(Pool *p, Arena *a, const Matmul *jobs, int k);

// Rows of numbers
static void narrow(const float *x, int n, uint16_t *to);   // floats to f16
static inline float exp_fast(float x);   // e^x, relative error 1e-7; 0 below -87.7, inf above 88.4
// the sum of x[i] - mean or, if `squares`, of (x[i] - mean)^2; in 16 parts, to be vector code
static float sum16(const float *x, int n, float mean, bool squares);
static void cache_finite(uint16_t *v, int n, uint16_t *key);   // clears a bad v [n], see qkv_row

// Functions of Part III that do nothing in a Llama, like see_more and check_more below
static void embed_more(Session *s, float *x, size_t i);
static void make_layer_inputs(Session *s), keep_states(Session *s);
static bool other_layer(Session *s);   // forward_layer for other families; false: it is a Llama's
static void after_rope(const Session *s, float *q, float *k, int pos);
static void cap_logits(const Session *s, size_t count);

// ---- 5. ops ----
//
// What happens between the matrix products, on one row x of n values.

// RMSNorm (arXiv 1910.07467) is x / sqrt(mean(x^2) + eps) * weight. LayerNorm first subtracts the
// mean, and in the end adds a bias. Each group of the row is normed by itself.
static void norm(float *out, const float *x, int n, const Norm *p, int kind, float eps) {
    int group = p->group ? p->group : n;
    if (p->eps > 0) eps = p->eps;
    for (int start = 0; start < n; start += group, x += group, out += group) {
        float mean = kind == NORM_RMS ? 0 : sum16(x, group, 0, false) / group;
        float scale = 1 / sqrtf(sum16(x, group, mean, true) / group + eps);
        for (int i = 0; i < group; i++) out[i] = (x[i] - mean) * scale;
        int at = p->n ? start % p->n : 0;   // its first weight: groups may share them, or have none
        if (p->w)
            for (int i = 0; i < group; i++) out[i] *= p->w[at + i];
        if (p->b)
            for (int i = 0; i < group; i++) out[i] += p->b[at + i];
    }
}

// RoPE (arXiv 2104.09864) turns each pair of values by its angle at this position, so that the
// product of a query and a key depends on how far apart they are. turn [n_rot]: cos, sin of each.
// Pair i begins at i * step; its second value is `gap` after the first.
INLINE void turn_pairs(float *x, const float *turn, int n_rot, int step, int gap) {
    for (int i = 0; i < n_rot / 2; i++) {
        float cosine = turn[2 * i], sine = turn[2 * i + 1];
        float *a = x + i * step, *b = a + gap, old = *a;
        *a = old * cosine - *b * sine;
        *b = old * sine + *b * cosine;
    }
}

static void rope(float *x, const float *turn, int n_rot, int pairing) {
    if (pairing == ROPE_PAIRS) turn_pairs(x, turn, n_rot, 2, 1);            // (0, 1), (2, 3), ...
    if (pairing == ROPE_HALVES) turn_pairs(x, turn, n_rot, 1, n_rot / 2);   // (0, n_rot/2), ...
}

// SwiGLU (arXiv 2002.05202): out = silu(gate) * up, where silu(x) is x * sigmoid(x)
static void swiglu(float *out, const float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++) out[i] = gate[i] / (1 + exp_fast(-gate[i])) * up[i];
}

// row r of a matrix as floats [cols]
static void matrix_row(const Matrix *w, int64_t r, float *out) {
    quant_dequantize(w->type, w->data + r * quant_row_bytes(w->type, w->cols), out, w->cols);
}

// ---- 6. forward ----
//
// Prefill (a chunk of the prompt) and decode (one new token, matrix times vector) are one function:
// n tokens at positions pos .. pos+n-1 pass all layers, and the residual stream is left in s->x.
//
//   x = embd[id]                        [n][dim]
//   each layer:  x += attention(norm(x))        tokens look at each other
//                x += ffn(norm(x))              each token by itself
//   logits = output * norm(x)           [n_vocab], in output_logits
//
// Attention and the FFN read s->normed, and leave in s->out what is added to the stream. Products
// and attention run for all n tokens at once, the other steps token by token: a row function each.
// What forward and forward_layer call stands below them, in the order of use. A family's name
// beside a line says for whom the line is there: it changes nothing in a Llama.

static RowFn embed_row, angles_row, norm_row, qkv_row, swiglu_row, add_row;
static void forward_layer(Session *s), attention_block(Session *s), attend(Session *s);
static void ffn(Session *s);

static void product(Session *s, const Matrix *w, const float *x, float *out) {
    matmul(s->pool, &s->op_scratch, &(Matmul){w, x, out, s->n}, 1);
}

static void forward(Session *s, const int32_t *ids, int n, int pos) {
    assert(n > 0 && n <= s->o.chunk);
    s->ids = ids;
    s->n = n;
    s->pos = pos;
    each_row(s, embed_row, NULL, n);
    each_row(s, angles_row, NULL, n);
    make_layer_inputs(s);   // Gemma 4
    for (s->l = 0; s->l < s->m->config.n_layer; s->l++) forward_layer(s);
    keep_states(s);         // Qwen3.5 guesses with them
}

static void forward_layer(Session *s) {   // the chunk passes layer s->l
    const Layer *w = &s->m->layers[s->l];
    int n = s->n;
    if (other_layer(s)) return;   // in section 15

    // x += attention(norm(x))
    each_row(s, norm_row, &w->attn_norm, n);
    attention_block(s);
    each_row(s, add_row, NULL, n);

    // x += ffn(norm(x))
    each_row(s, norm_row, &w->ffn_norm, n);
    ffn(s);
    each_row(s, add_row, NULL, n);
}

static void embed_row(Session *s, UNUSED const void *arg, size_t i) {   // x = the token's embedding
    float *x = s->x + i * s->m->config.dim;
    matrix_row(&s->m->embd, s->ids[i], x);
    embed_more(s, x, i);   // Gemma, GPT-2, BERT, BLOOM
}

// the cosines and sines of a token's position, for FULL layers and for WINDOWED ones (which a Llama
// does not have: its n_rot[WINDOWED] is 0)
static void angles_row(Session *s, UNUSED const void *arg, size_t i) {
    const int *n_rot = s->m->config.n_rot;
    for (int kind = FULL; kind <= WINDOWED; kind++) {
        float *turn = s->angles[kind] + i * n_rot[kind];
        for (int j = 0; j < n_rot[kind] / 2; j++) {
            double angle = (s->pos + (int)i) * s->freq[kind][j];
            turn[2 * j] = cos(angle) * s->rope_mag[kind];
            turn[2 * j + 1] = sin(angle) * s->rope_mag[kind];
        }
    }
}

static void norm_row(Session *s, const void *arg, size_t i) {   // normed = norm(x)
    const Config *c = &s->m->config;
    norm(s->normed + i * c->dim, s->x + i * c->dim, c->dim, arg, c->norm, c->eps);
}

static void attention_block(Session *s) {   // out = o * attention(q, k, v of normed)
    const Layer *w = &s->m->layers[s->l];
    int n = s->n;
    Matmul qkv[] = {{&w->q, s->normed, s->q, n},
                    {&w->k, s->normed, s->k, n},
                    {&w->v, s->normed, s->v, n}};
    matmul(s->pool, &s->op_scratch, qkv, 3);
    each_row(s, qkv_row, w, n);
    attend(s);   // the cache has all keys of the chunk now; attention_sees hides later ones
    product(s, &w->o, s->att, s->out);
}

// The row of a position in the cache. A layer's KV cache is `keep` pinned rows, and a ring of rows
// for the window and one chunk (or FEW, if that is more): so writing a chunk overwrites no row that
// one of its own queries must still see. A row stores its position, which alone decides who sees
// the row. With 2 pinned rows, a window of 4 and chunks of 2 (as if FEW were 2), at position 9:
//
//   row    0 1 | 2 3 4 5 6 7
//   pos    0 1 | 8 9 4 5 6 7
//
// 8 and 9 have taken the rows of 2 and 3. Query 9 sees 6 to 9, and 0 and 1, because models lean on
// the first tokens (arXiv 2309.17453). Keys were rotated by their position, so nothing moves when
// the ring wraps, and generation goes on without a limit.
static int cache_row(const Cache *cache, int pos) {
    int keep = cache->keep;
    return pos < keep ? pos : keep + (pos - keep) % (cache->rows - keep);
}

// Turns queries and keys by RoPE, and writes keys and values to the cache. Part V multiplies values
// that a query does not see by 0, but 0 * NaN is NaN. So cache_finite makes the bad numbers of a
// value 0, and its key NaN: then only queries that see the row get a NaN.
static void qkv_row(Session *s, const void *arg, size_t i) {
    const Layer *w = arg;
    Cache *cache = &s->cache[s->l];
    int pos = s->pos + i, row = cache_row(cache, pos);
    int n_made = w->k.rows / w->hd;   // n_kv, but 0 in a layer of Gemma 4 that has no keys
    float *q = s->q + i * w->n_head * w->hd, *k = s->k + i * n_made * w->hd;
    float *v = s->v + i * n_made * w->vd;
    const float *turn = s->angles[w->window ? WINDOWED : FULL] + i * w->n_rot;
    for (int h = 0; h < w->n_head; h++) rope(q + h * w->hd, turn, w->n_rot, w->rope);
    for (int h = 0; h < n_made; h++) rope(k + h * w->hd, turn, w->n_rot, w->rope);
    after_rope(s, q, k, pos);   // Ministral 3, Hunyuan
    for (int h = 0; h < n_made; h++) {
        size_t at = (size_t)h * cache->rows + row;
        uint16_t *to_k = cache->k + at * w->hd, *to_v = cache->v + at * w->vd;
        narrow(k + h * w->hd, w->hd, to_k);
        narrow(v + h * w->vd, w->vd, to_v);
        cache_finite(to_v, w->vd, to_k);
    }
    cache->pos[row] = pos;
}

// attention of n queries over one cache, see plain_head; scratch is taken from the arena
typedef struct {
    const float *q;            // [n][n_head][hd], with RoPE applied
    float *out;                // [n][n_head][vd]
    const uint16_t *k, *v;     // [n_kv][rows][hd], [n_kv][rows][v_step] f16
    const int32_t *pos_k;      // [rows] position in each row, -1: empty
    int rows;
    int pos, n;                // queries at pos .. pos+n-1
    int n_head, n_kv, hd, vd, v_step;   // v_step: vd, or more in latent attention
    int window, keep;          // a query sees `window` keys, and the first `keep`
    float scale;               // of the scores
    // -- other families: 0 or NULL in a Llama --
    int ahead, span_start;     // see attention_sees
    float softcap;             // of the scores
    const float *sinks, *slopes;   // [n_head] see plain_head, final_score
} Attention;
static void attention(Pool *p, Arena *arena, const Attention *a);
static void see_more(const Session *s, Attention *a);   // sets what is not 0 in other families

static void attend(Session *s) {   // s->att = attention of s->q over the layer's cache
    const Layer *w = &s->m->layers[s->l];
    const Cache *cache = &s->cache[s->l];
    Attention a = {.q = s->q, .out = s->att, .k = cache->k, .v = cache->v, .pos_k = cache->pos,
                   .rows = cache->rows, .pos = s->pos, .n = s->n, .n_head = w->n_head,
                   .n_kv = w->n_kv, .hd = w->hd, .vd = w->vd, .v_step = w->vd,
                   .window = cache->window, .keep = cache->keep,
                   .scale = s->m->config.attn_scale};
    see_more(s, &a);   // Gemma 2, gpt-oss, BERT, ...
    attention(s->pool, &s->op_scratch, &a);
}

static void add_row(Session *s, UNUSED const void *arg, size_t i) {   // x += out
    int dim = s->m->config.dim;
    float *x = s->x + i * dim, *out = s->out + i * dim;
    for (int j = 0; j < dim; j++) x[j] += out[j];
}

static void ffn(Session *s) {   // out = down * (silu(gate) * up)
    const Layer *w = &s->m->layers[s->l];
    Matmul in[] = {{&w->gate, s->normed, s->gate, s->n}, {&w->up, s->normed, s->up, s->n}};
    matmul(s->pool, &s->op_scratch, in, 2);
    each_row(s, swiglu_row, w, s->n);
    product(s, &w->down, s->up, s->out);
}

static void swiglu_row(Session *s, const void *arg, size_t i) {   // up = silu(gate) * up
    const Layer *w = arg;
    float *gate = s->gate + i * w->ff, *up = s->up + i * w->ff;
    swiglu(up, gate, up, w->ff);
}

// s->logits [n][n_vocab] = output * norm(x) of n <= LOGIT_ROWS rows of the last chunk, from row
// `first` on. Leaves their norms in s->normed.
static void output_logits(Session *s, int first, int n) {
    const Config *c = &s->m->config;
    assert(n <= LOGIT_ROWS);
    Matmul out = {&s->m->output, s->normed + (size_t)first * c->dim, s->logits, n};
    for (int i = 0; i < n; i++) norm_row(s, &s->m->out_norm, first + i);
    matmul(s->pool, &s->op_scratch, &out, 1);
    cap_logits(s, (size_t)n * c->n_vocab);   // Gemma 2, Granite
}

// ---- 7. what matmul and attention compute, in plain loops ----

static size_t input_step(const Matrix *w) { return w->x_step ? w->x_step : w->cols; }
static size_t output_step(const Matrix *w) { return w->out_step ? w->out_step : w->rows; }

// out [n][rows] = scale * x [n][cols] * transposed w [rows][cols] + bias. A row of weights is
// unpacked once for all n tokens, which is why a prompt runs in chunks. row [cols] is scratch.
// (Part V's products first round x to int8 where weights are blocks, as ggml does: section 29.)
static UNUSED void plain_matmul(const Matmul *job, float *row) {
    const Matrix *w = job->w;
    float scale = w->scale ? *w->scale : 1;
    for (int64_t r = 0; r < w->rows; r++) {
        matrix_row(w, r, row);
        float bias = w->bias ? w->bias[r] : 0;
        for (int i = 0; i < job->n; i++) {
            const float *x = job->x + i * input_step(w);
            float sum = 0;
            for (int64_t j = 0; j < w->cols; j++) sum += row[j] * x[j];
            job->out[i * output_step(w) + r] = sum * scale + bias;
        }
    }
}

// Does a query see a key? Both are positions. A query sees a window that ends with itself, and the
// first `keep` keys; in an encoder `ahead` later keys, too. It sees nothing before span_start, 0
// except in Llama 4, and so never the key -1 of an empty row. The conditions are joined by & and |
// because && and || are branches, which would keep loops over keys from becoming vector code.
static inline int attention_sees(const Attention *a, int query, int key) {
    int near = (query - key < a->window) | (key < a->keep);
    return (key >= a->span_start) & (key - query <= a->ahead) & near;
}

// A score with what other families do to it: a soft cap, and ALiBi, which subtracts a penalty that
// grows with the distance. A key that is not seen has the score -INFINITY, and so the weight 0.
static float final_score(const Attention *a, float score, int head, int query, int key) {
    if (!attention_sees(a, query, key)) return -INFINITY;
    if (a->softcap > 0) score = a->softcap * tanhf(score / a->softcap);
    if (a->slopes) score -= a->slopes[head] * abs(query - key);
    return score;
}

// out = softmax(scale * q . k) v over the keys that a query sees, for head h of query i. Groups of
// heads share keys and values (GQA). score [rows] is scratch.
static void plain_head(const Attention *a, int i, int h, float *score) {
    size_t at = (size_t)i * a->n_head + h, kv = h / (a->n_head / a->n_kv);
    const float *q = a->q + at * a->hd;
    const uint16_t *k = a->k + kv * a->rows * a->hd, *v = a->v + kv * a->rows * a->v_step;
    float *out = a->out + at * a->vd;
    float top = a->sinks ? a->sinks[h] : -FLT_MAX, sum = 0;   // not -inf, because inf - inf is NaN
    for (int r = 0; r < a->rows; r++, k += a->hd) {
        float dot = 0;
        for (int j = 0; j < a->hd; j++) dot += q[j] * quant_f16_to_f32(k[j]);
        score[r] = final_score(a, dot * a->scale, h, a->pos + i, a->pos_k[r]);
        top = fmaxf(top, score[r]);
    }
    memset(out, 0, a->vd * sizeof *out);
    for (int r = 0; r < a->rows; r++, v += a->v_step) {
        float weight = expf(score[r] - top);   // at most 1: nothing overflows
        sum += weight;
        if (weight == 0) continue;
        for (int j = 0; j < a->vd; j++) out[j] += weight * quant_f16_to_f32(v[j]);
    }
    if (a->sinks) sum += expf(a->sinks[h] - top);   // gpt-oss: one more score, without a value
    if (sum == 0) return;                           // all scores are -inf: out stays 0
    for (int j = 0; j < a->vd; j++) out[j] /= sum;
}

// ---- 8. session ----

// Memory (section 23). A plan takes zeroed buffers from an arena; place_plan runs the plan twice,
// to count the bytes and to place the buffers. What scratch matmul and attention need depends on
// all layers, so plan_scratch first makes dry runs of forward: each_row does nothing, and matmul
// and attention only count bytes.
typedef void Plan(Session *s, Arena *a);
static bool place_plan(Session *s, Plan *plan, Map *map, const char *what, Error *e);
static Plan plan_caches, plan_scratch;   // of the KV caches; of forward's buffers
static bool tokens_room(Tokens *t, size_t n);   // room for n ids in all; false: out of memory
static int count_cpus(void);           // how many threads this process should use
static Pool *pool_open(int threads);   // NULL: they cannot be started
static void pool_close(Pool *p);       // p may be NULL

// A GPU (metal.c) runs the model on a Session's buffers; if its memory is too small, the CPU runs
// some FFNs. gpu_forward and gpu_logits return false if there is no GPU, or it failed: then the CPU
// does the work. gpu_forward also makes the logits of up to LOGIT_ROWS tokens from `first` on.
static int gpu_attach(Session *s);   // sets s->gpu; returns the GPU's default chunk; 0: no GPU
static void gpu_open(Session *s), gpu_close(Session *s);   // gpu_open: the buffers are there
static bool gpu_forward(Session *s, const int32_t *ids, int n, int pos, int first);
static bool gpu_logits(Session *s, int first, int n);
static void gpu_store(Session *s, bool states);   // to the GPU: positions in caches, and states

// These stand in Part III, because guesses, recurrent states and other limits meet there
struct Request;
static int reusable(const Session *s, int p);   // how many of the first p tokens can stay cached?
static int next_chunk(Session *s, const struct Request *r, int p, bool prompt);   // its length
static void chunk_seen(Session *s), forget_states(Session *s, int p), limit_options(Session *s);
static bool check_more(const Session *s, int n, Error *e);   // can the model run n tokens?
static const float *hidden_rows(Session *s, int first, int n, Error *e);   // norm(x) (--embed)
// slows frequencies down where the file says so; returns the factor of cosines and sines
static float rope_scaling(const Model *m, int kind, int session_window, double *freq);

// forgets positions p and later
static void session_truncate(Session *s, int p) {
    forget_states(s, p);
    for (int l = 0; l < s->n_cache; l++)
        for (int i = 0; i < s->cache[l].rows; i++)
            if (s->cache[l].pos[i] >= p) s->cache[l].pos[i] = -1;
    s->history.n = p;
    gpu_store(s, p == 0);   // if p is 0, the states were cleared, too
}

API void session_close(Session *s) {
    gpu_close(s);
    pool_close(s->pool);
    if (s->kv.base) munmap(s->kv.base, s->kv.size);
    if (s->scratch.base) munmap(s->scratch.base, s->scratch.size);
    free(s->cache);
    free(s->history.id);
    *s = (Session){0};
}

// Sets freq [n_rot/2] of one kind of layers, FULL or WINDOWED: base^(-2i / n_rot) radians per
// position for pair i, in double, because at position 100,000 a float angle is off by 0.005. (Phi
// 3's divisors depend on the session's window.) Returns the factor of cosines and sines.
static float rope_frequencies(const Model *m, int kind, int session_window, double *freq) {
    int n_rot = m->config.n_rot[kind];
    double base = m->config.rope_base[kind];
    for (int i = 0; i < n_rot / 2; i++) freq[i] = pow(base, -2.0 * i / n_rot);
    return rope_scaling(m, kind, session_window, freq);
}

API bool session_open(Session *s, const Model *m, Options o, Error *e) {
    *s = (Session){.m = m, .o = o, .rng = o.sampling.seed, .n_cache = m->config.n_layer};
    if (!s->o.window) s->o.window = smaller(m->config.n_ctx, 4096);
    if (!s->o.threads) s->o.threads = count_cpus();
    limit_options(s);
    double rows = (double)s->o.window + o.chunk + o.keep;   // an int must hold their sum
    if (rows > INT32_MAX / 2 || o.window < 0 || o.chunk < 0 || o.keep < 0)
        return fail(e, "a window of %d, a chunk of %d and %d pinned tokens are out of range",
                    s->o.window, o.chunk, o.keep);
    s->cache = calloc(s->n_cache, sizeof *s->cache);
    if (!s->cache) return fail(e, "out of memory");
    s->pool = pool_open(s->o.threads);
    if (!s->pool) return fail(e, "cannot start %d threads", s->o.threads);
    int chunk = o.cpu ? 0 : gpu_attach(s);
    if (!s->o.chunk) s->o.chunk = chunk ? chunk : 512;
    if (!place_plan(s, plan_caches, &s->kv, "KV cache; try a smaller -c", e) ||
        !place_plan(s, plan_scratch, &s->scratch, "scratch; try a smaller -b", e))
        return false;
    session_truncate(s, 0);   // marks all rows empty: new memory is 0, as if they held position 0
    for (int kind = FULL; kind <= WINDOWED; kind++)
        s->rope_mag[kind] = rope_frequencies(m, kind, s->o.window, s->freq[kind]);
    if (s->gpu) gpu_open(s);
    return true;
}

// What to evaluate: a text, ids [n]. Each token from number `from` on gets a row: logits [n_vocab]
// of what follows the token or, if `hidden`, its normed residual stream [dim] (for an embedding).
// LOGIT_ROWS rows are made at once; fn, unless NULL, gets each in order, and returns false to stop.
typedef bool OnRow(void *ctx, int i, const float *row);   // i: the token's position
typedef struct Request {
    const int32_t *ids;
    int n, from;
    bool hidden;
    OnRow *fn;
    void *ctx;
    bool exact;    // a row with any NaN is an error, and not only one that is all NaN
    int guesses;   // the last tokens that are only guessed: their rows are not checked
} Request;

static bool check_ids(const Session *s, const int32_t *ids, int n, Error *e);
static int session_reuse(Session *s, const Request *r);
static bool give_rows(Session *s, const Request *r, int pos, int n, int first, bool gpu, Error *e);

// Evaluates a text chunk by chunk, but for the tokens that the caches hold.
static bool session_run(Session *s, Request r, Error *e) {
    bool own = r.ids == s->history.id;   // session_generate passes the history, longer by new ids
    if (!check_ids(s, r.ids, r.n, e)) return false;
    if (!tokens_room(&s->history, r.n + 1)) return fail(e, "out of memory for %d tokens", r.n);
    if (own) r.ids = s->history.id;      // realloc may have moved it
    int n, reused = session_reuse(s, &r);
    bool prompt = !own && r.n - reused > 1;      // what next_chunk may take a snapshot in
    for (int p = reused; p < r.n; p += n) {
        n = next_chunk(s, &r, p, prompt);        // s->o.chunk, or as many as are left
        if (s->on_chunk && !s->on_chunk(s->ctx, reused, p, r.n)) return fail(e, "interrupted");
        // the first token of the chunk that gets a row; n: no token does
        int first = r.from > p ? smaller(r.from - p, n) : 0;
        bool gpu = gpu_forward(s, r.ids + p, n, p, r.hidden ? n : first);   // n: no logits
        if (!gpu) forward(s, r.ids + p, n, p);
        memmove(s->history.id + p, r.ids + p, n * sizeof *r.ids);
        s->history.n = p + n;
        chunk_seen(s);
        if (!give_rows(s, &r, p, n, first, gpu, e)) return false;
    }
    return !s->on_chunk || s->on_chunk(s->ctx, reused, r.n, r.n) || fail(e, "interrupted");
}

API const float *session_eval(Session *s, const int32_t *ids, int n, Error *e) {
    Request last = {.ids = ids, .n = n, .from = n - 1};   // one row, which stays in s->logits
    return session_run(s, last, e) ? s->logits : NULL;
}

static bool check_ids(const Session *s, const int32_t *ids, int n, Error *e) {
    if (n < 1) return fail(e, "nothing to evaluate: no tokens");
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= s->m->embd.rows)
            return fail(e, "token id %d is out of range; the model has %lld", ids[i],
                        (long long)s->m->embd.rows);
    return check_more(s, n, e);   // GPT-2
}

// Cuts the caches back to the longest prefix of the text that can be reused, and returns where
// evaluation goes on: at r->from or before, because logits are wanted from there on.
//
//   decode          the text is the history and one more token: there is nothing to cut
//   prefix reuse    both begin alike: the history is cut back to where they differ
//   full prefill    nothing is alike, or rows that are still needed were overwritten
static int session_reuse(Session *s, const Request *r) {
    int p = 0, n_history = s->history.n;
    while (p < n_history && p < r->n && s->history.id[p] == r->ids[p]) p++;
    p = reusable(s, smaller(p, r->from));
    if (p < n_history) session_truncate(s, p);
    return p;
}

// Fails if the row [n] of token i has nothing but NaN or, if exact, any NaN.
static bool check_row(const float *row, size_t n, bool exact, int i, Error *e) {
    size_t k = 0;
    while (k < n && isnan(row[k])) k++;
    bool good = k < n;   // there is a number
    for (k = 0; k < n && good && exact; k++) good = !isnan(row[k]);
    return good || fail(e, "at token %d the model yields %s NaN: its weights may be damaged", i,
                        exact ? "a" : "nothing but");
}

// Makes the rows of a chunk of n tokens at pos, from row `first` on, LOGIT_ROWS at a time, and
// gives them to r->fn. gpu: the GPU has already made the first LOGIT_ROWS.
static bool give_rows(Session *s, const Request *r, int pos, int n, int first, bool gpu, Error *e) {
    size_t width = r->hidden ? s->m->config.dim : s->m->config.n_vocab;
    for (int i = first; i < n; i += LOGIT_ROWS, gpu = false) {
        int rows = smaller(n - i, LOGIT_ROWS);
        const float *row = r->hidden ? hidden_rows(s, i, rows, e) : s->logits;
        if (!row) return false;
        bool made = r->hidden || gpu || gpu_logits(s, i, rows);
        if (!made) output_logits(s, i, rows);
        for (int k = 0; k < rows; k++, row += width) {
            int token = pos + i + k;
            bool guess = token >= r->n - r->guesses;
            if (!guess && !check_row(row, width, r->hidden || r->exact, token, e)) return false;
            if (r->fn && !r->fn(r->ctx, token, row)) return fail(e, "interrupted");
        }
    }
    return true;
}

// ---- 9. sampler ----
//
// From logits to the next token, in stages. First ids with their logits become candidates: all, or
// little more than the k best. Recent ids lose some of their logit (the penalty), banned ones all.
// Then temperature, top-k, top-p and min-p change, sort or drop candidates, c [n]; one of those
// left is drawn, at temperature 0 the best. (llama.cpp's temperature comes last.)

// what is sampled
typedef struct {
    const float *logits;
    size_t n;                  // logits
    const struct Best *best;   // the largest of each 256 logits: most others need not be read (39)
    Tokens recent, banned;     // ids that the penalty lowers; ids that are never sampled
    float penalty;
} Draw;

// In section 39. sort_top brings the k best candidates to the front, in order. sample_candidates
// makes candidates of the k ids that will be best after penalty and bans, and of a few more (k 0:
// of all), in the order of ids, with logits not yet penalised; returns how many.
static void sort_top(Candidate *c, size_t n, size_t k);
static size_t sample_candidates(Candidate *c, const Draw *d, int k);
static Candidate *find_candidate(Candidate *c, size_t n, int32_t id);   // NULL: it is none
static const struct Best *session_best(Session *s, const float *logits);   // for Draw

// A positive logit is divided by the penalty, a negative one multiplied. Banned ids have the
// penalty INFINITY: their logits become -INFINITY, as do those that are NaN.
static float lowered(float logit, float penalty) {
    if (penalty == INFINITY || isnan(logit)) return -INFINITY;
    return logit * (logit > 0 ? 1 / penalty : penalty);
}

// Makes ids less likely. An id counts once, however often it occurs, because its new logit is
// computed from the old one in `logits`. The candidates are in the order of ids.
static void sample_penalty(Candidate *c, size_t n, const float *logits, Tokens ids, float penalty) {
    for (size_t i = 0; i < ids.n; i++) {
        Candidate *one = find_candidate(c, n, ids.id[i]);
        if (one) one->logit = lowered(logits[one->id], penalty);
    }
}

// A temperature below 1 makes the distribution sharper, one above 1 flatter.
static void sample_temperature(Candidate *c, size_t n, float temp) {
    for (size_t i = 0; i < n; i++) c[i].logit /= temp;
}

// keeps the k best, in order, unless k is 0 or above n
static size_t sample_top_k(Candidate *c, size_t n, int k) {
    if (k <= 0 || (size_t)k > n) return n;
    sort_top(c, n, k);
    return k;
}

static float best_logit(const Candidate *c, size_t n) {
    float top = c[0].logit;
    for (size_t i = 1; i < n; i++) top = c[i].logit > top ? c[i].logit : top;
    return top;
}

// Softmax without its division: a weight is exp(logit - best), a candidate's share weight / total.
// Adds up weights until they are enough (INFINITY: all); returns how many that takes.
static size_t sum_until(const Candidate *c, size_t n, double enough, double *sum) {
    float top = best_logit(c, n);
    size_t i = 0;
    *sum = 0;
    do {
        *sum += exp_fast(c[i++].logit - top);
    } while (i < n && *sum < enough);
    return i;
}

// Keeps the fewest of the best that together have a share p of the probability. To find them it
// sorts 128 candidates, which are nearly always enough, else eight times as many, and so on.
static size_t sample_top_p(Candidate *c, size_t n, float p) {
    double total, sum;
    if (p >= 1) return n;
    sum_until(c, n, INFINITY, &total);
    for (size_t k = 128;; k *= 8) {
        size_t sorted = smaller(k, n);
        sort_top(c, n, sorted);
        size_t kept = sum_until(c, sorted, p * total, &sum);
        if (sum >= p * total || sorted == n) return kept;
    }
}

// drops what is less likely than p times the best: exp(logit - best) < p
static size_t sample_min_p(Candidate *c, size_t n, float p) {
    if (p <= 0) return n;
    float least = best_logit(c, n) + logf(fminf(p, 1));
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

// c has room for d->n candidates
static int32_t sample(const Sampling *o, Candidate *c, const Draw *d, uint64_t *rng) {
    double total, sum;
    bool greedy = o->temp < 1e-30f;   // 0, or so small that logits / temp overflow
    int k = greedy ? 1 : o->top_k;
    // a penalty below 1 raises logits, and might bring in an id that is not among the k best now
    size_t n = sample_candidates(c, d, d->penalty < 1 ? 0 : k);
    sample_penalty(c, n, d->logits, d->recent, d->penalty);
    sample_penalty(c, n, d->logits, d->banned, INFINITY);
    if (!greedy) sample_temperature(c, n, o->temp);
    n = sample_top_k(c, n, k);
    if (greedy) return c->id;
    n = sample_top_p(c, n, o->top_p);
    n = sample_min_p(c, n, o->min_p);
    sum_until(c, n, INFINITY, &total);
    // the first at which the running sum reaches a random share of the total
    return c[sum_until(c, n, random_unit(rng) * total, &sum) - 1].id;
}

API int32_t session_sample(Session *s, const float *logits) {
    const Sampling *o = &s->o.sampling;
    float penalty = o->repeat_penalty > 0 ? o->repeat_penalty : 1;
    size_t n = penalty == 1 ? 0 : o->repeat_last_n;   // -1, all, is the largest size_t
    Tokens recent = s->history;
    if (n < recent.n) recent = (Tokens){recent.id + recent.n - n, n, n};
    Draw d = {logits, s->m->config.n_vocab, session_best(s, logits), recent, s->m->suppressed,
              penalty};
    return sample(o, s->candidates, &d, &s->rng);
}

// ---- 10. generate ----

static bool token_is_eog(const struct Tokenizer *t, int32_t id);   // does generation end here?
static bool generate_guessing(Session *s, const int32_t *ids, int n, int most, OnToken f, Error *e);

// Evaluates ids [n], and hands up to n_predict ids that follow (-1: no limit; 0: none) to on_token,
// one by one. An end-of-generation id ends the text, and is not handed out. A new id is written
// behind the session's history, and evaluated as the end of that text to get the next one.
API bool session_generate(Session *s, const int32_t *ids, int n, int n_predict, OnToken on_token,
                          Error *e) {
    if (s->o.draft > 0) return generate_guessing(s, ids, n, n_predict, on_token, e);   // section 40
    int made = 0;
    do {
        const float *logits = session_eval(s, ids, n, e);
        if (!logits) return false;
        if (n_predict == 0) return true;
        int32_t id = session_sample(s, logits);
        if (token_is_eog(s->m->tokenizer, id) || !on_token.fn(on_token.ctx, id)) return true;
        s->history.id[n++] = id;
        ids = s->history.id;
    } while (++made != n_predict);
    return true;
}

// ==== Part II: the file =========================================================================
//
// In: the path of a file. Out: a Model, most of whose weights point into the mapped file, or one
// line that says what is wrong. Read ARCHS and KEYS first (section 12). Section 11 reads the file's
// lists of keys and tensors. Section 13 fills Config and each Layer from them: model_load,
// weights_load, load_layer. Load_ functions of Part III load what only other families have. A
// caller that prefixes an inner function's message passes it a separate Error, `why`.

#include <errno.h>             // what Part I does not need
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "llm.c reads numbers of a file as they lie there: its CPU must be little endian"
#endif

// ---- 11. GGUF ----
//
// A GGUF file is, in this order and little endian (a string is a 64-bit length and its bytes):
//
//   magic "GGUF" | version | number of tensors | number of metadata entries
//   metadata     key, type, value                   "llama.block_count", 4 (u32), 32
//   tensors      name, n_dims, ne[n_dims], type, offset of its data
//   padding, and the data of all tensors
//
// The file is not trusted. The Reader of its bytes fails once and stays failed, so that one check
// at the end of a step is enough; no count may exceed what the file's bytes could hold; each tensor
// must lie inside the file. Strings and weights point into it; what must change is copied first.

#define COUNT(array) (sizeof(array) / sizeof *(array))
static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// realloc for count items; NULL also where their bytes overflow a size_t
static void *resize(void *p, uint64_t count, size_t size) {
    return count > SIZE_MAX / size ? NULL : realloc(p, count * size);
}

static bool tokens_room(Tokens *t, size_t n) {
    if (n <= t->room) return true;
    size_t room = larger(n, 2 * t->room);
    int32_t *id = resize(t->id, room, sizeof *id);
    if (!id) return false;
    t->id = id;
    t->room = room;
    return true;
}

// Appends an id. False: out of memory, and the list is as it was.
API bool tokens_add(Tokens *t, int32_t id) {
    if (!tokens_room(t, t->n + 1)) return false;
    t->id[t->n++] = id;
    return true;
}

typedef struct { const char *s; size_t n; } Str;   // bytes of the file or of a text; no NUL
#define STR_ARG(a) (int)((a).n < 100 ? (a).n : 100), (a).s   // for "%.*s", at most 100 bytes

static bool str_eq(Str a, const char *b) { return a.n == strlen(b) && !memcmp(a.s, b, a.n); }

static bool str_cut(Str *s, const char *head) {   // takes head off the front, if it is there
    size_t n = strlen(head);
    if (s->n < n || memcmp(s->s, head, n)) return false;
    *s = (Str){s->s + n, s->n - n};
    return true;
}

// Finds a word in a list such as "llama* mistral3* ernie4_5-moe". Returns a pointer to what follows
// the word, a star, a blank or the end; NULL if the list lacks the word. The caller gives the star
// its meaning: the name of a verified model in ARCHS, of one that needs the key in KEYS.
static const char *find_str(Str word, const char *words) {
    if (!word.n || memchr(word.s, 0, word.n) || memchr(word.s, ' ', word.n)) return NULL;
    for (; words && *words; words += strspn(words, " ")) {
        if (!strncmp(words, word.s, word.n) && strchr("* ", words[word.n])) return words + word.n;
        words += strcspn(words, " ");
    }
    return NULL;
}

enum { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STR,
       GGUF_ARR, GGUF_U64, GGUF_I64, GGUF_F64, GGUF_TYPES };

static const uint8_t gguf_size[GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};   // bytes

typedef struct {               // a metadata entry
    Str key;
    uint32_t type, elem;       // GGUF_ARR and the type of its elements; otherwise they are equal
    uint64_t n;                // how many values
    const uint8_t *v, *end;    // their bytes
    bool used;                 // loading has asked for it
} Meta;

typedef struct {
    Str name;
    int type;                  // ggml's number of the format
    int n_dims, ne[4];         // values in each dimension, the innermost first
    uint64_t offset;           // of its data, in the data of the file
    const uint8_t *data;
    bool used;                 // loading has bound it to a weight
} Tensor;

typedef struct Gguf {
    Meta *meta;        // [n_meta] sorted by key, of the first file
    Tensor *tensors;   // [n_tensors] sorted by name, of all files
    Map *maps;         // [n_maps] one per split file
    size_t n_meta, n_tensors, n_maps;
} Gguf;

typedef struct { const uint8_t *p, *end; bool bad; } Reader;

// the next n bytes; NULL if fewer are left, and for every call after that
static const void *take(Reader *in, uint64_t n) {
    if (n > (uint64_t)(in->end - in->p)) in->bad = true;
    if (in->bad) return NULL;
    in->p += n;
    return in->p - n;
}

static uint64_t read_bytes(Reader *in, size_t n) {   // a number of n = 1, 2, 4 or 8 bytes
    uint64_t x = 0;
    const void *p = take(in, n);
    if (p) memcpy(&x, p, n);
    return x;
}

static Str read_str(Reader *in) {
    uint64_t n = read_bytes(in, 8);
    const char *s = take(in, n);
    return s ? (Str){s, n} : (Str){"", 0};
}

static bool read_meta(Reader *in, Meta *m, Error *e) {
    *m = (Meta){.key = read_str(in)};
    m->type = m->elem = read_bytes(in, 4);
    m->n = 1;
    if (m->type == GGUF_ARR) {   // element type, count, elements
        m->elem = read_bytes(in, 4);
        m->n = read_bytes(in, 8);
        if (m->elem == GGUF_ARR) return fail(e, "arrays of arrays are not supported");
    }
    m->v = in->p;
    if (in->bad) return fail(e, "the file ends inside the metadata");
    if (m->elem >= GGUF_TYPES)
        return fail(e, "unknown %s type %u", m->type == GGUF_ARR ? "element" : "value", m->elem);
    if (m->n > (uint64_t)(in->end - in->p))   // an element takes a byte at least
        return fail(e, "%llu values do not fit into the file", (unsigned long long)m->n);
    take(in, m->n * gguf_size[m->elem]);     // nothing for strings, whose size is 0 in the table
    for (uint64_t i = 0; m->elem == GGUF_STR && i < m->n && !in->bad; i++) read_str(in);
    m->end = in->p;
    return !in->bad || fail(e, "its value runs past the end of the file");
}

static bool read_tensor(Reader *in, Tensor *t, size_t align, Error *e) {
    static const char *const foreign[] = {
        [4] = "Ollama's first MXFP4", "Q4_3", [31] = "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8",
        [36] = "I2_S of bitnet.cpp or IQ4_NL_4_4", "I8_S of bitnet.cpp or IQ4_NL_4_8",
        "TL1 of bitnet.cpp or IQ4_NL_8_8"};
    uint64_t ne[4] = {1, 1, 1, 1};
    *t = (Tensor){.name = read_str(in)};
    t->n_dims = read_bytes(in, 4);
    for (int i = 0; i < t->n_dims && i < 4; i++) ne[i] = read_bytes(in, 8);
    t->type = read_bytes(in, 4);
    t->offset = read_bytes(in, 8);
    if (in->bad) return fail(e, "the file ends inside the list of tensors");
    if (t->n_dims < 1 || t->n_dims > 4)
        return fail(e, "1 to 4 dimensions expected, found %d", t->n_dims);
    for (int i = 0; i < 4; i++) {
        if (ne[i] > INT32_MAX)   // 0: the tensor is a mark that holds nothing
            return fail(e, "dimension %d is %.0f, expected 0 to %d", i, (double)ne[i], INT32_MAX);
        t->ne[i] = ne[i];
    }
    if (t->offset % align)
        return fail(e, "offset %.0f is not a multiple of the alignment %zu", (double)t->offset,
                    align);
    if (t->type >= 0 && t->type < (int)COUNT(foreign) && foreign[t->type])
        return fail(e, "type %d is %s, which GGUF does not have; get or make another file", t->type,
                    foreign[t->type]);
    if (!quant_name(t->type)) return fail(e, "unknown tensor type %d", t->type);
    if (t->ne[0] && !quant_row_bytes(t->type, t->ne[0]))
        return fail(e, "rows of %d weights are not whole %s blocks", t->ne[0], quant_name(t->type));
    return true;
}

static double tensor_bytes(const Tensor *t) {   // as a double, which no hostile sizes overflow
    return (double)quant_row_bytes(t->type, t->ne[0]) * t->ne[1] * t->ne[2] * t->ne[3];
}

// compares two Meta or two Tensors, both of which begin with their name
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

static Meta *gguf_find(const Gguf *g, const char *key) {   // NULL: there is no such key
    return bsearch(&(Str){key, strlen(key)}, g->meta, g->n_meta, sizeof *g->meta, name_compare);
}

static Tensor *gguf_tensor(const Gguf *g, const char *s) {   // NULL: there is no such tensor
    return bsearch(&(Str){s, strlen(s)}, g->tensors, g->n_tensors, sizeof(Tensor), name_compare);
}

// the i-th value of m, which is a number or an array of numbers
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
    default:       return x.u;   // unsigned, or a bool
    }
}

static int64_t meta_int(const Meta *m, uint64_t i) {   // within +-1e15, where doubles are exact
    return fmin(fmax(meta_float(m, i), -1e15), 1e15);
}

static int64_t gguf_int(const Gguf *g, const char *key, int64_t otherwise) {
    const Meta *m = gguf_find(g, key);
    return m && gguf_size[m->type] ? meta_int(m, 0) : otherwise;
}

static Str meta_str(const Meta *m) {   // {NULL, 0} if it is no string
    return m && m->type == GGUF_STR ? read_str(&(Reader){m->v, m->end, false}) : (Str){NULL, 0};
}

static Str gguf_str(const Gguf *g, const char *key) { return meta_str(gguf_find(g, key)); }

static bool map_file(Map *map, const char *path, Error *e) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_NONBLOCK);   // a pipe by that name must not block
    if (fd < 0) return fail(e, "%s", strerror(errno));
    bool regular = !fstat(fd, &st) && S_ISREG(st.st_mode);
    uint64_t size = regular ? st.st_size : 0;
    map->size = size < SIZE_MAX ? size : SIZE_MAX;   // which cannot be mapped
    void *p = map->size ? mmap(NULL, map->size, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    close(fd);   // the map stays
    if (!regular) return fail(e, "not a regular file");
    if (p == MAP_FAILED)
        return fail(e, "mmap of %.0f MB: %s", size / 1048576.0, strerror(errno));
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

// Reads part i of a model and adds its tensors; metadata is kept from part 0 alone.
static bool gguf_read(Gguf *g, const Map *map, int i, Error *e) {
    Error why;
    Reader in = {map->base, map->base + map->size, false};
    uint32_t magic = read_bytes(&in, 4), version = read_bytes(&in, 4);
    uint64_t n_tensors = read_bytes(&in, 8), n_meta = read_bytes(&in, 8);
    if (magic != 0x46554747)   // "GGUF"
        return fail(e, "not a GGUF file: it starts with %08x, '%.4s'", __builtin_bswap32(magic),
                    (const char *)map->base);
    if (version && !(version << 8)) return fail(e, "a big-endian file; want little endian");
    if (version != 2 && version != 3)
        return fail(e, "GGUF version %u; versions 2 and 3 are supported", version);
    // a tensor's entry takes at least 32 bytes, a key with its value at least 13
    if (n_tensors > map->size / 32 || n_meta > map->size / 13)
        return fail(e, "%llu tensors and %llu metadata keys do not fit into %zu bytes",
                    (unsigned long long)n_tensors, (unsigned long long)n_meta, map->size);
    Meta *m = resize(g->meta, g->n_meta + n_meta + 1, sizeof *m);
    if (m) g->meta = m;
    Tensor *t = resize(g->tensors, g->n_tensors + n_tensors + 1, sizeof *t);
    if (t) g->tensors = t;
    if (!m || !t) return fail(e, "out of memory");

    m += g->n_meta;      // the entries of this part follow those of earlier parts
    t += g->n_tensors;
    for (size_t k = 0; k < n_meta; k++)
        if (!read_meta(&in, &m[k], &why))
            return fail(e, "key %.*s: %s", STR_ARG(m[k].key), why.text);
    if (!sort_names(m, n_meta, sizeof *m, "key", e)) return false;
    Gguf part = {.meta = m, .n_meta = n_meta};
    bool said = gguf_find(&part, "general.alignment");
    int64_t align = gguf_int(&part, "general.alignment", said ? 0 : 32);   // 0: it is no number
    int64_t no = gguf_int(&part, "split.no", i);
    if (align < 8 || align > 1 << 20 || (align & (align - 1)))
        return fail(e, "general.alignment is %.0f, want a power of two from 8 on", (double)align);
    if (no != i)
        return fail(e, "split.no says part %d, expected %d: renamed? Open *-00001-of-%05d.gguf",
                    (int)no + 1, i + 1, (int)gguf_int(&part, "split.count", 0));
    for (size_t k = 0; k < n_tensors; k++)
        if (!read_tensor(&in, &t[k], align, &why))
            return fail(e, "tensor %.*s: %s", STR_ARG(t[k].name), why.text);
    size_t start = (in.p - map->base + align - 1) / align * align;   // where the data begin
    if (n_tensors && t->offset) return fail(e, "tensor %.*s: not at offset 0", STR_ARG(t->name));
    for (Tensor *a = t; a < t + n_tensors; a++) {
        double size = tensor_bytes(a), room = fmax(0, (double)map->size - start - a->offset);
        double padded = ceil(size / align) * align, gap = padded;   // to the next tensor
        if (a + 1 < t + n_tensors) gap = (double)a[1].offset - a->offset;
        if (gap != padded)   // we misread this one
            return fail(e, "tensor %.*s: %.0f bytes of %s, but the offset of %.*s leaves it %.0f",
                        STR_ARG(a->name), size, quant_name(a->type), STR_ARG(a[1].name), gap);
        if (size > room)
            return fail(e, "tensor %.*s: %.0f bytes, the file has %.0f: is it truncated?",
                        STR_ARG(a->name), size, room);
        a->data = map->base + start + a->offset;
    }
    g->n_tensors += n_tensors;
    if (i == 0) g->n_meta = n_meta;
    return true;
}

// Opens path and, if that is NAME-00001-of-00003.gguf, all parts; the metadata says how many.
static bool gguf_open(Gguf *g, const char *path, Error *e) {
    char file[4096], tail[64];
    Error why;
    int64_t count = 1;
    int stem = 0;   // length of NAME
    *g = (Gguf){0};
    for (int i = 0; i < count; i++) {
        snprintf(file, sizeof file, "%.*s-%05d-of-%05d.gguf", stem, path, i + 1, (int)count);
        const char *name = i ? file : path;
        Map *maps = realloc(g->maps, (i + 1) * sizeof *maps);
        if (!maps) return fail(e, "out of memory");
        g->maps = maps;
        maps[g->n_maps++] = (Map){0};
        if (i) snprintf(tail, sizeof tail, " (part %d of %d)", i + 1, (int)count);
        if (!map_file(&maps[i], name, &why) || !gguf_read(g, &maps[i], i, &why))
            return fail(e, "%s%s: %s", name, i ? tail : "", why.text);
        count = larger(gguf_int(g, "split.count", 1), 1);   // merged parts leave a 0
        if (count < 1 || count > 99999) return fail(e, "%s: split.count is out of range", path);
        snprintf(tail, sizeof tail, "-00001-of-%05d.gguf", (int)count);
        stem = larger(strlen(path), strlen(tail)) - strlen(tail);
        if (count > 1 && strcmp(path + stem, tail))
            return fail(e, "%s: part 1 of %d must be named *%s, rename it", path, (int)count, tail);
    }
    return sort_names(g->tensors, g->n_tensors, sizeof(Tensor), "tensor", &why) ||
           fail(e, "%s: %s", path, why.text);
}

// ---- 12. architectures ----
//
// Two tables and a file's tensors say what a model is. A row of ARCHS has what an architecture sets
// in Config. A row of KEYS is a number that files give, with the architectures that read it. The
// tensors say the rest (biases, norms of queries and keys, fused QKV, experts, sinks, tied output).
//
// To add an architecture:
//   1. Read the values off its reference implementation. Add its name to a row of ARCHS that has
//      them, or add a row. The first row that fits counts; without .period no layer has a window.
//   2. Add the name to the rows of KEYS that it reads and not all architectures do: without it a
//      key is ignored, and only those of RoPE, attention and experts are noted.
//   3. Add the name to the rows of NEEDS: without it such a tensor may be missing.
//   4. A new key gets a row in KEYS, a tensor with a new name a line in its block's load_ function,
//      a new difference a field of Config or Layer, or a flag if only loading needs it. What a GPU
//      cannot run, gpu_lacks in metal.c names.
//   5. Add a row to SHAPES in test.c, whose tests ask for what is left.
// RoPE's pairing is the usual mistake, and position 0 cannot show it.
//
// Every row was measured against llama.cpp on random f32 models: logits agree to an NMSE of 1e-6.
// golden/ has llama.cpp's logits for the names with a star. The names in files follow no rule.

enum { ACT_SILU, ACT_GELU, ACT_RELU2, ACT_SWIGLU_OAI, ACT_RELU, ACT_XIELU, ACT_COUNT };
enum { MIX_NONE, MIX_DELTA, MIX_SPACE, MIX_CONV };   // Layer.mixer
enum { SOFTMAX = 1, SIGMOID };                       // Config.gating
enum { NO_LAYER = 255 };                             // Arch.period

enum {   // what only loading needs to know
    EMBD_SQRT = 1 << 0,           // embeddings are multiplied by sqrt(dim)
    LOCAL_ROPE = 1 << 1,          // only windowed layers have RoPE
    ROPE_TUNED = 1 << 2,          // no RoPE where rope.scaling.finetuned is false
    LOGIT_DIVIDE = 1 << 3,        // logit_scale divides
    MUP = 1 << 4,                 // scales follow from width and depth where the file does not say
    SCALE_BY_DIM = 1 << 5,        // attention scale is 1/sqrt(dim / n_head), not 1/sqrt(hd)
    SCALE_BY_HEAD = 1 << 6,       // attention scale is 1/hd, not 1/sqrt(hd)
    YARN_SCORES = 1 << 7,         // RoPE scaling sharpens the scores, too
    BOTH_WAYS = 1 << 8,           // a token also sees later ones: half a window on each side
    FULL_FIRST = 1 << 9,          // the first layer of a period sees all, not the last
    LOCAL_SINKS = 1 << 10,        // only windowed layers have sinks
    MAY_BE_PARALLEL = 1 << 11,    // without a norm before it the FFN reads what attention reads
    GATE = 1 << 12,               // attention has gates in a tensor of its own
    ROPE_FIXED = 1 << 13,         // all of a head turns, base 10000, unscaled, whatever a file says
    HALF_ROTATED = 1 << 14,       // layers that see all rotate half of rope.dimension_count
    QK_NORM_BARE = 1 << 15,       // QK norm without weights in layers with RoPE
    WINDOW_SET = 1 << 16,         // a window is 4096, whatever the file says
    SHARED_AVERAGED = 1 << 17,    // the mean of experts and shared expert is taken, not the sum
    FFN_OR_NOTHING = 1 << 18,     // a layer without an FFN is empty
    YARN_LOG = 1 << 19,           // YARN_SCORES, and YaRN with a yarn_log leaves the cosines alone
};

typedef struct {
    const char *names;         // "llama* mistral3*"
    Config c;                  // what is not zero; a file's keys override it
    int flags;
    uint8_t period;            // one in `period` sees all, others a window; 0: all; NO_LAYER: none
    uint8_t no_rope;           // every no_rope-th layer has no RoPE
    uint8_t n_layer;           // the row is for models of this many layers; 0: for any
} Arch;

static const Arch ARCHS[] = {   // the first row with a file's name and number of layers is taken
    {"llama* mistral3* ernie4_5-moe", .c = {.rope = ROPE_PAIRS, .weights_normed = true}},
    {"llama4*", .c = {.rope = ROPE_PAIRS, .span = 8192, .window = 8192, .gating = SIGMOID,
     .qk_norm_late = true, .inputs_weighed = true, .sharpen_scale = 0.1f, .sharpen_length = 8192},
     .flags = QK_NORM_BARE, .period = 4, .no_rope = 4},
    {"maincoder", .c = {.rope = ROPE_PAIRS, .qk_norm_late = true}},
    {"refact", .c = {.rope = ROPE_NONE, .alibi = 8}},
    {"cogvlm", .flags = ROPE_FIXED},
    {"deepseek2-ocr", .flags = ROPE_FIXED | YARN_SCORES},
    {"eurobert", .flags = BOTH_WAYS},
    {"plamo3", .c = {.rope_base[WINDOWED] = 10000, .local_unscaled = true}, .period = 8},
    {"muse-glimmer*", .c = {.rope = ROPE_PAIRS, .embd_normed = true, .local_unscaled = true,
     .logit_cap = 30}, .flags = GATE | LOCAL_ROPE, .period = 4},
    {"laguna*", .c = {.softplus_gates = true, .local_unscaled = true, .local_no_mag = true,
     .gating = SIGMOID}, .flags = GATE | FULL_FIRST, .period = 4},
    {"afmoe", .c = {.gating = SIGMOID}, .flags = GATE | EMBD_SQRT, .period = 4, .no_rope = 4},
    {"spark2_5", .c = {.act = ACT_GELU}, .flags = GATE, .period = 4},
    {"step35*", .c = {.gating = SIGMOID, .rope_base[WINDOWED] = 10000, .local_unscaled = true,
     .nextn_raw = true}, .flags = GATE | HALF_ROTATED, .period = 4},
    {"kimi-linear*", .c = {.rope = ROPE_PAIRS, .weights_normed = true}, .no_rope = 1},
    {"bailingmoe3*", .c = {.rope = ROPE_PAIRS}, .flags = GATE},
    {"llama-embed neo-bert", .c = {.rope = ROPE_PAIRS, .weights_normed = true}, .flags = BOTH_WAYS},
    {"baichuan", .c = {.rope = ROPE_PAIRS}, .n_layer = 32},
    {"baichuan", .c = {.rope = ROPE_NONE, .alibi = 8}, .n_layer = 40},
    {"baichuan mamba2*", .c = {.rope = ROPE_NONE}},
    {"bailingmoe chatglm deepseek ernie4_5 glm4 internlm2 nanbeige* xverse",
     .c = {.rope = ROPE_PAIRS}},
    {"deci*", .c = {.rope = ROPE_PAIRS}, .flags = FFN_OR_NOTHING},
    {"smollm3", .c = {.rope = ROPE_PAIRS}, .no_rope = 4},
    {"granite granitehybrid*", .c = {.rope = ROPE_PAIRS, .weights_normed = true},
     .flags = ROPE_TUNED | LOGIT_DIVIDE},
    {"granitemoe", .c = {.rope = ROPE_PAIRS, .weights_normed = true}, .flags = LOGIT_DIVIDE},
    {"granite_swa", .c = {.rope = ROPE_PAIRS, .weights_normed = true},
     .flags = LOGIT_DIVIDE, .period = 4},
    {"minicpm", .c = {.rope = ROPE_PAIRS, .weights_normed = true}, .flags = LOGIT_DIVIDE | MUP},
    {"minicpm3", .flags = MUP},
    {"arcee plm", .c = {.act = ACT_RELU2, .rope = ROPE_PAIRS}},
    {"apertus*", .c = {.act = ACT_XIELU}},
    {"olmo", .c = {.norm = NORM_BARE, .rope = ROPE_PAIRS}},
    {"command-r", .c = {.norm = NORM_LAYER, .rope = ROPE_PAIRS}, .flags = MAY_BE_PARALLEL},
    {"cohere2", .c = {.norm = NORM_LAYER, .rope = ROPE_PAIRS},
     .flags = LOCAL_ROPE | MAY_BE_PARALLEL, .period = 4},
    {"cohere2moe*", .c = {.rope = ROPE_PAIRS, .gating = SIGMOID},
     .flags = LOCAL_ROPE | FULL_FIRST | MAY_BE_PARALLEL | SHARED_AVERAGED, .period = 4},
    {"exaone4", .c = {.window = 4096}, .flags = LOCAL_ROPE, .period = 4, .n_layer = 64},
    {"phi3* qwen2* qwen3* bailingmoe2 exaone exaone4 falcon-h1* olmoe", .flags = 0},   // on halves
    {"openelm paddleocr pangu-embedded qwen qwen2moe qwen2vl seed_oss", .flags = 0},
    {"plamo", .flags = MAY_BE_PARALLEL},
    {"qwen3vl", .c = {.sections_mixed = true}},
    {"glm4moe* dots1 hy_v3", .c = {.gating = SIGMOID}},
    {"exaone-moe", .flags = LOCAL_ROPE, .period = 4},
    {"smallthinker*", .c = {.act = ACT_RELU, .weights_normed = true, .routed_first = true},
     .flags = FULL_FIRST | WINDOW_SET | LOCAL_ROPE, .period = 4},
    {"maple*", .c = {.weights_normed = true, .limit_first = true},
     .flags = LOCAL_ROPE, .period = 4},
    {"mellum", .period = 4,
     .c = {.weights_normed = true, .local_unscaled = true, .local_no_mag = true}},
    {"mimo2", .c = {.weights_normed = true, .gating = SIGMOID, .rope_base[WINDOWED] = 10000,
     .local_unscaled = true, .nextn_raw = true}, .flags = LOCAL_SINKS, .period = 6},
    {"minimax-m2", .c = {.weights_normed = true, .gating = SIGMOID}},
    {"phimoe* qwen3moe* qwen3next* lfm2moe*", .c = {.weights_normed = true}},
    {"qwen3vlmoe", .c = {.weights_normed = true, .sections_mixed = true}},
    {"qwen35* qwen35moe", .c = {.key_tiled = true, .weights_normed = true, .sections_mixed = true}},
    {"hunyuan-dense hunyuan-moe hunyuan_vl", .c = {.qk_norm_late = true, .weights_normed = true}},
    {"olmo2", .c = {.local_unscaled = true, .local_no_mag = true}, .period = 4},
    {"gpt-oss*", .c = {.act = ACT_SWIGLU_OAI, .weights_normed = true}, .period = 2},
    {"gemma*", .c = {.act = ACT_GELU}, .flags = EMBD_SQRT},
    {"gemma2*", .c = {.act = ACT_GELU, .window = 4096, .attn_cap = 50, .logit_cap = 30},
     .flags = EMBD_SQRT | SCALE_BY_DIM, .period = 2, .n_layer = 46},
    {"gemma2*", .c = {.act = ACT_GELU, .window = 4096, .attn_cap = 50, .logit_cap = 30},
     .flags = EMBD_SQRT, .period = 2},
    {"gemma3*", .c = {.act = ACT_GELU, .rope_base[WINDOWED] = 10000, .local_unscaled = true},
     .flags = EMBD_SQRT | SCALE_BY_DIM, .period = 6, .n_layer = 62},
    {"gemma3*", .c = {.act = ACT_GELU, .rope_base[WINDOWED] = 10000, .local_unscaled = true},
     .flags = EMBD_SQRT, .period = 6},
    {"gemma-embedding", .c = {.act = ACT_GELU, .rope_base[WINDOWED] = 10000,
     .local_unscaled = true}, .flags = EMBD_SQRT | BOTH_WAYS, .period = 6},
    {"gemma4*", .c = {.act = ACT_GELU, .rope_base[WINDOWED] = 10000, .local_unscaled = true,
     .values_normed = true, .logit_cap = 30, .weights_normed = true},
     .flags = EMBD_SQRT, .period = 6},
    {"deepseek2*", .c = {.rope = ROPE_PAIRS, .gating = SIGMOID}, .flags = YARN_LOG, .n_layer = 47},
    {"deepseek2*", .c = {.rope = ROPE_PAIRS}, .flags = YARN_LOG},
    {"mistral4* deepseek32", .c = {.rope = ROPE_PAIRS}, .flags = YARN_SCORES},
    {"glm-dsa", .c = {.rope = ROPE_PAIRS, .gating = SIGMOID}, .flags = YARN_SCORES},
    {"orion stablelm", .c = {.norm = NORM_LAYER}, .flags = MAY_BE_PARALLEL},
    {"codeshell falcon gptneox phi2 starcoder2", .c = {.norm = NORM_LAYER, .act = ACT_GELU},
     .flags = MAY_BE_PARALLEL},
    {"dbrx", .c = {.norm = NORM_LAYER, .weights_normed = true}},
    {"nemotron jais2", .c = {.norm = NORM_LAYER, .act = ACT_RELU2}},
    {"nemotron_h nemotron_h_moe*", .c = {.rope = ROPE_NONE, .act = ACT_RELU2, .gating = SIGMOID,
     .nextn_layer_norm = true}},
    {"lfm2", .period = NO_LAYER},
    {"gpt2 starcoder mpt*", .c = {.norm = NORM_LAYER, .act = ACT_GELU, .rope = ROPE_NONE}},
    {"jais*", .c = {.norm = NORM_LAYER, .rope = ROPE_NONE}, .flags = SCALE_BY_HEAD},
    {"bloom", .c = {.norm = NORM_LAYER, .act = ACT_GELU, .rope = ROPE_NONE, .alibi = 8}},
    {"bert*", .c = {.norm = NORM_LAYER, .act = ACT_GELU, .rope = ROPE_NONE, .encoder = true}},
    {"jina-bert-v2", .c = {.norm = NORM_LAYER, .act = ACT_GELU, .rope = ROPE_NONE, .encoder = true,
     .alibi = 8}},
    {"nomic-bert*", .c = {.norm = NORM_LAYER, .encoder = true}},
    {"nomic-bert-moe* jina-bert-v3", .c = {.norm = NORM_LAYER, .act = ACT_GELU, .encoder = true}},
    {"modern-bert", .c = {.norm = NORM_LAYER, .act = ACT_GELU, .rope_base[WINDOWED] = 10000,
     .local_unscaled = true}, .flags = BOTH_WAYS | FULL_FIRST, .period = 3},
};

// Ollama has its own names for architectures and tensors. Some of its files name a wrong
// pre-tokenizer or none (pre is the right one), or scale by YaRN without a word (yarn).
typedef struct { const char *name, *ours, *pre; bool yarn; } Alias;
static const Alias ALIASES[] = {
    {"gptoss", "gpt-oss", "gpt-4o", true}, {"glm4moelite", "deepseek2", "glm4", false},
    {"olmo3", "olmo2", NULL, false}, {"qwen25vl", "qwen2vl", NULL, false},
    {"deepseekocr", "deepseek2-ocr", NULL, false}, {"glmocr", "glm4", "chatglm-bpe", false},
    {"nemotron_h_omni", "nemotron_h_moe", NULL, false},
};
static const char *const TENSOR_ALIASES[][2] = {   // what the name in a file ends in, and ours
    {"attn_out.weight", "attn_output.weight"}, {"attn_out.bias", "attn_output.bias"},
    {"attn_sinks", "attn_sinks.weight"}, {"attn_g.weight", "attn_gate.weight"},
    {"ssm_dt", "ssm_dt.bias"}, {"ffn_latent_in.weight", "ffn_latent_down.weight"},
    {"ffn_latent_out.weight", "ffn_latent_up.weight"},
    {"post_attn_norm.weight", "post_attention_norm.weight"},
    {"post_ffn_norm.weight", "post_ffw_norm.weight"}, {"exp_probs_b", "exp_probs_b.bias"},
};

static const Alias *find_alias(const Gguf *g) {   // of the file's architecture; NULL: none
    Str name = gguf_str(g, "general.architecture");
    for (size_t i = 0; i < COUNT(ALIASES); i++)
        if (str_eq(name, ALIASES[i].name)) return &ALIASES[i];
    return NULL;
}

// Numbers of a file that only loading needs.
typedef struct {
    int n_layer_mtp;           // blocks behind the layers that predict further tokens
    int n_borrow;              // this many last layers read the caches of earlier ones
    int pattern;               // which layers have a window: a period, or this layer's yes or no
    bool rotated;              // this layer has RoPE
    int n_rotated;             // this many first layers have RoPE although they see all
    bool loops_bare;           // no norm of the stream between loops
    bool side_by_side;         // of all layers
    int hd_local, vd_local;    // hd and vd of windowed layers
    float eps_rms;             // eps of RMSNorm
    bool rope_tuned;           // false: the model has no RoPE, whatever else the file says
    float rope_part;           // the part of a head that RoPE turns; 0: the file does not say
    float rope_alpha;          // raises RoPE's base (NTK-aware scaling); 0: it does not
} Hints;

// A number that a file gives under its architecture's name, such as "llama.block_count".
typedef struct {
    const char *key;
    enum { INT, REAL, BOOL } type;
    enum { IN_CONFIG, IN_LAYER, IN_HINTS } place;
    bool by_layer;             // one number, or an array with one for each layer
    size_t at;                 // offset of the field in its struct
    double low, high;          // the range; a key whose default is below `low` must be in the file
    const char *archs;         // the architectures that read it; a star: that require it
} Key;

#define CONFIG(field) IN_CONFIG, false, offsetof(Config, field)
#define HINT(field) IN_HINTS, false, offsetof(Hints, field)
#define LAYER(field) IN_LAYER, true, offsetof(Layer, field)
#define ANY -FLT_MAX, FLT_MAX
#define GRANITES "granite granitehybrid granitemoe granite_swa "
#define MOE "afmoe bailingmoe2 bailingmoe3 cohere2moe deepseek2 deepseek2-ocr deepseek32 dots1 "\
            "exaone-moe glm-dsa glm4moe hy_v3 laguna mistral4 step35"   // see expert_ keys
enum { MOST_EXPERTS = 4096, MOST_GROUPS = 64, MOST_TAPS = 64, MOST_LATENT = 4096 };   // of arrays

static const Key KEYS[] = {
    {"block_count", INT, CONFIG(n_layer), 1, 1 << 14, "all"},
    {"nextn_predict_layers", INT, HINT(n_layer_mtp), 0, 1 << 14, "all"},
    {"embedding_length", INT, CONFIG(dim), 1, 1 << 20, "all"},
    {"context_length", INT, CONFIG(n_ctx), 1, INT_MAX, "all"},
    {"pooling_type", INT, CONFIG(pooling), -1, 4, "all"},
    {"attention.layer_norm_epsilon", REAL, CONFIG(eps), 0, 1, "all"},
    // RMSNorm's eps under that name, or under its own
    {"attention.layer_norm_epsilon", REAL, HINT(eps_rms), ANY, "nemotron_h nemotron_h_moe"},
    {"attention.layer_norm_rms_epsilon", REAL, HINT(eps_rms), 0, 1, "all"},
    {"embedding_scale", REAL, CONFIG(embd_scale), ANY, GRANITES "minicpm"},
    {"residual_scale", REAL, CONFIG(residual_scale), ANY, GRANITES "minicpm"},
    {"logit_scale", REAL, CONFIG(logit_scale), ANY,
     "granite* granitehybrid granitemoe* granite_swa* minicpm command-r cohere2* cohere2moe* "
     "muse-glimmer*"},
    {"final_logit_softcapping", REAL, CONFIG(logit_cap), ANY, "gemma2 gemma3 gemma4 muse-glimmer"},
    {"attention.head_count", INT, CONFIG(n_head), 0, 1 << 14, "all"},
    {"attention.head_count", INT, LAYER(n_head), 0, 1 << 14, "all"},
    {"attention.head_count_kv", INT, LAYER(n_kv), 0, 1 << 14, "all"},   // 0: see load_layer
    {"attention.key_length", INT, CONFIG(hd), 0, 4096, "all"},
    {"attention.value_length", INT, CONFIG(vd), 0, 4096, "all"},
    {"attention.key_length_swa", INT, HINT(hd_local), 0, 4096, "gemma4*"},
    {"attention.value_length_swa", INT, HINT(vd_local), 0, 4096, "gemma4*"},
    {"attention.key_length_mla", INT, CONFIG(latent_hd), 0, 4096, "all"},
    {"attention.value_length_mla", INT, CONFIG(latent_vd), 0, 4096, "all"},
    {"attention.kv_lora_rank", INT, CONFIG(lora), 0, MOST_LATENT, "all"},
    {"attention.shared_kv_layers", INT, HINT(n_borrow), 0, 1 << 14, "gemma4"},
    {"embedding_length_per_layer_input", INT, CONFIG(per_layer), 0, 1 << 16, "gemma4"},
    {"attention.sliding_window", INT, CONFIG(window), 0, INT_MAX,
     "all cohere2* cohere2moe* gemma-embedding* gpt-oss* maple* spark2_5* step35*"},
    {"attention.sliding_window_pattern", INT, IN_HINTS, true, offsetof(Hints, pattern), 0, INT_MAX,
     "all maple* spark2_5* step35*"},
    {"leading_dense_block_count", INT, HINT(n_rotated), 0, 1 << 14, "cohere2moe*"},
    {"num_loops", INT, CONFIG(n_loops), 1, 64, "nanbeige"},
    {"skip_loop_final_norm", BOOL, HINT(loops_bare), 0, 1, "nanbeige"},
    {"attention.indexer.top_k", INT, CONFIG(n_exact), 1, INT_MAX, "glm-dsa* deepseek32*"},
    {"attention.causal", BOOL, CONFIG(causal), 0, 1, "all"},
    {"attention.scale", REAL, CONFIG(attn_scale), ANY, GRANITES},
    {"attn_logit_softcapping", REAL, CONFIG(attn_cap), ANY, "gemma2"},
    {"attention.value_scale", REAL, CONFIG(value_scale), ANY, "mimo2"},
    {"attention.rope_pattern", BOOL, IN_HINTS, true, offsetof(Hints, rotated), 0, 1, "granite_swa"},
    {"attention.clamp_kqv", REAL, CONFIG(clamp_qkv), ANY, "olmo dbrx mpt"},
    {"attention.max_alibi_bias", REAL, CONFIG(alibi), ANY, "jais mpt"},
    {"swiglu_clamp_exp", REAL, LAYER(limit_experts), ANY, "bailingmoe3 maple* step35"},
    {"swiglu_clamp_shexp", REAL, LAYER(limit_ffn), ANY, "bailingmoe3 step35"},
    {"attention.temperature_scale", REAL, CONFIG(sharpen_scale), ANY,
     "mistral3 deepseek2 mistral4"},
    {"attention.temperature_length", INT, CONFIG(sharpen_length), 0, INT_MAX, "deepseek2 mistral4"},
    {"use_parallel_residual", BOOL, HINT(side_by_side), 0, 1, "gptneox*"},
    {"rope.dimension_count", INT, CONFIG(n_rot[FULL]), -1, 4096, "all"},   // -1: all of a head
    {"rope.partial_rotary_factor", REAL, HINT(rope_part), 0, 1, "glm4"},   // Ollama's name
    {"rope.dimension_count_swa", INT, CONFIG(n_rot[WINDOWED]), 0, 4096,
     "gemma4 afmoe laguna maple muse-glimmer spark2_5 step35"},
    {"rope.swa.dimension_count", INT, CONFIG(n_rot[WINDOWED]), 0, 4096, "laguna"},   // Ollama's
    {"rope.swa.freq_base", REAL, CONFIG(rope_base[WINDOWED]), ANY, "laguna"},   // Ollama's
    {"rope.freq_base", REAL, CONFIG(rope_base[FULL]), ANY, "all"},
    {"rope.freq_base_swa", REAL, CONFIG(rope_base[WINDOWED]), ANY,
     "afmoe gemma2 gemma3 gemma4 gemma-embedding gpt-oss laguna llama4 maple mimo2 modern-bert "
     "muse-glimmer plamo3 smallthinker spark2_5 step35"},
    {"rope.global.freq_base", REAL, CONFIG(rope_base[FULL]), ANY, "gemma3 gemma4"},   // Ollama's
    {"rope.local.freq_base", REAL, CONFIG(rope_base[WINDOWED]), ANY, "gemma3 gemma4"},   // Ollama's
    {"rope.scale_linear", REAL, CONFIG(rope_factor), ANY, "all"},
    {"rope.scaling.factor", REAL, CONFIG(rope_factor), ANY, "all"},
    {"rope.scaling.attn_factor", REAL, CONFIG(rope_mag), ANY, "all"},
    {"rope.scaling.alpha", REAL, HINT(rope_alpha), ANY, "hunyuan-dense hunyuan_vl"},
    {"rope.scaling.finetuned", BOOL, HINT(rope_tuned), 0, 1, "all"},
    {"rope.scaling.original_context_length", INT, CONFIG(n_ctx_orig), 0, INT_MAX, "all"},
    {"rope.scaling.yarn_beta_fast", REAL, CONFIG(yarn_fast), ANY, "mistral3"},
    {"rope.scaling.yarn_beta_slow", REAL, CONFIG(yarn_slow), ANY, "mistral3"},
    {"rope.scaling.yarn_log_multiplier", REAL, CONFIG(yarn_log), ANY,
     "mistral3 deepseek2 mistral4 deepseek32"},
    {"rope.scaling.beta_fast", REAL, CONFIG(yarn_fast), ANY, "mistral3"},   // Ollama's names
    {"rope.scaling.beta_slow", REAL, CONFIG(yarn_slow), ANY, "mistral3"},
    {"rope.scaling_beta", REAL, CONFIG(sharpen_scale), ANY, "mistral3 deepseek2 mistral4"},
    {"rope.scaling.mscale_all_dim", REAL, CONFIG(yarn_log), ANY, "mistral3 deepseek2 mistral4"},
    {"feed_forward_length", INT, LAYER(ff), 0, 1 << 20, "all"},
    {"expert_count", INT, CONFIG(n_expert), 0, MOST_EXPERTS, "all"},
    {"expert_used_count", INT, LAYER(n_used), 0, 4096, "all"},
    {"expert_group_count", INT, CONFIG(n_group), 0, MOST_GROUPS, "all"},
    {"expert_group_used_count", INT, CONFIG(n_group_used), 0, MOST_GROUPS, "all"},
    {"expert_gating_func", INT, CONFIG(gating), 1, 2, "bailingmoe2* bailingmoe3* kimi-linear* "
     "lfm2moe* smallthinker* minimax-m2 " MOE},   // a list's first name of a model counts
    {"expert_weights_norm", BOOL, CONFIG(weights_normed), 0, 1, "bailingmoe nemotron_h_moe " MOE},
    {"expert_weights_scale", REAL, CONFIG(weights_scale), ANY,
     "bailingmoe deepseek kimi-linear nemotron_h_moe " MOE},
    {"ssm.conv_kernel", INT, CONFIG(conv), 0, MOST_TAPS, "all"},
    {"ssm.group_count", INT, CONFIG(n_key), 0, 1 << 14, "all"},
    {"ssm.time_step_rank", INT, CONFIG(n_value), 0, 1 << 14, "all"},
    {"ssm.state_size", INT, CONFIG(dk), 0, 4096, "all"},
    {"ssm.inner_size", INT, CONFIG(dv), 0, 1 << 20, "all"},   // of all value heads
    {"shortconv.l_cache", INT, CONFIG(conv), 1, MOST_TAPS, "lfm2* lfm2moe*"},
    {"kda.head_dim", INT, CONFIG(kda), 1, 4096, "kimi-linear* bailingmoe3*"},
    {"kda.gate_lower_bound", REAL, CONFIG(kda_lower), -FLT_MAX, -FLT_MIN, "bailingmoe3*"},
    {"xielu.alpha_n", REAL, LAYER(xielu.alpha_n), ANY, "apertus*"},   // without a name in front
    {"xielu.alpha_p", REAL, LAYER(xielu.alpha_p), ANY, "apertus*"},
    {"xielu.beta", REAL, LAYER(xielu.beta), ANY, "apertus*"},
    {"xielu.eps", REAL, LAYER(xielu.eps), ANY, "apertus*"},
};
#undef CONFIG
#undef HINT
#undef LAYER
#undef ANY
#undef GRANITES
#undef MOE

// Tensors that files of these architectures must have, although the engine could run without them.
static const struct { const char *name, *archs; } NEEDS[] = {
    {"attn_norm.weight", "gemma-embedding gemma2 gemma3 gemma4 glm4"},
    {"attn_norm.bias", "bloom codeshell falcon gpt2 gptneox jais jais2 nemotron orion phi2 phimoe "
     "stablelm starcoder starcoder2"},
    {"attn_qkv.bias", "codeshell jais qwen"}, {"attn_sinks.weight", "gpt-oss granite_swa"},
    {"attn_q_norm.weight", "afmoe apertus bailingmoe2 dots1 exaone-moe exaone4 gemma-embedding "
     "gemma3 gemma4 hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 laguna lfm2 lfm2moe maincoder maple "
     "mellum minimax-m2 muse-glimmer olmo2 olmoe openelm plamo3 qwen3 qwen35 qwen35moe qwen3moe "
     "qwen3next qwen3vl qwen3vlmoe"},
    {"attn_gate.weight", "afmoe bailingmoe3 laguna muse-glimmer spark2_5"},
    {"attn_output.bias", "bloom codeshell gpt-oss gpt2 gptneox jais jais2 jina-bert-v2 "
     "pangu-embedded phi2 phimoe starcoder starcoder2"},
    {"attn_output_norm.weight", "bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe"},
    {"post_attention_norm.weight", "afmoe exaone4 gemma-embedding gemma2 gemma3 gemma4 glm4 "
     "glm4moe muse-glimmer olmo2 qwen35 qwen35moe qwen3next seed_oss"},
    {"post_attention_norm", "plamo3"}, {"post_ffw_norm", "plamo3"},
    {"ffn_norm.weight", "gemma-embedding gemma2 gemma3 gemma4 glm4"},
    {"ffn_down.bias", "bloom codeshell gpt2 gptneox jais jais2 jina-bert-v2 phi2 starcoder "
     "starcoder2"},
    {"post_ffw_norm.weight", "afmoe exaone4 gemma-embedding gemma2 gemma3 gemma4 glm4 muse-glimmer "
     "olmo2"},
    {"layer_output_norm.weight", "bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe"},
    {"ffn_gate_inp.bias", "gpt-oss"}, {"ffn_gate_exps.bias", "gpt-oss"},
    {"ffn_up_exps.bias", "gpt-oss"}, {"ffn_down_exps.bias", "gpt-oss"},
    {"exp_probs_b.bias", "afmoe bailingmoe3 glm4moe kimi-linear laguna lfm2moe minimax-m2 "
     "nemotron_h_moe"},
    {"ffn_up_shexp.weight", "afmoe bailingmoe bailingmoe2 bailingmoe3 deepseek deepseek2 "
     "deepseek2-ocr deepseek32 dots1 glm-dsa hunyuan-moe kimi-linear laguna qwen2moe qwen35moe "
     "qwen3next step35"},
    {"ffn_gate_inp_shexp.weight", "qwen2moe qwen35moe qwen3next"}, {"ssm_conv1d.bias", "mamba2"},
    {"ssm_norm.weight", "mamba2 granitehybrid nemotron_h nemotron_h_moe"},
    {"token_embd_norm.weight", "bert bloom jina-bert-v2 jina-bert-v3 modern-bert nomic-bert "
     "nomic-bert-moe"},
    {"position_embd.weight", "bert gpt2 starcoder"}, {"rope_freqs.weight", "gemma4"},
    {"output.weight", "apertus baichuan bailingmoe bailingmoe2 dbrx dots1 exaone-moe gpt-oss "
     "gptneox internlm2 maple mellum mimo2 minimax-m2 muse-glimmer nemotron olmo2 olmoe orion phi2 "
     "plamo qwen qwen2moe stablelm xverse"},
    {"output.bias", "phimoe"},
};

// ---- 13. loading ----
//
// Binds each weight to its bytes in the file and checks all that forward relies on, so that forward
// cannot fail. After the first error no tensor is found any more, so one check at the end is
// enough. Four checks find a file that is not what it says. A "!" before a tensor's name: forward
// cannot do without it. NEEDS: forward could, but such a model has it. check_neighbours: one layer
// lacks what its like have. tensor_idle, block_idle: an unused tensor is one known not to run.

typedef struct {
    Model *m;
    const Arch *arch;          // the model's row of ARCHS
    Hints hints;
    Error *e;
    bool ok;
    int l;                     // the layer, or -1
    char prefix[24];           // of its tensors: "blk.0."
} Loader;

#define refuse(ld, ...) ((ld)->ok = (ld)->ok && fail((ld)->e, __VA_ARGS__))   // the first error

// a key under the architecture's name as the file spells it, or without that name
static Meta *arch_meta(const Loader *ld, const char *key) {
    char name[128];
    Str arch = gguf_str(ld->m->gguf, "general.architecture");
    snprintf(name, sizeof name, "%.*s.%s", STR_ARG(arch), key);
    Meta *v = gguf_find(ld->m->gguf, name);
    if (!v) v = gguf_find(ld->m->gguf, key);   // xIELU's
    if (v) v->used = true;
    return v;
}

// Returns the number under a key, or this layer's in an array, or else `otherwise`. An array needs
// a value for each layer of the file, also for those that do not run; patterns may be longer.
static double load_number(Loader *ld, const char *key, double otherwise) {
    Meta *v = arch_meta(ld, key), *blocks = arch_meta(ld, "block_count");
    if (!v) return otherwise;
    bool array = v->type == GGUF_ARR, pattern = strstr(key, "_pattern");
    bool each = array && (ld->l >= 0 || !strcmp(key, "attention.head_count"));   // one a layer
    uint64_t i = array && ld->l > 0 ? ld->l : 0;
    uint64_t n_layer = blocks && blocks->n ? meta_int(blocks, 0) : 0;
    bool shorter = each && v->n + ld->hints.n_layer_mtp < n_layer, longer = each && v->n > n_layer;
    if (shorter || (longer && !pattern))
        refuse(ld, "key %.*s has %llu values for %llu layers", STR_ARG(v->key),
               (unsigned long long)v->n, (unsigned long long)n_layer);
    if (pattern && i >= v->n) return 0;   // of a nextn block, see load_window
    bool number = v->elem != GGUF_STR && (!array || each);
    double x = number && i < v->n ? meta_float(v, i) : NAN;
    if (!isfinite(x)) refuse(ld, "key %.*s: want a number, or one a layer", STR_ARG(v->key));
    return x;
}

// Fills the fields that KEYS names, those of a layer or, if it is NULL, those of the whole model.
static void load_keys(Loader *ld, Layer *layer) {
    Config *c = &ld->m->config;
    void *place[] = {[IN_CONFIG] = c, [IN_LAYER] = layer, [IN_HINTS] = &ld->hints};
    Str arch = {c->name, strlen(c->name)}, all = {"all", 3};
    for (const Key *k = KEYS; k < KEYS + COUNT(KEYS) && ld->ok; k++) {
        const char *behind = find_str(arch, k->archs);
        bool required = behind && *behind == '*';
        bool read = behind || find_str(all, k->archs), scaling = strstr(k->key, "rope.scal");
        if (!read || k->by_layer != (layer != NULL)) continue;
        bool fixed = ld->arch->flags & ROPE_FIXED && !(ld->arch->flags & YARN_SCORES && scaling);
        if (fixed && strstr(k->key, "rope.")) continue;
        void *field = (char *)place[k->place] + k->at;
        double x = 0;
        if (k->type == INT) x = *(int *)field;
        if (k->type == REAL) x = *(float *)field;
        if (k->type == BOOL) x = *(bool *)field;
        x = load_number(ld, k->key, x);
        if (!arch_meta(ld, k->key) && (x < k->low || required))
            refuse(ld, "key %.*s.%s is missing", STR_ARG(arch), k->key);
        else if (!(x >= k->low && x <= k->high))
            refuse(ld, "key %.*s.%s is %.15g, expected %.15g to %.15g", STR_ARG(arch), k->key, x,
                   k->low, k->high);
        else if (k->type == INT) *(int *)field = x;
        else if (k->type == BOOL) *(bool *)field = x;
        else if (x != 0) *(float *)field = x;   // 0 counts as no key
    }
}

// Returns the tensor; NULL if there is none, which is an error if a ! stands before its name.
static Tensor *find_tensor(Loader *ld, const char *name, const char *suffix) {
    char full[128];
    bool required = *name == '!';
    name += required;
    snprintf(full, sizeof full, "%s%s%s", ld->prefix, name, suffix);
    Tensor *t = ld->ok ? gguf_tensor(ld->m->gguf, full) : NULL;
    for (size_t i = 0; !t && ld->ok && i < COUNT(TENSOR_ALIASES); i++) {
        if (strcmp(full + strlen(ld->prefix), TENSOR_ALIASES[i][1])) continue;
        snprintf(full, sizeof full, "%s%s", ld->prefix, TENSOR_ALIASES[i][0]);
        t = gguf_tensor(ld->m->gguf, full);
    }
    if (t && tensor_bytes(t) > 0) return t;
    if (t) refuse(ld, "tensor %.*s holds nothing", STR_ARG(t->name));
    if (required) refuse(ld, "tensor %s%s%s is missing", ld->prefix, name, suffix);
    return NULL;
}

static const char *less_mark(const char *name) { return name + (*name == '!'); }

static void require(Loader *ld, const void *data, const char *name) {
    if (!data) refuse(ld, "tensor %s%s.weight is missing", ld->prefix, name);
}

// Returns memory that lives as long as the model: whole pages, so that a GPU can share them.
static void *keep_memory(Loader *ld, uint64_t size) {
    Model *m = ld->m;
    Map *owned = realloc(m->owned, (m->n_owned + 1) * sizeof *owned);
    if (owned) m->owned = owned;
    size = (size + 16383) / 16384 * 16384;
    void *v = owned && size < SIZE_MAX ? aligned_alloc(16384, size) : NULL;
    if (v) m->owned[m->n_owned++] = (Map){v, size};
    else refuse(ld, "out of memory");
    return v;
}

// Returns n values (0: however many there are) as f32, in the file or in a copy; NULL: none.
static const float *load_vector(Loader *ld, const char *name, const char *suffix, uint64_t n) {
    Tensor *t = find_tensor(ld, name, suffix);
    if (!t) return NULL;
    t->used = true;
    uint64_t have = (uint64_t)t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
    if (n && have != n)
        refuse(ld, "tensor %.*s: want %.0f values, file has %.0f", STR_ARG(t->name), (double)n,
               (double)have);
    if (!ld->ok) return NULL;
    if (t->type == QUANT_F32) return (const float *)t->data;
    float *v = keep_memory(ld, have * sizeof *v);
    if (v) quant_dequantize(t->type, t->data, v, have);
    return v;
}

// Returns the norm of [heads][n] values; w NULL: the file has none. A tensor of the shape
//   [n]           is shared by all heads, each of which is normed by itself
//   [heads][n]    has weights for each head
//   [heads * n]   norms all heads at once
static Norm load_norm(Loader *ld, const char *name, int heads, int n) {
    const char *suffix = find_tensor(ld, less_mark(name), "") ? "" : ".weight";   // some have none
    const Tensor *t = find_tensor(ld, name, suffix);
    bool by_head = t && t->ne[0] == n;
    int size = by_head && t->ne[1] == 1 ? n : heads * n;
    Norm w = {.w = load_vector(ld, name, suffix, size)};
    w.b = load_vector(ld, less_mark(name), ".bias", size);
    if (w.w) w.n = size;
    if (by_head || heads == 1) w.group = n;
    return w;
}

// Returns n factors: those in x times `by`, or `by` alone if x is NULL.
static float *scaled(Loader *ld, const float *x, int n, float by) {
    float *v = keep_memory(ld, n * sizeof *v);
    for (int i = 0; v && i < n; i++) v[i] = x ? x[i] * by : by;
    return v;
}

// Returns a [rows][cols] matrix, or n of them, with bias and, if the file has one (NVFP4), a factor
// of the product. rows 0: however many the file has.
static Matrix load_matrix(Loader *ld, const char *name, int cols, int rows, int n) {
    Tensor *t = find_tensor(ld, name, ".weight");
    if (!t) return (Matrix){0};
    t->used = true;
    const int *ne = t->ne;
    if (!rows) rows = ne[1];
    if (ne[0] != cols || ne[1] != rows || ne[2] != n || ne[3] != 1)
        refuse(ld, "tensor %.*s: want [%d,%d,%d,1], file has [%d,%d,%d,%d]",
               STR_ARG(t->name), cols, rows, n, ne[0], ne[1], ne[2], ne[3]);
    if (!ld->ok) return (Matrix){0};
    Matrix w = {.data = t->data, .type = t->type, .rows = rows, .cols = cols};
    w.step = rows * quant_row_bytes(t->type, cols);
    w.bias = load_vector(ld, less_mark(name), ".bias", (uint64_t)rows * n);
    bool router = !strcmp(name, "!ffn_gate_inp");   // its .scale is of its input, see load_experts
    if (!router) w.scale = load_vector(ld, less_mark(name), ".scale", n);
    return w;
}

// rows first .. first+rows-1 of w, or of each expert's matrix in it
static Matrix matrix_rows(Matrix w, int64_t first, int64_t rows) {
    if (w.data) w.data += first * quant_row_bytes(w.type, w.cols);
    if (w.bias) w.bias += first;
    w.rows = rows;
    return w;
}

// Part III has these.
static void load_gate(Loader *ld, Layer *w, int n_head, int vd), load_nextn(Loader ld);
static void load_experts(Loader *ld, Layer *w), load_inputs(Loader *ld, Layer *w);
static bool load_recurrent(Loader *ld, Layer *w), load_source(Loader *ld, Layer *w);
static void load_latent(Loader *ld, Layer *w), derive_latent(Config *c, uint64_t flags);

typedef struct { const char *name; int rows; Matrix *w; } Slice;   // "!": only in a fused tensor

// Loads matrices, or n of each, of the same input: rows of tensor `name`, or tensors of their own.
// Rows of `name` may have biases under the names of their own tensors.
static void load_fused(Loader *ld, const char *name, int cols, int n, const Slice *p, int parts) {
    int rows = 0, at = 0;
    for (int i = 0; i < parts; i++) rows += p[i].rows;
    Matrix all = load_matrix(ld, name, cols, rows, n);
    for (int i = 0; i < parts; at += p[i++].rows) {
        if (all.data) *p[i].w = matrix_rows(all, at, p[i].rows);
        else *p[i].w = load_matrix(ld, p[i].name, cols, p[i].rows, n);
        if (all.data && !all.bias)
            p[i].w->bias = load_vector(ld, less_mark(p[i].name), ".bias", (uint64_t)p[i].rows * n);
    }
}

// Loads q, k, v and o with their norms, gates and sinks. In: numbers and widths of the heads.
static void load_attention(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    const Tensor *fused = find_tensor(ld, "attn_qkv", ".weight");
    const Tensor *first = fused ? fused : find_tensor(ld, "attn_q", ".weight");
    int q = w->n_head * w->hd, k = w->n_kv * w->hd, v = w->n_kv * w->vd;
    if (!w->n_head || !w->n_kv || w->n_head % w->n_kv || w->hd < 1 || w->vd < 1)
        refuse(ld, "layer %d: %d heads of %d and %d values cannot share %d KV heads", ld->l,
               w->n_head, w->hd, w->vd, w->n_kv);
    if (c->alibi && w->n_head != c->n_head) refuse(ld, "ALiBi: want %d heads a layer", c->n_head);
    bool borrows = load_source(ld, w);   // a file may still hold k and v, which nobody reads
    const char *k_name = borrows ? "attn_k" : "!attn_k";
    const char *v_name = borrows ? "attn_v" : "!attn_v";
    // Gemma 4: layers without attn_v use their keys, before the norm, as values
    if (c->values_normed && !find_tensor(ld, "attn_v", ".weight")) v_name = k_name;
    // only q's size tells that a model has gates: a head's rows are its query, then its gate
    int others = fused ? k + v : 0;
    bool gates = first && first->ne[1] == 2 * q + others && w->hd == w->vd;
    if (gates && !(ld->arch->flags & GATE)) q *= 2;
    load_fused(ld, "attn_qkv", c->dim, 1,
               (Slice[]){{"!attn_q", q, &w->q}, {k_name, k, &w->k}, {v_name, v, &w->v}}, 3);
    if (borrows) w->k = w->v = (Matrix){0};
    w->o = load_matrix(ld, "!attn_output", w->n_head * w->vd, c->dim, 1);
    if (c->value_scale != 1) w->o.scale = &c->value_scale;
    w->sinks = load_vector(ld, "attn_sinks", ".weight", w->n_head);
    load_gate(ld, w, w->n_head, w->vd);
    w->q_norm = load_norm(ld, "attn_q_norm", w->n_head, w->hd);   // a model has both norms, or none
    w->k_norm = load_norm(ld, "attn_k_norm", w->n_kv, w->hd);
    bool maverick = c->n_expert == 128;   // the larger Llama 4 has none
    if (ld->arch->flags & QK_NORM_BARE && w->rope != ROPE_NONE && !maverick && !w->q_norm.w)
        w->q_norm = w->k_norm = (Norm){scaled(ld, NULL, w->hd, 1), NULL, w->hd, w->hd, 0};
    if (w->k.data && !w->q_norm.w != !w->k_norm.w)
        require(ld, NULL, w->q_norm.w ? "attn_k_norm" : "attn_q_norm");
}

typedef struct { const char *gate, *up, *down, *both; } FfnNames;   // both: gate and up in one
static const FfnNames DENSE_NAMES = {"ffn_gate", "!ffn_up", "!ffn_down", "ffn_up"};

// Loads gate, up and down of an FFN, or of n experts, into w[0], w[1], w[2]. `gated` says which
// activations need a gate. Returns the width, which is ff or, where ff is 0, the file's.
static int load_ffn(Loader *ld, const FfnNames *name, int cols, int ff, int n, Matrix **w) {
    const Config *c = &ld->m->config;
    const Tensor *both = find_tensor(ld, name->both, ".weight");
    const Tensor *down = ff ? NULL : find_tensor(ld, name->down, ".weight");
    if (!ff) ff = down && down->ne[0] < 1 << 30 ? down->ne[0] : 1;
    *w[0] = load_matrix(ld, name->gate, cols, ff, n);
    if (!w[0]->data && both && both->ne[1] == 2 * ff)
        load_fused(ld, name->both, cols, n, (Slice[]){{"!", ff, w[0]}, {"!", ff, w[1]}}, 2);
    else *w[1] = load_matrix(ld, name->up, cols, ff, n);
    bool gated = c->act != ACT_RELU2 && (c->act != ACT_GELU || c->norm == NORM_RMS);
    bool alone = c->act == ACT_XIELU;   // up has no gate
    if (gated && !alone) require(ld, w[0]->data, name->gate);
    if (alone && (w[0]->data || n > 1)) refuse(ld, "layer %d: xIELU with gates, or experts", ld->l);
    *w[2] = load_matrix(ld, name->down, ff, cols, n);
    return ff;
}

// Loads a layer's norms. Their names tell little about where a norm acts:
//
//                         before attention, of its result  before the FFN, of its result
//   most                  attn_norm                        ffn_norm
//   Qwen3-Next, GLM-4.5   attn_norm                        post_attention_norm
//   Gemma 2, GLM-4        attn_norm   post_attention_norm  ffn_norm             post_ffw_norm
//   OLMo 2, EXAONE 4                  post_attention_norm                       post_ffw_norm
//   DBRX                  attn_norm                        attn_output_norm
//   Falcon 40B            attn_norm_2                      attn_norm
//   BERT (of the sum)                 attn_output_norm                          layer_output_norm
static void load_norms(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    Norm attn_norm_2 = load_norm(ld, "attn_norm_2", 1, c->dim);
    Norm output_norm = load_norm(ld, "attn_output_norm", 1, c->dim);
    w->attn_norm = load_norm(ld, "attn_norm", 1, c->dim);
    w->ffn_norm = load_norm(ld, "ffn_norm", 1, c->dim);
    if (c->encoder) {
        w->attn_post_norm = output_norm;
        w->attn_norm_2 = attn_norm_2;
        w->ffn_post_norm = load_norm(ld, "layer_output_norm", 1, c->dim);
        return;
    }
    w->attn_post_norm = load_norm(ld, "post_attention_norm", 1, c->dim);
    w->ffn_post_norm = load_norm(ld, "post_ffw_norm", 1, c->dim);
    if (c->embd_normed) w->attn_post_norm.eps = w->ffn_post_norm.eps = 1e-8f;
    if (!w->ffn_norm.w) w->ffn_norm = output_norm;
    if (!w->ffn_norm.w && !w->ffn_post_norm.w) {
        w->ffn_norm = w->attn_post_norm;
        w->attn_post_norm = (Norm){0};
    }
    if (attn_norm_2.w) {
        w->ffn_norm = w->attn_norm;
        w->attn_norm = attn_norm_2;
    }
    if (!w->n_head && !w->attn_norm.w) w->attn_norm = w->ffn_norm;   // an FFN alone (Deci)
    if (c->norm == NORM_BARE) return;   // no norm has weights (OLMo)

    // a block's input or its result is normed; an FFN without a norm reads what attention reads
    bool normed = ld->l == 0 && ld->m->embd_norm.w;   // by the norm of the embeddings
    if (!normed && !w->attn_post_norm.w) require(ld, w->attn_norm.w, "attn_norm");
    bool shares = !w->ffn_norm.w && !w->ffn_post_norm.w;
    w->side_by_side = attn_norm_2.w || ld->hints.side_by_side || shares;
}

// Decides whether the layer has a window, and sets what depends on it: its widths, and whether RoPE
// turns its heads. A file gives a period, of which one layer sees all, or an array of yes and no.
// A nextn block sees all, unless an array says otherwise: converters count only layers in it.
static void load_window(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    const Arch *a = ld->arch;
    const Meta *key = arch_meta(ld, "attention.sliding_window_pattern");
    int pattern = ld->hints.pattern;
    int full = a->flags & FULL_FIRST ? 0 : pattern - 1;   // which layer of a period
    bool windows = a->period && c->window, sees_all = pattern && ld->l % pattern == full;
    if (key && key->type == GGUF_ARR) sees_all = !pattern;
    else if (ld->l >= c->n_layer) sees_all = true;   // periods end before nextn blocks
    bool local = windows && !sees_all;
    w->window = local ? c->window : 0;
    w->hd = local ? ld->hints.hd_local : c->hd;
    w->vd = local ? ld->hints.vd_local : c->vd;
    w->n_rot = c->n_rot[local ? WINDOWED : FULL];
    w->rope = ld->hints.rotated ? c->rope : ROPE_NONE;
    if (a->no_rope && (ld->l + 1) % a->no_rope == 0) w->rope = ROPE_NONE;
    bool first = ld->l < ld->hints.n_rotated;
    if (a->flags & LOCAL_ROPE && windows && !local && !first) w->rope = ROPE_NONE;
}

// Loads layer ld->l: its numbers and norms; attention (n_kv > 0), a recurrent mixer or both (Falcon
// H1); an FFN or experts (up). In Nemotron-H a layer has one of these alone.
static void load_layer(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    const Arch *a = ld->arch;
    snprintf(ld->prefix, sizeof ld->prefix, "blk.%d.", ld->l);
    ld->hints.pattern = a->period == NO_LAYER ? 0 : a->period;
    ld->hints.rotated = true;
    w->source = ld->l;
    load_keys(ld, w);
    load_window(ld, w);
    const Meta *kv = arch_meta(ld, "attention.head_count_kv");
    bool each_kv = kv && kv->type == GGUF_ARR;   // a 0 in it: no attention; else: n_head
    if (!w->n_kv && !each_kv) w->n_kv = w->n_head;
    if (a->flags & FFN_OR_NOTHING && !w->ff) {
        w->n_head = w->n_kv = 0;
        return;
    }
    w->out_scale = load_vector(ld, "layer_output_scale", ".weight", 1);
    load_norms(ld, w);

    // what mixes tokens
    bool attends = w->n_kv || !each_kv || find_tensor(ld, "attn_q", ".weight");
    if (!load_recurrent(ld, w) || !attends) w->n_head = w->n_kv = 0;
    else if (find_tensor(ld, "attn_kv_a_mqa", ".weight")) load_latent(ld, w);
    else load_attention(ld, w);
    bool mixes = w->n_kv || w->mixer;

    // the FFN: the number of Ollama's LFM2 may be wrong, Qwen's counts gate and up
    Matrix *ffn[] = {&w->gate, &w->up, &w->down};
    bool unsure = find_str((Str){c->name, strlen(c->name)}, "lfm2 lfm2moe qwen");
    bool dense = (w->ff && !w->mixer) || !mixes || find_tensor(ld, "ffn_up", ".weight");
    if (find_tensor(ld, "ffn_gate_inp", ".weight")) load_experts(ld, w);
    else if (dense) w->ff = load_ffn(ld, &DENSE_NAMES, c->dim, unsure ? 0 : w->ff, 1, ffn);
    bool feeds = w->up.data;
    if (!mixes) w->ffn_norm = w->attn_norm;   // a layer of one block has one norm
    if (!feeds) w->attn_post_norm = w->ffn_post_norm;
    if (!feeds) w->attn_norm_2 = (Norm){0};
    w->side_by_side = w->side_by_side && mixes && feeds;
    if (w->side_by_side && !w->ffn_norm.w && !(a->flags & MAY_BE_PARALLEL))
        require(ld, NULL, "ffn_norm");
    if (c->per_layer) load_inputs(ld, w);
}

// Returns a tensor of layer l (-1: of no layer). From then on find_tensor searches that layer.
static Tensor *layer_tensor(Loader *ld, int l, const char *name, const char *suffix) {
    snprintf(ld->prefix, sizeof ld->prefix, "blk.%d.", l);
    if (l < 0) *ld->prefix = 0;
    return find_tensor(ld, name, suffix);
}

// Should two layers have tensors of the same names? Those of an FFN depend on its kind, others on
// the mixer, and on the window if values may be keys (Gemma 4) or some layers have sinks.
static bool layers_alike(const Layer *a, const Layer *b, bool ffn, bool windows) {
    if (ffn) return !a->router.data == !b->router.data && !a->up.data == !b->up.data;
    return a->mixer == b->mixer && !a->n_kv == !b->n_kv && !a->k.data == !b->k.data &&
           (!windows || !a->window == !b->window);
}

// Layer l has a tensor of this name, so its neighbours must have one, too: the next layers on both
// sides that are alike. Names of an FFN or of experts have ff in them, or begin with exp.
static void check_neighbours(Loader *ld, int l, const char *name) {
    const Layer *w = ld->m->layers;
    bool ffn = strstr(name, "ff") || !strncmp(name, "exp", 3);
    bool windows = !strcmp(name, "attn_v.weight") || ld->arch->flags & LOCAL_SINKS;
    for (int k, step = -1; step <= 1; step += 2) {
        for (k = l + step; k >= 0 && k < ld->m->config.n_layer; k += step)
            if (layers_alike(&w[l], &w[k], ffn, windows)) break;
        bool normed = k == 0 && ld->m->embd_norm.w && !strncmp(name, "attn_norm.", 10);
        if (k < 0 || k == ld->m->config.n_layer || normed) continue;
        if (layer_tensor(ld, k, name, "")) continue;
        const char *dot = strstr(name, ".scale");   // NVFP4's, but files leave out those of 1
        char of[100];
        snprintf(of, sizeof of, "%.*s.weight", dot ? (int)(dot - name) : 0, name);
        const Tensor *a = layer_tensor(ld, l, of, "");
        if (!a || strcmp(quant_name(a->type), "nvfp4"))
            refuse(ld, "tensor blk.%d.%s is missing; layer %d has it", k, name, l);
    }
}

// Tensors whose names begin with one of these do not run: of images, sound, rerankers, MTP.
static const char *const IDLE_TENSORS[] = {"v.", "mm.", "a.", "s.", "cls.", "mtp.",
                                           "model.vision_tower.", "model.audio_tower."};

// Is this a tensor of layer l (-1: none) that does not run? name: without the "blk." in front
static bool tensor_idle(const Config *c, const Tensor *t, int l, const char *name) {
    Str rest = t->name;
    for (size_t i = 0; i < COUNT(IDLE_TENSORS); i++)
        if (str_cut(&rest, IDLE_TENSORS[i])) return true;
    if (tensor_bytes(t) == 0) return true;
    if (l >= 0 && strstr(name, ".vis_")) return true;            // for images
    if (c->n_exact && strstr(name, ".indexer.")) return true;    // for texts longer than n_exact
    const char *scale = strstr(name, ".input_scale");            // NVFP4's, of activations
    return scale && !strcmp(scale, ".input_scale");
}

// Nothing used this tensor of layer l. If that is a nextn block, it is idle, as are later ones.
static bool block_idle(Loader *ld, const Tensor *t, int l) {
    Config *c = &ld->m->config;
    Error *why = &ld->m->nextn_idle;
    int block = l - c->n_layer;
    if (block < 0 || block >= ld->hints.n_layer_mtp) return false;
    if (block < c->n_nextn) fail(why, "tensor %.*s: unknown", STR_ARG(t->name));
    else if (!layer_tensor(ld, l, "nextn.eh_proj", ".weight"))
        fail(why, "blk.%d has no nextn.eh_proj; is it a layer, and nextn_predict_layers wrong?", l);
    c->n_nextn = smaller(c->n_nextn, block);
    return true;
}

// Refuses a file with a tensor that nothing used and that is not idle, and a file that lacks one.
static void check_tensors(Loader *ld) {
    const Gguf *g = ld->m->gguf;
    const Config *c = &ld->m->config;
    bool experts = false;   // has a layer some?
    for (int l = 0; l < c->n_layer; l++) experts |= ld->m->layers[l].router.data != NULL;
    for (const Tensor *t = g->tensors; t < g->tensors + g->n_tensors && ld->ok; t++) {
        Str rest = t->name;
        int l = str_cut(&rest, "blk.") ? atoi(rest.s) : -1;
        char name[100];
        snprintf(name, sizeof name, "%.*s", (int)rest.n, rest.s);
        if (!strncmp(name, "mtp.", 4)) fail(&ld->m->nextn_idle, "tensor %s: unknown", name);
        if (t->used && l >= 0 && l < c->n_layer) check_neighbours(ld, l, strchr(name, '.') + 1);
        else if (!t->used && !tensor_idle(c, t, l, name) && !block_idle(ld, t, l))
            refuse(ld, "tensor %.*s: no part of a %s model of %d layers, as the engine knows it",
                   STR_ARG(t->name), c->name, c->n_layer);
    }
    for (size_t i = 0; i < COUNT(NEEDS) && ld->ok; i++) {
        bool found = !find_str((Str){c->name, strlen(c->name)}, NEEDS[i].archs);
        if (strstr(NEEDS[i].name, "exp") && !experts) found = true;
        for (int l = -1; l < c->n_layer && !found; l++)
            found = layer_tensor(ld, l, NEEDS[i].name, "");
        const char *idle = ld->m->nextn_idle.text;   // it may be why
        if (!found) refuse(ld, "tensor %s is missing%s%s", NEEDS[i].name, *idle ? "; " : "", idle);
    }
}

// Finds the first row of ARCHS for the file's architecture and size, and begins Config with it.
static bool load_arch(Loader *ld) {
    Model *m = ld->m;
    Config *c = &m->config;
    Str name = gguf_str(m->gguf, "general.architecture");
    const Alias *alias = find_alias(m->gguf);
    if (!name.s) return refuse(ld, "key general.architecture is missing");
    if (alias) name = (Str){alias->ours, strlen(alias->ours)};
    double layers = load_number(ld, "block_count", 0) - load_number(ld, "nextn_predict_layers", 0);
    for (const Arch *a = ARCHS; a < ARCHS + COUNT(ARCHS) && !ld->arch; a++) {
        const char *behind = find_str(name, a->names);
        if (!behind || (a->n_layer && a->n_layer != layers)) continue;
        ld->arch = a;
        *c = a->c;
        c->verified = *behind == '*';
    }
    snprintf(c->name, sizeof c->name, "%.*s", STR_ARG(name));
    if (!ld->arch || !str_eq(name, c->name))
        return refuse(ld, "architecture %.*s is not supported; --help -v lists all", STR_ARG(name));
    if (!m->gguf->n_tensors) return refuse(ld, "no tensors: this is a vocabulary, not a model");
    return ld->ok;
}

// Sets what follows from the architecture's row and the sizes. The file may still override it.
static void imply_config(Config *c, const Arch *a) {
    int flags = a->flags;
    if (!c->hd && c->n_head) c->hd = c->dim / c->n_head;
    if (!c->vd && c->n_head) c->vd = c->dim / c->n_head;
    c->n_rot[FULL] = c->hd;
    c->n_ctx_orig = c->n_ctx;
    c->router_scale = 1 / sqrtf(c->dim);
    c->embd_scale = flags & EMBD_SQRT ? sqrtf(c->dim) : 1;
    c->residual_scale = c->logit_scale = 1;
    if (flags & MUP) {
        c->embd_scale = 12;
        c->residual_scale = 1.4f / sqrtf(c->n_layer);
        c->logit_scale = 256.0f / c->dim;
    }
    c->attn_scale = 1 / sqrtf(flags & SCALE_BY_DIM ? c->dim / (float)c->n_head : c->hd);
    if (flags & SCALE_BY_HEAD) c->attn_scale *= c->attn_scale;
    if (c->values_normed) c->attn_scale = 1;
    c->causal = !c->encoder && !(flags & BOTH_WAYS);
    if (!c->rope_base[WINDOWED]) c->rope_base[WINDOWED] = c->rope_base[FULL];
}

// Derives RoPE's numbers, and those that depend on them. Each line reads what earlier ones set.
static void derive_rope(Loader *ld) {
    Config *c = &ld->m->config;
    Hints *h = &ld->hints;
    int flags = ld->arch->flags, *n_rot = c->n_rot;

    // how angles slow down
    const Meta *scaling = arch_meta(ld, "rope.scaling.type");
    const Alias *alias = find_alias(ld->m->gguf);
    Str type = meta_str(scaling);
    if (type.s && !type.n) scaling = NULL;   // Ollama's way to say none
    c->yarn = scaling ? str_eq(type, "yarn") : alias && alias->yarn;
    if (find_str(type, "none default")) c->rope_factor = 1;
    if (scaling && !find_str(type, "none default linear yarn longrope llama3"))
        refuse(ld, "rope.scaling.type '%.*s' is not supported", STR_ARG(type));

    // how many values of a head turn, and by which position
    if (flags & ROPE_TUNED && !h->rope_tuned) c->rope = ROPE_NONE;
    if (n_rot[FULL] < 0) n_rot[FULL] = c->hd;
    if (h->rope_part > 0) n_rot[FULL] = c->hd * h->rope_part;
    if (c->rope == ROPE_NONE) n_rot[FULL] = 0;   // whatever the file says
    const Meta *section = arch_meta(ld, "rope.dimension_sections");
    if (!section) section = arch_meta(ld, "rope.mrope_section");   // Ollama's name, for the first 3
    if (section && section->type == GGUF_ARR && section->n != 3 && section->n != 4)
        refuse(ld, "key %.*s has %llu values, want 4", STR_ARG(section->key),
               (unsigned long long)section->n);
    for (int i = 0; section && gguf_size[section->elem] && i < 4 && i < (int)section->n; i++)
        c->section[i] = fmin(fmax(meta_int(section, i), 0), 4096);
    if (c->section[0] && !strcmp(c->name, "glm4")) c->rope = ROPE_HALVES;   // GLM-OCR

    // what follows from these, and from windows
    if (!c->n_ctx_orig) c->n_ctx_orig = c->n_ctx;
    derive_latent(c, flags);
    if (flags & ROPE_FIXED) c->rope_factor = c->rope_mag = 1;
    if (!c->sharpen_length) c->sharpen_length = c->n_ctx_orig;
    if (!h->hd_local) h->hd_local = c->hd;
    if (!h->vd_local) h->vd_local = c->vd;
    if (!n_rot[WINDOWED]) n_rot[WINDOWED] = h->hd_local < c->hd ? h->hd_local : n_rot[FULL];
    if (flags & HALF_ROTATED) n_rot[FULL] /= 2;
    if (h->rope_alpha > 0 && c->hd > 2)   // NTK-aware: slows low frequencies most
        c->rope_base[FULL] *= powf(h->rope_alpha, c->hd / (c->hd - 2.0f));
    int hd[] = {[FULL] = c->hd, [WINDOWED] = h->hd_local};
    for (int kind = FULL; kind <= WINDOWED; kind++)
        if (n_rot[kind] % 2 || n_rot[kind] > hd[kind] || !(c->rope_base[kind] > 0))
            refuse(ld, kind == FULL ? "RoPE: %d dimensions of %d at base %g"
                                    : "RoPE in windows %d of %d at base %g",
                   n_rot[kind], hd[kind], c->rope_base[kind]);
}

// Derives what follows from several keys at once, and checks that they agree.
static void derive_config(Loader *ld) {
    const Gguf *g = ld->m->gguf;
    Config *c = &ld->m->config;
    c->eps = fmaxf(c->norm == NORM_RMS ? ld->hints.eps_rms : c->eps, 0);
    if (c->logit_scale == 0) c->logit_scale = 1;
    if (ld->arch->flags & LOGIT_DIVIDE) c->logit_scale = 1 / c->logit_scale;
    if (c->span && (!c->window || !c->causal)) refuse(ld, "spans need a causal window");
    if (c->span) c->window = c->span;   // whatever the file says
    if (ld->arch->flags & WINDOW_SET && c->window) c->window = 4096;
    if (!c->causal && c->window) c->window = c->window / 2 + 1;   // half on each side, and itself
    Str act = meta_str(arch_meta(ld, "hidden_activation"));   // instead of GELU (ModernBERT)
    if (act.n && c->act == ACT_GELU && find_str(act, "silu swish swiglu")) c->act = ACT_SILU;
    else if (act.n && c->act == ACT_GELU && !find_str(act, "gelu geglu gelu_pytorch_tanh"))
        refuse(ld, "hidden_activation '%.*s' is not supported", STR_ARG(act));
    c->n_layer -= ld->hints.n_layer_mtp;
    bool layers = false;
    for (const Tensor *t = g->tensors; t < g->tensors + g->n_tensors && !layers; t++)
        layers = str_cut(&(Str){t->name.s, t->name.n}, "blk.0.");
    if (ld->hints.n_layer_mtp && (c->n_layer < 1 || !layers))
        refuse(ld, "no layers, only MTP blocks: open the whole model, or fix nextn_predict_layers");
    if (c->n_value) c->dv /= c->n_value;
    if (c->kda) c->n_key = c->n_value = c->n_head;
    if (c->kda) c->dk = c->dv = c->kda;
    if (c->n_layer < 1 || c->n_layer > (int64_t)g->n_tensors)
        refuse(ld, "%d layers in a file of %zu tensors", c->n_layer, g->n_tensors);
    if (c->n_group < 2) c->n_group = c->n_group_used = 1;
    if (c->n_expert % c->n_group || c->n_group_used < 1 || c->n_group_used > c->n_group)
        refuse(ld, "experts in %d of %d groups", c->n_group_used, c->n_group);
    derive_rope(ld);
}

static void load_config(Loader *ld) {
    enum { MISSING = -1 };   // below what KEYS allows: the file must have this eps
    Config *c = &ld->m->config;
    // Ollama leaves out eps and all numbers of Gemma 3's RoPE
    bool gemma3 = !strcmp(c->name, "gemma3"), ocr = !strcmp(c->name, "deepseek2-ocr");
    bool bare = gemma3 && (arch_meta(ld, "mm.tokens_per_image") ||
                           !arch_meta(ld, "attention.layer_norm_rms_epsilon"));
    if (c->norm == NORM_RMS) ld->hints.eps_rms = gemma3 || ocr ? 1e-6f : MISSING;
    else c->eps = MISSING;
    c->pooling = -1;
    c->rope_base[FULL] = 10000;   // if neither row nor file says otherwise
    c->yarn_fast = 32;
    c->rope_factor = c->rope_mag = c->yarn_slow = c->n_loops = 1;
    c->weights_scale = c->value_scale = 1;
    if (!c->gating) c->gating = SOFTMAX;
    load_keys(ld, NULL);                      // first the sizes
    if (ld->ok) imply_config(c, ld->arch);    // then what follows from them
    if (bare) c->rope_base[FULL] = 1e6f;
    if (bare && c->n_ctx >= 131072) c->rope_factor = 8;
    load_keys(ld, NULL);                      // then the file again, which overrides it
    if (ld->ok) derive_config(ld);
}

// Nanbeige runs all its layers several times. Each loop lists them again, with the same weights but
// caches of their own. Between loops the stream is normed, unless `bare`.
static void repeat_layers(Model *m, bool bare) {
    int n = m->config.n_layer, all = n * m->config.n_loops;
    Layer *w = m->layers;
    for (int l = n; l < all; l++) {
        w[l] = w[l - n];
        w[l].source += n;
    }
    for (int l = n; l < all && !bare; l += n) w[l - 1].last_norm = m->out_norm;
    m->config.n_layer = all;
}

static bool weights_load(Model *m, Error *e) {
    Loader ld = {.m = m, .e = e, .ok = true, .l = -1, .hints = {.rope_tuned = true}};
    Config *c = &m->config;
    if (load_arch(&ld)) load_config(&ld);
    if (!ld.ok) return false;
    // a layer that rotates fewer numbers than others reads the first divisors
    bool all = ld.arch->flags & HALF_ROTATED || !c->local_unscaled;
    uint64_t n_freqs = larger(c->n_rot[FULL], all ? c->n_rot[WINDOWED] : 0) / 2;
    m->freqs = load_vector(&ld, "rope_freqs", ".weight", n_freqs);
    m->freqs_long = load_vector(&ld, "rope_factors_long", ".weight", n_freqs);
    m->freqs_short = load_vector(&ld, "rope_factors_short", ".weight", n_freqs);
    if (!m->freqs_long != !m->freqs_short)
        require(&ld, NULL, m->freqs_long ? "rope_factors_short" : "rope_factors_long");
    m->embd = load_matrix(&ld, "!token_embd", c->dim, 0, 1);
    m->output = load_matrix(&ld, "output", c->dim, 0, 1);
    if (!m->output.data) m->output = m->embd;   // the two are tied
    c->n_vocab = m->output.rows;
    if (m->embd.rows < c->n_vocab)
        refuse(&ld, "token_embd has %d rows, output %d", (int)m->embd.rows, c->n_vocab);
    if (c->rope == ROPE_NONE) m->pos_embd = load_matrix(&ld, "position_embd", c->dim, 0, 1);
    if (c->encoder) m->type_embd = load_matrix(&ld, "token_types", c->dim, 0, 1);
    static const char *const tables[] = {"token_embd", "position_embd", "token_types",
                                         "per_layer_token_embd"};   // read by row, as they are
    for (size_t i = 0; i < COUNT(tables); i++)
        if (find_tensor(&ld, tables[i], ".bias") || find_tensor(&ld, tables[i], ".scale"))
            refuse(&ld, "tensor %s: bias or scale", tables[i]);
    bool last = c->encoder || find_tensor(&ld, "output_norm", ".weight");
    if (last) m->embd_norm = load_norm(&ld, "token_embd_norm", 1, c->dim);   // LFM2: of the output
    m->out_norm = load_norm(&ld, last ? "output_norm" : "token_embd_norm", 1, c->dim);
    if (!m->out_norm.w) m->out_norm = load_norm(&ld, "enc.output_norm", 1, c->dim);   // NeoBERT
    if (c->norm != NORM_BARE && !c->encoder) require(&ld, m->out_norm.w, "output_norm");
    m->dense[0] = load_matrix(&ld, "dense_2", c->dim, 0, 1);
    m->dense[1] = load_matrix(&ld, "dense_3", m->dense[0].rows, 0, 1);
    if (c->per_layer) load_inputs(&ld, NULL);
    while (c->n_nextn < ld.hints.n_layer_mtp &&   // of which a file may have fewer
           layer_tensor(&ld, c->n_layer + c->n_nextn, "nextn.eh_proj", ".weight")) c->n_nextn++;
    m->layers = calloc(c->n_layer * (size_t)c->n_loops + c->n_nextn, sizeof *m->layers);
    if (!m->layers) refuse(&ld, "out of memory");
    for (ld.l = 0; ld.l < c->n_layer && ld.ok; ld.l++) load_layer(&ld, &m->layers[ld.l]);
    if (ld.ok) load_nextn(ld);
    if (ld.ok) check_tensors(&ld);
    if (ld.ok) repeat_layers(m, ld.hints.loops_bare);
    if (!ld.arch->period || !c->window) c->n_rot[WINDOWED] = 0;   // nobody reads these angles
    const Meta *never = gguf_find(m->gguf, "tokenizer.ggml.suppress_tokens");
    for (uint64_t i = 0; never && gguf_size[never->elem] && i < never->n; i++)
        if (!tokens_add(&m->suppressed, meta_int(never, i))) refuse(&ld, "out of memory");
    return ld.ok;
}

// Part IV has these; g must stay open as long as t.
static bool tokenizer_open(struct Tokenizer **t, const Gguf *g, Error *e);
static void tokenizer_close(struct Tokenizer *t);

API void model_close(Model *m) {
    for (size_t i = 0; i < m->n_owned; i++) free(m->owned[i].base);
    if (m->tokenizer) tokenizer_close(m->tokenizer);
    if (m->gguf) gguf_close(m->gguf);
    void *memory[] = {m->tokenizer, m->gguf, m->owned, m->layers, m->suppressed.id};
    for (size_t i = 0; i < COUNT(memory); i++) free(memory[i]);
    *m = (Model){0};
}

static bool model_load(Model *m, const char *path, bool weights, Error *e) {
    Error why;
    *m = (Model){.gguf = calloc(1, sizeof *m->gguf)};
    if (!m->gguf) return fail(e, "out of memory");
    if (!gguf_open(m->gguf, path, e)) return false;
    Str type = gguf_str(m->gguf, "general.type"), arch = gguf_str(m->gguf, "general.architecture");
    if (find_str(type, "adapter imatrix mmproj") || find_str(arch, "clip controlvector"))
        return fail(e, "%s: no language model but what goes with one: type %.*s, architecture %.*s",
                    path, STR_ARG(type), STR_ARG(arch));
    bool ok = tokenizer_open(&m->tokenizer, m->gguf, &why) && (!weights || weights_load(m, &why));
    return ok || fail(e, "%s: %s", path, why.text);
}

API bool model_open(Model *m, const char *path, Error *e) { return model_load(m, path, true, e); }

// ==== Part III: other families ==================================================================
//
// What other families add to a Llama. A block reads s->normed, the normed stream of the chunk, with
// the weights of layer s->l, and leaves in s->out what is added to the stream. A section is one
// idea, and begins with the load_ function of its tensors. Read experts (16), then the gated delta
// rule (18), of which the state space is a variation.
//
//   14 positions           15 layers: activations, gates of attention, other_layer
//   16 experts             17 to 19 recurrent mixers: convolution, delta rule, state space
//   20 latent attention    21 Gemma 4: borrowed caches, an input for each layer
//   22 further tokens      23 memory, and what a session may reuse of it

// ---- 14. positions ----
//
// Beyond the texts of training RoPE's angles slow down: all alike (linear), each by a factor of its
// own (Llama 3, longrope), or low frequencies more than high ones (YaRN, arXiv 2309.00071). Models
// of images divide the pairs among three positions, which are the same in text; others stand still.

static void add_scaled(float *x, const float *y, int n, float scale) {   // x += scale * y
    for (int i = 0; i < n; i++) x[i] += y[i] * scale;
}

static void scale(float *x, size_t n, float by) {
    if (by == 1) return;
    for (size_t i = 0; i < n; i++) x[i] *= by;
}

// Scales an embedding x, adds those of its position and of token type 0, and norms the sum.
static void embed_more(Session *s, float *x, size_t i) {
    const Model *m = s->m;
    const Config *c = &m->config;
    scale(x, c->dim, c->embd_scale);
    float *more = s->normed + i * c->dim;   // free until the first norm
    if (m->pos_embd.data) matrix_row(&m->pos_embd, s->pos + i, more);
    if (m->pos_embd.data) add_scaled(x, more, c->dim, 1);
    if (m->type_embd.data) matrix_row(&m->type_embd, 0, more);
    if (m->type_embd.data) add_scaled(x, more, c->dim, 1);
    if (m->embd_norm.w || c->embd_normed) norm(x, x, c->dim, &m->embd_norm, c->norm, c->eps);
}

// Returns the pair whose angle makes this many turns in the original context.
static double yarn_pair(const Config *c, double turns, int kind) {
    double pairs = c->n_rot[kind] * log(c->n_ctx_orig / (turns * 2 * M_PI));
    return pairs / (2 * log(c->rope_base[kind]));
}

// Does pair i stand still, because it belongs to none of the three positions?
static bool pair_still(const Config *c, int i) {
    int turning = c->section[0] + c->section[1] + c->section[2], all = turning + c->section[3];
    if (!all) return false;
    int k = i % all;
    return c->sections_mixed ? k / 3 >= c->section[k % 3] : k >= turning;
}

// Changes the frequencies [n_rot/2] of rope_frequencies, and returns the factor of cosines and
// sines. YaRN leaves pairs up to `low` alone, divides pairs from `high` on, and blends the others.
static float rope_scaling(const Model *m, int kind, int session_window, double *freq) {
    const Config *c = &m->config;
    bool unscaled = kind == WINDOWED && c->local_unscaled, yarn = c->yarn && !unscaled;
    int n_rot = c->n_rot[kind];
    double scale = unscaled ? 1 : 1.0 / c->rope_factor;
    const float *divide = session_window > c->n_ctx_orig ? m->freqs_long : m->freqs_short;
    if (m->freqs) divide = m->freqs;
    if (unscaled) divide = NULL;
    double low = fmax(0, floor(yarn_pair(c, c->yarn_fast, kind)));
    double high = fmin(n_rot - 1, ceil(yarn_pair(c, c->yarn_slow, kind)));
    for (int i = 0; i < n_rot / 2; i++) {
        double own = freq[i] / (divide ? divide[i] : 1);
        double ramp = 1 - fmin(1, fmax(0, (i - low) / fmax(0.001, high - low)));   // 1: unscaled
        if (pair_still(c, i)) own = 0;
        freq[i] = yarn ? own * (scale * (1 - ramp) + ramp) : own * scale;
    }
    double longer = yarn && scale < 1 ? 0.1 * log(1 / scale) : 0;
    float mag = kind == WINDOWED && c->local_no_mag ? 1 : c->rope_mag;
    return mag * (1 + longer) / (1 + c->yarn_log * longer);
}

// Can the model run a text of n tokens?
static bool check_more(const Session *s, int n, Error *e) {
    const Model *m = s->m;
    if (m->config.n_exact && n > m->config.n_exact)
        return fail(e, "position %d: beyond %d this model chooses what it attends to, which the "
                       "engine does not know", n - 1, m->config.n_exact);
    if (m->pos_embd.data && n > m->pos_embd.rows)
        return fail(e, "position %d is past the model's %lld learned positions", n - 1,
                    (long long)m->pos_embd.rows);
    if (!m->config.causal && n > s->o.chunk)
        return fail(e, "an encoder sees its whole text at once: %d tokens, in a chunk of %d", n,
                    s->o.chunk);
    return true;
}

// ALiBi (arXiv 2108.12409) subtracts slope * distance from a score. The slopes of n = 2^k heads are
// powers of one ratio: 2^(-max_bias * (h + 1) / n). For any other number the first 2^k heads have
// these slopes, and the rest have every other slope of the sequence for 2^(k+1) heads.
static void alibi_slopes(float *slope, int n_head, float max_bias) {
    int power = 1;   // 2^k
    while (2 * power <= n_head) power *= 2;
    for (int h = 0; h < n_head; h++) {
        float step = h < power ? h + 1 : h - power + 0.5f;   // 2 (h - power) + 1 of 2 * power
        slope[h] = exp2f(-max_bias * step / power);
    }
}

// Sharpens queries far out (Ministral 3): q *= 1 + sharpen_scale * ln(floor(pos / sharpen_length) +
// 1). Llama 4 takes pos + 1 for pos, and sharpens only where there is no RoPE.
static void sharpen(const Session *s, float *q, size_t n, int pos) {
    const Config *c = &s->m->config;
    if (c->sharpen_scale == 0 || (c->span && s->m->layers[s->l].rope != ROPE_NONE)) return;
    if (c->span) pos++;
    float lengths = floorf(pos / (float)c->sharpen_length);
    scale(q, n, c->sharpen_scale * logf(lengths + 1) + 1);
}

// ---- 15. layers ----

// A NaN stays a NaN: fminf would turn it into a number, and a damaged model would go on talking.
static inline float within(float x, float limit) {
    x = x < -limit ? -limit : x;
    return x > limit ? limit : x;
}

static void clamp(float *x, int64_t n, float limit) {
    if (limit <= 0) return;
    for (int64_t i = 0; i < n; i++) x[i] = within(x[i], limit);
}

// An activation has its place in the enum of section 12, in activation_of and activate (or, with
// numbers of its own, activate_row), in load_ffn and load_experts (does it have a gate?), a row of
// ARCHS and print_info; for a GPU in NUMBERS_OF_LLM and activation of kernels.metal; in
// reference_activation of test.c. Asserts and tests ask for what is missing.

// ReLU, its square, or x * sigmoid(z); z is x in SiLU, 2 sqrt(2 / pi) (x + 0.044715 x^3) in GELU.
INLINE float activation_of(float x, int act) {
    if (act == ACT_RELU2) return x < 0 ? 0 : x * x;
    if (act == ACT_RELU) return x < 0 ? 0 : x;
    float z = x;   // SiLU
    if (act == ACT_SWIGLU_OAI) z = 1.702f * x;
    if (act == ACT_GELU) z = 1.595769122f * (x + 0.044715f * x * x * x);
    return x / (1 + exp_fast(-z));
}

// gpt-oss takes min(gate, 7) for the gate, and 1 + up for up, with up held within -7 .. 7.
INLINE void activate_as(float *out, const float *gate, const float *up, int n, int act) {
    const float *x = gate ? gate : up;
    for (int i = 0; i < n; i++) {
        float g = x[i], u = gate ? up[i] : 1;
        if (act == ACT_SWIGLU_OAI) g = g > 7 ? 7 : g;
        if (act == ACT_SWIGLU_OAI) u = 1 + within(u, 7);
        out[i] = activation_of(g, act) * u;
    }
}

// out = act(gate) * up, or act(up) without a gate
static void activate(float *out, const float *gate, const float *up, int n, int act) {
    if (act == ACT_SILU) activate_as(out, gate, up, n, ACT_SILU);   // each gets its own loop
    else if (act == ACT_GELU) activate_as(out, gate, up, n, ACT_GELU);
    else if (act == ACT_RELU2) activate_as(out, gate, up, n, ACT_RELU2);
    else if (act == ACT_RELU) activate_as(out, gate, up, n, ACT_RELU);
    else if (act == ACT_SWIGLU_OAI) activate_as(out, gate, up, n, ACT_SWIGLU_OAI);
    else assert(!"an activation that has no loop");
}

// up = min(act(gate), limit) * up, with up within -limit .. limit; Maple: act(min(gate, limit))
static void activate_limited(const Config *c, float *gate, float *up, int n, float limit) {
    for (int i = 0; c->limit_first && i < n; i++) gate[i] = gate[i] > limit ? limit : gate[i];
    activate(gate, NULL, gate, n, c->act);
    clamp(up, n, limit);
    for (int i = 0; i < n; i++) up[i] *= gate[i] > limit ? limit : gate[i];
}

static float log1p_exp(float x) { return x > 20 ? x : log1pf(expf(x)); }   // log(1 + e^x)

// xIELU (arXiv 2411.13010) is a parabola above 0 and an exponential below, both of slope beta at 0.
static void xielu(float *x, int n, const Layer *w) {
    float beta = w->xielu.beta, eps = w->xielu.eps;
    float above = log1p_exp(w->xielu.alpha_p), below = beta + log1p_exp(w->xielu.alpha_n);
    for (int i = 0; i < n; i++) {
        float v = x[i], least = v > eps ? eps : v;
        float curve = v > 0 ? above * v * v : below * (exp_fast(least) - 1 - v);
        x[i] = curve + beta * v;
    }
}

typedef struct { const Matrix *gate, *up, *down; float limit; } Ffn;

static void activate_row(Session *s, const void *arg, size_t i) {   // up = act(gate) * up
    const Config *c = &s->m->config;
    const Ffn *f = arg;
    int ff = f->up->rows;
    float *gate = f->gate->data ? s->gate + i * ff : NULL, *up = s->up + i * ff;
    if (c->act == ACT_XIELU) xielu(up, ff, &s->m->layers[s->l]);
    else if (gate && f->limit > 0) activate_limited(c, gate, up, ff, f->limit);
    else activate(up, gate, up, ff, c->act);
}

static void ffn_more(Session *s, const Ffn *f, float *out) {   // out = down * (act(gate) * up)
    Matmul in[] = {{f->up, s->normed, s->up, s->n}, {f->gate, s->normed, s->gate, s->n}};
    matmul(s->pool, &s->op_scratch, in, f->gate->data ? 2 : 1);   // StarCoder 2 has no gate
    each_row(s, activate_row, f, s->n);
    product(s, f->down, s->up, out);
}

static void cache_finite(uint16_t *v, int n, uint16_t *key) {
    enum { EXPONENT = 0x7C00 };   // of an f16; all of it is set in infinities and NaNs
    int damaged = 0;
    for (int i = 0; i < n; i++) damaged |= (v[i] & EXPONENT) == EXPONENT;
    if (!damaged) return;
    for (int i = 0; i < n; i++) v[i] = (v[i] & EXPONENT) == EXPONENT ? 0 : v[i];
    *key = EXPONENT + 1;
}

// Before RoPE heads are limited (OLMo) and normed (Qwen 3, Gemma 4), after it normed or sharpened.

static void norm_heads(const Session *s, float *q, float *k) {
    const Config *c = &s->m->config;
    const Layer *w = &s->m->layers[s->l];
    if (w->q_norm.n) norm(q, q, w->n_head * w->hd, &w->q_norm, c->norm, c->eps);
    if (w->k_norm.n) norm(k, k, w->k.rows, &w->k_norm, c->norm, c->eps);
}

static void heads_row(Session *s, const void *arg, size_t i) {   // from the products to the cache
    const Config *c = &s->m->config;
    const Layer *w = arg;
    int n_q = w->n_head * w->hd, n_k = w->k.rows, n_v = w->v.rows;
    float *q = s->q + i * n_q, *k = s->k + i * n_k, *v = s->v + i * n_v;
    clamp(q, n_q, c->clamp_qkv);
    clamp(k, n_k, c->clamp_qkv);
    clamp(v, n_v, c->clamp_qkv);
    if (!c->qk_norm_late) norm_heads(s, q, k);
    if (c->values_normed) norm(v, v, n_v, &(Norm){.group = w->vd}, NORM_RMS, c->eps);
    qkv_row(s, w, i);
}

static void after_rope(const Session *s, float *q, float *k, int pos) {
    const Layer *w = &s->m->layers[s->l];
    if (s->m->config.qk_norm_late) norm_heads(s, q, k);
    sharpen(s, q, w->n_head * w->hd, pos);
}

// In latent attention a value begins its key. Encoders see later tokens. A chunk lies in one span.
static void see_more(const Session *s, Attention *a) {
    const Config *c = &s->m->config;
    const Layer *w = &s->m->layers[s->l];
    a->softcap = c->attn_cap;
    a->sinks = w->sinks;
    if (c->alibi > 0) a->slopes = s->slopes;
    if (a->v == a->k) a->v_step = w->hd;
    if (!c->causal) a->ahead = a->window - 1;
    if (c->span && w->window) a->span_start = s->pos / c->span * c->span;
}

// Gates of attention multiply a head's result by sigmoid(gate) or softplus(gate). In Qwen3-Next the
// rows of q are query and gate of the first head, of the second, ..., with a gate for each value;
// split_gate_row parts them. Other models have a matrix for gates, one for each value or each head.

static void split_gate_row(Session *s, const void *arg, size_t i) {
    const Layer *w = arg;
    int hd = w->hd;
    for (int h = 0; h < w->n_head; h++) {
        size_t at = i * w->n_head + h;
        memcpy(s->q + at * hd, s->mix + 2 * at * hd, hd * sizeof *s->q);
        memcpy(s->z + at * hd, s->mix + (2 * at + 1) * hd, hd * sizeof *s->z);
    }
}

static bool gates_in_q(const Layer *w) { return w->q.rows > w->n_head * w->hd; }
static bool has_gates(const Layer *w) { return gates_in_q(w) || w->attn_gate.data; }

// Loads the matrix of attention's gates, one for each head or for each of its vd values.
static void load_gate(Loader *ld, Layer *w, int n_head, int vd) {
    if (!(ld->arch->flags & GATE)) return;
    const Tensor *t = find_tensor(ld, "attn_gate", ".weight");
    int rows = t && t->ne[1] == n_head ? n_head : n_head * vd;
    w->attn_gate = load_matrix(ld, "attn_gate", ld->m->config.dim, rows, 1);
}

// s->att [n_head][width], in latent attention s->mix, times the gates in s->z [n_head][width or 1]
static void gate_row(Session *s, const void *arg, size_t i) {
    const Layer *w = arg;
    int n_head = w->n_head, width = w->o.cols / n_head;
    int gates = w->attn_gate.data ? w->attn_gate.rows / n_head : width;
    float *x = (w->k_b.data ? s->mix : s->att) + i * n_head * width, *z = s->z + i * n_head * gates;
    bool softplus = s->m->config.softplus_gates;
    for (int j = 0; softplus && j < n_head * gates; j++) z[j] = log1p_exp(z[j]);
    for (int j = 0; !softplus && j < n_head * gates; j++) z[j] = 1 / (1 + exp_fast(-z[j]));
    for (int h = 0; h < n_head; h++, x += width, z += gates)
        for (int j = 0; j < width; j++) x[j] *= z[gates > 1 ? j : 0];
}

// Makes those of k products whose matrix the layer has.
static void products(Session *s, const Matmul *all, int k) {
    Matmul jobs[8];
    int n = 0;
    for (int i = 0; i < k; i++)
        if (all[i].w->data) jobs[n++] = all[i];
    matmul(s->pool, &s->op_scratch, jobs, n);
}

// attention_block for a layer that has gates, borrows a cache, or changes heads before RoPE
static void attention_more(Session *s) {
    const Layer *w = &s->m->layers[s->l];
    int n = s->n;
    Matmul in[] = {{&w->q, s->normed, gates_in_q(w) ? s->mix : s->q, n},
                   {&w->k, s->normed, s->k, n},
                   {&w->v, s->normed, s->v, n},
                   {&w->attn_gate, s->normed, s->z, n}};
    products(s, in, 4);
    if (gates_in_q(w)) each_row(s, split_gate_row, w, n);
    each_row(s, heads_row, w, n);
    attend(s);
    if (has_gates(w)) each_row(s, gate_row, w, n);
    product(s, &w->o, s->att, s->out);
}

// normed = norm(x), or x where there is no norm (OLMo 2)
static void norm_more_row(Session *s, const void *arg, size_t i) {
    const Config *c = &s->m->config;
    const Norm *w = arg;
    size_t at = i * c->dim;
    if (w->w || c->norm == NORM_BARE) norm_row(s, w, i);
    else memcpy(s->normed + at, s->x + at, c->dim * sizeof *s->x);
}

// x = cap * tanh(x / cap), so that a logit cannot leave -cap .. cap. tanh(y) is 1 - 2 / (e^(2y) +
// 1), a difference that would have few digits near 0; there its Taylor series is used.
static void soft_cap(float *x, size_t n, float cap) {
    for (size_t i = 0; i < n; i++) {
        float y = x[i] / cap, z = y * y;
        float near = y + y * z * (-1 / 3.0f + z * (2 / 15.0f + z * (-17 / 315.0f + z * 62 / 2835)));
        float far = 1 - 2 / (exp_fast(2 * y) + 1);
        x[i] = cap * (z < 0.0625f ? near : far);
    }
}

static void cap_logits(const Session *s, size_t count) {
    const Config *c = &s->m->config;
    scale(s->logits, count, c->logit_scale);                            // Granite
    if (c->logit_cap > 0) soft_cap(s->logits, count, c->logit_cap);     // Gemma 2
}

static bool gpu_fetch(Session *s, void *p, size_t bytes, Error *e);   // before the CPU reads p
// returns norm(x) of n tokens of the last chunk, from `first` on: embeddings are pooled from them
static const float *hidden_rows(Session *s, int first, int n, Error *e) {
    size_t dim = s->m->config.dim;
    if (!gpu_fetch(s, s->x + first * dim, n * dim * sizeof *s->x, e)) return NULL;
    for (int i = 0; i < n; i++) norm_more_row(s, &s->m->out_norm, first + i);
    return s->normed + first * dim;
}

// x += out, in a layer that does more than that. `post` is the block's own norm, of its result or,
// in an encoder, of the sum; it also tells which block this is.
static void add_more_row(Session *s, const void *arg, size_t i) {
    const Config *c = &s->m->config;
    const Layer *w = &s->m->layers[s->l];
    const Norm *post = arg, *last = &w->ffn_post_norm;   // of the layer's last block
    float *x = s->x + i * c->dim, *out = s->out + i * c->dim;
    if (w->input_gate.data) last = &w->input_norm;
    if (!w->up.data) last = &w->attn_post_norm;
    if (post->w && !c->encoder) norm(out, out, c->dim, post, c->norm, c->eps);
    add_scaled(x, out, c->dim, c->residual_scale);
    if (post == last && w->out_scale) scale(x, c->dim, *w->out_scale);
    if (post == last && w->last_norm.w) norm(x, x, c->dim, &w->last_norm, c->norm, c->eps);
    if (post->w && c->encoder) norm(x, x, c->dim, post, c->norm, c->eps);
    if (post != &w->attn_post_norm || !w->attn_norm_2.w) return;
    add_scaled(x, s->normed + i * c->dim, c->dim, 1);   // JinaBERT: the block's input, too
    norm(x, x, c->dim, &w->attn_norm_2, c->norm, c->eps);
}

// Can forward_layer run this layer? (after_rope and see_more still do what it needs.)
static bool like_llama(const Config *c, const Layer *w) {
    bool attends = w->k.rows && !w->k_b.data && !w->mixer && !has_gates(w) && !w->q_norm.n &&
                   c->clamp_qkv <= 0 && !c->values_normed;
    bool feeds = w->up.data && w->gate.data && !w->router.data;
    bool normed = (w->attn_norm.w && w->ffn_norm.w) || c->norm == NORM_BARE;
    bool adds = !w->attn_post_norm.w && !w->ffn_post_norm.w && !w->attn_norm_2.w &&
                !w->last_norm.w && !w->out_scale && !w->input_gate.data && !w->side_by_side;
    return attends && feeds && normed && adds && c->act == ACT_SILU && w->limit_ffn <= 0 &&
           c->residual_scale == 1;
}

static void latent_attention(Session *s), recurrent(Session *s), experts(Session *s);
static void add_layer_input(Session *s);

static void forward_ffn(Session *s) {   // x += ffn(norm(x)): the second half of a layer
    const Layer *w = &s->m->layers[s->l];
    if (!w->side_by_side) each_row(s, norm_more_row, &w->ffn_norm, s->n);
    if (w->router.data) experts(s);   // Mixtral
    else ffn_more(s, &(Ffn){&w->gate, &w->up, &w->down, w->limit_ffn}, s->out);
    each_row(s, add_more_row, &w->ffn_post_norm, s->n);
}

// forward_layer with all that other families have
static bool other_layer(Session *s) {
    const Config *c = &s->m->config;
    const Layer *w = &s->m->layers[s->l];
    const Norm none = {0};
    int n = s->n;
    if (like_llama(c, w)) return false;
    if (c->routed_first && w->router.data) product(s, &w->router, s->x, s->route);

    // x += attention(norm(x)), with a recurrent mixer in its place or beside it
    if (w->n_kv || w->mixer) {   // Nemotron-H: a layer has attention or an FFN
        each_row(s, norm_more_row, &w->attn_norm, n);
        if (w->k_b.data) latent_attention(s);
        else if (w->n_kv) attention_more(s);
        if (w->n_kv && w->mixer) each_row(s, add_more_row, &none, n);   // out is for one result
        if (w->mixer) recurrent(s);
        // GPT-NeoX: side by side with attention, the FFN reads the stream as it was
        if (w->side_by_side && w->ffn_norm.w) each_row(s, norm_row, &w->ffn_norm, n);
        each_row(s, add_more_row, &w->attn_post_norm, n);
    }

    if (w->up.data) forward_ffn(s);
    if (w->input_gate.data) add_layer_input(s);   // Gemma 4
    return true;
}

// ---- 16. experts ----
//
// A mixture of experts has n_expert FFNs; a router chooses n_used of them for each token, and their
// results are added up with the router's weights. Tokens are sorted by expert, so that an expert's
// weights are read, and decoded, once for all its tokens. A shared expert sees every token.
// Squeezed experts ("latent" in files) read fewer numbers than the stream has: one product makes
// their input, another one widens their sum.

// Loads router, experts and a shared expert. In: n_used, Gemma 4's dense ff. Out: an expert's ff.
static void load_experts(Loader *ld, Layer *w) {
    const FfnNames sparse = {"ffn_gate_exps", "!ffn_up_exps", "!ffn_down_exps", "ffn_gate_up_exps"};
    const FfnNames shared = {"ffn_gate_shexp", "!ffn_up_shexp", "!ffn_down_shexp", "ffn_up_shexp"};
    Config *c = &ld->m->config;
    int n = c->n_expert, dense = w->ff;
    if (w->n_used < 1 || w->n_used > n / c->n_group * c->n_group_used)
        refuse(ld, "a token uses %d of %d experts", w->n_used, n);
    c->n_used = larger(c->n_used, w->n_used);
    w->router = load_matrix(ld, "!ffn_gate_inp", c->dim, n, 1);
    w->router_bias = load_vector(ld, "exp_probs_b", ".bias", n);
    w->squeeze = load_matrix(ld, "ffn_latent_down", c->dim, 0, 1);
    bool squeezed = w->squeeze.data, gated = c->act != ACT_RELU2;
    int wide = squeezed ? w->squeeze.rows : c->dim;   // of an expert's input
    if (squeezed && (gated || find_tensor(ld, "ffn_gate_inp", ".scale")))
        refuse(ld, "layer %d: latent experts with a gate or beside a dense FFN", ld->l);
    if (squeezed) w->unsqueeze = load_matrix(ld, "!ffn_latent_up", wide, c->dim, 1);
    if (c->act == ACT_SWIGLU_OAI && find_tensor(ld, sparse.both, ".weight"))
        refuse(ld, "tensor %s%s: gate and up are interleaved, as in Ollama's first gpt-oss; get or "
                   "make another file", ld->prefix, sparse.both);
    w->ff = load_ffn(ld, &sparse, wide, 0, n, (Matrix *[]){&w->gate, &w->up, &w->down});
    if (!w->down.scale) w->down.scale = load_vector(ld, "ffn_gate_inp", ".per_expert_scale", n);
    const float *scale = load_vector(ld, "ffn_gate_inp", ".scale", c->dim);
    if (scale) {   // a dense FFN stands beside the experts, as if it were a shared one
        w->router_norm = (Norm){scale, NULL, c->dim, c->dim, 0};
        w->router.scale = &c->router_scale;
        require(ld, w->ffn_post_norm.w, "post_ffw_norm");
        w->expert_norm = load_norm(ld, "!pre_ffw_norm_2", 1, c->dim);
        w->shared_post = load_norm(ld, "!post_ffw_norm_1", 1, c->dim);
        w->expert_post = load_norm(ld, "!post_ffw_norm_2", 1, c->dim);
    }
    Matrix *ffn[] = {&w->shared_gate, &w->shared_up, &w->shared_down};
    if (scale) load_ffn(ld, &DENSE_NAMES, c->dim, dense, 1, ffn);
    else if (find_tensor(ld, shared.both, ".weight")) {
        load_ffn(ld, &shared, c->dim, 0, 1, ffn);
        w->shared_router = load_matrix(ld, "ffn_gate_inp_shexp", c->dim, 1, 1);
    }
    if (ld->arch->flags & SHARED_AVERAGED && w->shared_up.data) {
        w->down.scale = scaled(ld, w->down.scale, n, 0.5f);
        w->shared_down.scale = scaled(ld, w->shared_down.scale, 1, 0.5f);
    }
    if (squeezed && w->shared_router.data)
        refuse(ld, "layer %d: latent experts beside a weighed one", ld->l);
}

// Returns the matrix of expert i. Experts lie w->step bytes apart, and their biases as many rows
// apart as these bytes hold, because w may be only some of each expert's rows in the file.
static Matrix matrix_expert(const Matrix *w, int i) {
    Matrix one = *w;
    one.data += i * w->step;
    if (w->bias) one.bias += i * (w->step / quant_row_bytes(w->type, w->cols));
    if (w->scale) one.scale += i;
    return one;
}

// Keeps the choice within the n_group_used best groups: scores of experts in other groups become
// the lowest there is. A group is worth the sum of its two best scores.
static void drop_groups(const Config *c, float *score) {
    Candidate group[MOST_GROUPS];
    int size = c->n_expert / c->n_group;
    for (int g = 0; g < c->n_group; g++) {
        float best = -FLT_MAX, second = -FLT_MAX;
        for (int e = g * size; e < (g + 1) * size; e++) {
            second = fmaxf(second, fminf(best, score[e]));
            best = fmaxf(best, score[e]);
        }
        group[g] = (Candidate){size > 1 ? best + second : best, g};
    }
    sort_top(group, c->n_group, c->n_group_used);
    for (int k = c->n_group_used; k < c->n_group; k++)
        for (int e = 0; e < size; e++) score[group[k].id * size + e] = -FLT_MAX;
}

// Chooses the experts of one token: makes probabilities p of the router's logits, and takes the
// n_used best by score, which is p with a bias and within the best groups. Their weights are of p.
static void choose_experts(Session *s, const void *arg, size_t i) {
    const Config *c = &s->m->config;
    const Layer *w = arg;
    int n_expert = c->n_expert, n_used = w->n_used;
    float *p = s->route + i * n_expert, *weight = s->weight + i * n_used;
    int32_t *chosen = s->chosen + i * n_used;
    float score[MOST_EXPERTS], top = p[0], all = 0, scores = 0, sum = 0, scale = c->weights_scale;
    bool sigmoid = c->gating == SIGMOID;
    for (int e = 1; e < n_expert; e++) top = fmaxf(top, p[e]);
    for (int e = 0; e < n_expert; e++) {
        p[e] = sigmoid ? 1 / (1 + expf(-p[e])) : expf(p[e] - top);
        all += p[e];
    }
    for (int e = 0; e < n_expert; e++) {
        if (!sigmoid) p[e] /= all;
        score[e] = p[e] + (w->router_bias ? w->router_bias[e] : 0);
        scores += score[e];
    }
    if (c->n_group > 1) drop_groups(c, score);
    for (int e = 0; e < n_expert; e++) {   // e takes its place among the best so far
        int k = e < n_used ? e : n_used - 1;
        if (e > k && !(score[e] > score[chosen[k]])) continue;
        for (; k > 0 && score[e] > score[chosen[k - 1]]; k--) chosen[k] = chosen[k - 1];
        chosen[k] = e;
    }
    for (int k = 0; k < n_used; k++) sum += p[chosen[k]];
    if (c->weights_normed) scale /= fmaxf(sum, 6.103515625e-5f);   // 2^-14
    if (isnan(scores)) scale = NAN;   // or nobody would notice a NaN that is not chosen
    for (int k = 0; k < n_used; k++) weight[k] = scale * p[chosen[k]];
}

// Sorts choices by expert, into s->order. It is stable: no token's sum depends on its neighbours.
static void sort_choices(const Session *s, int n) {
    int start[MOST_EXPERTS + 1] = {0}, n_expert = s->m->config.n_expert;
    for (int i = 0; i < n; i++) start[s->chosen[i] + 1]++;
    for (int e = 0; e < n_expert; e++) start[e + 1] += start[e];
    for (int i = 0; i < n; i++) s->order[start[s->chosen[i]]++] = i;
}

// copies the input of choice i's token, in the order of experts
static void gather_row(Session *s, const void *arg, size_t i) {
    const int32_t *order = arg;
    const Layer *w = &s->m->layers[s->l];
    size_t dim = w->down.rows, token = order[i] / w->n_used;
    const float *from = w->squeeze.data ? s->squeezed : s->normed;
    memcpy(s->gathered + i * dim, from + token * dim, dim * sizeof *from);
    if (s->m->config.inputs_weighed) scale(s->gathered + i * dim, dim, s->weight[order[i]]);
}

// The products of some experts that run together, with room for their matrices. Each has two jobs.
enum { MAX_EXPERTS = MAX_JOBS / 2 };
typedef struct {
    int n_experts, n_in, rows;   // rows: how many are taken, of gathered, gate, up and expert_out
    Matrix gate[MAX_EXPERTS], up[MAX_EXPERTS], down[MAX_EXPERTS];
    Matmul in[2 * MAX_EXPERTS], back[MAX_EXPERTS];
} ExpertCall;

static void add_expert(Session *s, ExpertCall *call, int e, int n) {   // with n tokens
    const Layer *w = &s->m->layers[s->l];
    size_t k = call->n_experts++, row = call->rows, dim = w->down.rows, ff = w->ff;
    float *x = s->gathered + row * dim, *gate = s->gate + row * ff, *up = s->up + row * ff;
    call->gate[k] = matrix_expert(&w->gate, e);
    call->up[k] = matrix_expert(&w->up, e);
    call->down[k] = matrix_expert(&w->down, e);
    call->in[call->n_in++] = (Matmul){&call->up[k], x, up, n};
    if (w->gate.data) call->in[call->n_in++] = (Matmul){&call->gate[k], x, gate, n};
    call->back[k] = (Matmul){&call->down[k], up, s->expert_out + row * dim, n};
    call->rows += n;
}

// Counts the scratch of experts. This bounds every choice: one expert has `limit` tokens, and every
// other FEW + 1, the count at which the padding of a tile is largest. (arena_take asserts it.)
static void count_experts(Session *s, int limit) {
    ExpertCall call = {0};
    int others = limit > FEW ? FEW + 1 : limit, most = limit + others * (limit - 1);
    add_expert(s, &call, 0, limit);
    while (call.rows < most && call.n_experts < MAX_EXPERTS) add_expert(s, &call, 0, others);
    matmul(s->pool, &s->op_scratch, call.in, call.n_in);
    matmul(s->pool, &s->op_scratch, call.back, call.n_experts);
}

// Runs the first experts of `order` that fit into `limit` rows, each with all its tokens, and adds
// their results to sum [n][..]. Returns how many choices it ran; choice k is of token k / n_used.
static int run_experts(Session *s, const int32_t *order, int left, int limit, float *sum) {
    const Layer *w = &s->m->layers[s->l];
    size_t dim = w->down.rows;
    ExpertCall call;
    call.n_experts = call.n_in = call.rows = 0;
    while (call.rows < left && call.n_experts < MAX_EXPERTS) {
        int e = s->chosen[order[call.rows]], end = call.rows + 1;
        while (end < left && s->chosen[order[end]] == e) end++;
        if (end > limit) break;
        add_expert(s, &call, e, end - call.rows);
    }
    each_row(s, gather_row, order, call.rows);
    matmul(s->pool, &s->op_scratch, call.in, call.n_in);
    each_row(s, activate_row, &(Ffn){call.gate, call.up, call.down, w->limit_experts}, call.rows);
    matmul(s->pool, &s->op_scratch, call.back, call.n_experts);
    for (int r = 0; r < call.rows; r++) {
        float weight = s->m->config.inputs_weighed ? 1 : s->weight[order[r]];
        add_scaled(sum + order[r] / w->n_used * dim, s->expert_out + r * dim, dim, weight);
    }
    return call.rows;
}

// adds the shared expert's result, with a weight if it has a router
static void add_shared_row(Session *s, const void *arg, size_t i) {
    const Layer *w = arg;
    size_t dim = s->m->config.dim;
    float weight = w->shared_router.data ? 1 / (1 + expf(-s->route[i])) : 1;
    float *out = s->out + i * dim, *shared = s->expert_out + i * dim;
    if (w->expert_post.w) norm(out, out, dim, &w->expert_post, NORM_RMS, s->m->config.eps);
    if (w->shared_post.w) norm(shared, shared, dim, &w->shared_post, NORM_RMS, s->m->config.eps);
    add_scaled(out, shared, dim, weight);
}

static void experts(Session *s) {
    const Layer *w = &s->m->layers[s->l];
    int n = s->n, rows = n * w->n_used, limit = larger(n, w->n_used);
    bool squeezed = w->squeeze.data;
    float *sum = squeezed ? s->squeezed_sum : s->out;
    if (w->router_norm.w) each_row(s, norm_row, &w->router_norm, n);
    if (!s->m->config.routed_first) product(s, &w->router, s->normed, s->route);
    if (squeezed) product(s, &w->squeeze, s->normed, s->squeezed);
    if (w->expert_norm.w) each_row(s, norm_row, &w->expert_norm, n);
    each_row(s, choose_experts, w, n);
    if (!s->op_scratch.base) count_experts(s, limit);
    else {
        sort_choices(s, rows);
        memset(sum, 0, (size_t)n * w->down.rows * sizeof *s->out);
        for (int i = 0; i < rows;) i += run_experts(s, s->order + i, rows - i, limit, sum);
    }
    if (squeezed) product(s, &w->unsqueeze, s->squeezed_sum, s->out);
    if (!w->shared_up.data) return;
    if (w->expert_norm.w) each_row(s, norm_more_row, &w->ffn_norm, n);   // the input as it was
    if (w->shared_router.data) product(s, &w->shared_router, s->normed, s->route);
    Ffn shared = {&w->shared_gate, &w->shared_up, &w->shared_down, w->limit_ffn};
    ffn_more(s, &shared, s->expert_out);
    each_row(s, add_shared_row, w, n);
}

// ---- 17. the convolution over time ----
//
// A recurrent mixer has a memory of fixed size in place of a cache. Its inputs first pass a short
// convolution over time; in LFM2 (arXiv 2511.23404) this is the whole mixer: out = W (c * conv(b *
// u)), where one projection makes the gates b and c, and u [dim].

enum { CONV_CHANNELS = 64 };   // that one call takes

// Runs the convolution on CONV_CHANNELS neighbouring channels of the chunk, then SiLU:
//
//   y[t] = silu(sum over j of tap[j] * x[t - past + j] + bias)      j = 0 .. past
//
// LFM2 has gates in place of SiLU. s->mix holds the last `past` rows before the chunk, from the
// cache, and behind them the chunk's rows. So the inputs of token t are rows t .. t + past, and its
// result can take the place of row t, because no later token reads that row. The cache then keeps
// the `past` rows before the chunk's guesses, which follow `sure` other tokens, and the guesses'
// rows: if some of these stood, the next pass begins to read that many rows later (`stood`).
static void delta_conv(Session *s, const void *arg, size_t call) {
    const Layer *w = arg;
    size_t channels = w->conv_in.rows, at = call * CONV_CHANNELS;   // first channel
    bool gated = w->mixer == MIX_CONV;
    int n = s->n, past = s->m->config.conv - 1, stood = s->pos - s->seen, sure = n - s->guesses;
    int width = channels - at < CONV_CHANNELS ? channels - at : CONV_CHANNELS;
    size_t bytes = width * sizeof(float);
    float *old = s->cache[s->l].conv + at, *mix = s->mix + at, tap[MOST_TAPS][CONV_CHANNELS];
    for (int j = 0; j <= past; j++)
        for (int i = 0; i < width; i++) tap[j][i] = w->conv[(at + i) * (past + 1) + j];
    for (int j = 0; j < past; j++) memcpy(mix + j * channels, old + (stood + j) * channels, bytes);
    for (int t = 0; gated && t < n; t++)
        for (int i = 0; i < width; i++)
            mix[(past + t) * channels + i] *= s->att[t * channels + at + i];
    for (int j = 0; j < past + s->guesses; j++)
        memcpy(old + j * channels, mix + (sure + j) * channels, bytes);
    for (int t = 0; t < n; t++) {
        float y[CONV_CHANNELS] = {0}, *x = mix + t * channels;
        float *b = s->att + t * channels + at, *c = s->z + t * channels + at;   // gates
        for (int i = 0; i < CONV_CHANNELS; i += 16)   // the CPU does not prefetch rows so far apart
            __builtin_prefetch(x + (past + 8) * channels + i);
        if (w->conv_bias) memcpy(y, w->conv_bias + at, bytes);
        for (int j = 0; j <= past; j++)
            for (int i = 0; i < width; i++) y[i] += tap[j][i] * x[j * channels + i];
        for (int i = 0; gated && i < width; i++) b[i] = y[i] * c[i];   // it is the result
        if (!gated) activate(x, NULL, y, width, ACT_SILU);
    }
}

// ---- 18. the gated delta rule (arXiv 2412.06464) ----
//
// Linear attention with a memory of fixed size: a head has a matrix S of dv x dk that maps keys to
// values. A token lets S decay by g, asks it for the value stored under its own key k, and writes
// the difference to its value v, as strongly as b says; then its query q reads:
//
//   S *= g        S += b (v - S k) k'        o = S q        (KDA: column j of S by g[j])
//
// Before the rule q, k and v pass the convolution, q and k get unit length, and two more
// projections make g and b. After the rule o passes a norm and a gate z.

// In some tensors of Qwen3-Next the rows of one key head follow those of another. Copies them into
// the order of other files: part 0 of all heads, then part 1, ... rows [parts]: of a head in each.
static Matrix load_interleaved(Loader *ld, const char *name, const int *rows, int parts) {
    int n_key = ld->m->config.n_key, dim = ld->m->config.dim, each = 0;   // each: rows of a head
    for (int k = 0; k < parts; k++) each += rows[k];
    Matrix all = load_matrix(ld, name, dim, each * n_key, 1);
    if (all.bias) refuse(ld, "tensor %s%s: bias", ld->prefix, less_mark(name));
    size_t row = ld->ok ? quant_row_bytes(all.type, dim) : 0;
    uint8_t *to = ld->ok ? keep_memory(ld, each * n_key * row) : NULL;
    const uint8_t *from = all.data;
    for (int h = 0; to && h < n_key; h++)
        for (int k = 0, at = 0; k < parts; at += rows[k++] * n_key) {   // at: the part's first row
            memcpy(to + (at + h * rows[k]) * row, from, rows[k] * row);
            from += rows[k] * row;
        }
    all.data = to;
    return all;
}

// Loads the delta rule's matrices. In: the rows of q, k and v together, and those of v.
static void load_delta(Loader *ld, Layer *w, int qkv, int values) {
    const Config *c = &ld->m->config;
    int n = c->n_value, share = n / c->n_key, wide = share * c->dv;   // of a key head
    w->delta_norm = load_norm(ld, "!ssm_norm", 1, c->dv);
    if (find_tensor(ld, "ssm_in", ".weight")) {   // early files: q, k, v and z
        Matrix all = load_interleaved(ld, "!ssm_in", (int[]){c->dk, c->dk, wide, wide}, 4);
        w->conv_in = matrix_rows(all, 0, qkv);
        w->z = matrix_rows(all, qkv, values);
    } else {
        w->conv_in = load_matrix(ld, "!attn_qkv", c->dim, qkv, 1);
        w->z = load_matrix(ld, "!attn_gate", c->dim, values, 1);
    }
    if (find_tensor(ld, "ssm_ba", ".weight")) {
        w->beta_alpha = load_interleaved(ld, "!ssm_ba", (int[]){share, share}, 2);
        w->beta = matrix_rows(w->beta_alpha, 0, n);
        w->alpha = matrix_rows(w->beta_alpha, n, n);
    } else {
        w->beta = load_matrix(ld, "!ssm_beta", c->dim, n, 1);
        w->alpha = load_matrix(ld, "!ssm_alpha", c->dim, n, 1);
    }
}

// Loads one matrix [rows][dim] under a's name, or two, a [..][dim] and after it b [rows][..].
static void load_pair(Loader *ld, const char *a_name, const char *b_name, int rows, Matrix *a,
                      Matrix *last) {
    int dim = ld->m->config.dim;
    if (find_tensor(ld, b_name, ".weight")) {
        *a = load_matrix(ld, a_name, dim, 0, 1);
        *last = load_matrix(ld, b_name, a->rows, rows, 1);
    } else *last = load_matrix(ld, a_name, dim, rows, 1);
}

// Loads Kimi Delta Attention (KDA, arXiv 2510.26692): each column of S has a decay of its own, so g
// is a vector [dk], and the gate of o is a sigmoid. q, k and v are three products with three
// convolutions, whose results lie side by side like those of one product. alpha and z may be
// products of two matrices: alpha alpha_a h, z z_a h.
static void load_kda(Loader *ld, Layer *w, int wide) {
    const Config *c = &ld->m->config;
    static const char *const name[3] = {"!ssm_conv1d_q", "!ssm_conv1d_k", "!ssm_conv1d_v"};
    const float *from[3];
    size_t taps = (size_t)wide * c->conv;
    load_fused(ld, "attn_qkv", c->dim, 1, (Slice[]){{"!attn_q", wide, &w->q},
               {"!attn_k", wide, &w->k}, {"!attn_v", wide, &w->v}}, 3);
    w->q.out_step = w->k.out_step = w->v.out_step = 3 * wide;
    w->conv_in = (Matrix){.rows = 3 * wide, .cols = c->dim};   // stands for the three
    for (int i = 0; i < 3; i++) from[i] = load_vector(ld, name[i], ".weight", taps);
    float *joined = ld->ok ? keep_memory(ld, 3 * taps * sizeof *joined) : NULL;
    for (int i = 0; joined && i < 3; i++) memcpy(joined + i * taps, from[i], taps * sizeof *joined);
    w->conv = joined;
    if (load_number(ld, "kda.safe_gate", 1) != 1) refuse(ld, "kda.safe_gate is off");
    load_pair(ld, "!ssm_f_a", "ssm_f_b", wide, &w->alpha_a, &w->alpha);
    load_pair(ld, "!ssm_g_a", "ssm_g_b", wide, &w->z_a, &w->z);
    w->beta = load_matrix(ld, "!ssm_beta", c->dim, c->n_value, 1);
    w->delta_norm = load_norm(ld, "!ssm_norm", 1, c->dv);
}

// A head's S is cut into strips of DELTA_ROWS rows. A strip is stored as [dk][DELTA_ROWS]: its rows
// lie side by side, so that one instruction works on many of them.
enum { DELTA_ROWS = 64 };

static int delta_strips(const Config *c) { return (c->dv + DELTA_ROWS - 1) / DELTA_ROWS; }

static uint64_t delta_state_size(const Config *c) {   // floats of a layer's state
    return (uint64_t)c->n_value * delta_strips(c) * c->dk * DELTA_ROWS;
}

// Scales one token's q and k to unit length, q also by 1/sqrt(dk), and computes for each value head
//   g = exp(a * t)      t = softplus(alpha + dt)      b = sigmoid(beta), or t in a state space
// or, with a bound, g = exp(kda_lower * sigmoid(a * (alpha + dt))).
static void delta_gates_row(Session *s, const void *arg, size_t i) {
    const Layer *w = arg;
    const Config *c = &s->m->config;
    int each = larger(c->kda, 1);   // decays of a value head
    float *mix = s->mix + i * w->conv_in.rows, *write = s->strength + i * c->n_value;
    float *decay = s->decay + i * c->n_value * each;
    for (int h = 0; w->mixer == MIX_DELTA && h < 2 * c->n_key; h++) {
        float *x = mix + (size_t)h * c->dk, length = sqrtf(sum16(x, c->dk, 0, true) + c->eps);
        float scale = (h < c->n_key ? 1 / sqrtf(c->dk) : 1) / length;
        for (int j = 0; j < c->dk; j++) x[j] *= scale;
    }
    for (int h = 0; h < c->n_value; h++) {
        float a = w->a[h], t = 0;
        for (int j = h * each; j < (h + 1) * each; j++) {
            float x = decay[j] + w->dt_bias[j];
            t = log1p_exp(x);
            decay[j] = expf(c->kda_lower < 0 ? c->kda_lower / (1 + expf(-a * x)) : a * t);
        }
        write[h] = w->mixer == MIX_SPACE ? t : 1 / (1 + expf(-write[h]));
    }
}

// The inputs of value head h for token t of the chunk. The next token's inputs stand `step` floats
// further on. A row of s->mix is q | k | v of all heads, in a state space v | k | q.
typedef struct { const float *q, *k, *v; size_t step; } HeadInputs;
static HeadInputs head_inputs(const Session *s, const Layer *w, int h, int t) {
    const Config *c = &s->m->config;
    int key = c->key_tiled ? h % c->n_key : h / (c->n_value / c->n_key);   // the key head
    size_t keys = c->n_key * c->dk, values = c->n_value * c->dv;   // floats of all heads
    size_t at = key * c->dk, at_v = h * c->dv, step = w->conv_in.rows;   // the head's, among all
    const float *row = s->mix + t * step, *behind = row + values;
    if (w->mixer == MIX_SPACE)
        return (HeadInputs){behind + keys + at, behind + at, row + at_v, step};
    return (HeadInputs){row + at, row + keys + at, row + 2 * keys + at_v, step};
}

typedef struct { size_t i; float *state; int t, end; } Strip;   // its number; tokens t .. end-1

// The rule in plain loops, on a strip of S. A state space does not ask.
static UNUSED void plain_memory(Session *s, const Layer *w, Strip a) {
    const Config *c = &s->m->config;
    int strips = delta_strips(c), h = a.i / strips, first = a.i % strips * DELTA_ROWS, dk = c->dk;
    bool asks = w->mixer == MIX_DELTA;
    HeadInputs in = head_inputs(s, w, h, a.t);
    for (int t = a.t; t < a.end; t++, in.q += in.step, in.k += in.step, in.v += in.step) {
        size_t head = (size_t)t * c->n_value + h;
        const float *g = c->kda ? s->decay + head * dk : s->decay + head;
        for (int r = first; r < c->dv && r < first + DELTA_ROWS; r++) {
            float *S = a.state + r - first;   // row r
            float stored = 0, out = asks ? 0 : in.v[r] * w->skip[h];
            for (int j = 0; j < dk; j++) S[j * DELTA_ROWS] *= g[c->kda ? j : 0];
            for (int j = 0; asks && j < dk; j++) stored += S[j * DELTA_ROWS] * in.k[j];
            float write = (in.v[r] - stored) * s->strength[head];
            for (int j = 0; j < dk; j++) S[j * DELTA_ROWS] += write * in.k[j];
            for (int j = 0; j < dk; j++) out += S[j * DELTA_ROWS] * in.q[j];
            s->att[head * c->dv + r] = out;
        }
    }
}

static void memory_strip(Session *s, const Layer *w, Strip a);   // plain_memory, or Part V's

// A state cannot forget a guess that was wrong. So guesses change a copy, `trial`, and their inputs
// are kept. The next pass applies the kept inputs of those that stood before its own tokens: no
// product of matrices runs twice. Here strip i of S sees all that.
static void delta_strip(Session *s, const void *w, size_t i) {
    int n = s->n, sure = n - s->guesses;
    size_t size = (size_t)s->m->config.dk * DELTA_ROWS;
    float *state = s->cache[s->l].state + i * size, *trial = s->trial + i * size;
    Strip stood = {i, state, n, n + s->pos - s->seen};
    if (stood.end > n) memory_strip(s, w, stood);
    memory_strip(s, w, (Strip){i, state, 0, sure});
    if (!s->guesses) return;
    memcpy(trial, state, size * sizeof *trial);
    memory_strip(s, w, (Strip){i, trial, sure, n});
}

// Puts the kept inputs of guesses that stood behind the chunk's rows, where delta_strip reads them,
// and keeps those of this chunk's guesses.
static void keep_inputs(Session *s, const Layer *w) {
    size_t n = s->n, h = s->m->config.n_value, stood = s->pos - s->seen;
    size_t width[] = {w->conv_in.rows, h * larger(s->m->config.kda, 1), h};
    float *rows[] = {s->mix, s->decay, s->strength}, *kept = s->kept + s->l * s->n_kept;
    for (int k = 0; k < 3; kept += FEW * width[k++]) {
        memcpy(rows[k] + n * width[k], kept, stood * width[k] * sizeof *kept);
        memcpy(kept, rows[k] + (n - s->guesses) * width[k], s->guesses * width[k] * sizeof *kept);
    }
}

// norm(o) * silu(z), in KDA norm(o) * sigmoid(z), in a state space norm(o * silu(z))
static void delta_out_row(Session *s, const void *arg, size_t i) {
    const Config *c = &s->m->config;
    const Layer *w = arg;
    int n = c->n_value * c->dv;
    float *o = s->att + i * n, *z = s->z + i * n;
    if (w->mixer == MIX_SPACE) activate(o, z, o, n, ACT_SILU);
    if (w->delta_norm.w) norm(o, o, n, &w->delta_norm, NORM_RMS, c->eps);
    if (w->mixer == MIX_DELTA && !c->kda) activate(o, z, o, n, ACT_SILU);
    for (int j = 0; c->kda && j < n; j++) o[j] /= 1 + exp_fast(-z[j]);
}

// ---- the state space (Mamba-2, arXiv 2405.21060) ----
//
// The same memory, written without asking. A head writes its value x under the key b as strongly
// as t says; t also sets how much decays. Then c reads, and x itself is added:
//
//   S *= exp(a t)        S += t x b'        y = S c + skip x
//
// One projection makes z and x [n_value][dv], b and c [n_key][dk], and dt [n_value]. x, b and c
// pass the convolution. Heads share b and c in groups, and the outputs of a group are normed
// together.

// Loads them. In: the rows of x, b and c together, and those of x.
static void load_space(Loader *ld, Layer *w, int xbc, int values) {
    const Config *c = &ld->m->config;
    load_fused(ld, "ssm_in", c->dim, 1, (Slice[]){{"!", values, &w->z}, {"!", xbc, &w->conv_in},
                                                  {"!", c->n_value, &w->alpha}}, 3);
    w->skip = load_vector(ld, "!ssm_d", "", c->n_value);
    w->delta_norm = load_norm(ld, "ssm_norm", c->n_key, values / c->n_key);
    if (w->delta_norm.w && !w->delta_norm.group) refuse(ld, "layer %d: ssm_norm's shape", ld->l);
}

// ---- 19. layers with a recurrent mixer ----

// Finds out which mixer the layer has, and loads it. Returns whether the layer has attention, in
// place of a mixer or beside it.
static bool load_recurrent(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    int keys = c->n_key * c->dk, values = c->n_value * c->dv, qkv = 2 * keys + values;
    if (find_tensor(ld, "shortconv.in_proj", ".weight")) w->mixer = MIX_CONV;
    if (find_tensor(ld, "ssm_conv1d", ".weight")) w->mixer = MIX_DELTA;
    if (find_tensor(ld, "ssm_in", ".weight") && !find_tensor(ld, "ssm_ba", ".weight"))
        w->mixer = MIX_SPACE;
    if (c->kda) w->mixer = find_tensor(ld, "ssm_f_a", ".weight") ? MIX_DELTA : MIX_NONE;
    if (!w->mixer) return true;
    bool conv = w->mixer == MIX_CONV;
    const char *taps = conv ? "!shortconv.conv" : "!ssm_conv1d";
    if (!c->conv || !c->causal) refuse(ld, "layer %d: want a causal convolution", ld->l);
    if (conv)
        load_fused(ld, "shortconv.in_proj", c->dim, 1, (Slice[]){{"!", c->dim, &w->alpha},
                   {"!", c->dim, &w->z}, {"!", c->dim, &w->conv_in}}, 3);
    else {
        if (c->n_key < 1 || c->n_value < 1 || c->n_value % c->n_key || !keys || !values)
            refuse(ld, "layer %d: %d value heads cannot share %d key heads (widths %d, %d)",
                   ld->l, c->n_value, c->n_key, c->dv, c->dk);
        if (ld->ok && delta_state_size(c) > (uint64_t)64 * qkv * c->dim)
            refuse(ld, "layer %d: a state of %.0f numbers is too large for its weights",
                   ld->l, (double)delta_state_size(c));
        if (!ld->ok) return false;
        if (c->kda) load_kda(ld, w, values);
        else (w->mixer == MIX_SPACE ? load_space : load_delta)(ld, w, qkv, values);
        w->dt_bias = load_vector(ld, "!ssm_dt", ".bias", (uint64_t)c->n_value * larger(c->kda, 1));
        w->a = load_vector(ld, "!ssm_a", "", c->n_value);
    }
    const char *out = conv ? "!shortconv.out_proj" : "!ssm_out";
    if (c->kda) out = "!attn_output";
    w->delta_out = load_matrix(ld, out, w->z.rows, c->dim, 1);
    if (c->kda) return false;
    w->conv = load_vector(ld, taps, ".weight", (size_t)w->conv_in.rows * c->conv);
    w->conv_bias = load_vector(ld, taps + 1, ".bias", w->conv_in.rows);   // which may be missing
    return w->mixer == MIX_SPACE && (find_tensor(ld, "attn_q", ".weight") ||
                                     find_tensor(ld, "attn_qkv", ".weight"));
}

// Makes the inputs of a recurrent mixer: what passes the convolution (to mix), gates z, decays, and
// how strongly it writes. KDA's decays and gates may be two products each, of which the first goes
// to s->att, because that is free until there is a result.
static void recurrent_products(Session *s, const Layer *w, float *mix) {
    int n = s->n, first = s->m->config.kda ? 0 : 3;   // KDA: q, k and v in place of conv_in
    bool two = w->alpha_a.data, z_two = w->z_a.data;
    float *alpha_a = s->att, *z_a = s->att + n * w->alpha_a.rows;
    float *alpha = w->mixer == MIX_CONV ? s->att : s->decay;   // a gate, or decays
    const float *x = s->normed;
    Matmul in[] = {{&w->q, x, mix, n},
                   {&w->k, x, mix + w->q.rows, n},
                   {&w->v, x, mix + 2 * w->q.rows, n},
                   {&w->conv_in, x, mix, n},
                   z_two ? (Matmul){&w->z_a, x, z_a, n} : (Matmul){&w->z, x, s->z, n},
                   two ? (Matmul){&w->alpha_a, x, alpha_a, n} : (Matmul){&w->alpha, x, alpha, n},
                   {&w->beta, x, s->strength, n}};
    products(s, in + first, 7 - first);
    if (two) product(s, &w->alpha, alpha_a, s->decay);
    if (z_two) product(s, &w->z, z_a, s->z);
}

static void recurrent(Session *s) {
    const Config *c = &s->m->config;
    const Layer *w = &s->m->layers[s->l];
    int n = s->n, calls = (w->conv_in.rows + CONV_CHANNELS - 1) / CONV_CHANNELS;
    recurrent_products(s, w, s->mix + (c->conv - 1) * w->conv_in.rows);   // behind what was before
    each_row(s, delta_conv, w, calls);
    if (w->mixer != MIX_CONV) {
        each_row(s, delta_gates_row, w, n);
        if (s->guesses || s->pos > s->seen) keep_inputs(s, w);
        each_row(s, delta_strip, w, c->n_value * delta_strips(c));
        each_row(s, delta_out_row, w, n);
    }
    product(s, &w->delta_out, s->att, s->out);
}

// ---- 20. latent attention (arXiv 2405.04434) ----
//
// The cache holds two vectors of a token, which all heads share: c, from which each head could make
// its key and its value, and r, a key with RoPE. But a head does not make them. It applies its
// matrix Kb [lora][nope] once to its query, not to each c, and Vb [vd][lora] once to the sum of the
// c's. So this is attention with one KV head, whose keys begin with its values:
//
//   c | r = A h                      of each token; the cache has its row, norm(c) | rope(r)
//   q = Qb norm(Qa h), or Q h        of each head; its parts are nope | rotated
//   query = Kb nope | rope(rotated)
//   o = Vb (the sum of the norm(c)'s, weighed by softmax(scale * query . row))

// Returns Kb of all heads, transposed from the rows that make keys in some files.
static Matrix load_turned(Loader *ld, const Matrix *w, int n_head, int nope) {
    size_t lora = w->cols, size = lora * nope;
    uint16_t *to = ld->ok ? keep_memory(ld, (uint64_t)n_head * size * sizeof *to) : NULL;
    float row[MOST_LATENT];
    for (int i = 0; to && i < n_head * nope; i++) {
        Matrix head = matrix_expert(w, i / nope);
        matrix_row(&head, i % nope, row);
        for (size_t j = 0; j < lora; j++)
            to[i / nope * size + j * nope + i % nope] = quant_f32_to_f16(row[j]);
    }
    return (Matrix){(uint8_t *)to, QUANT_F16, lora, nope, NULL, NULL, 2 * size, 0, 0};
}

// Sets the widths of the queries and values that a head stands for; the scale follows from them.
// Where RoPE is scaled by a factor, scores grow by m^2:
//   m = 1 + yarn_log ln(factor)      DeepSeek, whose files give a tenth of yarn_log
//   m = 1 + 0.1 ln(factor)           the others, times the first if they have no YaRN
static void derive_latent(Config *c, uint64_t flags) {
    int wide = c->lora + c->n_rot[FULL];   // of a row of the cache
    bool swapped = c->hd != wide && c->latent_hd == wide;   // by Ollama
    if (!c->latent_hd || swapped) c->latent_hd = c->hd;
    if (!c->latent_vd || swapped) c->latent_vd = c->vd;
    if (c->lora) c->attn_scale = 1 / sqrtf(c->latent_hd);
    if (!(flags & (YARN_SCORES | YARN_LOG))) return;
    bool by_log = c->yarn && c->yarn_log != 0 && flags & YARN_LOG;
    float far = logf(c->rope_factor), grown = by_log ? 1 : 1 + 0.1f * far;
    if (by_log || !c->yarn) grown *= 1 + c->yarn_log * far;
    c->attn_scale *= powf(c->rope_mag * grown, 2);
    c->yarn_log = by_log ? 1 : 10 * c->yarn_log;   // 1: rope_scaling returns rope_mag
}

// Loads latent attention. Out: the layer's one KV head, of widths lora + n_rot and lora.
static void load_latent(Loader *ld, Layer *w) {
    const Config *c = &ld->m->config;
    int n = w->n_head, hd = c->latent_hd, vd = c->latent_vd, nope = hd - w->n_rot;
    if (nope < 1 || w->n_rot < 1 || vd < 1 || c->lora < 1 || hd > 4096)
        return (void)refuse(ld, "latent attention: heads of %d (%d rotated) and %d, of %d numbers",
                            hd, w->n_rot, vd, c->lora);
    w->n_kv = 1;
    w->hd = c->lora + w->n_rot;
    w->vd = c->lora;
    w->q_a = load_matrix(ld, "attn_q_a", c->dim, 0, 1);
    if (w->q_a.data) w->q_a_norm = load_norm(ld, "!attn_q_a_norm", 1, w->q_a.rows);
    int from = w->q_a.data ? (int)w->q_a.rows : c->dim;
    w->q = load_matrix(ld, w->q_a.data ? "!attn_q_b" : "!attn_q", from, n * hd, 1);
    w->k = load_matrix(ld, "!attn_kv_a_mqa", c->dim, w->hd, 1);
    w->latent_norm = load_norm(ld, "!attn_kv_a_norm", 1, c->lora);
    w->k_b = load_matrix(ld, c->kda ? "!attn_k_b" : "attn_k_b", nope, c->lora, n);
    const char *kv_b = w->k_b.data ? "attn_kv_b" : "!attn_kv_b";
    Matrix both = load_matrix(ld, kv_b, c->lora, n * (nope + vd), 1);
    if (w->k_b.data) w->v_b = load_matrix(ld, "!attn_v_b", c->lora, vd, n);
    else {   // one tensor has, for each head, rows for keys and rows for values
        if (both.bias || both.scale) refuse(ld, "tensor attn_kv_b: bias or scale");
        both.step = (nope + vd) * quant_row_bytes(both.type, c->lora);
        w->k_b = load_turned(ld, &both, n, nope);
        w->v_b = matrix_rows(both, nope, vd);
    }
    w->k_b.x_step = n * hd;
    w->k_b.out_step = n * w->hd;
    w->v_b.x_step = n * c->lora;
    w->v_b.out_step = n * vd;
    load_gate(ld, w, n, vd);
    w->o = load_matrix(ld, "!attn_output", n * vd, c->dim, 1);
}

static void latent_query_row(Session *s, const void *arg, size_t i) {   // norm(Qa h)
    const Norm *w = arg;
    norm(s->z + i * w->n, s->z + i * w->n, w->n, w, NORM_RMS, s->m->config.eps);
}

// Norms and rotates a token's row, and caches it. Rotates the last n_rot numbers of its queries.
static void latent_row(Session *s, const void *arg, size_t i) {
    const Layer *w = arg;
    const Config *c = &s->m->config;
    Cache *kv = &s->cache[s->l];
    int pos = s->pos + i, hd = w->q.rows / w->n_head, slot = cache_row(kv, pos);
    float *q = s->mix + i * w->q.rows, *to = s->q + i * w->n_head * w->hd + w->vd;
    float *row = s->k + i * w->hd;
    const float *turn = s->angles[w->window ? WINDOWED : FULL] + i * w->n_rot;
    sharpen(s, q, w->q.rows, pos);
    norm(row, row, w->vd, &w->latent_norm, NORM_RMS, c->eps);
    rope(row + w->vd, turn, w->n_rot, w->rope);
    uint16_t *to_row = kv->k + (size_t)slot * w->hd;
    narrow(row, w->hd, to_row);
    cache_finite(to_row, w->vd, to_row + w->vd);   // the rotated numbers are no value's
    kv->pos[slot] = pos;
    for (int h = 0; h < w->n_head; h++, q += hd, to += w->hd) {
        memcpy(to, q + hd - w->n_rot, w->n_rot * sizeof *q);
        rope(to, turn, w->n_rot, w->rope);
    }
}

// out [n][n_head][..] = each head's matrix times its own part of x [n][n_head][..]
static void head_products(Session *s, const Matrix *w, const float *x, float *out) {
    size_t n_head = s->m->layers[s->l].n_head, wide = w->x_step / n_head, to = w->out_step / n_head;
    for (size_t h = 0, k = 0; h < n_head; h += k) {
        Matrix part[MAX_JOBS];
        Matmul jobs[MAX_JOBS];
        for (k = 0; k < MAX_JOBS && h + k < n_head; k++) {
            part[k] = matrix_expert(w, h + k);
            jobs[k] = (Matmul){&part[k], x + (h + k) * wide, out + (h + k) * to, s->n};
        }
        matmul(s->pool, &s->op_scratch, jobs, k);
    }
}

static void latent_attention(Session *s) {
    const Layer *w = &s->m->layers[s->l];
    bool two = w->q_a.data, gates = w->attn_gate.data;   // two products make q
    int n = s->n;
    Matmul in[] = {{&w->k, s->normed, s->k, n}, {&w->q, s->normed, s->mix, n}};
    if (two) in[1] = (Matmul){&w->q_a, s->normed, s->z, n};
    matmul(s->pool, &s->op_scratch, in, 2);
    if (two) each_row(s, latent_query_row, &w->q_a_norm, n);
    if (two) product(s, &w->q, s->z, s->mix);
    each_row(s, latent_row, w, n);
    head_products(s, &w->k_b, s->mix, s->q);
    attend(s);
    head_products(s, &w->v_b, s->att, s->mix);
    if (gates) product(s, &w->attn_gate, s->normed, s->z);
    if (gates) each_row(s, gate_row, w, n);
    product(s, &w->o, s->mix, s->out);
}

// ---- 21. borrowed caches, an input for each layer (Gemma 4) ----
//
// The last layers have no keys and values: each reads the cache of the last layer before them that
// is of its kind, windowed or not. And each layer has p numbers of its own for each token, made of
// a second, large table of embeddings T and of the first embedding x. A gate adds them at its end:
//
//   e_l = (norm(P x / sqrt(dim))_l + sqrt(p) T[id]_l) / sqrt(2)
//   x += norm(Proj (act(Gate x) * e_l))

static bool load_source(Loader *ld, Layer *w) {   // sets w->source; does the layer borrow a cache?
    const Config *c = &ld->m->config;
    int n_borrow = ld->hints.n_borrow;
    int n_cached = larger(larger(c->n_layer, n_borrow) - n_borrow, 1);
    if (ld->l < n_cached || ld->l >= c->n_layer || w->mixer) return false;
    const Layer *all = ld->m->layers, *from = &all[n_cached - 1];
    while (from > all && !from->window != !w->window) from--;
    if (from->n_kv != w->n_kv || from->hd != w->hd || from->vd != w->vd || !from->k.rows)
        refuse(ld, "layer %d: there is no cache that it could read", ld->l);
    w->source = from - all;
    return true;
}

static void load_inputs(Loader *ld, Layer *w) {   // of a layer; NULL: what all layers share
    Model *m = ld->m;
    int p = m->config.per_layer, all = m->config.n_layer * p, dim = m->config.dim;
    if (w) {
        w->input_gate = load_matrix(ld, "!inp_gate", dim, p, 1);
        w->input_proj = load_matrix(ld, "!proj", p, dim, 1);
        w->input_norm = load_norm(ld, "!post_norm", 1, dim);
        return;
    }
    m->layer_embd = load_matrix(ld, "!per_layer_token_embd", all, 0, 1);
    m->layer_proj = load_matrix(ld, "!per_layer_model_proj", dim, all, 1);
    m->layer_norm = load_norm(ld, "!per_layer_proj_norm", 1, p);
    if (m->layer_embd.rows < m->embd.rows)
        refuse(ld, "per_layer_token_embd has %d rows", (int)m->layer_embd.rows);
}

static void layer_inputs_row(Session *s, const void *arg, size_t i) {   // e of all layers
    const Config *c = &s->m->config;
    const Matrix *w = arg;
    const uint8_t *row = w->data + s->ids[i] * quant_row_bytes(w->type, w->cols);
    int all = w->cols;
    float *e = s->inputs + i * all, part[256];   // whole blocks of any format
    norm(e, e, all, &s->m->layer_norm, NORM_RMS, c->eps * c->dim);   // so e / sqrt(dim) is normed
    for (int k = 0; k < all; k += 256) {
        int n = all - k < 256 ? all - k : 256;
        quant_dequantize(w->type, row + quant_row_bytes(w->type, k), part, n);
        add_scaled(e + k, part, n, sqrtf(c->per_layer));
        for (int j = 0; j < n; j++) e[k + j] *= sqrtf(0.5f);
    }
}

static void make_layer_inputs(Session *s) {
    if (!s->m->config.per_layer) return;
    product(s, &s->m->layer_proj, s->x, s->inputs);
    each_row(s, layer_inputs_row, &s->m->layer_embd, s->n);
}

static void layer_input_row(Session *s, const void *arg, size_t i) {   // act(Gate x) * e
    const Config *c = arg;
    int p = c->per_layer;
    float *gate = s->gate + i * p;
    activate(gate, gate, s->inputs + (i * c->n_layer + s->l) * p, p, c->act);
}

static void add_layer_input(Session *s) {
    const Layer *w = &s->m->layers[s->l];
    product(s, &w->input_gate, s->x, s->gate);
    each_row(s, layer_input_row, &s->m->config, s->n);
    product(s, &w->input_proj, s->gate, s->out);
    each_row(s, add_more_row, &w->input_norm, s->n);
}

// ---- 22. further tokens (arXiv 2412.19437, 2.2) ----
//
// Behind the layers some files have a block that predicts the token after the next ("nextn",
// multi-token prediction, MTP). The state h of a token is what `output` multiplies. For the token
// at p, with the embedding e, and the state h of the token before it:
//
//   x  = joint * [norm(e); norm(h)]     passes the block, a layer with a cache of its own, at p
//   h' = norm(x)                        logits of the token at p + 1 = output * h'
//
// With h' for h the block guesses on. (Step 3.5: each guess has a block, and h is the stream.) The
// first ids alone are guessed, because output takes most of the time. As the layers check guesses,
// a row that the cache lacks makes guesses worse, and no more.

// Loads the n_nextn blocks. What is not known of one leaves it idle, and later ones.
static void load_nextn(Loader ld) {
    Model *m = ld.m;
    Config *c = &m->config;
    ld.e = &m->nextn_idle;
    for (int i = 0; i < c->n_nextn; i++) {
        ld.l = c->n_layer + i;
        Layer *w = &m->layers[ld.l];
        load_layer(&ld, w);
        if (ld.arch->no_rope != 1) w->rope = c->rope;   // whatever its place (Cohere 2)
        w->joint = load_matrix(&ld, "nextn.eh_proj", 2 * c->dim, c->dim, 1);
        w->embd_norm = load_norm(&ld, "!nextn.enorm", 1, c->dim);
        w->state_norm = load_norm(&ld, "!nextn.hnorm", 1, c->dim);
        w->out_norm = load_norm(&ld, "nextn.shared_head_norm", 1, c->dim);
        if (!w->out_norm.w) w->out_norm = load_norm(&ld, "layer_output_norm", 1, c->dim);   // MiMo
        if (!w->out_norm.w) w->out_norm = m->out_norm;
        w->embd = load_matrix(&ld, "nextn.embed_tokens", c->dim, m->embd.rows, 1);
        if (!w->embd.data) w->embd = m->embd;
        w->output = load_matrix(&ld, "nextn.shared_head_head", c->dim, c->n_vocab, 1);
        if (!w->output.data) w->output = m->output;
        w->output = matrix_rows(w->output, 0, smaller(c->n_vocab, 1 << 16));   // frequent ids
        if (!w->n_kv || w->mixer || !w->up.data || c->n_loops > 1 || c->per_layer || !c->causal)
            refuse(&ld, "block %d: unlike a causal layer with attention and an FFN", ld.l);
        if (!ld.ok) c->n_nextn = i;
    }
}

static bool gpu_nextn(Session *s, int block, const int32_t *ids, int n, int pos);   // passes it
static bool gpu_best(const Session *s, int32_t *id, double *chance);   // what nextn_best finds then

static float *state_at(const Session *s, int pos) {   // there is room for those of a chunk
    return s->states + (size_t)(pos % s->o.chunk) * s->m->config.dim;
}

static void keep_state_row(Session *s, const void *arg, size_t i) {
    const Config *c = &s->m->config;
    const float *x = s->x + i * c->dim;
    if (c->nextn_raw) memcpy(state_at(s, s->pos + i), x, c->dim * sizeof *x);
    else norm(state_at(s, s->pos + i), x, c->dim, arg, c->norm, c->eps);
}

static void keep_states(Session *s) {
    if (s->n_cache > s->m->config.n_layer) each_row(s, keep_state_row, &s->m->out_norm, s->n);
}

static void pair_row(Session *s, const void *arg, size_t i) {   // to s->normed and behind it s->out
    const Layer *w = arg;
    const Config *c = &s->m->config;
    float *pair = s->normed + 2 * i * c->dim;
    matrix_row(&w->embd, s->ids[i], pair);
    norm(pair, pair, c->dim, &w->embd_norm, c->norm, c->eps);
    norm(pair + c->dim, state_at(s, s->pos + i - 1), c->dim, &w->state_norm, c->norm, c->eps);
}

// n tokens at pos .. pos+n-1 pass a block, which leaves x in s->x
static void nextn_forward(Session *s, int block, const int32_t *ids, int n, int pos) {
    const Config *c = &s->m->config;
    const Layer *w = &s->m->layers[c->n_layer + block];
    assert(n > 0 && n <= s->o.chunk);
    s->l = c->n_layer + block;
    if (ids && gpu_nextn(s, block, ids, n, pos)) return;
    s->ids = ids;
    s->n = n;
    s->pos = pos;
    each_row(s, angles_row, NULL, n);
    each_row(s, pair_row, w, n);
    product(s, &w->joint, s->normed, s->x);
    forward_layer(s);
}

// Runs the blocks for the tokens below `end` that they have not seen, from s->nextn_pos on: before
// states would be overwritten, and when a guess is wanted. The first block is the last to run.
static void nextn_follow(Session *s, const int32_t *ids, int end) {
    int pos = s->nextn_pos, block = s->n_cache - s->m->config.n_layer;
    if (pos >= end) return;
    while (block-- > 0) nextn_forward(s, block, ids + pos, end - pos, pos);
    s->nextn_pos = end;
}

// Returns the best id of the last row in a block, and makes its state. Multiplies *chance by the
// id's probability.
static int32_t nextn_best(Session *s, double *chance) {
    const Config *c = &s->m->config;
    const Layer *w = &s->m->layers[s->l];
    int last = s->n - 1, best = 0, kind = c->nextn_layer_norm ? NORM_LAYER : c->norm;
    const float *x = s->x + (size_t)last * c->dim, *logits = s->logits;
    double sum = 0;
    if (gpu_best(s, &best, chance)) return best;
    norm(s->normed, x, c->dim, &w->out_norm, kind, c->eps);
    matmul(s->pool, &s->op_scratch, &(Matmul){&w->output, s->normed, s->logits, 1}, 1);
    memcpy(state_at(s, s->pos + last), c->nextn_raw ? x : s->normed, c->dim * sizeof *x);
    for (int i = 1; i < w->output.rows; i++)
        if (logits[i] > logits[best]) best = i;
    for (int i = 0; i < w->output.rows; i++)
        sum += exp_fast((logits[i] - logits[best]) * c->logit_scale);
    *chance /= sum;   // exp(0) / sum
    return best;
}

// ---- 23. memory ----

// Takes count * size bytes; without memory (base NULL) only counts them. Where a plan sets `used`
// back, buffers that never live together share bytes.
static void *arena_take(Arena *a, uint64_t count, uint64_t size) {
    uint64_t at = a->used;
    a->used += (count * size + 63) / 64 * 64;
    a->peak = larger(a->peak, a->used);
    assert(!a->base || a->used <= a->size);   // both runs take the same
    return a->base ? a->base + at : NULL;
}

enum { BEST_IDS = 256 };   // neighbouring logits of which the sampler, or a GPU, finds the best
typedef struct Best { float logit, id, sum; } Best;   // -3e38 at least; the others: see gpu_best
static size_t best_parts(size_t n) { return (n + BEST_IDS - 1) / BEST_IDS; }   // of n logits

// the most floats that a token takes in each buffer
typedef struct { uint64_t q, k, v, att, mix, z, ff, squeezed; } Widths;

static void widen(Widths *most, const Layer *w) {   // so that layer w fits
    size_t heads = (size_t)w->n_head * w->hd, gates = gates_in_q(w) ? heads : 0;
    most->q = larger(most->q, heads);
    most->k = larger(most->k, w->k.rows);
    most->v = larger(most->v, w->v.rows);
    most->att = larger(most->att, (size_t)w->n_head * w->vd);
    most->ff = larger(most->ff, larger(w->ff, w->shared_up.rows));
    most->squeezed = larger(most->squeezed, w->squeeze.rows);
    // gates of attention, a convolution's channels; latent attention: inputs of q, of k_b and of o
    most->mix = larger(most->mix, larger(2 * gates, w->conv_in.rows));
    if (w->k_b.data) most->mix = larger(most->mix, larger(w->q.rows, w->o.cols));
    most->z = larger(most->z, larger(w->q_a.rows, w->z.rows + gates + w->attn_gate.rows));
    // recurrent mixers: the result, and inputs of alpha and z
    most->att = larger(most->att, larger(w->z.rows, w->alpha_a.rows + w->z_a.rows));
}

// The states of recurrent layers lie side by side, so that a snapshot is one copy.
static void plan_states(Session *s, Arena *a) {
    const Config *c = &s->m->config;
    uint64_t start = a->used, f = sizeof(float), trial = 0;
    s->recurrent = arena_take(a, 0, f);   // no bytes: where the first one begins
    for (int l = 0; l < c->n_layer; l++) {
        const Layer *w = &s->m->layers[l];
        if (!w->mixer) continue;
        s->cache[l].conv = arena_take(a, (c->conv - 1 + FEW) * w->conv_in.rows, f);
        uint64_t inputs = w->conv_in.rows + c->n_value * (1 + larger(c->kda, 1));
        s->n_kept = larger(s->n_kept, FEW * inputs);
        if (w->mixer == MIX_CONV) continue;
        trial = delta_state_size(c);
        s->cache[l].state = arena_take(a, trial, f);
    }
    s->n_recurrent = (a->used - start) / f;
    s->saved = arena_take(a, s->n_recurrent, f);
    s->kept = arena_take(a, c->n_layer * s->n_kept, f);
    s->trial = arena_take(a, trial, f);
}

static void plan_caches(Session *s, Arena *a) {
    plan_states(s, a);
    for (int l = 0; l < s->n_cache; l++) {
        const Layer *w = &s->m->layers[l];
        Cache *cache = &s->cache[l];
        if (!w->n_kv) continue;
        if (w->source != l) {   // Gemma 4: it reads the cache of an earlier layer
            *cache = s->cache[w->source];
            continue;
        }
        bool own = w->window && w->window < s->o.window;   // the smaller window counts
        cache->window = own ? w->window : s->o.window;
        cache->keep = own ? 0 : s->o.keep;   // such layers were trained without the first tokens
        // guesses that fell were written, too: up to FEW rows, if a chunk is less
        cache->rows = cache->keep + cache->window + larger(s->o.chunk, FEW);
        uint64_t rows = (uint64_t)w->n_kv * cache->rows;
        cache->k = arena_take(a, rows, w->hd * sizeof *cache->k);
        cache->v = cache->k;   // latent attention
        if (!w->k_b.data) cache->v = arena_take(a, rows, w->vd * sizeof *cache->v);
        cache->pos = arena_take(a, cache->rows, sizeof *cache->pos);
    }
}

static bool gpu_copy(Session *s, float *to, const float *from, size_t bytes);   // of the states
static void copy_states(Session *s, float *to, const float *from) {
    size_t bytes = s->n_recurrent * sizeof *to;
    if (bytes && !gpu_copy(s, to, from, bytes)) memcpy(to, from, bytes);
}

// Returns the most scratch that matmul and attention take, by dry runs: a few tokens and a chunk
// take different ways.
static uint64_t count_op_scratch(Session *s) {
    int counts[] = {s->o.chunk < FEW ? s->o.chunk : FEW, s->o.chunk};
    s->op_scratch = (Arena){0};
    for (int k = 0; k < 2; k++) {
        int rows = counts[k] < LOGIT_ROWS ? counts[k] : LOGIT_ROWS;
        forward(s, NULL, counts[k], 0);
        for (int b = 0; b < s->n_cache - s->m->config.n_layer; b++)
            nextn_forward(s, b, NULL, counts[k], 0);
        matmul(s->pool, &s->op_scratch, &(Matmul){&s->m->output, s->normed, NULL, rows}, 1);
    }
    return s->op_scratch.peak;
}

// Takes every buffer that forward uses, as wide as the widest layer needs. Buffers of attention (or
// another mixer), of the FFN (or experts), and of the logits never live together: they share bytes.
static void plan_scratch(Session *s, Arena *a) {
    const Config *c = &s->m->config;
    uint64_t n = s->o.chunk, f = sizeof(float), op_scratch = count_op_scratch(s);
    Widths most = {.ff = c->per_layer};
    for (int l = 0; l < s->n_cache; l++) widen(&most, &s->m->layers[l]);
    s->op_scratch.base = arena_take(a, 1, op_scratch);
    s->op_scratch.size = op_scratch;
    s->x = arena_take(a, n * c->dim, f);
    s->normed = arena_take(a, n * c->dim, f);
    s->out = arena_take(a, n * c->dim, f);   // behind normed, see pair_row
    s->inputs = arena_take(a, n * c->n_layer * c->per_layer, f);
    for (int i = 0; i < 2; i++) s->angles[i] = arena_take(a, n * c->n_rot[i], f);
    for (int i = 0; i < 2; i++) s->freq[i] = arena_take(a, c->n_rot[i] / 2, sizeof(double));
    s->slopes = arena_take(a, c->n_head, f);
    if (a->base) alibi_slopes(s->slopes, c->n_head, c->alibi);
    s->states = arena_take(a, s->n_cache > c->n_layer ? n * c->dim : 0, f);
    s->route = arena_take(a, n * larger(c->n_expert, 1), f);   // SmallThinker: before attention
    uint64_t start = a->used;   // 1: attention or another mixer
    s->q = arena_take(a, n * most.q, f);
    s->k = arena_take(a, n * most.k, f);
    s->v = arena_take(a, n * most.v, f);
    s->att = arena_take(a, (n + FEW) * most.att, f);
    s->mix = arena_take(a, (n + c->conv + FEW) * most.mix, f);
    s->z = arena_take(a, n * most.z, f);
    s->decay = arena_take(a, (n + FEW) * c->n_value * larger(c->kda, 1), f);
    s->strength = arena_take(a, (n + FEW) * c->n_value, f);
    a->used = start;            // 2: the FFN or experts
    uint64_t rows = larger(n, c->n_used), wide = c->n_expert ? larger(c->dim, most.squeezed) : 0;
    s->gate = arena_take(a, rows * most.ff, f);
    s->up = arena_take(a, rows * most.ff, f);
    s->gathered = arena_take(a, rows * wide, f);
    s->expert_out = arena_take(a, rows * wide, f);
    s->squeezed = arena_take(a, n * most.squeezed, f);
    s->squeezed_sum = arena_take(a, n * most.squeezed, f);
    s->chosen = arena_take(a, n * c->n_used, sizeof *s->chosen);
    s->order = arena_take(a, n * c->n_used, sizeof *s->order);
    s->weight = arena_take(a, n * c->n_used, f);
    a->used = start;            // 3: logits
    s->best = arena_take(a, (FEW + 1) * best_parts(c->n_vocab), sizeof *s->best);
    s->logits = arena_take(a, (uint64_t)LOGIT_ROWS * c->n_vocab, f);   // next, see gpu_finish
    s->candidates = arena_take(a, c->n_vocab, sizeof *s->candidates);
}

// Places a plan's buffers in whole pages, which a GPU can share and the system zeroes at the first
// touch. what: names them, and what to try if it fails.
static bool place_plan(Session *s, Plan *plan, Map *map, const char *what, Error *e) {
    Arena a = {0};
    plan(s, &a);
    uint64_t size = larger(a.peak, 1);
    bool fits = size <= SIZE_MAX && size < 1ull << 46;
    void *p = MAP_FAILED;
    if (fits) p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (p == MAP_FAILED) return fail(e, "no memory for %.0f MB of %s", (double)(size >> 20), what);
    *map = (Map){p, size};
    a = (Arena){.base = p, .size = size};
    plan(s, &a);
    return true;
}

static void limit_options(Session *s) {
    const Config *c = &s->m->config;
    if (c->n_exact) s->o.window = smaller(s->o.window, c->n_exact);   // DeepSeek 3.2
    // a chunk of 1 has no room for the state of the token before
    if (s->o.draft > 0 && s->o.chunk != 1) s->n_cache += c->n_nextn;
}

// In a model that is not causal all depends on later tokens, too, and nothing can be reused. A
// recurrent model goes back to its snapshot. Caches must hold all rows that a query at p sees.
static int reusable(const Session *s, int p) {
    if (!s->m->config.causal) return 0;
    if (p == (int)s->history.n) return p;   // the history goes on
    if (s->n_recurrent && (s->saved_pos < 0 || s->saved_pos > p)) return 0;
    if (s->n_recurrent) p = s->saved_pos;
    for (int l = 0; l < s->m->config.n_layer; l++) {
        const Cache *cache = &s->cache[l];
        for (int i = 0; cache->rows && i < p; i++) {
            bool seen = p - i < cache->window || i < cache->keep;
            if (seen && cache->pos[cache_row(cache, i)] != i) return 0;
        }
    }
    return p;
}

// The states of recurrent layers cannot be cut back: they are cleared, or become the snapshot,
// which was made at position p.
static void forget_states(Session *s, int p) {
    bool all = p == 0;
    assert(!s->n_recurrent || all || p == s->saved_pos);
    nextn_follow(s, s->history.id, p);
    s->nextn_pos = p + 1;   // what a block reads for p, the state before it, is lost
    s->seen = p;
    if (!all) copy_states(s, s->recurrent, s->saved);
    else if (s->n_recurrent) memset(s->recurrent, 0, s->n_recurrent * sizeof *s->recurrent);
    if (all) s->saved_pos = -1;
}

// How many of the `left` tokens from pos on are the next chunk? In Llama 4 it ends where a span
// ends. After a snapshot the last token of a prompt runs alone: so another answer costs one token.
static int chunk_size(const Session *s, int pos, int left, bool snapshot) {
    int span = s->m->config.span, most = s->o.chunk;
    if (span) most = smaller(most, span - pos % span);
    if (left > most) return most;
    return snapshot && left > 1 ? left - 1 : left;
}

// The length of the chunk at p. What it overwrites is kept: recurrent models save their states, to
// return to if the next prompt begins like this one, and nextn blocks read theirs.
static int next_chunk(Session *s, const Request *r, int p, bool prompt) {
    bool snapshot = s->n_recurrent && prompt;
    int n = chunk_size(s, p, r->n - p, snapshot);
    s->guesses = r->guesses;   // in one chunk with a token before them, see guesses_fit
    if (snapshot && p == r->n - 1) {
        copy_states(s, s->saved, s->recurrent);
        s->saved_pos = p;
    }
    if (p + n - s->nextn_pos >= s->o.chunk) nextn_follow(s, r->ids, p + 1);
    return n;
}

static void chunk_seen(Session *s) { s->seen = s->history.n - s->guesses; }

// ==== Part IV: text =============================================================================
//
//   a conversation   user "Hi"
//       template_render runs the template, a program in the file, which writes the conversation as
//       one text, and marks the bytes that the model did not write (section 25)
//   text             "user: Hi\n"
//       tokenize cuts the text into tokens, which are texts of the file's vocabulary, and returns
//       their ids, which are indices; it finds no control token in marked bytes (section 24)
//   ids              488 271 25 402 72 198
//       session_eval and session_sample draw one id after the other (Part I)
//   an id            488
//       detokenize returns the text of its token, "us" (section 24)
//
// Most models have BPE, so read that first in section 24: the rules, word_join, fragment_tokenize,
// text_tokenize, tokenize. In section 25 read GRAMMAR and eval first.

#include <ctype.h>             // what the Parts before do not need
#include <locale.h>
#include <setjmp.h>
#if __has_include(<xlocale.h>)
#include <xlocale.h>           // macOS: newlocale
#endif

// ---- 24. tokenizer ----
//
// Text becomes ids in four steps. Special tokens are cut out. Rules split the rest into words. Each
// word is spelled as the vocabulary spells it. Its parts join, two neighbours at a time, as long as
// the vocabulary knows the union. The ids must be llama.cpp's, to the last one, but
// for the rules with U and v: there they are the author's, whose letters llama.cpp does not tell.
//
//                         words            spelling                          what joins first
//   SentencePiece, llama  the whole text   a space is U+2581                 highest score
//   BPE, gpt2             by the rules     a byte is a printable character   earliest merge
//   BPE, gemma4           lines            a space is U+2581                 earliest merge
//   WordPiece, bert       by a rule        lower case, no accents            (longest token)
//   unigram, t5           the whole text   as the file's table says         (highest sum of scores)

enum { UTF8_BAD = 0xFFFD };

static size_t utf8_length(char first) {   // bytes of the character that begins so
    uint8_t c = first;
    if (c < 0xE0) return c < 0xC0 ? 1 : 2;
    return c < 0xF0 ? 3 : 4;
}

// The character that begins text s [n], and in *used the number of its bytes. A bad byte is
// UTF8_BAD, but overlong forms and surrogates pass.
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

static size_t utf8_encode(uint32_t c, char *out) {   // returns its bytes, 4 at most
    size_t len = c < 0x80 ? 1 : 2;
    if (c >= 0x800) len = c < 0x10000 ? 3 : 4;
    for (size_t i = len - 1; i > 0; i--, c >>= 6) out[i] = 0x80 | (c & 0x3F);
    out[0] = len == 1 ? c : c | (0xF00 >> len & 0xFF);
    return len;
}

static bool utf8_valid(uint32_t c, size_t used) {   // was c, decoded from `used` bytes, proper?
    char s[4];
    return utf8_encode(c, s) == used && c - 0xD800 >= 0x800;
}

// from the appendix
#define CLASS(letter) (1ull << ((letter) & 63))
static uint64_t unicode_classes(uint32_t c);   // a bit for each letter of the rules below
static uint32_t unicode_lower(uint32_t c);
static uint32_t unicode_fold(uint32_t c, bool lower_case, bool strip_accents);   // 0: c is dropped

// Byte-level BPE spells a printable byte as itself and the other 68 as U+0100 to U+0143.
static uint32_t byte_to_char(uint8_t b) {
    if (b <= ' ') return b + 0x100;                   // 0x00 to 0x20: U+0100 to U+0120
    if (b >= 0x7F && b <= 0xA0) return b + 0xA2;      // U+0121 to U+0142
    return b == 0xAD ? 0x143 : b;
}

// most bytes of a text, for which tokenize takes 200 times as much memory; of a token or a merge
enum { TEXT_MAX = (SIZE_MAX / 256 < 1 << 28 ? 1 << 24 : 1 << 28) - 1, STRING_MAX = 1 << 13 };

// A hash table from the file's strings to their indices; the first of equal strings counts. Besides
// tokens the merges of BPE are in one, each as a string "left right".
typedef struct {
    uint32_t *slot;   // [mask + 1] 1 + index of a string, 0: empty; at most half are used
    Str *str;         // [n] pointing into the map
    uint32_t n, mask;
    size_t longest;   // bytes of the longest string
} Dictionary;

static const uint64_t MIX = 0x9E3779B97F4A7C15;
static uint64_t hash_text(uint64_t hash, Str s) {   // hash: of the text in front of s, or 0
    for (size_t i = 0; i < s.n; i++) hash = hash * MIX + (uint8_t)s.s[i];
    return hash;
}

// the slot of a string, or the empty slot where it would go; NULL: strings are made to collide
static uint32_t *dictionary_slot(const Dictionary *d, uint64_t hash, Str s) {
    hash = (hash ^ hash >> 32) * MIX >> 32;   // all bits count
    for (int probe = 0; probe < 1000; probe++) {
        uint32_t *slot = &d->slot[(hash + probe) & d->mask];
        if (!*slot) return slot;
        const Str *found = &d->str[*slot - 1];
        if (found->n == s.n && !memcmp(found->s, s.s, s.n)) return slot;
    }
    return NULL;
}

static int32_t dictionary_index(const Dictionary *d, uint64_t hash, Str s) {   // -1: not there
    const uint32_t *slot = dictionary_slot(d, hash, s);
    return slot ? (int32_t)*slot - 1 : -1;
}

static int32_t dictionary_find(const Dictionary *d, const char *s, size_t n) {
    return dictionary_index(d, hash_text(0, (Str){s, n}), (Str){s, n});
}

// A rule is a regular expression that splits the pieces left by the rule before it. It tries its
// alternatives in order, and each takes all it can; a match is a piece, and so is the text between
// two matches. A letter is a class of characters, a blank or / is itself (see the appendix):
//
//   u  A-Z                  N  numbers       P  punctuation             h  Chinese
//   l  a-z                  D  digits        S  symbols                 H  more of it
//   c  DeepSeek's letters   d  0-9           a  ASCII punctuation       y  x but h, H
//   U  all capital letters  s  white space   p  DeepSeek's punctuation  g  Hangul
//   v  all small letters    n  \n            b  BLOOM's punctuation     z  Bopomofo
//   x  other letters        r  \r \n         q  East Asian punctuation  k  DeepSeek's CJK
//   L  all letters          C  control       f  $+<=>^|~                K  a wider one
//   M  marks                t  `             W  what else \w has        A  AFMoE's Asian scripts
//
//   [..]   one of these classes    X?   one or none      '  one of 's 't 're 've 'm 'll 'd
//   [^..]  one of other classes    X*   any number       i  the same in any case
//   |      or else                 X+   one or more      ~  the same in any case, or nothing
//   !      here white space or     X3   one to three     w  a word, which goes on over
//          the end must follow     X=n  2^n                 single spaces
//
// Four rules are a sign. $ splits off the white space that ends a piece. The others split a row of
// the class behind them in threes from the right: % no more, & ends a piece behind the row, and @
// in front of it, too, but leaves a row alone that a word goes on behind, such as 1990s.
// RULE_LLAMA3, for example, splits "It's 1234  ok!\n" into  It|'s| |123|4| | ok|!\n  with
//   i             's
//   [^rLN]?L+     It and " ok": letters, and one character in front that is none of r, L, N
//   N3            123 and 4
//    ?[^sLN]+r*   !\n
//   s*r+          nothing here: it takes the ends of lines, with white space in front
//   s+!           the first space of "  ok": + takes both, ! does not allow the o, + gives one back
//   s+            the space of " 1234", which no other alternative takes
//
// To add a pre-tokenizer, add its name to the row that has its rules, or add a row of at most six.
// A new letter goes to MORE_CLASSES, too. Then add words to test.c. The flags say that a word which
// is a token stays whole, that BOS is added, that only spaces are respelled, that words are all.
enum { PRE_WHOLE = 1, PRE_BOS = 2, PRE_SPACES = 4, PRE_WORDS = 8 };
typedef struct { const char *names; int flags; const char *rule[7]; } PreTokenizer;

#define RULE_GPT2   "'| ?L+| ?N+| ?[^sLN]+|s+!|s+"
#define RULE_LLAMA3 "i|[^rLN]?L+|N3| ?[^sLN]+r*|s*r+|s+!|s+"
#define RULE_QWEN2  "i|[^rLN]?L+|N| ?[^sLN]+r*|s*r+|s+!|s+"
#define RULE_HELLO_WORLD "[^rLN]?[UxM]*[vxM]+~|[^rLN]?[UxM]+[vxM]*~|"   // parts HelloWorld
#define RULE_O200K  RULE_HELLO_WORLD "N3| ?[^sLN]+[r/]*|s*r+|s+!|s+"
#define RULE_DEEPSEEK3 "a[ul]+|[^rLPS]?[LM]+| ?[PS]+r*|s*r+|s+!|s+"

static const PreTokenizer PRE_TOKENIZERS[] = {   // by the names that tokenizer.ggml.pre may have
    {"default", 0, {"[Pf]+", RULE_GPT2, "N+", "ddd"}},
    {"(SentencePiece)", PRE_SPACES | PRE_BOS, {NULL}},
    {"whitespace", PRE_SPACES | PRE_WORDS, {"s+"}},
    {"(WordPiece)", PRE_SPACES | PRE_WORDS, {"[hPft]|[^shPft]+"}},
    {"(unigram)", PRE_SPACES, {NULL}},
    {"gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 jina-es jina-de jina-v2-es "
     "jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert",
     0, {RULE_GPT2}},
    {"starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", 0, {"N", RULE_GPT2}},
    {"falcon", 0, {"[Pft]+", RULE_GPT2, "ddd"}},
    {"llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     PRE_WHOLE | PRE_BOS, {RULE_LLAMA3}},
    {"dbrx smaug-bpe glm4 chatglm-bpe", 0, {RULE_LLAMA3}},
    {"jais-2", 0,
     {"i|[^rLN]?L+|N3| ?[^sLN]+r*|s*r+|s=9!|s=8!|s=7!|s=6!|s=5!|s=4!|s=3!|s=2!|s=1!|s"}},
    {"qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe "
     "bailingmoe2 llada-moe", 0, {RULE_QWEN2}},
    {"laguna", 0, {"[^n]+|n+", RULE_QWEN2}},
    {"ufakzeka", 0, {"[^rLN]?L+|N| ?[^sLN]+r*|s*r+|s+!|s+"}},
    {"seed-coder", 0, {"i|[^rLN]?L+|N| ?[^sLN]+|s*r+|s+!|s+"}},
    {"exaone-moe", 0, {"i|[^rLN]?w|N| ?[^sLN]+[r/]?|s*r|s+!|s+"}},
    {"minicpm5", PRE_WHOLE, {"N3", "i|[^rLN]?L+|N+| ?[^sLN]+r*|s*r+|s+!|s+"}},
    {"kimi-k2", PRE_WHOLE,
     {"[hH]+|[^rLN]?[UyM]*[vyM]+~|[^rLN]?[UyM]+[vyM]*~|N3| ?[^sLN]+r*|s*r+|s+!|s+"}},
    {"superbpe", 0, {"N+", "%d"}},
    {"bloom poro-chat gpt3-finnish", 0, {" ?[^sb]+"}},
    {"viking", 0, {" ?[^sb]+", "N"}},
    {"qwen35", 0, {"i|[^rLN]?[LM]+|N| ?[^sLMN]+r*|s*r+|s+!|s+"}},
    {"tekken", PRE_WHOLE | PRE_BOS,
     {"[^rLN]?[UxM]*[vxM]+|[^rLN]?[UxM]+[vxM]*|N| ?[^sLN]+[r/]*|s*r+|s+!|s+"}},
    {"gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", PRE_WHOLE, {RULE_O200K}},
    {"youtu", PRE_WHOLE, {"g+|q+|z+|k+", RULE_HELLO_WORLD "N| ?[^sLN]+[r/]*|s*r+|s+!|s+"}},
    {"tiny_aya cohere2moe", 0, {"@D", RULE_O200K}},
    {"deepseek-llm", 0, {"r", "s?[ulc]+", "s?p+", "$", "K+", "N+"}},
    {"deepseek-coder", 0, {"r", "s?L+", "s?P+", "K+", "N"}},
    {"deepseek-v3 hunyuan-dense joyai-llm hy_v4", 0, {"N3", "k+", RULE_DEEPSEEK3}},
    {"afmoe", 0, {"&N", "A+", RULE_DEEPSEEK3}},
    {"spark2_5", 0, {"N", "k+", "a[ul]+|[^rLPS]?[LM]+| ?[PS]+|r|s+!|s+"}},
    {"gemma4 granite-embed-multi-311m sarvam-moe", PRE_SPACES | PRE_BOS, {"[^n]+|n+"}},
};

enum { TOKENIZER_NONE, TOKENIZER_SPM, TOKENIZER_BPE, TOKENIZER_WPM, TOKENIZER_UNIGRAM };
// Flags beside the type: EOG ends a text, TURN parts gpt-oss's turns, STRIP drops white space.
enum { TOKEN_NORMAL = 1, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER, TOKEN_UNUSED, TOKEN_BYTE,
       TOKEN_TYPE = 15, TOKEN_EOG = 16, TOKEN_TURN = 32, TOKEN_STRIP = 64 };
enum { SPECIAL_TYPES = 1 << TOKEN_USER | 1 << TOKEN_CONTROL | 1 << TOKEN_UNKNOWN,
       UNIGRAM_TYPES = 1 << TOKEN_USER | 1 << TOKEN_NORMAL | 1 << TOKEN_UNUSED };   // as words
enum { SPM_SPACE = 0x2581 };

typedef struct Tokenizer {
    int kind;
    int32_t bos, eos, unk, sep;      // -1: there is none
    bool add_bos, add_eos;           // WordPiece adds sep instead of eos
    bool space_prefix;               // text begins with a space
    bool trim_spaces;                // unigram: it has no other spaces than between two words
    bool lower_case, strip_accents;  // WordPiece
    int32_t n_vocab;
    bool no_rules;                   // pre-tokenizer unknown: cannot tokenize
    char note[128];                  // what the user should know, or empty
    const PreTokenizer *pre;
    const Meta *scores;              // SentencePiece, unigram: [n_vocab]; NULL: all are 0
    float unknown_score;             // unigram: of a character that is no token
    Str trie, strings;               // unigram: what is replaced, and by what (charsmap_match)
    Dictionary tokens, merges;
    uint8_t *type;                   // [n_vocab]
    uint8_t *lengths;                // [tokens.longest + 1] 1: of a token, 2: of a special one
    bool special_first[256];         // does a token that may be cut out begin with it?
    size_t detokenize_max;           // most bytes that detokenize writes at once
} Tokenizer;

// Many models pad their embedding with ids past the vocabulary. They have no text and are unused.
typedef struct { Str text; int type; } Token;   // type: with its flags

static Token token_at(const Tokenizer *t, int32_t id) {
    bool known = id >= 0 && id < t->n_vocab;
    return known ? (Token){t->tokens.str[id], t->type[id]} : (Token){{"", 0}, TOKEN_UNUSED};
}

static bool token_is(const Tokenizer *t, int32_t id, int types) {   // types: 1 << TOKEN_... | ..
    return types >> (token_at(t, id).type & TOKEN_TYPE) & 1;
}

static int32_t token_find(const Tokenizer *t, const char *text) {   // -1: there is none
    return t->n_vocab ? dictionary_find(&t->tokens, text, strlen(text)) : -1;
}

typedef struct { uint64_t set; uint32_t c; bool cut; } Char;   // its classes; does a piece begin?

typedef struct {
    const Tokenizer *t;
    Tokens *out;
    Char *ch;         // a fragment of the text, and its end
    char *text;       // [n_text] a word of it, spelled, and behind the word room for a merge
    uint32_t *part;   // [n_text] bytes of the part of the word that begins here; 0: none begins
    uint64_t *cost;   // [2 * n_text] a tree of what it costs to join parts
    size_t n_text;
    const char *all;             // the whole text that tokenize got, and its marks
    const unsigned char *mark;
    int types;        // of tokens that are cut out of the text, 1 << TOKEN_...
    bool space;       // the next fragment begins with a space
    bool failed;      // out of memory
} Work;

static size_t contraction_length(const Char *ch, size_t n, bool any_case) {   // 0: there is none
    if (n < 2 || ch[0].c != '\'') return 0;
    uint32_t fold = any_case ? 'a' - 'A' : 0;   // the bit that small letters have
    uint32_t a = ch[1].c | fold, b = n > 2 ? ch[2].c | fold : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

// Returns the end of the match of an alternative at ch, or NULL; the piece ends at `end`. An item
// takes all it can, and gives back one character after the other until the rest matches.
static Char *rule_match(const char *rule, Char *ch, Char *end) {
    if (!*rule || *rule == '|') return ch;   // all items have matched
    if (*rule == '!')
        return ch == end || ch->set & CLASS('s') ? rule_match(rule + 1, ch, end) : NULL;
    if (*rule == '\'' || *rule == 'i' || *rule == '~') {
        size_t n = contraction_length(ch, end - ch, *rule != '\'');
        return n || *rule == '~' ? rule_match(rule + 1, ch + n, end) : NULL;
    }
    if (*rule == 'w') {   // L, then L, M, or a space and L
        if (ch == end || !(ch->set & CLASS('L'))) return NULL;
        for (ch++; ch < end && ch->set & (CLASS('L') | CLASS('M') | CLASS(' ')); ch++)
            if (ch->set & CLASS(' ') && (ch + 1 == end || !(ch[1].set & CLASS('L')))) break;
        return rule_match(rule + 1, ch, end);
    }
    bool none = *rule == '[' && rule[1] == '^';   // [^..] matches none of the set
    uint64_t set = *rule == '[' ? 0 : CLASS(*rule);
    if (!set) for (rule += none ? 2 : 1; *rule != ']'; rule++) set |= CLASS(*rule);
    rule++;
    char times = *rule && strchr("?*+3=", *rule) ? *rule++ : 0;
    ptrdiff_t least = times == '?' || times == '*' ? 0 : 1, most = 1, n = 0;
    if (times == '*' || times == '+') most = end - ch;
    if (times == '3') most = 3;
    if (times == '=') least = most = 1 << (*rule++ - '0');
    while (n < most && ch + n < end && !(ch[n].set & set) == none) n++;
    for (; n >= least; n--) {   // gives back one after the other
        Char *match = rule_match(rule, ch + n, end);
        if (match) return match;
    }
    return NULL;
}

// Marks where the matches of a rule in one piece begin and end.
static void piece_split(const char *rule, Char *ch, Char *end) {
    if (*rule == '$') {
        while (end > ch && end[-1].set & CLASS('s')) end--;
        end->cut = true;
        return;
    }
    if (strchr("%&@", *rule)) {
        uint64_t word = CLASS('L') | CLASS('M') | CLASS('W');
        bool alone = true;   // no word goes on behind the row
        for (int n = 0; end-- > ch;) {   // n in a row from here on
            bool in_row = end->set & CLASS(rule[1]), front = n && !in_row && *rule == '@';
            n = in_row ? n + 1 : 0;
            if (alone && (front || (n % 3 == 1 && (n > 3 || *rule != '%')))) end[1].cut = true;
            if (!in_row) alone = *rule != '@' || !(end->set & word);
        }
        return;
    }
    // no line ends in white space before `dry`: s*r.. would search on from each of many spaces
    for (Char *dry = ch, *match; ch < end; ch = match ? match : ch + 1) {
        match = NULL;
        for (const char *choice = rule; choice && !match; choice = strchr(choice, '|')) {
            choice += *choice == '|';
            bool line = !strncmp(choice, "s*r", 3);
            if (line && ch < dry) continue;
            match = rule_match(choice, ch, end);
            if (line) for (dry = ch; dry < end && dry->set & CLASS('s');) dry++;
        }
        if (match) ch->cut = match->cut = true;
    }
}

// A word is a row of parts, at first its characters. Leaf n + i of a tree is the cost of joining
// the part at byte i with the next one; node k is the lesser of nodes 2k and 2k + 1. So node 1, the
// root, is the cheapest pair, of equal ones the leftmost. A join changes three leaves: n bytes take
// O(n log n). In story.gguf merge 149 is "t h", 1 "h e", 29 "e n", 326 "he n", 903 "t he":
//   t  h  e  n    leaves 149  1  29  -    nodes 2, 3:   1  29    root   1: join h and e
//   t  he    n    leaves 903 326  -  -    nodes 2, 3: 326   -    root 326: join he and n
//   t  hen        leaves   -  -   -  -    no merge is "t hen": the ids of "t" and "hen" are 83 582

static uint32_t float_order(float x) {   // an integer that compares as x does
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bool negative = bits >> 31;   // then larger bits are a smaller number
    return bits ^ (negative ? UINT32_MAX : 0x80000000);
}

// Returns leaf i, the cost above the 32 bits of i; UINT64_MAX: no part at i joins the next one.
static uint64_t pair_cost(Work *w, uint32_t i) {
    const Tokenizer *t = w->t;
    uint32_t a = w->part[i], b = i + a < w->n_text ? w->part[i + a] : 0, cost = 0;
    char *s = w->text + i, *merge = w->text + w->n_text;
    int32_t found = -1;
    if (!a || !b) return UINT64_MAX;
    if (t->kind == TOKENIZER_SPM) {
        found = dictionary_find(&t->tokens, s, a + b);
        cost = float_order(found < 0 || !t->scores ? 0 : 0 - meta_float(t->scores, found));
    } else if (a + b < t->merges.longest) {
        memcpy(merge, s, a);
        merge[a] = ' ';
        memcpy(merge + a + 1, s + a, b);
        cost = found = dictionary_find(&t->merges, merge, a + 1 + b);
    }
    return found < 0 ? UINT64_MAX : (uint64_t)cost << 32 | i;
}

static void pair_update(Work *w, uint32_t i) {   // updates the part's leaf and all nodes above it
    uint64_t *tree = w->cost;
    size_t k = w->n_text + i;
    tree[k] = pair_cost(w, i);
    for (; k > 1; k /= 2) tree[k / 2] = tree[k] < tree[k ^ 1] ? tree[k] : tree[k ^ 1];
}

static size_t character_bytes(const Work *w, size_t i) {   // at byte i of the word
    return smaller(utf8_length(w->text[i]), w->n_text - i);
}

static void add_id(Work *w, int32_t id) {   // -1: adds nothing
    if (id >= 0) w->failed |= !tokens_add(w->out, id);
}

// Joins the parts of a word and adds their ids. A part that is no token becomes the tokens of its
// bytes. A byte without a token is the unknown token in SentencePiece, and is dropped elsewhere.
static void word_join(Work *w) {
    const Tokenizer *t = w->t;
    uint32_t *part = w->part;
    size_t n = w->n_text;
    bool at_once = t->pre->flags & PRE_WHOLE ||
                   (t->kind == TOKENIZER_BPE && w->text[0] == '\n');   // Gemma 4's empty lines
    at_once = at_once && dictionary_find(&t->tokens, w->text, n) >= 0;
    memset(part, 0, n * sizeof *part);
    memset(w->cost, -1, 2 * n * sizeof *w->cost);   // UINT64_MAX
    for (size_t i = 0; i < n; i += part[i]) part[i] = at_once ? n : character_bytes(w, i);
    for (size_t i = 0; i < n; i += part[i]) pair_update(w, i);
    while (w->cost[1] != UINT64_MAX) {
        uint32_t a = w->cost[1], b = a + part[a], before = a ? a - 1 : 0;   // where parts begin
        while (!part[before]) before--;
        part[a] += part[b];
        part[b] = 0;
        pair_update(w, b);
        pair_update(w, a);
        pair_update(w, before);
    }
    for (size_t i = 0; i < n; i += part[i]) {
        int32_t id = dictionary_find(&t->tokens, w->text + i, part[i]);
        add_id(w, id);
        for (size_t k = i; id < 0 && k < i + part[i]; k++) {
            char hex[8];
            snprintf(hex, sizeof hex, "<0x%02X>", (uint8_t)w->text[k]);
            int32_t byte = t->pre->flags & PRE_SPACES ? token_find(t, hex) : -1;
            if (byte < 0) byte = dictionary_find(&t->tokens, w->text + k, 1);
            if (byte < 0 && t->kind == TOKENIZER_SPM) byte = t->unk;
            add_id(w, byte);
        }
    }
}

// the token of the len bytes at byte i of the word; -1: there is none. WordPiece and unigram try
// one length after the other, so *hash goes from that of len - 1 bytes to that of len.
static int32_t token_longer(const Work *w, size_t i, size_t len, uint64_t *hash) {
    Str s = {w->text + i, len};
    *hash = hash_text(*hash, (Str){s.s + len - 1, 1});
    return w->t->lengths[len] ? dictionary_index(&w->t->tokens, *hash, s) : -1;
}

// WordPiece takes the longest token that fits, again and again; if none fits, the word is unknown.
static void word_pieces(Work *w) {
    size_t before = w->out->n;
    int32_t id = 0;
    for (size_t i = 0, taken = 0; id >= 0 && i < w->n_text; i += taken) {
        size_t most = smaller(w->t->tokens.longest, w->n_text - i);
        uint64_t hash = 0;
        id = -1;
        for (size_t len = 1; len <= most; len++) {
            int32_t longer = token_longer(w, i, len, &hash);
            if (longer < 0) continue;
            id = longer;
            taken = len;
        }
        add_id(w, id);
    }
    if (id >= 0) return;
    w->out->n = before;
    add_id(w, w->t->unk);
}

// Writes a character as the vocabulary spells it, and returns the number of bytes, at most 8.
// SentencePiece has no rules, so any byte is a character there.
static size_t character_spell(const Tokenizer *t, uint32_t c, char *out) {
    char bytes[4];
    size_t n = 0;
    if (t->kind == TOKENIZER_SPM && c != ' ') {
        *out = c;
        return 1;
    }
    if (t->pre->flags & PRE_SPACES) return utf8_encode(c == ' ' ? SPM_SPACE : c, out);
    size_t len = utf8_encode(c, bytes);
    for (size_t i = 0; i < len; i++) n += utf8_encode(byte_to_char(bytes[i]), out + n);
    return n;
}

// Decodes a fragment, splits it into words by the rules, spells the words and adds their ids.
static void fragment_tokenize(Work *w, const char *s, size_t n) {
    const Tokenizer *t = w->t;
    bool spm = t->kind == TOKENIZER_SPM, wpm = t->kind == TOKENIZER_WPM;
    Char *end = w->ch, *next;
    if (w->space) *end++ = (Char){.c = ' '};
    for (size_t i = 0, used = 1; i < n; i += used) {
        uint32_t c = spm ? (uint8_t)s[i] : utf8_decode(s + i, n - i, &used);
        if (wpm) c = unicode_fold(c, t->lower_case, t->strip_accents);
        if (wpm && !c) continue;   // it is dropped
        *end++ = (Char){spm ? 0 : unicode_classes(c), c, false};
    }
    w->ch->cut = end->cut = true;
    for (const char *const *rule = t->pre->rule; *rule; rule++)
        for (Char *ch = w->ch; ch < end; ch = next) {
            for (next = ch + 1; !next->cut;) next++;
            piece_split(*rule, ch, next);
        }
    for (Char *ch = w->ch; ch < end;) {
        if (ch->cut) w->n_text = wpm ? utf8_encode(SPM_SPACE, w->text) : 0;   // a word begins
        w->n_text += character_spell(t, ch->c, w->text + w->n_text);
        bool space = ch++->set & CLASS('s');   // then it is nothing else
        if (!ch->cut || (space && t->pre->flags & PRE_WORDS)) continue;
        (wpm ? word_pieces : word_join)(w);
    }
    w->space = false;
}

// A unigram vocabulary may replace some strings by others, for example a full-width A by "A". The
// strings to be replaced are in a double-array trie. A node x of 4 bytes has
//   label(x) = x & 0x800000FF      base(x) = (x >> 10) << (x & 512 ? 8 : 0)
// From node i, byte c leads to node k = i ^ base(node[i]) ^ c, if c is the label of node[k]. If its
// bit 8 is set, an entry ends there, and bits 0 to 30 of node[k ^ base(node[k])] say where in
// `strings` the replacement begins, which ends with a 0. Say "A", 65, becomes strings[4], "a ":
//   node[0]   = 0x600        base 256: A leads to 0 ^ 256 ^ 65 = 321
//   node[321] = 0x541        label 65, so it is A; bit 8 is set; base 1: see 321 ^ 1 = 320
//   node[320] = 0x80000004
enum { CHARSMAP_MAX = 255 };   // bytes of an entry or of a replacement at most

static uint32_t trie_node(const Tokenizer *t, uint32_t i) {
    uint32_t x = UINT32_MAX;   // a node past the end is no byte's label, and no string begins there
    if (i < t->trie.n / 4) memcpy(&x, t->trie.s + (size_t)4 * i, 4);
    return x;
}

static uint32_t trie_base(uint32_t x) { return x >> 10 << (x & 512 ? 8 : 0); }

// Returns the bytes of the longest entry at s (0: there is none), and in *to their replacement.
static size_t charsmap_match(const Tokenizer *t, const char *s, size_t n, const char **to) {
    size_t match = 0;
    uint32_t i = 0, x = trie_node(t, 0);
    for (size_t k = 0; k < n && k < CHARSMAP_MAX && s[k]; k++) {
        i ^= trie_base(x) ^ (uint8_t)s[k];
        x = trie_node(t, i);
        if ((x & 0x800000FF) != (uint8_t)s[k]) break;
        if (!(x & 256)) continue;
        uint32_t string = trie_node(t, i ^ trie_base(x)) & INT32_MAX;
        if (string >= t->strings.n) continue;
        *to = t->strings.s + string;
        match = k + 1;
    }
    return match;
}

// Spells a fragment as unigram's tokens are spelled; returns its bytes. out NULL: only counts them.
static uint64_t unigram_spell(const Tokenizer *t, const char *s, size_t n, char *out) {
    uint64_t len = 0;
    bool owed = t->space_prefix;   // a space must come before the next character but a space
    for (size_t i = 0, used; i < n; i += used) {
        const char *to = s + i;
        used = charsmap_match(t, s + i, n - i, &to);
        if (!used && utf8_decode(s + i, n - i, &used) == UTF8_BAD) to = "\uFFFD";
        size_t bytes = to == s + i ? used : strlen(to);
        for (; bytes > 0; bytes--, to++) {
            bool space = *to == ' ';
            owed = owed || (space && t->trim_spaces);
            bool marked = space ? !t->trim_spaces : owed;
            size_t mark = marked ? 3 : 0;
            if (out) memcpy(out + len, "\u2581", mark);
            len += mark + !space;
            if (space) continue;
            if (out) out[len - 1] = *to;
            owed = false;
        }
    }
    return len;
}

// Unigram takes the tokens whose scores have the greatest sum (Viterbi): way[i] is that sum for the
// first i bytes, and the token that ends there. A token begins where a character does. A character
// that is no token is unknown; unknown ones in a row are one token.
typedef struct { double sum; uint32_t len; int32_t id; } Way;   // len 0: no token ends here

static void way_improve(Way *best, Way way) {
    if (!best->len || way.sum > best->sum) *best = way;
}

static void unigram_tokenize(Work *w, const char *s, size_t n_bytes) {
    const Tokenizer *t = w->t;
    size_t before = w->out->n;
    uint64_t n = unigram_spell(t, s, n_bytes, NULL);
    // the worst of Unicode, U+FDFA, takes 13 times its bytes
    Way *way = n > 16 * (uint64_t)n_bytes + 64 ? NULL : calloc(n + 1, sizeof *way + 1), here;
    w->failed |= !way;
    if (!way) return;
    w->text = (char *)(way + n + 1);
    w->n_text = unigram_spell(t, s, n_bytes, w->text);
    for (size_t i = 0, size; i < n; i += size) {
        uint32_t most = smaller(t->tokens.longest, n - i);
        bool known = false;   // the character at i
        uint64_t hash = 0;
        size = character_bytes(w, i);
        for (uint32_t len = 1; len <= most; len++) {
            int32_t id = token_longer(w, i, len, &hash);
            if (id < 0 || !token_is(t, id, UNIGRAM_TYPES)) continue;
            double score = token_is(t, id, 1 << TOKEN_USER) ? 0 : meta_float(t->scores, id);
            way_improve(&way[i + len], (Way){way[i].sum + score, len, id});
            known |= len == size;
        }
        Way unknown = {way[i].sum + t->unknown_score, size, t->unk};
        if (!known) way_improve(&way[i + size], unknown);
    }
    for (Way last = way[n]; n > 0; last = here) {   // back from the end
        n -= last.len;
        here = way[n];
        way[n] = last;   // the token that begins here
    }
    for (; n < w->n_text; n += way[n].len) {
        int32_t id = way[n].id;
        bool again = id == t->unk && w->out->n > before && w->out->id[w->out->n - 1] == id;
        if (!again) add_id(w, id);
    }
    free(way);
}

// The id of a special token of len bytes at s that is to be cut out; -1: there is none. In a text
// that a user wrote, only tokens that anyone may write are cut out.
static int32_t special_at(const Work *w, const char *s, size_t len) {
    const Tokenizer *t = w->t;
    if (!t->special_first[(uint8_t)*s]) return -1;
    int32_t id = dictionary_find(&t->tokens, s, len);
    if (!token_is(t, id, w->types)) return -1;
    bool anyone = (token_at(t, id).type & ~(TOKEN_EOG | TOKEN_STRIP)) == TOKEN_USER;
    bool marked = w->mark && memchr(w->mark + (s - w->all), 1, len);
    return marked && !anyone ? -1 : id;
}

// Adds the ids of special tokens of up to len bytes, longest first, and of the text between them.
static void text_tokenize(Work *w, const char *s, size_t n, size_t len) {
    const Tokenizer *t = w->t;
    const char *end = s + n;
    for (len = len < n ? len : n; len > 0; len--) {
        if (!(t->lengths[len] & 2)) continue;
        for (const char *at = s; len <= (size_t)(end - at); at++) {
            int32_t id = special_at(w, at, len);
            if (id < 0) continue;
            text_tokenize(w, s, at - s, len - 1);   // the text in front of the token
            add_id(w, id);
            w->space = t->space_prefix;
            s = at + len;
            if (token_at(t, id).type & TOKEN_STRIP)
                while (s < end && *s && strchr(" \t\n\v\f\r", *s)) s++;
            at = s - 1;
        }
    }
    if (s == end) return;
    (t->kind == TOKENIZER_UNIGRAM ? unigram_tokenize : fragment_tokenize)(w, s, end - s);
}

enum { TOKENS_ADD = 1,        // adds the first and last tokens that the metadata asks for
       TOKENS_SPECIAL = 2 };  // text such as <|im_start|> means the token

// Appends the ids of text [n] to out. A byte whose mark [n] is 1 was written by a user and is never
// part of a control token; mark NULL: there is no such byte. False: e says why.
API bool tokenize(const Tokenizer *t, const char *text, size_t n, const unsigned char *mark,
                  int flags, Tokens *out, Error *e) {
    if (t->kind == TOKENIZER_NONE || t->no_rules)
        return fail(e, "%s: give it --tokens", *t->note ? t->note : "the model has no tokenizer");
    if (n > TEXT_MAX) return fail(e, "%zu bytes of text are too many", n);
    // most bytes of a word: a bad byte, U+FFFD, may be spelled as 6; unigram has its own memory
    size_t m = t->kind == TOKENIZER_UNIGRAM ? 0 : 6 * n + 8;
    Work w = {.t = t, .out = out, .all = text, .mark = mark,
              .types = flags & TOKENS_SPECIAL ? SPECIAL_TYPES : 1 << TOKEN_USER};
    int32_t before = out->n ? out->id[out->n - 1] : -1;   // a space only after special tokens
    w.space = t->space_prefix && (before < 0 || token_is(t, before, SPECIAL_TYPES));
    w.cost = malloc((n + 2) * sizeof *w.ch + m * (2 * sizeof *w.cost + sizeof *w.part + 2));
    if (!w.cost) return fail(e, "out of memory");
    w.ch = (Char *)(w.cost + 2 * m);
    w.part = (uint32_t *)(w.ch + n + 2);
    w.text = (char *)(w.part + m);
    bool add = flags & TOKENS_ADD, bos = add && t->add_bos;
    size_t next = out->n + 1;
    if (bos) add_id(&w, t->bos);
    text_tokenize(&w, text, n, t->tokens.longest);
    if (bos && out->n > next && out->id[next] == t->bos)   // the text brings its own
        memmove(out->id + next, out->id + next + 1, (--out->n - next) * sizeof *out->id);
    if (add && t->add_eos) add_id(&w, t->kind == TOKENIZER_WPM ? t->sep : t->eos);
    free(w.cost);
    return !w.failed || fail(e, "out of memory");
}

static bool token_is_eog(const Tokenizer *t, int32_t i) { return token_at(t, i).type & TOKEN_EOG; }

// All zero where a text begins. Where one goes on, `started` keeps SentencePiece's first space.
typedef struct { char pending[4]; size_t n; bool started; } Detokenizer;

// Writes the characters that one more byte completes; a byte that is not UTF-8 becomes U+FFFD.
static size_t utf8_push(Detokenizer *d, char byte, char *out) {
    size_t n = 0, used;
    for (; d->n && (byte & 0xC0) != 0x80; d->n--) n += utf8_encode(UTF8_BAD, out + n);
    d->pending[d->n++] = byte;
    if (d->n < utf8_length(d->pending[0])) return n;
    uint32_t c = utf8_decode(d->pending, d->n, &used);
    bool valid = utf8_valid(c, used);
    if (!valid) used = 1;
    for (; d->n; d->n -= used) n += utf8_encode(valid ? c : UTF8_BAD, out + n);
    return n;
}

static int char_to_byte(const Tokenizer *t, uint32_t c) {   // -1: none, it is spelled as it is
    if (t->pre->flags & PRE_SPACES) return c == SPM_SPACE ? ' ' : -1;
    for (int b = 0; b < 256; b++)
        if (byte_to_char(b) == c) return b;
    return -1;
}

// Writes the text of a token, in whole characters, to out[t->detokenize_max]; returns its length.
API size_t detokenize(const Tokenizer *t, Detokenizer *d, int32_t id, char *out) {
    if (!token_is(t, id, 1 << TOKEN_NORMAL | 1 << TOKEN_USER | 1 << TOKEN_BYTE)) return 0;
    bool strip = !d->started && t->space_prefix;
    Str s = token_at(t, id).text;
    int type = token_at(t, id).type & TOKEN_TYPE;
    size_t n = 0;
    d->started = true;
    if (type == TOKEN_BYTE && s.n == 6 && s.s[5] == '>')   // <0x0A>
        return utf8_push(d, strtol(s.s + 3, NULL, 16), out);
    for (size_t i = 0, used; i < s.n; i += used) {
        uint32_t c = utf8_decode(s.s + i, s.n - i, &used);
        int byte = type == TOKEN_USER ? -1 : char_to_byte(t, c);
        if (strip && i == 0 && byte == ' ') continue;
        if (byte >= 0) n += utf8_push(d, byte, out + n);
        for (size_t k = 0; byte < 0 && k < used; k++) n += utf8_push(d, s.s[i + k], out + n);
    }
    return n;
}

// The spelling of these tokens decides their type, because metadata is often missing or wrong. The
// list has what published vocabularies use. A row with a `with` counts only beside that token.
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
    {TOKEN_USER | TOKEN_TURN, NULL, "<|channel|> <|message|> <|start|>"},
    {TOKEN_USER, NULL, "<|constrain|>"},
    {TOKEN_USER | TOKEN_TURN, "<|return|>", "<|end|>"},   // gpt-oss
    {TOKEN_USER, "<|calls|>", "<|end|>"},   // Solar
    {TOKEN_NORMAL, "<|tool_response>", "</s>"},   // Gemma 4
};

static const struct { const char *names, *pre; Tokenizer t; } MODELS[] = {   // with defaults
    {"none no_vocab", NULL, {TOKENIZER_NONE, .bos = -1, .eos = -1, .unk = -1, .sep = -1}},
    {"llama", "(SentencePiece)", {TOKENIZER_SPM, .bos = 1, .eos = 2, .unk = 0, .sep = -1}},
    {"bert", "(WordPiece)", {TOKENIZER_WPM, .bos = 101, .eos = -1, .unk = 100, .sep = 102}},
    {"t5", "(unigram)", {TOKENIZER_UNIGRAM, .bos = -1, .eos = 1, .unk = 2, .sep = -1}},
    {"gpt2", NULL, {TOKENIZER_BPE, .bos = 11, .eos = 11, .unk = -1, .sep = -1}},
    {"gemma4", "gemma4", {TOKENIZER_BPE, .bos = -1, .eos = -1, .unk = -1, .sep = -1}},
    {"whitespace", "whitespace", {TOKENIZER_BPE, .bos = -1, .eos = -1, .unk = -1, .sep = -1}},
};

// the key's array of strings (n 0) or of n numbers; NULL: there is no such array, and e says so
static const Meta *vocab_array(const Gguf *g, const char *key, size_t n, Error *e) {
    const Meta *m = gguf_find(g, key);
    if (!m) fail(e, "%s is missing", key);
    else if (m->type != GGUF_ARR || (m->elem == GGUF_STR) != (n == 0))
        fail(e, "%s must be an array of %s", key, n ? "numbers" : "strings");
    else if (n && m->n != n) fail(e, "%s has %lld entries for %zu tokens", key, (long long)m->n, n);
    else return m;
    return NULL;
}

// Reads an array of strings, of which only the first `most` can be found.
static bool dictionary_open(Dictionary *d, const Gguf *g, const char *key, int most, Error *e) {
    const Meta *m = vocab_array(g, key, 0, e);
    size_t size = 16;
    if (!m) return false;
    if (m->n < 1 || m->n > 1 << 24) return fail(e, "%s has %lld entries", key, (long long)m->n);
    while (size < 2 * m->n) size *= 2;
    *d = (Dictionary){.n = m->n, .mask = size - 1};
    d->slot = calloc(size, sizeof *d->slot);
    d->str = malloc(m->n * sizeof *d->str);
    if (!d->slot || !d->str) return fail(e, "out of memory");
    Reader c = {m->v, m->end, false};
    for (uint32_t i = 0; i < d->n; i++) {
        Str s = d->str[i] = read_str(&c);
        uint32_t *slot = dictionary_slot(d, hash_text(0, s), s);
        if (!slot) return fail(e, "%s: made to collide", key);
        if (s.n > d->longest) d->longest = s.n;
        if (s.n > STRING_MAX) return fail(e, "%s: a string of %zu bytes", key, s.n);
        if (s.n && !*slot && i < (uint32_t)most) *slot = i + 1;
    }
    return true;
}

// Reads what only unigram has: the score of an unknown character, and the strings to replace.
static bool unigram_open(Tokenizer *t, const Gguf *g, Error *e) {
    const char *key = "tokenizer.ggml.precompiled_charsmap";
    const Meta *m = gguf_find(g, key);
    float least = FLT_MAX;   // the least score of a normal token (unused ones have -10000)
    for (int32_t i = 0; i < t->n_vocab; i++) {
        double score = meta_float(t->scores, i);
        if (!(fabs(score) <= FLT_MAX)) return fail(e, "token %d has a score of %g", i, score);
        if (t->type[i] == TOKEN_NORMAL && score < least) least = score;
    }
    t->unknown_score = least - 10;
    if (!m || !m->n) return true;
    if (m->type != GGUF_ARR || m->elem > GGUF_I8)
        return fail(e, "%s: want an array of bytes, not %s; get or make another file", key,
                    m->elem == GGUF_STR ? "text (base64)" : "larger numbers (INT32)");
    Reader c = {m->v, m->end, false};
    t->trie.n = read_bytes(&c, 4);
    t->trie.s = take(&c, t->trie.n);
    t->strings = (Str){(const char *)c.p, c.end - c.p};
    bool ok = m->n <= TEXT_MAX && !c.bad && t->trie.n % 4 == 0;
    size_t run = ok ? 0 : CHARSMAP_MAX + 1;   // bytes since the last 0
    for (; c.p < c.end && run <= CHARSMAP_MAX; c.p++) run = *c.p ? run + 1 : 0;
    return !run || fail(e, "%s must be bytes: a trie's size, here %zu, its nodes of 4, strings of "
                        "up to %d that a 0 ends", key, t->trie.n, CHARSMAP_MAX);
}

// Reads the vocabulary: texts and types of the tokens, and their scores or merges.
static bool tokenizer_vocab(Tokenizer *t, const Gguf *g, Error *e) {
    const char *key = "tokenizer.ggml.token_type";
    const Meta *types = gguf_find(g, key);
    const Tensor *embd = gguf_tensor(g, "token_embd.weight");
    int rows = embd ? embd->ne[1] : INT_MAX;   // no text becomes a token beyond them (of images)
    if (!dictionary_open(&t->tokens, g, "tokenizer.ggml.tokens", rows, e)) return false;
    t->n_vocab = t->tokens.n;
    t->detokenize_max = 3 * (t->tokens.longest + 4);
    t->type = calloc(t->n_vocab, 1);
    t->lengths = calloc(t->tokens.longest + 1, 1);
    if (!t->type || !t->lengths) return fail(e, "out of memory");
    if (types && !vocab_array(g, key, t->n_vocab, e)) return false;
    for (int32_t i = 0; i < t->n_vocab; i++) {
        int64_t type = types ? meta_int(types, i) : TOKEN_NORMAL;
        t->type[i] = type >= TOKEN_NORMAL && type <= TOKEN_BYTE ? type : TOKEN_UNUSED;
    }
    key = "tokenizer.ggml.scores";   // SentencePiece's may be missing; then all are 0
    bool scores = t->kind == TOKENIZER_UNIGRAM || (t->kind == TOKENIZER_SPM && gguf_find(g, key));
    if (scores && !(t->scores = vocab_array(g, key, t->n_vocab, e))) return false;
    if (t->kind == TOKENIZER_UNIGRAM) return unigram_open(t, g, e);
    if (t->kind != TOKENIZER_BPE) return true;
    if (!dictionary_open(&t->merges, g, "tokenizer.ggml.merges", INT_MAX, e)) return false;
    for (uint32_t i = 0; i < t->merges.n; i++) {
        Str s = t->merges.str[i];
        if (s.n < 3 || !memchr(s.s + 1, ' ', s.n - 2))
            return fail(e, "merge %u, '%.*s', is not two strings", i, STR_ARG(s));
    }
    return true;
}

// Reads the ids of special tokens, and how a text is changed before it is tokenized. An id that is
// no token is ignored, and the note says so. `kept` has the first five; from eos on all end a text.
static bool special_keys(Tokenizer *t, const Gguf *g, Error *e) {
    enum { CLS, EOS = 4 };
    static const char *const keys[] = {[CLS] = "cls", "bos", "unknown", "seperator", [EOS] = "eos",
                                       "eot", "eom", "fim_pad", "fim_rep", "fim_sep"};
    int32_t *const kept[] = {&t->bos, &t->bos, &t->unk, &t->sep, &t->eos};
    bool wpm = t->kind == TOKENIZER_WPM, spm = t->kind == TOKENIZER_SPM;
    bool unigram = t->kind == TOKENIZER_UNIGRAM;
    for (size_t i = wpm ? CLS : CLS + 1; i < COUNT(keys); i++) {
        int64_t id = i < COUNT(kept) && *kept[i] < t->n_vocab ? *kept[i] : -1;   // the default
        char key[64];
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", keys[i]);
        const Meta *m = gguf_find(g, key);
        if (m && (m->type == GGUF_STR || m->type == GGUF_ARR))
            return fail(e, "%s must be a number", key);
        int64_t said = m ? meta_int(m, 0) : id;
        if (said == UINT32_MAX) said = -1;   // none
        if (said >= -1 && said < t->n_vocab) id = said;
        else if (!*t->note)
            snprintf(t->note, sizeof t->note, "%s is %lld, but there are %d tokens: ignored", key,
                     (long long)said, t->n_vocab);
        if (i < COUNT(kept)) *kept[i] = id;
        if (i >= EOS && id >= 0) t->type[id] |= TOKEN_EOG;
    }
    // BERT's files do not say that BOS is added, and Gemma 4's say no and mean yes
    bool forced = wpm || (t->kind == TOKENIZER_BPE && t->pre->flags == (PRE_SPACES | PRE_BOS));
    t->add_bos = forced || gguf_int(g, "tokenizer.ggml.add_bos_token", t->pre->flags & PRE_BOS);
    t->add_eos = wpm || gguf_int(g, "tokenizer.ggml.add_eos_token", unigram);
    t->trim_spaces = unigram && gguf_int(g, "tokenizer.ggml.remove_extra_whitespaces", false);
    t->space_prefix = t->trim_spaces ||
                      ((spm || unigram) && gguf_int(g, "tokenizer.ggml.add_space_prefix", spm));
    t->lower_case = gguf_int(g, "tokenizer.ggml.normalizer.lowercase", true);
    t->strip_accents = gguf_int(g, "tokenizer.ggml.normalizer.strip_accents", t->lower_case);
    if ((t->add_bos && t->bos < 0) || (t->add_eos && (wpm ? t->sep : t->eos) < 0))
        return fail(e, "text is to begin or end with a token, but tokenizer.ggml lacks its id");
    return true;
}

// Sets types by KNOWN_TOKENS and the list of tokens that end a text, and what special_at looks up.
static bool special_types(Tokenizer *t, const Gguf *g, Error *e) {
    for (size_t i = 0; i < COUNT(KNOWN_TOKENS); i++) {
        if (KNOWN_TOKENS[i].with && token_find(t, KNOWN_TOKENS[i].with) < 0) continue;
        for (const char *name = KNOWN_TOKENS[i].names, *end; *name; name = end + (*end == ' ')) {
            end = name + strcspn(name, " ");
            int32_t id = dictionary_find(&t->tokens, name, end - name);
            if (id >= 0) t->type[id] = KNOWN_TOKENS[i].type;
        }
    }
    const Meta *ends = gguf_find(g, "tokenizer.ggml.eos_token_ids");
    if (ends && !gguf_size[ends->elem])
        return fail(e, "tokenizer.ggml.eos_token_ids must be numbers");
    for (uint64_t i = 0; ends && i < ends->n; i++) {
        int64_t id = meta_int(ends, i);
        if (id >= 0 && id < t->n_vocab) t->type[id] |= TOKEN_EOG;
        else snprintf(t->note, sizeof t->note, "tokenizer.ggml.eos_token_ids has %lld, but there "
                      "are %d tokens: ignored", (long long)id, t->n_vocab);
    }
    char name[102];   // Phi-3 is known by its name: it drops white space behind some tokens
    snprintf(name, sizeof name, "%.*s", STR_ARG(gguf_str(g, "general.name")));
    bool phi3 = strcasestr(name, "phi-3") || strcasestr(name, "phi3");
    for (int32_t i = 0; i < t->n_vocab; i++) {
        Str s = t->tokens.str[i];
        t->lengths[s.n] |= 1;
        if (!s.n || !token_is(t, i, SPECIAL_TYPES)) continue;
        t->special_first[(uint8_t)s.s[0]] = true;
        t->lengths[s.n] |= 2;
        if (phi3 && !find_str(s, "<s> <unk> <|endoftext|>")) t->type[i] |= TOKEN_STRIP;
    }
    return true;
}

// The pre-tokenizer of a file that names none (pre is empty or "default"), such as an old file or
// Ollama's. If neither architecture nor vocabulary tells it, a note says what is assumed.
static const char *known_pre(Tokenizer *t, Str arch, Str pre) {
    static const char *const of[][2] = {{"llama4", "llama4"}, {"mistral3", "tekken"},
                                        {"lfm2 lfm2moe", "lfm2"}, {"gpt-oss", "gpt-4o"}};
    for (size_t i = 0; i < COUNT(of); i++)
        if (find_str(arch, of[i][0])) return of[i][1];
    if (str_eq(token_at(t, 128009).text, "<|eot_id|>")) return "llama-bpe";   // Llama 3
    snprintf(t->note, sizeof t->note, "tokenizer.ggml.pre is %s: llama.cpp's default rules "
             "are assumed, ids may be wrong", pre.n ? "'default'" : "missing");
    return "default";
}

// Makes the tokenizer that the file describes. *made is closed by the caller, also after an error.
static bool tokenizer_open(Tokenizer **made, const Gguf *g, Error *e) {
    Tokenizer *t = *made = calloc(1, sizeof *t);
    Str model = gguf_str(g, "tokenizer.ggml.model"), pre = gguf_str(g, "tokenizer.ggml.pre");
    size_t i = 0;
    if (!t) return fail(e, "out of memory");
    if (!model.s) return fail(e, "tokenizer.ggml.model is missing");
    bool merges = gguf_find(g, "tokenizer.ggml.merges");
    if (str_eq(model, "llama") && str_eq(pre, "gemma4") && merges) model = pre;   // Ollama
    const Alias *alias = find_alias(g);
    if (alias && alias->pre) pre = (Str){alias->pre, strlen(alias->pre)};
    while (i < COUNT(MODELS) && !find_str(model, MODELS[i].names)) i++;
    if (i == COUNT(MODELS))
        return fail(e, "tokenizer.ggml.model '%.*s' is not one of llama, gpt2, gemma4, bert, t5, "
                    "whitespace, none", STR_ARG(model));
    *t = MODELS[i].t;
    if (t->kind == TOKENIZER_NONE) return true;
    if (!tokenizer_vocab(t, g, e)) return false;
    const char *known = MODELS[i].pre;
    if (!known && (!pre.n || str_eq(pre, "default")))
        known = known_pre(t, gguf_str(g, "general.architecture"), pre);
    if (known) pre = (Str){known, strlen(known)};
    for (i = 0; i < COUNT(PRE_TOKENIZERS) && !t->pre; i++)
        if (find_str(pre, PRE_TOKENIZERS[i].names)) t->pre = &PRE_TOKENIZERS[i];
    t->no_rules = !t->pre;
    if (t->no_rules) {   // ids can still be read and written
        t->pre = &PRE_TOKENIZERS[0];
        snprintf(t->note, sizeof t->note, "tokenizer.ggml.pre '%.*s' is unknown", STR_ARG(pre));
    }
    return special_keys(t, g, e) && special_types(t, g, e);
}

static void tokenizer_close(Tokenizer *t) {
    void *owned[] = {t->tokens.slot, t->tokens.str, t->merges.slot, t->merges.str, t->type,
                     t->lengths};
    for (size_t i = 0; i < COUNT(owned); i++) free(owned[i]);
    *t = (Tokenizer){0};
}

// ---- 25. chat templates ----
//
// A template is a program in a model's file that writes a conversation as the model wants it. Its
// language is Jinja as Hugging Face sets it up, with trim_blocks, lstrip_blocks and loop controls.
// This interpreter prints the same bytes as Python's, and knows all that published templates use in
// a chat. Anything else is an error that names it, once it is reached. The parser tries the rules
// of GRAMMAR on the source and makes a tree of nodes; `eval` turns a node into its value, which for
// a statement is the text that it prints.
//
// All memory is one block. Its shadow has another byte for each byte, FOREIGN if that byte came
// from a message that the model did not write. Only `concat` copies text, and it copies the shadow,
// too, so the marks stay with the bytes. A text never changes, so a part of it is a view. An error
// leaves by longjmp. Stack, steps and memory have limits, so every template ends.

typedef struct { Str role, content; } ChatMessage;

// A template prints text[n], with a NUL behind it. A byte of mark[n] is not 0 where the text's byte
// came from a message that the model did not write. rendered_free frees both.
typedef struct { char *text; unsigned char *mark; size_t n; char *block; } Rendered;

enum { FOREIGN = 1, ROOM = 2,   // in the shadow; ROOM: free bytes into which a text may grow
       LONGEST_RANGE = 100000, MOST_PARAMS = 6,   // of a row of BUILTINS
       DEEPEST = 400 << 10 };   // bytes of a thread's stack, which may have 512 KB, for recursion
enum { V_UNDEFINED, V_NONE, V_BOOL, V_INT, V_FLOAT, V_STRING, V_LIST, V_GENERATOR, V_DICT,
       V_NAMESPACE, V_LOOP, V_MACRO };
static const char *const VALUE_KINDS[] = {"undefined", "None", "bool", "int", "float", "str",
                                          "list", "generator", "dict", "namespace", "loop",
                                          "macro"};
typedef struct Value Value;
typedef struct Node Node;
typedef struct { Value *v; size_t n; } List;   // also of a tuple
typedef struct Dict { List pairs; struct Dict *outer; } Dict;   // key, value, key, ..
typedef struct { Str name; const Node *params, *body; Dict *scope; } Macro;   // body NULL: builtin
struct Value {
    int kind;
    bool tuple;                             // of a list: it is printed in round brackets
    union {
        int64_t i;                          // also of a bool
        double f;
        Str s;                              // of an undefined value its name
        List list;                          // also of a generator, as map and select return it
        Dict *dict;                         // also of a namespace or loop
        const Macro *macro;
    };
};
struct Node {                               // what the parser found at `source`
    int rule;
    Value v;                                // of a word, name, number, string or text
    Node *first, *next;                     // its children, its neighbour
    const char *source;                     // NULL: of a builtin
};
typedef struct { List list; Dict named; } Args;
typedef struct {
    const char *source, *p;                 // read up to p; later what runs
    const char *tag_end;                    // where the last tag or text ends
    bool raw;                               // the last tag was {% raw %}
    bool stuck;                             // this tag cannot be read beyond p
    Node **at;                              // the place of the next node
    int flow;                               // R_break or R_continue on its way to the loop
    char *stack;                            // where the stack ended when the template began
    Dict *scope;                            // the names that are set here; outer: those around it
    Dict *builtins;
    size_t steps, memory, size;             // steps and bytes left; bytes of the block
    char *block;
    Error *e;
    jmp_buf failed;
} Template;

// Leaves the interpreter with an error that says why and names the line.
__attribute__((noreturn, format(printf, 2, 3)))
static void stop(Template *t, const char *format, ...) {
    char why[400];
    int line = 1;
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    for (const char *c = t->source; c && c < t->p; c++) line += *c == '\n';
    fail(t->e, "chat template, line %d: %s", line, why);
    longjmp(t->failed, 1);
}

static void spend(Template *t, size_t steps) {   // takes so many steps of those that are left
    if (steps > t->steps) stop(t, "it takes too many steps");
    t->steps -= steps;
}

static void enter(Template *t) {   // one level deeper
    spend(t, 1);
    if (labs((char *)__builtin_frame_address(0) - t->stack) > DEEPEST)
        stop(t, "it is nested too deeply");
}

static void *obtain(Template *t, size_t n) {   // zeroed memory, for as long as the template runs
    n = (n + 7) / 8 * 8;
    if (n > t->memory) stop(t, "it takes too much memory");
    t->memory -= n;
    memset(t->block + t->size + t->memory, 0, n);   // its shadow
    return memset(t->block + t->memory, 0, n);
}

// ---- its texts
static const Str NOTHING = {"", 0};
static Str str(const char *s) { return (Str){s, strlen(s)}; }
static Str str_from(Str s, size_t n) { return (Str){s.s + n, s.n - n}; }   // less its first n bytes
static bool is(Str name, const char *words) { return find_str(name, words); }
static bool in_name(char c) { return isalnum((uint8_t)c) || c == '_' || c & 0x80; }
static bool is_space(uint32_t c) { return c < 128 ? isspace(c) : unicode_classes(c) & CLASS('s'); }
static const char *skip_space(const char *p) { return p + strspn(p, " \t\n\v\f\r"); }

static char *shadow(Template *t, const char *p) {   // NULL: p is not in the block
    size_t at = (uintptr_t)p - (uintptr_t)t->block;
    return at < t->size ? t->block + t->size + at : NULL;
}

// a, then b. If there is room behind a, only b is copied, so that a text which grows in many steps
// costs no more than its bytes. If not, both move to new memory, half of which is room. One byte of
// room stays, so that no text touches the next one.
//   text     T o :   B e   b r i e f . . . . .
//   shadow   0 0 0 0 1 1 1 1 1 1 1 1 2 2 2 2 2     FOREIGN is 1, ROOM is 2
static Str concat(Template *t, Str a, Str b) {
    size_t room = 0, size = 2 * (a.n + b.n) + 8;
    char *end = (char *)a.s + a.n, *mark = shadow(t, end);
    if (!b.n) return a;
    spend(t, b.n / 64);
    while (mark && room <= b.n && mark[room] == ROOM) room++;
    if (room <= b.n) {
        Str new = {obtain(t, size), 0};
        memset(shadow(t, new.s), ROOM, size);
        return concat(t, concat(t, new, a), b);
    }
    memcpy(end, b.s, b.n);
    memset(mark, 0, b.n);
    if (shadow(t, b.s)) memcpy(mark, shadow(t, b.s), b.n);
    return (Str){a.s, a.n + b.n};
}

static Str repeat(Template *t, Str s, int64_t n) {
    Str out = NOTHING;
    for (; n > 0 && s.n; n--) out = concat(t, out, s);
    return out;
}

static char *copy(Template *t, Str s) {   // of its own, with a NUL behind it; it may be changed
    return (char *)concat(t, concat(t, NOTHING, s), (Str){"", 1}).s;
}

static size_t characters(Template *t, Str s) {
    size_t n = 0;
    spend(t, s.n / 64);
    for (size_t i = 0; i < s.n; i++) n += (s.s[i] & 0xC0) != 0x80;
    return n;
}

static Str behind(Template *t, Str s, size_t n) {   // s without its first n characters
    spend(t, (n < s.n ? n : s.n) / 64);
    for (; n && s.n; n--) s = str_from(s, smaller(utf8_length(*s.s), s.n));
    return s;
}

static const char *find(Template *t, Str s, Str what) {   // NULL: it is not there
    spend(t, (s.n + what.n) / 8);
    return memmem(s.s, s.n, what.s, what.n);
}

// s without the white space on one side; if `set` is a string, without the characters in it
enum { LEFT, RIGHT };
static Str strip(Template *t, Str s, Value set, int side) {
    while (s.n) {
        size_t at = side == LEFT ? 0 : s.n - 1, n;
        while (at && (s.s[at] & 0xC0) == 0x80) at--;
        uint32_t c = utf8_decode(s.s + at, s.n - at, &n);
        spend(t, 1);
        if (set.kind == V_STRING ? !find(t, set.s, (Str){s.s + at, n}) : !is_space(c)) break;
        s = side == LEFT ? str_from(s, n) : (Str){s.s, s.n - n};
    }
    return s;
}

// s in another case; how: u(pper), l(ower), c(apitalize), t(itle) or _, the method title. Capitals
// of letters beyond ASCII are errors, because no table has them.
static Str recased(Template *t, Str s, char how) {
    uint64_t cased = CLASS('U') | CLASS('v'), before = 0, set;   // classes of characters
    Str out = NOTHING;
    for (size_t i = 0, n, more; i < s.n; i += n, before = set) {
        uint32_t c = utf8_decode(s.s + i, s.n - i, &n);
        uint32_t next = utf8_decode(s.s + i + n, s.n - i - n, &more);   // a text has room behind it
        bool first = i == 0 || (how == 't' && strchr("-([{< \t\n", s.s[i - 1]));
        set = unicode_classes(c);
        if (how == '_') first = !(before & cased);
        bool up = how == 'u' || (how != 'l' && first);
        uint32_t to = unicode_lower(c);
        if (up) to = c < 0x80 ? (uint32_t)toupper(c) : c;
        if (up && c >= 0x80 && set & (CLASS('v') | CLASS('W')))
            stop(t, "the capital of U+%04X is not known", c);
        if (c == 0x3A3 && !up && before & cased && !(unicode_classes(next) & cased)) to = 0x3C2;
        char bytes[6], *mark = shadow(t, s.s + i);
        size_t size = utf8_encode(to, bytes);
        if (c == 0x130 && !up) size += utf8_encode(0x307, bytes + size);   // i and a dot
        out = concat(t, out, (Str){bytes, size});
        if (mark) memset(shadow(t, out.s + out.n - size), *mark, size);
        spend(t, 1);
    }
    return out;
}

// ---- its values, which behave as Python's
static Value string_value(Str s) { return (Value){.kind = V_STRING, .s = s}; }
static Value word_value(const char *s) { return string_value(str(s)); }
static Value int_value(int64_t i) { return (Value){.kind = V_INT, .i = i}; }
static Value float_value(double f) { return (Value){.kind = V_FLOAT, .f = f}; }
static Value bool_value(bool b) { return (Value){.kind = V_BOOL, .i = b}; }
static Value list_value(List l) { return (Value){.kind = V_LIST, .list = l}; }
static Value dict_value(Dict *d) { return (Value){.kind = V_DICT, .dict = d}; }
static Value undefined_value(Str name) { return (Value){.kind = V_UNDEFINED, .s = name}; }
static bool is_int(Value v) { return v.kind == V_INT || v.kind == V_BOOL; }
static bool is_number(Value v) { return is_int(v) || v.kind == V_FLOAT; }
static double number(Value v) { return v.kind == V_FLOAT ? v.f : v.i; }

// An empty, zero, none or undefined value is false. A generator is true, even an empty one.
static bool truth(Value v) {
    if (is_number(v)) return number(v) != 0;
    if (v.kind == V_STRING) return v.s.n > 0;
    if (v.kind == V_LIST) return v.list.n > 0;
    if (v.kind == V_DICT) return v.dict->pairs.n > 0;
    return v.kind > V_NONE;
}

static Value must_be(Template *t, Value v, int kind) {   // or it stops
    if (v.kind == kind || (kind == V_INT && v.kind == V_BOOL)) return v;
    if (v.kind == V_UNDEFINED) stop(t, "'%.*s' is undefined", STR_ARG(v.s));
    stop(t, "%s instead of %s", VALUE_KINDS[v.kind], VALUE_KINDS[kind]);
}

__attribute__((noreturn)) static void stop_types(Template *t, Str op, Value a, Value b) {
    if (!a.kind || !b.kind) must_be(t, a.kind ? b : a, V_NONE);   // it stops: 'x' is undefined
    stop(t, "%s %.*s %s is not possible", VALUE_KINDS[a.kind], STR_ARG(op), VALUE_KINDS[b.kind]);
}

static void push_all(Template *t, List *l, List more) {
    Str old = l->n ? (Str){(char *)l->v, l->n * sizeof *l->v} : NOTHING;
    l->v = (Value *)concat(t, old, (Str){(char *)more.v, more.n * sizeof *more.v}).s;
    l->n += more.n;
}

static void push(Template *t, List *l, Value v) { push_all(t, l, (List){&v, 1}); }

static int compare(double a, double b) { return a < b ? -1 : a > b; }

// -1, 0 or 1, as a is less than b, equal or more; UNLIKE: a and b cannot be compared
enum { UNLIKE = 2 };
__attribute__((noinline)) static int order(Template *t, Value a, Value b) {
    if (is_number(a) && is_number(b)) return compare(number(a), number(b));
    if (a.kind != b.kind) return UNLIKE;
    if (a.kind <= V_NONE) return 0;
    if (a.kind > V_DICT) stop_types(t, str("compared to"), a, b);
    int c = 0;
    enter(t);
    if (a.kind == V_STRING) {
        size_t both = a.s.n < b.s.n ? a.s.n : b.s.n;
        spend(t, both / 64);
        c = compare(memcmp(a.s.s, b.s.s, both), 0);
        return c ? c : compare(a.s.n, b.s.n);
    }
    List x = a.kind == V_DICT ? a.dict->pairs : a.list;
    List y = a.kind == V_DICT ? b.dict->pairs : b.list;
    for (size_t i = 0; !c && i < x.n && i < y.n; i++) c = order(t, x.v[i], y.v[i]);
    return c ? c : compare(x.n, y.n);
}

// A dict keeps the order of its keys, which are few, so a search goes through all of them.
static Value *entry(Template *t, const Dict *d, Value key) {   // NULL: it is not there
    spend(t, d->pairs.n / 16);
    for (size_t i = 0; i < d->pairs.n; i += 2)
        if (!order(t, d->pairs.v[i], key)) return &d->pairs.v[i + 1];
    return NULL;
}

static void set(Template *t, Dict *d, Value key, Value v) {
    Value *old = entry(t, d, key);
    if (old) *old = v;
    else push_all(t, &d->pairs, (List){(Value[]){key, v}, 2});
}

static Dict *new_dict(Template *t, Dict *outer) {
    Dict *d = obtain(t, sizeof *d);
    d->outer = outer;
    return d;
}

static Value apply(Template *t, Str filter, Value v, Args more);
static Str join(Template *t, Str by, List l);
static List sorted(Template *t, List l, Value attribute, bool reverse, bool exact);
static List pairs_of(Template *t, Value v);

// The items that a loop over v sees: elements of a list, characters of a text, keys of a dict.
static List items_of(Template *t, Value v) {
    List l = {0};
    if (v.kind == V_LIST || v.kind == V_GENERATOR) return v.list;
    if (v.kind == V_DICT) {
        for (size_t i = 0; i < v.dict->pairs.n; i += 2) push(t, &l, v.dict->pairs.v[i]);
    } else if (v.kind == V_STRING) {
        for (Str s = v.s, more; s.n; s = more) {
            more = behind(t, s, 1);
            push(t, &l, string_value((Str){s.s, s.n - more.n}));
        }
    } else if (v.kind != V_UNDEFINED) stop(t, "%s cannot be iterated", VALUE_KINDS[v.kind]);
    return l;
}

static int64_t length(Template *t, Value v) {
    return v.kind == V_STRING ? characters(t, v.s) : items_of(t, v).n;
}

// index v of a slice, or `otherwise`; a negative one counts from the end; back: 1 in a slice that
// goes backwards, which may end in front of the first
static int64_t bound(Value v, int64_t n, int back, int64_t otherwise) {
    if (!is_int(v)) return otherwise;
    int64_t i = v.i < 0 ? v.i + n : v.i;
    return i < -back ? -back : smaller(i, n - back);
}

static Value slice(Template *t, Value v, Value from, Value to, Value by) {   // v[from:to:by]
    if (v.kind != V_LIST) must_be(t, v, V_STRING);
    int64_t n = length(t, v), step = is_int(by) ? by.i : 1;
    int back = step < 0;
    int64_t a = bound(from, n, back, back * (n - 1)), b = bound(to, n, back, back ? -1 : n);
    List l = {0};
    if (!step) stop(t, "a slice has a step of 0");
    if (step == 1 && v.kind == V_STRING) {   // a view
        Str s = behind(t, v.s, a);
        return string_value((Str){s.s, s.n - behind(t, s, a < b ? b - a : 0).n});
    }
    for (List all = items_of(t, v); back ? a > b : a < b; a += step) push(t, &l, all.v[a]);
    if (v.kind == V_STRING) return string_value(join(t, NOTHING, l));
    return (Value){.kind = V_LIST, .tuple = v.tuple, .list = l};
}

// v.key or v[key]. What is not there is undefined, but an error in an undefined value or a loop.
static Value member(Template *t, Value v, Value key) {
    if (v.kind == V_UNDEFINED) must_be(t, v, V_DICT);
    Value *found = v.kind >= V_DICT && v.kind <= V_LOOP ? entry(t, v.dict, key) : NULL;
    if (found) return *found;
    if (v.kind == V_LOOP) must_be(t, undefined_value(must_be(t, key, V_STRING).s), V_INT);
    if (is_int(key) && (v.kind == V_LIST || v.kind == V_STRING)) {
        int64_t n = length(t, v), i = key.i < 0 ? key.i + n : key.i;
        Value next = int_value(i + 1), by = int_value(1);
        if (i >= 0 && i < n) return *items_of(t, slice(t, v, int_value(i), next, by)).v;
    }
    return undefined_value(key.kind == V_STRING ? key.s : str("an element"));
}

static void write_float(double f, char *s, size_t size) {   // in the fewest digits that read as f
    int digits = -1;
    do snprintf(s, size, "%.*e", ++digits, f);
    while (strtod(s, NULL) != f);
    int e = atoi(strchr(s, 'e') + 1);
    if (e >= -4 && e < 16) snprintf(s, size, "%.*f", digits > e ? digits - e : 1, f);
}

enum { PYTHON, JSON, SORTED };   // SORTED: JSON with the keys in order
static Str written(Template *t, Str s, Value v, int json, Str line, Str indent);
static Str to_text(Template *t, Value v) {   // as Python's str writes v
    char s[32];
    if (v.kind == V_STRING) return v.s;
    if (v.kind == V_UNDEFINED) return NOTHING;
    if (v.kind == V_NONE) return str("None");
    if (v.kind == V_BOOL) return str(v.i ? "True" : "False");
    if (v.kind == V_LIST || v.kind == V_DICT)
        return written(t, NOTHING, v, PYTHON, NOTHING, NOTHING);
    if (v.kind == V_FLOAT) write_float(v.f, s, sizeof s);
    else snprintf(s, sizeof s, "%lld", (long long)must_be(t, v, V_INT).i);
    return concat(t, NOTHING, str(s));
}

static Str quoted(Template *t, Str s, Str text, bool json) {   // s, then text in quotes
    char known[] = "'\\\n\r\t\b\f", letter[] = "'\\nrtbf";
    if (json || (find(t, text, str("'")) && !find(t, text, str("\"")))) *known = *letter = '"';
    if (!json) known[5] = 0;
    s = concat(t, s, (Str){known, 1});
    for (size_t i = 0; i < text.n; i++) {
        char c = text.s[i], code[8] = {'\\'}, *at = c ? strchr(known, c) : NULL;
        if (at) code[1] = letter[at - known];
        else if ((uint8_t)c < ' ') sprintf(code, json ? "\\u%04x" : "\\x%02x", c);
        s = concat(t, s, code[1] ? str(code) : (Str){text.s + i, 1});
    }
    return concat(t, s, (Str){known, 1});
}

// s, then v as JSON or as Python has it; each element is behind `line` and `indent`, unless empty
static Str written(Template *t, Str s, Value v, int json, Str line, Str indent) {
    bool dict = v.kind == V_DICT;
    const char *brackets = dict ? "{}" : "[]";
    enter(t);
    if (!v.kind) must_be(t, v, V_DICT);   // it stops
    if (json && v.kind == V_NONE) return concat(t, s, str("null"));
    if (json && v.kind == V_BOOL) return concat(t, s, str(v.i ? "true" : "false"));
    if (v.kind == V_STRING) return quoted(t, s, v.s, json);
    if (v.kind != V_LIST && !dict) return concat(t, s, to_text(t, v));
    if (v.tuple && !json) brackets = "()";
    List l = dict ? pairs_of(t, v) : v.list;
    Str inner = line.n ? concat(t, concat(t, NOTHING, line), indent) : NOTHING;
    if (dict && json == SORTED) l = sorted(t, l, int_value(0), false, true);
    s = concat(t, s, (Str){brackets, 1});
    for (size_t i = 0; i < l.n; i++) {
        Value x = l.v[i];
        if (i > 0) s = concat(t, s, str(line.n ? "," : ", "));
        s = concat(t, s, inner);
        if (dict) s = concat(t, written(t, s, *x.list.v, json, inner, indent), str(": "));
        s = written(t, s, dict ? x.list.v[1] : x, json, inner, indent);
    }
    if (l.n == 1 && *brackets == '(') s = concat(t, s, str(","));
    if (l.n) s = concat(t, s, line);
    return concat(t, s, str(brackets + 1));
}

// ---- its operators
static bool contains(Template *t, Value in, Value v) {   // is v in a string, a list, a dict's keys?
    if (in.kind == V_STRING && v.kind == V_STRING) return find(t, in.s, v.s);
    if (in.kind == V_STRING) stop_types(t, str("in"), v, in);
    List l = items_of(t, in);
    size_t i = 0;
    spend(t, l.n / 8);
    while (i < l.n && order(t, l.v[i], v)) i++;
    return i < l.n;
}

// a op b. + adds numbers, lists or strings, and * repeats a string. Whole numbers have 53 bits.
static Value operate(Template *t, Str op, Value a, Value b) {
    int o = *op.s;
    if (o == '~') return string_value(concat(t, to_text(t, a), to_text(t, b)));
    if (o == 'i' || o == 'n') return bool_value(contains(t, b, a) == (o == 'i'));
    if (o == '=' || o == '!') return bool_value(!order(t, a, b) == (o == '='));
    if (o == '<' || o == '>') {
        int c = order(t, a, b);
        if (c == UNLIKE || a.kind <= V_NONE || a.kind > V_LIST) stop_types(t, op, a, b);
        return bool_value((op.n == 2 && !c) || c == (o == '<' ? -1 : 1));
    }
    if (o == '+' && a.kind == V_STRING && b.kind == V_STRING)
        return string_value(concat(t, a.s, b.s));
    if (o == '+' && a.kind == V_LIST && b.kind == V_LIST) {
        push_all(t, &a.list, b.list);
        return a;
    }
    if (o == '*' && a.kind == V_STRING && is_int(b)) return string_value(repeat(t, a.s, b.i));
    if (o == '%' && a.kind == V_STRING)
        return apply(t, str("format"), a, (Args){.list = b.tuple ? b.list : (List){&b, 1}});
    if (!is_number(a) || !is_number(b)) stop_types(t, op, a, b);
    double x = number(a), y = number(b), left = fmod(x, y);
    if (!y && strchr("/%", o)) stop(t, "division by zero");
    if (left && (left < 0) != (y < 0)) left += y;   // it has the sign of y
    double z = op.n == 2 ? (x - left) / y + 0.0 : x / y;   // no -0.0 in x // y
    if (o == '+') z = x + y;
    if (o == '-') z = x - y;
    if (o == '*') z = op.n == 2 ? pow(x, y) : x * y;
    if (o == '%') z = left;
    if (!(fabs(z) < 9e15)) stop(t, "a number is too large");
    bool whole = !str_eq(op, "/") && (!str_eq(op, "**") || y >= 0);
    return is_int(a) && is_int(b) && whole ? int_value((int64_t)z) : float_value(z);
}

static bool passes(Template *t, Str test, Value v, Value x) {   // v is test, or v is test(x)
    static const char *const kinds[] = {"undefined", "none", "boolean", "integer", "float",
                                        "string", "", "", "mapping"};
    static const char *const operators[][2] = {{"==", "== eq equalto"}, {"!=", "!= ne"},
        {"<", "< lt lessthan"}, {"<=", "<= le"}, {">", "> gt greaterthan"}, {">=", ">= ge"},
        {"in", "in"}};
    for (int k = 0; k < (int)COUNT(kinds); k++)
        if (is(test, kinds[k])) return v.kind == k;
    if (is(test, "defined")) return v.kind != V_UNDEFINED;
    if (is(test, "true false")) return v.kind == V_BOOL && v.i == (*test.s == 't');
    if (is(test, "number")) return is_number(v);
    if (is(test, "sequence") && v.kind == V_GENERATOR) return false;
    if (is(test, "sequence iterable")) return !v.kind || (v.kind >= V_STRING && v.kind <= V_DICT);
    if (is(test, "sameas") && v.kind > V_STRING) return v.kind == x.kind && v.dict == x.dict;
    if (is(test, "sameas")) return v.kind == x.kind && !order(t, v, x);
    if (is(test, "filter")) return entry(t, t->builtins, must_be(t, v, V_STRING));
    for (size_t k = 0; k < COUNT(operators); k++)
        if (is(test, operators[k][1])) return operate(t, str(operators[k][0]), v, x).i;
    if (is(test, "odd even")) return (must_be(t, v, V_INT).i & 1) == (*test.s == 'o');
    stop(t, "there is no test '%.*s'", STR_ARG(test));
}

// ---- its filters, methods and functions
static Str join(Template *t, Str by, List l) {
    Str s = NOTHING;
    spend(t, l.n);
    for (size_t i = 0; i < l.n; i++) s = concat(t, i ? concat(t, s, by) : s, to_text(t, l.v[i]));
    return s;
}

// The parts of s between separators: at most `most` (-1: all of them), and the rest.
static List split(Template *t, Str s, Str by, int64_t most) {
    List l = {0};
    if (!by.n) stop(t, "an empty separator");
    for (const char *at; most && (at = find(t, s, by)); most--) {
        push(t, &l, string_value((Str){s.s, at - s.s}));
        s = str_from(s, at - s.s + by.n);
    }
    push(t, &l, string_value(s));
    return l;
}

// x.attribute, where the attribute may be a path such as a.b; if it is none, x itself
static Value get(Template *t, Value x, Value attribute) {
    if (attribute.kind != V_STRING) return attribute.kind == V_NONE ? x : member(t, x, attribute);
    List names = split(t, attribute.s, str("."), -1);
    for (size_t i = 0; i < names.n; i++) x = member(t, x, names.v[i]);
    return x;
}

// the key by which an element is compared, unless `exact` in lower case
static Value key_of(Template *t, Value v, Value attribute, bool exact) {
    v = get(t, v, attribute);
    return v.kind == V_STRING && !exact ? string_value(recased(t, v.s, 'l')) : v;
}

static List sorted(Template *t, List l, Value attribute, bool reverse, bool exact) {
    List out = {0};
    Str before = str(reverse ? ">" : "<");
    for (size_t i = 0, k; i < l.n; i++) {
        Value key = key_of(t, l.v[i], attribute, exact);
        push(t, &out, l.v[i]);
        for (k = i; k; out.v[k] = out.v[k - 1], k--)
            if (!operate(t, before, key, key_of(t, out.v[k - 1], attribute, exact)).i) break;
        out.v[k] = l.v[i];
    }
    return out;
}

static List pairs_of(Template *t, Value v) {   // of a dict, as tuples of two
    List l = {0}, pairs = v.kind ? must_be(t, v, V_DICT).dict->pairs : l;
    for (size_t i = 0; i < pairs.n; i += 2)
        push(t, &l, (Value){.kind = V_LIST, .tuple = true, .list = {pairs.v + i, 2}});
    return l;
}

// A row has names and at most MOST_PARAMS parameters. A filter or method is applied to the first of
// them. To add a name, add it here, if it is a method or function also to one of the lists below,
// then its result to builtin or text_builtin, and a line to golden/templates.tsv.
static const char *const BUILTINS[] = {
    "upper lower capitalize title _title string safe (s)", "split (s, sep, maxsplit=-1)",
    "trim strip lstrip rstrip (s, chars=none)", "startswith endswith find rfind (s, x)",
    "replace (s, old, new)", "format _format (s, a, b, c, d, e)", "join (v, d='')",
    "indent (s, width=4, first=false, blank=false)", "int (v, default=0)", "float (v, default=0.0)",
    "tojson (v, ensure_ascii=false, indent=none, separators=none, sort_keys=false)",
    "default d (v, default_value='', boolean=false)", "get (v, key, default=none)",
    "length count list first last items keys values dictsort reverse (v)", "strftime_now (format)",
    "sort unique min max (v, reverse=false, attribute=none)", "select reject (v, test, x)",
    "selectattr rejectattr (v, attribute, test, x)", "map (v, filter, x, y, attribute=none)",
    "namespace dict ()", "range (start, stop=none, step=1)", "raise_exception (message)",
};
static const char OF_TEXTS[] = "upper lower capitalize title strip lstrip rstrip replace split "
                               "startswith endswith find rfind format join";
static const char OF_DICTS[] = "get items keys values";
static const char FUNCTIONS[] = "namespace dict range raise_exception strftime_now";

static Str date(Template *t, Str format) {   // now; for tests SOURCE_DATE_EPOCH, in UTC
    const char *epoch = getenv("SOURCE_DATE_EPOCH");
    time_t now = epoch ? strtoll(epoch, NULL, 10) : time(NULL);
    struct tm tm;
    char out[400] = "";
    if (!(epoch ? gmtime_r : localtime_r)(&now, &tm)) stop(t, "there is no such date");
    if (!strftime(out, sizeof out, copy(t, format), &tm) && format.n) stop(t, "a date is too long");
    return concat(t, NOTHING, str(out));
}

// s with a[1] to a[5] in the places of `hole`, {} or %s; no other format is known
static Str filled(Template *t, Str s, const Value *a, const char *hole) {
    bool method = *hole == '{';
    List between = split(t, s, str(hole), -1);
    for (size_t i = 0; i < between.n; i++) {
        Str *rest = &between.v[i].s;
        if (i > 5 || !a[i].kind || strpbrk(copy(t, *rest), method ? "{}" : "%"))
            stop(t, "a format knows %s alone, with a value for each", hole);
        if (i) *rest = concat(t, concat(t, NOTHING, to_text(t, a[i])), *rest);
    }
    if (!method && between.n < 6 && a[between.n].kind) stop(t, "a format has too many values");
    return join(t, NOTHING, between);
}

static Value text_builtin(Template *t, Str f, Str s, const Value *a) {   // s: a[0] as a text
    if (is(f, "raise_exception")) stop(t, "%s", copy(t, s));
    if (is(f, "strftime_now")) s = date(t, s);
    if (is(f, "upper lower capitalize title _title")) s = recased(t, s, *f.s);
    if (is(f, "trim strip lstrip")) s = strip(t, s, a[1], LEFT);
    if (is(f, "trim strip rstrip")) s = strip(t, s, a[1], RIGHT);
    if (is(f, "replace")) s = join(t, to_text(t, a[2]), split(t, s, to_text(t, a[1]), -1));
    if (is(f, "split"))
        return list_value(split(t, s, must_be(t, a[1], V_STRING).s, must_be(t, a[2], V_INT).i));
    if (is(f, "startswith endswith find rfind")) {   // rfind goes back from the last place for x
        Str x = must_be(t, a[1], V_STRING).s;
        const char *at = find(t, s, x), *last = at ? s.s + s.n - x.n : NULL;
        if (*f.s == 's') return bool_value(at == s.s);
        if (*f.s == 'e') return bool_value(at && !memcmp(last, x.s, x.n));
        if (at && *f.s == 'r') for (at = last; memcmp(at, x.s, x.n); at--) spend(t, 1 + x.n / 64);
        return int_value(at ? (int64_t)characters(t, (Str){s.s, at - s.s}) : -1);
    }
    if (is(f, "format _format")) s = filled(t, s, a, *f.s == '_' ? "{}" : "%s");
    if (is(f, "indent")) {   // by default not the first line, and no empty lines
        Str pad = a[1].kind == V_STRING ? a[1].s : repeat(t, str(" "), must_be(t, a[1], V_INT).i);
        List lines = split(t, s, str("\n"), -1);
        for (size_t i = 0; i < lines.n; i++) {
            Str *line = &lines.v[i].s;
            if (truth(a[i ? 3 : 2]) || (i && line->n))
                *line = concat(t, concat(t, NOTHING, pad), *line);
        }
        s = join(t, str("\n"), lines);
    }
    return string_value(s);
}

// f is map: the results of the named filter for all elements of v. Others: the elements that pass.
static Value chosen(Template *t, Str f, Value v, Value attribute, Value name, List more) {
    List l = {0}, all = truth(v) ? items_of(t, v) : l;
    for (size_t i = 0; i < all.n; i++) {
        Value x = get(t, all.v[i], attribute);
        if (name.kind) must_be(t, name, V_STRING);
        if (is(f, "map")) push(t, &l, name.kind ? apply(t, name.s, x, (Args){.list = more}) : x);
        else if ((name.kind ? passes(t, name.s, x, *more.v) : truth(x)) == (*f.s == 's'))
            push(t, &l, all.v[i]);
    }
    return (Value){.kind = V_GENERATOR, .list = l};
}

// The result of a filter, method or function of arguments a. Inlined, it would take more stack.
__attribute__((noinline)) static Value builtin(Template *t, Str f, Value *a) {
    Value v = a[0], none = {.kind = V_NONE};
    List l = {0};
    if (is(f, "length count")) return int_value(length(t, v));
    if (is(f, "list keys")) return list_value(items_of(t, v));
    if (is(f, "default d")) return !v.kind || (truth(a[2]) && !truth(v)) ? a[1] : v;
    if (is(f, "join") && v.kind == V_STRING) return string_value(join(t, v.s, items_of(t, a[1])));
    if (is(f, "join")) return string_value(join(t, to_text(t, a[1]), items_of(t, v)));
    if (is(f, "items")) return list_value(pairs_of(t, v));
    if (is(f, "values")) return list_value(chosen(t, str("map"), list_value(pairs_of(t, v)),
                                                  int_value(1), (Value){0}, l).list);
    if (is(f, "reverse") && v.kind != V_STRING) v = list_value(items_of(t, v));
    if (is(f, "reverse")) return slice(t, v, none, none, int_value(-1));
    if (is(f, "dictsort")) return list_value(sorted(t, pairs_of(t, v), int_value(0), false, false));
    if (is(f, "sort")) return list_value(sorted(t, items_of(t, v), a[2], truth(a[1]), false));
    if (is(f, "min max")) v = list_value(sorted(t, items_of(t, v), a[2], f.s[1] == 'a', false));
    if (is(f, "first last min max"))
        return member(t, list_value(items_of(t, v)), int_value(-(*f.s == 'l')));
    if (is(f, "map")) return chosen(t, f, v, a[4], a[1], (List){a + 2, !!a[2].kind + !!a[3].kind});
    if (is(f, "select reject")) return chosen(t, f, v, none, a[1], (List){a + 2, 1});
    if (is(f, "selectattr rejectattr")) return chosen(t, f, v, a[1], a[2], (List){a + 3, 1});
    if (is(f, "get")) v = member(t, must_be(t, v, V_DICT), a[1]);
    if (is(f, "get")) return v.kind ? v : a[2];
    if (is(f, "unique")) {
        Value keys = list_value(l);
        for (List all = items_of(t, v); all.n; all.n--, all.v++) {
            Value key = key_of(t, *all.v, a[2], false);
            if (!contains(t, keys, key)) push(t, &l, *all.v);
            push(t, &keys.list, key);
        }
        return (Value){.kind = V_GENERATOR, .list = l};
    }
    if (is(f, "tojson")) {
        bool lines = a[2].kind != V_NONE;
        Str indent = repeat(t, str(" "), lines ? must_be(t, a[2], V_INT).i : 0);
        int json = truth(a[4]) ? SORTED : JSON;
        if (truth(a[1]) || truth(a[3])) stop(t, "tojson knows no ensure_ascii and no separators");
        return string_value(written(t, NOTHING, v, json, str(lines ? "\n" : ""), indent));
    }
    if (is(f, "int float")) {
        char *s = copy(t, strip(t, strip(t, to_text(t, v), none, LEFT), none, RIGHT)), *end;
        double x = is_int(v) ? v.i : strtod(s, &end);   // not, as Python, 0x1 or inf
        if (!v.kind) must_be(t, v, V_INT);
        if (!is_int(v) && (end == s || *end || strpbrk(s, "xXnN"))) return a[1];
        if (*f.s == 'f' && isfinite(x)) return float_value(x);
        if (!(fabs(x) < 9e15)) stop(t, "a number is too large");
        return int_value((int64_t)x);
    }
    if (is(f, "range")) {
        bool one = a[1].kind == V_NONE;   // range(end)
        int64_t i = one ? 0 : must_be(t, v, V_INT).i;
        int64_t end = must_be(t, one ? v : a[1], V_INT).i, step = must_be(t, a[2], V_INT).i;
        for (; step > 0 ? i < end : step && i > end; i += step) {
            if (l.n == LONGEST_RANGE) stop(t, "a range has more than %d numbers", LONGEST_RANGE);
            push(t, &l, int_value(i));
        }
        return list_value(l);
    }
    return text_builtin(t, f, to_text(t, v), a);
}

// ---- its parser
//
// A rule lists items that follow one another. 'x' is a word or sign, and `x` one that gets a node.
// A name is another rule, whose node gets the nodes of its items as children. * is any number, ?
// none or one, | or else. A rule up to `atom` that finds one thing is that thing: 1 is a number,
// not a sum of one product. A block also reads the {% of the tag that ends it. READERS has a
// function for each rule from `name` to `wrong`. The first word of a tag decides on its rule. A tag
// that does not go on as its rule says becomes the node `wrong`, which is an error only when it is
// evaluated, because many such tags stand in branches that no chat reaches.
//
// {% if x %}{{ x|upper }}{% endif %} becomes this tree, with children to the right of their node:
//   block - statement - if - name x                  eval looks x up; if it is true, eval
//                         |- block - print - unary   joins the texts that the block prints:
//                                            |- name x                 x is looked up again, and
//                                            |- filter - name upper    `suffixed` makes X of it
#define GRAMMAR(X) \
    X(tuple, "value (`,` value?)*") X(value, "or ('if' or ('else' value)?)?") \
    X(or, "and (`or` and)*") X(and, "not (`and` not)*") X(not, "`not` not | compare") \
    X(compare, "sum ((`==` | `!=` | `<=` | `>=` | `<` | `>` | `in` | `not` 'in') sum)?") \
    X(sum, "join ((`+` | `-`) join)*") X(join, "product (`~` product)*") \
    X(product, "power ((`*` | `//` | `/` | `%`) power)*") X(power, "unary (`**` unary)*") \
    X(unary, "(sign | postfix) ('|' filter | test)*") \
    X(sign, "(`-` | `+`) (sign | postfix)") X(postfix, "atom (member | item | args)*") \
    X(atom, "string | number | list | dict | '(' tuple? ')' | name") \
    X(list, "'[' (value (',' value?)*)? ']'")   X(args, "'(' (arg (',' arg?)*)? ')'") \
    X(dict, "'{' (value ':' value (',' (value ':' value)?)*)? '}'") \
    X(item, "'[' (value (':' bound (':' bound)?)? | `:` bound (':' bound)?) ']'") \
    X(bound, "value?") X(member, "'.' (name args? | number)") \
    X(test, "'is' `not`? (`in` | name) postfix?") \
    X(arg, "(`**` | `*`)? value ('=' value)?")  X(filter, "name args?") \
    X(block, "(text | print | '{%' (statement | wrong)?)*") X(print, "'{{' (tuple '}}' | wrong)") \
    X(statement, "if | for | set | macro | call | with | pipe | raw | break | continue") \
    X(if, "'if' (value '%}' | wrong) block (elif | else)? 'endif' '%}'") X(cond, "'if' value") \
    X(elif, "'elif' (value '%}' | wrong) block (elif | else)?")     X(else, "'else' '%}' block") \
    X(for, "'for' (targets 'in' or cond? '%}' | wrong) block else? 'endfor' '%}'") \
    X(targets, "target (',' target)*") X(target, "'(' targets ')' | name ('.' name)?") \
    X(set, "'set' targets ('=' (tuple '%}' | wrong) | ('%}' | wrong) block 'endset' '%}')") \
    X(macro, "'macro' name (params '%}' | wrong) block 'endmacro' '%}'") \
    X(call, "'call' (params name args '%}' | wrong) block 'endcall' '%}'") \
    X(params, "('(' (param (',' param?)*)? ')')?")          X(param, "name ('=' value)?") \
    X(with, "'with' (lets '%}' | wrong) block 'endwith' '%}' | " \
            "'generation' ('%}' | wrong) block 'endgeneration' '%}'") \
    X(lets, "(let (',' let)*)?")    X(let, "name '=' value") \
    X(pipe, "'filter' (filter '%}' | wrong) block 'endfilter' '%}'") \
    X(raw, "'raw' '%}' text? '{%' 'endraw' '%}'")           X(builtin, "name* params") \
    X(break, "'break' '%}'")                X(continue, "'continue' '%}'") \
    X(name, 0) X(string, 0) X(number, 0) X(text, 0) X(wrong, 0) X(word, 0)
#define X(name, grammar) R_##name,
enum { GRAMMAR(X) };
#undef X
#define X(name, grammar) {#name, grammar},
static const struct { const char *name, *grammar; } RULES[] = {GRAMMAR(X)};
#undef X

__attribute__((noreturn)) static void unexpected(Template *t, const char *p) {
    Str s = str(*p ? p : "end");
    t->p = p;
    stop(t, "unexpected %.*s", (int)(s.n - behind(t, s, 20).n), s.s);
}

static Str name_at(const char *p) {   // empty: there is none
    Str s = {p, 0};
    while (in_name(p[s.n])) s.n++;
    return s;
}

static Str tag_name(const char *tag) {   // the name behind {% or {{
    return name_at(skip_space(tag + 2 + (tag[2] == '-' || tag[2] == '+')));
}

// Reads the end of a tag, such as -%}, and the white space that it takes: a - takes all, and a
// comment or a statement (but raw) takes one newline.
static bool read_end(Template *t, char close) {
    const char *p = t->p;
    size_t sign = *p == '-' || (*p == '+' && close != '}');
    if (p[sign] != close || p[sign + 1] != '}') return false;
    t->raw = close == '%' && str_eq(tag_name(t->tag_end), "raw");
    t->p = *p == '-' ? skip_space(p + 3) : p + 2 + sign;
    if (!sign && close != '}' && !t->raw) t->p += *t->p == '\n';
    t->tag_end = t->p;
    return true;
}

// Reads a word or sign. If it begins a tag, such as {%, reads the tag's - or +, too.
static bool read_word(Template *t, Str word) {
    bool tag = word.n == 2 && *word.s == '{';
    if (tag && t->p != t->tag_end) return false;   // within another tag
    t->p = skip_space(t->p);
    if (word.n == 2 && word.s[1] == '}') return read_end(t, *word.s);
    const char *end = t->p + word.n;
    if (strncmp(t->p, word.s, word.n) || (in_name(*word.s) && in_name(*end))) return false;
    if (strchr("+-%", *word.s) && strchr("%}", *end)) return false;   // the end of a tag: -%}
    t->p = end + (tag && (*end == '-' || *end == '+'));
    return true;
}

static bool begins_tag(const char *p, bool raw) {   // does a tag end a text here? raw: endraw alone
    if (*p != '{') return false;
    return raw ? p[1] == '%' && str_eq(tag_name(p), "endraw") : strchr("{%#", p[1]) != 0;
}

// Reads a comment, as an empty text, or text up to the next tag, in raw up to endraw. The tag takes
// white space in front of it: with - all, a statement or comment without + that of its line.
static bool read_text(Template *t, Value *v) {
    const char *start = t->p, *end = start, *line;
    if (start != t->tag_end) return false;   // within a tag
    *v = string_value(NOTHING);
    if (!t->raw && !strncmp(start, "{#", 2)) {
        for (t->p += 2; !read_end(t, '#'); t->p++)
            if (!*t->p) unexpected(t, start);
        return true;
    }
    while (*end && !begins_tag(end, t->raw)) end++;
    char kind = *end ? end[1] : 0;   // of the tag: {, % or #
    char sign = kind ? end[2] : 0;   // -, + or another
    v->s = (Str){start, end - start};
    for (line = end; line > start && (line[-1] == ' ' || line[-1] == '\t');) line--;
    bool begins = line == t->source || line[-1] == '\n';
    if (sign == '-') v->s = strip(t, v->s, (Value){0}, RIGHT);
    else if (begins && sign != '+' && (kind == '%' || kind == '#')) v->s.n = line - start;
    t->p = t->tag_end = end;
    return end > start;
}

// Reads on to the end of a tag that is unknown or cannot be read, unless the tag ends a block.
static bool read_wrong(Template *t, Value *v) {
    const char *place = t->p;
    Str name = tag_name(t->tag_end);
    *v = (Value){0};
    if (t->p == name.s && is(name, "elif else endif endfor endset endmacro endcall endwith "
                                   "endfilter endgeneration endraw")) return false;
    while (!read_end(t, t->tag_end[1] == '{' ? '}' : '%'))
        if (!*t->p++) unexpected(t, place);
    t->stuck = t->raw = false;
    return true;
}

// Reads a string in quotes, or several side by side, which are one.
static bool read_string(Template *t, Value *v) {
    static const char letters[] = "abfnrtv\\'\"\n", meant[] = "\a\b\f\n\r\t\v\\'\"";
    const char *start = t->p;
    *v = string_value(NOTHING);
    for (char quote; (quote = *t->p) == '"' || quote == '\''; t->p = skip_space(t->p + 1))
        for (t->p++; *t->p != quote;) {
            size_t n = strcspn(t->p, (char[]){quote, '\\', 0});
            const char *letter = n || !t->p[1] ? NULL : strchr(letters, t->p[1]);
            t->stuck = !t->p[n] || (!n && (!t->p[1] || strchr("xuUN01234567", t->p[1])));
            if (t->stuck) return false;
            if (!n) n = 2;   // \ and what is no escape
            Str what = letter ? (Str){meant + (letter - letters), *letter != '\n'} : (Str){t->p, n};
            v->s = concat(t, v->s, what);
            t->p += n;
        }
    return t->p > start;
}

static bool read_number(Template *t, Value *v) {
    if (!isdigit((uint8_t)*t->p)) return false;
    char *end;
    *v = int_value(strtoll(t->p, &end, 10));
    bool fraction = *end == '.' ? isdigit((uint8_t)end[1]) : (*end | 32) == 'e';
    if (fraction && t->p[-1] != '.') *v = float_value(strtod(t->p, &end));   // x.0.5 has none
    t->stuck = in_name(*end) || (v->kind == V_INT && v->i > 1ll << 53) || isinf(number(*v));
    if (!t->stuck) t->p = end;
    return !t->stuck;
}

static bool read_name(Template *t, Value *v) {   // which is none of the words between values
    Str s = name_at(t->p);
    *v = string_value(s);
    if (!s.n || isdigit((uint8_t)*s.s) || is(s, "and or not if elif else in is")) return false;
    t->p += s.n;
    return true;
}

// Each reads one thing into *v; false: it is not here.
static bool (*const READERS[])(Template *, Value *) = {
    read_name, read_string, read_number, read_text, read_wrong};

static bool read_choice(Template *t, const char *g);

static size_t item_length(const char *g) {   // of 'x', (a | b) or a rule's name
    size_t n = 1;
    if (*g == '\'' || *g == '`') return strchr(g + 1, *g) - g + 1;
    if (*g != '(') return strcspn(g, " )*?");
    while (g[n] != ')') n += strchr(" |*?", g[n]) ? 1 : item_length(g + n);
    return n + 1;
}

// Reads one item of n characters of grammar. Its node goes to *t->at, and t->at moves on. False:
// the item is not here, and nothing is read; or it begins here, and t->stuck.
static bool read_item(Template *t, const char *g, size_t n) {
    if (t->stuck && strncmp(g, "wrong", n)) return false;
    if (*g == '(') return read_choice(t, g + 1);
    if (*g == '\'') return read_word(t, (Str){g + 1, n - 2});
    int r = *g == '`' ? R_word : 0;
    while (r < R_word && (strncmp(RULES[r].name, g, n) || RULES[r].name[n])) r++;
    if (r != R_text && r != R_block) t->p = skip_space(t->p);
    Node node = {.rule = r, .source = t->source ? t->p : NULL}, **at = t->at, **last;
    bool found;
    enter(t);
    t->at = &node.first;
    if (r == R_word) node.v = string_value((Str){g + 1, n - 2});
    if (r == R_word) found = read_word(t, node.v.s);
    else if (r < R_name) found = read_choice(t, RULES[r].grammar);
    else found = READERS[r - R_name](t, &node.v);
    last = t->at;
    t->at = at;
    if (!found) return false;
    bool alone = r <= R_atom && node.first && !node.first->next;
    *at = alone ? node.first : memcpy(obtain(t, sizeof node), &node, sizeof node);
    t->at = alone ? last : &(*at)->next;
    return true;
}

// Reads the first alternative at g that fits; they end with a closing bracket or the text's end.
static bool read_choice(Template *t, const char *g) {
    Node **start = t->at;
    for (;; g += 2) {   // behind "| "
        bool fits = true, begun = false;   // all items so far are here; an item has been read
        while (*g && *g != '|' && *g != ')') {
            size_t n = item_length(g);
            bool found = fits && read_item(t, g, n);
            begun = begun || found;
            while (found && g[n] == '*' && read_item(t, g, n)) {}
            fits = fits && !t->stuck && (found || (g[n] && strchr("*?", g[n])));
            t->stuck = t->stuck || (begun && !fits);
            g += n;
            g += strspn(g, " *?");
        }
        if (fits) return true;
        t->at = start;
        *start = NULL;
        if (*g != '|') return false;
    }
}

static Node *read_rule(Template *t, const char *rule, const char *p) {   // NULL: it is not at p
    Node *found = NULL;
    t->at = &found;
    t->p = p;
    read_item(t, rule, strlen(rule));
    return found;
}

// ---- it runs
//
// The template has a scope of names, and so has each turn of a loop, each call of a macro and each
// block whose text is captured. A name is set in the innermost scope and looked up from there
// outwards, so a name that a loop sets is gone behind it. A macro sees the scope where it stands.

static Value eval(Template *t, const Node *n);

static const Node *child(const Node *n, int rule) {   // NULL: there is none
    for (n = n->first; n && n->rule != rule;) n = n->next;
    return n;
}

static Value macro_value(Template *t, Str name, const Node *params, const Node *body) {
    Macro *m = obtain(t, sizeof *m);
    *m = (Macro){name, params, body, t->scope};
    return (Value){.kind = V_MACRO, .macro = m};
}

static Value look_up(Template *t, Value name) {
    for (Dict *d = t->scope; d; d = d->outer) {
        Value *v = entry(t, d, name);
        if (v) return *v;
    }
    if (is(name.s, "true True false False")) return bool_value((*name.s.s | 32) == 't');
    if (is(name.s, "none None")) return (Value){.kind = V_NONE};
    return is(name.s, FUNCTIONS) ? *entry(t, t->builtins, name) : undefined_value(name.s);
}

// Calls a macro, whose value is the text that it prints, or a builtin. A parameter takes the
// argument in its place, or of its name, or its default. A namespace, without any, keeps all names.
static Value call(Template *t, Value f, Args a) {
    const Macro *m = must_be(t, f, V_MACRO).macro;
    Dict *scope = t->scope, *own = t->scope = new_dict(t, m->scope);
    Value given[MOST_PARAMS] = {{0}};   // of a builtin
    Value key = word_value("caller"), *caller = entry(t, &a.named, key), v;
    size_t n = 0;
    enter(t);
    if (m->params->rule == R_wrong) eval(t, m->params);
    if (m->body && caller) set(t, own, key, *caller);
    for (const Node *p = m->params->first; p; p = p->next, n++) {
        Value name = p->first->v, *named = entry(t, &a.named, name);
        v = undefined_value(name.s);
        if (n < a.list.n) v = a.list.v[n];
        else if (named) v = *named;
        else if (p->first->next) v = eval(t, p->first->next);
        set(t, own, name, v);
        if (!m->body) given[n] = v;
    }
    if (!m->body && !n) own->pairs = a.named.pairs;
    if (a.list.n > n) stop(t, "'%.*s' takes not so many arguments", STR_ARG(m->name));
    for (const Value *k = a.named.pairs.v, *end = k + a.named.pairs.n; k < end; k += 2)
        if (!entry(t, own, *k))
            stop(t, "'%.*s' takes no argument '%.*s'", STR_ARG(m->name), STR_ARG(k->s));
    if (m->body) v = eval(t, m->body);
    else v = n ? builtin(t, m->name, given) : dict_value(own);
    if (is(m->name, "namespace")) v.kind = V_NAMESPACE;
    t->scope = scope;
    return v;
}

static Value apply(Template *t, Str name, Value v, Args more) {   // a filter or a method of v
    Value *f = entry(t, t->builtins, string_value(name));
    List list = {0};
    if (!f) stop(t, "there is no filter '%.*s'", STR_ARG(name));
    push(t, &list, v);
    push_all(t, &list, more.list);
    return call(t, *f, (Args){list, more.named});
}

static Args arguments(Template *t, const Node *args) {   // of a call; NULL: none
    Args a = {0};
    for (const Node *n = args ? args->first : NULL; n; n = n->next) {
        const Node *k = n->first;
        Value v = eval(t, k->next ? k->next : k);
        if (!k->next) push(t, &a.list, v);
        else if (k->rule != R_word) set(t, &a.named, k->v, v);
        else if (k->v.s.n == 1) push_all(t, &a.list, items_of(t, v));   // *v
        else push_all(t, &a.named.pairs, must_be(t, v, V_DICT).dict->pairs);   // **v
    }
    return a;
}

// v with one of these behind it: .x .x(y) [1] [1:2] [::-1] (x) |f is f
static Value suffixed(Template *t, Value v, const Node *n) {
    const Node *k = n->first, *args = child(n, R_args), *name = child(n, R_name);
    const Node *to = child(n, R_bound);
    Value none = {0};
    t->p = n->source;
    if (n->rule == R_args) return call(t, v, arguments(t, n));
    if (n->rule == R_test) {
        const Node *test = str_eq(k->v.s, "not") ? k->next : k;
        Value x = test->next ? eval(t, test->next) : none;
        return bool_value(passes(t, test->v.s, v, x) == (test == k));
    }
    if (n->rule == R_item) {
        Value from = k->rule == R_word ? none : eval(t, k);
        if (!to) return member(t, v, from);
        const Node *by = to->next;
        return slice(t, v, from, to->first ? eval(t, to->first) : none,
                     by && by->first ? eval(t, by->first) : none);
    }
    if (n->rule != R_member) return apply(t, name->v.s, v, arguments(t, args));
    bool text = v.kind == V_STRING && is(k->v.s, OF_TEXTS);
    bool method = args && (text || (v.kind == V_DICT && is(k->v.s, OF_DICTS)));
    if (!method) v = member(t, v, k->v);
    if (!args) return v;
    Str f = is(k->v.s, "format title") ? concat(t, str("_"), k->v.s) : k->v.s;   // no filters
    return method ? apply(t, f, v, arguments(t, args)) : call(t, v, arguments(t, args));
}

// Operands with operators between them. `and` and `or` give the operand that decides.
static Value eval_chain(Template *t, const Node *n) {
    Value v = eval(t, n->first);
    for (const Node *op = n->first->next; op; op = op->next->next) {
        if (n->rule <= R_and && truth(v) == (n->rule == R_or)) break;
        Value right = eval(t, op->next);
        t->p = op->source;
        v = n->rule <= R_and ? right : operate(t, op->v.s, v, right);
    }
    return v;
}

// Sets one target to v, or several to the items of v; a target is x, namespace.x or (targets).
static void assign(Template *t, const Node *targets, Value v) {
    List items = targets->first->next ? items_of(t, v) : (List){&v, 1};
    size_t i = 0;
    for (const Node *target = targets->first; target; target = target->next, i++) {
        const Node *name = target->first, *key = name->next;
        if (i >= items.n) continue;
        if (name->rule == R_targets) assign(t, name, items.v[i]);
        else if (!key) set(t, t->scope, name->v, items.v[i]);
        else set(t, must_be(t, look_up(t, name->v), V_NAMESPACE).dict, key->v, items.v[i]);
    }
    if (i != items.n) stop(t, "%zu values for %zu names", items.n, i);
}

// the text of a block, which gets a scope of its own, with these names (NULL: none)
static Value captured(Template *t, const Node *block, const Node *names) {
    List pairs = arguments(t, names).named.pairs;
    t->scope = new_dict(t, t->scope);
    t->scope->pairs = pairs;
    Value v = eval(t, block);
    t->scope = t->scope->outer;
    return v;
}

// Each turn has a scope. All items are tested first, because the loop knows its length. A break or
// continue in t->flow stops every block up to the loop. Inlined, it would double eval's stack.
__attribute__((noinline)) static Value run_for(Template *t, const Node *n) {
    const Node *targets = n->first, *test = child(n, R_cond), *body = child(n, R_block);
    List all = items_of(t, eval(t, targets->next)), items = test ? (List){0} : all;
    Dict *scope = t->scope, *outer = new_dict(t, scope), *loop = new_dict(t, NULL);
    Value text = string_value(NOTHING), none = undefined_value(str("an element"));
    bool done = false;   // a turn went to its end
    for (size_t i = 0; i < all.n && test; i++) {
        t->scope = new_dict(t, outer);
        assign(t, targets, all.v[i]);
        if (truth(eval(t, test->first))) push(t, &items, all.v[i]);
    }
    set(t, outer, word_value("loop"), (Value){.kind = V_LOOP, .dict = loop});
    for (size_t i = 0; i < items.n && t->flow != R_break; i++) {
        static const char *const names[] = {"index0", "index", "revindex0", "revindex", "length",
                                            "first", "last", "previtem", "nextitem"};
        size_t left = items.n - i - 1;
        Value values[] = {int_value(i), int_value(i + 1), int_value(left), int_value(left + 1),
                          int_value(items.n), bool_value(!i), bool_value(!left),
                          i ? items.v[i - 1] : none,
                          left ? items.v[i + 1] : none};
        for (size_t k = 0; k < COUNT(names); k++) set(t, loop, word_value(names[k]), values[k]);
        t->flow = 0;
        t->scope = new_dict(t, outer);
        assign(t, targets, items.v[i]);
        text.s = concat(t, text.s, eval(t, body).s);
        done = done || !t->flow;
    }
    t->flow = 0;
    t->scope = scope;
    if (!done && (n = child(n, R_else))) text.s = concat(t, text.s, captured(t, n, NULL).s);
    return text;
}

// Returns the value of an expression, or the text that a statement or a block prints.
static Value eval(Template *t, const Node *n) {
    const Node *first = n->first, *k = first, *block = child(n, R_block);
    const char *where = t->p;   // errors are of the node that is evaluated, not of its children
    Value v = n->v;
    enter(t);
    if (n->source) t->p = n->source;
    if (first && first->rule == R_wrong) eval(t, first);
    switch (n->rule) {
    case R_number: case R_string: case R_text: break;
    case R_wrong: unexpected(t, t->p);
    case R_name: v = look_up(t, v); break;
    case R_value: case R_if: case R_elif:   // first if .. else .., or {% if first %} block
        if (n->rule == R_value) k = truth(eval(t, first->next)) ? first : first->next->next;
        else k = truth(eval(t, first)) ? block : block->next;
        if (k) v = eval(t, k);
        break;
    case R_not: v = bool_value(!truth(eval(t, first->next))); break;
    case R_sign: v = operate(t, first->v.s, int_value(0), eval(t, first->next)); break;
    case R_tuple: case R_list: case R_atom:   // an atom that is none of its parts is (), a tuple
        for (v = (Value){.kind = V_LIST, .tuple = n->rule != R_list}; k; k = k->next)
            if (k->rule != R_word) push(t, &v.list, eval(t, k));
        break;
    case R_dict:
        for (v = dict_value(new_dict(t, NULL)); k; k = k->next->next) {
            Value key = eval(t, k);
            set(t, v.dict, key, eval(t, k->next));
        }
        break;
    case R_postfix: case R_unary:
        for (v = eval(t, first); (k = k->next);) v = suffixed(t, v, k);
        break;
    case R_block: case R_else: case R_print: case R_statement: case R_raw:
        for (v = string_value(NOTHING); k && !t->flow; k = k->next) {
            Str s = to_text(t, eval(t, k));
            v.s = v.s.n ? concat(t, v.s, s) : s;
        }
        break;
    case R_for: v = run_for(t, n); break;
    case R_set:
        assign(t, first, first->next == block ? captured(t, block, NULL) : eval(t, first->next));
        break;
    case R_with: v = captured(t, block, child(n, R_lets)); break;
    case R_pipe: v = suffixed(t, captured(t, block, NULL), first); break;
    case R_call: {   // the macro gets the block as one of its own, `caller`
        Args a = arguments(t, first->next->next);
        set(t, &a.named, word_value("caller"), macro_value(t, str("caller"), first, block));
        v = call(t, look_up(t, first->next->v), a);
        break;
    }
    case R_macro: set(t, t->scope, first->v, macro_value(t, first->v.s, first->next, block)); break;
    case R_break: case R_continue: t->flow = n->rule; break;
    default: v = eval_chain(t, n);
    }
    if (!t->flow) t->p = where;
    return v;
}

// Reads the template, sets the names that it sees, and runs it. False: it stopped, and e says why.
static bool template_run(Template *t, Str source, const ChatMessage *m, size_t n, Str bos, Str eos,
                         int think, bool parts, Rendered *out) {
    static const char *const shapes[] = {   // a message's content is a text, or a list of one part
        "{'role': role, 'content': text}",
        "{'role': role, 'content': [{'type': 'text', 'text': text}]}"};
    t->stack = __builtin_frame_address(0);
    if (setjmp(t->failed)) return false;
    List messages = {0};
    t->scope = new_dict(t, NULL);
    t->builtins = new_dict(t, NULL);
    for (size_t i = 0; i < COUNT(BUILTINS); i++) {
        const Node *row = read_rule(t, "builtin", BUILTINS[i]), *params = child(row, R_params);
        for (const Node *k = row->first; k != params; k = k->next)
            set(t, t->builtins, k->v, macro_value(t, k->v.s, params, NULL));
    }
    const Node *shape = read_rule(t, "value", shapes[parts]);
    for (size_t i = 0; i < n; i++) {
        Str role = concat(t, NOTHING, m[i].role), text = concat(t, NOTHING, m[i].content);
        if (text.n && !str_eq(role, "assistant")) memset(shadow(t, text.s), FOREIGN, text.n);
        set(t, t->scope, word_value("role"), string_value(role));
        set(t, t->scope, word_value("text"), string_value(text));
        push(t, &messages, eval(t, shape));
    }
    t->scope = eval(t, read_rule(t, "value", "{'self': {}, 'add_generation_prompt': true, "
                                 "'tools': none, 'documents': none}")).dict;
    // \r\n and \r become \n, and the last \n is dropped
    char *to = obtain(t, source.n + 4);
    t->source = t->tag_end = to;
    for (size_t i = 0; i < source.n; i++) {
        if (source.s[i] == '\n' && i && source.s[i - 1] == '\r') continue;
        *to++ = source.s[i] == '\r' ? '\n' : source.s[i];
    }
    if (to > t->source && to[-1] == '\n') *--to = 0;
    const Node *root = read_rule(t, "block", t->source);
    if (t->p < to || t->p != t->tag_end) unexpected(t, t->p);
    set(t, t->scope, word_value("messages"), list_value(messages));
    set(t, t->scope, word_value("bos_token"), string_value(concat(t, NOTHING, bos)));
    set(t, t->scope, word_value("eos_token"), string_value(concat(t, NOTHING, eos)));
    if (think >= 0) set(t, t->scope, word_value("enable_thinking"), bool_value(think));
    if (think >= 0) set(t, t->scope, word_value("thinking"), bool_value(think));
    Str text = eval(t, root).s;
    if (t->flow) stop(t, "%s outside of a loop", RULES[t->flow].name);
    char *printed = copy(t, text);
    *out = (Rendered){printed, (unsigned char *)shadow(t, printed), text.n, t->block};
    return true;
}

API void rendered_free(Rendered *r) {
    free(r->block);
    *r = (Rendered){0};
}

// Some converters wrote a template's name in place of it.
static const char *const NAMED_TEMPLATES[][2] = {
    {"chatml", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
               "{% endfor %}<|im_start|>assistant\n\n"},
    {"chatglm4", "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
                 "<|assistant|>\n\n"},
};

// Renders a conversation. bos and eos are the texts of these tokens, or ""; think is the value of
// enable_thinking and thinking (-1: undefined). False: e says why, and out is empty. Some templates
// print content only if it is a list of parts, {"type": "text", "text": ..}, and no file says so.
// So two trials render "Hello" as a text and as a list, and look for its marked bytes.
API bool template_render(Str template, const ChatMessage *messages, size_t n_messages, Str bos,
                         Str eos, int think, Rendered *out, Error *e) {
    static const ChatMessage said = {{"user", 4}, {"Hello", 5}};
    for (size_t i = 0; i < COUNT(NAMED_TEMPLATES); i++)
        if (str_eq(template, NAMED_TEMPLATES[i][0])) template = str(NAMED_TEMPLATES[i][1]);
    if (!memchr(template.s, '{', template.n))
        return fail(e, "the chat template '%.*s' is no program, nor the name of a known one; "
                    "--template FILE reads one", (int)smaller(template.n, 40), template.s);
    bool shows[2] = {false, false};   // with a text, with parts
    size_t size = template.n;
    for (size_t i = 0; i < n_messages; i++)
        size += messages[i].role.n + messages[i].content.n + 100;
    Template t = {.e = e, .steps = 5000000 + 200 * size};
    t.size = t.memory = (16 << 20) + 400 * size;
    t.block = malloc(2 * t.size);   // the second half is the shadow
    *out = (Rendered){0};
    if (!t.block) return fail(e, "out of memory");
    locale_t c = newlocale(LC_ALL_MASK, "C", 0), own = uselocale(c);   // 1.5 has no comma here
    for (int parts = 0; parts < 2 && !shows[0]; parts++) {
        Template trial = t;   // it uses the same block, which is then overwritten
        shows[parts] = template_run(&trial, template, &said, 1, bos, eos, think, parts, out) &&
                       memchr(out->mark, FOREIGN, out->n);
    }
    *out = (Rendered){0};
    bool ok = template_run(&t, template, messages, n_messages, bos, eos, think, shows[1], out);
    if (c) freelocale(uselocale(own));
    if (!ok) free(t.block);
    return ok;
}

// ==== Part V: speed =============================================================================
//
// Nearly all time goes into matrix products. One token or a few (decode) read every weight and use
// it once or a few times: memory sets the speed, if the decoding of weights keeps up. A chunk
// (prefill) uses each weight n times, so panels of weights are decoded once, stay in the cache and
// meet all tokens. Weights of block formats meet activations rounded to int8, because one
// instruction multiplies up to 64 bytes, and float weights meet floats. (In prefill AMX takes sums
// of bf16 for both, and a CPU without dot_bytes floats.) The number of threads never changes a sum.
// Other parts call this one through Part I's prototypes, above all matmul and attention.
//
//   26 the machine: CPUs, clock, sums    27 threads, and LLM_PLAIN's loops in place of 28 to 37
//   28 instructions in which CPUs differ 29 products of a few tokens
//   30 tiles, with an example            31 the float tile, 32 the int8 tile, 33 matmul
//   34 attention                         35 of many queries, 36 of a few; recurrent mixers' memory
//   37 AMX, 38 the GPU                   39 candidates of the sampler, 40 guesses
// Read 27, 30 and 33 first, then 34 and 36; 28, 29, 31, 32 and 35 are their inner loops.
//
// A group is 32 consecutive weights or activations, and half a group 16. A strip is some rows of a
// matrix, a batch some of the tokens that meet it, and a block of the cache some of its rows.

#include <pthread.h>
#include <stdatomic.h>

// ---- 26. the machine ----

// Returns the number of CPUs, at most n, that a container allows: the process's group, or one
// around it, may have a quota of time in each period. Only tests have a root other than "".
static UNUSED int within_quota(const char *root, int n) {
    static const char *const files[] = {"cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"};
    char group[PATH_MAX], path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *list = fopen(path, "r");
    while (list && fscanf(list, "%*d:%4095[^\n]", group) == 1) {   // :/a/b; v1: cpu,cpuacct:/a/b
        char *end = strchr(group, ':');
        if (!end) continue;
        *end = '/';
        for (end = strchr(end, 0); end; end = strrchr(group, '/')) {   // and each group around it
            double quota = 0, period = 0;   // no quota is "max", in v1 -1
            *end = 0;
            for (size_t i = 0; i < COUNT(files); i++) {
                snprintf(path, sizeof path, "%s/sys/fs/cgroup/%s/%s", root, group, files[i]);
                FILE *f = fopen(path, "r");
                if (!f) continue;
                (void)!fscanf(f, "%lf %lf", i < 2 ? &quota : &period, &period);   // one or both
                fclose(f);
            }
            if (quota > 0 && quota < n * period) n = ceil(quota / period);
        }
    }
    if (list) fclose(list);
    return n;
}

#ifdef __APPLE__
#include <sys/resource.h>
#include <sys/sysctl.h>
static int count_cpus(void) {   // the performance cores; all, where there is only one kind
    int n = 1;
    size_t size = sizeof n;
    if (sysctlbyname("hw.perflevel0.physicalcpu", &n, &size, NULL, 0))
        sysctlbyname("hw.physicalcpu", &n, &size, NULL, 0);
    return n;
}
static UNUSED double peak_mb(void) {   // most megabytes of memory at once
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) ? 0 : usage.ru_maxrss / 1048576.0;
}
#else
#include <sched.h>
static int count_cpus(void) {
    cpu_set_t set;
    return within_quota("", sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set));
}
static UNUSED double peak_mb(void) {   // getrusage would count what ran here before exec, too
    char line[256];
    double kb = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f) && sscanf(line, "VmHWM: %lf", &kb) != 1) {}
    if (f) fclose(f);
    return kb / 1024;
}
#endif

static double now(void) {   // seconds since some moment
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Writes text over the terminal's current line; "" wipes the line. Text is cut to a column less
// than the terminal has, or 79 bytes, because spaces cannot wipe a line that has wrapped.
static UNUSED void show_progress(const char *text) {
    struct winsize size = {0};
    ioctl(STDERR_FILENO, TIOCGWINSZ, &size);
    int width = size.ws_col && size.ws_col < 80 ? size.ws_col - 1 : 79;
    fprintf(stderr, "\r%*s\r%.*s", width, "", width, text);
}

// A float as large as ROUNDER, 1.5 * 2^23, has no bits for a fraction. If |x| < 2^22, x + ROUNDER
// is ROUNDER plus x rounded to an integer, and its bits are ROUNDER_BITS plus that integer.
static const float ROUNDER = 12582912.0f;
enum { ROUNDER_BITS = 0x4b400000 };

// Returns e^x; 0 below -87.7, infinite above 88.4. It is 2^i * e^r with i = x / ln 2 rounded, and
// |r| <= 0.35, by Taylor's series. No call and no branch: loops over it become vector code.
static inline float exp_fast(float x) {
    x = x < -88 ? -88 : x;
    x = x > 89 ? 89 : x;
    float y = x * 1.44269504f + ROUNDER;
    int32_t bits;
    memcpy(&bits, &y, sizeof bits);
    bits -= ROUNDER_BITS;
    float i = bits;   // y - ROUNDER would be wrong on a CPU that computes with 80 bits
    float r = x - i * 0.693145752f - i * 1.42860677e-6f;   // ln 2: i times the first is exact
    float p = 1 + r * (1 + r * (0.5f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f +
              r * (1 / 720.0f + r * (1 / 5040.0f)))))));
    bits = (int32_t)((uint32_t)(bits + 127) << 23);   // 2^i as a float's exponent
    memcpy(&y, &bits, sizeof y);
    return p * y;
}

// the sum of x - mean, or of its square, in 16 lanes that become vectors
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

// Weights are prefetched. L1 can have some 16 requests of 64 bytes in flight, 10 GB/s at 100 ns
// each, L2 48. So L2 fetches from memory far ahead of the reader, and L1 from L2 shortly before.
#if defined(__AMX_TILE__) || defined(__AMXTILE__)   // gcc, clang
enum { L1_AHEAD = 2048, L2_AHEAD = 8192 };   // bytes; these are the fastest on a Xeon
#else
enum { L1_AHEAD = 512, L2_AHEAD = 8192 };    // these on a Zen 4
#endif
INLINE void prefetch_l1(const void *p, int bytes) {   // harmless on unmapped addresses
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i);
}
INLINE void prefetch_l2(const void *p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}
INLINE void prefetch_ahead(const void *p, int bytes) {
    prefetch_l1((const char *)p + L1_AHEAD, bytes);
    prefetch_l2((const char *)p + L2_AHEAD, bytes);
}

// ---- 27. threads ----
//
// parallel shares n tasks between the caller and the pool's workers. `left` starts at n. A thread
// claims k tasks by subtracting k: if `left` was i > 0, it runs tasks n - i .. n - i + k - 1 (up to
// n - 1); if `left` was 0 or less, nothing is left to claim. A thread claims many tasks while many
// are left, because all other cores fetch the counter anew after each claim, which takes 100 ns.
// `running` counts the tasks that are not finished. parallel returns when it is 0. Only then can
// the next call overwrite fn and task, so a thread that has claimed a task reads its own call's. A
// worker that wakes up late claims nothing and writes nothing, so nobody waits for it. A thread
// that waits spins for 200 us before it sleeps, because waking it takes long.

// parallel calls fn once for each task i = 0 .. n-1, in any order, on several threads, and waits
// for all. ctx is what they work on; `thread` picks a buffer that no other running task has.
typedef struct { void *ctx; int i, thread; } Task;
typedef void TaskFn(Task t);

enum { LINE_PAIR = 128 };        // bytes: numbers so far apart never share a cache line
struct Pool {
    int threads;
    bool amx;                    // AMX's tile registers are ours to use
    pthread_mutex_t lock;
    pthread_cond_t wake;
    TaskFn *fn;                  // of this call of parallel
    Task task;                   // its ctx; i is the number of tasks
    char before_left[LINE_PAIR];
    atomic_int left;             // tasks that nobody has claimed; may fall below 0
    char before_running[LINE_PAIR];
    atomic_int running;          // tasks that are not finished
    char behind[LINE_PAIR];
    atomic_int sleeping;         // threads that sleep
    atomic_int ids;              // workers that have a number
    atomic_bool quit;
    pthread_t thread[];          // [threads - 1]
};

// A process must ask Linux for AMX's registers (amx_allow). They are set up before a thread's tasks
// and released after them (amx_use), because they slow down context switches.
#if defined(SIMD_VNNI) && defined(__AVX512BF16__) && defined(__linux__) && \
    (defined(__AMX_BF16__) || defined(__AMXBF16__))   // gcc, clang
#define SIMD_AMX
static bool amx_allow(void);
static void amx_use(bool on);
#else
static bool amx_allow(void) { return false; }
static void amx_use(UNUSED bool on) {}
#endif

// A denormal number costs 100 cycles and is nearly 0, so workers, and the caller during a call,
// flush it to 0. cpu_pause, in a loop that waits, leaves more of a core to the core's other thread.
#if defined(__SSE2__)
#include <immintrin.h>
static uint64_t fp_mode(void) { return _mm_getcsr(); }
static void fp_set(uint64_t mode) { _mm_setcsr(mode); }
enum { FP_FLUSH = 0x8040 };
static void cpu_pause(void) { _mm_pause(); }
#elif defined(__aarch64__)
static uint64_t fp_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void fp_set(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
enum { FP_FLUSH = 1 << 24 };
static void cpu_pause(void) { __asm__ volatile("yield"); }
#else
static uint64_t fp_mode(void) { return 0; }
static void fp_set(UNUSED uint64_t mode) {}
enum { FP_FLUSH = 0 };
static void cpu_pause(void) {}
#endif

static void pool_wake(Pool *p) {
    if (!atomic_load(&p->sleeping)) return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

// Claims tasks and runs them until none is left. `thread` is 0 for the caller of parallel.
static void pool_work(Pool *p, int thread) {
    int left, done = 0;
    if (p->amx) amx_use(true);
    while ((left = atomic_load(&p->left)) > 0) {
        int claim = 1 + left / (4 * p->threads);
        left = atomic_fetch_sub(&p->left, claim);
        for (int i = left; i > 0 && i > left - claim; i--, done++)
            p->fn((Task){p->task.ctx, p->task.i - i, thread});
    }
    if (p->amx) amx_use(false);
    if (done && atomic_fetch_sub(&p->running, done) == done) pool_wake(p);
}

// The caller waits until the last task is finished, a worker until there is a task to claim.
static bool pool_ready(Pool *p, bool caller) {
    if (caller) return !atomic_load(&p->running);
    return atomic_load(&p->left) > 0 || atomic_load(&p->quit);
}

static void pool_wait(Pool *p, bool caller) {
    double until = now() + 200e-6;
    while (!pool_ready(p, caller) && now() < until) cpu_pause();
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
    if (!p) return;
    atomic_store(&p->quit, true);
    pool_wake(p);
    for (int i = 0; i < p->threads - 1; i++) pthread_join(p->thread[i], NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->wake);
    free(p);
}

static Pool *pool_open(int threads) {
    static const int faults[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTRAP, SIGSYS};
    Pool *p = calloc(1, sizeof *p + (threads - 1) * sizeof *p->thread);
    if (!p) return NULL;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    sigset_t host, blocked;   // signals are for the host's threads, except a thread's own faults
    sigfillset(&blocked);
    for (size_t i = 0; i < COUNT(faults); i++) sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &host);   // threads inherit it
    p->amx = amx_allow();   // before there are threads, which inherit the permission
    for (p->threads = 1; p->threads < threads; p->threads++)
        if (pthread_create(&p->thread[p->threads - 1], NULL, pool_thread, p)) break;
    pthread_sigmask(SIG_SETMASK, &host, NULL);
    if (p->threads == threads) return p;
    pool_close(p);
    return NULL;
}

static void parallel(Pool *p, TaskFn *fn, void *ctx, int n) {
    uint64_t mode = fp_mode();
    fp_set(mode | FP_FLUSH);
    if (p->threads == 1 || n <= 1) {   // not worth waking anyone
        if (p->amx) amx_use(true);
        for (int i = 0; i < n; i++) fn((Task){ctx, i, 0});
        if (p->amx) amx_use(false);
    } else {
        p->fn = fn;
        p->task = (Task){ctx, n, 0};
        atomic_store(&p->running, n);
        atomic_store(&p->left, n);   // from here on tasks can be claimed
        pool_wake(p);
        pool_work(p, 0);
        pool_wait(p, true);
    }
    fp_set(mode);
}

typedef struct { Session *s; RowFn *fn; const void *arg; } RowTask;
static void run_row(Task t) {
    const RowTask *r = t.ctx;
    r->fn(r->s, r->arg, t.i);
}

// in forward's dry run (see count_op_scratch) there are no buffers, and rows do nothing
static void each_row(Session *s, RowFn *fn, const void *arg, int n) {
    if (s->op_scratch.base) parallel(s->pool, run_row, &(RowTask){s, fn, arg}, n);
}

static UNUSED void plain_attention(const Attention *a, float *score) {
    for (int i = 0; i < a->n; i++)
        for (int h = 0; h < a->n_head; h++) plain_head(a, i, h, score);
}

#ifdef LLM_PLAIN
// Part I's plain loops do the work of sections 28 to 37, slowly
static void matmul(UNUSED Pool *p, Arena *a, const Matmul *jobs, int k) {
    for (int j = 0; j < k; j++) {
        size_t mark = a->used;
        float *row = arena_take(a, jobs[j].w->cols, sizeof *row);
        if (a->base) plain_matmul(&jobs[j], row);
        a->used = mark;
    }
}

static void attention(UNUSED Pool *p, Arena *a, const Attention *x) {
    size_t mark = a->used;
    float *score = arena_take(a, x->rows, sizeof *score);
    if (a->base) plain_attention(x, score);
    a->used = mark;
}

static void narrow(const float *x, int n, uint16_t *to) {
    for (int i = 0; i < n; i++) to[i] = quant_f32_to_f16(x[i]);
}

static void memory_strip(Session *s, const Layer *w, Strip a) { plain_memory(s, w, a); }
#else   // LLM_PLAIN leaves out sections 28 to 37, some 1,600 lines

// ---- 28. instructions ----
//
// The loops of Part V are plain C on vectors as wide as the CPU's: vf has LANES floats, vi as many
// int32, vub four bytes in each lane. `a + b * c` is one or two instructions for 4, 8 or 16
// numbers. Few functions need intrinsics, of AVX-512 VNNI, AVX2 with or without VNNI, NEON with or
// without products of bytes; other CPUs get plain C. INT8_TILE: products of bytes are faster than
// products of floats for many tokens, too.
//   dot_bytes   adds four products of bytes, w[0..3] * x[0..3], to each lane. VNNI takes w as
//               unsigned, so CODE_BIAS is added to signed codes. AVX2's vpmaddubsw adds pairs of
//               unsigned times signed bytes in 16 bits, so it gets |w| and x with the sign of w:
//               the product is the same, and a pair, at most 2 * 128 * 127, fits
//   dot_pairs   does the same for small unsigned codes if PAIRS is set: a run of products, from
//               `begins` to `ends`, is added in 16 bits and widened once
//   dot_scaled  scales a dot product that began at ROUNDER_BITS. ROUNDER times the scale of any
//               format is exact, so one multiply-add takes it off and rounds once
//   evens, odds give both lanes of a pair its first or its second number
//   pair_sums   returns the sums of a's pairs, then of b's

#define UNROLL QUANT_UNROLL
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed"   // where a count is not constant it stays a loop
#endif
// The sizes of tiles depend on the number of vector registers and are explained with the tiles.
#if defined(QUANT_AVX512) && defined(__AVX512VNNI__)
#define SIMD_VNNI
enum { LANES = 16, PANELS = 2, PACKED_TOKENS = 8, FLOAT_TOKENS = 8, INT8_TOKENS = 6 };
#elif defined(QUANT_X86) && defined(__FMA__)
#define SIMD_AVX2
enum { LANES = 8, PANELS = 1, PACKED_TOKENS = 5, FLOAT_TOKENS = 4, INT8_TOKENS = 3 };
#else
enum { LANES = 4, PANELS = 1, PACKED_TOKENS = 4, FLOAT_TOKENS = 4, INT8_TOKENS = 4 };
#endif
typedef float vf __attribute__((vector_size(4 * LANES)));

INLINE vf load_f32(const void *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(void *p, vf v) { memcpy(p, &v, sizeof v); }

typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint8_t vub __attribute__((vector_size(4 * LANES)));
INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }   // a / b, rounded up
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
enum { CODE_BIAS = 128, PAIRS = 0, INT8_TILE = 1 };
INLINE vf load_f16(const void *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE void store_f16(void *p, vf v) { _mm256_storeu_si256(p, _mm512_cvtps_ph((__m512)v, 0)); }
INLINE vf dot_scaled(vi dot, vf scale) {
    return (vf)_mm512_fmadd_ps((__m512)dot, (__m512)scale, (__m512)(scale * -ROUNDER));
}
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
#elif defined(SIMD_AVX2)
INLINE vf load_f16(const void *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE void store_f16(void *p, vf v) { _mm_storeu_si128(p, _mm256_cvtps_ph((__m256)v, 0)); }
INLINE vf dot_scaled(vi dot, vf scale) {
    return (vf)_mm256_fmadd_ps((__m256)dot, (__m256)scale, (__m256)(scale * -ROUNDER));
}
#ifdef __AVXVNNI__
enum { CODE_BIAS = 128, PAIRS = 0, INT8_TILE = 1 };
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
#else
enum { CODE_BIAS = 0, PAIRS = 1, INT8_TILE = 1 };
INLINE vi dot_pairs(vi sum, vi *pairs, vi w, vi x, bool begins, bool ends) {
    __m256i more = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
    *pairs = (vi)(begins ? more : _mm256_add_epi16((__m256i)*pairs, more));
    __asm__("" : "+x"(*pairs));   // or gcc reorders the sums and keeps them in memory
    if (ends) sum += (vi)_mm256_madd_epi16((__m256i)*pairs, _mm256_set1_epi16(1));
    return sum;
}
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    vi pairs, size = (vi)_mm256_abs_epi8((__m256i)w);
    vi signed_x = (vi)_mm256_sign_epi8((__m256i)x, (__m256i)w);
    return dot_pairs(sum, &pairs, size, signed_x, true, true);
}
#endif
INLINE vf pair_sums(vf a, vf b) {
    __m256d sums = (__m256d)_mm256_hadd_ps((__m256)a, (__m256)b);   // in halves: a b a b
    return (vf)_mm256_permute4x64_pd(sums, 0xd8);
}
INLINE vf evens(vf v) { return (vf)_mm256_moveldup_ps((__m256)v); }
INLINE vf odds(vf v) { return (vf)_mm256_movehdup_ps((__m256)v); }
#else
INLINE vf dot_scaled(vi dot, vf scale) { return ((vf)dot - ROUNDER) * scale; }
INLINE vf pair_sums(vf a, vf b) { return (vf){a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]}; }
INLINE vf evens(vf v) { return (vf){v[0], v[0], v[2], v[2]}; }
INLINE vf odds(vf v) { return (vf){v[1], v[1], v[3], v[3]}; }
#if defined(QUANT_NEON)
INLINE vf load_f16(const void *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
INLINE void store_f16(void *p, vf v) {
    vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)v)));
}
#else
INLINE vf load_f16(const void *p) {
    vf v = {0};
    for (int i = 0; i < LANES; i++) v[i] = quant_half((const uint8_t *)p + 2 * i);
    return v;
}
INLINE void store_f16(void *p, vf v) {
    for (int i = 0; i < LANES; i++) ((uint16_t *)p)[i] = quant_f32_to_f16(v[i]);
}
#endif
#if defined(QUANT_NEON) && defined(__ARM_FEATURE_DOTPROD)
enum { CODE_BIAS = 0, PAIRS = 0, INT8_TILE = 1 };
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
}
#elif defined(QUANT_NEON)
enum { CODE_BIAS = 0, PAIRS = 0, INT8_TILE = 0 };
INLINE vi dot_bytes(vi sum, vi w, vi x) {
    int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
    int16x8_t lo = vmull_s8(vget_low_s8(a), vget_low_s8(b)), hi = vmull_high_s8(a, b);
    return sum + (vi)vpaddq_s32(vpaddlq_s16(lo), vpaddlq_s16(hi));
}
#elif defined(__SSE2__)
#include <emmintrin.h>
enum { CODE_BIAS = 0, PAIRS = 0, INT8_TILE = 0 };
INLINE vi dot_bytes(vi sum, vi w, vi x) {   // bytes as words: numbers 0 and 2, then 1 and 3
    __m128i a = (__m128i)w, b = (__m128i)x, even = _mm_slli_epi16(b, 8);
    even = _mm_madd_epi16(_mm_srai_epi16(_mm_slli_epi16(a, 8), 8), _mm_srai_epi16(even, 8));
    return sum + (vi)even + (vi)_mm_madd_epi16(_mm_srai_epi16(a, 8), _mm_srai_epi16(b, 8));
}
#else
enum { CODE_BIAS = 0, PAIRS = 0, INT8_TILE = 0 };
static vi dot_bytes(vi sum, vi w, vi x) {   // not inlined, because gcc would take minutes
    UNROLL for (int left = 24; left >= 0; left -= 8)   // >> 24 leaves a byte with its sign
        sum += (w << left >> 24) * (x << left >> 24);
    return sum;
}
#endif
#endif
#if !defined(SIMD_AVX2) || defined(__AVXVNNI__)
INLINE vi dot_pairs(vi sum, UNUSED vi *pairs, vi w, vi x, UNUSED bool begins, UNUSED bool ends) {
    return dot_bytes(sum, w, x);
}
#endif
INLINE vf sum_each(vf v[LANES]) {   // lane i: the sum of v[i]'s lanes; v is overwritten
    UNROLL for (int left = LANES / 2; left; left /= 2)
        UNROLL for (int i = 0; i < left; i++) v[i] = pair_sums(v[2 * i], v[2 * i + 1]);
    return v[0];
}

static void narrow(const float *x, int n, uint16_t *to) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store_f16(to + i, load_f32(x + i));
    for (; i < n; i++) to[i] = quant_f32_to_f16(x[i]);
}

// ---- 29. products of a few tokens ----
//
// First the activations are packed, those for block formats rounded to int8 (token_pack). Then the
// matvec function of the weights' format, which matmul finds in `formats`, adds the products of 256
// weights at a time (dot256), or of FLOAT_STEP floats (dot_floats). Up to FEW tokens meet the same
// decoded weights. Each token has sums of its own, added in the same order as if it were alone, so
// its numbers do not depend on other tokens.

// Rounds 32 floats to int8 codes q = x / d and returns d, rounded to f16 as in ggml. `sum` gets the
// sums of the first 16 codes, of the other 16 and of all. Positive floats have the order of their
// bits, and adding ROUNDER leaves the nearest integer in the low bits, so these are loops of
// integers, which become vector code. lo and hi are unsigned because a NaN's bits overflow.
static float round_32(const float *x, int8_t *q, int32_t sum[3]) {
    int32_t bits[32], top = 0;
    float most, y[32];
    for (int i = 0; i < 32; i++) {
        int32_t size = quant_u32((const uint8_t *)(x + i)) & 0x7fffffff;
        top = size > top ? size : top;
    }
    memcpy(&most, &top, sizeof most);
    float inverse = most > 0 ? 127 / most : 0;
    for (int i = 0; i < 32; i++) y[i] = x[i] * inverse + ROUNDER;
    memcpy(bits, y, sizeof bits);
    for (int i = 0; i < 32; i++) q[i] = (int8_t)bits[i];
    uint32_t lo = 0, hi = 0;
    for (int i = 0; i < 16; i++) lo += (uint32_t)bits[i] - ROUNDER_BITS;
    for (int i = 16; i < 32; i++) hi += (uint32_t)bits[i] - ROUNDER_BITS;
    sum[0] = lo;
    sum[1] = hi;
    sum[2] = lo + hi;
    return quant_f16_to_f32(quant_f32_to_f16(most / 127));
}

// 256 activations of one token, in 8 groups of 32. q[k][g][j] is the code of number 8 k + j of
// group g, because decoders put the codes of weights in that order. d[2 g + half] is the scale of
// half a group, and s[2 g + half] is that scale times the sum of the half's 16 codes.
typedef struct { int8_t q[4][8][8]; float d[16], s[16]; } TokenActs;

static void token_pack(UNUSED const Matrix *w, const float *x, int n, UNUSED int t, void *acts) {
    TokenActs *a = acts;
    if (n < 256) memset(a, 0, sizeof *a);
    for (int g = 0; g < n / 32; g++) {
        int8_t q[32];
        int32_t sum[3];
        float d = round_32(x + 32 * g, q, sum);
        UNROLL for (int j = 0; j < 4; j++) memcpy(a->q[j][g], q + 8 * j, 8);
        for (int half = 0; half < 2; half++) {
            a->d[2 * g + half] = d;
            a->s[2 * g + half] = d * sum[half];
        }
    }
}

// copies floats, with zeros behind up to 256
static void token_floats(UNUSED const Matrix *w, const float *x, int n, UNUSED int t, void *acts) {
    memset((float *)acts + n, 0, (256 - n) * sizeof *x);
    memcpy(acts, x, n * sizeof *x);
}

// decodes 256 weights d q + m, in TokenActs' order, to q[256], d[16], m[16]; nothing aliases b
#define DECODE_ARGS const uint8_t *restrict b, int8_t *q, float *d, float *m
typedef void DecodeFn(DECODE_ARGS);
typedef vf LoadFn(const void *);   // LANES float weights
// computes rows r .. end-1 of out, without the matrix's scale and bias, for the job's n <= FEW
// tokens; x is [n][cols/256] as token_pack packs it for block formats, else as token_floats does
#define MATVEC_ARGS const Matmul *job, const void *x, int64_t r, int64_t end
typedef void MatvecFn(MATVEC_ARGS);

typedef struct {
    MatvecFn *matvec;
    int bytes;                 // of 256 weights
    bool block;                // not floats
    bool per16, offsets;       // d and m per 16 weights, not per 32; m is not always 0
    int bias;                  // code + bias is never negative; 0 if there are offsets
    int pairs_top;             // largest code, if dot_pairs may add its products; 0: dot_bytes
} Format;

static const Format formats[64];   // by type

// where weight k of row r is; for a row past the end, that of the last row
static const uint8_t *weight_at(const Matrix *w, int64_t r, int64_t k) {
    return w->data + (smaller(r, w->rows - 1) * w->cols + k) * formats[w->type].bytes / 256;
}

// Adds the products of 256 weights, decoded from b, and of each token's activations acts[t][at] to
// the lanes of sums[t][0]. In the order of TokenActs, lanes 2 g and 2 g + 1 of each q[k] hold
// numbers 8 k .. 8 k + 7 of group g, four in each lane. So a lane meets one group only: its
// products for k = 0..3 are added as integers, then converted and scaled once; with a scale per 16
// weights (per16) twice, for k = 0, 1 with the scale of the group's first half, for k = 2, 3 with
// that of its second.
//
// A format with offsets has weights d q + m, and sums[t][1] collects m times the known sums of
// activations. A format with a bias has no offsets. If products take unsigned codes, the bias is
// added to them, sums[t][1] collects d times the sums, and row_lanes subtracts bias times that.
INLINE void dot256(DecodeFn *decode, const Format *f, const uint8_t *b, int tokens,
                   const void *const *acts, size_t at, vf sums[][4]) {
    int8_t q[256] __attribute__((aligned(64)));
    float d[16] __attribute__((aligned(64))), m[16] __attribute__((aligned(64)));
    bool as_signed = f->bias && !CODE_BIAS && !f->pairs_top;
    uint8_t bias = as_signed ? 0 : f->bias;
    int run = f->per16 || f->pairs_top > 32 ? 2 : 4;   // products of k and k + 1, or of all k
    decode(b, q, d, m);
    UNROLL for (int i = 0; i < 16; i += LANES) {
        vf scale = load_f32(d + i), offset = load_f32((f->bias ? d : m) + i);
        UNROLL for (int t = 0; t < tokens; t++) {
            const TokenActs *x = (const TokenActs *)acts[t] + at;
            vf scales = scale * load_f32(x->d + i), *sum = sums[t];
            vi pairs, dot[2] = {{0}};   // of the groups' first and second halves; or [0] of all
            if (!as_signed) sum[1] += offset * load_f32(x->s + i);
            UNROLL for (int k = 0; k < 4; k++) {
                vi w = (vi)((vub)load_i32(q + 64 * k + 4 * i) + bias);
                vi y = load_i32(x->q[k][i / 2]), *to = &dot[f->per16 ? k / 2 : 0];
                bool begins = k % run == 0, ends = k % run == run - 1;
                if (f->pairs_top) *to = dot_pairs(*to, &pairs, w, y, begins, ends);
                else *to = dot_bytes(*to, w, y);
            }
            vf even = f->per16 ? evens(scales) : scales;
            sum[0] += __builtin_convertvector(dot[0], vf) * even;
            if (f->per16) sum[0] += __builtin_convertvector(dot[1], vf) * odds(scales);
        }
    }
}

// Adds the products of FLOAT_STEP weights at b and each token's activations to the lanes of
// sums[t]. A token has four sums, because an addition takes four cycles, and additions to one sum
// wait for one another.
enum { FLOAT_STEP = 8 * LANES };
INLINE void dot_floats(LoadFn *load, int size, const uint8_t *b, int tokens,
                       const void *const *acts, size_t at, vf sums[][4]) {
    vf weights[8];
    UNROLL for (int j = 0; j < 8; j++) weights[j] = load(b + j * LANES * size);
    UNROLL for (int t = 0; t < tokens; t++) {
        const float *x = (const float *)acts[t] + at * FLOAT_STEP;
        UNROLL for (int j = 0; j < 8; j++) sums[t][j % 4] += weights[j] * load_f32(x + j * LANES);
    }
}

// Writes the sums of the lanes of sums [n][LANES], LANES rows at once because that costs as much as
// 256 weights. Tokens of out lie `step` floats apart. Inlined, it would take long to compile.
static __attribute__((noinline)) void put_sums(vf sums[][LANES], int n, int rows, float *out,
                                               size_t step) {
    for (int t = 0; t < n; t++, out += step) {
        vf sum = sum_each(sums[t]);
        memcpy(out, &sum, rows * sizeof *out);
    }
}

// joins the sums of a row with one token, as dot256 or dot_floats left them; lanes stay apart
INLINE vf row_lanes(const Format *f, const vf sum[4]) {
    if (f->block) return sum[0] + sum[1] * (f->bias ? -(float)f->bias : 1);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// One row at a time, or two (`together`), meets the activations of `tokens` tokens. If these are
// more than job->n, the last one repeats. Both numbers are constants, so sums stay in registers.
INLINE void rows_matvec(DecodeFn *decode, LoadFn *load, const Format *f, int together, int tokens,
                        MATVEC_ARGS) {
    int step = f->block ? 256 : FLOAT_STEP, bytes = f->bytes * step / 256, n = job->n;
    int64_t cols = job->w->cols, row = cols * f->bytes / 256, steps = (cols + step - 1) / step;
    int64_t whole = cols / step, rest = row - whole * bytes;
    size_t act_bytes = (cols + 255) / 256 * (f->block ? sizeof(TokenActs) : 256 * sizeof(float));
    const uint8_t *b = weight_at(job->w, r, 0);
    const void *acts[FEW];
    vf sums[FEW][LANES];
    uint8_t last[2][512];   // the weights that end a row, with zeros behind
    if (rest) memset(last, 0, sizeof last);
    for (int t = 0; t < tokens; t++) acts[t] = (const char *)x + smaller(t, n - 1) * act_bytes;
    for (; r < end; r += LANES) {
        int rows = smaller(end - r, LANES);
        if (rows < LANES) memset(sums, 0, sizeof sums);   // put_sums reads all
        for (int i = 0; i < rows; i += together, b += together * row) {
            const uint8_t *from[2] = {b, i + 1 < rows ? b + row : b};   // an odd last row repeats
            vf sum[2][FEW][4] = {{{{0}}}};
            if (rest) UNROLL for (int j = 0; j < together; j++)
                memcpy(last[j], from[j] + whole * bytes, rest);
            for (int64_t k = 0; k < steps; k++)
                UNROLL for (int j = 0; j < together; j++) {
                    if (k == whole) from[j] = last[j];
                    prefetch_ahead(from[j], bytes);
                    if (f->block) dot256(decode, f, from[j], tokens, acts, k, sum[j]);
                    else dot_floats(load, f->bytes / 256, from[j], tokens, acts, k, sum[j]);
                    from[j] += bytes;
                }
            UNROLL for (int j = 0; j < together; j++)
                UNROLL for (int t = 0; t < tokens; t++)
                    sums[t][i + j] = row_lanes(f, sum[j][t]);
        }
        put_sums(sums, n, rows, job->out + r, output_step(job->w));
    }
}

INLINE void few_matvec(DecodeFn *decode, LoadFn *load, int type, MATVEC_ARGS) {
    const Format *f = &formats[type];
    // with four lanes two rows share the loads of x, where decoding leaves registers free (q4_0)
    int together = LANES == 4 && (!f->block || f->bias == 8) ? 2 : 1;
    if (job->n == 1) rows_matvec(decode, load, f, together, 1, job, x, r, end);
    else if (job->n == 2) rows_matvec(decode, load, f, 1, 2, job, x, r, end);
    else if (job->n <= 4) rows_matvec(decode, load, f, 1, 4, job, x, r, end);
    else rows_matvec(decode, load, f, 1, FEW, job, x, r, end);
}

// Each format has a function of its own, in which its decoder or load and its Format are constants.
#define QUANT_X(id, name, weights, bytes, per16, bias)                                             \
    INLINE void unpack_##name(DECODE_ARGS) { decode_##name((const void *)b, 0, 8, q, d, m); }      \
    static void matvec_##name(MATVEC_ARGS) {                                                       \
        few_matvec(unpack_##name, NULL, id, job, x, r, end);                                       \
    }
QUANT_TYPES(QUANT_X)
#undef QUANT_X
static void matvec_f32(MATVEC_ARGS) { few_matvec(NULL, load_f32, QUANT_F32, job, x, r, end); }
static void matvec_f16(MATVEC_ARGS) { few_matvec(NULL, load_f16, QUANT_F16, job, x, r, end); }
static void matvec_bf16(MATVEC_ARGS) { few_matvec(NULL, load_bf16, QUANT_BF16, job, x, r, end); }

// A pair is at most 254 times the largest code. That is at most twice the bias, or, without a bias,
// below 2^bits of a weight in the file. 16 bits hold 8 * 254 * 16, 4 * 254 * 32 and 2 * 254 * 64.
#define TOP_CODE(bias, bits) (bias ? 2 * bias : 1 << (bits))
#define PAIRS_TOP(top) (PAIRS && (top) <= 64 ? (top) : 0)

static const Format formats[64] = {
    [QUANT_F32] = {.matvec = matvec_f32, .bytes = 1024},
    [QUANT_F16] = {.matvec = matvec_f16, .bytes = 512},
    [QUANT_BF16] = {.matvec = matvec_bf16, .bytes = 512},
#define QUANT_X(id, name, weights, bytes, per16, bias)                                             \
    [id] = {matvec_##name, 256 / weights * bytes, true, per16, !bias, bias,                        \
            PAIRS_TOP(TOP_CODE(bias, bytes * 8 / weights))},
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
};

// ---- 30. tiles: products of many tokens ----
//
// out [n][rows] is computed in tiles of some tokens times 16 or 32 rows, whose sums stay in
// registers. Rows lie across the lanes and activations are broadcast, so no lanes are added up. A
// task has a strip of rows. It decodes `depth` weights of each row to panels, which stay in L2
// while it multiplies them with all tokens of the chunk, batch by batch, and a batch's activations
// stay in L1 meanwhile. Then it takes the next `depth` weights and adds their products to out.
//
// An example: 40 tokens, 96 rows and 2,048 columns of q4_K, with AVX-512 and two threads. First 7
// batches of 6 tokens (the last batch has 4, and 2 copies) times 2 steps of 1,024 columns are 14
// tasks, which call `pack` 6 * 4 times each. Then 3 strips of 32 rows are 3 tasks. For weights
// 0..1023, then 1024..2047, each task calls `decode` twice, to panels of 16 rows, and for each
// batch `multiply`, for a tile of 32 rows times 6 tokens, 12 sums of 16 floats, and tile_out. Of
// all 42 tiles 21 overwrite their part of out [40][96], and 21 add to it.
//
// A Tile is what differs between CPUs and formats: three functions, which alone know how packed
// activations and panels are laid out. A Product is one tile of products, for `multiply`.

typedef struct {
    const Matmul *job;
    int64_t r, k;                  // first row; first weight
    int t, depth;                  // first token; number of weights
    const void *acts;              // activations k.. of tokens t.., packed
    const void *panel;             // weights k.. of rows r.., in PANELS panels
} Product;

typedef struct {
    int tokens;                    // of a batch, at most MAX_TOKENS; the last batch may have fewer
    int step;                      // columns that a task packs, of a batch; whole 256
    int depth, task_rows;          // weights of a row in a panel; most rows of a task
    size_t act_bytes;              // of 256 activations of a batch, packed
    size_t panel_bytes;            // of `depth` weights of 16 rows
    // packs count <= 256 activations x of number `token` of a batch
    void (*pack)(const Matrix *w, const float *x, int count, int token, void *acts);
    // decodes weights k .. k+depth-1 of rows r .. r+15
    void (*decode)(const Matrix *w, int64_t r, int64_t k, int depth, void *panel);
    void (*multiply)(const Product *p, vf *sum);   // to sum[PANELS][tokens][16]
} Tile;

static const Tile *amx_tile(const Matrix *w);   // for products by w with AMX: section 37

// a panel has TILE rows in VECTORS vectors, a tile of products PANELS panels
enum { TILE = 16, VECTORS = TILE / LANES, MAX_TOKENS = 32 };

// Copies words of 32 bits (a float, four codes or two bf16), `columns` of them from each of 16
// rows, to columns of 16. Rows lie `stride` words apart. AVX-512 rounds `columns` up to whole 4.
#if defined(SIMD_VNNI)
// Four columns at a time. Vector i gets four words of each of rows i, 4+i, 8+i and 12+i, a row's in
// 128 bits. So 128 bits of all four are 4 x 4 words, which two steps of unpacking transpose.
static void transpose(const void *rows, int stride, int columns, void *to) {
    for (int k = 0; k < columns; k += 4) {
        float *column = (float *)to + TILE * k;
        __m512i v[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const float *p = (const float *)rows + stride * i + k;
            v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(p + 4 * stride)), 1);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(p + 8 * stride)), 2);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(p + 12 * stride)), 3);
        }
        __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
        __m512i c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        _mm512_storeu_si512(column, _mm512_unpacklo_epi64(a, b));
        _mm512_storeu_si512(column + TILE, _mm512_unpackhi_epi64(a, b));
        _mm512_storeu_si512(column + 2 * TILE, _mm512_unpacklo_epi64(c, d));
        _mm512_storeu_si512(column + 3 * TILE, _mm512_unpackhi_epi64(c, d));
    }
}
#else
static void transpose(const void *rows, int stride, int columns, void *to) {
    for (int i = 0; i < columns; i++)
        for (int r = 0; r < TILE; r++)
            memcpy((float *)to + TILE * i + r, (const float *)rows + stride * r + i, 4);
}
#endif

// Adds sums [PANELS][tokens][16] to out, as far as the job has such rows and tokens. A row's first
// weights overwrite out, its last ones bring the matrix's scale and bias, too.
static void tile_out(const Product *p, int tokens, const vf *sums) {
    const Matrix *w = p->job->w;
    bool overwrites = p->k == 0, is_last = p->k + p->depth == w->cols;
    float scale = is_last && w->scale ? *w->scale : 1;
    for (int64_t r = p->r; r < smaller(p->r + PANELS * TILE, w->rows); r += TILE) {
        int rows = smaller(w->rows - r, TILE);
        float bias[TILE] = {0}, edge[TILE] = {0};
        if (is_last && w->bias) memcpy(bias, w->bias + r, rows * sizeof *bias);
        const vf *sum = sums + (r - p->r) / LANES * tokens;
        for (int t = p->t; t < smaller(p->t + tokens, p->job->n); t++, sum += VECTORS) {
            float *out = p->job->out + t * output_step(w) + r, *y = rows < TILE ? edge : out;
            if (rows < TILE) memcpy(edge, out, rows * sizeof *edge);
            for (int v = 0; v < VECTORS; v++) {
                vf value = sum[v] + (overwrites ? (vf){0} : load_f32(y + LANES * v));
                store(y + LANES * v, value * scale + load_f32(bias + LANES * v));
            }
            if (rows < TILE) memcpy(out, edge, rows * sizeof *edge);
        }
    }
}

// ---- 31. the float tile ----
//
// The float tile multiplies float weights, and weights of all formats where there is no int8 tile.
// Attention of many queries uses tile_float for both of its products. (AMX needs neither.)

// A tile has as many sums as registers hold beside operands, because a multiply-add takes 4 cycles
// and 2 start in each. Attention's "tokens" are keys of a block, or numbers of a value.
enum { FLOAT_DEPTH = 512, FLOAT_KEYS = 64 };

// out[i][t][16] = sum over k < depth of w[i][k][16] * x[t * next + k * step], for each panel i and
// token t; added to out, if `adds`. Panels of w lie w_size floats apart, those of out out_size.
INLINE void tile_float(const float *w, size_t w_size, const float *x, int tokens, size_t next,
                       size_t step, int depth, bool adds, float *out, size_t out_size) {
    vf sum[PANELS][PACKED_TOKENS][VECTORS] = {{{{0}}}};
    for (int k = 0; k < depth; k++, x += step)
        UNROLL for (int i = 0; i < PANELS; i++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                vf column = load_f32(w + i * w_size + k * TILE + v * LANES);
                UNROLL for (int t = 0; t < tokens; t++) sum[i][t][v] += column * x[t * next];
            }
    UNROLL for (int i = 0; i < PANELS; i++, out += out_size)
        UNROLL for (int j = 0; j < tokens * VECTORS; j++) {
            vf s = sum[i][j / VECTORS][j % VECTORS];
            store(out + j * LANES, adds ? load_f32(out + j * LANES) + s : s);
        }
}

// Packs to [cols][PACKED_TOKENS]: rows a power of two apart would compete for few lines of L1.
static void float_pack(UNUSED const Matrix *w, const float *x, int count, int token, void *acts) {
    for (int j = 0; j < count; j++) ((float *)acts)[j * PACKED_TOKENS + token] = x[j];
}

static void float_decode(const Matrix *w, int64_t r, int64_t k, int depth, void *panel) {
    float rows[TILE][FLOAT_DEPTH] = {{0}};
    for (int j = 0; j < TILE; j++) {
        prefetch_l2(weight_at(w, r + PANELS * TILE + j, k), depth * formats[w->type].bytes / 256);
        quant_dequantize(w->type, weight_at(w, r + j, k), rows[j], depth);
    }
    transpose(rows, FLOAT_DEPTH, depth, panel);
}

static void float_multiply(const Product *p, vf *sum) {
    tile_float(p->panel, FLOAT_DEPTH * TILE, p->acts, PACKED_TOKENS, 1, PACKED_TOKENS, p->depth,
               false, (float *)sum, PACKED_TOKENS * TILE);
}

static const Tile float_tile = {.tokens = PACKED_TOKENS, .step = 1024, .depth = FLOAT_DEPTH,
    .task_rows = 64, .act_bytes = 256 * PACKED_TOKENS * sizeof(float),
    .panel_bytes = FLOAT_DEPTH * TILE * sizeof(float),
    .pack = float_pack, .decode = float_decode, .multiply = float_multiply};

// ---- 32. the int8 tile ----
//
// A dot product starts at the bits of ROUNDER, so that, seen as a float, it is ROUNDER + dot, and
// no integer is converted. For 32 weights of LANES rows and one token, dot_bytes is called 8 times;
// a scale takes 2 instructions, an offset 1. A tile has as many rows and tokens as registers hold,
// with two sums for each vector; on x86 two vectors of rows share loads of activations.

enum { INT8_DEPTH = 1024 };

// the four codes at x, in each lane
INLINE vi four_codes(const int8_t *x) { return (vi){0} + (int32_t)quant_u32((const uint8_t *)x); }

// dot[t] += the products of w, four weights in a lane, with four activations of token t of a batch
#if defined(QUANT_NEON) && defined(__ARM_FEATURE_DOTPROD)
INLINE void dot_tokens(vi dot[], vi w, const int8_t (*x)[4]) {   // one load for four tokens
    int8x16_t codes = (int8x16_t)w, four = vld1q_s8(x[0]);
    dot[0] = (vi)vdotq_laneq_s32((int32x4_t)dot[0], codes, four, 0);
    dot[1] = (vi)vdotq_laneq_s32((int32x4_t)dot[1], codes, four, 1);
    dot[2] = (vi)vdotq_laneq_s32((int32x4_t)dot[2], codes, four, 2);
    dot[3] = (vi)vdotq_laneq_s32((int32x4_t)dot[3], codes, four, 3);
}
#else
INLINE void dot_tokens(vi dot[], vi w, const int8_t (*x)[4]) {
    UNROLL for (int t = 0; t < INT8_TOKENS; t++) dot[t] = dot_bytes(dot[t], w, four_codes(x[t]));
}
#endif
typedef struct {                       // a group of activations of a batch
    int8_t q[8][INT8_TOKENS][4];       // codes, four at a time
    float d[INT8_TOKENS];              // scales
    float s[3][INT8_TOKENS];           // d * sum of the first half's codes, the second's, of all
    int32_t start[3][INT8_TOKENS];     // of their dot products: ROUNDER, less the sums of CODE_BIAS
} Int8Acts;
typedef struct {                       // weights of 16 rows
    int8_t q[INT8_DEPTH / 4][TILE][4];   // codes, in the decoders' order
    float d[INT8_DEPTH / 16][TILE], m[INT8_DEPTH / 16][TILE];   // scales and offsets
} Int8Panel;

static void int8_pack(UNUSED const Matrix *w, const float *x, int count, int token, void *acts) {
    for (Int8Acts *a = acts, *end = a + count / 32; a < end; a++, x += 32) {
        int8_t q[32];
        int32_t sum[3];
        a->d[token] = round_32(x, q, sum);
        UNROLL for (int j = 0; j < 8; j++) memcpy(a->q[j][token], q + 4 * j, 4);
        UNROLL for (int j = 0; j < 3; j++) {
            a->s[j][token] = a->d[token] * sum[j];
            a->start[j][token] = (int32_t)(ROUNDER_BITS - (uint32_t)CODE_BIAS * sum[j]);
        }
    }
}

// A bias makes signed codes unsigned, and its products are subtracted by offsets m (for dot_pairs)
// or by Int8Acts.start (CODE_BIAS). Q2_K, which has 4-bit scales and codes up to 3, is folded:
// scales multiply codes here, eight in a word, so that all weights of a block share one scale.
static void int8_decode(const Matrix *w, int64_t r, int64_t k, int depth, void *panel) {
    const Format *f = &formats[w->type];
    Int8Panel *p = panel;
    int bias = f->offsets ? 0 : CODE_BIAS;
    if (f->pairs_top) bias = f->bias;
    for (int i = 0; i < depth; i += 256) {
        uint64_t q[TILE][32];
        float d[TILE][16], m[TILE][16];
        for (int j = 0; j < TILE; j++) {
            int8_t *codes = (int8_t *)q[j];
            const uint8_t *weights = weight_at(w, r + j, k + i);
            prefetch_l2(weight_at(w, r + TILE + j, k + i), f->bytes);   // the panel below
            quant_decode(w->type, weights, w->cols - k - i, codes, d[j], m[j]);
            for (int c = 0; c < 256; c++) codes[c] += bias;
            if (f->pairs_top && bias) for (int c = 0; c < 16; c++) m[j][c] = d[j][c] * -bias;
            if (PAIRS || !f->per16 || !f->offsets) continue;   // not folded
            const block_q2_K *b = (const void *)weights;
            for (int c = 0; c < 32; c++) q[j][c] *= b->scales[c % 8 * 2 + c / 16] & 15;
            for (int c = 0; c < 16; c++) d[j][c] = quant_half(b->d);
        }
        transpose(q, 64, 64, p->q[i / 4]);
        transpose(d, 16, 16, p->d[i / 16]);
        if (f->offsets || f->pairs_top) transpose(m, 16, 16, p->m[i / 16]);
    }
}

// total[i][t][16] = the products of panel i with token t of the batch. A group of weights has 1 or
// 2 `scales`, each of `step` weights, and 0 to 2 `offsets`. dot_pairs adds `run` words of codes.
INLINE void tile_int8(const Int8Panel *w, const Int8Acts *x, int depth, int scales, int offsets,
                      int max_pairs, vf *total) {
    enum { T = INT8_TOKENS, V = PANELS * VECTORS };
    vf sum[V][T] = {{{0}}};
    int step = 32 / scales, run = smaller(max_pairs, step / 4), scale_offsets = offsets / scales;
    bool unbiased = offsets || !CODE_BIAS;   // the codes are without CODE_BIAS
    for (size_t g = 0; g < (size_t)depth / 32; g++, x++)
        UNROLL for (int half = 0; half < scales; half++) {   // one scale: half 0 is the whole group
            size_t which = scales > 1 ? half : 2;            // of start [3]
            size_t code = g / 8 * 64 + g % 8 * 2;            // the group's first word of q
            vi dot[V][T], pairs[V][T];
            UNROLL for (int v = 0; v < V; v++)
                UNROLL for (int t = 0; t < T; t++)
                    dot[v][t] = (vi){0} + (unbiased ? ROUNDER_BITS : x->start[which][t]);
            UNROLL for (int i = 0; i < step / 4; i++) {
                size_t j = half * 4 + i, at = code + j / 2 * 16 + j % 2;   // word j of the group
                UNROLL for (int v = 0; v < V; v++) {
                    vi q = load_i32(w[v / VECTORS].q[at][v % VECTORS * LANES]);
                    if (!max_pairs) dot_tokens(dot[v], q, x->q[j]);
                    else UNROLL for (int t = 0; t < T; t++)
                        dot[v][t] = dot_pairs(dot[v][t], &pairs[v][t], q, four_codes(x->q[j][t]),
                                              i % run == 0, i % run == run - 1);
                }
            }
            UNROLL for (int v = 0; v < V; v++) {
                const Int8Panel *p = &w[v / VECTORS];
                size_t r = v % VECTORS * LANES;
                vf scale = load_f32(p->d[2 * g + half] + r);
                UNROLL for (int t = 0; t < T; t++) {
                    sum[v][t] += dot_scaled(dot[v][t], scale) * x->d[t];
                    UNROLL for (int o = half * scale_offsets; o < (half + 1) * scale_offsets; o++)
                        sum[v][t] += load_f32(p->m[2 * g + o] + r) * x->s[offsets > 1 ? o : 2][t];
                }
            }
        }
    UNROLL for (int v = 0; v < V; v++)
        UNROLL for (int t = 0; t < T; t++)
            total[(v / VECTORS * T + t) * VECTORS + v % VECTORS] = sum[v][t];
}

// Each MULTIPLY(scales, offsets, max_pairs) is a tile_int8 with unrolled loops: five of dot_pairs,
// whose offsets may be there to subtract a bias, and four of dot_bytes.
static void int8_multiply(const Product *p, vf *sum) {
    const Format *f = &formats[p->job->w->type];
    int top = PAIRS ? f->pairs_top : 0, offsets = !PAIRS && f->offsets;
#define MULTIPLY(...) tile_int8(p->panel, p->acts, p->depth, __VA_ARGS__, sum)
    if (top > 32 && f->per16) MULTIPLY(2, 2, 2);       // q6_K
    else if (top && f->per16) MULTIPLY(2, 2, 4);       // q2_K q3_K iq1_m nvfp4
    else if (top > 32) MULTIPLY(1, 1, 2);              // q5_1
    else if (top > 16) MULTIPLY(1, 1, 4);              // q4_1 q5_0 q5_K iq1_s iq3_s mxfp4
    else if (top) MULTIPLY(1, 1, 8);                   // q4_0 q4_K tq1_0 tq2_0 q1_0 q2_0
    else if (f->per16 && offsets) MULTIPLY(1, 2, 0);   // q2_K, folded
    else if (f->per16) MULTIPLY(2, 0, 0);              // iq2_xs iq2_s, q3_K q6_K iq1_m nvfp4
    else if (offsets) MULTIPLY(1, 1, 0);               // q4_1 q5_1 q4_K q5_K
    else MULTIPLY(1, 0, 0);   // q8_0 iq2_xxs iq3_xxs iq4_nl iq4_xs, and all others without pairs
#undef MULTIPLY
}

static const Tile int8_tile = {.tokens = INT8_TOKENS, .step = 1024, .depth = INT8_DEPTH,
    .task_rows = 64, .act_bytes = 8 * sizeof(Int8Acts), .panel_bytes = sizeof(Int8Panel),
    .pack = int8_pack, .decode = int8_decode, .multiply = int8_multiply};

// ---- 33. matmul ----
//
// A call has up to MAX_JOBS products, some of which share x. First activations are packed, each x
// once (plan_job, pack_task). Then rows are cut into strips, and a task has a strip or half of one
// (plan_tasks, matmul_task). Up to FEW tokens have no tiles, but their rows are cut up, too.

// the two Tiles of a few tokens, which only say how activations are packed
static const Tile float_token = {.tokens = 1, .step = 8192, .act_bytes = 256 * sizeof(float),
                                 .pack = token_floats};
static const Tile block_token = {.tokens = 1, .step = 8192, .act_bytes = sizeof(TokenActs),
                                 .pack = token_pack};

typedef struct {
    const Matmul *job;
    const Tile *tile;
    const void *acts;                  // packed by this job or an earlier one
    uint64_t act_bytes;                // of a batch, all columns
    int first_pack, first_task;        // numbers of this job's first tasks
    int64_t task_rows;                 // of a strip
    int whole;                         // the first so many strips are one task each, others two
    size_t row_bytes;                  // of weights
} JobPlan;
typedef struct {
    JobPlan job[MAX_JOBS + 1];         // the last one only says where the tasks end
    char *panels;                      // [threads][panel_bytes]
    size_t panel_bytes;
} MatmulCall;

static void pack_task(Task t) {
    const JobPlan *plan = ((const MatmulCall *)t.ctx)->job;
    while (t.i >= plan[1].first_pack) plan++;
    const Matmul *job = plan->job;
    const Tile *tile = plan->tile;
    int i = t.i - plan->first_pack, batches = ceil_div(job->n, tile->tokens);
    int batch = i % batches, first = batch * tile->tokens;
    int64_t k = i / batches * tile->step, end = smaller(k + tile->step, job->w->cols);
    char *acts = (char *)plan->acts + batch * plan->act_bytes + k / 256 * tile->act_bytes;
    for (; k < end; k += 256, acts += tile->act_bytes)
        for (int j = 0; j < tile->tokens; j++) {   // copies of its first token fill a batch up
            int token = first + j < job->n ? first + j : first;
            const float *x = job->x + token * input_step(job->w) + k;
            tile->pack(job->w, x, smaller(end - k, 256), j, acts);
        }
}

// Computes rows r .. end-1 for tokens t .. t_end-1, where t begins a batch. Rows are rounded up to
// whole tiles: past the matrix's end panels repeat its last row, which tile_out leaves out.
static void multiply_tiles(const JobPlan *plan, int64_t r, int64_t end, int t, int t_end,
                           char *panels) {
    const Matrix *w = plan->job->w;
    const Tile *tile = plan->tile;
    int batches = ceil_div(t_end - t, tile->tokens), rows = PANELS * TILE;
    Product p = {.job = plan->job};
    vf sum[PANELS * MAX_TOKENS * VECTORS];
    static _Thread_local bool backwards;   // every other task begins with the batch L2 still has
    backwards = !backwards;
    end = (end + rows - 1) / rows * rows;
    for (p.k = 0; p.k < w->cols; p.k += tile->depth) {
        char *panel = panels;
        p.depth = smaller(w->cols - p.k, tile->depth);
        for (p.r = r; p.r < end; p.r += TILE, panel += tile->panel_bytes)
            tile->decode(w, p.r, p.k, p.depth, panel);
        for (int i = 0; i < batches; i++) {
            int batch = t / tile->tokens + (backwards ? batches - 1 - i : i);
            p.t = batch * tile->tokens;
            p.acts = plan->acts + batch * plan->act_bytes + p.k / 256 * tile->act_bytes;
            p.panel = panels;
            for (p.r = r; p.r < end; p.r += rows, p.panel += PANELS * tile->panel_bytes) {
                tile->multiply(&p, sum);
                tile_out(&p, tile->tokens, sum);
            }
        }
    }
}

// A strip of rows, or half of one: half of its rows for a few tokens, else half of the tokens.
static void matmul_task(Task t) {
    const MatmulCall *call = t.ctx;
    const JobPlan *plan = call->job;
    while (t.i >= plan[1].first_task) plan++;
    const Matrix *w = plan->job->w;
    int n = plan->job->n, i = t.i - plan->first_task, parts = i < plan->whole ? 1 : 2;
    int half = smaller(2 * i, plan->whole + i);   // if 3 strips are whole: 0, 2, 4, 6, 7, 8, ...
    if (n <= FEW) {
        int64_t r = half * (plan->task_rows / 2);
        int64_t end = smaller(r + plan->task_rows / parts, w->rows);
        float scale = w->scale ? *w->scale : 1;
        formats[w->type].matvec(plan->job, plan->acts, r, end);
        for (int token = 0; token < n; token++) {
            float *out = plan->job->out + token * output_step(w);
            for (int64_t k = r; k < end; k++) out[k] = out[k] * scale + (w->bias ? w->bias[k] : 0);
        }
    } else {
        int64_t r = half / 2 * plan->task_rows, end = smaller(r + plan->task_rows, w->rows);
        int tokens = ceil_div(n, parts * plan->tile->tokens) * plan->tile->tokens;
        int first = half % 2 * tokens, last = smaller(first + tokens, n);
        char *panels = call->panels + t.thread * call->panel_bytes;
        multiply_tiles(plan, r, end, first, last, panels);
    }
}

// Plans the packing of a job's activations, unless an earlier job packs the same. The tile depends
// on the format, the CPU and FEW, never on sizes, so small tests run the code of large models.
static void plan_job(Pool *p, Arena *arena, MatmulCall *call, JobPlan *plan, const Matmul *job) {
    const Matrix *w = job->w;
    const JobPlan *same = call->job;
    bool block = formats[w->type].block;
    const Tile *tile = INT8_TILE && block ? &int8_tile : &float_tile;
    if (p->amx) tile = amx_tile(w);
    if (job->n <= FEW) tile = block ? &block_token : &float_token;
    size_t batches = ceil_div(job->n, tile->tokens), packs = 0;
    plan->job = job;
    plan->row_bytes = larger(quant_row_bytes(w->type, w->cols), 1);
    plan->tile = tile;
    plan->act_bytes = (uint64_t)(w->cols + 255) / 256 * tile->act_bytes;
    while (same < plan && (same->job->x != job->x || same->job->n != job->n ||
                           same->job->w->cols != w->cols || same->tile != tile)) same++;
    if (same < plan) plan->acts = same->acts;
    else {
        packs = batches * ((w->cols - 1) / tile->step + 1);
        plan->acts = arena_take(arena, batches, plan->act_bytes);
    }
    call->panel_bytes = larger(call->panel_bytes, tile->task_rows / TILE * tile->panel_bytes);
    plan[1].first_pack = plan->first_pack + packs;
}

// Cuts the rows of k jobs into strips of whole cache lines of out (32 rows) and of about equal
// bytes of weights. A thread gets four strips, because each strip reads all activations, or three
// for a few tokens. Some cores are slower (two threads may share one), so the last strips of the
// last job are two tasks each, if there are tokens enough to be worth decoding weights twice.
static void plan_tasks(const Pool *p, JobPlan *plan, int k) {
    size_t bytes = 0;
    for (int i = 0; i < k; i++) bytes += plan[i].row_bytes * plan[i].job->w->rows;
    for (int i = 0; i < k; i++, plan++) {
        size_t share = 4 * p->threads, most = plan->tile->task_rows;
        int divided = plan->job->n >= 256 ? p->threads / 2 : 0;
        if (plan->job->n <= FEW) {
            share = 3 * p->threads;
            most = (512 << 10) / plan->row_bytes;   // memory is fastest in long runs
            divided = p->threads;
        }
        plan->task_rows = larger(smaller(bytes / share / plan->row_bytes, most) / 32, 1) * 32;
        int strips = (plan->job->w->rows + plan->task_rows - 1) / plan->task_rows;
        divided = i < k - 1 ? 0 : smaller(divided, strips);
        plan->whole = strips - divided;
        plan[1].first_task = plan->first_task + strips + divided;
    }
}

static void matmul(Pool *p, Arena *arena, const Matmul *jobs, int k) {
    MatmulCall call;
    size_t mark = arena->used;
    call.job[0].first_pack = call.job[0].first_task = call.panel_bytes = 0;
    for (int j = 0; j < k; j++) plan_job(p, arena, &call, &call.job[j], &jobs[j]);
    plan_tasks(p, call.job, k);
    call.panels = arena_take(arena, p->threads, call.panel_bytes);
    if (arena->base) {
        parallel(p, pack_task, &call, call.job[k].first_pack);
        parallel(p, matmul_task, &call, call.job[k].first_task);
    }
    arena->used = mark;
}

// ---- 34. attention ----
//
// Online softmax (arXiv 1805.02867, 2205.14135) reads the cache in blocks of rows. A query keeps
// `top`, the largest score so far, the sum of its weights exp(score - top), and the weighted sum of
// values. When top grows, both sums fade by exp(old top - new top). So there is no n x n buffer,
// and all query heads that share a KV head share each block. top is finite, see plain_head.

// How many of `keys` rows from r on do queries at first .. last see? If all, no mask is needed.
enum { NONE_SEEN, SOME_SEEN, ALL_SEEN };
static int block_seen(const Attention *a, int r, int keys, int first, int last) {
    int any = 0, all = 1, end = smaller(r + keys, a->rows);
    for (int j = r; j < end; j++) {
        int key = a->pos_k[j], nearest = key < last ? key : last;
        if (nearest < first) nearest = first;
        any |= attention_sees(a, nearest, key);
        all &= attention_sees(a, first, key) & attention_sees(a, last, key);
    }
    if (!any) return NONE_SEEN;
    return all ? ALL_SEEN : SOME_SEEN;
}

// the rows of a layer's cache that have been written; a ring fills in order
static int rows_used(const Attention *a) { return smaller(a->pos + a->n, a->rows); }
static int up_to_32(int width) { return ceil_div(width, 32) * 32; }

// ---- 35. attention of many queries ----
//
// A task has one KV head and some tokens' queries of all heads that share it, 16 to a QueryTile.
// Queries lie across the lanes: scores are [key][16], results [vd][16], and no lanes are added up.
// Keys and values become floats in rows of hd32 and vd32, which are hd and vd rounded up to whole
// 32, with zeros behind. An AttentionTile is what differs between CPUs: how it packs these numbers
// for its two products, scores = keys * queries and results += transposed values * weights.

typedef struct {                       // 16 queries of heads that share a KV head
    void *q;                           // packed, in as many bytes as [16][hd32] floats
    float *out;                        // [vd32][16] weighted sums of values
    float top[TILE], sum[TILE];        // largest score so far; sum of weights
    float slope[TILE];                 // ALiBi
    int32_t pos[TILE];
} QueryTile;

typedef struct {                       // rows of a KV head's cache
    float *k, *v;                      // [keys][hd32], [keys][vd32]
    void *packed;                      // k and v as pack_keys packs them, in as many bytes
    const int32_t *pos;                // [keys]
    int keys;
    bool masked;                       // some query does not see all of them
} KeyBlock;

typedef struct {
    int keys;                          // most rows of a block
    int task_queries;                  // most queries of a task, of all heads; they stay in L2
    // pack_queries packs q [16][width]. NULL: queries are floats in columns; keys are not packed
    void (*pack_queries)(const float *q, int width, void *to);
    void (*pack_keys)(const Attention *a, const KeyBlock *b);
    // computes scores of PANELS query tiles, calls tile_softmax and adds the weighted values
    void (*attend)(const Attention *a, const KeyBlock *b, QueryTile *q);
} AttentionTile;

// Turns scores s[keys][16] into weights exp(score - top) and adds them to q->sum. Older sums fade.
static void tile_softmax(const Attention *a, const KeyBlock *b, QueryTile *q, float *restrict s) {
    vf top[VECTORS];
    float most[TILE], total[TILE] = {0}, fade[TILE];
    bool fades = false;
    memcpy(top, q->top, sizeof top);
    if (a->softcap > 0) soft_cap(s, b->keys * TILE, a->softcap);
    for (int j = 0; j < b->keys; j++) {
        int key = b->pos[j];
        float *row = s + TILE * j;
        if (a->slopes) for (int i = 0; i < TILE; i++)   // ALiBi
            row[i] -= q->slope[i] * (float)abs(q->pos[i] - key);
        if (b->masked) for (int i = 0; i < TILE; i++)
            row[i] = attention_sees(a, q->pos[i], key) ? row[i] : -INFINITY;
        UNROLL for (int v = 0; v < VECTORS; v++)
            top[v] = larger_of(top[v], load_f32(row + v * LANES));
    }
    memcpy(most, top, sizeof most);
    for (int j = 0; j < b->keys; j++) {
        float *row = s + TILE * j;
        for (int i = 0; i < TILE; i++) total[i] += row[i] = exp_fast(row[i] - most[i]);
    }
    for (int i = 0; i < TILE; i++) {
        fade[i] = exp_fast(q->top[i] - most[i]);
        fades |= fade[i] < 1;
        q->sum[i] = q->sum[i] * fade[i] + total[i];
        q->top[i] = most[i];
    }
    if (fades) for (int e = 0; e < a->vd * TILE; e += LANES)
        store(q->out + e, load_f32(q->out + e) * load_f32(fade + e % TILE));
}

// On most CPUs both products are the float tile: rows of keys times columns of queries, then
// columns of values times rows of weights. With AVX-512 two query tiles share each broadcast
// number, which makes 16 multiply-adds for 10 loads; one tile's 8 would wait for 9 loads.
static void float_attend(const Attention *a, const KeyBlock *b, QueryTile *q) {
    float s[PANELS][FLOAT_KEYS * TILE] __attribute__((aligned(64)));
    int hd32 = up_to_32(a->hd), vd32 = up_to_32(a->vd);
    size_t next = PANELS > 1 ? q[1].out - q[0].out : 0;   // q[1].q is as far from q[0].q
    for (int j = 0; j < b->keys; j += FLOAT_TOKENS)   // scores past the last row are never read
        tile_float(q->q, next, b->k + j * hd32, FLOAT_TOKENS, hd32, 1, a->hd, false,
                   s[0] + TILE * j, FLOAT_KEYS * TILE);
    for (int i = 0; i < PANELS; i++) tile_softmax(a, b, &q[i], s[i]);
    for (int e = 0; e < a->vd; e += FLOAT_TOKENS)
        tile_float(s[0], FLOAT_KEYS * TILE, b->v + e, FLOAT_TOKENS, 1, vd32, b->keys,
                   true, q->out + TILE * e, next);
}

static const AttentionTile float_attention = {.keys = FLOAT_KEYS, .task_queries = 256,
                                              .attend = float_attend};
static const AttentionTile amx_attention;   // section 37

typedef struct {
    const Attention *a;
    const AttentionTile *tile;
    int sharing, tasks;                // query heads that share a KV head
    int tokens, tiles;                 // of a task: most tokens; QueryTiles
    QueryTile *q;                      // [threads][tiles]
    float *work;                       // [threads][work_size] for KeyBlock and QueryTiles
    size_t work_size;
} ManyCall;

// Packs a task's n queries: number j is of token first + j / sharing, head kv * sharing + j %
// sharing. Copies of the last query fill the last tiles. rows [16][hd32] must be zeros on entry.
static void many_start(const ManyCall *call, QueryTile *q, float *rows, int kv, int first, int n) {
    const Attention *a = call->a;
    int hd32 = up_to_32(a->hd);
    for (int j = 0; j < call->tiles * TILE; j++) {
        QueryTile *tile = &q[j / TILE];
        int lane = j % TILE, at = j < n ? j : n - 1;
        int head = kv * call->sharing + at % call->sharing, token = first + at / call->sharing;
        const float *from = a->q + ((size_t)token * a->n_head + head) * a->hd;
        for (int e = 0; e < a->hd; e++) rows[lane * hd32 + e] = from[e] * a->scale;
        tile->top[lane] = -FLT_MAX;
        tile->slope[lane] = a->slopes ? a->slopes[head] : 0;
        tile->pos[lane] = a->pos + token;
        if (lane < TILE - 1) continue;
        if (call->tile->pack_queries) call->tile->pack_queries(rows, hd32, tile->q);
        else transpose(rows, hd32, hd32, tile->q);
        memset(tile->out, 0, TILE * up_to_32(a->vd) * sizeof(float));
    }
}

// Attends for some queries of one KV head's query heads, block by block, and writes their results.
static void many_task(Task t) {
    const ManyCall *call = t.ctx;
    const Attention *a = call->a;
    // the last queries come first: they see most keys, and no thread should be left alone with them
    int task = call->tasks - 1 - t.i, kv = task % a->n_kv, first = task / a->n_kv * call->tokens;
    int tokens = smaller(a->n - first, call->tokens), count = tokens * call->sharing;
    int hd32 = up_to_32(a->hd), vd32 = up_to_32(a->vd), both = hd32 + vd32;
    int keys = call->tile->keys, most = smaller(up_to_32(rows_used(a)), keys);   // of a block
    float *work = call->work + t.thread * call->work_size;
    QueryTile *q = call->q + t.thread * call->tiles;
    for (int i = 0; i < call->tiles; i++, work += TILE * both)
        q[i] = (QueryTile){.q = work, .out = work + TILE * hd32};
    KeyBlock b = {.k = work, .v = work + keys * hd32, .packed = work + keys * both};
    memset(b.k, 0, sizeof(float) * most * hd32);
    memset(b.v, 0, sizeof(float) * most * vd32);
    many_start(call, q, b.k, kv, first, count);
    for (int r = 0; r < rows_used(a); r += keys) {
        int seen = block_seen(a, r, keys, a->pos + first, a->pos + first + tokens - 1);
        if (seen == NONE_SEEN) continue;
        int loaded = smaller(rows_used(a) - r, keys);
        b.keys = loaded;
        b.pos = a->pos_k + r;
        b.masked = seen == SOME_SEEN;
        for (int j = 0; j < loaded; j++) {
            size_t row = (size_t)kv * a->rows + r + j;
            quant_dequantize(QUANT_F16, a->k + row * a->hd, b.k + j * hd32, a->hd);
            quant_dequantize(QUANT_F16, a->v + row * a->v_step, b.v + j * vd32, a->vd);
        }
        if (call->tile->pack_keys) call->tile->pack_keys(a, &b);
        for (int i = 0; i * TILE < count; i += PANELS) {
            uint32_t last = q[i + PANELS - 1].pos[TILE - 1];   // an empty row's -1 is above it
            b.keys = loaded;
            while (!a->ahead && b.keys && (uint32_t)b.pos[b.keys - 1] > last) b.keys--;
            call->tile->attend(a, &b, &q[i]);
        }
    }
    for (int j = 0; j < count; j++) {   // values, divided by sums of weights
        const QueryTile *tile = &q[j / TILE];
        int lane = j % TILE, head = kv * call->sharing + j % call->sharing;
        float *to = a->out + ((size_t)(first + j / call->sharing) * a->n_head + head) * a->vd;
        float sum = tile->sum[lane] + (a->sinks ? exp_fast(a->sinks[head] - tile->top[lane]) : 0);
        float inverse = sum == 0 ? 0 : 1 / sum;   // 0: it sees nothing
        for (int e = 0; e < a->vd; e++) to[e] = tile->out[TILE * e + lane] * inverse;
    }
}

// Cuts queries into large tasks, because each packs all its keys; but each thread needs four.
static void attend_many(Pool *p, Arena *arena, const Attention *a) {
    int step = PANELS * TILE;   // queries that `attend` takes
    ManyCall call = {.a = a, .tile = &float_attention, .sharing = a->n_head / a->n_kv};
    if (p->amx) call.tile = &amx_attention;
    int share = larger(a->n * a->n_head / (4 * p->threads), step);
    call.tokens = larger(smaller(share, call.tile->task_queries) / call.sharing, 1);
    call.tokens = smaller(call.tokens, a->n);
    call.tasks = a->n_kv * ceil_div(a->n, call.tokens);
    call.tiles = ceil_div(call.tokens * call.sharing, step) * PANELS;
    int rows = call.tiles * TILE + call.tile->keys * (call.tile->pack_keys ? 2 : 1);
    call.work_size = rows * (up_to_32(a->hd) + up_to_32(a->vd));
    call.q = arena_take(arena, p->threads * call.tiles, sizeof *call.q);
    call.work = arena_take(arena, p->threads * call.work_size, sizeof *call.work);
    if (arena->base) parallel(p, many_task, &call, call.tasks);
}

// ---- 36. attention of a few queries ----
//
// Each query is by itself, so that its sums do not depend on the others. Memory sets the speed: 2 *
// (hd + vd) bytes per row and KV head, read once for all query heads that share them. Of a block,
// BLOCK_KEYS rows, first the keys are read and then the values, in the order of memory, and with
// each row the same row of the next block is prefetched, so that memory never waits for arithmetic.
// A task does a split, SPLIT_BLOCKS blocks, for one query after the other; the first one brings the
// rows into L2. Each split of a head has its own largest score and sums, a Partial, and the thread
// that finishes the last split of a unit joins the unit's Partials.
//
// An example: the query at position 299 sees 300 rows, 10 blocks in 3 splits of 4, 4 and 2. 8 heads
// share 2 KV heads. With 2 threads 2 units (4 heads each) times 3 splits are 6 tasks. Task 4 has
// unit 1, split 1: four calls of query_block, for rows 128..159 and so on of KV head 1, fill
// Partials of heads 4 to 7. The task of 3, 4 and 5 that ends last joins 3 Partials for each of
// these heads.

enum { BLOCK_KEYS = 32, SPLIT_BLOCKS = 4 };
typedef struct { float top, sum, out[]; } Partial;   // as in a QueryTile, for one query; out [vd]
typedef struct {
    const Attention *a;
    int32_t *block;                // [n][most] first rows of the blocks that a query sees
    int blocks[FEW], most;         // the number of its blocks; of all blocks
    int splits;                    // of the query that sees most blocks
    int heads, units;              // a unit has the heads that share a KV head, or some of them
    int task_splits;               // of a task: splits, one unit's after the other's
    float *partials;               // [n][n_head][splits] Partials
    size_t size;                   // floats of a Partial
    atomic_int *missing;           // [n][units] splits that are not finished
} FewCall;

// In this section `head` counts the heads of all queries, [n][n_head].
static Partial *partial_of(const FewCall *call, int head, int split) {
    return (Partial *)(call->partials + ((size_t)head * call->splits + split) * call->size);
}

// s[heads][BLOCK_KEYS] = the products of keys k with the queries q of up to 4 heads, then zeros
INLINE void query_scores(const Attention *a, const float *q, const uint16_t *k,
                         const uint16_t *next, int keys, int heads, float s[][BLOCK_KEYS]) {
    vf sum[4][BLOCK_KEYS];
    int in_vectors = a->hd / LANES * LANES;   // the rest of hd is added one by one
    for (int j = 0; j < keys; j++, k += a->hd, next += a->hd) {
        vf total[4] = {{0}};
        prefetch_l2(next, 2 * a->hd);
        for (int e = 0; e < in_vectors; e += LANES) {
            vf key = load_f16(k + e);
            UNROLL for (int h = 0; h < heads; h++) total[h] += key * load_f32(q + h * a->hd + e);
        }
        UNROLL for (int h = 0; h < heads; h++) {
            for (int e = in_vectors; e < a->hd; e++)
                total[h][0] += quant_f16_to_f32(k[e]) * q[h * a->hd + e];
            sum[h][j] = total[h];
        }
    }
    for (int h = 0; h < heads; h++) {
        for (int j = keys; j < BLOCK_KEYS; j++) sum[h][j] = (vf){0};
        for (int j = 0; j < BLOCK_KEYS; j += LANES) store(s[h] + j, sum_each(&sum[h][j]));
    }
}

// tile_softmax for one query, with keys across the lanes
static void query_softmax(const Attention *a, const int32_t *pos, int head, float *restrict s,
                          Partial *restrict partial) {
    float slope = a->slopes ? a->slopes[head % a->n_head] : 0, top = partial->top;
    int query = a->pos + head / a->n_head;
    vf most = {0}, sum = {0};
    for (int j = 0; j < BLOCK_KEYS; j++) s[j] *= a->scale;
    if (a->softcap > 0) soft_cap(s, BLOCK_KEYS, a->softcap);
    for (int j = 0; slope > 0 && j < BLOCK_KEYS; j++) s[j] -= slope * (float)abs(query - pos[j]);
    for (int j = 0; j < BLOCK_KEYS; j++) s[j] = attention_sees(a, query, pos[j]) ? s[j] : -INFINITY;
    UNROLL for (int j = 0; j < BLOCK_KEYS; j += LANES)
        most = j ? larger_of(most, load_f32(s + j)) : load_f32(s + j);
    UNROLL for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (int j = 0; j < BLOCK_KEYS; j++) s[j] = exp_fast(s[j] - top);
    UNROLL for (int j = 0; j < BLOCK_KEYS; j += LANES) sum += load_f32(s + j);
    float fade = exp_fast(partial->top - top);
    partial->top = top;
    UNROLL for (int left = LANES; left > 1; left /= 2) sum = pair_sums(sum, sum);
    partial->sum = partial->sum * fade + sum[0];
    if (fade < 1) for (int e = 0; e < a->vd; e++) partial->out[e] *= fade;
}

// out[heads][vectors * LANES] += weights s times a part of the values; all sums are in registers
INLINE void query_columns(const Attention *a, const uint16_t *v, const uint16_t *next, int keys,
                          int heads, int vectors, float s[][BLOCK_KEYS], float *out, size_t step) {
    vf sum[4][8];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < vectors; i++) sum[h][i] = load_f32(out + h * step + i * LANES);
    for (int j = 0; j < keys; j++, v += a->v_step, next += a->v_step) {
        prefetch_l2(next, 2 * vectors * LANES);
        UNROLL for (int i = 0; i < vectors; i++) {
            vf value = load_f16(v + i * LANES);
            UNROLL for (int h = 0; h < heads; h++) sum[h][i] += value * s[h][j];
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < vectors; i++) store(out + h * step + i * LANES, sum[h][i]);
}

// out[heads][vd] += weights s times the values of `keys` rows
INLINE void query_values(const Attention *a, const uint16_t *v, const uint16_t *next, int keys,
                         int heads, float s[][BLOCK_KEYS], float *out, size_t step) {
    int e = 0, vectors = heads == 4 || LANES == 8 ? 4 : 8;   // as many as registers can hold
    for (; e + vectors * LANES <= a->vd; e += vectors * LANES)
        query_columns(a, v + e, next + e, keys, heads, vectors, s, out + e, step);
    for (; e + LANES <= a->vd; e += LANES)
        query_columns(a, v + e, next + e, keys, heads, 1, s, out + e, step);
    for (int h = 0; h < heads && e < a->vd; h++)
        for (int j = 0; j < keys; j++)
            for (int i = e; i < a->vd; i++)
                out[h * step + i] += s[h][j] * quant_f16_to_f32(v[j * a->v_step + i]);
}

// Adds block b of a KV head to the Partials of `heads` of a query's heads, from head g of those
// that share it. Only g == 0 prefetches: this KV head's next block, or the next head's first block.
INLINE void query_block(const FewCall *call, int query, int kv, int b, int g, int heads) {
    const Attention *a = call->a;
    const int32_t *block = call->block + (size_t)query * call->most;
    int r = block[b], keys = smaller(a->rows - r, BLOCK_KEYS);
    size_t head = query * a->n_head + kv * (a->n_head / a->n_kv) + g, split = b / SPLIT_BLOCKS;
    size_t row = (size_t)kv * a->rows + r, next = row;   // next: is prefetched; row costs nothing
    int32_t pos[BLOCK_KEYS];
    float s[4][BLOCK_KEYS];
    if (g == 0 && b + 1 < call->blocks[query]) next = row - r + block[b + 1];
    else if (g == 0 && kv + 1 < a->n_kv) next = row - r + a->rows + block[0];
    memset(pos, -1, sizeof pos);   // no query sees what is past the last row
    memcpy(pos, a->pos_k + r, keys * sizeof *pos);
    query_scores(a, a->q + head * a->hd, a->k + row * a->hd, a->k + next * a->hd, keys, heads, s);
    for (int i = 0; i < heads; i++)
        query_softmax(a, pos, head + i, s[i], partial_of(call, head + i, split));
    query_values(a, a->v + row * a->v_step, a->v + next * a->v_step, keys, heads, s,
                 partial_of(call, head, split)->out, call->size * call->splits);
}

// joins a head's Partials, faded to the largest score, and divides values by the sum of weights
static void join_partials(const FewCall *call, int head) {
    const Attention *a = call->a;
    float sink = a->sinks ? a->sinks[head % a->n_head] : -INFINITY;
    float *out = a->out + (size_t)head * a->vd, top = fmaxf(sink, -FLT_MAX);
    for (int i = 0; i < call->splits; i++) top = fmaxf(top, partial_of(call, head, i)->top);
    float sum = a->sinks ? exp_fast(sink - top) : 0;
    memset(out, 0, a->vd * sizeof *out);
    for (int i = 0; i < call->splits; i++) {
        const Partial *partial = partial_of(call, head, i);
        float fade = exp_fast(partial->top - top);
        sum += partial->sum * fade;
        if (partial->sum != 0) for (int e = 0; e < a->vd; e++) out[e] += partial->out[e] * fade;
    }
    for (int e = 0; e < a->vd && sum != 0; e++) out[e] /= sum;
}

// Does one split of a unit for a query. If that sees fewer blocks, empty Partials add nothing.
static void query_split(const FewCall *call, int query, int unit, int split) {
    const Attention *a = call->a;
    int sharing = a->n_head / a->n_kv, first = unit * call->heads, kv = first / sharing;
    int head = query * a->n_head + first, g_end = first % sharing + call->heads;
    for (int h = head; h < head + call->heads; h++) {
        Partial *partial = partial_of(call, h, split);
        memset(partial, 0, call->size * sizeof(float));
        partial->top = -FLT_MAX;
    }
    int end = smaller((split + 1) * SPLIT_BLOCKS, call->blocks[query]);
    for (int b = split * SPLIT_BLOCKS; b < end; b++) {
        int g = first % sharing;
        for (; g + 4 <= g_end; g += 4) query_block(call, query, kv, b, g, 4);
        for (; g + 2 <= g_end; g += 2) query_block(call, query, kv, b, g, 2);
        for (; g < g_end; g++) query_block(call, query, kv, b, g, 1);
    }
    bool done = atomic_fetch_sub(&call->missing[query * call->units + unit], 1) == 1;
    for (int h = head; done && h < head + call->heads; h++) join_partials(call, h);
}

static void few_task(Task t) {
    const FewCall *call = t.ctx;
    int end = smaller((t.i + 1) * call->task_splits, call->units * call->splits);
    for (int i = t.i * call->task_splits; i < end; i++)
        for (int query = 0; query < call->a->n; query++)
            query_split(call, query, i / call->splits, i % call->splits);
}

// Lists the blocks that each query sees, and cuts them into splits, units and tasks.
static void attend_few(Pool *p, Arena *arena, const Attention *a) {
    FewCall call = {.a = a, .most = ceil_div(a->rows, BLOCK_KEYS), .heads = a->n_head / a->n_kv,
                    .units = a->n_kv, .size = sizeof(Partial) / sizeof(float) + a->vd};
    int most = arena->base ? 0 : call.most;   // blocks of a query
    call.block = arena_take(arena, a->n * call.most, sizeof *call.block);
    for (int i = 0; arena->base && i < a->n; i++) {
        int32_t *block = call.block + (size_t)i * call.most;
        for (int r = 0; r < rows_used(a); r += BLOCK_KEYS)
            if (block_seen(a, r, BLOCK_KEYS, a->pos + i, a->pos + i)) block[call.blocks[i]++] = r;
        most = larger(most, call.blocks[i]);
    }
    call.splits = ceil_div(most, SPLIT_BLOCKS);
    while (call.heads > 8 && call.heads % 2 == 0 && call.units * call.splits < 4 * p->threads) {
        call.heads /= 2;   // there would be too few tasks
        call.units *= 2;
    }
    int all = call.units * call.splits, heads = a->n * a->n_head;
    call.missing = arena_take(arena, heads, sizeof *call.missing);
    call.partials = arena_take(arena, (size_t)heads * call.splits, call.size * sizeof(float));
    if (!arena->base) return;
    for (int i = 0; i < a->n * call.units; i++) atomic_init(&call.missing[i], call.splits);
    // long runs of memory, but four tasks a thread
    call.task_splits = larger(all / (4 * p->threads), 1);
    parallel(p, few_task, &call, ceil_div(all, call.task_splits));
}

static void attention(Pool *p, Arena *arena, const Attention *a) {
    size_t mark = arena->used;
    if (a->n <= FEW) attend_few(p, arena, a);
    else attend_many(p, arena, a);
    arena->used = mark;
}

// ---- the memory of recurrent mixers: what plain_memory computes, fast ----
//
// Prefill and decode are one recurrence. V vectors hold rows of a strip side by side in their
// lanes, over all tokens of the chunk, and these rows stay in L1. A token needs S three times: to
// ask for the value under its key (S k), to write, and to read for its query (S q). One pass over
// the columns of S does all three, where token t asks for the next token. For one row, with its v:
//
//   write = (v - g asked) b          asked = ask of the token before; for the first token S k
//   for each j:   S[j] = g S[j] + write k[j]    out += S[j] q[j]    ask += S[j] k_next[j]
//
// S has yet to decay for the next token, so `asked` is multiplied by g; in KDA (by_column), where g
// is a vector, k_next is. A token costs 4 dk dv multiply-adds, 65,536 for 128 x 128. The chunked
// (WY) form takes 70,000 with chunks of 64, and a triangular inverse.
INLINE void fast_memory(Session *s, const Layer *w, Strip a, bool asks, bool by_column) {
    enum { V = 4 };
    const Config *c = &s->m->config;
    int strips = delta_strips(c), h = a.i / strips, r = a.i % strips * DELTA_ROWS, dk = c->dk;
    int each = by_column ? dk : 1;   // decays of a head
    HeadInputs in = head_inputs(s, w, h, a.t);
    size_t step = in.step;
    float *state = a.state;
    for (int end = r + DELTA_ROWS; r < c->dv && r < end; r += V * LANES, state += V * LANES) {
        size_t bytes = (c->dv - r < V * LANES ? c->dv - r : V * LANES) * sizeof(float);
        const float *q = in.q, *k = in.k, *value = in.v + r;
        const float *g = s->decay + ((size_t)a.t * c->n_value + h) * each;
        vf asked[V] = {{0}};
        for (int j = 0; asks && j < dk; j++)
            UNROLL for (int v = 0; v < V; v++)
                asked[v] += load_f32(state + j * DELTA_ROWS + v * LANES) *
                            (by_column ? k[j] * g[j] : k[j]);
        for (int i = a.t; i < a.end; i++, q += step, k += step, value += step) {
            const float *next = i + 1 < a.end ? k + step : k;
            const float *next_g = i + 1 < a.end ? g + (size_t)c->n_value * each : g;
            size_t at = (size_t)i * c->n_value + h;
            vf write[V] = {{0}}, out[V] = {{0}}, ask[V] = {{0}};
            prefetch_l1(q + 2 * step, dk * sizeof *q);
            prefetch_l1(k + 2 * step, dk * sizeof *k);
            memcpy(write, value, bytes);
            UNROLL for (int v = 0; v < V; v++) {
                if (!asks) out[v] = write[v] * w->skip[h];
                write[v] = (write[v] - (by_column ? asked[v] : asked[v] * *g)) * s->strength[at];
            }
            for (int j = 0; j < dk; j++)
                UNROLL for (int v = 0; v < V; v++) {
                    float *place = state + j * DELTA_ROWS + v * LANES;
                    vf row = load_f32(place) * g[by_column ? j : 0] + write[v] * k[j];
                    store(place, row);
                    out[v] += row * q[j];
                    if (asks) ask[v] += row * (by_column ? next[j] * next_g[j] : next[j]);
                }
            g = next_g;
            memcpy(asked, ask, sizeof ask);
            memcpy(s->att + at * c->dv + r, out, bytes);
        }
    }
}

static void memory_strip(Session *s, const Layer *w, Strip a) {   // one copy for each kind
    if (w->mixer == MIX_SPACE) fast_memory(s, w, a, false, false);
    else if (s->m->config.kda) fast_memory(s, w, a, true, true);
    else fast_memory(s, w, a, true, false);
}

// ---- 37. AMX ----
//
// Xeons have AMX since 2023. Here a tile is a register of 16 rows of 64 bytes, or its contents. One
// instruction multiplies 16 x 32 by 32 x 16 bf16 numbers, with float sums, in 16 cycles. Block
// formats become bf16, scales and offsets included, and so do their activations, which is closer to
// exact than int8. A float is the sum of three bf16 parts, an f16 of two. f32 weights take the six
// largest of nine products, f16 weights four, with two parts (17 bits) of each activation, bf16
// weights two. 2 x 2 tiles share their operands: one load per product.

#ifdef SIMD_AMX
#include <sys/syscall.h>
enum { AMX_DEPTH = 2048, AMX_FLOATS = 512,   // a panel's depth: of block formats, of floats
       AMX_TOKENS = MAX_TOKENS, AMX_KEYS = 128, TILE_BYTES = 1024, MAX_PARTS = 3 };

static bool amx_allow(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }   // asks Linux

// Palette 1: eight tile registers with 64 bytes in each of 16 rows. It is a constant because gcc
// thinks that only its first 8 bytes are read, and would leave out stores to the rest.
static const struct { uint8_t palette[16]; uint16_t row_bytes[16]; uint8_t rows[16]; } tile_config =
    {{1}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
static void amx_use(bool on) {
    if (on) _tile_loadconfig(&tile_config);
    else _tile_release();
}

// the number of bf16 parts of a weight, and of an activation that meets it
static int weight_parts(const Matrix *w) {
    if (w->type == QUANT_F32) return 3;
    return w->type == QUANT_F16 ? 2 : 1;
}
static int act_parts(const Matrix *w) { return w->type == QUANT_BF16 ? 2 : weight_parts(w); }

typedef struct { uint16_t x[AMX_TOKENS][32]; } AmxActs;   // one part of 32 activations: two tiles

INLINE void store_bf16(void *to, vf lo, vf hi) {
    store(to, (vf)_mm512_cvtne2ps_pbh((__m512)hi, (__m512)lo));
}
INLINE vf upper_bits(vf x) {   // rounded to the nearest bf16
    typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
    vu bits = (vu)x;
    return (vf)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}
// stores 32 floats as sums of `parts` bf16, `next` bytes apart; each rounds what earlier ones leave
INLINE void store_parts(void *to, size_t next, int parts, vf lo, vf hi) {
    for (int p = 0; p < parts; p++, lo -= upper_bits(lo), hi -= upper_bits(hi))
        store_bf16((char *)to + p * next, lo, hi);
}

// packs to AmxActs [count/32][parts], with zeros behind
static void amx_pack(const Matrix *w, const float *x, int count, int token, void *acts) {
    AmxActs *a = acts;
    for (; count > 0; count -= 32, x += 32, a += act_parts(w)) {
        float edge[32] = {0};
        const float *from = count < 32 ? memcpy(edge, x, count * sizeof *x) : x;
        store_parts(a->x[token], sizeof *a, act_parts(w), load_f32(from), load_f32(from + 16));
    }
}

// Copies x [16][width] to [width/32][parts] tiles. A tile is 32 columns, in pairs: [16][16][2].
static void amx_columns(const float *x, int width, int parts, char *to) {
    for (int i = 0; i < width; i += 32) {
        uint16_t rows[MAX_PARTS][TILE][32];
        for (int k = 0; k < TILE; k++)
            store_parts(rows[0][k], sizeof *rows, parts, load_f32(x + k * width + i),
                        load_f32(x + k * width + i + 16));
        for (int p = 0; p < parts; p++, to += TILE_BYTES) transpose(rows[p], 16, 16, to);
    }
}

// decodes up to 256 float weights of 16 rows to tiles [8][parts]
static void amx_floats(const Matrix *w, int64_t r, int64_t k, int count, char *to) {
    float x[TILE][256];
    if (count < 256) memset(x, 0, sizeof x);
    for (int j = 0; j < TILE; j++) {
        prefetch_l2(weight_at(w, r + TILE + j, k), formats[w->type].bytes);   // the panel below
        quant_dequantize(w->type, weight_at(w, r + j, k), x[j], count);
    }
    amx_columns(x[0], 256, weight_parts(w), to);
}

// 16 weights, which are a pair from each of 8 rows; the first is row `from` of d and m [16]
INLINE vf pair_weights(const int8_t *q, const float *d, const float *m, int from) {
    __m512i row = (__m512i)((vi){0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7} + from);
    __m512 v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)q)));
    return (vf)_mm512_fmadd_ps(v, _mm512_permutexvar_ps(row, _mm512_loadu_ps(d)),
                               _mm512_permutexvar_ps(row, _mm512_loadu_ps(m)));
}

// Decodes 256 weights of 16 rows to 8 tiles. They are transposed as codes, which are fewer bytes:
// 16 codes from each of 8 rows are 8 x 8 pairs, which interleaving rows i and i + 4 three times
// transposes. A tile has a group of weights, and 8 of its 16 rows have half a group.
static void amx_block(const Matrix *w, int64_t r, int64_t k, char *to) {
    _Alignas(64) int8_t q[2][8][256];            // codes of rows 0 to 7, of rows 8 to 15
    _Alignas(64) int8_t pairs[2][4][8][4][16];   // pairs i of half h: [h % 4][i][h / 4], of 8 rows
    _Alignas(64) float rows[TILE][2][16];        // each row's d and m
    _Alignas(64) float scales[2][16][TILE];      // the same, transposed
    const Format *f = &formats[w->type];
    const uint8_t *b = weight_at(w, r, k);
    size_t next = w->cols * f->bytes / 256;
    for (int j = 0; j < TILE; j++, b += r + j < w->rows ? next : 0) {
        prefetch_l2(b + TILE * next, f->bytes);   // a row of the panel below
        quant_decode(w->type, b, w->cols - k, q[j / 8][j % 8], rows[j][0], rows[j][1]);
    }
    transpose(rows, 32, f->offsets ? 32 : 16, scales);
    for (int c = 0; c < 8; c++) {   // 64 codes of 8 rows
        __m512i v[4][8];
        UNROLL for (int i = 0; i < 8; i++) v[0][i] = _mm512_loadu_si512(q[c / 4][i] + c % 4 * 64);
        UNROLL for (int step = 0; step < 3; step++)
            UNROLL for (int i = 0; i < 8; i++)
                v[step + 1][i] = i % 2 ? _mm512_unpackhi_epi16(v[step][i / 2], v[step][i / 2 + 4])
                                       : _mm512_unpacklo_epi16(v[step][i / 2], v[step][i / 2 + 4]);
        UNROLL for (int i = 0; i < 8; i++)
            _mm512_storeu_si512(pairs[c / 4][i / 4 * 2 + c % 4 / 2][c % 2 * 4 + i % 4], v[3][i]);
    }
    for (int h = 0; h < 16; h++) {   // half a group
        const float *d = scales[0][h], *m = f->offsets ? scales[1][h] : rows[0][1];   // all -0.0f
        UNROLL for (int i = 0; i < 8; i++, to += 64)
            store_bf16(to, pair_weights(pairs[0][h % 4][i][h / 4], d, m, 0),
                       pair_weights(pairs[1][h % 4][i][h / 4], d, m, 8));
    }
}

static void amx_decode(const Matrix *w, int64_t r, int64_t k, int depth, void *panel) {
    char *to = panel;
    for (int i = 0; i < depth; i += 256, to += 8 * weight_parts(w) * TILE_BYTES)
        if (formats[w->type].block) amx_block(w, r, k + i, to);
        else amx_floats(w, r, k + i, smaller(depth - i, 256), to);
}

// out[2 * i + j] = the 16 x 16 products of rows 16 i .. of a and the columns at b + j * next, added
// to out if `adds`. a and b are `deep` tiles, of some parts each. Part i of a number is about 2^-8i
// of it, so parts i of a and j of b meet if i + j < order. out[2] NULL: a has 16 rows.
INLINE void amx_product(const AmxActs *a, int a_parts, const void *b, int b_parts, size_t next,
                        int deep, int order, bool adds, float *const out[4]) {
    const char *columns = b;
    if (adds) {
        _tile_loadd(0, out[0], 64);
        _tile_loadd(1, out[1], 64);
        _tile_loadd(2, out[2], 64);
        _tile_loadd(3, out[3], 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < deep; k++, a += a_parts, columns += b_parts * TILE_BYTES)
        for (int j = 0; j < b_parts; j++) {
            int count = order - j < a_parts ? order - j : a_parts;
            for (int m = 0; m < count; m++) {
                const char *y = columns + j * TILE_BYTES;
                int i = j % 2 ? m : count - 1 - m;   // to and fro: the tile loaded last is reused
                bool loads = m > 0 || j % 2 == 0;
                if (loads) _tile_loadd(4, a[i].x, 64);
                if (m == 0) _tile_loadd(6, y, 64);
                _tile_dpbf16ps(0, 4, 6);
                if (m == 0) _tile_loadd(7, y + next, 64);
                _tile_dpbf16ps(1, 4, 7);
                if (!out[2]) continue;
                if (loads) _tile_loadd(5, a[i].x[TILE], 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    _tile_stored(0, out[0], 64);
    _tile_stored(1, out[1], 64);
    if (!out[2]) return;
    _tile_stored(2, out[2], 64);
    _tile_stored(3, out[3], 64);
}

static void amx_multiply(const Product *p, vf *sum) {
    const Matrix *w = p->job->w;
    float *panel_0 = (float *)sum, *panel_1 = panel_0 + AMX_TOKENS * TILE;
    bool more = p->t + TILE < p->job->n;   // the batch has more than 16 tokens
    float *out[] = {panel_0, panel_1, more ? panel_0 + TILE * TILE : NULL, panel_1 + TILE * TILE};
    amx_product(p->acts, act_parts(w), p->panel, weight_parts(w), amx_tile(w)->panel_bytes,
                (p->depth + 31) / 32, 3, false, out);
}

#define AMX_TILE(deep, acts, parts) {.tokens = AMX_TOKENS, .step = 256, \
    .depth = deep, .task_rows = 256, .act_bytes = 8 * acts * sizeof(AmxActs), \
    .panel_bytes = deep / 32 * parts * TILE_BYTES, .pack = amx_pack, .decode = amx_decode, \
    .multiply = amx_multiply}
static const Tile *amx_tile(const Matrix *w) {
    static const Tile tiles[] = {AMX_TILE(AMX_DEPTH, 1, 1), AMX_TILE(AMX_FLOATS, 2, 2),
                                 AMX_TILE(AMX_FLOATS, 3, 3)};   // blocks; f16 and bf16; f32
    return &tiles[act_parts(w) - 1];
}

// In attention each number is the sum of two bf16, and three of their products are still four times
// as fast as floats. Keys and values, f16, lose nothing; queries and weights keep 17 bits.
static void amx_queries(const float *q, int width, void *to) { amx_columns(q, width, 2, to); }

// Packs keys to AmxActs [n/32][hd/32][2] and values, transposed to [vd][n], to AmxActs
// [vd/32][AMX_KEYS/32][2], which lie behind the room for AMX_KEYS keys.
static void amx_keys(const Attention *a, const KeyBlock *b) {
    int hd32 = up_to_32(a->hd), vd32 = up_to_32(a->vd), keys = up_to_32(b->keys);
    float lo[32][TILE], hi[32][TILE];
    AmxActs *to = b->packed, *values = to + AMX_KEYS / 32 * hd32 / 32 * 2;
    for (int j = 0; j < keys; j += 32)
        for (int e = 0; e < hd32; e += 32, to += 2)
            for (int i = 0; i < 32; i++) {
                const float *x = b->k + (j + i) * hd32 + e;
                store_parts(to->x[i], sizeof *to, 2, load_f32(x), load_f32(x + 16));
            }
    for (int e = 0; e < vd32; e += 32, values += AMX_KEYS / 32 * 2)
        for (int j = 0; j < keys; j += 32) {
            transpose(b->v + j * vd32 + e, vd32, 32, lo);
            transpose(b->v + (j + 16) * vd32 + e, vd32, 32, hi);
            to = values + j / 32 * 2;
            for (int i = 0; i < 32; i++)
                store_parts(to->x[i], sizeof *to, 2, load_f32(lo[i]), load_f32(hi[i]));
        }
}

// a[from], b[from], a[from+1], b[from+1] .. b[from+7]
INLINE vf interleave(vf a, vf b, int from) {
    __m512i at = (__m512i)((vi){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23} + from);
    return (vf)_mm512_permutex2var_ps((__m512)a, at, (__m512)b);
}

// attends for two query tiles at once, because a product is 2 x 2 tiles
static void amx_attend(const Attention *a, const KeyBlock *b, QueryTile *q) {
    float s[2][AMX_KEYS][TILE] __attribute__((aligned(64)));
    uint32_t weights[2][AMX_KEYS / 32][2][TILE][TILE];
    int deep = up_to_32(a->hd) / 32, keys = up_to_32(b->keys);
    size_t next = (const char *)q[1].q - (const char *)q[0].q;
    const AmxActs *x = b->packed, *values = x + AMX_KEYS / 32 * deep * 2;
    for (int j = 0; j < keys; j += 32, x += deep * 2) {
        float *out[] = {s[0][j], s[1][j], s[0][j + 16], s[1][j + 16]};
        amx_product(x, 2, q[0].q, 2, next, deep, 2, false, out);
    }
    for (int t = 0; t < 2; t++) {
        tile_softmax(a, b, &q[t], s[t][0]);
        memset(s[t][b->keys], 0, (keys - b->keys) * sizeof s[t][0]);
        for (int j = 0; j < keys; j += 2) {
            vf x = load_f32(s[t][j]), y = load_f32(s[t][j + 1]);
            store_parts(weights[t][j / 32][0][j / 2 % 16], TILE_BYTES, 2, interleave(x, y, 0),
                        interleave(x, y, 8));
        }
    }
    for (int e = 0; e < a->vd; e += 32, values += AMX_KEYS / 32 * 2) {
        float *out[] = {q[0].out + e * TILE, q[1].out + e * TILE,
                        q[0].out + (e + 16) * TILE, q[1].out + (e + 16) * TILE};
        amx_product(values, 2, weights[0], 2, sizeof weights[0], keys / 32, 2, true, out);
    }
}

static const AttentionTile amx_attention = {.keys = AMX_KEYS, .task_queries = 512,
    .pack_queries = amx_queries, .pack_keys = amx_keys, .attend = amx_attend};
#else   // pool->amx is false
static const Tile *amx_tile(UNUSED const Matrix *w) { return NULL; }
#endif
#endif   // LLM_PLAIN: sections 28 to 37

// ---- 38. the GPU ----

#if defined(LLM_CUDA)
#define GPU_NAME "cuda"
#include "metal.c"
#elif defined(LLM_METAL)
#define GPU_NAME "metal"
#include "metal.c"
#else
#define GPU_NAME ""
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
static int gpu_attach(Session *s) { return 0; }
static void gpu_open(Session *s) {}
static void gpu_close(Session *s) {}
static bool gpu_forward(Session *s, const int32_t *ids, int n, int pos, int first) { return false; }
static bool gpu_logits(Session *s, int i, int n) { return false; }
static bool gpu_fetch(Session *s, void *p, size_t n, Error *e) { return true; }
static void gpu_store(Session *s, bool states) {}
static bool gpu_nextn(Session *s, int b, const int32_t *ids, int n, int pos) { return false; }
static bool gpu_best(const Session *s, int32_t *id, double *chance) { return false; }
static bool gpu_copy(Session *s, float *to, const float *from, size_t n) { return false; }
static UNUSED double gpu_rate(Session *s, void *p, size_t n) { return 0; }
static UNUSED double gpu_bytes(const Session *s) { return 0; }
static UNUSED int gpu_layers(const Session *s) { return 0; }
#pragma GCC diagnostic pop
#endif

// ---- 39. candidates of the sampler ----
//
// To add a stage, write it like those of section 9, and call it in sample, which has about top-k
// candidates. If it lowers logits by id, its ids belong into Draw; if it raises some, or needs all,
// all become candidates. Give it a field at the end of Sampling, in which 0 is off, and in Part VI
// a default in main, a row of OPTIONS and, if files may ask for it, one in sampling_defaults and
// print_file's keys. Then add a line to test_sampler_stages of test.c (README: order of stages).

static int compare_ids(const void *a, const void *b) {   // of two candidates
    int32_t x = ((const Candidate *)a)->id, y = ((const Candidate *)b)->id;
    return (x > y) - (x < y);
}
static Candidate *find_candidate(Candidate *c, size_t n, int32_t id) {
    return bsearch(&(Candidate){.id = id}, c, n, sizeof *c, compare_ids);
}

static int best_first(const void *a, const void *b) {   // ties: the lower id
    const Candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

// A candidate not worse than c[k - 1], the k-th best of the last sort, moves behind the first k.
// When there are k more, all 2k are sorted and the k best stay: about n log k steps in place.
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

static void find_best(Best *best, const float *logits, size_t n) {   // of each BEST_IDS
    enum { WIDE = 32 };   // logits that the compiler compares at once
    for (size_t from = 0; from < n; from += BEST_IDS, best++) {
        float top[WIDE], most = -3e38f;
        for (int j = 0; j < WIDE; j++) top[j] = most;
        for (size_t i = from; i < from + BEST_IDS && i < n; i += WIDE)
            for (int j = 0; j < smaller(WIDE, n - i); j++)
                top[j] = logits[i + j] > top[j] ? logits[i + j] : top[j];
        for (int j = 0; j < WIDE; j++) most = top[j] > most ? top[j] : most;
        best->logit = most;
    }
}

// Returns the best of each BEST_IDS logits. A GPU has made those of the first n_best rows of
// s->logits, row 0 last; those of other logits are found, and put where none of a GPU's are.
static const Best *session_best(Session *s, const float *logits) {
    size_t n_vocab = s->m->config.n_vocab, row = 0;
    while (row < s->n_best && logits != s->logits + row * n_vocab) row++;
    Best *best = s->best + (FEW - row) * best_parts(n_vocab);
    if (row == s->n_best) find_best(best, logits, n_vocab);
    return best;
}

// At least k logits reach the k-th best of d->best, recent ones as they have fallen, and few more:
// about 43 for k = 40. Of BEST_IDS whose best one does not reach it none is read.
static size_t sample_candidates(Candidate *c, const Draw *d, int k) {
    const float *l = d->logits;
    size_t parts = best_parts(d->n), most = k + d->banned.n, kept = 0;   // banned: may be best
    float least = -INFINITY;
    for (size_t i = 0; i < parts; i++) c[i] = (Candidate){d->best[i].logit, i};
    for (size_t i = 0; i < d->recent.n; i++) {
        size_t id = d->recent.id[i], part = id / BEST_IDS;
        if (id < d->n && l[id] >= d->best[part].logit) c[part].logit = lowered(l[id], d->penalty);
    }
    if (k > 0 && most <= parts) {
        sort_top(c, parts, most);
        if (c[most - 1].logit > -3e38f) least = c[most - 1].logit;
    }
    for (size_t i = 0, end; i < d->n; i = end) {
        end = smaller(i + BEST_IDS, d->n);
        for (size_t j = i; j < end && d->best[i / BEST_IDS].logit >= least; j++)
            if (!(l[j] < least)) c[kept++] = (Candidate){isnan(l[j]) ? -INFINITY : l[j], j};
    }
    return kept;
}

// ---- 40. guesses ----
//
// Reading the weights takes most of a pass, and up to FEW tokens read them once. So we run guesses
// of the next tokens together with the last one. If the text has had its last three ids before, we
// guess what followed them there (prompt lookup): answers often quote what they were given.
//
//   text     the cat sat on the mat. And the cat sat
//   pass                                     sat  on   the   mat      three guesses, four rows
//   drawn                                    on   the  rug            "mat" falls: no draw
//
// Each row is sampled as ever. The row of a guess that stands, because it was drawn, has the floats
// that it would have without guesses, so the text is the same. (arXiv 2302.01318: the distribution
// is.)

// Writes a guess of `count` ids behind the text [n]: those that followed its last three ids where
// these stood last. False: they are new. The guess may overlap what it copies.
static bool guess_ids(Session *s, int n, int count) {
    enum { BACK = 1 << 16 };   // ids: to search on would take longer than a guess saves
    int32_t *text = s->history.id;
    for (int i = n - 1; i >= 3 && i >= n - BACK; i--) {
        if (text[i - 1] != text[n - 1] || memcmp(text + i - 3, text + n - 3, 2 * sizeof *text))
            continue;
        for (int k = 0; k < count; k++) text[n + k] = text[i + k];
        return true;
    }
    return false;
}

// How many guesses, at most `most`, fit into a chunk behind those of n tokens not yet evaluated?
static int guesses_fit(const Session *s, int n, int most) {
    const Model *m = s->m;
    int start = s->history.n, end = smaller(n + most, start + chunk_size(s, start, FEW, false));
    if (m->config.n_exact) end = smaller(end, m->config.n_exact);
    if (m->pos_embd.data) end = smaller(end, m->pos_embd.rows);
    return end > n ? end - n : 0;
}

// the guesses of a pass
typedef struct {
    int run, stood;            // how many run; how many of them are what was drawn
    bool looked_up, drafted;   // they come from the text; nextn blocks were asked for them
    int32_t hint;              // lookup's first guess, even if it does not run; -1: none
    int most;                  // guesses by lookup that may run
} Guesses;

// Writes guesses of nextn blocks behind the text until it gets unlikely that all stand. Returns how
// many. If there are several blocks, each makes one guess.
static int draft_ids(Session *s, int n, int most) {
    int n_block = s->n_cache - s->m->config.n_layer;
    int32_t *text = s->history.id;
    double chance = 1;   // that all stand
    if (n_block > 1) most = smaller(most, n_block);
    nextn_follow(s, text, n);   // the last row makes the first guess
    for (int k = 0; k < most; k++) {
        int block = n_block > 1 ? k : 0;
        int from = block ? n : n + k - 1;   // the first guess that the block has not seen
        if (k) nextn_forward(s, block, text + from, n + k - from, from);
        text[n + k] = nextn_best(s, &chance);
        if (!(chance >= 0.4)) return k;   // nor if it is NaN
    }
    return most;
}

// May nextn blocks guess? `loss` is what guesses cost lately, less what they saved, at least -32: a
// token is 16, a try costs 1, each guess that runs 2. At a loss of 8 they rest for 4, 12, 28, ...
// up to 512 passes, with a try or two in between, until a guess stands.
static bool nextn_pays(Session *s, const Guesses *g) {
    if (g->drafted) s->loss = fmax(s->loss + 1 + 2 * g->run - 16 * g->stood, -32);
    if (g->drafted && g->stood) s->pause = 0;
    if (s->loss >= 8) {
        s->rest = s->pause = smaller(2 * s->pause + 4, 512);
        s->loss = 6;
    }
    return s->n_cache > s->m->config.n_layer && (s->rest == 0 || s->rest-- == 0);
}

// Writes the next guesses behind the text, n tokens of the history; `left` ids may still follow
// (-1: any number). By lookup, if all stood, about twice as many may run (1, 3, 7), else as many as
// stood. Where none may run, the next hint tells when the text repeats itself. Where lookup has
// nothing to run, nextn blocks guess.
static void guess_next(Session *s, Guesses *g, int n, int left) {
    bool hit = s->history.id[n - 1 - g->stood] == g->hint;   // as first of those drawn
    if (g->looked_up && g->stood < g->run) g->most = g->stood;
    else if (g->hint >= 0 && !hit) g->most = 0;
    else if (g->hint >= 0) g->most = smaller(2 * g->most + 1, s->o.draft);
    int most = guesses_fit(s, n, left < 0 ? s->o.draft : smaller(s->o.draft, left - 1));
    int run = smaller(g->most, most);
    bool room = tokens_room(&s->history, n + FEW), found = room && guess_ids(s, n, run + 1);
    g->hint = found ? s->history.id[n] : -1;
    g->looked_up = found && run > 0;
    g->drafted = nextn_pays(s, g) && room && !g->looked_up && most > 0;
    if (s->rest && s->nextn_pos < n - 32) s->nextn_pos = n - 32;   // a long rest gives up rows
    if (!g->looked_up) run = g->drafted ? draft_ids(s, n, most) : 0;
    g->run = run;
}

// session_generate with guesses
static bool generate_guessing(Session *s, const int32_t *ids, int n, int n_predict,
                              OnToken on_token, Error *e) {
    int made = 0;
    bool ends = n_predict == 0;
    Guesses g = {.most = 1, .hint = -1};
    Request r = {.ids = ids, .n = n, .from = n - 1};
    for (;;) {
        bool ok = session_run(s, r, e);
        if (!ok && g.run) s->history.n = smaller(s->history.n, n);
        g.stood = 0;
        for (int k = 0; ok && !ends && k == g.stood && k <= g.run; k++) {
            const float *row = s->logits + (size_t)k * s->m->config.n_vocab;
            int32_t *next = s->history.id + n;
            s->history.n = n++;   // the penalty sees no guesses; later rows of caches nobody sees
            ok = check_row(row, s->m->config.n_vocab, false, n - 2, e);
            if (!ok) break;
            int32_t id = session_sample(s, row);
            ends = token_is_eog(s->m->tokenizer, id) || !on_token.fn(on_token.ctx, id) ||
                   ++made == n_predict;
            if (k < g.run && *next == id) g.stood++;
            *next = id;
        }
        if (!ok || ends) return ok;
        guess_next(s, &g, n, n_predict < 0 ? -1 : n_predict - made);
        r = (Request){.ids = s->history.id, .n = n + g.run, .from = n - 1, .guesses = g.run};
    }
}

// ==== Part VI: main =============================================================================
//
// The program around the library. Section 41 has Cli, which is all of a call, signals, options and
// texts; 42 the messages of a chat and the line that a user types; 43 prompts, printing and modes.
//
// Read run and main at its end first: main sets defaults and handlers of signals; parse_options
// stores what OPTIONS names; run loads model, template and prompt, opens the session, and calls one
// mode: print_info, a run_ function, or reply, which hands each new token to print_token, as a chat
// does. At last main prints notes and statistics, or the error.
//
// Results go to standard output; errors, notes, progress and, if that is a terminal, the line that
// is edited to standard error. A function that fails puts one line into cli->e and returns false,
// which ends the program or, on a terminal, a turn of a chat. Exit codes: 0; 1 if something failed;
// 2 if the options make no sense; 130 after Ctrl-C, or SIGTERM or SIGHUP in a chat that waits.

// ---- 41. the command line ----

#ifndef LLM_NO_MAIN
#include <poll.h>
#include <termios.h>

// bytes that grow by doubling; behind them stands a NUL, unless n was made smaller
typedef struct { char *s; size_t n, room; } Text;

// the message that a user types, while chat_listen reads it
typedef struct {
    size_t from, at;                 // bytes that stay, before the cursor
    size_t entry;                    // which text of cli->typed is edited
    int width, height, fold;         // of the page; what the screen's width may have become
    int top, row;                    // rows above the page; the cursor's row on it, or NONE
    int next;                        // a key that was read ahead, or NONE
    bool shown, pasted, done;        // anything is; a paste has begun; all is said
    bool terminal, edits;            // the input is a terminal; llm edits the text, key by key
} Line;

// all of one call of the program
typedef struct {
    // What was asked for: main sets defaults, parse_options the rest; the model may change `o`.
    const char *model, *prompt, *file, *logits, *ppl, *gpu, *system, *think, *template_file;
    bool help, version, chat, answer_once, render, special, hide_prompt, tokenize, embed;
    bool info, verbose, chat_by_default;   // the last: a chat, since nothing was asked for
    uint64_t given;                  // bit i: OPTIONS[i] was
    int n_predict;
    Tokens bench;                    // P and N
    Options o;
    // What it takes to answer: main sets the first two lines, run the others, step by step.
    bool dumb, dims;                 // a terminal takes no escape sequences; it dims thoughts
    int failure;                     // the exit code if something fails
    Error e;
    Model m;
    Text template, text;             // the model's or --template's; PROMPT and what the file holds
    size_t file_at;                  // where the latter begins
    Tokens ids;                      // of the prompt, from --tokens, or what --bench runs
    Session s;
    void *work;                      // of one mode: a piece of text, an embedding, ...
    size_t slices;                   // of `work`, which --bench reads
    FILE *out;                       // what is written: stdout, a device, or `unfinished`
    char place[PATH_MAX];            // where `unfinished` will be, behind all links
    // One answer: chat_ids and reply begin it, print_token adds to it.
    Detokenizer detokenizer;
    Text answer;                     // in a chat
    const char *thinking;            // what ends the thoughts that it is in, or NULL
    bool header;                     // it is in the name of a channel
    double began;                    // when the first token came; 0: not yet
    // Statistics of all answers: tokens of prompts, of these found in the cache; new ones, of these
    // evaluated, in so many passes; seconds before and after first ones.
    size_t n_prompts, n_reused, n_new, n_decoded, n_passes;
    double prefill, decode;
    struct { double start; size_t before; bool shown; } progress;   // before: n_prompts so far
    // A chat: chat_open begins it, run_chat goes on with it.
    ChatMessage *message;            // [n_message], each owns its content
    size_t n_message;
    Text said, shown;                // what the user types; how a terminal shows it
    Text typed[101];                 // before, and now: text n_typed, modulo 101
    size_t n_typed;
    Line line;
    bool outgrown;                   // the chat is longer than its window
} Cli;

// Ctrl-C adds STOP, which ends what is under way. In a chat that is an answer or a half typed text,
// and then this is 0 again. From LEAVE on, which is two of them or a signal, the chat ends.
enum { STOP = 1, LEAVE = 2, HANG_UP = 16 };
static volatile sig_atomic_t interrupted;
static volatile sig_atomic_t dimmed, edited, marked;   // thoughts, a line, pastes: signals undo it
static struct termios own_mode;   // of the terminal, where no line is edited
static int screen;                // the terminal that shows the line
static char unfinished[PATH_MAX + 16];   // a file that is written: a signal removes it

static void terminal_undo(void) {   // by write, and not into a terminal that nobody reads
    struct pollfd to = {dimmed ? STDOUT_FILENO : screen, POLLOUT, 0};
    bool ready = (dimmed || marked) && poll(&to, 1, 100) > 0;
    const char *undo = dimmed ? "\033[0m" : "\033[?2004l";
    if (ready) (void)!write(to.fd, undo, strlen(undo));
    if (edited) tcsetattr(STDIN_FILENO, TCSANOW, &own_mode);
    dimmed = edited = marked = 0;
}

// SIGTERM and SIGHUP, where a line is edited, end the chat. SIGCONT, behind which the mode is a
// shell's, and SIGWINCH only end a wait. The others, and a third Ctrl-C, do what is their default
// once the terminal is as it was.
static void on_signal(int sig) {
    struct sigaction caught;
    int error = errno;
    if (sig == SIGINT && interrupted < LEAVE) interrupted += STOP;
    else if (edited && (sig == SIGTERM || sig == SIGHUP)) interrupted += HANG_UP;
    else if (sig == SIGCONT) edited = 0;
    else if (sig != SIGWINCH) {
        terminal_undo();
        if (sig != SIGTSTP) unlink(unfinished);
        sigaction(sig, &(struct sigaction){.sa_handler = SIG_DFL}, &caught);
        raise(sig);
        sigaction(sig, &caught, NULL);   // it was SIGTSTP, and llm goes on
    }
    errno = error;
}

// SIGBUS: the mapped file cannot be read, because someone cut it or the disk failed. SIGILL: llm
// was built for another CPU. As main may begin with an instruction that is not there, handlers are
// set before it; signal, unlike sigaction, takes no struct for such an instruction to fill.
static void on_fault(int sig) {
    const char *text = "llm: the model's file can no longer be read: was it truncated?\n";
    if (sig == SIGILL)
        text = "llm: this CPU lacks instructions that llm was built for: see README, `NATIVE=`\n";
    (void)!write(STDERR_FILENO, text, strlen(text));
    if (sig == SIGBUS) terminal_undo();
    _exit(1);
}
__attribute__((constructor)) static void catch_faults(void) {
    signal(SIGBUS, on_fault);
    signal(SIGILL, on_fault);
}

#define note(format, ...) fprintf(stderr, "note: " format "\n", ##__VA_ARGS__)

enum { SWITCH, TEXT, NUMBER, INTEGER, SEED, LIST, PAIR };
typedef struct {
    const char *usage;   // name and value
    int kind;
    size_t at;           // the field of Cli that holds the value
    double low, high;
    const char *help;    // NULL: another row's says it
} Option;

// To add an option: a field in Cli or Options, a row of the kind that the field's type has, the
// default in main, in check_options what it does not go with; a mode has its place in parse_options
// and in run. --help has at most 45 lines, as test.c checks.
#define AT(field) offsetof(Cli, field)
#define PICK(field) offsetof(Cli, o.sampling.field)
static const Option OPTIONS[] = {
    {"-m MODEL", TEXT, AT(model), 0, 0, "the model, and -p PROMPT the prompt, not as arguments"},
    {"-p PROMPT", TEXT, AT(prompt), 0, 0, NULL},
    {"-f FILE", TEXT, AT(file), 0, 0, "prompt from a file, - for stdin; behind PROMPT, if given"},
    {"-i", SWITCH, AT(chat), 0, 0, "chat, turn after turn; -f FILE goes on with a saved one"},
    {"--chat", SWITCH, AT(answer_once), 0, 0, "PROMPT through the template, one answer"},
    {"--system TEXT", TEXT, AT(system), 0, 0, "the system message of a chat; @FILE reads it"},
    {"--think on|off", TEXT, AT(think), 0, 0, "thoughts or none, where the template has a switch"},
    {"--template FILE", TEXT, AT(template_file), 0, 0, "a chat template in place of the model's"},
    {"--render", SWITCH, AT(render), 0, 0, "print what the model would see, and exit"},
    {"-n N", INTEGER, AT(n_predict), -1, INT_MAX, "tokens to generate (256; chats -1: no limit)"},
    {"-c N", INTEGER, AT(o.window), 1, INT_MAX, "attention window (the model's, at most 4096)"},
    {"-b N", INTEGER, AT(o.chunk), 1, 1 << 20, "tokens of a prefill chunk (512; NVIDIA to 2048)"},
    {"-t N", INTEGER, AT(o.threads), 1, 1024, "CPU threads (the CPUs this process may run on)"},
    {"--temp T", NUMBER, PICK(temp), -FLT_MAX, FLT_MAX, "temperature (0.8); 0 is greedy"},
    {"--top-k K", INTEGER, PICK(top_k), 0, INT_MAX, "the K likeliest tokens only (40); 0 all"},
    {"--top-p P", NUMBER, PICK(top_p), 0, 1, "the likeliest that hold a share P (0.95); 1 all"},
    {"--min-p P", NUMBER, PICK(min_p), 0, 1, "those at least P as likely as the best (0.05)"},
    {"--repeat-penalty R", NUMBER, PICK(repeat_penalty), FLT_MIN, FLT_MAX, "recent tokens; 1: off"},
    {"--repeat-last-n N", INTEGER, PICK(repeat_last_n), -1, INT_MAX, "how recent (64); -1: all"},
    {"--seed S", SEED, PICK(seed), 0, 0x1p64, "same seed, same text (from the clock)"},
    {"--keep N", INTEGER, AT(o.keep), 0, INT_MAX, "keep the first N tokens in sight, too"},
    {"--draft N", INTEGER, AT(o.draft), 0, FEW - 1, "most tokens guessed at once (7); 0: none"},
    {"--special", SWITCH, AT(special), 0, 0, "parse special tokens in PROMPT"},
    {"--no-display-prompt", SWITCH, AT(hide_prompt), 0, 0, "print the continuation alone"},
    {"--cpu", SWITCH, AT(o.cpu), 0, 0, "do not use the GPU (NVIDIA with libnvrtc, or Metal)"},
    {"--gpu N", TEXT, AT(gpu), 0, 0, "most layers on the GPU (all that fit); or block: README"},
    {"--tokenize", SWITCH, AT(tokenize), 0, 0, "print the token ids of PROMPT"},
    {"--tokens A,B,C", LIST, AT(ids), 0, INT_MAX, "token ids instead of PROMPT, as they are"},
    {"--logits FILE", TEXT, AT(logits), 0, 0, "write float32 logits of every token, - to stdout"},
    {"--embed", SWITCH, AT(embed), 0, 0, "print the pooled embedding of PROMPT"},
    {"--ppl FILE", TEXT, AT(ppl), 0, 0, "perplexity of a text"},
    {"--bench [P,N]", PAIR, AT(bench), 1, 1 << 24, "speed of P (512) tokens in, N (128) out"},
    {"--info", SWITCH, AT(info), 0, 0, "architecture, formats, memory plan; -v: all metadata"},
    {"-v", SWITCH, AT(verbose), 0, 0, NULL},
    {"-h", SWITCH, AT(help), 0, 0, NULL},
    {"--version", SWITCH, AT(version), 0, 0, NULL},
    {"--help", SWITCH, AT(help), 0, 0, "this page, also -h; -v: families, too; --version: llm 1.0"},
};

static void print_usage(bool families) {
    printf("usage: llm MODEL.gguf [PROMPT] [options]   completes PROMPT\n");
    for (const Option *o = OPTIONS; o < OPTIONS + COUNT(OPTIONS); o++)
        if (o->help) printf("  %-22s %s\n", o->usage, o->help);
    if (families) printf("families of models (* verified):\n");
    for (const Arch *a = ARCHS; families && a < ARCHS + COUNT(ARCHS); a++)
        if (!a->n_layer) printf("  %s\n", a->names);   // else another row has the same name
}

// Stores a value: a text, a number, or numbers with commas; in a LIST blanks part them, too, as
// --tokenize prints them. False: it is none, or out of range.
static bool parse_value(Cli *cli, const Option *o, const char *text) {
    void *at = (char *)cli + o->at;
    Tokens *list = o->kind >= LIST ? at : NULL;
    const char *blanks = list ? " \t\r\n" : "";
    bool comma;
    char *end;
    cli->given |= (uint64_t)1 << (o - OPTIONS);
    if (o->kind == SWITCH) *(bool *)at = true;
    if (o->kind == TEXT) *(const char **)at = text;
    if (o->kind < NUMBER) return true;
    if (list) list->n = 0;
    do {
        errno = 0;
        uint64_t integer = strtoull(text, &end, 10);
        double x = *text == '-' ? -(double)-integer : (double)integer;
        if (o->kind == NUMBER) x = strtof(text, &end);
        else if (errno) return false;
        if (end == text || isspace((uint8_t)*text) || !(x >= o->low && x <= o->high)) return false;
        if (o->kind == NUMBER) *(float *)at = x;
        if (o->kind == INTEGER) *(int *)at = x;
        if (o->kind == SEED) *(uint64_t *)at = integer;
        if (list && !tokens_add(list, x)) return fail(&cli->e, "out of memory");
        text = end + strspn(end, blanks);
        comma = list && *text == ',';
        if (comma) text += 1 + strspn(text + 1, blanks);
    } while (comma || (o->kind == LIST && text > end && *text));
    return !*text && (o->kind != PAIR || list->n == 2);
}

// the row of an option, also by the name that it has elsewhere, or with = behind its name; or NULL
static const Option *find_option(const char *name) {
    static const char *const names[] = {   // first ours
        "--gpu -ngl --n-gpu-layers --gpu-layers", "-m --model", "-p --prompt", "-c --ctx-size",
        "-n --n-predict --max-tokens", "-b --batch-size", "-f --file", "-t --threads", "-i -cnv",
        "--temp --temperature", "--seed -s", "--system -sys --system-prompt"};
    Str given = {name, strcspn(name, "=")};
    for (size_t i = 0; i < COUNT(names); i++)
        if (is(given, names[i])) given = (Str){names[i], strcspn(names[i], " ")};
    for (const Option *o = OPTIONS; o < OPTIONS + COUNT(OPTIONS); o++)
        if (is(given, o->usage)) return o;
    return NULL;
}

// Stores the option argv[*i]. If it takes a value, *i becomes that one's place.
static bool read_option(Cli *cli, char **argv, int *i) {
    static const char *const what[] = {
        [NUMBER] = "a number", [INTEGER] = "a whole number", [SEED] = "a whole number",
        [LIST] = "whole numbers and commas or blanks", [PAIR] = "two whole numbers and a comma"};
    const char *name = argv[*i], *value = argv[*i + 1];
    const Option *o = find_option(name);
    if (!o) return fail(&cli->e, "unknown option %s; see --help, and put -- before a PROMPT that "
                        "begins with -", name);
    if (!str_eq((Str){o->usage, strcspn(o->usage, " ")}, name))
        return fail(&cli->e, "unknown option %s: use %s, %s", name, o->usage,
                    o->help ? o->help : "see --help");
    if (cli->given >> (o - OPTIONS) & 1 && is(str(name), "-p -f --tokens --ppl"))
        return fail(&cli->e, "two prompts: %s is given twice", name);
    bool pair = value && (strchr(value, ',') || !value[strspn(value, "0123456789")]);
    if (o->kind == PAIR && !pair) value = "512,128";   // what comes next is something else
    else if (o->kind != SWITCH) ++*i;
    if (o->kind != SWITCH && !value) return fail(&cli->e, "%s needs a value; see --help", name);
    if (parse_value(cli, o, value)) return true;
    cli->failure = cli->e.text[0] ? 1 : 2;   // 1: out of memory
    return cli->failure == 2 &&
           fail(&cli->e, "%s: expected %s from %.10g to %.10g, not '%s': %s", o->usage,
                what[o->kind], o->low, o->high, value, o->help);
}

static bool uses_template(const Cli *cli) { return cli->chat || cli->answer_once || cli->render; }

// Do the options go together? They give so many prompts and lists of ids, and modes.
static bool check_options(Cli *cli, int texts, int modes) {
    bool measures = cli->bench.id || cli->info;   // these need no prompt
    if (modes > 1)
        return fail(&cli->e, "two modes: give one of -i, --chat, --render, --tokenize, --logits, "
                    "--embed, --ppl, --bench and --info");
    if (measures && texts)
        return fail(&cli->e, "--bench takes P,N, --info nothing: no PROMPT goes with these");
    if (cli->verbose && !cli->info) return fail(&cli->e, "-v is for --info");
    if (cli->gpu && cli->o.gpu_layers < 1 && !find_str(str(cli->gpu), "chain block"))
        return fail(&cli->e, "--gpu: expected a number of layers, or block, not '%s'", cli->gpu);
    if (cli->think && !find_str(str(cli->think), "on off"))
        return fail(&cli->e, "--think: expected on or off, not '%s'", cli->think);
    if (!uses_template(cli) && (cli->system || cli->think || cli->template_file))
        return fail(&cli->e, "--system, --think and --template are for -i, --chat and --render");
    if (uses_template(cli) && cli->ids.id)
        return fail(&cli->e, "-i, --chat and --render take text, not --tokens");
    if (texts > 1) return fail(&cli->e, "two prompts: give \"PROMPT\", -p, -f, --tokens or --ppl");
    if (!cli->model) return fail(&cli->e, "no MODEL.gguf given; see --help");
    return texts || cli->chat || cli->render || measures ||
           fail(&cli->e, "no PROMPT given; -f - reads it from standard input; see --help");
}

static bool parse_options(Cli *cli, int argc, char **argv) {
    const char *words[3] = {NULL, NULL, NULL}, **word = words;
    bool ended = false;   // behind -- no word is an option
    for (int i = 1, n = 0; i < argc; i++) {
        bool option = !ended && argv[i][0] == '-' && argv[i][1];
        if (!option && n < 3) words[n++] = argv[i];   // a third is one too many
        else if (option && !strcmp(argv[i], "--")) ended = true;
        else if (option && !read_option(cli, argv, &i)) return false;
    }
    if (!cli->model) cli->model = *word++;   // else -m gave it
    const char *file = cli->prompt || word[0] ? NULL : cli->file;   // behind PROMPT it is a part
    const bool source[] = {cli->prompt, word[0], word[1], file, cli->ids.id, cli->ppl};
    bool chats = cli->chat || cli->answer_once;   // which may also be rendered, or tokenized
    const bool mode[] = {cli->chat, cli->answer_once, cli->render && !chats,
                         cli->tokenize && !chats, cli->logits, cli->embed, cli->ppl,
                         cli->bench.id, cli->info};
    int prompts = 0, modes = 0;
    for (size_t i = 0; i < COUNT(source); i++)
        if (source[i]) prompts++;
    for (size_t i = 0; i < COUNT(mode); i++)
        if (mode[i]) modes++;
    if (word[0]) cli->prompt = word[0];
    cli->o.gpu_block = cli->gpu && !strcmp(cli->gpu, "block");
    bool number = cli->gpu && !cli->gpu[strspn(cli->gpu, "0123456789")];
    if (number) cli->o.gpu_layers = atoi(cli->gpu);
    if (cli->render && !prompts) cli->file = "-";
    if (!prompts && !modes && isatty(STDIN_FILENO)) cli->chat = cli->chat_by_default = true;
    if (cli->n_predict < -1) cli->n_predict = cli->chat || cli->answer_once ? -1 : 256;
    return cli->help || cli->version || check_options(cli, prompts, modes);
}

// puts s[n], which may be a part of the text itself where that has room, in place of a part
static bool text_replace(Cli *cli, Text *t, size_t from, size_t to, const char *s, size_t n) {
    size_t rest = t->n - to, size = from + n + rest;
    size_t room = size < t->room ? t->room : 2 * size + 1;
    char *more = room == t->room ? t->s : realloc(t->s, room);
    if (!more) return fail(&cli->e, "out of memory");
    if (rest) memmove(more + from + n, more + to, rest);
    if (n) memmove(more + from, s, n);   // s of nothing may be NULL
    *t = (Text){more, size, room};
    more[size] = 0;
    return true;
}

static bool text_add(Cli *cli, Text *t, const char *s, size_t n) {
    return text_replace(cli, t, t->n, t->n, s, n);
}

static bool text_ends(const Text *t, const char *with) {
    size_t n = strlen(with);
    return t->n >= n && !memcmp(t->s + t->n - n, with, n);
}

// Adds a file to a text, or standard input if the path is -. A BOM at its start and the newline at
// its end are no part of the text, but for --ppl. What is too long is not read to its end.
static bool read_file(Cli *cli, const char *path, Text *t) {
    FILE *f = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    if (!f) return fail(&cli->e, "%s: %s", path, strerror(errno));
    char part[4096];
    size_t n = fread(part, 1, 3, f);
    bool bom = n == 3 && !memcmp(part, "\xEF\xBB\xBF", 3) && path != cli->ppl;
    bool ok = bom || text_add(cli, t, part, n);
    while (ok && t->n <= TEXT_MAX && !feof(f) && (n = fread(part, 1, sizeof part, f)) > 0)
        ok = text_add(cli, t, part, n);
    if (ferror(f)) ok = fail(&cli->e, "%s: %s", path, strerror(errno));
    if (f != stdin) fclose(f);
    if (path != cli->ppl) t->n -= text_ends(t, "\r\n") ? 2 : text_ends(t, "\n");
    return ok;
}

static bool is_control(uint32_t c) { return c < ' ' || (c >= 127 && c < 160); }

// Opens what is to be written to a path: a device or a pipe itself, but a regular file stays as it
// is until output_close puts the one that is written beside it, `unfinished`, in its place.
static bool output_open(Cli *cli, const char *path) {
    const char *system = cli->system && *cli->system == '@' ? cli->system + 1 : NULL;
    const char *in[] = {"/dev/stdin", system, cli->template_file, cli->chat ? NULL : cli->file};
    char magic[4] = "";
    struct stat st, input;
    bool fresh = stat(path, &st) != 0;   // then it is made, to see where that is, and removed
    cli->out = stdout;
    *unfinished = 0;
    if (!strcmp(path, "-")) return true;
    cli->out = fopen(path, fresh || !S_ISREG(st.st_mode) ? "ab" : "rb+");
    if (!cli->out || fstat(fileno(cli->out), &st) || !S_ISREG(st.st_mode))
        return cli->out || fail(&cli->e, "%s: %s", path, strerror(errno));
    bool taken = fread(magic, 4, 1, cli->out) && !memcmp(magic, "GGUF", 4);
    for (size_t i = 0; i < COUNT(in); i++)   // a chat that -f began may be saved there
        if (in[i] && !stat(in[i], &input) && input.st_dev == st.st_dev)
            taken = taken || input.st_ino == st.st_ino;
    fclose(cli->out);
    if (taken)
        return fail(&cli->e, "%s: this is a model, or is read now: it is not overwritten", path);
    if (realpath(path, cli->place))
        snprintf(unfinished, sizeof unfinished, "%s.llm.%d", cli->place, (int)getpid());
    if (fresh) remove(cli->place);
    cli->out = fopen(unfinished, "wbx");
    if (!cli->out) return fail(&cli->e, "%s: %s", unfinished, strerror(errno));
    (void)!fchown(fileno(cli->out), st.st_uid, st.st_gid);   // if llm may give it to the old owner
    (void)!fchmod(fileno(cli->out), st.st_mode);
    return true;
}

// Puts the whole file in its place. If it is not ok or cannot be written, an old one stays there.
static bool output_close(Cli *cli, const char *path, bool ok) {
    FILE *f = cli->out;
    if (f == stdout) return ok;   // main looks for errors
    bool done = ok && !fflush(f) && !ferror(f);
    if (*unfinished) done = done && !fsync(fileno(f)) && !rename(unfinished, cli->place);
    if (ok && !done) fail(&cli->e, "%s: %s", path, strerror(errno));
    fclose(f);
    remove(unfinished);   // unless it has the other name now
    return done;
}

// Text that a user gives must be UTF-8; the library itself takes any bytes.
static bool check_utf8(Cli *cli, const Text *t) {
    for (size_t i = 0, used; i < t->n; i += used) {
        uint32_t character = utf8_decode(t->s + i, t->n - i, &used);
        if (!utf8_valid(character, used))
            return fail(&cli->e, "the text is not UTF-8: byte %zu is 0x%02x", i, (uint8_t)t->s[i]);
    }
    return true;
}

// ---- 42. conversations ----
//
// A chat is a list of messages. For each answer the model's own template writes all of them anew,
// and what the cache holds of that is reused. What the template or the model wrote may become
// control tokens, not what a user wrote. The answer becomes a message: what the template opened for
// it, <think> as a rule, and what the model wrote.

// what encloses a model's thoughts
static const struct { const char *open, *close; } THOUGHTS[] = {
    {"<think>", "</think>"}, {"[THINK]", "[/THINK]"}, {"<seed:think>", "</seed:think>"},
    {"<|channel>thought", "<channel|>"}, {"<|channel|>analysis<|message|>", "<|end|>"},
};
static const char MARKS[] = "<think> </think> [THINK] [/THINK] <seed:think> </seed:think> "
                            "<|channel> <channel|>";   // shown where thoughts cannot be dimmed
static const char FINAL[] = "<|channel|>final<|message|>";   // gpt-oss: here its answer begins

static void chat_clear(Cli *cli, size_t from) {   // forgets the messages from there on
    while (cli->n_message > from) free((char *)cli->message[--cli->n_message].content.s);
}

// appends a message, which takes the text over
static bool chat_add(Cli *cli, Str role, Text *t) {
    if (!text_add(cli, t, "", 0) || !check_utf8(cli, t)) return false;
    ChatMessage *more = realloc(cli->message, (cli->n_message + 1) * sizeof *more);
    if (!more) return fail(&cli->e, "out of memory");
    more[cli->n_message++] = (ChatMessage){role, {t->s, t->n}};
    cli->message = more;
    *t = (Text){0};
    return true;
}

static bool chat_has_system(const Cli *cli) {
    return cli->n_message && str_eq(cli->message[0].role, "system");
}

// cuts the first line off a text, less its \n or \r\n; behind the last line, the text's s is NULL
static Str cut_line(Str *text) {
    const char *newline = memchr(text->s, '\n', text->n);
    Str line = {text->s, newline ? (size_t)(newline - text->s) : text->n};
    *text = newline ? str_from(*text, line.n + 1) : (Str){NULL, 0};
    if (line.n && line.s[line.n - 1] == '\r') line.n--;
    return line;
}

// Is a line @system, @user or @assistant, be it behind backslashes?
static bool names_role(Str line) {
    while (str_cut(&line, "\\")) {}
    return str_cut(&line, "@") && is(line, "system user assistant");
}

// Makes messages of the given text. A file is a conversation if its first line is @system, @user or
// @assistant: each such line begins a message, and a backslash stands before one that is text.
// PROMPT is what the user says next. Any other text is one message of the user.
static bool chat_read(Cli *cli) {
    Str rest = {cli->text.s + cli->file_at, cli->text.n - cli->file_at}, role = NOTHING;
    Text t = {0};
    bool ok = true, plain = !cli->file;
    while (ok && rest.s) {
        Str line = cut_line(&rest);
        bool named = names_role(line), begins = named && *line.s == '@';
        if (plain && begins && cli->file) {
            cli->failure = 2;
            return fail(&cli->e, "two prompts: text stands before a conversation, which begins "
                        "with its first line, as %.*s", STR_ARG(line));
        }
        plain = plain || (!role.n && !begins);
        if (plain) continue;
        if (named) line = str_from(line, 1);   // less its @, or its backslash
        if (begins && role.n) ok = chat_add(cli, role, &t);
        if (begins) role = line;
        else ok = (!t.s || text_add(cli, &t, "\n", 1)) && text_add(cli, &t, line.s, line.n);
    }
    if (!role.n) return chat_add(cli, str("user"), &cli->text);
    ok = ok && chat_add(cli, role, &t);
    if (ok && cli->prompt)
        ok = text_add(cli, &t, cli->prompt, strlen(cli->prompt)) && chat_add(cli, str("user"), &t);
    free(t.s);
    return ok;
}

// Writes the conversation as chat_read reads it.
static bool chat_save(Cli *cli, const char *path) {
    if (!output_open(cli, path)) return false;
    for (const ChatMessage *m = cli->message; m < cli->message + cli->n_message; m++) {
        fprintf(cli->out, "@%.*s\n", STR_ARG(m->role));
        for (Str rest = m->content; rest.s;) {
            Str line = cut_line(&rest);
            if (names_role(line)) putc('\\', cli->out);
            fwrite(line.s, 1, line.n, cli->out);
            putc('\n', cli->out);
        }
    }
    return output_close(cli, path, true);
}

static bool chat_render(Cli *cli, const ChatMessage *m, size_t n, int think, Rendered *r) {
    const Tokenizer *t = cli->m.tokenizer;
    Str template = {cli->template.s, cli->template.n};
    return template_render(template, m, n, token_at(t, t->bos).text, token_at(t, t->eos).text,
                           think, r, &cli->e);
}

// Makes a text, or what @FILE holds, the system message, in place of an earlier one, unless the
// template refuses it.
static bool chat_system(Cli *cli, const char *text) {
    Text t = {0};
    Rendered r = {0};
    bool had = chat_has_system(cli), ok = *text == '@' ? read_file(cli, text + 1, &t)
                                                       : text_add(cli, &t, text, strlen(text));
    ChatMessage trial[] = {{str("system"), {t.s, t.n}}, {str("user"), str("Hello")}};
    ok = ok && chat_render(cli, trial, 2, -1, &r) && chat_add(cli, str("system"), &t);
    rendered_free(&r);
    free(t.s);
    if (!ok) return false;
    ChatMessage *m = cli->message, last = m[--cli->n_message];
    if (had) free((char *)m[0].content.s);
    else memmove(m + 1, m, cli->n_message++ * sizeof *m);
    m[0] = last;
    return true;
}

// Renders the conversation. --render prints it; otherwise its tokens become cli->ids. The answer
// begins with what the template has opened for it. One that a file ends in goes on.
static bool chat_ids(Cli *cli) {
    const Tokenizer *t = cli->m.tokenizer;
    Tokens *ids = &cli->ids;
    size_t n = cli->n_message;
    int think = cli->think ? !strcmp(cli->think, "on") : -1, flags = TOKENS_ADD | TOKENS_SPECIAL;
    Str begun = NOTHING;
    Rendered r;
    if (n && str_eq(cli->message[n - 1].role, "assistant")) begun = cli->message[--n].content;
    if (!chat_render(cli, cli->message, n, think, &r)) return false;
    if (n && cli->message[n - 1].content.n && !memchr(r.mark, FOREIGN, r.n))
        note("the chat template prints nothing of what was said");
    if (cli->render) fwrite(r.text, 1, r.n, stdout);
    ids->n = cli->answer.n = 0;
    bool ok = cli->render || tokenize(t, r.text, r.n, r.mark, flags, ids, &cli->e);
    if (ids->n && t->add_eos) ids->n--;   // the answer comes behind them
    n = r.n;
    while (n > 0 && isspace((uint8_t)r.text[n - 1])) n--;
    for (size_t i = 0; ok && i < COUNT(THOUGHTS); i++) {
        size_t open = strlen(THOUGHTS[i].open);
        if (!text_ends(&(Text){r.text, n, 0}, THOUGHTS[i].open) || r.mark[n - 1]) continue;
        cli->thinking = THOUGHTS[i].close;
        ok = text_add(cli, &cli->answer, r.text + n - open, r.n - n + open);
    }
    rendered_free(&r);
    if (cli->answer.n) str_cut(&begun, cli->answer.s);
    if (begun.n) cli->answer.n = 0;
    if (!cli->answer.n) cli->thinking = NULL;
    if (cli->render) fwrite(begun.s, 1, begun.n, stdout);
    else ok = ok && tokenize(t, begun.s, begun.n, NULL, TOKENS_SPECIAL, ids, &cli->e);
    // the tokenizer puts a space behind special tokens that is no part of the answer
    bool special = ids->n && token_is(t, ids->id[ids->n - 1], SPECIAL_TYPES);
    cli->detokenizer = (Detokenizer){.started = !special};
    return ok;
}

// adds the messages that the command line gives; for one answer or --render, renders them
static bool chat_open(Cli *cli) {
    ChatMessage trial = {str("user"), str("Hello")};
    Rendered off = {0}, on = {0};
    if (!cli->template.n)
        return fail(&cli->e, "%s: no chat template; --template FILE reads one", cli->model);
    if (cli->text.s && !chat_read(cli)) return false;
    if (cli->system && !chat_system(cli, cli->system)) return false;
    if (cli->think && chat_render(cli, &trial, 1, 0, &off) &&
        chat_render(cli, &trial, 1, 1, &on) && !strcmp(on.text, off.text))
        note("the chat template has no switch for --think");
    rendered_free(&on);
    rendered_free(&off);
    return (!cli->answer_once && !cli->render) || chat_ids(cli);
}

// A terminal gives one line at a time, cuts it at 4,095 bytes, and hides it until Enter. So llm
// reads single keys and edits the message itself. The terminal has its own mode again before the
// model answers, before llm stops, and at the end. Most terminals mark a paste, and there Enter
// begins a line. Without marks, "one\ntwo\r\n" is one message, too: behind \n typed_enter waits
// PASTE ms for more; `t` comes, and is left in line.next. \r\n it takes for one end of a line.

enum { TERMINAL_LINE = 4095, PASTE = 50, NONE = -2 };   // bytes; ms: nobody types faster; no key
enum { CTRL_C = 3, CTRL_D = 4, DELETE = 127 };

// What keys do, and as far as the next of what: some behind the cursor, some before it. BLANKS: of
// words that end nowhere else. A new key is a word or a row here.
enum { GO, ERASE, RECALL, NEWLINE, CLEAR, SUSPEND, PASTED };
enum { CHARACTER, WORD, BLANKS, LINE };
static const struct { int does, place; const char *on, *back; } EDITS[] = {
    {GO, CHARACTER, "\6 \33[C \33OC", "\2 \33[D \33OD"},        // Ctrl-F, Right; Ctrl-B, Left
    {GO, WORD, "\33f \33[1;5C \33[1;3C", "\33b \33[1;5D \33[1;3D"},   // Alt-F, Ctrl-Right
    {GO, LINE, "\5 \33[F \33OF \33[4~ \33[8~", "\1 \33[H \33OH \33[1~ \33[7~"},   // Ctrl-E, End
    {ERASE, CHARACTER, "\4 \33[3~", "\b \177"},                 // Ctrl-D, Delete; Backspace
    {ERASE, WORD, "\33d", "\33\177 \33\b"},                     // Alt-D; Alt-Backspace
    {ERASE, LINE, "\13", "\25"}, {ERASE, BLANKS, "", "\27"},    // Ctrl-K; Ctrl-U, Ctrl-W
    {RECALL, 0, "\16 \33[B \33OB", "\20 \33[A \33OA"},          // Ctrl-N, Down; Ctrl-P, Up
    {NEWLINE, 0, "\33\r \33\n", ""}, {CLEAR, 0, "\14", ""},     // Alt-Enter, Ctrl-L
    {SUSPEND, 0, "\32", ""}, {PASTED, 0, "\33[200~", "\33[201~"},   // Ctrl-Z; marks of a paste
};

// Lets llm edit the message. False: the input is no terminal, or something was typed ahead.
static bool edit_begins(bool again) {
    tcdrain(STDIN_FILENO);   // stops a background job until fg: the mode is a shell's till then
    bool ahead = poll(&(struct pollfd){STDIN_FILENO, POLLIN, 0}, 1, 0) > 0;
    if (!again && (ahead || tcgetattr(STDIN_FILENO, &own_mode))) return false;
    struct termios mode = own_mode;
    mode.c_iflag &= ~ICRNL;
    mode.c_lflag &= ~(ICANON | ECHO | ISIG | IEXTEN);
    edited = true;   // also while it begins
    edited = !tcsetattr(STDIN_FILENO, TCSANOW, &mode);
    return edited;
}

// the next byte of the input within ms (-1: no limit); EOF at its end; NONE: none came, or a signal
static int next_byte(int ms) {
    uint8_t c;
    int n;   // a signal that comes shortly before poll does not end it
    do n = poll(&(struct pollfd){STDIN_FILENO, POLLIN, 0}, 1, ms < 0 ? 500 : ms);
    while (n == 0 && ms < 0 && !interrupted);
    if (n < 1) return NONE;
    return read(STDIN_FILENO, &c, 1) == 1 ? c : EOF;
}

// the text that is edited: a new one, or an earlier one
static Text *typed(Cli *cli) { return &cli->typed[cli->line.entry % COUNT(cli->typed)]; }

// the next place of a kind, before or behind the cursor
static size_t reach(Cli *cli, bool back, int place) {
    const Text *said = typed(cli);
    size_t at = cli->line.at, end = back ? cli->line.from : said->n;
    for (bool there = at == end; !there && (at += back ? -1 : 1) != end;) {
        char passed = said->s[back ? at : at - 1];
        char next = said->s[back ? at - 1 : at];
        if (place == CHARACTER) there = (said->s[at] & 0xC0) != 0x80;
        if (place == WORD) there = in_name(passed) && !in_name(next);
        if (place == BLANKS) there = !isspace((uint8_t)passed) && isspace((uint8_t)next);
        if (place == LINE) there = next == '\n';
    }
    return at;
}

// how many cells of the screen a character takes, at most: the terminal alone knows
static int cells(uint32_t c) {
    if (c == '\n' || c == 0x200D || (c >= 0x300 && c < 0x370)) return 0;   // joined, or an accent
    bool narrow = (c < 0x2300 && c >> 8 != 0x11) || c - 0xFF61 < 0x7F;
    return narrow ? 1 : 2;
}

// Adds to cli->shown the message up to byte `to`, as far as it is on the page, and returns the row
// of `to`. "> " begins a line, a blank stands for a control character. A row ends where the next
// character may not fit: so no terminal wraps it. Only a resized one has folded it meanwhile.
static int show_text(Cli *cli, size_t to) {
    const Text *said = typed(cli);
    const Line *line = &cli->line;
    Text *shown = &cli->shown;
    int row = 0, column = 2;
    for (size_t i = line->from, used; i < said->n; i += used) {
        uint32_t c = utf8_decode(said->s + i, said->n - i, &used);
        bool wraps = column + cells(c) > line->width, begins = wraps || (c == '\n' && i < to);
        if (begins) row += 1 + (column - 1) / line->fold;
        if (begins) column = wraps ? 0 : 2;
        bool visible = row >= line->top && row - line->top < line->height;
        if (visible && begins && row > line->top) text_add(cli, shown, "\n", 1);
        if (i >= to) break;
        if (visible && c == '\n') text_add(cli, shown, "> ", 2);
        else if (visible && is_control(c)) text_add(cli, shown, " ", 1);
        else if (visible) text_add(cli, shown, said->s + i, used);
        column += cells(c);
    }
    return row + (column - 1) / line->fold;
}

// Takes the cursor to where the page begins, `up` rows above, and may clear the screen behind that.
static void show_home(Cli *cli, int up, bool clear) {
    for (; up > 0; up--) text_add(cli, &cli->shown, "\033[A", 3);
    text_add(cli, &cli->shown, "\r\033[J", clear ? 4 : 1);
    text_add(cli, &cli->shown, "> ", cli->line.top ? 0 : 2);
}

// Shows the page with the cursor anew. Then the text before the cursor, shown once more, takes the
// cursor to its place, however wide that text is. A dumb terminal has pages of one row. At the end
// all of the message is shown.
static void show_line(Cli *cli) {
    Line *line = &cli->line;
    size_t n = typed(cli)->n;
    struct winsize size;
    if (!line->shown || (line->row == NONE && n == line->from)) return;
    if (ioctl(screen, TIOCGWINSZ, &size) || size.ws_col < 8 || size.ws_row < 2)
        size = (struct winsize){.ws_row = 24, .ws_col = 80};
    line->fold = size.ws_col - cli->dumb;
    line->height = cli->dumb ? 1 : size.ws_row - 1;
    if (line->done) line->fold = line->height = INT_MAX;
    if (line->row != NONE && line->width != line->fold)
        line->row = show_text(cli, line->at) - line->top;
    line->width = line->fold;
    int row = show_text(cli, line->at);
    line->top = fmax(row - line->height + 1, 0);
    cli->shown.n = 0;
    if (line->row != NONE || line->top) {   // else the text goes behind the prompt
        if (cli->dumb) dprintf(screen, "\r%*s", size.ws_col - 1, "");
        show_home(cli, line->row, !cli->dumb);
    }
    int last = show_text(cli, n) - line->top;
    if (line->at < n) {
        show_home(cli, smaller(last, line->height - 1), false);
        show_text(cli, line->at);
    }
    line->row = row - line->top;
    dprintf(screen, "%.*s", (int)cli->shown.n, cli->shown.s);   // all at once: nothing flickers
}

// Asks for a message in a row of its own. From now on a terminal marks pastes.
static void show_prompt(Cli *cli) {
    Line *line = &cli->line;
    screen = isatty(STDOUT_FILENO) ? STDOUT_FILENO : STDIN_FILENO;
    if (isatty(STDERR_FILENO)) screen = STDERR_FILENO;
    line->top = 0;
    line->row = NONE;
    line->shown = line->edits && own_mode.c_lflag & ECHO;   // Emacs shows what it sends
    marked = line->shown && !cli->dumb;
    dprintf(screen, marked ? "> \033[?2004h" : "> ");
}

// Puts s [n] in place of a part of the message, and the cursor behind it.
static bool edit(Cli *cli, size_t from, size_t to, const char *s, size_t n) {
    cli->line.at = from + n;
    return text_replace(cli, typed(cli), from, to, s, n);
}

// Obeys a key that is no text: a control character, or ESC and what comes with it, as [1;5D.
static bool typed_key(Cli *cli, int key) {
    Line *line = &cli->line;
    char s[16];
    Str keys = {s, 0};
    size_t k = 0;
    do s[keys.n++] = key;
    while (key && strchr("\33[O;0123456789", key) && keys.n < 16 && (key = next_byte(PASTE)) > 0);
    for (int left = key > 0 ? utf8_length(key) : 1; left > 1; left--) next_byte(PASTE);
    while (k < COUNT(EDITS) && !is(keys, EDITS[k].on) && !is(keys, EDITS[k].back)) k++;
    if (k == COUNT(EDITS) || (line->pasted && EDITS[k].does != PASTED)) return true;
    bool back = is(keys, EDITS[k].back);
    size_t at = line->at, to = reach(cli, back, EDITS[k].place), entry = line->entry;
    int does = EDITS[k].does;
    if (does == GO) line->at = to;
    if (does == ERASE) return edit(cli, smaller(at, to), larger(at, to), "", 0);
    if (does == NEWLINE) return edit(cli, at, at, "\n", 1);
    if (does == RECALL && back && entry && cli->n_typed - entry + 1 < COUNT(cli->typed)) entry--;
    if (does == RECALL && !back && entry < cli->n_typed) entry++;
    if (entry != line->entry) {   // what is left, a draft too, stays as it is now
        line->entry = entry;
        line->from = 0;
        line->at = typed(cli)->n;
    }
    if (does == CLEAR && !cli->dumb) line->row = 1000;   // which no screen has: up to its top
    if (does == PASTED) line->pasted = !back;
    if (does == SUSPEND) {
        line->at = typed(cli)->n;
        show_line(cli);
        kill(0, SIGTSTP);
    }
    return true;
}

// Ends a line. The message goes on behind a backslash, in a paste, or if more comes at once.
static bool typed_enter(Cli *cli, int key) {
    Text *said = typed(cli);
    Line *line = &cli->line;
    if (line->edits) line->next = next_byte(PASTE);
    if (key == '\r' && line->next == '\n') line->next = next_byte(PASTE);
    bool cut = line->terminal && !line->edits && said->n - line->from >= TERMINAL_LINE;
    if (cut) return fail(&cli->e, "the terminal cut a line to %d bytes", TERMINAL_LINE);
    if (!line->edits && text_ends(said, "\r")) line->at = --said->n;
    size_t from = line->at;
    bool goes_on = from > line->from && said->s[from - 1] == '\\' && !line->pasted;
    if (goes_on) from--;
    line->done = !goes_on && line->next <= 0 && !line->pasted;
    if (!line->done && !edit(cli, from, line->at, "\n", 1)) return false;
    if (line->edits || !goes_on) return true;
    line->from = said->n;
    line->edits = edit_begins(false);
    if (line->terminal) show_prompt(cli);
    return true;
}

// Reads what the user says next into cli->said: a line, and what goes on with it behind a backslash
// or comes at once, as a paste does. False at the end of the input, or if cli->e says what failed.
static bool chat_listen(Cli *cli) {
    Text *said = &cli->said, *last = &cli->typed[cli->n_typed % COUNT(cli->typed)];
    Line *line = &cli->line;
    *line = (Line){.next = NONE, .entry = cli->n_typed, .terminal = isatty(STDIN_FILENO)};
    last->n = said->n = 0;
    bool ok = text_add(cli, last, "", 0), leaves = false;
    line->edits = edited || edit_begins(false);
    if (line->terminal) show_prompt(cli);
    while (ok && !line->done) {
        bool edits = line->edits, half = edits && typed(cli)->n;   // the first Ctrl-C drops that
        if (edits && !edited) {   // llm was stopped, and goes on
            edit_begins(true);
            dprintf(screen, "\n");
            show_prompt(cli);
        }
        int key = line->next > 0 ? line->next : next_byte(0);
        if (key == NONE) {
            show_line(cli);
            key = next_byte(-1);
        }
        bool control = edits && key >= 0 && key != '\t' && (key < ' ' || key == DELETE);
        line->next = NONE;
        if (edits && key == CTRL_C) interrupted += STOP;
        if (edits && key == CTRL_D && !half && !line->pasted) key = EOF;
        leaves = key == EOF || interrupted >= STOP + half;
        if (leaves || interrupted) line->done = true;
        else if (key == '\n' || (edits && key == '\r')) ok = typed_enter(cli, key);
        else if (control) ok = typed_key(cli, key);
        else if (key != NONE) ok = edit(cli, line->at, line->at, &(char){key}, 1);
    }
    if (ok && !line->edits && !strncmp(last->s, "\xEF\xBB\xBF", 3)) edit(cli, 0, 3, "", 0);
    line->at = typed(cli)->n;
    show_line(cli);
    if (line->terminal && (line->shown || leaves || interrupted)) dprintf(screen, "\n");
    if (!interrupted) ok = ok && text_add(cli, said, typed(cli)->s, typed(cli)->n);
    while (line->edits && text_ends(said, "\n")) said->s[--said->n] = 0;   // a paste's last one
    if (!leaves) interrupted = 0;
    if (!ok || leaves || said->n) terminal_undo();   // else more is typed in the same mode
    if (!ok || !said->n || !line->edits) return ok && (said->n || !leaves);
    return text_replace(cli, last, 0, last->n, said->s, said->n) && ++cli->n_typed;
}

// ---- 43. modes ----

// Loads the text that was given, if any, and makes its ids, or the messages of a chat.
static bool load_prompt(Cli *cli) {
    const Tokenizer *t = cli->m.tokenizer;
    const char *file = cli->ppl ? cli->ppl : cli->file, *prompt = cli->prompt;
    Text *text = &cli->text;
    if (prompt && !text_add(cli, text, prompt, strlen(prompt))) return false;
    bool joins = file && text->n && !text_ends(text, "\n");
    if (joins && !text_add(cli, text, "\n", 1)) return false;
    cli->file_at = text->n;
    if (file && !read_file(cli, file, text)) return false;
    if (!check_utf8(cli, text)) return false;
    if (uses_template(cli)) return chat_open(cli);
    if (!text->s) return true;   // --tokens, or a mode without a prompt
    cli->ids.n = 0;
    int flags = TOKENS_ADD | (cli->special ? TOKENS_SPECIAL : 0);
    if (!tokenize(t, text->s, text->n, NULL, flags, &cli->ids, &cli->e)) return false;
    bool complete = !cli->tokenize && !cli->embed && !cli->logits && !cli->ppl;
    if (complete && t->add_eos) cli->ids.n--;   // a text to be continued has no end
    if (cli->ids.n || cli->tokenize) return true;
    if (t->bos < 0) return fail(&cli->e, "the prompt is empty and the model has no BOS token");
    return tokens_add(&cli->ids, t->bos) || fail(&cli->e, "out of memory");
}

// The bytes that a token at pos reads: each weight once, but of an embedding one row, of experts
// the chosen ones, and of a layer that does not run none; the keys and values in sight.
static double token_bytes(const Session *s, int pos) {
    const Model *m = s->m;
    const Config *c = &m->config;
    double sum = 0;
    for (const Tensor *t = m->gguf->tensors; t < m->gguf->tensors + m->gguf->n_tensors; t++) {
        Str rest = t->name;
        if (!t->used || (str_cut(&rest, "blk.") && atoi(rest.s) >= c->n_layer)) continue;
        bool row = t->data == m->pos_embd.data || t->data == m->embd.data ||
                   t->data == m->layer_embd.data;
        double times = rest.n < t->name.n ? c->n_loops : 1;   // of a layer
        if (memmem(t->name.s, t->name.n, "_exps.", 6)) times *= (double)c->n_used / c->n_expert;
        if (row && t->data != m->output.data) sum += quant_row_bytes(t->type, t->ne[0]);
        else sum += tensor_bytes(t) * times;
    }
    for (int l = 0; l < c->n_layer; l++) {
        const Layer *w = &m->layers[l];
        int most = s->cache[l].window + s->cache[l].keep, seen = pos < most ? pos + 1 : most;
        int width = w->k_b.data ? w->hd : w->hd + w->vd;   // latent: values are a part of keys
        sum += 2.0 * seen * w->n_kv * width;
    }
    return sum;
}

// Adds a character to the answer of a chat, and follows whether thoughts begin or end there.
static bool answer_add(Cli *cli, const char *s, size_t n) {
    Text *answer = &cli->answer;
    if (!text_add(cli, answer, s, n)) return false;
    for (size_t i = 0; i < COUNT(THOUGHTS); i++) {
        if (text_ends(answer, THOUGHTS[i].open)) cli->thinking = THOUGHTS[i].close;
        if (text_ends(answer, THOUGHTS[i].close)) cli->thinking = NULL;
    }
    if (text_ends(answer, FINAL)) {
        if (cli->dims && answer->n > strlen(FINAL)) putchar('\n');   // behind thoughts
        answer->n = 0;
    }
    return true;
}

// Prints a new token, and in a chat adds its text to the answer. False: the answer ends here.
static bool print_token(void *ctx, int32_t id) {
    Cli *cli = ctx;
    const Tokenizer *t = cli->m.tokenizer;
    if (!cli->began) {
        cli->began = now();
        cli->header = false;
        if (!cli->dims && cli->answer.n) fwrite(cli->answer.s, 1, cli->answer.n, stdout);
    }
    if (!t->kind) printf(cli->n_new ? " %d" : "%d", id);   // the file has no tokenizer
    Str s = {cli->work, 0}, name = NOTHING;
    if (t->kind) s.n = detokenize(t, &cli->detokenizer, id, cli->work);
    if (token_is(t, id, SPECIAL_TYPES)) name = token_at(t, id).text;
    bool ok = true, chats = cli->n_message, control = token_is(t, id, 1 << TOKEN_CONTROL);
    if (control) s = name;
    if (is(name, "<|start|> <|channel|> <|channel>")) cli->header = true;
    // Control tokens are hidden, and names of channels where thoughts are dimmed. Where thoughts
    // cannot be dimmed, their marks are shown.
    bool shown = !control;
    if (chats && cli->dims && (cli->header || is(name, "<|end|>"))) shown = false;
    if (chats && !cli->dims && is(name, MARKS)) shown = true;
    for (size_t used; ok && s.n > 0; s = str_from(s, used)) {
        uint32_t c = utf8_decode(s.s, s.n, &used);
        bool thinks = cli->thinking, acts = is_control(c) && c != '\n' && c != '\t';
        if (cli->dims && dimmed != thinks) {
            dimmed = true;   // a moment too long rather than too short
            fputs(thinks ? "\033[2m" : "\033[0m", stdout);
            fflush(stdout);
            dimmed = thinks;
        }
        if (acts && isatty(STDOUT_FILENO)) putchar(' ');
        else if (shown) fwrite(s.s, 1, used, stdout);
        if (chats) ok = answer_add(cli, s.s, used);
    }
    if (cli->thinking || is(name, "<|message|> <channel|>")) cli->header = false;
    fflush(stdout);
    cli->n_new++;
    return ok && !interrupted && !ferror(stdout);
}

// session_run calls this before each chunk and at the end; a terminal shows how far a prompt is.
static bool on_chunk(void *ctx, int reused, int done, int n) {
    Cli *cli = ctx;
    char text[80] = "";
    bool begins = done == reused, ends = done == n || interrupted, shown = cli->progress.shown;
    if (begins) cli->progress.start = now();
    if (begins) cli->progress.before = cli->n_prompts;
    if (begins && cli->began) cli->n_passes++;
    else if (begins) cli->n_reused += reused;
    if (!cli->began) cli->n_prompts = cli->progress.before + done;
    cli->progress.shown = !ends && !begins && isatty(STDERR_FILENO);
    if (cli->progress.shown)
        snprintf(text, sizeof text, "prefill %d of %d tokens, %.0f tok/s", done, n,
                 (done - reused) / (now() - cli->progress.start));
    if (shown || cli->progress.shown) show_progress(text);
    return !interrupted;
}

// Prints what the model writes behind cli->ids. False: an evaluation failed, or Ctrl-C ended it.
static bool reply(Cli *cli) {
    size_t n_new = cli->n_new;
    double start = now();
    cli->began = 0;
    fflush(stdout);
    bool ok = session_generate(&cli->s, cli->ids.id, cli->ids.n, cli->n_predict,
                               (OnToken){print_token, cli}, &cli->e) &&
              !cli->e.text[0];   // print_token may have run out of memory
    double end = now();
    if (!cli->began) cli->began = end;
    else if (cli->s.history.n > cli->ids.n) cli->n_decoded += cli->s.history.n - cli->ids.n;
    cli->prefill += cli->began - start;
    cli->decode += end - cli->began;
    if (dimmed) fputs("\033[0m", stdout);
    if (ok || interrupted || cli->n_new > n_new) putchar('\n');
    fflush(stdout);
    if (interrupted) clearerr(stdout);   // Ctrl-C has ended a write, not the terminal
    dimmed = false;
    return ok;
}

// Speeds of all prompts and answers so far. What was reused was not evaluated.
static void print_statistics(const Cli *cli) {
    const Session *s = &cli->s;
    size_t n = cli->n_prompts - cli->n_reused;
    double seconds = cli->decode > 0 ? cli->decode : INFINITY;   // a clock may be coarse
    if (!cli->prefill) return;
    fprintf(stderr, "prefill %zu tokens %.1f tok/s, ", n, n / cli->prefill);
    if (cli->chat || cli->n_reused)
        fprintf(stderr, "reused %zu of %zu tokens, ", cli->n_reused, cli->n_prompts);
    fprintf(stderr, "decode %zu tokens in %zu passes", cli->n_new, cli->n_passes);
    if (cli->n_passes)   // the first token came from the prompt's pass
        fprintf(stderr, " %.1f tok/s %.1f GB/s", cli->n_decoded / seconds,
                cli->n_passes / seconds * token_bytes(s, (int)s->history.n) * 1e-9);
    fprintf(stderr, ", peak %.0f MB, seed %llu, %s", peak_mb(),
            (unsigned long long)cli->o.sampling.seed, s->gpu ? GPU_NAME : "cpu");
    int layers = gpu_layers(s), all = s->m->config.n_layer;
    fprintf(stderr, s->gpu && layers < all ? " %d/%d\n" : "\n", layers, all);
}

// Does a key say something that the engine must know? Keys of RoPE, attention, experts and sampling
// do. Those in `shapes` are no loss: the shapes of tensors give the same numbers. arch: "llama."
static bool key_matters(const Meta *v, const char *arch, float base) {   // base: RoPE's
    static const char shapes[] = "expert_feed_forward_length expert_shared_feed_forward_length "
        "expert_shared_count expert_latent_length attention.q_lora_rank attention.recurrent_layers "
        "attention.indexer.head_count attention.indexer.key_length attention.indexer.types";
    Str rest = v->key;
    if (str_cut(&rest, "general.sampling.")) return true;
    if (!str_cut(&rest, arch) || find_str(rest, shapes)) return false;
    if (!str_cut(&rest, "rope.") && !str_cut(&rest, "attention.") && !str_cut(&rest, "expert"))
        return false;
    if (!gguf_size[v->type] || str_eq(rest, "scaling.yarn_log_multiplier")) return true;
    if (str_cut(&rest, "freq_base")) return meta_float(v, 0) != base;
    if (!str_cut(&rest, "scaling.yarn_")) return true;
    double usual = str_eq(rest, "beta_fast") ? 32 : 1;   // what YaRN has anyway
    return meta_float(v, 0) != usual;
}

// Notes each key that matters and that no code has read, and patterns longer than all layers.
static void print_unread(const Model *m) {
    char arch[110], count[128];
    snprintf(arch, sizeof arch, "%.*s.", STR_ARG(gguf_str(m->gguf, "general.architecture")));
    snprintf(count, sizeof count, "%sblock_count", arch);
    uint64_t n_layer = gguf_int(m->gguf, count, 0);
    for (const Meta *v = m->gguf->meta; v < m->gguf->meta + m->gguf->n_meta; v++) {
        if (v->used && v->n > n_layer && memmem(v->key.s, v->key.n, "_pattern", 8))
            note("key %.*s has %llu values for %d layers", STR_ARG(v->key),
                 (unsigned long long)v->n, (int)n_layer);
        if (!v->used && key_matters(v, arch, m->config.rope_base[FULL]))
            note("key %.*s is not used", STR_ARG(v->key));
    }
}

static void print_notes(const Cli *cli) {
    const Session *s = &cli->s;
    const Config *c = &cli->m.config;
    int window = s->o.window;
    if (*cli->m.tokenizer->note) note("%s", cli->m.tokenizer->note);
    if (!s->m) return;   // the model did not run
    print_unread(&cli->m);
    if (*cli->m.nextn_idle.text)
        note("a nextn (MTP) block, which guesses tokens, is not used: %s", cli->m.nextn_idle.text);
    if (cli->gpu && !s->gpu) note("--gpu %s: the model ran on the CPU", cli->gpu);
    if (cli->o.keep >= window)
        note("--keep %d pins as many tokens as the window of %d has, or more", cli->o.keep, window);
    if (cli->o.window > window)
        note("-c %d: beyond that this model chooses what it attends to, which the engine does not "
             "know", window);
    else if (cli->o.window > c->n_ctx)
        note("%s %d is larger than the model's context of %d",
             c->causal ? "-c" : "the text's length", window, c->n_ctx);
    print_statistics(cli);
}

// Answers the last message, or drops it. One Ctrl-C ends the answer, a second one the chat.
static bool chat_answer(Cli *cli) {
    Text *a = &cli->answer;
    size_t n_new = cli->n_new;
    bool ok = chat_ids(cli), forgets = cli->m.config.hd && !cli->s.o.keep;
    bool outgrown = forgets && cli->ids.n > (size_t)cli->s.o.window;
    if (outgrown && !cli->outgrown)
        note("the chat's beginning, a system message first, is out of sight now; --keep N pins the "
             "first N tokens");
    cli->outgrown = outgrown;
    ok = ok && (reply(cli) || (interrupted == STOP && cli->n_new > n_new));
    if (interrupted == STOP) interrupted = 0;
    if (a->n && strstr(a->s, "<|channel|>")) a->n = 0;   // gpt-oss has only thought
    else if (cli->thinking) ok = ok && text_add(cli, a, cli->thinking, strlen(cli->thinking));
    ok = ok && chat_add(cli, str("assistant"), a);
    if (!ok) chat_clear(cli, cli->n_message - 1);
    return ok;
}

// the commands of a chat, and what else its help says
static const struct { const char *name, *value, *help; } COMMANDS[] = {
    {"/system", "TEXT", "the system message from now on; @FILE reads it"},
    {"/reset", "", "forgets all but that"},
    {"/stats", "", "speeds so far"},
    {"/save", "FILE", "writes the conversation; -i -f FILE goes on with it"},
    {"/quit", "", "ends the chat, as Ctrl-D does"}, {"/exit", "", "too"}, {"/bye", "", "too"},
    {"/help", "", "this list; a blank before / sends a text that begins so"},
    {"Enter", "", "behind \\ or with Alt begins a line; Ctrl-C stops an answer"},
};

// Is that a command, or was one meant? That is a letter away, or a word alone.
static bool is_command(Str word, bool alone) {
    size_t letters = 1;
    while (letters < word.n && isalpha((uint8_t)word.s[letters])) letters++;
    bool meant = alone && letters > 1 && letters == word.n;
    for (size_t i = 0; !meant && i < COUNT(COMMANDS); i++) {
        Str a = word, b = str(COMMANDS[i].name);
        for (; a.n && b.n && *a.s == *b.s; a = str_from(a, 1)) b = str_from(b, 1);
        for (; a.n && b.n && a.s[a.n - 1] == b.s[b.n - 1]; a.n--) b.n--;
        meant = a.n < 2 && b.n < 2;
    }
    return meant && *word.s == '/';
}

// A chat. An error ends a turn, and not the chat, unless the input is no terminal.
static bool run_chat(Cli *cli) {
    Text *said = &cli->said;
    size_t n = cli->n_message;
    bool asked = n && str_eq(cli->message[n - 1].role, "user"), ok = !asked || chat_answer(cli);
    while (!interrupted && !ferror(stdout) && (ok || isatty(STDIN_FILENO))) {
        if (!ok) fprintf(stderr, "llm: %s; what was said is dropped\n", cli->e.text);
        cli->e.text[0] = 0;
        ok = chat_listen(cli);
        if (!ok && !cli->e.text[0]) return true;
        if (!ok || !said->n) continue;
        Str word = {said->s, strcspn(said->s, " \n")};
        const char *value = word.s + word.n + strspn(word.s + word.n, " ");
        if (!is_command(word, !*value)) ok = chat_add(cli, str("user"), said) && chat_answer(cli);
        else if (str_eq(word, "/system") && *value) ok = chat_system(cli, value);
        else if (str_eq(word, "/save") && *value) {
            while (isspace((uint8_t)said->s[said->n - 1])) said->s[--said->n] = 0;
            ok = chat_save(cli, value) ||
                 (isatty(STDIN_FILENO) && fprintf(stderr, "llm: %s\n", cli->e.text) > 0);
        } else if (is(word, "/quit /exit /bye") && !*value) return true;
        else if (str_eq(word, "/reset") && !*value) chat_clear(cli, chat_has_system(cli));
        else if (str_eq(word, "/stats") && !*value) print_statistics(cli);
        else
            for (size_t i = 0; i < COUNT(COMMANDS); i++)
                fprintf(stderr, "%-7s %-5s %s\n", COMMANDS[i].name, COMMANDS[i].value,
                        COMMANDS[i].help);
    }
    return ok;
}

static bool write_row(void *ctx, UNUSED int i, const float *logits) {
    Cli *cli = ctx;
    size_t n = cli->m.config.n_vocab;
    return fwrite(logits, sizeof *logits, n, cli->out) == n;
}

static bool run_logits(Cli *cli) {
    if (!output_open(cli, cli->logits)) return false;
    Request all = {cli->ids.id, cli->ids.n, .fn = write_row, .ctx = cli};
    bool ok = session_run(&cli->s, all, &cli->e) || ferror(cli->out);
    return output_close(cli, cli->logits, ok);
}

typedef struct { const int32_t *ids; int n_vocab, count; double nll, squares; } Score;

// Scores the token behind token i: how surprised the logits are to see it, in nats.
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

// Prints the perplexity of a text: in each window of tokens the second half is scored.
static bool run_ppl(Cli *cli) {
    const Tokenizer *t = cli->m.tokenizer;
    size_t n = cli->s.o.window, windows = cli->ids.n / n;
    Score p = {.ids = cli->ids.id, .n_vocab = cli->m.config.n_vocab};
    if (windows < 2 || n < 3)
        return fail(&cli->e, "%s: %zu tokens; at -c %zu perplexity takes %zu at least", cli->ppl,
                    cli->ids.n, n, (size_t)larger(2 * n, 6));
    for (size_t w = 0; w < windows; w++, p.ids += n) {
        if (t->add_bos) cli->ids.id[w * n] = t->bos;
        session_truncate(&cli->s, 0);
        Request half = {p.ids, n - 1, n / 2, .fn = score_row, .ctx = &p, .exact = true};
        if (!session_run(&cli->s, half, &cli->e)) return false;
    }
    double mean = p.nll / p.count, variance = fmax(p.squares / p.count - mean * mean, 0);
    double ppl = exp(mean), deviation = sqrt(variance / larger(p.count - 1, 1));
    printf("ppl %.4f +- %.4f tokens %zu windows %zu\n", ppl, ppl * deviation, cli->ids.n, windows);
    return true;
}

// Pools as the metadata says; by default a causal model's last token, an encoder's mean. Prints the
// result, behind the dense layers that some files bring, L2-normalised; without pooling, every row.
static bool pool_row(void *ctx, int i, const float *row) {
    enum { EACH, MEAN, CLS, LAST };   // the metadata's numbers
    Cli *cli = ctx;
    const Config *c = &cli->m.config;
    int n = c->dim, n_rows = cli->ids.n, pooling = c->pooling;
    if (pooling < 0) pooling = c->causal ? LAST : MEAN;
    double *sum = cli->work, length = 0;
    float *x = (float *)(sum + n);
    for (int j = 0; j < n && (i == 0 || pooling != CLS); j++)
        sum[j] = row[j] + (pooling == MEAN ? sum[j] : 0);
    if (pooling != EACH && i + 1 < n_rows) return true;
    for (int j = 0; j < n; j++) x[j] = sum[j] / (pooling == MEAN ? n_rows : 1);
    for (const Matrix *w = cli->m.dense; w < cli->m.dense + 2 && w->data; w++) {
        plain_matmul(&(Matmul){w, x, x + n, 1}, x + n + w->rows);
        x += n;
        n = w->rows;
    }
    for (int j = 0; j < n; j++) length += (double)x[j] * x[j];
    if (!isfinite(length)) return fail(&cli->e, "the embedding's length is %g", length);
    if (length == 0) length = 1;
    for (int j = 0; j < n; j++) printf(j ? " %.9g" : "%.9g", x[j] / sqrt(length));
    putchar('\n');
    return true;
}

static bool run_embedding(Cli *cli) {
    Error why;
    Request all = {cli->ids.id, cli->ids.n, .hidden = true, .fn = pool_row, .ctx = cli};
    bool ok = session_run(&cli->s, all, &why);
    if (!ok && !cli->e.text[0]) cli->e = why;   // pool_row may have said more
    return ok;
}

enum { RUNS = 5, SLICES = 1024, SLICE = 512 << 10 };   // RUNS times reads SLICES of SLICE bytes

static void read_slice(Task t) {
    uint64_t *p = (uint64_t *)((char *)t.ctx + (size_t)t.i * SLICE), sum[32] = {0};
    for (size_t k = 0; k < SLICE / sizeof *p; k += 32) {
        prefetch_ahead(p + k, 256);   // as products do
        for (int j = 0; j < 32; j++) sum[j] += p[k + j];
    }
    for (int j = 0; j < 32; j++) p[0] += sum[j];   // or the sums would be optimised away
}

// bytes a second that all threads read of cli->work, or that the GPU copies
static double read_rate(Cli *cli) {
    double gpu = gpu_rate(&cli->s, cli->work, cli->slices * SLICE), start = now();
    if (gpu > 0) return gpu;
    parallel(cli->s.pool, read_slice, cli->work, cli->slices);
    return (double)cli->slices * SLICE / (now() - start);
}

// Measures random ids: a prompt, then RUNS parts of tokens, and between these how fast memory is.
static bool run_bench(Cli *cli) {
    Session *s = &cli->s;
    int n_prompt = cli->bench.id[0], n_decode = cli->bench.id[1];
    for (uint64_t rng = 1; cli->ids.n < (size_t)n_prompt + n_decode;)
        if (!tokens_add(&cli->ids, random_unit(&rng) * cli->m.config.n_vocab))
            return fail(&cli->e, "out of memory");
    int n = n_prompt, chunk = n < s->o.chunk ? n : s->o.chunk;
    double best = read_rate(cli);
    // a first chunk touches weights and scratch, so that the rest measures neither disk nor kernel
    if (!session_eval(s, cli->ids.id, chunk, &cli->e)) return false;
    session_truncate(s, 0);
    double start = now();
    if (!session_eval(s, cli->ids.id, n, &cli->e)) return false;
    double prefill = now() - start, decode = 0, moved = 0;
    for (int run = 1; run <= RUNS; run++) {
        start = now();
        while (n < n_prompt + (int64_t)n_decode * run / RUNS)
            if (!session_eval(s, cli->ids.id, ++n, &cli->e)) return false;
        decode += now() - start;
        best = fmax(best, read_rate(cli));
    }
    while (n > n_prompt) moved += token_bytes(s, --n);
    printf("prefill %d tokens %.1f tok/s\n", n_prompt, n_prompt / prefill);
    printf("decode %d tokens %.1f tok/s %.1f GB/s %.1f %% of %.1f GB/s\n", n_decode,
           n_decode / decode, moved / decode * 1e-9, 100 * moved / decode / best, best * 1e-9);
    return true;
}

// up to `most` bytes of a string of the file, whole characters, a blank for each control character
static void print_str(Str s, size_t most) {
    for (size_t i = 0, used; i < s.n && i < most; i += used) {
        uint32_t c = utf8_decode(s.s + i, s.n - i, &used);
        if (utf8_valid(c, used) && !is_control(c)) printf("%.*s", (int)used, s.s + i);
        else putchar(' ');
    }
    if (s.n > most) printf("...");
}

static void print_meta(const Meta *m) {
    Reader c = {m->v, m->end, false};
    int digits = m->elem == GGUF_F32 || m->elem == GGUF_F64 ? 9 : 20;
    print_str(m->key, 100);
    printf(m->type == GGUF_ARR ? " = [%llu]" : " =", (unsigned long long)m->n);
    for (uint64_t i = 0; i < m->n && i < 4; i++) {
        putchar(' ');
        if (m->elem == GGUF_STR) print_str(read_str(&c), 60);
        else printf("%.*g", digits, meta_float(m, i));
    }
    printf(m->n > 4 ? " ...\n" : "\n");
}

// what is in the file, whether or not it can run
static void print_file(const Cli *cli) {
    static const char keys[] =   // behind general., tokenizer. or the architecture's name and a dot
        "architecture name size_label file_type context_length embedding_length block_count "
        "attention.head_count ggml.model ggml.pre sampling.temp sampling.top_k sampling.top_p "
        "sampling.min_p sampling.penalty_repeat sampling.penalty_last_n";
    const Gguf *g = cli->m.gguf;
    double all = 0, size[64] = {0};   // bytes and tensors of each format
    int count[64] = {0};
    for (const Meta *m = g->meta; m < g->meta + g->n_meta; m++) {
        const char *dot = memchr(m->key.s, '.', m->key.n), *key = dot ? dot + 1 : m->key.s;
        Str rest = {key, m->key.s + m->key.n - key};
        if (cli->verbose || find_str(rest, keys)) print_meta(m);
    }
    puts(g->n_tensors ? "" : "\nno tensors: a vocabulary alone");
    for (const Tensor *t = g->tensors; t < g->tensors + g->n_tensors; t++) {
        size[t->type] += tensor_bytes(t);
        all += tensor_bytes(t);
        count[t->type]++;
    }
    for (int i = 0; i < 64; i++)   // with their bytes as bars
        if (count[i])
            printf("format %-8s %4d tensors %9.1f MB %3.0f %%  %.*s\n", quant_name(i), count[i],
                   size[i] / 1048576, 100 * size[i] / all, (int)ceil(40 * size[i] / all),
                   "########################################");
    fflush(stdout);
}

// what Config says, the kinds of layers, the memory plan
static bool print_info(const Cli *cli) {
    static const char *const norm[] = {"RMSNorm", "LayerNorm", "bare LayerNorm"};
    static const char *const act[] = {"SiLU", "GELU", "ReLU squared", "clamped SwiGLU",
                                       "ReLU", "xIELU"};
    _Static_assert(COUNT(act) == ACT_COUNT, "each activation has a name");
    static const char *const rope[] = {"RoPE on halves", "RoPE on neighbours", "no RoPE"};
    static const char *const kinds[] = {
        "attention", "attention in a window", "latent attention",
        "gated delta net", "state space", "short convolution", "dense FFN", "experts"};
    enum { LATENT = WINDOWED + 1, DENSE = COUNT(kinds) - 2, EXPERTS };
    const Model *m = &cli->m;
    const Config *c = &m->config;
    const Session *s = &cli->s;
    const Layer *seen = m->layers;   // the first with attention, if there is one
    while (seen < m->layers + c->n_layer - 1 && !seen->n_kv) seen++;
    printf("architecture %s%s: %s, %s, %s\n", c->name,
           c->verified ? "" : " (unverified: no golden output)", norm[c->norm],
           act[c->act], rope[c->rope]);
    printf("  %d layers, dim %d, %d heads of %d on %d KV heads, vocabulary %d, context %d\n ",
           c->n_layer, c->dim, seen->n_head, seen->n_kv ? seen->hd : 0, seen->n_kv, c->n_vocab,
           c->n_ctx);
    int count[COUNT(kinds)] = {0}, any = 0;
    for (const Layer *w = m->layers; w < m->layers + c->n_layer; w++) {
        if (w->n_kv && w->k_b.data) count[LATENT]++;
        else if (w->n_kv) count[w->window > 0 ? WINDOWED : FULL]++;
        if (w->mixer) count[LATENT + w->mixer]++;   // MIX_DELTA and so on stand behind it
        if (w->up.data) count[w->router.data ? EXPERTS : DENSE]++;
    }
    for (size_t i = 0; i < COUNT(kinds); i++)
        if (count[i]) any = printf("%s %s in %d layers", any ? "," : "", kinds[i], count[i]);
    if (count[EXPERTS]) printf(" (%d of %d chosen)", c->n_used, c->n_expert);
    if (c->n_loops > 1)
        printf("; the file has %d, which run %d times", c->n_layer / c->n_loops, c->n_loops);
    putchar('\n');
    double weights = 0, nextn = 0;
    for (const Tensor *t = m->gguf->tensors; t < m->gguf->tensors + m->gguf->n_tensors; t++) {
        Str rest = t->name;
        weights += tensor_bytes(t);
        if (str_cut(&rest, "blk.") && atoi(rest.s) >= c->n_layer) nextn += tensor_bytes(t);
    }
    if (c->n_nextn)
        printf("nextn (MTP) blocks: %d, of %.1f MB, guess ids below %d\n", c->n_nextn,
               nextn / 1048576, (int)m->layers[c->n_layer].output.rows);
    printf("memory: weights %.1f MB mapped, KV cache %.1f MB for a window of %d, scratch %.1f MB\n",
           weights / 1048576, s->kv.size / 1048576.0, s->o.window, s->scratch.size / 1048576.0);
    if (s->gpu)
        printf("on the GPU: %d of %d layers, %.1f MB, chunks of %d\n", gpu_layers(s), c->n_layer,
               gpu_bytes(s) / 1048576, s->o.chunk);
    printf("a token reads %.1f MB of these\n", token_bytes(s, 0) / 1048576);
    return true;
}

// What the model's makers ask for, cut to the option's range, gives way to the user's options.
static void sampling_defaults(Cli *cli) {
    static const struct { const char *option, *name; } wishes[] = {
        {"--temp", "temp"}, {"--top-k", "top_k"}, {"--top-p", "top_p"}, {"--min-p", "min_p"},
        {"--repeat-penalty", "penalty_repeat"}, {"--repeat-last-n", "penalty_last_n"}};
    for (size_t i = 0; i < COUNT(wishes); i++) {
        const Option *o = find_option(wishes[i].option);
        char text[64];
        snprintf(text, sizeof text, "general.sampling.%s", wishes[i].name);
        Meta *v = gguf_find(cli->m.gguf, text);
        double x = v && gguf_size[v->type] ? meta_float(v, 0) : NAN;
        if (isnan(x) || (x <= 0 && o->at == PICK(repeat_penalty))) continue;
        v->used = true;   // also if the user knows better
        snprintf(text, sizeof text, "%.17g", fmin(fmax(x, o->low), o->high));
        if (!(cli->given >> (o - OPTIONS) & 1)) parse_value(cli, o, text);
    }
}

// Opens the session, and takes the memory that the modes work in.
static bool start_session(Cli *cli) {
    const Model *m = &cli->m;
    if (!m->config.causal) cli->o.window = cli->o.chunk = cli->ids.n;   // all of the text at once
    if (cli->embed || cli->logits || cli->ppl || cli->bench.id || !cli->n_predict) cli->o.draft = 0;
    if (!session_open(&cli->s, m, cli->o, &cli->e)) return false;
    cli->s.on_chunk = on_chunk;
    cli->s.ctx = cli;
    size_t wide = m->config.dim + m->dense[0].rows + m->dense[1].rows;   // of pool_row
    size_t room = larger(wide * 2 * sizeof(double), m->tokenizer->detokenize_max);
    if (cli->bench.id) room = (size_t)SLICES * SLICE;
    room = (room + 16383) / 16384 * 16384;
    do cli->work = aligned_alloc(16384, room);   // whole pages, for a GPU to share
    while (!cli->work && cli->bench.id && (room /= 2) >= SLICE);
    if (!cli->work) return fail(&cli->e, "out of memory");
    cli->slices = room / SLICE;
    memset(cli->work, 0, room);
    return true;
}

// Does what was asked for. The order matters: --info shows a file even if it cannot run; the file's
// wishes and an encoder's text set options before the session takes them; what needs no weights
// ends before that; one of the modes at the end was asked for.
static bool run(Cli *cli) {
    Model *m = &cli->m;
    cli->failure = 1;
    if (cli->help) print_usage(cli->verbose);
    else if (cli->version) puts("llm 1.0");
    if (cli->help || cli->version) return true;
    bool ok = model_load(m, cli->model, !cli->tokenize && !cli->render, &cli->e);
    if (cli->info && m->tokenizer) print_file(cli);   // the file was read
    if (!ok) return cli->info && m->tokenizer && !m->gguf->n_tensors;   // a vocabulary has no more
    sampling_defaults(cli);
    Str own = gguf_str(m->gguf, "tokenizer.chat_template");
    if (!(cli->template_file ? read_file(cli, cli->template_file, &cli->template)
                             : text_add(cli, &cli->template, own.s, own.n)))
        return false;
    if (cli->chat_by_default && !cli->template.n) {
        cli->failure = 2;
        return fail(&cli->e, "no PROMPT given, and the model has no chat template; see --help");
    }
    if (!load_prompt(cli)) return false;
    if (cli->render) return true;   // load_prompt has printed it
    if (cli->tokenize) {
        for (size_t i = 0; i < cli->ids.n; i++) printf(i ? " %d" : "%d", cli->ids.id[i]);
        putchar('\n');
        return true;
    }
    if (cli->embed && m->config.pooling > 3)
        return fail(&cli->e, "%s: pooling_type %d is a reranker's: it has no embedding", cli->model,
                    m->config.pooling);
    bool embeds = m->config.encoder || (!m->config.causal && !cli->logits);   // and does no more
    if (embeds && !cli->embed && !cli->info)
        return fail(&cli->e, "%s: %s is for embeddings; use --embed", cli->model, m->config.name);
    if (!start_session(cli)) return false;
    int n = cli->ids.n, window = cli->s.o.window;
    if (n > window && m->config.hd && !cli->ppl)
        note("the first %d tokens of the prompt are out of sight; -c %d keeps them", n - window, n);
    if (cli->info) return print_info(cli);
    if (cli->ppl) return run_ppl(cli);
    if (cli->bench.id) return run_bench(cli);
    if (cli->embed) return run_embedding(cli);
    if (cli->logits) return run_logits(cli);
    if (cli->chat) return run_chat(cli);
    if (cli->answer_once) return reply(cli);
    // continue the prompt, which is printed first
    if (cli->template.n && isatty(STDERR_FILENO))
        note("--chat answers as this model was trained to; this continues a text");
    if (cli->text.s && !cli->hide_prompt) fwrite(cli->text.s, 1, cli->text.n, stdout);
    cli->detokenizer.started = cli->text.n > 0;
    return reply(cli);
}

int main(int argc, char **argv) {
    Cli cli = {.failure = 2, .n_predict = -2, .o.draft = FEW - 1,   // -2: not given
             .o.sampling = {.temp = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f,
                            .repeat_penalty = 1, .repeat_last_n = 64, .seed = now() * 1e9}};
    static const int signals[] = {SIGHUP, SIGQUIT, SIGTERM, SIGTSTP, SIGCONT, SIGWINCH};
    struct sigaction caught = {.sa_handler = on_signal, .sa_flags = SA_RESTART | SA_NODEFER};
    for (size_t i = 0; i < COUNT(signals); i++)   // what is ignored, as by nohup or &, stays so
        if (signal(signals[i], SIG_IGN) != SIG_IGN) sigaction(signals[i], &caught, NULL);
    caught.sa_flags = SA_NODEFER;   // Ctrl-C ends reads and writes, too
    if (signal(SIGINT, SIG_IGN) != SIG_IGN) sigaction(SIGINT, &caught, NULL);
    signal(SIGXFSZ, SIG_IGN);   // a file that may not grow is an error of the write
    const char *term = getenv("TERM"), *plain = getenv("NO_COLOR");
    cli.dumb = term && !strcmp(term, "dumb");
    cli.dims = isatty(STDOUT_FILENO) && !cli.dumb && !(plain && *plain);
    int flags[3];   // of the standard files, which shall wait: else a slow reader would lose text
    for (int i = 0; i < 3; i++) flags[i] = fcntl(i, F_GETFL);
    for (int i = 0; i < 3; i++) fcntl(i, F_SETFL, flags[i] & ~O_NONBLOCK);
    bool ok = parse_options(&cli, argc, argv) && run(&cli);
    terminal_undo();
    if ((fflush(stdout) || ferror(stdout)) && ok)
        ok = fail(&cli.e, "standard output: %s", strerror(errno));
    if (cli.progress.shown) show_progress("");
    if (cli.m.tokenizer && (ok || interrupted)) print_notes(&cli);
    if (!ok && !interrupted) fprintf(stderr, "llm: %s\n", cli.e.text);
    session_close(&cli.s);
    model_close(&cli.m);
    chat_clear(&cli, 0);
    void *owned[] = {cli.message, cli.said.s, cli.shown.s, cli.answer.s, cli.template.s,
                     cli.text.s, cli.ids.id, cli.bench.id, cli.work};
    for (size_t i = 0; i < COUNT(owned); i++) free(owned[i]);
    for (size_t i = 0; i < COUNT(cli.typed); i++) free(cli.typed[i].s);
    for (int i = 0; i < 3; i++) fcntl(i, F_SETFL, flags[i]);
    if (interrupted && interrupted < HANG_UP && signal(SIGINT, SIG_DFL) != SIG_IGN) raise(SIGINT);
    if (interrupted) return 130;
    return ok ? 0 : cli.failure;
}

#endif   // LLM_NO_MAIN

// ---- appendix: Unicode ----
//
// What the tokenizers need of the Unicode standard, version 15.1: three tables of ranges of
// characters, each range with a value, made from the standard's UnicodeData.txt.
//   - CLASSES: s for the categories Z*, U+0009 to U+000D and U+0085; for others the first letter of
//     the category, D for Nd; and W if that is Nl or Pc, or the character alphabetic, but no letter
//     and no mark. Letters are L, and x (Lm, Lo), U (Lu, Lt) or v (Ll), of which the table has x,
//     and U where LOWER does not tell U from v. Letters of ASCII are u or l, too, and the others of
//     U and v are c in the blocks that deepseek-llm's list of letters with case knows: 0080-0556,
//     10A0-10C5, 13A0-13FD, 1C90-2CFF, A640-A78E, AB70-FF5A, 10400-104FB, 10C80-10CF2, 118A0-118DF
//     and 1E900-1E943.
//   - LOWER: the lower case (field 14, from 1) minus the character. If that is 1, both characters
//     of the pair have the value 0 where the upper case is even, else -1.
//   - BASE: the first character of the decomposition (field 6), if that has no <tag>, and of the
//     decomposition of that one, and so on; for Hangul syllable number i, U+1100 + i / 588.
// Characters in a row that have one value are one range, written as up to 3 numbers:
//   - 4 times its value minus that of the range before, where 0, -1, 1, -2, 2 are written 0, 1, 2,
//     3, 4; plus 2 if characters lie between the two ranges; plus 1 if it has several characters;
//   - if characters lie between: their number less one;
//   - if it has several: their number less two.
// The last digit of a number has base 60, '#' (0) to '^' (59); digits before it have base 32, '_'
// (0) to '~' (31), so that one sees where a number ends. Each line begins again at character 0 with
// value 0, so that a binary search over the lines finds the one to read.
//
// UNICODE_LOWER begins with "c6`';&`K8". Here c6 is 4 * 60 + 19 = 259 = 4 * 64 + 3: 64 is written
// for 32, the value of 'A', as 'a' is 'A' + 32, and both other numbers follow. `' is 1 * 60 + 4 =
// 64: 65 characters lie before 'A'. ; is 24: the range has 26, to 'Z'. The next one begins with &.

static const char *const UNICODE_CLASSES[] = {   // the index into CLASS_LETTERS
    "`0*(&,3'0$+('+(%L+H#,$(#P;T$+`/`+P;K+'+4'',;'/,&',#?;+30%8#;GD#+7';0$3@8KH@KHb0+(%,%(b=+(<,3",
    "^jP%@-D/@&D(?C?D20`U8%+CH#-$($C?N&#GC@$%#&#5&#P`H$`DBKHa4K0(8aO&#G-$<'TJP#.$$2#N+'+(#+(#+'2*<",
    ">x5%<#>-'0$(#+(#,#0,+;8$8L46T+H%8#30`H;74(C/0'0#4#30%0#`(+`$$D#?</=#O30?4<2$`>4,/`*0+`$B4*0#C",
    "V``]$75$4#@74%/4*/4$/4&.$0:#:4$-$:#,&'9C@'V##B()0K49C@B0W4$/43/4(0+4#,#L+G814$2#)&$#&$7&#(%#",
    ">`h<%5$/4(&$#&$$/5*2&#&#$4#V$+`$#D#8'<#?;'&$$2#'&&#&$7&#(&##&##&##5$&#&&&#&$$%%2)%%#`*)+P#0$3",
    "U`kH*,$2#*&#$&#7&#(&##&#&5$/4)&#$&#$1$&1#4#V$+G+A)4'&#$2#)&$#&$7&#(&##&#&5$/4(&$#&$$&)$2&#&#$",
    "N`oD#V$+??,'-,/&#'&%$&#%&%#%#&##&%#&%$&%-6&&&%$&#%1$5(V0+X$<)2'&0)&#$&#8&#15$/4(&#$&#%&)#2#$",
    "=`sO&$#4#V$+I)0(;?4$+8)&#$&#8&#+&#&5$/4(&#$&#%&)#2(#&##4#V$+`&##3&.%0*&#$&#J4#/4(&#$&#%/CB&$3",
    "F`wZ(($4#V$+X*;@'6#$2#3&%9&#*%#&$(5%&&'%#&#)V(+R$#+:.Q30#4(5&@(4)+L+H#:G#%#&#&&#9%#&#+30#4*/",
    ">`}Z&%#6#(V#+`&$%%BD$(0+',$0#4'D+X+;/3/3/,%(#0)&#E6&5+(#0&4,&#E6#)/4'&##(&,%(#:GL45/`(+H'8'4%",
    ">adP%4$/4$0#4(0$4%0.4-/3T+P%4#HG`9#%'&$LO7`0$`,d>&#%&$(%#&#%&$J&#%&$B&#%&$(%#&#%&$0&#Z&#%&$`(",
    "NaqG$,*05*%1D+J(`;&$'E$8i5C'82KH;<#:%`0<$`0$`D)&)34%2+44$,#:+34#2..&#$6##2.U4A,$7<$+?3V$+Z(+",
    "Vbe:,($C?T+`&(`>&)&4#0C3/&'`+&,@6#-&&-5&*%#L+`$?&$&&-M&&;`*(+W>%C@84&.$#8V4+&#>%$T+&(+J((7<'",
    "NbpV@&S&0P420)`*%+H(,+0*4*(#*#$0?4.0#`(+`$M4/.*%8E45.%&L+`&%$`(+`$E<#T*`6)L&$$D)**$+(60%30'3",
    ">bzC#4$/*'M,`$(.+(C,F4`%8cG&$'&$G&$'&$)%#%#%#&#@&$V&#(KGL$H$&#(L$H%&$'N#$H.L$J$$&#(L#.#,,&89",
    "`*ch.#,&'00`8#`4$+(.+'`7`4+3,&&#+G'.$'<$(#7,+<$(#:#.F%B21B61#[X%[X#G`H$`D#`H$`CK[X$\\&X'[WGK[",
    "]cl?H#`H#WG`H#`C`G`C,%'L#H#`H#X&[`D%L%GK81`@D`L#`P%`;<#&&e1(%,>(#,c-&;,:7]<;`8U`L7<i1(/0?<R(#",
    "^dhM@(+,eL(7,`$(%,A(#,e/&$A&#`NHa%,#(`LL'H%<$8#F'%/4#TG%#%'`.$Y%);)008&+(&#(&#(&#(&#(&#(&#(",
    ">ebF(6#A,P7<A,#(-.D;&#`>&.bC&<1+0$+@#`G`,+,#(-+`(*`4'+8&D#`($`D#;,#B#`;6$#4#@$;8`?;8%&'L&#`C",
    "^er>#8%<+@ADE%-@1D@:#+<?8);80<A8+<H80<d5@blUD`%@jp2F%XB+O<#8c><$81`(+`$#*6O+4%+(++7(=,#4#0`+",
    "a&ug(+`4#,'.*8@*D#H`3+(8+D#H%+`0\\&'#%#&#&`.:$`0#`,$`/`,(30$30%3084&4%/*%'<%B(U<%**#0S43.*#L+",
    "NuoB30'<$7;8#3T+`$=4),#884.--8>6%%0P4/,.9#`(+J&#8&30+`(+`$&&#J4/2+$30)4#V$+J$%88D$?4$0S3/4$0#",
    "Nuw9#0&4#/3/&:$<#8,4&,#8$4#2,'&$'&$'&+(&#(`2#LG@%`0*`+D#J&`5,D4)+(#V$+`&(dy-&.8&&RV&ckQPe'",
    ">``kB`O*H(&.&-'30+C@.&#&%#&##&##&#`QD2B2e$<#,1@`%&$WE)BB-D%01,+*(1,$`8#`49`8$`4$&#/+',$)#+(#",
    ">``|F&&#a0U$:#$+('+(%L+H#,$(#@;D$+`/`+H;C+'+((8`>&%'&$'&$'&$$F%(&#(6,$0#B$-&#;&#4&##&#0&$/",
    ">`ae:a$>'$2&N>%*`(V`<%<28#<$&#.%%&QN/2a,>&%R51(<*&A,%*+5`G`D)`G`F'G4&2'?=#8E&&);`0&`NL`5,`3",
    "`B`av^+`.(E&&E.&I&*U=-T,&#0&#(&##&#,&#0&#(&##`.`)d,&+7&,)&:'&#K&#*&`+'%$&#M&##%%&$8=#0)(8D#8(",
    ">`bgB@.***R4&##.'&(7,'5%8;=':`&Y.&#(#,1&$O'4$&##&'%0%&#$&#>6$$%&(*6)*:)>,#38>,$*B)C@=4#*&&4(",
    ">`br.W>%(87.$)(4.')(3>)%2.(*`6`.*YT&/T6)'(E4%V*+ZcX@*#K6##+:$#6`1$0>,+'&*74,(%4&:834%,%:H6,(",
    ">`cf^86+$0V40,(2&5\\+O0#4#/6+%0N4,,#;8%'E,R$:`*)+R($0E4/V#+H%74#/&*D3,#76+$0Q4/0%<%(%+(#T+`#;",
    "=`co><$2#5*-3&#:4-,''0#32`$(%#&#%&#0&#+;:(P4-V'+R(%2#)&$#&$7&#(&##&#&6##/4(&$#&$$1$5(2'&4#&$(",
    "N`cv.&2a5V430%<&L+H#%#'0$&@Q450#;7`**+`&aPP4(&$*,88%4#2DQ42,$7`*-+J(.:5L4./;N(+`&X<6$0V&+X#4$",
    "]`df=@(&b'M40+B`J`%`0+X**.)%$&$)&##&#94'&##&$%/3/4#,$N++`&`,)&$H4(&$(/;731=4+0I4(/4%,)'1*4,0O",
    "N`dt@1,$7<&:/`.>)+:c(*&#F4)&#)/<&N,+X46%#8?6$7&#/2`/(&##&#G4'%%&##&#(/3V*+`&('&##&#A4&&##&#&/",
    "`B`eaJ+`&d,44%,#*)#/30.&#C4(&%&,.L+`%`<.16<>)/8n7`J`L`T`.#&:-b1&`jZ`F<#:/pUT1?0'402aaThL",
    ">`n~^h>&)@`*#+J&#8`4`*#+`&(?6$&+:,Q4(,&,%@%;+F,+Z#(*#6&'4`2j>`%`$84%:`K`05&/4X&)%0.&`&#;73&-#",
    ">`pa*be1&*sG&L*&csY%&#(&##&#cT%1&?$%$&0%&*eE&`e>`P&'.&%*&)+E$0#+<%Bam6O&$86+`Y&^c'&,H&$]0&4$",
    "N`}`S'D)@)4#0(4?0%4^&7`'0$3:a$5&.5>.`<:+:`2a1;(;,;((&#3,;(;+&##%$&$#&$%&#)(%%#&#(&#,,;(;,#&#%",
    "`R`}p3)&#(*#;,#&#%&#&%#&%(*#;,;(;,;(;,;(;,;(;,;(;,;(=.$:OL:GL',:OL:GL',:OL:GL',:OL:GL',:OL:G",
    "`J`}{V'+'*$S@gA0X4%0S4)/4//4#(&*1&&#0^q:+`+`05&('ZbC(&#2&$(&##&#&2'`#5C2`VN6%(0(`*$+`%&CBd6?3",
    ">a_jNM4%T+A'BfN=4%T+`&k8(&#%&##&#0&#b2.$*,(:K`)<(/`*&+J&#2l'\\;8$;8%&`2N;80*b0%&#<&##%#%$&#+",
    ">a`{F%%#%#%(%&%#%#&#$&##%#%$%#%#%#%#&##%#&$%&#(&#%&#%%#&#+&#2&'$&#&&#2FV#&c@M&&`I&.0&$0&#0&#F",
    "FaagB.<D`8;`4'`8;`4'`8;`4E&Z>&/M&&*&)#&0'&aDo9&&2&%.&%`\\&&`D&(-%&&1-&&Y&*+&(I&*?&$#&`4dI&./",
    "^aboR.&%*&)O&#(&*/&&*&)*&)a<&#XFG+`&p,uf]&Bad/&(bK&$b_#&0b{B&1i7&`h(h#&x(aq4&'adUUjquK&@`E",
    "Nm|~^b]F``z^`ac/&$`ac/",
};

static const char *const UNICODE_LOWER[] = {   // the number to add; 0, -1: pairs, see above
    "c6`';&`K8&#(c2CQy?yF#'*#1.#Oo'o$'{-$z\\%z?zD#z@#z<#iM#o;+z,#z?3E#/zT#{-$3-#{@'|'|,#|/|&$#|'",
    "*f-#|(#|$%|7|,#&$#5(8#;0#383.#35#0%kWd?f@Ip3p:#3`k~9(`k~<#tC`lsK`k~&$#xS`b/3h<+&cR%&$#nA)i9(",
    "c^n&$bI#*##c*#2&#*b-E`&*9f]&fZ$#O\\#p6#${$1e8Ac2RC&*Wa#a(/.#`Ee>#G}a.`o+G%#%'cbt:k$`5d`{P'",
    "kp&bxVL&$$kp*d6a?~v5*~v:#`E`&*)&*'&,)&*)&*'%-%#%#%#&*)&:)&*)&*)&*#gP#gKi2-%i3.-#k0#k6.#lT#m#",
    "p&cg:#4#nG~h%c[br=%o+`ap9(`FO1a25#bJlG;a^}JQe:R#`kw7{zW{xK`ku.$'`k|+c+c?+`k|J##*##`l`V)#",
    "&d|V`I*)%.%#&odBO&4=&a0/&$`#*+%creOcre\\+*%#dod+dod:$%&$5doh#`;C`77eM#b+aSdr}CbzL1e7doa?{z'",
    "*ujU%.'#&&%*=#c>jrX;`*s7I&a2E*aF,&#0&#(&##b:|@Tc2`qWA&jkRA6oj.C",
};

static const char *const UNICODE_BASE[] = {   // the character without its accents
    "gNb.'5#4%D%M#,&V$%C`*$'5#4%D%M#,&V$%C%#f;c3c/c3c/c3b[c3c/c3c/c3c/c3c'c3c)$c3c/c3c/c3c/c3c/c3",
    "hAcNc3c/c3c/c3c/c3c'c3c)$c3c/c3c/c3c/c3c/-%c3c'c3c)#c3c/c3c/c3b]&c3c/c3c/c3c)%c3c/c3c/c3bU$c3",
    "i]dLc3c/c3c'c3c/c3c/c3c/c3c'c3c/c3c)$c3c/c3c/c3c/c3c/c3c/c3b[c3b[c3c/+c3c/c3c/c3dMCc3b=/c3eY>",
    "k]fLb+c3b;c3b;c3c/c3c/c3c/c3c/c3eY#c3c/c3l?c3t-$c3bKc3bKc3c/c3`jO|/ahCcI%c3b5$c3d[c3l?c3`Sc3",
    "gMgBc3c/c3bKc3c/c3bKc3c/c3b;c3c/c3bSc3c/c3bSc3c/c3c?c3c'c3dU$c3d-(c3bKc3aWc3c/c3c/c3c/c3aWc3",
    "be=lV+a=#`;iAQat%+mE(bb7b`3b`W33U#U#Ca+c1;`G`GC33`G`E;`GOSC`2&#g^M#1#`M%aM&/`?`=,c5A:8#1#cM%",
    "co5qF/`?eE9+kI`/c3d%/c3c/c3bE$c3tQ$+x[c3c'c3c)$c3c/c3b;c3uM$+x#c3dCc3c/c3c/c3bKc3bM$c3`~BcZ#",
    "eu=y.c7cKqEaCaI#a52anQh[`))=$b]E++KK+`/Cs6`Q#d%1+`Q#pA`9U$cAD+Ka%$`dYbW&$#d%1+m]Xe]W+'p)a%",
    "lr)`u:^(#&##p)a(+'rIa7&#$`o-dZ`9+M&M&M&bE.eE+%#gK-#gQ*c=3`9+M&M&M&bE.rY`Rjr1`m95#5#5#5#E%dAJ",
    "|`Ibs/5$+=#{xMjJc3c'c3c/c3c/c3c'c3c'c3c/c3c/c3c/c3c/c3c'c3c/c3c/c3c/c3c/c3c'c3c'c3c'c3c/c3c/",
    "lYc_Ic/c3c/c3c'c3c/c3b[c3c/c3c/c3c'c3c/c3c/c3c/c3c'c3c/c3c/c3c'c3c/c3c/c3c/c3c'c3c/c3c/c3c/c3",
    "iMc`:c3c/c3b[c3c/c3c/c3c/c3c'c3c/c3c/c3c/c3c/c3c'c3c/c3c/c3c/c3c'c3c/c3c/c3c/c3c/c3c'c3c/c3c'",
    "nYca+c/c3c/c3c/c3c/c3c'c3c/c3c'c3c'c3c/c3c/c3a7`G;3`a]#`i9&c3c/c3c/c3c/c3c/c3c/c3c/c3c/c3c/c3",
    "gMca\\c3c/c3c/c3bKc3c/c3c/c3c/c3c/c3c/c3c/c3c/c3bKc3c/c3b;c3c/c3c/c3c/c3c/c3c/c3c/c3c/c3c/c3",
    "iEcbLc3c/c3c/c3b;c3c/c3c/c3c/c3c/c3c/c3c/c3bKc3c/c3c/c3c/c3blZ()c0)cT'c2$'cF$)c0)cD)c0)d('",
    "bzJcd>'d*$)c1#%#%#%#cT)c0)`(#D#4#4#T#T#D#b.$)c0)d()c0)eL)c0)`(&&##c0&d9#bgI$bg<$&##c@#4$}`($",
    "b~*cfN%&$#c0%}h2#$}b4%@#D#c0%?bd<#hCbs>$$&##dD#`8$bcW``kE$+}fMcVbqY%`3`bo]`T354g%@C/eEVM&=$",
    "`cl1cpJ5#b)<]$5$=#`ch]8`cl9#aI,`ciO3`clG+`Q$+=$+=(+]$+=$+bIDS+3e1R+aK+c5(+++meU]+doA`_Sdx9v-",
    "`roMem(5#5#5#5#5#5#5#5#5#5#=$5#5#^(#>##>##>##>##f%8jI+`Y/5#5#5#5#5#5#5#5#5#5#5#=$5#5#^(#>##",
    "`saVeo8#>##>##f%8hQ$+++`A%`abVokShQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ,hQ",
    "cts5``e:`fy'`inOac?~}O`ax;eaCaow<#ai~3`{gCa_hSc_+hg3ty#hu[fdG`qC`i;gb'`hbSbhOb~Obf'pmSm`Ohb'",
    "arvQ``eUdg[xc+fq#tl'xp/adb[rz'vi[byC`hdK``c+eu3`kaOgz7evWd}+~xWads/aiS`f7ra[emSfv'dd/huKel?j?",
    "cvkM``f5h{+coKauS`f|C`_;ck[eq3ofWkfWs~#`th;epO~i+ckCn`CeyKthGi{;aag7bwSmr7c_[`h/na+`b/xtWaf~#",
    "chbI``fQ`px;a'`j_#b{#erGrw#jt[`jkWftO`bdWa_y/mq[cm3sw+a`/`cs7`gl7`j~;o~/qx#`_x?fy'xfO`kc'c|/",
    "b}}%``g/md7exO`_~[`ej?`dn[idC`a_[``j3q}C`hh;a|/kSwf?tw3d{Sg}3fmCab`3`k;dp/dySfhOi{[hx'}l/d`O",
    "dhd1``gJf7apgWto;d_+`ei#`se'bi+m[awSjfGah7bm[dr7cm+asKnu3i{Oj}CbjGadp;qKafO||/xq;a`'`mxK`g#",
    "bibI``h*gvWpt7hjS`f_'grWdg3`}3ap7s{Cw;j}#u[rc#da;i[zOalk7`k}3xs#dj/`xlKrq?an?jy+iSh~/cuCgi+",
    "b}cE``hGnuKkgCoa3`{y/`qy;agcWui[o#dt'`m3dx/`kSbgSc}C|c#ajt;pzW`vwSai~Clx7p}#`bm[`qx;`ySfg[ke;",
    "d_pY``i&ag|;a_Sg{Cii;`i#`m+coKfr7`~?if7h}Ka;ho;dlGagcG|i#{k7~tOa}[qp7pwKeaKalW`yu7erOtmCfqOj7",
    "cc{%``iCin+ah;{o[a_s/`v}K`sf[eOlmScmCzvW`bp+qwKeyW`jf7fkGm}#lr;`lq'mn3cxGawU$n`9#t}I$`boCbzO",
    "c`i-``j&cC[dG~w;{jKbe3ew-#df1#dr1$y3gn1%`OdWcz/lu'efGajwG`hOlG`qKbGmCam;m#l'`}[lWb~?`7clG{3d'",
    "bgn1``jNbqSrGv7aaKdgStO`b/am;x/ab'cv7v'`?'`'S[e;+vOgK`iCaj/aSf?`gKrGa`'qL#`~Od`/pW`o;f?`uKf'",
    "cxh9``k8p7fbG`dWg#`znKoas;m}w/`vl%$bx?i/a`#`{;fW`jGeSay#hCh'hOas3jWr7a+`c#y;b|'[r/h'`fWnOh3pW",
    "bfzQ``k\\r?gS`t7jOf/`aK`e+tOCfWcl/gK`s+`uKa'jG``G`kSes;dxSo3o;`jGrWf'}+3uSa3b7j?`3`sSa_K`c+w[",
    "cduU``lEs;`k#yCboKs[bwS`{Sh/a+`fGfGd[f/7a/i+iS`q[aiK`hW`f7|?ch7lOn7pOcS`Ge;b_[cy[laz?OkiSoxyG",
    "acjQ``m-c;ptkSjf7`cg[n~p#i#db}A`)b9#`.,%b4$++++++5#++++5#5#+5#+5#++++aO?`7`/g{nIayU5#`90qMa,+",
    "hds.`cuE#`p:e(#%#`a%c-+bu]mVecl)wpK,'k]`<+'+'+k|i1`ff=G`/mnzWmmtCi;`Oh?o#c+i;b+}a/nosSmq`K[a+",
    "au{Mbdi[mou#nnj#}q[d'mox7mov[`Ob`#ba+`/req;rehS`W~aG~i+`?dWK~iW~tG3bGa[`?+a3eK`'`/b7`74$mr|?",
    "bv|YbdjC}pSaSmsy+msw?SaSs3lCa+c3fOj/b?g[a+c<#aSa;`'a#`l7`c/`c;y7cKcv#fjG`e7d'b7p3u3'o;mxyK",
    "a}{%bdk,Ka#aK`'gCmy}KgSmyt#e3`Gi?q[`dyG`W`em;f0#m{hWmzw'aSa#`Gm{}Cm{{W[boKbkW`fa/`fiC`Wi[eO",
    "qa_EbdkMm}p+m}p?m}jK7a3l?+`geO`gi;dOaSdW`gp[ohvGohs'`gw#;;aKrjo#rjh#naj(#l{~[`de0#`g|+ozt?",
    "sio5bdl.pcw?`/`hb+`hh?eS`7cCq+`h{Gb[`ib/ncp'nci/p/C3/e+aKcS`S`?e3aKCb?`?gSj/cKoCnebOnee/gGm;",
    "bicMbdlRk[nemCnee/k7bK`kfS`l`?aSc+d#`kz#`lvWbWnhe+ngu/`c[v3`ma'`mjO`ml[cOwe+;uz'l3zxOa_{/`dq[",
    "bl~9bdm3Sg+`;njc3oyb;`nt?nCz7eSniq+nioWmO`_K`onS`ou#k[h?x7nisKnilS`p{'`qd?nkh7nka?`qd#`qh'e#",
    "bq|)bdmO+nltG~n+~|Onlo?nnkCnm|;`WlCv7d7fGf+d7a#`Onmo+nmyW``?g;`so7`s{S?nm~/nnyG`pOnmzOe;nmu7",
    "bvuEbdn1bC7`t{7`uaKeSOf/lnlWlmxCnoc#nnw7npc+nop;`ObGnq{Snqu7aSnrzO|OnryWa3`wkG`wo+`wm@#`xc+aS",
    "b{eEbdnNaKh/`xg7`xs;nun/nujKnuw#nup3mgv7mg`[nxc;b'qKprn[`G`yqKnxr''d/b?nxt[,#dO`yvC`z_3`y}?iK",
    "rzz9bdo/nzoWg3gC`zs7pwy#n{r+n|aKdOn|_Ok3`{o?`{zW`7Kn~bW`fX#n~u?`{uWp|o+n~{7;`|n+p}fGn~t#`}a7",
    "cdfAbdoJGbWoau+oagW`}gO`}u+fWg[`~_'qbcSc+qbb[qbv?obr#oc_Cob{Wl?`?odc[hOoda?ods3odq'mn|Oooq7",
    "chgUbdp(iSa``#a`g[`hb3pn}+`W`vr;`/mmo7;mo3aoeOaah7Oa;`rb;`re+3`7d?og{Cog{Gf?h7hWq7sCdGm[`aGnW",
    "ckqMbdpHa+og|'`h/r[qkm'ac_S3cKontWonj;oilWqmv3CqngC`eCqolKadf'`G`?3gCc7pWdSs+iOg[bGae`[aem+c3",
    "ais=bdq,aeyC;om};ommW[afb3aff'axzCrirGwCqwd3`/agjWi3s[z'opl/op`Ka[k#k3oq{Sb~bCkrl[`[e[kse+",
    "cwj1bdqHl7owb?bGouwGk;c3ovqSovp;`e#t/+k/`qSbOoxnGov|Kap_OapeKoxiKrie?ap~G`{zS`|gKoz{#{;rmqG`'",
    "da_%bdr(o}`7rojKro};o}m0#c#o~oKo}v[aqzCard'oSbGg#arkOruxWpag/`g3x/atoWc+aty[pdw;rzpSrzx/`b7p?",
    "dhi%bdrCauy/avaCK[`7[c[phj7",
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
        range_number(&s);
        if (range_number(&s) < c) low = mid;   // what lies before its first range
        else n = mid;
    }
    const char *s = line[low];
    uint32_t next = 0;
    int32_t value = 0;
    while (*s) {
        uint32_t head = range_number(&s), change = head / 4;
        uint32_t first = next + (head & 2 ? 1 + range_number(&s) : 0);
        uint32_t last = first + (head & 1 ? 1 + range_number(&s) : 0);
        value += change & 1 ? -(int32_t)(change / 2) - 1 : (int32_t)(change / 2);
        if (c <= last) return c >= first ? value : otherwise;
        next = last + 1;
    }
    return otherwise;
}

// each class's ranges, as pairs of a first and a last character
static const struct { char letter; const uint32_t *ranges; } MORE_CLASSES[] = {
    {' ', U"  "}, {'/', U"//"}, {'d', U"09"}, {'n', U"\n\n"}, {'r', U"\n\n\r\r"}, {'t', U"``"},
    {'f', U"$$++<>^^||~~"}, {'a', U"!/:@[`{~"}, {'k', U"\u3040\u30FF\u4E00\u9FA5"},
    {'p', U"!/:~\u2018\u201F\u3001\u3002\uFF01\uFF0F\uFF1A\uFF5E"}, {'z', U"\u3105\u312F"},
    {'K', U"\u0800\u9FA5\uAC00\uD7FF"}, {'g', U"\u3131\u318E\uAC00\uD7A3"},
    {'h', U"\u3400\u4DBF\u4E00\u9FFF\uF900\uFAFF\U00020000\U0002A6DF\U0002A700\U0002B81F"
          U"\U0002B920\U0002CEAF\U0002F800\U0002FA1F"},
    {'H', U"\u2E80\u2E99\u2E9B\u2EF3\u2F00\u2FD5\u3005\u3005\u3007\u3007\u3021\u3029\u3038\u303B"
          U"\U00016FE2\U00016FF1\U0002B820\U0002B91F\U0002CEB0\U0002EE5D\U00030000\U000323AF"},
    {'b', U"!!(),,..??||\u060C\u060C\u06D4\u06D4\u0964\u0964\u2026\u2026\u3001\u3002\uFF0C\uFF0C"},
    {'q', U"\u2014\u2014\u2018\u2019\u201C\u201D\u2026\u2026\u3001\u303F\uFE30\uFE4F\uFF01\uFF01"
          U"\uFF0C\uFF0C\uFF1A\uFF1B"},
    {'A', U"\u0E40\u0EFF\u1000\u109F\u1100\u11FF\u1780\u17FF\u2F00\u2FDF\u3040\u30FF\u3400\u4DBF"
          U"\u4E00\uFAFF\uFF65\uFF9F"},
};

static uint32_t unicode_lower(uint32_t c) {
    int32_t d = range_value(UNICODE_LOWER, COUNT(UNICODE_LOWER), c, INT32_MAX);
    if (d == INT32_MAX) return c;
    if (d == 0) return c | 1;   // a pair, upper even
    return d == -1 ? c + (c & 1) : c + d;   // upper odd
}

static uint64_t unicode_classes(uint32_t c) {
    static const char *const CLASS_LETTERS[] = {   // the last three: see UNICODE_CLASSES
        "ULu", "vLl", "Lc", "xL", "N", "M", "P", "S", "s", "C", "", "ND", "L", "UL", "ULc", "NW",
        "PW", "SW"};
    int32_t k = range_value(UNICODE_CLASSES, COUNT(UNICODE_CLASSES), c, 10);
    uint64_t set = 0, cased = CLASS('U') | CLASS('v') | CLASS('x');
    for (const char *letter = CLASS_LETTERS[k]; *letter; letter++) set |= CLASS(*letter);
    if (set & CLASS('L') && !(set & cased)) set |= CLASS(unicode_lower(c) == c ? 'v' : 'U');
    if (c == '~') set = 0;   // llama.cpp's expressions do not count it as a symbol
    if (k == 8 && c >= 0x80) return set;   // a space beyond ASCII is in no other class
    for (size_t i = 0; i < COUNT(MORE_CLASSES); i++)
        for (const uint32_t *range = MORE_CLASSES[i].ranges; *range; range += 2)
            if (c >= range[0] && c <= range[1]) set |= CLASS(MORE_CLASSES[i].letter);
    return set | (set & CLASS('x') && !(set & (CLASS('h') | CLASS('H'))) ? CLASS('y') : 0);
}

static uint32_t unicode_fold(uint32_t c, bool lower_case, bool strip_accents) {
    if (strip_accents) c = range_value(UNICODE_BASE, COUNT(UNICODE_BASE), c, c);
    uint64_t set = unicode_classes(c), drop = CLASS('C') | (strip_accents ? CLASS('M') : 0);
    if (c == UTF8_BAD || set & drop) return 0;
    return lower_case ? unicode_lower(c) : c;
}
