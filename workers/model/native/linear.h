// y = x W^T over weights packed so that every thread reads its part of memory strictly in sequence.
//
// Layout: panels of 32 columns, [n/32][k/K][2][16][K] with K = 2 for bf16 (pairs for the dot instruction), 1 for fp32; of
// quantised weights (quantised.h) the same numbers in fewer bits.
// One register tile is up to kRows rows x 32 columns; the sum over k runs in one accumulator in order, so a row's result
// depends neither on the other rows nor on how many there are.
// Quantised, or folded (folded.h): the first tile multiplies weights as it unpacks them, and leaves them unpacked for the
// other tiles.
// kInt8: codes are multiplied as integers with inputs in block floating point (fixed.h), and the exact sum of each group
// of 32 is scaled and added in fp32, group after group. Not even how a machine adds up changes a bit.
#pragma once
#include <algorithm>

#include "fixed.h"
#include "folded.h"
#include "lora.h"

namespace fb {

enum Epilogue { kStore, kAdd, kSilu, kGelu };
constexpr long kFar = 32 << 10, kNear = 1 << 10;  // bytes that weights are fetched ahead into L2 and L1, measured
// Rows up to which nothing is: then a thread only reads, the processor sees that by itself, and requests of ours beside
// its own cost a fifth of the time.
constexpr int kFollowed = 4;

struct Linear {
  const void* w;
  const float* bias;  // padded to n, or null
  long n, k;          // n is padded to a multiple of 32
  long kind, stride;  // Kind, and the bytes of a panel
  long first, later_kind, later_stride;  // so many panels are of that kind, those behind them of this one
  const long* starts;  // where panels begin, in bytes, and the last ends, when their sizes differ; or null
  const uint8_t* panel(long p) const {
    return (const uint8_t*)w + (starts ? starts[p] : std::min(p, first) * stride + std::max(p - first, 0L) * later_stride);
  }
  long kind_of(long p) const { return p < first ? kind : later_kind; }
  bool integers() const { return kind == kInt8 || later_kind == kInt8; }
};

inline V silu(V x) { return div(x, add(set1(1.f), exp(sub(zero(), x)))); }

// tanh approximation of GELU, as Gemma uses it: 0.5 x (1 + tanh(u)) = x * sigmoid(2u)
inline V gelu(V x) {
  V u = mul(set1(1.5957691216057308f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
  return div(x, add(set1(1.f), exp(sub(zero(), u))));
}

typedef V Sums[kRows][2];  // of a register tile

// sums = x w over k, for R rows. `Streamed`: w comes from memory and is fetched ahead.
template <class P, int R, bool Streamed>
void accumulate(const typename P::T* x, long ldx, const typename P::T* w, long k, Sums& sums) {
  V a[R][2];
  unrolled<R>([&](auto r) FB_INLINE { a[r][0] = a[r][1] = zero(); });
  // One pointer for three rows, the others being at once and twice the stride: with one each there are too few registers,
  // and an address that comes back from a vector register in the loop cost 7 %.
  const typename P::T* at[(R + 2) / 3];
  unrolled<(R + 2) / 3>([&](auto t) FB_INLINE { at[t] = x + 3 * t * ldx; });
  constexpr bool kFetched = Streamed && R > kFollowed;
  for (long i = 0; i < k; i += P::K) {
    typename P::W w0 = P::loadw(w), w1 = P::loadw(w + 16 * P::K);
    if (kFetched) fetch<2, kFar, kNear>(w);
    w += kPanel * P::K;
    unrolled<R>([&](auto r) FB_INLINE {
      const typename P::T* one = at[r / 3] + r % 3 * ldx;
      a[r][0] = P::mac(a[r][0], w0, one);
      a[r][1] = P::mac(a[r][1], w1, one);
    });
    unrolled<(R + 2) / 3>([&](auto t) FB_INLINE {
      at[t] += P::K;
      hidden(at[t]);
    });
  }
  unrolled<R>([&](auto r) FB_INLINE { sums[r][0] = a[r][0], sums[r][1] = a[r][1]; });
}

template <class P>
using Accumulate = void (*)(const typename P::T*, long, const typename P::T*, long, Sums&);

// `accumulate` for so many rows, 1 <= rows <= kRows.
template <class P, bool Streamed, int R = kRows>
inline Accumulate<P> accumulator(long rows) {
  if constexpr (R > 1)
    return rows == R ? accumulate<P, R, Streamed> : accumulator<P, Streamed, R - 1>(rows);
  else
    return accumulate<P, 1, Streamed>;
}

// The same over a quantised panel. The unpacked weights go to `out`, each step `next` behind the one before: kPanel * K to
// have the whole panel there afterwards, 0 where nobody wants it. No rows: unpacks only.
template <class P, class Read, int R>
void fused(const typename P::T* x, long ldx, const uint8_t* panel, long k, typename P::T* out, long next, Sums& sums) {
  constexpr int K = P::K;
  V a[R + 1][2];
  unrolled<R>([&](auto r) FB_INLINE { a[r][0] = a[r][1] = zero(); });
  for (long g = 0; g < k; g += kGroup32) {
    Read group(panel, g / kGroup32);
    for (long i = g; i < std::min(k, g + kGroup32); i += kStride) {
      group.begin(i - g);
#pragma GCC unroll 4
      for (int t = 0; t < kStride / K; t++, out += next) {
        V low[K], high[K];
#pragma GCC unroll 2
        for (int j = 0; j < K; j++) low[j] = group.vector(2 * K * t + j), high[j] = group.vector(2 * K * t + K + j);
        const typename P::W w0 = P::weights(low, out), w1 = P::weights(high, out + 16 * K);
        unrolled<R>([&](auto r) FB_INLINE {
          a[r][0] = P::mac(a[r][0], w0, x + r * ldx + i + t * K);
          a[r][1] = P::mac(a[r][1], w1, x + r * ldx + i + t * K);
        });
      }
    }
  }
  unrolled<R>([&](auto r) FB_INLINE { sums[r][0] = a[r][0], sums[r][1] = a[r][1]; });
}

template <class P>
using Fused = void (*)(const typename P::T*, long, const uint8_t*, long, typename P::T*, long, Sums&);

// `fused` for so many rows, 0 <= rows <= kRows.
template <class P, class Read, int R = kRows>
inline Fused<P> reader(long rows) {
  if constexpr (R > 0)
    return rows == R ? fused<P, Read, R> : reader<P, Read, R - 1>(rows);
  else
    return fused<P, Read, 0>;
}

// `fused` over a folded panel.
template <class P, int R>
void unfolded(const typename P::T* x, long ldx, const uint8_t* panel, long k, typename P::T* out, long next, Sums& sums) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  constexpr bool kFetched = R > kFollowed;
  constexpr int kPointers = (R + 2) / 3;
  V a[R + 1][2];
  unrolled<R>([&](auto r) FB_INLINE { a[r][0] = a[r][1] = zero(); });
  const typename P::T* at[kPointers + 1];  // as in `accumulate`
  unrolled<kPointers>([&](auto t) FB_INLINE { at[t] = x + 3 * t * ldx; });
  const auto step = [&](__m512i low, __m512i high) FB_INLINE {
    if (next) {
      _mm512_storeu_si512(out, low);
      _mm512_storeu_si512(out + 16 * P::K, high);
      out += next;
    }
    unrolled<R>([&](auto r) FB_INLINE {
      const typename P::T* one = at[r / 3] + r % 3 * ldx;
      a[r][0] = P::mac(a[r][0], (typename P::W)low, one);
      a[r][1] = P::mac(a[r][1], (typename P::W)high, one);
    });
    unrolled<kPointers>([&](auto t) FB_INLINE {
      at[t] += P::K;
      hidden(at[t]);
    });
  };
  const Unfold unfold(panel);
  const uint8_t *stayed = panel + 32, *w = panel + folded_head(k);
  for (long g = 0; g < k / kFoldedRows; g++) {
    if (stayed[g / 8] >> g % 8 & 1) {
      for (const uint8_t* end = w + kUnfolded; w < end; w += 128) {
        if (kFetched) fetch<2, kFar, kNear>(w);
        step(_mm512_loadu_si512(w), _mm512_loadu_si512(w + 64));
      }
      continue;
    }
    for (const uint8_t* end = w + kFoldedGroup; w < end; w += 192) {
      if (kFetched) fetch<3, kFar, kNear>(w);
      const __m512i codes = _mm512_loadu_si512(w);
      step(unfold(codes, w + 64), unfold(_mm512_srli_epi16(codes, 4), w + 96));
      step(unfold(_mm512_srli_epi16(codes, 8), w + 128), unfold(_mm512_srli_epi16(codes, 12), w + 160));
    }
  }
  unrolled<R>([&](auto r) FB_INLINE { sums[r][0] = a[r][0], sums[r][1] = a[r][1]; });
#endif
}

// `unfolded` for so many rows, 0 <= rows <= kRows.
template <class P, int R = kRows>
inline Fused<P> unfolder(long rows) {
  if constexpr (R > 0)
    return rows == R ? unfolded<P, R> : unfolder<P, R - 1>(rows);
  else
    return unfolded<P, 0>;
}

template <class P>
inline Fused<P> reader(long kind, long rows) {
  if constexpr (kFolds && P::K == 2)
    if (kind == kFolded) return unfolder<P>(rows);
  return kind == kQ8 || kind == kInt8 ? reader<P, ReadQ8<P>>(rows)
         : kind == kQ4 ? reader<P, ReadQ4<P>>(rows) : reader<P, ReadQ4K<P>>(rows);
}

constexpr int kCounted = kRows < 10 ? kRows : 10;  // rows of a tile of integers; more of them wait for the stack

// sums = x w over a panel of kInt8, for R rows.
template <int R, bool Streamed>
void counted(const Fixed& x, const uint8_t* panel, Sums& sums) {
  typedef Integers I;
  constexpr bool kFetched = Streamed && R > kFollowed;
  constexpr int kPairs = kGroup32 / 2, kUnrolled = R > 4 ? 2 : kPairs;
  const long ldx = x.groups * kGroup32;
  V all[R][2];
  unrolled<R>([&](auto r) FB_INLINE { all[r][0] = all[r][1] = set1(x.broken[r]); });
  for (long g = 0; g < x.groups; g++, panel += kHalves + kCodes) {
    I::A a[R][2];
    unrolled<R>([&](auto r) FB_INLINE { a[r][0] = a[r][1] = I::none(); });
    const int16_t* at[(R + 2) / 3];  // as in `accumulate`
    unrolled<(R + 2) / 3>([&](auto t) FB_INLINE { at[t] = x.numbers + 3 * t * ldx + g * kGroup32; });
    const uint8_t* codes = panel + kHalves;
    if (kFetched) fetch<1>(panel);
    for (int i = 0; i < kPairs; i += kUnrolled) {
      unrolled<kUnrolled>([&](auto j) FB_INLINE {
        const int8_t* pairs = (const int8_t*)codes + 2 * kPanel * j;
        const I::W w0 = I::loadw(pairs), w1 = I::loadw(pairs + kPanel);
        if (kFetched) fetch<1>(pairs);
        unrolled<R>([&](auto r) FB_INLINE {
          const int16_t* one = at[r / 3] + r % 3 * ldx + 2 * j;
          a[r][0] = I::mac(a[r][0], w0, one);
          a[r][1] = I::mac(a[r][1], w1, one);
        });
      });
      codes += 2 * kPanel * kUnrolled;
      unrolled<(R + 2) / 3>([&](auto t) FB_INLINE {
        at[t] += 2 * kUnrolled;
        hidden(at[t]);
      });
    }
    const V least = set1(0x1p-24f);  // of a half above 0; where the scale is 0, so are the codes
    const V low = max(load_half((const uint16_t*)panel), least), high = max(load_half((const uint16_t*)panel + 16), least);
    const int32_t* units = x.units + g;
    unrolled<R>([&](auto r) FB_INLINE {
      const int32_t unit = units[r * x.groups];
      all[r][0] = I::scaled(a[r][0], I::times(low, unit), all[r][0]);
      all[r][1] = I::scaled(a[r][1], I::times(high, unit), all[r][1]);
    });
  }
  unrolled<R>([&](auto r) FB_INLINE { sums[r][0] = all[r][0], sums[r][1] = all[r][1]; });
}

typedef void (*Counted)(const Fixed&, const uint8_t*, Sums&);

// `counted` for so many rows, 1 <= rows <= kCounted.
template <bool Streamed, int R = kCounted>
inline Counted counter(long rows) {
  if constexpr (R > 1)
    return rows == R ? counted<R, Streamed> : counter<Streamed, R - 1>(rows);
  else
    return counted<1, Streamed>;
}

template <class P, int E>
inline void finish(const Sums& sums, long rows, const float* bias, const float* low, void* out, long ldo, long col) {
  for (long r = 0; r < rows; r++) {
    V lo = sums[r][0], hi = sums[r][1];
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

// Columns of panels [p0, p1) for `rows` rows, in tiles of equal height. `out` is float [rows][ldo], or P::T for the
// gated epilogues. `fixed`: x once more, where there are panels of kInt8. `unpacked`: room for a panel. `low`: the
// adapters of these rows, of which the first is row `row` of the step; or null.
template <class P, int E>
inline void linear(const Linear& l, long p0, long p1, const typename P::T* x, const Fixed& fixed, long rows, void* out,
                   long ldo, typename P::T* unpacked, const Low<P>* low, long row) {
  alignas(64) float updates[kRows * kPanel];
  const long unit = (E == kSilu || E == kGelu) ? long(sizeof(typename P::T)) : 4;
  for (long p = p0; p < p1; p++) {
    const uint8_t* panel = l.panel(p);
    const long kind = l.kind_of(p);
    const bool integers = P::K == 2 && kind == kInt8;  // bfloat16; fp32 multiplies with the weights
    const long tall = integers ? kCounted : kRows, tiles = (rows + tall - 1) / tall;
    for (long t = 0; t < tiles; t++) {
      const long r = rows * t / tiles, n = rows * (t + 1) / tiles - r;
      Sums sums;
      if (kind == kDense)
        accumulator<P, true>(n)(x + r * l.k, l.k, (const typename P::T*)panel, l.k, sums);
      else if (integers)
        (t == 0 ? counter<true>(n) : counter<false>(n))(fixed.from(r), panel, sums);
      else if (t == 0)
        reader<P>(kind, n)(x, l.k, panel, l.k, unpacked, tiles > 1 ? kPanel * P::K : 0, sums);
      else
        accumulator<P, false>(n)(x + r * l.k, l.k, unpacked, l.k, sums);
      const float* update = low ? low->sum(row + r, n, p, updates) : nullptr;
      finish<P, E>(sums, n, l.bias, update, (char*)out + r * ldo * unit, ldo, p * kPanel);
    }
  }
}

// Column n (a row of the embedding) as floats.
template <class P>
inline void column(const Linear& l, long n, float* out, typename P::T* unpacked) {
  const uint8_t* panel = l.panel(n / kPanel);
  const long kind = l.kind_of(n / kPanel);
  const typename P::T* w = (const typename P::T*)panel;
  if (kind != kDense) {
    Sums none;
    reader<P>(kind, 0)(nullptr, 0, panel, l.k, unpacked, kPanel * P::K, none);
    w = unpacked;
  }
  w += n % kPanel * P::K;
  for (long d = 0; d < l.k; d += P::K, w += kPanel * P::K)
    for (int j = 0; j < P::K; j++) out[d + j] = P::to(w[j]);
}

}  // namespace fb
