// Gradients of keys and values, summed over queries: one array per key head, or per part of its queries where heads are
// fewer than threads; parts are added when all of them are there. Where nothing stands between, sums are formed in the
// results themselves.
#pragma once

#include "keys.h"
#include "ranks.h"

namespace SQ_NS {

// By rank.
struct Sums {
  float *keys, *values;  // [S][ldk], [S][lde]
  long ldk, lde;
};

struct Summing {
  float* memory;  // [B * H * parts][S][ldk + lde], or null: dk and dv, which hold zeros
  long heads, heads_kv, parts, length, dim, width, ldk, lde, floats, blocks;
  const SqTensor *dk, *dv;  // float32
  const Ranks* real;        // [B]
};

SQ_INLINE bool whole_rows(const SqTensor& x, long width) {
  return width % VL == 0 && x.stride[3] == 1 && x.stride[2] == width;
}

// `real`: the real tokens of every sequence; `most`: parts that the work of a head can be cut into.
template <class Call>
static bool make_sums(Summing& s, const Call& p, const Ranks* real, long most) {
  const long threads = p.threads, length = p.length_k;
  s.heads = p.batch * p.heads_kv, s.heads_kv = p.heads_kv, s.length = length, s.dim = p.dim, s.width = p.width;
  s.dk = &p.dk, s.dv = &p.dv, s.real = real;
  s.ldk = padded(p.dim, VL), s.lde = padded(p.width, VL);
  s.parts = s.heads >= threads ? 1 : (threads + s.heads - 1) / s.heads;
  if (s.parts > most) s.parts = most;
  s.floats = padded(length * (s.ldk + s.lde), 16);
  s.memory = nullptr;
  bool all = true;
  for (long b = 0; b < p.batch; b++) all = all && !real[b].token_of;
  if (s.parts == 1 && all && whole_rows(p.dk, p.dim) && whole_rows(p.dv, p.width)) return true;
  s.memory = sq_allocate(s.heads * s.parts * s.floats);
  return s.memory != nullptr;
}

static Sums sums_of(const Summing& s, long task, bool fresh) {
  if (!s.memory) {
    const long b = task / s.heads_kv, h = task % s.heads_kv;
    return {(float*)s.dk->data + offset_of(*s.dk, b, h, 0), (float*)s.dv->data + offset_of(*s.dv, b, h, 0), s.ldk, s.lde};
  }
  float* keys = s.memory + task * s.floats;
  if (fresh) memset(keys, 0, sizeof(float) * s.floats);
  return {keys, keys + s.length * s.ldk, s.ldk, s.lde};
}

SQ_INLINE void add_row(float* to, const float* from, long n) {
  for (long i = 0; i < n; i += VL) store(to + i, load(to + i) + load(from + i));
}

SQ_INLINE void add_to_sums(const Sums& s, long rank, const float* key, const float* value) {
  add_row(s.keys + rank * s.ldk, key, s.ldk);
  add_row(s.values + rank * s.lde, value, s.lde);
}

constexpr long WRITTEN = 512;  // tokens that one task writes

static void write_sums_task(void* context, int64_t task, int64_t) {
  const Summing& s = *(const Summing*)context;
  const long head = task / s.blocks, from = task % s.blocks * WRITTEN, b = head / s.heads_kv, h = head % s.heads_kv;
  const Ranks& real = s.real[b];
  const long to = from + WRITTEN < real.count ? from + WRITTEN : real.count;
  for (long rank = from; rank < to; rank++) {
    float *dk = s.memory + head * s.parts * s.floats + rank * s.ldk;
    float *dv = s.memory + head * s.parts * s.floats + s.length * s.ldk + rank * s.lde;
    for (long part = 1; part < s.parts; part++) {
      add_row(dk, dk + part * s.floats, s.ldk);
      add_row(dv, dv + part * s.floats, s.lde);
    }
    put(*s.dk, b, h, real.token(rank), 1, s.dim, dk, s.ldk);
    put(*s.dv, b, h, real.token(rank), 1, s.width, dv, s.lde);
  }
}

// Tokens that are not real are left alone.
static void write_sums(Summing& s, long threads) {
  if (!s.memory) return;
  s.blocks = (s.length + WRITTEN - 1) / WRITTEN;
  sq_parallel(s.heads * s.blocks, threads, write_sums_task, &s);
}

}  // namespace SQ_NS
