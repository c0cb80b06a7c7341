// The keys that a group of queries evaluates one by one: those of chosen clusters, and dense keys by rank.
#pragma once

#include "group.h"

namespace SQ_NS::multipole {

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
    const long at = c.panel_at[column];
    const float* panel = panels + (dim == key_dim ? at : at / key_dim * dim);
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
    const float* rows = rows_of + (c.value_at ? c.value_at[column] : c.row_at[column] * ld);
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

}  // namespace SQ_NS::multipole
