#include "cpu/scratch.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>

namespace vlmk {
namespace {

constexpr size_t kLargePage = 2 << 20;
constexpr size_t kLarge = kLargePage / 4;

std::atomic<bool> poisoned{false};

struct Buffer {
  float* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

float* scratch(size_t floats) {
  static thread_local Buffer buffer;
  // Large ones in large pages where the system has them: a second-level cache holds what lies in
  // one piece, of scattered pages only what happens not to meet in its sets (float32 attention of
  // 1,024 tokens on AMX: 1.04x).
  const size_t page = floats * sizeof(float) < kLarge ? 4096 : kLargePage;
  const size_t bytes = (floats * sizeof(float) + page - 1) / page * page;
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.data = static_cast<float*>(std::aligned_alloc(page, bytes));
    buffer.bytes = buffer.data ? bytes : 0;
#ifdef MADV_HUGEPAGE
    if (buffer.data && page == kLargePage) madvise(buffer.data, bytes, MADV_HUGEPAGE);
#endif
  }
  if (buffer.data && poisoned.load(std::memory_order_relaxed)) {
    std::fill_n(buffer.data, buffer.bytes / sizeof(float), std::numeric_limits<float>::quiet_NaN());
  }
  return buffer.data;
}

void throw_out_of_memory(size_t floats) {
  throw std::runtime_error("out of host memory: a thread needs " +
                           std::to_string(floats * sizeof(float) >> 20) + " MiB of scratch");
}

void poison_scratch(bool on) { poisoned.store(on); }

}  // namespace vlmk
