#define VLMK_ISA generic
#include "cpu/adam_kernel.inl"
