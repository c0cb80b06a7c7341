// One token for every (batch, KV head): the recurrent step, state in, new state out.
//
//   l = +-p + bias + t,  c' = max(c, l),  phi = e^{l - c'},  rho = e^{c - c'}
//   z' = rho z + phi,    S' = rho S + phi v^T,    a = e^{lq + c' - max},    O = (a S') / (a z')
//
// Here the lanes run along features and values. S is read once and written once, with the read of the first query head
// folded into the same pass: the step costs little more than copying the state.
#pragma once

#include "forward.h"

namespace SQ_NS {

// p[rows] = W x + offset for one token.
static void project_one(const SqProblem& pr, const Side& s, const float* x, float* p, float* lanes, float* work) {
  const long R = pr.rows, D = pr.dim;
  if (pr.projection == SQ_NONE) {
    for (long r = 0; r < R; r++) p[r] = x[r] + (s.offset ? s.offset[r] : 0.0f);
  } else if (pr.projection == SQ_HADAMARD) {
    float* panel_in = lanes;
    float* panel_out = lanes + padded(D) * LD;
    for (long d = 0; d < D; d++)
      for (int i = 0; i < T; i++) panel_in[d * LD + i] = x[d];
    hadamard(R, D, pr.blocks, s.signs, s.norms, s.offset, panel_in, NV, panel_out, work);
    for (long r = 0; r < R; r++) p[r] = panel_out[r * LD];
  } else {
    const long whole = D / VL * VL;
    long r = 0;
    for (; r + 4 <= R; r += 4) {
      const float* row = s.weight + r * D;
      vf sum[4] = {zero(), zero(), zero(), zero()};
      for (long d = 0; d < whole; d += VL) {
        const vf xd = load(x + d);
        SQ_UNROLL for (int i = 0; i < 4; i++) sum[i] += load(row + i * D + d) * xd;
      }
      const v4 total = hsum4(sum);
      for (int i = 0; i < 4; i++) p[r + i] = total[i];
    }
    for (; r < R; r++) {
      vf sum = zero();
      for (long d = 0; d < whole; d += VL) sum += load(s.weight + r * D + d) * load(x + d);
      p[r] = hsum(sum);
    }
    for (r = 0; r < R; r++) {
      float rest = s.offset ? s.offset[r] : 0.0f;
      for (long d = whole; d < D; d++) rest += s.weight[r * D + d] * x[d];
      p[r] += rest;
    }
  }
}

// Scratch of one step; feature arrays have room for whole vectors.
struct Step {
  float *x, *v, *p, *lk, *phi, *rho, *c, *z, *a, *out, *lanes, *work;
  float top;  // the log shift of a
};

static Step take_step(Arena& arena, const SqProblem& pr) {
  const long M = round_up(pr.features, 16), E = round_up(pr.width, 16);
  const bool had = pr.projection == SQ_HADAMARD;
  Step s = {};
  s.x = arena.take(round_up(pr.dim, 16));
  s.v = arena.take(E);
  s.p = arena.take(M);
  s.lk = arena.take(M);
  s.phi = arena.take(M);
  s.rho = arena.take(M);
  s.c = arena.take(M);
  s.z = arena.take(M);
  s.a = arena.take(M);
  s.out = arena.take(E);
  s.lanes = arena.take(had ? (padded(pr.dim) + pr.rows) * LD : 0);
  s.work = arena.take(had ? padded(pr.dim) * LD : 0);
  return s;
}

// +-p + bias into l[M]; for plain maps the features themselves.
static void levels(const SqProblem& pr, const Side& s, const float* p, float t, float* l) {
  const long R = pr.rows;
  if (pr.function != SQ_EXP) {
    for (long r = 0; r < R; r += VL) store(l + r, plain_value(pr.function, load(p + r)) + splat(pr.epsilon));
    return;
  }
  for (long r = 0; r < R; r++) l[r] = p[r] + ((s.bias ? s.bias[r] : 0.0f) + t);
  if (pr.antithetic)
    for (long r = 0; r < R; r++) l[r + R] = ((s.bias ? s.bias[r] : 0.0f) + t) - p[r];
}

// square |x|^2 + tilt . x
static float own_weight(const SqProblem& pr, const Side& side, const float* x) {
  float squares = 0.0f, along = 0.0f;
  if (side.square == 0.0f && !side.tilt) return 0.0f;
  for (long d = 0; d < pr.dim; d++) {
    squares += x[d] * x[d];
    if (side.tilt) along += x[d] * side.tilt[d];
  }
  return side.square == 0.0f ? along : squares * side.square + along;
}

// c and z of the incoming state.
static void step_state(const Head& hd, long index, Step& s) {
  const SqProblem& pr = *hd.pr;
  const long M = pr.features;
  const bool given = pr.s_in != nullptr, plain = pr.function != SQ_EXP;
  for (long r = 0; r < M; r++) {
    s.c[r] = given ? pr.c_in[index * M + r] : plain ? 0.0f : MINUS_INF;
    s.z[r] = given ? pr.z_in[index * M + r] : 0.0f;
  }
  for (long r = M; r < round_up(M, VL); r++) s.c[r] = s.z[r] = s.lk[r] = 0.0f;
}

// phi, rho, c', z' from the key and the incoming state.
static void step_key(const Head& hd, Step& s, bool real) {
  const SqProblem& pr = *hd.pr;
  const long M = pr.features;
  const bool plain = pr.function != SQ_EXP;
  if (!real) {
    for (long r = 0; r < M; r++) s.phi[r] = 0.0f, s.rho[r] = 1.0f;
    memset(s.v, 0, sizeof(float) * pr.width);
    return;
  }
  fetch(pr.k, hd.b, hd.h, 0, 1, pr.dim, s.x, pr.dim);
  fetch(pr.v, hd.b, hd.h, 0, 1, pr.width, s.v, pr.width);
  project_one(pr, hd.k, s.x, s.p, s.lanes, s.work);
  levels(pr, hd.k, s.p, own_weight(pr, hd.k, s.x), plain ? s.phi : s.lk);
  if (plain) {
    for (long r = 0; r < M; r++) s.rho[r] = 1.0f, s.z[r] += s.phi[r];
    return;
  }
  for (long r = 0; r < M; r += VL) {
    const vf old = load(s.c + r), l = load(s.lk + r), now = vmax(l, old);
    const vi empty = now == splat(MINUS_INF);
    const vf shift = as_float(~empty & bits(now));
    const vf phi = vexp(l - shift), rho = vexp(old - shift);
    store(s.phi + r, phi);
    store(s.rho + r, rho);
    store(s.c + r, now);
    store(s.z + r, load(s.z + r) * rho + phi);
  }
}

// a of query head g and its normaliser.
static float step_query(const Head& hd, long g, Step& s) {
  const SqProblem& pr = *hd.pr;
  const long M = pr.features;
  fetch(pr.q, hd.b, hd.h * hd.groups + g, 0, 1, pr.dim, s.x, pr.dim);
  project_one(pr, hd.q, s.x, s.p, s.lanes, s.work);
  levels(pr, hd.q, s.p, 0.0f, s.a);
  float Z = 0.0f;
  s.top = 0.0f;
  if (pr.function == SQ_EXP) {
    float top = MINUS_INF;
    for (long r = 0; r < M; r++) s.a[r] += s.c[r], top = max1(s.a[r], top);
    s.top = or_zero(top);
    const vf shift = splat(s.top);
    s.top += own_weight(pr, hd.q, s.x);
    for (long r = 0; r < M; r += VL) store(s.a + r, vexp(load(s.a + r) - shift));
  }
  for (long r = 0; r < M; r++) Z += s.a[r] * s.z[r];
  return Z;
}

// S' = rho S + phi v^T over N vectors of columns, and out = a S' there.
template <int N>
SQ_INLINE void update_and_read(long M, long E, const float* from, float* to, const Step& s, const float* v, float* out) {
  vf value[N], sum[N];
  SQ_UNROLL for (int n = 0; n < N; n++) value[n] = load(v + n * VL), sum[n] = zero();
  for (long r = 0; r < M; r++) {
    const vf phi = splat(s.phi[r]), rho = splat(s.rho[r]), a = splat(s.a[r]);
    SQ_UNROLL for (int n = 0; n < N; n++) {
      vf x = value[n] * phi;
      if (from) x += load(from + r * E + n * VL) * rho;
      store(to + r * E + n * VL, x);
      sum[n] += x * a;
    }
  }
  SQ_UNROLL for (int n = 0; n < N; n++) store(out + n * VL, sum[n]);
}

static void update_state(const Head& hd, long index, Step& s) {
  const SqProblem& pr = *hd.pr;
  const long M = pr.features, E = pr.width;
  const float* from = pr.s_in ? pr.s_in + index * M * E : nullptr;
  float* to = pr.s_out + index * M * E;
  long e = 0;
  // Whole rows where they fit: memory is then read and written strictly in order.
  for (; e + 8 * VL <= E; e += 8 * VL)
    update_and_read<8>(M, E, from ? from + e : nullptr, to + e, s, s.v + e, s.out + e);
  for (; e + 4 * VL <= E; e += 4 * VL)
    update_and_read<4>(M, E, from ? from + e : nullptr, to + e, s, s.v + e, s.out + e);
  for (; e + VL <= E; e += VL)
    update_and_read<1>(M, E, from ? from + e : nullptr, to + e, s, s.v + e, s.out + e);
  for (; e < E; e++) {
    float sum = 0.0f;
    for (long r = 0; r < M; r++) {
      const float x = s.phi[r] * s.v[e] + (from ? from[r * E + e] * s.rho[r] : 0.0f);
      to[r * E + e] = x;
      sum += x * s.a[r];
    }
    s.out[e] = sum;
  }
  memcpy(pr.z_out + index * M, s.z, sizeof(float) * M);
  memcpy(pr.c_out + index * M, s.c, sizeof(float) * M);
}

// out = a S' for the further query heads of the group.
static void read_state(const Head& hd, long index, Step& s) {
  const SqProblem& pr = *hd.pr;
  const long E = pr.width;
  memset(s.out, 0, sizeof(float) * E);
  for (long r = 0; r < pr.features; r++) {
    const float* row = pr.s_out + (index * pr.features + r) * E;
    for (long e = 0; e < E; e++) s.out[e] += row[e] * s.a[r];
  }
}

struct DecodeJob {
  const SqProblem* pr;
  bool failed;
};

static void decode_task(void* context, int64_t index, int64_t) {
  DecodeJob& job = *(DecodeJob*)context;
  const SqProblem& pr = *job.pr;
  const Head hd = head_of(pr, index);
  Arena arena = {nullptr, 0};
  take_step(arena, pr);
  arena = {sq_scratch(arena.used), 0};
  if (!arena.base) {
    job.failed = true;
    return;
  }
  Step s = take_step(arena, pr);
  step_state(hd, index, s);
  step_key(hd, s, !pr.key_mask || pr.key_mask[hd.b * pr.mask_batch] != 0);
  for (long g = 0; g < hd.groups; g++) {
    const float Z = step_query(hd, g, s);
    if (g == 0) update_state(hd, index, s);
    else read_state(hd, index, s);
    for (long e = 0; e < pr.width; e++) s.out[e] = !pr.normalise ? s.out[e] : Z == 0.0f ? 0.0f : s.out[e] / Z;
    put(pr.out, hd.b, hd.h * hd.groups + g, 0, 1, pr.width, s.out, pr.width);
  }
}

// length_q = length_k = 1; s_out is required and must not overlap s_in.
static int decode(const SqProblem* problem) {
  DecodeJob job = {problem, false};
  sq_parallel(problem->batch * problem->heads_kv, problem->threads, decode_task, &job);
  return job.failed ? SQ_NO_MEMORY : SQ_OK;
}

// ---- the projection alone, for benchmarks ----------------------------------------------------------------------------

struct ProjectJob {
  const SqProblem* pr;
  float* out;  // (B, H, chunks, rows, LD): tokens along the last axis; null = leave it in the cache
  long chunks;
};

static void project_task(void* context, int64_t index, int64_t) {
  const ProjectJob& job = *(const ProjectJob*)context;
  const SqProblem& pr = *job.pr;
  const Head hd = head_of(pr, index);
  Arena arena = {nullptr, 0};
  for (int pass = 0; pass < 2; pass++) {
    if (pass) arena = {sq_scratch(arena.used), 0};
    if (pass && !arena.base) return;
    Work w = take_work(arena, pr, hd.lds);
    float* p = arena.take(pr.rows * LD);
    if (!pass) continue;
    for (long i = 0; i < job.chunks; i++) {
      const long t0 = i * C, n = pr.length_q - t0 < C ? pr.length_q - t0 : C;
      panel(pr.q, hd.b, hd.h, t0, n, C, pr.dim, w.x, w.rows);
      project(pr, hd.q, w.x, CV, p, w.butterfly);
      if (job.out) memcpy(job.out + (index * job.chunks + i) * pr.rows * LD, p, sizeof(float) * pr.rows * LD);
    }
  }
}

static int project_only(const SqProblem* problem, float* out) {
  ProjectJob job = {problem, out, (problem->length_q + C - 1) / C};
  sq_parallel(problem->batch * problem->heads_kv, problem->threads, project_task, &job);
  return SQ_OK;
}

}  // namespace SQ_NS
