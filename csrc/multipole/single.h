// One query, as in decoding: memory is read for it alone, so what counts is how much of it, and how early it is asked for.
//
// Scores need all mean keys and all chosen keys. Values are read only where their weight can be seen in the sum: of n terms at
// the most, those below 2^-24 / n of one that is in it are together less than the rounding of that one. This is asked of every
// component. Chosen keys and values lie anywhere, so they are listed first and prefetched in the order of the list.
#pragma once

#include "parts.h"

namespace SQ_NS::multipole {

constexpr int BLOCKS = 4;  // of VL keys, whose scores are formed together
constexpr long AHEAD = 16;  // rows between the one that is added and the one that is prefetched

// scores[BLOCKS][VL] of a query with blocks of keys [dim][VL], while those of `next` are on their way.
SQ_INLINE void block_scores(const float* q, const float* const* block, const float* const* next, long dim, float* scores) {
  vf s[BLOCKS];
  SQ_UNROLL for (int n = 0; n < BLOCKS; n++) s[n] = zero();
  for (long d = 0; d < dim; d++) {
    const vf a = splat(q[d]);
    SQ_UNROLL for (int n = 0; n < BLOCKS; n++) {
      __builtin_prefetch(next[n] + d * VL);
      s[n] += a * load(block[n] + d * VL);
    }
  }
  SQ_UNROLL for (int n = 0; n < BLOCKS; n++) store(scores + n * VL, s[n]);
}

// Scores of the chosen keys, cluster after cluster in the order of the selection, -inf in lanes without a key; returns lanes.
static long chosen_scores(Group& k) {
  const Clusters& c = *k.clusters;
  const Selection& s = k.selection[0];
  const long dim = k.call->dim;
  const float** block = k.rows;
  long blocks = 0;
  for (long j = 0; j < s.count; j++) {
    const float* panel = c.panels + c.panel_at[s.columns[j]];
    for (long i = size_of(c, s.columns[j]); i > 0; i -= VL, panel += dim * VL) block[blocks++] = panel;
  }
  for (long n = 0; n < 2 * BLOCKS && blocks; n++) block[blocks + n] = block[blocks - 1];
  for (long i = 0; i < blocks; i += BLOCKS) block_scores(k.q, block + i, block + i + BLOCKS, dim, k.key_scores + i * VL);
  long at = 0;
  for (long j = 0; j < s.count; j++) {
    const long size = size_of(c, s.columns[j]);
    for (long i = size; i < padded(size, VL); i++) k.key_scores[at + i] = -INFINITY;
    at += padded(size, VL);
  }
  return at;
}

// sum[N vectors] += weights times rows.
template <int N>
SQ_INLINE void row_tile(const float* const* row, const float* weight, long n, long at, float* sum) {
  vf s[N];
  SQ_UNROLL for (int j = 0; j < N; j++) s[j] = zero();
  for (long i = 0; i < n; i++) {
    for (int j = 0; j < N * VL; j += 16) __builtin_prefetch(row[i + AHEAD] + at + j);
    const vf a = splat(weight[i]);
    SQ_UNROLL for (int j = 0; j < N; j++) s[j] += a * load(row[i] + at + j * VL);
  }
  SQ_UNROLL for (int j = 0; j < N; j++) store(sum + at + j * VL, load(sum + at + j * VL) + s[j]);
}

// sum[ld] = weights times the n rows that are listed.
static void sum_rows(Group& k, long n, long ld, float* sum) {
  constexpr long SOME = 64;  // terms that are added to each other first, as in other products
  memset(sum, 0, sizeof(float) * ld);
  for (long i = 0; i < AHEAD && n; i++) k.rows[n + i] = k.rows[n - 1];
  for (long from = 0; from < n; from += SOME) {
    const float* const* row = k.rows + from;
    const long some = n - from < SOME ? n - from : SOME;
    long at = 0;
    for (; at + 8 * VL <= ld; at += 8 * VL) row_tile<8>(row, k.weights + from, some, at, sum);
    for (; at + 4 * VL <= ld; at += 4 * VL) row_tile<4>(row, k.weights + from, some, at, sum);
    for (; at < ld; at += VL) row_tile<1>(row, k.weights + from, some, at, sum);
  }
}

// What every component of a sum has at least, squared: the smallest component of the largest terms of n rows. `largest`: one row.
static float least_component(const float* weight, const float* rows, long n, long ld, long width, float* largest) {
  for (long e = 0; e < ld; e += VL) {
    vf most = zero();
    for (long i = 0; i < n; i++) {
      const vf term = splat(weight[i]) * load(rows + i * ld + e);
      most = vmax(vmax(term, zero() - term), most);
    }
    store(largest + e, most);
  }
  float least = largest[0];
  for (long e = 1; e < width; e++) least = largest[e] < least ? largest[e] : least;
  return least * least;
}

// The square below which a term is not seen beside one whose square is `beside`, nor are n of them.
SQ_INLINE float unseen(float beside, long n) {
  const float part = 0x1p-24f / (float)(n > 0 ? n : 1);
  return beside < 1e38f ? beside * (part * part) : 0.0f;  // beside what is not finite everything is read
}

// Sums over chosen keys. Returns what is in every component of them, squared and relative to the peak.
static float chosen_single(Group& k) {
  const Clusters& c = *k.clusters;
  const Selection& s = k.selection[0];
  const long lde = k.plan->lde, lanes = chosen_scores(k);
  vf highest = splat(-INFINITY);
  for (long j = 0; j < lanes; j += VL) highest = vmax(highest, load(k.key_scores + j));
  k.chosen.peak[0] = hmax(highest);
  k.chosen.mass[0] = lanes ? exponentiate(k.key_scores, lanes / VL, k.chosen.peak[0]) : 0.0f;
  auto values_of = [&](long column) { return c.values + (c.value_at ? c.value_at[column] : c.row_at[column] * lde); };

  // To compare with: the cluster of the key with the largest weight.
  float beside = 0.0f;
  const float* weight = k.key_scores;
  for (long j = 0; j < s.count; weight += padded(size_of(c, s.columns[j++]), VL)) {
    const long size = size_of(c, s.columns[j]);
    vf most = zero();
    for (long i = 0; i < size; i += VL) most = vmax(load(weight + i), most);
    if (hmax(most) < 1.0f) continue;
    beside = least_component(weight, values_of(s.columns[j]), size, lde, k.call->width, k.chosen.sum);
    break;
  }

  const float least = unseen(beside, s.keys);
  long n = 0;
  weight = k.key_scores;
  for (long j = 0; j < s.count; weight += padded(size_of(c, s.columns[j++]), VL)) {
    const long column = s.columns[j];
    const float* row = values_of(column);
    // No value of a cluster is longer than the root of all their squares.
    const float square = c.size[column] * (c.mean_square[column] + c.spread[column]);
    for (long i = 0; i < size_of(c, column); i++, row += lde) {
      k.rows[n] = row, k.weights[n] = weight[i];
      n += !(weight[i] * weight[i] * square < least);
    }
  }
  sum_rows(k, n, lde, k.chosen.sum);
  return beside;
}

// Sums over the clusters that are not chosen, whose log masses are in k.scores; `chosen`: what is in every component of the sum
// over chosen keys, squared and relative to their peak.
static void far_single(Group& k, float chosen) {
  const Clusters& c = *k.clusters;
  const long columns = c.first[k.sight.chunks], vectors = padded(columns, VL) / VL, lde = k.plan->lde;
  const float peak = k.far.peak[0], shift = peak > -INFINITY ? peak : 0.0f, rise = 2.0f * (k.chosen.peak[0] - shift);
  k.far.mass[0] = exponentiate(k.scores, vectors, shift);
  vf most = zero();
  for (long j = 0; j < columns; j += VL) {
    const vf square = load(k.scores + j) * load(k.scores + j) * load(c.mean_square + j);
    store(k.criterion + j, square);
    most = vmax(square, most);
  }
  long top = 0;
  const float largest = hmax(most);
  while (top + 1 < columns && k.criterion[top] != largest) top++;
  float beside = least_component(k.scores + top, c.mean_value + top * lde, 1, lde, k.call->width, k.far.sum);
  if (beside < 1e38f && chosen > 0.0f) {
    const float other = chosen * exp1(rise < 80.0f ? rise : 80.0f);
    beside = max1(beside, other < 9e37f ? other : 9e37f);
  }
  const float least = unseen(beside, columns);
  long n = 0;
  for (long j = 0; j < columns; j++) {
    k.rows[n] = c.mean_value + j * lde, k.weights[n] = k.scores[j];
    n += !(k.criterion[j] < least);
  }
  sum_rows(k, n, lde, k.far.sum);
}

// Far and chosen parts of a group of one query.
static void clusters_single(Group& k) {
  far_masses(k, 0, 1);
  far_single(k, chosen_single(k));
}

}  // namespace SQ_NS::multipole
