// exp(x) = 2^n p(f),  n = round(x / ln 2),  f = x - n ln 2 in [-ln2/2, ln2/2],  p a degree-5 minimax polynomial (1e-7).
//
// Relative error at most 2e-7 near 0 (one more degree would halve it; the rounding of the argument soon exceeds both),
// growing with |x| to 3e-7, for x in [-87, 88]. Below -87.69 the result is exactly 0, which
// is what a masked key (x = -inf) needs; NaN stays NaN. Arguments are shifted by a maximum, so x <= 0 in practice.
#pragma once

#include "vec.h"

namespace SQ_NS {

// N exponentials in step with each other. One alone is a chain of a dozen dependent operations: written one after the
// other, a few of them fill the processor's queue of waiting operations, and its units run dry.
template <int N>
SQ_INLINE void vexp_all(vf* x) {
  // 1.5 * 2^23 + 127: after the addition the low mantissa bits hold n + 127, the exponent field of 2^n.
  const vf magic = splat(12583039.0f);
  vf t[N], f[N], p[N];
  // n = -127 gives the bit pattern 0, the factor 0.0: underflow and -inf cost one max instead of a select.
  SQ_UNROLL for (int i = 0; i < N; i++) x[i] = vmax(splat(-88.02969f), x[i]);
  SQ_UNROLL for (int i = 0; i < N; i++) t[i] = x[i] * splat(1.44269504088896341f) + magic;
  SQ_UNROLL for (int i = 0; i < N; i++) f[i] = t[i] - magic;
#if defined(__FMA__)
  SQ_UNROLL for (int i = 0; i < N; i++) f[i] = fused(f[i], splat(-0.693147180559945286f), x[i]);
#else
  // Two roundings: n times the short leading part of ln 2 is exact, the rest follows (Cody and Waite).
  SQ_UNROLL for (int i = 0; i < N; i++) f[i] = (x[i] - f[i] * splat(0.693359375f)) - f[i] * splat(-2.12194440e-4f);
#endif
  SQ_UNROLL for (int i = 0; i < N; i++) p[i] = f[i] * splat(0.008312501013278961f) + splat(0.041890330612659454f);
  SQ_UNROLL for (int i = 0; i < N; i++) p[i] = p[i] * f[i] + splat(0.16667115688323975f);
  SQ_UNROLL for (int i = 0; i < N; i++) p[i] = p[i] * f[i] + splat(0.499992311000824f);
  SQ_UNROLL for (int i = 0; i < N; i++) p[i] = p[i] * f[i] + splat(1.0f);
  SQ_UNROLL for (int i = 0; i < N; i++) p[i] = p[i] * f[i] + splat(1.0f);
  SQ_UNROLL for (int i = 0; i < N; i++) x[i] = p[i] * as_float(bits(t[i]) << 23);
}

SQ_INLINE vf vexp(vf x) {
  vexp_all<1>(&x);
  return x;
}

SQ_INLINE float exp1(float x) {
  vf v = vexp(splat(x));
  return v[0];
}

}  // namespace SQ_NS
