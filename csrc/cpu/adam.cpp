// Deals the tensors out to threads; the arithmetic is in adam_kernel.inl.
#include "cpu/adam.h"

#include <omp.h>

#include <algorithm>
#include <vector>

namespace vlmk {

void adam_chunk(const AdamParams& p, const AdamChunk& chunk) {
  VLMK_DISPATCH(adam_chunk, p, chunk)
}

// Each thread takes one equal share of all elements, across tensor borders, cut at cache lines: no
// line is written by two threads, small tensors cost no region of their own, and a thread's memory
// streams stay long.
void adam_step(const AdamParams& p) {
  constexpr int64_t kLine = 16;  // floats
  constexpr int64_t kSmall = 1 << 14;  // floats a thread at least: starting one costs microseconds
  std::vector<int64_t> first_line(p.count + 1, 0);
  for (int64_t i = 0; i < p.count; ++i) {
    first_line[i + 1] = first_line[i] + (p.tensors[i].numel + kLine - 1) / kLine;
  }
  const int64_t lines = first_line[p.count];
  const int64_t useful = std::max<int64_t>(1, lines * kLine / kSmall);
  const int threads = static_cast<int>(std::min<int64_t>(omp_get_max_threads(), useful));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t begin = lines * me / team, end = lines * (me + 1) / team;
    // The tensor that holds line `begin`: the last one that starts at or before it.
    int64_t i = std::upper_bound(first_line.begin(), first_line.end(), begin) -
                first_line.begin() - 1;
    for (; i < p.count && first_line[i] < end; ++i) {
      const int64_t from = std::max(begin - first_line[i], int64_t{0}) * kLine;
      const int64_t to = std::min((end - first_line[i]) * kLine, p.tensors[i].numel);
      if (from < to) adam_chunk(p, {&p.tensors[i], from, to});
    }
  }
}

}  // namespace vlmk
