#include "cpu/attention/attention.h"

#include <tuple>

#include "bindings/bindings.h"

#ifdef VLMKERNELS_WITH_CUDA
#include "cuda/attention_flash.h"
#include "cuda/attention_window.h"
#endif

namespace vlmk {
namespace {

using View = std::array<int64_t, 3>;  // address, token stride, head stride

HeadsView heads_view(const View& v) {
  return {pointer<void>(static_cast<uintptr_t>(v[0])), v[1], v[2]};
}

AttentionParams attention_params(int dtype, View q, View k, View v, View out, uintptr_t stats,
                                 uintptr_t cu_seqlens, int64_t segments, int64_t tokens,
                                 int64_t heads, int64_t kv_heads, int64_t head_dim, double scale,
                                 bool causal) {
  float* row_max = pointer<float>(stats);  // stats [2, H, T]
  return {static_cast<DType>(dtype),
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

AttentionGradParams attention_grad_params(int dtype, View q, View k, View v, View out,
                                          uintptr_t stats, uintptr_t cu_seqlens, int64_t segments,
                                          int64_t tokens, int64_t heads, int64_t kv_heads,
                                          int64_t head_dim, double scale, bool causal, View dout,
                                          View dq, View dk, View dv) {
  return {attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                           kv_heads, head_dim, scale, causal),
          heads_view(dout), heads_view(dq), heads_view(dk), heads_view(dv)};
}

// The same with the order of the tokens and the rotary table, or 0.
AttentionParams vision_attention_params(int dtype, View q, View k, View v, View out,
                                        uintptr_t stats, uintptr_t cu_seqlens, int64_t segments,
                                        int64_t tokens, int64_t heads, int64_t head_dim,
                                        double scale, uintptr_t order, uintptr_t rotary) {
  auto p = attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads, heads,
                            head_dim, scale, false);
  p.order = pointer<const int32_t>(order);
  p.rotary = pointer<const float>(rotary);
  return p;
}

AttentionGradParams vision_attention_grad_params(int dtype, View q, View k, View v, View out,
                                                 uintptr_t stats, uintptr_t cu_seqlens,
                                                 int64_t segments, int64_t tokens, int64_t heads,
                                                 int64_t head_dim, double scale, uintptr_t order,
                                                 uintptr_t rotary, View dout, View dq, View dk,
                                                 View dv) {
  return {vision_attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                  head_dim, scale, order, rotary),
          heads_view(dout), heads_view(dq), heads_view(dk), heads_view(dv)};
}

#ifdef VLMKERNELS_WITH_CUDA
WindowAttentionParams window_attention_params(int dtype, View q, View k, View v, View out,
                                              uintptr_t stats, uintptr_t cu_seqlens,
                                              int64_t segments, int64_t tokens, int64_t heads,
                                              int64_t kv_heads, int64_t head_dim, double scale,
                                              bool causal, int64_t max_length) {
  return {attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                           kv_heads, head_dim, scale, causal),
          max_length};
}

WindowAttentionGradParams window_attention_grad_params(
    int dtype, View q, View k, View v, View out, uintptr_t stats, uintptr_t cu_seqlens,
    int64_t segments, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
    double scale, bool causal, View dout, View dq, View dk, View dv, int64_t max_length) {
  return {attention_grad_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                kv_heads, head_dim, scale, causal, dout, dq, dk, dv),
          max_length};
}

WindowAttentionParams vision_window_params(int dtype, View q, View k, View v, View out,
                                           uintptr_t stats, uintptr_t cu_seqlens, int64_t segments,
                                           int64_t tokens, int64_t heads, int64_t head_dim,
                                           double scale, uintptr_t order, uintptr_t rotary,
                                           int64_t max_length) {
  return {vision_attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                  head_dim, scale, order, rotary),
          max_length};
}

WindowAttentionGradParams vision_window_grad_params(int dtype, View q, View k, View v, View out,
                                                    uintptr_t stats, uintptr_t cu_seqlens,
                                                    int64_t segments, int64_t tokens, int64_t heads,
                                                    int64_t head_dim, double scale, uintptr_t order,
                                                    uintptr_t rotary, View dout, View dq, View dk,
                                                    View dv, int64_t max_length) {
  return {vision_attention_grad_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens,
                                       heads, head_dim, scale, order, rotary, dout, dq, dk, dv),
          max_length};
}

FlashAttentionParams flash_attention_params(int dtype, View q, View k, View v, View out,
                                            uintptr_t stats, uintptr_t cu_seqlens, int64_t segments,
                                            int64_t tokens, int64_t heads, int64_t kv_heads,
                                            int64_t head_dim, double scale, bool causal,
                                            int64_t max_length, uintptr_t tiles) {
  return {attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                           kv_heads, head_dim, scale, causal),
          max_length, pointer<int32_t>(tiles)};
}

FlashAttentionGradParams flash_attention_grad_params(
    int dtype, View q, View k, View v, View out, uintptr_t stats, uintptr_t cu_seqlens,
    int64_t segments, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
    double scale, bool causal, View dout, View dq, View dk, View dv, int64_t max_length,
    uintptr_t tiles, uintptr_t rows) {
  return {attention_grad_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                kv_heads, head_dim, scale, causal, dout, dq, dk, dv),
          max_length, pointer<int32_t>(tiles), pointer<float>(rows)};
}

FlashVisionParams flash_vision_params(int dtype, View q, View k, View v, View out, uintptr_t stats,
                                      uintptr_t cu_seqlens, int64_t segments, int64_t tokens,
                                      int64_t heads, int64_t head_dim, double scale,
                                      uintptr_t order, uintptr_t rotary, int64_t max_length,
                                      uintptr_t tiles, uintptr_t turned, uintptr_t turned_queries) {
  return {{vision_attention_params(dtype, q, k, v, out, stats, cu_seqlens, segments, tokens, heads,
                                   head_dim, scale, order, rotary),
           max_length, pointer<int32_t>(tiles)},
          pointer<void>(turned),
          pointer<void>(turned_queries)};
}

FlashVisionGradParams flash_vision_grad_params(
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

template <class Function, class... Names>
void define(py::module_& m, const char* name, Function function,
            const std::tuple<Names...>& names) {
  std::apply([&](const auto&... each) { m.def(name, function, each..., VLMK_NO_GIL); }, names);
}

}  // namespace

void register_attention(py::module_& m) {
  const auto join = [](const auto&... parts) { return std::tuple_cat(parts...); };
  const std::tuple rows("dtype"_a, "q"_a, "k"_a, "v"_a, "out"_a, "row_stats"_a, "cu_seqlens"_a,
                        "segments"_a, "tokens"_a, "heads"_a);
  const auto text = join(rows, std::tuple("kv_heads"_a, "head_dim"_a, "scale"_a, "causal"_a));
  const auto vision = join(rows, std::tuple("head_dim"_a, "scale"_a, "order"_a, "rotary"_a));
  const std::tuple grads("dout"_a, "dq"_a, "dk"_a, "dv"_a);
  define(m, "attention_forward", on_cpu(attention_params, attention_forward), text);
  define(m, "attention_backward", on_cpu(attention_grad_params, attention_backward),
         join(text, grads));
  define(m, "vision_attention_forward", on_cpu(vision_attention_params, attention_forward), vision);
  define(m, "vision_attention_backward", on_cpu(vision_attention_grad_params, attention_backward),
         join(vision, grads));
#ifdef VLMKERNELS_WITH_CUDA
  // Pointers are device pointers, the stream comes last.
  const std::tuple length("max_length"_a), stream("stream"_a), workspace("workspace"_a);
  const std::tuple tiles("max_length"_a, "tiles"_a), rotated("rotated_k"_a, "rotated_q"_a);
  define(m, "window_attention_forward_cuda",
         on_cuda(window_attention_params, window_attention_forward_cuda),
         join(text, length, stream));
  define(m, "window_attention_backward_cuda",
         on_cuda(window_attention_grad_params, window_attention_backward_cuda),
         join(text, grads, length, stream));
  define(m, "vision_window_forward_cuda", on_cuda(vision_window_params, vision_window_forward_cuda),
         join(vision, length, stream));
  define(m, "vision_window_backward_cuda",
         on_cuda(vision_window_grad_params, vision_window_backward_cuda),
         join(vision, grads, length, stream));
  for (const auto& [name, launch] :
       {std::pair("flash_mma_forward_cuda", flash_mma_forward_cuda),
        std::pair("flash_hopper_forward_cuda", flash_hopper_forward_cuda)})
    define(m, name, on_cuda(flash_attention_params, launch), join(text, tiles, stream));
  for (const auto& [name, launch] :
       {std::pair("flash_mma_backward_cuda", flash_mma_backward_cuda),
        std::pair("flash_hopper_backward_cuda", flash_hopper_backward_cuda)})
    define(m, name, on_cuda(flash_attention_grad_params, launch),
           join(text, grads, tiles, workspace, stream));
  for (const auto& [name, launch] :
       {std::pair("flash_vision_mma_forward_cuda", flash_vision_mma_forward_cuda),
        std::pair("flash_vision_hopper_forward_cuda", flash_vision_hopper_forward_cuda)})
    define(m, name, on_cuda(flash_vision_params, launch), join(vision, tiles, rotated, stream));
  for (const auto& [name, launch] :
       {std::pair("flash_vision_mma_backward_cuda", flash_vision_mma_backward_cuda),
        std::pair("flash_vision_hopper_backward_cuda", flash_vision_hopper_backward_cuda)})
    define(m, name, on_cuda(flash_vision_grad_params, launch),
           join(vision, grads, tiles, workspace, rotated, stream));
#endif
}

}  // namespace vlmk
