// LSH attention, backward: weights formed again from the log normaliser of the forward, round after round.
#pragma once

#include "../sums.h"
#include "forward.h"

namespace SQ_NS::lsh {

struct BackContext {
  Context x;
  Summing sums;
};

static void load_gradients(Tile& t) {
  const SqLsh& p = *t.call;
  fetch_rows(p.dout, t.b, t.h, t.queries, t.rows, p.width, t.dout, t.lde);
  fetch_rows(p.out, t.b, t.h, t.queries, t.rows, p.width, t.sum, t.lde);
  for (long r = 0; r < t.rows; r++) t.norm[r] = p.log_norm[(t.b * p.heads_q + t.h) * p.length_q + t.queries[r]];
  start_gradients(t);
}

// What a token's own key gets, where it is treated apart.
static void add_own(Tile& t, const Sums& sums) {
  const SqLsh& p = *t.call;
  float *key = t.keys, *value = t.values, *dk = t.dk, *dv = t.dv;
  for (long r = 0; r < t.rows; r++) {
    const int32_t* token = t.queries + r;
    const bool nothing_else = t.norm[r] == INFINITY;
    if (!is_real(t, *token) || (p.own == SQ_OWN_ALONE && !nothing_else)) continue;
    fetch_rows(p.k, t.b, key_head(t), token, 1, p.dim, key, t.ldk);
    fetch_rows(p.v, t.b, key_head(t), token, 1, p.width, value, t.lde);
    const float *q = t.q + r * t.ldk, *dout = t.dout + r * t.lde;
    const float weight = nothing_else ? 1.0f : exp1(dot(q, key, t.ldk) - t.norm[r]);
    const float g = nothing_else ? 0.0f : weight * (dot(dout, value, t.lde) - t.slope[r]);
    for (long d = 0; d < t.ldk; d += VL) {
      store(t.dq + r * t.ldk + d, load(t.dq + r * t.ldk + d) + splat(g) * load(key + d));
      store(dk + d, splat(g) * load(q + d));
    }
    for (long e = 0; e < t.lde; e += VL) store(dv + e, splat(weight) * load(dout + e));
    add_to_sums(sums, *token, dk, dv);
  }
}

static void gradient_task(void* context, int64_t task, int64_t) {
  BackContext& y = *(BackContext*)context;
  const SqLsh& p = *y.x.call;
  const long head = task / y.sums.parts, part = task % y.sums.parts, groups = p.heads_q / p.heads_kv;
  Tile t;
  if (!take_tile(y.x, head / p.heads_kv, true, &t)) return;
  const Sums sums = sums_of(y.sums, task, y.x.round == 0);
  for (long g = 0; g < groups; g++) {
    set_head(y.x, t, head % p.heads_kv * groups + g);
    for (long from = part * PIECE; from < p.length_q; from += y.sums.parts * PIECE)
      for_queries(y.x, t, from, from + PIECE < p.length_q ? from + PIECE : p.length_q, [&] {
        load_gradients(t);
        if (y.x.round == 0 && p.own != SQ_OWN_ANY) add_own(t, sums);
        for_keys(t, [&](long n) {
          add_gradients(t, n);
          for (long j = 0; j < n; j++) add_to_sums(sums, t.key_table[j], t.dk + j * t.ldk, t.dv + j * t.lde);
        });
        for (long r = 0; r < t.rows; r++) add_query(t, r, p.scale, p.dq, t.b, t.h, t.queries[r]);
      });
  }
}

static int backward(const SqLsh* call) {
  const SqLsh& p = *call;
  BackContext y;
  if (!prepare(p, y.x)) return SQ_NO_MEMORY;
  Ranks* all = (Ranks*)sq_allocate((long)(p.batch * sizeof(Ranks)) / 4 + 4);
  for (long b = 0; all && b < p.batch; b++) all[b] = {p.length_k, nullptr};
  if (!all || !make_sums(y.sums, p, all, y.x.pieces)) {
    if (all) sq_release((float*)all);
    sq_workspace_done();
    return SQ_NO_MEMORY;
  }
  for (y.x.round = 0; y.x.round < p.rounds && !y.x.failed; y.x.round++)
    sq_parallel(y.sums.heads * y.sums.parts, p.threads, gradient_task, &y);
  if (!y.x.failed) write_sums(y.sums, p.threads);
  sq_release(y.sums.memory);
  sq_release((float*)all);
  sq_workspace_done();
  return y.x.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::lsh
