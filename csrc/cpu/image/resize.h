// Bicubic resize of RGB bytes, bit for bit what Pillow's Image.resize gives.
// Method: Pillow's src/libImaging/Resample.c: weights in fixed point with 22 fractional bits, one
// pass along the width and one along the height, each rounded and clipped to bytes.
#pragma once

#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

constexpr int kResizeBits = 22;  // Pillow's PRECISION_BITS: 32 - 8 bits of a pixel - 2 of the sum
constexpr int kResizeSplit = 8;  // a weight is high << kResizeSplit | low, as two's complement
constexpr int64_t kResizeTaps = 4;      // weights are padded with zeros to groups of so many
constexpr int64_t kResizeColumns = 4;   // outputs of a row are computed so many at a time
constexpr int64_t kResizeSlack = 64;    // bytes that may be read or written past a row
constexpr int64_t kResizeMaxLanes = 4;  // rows that the horizontal pass takes at once

// Where each output of one axis reads, and its weights. `outputs` is a multiple of kResizeColumns;
// those past the real ones have no weights.
struct ResizeAxis {
  int64_t outputs;
  int64_t stride;        // weights of an output, a multiple of kResizeTaps, the rest zero
  const int32_t* first;  // [outputs] the first input
  const int32_t* count;  // [outputs] weights in use
  const int16_t* low;    // [outputs, stride]
  const int16_t* high;   // [outputs, stride]
};

void resize(const ResizeParams& p);

// The horizontal pass of lanes() rows: `rows` and `to` hold so many pointers, each row readable for
// kResizeSlack bytes past its end; `to` gets 3 * outputs bytes a row and spoils kResizeSlack more.
VLMK_DECLARE(resize_across, const ResizeAxis&, const uint8_t* const* rows, int64_t pixel_bytes,
             uint8_t* const* to);

// The vertical pass of one row of `bytes`: count rows, each readable for kResizeSlack bytes past
// its end; low and high hold a multiple of two weights.
VLMK_DECLARE(resize_down, const uint8_t* const* rows, int64_t count, const int16_t* low,
             const int16_t* high, uint8_t* out, int64_t bytes);

}  // namespace vlmk
