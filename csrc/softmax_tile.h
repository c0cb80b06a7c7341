// A tile of queries against a tile of keys: exact softmax weights, sums that grow from tile to tile, and their gradients.
//
//   peak, mass, sum   largest score of a query so far; sums of e^{score - peak} and of e^{score - peak} v
//   backward          P = e^{score - log normaliser},   g = P (dout.v - dout.out);   dq += g k,  dk = g q,  dv = P dout
#pragma once

#include <math.h>

#include "keys.h"

namespace SQ_NS {

// Scratch of one worker; rows are queries of one head, columns keys.
struct SoftmaxTile {
  static constexpr long ROWS = 64, COLUMNS = 256;
  long dim, width, ldk, lde, lds, rows;
  float *q, *sum, *peak, *mass;        // [ROWS][ldk] times the scale, [ROWS][lde], [ROWS]
  float *keys, *panels, *values;       // [COLUMNS][ldk], panels of D rows, [COLUMNS][lde]
  float* scores;                       // [ROWS][lds]
  float *dout, *dq, *slope, *norm;     // backward: [ROWS][lde], [ROWS][ldk] with respect to scaled queries; [ROWS]: dout.out
  float *value_panels, *products;      // panels of E rows; [ROWS][lds]
  float *dk, *dv;                      // [COLUMNS][ldk], [COLUMNS][lde]
};

static void cut_tile(SoftmaxTile& t, long dim, long width, bool backward, float* memory, long* floats) {
  constexpr long ROWS = SoftmaxTile::ROWS, COLUMNS = SoftmaxTile::COLUMNS;
  t.dim = dim, t.width = width;
  t.ldk = padded(dim, VL), t.lde = padded(width, VL), t.lds = COLUMNS + 16;
  long used = 0;
  auto take = [&](long n) {
    float* at = memory ? memory + used : nullptr;
    used += padded(n, 16);
    return at;
  };
  t.q = take(ROWS * t.ldk);
  t.sum = take(ROWS * t.lde);
  t.peak = take(ROWS);
  t.mass = take(ROWS);
  t.keys = take(COLUMNS * t.ldk);
  t.panels = take(COLUMNS * dim);
  t.values = take(COLUMNS * t.lde);
  t.scores = take(ROWS * t.lds);
  if (backward) {
    t.dout = take(ROWS * t.lde);
    t.dq = take(ROWS * t.ldk);
    t.slope = take(ROWS);
    t.norm = take(ROWS);
    t.value_panels = take(COLUMNS * width);
    t.products = take(ROWS * t.lds);
    t.dk = take(COLUMNS * t.ldk);
    t.dv = take(COLUMNS * t.lde);
  }
  *floats = used;
}

// A tile in the scratch memory of this thread; false where there is none.
static bool take_tile(SoftmaxTile& t, long dim, long width, bool backward) {
  long floats;
  cut_tile(t, dim, width, backward, nullptr, &floats);
  float* memory = sq_scratch(floats);
  if (memory) cut_tile(t, dim, width, backward, memory, &floats);
  return memory != nullptr;
}

static void start_sums(SoftmaxTile& t) {
  for (long r = 0; r < t.rows; r++) t.peak[r] = -INFINITY, t.mass[r] = 0.0f;
  memset(t.sum, 0, sizeof(float) * t.rows * t.lde);
}

// The n loaded keys added to the sums, from their scores (-inf: not seen).
static void add_keys(SoftmaxTile& t, long n) {
  float factor[SoftmaxTile::ROWS];
  const long vectors = padded(n, VL) / VL;
  for (long r = 0; r < t.rows; r++) {
    float *row = t.scores + r * t.lds, &peak = t.peak[r], &mass = t.mass[r];
    vf highest = splat(peak);
    for (long j = 0; j < vectors; j++) highest = vmax(load(row + j * VL), highest);
    const float now = hmax(highest), shift = now == -INFINITY ? 0.0f : now;
    factor[r] = mass == 0.0f ? 0.0f : exp1(peak - shift);
    mass = mass * factor[r] + exponentiate(row, vectors, shift);
    peak = now;
  }
  if (finite_rows(t.values, n * t.lde)) return times_rows(t.rows, n, t.scores, t.lds, t.values, t.lde, t.sum, FROM_SCALED, factor);
  for (long r = 0; r < t.rows; r++) {  // a hidden value that is not finite must not meet a weight of 0
    for (long e = 0; e < t.lde; e++) t.sum[r * t.lde + e] *= factor[r];
    for (long j = 0; j < n; j++)
      for (long e = 0; t.scores[r * t.lds + j] != 0.0f && e < t.lde; e++)
        t.sum[r * t.lde + e] += t.scores[r * t.lds + j] * t.values[j * t.lde + e];
  }
}

// Means under the softmax, in place of sums.
static void normalise_row(SoftmaxTile& t, long r) {
  float* row = t.sum + r * t.lde;
  const vf part = splat(1.0f / t.mass[r]);
  for (long e = 0; e < t.lde; e += VL) store(row + e, load(row + e) * part);
}

// Backward: outputs stand in `sum`, their gradients in `dout`, log normalisers in `norm`.
static void start_gradients(SoftmaxTile& t) {
  for (long r = 0; r < t.rows; r++) {
    vf sum = zero();
    for (long e = 0; e < t.lde; e += VL) sum += load(t.dout + r * t.lde + e) * load(t.sum + r * t.lde + e);
    t.slope[r] = hsum(sum);
  }
  memset(t.dq, 0, sizeof(float) * t.rows * t.ldk);
}

// dq of the tile grows by what the n loaded keys give; dk and dv are those of these keys.
static void add_gradients(SoftmaxTile& t, long n) {
  const long vectors = padded(n, VL) / VL;
  lay_panels(t.values, n, t.width, t.lde, t.value_panels);
  times_panels(t.rows, n, t.width, t.dout, t.lde, t.value_panels, t.products, t.lds);
  for (long r = 0; r < t.rows; r++) slopes(t.scores + r * t.lds, t.products + r * t.lds, vectors, t.norm[r], t.slope[r]);
  times_rows(t.rows, n, t.products, t.lds, t.keys, t.ldk, t.dq, FROM_C);
  memset(t.dk, 0, sizeof(float) * n * t.ldk);
  memset(t.dv, 0, sizeof(float) * n * t.lde);
  add_transposed(n, t.rows, t.products, t.lds, t.q, t.ldk, t.dk);
  add_transposed(n, t.rows, t.scores, t.lds, t.dout, t.lde, t.dv);
}

// dq of row r, added to what is there for its token.
static void add_query(const SoftmaxTile& t, long r, float scale, const SqTensor& dq, long b, long h, long token) {
  float* to = (float*)dq.data + offset_of(dq, b, h, token);
  for (long d = 0; d < t.dim; d++) to[d] += scale * t.dq[r * t.ldk + d];
}

}  // namespace SQ_NS
