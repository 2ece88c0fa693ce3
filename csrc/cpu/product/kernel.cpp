// A product as Goto and van de Geijn divide it (doi 10.1145/1356052.1356053), compiled once per
// instruction set (dispatch.h): of each kDepth elements of the depth, B's columns are packed in
// slivers as wide as a tile and A's rows in blocks, so that a sliver and a block lie in the
// second-level cache, and the next sliver and the next block's rows are fetched there. A's rows are
// divided among the threads, or B's columns where A has few rows; the thread that multiplies a part
// packs it, and what is not divided is packed for all. With AVX-512, and of a narrow B with AVX2,
// dense rows of float32 that are divided are read where they lie. With AVX2 a sliver stays in a
// first-level cache of 32 KB, and beside it what a tile reads of A: hence a smaller depth, and A
// packed row by row where its rows are dense, else a tile's rows at a time.
//
// Some panels of B are packed at once, and their blocks taken one by one: no thread waits at the
// end of a panel for another that is slower. A block's panels are added in their order.
//
// Sums are float32, of sums over a panel's depth, or parts of it, in their order, rounded once: the
// number of threads changes no bit.
#include <omp.h>

#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/counter.h"
#include "cpu/gemm.h"
#include "cpu/product/product.h"
#include "cpu/scratch.h"

#if defined(__AVX512BF16__) && !defined(VLMK_TILES)
#define VLMK_PAIRS  // here are products of bf16 by dot products, elsewhere all in float32
#endif

namespace vlmk::VLMK_ISA {
namespace {

constexpr bool kAvx2 = kWidth == 8;
constexpr int64_t kDepth = kAvx2 ? 256 : 768;  // elements of a panel: a float, or two bf16 numbers
constexpr int64_t kChain = 384;  // of the depth, summed at once in float32; 768: twice MKL's error
constexpr int64_t kRows = 120;   // of A, 360 KB of 768 elements
constexpr int64_t kColumns = 4096;          // of B, 12 MB of 768 elements
constexpr int64_t kSums = 4 << 20;          // of C, 16 MB, where it is bf16 and has several panels
constexpr int64_t kFew = kAvx2 ? 256 : 96;  // rows of A up to which B is divided
constexpr int64_t kFewRowwise = 256;        // where packing transposes B, which takes longer
constexpr int64_t kNarrow = 512;  // columns up to which AVX2 gains by not packing A's dense rows
constexpr int64_t kShared = 1 << 18;  // elements of A, 1 MB, of which whole panels are packed then
constexpr int kSliver = kMaxTileVectors * kWidth;
constexpr int64_t kUnit = kAvx2 ? 4 * kSliver : kSliver;  // columns packed at once
constexpr int64_t kPacked = 3 << 20;  // floats of B, 12 MB, whole panels, packed at once
constexpr int64_t kTileRows = tile_rows(kMaxTileVectors);
constexpr double kParallelFrom = 1 << 18;  // multiply-adds

VLMK_INLINE int64_t parts(int64_t n, int64_t largest) { return (n + largest - 1) / largest; }
VLMK_INLINE int64_t whole_vectors(int64_t n) { return parts(n, kWidth) * kWidth; }
// With AVX2, floats from a packed tile of A to the next: an odd number of lines, so that tiles fall
// into different sets of the first-level cache.
VLMK_INLINE int64_t tile_stride(int64_t depth) { return 16 * (parts(kTileRows * depth, 16) | 1); }

#if !defined(VLMK_PAIRS)
// Element (i, k) of [n, depth] lies at from[i * row + k * step], one of them being 1; in `to` at
// [k * ld + i], with zeros behind n as far as a whole vector.
template <class In>
VLMK_NOINLINE void pack(const In* from, int64_t row, int64_t step, int64_t n, int64_t depth,
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

// The first n of dense columns (row == 1), n being whole slivers, which follow each other in `to`.
template <class In>
VLMK_NOINLINE void pack_slivers(const In* from, int64_t step, int64_t n, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; ++k, to += kSliver) {
    fetch_row(from + (k + kAhead) * step, n);
    float* sliver = to;
    for (int64_t i = 0; i < n; i += kSliver, sliver += depth * kSliver) {
      for (int j = 0; j < kSliver; j += kWidth) store(sliver + j, load(from + k * step + i + j));
    }
  }
}

// Dense rows (step == 1): element (i, k) at [i * ld + k], ld being whole vectors.
template <class In>
VLMK_NOINLINE void pack_rows(const In* from, int64_t row, int64_t n, int64_t depth, float* to,
                             int64_t ld) {
  for (int64_t i = 0; i < n; ++i) {
    each_vector(depth, [&](int64_t k, int lanes) {
      store(to + i * ld + k, load_first(from + i * row + k, lanes));
    });
  }
}

// With AVX2. Dense columns (row == 1), for tiles of kTileRows = R: element (i, k) at
// [i / R * ld + k * R + i % R], zeros behind n as far as a whole tile.
template <class In>
VLMK_NOINLINE void pack_tiles(const In* from, int64_t step, int64_t n, int64_t depth, float* to,
                              int64_t ld) {
  constexpr size_t kSize = kTileRows * sizeof(float);
  for (int64_t k = 0; k < depth; ++k, to += kTileRows) {
    fetch_row(from + (k + kAhead) * step, n);
    float* tile = to;
    each_vector(n, [&](int64_t i, int lanes) {
      const Vec v = load_first(from + k * step + i, lanes);
      for (int64_t done = 0; done < lanes; done += kTileRows, tile += ld) {
        __builtin_memcpy(tile, reinterpret_cast<const float*>(&v) + done, kSize);
      }
    });
  }
}

#else
// The first n <= 32 of a row, zeros behind them.
VLMK_INLINE __m512i load_row(const BFloat16* row, int64_t n) {
  const __mmask32 mask = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
  return _mm512_maskz_loadu_epi16(mask, row);
}

// Element (i, k) of [n, depth] lies at from[i * row + k * step], one of them being 1; in `to` 2 k
// and 2 k + 1 side by side at [k * ld + i], with zeros behind n as far as a whole vector and behind
// an odd depth.
VLMK_NOINLINE void pack(const BFloat16* from, int64_t row, int64_t step, int64_t n, int64_t depth,
                        uint32_t* to, int64_t ld) {
  if (row == 1) {
    for (int64_t k = 0; k < depth; k += 2, to += ld) {
      const BFloat16* const even = from + k * step;
      each_vector(n, [&](int64_t i, int lanes) {
        const __mmask16 mask = first_lanes(lanes), odd = k + 1 < depth ? mask : __mmask16{0};
        _mm512_storeu_si512(to + i, interleave(_mm256_maskz_loadu_epi16(mask, even + i),
                                               _mm256_maskz_loadu_epi16(odd, even + step + i)));
      });
    }
    return;
  }
  each_vector(n, [&](int64_t i, int rows) {
    for (int64_t k = 0; k < depth; k += 2 * kWidth) {
      const int64_t left = depth - k, pairs = minimum(kWidth, parts(left, 2));
      Vec r[kWidth];
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; ++j) {
        r[j] = j < rows ? _mm512_castsi512_ps(load_row(from + (i + j) * row + k, left)) : set1(0.f);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; ++j) {
        if (j < pairs) _mm512_storeu_ps(to + (k / 2 + j) * ld + i, r[j]);
      }
    }
  });
}
#endif

// What of C one thread multiplies at a time.
struct Block {
  int64_t row, rows;
  int64_t sliver, end;     // of the packed columns
  int64_t first, columns;  // packed ones, of C
  int64_t depth;           // elements of the panels
  bool begins, ends;       // the depth's first panel, the last
  bool fetches;            // the next sliver, while one is multiplied
};

template <class Math, class In, class Out>
struct Product {
  using Element = typename Math::Element;
  // Where tiles read a block of A: as rows lda apart, else by columns, of AVX2 a tile's rows at a
  // time.
  struct Left {
    const Element* data;
    ptrdiff_t lda;
    bool by_rows;
  };
  static constexpr bool kDirect = std::is_same_v<Out, float>;   // sums lie in C itself
  static constexpr bool kFloats = std::is_same_v<In, Element>;  // A is multiplied as it lies

  const ProductParams& p;
  const int64_t threads;
  const int64_t elements = parts(p.depth, Math::kStep);
  const int64_t panels = parts(elements, kDepth);
  const int64_t depth = parts(elements, panels);  // elements of a panel
  const int64_t panel_steps = depth * Math::kStep;

  // Floats of a packed block of A, at most.
  int64_t left_size(int64_t rows) const { return (depth + kWidth) * whole_vectors(rows); }

  Left pack_a(int64_t panel, int64_t row, int64_t rows, Element* to) const {
    const In* const from = of_a(panel, row);
    const int64_t steps = steps_of(panel);
    if constexpr (kAvx2) {
      if (p.a_column == 1) {
        pack_rows(from, p.a_row, rows, steps, to, whole_vectors(steps));
      } else {
        pack_tiles(from, p.a_column, rows, steps, to, tile_stride(steps));
      }
    } else {
      pack(from, p.a_row, p.a_column, rows, steps, to, whole_vectors(rows));
    }
    return packed_left(panel, rows, to);
  }
  Left packed_left(int64_t panel, int64_t rows, const Element* data) const {
    if (!kAvx2) return {data, whole_vectors(rows), false};
    if (p.a_column == 1) return {data, whole_vectors(steps_of(panel)), true};
    return {data, tile_stride(steps_of(panel)), false};
  }

  void pack_b(int64_t panel, int64_t column, int64_t n, Element* to) const {
    const int64_t steps = steps_of(panel), packed = parts(steps, Math::kStep);
    int64_t done = 0;
    if constexpr (kAvx2) {
      if (p.b_column == 1) {
        done = n / kSliver * kSliver;
        pack_slivers(of_b(panel, column), p.b_row, done, steps, to);
      }
    }
    for (; done < n; done += kSliver) {
      const int64_t wide = minimum(kSliver, n - done);
      pack(of_b(panel, column + done), p.b_column, p.b_row, wide, steps, to + done * packed,
           whole_vectors(wide));
    }
  }

  void multiply_sliver(const Left& a, GemmArgs<Math> g, Prefetcher& next) const {
    if constexpr (!kAvx2) {
      const int depth = g.depth;
      const auto chain = static_cast<int>(kFloats ? parts(depth, parts(depth, kChain)) : depth);
      for (int done = 0; done < depth; done += chain) {
        g.depth = static_cast<int>(minimum(chain, depth - done));
        a.by_rows ? gemm<Math, false>(g, next) : gemm<Math, true>(g, next);
        g.a += chain * (a.by_rows ? 1 : g.lda);
        g.b += chain * g.ldb;
        g.add = Add::kC;
      }
      return;
    }
    if (a.by_rows) return gemm<Math, false>(g, next);
    const int rows = g.rows;
    g.lda = kTileRows;
    for (int row = 0; row < rows; row += kTileRows, g.a += a.lda, g.c += kTileRows * g.ldc) {
      g.rows = static_cast<int>(minimum(kTileRows, rows - row));
      gemm<Math, true>(g, next);
    }
  }

  // A's block times B's packed columns, while `next` is fetched: with block.fetches the next
  // sliver, and with the last one what list_next() names. Sums of bf16 results lie in `sums` [rows,
  // width] until the last panel, or in `edge` if that is the first too; so do a last sliver's.
  template <class ListNext>
  void multiply(const Block& block, const Left& a, const Element* b, float* sums, int64_t width,
                float* edge, Prefetcher& next, const ListNext& list_next) const {
    GemmArgs<Math> g{};
    g.a = a.data;
    g.lda = a.lda;
    g.rows = static_cast<int>(block.rows);
    g.depth = static_cast<int>(block.depth);
    for (int64_t sliver = block.sliver; sliver < block.end; ++sliver) {
      const int64_t column = sliver * kSliver, wide = minimum(kSliver, block.columns - column);
      Out* const c = static_cast<Out*>(p.c) + block.row * p.c_row + block.first + column;
      g.ldb = whole_vectors(wide);
      g.b = b + column * block.depth;
      g.vectors = static_cast<int>(g.ldb / kWidth);
      const bool whole = wide == g.ldb;
      if constexpr (kDirect) {
        g.c = whole ? c : edge;
        g.ldc = whole ? p.c_row : g.ldb;
        g.add = Add::kNothing;
        if (whole && begins_with_bias(block)) {
          g.add = Add::kBias;
          g.bias = static_cast<const Out*>(p.bias) + block.first + column;
        } else if (whole && (!block.begins || p.add)) {
          g.add = Add::kC;
        }
      } else {
        const bool once = block.begins && block.ends;
        g.c = once ? edge : sums + block.row * width + column;
        g.ldc = once ? g.ldb : width;
        g.add = block.begins ? Add::kNothing : Add::kC;
      }
      if (sliver + 1 == block.end) {
        list_next();
      } else if (block.fetches) {
        const int64_t after = minimum(kSliver, block.columns - column - kSliver);
        next.clear();
        next.add(reinterpret_cast<const char*>(b + (column + kSliver) * block.depth),
                 whole_vectors(after) * block.depth * static_cast<int64_t>(sizeof(Element)));
      }
      multiply_sliver(a, g, next);
      if (kDirect ? !whole : block.ends) finish(block, g.c, g.ldc, c, wide, column);
    }
  }

  bool begins_with_bias(const Block& block) const { return block.begins && p.bias != nullptr; }

  // Sums [rows, wide] to C, or added to it.
  void finish(const Block& block, const float* sums, int64_t ld, Out* c, int64_t wide,
              int64_t column) const {
    const Out* const bias = static_cast<const Out*>(p.bias) + block.first + column;
    for (int64_t i = 0; i < block.rows; ++i) {
      each_vector(wide, [&](int64_t j, int lanes) {
        Vec sum = load_first(sums + i * ld + j, lanes);
        if (kDirect ? begins_with_bias(block) : p.bias != nullptr) {
          sum = sum + load_first(bias + j, lanes);
        } else if (kDirect && (!block.begins || p.add)) {
          sum = sum + load_first(c + i * p.c_row + j, lanes);
        }
        store_first(c + i * p.c_row + j, sum, lanes);
      });
    }
  }

  const In* of_a(int64_t panel, int64_t row) const {
    return static_cast<const In*>(p.a) + panel * panel_steps * p.a_column + row * p.a_row;
  }
  const In* of_b(int64_t panel, int64_t column) const {
    return static_cast<const In*>(p.b) + panel * panel_steps * p.b_row + column * p.b_column;
  }
  int64_t steps_of(int64_t panel) const {
    return minimum(panel_steps, p.depth - panel * panel_steps);
  }

  // What is read of a part of A or B, `wide` rows of A or columns of B from `from` on.
  static void list(Prefetcher& next, const In* from, int64_t wide, int64_t stride, int64_t steps,
                   int64_t step) {
    const bool dense = stride == 1;
    for (int64_t i = 0; i < (dense ? steps : wide); ++i) {
      next.add(reinterpret_cast<const char*>(from + i * (dense ? step : stride)),
               (dense ? wide : steps) * static_cast<int64_t>(sizeof(In)));
    }
  }
  void list_b(Prefetcher& next, int64_t panel, int64_t column, int64_t columns) const {
    list(next, of_b(panel, column), columns, p.b_column, steps_of(panel), p.b_row);
  }
  void list_a(Prefetcher& next, int64_t panel, int64_t row, int64_t rows) const {
    list(next, of_a(panel, row), rows, p.a_row, steps_of(panel), p.a_column);
  }

  // With few rows packing B takes as long as a quarter of the multiply-adds, as it waits for
  // memory: so a thread packs some columns right before it multiplies them and fetches the next
  // ones meanwhile.
  void divide_columns() const {
    const int64_t rows = parts(parts(p.rows, parts(p.rows, kRows)), kTileRows) * kTileRows;
    const int64_t groups = parts(p.rows, rows), units = parts(p.columns, kUnit);
    const int64_t block_size = left_size(rows);
    // Sums of bf16 results wait for all panels.
    const int64_t at_once = kDirect ? minimum(panels, parts(kShared, groups * block_size)) : panels;
    const int64_t common = at_once * groups * block_size;
    const int64_t own = (depth + p.rows) * kUnit + rows * kSliver;
    float* const shared = scratch(static_cast<size_t>(common + own));
    auto* const packed_a = reinterpret_cast<Element*>(shared);
    bool out_of_memory = shared == nullptr;
    std::atomic<int64_t> taken{0};  // units, counted anew for each panels at once
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      float* const mine =
          omp_get_thread_num() == 0 ? shared + common : scratch(static_cast<size_t>(own));
      auto* const packed_b = reinterpret_cast<Element*>(mine);
      float* const edge = mine + depth * kUnit;
      float* const sums = edge + rows * kSliver;
      if (mine == nullptr) {
#pragma omp atomic write
        out_of_memory = true;
      }
#pragma omp barrier
      Prefetcher next;
      int64_t unit = taken++, done = 0;
      for (int64_t from = 0; from < panels && !out_of_memory; from += at_once, done += units) {
        const int64_t to = minimum(from + at_once, panels);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (to - from) * groups; ++i) {
          const int64_t panel = from + i / groups, row = i % groups * rows;
          pack_a(panel, row, minimum(rows, p.rows - row), packed_a + i * block_size);
        }
        while (unit < done + units) {
          const int64_t column = (unit - done) * kUnit;
          const int64_t wide = minimum(kUnit, p.columns - column);
          unit = taken++;
          const int64_t after = (unit - done) * kUnit;
          for (int64_t panel = from; panel < to; ++panel) {
            pack_b(panel, column, wide, packed_b);
            next.clear();
            for (int64_t i = 0; i < groups; ++i) {
              // With the last block: A's rows would drive it out of the cache again.
              if (i == groups - 1 && panel + 1 < to) {
                list_b(next, panel + 1, column, wide);
              } else if (i == groups - 1 && after < p.columns) {
                list_b(next, from, after, minimum(kUnit, p.columns - after));
              }
              const Block block{i * rows,
                                minimum(rows, p.rows - i * rows),
                                0,
                                parts(wide, kSliver),
                                column,
                                wide,
                                parts(steps_of(panel), Math::kStep),
                                panel == 0,
                                panel == panels - 1,
                                false};
              const Element* const a = packed_a + ((panel - from) * groups + i) * block_size;
              multiply(block, packed_left(panel, block.rows, a), packed_b, sums, kUnit, edge, next,
                       [] {});
            }
          }
        }
#pragma omp barrier
      }
    }
    if (out_of_memory) throw_out_of_memory(static_cast<size_t>(common + own));
  }

  void run() const {
    const bool few = p.rows <= (p.b_column == 1 ? kFew : kFewRowwise);
    const bool enough = p.columns >= 4 * threads * kUnit;
    const bool fits = kDirect || p.rows * p.depth <= kSums;  // all of A packed, see at_once
    few && enough && fits ? divide_columns() : divide_rows();
  }

  void divide_rows() const {
    const bool in_place = kFloats && p.a_column == 1 && (!kAvx2 || p.columns <= kNarrow);
    // Each thread takes as many rows, and where these are few the columns are divided too.
    const int64_t row_blocks = parts(parts(p.rows, kRows), threads) * threads;
    const int64_t rows = parts(parts(p.rows, row_blocks), kTileRows) * kTileRows;
    const int64_t groups = parts(p.rows, rows), chunks = parts(threads, groups);
    const bool summed = !kDirect && panels > 1;
    int64_t most = kColumns;
    if (summed && kSums / p.rows < most) most = kSums / p.rows < kSliver ? kSliver : kSums / p.rows;
    const int64_t width = parts(parts(p.columns, parts(p.columns, most)), kUnit) * kUnit;
    const int64_t own = left_size(rows) + rows * kSliver;
    const int64_t fitting = kPacked / (depth * width);
    const int64_t at_once = fitting > 0 ? minimum(panels, fitting) : 1;
    const int64_t common = at_once * depth * width + (summed ? p.rows * width : 0);
    float* const shared = scratch(static_cast<size_t>(common + own));
    auto* const packed_b = reinterpret_cast<Element*>(shared);
    float* const sums = shared + at_once * depth * width;
    bool out_of_memory = shared == nullptr;
    const int64_t blocks = groups * chunks;
    std::atomic<int64_t> taken{0};                                 // blocks of all panels
    std::vector<int32_t> multiplied(static_cast<size_t>(blocks));  // panels of each block
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      float* const mine =
          omp_get_thread_num() == 0 ? shared + common : scratch(static_cast<size_t>(own));
      auto* const packed_a = reinterpret_cast<Element*>(mine);
      float* const edge = mine + left_size(rows);
      Prefetcher next;
      next.clear();
      int64_t take = taken++, done = 0;
      if (mine == nullptr) {
#pragma omp atomic write
        out_of_memory = true;
      }
#pragma omp barrier
      for (int64_t first = 0; first < p.columns && !out_of_memory; first += width) {
        const int64_t columns = minimum(width, p.columns - first);
        const int64_t slivers = parts(columns, kSliver), units = parts(columns, kUnit);
        for (int64_t from = 0; from < panels; from += at_once) {
          const int64_t to = minimum(from + at_once, panels);
#pragma omp for schedule(dynamic)
          for (int64_t i = 0; i < (to - from) * units; ++i) {
            const int64_t panel = from + i / units, column = i % units * kUnit;
            pack_b(panel, first + column, minimum(kUnit, columns - column),
                   packed_b + (panel - from) * depth * width +
                       column * parts(steps_of(panel), Math::kStep));
          }
          while (take < done + (to - from) * blocks) {
            const int64_t i = take % blocks;
            const auto before = static_cast<int32_t>(take / blocks);
            const int64_t panel = from + (take - done) / blocks;
            const int64_t row = i / chunks * rows, chunk = i % chunks;
            take = taken++;
            const int64_t after = take - done;
            const Block block{row,
                              minimum(rows, p.rows - row),
                              chunk * slivers / chunks,
                              (chunk + 1) * slivers / chunks,
                              first,
                              columns,
                              parts(steps_of(panel), Math::kStep),
                              panel == 0,
                              panel == panels - 1,
                              true};
            if (block.sliver < block.end) {
              Left a;
              if constexpr (kFloats) a = {of_a(panel, row), p.a_row, true};
              if (!in_place) a = pack_a(panel, row, block.rows, packed_a);
              wait_until(&multiplied[i], before);
              multiply(block, a, packed_b + (panel - from) * depth * width, sums, width, edge, next,
                       [&] {
                         next.clear();
                         const int64_t then = from + after / blocks;
                         const int64_t at = after % blocks / chunks * rows;
                         if (then < panels) list_a(next, then, at, minimum(rows, p.rows - at));
                       });
            }
            set_counter(&multiplied[i], before + 1);
          }
          done += (to - from) * blocks;
#pragma omp barrier
        }
      }
    }
    if (out_of_memory) throw_out_of_memory(static_cast<size_t>(common + own));
  }
};

int64_t threads_for(const ProductParams& p) {
  const double work = static_cast<double>(p.rows) * static_cast<double>(p.columns * p.depth);
  return work < kParallelFrom ? 1 : omp_get_max_threads();
}

template <class Math>
void product_of_bf16(const ProductParams& p) {
  if (p.c_dtype == DType::kFloat32) {
    Product<Math, BFloat16, float>{p, threads_for(p)}.run();
  } else {
    Product<Math, BFloat16, BFloat16>{p, threads_for(p)}.run();
  }
}

}  // namespace

#if defined(VLMK_PAIRS)
void product_by_dots(const ProductParams& p) { product_of_bf16<Bf16Pairs>(p); }
#else
void product_in_float32(const ProductParams& p) {
  if (p.dtype == DType::kBFloat16) return product_of_bf16<Fp32>(p);
  Product<Fp32, float, float>{p, threads_for(p)}.run();
}
#endif

}  // namespace vlmk::VLMK_ISA
