// The real tokens of a sequence, counted from its first one.
#pragma once

#include "call.h"
#include "vec.h"

namespace SQ_NS {

struct Ranks {
  long count;
  const int32_t* token_of;  // [count], or null: ranks are tokens
  long token(long rank) const { return token_of ? token_of[rank] : rank; }
};

// `tokens` takes `length` integers where there is a mask.
static Ranks real_tokens(const SqMask& mask, long b, long length, int32_t* tokens) {
  if (!mask.data) return {length, nullptr};
  long n = 0;
  for (long t = 0; t < length; t++)
    if (mask.data[b * mask.batch + t * mask.token]) tokens[n++] = (int32_t)t;
  return {n, tokens};
}

// The rank of a real token.
static long rank_of(const Ranks& real, long token) {
  if (!real.token_of) return token;
  long low = 0, high = real.count - 1;
  while (low < high) {
    const long middle = (low + high) / 2;
    if (real.token_of[middle] < token) low = middle + 1;
    else high = middle;
  }
  return low;
}

}  // namespace SQ_NS
