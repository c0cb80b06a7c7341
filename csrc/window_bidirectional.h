// Near and far without a causal mask in one walk, where memory allows: queries are projected, and states read, once.
// Of a head, or of a piece of its sequence that starts with the states before and after it.
//
//   from the right  the keys w + 1 tokens after each chunk's queries enter a state, last chunk first; what the state was
//                   before them, and their features, are kept for every chunk
//   from the left   a row reads one state, the sum of both sides' in a common shift, and the two triangles of keys that
//                   are far for some rows of the chunk only
//
// Each side keeps the shifts of its own keys, so nothing is lost to a large key of the other side. A chunk in which the
// common shift would lose something is done again by the two walks of window_forward.h, from the same states.
#pragma once

#include "window_forward.h"

namespace SQ_NS {

// Per chunk: the state after its right-hand keys, S[M][lds], z[M], c[M]; their features phi[M][LD] relative to top[M].
struct RightChunks {
  float* base;
  long slot, M, lds;
  State state(long b) const {
    float* p = base + b * slot;
    return {p, p + M * lds, p + M * lds + M};
  }
  float* top(long b) const { return base + b * slot + M * lds + 2 * M; }
  float* phi(long b) const { return base + b * slot + round_up(M * lds + 3 * M, 16); }
};

// Tokens up to which they are kept: some 3 KiB per token, for one task at a time on each thread.
constexpr long MERGED_LENGTH = 8192;

SQ_INLINE RightChunks right_chunks(const SqCall& pr, long lds) {
  const long M = pr.features;
  return {nullptr, round_up(M * lds + 3 * M, 16) + M * LD, M, lds};
}

struct Merged {
  float *S, *z, *c, *left, *right, *behind;  // [M][lds], the rest [M]: the common shift and the factors to it
  float *a, *scores, *values;                // [M][LD], [C][LD], [C][lds] of the right-hand keys
};

static Merged take_merged(Arena& arena, const SqCall& pr, long lds) {
  const long M = pr.features;
  Merged m = {};
  m.S = arena.take(M * lds);
  m.z = arena.take(M);
  m.c = arena.take(M);
  m.left = arena.take(M);
  m.right = arena.take(M);
  m.behind = arena.take(M);
  m.a = arena.take(M * LD);
  m.scores = arena.take(C * LD);
  m.values = arena.take(C * lds);
  return m;
}

// `hd` here belongs to the problem whose walk runs w + 1 tokens ahead of the queries [begin, end), of which the last chunk
// has its state already. States and features are made where they are kept.
static void gather_right(const Head& hd, Walk& x, const RightChunks& kept, long begin, long end) {
  const long M = hd.pr->features;
  for (long b = (end - begin + C - 1) / C - 1; b >= 0; b--) {
    const long t0 = begin + b * C, n = end - t0 < C ? end - t0 : C;
    const State st = kept.state(b), next = b > 0 ? kept.state(b - 1) : st;
    Chunk ch = x.ch;
    ch.phi = kept.phi(b);
    ch.c_new = kept.top(b);
    prepare_keys(hd, x.w, st, t0, n, ch);
    if (b == 0) return;  // what lies after these keys is all that the first rows need
    for (long r = 0; r < M; r++) {
      next.c[r] = ch.c_new[r];
      next.z[r] = ch.z_old[r];
      const vf rho = splat(ch.rho[r]);
      for (long e = 0; e < hd.lds; e += VL) store(next.S + r * hd.lds + e, load(st.S + r * hd.lds + e) * rho);
    }
    accumulate(hd, next, ch);
  }
}

// The state of both sides in their common shift.
static void merge_sides(const Head& hd, const Chunk& ch, const State& st, const State& behind, const float* top,
                        const Merged& m) {
  const SqCall& pr = *hd.pr;
  const bool plain = pr.function != SQ_EXP;
  for (long r = 0; r < pr.features; r++) {
    const float c = max1(ch.c_new[r], top[r]), shift = or_zero(c);
    m.c[r] = c;
    m.left[r] = plain ? 1.0f : exp1(ch.c_new[r] - shift);
    m.right[r] = plain ? 1.0f : exp1(top[r] - shift);
    m.behind[r] = plain ? 1.0f : exp1(behind.c[r] - shift);
    const vf mine = splat(m.left[r] * ch.rho[r]), theirs = splat(m.behind[r]);
    m.z[r] = m.left[r] * ch.z_old[r] + m.behind[r] * behind.z[r];
    const float *a = st.S + r * hd.lds, *b = behind.S + r * hd.lds;
    for (long e = 0; e < pr.width; e += VL) store(m.S + r * hd.lds + e, load(a + e) * mine + load(b + e) * theirs);
  }
}

// Scores of one triangle added to Z; `upper`: rows see the keys from their own lane on, else up to it.
static void triangle(const SqCall& pr, const float* phi, const float* a, long vectors, bool upper, float* scores,
                     float* Z) {
  for (long p = 0; p * NV < vectors; p++) {
    const long from = upper ? p * T : 0, to = upper ? vectors * VL : (p + 1) * T;
    gemm(to - from, NV, pr.features, phi + from, 1, LD, a + p * T, LD, scores + from * LD + p * T, LD, FROM_ZERO);
    if (upper)
      for (long j = 0; j < T; j++) memset(scores + (p * T + j) * LD + p * T + j + 1, 0, sizeof(float) * (T - 1 - j));
    else
      keep_causal(scores, p);
    for (int v = 0; v < NV; v++) {
      float* at = Z + p * T + v * VL;
      vf sum = load(at);
      for (long j = from; j < to; j++) sum += load(scores + j * LD + p * T + v * VL);
      store(at, sum);
    }
  }
}

// The rows of chunk b, at t0. False: nothing but scratch was changed, and it has to be done side by side.
static bool merged_chunk(const Head& hd, const Head& ahead, Walk& x, const Merged& m, const State& st,
                         const RightChunks& kept, long b, long t0, long n) {
  const SqCall& pr = *hd.pr;
  const Near& nr = x.nr;
  Chunk& ch = x.ch;
  const long M = pr.features, E = pr.width;
  if (!prepare_keys(hd, x.w, st, t0, n, ch) || !fetch_window(hd, nr, t0, n)) return false;
  const Stored right = stored_keys(*ahead.pr, t0, n);
  const long lanes = ch.lanes;
  float real[C];
  real_lanes(*ahead.pr, hd.b, t0, n, lanes, real);
  if (!fetch_values<true>(ahead, pr.v, hd.h, right.token, right.count, C, real, m.values)) return false;
  merge_sides(hd, ch, st, kept.state(b), kept.top(b), m);
  const float* phi = kept.phi(b);
  for (long g = 0; g < hd.groups; g++) {
    const long head = hd.h * hd.groups + g;
    float *a = ch.a + g * M * LD, *Z = ch.Z + g * C, *top = ch.top + g * C, *scores = ch.scores + g * C * LD;
    prepare_queries(hd, x.w, m.c, m.z, g, t0, n, a, Z, top);
    gemm(E, ch.vectors, M, m.S, 1, hd.lds, a, LD, x.w.out, LD, FROM_ZERO);
    for (long r = 0; r < M; r++) {
      const vf mine = splat(m.left[r]), theirs = splat(m.right[r]);
      for (long j = 0; j < ch.vectors; j++) {
        const vf weight = load(a + r * LD + j * VL);
        store(a + r * LD + j * VL, weight * mine);
        store(m.a + r * LD + j * VL, weight * theirs);
      }
    }
    triangle(pr, ch.phi, a, ch.vectors, false, scores, Z);
    triangle(pr, phi, m.a, ch.vectors, true, m.scores, Z);
    near_weights(hd, nr, g, t0, n);
    const float gain = gain_of(*nr.pr, hd, g);
    if (pr.function == SQ_EXP && !kept_all(nr, g, 0, n, top, Z, gain)) return false;
    for (long p = 0; p * NV < ch.vectors; p++) {
      gemm(E, NV, (p + 1) * T, ch.values, 1, hd.lds, scores + p * T, LD, x.w.out + p * T, LD, FROM_C);
      gemm(E, NV, lanes - p * T, m.values + p * T * hd.lds, 1, hd.lds, m.scores + p * T * LD + p * T, LD,
           x.w.out + p * T, LD, FROM_C);
    }
    join_parts(nr, g, n, top, Z, gain, nullptr, nullptr, nr.pr->stats + 2 * ((hd.b * pr.heads_q + head) * pr.length_q + t0));
    scale_lanes(x.w.out, E, ch.vectors, nr.far + g * C);
    add_near(hd, x, g, n);
    unpanel(pr.out, hd.b, head, t0, n, E, x.w.out, x.w.rows);
  }
  rescale(hd, st, ch);
  accumulate(hd, st, ch);
  return true;
}

static void copy_state(const Head& hd, const State& from, const State& to) {
  memcpy(to.S, from.S, sizeof(float) * hd.pr->features * hd.lds);
  memcpy(to.z, from.z, sizeof(float) * hd.pr->features);
  memcpy(to.c, from.c, sizeof(float) * hd.pr->features);
}

// The problem whose walk over far keys runs w + 1 tokens ahead of the queries.
static SqCall ahead_call(const SqCall& pr) {
  SqCall ahead = pr;
  ahead.key_shift = pr.window + 1;
  return ahead;
}

static void merged_task(void* context, int64_t task, int64_t) {
  WindowJob& job = *(WindowJob*)context;
  const SqCall& pr = *job.pr;
  const SqCall back = reversed_call(pr), ahead = ahead_call(pr);
  const long index = task / job.by.pieces, M = pr.features, L = pr.length_q;
  const long begin = task % job.by.pieces * job.by.piece, last = begin + job.by.piece, end = last < L ? last : L;
  const long chunks = (end - begin + C - 1) / C;
  const Head hd = head_of(pr, index), ahead_head = head_of(ahead, index), back_head = head_of(back, index);
  Walk x;
  Merged m;
  State st, spare;
  RightSide side;
  RightChunks kept = right_chunks(pr, hd.lds);
  if (!in_scratch([&](Arena& arena) {
        x = take_walk(arena, pr, hd.lds);
        m = take_merged(arena, pr, hd.lds);
        st = take_state(arena, M, hd.lds);
        spare = take_state(arena, M, hd.lds);
        side = take_side(arena, pr, 1);
        kept.base = arena.take(chunks * kept.slot);
      })) {
    job.failed = true;
    return;
  }
  if (job.starts.base) st = job.starts.at(task), copy_state(hd, job.behind.at(task), kept.state(chunks - 1));
  else load_state_in(hd, index, st), load_state_in(hd, index, kept.state(chunks - 1));
  gather_right(ahead_head, x, kept, begin, end);
  fetch_sinks(hd, x.nr);
  for (long b = 0; b < chunks; b++) {
    const long t0 = begin + b * C, n = end - t0 < C ? end - t0 : C;
    if (merged_chunk(hd, ahead_head, x, m, st, kept, b, t0, n)) continue;
    copy_state(hd, kept.state(b), spare);
    right_range(back_head, x, spare, side, L - t0 - n, n);
    window_range(hd, x, st, &side, t0, n);
  }
}

static int window_forward(const SqCall& pr) {
  if (pr.batch * pr.heads_kv == 0 || pr.length_k == 0) return SQ_OK;
  WindowJob job = {&pr, causal_cut(pr), {}, {}, {}, 0, 0, false};
  const bool longer = job.by.piece > MERGED_LENGTH && pr.length_q > MERGED_LENGTH;
  if (!pr.both_sides || pr.checkpoints || pr.features == 0 || longer) return window_walks(pr);
  if (job.by.pieces > 1) {
    job.starts = piece_states(pr, job.by);
    job.behind = piece_states(ahead_call(pr), job.by, true);
    job.failed = !job.starts.base || !job.behind.base;
  }
  run_window(job, merged_task);
  sq_release(job.starts.base);
  sq_release(job.behind.base);
  return job.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS
