// What happens to one row of numbers: norms, rotation, the highest of them.
#pragma once
#include "attention.h"

namespace fb {

constexpr int kScan = 512;  // numbers between two looks at the highest so far

inline V rms(const float* x, long n, float eps) {
  V s = zero();
  for (long i = 0; i < n; i += 16) {
    V v = load(x + i);
    s = fma(v, v, s);
  }
  return set1(1.f / std::sqrt(hsum(s) / float(n) + eps));
}

template <class P>
inline void norm_row(const float* x, const float* w, long n, float eps, typename P::T* out) {
  const V s = rms(x, n, eps);
  for (long i = 0; i < n; i += 16) P::store(out + i, mul(mul(load(x + i), s), load(w + i)));
}

inline void norm_add(const float* x, const float* w, long n, float eps, float* out) {
  const V s = rms(x, n, eps);
  for (long i = 0; i < n; i += 16) store(out + i, fma(mul(load(x + i), s), load(w + i), load(out + i)));
}

// Rotates the pairs (d, d + half) of the first 2 * half values; the rest stays. However it is compiled, it rounds alike.
template <class P>
inline void rotate(const float* in, int dim, int half, const float* c, const float* sn, typename P::T* out) {
  alignas(64) float r[kMaxDim];
  int d = 0;
  for (; d + 16 <= half; d += 16) {
    const V a = load(in + d), b = load(in + half + d), cd = load(c + d), sd = load(sn + d);
    store(r + d, fma(a, cd, sub(zero(), mul(b, sd))));
    store(r + half + d, fma(b, cd, mul(a, sd)));
  }
  for (; d < half; d++) {
    r[d] = std::fma(in[d], c[d], -(in[half + d] * sn[d]));
    r[half + d] = std::fma(in[half + d], c[d], in[d] * sn[d]);
  }
  for (d = 2 * half; d < dim; d++) r[d] = in[d];
  for (d = 0; d < dim; d += 16) P::store(out + d, load(r + d));
}

// Where the highest of n numbers is, the first of equals, or -1 where none is above -inf.
inline int highest(const float* x, int n) {
  float best = -INFINITY;
  int found = -1;
  for (int begin = 0; begin < n; begin += kScan) {
    const int end = std::min(begin + kScan, n);
    V top = set1(-INFINITY);
    int i = begin;
    for (; i + 16 <= end; i += 16) top = max(load(x + i), top);  // a NaN on the left never wins
    float high = hmax(top);
    for (; i < end; i++) high = x[i] > high ? x[i] : high;
    if (high <= best) continue;
    best = high;
    for (found = begin; found + 1 < end && x[found] != high;) ++found;
  }
  return found;
}

}  // namespace fb
