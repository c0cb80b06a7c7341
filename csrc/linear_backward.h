// Backward, G = dL/dO. With u = [v, 1] and the normaliser Z of each row:
//
//   g_i = G_i / Z_i,  h_i = -(G_i . O_i) / Z_i                    gradients of numerator and normaliser
//   d phi(q_i) = S g_i + z h_i            R = sum_i phi(q_i) [g_i, h_i]
//   d phi(k_j) = R u_j,   d v_j = R^T phi(k_j)                    full: R over all queries; causal: over queries i >= j
//   d log phi = phi * d phi,  dp = d log phi(+) - d log phi(-),  dx = W^T dp  (+ the gradient of t for keys)
//
// Shifts (c, the row maxima) are constants: no output depends on them. Features are recomputed chunk by chunk. The causal
// form walks over segments in reverse: inside one it goes forward once from the segment's stored state (for d phi(q)),
// then backward once (for d phi(k), dv). Nothing is ever rebuilt by subtraction. R lives in the shift of the current
// chunk; stepping to the chunk before multiplies it by that chunk's rho <= 1.
#pragma once

#include "features_back.h"
#include "linear_forward.h"

namespace SQ_NS {

struct BackWork {
  Work w;
  float *big, *lanes, *total, *dx, *turned;  // [M][LD], [E][LD], [C], [D][LD], [C][LD]
};

static BackWork take_back_work(Arena& arena, const SqCall& pr, long lds) {
  BackWork b = {};
  b.w = take_work(arena, pr, lds);
  b.big = arena.take(pr.features * LD);
  b.lanes = arena.take(lds * LD);
  b.total = arena.take(C);
  b.dx = arena.take(padded(pr.dim) * LD);
  b.turned = arena.take(C * LD);
  return b;
}

// g[C][lds], h[C] of the queries [t0, t0 + n) of head `head`, and g^T in lanes[E][LD]. `rows` is scratch.
static void row_gradients(const Head& hd, long head, long t0, long n, const float* Z, float* g, float* h, float* lanes,
                          float* rows) {
  const SqCall& pr = *hd.pr;
  const long E = pr.width;
  fetch_values<false>(hd, pr.dout, head, t0, n, C, nullptr, g);
  fetch(pr.out, hd.b, head, t0, n, E, rows, E);
  for (long i = 0; i < C; i++) {
    h[i] = 0.0f;
    if (i >= n || !pr.normalise) continue;
    float* gi = g + i * hd.lds;
    float dot = 0.0f;
    vf dots = zero();
    long e = 0;
    for (; e + VL <= E; e += VL) dots += load(gi + e) * load(rows + i * E + e);
    for (; e < E; e++) dot += gi[e] * rows[i * E + e];
    const float inverse = Z[i] == 0.0f ? 0.0f : 1.0f / Z[i];
    h[i] = -(dot + hsum(dots)) * inverse;
    for (e = 0; e < E; e += VL) store(gi + e, load(gi + e) * splat(inverse));
  }
  transpose(g, round_up(n, T), E, hd.lds, lanes, LD);
}

// dx += the gradient of `token_weights`, of which dt[lane] is given.
static void weights_back(const SqCall& pr, const Side& s, const float* x, const float* dt, long vectors, float* dx) {
  for (long d = 0; d < pr.dim; d++) {
    const vf tilt = splat(s.tilt ? s.tilt[d] : 0.0f), twice = splat(2.0f * s.square);
    for (long j = 0; j < vectors; j++) {
      float* at = dx + d * LD + j * VL;
      store(at, load(at) + load(dt + j * VL) * (load(x + d * LD + j * VL) * twice + tilt));
    }
  }
}

// dq of group g from its features a and the gradient in bw.big, to which left[r] h[lane] is added.
static void finish_queries(const Head& hd, const BackWork& bw, long g, long t0, long n, const float* a, const float* left,
                           const float* h) {
  const SqCall& pr = *hd.pr;
  const long vectors = vectors_for(n);
  features_back(pr, a, bw.big, left, h, vectors, bw.big, bw.total);
  project_back(pr, hd.q, a, bw.big, vectors, bw.dx, bw.w.butterfly);
  if (pr.function == SQ_EXP && (hd.q.square != 0.0f || hd.q.tilt)) {
    panel(pr.q, hd.b, hd.h * hd.groups + g, t0, queries_in(pr, t0, n), vectors * VL, pr.dim, bw.w.x, bw.w.rows);
    weights_back(pr, hd.q, bw.w.x, bw.total, vectors, bw.dx);
  }
  (pr.accumulate ? unpanel_add : unpanel)(pr.dq, hd.b, hd.h * hd.groups + g, t0, queries_in(pr, t0, n), pr.dim, bw.dx,
                                          bw.w.rows);
}

// The panel from[dim][LD] to the gradient of the chunk's keys or values.
static void put_keys(const Head& hd, const SqTensor& to, const Chunk& ch, long dim, const float* from, float* rows) {
  const Stored s = stored_keys(*hd.pr, ch.t0, ch.n);
  (hd.pr->accumulate ? unpanel_add : unpanel)(to, hd.b, hd.h, s.token, s.count, dim, from + s.skip, rows);
}

// dk from the gradient of phi in bw.big, to which Rz is added.
static void finish_keys(const Head& hd, const BackWork& bw, const Chunk& ch, const float* Rz) {
  const SqCall& pr = *hd.pr;
  const Side& s = hd.k;
  features_back(pr, ch.phi, bw.big, Rz, ch.real, ch.vectors, bw.big, bw.total);
  project_back(pr, s, ch.phi, bw.big, ch.vectors, bw.dx, bw.w.butterfly);
  if (pr.function == SQ_EXP && (s.square != 0.0f || s.tilt)) {
    key_panel(hd, ch.t0, ch.n, ch.lanes, bw.w.x, bw.w.rows);
    weights_back(pr, s, bw.w.x, bw.total, ch.vectors, bw.dx);
  }
  for (long i = 0; i < ch.n; i++)
    if (ch.real[i] == 0.0f)
      for (long d = 0; d < pr.dim; d++) bw.dx[d * LD + i] = 0.0f;
  put_keys(hd, pr.dk, ch, pr.dim, bw.dx, bw.w.rows);
}

// R += a g, Rz += a h.
static void add_outer(const Head& hd, const State& R, const float* a, const float* g, const float* h, long n) {
  const SqCall& pr = *hd.pr;
  gemm(pr.features, round_up(pr.width, VL) / VL, n, a, LD, 1, g, hd.lds, R.S, hd.lds, FROM_C);
  add_row_dots(pr.features, a, h, vectors_for(n), R.z);
}

// ---- full ----------------------------------------------------------------------------------------------------------

// dq of queries [begin, end) and their part of R.
static void full_queries(const Head& hd, const BackWork& bw, const State& st, const State& R, Chunk& ch, float* g,
                         float* h, long begin, long end) {
  const SqCall& pr = *hd.pr;
  for (long group = 0; group < hd.groups; group++)
    for (long t0 = begin; t0 < end; t0 += C) {
      const long n = end - t0 < C ? end - t0 : C, vectors = vectors_for(n);
      prepare_queries(hd, bw.w, st.c, st.z, group, t0, n, ch.a, ch.Z, ch.top);
      row_gradients(hd, hd.h * hd.groups + group, t0, n, ch.Z, g, h, bw.lanes, bw.w.rows);
      gemm(pr.features, vectors, pr.width, st.S, hd.lds, 1, bw.lanes, LD, bw.big, LD, FROM_ZERO);
      finish_queries(hd, bw, group, t0, n, ch.a, st.z, h);
      add_outer(hd, R, ch.a, g, h, n);
    }
}

static void full_keys(const Head& hd, const BackWork& bw, const State& st, const State& R, Chunk& ch, long begin,
                      long end) {
  const SqCall& pr = *hd.pr;
  for (long t0 = begin; t0 < end; t0 += C) {
    prepare_keys(hd, bw.w, st, t0, end - t0 < C ? end - t0 : C, ch);
    transpose(ch.values, ch.lanes, pr.width, hd.lds, bw.lanes, LD);
    gemm(pr.features, ch.vectors, pr.width, R.S, hd.lds, 1, bw.lanes, LD, bw.big, LD, FROM_ZERO);
    gemm(pr.width, ch.vectors, pr.features, R.S, 1, hd.lds, ch.phi, LD, bw.w.out, LD, FROM_ZERO);
    put_keys(hd, pr.dv, ch, pr.width, bw.w.out, bw.w.rows);
    finish_keys(hd, bw, ch, R.z);
  }
}

// ---- causal --------------------------------------------------------------------------------------------------------

// A chunk whose features outlive the forward walk of its segment.
struct KeptChunk {
  Chunk ch;
  float *ds, *g, *h;  // per group: d scores (key, query), g[C][lds], h[C]
};

static KeptChunk take_kept(Arena& arena, const SqCall& pr, long lds) {
  const long G = pr.heads_q / pr.heads_kv;
  KeptChunk k = {};
  k.ch = take_chunk(arena, pr, lds, true, true);
  k.ds = arena.take(G * C * LD);
  k.g = arena.take(G * C * lds);
  k.h = arena.take(G * C);
  return k;
}

// Chunks of the current segment. Usually a few whole ones; a halved chunk may need up to one per token, from the heap.
struct KeptList {
  KeptChunk* items;  // SQ_SEGMENT of them
  float* owned[SQ_SEGMENT];
  long ready, used;
  bool failed;
};

static KeptChunk* next_kept(KeptList& list, const SqCall& pr, long lds) {
  if (list.used == list.ready) {
    Arena measure = {nullptr, 0};
    take_kept(measure, pr, lds);
    float* p = sq_allocate(measure.used);
    if (!p) {
      list.failed = true;
      return nullptr;
    }
    Arena arena = {p, 0};
    list.owned[list.ready] = p;
    list.items[list.ready++] = take_kept(arena, pr, lds);
  }
  return &list.items[list.used++];
}

static void release_kept(KeptList& list, bool& failed) {
  for (long i = SQ_SEGMENT / C; i < list.ready; i++) sq_release(list.owned[i]);
  if (list.failed) failed = true;
}

// What a walk over the sequence is for. One worker does both; several share a head in two rounds, see linear_backward_tasks.h.
struct Wanted {
  bool queries, keys;
};

// Of a group whose g^T is in bw.lanes: d scores, and with `queries` the gradient of its features in bw.big.
static void score_gradients(const Head& hd, const BackWork& bw, const State& st, const KeptChunk& kept, long group,
                            bool queries) {
  const long M = hd.pr->features, E = hd.pr->width;
  const Chunk& ch = kept.ch;
  float* ds = kept.ds + group * C * LD;
  const float* h = kept.h + group * C;
  if (queries) gemm(M, ch.vectors, E, st.S, hd.lds, 1, bw.lanes, LD, bw.big, LD, FROM_ZERO);
  for (long p = 0; p * NV < ch.vectors; p++) {
    const long keys = (p + 1) * T;
    gemm(keys, NV, E, ch.values, hd.lds, 1, bw.lanes + p * T, LD, ds + p * T, LD, FROM_ZERO);
    for (long j = 0; j < keys; j++)
      for (int v = 0; v < NV; v++) {
        const long at = p * T + v * VL;
        store(ds + j * LD + at, load(ds + j * LD + at) + load(h + at));
      }
    keep_causal(ds, p);
    if (queries) gemm(M, NV, keys, ch.phi, LD, 1, ds + p * T, LD, bw.big + p * T, LD, FROM_C);
  }
}

// Forward walk over [t0, t0 + n): dq, and everything the reverse walk needs.
static void walk_forward(const Head& hd, const BackWork& bw, const State& st, KeptList& list, long t0, long n,
                         Wanted wanted) {
  const long M = hd.pr->features;
  KeptChunk* kept = next_kept(list, *hd.pr, hd.lds);
  if (!kept) return;
  Chunk& ch = kept->ch;
  if (!prepare_causal(hd, bw.w, st, t0, n, ch) && n > 1 && !hopeless(hd, st, ch)) {
    list.used--;
    walk_forward(hd, bw, st, list, t0, n / 2, wanted);
    walk_forward(hd, bw, st, list, t0 + n / 2, n - n / 2, wanted);
    return;
  }
  rescale(hd, st, ch);
  for (long group = 0; group < hd.groups; group++) {
    float *g = kept->g + group * C * hd.lds, *h = kept->h + group * C;
    row_gradients(hd, hd.h * hd.groups + group, t0, n, ch.Z + group * C, g, h, bw.lanes, bw.w.rows);
    score_gradients(hd, bw, st, *kept, group, wanted.queries);
    if (wanted.queries) finish_queries(hd, bw, group, t0, n, ch.a + group * M * LD, st.z, h);
  }
  accumulate(hd, st, ch);
}

// dk and dv of one kept chunk, R holding the queries after it.
static void chunk_keys(const Head& hd, const BackWork& bw, const State& R, const KeptChunk& kept) {
  const SqCall& pr = *hd.pr;
  const long M = pr.features, E = pr.width;
  const Chunk& ch = kept.ch;
  transpose(ch.values, ch.lanes, E, hd.lds, bw.lanes, LD);
  gemm(M, ch.vectors, E, R.S, hd.lds, 1, bw.lanes, LD, bw.big, LD, FROM_ZERO);
  gemm(E, ch.vectors, M, R.S, 1, hd.lds, ch.phi, LD, bw.w.out, LD, FROM_ZERO);
  for (long group = 0; group < hd.groups; group++) {
    const float *a = ch.a + group * M * LD, *g = kept.g + group * C * hd.lds;
    transpose(kept.ds + group * C * LD, ch.lanes, ch.lanes, LD, bw.turned, LD);
    for (long p = 0; p * NV < ch.vectors; p++)  // keys of panel p, queries from there on
      gemm(M, NV, ch.lanes - p * T, a + p * T, LD, 1, bw.turned + p * T * LD + p * T, LD, bw.big + p * T, LD, FROM_C);
    transpose(ch.scores + group * C * LD, ch.lanes, ch.lanes, LD, bw.turned, LD);
    for (long p = 0; p * NV < ch.vectors; p++)
      gemm(E, NV, ch.lanes - p * T, g + p * T * hd.lds, 1, hd.lds, bw.turned + p * T * LD + p * T, LD, bw.w.out + p * T,
           LD, FROM_C);
  }
  put_keys(hd, pr.dv, ch, E, bw.w.out, bw.w.rows);
  finish_keys(hd, bw, ch, R.z);
}

// Reverse walk over one kept chunk: its keys, then R takes in its queries and moves to the shift before the chunk.
static void walk_back(const Head& hd, const BackWork& bw, const State& R, const KeptChunk& kept, bool keys) {
  const SqCall& pr = *hd.pr;
  const long M = pr.features, E = pr.width;
  const Chunk& ch = kept.ch;
  if (keys) chunk_keys(hd, bw, R, kept);
  for (long group = 0; group < hd.groups; group++)
    add_outer(hd, R, ch.a + group * M * LD, kept.g + group * C * hd.lds, kept.h + group * C, ch.n);
  for (long r = 0; r < M; r++) {
    const float rho = ch.rho[r];
    if (rho == 1.0f) continue;
    R.z[r] *= rho;
    float* row = R.S + r * hd.lds;
    for (long e = 0; e < E; e += VL) store(row + e, load(row + e) * splat(rho));
  }
}

}  // namespace SQ_NS
