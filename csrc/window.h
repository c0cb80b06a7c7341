// The exact part: softmax weights of a chunk's queries over a window of keys and a few sinks.
//
//   window  query t sees the tokens t - w .. t, without a causal mask t - w .. t + w; reach = w or 2 w
//   sinks   the first keys, seen by all (causal: from their own token on); the near mask takes them out of the window
//
// Queries stand along the lanes, T to a panel: panel p of a chunk needs the T + reach keys from its first query's window
// on, of which lane l sees those l .. l + reach. Weights are relative to each row's largest score.
#pragma once

#include "linear_forward.h"

namespace SQ_NS {

// Scratch of one worker. Rows of keys and values are tokens from the first query's window on.
struct Near {
  const SqCall* pr;
  long reach, sinks, rows, ldk;  // rows of a panel: sinks first, then T + reach tokens
  float *q, *fetched;            // [D][LD] scale * q; [C][D]
  float *keys, *values, *open;   // [C + reach][ldk], [C + reach][lds], [C + reach]: 1 where there is a key
  float *sink_k, *sink_v;        // [sinks][ldk], [sinks][lds]
  float *weights, *peak, *mass;  // per group: [panel][rows][T], [C], [C]
  float *far, *near, *right;     // per group: [C], what a row's parts are multiplied by
};

static Near take_near(Arena& arena, const SqCall& pr, long lds) {
  const long G = pr.heads_q / pr.heads_kv, D = pr.near_dim;
  Near nr = {};
  nr.pr = &pr;
  nr.reach = pr.both_sides ? 2 * pr.window : pr.window;
  nr.sinks = pr.sinks;
  nr.rows = nr.sinks + nr.reach + T;
  nr.ldk = state_stride(D);
  nr.q = arena.take(D * LD);
  nr.fetched = arena.take(C * D);
  nr.keys = arena.take((C + nr.reach) * nr.ldk);
  nr.values = arena.take((C + nr.reach) * lds);
  nr.open = arena.take(C + nr.reach);
  nr.sink_k = arena.take(nr.sinks * nr.ldk);
  nr.sink_v = arena.take(nr.sinks * lds);
  nr.weights = arena.take(G * PANELS * nr.rows * T);
  nr.peak = arena.take(G * C);
  nr.mass = arena.take(G * C);
  nr.far = arena.take(G * C);
  nr.near = arena.take(G * C);
  nr.right = arena.take(G * C);
  return nr;
}

SQ_INLINE float* panel_weights(const Near& nr, long g, long p) {
  return nr.weights + (g * PANELS + p) * nr.rows * T;
}

// The sinks of a head, once. A sink that no query sees may hold anything: it becomes 0.
static void fetch_sinks(const Head& hd, const Near& nr) {
  const SqCall& pr = *nr.pr;
  fetch(pr.sink_k, hd.b, hd.h, 0, nr.sinks, pr.near_dim, nr.sink_k, nr.ldk);
  fetch(pr.sink_v, hd.b, hd.h, 0, nr.sinks, hd.pr->width, nr.sink_v, hd.lds);
  for (long s = 0; s < nr.sinks; s++) {
    const bool there = pr.sink_place[hd.b * nr.sinks + s] < hd.pr->keys_stored;
    if (!there) memset(nr.sink_k + s * nr.ldk, 0, sizeof(float) * pr.near_dim);
    for (long e = there ? hd.pr->width : 0; e < hd.lds; e++) nr.sink_v[s * hd.lds + e] = 0.0f;
  }
}

// Keys and values that the queries [t0, t0 + n) may see. Returns false if a value is not finite.
static bool fetch_window(const Head& hd, const Near& nr, long t0, long n) {
  const SqCall& pr = *nr.pr;
  const long D = pr.near_dim, first = t0 + pr.past - pr.window, count = n + nr.reach;
  const long from = first < 0 ? -first : 0;
  const long stored = hd.pr->keys_stored - first, to = stored < count ? stored : count;
  for (long i = 0; i < count; i++) {
    const bool inside = i >= from && i < to;
    const bool real = inside && (!pr.near_mask || pr.near_mask[hd.b * pr.near_batch + (first + i) * pr.near_token] != 0);
    nr.open[i] = real ? 1.0f : 0.0f;
  }
  if (from < to) {
    fetch(pr.near_k, hd.b, hd.h, first + from, to - from, D, nr.keys + from * nr.ldk, nr.ldk);
    fetch(hd.pr->v, hd.b, hd.h, first + from, to - from, hd.pr->width, nr.values + from * hd.lds, hd.lds);
  }
  vf poison = zero();
  const long whole = round_up(hd.pr->width, VL);
  for (long i = 0; i < count; i++) {
    float *key = nr.keys + i * nr.ldk, *value = nr.values + i * hd.lds;
    const bool real = nr.open[i] != 0.0f;
    if (!real) memset(key, 0, sizeof(float) * D);
    for (long e = real ? hd.pr->width : 0; e < whole; e++) value[e] = 0.0f;
    for (long e = 0; e < whole; e += VL) poison += load(value + e) * zero();
  }
  return hsum(poison) == 0.0f;
}

SQ_INLINE vf hide(vf score, vi hidden) {
  return as_float((hidden & bits(splat(MINUS_INF))) | (~hidden & bits(score)));
}

// Lanes that do not see a row of the window panel: l > row, or l < row - reach.
SQ_INLINE vi outside(vf lane, long row, long reach) {
  return (lane > splat((float)row)) | (lane < splat((float)(row - reach)));
}

// Lanes that do not see a sink: causal queries before its own token; all of them if it is not there.
SQ_INLINE vi without_sink(const SqCall& pr, vf lane, int64_t place, long first) {
  if (place >= SQ_NOWHERE) return lane >= zero();
  const int64_t least = 1 << 20;  // more than a chunk, exact as a float
  int64_t from = pr.both_sides ? -least : place - first;
  from = from > least ? least : from < -least ? -least : from;
  return lane < splat((float)from);
}

// Weights, largest score and mass of the queries [t0, t0 + n) of group g.
static void near_weights(const Head& hd, const Near& nr, long g, long t0, long n) {
  const SqCall& pr = *nr.pr;
  const long D = pr.near_dim, vectors = vectors_for(n);
  panel(pr.near_q, hd.b, hd.h * hd.groups + g, t0, n, vectors * VL, D, nr.q, nr.fetched);
  const vf scale = splat(pr.scale);
  for (long d = 0; d < D; d++)
    for (long j = 0; j < vectors; j++) store(nr.q + d * LD + j * VL, load(nr.q + d * LD + j * VL) * scale);
  vf lane[NV];
  SQ_UNROLL for (int v = 0; v < NV; v++) SQ_UNROLL for (int i = 0; i < VL; i++) lane[v][i] = (float)(v * VL + i);
  for (long p = 0; p * T < n; p++) {
    const long start = p * T, lanes = n - start < T ? n - start : T, tokens = lanes + nr.reach;
    float *sinks = panel_weights(nr, g, p), *window = sinks + nr.sinks * T;
    gemm(nr.sinks, NV, D, nr.sink_k, nr.ldk, 1, nr.q + start, LD, sinks, T, FROM_ZERO);
    gemm(tokens, NV, D, nr.keys + start * nr.ldk, nr.ldk, 1, nr.q + start, LD, window, T, FROM_ZERO);
    vf top[NV], total[NV];
    SQ_UNROLL for (int v = 0; v < NV; v++) top[v] = splat(MINUS_INF), total[v] = zero();
    for (long s = 0; s < nr.sinks; s++)
      SQ_UNROLL for (int v = 0; v < NV; v++) {
        float* at = sinks + s * T + v * VL;
        const int64_t place = pr.sink_place[hd.b * nr.sinks + s];
        const vf score = hide(load(at), without_sink(pr, lane[v], place, t0 + start + pr.past));
        store(at, score);
        top[v] = vmax(score, top[v]);
      }
    for (long i = 0; i < tokens; i++)
      SQ_UNROLL for (int v = 0; v < NV; v++) {
        float* at = window + i * T + v * VL;
        vf score = load(at);
        if (nr.open[start + i] == 0.0f) {
          store(at, score = splat(MINUS_INF));
        } else if (i < lanes || i > nr.reach) {
          store(at, score = hide(score, outside(lane[v], i, nr.reach)));
        }
        top[v] = vmax(score, top[v]);
      }
    vf shift[NV];
    SQ_UNROLL for (int v = 0; v < NV; v++) shift[v] = as_float(~(top[v] == splat(MINUS_INF)) & bits(top[v]));
    for (long i = 0; i < nr.sinks + tokens; i++)
      SQ_UNROLL for (int v = 0; v < NV; v++) {
        float* at = sinks + i * T + v * VL;
        const vf e = vexp(load(at) - shift[v]);
        store(at, e);
        total[v] += e;
      }
    SQ_UNROLL for (int v = 0; v < NV; v++) {
      store(nr.peak + g * C + start + v * VL, top[v]);
      store(nr.mass + g * C + start + v * VL, total[v]);
    }
  }
}

// log(mass) to within a factor of two, from the exponent alone: only the order of magnitude matters for a shift.
SQ_INLINE vf rough_log(vf mass) {
  const vi size = bits(mass) & 0x7fffffff;
  const vf power = __builtin_convertvector((size >> 23) - 127, vf) * splat(0.6931472f);
  return hide(power, size == 0);
}

SQ_INLINE vf bounded(vf x) {
  const vi above = x > splat(80.0f);
  return as_float((above & bits(splat(80.0f))) | (~above & bits(x)));
}

// What the rows of the far field (at the left, and at the right where there is one) and of the near one are multiplied by
// to share one normaliser. The common shift is that of the largest mass, not of the largest shift: the shift of a far
// field bounds its weights, but may lie high above them. Also stats[row][2].
static void join_parts(const Near& nr, long g, long n, const float* top, const float* Z, float gain, const float* right_top,
                       const float* right_Z, float* stats) {
  for (long i = 0; i < vectors_for(n) * VL; i += VL) {
    const long at = g * C + i;
    const vf peak = load(nr.peak + at), mass = load(nr.mass + at);
    const vf level = load(top + i) + splat(gain), z = load(Z + i);
    vf base = vmax(peak + rough_log(mass), level + rough_log(z));
    vf right_level = zero(), right_z = zero();
    if (right_top) {
      right_level = load(right_top + i) + splat(gain);
      right_z = load(right_Z + i);
      base = vmax(right_level + rough_log(right_z), base);
    }
    base = as_float(~(base == splat(MINUS_INF)) & bits(base));
    const vf near = vexp(bounded(peak - base)), far = vexp(bounded(level - base));
    const vf right = right_top ? vexp(bounded(right_level - base)) : zero();
    const vf total = near * mass + far * z + right * right_z;
    const vi empty = total == zero();
    const vf inverse = as_float(~empty & bits(splat(1.0f) / total));
    store(nr.near + at, near * inverse);
    store(nr.far + at, far * inverse);
    store(nr.right + at, right * inverse);
    for (long l = 0; l < VL && i + l < n; l++) stats[2 * (i + l)] = base[l], stats[2 * (i + l) + 1] = inverse[l];
  }
}

// Whether the shift that the chunk shares lost a key of some row in [from, n): see chunk.h. What vanishes beside the near
// field is not missed.
static bool kept_all(const Near& nr, long g, long from, long n, const float* top, const float* Z, float gain) {
  for (long i = from; i < n; i++) {
    const float above = nr.peak[g * C + i] - (top[i] + gain);
    const float total = __builtin_fabsf(Z[i]) + nr.mass[g * C + i] * exp1(above > 80.0f ? 80.0f : above);
    if (!(total >= UNDERFLOW)) return false;
  }
  return true;
}

// The first row of a chunk that has a far key.
static long first_far(const Head& hd, const State& st, const Chunk& ch) {
  for (long r = 0; r < hd.pr->features; r++)
    if (st.c[r] != MINUS_INF) return 0;
  for (long i = 0; i < ch.n; i++)
    if (ch.real[i] != 0.0f) return i;
  return ch.n;
}

}  // namespace SQ_NS
