// One Adam or AdamW step over many tensors, in place.
// Method: Kingma & Ba 2015 (arXiv:1412.6980), Loshchilov & Hutter 2019 (arXiv:1711.05101), in the
// operation order of torch.optim.AdamW(fused=True), to which the results are bit-identical with
// AVX2 and AVX-512.
#pragma once
#include "cpu/dispatch.h"
#include "params.h"

namespace vlmk {

// A chunk of one tensor: elements [begin, end), begin a multiple of 16.
struct AdamChunk {
  const AdamTensor* tensor;
  int64_t begin;
  int64_t end;
};

VLMK_DECLARE(adam_chunk, const AdamParams&, const AdamChunk&);

// Throws nothing; tensors are the launcher's to check (vlmkernels/optim/cpu_adam.py).
void adam_step(const AdamParams& p);

}  // namespace vlmk
