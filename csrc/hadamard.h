// The Hadamard-Rademacher projection, matrix-free, tokens along the lanes:
//
//   block n:  rows n D' .. (n + 1) D' of W are  diag(norms) (H D_k) ... (H D_1),  H the Sylvester matrix, D_i signs
//
// H is applied in place by butterflies (a, b) -> (a + b, a - b), three levels per pass: eight rows of the panel live in
// registers while they are combined, so a pass costs 24 additions for 8 loads and 8 stores. Signs ride on the first
// pass of each factor, norms and offset on the last pass of the last one. Cost k log2(D') additions per row and token,
// against D multiply-adds of the dense projection.
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

// Where a pass reads and writes, and what it does on the way: times before[row] coming in; times after[row], plus
// offset[row], plus what is there already going out. Rows from from_rows on count as zero, rows from to_rows on are dropped.
struct Pass {
  const float* from;
  long from_ld, from_rows;
  float* to;
  long to_ld, to_rows;
  const float *before, *after, *offset;
  bool accumulate;
};

// LEVELS levels of a transform of `width` rows of one panel, starting at distance h. IN, OUT: whether there is anything to
// do on the way in or out; RAGGED: whether some rows are missing. Copies of the fields keep them in registers: the
// compiler has to assume that a store of floats might change *q.
template <int LEVELS, bool IN, bool OUT, bool RAGGED>
static void pass(const Pass* q, long width, long h) {
  constexpr int N = 1 << LEVELS;
  const float *from = q->from, *before = q->before, *after = q->after, *offset = q->offset;
  float* to = q->to;
  const long from_ld = q->from_ld, to_ld = q->to_ld, from_rows = q->from_rows, to_rows = q->to_rows;
  const bool accumulate = q->accumulate;
  for (long base = 0; base < width; base += h * N)
    for (long i = base; i < base + h; i++)
      SQ_UNROLL for (int j = 0; j < NV; j++) {
        vf r[N];
        SQ_UNROLL for (int n = 0; n < N; n++) {
          const long row = i + n * h;
          if (RAGGED && row >= from_rows) {
            r[n] = zero();
            continue;
          }
          r[n] = load(from + row * from_ld + j * VL);
          if (IN) r[n] *= splat(before[row]);
        }
        butterflies<LEVELS>(r);
        SQ_UNROLL for (int n = 0; n < N; n++) {
          const long row = i + n * h;
          if (RAGGED && row >= to_rows) continue;
          float* at = to + row * to_ld + j * VL;
          if (OUT) {
            const vf plus = accumulate ? load(at) : offset ? splat(offset[row]) : zero();
            r[n] = r[n] * splat(after[row]) + plus;
          }
          store(at, r[n]);
        }
      }
}

template <int LEVELS>
static void pass_of(const Pass* q, long width, long h) {
  const bool in = q->before != nullptr, out = q->after != nullptr;
  if (q->from_rows < width || q->to_rows < width) {
    if (in && out) return pass<LEVELS, true, true, true>(q, width, h);
    if (in) return pass<LEVELS, true, false, true>(q, width, h);
    if (out) return pass<LEVELS, false, true, true>(q, width, h);
    return pass<LEVELS, false, false, true>(q, width, h);
  }
  if (in && out) return pass<LEVELS, true, true, false>(q, width, h);
  if (in) return pass<LEVELS, true, false, false>(q, width, h);
  if (out) return pass<LEVELS, false, true, false>(q, width, h);
  pass<LEVELS, false, false, false>(q, width, h);
}

// One transform of a panel: `ends` says where rows come from and go to; in between it stays inside work[width][T].
static void transform(long width, const Pass& ends, float* work) {
  int left = 0;
  while ((1L << left) < width) left++;
  long h = 1;
  bool begun = false;
  do {
    const int levels = left >= 5 || left == 3 ? 3 : left >= 2 ? 2 : left;
    Pass q = {work, T, width, work, T, width, nullptr, nullptr, nullptr, false};
    if (!begun) q.from = ends.from, q.from_ld = ends.from_ld, q.from_rows = ends.from_rows, q.before = ends.before;
    if (left == levels) {
      q.to = ends.to, q.to_ld = ends.to_ld, q.to_rows = ends.to_rows;
      q.after = ends.after, q.offset = ends.offset, q.accumulate = ends.accumulate;
    }
    if (levels == 3) pass_of<3>(&q, width, h);
    else if (levels == 2) pass_of<2>(&q, width, h);
    else if (levels == 1) pass_of<1>(&q, width, h);
    else pass_of<0>(&q, width, h);
    h <<= levels;
    left -= levels;
    begun = true;
  } while (left > 0);
}

// p[rows][LD] = W x + offset for the panels x[dim][LD]; work holds padded(dim) rows of T.
static void hadamard(long rows, long dim, int factors, const float* signs, const float* norms, const float* offset,
                     const float* x, long vectors, float* p, float* work) {
  const long width = padded(dim);
  for (long lane = 0; lane < vectors * VL; lane += T)
    for (long start = 0; start < rows; start += width) {
      const long count = rows - start < width ? rows - start : width;
      const float* sign = signs + (start / width) * factors * width;
      for (int f = 0; f < factors; f++) {
        Pass ends = {work, T, width, work, T, width, sign + f * width, nullptr, nullptr, false};
        if (f == 0) ends.from = x + lane, ends.from_ld = LD, ends.from_rows = dim;
        if (f == factors - 1) {
          ends.to = p + start * LD + lane, ends.to_ld = LD, ends.to_rows = count;
          ends.after = norms + start, ends.offset = offset ? offset + start : nullptr;
        }
        transform(width, ends, work);
      }
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
      for (int f = factors - 1; f >= 0; f--) {
        Pass ends = {work, T, width, work, T, width, nullptr, sign + f * width, nullptr, false};
        if (f == factors - 1) {
          ends.from = dp + start * LD + lane, ends.from_ld = LD, ends.from_rows = count, ends.before = norms + start;
        }
        if (f == 0) ends.to = dx + lane, ends.to_ld = LD, ends.to_rows = dim, ends.accumulate = start > 0;
        transform(width, ends, work);
      }
    }
}

}  // namespace SQ_NS
