// Where the patches of a packed batch of images lie (vlmkernels/layout.py).
#pragma once
#include <cstdint>

#include "common/params.h"

namespace vlmk {

struct VisionLayoutSizes {
  int64_t frames;      // segments of full attention
  int64_t units;       // merged units
  int64_t windows;     // 0 without windows
  int64_t max_frame;   // patches of the longest frame
  int64_t max_window;  // patches of the longest window
  int64_t max_side;    // patches along the longest side
};

// The launcher has checked the grid: sizes >= 1, rows and columns multiples of merge_size.
VisionLayoutSizes vision_layout_sizes(const VisionLayoutParams& p);
void vision_layout_fill(const VisionLayoutParams& p);

}  // namespace vlmk
