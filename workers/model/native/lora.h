// Low-rank updates (LoRA): rows of different adapters in one step, y += B (A x) for each row by its own adapter.
//
// Two parts. `shrunk` makes A x, in a phase of its own before the linear: sets of rows with one adapter read its A once.
// `Low::sum` makes B (A x) for a panel of columns inside the linear's task, whose epilogue adds it. A row's update depends
// on the row and its adapter only; rows without one get no part of this.
//
// Layout: A of all parts of a fused linear (q, k, v; gate, up) stacked, `rank` rows each, padded to 16 in all:
// [total/16][k/K][16][K]. B in groups of 16 columns, each with the ranks of its own part only: [n/16][rank/K][16][K].
#pragma once
#include "vec.h"

namespace fb {

enum Site { kQkv, kOutput, kGateUp, kDown, kSites };  // of a layer's linears
constexpr long kLanes16 = 16;

struct Lora {
  const void *a, *b;
  int rank, total;  // of one part (even), of all parts (a multiple of 16); 0: this linear is not adapted
};

template <class P, int R>
inline void shrink_tile(const typename P::T* const* x, const typename P::T* w, long k, typename P::T* const* out) {
  V a[R][2];
  unrolled<R>([&](auto r) FB_INLINE { a[r][0] = a[r][1] = zero(); });
  for (long i = 0; i < k; i += 2 * P::K, w += 2 * kLanes16 * P::K) {
    typename P::W even = P::loadw(w), odd = P::loadw(w + kLanes16 * P::K);
    unrolled<R>([&](auto r) FB_INLINE {
      a[r][0] = P::mac(a[r][0], even, x[r] + i);
      a[r][1] = P::mac(a[r][1], odd, x[r] + i + P::K);
    });
  }
  unrolled<R>([&](auto r) FB_INLINE { P::store(out[r], add(a[r][0], a[r][1])); });
}

// 16 values of A x for each of `rows` rows, at most R.
template <class P, int R>
inline void shrunk(long rows, const typename P::T* const* x, const typename P::T* w, long k, typename P::T* const* out) {
  if constexpr (R > 0) {
    if (rows == R)
      shrink_tile<P, R>(x, w, k, out);
    else
      shrunk<P, R - 1>(rows, x, w, k, out);
  }
}

// What a linear's tasks must know of the adapters of their rows.
template <class P>
struct Low {
  typedef typename P::T T;
  const Lora* const* adapters;
  long index;           // of the layer's linear among an adapter's
  const int* of_row;    // which of `adapters`, -1: none
  const T* shrunk;      // [rows][width]
  long width;
  int site;
  long first, second;   // groups of columns of q, and of q and k

  int part(long group) const {
    if (site == kGateUp) return int(group & 1);
    return site == kQkv ? (group >= first) + (group >= second) : 0;
  }

  // B (A x) of rows [row, row + n) and the 32 columns of `panel` into out [n][32]; null where none of them is adapted.
  const float* sum(long row, long n, long panel, float* out) const {
    bool any = false;
    for (long r = 0; r < n; r++, out += 2 * kLanes16) {
      const int which = of_row[row + r];
      const Lora* l = which < 0 ? nullptr : adapters[which] + index;
      for (long half = 0; half < 2; half++) {
        V acc = zero();
        if (l && l->rank) {
          any = true;
          const long group = 2 * panel + half;
          const T *b = (const T*)l->b + group * l->rank * kLanes16, *t = shrunk + (row + r) * width + part(group) * l->rank;
          for (long i = 0; i < l->rank; i += P::K, b += kLanes16 * P::K) acc = P::mac(acc, P::loadw(b), t + i);
        }
        store(out + half * kLanes16, acc);
      }
    }
    return any ? out - 2 * kLanes16 * n : nullptr;
  }
};

}  // namespace fb
