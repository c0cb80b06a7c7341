// Constant memory: a full tail joins the clusters of everything before it, and the closest clusters are merged.
//
//   cost(a, b) = n_a n_b / (n_a + n_b) |mu_a - mu_b|^2        Ward's criterion
//
// In rounds: pairs that are each other's nearest are merged, the cheapest first, until there are few enough. Between rounds
// only what a merge has changed is computed again, so a border costs about one product of all clusters with each other.
#pragma once

#include "step.h"

namespace SQ_NS::multipole {

constexpr float LARGE = 1e38f;  // costs are at most this: what is not a number still has to go somewhere
constexpr long SIDE = 2 * PC;  // clusters whose distances are formed together: fewer sums would wait for each other
constexpr float SAME = 1e-6f;   // means whose distance is a smaller part of their squares are the same

struct Pool {
  long n, dim, ldk;
  float* mean;             // [n][ldk], without what is common to all
  float *mean_t, *middle;  // the same in panels; what is common
  float *square, *size;    // |mean|^2; 0 = gone
  float *cost, *value;     // of one cluster with all others; of each with its nearest
  int32_t *near, *into;    // its nearest; where it went, or itself
  int32_t* pairs;
  uint8_t* changed;
};

static Pool cut_pool(long n, long dim, float* memory, long* floats) {
  Pool x;
  Cutter take = {memory, 0};
  x.n = n, x.dim = dim, x.ldk = padded(dim, VL);
  const long whole = padded(n, SIDE);
  x.mean = take(n * x.ldk);
  x.mean_t = take(whole * dim);
  x.middle = take(x.ldk);
  float** const arrays[] = {&x.square, &x.size, &x.cost, &x.value};
  for (float** a : arrays) *a = take(whole);
  int32_t** const numbers[] = {&x.near, &x.into, &x.pairs};
  for (int32_t** a : numbers) *a = (int32_t*)take(n);
  x.changed = (uint8_t*)take(n);
  *floats = take.used;
  return x;
}

static void place_mean(Pool& x, long i) {
  const float* mean = x.mean + i * x.ldk;
  x.square[i] = norm_of(mean, x.ldk);
  for (long d = 0; d < x.dim; d++) *panel_entry(x.mean_t, x.dim, d, i) = mean[d];
}

// Costs of cluster i with all others, and its nearest: the first of equals.
static void find_nearest(Pool& x, long i) {
  const float* mean = x.mean + i * x.ldk;
  const vf size = splat(x.size[i]), square = splat(x.square[i]);
  constexpr int N = SIDE / VL;
  for (long j = 0; j < x.n; j += SIDE) {
    const float* panel = x.mean_t + j * x.dim;
    vf away[N];
    SQ_UNROLL for (int v = 0; v < N; v++) away[v] = zero();
    for (long d = 0; d < x.dim; d++) SQ_UNROLL for (int v = 0; v < N; v++) {
      const vf a = splat(mean[d]) - load(panel + (v / NV * x.dim + d) * PC + v % NV * VL);
      away[v] += a * a;
    }
    for (int v = 0; v < N; v++) {
      const long at = j + v * VL;
      const vf other = load(x.size + at);
      const vf same = splat(SAME) * (square + load(x.square + at));
      const vf distance = as_float(~(away[v] <= same) & bits(away[v]));
      vf cost = distance * (size * other) / (size + other);
      cost = cost < splat(LARGE) ? cost : splat(LARGE);  // also where it is not a number
      store(x.cost + at, other > zero() ? cost : splat(INFINITY));
    }
  }
  x.cost[i] = INFINITY;
  vf least = splat(INFINITY);
  for (long j = 0; j < x.n; j += VL) least = vmin(load(x.cost + j), least);
  float best = least[0];
  for (int v = 1; v < VL; v++) best = least[v] < best ? least[v] : best;
  long first = 0;
  if (best < INFINITY)
    while (x.cost[first] != best) first++;
  x.value[i] = best, x.near[i] = (int32_t)first;
}

// a takes b in.
static void merge_pair(Pool& x, long a, long b) {
  const vf share = splat(x.size[b] / (x.size[a] + x.size[b]));
  float *one = x.mean + a * x.ldk, *other = x.mean + b * x.ldk;
  for (long d = 0; d < x.ldk; d += VL) store(one + d, load(one + d) + share * (load(other + d) - load(one + d)));
  x.size[a] += x.size[b];
  x.size[b] = 0.0f;
  x.into[b] = (int32_t)a;
  place_mean(x, a);
}

// Pairs of each other's nearest, cheapest first and of equals the first; returns their number.
static long list_pairs(Pool& x) {
  long pairs = 0;
  for (long i = 0; i < x.n; i++) {
    const long other = x.near[i];
    if (!(x.size[i] > 0.0f) || !(x.value[i] < INFINITY) || x.near[other] != i || i > other) continue;
    long at = pairs++;
    for (; at > 0 && x.value[x.pairs[at - 1]] > x.value[i]; at--) x.pairs[at] = x.pairs[at - 1];
    x.pairs[at] = (int32_t)i;
  }
  return pairs;
}

// Merges until `limit` clusters are left.
static void merge_closest(Pool& x, long limit) {
  long excess = -limit;
  for (long i = 0; i < x.n; i++) x.into[i] = (int32_t)i, excess += x.size[i] > 0.0f;
  if (excess <= 0) return;
  for (long i = 0; i < x.n; i++)
    if (x.size[i] > 0.0f) find_nearest(x, i);
  while (excess > 0) {
    long pairs = list_pairs(x);
    pairs = pairs < excess ? pairs : excess;
    excess -= pairs;
    if (!excess) {
      for (long i = 0; i < pairs; i++) merge_pair(x, x.pairs[i], x.near[x.pairs[i]]);
      return;
    }
    memset(x.changed, 0, (size_t)x.n);
    for (long i = 0; i < pairs; i++) {
      const long a = x.pairs[i], b = x.near[a];
      x.changed[a] = x.changed[b] = 1;
      merge_pair(x, a, b);
    }
    // Whose nearest has changed looks at all again, later; the others only at what was merged.
    for (long i = 0; i < x.n; i++) x.near[i] = x.size[i] > 0.0f && !x.changed[i] && x.changed[x.near[i]] ? -1 : x.near[i];
    for (long i = 0; i < pairs; i++) {
      const long a = x.pairs[i];
      find_nearest(x, a);
      for (long j = 0; j < x.n; j++) {
        if (!(x.size[j] > 0.0f) || x.changed[j] || x.near[j] < 0) continue;
        if (x.cost[j] < x.value[j] || (x.cost[j] == x.value[j] && a < x.near[j])) x.value[j] = x.cost[j], x.near[j] = (int32_t)a;
      }
    }
    for (long i = 0; i < x.n; i++)
      if (x.size[i] > 0.0f && x.near[i] < 0) find_nearest(x, i);
  }
}

// Clusters, or single keys: then there are neither sizes (1) nor variances (0). Means and values are rows.
struct Parts {
  float *size, *mean, *variance, *mean_value;
  long dim, width, ldm, ldv;
};

SQ_INLINE Parts parts_of(const SqFar& x, const SqMultipole& p, long first) {
  return {x.size + first,  x.mean + first * p.dim, x.variance + first, x.mean_value + first * p.width, p.dim, p.width, p.dim,
          p.width};
}

// The m clusters that n parts make, part i in cluster owner[i] (negative: in none): sizes, means and variances combined exactly.
static void combine(const Parts& x, long n, const int32_t* owner, const Parts& to, long m) {
  memset(to.size, 0, sizeof(float) * m);
  memset(to.variance, 0, sizeof(float) * m);
  memset(to.mean, 0, sizeof(float) * m * to.ldm);
  memset(to.mean_value, 0, sizeof(float) * m * to.ldv);
  for (long i = 0; i < n; i++)
    if (owner[i] >= 0) to.size[owner[i]] += x.size ? x.size[i] : 1.0f;
  auto for_parts = [&](auto body) {
    for (long i = 0; i < n; i++) {
      const float size = x.size ? x.size[i] : 1.0f;
      if (owner[i] >= 0 && size > 0.0f) body(i, (long)owner[i], size / to.size[owner[i]]);
    }
  };
  for_parts([&](long i, long j, float share) {
    for (long d = 0; d < x.dim; d++) to.mean[j * to.ldm + d] += share * x.mean[i * x.ldm + d];
    for (long e = 0; e < x.width; e++) to.mean_value[j * to.ldv + e] += share * x.mean_value[i * x.ldv + e];
  });
  for_parts([&](long i, long j, float share) {
    float away = 0.0f;
    for (long d = 0; d < x.dim; d++) {
      const float by = x.mean[i * x.ldm + d] - to.mean[j * to.ldm + d];
      away += by * by;
    }
    to.variance[j] += share * ((x.variance ? x.variance[i] : 0.0f) + away / (float)x.dim);
  });
}

static void copy_parts(const Parts& from, const Parts& to, long n) {
  memcpy(to.size, from.size, sizeof(float) * n);
  memcpy(to.variance, from.variance, sizeof(float) * n);
  memcpy(to.mean, from.mean, sizeof(float) * n * to.ldm);
  memcpy(to.mean_value, from.mean_value, sizeof(float) * n * to.ldv);
}

// Where each of the parts goes, of which `limit` are left.
static void merge_parts(const Parts& parts, long n, long limit, Pool& x, int32_t* owner) {
  float total = 0.0f;
  for (long i = 0; i < n; i++) total += parts.size[i];
  memset(x.mean, 0, sizeof(float) * n * x.ldk);
  memset(x.size, 0, sizeof(float) * padded(n, SIDE));
  memset(x.square, 0, sizeof(float) * padded(n, SIDE));
  memset(x.mean_t, 0, sizeof(float) * padded(n, SIDE) * x.dim);
  memset(x.middle, 0, sizeof(float) * x.ldk);
  for (long i = 0; i < n; i++)
    for (long d = 0; d < x.dim && parts.size[i] > 0.0f; d++) x.middle[d] += parts.size[i] / total * parts.mean[i * parts.ldm + d];
  for (long i = 0; i < n; i++) {
    for (long d = 0; d < x.dim; d++) x.mean[i * x.ldk + d] = parts.mean[i * parts.ldm + d] - x.middle[d];
    x.size[i] = parts.size[i];
    place_mean(x, i);
  }
  merge_closest(x, limit);
  int32_t slot = 0;
  for (long i = 0; i < n; i++) owner[i] = x.size[i] > 0.0f ? slot++ : -1;
  for (long i = 0; i < n; i++) {
    long at = i;
    while (x.into[at] != at) at = x.into[at];
    owner[i] = owner[at];
  }
}

// The statistics of a page whose clusters are those of a key head. It has no keys: none of them may be chosen.
static void lay_clusters(const SqConstant& s, long head) {
  const SqMultipole& p = s.pages.call;
  const long n = s.sinks + s.limit, lde = padded(p.width, VL);
  const Parts far = parts_of(s.after, p, head * n);
  Clusters c;
  cut_statistics(s.pages, s.pages.statistics + head * statistics_floats(&s.pages), &c);
  c.first[0] = 0, c.first[1] = n;
  for (long j = 0; j < n; j++) {
    for (long d = 0; d < p.dim; d++) *panel_entry(c.mean_t, p.dim, d, j) = far.mean[j * p.dim + d];
    memcpy(c.mean_value + j * lde, far.mean_value + j * p.width, sizeof(float) * p.width);
    c.mean_square[j] = norm_of(c.mean_value + j * lde, lde);
    c.log_size[j] = far.size[j] > 0.0f ? logf(far.size[j]) : -INFINITY;
    c.variance[j] = far.variance[j], c.size[j] = far.size[j];
  }
}

static int summarise(const SqConstant* s) {
  for (long head = 0; head < s->pages.call.batch * s->pages.call.heads_kv; head++) lay_clusters(*s, head);
  return SQ_OK;
}

struct Absorption {
  const SqConstant* call;
  Steps steps;
};

static void absorb_task(void* context, int64_t task, int64_t) {
  Absorption& x = *(Absorption*)context;
  const SqConstant& s = *x.call;
  const long heads = x.steps.call.heads_kv, job = task / heads, h = task % heads, b = s.pages.rows[job], head = b * heads + h;
  const long pool = s.limit + s.clusters, slots = s.sinks + s.limit;
  SqMultipole p = chunk_call(x.steps, job, b, 0);
  p.clusters = s.clusters;
  Plan plan = x.steps.plan;
  plan.chunks = 1;
  plan.slots = s.clusters + 1;  // no cluster is cut
  const long chunk = p.chunk;
  long scratch, floats;
  chunk_scratch(p, nullptr, &scratch);
  cut_pool(pool, p.dim, nullptr, &floats);
  floats = floats > scratch ? floats : scratch;  // one after the other
  const long widths[] = {floats, chunk, plan.slots, chunk + pool, pool, pool, pool * p.dim, pool * p.width};
  long used = 0;
  for (long n : widths) used += padded(n, 16);
  float* at = sq_scratch(used);
  if (!at) return (void)(x.steps.failed = true);
  float* memory[8];
  for (int i = 0; i < 8; at += padded(widths[i], 16), i++) memory[i] = at;

  // Clusters of the chunk; the first keys of a sequence are clusters of their own.
  int32_t *order = (int32_t*)memory[1], *sizes = (int32_t*)memory[2], *owner = (int32_t*)memory[3];
  p.order = order - h * chunk, p.sizes = sizes - h * plan.slots;
  cluster_chunk(p, plan, 0, h, 0, nullptr, memory[0]);
  for (long c = 0, i = 0; c < s.clusters; i += sizes[c++])
    for (long j = i; j < i + sizes[c]; j++) owner[order[j]] = (int32_t)c;
  const Parts keys = {nullptr, s.pages.tail_keys + head * x.steps.tail_keys, nullptr,
                      s.pages.tail_values + head * x.steps.tail_values, p.dim, p.width, plan.ldk, plan.lde};
  const Parts before = parts_of(s.before, p, head * slots), after = parts_of(s.after, p, head * slots);
  if (s.pages.pages[b]) {
    copy_parts(before, after, s.sinks);
  } else {
    for (long i = 0; i < s.sinks; i++) owner[i] = -1, owner[chunk + i] = (int32_t)i;
    combine(keys, s.sinks, owner + chunk, after, s.sinks);
  }
  const Parts parts = {memory[4], memory[6], memory[5], memory[7], p.dim, p.width, p.dim, p.width};
  copy_parts(parts_of(s.before, p, head * slots + s.sinks), parts, s.limit);
  const Parts made = {parts.size + s.limit, parts.mean + s.limit * p.dim, parts.variance + s.limit,
                      parts.mean_value + s.limit * p.width, p.dim, p.width, p.dim, p.width};
  combine(keys, chunk, owner, made, s.clusters);
  long ignored;
  Pool all = cut_pool(pool, p.dim, memory[0], &ignored);
  merge_parts(parts, pool, s.limit, all, owner + chunk);
  combine(parts, pool, owner + chunk, parts_of(s.after, p, head * slots + s.sinks), s.limit);
  lay_clusters(s, head);
}

static int absorb(const SqConstant* s) {
  Absorption x;
  x.call = s;
  plan_steps(s->pages, x.steps);
  sq_parallel(s->pages.jobs * x.steps.call.heads_kv, x.steps.call.threads, absorb_task, &x);
  return x.steps.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::multipole
