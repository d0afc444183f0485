// Sixteen floats as one value, on AVX-512, AVX2 and plain C++. Everything above this file is written once.
//
// Rules
// - Every operation works lane by lane except hsum/hmax; no operation's result depends on neighbouring values.
// - `Bf16` and `F32` are the two storage types: `mac` adds x*w for one k (F32) or a pair of ks (Bf16) to 16 columns.
// - Rounding (bf16, integers) is to nearest even. Values are finite by contract; NaN never meets a masked lane.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fb {

inline float bf16_to_float(uint16_t b) {
  uint32_t u = uint32_t(b) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint16_t float_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// IEEE half; the value times 2^-112 has the same bits shifted, and scaling it back is exact, subnormals included.
inline float half_to_float(uint16_t h) {
  const uint32_t u = uint32_t(h & 0x7fff) << 13, sign = uint32_t(h & 0x8000) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  f *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  bits |= sign;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// f(0) ... f(N - 1), each number a constant: an array that is indexed by nothing else lives in registers. One that a loop
// goes through GCC 12 keeps in memory beside them, which cost a tenth of attention. f is a lambda with FB_INLINE.
#define FB_INLINE __attribute__((always_inline))
template <class F, int... I>
FB_INLINE inline void unrolled(F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
FB_INLINE inline void unrolled(F f) {
  unrolled(f, std::make_integer_sequence<int, N>{});
}

// By force: a call that is still one when GCC looks for functions without effects is dropped.
FB_INLINE inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
FB_INLINE inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// The compiler knows nothing of `p` from here on: it makes no other pointers of it.
template <class T>
FB_INLINE inline void hidden(const T*& p) {
  asm("" : "+r"(p));
}

#if defined(__AVX512F__)
// ---------------------------------------------------------------- AVX-512
typedef __m512 V;
inline V zero() { return _mm512_setzero_ps(); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline float hmax(V a) { return _mm512_reduce_max_ps(a); }
inline float hsum(V a) { return _mm512_reduce_add_ps(a); }
// Lanes whose bit is set keep their value, the others become `other`.
inline V keep(V a, uint16_t lanes, V other) { return _mm512_mask_blend_ps(__mmask16(lanes), other, a); }
inline V load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline V load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline V load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
// Lane i of the first eight, or of the last eight, twice: (0, 0, 1, 1, ...).
inline V twice_low(V v) {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), v);
}
inline V twice_high(V v) {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), v);
}
// Sixteen words of eight 4-bit numbers each: `nibble(i)` gives number i of every word. A permutation looks at four bits
// of each index, so it masks and converts at once.
struct Nibbles {
  __m512i words;
  static Nibbles load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  V nibble(int i) const {
    const V value = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * i), value);
  }
};
inline bool any_above(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline V round_nearest(V a) { return _mm512_roundscale_ps(a, 0); }
#if defined(__AVX512DQ__)
inline V fraction(V a) { return _mm512_reduce_ps(a, 1); }
#else
inline V fraction(V a) { return sub(a, _mm512_roundscale_ps(a, 1)); }
#endif
inline V scale2(V a, V n) { return _mm512_scalef_ps(a, n); }
inline V load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store_i8(int8_t* p, V v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v))); }
inline void store_i16(int16_t* p, V v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v))); }
#if defined(__AVX512BF16__)
inline void store_bf16(uint16_t* p, V v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
#else
inline void store_bf16(uint16_t* p, V v) {
  __m512i u = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(u));
}
#endif
inline V round_bf16(V v) {
  uint16_t t[16];
  store_bf16(t, v);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)t)), 16));
}
constexpr int kRows = 12;               // rows of one register tile: 12 x 2 accumulators of 32 registers
constexpr int kQueries = 6, kWide = 4;  // the same in attention: queries x sub-blocks, or queries x 16 values

#elif defined(__AVX2__) && defined(__FMA__)
// ---------------------------------------------------------------- AVX2
struct V {
  __m256 a, b;
};
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline float hmax(V v) {
  float t[8], m;
  _mm256_storeu_ps(t, _mm256_max_ps(v.a, v.b));
  m = t[0];
  for (int i = 1; i < 8; i++) m = t[i] > m ? t[i] : m;
  return m;
}
inline float hsum(V v) {
  float t[8];
  _mm256_storeu_ps(t, _mm256_add_ps(v.a, v.b));
  return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}
inline __m256 keep(__m256 v, int lanes, __m256 other) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), set = _mm256_and_si256(_mm256_set1_epi32(lanes), bit);
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)));
}
inline V keep(V v, uint16_t lanes, V other) { return {keep(v.a, lanes, other.a), keep(v.b, lanes >> 8, other.b)}; }
inline __m256 whole(__m256i i) { return _mm256_cvtepi32_ps(i); }
inline V load_half(const uint16_t* p) {
#if defined(__F16C__)
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
#else
  float t[16];
  for (int i = 0; i < 16; i++) t[i] = half_to_float(p[i]);
  return load(t);
#endif
}
inline V load_i8(const int8_t* p) {
  return {whole(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          whole(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
inline V load_u8(const uint8_t* p) {
  return {whole(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          whole(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
inline V twice(__m256 v) {
  return {_mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
          _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
inline V twice_low(V v) { return twice(v.a); }
inline V twice_high(V v) { return twice(v.b); }
struct Nibbles {
  __m256i a, b;
  static Nibbles load(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
  }
  V nibble(int i) const {
    const __m256i low = _mm256_set1_epi32(15);
    return {whole(_mm256_and_si256(_mm256_srli_epi32(a, 4 * i), low)),
            whole(_mm256_and_si256(_mm256_srli_epi32(b, 4 * i), low))};
  }
};
inline __m256 round_bf16(__m256 v) {
  const __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(int(0xffff0000))));
}
inline V round_bf16(V v) { return {round_bf16(v.a), round_bf16(v.b)}; }
inline bool any_above(V x, V y) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))) != 0;
}
inline V round_nearest(V a) { return {_mm256_round_ps(a.a, 8), _mm256_round_ps(a.b, 8)}; }
inline V fraction(V a) { return {_mm256_sub_ps(a.a, _mm256_floor_ps(a.a)), _mm256_sub_ps(a.b, _mm256_floor_ps(a.b))}; }
inline __m256 scale2(__m256 a, __m256 n) {
  const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(n)), 23);
  const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), e));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(n, _mm256_set1_ps(-126), _CMP_NLT_UQ));
}
inline V scale2(V v, V n) { return {scale2(v.a, n.a), scale2(v.b, n.b)}; }
inline void store_bf16(uint16_t* p, V v) {
  float t[16];
  store(t, v);
  for (int i = 0; i < 16; i++) p[i] = float_to_bf16(t[i]);
}
inline __m256 load_bf16x8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline V load_bf16(const uint16_t* p) { return {load_bf16x8(p), load_bf16x8(p + 8)}; }
inline __m256i i16(V v) {  // packs works in halves: put them in order
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)), 0xd8);
}
inline void store_i16(int16_t* p, V v) { _mm256_storeu_si256((__m256i*)p, i16(v)); }
inline void store_i8(int8_t* p, V v) {
  const __m256i x = i16(v);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
constexpr int kRows = 2, kQueries = 2, kWide = 2;

#else
// ---------------------------------------------------------------- portable
struct V {
  float f[16];
};
#define FB_LANES(expr)                      \
  V r;                                      \
  for (int i = 0; i < 16; i++) r.f[i] = (expr); \
  return r;
inline V zero() { FB_LANES(0.f) }
inline V set1(float x) { FB_LANES(x) }
inline V load(const float* p) { FB_LANES(p[i]) }
inline void store(float* p, V v) { std::memcpy(p, v.f, 64); }
inline V fma(V a, V b, V c) { FB_LANES(a.f[i] * b.f[i] + c.f[i]) }
inline V mul(V a, V b) { FB_LANES(a.f[i] * b.f[i]) }
inline V add(V a, V b) { FB_LANES(a.f[i] + b.f[i]) }
inline V sub(V a, V b) { FB_LANES(a.f[i] - b.f[i]) }
inline V div(V a, V b) { FB_LANES(a.f[i] / b.f[i]) }
inline V max(V a, V b) { FB_LANES(a.f[i] > b.f[i] ? a.f[i] : b.f[i]) }
inline V min(V a, V b) { FB_LANES(a.f[i] < b.f[i] ? a.f[i] : b.f[i]) }
inline float hmax(V v) {
  float m = v.f[0];
  for (int i = 1; i < 16; i++) m = v.f[i] > m ? v.f[i] : m;
  return m;
}
inline float hsum(V v) {
  float s = 0;
  for (int i = 0; i < 16; i++) s += v.f[i];
  return s;
}
inline V keep(V v, uint16_t lanes, V other) { FB_LANES(lanes >> i & 1 ? v.f[i] : other.f[i]) }
inline V load_half(const uint16_t* p) { FB_LANES(half_to_float(p[i])) }
inline V load_i8(const int8_t* p) { FB_LANES(float(p[i])) }
inline V load_u8(const uint8_t* p) { FB_LANES(float(p[i])) }
inline V twice_low(V v) { FB_LANES(v.f[i / 2]) }
inline V twice_high(V v) { FB_LANES(v.f[8 + i / 2]) }
struct Nibbles {
  uint32_t words[16];
  static Nibbles load(const uint8_t* p) {
    Nibbles n;
    for (int j = 0; j < 16; j++)
      n.words[j] = p[4 * j] | p[4 * j + 1] << 8 | p[4 * j + 2] << 16 | uint32_t(p[4 * j + 3]) << 24;
    return n;
  }
  V nibble(int n) const { FB_LANES(float(words[i] >> 4 * n & 15)) }
};
inline V round_bf16(V v) { FB_LANES(bf16_to_float(float_to_bf16(v.f[i]))) }
inline bool any_above(V a, V b) {
  for (int i = 0; i < 16; i++)
    if (a.f[i] > b.f[i]) return true;
  return false;
}
inline V round_nearest(V v) { FB_LANES(std::nearbyint(v.f[i])) }
inline V fraction(V v) { FB_LANES(v.f[i] - std::floor(v.f[i])) }
inline float scale2(float a, float n) { return n >= -126 ? std::ldexp(a, int(std::floor(n))) : n < -126 ? 0.f : n; }
inline V scale2(V v, V n) { FB_LANES(scale2(v.f[i], n.f[i])) }
inline void store_bf16(uint16_t* p, V v) {
  for (int i = 0; i < 16; i++) p[i] = float_to_bf16(v.f[i]);
}
inline V load_bf16(const uint16_t* p) { FB_LANES(bf16_to_float(p[i])) }
template <class T>
inline T nearest(float f) {  // as the others: what no T holds is any T
  f = std::nearbyint(f);
  return f >= std::numeric_limits<T>::min() && f <= std::numeric_limits<T>::max() ? T(f) : T(0);
}
inline void store_i8(int8_t* p, V v) {
  for (int i = 0; i < 16; i++) p[i] = nearest<int8_t>(v.f[i]);
}
inline void store_i16(int16_t* p, V v) {
  for (int i = 0; i < 16; i++) p[i] = nearest<int16_t>(v.f[i]);
}
#undef FB_LANES
constexpr int kRows = 4, kQueries = 2, kWide = 2;
#endif

// `scale2(a, n)` is a * 2^floor(n) for a in [0.5, 2); far below -126 it is 0, and NaN for NaN. `fraction(a)` is a - floor(a).

// e^x to about 2 ulp for x <= 88: x = n ln2 + r (Cody-Waite), degree-6 minimax on r. Cephes expf's coefficients.
inline V exp(V x) {
  x = max(set1(-87.f), min(set1(88.f), x));  // in this order they keep NaN
  V n = round_nearest(mul(x, set1(1.44269504088896341f)));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.f)));
  return scale2(p, n);
}

// 2^x for x < 127, 0 for -inf: minimax on the fraction, exact where that is 0. For P = F32 to about 1.5e-7 (degree 5); for
// bf16 to 1e-4 (degree 3), a twentieth of what rounding the result costs.
template <class P>
inline V exp2(V x) {
  const V r = fraction(x);
  V p;
  if constexpr (sizeof(typename P::T) == 4) {
    p = fma(set1(1.8671305999e-3f), r, set1(9.0170292005e-3f));
    p = fma(p, r, set1(5.5799913905e-2f));
    p = fma(p, r, set1(2.4016444994e-1f));
    p = fma(p, r, set1(6.9315131182e-1f));
  } else {
    p = fma(set1(7.7067079159e-02f), r, set1(2.2764495072e-1f));
    p = fma(p, r, set1(6.9511679553e-1f));
  }
  return scale2(fma(p, r, set1(1.f)), x);
}

// ---------------------------------------------------------------- storage types
struct F32 {
  typedef float T;
  typedef V W;
  static constexpr int K = 1;  // ks per mac
  static W loadw(const T* p) { return load(p); }
  static V mac(V acc, W w, const T* x) { return fma(set1(*x), w, acc); }
  static void store(T* p, V v) { fb::store(p, v); }
  static void store(T* p, V v, V next) { fb::store(p, v), fb::store(p + 16, next); }
  // Weights of K ks, rounded to bfloat16 numbers, as a factor of `mac`; they also lie in `p` afterwards.
  static W weights(const V (&v)[K], T* p) {
    const V w = round_bf16(v[0]);
    fb::store(p, w);
    return w;
  }
  static T from(float f) { return f; }
  static float to(T t) { return t; }
};

struct Bf16 {
  typedef uint16_t T;
  static constexpr int K = 2;
  static void store(T* p, V v) { store_bf16(p, v); }
  static T from(float f) { return float_to_bf16(f); }
  static float to(T t) { return bf16_to_float(t); }
  static int32_t pair(const T* x) {
    int32_t i;
    std::memcpy(&i, x, 4);
    return i;
  }
#if defined(__AVX512BF16__)
  typedef __m512bh W;
  static W loadw(const T* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static V mac(V acc, W w, const T* x) { return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(pair(x)), w); }
  static void store(T* p, V v, V next) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(next, v)); }
  static W weights(const V (&v)[K], T* p) {
    const W w = _mm512_cvtne2ps_pbh(v[1], v[0]);
    _mm512_storeu_si512(p, (__m512i)w);
    return w;
  }
#elif defined(__AVX512F__)
  typedef __m512i W;
  static W loadw(const T* p) { return _mm512_loadu_si512(p); }
  static V mac(V acc, W w, const T* x) {
    acc = fma(set1(bf16_to_float(x[0])), _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), acc);
    return fma(set1(bf16_to_float(x[1])), _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000)))), acc);
  }
#elif defined(__AVX2__) && defined(__FMA__)
  struct W {
    __m256i a, b;
  };
  static W loadw(const T* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))}; }
  static V mac(V acc, W w, const T* x) {
    const __m256i hi = _mm256_set1_epi32(int(0xffff0000));
    V e = {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
    V o = {_mm256_castsi256_ps(_mm256_and_si256(w.a, hi)), _mm256_castsi256_ps(_mm256_and_si256(w.b, hi))};
    return fma(set1(bf16_to_float(x[1])), o, fma(set1(bf16_to_float(x[0])), e, acc));
  }
#else
  struct W {
    const T* p;
  };
  static W loadw(const T* p) { return {p}; }
  static V mac(V acc, W w, const T* x) {
    float a = bf16_to_float(x[0]), b = bf16_to_float(x[1]);
    for (int i = 0; i < 16; i++) acc.f[i] += a * bf16_to_float(w.p[2 * i]) + b * bf16_to_float(w.p[2 * i + 1]);
    return acc;
  }
#endif
#if !defined(__AVX512BF16__)
  static void store(T* p, V v, V next) { store_bf16(p, v), store_bf16(p + 16, next); }
  static W weights(const V (&v)[K], T* p) {
    store_bf16(p, v[0]);
    store_bf16(p + 16, v[1]);
    return loadw(p);
  }
#endif
};

inline const char* isa() {
#if defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
  return "avx2";
#else
  return "portable";
#endif
}

}  // namespace fb
