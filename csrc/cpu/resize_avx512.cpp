#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/resize.h"

namespace vlmk::avx512 {
#include "cpu/resize_kernel.inl"
}  // namespace vlmk::avx512
