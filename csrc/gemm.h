// C[i][j] (+)= sum_k A(i, k) B[k][j]: one register-blocked kernel serves every product of this library.
//
//   A(i, k) = A[i * ai + k * ak] is read by broadcast, so both orders of A are equally good and nothing is packed;
//   B and C have vectors along j. With tokens along j this is the projection (A = W), the read (A = S^T), the scores
//   (A = phi(k)^T); with values along j it is the state update (A = phi(k), B = V).
#pragma once

#include "vec.h"

namespace SQ_NS {

// What is added to the sums: nothing, C itself, C times by[i], or by[i] in every column. It is added last: terms that went
// into it one by one would each be rounded to its size, and a state sums over very many.
enum Start { FROM_ZERO, FROM_C, FROM_SCALED, FROM_BIAS };

template <int ROWS, int N>
SQ_INLINE void tile(long K, const float* A, long ai, long ak, const float* B, long ldb, float* Cm, long ldc,
                    Start start, const float* by) {
  vf s[ROWS][N];
  SQ_UNROLL for (int i = 0; i < ROWS; i++) SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] = zero();
  for (long k = 0; k < K; k++) {
    vf b[N];
    SQ_UNROLL for (int j = 0; j < N; j++) b[j] = load(B + VL * j);
    SQ_UNROLL for (int i = 0; i < ROWS; i++) {
      const vf a = splat(A[i * ai]);
      SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] += a * b[j];
    }
    A += ak;
    B += ldb;
  }
  if (start == FROM_BIAS)
    SQ_UNROLL for (int i = 0; i < ROWS; i++) SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] += splat(by[i]);
  if (start == FROM_C)
    SQ_UNROLL for (int i = 0; i < ROWS; i++) SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] += load(Cm + i * ldc + VL * j);
  if (start == FROM_SCALED)
    SQ_UNROLL for (int i = 0; i < ROWS; i++) SQ_UNROLL for (int j = 0; j < N; j++) {
      s[i][j] = fused(load(Cm + i * ldc + VL * j), splat(by[i]), s[i][j]);
    }
  SQ_UNROLL for (int i = 0; i < ROWS; i++) SQ_UNROLL for (int j = 0; j < N; j++) store(Cm + i * ldc + VL * j, s[i][j]);
}

// One strip of ROWS rows across `vectors` vectors of columns.
template <int ROWS>
static __attribute__((noinline)) void strip(long vectors, long K, const float* A, long ai, long ak, const float* B,
                                            long ldb, float* Cm, long ldc, Start start, const float* by) {
  long j = 0;
  for (; j + NV <= vectors; j += NV) tile<ROWS, NV>(K, A, ai, ak, B + j * VL, ldb, Cm + j * VL, ldc, start, by);
  for (; j < vectors; j++) tile<ROWS, 1>(K, A, ai, ak, B + j * VL, ldb, Cm + j * VL, ldc, start, by);
}

SQ_INLINE void strip_of(int rows, long vectors, long K, const float* A, long ai, long ak, const float* B, long ldb,
                        float* Cm, long ldc, Start start, const float* by) {
  switch (rows) {
    case 1: return strip<1>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 2: return strip<2>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 3: return strip<3>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 4: return strip<4>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 5: return strip<5>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 6: return strip<6>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
#if defined(__AVX512F__) || defined(__aarch64__)
    case 7: return strip<7>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 8: return strip<8>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 9: return strip<9>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 10: return strip<10>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 11: return strip<11>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
    case 12: return strip<12>(vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
#endif
  }
}

// rows x (vectors * VL) product. Rows are dealt out evenly (64 = 9*6 + 2*5, not 10*6 + 4): a short last strip would
// leave the two FMA units waiting for each other's latency.
static void gemm_rows(long rows, long vectors, long K, const float* A, long ai, long ak, const float* B, long ldb,
                      float* Cm, long ldc, Start start, const float* by) {
  const long strips = (rows + MR - 1) / MR;
  const long base = rows / strips, longer = rows % strips;
  long i = 0;
  for (long s = 0; s < strips; s++) {
    const int r = (int)(base + (s < longer ? 1 : 0));
    strip_of(r, vectors, K, A + i * ai, ai, ak, B, ldb, Cm + i * ldc, ldc, start, by ? by + i : nullptr);
    i += r;
  }
}

// Terms per pass over the rows. Where the columns of A lie apart, a strip takes a cache line of A and one of B for each
// term: with 128 of them both fit into half of the first-level cache and B stays there for the next strip.
constexpr long DEPTH = 128;

static void gemm(long rows, long vectors, long K, const float* A, long ai, long ak, const float* B, long ldb,
                 float* Cm, long ldc, Start start, const float* by = nullptr) {
  if (rows <= 0 || vectors <= 0) return;
  if (ak == 1 || K <= DEPTH) return gemm_rows(rows, vectors, K, A, ai, ak, B, ldb, Cm, ldc, start, by);
  const long pieces = (K + DEPTH - 1) / DEPTH, piece = (K + pieces - 1) / pieces;
  for (long k = 0; k < K; k += piece)
    gemm_rows(rows, vectors, K - k < piece ? K - k : piece, A + k * ak, ai, ak, B + k * ldb, ldb, Cm, ldc,
              k ? FROM_C : start, by);
}

}  // namespace SQ_NS
