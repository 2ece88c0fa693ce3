// What this machine can do at most, multiply-adds in registers and memory streams, and how far
// apart its cores are. Built by benchmarks/ceilings.py with -O3 -march=native -fopenmp, where the
// benchmark runs. It shares the OpenMP runtime of torch, which is loaded first.
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int kBytes = 64, kChains = 24;  // 32 registers; more chains than latency x ports
#define KEEP(x) asm volatile("" : "+v"(x))
#elif defined(__AVX__)
#include <immintrin.h>
constexpr int kBytes = 32, kChains = 12;  // 16 registers
#define KEEP(x) asm volatile("" : "+x"(x))
#elif defined(__aarch64__)
constexpr int kBytes = 16, kChains = 24;
#define KEEP(x) asm volatile("" : "+w"(x))
#else
constexpr int kBytes = 16, kChains = 12;
#define KEEP(x) asm volatile("" : "+x"(x))
#endif

using Vector = float __attribute__((vector_size(kBytes)));
constexpr int kLanes = kBytes / sizeof(float);
static volatile float sink;

namespace {

Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }

// A thread's share of n, cut at cache lines.
void share(int64_t n, int64_t line, int64_t* begin, int64_t* end) {
  const int64_t t = omp_get_thread_num(), threads = omp_get_num_threads();
  const int64_t lines = (n + line - 1) / line;
  *begin = lines * t / threads * line;
  *end = t + 1 == threads ? n : lines * (t + 1) / threads * line;
}

// 4 reads and 3 writes in place. Brings lines `ahead` floats away into the first level of caches,
// or the second; 0: none.
template <int kLevel>
void adam_streams(float* p, const float* g, float* m, float* v, int64_t n, int64_t ahead,
                  int threads) {
#pragma omp parallel num_threads(threads)
  {
    int64_t begin, end;
    share(n, 16, &begin, &end);
    Vector zero{};
    KEEP(zero);  // the compiler must not know it
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      if (ahead) {
        __builtin_prefetch(p + i + ahead, 0, 4 - kLevel);
        __builtin_prefetch(g + i + ahead, 0, 4 - kLevel);
        __builtin_prefetch(m + i + ahead, 0, 4 - kLevel);
        __builtin_prefetch(v + i + ahead, 0, 4 - kLevel);
      }
      const Vector d = load(g + i) * zero;
      store(p + i, load(p + i) + d);
      store(m + i, load(m + i) + d);
      store(v + i, load(v + i) + d);
    }
  }
}

}  // namespace

extern "C" {

// fp32 multiply-adds in registers; returns the FLOPs done.
double fma_peak(int64_t rounds, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Vector a[kChains], x{}, y{};
    for (int i = 0; i < kChains; ++i) a[i] = Vector{} + 1e-3f * i;
    x += 0.9999f;
    y += 1e-4f;
    KEEP(x);
    KEEP(y);
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) a[i] = a[i] * x + y;  // contracted to an FMA
    }
    Vector sum = a[0];
    for (int i = 1; i < kChains; ++i) sum += a[i];
    if (sum[0] == 123.f) sink = sum[0];
  }
  return 2.0 * rounds * kChains * kLanes * threads;
}

// bf16 dot products with fp32 sums in registers; 0 where the machine has no such instruction.
double bf16_peak(int64_t rounds, int threads) {
#if defined(__AVX512BF16__)
#pragma omp parallel num_threads(threads)
  {
    __m512 a[kChains];
    for (int i = 0; i < kChains; ++i) a[i] = _mm512_set1_ps(1e-3f * i);
    __m512i x = _mm512_set1_epi32(0x3c003c00), y = _mm512_set1_epi32(0x38003800);
    KEEP(x);
    KEEP(y);
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i)
        a[i] = _mm512_dpbf16_ps(a[i], reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
    }
    __m512 sum = a[0];
    for (int i = 1; i < kChains; ++i) sum = _mm512_add_ps(sum, a[i]);
    if (sum[0] == 123.f) sink = sum[0];
  }
  return 4.0 * rounds * kChains * kLanes * threads;
#else
  (void)rounds, (void)threads;
  return 0;
#endif
}

// fp32 multiply-adds by six products of bf16 each (csrc/cpu/parts.h) on AMX tiles that stay in
// registers; 0 where the compiler knows none. The process may use tiles: vlmkernels has asked.
double parts_peak(int64_t rounds, int threads) {
#if defined(__AMX_BF16__)
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const config;
#pragma omp parallel num_threads(threads)
  {
    asm volatile("ldtilecfg %0" ::"m"(config));
    for (int64_t r = 0; r < rounds; ++r) {
      asm volatile(
          "tdpbf16ps %tmm6, %tmm4, %tmm0\n\t"
          "tdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
          "tdpbf16ps %tmm6, %tmm5, %tmm2\n\t"
          "tdpbf16ps %tmm7, %tmm5, %tmm3");
    }
    asm volatile("tilerelease");
  }
  return 4 * 2.0 * 16 * 16 * 32 / 6 * rounds * threads;
#else
  (void)rounds, (void)threads;
  return 0;
#endif
}

// Nanoseconds that a word takes from one of two threads to the other, who answer each other; 0
// where there is one.
double core_distance(int64_t turns) {
  std::atomic<int64_t> word{0};
  double seconds = 0;
#pragma omp parallel num_threads(2)
  if (omp_get_num_threads() == 2) {
    const int64_t me = omp_get_thread_num();
    const double start = omp_get_wtime();
    for (int64_t turn = me; turn < 2 * turns; turn += 2) {
      for (int i = 0; word.load(std::memory_order_acquire) != turn; ++i) {
        if (i > 4096) sched_yield();
      }
      word.store(turn + 1, std::memory_order_release);
    }
    if (me == 0) seconds = omp_get_wtime() - start;
  }
  return 1e9 * seconds / (2.0 * turns);
}

// The traffic of Adam: p, m, v [n] += 0 * g. `level`: of the cache that prefetches fill, 1 or 2.
void adam_stream(float* p, const float* g, float* m, float* v, int64_t n, int64_t ahead, int level,
                 int threads) {
  level == 1 ? adam_streams<1>(p, g, m, v, n, ahead, threads)
             : adam_streams<2>(p, g, m, v, n, ahead, threads);
}

// Copies bytes, past the caches where the machine can.
void copy_stream(char* to, const char* from, int64_t bytes, int nontemporal, int threads) {
#pragma omp parallel num_threads(threads)
  {
    int64_t begin, end;
    share(bytes, 4096, &begin, &end);
#if defined(__AVX__)
    if (nontemporal && reinterpret_cast<uintptr_t>(to) % 32 == 0) {
      int64_t i = begin;
      for (; i + 32 <= end; i += 32) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), x);
      }
      std::memcpy(to + i, from + i, static_cast<size_t>(end - i));
      _mm_sfence();
    } else
#endif
      std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
  }
  (void)nontemporal;
}

}  // extern "C"
