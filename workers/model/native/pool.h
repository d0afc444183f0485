// Threads that walk together through the phases of a step. The caller is thread 0; the others sleep between steps.
//
// Rules
// - A phase is a number of tasks; threads claim them one by one, and the phase ends when all its tasks are done, not
//   when all threads have come by: a thread that lost its core for a while delays nobody but the task it holds.
// - All threads name the same phases in the same order; task counts depend on the job only.
// - A thread that finds its step over leaves without touching anything: every cell carries its step's generation.
// - `run` writes the job and the cells while the epoch is odd; workers copy the job and check that the epoch held.
#pragma once
#include <sched.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "vec.h"

namespace fb {

struct alignas(64) Cell {
  std::atomic<uint64_t> claimed{0}, done{0};  // generation << 32 | count
};

inline void relax(int spins) {
  if (spins < 3000)
    pause();
  else
    sched_yield();
}

// One thread's walk through one step.
class Walk {
 public:
  Walk(Cell* cells, uint32_t generation, int thread) : cells_(cells), tag_(uint64_t(generation) << 32), thread(thread) {}

  // Runs f(i) for the tasks of [0, n) that this thread claims; returns when all n are done.
  // False when the step has ended meanwhile: the caller returns at once.
  template <class F>
  bool each(int n, F f) {
    Cell& cell = cells_[phase_++];
    for (;;) {
      uint64_t v = cell.claimed.load(std::memory_order_acquire);
      do {
        if ((v ^ tag_) >> 32) return false;
        if (int(uint32_t(v)) >= n) break;
      } while (!cell.claimed.compare_exchange_weak(v, v + 1, std::memory_order_acq_rel, std::memory_order_acquire));
      if (int(uint32_t(v)) >= n) break;
      f(int(uint32_t(v)));
      cell.done.fetch_add(1, std::memory_order_acq_rel);
    }
    for (int spins = 0;; spins++) {
      const uint64_t v = cell.done.load(std::memory_order_acquire);
      if ((v ^ tag_) >> 32) return false;
      if (int(uint32_t(v)) == n) return true;
      relax(spins);
    }
  }

 private:
  Cell* cells_;
  uint64_t tag_;
  int phase_ = 0;

 public:
  const int thread;
};

// Job must be trivially copyable. Work is called as work(job, walk).
template <class Job, class Work>
class Pool {
 public:
  Pool(int threads, int phases, Work work) : work_(work), phases_(phases), cells_(new Cell[phases]) {
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

  int size() const { return int(threads_.size()) + 1; }

  void run(const Job& job) {
    const uint32_t next = epoch_.load(std::memory_order_relaxed) + 2;
    epoch_.store(next - 1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    job_ = job;
    for (int i = 0; i < phases_; i++) {
      cells_[i].claimed.store(uint64_t(next) << 32, std::memory_order_relaxed);
      cells_[i].done.store(uint64_t(next) << 32, std::memory_order_relaxed);
    }
    epoch_.store(next, std::memory_order_release);
    epoch_.notify_all();
    Walk walk(cells_.get(), next, 0);
    work_(job, walk);
  }

 private:
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
      const Job job = job_;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (epoch_.load(std::memory_order_acquire) != now) continue;  // late: the job may be torn
      Walk walk(cells_.get(), now, thread);
      work_(job, walk);
    }
  }

  Work work_;
  const int phases_;
  std::unique_ptr<Cell[]> cells_;
  Job job_{};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::vector<std::thread> threads_;
};

}  // namespace fb
