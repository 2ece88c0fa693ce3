#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/embedding/embedding.h"

namespace vlmk {
namespace {

[[noreturn]] void out_of_range(const char* name, int64_t position, int64_t value, const char* what,
                               int64_t rows) {
  throw std::invalid_argument(std::string(name) + "[" + std::to_string(position) + "] is " +
                              std::to_string(value) + ", but " + what + " has " +
                              std::to_string(rows) + " rows; it must be below that");
}

void check(const EmbeddingParams& p) {
  for (int64_t i = p.first; i < p.first + p.rows; ++i) {
    const int64_t index = p.visual_index[i];
    if (index >= 0) {
      if (p.visual_rows >= 0 && index >= p.visual_rows)
        out_of_range("visual_index", i, index, "visual", p.visual_rows);
    } else if (p.ids != nullptr && !p.partial) {
      const int64_t id = p.ids[i];
      if (id < 0)
        throw std::invalid_argument("input_ids[" + std::to_string(i) + "] is " +
                                    std::to_string(id) + "; it must not be negative");
      if (id >= p.vocab_rows) out_of_range("input_ids", i, id, "weight", p.vocab_rows);
    }
  }
}

}  // namespace

void embedding_copy(const EmbeddingParams& p) { VLMK_DISPATCH(embedding_copy, p) }
void embedding_add_rows(const EmbeddingAddParams& p) { VLMK_DISPATCH(embedding_add_rows, p) }
void embedding_copy_inverse(const EmbeddingGatherParams& p) {
  VLMK_DISPATCH(embedding_copy_inverse, p)
}
void embedding_reduce_runs(const EmbeddingReduceParams& p, const int64_t* starts, int64_t runs) {
  VLMK_DISPATCH(embedding_reduce_runs, p, starts, runs)
}

void embedding_forward(const EmbeddingParams& p) {
  check(p);
  embedding_copy(p);
}

void embedding_add(const EmbeddingAddParams& p) {
  for (int64_t i = p.first; i < p.first + p.rows; ++i)
    if (p.visual_index[i] >= p.visual_rows)
      out_of_range("visual_index", i, p.visual_index[i], "visual", p.visual_rows);
  embedding_add_rows(p);
}

void embedding_gather(const EmbeddingGatherParams& p) {
  for (int64_t i = 0; i < p.rows; ++i) {
    const int32_t index = p.visual_index[p.first + i];
    if (index < 0) continue;
    if (index >= p.visual_rows)
      out_of_range("visual_index", p.first + i, index, "visual", p.visual_rows);
    if (p.inverse[index] != -1)
      throw std::invalid_argument(
          "visual_index names row " + std::to_string(index) + " at positions " +
          std::to_string(p.first + p.inverse[index]) + " and " + std::to_string(p.first + i) +
          "; for a gradient each visual row may stand at one position only");
    p.inverse[index] = static_cast<int32_t>(i);
  }
  embedding_copy_inverse(p);
}

// By digits, the last first: as many entries are moved as digits times positions.
int64_t embedding_sort(const EmbeddingSortParams& p) {
  constexpr int kBits = 11;
  constexpr int64_t kDigit = (1 << kBits) - 1;
  int64_t n = 0;
  for (int64_t i = 0; i < p.rows; ++i) {
    const int64_t id = p.ids[p.first + i];
    // Unsigned, so that an id below the range, however far, is above V too.
    const uint64_t key = static_cast<uint64_t>(id) - static_cast<uint64_t>(p.vocab_start);
    if (key >= static_cast<uint64_t>(p.vocab_rows) || p.visual_index[p.first + i] >= 0) continue;
    if (p.padding_idx >= 0 && id == p.padding_idx) continue;
    p.keys[n] = static_cast<int64_t>(key);
    p.order[n++] = i;
  }
  std::vector<int64_t> keys(static_cast<size_t>(n)), order(static_cast<size_t>(n));
  for (int shift = 0; (p.vocab_rows - 1) >> shift > 0; shift += kBits) {
    int64_t places[kDigit + 2] = {};
    for (int64_t i = 0; i < n; ++i) ++places[(p.keys[i] >> shift & kDigit) + 1];
    for (int64_t digit = 0; digit < kDigit; ++digit) places[digit + 1] += places[digit];
    for (int64_t i = 0; i < n; ++i) {
      const auto place = static_cast<size_t>(places[p.keys[i] >> shift & kDigit]++);
      keys[place] = p.keys[i];
      order[place] = p.order[i];
    }
    std::copy(keys.begin(), keys.end(), p.keys);
    std::copy(order.begin(), order.end(), p.order);
  }
  return n;
}

void embedding_reduce(const EmbeddingReduceParams& p) {
  std::vector<int64_t> starts;
  for (int64_t j = 0; j < p.count && p.keys[j] < p.vocab_rows; ++j)
    if (j == 0 || p.keys[j] != p.keys[j - 1]) starts.push_back(j);
  embedding_reduce_runs(p, starts.data(), static_cast<int64_t>(starts.size()));
}

}  // namespace vlmk
