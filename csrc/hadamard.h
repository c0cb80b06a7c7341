// The Hadamard-Rademacher projection, matrix-free, tokens along the lanes:
//
//   block n:  rows n D' .. (n + 1) D' of W are  diag(norms) (H D_k) ... (H D_1),  H the Sylvester matrix, D_i signs
//
// H is applied in place by butterflies (a, b) -> (a + b, a - b), up to three levels per pass: eight rows of the panel live
// in registers while they are combined. Levels commute, so every other factor takes its passes in the opposite order:
// the last pass of one factor and the first of the next then hold the same rows and are one pass, with the signs in
// between (D' = 64 with three factors: four passes for 18 levels). Norms and offset ride on the last pass. Cost
// k log2(D') additions per row and token, against D multiply-adds of the dense projection.
#pragma once

#include "vec.h"

namespace SQ_NS {

static long padded(long dim) {
  long width = 1;
  while (width < dim) width *= 2;
  return width;
}

// H_{2^LEVELS} on r[0], r[1], ...
template <int LEVELS>
SQ_INLINE void butterflies(vf* r) {
  SQ_UNROLL for (int h = 1; h < (1 << LEVELS); h *= 2) {
    SQ_UNROLL for (int i = 0; i < (1 << LEVELS); i++) {
      if (!(i & h)) {
        const vf a = r[i], b = r[i + h];
        r[i] = a + b;
        r[i + h] = a - b;
      }
    }
  }
}

// Where a pass reads and writes, and what it does on the way: times before[row] coming in; with `between`, times that and
// the same levels again; times after[row], plus offset[row], plus what is there already going out. Rows from from_rows on
// count as zero, rows from to_rows on are dropped.
struct Pass {
  const float* from;
  long from_ld, from_rows;
  float* to;
  long to_ld, to_rows;
  const float *before, *between, *after, *offset;
  bool accumulate;
};

// LEVELS levels of a transform of `width` rows of one panel, at distance h.
template <int LEVELS>
static void any_pass(const Pass& q, long width, long h) {
  constexpr int N = 1 << LEVELS;
  for (long base = 0; base < width; base += h * N)
    for (long i = base; i < base + h; i++)
      for (int j = 0; j < NV; j++) {
        vf r[N];
        SQ_UNROLL for (int n = 0; n < N; n++) {
          const long row = i + n * h;
          r[n] = row < q.from_rows ? load(q.from + row * q.from_ld + j * VL) : zero();
          if (q.before) r[n] *= splat(row < q.from_rows ? q.before[row] : 0.0f);
        }
        butterflies<LEVELS>(r);
        if (q.between) {
          SQ_UNROLL for (int n = 0; n < N; n++) r[n] *= splat(q.between[i + n * h]);
          butterflies<LEVELS>(r);
        }
        SQ_UNROLL for (int n = 0; n < N; n++) {
          const long row = i + n * h;
          if (row >= q.to_rows) continue;
          float* at = q.to + row * q.to_ld + j * VL;
          const vf plus = q.accumulate ? load(at) : q.offset ? splat(q.offset[row]) : zero();
          store(at, q.after ? r[n] * splat(q.after[row]) + plus : r[n]);
        }
      }
}

// The same with everything known that does not differ between rows; H = 0 leaves the distance open. Copies of the fields
// keep them in registers: the compiler has to assume that a store of floats might change them.
enum Way { COMING_IN, WITHIN, BETWEEN, GOING_OUT, OFFSET, ADDING };

template <int LEVELS, int H, Way WAY>
static void whole_pass(const Pass& q, long width, long distance) {
  constexpr int N = 1 << LEVELS, FROM = WAY == COMING_IN ? LD : T, TO = WAY >= GOING_OUT ? LD : T;
  const long h = H ? H : distance;
  const float *from = q.from, *by = WAY == COMING_IN ? q.before : WAY == BETWEEN ? q.between : q.after;
  const float* offset = q.offset;
  float* to = q.to;
  for (long base = 0; base < width; base += h * N)
    for (long i = base; i < base + h; i++)
      SQ_UNROLL for (int j = 0; j < NV; j++) {
        vf r[N];
        SQ_UNROLL for (int n = 0; n < N; n++) {
          r[n] = load(from + (i + n * h) * FROM + j * VL);
          if (WAY == COMING_IN) r[n] *= splat(by[i + n * h]);
        }
        butterflies<LEVELS>(r);
        if (WAY == BETWEEN) {
          SQ_UNROLL for (int n = 0; n < N; n++) r[n] *= splat(by[i + n * h]);
          butterflies<LEVELS>(r);
        }
        SQ_UNROLL for (int n = 0; n < N; n++) {
          float* at = to + (i + n * h) * TO + j * VL;
          if (WAY == GOING_OUT) r[n] *= splat(by[i + n * h]);
          if (WAY == OFFSET) r[n] = r[n] * splat(by[i + n * h]) + splat(offset[i + n * h]);
          if (WAY == ADDING) r[n] = r[n] * splat(by[i + n * h]) + load(at);
          store(at, r[n]);
        }
      }
}

template <int LEVELS, int H>
static void pass_of(const Pass& q, long width, long h) {
  const bool inside = q.from_ld == T && q.to_ld == T, whole = q.from_rows >= width && q.to_rows >= width;
  const bool arrives = q.from_ld == LD && q.to_ld == T && q.before && !q.between && !q.after;
  const bool leaves = q.from_ld == T && q.to_ld == LD && q.after && !q.before && !q.between;
  if (inside && !q.before && !q.after)
    return q.between ? whole_pass<LEVELS, H, BETWEEN>(q, width, h) : whole_pass<LEVELS, H, WITHIN>(q, width, h);
  if (whole && arrives) return whole_pass<LEVELS, H, COMING_IN>(q, width, h);
  if (whole && leaves)
    return q.accumulate ? whole_pass<LEVELS, H, ADDING>(q, width, h)
           : q.offset   ? whole_pass<LEVELS, H, OFFSET>(q, width, h)
                        : whole_pass<LEVELS, H, GOING_OUT>(q, width, h);
  any_pass<LEVELS>(q, width, h);
}

static void run_pass(const Pass& q, long width, int levels, long h) {
  if (levels == 3 && h == 1) pass_of<3, 1>(q, width, h);
  else if (levels == 3 && h == 8) pass_of<3, 8>(q, width, h);
  else if (levels == 3) pass_of<3, 0>(q, width, h);
  else if (levels == 2) pass_of<2, 0>(q, width, h);
  else if (levels == 1) any_pass<1>(q, width, h);
  else any_pass<0>(q, width, h);
}

// diag(after) H diag(scale_{k-1}) H ... H diag(scale_0) on one panel: `ends` says where rows come from, where they go to
// and what happens there; scale_f is scales + f * step for f > 0, and ends.before for f = 0. work[width][T] is in between.
static void transform(long width, int factors, const float* scales, long step, const Pass& ends, float* work) {
  int levels[32], groups = 0;  // levels of each pass of one factor, from short distances to long ones
  for (long left = width; left > 1; groups++) {
    levels[groups] = left >= 32 || left == 8 ? 3 : left >= 4 ? 2 : 1;
    left >>= levels[groups];
  }
  if (groups == 0) levels[groups++] = 0;
  bool merged = false;  // whether the factor's first pass was part of the last one before
  for (int f = 0; f < factors; f++) {
    const bool forth = f % 2 == 0;
    long h = forth ? 1 : width;
    for (int g = 0; g < groups; g++) {
      const int now = levels[forth ? g : groups - 1 - g];
      if (!forth) h >>= now;
      Pass q = {work, T, width, work, T, width, nullptr, nullptr, nullptr, nullptr, false};
      if (g == 0 && f == 0) q.from = ends.from, q.from_ld = ends.from_ld, q.from_rows = ends.from_rows;
      if (g == 0) q.before = f ? scales + f * step : ends.before;
      const bool last = g == groups - 1;
      if (last && f == factors - 1) {
        q.to = ends.to, q.to_ld = ends.to_ld, q.to_rows = ends.to_rows;
        q.after = ends.after, q.offset = ends.offset, q.accumulate = ends.accumulate;
      }
      if (last && f < factors - 1 && groups > 1) q.between = scales + (f + 1) * step;
      if (!(g == 0 && merged)) run_pass(q, width, now, h);
      if (last) merged = q.between != nullptr;
      if (forth) h <<= now;
    }
  }
}

// Rows [first, first + rows) of p[..][LD] = W x + offset for the panels x[dim][LD], whole blocks of them; work holds
// padded(dim) rows of T.
static void hadamard(long first, long rows, long dim, int factors, const float* signs, const float* norms,
                     const float* offset, const float* x, long vectors, float* p, float* work) {
  const long width = padded(dim), end = first + rows;
  for (long lane = 0; lane < vectors * VL; lane += T)
    for (long start = first; start < end; start += width) {
      const long count = end - start < width ? end - start : width;
      const float* sign = signs + (start / width) * factors * width;
      transform(width, factors, sign, width,
                {x + lane, LD, dim, p + start * LD + lane, LD, count, sign, nullptr, norms + start,
                 offset ? offset + start : nullptr, false},
                work);
    }
}

// dx[dim][LD] = W^T dp: the same factors in the opposite order, H being symmetric.
static void hadamard_back(long rows, long dim, int factors, const float* signs, const float* norms, const float* dp,
                          long vectors, float* dx, float* work) {
  const long width = padded(dim);
  for (long lane = 0; lane < vectors * VL; lane += T)
    for (long start = 0; start < rows; start += width) {
      const long count = rows - start < width ? rows - start : width;
      const float* sign = signs + (start / width) * factors * width;
      // scale_f = D_{k-f}: stored from the last factor back.
      transform(width, factors, sign + factors * width, -width,
                {dp + start * LD + lane, LD, count, dx + lane, LD, dim, norms + start, nullptr, sign, nullptr, start > 0},
                work);
    }
}

}  // namespace SQ_NS
