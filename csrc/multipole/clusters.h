// Clusters of keys: k-means inside chunks, and keys and values packed so that one cluster is one piece of memory.
#pragma once

#include <math.h>

#include "../keys.h"
#include "../kmeans.h"
#include "call.h"

namespace SQ_NS::multipole {

// The most keys that a query evaluates of `far` clustered ones.
SQ_INLINE long most_keys(const SqMultipole& p, long far) {
  if (p.exact_keys >= 0) return p.exact_keys;
  // Causal queries have their own chunk exact beside them.
  const long some = p.causal ? far / 4 : far * 3 / 8, least = p.causal ? 160 : 256, part = far / (p.causal ? 48 : 32);
  const long many = part > least ? part : least;
  return some < many ? some : many;
}

// The keys and values of one (batch, key head), by rank and by cluster. Columns are the non-empty clusters of all complete
// chunks, in order, so the clusters of the first chunks are the first columns.
struct Clusters {
  long real, chunks, columns;  // real keys; complete chunks among them; clusters in those
  long* first;      // [chunks + 1]: first column of a chunk
  long* panel_at;   // [columns]: where a cluster's panel stands in `panels`
  int32_t* row_at;  // [columns + 1]: its first row in `values`
  long* value_at;   // [columns]: where its values stand, if they are not one array; or null
  int32_t* slot;    // [columns]: its place among the slots of the call
  float *mean_t, *log_size, *variance, *radius, *level;  // panels of D rows; [ldc]; padding columns have weight 0
  float *spread, *mean_square, *size;                    // [ldc]: summed variance of values, |vbar|^2, n
  float* mean_variance;  // [chunks + 1]: of the clusters of the first chunks, by their sizes
  float* mean_value;    // [columns][lde]
  float* mean_value_t;  // panels of E rows, where an error is estimated
  float* panels;        // per cluster, per VL keys [D][VL]; lanes without a key are 0
  float* values;        // [chunks * chunk][lde], sorted by cluster
  float *keys_by_rank, *values_by_rank;  // per block of `chunk` ranks panels of D rows; [S][lde]
  // The same the other way round, where there is a gradient.
  float *mean, *key_rows, *value_panels;                  // [columns][ldk]; sorted by cluster [..][ldk], like `panels`
  float *key_rows_by_rank, *value_panels_by_rank;         // [S][ldk]; panels of E rows
};

// How a call's memory is cut.
struct Plan {
  const SqMultipole* call;
  long chunks, slots, ldc, ldb, ldk, lde, floats;  // chunks: complete if every key is real; floats: of one key head
  Clusters* heads;                            // [B * H]
};

// Memory cut into arrays, each on a cache line; without memory only the floats are counted.
struct Cutter {
  float* memory;
  long used;
  float* operator()(long floats) {
    float* at = memory ? memory + used : nullptr;
    used += padded(floats, 16);
    return at;
  }
};

// What is known of at most `most` clusters of `chunks` chunks; transposed: mean values in panels too.
static Clusters cut_columns(const SqMultipole& p, Cutter& take, long chunks, long most, long ldc, bool transposed) {
  Clusters c = {};
  c.first = (long*)take(2 * (chunks + 1));
  c.panel_at = (long*)take(2 * most);
  c.row_at = (int32_t*)take(most + 1);
  c.slot = (int32_t*)take(most);
  c.mean_variance = take(chunks + 1);
  c.mean_t = take(p.dim * padded(ldc, PC));
  float** const arrays[] = {&c.log_size, &c.variance, &c.radius, &c.level, &c.spread, &c.mean_square, &c.size};
  for (float** a : arrays) *a = take(ldc);
  c.mean_value = take(ldc * padded(p.width, VL));
  if (transposed) c.mean_value_t = take(p.width * padded(ldc, PC));
  return c;
}

static long cut(const SqMultipole& p, const Plan& plan, float* memory, Clusters* to) {
  const long most = plan.chunks * plan.slots, keys = plan.chunks * p.chunk;
  const bool gradient = p.dout.data != nullptr;
  Cutter take = {memory, 0};
  Clusters c = cut_columns(p, take, plan.chunks, most, plan.ldc, p.error >= 0 || p.estimate || gradient);
  c.panels = take(p.dim * (keys + most * (VL - 1)));
  c.values = take(keys * plan.lde);
  c.keys_by_rank = take((p.length_k + p.chunk - 1) / p.chunk * p.dim * plan.ldb);
  c.values_by_rank = take(p.length_k * plan.lde);
  if (gradient) {
    c.mean = take(plan.ldc * plan.ldk);
    c.key_rows = take(keys * plan.ldk);
    c.value_panels = take(p.width * (keys + most * (VL - 1)));
    c.key_rows_by_rank = take(p.length_k * plan.ldk);
    c.value_panels_by_rank = take((p.length_k + p.chunk - 1) / p.chunk * p.width * plan.ldb);
  }
  if (to) *to = c;
  return take.used;
}

// Columns [from, ldc) get weight 0: they only fill up vectors.
static void close_columns(const SqMultipole& p, const Plan& plan, Clusters& c) {
  for (long j = c.columns; j < plan.ldc; j++) {
    for (long d = 0; d < p.dim; d++) *panel_entry(c.mean_t, p.dim, d, j) = 0.0f;
    c.log_size[j] = c.level[j] = -INFINITY;
    c.variance[j] = c.radius[j] = c.spread[j] = c.mean_square[j] = c.size[j] = 0.0f;
    if (c.mean_value_t)
      for (long e = 0; e < p.width; e++) *panel_entry(c.mean_value_t, p.width, e, j) = 0.0f;
  }
  memset(c.mean_value + c.columns * plan.lde, 0, sizeof(float) * (plan.ldc - c.columns) * plan.lde);
  if (c.mean) memset(c.mean + c.columns * plan.ldk, 0, sizeof(float) * (plan.ldc - c.columns) * plan.ldk);
}

// The mean variance with the clusters of one more chunk, whose variances are there.
static void extend_mean_variance(Clusters& c, long chunk) {
  if (!chunk) c.mean_variance[0] = 0.0f;
  double keys = c.row_at[c.first[chunk]], sum = keys * c.mean_variance[chunk];
  for (long j = c.first[chunk]; j < c.first[chunk + 1]; j++) sum += (double)c.size[j] * c.variance[j], keys += c.size[j];
  c.mean_variance[chunk + 1] = (float)(sum / keys);
}

// Scratch of one worker for one chunk of keys; ldt: tokens along the lanes.
struct ChunkScratch {
  long ldk, ldt;
  float *rows, *panel, *scores, *means, *bias, *middle;
  float slack;  // scores that differ by less are equal: repeated tokens must not be told apart by rounding
  int32_t *assigned, *count;
};

static ChunkScratch chunk_scratch(const SqMultipole& p, float* memory, long* floats) {
  ChunkScratch s;
  s.ldk = padded(p.dim, VL);
  const long chunk = p.chunk < p.length_k ? p.chunk : p.length_k;  // a chunk longer than the input is never complete
  s.ldt = odd_lines(chunk);
  Cutter take = {memory, 0};
  s.rows = take(chunk * s.ldk);
  s.panel = take(p.dim * s.ldt);
  s.scores = take(p.clusters * TOKENS);
  s.means = take(p.clusters * s.ldk);
  s.bias = take(p.clusters);
  s.middle = take(s.ldk);
  s.assigned = (int32_t*)take(s.ldt);
  s.count = (int32_t*)take(p.clusters + chunk / p.largest + 1);
  *floats = take.used;
  return s;
}

// The token of every rank, or null where ranks are tokens; returns the number of real keys.
static long ranks(const SqMultipole& p, long b, int32_t* token_of) {
  if (!p.key_mask) return p.length_k;
  long n = 0;
  for (long t = 0; t < p.length_k; t++)
    if (p.key_mask[b * p.mask_batch + t * p.mask_token]) token_of[n++] = (int32_t)t;
  return n;
}

// Rows of a chunk with their mean taken away: distances between keys with a large common part keep their digits.
static void centre(const SqMultipole& p, ChunkScratch& s) {
  vf square = zero();
  for (long d = 0; d < s.ldk; d += VL) {
    vf sum = zero();
    for (long i = 0; i < p.chunk; i++) sum += load(s.rows + i * s.ldk + d);
    const vf mean = sum / splat((float)p.chunk);
    store(s.middle + d, mean);
    for (long i = 0; i < p.chunk; i++) {
      const vf away = load(s.rows + i * s.ldk + d) - mean;
      store(s.rows + i * s.ldk + d, away);
      square += away * away;
    }
  }
  s.slack = 1e-5f * hsum(square) / (float)p.chunk;
}

// Members sorted by cluster, and cluster sizes; clusters of more than `largest` keys are cut evenly, in order of rank.
static void sort_members(const SqMultipole& p, const ChunkScratch& s, long slots, int32_t* order, int32_t* sizes) {
  memset(s.count, 0, sizeof(int32_t) * p.clusters);
  for (long i = 0; i < p.chunk; i++) s.count[s.assigned[i]]++;
  memset(sizes, 0, sizeof(int32_t) * slots);
  long slot = 0;
  int32_t at = 0;
  for (long c = 0; c < p.clusters; c++) {
    const long n = s.count[c], pieces = n > p.largest ? (n + p.largest - 1) / p.largest : 1;
    const long piece = (n + pieces - 1) / pieces;
    for (long left = n, i = 0; i < pieces; i++, left -= piece) sizes[slot++] = (int32_t)(left < piece ? left : piece);
    s.count[c] = at;
    at += (int32_t)n;
  }
  for (long i = 0; i < p.chunk; i++) order[s.count[s.assigned[i]]++] = (int32_t)i;
}

// Whether the clusters of a chunk are known.
static bool clustered(const SqMultipole& p, const Plan& plan, long chunk) {
  for (long i = 0; i < plan.slots; i++)
    if (p.sizes[chunk * plan.slots + i]) return true;
  return false;
}

static void cluster_chunk(const SqMultipole& p, const Plan& plan, long b, long h, long chunk, const int32_t* token_of,
                          float* memory) {
  long floats;
  ChunkScratch s = chunk_scratch(p, memory, &floats);
  const long at = (b * p.heads_kv + h) * plan.chunks + chunk;
  fetch_ranks(p.k, b, h, token_of, chunk * p.chunk, p.chunk, p.dim, s.rows, s.ldk);
  centre(p, s);
  for (long d = 0; d < p.dim; d++) memset(s.panel + d * s.ldt + p.chunk, 0, sizeof(float) * (s.ldt - p.chunk));
  transpose(s.rows, p.chunk, p.dim, s.ldk, s.panel, s.ldt);
  for (long c = 0; c < p.clusters; c++)
    memcpy(s.means + c * s.ldk, s.rows + p.starts[c] * s.ldk, sizeof(float) * s.ldk);
  const Means means = {p.clusters, p.dim, s.ldk, s.means, s.bias, s.slack};
  for (long i = 0;; i++) {
    square_bias(means);
    for (long t = 0; t < p.chunk; t += TOKENS) nearest(means, s.panel + t, s.ldt, p.chunk - t, s.scores, s.assigned + t);
    if (i == p.iterations) break;
    update_means(means, p.chunk, s.rows, s.assigned, s.count);
  }
  sort_members(p, s, plan.slots, p.order + at * p.chunk, p.sizes + at * plan.slots);
}

// Means, variances and packed members of the clusters of one chunk.
static void pack_chunk(const SqMultipole& p, const Plan& plan, Clusters& c, long b, long h, long chunk,
                       const int32_t* token_of, float* memory) {
  const long ldk = plan.ldk, at = (b * p.heads_kv + h) * plan.chunks + chunk;
  const int32_t *order = p.order + at * p.chunk, *sizes = p.sizes + at * plan.slots;
  float *rows = memory, *sorted = rows + padded(p.chunk * ldk, 16);
  float* mean = sorted + padded(p.largest, VL) * ldk;
  fetch_ranks(p.k, b, h, token_of, chunk * p.chunk, p.chunk, p.dim, rows, ldk);
  const float* given = c.values_by_rank + chunk * p.chunk * plan.lde;
  long member = 0;
  for (long slot = 0, j = c.first[chunk]; slot < plan.slots; slot++) {
    const long n = sizes[slot], lanes = padded(n, VL);
    if (!n) continue;
    c.slot[j] = (int32_t)(chunk * plan.slots + slot);
    const float part = 1.0f / (float)n;
    float* values = c.values + (chunk * p.chunk + member) * plan.lde;
    float* mean_value = c.mean_value + j * plan.lde;
    for (long i = 0; i < n; i++) {
      copy_row(sorted + i * ldk, rows + order[member + i] * ldk, ldk);
      copy_row(values + i * plan.lde, given + order[member + i] * plan.lde, plan.lde);
    }
    for (long d = 0; d < ldk; d += VL) {
      // From the first member on: what is common to all does not take part in the rounding of the sum.
      const vf origin = load(sorted + d);
      vf sum = zero();
      for (long i = 1; i < n; i++) sum += load(sorted + i * ldk + d) - origin;
      store(mean + d, origin + sum * splat(part));
    }
    vf total = zero();
    float radius = 0.0f;
    for (long i = 0; i < n; i++) {
      vf square = zero();
      for (long d = 0; d < ldk; d += VL) {
        const vf away = load(sorted + i * ldk + d) - load(mean + d);
        square += away * away;
      }
      total += square;
      radius = max1(hsum(square), radius);
    }
    vf norm = zero(), spread = zero();
    for (long e = 0; e < plan.lde; e += VL) {
      vf sum = zero();
      for (long i = 0; i < n; i++) sum += load(values + i * plan.lde + e);
      const vf middle = sum * splat(part);
      store(mean_value + e, middle);
      norm += middle * middle;
      for (long i = 0; i < n; i++) {
        const vf away = load(values + i * plan.lde + e) - middle;
        spread += away * away;
      }
    }
    for (long d = 0; d < p.dim; d++) *panel_entry(c.mean_t, p.dim, d, j) = mean[d];
    if (c.mean_value_t)
      for (long e = 0; e < p.width; e++) *panel_entry(c.mean_value_t, p.width, e, j) = mean_value[e];
    c.log_size[j] = logf((float)n);
    c.variance[j] = hsum(total) * part / (float)p.dim;
    c.radius[j] = sqrtf(radius);
    c.spread[j] = hsum(spread) * part;
    c.mean_square[j] = hsum(norm);
    c.size[j] = (float)n;
    // What the criterion of selection adds to the score: log(n sqrt(variance of keys) sqrt(variance of values)).
    c.level[j] = c.log_size[j] + 0.5f * logf(max1(c.variance[j], 1e-30f)) + 0.5f * logf(max1(c.spread[j], 1e-30f));
    float* panel = c.panels + c.panel_at[j];
    memset(sorted + n * ldk, 0, sizeof(float) * (lanes - n) * ldk);
    for (long i = 0; i < lanes; i += VL) transpose(sorted + i * ldk, VL, p.dim, ldk, panel + i * p.dim, VL);
    if (c.mean) {
      memcpy(c.mean + j * ldk, mean, sizeof(float) * ldk);
      memcpy(c.key_rows + (chunk * p.chunk + member) * ldk, sorted, sizeof(float) * n * ldk);
      panel = c.value_panels + c.panel_at[j] / p.dim * p.width;
      if (n < lanes) memset(panel + (lanes - VL) * p.width, 0, sizeof(float) * VL * p.width);
      for (long i = 0; i < n; i += VL)
        transpose(values + i * plan.lde, n - i < VL ? n - i : VL, p.width, plan.lde, panel + i * p.width, VL);
    }
    member += n;
    j++;
  }
}

// A block of `chunk` ranks in panels, and its values as rows.
static void lay_ranks(const SqMultipole& p, const Plan& plan, Clusters& c, long b, long h, long block,
                      const int32_t* token_of, float* rows) {
  const long from = block * p.chunk, left = c.real - from, n = left < p.chunk ? left : p.chunk;
  if (n <= 0) return;
  fetch_ranks(p.v, b, h, token_of, from, n, p.width, c.values_by_rank + from * plan.lde, plan.lde);
  if (!p.causal && block < c.chunks && p.error != 0 && c.chunks * p.chunk > most_keys(p, c.chunks * p.chunk)) return;  // no dense keys there
  if (c.key_rows_by_rank) rows = c.key_rows_by_rank + from * plan.ldk;
  fetch_ranks(p.k, b, h, token_of, from, n, p.dim, rows, plan.ldk);
  lay_panels(rows, n, p.dim, plan.ldk, c.keys_by_rank + block * p.dim * plan.ldb);
  if (c.value_panels_by_rank)
    lay_panels(c.values_by_rank + from * plan.lde, n, p.width, plan.lde,
               c.value_panels_by_rank + block * p.width * plan.ldb);
}

// Where the columns of every chunk begin; returns their number.
static void count_columns(const SqMultipole& p, const Plan& plan, Clusters& c, long head) {
  long column = 0, panel = 0;
  int32_t row = 0;
  for (long chunk = 0; chunk < c.chunks; chunk++) {
    c.first[chunk] = column;
    const int32_t* sizes = p.sizes + (head * plan.chunks + chunk) * plan.slots;
    for (long slot = 0; slot < plan.slots; slot++) {
      if (!sizes[slot]) continue;
      c.panel_at[column] = panel;
      c.row_at[column] = row;
      panel += padded(sizes[slot], VL) * p.dim;
      row += sizes[slot];
      column++;
    }
  }
  c.first[c.chunks] = c.columns = column;
  c.row_at[column] = row;
}

}  // namespace SQ_NS::multipole
