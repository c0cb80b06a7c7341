// Clusters of the queries of one head: k-means on the queries (Lloyd) or on the signs of projections of them (Hamming).
//
// Means are moved on a sample of the real queries, evenly over their ranks; then every query gets the nearest one. One
// task does a whole head, in order of rank: neither padding nor the number of threads changes a sum.
#pragma once

#include "../keys.h"
#include "../kmeans.h"
#include "../ranks.h"
#include "call.h"

namespace SQ_NS::clustered {

// Scratch of one head; `wide`: components of what is clustered, the queries' own or one per bit.
struct QueryScratch {
  long wide, ldw, ldk, most;
  float *given, *matrix;             // [TOKENS][ldk]; panels of D rows
  float *rows, *panels, *block;      // [most][ldw]; [most / TOKENS][wide][TOKENS]; [wide][TOKENS]
  float *means, *votes, *bias, *middle, *scores;
  int32_t *assigned, *count;
};

static QueryScratch query_scratch(const SqClustered& p, float* memory, long* floats) {
  QueryScratch s;
  s.wide = p.bits ? p.bits : p.dim;
  s.ldw = padded(s.wide, VL);
  s.ldk = padded(p.dim, VL);
  s.most = p.length_q < p.sample ? p.length_q : p.sample;
  long used = 0;
  auto take = [&](long n) {
    float* at = memory ? memory + used : nullptr;
    used += padded(n, 16);
    return at;
  };
  s.given = take(TOKENS * s.ldk);
  s.matrix = take(p.bits ? p.dim * padded(p.bits, PC) : 0);
  s.rows = take(padded(s.most, TOKENS) * s.ldw);
  s.panels = take(padded(s.most, TOKENS) * s.wide);
  s.block = take(TOKENS * s.wide);
  s.means = take(p.clusters * s.ldw);
  s.votes = take(p.bits ? p.clusters * s.ldw : 0);
  s.bias = take(p.clusters);
  s.middle = take(s.ldw);
  s.scores = take(p.clusters * TOKENS);
  s.assigned = (int32_t*)take(padded(s.most, TOKENS));
  s.count = (int32_t*)take(p.clusters);
  *floats = used;
  return s;
}

static void lay_matrix(const SqClustered& p, const QueryScratch& s) {
  for (long r = 0; r < p.bits; r += PC) {
    const long n = p.bits - r < PC ? p.bits - r : PC;
    if (n < PC) memset(s.matrix + r * p.dim, 0, sizeof(float) * PC * p.dim);
    transpose(p.matrix + r * p.dim, n, p.dim, p.dim, s.matrix + r * p.dim, PC);
  }
}

// What is clustered of n <= TOKENS queries of the given ranks, as rows of stride ldw.
template <class RankOf>
static void describe(const SqClustered& p, const QueryScratch& s, long b, long h, const Ranks& real, RankOf rank_of, long n,
                     float* rows) {
  float* to = p.bits ? s.given : rows;
  const long ld = p.bits ? s.ldk : s.ldw;
  for (long i = 0; i < n; i++) fetch(p.q, b, h, real.token(rank_of(i)), 1, p.dim, to + i * ld, ld);
  if (!p.bits) {
    for (long i = 0; i < n; i++) {
      for (long d = p.dim; d < ld; d++) to[i * ld + d] = 0.0f;
      // What is not a number has no place: it must not draw the means of others along.
      for (long d = 0; d < ld; d += VL) {
        const vf x = load(to + i * ld + d);
        store(to + i * ld + d, as_float((x - x == zero()) & bits(x)));
      }
    }
    return;
  }
  for (long r = 0; r < p.bits; r += PC) {
    const long vectors = padded(p.bits - r < PC ? p.bits - r : PC, VL) / VL;
    gemm(n, vectors, p.dim, s.given, s.ldk, 1, s.matrix + r * p.dim, PC, rows + r, s.ldw, FROM_ZERO);
  }
  // 0 and what is not a number have no sign: they vote for nothing.
  for (long i = 0; i < n; i++)
    for (long r = 0; r < s.ldw; r += VL) {
      const vf x = load(rows + i * s.ldw + r);
      store(rows + i * s.ldw + r, as_float(((x > zero()) & bits(splat(1.0f))) | ((x < zero()) & bits(splat(-1.0f)))));
    }
}

// The mean of the sample taken from its rows: what all queries have in common does not take digits from the distances.
// Returns the slack.
static float centre(const QueryScratch& s, long n) {
  vf square = zero();
  for (long d = 0; d < s.ldw; d += VL) {
    vf sum = zero();
    for (long i = 0; i < n; i++) sum += load(s.rows + i * s.ldw + d);
    const vf mean = sum / splat((float)n);
    store(s.middle + d, mean);
    for (long i = 0; i < n; i++) {
      const vf away = load(s.rows + i * s.ldw + d) - mean;
      store(s.rows + i * s.ldw + d, away);
      square += away * away;
    }
  }
  return 1e-5f * hsum(square) / (float)n;
}

// Majority votes; a tied vote, and every vote of a cluster without members, leaves the bit as it was.
static void update_codes(const Means& m, const QueryScratch& s, long n) {
  memset(s.votes, 0, sizeof(float) * m.clusters * m.ld);
  for (long i = 0; i < n; i++) {
    float* to = s.votes + s.assigned[i] * m.ld;
    for (long d = 0; d < m.ld; d += VL) store(to + d, load(to + d) + load(s.rows + i * m.ld + d));
  }
  for (long i = 0; i < m.clusters * m.ld; i += VL) {
    const vf x = load(s.votes + i);
    const vi up = x > zero(), down = x < zero();
    const vf sign = as_float((up & bits(splat(1.0f))) | (down & bits(splat(-1.0f))));
    store(m.rows + i, as_float(((up | down) & bits(sign)) | (~(up | down) & bits(load(m.rows + i)))));
  }
}

// The rank that cluster c starts from.
SQ_INLINE long start_of(const SqClustered& p, long c, long real) {
  if (real <= p.clusters) return c < real ? c : real - 1;
  const long rank = (long)(((float)c + p.starts[c]) * ((float)real / (float)p.clusters));
  return rank < real ? rank : real - 1;
}

static void cluster_queries(const SqClustered& p, long b, long h, const Ranks& real, float* memory) {
  long floats;
  const QueryScratch s = query_scratch(p, memory, &floats);
  int32_t* assigned = p.assigned + (b * p.heads_q + h) * p.length_q;
  if (real.token_of) memset(assigned, 0, sizeof(int32_t) * p.length_q);
  if (!real.count) return;
  if (p.bits) lay_matrix(p, s);
  const long all = real.count, n = all < s.most ? all : s.most;
  for (long i = 0; i < n; i += TOKENS) {
    const long some = n - i < TOKENS ? n - i : TOKENS;
    describe(p, s, b, h, real, [&](long r) { return all == n ? i + r : ((2 * (i + r) + 1) * all) / (2 * n); }, some,
             s.rows + i * s.ldw);
  }
  for (long c = 0; c < p.clusters; c++)
    describe(p, s, b, h, real, [&](long) { return start_of(p, c, all); }, 1, s.means + c * s.ldw);
  Means m = {p.clusters, s.wide, s.ldw, s.means, s.bias, 0.5f};  // codes: scores are whole numbers
  if (!p.bits) {
    m.slack = centre(s, n);
    for (long c = 0; c < p.clusters; c++)
      for (long d = 0; d < s.ldw; d += VL) store(s.means + c * s.ldw + d, load(s.means + c * s.ldw + d) - load(s.middle + d));
  } else {
    memset(s.bias, 0, sizeof(float) * p.clusters);
  }
  memset(s.rows + n * s.ldw, 0, sizeof(float) * (padded(n, TOKENS) - n) * s.ldw);
  for (long i = 0; i < n; i += TOKENS) transpose(s.rows + i * s.ldw, TOKENS, s.wide, s.ldw, s.panels + i * s.wide, TOKENS);
  for (long turn = 0; turn < p.iterations; turn++) {
    if (!p.bits) square_bias(m);
    for (long i = 0; i < n; i += TOKENS) nearest(m, s.panels + i * s.wide, TOKENS, n - i, s.scores, s.assigned + i);
    if (p.bits) update_codes(m, s, n);
    else update_means(m, n, s.rows, s.assigned, s.count);
  }
  if (!p.bits) square_bias(m);
  int32_t found[TOKENS];
  for (long i = 0; i < all; i += TOKENS) {
    const long some = all - i < TOKENS ? all - i : TOKENS;
    const float* panel = s.panels + i * s.wide;
    if (all != n) {
      // The rows of the sample are not needed any more.
      describe(p, s, b, h, real, [&](long r) { return i + r; }, some, s.rows);
      if (!p.bits)
        for (long r = 0; r < some; r++)
          for (long d = 0; d < s.ldw; d += VL) store(s.rows + r * s.ldw + d, load(s.rows + r * s.ldw + d) - load(s.middle + d));
      memset(s.rows + some * s.ldw, 0, sizeof(float) * (TOKENS - some) * s.ldw);
      transpose(s.rows, TOKENS, s.wide, s.ldw, s.block, TOKENS);
      panel = s.block;
    }
    nearest(m, panel, TOKENS, some, s.scores, found);
    for (long r = 0; r < some; r++) assigned[real.token(i + r)] = found[r];
  }
}

}  // namespace SQ_NS::clustered
