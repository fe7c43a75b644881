// SPDX-License-Identifier: MIT
// quant.h: every quantised weight format of GGUF, in one header. C11, C++17, Metal, CUDA.
//
//   #include "quant.h"                        // in any number of files; there is nothing to link
//
//   int type = quant_type_from_name("q4_K");             // 12, ggml's number for it; -1: unknown
//   size_t bytes = quant_row_bytes(type, 4096);          // 2304; 0: n is not whole blocks
//   bool ok = quant_dequantize(type, src, dst, 4096);    // float dst[4096], bit for bit ggml's
//   puts(quant_name(type));                              // q4_K
//
// ONE IDEA. A block format stores an int8 code q per weight, a scale d and an offset m per 16:
//
//   w[i] = d[i/16] * q[i] + m[i/16]
//
// So a format needs one decoder, which unpacks q, d and m, and leaves the formula to its caller:
//
//   decode_X(const block_X *b, int g, int n, int8_t *q, float *d, float *m)
//
// A decoder works on 256 weights, which are 8 groups of 32, whatever the size of a block; b points
// to the first of their blocks. There are two ways to call it:
//
//   decode_X(b, g, 1, q, d, m)   group g alone, for a thread of a GPU: q[32], d[2], m[2], in order
//   decode_X(b, 0, 8, q, d, m)   all groups, for a CPU: d[16] and m[16] in order, but codes as
//                                q[4][8][8]: weight 32*g + 8*k + j is at q[64*k + 8*g + j]
//
// Why that order? One instruction multiplies up to 64 codes by as many activations, and adds
// products 0 to 3 in lane 0, 4 to 7 in lane 1, and so on. A group's four eights (k = 0..3) lie 64
// bytes apart, so their sums come out in the same two lanes of four results. Results with the same
// scale are added as integers; d and m are applied at the end.
//
// A decoder reads only the blocks of its n groups; on a CPU they may have any address. If a row
// ends before the 256th weight, quant_decode decodes a copy that ends in zeros. A format without
// offsets sets m = -0.0f: adding it changes no float, while +0.0f would turn -0.0f into +0.0f.
// Every product d*q is exact in a float, so a fused multiply-add gives the same bits as ggml's.
//
// HOW TO READ. After this manual read Q8_0, Q4_0 and Q4_K at "first sitting"; when one calls a
// function that decoders are made of, look up its comment in section 3. In a map, "run 32" means
// that 32 bytes hold the bits of weights 0..31, above them those of weights 32..63, and so on; when
// they are full, 32 more bytes follow. All other formats look the same.
//
// HOW TO ADD A FORMAT. Its id must be below 64, and its blocks must divide 256 weights. Write map,
// struct and decoder (QUANT_SCALED, or with offsets QUANT_DECODER) beside those like it, and a row
// of QUANT_TYPES. Tests then ask for blocks and ggml's floats for them: golden/README.md.
//
// OPTIONS. On x86, -march=native (at least -mavx2 -mf16c) makes it fast; QUANT_PLAIN, if defined,
// leaves SIMD out. GPUs get decoders without the public functions; nvcc needs cuda_fp16.h.
//
// LICENCE. MIT, copyright (c) 2026 the llm authors.
// Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
// associated documentation files (the "Software"), to deal in the Software without restriction,
// including without limitation the rights to use, copy, modify, merge, publish, distribute,
// sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
// furnished to do so, subject to the following conditions: The above copyright notice and this
// permission notice shall be included in all copies or substantial portions of the Software.
// THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
// NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
// NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
// DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
// OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
#ifndef QUANT_H
#define QUANT_H

// ---- 1. dialect ----
// What C, C++, Metal and CUDA spell differently. A pointer's type begins with its address space.

#if defined(__METAL_VERSION__)
#define QUANT_WORDS
#define QUANT_DEVICE device
#define QUANT_THREAD thread
#define QUANT_CONSTANT constant
#define QUANT_TABLE constant
#define QUANT_INLINE static inline __attribute__((always_inline))
#define QUANT_UNROLL _Pragma("clang loop unroll(full)")   // also once function constants are known
#else
#if defined(__CUDACC__)
#define QUANT_WORDS
#define QUANT_TABLE static __device__ __align__(4) const   // __constant__ serves one address a time
#define QUANT_INLINE static __device__ __forceinline__
#define QUANT_UNROLL _Pragma("unroll")
#else
#include <stdbool.h>
#include <stddef.h>
#define QUANT_TABLE static const __attribute__((unused))
#define QUANT_INLINE static inline __attribute__((always_inline, unused))
#if __FINITE_MATH_ONLY__   // NaN and -0 would be lost
#error "compile this without -ffast-math, -Ofast and -ffinite-math-only"
#elif defined(__clang__)
#define QUANT_UNROLL _Pragma("clang loop unroll(full)")
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"           // with n < 8 not every loop unrolls
#else
#define QUANT_UNROLL _Pragma("GCC unroll 16")
#endif
#endif
#include <stdint.h>
#define QUANT_DEVICE
#define QUANT_THREAD
#define QUANT_CONSTANT const
#endif

#if defined(QUANT_WORDS)
#elif defined(QUANT_PLAIN) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#define QUANT_SCALAR
#elif defined(__x86_64__) && defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#define QUANT_X86
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define QUANT_AVX512
#endif
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define QUANT_NEON
#endif

// ---- 2. numbers in bytes ----
// Files are little endian, and a block may begin at any byte, so numbers are put together from
// bytes, which a CPU's compiler turns into one load. A GPU's compiler does not, but its tensors are
// aligned, so numbers of 2 bytes are, too, and words (of 32 bits) where a block has 4 * n bytes.

#if defined(__METAL_VERSION__) || defined(__CUDACC__)
QUANT_INLINE uint32_t quant_u16(QUANT_DEVICE const uint8_t *p) {
    return *(QUANT_DEVICE const uint16_t *)p;
}
QUANT_INLINE uint32_t quant_u32(QUANT_DEVICE const uint8_t *p) {
    return quant_u16(p) | quant_u16(p + 2) << 16;
}
// The word at p + i (i a multiple of 4) in a block of `size` bytes, from one aligned word or two.
// If more of the block follows (`inside`), two are loaded, because neighbours share these loads.
QUANT_INLINE uint32_t quant_word(QUANT_DEVICE const uint8_t *p, int i, int size, bool inside) {
    if (size % 4 == 0) return *(QUANT_DEVICE const uint32_t *)(p + i);
    uint32_t s = (uint32_t)(uint64_t)p & 3;
    QUANT_DEVICE const uint32_t *a = (QUANT_DEVICE const uint32_t *)(p - s + i);
    uint32_t low = a[0], high = a[inside || s > 0 ? 1 : 0];
    return (uint32_t)((low | (uint64_t)high << 32) >> 8 * s);
}
// w[4] = the 16 bytes at p, which is a multiple of 16 where blocks have 16 * n bytes
QUANT_INLINE void quant_four(QUANT_THREAD uint32_t *w, QUANT_DEVICE const uint8_t *p) {
    uint4 four = *(QUANT_DEVICE const uint4 *)p;
    for (int i = 0; i < 4; i++) w[i] = four[i];
}
#else
#if defined(QUANT_NEON)   // clang would load two bytes
typedef uint16_t quant_h __attribute__((aligned(1), may_alias));
QUANT_INLINE uint32_t quant_u16(const uint8_t *p) { return *(const quant_h *)p; }
#else
QUANT_INLINE uint32_t quant_u16(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8; }
#endif
QUANT_INLINE uint32_t quant_u32(const uint8_t *p) {
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
QUANT_INLINE uint32_t quant_word(const uint8_t *p, int i, int size, bool inside) {
    return quant_u32(p + i + 0 * (size + inside));
}
QUANT_INLINE void quant_four(uint32_t *w, const uint8_t *p) {
    for (int i = 0; i < 4; i++) w[i] = quant_u32(p + 4 * i);
}
#endif
QUANT_INLINE uint64_t quant_u64(QUANT_DEVICE const uint8_t *p) {
    return quant_u32(p) | (uint64_t)quant_u32(p + 4) << 32;
}
// The bytes p[i] to p[i + 7], where i is 0 or 8, of 16 bytes at p, two for each group. If n is 1,
// the other groups' bytes are zero, and i does not matter.
QUANT_INLINE uint64_t quant_pairs(QUANT_DEVICE const uint8_t *p, int i, int g, int n) {
    return n > 1 ? quant_u64(p + i) : (uint64_t)quant_u16(p + 2 * g) << g % 4 * 16;
}

// quant_as_floats: c[4] = the four codes in a word, which are never negative after adding `bias`
// quant_from_bits: the float of these bits; quant_f16_to_f32: the exact float of a half
#if defined(__CUDACC__)
QUANT_INLINE float quant_from_bits(uint32_t bits) { return __uint_as_float(bits); }
// CUDA adds faster than it converts: 0x4b000000 | b, as bits of a float, is 2^23 + b.
QUANT_INLINE void quant_as_floats(uint32_t v, int bias, float *c) {
    QUANT_UNROLL for (int i = 0; i < 4; i++)
        c[i] = quant_from_bits(__byte_perm(v ^ 0x80808080, 0x4b000000, 0x7440 + i)) - 8388736.0f;
}
QUANT_INLINE float quant_f16_to_f32(uint32_t h) {
    return __half2float(__ushort_as_half((unsigned short)h));
}
#elif defined(__METAL_VERSION__)
// On Apple's GPUs a shift or a conversion takes as long as four additions, but both halves of a
// register are free: 0x6400 | b, as bits of a half, is 1024 + b, two at once. If a decoder has
// subtracted a power of two, it is added again, so that both cancel and u is what the file holds.
QUANT_INLINE void quant_as_floats(uint32_t v, int bias, QUANT_THREAD float *c) {
    bool less = bias < 128 && (bias & (bias - 1)) == 0;
    uint32_t top = less ? 0x64006400 : 0x64806480;        // 0x80: a signed byte + 128
    uint32_t u = less && bias ? (v ^ 0x80808080) - (128 - bias) * 0x01010101 : v;
    half zero = (half)(1024.0f + (less ? bias : 128));
    half2 even = as_type<half2>((u & 0x00ff00ff) ^ top) - zero;
    half2 odd = as_type<half2>((u >> 8 & 0x00ff00ff) ^ top) - zero;
    c[0] = (float)even[0], c[1] = (float)odd[0];
    c[2] = (float)even[1], c[3] = (float)odd[1];
}
QUANT_INLINE float quant_from_bits(uint32_t bits) { return as_type<float>(bits); }
QUANT_INLINE float quant_f16_to_f32(uint32_t h) { return (float)as_type<half>((ushort)h); }
#else
QUANT_INLINE void quant_as_floats(uint32_t v, int bias, float *c) {
    for (int i = 0; i < 4; i++, v >>= 8) c[i] = (float)(int8_t)(v & 255);
    (void)bias;
}
QUANT_INLINE float quant_from_bits(uint32_t bits) {
    union { uint32_t u; float f; } x = {bits};
    return x.f;
}
#if defined(QUANT_X86)
QUANT_INLINE float quant_f16_to_f32(uint32_t h) { return _cvtsh_ss((uint16_t)h); }
#elif defined(QUANT_NEON)
QUANT_INLINE float quant_f16_to_f32(uint32_t h) {
    union { uint16_t u; __fp16 f; } x = {(uint16_t)h};
    return x.f;
}
#else
QUANT_INLINE float quant_f16_to_f32(uint32_t h) {
    uint32_t sign = (h & 0x8000) << 16, e = h >> 10 & 31, f = h & 1023;
    if (e == 0) return sign ? -5.9604645e-8f * (float)f : 5.9604645e-8f * (float)f;      // 2^-24
    return quant_from_bits(sign | (e == 31 ? 255 : e + 112) << 23 | f << 13);
}
#endif
#endif

QUANT_INLINE float quant_half(QUANT_DEVICE const uint8_t *p) {
    return quant_f16_to_f32(quant_u16(p));
}

// Spreads eight adjacent fields of 1 to 4 bits to the eight bytes of a uint64_t: the upper four
// move to the upper half, then in each half the upper two, then in each quarter the upper one. It
// is a macro because x may be a vector of uint64_t.
#define QUANT_SPREAD(x, bits)                                                                      \
    (x = (x | x << (32 - 4 * bits)) & 0x0000000100000001 * ((1u << 4 * bits) - 1),                 \
     x = (x | x << (16 - 2 * bits)) & 0x0001000100010001 * ((1u << 2 * bits) - 1),                 \
     (x | x << (8 - bits)) & 0x0101010101010101 * ((1u << bits) - 1))
#if defined(QUANT_X86) && defined(__BMI2__)
QUANT_INLINE uint64_t quant_spread(uint64_t x, int bits) {
    return _pdep_u64(x, 0x0101010101010101 * ((1u << bits) - 1));
}
#else
QUANT_INLINE uint64_t quant_spread(uint64_t x, int bits) { return QUANT_SPREAD(x, bits); }
#endif

// ---- 3. the functions decoders are made of ----
// A decoder calls quant_fields, quant_subtract, quant_scales and the like, each of which goes over
// all codes or scales. They are written once, on vectors (quant_v) of QUANT_LANES codes: 1 in plain
// C, where you see what each vector function does; 4 in a word on a GPU (with QUANT_WORDS also in
// tests); 16 with NEON and on other CPUs; 32 with AVX2; 64 with AVX-512. With n = 8 loops unroll,
// and codes stay in registers from one function to the next, and to a caller that loads vectors.
//
// An EIGHT is eight consecutive weights, which stay together in q[4][8][8]. With n = 8, eights 0 to
// 7 of q are the first ones of the 8 groups, eights 8 to 15 the second ones, and so on; with n = 1
// all four are group g's. So eight number t has weights 8*(t/n) .. 8*(t/n) + 7 of group g + t%n.

// first weight of eight t, counted from that of group g; a vector longer than q repeats some
QUANT_INLINE int quant_eight(int t, int n) { return t % n * 32 + t / n % 4 * 8; }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#if defined(QUANT_SCALAR)
enum { QUANT_LANES = 1 };
typedef int quant_v;                                                // codes
QUANT_INLINE quant_v quant_get(QUANT_THREAD const int8_t *q, int n) { return *q; }
QUANT_INLINE void quant_put(QUANT_THREAD int8_t *q, int n, quant_v v) { *q = (int8_t)v; }
QUANT_INLINE quant_v quant_each(int c) { return c; }
QUANT_INLINE quant_v quant_less(quant_v v, int c) { return v - c; }  // v and c in 0..127
QUANT_INLINE quant_v quant_turn(quant_v v, quant_v minus) { return minus ? -v : v; }
// loads eight t from p + block[t] + byte[t]. A block has `size` bytes. If it has 256 weights, the
// loaded field has `field` bytes; if it has fewer, `field` is negative: the field ends at p - field
QUANT_INLINE quant_v quant_load(QUANT_DEVICE const uint8_t *p, QUANT_THREAD const int *block,
                                QUANT_THREAD const int *byte, int field, int size) {
    return p[*block + *byte];
}
// the bit for q[j], as 0 or 255; w[n]: a word for each group, a bit for each of its weights
QUANT_INLINE quant_v quant_where(QUANT_THREAD const uint32_t *w, int j, int n) {
    return w[j / 8 % n] >> (j / 8 / n * 8 + j % 8) & 1 ? 255 : 0;
}
// the field of 2 or 4 bits for q[j]; w[n * bits]: the fields of all weights, in order
QUANT_INLINE quant_v quant_take(QUANT_THREAD const uint32_t *w, int bits, int j, int n) {
    int bit = (quant_eight(j / 8, n) + j % 8) * bits;
    return (int)(w[bit / 32] >> bit % 32 & ((1u << bits) - 1));
}
#elif defined(QUANT_WORDS)
enum { QUANT_LANES = 4 };
typedef uint32_t quant_v __attribute__((may_alias));
QUANT_INLINE quant_v quant_get(QUANT_THREAD const int8_t *q, int n) {
    return *(QUANT_THREAD const quant_v *)q;
}
QUANT_INLINE void quant_put(QUANT_THREAD int8_t *q, int n, quant_v v) {
    *(QUANT_THREAD quant_v *)q = v;
}
QUANT_INLINE quant_v quant_each(int c) { return (uint32_t)(c & 255) * 0x01010101; }
QUANT_INLINE quant_v quant_less(quant_v v, int c) {                 // no byte borrows from the next
    return ((v + 0x80808080) - quant_each(c)) ^ 0x80808080;
}
QUANT_INLINE quant_v quant_turn(quant_v v, quant_v minus) {        // no byte of v is 0
    return (v ^ minus) + (minus & 0x01010101);
}
QUANT_INLINE quant_v quant_load(QUANT_DEVICE const uint8_t *p, QUANT_THREAD const int *block,
                                QUANT_THREAD const int *byte, int field, int size) {
    return quant_word(p + *block, *byte, size, field > 0 || *byte + 4 < -field);
}
QUANT_INLINE quant_v quant_where(QUANT_THREAD const uint32_t *w, int j, int n) {
    uint32_t four = w[j / 8 % n] >> (j / 8 / n * 8 + j % 8) & 15;
    return (four * 0x00204081 & 0x01010101) * 255;                 // bit i moves to bit 8 * i
}
QUANT_INLINE quant_v quant_take(QUANT_THREAD const uint32_t *w, int bits, int j, int n) {
    int bit = (quant_eight(j / 8, n) + j % 8) * bits;
    uint32_t x = w[bit / 32] >> bit % 32 & ((1u << 4 * bits) - 1);
    x = (x | x << (16 - 2 * bits)) & 0x00010001 * ((1u << 2 * bits) - 1);
    return (x | x << (8 - bits)) & 0x01010101 * ((1u << bits) - 1);
}
#endif

#if defined(QUANT_SCALAR) || defined(QUANT_WORDS)
enum { QUANT_EIGHTS = 1, QUANT_SCALES = 1 };
typedef int32_t quant_i;                                            // scales as integers
// v >> s, where a negative s shifts to the left; of that bits to .. to + bits - 1, and zeros
QUANT_INLINE quant_v quant_field(quant_v v, QUANT_THREAD const int *s, int bits, int to) {
    return (v >> (*s + to) & quant_each((1 << bits) - 1)) << to;
}
#if defined(__CUDACC__)
// table[v] of 8 bytes; byte i of __byte_perm(x, y, at) is byte k of x and y, 0..7, where k is
// nibble i of at
QUANT_INLINE quant_v quant_shuffle(const int8_t *table, int, quant_v v) {
    const uint32_t *t = (const uint32_t *)table;
    return __byte_perm(t[0], t[1], __byte_perm(v | v >> 4, 0, 0x4420) & 0x7777);
}
// The same of 16 bytes for two words, woven to eight nibbles. Four of them select from the table's
// first half and from its second; their upper bits, as bit 2 of 0, 1, 2 and 3, say which counts.
QUANT_INLINE void quant_shuffle16(const int8_t *table, quant_v *a, quant_v *b) {
    const uint32_t *t = (const uint32_t *)table;
    uint32_t w = *a | *b << 4, at = w & 0x77777777, x[2];
    uint32_t which = (w >> 1 & 0x44444444) | 0x32103210;
    for (int i = 0; i < 2; i++)
        x[i] = __byte_perm(__byte_perm(t[0], t[1], at >> 16 * i),
                           __byte_perm(t[2], t[3], at >> 16 * i), which >> 16 * i);
    *a = __byte_perm(x[0], x[1], 0x6420);
    *b = __byte_perm(x[0], x[1], 0x7531);
}
#else
QUANT_INLINE quant_v quant_shuffle(QUANT_CONSTANT int8_t *table, int size, quant_v v) {
    uint32_t even = (uint8_t)table[v & 255], odd = 0;             // bytes 0 and 2, 1 and 3
    if (QUANT_LANES == 1) return (quant_v)even;
    even |= (uint32_t)(uint8_t)table[v >> 16 & 255] << 16;
    odd = (uint8_t)table[v >> 8 & 255] | (uint32_t)(uint8_t)table[v >> 24 & 255] << 16;
    return (quant_v)(even | odd << 8);
}
#endif
// the scale of the i-th 16 weights; a byte of lo and hi serves `per` weights, 16 or 32
QUANT_INLINE void quant_widen(QUANT_THREAD quant_i *v, uint64_t lo, uint64_t hi, int per, int i) {
    int k = i * 16 / per;
    *v = (int32_t)((k < 8 ? lo : hi) >> k % 8 * 8 & 255);
}
QUANT_INLINE void quant_put_scale(QUANT_THREAD float *d, QUANT_THREAD const quant_i *v, float D,
                                  int g, int n) {
    *d = (float)*v * D;
}
QUANT_INLINE void quant_put_bits(QUANT_THREAD float *d, QUANT_THREAD const quant_i *v, int g,
                                 int n) {
    *d = quant_from_bits((uint32_t)*v);
}
QUANT_INLINE void quant_halves(QUANT_THREAD float *d, QUANT_DEVICE const uint8_t *p, int size,
                               int n) {
    for (int i = 0; i < 2 * n; i++) d[i] = quant_half(p + i / 2 * size);
}

#else
#if defined(QUANT_AVX512)
enum { QUANT_LANES = 64 };
#elif defined(QUANT_X86)
enum { QUANT_LANES = 32 };
#else
enum { QUANT_LANES = 16 };
#endif
enum { QUANT_EIGHTS = QUANT_LANES / 8, QUANT_SCALES = 16 };
typedef uint8_t quant_v __attribute__((vector_size(QUANT_LANES)));
#define quant_each(c) (uint8_t)(c)
#define quant_less(v, c) ((v) - (uint8_t)(c))
#define quant_turn(v, minus) (((v) ^ (minus)) - (minus))
typedef uint64_t quant_w __attribute__((vector_size(QUANT_LANES)));
typedef uint8_t quant_b __attribute__((vector_size(16)));
typedef int32_t quant_i __attribute__((vector_size(64)));
typedef float quant_f __attribute__((vector_size(64)));
typedef uint64_t quant_u __attribute__((vector_size(16)));
QUANT_INLINE quant_b quant_join(uint64_t lo, uint64_t hi) {
    quant_u both = {lo, hi};
    return (quant_b)both;
}

#if defined(QUANT_AVX512)
// Loads the bytes around the eights, then permutes these to their places. What it loads: a field of
// 64 or 128 bytes as a whole; of small blocks four at once, twice; of others 16 bytes of each.
QUANT_INLINE quant_v quant_load(const uint8_t *p, const int *block, const int *byte, int field,
                                int size) {
    __m512i a = _mm512_setzero_si512(), b = a;
    bool whole = field == 64 || field == 128;
    quant_w at = {0};
    if (field == 32 && byte[0] == byte[1]) return (quant_v)(at + quant_u64(p + byte[0]));
#ifdef __AVX512VBMI__
    if (size <= 18 && block[7] - block[0] == 7 * size) {           // so n is 8, and block[0] is 0
        const uint64_t ones = 0x0101010101010101;
        QUANT_UNROLL for (int t = 0; t < 8; t++)
            at[t] = 0x0706050403020100 + ones * (uint64_t)(block[t] % (block[7] - 56));
        a = _mm512_maskz_permutexvar_epi8(~0ull, (__m512i)at, _mm512_loadu_si512(p + byte[0]));
        b = _mm512_loadu_si512(p + byte[0] + block[7] - 56);        // ends with block 7's eight
        return (quant_v)_mm512_mask_permutexvar_epi8(a, ~0ull << 32, (__m512i)at, b);
    }
#endif
    QUANT_UNROLL for (int t = 0; t < 8; t++)
        at[t] = (uint64_t)(whole ? byte[t] / 8 : t % 4 * 2 + t / 4 * 8 + byte[t] / 8 % 2);
    if (whole) {
        a = _mm512_loadu_si512(p);
        b = _mm512_loadu_si512(p + field - 64);
    } else QUANT_UNROLL for (int t = 0; t < 4; t++) {
        const uint8_t *x = p + block[t] + byte[t] / 16 * 16;
        const uint8_t *y = p + block[t + 4] + byte[t + 4] / 16 * 16;
        __mmask16 to = (__mmask16)(0xffff << 4 * t);
        a = _mm512_mask_broadcast_i32x4(a, to, _mm_loadu_si128((const __m128i *)x));
        b = _mm512_mask_broadcast_i32x4(b, to, _mm_loadu_si128((const __m128i *)y));
    }
    return (quant_v)_mm512_permutex2var_epi64(a, (__m512i)at, b);
}
QUANT_INLINE quant_v quant_pick(quant_v v, quant_v at) {           // v[at] in each 16 bytes
    return (quant_v)_mm512_shuffle_epi8((__m512i)v, (__m512i)at);
}
QUANT_INLINE void quant_widen16(quant_i *v, quant_b b) {
    *v = (quant_i)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)b);
}
QUANT_INLINE void quant_halves8(float *d, quant_b h) {
    __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    __m512 v = _mm512_castps256_ps512(_mm256_cvtph_ps((__m128i)h));
    _mm512_storeu_ps(d, _mm512_maskz_permutexvar_ps(0xffff, twice, v));
}
#elif defined(QUANT_X86)
QUANT_INLINE __m128i quant_pair(const uint8_t *p, int a, int b) {
    if (a == b) return _mm_set1_epi64x((long long)quant_u64(p + a));
    if (b == a + 8) return _mm_loadu_si128((const __m128i *)(p + a));
    return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)(p + a)),
                              _mm_loadl_epi64((const __m128i *)(p + b)));
}
QUANT_INLINE quant_v quant_load(const uint8_t *p, const int *block, const int *byte, int field,
                                int size) {
    return (quant_v)_mm256_set_m128i(quant_pair(p, block[2] + byte[2], block[3] + byte[3]),
                                     quant_pair(p, block[0] + byte[0], block[1] + byte[1]));
}
QUANT_INLINE quant_v quant_pick(quant_v v, quant_v at) {
    return (quant_v)_mm256_shuffle_epi8((__m256i)v, (__m256i)at);
}
QUANT_INLINE void quant_widen16(quant_i *v, quant_b b) {
    __m256i *to = (__m256i *)v;
    _mm256_storeu_si256(to, _mm256_cvtepu8_epi32((__m128i)b));
    _mm256_storeu_si256(to + 1, _mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)b, 8)));
}
QUANT_INLINE void quant_halves8(float *d, quant_b h) {
    _mm256_storeu_ps(d, _mm256_cvtph_ps(_mm_unpacklo_epi16((__m128i)h, (__m128i)h)));
    _mm256_storeu_ps(d + 8, _mm256_cvtph_ps(_mm_unpackhi_epi16((__m128i)h, (__m128i)h)));
}
#else
#if defined(QUANT_NEON)
// Loads the 16 bytes around each eight: they serve two calls, and may hold both eights. Nibbles of
// the same bytes are unpacked here, before 16 become two times 8, and not by quant_field.
QUANT_INLINE quant_v quant_load(const uint8_t *p, const int *block, const int *byte, int field,
                                int size) {
    bool same = block[0] == block[1] && byte[0] == byte[1], nibbles = field < 0 || field == 128;
    uint8x16_t low = vld1q_u8(p + block[0] + byte[0] / 16 * 16);
    uint64x2_t a = vreinterpretq_u64_u8(low);
    uint64x2_t b = vreinterpretq_u64_u8(vld1q_u8(p + block[1] + byte[1] / 16 * 16));
    if (byte[0] % 16 != byte[1] % 16) return (quant_v)a;
    if (same && nibbles) a = (uint64x2_t)(low & 15), b = (uint64x2_t)(low >> 4);
    return (quant_v)(byte[0] % 16 ? vzip2q_u64(a, b) : vzip1q_u64(a, b));
}
QUANT_INLINE quant_v quant_pick(quant_v v, quant_v at) {
    return (quant_v)vqtbl1q_u8((uint8x16_t)v, (uint8x16_t)at);
}
// d[16] = eight numbers, each twice; a conversion costs more than a zip
QUANT_INLINE void quant_put_twice(float *d, float32x4_t a, float32x4_t b) {
    float32x4x2_t twice[2] = {vzipq_f32(a, a), vzipq_f32(b, b)};
    __builtin_memcpy(d, twice, sizeof twice);
}
QUANT_INLINE void quant_halves8(float *d, quant_b h) {
    float16x8_t half = vreinterpretq_f16_u8((uint8x16_t)h);
    quant_put_twice(d, vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half));
}
#else
QUANT_INLINE quant_v quant_load(const uint8_t *p, const int *block, const int *byte, int field,
                                int size) {
    return quant_join(quant_u64(p + block[0] + byte[0]), quant_u64(p + block[1] + byte[1]));
}
static __attribute__((noinline, unused)) quant_v quant_pick(quant_v v, quant_v at) {
    quant_v to = {0};   // not inlined, because gcc would take minutes
    for (int i = 0; i < 16; i++) to[i] = v[at[i]];
    return to;
}
QUANT_INLINE void quant_halves8(float *d, quant_b h) {
    for (int i = 0; i < 16; i++) d[i] = quant_half((const uint8_t *)&h + i / 2 * 2);
}
#endif
QUANT_INLINE void quant_widen16(quant_i *v, quant_b b) {
    for (int i = 0; i < 16; i++) (*v)[i] = b[i];
}
#endif

// Adds a bias to the table that makes it unsigned, and takes it off what was looked up. If a caller
// then adds the same bias, for products of unsigned bytes, the compiler drops both.
QUANT_INLINE quant_v quant_shuffle(const int8_t *table, int size, quant_v v) {
    uint8_t bias = 0;
    quant_v t;
    QUANT_UNROLL for (int i = 0; i < 16; i++) bias = -table[i] > bias ? (uint8_t)-table[i] : bias;
    QUANT_UNROLL for (int i = 0; i < QUANT_LANES; i += 16)
        __builtin_memcpy((char *)&t + i, table, 16);
    return quant_pick(t + bias, v) - bias;
}
QUANT_INLINE quant_v quant_get(const int8_t *q, int n) {
    quant_v v = {0};
    __builtin_memcpy(&v, q, QUANT_LANES < 32 * n ? QUANT_LANES : 32);
    return v;
}
QUANT_INLINE void quant_put(int8_t *q, int n, quant_v v) {
    __builtin_memcpy(q, &v, QUANT_LANES < 32 * n ? QUANT_LANES : 32);
}
#if defined(QUANT_AVX512) && defined(__GFNI__)
// GFNI multiplies an eight's bytes by 8 x 8 bits: row 7 - i makes bit i, by selecting bit i + s
QUANT_INLINE quant_v quant_field(quant_v v, const int *s, int bits, int to) {
    const uint64_t same = 0x0102040810204080, ones = bits < 8 ? (1ull << bits % 8 * 8) - 1 : ~0ull;
    quant_w rows = {0};
    QUANT_UNROLL for (int t = 0; t < 8; t++)
        rows[t] = (s[t] < 0 ? same >> -8 * s[t] : same << 8 * s[t]) & ones << (8 - bits - to) * 8;
    return (quant_v)_mm512_gf2p8affine_epi64_epi8((__m512i)v, (__m512i)rows, 0);
}
#else
QUANT_INLINE quant_v quant_field(quant_v v, const int *s, int bits, int to) {
    quant_w right = {0}, left = {0};
#if defined(QUANT_NEON)   // shifts bytes, so a field that ends its byte needs no mask
    if (s[0] == s[1] && s[0] + to + bits == 8) return v >> (s[0] + to) << to;
    if (bits == 4 && s[0] != s[1]) return v;
#endif
    QUANT_UNROLL for (int t = 0; t < QUANT_EIGHTS; t++) {
        right[t] = (uint64_t)(s[t] > 0 ? s[t] : 0);
        left[t] = (uint64_t)(s[t] < 0 ? -s[t] : 0);
    }
    return (quant_v)((quant_w)v >> right << left) & (uint8_t)(((1 << bits) - 1) << to);
}
#endif
QUANT_INLINE quant_v quant_where(const uint32_t *w, int j, int n) {
    const uint64_t one = 0x0101010101010101, bit = 0x8040201008040201;
    quant_w x = {0}, at = {0}, bits = {0};
    QUANT_UNROLL for (int t = 0; t < QUANT_EIGHTS; t++) {
        x[t] = w[(j / 8 + t) % n];
        at[t] = (uint64_t)((j / 8 + t) / n % 4 + t % 2 * 8) * one;
        bits[t] = bit;
    }
#if defined(QUANT_X86) || defined(QUANT_NEON)
    x = (quant_w)quant_pick((quant_v)x, (quant_v)at);
#else   // a product is faster than a pick of bytes one by one
    QUANT_UNROLL for (int t = 0; t < QUANT_EIGHTS; t++) x[t] = (x[t] >> at[t] % 8 * 8 & 255) * one;
#endif
    return (quant_v)(((quant_v)x & (quant_v)bits) == (quant_v)bits);
}
QUANT_INLINE quant_v quant_take(const uint32_t *w, int bits, int j, int n) {
    quant_w x = {0};                                                // 8 fields in each element
    QUANT_UNROLL for (int t = 0; t < QUANT_EIGHTS; t++) {
        int bit = quant_eight(j / 8 + t, n) * bits;
        x[t] = w[bit / 32] >> bit % 32 & (0xffffffff >> (32 - 8 * bits));
    }
    return (quant_v)QUANT_SPREAD(x, bits);
}

#if defined(QUANT_X86)
QUANT_INLINE quant_b quant_twice(uint64_t s) {
    return (quant_b)_mm_unpacklo_epi8((__m128i)quant_join(s, 0), (__m128i)quant_join(s, 0));
}
#else
QUANT_INLINE quant_b quant_twice(uint64_t s) {
    quant_b twice = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    return quant_pick(quant_join(s, 0), twice);
}
#endif
// Scales cost a decoder more time than codes, so all 16 are converted at once. If n is 1,
// quant_put_bits picks those of group g.
QUANT_INLINE void quant_widen(quant_i *v, uint64_t lo, uint64_t hi, int per, int i) {
    quant_widen16(v, per == 16 ? quant_join(lo, hi) : quant_twice(lo));
}
QUANT_INLINE void quant_put_bits(float *d, const quant_i *v, int g, int n) {
    // stores whole registers: a load of more bytes than one store wrote would have to wait for it
    typedef int32_t part __attribute__((vector_size(QUANT_LANES), aligned(4), may_alias));
    if (n == 8) QUANT_UNROLL for (int i = 0; i < 64 / QUANT_LANES; i++)
        ((part *)d)[i] = ((const part *)v)[i];
    else for (int i = 0; i < 2 * n; i++) d[i] = quant_from_bits((uint32_t)(*v)[2 * g + i]);
}
QUANT_INLINE void quant_put_scale(float *d, const quant_i *v, float D, int g, int n) {
    quant_i bits = (quant_i)(__builtin_convertvector(*v, quant_f) * D);
    quant_put_bits(d, &bits, g, n);
}
QUANT_INLINE void quant_halves(float *d, const uint8_t *p, int size, int n) {
    uint64_t lo = 0, hi = 0;
    if (n == 8) QUANT_UNROLL for (int i = 3; i >= 0; i--) {
        lo = lo << 16 | quant_u16(p + i * size);
        hi = hi << 16 | quant_u16(p + (4 + i) * size);
    }
    if (n == 8) quant_halves8(d, quant_join(lo, hi));
    else for (int i = 0; i < 2 * n; i++) d[i] = quant_half(p + i / 2 * size);
}
#endif
#pragma GCC diagnostic pop

// Unpacks fields of `bits` bits (8: bytes), in runs of `run` bytes, to bit `to` of the codes: 0
// sets codes, more adds bits. A block has `weights` weights, `size` bytes. In Q4_K (run 32, 4 bits)
// a period is 64 weights, and group 3, which begins at weight 96, is the high nibbles of bytes 32..
QUANT_INLINE void quant_fields(QUANT_THREAD int8_t *q, QUANT_DEVICE const uint8_t *p, int size,
                               int weights, int run, int bits, int to, int g, int n) {
    int period = run * 8 / bits, first = (int)(32u * (uint32_t)g % (uint32_t)weights);
    int blocks = weights < 256 ? 32 * g / weights * size : 0;
    int bytes = first / period * run + first % run, shift = first % period / run * bits;
    int left = bytes - weights * bits / 8;
    if (QUANT_LANES <= 4) p += blocks + bytes, blocks = bytes = 0; // large ones look at both
#if defined(QUANT_WORDS)
    if (size % 16 == 0 && run == 32 && bits < 8 && !to && n == 1) { // such fields are aligned, too
        uint32_t w[8];
        quant_four(w, p);
        quant_four(w + 4, p + 16);
        QUANT_UNROLL for (int j = 0; j < 8; j++)
            quant_put(q + 4 * j, n, w[j] >> shift & quant_each((1 << bits) - 1));
        return;
    }
#endif
    QUANT_UNROLL for (int j = 0; j < 32 * n; j += QUANT_LANES) {
        int block[8], byte[8], s[8];
        QUANT_UNROLL for (int t = 0; t < QUANT_EIGHTS; t++) {
            int i = quant_eight(j / 8 + t, n) + j % 8;              // weight, from group g's first
            block[t] = blocks + i / weights * size;
            byte[t] = bytes + i % weights / period * run + i % run;
            s[t] = shift + i % period / run * bits - to;
        }
        quant_v v = quant_load(p, block, byte, weights < 256 ? left : 32 * bits, size);
        if (bits < 8) v = quant_field(v, s, bits, to);
        if (to) v |= quant_get(q + j, n);
        quant_put(q + j, n, v);
    }
}
QUANT_INLINE void quant_subtract(QUANT_THREAD int8_t *q, int c, int n) {
    QUANT_UNROLL for (int j = 0; j < 32 * n; j += QUANT_LANES)
        quant_put(q + j, n, quant_less(quant_get(q + j, n), c));
}
// d = D * (byte - bias); if `per` is 16 weights, lo and hi have 16 bytes, if it is 32, lo has 8
QUANT_INLINE void quant_scales(QUANT_THREAD float *d, float D, uint64_t lo, uint64_t hi, int per,
                               int bias, int g, int n) {
#if defined(QUANT_NEON)   // converts eight, then stores each twice
    if (per == 32 && n == 8) {
        int16x8_t s = (int16x8_t)vmovl_u8(vcreate_u8(lo)) - (int16_t)bias;
        float32x4_t a = vcvtq_f32_s32(vmovl_s16(vget_low_s16(s)));
        float32x4_t b = vcvtq_f32_s32(vmovl_high_s16(s));
        quant_put_twice(d, a * D, b * D);
        return;
    }
#endif
    for (int i = 0; i < 2 * n; i += QUANT_SCALES) {
        quant_i v;
        quant_widen(&v, lo, hi, per, 2 * g + i);
        v -= bias;
        quant_put_scale(d + i, &v, D, g, n);
    }
}
// d = D * scale, m = -M * offset; lo: 4 scales, 4 offsets, and hi: the next; D, M: two halves at p
#if defined(QUANT_AVX512)
QUANT_INLINE void quant_scales_offsets(float *d, float *m, const uint8_t *p, uint64_t lo,
                                       uint64_t hi, int g, int n) {
    __m128i turns = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    __m256i pairs = _mm256_set1_epi32((int)(quant_u32(p) ^ 0x80000000));
    __m512 both = _mm512_maskz_cvtph_ps(0xffff, pairs);
    quant_i v;
    quant_widen16(&v, (quant_b)_mm_shuffle_epi8((__m128i)quant_join(lo, hi), turns));
    both = _mm512_mul_ps(both, (__m512)__builtin_convertvector(v, quant_f));
    quant_i a = (quant_i)_mm512_maskz_moveldup_ps(0xffff, both);
    quant_i b = (quant_i)_mm512_maskz_movehdup_ps(0xffff, both);
    quant_put_bits(d, &a, g, n);
    quant_put_bits(m, &b, g, n);
}
#else
QUANT_INLINE void quant_scales_offsets(QUANT_THREAD float *d, QUANT_THREAD float *m,
                                       QUANT_DEVICE const uint8_t *p, uint64_t lo, uint64_t hi,
                                       int g, int n) {
    quant_scales(d, quant_half(p), (lo & 0xffffffff) | hi << 32, 0, 32, 0, g, n);
    quant_scales(m, -quant_half(p + 2), lo >> 32 | hi >> 32 << 32, 0, 32, 0, g, n);
}
#endif
// ==== first sitting ==============================================================================
// ---- 4. three formats: Q8_0, Q4_0, Q4_K ----

#define QUANT_ARGS(X)                                                                              \
    QUANT_DEVICE const block_##X *b, int g, int n, QUANT_THREAD int8_t *q, QUANT_THREAD float *d
#define QUANT_DECODER(X) QUANT_INLINE void decode_##X(QUANT_ARGS(X), QUANT_THREAD float *m)
// the decoder of a format without offsets: it sets m and calls quant_codes_X, whose body is what
// follows QUANT_SCALED(X) in braces, for q and d
#define QUANT_SCALED(X)                                                                            \
    QUANT_INLINE void quant_codes_##X(QUANT_ARGS(X));                                              \
    QUANT_DECODER(X) {                                                                             \
        for (int i = 0; i < 2 * n; i++) m[i] = -0.0f;                                              \
        quant_codes_##X(b, g, n, q, d);                                                            \
    }                                                                                              \
    QUANT_INLINE void quant_codes_##X(QUANT_ARGS(X))

// Q8_0 ------------------------------------------------------------ 8.5 bits per weight
// 32 weights in 34 bytes:  d f16 | qs[32]
//   w = d * q      q in -128..127, a signed byte
typedef struct { uint8_t d[2], qs[32]; } block_q8_0;
QUANT_SCALED(q8_0) {
    quant_fields(q, b->qs, sizeof *b, 32, 32, 8, 0, g, n);
    quant_halves(d, b[g].d, sizeof *b, n);
}

// Q4_0 ------------------------------------------------------------ 4.5 bits per weight
// 32 weights in 18 bytes:  d f16 | qs[16]
//   w = d * (q - 8)      q in 0..15: run 16: byte j holds weight j (low nibble) and weight j + 16
typedef struct { uint8_t d[2], qs[16]; } block_q4_0;
QUANT_SCALED(q4_0) {
    quant_fields(q, b->qs, sizeof *b, 32, 16, 4, 0, g, n);
    quant_subtract(q, 8, n);
    quant_halves(d, b[g].d, sizeof *b, n);
}

// Q4_K ------------------------------------------------------------ 4.5 bits per weight
// 256 weights in 144 bytes:  d f16 | dmin f16 | scales[12] | qs[128]
//   w = d*sc * q - dmin*mn      q in 0..15: run 32; sc, mn in 0..63, one of each per 32 weights
//   scales: 8 sc and 8 mn of 6 bits, in three rows of four bytes. Byte j of a row, top bits first:
//     bytes 0-3   | 2 top bits of sc[4+j] | 6 bits of sc[j]            |
//     bytes 4-7   | 2 top bits of mn[4+j] | 6 bits of mn[j]            |
//     bytes 8-11  | 4 low bits of mn[4+j] | 4 low bits of sc[4+j]      |
typedef struct { uint8_t d[2], dmin[2], scales[12], qs[128]; } block_q4_K;
// The lowest byte: byte i of word k of the four at p, which are in w. CUDA has loaded them at once;
// elsewhere a byte's own load costs less than a shift.
QUANT_INLINE uint32_t quant_byte(QUANT_THREAD const uint32_t *w, QUANT_DEVICE const uint8_t *p,
                                 int k, int i) {
#if defined(__CUDACC__)
    (void)p;
    return w[k] >> i * 8;
#else
    (void)w;
    return p[4 * k + i];
#endif
}
// d and m of Q4_K and Q5_K from p, the 16 bytes d, dmin and scales: here as the map says, group by
// group, below for all groups at once
#if defined(QUANT_SCALAR) || defined(QUANT_WORDS)
QUANT_INLINE void quant_scales_k(QUANT_THREAD float *d, QUANT_THREAD float *m,
                                 QUANT_DEVICE const uint8_t *p, int g, int n) {
    uint32_t w[4];
    quant_four(w, p);
    for (int i = 0; i < n; i++, g++) {
        uint32_t x = quant_byte(w, p, 1, g % 4), y = quant_byte(w, p, 2, g % 4);
        uint32_t z = quant_byte(w, p, 3, g % 4);
        uint32_t sc = g < 4 ? x & 63 : (z & 15) | (x >> 2 & 48);
        uint32_t mn = g < 4 ? y & 63 : (z >> 4 & 15) | (y >> 2 & 48);
        d[2 * i] = d[2 * i + 1] = (float)(int)sc * quant_f16_to_f32(w[0] & 0xffff);
        m[2 * i] = m[2 * i + 1] = (float)(int)mn * -quant_f16_to_f32(w[0] >> 16);
    }
}
#else
QUANT_INLINE void quant_scales_k(QUANT_THREAD float *d, QUANT_THREAD float *m,
                                 QUANT_DEVICE const uint8_t *p, int g, int n) {
    uint64_t x = quant_word(p, 4, 4, true) | (uint64_t)quant_word(p, 8, 4, true) << 32;
    uint64_t z = quant_word(p, 12, 4, true), nibbles = 0x0f0f0f0f;
    uint64_t low = x & 0x3f3f3f3f3f3f3f3f;                         // sc[0..3], mn[0..3]
    uint64_t high = (z & nibbles) | (z >> 4 & nibbles) << 32 | (x >> 2 & 0x3030303030303030);
    quant_scales_offsets(d, m, p, low, high, g, n);
}
#endif
QUANT_DECODER(q4_K) {
    quant_fields(q, b->qs, sizeof *b, 256, 32, 4, 0, g, n);
    quant_scales_k(d, m, b->d, g, n);
}

// ==== end of the first sitting ===================================================================
// ---- 5. functions for the other formats ----

// puts consecutive fields of 1, 2 or 4 bits of w, lowest first, at bit `to` of the codes
QUANT_INLINE void quant_unpack(QUANT_THREAD int8_t *q, QUANT_THREAD const uint32_t *w, int bits,
                               int to, int n) {
    QUANT_UNROLL for (int j = 0; j < 32 * n; j += QUANT_LANES) {
        quant_v v = bits == 1 ? quant_where(w, j, n) & quant_each(1 << to)
                              : quant_take(w, bits, j, n);
        if (to) v |= quant_get(q + j, n);
        quant_put(q + j, n, v);
    }
}
// q = table[q]; q is less than size, which is 8 or 16
QUANT_INLINE void quant_lookup(QUANT_THREAD int8_t *q, QUANT_CONSTANT int8_t *table, int size,
                               int n) {
#if defined(__CUDACC__)
    if (size == 16) {                                              // n is 1
        QUANT_UNROLL for (int j = 0; j < 16; j += 4)
            quant_shuffle16(table, (quant_v *)(q + j), (quant_v *)(q + j + 16));
        return;
    }
#endif
    QUANT_UNROLL for (int j = 0; j < 32 * n; j += QUANT_LANES)
        quant_put(q + j, n, quant_shuffle(table, size, quant_get(q + j, n)));
}
// q = -q where the weight's bit in w[n] is set: a word for each group
QUANT_INLINE void quant_negate(QUANT_THREAD int8_t *q, QUANT_THREAD const uint32_t *w, int n) {
    QUANT_UNROLL for (int j = 0; j < 32 * n; j += QUANT_LANES)
        quant_put(q + j, n, quant_turn(quant_get(q + j, n), quant_where(w, j, n)));
}
// d = 2^(byte - 128) for each byte of s: half of its E8M0 (MXFP4); 0 and 1 give denormal floats
QUANT_INLINE void quant_e8m0(QUANT_THREAD float *d, uint64_t s, int n) {
    for (int i = 0; i < 2 * n; i += QUANT_SCALES) {
        quant_i e;
        quant_widen(&e, s, 0, 32, i);
        quant_i tiny = (e - 2) >> 31;                              // all ones if e < 2
        e = (tiny & (e + 1) << 21) | (~tiny & ((e << 23) - (1 << 23)));
        quant_put_bits(d + i, &e, 0, n);
    }
}
// d = half the E4M3 (NVFP4) in each byte of lo and hi; as in ggml, bit 7 is ignored and 0x7f is 0
QUANT_INLINE void quant_e4m3(QUANT_THREAD float *d, uint64_t lo, uint64_t hi, int n) {
    for (int i = 0; i < 2 * n; i += QUANT_SCALES) {
        quant_i x;
        quant_widen(&x, lo, hi, 16, i);
        quant_i e = x >> 3 & 15, normal = -e >> 31, zero = ((x ^ 127) - 1) >> 31;
        x = ((x & 7) | (normal & 8)) << (e + normal) & ~zero;      // in units of 2^-10
        quant_put_scale(d + i, &x, 1.0f / 1024, 0, n);
    }
}

// ---- 6. formats of 32 to 128 weights a block ----

// Q4_1 ------------------------------------------------------------ 5 bits per weight
// 32 weights in 20 bytes:  d f16 | m f16 | qs[16]
//   w = d * q + m      q in 0..15: run 16
typedef struct { uint8_t d[2], m[2], qs[16]; } block_q4_1;
QUANT_DECODER(q4_1) {
    quant_fields(q, b->qs, sizeof *b, 32, 16, 4, 0, g, n);
    quant_halves(d, b[g].d, sizeof *b, n);
    quant_halves(m, b[g].m, sizeof *b, n);
}

// Q5_0 ------------------------------------------------------------ 5.5 bits per weight
// 32 weights in 22 bytes:  d f16 | qh[4] | qs[16]
//   w = d * (q - 16)      q in 0..31: low 4 bits in qs, run 16; bit j of qh is bit 4 of weight j
typedef struct { uint8_t d[2], qh[4], qs[16]; } block_q5_0;
QUANT_SCALED(q5_0) {
    uint32_t high[8] = {0};
    for (int i = 0; i < n; i++) high[i] = quant_u32(b[g + i].qh);
    quant_fields(q, b->qs, sizeof *b, 32, 16, 4, 0, g, n);
    quant_unpack(q, high, 1, 4, n);
    quant_subtract(q, 16, n);
    quant_halves(d, b[g].d, sizeof *b, n);
}

// Q5_1 ------------------------------------------------------------ 6 bits per weight
// 32 weights in 24 bytes:  d f16 | m f16 | qh[4] | qs[16]
//   w = d * q + m      q in 0..31, as in Q5_0
typedef struct { uint8_t d[2], m[2], qh[4], qs[16]; } block_q5_1;
QUANT_DECODER(q5_1) {
    uint32_t high[8] = {0};
    for (int i = 0; i < n; i++) high[i] = quant_u32(b[g + i].qh);
    quant_fields(q, b->qs, sizeof *b, 32, 16, 4, 0, g, n);
    quant_unpack(q, high, 1, 4, n);
    quant_halves(d, b[g].d, sizeof *b, n);
    quant_halves(m, b[g].m, sizeof *b, n);
}

// IQ4_NL ---------------------------------------------------------- 4.5 bits per weight
// 32 weights in 18 bytes:  d f16 | qs[16]
//   w = d * table[q]      q in 0..15: run 16; the table is denser around zero, as weights are
QUANT_TABLE int8_t quant_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                    1, 13, 25, 38, 53, 69, 89, 113};
typedef struct { uint8_t d[2], qs[16]; } block_iq4_nl;
QUANT_SCALED(iq4_nl) {
    quant_fields(q, b->qs, sizeof *b, 32, 16, 4, 0, g, n);
    quant_lookup(q, quant_iq4, 16, n);
    quant_halves(d, b[g].d, sizeof *b, n);
}

// MXFP4 ----------------------------------------------------------- 4.25 bits per weight
// 32 weights in 17 bytes:  e | qs[16]
//   w = 2^(e-128) * table[q]      q in 0..15: run 16; e is an E8M0 exponent; table: E2M1 doubled
//   An MLX checkpoint has the same exponents, and its 32 nibbles in order, low ones first. To make
//   it MXFP4 without loss, copy e and move nibbles j and j + 16 to byte j.
QUANT_TABLE int8_t quant_fp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
typedef struct { uint8_t e, qs[16]; } block_mxfp4;
QUANT_SCALED(mxfp4) {
    quant_fields(q, b->qs, sizeof *b, 32, 16, 4, 0, g, n);
    quant_lookup(q, quant_fp4, 16, n);
    uint64_t e = 0;
    QUANT_UNROLL for (int i = n - 1; i >= 0; i--) e = e << 8 | b[g + i].e;
    quant_e8m0(d, e, n);
}

// NVFP4 ----------------------------------------------------------- 4.5 bits per weight
// 64 weights in 36 bytes:  d[4] | qs[32]
//   w = e4m3(d[j])/2 * table[q]      q in 0..15: run 8; j = i/16 for weight i; MXFP4's table
typedef struct { uint8_t d[4], qs[32]; } block_nvfp4;
QUANT_SCALED(nvfp4) {
    uint64_t s[2] = {0, 0};
    QUANT_UNROLL for (int i = 0; i < n; i++)
        s[i / 4] |= (uint64_t)quant_u16(b[(g + i) / 2].d + (g + i) % 2 * 2) << i % 4 * 16;
    quant_fields(q, b->qs, sizeof *b, 64, 8, 4, 0, g, n);
    quant_lookup(q, quant_fp4, 16, n);
    quant_e4m3(d, s[0], s[1], n);
}

// Q1_0 ------------------------------------------------------------ 1.125 bits per weight
// 128 weights in 18 bytes:  d f16 | qs[16]
//   w = d * (2q - 1)      q in 0..1: bit j is weight j
QUANT_TABLE int8_t quant_sign[16] = {-1, 1};
typedef struct { uint8_t d[2], qs[16]; } block_q1_0;
QUANT_SCALED(q1_0) {
    uint32_t w[8] = {0};
    for (int i = 0; i < n; i++) {
        w[i] = quant_u32(b[(g + i) / 4].qs + (g + i) % 4 * 4);
        d[2 * i] = d[2 * i + 1] = quant_half(b[(g + i) / 4].d);
    }
    quant_unpack(q, w, 1, 0, n);
    quant_lookup(q, quant_sign, 8, n);
}

// Q2_0 ------------------------------------------------------------ 2.25 bits per weight
// 64 weights in 18 bytes:  d f16 | qs[16]
//   w = d * (q - 1)      q in 0..3: bits 2j, 2j + 1 of the 128 are weight j
typedef struct { uint8_t d[2], qs[16]; } block_q2_0;
QUANT_SCALED(q2_0) {
    uint32_t w[16] = {0};
    for (int i = 0; i < n; i++) {
        w[2 * i] = quant_u32(b[(g + i) / 2].qs + (g + i) % 2 * 8);
        w[2 * i + 1] = quant_u32(b[(g + i) / 2].qs + (g + i) % 2 * 8 + 4);
        d[2 * i] = d[2 * i + 1] = quant_half(b[(g + i) / 2].d);
    }
    quant_unpack(q, w, 2, 0, n);
    quant_subtract(q, 1, n);
}

// ---- 7. formats of 256 weights a block ----

// Q5_K ------------------------------------------------------------ 5.5 bits per weight
// 256 weights in 176 bytes:  d f16 | dmin f16 | scales[12] | qh[32] | qs[128]
//   w = d*sc * q - dmin*mn      q in 0..31: low 4 bits in qs, high bit in qh, both run 32
//   scales: as in Q4_K
typedef struct { uint8_t d[2], dmin[2], scales[12], qh[32], qs[128]; } block_q5_K;
QUANT_DECODER(q5_K) {
    quant_fields(q, b->qs, sizeof *b, 256, 32, 4, 0, g, n);
    quant_fields(q, b->qh, sizeof *b, 256, 32, 1, 4, g, n);
    quant_scales_k(d, m, b->d, g, n);
}

// Q6_K ------------------------------------------------------------ 6.5625 bits per weight
// 256 weights in 210 bytes:  ql[128] | qh[64] | scales[16] | d f16
//   w = d*sc * (q - 32)      q in 0..63: low 4 bits in ql, run 64, high 2 in qh, run 32
//   sc: a signed byte per 16 weights
typedef struct { uint8_t ql[128], qh[64], scales[16], d[2]; } block_q6_K;
QUANT_SCALED(q6_K) {
    const uint64_t top = 0x8080808080808080;                // flips top bits: signed bytes + 128
    quant_fields(q, b->ql, sizeof *b, 256, 64, 4, 0, g, n);
    quant_fields(q, b->qh, sizeof *b, 256, 32, 2, 4, g, n);
    quant_subtract(q, 32, n);
    quant_scales(d, quant_half(b->d), quant_pairs(b->scales, 0, g, n) ^ top,
                 quant_pairs(b->scales, 8, g, n) ^ top, 16, 128, g, n);
}

// Q2_K ------------------------------------------------------------ 2.625 bits per weight
// 256 weights in 84 bytes:  scales[16] | qs[64] | d f16 | dmin f16
//   w = d*sc * q - dmin*mn      q in 0..3: run 32
//   scales: sc, mn = low, high nibble of a byte per 16 weights
typedef struct { uint8_t scales[16], qs[64], d[2], dmin[2]; } block_q2_K;
QUANT_DECODER(q2_K) {
    const uint64_t low4 = 0x0f0f0f0f0f0f0f0f;
    uint64_t s = quant_pairs(b->scales, 0, g, n), t = quant_pairs(b->scales, 8, g, n);
    quant_fields(q, b->qs, sizeof *b, 256, 32, 2, 0, g, n);
    quant_scales(d, quant_half(b->d), s & low4, t & low4, 16, 0, g, n);
    quant_scales(m, -quant_half(b->dmin), s >> 4 & low4, t >> 4 & low4, 16, 0, g, n);
}

// Q3_K ------------------------------------------------------------ 3.4375 bits per weight
// 256 weights in 110 bytes:  hmask[32] | qs[64] | scales[12] | d f16
//   w = d*(sc-32) * (q - 4)      q in 0..7: low 2 bits in qs, high bit in hmask, both run 32
//   scales: sc in 0..63 per 16 weights: low 4 bits in 8 bytes, run 8; high 2 in the other 4, run 4
typedef struct { uint8_t hmask[32], qs[64], scales[12], d[2]; } block_q3_K;
QUANT_SCALED(q3_K) {
    const uint64_t low4 = 0x0f0f0f0f0f0f0f0f, high2 = 0x3030303030303030;   // a byte for each sc
    uint64_t s = quant_u64(b->scales), z = quant_u32(b->scales + 8);
    quant_fields(q, b->qs, sizeof *b, 256, 32, 2, 0, g, n);
    quant_fields(q, b->hmask, sizeof *b, 256, 32, 1, 2, g, n);
    quant_subtract(q, 4, n);
    quant_scales(d, quant_half(b->d), (s & low4) | ((z << 4 | z << 34) & high2),
                 (s >> 4 & low4) | ((z | z << 30) & high2), 16, 32, g, n);
}

// IQ4_XS ---------------------------------------------------------- 4.25 bits per weight
// 256 weights in 136 bytes:  d f16 | scales_h u16 | scales_l[4] | qs[128]
//   w = d*(sc-32) * table[q]      q in 0..15: run 16; IQ4_NL's table
//   sc in 0..63 per 32 weights: low 4 bits in scales_l, high 2 in scales_h, both in order
typedef struct { uint8_t d[2], scales_h[2], scales_l[4], qs[128]; } block_iq4_xs;
QUANT_SCALED(iq4_xs) {
    quant_fields(q, b->qs, sizeof *b, 256, 16, 4, 0, g, n);
    quant_lookup(q, quant_iq4, 16, n);
    quant_scales(d, quant_half(b->d), quant_spread(quant_u32(b->scales_l), 4) |
                 quant_spread(quant_u16(b->scales_h), 2) << 4, 0, 32, 32, g, n);
}

// TQ2_0 ----------------------------------------------------------- 2.0625 bits per weight
// 256 weights in 66 bytes:  qs[64] | d f16
//   w = d * (q - 1)      q in 0..3: run 32
typedef struct { uint8_t qs[64], d[2]; } block_tq2_0;
QUANT_SCALED(tq2_0) {
    quant_fields(q, b->qs, sizeof *b, 256, 32, 2, 0, g, n);
    quant_subtract(q, 1, n);
    quant_halves(d, b->d, 0, n);
}

// TQ1_0 ----------------------------------------------------------- 1.6875 bits per weight
// 256 weights in 54 bytes:  qs[52] | d f16
//   w = d * (q - 1)      q in 0..2: a byte has five digits to base 3, and is 256 * 0.q0q1q2q3q4,
//   rounded up; so q_k = floor(3 * frac(3^k * byte/256)). Runs have digits instead of bits:
//   run 32 in qs[0..31], run 16 in qs[32..47], and run 4, of only four digits, in qs[48..51]
QUANT_TABLE uint8_t quant_pow3[5] = {1, 3, 9, 27, 81};
#if defined(QUANT_WORDS)
QUANT_INLINE void quant_digits(QUANT_THREAD int8_t *w, QUANT_DEVICE const uint8_t *p, bool last,
                               int power) {
    QUANT_UNROLL for (int j = 0; j < 16; j += 4) {
        uint32_t x = quant_u32(p + (last ? 0 : j));
        uint32_t by = last ? quant_pow3[j / 4] : (uint32_t)power;
        uint32_t even = (x & 0x00ff00ff) * by, odd = (x >> 8 & 0x00ff00ff) * by;
        x = ((even & 0x00ff00ff) * 3 >> 8 & 0x00030003) | ((odd & 0x00ff00ff) * 3 & 0x03000300);
        quant_put(w + j, 1, quant_less(x, 1));
    }
}
#else
QUANT_INLINE int8_t quant_digit(uint8_t x) { return (int8_t)((x > 85) + (x > 170) - 1); }
QUANT_INLINE void quant_digits(int8_t *w, const uint8_t *p, bool last, int power) {
    if (!last) for (int j = 0; j < 16; j++) w[j] = quant_digit((uint8_t)(p[j] * power));
    else for (int j = 0; j < 16; j++) w[j] = quant_digit((uint8_t)(p[j % 4] * quant_pow3[j / 4]));
}
#endif
typedef struct { uint8_t qs[52], d[2]; } block_tq1_0;
QUANT_SCALED(tq1_0) {
    int8_t w[256];                                                  // in order
    for (int i = 0; i < 2 * n; i++) {                               // 16 weights at a time
        int k = 2 * g + i, byte, digit;
        if (k < 10) byte = k % 2 * 16, digit = k / 2;               // run 32
        else if (k < 15) byte = 32, digit = k - 10;                 // run 16
        else byte = 48, digit = 0;                                  // run 4: all its four digits
        quant_digits(w + 16 * i, b->qs + byte, k == 15, quant_pow3[digit]);
    }
    for (int t = 0; t < 4 * n; t++)
        for (int j = 0; j < 8; j++) q[8 * t + j] = w[quant_eight(t, n) + j];
    quant_halves(d, b->d, 0, n);
}

// ---- 8. grids ----
// The grids of the formats with a codebook, as ggml defines them, but packed: weight j of an entry
// is at bits 2j (IQ1, IQ2: 0..2) or 4j (IQ3: 0..7).
// MIT License. Copyright (c) 2023-2026 The ggml authors. The permission notice and the disclaimer
// at the top of this file are this licence's too.

QUANT_TABLE uint16_t quant_grid_iq2_xxs[256] = {
0,2,5,8,10,17,20,32,34,40,42,65,68,80,88,97,100,128,130,138,162,257,260,272,277,320,388,408,512,514,
546,642,1025,1028,1040,1057,1060,1088,1090,1096,1120,1153,1156,1168,1188,1280,1282,1288,1312,1350,
1385,1408,1425,1545,1552,1600,1668,1700,2048,2053,2056,2068,2088,2113,2116,2128,2130,2184,2308,2368,
2562,2580,4097,4100,4112,4129,4160,4192,4228,4240,4245,4352,4360,4384,4432,4442,4480,4644,4677,5120,
5128,5152,5157,5193,5248,5400,5474,5632,5654,6145,6148,6160,6208,6273,6400,6405,6560,6737,8192,8194,
8202,8260,8289,8320,8322,8489,8520,8704,8706,9217,9220,9232,9280,9302,9472,9537,9572,9872,10248,
10272,10388,10820,16385,16388,16400,16408,16417,16420,16448,16456,16470,16480,16513,16516,16528,
16640,16672,16737,16768,16773,16897,16912,16968,16982,17000,17408,17416,17440,17536,17561,17682,
17700,17920,18433,18436,18448,18496,18501,18688,18776,18785,18818,19013,19088,20480,20488,20497,
20505,20512,20608,20616,20740,20802,20900,21137,21648,21650,21770,22017,22100,22528,22545,22553,
22628,22848,23048,24580,24592,24640,24680,24832,24917,25112,25184,25600,25605,25872,25874,25988,
26690,32768,32770,32778,32833,32898,33028,33048,33088,33297,33793,33796,33808,33813,33856,33888,
34048,34118,34196,34313,34368,34400,34818,35076,35345,36868,36880,36900,36928,37025,37142,37248,
37445,37888,37922,37956,38225,39041,39200,40962,41040,41093,41225,41472,42008,43088,43268};
QUANT_TABLE uint16_t quant_grid_iq2_xs[512] = {
0,2,5,8,10,17,20,22,25,32,34,37,40,65,68,70,73,80,82,85,88,97,100,128,130,133,136,145,148,153,160,
257,260,262,265,272,274,277,280,282,289,292,320,322,325,328,337,340,352,360,385,388,400,512,514,517,
520,529,532,544,577,580,592,597,640,650,1025,1028,1030,1033,1040,1042,1045,1048,1057,1060,1088,1090,
1093,1096,1105,1108,1110,1120,1153,1156,1168,1280,1282,1285,1288,1297,1300,1312,1345,1348,1360,1377,
1408,1537,1540,1552,1574,1600,1602,1668,2048,2050,2053,2056,2058,2065,2068,2080,2085,2113,2116,2128,
2136,2176,2208,2218,2305,2308,2320,2368,2433,2441,2560,2592,2600,2710,2720,4097,4100,4102,4105,4112,
4114,4117,4120,4129,4132,4160,4162,4165,4168,4177,4180,4192,4202,4225,4228,4240,4352,4354,4357,4360,
4369,4372,4384,4417,4420,4432,4480,4500,4502,4609,4612,4614,4624,4672,4704,5120,5122,5125,5128,5137,
5140,5152,5185,5188,5193,5200,5220,5248,5377,5380,5392,5440,5632,5652,5705,6145,6148,6160,6162,6208,
6228,6278,6400,6405,6502,6737,6825,8192,8194,8197,8200,8202,8209,8212,8224,8257,8260,8272,8320,8352,
8449,8452,8464,8512,8520,8549,8704,8738,8832,8872,9217,9220,9232,9257,9280,9472,9537,9554,9625,9729,
9754,9894,10240,10248,10250,10272,10325,10376,10402,10600,10640,10760,10784,10882,10888,10890,16385,
16388,16390,16393,16400,16402,16405,16408,16417,16420,16448,16450,16453,16456,16458,16465,16468,
16480,16485,16513,16516,16528,16640,16642,16645,16648,16657,16660,16672,16705,16708,16720,16768,
16773,16802,16897,16900,16912,16914,16937,16960,17408,17410,17413,17416,17425,17428,17433,17440,
17473,17476,17488,17536,17556,17665,17668,17680,17700,17728,17818,17920,17930,17988,18000,18433,
18436,18448,18496,18501,18516,18530,18688,18705,18756,18768,18793,18948,20480,20482,20485,20488,
20497,20500,20512,20520,20545,20548,20560,20608,20737,20740,20752,20757,20800,20802,20992,21060,
21162,21505,21508,21520,21537,21568,21600,21633,21665,21760,21768,21888,21896,22049,22120,22177,
22528,22548,22593,22608,22681,22810,22848,22850,23173,24577,24580,24592,24640,24660,24674,24710,
24745,24832,25124,25162,25234,25600,25622,25872,25920,25925,26020,26625,26730,26917,27142,27220,
27234,32768,32770,32773,32776,32785,32788,32800,32810,32833,32836,32848,32896,32898,32936,32938,
33025,33028,33030,33040,33088,33105,33113,33280,33312,33408,33410,33440,33448,33793,33796,33808,
33810,33813,33856,33888,33929,34048,34116,34213,34328,34410,34816,34824,34853,34906,34944,34946,
34984,35078,35362,35456,35464,35478,35496,36865,36868,36880,36928,36950,36996,37120,37154,37220,
37462,37513,37888,37893,37956,37968,37976,38185,38288,38290,38465,38993,39078,39241,39445,39520,
40960,40962,40968,40970,40992,41002,41120,41297,41305,41382,41472,41474,41480,41514,41600,41632,
42048,42133,42597,42648,43018,43040,43042,43048,43168,43176,43268,43396,43398,43560,43562,43665,
43690};
QUANT_TABLE uint16_t quant_grid_iq2_s[1024] = {
0,2,5,8,10,17,20,22,25,32,34,37,40,65,68,70,73,80,82,85,88,97,100,102,105,128,130,133,136,145,148,
160,165,170,257,260,262,265,272,274,277,280,289,292,320,322,325,328,337,340,342,345,352,357,360,385,
388,400,402,405,417,420,512,514,517,520,529,532,544,554,577,580,582,585,592,597,640,645,650,660,674,
1025,1028,1030,1033,1040,1042,1045,1048,1057,1060,1062,1065,1088,1090,1093,1096,1098,1105,1108,1110,
1113,1120,1122,1125,1153,1156,1158,1161,1168,1173,1176,1185,1188,1280,1282,1285,1288,1290,1297,1300,
1302,1305,1312,1317,1320,1345,1348,1350,1353,1360,1362,1365,1368,1377,1380,1408,1410,1413,1416,1425,
1428,1440,1537,1540,1542,1545,1552,1557,1600,1605,1608,1617,1620,1632,1665,1668,1680,2048,2050,2053,
2056,2065,2068,2070,2073,2080,2085,2090,2113,2116,2118,2121,2128,2130,2133,2136,2145,2148,2176,2181,
2196,2218,2305,2308,2320,2322,2325,2328,2337,2368,2373,2376,2385,2388,2400,2433,2448,2560,2577,2580,
2594,2600,2602,2640,2713,4097,4100,4102,4105,4112,4114,4117,4120,4129,4132,4134,4160,4162,4165,4168,
4177,4180,4182,4185,4192,4194,4197,4200,4225,4228,4230,4240,4245,4248,4257,4260,4352,4354,4357,4360,
4362,4369,4372,4374,4377,4384,4386,4389,4392,4417,4420,4422,4425,4432,4434,4437,4440,4449,4452,4480,
4482,4485,4488,4497,4500,4609,4612,4617,4624,4629,4641,4644,4672,4677,4689,4692,4737,4740,4752,5120,
5122,5125,5128,5137,5140,5142,5145,5152,5157,5160,5185,5188,5190,5193,5200,5202,5205,5208,5217,5220,
5248,5250,5253,5256,5265,5268,5280,5377,5380,5382,5385,5392,5394,5397,5400,5409,5412,5440,5442,5445,
5448,5457,5460,5472,5505,5508,5520,5632,5637,5640,5649,5652,5664,5697,5700,5712,5760,5802,6145,6148,
6150,6153,6160,6165,6168,6177,6208,6210,6213,6216,6225,6228,6240,6273,6276,6400,6402,6405,6408,6417,
6420,6432,6465,6468,6480,6505,6562,6660,6672,6720,6742,8192,8194,8197,8200,8209,8212,8214,8217,8224,
8229,8234,8257,8260,8272,8274,8277,8292,8320,8330,8340,8362,8449,8452,8464,8466,8469,8481,8512,8514,
8517,8529,8532,8544,8577,8580,8592,8704,8714,8738,8744,8746,8772,8784,8840,8842,8872,9217,9220,9222,
9225,9232,9237,9240,9249,9252,9280,9282,9285,9288,9297,9300,9312,9345,9348,9360,9472,9477,9480,9489,
9492,9504,9537,9540,9552,9574,9600,9729,9732,9744,9792,9817,10240,10245,10257,10260,10305,10308,
10320,10378,10410,10497,10500,10512,10645,10762,10786,10852,10888,10890,16385,16388,16390,16393,
16400,16402,16405,16408,16410,16417,16420,16422,16448,16450,16453,16456,16458,16465,16468,16470,
16473,16480,16482,16485,16513,16516,16528,16533,16536,16545,16548,16640,16642,16645,16648,16657,
16660,16662,16665,16672,16674,16677,16705,16708,16710,16713,16720,16722,16725,16728,16737,16740,
16768,16770,16773,16776,16785,16788,16800,16897,16900,16912,16914,16917,16920,16932,16960,16965,
16968,16977,16980,16992,17025,17028,17408,17410,17413,17416,17418,17425,17428,17430,17433,17440,
17442,17445,17448,17473,17476,17478,17481,17488,17490,17493,17496,17505,17508,17536,17538,17541,
17544,17553,17556,17568,17665,17668,17670,17673,17680,17682,17685,17688,17697,17700,17728,17730,
17733,17736,17745,17748,17760,17770,17793,17796,17808,17920,17922,17925,17928,17937,17940,17952,
17985,17988,18000,18048,18085,18433,18436,18441,18448,18450,18453,18456,18465,18468,18496,18498,
18501,18504,18513,18516,18528,18564,18576,18688,18690,18693,18696,18705,18708,18720,18753,18756,
18768,18816,18838,18945,18948,18960,19008,20480,20482,20485,20488,20497,20500,20502,20505,20512,
20514,20517,20520,20545,20548,20550,20553,20560,20562,20565,20568,20577,20580,20608,20610,20613,
20616,20625,20628,20737,20740,20742,20745,20752,20754,20757,20760,20769,20772,20800,20802,20805,
20808,20817,20820,20832,20865,20868,20880,20992,20997,21000,21009,21012,21024,21057,21060,21072,
21097,21120,21505,21508,21510,21513,21520,21522,21525,21528,21537,21540,21568,21570,21573,21576,
21585,21588,21600,21633,21636,21648,21760,21762,21765,21768,21777,21780,21792,21825,21828,21840,
21888,22017,22020,22032,22054,22080,22528,22530,22533,22536,22545,22548,22560,22593,22596,22608,
22618,22656,22785,22788,22800,22848,23040,23065,23173,23208,24577,24580,24582,24592,24594,24597,
24600,24609,24612,24640,24645,24648,24657,24660,24672,24708,24720,24832,24834,24837,24840,24849,
24852,24864,24897,24900,24912,24960,24985,25092,25104,25152,25174,25249,25600,25605,25608,25617,
25620,25632,25665,25668,25680,25728,25857,25860,25872,25920,25930,25960,26002,26112,26260,26625,
26628,26640,26725,26776,26880,26922,27202,27297,32768,32770,32773,32776,32785,32788,32793,32800,
32805,32833,32836,32848,32850,32853,32856,32865,32896,32901,32913,32916,33025,33028,33033,33040,
33042,33045,33048,33057,33060,33088,33090,33093,33096,33105,33108,33153,33156,33168,33193,33280,
33285,33290,33297,33300,33345,33348,33360,33793,33796,33798,33801,33808,33810,33813,33816,33825,
33856,33858,33861,33864,33873,33876,33888,33921,33924,33936,34048,34050,34053,34056,34065,34068,
34080,34113,34116,34128,34176,34186,34305,34308,34320,34345,34368,34816,34821,34833,34836,34881,
34884,34896,34978,35073,35076,35136,35173,35362,35416,35418,35458,35490,36865,36868,36873,36880,
36882,36885,36888,36900,36928,36930,36933,36936,36945,36948,36960,36993,36996,37008,37120,37125,
37137,37140,37185,37188,37200,37210,37377,37380,37392,37440,37542,37888,37890,37893,37896,37905,
37908,37920,37953,37956,37968,38016,38038,38145,38148,38160,38208,38296,38305,38400,38470,38500,
38913,38916,38928,38950,38976,39081,39168,39241,39250,39568,40960,40965,40970,40980,40994,41002,
41025,41028,41040,41122,41130,41280,41317,41474,41482,41506,41512,41514,41602,41608,41610,41640,
41985,41988,42000,42048,42121,42148,42240,42265,42577,43018,43048,43170,43348,43398,43528,43530,
43552,43554,43560,43656,43690};
QUANT_TABLE uint16_t quant_grid_iq3_xxs[256] = {
0,2,4,17,19,23,32,34,49,66,115,117,257,259,272,274,289,293,304,306,321,340,368,512,514,516,529,544,
546,561,563,567,593,599,629,769,775,784,786,805,880,1043,1079,1092,1111,1139,1141,1281,1287,1330,
1362,1589,1636,1808,1812,1814,1859,1889,4097,4099,4112,4114,4129,4131,4144,4146,4148,4167,4176,4352,
4354,4369,4384,4386,4609,4611,4624,4626,4641,4656,4722,4864,4866,4896,4913,4934,4966,5121,5125,5200,
5408,5412,5446,5489,5637,5922,5952,8192,8194,8209,8211,8224,8226,8230,8241,8258,8449,8451,8453,8464,
8466,8481,8496,8547,8551,8560,8704,8706,8721,8727,8736,8738,8759,8768,8789,8961,8976,8980,9072,9076,
9269,9299,9475,9511,9537,9588,9985,9987,10006,10053,12289,12304,12306,12321,12323,12368,12389,12402,
12544,12546,12576,12593,12612,12614,12801,12803,12816,12837,12882,12914,13073,13107,13360,13383,
13426,13568,13574,13602,13653,13844,13878,13923,14131,14176,16388,16407,16437,16439,16467,16471,
16756,16928,16951,16960,16992,16998,17159,17221,17412,17489,17508,17701,17731,17776,18181,18192,
18194,18224,20498,20545,20592,20736,20742,20774,20821,21012,21042,21106,21250,21331,21520,21539,
21543,21618,21762,21809,22096,22308,22338,24612,24644,24646,24676,24865,24929,25111,25188,25392,
25398,25668,25861,25938,26163,26371,26401,28675,28677,28679,28688,28722,28754,28966,28992,29202,
29253,29266,29440,29461,29491,29536,29729,29761,29952,29954,29988,30256};
QUANT_TABLE uint16_t quant_grid_iq3_s[512] = {
0,1,2,5,7,16,17,18,20,22,32,33,37,51,64,66,69,71,81,83,96,98,113,116,119,256,257,258,260,272,273,
277,288,291,295,305,309,324,353,357,370,512,513,517,519,528,531,534,545,549,560,564,578,581,583,593,
595,624,627,771,785,789,800,802,817,819,822,836,848,850,871,881,885,1024,1043,1047,1057,1060,1074,
1088,1091,1105,1136,1282,1284,1312,1314,1318,1331,1345,1349,1351,1382,1395,1542,1553,1555,1585,1618,
1649,1792,1794,1796,1824,1826,1830,1843,1872,1876,4096,4097,4098,4100,4112,4113,4115,4117,4119,4128,
4130,4145,4148,4150,4180,4182,4193,4210,4352,4353,4355,4358,4368,4372,4385,4400,4403,4417,4432,4434,
4464,4470,4608,4626,4629,4631,4640,4644,4658,4672,4675,4693,4704,4722,4865,4868,4871,4880,4883,4897,
4903,4912,4916,4929,4962,4976,5123,5125,5138,5140,5169,5171,5186,5190,5200,5204,5377,5392,5395,5409,
5424,5426,5457,5664,5668,5671,5700,5702,5889,5891,5904,5906,5921,5941,5953,5986,6000,8192,8193,8195,
8197,8199,8208,8210,8212,8214,8225,8227,8231,8240,8242,8257,8259,8261,8272,8274,8295,8304,8307,8309,
8448,8450,8464,8467,8471,8482,8485,8497,8500,8514,8529,8705,8708,8711,8737,8739,8752,8759,8769,8787,
8791,8817,8820,8960,8962,8965,8977,8994,8996,9009,9011,9026,9040,9062,9217,9223,9248,9251,9266,9269,
9281,9330,9333,9476,9489,9506,9527,9536,9555,9584,9728,9730,9735,9761,9813,9825,9989,10001,10022,
10032,10051,10064,12290,12305,12307,12309,12311,12322,12337,12339,12341,12354,12356,12359,12369,
12387,12401,12545,12547,12549,12564,12577,12579,12608,12640,12658,12662,12800,12818,12832,12850,
12852,12880,13057,13072,13076,13089,13091,13095,13104,13121,13123,13127,13141,13171,13315,13329,
13334,13346,13361,13394,13408,13412,13569,13584,13586,13605,13618,13636,13654,13683,13846,13889,
14081,14083,14112,14114,14133,16384,16388,16402,16416,16420,16423,16434,16449,16464,16496,16642,
16647,16657,16659,16674,16688,16693,16707,16721,16725,16897,16899,16912,16917,16929,16947,16960,
16983,16994,17008,17156,17169,17171,17184,17186,17201,17205,17408,17410,17444,17463,17472,17521,
17669,17671,17697,17762,17939,17972,18016,18192,18197,18224,18243,18257,20482,20496,20500,20514,
20544,20548,20551,20562,20582,20596,20737,20739,20741,20754,20769,20786,20850,20992,21009,21027,
21040,21046,21075,21250,21255,21264,21287,21316,21329,21349,21363,21505,21508,21536,21554,21574,
21778,21798,21841,21843,22082,22274,22276,22306,24593,24595,24597,24625,24627,24672,24832,24864,
24871,24932,25106,25140,25154,25173,25186,25200,25344,25364,25377,25408,25637,25667,25698,25856,
25859,25908,25952,26117,26176,26385,26387,28672,28676,28679,28704,28706,28726,28736,28756,28770,
28930,28945,28964,28995,28997,29185,29188,29200,29206,29217,29232,29265,29442,29490,29493,29523,
29697,29701,29715,29728,29776,29986,30018,30210,30257,30464};
QUANT_TABLE uint16_t quant_grid_iq1[2048] = {
0,2,5,8,10,17,21,32,34,40,42,69,81,84,86,101,128,130,136,138,149,160,162,168,170,260,261,273,276,
278,281,282,293,321,326,329,338,341,346,353,356,358,360,389,401,404,406,421,512,514,520,522,533,544,
546,552,554,581,593,601,612,617,640,642,648,650,657,661,665,672,674,680,682,1041,1044,1046,1061,
1089,1097,1109,1114,1124,1125,1169,1177,1189,1281,1284,1285,1286,1301,1304,1306,1321,1344,1349,1354,
1360,1361,1364,1365,1366,1369,1376,1378,1381,1384,1386,1409,1425,1429,1432,1434,1441,1444,1445,1446,
1449,1556,1561,1601,1604,1616,1618,1621,1624,1632,1633,1638,1641,1669,1681,1684,1689,2048,2050,2056,
2058,2069,2080,2082,2088,2090,2117,2129,2134,2149,2176,2178,2184,2186,2197,2208,2210,2216,2218,2309,
2321,2324,2329,2340,2341,2369,2384,2385,2389,2401,2404,2409,2449,2452,2454,2457,2469,2560,2562,2568,
2570,2581,2592,2594,2600,2602,2629,2641,2649,2657,2661,2688,2690,2693,2696,2698,2709,2720,2722,2728,
2730,4112,4113,4116,4121,4132,4133,4161,4164,4176,4181,4184,4193,4196,4197,4201,4241,4244,4246,4257,
4261,4353,4356,4358,4361,4368,4370,4373,4376,4385,4388,4393,4421,4426,4432,4433,4434,4436,4437,4438,
4441,4448,4453,4484,4498,4501,4513,4516,4625,4628,4630,4645,4672,4678,4681,4690,4693,4696,4698,4708,
4710,4741,4753,4756,4758,4773,5121,5126,5129,5140,5141,5144,5145,5153,5158,5185,5189,5190,5192,5194,
5201,5204,5205,5206,5209,5218,5221,5224,5252,5257,5264,5268,5269,5272,5273,5274,5281,5284,5285,5289,
5378,5381,5386,5393,5396,5397,5398,5401,5408,5410,5413,5416,5418,5441,5444,5445,5446,5457,5458,5460,
5461,5462,5465,5466,5473,5476,5477,5478,5481,5504,5506,5508,5509,5512,5514,5520,5521,5524,5525,5526,
5529,5530,5536,5538,5541,5633,5636,5637,5638,5653,5654,5656,5658,5665,5670,5696,5698,5700,5701,5704,
5706,5713,5717,5718,5720,5721,5729,5732,5733,5736,5737,5738,5766,5770,5778,5781,5796,5801,6161,6166,
6181,6209,6212,6214,6217,6224,6229,6232,6234,6240,6241,6244,6246,6249,6277,6289,6292,6309,6416,6418,
6421,6426,6433,6437,6466,6468,6469,6472,6481,6484,6485,6486,6489,6490,6496,6501,6506,6537,6545,6546,
6549,6552,6561,6566,6569,6665,6678,6692,6694,6724,6726,6729,6736,6738,6741,6744,6753,6758,6761,6789,
6801,6806,6810,8192,8194,8200,8202,8213,8224,8226,8229,8232,8234,8261,8273,8281,8289,8293,8320,8322,
8328,8330,8341,8352,8354,8357,8360,8362,8453,8465,8468,8473,8485,8514,8516,8521,8533,8536,8538,8545,
8548,8549,8550,8581,8592,8598,8601,8613,8705,8712,8714,8721,8725,8736,8738,8744,8746,8773,8785,8790,
8793,8805,8833,8840,8842,8849,8853,8864,8866,8872,8874,9221,9236,9238,9241,9253,9284,9285,9286,9289,
9298,9301,9304,9306,9318,9349,9361,9364,9369,9377,9381,9481,9493,9505,9513,9536,9541,9544,9553,9556,
9557,9561,9570,9573,9576,9609,9616,9620,9621,9624,9626,9633,9636,9638,9641,9733,9744,9746,9753,9765,
9793,9801,9813,9824,9825,9833,9860,9862,9872,9882,10240,10242,10248,10250,10261,10272,10274,10280,
10282,10309,10321,10324,10341,10368,10370,10376,10378,10400,10402,10408,10410,10505,10513,10516,
10521,10533,10566,10569,10578,10581,10593,10596,10598,10601,10629,10640,10646,10649,10660,10661,
10752,10754,10760,10762,10784,10786,10792,10794,10821,10833,10838,10841,10853,10880,10882,10888,
10890,10901,10912,10914,10920,10922,16389,16401,16406,16421,16457,16466,16469,16472,16474,16481,
16484,16486,16532,16537,16545,16550,16640,16641,16644,16646,16649,16658,16661,16662,16664,16666,
16673,16678,16681,16709,16712,16714,16721,16724,16725,16726,16729,16730,16741,16744,16746,16769,
16772,16774,16784,16786,16789,16800,16801,16802,16901,16913,16916,16918,16933,16961,16978,16981,
16986,16996,17001,17033,17044,17061,17409,17429,17433,17449,17477,17480,17482,17489,17492,17493,
17494,17505,17506,17509,17512,17514,17537,17542,17545,17552,17554,17557,17568,17569,17577,17665,
17666,17669,17674,17681,17684,17685,17686,17689,17696,17701,17706,17729,17732,17733,17734,17737,
17744,17745,17748,17749,17750,17752,17753,17761,17764,17765,17766,17769,17794,17796,17797,17800,
17809,17812,17813,17814,17817,17818,17829,17832,17834,17921,17925,17929,17940,17941,17944,17946,
17953,17956,17961,17984,17986,17989,17992,18000,18001,18002,18005,18006,18009,18018,18021,18024,
18049,18053,18058,18068,18069,18081,18084,18086,18437,18449,18453,18458,18469,18498,18505,18512,
18517,18520,18529,18532,18534,18537,18565,18577,18580,18582,18585,18597,18689,18693,18694,18698,
18704,18708,18709,18712,18721,18724,18726,18752,18757,18762,18769,18770,18772,18773,18774,18777,
18784,18786,18789,18790,18794,18822,18825,18834,18837,18838,18840,18849,18852,18854,18857,18966,
19012,19014,19017,19029,19032,19034,19044,19049,19092,19109,20481,20484,20485,20486,20489,20498,
20501,20506,20513,20516,20521,20544,20549,20552,20561,20564,20565,20566,20569,20581,20584,20614,
20617,20629,20632,20640,20641,20646,20649,20741,20744,20745,20746,20753,20756,20757,20758,20760,
20761,20768,20773,20774,20776,20778,20801,20804,20805,20806,20809,20816,20817,20818,20820,20821,
20822,20824,20825,20826,20833,20836,20837,20838,20841,20866,20869,20881,20884,20885,20886,20889,
20896,20901,20906,20993,20998,21010,21013,21018,21025,21028,21058,21061,21066,21073,21076,21077,
21078,21081,21090,21093,21125,21136,21138,21141,21145,21146,21156,21508,21509,21521,21524,21525,
21526,21528,21529,21537,21541,21544,21546,21569,21572,21573,21574,21577,21578,21584,21585,21588,
21589,21590,21592,21593,21594,21601,21602,21604,21605,21606,21609,21632,21640,21642,21649,21652,
21653,21654,21657,21665,21668,21669,21674,21761,21762,21764,21765,21766,21769,21776,21777,21778,
21780,21781,21782,21785,21786,21793,21796,21797,21798,21801,21824,21825,21826,21828,21829,21830,
21832,21833,21840,21841,21842,21844,21845,21846,21848,21849,21850,21856,21857,21860,21861,21862,
21864,21865,21866,21889,21892,21893,21897,21898,21904,21905,21908,21909,21910,21912,21913,21921,
21924,21925,21926,21929,22016,22017,22018,22020,22022,22024,22025,22033,22036,22037,22040,22041,
22048,22049,22050,22052,22053,22054,22056,22057,22081,22085,22086,22088,22089,22090,22096,22097,
22098,22100,22101,22102,22104,22105,22106,22113,22116,22117,22121,22146,22149,22150,22152,22153,
22154,22161,22165,22170,22178,22181,22182,22184,22185,22532,22533,22534,22537,22544,22549,22552,
22561,22570,22597,22600,22602,22609,22612,22613,22614,22616,22617,22624,22626,22628,22629,22658,
22665,22672,22674,22677,22680,22689,22697,22785,22786,22789,22794,22801,22804,22805,22806,22809,
22821,22849,22852,22853,22854,22857,22864,22865,22866,22868,22869,22870,22872,22873,22874,22881,
22884,22885,22886,22889,22913,22917,22921,22929,22932,22933,22934,22936,22937,22949,23044,23048,
23061,23066,23072,23077,23078,23081,23109,23112,23113,23121,23125,23126,23128,23129,23138,23141,
23144,23146,23169,23178,23186,23189,23190,23192,23194,23201,24581,24596,24598,24601,24613,24644,
24656,24661,24662,24664,24666,24673,24676,24678,24681,24705,24726,24741,24833,24836,24838,24841,
24850,24853,24865,24866,24870,24873,24901,24905,24913,24917,24918,24921,24933,24934,24938,24964,
24970,24978,24981,24993,24998,25001,25105,25110,25113,25152,25153,25158,25173,25174,25176,25184,
25221,25233,25238,25253,25617,25618,25621,25622,25626,25633,25638,25641,25664,25666,25669,25672,
25674,25681,25684,25685,25686,25689,25690,25696,25698,25701,25732,25733,25737,25744,25746,25748,
25749,25750,25752,25754,25761,25764,25769,25861,25864,25866,25873,25877,25878,25881,25924,25925,
25926,25929,25936,25937,25940,25941,25942,25945,25953,25956,25957,25958,25961,25990,25993,25994,
26001,26005,26006,26009,26010,26018,26021,26022,26024,26114,26121,26133,26144,26150,26152,26153,
26176,26181,26184,26186,26193,26196,26197,26198,26200,26202,26208,26213,26216,26240,26242,26245,
26250,26260,26262,26264,26265,26272,26276,26278,26282,26646,26649,26661,26689,26706,26709,26714,
26721,26729,26757,26769,26776,26790,26881,26884,26896,26901,26913,26916,26918,26921,26944,26945,
26949,26950,26952,26961,26964,26965,26966,26969,26976,26981,26986,27010,27012,27018,27029,27041,
27044,27045,27049,27153,27158,27160,27201,27204,27209,27216,27221,27224,27226,27236,27237,27241,
27270,27284,27288,27290,27302,32768,32770,32776,32778,32800,32802,32808,32810,32837,32848,32849,
32852,32854,32857,32869,32896,32898,32904,32906,32917,32928,32930,32936,32938,33029,33041,33044,
33046,33049,33061,33089,33092,33097,33104,33106,33109,33110,33112,33113,33124,33126,33129,33157,
33161,33172,33174,33177,33189,33280,33282,33288,33290,33301,33312,33314,33320,33322,33361,33364,
33369,33381,33408,33410,33416,33418,33429,33440,33442,33448,33450,33812,33817,33857,33860,33873,
33877,33882,33889,33892,33897,33940,33945,34049,34057,34066,34069,34074,34086,34089,34112,34113,
34117,34120,34129,34132,34133,34134,34137,34138,34149,34150,34152,34154,34177,34180,34182,34185,
34192,34194,34197,34200,34214,34321,34326,34329,34341,34369,34372,34377,34378,34384,34389,34393,
34394,34401,34406,34410,34437,34449,34458,34468,34816,34818,34824,34826,34837,34848,34850,34856,
34858,34881,34885,34897,34900,34905,34917,34921,34944,34946,34952,34954,34965,34976,34978,34984,
34986,35077,35078,35089,35092,35094,35109,35137,35140,35142,35145,35152,35154,35157,35162,35169,
35172,35205,35222,35225,35237,35328,35330,35336,35338,35349,35360,35362,35368,35370,35397,35409,
35412,35414,35456,35458,35464,35466,35477,35488,35490,35496,35498,36869,36881,36886,36888,36889,
36901,36929,36934,36937,36949,36952,36954,36969,36970,36997,37009,37012,37014,37017,37029,37121,
37124,37126,37129,37136,37141,37144,37146,37153,37156,37158,37161,37184,37189,37200,37201,37204,
37205,37206,37209,37218,37221,37252,37254,37266,37269,37272,37281,37284,37286,37289,37381,37393,
37396,37401,37413,37444,37446,37449,37456,37458,37461,37464,37478,37481,37509,37524,37526,37545,
37889,37892,37894,37904,37909,37912,37926,37952,37962,37969,37972,37973,37974,37976,37977,37984,
37985,37986,37989,38020,38022,38034,38036,38037,38040,38049,38057,38144,38149,38152,38154,38160,
38161,38164,38165,38166,38169,38177,38181,38185,38186,38209,38212,38213,38214,38217,38224,38225,
38226,38228,38229,38230,38232,38233,38234,38241,38244,38245,38246,38249,38273,38277,38280,38289,
38290,38292,38293,38294,38297,38298,38304,38306,38309,38312,38314,38401,38404,38416,38421,38425,
38432,38438,38441,38469,38472,38473,38481,38482,38485,38486,38489,38501,38504,38530,38532,38537,
38538,38546,38548,38549,38564,38566,38569,38917,38934,38937,38949,38977,38982,38992,38994,38997,
38998,39002,39012,39013,39045,39057,39062,39065,39077,39172,39174,39177,39184,39186,39189,39192,
39194,39200,39201,39204,39206,39232,39234,39237,39240,39242,39249,39252,39253,39254,39257,39266,
39269,39270,39274,39297,39300,39312,39314,39317,39322,39329,39334,39429,39445,39461,39492,39494,
39497,39504,39509,39512,39521,39557,39569,39572,39573,39574,40960,40962,40968,40970,40981,40992,
40994,41000,41002,41029,41041,41044,41046,41049,41088,41090,41096,41098,41109,41120,41122,41128,
41130,41221,41225,41233,41236,41238,41241,41242,41286,41289,41297,41301,41304,41306,41313,41316,
41349,41360,41362,41366,41369,41474,41480,41482,41488,41497,41506,41512,41514,41541,41553,41558,
41561,41573,41600,41602,41608,41610,41621,41632,41634,41640,41642,42009,42021,42049,42052,42064,
42068,42069,42072,42074,42081,42085,42086,42088,42089,42117,42246,42249,42256,42258,42261,42264,
42278,42281,42306,42309,42321,42324,42325,42326,42329,42341,42346,42369,42372,42373,42374,42377,
42386,42389,42392,42501,42513,42518,42522,42529,42533,42564,42566,42570,42578,42581,42582,42584,
42592,42594,42630,42640,42645,42646,42649,42657,42660,42662,43008,43010,43016,43018,43040,43042,
43048,43050,43089,43092,43094,43097,43136,43138,43144,43146,43157,43168,43170,43176,43178,43269,
43284,43289,43297,43301,43329,43344,43349,43354,43361,43366,43369,43408,43414,43520,43522,43528,
43530,43552,43554,43560,43562,43601,43604,43606,43648,43650,43656,43658,43669,43680,43682,43688,
43690};

// ---- 9. formats with a codebook ----
// Eight weights (IQ1, IQ2) or four (IQ3) are stored as one index into a grid of frequent patterns.
// An entry of the grid has a field of 2 or 4 bits for each of them, the index of a value in a small
// table. So a group is 2 or 4 words of fields. IQ2 and IQ3 also have a bit for each weight's sign.

// IQ2_XXS, IQ2_XS, IQ3_XXS: 4 x 7 sign bits to 4 x 8; bit 7 makes the number of ones even
QUANT_INLINE uint32_t quant_even_signs(uint32_t x) {
    uint32_t s = (x & 0x7f) | (x << 1 & 0x7f00) | (x << 2 & 0x7f0000) | (x << 3 & 0x7f000000);
    uint32_t odd = s ^ s >> 4;
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return s | (odd & 0x01010101) << 7;
}

QUANT_TABLE int8_t quant_iq2[16] = {8, 25, 43};
QUANT_TABLE int8_t quant_iq3_xxs[16] = {4, 12, 20, 28, 36, 44, 52, 62};
QUANT_TABLE int8_t quant_iq3_s[16] = {1, 3, 5, 7, 9, 11, 13, 15};
QUANT_TABLE int8_t quant_iq1[16] = {-7, 1, 9, 0, -9, -1, 7};        // s = 1, then s = -1

// w[count / 2] = two grid entries in each word. The index of entry k is the byte p[k], and above it
// the bits that `mask` selects from h << 8 >> step * k.
QUANT_INLINE void quant_entries(QUANT_THREAD uint32_t *w, QUANT_CONSTANT uint16_t *grid, int count,
                                QUANT_DEVICE const uint8_t *p, uint32_t h, int step,
                                uint32_t mask) {
    QUANT_UNROLL for (int k = 0; k < count; k += 2)
        w[k / 2] = grid[p[k] | (h << 8 >> step * k & mask)] |
                   (uint32_t)grid[p[k + 1] | (h << 8 >> step * (k + 1) & mask)] << 16;
}
QUANT_INLINE void quant_codebook(QUANT_THREAD int8_t *q, QUANT_THREAD const uint32_t *w, int bits,
                                 QUANT_CONSTANT int8_t *table,
                                 QUANT_THREAD const uint32_t *sign, int n) {
    quant_unpack(q, w, bits, 0, n);
    quant_lookup(q, table, 8, n);
    quant_negate(q, sign, n);
}

// IQ2_XXS --------------------------------------------------------- 2.0625 bits per weight
// 256 weights in 66 bytes:  d f16 | qs[64]
//   w = d*(2sc+1)/8 * sign * table[q]      q: 8 per grid entry; table 8 25 43
//   qs: for each 32 weights 4 bytes, which are indices, and a word: 4 x 7 bits of signs, 4 bits sc
typedef struct { uint8_t d[2], qs[64]; } block_iq2_xxs;
QUANT_SCALED(iq2_xxs) {
    uint32_t w[16] = {0}, sign[8] = {0};
    uint64_t sc = 0;
    QUANT_UNROLL for (int i = 0; i < n; i++) {
        QUANT_DEVICE const uint8_t *p = b->qs + 8 * (g + i);
        uint32_t x = quant_u32(p + 4);
        quant_entries(w + 2 * i, quant_grid_iq2_xxs, 4, p, 0, 0, 0);
        sign[i] = quant_even_signs(x);
        sc |= (uint64_t)(x >> 28) << 8 * i;
    }
    quant_codebook(q, w, 2, quant_iq2, sign, n);
    quant_scales(d, quant_half(b->d) * 0.125f, sc << 1, 0, 32, -1, 0, n);
}

// IQ2_XS ---------------------------------------------------------- 2.3125 bits per weight
// 256 weights in 74 bytes:  d f16 | qs[64] | scales[8]
//   w = d*(2sc+1)/8 * sign * table[q]      as IQ2_XXS; sc = a nibble of scales per 16 weights
//   qs: 32 16-bit words: 9 bits of index, 7 bits of signs
typedef struct { uint8_t d[2], qs[64], scales[8]; } block_iq2_xs;
QUANT_SCALED(iq2_xs) {
    uint32_t w[16] = {0}, sign[8] = {0};
    QUANT_UNROLL for (int i = 0; i < n; i++) {
        QUANT_DEVICE const uint8_t *p = b->qs + 8 * (g + i);
        uint32_t x = quant_u16(p), y = quant_u16(p + 2), z = quant_u16(p + 4), t = quant_u16(p + 6);
        w[2 * i] = quant_grid_iq2_xs[x & 511] | (uint32_t)quant_grid_iq2_xs[y & 511] << 16;
        w[2 * i + 1] = quant_grid_iq2_xs[z & 511] | (uint32_t)quant_grid_iq2_xs[t & 511] << 16;
        sign[i] = quant_even_signs(x >> 9 | y >> 9 << 7 | z >> 9 << 14 | t >> 9 << 21);
    }
    quant_codebook(q, w, 2, quant_iq2, sign, n);
    quant_scales(d, quant_half(b->d) * 0.125f, quant_spread(quant_u32(b->scales), 4) << 1,
                 quant_spread(quant_u32(b->scales + 4), 4) << 1, 16, -1, g, n);
}

// IQ2_S ----------------------------------------------------------- 2.5625 bits per weight
// 256 weights in 82 bytes:  d f16 | qs[32] | signs[32] | qh[8] | scales[8]
//   w = d*(2sc+1)/8 * sign * table[q]      as IQ2_XS; signs: a bit per weight
//   index: a byte of qs, and above it 2 bits of qh, which has a byte per 32 weights
typedef struct { uint8_t d[2], qs[32], signs[32], qh[8], scales[8]; } block_iq2_s;
QUANT_SCALED(iq2_s) {
    uint32_t w[16] = {0}, sign[8] = {0};
    QUANT_UNROLL for (int i = 0; i < n; i++) {
        quant_entries(w + 2 * i, quant_grid_iq2_s, 4, b->qs + 4 * (g + i), b->qh[g + i], 2, 768);
        sign[i] = quant_u32(b->signs + 4 * (g + i));
    }
    quant_codebook(q, w, 2, quant_iq2, sign, n);
    quant_scales(d, quant_half(b->d) * 0.125f, quant_spread(quant_u32(b->scales), 4) << 1,
                 quant_spread(quant_u32(b->scales + 4), 4) << 1, 16, -1, g, n);
}

// IQ3_XXS --------------------------------------------------------- 3.0625 bits per weight
// 256 weights in 98 bytes:  d f16 | qs[64] | x[32]
//   w = d*(2sc+1)/4 * sign * table[q]      q: 4 per grid entry; table 4 12 20 28 36 44 52 62
//   qs: indices; x: for each 32 weights a word: 4 x 7 bits of signs, 4 bits sc
typedef struct { uint8_t d[2], qs[64], x[32]; } block_iq3_xxs;
QUANT_SCALED(iq3_xxs) {
    uint32_t w[32] = {0}, sign[8] = {0};
    uint64_t sc = 0;
    QUANT_UNROLL for (int i = 0; i < n; i++) {
        uint32_t x = quant_u32(b->x + 4 * (g + i));
        quant_entries(w + 4 * i, quant_grid_iq3_xxs, 8, b->qs + 8 * (g + i), 0, 0, 0);
        sign[i] = quant_even_signs(x);
        sc |= (uint64_t)(x >> 28) << 8 * i;
    }
    quant_codebook(q, w, 4, quant_iq3_xxs, sign, n);
    quant_scales(d, quant_half(b->d) * 0.25f, sc << 1, 0, 32, -1, 0, n);
}

// IQ3_S ----------------------------------------------------------- 3.4375 bits per weight
// 256 weights in 110 bytes:  d f16 | qs[64] | qh[8] | signs[32] | scales[4]
//   w = d*(2sc+1) * sign * table[q]      q: 4 per grid entry; table 1 3 5 7 9 11 13 15
//   index: a byte of qs, above it a bit of qh; signs: a bit per weight; sc: 4 bits per 32 weights
typedef struct { uint8_t d[2], qs[64], qh[8], signs[32], scales[4]; } block_iq3_s;
QUANT_SCALED(iq3_s) {
    uint32_t w[32] = {0}, sign[8] = {0};
    QUANT_UNROLL for (int i = 0; i < n; i++) {
        quant_entries(w + 4 * i, quant_grid_iq3_s, 8, b->qs + 8 * (g + i), b->qh[g + i], 1, 256);
        sign[i] = quant_u32(b->signs + 4 * (g + i));
    }
    quant_codebook(q, w, 4, quant_iq3_s, sign, n);
    quant_scales(d, quant_half(b->d), quant_spread(quant_u32(b->scales), 4) << 1, 0, 32, -1, g, n);
}

// IQ1_S ----------------------------------------------------------- 1.5625 bits per weight
// 256 weights in 50 bytes:  d f16 | qs[32] | qh[16]
//   w = d*(2sc+1)/8 * (8(q - 1) + s)      q in 0..2: 8 per grid entry; s = 1 or -1
//   index: a byte of qs, and above it 3 bits of qh, which has 16 bits per 32 weights, lowest first:
//   4 x 3 bits of indices, 3 bits sc, and a bit that says: s is -1
typedef struct { uint8_t d[2], qs[32], qh[16]; } block_iq1_s;
QUANT_SCALED(iq1_s) {
    uint32_t w[16] = {0}, minus[8] = {0};
    uint64_t sc = 0;
    QUANT_UNROLL for (int i = 0; i < n; i++) {
        uint32_t h = quant_u16(b->qh + 2 * (g + i));
        quant_entries(w + 2 * i, quant_grid_iq1, 4, b->qs + 4 * (g + i), h, 3, 1792);
        minus[i] = 0u - (h >> 15);
        sc |= (uint64_t)(h >> 12 & 7) << 8 * i;
    }
    quant_unpack(q, w, 2, 0, n);
    quant_unpack(q, minus, 1, 2, n);
    quant_lookup(q, quant_iq1, 8, n);
    quant_scales(d, quant_half(b->d) * 0.125f, sc << 1, 0, 32, -1, 0, n);
}

// IQ1_M ----------------------------------------------------------- 1.75 bits per weight
// 256 weights in 56 bytes:  qs[32] | qh[16] | scales[8]
//   w = d*(2sc+1)/8 * (8(q - 1) + s)      as IQ1_S, but sc per 16 and s per 8 weights
//   index: a byte of qs, and above it 3 bits of a nibble of qh, whose top bit says: s is -1
//   scales: four times 16 bits: 4 x 3 bits sc, then 4 bits of d, which is an f16, lowest first
typedef struct { uint8_t qs[32], qh[16], scales[8]; } block_iq1_m;
QUANT_SCALED(iq1_m) {
    uint32_t w[16] = {0}, minus[8] = {0};
    QUANT_UNROLL for (int i = 0; i < n; i++) {
        uint32_t h = quant_u16(b->qh + 2 * (g + i));
        quant_entries(w + 2 * i, quant_grid_iq1, 4, b->qs + 4 * (g + i), h, 4, 1792);
        minus[i] = (uint32_t)quant_spread(h >> 3 & 0x1111, 4) * 255;   // a byte of ones for a bit
    }
    quant_unpack(q, w, 2, 0, n);
    quant_unpack(q, minus, 1, 2, n);
    quant_lookup(q, quant_iq1, 8, n);
    uint64_t s = quant_u64(b->scales), dbits = s >> 12 & 0x000f000f000f000f;
    uint32_t h = (uint32_t)(dbits | dbits >> 12 | dbits >> 24 | dbits >> 36) & 0xffff;
    uint64_t low = quant_spread((s & 0xfff) | (s >> 4 & 0xfff000), 3);
    uint64_t high = quant_spread((s >> 32 & 0xfff) | (s >> 36 & 0xfff000), 3);
    quant_scales(d, quant_f16_to_f32(h) * 0.125f, low << 1, high << 1, 16, -1, g, n);
}

// ---- 10. table, and public functions ----
// To add a format, add its row here: that makes it known to everything below.
// X(id, name, weights_per_block, bytes_per_block, per16, bias)
//   per16   1 if the two scales of a group may differ
//   bias    code + bias is never negative: dot products of unsigned bytes want that. It is 0 for
//           exactly the formats with offsets, whose codes are never negative anyway. So
//           `bias == 0` asks whether a format has offsets

#define QUANT_TYPES(X)                                                                             \
    X(2, q4_0, 32, 18, 0, 8)          X(3, q4_1, 32, 20, 0, 0)                                     \
    X(6, q5_0, 32, 22, 0, 16)         X(7, q5_1, 32, 24, 0, 0)                                     \
    X(8, q8_0, 32, 34, 0, 128)        X(10, q2_K, 256, 84, 1, 0)                                   \
    X(11, q3_K, 256, 110, 1, 4)       X(12, q4_K, 256, 144, 0, 0)                                  \
    X(13, q5_K, 256, 176, 0, 0)       X(14, q6_K, 256, 210, 1, 32)                                 \
    X(16, iq2_xxs, 256, 66, 0, 43)    X(17, iq2_xs, 256, 74, 1, 43)                                \
    X(18, iq3_xxs, 256, 98, 0, 62)    X(19, iq1_s, 256, 50, 0, 9)                                  \
    X(20, iq4_nl, 32, 18, 0, 127)     X(21, iq3_s, 256, 110, 0, 15)                                \
    X(22, iq2_s, 256, 82, 1, 43)      X(23, iq4_xs, 256, 136, 0, 127)                              \
    X(29, iq1_m, 256, 56, 1, 9)       X(34, tq1_0, 256, 54, 0, 1)                                  \
    X(35, tq2_0, 256, 66, 0, 1)       X(39, mxfp4, 32, 17, 0, 12)                                  \
    X(40, nvfp4, 64, 36, 1, 12)       X(41, q1_0, 128, 18, 0, 1)                                   \
    X(42, q2_0, 64, 18, 0, 1)
#define QUANT_X(id, name, weights, bytes, per16, bias)                                          \
    typedef char quant_size_of_##name[sizeof(block_##name) == bytes ? 1 : -1];
QUANT_TYPES(QUANT_X)
#undef QUANT_X

#if !defined(__METAL_VERSION__) && !defined(__CUDACC__)

#define QUANT_API static inline __attribute__((unused))
enum { QUANT_F32 = 0, QUANT_F16 = 1, QUANT_BF16 = 30 };

// float to the nearest half, ties to even; NaN stays NaN
QUANT_INLINE uint16_t quant_f32_to_f16(float f) {
    union { float f; uint32_t u; } x = {f};
    uint32_t sign = x.u >> 16 & 0x8000, u = x.u & 0x7fffffff, shift = 126 - (u >> 23);
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x1ff));
    if (u >= 0x47800000) return (uint16_t)(sign | 0x7c00);                       // 65536 and above
    if (u >= 0x38800000) return (uint16_t)(sign | (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13);
    if (u < 0x33000000) return (uint16_t)sign;                                   // below 2^-25
    u = (u & 0x7fffff) | 0x800000;
    return (uint16_t)(sign | (u + (1u << (shift - 1)) - 1 + (u >> shift & 1)) >> shift);
}

QUANT_API const char *quant_name(int ggml_type) {
    switch (ggml_type) {
    case QUANT_F32: return "f32";
    case QUANT_F16: return "f16";
    case QUANT_BF16: return "bf16";
#define QUANT_X(id, name, weights, bytes, per16, bias) case id: return #name;
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
    default: return NULL;
    }
}

// bytes of n weights; 0 if the type is unknown, n is not whole blocks, or the bytes exceed a size_t
QUANT_API size_t quant_row_bytes(int ggml_type, size_t n) {
    size_t weights = 1, bytes = 0;
    switch (ggml_type) {
    case QUANT_F32: bytes = 4; break;
    case QUANT_F16: case QUANT_BF16: bytes = 2; break;
#define QUANT_X(id, name, w, b, per16, bias) case id: weights = w, bytes = b; break;
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
    default: return 0;
    }
    return n % weights || n / weights > SIZE_MAX / bytes ? 0 : n / weights * bytes;
}

// the number of a format by ggml's name for it, in any case; -1 if there is none
QUANT_API int quant_type_from_name(const char *name) {
    for (int type = 0; type < 64; type++) {
        const char *a = quant_name(type), *b = name;
        while (a && *a && (*a | 32) == (*b | 32)) a++, b++;
        if (a && !*a && !*b) return type;
    }
    return -1;
}

// eight halves to floats
#if defined(QUANT_X86)
QUANT_INLINE void quant_floats(float *dst, const uint8_t *p) {
    _mm256_storeu_ps(dst, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)));
}
#else
QUANT_INLINE void quant_floats(float *__restrict dst, const uint8_t *__restrict p) {
    for (int i = 0; i < 8; i++) dst[i] = quant_half(p + 2 * i);
}
#endif

// q[4][8][8], d[16] and m[16] of 256 weights of a block format, as decode_X(b, 0, 8, ..) orders
// them; or of the last n < 256 weights of a row, followed by zeros.
QUANT_API void quant_decode(int ggml_type, const uint8_t *p, size_t n, int8_t *q, float *d,
                            float *m) {
    uint8_t last[272];                                              // 8 blocks of Q8_0: the most
    if (n < 256) {
        __builtin_memset(last, 0, sizeof last);
        __builtin_memcpy(last, p, quant_row_bytes(ggml_type, n));
        p = last;
    }
    switch (ggml_type) {
#define QUANT_X(id, name, weights, bytes, per16, bias)                                             \
    case id: decode_##name((const block_##name *)p, 0, 8, q, d, m); break;
    QUANT_TYPES(QUANT_X)
#undef QUANT_X
    }
}

// n weights at src, any address, to floats; false if the type is unknown or n is not whole blocks
QUANT_API bool quant_dequantize(int ggml_type, const void *src, float *dst, size_t n) {
    const uint8_t *p = (const uint8_t *)src;
    if (n == 0 && quant_name(ggml_type)) return true;
    if (quant_row_bytes(ggml_type, n) == 0) return false;
    if (ggml_type == QUANT_F32)
        for (size_t i = 0; i < n; i++) dst[i] = quant_from_bits(quant_u32(p + 4 * i));
    else if (ggml_type == QUANT_F16) {
        for (; n >= 8; n -= 8, dst += 8, p += 16) quant_floats(dst, p);
        for (size_t i = 0; i < n; i++) dst[i] = quant_half(p + 2 * i);
    } else if (ggml_type == QUANT_BF16)
        for (size_t i = 0; i < n; i++) dst[i] = quant_from_bits(quant_u16(p + 2 * i) << 16);
    else for (size_t i = 0; i < n; i += 256, p += quant_row_bytes(ggml_type, 256)) {
        int8_t q[256];
        float d[16], m[16];
        size_t left = n - i < 256 ? n - i : 256;
        quant_decode(ggml_type, p, left, q, d, m);
        for (size_t j = 0; j < left; j += 8, dst += 8) {
            const int8_t *eight = q + j / 8 % 4 * 64 + j / 32 * 8;
            for (int k = 0; k < 8; k++) dst[k] = d[j / 16] * eight[k] + m[j / 16];
        }
    }
    return true;
}
#ifdef __clang__
#pragma clang diagnostic pop
#endif
#endif
#endif
