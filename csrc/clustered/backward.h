// Clustered attention, backward. Choices are constants; weights are formed again.
//
//   members   p = softmax over T, u = p V_T, w = dout.u:     g = m p (dout.v - w);  dq += g k,  dk += g q,  dv += m p dout
//   cluster   dr = sum dout,  dm = sum w:                    dA_l = dm on T, dr.v_l off it
//             g = A (dA - m dm - dr.r);                      dc = g K,  dk += g c,  dv += A dr off T,  dq += dc / n
//
// One task adds up the gradients of one key head (or of some of its clusters, where heads are fewer than threads).
#pragma once

#include "../sums.h"
#include "forward.h"

namespace SQ_NS::clustered {

constexpr long TILE = 512;  // keys whose gradients are formed together

struct Way {
  Block k;
  Sums sums;
  float *dr, *dm, *dc, *given;  // [most][lde], [most], [most][ldk]; [most]: m dm + dr.r
  float *products;              // [most][TILE + 16]
  float *dout, *slopes, *dq;    // [MEMBERS][lde], [MEMBERS][ldt], [MEMBERS][ldk]
  float *top_value_panel;       // [E][ldt]
  float *top_dk, *top_dv;       // [ldt][ldk], [ldt][lde]
};

static Way cut_way(const SqClustered& p, const Plan& plan, float* memory, long* floats) {
  Way w = {};
  long used;
  w.k = cut_block(p, plan, memory, &used);
  auto take = [&](long n) {
    float* at = memory ? memory + used : nullptr;
    used += padded(n, 16);
    return at;
  };
  w.dr = take(plan.most * plan.lde);
  w.dm = take(plan.most);
  w.dc = take(plan.most * plan.ldk);
  w.given = take(plan.most);
  w.products = take(plan.most * (TILE + 16));
  w.dout = take(MEMBERS * plan.lde);
  w.slopes = take(MEMBERS * plan.ldt);
  w.dq = take(MEMBERS * plan.ldk);
  w.top_value_panel = take(p.width * plan.ldt);
  w.top_dk = take(plan.ldt * plan.ldk);
  w.top_dv = take(plan.ldt * plan.lde);
  *floats = used;
  return w;
}

// Gradients through the weights over T; also dr and dm of the row.
static void member_gradient(Way& w, long r, long i0, long n) {
  Block& k = w.k;
  const SqClustered& p = *k.call;
  const Plan& plan = *k.plan;
  float* dr = w.dr + r * plan.lde;
  for (long i = 0; i < n; i++) {
    float* row = w.dout + i * plan.lde;
    fetch(p.dout, k.b, k.h, k.member[i0 + i], 1, p.width, row, plan.lde);
    clear_tail(row, p.width, plan.lde);
    for (long e = 0; e < plan.lde; e += VL) store(dr + e, load(dr + e) + load(row + e));
  }
  if (!p.topk) return;
  const long count = k.count[r], vectors = padded(count, VL) / VL;
  weigh_members(k, r, i0, n);
  gemm(n, vectors, p.width, w.dout, plan.lde, 1, w.top_value_panel, plan.ldt, w.slopes, plan.ldt, FROM_ZERO);
  const vf mass = splat(k.mass[r]);
  for (long i = 0; i < n; i++) {
    float *weight = k.weights + i * plan.ldt, *slope = w.slopes + i * plan.ldt;
    vf sum = zero();
    for (long j = 0; j < vectors * VL; j += VL) sum += load(weight + j) * load(slope + j);
    const float mean = hsum(sum);
    w.dm[r] += mean;
    for (long j = 0; j < vectors * VL; j += VL) {
      const vf x = mass * load(weight + j);
      store(weight + j, x);
      store(slope + j, x * (load(slope + j) - splat(mean)));
    }
  }
  gemm(n, plan.ldk / VL, count, w.slopes, plan.ldt, 1, k.top_rows, plan.ldk, w.dq, plan.ldk, FROM_ZERO);
  for (long i = 0; i < n * plan.ldk; i += VL) store(w.dq + i, load(w.dq + i) * splat(p.scale));
  for (long i = 0; i < n; i++) put(p.dq, k.b, k.h, k.member[i0 + i], 1, p.dim, w.dq + i * plan.ldk, plan.ldk);
  add_transposed(count, n, w.slopes, plan.ldt, k.q, plan.ldk, w.top_dk);
  add_transposed(count, n, k.weights, plan.ldt, w.dout, plan.lde, w.top_dv);
}

// Gradients through the weights of the centroids, a tile of keys at a time.
static void centroid_gradient(Way& w) {
  Block& k = w.k;
  const SqClustered& p = *k.call;
  const Plan& plan = *k.plan;
  const long keys = k.keys->real.count, ldp = TILE + 16;
  memset(w.dc, 0, sizeof(float) * k.rows * plan.ldk);
  for (long from = 0; from < keys; from += TILE) {
    const long n = keys - from < TILE ? keys - from : TILE, lanes = padded(n, VL);
    times_panels(k.rows, n, p.width, w.dr, plan.lde, k.keys->value_panels + from * p.width, w.products, ldp);
    add_transposed(n, k.rows, k.scores + from, plan.lds, w.dr, plan.lde, w.sums.values + from * plan.lde);
    for (long r = 0; r < k.rows; r++) {
      const float* weights = k.scores + r * plan.lds + from;
      float* slope = w.products + r * ldp;
      const vf given = splat(w.given[r]);
      for (long j = 0; j < lanes; j += VL) store(slope + j, load(weights + j) * (load(slope + j) - given));
    }
    // Off T so far; on T weights are 0 here, and single entries follow.
    times_rows(k.rows, n, w.products, ldp, k.keys->rows + from * plan.ldk, plan.ldk, w.dc, FROM_C);
    add_transposed(n, k.rows, w.products, ldp, k.centroid, plan.ldk, w.sums.keys + from * plan.ldk);
  }
}

// The same for the keys of T, whose weights are in m, and what their members gave them.
static void top_gradient(Way& w, long r) {
  Block& k = w.k;
  const Plan& plan = *k.plan;
  const float slope = w.dm[r] - w.given[r], *c = k.centroid + r * plan.ldk;
  float* dc = w.dc + r * plan.ldk;
  for (long i = 0; i < k.count[r]; i++) {
    const long at = r * k.call->chosen + i, rank = k.top[at];
    const float* key = k.keys->rows + rank * plan.ldk;
    const vf g = splat(k.top_weight[at] * slope);
    float* dk = w.sums.keys + rank * plan.ldk;
    for (long d = 0; d < plan.ldk; d += VL) {
      store(dc + d, load(dc + d) + g * load(key + d));
      store(dk + d, load(dk + d) + g * load(c + d));
    }
  }
}

static void add_top_rows(Way& w, long r) {
  Block& k = w.k;
  const Plan& plan = *k.plan;
  for (long i = 0; i < k.count[r]; i++) {
    const long rank = k.top[r * k.call->chosen + i];
    add_to_sums(w.sums, rank, w.top_dk + i * plan.ldk, w.top_dv + i * plan.lde);
  }
}

static void block_gradient(Way& w) {
  Block& k = w.k;
  const SqClustered& p = *k.call;
  const Plan& plan = *k.plan;
  attend_centroids(k);
  memset(w.dr, 0, sizeof(float) * k.rows * plan.lde);
  for (long r = 0; r < k.rows; r++) {
    w.dm[r] = 0.0f;
    if (p.topk) {
      gather_top(k, r);
      transpose(k.top_values, plan.ldt, p.width, plan.lde, w.top_value_panel, plan.ldt);
      memset(w.top_dk, 0, sizeof(float) * plan.ldt * plan.ldk);
      memset(w.top_dv, 0, sizeof(float) * plan.ldt * plan.lde);
    }
    for_members(k, r, [&](long i0, long n) { member_gradient(w, r, i0, n); });
    if (p.topk) add_top_rows(w, r);
    vf sum = zero();
    for (long e = 0; e < plan.lde; e += VL) sum += load(w.dr + r * plan.lde + e) * load(k.rest + r * plan.lde + e);
    w.given[r] = hsum(sum) + k.mass[r] * w.dm[r];
  }
  centroid_gradient(w);
  for (long r = 0; r < k.rows; r++) {
    if (p.topk) top_gradient(w, r);
    const float part = p.scale / (float)(k.first[r + 1] - k.first[r]);
    for (long i = k.first[r]; i < k.first[r + 1]; i++) {
      float* dq = (float*)p.dq.data + offset_of(p.dq, k.b, k.h, k.member[i]);
      for (long d = 0; d < p.dim; d++) dq[d] += part * w.dc[r * plan.ldk + d];
    }
  }
}

struct BackContext {
  Context x;
  Summing sums;
};

static void gradient_task(void* context, int64_t task, int64_t) {
  BackContext& y = *(BackContext*)context;
  Context& x = y.x;
  const SqClustered& p = *x.call;
  const long head = task / y.sums.parts, part = task % y.sums.parts, groups = p.heads_q / p.heads_kv;
  long floats;
  cut_way(p, x.plan, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  Way w = cut_way(p, x.plan, memory, &floats);
  w.sums = sums_of(y.sums, task, true);
  w.k.keys = &x.plan.keys[head];
  w.k.b = head / p.heads_kv;
  if (!w.k.keys->real.count) return;
  for (long i = part; i < groups * x.plan.blocks; i += y.sums.parts) {
    w.k.h = head % p.heads_kv * groups + i / x.plan.blocks;
    list_members(w.k, i % x.plan.blocks);
    block_gradient(w);
  }
}

static int backward(const SqClustered* call) {
  const SqClustered& p = *call;
  BackContext y;
  if (!prepare(p, y.x, 4 * MR)) return SQ_NO_MEMORY;
  const long blocks = p.heads_q / p.heads_kv * y.x.plan.blocks;
  if (!make_sums(y.sums, p, y.x.plan.real, blocks)) return SQ_NO_MEMORY;
  sq_parallel(y.sums.heads * y.sums.parts, p.threads, gradient_task, &y);
  if (!y.x.failed) write_sums(y.sums, p.threads);
  sq_release(y.sums.memory);
  sq_workspace_done();
  return y.x.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::clustered
