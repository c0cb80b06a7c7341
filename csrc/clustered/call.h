// One call of clustered attention: a plain structure, shared with Python (ctypes) field by field.
//
//   c_j = mean of the queries of cluster j,   A_j = softmax(s c_j K^T),   s = scale
//   topk = 0   out_i = A_j V                                                                          for i in cluster j
//   topk > 0   out_i = m_j softmax_{l in T_j}(s q_i.k_l) V + sum_{l not in T_j} A_jl v_l,   m_j = sum_{l in T_j} A_jl
//
// T_j are the topk keys with the largest A_jl, or topk / group_size groups of neighbours with the largest joint weight.
#pragma once

#include "../call.h"

struct SqClustered {
  int64_t batch, heads_q, heads_kv, length_q, length_k, dim, width;  // width = E
  int64_t clusters, iterations, sample;  // sample: the most queries that k-means looks at while it moves the means
  int64_t bits;                          // 0: k-means on the queries; else on the signs of so many projections
  int64_t topk, group_size, chosen;      // chosen: entries of `top` per cluster
  int32_t threads, given;                // given: the choices are there already
  float scale;
  int32_t unused;
  SqTensor q, k, v, out;
  SqMask key_mask, query_mask;
  const float* starts;  // (clusters) in [0, 1): where k-means starts
  const float* matrix;  // (bits, dim)
  int32_t* assigned;    // (B, Hq, L): cluster of a query, 0 where it is masked
  int32_t* top;         // (B, Hq, clusters, chosen): tokens of T_j in order; -1 in the places that are left
  SqTensor dout, dq, dk, dv;  // backward only; float32
};

struct SqClusteredKernels {
  int (*forward)(const SqClustered*);
  int (*backward)(const SqClustered*);
};
