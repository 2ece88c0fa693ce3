// A float32 product as Goto and van de Geijn divide it (doi 10.1145/1356052.1356053), compiled once
// per instruction set (dispatch.h): of each kDepth steps of the depth, B's columns are packed for
// all threads, in slivers as wide as a tile, and A's rows by the thread that multiplies them, so
// that B's sliver and A's block lie in the second-level cache.
//
// A sum is made of sums over kDepth steps at most, in their order: the number of threads changes no
// bit.
#include <omp.h>

#include <cstdint>

#include "cpu/gemm.h"
#include "cpu/product/product.h"
#include "cpu/scratch.h"

namespace vlmk::VLMK_ISA {
namespace {

constexpr int64_t kDepth = 384;
constexpr int64_t kRows = 192;      // of A, 288 KB of kDepth steps
constexpr int64_t kColumns = 4096;  // of B, 6 MB
constexpr int kSliver = kMaxTileVectors * kWidth;
constexpr double kParallelFrom = 1 << 18;  // multiply-adds

VLMK_INLINE int64_t parts(int64_t n, int64_t largest) { return (n + largest - 1) / largest; }
VLMK_INLINE int64_t whole_vectors(int64_t n) { return parts(n, kWidth) * kWidth; }

// Element (i, k) of [n, depth] lies at from[i * row + k * step], one of them being 1; in `to` at
// [k * ld + i], with zeros behind n as far as a whole vector.
VLMK_NOINLINE void pack(const float* from, int64_t row, int64_t step, int64_t n, int64_t depth,
                        float* to, int64_t ld) {
  if (row == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      each_vector(n, [&](int64_t i, int lanes) {
        store(to + k * ld + i, load_first(from + k * step + i, lanes));
      });
    }
    return;
  }
  each_vector(n, [&](int64_t i, int rows) {
    each_vector(depth, [&](int64_t k, int steps) {
      Vec r[kWidth];
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; ++j) {
        r[j] = j < rows ? load_first(from + (i + j) * row + k, steps) : set1(0.f);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; ++j) {
        if (j < steps) store(to + (k + j) * ld + i, r[j]);
      }
    });
  });
}

// What of C one thread multiplies at a time: rows from `row` on by all columns of its slivers.
struct Block {
  int64_t row, rows;
  int64_t sliver, end;  // slivers of the packed columns
};

// Adds A's packed block times B's packed columns [first, first + columns) to C, or writes it.
void multiply(const ProductParams& p, const Block& block, const float* a, const float* b,
              int64_t first, int64_t columns, int64_t depth, Start start, float* edge) {
  Prefetcher none;
  none.clear();
  for (int64_t sliver = block.sliver; sliver < block.end; ++sliver) {
    const int64_t column = sliver * kSliver, wide = minimum(kSliver, columns - column);
    const int64_t ld = whole_vectors(wide);
    float* const c = p.c + block.row * p.c_row + first + column;
    GemmArgs<Fp32> g{};
    g.a = a;
    g.lda = whole_vectors(block.rows);
    g.b = b + column * depth;
    g.ldb = ld;
    g.rows = static_cast<int>(block.rows);
    g.vectors = static_cast<int>(ld / kWidth);
    g.depth = static_cast<int>(depth);
    if (wide == ld) {
      g.c = c;
      g.ldc = p.c_row;
      g.start = start;
      gemm<Fp32, true>(g, none);
      continue;
    }
    g.c = edge;
    g.ldc = ld;
    g.start = Start::kZero;
    gemm<Fp32, true>(g, none);
    for (int64_t i = 0; i < block.rows; ++i) {
      each_vector(wide, [&](int64_t j, int lanes) {
        Vec sum = load_first(edge + i * ld + j, lanes);
        float* const to = c + i * p.c_row + j;
        if (start == Start::kAddLast) sum = sum + load_first(to, lanes);
        store_first(to, sum, lanes);
      });
    }
  }
}

void fill(const ProductParams& p, const Block& block, int64_t first, int64_t columns) {
  const int64_t begin = block.sliver * kSliver, end = minimum(block.end * kSliver, columns);
  for (int64_t i = block.row; i < block.row + block.rows; ++i) {
    each_vector(end - begin, [&](int64_t j, int lanes) {
      const int64_t column = first + begin + j;
      const Vec from = p.bias ? load_first(p.bias + column, lanes) : set1(0.f);
      store_first(p.c + i * p.c_row + column, from, lanes);
    });
  }
}

}  // namespace

void matrix_product(const ProductParams& p) {
  const bool parallel =
      static_cast<double>(p.rows) * static_cast<double>(p.columns * p.depth) >= kParallelFrom;
  const int64_t threads = parallel ? omp_get_max_threads() : 1;
  // Each thread takes as many rows, and where these are few the columns are divided too.
  const int64_t row_blocks = parts(parts(p.rows, kRows), threads) * threads;
  const int64_t rows = parts(parts(p.rows, row_blocks), 6) * 6;
  const int64_t depth = parts(p.depth, parts(p.depth, kDepth));
  const int64_t width = parts(p.columns, parts(p.columns, kColumns));
  const auto packed = static_cast<size_t>(depth * whole_vectors(width));
  const auto own = static_cast<size_t>((depth + kSliver) * whole_vectors(rows));
  float* const shared = scratch(packed + own);
  bool out_of_memory = shared == nullptr;
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    float* const a = omp_get_thread_num() == 0 ? shared + packed : scratch(own);
    float* const edge = a + depth * whole_vectors(rows);
    if (a == nullptr) {
#pragma omp atomic write
      out_of_memory = true;
    }
#pragma omp barrier
    for (int64_t first = 0; first < p.columns && !out_of_memory; first += width) {
      const int64_t columns = minimum(width, p.columns - first), slivers = parts(columns, kSliver);
      const int64_t groups = parts(p.rows, rows), chunks = parts(threads, groups);
      for (int64_t k = 0; k < p.depth; k += depth) {
        const int64_t steps = minimum(depth, p.depth - k);
#pragma omp for schedule(static)
        for (int64_t s = 0; s < slivers; ++s) {
          const int64_t column = s * kSliver, wide = minimum(kSliver, columns - column);
          pack(p.b + (first + column) * p.b_column + k * p.b_row, p.b_column, p.b_row, wide, steps,
               shared + column * steps, whole_vectors(wide));
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < groups * chunks; ++i) {
          const int64_t row = i / chunks * rows, chunk = i % chunks;
          const Block block{row, minimum(rows, p.rows - row), chunk * slivers / chunks,
                            (chunk + 1) * slivers / chunks};
          if (block.sliver == block.end) continue;
          pack(p.a + row * p.a_row + k * p.a_column, p.a_row, p.a_column, block.rows, steps, a,
               whole_vectors(block.rows));
          if (k == 0 && p.bias != nullptr) fill(p, block, first, columns);
          const bool adds = k > 0 || p.add || p.bias != nullptr;
          multiply(p, block, a, shared, first, columns, steps,
                   adds ? Start::kAddLast : Start::kZero, edge);
        }
      }
    }
  }
  if (out_of_memory) throw_out_of_memory(packed + own);
}

}  // namespace vlmk::VLMK_ISA
