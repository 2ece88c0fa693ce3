#define VLMK_ISA generic
#include "cpu/attention_kernel.inl"
