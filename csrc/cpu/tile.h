// The tile instructions of AMX-BF16 and AMX-FP16; where the compiler may not use them (no
// __AMX_BF16__), functions of the same names that compute the same bits, so that tests run the
// kernels on any machine with AVX-512. Eight registers of 16 rows of 64 bytes, all of them always
// whole: rows of 16 floats, or of 16 pairs of bf16 or fp16. Included inside an ISA translation
// unit.
//
// asm instead of the compiler's intrinsics: GCC's _tile_loadd doesn't say that it reads memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/simd.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

constexpr int kTile = 16;  // rows of a tile, and 32-bit elements of a row

// What ldtilecfg reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if defined(__AMX_BF16__)

VLMK_INLINE void tile_configure() {
  const TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
VLMK_INLINE void tile_release() { asm volatile("tilerelease"); }
template <int kRegister>
VLMK_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}
template <int kRegister>
VLMK_INLINE void tile_load(const void* rows, ptrdiff_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(row_bytes), "i"(kRegister)
               : "memory");
}
template <int kRegister>
VLMK_INLINE void tile_store(void* rows, ptrdiff_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(row_bytes), "i"(kRegister)
               : "memory");
}
// C [16, 16] += A [16, 16 pairs] B [16 pairs, 16], pairs of T.
template <class T, int kC, int kA, int kB>
VLMK_INLINE void tile_dot() {
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  } else {  // tdpfp16ps, which assemblers know since binutils 2.40
    asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"((15 - kB) << 3 | 3),
                 "i"(0xc0 | kC << 3 | kA));
  }
}

#else

struct TileState {
  bool configured;
  alignas(64) float rows[8][kTile][kTile];
};
static thread_local TileState tile_state;  // of this thread, as the registers are

// An instruction on tiles without a configuration is an illegal one.
VLMK_INLINE float (*tile_register(int number)) [kTile] {
  if (!tile_state.configured) __builtin_trap();
  return tile_state.rows[number];
} VLMK_INLINE void tile_configure() {
  std::memset(&tile_state, 0, sizeof tile_state);
  tile_state.configured = true;
}
VLMK_INLINE void tile_release() { tile_state.configured = false; }
template <int kRegister>
VLMK_INLINE void tile_zero() {
  std::memset(tile_register(kRegister), 0, sizeof tile_state.rows[kRegister]);
}
template <int kRegister>
VLMK_NOINLINE void tile_load(const void* rows, ptrdiff_t row_bytes) {
  for (int i = 0; i < kTile; ++i) {
    const void* row = static_cast<const char*>(rows) + i * row_bytes;  // mutant: tile-load-row
    std::memcpy(tile_register(kRegister)[i], row, 64);
  }
}
template <int kRegister>
VLMK_NOINLINE void tile_store(void* rows, ptrdiff_t row_bytes) {
  for (int i = 0; i < kTile; ++i) {
    void* row = static_cast<char*>(rows) + i * row_bytes;  // mutant: tile-store-row
    std::memcpy(row, tile_register(kRegister)[i], 64);
  }
}
// Of each pair, the lower elements and the upper ones are two chains of FMAs from 0, whose sum is
// added to C: rounding to nearest even, denormals read and written as 0, whatever MXCSR says, but
// for those of fp16, which are read as they are (Intel 64 and IA-32 Architectures Software
// Developer's Manual, TDPBF16PS and TDPFP16PS).
template <class T, int kC, int kA, int kB>
VLMK_NOINLINE void tile_dot() {
  constexpr unsigned kMasked = 0x1f80, kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
  float (*c)[kTile] = tile_register(kC);
  const float (*a)[kTile] = tile_register(kA), (*b)[kTile] = tile_register(kB);
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(kMasked | kFlushToZero | kDenormalsAreZero);  // mutant: tile-dot-mode
  asm volatile("" ::: "memory");  // no arithmetic before this or after the next one
  for (int i = 0; i < kTile; ++i) {
    Vec low = set1(0.f), high = set1(0.f);
    for (int k = 0; k < kTile; ++k) {
      const __m512i x = _mm512_castps_si512(set1(a[i][k])), y = _mm512_castps_si512(load(b[k]));
      low = fma(lower(x, T{}), lower(y, T{}), low);
      high = fma(upper(x, T{}), upper(y, T{}), high);  // mutant: tile-dot-fma
    }
    store(c[i], load(c[i]) + (low + high));  // mutant: tile-dot-sum
  }
  asm volatile("" ::: "memory");
  _mm_setcsr(mode);  // mutant: tile-dot-restore
}

#endif

// This thread's tiles while the object lives. Afterwards they are as they were at first, so that
// the kernel saves none and other libraries find none.
struct TileScope {
  TileScope() { tile_configure(); }
  ~TileScope() { tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
