// One round: queries and keys sorted by chunk, and what the queries of one chunk see of it and of the chunk before.
#pragma once

#include "../ranks.h"
#include "../softmax_tile.h"
#include "call.h"

namespace SQ_NS::lsh {

constexpr long ROWS = SoftmaxTile::ROWS, COLUMNS = SoftmaxTile::COLUMNS;
constexpr long PIECE = 1024;  // queries of a task, in the order of the round

struct Context {
  const SqLsh* call;
  int32_t *query_order, *key_order;  // [B * Hq][R][L] and [.][.][S]: tokens by chunk, then by position
  int32_t* seen;                     // [B * Hq][R]: keys of the order, those that nothing sees left out
  float* sums;                       // forward: [B * Hq][L][lde + 2], sums of the rounds so far, largest score and mass
  long pieces, round;
  bool failed;
};

// Tokens with a chunk, sorted by it; `count` takes chunks + 1 integers. Returns how many they are.
static long sort_by_chunk(const int32_t* chunk, long length, long chunks, int32_t* count, int32_t* order) {
  memset(count, 0, sizeof(int32_t) * (chunks + 1));
  for (long i = 0; i < length; i++)
    if (chunk[i] >= 0) count[chunk[i] + 1]++;
  for (long c = 0; c < chunks; c++) count[c + 1] += count[c];
  const long all = count[chunks];
  for (long i = 0; i < length; i++)
    if (chunk[i] >= 0) order[count[chunk[i]]++] = (int32_t)i;
  return all;
}

static void sort_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqLsh& p = *x.call;
  int32_t* count = (int32_t*)sq_scratch(p.chunks + 1);
  if (!count) return (void)(x.failed = true);
  const long q = task * p.length_q, k = task * p.length_k;
  sort_by_chunk(p.query_chunk + q, p.length_q, p.chunks, count, x.query_order + q);
  x.seen[task] = (int32_t)sort_by_chunk(p.key_chunk + k, p.length_k, p.chunks, count, x.key_order + k);
}

static bool prepare(const SqLsh& p, Context& x) {
  x.call = &p, x.failed = false, x.round = 0;
  x.pieces = (p.length_q + PIECE - 1) / PIECE;
  const long rounds = p.batch * p.heads_q * p.rounds;
  const long queries = padded(rounds * p.length_q, 16), keys = padded(rounds * p.length_k, 16);
  const long sums = p.dout.data ? 0 : p.batch * p.heads_q * p.length_q * (padded(p.width, VL) + 2);
  float* memory = sq_workspace(queries + keys + padded(rounds, 16) + sums);
  if (!memory) return false;
  x.query_order = (int32_t*)memory;
  x.key_order = x.query_order + queries;
  x.seen = x.key_order + keys;
  x.sums = (float*)(x.seen + padded(rounds, 16));
  sq_parallel(rounds, p.threads, sort_task, &x);
  return !x.failed;
}

struct Tile : SoftmaxTile {
  const SqLsh* call;
  long b, h, round;
  const int32_t *query_chunk, *key_chunk, *key_order;  // of this head: [R][L], [R][S]; of this round: [S]
  long seen;
  const int32_t* queries;  // [rows]: their tokens
  int32_t* key_table;      // [1 + round][COLUMNS]: positions of the loaded keys, and their chunks in earlier rounds
};

static bool take_tile(Context& x, long b, bool backward, Tile* t) {
  const SqLsh& p = *x.call;
  long floats;
  cut_tile(*t, p.dim, p.width, backward, nullptr, &floats);
  float* memory = sq_scratch(floats + (1 + p.rounds) * COLUMNS);
  if (!memory) {
    x.failed = true;
    return false;
  }
  cut_tile(*t, p.dim, p.width, backward, memory, &floats);
  t->key_table = (int32_t*)(memory + floats);
  t->call = &p, t->b = b, t->round = x.round;
  return true;
}

static void set_head(const Context& x, Tile& t, long h) {
  const SqLsh& p = *x.call;
  const long at = (t.b * p.heads_q + h) * p.rounds;
  t.h = h;
  t.query_chunk = p.query_chunk + at * p.length_q;
  t.key_chunk = p.key_chunk + at * p.length_k;
  t.key_order = x.key_order + (at + t.round) * p.length_k;
  t.seen = x.seen[at + t.round];
}

SQ_INLINE bool is_real(const Tile& t, long token) { return t.key_chunk[token] >= 0; }

static void fetch_rows(const SqTensor& x, long b, long h, const int32_t* tokens, long n, long dim, float* to, long ld) {
  for (long i = 0; i < n; i++) fetch(x, b, h, tokens[i], 1, dim, to + i * ld, ld);
  if (ld > dim)
    for (long i = 0; i < n; i++) memset(to + i * ld + dim, 0, sizeof(float) * (ld - dim));
}

SQ_INLINE long key_head(const Tile& t) { return t.h / (t.call->heads_q / t.call->heads_kv); }

// The place in the key order of the first key whose chunk is not below `chunk`.
static long first_of(const Tile& t, long chunk) {
  const int32_t* number = t.key_chunk + t.round * t.call->length_k;
  long low = 0, high = t.seen;
  while (low < high) {
    const long middle = (low + high) / 2;
    if (number[t.key_order[middle]] < chunk) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Keys and values from place `from` of the order on, and what decides who sees them.
static void load_keys(Tile& t, long from, long n) {
  const SqLsh& p = *t.call;
  const int32_t* tokens = t.key_order + from;
  const long h = key_head(t);
  fetch_rows(p.k, t.b, h, tokens, n, p.dim, t.keys, t.ldk);
  lay_panels(t.keys, n, p.dim, t.ldk, t.panels);
  fetch_rows(p.v, t.b, h, tokens, n, p.width, t.values, t.lde);
  memcpy(t.key_table, tokens, sizeof(int32_t) * n);
  for (long r = 0; r < t.round; r++)
    for (long j = 0; j < n; j++) t.key_table[(1 + r) * COLUMNS + j] = t.key_chunk[r * p.length_k + tokens[j]];
}

SQ_INLINE vi load_integers(const int32_t* p) { vi x; memcpy(&x, p, sizeof x); return x; }
SQ_INLINE vi splat_integer(int32_t x) { return x - (vi){}; }

// Scores with the loaded keys, -inf where a pair does not count in this round.
static void score(Tile& t, long n) {
  const SqLsh& p = *t.call;
  times_panels(t.rows, n, p.dim, t.q, t.ldk, t.panels, t.scores, t.lds);
  const vi nothing = bits(splat(-INFINITY)), one = splat_integer(1);
  for (long i = 0; i < t.rows; i++) {
    float* row = t.scores + i * t.lds;
    const vi position = splat_integer(t.queries[i]);
    for (long j = 0; j < n; j += VL) {
      const vi key = load_integers(t.key_table + j);
      vi hidden = {};
      if (p.causal) hidden = p.own == SQ_OWN_ANY ? key > position : key >= position;
      else if (p.own != SQ_OWN_ANY) hidden = key == position;
      for (long r = 0; r < t.round; r++) {  // 0 or 1: that round has counted the pair
        const vi offset = splat_integer(t.query_chunk[r * p.length_q + t.queries[i]]) - load_integers(t.key_table + (1 + r) * COLUMNS + j);
        hidden |= (offset & ~one) == (vi){};
      }
      store(row + j, as_float((bits(load(row + j)) & ~hidden) | (nothing & hidden)));
    }
    for (long j = n; j < padded(n, VL); j++) row[j] = -INFINITY;
  }
}

// body(n) for all keys that the queries of the tile see, as many at a time as are loaded; body may read tokens of the keys
// from the first row of `key_table`.
template <class Body>
static void for_keys(Tile& t, Body body) {
  const long chunk = t.query_chunk[t.round * t.call->length_q + t.queries[0]], to = first_of(t, chunk + 1);
  for (long from = first_of(t, chunk - 1); from < to; from += COLUMNS) {
    const long n = to - from < COLUMNS ? to - from : COLUMNS;
    load_keys(t, from, n);
    score(t, n);
    body(n);
  }
}

// body() for queries [from, to) of this round's order, as many at a time as are of one chunk and fit a tile. They are loaded.
template <class Body>
static void for_queries(const Context& x, Tile& t, long from, long to, Body body) {
  const SqLsh& p = *t.call;
  const int32_t* order = x.query_order + ((t.b * p.heads_q + t.h) * p.rounds + t.round) * p.length_q;
  const int32_t* chunk = t.query_chunk + t.round * p.length_q;
  for (long next; from < to; from = next) {
    for (next = from + 1; next < to && next - from < ROWS && chunk[order[next]] == chunk[order[from]];) next++;
    t.queries = order + from, t.rows = next - from;
    fetch_rows(p.q, t.b, t.h, t.queries, t.rows, p.dim, t.q, t.ldk);
    for (long i = 0; i < t.rows * t.ldk; i += VL) store(t.q + i, load(t.q + i) * splat(p.scale));
    body();
  }
}

SQ_INLINE float dot(const float* a, const float* b, long n) {
  vf sum = zero();
  for (long i = 0; i < n; i += VL) sum += load(a + i) * load(b + i);
  return hsum(sum);
}

}  // namespace SQ_NS::lsh
