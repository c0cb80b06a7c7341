// One call of LSH attention: a plain structure, shared with Python (ctypes) field by field.
//
//   P_i   = keys j with c_i - c_j = 0 or 1 in some round;   causal: j <= i as well
//   out_i = sum_{j in P_i} e^{s q_i.k_j} v_j / (the same with 1 for v_j),   s = scale;   0 where P_i is empty
//
// A pair counts in the first round that shows it and is hidden in the others.
#pragma once

#include "../call.h"

// What becomes of a token's own key: like any other | always seen, if it is real | seen where nothing else is; a token that
// is not real then has the output 0.
enum SqOwn { SQ_OWN_ANY = 0, SQ_OWN_ALWAYS = 1, SQ_OWN_ALONE = 2 };

struct SqLsh {
  int64_t batch, heads_q, heads_kv, length_q, length_k, dim, width;  // width = E
  int64_t rounds, chunks;
  int32_t causal, own, threads;
  float scale;
  SqTensor q, k, v, out;
  const int32_t *query_chunk, *key_chunk;  // (B, Hq, R, L), (B, Hq, R, S): c, below `chunks`; negative: a key that nothing sees
  float* log_norm;                         // (B, Hq, L): log of the normaliser; infinite where no other key counts
  SqTensor dout, dq, dk, dv;               // backward only; float32
};

struct SqLshKernels {
  int (*forward)(const SqLsh*);
  int (*backward)(const SqLsh*);
};
