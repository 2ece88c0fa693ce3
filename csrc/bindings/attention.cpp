#include "cpu/attention/attention.h"

#include <tuple>

#include "bindings/bindings.h"

#ifdef VLMKERNELS_WITH_CUDA
#include "cuda/attention/attention.h"
#endif

namespace vlmk {
namespace {

using View = std::array<int64_t, 3>;  // address, token stride, head stride

HeadsView heads_view(const View& v) {
  return {pointer<void>(static_cast<uintptr_t>(v[0])), v[1], v[2]};
}

AttentionParams attention_params(int dtype, View q, View k, View v, View out, uintptr_t row_stats,
                                 uintptr_t cu_seqlens, int64_t segments, int64_t tokens,
                                 int64_t heads, int64_t kv_heads, int64_t head_dim, double scale,
                                 bool causal, uintptr_t order, uintptr_t rotary,
                                 int64_t q_group_gap, uintptr_t probabilities, int64_t max_seqlen,
                                 uintptr_t tiles, uintptr_t rotated_k, uintptr_t rotated_q) {
  float* row_max = pointer<float>(row_stats);  // row_stats [2, H, T]
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
          pointer<const int32_t>(order),
          pointer<const float>(rotary),
          q_group_gap,
          pointer<float>(probabilities),
          max_seqlen,
          pointer<int32_t>(tiles),
          pointer<void>(rotated_k),
          pointer<void>(rotated_q)};
}

#ifdef VLMKERNELS_WITH_CUDA
TileListParams tile_list_params(uintptr_t cu_seqlens, int64_t segments, int64_t tokens,
                                int64_t max_seqlen, bool causal, bool vision, uintptr_t tiles) {
  return {pointer<const int32_t>(cu_seqlens),
          segments,
          tokens,
          max_seqlen,
          causal,
          vision,
          pointer<int32_t>(tiles)};
}
#endif

// The function that fills AttentionGradParams: the gradients, then what fills the forward's.
template <class... Forward>
auto with_gradients(AttentionParams (*)(Forward...)) {
  return +[](View dout, View dq, View dk, View dv, uintptr_t lse_delta, uintptr_t dkv_parts,
             int64_t group_parts, uintptr_t dq_sum, uintptr_t done, Forward... forward) {
    return AttentionGradParams{attention_params(forward...),
                               heads_view(dout),
                               heads_view(dq),
                               heads_view(dk),
                               heads_view(dv),
                               pointer<float>(lse_delta),
                               pointer<float>(dkv_parts),
                               group_parts,
                               pointer<float>(dq_sum),
                               pointer<int32_t>(done)};
  };
}

}  // namespace

void register_attention(py::module_& m) {
  m.attr("KEPT_TOKENS") = kCpuBlock;
  m.attr("TILE_ROWS") = kTileRows;
  m.attr("DQ_ROWS") = kDqRows;
  // All by keyword. What has a default is for vision_attention, or for CUDA.
  const std::tuple arguments("dtype"_a, "q"_a, "k"_a, "v"_a, "out"_a, "row_stats"_a, "cu_seqlens"_a,
                             "segments"_a, "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a,
                             "scale"_a, "causal"_a = false, "order"_a = 0, "rotary"_a = 0,
                             "q_group_gap"_a = 0, "probabilities"_a = 0, "max_seqlen"_a = 0,
                             "tiles"_a = 0, "rotated_k"_a = 0, "rotated_q"_a = 0);
  const std::tuple gradients("dout"_a, "dq"_a, "dk"_a, "dv"_a, "lse_delta"_a = 0, "dkv_parts"_a = 0,
                             "group_parts"_a = 1, "dq_sum"_a = 0, "done"_a = 0);
  const auto define = [&](const char* name, const auto& function, const auto&... names) {
    std::apply(
        [&](const auto&... each) { m.def(name, function, py::kw_only(), each..., VLMK_NO_GIL); },
        std::tuple_cat(names...));
  };
  const auto fill = attention_params;
  const auto fill_gradients = with_gradients(attention_params);
  define("attention_forward", on_cpu(fill, attention_forward), arguments);
  m.def("attention_kept_floats",
        [](int dtype) { return attention_kept_floats(static_cast<DType>(dtype)); });
  define("attention_backward", on_cpu(fill_gradients, attention_backward), gradients, arguments);
#ifdef VLMKERNELS_WITH_CUDA
  // Pointers are device pointers.
  const std::tuple stream("stream"_a);
  const auto forward_cuda = [&](const char* name, auto launch) {
    define(name, on_cuda(fill, launch), arguments, stream);
  };
  const auto backward_cuda = [&](const char* name, auto launch) {
    define(name, on_cuda(fill_gradients, launch), gradients, arguments, stream);
  };
  forward_cuda("window_forward_cuda", window_forward_cuda);
  backward_cuda("window_backward_cuda", window_backward_cuda);
  forward_cuda("window_vision_forward_cuda", window_vision_forward_cuda);
  backward_cuda("window_vision_backward_cuda", window_vision_backward_cuda);
  define("list_tiles_cuda", on_cuda(tile_list_params, list_tiles_cuda),
         std::tuple("cu_seqlens"_a, "segments"_a, "tokens"_a, "max_seqlen"_a, "causal"_a,
                    "vision"_a, "tiles"_a),
         stream);
  forward_cuda("sm80_forward_cuda", sm80_forward_cuda);
  backward_cuda("sm80_backward_cuda", sm80_backward_cuda);
  forward_cuda("sm90_forward_cuda", sm90_forward_cuda);
  backward_cuda("sm90_backward_cuda", sm90_backward_cuda);
  backward_cuda("sm90_fused_backward_cuda", sm90_fused_backward_cuda);
  forward_cuda("sm80_vision_forward_cuda", sm80_vision_forward_cuda);
  backward_cuda("sm80_vision_backward_cuda", sm80_vision_backward_cuda);
  forward_cuda("sm90_vision_forward_cuda", sm90_vision_forward_cuda);
  backward_cuda("sm90_vision_backward_cuda", sm90_vision_backward_cuda);
#endif
}

}  // namespace vlmk
