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
  const SqCall* pr;
  long b, h, groups;
  long lds;  // row stride of S, V and the gradients: E rounded up, an odd number of cache lines
  Side q, k;
};

struct Chunk {
  long t0, n, lanes, vectors;
  bool ok;
  float *phi, *c_new, *rho, *z_old, *sums, *real, *values;  // z_old = rho z; values[C][lds]
  const float* v;                                           // v[n][ldv]: `values`, or the tensor's own rows
  long ldv;
  float *a, *scores, *Z, *top;                              // per group: a[g][M][LD], scores[g][C][LD], Z[g][C], top[g][C]
};

// Scratch shared by all chunks of a worker.
struct Work {
  float *x, *t, *rows, *out, *butterfly, *level;
  float* products;  // of the forward (products.h)
};

SQ_INLINE long round_up(long n, long to) { return (n + to - 1) / to * to; }

// Vectors in a row of values.
SQ_INLINE long value_vectors(const SqCall& pr) { return round_up(pr.width, VL) / VL; }

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

// Lets `take` lay its arrays out in this thread's scratch block: once to measure, once to take. False: no memory.
template <class Take>
static bool in_scratch(Take take) {
  Arena arena = {nullptr, 0};
  take(arena);
  arena = {sq_scratch(arena.used), 0};
  if (!arena.base) return false;
  take(arena);
  return true;
}

static State take_state(Arena& arena, long M, long lds) {
  return {arena.take(M * lds), arena.take(M), arena.take(M)};
}

static Chunk take_chunk(Arena& arena, const SqCall& pr, long lds, bool causal, bool wants_queries) {
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

static Work take_work(Arena& arena, const SqCall& pr, long lds) {
  const long widest = pr.dim > pr.width ? pr.dim : pr.width;
  Work w = {};
  w.x = arena.take(padded(pr.dim) * LD);
  w.t = arena.take(C);
  w.level = arena.take(pr.features);
  w.rows = arena.take(C * widest);
  w.out = arena.take(lds * LD);  // [E][LD] or [C][lds]
  w.butterfly = arena.take(pr.projection == SQ_HADAMARD ? padded(pr.dim) * LD : 0);
  return w;
}

SQ_INLINE Head head_of(const SqCall& pr, long index) {
  const long h = index % pr.heads_kv;
  return {&pr, index / pr.heads_kv, h, pr.heads_q / pr.heads_kv, state_stride(pr.width), side_of(pr.map_q, h),
          side_of(pr.map_k, h)};
}

// The part of walk positions [t0, t0 + n) whose keys are stored: `count` of them from lane `skip` on, at `token`.
struct Stored {
  long token, skip, count;
};

SQ_INLINE Stored stored_keys(const SqCall& pr, long t0, long n) {
  const long first = t0 + pr.key_shift, last = first + n;
  const long from = first < 0 ? 0 : first, to = last < pr.keys_stored ? last : pr.keys_stored;
  if (to <= from) return {0, 0, 0};
  return {from, from - first, to - from};
}

// The chunk's keys as a panel; lanes without a stored key are zero.
static void key_panel(const Head& hd, long t0, long n, long lanes, float* to, float* rows) {
  const SqCall& pr = *hd.pr;
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

// rho = e^{c - c_new}, 1 where the maximum stays: also where there was no key and is none. Nothing before, so nothing to
// rescale: c = -inf gives 0.
SQ_INLINE vf rescaling(vf c, vf c_new) {
  const vi same = c == c_new;
  return as_float((same & bits(splat(1.0f))) | (~same & bits(vexp(c - c_new))));
}

// Features of the chunk's keys, the new maxima and rho. Returns how many keys are real.
static long prepare_features(const Head& hd, const Work& w, const State& st, long t0, long n, Chunk& ch) {
  const SqCall& pr = *hd.pr;
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
  const Stored next = stored_keys(pr, t0 + n, C);
  if (pr.function == SQ_EXP) key_weights(pr, hd.k, w.x, ch.real, ch.vectors, w.t);
  key_features(pr, hd.k, w.x, w.t, ch.real, ch.vectors, st.c, ch.c_new, ch.phi, ch.sums, w.butterfly,
               {prefetch_rows(pr.k, hd.b, hd.h, next.token, next.count, pr.keys_stored, pr.dim),
                prefetch_rows(pr.v, hd.b, hd.h, next.token, next.count, pr.keys_stored, pr.width)});
  long r = 0;
  for (; r + VL <= pr.features; r += VL) {
    const vf rho = rescaling(load(st.c + r), load(ch.c_new + r));
    store(ch.rho + r, rho);
    store(ch.z_old + r, rho * load(st.z + r));
  }
  for (; r < pr.features; r++) {
    ch.rho[r] = rescaling(splat(st.c[r]), splat(ch.c_new[r]))[0];
    ch.z_old[r] = ch.rho[r] * st.z[r];
  }
  return real;
}

// The chunk's values. Returns false if one is not finite.
static bool prepare_values(const Head& hd, long real, Chunk& ch) {
  const SqCall& pr = *hd.pr;
  const Stored here = stored_keys(pr, ch.t0, ch.n);
  const float* masked = real < ch.n ? ch.real + here.skip : nullptr;
  float* values = ch.values + here.skip * hd.lds;
  ch.v = ch.values;
  ch.ldv = hd.lds;
  if (here.skip) memset(ch.values, 0, sizeof(float) * here.skip * hd.lds);
  return pr.causal ? fetch_values<true>(hd, pr.v, hd.h, here.token, here.count, C - here.skip, masked, values)
                   : fetch_values<false>(hd, pr.v, hd.h, here.token, here.count, C - here.skip, masked, values);
}

// The same for the state update alone, which can take the tensor's own rows: if they are whole vectors of float32, none is
// masked, and they are not so many lines apart that a chunk of them falls into a few cache sets.
static void borrow_values(const Head& hd, long real, Chunk& ch) {
  const SqCall& pr = *hd.pr;
  const Stored here = stored_keys(pr, ch.t0, ch.n);
  const bool apart = pr.v.stride[2] % 128 == 0;  // 512 bytes
  if (pr.v.dtype != SQ_FLOAT32 || pr.v.stride[3] != 1 || apart || pr.width % VL || real < ch.n) {
    prepare_values(hd, real, ch);
    return;
  }
  ch.v = (const float*)pr.v.data + offset_of(pr.v, hd.b, hd.h, here.token);
  ch.ldv = pr.v.stride[2];
}

// Features and values. Returns false if a value is not finite.
static bool prepare_keys(const Head& hd, const Work& w, const State& st, long t0, long n, Chunk& ch) {
  return prepare_values(hd, prepare_features(hd, w, st, t0, n, ch), ch);
}

// Whether eight neighbours are all 1.0f.
SQ_INLINE bool all_ones(const float* x) {
  uint64_t pairs[4];
  memcpy(pairs, x, sizeof pairs);
  const uint64_t ones = 0x3f8000003f800000u;
  return (((pairs[0] ^ ones) | (pairs[1] ^ ones)) | ((pairs[2] ^ ones) | (pairs[3] ^ ones))) == 0;
}

// z <- rho z, c <- c_new.
static void rescale_sums(const Head& hd, const State& st, const Chunk& ch) {
  memcpy(st.c, ch.c_new, sizeof(float) * hd.pr->features);
  memcpy(st.z, ch.z_old, sizeof(float) * hd.pr->features);
}

// The state moves to the chunk's shift: S, z <- rho S, rho z; c <- c_new.
static void rescale(const Head& hd, const State& st, const Chunk& ch) {
  const SqCall& pr = *hd.pr;
  rescale_sums(hd, st, ch);
  for (long r = 0; r < pr.features; r++) {
    // Maxima seldom move once the sequence is under way.
    if (r % 8 == 0 && r + 8 <= pr.features && all_ones(ch.rho + r)) {
      r += 7;
      continue;
    }
    if (ch.rho[r] == 1.0f) continue;
    float* row = st.S + r * hd.lds;
    for (long e = 0; e < pr.width; e += VL) store(row + e, load(row + e) * splat(ch.rho[r]));
  }
}

// S += phi V, z += sum phi; rho S instead of S where `rho` is given.
static void accumulate(const Head& hd, const State& st, const Chunk& ch, const float* rho = nullptr) {
  const SqCall& pr = *hd.pr;
  gemm(pr.features, value_vectors(pr), ch.n, ch.phi, LD, 1, ch.v, ch.ldv, st.S, hd.lds, rho ? FROM_SCALED : FROM_C, rho);
  for (long r = 0; r < pr.features; r++) st.z[r] += ch.sums[r];
}

// How many of the walk positions [t0, t0 + n) have a query.
SQ_INLINE long queries_in(const SqCall& pr, long t0, long n) {
  const long left = pr.length_q - t0;
  return left < 0 ? 0 : left < n ? left : n;
}

// Queries [t0, t0 + n) of group g: features a, and Z = a . z with the z given, both divided by e^top.
static void prepare_queries(const Head& hd, const Work& w, const float* c, const float* z, long g, long t0, long n,
                            float* a, float* Z, float* top) {
  const SqCall& pr = *hd.pr;
  const long vectors = vectors_for(n);
  n = queries_in(pr, t0, n);
  const long head = hd.h * hd.groups + g;
  panel(pr.q, hd.b, head, t0, n, vectors * VL, pr.dim, w.x, w.rows);
  query_features(pr, hd.q, w.x, vectors, c, z, a, Z, top, w.level, w.butterfly,
                 {prefetch_rows(pr.q, hd.b, head, t0 + n, C, pr.length_q, pr.dim),
                  prefetch_rows(pr.out, hd.b, head, t0, n, pr.length_q, pr.width)});
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
  const SqCall& pr = *hd.pr;
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
