// Sparse attention, forward. Columns first: their sums wait until the window of the same query is done.
#pragma once

#include "tile.h"

namespace SQ_NS::sparse {

static bool take_tile(Context& x, long b, long h, bool backward, Tile* t) {
  if (!take_tile(*t, x.call->dim, x.call->width, backward)) {
    x.failed = true;
    return false;
  }
  t->call = x.call, t->b = b, t->h = h, t->real = &x.real[b];
  return true;
}

// The keys of a list added to the sums of a tile of queries.
static void attend(Tile& t, Way way, const List& keys) {
  for_keys(t, way, keys, [&](long, long n) { add_keys(t, n); });
}

SQ_INLINE float* far_row(const Context& x, const Tile& t, long rank) {
  return x.far + ((t.b * x.call->heads_q + t.h) * x.call->length_q + rank) * (t.lde + 2);
}

static void column_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqSparse& p = *x.call;
  const long head = task / p.stride;
  Tile t;
  if (!take_tile(x, head / p.heads_q, head % p.heads_q, false, &t)) return;
  if (!has_columns(p, t.real->count)) return;
  const List whole = column(p, task % p.stride, t.real->count);
  for (long at = 0; at < whole.count; at += ROWS) {
    load_queries(t, part_of(whole, at));
    start_sums(t);
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
  if (!take_tile(x, head / p.heads_q, head % p.heads_q, false, &t)) return;
  const long n = t.real->count;
  if (from >= n) return;
  load_queries(t, part_of(tokens(0, n), from));
  start_sums(t);
  if (has_columns(p, n))
    for (long r = 0; r < t.rows; r++) {
      const float* far = far_row(x, t, from + r);
      memcpy(t.sum + r * t.lde, far, sizeof(float) * t.lde);
      t.peak[r] = far[t.lde], t.mass[r] = far[t.lde + 1];
    }
  for_near_lists(p, n, [&](Way way, const List& keys) { attend(t, way, keys); });
  for (long r = 0; r < t.rows; r++) {
    const long token = t.real->token(from + r);
    normalise_row(t, r);
    put(p.out, t.b, t.h, token, 1, p.width, t.sum + r * t.lde, t.lde);
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
