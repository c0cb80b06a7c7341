// One token for every (batch, KV head): the recurrent step, state in, new state out.
//
//   S' = rho S + phi v^T,    O = (a S') / (a z')        features: step.h
//
// S is read once and written once, with the read of the first query head folded into the same pass: the step costs
// little more than copying the state.
#pragma once

#include "step_features.h"

namespace SQ_NS {

// S' = rho S + phi v^T over N vectors of columns, and out = a S' there.
template <int N, bool PAST>
SQ_INLINE void update_and_read(long M, long E, const float* from, float* to, const StepFeatures& s, const float* v, float* out) {
  vf value[N], sum[N];
  SQ_UNROLL for (int n = 0; n < N; n++) value[n] = load(v + n * VL), sum[n] = zero();
  for (long r = 0; r < M; r++) {
    const vf phi = splat(s.phi[r]), rho = splat(s.rho[r]), a = splat(s.a[r]);
    SQ_UNROLL for (int n = 0; n < N; n++) {
      vf x = value[n] * phi;
      if (from) x += load(from + r * E + n * VL) * rho;
      if (PAST) store_non_temporal(to + r * E + n * VL, x);
      else store(to + r * E + n * VL, x);
      sum[n] += x * a;
    }
  }
  SQ_UNROLL for (int n = 0; n < N; n++) store(out + n * VL, sum[n]);
}

template <bool PAST>
static void update_state(const SqCall& pr, long index, StepFeatures& s) {
  const long M = pr.features, E = pr.width;
  const float* from = pr.s_in ? pr.s_in + index * M * E : nullptr;
  float* to = pr.s_out + index * M * E;
  long e = 0;
  // Whole rows where they fit: memory is then read and written strictly in order.
  for (; e + 8 * VL <= E; e += 8 * VL)
    update_and_read<8, PAST>(M, E, from ? from + e : nullptr, to + e, s, s.v + e, s.out + e);
  for (; e + 4 * VL <= E; e += 4 * VL)
    update_and_read<4, PAST>(M, E, from ? from + e : nullptr, to + e, s, s.v + e, s.out + e);
  for (; e + VL <= E; e += VL)
    update_and_read<1, PAST>(M, E, from ? from + e : nullptr, to + e, s, s.v + e, s.out + e);
  for (; e < E; e++) {
    float sum = 0.0f;
    for (long r = 0; r < M; r++) {
      const float x = s.phi[r] * s.v[e] + (from ? from[r * E + e] * s.rho[r] : 0.0f);
      to[r * E + e] = x;
      sum += x * s.a[r];
    }
    s.out[e] = sum;
  }
  memcpy(pr.z_out + index * M, s.z, sizeof(float) * M);
  memcpy(pr.c_out + index * M, s.c, sizeof(float) * M);
}

struct StepJob {
  const SqCall* pr;
  Blocks blocks;
  bool failed;
};

static void linear_step_task(void* context, int64_t task, int64_t) {
  StepJob& job = *(StepJob*)context;
  const SqCall& pr = *job.pr;
  BlockWork w;
  StepFeatures s;
  if (!in_scratch([&](Arena& arena) { w = take_block(arena, pr), s = take_step(arena, pr); })) {
    job.failed = true;
    return;
  }
  const Block block = job.blocks.at(task);
  project_block(pr, block, w);
  step_biases(pr, block, s);
  for (long i = 0; i < block.count; i++) {
    const long index = block.at(i);
    const Head hd = head_of(pr, index);
    // Further query heads of the group read the new state: then it is wanted in the caches after all.
    const bool past = hd.groups == 1 && stores_non_temporal(pr, pr.s_out + index * pr.features * pr.width);
    step_state(pr, index, s);
    step_key(hd, w.keys.row(i), w.keys.t[i], !pr.key_mask || pr.key_mask[hd.b * pr.mask_batch] != 0, s);
    for (long g = 0; g < hd.groups; g++) {
      const float Z = step_query(pr, w.group(g).row(i), w.group(g).t[i], s);
      if (g == 0) (past ? update_state<true> : update_state<false>)(pr, index, s);
      else read_state(pr.features, pr.width, pr.s_out + index * pr.features * pr.width, s.a, s.out);
      for (long e = 0; e < pr.width; e++) s.out[e] = !pr.normalise ? s.out[e] : Z == 0.0f ? 0.0f : s.out[e] / Z;
      put(pr.out, hd.b, hd.h * hd.groups + g, 0, 1, pr.width, s.out, pr.width);
    }
  }
  end_non_temporal();
}

// length_q = length_k = 1; s_out is required and must not overlap s_in.
static int linear_step(const SqCall& pr) {
  StepJob job = {&pr, blocks_of(pr), false};
  sq_parallel(job.blocks.count(), pr.threads, linear_step_task, &job);
  return job.failed ? SQ_NO_MEMORY : SQ_OK;
}

// ---- the projection alone, for benchmarks ----------------------------------------------------------------------------

struct ProjectJob {
  const SqCall* pr;
  float* out;  // (B, H, chunks, rows, LD): tokens along the last axis; null = leave it in the cache
  long chunks;
};

static void project_task(void* context, int64_t index, int64_t) {
  const ProjectJob& job = *(const ProjectJob*)context;
  const SqCall& pr = *job.pr;
  const Head hd = head_of(pr, index);
  Work w;
  float* p;
  if (!in_scratch([&](Arena& arena) {
        w = take_work(arena, pr, hd.lds);
        p = arena.take(pr.rows * LD);
      })) return;
  for (long i = 0; i < job.chunks; i++) {
    const long t0 = i * C, n = pr.length_q - t0 < C ? pr.length_q - t0 : C;
    panel(pr.q, hd.b, hd.h, t0, n, C, pr.dim, w.x, w.rows);
    project(pr, hd.q, w.x, CV, 0, pr.rows, p, w.butterfly);
    if (job.out) memcpy(job.out + (index * job.chunks + i) * pr.rows * LD, p, sizeof(float) * pr.rows * LD);
  }
}

static int project_only(const SqCall* call, float* out) {
  ProjectJob job = {call, out, (call->length_q + C - 1) / C};
  sq_parallel(call->batch * call->heads_kv, call->threads, project_task, &job);
  return SQ_OK;
}

}  // namespace SQ_NS
