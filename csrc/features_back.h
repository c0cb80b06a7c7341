// The way back from features to tokens:  dp = the gradient of the log features (or of f) folded over +-,  dx = W^T dp.
#pragma once

#include "features.h"

namespace SQ_NS {

// f'(p) from the feature's value f(p) + epsilon.
SQ_INLINE vf plain_slope(int function, vf value, vf epsilon) {
  const vf one = splat(1.0f), f = value - epsilon;
  if (function == SQ_RELU) return as_float((f > zero()) & bits(one));
  if (function == SQ_ELU1) {
    const vi above = f > one;
    return as_float((above & bits(one)) | (~above & bits(f)));
  }
  return one;
}

// dx[dim][LD] = W^T dp, the transpose of `project`; f: the features.
static void project_back(const SqCall& pr, const Side& s, const float* f, const float* dp, long vectors, float* dx,
                         float* work) {
  if (pr.projection == SQ_DENSE) {
    gemm(pr.dim, vectors, pr.rows, s.weight, 1, pr.dim, dp, LD, dx, LD, FROM_ZERO);
  } else if (pr.projection == SQ_HADAMARD) {
    hadamard_back(pr.rows, pr.dim, pr.blocks, s.signs, s.norms, dp, vectors, dx, work);
  } else if (pr.function == SQ_TAYLOR) {
    taylor_back(pr.dim, f, dp, vectors, dx);
  } else {
    for (long r = 0; r < pr.rows; r++) memcpy(dx + r * LD, dp + r * LD, sizeof(float) * vectors * VL);
  }
}

// dp[R][LD] from the features f[M][LD] and the gradient g[r][lane] + left[r] right[lane] with respect to them; dp may be
// g. total[lane] receives the sum over features of the gradient of the log features: the gradient with respect to t.
static void features_back(const SqCall& pr, const float* f, const float* g, const float* left, const float* right,
                          long vectors, float* dp, float* total) {
  const long R = pr.rows;
  const bool plain = pr.function != SQ_EXP, anti = pr.antithetic != 0;
  const vf eps = splat(pr.epsilon);
  for (long j = 0; j < vectors; j += NV) {
    vf sum[NV], lane[NV];
    SQ_UNROLL for (int n = 0; n < NV; n++) sum[n] = zero(), lane[n] = load(right + (j + n) * VL);
    for (long r = 0; r < R; r++) {
      const vf l = splat(left[r]);
      SQ_UNROLL for (int n = 0; n < NV; n++) {
        const long at = r * LD + (j + n) * VL;
        const vf value = load(f + at), grad = load(g + at) + l * lane[n];
        vf up = grad * (plain ? plain_slope(pr.function, value, eps) : value);
        sum[n] += up;
        if (anti) {
          const long mirror = at + R * LD;
          const vf down = (load(g + mirror) + splat(left[r + R]) * lane[n]) * load(f + mirror);
          sum[n] += down;
          up -= down;
        }
        store(dp + at, up);
      }
    }
    SQ_UNROLL for (int n = 0; n < NV; n++) store(total + (j + n) * VL, sum[n]);
  }
}

// sums[r] += sum_lanes f[r][lane] weight[lane].
static void add_row_dots(long rows, const float* f, const float* weight, long vectors, float* sums) {
  long r = 0;
  for (; r + 4 <= rows; r += 4) {
    vf s[4] = {zero(), zero(), zero(), zero()};
    for (long j = 0; j < vectors; j++) {
      const vf w = load(weight + j * VL);
      SQ_UNROLL for (int i = 0; i < 4; i++) s[i] += load(f + (r + i) * LD + j * VL) * w;
    }
    store4(sums + r, load4(sums + r) + hsum4(s));
  }
  for (; r < rows; r++) {
    vf s = zero();
    for (long j = 0; j < vectors; j++) s += load(f + r * LD + j * VL) * load(weight + j * VL);
    sums[r] += hsum(s);
  }
}

}  // namespace SQ_NS
