// A linear's inputs in block floating point: 16-bit numbers that count in one unit for each group of 32, a power of two,
// to be multiplied with codes as integers (integers.h).
//
// Rules
// - The largest magnitude of a group has 15 bits. A bfloat16 number is exact down to 2^-7 of that, a smaller one at most
//   half a unit off: 2^-15 of the largest.
// - A row's numbers depend on that row only. Where one is not finite the row is broken: every output becomes NaN.
// - No unit is below 2^-100, so that a unit times a scale in half precision is a normal number, and exact. Where all of a
//   group is below 2^-86 its numbers are rounded to multiples of that.
#pragma once
#include <algorithm>

#include "integers.h"
#include "memory.h"
#include "quantised.h"

namespace fb {

// Rows of them.
struct Fixed {
  const int16_t* numbers = nullptr;  // [rows][32 groups], zeros behind the last input
  const int32_t* units = nullptr;    // [rows][groups] exponents, as `Integers::times` takes them
  const float* broken = nullptr;     // [rows] NaN, or 0
  long groups = 0;
  Fixed from(long row) const { return {numbers + row * groups * kGroup32, units + row * groups, broken + row, groups}; }
};

// The largest magnitude of 32 bfloat16 numbers, as its bits.
inline int peak_bits(const uint16_t* x) {
#if defined(__AVX2__)
  const __m256i size = _mm256_set1_epi16(0x7fff);
  const __m256i a = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)x), size);
  const __m256i b = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + 16)), size);
  const __m256i most = _mm256_max_epu16(a, b);
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  return 0xffff ^ _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0);
#else
  int most = 0;
  for (int i = 0; i < kGroup32; i++) most = (x[i] & 0x7fff) > most ? x[i] & 0x7fff : most;
  return most;
#endif
}

inline float power_of_two(int n) {
  const uint32_t u = uint32_t(n + 127) << 23;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// 32 bfloat16 numbers as `out` times 2^unit. Returns NaN where one is not finite, or 0.
inline float fixed_group(const uint16_t* x, int16_t* out, int32_t* unit) {
  constexpr int kBits = 14, kLeast = -100;  // a peak has 2^14 units or more
  const int exponent = peak_bits(x) >> 7;
  const int n = std::max(kLeast, exponent - 127 - kBits);
  const V inverse = set1(power_of_two(-n));
  for (int i = 0; i < kGroup32; i += 16) store_i16(out + i, mul(load_bf16(x + i), inverse));
  *unit = n * (1 << 23);
  return exponent == 255 ? std::numeric_limits<float>::quiet_NaN() : 0.f;
}

// One thread's: the rows that it is multiplying, made once for all of its columns.
class FixedRows {
 public:
  // For at most so many rows of so many inputs; none: nothing is ever asked of it.
  FixedRows(long rows, long inputs)
      : numbers_(rows * groups(inputs) * kGroup32), units_(rows * groups(inputs)), broken_(rows) {}

  void begin() { held_ = -1; }

  // Rows x [rows][k], which are `block` of the linear since whose `begin` this is.
  Fixed of(const uint16_t* x, long rows, long k, long block) {
    const long n = groups(k);
    for (long r = 0; held_ != block && r < rows; r++)
      broken_.data()[r] = row(x + r * k, k, numbers_.data() + r * n * kGroup32, units_.data() + r * n);
    held_ = block;
    return {numbers_.data(), units_.data(), broken_.data(), n};
  }

 private:
  static long groups(long k) { return (k + kGroup32 - 1) / kGroup32; }

  static float row(const uint16_t* x, long k, int16_t* out, int32_t* units) {
    float broken = 0;
    long i = 0;
    for (; i + kGroup32 <= k; i += kGroup32) broken += fixed_group(x + i, out + i, units++);
    if (i == k) return broken;
    uint16_t rest[kGroup32] = {};
    std::memcpy(rest, x + i, (k - i) * sizeof(*x));
    return broken + fixed_group(rest, out + i, units);
  }

  Array<int16_t> numbers_;
  Array<int32_t> units_;
  Array<float> broken_;
  long held_ = -1;
};

}  // namespace fb
