// The features of one token for every (batch, KV head), for the recurrent steps (linear_step.h, window_step.h):
//
//   l = +-p + bias + t,  c' = max(c, l),  phi = e^{l - c'},  rho = e^{c - c'},  z' = rho z + phi
//   a = e^{lq + c - max},  Z = a . z
//
// Heads that share a map are taken as a block: their tokens are projected together, tokens along the lanes, so that the
// matrix is read once for all of them and butterflies have a lane for each. Everything after the projection belongs to
// one head and has features along the lanes.
#pragma once

#include "linear_forward.h"

namespace SQ_NS {

// `count` of the (batch, KV head) pairs, all with the same map.
struct Block {
  long first, stride, count;
  long at(long i) const { return first + i * stride; }
};

SQ_INLINE bool same_for_all_heads(const SqMap& m) {
  return !m.weight_head && !m.bias_head && !m.tilt_head && !m.signs_head && !m.norms_head;
}

struct Blocks {
  bool shared;
  long size, pairs, batch, heads;

  long count() const { return shared ? (pairs + size - 1) / size : heads * ((batch + size - 1) / size); }

  Block at(long task) const {
    if (shared) return {task * size, 1, pairs - task * size < size ? pairs - task * size : size};
    const long per_head = (batch + size - 1) / size, h = task / per_head, b = task % per_head * size;
    return {b * heads + h, heads, batch - b < size ? batch - b : size};
  }
};

// Up to one panel of tokens each, but no worker without work.
static Blocks blocks_of(const SqCall& pr) {
  Blocks blocks = {same_for_all_heads(pr.map_q) && same_for_all_heads(pr.map_k), 1, (long)(pr.batch * pr.heads_kv),
                   (long)pr.batch, (long)pr.heads_kv};
  const long threads = pr.threads > 1 ? pr.threads : 1, most = blocks.shared || blocks.batch > T ? T : blocks.batch;
  blocks.size = (blocks.pairs + threads - 1) / threads;
  if (blocks.size > most) blocks.size = most;
  if (blocks.size < 1) blocks.size = 1;
  return blocks;
}

// sum_d x_d y_d with the lanes along d.
SQ_INLINE float dot(const float* x, const float* y, long n) {
  const long whole = n / VL * VL;
  vf sum = zero();
  for (long d = 0; d < whole; d += VL) sum += load(x + d) * load(y + d);
  float rest = 0.0f;
  for (long d = whole; d < n; d++) rest += x[d] * y[d];
  return hsum(sum) + rest;
}

// p[rows] = W x + offset for one token, dense or no W: with few tokens the lanes are better used along the components.
static void project_one(const SqCall& pr, const Side& s, const float* x, float* p) {
  const long rows = pr.rows, D = pr.dim, whole = D / VL * VL;
  if (pr.function == SQ_TAYLOR) return taylor_one(D, x, p);
  if (pr.projection == SQ_NONE) {
    for (long r = 0; r < rows; r++) p[r] = x[r] + (s.offset ? s.offset[r] : 0.0f);
    return;
  }
  long r = 0;
  for (; r + 4 <= rows; r += 4) {
    const float* row = s.weight + r * D;
    vf sum[4] = {zero(), zero(), zero(), zero()};
    for (long d = 0; d < whole; d += VL) {
      const vf xd = load(x + d);
      SQ_UNROLL for (int i = 0; i < 4; i++) sum[i] += load(row + i * D + d) * xd;
    }
    store4(p + r, hsum4(sum));
  }
  for (; r < rows; r++) p[r] = dot(s.weight + r * D, x, whole);
  if (whole < D || s.offset)
    for (r = 0; r < rows; r++) p[r] += (s.offset ? s.offset[r] : 0.0f) + dot(s.weight + r * D + whole, x + whole, D - whole);
}

// Projections of up to T tokens: p[token][ld], zero from `rows` on, and t[token] = square |x|^2 + tilt . x.
struct Tokens {
  float *p, *t;
  long ld;
  const float* row(long i) const { return p + i * ld; }
};

struct BlockWork {
  float *x, *rows, *p, *butterfly;
  Tokens keys, queries;  // the queries' further groups follow, T tokens each
  Tokens group(long g) const { return {queries.p + g * T * queries.ld, queries.t + g * T, queries.ld}; }
};

static BlockWork take_block(Arena& arena, const SqCall& pr) {
  const long groups = pr.heads_q / pr.heads_kv, ld = round_up(pr.rows, 16);
  BlockWork w = {};
  w.x = arena.take(padded(pr.dim) * LD);
  w.rows = arena.take(T * pr.dim);
  w.p = arena.take(pr.projection == SQ_NONE ? 0 : pr.rows * LD);
  w.butterfly = arena.take(pr.projection == SQ_HADAMARD ? padded(pr.dim) * LD : 0);
  w.keys = {arena.take(T * ld), arena.take(T), ld};
  w.queries = {arena.take(groups * T * ld), arena.take(groups * T), ld};
  return w;
}

static void project_tokens(const SqCall& pr, const Side& s, long n, const BlockWork& w, const Tokens& to) {
  const long rows = pr.rows, D = pr.dim;
  const bool weighted = pr.function == SQ_EXP && (s.square != 0.0f || s.tilt);
  if (pr.projection == SQ_NONE || (pr.projection == SQ_DENSE && 2 * n < VL)) {
    for (long i = 0; i < n; i++) {
      const float* x = w.rows + i * D;
      project_one(pr, s, x, to.p + i * to.ld);
      const float along = s.tilt ? dot(s.tilt, x, D) : 0.0f;
      to.t[i] = !weighted ? 0.0f : s.square == 0.0f ? along : dot(x, x, D) * s.square + along;
    }
  } else {
    const long vectors = n <= VL && pr.projection == SQ_DENSE ? 1 : NV;
    transpose(w.rows, n, D, D, w.x, LD);
    for (long d = 0; d < D; d++) memset(w.x + d * LD + n, 0, sizeof(float) * (vectors * VL - n));
    project(pr, s, w.x, vectors, 0, pr.rows, w.p, w.butterfly);
    transpose(w.p, rows, n, LD, to.p, to.ld);
    if (weighted) token_weights(pr, s, w.x, vectors, to.t);
    else memset(to.t, 0, sizeof(float) * T);
  }
  for (long i = 0; i < n; i++) memset(to.p + i * to.ld + rows, 0, sizeof(float) * (to.ld - rows));
}

// The token of k and those of all query heads, for every pair of the block. A masked key's lane may hold anything: no
// other lane sees it.
static void project_block(const SqCall& pr, const Block& block, const BlockWork& w) {
  const Head hd = head_of(pr, block.first);
  for (long i = 0; i < block.count; i++) {
    const long index = block.at(i);
    fetch(pr.k, index / pr.heads_kv, index % pr.heads_kv, 0, 1, pr.dim, w.rows + i * pr.dim, pr.dim);
  }
  project_tokens(pr, hd.k, block.count, w, w.keys);
  for (long g = 0; g < hd.groups; g++) {
    for (long i = 0; i < block.count; i++) {
      const long index = block.at(i), head = index % pr.heads_kv * hd.groups + g;
      fetch(pr.q, index / pr.heads_kv, head, 0, 1, pr.dim, w.rows + i * pr.dim, pr.dim);
    }
    project_tokens(pr, hd.q, block.count, w, w.group(g));
  }
}

// Scratch of one head's step. Arrays of M have room for whole vectors, whose lanes beyond M count as a feature of weight
// zero: c = -inf, z = phi = a = 0.
struct StepFeatures {
  float *v, *key_bias, *query_bias, *phi, *rho, *c, *z, *a, *out;
  float top;  // the log shift of a
};

// Mirrored features are stored from an odd place on where the rows do not fill vectors, hence the room behind them.
SQ_INLINE long feature_stride(const SqCall& pr) { return round_up(pr.features, 16) + 16; }

static StepFeatures take_step(Arena& arena, const SqCall& pr) {
  const long M = feature_stride(pr), E = round_up(pr.width, 16);
  StepFeatures s = {};
  s.v = arena.take(E);
  s.key_bias = arena.take(M);
  s.query_bias = arena.take(M);
  s.phi = arena.take(M);
  s.rho = arena.take(M);
  s.c = arena.take(M);
  s.z = arena.take(M);
  s.a = arena.take(M);
  s.out = arena.take(E);
  return s;
}

// The biases of the block's map, 0 where there are none.
static void step_biases(const SqCall& pr, const Block& block, const StepFeatures& s) {
  const Head hd = head_of(pr, block.first);
  const long whole = round_up(pr.rows, 16);
  memset(s.key_bias, 0, sizeof(float) * whole);
  memset(s.query_bias, 0, sizeof(float) * whole);
  if (hd.k.bias) memcpy(s.key_bias, hd.k.bias, sizeof(float) * pr.rows);
  if (hd.q.bias) memcpy(s.query_bias, hd.q.bias, sizeof(float) * pr.rows);
}

SQ_INLINE void fill_tail(float* x, long n, float value) {
  for (long i = n; i < round_up(n, VL); i++) x[i] = value;
}

// +-p + bias + t into l[M]; for plain maps the features themselves.
static void levels(const SqCall& pr, const float* p, const float* bias, float t, float* l) {
  const long rows = pr.rows;
  const bool plain = pr.function != SQ_EXP;
  if (plain) {
    for (long r = 0; r < rows; r += VL) store(l + r, plain_value(pr.function, load(p + r)) + splat(pr.epsilon));
  } else {
    for (long r = 0; r < rows; r += VL) store(l + r, load(p + r) + (load(bias + r) + splat(t)));
    if (pr.antithetic)
      for (long r = 0; r < rows; r += VL) store(l + rows + r, (load(bias + r) + splat(t)) - load(p + r));
  }
  fill_tail(l, pr.features, plain ? 0.0f : MINUS_INF);
}

// c and z of the incoming state.
static void step_state(const SqCall& pr, long index, StepFeatures& s) {
  const long M = pr.features;
  const bool given = pr.s_in != nullptr, plain = pr.function != SQ_EXP;
  const float nothing = plain ? 0.0f : MINUS_INF;
  if (given) {
    memcpy(s.c, pr.c_in + index * M, sizeof(float) * M);
    memcpy(s.z, pr.z_in + index * M, sizeof(float) * M);
  } else {
    for (long r = 0; r < M; r++) s.c[r] = nothing, s.z[r] = 0.0f;
  }
  fill_tail(s.c, M, nothing);
  fill_tail(s.z, M, 0.0f);
}

// phi, rho, c', z' from the key's projection and the incoming state, and the key's value.
static void step_key(const Head& hd, const float* p, float t, bool real, StepFeatures& s) {
  const SqCall& pr = *hd.pr;
  const long M = pr.features;
  if (!real) {
    for (long r = 0; r < M; r++) s.phi[r] = 0.0f, s.rho[r] = 1.0f;
    memset(s.v, 0, sizeof(float) * pr.width);
    return;
  }
  fetch(pr.v, hd.b, hd.h, 0, 1, pr.width, s.v, pr.width);
  levels(pr, p, s.key_bias, t, s.phi);
  if (pr.function != SQ_EXP) {
    for (long r = 0; r < M; r += VL) {
      store(s.rho + r, splat(1.0f));
      store(s.z + r, load(s.z + r) + load(s.phi + r));
    }
    return;
  }
  for (long r = 0; r < M; r += VL) {
    const vf old = load(s.c + r), l = load(s.phi + r), now = vmax(l, old);
    const vi empty = now == splat(MINUS_INF);
    const vf shift = as_float(~empty & bits(now));
    const vf phi = vexp(l - shift), rho = vexp(old - shift);
    store(s.phi + r, phi);
    store(s.rho + r, rho);
    store(s.c + r, now);
    store(s.z + r, load(s.z + r) * rho + phi);
  }
}

// a of a query from its projection, relative to e^top, and its normaliser.
static float step_query(const SqCall& pr, const float* p, float t, StepFeatures& s) {
  const long M = pr.features;
  levels(pr, p, s.query_bias, 0.0f, s.a);
  s.top = 0.0f;
  vf shift = zero(), total = zero();
  if (pr.function == SQ_EXP) {
    vf most[4] = {splat(MINUS_INF), splat(MINUS_INF), splat(MINUS_INF), splat(MINUS_INF)};
    for (long r = 0; r < M; r += VL) {
      const vf l = load(s.a + r) + load(s.c + r);
      store(s.a + r, l);
      most[0] = vmax(l, most[0]);
    }
    const v4 found = hmax4(most);
    s.top = or_zero(found[0]);
    shift = splat(s.top);
    s.top += t;
  }
  for (long r = 0; r < M; r += VL) {
    vf a = load(s.a + r);
    if (pr.function == SQ_EXP) a = vexp(a - shift), store(s.a + r, a);
    total += a * load(s.z + r);
  }
  return hsum(total);
}

// Whether the rows of a new state at `to` can be stored past the caches.
SQ_INLINE bool stores_non_temporal(const SqCall& pr, const float* to) {
  return pr.non_temporal && pr.width % VL == 0 && (uintptr_t)to % sizeof(vf) == 0;
}

// out = a S for the state at `from`, over N vectors of columns.
template <int N>
SQ_INLINE void read_columns(long M, long E, const float* from, const float* a, float* out) {
  vf sum[N];
  SQ_UNROLL for (int n = 0; n < N; n++) sum[n] = zero();
  for (long r = 0; r < M; r++) {
    const vf weight = splat(a[r]);
    SQ_UNROLL for (int n = 0; n < N; n++) sum[n] += load(from + r * E + n * VL) * weight;
  }
  SQ_UNROLL for (int n = 0; n < N; n++) store(out + n * VL, sum[n]);
}

static void read_state(long M, long E, const float* S, const float* a, float* out) {
  long e = 0;
  for (; e + 8 * VL <= E; e += 8 * VL) read_columns<8>(M, E, S + e, a, out + e);
  for (; e + 4 * VL <= E; e += 4 * VL) read_columns<4>(M, E, S + e, a, out + e);
  for (; e + VL <= E; e += VL) read_columns<1>(M, E, S + e, a, out + e);
  for (; e < E; e++) {
    float sum = 0.0f;
    for (long r = 0; r < M; r++) sum += S[r * E + e] * a[r];
    out[e] = sum;
  }
}

}  // namespace SQ_NS
