// The keys that matter most to a cluster: the largest of a row of scores, or groups of neighbours with the largest joint
// weight. Of equals the first; in order of rank.
#pragma once

#include "../keys.h"

namespace SQ_NS::clustered {

SQ_INLINE void sift_down(float* heap, long n, long at) {
  for (long child = 2 * at + 1; child < n; at = child, child = 2 * at + 1) {
    if (child + 1 < n && heap[child + 1] < heap[child]) child++;
    if (!(heap[child] < heap[at])) return;
    const float x = heap[at];
    heap[at] = heap[child], heap[child] = x;
  }
}

// Places of the k largest of n values, k <= n; `heap` has room for k. What is not a number is taken last.
static void largest(const float* value, long n, long k, float* heap, int32_t* places) {
  if (k >= n) {
    for (long i = 0; i < n; i++) places[i] = (int32_t)i;
    return;
  }
  for (long i = 0; i < k; i++) heap[i] = value[i] == value[i] ? value[i] : -INFINITY;
  for (long i = k / 2 - 1; i >= 0; i--) sift_down(heap, k, i);
  auto offer = [&](long i) {
    if (!(value[i] > heap[0])) return;
    heap[0] = value[i];
    sift_down(heap, k, 0);
  };
  long i = k;
  for (; i + 4 * VL <= n; i += 4 * VL) {  // few values pass: most vectors are only compared
    const vf a = vmax(load(value + i), load(value + i + VL)), b = vmax(load(value + i + 2 * VL), load(value + i + 3 * VL));
    if (hmax(vmax(a, b)) > heap[0])
      for (long j = i; j < i + 4 * VL; j++) offer(j);
  }
  for (; i < n; i++) offer(i);
  const float least = heap[0];
  long above = 0, taken = 0;
  for (long j = 0; j < k; j++) above += heap[j] > least;
  long equals = k - above;
  for (long j = 0; j < n && taken < k; j++) {
    if (value[j] > least) places[taken++] = (int32_t)j;
    else if (equals > 0 && (value[j] == least || (least == -INFINITY && value[j] != value[j])))
      places[taken++] = (int32_t)j, equals--;
  }
}

// log sum e^score of each of the groups of `size` scores; the last one may be short.
static long group_values(const float* scores, long n, long size, float* value) {
  const long groups = (n + size - 1) / size;
  for (long g = 0; g < groups; g++) {
    const long from = g * size, to = from + size < n ? from + size : n;
    float peak = -INFINITY, total = 0.0f;
    for (long i = from; i < to; i++) peak = max1(scores[i], peak);
    for (long i = from; i < to; i++) total += exp1(scores[i] - peak);
    value[g] = peak + logf(total);
  }
  return groups;
}

// Ranks of T from a row of n scores; returns how many. heap: topk, value: n, places: topk.
static long choose_top(const float* scores, long n, long topk, long size, float* heap, float* value, int32_t* places) {
  if (size == 1) {
    const long k = topk < n ? topk : n;
    largest(scores, n, k, heap, places);
    return k;
  }
  const long groups = group_values(scores, n, size, value), k = topk / size < groups ? topk / size : groups;
  largest(value, groups, k, heap, places);
  long count = 0;
  for (long g = k - 1; g >= 0; g--) {  // from the last on: ranks take the places of groups
    const long from = places[g] * size, to = from + size < n ? from + size : n;
    for (long i = to - 1; i >= from; i--) places[g * size + (i - from)] = (int32_t)i;
    count += to - from;
  }
  return count;  // only the last group, whose ranks are the last ones, is short
}

}  // namespace SQ_NS::clustered
