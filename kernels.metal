// SPDX-License-Identifier: MIT
// kernels.metal: the GPU kernels, in what Metal, CUDA C++ and C have in common. Metal compiles this
// text after quant.h; the tests include it in a C program and run it on a GPU made of software.
//
// A kernel is one step of the forward pass. It reads weights as the file has them, activations in
// f32 (gemm: f16) and a struct of sizes. It writes activations, or rows of the KV cache. metal.c
// decides which kernels run, in what order and on which buffers. Read norm (3) first, a small
// kernel with all that the others have. Then read gemv (4), which takes most of a token's time, and
// section 2, which gemv is made of; then gemm (6), which has an example in numbers.
//
//    1. arguments           structs, function constants and sizes, which metal.c includes, too
//    words for launches     what a launch waits for
//    words for matrices     of 16 x 16, which a SIMD-group multiplies
//    2. groups              32 weights of any format, taken apart by quant.h's decoders
//                           kernel            its function in llm.c, on the CPU
//    3. embed, norms        embed             embed_row
//                           norm              norm, also of whole projections in heads_row
//                           best_ids          (finds the Best of each 256 logits)
//                           gate_inputs       layer_input_row
//                           gate_heads        gate_row; the gate in delta_out_row, for KDA
//                           halve             (makes the activations of gemm halves)
//    4. decode              gemv              matmul (few tokens); add_row, activate, head_products
//                           gemv_ring         the same on NVIDIA, for blocks; x becomes bytes
//                           ring_inputs       (packs the inputs of a few tokens for it)
//                           attention         attention; if FUSED, heads_row before it
//                           attention_merge   the end of attention, for a long KV ring
//                           latent_row        latent_row
//    5. ffn_block           ffn_block         forward_layer, from the product after attention on
//    6. prefill             gemm              matmul (a chunk); add_row, activate, head_products
//                           rope              heads_row
//                           flash_attention   attention
//    7. experts             choose_experts    choose_experts
//                           weigh_inputs      gather_row, where inputs are weighed
//                           sort_choices      sort_choices; also lists gemm's tiles
//                           weigh_experts     the end of run_experts, and add_shared_row
//    8. recurrent mixers    delta_conv        delta_conv
//                           delta_rule        delta_gates_row, then plain_memory
//
// Names: tg is the threadgroup, tid a thread in it, sg one of its nsg SIMD-groups and lane a thread
// in that; all are numbers. `shared` is the threadgroup's memory. g is a group of 32 weights, t a
// token, r a row. Grids have one dimension. Shapes are outermost first, as in x[n][cols]. A few
// tokens are up to FEW, as in decode with guesses; a chunk has more. Metal's words and CUDA's:
//   threadgroup | SIMD-group | core           | device memory | threadgroup memory | dispatch
//   block       | warp       | multiprocessor | global memory | shared memory      | kernel launch
//
// Rules: a pointer's type begins with its address space. Threadgroup memory comes as one argument,
// `shared`. simd_* functions stand only where all lanes arrive together, barriers where all threads
// do. Metal has no double: write 1.0f. A large number takes the place of infinity, because exp(inf
// - inf) is NaN. Metal takes the arguments of a dispatch for different memory: where two are the
// same, one thread alone reads and writes a number there. An array is in registers only if loops
// over it have constant counts and functions it goes to are inlined (QUANT_INLINE).
//
// To add a kernel: write the CPU's function in llm.c, the kernel here, its arguments and sizes
// under "arguments" and its dispatch in metal.c, then its test as the top of test.c says.
#ifdef __CUDACC__
// Metal's types and functions, defined in CUDA C++
typedef signed char int8_t;
typedef unsigned char uchar, uint8_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef unsigned long ulong, uint64_t;
struct half {
    ushort bits;
    half() = default;
    half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    operator float() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};
half __ushort_as_half(ushort bits) { return *(half *)&bits; }
float __half2float(half h) { return h; }

template <class T, int N> struct alignas(N * sizeof(T)) vec {
    T e[N];
    T &operator[](int i) { return e[i]; }
    const T &operator[](int i) const { return e[i]; }
};
#define OPERATOR(op) \
    template <class T, int N> vec<T, N> operator op(vec<T, N> a, vec<T, N> b) { \
        for (int i = 0; i < N; i++) a.e[i] = a.e[i] op b.e[i]; \
        return a; \
    } \
    template <class T, int N> vec<T, N> operator op(vec<T, N> a, T b) { \
        for (int i = 0; i < N; i++) a.e[i] = a.e[i] op b; \
        return a; \
    }
OPERATOR(+) OPERATOR(-) OPERATOR(*)
typedef vec<half, 4> half4;
#define float2 vec<float, 2>   // CUDA's own have neither [] nor arithmetic
#define float4 vec<float, 4>
#define uint2 vec<uint, 2>
#define uint4 vec<uint, 4>

#define EACH_LANE 0xffffffffu
#define simd_shuffle(x, i) __shfl_sync(EACH_LANE, x, i)
#define simd_shuffle_xor(x, i) __shfl_xor_sync(EACH_LANE, x, i)
#define simd_reduce(name, expression) \
    template <class T> T name(T a) { \
        for (int i = 16; i; i /= 2) { \
            T b = simd_shuffle_xor(a, i); \
            a = expression; \
        } \
        return a; \
    }
simd_reduce(simd_sum, a + b) simd_reduce(simd_max, max(a, b)) simd_reduce(simd_min, min(a, b))
#define threadgroup_barrier(flags) __syncthreads()
#define simdgroup_barrier(flags) __syncwarp()
float clamp(float x, float a, float b) { return fminf(fmaxf(x, a), b); }

// See words for matrices, below. An operand of a tensor core has four registers of halves in each
// lane; of its sums lane l has e[4 i + 2 j + k], row l / 4 + 8 j, column l % 4 * 2 + 8 i + k.
struct half16x16 { uint r[4]; };
struct float16x16 { float e[8]; };
uint shared_address(const void *p) { return (uint)__cvta_generic_to_shared(p); }
// Lane l gives the address of row l % 8 of the 8 x 8 matrix l / 8, which goes to r[l / 8].
void load_matrices(half16x16 *m, const half *p, bool transposed) {
#define LDMATRIX(way) \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" way ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                 : "=r"(m->r[0]), "=r"(m->r[1]), "=r"(m->r[2]), "=r"(m->r[3]) \
                 : "r"(shared_address(p)))
    if (transposed) LDMATRIX(".trans");
    else LDMATRIX("");
#undef LDMATRIX
}
void load_left(half16x16 *m, const half *p, int stride) {
    load_matrices(m, p + threadIdx.x % 16 * stride + threadIdx.x / 16 % 2 * 8, false);
}
// In this order the two registers that one mma reads are neighbours: else each would need moves.
void load_right(half16x16 *m, const half *p, int stride, bool transposed) {
    int lane = threadIdx.x % 32, first = lane / 8 % 2 * 8, second = lane / 16 * 8;
    p += transposed ? (second + lane % 8) * stride + first : (first + lane % 8) * stride + second;
    load_matrices(m, p, !transposed);
}
void zero16(float16x16 *c) { for (int i = 0; i < 8; i++) c->e[i] = 0.0f; }
void multiply16(float16x16 *c, const half16x16 *a, const half16x16 *b) {
    for (int i = 0; i < 2; i++) {
        float *e = c->e + 4 * i;
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(e[0]), "+f"(e[1]), "+f"(e[2]), "+f"(e[3])
            : "r"(a->r[0]), "r"(a->r[1]), "r"(a->r[2]), "r"(a->r[3]), "r"(b->r[2 * i]),
              "r"(b->r[2 * i + 1]));
    }
}
void store16(const float16x16 *c, float *p, int stride) {
    p += threadIdx.x % 32 / 4 * stride + threadIdx.x % 4 * 2;
    for (int i = 0; i < 4; i++)
        *(float2 *)(p + i % 2 * 8 * stride + i / 2 * 8) = {c->e[2 * i], c->e[2 * i + 1]};
}
void scale16(float16x16 *c, const float *diagonals) {
    const float *own = diagonals + threadIdx.x % 32 / 4 * 9;
    for (int i = 0; i < 8; i++) c->e[i] *= own[i / 2 % 2 * 64];
}
uint half_pair(float x, float y) {
    uint pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}
void store_halves(half *to, const float *v) {
    *(uint4 *)to = {half_pair(v[0], v[1]), half_pair(v[2], v[3]), half_pair(v[4], v[5]),
                    half_pair(v[6], v[7])};
}
void copy_16(half *to, const half *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from)
                 : "memory");
}
void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// "Words for launches" and gemv_ring's comment say what these functions do. A thread that waits for
// an mbarrier polls it, and try_wait may put it to sleep. EARLY is 1 from compute capability 9.0
// and NVRTC 12 on. Then a launch may start before the last one has ended, and one thread has a row
// copied in bulk, by hardware that must see a new mbarrier (BULK_FENCE). Else n threads copy it.
typedef ulong mbarrier;
void mbarrier_arrive(mbarrier *b) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(b)) : "memory");
}
#if EARLY
void next_may_start() { asm volatile("griddepcontrol.launch_dependents;"); }
void input_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#define BULK_FENCE "fence.proxy.async.shared::cta;"
#define MAY_SLEEP "try_wait"
#define copy_threads(n) 1
void mbarrier_copy(mbarrier *b, uchar *to, const uchar *from, int bytes, int, int) {
    uint at = shared_address(b);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at), "r"(bytes)
                 : "memory");
    if (bytes)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], %2, [%3];"
                     :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(at) : "memory");
}
#else
void next_may_start() {}
void input_wait() {}
#define BULK_FENCE
#define MAY_SLEEP "test_wait"
#define copy_threads(n) (n)
void mbarrier_copy(mbarrier *b, uchar *to, const uchar *from, int bytes, int i, int n) {
    for (i *= 16; i < bytes; i += 16 * n) copy_16((half *)(to + i), (const half *)(from + i));
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
                 :: "r"(shared_address(b)) : "memory");
}
#endif
void mbarrier_init(mbarrier *b, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" BULK_FENCE
                 :: "r"(shared_address(b)), "r"(count) : "memory");
}
void mbarrier_wait(mbarrier *b, int parity) {
    asm volatile("{ .reg .pred done; AGAIN: mbarrier." MAY_SLEEP ".parity.shared.b64 done, [%0], "
                 "%1; @!done bra AGAIN; }" :: "r"(shared_address(b)), "r"(parity) : "memory");
}
void multiply_bytes(int *c, const uint *a, const uint *b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#define bits_of(x) __float_as_uint(x)
#define as_other(p) (p)
#define workers_barrier(threads) asm volatile("bar.sync 1, %0;" :: "r"(threads) : "memory")
#define HAS_RING                              // gemv_ring is compiled
int count_up(int *p) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}
float exp2_fast(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
#define exp2 exp2_fast

// what a launch has: buffers, which become pointers of their parameters' types, and arguments
struct Any {
    void *p;
    template <class T> operator T *() const { return (T *)p; }
};
struct Bound {
    Any buffer[16];
    alignas(16) char bytes[512];
};
extern __shared__ float4 shared_bytes[];

// `constant int X [[function_constant(C_X)]];` becomes `const int X [[]] = VALUE_C_X; [[]];`
#define function_constant(i) ]] = VALUE_##i; [[
#define kernel static __device__ __forceinline__
#define device
#define constant const
#define threadgroup
#define thread
#include "quant.h"
#endif

#ifdef __METAL_VERSION__
#include <metal_stdlib>
using namespace metal;
#if __METAL_VERSION__ >= 320
#pragma METAL fp contract(fast)               // a product and a sum are one instruction
#endif
#define shared_memory threadgroup(0)          // elsewhere the word threadgroup is an empty macro
#endif

// the last arguments of each kernel: where the thread is
#define PLACE \
    threadgroup float *shared [[shared_memory]], uint tg [[threadgroup_position_in_grid]], \
    uint tid [[thread_index_in_threadgroup]], uint nsg [[simdgroups_per_threadgroup]], \
    uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]

// ---- 1. arguments ----
//
// What the kernels and metal.c must agree on. (Metal numbers a kernel's buffers as its parameters.)

#ifndef KERNEL_ARGS
#define KERNEL_ARGS

enum { FORMAT_F32 = 0, FORMAT_F16 = 1, FORMAT_Q8_0 = 8, FORMAT_BF16 = 30 };   // ggml's type numbers
// the result for a product v: v, other + v, activation(other) * v, activation(v)
enum { EPILOGUE_STORE, EPILOGUE_ADD, EPILOGUE_GLU, EPILOGUE_ACT };
enum { NORM_ANY = 1, NORM_WEIGHTS = 2, NORM_BIAS = 4 };  // bits: a norm, its weights, its bias
enum { EXPERTS_NONE, EXPERTS_GATHER, EXPERTS_SORTED, EXPERTS_HEADS };   // see input_of, gemm
// llm.c's numbers. RoPE's pairs are (i, i + n_rot / 2) or (2i, 2i + 1)
#define NUMBERS_OF_LLM(X) \
    X(ACT_SILU, 0) X(ACT_GELU, 1) X(ACT_RELU2, 2) X(ACT_SWIGLU_OAI, 3) X(ACT_RELU, 4) \
    X(ACT_XIELU, 5) X(ACT_COUNT, 6) X(ROPE_HALVES, 0) X(ROPE_PAIRS, 1) X(ROPE_NONE, 2) X(FEW, 8) \
    X(BEST_IDS, 256)
#ifdef METAL_HOST
#define NUMBER(name, value) _Static_assert((int)name == value, "llm.c has another number");
#else
#define NUMBER(name, value) enum { name = value };
#endif
NUMBERS_OF_LLM(NUMBER)

// metal.c sets these constants when it makes a pipeline: the compiler decides every `if` on them.
#define FUNCTION_CONSTANTS(X) \
    X(FORMAT_0) X(FORMAT_1) X(FORMAT_2) X(FORMAT_3)   /* formats of up to four matrices */ \
    X(RAGGED)        /* the number of columns is not a multiple of 32 */ \
    X(NORMED)        /* NORM bits: of norm, or of the norm that gemv applies to its input */ \
    X(CENTRED)       /* LayerNorm, which subtracts the mean, instead of RMSNorm */ \
    X(BIASES)        /* bit i: matrix i, or the norm of Q or K, has a bias */ \
    X(SCALES)        /* bit i: each expert's matrix i has a factor of its own */ \
    X(EXPERTS)       /* EXPERTS_*: has each chosen expert, or each head, a matrix of its own? */ \
    X(EPILOGUE)      /* what becomes of a product */ \
    X(ACTIVATION)    /* the epilogue's */ \
    X(SOFTCAPPED)    /* scores or logits x become softcap * tanh(x / softcap) */ \
    X(LIMITED)       /* 1: limits what is stored; in a GLU W1 x on both sides, the activation \
                        from above; 2: the activation's input from above, too */ \
    X(HEAD_DIM)      /* size of a head of Q and K, a multiple of 4; of a key of delta_rule */ \
    X(VALUE_DIM)     /* size of a head of V, a multiple of 4 */ \
    X(VALUE_STEP)    /* attention: from a row of V to the next; HEAD_DIM if V is part of K */ \
    X(QUERY_HEADS)   /* attention: query heads that a threadgroup computes */ \
    X(ROW_LANES)     /* attention: lanes that share a row, as attention_lanes says */ \
    X(PAIRING)       /* which numbers of a head RoPE rotates as a pair */ \
    X(QK_NORMED)     /* bits 0, 1: each head of Q, of K is normed */ \
    X(QK_LATE)       /* they are normed after RoPE, not before */ \
    X(GATED)         /* a gate of its output follows each head's query; also see delta_conv */ \
    X(ALIBI)         /* a score decreases with the distance of query and key */ \
    X(FUSED)         /* attention: the newest key is added first; 1: made here; 2: made by rope */ \
    X(MERGES)        /* attention: old rows are loaded early; a head's last threadgroup merges */ \
    X(CAUSAL)        /* a query does not see later positions */ \
    X(SPANS)         /* it sees none before its own span */ \
    X(UNIT_ROWS)     /* gemv: the most rows that a unit may have */ \
    X(PACKED)        /* gemv_ring: ring_inputs has staged its inputs */ \
    X(LANE_GROUPS)   /* gemv_ring: neighbouring groups of 32 weights that a lane takes, 1 or 2 */ \
    X(TOKENS)        /* gemv, gemv_ring: tokens for which a weight is loaded once: 1, 2, 4, 8 */ \
    X(TEAMS)         /* gemv_ring: teams of workers, 1 or 2 */ \
    X(TILE_TOKENS) X(TILE_ROWS)   /* gemm: tokens and rows of a tile */ \
    X(BUFFERS)       /* gemm, flash_attention: buffers of tiles, 1 or 2 */ \
    X(ASKS)          /* delta_rule: the delta rule, which asks the state; else a state space */ \
    X(BLOCK)         /* delta_rule: tokens computed at once, BLOCK_MAX or 1 */ \
    X(CHANNELS)      /* delta_rule: each channel of a key has a decay of its own (KDA) */
#define X(name) C_##name,
enum { FUNCTION_CONSTANTS(X) N_CONSTANTS };
#undef X

// The geometry of the launches
enum {
    SIMD_LANES = 32,                                  // threads in a SIMD-group
    UNIT_SIMDGROUPS = 4,                              // of rope, delta_*, latent_row, best_ids
    NORM_THREADS = 256, SORT_THREADS = 1024,          // at most
    MERGE_THREADS = 128, BLOCK_THREADS = 1024,
    GEMV_SIMDGROUPS = 2, STAGED_SIMDGROUPS = 8,       // of gemv: for float, block formats
    GEMV_ROWS = 4, GEMV_FILL = 2048,                  // most rows of a unit; SIMD-groups of a GPU
    STAGED_COLS = 4096,                               // columns staged at once, over all tokens
    STAGED_TOKENS = 4,                                // the most tokens that gemv stages
    RING_WORKERS = 8, RING_COPIERS = 2,               // SIMD-groups: of a team; in all
    RING_TILE = 16, RING_SLOTS = 32,                  // a team's rows of a slot; most slots
    RING_PIECE = 1024,                                // least bytes of most pieces of a long row
    RING_SUMS = 128,                                  // floats of a buffer of sums, for each team
    RING_GROUP = 12,                                  // words of a token's staged group
    DOT_STEPS = 4,                                    // loads of floats that overlap
    X_STRIDE = 36,                                    // from a staged group to the next
    ATTENTION_SIMDGROUPS = 8, ATTENTION_ROWS = 4,     // at most 8; a lane takes 4 rows at once
    ATTENTION_HEADS = 2,                              // query heads that share the rows they read
    ATTENTION_SLICE = 32, ATTENTION_FILL = 256,       // fewest rows of a slice; slices of a GPU
    PARTS_STEP = 8,                                   // parts of a softmax that are merged at once
    GEMM_MIN = 16, GEMM_ROWS = 128,                   // fewest tokens of a tile; most rows
    GEMM_K = 64, GEMM_STRIDE = GEMM_K + 8,            // columns in a step: two groups
    PATCH_STRIDE = 36, GEMM_PATCH = 16 * PATCH_STRIDE,   // a SIMD-group's matrices of sums
    HEAD_MAX = 576, QUADS_MAX = 5,                    // the largest HEAD_DIM; a lane's quads of it
    NARROW_MAX = 256, FLASH_NARROW = 96,              // delta_rule's widest key; see flash_split
    FLASH_MIN = 8,                                    // tokens; fewer are left to attention
    FLASH_QUERIES = 64, FLASH_KEYS = 32,              // in a tile; a SIMD-group has 16 queries
    FLASH_SIMDGROUPS = FLASH_QUERIES / 16, FLASH_THREADS = FLASH_SIMDGROUPS * SIMD_LANES,
    NORM_FLOATS = NORM_THREADS / SIMD_LANES,          // of threadgroup memory: SIMD-groups' sums
    DELTA_UNIT = 4, DELTA_LAYOUT = 64,                // state's rows: of a SIMD-group; a panel
    DELTA_LANES = 8,                                  // lanes that share a row; at least BLOCK_MAX
    BLOCK_MAX = 8, DELTA_OWN = 2,                     // tokens of a BLOCK; staged by a SIMD-group
    CONV_TOKENS = 16,                                 // tokens of a thread
    FLASH_STRIDE = FLASH_KEYS + 4,                    // row of scores: no lanes meet in a bank
    FLASH_HALVES = FLASH_KEYS + 8,                    // row of probabilities, which are half
    FLASH_OWN = 16 * FLASH_STRIDE + 2 * 8 * 8         // floats of a SIMD-group: scores, diagonals
};

// Structs are made of fixed-width scalars, so that Metal and C lay them out alike. W[rows][cols] is
// a matrix, or that of the first expert. It begins `start` bytes after the bound address, which
// Metal wants aligned. W x is multiplied by `scale`. Results for two inputs lie out_step apart.
struct kernel_matrix {
    uint32_t start, row_bytes;             // bytes
    int32_t rows;
    float scale;
    uint32_t step;                         // bytes from an expert's matrix to the next
    int32_t bias_step, out_step;           // floats; out_step is at least `rows`
    int32_t piece_bytes;                   // gemv_ring: bytes of a piece of a row
};
struct embed_args { struct kernel_matrix w[3]; int32_t cols; };
// Threadgroup tg of norm reads row tg of x, or if `from` is not 0 row (pos + from) % states, where
// pos = now[NOW_POS] + tg. It writes row tg of y, or if `to` is not 0 row (pos + to) % states.
struct norm_args {
    int32_t cols, groups;                  // weights are w[groups][cols]: row r has w[r % groups]
    float eps, factor, scale;              // factor: before the epilogue; scale: after it
    int32_t step;                          // from a result to the next
    int32_t states, from, to;
};
struct best_args { int32_t n, rows; };
struct input_args { int32_t n, cols, step; };
struct halve_args { int32_t cols, step; };
struct finish_args { float softcap, limit, alpha_n, alpha_p, beta, eps; };   // last 4: xIELU's
struct product_args {
    struct kernel_matrix w[4];
    int32_t cols, x_step, tokens;          // x_step: from an input of gemv to the next
    int32_t outputs;                       // of the grid: choices, heads, a chunk's tokens; or 1
    int32_t each;                          // choices, or heads, of a token
    int32_t per_output;                    // gemv: threadgroups for an output
    int32_t tiles;                         // gemm: the most tiles of tokens
    int32_t threadgroups;                  // of gemv_ring; of a token in ring_inputs
    int32_t piece_cols, pieces;            // gemv_ring: columns of a piece; pieces of a row
    int32_t stride, slots;                 // bytes from a slot's row to the next; number of slots
    int32_t input_sets, set_floats;        // sets of staged inputs, see ring_set; floats of a set
    int32_t few;                           // if TOKENS > 1: how many of these exist
    float eps, factor;                     // factor: of W x + bias
    struct finish_args end;
};
struct attention_args {
    int32_t n, n_head, n_kv, n_rot, sinks; // n: queries; sinks: 1 if heads have attention sinks
    int32_t rows, window, keep, span;      // of the KV ring; see visible
    int32_t slices;                        // at most: see query_slices
    int32_t q_step, k_step;                // from a head's QK norm to the next one's, or 0
    float eps, scale, softcap;
    float sharpen_scale, sharpen_length;   // see temperature; scale 0: none
    int32_t sharpen_next;                  // 1: of the position after the query's
};
struct choose_args { int32_t n_expert, n_used, sigmoid, normed, n_group, group_used; float scale; };
struct sort_args { int32_t choices, n_expert, tiles, tile; };    // tile: choices in one
struct weigh_inputs_args { int32_t dim, n_used, sorted; };   // sorted: by expert
// joined: there is a shared expert; weighed: it has a router; sorted: choices are, by expert
struct weigh_args { int32_t dim, n_used, joined, weighed, sorted; float factor; };
struct conv_args { int32_t n, channels, past, guesses; };   // guesses: there may be some
struct gate_args { int32_t n, each, softplus; };
struct delta_args {
    int32_t n, first, guesses;             // tokens; first row of inputs; 1: some may be guesses
    int32_t n_key, n_value, dv, tiled;     // tiled: see key_tiled in llm.c
    int32_t step;                          // floats from a token's alpha or beta to the next one's
    float eps, lower;                      // lower: see kda_lower in llm.c
};

// What changes from pass to pass is in a buffer of its own, now[]: at NOW_POS the first token's
// position; at NOW_PLACED 1 if rows of the KV ring get their positions, 0 if not (in a warm-up);
// at NOW_STOOD how many guesses of the last pass stood; at NOW_GUESSES how many this one ends with;
// from NOW_COUNTS on, for each `unit` of attention, how many of its threadgroups are done.
enum { NOW_POS, NOW_PLACED, NOW_STOOD, NOW_GUESSES, NOW_COUNTS };

static inline int div_up(int n, int size) { return (n + size - 1) / size; }

// A unit is the rows that a SIMD-group of gemv computes together. They share each load of x, at the
// price of registers; the more bytes a weight has, the fewer rows keep the memory busy. Units are
// smaller where `all` rows of a product would make too few of them.
static inline int gemv_most(int all) {
    int most = all / GEMV_FILL;
    if (most < 1) return 1;
    return most < GEMV_ROWS ? most : GEMV_ROWS;
}
// With a pair of matrices a unit has these rows of each.
static inline int gemv_rows(int format, int most, int tokens, bool pair) {
    bool floats = format == FORMAT_F32 || format == FORMAT_F16 || format == FORMAT_BF16;
    int rows = floats || format == FORMAT_Q8_0 ? 2 : GEMV_ROWS;
    if (format == FORMAT_F32) rows = 1;
    if (tokens > 1) rows = floats ? GEMV_ROWS : 2;   // there are more loads of x, and more sums
    if (rows > most) rows = most;
    return pair && rows > 1 ? rows / 2 : rows;
}
// threadgroups of nsg SIMD-groups for a matrix
static inline int gemv_grid(int format, int rows, int most, int tokens, bool pair, int nsg) {
    return div_up(rows, gemv_rows(format, most, tokens, pair) * nsg);
}

// floats of threadgroup memory for gemv if it stages inputs: a sum of each SIMD-group, the inputs
static inline int staged_floats(int cols, int tokens) {
    int staged = tokens > 1 || cols > STAGED_COLS ? STAGED_COLS : cols;
    return STAGED_SIMDGROUPS + staged / 32 * X_STRIDE;
}

// gemv_ring's geometry: read the example there first. lane_groups is its constant LANE_GROUPS.
// columns of a stretch, which four lanes share for each row; of a turn: a stretch for each worker
static inline int ring_stretch(int lane_groups) { return 4 * 32 * lane_groups; }
static inline int ring_turn(int lane_groups) { return RING_WORKERS * ring_stretch(lane_groups); }
// columns of an input as it is staged: whole stretches, with zeros after the row's end
static inline int ring_padded(int cols, int lane_groups) {
    return div_up(cols, ring_stretch(lane_groups)) * ring_stretch(lane_groups);
}
// columns of a piece, whole turns: about `bytes` bytes or more; a row below twice that is one piece
static inline int ring_cols(int cols, int row_bytes, int lane_groups, int bytes) {
    int pieces = row_bytes < bytes ? 1 : row_bytes / bytes, turn = ring_turn(lane_groups);
    return div_up(div_up(cols, pieces), turn) * turn;
}
// Bytes from a row of a slot to the next. Copies begin and end at multiples of 16, so a piece needs
// up to 30 more. An odd multiple of 16 spreads eight rows over all banks.
static inline int ring_stride(int bytes) { return (bytes + 32 + 15) / 32 * 32 + 16; }
// floats of sums buffer i, which worker i of every team writes: [token][row][1, or 2 in a GLU]
static inline int ring_sums(int teams) { return RING_SUMS * teams; }
// floats of a group for all tokens; for eight 4 more, so that the next group begins in other banks
static inline int ring_group(int tokens) { return RING_GROUP * tokens + (tokens == 8 ? 4 : 0); }
// floats of a set of inputs: group 0 of all TOKENS, group 1 of all, ..; with EXPERTS of one input
static inline int ring_set(int cols, int lane_groups, int tokens) {
    return ring_padded(cols, lane_groups) / 32 * ring_group(tokens);
}
// Where each part of its threadgroup memory begins, in floats. At 0 are mbarriers: two for each
// slot, one for the inputs, and one more for alignment
static inline int at_zeros(void) { return 2 * (2 * RING_SLOTS + 2); }      // [FEW] groups of zeros
static inline int at_sums(void) { return at_zeros() + RING_GROUP * FEW; }  // workers', two buffers
static inline int at_squares(int teams) { return at_sums() + 2 * RING_WORKERS * ring_sums(teams); }
static inline int at_inputs(int teams) { return at_squares(teams) + FEW * RING_WORKERS; }
static inline int at_slots(int teams, int set_floats, int sets) {
    return at_inputs(teams) + sets * set_floats;
}

// halves in a row of gemm's x, which is padded to whole steps
static inline int row_halves(int cols) { return div_up(cols, GEMM_K) * GEMM_K; }
// Floats of gemm's threadgroup memory. For each token of the tile a number says which row of x it
// has. Each buffer has halves of x, then of W; after the products patches take the buffers' place.
static inline int gemm_floats(int tile, int rows, int buffers) {
    int staged = buffers * (tile + rows) * (GEMM_STRIDE / 2);
    int patches = 2 * rows / SIMD_LANES * GEMM_PATCH;
    return tile + (staged > patches ? staged : patches);
}

// delta_rule stages keys and queries, then zeros; floats of threadgroup memory
static inline int delta_width(int dk) { return div_up(dk, 32) * 32; }
static inline int delta_floats(int dk, int block, int channels) {
    return block * ((2 + channels) * delta_width(dk) + 2 * block + 2);
}

// the most tiles that n choices of experts can make: each expert's last tile may not be full
static inline int expert_tiles(int n, int n_expert, int tile) {
    return n_expert < n ? n / tile + n_expert : n;
}

// Lanes that share a row of the KV ring. A lane holds at most two quads (four neighbours) of its
// key and two of its value, more if heads are wider than 256. A SIMD-group has 32 / lanes sets.
static inline int attention_lanes(int head, int value) {
    int lanes = 4;
    while (lanes < SIMD_LANES && (8 * lanes < head || 8 * lanes < value)) lanes *= 2;
    return lanes;
}
static inline int attention_quads(int head, int value) {
    int wide = div_up(head > value ? head : value, 4 * SIMD_LANES);
    return wide > 2 ? wide : 2;
}
// the most SIMD-groups that threadgroup memory has room for
static inline int attention_most(int head, int value) {
    return attention_quads(head, value) > 2 ? ATTENTION_SIMDGROUPS / 2 : ATTENTION_SIMDGROUPS;
}

// rows that a SIMD-group takes in one step
static inline int attention_step(int lanes) { return ATTENTION_ROWS * (SIMD_LANES / lanes); }

// fewest rows of a slice: ATTENTION_SLICE, or more if all SIMD-groups take more in one step
static inline int attention_slice(int head, int value) {
    int rows = attention_most(head, value) * attention_step(attention_lanes(head, value));
    return rows > ATTENTION_SLICE ? rows : ATTENTION_SLICE;
}

// floats of threadgroup memory: queries, a key; output, maximum and sum of each set of lanes
static inline int attention_floats(int heads, int head, int value, int nsg, int lanes) {
    return (heads + 1) * head + nsg * (SIMD_LANES / lanes) * heads * (value + 2);
}

// flash_attention: SIMD-groups that share the columns of wide heads (with one buffer, as on Apple's
// GPUs of 128 registers, those above FLASH_NARROW); columns that are staged, whole 16 x 16 matrices
// for each; halves from one row to the next (8 more: rows begin in other banks); floats of memory
static inline int flash_split(int head, int value, int buffers) {
    int most = buffers > 1 ? NARROW_MAX : FLASH_NARROW;
    return head > most || value > most ? FLASH_SIMDGROUPS : 1;
}
static inline int flash_cols(int dim, int split) { return div_up(dim, 16 * split) * 16 * split; }
static inline int flash_row(int dim, int split) { return flash_cols(dim, split) + 8; }
static inline int flash_floats(int head, int value, bool in_keys, int buffers) {
    int split = flash_split(head, value, buffers);
    int k = flash_row(head, split), v = flash_row(value, split);
    int row = k > v ? k : v;                              // with one buffer they take turns
    if (buffers > 1) row = 2 * (k + v);
    if (in_keys) row = buffers * k;                       // see values_in_keys
    return FLASH_SIMDGROUPS * FLASH_OWN + FLASH_KEYS / 2 * row;
}

#endif

#ifndef METAL_HOST

#define X(name) \
constant int name [[function_constant(C_##name)]];
FUNCTION_CONSTANTS(X)
#undef X

// ---- words for launches ----
//
// CUDA's programmatic dependent launch, as metal.c uses it for a few tokens:
//   next_may_start()   the next launch may begin: run_KERNEL, which metal.c adds, calls it first
//   input_wait()       waits for all launches before: what they wrote is there. In each launch some
//                      thread must call it, or the next launch's wait would be too short
//   count_up(p)        returns *p, and adds 1; whoever gets the last number can read what the
//                      others had written before they counted
// Metal has none: there each launch waits for the last one's end, and MERGES is 0.
#ifndef HAS_RING
#define next_may_start()
#define input_wait()
#define count_up(p) 0
#endif

// ---- words for matrices ----
//
// A SIMD-group's matrix of 16 x 16 is spread over its lanes: half16x16 is an operand, float16x16
// collects sums. p points to threadgroup memory, rows lie `stride` apart, and lanes act together.
//   load_left(&a, p, stride)            a = p
//   load_right(&b, p, stride, transposed)   b = p, or p transposed
//   zero16(&c), multiply16(&c, &a, &b)  c = 0, c += a b
//   scale16(&c, diagonals)              row r of c *= number r of a diagonal, which is spread over
//                                       those of two 8 x 8 matrices, [2][8][8]
//   store16(&c, p, stride)              p = c
//   store_halves(p, v)                  eight floats of this lane as halves
//   copy_16(p, from), copies_wait()     16 bytes of device memory, in the background where the GPU
//                                       can; this thread's copies are there after the wait
// CUDA has its own above. Apple's matrix units, and the tests', are 8 x 8: four make one of ours.
#ifndef __CUDACC__
typedef struct { simdgroup_half8x8 m[4]; } half16x16;
typedef struct { simdgroup_float8x8 m[4]; } float16x16;
QUANT_INLINE void load_left(thread half16x16 *a, threadgroup const half *p, int stride) {
    QUANT_UNROLL for (int i = 0; i < 4; i++)
        simdgroup_load(a->m[i], p + i / 2 * 8 * stride + i % 2 * 8, stride);
}
QUANT_INLINE void load_right(thread half16x16 *b, threadgroup const half *p, int stride,
        bool transposed) {
    QUANT_UNROLL for (int i = 0; i < 4; i++) {
        int from = transposed ? i % 2 * 2 + i / 2 : i;    // of p's four matrices
        simdgroup_load(b->m[i], p + from / 2 * 8 * stride + from % 2 * 8, stride, 0, transposed);
    }
}
QUANT_INLINE void zero16(thread float16x16 *c) {
    QUANT_UNROLL for (int i = 0; i < 4; i++) c->m[i] = simdgroup_float8x8(0.0f);
}
QUANT_INLINE void multiply16(thread float16x16 *c, thread const half16x16 *a,
        thread const half16x16 *b) {
    QUANT_UNROLL for (int k = 0; k < 2; k++)
        QUANT_UNROLL for (int i = 0; i < 4; i++)
            simdgroup_multiply_accumulate(c->m[i], a->m[i / 2 * 2 + k], b->m[2 * k + i % 2],
                                          c->m[i]);
}
QUANT_INLINE void scale16(thread float16x16 *c, threadgroup const float *diagonals) {
    simdgroup_float8x8 d;
    QUANT_UNROLL for (int i = 0; i < 4; i++) {
        simdgroup_load(d, diagonals + i / 2 * 64, 8);
        simdgroup_multiply(c->m[i], d, c->m[i]);
    }
}
QUANT_INLINE void store16(thread const float16x16 *c, threadgroup float *p, int stride) {
    QUANT_UNROLL for (int i = 0; i < 4; i++)
        simdgroup_store(c->m[i], p + i / 2 * 8 * stride + i % 2 * 8, stride);
}
QUANT_INLINE void store_halves(threadgroup half *to, thread const float *v) {
    for (int i = 0; i < 8; i += 4) {
        half4 h = {(half)v[i], (half)v[i + 1], (half)v[i + 2], (half)v[i + 3]};
        *(threadgroup half4 *)(to + i) = h;
    }
}
static inline void copy_16(threadgroup half *to, device const half *from) {
    *(threadgroup uint4 *)to = *(device const uint4 *)from;
}
static inline void copies_wait(void) {}
#endif

constant float UNSEEN = -1e30f;                       // the score of a key out of sight
constant float LOG2E = 1.44269504f;                   // exp(x) = exp2(x * LOG2E)

// ---- 2. groups ----
//
// A lane works on whole groups of 32 weights. In a block format a group has codes, scales and
// offsets, w[i] = d[i / 16] * q[i] + m[i / 16]; in a float format it is read weight by weight.

// Decodes group g of a row to words[8], four codes (signed bytes) in each, d[2] and m[2]. A decoder
// is given the first block of the 256 weights that g is in, and g % 8.
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

// the bias of a format's codes, 0 exactly if it has offsets m; do 16 weights have a scale, not 32?
#define X(id, name, weights, bytes, per16, bias) format == id ? bias :
static inline int format_bias(int format) { return QUANT_TYPES(X) 0; }
#undef X
#define X(id, name, weights, bytes, per16, bias) format == id ? per16 :
static inline bool format_per16(int format) { return QUANT_TYPES(X) false; }
#undef X

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

static inline float half_weight(int format, uint bits) {   // of 16 bits
    return format == FORMAT_F16 ? quant_f16_to_f32(bits) : quant_from_bits(bits << 16);
}

// the same for weights, of a row of a float format
static inline float4 four_weights(int format, device const uchar *row, int i, int cols) {
    float4 w = {0.0f, 0.0f, 0.0f, 0.0f};
    if (format == FORMAT_F32) return four_floats((device const float *)row, i, cols);
    for (int e = 0; RAGGED && e < 4; e++)
        if (i + e < cols) w[e] = half_weight(format, ((device const ushort *)row)[i + e]);
    if (RAGGED || i >= cols) return w;
    uint2 pairs = *(device const uint2 *)(row + 2 * i);
    for (int e = 0; e < 4; e++) w[e] = half_weight(format, pairs[e / 2] >> e % 2 * 16 & 0xffff);
    return w;
}

static inline bool has_offsets(int format) {
    return !format_float(format) && format_bias(format) == 0;
}

// c[4] = the codes in a word; or in a float format the weights from i on
QUANT_INLINE void codes_or_weights(int format, uint word, device const uchar *row, int i, int cols,
        thread float *c) {
    if (!format_float(format)) return quant_as_floats(word, format_bias(format), c);
    float4 w = four_weights(format, row, i, cols);
    QUANT_UNROLL for (int e = 0; e < 4; e++) c[e] = w[e];
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
    QUANT_UNROLL for (int j = 0; j < 8; j++) {
        float c[4];
        quant_as_floats(q[j], format_bias(format), c);
        QUANT_UNROLL for (int e = 0; e < 4; e++) w[4 * j + e] = d[j / 4] * c[e] + m[j / 4];
    }
}

// The inputs of a SIMD-group's product: x[cols] of each token. They may have an RMSNorm: then they
// are multiplied by w here, the product also sums the squares of x, and the caller divides it by
// their root. xs: where a block format's product stages them; NULL: for a SIMD-group alone.
struct row_input {
    device const float *x, *w;
    int norm, cols;                                       // NORM bits, or 0
    uint lane, tid, nsg;
    threadgroup float *xs;
};
// tokens for which a lane uses each weight; if only a->few of them exist, the others are in vain
static inline int tokens_at_once(void) { return TOKENS > 1 ? TOKENS : 1; }

static inline float4 norm_weights(int i, thread const struct row_input *in) {
    float4 none = {1.0f, 1.0f, 1.0f, 1.0f};
    return in->norm & NORM_WEIGHTS ? four_floats(in->w, i, in->cols) : none;
}

// x within -most .. most; 0: as it is. A NaN stays one: clamp, min and max would make it a number.
static inline float limited(float x, float most) {
    if (most <= 0.0f || !(fabs(x) > most)) return x;
    return x > 0.0f ? most : -most;
}

// the sum of v over the threadgroup, in every thread; part[nsg], or NULL: over the SIMD-group
static inline float sum_all(float v, threadgroup float *part, uint nsg, uint sg, uint lane) {
    v = simd_sum(v);
    if (!part) return v;
    threadgroup_barrier(mem_flags::mem_threadgroup);      // what stood in `part` has been read
    if (lane == 0) part[sg] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);      // each SIMD-group's sum is there
    return simd_sum(lane < nsg ? part[lane] : 0.0f);
}

// The mean (0 unless CENTRED) of x[cols] and, as a result, the scale of its norm, in every thread
// that sum_all serves. The variance has its own pass: mean(x * x) - mean(x)^2 would lose digits.
static inline float norm_scale(device const float *x, int cols, float eps, threadgroup float *part,
        uint nsg, uint sg, uint lane, thread float *mean) {
    int first = 4 * (sg * SIMD_LANES + lane), all = 4 * nsg * SIMD_LANES;
    float sum = 0.0f, square = 0.0f;
    for (int i = first; CENTRED && i < cols; i += all) {
        float4 v = four_floats(x, i, cols);
        for (int e = 0; e < 4; e++) sum += v[e];
    }
    *mean = CENTRED ? sum_all(sum, part, nsg, sg, lane) / (float)cols : 0.0f;
    for (int i = first; i < cols; i += all) {
        float4 v = four_floats(x, i, cols);
        for (int e = 0; e < 4; e++) {
            float d = i + e < cols ? v[e] - *mean : 0.0f;
            square += d * d;
        }
    }
    return rsqrt(sum_all(square, part, nsg, sg, lane) / (float)cols + eps);
}

// where the x of token t begins, in floats; those past the last one repeat it, in vain
static inline int token_x(int t, constant struct product_args *a) {
    return TOKENS > 1 ? min(t, a->few - 1) * a->x_step : 0;
}

// A lane's share of the products of R rows with the x of each of a few tokens:
//   sum[t][r] += sum of w[r][i] * norm_weights[i] * x[t][i],   square[t] += sum of x[t][i]^2
// The first `first` rows have format fa, the others fb.
//
// In float formats neighbouring lanes take neighbouring weights, four each: whole cache lines.
QUANT_INLINE void floats_dot(int fa, int fb, int first, int R, device const uchar *thread const *w,
        thread const struct row_input *in, constant struct product_args *a, thread float *sum,
        thread float *square) {
    int cols = in->cols;
    for (int i0 = 4 * in->lane; i0 < cols; i0 += DOT_STEPS * 4 * SIMD_LANES) {
        float4 ws[GEMV_ROWS][DOT_STEPS];
        QUANT_UNROLL for (int r = 0; r < R; r++)
            QUANT_UNROLL for (int j = 0; j < DOT_STEPS; j++)
                ws[r][j] = four_weights(r < first ? fa : fb, w[r], i0 + j * 4 * SIMD_LANES, cols);
        QUANT_UNROLL for (int t = 0; t < tokens_at_once(); t++) {
            float4 v[DOT_STEPS];
            QUANT_UNROLL for (int j = 0; j < DOT_STEPS; j++) {
                int i = i0 + j * 4 * SIMD_LANES;
                v[j] = four_floats(in->x + token_x(t, a), i, cols);
                QUANT_UNROLL for (int e = 0; e < 4; e++) square[t] += v[j][e] * v[j][e];
                v[j] = v[j] * norm_weights(i, in);
            }
            QUANT_UNROLL for (int r = 0; r < R; r++)
                QUANT_UNROLL for (int j = 0; j < DOT_STEPS; j++)
                    QUANT_UNROLL for (int e = 0; e < 4; e++)
                        sum[t * GEMV_ROWS + r] += ws[r][j][e] * v[j][e];
        }
    }
}

// floats from a token's staged columns to the next token's
static inline int staged_step(void) { return STAGED_COLS / tokens_at_once() / 32 * X_STRIDE; }

// Stages columns from .. end - 1 of all tokens, times norm weights; square[t] gets a thread's share
static inline void stage_inputs(int from, int end, thread const struct row_input *in,
        constant struct product_args *a, thread float *square) {
    threadgroup_barrier(mem_flags::mem_threadgroup);      // what stood there has been read
    for (int i = from + 4 * (int)in->tid; i < end; i += 4 * SIMD_LANES * in->nsg) {
        float4 w = norm_weights(i, in);
        QUANT_UNROLL for (int t = 0; t < tokens_at_once(); t++) {
            float4 v = four_floats(in->x + token_x(t, a), i, in->cols);
            threadgroup float *to = in->xs + t * staged_step() + (i - from) / 32 * X_STRIDE;
            for (int e = 0; e < 4; e++) square[t] += v[e] * v[e];
            *(threadgroup float4 *)(to + i % 32) = v * w;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // these are there
}

// The same if there is a block format. A lane takes every 32nd group, decodes it, and makes floats
// of four codes a row at a time, for all tokens. The threadgroup stages as many columns of x as
// there is room for, so that they come in whole cache lines; if xs is NULL, each lane loads its
// own, of one token. One product is added at a time: so all variants get the same multiply-adds.
QUANT_INLINE void groups_dot(int fa, int fb, int first, int R, device const uchar *thread const *w,
        thread const struct row_input *in, constant struct product_args *a, thread float *sum,
        thread float *square) {
    int cols = in->cols, step = in->xs ? STAGED_COLS / tokens_at_once() : cols;
    for (int from = 0, end; from < cols; from = end) {
        end = min(cols, from + step);
        if (in->xs) stage_inputs(from, end, in, a, square);
        for (int col = from + 32 * (int)in->lane; col < end; col += 32 * SIMD_LANES) {
            int place = (col - from) / 32 * X_STRIDE;
            uint q[GEMV_ROWS][8];
            float d[GEMV_ROWS][2], m[GEMV_ROWS][2];
            QUANT_UNROLL for (int r = 0; r < R; r++)
                group_decode(r < first ? fa : fb, w[r], col / 32, q[r], d[r], m[r]);
            QUANT_UNROLL for (int h = 0; h < 2; h++) {
                float dot[STAGED_TOKENS][GEMV_ROWS], xsum[STAGED_TOKENS];
                QUANT_UNROLL for (int t = 0; t < tokens_at_once(); t++) {
                    QUANT_UNROLL for (int r = 0; r < R; r++) dot[t][r] = 0.0f;
                    xsum[t] = 0.0f;
                }
                QUANT_UNROLL for (int j = 4 * h; j < 4 * h + 4; j++) {
                    float c[GEMV_ROWS][4];
                    int at = col + 4 * j;
                    QUANT_UNROLL for (int r = 0; r < R; r++)
                        codes_or_weights(r < first ? fa : fb, q[r][j], w[r], at, cols, c[r]);
                    QUANT_UNROLL for (int t = 0; t < tokens_at_once(); t++) {
                        float4 v;
                        if (in->xs) {
                            int own = place + t * staged_step() + 4 * j;
                            v = *(threadgroup const float4 *)(in->xs + own);
                        } else {
                            v = four_floats(in->x, at, cols);
                            for (int e = 0; e < 4; e++) square[t] += v[e] * v[e];
                            v = v * norm_weights(at, in);
                        }
                        QUANT_UNROLL for (int e = 0; e < 4; e++) {
                            xsum[t] += v[e];
                            QUANT_UNROLL for (int r = 0; r < R; r++) dot[t][r] += c[r][e] * v[e];
                        }
                    }
                }
                QUANT_UNROLL for (int t = 0; t < tokens_at_once(); t++)
                    QUANT_UNROLL for (int r = 0; r < R; r++) {
                        int format = r < first ? fa : fb;
                        thread float *to = &sum[t * GEMV_ROWS + r];
                        *to += format_float(format) ? dot[t][r] : d[r][h] * dot[t][r];
                        if (has_offsets(format)) *to += m[r][h] * xsum[t];
                    }
            }
        }
    }
}

static inline float softcap(float x, float cap) { return SOFTCAPPED ? cap * tanh(x / cap) : x; }

static inline float activation(float x) {
    if (ACTIVATION == ACT_SILU) return x / (1.0f + exp(-x));
    if (ACTIVATION == ACT_SWIGLU_OAI) {
        float g = x > 7.0f ? 7.0f : x;
        return g / (1.0f + exp(-1.702f * g));
    }
    if (ACTIVATION == ACT_GELU) {   // past 10 tanh is 1, but its exp might overflow
        float t = 0.79788456f * x * (1.0f + 0.044715f * x * x);
        return 0.5f * x * (1.0f + tanh(clamp(t, -10.0f, 10.0f)));
    }
    if (ACTIVATION == ACT_RELU) return x < 0.0f ? 0.0f : x;
    if (ACTIVATION == ACT_RELU2) return x < 0.0f ? 0.0f : x * x;
    return 0.0f / 0.0f;   // unknown: a NaN, which the session reports
}

// log(1 + exp(x)); where exp(x) is small, 1 + exp(x) alone would lose its digits
static inline float softplus(float x) {
    float e = exp(x), one = 1.0f + e;
    if (x > 20.0f) return x;
    return one == 1.0f ? e : log(one) * (e / (one - 1.0f));
}

// xielu in llm.c
static inline float activation_xielu(float x, constant struct finish_args *a) {
    float below = a->beta + softplus(a->alpha_n), least = x > a->eps ? a->eps : x;
    float curve = x > 0.0f ? softplus(a->alpha_p) * x * x : below * (exp(least) - 1.0f - x);
    return curve + a->beta * x;
}

// *y = v after soft cap and epilogue, which may read `other`; a: 0 if all in it is 0
static inline void finish(device float *y, float v, constant struct finish_args *a, float other) {
    if (EPILOGUE != EPILOGUE_GLU && SOFTCAPPED) v = softcap(v, a->softcap);
    if (EPILOGUE == EPILOGUE_STORE && LIMITED) v = limited(v, a->limit);
    if (EPILOGUE == EPILOGUE_ADD) v += other;
    if (EPILOGUE == EPILOGUE_ACT && ACTIVATION == ACT_XIELU) v = activation_xielu(v, a);
    else if (EPILOGUE == EPILOGUE_ACT) v = activation(v);
    if (EPILOGUE == EPILOGUE_GLU) {
        if (ACTIVATION == ACT_SWIGLU_OAI) v = 1.0f + limited(v, 7.0f);
        if (LIMITED) v = limited(v, a->limit);
        if (LIMITED > 1 && other > a->limit) other = a->limit;
        float gate = activation(other);
        v *= LIMITED && gate > a->limit ? a->limit : gate;
    }
    *y = v;
}

// does the epilogue read `other`, which the host binds?
static inline bool has_other(void) { return EPILOGUE == EPILOGUE_ADD || EPILOGUE == EPILOGUE_GLU; }

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// ---- 3. embed, norms ----

// x[cols] = scale * row r of W; with `more` it is added to x
static inline void embed_table(int format, device const uchar *w, constant struct kernel_matrix *m,
        int r, int cols, bool more, device float *x, uint lane) {
    device const uchar *row = w + m->start + (ulong)r * m->row_bytes;
    for (int g = lane; g * 32 < cols; g += SIMD_LANES) {
        float v[32];
        group_weights(format, row, g, cols, v);
        for (int i = 0; i < 32; i++) {
            if (RAGGED && 32 * g + i >= cols) continue;
            x[32 * g + i] = v[i] * m->scale + (more ? x[32 * g + i] : 0.0f);
        }
    }
}

// x[n][cols]: x[t] = row ids[t] of W, plus the rows of its position and of token type 0 where a
// model has these. Grid: a SIMD-group for each token; a lane keeps to its own groups.
kernel void embed(device const uchar *w, device const uchar *positions,
        device const uchar *types, device const int *ids, device const int *now, device float *x,
        constant struct embed_args *a, PLACE) {
    device float *to = x + (ulong)tg * a->cols;
    int pos = now[NOW_POS] + tg;
    embed_table(FORMAT_0, w, &a->w[0], ids[tg], a->cols, false, to, lane);
    if (a->w[1].rows) embed_table(FORMAT_1, positions, &a->w[1], pos, a->cols, true, to, lane);
    if (a->w[2].rows) embed_table(FORMAT_2, types, &a->w[2], 0, a->cols, true, to, lane);
}

// y[n][cols] = z / sqrt(mean(z * z) + eps) * w + bias, where z = x for RMSNorm, and x - mean(x) if
// CENTRED. An epilogue follows, because Gemma adds a normed result to x, and the delta rule has a
// gate. Without NORMED it copies x. Grid: a threadgroup for each row. Bound by memory.
kernel void norm(device const float *x, device const float *w, device const float *bias,
        device const float *other, device float *y, device const int *now,
        constant struct norm_args *a, PLACE) {
    ulong at = (ulong)tg * a->cols;
    int own = tg % a->groups * a->cols, pos = a->states ? now[NOW_POS] + (int)tg : 0;
    x += a->from ? (ulong)((pos + a->from) % a->states) * a->cols : at;
    y += (ulong)(a->to ? (pos + a->to) % a->states : (int)tg) * a->step;
    float mean = 0.0f, scale = 1.0f;
    if (NORMED) scale = norm_scale(x, a->cols, a->eps, shared, nsg, sg, lane, &mean);
    for (int i = 4 * (int)tid; i < a->cols; i += 4 * nsg * SIMD_LANES) {
        float4 v = four_floats(x, i, a->cols), before = {0.0f, 0.0f, 0.0f, 0.0f};
        if (has_other()) before = four_floats(other + at, i, a->cols);
        v = (v - mean) * scale;
        if (NORMED & NORM_WEIGHTS) v = v * four_floats(w + own, i, a->cols);
        if (NORMED & NORM_BIAS) v = v + four_floats(bias + own, i, a->cols);
        for (int e = 0; e < 4 && i + e < a->cols; e++) {
            finish(&y[i + e], v[e] * a->factor, 0, before[e]);
            if (a->scale != 1.0f) y[i + e] *= a->scale;
        }
    }
}

// best[FEW + 1][..][3], row 0 last: of each BEST_IDS of n logits the best, its id (of equals the
// first), and the sum of exp(logit - best). Grid: a SIMD-group for each of these.
kernel void best_ids(device const float *logits, device float *best, constant struct best_args *a,
        PLACE) {
    int parts = div_up(a->n, BEST_IDS), unit = tg * nsg + sg, row = unit / parts;
    int first = unit % parts * BEST_IDS, end = min(a->n, first + BEST_IDS), id = first;
    float top = -3e38f, sum = 0.0f;
    if (row >= a->rows) return;
    logits += row * a->n;
    best += 3 * (FEW * parts - row * parts + unit % parts);
    for (int i = first + (int)lane; i < end; i += SIMD_LANES) {
        if (!(logits[i] > top)) continue;
        top = logits[i];
        id = i;
    }
    float most = simd_max(top);
    id = simd_min(top == most ? id : end);
    for (int i = first + (int)lane; i < end; i += SIMD_LANES) sum += exp(logits[i] - most);
    sum = simd_sum(sum);
    if (lane > 0) return;
    best[0] = most;
    best[1] = id;
    best[2] = sum;
}

// gate[n][cols] = activation(gate) * this layer's inputs[n], `step` apart. Grid: a thread a number.
kernel void gate_inputs(device float *gate, device const float *inputs,
        constant struct input_args *a, PLACE) {
    int i = tg * MERGE_THREADS + tid, t = i / a->cols;
    if (t < a->n) gate[i] = activation(gate[i]) * inputs[(ulong)t * a->step + i % a->cols];
}

// x[n] times gates, sigmoid(z) or softplus(z), each for `each` numbers. Grid: a thread a number.
kernel void gate_heads(device float *x, device const float *z, constant struct gate_args *a,
        PLACE) {
    int i = tg * MERGE_THREADS + tid;
    if (i < a->n) x[i] *= a->softplus ? softplus(z[i / a->each]) : sigmoid(z[i / a->each]);
}

// Makes halves of a chunk's activations for gemm, to[row][row_halves(cols)]: x[row] / powers[row],
// then zeros. A row's power of two brings its largest number to 2^14 .. 2^15, because half
// overflows with Gemma, and has fewer digits below 2^-14. gemm multiplies products by the power.
// Grid: a threadgroup for each row; rows of x lie `step` apart.
kernel void halve(device const float *x, device half *to, device float *powers,
        constant struct halve_args *a, PLACE) {
    float top = 1e-30f;
    x += (ulong)tg * a->step;
    to += (ulong)tg * row_halves(a->cols);
    for (int i = 4 * (int)tid; i < a->cols; i += 4 * SIMD_LANES * nsg) {
        float4 v = four_floats(x, i, a->cols);
        for (int e = 0; e < 4; e++) top = max(top, fabs(v[e]));
    }
    top = simd_max(top);
    if (lane == 0) shared[sg] = top;
    threadgroup_barrier(mem_flags::mem_threadgroup);      // each SIMD-group's is there
    int power = max(-120, min(ilogb(simd_max(lane < nsg ? shared[lane] : 0.0f)), 120)) - 14;
    float shrink = ldexp(1.0f, -power);
    if (tid == 0) powers[tg] = ldexp(1.0f, power);
    for (int i = 4 * (int)tid; i < row_halves(a->cols); i += 4 * SIMD_LANES * nsg) {
        float4 v = four_floats(x, i, a->cols);
        half4 h;
        for (int e = 0; e < 4; e++) h[e] = (half)(v[e] * shrink);
        *(device half4 *)(to + i) = h;
    }
}

// ---- 4. decode ----
//
// One token is bound by memory: each weight is read once, for 2 FLOP. So a layer is five
// dispatches, which load each byte of weights once, decode it in registers, and forget it:
//   gemv (norm, Q, K, V, biases) | attention | gemv (Wo, added to x) |
//   gemv (norm, gate, up, activation) | gemv (down, added to x)
// Every threadgroup computes the RMSNorm of its input anew: 4 bytes a column from the cache cost
// less than a dispatch. (A mean would cost 12 more, so LayerNorm and biased norms are dispatches.)

// Which of three matrices has number i, if the first has 0 to n0 - 1, the second n0 to n1 - 1, and
// the third all others? gemv has numbers of threadgroups, gemv_ring of rows, gemm of tiles of rows.
static inline int matrix_of(int i, int n0, int n1) {
    if (i < n0) return 0;
    return i < n1 ? 1 : 2;
}
#define OF_LAST_TWO(which, b, c) ((which) == 1 ? (b) : (c))
#define OF_THREE(which, a, b, c) ((which) == 0 ? (a) : OF_LAST_TWO(which, b, c))

// The input of choice t, or head t, of a launch. EXPERTS_GATHER: choices of a token have its input.
static inline int input_of(int t, constant struct product_args *a) {
    return EXPERTS == EXPERTS_GATHER ? t / a->each : t;
}

// rows in a unit, of each matrix in a GLU's; with a GLU, or experts, as many for all matrices
static inline int unit_rows(int format) {
    bool glu = EPILOGUE == EPILOGUE_GLU;
    return gemv_rows(glu || EXPERTS ? FORMAT_0 : format, UNIT_ROWS, TOKENS, glu);
}

// what is bound of a matrix; of experts or heads that of the first
struct bound_matrix { device const uchar *w; device const float *bias, *scales; };

// v[t][r] = factor * (scale * (W x[t])[row + r] + bias[row + r]), in all lanes, for all tokens and
// all rows of a unit, of which some may lie past the last row. W is matrix `which`; where each
// expert has one, it is that of `expert`, which is 0 elsewhere. R is more than the unit's rows:
// then the same rows of the next matrix follow, whose format is fb.
QUANT_INLINE void gemv_product(int fa, int fb, int R, int which, int unit, int expert,
        thread const struct bound_matrix *ma, thread const struct bound_matrix *mb,
        thread const struct row_input *in, constant struct product_args *a, thread float *v) {
    int each = unit_rows(fa), last = a->w[which].rows - 1;
    bool floats = format_float(fa) && format_float(fb);
    device const uchar *w[GEMV_ROWS];
    float sum[FEW * GEMV_ROWS], square[FEW];
    QUANT_UNROLL for (int i = 0; i < tokens_at_once() * GEMV_ROWS; i++) sum[i] = 0.0f;
    QUANT_UNROLL for (int t = 0; t < tokens_at_once(); t++) square[t] = 0.0f;
    QUANT_UNROLL for (int r = 0; r < R; r++) {
        constant struct kernel_matrix *m = &a->w[which + r / each];
        int row = min(unit * each + r % each, last);
        w[r] = (r < each ? ma : mb)->w + m->start + (ulong)expert * m->step +
               (ulong)row * m->row_bytes;
    }
    if (floats) floats_dot(fa, fb, each, R, w, in, a, sum, square);
    else groups_dot(fa, fb, each, R, w, in, a, sum, square);
    QUANT_UNROLL for (int t = 0; t < tokens_at_once(); t++) {
        float scale = 1.0f;
        if (in->norm) {
            threadgroup float *part = in->xs && !floats ? in->xs - STAGED_SIMDGROUPS : 0;
            float all = sum_all(square[t], part, in->nsg, in->tid / SIMD_LANES, in->lane);
            scale = rsqrt(all / (float)in->cols + a->eps);
        }
        QUANT_UNROLL for (int r = 0; r < R; r++) {
            int i = which + r / each, row = min(unit * each + r % each, last);
            float scaled = scale * a->w[i].scale, y = simd_sum(sum[t * GEMV_ROWS + r]);
            if (SCALES >> i & 1) scaled *= (r < each ? ma : mb)->scales[expert];
            y *= scaled;
            if (BIASES >> i & 1) y += (r < each ? ma : mb)->bias[expert * a->w[i].bias_step + row];
            v[t * GEMV_ROWS + r] = y * a->factor;
        }
    }
}

// y = gemv_product's v after the epilogue: times activation(gate) (GLU), or plus other[rows]
static inline void gemv_unit(int fa, int fb, int which, int unit, int expert,
        thread const struct bound_matrix *ma, thread const struct bound_matrix *mb,
        thread const struct row_input *in, device const float *other, device float *y,
        constant struct product_args *a) {
    bool glu = EPILOGUE == EPILOGUE_GLU;
    int each = unit_rows(fa), R = glu ? 2 * each : each;
    int few = TOKENS > 1 ? a->few : 1;
    float v[FEW * GEMV_ROWS];
    gemv_product(fa, fb, R, which, unit, expert, ma, mb, in, a, v);
    QUANT_UNROLL for (int k = 0; k < tokens_at_once(); k++)
        QUANT_UNROLL for (int r = 0; r < each; r++) {
            int row = unit * each + r, i = k * GEMV_ROWS + r;
            ulong at = (ulong)k * a->w[which].out_step + row;
            if (in->lane == 0 && k < few && row < a->w[which].rows)
                finish(&y[at], v[glu ? i + each : i], &a->end,
                       EPILOGUE == EPILOGUE_ADD ? other[at] : v[i]);
        }
}

// y0 = W0 x, y1 = W1 x and y2 = W2 x, for up to three matrices with the same x (Q, K and V).
// EPILOGUE_GLU: y0 = activation(W0 x) * (W1 x); as one SIMD-group computes both products of its
// rows, neither is ever in memory. Grid: for each output and matrix, or W0 for the GLU, SIMD-groups
// for all units, in whole threadgroups. Routers use gemv for each token of a chunk, too: gemm
// rounds to half, which could reorder experts with almost equal scores. EXPERTS: W0, or the GLU,
// for the chosen experts of one token: t counts its choices, and y0 is [choices][rows].
// EXPERTS_HEADS: t counts heads of tokens, and each head has a matrix, x and y of its own.
kernel void gemv(device const uchar *w0, device const uchar *w1, device const uchar *w2,
        device const float *bias0, device const float *bias1, device const float *bias2,
        device const float *x, device const float *weights,                       // buffers 6, 7
        device float *y0, device float *y1, device float *y2,                     // 8 to 10
        device const float *other, device const int *chosen,                      // 11, 12
        device const float *scale0, device const float *scale1,
        constant struct product_args *a, PLACE) {
    bool glu = EPILOGUE == EPILOGUE_GLU;
    int t = tg / a->per_output, u = tg % a->per_output;   // an output; a threadgroup for it
    int n0 = gemv_grid(FORMAT_0, a->w[0].rows, UNIT_ROWS, TOKENS, glu, nsg);
    int n1 = n0 + gemv_grid(FORMAT_1, a->w[1].rows, UNIT_ROWS, TOKENS, glu, nsg);
    int which = glu ? 0 : matrix_of(u, n0, n1), e = 0;    // e: the expert, or the head
    int format = which == 1 ? FORMAT_1 : FORMAT_2;
    struct bound_matrix up = {w1, bias1, scale1}, m = {OF_THREE(which, w0, w1, w2),
        OF_THREE(which, bias0, bias1, bias2), which ? scale1 : scale0};
    device float *y = OF_THREE(which, y0, y1, y2) + (ulong)t * a->w[which].out_step;
    x += (ulong)input_of(t, a) * a->x_step;
    struct row_input in = {x, weights, NORMED, a->cols, lane, tid, nsg, shared + STAGED_SIMDGROUPS};
    if (EXPERTS) e = EXPERTS == EXPERTS_HEADS ? t % a->each : chosen[t];
    u = (u - OF_THREE(which, 0, n0, n1)) * (int)nsg + (int)sg;
    // matrices of one format share their code: a small program starts sooner
    if (glu) gemv_unit(FORMAT_0, FORMAT_1, 0, u, e, &m, &up, &in, other, y, a);
    else if (which == 0 || format == FORMAT_0)
        gemv_unit(FORMAT_0, FORMAT_0, which, u, e, &m, &m, &in, other, y, a);
    else if (which == 1) gemv_unit(FORMAT_1, FORMAT_1, 1, u, 0, &m, &m, &in, other, y, a);
    else gemv_unit(FORMAT_2, FORMAT_2, 2, u, 0, &m, &m, &in, other, y, a);
}

#ifdef HAS_RING
// gemv_ring does gemv's work on GPUs that copy in the background: NVIDIA's. It multiplies bytes,
// to which it rounds the inputs, and has neither float formats nor EXPERTS_HEADS. A token is some
// 200 launches of a few microseconds, and gemv begins each by waiting, for its input, and then for
// its first weights. Here two SIMD-groups, the copiers, do nothing but copy weights to slots of
// threadgroup memory, over and over; eight, the workers, multiply what is in the slots. Copiers
// need no input but, with experts, the choice. So from compute capability 9.0 on, where a launch
// may begin before the last one has ended, the first weights are there when its input is.
//
// An example: gate and up of Qwen3-0.6B in Q4_0, each 3,072 rows of 1,024 columns, on an H100:
//   threadgroup   23 or 24 rows of gate and the same of up; there are 132, one on each core
//   slot          a piece of each of 16 rows: 8 of gate, the same 8 of up (no GLU: of one matrix)
//   tile          up to 8 rows of the result (no GLU: 16); it takes a slot for each piece of a row
//   piece         1 to 3 KB of a row, the last one less: short copies are slow; here all 576 bytes
//   round         one use of all slots, of which 112 KB of threadgroup memory have ten
//   batch         up to 64 rows of the result (no GLU: 128), after which workers add their sums
//   turn          1,024 columns, a stretch for each worker; a row's last piece may end within one
//   stretch       128 columns: four groups
//   lane l        group l % 4 of its worker's stretch, in rows l / 4 and l / 4 + 8 of the slot
// In long launches LANE_GROUPS is 2 if it can be: a lane has two neighbouring groups, which share
// words in many formats, and a stretch has 256 columns.
//
// Activations are rounded to bytes as in the CPU's decode (round_32 in llm.c), but with a scale in
// f32: the largest of a group becomes 127 or -127. They are staged as [groups][tokens][RING_GROUP]
// words, see ring_group; with EXPERTS as [inputs][groups][RING_GROUP]:
//   0..7: 32 bytes | 8, 9: sums of the first and the last 16 numbers | 10: scale | 11: sum of all
// Sums of bytes times bytes are exact integers: no order or layout changes them.
//
// A decoded weight serves up to eight TOKENS, two tokens in each matrix product; a batch has that
// many times fewer rows. Each token's groups and squares are added in the order that they have for
// one token: so its sums are the same bits. (TOKENS past a->few have whatever values are there.)
// With several tokens arithmetic takes longer than copies. So where half of a core's memory does
// not do, or LANE_GROUPS is 2, there are two TEAMS of workers, if they fit (see plan_ring): slots,
// tiles and batches have twice the rows, of which each team takes half. Where staging in all
// threadgroups would take long, ring_inputs has PACKED the inputs, and they come in one copy.
//
// Who waits for whom. An mbarrier counts arrivals; its phase ends when all have arrived, and the
// next begins. Rounds and phases count from 0. One waits for a phase by its parity: 0, 1, 0 ..
//   mbarrier        arrivals        its phase r ends when                who waits for that
//   full[slot]      16, 32 or 64    round r's copies to it are there     workers, in round r
//   is_free[slot]   256 or 512      all workers' threads have read it    copiers, in round r + 1
//   arrived         1, 256 or 512   the copy of PACKED inputs is there   workers, at first
// A worker reads only columns that it has staged itself, so one team needs no other barrier until
// a batch ends, when all workers meet at workers_barrier. They meet there, too, before two teams
// read what they have staged for each other. Sums have two buffers: while some workers still read
// those of a batch, others write those of the next.
//
// Its words, which GPUs without HAS_RING lack:
//   mbarrier_init(b, n)             a phase of it ends with n arrivals
//   mbarrier_arrive(b)              one arrival
//   copy_threads(n)                 how many threads share a copy, each with a call; at most n
//   mbarrier_copy(b, to, from, bytes, i, n)   one arrival, once share i of n of these bytes is
//                                   there; to, from and bytes are multiples of 16
//   mbarrier_wait(b, parity)        until the phase with this parity has ended
//   bits_of(x)                      the bits of a float
//   as_other(p)                     p as a pointer to threadgroup memory, not device, or vice versa
//   workers_barrier(n)              a threadgroup_barrier of the first n threads
//   multiply_bytes(c, a, b)         c[16][8] += a[16][32] b[32][8], of signed bytes. Lane l has
//       a[0], a[1]   rows l / 4 and l / 4 + 8 of a, four bytes from column l % 4 * 4 on
//       a[2], a[3]   the same, 16 columns on
//       b[0], b[1]   column l / 4 of b, four bytes from row l % 4 * 4 on; the same, 16 rows on
//       c[0], c[1]   row l / 4 of c, column l % 4 * 2 and the next
//       c[2], c[3]   row l / 4 + 8 of c, the same columns

// A decoder may have subtracted a power of two from codes: code_bytes adds it again, so compilers
// drop both, and group_add takes it off the sum. (Not Q8_0's 128: no signed byte holds 255.)
static inline int byte_bias(int format) {
    int bias = format_bias(format);
    return bias < 64 && (bias & (bias - 1)) == 0 ? bias : 0;
}
QUANT_INLINE uint code_bytes(int format, uint word) {
    uint bias = byte_bias(format);
    return bias ? (word ^ 0x80808080) - (128 - bias) * 0x01010101 : word;   // no byte borrows
}

// Adds a group's part of a row's product. s0: the sum of codes * bytes; or, where 16 share a scale,
// of the first 16, and s1 of the others. d: scales, offsets. x: the floats of a staged group. A
// statement adds one product: so all variants have the same multiply-adds.
QUANT_INLINE void group_add(int format, bool per16, int s0, int s1, thread const float *d,
        float4 x, thread float *acc) {
    float bias = byte_bias(format), m0 = bias > 0.0f ? -bias * d[0] : d[2];
    float m1 = bias > 0.0f ? -bias * d[1] : d[3];
    bool offset = bias > 0.0f || format_bias(format) == 0;
    if (offset) *acc += m0 * (per16 ? x[0] : x[3]);
    if (offset && per16) *acc += m1 * x[1];
    *acc += d[0] * x[2] * (float)s0;
    if (per16) *acc += d[1] * x[2] * (float)s1;
}

// Adds the parts of the two groups that a lane has decoded, qa of format fa in row l / 4 and qb of
// fb in row l / 4 + 8, to acc[2 t] and acc[2 t + 1] of each token t, by products c += a b. A row of
// a has four codes of each of four groups, then the next four. A column of b has numbers of the
// first token (1) or of the second (2) opposite the codes of one group, else zeros:
//   a row of a       group 0 | group 1 | group 2 | group 3 | group 0, the next four | and so on
//   column 0 of b    1 1 1 1 | . . . . | . . . . | . . . . | 1 1 1 1
//   column 1 of b    2 2 2 2 | . . . . | . . . . | . . . . | 2 2 2 2
//   column 2 of b    . . . . | 1 1 1 1 | . . . . | . . . . | . . . .                | and so on
// So c[r][2 i] is the first token's sum of group i in row r, in the lane that has decoded it, and
// c[r][2 i + 1] the second's. A lane owns group l % 4, in a and c. In b it fills twice four rows of
// column l / 4, which is for group l / 8 and token l / 4 % 2: if it owns that group, with the
// token's numbers, else with zeros. Lane 13 has group 1 of rows 3 and 11, and fills column 3 with
// the second token's numbers; lane 12, of group 0, with zeros. x: the lane's group as it is staged;
// right: the lane's part of b, in that group or in zeros.
QUANT_INLINE void codes_dot(int fa, int fb, thread const uint *qa, thread const uint *qb,
        thread const float *da, thread const float *db, threadgroup const float *x,
        threadgroup const float *right, thread float *acc) {
    bool per16 = format_per16(fa) || format_per16(fb);
    QUANT_UNROLL for (int t = 0; t < tokens_at_once(); t += 2) {
        int sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};     // the second: of the other 16 codes
        QUANT_UNROLL for (int j = 0; j < 8; j += 2) {
            uint a[4] = {code_bytes(fa, qa[j]), code_bytes(fb, qb[j]), code_bytes(fa, qa[j + 1]),
                         code_bytes(fb, qb[j + 1])};
            uint2 two = *(threadgroup const uint2 *)(right + RING_GROUP * t + j);
            uint b[2] = {two[0], two[1]};
            multiply_bytes(sum[per16 ? j / 4 : 0], a, b);
        }
        QUANT_UNROLL for (int k = 0; k < 2 && t + k < tokens_at_once(); k++) {
            float4 in = *(threadgroup const float4 *)(x + RING_GROUP * (t + k) + 8);
            thread float *to = acc + 2 * (t + k);
            group_add(fa, per16, sum[0][k], sum[1][k], da, in, &to[0]);
            group_add(fb, per16, sum[0][2 + k], sum[1][2 + k], db, in, &to[1]);
        }
    }
}

#define IS_GLU (EPILOGUE == EPILOGUE_GLU)

struct ring_thread {
    int first, end, x0;                                   // its threadgroup's rows and first input
    int team, worker;                                     // a worker's team, and number in that
    uint tid, lane;
};
static inline int workers(void) { return TEAMS * RING_WORKERS; }
static inline int slot_rows(void) { return RING_TILE * TEAMS; }
static inline int tile_most(void) { return IS_GLU ? slot_rows() / 2 : slot_rows(); }   // its rows
static inline int row_sums(void) { return IS_GLU ? 2 : 1; }        // of a worker and token
static inline int batch_sums(void) { return ring_sums(TEAMS) / tokens_at_once(); }   // of a token
static inline int batch_rows(void) { return batch_sums() / row_sums(); }

// The tile that begins at row r of the result, whose numbers go on through all matrices or choices:
// its matrix; the choice that names its expert; its first row in that matrix; how many rows of the
// result it has. It ends where the matrix, the threadgroup's rows or the batch end.
struct ring_tile { int which, choice, row, n; };
static inline struct ring_tile tile_at(int r, struct ring_thread me,
        constant struct product_args *a) {
    int n0 = a->w[0].rows, n1 = n0 + a->w[1].rows;
    struct ring_tile tile = {0, 0, r, min(tile_most(), me.end - r)};
    if (EXPERTS) tile.choice = r / n0;
    else if (!IS_GLU) tile.which = matrix_of(r, n0, n1);
    tile.row -= EXPERTS ? tile.choice * n0 : OF_THREE(tile.which, 0, n0, n1);
    tile.n = min(tile.n, a->w[tile.which].rows - tile.row);
    tile.n = min(tile.n, batch_rows() - (r - me.first) % batch_rows());
    return tile;
}

// Row i of a slot: its matrix and row in the tile, or past it. GLU: a team has 8 of gate, 8 of up.
struct slot_row { int which, row; };
static inline struct slot_row row_at(int i, struct ring_tile tile) {
    int of = RING_TILE / 2;
    struct slot_row plain = {tile.which, i}, glu = {i / of % 2, i / RING_TILE * of + i % of};
    return IS_GLU ? glu : plain;
}

// where a row's piece p begins, in bytes from what is bound; that address is a multiple of 16
static inline ulong piece_start(struct slot_row x, struct ring_tile tile, int expert, int p,
        constant struct product_args *a) {
    constant struct kernel_matrix *m = &a->w[x.which];
    return m->start + (ulong)expert * m->step + (ulong)(tile.row + x.row) * m->row_bytes +
           (ulong)p * m->piece_bytes;
}

struct ring_place { int slot, round; };                   // a slot, the round that it is filled in
static inline void place_step(thread struct ring_place *at, int slots) {
    at->slot++;
    if (at->slot < slots) return;
    at->slot = 0;
    at->round++;
}

// The parts of threadgroup memory: see at_zeros and what follows it
struct ring_memory {
    threadgroup mbarrier *full, *is_free, *arrived;
    threadgroup float *zeros, *sums, *squares, *inputs;   // squares[FEW][RING_WORKERS] of inputs
    threadgroup uchar *slots;                             // [slots][slot_rows][stride]
};
static inline struct ring_memory ring_parts(threadgroup float *shared,
        constant struct product_args *a) {
    threadgroup mbarrier *full = (threadgroup mbarrier *)shared;
    int slots = at_slots(TEAMS, a->set_floats, a->input_sets);
    struct ring_memory m = {full, full + RING_SLOTS, full + 2 * RING_SLOTS, shared + at_zeros(),
                            shared + at_sums(), shared + at_squares(TEAMS),
                            shared + at_inputs(TEAMS), (threadgroup uchar *)(shared + slots)};
    return m;
}

// threads that share a row's copy; those that share the copy of the PACKED inputs
static inline int row_threads(void) {
    return copy_threads(RING_COPIERS * SIMD_LANES / slot_rows());
}
static inline int input_threads(void) { return copy_threads(workers() * SIMD_LANES); }

static inline void ring_set_up(struct ring_memory m, uint tid, constant struct product_args *a) {
    if ((int)tid < a->slots) mbarrier_init(&m.full[tid], slot_rows() * row_threads());
    if ((int)tid < a->slots) mbarrier_init(&m.is_free[tid], workers() * SIMD_LANES);
    if (PACKED && tid == 0) mbarrier_init(m.arrived, input_threads());
    if (tid < RING_GROUP * FEW) m.zeros[tid] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);      // the mbarriers are there
}

// A copier's thread fills its row, or its share of a row, of slot after slot, as soon as each is
// free again. A row past the tile's last gets an empty copy, which arrives, too.
static inline void ring_feed(struct ring_memory m, struct ring_thread me, device const uchar *w0,
        device const uchar *w1, device const uchar *w2, device const int *chosen, int number,
        constant struct product_args *a) {
    struct ring_place at = {0, 0};
    int i = number / row_threads(), share = number % row_threads();   // its row of a slot
    for (int r = me.first, p = 0; r < me.end;) {          // nested loops would be unrolled
        struct ring_tile tile = tile_at(r, me, a);
        struct slot_row x = row_at(i, tile);
        int expert = EXPERTS ? chosen[tile.choice] : 0, bytes = a->w[x.which].piece_bytes;
        device const uchar *from = OF_THREE(x.which, w0, w1, w2);
        from += piece_start(x, tile, expert, p, a);
        uint skew = (ulong)from % 16;                     // copies begin at multiples of 16
        uint n = skew + min(bytes, (int)a->w[x.which].row_bytes - p * bytes);
        if (at.round > 0) mbarrier_wait(&m.is_free[at.slot], (at.round - 1) % 2);
        if (x.row >= tile.n) n = 0;
        threadgroup uchar *to = m.slots + (at.slot * slot_rows() + i) * a->stride;
        mbarrier_copy(&m.full[at.slot], to, from - skew, (n + 15) / 16 * 16, share, row_threads());
        place_step(&at, a->slots);
        if (++p < a->pieces) continue;
        p = 0;
        r += tile.n;
    }
}

// Stages x * weights of four neighbours, from number i of their group on; eight lanes have a group.
static inline void stage_four(float4 x, int i, threadgroup float *group) {
    const float ROUND = 12582912.0f;   // llm.c's ROUNDER: x + ROUND has an integer in its low bits
    float top = 0.0f, sum = 0.0f;
    uint word = 0;
    for (int e = 0; e < 4; e++) top = max(top, fabs(x[e]));
    for (int d = 1; d < 8; d *= 2) top = max(top, simd_shuffle_xor(top, d));
    float scale = top / 127.0f, by = top > 1e-36f ? 127.0f / top : 0.0f;   // never infinite
    for (int e = 0; e < 4; e++) {
        float number = fma(x[e], by, ROUND);
        word |= (bits_of(number) & 255) << 8 * e;
        sum += number - ROUND;
    }
    ((threadgroup uint *)group)[i / 4] = word;
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 2);
    float all = sum + simd_shuffle_xor(sum, 4);
    if (i % 16 == 0) group[8 + i / 16] = sum * scale;
    if (i == 0) group[10] = scale + (all - all);          // NaN for infinity and NaN
    if (i == 0) group[11] = all * scale;
}

// A worker stages 128 columns a step, LANE_GROUPS steps a turn. A lane's first of four in step n:
static inline int worker_col(int n, int worker, uint lane) {
    int turn = n / LANE_GROUPS, step = n % LANE_GROUPS;
    return turn * ring_turn(LANE_GROUPS) + worker * ring_stretch(LANE_GROUPS) + 128 * step +
           4 * (int)lane;
}
// how many steps a worker has: those of one turn at least, so that it writes its sum of squares
static inline int worker_steps(int cols, int worker) {
    int left = ring_padded(cols, LANE_GROUPS) - worker * ring_stretch(LANE_GROUPS);
    return max(div_up(left, ring_turn(LANE_GROUPS)), 1) * LANE_GROUPS;
}

// Waits for x, and stages a worker's columns of inputs t0, t0 + by, .., times the norm's weights:
// ring_finish divides. The steps of all these inputs are numbered one after the other, and begin ..
// end - 1 are done here. With 8 steps an input, t0 = 1 and by = 2, for example, steps 8 .. 15 are
// those of input 3. squares[t] gets each worker's sum of x * x. The loads of STAGE_STEPS steps
// overlap; the norm's first weights are no launch's output, so they do not wait.
enum { STAGE_STEPS = 4 };
static inline void ring_stage(struct row_input in, int t0, int by, int begin, int end,
        threadgroup float *inputs, threadgroup float *squares, int worker,
        constant struct product_args *a) {
    bool several = TOKENS > 1 || EXPERTS;                 // inputs
    int each = several ? worker_steps(in.cols, worker) : end;   // steps of an input
    float square = 0.0f;
    for (int u0 = begin; u0 < end; u0 += STAGE_STEPS) {
        float4 w[STAGE_STEPS], v[STAGE_STEPS];
        int col[STAGE_STEPS], t[STAGE_STEPS];
        QUANT_UNROLL for (int j = 0; j < STAGE_STEPS; j++) {
            int u = min(u0 + j, end - 1), input = several ? u / each : 0;
            t[j] = t0 + input * by;
            col[j] = worker_col(u - input * each, worker, in.lane);
            w[j] = norm_weights(col[j], &in);
        }
        if (u0 == begin) { input_wait(); }
        QUANT_UNROLL for (int j = 0; j < STAGE_STEPS; j++)
            v[j] = four_floats(in.x + (ulong)t[j] * a->x_step, col[j], in.cols);
        QUANT_UNROLL for (int j = 0; j < STAGE_STEPS; j++) {
            if (u0 + j >= end) break;                     // all lanes
            for (int e = 0; e < 4; e++) square += v[j][e] * v[j][e];
            threadgroup float *to = inputs + col[j] / 32 * ring_group(tokens_at_once());
            to += t[j] * (TOKENS > 1 ? RING_GROUP : a->set_floats);
            if (col[j] < ring_padded(in.cols, LANE_GROUPS))   // all lanes, or none
                stage_four(v[j] * w[j], col[j] % 32, to);   // past the row's end they are 0
            if (!NORMED || (u0 + j + 1) % each != 0) continue;
            square = simd_sum(square);
            if (in.lane == 0) squares[t[j] * RING_WORKERS + worker] = square;
            square = 0.0f;
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);        // this worker's columns are there
}

// Takes the n inputs that a threadgroup's rows need
static inline void ring_take(struct ring_memory m, struct ring_thread me, device const float *x,
        device const float *weights, int n, constant struct product_args *a) {
    if (PACKED) {                                         // squares, then inputs
        threadgroup uchar *to = (threadgroup uchar *)m.squares;
        int bytes = 4 * (FEW * RING_WORKERS + a->set_floats);
        input_wait();
        if ((int)me.tid < input_threads())
            mbarrier_copy(m.arrived, to, (device const uchar *)x, bytes, me.tid, input_threads());
        mbarrier_wait(m.arrived, 0);
        return;
    }
    x += (ulong)me.x0 * a->x_step;
    struct row_input in = {x, weights, NORMED, a->cols, me.lane, 0, 0, 0};
    int steps = div_up(n - me.team, TEAMS) * worker_steps(a->cols, me.worker);   // of the team
    ring_stage(in, me.team, TEAMS, 0, steps, m.inputs, m.squares, me.worker, a);
    if (TEAMS > 1) { workers_barrier(workers() * SIMD_LANES); }   // each team has staged some
}

// Adds a worker's share of a piece, as codes_dot says, to acc. ra and rb: where a lane's two rows
// are in the slot; groups: of 32 columns; x: the piece's staged input.
QUANT_INLINE void ring_dot(int fa, int fb, threadgroup const uchar *ra, threadgroup const uchar *rb,
        int groups, threadgroup const float *x, threadgroup const float *zeros,
        struct ring_thread me, thread float *acc) {
    int last = groups / LANE_GROUPS - 1, mine = me.lane % 4;
    bool second = me.lane / 4 % 2, fills = (int)me.lane / 8 == mine;   // b, see codes_dot
    bool zero = !fills || (second && tokens_at_once() == 1);
    // past the row's end, where x is 0, a lane takes the last one again: only a last piece ends so
    for (int i = 4 * me.worker; i <= last; i += 4 * RING_WORKERS) {
        uint take = min(i + mine, last), qa[2][8], qb[2][8];
        float da[2][4], db[2][4];                         // scales, offsets
        QUANT_UNROLL for (int h = 0; h < LANE_GROUPS; h++) {
            threadgroup const float *group = x;
            group += (LANE_GROUPS * (i + mine) + h) * ring_group(tokens_at_once());
            threadgroup const float *right = group + (second ? RING_GROUP : 0);
            if (zero) right = zeros;
            group_decode(fa, as_other(ra), LANE_GROUPS * take | h, qa[h], da[h], da[h] + 2);
            group_decode(fb, as_other(rb), LANE_GROUPS * take | h, qb[h], db[h], db[h] + 2);
            codes_dot(fa, fb, qa[h], qb[h], da[h], db[h], group, right, acc);
        }
    }
}

// The same for a team's rows of piece p of a tile, when its slot is full. Rows past the tile's are
// whatever is in the slot, and their sums are not used; a team may have only such rows.
QUANT_INLINE void ring_piece(struct ring_memory m, struct ring_thread me, int slot, int round,
        struct ring_tile tile, int expert, int p, threadgroup const float *x,
        constant struct product_args *a, thread float *acc) {
    int i = RING_TILE * me.team + (int)me.lane / 4, j = i + RING_TILE / 2;   // the lane's rows
    struct slot_row first = row_at(i, tile), second = row_at(j, tile);
    threadgroup const uchar *ra = m.slots + (slot * slot_rows() + i) * a->stride;
    threadgroup const uchar *rb = ra + RING_TILE / 2 * a->stride;
    ra += piece_start(first, tile, expert, p, a) % 16;
    rb += piece_start(second, tile, expert, p, a) % 16;
    int groups = min(a->piece_cols, a->cols - p * a->piece_cols) / 32;
    mbarrier_wait(&m.full[slot], round % 2);
    simdgroup_barrier(mem_flags::mem_threadgroup);        // lanes may have waited apart
    // matrices of one format share their code: a small program starts sooner
#define DOT(fa, fb) ring_dot(fa, fb, ra, rb, groups, x, m.zeros, me, acc)
    bool none = TEAMS > 1 && me.team * tile_most() / TEAMS >= tile.n;   // a team without rows
    int format = tile.which == 1 ? FORMAT_1 : FORMAT_2;
    if (IS_GLU && !none) DOT(FORMAT_0, FORMAT_1);
    else if (!none && (tile.which == 0 || format == FORMAT_0)) DOT(FORMAT_0, FORMAT_0);
    else if (!none && tile.which == 1) DOT(FORMAT_1, FORMAT_1);
    else if (!none) DOT(FORMAT_2, FORMAT_2);
#undef DOT
    mbarrier_arrive(&m.is_free[slot]);
}

// Writes a worker's sums of a tile, from acc as in codes_dot, to sums[token][row][row_sums()]
QUANT_INLINE void ring_write(struct ring_thread me, struct ring_tile tile, thread float *acc,
        threadgroup float *sums) {
    QUANT_UNROLL for (int i = 0; i < 2 * tokens_at_once(); i++) {
        int at = RING_TILE * me.team + (int)me.lane / 4 + RING_TILE / 2 * (i % 2);
        struct slot_row x = row_at(at, tile);
        float v = acc[i] + simd_shuffle_xor(acc[i], 1);
        v += simd_shuffle_xor(v, 2);
        if (me.lane % 4 == 0 && x.row < tile.n)
            sums[i / 2 * batch_sums() + x.row * row_sums() + (IS_GLU ? x.which : 0)] = v;
    }
}

// computes a worker's sums of a batch, rows from .. to - 1
QUANT_INLINE void ring_rows(struct ring_memory m, struct ring_thread me,
        thread struct ring_place *at, device const int *chosen, int from, int to,
        threadgroup float *sums, constant struct product_args *a) {
    struct ring_tile tile;
    for (int r = from; r < to; r += tile.n) {
        float acc[2 * FEW];
        tile = tile_at(r, me, a);
        int expert = EXPERTS ? chosen[tile.choice] : 0;
        int input = EXPERTS ? input_of(tile.choice, a) - me.x0 : 0;
        threadgroup const float *x = m.inputs + input * a->set_floats;
        QUANT_UNROLL for (int i = 0; i < 2 * tokens_at_once(); i++) acc[i] = 0.0f;
        for (int p = 0; p < a->pieces; p++) {
            ring_piece(m, me, at->slot, at->round, tile, expert, p, x, a, acc);
            place_step(at, a->slots);
            x += a->piece_cols / 32 * ring_group(tokens_at_once());
        }
        ring_write(me, tile, acc, sums + me.worker * ring_sums(TEAMS) + (r - from) * row_sums());
    }
}

struct ring_out {                                         // of a matrix, for its products
    device const float *bias, *scales;
    device float *y;
};

// A row's product from the sums of all workers; see gemv_product
static inline float ring_sum(threadgroup const float *sums, int which, int row, int expert,
        float scale, struct ring_out out, constant struct product_args *a) {
    float sum = 0.0f;
    for (int i = 0; i < RING_WORKERS; i++) sum += sums[i * ring_sums(TEAMS)];
    scale *= a->w[which].scale;
    if (SCALES >> which & 1) scale *= out.scales[expert];
    sum *= scale;
    if (BIASES >> which & 1) sum += out.bias[expert * a->w[which].bias_step + row];
    return sum * a->factor;
}

// A thread's result in a batch, if it `has` one: y[at] of a token, in the row where `tile` begins
struct ring_result { struct ring_tile tile; int token; ulong at; bool has; };
static inline struct ring_result result_of(struct ring_thread me, int from, int to,
        constant struct product_args *a) {
    int row = from + (int)me.tid % batch_rows(), token = (int)me.tid / batch_rows();
    struct ring_tile tile = tile_at(min(row, me.end - 1), me, a);
    struct ring_result x = {tile, token, 0, row < to && token < (TOKENS > 1 ? a->few : 1)};
    x.at = (ulong)(tile.choice + token) * a->w[tile.which].out_step + tile.row;
    return x;
}

// Writes that result. sums: those of all workers in the batch; other: what the epilogue adds
static inline void ring_finish(struct ring_memory m, struct ring_thread me, struct ring_result x,
        threadgroup const float *sums, float other, struct ring_out out0, struct ring_out out1,
        struct ring_out out2, device const int *chosen, constant struct product_args *a) {
    int choice = x.tile.choice, expert = EXPERTS ? chosen[choice] : 0, row = x.tile.row;
    int input = EXPERTS ? input_of(choice, a) - me.x0 : x.token;
    int which = IS_GLU ? 1 : x.tile.which;                // of a GLU's matrices gate is 0, up 1
    struct ring_out out = OF_THREE(which, out0, out1, out2);
    float square = 0.0f, scale = 1.0f;
    if (!x.has) return;
    sums += x.token * batch_sums() + (int)me.tid % batch_rows() * row_sums();
    for (int i = 0; NORMED && i < RING_WORKERS; i++) square += m.squares[input * RING_WORKERS + i];
    if (NORMED) scale = rsqrt(square / (float)a->cols + a->eps);
    if (IS_GLU) other = ring_sum(sums, 0, row, expert, scale, out0, a);
    float v = ring_sum(sums + row_sums() - 1, which, row, expert, scale, out, a);
    finish((IS_GLU ? out0.y : out.y) + x.at, v, &a->end, other);
}

// The products of gemv, with the same buffers, for one token or, with several TOKENS, a->few. x has
// their inputs as rows, or PACKED. EXPERTS: for a few tokens' choices, each as if alone, as one
// expert's rows for two tokens seldom meet. Grid: one or two threadgroups a core; each has a row
kernel void gemv_ring(device const uchar *w0, device const uchar *w1, device const uchar *w2,
        device const float *bias0, device const float *bias1, device const float *bias2,
        device const float *x, device const float *weights,                       // buffers 6, 7
        device float *y0, device float *y1, device float *y2,                     // 8 to 10
        device const float *other, device const int *chosen,                      // 11, 12
        device const float *scale0, device const float *scale1,
        constant struct product_args *a, PLACE) {
    struct ring_memory m = ring_parts(shared, a);
    struct ring_out out0 = {bias0, scale0, y0}, out1 = {bias1, scale1, y1}, out2 = {bias2, 0, y2};
    int rows = a->w[0].rows, n_inputs = TOKENS > 1 ? a->few : 1;
    uint all = rows * a->outputs + (IS_GLU ? 0 : a->w[1].rows + a->w[2].rows);
    // all * threadgroups is below 2^32: run_ring checks it
    int first = all * tg / a->threadgroups, end = all * (tg + 1) / a->threadgroups;
    struct ring_thread me = {first, end, 0, (int)sg / RING_WORKERS, (int)sg % RING_WORKERS, tid,
                             lane};
    ring_set_up(m, tid, a);
    if ((int)sg >= workers()) {
        int own = slot_rows() * row_threads() / RING_COPIERS;   // lanes that copy
        int number = ((int)sg - workers()) * own + (int)lane;
        if (EXPERTS) { input_wait(); }                    // for the choice
        if ((int)lane < own) ring_feed(m, me, w0, w1, w2, chosen, number, a);
        return;
    }
    if (EXPERTS) me.x0 = input_of(first / rows, a);
    if (EXPERTS) n_inputs = input_of((end - 1) / rows, a) + 1 - me.x0;
    ring_take(m, me, x, weights, n_inputs, a);
    struct ring_place at = {0, 0};
    for (int from = first, buffer = 0; from < end; from += batch_rows(), buffer ^= 1) {
        int to = min(from + batch_rows(), end);
        threadgroup float *sums = m.sums + buffer * RING_WORKERS * ring_sums(TEAMS);
        struct ring_result soon = result_of(me, from, to, a);   // made anew below: few registers
        float old = soon.has && EPILOGUE == EPILOGUE_ADD ? other[soon.at] : 0.0f;   // is on its way
        ring_rows(m, me, &at, chosen, from, to, sums, a);
        workers_barrier(workers() * SIMD_LANES);          // all sums are there
        ring_finish(m, me, result_of(me, from, to, a), sums, old, out0, out1, out2, chosen, a);
    }
}

// Packs inputs of a few tokens for gemv_ring, times the norm's weights, as its workers stage them:
// packed[FEW][RING_WORKERS] has the workers' sums of squares; then come the inputs. Grid: a
// SIMD-group for each worker of a token, or without a norm for each of its turns.
kernel void ring_inputs(device const float *x, device const float *weights, device float *packed,
        constant struct product_args *a, PLACE) {
    int t = tg / a->threadgroups, part = tg % a->threadgroups;   // those of a token
    int turn = part / RING_WORKERS, worker = part % RING_WORKERS;
    int end = worker_steps(a->cols, worker), begin = turn * LANE_GROUPS;
    threadgroup float *to = as_other(packed);
    struct row_input in = {x, weights, NORMED, a->cols, lane, 0, 0, 0};
    if (!NORMED) end = min(end, begin + LANE_GROUPS);
    ring_stage(in, t, 0, begin, end, to + FEW * RING_WORKERS, to, worker, a);
}
#endif

// The place of the first (which = 0) or second number of pair p in a head. After the n_rot numbers
// that RoPE rotates, pairs are neighbours, and stay as they are.
static inline int pair_index(int p, int which, int n_rot) {
    bool apart = PAIRING == ROPE_HALVES && p < n_rot / 2;
    return apart ? p + which * (n_rot / 2) : 2 * p + which;
}

// A lane has pairs lane, lane + 32 ..: how many numbers; the pair of number i; is it in the head?
static inline int lane_numbers(void) { return 2 * div_up(HEAD_DIM / 2, SIMD_LANES); }
static inline int lane_pair(int i, uint lane) { return (int)lane + i / 2 * SIMD_LANES; }
static inline bool pair_inside(int i, uint lane) { return lane_pair(i, lane) < HEAD_DIM / 2; }

// from a head's query to the next one's; if GATED, the head's gate is between them
static inline int query_step(void) { return GATED ? 2 * HEAD_DIM : HEAD_DIM; }

// Norms one head of Q (which = 0) or K, whose pairs are in v as in head_rope: RMSNorm, or LayerNorm
// if CENTRED. Weights and biases are [HEAD_DIM] for all heads, or each head has its own.
QUANT_INLINE void head_norm(int which, thread const float *w, thread const float *bias,
        constant struct attention_args *a, uint lane, thread float *v) {
    float mean = 0.0f, square = 0.0f;
    if (!(QK_NORMED >> which & 1)) return;
    QUANT_UNROLL for (int i = 0; i < lane_numbers(); i++)
        if (pair_inside(i, lane)) mean += v[i];
    mean = CENTRED ? simd_sum(mean) / (float)HEAD_DIM : 0.0f;
    QUANT_UNROLL for (int i = 0; i < lane_numbers(); i++)
        if (pair_inside(i, lane)) square += (v[i] - mean) * (v[i] - mean);
    float scale = rsqrt(simd_sum(square) / (float)HEAD_DIM + a->eps);
    QUANT_UNROLL for (int i = 0; i < lane_numbers(); i++) {
        v[i] = (v[i] - mean) * scale * w[i];
        if (BIASES >> which & 1) v[i] += bias[i];
    }
}

// QK norm and RoPE of one head by one SIMD-group. Lane l gets pairs l, l + 32, ... in v, each of
// them rotated: (x0 * cos - x1 * sin, x0 * sin + x1 * cos); angles[n_rot / 2][2] has cos and sin.
QUANT_INLINE void head_rope(int which, int head, device const float *x, device const float *w,
        device const float *bias, device const float *angles, constant struct attention_args *a,
        uint lane, thread float *v) {
    float ws[HEAD_MAX / SIMD_LANES], biases[HEAD_MAX / SIMD_LANES], turns[HEAD_MAX / SIMD_LANES];
    int own = head * (which ? a->k_step : a->q_step);
    int pairs = PAIRING == ROPE_NONE ? 0 : a->n_rot / 2;
    QUANT_UNROLL for (int i = 0; i < lane_numbers(); i++) {   // what is there before the input
        int p = lane_pair(i, lane), at = own + pair_index(p, i % 2, a->n_rot);
        bool inside = pair_inside(i, lane) && QK_NORMED >> which & 1;
        ws[i] = inside ? w[at] : 0.0f;
        biases[i] = inside && BIASES >> which & 1 ? bias[at] : 0.0f;
        turns[i] = p < pairs ? angles[2 * p + i % 2] : 0.0f;
    }
    input_wait();
    QUANT_UNROLL for (int i = 0; i < lane_numbers(); i++)
        if (pair_inside(i, lane))
            v[i] = x[pair_index(lane_pair(i, lane), i % 2, a->n_rot)];
    if (!QK_LATE) head_norm(which, ws, biases, a, lane, v);
    QUANT_UNROLL for (int i = 0; i < lane_numbers(); i += 2) {
        float x0 = v[i], x1 = v[i + 1], c = turns[i], s = turns[i + 1];
        if (lane_pair(i, lane) >= pairs) continue;
        v[i] = x0 * c - x1 * s;
        v[i + 1] = x0 * s + x1 * c;
    }
    if (QK_LATE) head_norm(which, ws, biases, a, lane, v);
}

// Does a query at pos_q see the key at pos_k (-1: an empty row)? It sees itself, window - 1 before
// it (and after it, unless CAUSAL), and the first `keep`; if SPANS, none before its own span.
static inline bool visible(int pos_k, int pos_q, constant struct attention_args *a) {
    int start = SPANS ? pos_q / a->span * a->span : 0;
    return pos_k >= start && pos_k - pos_q < (CAUSAL ? 1 : a->window) &&
           (pos_q - pos_k < a->window || pos_k < a->keep);
}

// the row for a position: the first `keep` rows are pinned, in the others positions go round
static inline int kv_row(int pos, constant struct attention_args *a) {
    return pos < a->keep ? pos : a->keep + (pos - a->keep) % (a->rows - a->keep);
}

// Values in the cache must be finite, see cache_finite in llm.c. If number i of one is not, it is 0
// there, and number i of its key NaN, as 0 times infinity or NaN is.
static inline half cached_value(float v) {
    float rounded = (float)(half)v;
    return (half)(0.0f * rounded == 0.0f ? rounded : 0.0f);
}
static inline half cached_key(float k, device const float *v, int i) {
    for (; i < VALUE_DIM; i += HEAD_DIM) k += 0.0f * (float)(half)v[i];
    return (half)k;
}

// a factor of the query: see sharpen in llm.c
static inline float temperature(int pos, constant struct attention_args *a) {
    if (a->sharpen_scale == 0.0f) return 1.0f;
    float lengths = floor((float)(pos + a->sharpen_next) / a->sharpen_length);
    return 1.0f + a->sharpen_scale * log(lengths + 1.0f);
}

// the score of q and k from their product, times log2(e), since exp(x) = exp2(x * log2(e)); `far`
// is the distance of their positions, `slope` the head's in ALiBi, times log2(e)
static inline float score_of(float dot, float slope, int far, constant struct attention_args *a) {
    float score = softcap(dot, a->softcap) * (SOFTCAPPED ? LOG2E : 1.0f);
    return ALIBI ? score - slope * (float)far : score;
}

// what queries are multiplied by, so that their products with keys are what score_of takes
static inline float query_scale(constant struct attention_args *a) {
    return a->scale * (SOFTCAPPED ? 1.0f : LOG2E);
}

// The end of attention, from o = sum of exp2(score - m) * value and sum = sum of exp2(score - m):
// o / sum, times the gate's sigmoid. An attention sink is one more score, which has no value.
static inline float attention_value(float o, float m, float sum, device const float *sink,
        device const float *gate, constant struct attention_args *a) {
    if (a->sinks) {
        float top = max(m, *sink * LOG2E), shrink = exp2(m - top);
        o *= shrink;
        sum = sum * shrink + exp2(*sink * LOG2E - top);
    }
    if (GATED) o /= 1.0f + exp(-*gate);
    return sum == 0.0f ? 0.0f : o / sum;                  // 0 if the query sees nothing
}

// A lane's part of an online softmax for one query: its quads of the query and of o; m, the largest
// score so far; and the sum. Lanes that share rows have the same m and sum.
struct softmax_state { float q[4 * QUADS_MAX], o[4 * QUADS_MAX], m, sum; };
static inline int quads(void) { return attention_quads(HEAD_DIM, VALUE_DIM); }   // of a row

// Where the lane's quad e begins in a row of `dim` numbers. Neighbouring lanes have neighbouring
// quads, so that their loads are adjacent. A lane that has no quad e is given the last one.
static inline int lane_quad(int e, int dim, uint lane) {
    return min(4 * ((int)lane % ROW_LANES + e * ROW_LANES), dim - 4);
}
static inline bool lane_has(int e, int dim, uint lane) {
    return 4 * ((int)lane % ROW_LANES + e * ROW_LANES) < dim;
}

// Adds n rows, of which the lane has the quads k[n][quads] and v[n][quads]. A row that is not
// `seen` is ignored. The products of the n rows overlap, and o is rescaled once for all of them.
QUANT_INLINE void softmax_add(int n, thread const half4 *k, thread const half4 *v,
        thread const int *seen, thread const int *far, float slope,
        constant struct attention_args *a, thread struct softmax_state *state) {
    float s[ATTENTION_ROWS], top = state->m;
    QUANT_UNROLL for (int i = 0; i < n; i++) {
        float dot = 0.0f;
        QUANT_UNROLL for (int e = 0; e < 4 * quads(); e++)
            dot += state->q[e] * (float)k[quads() * i + e / 4][e % 4];
        for (int d = ROW_LANES / 2; d > 0; d /= 2) dot += simd_shuffle_xor(dot, d);
        s[i] = seen[i] ? score_of(dot, slope, far[i], a) : UNSEEN;
        top = max(top, s[i]);
    }
    float shrink = exp2(state->m - top);
    state->m = top;
    state->sum *= shrink;
    QUANT_UNROLL for (int e = 0; e < 4 * quads(); e++) state->o[e] *= shrink;
    QUANT_UNROLL for (int i = 0; i < n; i++) {
        float p = seen[i] ? exp2(s[i] - top) : 0.0f;
        state->sum += p;
        QUANT_UNROLL for (int e = 0; e < 4 * quads(); e++)
            state->o[e] += p * (float)v[quads() * i + e / 4][e % 4];
    }
}

// One step of rows of the KV ring, from r0 on. rows_see loads their positions, which tell whether
// any is seen; then rows_load loads all keys and values at once. A row that is not seen may hold
// anything, even NaN, so a seen row is read in its place. Row `into`, being written, is left out.
struct kv_rows {
    int at, row, some;                                    // a lane's position and row; one seen, -1
    int seen[ATTENTION_ROWS], far[ATTENTION_ROWS];
    half4 k[QUADS_MAX * ATTENTION_ROWS], v[QUADS_MAX * ATTENTION_ROWS];
};
QUANT_INLINE bool rows_see(thread struct kv_rows *x, device const int *pos_k, int pos, int into,
        int r0, int used, constant struct attention_args *a, uint lane) {
    int r = r0 + (int)lane % attention_step(ROW_LANES);
    x->at = r < used && r != into ? pos_k[r] : -1;
    x->row = visible(x->at, pos, a) ? r : -1;
    x->some = simd_max(x->row);
    return x->some >= 0;                                  // in all lanes
}
QUANT_INLINE void rows_load(thread struct kv_rows *x, device const half *k, device const half *v,
        int pos, uint lane) {
    QUANT_UNROLL for (int i = 0; i < ATTENTION_ROWS; i++) {
        int of = i * (SIMD_LANES / ROW_LANES) + (int)lane / ROW_LANES;
        int mine = simd_shuffle(x->row, of), where = simd_shuffle(x->at, of);
        int from = mine < 0 ? x->some : mine;
        x->seen[i] = mine >= 0;
        x->far[i] = abs(pos - where);
        QUANT_UNROLL for (int e = 0; e < quads(); e++) {
            device const half *key = k + (ulong)from * HEAD_DIM + lane_quad(e, HEAD_DIM, lane);
            device const half *value = v + (ulong)from * VALUE_STEP + lane_quad(e, VALUE_DIM, lane);
            x->k[quads() * i + e] = *(device const half4 *)key;
            x->v[quads() * i + e] = *(device const half4 *)value;
        }
    }
}

QUANT_INLINE void rows_add(thread const struct kv_rows *rows, thread const float *slopes,
        constant struct attention_args *a, thread struct softmax_state *state) {
    QUANT_UNROLL for (int h = 0; h < QUERY_HEADS; h++)
        softmax_add(ATTENTION_ROWS, rows->k, rows->v, rows->seen, rows->far, slopes[h], a,
                    &state[h]);
}

// adds the newest key and value, which are in their row, or else in k_new and v_new
QUANT_INLINE void attention_newest(threadgroup const float *k_new, device const float *v_new,
        device const half *k, device const half *v, int pos, constant struct attention_args *a,
        uint lane, thread struct softmax_state *state) {
    half4 ks[QUADS_MAX], vs[QUADS_MAX];
    int seen = (int)lane < ROW_LANES && visible(pos, pos, a), far = 0;
    QUANT_UNROLL for (int e = 0; e < 4 * quads(); e++) {
        int i = lane_quad(e / 4, HEAD_DIM, lane) + e % 4;
        int j = lane_quad(e / 4, VALUE_DIM, lane) + e % 4;
        ks[e / 4][e % 4] = FUSED == 1 ? (half)k_new[i] : k[i];
        vs[e / 4][e % 4] = FUSED == 1 ? (half)v_new[j] : v[j];
    }
    QUANT_UNROLL for (int h = 0; h < QUERY_HEADS; h++)
        softmax_add(1, ks, vs, &seen, &far, 0.0f, a, &state[h]);
}

// Number o of a softmax's value over some rows, its largest score m and its sum; adds PARTS_STEP of
// them to `to`. A part without rows has the score UNSEEN and a sum of 0; its o is not read.
struct softmax_part { float o, m, sum; };
QUANT_INLINE void parts_add(thread const struct softmax_part *x, thread struct softmax_part *to) {
    float top = to->m;
    QUANT_UNROLL for (int i = 0; i < PARTS_STEP; i++) top = max(top, x[i].m);
    float shrink = exp2(to->m - top);
    to->o *= shrink;
    to->sum *= shrink;
    to->m = top;
    QUANT_UNROLL for (int i = 0; i < PARTS_STEP; i++) {
        float weight = x[i].sum > 0.0f ? exp2(x[i].m - top) : 0.0f;
        to->o += x[i].sum > 0.0f ? x[i].o * weight : 0.0f;
        to->sum += x[i].sum * weight;
    }
}

// How many slices of the KV ring a query at pos has: as many as if its token ran alone.
static inline int query_slices(int pos, constant struct attention_args *a) {
    int used = min(pos + 1, a->rows);
    return min(div_up(used, attention_slice(HEAD_DIM, VALUE_DIM)), a->slices);
}

// Merges, through threadgroup memory, the parts of lanes and SIMD-groups that had different rows.
// The results of heads from `head` on go to out[n][n_head][VALUE_DIM]; or, if a query has several
// slices, o, m and sum of each go to out[n][n_head][a->slices][VALUE_DIM + 2].
QUANT_INLINE void attention_output(thread struct softmax_state *state, threadgroup float *shared,
        device const float *q, device const float *sinks, device float *out, int head, int heads,
        int slice, int slices, uint nsg, uint sg, uint lane, constant struct attention_args *a) {
    int all = nsg * (SIMD_LANES / ROW_LANES) * QUERY_HEADS;
    int part = (sg * SIMD_LANES + lane) / ROW_LANES * QUERY_HEADS;
    int size = slices > 1 ? a->slices * (VALUE_DIM + 2) : VALUE_DIM;
    threadgroup float *os = shared, *ms = os + all * VALUE_DIM, *sums = ms + all;
    QUANT_UNROLL for (int h = 0; h < QUERY_HEADS; h++) {
        threadgroup float *to = os + (part + h) * VALUE_DIM;
        QUANT_UNROLL for (int e = 0; e < 4 * quads(); e++)
            if (lane_has(e / 4, VALUE_DIM, lane))
                to[lane_quad(e / 4, VALUE_DIM, lane) + e % 4] = state[h].o[e];
        if (lane % ROW_LANES == 0) ms[part + h] = state[h].m;
        if (lane % ROW_LANES == 0) sums[part + h] = state[h].sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // all parts are there
    for (int i = sg * SIMD_LANES + lane; i < heads * VALUE_DIM; i += nsg * SIMD_LANES) {
        int h = i / VALUE_DIM, e = i % VALUE_DIM;
        struct softmax_part x[PARTS_STEP], whole = {0.0f, UNSEEN, 0.0f};
        for (int j0 = h; j0 < all; j0 += PARTS_STEP * QUERY_HEADS) {   // a step's loads overlap
            QUANT_UNROLL for (int k = 0; k < PARTS_STEP; k++) {
                int j = j0 + k * QUERY_HEADS, inside = min(j, all - QUERY_HEADS + h);
                x[k].o = os[inside * VALUE_DIM + e];
                x[k].m = j < all ? ms[inside] : UNSEEN;
                x[k].sum = j < all ? sums[inside] : 0.0f;
            }
            parts_add(x, &whole);
        }
        device float *to = out + (ulong)(head + h) * size + slice * (VALUE_DIM + 2);
        device const float *gate = q + h * query_step() + HEAD_DIM + e;
        float o = whole.o, m = whole.m, sum = whole.sum;
        to[e] = slices > 1 ? o : attention_value(o, m, sum, sinks + h, gate, a);
        if (slices > 1 && e < 2) to[VALUE_DIM + e] = e == 0 ? m : sum;
    }
}

// What a lane begins with: the slopes of heads from `head` on (those past `last` repeat it), and
// its quads of their queries times scale, which are staged in qs if FUSED is 1.
QUANT_INLINE void attention_begin(device const float *q, threadgroup const float *qs,
        device const float *slopes, int head, int last, float scale, uint lane,
        thread float *slope, thread struct softmax_state *state) {
    QUANT_UNROLL for (int h = 0; h < QUERY_HEADS; h++) {
        int from = min(head + h, last);
        slope[h] = ALIBI ? slopes[from] * LOG2E : 0.0f;
        QUANT_UNROLL for (int e = 0; e < 4 * quads(); e++) {
            int i = lane_quad(e / 4, HEAD_DIM, lane) + e % 4;
            float x = FUSED == 1 ? qs[h * HEAD_DIM + i] : q[from * query_step() + i];
            state[h].q[e] = lane_has(e / 4, HEAD_DIM, lane) ? x * scale : 0.0f;
            state[h].o[e] = 0.0f;
        }
        state[h].m = UNSEEN;
        state[h].sum = 0.0f;
    }
}

// Number i of a token's out[n_head][VALUE_DIM], from `slices` parts of [n_head][a->slices][..]
static inline float merged_value(int i, int slices, device const float *q,
        device const float *sinks, device const float *parts, constant struct attention_args *a) {
    int head = i / VALUE_DIM, e = i % VALUE_DIM;
    struct softmax_part x[PARTS_STEP], whole = {0.0f, UNSEEN, 0.0f};
    parts += (ulong)head * a->slices * (VALUE_DIM + 2);
    for (int s = 0; s < slices; s += PARTS_STEP) {        // a step's loads overlap
        QUANT_UNROLL for (int k = 0; k < PARTS_STEP; k++) {
            bool is = s + k < slices;
            device const float *part = parts + min(s + k, slices - 1) * (VALUE_DIM + 2);
            x[k].o = part[e];
            x[k].m = is ? part[VALUE_DIM] : UNSEEN;
            x[k].sum = is ? part[VALUE_DIM + 1] : 0.0f;
        }
        parts_add(x, &whole);
    }
    float o = whole.o, m = whole.m, sum = whole.sum;
    return attention_value(o, m, sum, sinks + head, q + head * query_step() + HEAD_DIM + e, a);
}

// Is row r of the KV ring one of the a->n that a pass writes whose first position is `start`?
static inline bool row_is_new(int r, int start, constant struct attention_args *a) {
    int after = r - kv_row(start, a);
    if (after < 0 && r >= a->keep) after += a->rows - a->keep;   // positions go round
    return after >= 0 && after < a->n;
}

// Of a few tokens: out[n][n_head][VALUE_DIM] = sum over visible keys of softmax(scale * q . k) * v.
// Who has what:
//   a threadgroup      a token, up to QUERY_HEADS query heads of a KV head, and a slice of the KV
//                      ring (a query has query_slices; threadgroups of slices past these are idle)
//   SIMD-group sg      step slice * nsg + sg of the KV ring's rows, then every (slices * nsg)-th
//   ROW_LANES lanes    ATTENTION_ROWS rows of each step
//   a lane             every ROW_LANES-th quad of these rows, of the queries and of their sums
//     for example      with HEAD_DIM 128, 16 lanes share a row, so a step has 8 rows; of two slices
//                      SIMD-group 3 of the second has rows 88..95, 216..223 and so on
//   the last slice     if FUSED the newest key and value, too: its last SIMD-group
//   all threads        at the end, the parts of lanes and SIMD-groups, see attention_output; in the
//                      threadgroup of these heads that ends last, if MERGES, also those of slices
// Where the newest key and value come from:
//   FUSED   tokens    and then
//   1       one       QK norm, RoPE and the write to the cache happen here. Each threadgroup of the
//                     last slice computes the key: another one may still be writing it
//   2       a few     rope has written them; they are added first, as if the token ran alone
//   0       a chunk   rope has written them, or latent_row, or another layer: rows like all others
// If MERGES, rows that earlier passes wrote are loaded before the input is there. Bound by memory:
// 4 bytes of K and V serve 4 FLOP of each query head. More than ATTENTION_HEADS would take so many
// registers that too few SIMD-groups could run at once to hide how long a load takes.
kernel void attention(device const float *v_new, device const float *angles,   // [n_rot / 2][2]
        device const float *q_norm, device const float *k_norm,                   // buffers 2, 3
        device const float *q_bias, device const float *k_bias, device const float *k_new,
        device const float *q, device half *k, device half *v, device int *pos_k, // 7 to 10
        device int *now, device const float *slopes, device const float *sinks,
        device float *out, device float *parts, constant struct attention_args *a, PLACE) {
    int group = a->n_head / a->n_kv, per_kv = div_up(group, QUERY_HEADS);   // heads, threadgroups
    int slice = tg % a->slices, unit = tg / a->slices;
    int t = unit / (per_kv * a->n_kv), kv = unit / per_kv % a->n_kv;
    int head = kv * group + unit % per_kv * QUERY_HEADS, last = (kv + 1) * group - 1;
    int start = now[NOW_POS], pos = start + t, used = min(start + a->n, a->rows);
    int slices = query_slices(pos, a);
    if (slice >= slices) return;                          // the whole threadgroup
    int into = FUSED ? kv_row(pos, a) : -1, rows = attention_step(ROW_LANES);
    threadgroup float *qs = shared, *ks = qs + QUERY_HEADS * HEAD_DIM;
    struct softmax_state state[ATTENTION_HEADS];
    struct kv_rows loaded;
    float slope[ATTENTION_HEADS];

    // queries and the newest key pass through threadgroup memory, because RoPE's pairs cross lanes
    q += (ulong)t * a->n_head * query_step();
    k += (ulong)kv * a->rows * HEAD_DIM;
    v += (ulong)kv * a->rows * VALUE_STEP;
    k_new += kv * HEAD_DIM;
    v_new += kv * VALUE_DIM;
    int r = (slice * nsg + sg) * rows, next = slices * nsg * rows;
    bool newest = FUSED && slice == slices - 1;           // has the new key, besides other rows
    // rows of earlier passes are there; those that rope writes in this one come with the input
    int waits = FUSED != 1 && row_is_new(r + (int)lane % rows, start, a);
    if (!MERGES || simd_max(waits)) { input_wait(); }
    bool some = MERGES && rows_see(&loaded, pos_k, pos, into, r, used, a, lane);
    if (some) rows_load(&loaded, k, v, pos, lane);
    if (FUSED != 1) { input_wait(); }
    for (int u = sg; FUSED == 1 && u < QUERY_HEADS + newest; u += nsg) {
        bool key = u == QUERY_HEADS;                      // ks comes after qs
        int h = key ? kv : min(head + u, last);
        threadgroup float *to = qs + u * HEAD_DIM;
        device const float *from = key ? k_new : q + h * query_step();
        device const float *norm = key ? k_norm : q_norm;
        device const float *bias = key ? k_bias : q_bias;
        float y[HEAD_MAX / SIMD_LANES], factor = key ? 1.0f : temperature(pos, a);
        head_rope(key, h, from, norm, bias, angles, a, lane, y);
        QUANT_UNROLL for (int i = 0; i < lane_numbers(); i++) {
            int at = pair_index(lane_pair(i, lane), i % 2, a->n_rot);
            if (pair_inside(i, lane)) to[at] = y[i] * factor;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);      // staged by some, read by all
    attention_begin(q, qs, slopes, head, last, query_scale(a), lane, slope, state);
    int all = nsg * SIMD_LANES;
    bool writes = FUSED == 1 && newest && unit % per_kv == 0;
    for (int i = tid; writes && i < HEAD_DIM; i += all)
        k[(ulong)into * HEAD_DIM + i] = cached_key(ks[i], v_new, i);
    for (int i = tid; writes && i < VALUE_DIM; i += all)
        v[(ulong)into * VALUE_DIM + i] = cached_value(v_new[i]);
    if (writes && kv == 0 && tid == 0 && now[NOW_PLACED]) pos_k[into] = pos;   // not read here

    if (newest && sg == nsg - 1)
        attention_newest(ks, v_new, k + (ulong)into * HEAD_DIM, v + (ulong)into * VALUE_DIM, pos, a,
                         lane, state);
    for (bool early = MERGES; r < used; r += next, early = false) {
        if (!early) some = rows_see(&loaded, pos_k, pos, into, r, used, a, lane);
        if (!some) continue;
        if (!early) rows_load(&loaded, k, v, pos, lane);
        rows_add(&loaded, slope, a, state);
    }
    int heads = min(QUERY_HEADS, last + 1 - head);
    attention_output(state, ks + HEAD_DIM, q + head * query_step(), sinks + head,
                     slices > 1 ? parts : out, t * a->n_head + head, heads, slice, slices, nsg, sg,
                     lane, a);
    if (!MERGES || slices == 1) return;
    threadgroup int *before = (threadgroup int *)shared;
    threadgroup_barrier(mem_flags::mem_threadgroup);      // all has been written, `shared` is read
    if (tid == 0) *before = count_up(&now[NOW_COUNTS + unit]);
    threadgroup_barrier(mem_flags::mem_threadgroup);      // the count is there
    if (*before + 1 < slices) return;                     // the whole threadgroup
    if (tid == 0) now[NOW_COUNTS + unit] = 0;               // for the next layer
    out += (ulong)t * a->n_head * VALUE_DIM;
    parts += (ulong)t * a->n_head * a->slices * (VALUE_DIM + 2);
    for (int i = head * VALUE_DIM + tid; i < (head + heads) * VALUE_DIM; i += all)
        out[i] = merged_value(i, slices, q, sinks, parts, a);
}

// out[n][n_head][VALUE_DIM] from the parts of a long KV ring. Grid: a thread for each number.
kernel void attention_merge(device const float *q, device const int *now,
        device const float *sinks, device const float *parts, device float *out,
        constant struct attention_args *a, PLACE) {
    int i = tg * MERGE_THREADS + tid, each = a->n_head * VALUE_DIM, t = i / each;
    int slices = query_slices(now[NOW_POS] + t, a);
    if (t >= a->n || slices == 1) return;                 // of one slice: it is in out
    q += (ulong)t * a->n_head * query_step();
    parts += (ulong)t * a->n_head * a->slices * (VALUE_DIM + 2);
    out[i] = merged_value(i % each, slices, q, sinks, parts, a);
}

// Writes rows[n][HEAD_DIM], a chunk's latent rows, to the cache: the first VALUE_DIM numbers
// normed, the other n_rot rotated. p[n][n_head][q_step] are queries before their product with k_b:
// the last n_rot numbers of each head are rotated, and go to the end of its q[n][n_head][HEAD_DIM].
// All of a query, p too, is multiplied by its temperature. Grid: a SIMD-group for each row or head.
kernel void latent_row(device float *p, device float *q, device const float *rows, device half *k,
        device int *pos_k, device const float *weights, device const float *angles,
        device const int *now, constant struct attention_args *a, PLACE) {
    int unit = tg * nsg + sg, t = unit / (a->n_head + 1), h = unit % (a->n_head + 1);
    int pos = now[NOW_POS] + t, first = a->q_step - a->n_rot;
    if (t >= a->n) return;                                // a whole SIMD-group: no barrier follows
    bool query = h < a->n_head;
    float mean, scale = query ? temperature(pos, a) : 1.0f;
    ulong head = (ulong)t * a->n_head + h;
    p += query ? head * a->q_step : 0;
    q += query ? head * HEAD_DIM + VALUE_DIM : 0;
    rows += (ulong)t * HEAD_DIM;
    angles += (ulong)t * a->n_rot;
    k += (ulong)kv_row(pos, a) * HEAD_DIM;
    device const float *x = query ? p + first : rows + VALUE_DIM;
    for (int j = lane; j < a->n_rot / 2; j += SIMD_LANES) {
        int i0 = pair_index(j, 0, a->n_rot), i1 = pair_index(j, 1, a->n_rot);
        float c = PAIRING == ROPE_NONE ? scale : angles[2 * j] * scale;
        float s = PAIRING == ROPE_NONE ? 0.0f : angles[2 * j + 1] * scale;
        float y0 = x[i0] * c - x[i1] * s, y1 = x[i0] * s + x[i1] * c;
        if (query) q[i0] = y0, q[i1] = y1;
        else k[VALUE_DIM + i0] = (half)y0, k[VALUE_DIM + i1] = (half)y1;
    }
    for (int i = lane; query && i < first; i += SIMD_LANES) p[i] *= scale;
    if (query) return;
    scale = norm_scale(rows, VALUE_DIM, a->eps, 0, 1, 0, lane, &mean);
    float damage = 0.0f;                                  // NaN if a value is not finite
    for (int i = lane; i < VALUE_DIM; i += SIMD_LANES) {
        float v = rows[i] * scale * weights[i];
        damage += 0.0f * (float)(half)v;
        k[i] = cached_value(v);
    }
    damage = simd_sum(damage);
    if (lane == 0 && damage != 0.0f) k[VALUE_DIM] = (half)damage;   // a number of the key alone
    if (lane == 0 && now[NOW_PLACED]) pos_k[kv_row(pos, a)] = pos;
}

// ---- 5. ffn_block ----
//
// The rest of a layer after attention in one dispatch, for one token. It is here to be compared
// with the three dispatches of section 4, which are faster: --gpu block asks for it.

// x[rows] += W v[cols], where W is matrix `which`, by all SIMD-groups of a threadgroup
static inline void block_add(int format, int which, device const uchar *w, int cols,
        device const float *v, device float *x, constant struct product_args *a, uint nsg, uint sg,
        uint lane) {
    struct row_input in = {v, 0, 0, cols, lane, 0, 0, 0};
    struct bound_matrix m = {w, 0, 0};
    int R = unit_rows(format);
    for (int row = sg * R; row < a->w[which].rows; row += nsg * R) {
        float sum[FEW * GEMV_ROWS];
        gemv_product(format, format, R, which, row / R, 0, &m, &m, &in, a, sum);
        for (int r = 0; r < R; r++)
            if (lane == 0 && row + r < a->w[which].rows) x[row + r] += sum[r];
    }
}

// By one threadgroup of BLOCK_THREADS threads:
//   x += Wo att,   h = activation(gate n) * (up n) where n = rms_norm(x),   x += down h
// Why it is slower: a threadgroup runs on one core, and one of an M1's eight may load some 8 of its
// 68 GB/s. That takes 1.5 ms for the 12 MB of these weights in a layer of Qwen3-0.6B at 8 bits; the
// three dispatches of decode use all cores: 0.2 ms. One dispatch for a whole token is no gain, as a
// barrier over the grid of an H100 takes 1.5 to 2.2 us, in which memory idles: it made 888 tokens
// a second, and a graph of launches 1,045 (8B: 231, 296).
// x and h are in device memory, but only this threadgroup writes them, so barriers are enough.
[[max_total_threads_per_threadgroup(BLOCK_THREADS)]]
kernel void ffn_block(device const uchar *wo, device const uchar *gate, device const uchar *up,
        device const uchar *down, device const float *att, device const float *weights,
        device float *x, device float *h, constant struct product_args *a, PLACE) {
    int dim = a->w[0].rows, ff = a->w[1].rows;
    struct row_input in = {x, weights, NORMED, dim, lane, 0, 0, 0};
    struct bound_matrix m1 = {gate, 0, 0}, m2 = {up, 0, 0};
    block_add(FORMAT_0, 0, wo, a->cols, att, x, a, nsg, sg, lane);
    threadgroup_barrier(mem_flags::mem_device);           // x is whole
    for (int u = sg; u * unit_rows(FORMAT_1) < ff; u += nsg)
        gemv_unit(FORMAT_1, FORMAT_2, 1, u, 0, &m1, &m2, &in, x, h, a);
    threadgroup_barrier(mem_flags::mem_device);           // h is whole, and x has been read
    block_add(FORMAT_3, 3, down, ff, h, x, a, nsg, sg, lane);
}

// ---- 6. prefill ----
//
// A chunk is bound by arithmetic: each weight serves all of its tokens. Tiles of both operands are
// staged in threadgroup memory as halves, and SIMD-groups multiply them as 16 x 16 matrices, whose
// sums are float. All weights, f32 and bf16 ones too, are rounded to half, with its 11 bits, and so
// are activations, by `halve`.
//
// A tile has TILE_TOKENS x TILE_ROWS outputs, and two threads for each row of W. In a step of
// GEMM_K columns each thread decodes one of its row's two groups of 32 weights. With two BUFFERS a
// step's operands are on their way while those of the step before are multiplied: activations, and
// f16 weights, are copied in the background; weights of a block format are unpacked to registers
// before the product, made halves and stored after it. (Weights of f32, bf16 and ragged rows are
// stored before it.) Apple's threadgroups lack the memory for two: some wait while others compute.
//
// An example: 40 tokens, 96 rows, 64 columns. The host takes tiles of 64 tokens x 64 rows. They are
// two threadgroups of 128 threads: one for rows 0..63, one for rows 64..95. A step is 64 columns,
// so there is one, in which thread 5 decodes columns 32..63 of its tile's row 2. SIMD-group 3
// multiplies 2 x 2 matrices, for tokens and rows 32..63. Past the last token and row a tile repeats
// these, but nobody writes the sums: tokens 40..63 and, in the second tile, rows 32..63.

// What a threadgroup computes: rows from `row` on of matrix m, with bytes w. from[TILE_TOKENS], in
// threadgroup memory, says which row of x each token of the tile has.
struct gemm_tile {
    device const half *x;
    threadgroup const int *from;
    device const uchar *w;
    constant struct kernel_matrix *m;
    int cols, row;
    uint tid, sg;
};

// A tile's sums are matrices of 16 x 16, tokens x rows. What SIMD-group sg has of a tile:
//   TILE_TOKENS   matrices               tokens               rows
//   32 or more    TILE_TOKENS / 32 x 2   half number sg % 2   32 from sg / 2 * 32 on
//   16            1 x 1                  all                  16 from sg * 16 on
static inline int token_parts(void) { return TILE_TOKENS > 16 ? 2 : 1; }
static inline int row_matrices(void) { return TILE_TOKENS > 16 ? 2 : 1; }
static inline int token_matrices(void) { return TILE_TOKENS / (16 * token_parts()); }
static inline int sg_token(uint sg) { return (int)sg % token_parts() * 16 * token_matrices(); }
static inline int sg_row(uint sg) { return (int)sg / token_parts() * 16 * row_matrices(); }

// weights of row number r of the tile; past the last row, that one's
static inline device const uchar *tile_weights(thread const struct gemm_tile *t, int r) {
    return t->w + (ulong)min(t->row + r, t->m->rows - 1) * t->m->row_bytes;
}

// xs[TILE_TOKENS][GEMM_STRIDE] = a step's columns of x; after it in memory, if W's format is float,
// ws[TILE_ROWS][GEMM_STRIDE] = those of W. Neighbouring threads take neighbours, eight each.
static inline void stage_rows(int format, thread const struct gemm_tile *t, int k0,
        threadgroup half *xs) {
    threadgroup half *ws = xs + TILE_TOKENS * GEMM_STRIDE;
    int padded = row_halves(t->cols);
    QUANT_UNROLL for (int j = 0; j < div_up(TILE_TOKENS * 8, 2 * TILE_ROWS); j++) {
        int i = (int)t->tid + j * 2 * TILE_ROWS, token = i / 8, k = i % 8 * 8;
        if (token < TILE_TOKENS && k0 < padded)
            copy_16(xs + token * GEMM_STRIDE + k, t->x + (ulong)t->from[token] * padded + k0 + k);
    }
    QUANT_UNROLL for (int j = 0; j < 4 && format_float(format); j++) {
        int i = (int)t->tid + j * 2 * TILE_ROWS, r = i / 8, k = k0 + i % 8 * 8;
        device const uchar *from = tile_weights(t, r);
        threadgroup half *to = ws + r * GEMM_STRIDE + i % 8 * 8;
        if (format == FORMAT_F16 && !RAGGED && k < t->cols) {
            copy_16(to, (device const half *)from + k);
            continue;
        }
        float v[8];
        QUANT_UNROLL for (int e = 0; e < 8; e += 4) {
            float4 four = four_weights(format, from, k + e, t->cols);
            for (int n = 0; n < 4; n++) v[e + n] = four[n];
        }
        store_halves(to, v);
    }
}

// The thread's group of a step, if W has a block format; past the last column, zeros
struct weight_group { uint q[8]; float d[2], m[2]; };
static inline void fetch_group(int format, thread const struct gemm_tile *t, int k0,
        thread struct weight_group *g) {
    if (format_float(format)) return;
    int at = k0 / 32 + (int)t->tid % 2, last = t->cols / 32 - 1;
    group_decode(format, tile_weights(t, t->tid / 2), min(at, last), g->q, g->d, g->m);
    for (int j = 0; j < 2 && at > last; j++) g->d[j] = g->m[j] = 0.0f;
}

// Stores the weights of this group as halves, in the thread's row of ws and its half of the step
static inline void stage_group(int format, thread const struct weight_group *g, uint tid,
        threadgroup half *ws) {
    if (format_float(format)) return;
    QUANT_UNROLL for (int j = 0; j < 4; j++) {
        float v[8];
        quant_as_floats(g->q[2 * j], format_bias(format), v);
        quant_as_floats(g->q[2 * j + 1], format_bias(format), v + 4);
        QUANT_UNROLL for (int e = 0; e < 8; e++) v[e] = g->d[j / 2] * v[e] + g->m[j / 2];
        store_halves(ws + tid / 2 * GEMM_STRIDE + tid % 2 * 32 + 8 * j, v);
    }
}

// c += xs times ws transposed, for the SIMD-group's matrices
QUANT_INLINE void tile_multiply(threadgroup const half *xs, threadgroup const half *ws, uint sg,
        thread float16x16 *c) {
    half16x16 x, w[2];
    xs += sg_token(sg) * GEMM_STRIDE;
    ws += sg_row(sg) * GEMM_STRIDE;
    QUANT_UNROLL for (int k = 0; k < GEMM_K; k += 16) {
        QUANT_UNROLL for (int j = 0; j < row_matrices(); j++)
            load_right(&w[j], ws + 16 * j * GEMM_STRIDE + k, GEMM_STRIDE, true);
        QUANT_UNROLL for (int i = 0; i < token_matrices(); i++) {
            load_left(&x, xs + 16 * i * GEMM_STRIDE + k, GEMM_STRIDE);
            QUANT_UNROLL for (int j = 0; j < row_matrices(); j++)
                multiply16(&c[row_matrices() * i + j], &x, &w[j]);
        }
    }
}

// c = the SIMD-group's part of the tile
static inline void tile_product(int format, thread const struct gemm_tile *t,
        threadgroup half *buffers, thread float16x16 *c) {
    const int ws = TILE_TOKENS * GEMM_STRIDE, size = ws + TILE_ROWS * GEMM_STRIDE;   // W after x
    struct weight_group g;
    int at = 0, next = BUFFERS > 1 ? size : 0;
    stage_rows(format, t, 0, buffers);
    fetch_group(format, t, 0, &g);
    stage_group(format, &g, t->tid, buffers + ws);
    for (int k0 = 0; k0 < t->cols; k0 += GEMM_K) {
        copies_wait();
        threadgroup_barrier(mem_flags::mem_threadgroup);      // staged; a second buffer is free
        if (BUFFERS > 1) stage_rows(format, t, k0 + GEMM_K, buffers + next);
        fetch_group(format, t, k0 + GEMM_K, &g);
        tile_multiply(buffers + at, buffers + at + ws, t->sg, c);
        if (BUFFERS == 1) threadgroup_barrier(mem_flags::mem_threadgroup);     // read no more
        if (BUFFERS == 1) stage_rows(format, t, k0 + GEMM_K, buffers);
        stage_group(format, &g, t->tid, buffers + next + ws);
        at = next;
        next = BUFFERS > 1 ? size - next : 0;
    }
    copies_wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);          // nothing is read any more
}

// y0[tokens][rows] = x[tokens][cols] times W0[rows][cols] transposed, with a bias and the epilogue,
// which may read other[tokens][rows]. x and powers are halve's. y1 and y2 are made of W1 and W2 if
// there are several matrices for x (Q, K and V). Grid: tiles; those of the same rows are
// neighbours, so that weights come from memory about once per chunk. A step of 128 x 128 is
// 2 * 128 * 128 * 64 FLOP on 16 KB of x and 4.5 (q4_0) to 16 KB (f16) of W, some 80 FLOP a byte.
// EXPERTS: choices take the place of tokens. Rows of y are choices in the order of sort_choices,
// whose expert_tile has the expert, the first and the end of each tile's choices. EXPERTS_GATHER:
// a choice has its token's row of x; EXPERTS_SORTED: each has its own, in the order of y.
// EXPERTS_HEADS: each of the a->each heads of a token has a matrix, a row of x and one of y.
kernel void gemm(device const uchar *w0, device const uchar *w1, device const uchar *w2,
        device const float *bias0, device const float *bias1, device const float *bias2,
        device const half *x, device const float *powers,                         // buffers 6, 7
        device float *y0, device float *y1, device float *y2,                     // 8 to 10
        device const float *other, device const int *order,                       // 11, 12
        device const float *scales, device const int *expert_tile,                // [tiles][3]
        constant struct product_args *a, PLACE) {
    threadgroup int *from = (threadgroup int *)shared;
    threadgroup half *buffers = (threadgroup half *)(shared + TILE_TOKENS);
    int tiles = a->tiles, tile = tg % tiles, token = tile * TILE_TOKENS, end = a->tokens;
    int n0 = div_up(a->w[0].rows, TILE_ROWS), n1 = n0 + div_up(a->w[1].rows, TILE_ROWS);
    int row_tile = tg / tiles, expert = 0;                    // `tile` is one of tokens
    if (EXPERTS == EXPERTS_HEADS) expert = row_tile / n0, row_tile %= n0;
    int which = matrix_of(row_tile, n0, n1), rows = a->w[which].rows;
    if (EXPERTS == EXPERTS_GATHER || EXPERTS == EXPERTS_SORTED) {
        expert = expert_tile[3 * tile];
        token = expert_tile[3 * tile + 1];
        end = expert_tile[3 * tile + 2];
        if (expert < 0) return;                               // all threads: no barrier was there
    }
    w0 += (ulong)expert * a->w[0].step;                       // expert is 0 if W is one matrix
    bias0 += expert * a->w[0].bias_step;
    for (int i = tid; i < TILE_TOKENS; i += 2 * TILE_ROWS) {
        int t = min(token + i, end - 1);
        if (EXPERTS == EXPERTS_HEADS) t = t * a->each + expert;
        from[i] = EXPERTS == EXPERTS_GATHER ? order[t] / a->each : t;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);          // `from` is there
    device const uchar *w = OF_THREE(which, w0, w1, w2) + a->w[which].start;
    int row = (row_tile - OF_THREE(which, 0, n0, n1)) * TILE_ROWS;
    struct gemm_tile t = {x, from, w, &a->w[which], a->cols, row, tid, sg};
    float16x16 c[8];
    QUANT_UNROLL for (int i = 0; i < token_matrices() * row_matrices(); i++) zero16(&c[i]);
    // matrices of one format share their code
    if (which == 1 && FORMAT_1 != FORMAT_0) tile_product(FORMAT_1, &t, buffers, c);
    else if (which == 2 && FORMAT_2 != FORMAT_0) tile_product(FORMAT_2, &t, buffers, c);
    else tile_product(FORMAT_0, &t, buffers, c);
    // sums pass through the SIMD-group's own memory: so neighbouring lanes write neighbouring rows
    device const float *bias = OF_THREE(which, bias0, bias1, bias2);
    device float *y = OF_THREE(which, y0, y1, y2);
    threadgroup float *patch = (threadgroup float *)buffers + sg * GEMM_PATCH;
    float scale = a->w[which].scale * (SCALES & 1 ? scales[expert] : 1.0f);
    int wide = 16 * row_matrices(), r = row + sg_row(sg) + (int)lane % wide;
    QUANT_UNROLL for (int i = 0; i < token_matrices(); i++) {
        QUANT_UNROLL for (int j = 0; j < row_matrices(); j++)
            store16(&c[row_matrices() * i + j], patch + 16 * j, PATCH_STRIDE);
        simdgroup_barrier(mem_flags::mem_threadgroup);        // the patch is there
        for (int k = (int)lane / wide; k < 16; k += SIMD_LANES / wide) {
            int at = sg_token(sg) + 16 * i + k;
            if (token + at >= end || r >= rows) continue;
            ulong to = (ulong)(EXPERTS == EXPERTS_HEADS ? from[at] : token + at) *
                       a->w[which].out_step + r;
            float v = patch[k * PATCH_STRIDE + (int)lane % wide] * (scale * powers[from[at]]);
            if (BIASES >> which & 1) v += bias[r];
            finish(&y[to], v * a->factor, &a->end, has_other() ? other[to] : 0.0f);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);        // it is read no more
    }
}

// QK norm, RoPE and the write to the cache, which attention does by itself if FUSED is 1:
// q[n][n_head][query_step] in place, k_new[n][n_kv][HEAD_DIM] and v_new[n][n_kv][VALUE_DIM] as half
// to their rows of the KV ring; angles[n][n_rot / 2][2]. Grid: a SIMD-group a head, q, then k, v.
kernel void rope(device const float *v_new, device const float *angles,
        device const float *q_norm, device const float *k_norm, device const float *q_bias,
        device const float *k_bias, device const float *k_new, device float *q, device half *k,
        device half *v, device int *pos_k, device const int *now,
        constant struct attention_args *a, PLACE) {
    int heads = a->n_head + 2 * a->n_kv, unit = tg * nsg + sg, t = unit / heads, h = unit % heads;
    int pos = now[NOW_POS] + t;
    if (t >= a->n) return;                                // a whole SIMD-group: no barrier follows
    bool query = h < a->n_head, value = h >= a->n_head + a->n_kv;
    int kv = query ? 0 : (h - a->n_head) % a->n_kv;
    ulong row = (ulong)kv * a->rows + kv_row(pos, a);
    v_new += ((ulong)t * a->n_kv + kv) * VALUE_DIM;
    for (int i = lane; value && i < VALUE_DIM; i += SIMD_LANES)
        v[row * VALUE_DIM + i] = cached_value(v_new[i]);
    if (value) return;
    if (h == a->n_head && lane == 0 && now[NOW_PLACED]) pos_k[kv_row(pos, a)] = pos;
    float y[HEAD_MAX / SIMD_LANES], scale = query ? temperature(pos, a) : 1.0f;
    q += ((ulong)t * a->n_head + (query ? h : 0)) * query_step();
    k_new += ((ulong)t * a->n_kv + kv) * HEAD_DIM;
    angles += (ulong)t * a->n_rot;
    if (query) head_rope(0, h, q, q_norm, q_bias, angles, a, lane, y);
    else head_rope(1, kv, k_new, k_norm, k_bias, angles, a, lane, y);
    QUANT_UNROLL for (int i = 0; i < lane_numbers(); i++) {
        int at = pair_index(lane_pair(i, lane), i % 2, a->n_rot);
        if (!pair_inside(i, lane)) continue;
        if (query) q[at] = y[i] * scale;
        else k[row * HEAD_DIM + at] = cached_key(y[i], v_new, at);
    }
}

// The first tile after that at r0 in which some query sees a key. *key_pos becomes the position in
// its row number `lane`, *ahead that in the tile after it, which is loaded before it is needed.
static inline int flash_next(device const int *pos_k, int r0, int used, int first, int last,
        uint lane, constant struct attention_args *a, thread int *key_pos, thread int *ahead) {
    bool seen = false;
    while (r0 < used && !seen) {
        r0 += FLASH_KEYS;
        int r = r0 + FLASH_KEYS + (int)lane, pos = *ahead;
        *key_pos = pos;
        *ahead = r < used ? pos_k[r] : -1;
        seen = visible(pos, min(max(first, pos), last), a);   // from the query nearest to it
        seen = simd_max((int)seen) > 0;                   // the same for all SIMD-groups
    }
    return r0;
}

// Does a tile of keys hold the values, too? In latent attention a value is the start of its key.
static inline bool values_in_keys(void) { return VALUE_STEP != VALUE_DIM; }

// flash_split of this variant; columns that a SIMD-group has of a key, a value; halves of a row
static inline int flash_ways(void) { return flash_split(HEAD_DIM, VALUE_DIM, BUFFERS); }
static inline int key_cols(void) { return flash_cols(HEAD_DIM, flash_ways()) / flash_ways(); }
static inline int value_cols(void) { return flash_cols(VALUE_DIM, flash_ways()) / flash_ways(); }
static inline int key_stride(void) { return flash_row(HEAD_DIM, flash_ways()); }
static inline int value_stride(void) {
    return values_in_keys() ? key_stride() : flash_row(VALUE_DIM, flash_ways());
}

// tile[FLASH_KEYS][flash_row] = rows of the KV ring from r0 on, copied in the background. Empty
// rows, which may hold NaN (and 0 * NaN is NaN), become zeros, and so do columns past the head's.
static inline void flash_copy(device const half *from, int dim, int r0, int key_pos, uint tid,
        threadgroup half *tile) {
    const int across = flash_cols(dim, flash_ways()) / 8;
    const int count = div_up(across * FLASH_KEYS, FLASH_THREADS);
    QUANT_UNROLL for (int j = 0; j < count; j++) {
        int i = (int)tid + j * FLASH_THREADS, e = i % across * 8;
        int r = min(i / across, FLASH_KEYS - 1);
        bool empty = simd_shuffle(key_pos, r) < 0 || e >= dim;
        threadgroup half *to = tile + r * flash_row(dim, flash_ways()) + e;
        device const half *at = from + (ulong)(r0 + r) * dim + e;
        if (i >= across * FLASH_KEYS) continue;
        if (!empty && dim % 8 == 0) {
            copy_16(to, at);
            continue;
        }
        for (int k = 0; k < 8; k += 4) {
            half4 v = {(half)0.0f, (half)0.0f, (half)0.0f, (half)0.0f};
            if (!empty && e + k < dim) v = *(device const half4 *)(at + k);
            *(threadgroup half4 *)(to + k) = v;
        }
    }
}

// waits for the threads that have parts of the same queries
static inline void flash_barrier(void) {
    if (flash_ways() > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    else simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Online softmax of 16 queries' scores, the sum of flash_ways() parts[16][FLASH_STRIDE]: two lanes
// share a query, with 16 keys each. Probabilities[16][FLASH_HALVES] overwrite the SIMD-group's own
// scores. Half is enough, as none is above 1. `all`: each query sees each key. Returns the factor
// by which earlier sums shrink, and leaves it in diagonals[2][8][8] for scale16.
static inline float flash_softmax(threadgroup const float *parts, threadgroup float *scores,
        int key_pos, bool all, int pos, float slope, uint lane, constant struct attention_args *a,
        thread float *m, thread float *sum) {
    int row = lane / 2, first = lane % 2 * 16;
    threadgroup float *diagonals = scores + 16 * FLASH_STRIDE;
    threadgroup half *probabilities = (threadgroup half *)scores;
    float s[16], top = *m, part = 0.0f;
    QUANT_UNROLL for (int i = 0; i < 16; i += 4) {
        threadgroup const float *from = parts + row * FLASH_STRIDE + first + i;
        float4 v = *(threadgroup const float4 *)from;
        QUANT_UNROLL for (int p = 1; p < flash_ways(); p++)
            v = v + *(threadgroup const float4 *)(from + p * FLASH_OWN);
        for (int e = 0; e < 4; e++) s[i + e] = v[e];
    }
    if (ALIBI || !all)
        QUANT_UNROLL for (int i = 0; i < 16; i++) {
            int at = simd_shuffle(key_pos, first + i);
            s[i] = visible(at, pos, a) ? score_of(s[i], slope, abs(pos - at), a) : UNSEEN;
        }
    else if (SOFTCAPPED)
        QUANT_UNROLL for (int i = 0; i < 16; i++) s[i] = score_of(s[i], 0.0f, 0, a);
    QUANT_UNROLL for (int i = 0; i < 16; i++) top = max(top, s[i]);
    top = max(top, simd_shuffle_xor(top, 1));
    float shrink = exp2(*m - top);
    QUANT_UNROLL for (int i = 0; i < 16; i++) {
        s[i] = s[i] == UNSEEN ? 0.0f : exp2(s[i] - top);
        part += s[i];
    }
    flash_barrier();                                          // all scores have been read
    for (int i = 0; i < 16; i += 8)
        store_halves(probabilities + row * FLASH_HALVES + first + i, s + i);
    for (int i = 0; i < 4; i++)
        diagonals[4 * lane + i] = row % 8 == (int)lane % 2 * 4 + i ? shrink : 0.0f;
    part += simd_shuffle_xor(part, 1);
    *m = top;
    *sum = *sum * shrink + part;
    return shrink;
}

// mq = the SIMD-group's 16 queries, times scale, as operands: its columns from `col` on. 16 of them
// at a time pass through the memory of its scores. q: the threadgroup's first query, number t0.
QUANT_INLINE void flash_queries(device const float *q, int t0, int own, int col, float scale,
        threadgroup float *scores, uint lane, constant struct attention_args *a,
        thread half16x16 *mq) {
    QUANT_UNROLL for (int d = 0; d < key_cols() / 16; d++) {
        threadgroup half *stage = (threadgroup half *)scores;
        for (int i = lane; i < 16 * 16; i += SIMD_LANES) {
            int n = own - t0 + i / 16, e = col + 16 * d + i % 16;
            bool inside = t0 + n < a->n && e < HEAD_DIM;
            float x = inside ? q[(ulong)n * a->n_head * query_step() + e] * scale : 0.0f;
            stage[i / 16 * FLASH_HALVES + i % 16] = (half)x;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);        // staged
        load_left(&mq[d], stage, FLASH_HALVES);
        simdgroup_barrier(mem_flags::mem_threadgroup);        // used
    }
}

// scores[16][FLASH_STRIDE] = queries times the tile's keys, over the SIMD-group's columns
QUANT_INLINE void flash_scores(thread const half16x16 *mq, threadgroup const half *keys, int col,
        threadgroup float *scores) {
    half16x16 mk;
    float16x16 s[2];
    QUANT_UNROLL for (int j = 0; j < 2; j++) zero16(&s[j]);
    QUANT_UNROLL for (int d = 0; d < key_cols() / 16; d++)
        QUANT_UNROLL for (int j = 0; j < 2; j++) {
            load_right(&mk, keys + 16 * j * key_stride() + col + 16 * d, key_stride(), true);
            multiply16(&s[j], &mq[d], &mk);
        }
    QUANT_UNROLL for (int j = 0; j < 2; j++) store16(&s[j], scores + 16 * j, FLASH_STRIDE);
}

// o += probabilities, in the place of scores, times the tile's values, over the SIMD-group's
// columns; before that rows of o shrink, where some do, by the diagonals that flash_softmax left
QUANT_INLINE void flash_values(threadgroup const float *scores, threadgroup const half *values,
        int col, bool shrinks, thread float16x16 *o) {
    half16x16 mp, mv;
    QUANT_UNROLL for (int d = 0; d < value_cols() / 16; d++)
        if (shrinks) scale16(&o[d], scores + 16 * FLASH_STRIDE);
    QUANT_UNROLL for (int j = 0; j < 2; j++) {
        load_left(&mp, (threadgroup const half *)scores + 16 * j, FLASH_HALVES);
        QUANT_UNROLL for (int d = 0; d < value_cols() / 16; d++) {
            threadgroup const half *at = values + 16 * j * value_stride() + col + 16 * d;
            load_right(&mv, at, value_stride(), false);
            multiply16(&o[d], &mp, &mv);
        }
    }
}

// The end of attention, for the SIMD-group's columns: o passes through the memory of scores, and a
// lane takes half of a row of each matrix. out and gate are those of the lane's query, number t.
QUANT_INLINE void flash_output(thread const float16x16 *o, int col, int t, int head, float m,
        float sum, threadgroup float *scores, device const float *sinks, device const float *gate,
        uint lane, constant struct attention_args *a, device float *out) {
    QUANT_UNROLL for (int d = 0; d < value_cols() / 16; d++) {
        simdgroup_barrier(mem_flags::mem_threadgroup);        // what was there has been read
        store16(&o[d], scores, FLASH_STRIDE);
        simdgroup_barrier(mem_flags::mem_threadgroup);        // this matrix is there
        for (int i = 0; i < 8; i++) {
            int at = lane % 2 * 8 + i, e = col + 16 * d + at;
            if (t < a->n && e < VALUE_DIM)
                out[e] = attention_value(scores[lane / 2 * FLASH_STRIDE + at], m, sum, sinks + head,
                                         gate + e, a);
        }
    }
}

// The same as attention, for a chunk, with products of matrices. Grid: a threadgroup for each
// FLASH_QUERIES queries of a head, of which a SIMD-group has 16. Wide heads leave registers for 16
// queries in all: then each SIMD-group has a quarter of the columns of their keys and values, and
// adds up the four parts of the scores. The KV ring is taken in tiles of FLASH_KEYS rows; tiles in
// which no query sees a key are skipped. Scores, maxima, sums and outputs are float; outputs stay
// in registers. A byte of the KV ring serves 64 queries (16 of wide heads), not 1 or 2. With two
// BUFFERS the next tile is copied meanwhile; with one (Apple) values take the place of keys.
kernel void flash_attention(device const float *q, device const half *k, device const half *v,
        device const int *pos_k, device const int *now, device const float *slopes,
        device const float *sinks, device float *out, constant struct attention_args *a, PLACE) {
    const int ways = flash_ways(), queries = FLASH_QUERIES / ways;
    const int at_v = BUFFERS > 1 && !values_in_keys() ? FLASH_KEYS * key_stride() : 0;
    const int size = BUFFERS > 1 ? at_v + FLASH_KEYS * value_stride() : 0;
    threadgroup float *scores = shared + sg * FLASH_OWN;              // and diagonals[2][8][8]
    threadgroup float *parts = ways > 1 ? shared : scores;
    threadgroup half *tiles = (threadgroup half *)(shared + FLASH_SIMDGROUPS * FLASH_OWN);
    // first queries of the threadgroup and SIMD-group; late ones, which see most, run first
    int head = tg % a->n_head, query_tiles = div_up(a->n, queries), buffer = 0;
    int t0 = (query_tiles - 1 - (int)tg / a->n_head) * queries, own = t0 + (ways > 1 ? 0 : sg * 16);
    int t = own + lane / 2, pos = now[NOW_POS], first = pos + t0;
    int last = pos + min(t0 + queries, a->n) - 1, group = a->n_head / a->n_kv;
    int key_col = ways > 1 ? (int)sg * key_cols() : 0;
    int value_col = ways > 1 ? (int)sg * value_cols() : 0;
    int used = min(pos + a->n, a->rows), key_pos = -1, ahead = (int)lane < used ? pos_k[lane] : -1;
    half16x16 mq[NARROW_MAX / 16];
    float16x16 o[NARROW_MAX / 16];
    float m = UNSEEN, sum = 0.0f, slope = ALIBI ? slopes[head] * LOG2E : 0.0f;
    float scale = query_scale(a);
    k += (ulong)(head / group) * a->rows * HEAD_DIM;
    v += (ulong)(head / group) * a->rows * VALUE_STEP;
    q += ((ulong)t0 * a->n_head + head) * query_step();
    flash_queries(q, t0, own, key_col, scale, scores, lane, a, mq);
    QUANT_UNROLL for (int d = 0; d < value_cols() / 16; d++) zero16(&o[d]);
    int r0 = flash_next(pos_k, -FLASH_KEYS, used, first, last, lane, a, &key_pos, &ahead);
    if (r0 < used) flash_copy(k, HEAD_DIM, r0, key_pos, tid, tiles);
    if (at_v && r0 < used) flash_copy(v, VALUE_DIM, r0, key_pos, tid, tiles + at_v);
    while (r0 < used) {
        threadgroup half *keys = tiles + buffer * size, *values = keys + at_v;
        int here = key_pos, at = r0;                          // this tile's: both go on below
        bool all = simd_min((int)(visible(key_pos, pos + own, a) &&
                                  visible(key_pos, min(pos + own + 15, last), a))) > 0;
        copies_wait();
        threadgroup_barrier(mem_flags::mem_threadgroup);      // a tile is there, the other one used
        buffer = 1 - buffer;
        r0 = flash_next(pos_k, r0, used, first, last, lane, a, &key_pos, &ahead);
        threadgroup half *next = tiles + buffer * size;
        if (BUFFERS > 1 && r0 < used) flash_copy(k, HEAD_DIM, r0, key_pos, tid, next);
        if (at_v && r0 < used) flash_copy(v, VALUE_DIM, r0, key_pos, tid, next + at_v);
        flash_scores(mq, keys, key_col, scores);
        flash_barrier();                                      // scores are there
        float shrink = flash_softmax(parts, scores, here, all, pos + t, slope, lane, a, &m, &sum);
        bool shrinks = simd_max((int)(shrink < 1.0f)) > 0;
        if (BUFFERS == 1 && !values_in_keys()) {
            threadgroup_barrier(mem_flags::mem_threadgroup);  // keys are used
            flash_copy(v, VALUE_DIM, at, here, tid, tiles);
            copies_wait();
            threadgroup_barrier(mem_flags::mem_threadgroup);  // values are there
        } else simdgroup_barrier(mem_flags::mem_threadgroup); // probabilities are there
        flash_values(scores, values, value_col, shrinks, o);
        if (BUFFERS == 1) {
            threadgroup_barrier(mem_flags::mem_threadgroup);  // values are used
            if (r0 < used) flash_copy(k, HEAD_DIM, r0, key_pos, tid, tiles);
        }
    }
    out += ((ulong)t * a->n_head + head) * VALUE_DIM;
    q += (ulong)(t - t0) * a->n_head * query_step() + HEAD_DIM;
    flash_output(o, value_col, t, head, m, sum, scores, sinks, q, lane, a, out);
}

// ---- 7. experts ----
//
// A router chooses n_used of n_expert FFNs for each token. Only the GPU knows which: kernels read
// their numbers from `chosen`, and the host encodes the same dispatches for any choice. For one
// token, or a few, they are
//   gemv (norm, router) | choose_experts | gemv (norm, gate, up, activation) | gemv (down) |
//   weigh_experts (the weighted sum, added to x)
// and read the weights of the chosen experts only. A chunk's choices are sorted by expert, so that
// gemm decodes an expert's weights once for all its tokens; then each token adds up its results.

// chosen[n][n_used] = the experts with the highest scores for each token, best first, and
// weight[n][n_used]. A score is a probability, by softmax or sigmoid, plus a bias; a weight is the
// probability, without bias. If `normed`, the weights are divided by their sum, or by 2^-14 if that
// is larger (the smallest normal half, as in llama.cpp). Experts outside the group_used best groups
// get a probability of -1: see drop_groups.
// Grid: a SIMD-group for each token. route[n][n_expert], the router's product, is overwritten.
kernel void choose_experts(device float *route, device const float *bias, device int *chosen,
        device float *weight, constant struct choose_args *a, PLACE) {
    float top = UNSEEN, all = 0.0f, sum = 0.0f, last = -UNSEEN, scores = 0.0f;
    int before = -1;                                      // the expert chosen last; its score: last
    route += (ulong)tg * a->n_expert;
    chosen += (ulong)tg * a->n_used;
    weight += (ulong)tg * a->n_used;
    for (int e = lane; e < a->n_expert; e += SIMD_LANES) top = max(top, route[e]);
    top = simd_max(top);
    for (int e = lane; e < a->n_expert; e += SIMD_LANES) {
        route[e] = a->sigmoid ? sigmoid(route[e]) : exp(route[e] - top);
        all += route[e];
        scores += route[e] + (BIASES & 1 ? bias[e] : 0.0f);
    }
    all = a->sigmoid ? 1.0f : simd_sum(all);
    scores = simd_sum(scores);
    int groups = a->n_group > 1 ? a->n_group : 0;         // of `size` experts
    int size = a->n_expert / max(groups, 1);
    simdgroup_barrier(mem_flags::mem_device);             // probabilities are there
    for (int g = lane; g < groups; g += SIMD_LANES) {     // a group's worth
        float one = UNSEEN, two = size > 1 ? UNSEEN : 0.0f;
        for (int e = g * size; e < (g + 1) * size; e++) {
            float score = route[e] / all + (BIASES & 1 ? bias[e] : 0.0f);
            if (size > 1) two = max(two, min(one, score));
            one = max(one, score);
        }
        shared[g] = one + two;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);        // all groups are there
    for (int g = lane; g < groups; g += SIMD_LANES) {
        int better = 0;
        for (int k = 0; k < groups; k++)
            better += shared[k] > shared[g] || (shared[k] == shared[g] && k < g);
        for (int e = 0; better >= a->group_used && e < size; e++) route[g * size + e] = -1.0f;
    }
    simdgroup_barrier(mem_flags::mem_device);             // groups are chosen
    for (int k = 0; k < a->n_used; k++) {
        float best = UNSEEN, p = 0.0f;
        int at = a->n_expert;
        for (int e = lane; e < a->n_expert; e += SIMD_LANES) {   // best of a lane's experts
            float score = route[e] / all + (BIASES & 1 ? bias[e] : 0.0f);
            bool left = score < last || (score == last && e > before);
            if (!left || score <= best || route[e] < 0.0f) continue;
            best = score;
            p = route[e] / all;
            at = e;
        }
        last = simd_max(best);
        before = simd_min(best == last ? at : a->n_expert);      // of equals the first
        p = simd_sum(at == before ? p : 0.0f);
        sum += p;
        if (lane == 0) chosen[k] = min(before, a->n_expert - 1); // none, if all are NaN
        if (lane == 0) weight[k] = p;
    }
    float scale = a->normed ? a->scale / max(sum, 6.103515625e-5f) : a->scale;
    if (scores != scores) scale = scores;                     // a NaN is never chosen, but counts
    for (int k = 0; lane == 0 && k < a->n_used; k++) weight[k] *= scale;
}

// to[n * n_used][dim] = weight * x for each choice of n tokens, which sort_choices has sorted if
// there are several. A weight, now a factor of the input, becomes 1. Grid: a threadgroup a choice.
kernel void weigh_inputs(device const float *x, device const int *order, device float *weight,
        device float *to, constant struct weigh_inputs_args *a, PLACE) {
    int choice = a->sorted ? order[tg] : (int)tg;
    float factor = weight[choice];
    x += (ulong)(choice / a->n_used) * a->dim;
    to += (ulong)tg * a->dim;
    for (int i = tid; i < a->dim; i += nsg * SIMD_LANES) to[i] = factor * x[i];
    threadgroup_barrier(mem_flags::mem_device);           // all threads have the weight
    if (tid == 0) weight[choice] = 1.0f;
}

// Sorts a chunk's choices by expert: order[i] = token * n_used + k is choice k of a token, and
// place[order[i]] = i. tile[tiles][3] has an expert (-1: none), and the first and the end of up to
// a->tile of its choices. One threadgroup: choices are cut into pieces, of 32 or more, so that each
// expert and piece has a thread, which counts its choices. Then it knows where its own begin.
kernel void sort_choices(device const int *chosen, device int *order, device int *place,
        device int *tile, constant struct sort_args *a, PLACE) {
    threadgroup int *count = (threadgroup int *)shared;       // [n_expert][pieces]
    int threads = nsg * SIMD_LANES, worth = div_up(a->choices, 32);
    int pieces = max(min(threads / a->n_expert, worth), 1);
    int all = a->n_expert * pieces, size = div_up(a->choices, pieces);
    for (int u = tid; u < all; u += threads) {
        int e = u % a->n_expert, piece = u / a->n_expert, n = 0;
        int end = min((piece + 1) * size, a->choices);
        for (int i = piece * size; i < end; i++) n += chosen[i] == e;
        count[e * pieces + piece] = n;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);          // all are counted
    for (int u = tid; u < all; u += threads) {
        int e = u % a->n_expert, piece = u / a->n_expert, at = 0, own = 0, n = 0;
        for (int k = 0; k < e; k++, n += div_up(own, a->tile), at += own) {
            own = 0;
            for (int i = 0; i < pieces; i++) own += count[k * pieces + i];
        }
        own = 0;
        for (int i = 0; i < pieces; i++) own += count[e * pieces + i];
        for (int i = 0; piece == 0 && i < own; i += a->tile, n++) {
            tile[3 * n] = e;
            tile[3 * n + 1] = at + i;
            tile[3 * n + 2] = at + min(i + a->tile, own);
        }
        for (; u == a->n_expert - 1 && n < a->tiles; n++) tile[3 * n] = -1;   // past the last
        for (int i = 0; i < piece; i++) at += count[e * pieces + i];
        int end = min((piece + 1) * size, a->choices);
        for (int i = piece * size; i < end; i += 8) {
            int some[8];                                      // loads that overlap
            QUANT_UNROLL for (int j = 0; j < 8; j++) some[j] = i + j < end ? chosen[i + j] : -1;
            QUANT_UNROLL for (int j = 0; j < 8; j++) {
                if (some[j] != e) continue;
                order[at] = i + j;
                place[i + j] = at++;
            }
        }
    }
}

// y[n][dim] = the epilogue of the sum of weight * out over a token's choices, plus shared_out.
// Choice i is row place[i] of out if they are sorted, else row i. Grid: a threadgroup a token.
kernel void weigh_experts(device const float *out, device const float *weight,
        device const int *place, device const float *shared_out, device const float *route,
        device const float *other, device float *y, constant struct weigh_args *a, PLACE) {
    float factor = a->weighed ? sigmoid(route[tg]) : 1.0f;
    int first = tg * a->n_used;
    for (int j = tid; j < a->dim; j += nsg * SIMD_LANES) {
        ulong at = (ulong)tg * a->dim + j;
        float sum = a->joined ? factor * shared_out[at] : 0.0f;
        for (int i = first; i < first + a->n_used; i++)
            sum += weight[i] * out[(ulong)(a->sorted ? place[i] : i) * a->dim + j];
        finish(&y[at], sum * a->factor, 0, has_other() ? other[at] : 0.0f);
    }
}

// ---- 8. recurrent mixers ----
//
// Layers that remember the past in a state of fixed size. The gated delta rule, for one token (for
// a chunk, gemm takes the place of gemv):
//   gemv (norm; q, k, v and z) | gemv (norm; alpha, beta) | delta_conv | delta_rule |
//   norm (of each head, times silu(z)) | gemv (added to x)
// KDA has two gemv of three, for q, k and v, and for z, alpha and beta; maybe one more for alpha
// and for z; and gate_heads after its norm, which has no gate. A state space:
//   gemv (norm; x, b and c; z; dt) | delta_conv | delta_rule (times silu(z)) |
//   norm (of each group of heads) | gemv (added to x)
// The short convolution:
//   gemv (norm; u, b, c) | delta_conv | gemv (added to x)

// Input number r of a channel's convolution: the state has the last `past` ones before the chunk,
// mix[past + n][channels] the chunk's, from row `past` on. If GATED, they are multiplied by b.
static inline float conv_input(device const float *mix, device const float *state,
        device const float *b, int r, constant struct conv_args *a) {
    ulong at = (ulong)r * a->channels;
    if (r < a->past) return state[at];
    return mix[at] * (GATED ? b[at - (ulong)a->past * a->channels] : 1.0f);
}

// The convolution over time, and SiLU: out[n][channels] from mix and state, which then gets the
// chunk's last inputs before its guesses, and theirs. Taps are [channels][past + 1]. If GATED,
// there is no SiLU: the result is multiplied by z[n][channels].
// Grid: a thread for CONV_TOKENS tokens of a channel, so that neighbours read neighbours. The first
// of a channel's threads alone reads its state, as `past` is CONV_TOKENS at most; and writes it.
kernel void delta_conv(device const float *mix, device float *state, device const float *taps,
        device const float *bias, device const float *b, device const float *z, device float *out,
        device const int *now, constant struct conv_args *a, PLACE) {
    int channels = a->channels, wide = div_up(channels, SIMD_LANES) * SIMD_LANES;
    int unit = tg * nsg * SIMD_LANES + tid, i = unit % wide, first = unit / wide * CONV_TOKENS;
    if (i >= channels) return;
    mix += i;
    state += i;
    int stood = 0, sure = a->n;
    if (a->guesses) {
        stood = now[NOW_STOOD];
        sure -= now[NOW_GUESSES];
    }
    device const float *old = state + (ulong)stood * channels;
    b += i;
    taps += (ulong)i * (a->past + 1);
    for (int t = first; t < min(first + CONV_TOKENS, a->n); t++) {
        float y = BIASES ? bias[i] : 0.0f;
        ulong at = (ulong)t * channels + i;
        for (int j = 0; j <= a->past; j++) y += taps[j] * conv_input(mix, old, b, t + j, a);
        out[at] = y * (GATED ? z[at] : sigmoid(y));
    }
    for (int j = 0; first == 0 && sure + j < a->past + a->n; j++)
        state[(ulong)j * channels] = conv_input(mix, old, b, sure + j, a);
}

// numbers of k and q that are staged; quads of a row of S that a lane has
static inline int delta_wide(void) { return delta_width(HEAD_DIM); }
static inline int delta_quads(void) { return delta_wide() / 4 / DELTA_LANES; }

// the column of S that is number i of a lane; rank: of the lane, among those that share its row
static inline int delta_col(int i, int rank) { return i / 4 * 32 + rank * 4 + i % 4; }

// what a BLOCK has in threadgroup memory, and the comment of delta_rule explains
struct delta_shared {
    threadgroup float *ks, *qs, *gs;                      // [BLOCK][delta_wide]; gs if CHANNELS
    threadgroup float *kk, *kq;                           // [BLOCK][BLOCK]
    threadgroup float *g, *b;                             // [BLOCK]
};

// the sum over the lanes that share a row of the state
static inline float row_sum(float x) {
    QUANT_UNROLL for (int i = 1; i < DELTA_LANES; i *= 2) x += simd_shuffle_xor(x, i);
    return x;
}

// a channel's decay, for x = alpha + dt
static inline float channel_decay(float x, float decay, float lower) {
    return exp(lower < 0.0f ? lower * sigmoid(decay * x) : decay * softplus(x));
}

// What a thread loads for a BLOCK of tokens, while the one before is computed: of tokens sg and
// sg + UNIT_SIMDGROUPS every 32nd number of k and q from `lane` on, alpha (one, or as many) and
// beta; of token number `rank`, its row's v, and in a state space its z.
struct delta_input {
    float k[DELTA_OWN][NARROW_MAX / 32], q[DELTA_OWN][NARROW_MAX / 32];
    float alpha[DELTA_OWN][NARROW_MAX / 32], beta[DELTA_OWN], v, z;
};

// k, q, v, alpha, beta and z are those of the first token; `count` are left
QUANT_INLINE void delta_load(device const float *k, device const float *q, device const float *v,
        device const float *alpha, device const float *beta, device const float *z, int step,
        int count, uint sg, uint lane, constant struct delta_args *a,
        thread struct delta_input *in) {
    int mine = min((int)lane % DELTA_LANES, count - 1);
    QUANT_UNROLL for (int i = 0; i < DELTA_OWN && i * UNIT_SIMDGROUPS < BLOCK; i++) {
        int t = min((int)sg + i * UNIT_SIMDGROUPS, count - 1);
        QUANT_UNROLL for (int n = 0; n < div_up(HEAD_DIM, 32); n++) {
            int j = 32 * n + (int)lane;
            in->k[i][n] = j < HEAD_DIM ? k[(ulong)t * step + j] : 0.0f;
            in->q[i][n] = j < HEAD_DIM ? q[(ulong)t * step + j] : 0.0f;
            if (!CHANNELS) in->alpha[i][n] = alpha[(ulong)t * a->step];
            else in->alpha[i][n] = j < HEAD_DIM ? alpha[(ulong)t * a->step * HEAD_DIM + j] : 0.0f;
        }
        in->beta[i] = ASKS ? beta[(ulong)t * a->step] : 0.0f;
    }
    in->v = v[(ulong)mine * step];
    in->z = ASKS ? 0.0f : z[(ulong)mine * a->n_value * a->dv];
}

// Stages k, q, the decays and b of a BLOCK's tokens, of which `left` are there; also leaves k and q
// in `in` as they are staged. dt and decay are those of all heads.
QUANT_INLINE void delta_stage(thread struct delta_input *in, thread const struct delta_shared *to,
        device const float *dt, device const float *decay, int h, int left, uint sg, uint lane,
        constant struct delta_args *a) {
    QUANT_UNROLL for (int i = 0; i < DELTA_OWN && i * UNIT_SIMDGROUPS < BLOCK; i++) {
        int t = (int)sg + i * UNIT_SIMDGROUPS;
        float k2 = 0.0f, q2 = 0.0f, step = CHANNELS ? 0.0f : softplus(in->alpha[i][0] + dt[h]);
        bool there = t < left;                                // past the last, nothing changes S
        QUANT_UNROLL for (int n = 0; n < delta_quads(); n++) {
            k2 += in->k[i][n] * in->k[i][n];
            q2 += in->q[i][n] * in->q[i][n];
        }
        k2 = ASKS ? rsqrt(simd_sum(k2) + a->eps) : 1.0f;
        q2 = ASKS ? rsqrt((simd_sum(q2) + a->eps) * (float)HEAD_DIM) : 1.0f;
        QUANT_UNROLL for (int n = 0; n < delta_quads(); n++) {
            int at = t * delta_wide() + 32 * n + lane, j = min(32 * n + (int)lane, HEAD_DIM - 1);
            in->k[i][n] *= k2;
            in->q[i][n] *= q2;
            if (t < BLOCK) to->ks[at] = in->k[i][n];
            if (t < BLOCK) to->qs[at] = in->q[i][n];
            if (CHANNELS && t < BLOCK)
                to->gs[at] = there ? channel_decay(in->alpha[i][n] + dt[h * HEAD_DIM + j], decay[h],
                                                   a->lower) : 1.0f;
        }
        if (lane > 0 || t >= BLOCK) continue;
        to->g[t] = CHANNELS || !there ? 1.0f : exp(decay[h] * step);
        if (ASKS) step = sigmoid(in->beta[i]);
        to->b[t] = there ? step : 0.0f;
    }
}

// kk[t][j] = G(j, t) k[j]' k[t] and kq[t][j] = G(j, t) k[j]' q[t] for the tokens t that the
// SIMD-group has staged. Its k and q in `in` are used up.
QUANT_INLINE void delta_products(thread struct delta_input *in,
        thread const struct delta_shared *to, uint sg, uint lane) {
    QUANT_UNROLL for (int i = 0; i < DELTA_OWN && i * UNIT_SIMDGROUPS < BLOCK; i++) {
        int t = (int)sg + i * UNIT_SIMDGROUPS;
        float to_k[BLOCK_MAX], to_q[BLOCK_MAX], since = 1.0f;
        QUANT_UNROLL for (int j = BLOCK - 1; j >= 0; j--) {
            to_k[j] = to_q[j] = 0.0f;
            QUANT_UNROLL for (int n = 0; n < delta_quads(); n++) {
                int at = j * delta_wide() + 32 * n + lane;
                if (ASKS) to_k[j] += in->k[i][n] * to->ks[at];
                to_q[j] += in->q[i][n] * to->ks[at];
                if (!CHANNELS || j > t) continue;             // k[t] and q[t] meet an earlier k
                in->k[i][n] *= to->gs[at];
                in->q[i][n] *= to->gs[at];
            }
        }
        QUANT_UNROLL for (int j = 0; j < BLOCK; j++) {        // these sums overlap
            if (ASKS) to_k[j] = simd_sum(to_k[j]);
            to_q[j] = simd_sum(to_q[j]);
        }
        QUANT_UNROLL for (int j = BLOCK - 1; j >= 0; j--) {
            if (j > t || t >= BLOCK) continue;
            if (lane == 0) to->kk[t * BLOCK + j] = since * to_k[j];
            if (lane == 0) to->kq[t * BLOCK + j] = since * to_q[j];
            since *= to->g[j];
        }
    }
}

// asked[t] = S k[t] and found[t] = S q[t], for the lane's row of S. With CHANNELS S decays from
// token to token; else that is made up for later.
QUANT_INLINE void delta_ask(thread const struct delta_shared *from, thread float *s, int rank,
        thread float *asked, thread float *found) {
    QUANT_UNROLL for (int t = 0; t < BLOCK; t++) {
        asked[t] = found[t] = 0.0f;
        QUANT_UNROLL for (int i = 0; i < delta_quads(); i++) {
            int at = t * delta_wide() + delta_col(4 * i, rank);
            for (int e = 0; CHANNELS && e < 4; e++) s[4 * i + e] *= from->gs[at + e];
            float4 kv = *(threadgroup const float4 *)(from->ks + at);
            float4 qv = *(threadgroup const float4 *)(from->ks + at + BLOCK * delta_wide());
            for (int e = 0; e < 4; e++) {
                if (ASKS) asked[t] += s[4 * i + e] * kv[e];
                found[t] += s[4 * i + e] * qv[e];
            }
        }
        if (ASKS) asked[t] = row_sum(asked[t]);
        found[t] = row_sum(found[t]);
    }
}

// w[t] of all tokens. v is that of token number `rank`; the result is its out[t].
QUANT_INLINE float delta_solve(thread const struct delta_shared *from, float v, int rank, uint lane,
        thread const float *asked, thread float *found, thread float *w) {
    float since = 1.0f, mine = 0.0f;                          // since: G(-1, t)
    QUANT_UNROLL for (int t = 0; t < BLOCK; t++) {
        since *= from->g[t];
        w[t] = simd_shuffle(v, lane - rank + t) - (ASKS ? since * asked[t] : 0.0f);
        for (int j = 0; ASKS && j < t; j++) w[t] -= w[j] * from->kk[t * BLOCK + j];
        w[t] *= from->b[t];
        found[t] *= since;
        for (int j = 0; j <= t; j++) found[t] += w[j] * from->kq[t * BLOCK + j];
        if (rank == t) mine = found[t];
    }
    return mine;
}

// S after the BLOCK, for the lane's row
QUANT_INLINE void delta_update(thread const struct delta_shared *from, thread float *w, int rank,
        thread float *s) {
    float since = 1.0f, fade[NARROW_MAX / DELTA_LANES];       // G(t, last), with CHANNELS of each
    QUANT_UNROLL for (int t = BLOCK - 1; t >= 0; t--) {
        w[t] *= since;
        since *= from->g[t];
    }
    QUANT_UNROLL for (int i = 0; i < 4 * delta_quads(); i++) {
        s[i] *= since;
        fade[i] = 1.0f;
    }
    QUANT_UNROLL for (int t = BLOCK - 1; t >= 0; t--) {
        QUANT_UNROLL for (int i = 0; i < delta_quads(); i++) {
            int at = t * delta_wide() + delta_col(4 * i, rank);
            float4 kv = *(threadgroup const float4 *)(from->ks + at);
            for (int e = 0; e < 4; e++) {
                s[4 * i + e] += w[t] * (CHANNELS ? kv[e] * fade[4 * i + e] : kv[e]);
                if (CHANNELS) fade[4 * i + e] *= from->gs[at + e];
            }
        }
    }
}

// For each value head, whose state S[dv][dk] is in registers while tokens pass (k' is k as a row):
//   S *= g,   S += b * (v - S k) k',   out = S q / sqrt(dk)      where k and q have unit length
//   g = exp(decay * softplus(alpha + dt)),   b = sigmoid(beta)
// or for a state space (not ASKS), where x takes the place of v, and k and q keep their length,
//   S *= g,   S += softplus(alpha + dt) * x k',   out = (S q + skip * x) * silu(z)
// or where CHANNELS have decays of their own, with alpha[dk], dt[dk] and g[dk], the delta rule with
//   g = exp(decay * softplus(alpha + dt)),   or   g = exp(lower * sigmoid(decay * (alpha + dt)))
// BLOCK tokens are computed at once (as in arXiv 2406.06484): token t finds the S before the BLOCK,
// and what the BLOCK's tokens wrote, all decayed since. With G(j, t) = g[j + 1] ... g[t] and S of
// token -1:
//   w[t] = b[t] * (v[t] - G(-1, t) S k[t] - sum over j < t of w[j] G(j, t) k[j]' k[t])
//   out[t] = G(-1, t) S q[t] + sum over j <= t of w[j] G(j, t) k[j]' q[t]
//   S = G(-1, last) S + sum over all j of w[j] G(j, last) k[j]'
// So a token waits for the one before it only in numbers, not in products with S. With CHANNELS
// G(j, t) is a vector, a factor of S's and k's columns. A few tokens have a BLOCK of 1: each is
// computed as it is alone.
// Grid: threadgroups of a head's rows, with a SIMD-group for DELTA_UNIT of them. The k and q of a
// BLOCK are staged, and all k[j]' k[t] and k[j]' q[t], by the SIMD-group that has staged token t.
// Eight lanes share a row: lane l has row l / 8, and of it every eighth quad from l % 8 on. In
// memory S is as in llm.c, [dv / 64][dk][64]. mix[n] has q, k and v; in a state space x, k and q.
kernel void delta_rule(device float *state, device const float *mix, device const float *alpha,
        device const float *beta, device const float *dt, device const float *decay,
        device float *out, device const float *z, device const float *skip,  // out[n][n_value][dv]
        device const int *now, constant struct delta_args *a, PLACE) {
    int groups = div_up(a->dv, DELTA_UNIT * (int)nsg), h = tg / groups, rank = lane % DELTA_LANES;
    int row = (tg % groups * nsg + sg) * DELTA_UNIT + lane / DELTA_LANES, own = min(row, a->dv - 1);
    int key = a->tiled ? h % a->n_key : h / (a->n_value / a->n_key);
    int keys = a->n_key * HEAD_DIM, values = a->n_value * a->dv, all = 2 * keys + values;
    ulong panel = (ulong)h * div_up(a->dv, DELTA_LAYOUT) + own / DELTA_LAYOUT;
    threadgroup float *kk = shared + 2 * BLOCK * delta_wide(), *g = kk + 2 * BLOCK * BLOCK;
    struct delta_shared in_block = {shared, shared + BLOCK * delta_wide(), g + 2 * BLOCK,
                                    kk, kk + BLOCK * BLOCK, g, g + BLOCK};
    mix += (ulong)a->first * all;
    device const float *k = mix + (ASKS ? keys : values) + key * HEAD_DIM;
    device const float *q = ASKS ? k - keys : k + keys;
    device const float *x = mix + (ASKS ? 2 * keys : 0);
    float s[NARROW_MAX / DELTA_LANES];
    struct delta_input in;
    x += h * a->dv + own;
    z += h * a->dv + own;
    out += h * a->dv + own;
    int decays = CHANNELS ? HEAD_DIM : 1;                // of a head
    int sure = a->n - (a->guesses ? now[NOW_GUESSES] : 0);   // tokens that the state is to see
    alpha += (h + a->first * a->step) * decays;
    beta += h + a->first * a->step;
    state += panel * HEAD_DIM * DELTA_LAYOUT + own % DELTA_LAYOUT;
    QUANT_UNROLL for (int i = 0; i < 4 * delta_quads(); i++) {
        int j = delta_col(i, rank);
        s[i] = j < HEAD_DIM ? state[(ulong)j * DELTA_LAYOUT] : 0.0f;
    }
    delta_load(k, q, x, alpha, beta, z, all, a->n, sg, lane, a, &in);
    for (int t0 = 0; t0 < a->n; t0 += BLOCK) {
        int next = t0 + BLOCK;
        float asked[BLOCK_MAX], found[BLOCK_MAX], w[BLOCK_MAX];
        threadgroup_barrier(mem_flags::mem_threadgroup);      // the BLOCK before is computed
        delta_stage(&in, &in_block, dt, decay, h, a->n - t0, sg, lane, a);
        threadgroup_barrier(mem_flags::mem_threadgroup);      // it is staged
        delta_products(&in, &in_block, sg, lane);
        float v = in.v, gate = ASKS ? 1.0f : in.z * sigmoid(in.z);
        if (next < a->n)
            delta_load(k + (ulong)next * all, q + (ulong)next * all, x + (ulong)next * all,
                       alpha + (ulong)next * a->step * decays, beta + (ulong)next * a->step,
                       z + (ulong)next * values, all, a->n - next, sg, lane, a, &in);
        delta_ask(&in_block, s, rank, asked, found);
        threadgroup_barrier(mem_flags::mem_threadgroup);      // kk and kq are there
        float mine = delta_solve(&in_block, v, rank, lane, asked, found, w);
        if (rank < min(BLOCK, a->n - t0) && row < a->dv)
            out[(ulong)(t0 + rank) * values] = ASKS ? mine : (mine + skip[h] * v) * gate;
        delta_update(&in_block, w, rank, s);
        if (t0 >= sure || next < sure || row >= a->dv) continue;
        QUANT_UNROLL for (int i = 0; i < 4 * delta_quads(); i++) {   // before any guess
            int j = delta_col(i, rank);
            if (j < HEAD_DIM) state[(ulong)j * DELTA_LAYOUT] = s[i];
        }
    }
}

#endif
