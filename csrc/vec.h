// Vectors of VL floats through the compiler's vector extensions (GCC, Clang).
//
// The same source is compiled once per instruction set with another SQ_VL (4, 8 or 16 lanes), each time inside its
// own namespace SQ_NS, so that the linker never merges code of two instruction sets. For the same reason the
// per-instruction-set sources use no templates of the standard library.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef SQ_VL
#define SQ_VL 4
#endif
#ifndef SQ_NS
#define SQ_NS sq_portable
#endif

#define SQ_INLINE static inline __attribute__((always_inline))
#define SQ_UNROLL _Pragma("GCC unroll 16")
// A bare [[likely]] is C++20; these two only steer code layout.
#define SQ_RARE(x) __builtin_expect(!!(x), 0)

namespace SQ_NS {

constexpr int VL = SQ_VL;
typedef float vf __attribute__((vector_size(4 * SQ_VL)));
typedef int32_t vi __attribute__((vector_size(4 * SQ_VL)));
typedef float vf_mem __attribute__((vector_size(4 * SQ_VL), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16)));
typedef float v4_mem __attribute__((vector_size(16), aligned(4), may_alias));

// Register tiles: MR broadcast rows by NV vectors; NV * VL tokens side by side make one panel.
constexpr int NV = 2;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MR = 12;  // 32 registers: 24 sums
#else
constexpr int MR = 6;  // 16 registers: 12 sums
#endif
constexpr int T = NV * VL;
// Tokens per chunk, a multiple of T; the causal form pays C(M+E)/2 extra per token, the state update pays 1/C.
#if SQ_VL == 16
constexpr int C = 64;
#else
constexpr int C = 48;
#endif
// Row stride of [feature][token] buffers: an odd number of cache lines, so that a column of a panel does not fall
// into a few cache sets only.
constexpr int LD = ((C / 16) % 2 == 1) ? C : C + 16;
constexpr int CV = C / VL;
constexpr int PANELS = C / T;

SQ_INLINE vf load(const float* p) { return *(const vf_mem*)p; }
SQ_INLINE void store(float* p, vf v) { *(vf_mem*)p = v; }

// To an aligned place, past the caches: what was there is not read first, and nothing else is pushed out for it.
SQ_INLINE void store_non_temporal(float* p, vf v) {
#if SQ_VL == 16 && defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif SQ_VL == 8 && defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#elif SQ_VL == 4 && defined(__SSE2__)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}

// Such stores are not ordered with others: before anybody else may read them.
SQ_INLINE void end_non_temporal() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

SQ_INLINE v4 load4(const float* p) { return *(const v4_mem*)p; }
SQ_INLINE void store4(float* p, v4 v) { *(v4_mem*)p = v; }

SQ_INLINE vf splat(float s) {
#if SQ_VL == 16
  return (vf){s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s};
#elif SQ_VL == 8
  return (vf){s, s, s, s, s, s, s, s};
#else
  return (vf){s, s, s, s};
#endif
}

SQ_INLINE vf zero() { return splat(0.0f); }
SQ_INLINE vi bits(vf v) { vi r; memcpy(&r, &v, sizeof r); return r; }
SQ_INLINE vf as_float(vi v) { vf r; memcpy(&r, &v, sizeof r); return r; }

// a > b ? a : b. When either is NaN the result is b: pass the value whose NaN must survive second.
SQ_INLINE vf vmax(vf a, vf b) {
#if SQ_VL == 16 && defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif SQ_VL == 8 && defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif SQ_VL == 4 && defined(__SSE2__)
  return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

SQ_INLINE vf vsqrt(vf x) {
#if SQ_VL == 16 && defined(__AVX512F__)
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif SQ_VL == 8 && defined(__AVX2__)
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < VL; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// a * b + c in one rounding where the machine can; spelled out, because contraction is up to the optimiser.
SQ_INLINE vf fused(vf a, vf b, vf c) {
#if SQ_VL == 16 && defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif SQ_VL == 8 && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

SQ_INLINE float max1(float a, float b) { return a > b ? a : b; }

SQ_INLINE v4 max4(v4 a, v4 b) {
#if defined(__SSE2__)
  return (v4)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

// Lanes folded onto four.
#if SQ_VL == 16
SQ_INLINE v4 fold_max(vf v) {
  return max4(max4(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7)),
              max4(__builtin_shufflevector(v, v, 8, 9, 10, 11), __builtin_shufflevector(v, v, 12, 13, 14, 15)));
}
SQ_INLINE v4 fold_sum(vf v) {
  return (__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7)) +
         (__builtin_shufflevector(v, v, 8, 9, 10, 11) + __builtin_shufflevector(v, v, 12, 13, 14, 15));
}
#elif SQ_VL == 8
SQ_INLINE v4 fold_max(vf v) {
  return max4(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7));
}
SQ_INLINE v4 fold_sum(vf v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}
#else
SQ_INLINE v4 fold_max(vf v) { return v; }
SQ_INLINE v4 fold_sum(vf v) { return v; }
#endif

// The horizontal maxima (sums) of four vectors at once.
SQ_INLINE v4 hmax4(const vf* v) {
  const v4 a = fold_max(v[0]), b = fold_max(v[1]), c = fold_max(v[2]), d = fold_max(v[3]);
  const v4 ab = max4(__builtin_shufflevector(a, b, 0, 4, 1, 5), __builtin_shufflevector(a, b, 2, 6, 3, 7));
  const v4 cd = max4(__builtin_shufflevector(c, d, 0, 4, 1, 5), __builtin_shufflevector(c, d, 2, 6, 3, 7));
  return max4(__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
}
SQ_INLINE v4 hsum4(const vf* v) {
  const v4 a = fold_sum(v[0]), b = fold_sum(v[1]), c = fold_sum(v[2]), d = fold_sum(v[3]);
  const v4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const v4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
SQ_INLINE float hmax(vf v) {
  const v4 w = fold_max(v);
  return max1(max1(w[0], w[2]), max1(w[1], w[3]));
}
SQ_INLINE float hsum(vf v) {
  const v4 w = fold_sum(v);
  return (w[0] + w[2]) + (w[1] + w[3]);
}

}  // namespace SQ_NS
