// Windowed attention, backward. With the row's shift b and 1/Z from the forward, D_i = G_i . O_i and s the exact scores:
//
//   near    p_ij = e^{s_ij - b_i} / Z_i,  ds_ij = p_ij (G_i . v_j - D_i),  dq += scale ds k,  dk += scale ds^T q,  dv += p^T G
//   far     that of linear_backward.h with g_i = f_i G_i, h_i = -f_i D_i, where f_i = e^{top_i + gain - b_i} / Z_i takes the place
//           of its 1/Z_i; once along the sequence and, without a causal mask, once along its reverse
//   gain    d gain = sum_i f_i (G_i . N_i - D_i n_i), N and n the far numerator and normaliser
//
// Every walk adds to the same float32 gradients. Where nothing is far, or heads are fewer than workers, a walk is cut into
// pieces as in linear_backward_tasks.h. The windows of neighbouring pieces overlap, so even pieces go first, then odd
// ones; the gradients of sinks and gain are summed per piece, and then in the order of the pieces.
#pragma once

#include "linear_backward_tasks.h"
#include "window_bidirectional.h"

namespace SQ_NS {

struct WindowBack {
  BackWork bw;
  Near nr;
  float *delta, *base, *inverse, *factor, *h;      // [C]
  float *q_rows, *dq, *slopes;                     // [C][ldk], [D][LD], [rows][T]
  float *dk, *dv;                                  // like Near's keys and values
  float *sink_dk, *sink_dv, *gain;                 // of the piece: like Near's sinks; [groups]
};

static WindowBack take_window_back(Arena& arena, const SqCall& pr, long lds) {
  WindowBack b = {};
  b.bw = take_back_work(arena, pr, lds);
  b.nr = take_near(arena, pr, lds);
  const long window = C + b.nr.reach;
  b.delta = arena.take(C);
  b.base = arena.take(C);
  b.inverse = arena.take(C);
  b.factor = arena.take(C);
  b.h = arena.take(C);
  b.q_rows = arena.take(C * b.nr.ldk);
  b.dq = arena.take(pr.near_dim * LD);
  b.slopes = arena.take(b.nr.rows * T);
  b.dk = arena.take(window * b.nr.ldk);
  b.dv = arena.take(window * lds);
  return b;
}

// G (rows, and lanes in bw.lanes), D, and what the forward left for the queries [t0, t0 + n); `row` of lane 0, then + step.
static void fetch_rows(const Head& hd, const WindowBack& b, long head, long t0, long n, long row,
                       long step, float* G) {
  const SqCall& pr = *hd.pr;
  const long E = pr.width;
  fetch_values<false>(hd, pr.dout, head, t0, n, C, nullptr, G);
  fetch(pr.out, hd.b, head, t0, n, E, b.bw.w.rows, E);
  const float* stats = pr.stats + 2 * (hd.b * pr.heads_q + head) * pr.length_q;
  for (long i = 0; i < C; i++) {
    b.delta[i] = b.base[i] = b.inverse[i] = 0.0f;
    if (i >= n) continue;
    b.base[i] = stats[2 * (row + i * step)];
    b.inverse[i] = stats[2 * (row + i * step) + 1];
    vf dots = zero();
    float dot = 0.0f;
    long e = 0;
    for (; e + VL <= E; e += VL) dots += load(G + i * hd.lds + e) * load(b.bw.w.rows + i * E + e);
    for (; e < E; e++) dot += G[i * hd.lds + e] * b.bw.w.rows[i * E + e];
    b.delta[i] = dot + hsum(dots);
  }
  transpose(G, round_up(n, T), E, hd.lds, b.bw.lanes, LD);
}

// e^{level - base} / Z, level = shift[lane] + gain.
static void row_factors(const WindowBack& b, const float* shift, float gain, float* factor) {
  for (long i = 0; i < C; i += VL) {
    const vf level = load(shift + i) + splat(gain);
    const vi none = load(b.inverse + i) == zero();
    store(factor + i, as_float(~none & bits(vexp(bounded(level - load(b.base + i))) * load(b.inverse + i))));
  }
}

// The near part of group g: dq at once; dk, dv and those of the sinks into b.
static void near_back(const Head& hd, const WindowBack& b, long g, long t0, long n, const float* G) {
  const Near& nr = b.nr;
  const SqCall& pr = *nr.pr;
  const long D = pr.near_dim, E = hd.pr->width, head = hd.h * hd.groups + g;
  row_factors(b, nr.peak + g * C, 0.0f, b.factor);
  fetch(pr.near_q, hd.b, head, t0, n, D, b.q_rows, nr.ldk);
  for (long i = 0; i < C; i++) {
    float* row = b.q_rows + i * nr.ldk;
    for (long d = 0; d < nr.ldk; d++) row[d] = i < n && d < D ? row[d] * pr.scale : 0.0f;
  }
  const long columns = round_up(D, VL) / VL, width = round_up(E, VL) / VL;
  for (long p = 0; p * T < n; p++) {
    const long start = p * T, lanes = n - start < T ? n - start : T, tokens = lanes + nr.reach, S = nr.sinks;
    float *weights = panel_weights(nr, g, p), *window = weights + S * T, *slopes = b.slopes, *slope = slopes + S * T;
    gemm(S, NV, E, nr.sink_v, hd.lds, 1, b.bw.lanes + start, LD, slopes, T, FROM_ZERO);
    gemm(tokens, NV, E, nr.values + start * hd.lds, hd.lds, 1, b.bw.lanes + start, LD, slope, T, FROM_ZERO);
    for (long i = 0; i < S + tokens; i++)
      SQ_UNROLL for (int v = 0; v < NV; v++) {
        const long at = i * T + v * VL, lane = start + v * VL;
        const vf weight = load(weights + at) * load(b.factor + lane);
        store(weights + at, weight);
        store(slopes + at, weight * (load(slopes + at) - load(b.delta + lane)));
      }
    gemm(D, NV, tokens, nr.keys + start * nr.ldk, 1, nr.ldk, slope, T, b.dq + start, LD, FROM_ZERO);
    gemm(D, NV, S, nr.sink_k, 1, nr.ldk, slopes, T, b.dq + start, LD, FROM_C);
    const float *rows = b.q_rows + start * nr.ldk, *Gs = G + start * hd.lds;
    gemm(tokens, columns, lanes, slope, T, 1, rows, nr.ldk, b.dk + start * nr.ldk, nr.ldk, FROM_C);
    gemm(tokens, width, lanes, window, T, 1, Gs, hd.lds, b.dv + start * hd.lds, hd.lds, FROM_C);
    gemm(S, columns, lanes, slopes, T, 1, rows, nr.ldk, b.sink_dk, nr.ldk, FROM_C);
    gemm(S, width, lanes, weights, T, 1, Gs, hd.lds, b.sink_dv, hd.lds, FROM_C);
  }
  for (long d = 0; d < D; d++)
    for (long j = 0; j < vectors_for(n); j++)
      store(b.dq + d * LD + j * VL, load(b.dq + d * LD + j * VL) * splat(pr.scale));
  unpanel_add(pr.near_dq, hd.b, head, t0, n, D, b.dq, nr.fetched);
}

static void add_rows(const SqTensor& to, const Head& hd, long token, long n, long dim, const float* from, long ld) {
  for (long i = 0; i < n; i++) {
    float* row = (float*)to.data + offset_of(to, hd.b, hd.h, token + i);
    for (long d = 0; d < dim; d++) row[d] += from[i * ld + d];
  }
}

// dk and dv of the window's tokens to where they belong.
static void add_window(const Head& hd, const WindowBack& b, long t0, long n) {
  const SqCall& pr = *b.nr.pr;
  const long first = t0 + pr.past - pr.window, count = n + b.nr.reach, from = first < 0 ? -first : 0;
  const long stored = hd.pr->keys_stored - first, to = stored < count ? stored : count;
  if (from >= to) return;
  add_rows(pr.near_dk, hd, first + from, to - from, pr.near_dim, b.dk + from * b.nr.ldk, b.nr.ldk);
  add_rows(hd.pr->dv, hd, first + from, to - from, hd.pr->width, b.dv + from * hd.lds, hd.lds);
}

// sum over features and rows of a (d a): the gradient of the far field's log scale.
static float gain_gradient(const SqCall& pr, const float* a, const float* da, const float* z, const float* h,
                           long vectors) {
  vf sum = zero();
  for (long r = 0; r < pr.features; r++)
    for (long j = 0; j < vectors; j++)
      sum += load(a + r * LD + j * VL) * (load(da + r * LD + j * VL) + splat(z[r]) * load(h + j * VL));
  return hsum(sum);
}

// One walk: near as well, along the sequence or its reverse, and what it is for.
struct WindowWalk {
  bool near, reversed;
  Wanted wanted;
};

// walk_forward of linear_backward.h with the common normaliser.
static void window_walk_forward(const Head& hd, const WindowBack& b, const State& st, KeptList& list, long t0, long n,
                                WindowWalk walk) {
  const SqCall& pr = *hd.pr;
  const BackWork& bw = b.bw;
  const long M = pr.features, E = pr.width, queries = queries_in(pr, t0, n);
  KeptChunk* kept = next_kept(list, pr, hd.lds);
  if (!kept) return;
  Chunk& ch = kept->ch;
  if (!prepare_window(hd, bw.w, st, walk.near ? &b.nr : nullptr, t0, n, ch) && n > 1 && !poisoned(hd, st)) {
    list.used--;
    window_walk_forward(hd, b, st, list, t0, n / 2, walk);
    window_walk_forward(hd, b, st, list, t0 + n / 2, n - n / 2, walk);
    return;
  }
  rescale(hd, st, ch);
  if (walk.near) {
    memset(b.dk, 0, sizeof(float) * (queries + b.nr.reach) * b.nr.ldk);
    memset(b.dv, 0, sizeof(float) * (queries + b.nr.reach) * hd.lds);
  }
  for (long group = 0; group < hd.groups; group++) {
    const float* a = ch.a + group * M * LD;
    float *g = kept->g + group * C * hd.lds, *h = kept->h + group * C;
    const long row = walk.reversed ? pr.length_q - 1 - t0 : t0;
    fetch_rows(hd, b, hd.h * hd.groups + group, t0, queries, row, walk.reversed ? -1 : 1, g);
    if (walk.near && queries > 0) near_back(hd, b, group, t0, queries, g);
    if (!M) continue;
    row_factors(b, ch.top + group * C, gain_of(pr, hd, group), b.factor);
    for (long i = 0; i < C; i++) {
      h[i] = -b.delta[i] * b.factor[i];
      for (long e = 0; e < E; e += VL) store(g + i * hd.lds + e, load(g + i * hd.lds + e) * splat(b.factor[i]));
    }
    scale_lanes(bw.lanes, E, ch.vectors, b.factor);
    score_gradients(hd, bw, st, *kept, group, walk.wanted.queries);
    if (!walk.wanted.queries) continue;
    if (pr.gain_grad) b.gain[group] += gain_gradient(pr, a, bw.big, st.z, h, ch.vectors);
    finish_queries(hd, bw, group, t0, n, a, st.z, h);
  }
  if (walk.near) add_window(hd, b, t0, queries);
  accumulate(hd, st, ch);
}

struct WindowBackJob : BackwardJob {
  bool reversed;
  long first, every;   // pieces of this round: first, first + every, ...
  float* sums;         // (head, piece): gradients of the sinks and of the gain
  long sinks, values;  // floats of the first two in a slot
  long slot;
};

static void window_back_task(void* context, int64_t task, int64_t) {
  WindowBackJob& job = *(WindowBackJob*)context;
  const SqCall& pr = *job.pr;
  const long round = (job.pieces - job.first + job.every - 1) / job.every;
  const long index = task / round, p = job.first + task % round * job.every, M = pr.features;
  const Head hd = head_of(pr, index);
  KeptChunk items[SQ_SEGMENT];
  KeptList list = {items, {}, 0, 0, false};
  WindowBack b;
  State st, R;
  if (!in_scratch([&](Arena& arena) {
        b = take_window_back(arena, pr, hd.lds);
        st = take_state(arena, M, hd.lds);
        R = take_state(arena, M, hd.lds);
        for (list.ready = 0; list.ready < SQ_SEGMENT / C; list.ready++) items[list.ready] = take_kept(arena, pr, hd.lds);
      })) {
    job.failed = true;
    return;
  }
  b.sink_dk = job.sums + (index * job.pieces + p) * job.slot;
  b.sink_dv = b.sink_dk + job.sinks;
  b.gain = b.sink_dv + job.values;
  const Wanted wanted = {job.phase != CAUSAL_KEYS, job.phase != CAUSAL_QUERIES};
  const WindowWalk walk = {wanted.queries && !job.reversed, job.reversed, wanted};
  if (walk.near) fetch_sinks(hd, b.nr);
  if (job.phase == CAUSAL_QUERIES && M) R = job.R.at(index * job.pieces + p);
  start_piece(job, hd, index, p, R);
  const long from = p * job.segments, to = from + job.segments, all = segments_of(pr);
  causal_back(hd, index, b.bw, st, R, list, from, to < all ? to : all, wanted.keys,
              [&](long t0, long n) { window_walk_forward(hd, b, st, list, t0, n, walk); });
  if (job.phase == CAUSAL_BACK) save_R(hd, index, R, nullptr);
  release_kept(list, job.failed);
}

static void run_window_back(WindowBackJob& job, BackPhase phase) {
  const long heads = job.pr->batch * job.pr->heads_kv;
  job.phase = phase;
  job.every = phase == CAUSAL_QUERIES && !job.reversed ? 2 : 1;
  for (job.first = 0; job.first < job.every; job.first++) {
    const long round = (job.pieces - job.first + job.every - 1) / job.every;
    if (!job.failed) sq_parallel(heads * round, job.pr->threads, window_back_task, &job);
  }
}

// One walk over all pieces of all heads.
static void back_walk(WindowBackJob& job, const SqCall& here, bool reversed) {
  const long heads = here.batch * here.heads_kv;
  job.pr = &here;
  job.reversed = reversed;
  if (job.pieces == 1) return run_window_back(job, CAUSAL_BACK);
  run_window_back(job, CAUSAL_QUERIES);
  if (here.features == 0) return;
  for (long index = 0; index < heads; index++) suffix_R(job, head_of(here, index), index);
  run_window_back(job, CAUSAL_KEYS);
}

// Needs the checkpoints and stats of the forward.
static int window_backward(const SqCall& pr) {
  const long heads = pr.batch * pr.heads_kv, groups = pr.heads_q / pr.heads_kv, lds = state_stride(pr.width);
  const long ldk = state_stride(pr.near_dim);
  const Cut by = window_cut(pr, pr.both_sides ? 2 * pr.window : pr.window);
  WindowBackJob job = {};
  job.pieces = job.query_pieces = by.pieces;
  job.segments = by.piece / SQ_SEGMENT;
  job.sinks = pr.sinks * ldk;
  job.values = pr.sinks * lds;
  job.slot = round_up(job.sinks + job.values + groups, 16);
  job.sums = sq_allocate(heads * by.pieces * job.slot);
  if (by.pieces > 1 && pr.features) job.R = new_states(pr, heads * by.pieces);
  job.failed = !job.sums || (by.pieces > 1 && pr.features && !job.R.base);
  if (!job.failed) {
    memset(job.sums, 0, sizeof(float) * heads * by.pieces * job.slot);
    if (pr.both_sides && pr.features) back_walk(job, reversed_call(pr), true);
    back_walk(job, pr, false);
    for (long index = 0; index < heads; index++) {
      const Head hd = head_of(pr, index);
      for (long p = 0; p < by.pieces; p++) {
        const float* slot = job.sums + (index * by.pieces + p) * job.slot;
        add_rows(pr.sink_dk, hd, 0, pr.sinks, pr.near_dim, slot, ldk);
        add_rows(pr.sink_dv, hd, 0, pr.sinks, pr.width, slot + job.sinks, lds);
        for (long g = 0; g < groups && pr.gain_grad; g++)
          pr.gain_grad[hd.b * pr.heads_q + hd.h * groups + g] += slot[job.sinks + job.values + g];
      }
    }
  }
  sq_release(job.sums);
  sq_release(job.R.base);
  return job.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS
