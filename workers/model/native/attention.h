// Attention over a paged cache: prefill chunks and decodes in one ragged call, each K/V byte read once per group of
// query heads. Online softmax: Milakov & Gimelshein 2018; split over the context as in Flash-Decoding (Dao et al. 2023).
//
// Cache layout: one layer is [sub-blocks][kv head][K | V], a sub-block being 16 tokens (a block is one or several).
//   K: [dim/K][16 tokens][K]    scores of 16 tokens come out of one register, no horizontal sums
//   V: [16/K tokens][dim][K]    K = 2 for bf16, 1 for fp32
//
// Rules
// - A query's arithmetic depends on its own position and keys only: tokens go in groups of 64 at fixed positions,
//   contexts in splits of kSplit at fixed positions, always merged in order. So neither the batch, nor the chunk
//   size, nor the thread count changes a bit of the result.
// - Nothing of a lane that its sequence has not written reaches a result, be it NaN: scores of such keys are replaced,
//   such values are not read. Only where values go in pairs is one read, and the writer of its partner zeroed it.
#pragma once
#include "vec.h"

namespace fb {

constexpr int kLanes = 16;    // tokens of a sub-block
constexpr int kGroup = 64;    // tokens between two rescales
constexpr int kSplit = 1024;  // tokens of one task
constexpr int kQueries = 6;   // queries of a register tile
constexpr int kMaxQueries = 64;
constexpr int kMaxDim = 256;

// Scores of Q queries against 16 keys.
template <class P, int Q>
inline void score(const typename P::T* const* q, const typename P::T* k, int dim, float (*s)[kGroup], int at, float scale) {
  V a[Q];
  for (int i = 0; i < Q; i++) a[i] = zero();
  for (int d = 0; d < dim; d += P::K) {
    typename P::W w = P::loadw(k + d * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++) a[i] = P::mac(a[i], w, q[i] + d);
  }
  for (int i = 0; i < Q; i++) store(s[i] + at, mul(a[i], set1(scale)));
}

// acc[q][0..16*N) += p[q] * V over the first `tokens` tokens of the group (rounded up to P::K).
template <class P, int Q, int N>
inline void weigh(const typename P::T (*p)[kGroup], const typename P::T* const* v, int tokens, int dim, int d0,
                  float (*acc)[kMaxDim]) {
  V a[Q][N];
  for (int i = 0; i < Q; i++)
    for (int n = 0; n < N; n++) a[i][n] = load(acc[i] + d0 + 16 * n);
  for (int b = 0; b * kLanes < tokens; b++) {
    const int lanes = tokens - b * kLanes < kLanes ? tokens - b * kLanes : kLanes;
    for (int t = 0; t < lanes; t += P::K) {
      const typename P::T* row = v[b] + t * dim + d0 * P::K;
      typename P::W w[N];
      for (int n = 0; n < N; n++) w[n] = P::loadw(row + 16 * n * P::K);
#pragma GCC unroll 6
      for (int i = 0; i < Q; i++)
        for (int n = 0; n < N; n++) a[i][n] = P::mac(a[i][n], w[n], p[i] + b * kLanes + t);
    }
  }
  for (int i = 0; i < Q; i++)
    for (int n = 0; n < N; n++) store(acc[i] + d0 + 16 * n, a[i][n]);
}

template <class P, int Q>
inline void scores(int n, const typename P::T* const* q, const typename P::T* k, int dim, float (*s)[kGroup], int at,
                   float scale) {
  if constexpr (Q > 0) {
    if (n == Q)
      score<P, Q>(q, k, dim, s, at, scale);
    else
      scores<P, Q - 1>(n, q, k, dim, s, at, scale);
  }
}

template <class P, int Q>
inline void weighs(int n, const typename P::T (*p)[kGroup], const typename P::T* const* v, int tokens, int dim,
                   float (*acc)[kMaxDim]) {
  if constexpr (Q > 0) {
    if (n != Q) return weighs<P, Q - 1>(n, p, v, tokens, dim, acc);
    int d = 0;
    for (; d + 64 <= dim; d += 64) weigh<P, Q, 4>(p, v, tokens, dim, d, acc);
    for (; d < dim; d += 16) weigh<P, Q, 1>(p, v, tokens, dim, d, acc);
  }
}

// One KV head, up to kMaxQueries queries (rows x heads of the group), tokens [from, to) of one sequence.
// position[i] is query i's; acc/m/l are its running numerator, maximum and denominator.
template <class P>
struct Tile {
  int n = 0;
  const typename P::T* q[kMaxQueries];
  int position[kMaxQueries];
  float m[kMaxQueries], l[kMaxQueries];
  alignas(64) float acc[kMaxQueries][kMaxDim];
  alignas(64) float s[kMaxQueries][kGroup];
  alignas(64) typename P::T p[kMaxQueries][kGroup];

  void run(const typename P::T* cache, const int* table, int subs_per_block, int kv_heads, int head, int dim, float scale,
           int window, float softcap, int from, int to) {
    typedef typename P::T T;
    const long half = long(kLanes) * dim;
    for (int i = 0; i < n; i++) {
      m[i] = -INFINITY;
      l[i] = 0;
      for (int d = 0; d < dim; d += 16) store(acc[i] + d, zero());
    }
    for (int base = from; base < to; base += kGroup) {
      const int end = base + kGroup < to ? base + kGroup : to;
      const int subs = (end - base + kLanes - 1) / kLanes;
      const T *k[kGroup / kLanes], *v[kGroup / kLanes];
      for (int b = 0; b < subs; b++) {
        const int sub = base / kLanes + b;
        const long at = long(table[sub / subs_per_block]) * subs_per_block + sub % subs_per_block;
        k[b] = cache + (at * kv_heads + head) * 2 * half;
        v[b] = k[b] + half;
      }
      for (int b = 0; b < subs; b++)
        for (int i = 0; i < n; i += kQueries)
          scores<P, kQueries>(n - i < kQueries ? n - i : kQueries, q + i, k[b], dim, s + i, b * kLanes, scale);
      for (int i = 0; i < n; i++) {
        const int hi = position[i] + 1 - base, lo = window > 0 ? position[i] + 1 - window - base : 0;
        V top = set1(-INFINITY), x[kGroup / kLanes];
        for (int b = 0; b < subs; b++) {
          x[b] = load(s[i] + b * kLanes);
          if (softcap > 0) {  // cap * tanh(x / cap), tanh(u) = 1 - 2 / (e^2u + 1)
            V e = exp(mul(x[b], set1(2.f / softcap)));
            x[b] = mul(set1(softcap), sub(set1(1.f), div(set1(2.f), add(e, set1(1.f)))));
          }
          int h = hi - b * kLanes, w = lo - b * kLanes;
          if (h < kLanes || w > 0)
            x[b] = keep(x[b], w < 0 ? 0 : (w > kLanes ? kLanes : w), h < 0 ? 0 : (h > kLanes ? kLanes : h), set1(-INFINITY));
          top = max(top, x[b]);
        }
        const float now = hmax(top), next = now > m[i] ? now : m[i];
        if (next == -INFINITY) {  // nothing visible yet
          for (int b = 0; b < subs; b++) P::store(p[i] + b * kLanes, zero());
          continue;
        }
        if (next > m[i] && m[i] != -INFINITY) {
          const float c = std::exp(m[i] - next);
          l[i] *= c;
          for (int d = 0; d < dim; d += 16) store(acc[i] + d, mul(load(acc[i] + d), set1(c)));
        }
        m[i] = next;
        V sum = zero();
        for (int b = 0; b < subs; b++) {
          int h = hi - b * kLanes, w = lo - b * kLanes;
          V e = exp(sub(x[b], set1(next)));
          if (h < kLanes || w > 0)
            e = keep(e, w < 0 ? 0 : (w > kLanes ? kLanes : w), h < 0 ? 0 : (h > kLanes ? kLanes : h), zero());
          P::store(p[i] + b * kLanes, e);
          sum = add(sum, e);
        }
        l[i] += hsum(sum);
      }
      for (int i = 0; i < n; i += kQueries)
        weighs<P, kQueries>(n - i < kQueries ? n - i : kQueries, p + i, v, end - base, dim, acc + i);
    }
  }
};

}  // namespace fb
