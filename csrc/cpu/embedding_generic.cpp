#include <cstdint>
#include <cstring>

#include "cpu/embedding.h"
#include "cpu/half.h"

namespace vlmk::generic {
#include "cpu/embedding_kernel.inl"
}  // namespace vlmk::generic
