// Keys and values of one head, and the products that run over all of them: scores, weights, weighted sums.
//
//   panels  [columns / PC][rows][PC]: what a query is multiplied with      rows  [token][component]: what is summed
#pragma once

#include "exp.h"
#include "gemm.h"
#include "panels.h"

namespace SQ_NS {

SQ_INLINE long padded(long n, long to) { return (n + to - 1) / to * to; }

// Matrices that products run over have their columns in panels of PC, one after the other: [columns / PC][rows][PC]. A
// product reads a panel from one end to the other.
constexpr long PC = NV * VL;
// A row stride of whole panels, an odd number of them (or of cache lines): a column then does not fall into a few cache sets
// only.
SQ_INLINE long odd_lines(long n) {
  const long unit = PC > 16 ? PC : 16, whole = padded(n, unit);
  return whole / unit % 2 ? whole : whole + unit;
}
SQ_INLINE float* panel_entry(float* x, long rows, long row, long column) {
  return x + (column / PC * rows + row) * PC + column % PC;
}

// Products of one row with N panels side by side: the sums of one panel alone would wait for each other.
template <int N>
SQ_INLINE void row_times_panels(long dim, const float* a, const float* x, float* scores) {
  vf s[N][NV];
  SQ_UNROLL for (int n = 0; n < N; n++) SQ_UNROLL for (int j = 0; j < NV; j++) s[n][j] = zero();
  for (long d = 0; d < dim; d++) {
    const vf b = splat(a[d]);
    SQ_UNROLL for (int n = 0; n < N; n++) SQ_UNROLL for (int j = 0; j < NV; j++) {
      s[n][j] += b * load(x + (n * dim + d) * PC + j * VL);
    }
  }
  SQ_UNROLL for (int n = 0; n < N; n++) SQ_UNROLL for (int j = 0; j < NV; j++) store(scores + n * PC + j * VL, s[n][j]);
}

// scores[rows][lds] = a[rows][lda] x, with x (dim, columns) in panels; whole panels are written.
static void times_panels(long rows, long columns, long dim, const float* a, long lda, const float* x, float* scores,
                         long lds) {
  long j = 0;
  if (rows == 1)
    for (; j + 4 * PC <= columns; j += 4 * PC) row_times_panels<4>(dim, a, x + j * dim, scores + j);
  for (; j < columns; j += PC)
    gemm(rows, NV, dim, a, lda, 1, x + j * dim, PC, scores + j, lds, FROM_ZERO);
}

// sum[rows][ld] (+)= weights[rows][ldw] x, with x (terms, ld) as rows: as many of them at a time as stay in the first cache.
static void times_rows(long rows, long terms, const float* weights, long ldw, const float* x, long ld, float* sum,
                       Start start, const float* by = nullptr) {
  const long step = 4096 / ld > 16 ? 4096 / ld : 16;
  for (long t = 0; t < terms; t += step)
    gemm(rows, ld / VL, terms - t < step ? terms - t : step, weights + t, ldw, 1, x + t * ld, ld, sum, ld,
         t ? FROM_C : start, by);
}

// n rows in panels of PC columns.
static void lay_panels(const float* rows, long n, long dim, long ld, float* to) {
  for (long i = 0; i < n; i += PC) {
    const long some = n - i < PC ? n - i : PC;
    if (some < PC) memset(to + i * dim, 0, sizeof(float) * PC * dim);
    transpose(rows + i * ld, some, dim, ld, to + i * dim, PC);
  }
}

// to[columns][ld] += weights^T rows, weights [n][ldw].
static void add_transposed(long columns, long n, const float* weights, long ldw, const float* rows, long ld, float* to) {
  gemm(columns, ld / VL, n, weights, 1, ldw, rows, ld, to, ld, FROM_C);
}

// Weights relative to the row's largest log mass, in place; returns their sum.
static float exponentiate(float* row, long vectors, float peak) {
  vf total = zero();
  const vf shift = splat(peak);
  long j = 0;
  for (; j + 4 <= vectors; j += 4) {
    vf x[4];
    SQ_UNROLL for (int u = 0; u < 4; u++) x[u] = load(row + (j + u) * VL) - shift;
    vexp_all<4>(x);
    SQ_UNROLL for (int u = 0; u < 4; u++) {
      store(row + (j + u) * VL, x[u]);
      total += x[u];
    }
  }
  for (; j < vectors; j++) {
    const vf x = vexp(load(row + j * VL) - shift);
    store(row + j * VL, x);
    total += x;
  }
  return hsum(total);
}

// Rows of weights P in place of log weights, and of g in place of dout . value.
static void slopes(float* weights, float* products, long vectors, float norm, float slope) {
  exponentiate(weights, vectors, norm);
  for (long j = 0; j < vectors * VL; j += VL)
    store(products + j, load(weights + j) * (load(products + j) - splat(slope)));
}

SQ_INLINE bool finite_rows(const float* rows, long n) {
  vf poison = zero();
  for (long i = 0; i < n; i += VL) poison += load(rows + i) * zero();
  return hsum(poison) == 0.0f;
}

// Real tokens [from, from + n) of a sequence, which token_of lists (null: all are real), as rows filled up with zeros.
static void fetch_ranks(const SqTensor& x, long b, long h, const int32_t* token_of, long from, long n, long dim,
                        float* to, long ld) {
  if (!token_of) {
    fetch(x, b, h, from, n, dim, to, ld);
  } else {
    for (long i = 0; i < n; i++) fetch(x, b, h, token_of[from + i], 1, dim, to + i * ld, ld);
  }
  if (ld > dim)
    for (long i = 0; i < n; i++) memset(to + i * ld + dim, 0, sizeof(float) * (ld - dim));
}

}  // namespace SQ_NS
