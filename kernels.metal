// SPDX-License-Identifier: MIT
// kernels.metal: the GPU side of llm.c, in the common subset of Metal and C. The tests include
// this very text in a C program and run it on an emulated GPU; it also compiles as CUDA C++.
//
//    1. arguments     structs and tables that metal.c shares
//    2. groups        32 weights of any format, by quant.h's decoders
//    3. embed, norms  embed, rms_norm, layer_norm, quantize
//    4. decode        gemv, gemv_glu, attention: one token
//    5. ffn_block     most of a layer as one threadgroup, for study
//    6. prefill       gemm, rope, flash_attention: a chunk of tokens
//    7. argmax
//
// A kernel has the name of the op of llm.c that it equals. SIMD-groups have 32 lanes; grids are
// one-dimensional. Variants are function constants: a plain `if` on one is decided when metal.c
// makes the pipeline. The rules of the subset: a pointer names its address space, word one;
// threadgroup memory comes in by one argument; simd_* functions and barriers stand only where all
// lanes (all threads) arrive together; numbers are 1.0f; no infinities as markers.
//
// To add a kernel: write the CPU op in llm.c, the kernel here under its name, its arguments in
// section 1, its dispatch in metal.c, then add one line to KERNEL_TESTS in test.c.
#ifdef __METAL_VERSION__
#include <metal_stdlib>
using namespace metal;
#define shared_memory threadgroup(0)          // elsewhere the word threadgroup is an empty macro
#endif

// ---- 1. arguments ----
//
// Fixed-width scalars only, so that Metal and C lay the structs out alike. A matrix is rows of
// row_bytes; `start` is its first byte behind the bound address, which Metal wants aligned.

#ifndef KERNEL_ARGS
#define KERNEL_ARGS

enum { FORMAT_F32 = 0, FORMAT_F16 = 1, FORMAT_Q8_0 = 8, FORMAT_BF16 = 30 };   // ggml's type numbers
enum { EPILOGUE_STORE, EPILOGUE_ADD, EPILOGUE_GLU };                  // y = v, y += v, act(y) * v
enum { ACT_SILU, ACT_GELU, ACT_RELU2 };                 // llm.c's order
enum { ROPE_NONE, ROPE_PAIRS, ROPE_HALVES };              // pairs (2i, 2i+1); (i, i + n_rot/2)
enum { GEMV_ROWS = 4, GEMV_SIMDGROUPS = 2, GEMM_ROWS = 64, GEMM_K = 32, FLASH_KEYS = 32 };
enum { HEAD_MAX = 256, BLOCK_DIM = 1024 };

struct kernel_matrix { uint32_t start, row_bytes; int32_t rows; float scale; };
struct embed_args { struct kernel_matrix w; int32_t cols; };
struct norm_args { int32_t cols; float eps; };
struct quantize_args { int32_t groups; };                              // of 32, in all rows
struct gemv_args { struct kernel_matrix w[3]; int32_t cols; float eps, softcap; };
struct gemm_args { struct kernel_matrix w; int32_t cols, tokens; float softcap; };
struct attention_args {
    int32_t n, pos;                        // queries, position of the first
    int32_t n_head, n_kv, n_rot, sinks;
    int32_t rows, used, window, keep;      // ring: rows per head, rows ever written, mask
    float eps, scale, softcap;
};
struct block_args { struct kernel_matrix w[4]; int32_t inner, dim, ff; float eps; };
struct argmax_args { int32_t n; };

// Rows that one SIMD-group makes at once: more rows share each load of x, but need registers. The
// wider the codes, the sooner the memory is busy without sharing.
static inline int gemv_rows(int format) {
    if (format == FORMAT_F32) return 1;
    return format == FORMAT_F16 || format == FORMAT_BF16 || format == FORMAT_Q8_0 ? 2 : GEMV_ROWS;
}

#endif

#ifndef METAL_HOST

constant int FORMAT_0 [[function_constant(0)]];       // formats of up to four matrices
constant int FORMAT_1 [[function_constant(1)]];
constant int FORMAT_2 [[function_constant(2)]];
constant int FORMAT_3 [[function_constant(3)]];
constant int RAGGED [[function_constant(4)]];         // columns are not a multiple of 32
constant int NORMED [[function_constant(5)]];         // the input passes an RMSNorm first
constant int BIASES [[function_constant(6)]];         // bit i: matrix i has a bias
constant int EPILOGUE [[function_constant(7)]];
constant int ACTIVATION [[function_constant(8)]];
constant int SOFTCAPPED [[function_constant(9)]];
constant int HEAD_DIM [[function_constant(10)]];
constant int PAIRING [[function_constant(11)]];
constant int QK_NORMED [[function_constant(12)]];
constant int FUSED [[function_constant(13)]];         // attention also rotates and writes the cache
constant int CAUSAL [[function_constant(14)]];
constant int TILE_TOKENS [[function_constant(15)]];   // gemm: 32, or 8 for a few tokens
constant int INT8 [[function_constant(16)]];          // gemm: integer products

constant float UNSEEN = -1e30f;                       // the score of a key out of sight
constant float LOG2E = 1.44269504f;                   // exp(x) = exp2(x * LOG2E)

// ---- 2. groups ----

// group g of a row: 32 codes, and a scale and an offset per 16
static inline void group_decode(int format, device const uchar *row, int g, thread int8_t *q,
                                thread float *d, thread float *m) {
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

static inline bool format_offsets(int format) {
    switch (format) {
#define X(id, name, weights, bytes, per16, bias) case id: return !bias;
    QUANT_TYPES(X)
#undef X
    }
    return false;
}

static inline bool format_float(int format) {
    return format == FORMAT_F32 || format == FORMAT_F16 || format == FORMAT_BF16;
}

static inline float float_weight(int format, device const uchar *row, int i) {
    if (format == FORMAT_F32) return ((device const float *)row)[i];
    if (format == FORMAT_F16) return (float)((device const half *)row)[i];
    return quant_from_bits((uint)((device const ushort *)row)[i] << 16);
}

// group g of a row as floats; zeros past the last column
static inline void group_weights(int format, device const uchar *row, int g, int cols,
                                 thread float *w) {
    if (format_float(format)) {
        for (int i = 0; i < 32; i++)
            w[i] = RAGGED && 32 * g + i >= cols ? 0.0f : float_weight(format, row, 32 * g + i);
        return;
    }
    int8_t q[32];
    float d[2], m[2];
    group_decode(format, row, g, q, d, m);
    for (int h = 0; h < 2; h++)
        for (int i = 16 * h; i < 16 * h + 16; i++) w[i] = d[h] * (float)q[i] + m[h];
}

// The lane's share of R rows times x: every 32nd group of 32. The input's RMSNorm costs nothing
// extra but its weights: the sum of squares is taken in the same pass, and its scale applied to
// the sums. xs and half-sums of x are loaded once for all R rows.
static inline void rows_dot(int format, int R, device const uchar *w, ulong row_bytes, int last,
                            device const float *x, device const float *norm, int cols, uint lane,
                            thread float *sum, thread float *square) {
    for (int g = lane; g * 32 < cols; g += 32) {
        float xs[32], xsum[2] = {0.0f, 0.0f};
        for (int i = 0; i < 32; i++) {
            float v = RAGGED && 32 * g + i >= cols ? 0.0f : x[32 * g + i];
            *square += v * v;
            if (NORMED && (!RAGGED || 32 * g + i < cols)) v *= norm[32 * g + i];
            xs[i] = v;
            xsum[i / 16] += v;
        }
        for (int r = 0; r < R; r++) {
            device const uchar *row = w + (ulong)min(r, last) * row_bytes;
            if (format_float(format)) {
                float f[32];
                group_weights(format, row, g, cols, f);
                for (int i = 0; i < 32; i++) sum[r] += f[i] * xs[i];
            } else {
                int8_t q[32];
                float d[2], m[2], dot[2] = {0.0f, 0.0f};
                group_decode(format, row, g, q, d, m);
                for (int i = 0; i < 16; i++) {
                    dot[0] += (float)q[i] * xs[i];
                    dot[1] += (float)q[i + 16] * xs[i + 16];
                }
                sum[r] += d[0] * dot[0] + d[1] * dot[1];
                if (format_offsets(format)) sum[r] += m[0] * xsum[0] + m[1] * xsum[1];
            }
        }
    }
}

static inline float softcap(float x, float cap) {
    return SOFTCAPPED ? cap * tanh(x / cap) : x;
}

static inline float activation(float x) {
    if (ACTIVATION == ACT_SILU) return x / (1.0f + exp(-x));
    if (ACTIVATION == ACT_GELU) {                         // past 10 tanh is 1; its exp overflows
        float t = 0.79788456f * x * (1.0f + 0.044715f * x * x);
        return 0.5f * x * (1.0f + tanh(clamp(t, -10.0f, 10.0f)));
    }
    float r = max(x, 0.0f);
    return r * r;
}

// ---- 3. embed, norms ----

// x[n][cols] = rows `ids` of the embedding, times scale. A threadgroup of 32 per token, a group
// per lane and step: reads only the rows asked for.
kernel void embed(device const uchar *w [[buffer(0)]], device const int *ids [[buffer(1)]],
                  device float *x [[buffer(2)]], constant struct embed_args *a [[buffer(3)]],
                  uint t [[threadgroup_position_in_grid]],
                  uint lane [[thread_index_in_simdgroup]]) {
    device const uchar *row = w + a->w.start + (ulong)ids[t] * a->w.row_bytes;
    device float *out = x + (ulong)t * a->cols;
    for (int g = lane; g * 32 < a->cols; g += 32) {
        float v[32];
        group_weights(FORMAT_0, row, g, a->cols, v);
        for (int i = 0; i < 32; i++)
            if (!RAGGED || 32 * g + i < a->cols) out[32 * g + i] = v[i] * a->w.scale;
    }
}

// Sum over the threadgroup, in every thread: SIMD-groups leave their sums in `part`, all add them.
static inline float sum_all(float v, threadgroup float *part, uint nsg, uint sg, uint lane) {
    v = simd_sum(v);
    threadgroup_barrier(mem_flags::mem_threadgroup);      // the last sum has been read
    if (lane == 0) part[sg] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);      // all parts are there
    return simd_sum(lane < nsg ? part[lane] : 0.0f);
}

// y[n][cols] = x / rms(x) * w, or y += that (the post-norms of Gemma end in the residual).
// A threadgroup per row; 3 or 4 floats of traffic for 4 FLOP a value: memory-bound.
kernel void rms_norm(device const float *x [[buffer(0)]], device const float *w [[buffer(1)]],
                     device float *y [[buffer(2)]], constant struct norm_args *a [[buffer(3)]],
                     threadgroup float *shared [[shared_memory]],                  // nsg floats
                     uint t [[threadgroup_position_in_grid]],
                     uint tid [[thread_index_in_threadgroup]],
                     uint nsg [[simdgroups_per_threadgroup]],
                     uint sg [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
    device const float *in = x + (ulong)t * a->cols;
    device float *out = y + (ulong)t * a->cols;
    float square = 0.0f;
    for (int i = tid; i < a->cols; i += nsg * 32) square += in[i] * in[i];
    float scale = rsqrt(sum_all(square, shared, nsg, sg, lane) / (float)a->cols + a->eps);
    for (int i = tid; i < a->cols; i += nsg * 32)
        out[i] = in[i] * scale * w[i] + (EPILOGUE == EPILOGUE_ADD ? out[i] : 0.0f);
}

// y[n][cols] = (x - mean) / deviation * w + bias; the variance in a second pass over x, since
// mean(x^2) - mean^2 cancels
kernel void layer_norm(device const float *x [[buffer(0)]], device const float *w [[buffer(1)]],
                       device const float *bias [[buffer(2)]], device float *y [[buffer(3)]],
                       constant struct norm_args *a [[buffer(4)]],
                       threadgroup float *shared [[shared_memory]],                // nsg floats
                       uint t [[threadgroup_position_in_grid]],
                       uint tid [[thread_index_in_threadgroup]],
                       uint nsg [[simdgroups_per_threadgroup]],
                       uint sg [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
    device const float *in = x + (ulong)t * a->cols;
    device float *out = y + (ulong)t * a->cols;
    float sum = 0.0f, square = 0.0f;
    for (int i = tid; i < a->cols; i += nsg * 32) sum += in[i];
    float mean = sum_all(sum, shared, nsg, sg, lane) / (float)a->cols;
    for (int i = tid; i < a->cols; i += nsg * 32) square += (in[i] - mean) * (in[i] - mean);
    float scale = rsqrt(sum_all(square, shared, nsg, sg, lane) / (float)a->cols + a->eps);
    for (int i = tid; i < a->cols; i += nsg * 32) out[i] = (in[i] - mean) * scale * w[i] + bias[i];
}

// Activations to int8 for gemm's INT8 variant: 32 share a scale; sums per 16 serve the offsets.
// A SIMD-group per 32 values.
kernel void quantize(device const float *x [[buffer(0)]], device int8_t *q [[buffer(1)]],
                     device float *scales [[buffer(2)]],                         // [groups][3]
                     constant struct quantize_args *a [[buffer(3)]],
                     uint tg [[threadgroup_position_in_grid]],
                     uint nsg [[simdgroups_per_threadgroup]],
                     uint sg [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
    int g = tg * nsg + sg;
    if (g >= a->groups) return;                           // a whole SIMD-group: no barrier follows
    float v = x[(ulong)g * 32 + lane], top = simd_max(fabs(v));
    float low = simd_sum(lane < 16 ? v : 0.0f), high = simd_sum(lane < 16 ? 0.0f : v);
    q[(ulong)g * 32 + lane] = (int8_t)rint(v * (127.0f / max(top, 1e-30f)));
    if (lane == 0) {
        scales[3 * g] = top / 127.0f;
        scales[3 * g + 1] = low;
        scales[3 * g + 2] = high;
    }
}

// ---- 4. decode ----
//
// One token is bound by memory: a weight is read once for 2 FLOP. So the whole layer is five
// dispatches, and each weight byte is loaded once, decoded in registers, and forgotten:
//   gemv (norm, Q, K, V, bias) | attention | gemv (Wo, residual) |
//   gemv_glu (norm, gate, up, activation) | gemv (down, residual)
// A norm recomputed by every SIMD-group costs it 8 bytes a column from the cache, beside the
// R * (0.5 to 4) bytes a column of weights that it loads anyway; one more dispatch costs more.

// R rows of matrix `part`: the sums of all lanes, then scale, bias and the epilogue
static inline void gemv_unit(int format, int part, int unit, device const uchar *w,
                             device const float *bias, device const float *x,
                             device const float *norm, device float *y,
                             constant struct gemv_args *a, uint lane) {
    int R = gemv_rows(format), row = unit * R, rows = a->w[part].rows;
    float sum[GEMV_ROWS] = {0.0f, 0.0f, 0.0f, 0.0f}, square = 0.0f, scale = a->w[part].scale;
    rows_dot(format, R, w + a->w[part].start + (ulong)row * a->w[part].row_bytes,
             a->w[part].row_bytes, rows - 1 - row, x, norm, a->cols, lane, sum, &square);
    if (NORMED) scale *= rsqrt(simd_sum(square) / (float)a->cols + a->eps);
    for (int r = 0; r < R; r++) {
        float v = simd_sum(sum[r]) * scale;
        if (lane != 0 || row + r >= rows) continue;
        if (BIASES >> part & 1) v += bias[row + r];
        v = softcap(v, a->softcap);
        y[row + r] = EPILOGUE == EPILOGUE_ADD ? y[row + r] + v : v;
    }
}

static inline int gemv_units(int format, int rows) {
    return (rows + gemv_rows(format) - 1) / gemv_rows(format);
}

// y = W x for up to three matrices of the same x (Q, K, V).
// A SIMD-group makes gemv_rows(format) rows; no threadgroup memory, no barrier. Grid: units of all
// matrices / SIMD-groups per threadgroup.
kernel void gemv(device const uchar *w0 [[buffer(0)]], device const uchar *w1 [[buffer(1)]],
                 device const uchar *w2 [[buffer(2)]], device const float *bias0 [[buffer(3)]],
                 device const float *bias1 [[buffer(4)]], device const float *bias2 [[buffer(5)]],
                 device const float *x [[buffer(6)]], device const float *norm [[buffer(7)]],
                 device float *y0 [[buffer(8)]], device float *y1 [[buffer(9)]],
                 device float *y2 [[buffer(10)]], constant struct gemv_args *a [[buffer(11)]],
                 uint tg [[threadgroup_position_in_grid]],
                 uint nsg [[simdgroups_per_threadgroup]],
                 uint sg [[simdgroup_index_in_threadgroup]],
                 uint lane [[thread_index_in_simdgroup]]) {
    int unit = tg * nsg + sg;
    int n0 = gemv_units(FORMAT_0, a->w[0].rows), n1 = n0 + gemv_units(FORMAT_1, a->w[1].rows);
    int n2 = n1 + gemv_units(FORMAT_2, a->w[2].rows);
    if (unit < n0) gemv_unit(FORMAT_0, 0, unit, w0, bias0, x, norm, y0, a, lane);
    else if (unit < n1) gemv_unit(FORMAT_1, 1, unit - n0, w1, bias1, x, norm, y1, a, lane);
    else if (unit < n2) gemv_unit(FORMAT_2, 2, unit - n1, w2, bias2, x, norm, y2, a, lane);
}

// y = act(gate x) * (up x), x normalised: both products in one SIMD-group, so that neither
// intermediate touches memory. Bound and launched as gemv with two matrices.
kernel void gemv_glu(device const uchar *gate [[buffer(0)]], device const uchar *up [[buffer(1)]],
                     device const float *bias0 [[buffer(3)]],
                     device const float *bias1 [[buffer(4)]], device const float *x [[buffer(6)]],
                     device const float *norm [[buffer(7)]], device float *y [[buffer(8)]],
                     constant struct gemv_args *a [[buffer(11)]],
                     uint tg [[threadgroup_position_in_grid]],
                     uint nsg [[simdgroups_per_threadgroup]],
                     uint sg [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
    int R = gemv_rows(FORMAT_0), row = (tg * nsg + sg) * R, last = a->w[0].rows - 1 - row;
    if (last < 0) return;                                 // a whole SIMD-group: no barrier follows
    float g[GEMV_ROWS] = {0.0f, 0.0f, 0.0f, 0.0f}, u[GEMV_ROWS] = {0.0f, 0.0f, 0.0f, 0.0f};
    float square = 0.0f, again = 0.0f, scale = 1.0f;
    rows_dot(FORMAT_0, R, gate + a->w[0].start + (ulong)row * a->w[0].row_bytes, a->w[0].row_bytes,
             last, x, norm, a->cols, lane, g, &square);
    rows_dot(FORMAT_1, R, up + a->w[1].start + (ulong)row * a->w[1].row_bytes, a->w[1].row_bytes,
             last, x, norm, a->cols, lane, u, &again);
    if (NORMED) scale = rsqrt(simd_sum(square) / (float)a->cols + a->eps);
    for (int r = 0; r < R; r++) {
        float gr = simd_sum(g[r]) * scale * a->w[0].scale;
        float ur = simd_sum(u[r]) * scale * a->w[1].scale;
        if (lane != 0 || r > last) continue;
        if (BIASES & 1) gr += bias0[row + r];
        if (BIASES & 2) ur += bias1[row + r];
        y[row + r] = activation(gr) * ur;
    }
}

// Where the first (which = 0) or second element of a head's pair p stands. Past the rotated part
// (partial rotary) pairs are neighbours, and pass unchanged.
static inline int pair_index(int p, int which, int n_rot) {
    return PAIRING == ROPE_HALVES && p < n_rot / 2 ? p + which * (n_rot / 2) : 2 * p + which;
}

// QK norm and RoPE of one head by one SIMD-group: lane l gets pairs l, l + 32, ... in v. rope
// holds cosine and sine of each pair at this position, computed by the host in double.
static inline void head_rope(device const float *x, device const float *norm,
                             device const float *rope, constant struct attention_args *a,
                             uint lane, thread float *v) {
    float square = 0.0f, scale = 1.0f;
    for (int p = lane, i = 0; p < HEAD_DIM / 2; p += 32, i += 2)
        for (int j = 0; j < 2; j++) {
            v[i + j] = x[pair_index(p, j, a->n_rot)];
            square += v[i + j] * v[i + j];
        }
    if (QK_NORMED) scale = rsqrt(simd_sum(square) / (float)HEAD_DIM + a->eps);
    for (int p = lane, i = 0; p < HEAD_DIM / 2; p += 32, i += 2) {
        float x0 = v[i] * scale, x1 = v[i + 1] * scale, c = 1.0f, s = 0.0f;
        if (QK_NORMED) {
            x0 *= norm[pair_index(p, 0, a->n_rot)];
            x1 *= norm[pair_index(p, 1, a->n_rot)];
        }
        if (PAIRING != ROPE_NONE && p < a->n_rot / 2) {
            c = rope[2 * p];
            s = rope[2 * p + 1];
        }
        v[i] = x0 * c - x1 * s;
        v[i + 1] = x0 * s + x1 * c;
    }
}

// the same, to threadgroup memory, where every lane finds every element
static inline void head_stage(device const float *x, device const float *norm,
                              device const float *rope, constant struct attention_args *a,
                              uint lane, threadgroup float *out) {
    float v[HEAD_MAX / 32];
    head_rope(x, norm, rope, a, lane, v);
    for (int p = lane, i = 0; p < HEAD_DIM / 2; p += 32, i += 2)
        for (int j = 0; j < 2; j++) out[pair_index(p, j, a->n_rot)] = v[i + j];
}

// The mask is by absolute position: rows of the ring are in any order, -1 is an empty one.
static inline bool visible(int pos_k, int pos_q, constant struct attention_args *a) {
    return pos_k >= 0 &&
           (!CAUSAL || (pos_k <= pos_q && (pos_q - pos_k < a->window || pos_k < a->keep)));
}

// the row of a position: the first `keep` rows are pinned, the rest is a ring
static inline int ring_row(int pos, constant struct attention_args *a) {
    return pos < a->keep ? pos : a->keep + (pos - a->keep) % (a->rows - a->keep);
}

// online softmax: a lane's HEAD_DIM / 32 elements of query and output, running maximum and sum
struct softmax_state { float q[HEAD_MAX / 32], o[HEAD_MAX / 32], m, sum; };

// Four rows of the ring at a time: their dot products overlap, and the output is rescaled once.
// Row `slot` is being written in this very dispatch: key and value come from k_new and v_new.
static inline void attention_rows(device const half *k, device const half *v,
                                  device const int *pos_k, threadgroup const float *k_new,
                                  device const float *v_new, int pos, int slot, int r0,
                                  constant struct attention_args *a,
                                  thread struct softmax_state *state) {
    float s[4], top = state->m;
    for (int i = 0; i < 4; i++) {
        int r = r0 + i;
        s[i] = UNSEEN;
        if (r >= a->used || !visible(pos_k[r], pos, a)) continue;         // so do all lanes
        float dot = 0.0f;
        for (int e = 0; e < HEAD_DIM / 32; e++) {
            half key = r == slot ? (half)k_new[e] : k[(ulong)r * HEAD_DIM + e];
            dot += state->q[e] * (float)key;
        }
        s[i] = softcap(simd_sum(dot), a->softcap) * (SOFTCAPPED ? LOG2E : 1.0f);
        top = max(top, s[i]);
    }
    float shrink = exp2(state->m - top);
    state->m = top;
    state->sum *= shrink;
    for (int e = 0; e < HEAD_DIM / 32; e++) state->o[e] *= shrink;
    for (int i = 0; i < 4; i++) {
        int r = r0 + i;
        if (s[i] == UNSEEN) continue;
        float p = exp2(s[i] - top);
        state->sum += p;
        for (int e = 0; e < HEAD_DIM / 32; e++) {
            half value = r == slot ? (half)v_new[e] : v[(ulong)r * HEAD_DIM + e];
            state->o[e] += p * (float)value;
        }
    }
}

// Maxima, sums and outputs of all SIMD-groups to one output; a sink joins the sum alone.
static inline void attention_merge(thread const struct softmax_state *state,
                                   threadgroup float *shared, device const float *sink,
                                   device float *out, uint nsg, uint sg, uint lane,
                                   constant struct attention_args *a) {
    threadgroup float *os = shared, *ms = os + nsg * HEAD_DIM, *sums = ms + nsg;
    int first = lane * (HEAD_DIM / 32);
    for (int e = 0; e < HEAD_DIM / 32; e++) os[sg * HEAD_DIM + first + e] = state->o[e];
    if (lane == 0) {
        ms[sg] = state->m;
        sums[sg] = state->sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // all parts are there
    if (sg > 0) return;
    float m = a->sinks ? *sink * LOG2E : UNSEEN;
    for (uint i = 0; i < nsg; i++) m = max(m, ms[i]);
    float sum = a->sinks ? exp2(*sink * LOG2E - m) : 0.0f;
    for (uint i = 0; i < nsg; i++) sum += sums[i] * exp2(ms[i] - m);
    for (int e = 0; e < HEAD_DIM / 32; e++) {
        float total = 0.0f;
        for (uint i = 0; i < nsg; i++) total += os[i * HEAD_DIM + first + e] * exp2(ms[i] - m);
        out[first + e] = sum > 0.0f ? total / sum : 0.0f; // 0: sees nothing
    }
}

// Attention of one query head: QK norm, RoPE, cache write (FUSED) and online softmax. Grid: a
// threadgroup per token and query head; its SIMD-groups take every nsg-th four rows of the ring
// and merge once. A query head recomputes the newest key of its group instead of reading what
// another threadgroup writes. A row's K and V are 4 * HEAD_DIM bytes for 4 * HEAD_DIM FLOP of
// each head in the group: memory-bound; the heads of a group meet their rows in the cache.
kernel void attention(device const float *q [[buffer(0)]], device const float *k_new [[buffer(1)]],
                      device const float *v_new [[buffer(2)]], device half *k [[buffer(3)]],
                      device half *v [[buffer(4)]], device const int *pos_k [[buffer(5)]],
                      device const float *q_norm [[buffer(6)]],
                      device const float *k_norm [[buffer(7)]],
                      device const float *angles [[buffer(8)]],              // [n_rot/2][2]
                      device const float *sinks [[buffer(9)]], device float *out [[buffer(10)]],
                      constant struct attention_args *a [[buffer(11)]],
                      threadgroup float *shared [[shared_memory]],   // (2 + nsg) HEAD_DIM + 2 nsg
                      uint tg [[threadgroup_position_in_grid]],
                      uint nsg [[simdgroups_per_threadgroup]],
                      uint sg [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
    int t = tg / a->n_head, head = tg % a->n_head, group = a->n_head / a->n_kv, kv = head / group;
    int first = lane * (HEAD_DIM / 32);                   // this lane's elements of a head
    ulong ring = (ulong)kv * a->rows * HEAD_DIM + first;
    int pos = a->pos + t, slot = FUSED ? ring_row(pos, a) : -1;
    threadgroup float *qs = shared, *ks = qs + HEAD_DIM;
    struct softmax_state state;

    // query and newest key to threadgroup memory: the pairs of RoPE cross lanes
    q += (ulong)tg * HEAD_DIM;
    v_new += kv * HEAD_DIM + first;
    if (FUSED && sg == 0) head_stage(q, q_norm, angles, a, lane, qs);
    if (FUSED && sg == nsg - 1) head_stage(k_new + kv * HEAD_DIM, k_norm, angles, a, lane, ks);
    threadgroup_barrier(mem_flags::mem_threadgroup);      // staged by one SIMD-group, read by all
    for (int e = 0; e < HEAD_DIM / 32; e++) {
        float x = FUSED ? qs[first + e] : q[first + e];
        state.q[e] = x * a->scale * (SOFTCAPPED ? 1.0f : LOG2E);
        state.o[e] = 0.0f;
        if (!FUSED || sg > 0 || head % group > 0) continue;
        k[ring + (ulong)slot * HEAD_DIM + e] = (half)ks[first + e];
        v[ring + (ulong)slot * HEAD_DIM + e] = (half)v_new[e];
    }
    state.m = UNSEEN;
    state.sum = 0.0f;
    for (int r = sg * 4; r < a->used; r += nsg * 4)
        attention_rows(k + ring, v + ring, pos_k, ks + first, v_new, pos, slot, r, a, &state);
    out += (ulong)tg * HEAD_DIM;
    attention_merge(&state, ks + HEAD_DIM, sinks + head, out, nsg, sg, lane, a);
}

// ---- 5. ffn_block ----

// One SIMD-group's rows of a matrix: every 32 units. An epilogue follows in the caller.
static inline float block_row(int format, constant struct kernel_matrix *w, int row,
                              device const uchar *data, device const float *x, int cols, uint lane)
{
    float sum[GEMV_ROWS] = {0.0f, 0.0f, 0.0f, 0.0f}, unused = 0.0f;
    rows_dot(format, 1, data + w->start + (ulong)row * w->row_bytes, w->row_bytes, 0, x, x, cols,
             lane, sum, &unused);
    return simd_sum(sum[0]) * w->scale;
}

// The rest of a layer after attention in one dispatch, by one threadgroup of 1024 threads:
//   x += Wo att; n = rms_norm(x); h = silu(gate n) * (up n); x += down h
// It shows fusion to the end, and why to stop short of it: one threadgroup runs on one core. A
// layer of Qwen3-0.6B has 12 MB of such weights at 8 bits; one core of M1's eight may load some
// 8 GB/s of the 68: 1.5 ms, where the chain of section 4 needs 0.2 ms and two more dispatches of
// a few microseconds. Thread i owns the residual's element i, hence dim <= 1024. NORMED is 0: the
// norm is taken once, together. Intermediates pass through device memory, read by the threadgroup
// that wrote them only.
[[max_total_threads_per_threadgroup(1024)]]
kernel void ffn_block(device const uchar *wo [[buffer(0)]], device const uchar *gate [[buffer(1)]],
                      device const uchar *up [[buffer(2)]], device const uchar *down [[buffer(3)]],
                      device const float *att [[buffer(4)]], device const float *norm [[buffer(5)]],
                      device float *x [[buffer(6)]],
                      device float *h [[buffer(7)]],                            // ff + dim floats
                      constant struct block_args *a [[buffer(8)]],
                      threadgroup float *shared [[shared_memory]],              // 32 + 1024 floats
                      uint tid [[thread_index_in_threadgroup]],
                      uint nsg [[simdgroups_per_threadgroup]],
                      uint sg [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float *y = shared + 32;
    device float *n = h + a->ff;
    bool mine = (int)tid < a->dim;
    for (int row = sg; row < a->dim; row += nsg) {
        float v = block_row(FORMAT_0, &a->w[0], row, wo, att, a->inner, lane);
        if (lane == 0) y[row] = v;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // y is whole
    float r = mine ? x[tid] + y[tid] : 0.0f;              // residual, normalised together
    float scale = rsqrt(sum_all(r * r, shared, nsg, sg, lane) / (float)a->dim + a->eps);
    if (mine) n[tid] = r * scale * norm[tid];
    threadgroup_barrier(mem_flags::mem_device);           // n is whole
    for (int row = sg; row < a->ff; row += nsg) {
        float g = block_row(FORMAT_1, &a->w[1], row, gate, n, a->dim, lane);
        float u = block_row(FORMAT_2, &a->w[2], row, up, n, a->dim, lane);
        if (lane == 0) h[row] = activation(g) * u;
    }
    threadgroup_barrier(mem_flags::mem_device);           // h is whole, y has been read
    for (int row = sg; row < a->dim; row += nsg) {
        float v = block_row(FORMAT_3, &a->w[3], row, down, h, a->ff, lane);
        if (lane == 0) y[row] = v;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // y is whole again
    if (mine) x[tid] = r + y[tid];
}

// ---- 6. prefill ----
//
// A chunk of tokens is bound by arithmetic: each weight serves n tokens. Tiles of both operands
// are staged in threadgroup memory and multiplied as 8 x 8 matrices by whole SIMD-groups. Weights
// become half there (11 bits, more than any format's codes); activations stay float, since
// Gemma's overflow half, and so do all sums.

// Rows of W for one tile: a lane decodes a group of 32 of its row.
static inline void stage_weights(int format, constant struct kernel_matrix *w, int row, int g,
                                 int cols, device const uchar *data, threadgroup half *out) {
    float v[32];
    ulong at = w->start + (ulong)min(row, w->rows - 1) * w->row_bytes;
    group_weights(format, data + at, g, cols, v);
    for (int i = 0; i < 32; i++) out[i] = (half)v[i];
}

// the same as codes: 8 words of four of them, then two scales and two offsets
static inline void stage_codes(int format, constant struct kernel_matrix *w, int row, int g,
                               device const uchar *data, threadgroup int8_t *q,
                               threadgroup float *scales) {
    int8_t codes[32];
    float d[2], m[2];
    ulong at = w->start + (ulong)min(row, w->rows - 1) * w->row_bytes;
    group_decode(format, data + at, g, codes, d, m);
    for (int i = 0; i < 32; i++) q[i] = codes[i];
    for (int i = 0; i < 2; i++) {
        scales[i] = d[i];
        scales[2 + i] = m[i];
    }
}

// Where one SIMD-group's blocks of the tile stand: 2 x 4 of 8 x 8, or 1 x 2 when tokens are few.
static inline int tile_token(int i, uint sg) {
    return 8 * i + (TILE_TOKENS == 32 ? (int)sg / 2 * 16 : 0);
}

static inline int tile_row(int j, uint sg) {
    return 8 * j + (TILE_TOKENS == 32 ? (int)sg % 2 * 32 : (int)sg * 16);
}

// c += tile of x times tile of w, as matrices
static inline void tile_multiply(threadgroup const float *xs, threadgroup const half *ws, uint sg,
                                 thread simdgroup_float8x8 *c) {
    simdgroup_float8x8 mx[2];
    simdgroup_half8x8 mw[4];
    int down = TILE_TOKENS == 32 ? 2 : 1, across = TILE_TOKENS == 32 ? 4 : 2;
    for (int k = 0; k < GEMM_K; k += 8) {
        for (int i = 0; i < down; i++)
            simdgroup_load(mx[i], xs + tile_token(i, sg) * GEMM_K + k, GEMM_K);
        for (int j = 0; j < across; j++)
            simdgroup_load(mw[j], ws + tile_row(j, sg) * GEMM_K + k, GEMM_K, 0, true);
        for (int i = 0; i < down; i++)
            for (int j = 0; j < across; j++)
                simdgroup_multiply_accumulate(c[4 * i + j], mx[i], mw[j], c[4 * i + j]);
    }
}

// The integer variant: a thread makes 4 x 4 outputs of the 32 x 64 tile, 16 products at a time in
// integers, then scales and offsets of the half group in float. xs: scale, two sums; ws: two
// scales, two offsets.
static inline void tile_multiply_codes(threadgroup const int8_t *xq, threadgroup const float *xs,
                                       threadgroup const int8_t *wq, threadgroup const float *ws,
                                       uint tid, thread float *c) {
    for (int i = 0; i < 16; i++) {
        int t = (int)tid / 16 * 4 + i / 4, r = (int)tid % 16 * 4 + i % 4;
        for (int h = 0; h < 2; h++) {
            int dot = 0;
            for (int k = 16 * h; k < 16 * h + 16; k++)
                dot += (int)xq[32 * t + k] * (int)wq[32 * r + k];
            c[i] += (float)dot * xs[3 * t] * ws[4 * r + h] + xs[3 * t + 1 + h] * ws[4 * r + 2 + h];
        }
    }
}

// The tile's outputs: to threadgroup memory as matrices or by thread, then out with the epilogue
// and the ragged edges.
static inline void gemm_store(thread simdgroup_float8x8 *c, thread const float *sums,
                              threadgroup float *tile, device const float *bias,
                              device const float *gate, device float *y,
                              constant struct gemm_args *a, int token, int row, uint tid, uint sg) {
    if (INT8) {
        for (int i = 0; i < 16; i++)
            tile[((int)tid / 16 * 4 + i / 4) * GEMM_ROWS + (int)tid % 16 * 4 + i % 4] = sums[i];
    } else {
        for (int i = 0; i < (TILE_TOKENS == 32 ? 2 : 1); i++)
            for (int j = 0; j < (TILE_TOKENS == 32 ? 4 : 2); j++)
                simdgroup_store(c[4 * i + j],
                                tile + tile_token(i, sg) * GEMM_ROWS + tile_row(j, sg), GEMM_ROWS);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // the tile is whole
    for (int i = tid; i < TILE_TOKENS * GEMM_ROWS; i += 128) {
        int t = token + i / GEMM_ROWS, r = row + i % GEMM_ROWS;
        if (t >= a->tokens || r >= a->w.rows) continue;
        ulong at = (ulong)t * a->w.rows + r;
        float v = tile[i] * a->w.scale;
        if (BIASES & 1) v += bias[r];
        v = softcap(v, a->softcap);
        if (EPILOGUE == EPILOGUE_ADD) v += y[at];
        if (EPILOGUE == EPILOGUE_GLU) v *= activation(gate[at]);
        y[at] = v;
    }
}

// Y = X W' for a chunk of tokens. Tiles of TILE_TOKENS x 64 outputs, 32 columns a step, 128
// threads: SIMD-groups 0 and 1 decode 64 rows of W, 2 and 3 stage the activations. A step of the
// 32-token tile does 2 * 32 * 64 * 32 FLOP on 4 KB of x and 64 groups of W: over 16 FLOP a byte
// from the cache even at 16 bits. Tiles of the same rows are neighbours in the grid, so that
// weights pass from memory about once per chunk. Grid: tiles of rows x tiles of tokens.
// INT8 takes activations as codes (see quantize). Apple's GPUs have no 8-bit dot product: there it
// only saves threadgroup memory, and it is off unless asked for. On paper it pays where hardware
// has one, for formats with one scale per 32 (q4_0, q8_0, iq4_nl, mxfp4).
kernel void gemm(device const uchar *w [[buffer(0)]], device const float *bias [[buffer(1)]],
                 device const float *x [[buffer(2)]], device const int8_t *xq [[buffer(3)]],
                 device const float *xscales [[buffer(4)]], device const float *gate [[buffer(5)]],
                 device float *y [[buffer(6)]], constant struct gemm_args *a [[buffer(7)]],
                 threadgroup float *shared [[shared_memory]],                  // 2048 floats
                 uint tg [[threadgroup_position_in_grid]],
                 uint tid [[thread_index_in_threadgroup]],
                 uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float *xs = shared;                                            // [tokens][32]
    threadgroup half *ws = (threadgroup half *)(shared + TILE_TOKENS * 32);    // [64][32]
    threadgroup float *dx = shared, *dw = dx + 3 * TILE_TOKENS;                // or [][3], [64][4]
    threadgroup int8_t *qx = (threadgroup int8_t *)(dw + 4 * GEMM_ROWS);       // [tokens][32]
    threadgroup int8_t *qw = qx + TILE_TOKENS * 32;                            // [64][32]
    int tiles = (a->tokens + TILE_TOKENS - 1) / TILE_TOKENS, groups = (a->cols + 31) / 32;
    int token = tg % tiles * TILE_TOKENS, row = tg / tiles * GEMM_ROWS;        // the tile's corner
    simdgroup_float8x8 c[8];
    float sums[16];
    for (int i = 0; i < 8; i++) c[i] = simdgroup_float8x8(0.0f);
    for (int i = 0; i < 16; i++) sums[i] = 0.0f;

    for (int g = 0; g < groups; g++) {
        if (sg < 2 && INT8) {
            stage_codes(FORMAT_0, &a->w, row + tid, g, w, qw + 32 * tid, dw + 4 * tid);
        } else if (sg < 2) {
            stage_weights(FORMAT_0, &a->w, row + tid, g, a->cols, w, ws + 32 * tid);
        } else {
            for (int i = tid - 64; i < TILE_TOKENS * 32; i += 64) {
                int part = i % 32, col = 32 * g + part;
                ulong t = min(token + i / 32, a->tokens - 1);
                if (INT8) qx[i] = xq[t * a->cols + col];
                else xs[i] = RAGGED && col >= a->cols ? 0.0f : x[t * a->cols + col];
                if (INT8 && part < 3) dx[i / 32 * 3 + part] = xscales[(t * groups + g) * 3 + part];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);                       // staged
        if (INT8) tile_multiply_codes(qx, dx, qw, dw, tid, sums);
        else tile_multiply(xs, ws, sg, c);
        threadgroup_barrier(mem_flags::mem_threadgroup);                       // used
    }
    gemm_store(c, sums, shared, bias, gate, y, a, token, row, tid, sg);
}

// RoPE and cache write for a chunk: QK norm and RoPE of all heads, queries in place, keys and
// values to their rows of the ring as half. A SIMD-group per token and head.
kernel void rope(device float *q [[buffer(0)]], device const float *k_new [[buffer(1)]],
                 device const float *v_new [[buffer(2)]], device half *k [[buffer(3)]],
                 device half *v [[buffer(4)]], device const float *q_norm [[buffer(5)]],
                 device const float *k_norm [[buffer(6)]],
                 device const float *angles [[buffer(7)]],                     // [n][n_rot/2][2]
                 constant struct attention_args *a [[buffer(8)]],
                 uint tg [[threadgroup_position_in_grid]],
                 uint nsg [[simdgroups_per_threadgroup]],
                 uint sg [[simdgroup_index_in_threadgroup]],
                 uint lane [[thread_index_in_simdgroup]]) {
    int heads = a->n_head + 2 * a->n_kv, unit = tg * nsg + sg, t = unit / heads, h = unit % heads;
    if (t >= a->n) return;                                // a whole SIMD-group: no barrier follows
    bool query = h < a->n_head, value = h >= a->n_head + a->n_kv;
    int kv = query ? 0 : (h - a->n_head) % a->n_kv;
    ulong from = ((ulong)t * a->n_kv + kv) * HEAD_DIM;
    ulong ring = ((ulong)kv * a->rows + ring_row(a->pos + t, a)) * HEAD_DIM;
    if (value) {
        for (int i = lane; i < HEAD_DIM; i += 32) v[ring + i] = (half)v_new[from + i];
        return;
    }
    float y[HEAD_MAX / 32];
    q += ((ulong)t * a->n_head + (query ? h : 0)) * HEAD_DIM;
    angles += (ulong)t * a->n_rot;
    head_rope(query ? q : k_new + from, query ? q_norm : k_norm, angles, a, lane, y);
    for (int p = lane, i = 0; p < HEAD_DIM / 2; p += 32, i += 2)
        for (int j = 0; j < 2; j++) {
            int at = pair_index(p, j, a->n_rot);
            if (query) q[at] = y[i + j];
            else k[ring + at] = (half)y[i + j];
        }
}

// 32 rows of the ring to threadgroup memory; empty ones as zeros, for they may hold anything
static inline void flash_stage(device const half *from, device const int *pos_k, int r0, uint tid,
                               constant struct attention_args *a, threadgroup half *tile) {
    for (int i = tid; i < FLASH_KEYS * HEAD_DIM; i += 128) {
        int r = r0 + i / HEAD_DIM;
        bool empty = r >= a->used || pos_k[r] < 0;
        tile[i] = empty ? (half)0.0f : from[(ulong)r * HEAD_DIM + i % HEAD_DIM];
    }
}

// Online softmax of one SIMD-group's 8 x 32 scores: four lanes share a query's row, 8 keys each.
// Scores become probabilities in place; the factor for what was summed before goes to a diagonal.
static inline void flash_softmax(threadgroup float *scores, threadgroup float *diagonal, int keys,
                                 int pos, uint lane, constant struct attention_args *a,
                                 thread float *m, thread float *sum) {
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

// The queries of a tile, scaled, as matrices of half. One SIMD-group holds 8 queries.
static inline void flash_queries(device const float *x, int n, uint tid, uint sg,
                                 constant struct attention_args *a, threadgroup half *tile,
                                 thread simdgroup_half8x8 *q) {
    float scale = a->scale * (SOFTCAPPED ? 1.0f : LOG2E);
    for (int i = tid; i < 32 * HEAD_DIM; i += 128) {
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

// Scales by one over the sums and stores, through threadgroup memory: of an 8 x 8 matrix a lane
// takes two floats of row lane / 4, the one whose sum it has.
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

// Attention for a chunk, as matrices: a threadgroup takes 32 queries of one head, a SIMD-group 8.
// The ring passes by in tiles of 32 rows; tiles that no query of the group sees are skipped.
// Scores, maximum and sum are float; exp is exp2, its log2(e) folded into the queries' scale; the
// output stays in registers, rescaled by a diagonal matrix. 32 queries share each K and V: 32
// FLOP a byte of the ring, against 1 in `attention`, which serves when queries are few.
kernel void flash_attention(device const float *queries [[buffer(0)]],
                            device const half *k [[buffer(1)]], device const half *v [[buffer(2)]],
                            device const int *pos_k [[buffer(3)]],
                            device const float *sinks [[buffer(4)]],
                            device float *out [[buffer(5)]],
                            constant struct attention_args *a [[buffer(6)]],
                            threadgroup float *shared [[shared_memory]],   // 16 HEAD_DIM + 4 * 320
                            uint tg [[threadgroup_position_in_grid]],
                            uint tid [[thread_index_in_threadgroup]],
                            uint sg [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
    threadgroup half *tile = (threadgroup half *)shared;                       // [32][HEAD_DIM]
    threadgroup float *scores = shared + 16 * HEAD_DIM + sg * 320, *diagonal = scores + 256;
    int head = tg % a->n_head, t0 = tg / a->n_head * 32, t = t0 + sg * 8 + lane / 4;
    int first = a->pos + t0, last = a->pos + min(t0 + 31, a->n - 1);           // positions
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
    if (a->sinks) sum = sum * keep + exp2(sinks[head] * LOG2E - top);          // it has no value
    out += ((ulong)t * a->n_head + head) * HEAD_DIM;
    flash_store(o, scores, out, t < a->n, sum > 0.0f ? keep / sum : 0.0f, lane);
}

// ---- 7. argmax ----

// The index of the largest of n logits, the lowest where they tie. One threadgroup: lanes keep
// their best, SIMD-groups reduce them, one reduces those. Reads 4 n bytes.
kernel void argmax(device const float *x [[buffer(0)]], device int *out [[buffer(1)]],
                   constant struct argmax_args *a [[buffer(2)]],
                   threadgroup float *shared [[shared_memory]],                // 2 nsg floats
                   uint tid [[thread_index_in_threadgroup]],
                   uint nsg [[simdgroups_per_threadgroup]],
                   uint sg [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
    threadgroup int *where = (threadgroup int *)(shared + nsg);
    float best = UNSEEN;
    int at = a->n;
    for (int i = tid; i < a->n; i += nsg * 32)
        if (x[i] > best) {
            best = x[i];
            at = i;
        }
    float top = simd_max(best);
    at = simd_min(best == top ? at : a->n);
    if (lane == 0) {
        shared[sg] = top;
        where[sg] = at;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // all SIMD-groups' bests are there
    if (sg > 0) return;
    best = lane < nsg ? shared[lane] : UNSEEN;
    at = lane < nsg ? where[lane] : a->n;
    top = simd_max(best);
    at = simd_min(best == top ? at : a->n);
    if (lane == 0) *out = at < a->n ? at : 0;             // 0: nothing but NaN
}

#endif
