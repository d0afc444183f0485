// Worker threads for one model. The caller is thread 0; the others sleep between steps.
//
// Rules
// - `run(f)` calls f(thread) on every thread and returns when all have ended. One caller at a time.
// - `barrier()` is for use inside f only, by all threads, the same number of times.
// - Waiting spins briefly (a phase lasts microseconds), then yields: the machine may have other work on our cores.
#pragma once
#include <sched.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "vec.h"

namespace fb {

class Pool {
 public:
  explicit Pool(int threads) : n_(threads < 1 ? 1 : threads) {
    for (int t = 1; t < n_; t++) threads_.emplace_back([this, t] { loop(t); });
  }
  ~Pool() {
    stop_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (auto& t : threads_) t.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return n_; }

  void run(const std::function<void(int)>& f) {
    job_ = &f;
    if (n_ > 1) {
      left_.store(n_ - 1, std::memory_order_relaxed);
      epoch_.fetch_add(1, std::memory_order_release);
      epoch_.notify_all();
    }
    f(0);
    for (int spins = 0; left_.load(std::memory_order_acquire) != 0; spins++) relax(spins);
    job_ = nullptr;
  }

  void barrier() {
    if (n_ == 1) return;
    uint32_t gen = gen_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      gen_.fetch_add(1, std::memory_order_release);
    } else {
      for (int spins = 0; gen_.load(std::memory_order_acquire) == gen; spins++) relax(spins);
    }
  }

  // The next task index of this phase; every barrier resets it to 0.
  int next() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static void relax(int spins) {
    if (spins < 20000)
      pause();
    else
      sched_yield();
  }
  void loop(int t) {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen; spins++) {
        if (spins < 4000)
          pause();
        else
          epoch_.wait(seen, std::memory_order_acquire);
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (stop_) return;
      (*job_)(t);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  int n_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> left_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> gen_{0};
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace fb
