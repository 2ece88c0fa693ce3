// Visual embedding, compiled once per instruction set (dispatch.h). Rows are moved as bytes, or
// converted where the output has another type; the one arithmetic is the sum of dweight, in fp32
// and in one order, so that every instruction set gives the same bits.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "cpu/embedding/embedding.h"
#include "cpu/half.h"

namespace vlmk::VLMK_ISA {
namespace {

// Streaming stores skip the read of the line they overwrite, a third of the traffic, but leave the
// output in memory: used where it would not stay in cache anyway.
constexpr int64_t kStreamFromBytes = 4 << 20;
constexpr int64_t kParallelFromBytes = 64 << 10;
constexpr int64_t kColumns = 512;  // of one task of the reduction: 2 KB of fp32 sums, in L1

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
inline void stream_row(char* to, const char* from, int64_t bytes) {
  int64_t i = 0;
  for (; i + 256 <= bytes; i += 256) {
    const __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + 64),
                  c = _mm512_loadu_si512(from + i + 128), d = _mm512_loadu_si512(from + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 192), d);
  }
  for (; i < bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
}
inline void stream_zeros(char* to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_setzero_si512());
}
inline void stream_fence() { _mm_sfence(); }
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
inline void stream_row(char* to, const char* from, int64_t bytes) {
  int64_t i = 0;
  for (; i + 128 <= bytes; i += 128) {
    const auto* in = reinterpret_cast<const __m256i*>(from + i);
    auto* out = reinterpret_cast<__m256i*>(to + i);
    const __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1),
                  c = _mm256_loadu_si256(in + 2), d = _mm256_loadu_si256(in + 3);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
    _mm256_stream_si256(out + 2, c);
    _mm256_stream_si256(out + 3, d);
  }
  for (; i < bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
}
inline void stream_zeros(char* to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_setzero_si256());
}
inline void stream_fence() { _mm_sfence(); }
#else
constexpr int64_t kVectorBytes = 0;  // no streaming stores
inline void stream_row(char*, const char*, int64_t) {}
inline void stream_zeros(char*, int64_t) {}
inline void stream_fence() {}
#endif

inline int64_t size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

template <class T>
inline void widen(float* to, const T* from, int64_t n) {
  for (int64_t c = 0; c < n; ++c) to[c] = to_float(from[c]);
}
template <class T>
inline void narrow(T* to, const float* from, int64_t n) {
  for (int64_t c = 0; c < n; ++c) from_float(from[c], to[c]);
}
#if defined(__F16C__)
inline void widen(float* to, const Float16* from, int64_t n) {
  int64_t c = 0;
  for (; c + 8 <= n; c += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + c));
    _mm256_storeu_ps(to + c, _mm256_cvtph_ps(half));
  }
  for (; c < n; ++c) to[c] = to_float(from[c]);
}
inline void narrow(Float16* to, const float* from, int64_t n) {
  int64_t c = 0;
  for (; c + 8 <= n; c += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + c),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + c), _MM_FROUND_TO_NEAREST_INT));
  for (; c < n; ++c) from_float(from[c], to[c]);
}
#endif

inline void widen(float* to, const void* from, DType type, int64_t n) {
  if (type == DType::kFloat32)
    std::memcpy(to, from, n * sizeof(float));
  else if (type == DType::kBFloat16)
    widen(to, static_cast<const BFloat16*>(from), n);
  else
    widen(to, static_cast<const Float16*>(from), n);
}
inline void narrow(void* to, const float* from, DType type, int64_t n) {
  if (type == DType::kFloat32)
    std::memcpy(to, from, n * sizeof(float));
  else if (type == DType::kBFloat16)
    narrow(static_cast<BFloat16*>(to), from, n);
  else
    narrow(static_cast<Float16*>(to), from, n);
}

void convert_row(char* to, DType to_type, const char* from, DType from_type, int64_t hidden) {
  alignas(64) float values[kColumns];
  for (int64_t column = 0; column < hidden; column += kColumns) {
    const int64_t n = hidden - column < kColumns ? hidden - column : kColumns;
    widen(values, from + column * size_of(from_type), from_type, n);
    narrow(to + column * size_of(to_type), values, to_type, n);
  }
}

// Whether `total` bytes of rows at `base` are written past the cache.
bool streams(const void* base, int64_t total, int64_t row_bytes) {
  constexpr int64_t kUnit = kVectorBytes + !kVectorBytes;
  return kVectorBytes != 0 && total >= kStreamFromBytes && row_bytes % kUnit == 0 &&
         reinterpret_cast<uintptr_t>(base) % kUnit == 0;
}

inline void write_zeros(char* to, int64_t bytes, bool stream) {
  stream ? stream_zeros(to, bytes) : static_cast<void>(std::memset(to, 0, bytes));
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
  const bool stream = streams(base, total, row_bytes);
  const auto copy = [&](int64_t i) {
    const Row row = source(i);
    char* to = base + i * row_bytes;
    if (kUneven && row.from == to) return;
    if (row.from == nullptr)
      write_zeros(to, row_bytes, stream);
    else if (row.type != type)
      convert_row(to, type, row.from, row.type, hidden);
    else if (stream)
      stream_row(to, row.from, row_bytes);
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
    if (stream) stream_fence();
  }
}

template <class T>
inline void add(float* sum, const T* x, int64_t n) {
  for (int64_t c = 0; c < n; ++c) sum[c] += to_float(x[c]);
}
#if defined(__F16C__)
inline void add(float* sum, const Float16* x, int64_t n) {
  int64_t c = 0;
  for (; c + 8 <= n; c += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + c));
    _mm256_storeu_ps(sum + c, _mm256_add_ps(_mm256_loadu_ps(sum + c), _mm256_cvtph_ps(half)));
  }
  for (; c < n; ++c) sum[c] += to_float(x[c]);
}
#endif

template <class T>
void reduce_runs(const EmbeddingReduceParams& p, const int64_t* starts, int64_t runs) {
  const auto* grad = static_cast<const T*>(p.grad);
  const DType type = p.dweight_dtype;
  const int64_t tiles = (p.hidden + kColumns - 1) / kColumns;
  const bool parallel = p.count * p.hidden * static_cast<int64_t>(sizeof(T)) >= kParallelFromBytes;
  // Tasks of one tile of one run: a run of a thousand paddings is shared out too.
#pragma omp parallel for schedule(dynamic, 16) if (parallel)
  for (int64_t task = 0; task < runs * tiles; ++task) {
    const int64_t first = starts[task / tiles];
    const int64_t column = task % tiles * kColumns;
    const int64_t n = p.hidden - column < kColumns ? p.hidden - column : kColumns;
    const int64_t key = p.keys[first];
    alignas(64) float sum[kColumns] = {};
    for (int64_t j = first; j < p.count && p.keys[j] == key; ++j)
      add(sum, grad + p.order[j] * p.hidden + column, n);
    char* to = static_cast<char*>(p.dweight) + (key * p.hidden + column) * size_of(type);
    if (p.accumulate) {
      alignas(64) float before[kColumns];
      widen(before, to, type, n);
      for (int64_t c = 0; c < n; ++c) sum[c] += before[c];
    }
    narrow(to, sum, type, n);
  }
}

// Zeros into the rows of dweight that no run writes. A table is mostly such rows: they are written
// once, past the cache, where filling it first would write the others twice.
void clear_others(const EmbeddingReduceParams& p, const int64_t* starts, int64_t runs) {
  char* const base = static_cast<char*>(p.dweight);
  const int64_t row_bytes = p.hidden * size_of(p.dweight_dtype);
  const int64_t total = p.vocab_rows * row_bytes;
  const bool stream = streams(base, total, row_bytes);
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
          write_zeros(base + row * row_bytes, row_bytes, stream);
      }
    }
    if (stream) stream_fence();
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
  if (p.grad_dtype == DType::kFloat32)
    reduce_runs<float>(p, starts, runs);
  else if (p.grad_dtype == DType::kBFloat16)
    reduce_runs<BFloat16>(p, starts, runs);
  else
    reduce_runs<Float16>(p, starts, runs);
}

}  // namespace vlmk::VLMK_ISA
