// bfloat16 weights in about 12 bits, exactly: what a step of few rows waits for is reading them.
//
// Trained weights use few of the 256 exponents: the sixteen that a panel uses most cover all but one weight in some
// thousands. So an exponent is a code of 4 bits; where one is none of the sixteen, its group stays as it was. (Zhang et
// al., "DFloat11", 2025, get 11 bits with codes of unequal length, which would be unpacked one after the other.)
//
// Layout of a panel (linear.h): [16 exponents, where a bfloat16 number has its own][a bit for each group: it stayed as it
// was], filled up to a cache line, and its groups of 16 rows of k one after the other:
//   folded  4 times, for 4 vectors of the dense panel: [32 words of 4 codes][4 times 32 bytes: sign, 7 bits of fraction]
//           vector i's codes in bits 4i..4i+3                                                               768 bytes
//   as is   16 vectors of the dense panel                                                                 1,024 bytes
// So panels have different sizes.
//
// Only where bfloat16 is multiplied by an instruction: elsewhere a step is not faster than memory.
#pragma once
#include "quantised.h"

namespace fb {

constexpr long kFoldedRows = 16;                                // of k, in a group
constexpr long kUnfolded = 2 * kPanel * kFoldedRows, kFoldedGroup = kUnfolded / 4 * 3;  // bytes of one
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool kFolds = true;
#else
constexpr bool kFolds = false;
#endif

// Bytes before a panel's groups.
inline long folded_head(long k) { return (32 + (k / kFoldedRows + 63) / 64 * 8 + 63) / 64 * 64; }

// A dense panel to `out`, which has room for it and its head; the bytes that it takes.
inline long fold(const uint16_t* dense, long k, uint8_t* out) {
  int used[4][256] = {};
  for (long i = 0; i < kPanel * k; i += 4)
    for (int j = 0; j < 4; j++) used[j][dense[i + j] >> 7 & 255]++;
  for (int e = 0; e < 256; e++) used[0][e] += used[1][e] + used[2][e] + used[3][e];
  std::memset(out, 0, folded_head(k));
  uint8_t code[256];
  std::memset(code, 255, sizeof(code));
  for (int n = 0; n < 16; n++) {
    int most = 0;
    for (int e = 1; e < 256; e++)
      if (used[0][e] > used[0][most]) most = e;
    used[0][most] = -1;
    code[most] = uint8_t(n);
    const uint16_t exponent = uint16_t(most << 7);
    std::memcpy(out + 2 * n, &exponent, 2);
  }
  uint8_t *at = out + folded_head(k), *stayed = out + 32;
  for (long g = 0; g < k / kFoldedRows; g++, dense += kPanel * kFoldedRows) {
    uint8_t codes[kPanel * kFoldedRows], any = 0;
    for (long i = 0; i < kPanel * kFoldedRows; i++) any |= codes[i] = code[dense[i] >> 7 & 255];
    if (any & 0x80) {
      stayed[g / 8] |= uint8_t(1 << g % 8);
      std::memcpy(at, dense, kUnfolded);
      at += kUnfolded;
      continue;
    }
    for (long i = 0; i < kPanel * kFoldedRows; i += 128, at += 192) {
      for (int w = 0; w < 32; w++) {
        const uint8_t* of = codes + i + w;
        const uint16_t word = uint16_t(of[0] | of[32] << 4 | of[64] << 8 | of[96] << 12);
        std::memcpy(at + 2 * w, &word, 2);
      }
      for (int j = 0; j < 128; j++) at[64 + j] = uint8_t((dense[i + j] >> 8 & 0x80) | (dense[i + j] & 0x7f));
    }
  }
  return at - out;
}

// So many dense panels to `out`; their bytes, or 0 where that gains too little. starts [panels + 1] gets where they begin
// and end. Without `out`: the bytes that may be written, 0 where folded weights cannot be read.
inline long fold(const void* dense, long panels, long k, void* out, long* starts) {
  if (!kFolds || k % kFoldedRows) return 0;
  const long whole = 2 * kPanel * k;
  if (!out) return panels * (folded_head(k) + whole);
  long at = 0;
  for (long p = 0; p < panels; p++) {
    starts[p] = at;
    at += fold((const uint16_t*)dense + p * kPanel * k, k, (uint8_t*)out + at);
  }
  starts[panels] = at;
  return at <= panels * whole / 8 * 7 ? at : 0;
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// Turns a panel's numbers back into weights.
struct Unfold {
  const __m512i exponents, own = _mm512_set1_epi16(int16_t(0x807f));  // bits that a weight has of its own
  // Sixteen twice: of a word the permutation looks at five bits, the fifth being another vector's.
  explicit Unfold(const uint8_t* panel)
      : exponents(_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)panel))) {}
  __m512i operator()(__m512i codes, const uint8_t* rest) const {
    const __m512i bits = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)rest));  // the sign everywhere on the left
    return _mm512_ternarylogic_epi64(own, bits, _mm512_permutexvar_epi16(codes, exponents), 0xca);  // own ? bits : exponents
  }
};
#endif

}  // namespace fb
