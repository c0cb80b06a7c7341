// Tokens in memory are rows (token, component); the kernels want panels (component, token): tokens along the lanes.
//
//   fetch:  rows of any dtype and stride -> float32 rows         panel:   rows -> X^T, LD tokens per row
//   unpanel: X^T -> rows                                         put:     float32 rows -> rows of any dtype and stride
#pragma once

#include "call.h"
#include "vec.h"

namespace SQ_NS {

SQ_INLINE float from_bf16(uint16_t h) {
  const uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

SQ_INLINE uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);  // NaN must not round to infinity
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

SQ_INLINE float from_half(uint16_t h) {
  // Shifted into place the exponent is 112 too small; the product repairs it and normalises subnormals on the way.
  uint32_t u = (uint32_t)(h & 0x7fffu) << 13;
  float f;
  memcpy(&f, &u, 4);
  f *= 5.192296858534828e33f;  // 2^112
  memcpy(&u, &f, 4);
  if ((h & 0x7c00u) == 0x7c00u) u |= 0x7f800000u;
  u |= (uint32_t)(h & 0x8000u) << 16;
  memcpy(&f, &u, 4);
  return f;
}

SQ_INLINE uint16_t to_half(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  const uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (u >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);  // 65536 and above; 65520..65536 rounds there below
  if (u < 0x38800000u) {
    // Subnormal: adding 0.5 (exponent 126, unit 2^-24) rounds to the half's unit in the float adder itself.
    float g;
    memcpy(&g, &u, 4);
    g += 0.5f;
    memcpy(&u, &g, 4);
    return (uint16_t)(sign | (u - 0x3f000000u));
  }
  return (uint16_t)(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13));
}

SQ_INLINE long offset_of(const SqTensor& x, long b, long h, long t) {
  return b * x.stride[0] + h * x.stride[1] + t * x.stride[2];
}

// A call to memcpy costs as much as such a short row.
SQ_INLINE void copy_row(float* to, const float* from, long n) {
  long i = 0;
  for (; i + VL <= n; i += VL) store(to + i, load(from + i));
  for (; i < n; i++) to[i] = from[i];
}

// n rows of `dim` components from token t0 on, as float32 rows of stride ld.
static void fetch(const SqTensor& x, long b, long h, long t0, long n, long dim, float* to, long ld) {
  const long step = x.stride[3];
  for (long i = 0; i < n; i++) {
    const long at = offset_of(x, b, h, t0 + i);
    float* row = to + i * ld;
    if (x.dtype == SQ_FLOAT32) {
      const float* from = (const float*)x.data + at;
      if (step == 1) copy_row(row, from, dim);
      else for (long d = 0; d < dim; d++) row[d] = from[d * step];
    } else {
      const uint16_t* from = (const uint16_t*)x.data + at;
      if (x.dtype == SQ_BFLOAT16) for (long d = 0; d < dim; d++) row[d] = from_bf16(from[d * step]);
      else for (long d = 0; d < dim; d++) row[d] = from_half(from[d * step]);
    }
  }
}

static void put(const SqTensor& x, long b, long h, long t0, long n, long dim, const float* from, long ld) {
  const long step = x.stride[3];
  for (long i = 0; i < n; i++) {
    const long at = offset_of(x, b, h, t0 + i);
    const float* row = from + i * ld;
    if (x.dtype == SQ_FLOAT32) {
      float* to = (float*)x.data + at;
      if (step == 1) copy_row(to, row, dim);
      else for (long d = 0; d < dim; d++) to[d * step] = row[d];
    } else {
      uint16_t* to = (uint16_t*)x.data + at;
      if (x.dtype == SQ_BFLOAT16) for (long d = 0; d < dim; d++) to[d * step] = to_bf16(row[d]);
      else for (long d = 0; d < dim; d++) to[d * step] = to_half(row[d]);
    }
  }
}

// Rows to prefetch. Requests are issued a few at a time and arrive while products are computed: a burst of
// requests would fill the processor's list of open ones and wait for memory as the loads themselves would.
struct Prefetch {
  const char* row;
  long stride, rows, bytes;  // bytes from row to row; rows still to request; bytes in each

  void issue(long some) {
    for (; some > 0 && rows > 0; some--, rows--, row += stride)
      for (long at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
  }
};

// Tokens [t0, t0 + n), as far as they exist.
SQ_INLINE Prefetch prefetch_rows(const SqTensor& x, long b, long h, long t0, long n, long length, long dim) {
  const long size = x.dtype == SQ_FLOAT32 ? 4 : 2, left = length - t0;
  return {(const char*)x.data + offset_of(x, b, h, t0) * size, (long)x.stride[2] * size,
          x.stride[3] != 1 ? 0 : left < n ? left : n, dim * size};
}

// What the next chunk reads, or this one writes.
struct Prefetches {
  Prefetch first, second;
  void issue(long some) { first.issue(some), second.issue(some); }
};

SQ_INLINE void transpose4(const float* a, long lda, float* b, long ldb) {
  const v4 r0 = load4(a), r1 = load4(a + lda), r2 = load4(a + 2 * lda), r3 = load4(a + 3 * lda);
  const v4 s0 = __builtin_shufflevector(r0, r1, 0, 4, 1, 5), s1 = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
  const v4 s2 = __builtin_shufflevector(r2, r3, 0, 4, 1, 5), s3 = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
  store4(b, __builtin_shufflevector(s0, s2, 0, 1, 4, 5));
  store4(b + ldb, __builtin_shufflevector(s0, s2, 2, 3, 6, 7));
  store4(b + 2 * ldb, __builtin_shufflevector(s1, s3, 0, 1, 4, 5));
  store4(b + 3 * ldb, __builtin_shufflevector(s1, s3, 2, 3, 6, 7));
}

#if SQ_VL >= 8
typedef float v8 __attribute__((vector_size(32)));
typedef float v8_mem __attribute__((vector_size(32), aligned(4), may_alias));

// Halves of rows i and i + 4 side by side first, so that no lane has to cross afterwards.
SQ_INLINE void transpose8(const float* a, long lda, float* b, long ldb) {
  SQ_UNROLL for (int half = 0; half < 8; half += 4) {
    v8 r[4], s[4];
    SQ_UNROLL for (int i = 0; i < 4; i++)
      r[i] = __builtin_shufflevector(load4(a + i * lda + half), load4(a + (i + 4) * lda + half), 0, 1, 2, 3, 4, 5, 6, 7);
    s[0] = __builtin_shufflevector(r[0], r[1], 0, 8, 1, 9, 4, 12, 5, 13);
    s[1] = __builtin_shufflevector(r[0], r[1], 2, 10, 3, 11, 6, 14, 7, 15);
    s[2] = __builtin_shufflevector(r[2], r[3], 0, 8, 1, 9, 4, 12, 5, 13);
    s[3] = __builtin_shufflevector(r[2], r[3], 2, 10, 3, 11, 6, 14, 7, 15);
    float* to = b + half * ldb;
    *(v8_mem*)to = __builtin_shufflevector(s[0], s[2], 0, 1, 8, 9, 4, 5, 12, 13);
    *(v8_mem*)(to + ldb) = __builtin_shufflevector(s[0], s[2], 2, 3, 10, 11, 6, 7, 14, 15);
    *(v8_mem*)(to + 2 * ldb) = __builtin_shufflevector(s[1], s[3], 0, 1, 8, 9, 4, 5, 12, 13);
    *(v8_mem*)(to + 3 * ldb) = __builtin_shufflevector(s[1], s[3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
}
#endif

// b[j][i] = a[i][j] for i < rows, j < cols.
static void transpose(const float* a, long rows, long cols, long lda, float* b, long ldb) {
  long i = 0;
#if SQ_VL >= 8
  for (; i + 8 <= rows; i += 8) {
    long j = 0;
    for (; j + 8 <= cols; j += 8) transpose8(a + i * lda + j, lda, b + j * ldb + i, ldb);
    for (; j < cols; j++)
      for (long k = 0; k < 8; k++) b[j * ldb + i + k] = a[(i + k) * lda + j];
  }
#endif
  for (; i + 4 <= rows; i += 4) {
    long j = 0;
    for (; j + 4 <= cols; j += 4) transpose4(a + i * lda + j, lda, b + j * ldb + i, ldb);
    for (; j < cols; j++)
      for (long k = 0; k < 4; k++) b[j * ldb + i + k] = a[(i + k) * lda + j];
  }
  for (; i < rows; i++)
    for (long j = 0; j < cols; j++) b[j * ldb + i] = a[i * lda + j];
}

// Tokens [t0, t0 + n) as a panel to[dim][LD]; lanes n .. lanes are zero. `rows` is scratch for C x dim floats.
static void panel(const SqTensor& x, long b, long h, long t0, long n, long lanes, long dim, float* to, float* rows) {
  const float* from = rows;
  long ld = dim;
  if (x.dtype == SQ_FLOAT32 && x.stride[3] == 1) {
    from = (const float*)x.data + offset_of(x, b, h, t0);
    ld = x.stride[2];
  } else {
    fetch(x, b, h, t0, n, dim, rows, dim);
  }
  transpose(from, n, dim, ld, to, LD);
  if (n < lanes)
    for (long d = 0; d < dim; d++) memset(to + d * LD + n, 0, sizeof(float) * (lanes - n));
}

// The panel from[dim][LD] back to tokens [t0, t0 + n).
static void unpanel(const SqTensor& x, long b, long h, long t0, long n, long dim, const float* from, float* rows) {
  if (x.dtype == SQ_FLOAT32 && x.stride[3] == 1 && (n == 1 || x.stride[2] >= dim)) {
    transpose(from, dim, n, LD, (float*)x.data + offset_of(x, b, h, t0), x.stride[2]);
  } else {
    transpose(from, dim, n, LD, rows, dim);
    put(x, b, h, t0, n, dim, rows, dim);
  }
}

// The same, added to what is there; x is float32 with components side by side.
static void unpanel_add(const SqTensor& x, long b, long h, long t0, long n, long dim, const float* from, float* rows) {
  transpose(from, dim, n, LD, rows, dim);
  for (long i = 0; i < n; i++) {
    float* to = (float*)x.data + offset_of(x, b, h, t0 + i);
    for (long d = 0; d < dim; d++) to[d] += rows[i * dim + d];
  }
}

}  // namespace SQ_NS
