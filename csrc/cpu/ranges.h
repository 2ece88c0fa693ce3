// Work divided among threads, with stealing: each takes the items of its own range one by one, then
// what is left of the others'. A thread gets the same share each time, so what it has read or
// written in one kernel, it finds in its own cache in the next, where cores do not share their last
// one (as on EPYC, eight by eight).
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace vlmk {
namespace {  // each instruction set has its own: the linker would keep one of them for all

class Ranges {
 public:
  // count items from 0 on; a thread's number is below `threads`.
  Ranges(int64_t count, int64_t threads)
      : count_(count), threads_(threads), next_(static_cast<size_t>(threads)) {
    for (int64_t i = 0; i < threads; ++i) next_[i].item = begin_of(i);
  }

  // The next item of this thread, or, its own being done, of another; -1 where none is left.
  int64_t take(int64_t thread) {
    for (int64_t i = 0; i < threads_; ++i) {
      const int64_t from = (thread + i) % threads_, end = begin_of(from + 1);
      if (next_[from].item.load(std::memory_order_relaxed) >= end) continue;
      if (const int64_t item = next_[from].item++; item < end) return item;
    }
    return -1;
  }

  // What take() would give this thread now of its own items, or -1.
  int64_t peek(int64_t thread) const {
    const int64_t item = next_[thread].item.load(std::memory_order_relaxed);
    return item < begin_of(thread + 1) ? item : -1;
  }

 private:
  struct alignas(64) Next {
    std::atomic<int64_t> item;
  };

  int64_t begin_of(int64_t thread) const { return thread * count_ / threads_; }

  int64_t count_, threads_;
  std::vector<Next> next_;
};

}  // namespace
}  // namespace vlmk
