// Sparse attention, backward: weights formed again from the log normaliser of the forward.
//
//   P = e^{score - log normaliser},   g = P (dout.v - dout.out);   dq += g k,  dk += g q,  dv += P dout
//
// One task adds up the gradients of one key head (or of some of its tiles, where heads are fewer than threads).
#pragma once

#include "../sums.h"
#include "forward.h"

namespace SQ_NS::sparse {

struct Back {
  Tile t;
  Sums sums;
  float *dout, *dq, *slope, *norm;  // [ROWS][lde], [ROWS][ldk] with respect to scaled queries; [ROWS]: dout.out
  float *value_panels, *products;   // panels of E rows; [ROWS][lds]
  float *dk, *dv;                   // [COLUMNS][ldk], [COLUMNS][lde]
};

static Back cut_back(const SqSparse& p, float* memory, long* floats) {
  Back w = {};
  long used;
  w.t = cut_tile(p, memory, &used);
  auto take = [&](long n) {
    float* at = memory ? memory + used : nullptr;
    used += padded(n, 16);
    return at;
  };
  w.dout = take(ROWS * w.t.lde);
  w.dq = take(ROWS * w.t.ldk);
  w.slope = take(ROWS);
  w.norm = take(ROWS);
  w.value_panels = take(COLUMNS * p.width);
  w.products = take(ROWS * w.t.lds);
  w.dk = take(COLUMNS * w.t.ldk);
  w.dv = take(COLUMNS * w.t.lde);
  *floats = used;
  return w;
}

static void load_gradients(Back& w) {
  Tile& t = w.t;
  const SqSparse& p = *t.call;
  fetch_list(p.dout, t, t.h, t.queries, 0, t.rows, p.width, w.dout, t.lde);
  fetch_list(p.out, t, t.h, t.queries, 0, t.rows, p.width, t.sum, t.lde);
  for (long r = 0; r < t.rows; r++) {
    vf sum = zero();
    for (long e = 0; e < t.lde; e += VL) sum += load(w.dout + r * t.lde + e) * load(t.sum + r * t.lde + e);
    w.slope[r] = hsum(sum);
    w.norm[r] = p.log_norm[(t.b * p.heads_q + t.h) * p.length_q + t.real->token(t.queries.rank(r))];
  }
  memset(w.dq, 0, sizeof(float) * t.rows * t.ldk);
}

static void gradient(Back& w, Way way, const List& keys) {
  Tile& t = w.t;
  const SqSparse& p = *t.call;
  for_keys(t, way, keys, [&](long from, long n) {
    const long vectors = padded(n, VL) / VL;
    lay_panels(t.values, n, p.width, t.lde, w.value_panels);
    times_panels(t.rows, n, p.width, w.dout, t.lde, w.value_panels, w.products, t.lds);
    for (long r = 0; r < t.rows; r++) slopes(t.scores + r * t.lds, w.products + r * t.lds, vectors, w.norm[r], w.slope[r]);
    times_rows(t.rows, n, w.products, t.lds, t.keys, t.ldk, w.dq, FROM_C);
    memset(w.dk, 0, sizeof(float) * n * t.ldk);
    memset(w.dv, 0, sizeof(float) * n * t.lde);
    add_transposed(n, t.rows, w.products, t.lds, t.q, t.ldk, w.dk);
    add_transposed(n, t.rows, t.scores, t.lds, w.dout, t.lde, w.dv);
    for (long j = 0; j < n; j++) add_to_sums(w.sums, keys.rank(from + j), w.dk + j * t.ldk, w.dv + j * t.lde);
  });
}

// dq of a tile, added to what is there.
static void add_queries(Back& w) {
  Tile& t = w.t;
  const SqSparse& p = *t.call;
  for (long r = 0; r < t.rows; r++) {
    float* to = (float*)p.dq.data + offset_of(p.dq, t.b, t.h, t.real->token(t.queries.rank(r)));
    for (long d = 0; d < p.dim; d++) to[d] += p.scale * w.dq[r * t.ldk + d];
  }
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
  long floats;
  cut_back(p, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(y.x.failed = true);
  Back w = cut_back(p, memory, &floats);
  Tile& t = w.t;
  w.sums = sums_of(y.sums, task, !y.columns);
  t.b = head / p.heads_kv, t.real = &y.x.real[t.b];
  const long n = t.real->count;
  for (long g = 0; g < groups; g++) {
    t.h = head % p.heads_kv * groups + g;
    if (!y.columns) {
      for (long from = part * ROWS; from < n; from += y.sums.parts * ROWS) {
        load_queries(t, part_of(tokens(0, n), from));
        load_gradients(w);
        for_near_lists(p, n, [&](Way way, const List& keys) { gradient(w, way, keys); });
        add_queries(w);
      }
      continue;
    }
    for (long c = part; has_columns(p, n) && c < p.stride; c += y.sums.parts) {
      const List whole = column(p, c, n);
      for (long at = 0; at < whole.count; at += ROWS) {
        load_queries(t, part_of(whole, at));
        load_gradients(w);
        gradient(w, COLUMN, whole);
        add_queries(w);
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
