// Visual embedding, compiled once per instruction set (dispatch.h). Rows are moved as bytes, or
// converted where the output has another type; the one arithmetic are sums, in fp32 and in one
// order, so that every instruction set gives the same bits.
#include <omp.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/embedding/embedding.h"
#include "cpu/simd.h"

namespace vlmk::VLMK_ISA {
namespace {

// Non-temporal stores skip the read of the line they overwrite, a third of the traffic, but leave
// the output in memory: used where it would not stay in cache anyway.
constexpr int64_t kStreamFromBytes = 4 << 20;
constexpr int64_t kParallelFromBytes = 64 << 10;
constexpr int64_t kColumns = 512;  // of one task of the reduction: 2 KB of fp32 sums, in L1

template <class To, class From>
void convert(To* to, const From* from, int64_t n) {
  if constexpr (std::is_same<To, From>::value) {
    std::memcpy(to, from, n * sizeof(To));
    return;
  }
  int64_t c = 0;
  for (; c + kWidth <= n; c += kWidth) store(to + c, load(from + c));
  for (; c < n; ++c) from_float(to_float(from[c]), to[c]);
}

template <class To, class From>
void add(To* sum, const From* x, int64_t n) {
  int64_t c = 0;
  for (; c + kWidth <= n; c += kWidth) store(sum + c, load(sum + c) + load(x + c));
  for (; c < n; ++c) from_float(to_float(sum[c]) + to_float(x[c]), sum[c]);
}

void convert_row(void* to, DType to_type, const void* from, DType from_type, int64_t n) {
  with_type(to_type, [&](auto to_zero) {
    with_type(from_type, [&](auto from_zero) {
      convert(static_cast<decltype(to_zero)*>(to), static_cast<const decltype(from_zero)*>(from),
              n);
    });
  });
}

// By non-temporal stores; whole vectors. `next`, if not null, is fetched meanwhile: the hardware's
// prefetcher begins anew with each row of a table. Into the second-level cache, on Zen 4 1.07 to
// 1.13x of the first.
void stream_row(char* to, const char* from, int64_t bytes, const char* next) {
  const auto* in = reinterpret_cast<const float*>(from);
  auto* out = reinterpret_cast<float*>(to);
  const int64_t n = bytes / static_cast<int64_t>(sizeof(float));
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    if (next) {
      for (int j = 0; j < 4 * kWidth; j += 16) {
        __builtin_prefetch(next + (i + j) * static_cast<int64_t>(sizeof(float)), 0, 2);
      }
    }
    const Vec a = load(in + i), b = load(in + i + kWidth);
    const Vec c = load(in + i + 2 * kWidth), d = load(in + i + 3 * kWidth);
    stream(out + i, a);
    stream(out + i + kWidth, b);
    stream(out + i + 2 * kWidth, c);
    stream(out + i + 3 * kWidth, d);
  }
  for (; i < n; i += kWidth) stream(out + i, load(in + i));
}

void write_zeros(char* to, int64_t bytes, bool streamed) {
  if (!streamed) {
    if (bytes) std::memset(to, 0, bytes);
    return;
  }
  auto* out = reinterpret_cast<float*>(to);
  const int64_t n = bytes / static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < n; i += kWidth) stream(out + i, set1(0.f));
}

// Whether `total` bytes of rows at `base` are written by non-temporal stores.
bool streams(const void* base, int64_t total, int64_t row_bytes) {
  return kStreams && total >= kStreamFromBytes && row_bytes % sizeof(Vec) == 0 &&
         reinterpret_cast<uintptr_t>(base) % sizeof(Vec) == 0;
}

struct Row {
  const char* from;  // null: zeros
  DType type;
};

// out[i] = *source(i), or zeros where that is null, for every row; a row that is its own source
// stays. kUneven: most rows may be such.
template <bool kUneven, class Source>
void copy_rows(const Source& source, void* out, DType type, int64_t rows, int64_t hidden) {
  char* const base = static_cast<char*>(out);
  const int64_t row_bytes = hidden * size_of(type), total = rows * row_bytes;
  const bool streamed = streams(base, total, row_bytes);
  const auto elsewhere = [&](int64_t i, const char* here) -> const char* {
    if (i == rows) return nullptr;
    const Row row = source(i);
    return row.type == type && row.from != here ? row.from : nullptr;
  };
  const auto copy = [&](int64_t i) {
    const Row row = source(i);
    char* to = base + i * row_bytes;
    if (kUneven && row.from == to) return;
    if (row.from == nullptr)
      write_zeros(to, row_bytes, streamed);
    else if (row.type != type)
      convert_row(to, type, row.from, row.type, hidden);
    else if (streamed)
      stream_row(to, row.from, row_bytes, elsewhere(i + 1, row.from + row_bytes));
    else
      std::memcpy(to, row.from, row_bytes);
  };
#pragma omp parallel if (total >= kParallelFromBytes)
  {
    if constexpr (kUneven) {
#pragma omp for schedule(dynamic, 32)
      for (int64_t i = 0; i < rows; ++i) copy(i);
    } else {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < rows; ++i) copy(i);
    }
    if (streamed) fence_streams();
  }
}

template <class T>
void reduce_runs(const EmbeddingReduceParams& p, const int64_t* starts, int64_t runs) {
  const auto* grad = static_cast<const T*>(p.grad);
  const DType type = p.dweight_dtype;
  const int64_t tiles = (p.hidden + kColumns - 1) / kColumns;
  const bool parallel = p.count * p.hidden * static_cast<int64_t>(sizeof(T)) >= kParallelFromBytes;
  // Tasks of one tile of one run, few at a time where there are few: a run of a thousand paddings
  // is shared out too.
  const int64_t share = runs * tiles / (4 * omp_get_max_threads());
  const auto at_once = static_cast<int>(share < 1 ? 1 : share < 16 ? share : 16);
#pragma omp parallel for schedule(dynamic, at_once) if (parallel)
  for (int64_t task = 0; task < runs * tiles; ++task) {
    const int64_t first = starts[task / tiles];
    const int64_t column = task % tiles * kColumns;
    const int64_t n = p.hidden - column < kColumns ? p.hidden - column : kColumns;
    const int64_t key = p.keys[first];
    int64_t end = first + 1;
    while (end < p.count && p.keys[end] == key) ++end;
    const int64_t part = rows_of_part(end - first);
    alignas(64) float sum[kColumns] = {}, sum_of_part[kColumns];
    for (int64_t begin = first; begin < end; begin += part) {
      float* to = begin == first ? sum : static_cast<float*>(sum_of_part);
      std::memset(to, 0, n * sizeof(float));
      for (int64_t j = begin; j < end && j < begin + part; ++j)
        add(to, grad + p.order[j] * p.hidden + column, n);
      if (to != sum) add(sum, to, n);
    }
    char* to = static_cast<char*>(p.dweight) + (key * p.hidden + column) * size_of(type);
    with_type(type, [&](auto zero) {
      auto* row = reinterpret_cast<decltype(zero)*>(to);
      if (p.accumulate) add(sum, row, n);
      convert(row, sum, n);
    });
  }
}

// Zeros into the rows of dweight that no run writes. A table is mostly such rows: they are written
// once, by non-temporal stores, where filling it first would write the others twice.
void clear_others(const EmbeddingReduceParams& p, const int64_t* starts, int64_t runs) {
  char* const base = static_cast<char*>(p.dweight);
  const int64_t row_bytes = p.hidden * size_of(p.dweight_dtype);
  const int64_t total = p.vocab_rows * row_bytes;
  const bool streamed = streams(base, total, row_bytes);
  constexpr int64_t kRows = 256;  // of one task
  const int64_t chunks = (p.vocab_rows + kRows - 1) / kRows;
#pragma omp parallel if (total >= kParallelFromBytes)
  {
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t begin = chunk * kRows;
      const int64_t end = begin + kRows < p.vocab_rows ? begin + kRows : p.vocab_rows;
      int64_t low = 0, high = runs;  // -> the first run at or after `begin`
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        p.keys[starts[middle]] < begin ? low = middle + 1 : high = middle;
      }
      for (int64_t row = begin; row < end; ++row) {
        if (low < runs && p.keys[starts[low]] == row)
          ++low;
        else
          write_zeros(base + row * row_bytes, row_bytes, streamed);
      }
    }
    if (streamed) fence_streams();
  }
}

}  // namespace

void embedding_copy(const EmbeddingParams& p) {
  const auto* table = static_cast<const char*>(p.table);
  const auto* visual = static_cast<const char*>(p.visual);
  const int64_t table_bytes = p.hidden * size_of(p.table_dtype);
  const int64_t visual_bytes = p.hidden * size_of(p.visual_dtype);
  const auto source = [&](int64_t i) -> Row {
    const int64_t index = p.visual_index[p.first + i];
    if (index >= 0)
      return {p.visual_rows < 0 ? nullptr : visual + index * visual_bytes, p.visual_dtype};
    if (p.ids == nullptr) return {table + i * table_bytes, p.table_dtype};
    // Unsigned, so that an id below the range, however far, is above V too.
    const uint64_t row =
        static_cast<uint64_t>(p.ids[p.first + i]) - static_cast<uint64_t>(p.vocab_start);
    if (row >= static_cast<uint64_t>(p.vocab_rows)) return {nullptr, p.table_dtype};
    return {table + static_cast<int64_t>(row) * table_bytes, p.table_dtype};
  };
  if (p.table == p.out)
    copy_rows<true>(source, p.out, p.out_dtype, p.rows, p.hidden);
  else
    copy_rows<false>(source, p.out, p.out_dtype, p.rows, p.hidden);
}

void embedding_add_rows(const EmbeddingAddParams& p) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto* const out = static_cast<T*>(p.out);
    const auto* const visual = static_cast<const T*>(p.visual);
    const bool parallel = p.rows * p.hidden * static_cast<int64_t>(sizeof(T)) >= kParallelFromBytes;
#pragma omp parallel for schedule(dynamic, 32) if (parallel)
    for (int64_t i = 0; i < p.rows; ++i) {
      const int64_t index = p.visual_index[p.first + i];
      if (index >= 0) add(out + i * p.hidden, visual + index * p.hidden, p.hidden);
    }
  });
}

void embedding_copy_inverse(const EmbeddingGatherParams& p) {
  const auto* grad = static_cast<const char*>(p.grad);
  const int64_t row_bytes = p.hidden * size_of(p.grad_dtype);
  const auto source = [&](int64_t r) -> Row {
    return {p.inverse[r] < 0 ? nullptr : grad + p.inverse[r] * row_bytes, p.grad_dtype};
  };
  copy_rows<false>(source, p.dvisual, p.dvisual_dtype, p.visual_rows, p.hidden);
}

void embedding_reduce_runs(const EmbeddingReduceParams& p, const int64_t* starts, int64_t runs) {
  if (!p.accumulate) clear_others(p, starts, runs);
  with_type(p.grad_dtype, [&](auto zero) { reduce_runs<decltype(zero)>(p, starts, runs); });
}

}  // namespace vlmk::VLMK_ISA
