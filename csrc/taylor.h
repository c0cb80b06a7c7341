// Taylor features of degree 2, formed inside the cache, tokens along the lanes:
//
//   phi(x) = [1, x_i, x_i x_j (i < j), x_i^2 / sqrt(2)],    phi(x) . phi(y) = 1 + x.y + (x.y)^2 / 2
//
// Pairs in the order of the upper triangle, row by row. The D (D + 3) / 2 + 1 features of a token are never in memory
// beyond the chunk; x itself is among them, which is all that the way back needs.
#pragma once

#include "vec.h"

namespace SQ_NS {

constexpr float ROOT_HALF = 0.70710678118654752f;

// p[1 + D + D (D + 1) / 2][LD] from the panel x[D][LD].
static void taylor_features(long D, const float* x, long vectors, float* p) {
  const long lanes = vectors * VL;
  for (long v = 0; v < lanes; v += VL) store(p + v, splat(1.0f));
  float* at = p + LD;
  for (long i = 0; i < D; i++, at += LD)
    for (long v = 0; v < lanes; v += VL) store(at + v, load(x + i * LD + v));
  for (long i = 0; i < D; i++) {
    for (long v = 0; v < lanes; v += VL) {
      const vf own = load(x + i * LD + v);
      store(at + v, own * own * splat(ROOT_HALF));
    }
    at += LD;
    for (long j = i + 1; j < D; j++, at += LD)
      for (long v = 0; v < lanes; v += VL) store(at + v, load(x + i * LD + v) * load(x + j * LD + v));
  }
}

// dx[D][LD] from the features f and their gradient g.
static void taylor_back(long D, const float* f, const float* g, long vectors, float* dx) {
  const long lanes = vectors * VL;
  const float* x = f + LD;
  memcpy(dx, g + LD, sizeof(float) * D * LD);
  const float* at = g + (1 + D) * LD;
  for (long i = 0; i < D; i++) {
    for (long v = 0; v < lanes; v += VL) {
      const vf twice = load(at + v) * splat(2.0f * ROOT_HALF);
      store(dx + i * LD + v, load(dx + i * LD + v) + twice * load(x + i * LD + v));
    }
    at += LD;
    for (long j = i + 1; j < D; j++, at += LD)
      for (long v = 0; v < lanes; v += VL) {
        const vf grad = load(at + v);
        store(dx + i * LD + v, load(dx + i * LD + v) + grad * load(x + j * LD + v));
        store(dx + j * LD + v, load(dx + j * LD + v) + grad * load(x + i * LD + v));
      }
  }
}

// The features of one token.
static void taylor_one(long D, const float* x, float* p) {
  p[0] = 1.0f;
  memcpy(p + 1, x, sizeof(float) * D);
  float* at = p + 1 + D;
  for (long i = 0; i < D; i++) {
    for (long j = i; j < D; j++) at[j - i] = x[i] * x[j];
    at[0] *= ROOT_HALF;
    at += D - i;
  }
}

}  // namespace SQ_NS
