// The library of test_tiles.py: a product on tiles, and attention and products of matrices of these
// kernels alone.
#include "cpu/attention/attention.h"
#include "cpu/product/product.h"
#include "cpu/scratch.h"
#include "cpu/tile.h"

extern "C" {
int mutant = 0;  // the number of the one that is on

// c [16, 16] += a [16, 16 pairs] b [16 pairs, 16], rows that many bytes apart; or = with from_zero.
// What the processor's floating point mode is afterwards.
unsigned tile_product(const void* a, ptrdiff_t a_row, const void* b, ptrdiff_t b_row, float* c,
                      ptrdiff_t c_row, bool from_zero, bool fp16) {
  using namespace vlmk::VLMK_ISA;
  const TileScope tiles;
  if (from_zero) {
    tile_zero<3>();
  } else {
    tile_load<3>(c, c_row);
  }
  tile_load<5>(a, a_row);
  tile_load<7>(b, b_row);
  if (fp16) {
    tile_dot<vlmk::Float16, 3, 5, 7>();
  } else {
    tile_dot<vlmk::BFloat16, 3, 5, 7>();
  }
  tile_store<3>(c, c_row);
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x1f80);  // a mutant's would stay in the process
  return mode;
}

#ifdef VLMK_WITH_KERNELS
void poison_scratch(bool on) { vlmk::poison_scratch(on); }
void attention_forward(const vlmk::AttentionParams& p) { vlmk::attention_forward(p); }
void attention_backward(const vlmk::AttentionGradParams& p) { vlmk::attention_backward(p); }
void matrix_product(const vlmk::ProductParams& p) { vlmk::VLMK_ISA::product_on_tiles(p); }
#endif
}

#ifdef VLMK_WITH_KERNELS
namespace vlmk {

Isa active_isa() { return Isa::VLMK_TEST_ISA; }
bool uses_bf16_dots() { return true; }
bool is_amd() { return false; }
bool is_zen4() { return false; }
bool isa_is_forced() { return true; }
bool tiles_multiply_fp16() { return true; }

// Other instruction sets, which nothing here asks for.
#define VLMK_MISSING(isa)                                                                          \
  namespace isa {                                                                                  \
  void attention_forward_items(const AttentionParams&, const AttentionWork&) { __builtin_trap(); } \
  void attention_backward_items(const AttentionGradParams&, const AttentionWork&) {                \
    __builtin_trap();                                                                              \
  }                                                                                                \
  }
VLMK_MISSING(generic)
VLMK_MISSING(avx512)

}  // namespace vlmk
#endif
