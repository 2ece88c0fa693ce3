#define VLMK_ISA avx2
#include "cpu/adam_kernel.inl"
