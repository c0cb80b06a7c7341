// The backward dealt out over workers.
//
//   full    pieces of the queries give dq and partial R; R = their sum + dS_out; pieces of the keys give dk, dv
//   causal  one task per (batch, KV head): segments in reverse, each from its stored state. Where heads are fewer than
//           workers, pieces of the sequence give dq and their own R first; a sum over later pieces turns these into the R
//           each piece starts from; then pieces give dk, dv
//
// The gradient of the incoming state is R in the incoming shift: e^{c_in - c} R.
#pragma once

#include "linear_backward.h"

namespace SQ_NS {

enum BackPhase { LOAD_STATES, FULL_QUERIES, SUM_R, FULL_KEYS, KEEP_STATES, CAUSAL_BACK, CAUSAL_QUERIES, SUFFIX_R, CAUSAL_KEYS };

struct BackwardJob {
  const SqCall* pr;
  BackPhase phase;
  long pieces, piece, query_pieces, segments;  // segments: per causal piece
  States states;  // (head): the state every query read
  States R;       // (head, query piece); causal: R at the start of the piece
  bool failed;
};

static void start_R(const Head& hd, long index, const State& R, bool with_gradient) {
  const SqCall& pr = *hd.pr;
  const long M = pr.features;
  const bool s = with_gradient && pr.ds_out, z = with_gradient && pr.dz_out;
  load_state(hd, R, s ? pr.ds_out + index * M * pr.width : nullptr, z ? pr.dz_out + index * M : nullptr, nullptr);
}

static void save_R(const Head& hd, long index, const State& R, const float* rho) {
  const SqCall& pr = *hd.pr;
  const long M = pr.features, E = pr.width;
  if (!pr.ds_in) return;
  for (long r = 0; r < M; r++) {
    const float by = rho ? rho[r] : 1.0f;
    for (long e = 0; e < E; e++) pr.ds_in[(index * M + r) * E + e] = R.S[r * hd.lds + e] * by;
    pr.dz_in[index * M + r] = R.z[r] * by;
  }
}

static void sum_R(const BackwardJob& job, const Head& hd, long index) {
  const SqCall& pr = *job.pr;
  const State whole = job.R.at(index * job.query_pieces);
  for (long i = 1; i < job.query_pieces; i++) {
    const State part = job.R.at(index * job.query_pieces + i);
    for (long e = 0; e < pr.features * hd.lds; e++) whole.S[e] += part.S[e];
    for (long r = 0; r < pr.features; r++) whole.z[r] += part.z[r];
  }
  if (!pr.ds_in) return;
  const State st = job.states.at(index);
  float* rho = whole.c;  // R has no maxima of its own
  for (long r = 0; r < pr.features; r++) {
    const float before = pr.c_in ? pr.c_in[index * pr.features + r] : MINUS_INF;
    rho[r] = pr.function == SQ_EXP ? exp1(before - or_zero(st.c[r])) : 1.0f;
  }
  save_R(hd, index, whole, rho);
}

// Segments [first, last) in reverse; R comes in as it is after them and leaves as it is before them. walk(t0, n) goes
// forward from `st`, as walk_forward does.
template <class Walk>
static void causal_back(const Head& hd, long index, const BackWork& bw, const State& st, const State& R, KeptList& list,
                        long first, long last, bool keys, Walk walk) {
  const SqCall& pr = *hd.pr;
  const long M = pr.features, ME = M * pr.width;
  for (long segment = last - 1; segment >= first && !list.failed; segment--) {
    if (M) {
      const float* from = checkpoint_at(pr, index, segment);
      load_state(hd, st, from, from + ME, from + ME + M);
    }
    const long begin = segment * SQ_SEGMENT;
    const long end = begin + SQ_SEGMENT < pr.length_k ? begin + SQ_SEGMENT : pr.length_k;
    list.used = 0;
    for (long t0 = begin; t0 < end; t0 += C) walk(t0, end - t0 < C ? end - t0 : C);
    for (long i = list.used - 1; M && i >= 0 && !list.failed; i--) walk_back(hd, bw, R, list.items[i], keys);
  }
}

// R before piece p is walked: dS_out after the last piece; to find dk and dv, what suffix_R left for the piece after it.
static void start_piece(const BackwardJob& job, const Head& hd, long index, long p, const State& R) {
  const bool last = p == job.pieces - 1;
  start_R(hd, index, R, last);
  if (job.phase != CAUSAL_KEYS || last) return;
  const State later = job.R.at(index * job.pieces + p + 1);
  memcpy(R.S, later.S, sizeof(float) * hd.pr->features * hd.lds);
  memcpy(R.z, later.z, sizeof(float) * hd.pr->features);
}

// R of each piece alone -> R of the piece and everything after it, in the shift of the piece's start.
static void suffix_R(const BackwardJob& job, const Head& hd, long index) {
  const SqCall& pr = *job.pr;
  const long M = pr.features, ME = M * pr.width;
  for (long p = job.query_pieces - 2; p >= 0; p--) {
    const State R = job.R.at(index * job.query_pieces + p), later = job.R.at(index * job.query_pieces + p + 1);
    const float* here = checkpoint_at(pr, index, p * job.segments) + ME + M;
    const float* next = checkpoint_at(pr, index, (p + 1) * job.segments) + ME + M;
    for (long r = 0; r < M; r++) {
      const float rho = pr.function == SQ_EXP ? exp1(here[r] - or_zero(next[r])) : 1.0f;
      R.z[r] += rho * later.z[r];
      for (long e = 0; e < pr.width; e++) R.S[r * hd.lds + e] += rho * later.S[r * hd.lds + e];
    }
  }
  save_R(hd, index, job.R.at(index * job.query_pieces), nullptr);
}

// States at the segment starts, when the forward did not keep them.
static void keep_states(const Head& hd, long index, const Work& w, const State& st, Chunk& ch) {
  const SqCall& pr = *hd.pr;
  const long ME = pr.features * pr.width;
  load_state_in(hd, index, st);
  for (long t0 = 0; t0 < pr.length_k; t0 += SQ_SEGMENT) {
    float* to = checkpoint_at(pr, index, t0 / SQ_SEGMENT);
    save_state(hd, st, to, to + ME, to + ME + pr.features);
    absorb(hd, w, st, ch, t0, t0 + SQ_SEGMENT < pr.length_k ? t0 + SQ_SEGMENT : pr.length_k);
  }
}

static void backward_task(void* context, int64_t task, int64_t) {
  BackwardJob& job = *(BackwardJob*)context;
  const SqCall& pr = *job.pr;
  const long index = task / job.pieces, p = task % job.pieces, M = pr.features;
  const Head hd = head_of(pr, index);
  if (job.phase == LOAD_STATES) {
    load_state(hd, job.states.at(index), pr.s_out + index * M * pr.width, pr.z_out + index * M, pr.c_out + index * M);
    return;
  }
  if (job.phase == SUM_R) return sum_R(job, hd, index);
  if (job.phase == SUFFIX_R) return suffix_R(job, hd, index);
  const bool causal = job.phase == CAUSAL_BACK || job.phase == CAUSAL_QUERIES || job.phase == CAUSAL_KEYS;
  KeptChunk items[SQ_SEGMENT];
  KeptList list = {items, {}, 0, 0, false};
  BackWork bw;
  Chunk ch = {};
  float *g = nullptr, *h = nullptr;
  State st = {}, R = {};
  if (!in_scratch([&](Arena& arena) {
        bw = take_back_work(arena, pr, hd.lds);
        if (causal || job.phase == KEEP_STATES) {
          st = take_state(arena, M, hd.lds);
          R = take_state(arena, M, hd.lds);
        }
        if (causal) {
          for (list.ready = 0; list.ready < SQ_SEGMENT / C; list.ready++) items[list.ready] = take_kept(arena, pr, hd.lds);
        } else {
          ch = take_chunk(arena, pr, hd.lds, false, job.phase == FULL_QUERIES);
          g = arena.take(C * hd.lds);
          h = arena.take(C);
        }
      })) {
    job.failed = true;
    return;
  }
  const long begin = p * job.piece;
  const long total = job.phase == FULL_QUERIES ? pr.length_q : pr.length_k;
  const long end = begin + job.piece < total ? begin + job.piece : total;
  if (job.phase == FULL_QUERIES) {
    const State part = job.R.at(index * job.query_pieces + p);
    start_R(hd, index, part, p == 0);
    full_queries(hd, bw, job.states.at(index), part, ch, g, h, begin, end);
  } else if (job.phase == FULL_KEYS) {
    full_keys(hd, bw, job.states.at(index), job.R.at(index * job.query_pieces), ch, begin, end);
  } else if (job.phase == KEEP_STATES) {
    keep_states(hd, index, bw.w, st, ch);
  } else {
    const Wanted wanted = {job.phase != CAUSAL_KEYS, job.phase != CAUSAL_QUERIES};
    const long from = p * job.segments, to = from + job.segments, all = segments_of(pr);
    if (job.phase == CAUSAL_QUERIES) R = job.R.at(task);
    start_piece(job, hd, index, p, R);
    causal_back(hd, index, bw, st, R, list, from, to < all ? to : all, wanted.keys,
                [&](long t0, long n) { walk_forward(hd, bw, st, list, t0, n, wanted); });
    if (job.phase == CAUSAL_BACK) save_R(hd, index, R, nullptr);
    release_kept(list, job.failed);
  }
}

static void run_back(BackwardJob& job, BackPhase phase, long pieces, long piece) {
  job.phase = phase;
  job.pieces = pieces;
  job.piece = piece;
  sq_parallel(job.pr->batch * job.pr->heads_kv * pieces, job.pr->threads, backward_task, &job);
}

static int linear_backward(const SqCall* call) {
  SqCall pr = *call;
  const long heads = pr.batch * pr.heads_kv;
  if (heads == 0 || pr.features == 0) return SQ_OK;
  BackwardJob job = {};
  job.pr = &pr;
  job.query_pieces = 1;
  float* kept = nullptr;
  if (pr.causal) {
    if (!pr.checkpoints) {
      kept = sq_allocate(heads * segments_of(pr) * pr.features * (pr.width + 2));
      if (!kept) return SQ_NO_MEMORY;
      pr.checkpoints = kept;
      run_back(job, KEEP_STATES, 1, 0);
    }
    const Cut by = causal_cut(pr);
    job.query_pieces = by.pieces;
    job.segments = by.piece / SQ_SEGMENT;
    if (by.pieces == 1) {
      run_back(job, CAUSAL_BACK, 1, 0);
    } else {
      job.R = new_states(pr, heads * by.pieces);
      if (job.R.base) {
        run_back(job, CAUSAL_QUERIES, by.pieces, 0);
        run_back(job, SUFFIX_R, 1, 0);
        run_back(job, CAUSAL_KEYS, by.pieces, 0);
      } else {
        job.failed = true;
      }
    }
  } else {
    const Cut queries = cut(heads, pr.length_q, 16, C), keys = cut(heads, pr.length_k, 16, C);
    job.query_pieces = queries.pieces;
    job.states = new_states(pr, heads);
    job.R = new_states(pr, heads * queries.pieces);
    if (job.states.base && job.R.base) {
      run_back(job, LOAD_STATES, 1, 0);
      run_back(job, FULL_QUERIES, queries.pieces, queries.piece);
      run_back(job, SUM_R, 1, 0);
      if (pr.length_k > 0) run_back(job, FULL_KEYS, keys.pieces, keys.piece);
    } else {
      job.failed = true;
    }
  }
  sq_release(kept);
  sq_release(job.states.base);
  sq_release(job.R.base);
  return job.failed ? SQ_NO_MEMORY : SQ_OK;
}

}  // namespace SQ_NS
