// The definition in scalar C++, one head, no shifts: what the kernels compute, for readers. tests/kernels/test_scalar.py
// compiles this file and compares the kernels with it; the library does not contain it.
//
//   q (L, D), k (L, D), v (L, E); a (L, M), p (L, M): features of queries and keys. window < 0: nothing is near; M = 0:
//   nothing is far.
#include <cmath>
#include <cstdlib>

struct Scalar {
  long L, D, E, M, window, sinks, causal;
  double scale;
  const double *q, *k, *v, *a, *p;
};

static double dot(const double* x, const double* y, long n) {
  double sum = 0;
  for (long i = 0; i < n; i++) sum += x[i] * y[i];
  return sum;
}

static bool near(const Scalar& s, long i, long j) { return s.window >= 0 && (labs(i - j) <= s.window || j < s.sinks); }

static double weight(const Scalar& s, long i, long j) {
  if (s.causal && j > i) return 0;
  return near(s, i, j) ? exp(s.scale * dot(s.q + i * s.D, s.k + j * s.D, s.D)) : dot(s.a + i * s.M, s.p + j * s.M, s.M);
}

// out_i = sum_j w_ij v_j / Z_i,  Z_i = sum_j w_ij
extern "C" void scalar_forward(const Scalar* s, double* out) {
  for (long i = 0; i < s->L; i++) {
    double Z = 0;
    for (long j = 0; j < s->L; j++) {
      const double w = weight(*s, i, j);
      Z += w;
      for (long e = 0; e < s->E; e++) out[i * s->E + e] += w * s->v[j * s->E + e];
    }
    for (long e = 0; e < s->E; e++) out[i * s->E + e] /= Z;
  }
}

// With G = dL/d out: dw_ij = G_i . (v_j - out_i) / Z_i, and from there to scores (near) or features (far).
extern "C" void scalar_backward(const Scalar* s, const double* out, const double* G, double* dq, double* dk, double* dv,
                                double* da, double* dp) {
  const long D = s->D, E = s->E, M = s->M;
  for (long i = 0; i < s->L; i++) {
    double Z = 0;
    for (long j = 0; j < s->L; j++) Z += weight(*s, i, j);
    for (long j = 0; j < (s->causal ? i + 1 : s->L); j++) {
      const double w = weight(*s, i, j), dw = (dot(G + i * E, s->v + j * E, E) - dot(G + i * E, out + i * E, E)) / Z;
      for (long e = 0; e < E; e++) dv[j * E + e] += w / Z * G[i * E + e];
      if (near(*s, i, j))
        for (long d = 0; d < D; d++)
          dq[i * D + d] += s->scale * w * dw * s->k[j * D + d], dk[j * D + d] += s->scale * w * dw * s->q[i * D + d];
      else
        for (long r = 0; r < M; r++) da[i * M + r] += dw * s->p[j * M + r], dp[j * M + r] += dw * s->a[i * M + r];
    }
  }
}

// Token t after those before it, causally: S (M, E), z (M) hold the tokens that have left the window and are no sinks.
extern "C" void scalar_step(const Scalar* s, long t, double* S, double* z, double* out) {
  const long E = s->E, M = s->M, left = t - s->window - 1;  // without a window the token itself
  const bool leaves = left >= s->sinks;
  for (long r = 0; leaves && r < M; r++) {
    z[r] += s->p[left * M + r];
    for (long e = 0; e < E; e++) S[r * E + e] += s->p[left * M + r] * s->v[left * E + e];
  }
  double Z = dot(s->a + t * M, z, M);
  for (long e = 0; e < E; e++)
    for (long r = 0; r < M; r++) out[e] += s->a[t * M + r] * S[r * E + e];
  for (long j = 0; j <= t; j++) {
    if (!near(*s, t, j)) continue;  // the first `sinks` and the last `window` tokens: all that is remembered by itself
    const double w = weight(*s, t, j);
    Z += w;
    for (long e = 0; e < E; e++) out[e] += w * s->v[j * E + e];
  }
  for (long e = 0; e < E; e++) out[e] /= Z;
}
