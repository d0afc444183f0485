// Threads that walk together through the phases of a step. The caller is thread 0; the others sleep between steps.
//
// Rules
// - A phase is a number of tasks, a stretch of them for each thread: in every step the same thread touches the same
//   memory. Who is done takes tasks from the others' stretches, and the phase ends when all its tasks are done, not
//   when all threads have come by: a thread that lost its core for a while delays nobody but the task it holds.
// - All threads name the same phases in the same order; task counts depend on the job only.
// - A thread that finds its step over leaves without touching anything: every counter carries the generation of the step
//   that wrote it. One of an older step counts as zero, so nobody has to reset counters between steps.
// - `run` writes the job while the epoch is odd; workers copy the job and check that the epoch held.
#pragma once
#include <sched.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "vec.h"

namespace fb {

constexpr int kCountBits = 24;
constexpr int kMaxTasks = (1 << kCountBits) - 1;

inline void relax(int spins) {
  if (spins < 3000)
    pause();
  else
    sched_yield();
}

// What one step has counted so far; empty for every later step. Generations only grow (2^40 of them).
struct alignas(64) Counter {
  std::atomic<uint64_t> value{0};  // generation << kCountBits | count

  // Adds `more` unless that made it more than `most`. The count before, or -1 when a later step has written here.
  int add(uint64_t generation, int more, int most) {
    uint64_t v = value.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t owner = v >> kCountBits;
      if (owner > generation) return -1;
      const int count = owner == generation ? int(v & kMaxTasks) : 0;
      if (!more || count + more > most) return count;
      if (value.compare_exchange_weak(v, generation << kCountBits | uint64_t(count + more), std::memory_order_acq_rel,
                                      std::memory_order_acquire))
        return count;
    }
  }
};

// One thread's walk through one step.
class Walk {
 public:
  Walk(Counter* counters, int threads, uint64_t generation, int thread)
      : thread(thread), threads_(threads), generation_(generation), next_(counters) {}

  // Runs f(i) for the tasks of [0, n) that this thread claims; returns when all n are done. `idle(spins)` is called
  // while it waits for others. False when the step has ended meanwhile: the caller returns at once.
  template <class F, class I>
  bool each(int n, F f, I idle) {
    Counter *done = next_, *claimed = next_ + 1;
    next_ += threads_ + 1;
    int mine = 0;
    for (int k = 0; k < threads_; k++) {
      const int owner = thread + k < threads_ ? thread + k : thread + k - threads_;
      const int begin = int(long(n) * owner / threads_), size = int(long(n) * (owner + 1) / threads_) - begin;
      for (;;) {
        const int i = claimed[owner].add(generation_, 1, size);
        if (i < 0) return false;
        if (i >= size) break;
        f(begin + i);
        mine++;
      }
    }
    if (done->add(generation_, mine, n) < 0) return false;
    for (int spins = 0;; spins++) {
      const int count = done->add(generation_, 0, n);
      if (count < 0) return false;
      if (count == n) return true;
      idle(spins);
    }
  }

  template <class F>
  bool each(int n, F f) {
    return each(n, f, relax);
  }

  const int thread;

 private:
  const int threads_;
  const uint64_t generation_;
  Counter* next_;
};

// Job must be trivially copyable. Work is called as work(job, walk).
template <class Job, class Work>
class Pool {
 public:
  Pool(int threads, int phases, Work work) : work_(work), size_(threads), counters_(new Counter[phases * (threads + 1)]) {
    try {
      for (int t = 1; t < threads; t++) threads_.emplace_back([this, t] { loop(t); });
    } catch (...) {  // those that started must end before their handles do, or the process does
      end();
      throw;
    }
  }
  ~Pool() { end(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void run(const Job& job) {
    const uint32_t next = epoch_.load(std::memory_order_relaxed) + 2;
    epoch_.store(next - 1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    job_ = {job, job_.generation + 1};
    epoch_.store(next, std::memory_order_release);
    epoch_.notify_all();
    Walk walk(counters_.get(), size_, job_.generation, 0);
    work_(job, walk);
  }

 private:
  struct Numbered {
    Job job;
    uint64_t generation;
  };

  void end() {
    stop_ = true;
    epoch_.fetch_add(2, std::memory_order_acq_rel);
    epoch_.notify_all();
    for (auto& t : threads_) t.join();
  }

  void loop(int thread) {
    uint32_t seen = 0;
    while (!stop_) {
      uint32_t now;
      for (int spins = 0; (now = epoch_.load(std::memory_order_acquire)) == seen || (now & 1); spins++) {
        if (now & 1 || spins < 4000)
          relax(spins);
        else
          epoch_.wait(now, std::memory_order_acquire);
      }
      seen = now;
      if (stop_) return;
      const Numbered job = job_;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (epoch_.load(std::memory_order_acquire) != now) continue;  // late: the job may be torn
      Walk walk(counters_.get(), size_, job.generation, thread);
      work_(job.job, walk);
    }
  }

  Work work_;
  const int size_;
  std::unique_ptr<Counter[]> counters_;
  Numbered job_{};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::vector<std::thread> threads_;
};

}  // namespace fb
