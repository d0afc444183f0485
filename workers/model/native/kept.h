// How keys and values lie in the cache: as the model computes, or as bytes with a scale for each token and head.
//
// A head's sub-block of 16 tokens is [K | V], for bytes followed by [16 scales of K | 16 scales of V] in bfloat16, one
// cache line: whatever moves a block takes its scales along.
//   K: [dim/K][16 tokens][K]    scores of 16 tokens come out of one register, no horizontal sums
//   V: [16/K tokens][dim][K]    K = 2 for bf16 and bytes, 1 for fp32
//
// Rules
// - A format says what is stored (S), what queries and weights are multiplied as (T), and what sums are kept in (A).
// - Int8 is multiplied as integers, exactly: queries have 16 bits and a scale of their own, weights 16 bits and one
//   scale for the group of tokens. Their sums cannot overflow: 256 * 127 * 32767 < 2^31.
// - Fp8 is multiplied as bfloat16, which holds each of its numbers.
// - Where many queries meet a group of tokens (a prompt), its bytes are widened once (Widened): the same numbers.
// - A token's bytes and scale depend on its own numbers only. A head that is not finite has NaN as its scale of V, so
//   that whoever sees the token gets NaN, as without quantisation.
#pragma once
#include "integers.h"

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

// What the formats of one byte have in common; F is one of them, S what holds its numbers.
template <class F>
struct Bytes {
  typedef F32 Key;
  static constexpr int K = 2, kPerLine = 2;
  static constexpr bool kScaled = true;
  static constexpr uint16_t kBroken = 0x7fc0;  // NaN

  static long elements(int dim) { return 2L * kLanes * dim + 2 * kLanes * long(sizeof(uint16_t)); }
  template <class S>
  static V key_scales(const S* at, int dim) {
    return load_bf16((const uint16_t*)(at + 2L * kLanes * dim));
  }
  template <class S>
  static V value_scales(const S* at, int dim) {
    return load_bf16((const uint16_t*)(at + 2L * kLanes * dim) + kLanes);
  }

  // As AsComputed::keep. A pair's other value needs no care: whatever a byte is, times 0 it is nothing.
  template <class S>
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

  // x [dim] as bytes; returns the scale, rounded up to bfloat16 so that none is beyond the largest.
  template <class S>
  static uint16_t bytes(const float* x, int dim, S* out) {
    const float high = peak(x, dim);
    if (high != high) {
      std::memset(out, 0, dim);
      return kBroken;
    }
    const float exact = high / F::kLargest;
    uint32_t u;
    std::memcpy(&u, &exact, 4);
    const uint16_t up = uint16_t((u + 0xffff) >> 16);
    const float scale = up ? bf16_to_float(up) : 1.f;
    for (int d = 0; d < dim; d += 16) F::narrow(out + d, div(load(x + d), set1(scale)));
    return up;
  }
};

struct Int8 : Bytes<Int8>, Integers {
  typedef int8_t S;
  static constexpr float kLargest = 127.f, kMost = 32767.f;  // of what is stored; of queries and weights
  template <class S>
  static V score(A a, const S* at, int dim) {
    return mul(real(a), key_scales(at, dim));
  }
  static A begin(const float*) { return none(); }
  static V end(A a, const float* acc, float unit) { return fma(real(a), set1(unit), load(acc)); }
  static void narrow(S* out, V v) { store_i8(out, v); }

  // x [dim] in 16 bits; returns what they are counted in, NaN where a number is not finite.
  static float query(const float* x, int dim, T* out) {
    const float unit = peak(x, dim) / kMost, inverse = unit > 0 ? 1.f / unit : 0.f;
    for (int d = 0; d < dim; d += 16) store_i16(out + d, mul(load(x + d), set1(inverse)));
    return unit;
  }
  // The weights of n sub-blocks likewise; none is negative.
  static float weights(const V* x, int n, T* out) {
    V high = zero();
    for (int b = 0; b < n; b++) high = max(high, x[b]);
    const float top = hmax(high);
    for (int b = 0; b < n; b++) store_i16(out + b * kLanes, mul(x[b], set1(top > 0 ? kMost / top : 0.f)));
    return top / kMost;
  }
};

// e4m3fn: 4 bits of exponent, 3 of fraction; a byte below 8 counts 2^-9.
struct Fp8 : Bytes<Fp8> {
  typedef uint8_t S;
  typedef uint16_t T;
  typedef V A;
  static constexpr float kLargest = 448.f;
  static constexpr int kNormal = 8, kBias = 120 << 7;
  static constexpr T kFew[kNormal] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // n * 2^-9
#if defined(__AVX512BW__)
  typedef Bf16::W W;
  static W loadw(const S* p) {
    const __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    const __m512i size = _mm512_and_si512(w, _mm512_set1_epi16(0x7f));
    __m512i x = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(kBias));
    const __m512i few = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)kFew));
    x = _mm512_mask_permutexvar_epi16(x, _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(kNormal)), size, few);
    const __m512i sign = _mm512_set1_epi16(int16_t(0x8000));
    return (W)_mm512_ternarylogic_epi32(x, _mm512_slli_epi16(w, 8), sign, 0xf8);  // x | (w << 8 & sign)
  }
  static A mac(A a, W w, const T* x) { return Bf16::mac(a, w, x); }
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  typedef Bf16::W W;
  static __m256i half(const S* p) {
    const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i size = _mm256_and_si256(w, _mm256_set1_epi16(0x7f));
    const __m256i x = _mm256_add_epi16(_mm256_slli_epi16(size, 4), _mm256_set1_epi16(kBias));
    const __m256i few = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kFew));
    const __m256i at = _mm256_add_epi16(_mm256_mullo_epi16(size, _mm256_set1_epi16(0x202)), _mm256_set1_epi16(0x100));
    const __m256i small = _mm256_cmpgt_epi16(_mm256_set1_epi16(kNormal), size);
    return _mm256_or_si256(_mm256_blendv_epi8(x, _mm256_shuffle_epi8(few, at), small),
                           _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8));
  }
  static W loadw(const S* p) { return {half(p), half(p + 16)}; }
  static A mac(A a, W w, const T* x) { return Bf16::mac(a, w, x); }
#else
  struct W {
    T v[2 * kLanes];
  };
  static W loadw(const S* p) {
    W w;
    for (int i = 0; i < 2 * kLanes; i++) {
      const int size = p[i] & 0x7f;
      w.v[i] = T((size < kNormal ? kFew[size] : (size << 4) + kBias) | (p[i] & 0x80) << 8);
    }
    return w;
  }
  static A mac(A a, W w, const T* x) { return Bf16::mac(a, Bf16::loadw(w.v), x); }
#endif
  static A none() { return zero(); }
  template <class S>
  static V score(A a, const S* at, int dim) {
    return mul(a, key_scales(at, dim));
  }
  static A begin(const float* acc) { return load(acc); }
  static V end(A a, const float*, float) { return a; }

  // To nearest, ties to even; |v| <= 448.
  static void narrow(S* out, V v) {
    float f[16];
    store(f, v);
    for (int i = 0; i < 16; i++) {
      uint32_t u, size, few;
      std::memcpy(&u, &f[i], 4);
      size = u & 0x7fffffff;
      float x;
      std::memcpy(&x, &size, 4);
      x += 16384.f;  // its last bit is worth 2^-9
      std::memcpy(&few, &x, 4);
      const uint32_t many = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
      out[i] = S((u >> 24 & 0x80) | (size < 0x3c800000 ? few & 0xf : many));  // below 2^-6
    }
  }
  static float query(const float* x, int dim, T* out) {
    for (int d = 0; d < dim; d += 16) store_bf16(out + d, load(x + d));
    return 1.f;
  }
  static float weights(const V* x, int n, T* out) {
    for (int b = 0; b < n; b++) store_bf16(out + b * kLanes, x[b]);
    return 1.f;
  }
};

// C's numbers as they are multiplied, its scales behind them.
template <class C>
struct Widened : C {
  typedef typename C::T S;
  typedef typename C::W W;
  static constexpr int kPerLine = 1;
  static long elements(int dim) { return 2L * kLanes * dim + 2 * kLanes; }
  static W loadw(const S* p) {
    W w;
    std::memcpy(&w, p, sizeof(w));
    return w;
  }
  // A sub-block at `from` to `to`, fetching as much of `ahead` as there is of it.
  static void widen(const typename C::S* from, const typename C::S* ahead, int dim, S* to) {
    const long numbers = 2L * kLanes * dim;
    for (long i = 0; i < numbers; i += 2 * kLanes) {
      const W w = C::loadw(from + i);
      if (i % 64 == 0) prefetch_l2(ahead + i);
      std::memcpy(to + i, &w, sizeof(w));
    }
    prefetch_l2(ahead + numbers);
    std::memcpy(to + numbers, from + numbers, 2 * kLanes * sizeof(uint16_t));
  }
};

}  // namespace fb
