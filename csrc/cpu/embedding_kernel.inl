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

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

struct Fp32 {
  using Element = float;
  static void add(float* sum, const float* x, int64_t n) {
    for (int64_t c = 0; c < n; ++c) sum[c] += x[c];
  }
  static void store(float* to, const float* sum, int64_t n) { std::memcpy(to, sum, n * 4); }
};

struct Bf16 {
  using Element = uint16_t;
  static void add(float* sum, const uint16_t* x, int64_t n) {
    for (int64_t c = 0; c < n; ++c) sum[c] += bits_to_float(static_cast<uint32_t>(x[c]) << 16);
  }
  static void store(uint16_t* to, const float* sum, int64_t n) {
    for (int64_t c = 0; c < n; ++c) {
      const uint32_t bits = float_to_bits(sum[c]);
      const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest even
      const bool nan = (bits & 0x7fffffff) > 0x7f800000;
      to[c] = static_cast<uint16_t>(nan ? 0x7fff : rounded);
    }
  }
};

struct Fp16 {
  using Element = uint16_t;
  static float to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
    if (magnitude >= 0x0f800000)  // infinity and NaN
      return bits_to_float(sign | 0x70000000 | magnitude);
    // Exponents are moved by 112 with one multiplication, which is exact for subnormals too.
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude) * 0x1p112f));
  }
  static uint16_t from_float(float value) {  // to nearest even
    const uint32_t bits = float_to_bits(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);   // NaN
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to infinity
    if (magnitude < 0x38800000)  // subnormal: adding 0.5 rounds at the 2^-24 place
      return static_cast<uint16_t>(
          sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f)));
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
  }
  static void add(float* sum, const uint16_t* x, int64_t n) {
    int64_t c = 0;
#if defined(__F16C__)
    for (; c + 8 <= n; c += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + c));
      _mm256_storeu_ps(sum + c, _mm256_add_ps(_mm256_loadu_ps(sum + c), _mm256_cvtph_ps(half)));
    }
#endif
    for (; c < n; ++c) sum[c] += to_float(x[c]);
  }
  static void store(uint16_t* to, const float* sum, int64_t n) {
    for (int64_t c = 0; c < n; ++c) to[c] = from_float(sum[c]);
  }
};

template <class Type>
void reduce_runs(const EmbeddingReduceParams& p, const int64_t* starts, int64_t runs) {
  using Element = typename Type::Element;
  const auto* grad = static_cast<const Element*>(p.grad);
  auto* dweight = static_cast<Element*>(p.dweight);
  const int64_t tiles = (p.hidden + kColumns - 1) / kColumns;
  // Tasks of one tile of one run: a run of a thousand paddings is shared out too.
#pragma omp parallel for schedule(                                                     \
        dynamic, 16) if (p.count * p.hidden * static_cast<int64_t>(sizeof(Element)) >= \
                             kParallelFromBytes)
  for (int64_t task = 0; task < runs * tiles; ++task) {
    const int64_t first = starts[task / tiles];
    const int64_t column = task % tiles * kColumns;
    const int64_t n = p.hidden - column < kColumns ? p.hidden - column : kColumns;
    const int64_t key = p.keys[first];
    alignas(64) float sum[kColumns] = {};
    for (int64_t j = first; j < p.count && p.keys[j] == key; ++j)
      Type::add(sum, grad + p.order[j] * p.hidden + column, n);
    Type::store(dweight + key * p.hidden + column, sum, n);
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
    reduce_runs<Fp32>(p, starts, runs);
  else if (p.dtype == DType::kBFloat16)
    reduce_runs<Bf16>(p, starts, runs);
  else
    reduce_runs<Fp16>(p, starts, runs);
}
