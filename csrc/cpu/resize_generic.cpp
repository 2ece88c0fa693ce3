#include <cstdint>
#include <cstring>

#include "cpu/resize.h"

namespace vlmk::generic {
#include "cpu/resize_kernel.inl"
}  // namespace vlmk::generic
