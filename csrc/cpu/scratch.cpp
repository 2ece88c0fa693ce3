#include "cpu/scratch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>

namespace vlmk {
namespace {

std::atomic<bool> poisoned{false};

struct Buffer {
  float* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

float* scratch(size_t floats) {
  static thread_local Buffer buffer;
  const size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.data = static_cast<float*>(std::aligned_alloc(4096, bytes));
    buffer.bytes = buffer.data ? bytes : 0;
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
