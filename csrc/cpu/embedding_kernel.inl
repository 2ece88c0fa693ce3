// Included inside namespace vlmk::<isa> by embedding_<isa>.cpp. Rows are moved as bytes, whatever
// their type; the one arithmetic is the sum of dweight, in fp32 and in one order, so that every
// instruction set gives the same bits.

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

// out[i] = *source(i), or zeros where that is null, for every row.
template <class Source>
void copy_rows(const Source& source, void* out, int64_t rows, int64_t row_bytes) {
  char* const base = static_cast<char*>(out);
  const int64_t total = rows * row_bytes;
  const bool stream = kVectorBytes != 0 && total >= kStreamFromBytes &&
                      row_bytes % (kVectorBytes + !kVectorBytes) == 0 &&
                      reinterpret_cast<uintptr_t>(base) % (kVectorBytes + !kVectorBytes) == 0;
#pragma omp parallel if (total >= kParallelFromBytes)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      const char* from = source(i);
      char* to = base + i * row_bytes;
      if (stream) {
        from != nullptr ? stream_row(to, from, row_bytes) : stream_zeros(to, row_bytes);
      } else if (from != nullptr) {
        std::memcpy(to, from, row_bytes);
      } else {
        std::memset(to, 0, row_bytes);
      }
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
  auto* dweight = static_cast<T*>(p.dweight);
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
    T* to = dweight + key * p.hidden + column;
    for (int64_t c = 0; c < n; ++c) from_float(sum[c], to[c]);
  }
}

}  // namespace

void embedding_copy(const EmbeddingParams& p) {
  const auto* table = static_cast<const char*>(p.table);
  const auto* visual = static_cast<const char*>(p.visual);
  const auto source = [&](int64_t i) -> const char* {
    const int64_t index = p.visual_index[p.first + i];
    if (index >= 0) return p.visual_rows < 0 ? nullptr : visual + index * p.row_bytes;
    if (p.ids == nullptr) return table + i * p.row_bytes;
    // Unsigned, so that an id below the range, however far, is above V too.
    const uint64_t row =
        static_cast<uint64_t>(p.ids[p.first + i]) - static_cast<uint64_t>(p.vocab_start);
    if (row >= static_cast<uint64_t>(p.vocab_rows)) return nullptr;
    return table + static_cast<int64_t>(row) * p.row_bytes;
  };
  copy_rows(source, p.out, p.rows, p.row_bytes);
}

void embedding_copy_inverse(const EmbeddingGatherParams& p) {
  const auto* grad = static_cast<const char*>(p.grad);
  const auto source = [&](int64_t r) -> const char* {
    return p.inverse[r] < 0 ? nullptr : grad + p.inverse[r] * p.row_bytes;
  };
  copy_rows(source, p.dvisual, p.visual_rows, p.row_bytes);
}

void embedding_reduce_runs(const EmbeddingReduceParams& p, const int64_t* starts, int64_t runs) {
  if (p.dtype == DType::kFloat32)
    reduce_runs<float>(p, starts, runs);
  else if (p.dtype == DType::kBFloat16)
    reduce_runs<BFloat16>(p, starts, runs);
  else
    reduce_runs<Float16>(p, starts, runs);
}
