// Multipole attention, forward: blocks of queries against cluster means, chosen clusters key by key, and dense keys.
//
//   score     S = Q mu^T, log masses l and the criterion of selection; the clusters a query evaluates exactly
//   far       weights e^{l - max} of the other clusters, times their mean values
//   chosen    keys of the chosen clusters, one query at a time
//   dense     keys in no complete chunk and, when causal, the query's own chunk
//
// Each part is a sum relative to its own largest exponent; they are joined at the end under one normaliser.
#pragma once

#include "../exp.h"
#include "select.h"

namespace SQ_NS::multipole {

constexpr long ROWS = 64;      // queries whose scores with means or dense keys are formed together
constexpr long GROUP = 256;    // queries that read their chosen clusters together
constexpr long COLUMNS = 512;  // dense keys whose scores are formed together

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
};

static Sight sight_of(const SqMultipole& p, const Clusters& c, long end) {
  const long own = p.causal ? (end > 0 ? (end - 1) / p.chunk : 0) : c.chunks;
  Sight s = {own < c.chunks ? own : c.chunks, 0};
  s.dense = s.chunks * p.chunk;
  // Where every visible cluster would be chosen, its keys are dense keys.
  if (!p.forced && (p.error < 0 ? s.dense <= most_keys(p, s.dense) : p.error == 0)) s.chunks = s.dense = 0;
  return s;
}

// The most keys that a query of this call evaluates of chosen clusters.
SQ_INLINE long chosen_keys(const SqMultipole& p, const Plan& plan) {
  const long keys = plan.chunks * p.chunk, most = most_keys(p, keys);
  return most < keys ? most : keys;
}

// Queries whose chosen scores fit into half of a second-level cache.
SQ_INLINE long group_size(const SqMultipole& p, const Plan& plan) {
  const long chosen = chosen_keys(p, plan);
  const long fitting = 49152 / (chosen + chosen / 3 + 1);
  return fitting >= GROUP ? GROUP : fitting <= ROWS ? ROWS : fitting / ROWS * ROWS;
}

static Group cut_group(const SqMultipole& p, const Plan& plan, float* memory, long* floats) {
  Group k;
  k.call = &p, k.plan = &plan;
  k.ldq = plan.ldk;
  k.lds = plan.ldc > COLUMNS ? plan.ldc : odd_lines(COLUMNS);
  k.most = group_size(p, plan);
  const long columns = plan.chunks * plan.slots, chosen = chosen_keys(p, plan);
  const long entries = k.most * (chosen < columns ? chosen : columns);
  long used = 0;
  auto take = [&](long n) {
    float* at = memory ? memory + used : nullptr;
    used += padded(n, 16);
    return at;
  };
  k.q = take(k.most * k.ldq);
  k.square = take(k.most);
  k.scores = take(ROWS * k.lds);
  k.other = p.error > 0 || p.estimate || p.dout.data ? take(ROWS * k.lds) : nullptr;
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
  k.key_scores = take(k.most * chosen + entries * (VL - 1) + VL);
  k.depth = 4.0f;
  *floats = used;
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

SQ_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

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
  return weight * weight *
         (growth * load(c.spread + j) + (growth / vmax(load(c.size + j), splat(1.0f)) + t * t * splat(0.25f)) * away);
}

SQ_INLINE float norm_of(const float* row, long width) {
  vf sum = zero();
  for (long e = 0; e < width; e += VL) sum += load(row + e) * load(row + e);
  return hsum(sum);
}

// Weights relative to the row's largest log mass, in place; returns their sum.
static float exponentiate(float* row, long vectors, float peak) {
  vf total = zero();
  const vf shift = splat(peak);
  long j = 0;
  for (; j + 4 <= vectors; j += 4) {
    vf x[4];
    SQ_UNROLL for (int u = 0; u < 4; u++) x[u] = load(row + (j + u) * VL) - shift;
    vexp_all<4>(x);
    SQ_UNROLL for (int u = 0; u < 4; u++) {
      store(row + (j + u) * VL, x[u]);
      total += x[u];
    }
  }
  for (; j < vectors; j++) {
    const vf x = vexp(load(row + j * VL) - shift);
    store(row + j * VL, x);
    total += x;
  }
  return hsum(total);
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
    const vf reach = splat(p.radius / 3.0f * sqrtf(k.square[i0 + r]));
    for (long j = 0; j < vectors * VL; j += VL) {
      // A cluster may hold keys far above its mean: its mass may be that of a key some way towards its farthest one.
      const vf rise = vmax(reach * load(c.radius + j) - second_order(k, i0 + r, j), zero());
      const vf weight = vmin(load(k.other + r * k.lds + j) * vexp(vmin(rise, splat(80.0f))), splat(1.0f));
      const vf e = expected_error(k, i0 + r, j, weight, load(k.criterion + j), norm);
      store(k.criterion + j, e);
      total += e;
    }
    select_by_error(c, k.criterion, hsum(total), p.error * norm, columns, most_keys(p, k.sight.dense), k.list, k.selection[i0 + r]);
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
      select_by_keys(c, k.criterion, top, columns, most_keys(p, k.sight.dense), k.list, k.depth, k.selection[i0 + r]);
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

// -- chosen clusters, each for all queries of the group that have chosen it: its keys are read from memory once ------

SQ_INLINE long size_of(const Clusters& c, long column) { return c.row_at[column + 1] - c.row_at[column]; }

// Who has chosen each column, and where the scores go.
static void list_choices(Group& k) {
  const Clusters& c = *k.clusters;
  const long columns = c.first[k.sight.chunks];
  memset(k.entry_of, 0, sizeof(long) * (columns + 2));
  for (long i = 0; i < k.n; i++)
    for (long j = 0; j < k.selection[i].count; j++) k.entry_of[k.selection[i].columns[j] + 2]++;
  for (long j = 2; j < columns + 2; j++) k.entry_of[j] += k.entry_of[j - 1];
  long at = 0;
  for (long i = 0; i < k.n; i++) {
    k.score_at[i] = at;
    for (long j = 0; j < k.selection[i].count; j++) {
      const long column = k.selection[i].columns[j], entry = k.entry_of[column + 1]++;
      k.entry_row[entry] = (int32_t)i;
      k.entry_at[entry] = (int32_t)at;
      at += padded(size_of(c, column), VL);
    }
  }
  k.score_at[k.n] = at;
}

// Scores of R queries with N times VL keys of one cluster.
template <int R, int N>
SQ_INLINE void key_tile(const float* const* q, const float* panel, long dim, float* const* to, long at, const vf* last) {
  vf s[R][N];
  SQ_UNROLL for (int i = 0; i < R; i++) SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] = zero();
  for (long d = 0; d < dim; d++) {
    vf b[N];
    SQ_UNROLL for (int j = 0; j < N; j++) b[j] = load(panel + (j * dim + d) * VL);
    SQ_UNROLL for (int i = 0; i < R; i++) {
      const vf a = splat(q[i][d]);
      SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] += a * b[j];
    }
  }
  SQ_UNROLL for (int i = 0; i < R; i++) {
    if (last) s[i][N - 1] += *last;
    SQ_UNROLL for (int j = 0; j < N; j++) store(to[i] + at + j * VL, s[i][j]);
  }
}

template <int R>
static void key_rows(const float* const* q, const float* panel, long dim, float* const* to, long vectors, vf last) {
  long v = 0;
  for (; v + 2 <= vectors; v += 2) key_tile<R, 2>(q, panel + v * dim * VL, dim, to, v * VL, v + 2 == vectors ? &last : nullptr);
  if (v < vectors) key_tile<R, 1>(q, panel + v * dim * VL, dim, to, v * VL, &last);
}

// 0 for the first n lanes, -inf for the others.
SQ_INLINE vf open_lanes(long n) {
  float lane[VL];
  for (int i = 0; i < VL; i++) lane[i] = i < n ? 0.0f : -INFINITY;
  return load(lane);
}

// Products of rows (queries, or gradients of outputs) with the keys (values) of chosen clusters.
static void chosen_products(const Group& k, const float* rows_of, long ld, const float* panels, long dim, float* scores) {
  const Clusters& c = *k.clusters;
  const long key_dim = k.call->dim;
  for (long column = 0; column < c.first[k.sight.chunks]; column++) {
    const long size = size_of(c, column), vectors = padded(size, VL) / VL;
    const float* panel = panels + c.panel_at[column] / key_dim * dim;
    const vf last = open_lanes(size - (vectors - 1) * VL);
    for (long e = k.entry_of[column], end = k.entry_of[column + 1]; e < end;) {
      const float* q[MR];
      float* to[MR];
      const int rows = (int)(end - e < MR ? end - e : MR);
      for (int i = 0; i < rows; i++, e++) q[i] = rows_of + k.entry_row[e] * ld, to[i] = scores + k.entry_at[e];
      switch (rows) {
        case 1: key_rows<1>(q, panel, dim, to, vectors, last); break;
        case 2: key_rows<2>(q, panel, dim, to, vectors, last); break;
        case 3: key_rows<3>(q, panel, dim, to, vectors, last); break;
        case 4: key_rows<4>(q, panel, dim, to, vectors, last); break;
        case 5: key_rows<5>(q, panel, dim, to, vectors, last); break;
        default:
          key_rows<6>(q, panel, dim, to, vectors, last);
          if (rows > 6) e -= rows - 6;
      }
    }
  }
}

// sum_i += weights of query i times n rows, for R queries and N vectors of columns.
template <int R, int N>
SQ_INLINE void value_tile(const float* const* weight, const float* rows, long n, long ld, float* const* sum, long at) {
  vf s[R][N];
  SQ_UNROLL for (int i = 0; i < R; i++) SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] = load(sum[i] + at + j * VL);
  rows += at;
  for (long t = 0; t < n; t++, rows += ld) {
    vf b[N];
    SQ_UNROLL for (int j = 0; j < N; j++) b[j] = load(rows + j * VL);
    SQ_UNROLL for (int i = 0; i < R; i++) {
      const vf a = splat(weight[i][t]);
      SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] += a * b[j];
    }
  }
  SQ_UNROLL for (int i = 0; i < R; i++) SQ_UNROLL for (int j = 0; j < N; j++) store(sum[i] + at + j * VL, s[i][j]);
}

template <int R>
static void value_rows(const float* const* weight, const float* rows, long n, long ld, float* const* sum) {
  long at = 0;
  for (; at + 4 * VL <= ld; at += 4 * VL) value_tile<R, 4>(weight, rows, n, ld, sum, at);
  for (; at + 2 * VL <= ld; at += 2 * VL) value_tile<R, 2>(weight, rows, n, ld, sum, at);
  for (; at < ld; at += VL) value_tile<R, 1>(weight, rows, n, ld, sum, at);
}

// sum of query i += its weights times the rows (sorted by cluster) of the clusters that it has chosen.
static void chosen_sums(const Group& k, const float* weights, const float* rows_of, long ld, float* sums) {
  const Clusters& c = *k.clusters;
  for (long column = 0; column < c.first[k.sight.chunks]; column++) {
    const long size = size_of(c, column);
    const float* rows = rows_of + c.row_at[column] * ld;
    for (long e = k.entry_of[column], end = k.entry_of[column + 1]; e < end;) {
      const float* weight[3];
      float* sum[3];
      const int some = (int)(end - e < 3 ? end - e : 3);
      for (int i = 0; i < some; i++, e++) weight[i] = weights + k.entry_at[e], sum[i] = sums + k.entry_row[e] * ld;
      if (some == 3) value_rows<3>(weight, rows, size, ld, sum);
      else if (some == 2) value_rows<2>(weight, rows, size, ld, sum);
      else value_rows<1>(weight, rows, size, ld, sum);
    }
  }
}

static void chosen_part(Group& k) {
  const Clusters& c = *k.clusters;
  const long lde = k.plan->lde;
  list_choices(k);
  chosen_products(k, k.q, k.ldq, c.panels, k.call->dim, k.key_scores);
  for (long i = 0; i < k.n; i++) {
    float* row = k.key_scores + k.score_at[i];
    const long lanes = k.score_at[i + 1] - k.score_at[i];
    vf highest = splat(-INFINITY);
    for (long j = 0; j < lanes; j += VL) highest = vmax(highest, load(row + j));
    k.chosen.peak[i] = hmax(highest);
    k.chosen.mass[i] = lanes ? exponentiate(row, lanes / VL, k.chosen.peak[i]) : 0.0f;
  }
  memset(k.chosen.sum, 0, sizeof(float) * k.n * lde);
  chosen_sums(k, k.key_scores, c.values, lde, k.chosen.sum);
}

// -- dense keys ------------------------------------------------------------------------------------------------------

// sum += sum_i weight[i] row_i
static void add_rows(const float* weight, const float* rows, long n, long ld, long width, float* sum) {
  for (long i = 0; i < n; i++)
    for (long e = 0; e < width; e += VL) store(sum + e, load(sum + e) + splat(weight[i]) * load(rows + i * ld + e));
}

SQ_INLINE bool finite_rows(const float* rows, long n) {
  vf poison = zero();
  for (long i = 0; i < n; i += VL) poison += load(rows + i) * zero();
  return hsum(poison) == 0.0f;
}

// Scores of the queries [i0, i0 + n) with the dense keys [from, from + keys) of one panel, hidden ones -inf.
static void dense_scores(const Group& k, long i0, long n, long from, long keys, float* scores) {
  const SqMultipole& p = *k.call;
  const long block = from / p.chunk, at = from - block * p.chunk, vectors = padded(keys, VL) / VL;
  const float* panels = k.clusters->keys_by_rank + (block * k.plan->ldb + at) * p.dim;
  times_panels(n, keys, p.dim, k.q + i0 * k.ldq, k.ldq, panels, scores, k.lds);
  for (long r = 0; r < n; r++) {
    long seen = k.end[i0 + r] - from;
    seen = seen < 0 ? 0 : seen > keys ? keys : seen;
    for (long j = seen; j < vectors * VL; j++) scores[r * k.lds + j] = -INFINITY;
  }
}

// The next dense keys from rank `from` on that are scored together: inside one panel.
SQ_INLINE long dense_step(const Group& k, long from, long end) {
  const long chunk = k.call->chunk;
  long to = (from / chunk + 1) * chunk;
  if (to > from + COLUMNS) to = from + COLUMNS;
  return (to < end ? to : end) - from;
}

static void dense_part(Group& k, long i0, long n) {
  const long lde = k.plan->lde;
  float factor[ROWS], *sum = k.near.sum + i0 * lde;
  long end = 0;
  for (long i = i0; i < i0 + n; i++) {
    k.near.peak[i] = -INFINITY, k.near.mass[i] = 0.0f;
    end = k.end[i] > end ? k.end[i] : end;
  }
  memset(sum, 0, sizeof(float) * n * lde);
  for (long from = k.sight.dense, keys; from < end; from += keys) {
    keys = dense_step(k, from, end);
    const long vectors = padded(keys, VL) / VL;
    dense_scores(k, i0, n, from, keys, k.scores);
    for (long r = 0; r < n; r++) {
      float *row = k.scores + r * k.lds, &peak = k.near.peak[i0 + r], &mass = k.near.mass[i0 + r];
      vf highest = splat(peak);
      for (long j = 0; j < vectors * VL; j += VL) highest = vmax(highest, load(row + j));
      const float now = hmax(highest), shift = now > -INFINITY ? now : 0.0f;
      factor[r] = mass > 0.0f ? exp1(peak - shift) : 0.0f;
      mass = mass * factor[r] + exponentiate(row, vectors, shift);
      peak = now;
    }
    const float* values = k.clusters->values_by_rank + from * lde;
    if (finite_rows(values, keys * lde)) {
      times_rows(n, keys, k.scores, k.lds, values, lde, sum, FROM_SCALED, factor);
      continue;
    }
    for (long r = 0; r < n; r++) {  // a hidden value that is not finite must not meet a weight of 0
      const long seen = k.end[i0 + r] - from;
      for (long e = 0; e < lde; e++) sum[r * lde + e] *= factor[r];
      if (seen > 0) add_rows(k.scores + r * k.lds, values, seen < keys ? seen : keys, lde, lde, sum + r * lde);
    }
  }
}

static void write_choices(const Group& k, long i) {
  const SqMultipole& p = *k.call;
  const long row = (k.b * p.heads_q + k.h) * p.length_q + k.first + i;
  const Selection& s = k.selection[i];
  if (p.exact) p.exact[row] = (int32_t)(s.limited ? -s.keys - 1 : s.keys);
  if (!p.selection || p.forced) return;
  uint8_t* to = p.selection + row * k.plan->chunks * k.plan->slots;
  for (long j = 0; j < s.count; j++) to[k.clusters->slot[s.columns[j]]] = 1;
  if (k.sight.dense) return;
  const Clusters& c = *k.clusters;  // clusters that were taken as dense keys are chosen ones
  const long own = p.causal ? (k.end[i] > 0 ? (k.end[i] - 1) / p.chunk : 0) : c.chunks;
  for (long j = 0; j < c.first[own < c.chunks ? own : c.chunks]; j++) to[c.slot[j]] = 1;
}

// Expected squared error of the queries [i0, i0 + n), whose output is in `near`; share: what turns far weights relative to
// their peak into weights of the output.
static void write_estimates(Group& k, long i0, long n, const float* share) {
  const SqMultipole& p = *k.call;
  const Clusters& c = *k.clusters;
  const long lde = k.plan->lde, columns = c.first[k.sight.chunks], vectors = padded(columns, VL) / VL;
  const float* out = k.near.sum + i0 * lde;
  float* to = p.estimate + 2 * ((k.b * p.heads_q + k.h) * p.length_q + k.first + i0);
  if (columns) {
    times_panels(n, columns, p.dim, k.q + i0 * k.ldq, k.ldq, c.mean_t, k.scores, k.lds);
    times_panels(n, columns, p.width, out, lde, c.mean_value_t, k.other, k.lds);
  }
  for (long r = 0; r < n; r++) {
    const float norm = norm_of(out + r * lde, lde);
    vf total = zero();
    if (columns) {
      const Selection& s = k.selection[i0 + r];
      float *row = k.scores + r * k.lds, peak, top;
      for (long j = columns; j < vectors * VL; j++) row[j] = -INFINITY;
      log_masses(k, i0 + r, row, vectors, &peak, &top);
      for (long j = 0; j < s.count; j++) row[s.columns[j]] = -INFINITY;
      for (long j = 0; j < vectors * VL; j += VL)
        total += expected_error(k, i0 + r, j, vexp(load(row + j) - splat(peak)) * splat(share[r]),
                                load(k.other + r * k.lds + j), norm);
    }
    to[2 * r] = hsum(total), to[2 * r + 1] = norm;
  }
}

// Parts joined under one normaliser, in place of `near`.
static void finish(Group& k, long i0, long n) {
  const SqMultipole& p = *k.call;
  const long lde = k.plan->lde, columns = k.clusters->first[k.sight.chunks];
  float share[ROWS];
  for (long r = 0; r < n; r++) {
    const long i = i0 + r;
    float peak = k.near.peak[i], total = 0.0f, by[3] = {0.0f, 0.0f, 0.0f};
    const Part* const parts[] = {&k.near, &k.far, &k.chosen};
    const int count = columns ? 3 : 1;
    for (int j = 1; j < count; j++) peak = max1(peak, parts[j]->peak[i]);
    const float shift = peak > -INFINITY ? peak : 0.0f;
    for (int j = 0; j < count; j++) {
      by[j] = parts[j]->peak[i] > -INFINITY ? exp1(parts[j]->peak[i] - shift) : 0.0f;
      total += parts[j]->mass[i] * by[j];
    }
    const float share_of = total == 0.0f ? 0.0f : 1.0f / total;
    float* to = k.near.sum + i * lde;
    for (long e = 0; e < lde; e += VL) {
      vf sum = load(to + e) * splat(by[0]);
      for (int j = 1; j < count; j++) sum += load(parts[j]->sum + i * lde + e) * splat(by[j]);
      store(to + e, sum * splat(share_of));
    }
    share[r] = by[1] * share_of;
    if (p.log_norm)
      p.log_norm[(k.b * p.heads_q + k.h) * p.length_q + k.first + i] = total == 0.0f ? -INFINITY : shift + logf(total);
    write_choices(k, i);
  }
  if (p.out.data) put(p.out, k.b, k.h, k.first + i0, n, p.width, k.near.sum + i0 * lde, lde);
  if (p.estimate) write_estimates(k, i0, n, share);
}

// -- the call ------------------------------------------------------------------------------------------------------

struct Context {
  const SqMultipole* call;
  Plan plan;
  const int32_t* token_of;  // [B][S], or null
  int64_t blocks, pieces, piece;
  bool failed;
};

SQ_INLINE const int32_t* tokens_of(const Context& x, long b) {
  return x.token_of ? x.token_of + b * x.call->length_k : nullptr;
}

static void lay_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqMultipole& p = *x.call;
  const long head = task / x.blocks, block = task % x.blocks, b = head / p.heads_kv, h = head % p.heads_kv;
  Clusters& c = x.plan.heads[head];
  long floats;
  chunk_scratch(p, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  lay_ranks(p, x.plan, c, b, h, block, tokens_of(x, b), memory);
  if (block < c.chunks && !clustered(p, x.plan, head * x.plan.chunks + block)) cluster_chunk(p, x.plan, b, h, block, tokens_of(x, b), memory);
}

static void pack_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqMultipole& p = *x.call;
  const long head = task / x.blocks, chunk = task % x.blocks;
  if (chunk >= x.plan.heads[head].chunks) return;
  const long ldk = x.plan.ldk;
  float* memory = sq_scratch(padded(p.chunk * ldk, 16) + (padded(p.largest, VL) + 1) * ldk);
  if (!memory) return (void)(x.failed = true);
  pack_chunk(p, x.plan, x.plan.heads[head], head / p.heads_kv, head % p.heads_kv, chunk, tokens_of(x, head / p.heads_kv),
             memory);
}

// The number of real keys among the tokens 0 .. last.
static long ranks_until(const int32_t* token_of, long real, long last) {
  if (!token_of) return last + 1;
  long low = 0, high = real;
  while (low < high) {
    const long middle = (low + high) / 2;
    if (token_of[middle] <= last) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Calls body(group) for the queries [from, to) of one head, in groups that see the same chunks.
template <class Body>
static void for_groups(Group& k, const int32_t* token_of, long from, long to, Body body) {
  const SqMultipole& p = *k.call;
  k.n = 0;
  for (long i = from; i < to; i++) {
    const long end = p.causal ? ranks_until(token_of, k.clusters->real, p.past + i) : k.clusters->real;
    const Sight sight = sight_of(p, *k.clusters, end);
    if (k.n && (k.n == k.most || sight.chunks != k.sight.chunks || sight.dense != k.sight.dense)) {
      body(k);
      k.n = 0;
    }
    if (!k.n) k.first = i, k.sight = sight;
    k.end[k.n++] = end;
  }
  if (k.n) body(k);
}

// Calls part(k, i0, n) for up to ROWS queries of the group at a time.
template <class Body>
SQ_INLINE void for_rows(Group& k, Body part) {
  for (long i = 0; i < k.n; i += ROWS) part(k, i, k.n - i < ROWS ? k.n - i : ROWS);
}

static void attend_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqMultipole& p = *x.call;
  const long piece = task % x.pieces, head = task / x.pieces;
  long floats;
  cut_group(p, x.plan, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  Group k = cut_group(p, x.plan, memory, &floats);
  k.b = head / p.heads_q, k.h = head % p.heads_q;
  k.clusters = &x.plan.heads[k.b * p.heads_kv + k.h / (p.heads_q / p.heads_kv)];
  const long from = piece * x.piece, to = from + x.piece;
  for_groups(k, tokens_of(x, k.b), from, to < p.length_q ? to : p.length_q, [](Group& k) {
    load_queries(k);
    for_rows(k, far_part);
    if (k.clusters->first[k.sight.chunks]) chosen_part(k);
    for_rows(k, dense_part);
    for_rows(k, finish);
  });
}

// Memory of a call, and its clusters made; attention itself follows.
static float* prepare(const SqMultipole& p, Context& x) {
  Plan& plan = x.plan;
  x.call = plan.call = &p;
  x.failed = false;
  plan.chunks = p.length_k / p.chunk;
  plan.slots = p.clusters + p.chunk / p.largest;
  plan.ldc = odd_lines(plan.chunks * plan.slots);
  plan.ldb = odd_lines(p.chunk);
  plan.ldk = padded(p.dim, VL);
  plan.lde = padded(p.width, VL);
  plan.floats = cut(p, plan, nullptr, nullptr);
  const long heads = p.batch * p.heads_kv, tokens = p.key_mask ? p.batch * p.length_k : 0;
  const long table = padded((long)(sizeof(Clusters) / sizeof(float) + 1) * heads, 16);
  float* memory = sq_workspace(table + padded(tokens, 16) + heads * plan.floats);
  if (!memory) return nullptr;
  plan.heads = (Clusters*)memory;
  int32_t* token_of = (int32_t*)(memory + table);
  x.token_of = tokens ? token_of : nullptr;
  float* rest = memory + table + padded(tokens, 16);
  for (long head = 0; head < heads; head++) {
    cut(p, plan, rest + head * plan.floats, &plan.heads[head]);
    const long b = head / p.heads_kv;
    Clusters& c = plan.heads[head];
    c.real = head % p.heads_kv ? plan.heads[head - 1].real : ranks(p, b, token_of + b * p.length_k);
    c.chunks = c.real / p.chunk;
  }
  x.blocks = (p.length_k + p.chunk - 1) / p.chunk;
  sq_parallel(heads * x.blocks, p.threads, lay_task, &x);
  for (long head = 0; head < heads; head++) {
    count_columns(p, plan, plan.heads[head], head);
    close_columns(p, plan, plan.heads[head]);
  }
  sq_parallel(heads * x.blocks, p.threads, pack_task, &x);
  return memory;
}

static int forward(const SqMultipole* call) {
  const SqMultipole& p = *call;
  Context x;
  if (!prepare(p, x)) return SQ_NO_MEMORY;
  // Pieces long enough to be worth a task, short enough that the last ones do not leave a thread alone.
  x.piece = GROUP;
  x.pieces = (p.length_q + x.piece - 1) / x.piece;
  sq_parallel(p.batch * p.heads_q * x.pieces, p.threads, attend_task, &x);
  sq_workspace_done();
  return x.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::multipole
