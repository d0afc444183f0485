// y = x W^T over weights packed so that every thread reads its part of memory strictly in sequence.
//
// Layout: panels of 32 columns, [n/32][k/K][2][16][K] with K = 2 for bf16 (pairs for the dot instruction), 1 for fp32.
// One register tile is up to kRows rows x 32 columns; the sum over k runs in one accumulator in order, so a row's result
// depends neither on the other rows nor on how many there are.
#pragma once
#include "lora.h"

namespace fb {

enum Epilogue { kStore, kAdd, kSilu, kGelu };
constexpr long kPanel = 32;
constexpr long kFar = 32 << 10, kNear = 1 << 10;  // bytes that weights are fetched ahead into L2 and L1, measured

struct Linear {
  const void* w;
  const float* bias;  // padded to n, or null
  long n, k;          // n is padded to a multiple of 32
};

inline V silu(V x) { return div(x, add(set1(1.f), exp(sub(zero(), x)))); }

// tanh approximation of GELU, as Gemma uses it: 0.5 x (1 + tanh(u)) = x * sigmoid(2u)
inline V gelu(V x) {
  V u = mul(set1(1.5957691216057308f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
  return div(x, add(set1(1.f), exp(sub(zero(), u))));
}

template <class P, int R, int E>
inline void tile(const typename P::T* x, long ldx, const typename P::T* w, long k, const float* bias, const float* low,
                 void* out, long ldo, long col) {
  V a[R][2];
  for (int r = 0; r < R; r++) a[r][0] = a[r][1] = zero();
  for (long i = 0; i < k; i += P::K) {
    typename P::W w0 = P::loadw(w), w1 = P::loadw(w + 16 * P::K);
    for (int b = 0; b < 128; b += 64) {
      prefetch_l2((const char*)w + kFar + b);
      prefetch((const char*)w + kNear + b);
    }
    w += kPanel * P::K;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      a[r][0] = P::mac(a[r][0], w0, x + r * ldx + i);
      a[r][1] = P::mac(a[r][1], w1, x + r * ldx + i);
    }
  }
  for (int r = 0; r < R; r++) {
    V lo = a[r][0], hi = a[r][1];
    if (bias) {
      lo = add(lo, load(bias + col));
      hi = add(hi, load(bias + col + 16));
    }
    if (low) {
      lo = add(lo, load(low + r * kPanel));
      hi = add(hi, load(low + r * kPanel + 16));
    }
    if (E == kSilu || E == kGelu) {  // a panel holds 16 gate columns, then their 16 up columns
      P::store((typename P::T*)out + r * ldo + col / 2, mul(E == kSilu ? silu(lo) : gelu(lo), hi));
    } else {
      float* o = (float*)out + r * ldo + col;
      if (E == kAdd) {
        lo = add(lo, load(o));
        hi = add(hi, load(o + 16));
      }
      store(o, lo);
      store(o + 16, hi);
    }
  }
}

template <class P, int E, int R>
inline void tiled(long rows, const typename P::T* x, long ldx, const typename P::T* w, long k, const float* bias,
                  const float* low, void* out, long ldo, long col) {
  if constexpr (R > 0) {
    if (rows == R)
      tile<P, R, E>(x, ldx, w, k, bias, low, out, ldo, col);
    else
      tiled<P, E, R - 1>(rows, x, ldx, w, k, bias, low, out, ldo, col);
  }
}

// Columns of panels [p0, p1) for `rows` rows, in tiles of equal height. `out` is float [rows][ldo], or P::T for the
// gated epilogues. `low`: the adapters of these rows, of which the first is row `row` of the step; or null.
template <class P, int E>
inline void linear(const Linear& l, long p0, long p1, const typename P::T* x, long rows, void* out, long ldo,
                   const Low<P>* low, long row) {
  alignas(64) float sums[kRows * kPanel];
  const long unit = (E == kSilu || E == kGelu) ? long(sizeof(typename P::T)) : 4, tiles = (rows + kRows - 1) / kRows;
  for (long p = p0; p < p1; p++) {
    const typename P::T* w = (const typename P::T*)l.w + p * kPanel * l.k;
    for (long t = 0; t < tiles; t++) {
      const long r = rows * t / tiles, n = rows * (t + 1) / tiles - r;
      const float* extra = low ? low->sum(row + r, n, p, sums) : nullptr;
      tiled<P, E, kRows>(n, x + r * l.k, l.k, w, l.k, l.bias, extra, (char*)out + r * ldo * unit, ldo, p * kPanel);
    }
  }
}

}  // namespace fb
