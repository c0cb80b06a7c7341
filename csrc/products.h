// The products of the forward in float32. pairs.h has the same functions with products of bfloat16 pairs.
#pragma once

#include "chunk.h"

namespace SQ_NS {

SQ_INLINE long product_floats(const SqProblem&, long) { return 0; }

// Called before a state is read, once for all chunks that read it.
SQ_INLINE void begin_read(const Head&, const Work&, const State&) {}

// w.out[E][LD] = a S.
SQ_INLINE void read_state(const Head& hd, const Work& w, const State& st, const float* a, long vectors) {
  gemm(hd.pr->width, vectors, hd.pr->features, st.S, 1, hd.lds, a, LD, w.out, LD, FROM_ZERO);
}

// w.out[E][LD] += scores V, panel by panel of queries: keys beyond a panel are not visible to it.
SQ_INLINE void weigh_values(const Head& hd, const Work& w, const Chunk& ch, const float* scores) {
  for (long p = 0; p * NV < ch.vectors; p++)
    gemm(hd.pr->width, NV, (p + 1) * T, ch.values, 1, hd.lds, scores + p * T, LD, w.out + p * T, LD, FROM_C);
}

// S += phi V, z += sum phi.
SQ_INLINE void update_state(const Head& hd, const Work&, const State& st, const Chunk& ch) { accumulate(hd, st, ch); }

}  // namespace SQ_NS
