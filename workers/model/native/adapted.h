// The adapters of a step: which rows have which, and the phase that shrinks them (lora.h has the arithmetic).
//
// Rules
// - `enlist` runs before the threads do, everything else in tasks they have claimed: an adapter's memory is never read
//   between steps, so its owner may free it there.
#pragma once
#include "abi.h"
#include "memory.h"
#include "pool.h"

namespace fb {

// How much there is to shrink: sets of rows, and groups of 16 ranks of each linear of a layer. All 0 without adapters.
struct LoraWork {
  int sets, groups[kSites];
};

template <class P>
struct Adapted {
  typedef typename P::T T;
  // Rows of one adapter that are shrunk together: so many from `first` on in `by_adapter`.
  struct Set {
    int adapter, first, rows;
  };
  const int width, layers;
  Array<T> low;  // [rows][width] A x
  std::vector<Set> sets;
  std::vector<int> by_adapter, of_row;  // rows in the order of their adapters; each row's adapter, or -1

  Adapted(int rows, int width, int layers) : width(width), layers(layers), low(long(rows) * width), of_row(rows) {}

  LoraWork enlist(const FbStep& s) {
    LoraWork work{};
    sets.clear();
    by_adapter.clear();
    if (s.loras) std::fill(of_row.begin(), of_row.begin() + s.rows, -1);
    for (int a = 0; a < s.loras; a++) {
      const int first = int(by_adapter.size());
      for (int c = 0; c < s.chunks; c++)
        for (int r = s.first[c]; s.lora[c] == a && r < s.first[c] + s.count[c]; r++) {
          by_adapter.push_back(r);
          of_row[r] = a;
        }
      for (int at = first; at < int(by_adapter.size()); at += kRows)
        sets.push_back({a, at, std::min(kRows, int(by_adapter.size()) - at)});
      for (long i = 0; i < long(layers) * kSites; i++)
        work.groups[i % kSites] = std::max(work.groups[i % kSites], s.adapters[a][i].total / int(kLanes16));
    }
    work.sets = int(sets.size());
    return work;
  }

  // `first`, `second`: groups of columns of q, and of q and k.
  Low<P> of(const FbStep& s, long layer, Site site, long first, long second) const {
    return {s.adapters, layer * kSites + site, of_row.data(), low.data(), width, site, first, second};
  }

  // A x of every row with an adapter. False when the step has ended meanwhile.
  bool shrink(Walk& walk, const LoraWork& work, const Low<P>& own, const T* in, long k) {
    const int groups = work.groups[own.site];
    return walk.each(work.sets * groups, [&](int i) {
      const Set& set = sets[i / groups];
      const Lora& l = own.adapters[set.adapter][own.index];
      const long group = i % groups;
      if (group * kLanes16 >= l.total) return;
      const T* x[kRows];
      T* out[kRows];
      for (int r = 0; r < set.rows; r++) {
        const long row = by_adapter[set.first + r];
        x[r] = in + row * k;
        out[r] = low.data() + row * width + group * kLanes16;
      }
      shrunk<P, kRows>(set.rows, x, (const T*)l.a + group * kLanes16 * k, k, out);
    });
  }
};

}  // namespace fb
