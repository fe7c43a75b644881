// SPDX-License-Identifier: MIT
// kernels.metal: the GPU kernels, in the words that Metal and C have in common. Metal compiles this
// text after quant.h; the tests include it in a C program and run it on a GPU made of software.
//
//    1. arguments         structs, function constants and sizes, which metal.c includes, too
//    2. groups            32 weights of any format, taken apart by quant.h's decoders
//       kernels           compute what these functions of llm.c do on the CPU:
//    3. embed             embed_row, for models without learned positions
//       norm              norm
//       quantize          round_32, but with float scales and sums of unrounded activations
//    4. gemv              matmul for one token; the epilogues are add and activate
//       attention         attention; if FUSED, qkv_row before it
//    5. ffn_block         forward, from the product after attention to the end of the layer
//    6. gemm              matmul for a chunk of tokens, with the same epilogues
//       rope              qkv_row
//       flash_attention   attention
//    7. argmax            sample, at temperature 0
//
// Names: tg is the threadgroup and tid a thread in it; sg is one of its nsg SIMD-groups, and lane a
// thread in that. g is a group of 32 weights, t a token, r a row. Grids have one dimension. Shapes
// are written outermost first, as in x[n][cols].
//
// Rules: a pointer's type begins with its address space. Threadgroup memory comes in by a single
// argument. simd_* functions and barriers stand only where all lanes, or all threads, arrive
// together. Metal has no double: write 1.0f. A large number takes the place of infinity, because
// exp(inf - inf) is NaN.
//
// To add a kernel: write the CPU's function in llm.c, the kernel here, its arguments and sizes in
// section 1 and its dispatch in metal.c, then add one line to KERNEL_TESTS in test.c.
#ifdef __METAL_VERSION__
#include <metal_stdlib>
using namespace metal;
#define shared_memory threadgroup(0)          // elsewhere the word threadgroup is an empty macro
#endif

// ---- 1. arguments ----
//
// What the kernels and metal.c must agree on stands here and nowhere else, except for the order of
// the buffers, which is in each kernel's signature.

#ifndef KERNEL_ARGS
#define KERNEL_ARGS

enum { FORMAT_F32 = 0, FORMAT_F16 = 1, FORMAT_Q8_0 = 8, FORMAT_BF16 = 30 };   // ggml's type numbers
enum { EPILOGUE_STORE, EPILOGUE_ADD, EPILOGUE_GLU };   // y = v, y += v, y = activation(gate) * v
// The next two are numbered as in llm.c. RoPE's pairs are (2i, 2i + 1) or (i, i + n_rot / 2).
enum { ACT_SILU, ACT_GELU, ACT_RELU2 };
enum { PAIRING_NONE, PAIRING_NEIGHBOURS, PAIRING_HALVES };

// The variants of a kernel: metal.c sets these constants when it makes a pipeline, so the compiler
// decides every `if` that depends on one.
#define FUNCTION_CONSTANTS(X) \
    X(FORMAT_0) X(FORMAT_1) X(FORMAT_2) X(FORMAT_3)   /* formats of up to four matrices */ \
    X(RAGGED)        /* the number of columns is not a multiple of 32 */ \
    X(NORMED)        /* gemv: the input passes through an RMSNorm first */ \
    X(CENTRED)       /* norm: LayerNorm, which subtracts the mean, instead of RMSNorm */ \
    X(BIASES)        /* bit i: matrix i has a bias */ \
    X(EPILOGUE)      /* what becomes of a product */ \
    X(ACTIVATION)    /* of the gate */ \
    X(SOFTCAPPED)    /* scores or logits become cap * tanh(score / cap) */ \
    X(HEAD_DIM)      /* size of a head, a multiple of 32 */ \
    X(PAIRING)       /* which numbers of a head RoPE rotates as a pair */ \
    X(QK_NORMED)     /* heads of Q and K pass through an RMSNorm before RoPE */ \
    X(FUSED)         /* attention: it also applies RoPE and writes the cache */ \
    X(CAUSAL)        /* a query does not see later positions */ \
    X(TILE_TOKENS)   /* gemm: tokens in a tile, as gemm_tokens says */ \
    X(INT8)          /* gemm: products of int8 codes */
#define X(name) C_##name,
enum { FUNCTION_CONSTANTS(X) N_CONSTANTS };
#undef X

// The geometry of the launches
enum {
    SIMD_LANES = 32,                                  // threads in a SIMD-group
    UNIT_SIMDGROUPS = 4,                              // of quantize and rope, each on its own
    NORM_THREADS = 256, ARGMAX_THREADS = 1024,        // at most
    GEMV_SIMDGROUPS = 2, GEMV_ROWS = 4,               // a SIMD-group takes at most 4 rows
    DOT_STEPS = 4,                                    // loads of floats that overlap
    X_STRIDE = 36, X_FLOATS = 32 * X_STRIDE,          // 32 groups of x, 4 floats between them
    ATTENTION_SIMDGROUPS = 8, ATTENTION_ROWS = 4,     // at most 8; each takes 4 rows at a time
    BLOCK_DIM = 1024,                                 // threads, and the longest row of x
    GEMM_TOKENS = 64, GEMM_SOME = 32, GEMM_FEW = 8,   // in a tile, by how many there are
    GEMM_ROWS = 64, GEMM_THREADS = 4 * SIMD_LANES,    // in a tile
    GEMM_K = 64, GEMM_STRIDE = GEMM_K + 8,            // columns in a step: two groups
    CODE_STRIDE = GEMM_K / 4 + 12,                    // the same as codes, and what belongs to them
    HEAD_MAX = 256,                                   // the largest HEAD_DIM
    FLASH_MIN = 8,                                    // tokens; fewer are left to attention
    FLASH_QUERIES = 32, FLASH_KEYS = 32,              // a tile; a SIMD-group takes 8 queries
    FLASH_SIMDGROUPS = FLASH_QUERIES / 8, FLASH_THREADS = FLASH_SIMDGROUPS * SIMD_LANES,
    // floats of threadgroup memory
    NORM_FLOATS = NORM_THREADS / SIMD_LANES,          // a sum from each SIMD-group
    ARGMAX_FLOATS = 2 * ARGMAX_THREADS / SIMD_LANES,  // a maximum and its index from each
    BLOCK_FLOATS = BLOCK_DIM / SIMD_LANES + BLOCK_DIM,   // sums, and a row of x
    FLASH_OWN = 8 * FLASH_KEYS + 8 * 8                // a SIMD-group's scores, a diagonal matrix
};

// Fixed-width scalars only, so that Metal and C lay the structs out alike. A matrix W[rows][cols]
// begins `start` bytes after the bound address, which Metal wants aligned; its products are
// multiplied by `scale`.
struct kernel_matrix { uint32_t start, row_bytes; int32_t rows; float scale; };
struct embed_args { struct kernel_matrix w; int32_t cols; };
struct norm_args { int32_t cols; float eps; };
struct quantize_args { int32_t groups; };                        // of 32, in all rows together
struct gemv_args { struct kernel_matrix w[3]; int32_t cols; float eps, softcap; };
struct gemm_args { struct kernel_matrix w[3]; int32_t cols, tokens; float softcap; };
struct attention_args {
    int32_t n, pos;                        // queries, and the position of the first
    int32_t n_head, n_kv, n_rot, sinks;    // sinks: 1 if each head has an attention sink
    int32_t rows, used, window, keep;      // rows of the ring, and of those used; see visible
    float eps, scale, softcap;
};
struct block_args { struct kernel_matrix w[4]; int32_t inner, dim, ff; float eps; };
struct argmax_args { int32_t n; };

static inline int div_up(int n, int size) { return (n + size - 1) / size; }

// threads for n values: whole SIMD-groups, and at most `most` threads
static inline int threads_for(int n, int most) {
    return n < most ? div_up(n, SIMD_LANES) * SIMD_LANES : most;
}

// Rows that a SIMD-group of gemv computes together, its unit. They share each load of x, at the
// price of registers; the more bytes a weight has, the fewer rows keep the memory busy.
static inline int gemv_rows(int format) {
    if (format == FORMAT_F32) return 1;
    return format == FORMAT_F16 || format == FORMAT_BF16 || format == FORMAT_Q8_0 ? 2 : GEMV_ROWS;
}
static inline int gemv_units(int format, int rows) { return div_up(rows, gemv_rows(format)); }
// tokens of gemm's tile for n, and its floats of threadgroup memory: x, and W as half
static inline int gemm_tokens(int n) {
    return n <= GEMM_FEW ? GEMM_FEW : n <= GEMM_SOME ? GEMM_SOME : GEMM_TOKENS;
}
static inline int gemm_floats(int tile) { return (tile + GEMM_ROWS / 2) * GEMM_STRIDE; }

// attention: a SIMD-group for every four steps through the used rows of the ring; memory for a
// query, a key, and each SIMD-group's output, maximum and sum
static inline int attention_simdgroups(int used) {
    int nsg = div_up(used, 4 * ATTENTION_ROWS);
    return nsg < ATTENTION_SIMDGROUPS ? nsg : ATTENTION_SIMDGROUPS;
}
static inline int attention_floats(int head, int nsg) { return (2 + nsg) * head + 2 * nsg; }

// flash_attention: a tile of keys or values as half, two in a float
static inline int flash_tile(int head) { return FLASH_KEYS * head / 2; }
static inline int flash_floats(int head) { return flash_tile(head) + FLASH_SIMDGROUPS * FLASH_OWN; }

#endif

#ifndef METAL_HOST

#define X(name) \
constant int name [[function_constant(C_##name)]];
FUNCTION_CONSTANTS(X)
#undef X

constant float UNSEEN = -1e30f;                       // the score of a key out of sight
constant float LOG2E = 1.44269504f;                   // exp(x) = exp2(x * LOG2E)

// ---- 2. groups ----
//
// A lane works on whole groups of 32 weights. A group of a block format is codes, scales and
// offsets, w[i] = d[i / 16] * q[i] + m[i / 16]; one of a float format is read weight by weight.

// q[32], d[2] and m[2] of group g of a row; four codes, signed bytes, in each word of q. Decoders
// count groups from the start of 256 weights.
static inline void group_decode(int format, device const uchar *row, uint g, thread uint *words,
        thread float *d, thread float *m) {
    thread int8_t *q = (thread int8_t *)words;
    switch (format) {
#define X(id, name, weights, bytes, per16, bias) \
    case id: \
        row += (ulong)(g / 8) * (256 / weights * bytes); \
        decode_##name((device const block_##name *)row, g % 8, 1, q, d, m); \
        break;
    QUANT_TYPES(X)
#undef X
    }
}

static inline float group_code(thread const uint *q, int i) { return quant_code(q[i / 4], i % 4); }

// Does a format have offsets m? Formats whose codes can be negative do not.
static inline bool format_offsets(int format) {
#define X(id, name, weights, bytes, per16, bias) (format == id && bias == 0) ||
    return QUANT_TYPES(X) false;
#undef X
}

// Has a format blocks of 32 weights? Their decoders are short.
static inline bool format_short(int format) {
#define X(id, name, weights, bytes, per16, bias) (format == id && weights == 32) ||
    return QUANT_TYPES(X) false;
#undef X
}

static inline bool format_float(int format) {
    return format == FORMAT_F32 || format == FORMAT_F16 || format == FORMAT_BF16;
}

// Four values from column i on, zeros past the last column. The address is always inside the row.
static inline float4 four_floats(device const float *x, int i, int cols) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (!RAGGED) return i < cols ? *(device const float4 *)(x + i) : v;
    for (int e = 0; e < 4; e++)
        if (i + e < cols) v[e] = x[i + e];
    return v;
}

static inline float half_weight(int format, device const uchar *row, int i) {   // of 16 bits
    if (format == FORMAT_F16) return (float)((device const half *)row)[i];
    return quant_from_bits((uint)((device const ushort *)row)[i] << 16);
}

// the same of a row of a float format
static inline float4 four_weights(int format, device const uchar *row, int i, int cols) {
    float4 w = {0.0f, 0.0f, 0.0f, 0.0f};
    if (format == FORMAT_F32) return four_floats((device const float *)row, i, cols);
    if (RAGGED) {
        for (int e = 0; e < 4; e++)
            if (i + e < cols) w[e] = half_weight(format, row, i + e);
        return w;
    }
    if (i >= cols) return w;
    if (format == FORMAT_F16) {
        half4 h = *(device const half4 *)(row + 2 * i);
        for (int e = 0; e < 4; e++) w[e] = (float)h[e];
        return w;
    }
    uint2 pairs = *(device const uint2 *)(row + 2 * i);
    for (int e = 0; e < 4; e++)
        w[e] = quant_from_bits(e % 2 ? pairs[e / 2] & 0xffff0000 : pairs[e / 2] << 16);
    return w;
}

// w[32] = group g of a row, with zeros past the last column
static inline void group_weights(int format, device const uchar *row, int g, int cols,
        thread float *w) {
    if (format_float(format)) {
        QUANT_UNROLL for (int i = 0; i < 32; i += 4) {
            float4 v = four_weights(format, row, 32 * g + i, cols);
            for (int e = 0; e < 4; e++) w[i + e] = v[e];
        }
        return;
    }
    uint q[8];
    float d[2], m[2];
    group_decode(format, row, g, q, d, m);
    QUANT_UNROLL for (int i = 0; i < 32; i++) w[i] = d[i / 16] * group_code(q, i) + m[i / 16];
}

// The products of R rows of W with x, a lane's share of them:
//   sum[r] += sum of w[r][i] * x[i] (NORMED: * norm[i]),   *square += sum of x[i] * x[i]
// So an RMSNorm of x needs no pass of its own: the caller adds `square` up over the lanes and
// divides the finished sums by the RMS. Rows past `last` repeat it; the caller ignores them.
//
// Of a float format neighbouring lanes take neighbouring weights, four each, so that together they
// load whole cache lines. The loads of several steps are under way at once.
static inline void floats_dot(int format, int R, device const uchar *w, ulong row_bytes, int last,
        device const float *x, device const float *norm, int cols, uint lane, thread float *sum,
        thread float *square) {
    for (int i0 = 4 * lane; i0 < cols; i0 += DOT_STEPS * 4 * SIMD_LANES) {
        float4 v[DOT_STEPS];
        QUANT_UNROLL for (int j = 0; j < DOT_STEPS; j++) {
            int i = i0 + j * 4 * SIMD_LANES;
            v[j] = four_floats(x, i, cols);
            QUANT_UNROLL for (int e = 0; e < 4; e++) *square += v[j][e] * v[j][e];
            if (NORMED) v[j] = v[j] * four_floats(norm, i, cols);
        }
        QUANT_UNROLL for (int r = 0; r < R; r++) {
            device const uchar *row = w + (ulong)min(r, last) * row_bytes;
            float4 ws[DOT_STEPS];
            QUANT_UNROLL for (int j = 0; j < DOT_STEPS; j++)
                ws[j] = four_weights(format, row, i0 + j * 4 * SIMD_LANES, cols);
            QUANT_UNROLL for (int j = 0; j < DOT_STEPS; j++)
                QUANT_UNROLL for (int e = 0; e < 4; e++) sum[r] += ws[j][e] * v[j][e];
        }
    }
}

// Of a block format a lane takes every 32nd group, with codes, scales and offsets as the decoder
// gives them. Its 32 floats of x come by way of threadgroup memory, xs[X_FLOATS]: the SIMD-group
// loads 1024 neighbours in whole cache lines and leaves each group where its lane finds it; without
// that memory, xs NULL, each lane loads its own. The
// sums of 16 x, which a group's offsets multiply, are computed once for all R rows.
static inline void groups_dot(int format, int R, device const uchar *w, ulong row_bytes, int last,
        device const float *x, device const float *norm, int cols, uint lane,
        threadgroup float *xs, thread float *sum, thread float *square) {
    for (int g0 = 0; g0 * 32 < cols; g0 += SIMD_LANES) {
        int g = g0 + lane;
        float4 v[8];
        float xsum[2] = {0.0f, 0.0f};
        QUANT_UNROLL for (int j = 0; j < 8; j++) {
            int col = xs ? 32 * g0 + 4 * (int)lane + 128 * j : 32 * g + 4 * j;
            v[j] = four_floats(x, col, cols);
            QUANT_UNROLL for (int e = 0; e < 4; e++) *square += v[j][e] * v[j][e];
            if (NORMED) v[j] = v[j] * four_floats(norm, col, cols);
        }
        uint q[GEMV_ROWS][8];
        float d[GEMV_ROWS][2], m[GEMV_ROWS][2];
        QUANT_UNROLL for (int r = 0; r < R; r++)
            if (!format_short(format))
                group_decode(format, w + (ulong)min(r, last) * row_bytes, min(g, (cols - 1) / 32),
                             q[r], d[r], m[r]);
        if (xs) {
            simdgroup_barrier(mem_flags::mem_threadgroup);    // the groups before have been read
            QUANT_UNROLL for (int j = 0; j < 8; j++)
                *(threadgroup float4 *)(xs + X_STRIDE * (4 * j + lane / 8) + lane % 8 * 4) = v[j];
            simdgroup_barrier(mem_flags::mem_threadgroup);    // these are there
            QUANT_UNROLL for (int j = 0; j < 8; j++)
                v[j] = *(threadgroup const float4 *)(xs + X_STRIDE * lane + 4 * j);
        }
        if (g * 32 >= cols) continue;                     // the last time: no barrier follows
        QUANT_UNROLL for (int i = 0; i < 32; i++) xsum[i / 16] += v[i / 4][i % 4];
        QUANT_UNROLL for (int r = 0; r < R; r++) {
            float dot[2] = {0.0f, 0.0f};
            if (format_short(format))
                group_decode(format, w + (ulong)min(r, last) * row_bytes, g, q[r], d[r], m[r]);
            QUANT_UNROLL for (int i = 0; i < 16; i++) {
                dot[0] += group_code(q[r], i) * v[i / 4][i % 4];
                dot[1] += group_code(q[r], i + 16) * v[i / 4 + 4][i % 4];
            }
            sum[r] += d[r][0] * dot[0] + d[r][1] * dot[1];
            if (format_offsets(format)) sum[r] += m[r][0] * xsum[0] + m[r][1] * xsum[1];
        }
    }
}

static inline void rows_dot(int format, int R, device const uchar *w, ulong row_bytes, int last,
        device const float *x, device const float *norm, int cols, uint lane,
        threadgroup float *xs, thread float *sum, thread float *square) {
    if (format_float(format))
        floats_dot(format, R, w, row_bytes, last, x, norm, cols, lane, sum, square);
    else groups_dot(format, R, w, row_bytes, last, x, norm, cols, lane, xs, sum, square);
}

static inline float softcap(float x, float cap) { return SOFTCAPPED ? cap * tanh(x / cap) : x; }

static inline float activation(float x) {
    if (ACTIVATION == ACT_SILU) return x / (1.0f + exp(-x));
    if (ACTIVATION == ACT_GELU) {   // past 10 tanh is 1, but its exp might overflow
        float t = 0.79788456f * x * (1.0f + 0.044715f * x * x);
        return 0.5f * x * (1.0f + tanh(clamp(t, -10.0f, 10.0f)));
    }
    float r = max(x, 0.0f);
    return r * r;
}

// stores v in y by way of the soft cap and the epilogue
static inline void finish(device float *y, float v, float cap, float gate) {
    v = softcap(v, cap);
    if (EPILOGUE == EPILOGUE_ADD) v += *y;
    if (EPILOGUE == EPILOGUE_GLU) v *= activation(gate);
    *y = v;
}

// ---- 3. embed, norms ----

// x[n][cols] = scale * W[ids[n]][cols]. Grid: a SIMD-group for each token.
kernel void embed(device const uchar *w [[buffer(0)]], device const int *ids [[buffer(1)]],
        device float *x [[buffer(2)]], constant struct embed_args *a [[buffer(3)]],
        uint t [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    device const uchar *row = w + a->w.start + (ulong)ids[t] * a->w.row_bytes;
    device float *out = x + (ulong)t * a->cols;
    for (int g = lane; g * 32 < a->cols; g += SIMD_LANES) {
        float v[32];
        group_weights(FORMAT_0, row, g, a->cols, v);
        for (int i = 0; i < 32; i++)
            if (!RAGGED || 32 * g + i < a->cols) out[32 * g + i] = v[i] * a->w.scale;
    }
}

// the sum of v over the threadgroup, for every thread; part[nsg]
static inline float sum_all(float v, threadgroup float *part, uint nsg, uint sg, uint lane) {
    v = simd_sum(v);
    threadgroup_barrier(mem_flags::mem_threadgroup);      // what stood in `part` has been read
    if (lane == 0) part[sg] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);      // each SIMD-group's sum is there
    return simd_sum(lane < nsg ? part[lane] : 0.0f);
}

// y[n][cols] = z / sqrt(mean(z * z) + eps) * w + bias, where z = x for RMSNorm, and x - mean(x) if
// CENTRED; or y += that, since Gemma normalises what it adds to x. The variance takes a pass of its
// own, because most digits would cancel in mean(x * x) - mean(x) * mean(x). Grid: a threadgroup for
// each row. Bound by memory: for 4 FLOP a value it moves 3 or 4 floats.
kernel void norm(device const float *x [[buffer(0)]], device const float *w [[buffer(1)]],
        device const float *bias [[buffer(2)]], device float *y [[buffer(3)]],
        constant struct norm_args *a [[buffer(4)]],
        threadgroup float *shared [[shared_memory]],                           // [NORM_FLOATS]
        uint t [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
        uint nsg [[simdgroups_per_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]],
        uint lane [[thread_index_in_simdgroup]]) {
    float mean = 0.0f, square = 0.0f;
    x += (ulong)t * a->cols;
    y += (ulong)t * a->cols;
    for (int i = tid; CENTRED && i < a->cols; i += nsg * SIMD_LANES) mean += x[i];
    if (CENTRED) mean = sum_all(mean, shared, nsg, sg, lane) / (float)a->cols;
    for (int i = tid; i < a->cols; i += nsg * SIMD_LANES) square += (x[i] - mean) * (x[i] - mean);
    float scale = rsqrt(sum_all(square, shared, nsg, sg, lane) / (float)a->cols + a->eps);
    for (int i = tid; i < a->cols; i += nsg * SIMD_LANES) {
        float v = (x[i] - mean) * scale * w[i];
        finish(&y[i], BIASES & 1 ? v + bias[i] : v, 0.0f, 0.0f);
    }
}

// Activations for gemm's INT8 variant: 32 of them share a scale, x = scale * q. Next to it stand
// their two sums of 16, which the weights' offsets multiply. Grid: a SIMD-group for each group.
kernel void quantize(device const float *x [[buffer(0)]], device int8_t *q [[buffer(1)]],
        device float *scales [[buffer(2)]],                    // [groups][3]: a scale, two sums
        constant struct quantize_args *a [[buffer(3)]],
        uint tg [[threadgroup_position_in_grid]], uint nsg [[simdgroups_per_threadgroup]],
        uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    int g = tg * nsg + sg;
    if (g >= a->groups) return;                           // a whole SIMD-group: no barrier follows
    float v = x[(ulong)g * 32 + lane], top = simd_max(fabs(v));
    float low = simd_sum(lane < 16 ? v : 0.0f), high = simd_sum(lane < 16 ? 0.0f : v);
    q[(ulong)g * 32 + lane] = (int8_t)rint(v * (127.0f / max(top, 1e-30f)));
    if (lane < 3) scales[3 * g + lane] = lane == 0 ? top / 127.0f : lane == 1 ? low : high;
}

// ---- 4. decode ----
//
// One token is bound by memory: each weight is read once, for 2 FLOP. So a layer is five
// dispatches, which load each byte of weights once, decode it in registers, and forget it:
//   gemv (norm, Q, K, V, biases) | attention | gemv (Wo, added to x) |
//   gemv (norm, gate, up, activation) | gemv (down, added to x)
// Every SIMD-group computes the norm of its input anew. That costs it 8 bytes a column from the
// cache, besides R * (0.5 to 4) bytes a column of weights; one more dispatch would cost more.

// rows of a unit; with the GLU, those of up are gate's
static inline int unit_rows(int format) {
    return gemv_rows(EPILOGUE == EPILOGUE_GLU ? FORMAT_0 : format);
}

// v[r] = scale * (W x)[row + r] + bias[row + r], in all lanes, for a unit's rows of matrix `part`
static inline void gemv_product(int format, int part, int unit, device const uchar *w,
        device const float *bias, device const float *x, device const float *norm,
        constant struct gemv_args *a, uint lane, threadgroup float *xs, thread float *v) {
    int R = unit_rows(format), row = unit * R, last = a->w[part].rows - 1 - row;
    float sum[GEMV_ROWS] = {0.0f, 0.0f, 0.0f, 0.0f}, square = 0.0f, scale = a->w[part].scale;
    rows_dot(format, R, w + a->w[part].start + (ulong)row * a->w[part].row_bytes,
             a->w[part].row_bytes, last, x, norm, a->cols, lane, xs, sum, &square);
    if (NORMED) scale *= rsqrt(simd_sum(square) / (float)a->cols + a->eps);
    QUANT_UNROLL for (int r = 0; r < R; r++) {
        v[r] = simd_sum(sum[r]) * scale;
        if (BIASES >> part & 1) v[r] += bias[row + min(r, last)];
    }
}

// y = that, with the epilogue; gate[R] is the GLU's other factor before its activation
static inline void gemv_unit(int format, int part, int unit, device const uchar *w,
        device const float *bias, device const float *x, device const float *norm,
        thread const float *gate, device float *y, constant struct gemv_args *a, uint lane,
        threadgroup float *xs) {
    int R = unit_rows(format), row = unit * R;
    float v[GEMV_ROWS];
    gemv_product(format, part, unit, w, bias, x, norm, a, lane, xs, v);
    QUANT_UNROLL for (int r = 0; r < R; r++)
        if (lane == 0 && row + r < a->w[part].rows) finish(&y[row + r], v[r], a->softcap, gate[r]);
}

// y0 = W0 x, y1 = W1 x and y2 = W2 x, for up to three matrices of the same x (Q, K and V).
// EPILOGUE_GLU: y0 = activation(W0 x) * (W1 x); as one SIMD-group computes both products of its
// rows, neither is ever in memory. Grid: a SIMD-group for each unit of all matrices, or of W0 for
// the GLU. Each has threadgroup memory of its own.
kernel void gemv(device const uchar *w0 [[buffer(0)]], device const uchar *w1 [[buffer(1)]],
        device const uchar *w2 [[buffer(2)]], device const float *bias0 [[buffer(3)]],
        device const float *bias1 [[buffer(4)]], device const float *bias2 [[buffer(5)]],
        device const float *x [[buffer(6)]], device const float *norm [[buffer(7)]],
        device float *y0 [[buffer(8)]], device float *y1 [[buffer(9)]],
        device float *y2 [[buffer(10)]], constant struct gemv_args *a [[buffer(11)]],
        threadgroup float *shared [[shared_memory]],                           // [nsg][X_FLOATS]
        uint tg [[threadgroup_position_in_grid]], uint nsg [[simdgroups_per_threadgroup]],
        uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float *xs = shared + sg * X_FLOATS;
    float gate[GEMV_ROWS] = {0.0f, 0.0f, 0.0f, 0.0f};
    int unit = tg * nsg + sg, n0 = gemv_units(FORMAT_0, a->w[0].rows);
    int n1 = n0 + gemv_units(FORMAT_1, a->w[1].rows), n2 = n1 + gemv_units(FORMAT_2, a->w[2].rows);
    if (EPILOGUE == EPILOGUE_GLU) {
        if (unit >= n0) return;                           // a whole SIMD-group: no barrier follows
        gemv_product(FORMAT_0, 0, unit, w0, bias0, x, norm, a, lane, xs, gate);
        gemv_unit(FORMAT_1, 1, unit, w1, bias1, x, norm, gate, y0, a, lane, xs);
    } else if (unit < n0) {
        gemv_unit(FORMAT_0, 0, unit, w0, bias0, x, norm, gate, y0, a, lane, xs);
    } else if (unit < n1) {
        gemv_unit(FORMAT_1, 1, unit - n0, w1, bias1, x, norm, gate, y1, a, lane, xs);
    } else if (unit < n2) {
        gemv_unit(FORMAT_2, 2, unit - n1, w2, bias2, x, norm, gate, y2, a, lane, xs);
    }
}

// Where a head's pair p has its first (which = 0) or second number. After the n_rot numbers that
// RoPE rotates, pairs are neighbours, and pass unchanged.
static inline int pair_index(int p, int which, int n_rot) {
    bool apart = PAIRING == PAIRING_HALVES && p < n_rot / 2;
    return apart ? p + which * (n_rot / 2) : 2 * p + which;
}

// QK norm and RoPE of one head by one SIMD-group: lane l gets pairs l, l + 32, ... in v, turned
// into (x0 * cos - x1 * sin, x0 * sin + x1 * cos). The host has computed angles[n_rot / 2][2], the
// cosine and sine of each pair's angle, in double.
static inline void head_rope(device const float *x, device const float *norm,
        device const float *angles, constant struct attention_args *a, uint lane, thread float *v) {
    float square = 0.0f, scale = 1.0f;
    for (int p = lane, i = 0; p < HEAD_DIM / 2; p += SIMD_LANES, i += 2)
        for (int j = 0; j < 2; j++) {
            v[i + j] = x[pair_index(p, j, a->n_rot)];
            square += v[i + j] * v[i + j];
        }
    if (QK_NORMED) scale = rsqrt(simd_sum(square) / (float)HEAD_DIM + a->eps);
    for (int p = lane, i = 0; p < HEAD_DIM / 2; p += SIMD_LANES, i += 2) {
        float x0 = v[i] * scale, x1 = v[i + 1] * scale, c = 1.0f, s = 0.0f;
        if (QK_NORMED) {
            x0 *= norm[pair_index(p, 0, a->n_rot)];
            x1 *= norm[pair_index(p, 1, a->n_rot)];
        }
        if (PAIRING != PAIRING_NONE && p < a->n_rot / 2) {
            c = angles[2 * p];
            s = angles[2 * p + 1];
        }
        v[i] = x0 * c - x1 * s;
        v[i + 1] = x0 * s + x1 * c;
    }
}

// the same to threadgroup memory, out[HEAD_DIM], where every lane can read every number
static inline void head_stage(device const float *x, device const float *norm,
        device const float *angles, constant struct attention_args *a, uint lane,
        threadgroup float *out) {
    float v[HEAD_MAX / SIMD_LANES];
    head_rope(x, norm, angles, a, lane, v);
    for (int p = lane, i = 0; p < HEAD_DIM / 2; p += SIMD_LANES, i += 2)
        for (int j = 0; j < 2; j++) out[pair_index(p, j, a->n_rot)] = v[i + j];
}

// Does a query at pos_q see the key at pos_k (-1: the row is empty)? It sees itself, the window - 1
// positions before it, and the first `keep`, wherever in the ring their rows are.
static inline bool visible(int pos_k, int pos_q, constant struct attention_args *a) {
    return pos_k >= 0 &&
           (!CAUSAL || (pos_k <= pos_q && (pos_q - pos_k < a->window || pos_k < a->keep)));
}

// the row for a position: the first `keep` rows are pinned, the others are a ring
static inline int ring_row(int pos, constant struct attention_args *a) {
    return pos < a->keep ? pos : a->keep + (pos - a->keep) % (a->rows - a->keep);
}

// A lane's part of an online softmax: its numbers of the query and of o = sum of exp2(score - m) *
// value, where m is the largest score so far; sum = sum of exp2(score - m).
struct softmax_state { float q[HEAD_MAX / SIMD_LANES], o[HEAD_MAX / SIMD_LANES], m, sum; };

// Adds the next rows of the ring. As there are several, their dot products overlap, and o is
// rescaled only once. This dispatch writes row `slot`, perhaps in another threadgroup, so the key
// and value of that row are taken from k_new and v_new.
static inline void attention_rows(device const half *k, device const half *v,
        device const int *pos_k, threadgroup const float *k_new, device const float *v_new, int pos,
        int slot, int r0, constant struct attention_args *a, thread struct softmax_state *state) {
    float s[ATTENTION_ROWS], top = state->m;
    for (int i = 0; i < ATTENTION_ROWS; i++) {
        int r = r0 + i;
        s[i] = UNSEEN;
        if (r >= a->used || !visible(pos_k[r], pos, a)) continue;         // so do all lanes
        float dot = 0.0f;
        for (int e = 0; e < HEAD_DIM / SIMD_LANES; e++) {
            half key = r == slot ? (half)k_new[e] : k[(ulong)r * HEAD_DIM + e];
            dot += state->q[e] * (float)key;
        }
        s[i] = softcap(simd_sum(dot), a->softcap) * (SOFTCAPPED ? LOG2E : 1.0f);
        top = max(top, s[i]);
    }
    float shrink = exp2(state->m - top);
    state->m = top;
    state->sum *= shrink;
    for (int e = 0; e < HEAD_DIM / SIMD_LANES; e++) state->o[e] *= shrink;
    for (int i = 0; i < ATTENTION_ROWS; i++) {
        int r = r0 + i;
        if (s[i] == UNSEEN) continue;
        float p = exp2(s[i] - top);
        state->sum += p;
        for (int e = 0; e < HEAD_DIM / SIMD_LANES; e++) {
            half value = r == slot ? (half)v_new[e] : v[(ulong)r * HEAD_DIM + e];
            state->o[e] += p * (float)value;
        }
    }
}

// Merges the SIMD-groups' parts, each with a maximum of its own. An attention sink is a score
// without a value: it counts only in the sum.
static inline void attention_merge(thread const struct softmax_state *state,
        threadgroup float *shared, device const float *sink, device float *out, uint nsg, uint sg,
        uint lane, constant struct attention_args *a) {
    threadgroup float *os = shared, *ms = os + nsg * HEAD_DIM, *sums = ms + nsg;
    int first = lane * (HEAD_DIM / SIMD_LANES);
    for (int e = 0; e < HEAD_DIM / SIMD_LANES; e++) os[sg * HEAD_DIM + first + e] = state->o[e];
    if (lane == 0) ms[sg] = state->m;
    if (lane == 0) sums[sg] = state->sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);      // each SIMD-group's part is there
    if (sg > 0) return;
    float m = a->sinks ? *sink * LOG2E : UNSEEN;
    for (uint i = 0; i < nsg; i++) m = max(m, ms[i]);
    float sum = a->sinks ? exp2(*sink * LOG2E - m) : 0.0f;
    for (uint i = 0; i < nsg; i++) sum += sums[i] * exp2(ms[i] - m);
    for (int e = 0; e < HEAD_DIM / SIMD_LANES; e++) {
        float total = 0.0f;
        for (uint i = 0; i < nsg; i++) total += os[i * HEAD_DIM + first + e] * exp2(ms[i] - m);
        out[first + e] = sum > 0.0f ? total / sum : 0.0f; // 0 if the query sees nothing
    }
}

// out[n][n_head][HEAD_DIM] = sum over visible keys of softmax(scale * q k) * v, for few queries.
// FUSED, for one token: QK norm, RoPE and the write to the cache happen here, too. Each query head
// then computes its newest key itself, since another threadgroup may still be writing it.
// Grid: a threadgroup for each token and query head. Its SIMD-groups take turns at the rows of the
// ring, and merge at the end. Bound by memory: a row's K and V are 4 * HEAD_DIM bytes, for as many
// FLOP of each query head; but the heads that share K and V find them in the cache.
kernel void attention(device const float *q [[buffer(0)]], device const float *k_new [[buffer(1)]],
        device const float *v_new [[buffer(2)]], device half *k [[buffer(3)]],
        device half *v [[buffer(4)]], device const int *pos_k [[buffer(5)]],
        device const float *q_norm [[buffer(6)]], device const float *k_norm [[buffer(7)]],
        device const float *angles [[buffer(8)]],                              // [n_rot / 2][2]
        device const float *sinks [[buffer(9)]], device float *out [[buffer(10)]],
        constant struct attention_args *a [[buffer(11)]],
        threadgroup float *shared [[shared_memory]],                           // attention_floats
        uint tg [[threadgroup_position_in_grid]], uint nsg [[simdgroups_per_threadgroup]],
        uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    int t = tg / a->n_head, head = tg % a->n_head, group = a->n_head / a->n_kv, kv = head / group;
    int first = lane * (HEAD_DIM / SIMD_LANES);           // where this lane's numbers begin
    ulong ring = (ulong)kv * a->rows * HEAD_DIM + first;
    int pos = a->pos + t, slot = FUSED ? ring_row(pos, a) : -1;
    threadgroup float *qs = shared, *ks = qs + HEAD_DIM;
    struct softmax_state state;

    // the query and the newest key go through threadgroup memory, because RoPE's pairs cross lanes
    q += (ulong)tg * HEAD_DIM;
    v_new += kv * HEAD_DIM + first;
    if (FUSED && sg == 0) head_stage(q, q_norm, angles, a, lane, qs);
    if (FUSED && sg == nsg - 1) head_stage(k_new + kv * HEAD_DIM, k_norm, angles, a, lane, ks);
    threadgroup_barrier(mem_flags::mem_threadgroup);      // staged by two SIMD-groups, read by all
    for (int e = 0; e < HEAD_DIM / SIMD_LANES; e++) {
        float x = FUSED ? qs[first + e] : q[first + e];
        state.q[e] = x * a->scale * (SOFTCAPPED ? 1.0f : LOG2E);
        state.o[e] = 0.0f;
        if (!FUSED || sg > 0 || head % group > 0) continue;
        k[ring + (ulong)slot * HEAD_DIM + e] = (half)ks[first + e];
        v[ring + (ulong)slot * HEAD_DIM + e] = (half)v_new[e];
    }
    state.m = UNSEEN;
    state.sum = 0.0f;
    for (int r = sg * ATTENTION_ROWS; r < a->used; r += nsg * ATTENTION_ROWS)
        attention_rows(k + ring, v + ring, pos_k, ks + first, v_new, pos, slot, r, a, &state);
    out += (ulong)tg * HEAD_DIM;
    attention_merge(&state, ks + HEAD_DIM, sinks + head, out, nsg, sg, lane, a);
}

// ---- 5. ffn_block ----

// (W x)[row] * scale by one SIMD-group
static inline float block_row(int format, constant struct kernel_matrix *w, int row,
        device const uchar *data, device const float *x, int cols, uint lane) {
    float sum[1] = {0.0f}, unused = 0.0f;
    rows_dot(format, 1, data + w->start + (ulong)row * w->row_bytes, w->row_bytes, 0, x, x, cols,
             lane, 0, sum, &unused);
    return simd_sum(sum[0]) * w->scale;
}

// The rest of a layer after attention, by one threadgroup of BLOCK_DIM threads:
//   x += Wo att,   n = rms_norm(x),   h = activation(gate n) * (up n),   x += down h
// It shows fusion taken to its end, and why to stop short of that: a threadgroup runs on one core.
// A layer of Qwen3-0.6B has 12 MB of these weights at 8 bits. One of an M1's eight cores may load
// some 8 of its 68 GB/s, which takes 1.5 ms; the chain of section 4 takes 0.2 ms, and a few
// microseconds for two more dispatches. Thread i owns x[i], hence dim <= BLOCK_DIM. NORMED is 0, as
// all threads compute the norm together. n and h are in device memory, but only this threadgroup
// reads them, so barriers are enough.
[[max_total_threads_per_threadgroup(BLOCK_DIM)]]
kernel void ffn_block(device const uchar *wo [[buffer(0)]], device const uchar *gate [[buffer(1)]],
        device const uchar *up [[buffer(2)]], device const uchar *down [[buffer(3)]],
        device const float *att [[buffer(4)]], device const float *norm [[buffer(5)]],
        device float *x [[buffer(6)]], device float *h [[buffer(7)]],          // h[ff], then n[dim]
        constant struct block_args *a [[buffer(8)]],
        threadgroup float *shared [[shared_memory]],                           // [BLOCK_FLOATS]
        uint tid [[thread_index_in_threadgroup]], uint nsg [[simdgroups_per_threadgroup]],
        uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float *y = shared + BLOCK_DIM / SIMD_LANES;
    device float *n = h + a->ff;
    bool mine = (int)tid < a->dim;
    for (int row = sg; row < a->dim; row += nsg) {
        float v = block_row(FORMAT_0, &a->w[0], row, wo, att, a->inner, lane);
        if (lane == 0) y[row] = v;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // y is whole
    float r = mine ? x[tid] + y[tid] : 0.0f;              // the residual stream, kept by its thread
    float scale = rsqrt(sum_all(r * r, shared, nsg, sg, lane) / (float)a->dim + a->eps);
    if (mine) n[tid] = r * scale * norm[tid];
    threadgroup_barrier(mem_flags::mem_device);           // n is whole
    for (int row = sg; row < a->ff; row += nsg) {
        float v = block_row(FORMAT_1, &a->w[1], row, gate, n, a->dim, lane);
        float u = block_row(FORMAT_2, &a->w[2], row, up, n, a->dim, lane);
        if (lane == 0) h[row] = activation(v) * u;
    }
    threadgroup_barrier(mem_flags::mem_device);           // h is whole, and y has been read
    for (int row = sg; row < a->dim; row += nsg) {
        float v = block_row(FORMAT_3, &a->w[3], row, down, h, a->ff, lane);
        if (lane == 0) y[row] = v;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // y is whole again
    if (mine) x[tid] = r + y[tid];
}

// ---- 6. prefill ----
//
// A chunk is bound by arithmetic: each weight serves all of its tokens. Tiles of both operands are
// staged in threadgroup memory, and whole SIMD-groups multiply them as 8 x 8 matrices. Weights
// become half there, whose 11 bits hold the codes of any format. Activations stay float, because
// those of Gemma overflow half; so do all sums.

// ws[GEMM_ROWS][GEMM_STRIDE] = a step's columns of rows from `row` on, as half. Of a float format
// neighbouring threads take neighbouring weights, four each; of a block format a thread decodes a
// group, neighbours the two of a row. INT8: see tile_multiply_codes.
static inline void stage_weights(int format, device const uchar *w,
        constant struct kernel_matrix *m, int row, int k0, int cols, uint tid,
        threadgroup float *ws) {
    int fours = format_float(format) ? GEMM_K / 4 : 2;    // shares of a row
    for (int i = tid; i < GEMM_ROWS * fours; i += GEMM_THREADS) {
        int r = i / fours, col = k0 + i % fours * (GEMM_K / fours);
        device const uchar *from = w + m->start + (ulong)min(row + r, m->rows - 1) * m->row_bytes;
        threadgroup half *to = (threadgroup half *)ws + r * GEMM_STRIDE + col - k0;
        half4 h = {(half)0.0f, (half)0.0f, (half)0.0f, (half)0.0f};
        if (format_float(format)) {
            float4 v = four_weights(format, from, col, cols);
            for (int e = 0; e < 4; e++) h[e] = (half)v[e];
            *(threadgroup half4 *)to = h;
            continue;
        }
        uint q[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        float d[2] = {0.0f, 0.0f}, o[2] = {0.0f, 0.0f};
        if (col < cols) group_decode(format, from, col / 32, q, d, o);
        threadgroup float *codes = ws + r * CODE_STRIDE + (col - k0) / 4;
        threadgroup float *scales = ws + r * CODE_STRIDE + GEMM_K / 4 + (col - k0) / 8;
        for (int j = 0; INT8 && j < 8; j++) ((threadgroup uint *)codes)[j] = q[j];
        for (int j = 0; INT8 && j < 4; j++) scales[j] = j < 2 ? d[j] : o[j - 2];
        if (INT8) continue;
        QUANT_UNROLL for (int j = 0; j < 32; j += 4) {
            for (int e = 0; e < 4; e++)
                h[e] = (half)(d[j / 16] * group_code(q, j + e) + o[j / 16]);
            *(threadgroup half4 *)(to + j) = h;
        }
    }
}

// xs[TILE_TOKENS][GEMM_STRIDE] = a step's columns of x
static inline void stage_floats(device const float *x, int token, int k0,
        constant struct gemm_args *a, uint tid, threadgroup float *xs) {
    for (int i = tid; i < TILE_TOKENS * (GEMM_K / 4); i += GEMM_THREADS) {
        int t = i / (GEMM_K / 4), col = i % (GEMM_K / 4) * 4;
        device const float *from = x + (ulong)min(token + t, a->tokens - 1) * a->cols;
        *(threadgroup float4 *)(xs + t * GEMM_STRIDE + col) = four_floats(from, k0 + col, a->cols);
    }
}

// the same of codes, xs[TILE_TOKENS][CODE_STRIDE]: behind 16 words of codes a scale and two sums of
// each group
static inline void stage_codes(device const uint *xq, device const float *xscales, int token,
        int k0, constant struct gemm_args *a, uint tid, threadgroup float *xs) {
    int groups = a->cols / 32;
    for (int i = tid; i < TILE_TOKENS * 2; i += GEMM_THREADS) {
        int g = k0 / 32 + i % 2;
        ulong from = (ulong)min(token + i / 2, a->tokens - 1) * groups + min(g, groups - 1);
        threadgroup float *to = xs + i / 2 * CODE_STRIDE;
        threadgroup uint *codes = (threadgroup uint *)to + i % 2 * 8;
        for (int j = 0; j < 8; j++) codes[j] = xq[from * 8 + j];
        for (int j = 0; j < 3; j++) to[GEMM_K / 4 + 4 * (i % 2) + j] = xscales[from * 3 + j];
    }
}

// Where a SIMD-group's 8 x 8 blocks begin: 2 or 4 x 4 (tokens x rows) in a tile, 1 x 2 in a small
// one
static inline int tile_down(void) { return TILE_TOKENS > GEMM_FEW ? TILE_TOKENS / 16 : 1; }
static inline int tile_across(void) { return TILE_TOKENS > GEMM_FEW ? 4 : 2; }
static inline int tile_token(int i, uint sg) {
    return 8 * i + (TILE_TOKENS > GEMM_FEW ? (int)sg / 2 * (TILE_TOKENS / 2) : 0);
}
static inline int tile_row(int j, uint sg) {
    return 8 * j + (TILE_TOKENS > GEMM_FEW ? (int)sg % 2 * 32 : (int)sg * 16);
}

// c += xs ws' for those blocks; xs[TILE_TOKENS][GEMM_STRIDE], ws[GEMM_ROWS][GEMM_STRIDE]
static inline void tile_multiply(threadgroup const float *xs, threadgroup const half *ws, uint sg,
        thread simdgroup_float8x8 *c) {
    simdgroup_float8x8 mx[4];
    simdgroup_half8x8 mw;
    QUANT_UNROLL for (int i = 0; i < 4; i++) mx[i] = simdgroup_float8x8(0.0f);
    for (int k = 0; k < GEMM_K; k += 8) {
        QUANT_UNROLL for (int i = 0; i < tile_down(); i++)
            simdgroup_load(mx[i], xs + tile_token(i, sg) * GEMM_STRIDE + k, GEMM_STRIDE);
        QUANT_UNROLL for (int j = 0; j < tile_across(); j++) {
            simdgroup_load(mw, ws + tile_row(j, sg) * GEMM_STRIDE + k, GEMM_STRIDE, 0, true);
            QUANT_UNROLL for (int i = 0; i < tile_down(); i++)
                simdgroup_multiply_accumulate(c[4 * i + j], mx[i], mw, c[4 * i + j]);
        }
    }
}

// The same for codes: a thread computes 4 x 4 outputs. It adds up 16 products as integers; scales,
// and offsets times sums of 16 activations, follow in float. A row of ws has, behind 16 words of
// codes, two scales and two offsets of each group.
static inline int code_token(int i, uint tid) { return (int)tid / 16 * 4 + i / 4; }
static inline int code_row(int i, uint tid) { return (int)tid % 16 + i % 4 * 16; }
static inline void tile_multiply_codes(threadgroup const float *xs, threadgroup const float *ws,
        uint tid, thread float *c) {
    for (int h = 0; h < GEMM_K / 16; h++)
        QUANT_UNROLL for (int i = 0; i < 16; i++) {
            threadgroup const float *x = xs + code_token(i, tid) * CODE_STRIDE;
            threadgroup const float *w = ws + code_row(i, tid) * CODE_STRIDE;
            uint4 xq = *(threadgroup const uint4 *)(x + 4 * h);
            uint4 wq = *(threadgroup const uint4 *)(w + 4 * h);
            int dot = 0;
            QUANT_UNROLL for (int k = 0; k < 16; k++)
                dot += (int)(int8_t)(xq[k / 4] >> 8 * (k % 4) & 255) *
                       (int)(int8_t)(wq[k / 4] >> 8 * (k % 4) & 255);
            x += GEMM_K / 4 + h / 2 * 4;                  // the group's scale and sums
            w += GEMM_K / 4 + h / 2 * 4 + h % 2;          // the scale of its half, and offset
            c[i] += (float)dot * x[0] * w[0] + x[1 + h % 2] * w[2];
        }
}

// The finished tile passes through threadgroup memory, where neighbouring threads take the outputs
// of neighbouring rows for the epilogue, except those past the last token or row.
static inline void gemm_store(thread simdgroup_float8x8 *c, thread const float *sums,
        threadgroup float *tile,
        device const float *bias, device const float *gate, device float *y, int part,
        constant struct gemm_args *a, int token, int row, uint tid, uint sg) {
    for (int i = 0; INT8 && i < 16; i++)
        tile[code_token(i, tid) * GEMM_STRIDE + code_row(i, tid)] = sums[i];
    int down = INT8 ? 0 : tile_down();
    QUANT_UNROLL for (int i = 0; i < down; i++)
        QUANT_UNROLL for (int j = 0; j < tile_across(); j++)
            simdgroup_store(c[4 * i + j],
                            tile + tile_token(i, sg) * GEMM_STRIDE + tile_row(j, sg), GEMM_STRIDE);
    threadgroup_barrier(mem_flags::mem_threadgroup);      // the tile is whole
    int rows = a->w[part].rows;
    for (int i = tid; i < TILE_TOKENS * GEMM_ROWS; i += GEMM_THREADS) {
        int t = token + i / GEMM_ROWS, r = row + i % GEMM_ROWS;
        if (t >= a->tokens || r >= rows) continue;
        ulong at = (ulong)t * rows + r;
        float v = tile[i / GEMM_ROWS * GEMM_STRIDE + i % GEMM_ROWS] * a->w[part].scale;
        if (BIASES >> part & 1) v += bias[r];
        finish(&y[at], v, a->softcap, EPILOGUE == EPILOGUE_GLU ? gate[at] : 0.0f);
    }
}

// y0[tokens][rows] = x[tokens][cols] times W0[rows][cols] transposed, with a bias and the epilogue,
// and y1 and y2 likewise if there are matrices W1 and W2 of the same x (Q, K and V);
// gate[tokens][rows] is for that of the GLU.
// Grid: tiles of TILE_TOKENS x GEMM_ROWS outputs; those of the same rows are neighbours, so that
// weights come from memory about once per chunk. In each step all threads decode two groups of 64
// rows of W, and stage the same columns of x: for 64 tokens that is 2 * 64 * 64 * 64 FLOP on 16 KB
// of x and 4 to 9 KB of W, some 25 FLOP a byte from the cache.
// INT8 takes codes of activations from quantize, and tiles of GEMM_SOME tokens. Neither Metal nor
// CUDA's common words have a dot product of bytes: four products take four multiplications and the
// unpacking, where a matrix of half does 16 or more in that time. So it is off unless asked for.
kernel void gemm(device const uchar *w0 [[buffer(0)]], device const uchar *w1 [[buffer(1)]],
        device const uchar *w2 [[buffer(2)]], device const float *bias0 [[buffer(3)]],
        device const float *bias1 [[buffer(4)]], device const float *bias2 [[buffer(5)]],
        device const float *x [[buffer(6)]], device const uint *xq [[buffer(7)]],
        device const float *xscales [[buffer(8)]], device const float *gate [[buffer(9)]],
        device float *y0 [[buffer(10)]], device float *y1 [[buffer(11)]],
        device float *y2 [[buffer(12)]], constant struct gemm_args *a [[buffer(13)]],
        threadgroup float *shared [[shared_memory]],                           // gemm_floats
        uint tg [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
        uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float *xs = shared;                               // [TILE_TOKENS][GEMM_STRIDE]
    threadgroup float *ws = xs + TILE_TOKENS * GEMM_STRIDE;      // [GEMM_ROWS][GEMM_STRIDE] half
    int tiles = div_up(a->tokens, TILE_TOKENS), token = tg % tiles * TILE_TOKENS;
    int n0 = div_up(a->w[0].rows, GEMM_ROWS), n1 = n0 + div_up(a->w[1].rows, GEMM_ROWS);
    int block = tg / tiles, part = block < n0 ? 0 : block < n1 ? 1 : 2;
    int row = (block - (part == 0 ? 0 : part == 1 ? n0 : n1)) * GEMM_ROWS;
    simdgroup_float8x8 c[16];
    float sums[16];
    QUANT_UNROLL for (int i = 0; i < 16; i++) c[i] = simdgroup_float8x8(0.0f);
    QUANT_UNROLL for (int i = 0; i < 16; i++) sums[i] = 0.0f;

    for (int k0 = 0; k0 < a->cols; k0 += GEMM_K) {
        if (part == 1 && FORMAT_1 != FORMAT_0)
            stage_weights(FORMAT_1, w1, &a->w[1], row, k0, a->cols, tid, ws);
        else if (part == 2 && FORMAT_2 != FORMAT_0)
            stage_weights(FORMAT_2, w2, &a->w[2], row, k0, a->cols, tid, ws);
        else stage_weights(FORMAT_0, part == 0 ? w0 : part == 1 ? w1 : w2, &a->w[part], row, k0,
                           a->cols, tid, ws);
        if (INT8) stage_codes(xq, xscales, token, k0, a, tid, xs);
        else stage_floats(x, token, k0, a, tid, xs);
        threadgroup_barrier(mem_flags::mem_threadgroup);                       // staged
        if (INT8) tile_multiply_codes(xs, ws, tid, sums);
        else tile_multiply(xs, (threadgroup const half *)ws, sg, c);
        threadgroup_barrier(mem_flags::mem_threadgroup);                       // used
    }
    gemm_store(c, sums, shared, part == 0 ? bias0 : part == 1 ? bias1 : bias2, gate,
               part == 0 ? y0 : part == 1 ? y1 : y2, part, a, token, row, tid, sg);
}

// QK norm and RoPE for a chunk, and the write to the cache: q[n][n_head][HEAD_DIM] in place, k_new
// and v_new[n][n_kv][HEAD_DIM] as half to their rows of k and v[n_kv][rows][HEAD_DIM].
// Grid: a SIMD-group for each token and head; query heads come first, then keys, then values.
kernel void rope(device float *q [[buffer(0)]], device const float *k_new [[buffer(1)]],
        device const float *v_new [[buffer(2)]], device half *k [[buffer(3)]],
        device half *v [[buffer(4)]], device const float *q_norm [[buffer(5)]],
        device const float *k_norm [[buffer(6)]],
        device const float *angles [[buffer(7)]],                              // [n][n_rot / 2][2]
        constant struct attention_args *a [[buffer(8)]],
        uint tg [[threadgroup_position_in_grid]], uint nsg [[simdgroups_per_threadgroup]],
        uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    int heads = a->n_head + 2 * a->n_kv, unit = tg * nsg + sg, t = unit / heads, h = unit % heads;
    if (t >= a->n) return;                                // a whole SIMD-group: no barrier follows
    bool query = h < a->n_head, value = h >= a->n_head + a->n_kv;
    int kv = query ? 0 : (h - a->n_head) % a->n_kv;
    ulong from = ((ulong)t * a->n_kv + kv) * HEAD_DIM;
    ulong ring = ((ulong)kv * a->rows + ring_row(a->pos + t, a)) * HEAD_DIM;
    for (int i = lane; value && i < HEAD_DIM; i += SIMD_LANES) v[ring + i] = (half)v_new[from + i];
    if (value) return;
    float y[HEAD_MAX / SIMD_LANES];
    q += ((ulong)t * a->n_head + (query ? h : 0)) * HEAD_DIM;
    angles += (ulong)t * a->n_rot;
    head_rope(query ? q : k_new + from, query ? q_norm : k_norm, angles, a, lane, y);
    for (int p = lane, i = 0; p < HEAD_DIM / 2; p += SIMD_LANES, i += 2)
        for (int j = 0; j < 2; j++) {
            int at = pair_index(p, j, a->n_rot);
            if (query) q[at] = y[i + j];
            else k[ring + at] = (half)y[i + j];
        }
}

// tile[FLASH_KEYS][HEAD_DIM] = rows of the ring from r0 on, with zeros for empty ones, which may
// hold NaN: a probability of 0 would not remove it.
static inline void flash_stage(device const half *from, device const int *pos_k, int r0, uint tid,
        constant struct attention_args *a, threadgroup half *tile) {
    for (int i = tid; i < FLASH_KEYS * HEAD_DIM; i += FLASH_THREADS) {
        int r = r0 + i / HEAD_DIM;
        bool empty = r >= a->used || pos_k[r] < 0;
        tile[i] = empty ? (half)0.0f : from[(ulong)r * HEAD_DIM + i % HEAD_DIM];
    }
}

// Online softmax of a SIMD-group's scores[8][FLASH_KEYS]: four lanes share a query, with 8 keys
// each. Scores become probabilities in place. The factor by which earlier sums shrink goes into a
// diagonal matrix, for flash_values. `keys` is the position of the key in row `lane`.
static inline void flash_softmax(threadgroup float *scores, threadgroup float *diagonal, int keys,
        int pos, uint lane, constant struct attention_args *a, thread float *m, thread float *sum) {
    threadgroup float *mine = scores + lane / 4 * FLASH_KEYS + lane % 4 * 8;
    float s[8], top = *m, part = 0.0f;
    for (int i = 0; i < 8; i++) {
        int pos_k = simd_shuffle(keys, lane % 4 * 8 + i);
        float score = softcap(mine[i], a->softcap) * (SOFTCAPPED ? LOG2E : 1.0f);
        s[i] = visible(pos_k, pos, a) ? score : UNSEEN;
        top = max(top, s[i]);
    }
    top = max(top, simd_shuffle_xor(top, 1));
    top = max(top, simd_shuffle_xor(top, 2));
    float shrink = exp2(*m - top);
    for (int i = 0; i < 8; i++) {
        float p = s[i] == UNSEEN ? 0.0f : exp2(s[i] - top);
        mine[i] = p;
        part += p;
    }
    part += simd_shuffle_xor(part, 1);
    part += simd_shuffle_xor(part, 2);
    for (int i = 0; i < 2; i++)
        diagonal[2 * lane + i] = lane / 4 == lane % 4 * 2 + i ? shrink : 0.0f;
    *m = top;
    *sum = *sum * shrink + part;
}

// the scaled queries of a tile, as matrices of half
static inline void flash_queries(device const float *x, int n, uint tid, uint sg,
        constant struct attention_args *a, threadgroup half *tile, thread simdgroup_half8x8 *q) {
    float scale = a->scale * (SOFTCAPPED ? 1.0f : LOG2E);
    for (int i = tid; i < FLASH_QUERIES * HEAD_DIM; i += FLASH_THREADS) {
        int t = i / HEAD_DIM;
        tile[i] = (half)(t < n ? x[(ulong)t * a->n_head * HEAD_DIM + i % HEAD_DIM] * scale : 0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // queries are staged
    for (int d = 0; d < HEAD_DIM / 8; d++)
        simdgroup_load(q[d], tile + sg * 8 * HEAD_DIM + 8 * d, HEAD_DIM);
}

// o = diagonal * o + probabilities * values
static inline void flash_values(threadgroup const float *scores, threadgroup const float *diagonal,
        threadgroup const half *tile, thread simdgroup_float8x8 *o) {
    simdgroup_float8x8 shrink, mp[FLASH_KEYS / 8];
    simdgroup_half8x8 mv;
    simdgroup_load(shrink, diagonal, 8);
    for (int j = 0; j < FLASH_KEYS / 8; j++) simdgroup_load(mp[j], scores + 8 * j, FLASH_KEYS);
    for (int d = 0; d < HEAD_DIM / 8; d++) {
        simdgroup_multiply(o[d], shrink, o[d]);
        for (int j = 0; j < FLASH_KEYS / 8; j++) {
            simdgroup_load(mv, tile + 8 * j * HEAD_DIM + 8 * d, HEAD_DIM);
            simdgroup_multiply_accumulate(o[d], mp[j], mv, o[d]);
        }
    }
}

// out = o * scale, through threadgroup memory: of each 8 x 8 matrix a lane takes two numbers of row
// lane / 4, the query whose scale it has
static inline void flash_store(thread const simdgroup_float8x8 *o, threadgroup float *scores,
        device float *out, bool inside, float scale, uint lane) {
    for (int d = 0; d < HEAD_DIM / 8; d++) {
        simdgroup_barrier(mem_flags::mem_threadgroup);    // the matrix before has been read
        simdgroup_store(o[d], scores, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);    // this one is there
        for (int i = 0; i < 2; i++)
            if (inside) out[8 * d + lane % 4 * 2 + i] = scores[2 * lane + i] * scale;
    }
}

// As attention, for a chunk and with matrices. Grid: a threadgroup for FLASH_QUERIES queries of one
// head. The ring passes by in tiles of FLASH_KEYS rows, without those that none of the queries
// sees. Scores, maxima, sums and outputs are float, and outputs stay in registers. exp(x) is
// computed as exp2(x * log2(e)), with the factor in the queries' scale. 32 queries share each key
// and value, which makes 32 FLOP a byte of the ring, against 1 in attention.
kernel void flash_attention(device const float *queries [[buffer(0)]],
        device const half *k [[buffer(1)]], device const half *v [[buffer(2)]],
        device const int *pos_k [[buffer(3)]], device const float *sinks [[buffer(4)]],
        device float *out [[buffer(5)]], constant struct attention_args *a [[buffer(6)]],
        threadgroup float *shared [[shared_memory]],                           // flash_floats
        uint tg [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
        uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup half *tile = (threadgroup half *)shared;              // [FLASH_KEYS][HEAD_DIM]
    threadgroup float *scores = shared + flash_tile(HEAD_DIM) + sg * FLASH_OWN;
    threadgroup float *diagonal = scores + 8 * FLASH_KEYS;           // [8][8], after [8][32]
    int head = tg % a->n_head, t0 = tg / a->n_head * FLASH_QUERIES, t = t0 + sg * 8 + lane / 4;
    int first = a->pos + t0, last = a->pos + min(t0 + FLASH_QUERIES, a->n) - 1;    // positions
    ulong ring = (ulong)(head / (a->n_head / a->n_kv)) * a->rows * HEAD_DIM;
    simdgroup_half8x8 q[HEAD_MAX / 8], mk;
    simdgroup_float8x8 o[HEAD_MAX / 8], mp;
    float m = UNSEEN, sum = 0.0f;
    queries += ((ulong)t0 * a->n_head + head) * HEAD_DIM;
    flash_queries(queries, a->n - t0, tid, sg, a, tile, q);
    for (int d = 0; d < HEAD_DIM / 8; d++) o[d] = simdgroup_float8x8(0.0f);

    for (int r0 = 0; r0 < a->used; r0 += FLASH_KEYS) {
        int key = r0 + (int)lane < a->used ? pos_k[r0 + lane] : -1;
        bool seen = key >= 0 && (!CAUSAL || (key <= last && visible(key, max(first, key), a)));
        if (simd_max((int)seen) == 0) continue;           // the same for all SIMD-groups
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile is free
        flash_stage(k + ring, pos_k, r0, tid, a, tile);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // keys are staged
        for (int j = 0; j < FLASH_KEYS; j += 8) {
            mp = simdgroup_float8x8(0.0f);
            for (int d = 0; d < HEAD_DIM / 8; d++) {
                simdgroup_load(mk, tile + j * HEAD_DIM + 8 * d, HEAD_DIM, 0, true);
                simdgroup_multiply_accumulate(mp, q[d], mk, mp);
            }
            simdgroup_store(mp, scores + j, FLASH_KEYS);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);    // scores are there
        flash_softmax(scores, diagonal, key, a->pos + t, lane, a, &m, &sum);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // probabilities are there, keys used
        flash_stage(v + ring, pos_k, r0, tid, a, tile);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // values are staged
        flash_values(scores, diagonal, tile, o);
    }
    float top = a->sinks ? max(m, sinks[head] * LOG2E) : m, keep = exp2(m - top);
    if (a->sinks) sum = sum * keep + exp2(sinks[head] * LOG2E - top);   // a sink has no value
    out += ((ulong)t * a->n_head + head) * HEAD_DIM;
    flash_store(o, scores, out, t < a->n, sum > 0.0f ? keep / sum : 0.0f, lane);
}

// ---- 7. argmax ----

// *out = the index of the largest of x[n], the lowest if there are several, or 0 if all are NaN.
// One threadgroup: each lane keeps its best, then each SIMD-group, then the first of them.
kernel void argmax(device const float *x [[buffer(0)]], device int *out [[buffer(1)]],
        constant struct argmax_args *a [[buffer(2)]],
        threadgroup float *shared [[shared_memory]],                           // [ARGMAX_FLOATS]
        uint tid [[thread_index_in_threadgroup]], uint nsg [[simdgroups_per_threadgroup]],
        uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup int *where = (threadgroup int *)(shared + nsg);
    float best = UNSEEN;
    int at = a->n;
    for (int i = tid; i < a->n; i += nsg * SIMD_LANES)
        if (x[i] > best) {
            best = x[i];
            at = i;
        }
    float top = simd_max(best);
    at = simd_min(best == top ? at : a->n);
    if (lane == 0) shared[sg] = top;
    if (lane == 0) where[sg] = at;
    threadgroup_barrier(mem_flags::mem_threadgroup);      // each SIMD-group's best is there
    if (sg > 0) return;
    best = lane < nsg ? shared[lane] : UNSEEN;
    at = lane < nsg ? where[lane] : a->n;
    top = simd_max(best);
    at = simd_min(best == top ? at : a->n);
    if (lane == 0) *out = at < a->n ? at : 0;
}

#endif
