// One token of causal hybrid attention for every (batch, KV head): the recurrent step, state in, new state out.
//
// The query sees the window, the new token, the sinks, and the state as it came. Then the oldest token leaves the window:
// it becomes a sink if it is among the first of its sequence, and part of the far field otherwise. S is read once and
// written once; window and sinks are copied.
#pragma once

#include "decode.h"
#include "near.h"

namespace SQ_NS {

struct HybridStep {
  Step s;
  float *a, *Z, *top;                // per group: [M], 1, 1
  float *weights;                    // [sinks + w + 1]
  float *x, *token_k, *token_v, *out;  // [D], [D], [E], [E]
};

static HybridStep take_hybrid_step(Arena& arena, const SqHybrid& hy) {
  const long G = hy.far.heads_q / hy.far.heads_kv;
  HybridStep h = {};
  h.s = take_step(arena, hy.far);
  h.a = arena.take(G * feature_stride(hy.far));
  h.Z = arena.take(G);
  h.top = arena.take(G);
  h.weights = arena.take(hy.sinks + hy.window + 1);
  h.x = arena.take(round_up(hy.near_dim, 16));
  h.token_k = arena.take(round_up(hy.near_dim, 16));
  h.token_v = arena.take(round_up(hy.far.width, 16));
  h.out = arena.take(round_up(hy.far.width, 16));
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
enum Visit { READ_ONLY, UPDATE, UPDATE_PAST_CACHES };

// sum = a S and, if it is updated, S' = rho S + phi v^T, over N vectors of columns.
template <int N, Visit VISIT>
SQ_INLINE void read_and_update(long M, long E, const float* from, float* to, const float* a, const Step& s, const float* v,
                               float* out) {
  vf value[N], sum[N];
  SQ_UNROLL for (int n = 0; n < N; n++) value[n] = load(v + n * VL), sum[n] = zero();
  for (long r = 0; r < M; r++) {
    const vf weight = splat(a[r]), phi = splat(s.phi[r]), rho = splat(s.rho[r]);
    SQ_UNROLL for (int n = 0; n < N; n++) {
      const vf x = load(from + r * E + n * VL);
      sum[n] += x * weight;
      if (VISIT == UPDATE) store(to + r * E + n * VL, x * rho + value[n] * phi);
      if (VISIT == UPDATE_PAST_CACHES) store_past_caches(to + r * E + n * VL, x * rho + value[n] * phi);
    }
  }
  SQ_UNROLL for (int n = 0; n < N; n++) store(out + n * VL, sum[n]);
}

template <Visit VISIT>
static void pass_state(const SqProblem& pr, long index, const float* a, const Step& s, float* out) {
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

// Which token leaves, and what becomes of it.
struct Leaving {
  bool real;
  long sink;  // its place among the sinks, or -1
};

// Counts and masks of one sequence.
static Leaving step_sequence(const SqStep& st, long b, bool write) {
  const SqHybrid& hy = st.hy;
  const long w = hy.window, N = hy.sinks;
  const bool token = !st.token_mask || st.token_mask[b] != 0;
  const int64_t length = st.length[b];
  // Positions are counted from the first real key; before there is one, `start` moves along.
  const int64_t start = st.start[b] < length || token ? st.start[b] : length + 1;
  const int64_t slot = w ? length - st.start[b] - w : length - start;
  Leaving left = {w ? st.window_mask[b * w] != 0 : token, slot >= 0 && slot < N ? (long)slot : -1};
  if (!write) return left;
  st.length_out[b] = length + 1;
  st.start_out[b] = start;
  st.count_out[b] = st.count[b] + (left.real && left.sink < 0);
  if (N) memcpy(st.sink_mask_out + b * N, st.sink_mask + b * N, N);
  if (left.sink >= 0) st.sink_mask_out[b * N + left.sink] = left.real;
  if (w) memcpy(st.window_mask_out + b * w, st.window_mask + b * w + 1, w - 1), st.window_mask_out[b * w + w - 1] = token;
  return left;
}

// rows[n][dim] without the first, then `last`.
static void shift_rows(const Rows& from, long n, long dim, const float* last, float* to) {
  if (n == 0) return;
  if (from.ld == dim) memcpy(to, from.data + dim, sizeof(float) * (n - 1) * dim);
  else for (long i = 1; i < n; i++) memcpy(to + (i - 1) * dim, from.data + i * from.ld, sizeof(float) * dim);
  memcpy(to + (n - 1) * dim, last, sizeof(float) * dim);
}

static void copy_sinks(const Rows& from, long n, long dim, long place, const float* row, float* to) {
  for (long i = 0; i < n; i++) memcpy(to + i * dim, i == place ? row : from.data + i * from.ld, sizeof(float) * dim);
}

struct StepJob {
  const SqStep* step;
  Blocks blocks;
  bool failed;
};

// Pair i of the block.
static void hybrid_step(const SqStep& st, const Block& block, long i, const BlockWork& block_work, HybridStep& h) {
  const SqHybrid& hy = st.hy;
  const SqProblem& pr = hy.far;
  const long index = block.at(i);
  const Head hd = head_of(pr, index);
  Step& s = h.s;
  const long M = pr.features, E = pr.width, D = hy.near_dim, G = hd.groups, w = hy.window, N = hy.sinks;
  const bool token_real = !st.token_mask || st.token_mask[hd.b] != 0;
  const Leaving left = step_sequence(st, hd.b, hd.h == 0);
  fetch(st.token_k, hd.b, hd.h, 0, 1, D, h.token_k, D);
  fetch(st.token_v, hd.b, hd.h, 0, 1, E, h.token_v, E);
  step_state(pr, index, s);
  for (long g = 0; g < G; g++) {
    const Tokens queries = block_work.group(g);
    s.a = h.a + g * feature_stride(pr);
    h.Z[g] = step_query(pr, queries.row(i), queries.t[i], s);
    h.top[g] = s.top;
  }
  step_key(hd, block_work.keys.row(i), block_work.keys.t[i], left.real && left.sink < 0, s);
  const Rows keys = rows_of(hy.near_k, hd), values = rows_of(pr.v, hd);
  const Rows sink_k = rows_of(hy.sink_k, hd), sink_v = rows_of(hy.sink_v, hd);
  for (long g = 0; g < G; g++) {
    const long head = hd.h * G + g;
    fetch(hy.near_q, hd.b, head, 0, 1, D, h.x, D);
    float *sinks = h.weights, *window = sinks + N, *token = window + w;
    row_scores(sink_k, N, D, h.x, hy.scale, sinks);
    row_scores(keys, w, D, h.x, hy.scale, window);
    row_scores({h.token_k, 0}, 1, D, h.x, hy.scale, token);
    for (long j = 0; j < N; j++)
      if (st.sink_mask[hd.b * N + j] == 0) sinks[j] = MINUS_INF;
    for (long j = 0; j < w; j++)
      if (st.window_mask[hd.b * w + j] == 0) window[j] = MINUS_INF;
    if (!token_real) *token = MINUS_INF;
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
    const float level = h.top[g] + (hy.gain ? hy.gain[head] : 0.0f), Z = h.Z[g];
    const vf logs[2] = {rough_log(splat(mass)), rough_log(splat(Z))};
    const float base = or_zero(max1(peak + logs[0][0], level + logs[1][0]));
    const float near = exp1(peak - base > 80.0f ? 80.0f : peak - base), far = exp1(level - base > 80.0f ? 80.0f : level - base);
    const float total = near * mass + far * Z, inverse = total == 0.0f ? 0.0f : 1.0f / total;
    float* a = h.a + g * feature_stride(pr);
    for (long r = 0; r < M; r++) a[r] *= far * inverse;
    for (j = 0; j < N + w + 1; j++) h.weights[j] *= near * inverse;
    const bool past = goes_past_caches(pr, pr.s_out + index * M * E);
    (g > 0 ? pass_state<READ_ONLY> : past ? pass_state<UPDATE_PAST_CACHES> : pass_state<UPDATE>)(pr, index, a, s, h.out);
    add_weighted(sink_v, N, E, sinks, h.out);
    add_weighted(values, w, E, window, h.out);
    add_weighted({h.token_v, 0}, 1, E, token, h.out);
    put(pr.out, hd.b, head, 0, 1, E, h.out, E);
  }
  memcpy(pr.z_out + index * M, s.z, sizeof(float) * M);
  memcpy(pr.c_out + index * M, s.c, sizeof(float) * M);
  shift_rows(keys, w, D, h.token_k, st.window_k_out + index * w * D);
  shift_rows(values, w, E, h.token_v, st.window_v_out + index * w * E);
  copy_sinks(sink_k, N, D, left.sink, w ? keys.data : h.token_k, st.sink_k_out + index * N * D);
  copy_sinks(sink_v, N, E, left.sink, w ? values.data : h.token_v, st.sink_v_out + index * N * E);
}

static void hybrid_decode_task(void* context, int64_t task, int64_t) {
  StepJob& job = *(StepJob*)context;
  const SqStep& st = *job.step;
  BlockWork w;
  HybridStep h;
  if (!in_scratch([&](Arena& arena) { w = take_block(arena, st.hy.far), h = take_hybrid_step(arena, st.hy); })) {
    job.failed = true;
    return;
  }
  const Block block = job.blocks.at(task);
  project_block(st.hy.far, block, w);
  step_biases(st.hy.far, block, h.s);
  for (long i = 0; i < block.count; i++) hybrid_step(st, block, i, w, h);
  end_past_caches();
}

// s_in is required; window and sinks are float32 with components side by side.
static int hybrid_decode(const SqStep* step) {
  StepJob job = {step, blocks_of(step->hy.far), false};
  sq_parallel(job.blocks.count(), step->hy.far.threads, hybrid_decode_task, &job);
  return job.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS
