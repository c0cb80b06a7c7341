// Clustered attention, forward: blocks of clusters, each against all keys; members against T; rows of outputs written.
#pragma once

#include "block.h"

namespace SQ_NS::clustered {

static void write_zeros(const SqClustered& p, long b, long h, long token, float* zeros) {
  clear_tail(zeros, 0, p.width);
  put(p.out, b, h, token, 1, p.width, zeros, p.width);
}

static void attend_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqClustered& p = *x.call;
  const Plan& plan = x.plan;
  const long head = task / plan.blocks;
  long floats;
  cut_block(p, plan, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  Block k = cut_block(p, plan, memory, &floats);
  k.b = head / p.heads_q, k.h = head % p.heads_q;
  k.keys = &plan.keys[k.b * p.heads_kv + k.h / (p.heads_q / p.heads_kv)];
  list_members(k, task % plan.blocks);
  if (!k.keys->real.count) {
    for (long i = 0; i < k.first[k.rows]; i++) write_zeros(p, k.b, k.h, k.member[i], k.rest);
    return;
  }
  attend_centroids(k);
  for (long r = 0; r < k.rows; r++) {
    const float* rest = k.rest + r * plan.lde;
    if (!p.topk) {
      for (long i = k.first[r]; i < k.first[r + 1]; i++) put(p.out, k.b, k.h, k.member[i], 1, p.width, rest, plan.lde);
      continue;
    }
    gather_top(k, r);
    for_members(k, r, [&](long i0, long n) {
      weigh_members(k, r, i0, n);
      gemm(n, plan.lde / VL, k.count[r], k.weights, plan.ldt, 1, k.top_values, plan.lde, k.out, plan.lde, FROM_ZERO);
      for (long i = 0; i < n; i++) {
        float* row = k.out + i * plan.lde;
        for (long e = 0; e < plan.lde; e += VL) store(row + e, load(row + e) * splat(k.mass[r]) + load(rest + e));
        put(p.out, k.b, k.h, k.member[i0 + i], 1, p.width, row, plan.lde);
      }
    });
  }
}

static int forward(const SqClustered* call) {
  const SqClustered& p = *call;
  Context x;
  if (!prepare(p, x, 2 * MR)) return SQ_NO_MEMORY;
  if (p.query_mask.data) {
    float* zeros = sq_scratch(p.width);
    if (!zeros) return SQ_NO_MEMORY;
    for (long b = 0; b < p.batch; b++)
      for (long i = 0; i < p.length_q; i++)
        if (!p.query_mask.data[b * p.query_mask.batch + i * p.query_mask.token])
          for (long h = 0; h < p.heads_q; h++) write_zeros(p, b, h, i, zeros);
  }
  if (!x.failed) sq_parallel(p.batch * p.heads_q * x.plan.blocks, p.threads, attend_task, &x);
  sq_workspace_done();
  return x.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::clustered
