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
  float *a, *scores, *Z, *top;                              // per group: a[g][M][LD], scores[g][C][LD], Z[g][C], top[g][C]
};

// Scratch shared by all chunks of a worker.
struct Work {
  float *x, *t, *rows, *out, *butterfly, *level;
  float* products;  // of the forward (products.h)
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
  ch.top = arena.take(G * C);
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

// The part of walk positions [t0, t0 + n) whose keys are stored: `count` of them from lane `skip` on, at `token`.
struct Stored {
  long token, skip, count;
};

SQ_INLINE Stored stored_keys(const SqProblem& pr, long t0, long n) {
  const long first = t0 + pr.key_shift, last = first + n;
  const long from = first < 0 ? 0 : first, to = last < pr.keys_stored ? last : pr.keys_stored;
  if (to <= from) return {0, 0, 0};
  return {from, from - first, to - from};
}

// The chunk's keys as a panel; lanes without a stored key are zero.
static void key_panel(const Head& hd, long t0, long n, long lanes, float* to, float* rows) {
  const SqProblem& pr = *hd.pr;
  const Stored s = stored_keys(pr, t0, n);
  panel(pr.k, hd.b, hd.h, s.token, s.count, lanes - s.skip, pr.dim, to + s.skip, rows);
  if (s.skip)
    for (long d = 0; d < pr.dim; d++) memset(to + d * LD, 0, sizeof(float) * s.skip);
}

// values[rows][lds] of n tokens, zero for masked ones and beyond the end. With CHECK: whether all are finite.
template <bool CHECK>
static bool fetch_values(const Head& hd, const SqTensor& v, long head, long t0, long n, long rows, const float* real,
                         float* to) {
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
  for (long i = n; i < rows; i++) memset(to + i * hd.lds, 0, sizeof(float) * hd.lds);
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
  key_panel(hd, t0, n, ch.lanes, w.x, w.rows);
  if (real < n)  // whatever a masked key holds must not reach a product
    for (long i = 0; i < n; i++)
      if (ch.real[i] == 0.0f)
        for (long d = 0; d < pr.dim; d++) w.x[d * LD + i] = 0.0f;
  const Stored here = stored_keys(pr, t0, n), next = stored_keys(pr, t0 + n, C);
  prefetch(pr.k, hd.b, hd.h, next.token, next.count, pr.keys_stored, pr.dim);
  prefetch(pr.v, hd.b, hd.h, next.token, next.count, pr.keys_stored, pr.width);
  if (pr.function == SQ_EXP) key_weights(pr, hd.k, w.x, ch.real, ch.vectors, w.t);
  key_features(pr, hd.k, w.x, w.t, ch.real, ch.vectors, st.c, ch.c_new, ch.phi, ch.sums, w.butterfly);
  for (long r = 0; r < pr.features; r++) {
    // Maxima seldom move once the sequence is under way. c_old = -inf gives 0: nothing to rescale yet.
    ch.rho[r] = st.c[r] == ch.c_new[r] ? 1.0f : exp1(st.c[r] - ch.c_new[r]);
    ch.z_old[r] = ch.rho[r] * st.z[r];
  }
  const float* masked = real < n ? ch.real + here.skip : nullptr;
  float* values = ch.values + here.skip * hd.lds;
  if (here.skip) memset(ch.values, 0, sizeof(float) * here.skip * hd.lds);
  return pr.causal ? fetch_values<true>(hd, pr.v, hd.h, here.token, here.count, C - here.skip, masked, values)
                   : fetch_values<false>(hd, pr.v, hd.h, here.token, here.count, C - here.skip, masked, values);
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

// How many of the walk positions [t0, t0 + n) have a query.
SQ_INLINE long queries_in(const SqProblem& pr, long t0, long n) {
  const long left = pr.length_q - t0;
  return left < 0 ? 0 : left < n ? left : n;
}

// Queries [t0, t0 + n) of group g: features a, and Z = a . z with the z given, both divided by e^top.
static void prepare_queries(const Head& hd, const Work& w, const float* c, const float* z, long g, long t0, long n,
                            float* a, float* Z, float* top) {
  const SqProblem& pr = *hd.pr;
  const long vectors = vectors_for(n);
  n = queries_in(pr, t0, n);
  panel(pr.q, hd.b, hd.h * hd.groups + g, t0, n, vectors * VL, pr.dim, w.x, w.rows);
  prefetch(pr.q, hd.b, hd.h * hd.groups + g, t0 + n, C, pr.length_q, pr.dim);
  prefetch(pr.out, hd.b, hd.h * hd.groups + g, t0, n, pr.length_q, pr.width);
  query_features(pr, hd.q, w.x, vectors, c, z, a, Z, top, w.level, w.butterfly);
  if (pr.function == SQ_EXP && (hd.q.square != 0.0f || hd.q.tilt)) {  // only where the rows' own scale is wanted
    token_weights(pr, hd.q, w.x, vectors, w.t);
    for (long j = 0; j < vectors; j++) store(top + j * VL, load(top + j * VL) + load(w.t + j * VL));
  }
}

// Zero the entries of a (key, query) square whose key comes after the query, per panel of T queries.
SQ_INLINE void keep_causal(float* square, long panel_index) {
  for (long j = 0; j < T; j++) memset(square + (panel_index * T + j) * LD + panel_index * T, 0, sizeof(float) * j);
}

// The whole causal chunk except the read. Returns false if a value is not finite: 0 times it would reach earlier rows.
static bool prepare_rows(const Head& hd, const Work& w, const State& st, long t0, long n, Chunk& ch) {
  const SqProblem& pr = *hd.pr;
  const long M = pr.features;
  const bool ok = prepare_keys(hd, w, st, t0, n, ch);
  for (long g = 0; g < hd.groups; g++) {
    float *a = ch.a + g * M * LD, *scores = ch.scores + g * C * LD, *Z = ch.Z + g * C;
    prepare_queries(hd, w, ch.c_new, ch.z_old, g, t0, n, a, Z, ch.top + g * C);
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
  }
  return ok;
}

// `prepare_rows`; false if some row has to be recomputed with a shorter chunk.
static bool prepare_causal(const Head& hd, const Work& w, const State& st, long t0, long n, Chunk& ch) {
  bool ok = prepare_rows(hd, w, st, t0, n, ch);
  if (hd.pr->function == SQ_EXP)
    for (long g = 0; g < hd.groups; g++)
      for (long i = 0; i < n; i++) ok = ok && ch.Z[g * C + i] >= UNDERFLOW;
  return ok;
}

}  // namespace SQ_NS
