// LSH attention, forward: round after round, since the sums of a query grow from one to the next.
#pragma once

#include "round.h"

namespace SQ_NS::lsh {

// Sums before the first round: empty, or a token's own key.
static void start(Tile& t) {
  const SqLsh& p = *t.call;
  start_sums(t);
  if (p.own != SQ_OWN_ALWAYS) return;
  fetch_rows(p.k, t.b, key_head(t), t.queries, t.rows, p.dim, t.keys, t.ldk);
  for (long r = 0; r < t.rows; r++) {
    if (!is_real(t, t.queries[r])) continue;
    t.peak[r] = dot(t.q + r * t.ldk, t.keys + r * t.ldk, t.ldk), t.mass[r] = 1.0f;
    fetch_rows(p.v, t.b, key_head(t), t.queries + r, 1, p.width, t.sum + r * t.lde, t.lde);
  }
}

static void finish(Tile& t, long r, long token) {
  const SqLsh& p = *t.call;
  const bool alone = p.own == SQ_OWN_ALONE, gone = alone && !is_real(t, token);
  float* row = t.sum + r * t.lde;
  float norm = INFINITY;
  if (gone || t.mass[r] == 0.0f) {
    memset(row, 0, sizeof(float) * t.lde);
    if (alone && !gone) fetch(p.v, t.b, key_head(t), token, 1, p.width, row, t.lde);
  } else {
    normalise_row(t, r);
    norm = t.peak[r] + logf(t.mass[r]);
  }
  put(p.out, t.b, t.h, token, 1, p.width, row, t.lde);
  p.log_norm[(t.b * p.heads_q + t.h) * p.length_q + token] = norm;
}

static void forward_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqLsh& p = *x.call;
  const long head = task / x.pieces, from = task % x.pieces * PIECE, to = from + PIECE < p.length_q ? from + PIECE : p.length_q;
  Tile t;
  if (!take_tile(x, head / p.heads_q, false, &t)) return;
  set_head(x, t, head % p.heads_q);
  for_queries(x, t, from, to, [&] {
    auto kept = [&](long r) { return x.sums + (head * p.length_q + t.queries[r]) * (t.lde + 2); };
    if (x.round == 0) {
      start(t);
    } else {
      for (long r = 0; r < t.rows; r++) {
        copy_row(t.sum + r * t.lde, kept(r), t.lde);
        t.peak[r] = kept(r)[t.lde], t.mass[r] = kept(r)[t.lde + 1];
      }
    }
    for_keys(t, [&](long n) { add_keys(t, n); });
    for (long r = 0; r < t.rows; r++) {
      if (x.round == p.rounds - 1) {
        finish(t, r, t.queries[r]);
      } else {
        copy_row(kept(r), t.sum + r * t.lde, t.lde);
        kept(r)[t.lde] = t.peak[r], kept(r)[t.lde + 1] = t.mass[r];
      }
    }
  });
}

static int forward(const SqLsh* call) {
  const SqLsh& p = *call;
  Context x;
  if (!prepare(p, x)) return SQ_NO_MEMORY;
  for (x.round = 0; x.round < p.rounds && !x.failed; x.round++)
    sq_parallel(p.batch * p.heads_q * x.pieces, p.threads, forward_task, &x);
  sq_workspace_done();
  return x.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::lsh
