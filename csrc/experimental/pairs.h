// Products of bfloat16 pairs: sum += a0 b0 + a1 b1 per lane, where the CPU has an instruction for it (AVX512-BF16).
//
// Taken by the forward for bfloat16 values without gradients, where the output is rounded to 8 bits anyway:
//
//   S += phi^T V          phi rounded to bfloat16, V exact
//   O  = a S + scores V   a, S and the scores rounded, V exact
//
// Their roundings are independent from one feature or token to the next and average out; the error stays well below twice
// that of rounding the output. The projection W x stays in float32: rounding W shifts every exponent of a feature by
// the same amount for every token, an error of up to 6 times that of the output, and splitting W in two costs what
// float32 costs. Maxima, exponentials and normalisers are those of the float32 path (products.h). Gradients subtract nearly
// equal numbers and would feel the rounding of the state, so a forward that a backward follows stays in float32.
#pragma once

#include "../chunk.h"

namespace SQ_NS {

#if SQ_VL == 16 && defined(__AVX512BF16__)
#define SQ_DOT2 1
#endif

typedef uint32_t vu __attribute__((vector_size(4 * SQ_VL)));
typedef uint32_t vu_mem __attribute__((vector_size(4 * SQ_VL), aligned(4), may_alias));

SQ_INLINE vu load_pairs(const uint32_t* p) { return *(const vu_mem*)p; }
SQ_INLINE void store_pairs(uint32_t* p, vu v) { *(vu_mem*)p = v; }
SQ_INLINE vu splat_pair(uint32_t s) { return (vu){} + s; }
SQ_INLINE vf low_half(vu v) { return as_float((vi)(v << 16)); }
SQ_INLINE vf high_half(vu v) { return as_float((vi)(v & 0xffff0000u)); }

// The same sums in float32 arithmetic: what the instruction is checked against, and what tests run where it is missing.
SQ_INLINE vf dot2_emulated(vf sum, vu a, vu b) {
  return fused(low_half(a), low_half(b), fused(high_half(a), high_half(b), sum));
}

SQ_INLINE vf dot2(vf sum, vu a, vu b) {
#ifdef SQ_DOT2
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  return dot2_emulated(sum, a, b);
#endif
}

// Rounded to nearest, ties to even, still in the upper half of each lane.
SQ_INLINE vu rounded(vf x) {
  const vu u = (vu)bits(x);
  const vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);  // rounding could carry NaN into infinity or the sign
  return (nan & (u | 0x400000u)) | (~nan & (u + 0x7fffu + ((u >> 16) & 1u)));
}

SQ_INLINE vu pack(vf low, vf high) { return (rounded(low) >> 16) | (rounded(high) & 0xffff0000u); }

// to[i][j] = (from[2 i][j], from[2 i + 1][j]) for all `rows` rows (a missing last one counts as 0), `vectors` wide.
static void pack_rows(const float* from, long rows, long vectors, long ld, uint32_t* to) {
  for (long i = 0; i < rows; i += 2, to += ld, from += 2 * ld)
    for (long j = 0; j < vectors; j++)
      store_pairs(to + j * VL, pack(load(from + j * VL), i + 1 < rows ? load(from + ld + j * VL) : zero()));
}

// to[i][j] = (from[i][2 j], from[i][2 j + 1]): neighbours in a row, n of them even.
static void pack_columns(const float* from, long rows, long n, long ld, uint32_t* to) {
  for (long i = 0; i < rows; i++, from += ld, to += ld / 2)
    for (long j = 0; j < n; j += 2) {
      // Written for the vectoriser; the values are features and therefore finite, or NaN on purpose.
      uint32_t a, b;
      memcpy(&a, from + j, 4);
      memcpy(&b, from + j + 1, 4);
      const bool nan_a = (a & 0x7fffffffu) > 0x7f800000u, nan_b = (b & 0x7fffffffu) > 0x7f800000u;
      a = nan_a ? a | 0x400000u : a + 0x7fffu + ((a >> 16) & 1u);
      b = nan_b ? b | 0x400000u : b + 0x7fffu + ((b >> 16) & 1u);
      to[j / 2] = (a >> 16) | (b & 0xffff0000u);
    }
}

template <int R, int N>
SQ_INLINE void pair_tile(long K, const uint32_t* A, long ai, long ak, const uint32_t* B, long ldb, float* Cm, long ldc,
                         bool add) {
  vf s[R][N];
  SQ_UNROLL for (int i = 0; i < R; i++) SQ_UNROLL for (int j = 0; j < N; j++) {
    s[i][j] = add ? load(Cm + i * ldc + VL * j) : zero();
  }
  for (long k = 0; k < K; k++, A += ak, B += ldb) {
    vu b[N];
    SQ_UNROLL for (int j = 0; j < N; j++) b[j] = load_pairs(B + VL * j);
    SQ_UNROLL for (int i = 0; i < R; i++) {
      const vu a = splat_pair(A[i * ai]);
      SQ_UNROLL for (int j = 0; j < N; j++) s[i][j] = dot2(s[i][j], a, b[j]);
    }
  }
  SQ_UNROLL for (int i = 0; i < R; i++) SQ_UNROLL for (int j = 0; j < N; j++) store(Cm + i * ldc + VL * j, s[i][j]);
}

// C[i][j] (+)= sum over K pairs of A(i, k) . B[k][j]; the shapes of `gemm`, in tiles of MR rows and then of fewer.
static void pair_gemm(long rows, long vectors, long K, const uint32_t* A, long ai, long ak, const uint32_t* B, long ldb,
                      float* Cm, long ldc, bool add) {
  for (long j = 0; j < vectors;) {
    const bool two = j + NV <= vectors;
    long i = 0;
    for (; i + MR <= rows; i += MR)
      (two ? pair_tile<MR, NV> : pair_tile<MR, 1>)(K, A + i * ai, ai, ak, B + j * VL, ldb, Cm + i * ldc + j * VL, ldc, add);
    for (; i + 4 <= rows; i += 4)
      (two ? pair_tile<4, NV> : pair_tile<4, 1>)(K, A + i * ai, ai, ak, B + j * VL, ldb, Cm + i * ldc + j * VL, ldc, add);
    for (; i < rows; i++)
      (two ? pair_tile<1, NV> : pair_tile<1, 1>)(K, A + i * ai, ai, ak, B + j * VL, ldb, Cm + i * ldc + j * VL, ldc, add);
    j += two ? NV : 1;
  }
}

// Working memory of a chunk in pairs, after the arrays of `Work`.
struct Pairs {
  uint32_t *features, *values, *state, *scores;
};

SQ_INLINE long product_floats(const SqCall& pr, long lds) {
  const long M = round_up(pr.features, 2);
  return round_up(M * LD, 16) + round_up(C / 2 * lds, 16) + round_up(M / 2 * lds, 16) + round_up(C / 2 * LD, 16);
}

SQ_INLINE Pairs pairs_in(const Work& w, const SqCall& pr, long lds) {
  const long M = round_up(pr.features, 2);
  uint32_t* p = (uint32_t*)w.products;
  Pairs x = {p, nullptr, nullptr, nullptr};
  p += round_up(M * LD, 16);
  x.values = p;
  p += round_up(C / 2 * lds, 16);
  x.state = p;
  p += round_up(M / 2 * lds, 16);
  x.scores = p;
  return x;
}

// S += phi V, z += sum phi, like `accumulate`.
static void update_state(const Head& hd, const Work& w, const State& st, const Chunk& ch) {
  const SqCall& pr = *hd.pr;
  const Pairs x = pairs_in(w, pr, hd.lds);
  const long vectors = value_vectors(pr), n = round_up(ch.n, 2);
  pack_columns(ch.phi, pr.features, n, LD, x.features);  // lanes beyond the last token hold 0
  pack_rows(ch.values, n, vectors, hd.lds, x.values);
  pair_gemm(pr.features, vectors, n / 2, x.features, LD / 2, 1, x.values, hd.lds, st.S, hd.lds, true);
  for (long r = 0; r < pr.features; r++) st.z[r] += ch.sums[r];
}

static void absorb_chunk(const Head& hd, const Work& w, const State& st, const Chunk& ch) {
  rescale(hd, st, ch);
  update_state(hd, w, st, ch);
}

// The state as `read_state` wants it; once for all chunks that read it.
static void begin_read(const Head& hd, const Work& w, const State& st) {
  const SqCall& pr = *hd.pr;
  pack_rows(st.S, pr.features, value_vectors(pr), hd.lds, pairs_in(w, pr, hd.lds).state);
}

// w.out[n][lds] = a^T S for the packed state.
static void read_state(const Head& hd, const Work& w, const State&, const float* a, long n) {
  const SqCall& pr = *hd.pr;
  const Pairs x = pairs_in(w, pr, hd.lds);
  pack_rows(a, pr.features, vectors_for(n), LD, x.features);
  pair_gemm(n, value_vectors(pr), (pr.features + 1) / 2, x.features, 1, LD, x.state, hd.lds, w.out, hd.lds, false);
}

// w.out[n][lds] += scores V, panel by panel of queries.
static void weigh_values(const Head& hd, const Work& w, const Chunk& ch, const float* scores) {
  const SqCall& pr = *hd.pr;
  const Pairs x = pairs_in(w, pr, hd.lds);
  pack_rows(ch.values, ch.lanes, value_vectors(pr), hd.lds, x.values);
  for (long p = 0; p * NV < ch.vectors; p++) {
    const long keys = (p + 1) * T;
    pack_rows(scores + p * T, keys, NV, LD, x.scores);
    pair_gemm(T, value_vectors(pr), keys / 2, x.scores, 1, LD, x.values, hd.lds, w.out + p * T * hd.lds, hd.lds, true);
  }
}

// Whether the instruction does what the emulation does, on numbers of many sizes and signs and in long sums.
static int check_pairs() {
  uint32_t state = 12345u, a[VL], b[VL];
  auto next = [&state] { return state = state * 1664525u + 1013904223u; };
  vf sum = zero(), want = zero(), size = zero();
  for (int round = 0; round < 64; round++) {
    for (int i = 0; i < VL; i++) {
      // Exponents 2^-13 to 2^2, every mantissa and sign: 0x3900 .. 0x40ff and its negatives in both halves.
      a[i] = ((next() >> 8) & 0x87ff87ffu) + 0x39003900u;
      b[i] = ((next() >> 8) & 0x87ff87ffu) + 0x39003900u;
    }
    const vu x = load_pairs(a), y = load_pairs(b);
    sum = dot2(sum, x, y);
    want = dot2_emulated(want, x, y);
    size = dot2_emulated(size, x & 0x7fff7fffu, y & 0x7fff7fffu);
  }
  for (int i = 0; i < VL; i++) {
    const float off = sum[i] - want[i];
    if (!((off < 0 ? -off : off) <= 1e-5f * size[i])) return 0;
  }
  const vf one = dot2(zero(), splat_pair(0x00003f80u), splat_pair(0x00003f80u));  // (1, 0) . (1, 0): which half is which
  const vf poison = dot2(zero(), splat_pair(0x7fc00000u), splat_pair(0x3f803f80u));
  return one[0] == 1.0f && one[VL - 1] == 1.0f && poison[0] != poison[0];
}

}  // namespace SQ_NS
