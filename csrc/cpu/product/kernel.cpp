// A product as Goto and van de Geijn divide it (doi 10.1145/1356052.1356053), compiled once per
// instruction set (dispatch.h): of each kDepth elements of the depth, B's columns are packed in
// slivers as wide as a tile and A's rows in blocks, so that a sliver and a block lie in the
// second-level cache, and the next sliver and the next block's rows are fetched there. With
// AVX-512, and of a narrow B with AVX2, dense rows of A that need no conversion are read where they
// lie. With AVX2 a sliver stays in a first-level cache of 32 KB, and beside it what a tile reads of
// A: hence a smaller depth, and columns of A packed a tile's rows at a time. Dense rows that are
// packed as float32 are packed row by row.
//
// What the threads divide, run() says: ranges of A's rows, each thread packing for itself, where
// there are many; else A's rows, or B's columns, and what is not divided is packed for all. In that
// case some panels of B are packed at once, and a thread takes blocks of its own range one by one,
// all these panels of each: C's part stays in its cache, and no thread waits at the end of a panel
// for another that is slower. A block's panels are added in their order. float32 with AVX-512 is
// often multiplied without packing: in_place.inl.
//
// Sums are float32, of sums over a panel's depth, or parts of it, in their order, rounded once: the
// number of threads changes no bit.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/product/in_place.inl"
#include "cpu/product/pack.inl"
#include "cpu/product/product.h"
#include "cpu/product/result.inl"
#include "cpu/ranges.h"
#include "cpu/scratch.h"

namespace vlmk::VLMK_ISA {
namespace {

constexpr int64_t kDepth = kAvx2 ? 256 : 768;  // elements of a panel: a float, or two bf16 numbers
constexpr int64_t kChain = 384;  // of the depth, summed at once in float32; 768: twice MKL's error
constexpr int64_t kRows = 120;   // of A, 360 KB of 768 elements
constexpr int64_t kColumns = 4096;  // of B, 12 MB of 768 elements
constexpr int64_t kSums = 4 << 20;  // of C, 16 MB, where it is bf16 and has several panels
constexpr int64_t kFew = 256;       // rows of A up to which B is always divided
constexpr int64_t kNarrow = 512;    // columns up to which AVX2 gains by not packing A's dense rows
constexpr int64_t kShared = 1 << 18;  // elements of A, 1 MB, of which whole panels are packed then
// Columns packed at once; of dense rows of B see dense_unit().
constexpr int64_t kUnit = kAvx2 ? 4 * kSliver : kSliver;
constexpr int64_t kPacked = 3 << 20;  // floats of B, 12 MB, whole panels, packed at once
// Rows a thread from which divide_ranges() serves, and the same of a gradient (with AVX2 rows or
// columns).
constexpr int64_t kEnough = 600, kEnoughOfGradient = 64;
// Columns of B, all of the depth, that it packs at once: 4 MB of floats, but no fewer than kLeast,
// as AVX2 packs A's rows anew for each such strip (depth 8,960: 1.1x of 117 columns).
constexpr int64_t kStrip = 512, kLeast = kAvx2 ? 16 * kSliver : kSliver, kStripSize = 1 << 20;
// Elements of a gradient's panel, and with AVX2 rows of its blocks, 240 KB.
constexpr int64_t kGradientDepth = 256, kGradientRows = 240;
constexpr double kParallelFrom = kAvx2 ? 1 << 18 : 1 << 21;  // multiply-adds

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
  // Where tiles read a block of A: dense rows as rows lda apart, in place or packed, others by
  // columns, with AVX2 a tile's rows at a time.
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
  // dy^T x of few columns; in float32 with AVX-512 what ProductInPlace does not take gains nothing.
  const bool gradient = kDirect && (kAvx2 || Math::kStep == 2) && p.a_row == 1 && p.b_column == 1 &&
                        p.columns <= 2 * kStrip;
  const int64_t panels = parts(elements, gradient ? kGradientDepth : kDepth);
  const int64_t depth = parts(elements, panels);  // elements of a panel
  const int64_t panel_steps = depth * Math::kStep;
  const bool summed = !kDirect && panels > 1;  // results wait in memory for all panels
  const int64_t unit = kAvx2 || p.b_column != 1 ? kUnit : dense_unit();
  // Whether A's rows can be read where they lie.
  const bool in_place = sizeof(In) * Math::kStep == sizeof(Element) && p.a_column == 1 &&
                        p.a_row % Math::kStep == 0 && p.depth % Math::kStep == 0 &&
                        (!kAvx2 || p.columns <= kNarrow);

  // Columns of dense rows of B packed at once: longer pieces of rows lie on fewer pages.
  int64_t dense_unit() const {
    return std::clamp<int64_t>(p.columns / (6 * threads), kSliver, 4 * kSliver) / kSliver * kSliver;
  }

  const bool packs_rows = Math::kStep == 1 && p.a_column == 1;
  // Floats of a packed block of A, at most: odd_lines() adds up to 31.
  int64_t left_size(int64_t rows) const { return (depth + 32) * whole_vectors(rows); }

  Left pack_a(int64_t panel, int64_t row, int64_t rows, Element* to) const {
    const In* const from = of_a(panel, row);
    const int64_t steps = steps_of(panel);
    const Left packed = packed_left(panel, rows, to);
    if constexpr (Math::kStep == 1) {
      if (packs_rows) {
        pack_rows(from, p.a_row, rows, steps, to, packed.lda);
        return packed;
      }
    }
    if constexpr (kAvx2) {
      pack_tiles(from, p.a_column, rows, steps, to, packed.lda);
    } else {
      pack(from, p.a_row, p.a_column, rows, steps, to, packed.lda);
    }
    return packed;
  }
  Left left_in_place(int64_t panel, int64_t row) const {
    return {reinterpret_cast<const Element*>(of_a(panel, row)), p.a_row / Math::kStep, true};
  }
  Left packed_left(int64_t panel, int64_t rows, const Element* data) const {
    const int64_t steps = steps_of(panel);
    if (packs_rows) return {data, kAvx2 ? whole_vectors(steps) : odd_lines(steps), true};
    return {data, kAvx2 ? odd_lines(kTileRows * steps) : whole_vectors(rows), false};
  }

  void pack_b(int64_t panel, int64_t column, int64_t n, Element* to) const {
    const int64_t steps = steps_of(panel), packed = parts(steps, Math::kStep);
    int64_t done = 0;
    if (p.b_column == 1) {
      done = n / kSliver * kSliver;
      pack_slivers(of_b(panel, column), p.b_row, done, steps, to);
    }
    for (; done < n; done += kSliver) {
      const int64_t wide = minimum(kSliver, n - done);
      pack(of_b(panel, column + done), p.b_column, p.b_row, wide, steps, to + done * packed,
           whole_vectors(wide));
    }
  }

  // Sums go to g.c, or, not being null, to `leaves`.
  void multiply_sliver(const Left& a, GemmArgs<Math> g, ResultEpilogue<Out>* leaves,
                       Prefetcher& next) const {
    const auto multiply_rows = [&](bool by_rows) {
      if (leaves) {
        by_rows ? gemm<Math, false>(g, next, *leaves) : gemm<Math, true>(g, next, *leaves);
      } else {
        const WholeTiles none;
        by_rows ? gemm<Math, false>(g, next, none) : gemm<Math, true>(g, next, none);
      }
    };
    if constexpr (!kAvx2) {
      const int depth = g.depth;
      const auto chain = static_cast<int>(kFloats ? parts(depth, parts(depth, kChain)) : depth);
      for (int done = 0; done < depth; done += chain) {
        g.depth = static_cast<int>(minimum(chain, depth - done));
        multiply_rows(a.by_rows);
        g.a += chain * (a.by_rows ? 1 : g.lda);
        g.b += chain * g.ldb;
        g.add = Add::kC;
        if (leaves) {
          leaves->bias = nullptr;
          leaves->adds = true;
        }
      }
      return;
    }
    if (a.by_rows) return multiply_rows(true);
    const int rows = g.rows;
    g.lda = kTileRows;
    for (int row = 0; row < rows; row += kTileRows, g.a += a.lda, g.c += kTileRows * g.ldc) {
      g.rows = static_cast<int>(minimum(kTileRows, rows - row));
      multiply_rows(false);
      if (leaves) leaves->skip(kTileRows);
    }
  }

  // A's block times B's packed columns, while `next` is fetched: with block.fetches the next
  // sliver, and with the last one what list_next() names. Sums of bf16 results lie in `sums` [rows,
  // width] until the last panel.
  template <class ListNext>
  void multiply(const Block& block, const Left& a, const Element* b, float* sums, int64_t width,
                Prefetcher& next, const ListNext& list_next) const {
    GemmArgs<Math> g{};
    g.a = a.data;
    g.lda = a.lda;
    g.rows = static_cast<int>(block.rows);
    g.depth = static_cast<int>(block.depth);
    const bool adds = kDirect && (!block.begins || p.add);
    g.far = kDirect || !(block.begins && block.ends);
    for (int64_t sliver = block.sliver; sliver < block.end; ++sliver) {
      const int64_t column = sliver * kSliver, wide = minimum(kSliver, block.columns - column);
      const int64_t first = block.first + column;
      g.ldb = whole_vectors(wide);
      g.b = b + column * block.depth;
      g.vectors = static_cast<int>(g.ldb / kWidth);
      Out* const c = static_cast<Out*>(p.c) + block.row * p.c_row + first;
      ResultEpilogue<Out> result{c, p.c_row, wide, adds, width};
      if (p.bias != nullptr && (kDirect ? block.begins : block.ends)) {
        result.bias = static_cast<const Out*>(p.bias) + first;
      }
      bool leaves = wide != g.ldb;
      if constexpr (kDirect) {
        g.c = c;
        g.ldc = p.c_row;
        g.add = result.bias ? Add::kBias : adds ? Add::kC : Add::kNothing;
        g.bias = result.bias;
      } else {
        leaves = block.ends;
        g.ldc = width;
        g.add = block.begins ? Add::kNothing : Add::kC;
        if (!(block.begins && block.ends)) g.c = sums + block.row * width + column;
        if (!block.begins) result.sums = g.c;
      }
      if (sliver + 1 == block.end) {
        list_next();
      } else if (block.fetches) {
        const int64_t after = minimum(kSliver, block.columns - column - kSliver);
        next.clear();
        next.add(b + (column + kSliver) * block.depth, 0, 1,
                 whole_vectors(after) * block.depth * static_cast<int64_t>(sizeof(Element)));
      }
      multiply_sliver(a, g, leaves ? &result : nullptr, next);
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

  void list_b(Prefetcher& next, int64_t panel, int64_t column, int64_t columns) const {
    list_part(next, of_b(panel, column), columns, p.b_column, steps_of(panel), p.b_row);
  }
  void list_a(Prefetcher& next, int64_t panel, int64_t row, int64_t rows) const {
    list_part(next, of_a(panel, row), rows, p.a_row, steps_of(panel), p.a_column);
  }

  // Packing B waits for memory, with few rows as long as a quarter of the multiply-adds take: so a
  // thread packs some columns right before it multiplies them and fetches the next ones meanwhile.
  void divide_columns() const {
    const int64_t rows = parts(parts(p.rows, parts(p.rows, kRows)), kTileRows) * kTileRows;
    const int64_t groups = parts(p.rows, rows), units = parts(p.columns, unit);
    const int64_t block_size = left_size(rows);
    // Sums of bf16 results wait for all panels.
    const int64_t fitting = minimum(panels, parts(kShared, groups * block_size));
    const int64_t at_once = kDirect && !in_place ? fitting : panels;
    const int64_t common = in_place ? 0 : at_once * groups * block_size;
    const int64_t own = (depth + (summed ? p.rows : 0)) * unit;
    float* const shared = scratch(static_cast<size_t>(common + own));
    auto* const packed_a = reinterpret_cast<Element*>(shared);
    if (shared == nullptr) throw_out_of_memory(static_cast<size_t>(common + own));
    std::atomic<bool> out_of_memory{false};
    std::atomic<int64_t> taken{0};  // units, counted anew for each panels at once
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      float* const mine =
          omp_get_thread_num() == 0 ? shared + common : scratch(static_cast<size_t>(own));
      auto* const packed_b = reinterpret_cast<Element*>(mine);
      float* const sums = mine + depth * unit;
      if (mine == nullptr) out_of_memory = true;
      Prefetcher next;
      int64_t take = taken++, done = 0;
      for (int64_t from = 0; from < panels; from += at_once, done += units) {
        const int64_t to = minimum(from + at_once, panels);
        if (!in_place) {
#pragma omp for schedule(static)
          for (int64_t i = 0; i < (to - from) * groups; ++i) {
            const int64_t panel = from + i / groups, row = i % groups * rows;
            pack_a(panel, row, minimum(rows, p.rows - row), packed_a + i * block_size);
          }
        }
        // Behind a barrier all threads see the same; in place there is none for them to wait at.
        if (out_of_memory) break;
        while (take < done + units) {
          const int64_t column = (take - done) * unit;
          const int64_t wide = minimum(unit, p.columns - column);
          take = taken++;
          const int64_t after = (take - done) * unit;
          for (int64_t panel = from; panel < to; ++panel) {
            pack_b(panel, column, wide, packed_b);
            next.clear();
            for (int64_t i = 0; i < groups; ++i) {
              // With the last block: A's rows would drive it out of the cache again.
              if (i == groups - 1 && panel + 1 < to) {
                list_b(next, panel + 1, column, wide);
              } else if (i == groups - 1 && after < p.columns) {
                list_b(next, from, after, minimum(unit, p.columns - after));
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
              const Element* const packed = packed_a + ((panel - from) * groups + i) * block_size;
              multiply(block,
                       in_place ? left_in_place(panel, block.row)
                                : packed_left(panel, block.rows, packed),
                       packed_b, sums, unit, next, [] {});
            }
          }
        }
        if (to < panels) {
#pragma omp barrier
        }
      }
    }
    if (out_of_memory) throw_out_of_memory(static_cast<size_t>(common + own));
  }

  // What another core has packed arrives slowly where cores do not share their last cache. Of many
  // dense rows, and of a gradient with AVX-512, a thread packs all of B for itself, some columns at
  // a time, and multiplies its range of rows by them.
  void divide_ranges() const {
    const int64_t slivers = parts(p.columns, kSliver);
    const int64_t fitting = std::clamp<int64_t>(kStripSize / (panels * depth), kLeast, kStrip);
    const int64_t strips = parts(slivers, fitting / kSliver);
    const int64_t strip_size = panels * depth * parts(slivers, strips) * kSliver;
    const int64_t tiles = parts(p.rows, kTileRows);
    const int64_t group = parts(p.rows, threads * kRows), blocks = threads * group;
    const int64_t width = parts(slivers, strips) * kSliver;
    const int64_t block_size = in_place ? 0 : left_size(kRows);
    const int64_t own = strip_size + block_size + (summed ? kRows * width : 0);
    struct Item {
      int64_t strip, column, columns, row, rows;
    };
    // A thread's items are all its blocks of rows with one strip, then all with the next.
    const auto item_of = [&](int64_t i) {
      const int64_t strip = i / group % strips, block = i / (strips * group) * group + i % group;
      const int64_t column = strip * slivers / strips * kSliver;
      const int64_t right = minimum((strip + 1) * slivers / strips * kSliver, p.columns);
      const int64_t row = block * tiles / blocks * kTileRows;
      const int64_t bottom = minimum((block + 1) * tiles / blocks * kTileRows, p.rows);
      return Item{strip, column, right - column, row, bottom - row};
    };
    std::atomic<bool> out_of_memory{false};
    Ranges items(strips * blocks, threads);
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      const int thread = omp_get_thread_num();
      auto* const packed = reinterpret_cast<Element*>(scratch(static_cast<size_t>(own)));
      Element* const packed_a = packed + strip_size;
      auto* const sums = reinterpret_cast<float*>(packed_a) + block_size;
      if (packed == nullptr) out_of_memory = true;
      Prefetcher next;
      int64_t strip = -1;
      for (int64_t i; packed != nullptr && (i = items.take(thread)) >= 0;) {
        const Item item = item_of(i);
        const bool packs = item.strip != strip;
        strip = item.strip;
        const auto panel_of = [&](int64_t panel) { return packed + panel * depth * width; };
        const auto list_panel = [&](int64_t panel) {
          const int64_t elements =
              parts(steps_of(panel), Math::kStep) * whole_vectors(item.columns);
          next.add(panel_of(panel), 0, 1, elements * static_cast<int64_t>(sizeof(Element)));
        };
        for (int64_t panel = 0; panel < panels; ++panel) {
          if (packs) pack_b(panel, item.column, item.columns, panel_of(panel));
          next.clear();
          if (panel + 1 < panels) {
            list_a(next, panel + 1, item.row, item.rows);
            packs ? list_b(next, panel + 1, item.column, item.columns) : list_panel(panel + 1);
          } else if (const int64_t after = items.peek(thread); after >= 0) {
            const Item then = item_of(after);
            list_a(next, 0, then.row, then.rows);
            then.strip == strip ? list_panel(0) : list_b(next, 0, then.column, then.columns);
          }
          const Block block{item.row,
                            item.rows,
                            0,
                            parts(item.columns, kSliver),
                            item.column,
                            item.columns,
                            parts(steps_of(panel), Math::kStep),
                            panel == 0,
                            panel == panels - 1,
                            false};
          const Left a = in_place ? left_in_place(panel, item.row)
                                  : pack_a(panel, item.row, item.rows, packed_a);
          multiply(block, a, panel_of(panel), sums - item.row * width, width, next, [] {});
        }
      }
    }
    if (out_of_memory) throw_out_of_memory(static_cast<size_t>(own));
  }

  // dy^T x of few columns with AVX2. A thread packs a block of A, which stays in the second-level
  // cache, and of B a sliver at a time, right before it multiplies the block by it, from the
  // first-level cache. The next sliver and a part of A's next panel are fetched meanwhile.
  void divide_gradient() const {
    const int64_t slivers = parts(p.columns, kSliver), tiles = parts(p.rows, kTileRows);
    const auto packed = [](int64_t rows, int64_t columns) {
      return rows + columns * parts(rows, kGradientRows);
    };
    // What is divided: of which a thread has less to pack.
    const bool by_rows =
        packed(parts(p.rows, threads), p.columns) <= packed(p.rows, parts(p.columns, threads));
    const int64_t across = by_rows ? 1 : threads;
    const int64_t down =
        by_rows ? threads * parts(p.rows, threads * kGradientRows) : parts(p.rows, kGradientRows);
    const int64_t block_size = left_size(kGradientRows), own = block_size + depth * kSliver;
    std::atomic<bool> out_of_memory{false};
    Ranges items(across * down, threads);
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      const int thread = omp_get_thread_num();
      auto* const packed_a = reinterpret_cast<Element*>(scratch(static_cast<size_t>(own)));
      Element* const packed_b = packed_a + block_size;
      if (packed_a == nullptr) out_of_memory = true;
      Prefetcher next;
      for (int64_t i; packed_a != nullptr && (i = items.take(thread)) >= 0;) {
        const int64_t x = i / down, y = i % down;
        const int64_t row = y * tiles / down * kTileRows;
        const int64_t rows = minimum((y + 1) * tiles / down * kTileRows, p.rows) - row;
        const int64_t begin = x * slivers / across, end = (x + 1) * slivers / across;
        const auto wide = [&](int64_t sliver) {
          return minimum(kSliver, p.columns - sliver * kSliver);
        };
        for (int64_t panel = 0; panel < panels; ++panel) {
          const Left a = pack_a(panel, row, rows, packed_a);
          for (int64_t sliver = begin; sliver < end; ++sliver) {
            const int64_t column = sliver * kSliver;
            pack_b(panel, column, wide(sliver), packed_b);
            next.clear();
            if (sliver + 1 < end) {
              list_b(next, panel, column + kSliver, wide(sliver + 1));
            } else if (panel + 1 < panels) {
              list_b(next, panel + 1, begin * kSliver, wide(begin));
            }
            if (panel + 1 < panels) {
              const int64_t steps = steps_of(panel + 1), n = end - begin, at = sliver - begin;
              const int64_t from = at * steps / n, to = (at + 1) * steps / n;
              const In* const then = of_a(panel + 1, row) + from * p.a_column;
              list_part(next, then, rows, p.a_row, to - from, p.a_column);
            }
            const Block block{row,
                              rows,
                              0,
                              1,
                              column,
                              wide(sliver),
                              parts(steps_of(panel), Math::kStep),
                              panel == 0,
                              panel == panels - 1,
                              false};
            multiply(block, a, packed_b, nullptr, 0, next, [] {});
          }
        }
      }
    }
    if (out_of_memory) throw_out_of_memory(static_cast<size_t>(own));
  }

  void run() const {
    if (kAvx2 && gradient && threads > 1 &&
        std::max(p.rows, p.columns) >= kEnoughOfGradient * threads) {
      return divide_gradient();
    }
    const bool many = (in_place || (kAvx2 && p.a_column == 1)) && p.rows >= kEnough * threads;
    if (threads > 1 && (many || (gradient && p.rows >= kEnoughOfGradient * threads))) {
      return divide_ranges();
    }
    const bool enough = p.columns >= 4 * threads * kUnit;
    // Few rows for what it costs to read A again, or to pack all of it first.
    const bool few = p.rows <= kFew || (!kAvx2 && (in_place || 3 * p.rows <= p.columns));
    // Of each row divide_columns() keeps sums, or, packed, all of A where results wait for it.
    const int64_t kept = in_place ? (summed ? unit : 0) : (kDirect ? 0 : p.depth);
    const bool fits = p.rows * kept <= kSums;
    few && enough && fits ? divide_columns() : divide_rows();
  }

  void divide_rows() const {
    // Each thread takes as many rows, and where these are few the columns are divided too: in more
    // parts than threads if A isn't packed again for each, as one core may be slower than another.
    const int64_t row_blocks = parts(parts(p.rows, kRows), threads) * threads;
    const int64_t rows = parts(parts(p.rows, row_blocks), kTileRows) * kTileRows;
    const int64_t groups = parts(p.rows, rows);
    const int64_t chunks = parts(in_place && threads > 1 ? 4 * threads : threads, groups);
    int64_t most = kColumns;
    if (summed && kSums / p.rows < most) most = kSums / p.rows < kSliver ? kSliver : kSums / p.rows;
    const int64_t width = parts(parts(p.columns, parts(p.columns, most)), unit) * unit;
    const int64_t own = left_size(rows);
    const int64_t fitting = kPacked / (depth * width);
    const int64_t at_once = fitting > 0 ? minimum(panels, fitting) : 1;
    const int64_t common = at_once * depth * width + (summed ? p.rows * width : 0);
    float* const shared = scratch(static_cast<size_t>(common + own));
    auto* const packed_b = reinterpret_cast<Element*>(shared);
    float* const sums = shared + at_once * depth * width;
    if (shared == nullptr) throw_out_of_memory(static_cast<size_t>(common + own));
    std::atomic<bool> out_of_memory{false};
    const int64_t blocks = groups * chunks;
    std::vector<Ranges> ranges;  // of blocks, for each panels at once of each width
    for (int64_t i = parts(p.columns, width) * parts(panels, at_once); i > 0; --i) {
      ranges.emplace_back(blocks, threads);
    }
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      const int thread = omp_get_thread_num();
      float* const mine = thread == 0 ? shared + common : scratch(static_cast<size_t>(own));
      auto* const packed_a = reinterpret_cast<Element*>(mine);
      Prefetcher next;
      next.clear();
      auto items = ranges.begin();
      if (mine == nullptr) out_of_memory = true;
      bool stops = false;
      for (int64_t first = 0; first < p.columns && !stops; first += width) {
        const int64_t columns = minimum(width, p.columns - first);
        const int64_t slivers = parts(columns, kSliver), units = parts(columns, unit);
        for (int64_t from = 0; from < panels && !stops; from += at_once, ++items) {
          const int64_t to = minimum(from + at_once, panels);
#pragma omp for schedule(dynamic)
          for (int64_t i = 0; i < (to - from) * units; ++i) {
            const int64_t panel = from + i / units, column = i % units * unit;
            pack_b(panel, first + column, minimum(unit, columns - column),
                   packed_b + (panel - from) * depth * width +
                       column * parts(steps_of(panel), Math::kStep));
          }
          stops = out_of_memory;  // the same for all threads: they have met behind the packing
          // A thread takes a block's panels one after the other, while C's part is in its cache.
          for (int64_t i; !stops && (i = items->take(thread)) >= 0;) {
            const int64_t row = i / chunks * rows, chunk = i % chunks;
            const int64_t after = items->peek(thread);
            for (int64_t panel = from; panel < to; ++panel) {
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
              if (block.sliver == block.end) continue;
              const Left a =
                  in_place ? left_in_place(panel, row) : pack_a(panel, row, block.rows, packed_a);
              multiply(block, a, packed_b + (panel - from) * depth * width, sums, width, next, [&] {
                next.clear();
                const bool ends = panel + 1 == to;
                const int64_t then = ends ? after / chunks * rows : row;
                if (!ends || after >= 0) {
                  list_a(next, ends ? from : panel + 1, then, minimum(rows, p.rows - then));
                }
              });
            }
          }
          if (to < panels || first + width < p.columns) {
#pragma omp barrier
          }
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
  if (ProductInPlace::takes(p)) return ProductInPlace{p, threads_for(p)}.run();
  Product<Fp32, float, float>{p, threads_for(p)}.run();
}
#endif

}  // namespace vlmk::VLMK_ISA
