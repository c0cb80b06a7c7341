// One token of causal windowed attention for every (batch, KV head): the recurrent step, state in, new state out.
//
// The query sees the window, the new token, the sinks, and the far sums as they came. Then the oldest token leaves the
// window and joins the far sums, unless it is among the first `sinks` of its sequence. S is read once and written once;
// window and sinks are copied.
#pragma once

#include "linear_step.h"
#include "window.h"

namespace SQ_NS {

struct WindowStep {
  StepFeatures s;
  float *a, *Z, *top;                // per group: [M], 1, 1
  float *weights;                    // [sinks + w + 1]
  float *x, *token_k, *token_v, *out;  // [D], [D], [E], [E]
};

static WindowStep take_window_step(Arena& arena, const SqCall& pr) {
  const long G = pr.heads_q / pr.heads_kv;
  WindowStep h = {};
  h.s = take_step(arena, pr);
  h.a = arena.take(G * feature_stride(pr));
  h.Z = arena.take(G);
  h.top = arena.take(G);
  h.weights = arena.take(pr.sinks + pr.window + 1);
  h.x = arena.take(round_up(pr.near_dim, 16));
  h.token_k = arena.take(round_up(pr.near_dim, 16));
  h.token_v = arena.take(round_up(pr.width, 16));
  h.out = arena.take(round_up(pr.width, 16));
  return h;
}

struct Rows {
  const float* data;
  long ld;
};

// Float32 rows with components side by side, from token 0 on.
static Rows rows_of(const SqTensor& x, const Head& hd) {
  if (!x.data) return {nullptr, 0};  // no window, or no sinks
  return {(const float*)x.data + offset_of(x, hd.b, hd.h, 0), (long)x.stride[2]};
}

// scores[i] = x . row i
static void row_scores(const Rows& rows, long n, long dim, const float* x, float scale, float* scores) {
  const long whole = dim / VL * VL;
  for (long i = 0; i < n; i++) {
    const float* row = rows.data + i * rows.ld;
    vf sum = zero();
    for (long d = 0; d < whole; d += VL) sum += load(row + d) * load(x + d);
    float rest = 0.0f;
    for (long d = whole; d < dim; d++) rest += row[d] * x[d];
    scores[i] = (hsum(sum) + rest) * scale;
  }
}

// out += sum_i weights[i] row i over the rows with a weight; the others may hold anything.
static void add_weighted(const Rows& rows, long n, long dim, const float* weights, float* out) {
  const long whole = dim / VL * VL;
  for (long i = 0; i < n; i++) {
    if (weights[i] == 0.0f) continue;
    const float* row = rows.data + i * rows.ld;
    const vf weight = splat(weights[i]);
    for (long e = 0; e < whole; e += VL) store(out + e, load(out + e) + load(row + e) * weight);
    for (long e = whole; e < dim; e++) out[e] += row[e] * weights[i];
  }
}

// What a pass over the state does besides reading it.
enum Visit { READ_ONLY, UPDATE, UPDATE_NON_TEMPORAL };

// sum = a S and, if it is updated, S' = rho S + phi v^T, over N vectors of columns.
template <int N, Visit VISIT>
SQ_INLINE void read_and_update(long M, long E, const float* from, float* to, const float* a, const StepFeatures& s, const float* v,
                               float* out) {
  vf value[N], sum[N];
  SQ_UNROLL for (int n = 0; n < N; n++) value[n] = load(v + n * VL), sum[n] = zero();
  for (long r = 0; r < M; r++) {
    const vf weight = splat(a[r]), phi = splat(s.phi[r]), rho = splat(s.rho[r]);
    SQ_UNROLL for (int n = 0; n < N; n++) {
      const vf x = load(from + r * E + n * VL);
      sum[n] += x * weight;
      if (VISIT == UPDATE) store(to + r * E + n * VL, x * rho + value[n] * phi);
      if (VISIT == UPDATE_NON_TEMPORAL) store_non_temporal(to + r * E + n * VL, x * rho + value[n] * phi);
    }
  }
  SQ_UNROLL for (int n = 0; n < N; n++) store(out + n * VL, sum[n]);
}

template <Visit VISIT>
static void pass_state(const SqCall& pr, long index, const float* a, const StepFeatures& s, float* out) {
  const long M = pr.features, E = pr.width;
  const float* from = pr.s_in + index * M * E;
  float* to = pr.s_out + index * M * E;
  long e = 0;
  for (; e + 8 * VL <= E; e += 8 * VL) read_and_update<8, VISIT>(M, E, from + e, to + e, a, s, s.v + e, out + e);
  for (; e + 4 * VL <= E; e += 4 * VL) read_and_update<4, VISIT>(M, E, from + e, to + e, a, s, s.v + e, out + e);
  for (; e + VL <= E; e += VL) read_and_update<1, VISIT>(M, E, from + e, to + e, a, s, s.v + e, out + e);
  for (; e < E; e++) {
    float sum = 0.0f;
    for (long r = 0; r < M; r++) {
      const float x = from[r * E + e];
      sum += x * a[r];
      if (VISIT != READ_ONLY) to[r * E + e] = x * s.rho[r] + s.phi[r] * s.v[e];
    }
    out[e] = sum;
  }
}

// rows[n][dim] without the first, then `last`; as they are where it is null.
static void shift_rows(const Rows& from, long n, long dim, const float* last, float* to) {
  const long skip = last ? 1 : 0;
  for (long i = skip; i < n; i++) memcpy(to + (i - skip) * dim, from.data + i * from.ld, sizeof(float) * dim);
  if (last && n) memcpy(to + (n - 1) * dim, last, sizeof(float) * dim);
}

static void copy_sinks(const Rows& from, long n, long dim, long place, const float* row, float* to) {
  for (long i = 0; i < n; i++) memcpy(to + i * dim, i == place ? row : from.data + i * from.ld, sizeof(float) * dim);
}

// Pair i of the block.
static void window_step_pair(const SqCall& pr, const Block& block, long i, const BlockWork& block_work, WindowStep& h) {
  const long index = block.at(i);
  const Head hd = head_of(pr, index);
  StepFeatures& s = h.s;
  const long M = pr.features, E = pr.width, D = pr.near_dim, G = hd.groups, w = pr.window, N = pr.sinks;
  const bool real = !pr.token_mask || pr.token_mask[hd.b] != 0;
  const int64_t rank = pr.count[hd.b];  // of the new token
  // The token that leaves the window is far unless it is a sink, or its place was empty.
  const bool leaves = real && rank - w >= N;
  if (hd.h == 0) pr.count_out[hd.b] = rank + real;
  fetch(pr.token_k, hd.b, hd.h, 0, 1, D, h.token_k, D);
  fetch(pr.token_v, hd.b, hd.h, 0, 1, E, h.token_v, E);
  if (M) {
    step_state(pr, index, s);
    for (long g = 0; g < G; g++) {
      const Tokens queries = block_work.group(g);
      s.a = h.a + g * feature_stride(pr);
      h.Z[g] = step_query(pr, queries.row(i), queries.t[i], s);
      h.top[g] = s.top;
    }
    step_key(hd, block_work.keys.row(i), block_work.keys.t[i], leaves, s);
  }
  const Rows keys = rows_of(pr.near_k, hd), values = rows_of(pr.v, hd);
  const Rows sink_k = rows_of(pr.sink_k, hd), sink_v = rows_of(pr.sink_v, hd);
  for (long g = 0; g < G; g++) {
    const long head = hd.h * G + g;
    fetch(pr.near_q, hd.b, head, 0, 1, D, h.x, D);
    float *sinks = h.weights, *window = sinks + N, *token = window + w;
    row_scores(sink_k, N, D, h.x, pr.scale, sinks);
    row_scores(keys, w, D, h.x, pr.scale, window);
    row_scores({h.token_k, 0}, 1, D, h.x, pr.scale, token);
    for (long j = rank < N ? rank : N; j < N; j++) sinks[j] = MINUS_INF;
    for (long j = 0; j < w && rank - w + j < N; j++) window[j] = MINUS_INF;  // empty places have negative ranks
    if (!real) *token = MINUS_INF;
    float peak = MINUS_INF, mass = 0.0f;
    for (long j = 0; j < N + w + 1; j++) peak = max1(h.weights[j], peak);
    const float shift = or_zero(peak);
    long j = 0;
    for (; j + VL <= N + w + 1; j += VL) {
      const vf e = vexp(load(h.weights + j) - splat(shift));
      store(h.weights + j, e);
      mass += hsum(e);
    }
    for (; j < N + w + 1; j++) mass += h.weights[j] = exp1(h.weights[j] - shift);
    const float level = M ? h.top[g] + gain_of(pr, hd, g) : MINUS_INF, Z = M ? h.Z[g] : 0.0f;
    const vf logs[2] = {rough_log(splat(mass)), rough_log(splat(Z))};
    const float base = or_zero(max1(peak + logs[0][0], level + logs[1][0]));
    const float near = exp1(peak - base > 80.0f ? 80.0f : peak - base), far = exp1(level - base > 80.0f ? 80.0f : level - base);
    const float total = near * mass + far * Z, inverse = total == 0.0f ? 0.0f : 1.0f / total;
    for (j = 0; j < N + w + 1; j++) h.weights[j] *= near * inverse;
    if (M) {
      float* a = h.a + g * feature_stride(pr);
      for (long r = 0; r < M; r++) a[r] *= far * inverse;
      const bool past = stores_non_temporal(pr, pr.s_out + index * M * E);
      (g > 0 ? pass_state<READ_ONLY> : past ? pass_state<UPDATE_NON_TEMPORAL> : pass_state<UPDATE>)(pr, index, a, s, h.out);
    } else {
      memset(h.out, 0, sizeof(float) * E);
    }
    add_weighted(sink_v, N, E, sinks, h.out);
    add_weighted(values, w, E, window, h.out);
    add_weighted({h.token_v, 0}, 1, E, token, h.out);
    put(pr.out, hd.b, head, 0, 1, E, h.out, E);
  }
  if (M) {
    memcpy(pr.z_out + index * M, s.z, sizeof(float) * M);
    memcpy(pr.c_out + index * M, s.c, sizeof(float) * M);
  }
  const long place = real && rank < N ? rank : -1;
  shift_rows(keys, w, D, real ? h.token_k : nullptr, pr.window_k_out + index * w * D);
  shift_rows(values, w, E, real ? h.token_v : nullptr, pr.window_v_out + index * w * E);
  copy_sinks(sink_k, N, D, place, h.token_k, pr.sink_k_out + index * N * D);
  copy_sinks(sink_v, N, E, place, h.token_v, pr.sink_v_out + index * N * E);
}

static void window_step_task(void* context, int64_t task, int64_t) {
  StepJob& job = *(StepJob*)context;
  const SqCall& pr = *job.pr;
  BlockWork w;
  WindowStep h;
  if (!in_scratch([&](Arena& arena) { w = take_block(arena, pr), h = take_window_step(arena, pr); })) {
    job.failed = true;
    return;
  }
  const Block block = job.blocks.at(task);
  if (pr.features) {
    project_block(pr, block, w);
    step_biases(pr, block, h.s);
  }
  for (long i = 0; i < block.count; i++) window_step_pair(pr, block, i, w, h);
  end_non_temporal();
}

// s_in is required unless nothing is far; window and sinks are float32 with components side by side.
static int window_step(const SqCall& pr) {
  StepJob job = {&pr, blocks_of(pr), false};
  sq_parallel(job.blocks.count(), pr.threads, window_step_task, &job);
  return job.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS
