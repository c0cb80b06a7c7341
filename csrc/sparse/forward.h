// Sparse attention, forward. Columns first: their sums wait until the window of the same query is done.
#pragma once

#include "tile.h"

namespace SQ_NS::sparse {

// The keys of a list added to the sums of a tile of queries.
static void attend(Tile& t, Way way, const List& keys) {
  for_keys(t, way, keys, [&](long, long n) {
    float factor[ROWS];
    const long vectors = padded(n, VL) / VL;
    for (long r = 0; r < t.rows; r++) {
      float *row = t.scores + r * t.lds, &peak = t.peak[r], &mass = t.mass[r];
      vf highest = splat(peak);
      for (long j = 0; j < vectors; j++) highest = vmax(load(row + j * VL), highest);
      const float now = hmax(highest), shift = now == -INFINITY ? 0.0f : now;
      factor[r] = mass == 0.0f ? 0.0f : exp1(peak - shift);
      mass = mass * factor[r] + exponentiate(row, vectors, shift);
      peak = now;
    }
    if (finite_rows(t.values, n * t.lde)) return times_rows(t.rows, n, t.scores, t.lds, t.values, t.lde, t.sum, FROM_SCALED, factor);
    for (long r = 0; r < t.rows; r++) {  // a hidden value that is not finite must not meet a weight of 0
      for (long e = 0; e < t.lde; e++) t.sum[r * t.lde + e] *= factor[r];
      for (long j = 0; j < n; j++)
        for (long e = 0; t.scores[r * t.lds + j] != 0.0f && e < t.lde; e++)
          t.sum[r * t.lde + e] += t.scores[r * t.lds + j] * t.values[j * t.lde + e];
    }
  });
}

static void start(Tile& t) {
  for (long r = 0; r < t.rows; r++) t.peak[r] = -INFINITY, t.mass[r] = 0.0f;
  memset(t.sum, 0, sizeof(float) * t.rows * t.lde);
}

static bool take_tile(Context& x, long b, long h, Tile* t) {
  long floats;
  cut_tile(*x.call, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) {
    x.failed = true;
    return false;
  }
  *t = cut_tile(*x.call, memory, &floats);
  t->b = b, t->h = h, t->real = &x.real[b];
  return true;
}

SQ_INLINE float* far_row(const Context& x, const Tile& t, long rank) {
  return x.far + ((t.b * x.call->heads_q + t.h) * x.call->length_q + rank) * (t.lde + 2);
}

static void column_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqSparse& p = *x.call;
  const long head = task / p.stride;
  Tile t;
  if (!take_tile(x, head / p.heads_q, head % p.heads_q, &t)) return;
  if (!has_columns(p, t.real->count)) return;
  const List whole = column(p, task % p.stride, t.real->count);
  for (long at = 0; at < whole.count; at += ROWS) {
    load_queries(t, part_of(whole, at));
    start(t);
    attend(t, COLUMN, whole);
    for (long r = 0; r < t.rows; r++) {
      float* to = far_row(x, t, t.queries.rank(r));
      memcpy(to, t.sum + r * t.lde, sizeof(float) * t.lde);
      to[t.lde] = t.peak[r], to[t.lde + 1] = t.mass[r];
    }
  }
}

static void tile_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqSparse& p = *x.call;
  const long head = task / x.tiles, from = task % x.tiles * ROWS;
  Tile t;
  if (!take_tile(x, head / p.heads_q, head % p.heads_q, &t)) return;
  const long n = t.real->count;
  if (from >= n) return;
  load_queries(t, part_of(tokens(0, n), from));
  start(t);
  if (has_columns(p, n))
    for (long r = 0; r < t.rows; r++) {
      const float* far = far_row(x, t, from + r);
      memcpy(t.sum + r * t.lde, far, sizeof(float) * t.lde);
      t.peak[r] = far[t.lde], t.mass[r] = far[t.lde + 1];
    }
  for_near_lists(p, n, [&](Way way, const List& keys) { attend(t, way, keys); });
  for (long r = 0; r < t.rows; r++) {
    const long token = t.real->token(from + r);
    float* row = t.sum + r * t.lde;
    const vf part = splat(1.0f / t.mass[r]);
    for (long e = 0; e < t.lde; e += VL) store(row + e, load(row + e) * part);
    put(p.out, t.b, t.h, token, 1, p.width, row, t.lde);
    p.log_norm[(t.b * p.heads_q + t.h) * p.length_q + token] = t.peak[r] + logf(t.mass[r]);
  }
}

static int forward(const SqSparse* call) {
  const SqSparse& p = *call;
  Context x;
  if (!prepare(p, x)) return SQ_NO_MEMORY;
  const long heads = p.batch * p.heads_q;
  if (has_columns(p, p.length_q)) sq_parallel(heads * p.stride, p.threads, column_task, &x);
  if (!x.failed) sq_parallel(heads * x.tiles, p.threads, tile_task, &x);
  sq_workspace_done();
  return x.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::sparse
