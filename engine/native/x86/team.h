// A team of threads that computes a step.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace quire {

// Threads that compute one step together. They synchronize many times in a step, so they spin briefly; between steps they
// sleep.
class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int id = 1; id < size_; ++id) threads_.emplace_back([this, id] { serve(id); });
  }
  ~Team() {
    stopping_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_; }

  void run(const std::function<void(int)>& work) {
    work_ = &work;
    running_.store(size_ - 1);
    generation_.fetch_add(1);
    generation_.notify_all();
    work(0);
    wait([this] { return running_.load(std::memory_order_acquire) == 0; });
  }

  // Barrier of all threads of `run`.
  void barrier() {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      wait([this, phase] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

  // Distributes items one by one, so that other threads take over the share of a thread preempted by another process. Ends
  // with a barrier.
  template <typename Work>
  void each(int items, const Work& work) {
    for (int item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) work(item);
    barrier();
  }

 private:
  template <typename Done>
  static void wait(const Done& done) {
    for (int spins = 0; !done(); ++spins) {
      if (spins < 2000) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

  void serve(int id) {
    uint32_t seen = 0;
    while (true) {
      generation_.wait(seen);
      seen = generation_.load();
      if (stopping_) return;
      (*work_)(id);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<uint32_t> generation_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> phase_{0};
  std::atomic<int> arrived_{0};
  std::atomic<int> next_{0};
};

}  // namespace quire
