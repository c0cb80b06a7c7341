// A group of queries of one head against cluster means: log masses, the choice of clusters, and the sums over the others.
#pragma once

#include "select.h"

namespace SQ_NS::multipole {

constexpr long ROWS = 64;      // queries whose scores with means or dense keys are formed together
constexpr long GROUP = 256;    // queries that read their chosen clusters together
constexpr long COLUMNS = 512;  // dense keys whose scores are formed together
constexpr float SHARP = 3.0f;  // mean second order of a query from which it evaluates twice as many keys

// Which keys the queries of a group see: clusters of the first `chunks` chunks, and the ranks from `dense` on.
struct Sight {
  long chunks, dense;
};

// A part of every row's sum: values [GROUP][lde] and weights, relative to the row's largest exponent in this part.
struct Part {
  float* sum;
  float peak[GROUP], mass[GROUP];
};

// Queries of one head that see the same chunks, and what is computed for them.
struct Group {
  const SqMultipole* call;
  const Plan* plan;
  const Clusters* clusters;
  long b, h, first, n, most;  // batch, query head, first query, queries, the most queries
  Sight sight;
  long end[GROUP];                    // visible ranks of each query
  long ldq, lds;
  float *q, *square;                  // [GROUP][ldq] scaled queries; |q|^2
  float *scores, *other, *criterion;  // [ROWS][lds], likewise where an error is estimated; [lds]
  Part far, chosen, near;
  Selection selection[GROUP];
  Candidates list;
  float depth;
  // Chosen keys: scores query after query, each cluster padded to whole vectors; and who has chosen a column.
  float* key_scores;
  long score_at[GROUP + 1];
  long* entry_of;              // [columns + 1]: first entry of a column
  int32_t *entry_row, *entry_at;
  const float** rows;  // of a single query: rows or blocks of keys to read, and their weights
  float* weights;
};

static Sight sight_of(const SqMultipole& p, const Clusters& c, long end) {
  const long own = p.causal ? (end > 0 ? (end - 1) / p.chunk : 0) : c.chunks;
  Sight s = {own < c.chunks ? own : c.chunks, 0};
  s.dense = s.chunks * p.chunk;
  // Where every visible cluster would be chosen, its keys are dense keys.
  if (!p.forced && (p.error < 0 ? s.dense <= most_keys(p, s.dense) : p.error == 0)) s.chunks = s.dense = 0;
  return s;
}

// The most keys that a query of this call evaluates of chosen clusters; sharp ones twice as many as the others.
SQ_INLINE long chosen_keys(const SqMultipole& p, const Plan& plan, bool sharp) {
  const long keys = plan.chunks * p.chunk, most = most_keys(p, keys) * (sharp && p.exact_keys < 0 ? 2 : 1);
  return p.forced || most > keys ? keys : most;
}

// Queries whose chosen scores fit into half of a second-level cache.
SQ_INLINE long group_size(const SqMultipole& p, const Plan& plan) {
  const long chosen = chosen_keys(p, plan, false);
  const long fitting = 49152 / (chosen + chosen / 3 + 1);
  const long most = fitting >= GROUP ? GROUP : fitting <= ROWS ? ROWS : fitting / ROWS * ROWS;
  return most < p.length_q ? most : p.length_q > 0 ? p.length_q : 1;
}

static Group cut_group(const SqMultipole& p, const Plan& plan, float* memory, long* floats) {
  Group k;
  k.call = &p, k.plan = &plan;
  k.ldq = plan.ldk;
  k.lds = plan.ldc > COLUMNS ? plan.ldc : odd_lines(COLUMNS);
  k.most = group_size(p, plan);
  const long columns = plan.chunks * plan.slots, chosen = chosen_keys(p, plan, true);
  const long entries = k.most * (chosen < columns ? chosen : columns);
  Cutter take = {memory, 0};
  k.q = take(k.most * k.ldq);
  k.square = take(k.most);
  const long rows = k.most < ROWS ? k.most : ROWS;
  k.scores = take(rows * k.lds);
  k.other = p.error > 0 || p.estimate || p.dout.data ? take(rows * k.lds) : nullptr;
  k.criterion = take(k.lds);
  Part* const parts[] = {&k.far, &k.chosen, &k.near};
  for (Part* part : parts) part->sum = take(k.most * plan.lde);
  k.list = {0, take(columns + 2 * VL), take(columns + 2 * VL), (int32_t*)take(columns + 2 * VL)};
  k.entry_of = (long*)take(2 * (columns + 2));
  k.entry_row = (int32_t*)take(entries + 1);
  k.entry_at = (int32_t*)take(entries + 1);
  for (long i = 0; i < k.most; i++) {
    k.selection[i] = {};
    k.selection[i].columns = (int32_t*)take((chosen < columns ? chosen : columns) + VL);
  }
  k.key_scores = take(k.most * chosen + entries * (VL - 1) + 8 * VL);
  const long listed = (chosen > columns ? chosen : columns) + 64;
  k.rows = (const float**)take(2 * listed);
  k.weights = take(listed);
  k.depth = 4.0f;
  *floats = take.used;
  return k;
}

static void load_queries(Group& k) {
  const SqMultipole& p = *k.call;
  fetch(p.q, k.b, k.h, k.first, k.n, p.dim, k.q, k.ldq);
  for (long i = 0; i < k.n; i++) {
    vf square = zero();
    for (long d = p.dim; d < k.ldq; d++) k.q[i * k.ldq + d] = 0.0f;
    for (long d = 0; d < k.ldq; d += VL) {
      const vf x = load(k.q + i * k.ldq + d) * splat(p.scale);
      store(k.q + i * k.ldq + d, x);
      square += x * x;
    }
    k.square[i] = hsum(square);
  }
}

// The most keys that query i evaluates. Where scores spread widely inside clusters, single keys are harder to tell.
SQ_INLINE long keys_of(const Group& k, long i) {
  const SqMultipole& p = *k.call;
  const bool sharp = p.exact_keys < 0 && 0.5f * k.square[i] * k.clusters->mean_variance[k.sight.chunks] > SHARP;
  return most_keys(p, k.sight.dense) * (sharp ? 2 : 1);
}

// Second order of the log mass: min(cap, |q|^2 variance / 2).
SQ_INLINE vf second_order(const Group& k, long i, long j) {
  return vmin(splat(0.5f * k.square[i]) * load(k.clusters->variance + j), splat(k.call->cap));
}

// Expected squared error of unchosen clusters, weights P relative to the normaliser, g = mean values . output:
//   P^2 ((e^{2 t} - 1) V + ((e^{2 t} - 1) / n + t^2 / 4) |vbar - o|^2),   t the second order, V the spread of values
SQ_INLINE vf expected_error(const Group& k, long i, long j, vf weight, vf g, float norm) {
  const Clusters& c = *k.clusters;
  const vf t = second_order(k, i, j), growth = vexp(t + t) - splat(1.0f);
  const vf away = vmax(load(c.mean_square + j) - g - g + splat(norm), zero());
  const vf e = weight * weight *
      (growth * load(c.spread + j) + (growth / vmax(load(c.size + j), splat(1.0f)) + t * t * splat(0.25f)) * away);
  // Not 0 times whatever stands there: a cluster that is not visible yet may hold values that are not finite.
  return as_float((weight > zero()) & bits(e));
}

SQ_INLINE float norm_of(const float* row, long width) {
  vf sum = zero();
  for (long e = 0; e < width; e += VL) sum += load(row + e) * load(row + e);
  return hsum(sum);
}

// Log masses of query i in place of its scores, the criterion beside them; and the largest of each.
static void log_masses(Group& k, long i, float* row, long vectors, float* peak, float* top) {
  const Clusters& c = *k.clusters;
  const vf reach = splat(k.call->radius * sqrtf(k.square[i]));
  vf highest = splat(-INFINITY), best = highest;
  for (long j = 0; j < vectors * VL; j += VL) {
    const vf score = load(row + j), t = second_order(k, i, j);
    const vf mass = score + t + load(c.log_size + j);
    const vf value = score + vmax(t, reach * load(c.radius + j)) + splat(0.5f) * t + load(c.level + j);
    store(row + j, mass);
    store(k.criterion + j, value);
    highest = vmax(mass, highest);
    best = vmax(value, best);
  }
  *peak = hmax(highest);
  *top = hmax(best);
}

static void take_forced(Group& k, long i, long columns) {
  const SqMultipole& p = *k.call;
  const Clusters& c = *k.clusters;
  Selection& s = k.selection[i];
  const uint8_t* given = p.selection + ((k.b * p.heads_q + k.h) * p.length_q + k.first + i) * k.plan->chunks * k.plan->slots;
  s.count = s.keys = 0;
  for (long j = 0; j < columns; j++)
    if (given[c.slot[j]]) {
      s.columns[s.count++] = (int32_t)j;
      s.keys += c.row_at[j + 1] - c.row_at[j];
    }
}

// The clusters that bring the expected error of the queries [i0, i0 + n) down to what is asked for, where means alone
// would give the output; k.scores has log masses.
static void select_for_error(Group& k, long i0, long n, long vectors, long columns) {
  const SqMultipole& p = *k.call;
  const Clusters& c = *k.clusters;
  const long lde = k.plan->lde;
  // Single keys far above the mean of their cluster are rare: they matter to small errors only.
  const float asked = p.error > 0.01f ? 0.01f : p.error < 1e-4f ? 1e-4f : p.error;
  const float rising = p.radius / 3.0f * (1.0f + log10f(0.01f / asked));
  float* means = k.far.sum + i0 * lde;
  memcpy(k.other, k.scores, sizeof(float) * n * k.lds);
  for (long r = 0; r < n; r++) {
    float* row = k.other + r * k.lds;
    const float part = 1.0f / exponentiate(row, vectors, k.far.peak[i0 + r]);
    for (long j = 0; j < vectors * VL; j += VL) store(row + j, load(row + j) * splat(part));
  }
  times_rows(n, columns, k.other, k.lds, c.mean_value, lde, means, FROM_ZERO);
  for (long r = 0; r < n; r++) {
    const float norm = norm_of(means + r * lde, lde);
    times_panels(1, columns, p.width, means + r * lde, lde, c.mean_value_t, k.criterion, k.lds);
    vf total = zero();
    const vf reach = splat(rising * sqrtf(k.square[i0 + r]));
    for (long j = 0; j < vectors * VL; j += VL) {
      // A cluster may hold keys far above its mean: its mass may be that of a key some way towards its farthest one,
      // or, where scores spread widely, that of the largest of n such scores.
      const vf size = vmax(load(c.log_size + j), zero());
      const vf largest = splat(2.0f) * vsqrt(splat(0.5f * k.square[i0 + r]) * load(c.variance + j) * size) - size;
      const vf above = vmax(reach * load(c.radius + j), largest);
      const vf rise = vmax(above - second_order(k, i0 + r, j), zero());
      const vf weight = vmin(load(k.other + r * k.lds + j) * vexp(vmin(rise, splat(80.0f))), splat(1.0f));
      const vf e = expected_error(k, i0 + r, j, weight, load(k.criterion + j), norm);
      store(k.criterion + j, e);
      total += e;
    }
    select_by_error(c, k.criterion, hsum(total), p.error * norm, columns, keys_of(k, i0 + r), k.list, k.selection[i0 + r]);
  }
}

// Log masses of the clusters in k.scores, -inf for those that the queries [i0, i0 + n) choose, and these choices.
static void far_masses(Group& k, long i0, long n) {
  const SqMultipole& p = *k.call;
  const Clusters& c = *k.clusters;
  const long columns = c.first[k.sight.chunks], vectors = padded(columns, VL) / VL;
  for (long i = i0; i < i0 + n; i++) {
    k.far.peak[i] = -INFINITY, k.far.mass[i] = 0.0f;
    k.selection[i].count = k.selection[i].keys = 0, k.selection[i].limited = false;
  }
  if (!columns) return;
  times_panels(n, columns, p.dim, k.q + i0 * k.ldq, k.ldq, c.mean_t, k.scores, k.lds);
  for (long r = 0; r < n; r++) {
    float *row = k.scores + r * k.lds, top;
    // The last vector may reach into the clusters of a chunk that is not visible yet.
    for (long j = columns; j < vectors * VL; j++) row[j] = -INFINITY;
    log_masses(k, i0 + r, row, vectors, &k.far.peak[i0 + r], &top);
    if (p.forced) take_forced(k, i0 + r, columns);
    else if (p.error < 0)
      select_by_keys(c, k.criterion, top, columns, keys_of(k, i0 + r), k.list, k.depth, k.selection[i0 + r]);
  }
  if (!p.forced && p.error > 0) select_for_error(k, i0, n, vectors, columns);
  for (long r = 0; r < n; r++) {
    float* row = k.scores + r * k.lds;
    const Selection& s = k.selection[i0 + r];
    for (long j = 0; j < s.count; j++) row[s.columns[j]] = -INFINITY;
  }
}

// Choices, and the sums over the clusters that are not chosen.
static void far_part(Group& k, long i0, long n) {
  const Clusters& c = *k.clusters;
  const long columns = c.first[k.sight.chunks], vectors = padded(columns, VL) / VL, lde = k.plan->lde;
  far_masses(k, i0, n);
  if (!columns) return;
  for (long r = 0; r < n; r++) {
    const float peak = k.far.peak[i0 + r];
    k.far.mass[i0 + r] = exponentiate(k.scores + r * k.lds, vectors, peak > -INFINITY ? peak : 0.0f);
  }
  times_rows(n, columns, k.scores, k.lds, c.mean_value, lde, k.far.sum + i0 * lde, FROM_ZERO);
}

}  // namespace SQ_NS::multipole
