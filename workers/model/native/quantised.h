// Weights of 8 and 4 bits, made into bfloat16 numbers a group at a time, just before they are multiplied.
//
// Layout: panels of 32 columns as in linear.h; each panel is its groups of 32 rows (of k) one after the other:
//   kQ8   32 half scales d; 1024 int8 codes q.                                        w = d q         (8.5 bits)
//   kInt8 the same.
//   kQ4   32 half scales d, 32 half offsets m; 1024 4-bit codes.                      w = d q + m     (5 bits)
//   kQ4K  before each 8th group 32 half D and 32 half M; 32 bytes a, 32 bytes b;
//         1024 4-bit codes.                                                           w = D a q - M b (4.63 bits)
// Codes come in the order of the dense layout, [k/K][2][16][K]; of 4-bit codes 8 vectors of 16 share 16 words, vector i
// in bits 4i..4i+3. Whatever k is, its last group is whole (codes 0).
//
// Every product is exact in fp32 and rounded once to bfloat16: all machines and both types compute with the same weights.
// kInt8 is multiplied without being unpacked (linear.h): only a column that is gathered, a token's embedding, is.
#pragma once
#include "vec.h"

namespace fb {

enum Kind { kDense, kQ8, kQ4, kQ4K, kInt8, kFolded };  // the last: folded.h
constexpr long kPanel = 32, kGroup32 = 32, kSuper = 8, kStride = 4;  // kStride: rows of k that are unpacked at a time
constexpr long kCodes = kPanel * kGroup32, kHalves = kPanel * 2;
constexpr long kAheadFar = 16 << 10, kAheadNear = 1 << 10;  // bytes that codes are fetched ahead into L2 and L1

template <long kLines, long kL2 = kAheadFar, long kL1 = kAheadNear>
FB_INLINE inline void fetch(const void* p) {
  for (long b = 0; b < 64 * kLines; b += 64) {
    prefetch_l2((const char*)p + kL2 + b);
    prefetch((const char*)p + kL1 + b);
  }
}

// A column's number for each of the 2 K vectors of one step of k.
template <class P>
struct PerColumn {
  V v[2 * P::K];
  PerColumn(V low, V high) {
    if constexpr (P::K == 1) {
      v[0] = low, v[1] = high;
    } else {
      v[0] = twice_low(low), v[1] = twice_high(low), v[2] = twice_low(high), v[3] = twice_high(high);
    }
  }
};

template <class P>
inline PerColumn<P> halves(const uint8_t* at) {
  return PerColumn<P>(load_half((const uint16_t*)at), load_half((const uint16_t*)at + 16));
}

// A reader goes through one group of a panel, kStride rows at a time: after `begin(i)`, `vector(j)` is the j-th of the 8
// vectors of weights of rows [i, i + 4), in fp32.
template <class P>
struct ReadQ8 {
  const uint8_t *at, *codes;
  PerColumn<P> scale;
  ReadQ8(const uint8_t* panel, long g)
      : at(panel + g * (kHalves + kCodes)), scale(halves<P>(at)) {
    fetch<1>(at);
    at += kHalves;
  }
  void begin(long i) {
    codes = at + i * kPanel;
    fetch<2>(codes);
  }
  V vector(int j) const { return mul(scale.v[j % (2 * P::K)], load_i8((const int8_t*)codes + 16 * j)); }
};

template <class P>
struct ReadNibbles {
  const uint8_t* codes;
  PerColumn<P> scale, offset;
  Nibbles words;
  ReadNibbles(const uint8_t* codes, PerColumn<P> scale, PerColumn<P> offset) : codes(codes), scale(scale), offset(offset) {}
  void begin(long i) {
    words = Nibbles::load(codes + i * kPanel / 2);
    fetch<1>(codes + i * kPanel / 2);
  }
  V vector(int j) const { return fma(scale.v[j % (2 * P::K)], words.nibble(j), offset.v[j % (2 * P::K)]); }
};

template <class P>
struct ReadQ4 : ReadNibbles<P> {
  ReadQ4(const uint8_t* panel, long g) : ReadQ4(panel + g * (2 * kHalves + kCodes / 2)) {}
  explicit ReadQ4(const uint8_t* at) : ReadNibbles<P>(at + 2 * kHalves, halves<P>(at), halves<P>(at + kHalves)) { fetch<2>(at); }
};

template <class P>
struct ReadQ4K : ReadNibbles<P> {
  static constexpr long kBytes = kHalves + kCodes / 2;
  ReadQ4K(const uint8_t* panel, long g) : ReadQ4K(panel + g / kSuper * (2 * kHalves + kSuper * kBytes), int(g % kSuper)) {}
  ReadQ4K(const uint8_t* block, int g) : ReadQ4K((const uint16_t*)block, block + 2 * kHalves + g * kBytes) {}
  ReadQ4K(const uint16_t* h, const uint8_t* at)
      : ReadNibbles<P>(
            at + kHalves,
            PerColumn<P>(mul(load_half(h), load_u8(at)), mul(load_half(h + 16), load_u8(at + 16))),
            PerColumn<P>(sub(zero(), mul(load_half(h + 32), load_u8(at + 32))),
                         sub(zero(), mul(load_half(h + 48), load_u8(at + 48))))) {
    fetch<1>(at);
  }
};

}  // namespace fb
