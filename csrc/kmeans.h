// k-means on rows: the nearest mean of every token, and the means of their members.
//
// Scores x.c + bias_c of TOKENS tokens with all means are one product, tokens along the lanes. With bias = -|c|^2 / 2 the
// largest belongs to the nearest mean; of codes of +-1 with bias 0 it belongs to the code at the smallest Hamming distance.
#pragma once

#include "gemm.h"

namespace SQ_NS {

constexpr long TOKENS = 64;  // whose scores are formed together

struct Means {
  long clusters, dim, ld;
  float *rows, *bias;  // [clusters][ld], [clusters]
  float slack;         // scores that differ by less are equal: repeated tokens must not be told apart by rounding
};

static void square_bias(const Means& m) {
  for (long c = 0; c < m.clusters; c++) {
    vf square = zero();
    for (long d = 0; d < m.ld; d += VL) square += load(m.rows + c * m.ld + d) * load(m.rows + c * m.ld + d);
    m.bias[c] = -0.5f * hsum(square);
  }
}

// The first mean whose score is the largest but for rounding, for up to TOKENS of the `left` tokens in panel[dim][ldt], whole
// vectors of them. `scores` has room for clusters * TOKENS.
static void nearest(const Means& m, const float* panel, long ldt, long left, float* scores, int32_t* assigned) {
  const long vectors = ((left < TOKENS ? left : TOKENS) + VL - 1) / VL;
  gemm(m.clusters, vectors, m.dim, m.rows, m.ld, 1, panel, ldt, scores, TOKENS, FROM_BIAS, m.bias);
  for (long j = 0; j < vectors; j++) {
    vf best = load(scores + j * VL);
    for (long c = 1; c < m.clusters; c++) best = vmax(load(scores + c * TOKENS + j * VL), best);
    best -= splat(m.slack);
    vi which = {};
    for (long c = m.clusters - 1; c >= 0; c--) {
      const vi near = load(scores + c * TOKENS + j * VL) >= best;
      which = (near & ((vi){} + (int32_t)c)) | (~near & which);
    }
    memcpy(assigned + j * VL, &which, sizeof which);
  }
}

// Means of the n tokens' rows; one without members keeps its place, and may win members later. `count` has room for clusters.
static void update_means(const Means& m, long n, const float* rows, const int32_t* assigned, int32_t* count) {
  memset(count, 0, sizeof(int32_t) * m.clusters);
  for (long i = 0; i < n; i++) count[assigned[i]]++;
  for (long c = 0; c < m.clusters; c++)
    if (count[c]) memset(m.rows + c * m.ld, 0, sizeof(float) * m.ld);
  for (long i = 0; i < n; i++) {
    float* to = m.rows + assigned[i] * m.ld;
    for (long d = 0; d < m.ld; d += VL) store(to + d, load(to + d) + load(rows + i * m.ld + d));
  }
  for (long c = 0; c < m.clusters; c++) {
    if (!count[c]) continue;
    const vf part = splat(1.0f / (float)count[c]);
    for (long d = 0; d < m.ld; d += VL) store(m.rows + c * m.ld + d, load(m.rows + c * m.ld + d) * part);
  }
}

}  // namespace SQ_NS
