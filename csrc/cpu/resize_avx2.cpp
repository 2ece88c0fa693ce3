#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/resize.h"

namespace vlmk::avx2 {
#include "cpu/resize_kernel.inl"
}  // namespace vlmk::avx2
