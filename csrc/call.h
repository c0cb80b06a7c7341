// What one call of the library is about: plain structures, shared with Python (ctypes) field by field.
//
//   p = W x,                               W (m_w, D): dense, Hadamard-Rademacher, or absent (p = x)
//   exponential:  log phi(x) = [p, -p] + bias (+ square |y|^2 + tilt . y for keys);  [p] alone unless antithetic
//   plain:        phi(x) = f(p) + epsilon,  f = relu | elu + 1 | identity
//   state:        S = sum phi(k) v^T, z = sum phi(k), both divided by e^c; c = running maximum per feature (0 if plain)
#pragma once

#include <stdint.h>

enum SqDtype { SQ_FLOAT32 = 0, SQ_BFLOAT16 = 1, SQ_FLOAT16 = 2 };
// SQ_TAYLOR: without a projection; the rows are the products of taylor.h.
enum SqFunction { SQ_EXP = 0, SQ_RELU = 1, SQ_ELU1 = 2, SQ_IDENTITY = 3, SQ_TAYLOR = 4 };
enum SqProjection { SQ_DENSE = 0, SQ_HADAMARD = 1, SQ_NONE = 2 };

// (batch, head, token, component); strides in elements, all of them free.
struct SqTensor {
  void* data;
  int64_t stride[4];
  int32_t dtype;
  int32_t unused;
};

struct SqMask {
  const uint8_t* data;  // (B, tokens), nonzero = real; null = all real
  int64_t batch, token;
};

// One side's map, queries or keys. A *_head stride of 0 shares the array between heads. Null arrays count as 0.
struct SqMap {
  const float* weight;  // (Hw, m_w, D) contiguous; null unless dense
  int64_t weight_head;
  const float* bias;  // (Hw, m_w)
  int64_t bias_head;
  const float* tilt;  // (Hw, D); for queries only beside near keys, elsewhere the normaliser cancels it
  int64_t tilt_head;
  const float* signs;  // (Hw, n_b, k, D') of +-1, D' = 2^p >= D; null unless Hadamard
  int64_t signs_head;
  const float* norms;  // (Hw, m_w) row norms, the factors 1/sqrt(D') included
  int64_t norms_head;
  float square;  // like tilt
  float unused;
};

// One call: windowed linear attention. With `near`, keys in a window around the query and the first `sinks` keys have exact
// softmax weights, and the far map weighs the rest (features = 0: nothing); without it the map weighs every key.
struct SqCall {
  int64_t batch, heads_q, heads_kv, length_q, length_k, dim, width, features, rows;  // width = E, rows = m_w
  // Key i of the walk is token i + key_shift of k and v, of which keys_stored exist; the others count as masked. Causal
  // attention with length_k = length_q + 1 takes one key more into the state than any query sees.
  int64_t key_shift, keys_stored;
  int32_t function, projection, antithetic, causal, blocks, normalise, threads;
  int32_t accumulate;  // dq, dk, dv are float32 and are added to
  float epsilon;
  int32_t differentiable;  // forward only: a backward will follow
  int32_t non_temporal;    // step only: the new state is not wanted in the caches, since others will be used before it
  int32_t near;
  SqTensor q, k, v, out;  // q, k: as the far map takes them; k and v hold `past` tokens before the first query's own
  SqMap map_q, map_k;
  const uint8_t* key_mask;  // (B, S), nonzero = has a weight, with `near` a far one; null = all
  int64_t mask_batch, mask_token;
  // States, contiguous (B, H_kv, M, E), (B, H_kv, M), (B, H_kv, M). Null s_in = empty; null s_out = not wanted.
  const float *s_in, *z_in, *c_in;
  float *s_out, *z_out, *c_out;
  // The state before every SQ_SEGMENT tokens, (B, H_kv, segments, M * (E + 2)); null = not kept / recompute.
  float* checkpoints;
  // Backward only. ds_out, dz_out: gradient with respect to the outgoing state, or null.
  SqTensor dout, dq, dk, dv;
  const float *ds_out, *dz_out;
  float *ds_in, *dz_in;
  // -- near only ------------------------------------------------------------------------------------------------------
  SqTensor near_q, near_k;                      // (.., L, near_dim), (.., past + L, near_dim)
  SqTensor sink_k, sink_v;                      // (.., sinks, near_dim), (.., sinks, E)
  SqTensor near_dq, near_dk, sink_dk, sink_dv;  // float32, added to
  const uint8_t* near_mask;  // (B, past + L), nonzero = has a weight in the window (real, and no sink); null = all
  int64_t near_batch, near_token;
  const int64_t* sink_place;  // (B, sinks): token of k at which a sink stands, negative if before all, or SQ_NOWHERE
  const float* gain;          // (B, Hq): added to the log of far weights, or null
  float* gain_grad;           // (B, Hq), or null
  float* stats;               // (B, Hq, L, 2): log shift of the row, and 1 / its normaliser
  int64_t near_dim, sinks, window, past;
  float scale;
  int32_t both_sides;  // the window has a right half; the walks over far keys are causal either way
  // -- a step only: near_k and v are the window (B, H, w, .); k is the token that leaves it (the new one where w = 0) as the
  // far map takes it; every result is a new array -----------------------------------------------------------------------
  SqTensor token_k, token_v;   // the new token
  const int64_t* count;        // (B,): tokens so far
  const uint8_t* token_mask;   // (B,), or null = real; a token that is not real changes nothing
  int64_t* count_out;
  float *window_k_out, *window_v_out, *sink_k_out, *sink_v_out;  // (B, H, w, D), (B, H, w, E), (B, H, sinks, .)
};

// The place of a sink that is not there.
constexpr int64_t SQ_NOWHERE = (int64_t)1 << 40;

// Tokens per checkpoint; a multiple of every chunk length (48, 64).
enum { SQ_SEGMENT = 192 };

// Work is cut into `tasks`; body(context, task, worker) runs once for each, on any of `threads` workers.
typedef void (*SqBody)(void* context, int64_t task, int64_t worker);
void sq_parallel(int64_t tasks, int64_t threads, SqBody body, void* context);

// Scratch memory of the calling thread, 64-byte aligned, kept between calls. Contents are undefined.
float* sq_scratch(int64_t floats);

// The same, for what all workers of a call share: the calling thread takes it before it starts them. Large ones go back.
float* sq_workspace(int64_t floats);
void sq_workspace_done();

// Memory that starts on a cache line, or null; released with sq_release.
float* sq_allocate(int64_t floats);
void sq_release(float* memory);

// One instruction set's kernels.
struct SqKernels {
  int (*forward)(const SqCall*);
  int (*backward)(const SqCall*);
  int (*step)(const SqCall*);
  int (*project)(const SqCall*, float*);
};

// Experimental: products of bfloat16 pairs (experimental/pairs.h). check: whether they are right on this CPU.
struct SqPairKernels {
  int (*forward)(const SqCall*);
  int (*check)();
};

enum SqStatus { SQ_OK = 0, SQ_NO_MEMORY = 1 };
