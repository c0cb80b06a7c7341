// One call of sparse attention: a plain structure, shared with Python (ctypes) field by field.
//
//   out_i = sum_{j in N(i)} e^{s q_i.k_j} v_j / (the same with 1 for v_j),   s = scale
//   summary = 0   N(i) = {|i - j| <= stride} or {(i - j) mod stride = 0}
//   summary > 0   N(i) = {j in the block of i} or {j among the last `summary` tokens of a block}, blocks of `stride`
//   causal        j <= i as well
//
// Positions are ranks among the real tokens; a token that is not real is seen by nobody, and its output is 0.
#pragma once

#include "../call.h"

struct SqSparse {
  int64_t batch, heads_q, heads_kv, length_q, length_k, dim, width;  // length_q = length_k; width = E
  int64_t stride, summary;
  int32_t causal, threads;
  float scale;
  int32_t unused;
  SqTensor q, k, v, out;
  SqMask key_mask;
  float* log_norm;            // (B, Hq, L): log of the normaliser
  SqTensor dout, dq, dk, dv;  // backward only; float32
};

struct SqSparseKernels {
  int (*forward)(const SqSparse*);
  int (*backward)(const SqSparse*);
};
