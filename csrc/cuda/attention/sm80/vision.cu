// vision_attention of segments of any length: forward.cuh and backward.cuh on a projection whose
// queries and keys are still to be turned by the 2D rotary embedding.
//
// What a block keeps is turned where it stands, in shared memory, once: queries in flash_forward
// and flash_queries, keys in flash_keys. dq and dk are turned back there before they are stored.
// What streams past it is turned beforehand by turn_rows, into workspace: keys for flash_forward
// and flash_queries, queries for flash_keys. Everything else is read from and written to the
// projection's own memory and its gradient's.
//
// Why the keys of the loop are not turned in the loop: every block of 128 queries would turn them
// again, and their cosines and sines, 4 D bytes a row, would come with them, as many bytes as a
// row of k and one of v. A step of 64 keys at D = 80 brings 20 KB of k and v from L2 and computes
// for some 1,000 cycles; with 20 KB of table on top, 132 SMs would ask for 9 TB/s at 1.7 GHz, more
// than L2 gives.
//
// Bytes, P H D elements of 2 bytes being 1: floor 4 forward (q, k, v read, out written) and 8
// backward (q, k, v, out, dout read, dq, dk, dv written). Here, each tensor counted once a kernel:
// turn_rows 2; forward 2 + 4; backward 2 for the sums, 2 + 6 for the keys, 2 + 5 for the queries.
// turn_rows reads the table once for kTurnHeads heads, 4 D bytes beside 16 D, mostly from L2.
//
// With compute capability 9.0 the kernels are sm90/forward.cu's and sm90/backward.cu's, where TMA
// brings rows as they are: queries and keys are turned beforehand, 2 more forward; dq and dk are
// turned back as here.
#include "cuda/attention/attention.h"
#include "cuda/attention/sm80/backward.cuh"
#include "cuda/attention/sm80/forward.cuh"

namespace vlmk {
namespace {

inline constexpr int kTurnThreads = 256;
inline constexpr int kTurnHeads = 4;  // whose rows a thread turns by the same cosines and sines

struct TurnParams {
  HeadsView from;       // [T, H, D]
  HeadsView to;         // [T, H, D]
  const float* rotary;  // [T, D]
  int64_t tokens;       // T
  int64_t heads;        // H
};

template <int kDim>
struct TurnShape {
  static constexpr int kColumns = kTurnColumns<kDim>;
  static constexpr int kPairs = kDim / 2 / kColumns;     // of a row, a thread each
  static constexpr int kTokens = kTurnThreads / kPairs;  // of a block; a few threads have none
};

// to = from, turned. One block per kTokens tokens and kTurnHeads heads.
template <class Math, int kDim>
__global__ void __launch_bounds__(kTurnThreads) turn_rows(const TurnParams p) {
  using S = TurnShape<kDim>;
  using Unit = typename Columns<S::kColumns>::Unit;
  const unsigned groups = (static_cast<unsigned>(p.heads) + kTurnHeads - 1) / kTurnHeads;
  const int64_t head = blockIdx.x % groups * kTurnHeads;  // mutant: rotate-rows-head
  const int row = threadIdx.x / S::kPairs, column = threadIdx.x % S::kPairs * S::kColumns;
  const int64_t token = int64_t{blockIdx.x / groups} * S::kTokens + row;
  const bool inside = row < S::kTokens && token < p.tokens;  // mutant: rotate-rows-inside
  Unit a[kTurnHeads], b[kTurnHeads];
  Turn<S::kColumns> turn;
  turn.template load<kDim>(p.rotary, token, column, inside);  // mutant: rotate-rows-load
#pragma unroll
  for (int h = 0; h < kTurnHeads; ++h) {
    const bool on = inside && head + h < p.heads;
    const uint16_t* from = rows_of(p.from, token, head + h) + column;
    a[h] = ptx::load_once(reinterpret_cast<const Unit*>(from), on);
    b[h] = ptx::load_once(reinterpret_cast<const Unit*>(from + kDim / 2), on);
  }
#pragma unroll
  for (int h = 0; h < kTurnHeads; ++h) {
    const bool on = inside && head + h < p.heads;  // mutant: rotate-rows-on
    turn.template apply<Math, false>(a[h], b[h]);  // mutant: rotate-rows-apply
    uint16_t* to = rows_of(p.to, token, head + h) + column;
    ptx::store(reinterpret_cast<Unit*>(to), a[h], on);
    ptx::store(reinterpret_cast<Unit*>(to + kDim / 2), b[h], on);  // mutant: rotate-rows-store
  }
}

template <class Math, int kDim>
int launch_turn(const TurnParams& p, void* stream) {
  constexpr int kTokens = TurnShape<kDim>::kTokens;
  const int64_t groups = (p.heads + kTurnHeads - 1) / kTurnHeads;
  return launch(turn_rows<Math, kDim>, (p.tokens + kTokens - 1) / kTokens * groups, kTurnThreads, 0,
                stream, p);  // mutant: launch-rotate
}

// Writes q or k, `from`, turned, to workspace [H, T, D]; where its rows then are.
template <class Math, int kDim>
int launch_turn(const AttentionParams& p, const HeadsView& from, void* workspace, void* stream,
                HeadsView& turned) {
  turned = turned_rows(p, workspace);  // mutant: launch-rotate-rotated
  return launch_turn<Math, kDim>(TurnParams{from, turned, p.rotary, p.tokens, p.heads}, stream);
}

template <class Math, int kDim>
int launch_forward(const AttentionParams& params, void* stream) {
  using S = ForwardShape<kDim>;
  AttentionParams p = params;
  if (const int error = launch_list<VisionRows>(p, p.max_seqlen, p.tiles, 1, stream)) {
    return error;
  }
  if (const int error = launch_turn<Math, kDim>(params, params.k, params.rotated_k, stream, p.k)) {
    return error;
  }
  return launch(flash_forward<Math, kDim, VisionRows>, list_length(p) * p.heads, S::kThreads,
                S::kShared, stream, p);
}

template <class Math, int kDim>
int launch_backward(const AttentionGradParams& p, void* stream) {
  using K = KeysShape<kDim>;
  using Q = QueriesShape<kDim>;
  const AttentionParams& f = p.forward;
  const int64_t blocks = list_length(f) * f.heads;
  if (const int error = launch_list<VisionRows>(f, f.max_seqlen, f.tiles, 2, stream)) return error;
  if (const int error = launch(row_sums<Math, kDim>, (f.tokens + kSumRows - 1) / kSumRows * f.heads,
                               kSumThreads, 0, stream, p)) {
    return error;
  }
  // One workspace for both, one after the other.
  AttentionGradParams turned = p;
  // mutant: rotate-launch-backward-if-launch-rotary
  if (const int error = launch_turn<Math, kDim>(f, f.q, f.rotated_k, stream, turned.forward.q)) {
    return error;
  }
  if (const int error = launch(flash_keys<Math, kDim, VisionRows>, blocks, K::kThreads, K::kShared,
                               stream, turned)) {
    return error;
  }
  turned.forward.q = f.q;  // mutant: rotate-launch-backward-rotated-backward-forward-q
  if (const int error = launch_turn<Math, kDim>(f, f.k, f.rotated_k, stream, turned.forward.k)) {
    return error;
  }
  return launch(flash_queries<Math, kDim, VisionRows>, blocks, Q::kThreads, Q::kShared, stream,
                turned);
}

bool is_vision(const AttentionParams& p) {
  return p.rotary != nullptr && p.order == nullptr && p.kv_heads == p.heads &&
         p.dtype != DType::kFloat32 && p.tokens <= 0x7fffffff;
}

}  // namespace

int flash_vision_turn_cuda(const AttentionParams& f, const HeadsView& from, void* workspace,
                           void* stream) {
  if (!is_vision(f)) return cudaErrorInvalidValue;
  const TurnParams p = {from, turned_rows(f, workspace), f.rotary, f.tokens, f.heads};
  if (f.dtype == DType::kBFloat16) {
    VLMK_FLASH_DIMS(launch_turn, ptx::Bf16Math, f.head_dim)
  }
  VLMK_FLASH_DIMS(launch_turn, ptx::Fp16Math, f.head_dim)
}

int flash_vision_mma_forward_cuda(const AttentionParams& p, void* stream) {
  if (!is_vision(p)) return cudaErrorInvalidValue;
  if (p.segments == 0) return cudaSuccess;
  if (p.dtype == DType::kBFloat16) {
    VLMK_FLASH_DIMS(launch_forward, ptx::Bf16Math, p.head_dim)
  }
  VLMK_FLASH_DIMS(launch_forward, ptx::Fp16Math, p.head_dim)
}

int flash_vision_mma_backward_cuda(const AttentionGradParams& p, void* stream) {
  const AttentionParams& f = p.forward;
  if (!is_vision(f)) return cudaErrorInvalidValue;
  if (f.segments == 0) return cudaSuccess;
  if (f.dtype == DType::kBFloat16) {
    VLMK_FLASH_DIMS(launch_backward, ptx::Bf16Math, f.head_dim)
  }
  VLMK_FLASH_DIMS(launch_backward, ptx::Fp16Math, f.head_dim)
}

}  // namespace vlmk
