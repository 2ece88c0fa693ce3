// Splits attention into work items; the arithmetic is in kernel.cpp.
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/half.h"
#include "cpu/scratch.h"

namespace vlmk {

namespace {

bool on_amx() { return active_isa() == Isa::kAmxBf16 || active_isa() == Isa::kAmxEmulated; }

// Float32 by parts of bf16 takes longer than multiply-adds in short segments, whose parts are made
// for few products (forward and forward + backward of 64 tokens 0.9x, of 128 1.07x and 1.03x, of
// 256 1.2x and 1.1x): there only if the instruction set is forced.
bool long_ones_on_tiles(DType dtype) {
  return on_amx() && dtype == DType::kFloat32 && !isa_is_forced();
}

bool on_tiles(DType dtype, int64_t max_seqlen) {
  if (long_ones_on_tiles(dtype)) return max_seqlen > kPrefetchLength;
  return on_amx() && (dtype != DType::kFloat16 || tiles_multiply_fp16());
}

// The active instruction set, where it has kernels of its own for these.
Isa isa_of(const AttentionParams& p, int64_t max_seqlen) {
  return p.dtype == DType::kBFloat16 || on_tiles(p.dtype, max_seqlen) ? active_isa()
                                                                      : Isa::kGeneric;
}

}  // namespace

// The instruction sets that isa_of() answers; the others follow in VLMK_DISPATCH.
#ifdef VLMKERNELS_HAVE_AVX512_BF16
#define VLMK_CASE_AVX512_BF16(function, ...) \
  case Isa::kAvx512Bf16:                     \
    return avx512_bf16::function(__VA_ARGS__);
#else
#define VLMK_CASE_AVX512_BF16(function, ...)
#endif
#ifdef VLMKERNELS_HAVE_AMX_BF16
#define VLMK_CASE_AMX_BF16(function, ...) \
  case Isa::kAmxBf16:                     \
    return amx_bf16::function(__VA_ARGS__);
#else
#define VLMK_CASE_AMX_BF16(function, ...)
#endif
#ifdef VLMKERNELS_HAVE_AMX_EMULATED
#define VLMK_CASE_AMX_EMULATED(function, ...) \
  case Isa::kAmxEmulated:                     \
    return amx_emulated::function(__VA_ARGS__);
#else
#define VLMK_CASE_AMX_EMULATED(function, ...)
#endif
#define VLMK_ATTENTION_DISPATCH(params, function, ...) \
  switch (isa_of(params, work.max_seqlen)) {           \
    VLMK_CASE_AVX512_BF16(function, __VA_ARGS__)       \
    VLMK_CASE_AMX_BF16(function, __VA_ARGS__)          \
    VLMK_CASE_AMX_EMULATED(function, __VA_ARGS__)      \
    default:                                           \
      VLMK_DISPATCH(function, __VA_ARGS__)             \
  }

void attention_forward_items(const AttentionParams& p, const AttentionWork& work) {
  VLMK_ATTENTION_DISPATCH(p, attention_forward_items, p, work)
}

void attention_backward_items(const AttentionGradParams& p, const AttentionWork& work) {
  VLMK_ATTENTION_DISPATCH(p.forward, attention_backward_items, p, work)
}

namespace {

void check_segments(const AttentionParams& p) {
  const int32_t* cu = p.cu_seqlens;
  if (cu[0] != 0) {
    throw std::invalid_argument("cu_seqlens starts at " + std::to_string(cu[0]) +
                                "; it must start at 0");
  }
  for (int64_t i = 0; i < p.segments; ++i) {
    if (cu[i + 1] < cu[i]) {
      throw std::invalid_argument("cu_seqlens falls from " + std::to_string(cu[i]) + " to " +
                                  std::to_string(cu[i + 1]) + " at element " +
                                  std::to_string(i + 1) + "; it must not decrease");
    }
  }
  if (cu[p.segments] != p.tokens) {
    throw std::invalid_argument("cu_seqlens ends at " + std::to_string(cu[p.segments]) +
                                "; it must end at q's number of tokens, " +
                                std::to_string(p.tokens));
  }
  if (!p.order) return;
  std::vector<char> seen(static_cast<size_t>(p.tokens));
  for (int64_t i = 0; i < p.tokens; ++i) {
    const int64_t place = p.order[i];
    if (place < 0 || place >= p.tokens || seen[place]) {
      throw std::invalid_argument("window_order has " + std::to_string(place) + " at element " +
                                  std::to_string(i) + "; it must be a permutation of " +
                                  std::to_string(p.tokens) + " patches");
    }
    seen[place] = 1;
  }
}

constexpr int64_t kItemsPerThread = 4;  // or chunks of items: they even out unequal ones
constexpr int64_t kWindowsPerThread = 16;

int64_t threads() { return omp_get_max_threads(); }

// Rows of queries (backward: keys) per item. Each item packs the other side of the segment anew, so
// whole segments unless that leaves threads idle.
int64_t choose_rows(const AttentionParams& p, int64_t heads, int64_t max_seqlen, int64_t fewest) {
  constexpr int64_t kBlock = kCpuBlock;
  const int64_t wanted = kItemsPerThread * threads();
  int64_t rows = std::max<int64_t>(max_seqlen, 1);
  while (rows > fewest && p.tokens * heads / rows < wanted) {
    rows = std::max((rows + 1) / 2, fewest);
  }
  return (rows + kBlock - 1) / kBlock * kBlock;
}

// Of segments, first and last included.
struct Lengths {
  int64_t first, last;
  bool have(int64_t length) const { return first <= length && length <= last; }
};

// Those that have one kernel, whatever else is in a call: so a segment's bits depend on nothing
// else.
std::vector<Lengths> lengths_by_kernel(const AttentionParams& p) {
  constexpr int64_t kLongest = std::numeric_limits<int64_t>::max();
  if (long_ones_on_tiles(p.dtype)) return {{1, kPrefetchLength}, {kPrefetchLength + 1, kLongest}};
  return {{1, kLongest}};
}

// 0 if there are none.
int64_t max_seqlen_of(const AttentionParams& p, const Lengths& lengths) {
  int64_t max_seqlen = 0;
  for (int64_t i = 0; i < p.segments; ++i) {
    const int64_t length = p.cu_seqlens[i + 1] - p.cu_seqlens[i];
    if (lengths.have(length)) max_seqlen = std::max(max_seqlen, length);
  }
  return max_seqlen;
}

// Long segments first: the last items to finish are then short. Of short ones alone the order
// stays, so that a thread's range (cpu/ranges.h) has neighbouring rows.
std::vector<AttentionItem> make_items(const AttentionParams& p, const Lengths& lengths,
                                      int64_t heads, int64_t rows, int64_t max_seqlen) {
  std::vector<AttentionItem> items;
  for (int64_t i = 0; i < p.segments; ++i) {
    const int64_t begin = p.cu_seqlens[i], length = p.cu_seqlens[i + 1] - begin;
    if (!lengths.have(length)) continue;
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t q = 0; q < length; q += rows) {
        items.push_back({begin, length, q, std::min(q + rows, length), head, nullptr});
      }
    }
  }
  const auto longer = [](const AttentionItem& a, const AttentionItem& b) {
    return a.length > b.length;
  };
  if (max_seqlen > kPrefetchLength && !std::is_sorted(items.begin(), items.end(), longer)) {
    std::stable_sort(items.begin(), items.end(), longer);
  }
  return items;
}

// Bytes of a core's second-level cache, 1 MB where the system does not say.
int64_t second_level_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return 1 << 20;
}

// A thread fetches a few heads of a window at a time, as rows that the hardware's prefetcher
// follows: 2.6 KB of each where the second-level cache has 2 MB, 160 elements where it has less
// (windows on Zen 5: 1.02 to 1.08x of 1.3 KB; fp32 backward on Zen 3: 1.02x). 2 MB do not hold as
// many of a backward at hand and of the next: 320 elements (on a Xeon without AMX 1.02 to 1.09x;
// tiles not measured). Fewer where few windows would leave threads idle. Of many windows it takes
// all heads, so that no other thread looks up the same pages (1.02x).
AttentionWork make_work(const AttentionParams& p, const std::vector<AttentionItem>& items,
                        int64_t heads, int64_t rows, int64_t max_seqlen, bool backward) {
  // Above that the results go to memory by non-temporal stores: by the time that they are read,
  // they would have left the reader's cache anyway, and a plain store reads the line first
  // (windows: 1.25x).
  constexpr int64_t kNonTemporalBytes = 16 << 20;
  const int64_t element = size_of(p.dtype);
  const int64_t wide = backward && !on_amx() ? 320 * element : 2560;
  const int64_t run = second_level_cache() < 2 << 20 ? 160 * element : wide;  // bytes
  const int64_t all = static_cast<int64_t>(items.size());
  int64_t chunk = 1, chunks = 1;
  if (max_seqlen <= kPrefetchLength) {
    const int64_t most = std::min(run / (p.head_dim * element), all / kItemsPerThread / threads());
    for (int64_t n = 2; n <= std::min(most, heads); ++n) {
      if (heads % n == 0) chunk = n;
    }
    if (all >= kWindowsPerThread * threads() * heads) chunks = heads / chunk;
  }
  // On Zen 4 a non-temporal store of a line takes longer than to prefetch it and store straight
  // from the tiles (bf16, whose results would be gathered first: 1.01 to 1.04x, backward 1.01
  // to 1.07x).
  const bool plain = p.dtype == DType::kBFloat16 && uses_bf16_dots() && is_zen4();
  const bool non_temporal =
      !plain && p.tokens * p.heads * p.head_dim * element >= kNonTemporalBytes;
  return {items.data(),
          static_cast<int64_t>(items.size()),
          std::min(rows, max_seqlen),
          max_seqlen,
          chunk,
          chunks,
          non_temporal,
          uses_bf16_dots()};
}

int64_t blocks_of(int64_t n) { return (n + kCpuBlock - 1) / kCpuBlock; }

// The dq of each segment and head whose items, which follow each other in `items`, share it.
class SharedDqs {
 public:
  SharedDqs(const AttentionParams& p, std::vector<AttentionItem>& items) {
    const int64_t group = p.heads / p.kv_heads, ld = (p.head_dim + 15) / 16 * 16;
    int64_t floats = 0, blocks = 0;
    const auto split = [](const AttentionItem& i) { return i.rows_end - i.rows_begin < i.length; };
    for (const AttentionItem& item : items) {
      if (!split(item) || item.rows_begin != 0) continue;
      sums_.push_back({item.rows_end, nullptr, nullptr});
      floats += group * blocks_of(item.length) * kCpuBlock * ld;
      blocks += group * blocks_of(item.length);
    }
    if (sums_.empty()) return;
    dq_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(floats) * 4)));
    if (!dq_) throw_out_of_memory(static_cast<size_t>(floats));
    done_ = std::vector<int32_t>(static_cast<size_t>(blocks));
    float* dq = dq_.get();
    int32_t* done = done_.data();
    SharedDq* sums = sums_.data() - 1;
    for (AttentionItem& item : items) {
      if (!split(item)) continue;
      if (item.rows_begin == 0) {
        ++sums;
        sums->dq = dq;
        sums->done = done;
        dq += group * blocks_of(item.length) * kCpuBlock * ld;
        done += group * blocks_of(item.length);
      }
      item.shared_dq = sums;
    }
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::vector<SharedDq> sums_;
  std::unique_ptr<float, Free> dq_;
  std::vector<int32_t> done_;
};

void forward(const AttentionParams& p, const Lengths& lengths) {
  constexpr int64_t kFewest = 256;  // packing keys and values is 1/8 of the work of 64 rows
  const int64_t length = max_seqlen_of(p, lengths);
  const int64_t rows = choose_rows(p, p.heads, length, kFewest);
  const auto items = make_items(p, lengths, p.heads, rows, length);
  AttentionWork work = make_work(p, items, p.heads, rows, length, false);
  const bool shares = length > kPrefetchLength && !on_tiles(p.dtype, length);
  std::vector<int32_t> blocks_taken(shares ? items.size() : 0);
  if (shares) work.blocks_taken = blocks_taken.data();
  if (work.count > 0) attention_forward_items(p, work);
}

void backward(const AttentionGradParams& g, const Lengths& lengths) {
  constexpr int64_t kFewest = 512;  // packing queries and dout is 1/8 of the work of 64 keys
  const AttentionParams& p = g.forward;
  const int64_t length = max_seqlen_of(p, lengths);
  // On tiles, keys whose operands and sums stay in a cache of 2 MB (4,096 tokens: 1.2x; of float32,
  // which has three parts, 1.1x).
  const int64_t fit = p.dtype == DType::kFloat32 ? 512 : 1024;
  const int64_t most = on_tiles(p.dtype, length) ? std::min(length, fit) : length;
  const int64_t rows = choose_rows(p, p.kv_heads, most, kFewest);
  auto items = make_items(p, lengths, p.kv_heads, rows, length);
  const SharedDqs shared(p, items);
  const AttentionWork work = make_work(p, items, p.kv_heads, rows, length, true);
  if (work.count > 0) attention_backward_items(g, work);
}

}  // namespace

int64_t attention_kept_floats(DType dtype) {
  if (on_tiles(dtype, 1)) return 0;
  return dtype == DType::kBFloat16 && uses_bf16_dots() ? kCpuBlock / 2 : kCpuBlock;
}

void attention_forward(const AttentionParams& p) {
  check_segments(p);
  for (const Lengths& lengths : lengths_by_kernel(p)) forward(p, lengths);
}

void attention_backward(const AttentionGradParams& g) {
  check_segments(g.forward);
  for (const Lengths& lengths : lengths_by_kernel(g.forward)) backward(g, lengths);
}

}  // namespace vlmk
