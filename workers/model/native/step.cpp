// One engine step of a decoder-only transformer in one call: tokens in, logits of the sampling rows out.
//
// Rules
// - The caller owns every buffer it passes (weights, cache, tables, logits) and keeps it alive until fb_destroy.
// - One step at a time per handle. Phases are separated by barriers; inside a phase threads write disjoint memory.
// - Rows are the planned tokens, flat, without padding.
// - Results do not depend on the thread count, the batch or the chunking (see linear.h, attention.h).
// - Between tasks a thread writes to its own memory only: one that is late may still do so when the step is over, and
//   what it made of memory that has changed meanwhile is thrown away.
// - No chunk reads what another chunk of the same step writes.
#include "abi.h"
#include "adapted.h"
#include "attention.h"
#include "memory.h"
#include "plan.h"
#include "pool.h"
#include "rows.h"

#include <functional>

using namespace fb;

namespace {

constexpr long kFew = 8;           // rows that every thread norms for itself: cheaper than to wait for each other
constexpr long kIdle = 384 << 10;  // bytes of the next linear that a thread fetches while it waits

struct Engine {
  const int max_rows, max_samples;
  Engine(int rows, int samples) : max_rows(rows), max_samples(samples) {}
  virtual ~Engine() = default;
  virtual void step(const FbStep& s) = 0;
};

struct Job {
  FbStep s;
  Counts every, last;  // of all layers but the last, and of that
  bool ending;         // the last layer goes on with the rows that sample only
  LoraWork lora;
};

// What one thread has for itself.
template <class P, class C>
struct Local {
  Tile<P, C> tile;
  alignas(64) typename P::T q[kMaxDim];
  Array<typename P::T> rows, panel;
  FixedRows fixed;
  const char *ahead = nullptr, *ahead_end = nullptr;  // weights that it will read next
  Draw draw;
  // `counted`: rows that are multiplied as integers at a time.
  Local(long hidden, long deepest, long counted, int vocab)
      : rows(kFew * hidden), panel(kPanel * deepest), fixed(counted, deepest), draw(vocab) {}
};

template <class P, class C>
struct Impl final : Engine {
  typedef typename P::T T;
  struct Work {
    Impl* self;
    void operator()(const Job& job, Walk& walk) const { self->work(job, walk); }
  };
  FbModel m;
  std::vector<FbLayer> layers;
  Array<float> x, qkv, tmp;
  Array<T> xb, q, att, h;
  std::vector<float> partial;
  Plan every, last;
  Adapted<P> lora;
  std::vector<int> wanted;  // rows that sample: ours, since a late thread may still look at them
  std::vector<Local<P, C>> local;
  int threads;
  Pool<Job, Work> pool;  // last: its threads end first

  Impl(const FbModel& model, int threads)
      : Engine(model.max_rows, model.max_samples),
        m(model),
        layers(model.layer, model.layer + model.layers),
        x(long(m.max_rows) * m.hidden),
        qkv(m.max_rows * layers[0].qkv.n),
        tmp(long(m.max_rows) * m.hidden),
        xb(long(std::max(m.max_rows, m.max_samples)) * m.hidden),
        q(long(m.max_rows) * m.heads * m.head_dim),
        att(long(m.max_rows) * m.heads * m.head_dim),
        h(long(m.max_rows) * m.ffn),
        lora(m.max_rows, m.low_width, m.layers),
        wanted(m.max_samples),
        local(locals(threads, m)),
        threads(threads),
        pool(threads, 16 + 16 * model.layers, Work{this}) {}

  static std::vector<Local<P, C>> locals(int threads, const FbModel& m) {
    const long deepest = std::max({m.hidden, m.ffn, m.heads * m.head_dim});
    bool integers = m.head.integers();
    for (const FbLayer* l = m.layer; l < m.layer + m.layers; l++)
      integers |= l->qkv.integers() || l->o.integers() || l->gate_up.integers() || l->down.integers();
    const long counted = integers && P::K == 2 ? std::min(kBlock, long(std::max(m.max_rows, m.max_samples))) : 0;
    std::vector<Local<P, C>> made;
    for (int i = 0; i < threads; i++) made.emplace_back(m.hidden, deepest, counted, int(m.head.n));
    return made;
  }

  // f(i) for every row, in stretches.
  template <class F>
  bool rows(Walk& walk, long n, F f) {
    const long parts = std::min(n, threads * 8L);
    return walk.each(int(parts), [&](long p) {
      for (long i = n * p / parts; i < n * (p + 1) / parts; i++) f(i);
    });
  }

  // `next`: the linear that comes next, for as many rows; threads that wait fetch what they will read of it.
  template <int E>
  bool panels(Walk& walk, const Linear& l, const T* in, long n, void* out, long ldo, const Linear* next,
              const Low<P>* low = nullptr) {
    const long unit = E == kSilu || E == kGelu ? long(sizeof(T)) : 4;
    const Grid grid(n, l.n, threads);
    Local<P, C>& mine = local[walk.thread];
    mine.ahead = mine.ahead_end = nullptr;
    mine.fixed.begin();
    if (next) {
      const Grid then(n, next->n, threads);
      mine.ahead = (const char*)next->panel(then.panel(long(then.tasks()) * walk.thread / threads % then.parts));
      mine.ahead_end = mine.ahead + std::min(kIdle, (next->panel(next->n / kPanel) - next->panel(0)) / threads);
    }
    return walk.each(
        grid.tasks(),
        [&](int i) {
          const long block = i / grid.parts, part = i % grid.parts, r = grid.row(block), count = grid.row(block + 1) - r;
          const T* x = in + r * l.k;
          Fixed fixed;
          if constexpr (P::K == 2)
            if (l.integers()) fixed = mine.fixed.of(x, count, l.k, block);
          linear<P, E>(l, grid.panel(part), grid.panel(part + 1), x, fixed, count, (char*)out + r * ldo * unit, ldo,
                       mine.panel.data(), low, r);
        },
        Fetch{mine});
  }

  // The linear `site` of a layer with what adapters add to it.
  template <int E>
  bool adapted(Walk& walk, const Job& job, Site site, const FbLayer& layer, const Linear& l, const T* in, long n, void* out,
               long ldo, const Linear* next) {
    if (!job.lora.groups[site]) return panels<E>(walk, l, in, n, out, ldo, next);
    const int group = m.head_dim / kLanes;
    const Low<P> low = lora.of(job.s, &layer - layers.data(), site, m.heads * group, (m.heads + m.kv_heads) * group);
    return lora.shrink(walk, job.lora, low, in, l.k) && panels<E>(walk, l, in, n, out, ldo, next, &low);
  }

  struct Fetch {
    Local<P, C>& mine;
    void operator()(int spins) const {
      if (mine.ahead >= mine.ahead_end) return relax(spins);
      for (int i = 0; i < 4; i++) prefetch_l2(mine.ahead + 64 * i);
      mine.ahead += 256;
    }
  };

  void embed(const FbStep& s, long i, T* unpacked) {
    float* row = x.data() + i * m.hidden;
    column<P>(m.embed, s.tokens[i], row, unpacked);
    for (long d = 0; m.embed_scale != 1 && d < m.hidden; d++) row[d] *= m.embed_scale;
  }

  // The normed rows row(0) … row(n - 1) of x; null when the step has ended meanwhile.
  template <class R>
  const T* normed(Walk& walk, long n, const float* w, R row) {
    T* out = n <= kFew ? local[walk.thread].rows.data() : xb.data();
    const auto one = [&](long i) { norm_row<P>(x.data() + row(i) * m.hidden, w, m.hidden, m.eps, out + i * m.hidden); };
    if (n > kFew) return rows(walk, n, one) ? out : nullptr;
    for (long i = 0; i < n; i++) one(i);
    return out;
  }

  // Row i's head g of q and k together, normed where the model does that, and rotated.
  template <class R = P>
  void rotated(const FbStep& s, const FbLayer& l, long i, int g, typename R::T* out) const {
    const int D = m.head_dim, half = m.rotary / 2;
    const long at = long(s.positions[i]) * half;
    const float *in = qkv.data() + i * l.qkv.n + long(g) * D, *w = g < m.heads ? l.q_norm : l.k_norm;
    alignas(64) float v[kMaxDim];
    if (w) {
      norm_row<F32>(in, w, D, m.eps, v);
      in = v;
    }
    rotate<R>(in, D, half, l.cos + at, l.sin + at, out);
  }

  // Row i's key head g, rotated, and its values, into the cache. `alone`: the next token's are not written in this step.
  void remember(const FbStep& s, const FbLayer& l, long i, int g, bool alone) const {
    const int D = m.head_dim, slot = s.slots[long(l.table) * s.rows + i];
    const long sub = slot / kLanes;
    alignas(64) typename C::Key::T key[kMaxDim];
    rotated<typename C::Key>(s, l, i, m.heads + g, key);
    C::keep((typename C::S*)l.cache + (sub * m.kv_heads + g) * C::elements(D), slot % kLanes, D, key,
            qkv.data() + i * l.qkv.n + long(m.heads + m.kv_heads + g) * D, alone);
  }

  void scatter(const FbStep& s, const FbLayer& l, long i) {
    for (int g = 0; g < m.heads; g++) rotated(s, l, i, g, q.data() + (i * m.heads + g) * m.head_dim);
    const int* slots = s.slots + long(l.table) * s.rows;
    const bool alone = i + 1 == s.rows || slots[i + 1] != slots[i] + 1;
    for (int g = 0; g < m.kv_heads; g++) remember(s, l, i, g, alone);
  }

  // f(h, i, row, query head) for a task's queries, the i-th of its h-th KV head.
  template <class F>
  void each_query(const Task& task, F f) const {
    const int group = m.heads / m.kv_heads;
    for (int h = 0; h < task.heads; h++)
      for (int r = 0; r < task.rows; r++)
        for (int g = 0; g < group; g++) f(h, r * group + g, task.row + r, (task.head + h) * group + g);
  }

  // Where a task's keys are, and which of them it reads: [from, to).
  Context<C> context(const FbStep& s, const FbLayer& l, const Task& task, int& from, int& to) const {
    to = std::min((task.split + 1) * kSplit, s.positions[task.row + task.rows - 1] + 1);
    from = task.split * kSplit;
    if (l.window > 0) {  // whole groups before every query's window are invisible
      const int start = s.positions[task.row] + 1 - l.window;
      if (start > from) from += (start - from) / kGroup * kGroup;
      if (from > to) from = to;
    }
    return {(const typename C::S*)l.cache, s.blocks + s.table[l.table * s.chunks + task.chunk],
            m.block_size / kLanes, m.kv_heads, task.head, m.head_dim};
  }

  void attend(const FbStep& s, const FbLayer& l, const std::vector<Task>& tasks, int index, Local<P, C>& mine) {
    const Task& task = tasks[index];
    const int D = m.head_dim;
    Tile<P, C>& tile = mine.tile;
    int from, to, next_from = 0, next_to = 0;
    const Context<C> c = context(s, l, task, from, to);
    Context<C> next = c;
    if (index + 1 < int(tasks.size())) next = context(s, l, tasks[index + 1], next_from, next_to);
    tile.heads = task.heads;
    tile.n = task.rows * (m.heads / m.kv_heads);
    each_query(task, [&](int h, int i, int row, int head) {
      const T* one = q.data() + (long(row) * m.heads + head) * D;
      if (task.own) rotated(s, l, row, head, mine.q), one = mine.q;
      tile.put(h, i, D, one, m.softcap > 0 ? m.scale : m.scale * kLog2e);
      tile.position[h * tile.n + i] = s.positions[row];
    });
    if (task.own && task.split + 1 == task.splits)
      for (int g = 0; g < task.heads; g++) remember(s, l, task.row, task.head + g, true);
    tile.run(c, l.window, m.softcap, from, to, next, next_from, next_to);
    each_query(task, [&](int h, int i, int row, int head) {
      const int j = h * tile.n + i;
      const float* acc = tile.acc + long(j) * D;
      const float sum = hsum(load(tile.l[j]));
      if (task.splits == 1) {
        const V inv = set1(1.f / sum);
        T* out = att.data() + (long(row) * m.heads + head) * D;
        for (int d = 0; d < D; d += 16) P::store(out + d, mul(load(acc + d), inv));
      } else {
        float* o = partial.data() + task.partial + (long(j) * task.splits + task.split) * (D + 2);
        std::memcpy(o, acc, sizeof(float) * D);
        o[D] = tile.m[j];
        o[D + 1] = sum;
      }
    });
  }

  void merge(const Task& task) {
    if (task.splits == 1 || task.split != 0) return;
    const int D = m.head_dim, stride = D + 2;
    float* from = partial.data() + task.partial;
    each_query(task, [&](int, int, int row, int head) {
      float top = -INFINITY, sum = 0;
      for (int k = 0; k < task.splits; k++) top = std::max(top, from[k * stride + D]);
      for (int k = 0; k < task.splits; k++) {
        float& weight = from[k * stride + D];  // in place of what its numbers are relative to
        weight = weight == -INFINITY ? 0 : std::exp2(weight - top);
        sum += weight * from[k * stride + D + 1];
      }
      const V inv = set1(1.f / sum);
      T* to = att.data() + (long(row) * m.heads + head) * D;
      for (int d = 0; d < D; d += 16) {
        V all = zero();
        for (int k = 0; k < task.splits; k++) all = fma(set1(from[k * stride + D]), load(from + k * stride + d), all);
        P::store(to + d, mul(all, inv));
      }
      from += task.splits * stride;
    });
  }

  // x += linear(in) for so many rows, through the model's norm after the block where it has one (Gemma 2 and 3).
  bool residual(Walk& walk, const Job& job, Site site, const FbLayer& layer, const Linear& l, const T* in, long n,
                const float* post, const Linear* next) {
    if (!post) return adapted<kAdd>(walk, job, site, layer, l, in, n, x.data(), m.hidden, next);
    return adapted<kStore>(walk, job, site, layer, l, in, n, tmp.data(), m.hidden, next) && rows(walk, n, [&](long i) {
             norm_add(tmp.data() + i * m.hidden, post, m.hidden, m.eps, x.data() + i * m.hidden);
           });
  }

  bool attention(Walk& walk, const Job& job, const FbLayer& l, const Plan& plan, const Counts& counts) {
    const FbStep& s = job.s;
    Local<P, C>& mine = local[walk.thread];
    return (!counts.spread || rows(walk, counts.spread, [&](long i) { scatter(s, l, plan.spread[i]); })) &&
           walk.each(counts.tasks, [&](int i) { attend(s, l, plan.tasks, i, mine); }, Fetch{mine}) &&
           (!counts.split || walk.each(counts.tasks, [&](int i) { merge(plan.tasks[i]); }));
  }

  // Rows that sample move to the front: each goes to where no row is that is still wanted.
  bool gather(Walk& walk, long n) {
    const long width = long(m.heads) * m.head_dim;
    return walk.each(1, [&](int) {
      for (long i = 0; i < n; i++) {
        std::memmove(x.data() + i * m.hidden, x.data() + wanted[i] * m.hidden, sizeof(float) * m.hidden);
        std::memmove(att.data() + i * width, att.data() + wanted[i] * width, sizeof(T) * width);
      }
    });
  }

  bool layer(const Job& job, const FbLayer& l, const Linear* next, Walk& walk) {
    const FbStep& s = job.s;
    const bool ending = job.ending && &l == &layers.back();
    const long n = ending ? s.samples : s.rows;
    const auto all = [](long i) { return i; };
    const T* in = normed(walk, s.rows, l.attn_norm, all);
    if (!in || !adapted<kStore>(walk, job, kQkv, l, l.qkv, in, s.rows, qkv.data(), l.qkv.n, &l.o)) return false;
    if (!attention(walk, job, l, ending ? last : every, ending ? job.last : job.every)) return false;
    if (!n) return true;
    if (ending && !gather(walk, n)) return false;
    if (!residual(walk, job, kOutput, l, l.o, att.data(), n, l.post_attn_norm, &l.gate_up)) return false;
    in = normed(walk, n, l.ffn_norm, all);
    if (!in || !(m.gelu ? adapted<kGelu>(walk, job, kGateUp, l, l.gate_up, in, n, h.data(), m.ffn, &l.down)
                        : adapted<kSilu>(walk, job, kGateUp, l, l.gate_up, in, n, h.data(), m.ffn, &l.down)))
      return false;
    return residual(walk, job, kDown, l, l.down, h.data(), n, l.post_ffn_norm, next);
  }

  void work(const Job& job, Walk& walk) {
    const FbStep& s = job.s;
    T* unpacked = local[walk.thread].panel.data();
    if (!rows(walk, s.rows, [&](long i) { embed(s, i, unpacked); })) return;
    for (size_t i = 0; i < layers.size(); i++)
      if (!layer(job, layers[i], i + 1 < layers.size() ? &layers[i + 1].qkv : &m.head, walk)) return;
    if (!s.samples) return;
    const T* in = normed(walk, s.samples, m.norm, [&](long i) { return job.ending ? i : long(wanted[i]); });
    if (!in || !panels<kStore>(walk, m.head, in, s.samples, s.logits, m.head.n, nullptr)) return;
    Draw& draw = local[walk.thread].draw;
    walk.each(s.samples, [&](int i) { finish(s, s.logits + i * m.head.n, i, draw); });
  }

  void finish(const FbStep& s, float* logits, int i, Draw& draw) const {
    if (m.logit_softcap > 0)
      for (int c = 0; c < s.vocab; c++) logits[c] = m.logit_softcap * std::tanh(logits[c] / m.logit_softcap);
    const bool drawn = s.choices && s.choices[i].temperature > 0;
    s.best[i] = drawn ? draw(logits, s.vocab, s.choices[i]) : highest(logits, s.vocab);
  }

  void step(const FbStep& s) override {
    std::copy(s.sample_rows, s.sample_rows + s.samples, wanted.begin());
    const bool ascending = std::adjacent_find(wanted.begin(), wanted.begin() + s.samples, std::greater_equal<int>()) ==
                           wanted.begin() + s.samples;
    Job job{s, every.lay(m, s, threads, nullptr, s.rows), {}, s.samples < s.rows && ascending && !s.loras, lora.enlist(s)};
    if (job.ending) job.last = last.lay(m, s, threads, wanted.data(), s.samples);
    const long floats = std::max(every.partial, job.ending ? last.partial : 0);
    if (long(partial.size()) < floats) partial.resize(floats);
    pool.run(job);
  }
};

template <class P>
Engine* make(const FbModel& m, int threads) {
  if (m.kv == 1) return new Impl<P, Int8>(m, threads);
  if (m.kv == 2) return new Impl<P, Fp8>(m, threads);
  return new Impl<P, AsComputed<P>>(m, threads);
}

}  // namespace

extern "C" {

const char* fb_isa() { return isa(); }

// Null when memory or threads for it are not there: no exception may cross into C.
void* fb_create(const FbModel* m, int threads) try {
  return m->bf16 ? make<Bf16>(*m, threads) : make<F32>(*m, threads);
} catch (...) {
  return nullptr;
}

void fb_destroy(void* engine) { delete static_cast<Engine*>(engine); }

long fb_fold(const void* dense, long panels, long k, void* out, long* starts) { return fold(dense, panels, k, out, starts); }

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
