// The products of the forward in float32. experimental/pairs.h has the same functions with
// products of bfloat16 pairs.
#pragma once

#include "chunk.h"

namespace SQ_NS {

SQ_INLINE long product_floats(const SqCall&, long) { return 0; }

// Called before a state is read, once for all chunks that read it.
SQ_INLINE void begin_read(const Head&, const Work&, const State&) {}

// w.out[n][lds] = a^T S: tokens are rows here, as the output wants them.
SQ_INLINE void read_state(const Head& hd, const Work& w, const State& st, const float* a, long n) {
  gemm(n, value_vectors(*hd.pr), hd.pr->features, a, 1, LD, st.S, hd.lds, w.out, hd.lds, FROM_ZERO);
}

// w.out[n][lds] += scores V, panel by panel of queries: keys beyond a panel are not visible to it.
SQ_INLINE void weigh_values(const Head& hd, const Work& w, const Chunk& ch, const float* scores) {
  for (long p = 0; p * NV < ch.vectors; p++)
    gemm(T, value_vectors(*hd.pr), (p + 1) * T, scores + p * T, 1, LD, ch.values, hd.lds, w.out + p * T * hd.lds, hd.lds,
         FROM_C);
}

// rescale and update_state in one, where nothing reads the state in between.
SQ_INLINE void absorb_chunk(const Head& hd, const Work&, const State& st, const Chunk& ch) {
  rescale_sums(hd, st, ch);
  accumulate(hd, st, ch, ch.rho);
}

// S += phi V, z += sum phi.
SQ_INLINE void update_state(const Head& hd, const Work&, const State& st, const Chunk& ch) { accumulate(hd, st, ch); }

}  // namespace SQ_NS
