// Attention over a paged cache: prefill chunks and decodes in one ragged call, each K/V byte read once per group of
// query heads. Online softmax: Milakov & Gimelshein 2018; split over the context as in Flash-Decoding (Dao et al. 2023).
//
// Cache layout: one layer is [sub-blocks][kv head], a sub-block being 16 tokens (a block is one or several) that lie as
// kept.h says. P is what the model computes in, C how its cache is kept.
//
// Rules
// - A query's arithmetic depends on its own position and keys only: tokens go in groups of 64 at fixed positions,
//   contexts in splits of kSplit at fixed positions, always merged in order. So neither the batch, nor the chunk
//   size, nor the thread count changes a bit of the result.
// - Nothing of a lane that its sequence has not written reaches a result, be it NaN: scores of such keys are replaced,
//   such values are not read. Only where values go in pairs is one read: the writer of its partner zeroed it, or it is
//   a byte, and those are all finite.
// - Scores are in units of log2(e), so that their exponentials are powers of two, and relative to a reference that is
//   near the highest score so far, not equal to it: as in FlashAttention-4 it moves only when a score is 2^kSlack times
//   above, so that few groups search their highest score and rescale what was summed up. Weights are at most 2^kSlack.
// - A decode reads its keys and values once, from memory: with each line of a group the same line of the next group is
//   fetched into L2, at the end that of the next task. (Into L2, since L1 can wait for two dozen lines only.)
#pragma once
#include <algorithm>

#include "kept.h"

namespace fb {

constexpr int kGroup = 64;              // tokens between two rescales
constexpr int kSubs = kGroup / kLanes;  // sub-blocks of a group
constexpr int kSplit = 1024;            // tokens of one task
constexpr int kFew8 = 2 * kQueries;     // queries that read bytes as they lie; for more they are widened first
constexpr int kMaxQueries = 96;         // of a tile, each head's filled up to whole register tiles
constexpr float kSlack = 8;             // how far scores may rise above a query's reference before that is raised
constexpr float kLog2e = 1.44269504088896341f;

// Scores of Q queries against B sub-blocks of keys, fetching as many lines of `ahead`. q: [dim/K][kQueries][K].
template <class C, int Q, int B>
inline void score(const typename C::T* q, const typename C::S* const* k, const typename C::S* const* ahead, int dim,
                  float* s) {
  constexpr int K = C::K;
  typename C::A a[Q][B];
  unrolled<Q>([&](auto i) FB_INLINE { unrolled<B>([&](auto b) FB_INLINE { a[i][b] = C::none(); }); });
  for (long at = 0; at < long(dim) * kLanes; at += kLanes * K * C::kPerLine) {
    unrolled<C::kPerLine>([&](auto part) FB_INLINE {
      typename C::W w[B];
      unrolled<B>([&](auto b) FB_INLINE {
        w[b] = C::loadw(k[b] + at + part * kLanes * K);
        if (part == 0) prefetch_l2(ahead[b] + at);
      });
      unrolled<Q>([&](auto i) FB_INLINE {
        unrolled<B>([&](auto b) FB_INLINE { a[i][b] = C::mac(a[i][b], w[b], q + (part * kQueries + i) * K); });
      });
    });
    q += C::kPerLine * kQueries * K;
  }
  unrolled<B>([&](auto b) FB_INLINE {
    if (C::kScaled) prefetch_l2(ahead[b] + 2L * kLanes * dim);
    unrolled<Q>([&](auto i) FB_INLINE { store(s + i * kGroup + b * kLanes, C::score(a[i][b], k[b], dim)); });
  });
}

// acc[q][0..16*N) += p[q] * V over the first `tokens` tokens of the group (rounded up to K), less `skip` sub-blocks.
// k: where their keys are; unit[q]: what p[q] is counted in, where the format scales.
template <class C, int Q, int N>
inline void weigh(const typename C::T* p, const typename C::S* const* k, const typename C::S* const* ahead, int skip,
                  int tokens, int dim, int d0, float* acc, const float* unit) {
  constexpr int K = C::K;
  const long values = long(kLanes) * dim + long(d0) * K;
  typename C::A a[Q][N];
  unrolled<Q>([&](auto i) FB_INLINE {
    unrolled<N>([&](auto n) FB_INLINE { a[i][n] = C::begin(acc + i * dim + d0 + 16 * n); });
  });
  for (int b = skip; b * kLanes < tokens; b++) {
    const int lanes = tokens - b * kLanes < kLanes ? tokens - b * kLanes : kLanes;
    const typename C::S *row = k[b] + values, *then = ahead[b] + values;
    const typename C::T* weight = p + b * kLanes;
    for (int t = 0; t < lanes; t += K, row += dim * K, then += dim * K, weight += K) {
      typename C::W w[N];
      unrolled<N>([&](auto n) FB_INLINE {
        w[n] = C::loadw(row + 16 * n * K);
        if (n % C::kPerLine == 0) prefetch_l2(then + 16 * n * K);
      });
      unrolled<Q>([&](auto i) FB_INLINE {
        unrolled<N>([&](auto n) FB_INLINE { a[i][n] = C::mac(a[i][n], w[n], weight + i * kGroup); });
      });
    }
  }
  unrolled<Q>([&](auto i) FB_INLINE {
    unrolled<N>([&](auto n) FB_INLINE {
      float* to = acc + i * dim + d0 + 16 * n;
      store(to, C::end(a[i][n], to, unit[i]));
    });
  });
}

// All scores of up to Q queries: as many sub-blocks at a time as registers hold.
template <class C, int Q>
inline void scores(int n, const typename C::T* q, const typename C::S* const* k, const typename C::S* const* ahead, int subs,
                   int dim, float* s) {
  if constexpr (Q > 0) {
    if (n != Q) return scores<C, Q - 1>(n, q, k, ahead, subs, dim, s);
    int b = 0;
    for (; b + kWide <= subs; b += kWide) score<C, Q, kWide>(q, k + b, ahead + b, dim, s + b * kLanes);
    for (; b < subs; b++) score<C, Q, 1>(q, k + b, ahead + b, dim, s + b * kLanes);
  }
}

template <class C, int Q>
inline void weighs(int n, const typename C::T* p, const typename C::S* const* k, const typename C::S* const* ahead,
                   int skip, int tokens, int dim, float* acc, const float* unit) {
  if constexpr (Q > 0) {
    if (n != Q) return weighs<C, Q - 1>(n, p, k, ahead, skip, tokens, dim, acc, unit);
    int d = 0;
    for (; d + 16 * kWide <= dim; d += 16 * kWide) weigh<C, Q, kWide>(p, k, ahead, skip, tokens, dim, d, acc, unit);
    for (; d < dim; d += 16) weigh<C, Q, 1>(p, k, ahead, skip, tokens, dim, d, acc, unit);
  }
}

// Where a sequence's keys and values lie.
template <class C>
struct Context {
  const typename C::S* cache;
  const int* table;
  int subs_per_block, kv_heads, head, dim;

  // Keys of head + `h` in the sub-blocks of the group that begins at token `base` and ends before `to`.
  void keys(int h, int base, int to, const typename C::S** k) const {
    for (int b = 0; b < kSubs && base + b * kLanes < to; b++) {
      const int sub = base / kLanes + b;
      const long at = long(table[sub / subs_per_block]) * subs_per_block + sub % subs_per_block;
      k[b] = cache + (at * kv_heads + head + h) * C::elements(dim);
    }
  }
};

// Some KV heads, `n` queries of each (rows x heads of the group, in order of position), and tokens [from, to) of one
// sequence. Heads lie side by side in the cache, so several of one group of tokens are read in longer stretches than one.
// position[i] is query i's; acc/l are its running numerator and denominator (in 16 lanes), m what they are relative to.
template <class P, class C>
struct Tile {
  typedef typename C::S S;
  typedef typename C::T T;
  int heads = 0, n = 0;
  int position[kMaxQueries];  // [head][query]
  float m[kMaxQueries];
  alignas(64) float l[kMaxQueries][16];
  alignas(64) float acc[kMaxQueries * kMaxDim];  // [query][dim]
  float scale[kMaxQueries];  // of a query's scores: the model's, times its own where it has one
  float unit[kQueries];      // of a register tile's weights, where the format scales
  alignas(64) float s[kQueries * kGroup];
  alignas(64) T p[kQueries * kGroup];
  alignas(64) T wide[C::kScaled ? kSubs : 1][C::kScaled ? 2 * kLanes * (kMaxDim + 1) : 1];  // sub-blocks, widened
  alignas(64) T q[kMaxQueries * kMaxDim];  // register tiles of queries of one head: [dim/K][kQueries][K]

  // Query r of head `h`, which begins at `begin`, to where the scores read it; they are multiplied by `by`.
  void put(int h, int r, int dim, const typename P::T* begin, float by) {
    T* to = q + spot(h, r, dim);
    float& times = scale[h * n + r];
    times = by;
    if constexpr (C::kScaled) {
      alignas(64) float wide[kMaxDim];
      alignas(64) T narrow[kMaxDim];
      for (int d = 0; d < dim; d++) wide[d] = P::to(begin[d]);
      times *= C::query(wide, dim, narrow);
      copy(narrow, dim, to);
    } else {
      copy(begin, dim, to);
    }
  }
  static void copy(const T* from, int dim, T* to) {
    for (int d = 0; d < dim; d += C::K) std::memcpy(to + d * kQueries, from + d, C::K * sizeof(T));
  }
  long spot(int h, int r, int dim) const {
    const int tiles = (n + kQueries - 1) / kQueries;
    return long(h * tiles + r / kQueries) * kQueries * dim + r % kQueries * C::K;
  }

  // `next`: what this thread is likely to read afterwards; nothing when its tokens [from, to) are none.
  void run(const Context<C>& c, int window, float softcap, int from, int to, const Context<C>& next, int next_from,
           int next_to) {
    for (int i = 0; i < heads * n; i++) {
      m[i] = -INFINITY;
      store(l[i], zero());
      for (int d = 0; d < c.dim; d += 16) store(acc + i * c.dim + d, zero());
    }
    for (int base = from; base < to; base += kGroup) {
      const int end = base + kGroup < to ? base + kGroup : to;
      for (int h = 0; h < heads; h++) {
        const S *k[kSubs] = {}, *ahead[kSubs];
        c.keys(h, base, end, k);
        std::memcpy(ahead, k, sizeof(k));
        if (end < to)
          c.keys(h, end, to, ahead);
        else
          next.keys(h, next_from, next_to, ahead);
        if constexpr (C::kScaled) {
          if (n > kFew8) {
            const typename Widened<C>::S* w[kSubs] = {};
            for (int b = 0; b < kSubs && base + b * kLanes < end; b++) {
              w[b] = wide[b];
              Widened<C>::widen(k[b], ahead[b], c.dim, wide[b]);
            }
            queries<Widened<C>>(h, base, end, w, w, c.dim, window, softcap);
            continue;
          }
        }
        queries<C>(h, base, end, k, ahead, c.dim, window, softcap);
      }
    }
  }

  // All queries of head `h` against tokens [base, end).
  template <class F>
  void queries(int h, int base, int end, const typename F::S* const* k, const typename F::S* const* ahead, int dim, int window,
               float softcap) {
    for (int r = 0; r < n; r += kQueries)
      group<F>(h, r, std::min(n - r, kQueries), base, end, k, r == 0 ? ahead : k, dim, window, softcap);
  }

  // Queries [r, r + count) of head `h` against tokens [base, end).
  template <class F>
  void group(int h, int r, int count, int base, int end, const typename F::S* const* k, const typename F::S* const* ahead,
             int dim, int window, float softcap) {
    const int i = h * n + r, seen = std::min(position[i + count - 1] + 1, end);
    if (seen <= base) return;  // later queries see them
    const int subs = (seen - base + kLanes - 1) / kLanes;
    scores<F, kQueries>(count, q + spot(h, r, dim), k, ahead, subs, dim, s);
    for (int j = 0; j < count; j++) soften<F>(i + j, j, base, subs, k, window, softcap, dim);
    // Sub-blocks wholly before every window may be another sequence's by now: their values are not read.
    const int skip = window > 0 ? std::max(0, position[i] + 1 - window - base) / kLanes : 0;
    weighs<F, kQueries>(count, p, k, ahead, skip, seen - base, dim, acc + long(i) * dim, unit);
  }

  // Turns query i's scores, the j-th of this register tile, into weights and keeps its reference and denominator.
  template <class F>
  void soften(int i, int j, int base, int subs, const typename F::S* const* k, int window, float softcap, int dim) {
    const int hi = position[i] + 1 - base, lo = window > 0 ? position[i] + 1 - window - base : 0;
    const uint64_t seen = below(hi) & ~below(lo);
    if (seen == below(kGroup))
      soften<F, true>(i, j, kSubs, k, seen, softcap, dim);
    else
      soften<F, false>(i, j, subs, k, seen, softcap, dim);
  }

  template <class F, bool Whole>
  void soften(int i, int j, int subs, const typename F::S* const* k, uint64_t seen, float softcap, int dim) {
    const float* from = s + j * kGroup;
    T* to = p + j * kGroup;
    V x[kSubs], top = set1(-INFINITY), by = set1(softcap > 0 ? 1.f : scale[i]);
    unrolled<kSubs>([&](auto b) FB_INLINE {
      if (!Whole && b >= subs) return;
      x[b] = load(from + b * kLanes);
      if (softcap > 0) {  // cap * tanh(x / cap), tanh(u) = 1 - 2 / (e^2u + 1)
        V e = exp(mul(x[b], set1(scale[i] * 2.f / softcap)));
        x[b] = mul(set1(softcap * kLog2e), sub(set1(1.f), div(set1(2.f), add(e, set1(1.f)))));
      }
      if (!Whole) x[b] = keep(x[b], uint16_t(seen >> b * kLanes), set1(-INFINITY));
      top = max(top, x[b]);
    });
    if (any_above(mul(top, by), set1(m[i] + kSlack))) raise(i, softcap > 0 ? hmax(top) : hmax(top) * scale[i], dim);
    if (m[i] == -INFINITY) {  // nothing visible yet, or nothing but NaN, which is above nothing
      V any = zero();
      unrolled<kSubs>([&](auto b) FB_INLINE {
        if (Whole || b < subs) any = add(any, x[b]);
      });
      if (std::isnan(hsum(any))) store(l[i], set1(NAN));
      std::memset(to, 0, subs * kLanes * sizeof(T));
      unit[j] = 0;
      return;
    }
    const V less = set1(-m[i]);
    V sum = load(l[i]);
    unrolled<kSubs>([&](auto b) FB_INLINE {
      if (!Whole && b >= subs) {
        x[b] = zero();
        return;
      }
      x[b] = exp2<P>(fma(x[b], by, less));
      if (!Whole) x[b] = keep(x[b], uint16_t(seen >> b * kLanes), zero());
      sum = add(sum, x[b]);
      if constexpr (F::kScaled) {
        x[b] = mul(x[b], F::value_scales(k[b], dim));
        if (!Whole) x[b] = keep(x[b], uint16_t(seen >> b * kLanes), zero());  // a scale that is not ours may be NaN
        sum = fma(x[b], zero(), sum);  // one that is ours makes the result NaN
      }
    });
    if constexpr (!F::kScaled)
      unrolled<kSubs / 2>([&](auto b) FB_INLINE { P::store(to + 2 * b * kLanes, x[2 * b], x[2 * b + 1]); });
    if constexpr (F::kScaled) unit[j] = F::weights(x, subs, to);
    store(l[i], sum);
  }

  // From now on query i's weights are relative to 2^now.
  [[gnu::noinline]] void raise(int i, float now, int dim) {
    if (m[i] != -INFINITY) {
      const V c = exp2<F32>(set1(m[i] - now));
      store(l[i], mul(load(l[i]), c));
      for (int d = 0; d < dim; d += 16) store(acc + long(i) * dim + d, mul(load(acc + long(i) * dim + d), c));
    }
    m[i] = now;
  }

  // A bit for each token of a group before the i-th.
  static uint64_t below(int i) { return i <= 0 ? 0 : i >= kGroup ? ~uint64_t(0) : (uint64_t(1) << i) - 1; }
  static_assert(kGroup == 64);
};

}  // namespace fb
