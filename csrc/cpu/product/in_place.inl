// Products of float32 matrices that are multiplied where they lie, with AVX-512: B's rows are
// dense, A's rows or columns. Nothing is packed and no thread waits for another. C is divided into
// regions, which threads take one by one; of each panel of the depth, a region's part of A and B
// lies in the second-level cache, and the next part is fetched there while one is multiplied.
// Included by kernel.cpp only.
#pragma once

#include <omp.h>

#include <cstdint>

#include "cpu/gemm.h"
#include "cpu/product/pack.inl"
#include "cpu/product/product.h"
#include "cpu/ranges.h"

namespace vlmk::VLMK_ISA {
namespace {

class ProductInPlace {
 public:
  ProductInPlace(const ProductParams& p, int64_t threads) : p_(p) {
    const int64_t narrowest = parts(p.columns, kWide), lowest = parts(p.rows, kTall);
    if (by_rows_ && p.rows >= kFewest * threads) {
      across_ = narrowest;
      down_ = parts(lowest, threads) * threads;
    } else {
      divide(narrowest, lowest, threads);
    }
    threads_ = static_cast<int>(minimum(threads, across_ * down_));
  }

  // Tiles read a row of B, and a row or all columns of A, at each step: where those lie a page
  // apart and more, in both matrices, looking up pages costs more than packing, on Intel's cores in
  // A alone (1.1 to 1.4x); and rows of B a number of pages apart fall into few sets of the caches.
  static bool takes(const ProductParams& p) {
    constexpr int64_t kPage = 4096 / sizeof(float);
    const bool columns_near = p.a_row == 1 && p.a_column < kPage;
    const bool near = columns_near || (p.b_row < kPage && (p.a_row != 1 || is_amd()));
    return kWidth == 16 && (p.a_row == 1 || p.a_column == 1) && p.b_column == 1 && near &&
           p.b_row % kPage != 0 && p.columns % kWidth == 0;
  }

  void run() const {
    Ranges regions(across_ * down_, threads_);
#pragma omp parallel num_threads(threads_)
    {
      const int thread = omp_get_thread_num();
      Prefetcher next;
      for (int64_t i = regions.take(thread); i >= 0; i = regions.take(thread)) {
        const Region region = region_of(i);
        for (int64_t panel = 0; panel < panels_; ++panel) {
          next.clear();
          if (panel + 1 < panels_) {
            list(next, region, panel + 1);
          } else if (const int64_t then = regions.peek(thread); then >= 0) {
            list(next, region_of(then), 0);
          }
          multiply(region, panel, next);
        }
      }
    }
  }

 private:
  // 240 x 256 floats of A, 256 x 256 of B and 240 x 256 of C are 740 KB.
  static constexpr int64_t kTall = 240, kWide = 256, kDepth = 256;
  // Rows of tokens a thread from which they are divided as what goes before and behind divides
  // them.
  static constexpr int64_t kFewest = 24;

  struct Region {
    int64_t row, rows, column, columns;
  };

  // The fewest rounds of the smallest regions, and of these what reads least: a float that is
  // fetched takes about as long as four multiply-adds of a vector's lane.
  void divide(int64_t narrowest, int64_t lowest, int64_t threads) {
    int64_t least = INT64_MAX;
    for (int64_t across = narrowest; across < narrowest + threads; ++across) {
      const int64_t rounds = parts(across * lowest, threads), down = rounds * threads / across;
      const int64_t wide = parts(vectors_, across) * kWidth, tall = parts(tiles_, down) * kTileRows;
      const int64_t cost = rounds * (tall * wide + 4 * (tall + wide));
      if (cost >= least) continue;
      least = cost;
      across_ = across;
      down_ = down;
    }
  }

  Region region_of(int64_t i) const {
    const int64_t x = i % across_, y = i / across_;
    const int64_t column = x * vectors_ / across_ * kWidth, row = y * tiles_ / down_ * kTileRows;
    const int64_t right = (x + 1) * vectors_ / across_ * kWidth;
    const int64_t bottom = minimum((y + 1) * tiles_ / down_ * kTileRows, p_.rows);
    return {row, bottom - row, column, right - column};
  }

  const float* of_a(int64_t panel, int64_t row) const {
    return static_cast<const float*>(p_.a) + panel * depth_ * p_.a_column + row * p_.a_row;
  }
  const float* of_b(int64_t panel, int64_t column) const {
    return static_cast<const float*>(p_.b) + panel * depth_ * p_.b_row + column;
  }
  int64_t steps_of(int64_t panel) const { return minimum(depth_, p_.depth - panel * depth_); }

  void list(Prefetcher& next, const Region& region, int64_t panel) const {
    const int64_t steps = steps_of(panel);
    list_part(next, of_a(panel, region.row), region.rows, p_.a_row, steps, p_.a_column);
    list_part(next, of_b(panel, region.column), region.columns, p_.b_column, steps, p_.b_row);
  }

  void multiply(const Region& region, int64_t panel, Prefetcher& next) const {
    GemmArgs<Fp32> g{};
    g.a = of_a(panel, region.row);
    g.lda = by_rows_ ? p_.a_row : p_.a_column;
    g.b = of_b(panel, region.column);
    g.ldb = p_.b_row;
    g.c = static_cast<float*>(p_.c) + region.row * p_.c_row + region.column;
    g.ldc = p_.c_row;
    g.rows = static_cast<int>(region.rows);
    g.vectors = static_cast<int>(region.columns / kWidth);
    g.depth = static_cast<int>(steps_of(panel));
    g.far = panel == 0;
    if (panel > 0 || p_.add) {
      g.add = Add::kC;
    } else if (p_.bias) {
      g.add = Add::kBias;
      g.bias = static_cast<const float*>(p_.bias) + region.column;
    }
    const WholeTiles none;
    by_rows_ ? gemm<Fp32, false>(g, next, none) : gemm<Fp32, true>(g, next, none);
  }

  const ProductParams& p_;
  const bool by_rows_ = p_.a_column == 1;
  const int64_t panels_ = parts(p_.depth, kDepth), depth_ = parts(p_.depth, panels_);
  const int64_t vectors_ = p_.columns / kWidth, tiles_ = parts(p_.rows, kTileRows);
  int64_t across_ = 1, down_ = 1;  // regions
  int threads_ = 1;
};

}  // namespace
}  // namespace vlmk::VLMK_ISA
