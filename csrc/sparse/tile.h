// A tile of queries against a tile of keys: both are lists of ranks, and each query sees an interval of its list without
// another interval inside it.
//
//   strided   window   tokens i0, i0 + 1, ...              [i - stride, i + stride]
//             column   tokens c, c + stride, ...           all but its neighbours in the column, which the window has
//   fixed     block    the blocks of the queries           its own block
//             shown    the last tokens of every block      all but those of its own block
#pragma once

#include "../ranks.h"
#include "../softmax_tile.h"
#include "call.h"

namespace SQ_NS::sparse {

constexpr long ROWS = SoftmaxTile::ROWS, COLUMNS = SoftmaxTile::COLUMNS;

// Rank i of a list: first + (i / run) step + i mod run.
struct List {
  long first, step, run, count;
  long rank(long i) const { return run == 1 ? first + i * step : i < run ? first + i : first + i / run * step + i % run; }
};

enum Way { WINDOW, COLUMN, BLOCK, SHOWN };

// What query `row` sees of a list, as places in it: [from, to) without [hole, end).
struct Sight {
  long from, to, hole, end;
};

static Sight sight_of(const SqSparse& p, Way way, const List& queries, long row, const List& keys) {
  const long i = queries.rank(row), s = p.stride;
  switch (way) {
    case WINDOW: return {i - s - keys.first, (p.causal ? i : i + s) + 1 - keys.first, 0, 0};
    case BLOCK: return {i / s * s - keys.first, (p.causal ? i + 1 : (i / s + 1) * s) - keys.first, 0, 0};
    case COLUMN: {
      const long own = i / s;
      return p.causal ? Sight{0, own - 1, 0, 0} : Sight{0, keys.count, own - 1, own + 2};
    }
    default: {
      const long own = i / s * p.summary;
      return p.causal ? Sight{0, own, 0, 0} : Sight{0, keys.count, own, own + p.summary};
    }
  }
}

struct Tile : SoftmaxTile {
  const SqSparse* call;
  const Ranks* real;
  long b, h;
  List queries;
};

// Tokens of `list` from place `from` on as rows, the rest of a row 0.
static void fetch_list(const SqTensor& x, const Tile& t, long h, const List& list, long from, long n, long dim, float* to,
                       long ld) {
  if (!t.real->token_of && list.run > 1 && from + n <= list.run) {
    fetch(x, t.b, h, list.first + from, n, dim, to, ld);
  } else {
    for (long i = 0; i < n; i++) fetch(x, t.b, h, t.real->token(list.rank(from + i)), 1, dim, to + i * ld, ld);
  }
  if (ld > dim)
    for (long i = 0; i < n; i++) memset(to + i * ld + dim, 0, sizeof(float) * (ld - dim));
}

static void load_queries(Tile& t, const List& queries) {
  const SqSparse& p = *t.call;
  t.queries = queries, t.rows = queries.count;
  fetch_list(p.q, t, t.h, queries, 0, t.rows, p.dim, t.q, t.ldk);
  for (long i = 0; i < t.rows * t.ldk; i += VL) store(t.q + i, load(t.q + i) * splat(p.scale));
}

// Keys and values [from, from + n) of a list, n <= COLUMNS.
static void load_keys(Tile& t, const List& keys, long from, long n) {
  const SqSparse& p = *t.call;
  const long h = t.h / (p.heads_q / p.heads_kv);
  fetch_list(p.k, t, h, keys, from, n, p.dim, t.keys, t.ldk);
  lay_panels(t.keys, n, p.dim, t.ldk, t.panels);
  fetch_list(p.v, t, h, keys, from, n, p.width, t.values, t.lde);
}

// Scores with the loaded keys, -inf where a query does not see one.
static void score(Tile& t, Way way, const List& keys, long from, long n) {
  times_panels(t.rows, n, t.call->dim, t.q, t.ldk, t.panels, t.scores, t.lds);
  const long lanes = padded(n, VL);
  for (long r = 0; r < t.rows; r++) {
    const Sight s = sight_of(*t.call, way, t.queries, r, keys);
    float* row = t.scores + r * t.lds;
    auto inside = [&](long at) { return at - from < 0 ? 0 : at - from > n ? n : at - from; };
    const long first = inside(s.from), last = inside(s.to);
    for (long j = 0; j < first; j++) row[j] = -INFINITY;
    for (long j = last > first ? last : first; j < lanes; j++) row[j] = -INFINITY;
    for (long j = inside(s.hole); j < inside(s.end); j++) row[j] = -INFINITY;
  }
}

// The places of a list that some query of the tile sees, cut into what is loaded at a time.
template <class Body>
static void for_keys(Tile& t, Way way, const List& keys, Body body) {
  long from = keys.count, to = 0;
  for (long r = 0; r < t.rows; r++) {
    const Sight s = sight_of(*t.call, way, t.queries, r, keys);
    from = s.from < from ? s.from : from;
    to = s.to > to ? s.to : to;
  }
  from = from < 0 ? 0 : from, to = to < keys.count ? to : keys.count;
  for (long at = from; at < to; at += COLUMNS) {
    const long n = to - at < COLUMNS ? to - at : COLUMNS;
    load_keys(t, keys, at, n);
    score(t, way, keys, at, n);
    body(at, n);
  }
}

// -- the lists of a sequence of n real tokens ---------------------------------------------------------------------------

constexpr long ALL = (long)1 << 40;

SQ_INLINE List tokens(long from, long count) { return {from, 0, ALL, count}; }

// The tokens c, c + stride, c + 2 stride, ...
SQ_INLINE List column(const SqSparse& p, long c, long n) { return {c, p.stride, 1, (n - c + p.stride - 1) / p.stride}; }

SQ_INLINE List part_of(const List& list, long from) {
  const long left = list.count - from;
  return {list.rank(from), list.step, list.run, left < ROWS ? left : ROWS};
}

// The last `summary` tokens of every block, as far as they exist.
SQ_INLINE List shown_tokens(const SqSparse& p, long n) {
  const long rest = n % p.stride - (p.stride - p.summary);
  return {p.stride - p.summary, p.stride, p.summary, n / p.stride * p.summary + (rest > 0 ? rest : 0)};
}

// Whether a column has tokens beyond the window.
SQ_INLINE bool has_columns(const SqSparse& p, long n) { return !p.summary && n > 2 * p.stride; }

// What queries that stand side by side see, but for columns.
template <class Body>
SQ_INLINE void for_near_lists(const SqSparse& p, long n, Body body) {
  body(p.summary ? BLOCK : WINDOW, tokens(0, n));
  if (p.summary && n > p.stride) body(SHOWN, shown_tokens(p, n));
}

// -- a call ---------------------------------------------------------------------------------------------------------------

struct Context {
  const SqSparse* call;
  Ranks* real;        // [B]
  float* far;         // strided: [B * Hq][L][lde + 2], sums over the column, their largest score and mass
  long tiles;         // query tiles of a head
  bool failed;
};

static bool prepare(const SqSparse& p, Context& x) {
  x.call = &p;
  x.failed = false;
  x.tiles = (p.length_q + ROWS - 1) / ROWS;
  const long table = padded((long)(p.batch * sizeof(Ranks)) / 4 + 4, 16), ints = p.key_mask.data ? p.batch * p.length_k : 0;
  const long wide = padded(p.width, VL) + 2;
  const long far = !p.dout.data && has_columns(p, p.length_q) ? p.batch * p.heads_q * p.length_q * wide : 0;
  float* memory = sq_workspace(table + padded(ints, 16) + far);
  if (!memory) return false;
  x.real = (Ranks*)memory;
  x.far = memory + table + padded(ints, 16);
  for (long b = 0; b < p.batch; b++)
    x.real[b] = real_tokens(p.key_mask, b, p.length_k, (int32_t*)(memory + table) + b * p.length_k);
  return true;
}

}  // namespace SQ_NS::sparse
