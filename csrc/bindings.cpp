// Every native function, one m.def a line. No torch here: a pointer is a uintptr_t, then come
// sizes, strides in elements, plain numbers, and for CUDA the stream (uintptr_t) last. Tensors are
// checked by the Python launchers (vlmkernels/<op>.py), which are the only callers (but for resize,
// which vlmtrain's decoder processes call without torch). A function
// fills the op's struct of params.h and calls its launcher without the GIL; a C++ exception arrives
// as ValueError (std::invalid_argument) or RuntimeError.
//
// To add an op: csrc/cpu/<op>.h and sources (see cpu/dispatch.h), csrc/cuda/<op>.cu with its
// launcher declared in csrc/cuda/<op>.h, a filling function and an m.def line here. CMake finds the
// files.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/adam.h"
#include "cpu/attention.h"
#include "cpu/dispatch.h"
#include "cpu/embedding.h"
#include "cpu/layout.h"
#include "cpu/patchify.h"
#include "cpu/resize.h"
#include "cpu/scratch.h"
#include "params.h"

#ifdef VLMKERNELS_WITH_CUDA
#include <cuda_runtime.h>

#include "cuda/attention_flash.h"
#include "cuda/attention_window.h"
#include "cuda/embedding.h"
#endif

namespace py = pybind11;

namespace {

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (int i = 0; i <= static_cast<int>(vlmk::Isa::kAvx512Bf16); ++i) {
    const auto isa = static_cast<vlmk::Isa>(i);
    if (vlmk::isa_available(isa)) names.emplace_back(vlmk::isa_name(isa));
  }
  return names;
}

// What was compiled in, for vlmkernels.info and for load errors.
py::dict build_info() {
  py::dict info;
  info["version"] = VLMKERNELS_VERSION;
  info["compiler"] = __VERSION__;
#ifdef VLMKERNELS_WITH_CUDA
  info["cuda"] = VLMKERNELS_CUDA_VERSION;
  info["cuda_archs"] = VLMKERNELS_CUDA_ARCHS;
#else
  info["cuda"] = py::none();
  info["cuda_archs"] = "";
#endif
  return info;
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// ---- attention

using View = std::array<int64_t, 3>;  // address, token stride, head stride

vlmk::HeadsView heads_view(const View& v) {
  return {pointer<void>(static_cast<uintptr_t>(v[0])), v[1], v[2]};
}

vlmk::AttentionParams attention_params(int dtype, View q, View k, View v, View out, uintptr_t stats,
                                       uintptr_t cu_seqlens, int64_t segments, int64_t tokens,
                                       int64_t heads, int64_t kv_heads, int64_t head_dim,
                                       double scale, bool causal) {
  float* row_max = pointer<float>(stats);  // stats [2, H, T]
  return {static_cast<vlmk::DType>(dtype),
          heads_view(q),
          heads_view(k),
          heads_view(v),
          heads_view(out),
          row_max,
          row_max + heads * tokens,
          pointer<const int32_t>(cu_seqlens),
          segments,
          tokens,
          heads,
          kv_heads,
          head_dim,
          static_cast<float>(scale),
          causal,
          nullptr,
          nullptr};
}

vlmk::AttentionGradParams attention_grad_params(int dtype, View q, View k, View v, View out,
                                                uintptr_t stats, uintptr_t cu_seqlens,
                                                int64_t segments, int64_t tokens, int64_t heads,
                                                int64_t kv_heads, int64_t head_dim, double scale,
                                                bool causal, View dout, View dq, View dk, View dv) {
  return {attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                           kv_heads, head_dim, scale, causal),
          heads_view(dout), heads_view(dq), heads_view(dk), heads_view(dv)};
}

// The same with the order of the tokens and the rotary table, or 0.
vlmk::AttentionParams vision_attention_params(int dtype, View q, View k, View v, View out,
                                              uintptr_t stats, uintptr_t cu_seqlens,
                                              int64_t segments, int64_t tokens, int64_t heads,
                                              int64_t head_dim, double scale, uintptr_t order,
                                              uintptr_t rotary) {
  auto p = attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads, heads,
                            head_dim, scale, false);
  p.order = pointer<const int32_t>(order);
  p.rotary = pointer<const float>(rotary);
  return p;
}

vlmk::AttentionGradParams vision_attention_grad_params(
    int dtype, View q, View k, View v, View out, uintptr_t stats, uintptr_t cu_seqlens,
    int64_t segments, int64_t tokens, int64_t heads, int64_t head_dim, double scale,
    uintptr_t order, uintptr_t rotary, View dout, View dq, View dk, View dv) {
  return {vision_attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                  head_dim, scale, order, rotary),
          heads_view(dout), heads_view(dq), heads_view(dk), heads_view(dv)};
}

#ifdef VLMKERNELS_WITH_CUDA
vlmk::WindowAttentionParams window_attention_params(int dtype, View q, View k, View v, View out,
                                                    uintptr_t stats, uintptr_t cu_seqlens,
                                                    int64_t segments, int64_t tokens, int64_t heads,
                                                    int64_t kv_heads, int64_t head_dim,
                                                    double scale, bool causal, int64_t max_length) {
  return {attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                           kv_heads, head_dim, scale, causal),
          max_length};
}

vlmk::WindowAttentionGradParams window_attention_grad_params(
    int dtype, View q, View k, View v, View out, uintptr_t stats, uintptr_t cu_seqlens,
    int64_t segments, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
    double scale, bool causal, View dout, View dq, View dk, View dv, int64_t max_length) {
  return {attention_grad_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                kv_heads, head_dim, scale, causal, dout, dq, dk, dv),
          max_length};
}

vlmk::WindowAttentionParams vision_window_params(int dtype, View q, View k, View v, View out,
                                                 uintptr_t stats, uintptr_t cu_seqlens,
                                                 int64_t segments, int64_t tokens, int64_t heads,
                                                 int64_t head_dim, double scale, uintptr_t order,
                                                 uintptr_t rotary, int64_t max_length) {
  return {vision_attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                  head_dim, scale, order, rotary),
          max_length};
}

vlmk::WindowAttentionGradParams vision_window_grad_params(
    int dtype, View q, View k, View v, View out, uintptr_t stats, uintptr_t cu_seqlens,
    int64_t segments, int64_t tokens, int64_t heads, int64_t head_dim, double scale,
    uintptr_t order, uintptr_t rotary, View dout, View dq, View dk, View dv, int64_t max_length) {
  return {vision_attention_grad_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens,
                                       heads, head_dim, scale, order, rotary, dout, dq, dk, dv),
          max_length};
}

vlmk::FlashAttentionParams flash_attention_params(int dtype, View q, View k, View v, View out,
                                                  uintptr_t stats, uintptr_t cu_seqlens,
                                                  int64_t segments, int64_t tokens, int64_t heads,
                                                  int64_t kv_heads, int64_t head_dim, double scale,
                                                  bool causal, int64_t max_length,
                                                  uintptr_t tiles) {
  return {attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                           kv_heads, head_dim, scale, causal),
          max_length, pointer<int32_t>(tiles)};
}

vlmk::FlashAttentionGradParams flash_attention_grad_params(
    int dtype, View q, View k, View v, View out, uintptr_t stats, uintptr_t cu_seqlens,
    int64_t segments, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
    double scale, bool causal, View dout, View dq, View dk, View dv, int64_t max_length,
    uintptr_t tiles, uintptr_t rows) {
  return {attention_grad_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                kv_heads, head_dim, scale, causal, dout, dq, dk, dv),
          max_length, pointer<int32_t>(tiles), pointer<float>(rows)};
}

vlmk::FlashVisionParams flash_vision_params(int dtype, View q, View k, View v, View out,
                                            uintptr_t stats, uintptr_t cu_seqlens, int64_t segments,
                                            int64_t tokens, int64_t heads, int64_t head_dim,
                                            double scale, uintptr_t order, uintptr_t rotary,
                                            int64_t max_length, uintptr_t tiles, uintptr_t turned,
                                            uintptr_t turned_queries) {
  return {{vision_attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                   head_dim, scale, order, rotary),
           max_length, pointer<int32_t>(tiles)},
          pointer<void>(turned),
          pointer<void>(turned_queries)};
}

vlmk::FlashVisionGradParams flash_vision_grad_params(
    int dtype, View q, View k, View v, View out, uintptr_t stats, uintptr_t cu_seqlens,
    int64_t segments, int64_t tokens, int64_t heads, int64_t head_dim, double scale,
    uintptr_t order, uintptr_t rotary, View dout, View dq, View dk, View dv, int64_t max_length,
    uintptr_t tiles, uintptr_t rows, uintptr_t turned, uintptr_t turned_queries) {
  return {{vision_attention_grad_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens,
                                        heads, head_dim, scale, order, rotary, dout, dq, dk, dv),
           max_length, pointer<int32_t>(tiles), pointer<float>(rows)},
          pointer<void>(turned),
          pointer<void>(turned_queries)};
}
#endif

// ---- vision layout

vlmk::VisionLayoutParams vision_layout_params(uintptr_t grid, int64_t count, int64_t merge_size,
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
std::array<int64_t, 6> vision_layout_sizes(uintptr_t grid, int64_t count, int64_t merge_size,
                                           int64_t window_side) {
  const auto s = vlmk::vision_layout_sizes(
      vision_layout_params(grid, count, merge_size, window_side, 0, 0, 0, 0, 0, 0));
  return {s.frames, s.units, s.windows, s.max_frame, s.max_window, s.max_side};
}

// ---- embedding

vlmk::EmbeddingParams embedding_params(uintptr_t ids, uintptr_t visual_index, uintptr_t table,
                                       uintptr_t visual, uintptr_t out, int64_t first, int64_t rows,
                                       int64_t hidden, int64_t vocab_start, int64_t vocab_rows,
                                       int64_t visual_rows, bool partial, int table_dtype,
                                       int visual_dtype, int out_dtype) {
  return {pointer<const int64_t>(ids),
          pointer<const int32_t>(visual_index),
          pointer<const void>(table),
          pointer<const void>(visual),
          pointer<void>(out),
          first,
          rows,
          hidden,
          vocab_start,
          vocab_rows,
          visual_rows,
          partial,
          static_cast<vlmk::DType>(table_dtype),
          static_cast<vlmk::DType>(visual_dtype),
          static_cast<vlmk::DType>(out_dtype)};
}

vlmk::EmbeddingGatherParams embedding_gather_params(uintptr_t visual_index, uintptr_t grad,
                                                    uintptr_t inverse, uintptr_t dvisual,
                                                    int64_t first, int64_t rows, int64_t hidden,
                                                    int64_t visual_rows, int grad_dtype,
                                                    int dvisual_dtype) {
  return {pointer<const int32_t>(visual_index),
          pointer<const void>(grad),
          pointer<int32_t>(inverse),
          pointer<void>(dvisual),
          first,
          rows,
          hidden,
          visual_rows,
          static_cast<vlmk::DType>(grad_dtype),
          static_cast<vlmk::DType>(dvisual_dtype)};
}

vlmk::EmbeddingReduceParams embedding_reduce_params(uintptr_t keys, uintptr_t order, uintptr_t grad,
                                                    uintptr_t dweight, int64_t count,
                                                    int64_t hidden, int64_t vocab_rows,
                                                    int grad_dtype, int dweight_dtype,
                                                    bool accumulate) {
  return {pointer<const int64_t>(keys),
          pointer<const int64_t>(order),
          pointer<const void>(grad),
          pointer<void>(dweight),
          count,
          hidden,
          vocab_rows,
          static_cast<vlmk::DType>(grad_dtype),
          static_cast<vlmk::DType>(dweight_dtype),
          accumulate};
}

// ---- images

vlmk::PatchifyParams patchify_params(uintptr_t pixels, uintptr_t table, uintptr_t out,
                                     int64_t frames, int64_t height, int64_t width,
                                     int64_t patch_size, int64_t temporal_patch_size,
                                     int64_t merge_size, int64_t threads, int dtype) {
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
          static_cast<vlmk::DType>(dtype)};
}

vlmk::ResizeParams resize_params(uintptr_t pixels, uintptr_t out, int64_t frames, int64_t in_height,
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

// ---- optimizer

// A row: addresses of param, grad, exp_avg, exp_avg_sq, the low-precision copy (or 0) and step (one
// float), then numel and the number of the first element, addresses of the two moments' scales (0).
void adam_step(const std::vector<std::array<int64_t, 10>>& rows, int grad_dtype, int moments,
               double lr, double beta1, double beta2, double eps, double weight_decay,
               bool decoupled, double grad_factor, double grad_scale) {
  std::vector<vlmk::AdamTensor> tensors;
  tensors.reserve(rows.size());
  for (const auto& r : rows) {
    tensors.push_back({pointer<float>(r[0]), pointer<const void>(r[1]), pointer<void>(r[2]),
                       pointer<void>(r[3]), pointer<float>(r[8]), pointer<float>(r[9]),
                       pointer<void>(r[4]), r[6], r[7], *pointer<float>(r[5]) + 1.0,
                       static_cast<vlmk::DType>(grad_dtype),
                       static_cast<vlmk::MomentType>(moments)});
  }
  vlmk::adam_step({tensors.data(), static_cast<int64_t>(tensors.size()), lr, beta1, beta2, eps,
                   weight_decay, decoupled, static_cast<float>(grad_factor),
                   static_cast<float>(grad_scale)});
  for (size_t i = 0; i < rows.size(); ++i) {
    *pointer<float>(rows[i][5]) = static_cast<float>(tensors[i].step);
  }
}

// A row: address, numel, dtype.
double sum_of_squares(const std::vector<std::array<int64_t, 3>>& rows) {
  std::vector<vlmk::AdamGradient> grads;
  grads.reserve(rows.size());
  for (const auto& r : rows) {
    grads.push_back({pointer<const void>(r[0]), r[1], static_cast<vlmk::DType>(r[2])});
  }
  return vlmk::sum_of_squares(grads.data(), static_cast<int64_t>(grads.size()));
}

// The Python callable of a launcher: the arguments of its filling function.
template <class Params, class... Args>
auto on_cpu(Params (*fill)(Args...), void (*launch)(const Params&)) {
  return [=](Args... args) { launch(fill(args...)); };
}

#ifdef VLMKERNELS_WITH_CUDA
// The same and the stream.
template <class Params, class... Args>
auto on_cuda(Params (*fill)(Args...), int (*launch)(const Params&, void*)) {
  return [=](Args... args, uintptr_t stream) {
    const int error = launch(fill(args...), pointer<void>(stream));
    if (error != cudaSuccess)
      throw std::runtime_error(std::string("CUDA: ") +
                               cudaGetErrorString(static_cast<cudaError_t>(error)));
  };
}
#endif

}  // namespace

// A kernel that runs for long must not hold the GIL.
#define VLMK_NO_GIL py::call_guard<py::gil_scoped_release>()

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info);
  m.def("isa", [] { return std::string(vlmk::isa_name(vlmk::active_isa())); });
  m.def("available_isas", &available_isas);
  m.def("set_isa", &vlmk::set_isa, py::arg("name"));
  m.def("poison_scratch", &vlmk::poison_scratch, py::arg("on"));
  // ---- attention
  m.def("attention_forward", on_cpu(attention_params, vlmk::attention_forward), VLMK_NO_GIL);
  m.def("attention_backward", on_cpu(attention_grad_params, vlmk::attention_backward), VLMK_NO_GIL);
  m.def("vision_attention_forward", on_cpu(vision_attention_params, vlmk::attention_forward),
        VLMK_NO_GIL);
  m.def("vision_attention_backward", on_cpu(vision_attention_grad_params, vlmk::attention_backward),
        VLMK_NO_GIL);
  m.def("vision_layout_sizes", &vision_layout_sizes);
  m.def("vision_layout_fill", on_cpu(vision_layout_params, vlmk::vision_layout_fill), VLMK_NO_GIL);

  // ---- embedding
  m.def("embedding_forward", on_cpu(embedding_params, vlmk::embedding_forward), VLMK_NO_GIL);
  m.def("embedding_gather", on_cpu(embedding_gather_params, vlmk::embedding_gather), VLMK_NO_GIL);
  m.def("embedding_reduce", on_cpu(embedding_reduce_params, vlmk::embedding_reduce), VLMK_NO_GIL);

  // ---- images
  m.def("patchify", on_cpu(patchify_params, vlmk::patchify), VLMK_NO_GIL);
  m.def("resize", on_cpu(resize_params, vlmk::resize), VLMK_NO_GIL);

  // ---- optimizer
  m.def("adam_step", &adam_step, VLMK_NO_GIL);
  m.def("sum_of_squares", &sum_of_squares, VLMK_NO_GIL);

#ifdef VLMKERNELS_WITH_CUDA
  // ---- CUDA: pointers are device pointers, the stream comes last
  m.def("window_attention_forward_cuda",
        on_cuda(window_attention_params, vlmk::window_attention_forward_cuda), VLMK_NO_GIL);
  m.def("window_attention_backward_cuda",
        on_cuda(window_attention_grad_params, vlmk::window_attention_backward_cuda), VLMK_NO_GIL);
  m.def("vision_window_forward_cuda",
        on_cuda(vision_window_params, vlmk::vision_window_forward_cuda), VLMK_NO_GIL);
  m.def("vision_window_backward_cuda",
        on_cuda(vision_window_grad_params, vlmk::vision_window_backward_cuda), VLMK_NO_GIL);
  m.def("flash_attention_forward_cuda",
        on_cuda(flash_attention_params, vlmk::flash_attention_forward_cuda), VLMK_NO_GIL);
  m.def("flash_mma_forward_cuda", on_cuda(flash_attention_params, vlmk::flash_mma_forward_cuda),
        VLMK_NO_GIL);
  m.def("flash_attention_backward_cuda",
        on_cuda(flash_attention_grad_params, vlmk::flash_attention_backward_cuda), VLMK_NO_GIL);
  m.def("flash_mma_backward_cuda",
        on_cuda(flash_attention_grad_params, vlmk::flash_mma_backward_cuda), VLMK_NO_GIL);
  m.def("flash_vision_forward_cuda", on_cuda(flash_vision_params, vlmk::flash_vision_forward_cuda),
        VLMK_NO_GIL);
  m.def("flash_vision_backward_cuda",
        on_cuda(flash_vision_grad_params, vlmk::flash_vision_backward_cuda), VLMK_NO_GIL);
  m.def("embedding_forward_cuda", on_cuda(embedding_params, vlmk::embedding_forward_cuda),
        VLMK_NO_GIL);
  m.def("embedding_gather_cuda", on_cuda(embedding_gather_params, vlmk::embedding_gather_cuda),
        VLMK_NO_GIL);
  m.def("embedding_reduce_cuda", on_cuda(embedding_reduce_params, vlmk::embedding_reduce_cuda),
        VLMK_NO_GIL);
#endif
}
