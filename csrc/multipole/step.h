// Multipole attention over pages: one step costs the clusters of all pages, the chosen keys and the tail.
//
//   step     new keys to the end of the tail; every query against the clusters of all pages, chosen clusters, and the tail
//   cluster  k-means of full tails
//   page     a full tail packed by cluster into memory of its own, its statistics behind those of the pages before it
//   grow     statistics copied to where there is room for more pages
//
// Nothing that an earlier state sees is written again: columns, lanes and rows are only added behind the last ones.
#pragma once

#include "forward.h"

namespace SQ_NS::multipole {

// Pages lie anywhere in memory: places in them are counted from here.
static float* const ORIGIN = (float*)64;
SQ_INLINE long place_of(const float* at) { return ((intptr_t)at - (intptr_t)ORIGIN) / (long)sizeof(float); }

// The statistics of one key head.
static long cut_statistics(const SqMultipolePages& s, float* memory, Clusters* to) {
  const SqMultipole& p = s.call;
  const long most = s.capacity * (p.clusters + p.chunk / p.largest);
  Cutter take = {memory, 0};
  Clusters c = cut_columns(p, take, s.capacity, most, padded(most, PC), p.error >= 0);
  c.value_at = (long*)take(2 * most);
  if (to) *to = c;
  return take.used;
}

static int64_t statistics_floats(const SqMultipolePages* s) { return cut_statistics(*s, nullptr, nullptr); }

struct Steps {
  const SqMultipolePages* pages;
  SqMultipole call;
  Plan plan;
  long statistics, tail_keys, tail_panels, tail_values;  // floats of one key head
  int64_t pieces;
  bool failed;
};

static void plan_steps(const SqMultipolePages& s, Steps& x) {
  x.pages = &s;
  x.call = s.call;
  x.failed = false;
  SqMultipole& p = x.call;
  Plan& plan = x.plan;
  plan = {};
  plan.call = &p;
  for (long b = 0; b < p.batch; b++) plan.chunks = s.pages[b] > plan.chunks ? s.pages[b] : plan.chunks;
  plan.slots = p.clusters + p.chunk / p.largest;
  plan.ldc = odd_lines(plan.chunks * plan.slots);
  plan.ldb = s.tail_capacity;
  plan.ldk = padded(p.dim, VL);
  plan.lde = padded(p.width, VL);
  x.statistics = statistics_floats(&s);
  x.tail_keys = s.tail_capacity * plan.ldk;
  x.tail_panels = padded(s.tail_capacity, PC) * p.dim;
  x.tail_values = s.tail_capacity * plan.lde;
  if (p.error == 0) p.error = -1.0f, p.exact_keys = INT64_MAX / 4;  // every cluster is chosen
}

// What a key head of a row has: its pages, and its tail as the dense keys after them.
static Clusters clusters_of(const Steps& x, long head) {
  const SqMultipolePages& s = *x.pages;
  const long b = head / x.call.heads_kv, pages = s.pages[b];
  Clusters c;
  cut_statistics(s, s.statistics + head * x.statistics, &c);
  c.chunks = pages;
  c.columns = c.first[pages];
  c.panels = c.values = ORIGIN;
  c.keys_by_rank = s.tail_panels + head * x.tail_panels - pages * x.plan.ldb * x.call.dim;
  c.values_by_rank = s.tail_values + head * x.tail_values - pages * x.call.chunk * x.plan.lde;
  return c;
}

SQ_INLINE bool real_token(const SqMultipole& p, long b, long t) {
  return !p.key_mask || p.key_mask[b * p.mask_batch + t * p.mask_token];
}

static void append_task(void* context, int64_t head, int64_t) {
  Steps& x = *(Steps*)context;
  const SqMultipolePages& s = *x.pages;
  const SqMultipole& p = x.call;
  const long b = head / p.heads_kv, h = head % p.heads_kv, ldk = x.plan.ldk, lde = x.plan.lde;
  float *keys = s.tail_keys + head * x.tail_keys, *values = s.tail_values + head * x.tail_values;
  float* panels = s.tail_panels + head * x.tail_panels;
  long at = s.held[b];
  for (long t = 0; t < p.length_k; t++) {
    if (!real_token(p, b, t)) continue;
    float *key = keys + at * ldk, *value = values + at * lde;
    fetch_ranks(p.k, b, h, nullptr, t, 1, p.dim, key, ldk);
    fetch_ranks(p.v, b, h, nullptr, t, 1, p.width, value, lde);
    for (long d = 0; d < p.dim; d++) *panel_entry(panels, p.dim, d, at) = key[d];
    at++;
  }
}

static void step_task(void* context, int64_t task, int64_t) {
  Steps& x = *(Steps*)context;
  const SqMultipolePages& s = *x.pages;
  const SqMultipole& p = x.call;
  const long piece = task % x.pieces, head = task / x.pieces;
  long floats;
  cut_group(p, x.plan, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  Group k = cut_group(p, x.plan, memory, &floats);
  k.b = head / p.heads_q, k.h = head % p.heads_q;
  const Clusters c = clusters_of(x, k.b * p.heads_kv + k.h / (p.heads_q / p.heads_kv));
  k.clusters = &c;
  k.sight = {c.chunks, c.chunks * p.chunk};
  const long from = piece * GROUP, to = from + GROUP < p.length_q ? from + GROUP : p.length_q;
  long end = k.sight.dense + s.held[k.b];
  for (long t = 0; t < (p.causal ? from : p.length_k); t++) end += real_token(p, k.b, t);
  k.n = 0;
  for (long i = from; i < to; i++) {
    if (!k.n) k.first = i;
    if (p.causal) end += real_token(p, k.b, i);
    k.end[k.n++] = end;
    if (k.n < k.most && i + 1 < to) continue;
    attend_group(k);
    k.n = 0;
  }
}

static int step(const SqMultipolePages* s) {
  Steps x;
  plan_steps(*s, x);
  const SqMultipole& p = x.call;
  const long heads = p.batch * p.heads_kv;
  if (p.length_k) sq_parallel(heads, p.length_k * heads > 128 ? p.threads : 1, append_task, &x);
  x.pieces = (p.length_q + GROUP - 1) / GROUP;
  if (p.length_q) sq_parallel(p.batch * p.heads_q * x.pieces, p.threads, step_task, &x);
  return x.failed ? SQ_NO_MEMORY : SQ_OK;
}

// The call for one chunk, the `page`-th of row b, whose keys are a full tail.
static SqMultipole chunk_call(const Steps& x, long job, long b, long page) {
  const SqMultipolePages& s = *x.pages;
  SqMultipole p = x.call;
  const long ldk = x.plan.ldk;
  p.length_k = p.chunk;
  p.k.data = s.tail_keys + b * p.heads_kv * x.tail_keys - page * p.chunk * ldk;
  p.k.stride[0] = 0, p.k.stride[1] = x.tail_keys, p.k.stride[2] = ldk, p.k.stride[3] = 1;
  p.k.dtype = SQ_FLOAT32;
  p.order += (job * p.heads_kv - page) * p.chunk;
  p.sizes += (job * p.heads_kv - page) * x.plan.slots;
  return p;
}

static void cluster_task(void* context, int64_t task, int64_t) {
  Steps& x = *(Steps*)context;
  const long job = task / x.call.heads_kv, h = task % x.call.heads_kv;
  SqMultipole p = chunk_call(x, job, x.pages->rows[job], 0);
  Plan plan = x.plan;
  plan.chunks = 1;
  long floats;
  chunk_scratch(p, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  cluster_chunk(p, plan, 0, h, 0, nullptr, memory);
}

static int cluster(const SqMultipolePages* s) {
  Steps x;
  plan_steps(*s, x);
  sq_parallel(s->jobs * x.call.heads_kv, x.call.threads, cluster_task, &x);
  return x.failed ? SQ_NO_MEMORY : SQ_OK;
}

static void page_task(void* context, int64_t task, int64_t) {
  Steps& x = *(Steps*)context;
  const SqMultipolePages& s = *x.pages;
  const long heads = x.call.heads_kv, job = task / heads, h = task % heads, b = s.rows[job], page = s.pages[b];
  SqMultipole p = chunk_call(x, job, b, page);
  Plan plan = x.plan;
  plan.chunks = 1;
  Clusters c = clusters_of(x, b * heads + h);
  float *panels = s.memory[task], *values = panels + s.values[task];
  long column = c.columns, panel = place_of(panels), value = place_of(values);
  int32_t row = c.row_at[column];
  const int32_t* sizes = p.sizes + (h + page) * plan.slots;
  for (long slot = 0; slot < plan.slots; slot++) {
    if (!sizes[slot]) continue;
    c.panel_at[column] = panel, c.value_at[column] = value;
    panel += padded(sizes[slot], VL) * p.dim;
    value += sizes[slot] * plan.lde;
    c.row_at[++column] = row += sizes[slot];
  }
  c.first[page + 1] = column;
  c.values = values - page * p.chunk * plan.lde;
  float* memory = sq_scratch(padded(p.chunk * plan.ldk, 16) + (padded(p.largest, VL) + 1) * plan.ldk);
  if (!memory) return (void)(x.failed = true);
  pack_chunk(p, plan, c, 0, h, page, nullptr, memory);
  extend_mean_variance(c, page);
}

static int page(const SqMultipolePages* s) {
  Steps x;
  plan_steps(*s, x);
  sq_parallel(s->jobs * x.call.heads_kv, x.call.threads, page_task, &x);
  return x.failed ? SQ_NO_MEMORY : SQ_OK;
}

static int grow(const SqMultipolePages* from, const SqMultipolePages* to) {
  const SqMultipole& p = from->call;
  const long lde = padded(p.width, VL), one = statistics_floats(from), other = statistics_floats(to);
  for (long head = 0; head < p.batch * p.heads_kv; head++) {
    Clusters a, b;
    cut_statistics(*from, from->statistics + head * one, &a);
    cut_statistics(*to, to->statistics + head * other, &b);
    const long pages = from->pages[head / p.heads_kv], n = a.first[pages], whole = padded(n, PC);
    auto copy = [](void* x, const void* y, long bytes) { memcpy(x, y, (size_t)bytes); };
    copy(b.first, a.first, sizeof(long) * (pages + 1));
    copy(b.panel_at, a.panel_at, sizeof(long) * n);
    copy(b.value_at, a.value_at, sizeof(long) * n);
    copy(b.row_at, a.row_at, sizeof(int32_t) * (n + 1));
    copy(b.slot, a.slot, sizeof(int32_t) * n);
    copy(b.mean_variance, a.mean_variance, sizeof(float) * (pages + 1));
    copy(b.mean_t, a.mean_t, sizeof(float) * whole * p.dim);
    float *const old[] = {a.log_size, a.variance, a.radius, a.level, a.spread, a.mean_square, a.size};
    float *const made[] = {b.log_size, b.variance, b.radius, b.level, b.spread, b.mean_square, b.size};
    for (int i = 0; i < 7; i++) copy(made[i], old[i], sizeof(float) * n);
    copy(b.mean_value, a.mean_value, sizeof(float) * n * lde);
    if (p.error >= 0) copy(b.mean_value_t, a.mean_value_t, sizeof(float) * whole * p.width);
  }
  return SQ_OK;
}

}  // namespace SQ_NS::multipole
