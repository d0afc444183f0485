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
  int rows, chunks, samples, vocab;
  const int *tokens, *positions, *slots;  // [rows]
  const int *first, *count, *table;       // [chunks] first row, rows, and where in `blocks` the block table starts
  const int* blocks;                      // all block tables, one after the other
  const int* sample_rows;                 // [samples]
  float* logits;                          // [samples][head.n]
  int* best;                              // [samples] the highest logit's token, the first of equals; -1 without any
};
}

namespace {

struct Task {
  int chunk, row, rows, head, split, splits;
  long partial;  // offset of its first query's partial result, when splits > 1
};

inline V rms(const float* x, long n, float eps) {
  V s = zero();
  for (long i = 0; i < n; i += 16) {
    V v = load(x + i);
    s = fma(v, v, s);
  }
  return set1(1.f / std::sqrt(hsum(s) / float(n) + eps));
}

template <class P>
inline void norm_row(const float* x, const float* w, long n, float eps, typename P::T* out) {
  const V s = rms(x, n, eps);
  for (long i = 0; i < n; i += 16) P::store(out + i, mul(mul(load(x + i), s), load(w + i)));
}

inline void norm_add(const float* x, const float* w, long n, float eps, float* out) {
  const V s = rms(x, n, eps);
  for (long i = 0; i < n; i += 16) store(out + i, fma(mul(load(x + i), s), load(w + i), load(out + i)));
}

struct Engine {
  const int max_rows, max_samples;
  Engine(int rows, int samples) : max_rows(rows), max_samples(samples) {}
  virtual ~Engine() = default;
  virtual void step(const FbStep& s) = 0;
};

struct Job {
  FbStep s;
  int tasks, split;
};

// The parts of a phase: enough of them that a thread without a core costs little, few enough to stream long stretches.
struct Parts {
  long total, size;
  int n;
  Parts(long total, int threads, long least = 1) : total(total) {
    size = (total + threads * 8 - 1) / (threads * 8);
    if (size < least) size = least;
    n = int((total + size - 1) / size);
  }
  long begin(int i) const { return i * size; }
  long end(int i) const { return (i + 1) * size < total ? (i + 1) * size : total; }
};

template <class P>
struct Impl final : Engine {
  typedef typename P::T T;
  struct Work {
    Impl* self;
    void operator()(const Job& job, Walk& walk) const { self->work(job, walk); }
  };
  FbModel m;
  std::vector<FbLayer> layers;
  std::vector<float> x, qkv, tmp, partial;
  std::vector<T> xb, q, att, h;
  std::vector<Task> tasks;
  std::vector<Tile<P>> tiles;
  int threads;
  Pool<Job, Work> pool;  // last: its threads end first

  Impl(const FbModel& model, int threads)
      : Engine(model.max_rows, model.max_samples),
        m(model),
        layers(model.layer, model.layer + model.layers),
        tiles(threads),
        threads(threads),
        pool(threads, 16 + 12 * model.layers, Work{this}) {
    const long rows = m.max_rows + m.max_samples;
    x.resize(rows * m.hidden);
    xb.resize(rows * m.hidden);
    tmp.resize(rows * m.hidden);
    qkv.resize(rows * layers[0].qkv.n);
    q.resize(rows * m.heads * m.head_dim);
    att.resize(rows * m.heads * m.head_dim);
    h.resize(rows * m.ffn);
  }

  template <class F>
  bool rows(Walk& walk, long n, F f) {
    const Parts parts(n, threads, 2);
    return walk.each(parts.n, [&](int p) {
      for (long i = parts.begin(p); i < parts.end(p); i++) f(i);
    });
  }

  template <int E>
  bool panels(Walk& walk, const Linear& l, const T* in, long n, void* out, long ldo) {
    const Parts parts(l.n / kPanel, threads);
    return walk.each(parts.n, [&](int p) { linear<P, E>(l, parts.begin(p), parts.end(p), in, n, out, ldo); });
  }

  void embed(const FbStep& s, long i) {
    const long n = s.tokens[i], k = m.embed.k;
    const T* w = (const T*)m.embed.w + n / kPanel * kPanel * k + (n % kPanel) * P::K;
    for (long d = 0; d < k; d += P::K, w += kPanel * P::K)
      for (int j = 0; j < P::K; j++) x[i * m.hidden + d + j] = P::to(w[j]) * m.embed_scale;
  }

  bool norm(Walk& walk, long n, const float* w) {
    return rows(walk, n, [&](long i) { norm_row<P>(x.data() + i * m.hidden, w, m.hidden, m.eps, xb.data() + i * m.hidden); });
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

  // Rotates row i's q and k, stores q for attention and k, v in the cache.
  void scatter(const FbStep& s, const FbLayer& l, long i) {
    const int D = m.head_dim, HQ = m.heads, HK = m.kv_heads, half = m.rotary / 2;
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
    // The other value of a pair that attention reads before its own row is computed: whatever lies there is not ours.
    const bool alone = P::K == 2 && lane % 2 == 0 && (i + 1 == s.rows || s.slots[i + 1] != s.slots[i] + 1);
    for (int g = 0; g < HK; g++) {
      float *k = row + (HQ + g) * D, *v = row + (HQ + HK + g) * D;
      if (l.k_norm) head_norm(k, l.k_norm);
      rope(k, c, sn);
      T* K = (T*)l.cache + (sub * HK + g) * 2 * kLanes * D;
      T* W = K + long(kLanes) * D;
      for (int d = 0; d < D; d++) {
        K[d / P::K * kLanes * P::K + lane * P::K + d % P::K] = P::from(k[d]);
        W[lane / P::K * D * P::K + d * P::K + lane % P::K] = P::from(v[d]);
        if (alone) W[lane / P::K * D * P::K + d * P::K + 1] = 0;
      }
    }
  }

  // Attention's tasks, the same for every layer. True when some context is longer than one split.
  bool plan(const FbStep& s) {
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
    return at > 0;
  }

  T* attended(const Task& task, int j) {
    const int group = m.heads / m.kv_heads;
    return att.data() + (long(task.row + j / group) * m.heads + task.head * group + j % group) * m.head_dim;
  }

  void attend(const FbStep& s, const FbLayer& l, const Task& task, Tile<P>& tile) {
    const int D = m.head_dim, group = m.heads / m.kv_heads;
    tile.n = 0;
    for (int r = 0; r < task.rows; r++)
      for (int g = 0; g < group; g++) {
        tile.position[tile.n] = s.positions[task.row + r];
        tile.q[tile.n++] = q.data() + (long(task.row + r) * m.heads + task.head * group + g) * D;
      }
    const int last = s.positions[task.row + task.rows - 1] + 1;
    const int to = (task.split + 1) * kSplit < last ? (task.split + 1) * kSplit : last;
    int from = task.split * kSplit;
    if (l.window > 0) {  // whole groups before every query's window are invisible
      const int start = s.positions[task.row] + 1 - l.window;
      if (start > from) from += (start - from) / kGroup * kGroup;
      if (from > to) from = to;
    }
    tile.run((const T*)l.cache, s.blocks + s.table[task.chunk], m.block_size / kLanes, m.kv_heads, task.head, D,
             m.scale, l.window, m.softcap, from, to);
    for (int j = 0; j < tile.n; j++) {
      if (task.splits == 1) {
        const V inv = set1(1.f / tile.l[j]);
        for (int d = 0; d < D; d += 16) P::store(attended(task, j) + d, mul(load(tile.acc[j] + d), inv));
      } else {
        float* o = partial.data() + task.partial + (long(j) * task.splits + task.split) * (D + 2);
        std::memcpy(o, tile.acc[j], sizeof(float) * D);
        o[D] = tile.m[j];
        o[D + 1] = tile.l[j];
      }
    }
  }

  void merge(const Task& task) {
    if (task.splits == 1 || task.split != 0) return;
    const int D = m.head_dim, group = m.heads / m.kv_heads;
    for (int j = 0; j < task.rows * group; j++) {
      const float* from = partial.data() + task.partial + long(j) * task.splits * (D + 2);
      float top = -INFINITY, sum = 0;
      for (int k = 0; k < task.splits; k++) top = std::max(top, from[k * (D + 2) + D]);
      float out[kMaxDim] = {};
      for (int k = 0; k < task.splits; k++) {
        const float* one = from + k * (D + 2);
        if (one[D] == -INFINITY) continue;
        const float c = std::exp(one[D] - top);
        sum += c * one[D + 1];
        for (int d = 0; d < D; d++) out[d] += c * one[d];
      }
      const V inv = set1(1.f / sum);
      for (int d = 0; d < D; d += 16) P::store(attended(task, j) + d, mul(load(out + d), inv));
    }
  }

  // x += linear(in), through the model's norm after the block where it has one (Gemma 2 and 3).
  bool residual(Walk& walk, const Linear& l, const T* in, long n, const float* post) {
    if (!post) return panels<kAdd>(walk, l, in, n, x.data(), m.hidden);
    return panels<kStore>(walk, l, in, n, tmp.data(), m.hidden) && rows(walk, n, [&](long i) {
             norm_add(tmp.data() + i * m.hidden, post, m.hidden, m.eps, x.data() + i * m.hidden);
           });
  }

  bool layer(const Job& job, const FbLayer& l, Walk& walk) {
    const FbStep& s = job.s;
    if (!norm(walk, s.rows, l.attn_norm) || !panels<kStore>(walk, l.qkv, xb.data(), s.rows, qkv.data(), l.qkv.n)) return false;
    if (!rows(walk, s.rows, [&](long i) { scatter(s, l, i); })) return false;
    if (!walk.each(job.tasks, [&](int i) { attend(s, l, tasks[i], tiles[walk.thread]); })) return false;
    if (job.split && !walk.each(job.tasks, [&](int i) { merge(tasks[i]); })) return false;
    if (!residual(walk, l.o, att.data(), s.rows, l.post_attn_norm) || !norm(walk, s.rows, l.ffn_norm)) return false;
    if (!(m.gelu ? panels<kGelu>(walk, l.gate_up, xb.data(), s.rows, h.data(), m.ffn)
                 : panels<kSilu>(walk, l.gate_up, xb.data(), s.rows, h.data(), m.ffn)))
      return false;
    return residual(walk, l.down, h.data(), s.rows, l.post_ffn_norm);
  }

  void work(const Job& job, Walk& walk) {
    const FbStep& s = job.s;
    if (!rows(walk, s.rows, [&](long i) { embed(s, i); })) return;
    for (const FbLayer& l : layers)
      if (!layer(job, l, walk)) return;
    if (!rows(walk, s.samples, [&](long i) {
          norm_row<P>(x.data() + long(s.sample_rows[i]) * m.hidden, m.norm, m.hidden, m.eps, xb.data() + i * m.hidden);
        }))
      return;
    if (!s.samples || !panels<kStore>(walk, m.head, xb.data(), s.samples, s.logits, m.head.n)) return;
    walk.each(s.samples, [&](int i) { finish(s, s.logits + i * m.head.n, s.best + i); });
  }

  void finish(const FbStep& s, float* logits, int* best) const {
    if (m.logit_softcap > 0)
      for (int c = 0; c < s.vocab; c++) logits[c] = m.logit_softcap * std::tanh(logits[c] / m.logit_softcap);
    V top = set1(-INFINITY);
    int c = 0;
    for (; c + 16 <= s.vocab; c += 16) top = max(load(logits + c), top);  // a NaN on the left never wins
    float highest = hmax(top);
    for (; c < s.vocab; c++) highest = logits[c] > highest ? logits[c] : highest;
    if (highest == -INFINITY) return void(*best = -1);  // no finite logit: the model is broken for this row
    for (*best = 0; *best + 1 < s.vocab && logits[*best] != highest;) ++*best;
  }

  void step(const FbStep& s) override {
    const bool split = plan(s);
    pool.run(Job{s, int(tasks.size()), split});
  }
};

}  // namespace

extern "C" {

const char* fb_isa() { return isa(); }

// Null when memory or threads for it are not there: no exception may cross into C.
void* fb_create(const FbModel* m, int threads) try {
  if (m->bf16) return static_cast<Engine*>(new Impl<Bf16>(*m, threads));
  return static_cast<Engine*>(new Impl<F32>(*m, threads));
} catch (...) {
  return nullptr;
}

void fb_destroy(void* engine) { delete static_cast<Engine*>(engine); }

// 0; 1 when the step is larger than the handle was made for; 2 when memory for its plan is not there (nothing ran).
int fb_step(void* engine, const FbStep* s) try {
  Engine* e = static_cast<Engine*>(engine);
  if (s->rows > e->max_rows || s->samples > e->max_samples) return 1;
  e->step(*s);
  return 0;
} catch (...) {
  return 2;
}
}
