// Multipole attention, backward. Choices are constants; weights are formed again from the log normaliser of the forward.
//
//   P = e^{score - log normaliser},   g = P (dout . value - dout . out)
//   single keys       dq += g k,                   dk += g q,        dv += P dout
//   cluster c         dq += g (mu + [t < cap] var q), dmu += g q, dvar += [t < cap] g |q|^2 / 2, dvbar += P dout
//   its members       dk += dmu / n + dvar 2 (k - mu) / (n D),       dv += dvbar / n
//
// One task adds up the gradients of one key head (or of a piece of its queries, where heads are fewer than threads).
#pragma once

#include "forward.h"

namespace SQ_NS::multipole {

// Sums over queries for one key head.
struct Gradients {
  float *mean, *variance, *mean_value;      // [ldc][ldk], [ldc], [ldc][lde]
  float *keys, *values;                     // sorted by cluster: [chunks * chunk][ldk], [..][lde]
  float *keys_by_rank, *values_by_rank;     // [S][ldk], [S][lde]
};

static long cut_gradients(const SqMultipole& p, const Plan& plan, float* memory, Gradients* to) {
  long used = 0;
  auto take = [&](long n) {
    float* at = memory ? memory + used : nullptr;
    used += padded(n, 16);
    return at;
  };
  Gradients g;
  g.mean = take(plan.ldc * plan.ldk);
  g.variance = take(plan.ldc);
  g.mean_value = take(plan.ldc * plan.lde);
  g.keys = take(plan.chunks * p.chunk * plan.ldk);
  g.values = take(plan.chunks * p.chunk * plan.lde);
  g.keys_by_rank = take(p.length_k * plan.ldk);
  g.values_by_rank = take(p.length_k * plan.lde);
  if (to) *to = g;
  return used;
}

// A group of queries with the gradients of its outputs.
struct Way {
  Group k;
  Gradients sums;
  float *dout, *dq;      // [most][lde], [most][ldq] with respect to scaled queries
  float *slope;          // [most]: dout . out
  float *norm;           // [most]: log normaliser, 0 where no key is visible
  float* key_slopes;     // like k.key_scores
};

static Way cut_way(const SqMultipole& p, const Plan& plan, float* memory, long* floats) {
  Way w;
  long used;
  w.k = cut_group(p, plan, memory, &used);
  auto take = [&](long n) {
    float* at = memory ? memory + used : nullptr;
    used += padded(n, 16);
    return at;
  };
  w.dout = take(w.k.most * plan.lde);
  w.dq = take(w.k.most * plan.ldk);
  w.slope = take(w.k.most);
  w.norm = take(w.k.most);
  const long columns = plan.chunks * plan.slots, chosen = chosen_keys(p, plan, true);
  const long clusters = chosen < columns ? chosen : columns;
  w.key_slopes = take(w.k.most * (chosen + clusters * (VL - 1)) + VL);
  *floats = used;
  return w;
}

static void load_gradients(Way& w) {
  Group& k = w.k;
  const SqMultipole& p = *k.call;
  const long lde = k.plan->lde;
  float* out = k.near.sum;
  fetch(p.dout, k.b, k.h, k.first, k.n, p.width, w.dout, lde);
  fetch(p.out, k.b, k.h, k.first, k.n, p.width, out, lde);
  const float* norm = p.log_norm + (k.b * p.heads_q + k.h) * p.length_q + k.first;
  for (long i = 0; i < k.n; i++) {
    for (long e = p.width; e < lde; e++) w.dout[i * lde + e] = out[i * lde + e] = 0.0f;
    vf sum = zero();
    for (long e = 0; e < lde; e += VL) sum += load(w.dout + i * lde + e) * load(out + i * lde + e);
    w.slope[i] = hsum(sum);
    w.norm[i] = norm[i] > -INFINITY ? norm[i] : 0.0f;
  }
  memset(w.dq, 0, sizeof(float) * k.n * k.ldq);
}

static void far_gradient(Way& w, long i0, long n) {
  Group& k = w.k;
  const SqMultipole& p = *k.call;
  const Clusters& c = *k.clusters;
  const long columns = c.first[k.sight.chunks], vectors = padded(columns, VL) / VL, lde = k.plan->lde;
  const float *q = k.q + i0 * k.ldq, *dout = w.dout + i0 * lde;
  float* dq = w.dq + i0 * k.ldq;
  far_masses(k, i0, n);
  if (!columns) return;
  times_panels(n, columns, p.width, dout, lde, c.mean_value_t, k.other, k.lds);
  for (long r = 0; r < n; r++) {
    float *weights = k.scores + r * k.lds, *g = k.other + r * k.lds;
    slopes(weights, g, vectors, w.norm[i0 + r], w.slope[i0 + r]);
    const vf half = splat(0.5f * k.square[i0 + r]);
    vf total = zero();
    for (long j = 0; j < vectors * VL; j += VL) {
      const vf variance = load(c.variance + j);
      const vf open = as_float((half * variance < splat(p.cap)) & bits(load(g + j)));
      total += open * variance;
      store(w.sums.variance + j, load(w.sums.variance + j) + open * half);
    }
    const vf by = splat(hsum(total));
    for (long d = 0; d < k.ldq; d += VL) store(dq + r * k.ldq + d, load(dq + r * k.ldq + d) + by * load(q + r * k.ldq + d));
  }
  times_rows(n, columns, k.other, k.lds, c.mean, k.ldq, dq, FROM_C);
  add_transposed(columns, n, k.other, k.lds, q, k.ldq, w.sums.mean);
  add_transposed(columns, n, k.scores, k.lds, dout, lde, w.sums.mean_value);
}

// R rows of `to` += sum over the entries of a column: weight of the entry for that row times the entry's row.
template <int R, int N>
SQ_INLINE void entry_tile(const Group& k, long from, long end, const float* weights, const float* rows, long ld, float* to,
                          long at) {
  vf s[R][N];
  SQ_UNROLL for (int i = 0; i < R; i++) SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] = load(to + i * ld + at + j * VL);
  for (long e = from; e < end; e++) {
    const float *row = rows + k.entry_row[e] * ld + at, *weight = weights + k.entry_at[e];
    vf b[N];
    SQ_UNROLL for (int j = 0; j < N; j++) b[j] = load(row + j * VL);
    SQ_UNROLL for (int i = 0; i < R; i++) {
      const vf a = splat(weight[i]);
      SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] += a * b[j];
    }
  }
  SQ_UNROLL for (int i = 0; i < R; i++) SQ_UNROLL for (int j = 0; j < N; j++) store(to + i * ld + at + j * VL, s[i][j]);
}

template <int R>
static void entry_rows(const Group& k, long from, long end, const float* weights, const float* rows, long ld, float* to) {
  long at = 0;
  for (; at + 4 * VL <= ld; at += 4 * VL) entry_tile<R, 4>(k, from, end, weights, rows, ld, to, at);
  for (; at + 2 * VL <= ld; at += 2 * VL) entry_tile<R, 2>(k, from, end, weights, rows, ld, to, at);
  for (; at < ld; at += VL) entry_tile<R, 1>(k, from, end, weights, rows, ld, to, at);
}

// Keys or values of chosen clusters += weights times rows of the queries that have chosen them.
static void add_to_members(const Group& k, const float* weights, const float* rows, long ld, float* sums) {
  const Clusters& c = *k.clusters;
  for (long column = 0; column < c.first[k.sight.chunks]; column++) {
    const long from = k.entry_of[column], end = k.entry_of[column + 1], size = size_of(c, column);
    if (from == end) continue;
    float* to = sums + c.row_at[column] * ld;
    long i = 0;
    for (; i + 3 <= size; i += 3) entry_rows<3>(k, from, end, weights + i, rows, ld, to + i * ld);
    for (; i < size; i++) entry_rows<1>(k, from, end, weights + i, rows, ld, to + i * ld);
  }
}

static void chosen_gradient(Way& w) {
  Group& k = w.k;
  const Clusters& c = *k.clusters;
  const SqMultipole& p = *k.call;
  const long lde = k.plan->lde;
  list_choices(k);
  chosen_products(k, k.q, k.ldq, c.panels, p.dim, k.key_scores);
  chosen_products(k, w.dout, lde, c.value_panels, p.width, w.key_slopes);
  for (long i = 0; i < k.n; i++) {
    const long at = k.score_at[i], lanes = k.score_at[i + 1] - at;
    float *weights = k.key_scores + at, *g = w.key_slopes + at;
    exponentiate(weights, lanes / VL, w.norm[i]);
    for (long j = 0; j < lanes; j += VL) {
      const vf weight = load(weights + j);  // 0 in lanes without a key, where dout . value is -inf
      const vf away = weight * (load(g + j) - splat(w.slope[i]));
      store(g + j, as_float((weight != zero()) & bits(away)));
    }
  }
  chosen_sums(k, w.key_slopes, c.key_rows, k.ldq, w.dq);
  add_to_members(k, w.key_slopes, k.q, k.ldq, w.sums.keys);
  add_to_members(k, k.key_scores, w.dout, lde, w.sums.values);
}

static void dense_gradient(Way& w, long i0, long n) {
  Group& k = w.k;
  const SqMultipole& p = *k.call;
  const Clusters& c = *k.clusters;
  const long lde = k.plan->lde;
  const float *q = k.q + i0 * k.ldq, *dout = w.dout + i0 * lde;
  long end = 0;
  for (long i = i0; i < i0 + n; i++) end = k.end[i] > end ? k.end[i] : end;
  for (long from = k.sight.dense, keys; from < end; from += keys) {
    keys = dense_step(k, from, end);
    const long vectors = padded(keys, VL) / VL, block = from / p.chunk, at = from - block * p.chunk;
    dense_scores(k, i0, n, from, keys, k.scores);
    times_panels(n, keys, p.width, dout, lde, c.value_panels_by_rank + (block * k.plan->ldb + at) * p.width, k.other, k.lds);
    for (long r = 0; r < n; r++)
      slopes(k.scores + r * k.lds, k.other + r * k.lds, vectors, w.norm[i0 + r], w.slope[i0 + r]);
    times_rows(n, keys, k.other, k.lds, c.key_rows_by_rank + from * k.ldq, k.ldq, w.dq + i0 * k.ldq, FROM_C);
    add_transposed(keys, n, k.other, k.lds, q, k.ldq, w.sums.keys_by_rank + from * k.ldq);
    add_transposed(keys, n, k.scores, k.lds, dout, lde, w.sums.values_by_rank + from * lde);
  }
}

static void write_queries(Way& w) {
  Group& k = w.k;
  const SqMultipole& p = *k.call;
  for (long i = 0; i < k.n * k.ldq; i += VL) store(w.dq + i, load(w.dq + i) * splat(p.scale));
  put(p.dq, k.b, k.h, k.first, k.n, p.dim, w.dq, k.ldq);
}

struct BackContext {
  Context x;
  float* sums;  // [B * H * parts][floats]
  long floats, parts, part;
};

static void gradient_task(void* context, int64_t task, int64_t) {
  BackContext& y = *(BackContext*)context;
  Context& x = y.x;
  const SqMultipole& p = *x.call;
  const long head = task / y.parts, part = task % y.parts, groups = p.heads_q / p.heads_kv;
  long floats;
  cut_way(p, x.plan, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  Way w = cut_way(p, x.plan, memory, &floats);
  float* sums = y.sums + task * y.floats;
  memset(sums, 0, sizeof(float) * y.floats);
  cut_gradients(p, x.plan, sums, &w.sums);
  Group& k = w.k;
  k.clusters = &x.plan.heads[head];
  k.b = head / p.heads_kv;
  const long from = part * y.part, to = from + y.part < p.length_q ? from + y.part : p.length_q;
  for (long g = 0; g < groups; g++) {
    k.h = head % p.heads_kv * groups + g;
    for_groups(k, tokens_of(x, k.b), from, to, [&w](Group& k) {
      load_queries(k);
      load_gradients(w);
      for_rows(k, [&w](Group&, long i0, long n) { far_gradient(w, i0, n); });
      if (k.clusters->first[k.sight.chunks]) chosen_gradient(w);
      for_rows(k, [&w](Group&, long i0, long n) { dense_gradient(w, i0, n); });
      write_queries(w);
    });
  }
}

SQ_INLINE void add_row(float* to, const float* from, long n, float by) {
  for (long i = 0; i < n; i++) to[i] += by * from[i];
}

// Gradients of clusters handed to their members, and everything to where the tokens stand.
static void scatter_task(void* context, int64_t head, int64_t) {
  BackContext& y = *(BackContext*)context;
  Context& x = y.x;
  const SqMultipole& p = *x.call;
  const Clusters& c = x.plan.heads[head];
  const Plan& plan = x.plan;
  const long b = head / p.heads_kv, h = head % p.heads_kv;
  float* sums = y.sums + head * y.parts * y.floats;
  for (long part = 1; part < y.parts; part++) add_row(sums, sums + part * y.floats, y.floats, 1.0f);
  Gradients g;
  cut_gradients(p, plan, sums, &g);
  for (long chunk = 0; chunk < c.chunks; chunk++) {
    const int32_t* order = p.order + (head * plan.chunks + chunk) * p.chunk - chunk * p.chunk;
    for (long column = c.first[chunk]; column < c.first[chunk + 1]; column++) {
      const float part = 1.0f / c.size[column], width = 2.0f * g.variance[column] * part / (float)p.dim;
      for (long row = c.row_at[column]; row < c.row_at[column + 1]; row++) {
        const long rank = chunk * p.chunk + order[row];
        float *dk = g.keys_by_rank + rank * plan.ldk, *dv = g.values_by_rank + rank * plan.lde;
        const float *key = c.key_rows + row * plan.ldk, *mean = c.mean + column * plan.ldk;
        for (long d = 0; d < p.dim; d++)
          dk[d] += g.keys[row * plan.ldk + d] + g.mean[column * plan.ldk + d] * part + width * (key[d] - mean[d]);
        for (long e = 0; e < p.width; e++)
          dv[e] += g.values[row * plan.lde + e] + g.mean_value[column * plan.lde + e] * part;
      }
    }
  }
  const int32_t* token_of = tokens_of(x, b);
  for (long rank = 0; rank < c.real; rank++) {
    const long token = token_of ? token_of[rank] : rank;
    put(p.dk, b, h, token, 1, p.dim, g.keys_by_rank + rank * plan.ldk, plan.ldk);
    put(p.dv, b, h, token, 1, p.width, g.values_by_rank + rank * plan.lde, plan.lde);
  }
}

static int backward(const SqMultipole* call) {
  const SqMultipole& p = *call;
  BackContext y;
  if (!prepare(p, y.x)) return SQ_NO_MEMORY;
  const long heads = p.batch * p.heads_kv;
  y.parts = heads >= p.threads ? 1 : (p.threads + heads - 1) / heads;
  y.part = padded((p.length_q + y.parts - 1) / y.parts, GROUP);
  y.floats = padded(cut_gradients(p, y.x.plan, nullptr, nullptr), 16);
  y.sums = sq_allocate(heads * y.parts * y.floats);
  if (!y.sums) return SQ_NO_MEMORY;
  sq_parallel(heads * y.parts, p.threads, gradient_task, &y);
  if (!y.x.failed) sq_parallel(heads, p.threads, scatter_task, &y);
  sq_release(y.sums);
  sq_workspace_done();
  return y.x.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::multipole
