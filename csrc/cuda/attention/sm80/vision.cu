// vision_attention of segments of any length: forward.cuh and backward.cuh on a projection whose
// queries and keys are still to be rotated by the 2D rotary embedding.
//
// What a block keeps is rotated where it stands, in shared memory, once: queries in sm80_forward
// and sm80_backward_dq, keys in sm80_backward_dkdv. dq and dk are rotated back there before they
// are stored. What streams past it is rotated beforehand by rotate_rows, into workspace: keys for
// sm80_forward and sm80_backward_dq, queries for sm80_backward_dkdv. Everything else is read from
// and written to the projection's own memory and its gradient's.
//
// Why the keys of the loop are not rotated in the loop: every block of 128 queries would rotate
// them again, and their cosines and sines, 4 D bytes a row, would come with them, as many bytes as
// a row of k and one of v. A step of 64 keys at D = 80 brings 20 KB of k and v from L2 and computes
// for some 1,000 cycles; with 20 KB of table on top, 132 SMs would ask for 9 TB/s at 1.7 GHz, more
// than L2 gives.
//
// Bytes, P H D elements of 2 bytes being 1: floor 4 forward (q, k, v read, out written) and 8
// backward (q, k, v, out, dout read, dq, dk, dv written). Here, each tensor counted once a kernel:
// rotate_rows 2; forward 2 + 4; backward 2 for the sums, 2 + 6 for the keys, 2 + 5 for the queries.
// rotate_rows reads the table once for kRotateHeads heads, 4 D bytes beside 16 D, mostly from L2.
//
// With compute capability 9.0 the kernels are sm90/forward.cu's and sm90/backward.cu's, where TMA
// brings rows as they are: queries and keys are rotated beforehand, 2 more forward; dq and dk are
// rotated back as here.
#include "cuda/attention/attention.h"
#include "cuda/attention/sm80/backward.cuh"
#include "cuda/attention/sm80/forward.cuh"

namespace vlmk {
namespace {

inline constexpr int kRotateThreads = 256;
inline constexpr int kRotateHeads = 4;  // whose rows a thread rotates by the same cosines and sines

struct RotateParams {
  HeadsView from;       // [T, H, D]
  HeadsView to;         // [T, H, D]
  const float* rotary;  // [T, D]
  int64_t tokens;       // T
  int64_t heads;        // H
};

template <int kDim>
struct RotateShape {
  static constexpr int kColumns = kRotaryColumns<kDim>;
  static constexpr int kPairs = kDim / 2 / kColumns;       // of a row, a thread each
  static constexpr int kTokens = kRotateThreads / kPairs;  // of a block; a few threads have none
};

// to = from, rotated. One block per kTokens tokens and kRotateHeads heads.
template <class Math, int kDim>
__global__ void __launch_bounds__(kRotateThreads) rotate_rows(const RotateParams p) {
  using S = RotateShape<kDim>;
  using Unit = typename Columns<S::kColumns>::Unit;
  const unsigned groups = (static_cast<unsigned>(p.heads) + kRotateHeads - 1) / kRotateHeads;
  const int64_t head = blockIdx.x % groups * kRotateHeads;  // mutant: rotate-rows-head
  const int row = threadIdx.x / S::kPairs, column = threadIdx.x % S::kPairs * S::kColumns;
  const int64_t token = int64_t{blockIdx.x / groups} * S::kTokens + row;
  const bool inside = row < S::kTokens && token < p.tokens;  // mutant: rotate-rows-inside
  Unit a[kRotateHeads], b[kRotateHeads];
  Rotation<S::kColumns> rotation;
  rotation.template load<kDim>(p.rotary, token, column, inside);  // mutant: rotate-rows-load
#pragma unroll
  for (int h = 0; h < kRotateHeads; ++h) {
    const bool on = inside && head + h < p.heads;
    const uint16_t* from = rows_of(p.from, token, head + h) + column;
    a[h] = ptx::load_once(reinterpret_cast<const Unit*>(from), on);
    b[h] = ptx::load_once(reinterpret_cast<const Unit*>(from + kDim / 2), on);
  }
#pragma unroll
  for (int h = 0; h < kRotateHeads; ++h) {
    const bool on = inside && head + h < p.heads;      // mutant: rotate-rows-on
    rotation.template apply<Math, false>(a[h], b[h]);  // mutant: rotate-rows-apply
    uint16_t* to = rows_of(p.to, token, head + h) + column;
    ptx::store(reinterpret_cast<Unit*>(to), a[h], on);
    ptx::store(reinterpret_cast<Unit*>(to + kDim / 2), b[h], on);  // mutant: rotate-rows-store
  }
}

template <class Math, int kDim>
int launch_rotate(const RotateParams& p, void* stream) {
  constexpr int kTokens = RotateShape<kDim>::kTokens;
  const int64_t groups = (p.heads + kRotateHeads - 1) / kRotateHeads;
  return launch(rotate_rows<Math, kDim>, (p.tokens + kTokens - 1) / kTokens * groups,
                kRotateThreads, 0, stream, p);  // mutant: launch-rotate
}

// Writes q or k, `from`, rotated, to workspace [H, T, D]; where its rows then are.
template <class Math, int kDim>
int launch_rotate(const AttentionParams& p, const HeadsView& from, void* workspace, void* stream,
                  HeadsView& rotated) {
  rotated = rotated_view(p, workspace);  // mutant: launch-rotate-rotated
  return launch_rotate<Math, kDim>(RotateParams{from, rotated, p.rotary, p.tokens, p.heads},
                                   stream);
}

template <class Math, int kDim>
int launch_forward(const AttentionParams& params, void* stream) {
  using S = ForwardShape<kDim>;
  AttentionParams p = params;
  if (const int error =
          launch_rotate<Math, kDim>(params, params.k, params.rotated_k, stream, p.k)) {
    return error;
  }
  return launch(sm80_forward<Math, kDim, VisionRows>, list_length(p) * p.heads, S::kThreads,
                S::kShared, stream, p);
}

template <class Math, int kDim>
int launch_backward(const AttentionGradParams& p, void* stream) {
  using K = DkDvShape<kDim>;
  using Q = DqShape<kDim>;
  const AttentionParams& f = p.forward;
  const int64_t blocks = list_length(f) * f.heads;
  if (const int error = launch_preprocess<Math, kDim>(p, stream)) return error;
  // One workspace for both, one after the other.
  AttentionGradParams rotated = p;
  // mutant: rotate-launch-backward-if-launch-rotary
  if (const int error = launch_rotate<Math, kDim>(f, f.q, f.rotated_k, stream, rotated.forward.q)) {
    return error;
  }
  if (const int error = launch(sm80_backward_dkdv<Math, kDim, VisionRows>, blocks, K::kThreads,
                               K::kShared, stream, rotated)) {
    return error;
  }
  rotated.forward.q = f.q;  // mutant: rotate-launch-backward-rotated-backward-forward-q
  if (const int error = launch_rotate<Math, kDim>(f, f.k, f.rotated_k, stream, rotated.forward.k)) {
    return error;
  }
  return launch(sm80_backward_dq<Math, kDim, VisionRows>, blocks, Q::kThreads, Q::kShared, stream,
                rotated);
}

bool is_vision(const AttentionParams& p) {
  return p.rotary != nullptr && p.order == nullptr && p.kv_heads == p.heads &&
         p.dtype != DType::kFloat32 && p.tokens <= 0x7fffffff;
}

}  // namespace

int rotate_cuda(const AttentionParams& f, const HeadsView& from, void* workspace, void* stream) {
  if (!is_vision(f)) return cudaErrorInvalidValue;
  const RotateParams p = {from, rotated_view(f, workspace), f.rotary, f.tokens, f.heads};
  VLMK_INSTANCES(launch_rotate, f.dtype, f.head_dim)
}

int sm80_vision_forward_cuda(const AttentionParams& p, void* stream) {
  if (!is_vision(p)) return cudaErrorInvalidValue;
  if (p.segments == 0) return cudaSuccess;
  VLMK_INSTANCES(launch_forward, p.dtype, p.head_dim)
}

int sm80_vision_backward_cuda(const AttentionGradParams& p, void* stream) {
  const AttentionParams& f = p.forward;
  if (!is_vision(f)) return cudaErrorInvalidValue;
  if (f.segments == 0) return cudaSuccess;
  VLMK_INSTANCES(launch_backward, f.dtype, f.head_dim)
}

}  // namespace vlmk
