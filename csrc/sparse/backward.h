// Sparse attention, backward: weights formed again from the log normaliser of the forward.
// One task adds up the gradients of one key head (or of some of its tiles, where heads are fewer than threads).
#pragma once

#include "../sums.h"
#include "forward.h"

namespace SQ_NS::sparse {

static void load_gradients(Tile& t) {
  const SqSparse& p = *t.call;
  fetch_list(p.dout, t, t.h, t.queries, 0, t.rows, p.width, t.dout, t.lde);
  fetch_list(p.out, t, t.h, t.queries, 0, t.rows, p.width, t.sum, t.lde);
  for (long r = 0; r < t.rows; r++)
    t.norm[r] = p.log_norm[(t.b * p.heads_q + t.h) * p.length_q + t.real->token(t.queries.rank(r))];
  start_gradients(t);
}

static void gradient(Tile& t, const Sums& sums, Way way, const List& keys) {
  for_keys(t, way, keys, [&](long from, long n) {
    add_gradients(t, n);
    for (long j = 0; j < n; j++) add_to_sums(sums, keys.rank(from + j), t.dk + j * t.ldk, t.dv + j * t.lde);
  });
}

static void add_queries(const Tile& t) {
  for (long r = 0; r < t.rows; r++)
    add_query(t, r, t.call->scale, t.call->dq, t.b, t.h, t.real->token(t.queries.rank(r)));
}

struct BackContext {
  Context x;
  Summing sums;
  bool columns;  // the second walk: a query's window and its column may not be in two hands at once
};

static void gradient_task(void* context, int64_t task, int64_t) {
  BackContext& y = *(BackContext*)context;
  const SqSparse& p = *y.x.call;
  const long head = task / y.sums.parts, part = task % y.sums.parts, groups = p.heads_q / p.heads_kv;
  Tile t;
  if (!take_tile(y.x, head / p.heads_kv, 0, true, &t)) return;
  const Sums sums = sums_of(y.sums, task, !y.columns);
  const long n = t.real->count;
  for (long g = 0; g < groups; g++) {
    t.h = head % p.heads_kv * groups + g;
    if (!y.columns) {
      for (long from = part * ROWS; from < n; from += y.sums.parts * ROWS) {
        load_queries(t, part_of(tokens(0, n), from));
        load_gradients(t);
        for_near_lists(p, n, [&](Way way, const List& keys) { gradient(t, sums, way, keys); });
        add_queries(t);
      }
      continue;
    }
    for (long c = part; has_columns(p, n) && c < p.stride; c += y.sums.parts) {
      const List whole = column(p, c, n);
      for (long at = 0; at < whole.count; at += ROWS) {
        load_queries(t, part_of(whole, at));
        load_gradients(t);
        gradient(t, sums, COLUMN, whole);
        add_queries(t);
      }
    }
  }
}

static int backward(const SqSparse* call) {
  const SqSparse& p = *call;
  BackContext y;
  if (!prepare(p, y.x)) return SQ_NO_MEMORY;
  if (!make_sums(y.sums, p, y.x.real, y.x.tiles)) return SQ_NO_MEMORY;
  y.columns = false;
  sq_parallel(y.sums.heads * y.sums.parts, p.threads, gradient_task, &y);
  y.columns = true;
  if (!y.x.failed && has_columns(p, p.length_q)) sq_parallel(y.sums.heads * y.sums.parts, p.threads, gradient_task, &y);
  if (!y.x.failed) write_sums(y.sums, p.threads);
  sq_release(y.sums.memory);
  sq_workspace_done();
  return y.x.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::sparse
