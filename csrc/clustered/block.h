// A few clusters of one head: their centroids against all keys, and their members against the keys that matter most.
#pragma once

#include <math.h>

#include "queries.h"
#include "top.h"

namespace SQ_NS::clustered {

constexpr long MEMBERS = 64;  // queries of a cluster that are computed together
constexpr long LAID = 512;    // keys that one task lays out

// The keys and values of one (batch, key head), by rank.
struct Keys {
  Ranks real;
  float *panels, *values;      // panels of D rows; [S][lde]
  float *rows, *value_panels;  // [S][ldk]; panels of E rows: where there is a gradient
};

struct Plan {
  const SqClustered* call;
  long ldk, lde, lds, ldt, most;  // lds: row of scores; ldt: row of scores with T; most: clusters of a block
  long blocks;                    // of clusters
  Keys* keys;                     // [B * H]
  Ranks *queries, *real;          // [B]: real queries, real keys
};

// One block of clusters; rows are the clusters that have members.
struct Block {
  const SqClustered* call;
  const Plan* plan;
  const Keys* keys;
  long b, h, rows;
  long *cluster, *first;           // [most], [most + 1]: number of a row's cluster, its first member
  int32_t *member, *place;         // [L] tokens by row; [clusters]
  float *centroid, *rest, *one;    // [most][ldk] times the scale; [most][lde]: sum over the keys off T; [ldk]: a query
  float *scores, *mass;            // [most][lds]: weights; [most]: m
  int32_t *top;                    // [most][chosen]: ranks of T
  float* top_weight;               // [most][chosen]: A on T
  long* count;                     // [most]: keys in T
  float *heap, *value;             // for the choice of T
  float *q, *weights, *out;        // [MEMBERS][ldk] times the scale, [MEMBERS][ldt], [MEMBERS][lde]
  float *top_rows, *top_panel, *top_values;  // [ldt][ldk], [D][ldt], [ldt][lde]
};

static Block cut_block(const SqClustered& p, const Plan& plan, float* memory, long* floats) {
  Block k = {};
  k.call = &p, k.plan = &plan;
  long used = 0;
  auto take = [&](long n) {
    float* at = memory ? memory + used : nullptr;
    used += padded(n, 16);
    return at;
  };
  k.cluster = (long*)take(2 * plan.most);
  k.first = (long*)take(2 * (plan.most + 1));
  k.count = (long*)take(2 * plan.most);
  k.member = (int32_t*)take(p.length_q);
  k.place = (int32_t*)take(p.clusters);
  k.centroid = take(plan.most * plan.ldk);
  k.rest = take(plan.most * plan.lde);
  k.one = take(plan.ldk);
  k.scores = take(plan.most * plan.lds);
  k.mass = take(plan.most);
  k.top = (int32_t*)take(plan.most * p.chosen);
  k.top_weight = take(plan.most * p.chosen);
  k.heap = take(p.chosen);
  k.value = take(p.group_size > 1 ? p.length_k : 0);
  if (p.topk) {
    k.q = take(MEMBERS * plan.ldk);
    k.weights = take(MEMBERS * plan.ldt);
    k.out = take(MEMBERS * plan.lde);
    k.top_rows = take(plan.ldt * plan.ldk);
    k.top_panel = take(p.dim * plan.ldt);
    k.top_values = take(plan.ldt * plan.lde);
  }
  *floats = used;
  return k;
}

// The members of the clusters of a block, in order of rank.
static void list_members(Block& k, long block) {
  const SqClustered& p = *k.call;
  const Ranks& real = k.plan->queries[k.b];
  const int32_t* assigned = p.assigned + (k.b * p.heads_q + k.h) * p.length_q;
  const long from = block * p.clusters / k.plan->blocks, to = (block + 1) * p.clusters / k.plan->blocks;
  memset(k.place, 0, sizeof(int32_t) * p.clusters);
  for (long i = 0; i < real.count; i++) k.place[assigned[real.token(i)]]++;
  long at = 0;
  k.rows = 0;
  for (long c = 0; c < p.clusters; c++) {
    const long size = k.place[c];
    k.place[c] = c >= from && c < to ? (int32_t)at : -1;
    if (c < from || c >= to || !size) continue;
    k.cluster[k.rows] = c, k.first[k.rows++] = at;
    at += size;
  }
  k.first[k.rows] = at;
  for (long i = 0; i < real.count; i++) {
    const long token = real.token(i), c = assigned[token];
    if (k.place[c] >= 0) k.member[k.place[c]++] = (int32_t)token;
  }
}

static void clear_tail(float* row, long from, long to) {
  for (long d = from; d < to; d++) row[d] = 0.0f;
}

static void centroids(Block& k) {
  const SqClustered& p = *k.call;
  const long ldk = k.plan->ldk;
  for (long r = 0; r < k.rows; r++) {
    float* row = k.centroid + r * ldk;
    memset(row, 0, sizeof(float) * ldk);
    for (long i = k.first[r]; i < k.first[r + 1]; i++) {
      const float* q = k.one;
      if (p.q.dtype == SQ_FLOAT32 && p.q.stride[3] == 1) q = (const float*)p.q.data + offset_of(p.q, k.b, k.h, k.member[i]);
      else fetch(p.q, k.b, k.h, k.member[i], 1, p.dim, k.one, ldk);
      for (long d = 0; d < p.dim; d++) row[d] += q[d];
    }
    const float part = p.scale / (float)(k.first[r + 1] - k.first[r]);
    for (long d = 0; d < p.dim; d++) row[d] *= part;
  }
}

// T of a row, from its scores or as it was given.
static void take_top(Block& k, long r) {
  const SqClustered& p = *k.call;
  const Ranks& real = k.keys->real;
  int32_t *top = k.top + r * p.chosen;
  int32_t *shown = p.top + ((k.b * p.heads_q + k.h) * p.clusters + k.cluster[r]) * p.chosen;
  if (!p.given) {
    k.count[r] = choose_top(k.scores + r * k.plan->lds, real.count, p.topk, p.group_size, k.heap, k.value, top);
    for (long i = 0; i < p.chosen; i++) shown[i] = i < k.count[r] ? (int32_t)real.token(top[i]) : -1;
    return;
  }
  k.count[r] = 0;
  for (long i = 0; i < p.chosen; i++)
    if (shown[i] >= 0) top[k.count[r]++] = (int32_t)rank_of(real, shown[i]);
}

// Weights of the centroids off T, their sums over values, and m.
static void attend_centroids(Block& k) {
  const SqClustered& p = *k.call;
  const Plan& plan = *k.plan;
  const long keys = k.keys->real.count, vectors = padded(keys, VL) / VL;
  centroids(k);
  times_panels(k.rows, keys, p.dim, k.centroid, plan.ldk, k.keys->panels, k.scores, plan.lds);
  for (long r = 0; r < k.rows; r++) {
    float* row = k.scores + r * plan.lds;
    for (long j = keys; j < vectors * VL; j++) row[j] = -INFINITY;
    if (p.topk) take_top(k, r);
    vf highest = splat(-INFINITY);
    for (long j = 0; j < vectors * VL; j += VL) highest = vmax(load(row + j), highest);
    const float total = exponentiate(row, vectors, hmax(highest));
    const vf part = splat(1.0f / total);
    for (long j = 0; j < vectors * VL; j += VL) store(row + j, load(row + j) * part);
    k.mass[r] = 0.0f;
    if (!p.topk) continue;
    for (long i = 0; i < k.count[r]; i++) {
      float& weight = row[k.top[r * p.chosen + i]];
      k.mass[r] += k.top_weight[r * p.chosen + i] = weight;
      weight = 0.0f;
    }
  }
  times_rows(k.rows, keys, k.scores, plan.lds, k.keys->values, plan.lde, k.rest, FROM_ZERO);
}

// The keys and values of T, as rows and as a panel.
static void gather_top(Block& k, long r) {
  const SqClustered& p = *k.call;
  const Plan& plan = *k.plan;
  const long count = k.count[r];
  for (long i = 0; i < plan.ldt; i++) {
    float *key = k.top_rows + i * plan.ldk, *value = k.top_values + i * plan.lde;
    if (i >= count) {
      clear_tail(key, 0, plan.ldk);
      clear_tail(value, 0, plan.lde);
      continue;
    }
    const long rank = k.top[r * p.chosen + i];
    fetch(p.k, k.b, k.h / (p.heads_q / p.heads_kv), k.keys->real.token(rank), 1, p.dim, key, plan.ldk);
    clear_tail(key, p.dim, plan.ldk);
    memcpy(value, k.keys->values + rank * plan.lde, sizeof(float) * plan.lde);
  }
  transpose(k.top_rows, plan.ldt, p.dim, plan.ldk, k.top_panel, plan.ldt);
}

// Normalised weights of the members [i0, i0 + n) over T, and their queries.
static void weigh_members(Block& k, long r, long i0, long n) {
  const SqClustered& p = *k.call;
  const Plan& plan = *k.plan;
  const long count = k.count[r], vectors = padded(count, VL) / VL;
  for (long i = 0; i < n; i++) fetch(p.q, k.b, k.h, k.member[i0 + i], 1, p.dim, k.q + i * plan.ldk, plan.ldk);
  for (long i = 0; i < n; i++) {
    float* row = k.q + i * plan.ldk;
    clear_tail(row, p.dim, plan.ldk);
    for (long d = 0; d < plan.ldk; d += VL) store(row + d, load(row + d) * splat(p.scale));
  }
  gemm(n, vectors, p.dim, k.q, plan.ldk, 1, k.top_panel, plan.ldt, k.weights, plan.ldt, FROM_ZERO);
  for (long i = 0; i < n; i++) {
    float* row = k.weights + i * plan.ldt;
    for (long j = count; j < vectors * VL; j++) row[j] = -INFINITY;
    vf highest = splat(-INFINITY);
    for (long j = 0; j < vectors; j++) highest = vmax(load(row + j * VL), highest);
    const vf part = splat(1.0f / exponentiate(row, vectors, hmax(highest)));
    for (long j = 0; j < vectors; j++) store(row + j * VL, load(row + j * VL) * part);
  }
}

// Calls part(i0, n) for up to MEMBERS members of a row at a time.
template <class Body>
SQ_INLINE void for_members(const Block& k, long r, Body part) {
  for (long i = k.first[r]; i < k.first[r + 1]; i += MEMBERS)
    part(i, k.first[r + 1] - i < MEMBERS ? k.first[r + 1] - i : MEMBERS);
}

// -- what all tasks share -------------------------------------------------------------------------------------------

struct Context {
  const SqClustered* call;
  Plan plan;
  int64_t laid;  // tasks that lay out one head's keys
  bool failed;
};

static void lay_keys(const SqClustered& p, const Plan& plan, Keys& keys, long b, long h, long from, float* memory) {
  const long left = keys.real.count - from, n = left < LAID ? left : LAID;
  if (n <= 0) return;
  float* rows = keys.rows ? keys.rows + from * plan.ldk : memory;
  fetch_ranks(p.k, b, h, keys.real.token_of, from, n, p.dim, rows, plan.ldk);
  lay_panels(rows, n, p.dim, plan.ldk, keys.panels + from * p.dim);
  fetch_ranks(p.v, b, h, keys.real.token_of, from, n, p.width, keys.values + from * plan.lde, plan.lde);
  if (keys.value_panels) lay_panels(keys.values + from * plan.lde, n, p.width, plan.lde, keys.value_panels + from * p.width);
}

// Clusters of queries first: these tasks are the long ones.
static void prepare_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqClustered& p = *x.call;
  const long clusterings = p.given ? 0 : p.batch * p.heads_q;
  long floats = LAID * x.plan.ldk;
  if (task < clusterings) query_scratch(p, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  if (task < clusterings) return cluster_queries(p, task / p.heads_q, task % p.heads_q, x.plan.queries[task / p.heads_q], memory);
  const long head = (task - clusterings) / x.laid, from = (task - clusterings) % x.laid * LAID;
  lay_keys(p, x.plan, x.plan.keys[head], head / p.heads_kv, head % p.heads_kv, from, memory);
}

// Memory of a call, clusters of its queries and keys laid out; `most`: clusters of a block.
static bool prepare(const SqClustered& p, Context& x, long most) {
  Plan& plan = x.plan;
  x.call = plan.call = &p;
  x.failed = false;
  plan.ldk = padded(p.dim, VL), plan.lde = padded(p.width, VL);
  plan.lds = padded(p.length_k, PC) + 16;
  plan.ldt = padded(p.chosen, VL);
  plan.blocks = (p.clusters + most - 1) / most;
  plan.most = (p.clusters + plan.blocks - 1) / plan.blocks;
  const long heads = p.batch * p.heads_kv, whole = padded(p.length_k, PC);
  const bool gradient = p.dout.data != nullptr;
  const long ints = (p.key_mask.data ? p.batch * p.length_k : 0) + (p.query_mask.data ? p.batch * p.length_q : 0);
  const long tables = padded((long)(heads * sizeof(Keys) + 2 * p.batch * sizeof(Ranks)) / 4 + 4, 16);
  const long per_head = whole * (p.dim + plan.lde + (gradient ? plan.ldk + p.width : 0));
  float* memory = sq_workspace(tables + padded(ints, 16) + heads * per_head);
  if (!memory) return false;
  plan.keys = (Keys*)memory;
  plan.queries = (Ranks*)(plan.keys + heads), plan.real = plan.queries + p.batch;
  int32_t* tokens = (int32_t*)(memory + tables);
  float* at = memory + tables + padded(ints, 16);
  for (long b = 0; b < p.batch; b++) {
    plan.queries[b] = real_tokens(p.query_mask, b, p.length_q, tokens);
    tokens += p.query_mask.data ? p.length_q : 0;
    const Ranks real = plan.real[b] = real_tokens(p.key_mask, b, p.length_k, tokens);
    tokens += p.key_mask.data ? p.length_k : 0;
    for (long h = 0; h < p.heads_kv; h++) {
      Keys& keys = plan.keys[b * p.heads_kv + h];
      keys = {real, at, at + whole * p.dim, nullptr, nullptr};
      at += whole * (p.dim + plan.lde);
      if (!gradient) continue;
      keys.rows = at, keys.value_panels = at + whole * plan.ldk;
      at += whole * (plan.ldk + p.width);
    }
  }
  x.laid = (p.length_k + LAID - 1) / LAID;
  sq_parallel((p.given ? 0 : p.batch * p.heads_q) + heads * x.laid, p.threads, prepare_task, &x);
  return true;
}

}  // namespace SQ_NS::clustered
