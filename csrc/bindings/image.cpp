#include "bindings/bindings.h"
#include "cpu/image/patchify.h"
#include "cpu/image/resize.h"
#include "cpu/image/vision_layout.h"

namespace vlmk {
namespace {

PatchifyParams patchify_params(uintptr_t pixels, uintptr_t table, uintptr_t out, int64_t frames,
                               int64_t height, int64_t width, int64_t patch_size,
                               int64_t temporal_patch_size, int64_t merge_size, int64_t threads,
                               int dtype) {
  return {pointer<const uint8_t>(pixels),
          pointer<const void>(table),
          pointer<void>(out),
          frames,
          height,
          width,
          patch_size,
          temporal_patch_size,
          merge_size,
          threads,
          static_cast<DType>(dtype)};
}

ResizeParams resize_params(uintptr_t pixels, uintptr_t out, int64_t frames, int64_t in_height,
                           int64_t in_width, int64_t pixel_bytes, int64_t out_height,
                           int64_t out_width, int64_t pillow, int64_t threads) {
  return {pointer<const uint8_t>(pixels),
          pointer<uint8_t>(out),
          frames,
          in_height,
          in_width,
          pixel_bytes,
          out_height,
          out_width,
          pillow,
          threads};
}

VisionLayoutParams vision_layout_params(uintptr_t grid, int64_t count, int64_t merge_size,
                                        int64_t window_side, uintptr_t position_ids,
                                        uintptr_t cu_seqlens, uintptr_t cu_window_seqlens,
                                        uintptr_t window_index, uintptr_t reverse_index,
                                        uintptr_t window_order) {
  return {pointer<const int64_t>(grid),
          count,
          merge_size,
          window_side,
          pointer<int64_t>(position_ids),
          pointer<int32_t>(cu_seqlens),
          pointer<int32_t>(cu_window_seqlens),
          pointer<int64_t>(window_index),
          pointer<int64_t>(reverse_index),
          pointer<int32_t>(window_order)};
}

// frames, units, windows, longest frame, longest window, longest side.
std::array<int64_t, 6> layout_sizes(uintptr_t grid, int64_t count, int64_t merge_size,
                                    int64_t window_side) {
  const auto s = vision_layout_sizes(
      vision_layout_params(grid, count, merge_size, window_side, 0, 0, 0, 0, 0, 0));
  return {s.frames, s.units, s.windows, s.max_frame, s.max_window, s.max_side};
}

}  // namespace

void register_image(py::module_& m) {
  m.def("patchify", on_cpu(patchify_params, patchify), "pixels"_a, "table"_a, "out"_a, "frames"_a,
        "height"_a, "width"_a, "patch_size"_a, "temporal_patch_size"_a, "merge_size"_a, "threads"_a,
        "dtype"_a, VLMK_NO_GIL);
  m.def("resize", on_cpu(resize_params, resize), "pixels"_a, "out"_a, "frames"_a, "in_height"_a,
        "in_width"_a, "pixel_bytes"_a, "out_height"_a, "out_width"_a, "pillow"_a, "threads"_a,
        VLMK_NO_GIL);
  m.def("vision_layout_sizes", &layout_sizes, "grid"_a, "count"_a, "merge_size"_a, "window_side"_a);
  m.def("vision_layout_fill", on_cpu(vision_layout_params, vision_layout_fill), "grid"_a, "count"_a,
        "merge_size"_a, "window_side"_a, "position_ids"_a, "cu_seqlens"_a, "cu_window_seqlens"_a,
        "window_index"_a, "reverse_index"_a, "window_order"_a, VLMK_NO_GIL);
}

}  // namespace vlmk
