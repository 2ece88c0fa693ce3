#define VLMK_ISA avx2
#include "cpu/attention_kernel.inl"
