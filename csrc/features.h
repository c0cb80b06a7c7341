// From tokens to features, a chunk of up to C tokens along the lanes:
//
//   keys     l = +-p + bias + t,  t = square |y|^2 + tilt . y,  -inf where masked
//            c_new = max(c, max_tokens l),  phi = e^{l - c_new},  rho = e^{c - c_new} rescales the state exactly
//   queries  l = +-p + bias + c_new,  a = e^{l - max_features l},  Z = sum_r a_r z_r
//   plain    phi = f(p) + epsilon on both sides, 0 where masked; c stays 0
//
// features_back.h has the way back.
#pragma once

#include "exp.h"
#include "gemm.h"
#include "hadamard.h"
#include "panels.h"
#include "taylor.h"

namespace SQ_NS {

constexpr float MINUS_INF = -__builtin_inff();

// One side's map with the head's pointers resolved; `offset` (m_w) is added to W x, where query_features sets it.
struct Side {
  const float *weight, *offset, *bias, *tilt, *signs, *norms;
  float square;
};

SQ_INLINE const float* at_head(const float* p, int64_t stride, long h) { return p ? p + h * stride : nullptr; }

SQ_INLINE Side side_of(const SqMap& m, long h) {
  return {at_head(m.weight, m.weight_head, h), nullptr, at_head(m.bias, m.bias_head, h), at_head(m.tilt, m.tilt_head, h),
          at_head(m.signs, m.signs_head, h), at_head(m.norms, m.norms_head, h), m.square};
}

SQ_INLINE long vectors_for(long n) { return ((n + T - 1) / T) * NV; }

SQ_INLINE float or_zero(float c) { return c == MINUS_INF ? 0.0f : c; }

// Rows [first, first + rows) of p[..][LD] = W x + offset for the panels x[dim][LD]; `strip_rows` says which ranges there are.
static void project(const SqCall& pr, const Side& s, const float* x, long vectors, long first, long rows, float* p,
                    float* work) {
  const float* offset = s.offset ? s.offset + first : nullptr;
  if (pr.projection == SQ_DENSE) {
    gemm(rows, vectors, pr.dim, s.weight + first * pr.dim, pr.dim, 1, x, LD, p + first * LD, LD,
         offset ? FROM_BIAS : FROM_ZERO, offset);
  } else if (pr.projection == SQ_HADAMARD) {
    hadamard(first, rows, pr.dim, pr.blocks, s.signs, s.norms, s.offset, x, vectors, p, work);
  } else if (pr.function == SQ_TAYLOR) {
    taylor_features(pr.dim, x, vectors, p);
  } else {
    for (long r = first; r < first + rows; r++) {
      const vf o = splat(s.offset ? s.offset[r] : 0.0f);
      for (long j = 0; j < vectors; j++) store(p + r * LD + j * VL, load(x + r * LD + j * VL) + o);
    }
  }
}

// Rows projected and exponentiated at a time, for whole chunks of tokens: few enough to be in the first-level cache still.
SQ_INLINE long strip_rows(const SqCall& pr) {
  return pr.projection == SQ_DENSE ? 4 * MR : pr.projection == SQ_HADAMARD ? padded(pr.dim) : pr.rows;
}

// Which lanes hold a real key: 1 or 0 in real[C]. Returns how many.
static long real_lanes(const SqCall& pr, long b, long t0, long n, long lanes, float* real) {
  long count = 0;
  for (long i = 0; i < lanes; i++) {
    const long token = t0 + i + pr.key_shift;
    const bool yes = i < n && token >= 0 && token < pr.keys_stored &&
                     (!pr.key_mask || pr.key_mask[b * pr.mask_batch + token * pr.mask_token] != 0);
    real[i] = yes ? 1.0f : 0.0f;
    count += yes;
  }
  return count;
}

// t[lane] = square |y|^2 + tilt . y.
static void token_weights(const SqCall& pr, const Side& s, const float* y, long vectors, float* t) {
  // |y|^2 may be in the thousands and its rounding is an error of the whole key: sums of eight by a tree, and those
  // with their rounding errors carried along (Knuth's two-sum).
  for (long j = 0; j < vectors; j++) {
    vf squares = zero(), lost = zero(), along = zero();
    const float* col = y + j * VL;
    for (long d0 = 0; d0 < pr.dim; d0 += 8) {
      vf x[8];
      SQ_UNROLL for (int i = 0; i < 8; i++) x[i] = d0 + i < pr.dim ? load(col + (d0 + i) * LD) : zero();
      if (s.tilt) {
        vf tilted = zero();
        for (int i = 0; i < 8 && d0 + i < pr.dim; i++) tilted += x[i] * splat(s.tilt[d0 + i]);
        along += tilted;
      }
      const vf part = ((x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3])) +
                      ((x[4] * x[4] + x[5] * x[5]) + (x[6] * x[6] + x[7] * x[7]));
      const vf sum = squares + part, back = sum - squares;
      lost += (squares - (sum - back)) + (part - back);
      squares = sum;
    }
    // An infinite square has no rounding error to add: inf - inf would turn it into NaN either way.
    store(t + j * VL, s.square == 0.0f ? along : (squares + lost) * splat(s.square) + along);
  }
}

// The same for keys, -inf for lanes without a real one.
static void key_weights(const SqCall& pr, const Side& s, const float* y, const float* real, long vectors, float* t) {
  token_weights(pr, s, y, vectors, t);
  for (long i = 0; i < vectors * VL; i++)
    if (real[i] == 0.0f) t[i] = MINUS_INF;
}

// tops[r] = max over lanes of sign p[r] + t, for N rows (hmax4 serves up to four of them at once).
template <int N, bool NEGATED>
SQ_INLINE void row_maxima(const float* p, const float* t, long vectors, float* tops) {
  vf top[4];
  SQ_UNROLL for (int i = 0; i < 4; i++) top[i] = splat(MINUS_INF);
  for (long j = 0; j < vectors; j++) {
    const vf tj = load(t + j * VL);
    SQ_UNROLL for (int i = 0; i < N; i++) {
      const vf x = load(p + i * LD + j * VL);
      top[i] = vmax(NEGATED ? tj - x : tj + x, top[i]);  // a NaN key leaves the maximum alone and shows in phi instead
    }
  }
  const v4 found = hmax4(top);
  SQ_UNROLL for (int i = 0; i < N; i++) tops[i] = found[i];
}

// Vectors whose exponentials are computed together; a divisor of those in a chunk.
constexpr int AT_ONCE = CV % 3 == 0 ? 3 : 4;

// phi = e^{sign p + t + shift} over one row; returns its sum, still spread over lanes.
template <bool NEGATED>
SQ_INLINE vf key_row(const float* p, float shift, const float* t, long vectors, float* phi) {
  const vf by = splat(shift);
  vf sum = zero();
  long j = 0;
  SQ_UNROLL for (; j + AT_ONCE <= vectors; j += AT_ONCE) {
    vf e[AT_ONCE];
    SQ_UNROLL for (int i = 0; i < AT_ONCE; i++) {
      const vf x = load(p + (j + i) * VL), level = load(t + (j + i) * VL) + by;
      e[i] = NEGATED ? level - x : level + x;
    }
    vexp_all<AT_ONCE>(e);
    SQ_UNROLL for (int i = 0; i < AT_ONCE; i++) store(phi + (j + i) * VL, e[i]), sum += e[i];
  }
  for (; j < vectors; j++) {
    const vf x = load(p + j * VL), level = load(t + j * VL) + by, e = vexp(NEGATED ? level - x : level + x);
    store(phi + j * VL, e);
    sum += e;
  }
  return sum;
}

// The same where t is so large that rounding of t + shift would exceed the range of e^x (a key of norm 1e5 has t = -1e9):
// the sum is formed as the maximum was, so that the largest exponent is 0 exactly.
template <bool NEGATED>
SQ_INLINE vf large_row(const float* p, float bias, float c, const float* t, long vectors, float* phi) {
  vf sum = zero();
  for (long j = 0; j < vectors; j++) {
    const vf x = load(p + j * VL), tj = load(t + j * VL);
    const vf e = vexp(((NEGATED ? tj - x : tj + x) + splat(bias)) - splat(c));
    store(phi + j * VL, e);
    sum += e;
  }
  return sum;
}

// Exponential features +-p of the keys, R rows: maxima first, then row after row, so that no exponential waits for one.
// FULL: a whole chunk, whose loops the compiler can unroll.
template <bool NEGATED, bool FULL>
static void key_rows(long R, const float* p, const float* bias, const float* t, long given, bool large,
                     const float* c_old, float* c_new, float* phi, float* sums) {
  const long vectors = FULL ? CV : given;
  long r = 0;
  for (; r + 4 <= R; r += 4) row_maxima<4, NEGATED>(p + r * LD, t, vectors, c_new + r);
  for (; r < R; r++) row_maxima<1, NEGATED>(p + r * LD, t, vectors, c_new + r);
  for (r = 0; r < R; r++) {
    const float b = bias ? bias[r] : 0.0f;
    c_new[r] = max1(c_new[r] + b, c_old[r]);
    sums[r] = b - or_zero(c_new[r]);
  }
  if (SQ_RARE(large)) {
    for (r = 0; r < R; r++)
      sums[r] = hsum(large_row<NEGATED>(p + r * LD, bias ? bias[r] : 0.0f, or_zero(c_new[r]), t, vectors, phi + r * LD));
    return;
  }
  for (r = 0; r + 4 <= R; r += 4) {
    vf sum[4];
    SQ_UNROLL for (int i = 0; i < 4; i++) sum[i] = key_row<NEGATED>(p + (r + i) * LD, sums[r + i], t, vectors, phi + (r + i) * LD);
    store4(sums + r, hsum4(sum));
  }
  for (; r < R; r++) sums[r] = hsum(key_row<NEGATED>(p + r * LD, sums[r], t, vectors, phi + r * LD));
}

SQ_INLINE vf plain_value(int function, vf p) {
  if (function == SQ_RELU) return vmax(zero(), p);
  if (function == SQ_ELU1) {
    const vi above = p > zero();
    // e^p as a square: vexp flushes subnormals to 0, and a key whose features are all 0 is lost without a trace.
    const vf root = vexp(p * splat(0.5f));
    const vi chosen = (above & bits(p + splat(1.0f))) | (~above & bits(root * root));
    return as_float(chosen);
  }
  return p;
}

// Features without a shift of rows [first, first + rows), in place of p.
static void plain_keys(const SqCall& pr, long first, long rows, const float* real, long vectors, const float* c_old,
                       float* c_new, float* phi, float* sums) {
  const vf eps = splat(pr.epsilon);
  for (long r = first; r < first + rows; r++) {
    vf sum = zero();
    for (long j = 0; j < vectors; j++) {
      const vi keep = load(real + j * VL) != zero();
      const vf f = as_float(keep & bits(plain_value(pr.function, load(phi + r * LD + j * VL)) + eps));
      store(phi + r * LD + j * VL, f);
      sum += f;
    }
    sums[r] = hsum(sum);
    c_new[r] = c_old[r];
  }
}

// phi[M][LD] of the keys x, their sums over tokens, and the state's new maxima.
static void key_features(const SqCall& pr, const Side& s, const float* x, const float* t, const float* real,
                         long vectors, const float* c_old, float* c_new, float* phi, float* sums, float* work,
                         Prefetches soon) {
  const long R = pr.rows, strip = strip_rows(pr);
  const bool full = vectors == CV;
  bool large = false;
  if (pr.function == SQ_EXP)
    for (long i = 0; i < vectors * VL; i++) large = large || (t[i] < -8192.0f && t[i] != MINUS_INF) || t[i] > 8192.0f;
  for (long first = 0; first < R; first += strip) {
    const long rows = R - first < strip ? R - first : strip;
    soon.issue((C * strip + R - 1) / R);
    project(pr, s, x, vectors, first, rows, phi, work);
    if (pr.function != SQ_EXP) {
      plain_keys(pr, first, rows, real, vectors, c_old, c_new, phi, sums);
      continue;
    }
    const float *bias = s.bias ? s.bias + first : nullptr, *p = phi + first * LD;
    // The mirrored rows first: the direct ones overwrite p.
    if (const long at = first + R; pr.antithetic)
      (full ? key_rows<true, true> : key_rows<true, false>)(rows, p, bias, t, vectors, large, c_old + at, c_new + at,
                                                            phi + at * LD, sums + at);
    (full ? key_rows<false, true> : key_rows<false, false>)(rows, p, bias, t, vectors, large, c_old + first,
                                                            c_new + first, phi + first * LD, sums + first);
  }
}

// One panel of exponential query features. p has its levels in it already, unless mirrored: level[M] = bias + c, up to a
// constant. A column of p is a cache line per row and stays in the first-level cache between the two passes.
template <bool ANTI>
static void query_panel(long R, const float* p, const float* level, const float* z, float* a, float* Z, float* tops) {
  vf top[NV], total[NV];
  SQ_UNROLL for (int n = 0; n < NV; n++) top[n] = splat(MINUS_INF), total[n] = zero();
  for (long r = 0; r < R; r++) {
    const vf up = ANTI ? splat(level[r]) : zero();
    SQ_UNROLL for (int n = 0; n < NV; n++) {
      const vf x = load(p + r * LD + n * VL);
      top[n] = vmax(ANTI ? x + up : x, top[n]);
    }
    if (ANTI) {
      const vf down = splat(level[r + R]);
      SQ_UNROLL for (int n = 0; n < NV; n++) top[n] = vmax(down - load(p + r * LD + n * VL), top[n]);
    }
  }
  SQ_UNROLL for (int n = 0; n < NV; n++) {
    const vi empty = top[n] == splat(MINUS_INF);
    top[n] = as_float(~empty & bits(top[n]));
  }
  // Two vectors of a row and of its mirror image, or of the next row: four exponentials at a time.
  long r = 0;
  for (; r + (ANTI ? 1 : 2) <= R; r += ANTI ? 1 : 2) {
    const long other = ANTI ? r + R : r + 1;
    vf e[2 * NV];
    SQ_UNROLL for (int n = 0; n < NV; n++) {
      const vf x = load(p + r * LD + n * VL);
      e[n] = (ANTI ? x + splat(level[r]) : x) - top[n];
      e[NV + n] = (ANTI ? splat(level[other]) - x : load(p + other * LD + n * VL)) - top[n];
    }
    vexp_all<2 * NV>(e);
    const vf weight = splat(z[r]), weight_other = splat(z[other]);
    SQ_UNROLL for (int n = 0; n < NV; n++) {
      store(a + other * LD + n * VL, e[NV + n]);
      store(a + r * LD + n * VL, e[n]);
      total[n] += e[NV + n] * weight_other;
      total[n] += e[n] * weight;
    }
  }
  for (; r < R; r++) {  // an odd row without a mirror image
    const vf weight = splat(z[r]);
    SQ_UNROLL for (int n = 0; n < NV; n++) {
      const vf e = vexp(load(p + r * LD + n * VL) - top[n]);
      store(a + r * LD + n * VL, e);
      total[n] += e * weight;
    }
  }
  SQ_UNROLL for (int n = 0; n < NV; n++) store(Z + n * VL, total[n]), store(tops + n * VL, top[n]);
}

// Features without a shift of one vector of queries, in place of p, and Z = sum_r a_r z_r.
SQ_INLINE void plain_queries(const SqCall& pr, const float* z, float* a, float* Z, float* top) {
  const long R = pr.rows;
  const vf eps = splat(pr.epsilon);
  vf total = zero();
  for (long r = 0; r < R;) {  // sums of sums: thousands of Taylor features would lose digits one by one
    vf part = zero();
    for (const long end = r + 64 < R ? r + 64 : R; r < end; r++) {
      const vf f = plain_value(pr.function, load(a + r * LD)) + eps;
      store(a + r * LD, f);
      part += f * splat(z[r]);
    }
    total += part;
  }
  store(Z, total);
  store(top, zero());
}

// level[M] = bias + c relative to the largest, which is returned: c may be in the billions, its differences are not.
static float feature_levels(const SqCall& pr, const Side& s, const float* c, float* level) {
  const long R = pr.rows, M = pr.features;
  for (long start = 0; start < M; start += R)
    for (long r = 0; r < R; r++) level[start + r] = (s.bias ? s.bias[r] : 0.0f) + c[start + r];
  vf tops = splat(MINUS_INF);
  float most = MINUS_INF;
  long r = 0;
  for (; r + VL <= M; r += VL) tops = vmax(load(level + r), tops);
  for (; r < M; r++) most = max1(level[r], most);
  most = or_zero(max1(hmax(tops), most));
  for (r = 0; r < M; r++) level[r] -= most;
  return most;
}

// a[M][LD] of the queries x and Z[lane] = sum_r a_r z_r, both divided by e^top[lane]; `level` is scratch for M floats.
// Panel by panel: the features of one stay in the first-level cache from the projection to the exponentials.
static void query_features(const SqCall& pr, const Side& s, const float* x, long vectors, const float* c,
                           const float* z, float* a, float* Z, float* top, float* level, float* work, Prefetches soon) {
  const bool shifted = pr.function == SQ_EXP;
  const float most = shifted ? feature_levels(pr, s, c, level) : 0.0f;
  Side levelled = s;
  if (shifted && !pr.antithetic) levelled.offset = level;  // what a product adds at its end costs nothing
  for (long j = 0; j < vectors; j += NV) {
    float *to = a + j * VL, *total = Z + j * VL, *tops = top + j * VL;
    soon.issue(T / 2);
    project(pr, levelled, x + j * VL, NV, 0, pr.rows, to, work);
    soon.issue(T / 2);
    if (!shifted)
      SQ_UNROLL for (int n = 0; n < NV; n++) plain_queries(pr, z, to + n * VL, total + n * VL, tops + n * VL);
    else if (pr.antithetic) query_panel<true>(pr.rows, to, level, z, to, total, tops);
    else query_panel<false>(pr.rows, to, level, z, to, total, tops);
    if (shifted)
      SQ_UNROLL for (int n = 0; n < NV; n++) store(tops + n * VL, load(tops + n * VL) + splat(most));
  }
}

}  // namespace SQ_NS
