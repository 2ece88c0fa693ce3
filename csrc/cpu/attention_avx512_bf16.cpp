#define VLMK_ISA avx512_bf16
#include "cpu/attention_kernel.inl"
