// Plain structs, one per kernel family: what csrc/bindings fills and a kernel reads. No framework.
// T = packed tokens, H = heads, Hkv = key/value heads, D = head_dim, n = segments.
#pragma once
#include <cstdint>

namespace vlmk {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // as in _native.py

// A [tokens, heads, head_dim] tensor: element strides, last dimension contiguous.
struct HeadsView {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct AttentionParams {
  DType dtype;
  HeadsView q;                // [T, H, D]
  HeadsView k;                // [T, Hkv, D]
  HeadsView v;                // [T, Hkv, D]
  HeadsView out;              // [T, H, D]
  float* row_max;             // [H, T] by place, largest |scale|-free score, sign(scale) * q.k, or
                              // one little below it
  float* row_sum;             // [H, T] by place, sum of exp(|scale| * (score - row_max))
  const int32_t* cu_seqlens;  // [n + 1], checked by the launcher
  int64_t segments;           // n
  int64_t tokens;             // T
  int64_t heads;              // H
  int64_t kv_heads;           // Hkv, divides H
  int64_t head_dim;           // D
  float scale;
  bool causal;
  // vision_attention:
  const int32_t* order;  // [T]: the token at each place of the segments, or null
  const float* rotary;   // [T, D] by token: D / 2 cosines, as many sines, or null
  // qkv_attention, on the CPU: elements between the last of the H / Hkv heads of q (dq) that share
  // a key and the first of the next ones, beyond head_stride
  int64_t q_group_gap;
  // On the CPU, or null: [H, T, 64], of each segment of at most 64 tokens and head, from its first
  // token on, exp(|scale| * (score - row_max)) by [key, query], with rows in whole lines of 64
  // bytes: the forward leaves them for the backward. Where products are of bf16 [H, T, 64] bf16,
  // two keys of a query side by side.
  float* probabilities;
  // CUDA, where types are bf16 or fp16 and rows 16-byte aligned:
  int64_t max_seqlen;  // of a segment; window kernels take at most 128
  // Workspace of the kernels for segments of any length, 16-byte aligned:
  int32_t* tiles;   // as TileListParams
  void* rotated_k;  // with rotary, [H, T, D]: k rotated; in the backward of mma.sync q, then k
  void* rotated_q;  // the same for q, for compute capability 9.0 only
};

// Queries, and keys, of a block of the CPU's kernels, and the longest segment whose probabilities
// they keep.
constexpr int kCpuBlock = 64;

// Rows of a segment that a thread block of CUDA's kernels for long segments works on, queries or
// keys; rows of a part of dq of the backward that is one kernel.
constexpr int kTileRows = 128, kDqRows = 64;

// The lists of tiles of queries and of keys, for all calls on these segments; see
// cuda/attention/schedule.cuh.
struct TileListParams {
  const int32_t* cu_seqlens;  // [n + 1]
  int64_t segments;           // n
  int64_t tokens;             // T
  int64_t max_seqlen;         // of a segment
  bool causal;
  bool vision;  // names vision_attention in errors
  // [2 (T / kTileRows + n) + 1, 4], 16-byte aligned: two lists, and how many are used
  int32_t* tiles;
};

struct AttentionGradParams {
  AttentionParams forward;  // as it was, outputs included
  HeadsView dout;           // [T, H, D]
  HeadsView dq;             // [T, H, D]
  HeadsView dk;             // [T, Hkv, D]
  HeadsView dv;             // [T, Hkv, D]
  float* lse_delta;  // workspace on CUDA as `tiles` is, [2, H, T]: log2 of each softmax row's
                     // sum of exponentials; sum of out * dout
  // Workspace of the backward of two kernels for compute capability 9.0, where the heads that share
  // a key are dealt out to `group_parts` blocks: their sums of dk and dv. Null: one block has them
  // all.
  float* dkv_parts;     // [group_parts, 2, T, Hkv, D]
  int64_t group_parts;  // the last ones may have fewer heads
  // Workspace of the backward of one kernel for compute capability 9.0; null: of two.
  float* dq_sum;  // [H, T / kDqRows + n, kDqRows D], 16-byte aligned: dq, as threads hold it
  int32_t* done;  // [H (T / kDqRows + n)], 0 on entry: parts that were added to each one of dq_sum
};

// Where the patches of images and videos lie: P patches in units of merge_size^2, G units.
struct VisionLayoutParams {
  const int64_t* grid;  // [n, 3]: frames, patch rows, patch columns
  int64_t count;        // n
  int64_t merge_size;
  int64_t window_side;         // units along a window's side, 0 for no windows
  int64_t* position_ids;       // [P, 2]: row, column in the frame, in patch order
  int32_t* cu_seqlens;         // [frames + 1]
  int32_t* cu_window_seqlens;  // [windows + 1]; this and the rest null without windows
  int64_t* window_index;       // [G]: unit at each place in window order
  int64_t* reverse_index;      // [G]: its inverse
  int32_t* window_order;       // [P]: patch at each place in window order
};

// How Adam's moments are held, as in optim/native.py; codes: see cpu/adam/dynamic_tree.inl.
enum class MomentType : int { kFloat32 = 0, kBFloat16 = 1, kCodes = 2 };

// One parameter tensor of a multi-tensor Adam step; all arrays [numel], dense, same element order.
struct AdamTensor {
  float* param;
  const void* grad;  // fp32 or bf16, see grad_dtype
  void* exp_avg;     // fp32, bf16 or 8-bit codes, see moments
  void* exp_avg_sq;
  float* exp_avg_scale;  // [ceil(numel / 256)] for codes, else null: see cpu/adam/dynamic_tree.inl
  float* exp_avg_sq_scale;
  void* low;  // bf16 copy of param to write, or null; may be grad's own memory where that is bf16
  int64_t numel;
  int64_t first;  // number of element 0, where this is a piece of a tensor: a multiple of 16 (256)
  double step;    // counted from 1
  DType grad_dtype;
  MomentType moments;
};

struct AdamParams {
  const AdamTensor* tensors;
  int64_t count;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled;     // AdamW: decay the parameter; else Adam with L2: decay the gradient
  float grad_factor;  // multiplies every gradient as it is read, ...
  float grad_scale;   // ... and this the product, rounded to fp32
};

// Gradients of which the sum of squares is wanted.
struct AdamGradient {
  const void* grad;  // [numel]
  int64_t numel;
  DType dtype;  // fp32 or bf16
};

// Visual embedding: S = positions of the whole pack, R = rows of this rank's shard, V = table rows
// held here, n = visual rows, h = hidden size. Types may differ where a field gives one: values are
// then converted, rounded to nearest even.

// out[i] = visual[visual_index[first + i]] where that index is >= 0, else a base row. Where ids is
// null, out may be table itself: then only rows with an index are written.
struct EmbeddingParams {
  const int64_t* ids;           // [S], or null: base row i is table[i] (scatter_visual)
  const int32_t* visual_index;  // [S]
  const void* table;            // [V, h]; [R, h] where ids is null
  const void* visual;           // [n, h]
  void* out;                    // [R, h]
  int64_t first;                // position of the first row of the shard
  int64_t rows;                 // R
  int64_t hidden;               // h
  int64_t vocab_start;          // id of table[0]
  int64_t vocab_rows;           // V
  int64_t visual_rows;          // n, or -1: no visual, rows with visual_index >= 0 are zero
  bool partial;                 // an id outside the table gives a zero row; else it is an error
  DType table_dtype;
  DType visual_dtype;
  DType out_dtype;
};

// out[i] += visual[visual_index[first + i]] where that index is >= 0, rounded once; other rows
// stay.
struct EmbeddingAddParams {
  const int32_t* visual_index;  // [S]
  const void* visual;           // [n, h], dtype
  void* out;                    // [R, h], dtype
  int64_t first;                // position of the first row of the shard
  int64_t rows;                 // R
  int64_t hidden;               // h
  int64_t visual_rows;          // n
  DType dtype;
};

// dvisual[r] = grad[i] where visual_index[first + i] == r, zero where no position names r.
struct EmbeddingGatherParams {
  const int32_t* visual_index;  // [S]
  const void* grad;             // [R, h]
  int32_t* inverse;             // [n] workspace, all -1 on entry
  void* dvisual;                // [n, h]
  int64_t first;                // position of the first row of the shard
  int64_t rows;                 // R
  int64_t hidden;               // h
  int64_t visual_rows;          // n
  DType grad_dtype;
  DType dvisual_dtype;
};

// The positions whose rows a table's gradient sums, by row, those of a row in their order.
struct EmbeddingSortParams {
  const int64_t* ids;           // [S]
  const int32_t* visual_index;  // [S], >= 0: not of the table
  int64_t* keys;                // [R], of which as many are written as there are such positions
  int64_t* order;               // [R], their positions, counted from `first`
  int64_t first;
  int64_t rows;  // R
  int64_t vocab_start;
  int64_t vocab_rows;   // V; other ids are skipped
  int64_t padding_idx;  // an id that is skipped, or -1
};

// Rows of a run of `rows` equal keys that are added one after another: all of a short run, else a
// part of it; then the parts' sums are added, first to last.
constexpr int64_t kShortRun = 64;
constexpr int kRunParts = 16;
constexpr int64_t rows_of_part(int64_t rows) {
  return rows <= kShortRun ? rows : (rows + kRunParts - 1) / kRunParts;
}

// dweight[key] = sum in fp32 of grad[order[j]] over the run of equal keys, in the order of j and of
// rows_of_part: one value on every device.
struct EmbeddingReduceParams {
  const int64_t* keys;   // [m], ascending, >= 0; V and above are skipped
  const int64_t* order;  // [m], the row of grad of each key
  const void* grad;      // [R, h]
  void* dweight;         // [V, h]; on CUDA zero on entry, or to be added to
  int64_t count;         // m
  int64_t hidden;        // h
  int64_t vocab_rows;    // V
  DType grad_dtype;
  DType dweight_dtype;
  bool accumulate;  // add the sum, in fp32, to what dweight holds; rows without a key stay
};

// C [rows, columns] = A [rows, depth] B [depth, columns], summed in float32: plus bias [columns] of
// C's type where it is not null, plus what a float32 C holds if `add`. A's element (i, k) lies at
// a[i * a_row + k * a_column], of which one is 1, and B's likewise; C's rows are c_row apart.
struct ProductParams {
  const void* a;
  const void* b;
  const void* bias;
  void* c;
  int64_t rows;
  int64_t columns;
  int64_t depth;
  int64_t a_row;
  int64_t a_column;
  int64_t b_row;
  int64_t b_column;
  int64_t c_row;
  bool add;
  DType dtype;    // of A and B: float32 or bf16
  DType c_dtype;  // float32, or bf16 as they
};

// RMSNorm of rows: y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps). N = rows, all dtype.
struct RmsNormParams {
  void* x;               // [N, width], becomes x + residual + bias if there is a residual
  const void* residual;  // [N, width], or null
  const void* bias;      // [width], or null
  const void* weight;    // [width]
  void* y;               // [N, width]
  float* rstd;           // [N]
  int64_t rows;
  int64_t width;
  float eps;
  DType dtype;
};

// The gradient of a norm's or SwiGLU's parameter, a sum over rows: first of so many rows each, then
// of these parts in their order.
struct ColumnSums {
  void* total;   // [columns]; float32 that is added to if adds
  float* parts;  // [ceil(N / rows of a part), columns] workspace; null: no gradient is wanted
  bool adds;
};
// Rows of a part on the CPU; on CUDA of a norm and of SwiGLU.
constexpr int64_t kSumRows = 32, kCudaNormRows = 8, kCudaSwigluRows = 32;
// Columns of a norm on CUDA, at most: a thread block has a row.
constexpr int64_t kNormColumns = 8192;

struct RmsNormGradParams {
  const void* dy;  // [N, width]
  const void* ds;  // [N, width], added to dx, or null: the gradient of x's use beside the norm
  const void* x;   // [N, width], what was normalized
  const void* weight;
  const float* rstd;
  void* dx;  // [N, width]
  ColumnSums dweight;
  ColumnSums dbias;  // of dx
  int64_t rows;
  int64_t width;
  DType dtype;
};

// y = silu(gate) up of rows [gate | up], all dtype.
struct SwigluParams {
  void* x;           // [N, 2 width], on the CPU becomes x + bias
  const void* bias;  // [2 width] or null
  void* y;           // [N, width], on CUDA [N, y_stride] with zeros behind width
  int64_t y_stride;
  int64_t rows;
  int64_t width;
  DType dtype;
};

struct SwigluGradParams {
  const void* dy;  // [N, width], on CUDA its rows dy_stride elements apart
  int64_t dy_stride;
  const void* x;     // [N, 2 width], on the CPU the bias in it
  const void* bias;  // [2 width] or null, on CUDA
  void* dx;          // [N, 2 width]
  ColumnSums dbias;
  int64_t rows;
  int64_t width;
  DType dtype;
};

// Heads rotated by the angles of their tokens, in strides of elements; on CUDA alone.
struct RotaryParams {
  const void* x;  // [T, groups, heads, D]
  int64_t x_token;
  int64_t x_group;
  int64_t x_head;
  void* out;  // the same shape
  int64_t out_token;
  int64_t out_group;
  int64_t out_head;
  const float* cos;  // [T, D / 2], rows table_stride elements apart
  const float* sin;
  int64_t table_stride;
  int64_t tokens;
  int64_t groups;
  int64_t heads;
  int64_t head_dim;
  bool conjugate;  // by the negative angles
  DType dtype;
};

// Rows of logits to statistics and, in their place, gradients. N = rows, C = columns, which are
// classes [first_class, first_class + C). A row's statistics may be of many calls: each adds its
// columns. Gradients take them as they are then.
struct CrossEntropyParams {
  void* logits;            // [N, C], dtype
  const int64_t* targets;  // [N], a class; one of other columns than these adds nothing
  float* row_max;          // [N], at first the lowest float
  float* row_sum;          // [N], sum of exp(logit - row_max), at first 0
  float* target_logit;     // [N], at first 0
  float* logit_sum;        // [N], at first 0; used with label_smoothing only
  const float* scale;      // [N]: factor of each row's gradient, or null: logits are not written
  int64_t rows;            // N
  int64_t columns;         // C
  int64_t first_class;
  int64_t classes;  // in all, for label_smoothing
  double label_smoothing;
  double z_loss;
  bool statistics;  // add these columns to the statistics first
  DType dtype;
};

// out[row] = table[channel][pixel], rows in the order (slice, y/merge, x/merge, merge, merge),
// inside a row (channel, frame of the slice, y, x). Frames past the end repeat the last one.
struct PatchifyParams {
  const uint8_t* pixels;  // [frames, height, width, 3], height and width multiples of patch * merge
  const void* table;      // [3, 256], dtype
  void* out;              // [slices * height/patch * width/patch, 3 * temporal * patch^2], dtype
  int64_t frames;         // >= 1
  int64_t height;
  int64_t width;
  int64_t patch_size;
  int64_t temporal_patch_size;
  int64_t merge_size;
  int64_t threads;
  DType dtype;  // of table and out
};

// Bicubic resize of RGB bytes.
struct ResizeParams {
  const uint8_t* pixels;  // [frames, in_height, in_width, pixel_bytes]
  uint8_t* out;           // [frames, out_height, out_width, 3]
  int64_t frames;
  int64_t in_height;
  int64_t in_width;
  int64_t pixel_bytes;  // 3, or 4: Pillow's own RGBX, whose fourth byte is not looked at
  int64_t out_height;
  int64_t out_width;
  int64_t pillow;  // 100 times the major version and the minor one, for the order of the passes
  int64_t threads;
};

}  // namespace vlmk
