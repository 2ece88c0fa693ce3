#define VLMK_ISA avx512
#include "cpu/attention_kernel.inl"
