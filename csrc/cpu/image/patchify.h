// Frames of bytes to normalised patch rows, on the CPU.
#pragma once

#include "common/params.h"

namespace vlmk {

void patchify(const PatchifyParams& p);

}  // namespace vlmk
