// Bytes times 16-bit numbers, summed in 32 bits: exact, and so alike on every machine.
//
// A vector of bytes is 16 pairs, one for each column or token; `mac` adds to each its products with one pair of numbers.
// 511 products cannot overflow: 511 * 128 * 32767 < 2^31.
#pragma once
#include "vec.h"

namespace fb {

struct Integers {
  typedef int16_t T;
#if defined(__AVX512BW__)
  typedef __m512i W;
  typedef __m512i A;
  static A none() { return _mm512_setzero_si512(); }
  static W loadw(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  static A mac(A a, W w, const T* x) {
#if defined(__AVX512VNNI__)
    const __m512i both = _mm512_set1_epi32(pair(x));
    asm("vpdpwssd %2, %1, %0" : "+v"(a) : "v"(w), "v"(both));  // GCC 12 moves the intrinsic's sums to and fro
    return a;
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
  static W loadw(const int8_t* p) {
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
    T v[32];
  };
  struct A {
    int32_t i[16];
  };
  static A none() { return {}; }
  static W loadw(const int8_t* p) {
    W w;
    for (int i = 0; i < 32; i++) w.v[i] = p[i];
    return w;
  }
  static A mac(A a, W w, const T* x) {
    for (int i = 0; i < 16; i++) a.i[i] += w.v[2 * i] * x[0] + w.v[2 * i + 1] * x[1];
    return a;
  }
  static V real(A a) {
    float f[16];
    for (int i = 0; i < 16; i++) f[i] = float(a.i[i]);
    return load(f);
  }
#endif
  // x times 2^n, exact; `power` is n << 23, and every exponent stays in its range.
  static V times(V x, int32_t power) {
#if defined(__AVX512F__)
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(power)));
#elif defined(__AVX2__) && defined(__FMA__)
    const __m256i n = _mm256_set1_epi32(power);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.a), n)),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.b), n))};
#else
    uint32_t u[16];
    std::memcpy(u, x.f, 64);
    for (int i = 0; i < 16; i++) u[i] += uint32_t(power);
    std::memcpy(x.f, u, 64);
    return x;
#endif
  }
  // sum + a scale, rounded once: alike on every machine, too.
  static V scaled(A a, V scale, V sum) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return fma(real(a), scale, sum);
#else
    V r;
    for (int i = 0; i < 16; i++) r.f[i] = std::fma(float(a.i[i]), scale.f[i], sum.f[i]);
    return r;
#endif
  }
  static int32_t pair(const T* x) {
    int32_t i;
    std::memcpy(&i, x, 4);
    return i;
  }
};

}  // namespace fb
