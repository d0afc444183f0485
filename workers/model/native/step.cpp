// One engine step of a decoder-only transformer in one call: tokens in, logits of the sampling rows out.
//
// Rules
// - The caller owns every buffer it passes (weights, cache, tables, logits) and keeps it alive until fb_destroy.
// - One step at a time per handle. Phases are separated by barriers; inside a phase threads write disjoint memory.
// - Rows are the planned tokens, flat, without padding.
// - Results do not depend on the thread count, the batch or the chunking (see linear.h, attention.h).
#include "attention.h"
#include "linear.h"
#include "pool.h"

using namespace fb;

extern "C" {

struct FbLayer {
  const float *attn_norm, *q_norm, *k_norm, *post_attn_norm, *ffn_norm, *post_ffn_norm;  // null where the model has none
  Linear qkv, o, gate_up, down;
  void* cache;
  const float *cos, *sin;  // [positions][rotary/2]
  int window;              // 0 = full attention
  int reserved;
};

struct FbModel {
  int bf16, layers, hidden, heads, kv_heads, head_dim, ffn, rotary, block_size, gelu, max_rows, max_samples;
  float eps, scale, softcap, embed_scale, logit_softcap;
  int reserved;
  const float* norm;
  Linear embed;  // packed like a linear; rows are gathered from it
  Linear head;
  const FbLayer* layer;
};

struct FbStep {
  int rows, chunks, samples, table_width;
  const int *tokens, *positions, *slots;     // [rows]
  const int *first, *count;                  // [chunks] rows of each sequence
  const int* tables;                         // [chunks][table_width]
  const int* sample_rows;                    // [samples]
  float* logits;                             // [samples][head.n]
};
}

namespace {

struct Task {
  int chunk, row, rows, head, split, splits;
  long partial;  // offset of its first query's partial result, when splits > 1
};

inline void rms(const float* x, const float* w, long n, float eps, V* scale) {
  V s = zero();
  for (long i = 0; i < n; i += 16) {
    V v = load(x + i);
    s = fma(v, v, s);
  }
  *scale = set1(1.f / std::sqrt(hsum(s) / float(n) + eps));
  (void)w;
}

template <class P>
inline void norm_row(const float* x, const float* w, long n, float eps, typename P::T* out) {
  V s;
  rms(x, w, n, eps, &s);
  for (long i = 0; i < n; i += 16) P::store(out + i, mul(mul(load(x + i), s), load(w + i)));
}

inline void norm_add(const float* x, const float* w, long n, float eps, float* out) {
  V s;
  rms(x, w, n, eps, &s);
  for (long i = 0; i < n; i += 16) store(out + i, fma(mul(load(x + i), s), load(w + i), load(out + i)));
}

struct Engine {
  virtual ~Engine() = default;
  virtual void step(const FbStep& s) = 0;
};

template <class P>
struct Impl final : Engine {
  typedef typename P::T T;
  FbModel m;
  std::vector<FbLayer> layers;
  Pool pool;
  std::vector<float> x, qkv, tmp, partial;
  std::vector<T> xb, q, att, h;
  std::vector<Task> tasks;
  std::vector<Tile<P>> tiles;

  Impl(const FbModel& model, int threads) : m(model), layers(model.layer, model.layer + model.layers), pool(threads) {
    const long rows = m.max_rows + m.max_samples;
    x.resize(rows * m.hidden);
    xb.resize(rows * m.hidden);
    tmp.resize(rows * round_up(m.hidden));
    qkv.resize(rows * layers[0].qkv.n);
    q.resize(rows * m.heads * m.head_dim);
    att.resize(rows * m.heads * m.head_dim);
    h.resize(rows * m.ffn);
    tiles.resize(pool.size());
  }
  static long round_up(long n) { return (n + kPanel - 1) / kPanel * kPanel; }

  void embed(const FbStep& s, int t) {
    Span r = share(s.rows, t, pool.size());
    for (long i = r.begin; i < r.end; i++) {
      const long n = s.tokens[i], k = m.embed.k;
      const T* w = (const T*)m.embed.w + n / kPanel * kPanel * k + (n % kPanel) * P::K;
      for (long d = 0; d < k; d += P::K, w += kPanel * P::K)
        for (int j = 0; j < P::K; j++) x[i * m.hidden + d + j] = P::to(w[j]) * m.embed_scale;
    }
  }

  // Every thread normalises all of few rows itself (cheaper than a barrier's wait); many rows are shared out.
  void norm(long rows, const float* in, const float* w, int t) {
    const bool all = rows <= 2;
    Span r = all ? Span{0, rows} : share(rows, t, pool.size());
    if (all && t != 0 && pool.size() > 1) r = {0, 0};
    for (long i = r.begin; i < r.end; i++) norm_row<P>(in + i * m.hidden, w, m.hidden, m.eps, xb.data() + i * m.hidden);
    pool.barrier();
  }

  void rope(float* v, const float* c, const float* sn) const {
    const int half = m.rotary / 2;
    for (int i = 0; i < half; i++) {
      const float a = v[i], b = v[i + half];
      v[i] = a * c[i] - b * sn[i];
      v[i + half] = b * c[i] + a * sn[i];
    }
  }

  void head_norm(float* v, const float* w) const {
    float s = 0;
    for (int i = 0; i < m.head_dim; i++) s += v[i] * v[i];
    s = 1.f / std::sqrt(s / float(m.head_dim) + m.eps);
    for (int i = 0; i < m.head_dim; i++) v[i] = v[i] * s * w[i];
  }

  // Rotates q and k of this thread's rows, stores q for attention and k, v in the cache.
  void scatter(const FbStep& s, const FbLayer& l, int t) {
    const int D = m.head_dim, HQ = m.heads, HK = m.kv_heads, half = m.rotary / 2;
    Span r = share(s.rows, t, pool.size());
    for (long i = r.begin; i < r.end; i++) {
      float* row = qkv.data() + i * l.qkv.n;
      const float *c = l.cos + long(s.positions[i]) * half, *sn = l.sin + long(s.positions[i]) * half;
      for (int g = 0; g < HQ; g++) {
        float* v = row + g * D;
        if (l.q_norm) head_norm(v, l.q_norm);
        rope(v, c, sn);
        T* o = q.data() + (i * HQ + g) * D;
        for (int d = 0; d < D; d += 16) P::store(o + d, load(v + d));
      }
      const long sub = s.slots[i] / kLanes;
      const int lane = s.slots[i] % kLanes;
      for (int g = 0; g < HK; g++) {
        float *k = row + (HQ + g) * D, *v = row + (HQ + HK + g) * D;
        if (l.k_norm) head_norm(k, l.k_norm);
        rope(k, c, sn);
        T* K = (T*)l.cache + (sub * HK + g) * 2 * kLanes * D;
        T* W = K + long(kLanes) * D;
        for (int d = 0; d < D; d++) {
          K[d / P::K * kLanes * P::K + lane * P::K + d % P::K] = P::from(k[d]);
          W[lane / P::K * D * P::K + d * P::K + lane % P::K] = P::from(v[d]);
        }
      }
    }
  }

  void plan(const FbStep& s) {
    const int group = m.heads / m.kv_heads;
    const int most = group >= kMaxQueries ? 1 : kMaxQueries / group;
    long at = 0;
    tasks.clear();
    for (int c = 0; c < s.chunks; c++)
      for (int r = 0; r < s.count[c]; r += most) {
        const int n = s.count[c] - r < most ? s.count[c] - r : most;
        const int context = s.positions[s.first[c] + r + n - 1] + 1;
        const int splits = (context + kSplit - 1) / kSplit;
        for (int g = 0; g < m.kv_heads; g++) {
          for (int i = 0; i < splits; i++) tasks.push_back({c, s.first[c] + r, n, g, i, splits, at});
          if (splits > 1) at += long(n) * group * splits * (m.head_dim + 2);
        }
      }
    if (long(partial.size()) < at) partial.resize(at);
  }

  void attend(const FbStep& s, const FbLayer& l, int t) {
    const int D = m.head_dim, group = m.heads / m.kv_heads;
    Tile<P>& tile = tiles[t];
    for (int i = pool.next(); i < int(tasks.size()); i = pool.next()) {
      const Task& task = tasks[i];
      tile.n = 0;
      for (int r = 0; r < task.rows; r++)
        for (int g = 0; g < group; g++) {
          tile.position[tile.n] = s.positions[task.row + r];
          tile.q[tile.n++] = q.data() + (long(task.row + r) * m.heads + task.head * group + g) * D;
        }
      const int last = s.positions[task.row + task.rows - 1] + 1;
      int from = task.split * kSplit, to = from + kSplit < last ? from + kSplit : last;
      if (l.window > 0) {  // whole groups before every query's window are invisible
        int start = s.positions[task.row] + 1 - l.window;
        if (start > from) from += (start - from) / kGroup * kGroup;
        if (from > to) from = to;
      }
      tile.run((const T*)l.cache, s.tables + long(task.chunk) * s.table_width, m.block_size / kLanes, m.kv_heads, task.head, D,
               m.scale, l.window, m.softcap, from, to);
      for (int j = 0; j < tile.n; j++) {
        if (task.splits == 1) {
          T* o = att.data() + (long(task.row + j / group) * m.heads + task.head * group + j % group) * D;
          const V inv = set1(1.f / tile.l[j]);
          for (int d = 0; d < D; d += 16) P::store(o + d, mul(load(tile.acc[j] + d), inv));
        } else {
          float* o = partial.data() + task.partial + (long(j) * task.splits + task.split) * (D + 2);
          std::memcpy(o, tile.acc[j], sizeof(float) * D);
          o[D] = tile.m[j];
          o[D + 1] = tile.l[j];
        }
      }
    }
  }

  void merge(int t) {
    const int D = m.head_dim, group = m.heads / m.kv_heads;
    for (size_t i = t; i < tasks.size(); i += pool.size()) {
      const Task& task = tasks[i];
      if (task.splits == 1 || task.split != 0) continue;
      for (int j = 0; j < task.rows * group; j++) {
        const float* from = partial.data() + task.partial + long(j) * task.splits * (D + 2);
        float top = -INFINITY, sum = 0;
        for (int k = 0; k < task.splits; k++) top = std::max(top, from[k * (D + 2) + D]);
        float out[kMaxDim];
        for (int d = 0; d < D; d++) out[d] = 0;
        for (int k = 0; k < task.splits; k++) {
          const float* one = from + k * (D + 2);
          if (one[D] == -INFINITY) continue;
          const float c = std::exp(one[D] - top);
          sum += c * one[D + 1];
          for (int d = 0; d < D; d++) out[d] += c * one[d];
        }
        T* o = att.data() + (long(task.row + j / group) * m.heads + task.head * group + j % group) * D;
        const V inv = set1(1.f / sum);
        for (int d = 0; d < D; d += 16) P::store(o + d, mul(load(out + d), inv));
      }
    }
  }

  // x += linear(in), through the model's norm after the block where it has one (Gemma 2 and 3).
  void residual(const Linear& l, const T* in, long rows, const float* post, int t) {
    Span p = share(l.n / kPanel, t, pool.size());
    if (!post) {
      linear<P, kAdd>(l, p.begin, p.end, in, rows, x.data(), m.hidden);
      pool.barrier();
      return;
    }
    linear<P, kStore>(l, p.begin, p.end, in, rows, tmp.data(), m.hidden);
    pool.barrier();
    Span r = share(rows, t, pool.size());
    for (long i = r.begin; i < r.end; i++)
      norm_add(tmp.data() + i * m.hidden, post, m.hidden, m.eps, x.data() + i * m.hidden);
    pool.barrier();
  }

  void work(const FbStep& s, int t) {
    const int n = pool.size();
    embed(s, t);
    pool.barrier();
    bool split = false;
    for (const Task& task : tasks) split |= task.splits > 1;
    for (const FbLayer& l : layers) {
      norm(s.rows, x.data(), l.attn_norm, t);
      Span p = share(l.qkv.n / kPanel, t, n);
      linear<P, kStore>(l.qkv, p.begin, p.end, xb.data(), s.rows, qkv.data(), l.qkv.n);
      pool.barrier();
      scatter(s, l, t);
      pool.barrier();
      attend(s, l, t);
      pool.barrier();
      if (split) {
        merge(t);
        pool.barrier();
      }
      residual(l.o, att.data(), s.rows, l.post_attn_norm, t);
      norm(s.rows, x.data(), l.ffn_norm, t);
      p = share(l.gate_up.n / kPanel, t, n);
      if (m.gelu)
        linear<P, kGelu>(l.gate_up, p.begin, p.end, xb.data(), s.rows, h.data(), m.ffn);
      else
        linear<P, kSilu>(l.gate_up, p.begin, p.end, xb.data(), s.rows, h.data(), m.ffn);
      pool.barrier();
      residual(l.down, h.data(), s.rows, l.post_ffn_norm, t);
    }
    Span r = share(s.samples, t, n);
    for (long i = r.begin; i < r.end; i++)
      norm_row<P>(x.data() + long(s.sample_rows[i]) * m.hidden, m.norm, m.hidden, m.eps, xb.data() + i * m.hidden);
    pool.barrier();
    if (s.samples) {
      Span p = share(m.head.n / kPanel, t, n);
      linear<P, kStore>(m.head, p.begin, p.end, xb.data(), s.samples, s.logits, m.head.n);
      if (m.logit_softcap > 0)
        for (long i = 0; i < s.samples; i++)
          for (long c = p.begin * kPanel; c < p.end * kPanel; c++)
            s.logits[i * m.head.n + c] = m.logit_softcap * std::tanh(s.logits[i * m.head.n + c] / m.logit_softcap);
    }
  }

  void step(const FbStep& s) override {
    plan(s);
    pool.run([&](int t) { work(s, t); });
  }
};

}  // namespace

extern "C" {

const char* fb_isa() { return isa(); }

void* fb_create(const FbModel* m, int threads) {
  if (m->bf16) return static_cast<Engine*>(new Impl<Bf16>(*m, threads));
  return static_cast<Engine*>(new Impl<F32>(*m, threads));
}

void fb_destroy(void* engine) { delete static_cast<Engine*>(engine); }

// 0, or 1 when the step is larger than the handle was made for.
int fb_step(void* engine, const FbStep* s) {
  static_cast<Engine*>(engine)->step(*s);
  return 0;
}
}
