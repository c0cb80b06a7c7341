// One call of multipole attention: a plain structure, shared with Python (ctypes) field by field.
//
//   l_c = s q.mu_c + min(cap, s^2 |q|^2 var_c / 2) + log n_c        estimated log mass of cluster c, s = scale
//   out = (sum_{c far} e^{l_c} vbar_c + sum_{j exact} e^{s q.k_j} v_j) / (the same with 1 for v)
//
// Real keys are counted from a row's first one (their rank). Keys of complete chunks of `chunk` ranks are clustered; the
// others are exact, and so is the query's own chunk in causal calls.
#pragma once

#include "../call.h"

struct SqMultipole {
  int64_t batch, heads_q, heads_kv, length_q, length_k, dim, width;  // width = E
  int64_t past;  // causal: query i stands at key past + i
  int64_t chunk, clusters, largest, iterations;  // largest: the most keys in one cluster
  int64_t exact_keys;  // negative: by the number of clustered keys, see `most_keys`
  int32_t causal, threads;
  int32_t forced;  // selection is given
  int32_t unused;
  float scale, cap, radius, error;  // error < 0: exact_keys alone decides
  SqTensor q, k, v, out;
  const uint8_t* key_mask;  // (B, S), nonzero = real; null = all real
  int64_t mask_batch, mask_token;
  const int32_t* starts;  // (clusters): ranks inside a chunk that k-means starts from
  // Choices. chunks = S / chunk, slots = clusters + chunk / largest. A chunk whose sizes are 0 is clustered by the call, if
  // it is complete; the others are taken as they are.
  int32_t* order;      // (B, H, chunks, chunk): ranks inside the chunk, sorted by cluster
  int32_t* sizes;      // (B, H, chunks, slots)
  uint8_t* selection;  // (B, Hq, L, chunks, slots), nonzero = exact; or null
  float* log_norm;     // (B, Hq, L): log of the normaliser; or null
  float* estimate;     // (B, Hq, L, 2): estimated squared error and |out|^2; or null
  int32_t* exact;      // (B, Hq, L): exact far keys, negative where the limit was reached; or null
  SqTensor dout, dq, dk, dv;  // backward only; dk, dv: float32
};

// Keys kept between calls. A complete chunk of a row is a page: its keys and values by cluster, written once. `statistics` has
// what is known of all its clusters, and grows at its end; the keys after the last page are the tail.
struct SqMultipolePages {
  SqMultipole call;    // k, v: the new tokens; key_mask (B, L): which of them are real; causal or not as for the queries
  int64_t capacity;    // pages of a row that `statistics` has room for
  int64_t tail_capacity;  // ranks that the tail has room for
  const int64_t* pages;  // (B): pages of a row
  const int64_t* held;   // (B): real keys in its tail, before the call
  float* statistics;     // (B, H, subquad_multipole_statistics(call))
  float *tail_keys, *tail_panels, *tail_values;  // (B, H, tail_capacity, D and E padded to whole vectors); panels of D rows
  // New pages: of `jobs` rows, whose tails are full.
  int64_t jobs;
  const int64_t* rows;   // (jobs)
  float* const* memory;  // (jobs, H): keys in panels by cluster, then values
  const int64_t* values; // (jobs, H): floats in front of the values
};

// Clusters of constant memory: (B, H, N) sizes and variances, (B, H, N, D) means, (B, H, N, E) mean values.
struct SqFar {
  float *size, *mean, *variance, *mean_value;
};

// Full tails of `jobs` rows that join the clusters `before`; `after` and the statistics have room for the result.
struct SqConstant {
  SqMultipolePages pages;  // statistics: of one page with N clusters
  int64_t sinks, limit;    // N = sinks + limit: the first keys of a sequence, then clusters
  int64_t clusters;        // of a chunk, by k-means
  SqFar before, after;
};

struct SqMultipoleKernels {
  int (*forward)(const SqMultipole*);
  int (*backward)(const SqMultipole*);
  int64_t (*statistics)(const SqMultipolePages*);
  int (*step)(const SqMultipolePages*);
  int (*cluster)(const SqMultipolePages*);
  int (*page)(const SqMultipolePages*);
  int (*grow)(const SqMultipolePages*, const SqMultipolePages*);
  int (*absorb)(const SqConstant*);
  int (*summarise)(const SqConstant*);
  int64_t lanes;
};
