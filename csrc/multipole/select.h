// Which clusters of a query are evaluated key by key.
//
//   by keys    cluster c is chosen if all clusters whose criterion is at least c's have at most `exact_keys` keys
//   by error   those with the largest expected squared error, until what the others leave is at most what is allowed
#pragma once

#include <float.h>

#include "clusters.h"

namespace SQ_NS::multipole {

SQ_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

// Clusters that may be chosen, side by side; room for VL entries more than there are columns.
struct Candidates {
  long n;
  float *value, *size;
  int32_t* column;
};

struct Selection {
  long count, keys;  // clusters, and keys in them
  bool limited;      // an error was asked for and the limit of keys kept it from being reached
  int32_t* columns;
};

#if SQ_VL == 8 && defined(__AVX2__)
// For every set of lanes the order that brings them to the front, a byte per lane.
struct FrontLanes {
  uint64_t order[256];
  constexpr FrontLanes() : order() {
    for (int mask = 0; mask < 256; mask++) {
      int n = 0;
      for (uint64_t lane = 0; lane < 8; lane++)
        if (mask >> lane & 1) order[mask] |= lane << (8 * n++);
    }
  }
};
static constexpr FrontLanes FRONT;
#endif

SQ_INLINE vi lanes_from(long first) {
  vi lane;
  for (int i = 0; i < VL; i++) lane[i] = (int32_t)(first + i);
  return lane;
}

// The lanes of x where keep is set, one after the other; whole vectors are written.
SQ_INLINE void put_front(vi keep, vf x, float* to) {
#if SQ_VL == 16 && defined(__AVX512F__) && defined(__AVX512DQ__)
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(_mm512_movepi32_mask((__m512i)keep), (__m512)x));
#elif SQ_VL == 8 && defined(__AVX2__)
  const unsigned mask = (unsigned)_mm256_movemask_ps((__m256)keep);
  const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)FRONT.order[mask]));
  _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)x, order));
#else
  const vi lanes = bits(x);
  for (int i = 0, n = 0; i < VL; i++) {
    const int32_t lane = lanes[i];
    memcpy(to + n, &lane, sizeof lane);
    n += keep[i] != 0;
  }
#endif
}

SQ_INLINE long count_lanes(vi keep) {
#if SQ_VL == 16 && defined(__AVX512F__) && defined(__AVX512DQ__)
  return __builtin_popcount(_mm512_movepi32_mask((__m512i)keep));
#elif SQ_VL == 8 && defined(__AVX2__)
  return __builtin_popcount((unsigned)_mm256_movemask_ps((__m256)keep));
#else
  long n = 0;
  for (int i = 0; i < VL; i++) n += keep[i] != 0;
  return n;
#endif
}

// Columns become candidates where keep is set.
SQ_INLINE void append(Candidates& to, vi keep, vf value, vf size, long first) {
  put_front(keep, value, to.value + to.n);
  put_front(keep, size, to.size + to.n);
  put_front(keep, as_float(lanes_from(first)), (float*)(to.column + to.n));
  to.n += count_lanes(keep);
}

// The columns with a value of at least `least`.
static void collect(const Clusters& c, const float* value, long columns, float least, Candidates& to) {
  to.n = 0;
  for (long j = 0; j < columns; j += VL) {
    const vf x = load(value + j);
    append(to, x >= splat(least), x, load(c.size + j), j);
  }
  // Lanes after the last candidate belong to nobody.
  store(to.value + to.n, splat(-INFINITY));
  store(to.size + to.n, zero());
}

// Keys of the candidates with a value of at least `least`.
SQ_INLINE float keys_from(const Candidates& from, float least) {
  vf total = zero();
  for (long j = 0; j < from.n; j += VL)
    total += as_float((load(from.value + j) >= splat(least)) & bits(load(from.size + j)));
  return hsum(total);
}

// The largest value below `high`.
SQ_INLINE float largest_below(const Candidates& from, float high) {
  vf best = splat(-INFINITY);
  for (long j = 0; j < from.n; j += VL) {
    const vf x = load(from.value + j);
    best = vmax(x < splat(high) ? x : splat(-INFINITY), best);
  }
  return hmax(best);
}

static void take_from(const Candidates& from, float least, Selection& to) {
  to.count = to.keys = 0;
  for (long j = 0; j < from.n; j++) {
    to.columns[to.count] = from.column[j];
    const bool chosen = from.value[j] >= least;
    to.count += chosen;
    to.keys += chosen ? (long)from.size[j] : 0;
  }
}

// Candidates that are equal and do not all fit beside those taken, all above `high`: the first ones, in order of columns.
static void take_ties(const Candidates& from, float high, long most, Selection& to) {
  const float next = largest_below(from, high), room = (float)(most - to.keys);
  vf smallest = splat(INFINITY);
  for (long j = 0; j < from.n; j += VL)
    smallest = vmin(load(from.value + j) == splat(next) ? load(from.size + j) : splat(INFINITY), smallest);
  if (!(next > -INFINITY) || !(-hmax(-smallest) <= room)) return;
  for (long j = 0; j < from.n; j++) {
    if (from.value[j] != next) continue;
    if (to.keys + (long)from.size[j] > most) return;
    to.columns[to.count++] = from.column[j];
    to.keys += (long)from.size[j];
  }
}

// Where candidates fill at most N vectors: each against every other, without a search whose branches would be guessed wrong.
template <int N>
static void take_few(const Candidates& from, long most, Selection& to, float& least) {
  vf mine[N], keys[N];  // keys: those of the candidates whose value is at least this one's
  SQ_UNROLL for (int j = 0; j < N; j++) mine[j] = load(from.value + j * VL), keys[j] = zero();
  for (long i = 0; i < from.n; i++) {
    const vf value = splat(from.value[i]), size = splat(from.size[i]);
    SQ_UNROLL for (int j = 0; j < N; j++) keys[j] += as_float((value >= mine[j]) & bits(size));
  }
  vf total = zero(), last = splat(least);
  to.count = 0;
  SQ_UNROLL for (int j = 0; j < N; j++) {
    const vi keep = (keys[j] <= splat((float)most)) & (mine[j] > splat(-INFINITY));
    put_front(keep, load((const float*)from.column + j * VL), (float*)(to.columns + to.count));
    to.count += count_lanes(keep);
    total += as_float(keep & bits(load(from.size + j * VL)));
    last = keep ? vmin(mine[j], last) : last;
  }
  to.keys = (long)hsum(total);
  least = -hmax(-last);
}

constexpr long FEW = 6;  // vectors

// `depth`: how far below the largest value the last row's choice went, where this one starts to look.
static void select_by_keys(const Clusters& c, const float* value, float top, long columns, long most, Candidates& list,
                           float& depth, Selection& s) {
  s.count = s.keys = 0;
  s.limited = false;
  if (!(top > -INFINITY) || most <= 0) return;
  float keys = 0.0f, low = -FLT_MAX;
  if (columns <= FEW * VL) {
    collect(c, value, columns, low, list);
  } else {
    for (int tries = 0; tries < 60; tries++, depth = 1.5f * depth + 1.0f) {
      low = top - depth;
      collect(c, value, columns, low, list);
      keys = keys_from(list, low);
      if (keys > (float)most || list.n >= columns) break;
    }
    if (keys <= (float)most) return take_from(list, low, s);
  }
  float high = top + 1.0f, above = 0.0f;
  switch ((list.n + VL - 1) / VL) {
    case 1: take_few<1>(list, most, s, high); break;
    case 2: take_few<2>(list, most, s, high); break;
    case 3: take_few<3>(list, most, s, high); break;
    case 4: take_few<4>(list, most, s, high); break;
    case 5: take_few<5>(list, most, s, high); break;
    case FEW: take_few<FEW>(list, most, s, high); break;
    default:
      // Too many keys from `low` on, few enough from `high` on. The border is guessed as if keys were spread evenly, then
      // approached candidate by candidate.
      for (int turn = 0; turn < 4; turn++) {
        const float guess = turn == 2 ? 0.5f : ((float)most - above) / (keys - above);
        const float middle = high - (high - low) * (guess < 0.05f ? 0.05f : guess > 0.95f ? 0.95f : guess);
        if (!(middle > low && middle < high)) break;
        const float its = keys_from(list, middle);
        if (its > (float)most) low = middle, keys = its;
        else high = middle, above = its;
      }
      for (float next = largest_below(list, high); keys_from(list, next) <= (float)most; next = largest_below(list, high))
        high = next;
      take_from(list, high, s);
  }
  take_ties(list, high, most, s);
  depth = 1.1f * (top - high) + 0.7f;
}

// Larger values first, of equals the earlier column.
SQ_INLINE bool before(const Candidates& x, long a, long b) {
  return x.value[a] > x.value[b] || (x.value[a] == x.value[b] && x.column[a] < x.column[b]);
}

SQ_INLINE void exchange(Candidates& x, long a, long b) {
  const float value = x.value[a], size = x.size[a];
  const int32_t column = x.column[a];
  x.value[a] = x.value[b], x.size[a] = x.size[b], x.column[a] = x.column[b];
  x.value[b] = value, x.size[b] = size, x.column[b] = column;
}

static void sift_down(Candidates& x, long n, long at) {
  for (long child = 2 * at + 1; child < n; at = child, child = 2 * at + 1) {
    if (child + 1 < n && before(x, child + 1, child)) child++;
    if (!before(x, child, at)) return;
    exchange(x, child, at);
  }
}

static void select_by_error(const Clusters& c, const float* error, float total, float allowed, long columns, long most,
                            Candidates& list, Selection& s) {
  s.count = s.keys = 0;
  s.limited = false;
  if (!(total > allowed)) return;
  // In double: what is left decides, and the first clusters may be a million times as large.
  double left = 0.0;
  for (long j = 0; j < columns; j++) left += error[j];
  collect(c, error, columns, allowed / (float)columns, list);  // what is below adds up to less than is allowed
  for (long i = list.n / 2 - 1; i >= 0; i--) sift_down(list, list.n, i);
  for (long n = list.n; n > 0 && left > allowed; n--) {
    if (s.keys + (long)list.size[0] > most) {
      s.limited = true;
      return;
    }
    s.columns[s.count++] = list.column[0];
    s.keys += (long)list.size[0];
    left -= list.value[0];
    exchange(list, 0, n - 1);
    sift_down(list, n - 1, 0);
  }
}

}  // namespace SQ_NS::multipole
