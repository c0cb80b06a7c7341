// Windowed attention, forward: exact weights near, kernelised ones far, one normaliser.
//
//   out_i = (sum_near e^{s_ij} v_j + e^gain sum_far phi(q_i).phi(k_j) v_j) / (the same with 1 for v_j),  s = scale q.k
//
// The far field is the causal form of linear_forward.h over a walk of keys that lags w + 1 tokens behind the queries: a key
// enters the state when it leaves the window, so near and far never overlap and nothing is subtracted. Without a causal
// mask the same walk also goes over the reversed sequence, first, and leaves numerators, normalisers and shifts behind.
#pragma once

#include "window.h"

namespace SQ_NS {

SQ_INLINE SqTensor reversed(SqTensor x, long length) {
  const long size = x.dtype == SQ_FLOAT32 ? 4 : 2;
  if (x.data) x.data = (char*)x.data + (length - 1) * x.stride[2] * size;
  x.stride[2] = -x.stride[2];
  return x;
}

// The far field seen from the other end: no state comes in or goes out, checkpoints follow those of the first walk.
static SqCall reversed_call(const SqCall& pr) {
  SqCall back = pr;
  const long L = pr.length_q, S = pr.keys_stored;
  back.q = reversed(pr.q, L), back.k = reversed(pr.k, S), back.v = reversed(pr.v, S);
  back.out = reversed(pr.out, L), back.dout = reversed(pr.dout, L);
  back.dq = reversed(pr.dq, L), back.dk = reversed(pr.dk, S), back.dv = reversed(pr.dv, S);
  if (pr.key_mask) back.key_mask = pr.key_mask + (S - 1) * pr.mask_token;
  back.mask_token = -pr.mask_token;
  back.s_in = back.z_in = back.c_in = nullptr;
  back.s_out = back.z_out = back.c_out = nullptr;
  back.ds_out = back.dz_out = nullptr;
  back.ds_in = back.dz_in = nullptr;
  if (pr.checkpoints)
    back.checkpoints = pr.checkpoints + pr.batch * pr.heads_kv * segments_of(pr) * pr.features * (pr.width + 2);
  return back;
}

// What the walk from the right leaves for each row, in the order of the sequence: per group numerators [L][E], Z[L], top[L].
struct RightSide {
  float *numerator, *Z, *top;
};

static RightSide take_side(Arena& arena, const SqCall& pr, long heads) {
  const long rows = heads * (pr.heads_q / pr.heads_kv) * pr.length_q;
  return {arena.take(rows * pr.width), arena.take(rows), arena.take(rows)};
}

SQ_INLINE RightSide side_of(const SqCall& pr, const RightSide& sides, long index) {
  const long first = index * (pr.heads_q / pr.heads_kv) * pr.length_q;
  return {sides.numerator + first * pr.width, sides.Z + first, sides.top + first};
}

struct Walk {
  Work w;
  Chunk ch;
  Near nr;
  float *right_Z, *right_top, *lanes;  // [C], [C], [E][LD]
};

static Walk take_walk(Arena& arena, const SqCall& pr, long lds) {
  Walk x = {};
  x.ch = take_chunk(arena, pr, lds, true, true);
  x.w = take_work(arena, pr, lds);
  x.nr = take_near(arena, pr, lds);
  x.right_Z = arena.take(C);
  x.right_top = arena.take(C);
  x.lanes = arena.take(pr.both_sides ? lds * LD : 0);
  return x;
}

SQ_INLINE float gain_of(const SqCall& pr, const Head& hd, long g) {
  return pr.gain ? pr.gain[hd.b * pr.heads_q + hd.h * hd.groups + g] : 0.0f;
}

// True when splitting a chunk cannot help: a NaN in the state reaches every row.
static bool poisoned(const Head& hd, const State& st) {
  for (long r = 0; r < hd.pr->features; r++)
    if (st.z[r] != st.z[r]) return true;
  return false;
}

// A chunk that has nothing far: rows of mass 0.
static void without_far(const Head& hd, long t0, long n, Chunk& ch) {
  ch.t0 = t0;
  ch.n = n;
  ch.vectors = vectors_for(n);
  ch.lanes = ch.vectors * VL;
  for (long i = 0; i < hd.groups * C; i++) ch.Z[i] = 0.0f, ch.top[i] = MINUS_INF;
}

// Far features and scores of a chunk and, given `nr`, its near weights. False: take shorter chunks.
static bool prepare_window(const Head& hd, const Work& w, const State& st, const Near* nr, long t0, long n, Chunk& ch) {
  const SqCall& pr = *hd.pr;
  bool ok = true;
  if (pr.features) ok = prepare_rows(hd, w, st, t0, n, ch);
  else without_far(hd, t0, n, ch);
  const long queries = queries_in(pr, t0, n);
  const long from = pr.features && pr.function == SQ_EXP ? first_far(hd, st, ch) : queries;
  if (nr) ok = fetch_window(hd, *nr, t0, queries) && ok;
  for (long g = 0; g < hd.groups; g++) {
    const float *Z = ch.Z + g * C, *top = ch.top + g * C;
    if (nr) {
      near_weights(hd, *nr, g, t0, queries);
      ok = ok && kept_all(*nr, g, from, queries, top, Z, gain_of(*nr->pr, hd, g));
    } else {
      for (long i = from; i < queries; i++) ok = ok && Z[i] >= UNDERFLOW;
    }
  }
  return ok;
}

// w.out[E][LD] = numerators of the chunk's rows over the far keys; the state has the chunk's shift.
static void read_far(const Head& hd, const Work& w, const State& st, const Chunk& ch, long g) {
  const SqCall& pr = *hd.pr;
  const float *a = ch.a + g * pr.features * LD, *scores = ch.scores + g * C * LD;
  if (!pr.features) {
    memset(w.out, 0, sizeof(float) * pr.width * LD);
    return;
  }
  gemm(pr.width, ch.vectors, pr.features, st.S, 1, hd.lds, a, LD, w.out, LD, FROM_ZERO);
  for (long p = 0; p * NV < ch.vectors; p++)
    gemm(pr.width, NV, (p + 1) * T, ch.values, 1, hd.lds, scores + p * T, LD, w.out + p * T, LD, FROM_C);
}

// rows[width][LD] *= by[lane]
static void scale_lanes(float* rows, long width, long vectors, const float* by) {
  for (long e = 0; e < width; e++)
    for (long j = 0; j < vectors; j++) store(rows + e * LD + j * VL, load(rows + e * LD + j * VL) * load(by + j * VL));
}

// Rows [t0, t0 + n) of the walk from the right.
static void right_range(const Head& hd, Walk& x, const State& st, const RightSide& side, long t0, long n) {
  const SqCall& pr = *hd.pr;
  const long L = pr.length_q;
  if (!prepare_window(hd, x.w, st, nullptr, t0, n, x.ch) && n > 1 && !poisoned(hd, st)) {
    right_range(hd, x, st, side, t0, n / 2);
    right_range(hd, x, st, side, t0 + n / 2, n - n / 2);
    return;
  }
  rescale(hd, st, x.ch);
  const long queries = queries_in(pr, t0, n);
  for (long g = 0; g < hd.groups; g++) {
    read_far(hd, x.w, st, x.ch, g);
    const SqTensor to = {side.numerator + (g * L + L - 1) * pr.width, {0, 0, -(int64_t)pr.width, 1}, SQ_FLOAT32, 0};
    unpanel(to, 0, 0, t0, queries, pr.width, x.w.out, x.w.rows);
    for (long i = 0; i < queries; i++) {
      const long row = g * L + L - 1 - (t0 + i);
      side.Z[row] = x.ch.Z[g * C + i];
      side.top[row] = x.ch.top[g * C + i];
    }
  }
  accumulate(hd, st, x.ch);
}

// The rows of the right side that belong to [t0, t0 + n): Z and top along the lanes, numerators in x.lanes.
static void fetch_right(const Head& hd, Walk& x, const RightSide& side, long g, long t0, long n) {
  const long L = hd.pr->length_q, E = hd.pr->width;
  const SqTensor from = {side.numerator + g * L * E, {0, 0, E, 1}, SQ_FLOAT32, 0};
  panel(from, 0, 0, t0, n, vectors_for(n) * VL, E, x.lanes, x.w.rows);
  for (long i = 0; i < C; i++) {
    x.right_Z[i] = i < n ? side.Z[g * L + t0 + i] : 0.0f;
    x.right_top[i] = i < n ? side.top[g * L + t0 + i] : 0.0f;
  }
}

// x.w.out += the near field of group g's first n rows, multiplied by what join_parts found.
static void add_near(const Head& hd, Walk& x, long g, long n) {
  const Near& nr = x.nr;
  const long E = hd.pr->width;
  for (long p = 0; p * T < n; p++) {
    const long start = p * T, lanes = n - start < T ? n - start : T, tokens = lanes + nr.reach;
    float* weights = panel_weights(nr, g, p);
    for (long i = 0; i < nr.sinks + tokens; i++)
      SQ_UNROLL for (int v = 0; v < NV; v++)
        store(weights + i * T + v * VL, load(weights + i * T + v * VL) * load(nr.near + g * C + start + v * VL));
    gemm(E, NV, nr.sinks, nr.sink_v, 1, hd.lds, weights, T, x.w.out + start, LD, FROM_C);
    gemm(E, NV, tokens, nr.values + start * hd.lds, 1, hd.lds, weights + nr.sinks * T, T, x.w.out + start, LD, FROM_C);
  }
}

// Rows [t0, t0 + n): the far keys before them, the near ones, and what the walk from the right left.
static void window_range(const Head& hd, Walk& x, const State& st, const RightSide* side, long t0, long n) {
  const SqCall& pr = *hd.pr;
  const Near& nr = x.nr;
  if (!prepare_window(hd, x.w, st, &nr, t0, n, x.ch) && n > 1 && !poisoned(hd, st)) {
    window_range(hd, x, st, side, t0, n / 2);
    window_range(hd, x, st, side, t0 + n / 2, n - n / 2);
    return;
  }
  rescale(hd, st, x.ch);
  const long queries = queries_in(pr, t0, n), vectors = vectors_for(queries), E = pr.width;
  for (long g = 0; g < hd.groups && queries > 0; g++) {
    const long head = hd.h * hd.groups + g;
    float* stats = nr.pr->stats + 2 * ((hd.b * pr.heads_q + head) * pr.length_q + t0);
    if (side) fetch_right(hd, x, *side, g, t0, queries);
    join_parts(nr, g, queries, x.ch.top + g * C, x.ch.Z + g * C, gain_of(*nr.pr, hd, g), side ? x.right_top : nullptr,
               x.right_Z, stats);
    read_far(hd, x.w, st, x.ch, g);
    if (pr.features) scale_lanes(x.w.out, E, vectors, nr.far + g * C);
    if (side)
      for (long e = 0; e < E; e++)
        for (long j = 0; j < vectors; j++) {
          float* at = x.w.out + e * LD + j * VL;
          store(at, load(at) + load(x.lanes + e * LD + j * VL) * load(nr.right + g * C + j * VL));
        }
    add_near(hd, x, g, queries);
    unpanel(pr.out, hd.b, head, t0, queries, E, x.w.out, x.w.rows);
  }
  accumulate(hd, st, x.ch);
}

// Near and far in tasks of one piece of one head.
struct WindowJob {
  const SqCall* pr;
  Cut by;
  States starts, behind;  // (head, piece): far keys before each piece, and after it; base null: none
  RightSide sides;        // of all heads, where walks run one after the other over all pieces
  int first, last;        // walks of a task: 1 from the right, 0 from the left
  bool failed;
};

static void window_task(void* context, int64_t task, int64_t) {
  WindowJob& job = *(WindowJob*)context;
  const SqCall& pr = *job.pr;
  const SqCall back = reversed_call(pr);
  const long index = task / job.by.pieces, p = task % job.by.pieces;
  const long M = pr.features, ME = M * pr.width;
  const bool two_walks = pr.both_sides && M > 0;
  const Head hd = head_of(pr, index);
  Walk x;
  State st;
  RightSide side = {};
  if (!in_scratch([&](Arena& arena) {
        x = take_walk(arena, pr, hd.lds);
        st = take_state(arena, M, hd.lds);
        if (two_walks) side = job.sides.Z ? side_of(pr, job.sides, index) : take_side(arena, pr, 1);
      })) {
    job.failed = true;
    return;
  }
  for (int from_right = job.first; from_right >= job.last; from_right--) {
    const SqCall& here = from_right ? back : pr;
    const Head at = head_of(here, index);
    if (job.starts.base) st = job.starts.at(task);
    else load_state_in(at, index, st);
    if (!from_right) fetch_sinks(at, x.nr);
    const long begin = p * job.by.piece, last = begin + job.by.piece, end = last < here.length_k ? last : here.length_k;
    for (long t0 = begin; t0 < end; t0 += C) {
      if (here.checkpoints && M && t0 % SQ_SEGMENT == 0) {
        float* to = checkpoint_at(here, index, t0 / SQ_SEGMENT);
        save_state(at, st, to, to + ME, to + ME + M);
      }
      const long n = end - t0 < C ? end - t0 : C;
      if (from_right) right_range(at, x, st, side, t0, n);
      else window_range(at, x, st, two_walks ? &side : nullptr, t0, n);
    }
    if (p == job.by.pieces - 1) save_state_out(at, index, st);
  }
}

static void run_window(WindowJob& job, SqBody body) {
  if (!job.failed) sq_parallel(job.pr->batch * job.pr->heads_kv * job.by.pieces, job.pr->threads, body, &job);
}

// Where nothing is far, pieces are cut by shape alone: the result does not depend on the number of threads.
SQ_INLINE Cut window_cut(const SqCall& pr, long least = 1) {
  return pr.features ? causal_cut(pr, least) : cut(pr.batch * pr.heads_kv, pr.length_k, 32, SQ_SEGMENT, least);
}

// A task does both walks of a head, or one walk of a piece of it.
static int window_walks(const SqCall& pr) {
  const int two_walks = pr.both_sides && pr.features;
  WindowJob job = {&pr, window_cut(pr), {}, {}, {}, two_walks, 0, false};
  if (job.by.pieces == 1 || pr.features == 0) {
    run_window(job, window_task);
    return job.failed ? SQ_NO_MEMORY : SQ_OK;
  }
  float* memory = nullptr;
  if (two_walks) {
    Arena measure = {nullptr, 0};
    take_side(measure, pr, pr.batch * pr.heads_kv);
    memory = sq_allocate(measure.used);
    if (!memory) return SQ_NO_MEMORY;
    Arena arena = {memory, 0};
    job.sides = take_side(arena, pr, pr.batch * pr.heads_kv);
  }
  for (int from_right = two_walks; from_right >= 0; from_right--) {
    job.first = job.last = from_right;
    job.starts = piece_states(from_right ? reversed_call(pr) : pr, job.by);
    job.failed = job.failed || !job.starts.base;
    run_window(job, window_task);
    sq_release(job.starts.base);
  }
  sq_release(memory);
  return job.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS
