// Forward:  full    S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j) first, then O_i = (a_i S) / (a_i z) for every query
//           causal  chunk by chunk: O = (a S + tril(a phi^T) V) / (a z + tril(a phi^T) 1), then S += phi^T V
//
// Work is dealt out over (batch, KV head) and, where those are few, over pieces of the sequence whose states are merged
// in order. Full attention is cut by shape alone, so its result does not depend on the number of threads.
#pragma once

#ifdef SQ_PAIRS
#include "experimental/pairs.h"
#else
#include "products.h"
#endif

namespace SQ_NS {

// States of all heads, in scratch layout: S[M][lds], z[M], c[M] per slot.
struct States {
  float* base;
  long slot, lds, M;
  State at(long i) const {
    float* p = base + i * slot;
    return {p, p + M * lds, p + M * lds + M};
  }
};

static States new_states(const SqCall& pr, long count) {
  States s = {nullptr, 0, state_stride(pr.width), (long)pr.features};
  s.slot = round_up(s.M * s.lds + 2 * s.M, 16);
  s.base = sq_allocate(s.slot * count);
  return s;
}

static void load_state(const Head& hd, const State& st, const float* S, const float* z, const float* c) {
  const SqCall& pr = *hd.pr;
  const long M = pr.features, E = pr.width;
  for (long r = 0; r < M; r++) {
    float* row = st.S + r * hd.lds;
    if (S) memcpy(row, S + r * E, sizeof(float) * E);
    for (long e = S ? E : 0; e < hd.lds; e++) row[e] = 0.0f;
    st.z[r] = z ? z[r] : 0.0f;
    st.c[r] = c ? c[r] : pr.function == SQ_EXP ? MINUS_INF : 0.0f;
  }
}

static void load_state_in(const Head& hd, long index, const State& st) {
  const SqCall& pr = *hd.pr;
  const long M = pr.features;
  const bool given = pr.s_in != nullptr;
  load_state(hd, st, given ? pr.s_in + index * M * pr.width : nullptr, given ? pr.z_in + index * M : nullptr,
             given ? pr.c_in + index * M : nullptr);
}

static void save_state(const Head& hd, const State& st, float* S, float* z, float* c) {
  const SqCall& pr = *hd.pr;
  for (long r = 0; r < pr.features; r++) memcpy(S + r * pr.width, st.S + r * hd.lds, sizeof(float) * pr.width);
  memcpy(z, st.z, sizeof(float) * pr.features);
  memcpy(c, st.c, sizeof(float) * pr.features);
}

static void save_state_out(const Head& hd, long index, const State& st) {
  const SqCall& pr = *hd.pr;
  const long M = pr.features;
  if (pr.s_out) save_state(hd, st, pr.s_out + index * M * pr.width, pr.z_out + index * M, pr.c_out + index * M);
}

// into <- into followed by later.
static void merge_state(const Head& hd, const State& into, const State& later) {
  const SqCall& pr = *hd.pr;
  for (long r = 0; r < pr.features; r++) {
    const float c = max1(into.c[r], later.c[r]), shift = or_zero(c);
    float mine = 1.0f, theirs = 1.0f;
    if (pr.function == SQ_EXP) mine = exp1(into.c[r] - shift), theirs = exp1(later.c[r] - shift);
    into.c[r] = c;
    into.z[r] = into.z[r] * mine + later.z[r] * theirs;
    float *a = into.S + r * hd.lds, *b = later.S + r * hd.lds;
    for (long e = 0; e < pr.width; e += VL) store(a + e, load(a + e) * splat(mine) + load(b + e) * splat(theirs));
  }
}

static void absorb(const Head& hd, const Work& w, const State& st, Chunk& ch, long begin, long end) {
  for (long t0 = begin; t0 < end; t0 += C) {
    borrow_values(hd, prepare_features(hd, w, st, t0, end - t0 < C ? end - t0 : C, ch), ch);
    absorb_chunk(hd, w, st, ch);
  }
}

// to[E] = row / z, 0 where z is; `to` has room for whole vectors.
SQ_INLINE void normalise_row(const SqCall& pr, const float* row, float z, float* to) {
  // Shifted normalisers are at least 1e-20, so their reciprocal is safe; that of a plain map may overflow.
  const bool exact = pr.function != SQ_EXP;
  const vf by = splat(z == 0.0f || !pr.normalise ? 1.0f : exact ? z : 1.0f / z);
  const vi keep = splat(pr.normalise ? z : 1.0f) != zero();
  for (long e = 0; e < pr.width; e += VL) {
    const vf x = load(row + e);
    store(to + e, as_float(keep & bits(exact ? x / by : x * by)));
  }
}

// out rows [t0, t0 + n) of query head `head` from numerators w.out[n][lds] and normalisers Z.
static void finish(const Head& hd, const Work& w, long head, long t0, long n, const float* Z) {
  const SqCall& pr = *hd.pr;
  const bool direct = pr.out.dtype == SQ_FLOAT32 && pr.out.stride[3] == 1 && pr.width % VL == 0;
  for (long i = 0; i < n; i++) {
    float* row = w.out + i * hd.lds;
    normalise_row(pr, row, Z[i], direct ? (float*)pr.out.data + offset_of(pr.out, hd.b, head, t0 + i) : row);
  }
  if (!direct) put(pr.out, hd.b, head, t0, n, pr.width, w.out, hd.lds);
}

static void read_all(const Head& hd, const Work& w, const State& st, Chunk& ch, long g, long begin, long end) {
  begin_read(hd, w, st);
  for (long t0 = begin; t0 < end; t0 += C) {
    const long n = end - t0 < C ? end - t0 : C;
    prepare_queries(hd, w, st.c, st.z, g, t0, n, ch.a, ch.Z, ch.top);
    read_state(hd, w, st, ch.a, n);
    finish(hd, w, hd.h * hd.groups + g, t0, n, ch.Z);
  }
}

// True when splitting a failed chunk cannot help: no key at all so far, or a NaN that every row sees anyway.
static bool hopeless(const Head& hd, const State& st, const Chunk& ch) {
  const long M = hd.pr->features;
  bool empty = true, poisoned = false;
  for (long r = 0; r < M; r++) empty = empty && ch.c_new[r] == MINUS_INF, poisoned = poisoned || st.z[r] != st.z[r];
  return poisoned || (empty && hd.pr->function == SQ_EXP);
}

static void causal_range(const Head& hd, const Work& w, const State& st, Chunk& ch, long t0, long n) {
  const SqCall& pr = *hd.pr;
  if (!prepare_causal(hd, w, st, t0, n, ch) && n > 1 && !hopeless(hd, st, ch)) {
    causal_range(hd, w, st, ch, t0, n / 2);
    causal_range(hd, w, st, ch, t0 + n / 2, n - n / 2);
    return;
  }
  rescale(hd, st, ch);
  begin_read(hd, w, st);
  for (long g = 0; g < hd.groups; g++) {
    read_state(hd, w, st, ch.a + g * pr.features * LD, n);
    weigh_values(hd, w, ch, ch.scores + g * C * LD);
    finish(hd, w, hd.h * hd.groups + g, t0, n, ch.Z + g * C);
  }
  update_state(hd, w, st, ch);
}

SQ_INLINE long segments_of(const SqCall& pr) { return (pr.length_k + SQ_SEGMENT - 1) / SQ_SEGMENT; }

SQ_INLINE float* checkpoint_at(const SqCall& pr, long index, long segment) {
  return pr.checkpoints + (index * segments_of(pr) + segment) * pr.features * (pr.width + 2);
}

static void causal_scan(const Head& hd, long index, const Work& w, const State& st, Chunk& ch, long begin, long end) {
  const SqCall& pr = *hd.pr;
  const long ME = pr.features * pr.width;
  for (long t0 = begin; t0 < end; t0 += C) {
    if (pr.checkpoints && t0 % SQ_SEGMENT == 0) {
      float* to = checkpoint_at(pr, index, t0 / SQ_SEGMENT);
      save_state(hd, st, to, to + ME, to + ME + pr.features);
    }
    causal_range(hd, w, st, ch, t0, end - t0 < C ? end - t0 : C);
  }
}

// ---- distribution over workers -------------------------------------------------------------------------------------

enum Phase { ABSORB_PIECES, MERGE_PIECES, READ_PIECES, PREFIX_PIECES, CAUSAL_PIECES };

struct ForwardJob {
  const SqCall* pr;
  Phase phase;
  long pieces, piece;  // tasks per head in this phase, and tokens in each
  long key_pieces;     // slots per head in `sums`
  States sums;         // (head, key piece): what each piece absorbed; the first slot becomes the whole
  States starts;       // (head, key piece): causal, the state before the piece; with `reverse` that of the keys after it
  bool reverse;
  bool failed;         // no working memory
};

static void forward_task(void* context, int64_t task, int64_t) {
  ForwardJob& job = *(ForwardJob*)context;
  const SqCall& pr = *job.pr;
  const long index = task / job.pieces, p = task % job.pieces;
  const Head hd = head_of(pr, index);
  if (job.phase == MERGE_PIECES) {
    const State whole = job.sums.at(index * job.key_pieces);
    for (long i = 1; i < job.key_pieces; i++) merge_state(hd, whole, job.sums.at(index * job.key_pieces + i));
    save_state_out(hd, index, whole);
    return;
  }
  if (job.phase == PREFIX_PIECES) {
    const long step = job.reverse ? -1 : 1, first = index * job.key_pieces + (job.reverse ? job.key_pieces - 1 : 0);
    load_state_in(hd, index, job.starts.at(first));
    for (long i = 1; i < job.key_pieces; i++) {
      const State st = job.starts.at(first + i * step);
      memcpy(st.S, job.starts.at(first + (i - 1) * step).S, sizeof(float) * job.starts.slot);
      merge_state(hd, st, job.sums.at(first + (i - 1) * step));
    }
    return;
  }
  Chunk ch;
  Work w;
  if (!in_scratch([&](Arena& arena) {
        ch = take_chunk(arena, pr, hd.lds, job.phase == CAUSAL_PIECES, job.phase != ABSORB_PIECES);
        w = take_work(arena, pr, hd.lds);
        w.products = arena.take(product_floats(pr, hd.lds));
      })) {
    job.failed = true;
    return;
  }
  const long begin = p * job.piece;
  const long total = job.phase == READ_PIECES ? pr.length_q : pr.length_k;
  const long end = begin + job.piece < total ? begin + job.piece : total;
  if (job.phase == ABSORB_PIECES) {
    const State st = job.sums.at(index * job.key_pieces + p);
    if (p == 0 && !pr.causal) load_state_in(hd, index, st);
    else load_state(hd, st, nullptr, nullptr, nullptr);
    absorb(hd, w, st, ch, begin, end);
  } else if (job.phase == READ_PIECES) {
    for (long g = 0; g < hd.groups; g++) read_all(hd, w, job.sums.at(index * job.key_pieces), ch, g, begin, end);
  } else {
    const State st = job.starts.at(index * job.key_pieces + p);
    if (job.key_pieces == 1) load_state_in(hd, index, st);
    causal_scan(hd, index, w, st, ch, begin, end);
    if (p == job.pieces - 1) save_state_out(hd, index, st);
  }
}

static void run_phase(ForwardJob& job, Phase phase, long pieces, long piece) {
  job.phase = phase;
  job.pieces = pieces;
  job.piece = piece;
  const SqCall& pr = *job.pr;
  sq_parallel(pr.batch * pr.heads_kv * pieces, pr.threads, forward_task, &job);
}

// How many pieces to cut `length` tokens of `heads` heads into: enough to keep several workers busy when one of them is
// slow, each long enough to make its merge negligible.
SQ_INLINE long pieces_for(long heads, long length, long wanted) {
  long pieces = (wanted + heads - 1) / heads;
  if (pieces > length / 512) pieces = length / 512;
  return pieces < 1 ? 1 : pieces;
}

struct Cut {
  long pieces, piece;  // per head, and tokens in each: a multiple of `step`, at least `least`
};

SQ_INLINE Cut cut(long heads, long length, long wanted, long step, long least = 1) {
  const long pieces = pieces_for(heads, length, wanted), even = (length + pieces - 1) / pieces;
  const long piece = round_up(even > least ? even : least, step);
  return {length == 0 ? 1 : (length + piece - 1) / piece, piece};
}

// Causal walks: only where whole heads cannot keep the workers busy, since the state before each piece costs a pass over
// the keys.
SQ_INLINE Cut causal_cut(const SqCall& pr, long least = 1) {
  const long heads = pr.batch * pr.heads_kv;
  return cut(heads, pr.length_k, heads < pr.threads ? 2 * pr.threads : 1, SQ_SEGMENT, least);
}

// The state before each piece of a causal walk (`reverse`: of the keys after it). Without memory: base is null.
static States piece_states(const SqCall& pr, Cut by, bool reverse = false) {
  const long slots = pr.batch * pr.heads_kv * by.pieces;
  ForwardJob job = {};
  job.pr = &pr;
  job.key_pieces = by.pieces;
  job.reverse = reverse;
  job.sums = new_states(pr, slots);
  job.starts = new_states(pr, slots);
  if (job.sums.base && job.starts.base) {
    run_phase(job, ABSORB_PIECES, by.pieces, by.piece);
    run_phase(job, PREFIX_PIECES, 1, 0);
  }
  if (!job.sums.base || job.failed) {
    sq_release(job.starts.base);
    job.starts.base = nullptr;
  }
  sq_release(job.sums.base);
  return job.starts;
}

static int linear_forward(const SqCall* call) {
  const SqCall& pr = *call;
  const long heads = pr.batch * pr.heads_kv;
  if (heads == 0 || pr.features == 0) return SQ_OK;
  ForwardJob job = {};
  job.pr = &pr;
  if (pr.causal) {
    const Cut by = causal_cut(pr);
    job.key_pieces = by.pieces;
    job.starts = by.pieces > 1 ? piece_states(pr, by) : new_states(pr, heads);
    if (!job.starts.base) return SQ_NO_MEMORY;
    run_phase(job, CAUSAL_PIECES, by.pieces, by.piece);
  } else {
    const Cut keys = cut(heads, pr.length_k, 16, C);
    job.key_pieces = keys.pieces;
    job.sums = new_states(pr, heads * keys.pieces);
    if (!job.sums.base) return SQ_NO_MEMORY;
    run_phase(job, ABSORB_PIECES, keys.pieces, keys.piece);
    run_phase(job, MERGE_PIECES, 1, 0);
    // Reading needs no merge, so its pieces may be many: the last ones decide how long the workers wait for each other.
    const Cut queries = cut(heads, pr.length_q, 64, C);
    if (pr.length_q > 0) run_phase(job, READ_PIECES, queries.pieces, queries.piece);
  }
  sq_release(job.sums.base);
  sq_release(job.starts.base);
  return job.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS
