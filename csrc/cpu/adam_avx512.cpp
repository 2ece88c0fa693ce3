#define VLMK_ISA avx512
#include "cpu/adam_kernel.inl"
