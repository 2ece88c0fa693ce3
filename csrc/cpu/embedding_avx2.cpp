#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/embedding.h"
#include "cpu/half.h"

namespace vlmk::avx2 {
#include "cpu/embedding_kernel.inl"
}  // namespace vlmk::avx2
