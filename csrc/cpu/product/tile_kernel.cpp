// Products on AMX tiles (cpu/tile.h), of bf16 and, by parts (cpu/parts.h), of float32.
//
// Each thread has some of C's rows and columns, and packs what it multiplies: lines that another
// core has written arrive slowly. Operands are packed as tiles, two tiles' rows or columns, a
// strip, behind the other. Within a block of C a part of the depth comes after the other, so that
// its sums and what it reads of A stay in the second-level cache. Sums are float32, in the same
// order for any number of threads.
#include <omp.h>

#include <cstdint>
#include <type_traits>

#include "cpu/gemm.h"
#include "cpu/product/product.h"
#include "cpu/scratch.h"

#if defined(VLMK_TILES)
#include "cpu/parts.h"
#include "cpu/tile.h"

namespace vlmk::VLMK_ISA {
namespace {

constexpr int64_t kStrip = 2 * kTile;          // rows of A or columns of B
constexpr int64_t kStep = 2 * kTile;           // elements of the depth that a tile has
constexpr int64_t kTileWords = kTile * kStep;  // 16-bit words of a tile
constexpr int64_t kBlock = 1 << 20;            // bytes of A that a block of C takes at a time
constexpr int64_t kRows = 8, kColumns = 16;    // strips of a block of C, at most
constexpr int64_t kSums = kStrip * kStrip;     // of two strips
constexpr int64_t kPacked = 8 << 20;           // bytes of B packed at a time, at most
constexpr int64_t kStreamed = 4 << 20;         // bytes of C from which it goes past the caches
constexpr double kParallelFrom = 1 << 20;      // multiply-adds

VLMK_INLINE int64_t divided(int64_t n, int64_t by) { return (n + by - 1) / by; }

// ---- operands

VLMK_INLINE void store_tile(Vec (&rows)[kTile], bool transposed, uint16_t* to) {
  if (transposed) transpose(rows);  // mutant: pack-transposed
  for (int j = 0; j < kTile; ++j) store(reinterpret_cast<float*>(to + j * kStep), rows[j]);
}

// 16 rows of 32 floats, `present` and `left` of them there, as a tile of each part, pairs along a
// row, a row in a lane.
VLMK_INLINE void pack_rows_as_pairs(const float* from, int64_t item, int64_t present, int64_t left,
                                    uint16_t* to) {
  for (int half = 0; half < 2; ++half, from += kWidth, left -= kWidth) {
    const auto mask = static_cast<__mmask16>(left > 0 ? first_words(left) : 0);
    Vec r[kTile];
    for (int64_t j = 0; j < kTile; ++j) {
      r[j] = j < present ? _mm512_maskz_loadu_ps(mask, from + j * item) : set1(0.f);
    }
    transpose_to_pairs(r, [&](int j, const auto& parts) __attribute__((always_inline)) {
      uint16_t* const row = to + (half * kTile / 2 + j) * kStep;
      for (int i = 0; i < 3; ++i) _mm512_storeu_si512(row + 2 * i * kTileWords, parts[i]);
    });
  }
}

// A strip: element (i, k) of [n, depth] lies at from[i * item + k * step], one of them being 1. In
// `to` for every 32 of the depth the two tiles of each part; a tile has an item in a row (A's), or
// pairs of the depth, an item in a lane (B's). Zeros behind n and the depth.
template <class In, bool kLeft>
VLMK_NOINLINE void pack(const In* from, int64_t item, int64_t step, int64_t n, int64_t depth,
                        uint16_t* to) {
  constexpr int kCount = Parts<In>::kCount;
  for (int64_t k = 0; k < depth; k += kStep, to += 2 * kCount * kTileWords) {
    const int64_t left = depth - k;
    for (int64_t tile = 0; tile < 2; ++tile) {
      const int64_t first = tile * kTile, present = minimum(kTile, n - first);
      if constexpr (kCount == 3 && !kLeft) {
        if (step == 1) {
          pack_rows_as_pairs(from + first * item + k, item, present, left, to + tile * kTileWords);
          continue;
        }
      }
      Vec rows[kCount][kTile];
      __m512i parts[kCount];
      for (int64_t j = 0; j < kTile; ++j) {
        if (step == 1) {
          Parts<In>::load(from + (first + (j < present ? j : 0)) * item + k,
                          j < present ? first_words(left) : 0, parts);
        } else {
          const In* const even = from + first * item + (k + 2 * j) * step;
          if (present > 0 && 2 * j < left) {
            Parts<In>::load_pairs(even, 2 * j + 1 < left ? even + step : nullptr,
                                  static_cast<__mmask16>(first_words(present)), parts);
          } else {
            for (__m512i& part : parts) part = _mm512_setzero_si512();
          }
        }
        for (int i = 0; i < kCount; ++i) rows[i][j] = _mm512_castsi512_ps(parts[i]);
      }
      for (int i = 0; i < kCount; ++i) {
        store_tile(rows[i], kLeft != (step == 1), to + (2 * i + tile) * kTileWords);
      }
    }
  }
}

// ---- products

template <int kPart>
VLMK_INLINE void load_left(const uint16_t* step) {
  tile_load<4>(step + 2 * kPart * kTileWords, 2 * kStep);
  tile_load<5>(step + (2 * kPart + 1) * kTileWords, 2 * kStep);
}
template <int kPart>
VLMK_INLINE void load_right(const uint16_t* step) {
  tile_load<6>(step + 2 * kPart * kTileWords, 2 * kStep);
  tile_load<7>(step + (2 * kPart + 1) * kTileWords, 2 * kStep);
}
VLMK_INLINE void dot() {
  tile_dot<BFloat16, 0, 4, 6>();
  tile_dot<BFloat16, 1, 4, 7>();
  tile_dot<BFloat16, 2, 5, 6>();
  tile_dot<BFloat16, 3, 5, 7>();
}

// Sums of two strips, four tiles: `steps` times 32 of the depth added to `from`, or to 0. After
// each step beside(step) for the vectors to do meanwhile.
template <int kCount, class Beside>
VLMK_INLINE void multiply(const uint16_t* a, const uint16_t* b, int64_t steps, const float* from,
                          float* to, const Beside& beside) {
  constexpr int64_t kTileSums = kTile * kTile;
  if (from == nullptr) {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  } else {
    tile_load<0>(from, 64);
    tile_load<1>(from + kTileSums, 64);
    tile_load<2>(from + 2 * kTileSums, 64);
    tile_load<3>(from + 3 * kTileSums, 64);
  }
  for (int64_t s = 0; s < steps; ++s) {
    load_left<0>(a);
    load_right<0>(b);
    dot();
    if constexpr (kCount == 3) {  // the other pairs, each with a part of the one before it
      load_left<2>(a);            // mutant: parts-20
      dot();
      load_left<1>(a);  // mutant: parts-10
      dot();
      load_right<1>(b);  // mutant: parts-11
      dot();
      load_left<0>(a);  // mutant: parts-01
      dot();
      load_right<2>(b);  // mutant: parts-02
      dot();
    }
    a += 2 * kCount * kTileWords;
    b += 2 * kCount * kTileWords;
    beside(s);
  }
  tile_store<0>(to, 64);
  tile_store<1>(to + kTileSums, 64);
  tile_store<2>(to + 2 * kTileSums, 64);
  tile_store<3>(to + 3 * kTileSums, 64);
}

struct Range {
  int64_t first, end;
};
// Of `of` nearly equal parts of n.
VLMK_INLINE Range part(int64_t n, int64_t i, int64_t of) { return {n * i / of, n * (i + 1) / of}; }

template <class In, class Out>
struct Product {
  static constexpr int kCount = Parts<In>::kCount;
  static constexpr int64_t kStepWords = 2 * kCount * kTileWords;
  static constexpr int64_t kSteps = kBlock / (2 * kRows * kStepWords);  // of 32, at a time
  static constexpr bool kDirect = std::is_same_v<Out, float>;           // C adds up the panels
  static constexpr int64_t kOutBytes = sizeof(Out);

  const ProductParams& p;
  const int64_t row_strips = divided(p.rows, kStrip), column_strips = divided(p.columns, kStrip);
  const int64_t panels = kDirect ? divided(p.depth, kSteps* kStep) : 1;
  const int64_t steps = divided(divided(p.depth, kStep), panels);  // of a panel
  const int64_t words = steps * kStepWords;                        // of a strip
  // Whether strips of C go past the caches, which would read each line first (results from memory:
  // 1.1 to 1.9x). What is added to is read anyway.
  const bool streams = !p.add && panels == 1 && p.rows * p.c_row * kOutBytes >= kStreamed &&
                       p.c_row * kOutBytes % 64 == 0 && reinterpret_cast<uintptr_t>(p.c) % 64 == 0;

  // Sums of two strips, from (row, column) of C on.
  struct Sums {
    const float* at;
    int64_t row, column;
  };

  // Rows `which` of them to C.
  VLMK_MEMBER void finish(const Sums& sums, Range which, bool add, bool bias) const {
    const int64_t end = minimum(which.end, p.rows - sums.row);
    for (int64_t i = which.first; i < end; ++i) {
      Out* const c = static_cast<Out*>(p.c) + (sums.row + i) * p.c_row;
      for (int64_t tile = 0; tile < 2; ++tile) {
        const int64_t j = sums.column + tile * kTile;
        const int lanes = static_cast<int>(minimum(kTile, p.columns - j));
        if (lanes <= 0) break;
        Vec sum = load(sums.at + ((i / kTile * 2 + tile) * kTile + i % kTile) * kTile);
        if (add) sum = sum + load_first(c + j, lanes);  // mutant: finish-add
        if (bias) sum = sum + load_first(static_cast<const Out*>(p.bias) + j, lanes);
        const bool past = streams && lanes == kTile;  // mutant: finish-stream
        if (past) {
          stream(c + j, sum);
        } else {
          store_first(c + j, sum, lanes);
        }
      }
    }
  }

  // A block of C, of packed strips. Sums go to C while the next ones are made.
  void multiply_block(const uint16_t* a, const uint16_t* b, int64_t panel, int64_t panel_steps,
                      Range rows, Range columns, float* sums) const {
    const bool add = p.add || panel > 0;                // mutant: panel-add
    const bool bias = p.bias != nullptr && panel == 0;  // mutant: panel-bias
    const int64_t depth = divided(panel_steps, divided(panel_steps, kSteps));
    const int64_t lines = divided(kStepWords / 32, rows.end - rows.first);
    float* const result = sums + kRows * kColumns * kSums;  // of the depth's last part
    Sums done{result, p.rows, 0};
    for (int64_t from = 0; from < panel_steps; from += depth) {
      const int64_t n = minimum(depth, panel_steps - from);
      float* kept = sums;
      for (int64_t j = columns.first; j < columns.end; ++j) {
        for (int64_t i = rows.first; i < rows.end; ++i, kept += kSums) {
          const uint16_t* const left = a + (i - rows.first) * words + from * kStepWords;
          const uint16_t* const right = b + (j - columns.first) * words + from * kStepWords;
          const float* const before = from > 0 ? kept : nullptr;  // mutant: depth-sums
          // A share of the strip after this one of B, which every strip of A is multiplied with.
          const uint16_t* const coming = right + words + (i - rows.first) * n * lines * 32;
          const auto fetch = [&](int64_t s) {
            for (int64_t line = 0; line < lines; ++line) {
              __builtin_prefetch(coming + (s * lines + line) * 32, 0, 2);
            }
          };
          if (from + n < panel_steps) {
            multiply<kCount>(left, right, n, before, kept, fetch);
            continue;
          }
          multiply<kCount>(left, right, n, before, result, [&](int64_t s) {
            fetch(s);
            finish(done, part(kStrip, s, n), add, bias);
          });
          done = {result, i * kStrip, j * kStrip};
        }
      }
    }
    finish(done, {0, kStrip}, add, bias);
  }

  // Strips of rows and columns of C.
  void multiply_part(Range rows, Range columns, uint16_t* a, float* sums, uint16_t* b,
                     int64_t at_once) const {
    const auto* const from_a = static_cast<const In*>(p.a);
    const auto* const from_b = static_cast<const In*>(p.b);
    for (int64_t j = columns.first; j < columns.end; j += at_once) {
      const Range packed{j, minimum(j + at_once, columns.end)};
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t k = panel * steps * kStep, depth = minimum(steps * kStep, p.depth - k);
        for (int64_t s = packed.first; s < packed.end; ++s) {
          const int64_t first = s * kStrip;
          pack<In, false>(from_b + first * p.b_column + k * p.b_row, p.b_column, p.b_row,
                          minimum(kStrip, p.columns - first), depth, b + (s - j) * words);
        }
        for (int64_t i = rows.first; i < rows.end; i += kRows) {
          const Range block{i, minimum(i + kRows, rows.end)};
          for (int64_t s = block.first; s < block.end; ++s) {
            const int64_t first = s * kStrip;
            pack<In, true>(from_a + first * p.a_row + k * p.a_column, p.a_row, p.a_column,
                           minimum(kStrip, p.rows - first), depth, a + (s - i) * words);
          }
          for (int64_t s = j; s < packed.end; s += kColumns) {
            multiply_block(a, b + (s - j) * words, panel, divided(depth, kStep), block,
                           {s, minimum(s + kColumns, packed.end)}, sums);
          }
        }
      }
    }
  }

  void run() const {
    const double work = static_cast<double>(p.rows) * static_cast<double>(p.columns * p.depth);
    const int64_t threads = work < kParallelFrom ? 1 : omp_get_max_threads();
    // Into how many parts rows are divided, columns into threads / down. Packing a strip takes as
    // long as multiplying about three pairs.
    const auto time = [&](int64_t parts) {
      const int64_t r = divided(row_strips, parts), c = divided(column_strips, threads / parts);
      return r * c + 3 * (r + c);
    };
    int64_t down = 1;
    for (int64_t n = 2; n <= threads; ++n) {
      if (threads % n == 0 && time(n) < time(down)) down = n;
    }
    const int64_t across = threads / down, strips = divided(column_strips, across);
    const int64_t most = kPacked / (2 * words) > 0 ? kPacked / (2 * words) : 1;
    const int64_t at_once = divided(strips, divided(strips, most));
    const int64_t floats = (kRows + at_once) * words / 2 + (kRows * kColumns + 1) * kSums;
    bool out_of_memory = false;
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static, 1)
    for (int64_t i = 0; i < threads; ++i) {
      float* const sums = scratch(static_cast<size_t>(floats));
      if (sums == nullptr) {
#pragma omp atomic write
        out_of_memory = true;
        continue;
      }
      const TileScope tiles;
      auto* const a = reinterpret_cast<uint16_t*>(sums + (kRows * kColumns + 1) * kSums);
      multiply_part(part(row_strips, i / across, down), part(column_strips, i % across, across), a,
                    sums, a + kRows * words, at_once);
      if (streams) fence_streams();
    }
    if (out_of_memory) throw_out_of_memory(static_cast<size_t>(floats));
  }
};

}  // namespace

void product_on_tiles(const ProductParams& p) {
  if (p.dtype == DType::kFloat32) return Product<float, float>{p}.run();
  if (p.c_dtype == DType::kFloat32) return Product<BFloat16, float>{p}.run();
  Product<BFloat16, BFloat16>{p}.run();
}

}  // namespace vlmk::VLMK_ISA
#endif
