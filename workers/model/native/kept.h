// How keys and values lie in the cache: as the model computes, or as bytes with a scale for each token and head.
//
// A head's sub-block of 16 tokens is [K | V], for bytes followed by [16 scales of K | 16 scales of V] in bfloat16, one
// cache line: whatever moves a block takes its scales along.
//   K: [dim/K][16 tokens][K]    scores of 16 tokens come out of one register, no horizontal sums
//   V: [16/K tokens][dim][K]    K = 2 for bf16 and bytes, 1 for fp32
//
// Rules
// - A format says what is stored (S), what queries and weights are multiplied as (T), and what sums are kept in (A).
// - Bytes are multiplied as integers, exactly: queries have 16 bits and a scale of their own, weights 16 bits and one
//   scale for the group of tokens. Their sums cannot overflow: 256 * 127 * 32767 < 2^31.
// - A token's bytes and scale depend on its own numbers only. A head that is not finite has NaN as its scale of V, so
//   that whoever sees the token gets NaN, as without quantisation.
#pragma once
#include "vec.h"

namespace fb {

constexpr int kLanes = 16;  // tokens of a sub-block
constexpr int kMaxDim = 256;

template <class P>
struct AsComputed {
  typedef typename P::T S;
  typedef typename P::T T;
  typedef typename P::W W;
  typedef V A;
  typedef P Key;  // what a new key is rounded to before it is stored
  static constexpr int K = P::K, kPerLine = 1;
  static constexpr bool kScaled = false;
  static long elements(int dim) { return 2L * kLanes * dim; }
  static W loadw(const S* p) { return P::loadw(p); }
  static A mac(A a, W w, const T* x) { return P::mac(a, w, x); }
  static A none() { return zero(); }
  static V score(A a, const S*, int) { return a; }
  static A begin(const float* acc) { return load(acc); }
  static V end(A a, const float*, float) { return a; }

  // Token `lane` of the sub-block at `at`. `alone`: the next token's are not written in this step.
  static void keep(S* at, int lane, int dim, const T* key, const float* v, bool alone) {
    S *k = at + lane * K, *w = at + long(kLanes) * dim + lane / K * dim * K + lane % K;
    alignas(64) T kept[kMaxDim];
    for (int d = 0; d < dim; d += K) std::memcpy(k + d * kLanes, key + d, K * sizeof(T));
    for (int d = 0; d < dim; d += 16) P::store(kept + d, load(v + d));
    // The other value of a pair that attention reads before its own row is computed: whatever lies there is not ours.
    if (K == 2 && lane % 2 == 0 && alone)
      for (int d = 0; d < dim; d++) w[d * K + 1] = 0;
    for (int d = 0; d < dim; d++) w[d * K] = kept[d];
  }
};

// The largest magnitude of x; NaN where a number is not finite.
inline float peak(const float* x, int dim) {
  V top = zero(), odd = zero();
  for (int d = 0; d < dim; d += 16) {
    const V v = load(x + d);
    top = max(top, max(v, sub(zero(), v)));
    odd = fma(v, zero(), odd);
  }
  return hmax(top) + hsum(odd);
}

struct Int8 {
  typedef int8_t S;
  typedef int16_t T;
  typedef F32 Key;
  static constexpr int K = 2, kPerLine = 2;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 32767.f;  // of queries and weights
#if defined(__AVX512BW__)
  typedef __m512i W;
  typedef __m512i A;
  static A none() { return _mm512_setzero_si512(); }
  static W loadw(const S* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  static A mac(A a, W w, const T* x) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(a, w, _mm512_set1_epi32(pair(x)));
#else
    return _mm512_add_epi32(a, _mm512_madd_epi16(w, _mm512_set1_epi32(pair(x))));
#endif
  }
  static V real(A a) { return _mm512_cvtepi32_ps(a); }
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  struct W {
    __m256i a, b;
  };
  typedef W A;
  static A none() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static W loadw(const S* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
  }
  static A mac(A a, W w, const T* x) {
    const __m256i both = _mm256_set1_epi32(pair(x));
    return {_mm256_add_epi32(a.a, _mm256_madd_epi16(w.a, both)), _mm256_add_epi32(a.b, _mm256_madd_epi16(w.b, both))};
  }
  static V real(A a) { return {_mm256_cvtepi32_ps(a.a), _mm256_cvtepi32_ps(a.b)}; }
#else
  struct W {
    const S* p;
  };
  struct A {
    int32_t i[16];
  };
  static A none() { return {}; }
  static W loadw(const S* p) { return {p}; }
  static A mac(A a, W w, const T* x) {
    for (int i = 0; i < 16; i++) a.i[i] += w.p[2 * i] * x[0] + w.p[2 * i + 1] * x[1];
    return a;
  }
  static V real(A a) {
    float f[16];
    for (int i = 0; i < 16; i++) f[i] = float(a.i[i]);
    return load(f);
  }
#endif
  static int32_t pair(const T* x) {
    int32_t i;
    std::memcpy(&i, x, 4);
    return i;
  }

  static long elements(int dim) { return 2L * kLanes * dim + 2 * kLanes * 2; }
  static const uint16_t* scales(const S* at, int dim) { return (const uint16_t*)(at + 2L * kLanes * dim); }
  static V value_scales(const S* at, int dim) { return load_bf16(scales(at, dim) + kLanes); }
  static V score(A a, const S* at, int dim) { return mul(real(a), load_bf16(scales(at, dim))); }
  static A begin(const float*) { return none(); }
  static V end(A a, const float* acc, float unit) { return fma(real(a), set1(unit), load(acc)); }

  // x [dim] as 16 bits; returns the scale, NaN where a number is not finite.
  static float narrow(const float* x, int dim, T* out) {
    const float unit = peak(x, dim) / kLargest, inverse = unit > 0 ? 1.f / unit : 0.f;
    for (int d = 0; d < dim; d += 16) store_i16(out + d, mul(load(x + d), set1(inverse)));
    return unit;
  }

  // As AsComputed::keep. A pair's other value needs no care: whatever a byte is, times 0 it is nothing.
  static void keep(S* at, int lane, int dim, const float* key, const float* v, bool) {
    S *k = at + lane * K, *w = at + long(kLanes) * dim + lane / K * dim * K + lane % K;
    uint16_t* scale = (uint16_t*)(at + 2L * kLanes * dim);
    alignas(64) S kept[kMaxDim];
    const uint16_t of_key = bytes(key, dim, kept);
    for (int d = 0; d < dim; d += K) std::memcpy(k + d * kLanes, kept + d, K);
    const uint16_t of_value = bytes(v, dim, kept);
    for (int d = 0; d < dim; d++) w[d * K] = kept[d];
    scale[lane] = of_key;
    scale[kLanes + lane] = of_key == kBroken ? kBroken : of_value;
  }

  // x [dim] as bytes; returns the scale, rounded up to bfloat16 so that none is over 127.
  static uint16_t bytes(const float* x, int dim, S* out) {
    const float high = peak(x, dim);
    if (high != high) {
      std::memset(out, 0, dim);
      return kBroken;
    }
    const float exact = high / 127.f;
    uint32_t u;
    std::memcpy(&u, &exact, 4);
    const uint16_t up = uint16_t((u + 0xffff) >> 16);
    const float scale = up ? bf16_to_float(up) : 1.f;
    for (int d = 0; d < dim; d += 16) store_i8(out + d, div(load(x + d), set1(scale)));
    return up;
  }

  static constexpr uint16_t kBroken = 0x7fc0;  // NaN
};

}  // namespace fb
