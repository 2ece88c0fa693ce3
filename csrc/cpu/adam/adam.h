// One Adam or AdamW step over many tensors, in place.
// Method: Kingma & Ba 2015 (arXiv:1412.6980), Loshchilov & Hutter 2019 (arXiv:1711.05101), in the
// operation order of torch.optim.AdamW(fused=True), to which the results are bit-identical with
// AVX2 and AVX-512.
#pragma once
#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

constexpr int64_t kMomentBlock = 256;  // elements whose 8-bit moments share a scale

// A chunk of one tensor: elements [begin, end), begin a multiple of 32, of kMomentBlock with 8-bit
// moments.
struct AdamChunk {
  const AdamTensor* tensor;
  int64_t begin;
  int64_t end;
  bool stream;              // write the low-precision copy by non-temporal stores
  const AdamTensor* after;  // whose first elements the thread steps then, or null
};

// What a step takes of its settings and its number, as torch: computed in double, rounded once.
struct AdamConstants {
  float decay;       // 1 - lr * weight_decay, AdamW
  float l2;          // weight_decay, Adam
  float beta1_rest;  // 1 - beta1
  float beta2;
  float beta2_rest;   // 1 - beta2
  float correction2;  // sqrt(1 - beta2^step)
  float eps;
  float negative_step;  // -lr / (1 - beta1^step)
  float grad_factor;
  float grad_scale;
  bool scales;  // whether one of these is not 1
  bool decoupled;
  bool decays;
  uint32_t key;  // of this step's random bits
};

VLMK_DECLARE(adam_chunk, const AdamConstants&, const AdamChunk&);
namespace avx512_bf16 {
void adam_chunk(const AdamConstants&, const AdamChunk&);
}  // namespace avx512_bf16

// What the 8-bit codes stand for: exp_avg's (signed) and exp_avg_sq's.
struct DynamicTrees {
  float with_sign[256];
  float without[256];
};
const DynamicTrees& dynamic_trees();

// Tensors are the launcher's to check (vlmkernels/optim/native.py).
void adam_step(const AdamParams& p);

// *sum = squares of elements [begin, end); infinite or NaN only if an element is.
VLMK_DECLARE(sum_of_squares_chunk, const AdamGradient&, int64_t begin, int64_t end, double* sum);

// Over all gradients, the same bits with any number of threads.
double sum_of_squares(const AdamGradient* grads, int64_t count);

}  // namespace vlmk
