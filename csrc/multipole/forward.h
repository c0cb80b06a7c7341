// Multipole attention, forward: blocks of queries against cluster means, chosen clusters key by key, and dense keys.
//
//   group.h   scores with means, log masses l and the criterion of selection; sums over the clusters that are not chosen
//   parts.h   sums over the keys of chosen clusters, and over dense keys: those in no complete chunk and, when causal, the
//             query's own chunk
//
// Each part is a sum relative to its own largest exponent; they are joined here under one normaliser.
#pragma once

#include "single.h"

namespace SQ_NS::multipole {

static void write_choices(const Group& k, long i) {
  const SqMultipole& p = *k.call;
  const long row = (k.b * p.heads_q + k.h) * p.length_q + k.first + i;
  const Selection& s = k.selection[i];
  if (p.exact) p.exact[row] = (int32_t)(s.limited ? -s.keys - 1 : s.keys);
  if (!p.selection || p.forced) return;
  uint8_t* to = p.selection + row * k.plan->chunks * k.plan->slots;
  for (long j = 0; j < s.count; j++) to[k.clusters->slot[s.columns[j]]] = 1;
  if (k.sight.dense) return;
  const Clusters& c = *k.clusters;  // clusters that were taken as dense keys are chosen ones
  const long own = p.causal ? (k.end[i] > 0 ? (k.end[i] - 1) / p.chunk : 0) : c.chunks;
  for (long j = 0; j < c.first[own < c.chunks ? own : c.chunks]; j++) to[c.slot[j]] = 1;
}

// Expected squared error of the queries [i0, i0 + n), whose output is in `near`; share: what turns far weights relative to
// their peak into weights of the output.
static void write_estimates(Group& k, long i0, long n, const float* share) {
  const SqMultipole& p = *k.call;
  const Clusters& c = *k.clusters;
  const long lde = k.plan->lde, columns = c.first[k.sight.chunks], vectors = padded(columns, VL) / VL;
  const float* out = k.near.sum + i0 * lde;
  float* to = p.estimate + 2 * ((k.b * p.heads_q + k.h) * p.length_q + k.first + i0);
  if (columns) {
    times_panels(n, columns, p.dim, k.q + i0 * k.ldq, k.ldq, c.mean_t, k.scores, k.lds);
    times_panels(n, columns, p.width, out, lde, c.mean_value_t, k.other, k.lds);
  }
  for (long r = 0; r < n; r++) {
    const float norm = norm_of(out + r * lde, lde);
    vf total = zero();
    if (columns) {
      const Selection& s = k.selection[i0 + r];
      float *row = k.scores + r * k.lds, peak, top;
      for (long j = columns; j < vectors * VL; j++) row[j] = -INFINITY;
      log_masses(k, i0 + r, row, vectors, &peak, &top);
      for (long j = 0; j < s.count; j++) row[s.columns[j]] = -INFINITY;
      for (long j = 0; j < vectors * VL; j += VL)
        total += expected_error(k, i0 + r, j, vexp(load(row + j) - splat(peak)) * splat(share[r]),
                                load(k.other + r * k.lds + j), norm);
    }
    to[2 * r] = hsum(total), to[2 * r + 1] = norm;
  }
}

// Parts joined under one normaliser, in place of `near`.
static void finish(Group& k, long i0, long n) {
  const SqMultipole& p = *k.call;
  const long lde = k.plan->lde, columns = k.clusters->first[k.sight.chunks];
  float share[ROWS];
  for (long r = 0; r < n; r++) {
    const long i = i0 + r;
    float peak = k.near.peak[i], total = 0.0f, by[3] = {0.0f, 0.0f, 0.0f};
    const Part* const parts[] = {&k.near, &k.far, &k.chosen};
    const int count = columns ? 3 : 1;
    for (int j = 1; j < count; j++) peak = max1(peak, parts[j]->peak[i]);
    const float shift = peak > -INFINITY ? peak : 0.0f;
    for (int j = 0; j < count; j++) {
      by[j] = parts[j]->peak[i] > -INFINITY ? exp1(parts[j]->peak[i] - shift) : 0.0f;
      total += parts[j]->mass[i] * by[j];
    }
    const float share_of = total == 0.0f ? 0.0f : 1.0f / total;
    float* to = k.near.sum + i * lde;
    for (long e = 0; e < lde; e += VL) {
      vf sum = load(to + e) * splat(by[0]);
      for (int j = 1; j < count; j++) sum += load(parts[j]->sum + i * lde + e) * splat(by[j]);
      store(to + e, sum * splat(share_of));
    }
    share[r] = by[1] * share_of;
    if (p.log_norm)
      p.log_norm[(k.b * p.heads_q + k.h) * p.length_q + k.first + i] = total == 0.0f ? -INFINITY : shift + logf(total);
    write_choices(k, i);
  }
  if (p.out.data) put(p.out, k.b, k.h, k.first + i0, n, p.width, k.near.sum + i0 * lde, lde);
  if (p.estimate) write_estimates(k, i0, n, share);
}

// -- the call ------------------------------------------------------------------------------------------------------

struct Context {
  const SqMultipole* call;
  Plan plan;
  const int32_t* token_of;  // [B][S], or null
  int64_t blocks, pieces, piece;
  bool failed;
};

SQ_INLINE const int32_t* tokens_of(const Context& x, long b) {
  return x.token_of ? x.token_of + b * x.call->length_k : nullptr;
}

static void lay_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqMultipole& p = *x.call;
  const long head = task / x.blocks, block = task % x.blocks, b = head / p.heads_kv, h = head % p.heads_kv;
  Clusters& c = x.plan.heads[head];
  long floats;
  chunk_scratch(p, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  lay_ranks(p, x.plan, c, b, h, block, tokens_of(x, b), memory);
  if (block < c.chunks && !clustered(p, x.plan, head * x.plan.chunks + block)) cluster_chunk(p, x.plan, b, h, block, tokens_of(x, b), memory);
}

static void pack_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqMultipole& p = *x.call;
  const long head = task / x.blocks, chunk = task % x.blocks;
  if (chunk >= x.plan.heads[head].chunks) return;
  const long ldk = x.plan.ldk;
  float* memory = sq_scratch(padded(p.chunk * ldk, 16) + (padded(p.largest, VL) + 1) * ldk);
  if (!memory) return (void)(x.failed = true);
  pack_chunk(p, x.plan, x.plan.heads[head], head / p.heads_kv, head % p.heads_kv, chunk, tokens_of(x, head / p.heads_kv),
             memory);
}

// The number of real keys among the tokens 0 .. last.
static long ranks_until(const int32_t* token_of, long real, long last) {
  if (!token_of) return last + 1;
  long low = 0, high = real;
  while (low < high) {
    const long middle = (low + high) / 2;
    if (token_of[middle] <= last) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Calls body(group) for the queries [from, to) of one head, in groups that see the same chunks.
template <class Body>
static void for_groups(Group& k, const int32_t* token_of, long from, long to, Body body) {
  const SqMultipole& p = *k.call;
  k.n = 0;
  for (long i = from; i < to; i++) {
    const long end = p.causal ? ranks_until(token_of, k.clusters->real, p.past + i) : k.clusters->real;
    const Sight sight = sight_of(p, *k.clusters, end);
    if (k.n && (k.n == k.most || sight.chunks != k.sight.chunks || sight.dense != k.sight.dense)) {
      body(k);
      k.n = 0;
    }
    if (!k.n) k.first = i, k.sight = sight;
    k.end[k.n++] = end;
  }
  if (k.n) body(k);
}

// Calls part(k, i0, n) for up to ROWS queries of the group at a time.
template <class Body>
SQ_INLINE void for_rows(Group& k, Body part) {
  for (long i = 0; i < k.n; i += ROWS) part(k, i, k.n - i < ROWS ? k.n - i : ROWS);
}

// Everything of a group whose queries, sight and visible ranks are set.
static void attend_group(Group& k) {
  load_queries(k);
  const bool clusters = k.clusters->first[k.sight.chunks] > 0;
  if (clusters && k.n == 1) {
    clusters_single(k);
  } else {
    for_rows(k, far_part);
    if (clusters) chosen_part(k);
  }
  for_rows(k, dense_part);
  for_rows(k, finish);
}

static void attend_task(void* context, int64_t task, int64_t) {
  Context& x = *(Context*)context;
  const SqMultipole& p = *x.call;
  const long piece = task % x.pieces, head = task / x.pieces;
  long floats;
  cut_group(p, x.plan, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (!memory) return (void)(x.failed = true);
  Group k = cut_group(p, x.plan, memory, &floats);
  k.b = head / p.heads_q, k.h = head % p.heads_q;
  k.clusters = &x.plan.heads[k.b * p.heads_kv + k.h / (p.heads_q / p.heads_kv)];
  const long from = piece * x.piece, to = from + x.piece;
  for_groups(k, tokens_of(x, k.b), from, to < p.length_q ? to : p.length_q, attend_group);
}

// Memory of a call, and its clusters made; attention itself follows.
static float* prepare(const SqMultipole& p, Context& x) {
  Plan& plan = x.plan;
  x.call = plan.call = &p;
  x.failed = false;
  plan.chunks = p.length_k / p.chunk;
  plan.slots = p.clusters + p.chunk / p.largest;
  plan.ldc = odd_lines(plan.chunks * plan.slots);
  plan.ldb = odd_lines(p.chunk < p.length_k ? p.chunk : p.length_k);
  plan.ldk = padded(p.dim, VL);
  plan.lde = padded(p.width, VL);
  plan.floats = cut(p, plan, nullptr, nullptr);
  const long heads = p.batch * p.heads_kv, tokens = p.key_mask ? p.batch * p.length_k : 0;
  const long table = padded((long)(sizeof(Clusters) / sizeof(float) + 1) * heads, 16);
  float* memory = sq_workspace(table + padded(tokens, 16) + heads * plan.floats);
  if (!memory) return nullptr;
  plan.heads = (Clusters*)memory;
  int32_t* token_of = (int32_t*)(memory + table);
  x.token_of = tokens ? token_of : nullptr;
  float* rest = memory + table + padded(tokens, 16);
  for (long head = 0; head < heads; head++) {
    cut(p, plan, rest + head * plan.floats, &plan.heads[head]);
    const long b = head / p.heads_kv;
    Clusters& c = plan.heads[head];
    c.real = head % p.heads_kv ? plan.heads[head - 1].real : ranks(p, b, token_of + b * p.length_k);
    c.chunks = c.real / p.chunk;
  }
  x.blocks = (p.length_k + p.chunk - 1) / p.chunk;
  sq_parallel(heads * x.blocks, p.threads, lay_task, &x);
  for (long head = 0; head < heads; head++) {
    count_columns(p, plan, plan.heads[head], head);
    close_columns(p, plan, plan.heads[head]);
  }
  sq_parallel(heads * x.blocks, p.threads, pack_task, &x);
  for (long head = 0; head < heads; head++)
    for (long chunk = 0; chunk < plan.heads[head].chunks; chunk++) extend_mean_variance(plan.heads[head], chunk);
  return memory;
}

static int forward(const SqMultipole* call) {
  const SqMultipole& p = *call;
  Context x;
  if (!prepare(p, x)) return SQ_NO_MEMORY;
  // Pieces long enough to be worth a task, short enough that the last ones do not leave a thread alone.
  x.piece = GROUP;
  x.pieces = (p.length_q + x.piece - 1) / x.piece;
  sq_parallel(p.batch * p.heads_q * x.pieces, p.threads, attend_task, &x);
  sq_workspace_done();
  return x.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS::multipole
