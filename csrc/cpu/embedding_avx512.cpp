#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/embedding.h"
#include "cpu/half.h"

namespace vlmk::avx512 {
#include "cpu/embedding_kernel.inl"
}  // namespace vlmk::avx512
