// How the results of a product reach C, with bias and what C holds. Included by kernel.cpp only.
#pragma once

#include <cstdint>

#include "cpu/gemm.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// Results as they leave the registers of a tile: plus sums of earlier panels, bias or what C holds,
// each if it is there, rounded to C's type.
template <class Out>
struct ResultEpilogue {
  static constexpr bool kByRows = false;
  Out* c;
  int64_t ldc;
  int64_t columns;  // of C; a tile may have more
  bool adds;        // what C holds
  int64_t ld;       // of sums
  const float* sums = nullptr;
  const Out* bias = nullptr;

  VLMK_MEMBER void skip(int64_t rows) {
    c += rows * ldc;
    if (sums) sums += rows * ld;
  }
  template <int kRows, int kVectors, class Finish>
  VLMK_MEMBER void put(const Finish& finish, int row, int column) const {
    const int64_t left = columns - column;
    Out* to = c + row * ldc + column;
    if (left >= kVectors * kWidth && sums == nullptr && bias == nullptr && !adds) {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i, to += ldc) store_vectors(to, finish(i));
      return;
    }
    float tile[kRows][kVectors * kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec(&sums_of_row)[kVectors] = finish(i);
#pragma GCC unroll 5
      for (int j = 0; j < kVectors; ++j) store(tile[i] + j * kWidth, sums_of_row[j]);
    }
    for (int i = 0; i < kRows; ++i, to += ldc) {
      each_vector(minimum(left, kVectors * kWidth), [&](int64_t j, int lanes) {
        Vec result = load_first(tile[i] + j, lanes);
        if (sums) result = load_first(sums + (row + i) * ld + column + j, lanes) + result;
        if (bias) result = result + load_first(bias + column + j, lanes);
        if (adds) result = result + load_first(to + j, lanes);
        store_first(to + j, result, lanes);
      });
    }
  }
};

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
