// One chunk of up to C tokens of one (batch, KV head): everything the forward and the backward both need.
//
//   phi (M, C), a_g (M, C): features of keys and of the G query heads that share them, relative to c_new
//   A_g = tril(a_g^T phi), kept as A^T (key, query);   Z_g = a_g . (rho z) + A_g 1
//
// The shift c_new is the maximum over the state and the whole chunk. A row whose own keys are far below a later key of
// the chunk may find them underflowed (Z below 1e-20): then `prepare` reports false and the caller halves the chunk, down
// to single tokens, whose shift cannot come from the future. Nothing of the state is touched before that is known.
#pragma once

#include "features.h"

namespace SQ_NS {

constexpr float UNDERFLOW = 1e-20f;

// S[M][lds], z[M], c[M] of one head.
struct State {
  float *S, *z, *c;
};

struct Head {
  const SqProblem* pr;
  long b, h, groups;
  long lds;  // row stride of S, V and the gradients: E rounded up, an odd number of cache lines
  Side q, k;
};

struct Chunk {
  long t0, n, lanes, vectors;
  bool ok;
  float *phi, *c_new, *rho, *z_old, *sums, *real, *values;  // z_old = rho z; values[C][lds]
  float *a, *scores, *Z;                            // per group: a[g][M][LD], scores[g][C][LD], Z[g][C]
};

// Scratch shared by all chunks of a worker.
struct Work {
  float *x, *t, *rows, *out, *butterfly, *level;
};

SQ_INLINE long round_up(long n, long to) { return (n + to - 1) / to * to; }

SQ_INLINE long state_stride(long width) {
  const long lines = round_up(width, 16) / 16;
  return 16 * (lines | 1);
}

// Bump allocation inside one scratch block; every array starts on a cache line.
struct Arena {
  float* base;
  long used;
  float* take(long floats) {
    float* p = base ? base + used : nullptr;
    used += round_up(floats, 16);
    return p;
  }
};

static Chunk take_chunk(Arena& arena, const SqProblem& pr, long lds, bool causal, bool wants_queries) {
  const long M = pr.features, G = wants_queries ? pr.heads_q / pr.heads_kv : 0;
  Chunk ch = {};
  ch.phi = arena.take(M * LD);
  ch.c_new = arena.take(M);
  ch.rho = arena.take(M);
  ch.z_old = arena.take(M);
  ch.sums = arena.take(M);
  ch.real = arena.take(C);
  ch.values = arena.take(C * lds);
  ch.a = arena.take(G * M * LD);
  ch.scores = arena.take(causal ? G * C * LD : 0);
  ch.Z = arena.take(G * C);
  return ch;
}

static Work take_work(Arena& arena, const SqProblem& pr, long lds) {
  const long widest = pr.dim > pr.width ? pr.dim : pr.width;
  Work w = {};
  w.x = arena.take(padded(pr.dim) * LD);
  w.t = arena.take(C);
  w.level = arena.take(pr.features);
  w.rows = arena.take(C * widest);
  w.out = arena.take(lds * LD);
  w.butterfly = arena.take(pr.projection == SQ_HADAMARD ? padded(pr.dim) * LD : 0);
  return w;
}

SQ_INLINE Head head_of(const SqProblem& pr, long index) {
  const long h = index % pr.heads_kv;
  return {&pr, index / pr.heads_kv, h, pr.heads_q / pr.heads_kv, state_stride(pr.width), side_of(pr.map_q, h),
          side_of(pr.map_k, h)};
}

// values[C][lds] of the chunk's tokens, zero for masked ones and beyond the end. With CHECK: whether all are finite.
template <bool CHECK>
static bool fetch_values(const Head& hd, const SqTensor& v, long head, long t0, long n, const float* real, float* to) {
  const long E = hd.pr->width;
  fetch(v, hd.b, head, t0, n, E, to, hd.lds);
  vf poison = zero();
  const long whole = round_up(E, VL);  // products read whole vectors, never the padding behind them
  for (long i = 0; i < n; i++) {
    float* row = to + i * hd.lds;
    if (real && real[i] == 0.0f) memset(row, 0, sizeof(float) * E);
    for (long e = E; e < whole; e++) row[e] = 0.0f;
    if (CHECK)
      for (long e = 0; e < whole; e += VL) poison += load(row + e) * zero();
  }
  for (long i = n; i < C; i++) memset(to + i * hd.lds, 0, sizeof(float) * hd.lds);
  return hsum(poison) == 0.0f;
}

// Features of the chunk's keys, its values, the new maxima and rho. Returns false if a value is not finite.
static bool prepare_keys(const Head& hd, const Work& w, const State& st, long t0, long n, Chunk& ch) {
  const SqProblem& pr = *hd.pr;
  ch.t0 = t0;
  ch.n = n;
  ch.vectors = vectors_for(n);
  ch.lanes = ch.vectors * VL;
  const long real = real_lanes(pr, hd.b, t0, n, ch.lanes, ch.real);
  panel(pr.k, hd.b, hd.h, t0, n, ch.lanes, pr.dim, w.x, w.rows);
  if (real < n)  // whatever a masked key holds must not reach a product
    for (long i = 0; i < n; i++)
      if (ch.real[i] == 0.0f)
        for (long d = 0; d < pr.dim; d++) w.x[d * LD + i] = 0.0f;
  prefetch(pr.k, hd.b, hd.h, t0 + n, C, pr.length_k, pr.dim);
  prefetch(pr.v, hd.b, hd.h, t0 + n, C, pr.length_k, pr.width);
  project(pr, hd.k, w.x, ch.vectors, ch.phi, w.butterfly);
  if (pr.function == SQ_EXP) key_weights(pr, hd.k, w.x, ch.real, ch.vectors, w.t);
  key_features(pr, hd.k, ch.phi, w.t, ch.real, ch.vectors, st.c, ch.c_new, ch.phi, ch.sums);
  for (long r = 0; r < pr.features; r++) {
    // Maxima seldom move once the sequence is under way. c_old = -inf gives 0: nothing to rescale yet.
    ch.rho[r] = st.c[r] == ch.c_new[r] ? 1.0f : exp1(st.c[r] - ch.c_new[r]);
    ch.z_old[r] = ch.rho[r] * st.z[r];
  }
  const float* masked = real < n ? ch.real : nullptr;
  return pr.causal ? fetch_values<true>(hd, pr.v, hd.h, t0, n, masked, ch.values)
                   : fetch_values<false>(hd, pr.v, hd.h, t0, n, masked, ch.values);
}

// The state moves to the chunk's shift: S, z <- rho S, rho z; c <- c_new.
static void rescale(const Head& hd, const State& st, const Chunk& ch) {
  const SqProblem& pr = *hd.pr;
  for (long r = 0; r < pr.features; r++) {
    const float rho = ch.rho[r];
    st.c[r] = ch.c_new[r];
    if (rho == 1.0f) continue;
    st.z[r] = ch.z_old[r];
    float* row = st.S + r * hd.lds;
    for (long e = 0; e < pr.width; e += VL) store(row + e, load(row + e) * splat(rho));
  }
}

// S += phi V, z += sum phi.
static void accumulate(const Head& hd, const State& st, const Chunk& ch) {
  const SqProblem& pr = *hd.pr;
  gemm(pr.features, round_up(pr.width, VL) / VL, ch.n, ch.phi, LD, 1, ch.values, hd.lds, st.S, hd.lds, FROM_C);
  for (long r = 0; r < pr.features; r++) st.z[r] += ch.sums[r];
}

// Queries [t0, t0 + n) of group g: features a, and Z = a . z with the z given.
static void prepare_queries(const Head& hd, const Work& w, const float* c, const float* z, long g, long t0, long n,
                            float* a, float* Z) {
  const SqProblem& pr = *hd.pr;
  const long vectors = vectors_for(n);
  panel(pr.q, hd.b, hd.h * hd.groups + g, t0, n, vectors * VL, pr.dim, w.x, w.rows);
  prefetch(pr.q, hd.b, hd.h * hd.groups + g, t0 + n, C, pr.length_q, pr.dim);
  prefetch(pr.out, hd.b, hd.h * hd.groups + g, t0, n, pr.length_q, pr.width);
  project(pr, hd.q, w.x, vectors, a, w.butterfly);
  query_features(pr, hd.q, a, vectors, c, z, a, Z, w.level);
}

// Zero the entries of a (key, query) square whose key comes after the query, per panel of T queries.
SQ_INLINE void keep_causal(float* square, long panel_index) {
  for (long j = 0; j < T; j++) memset(square + (panel_index * T + j) * LD + panel_index * T, 0, sizeof(float) * j);
}

// The whole causal chunk except the read: false if some row has to be recomputed with a shorter chunk.
static bool prepare_causal(const Head& hd, const Work& w, const State& st, long t0, long n, Chunk& ch) {
  const SqProblem& pr = *hd.pr;
  const long M = pr.features;
  const bool finite_values = prepare_keys(hd, w, st, t0, n, ch);
  bool ok = finite_values;
  for (long g = 0; g < hd.groups; g++) {
    float *a = ch.a + g * M * LD, *scores = ch.scores + g * C * LD, *Z = ch.Z + g * C;
    prepare_queries(hd, w, ch.c_new, ch.z_old, g, t0, n, a, Z);
    for (long p = 0; p * NV < ch.vectors; p++) {
      const long keys = (p + 1) * T;
      gemm(keys, NV, M, ch.phi, 1, LD, a + p * T, LD, scores + p * T, LD, FROM_ZERO);
      keep_causal(scores, p);
      for (int v = 0; v < NV; v++) {
        float* at = Z + p * T + v * VL;
        vf sum = load(at);
        for (long j = 0; j < keys; j++) sum += load(scores + j * LD + p * T + v * VL);
        store(at, sum);
      }
    }
    if (pr.function == SQ_EXP)
      for (long i = 0; i < n; i++) ok = ok && Z[i] >= UNDERFLOW;
  }
  return ok;
}

}  // namespace SQ_NS
