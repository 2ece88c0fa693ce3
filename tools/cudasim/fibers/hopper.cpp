// Hopper's own: mbarriers, tensor copies, products of warpgroups, registers that change hands.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <map>

#include "machine.h"

namespace emu {
namespace {

constexpr int kMostArrivals = (1 << 20) - 1, kMostBytes = (1 << 20) - 1;

struct MBarrier {
  uint32_t arrivals, pending;
  int number;           // among the mbarriers of the block
  Fiber* maker;         // the thread that initialised it,
  uint32_t made;        // its clock then,
  uint32_t fenced = 0;  // and at its fence_barrier_init; 0: not yet
  uint32_t phase = 0;
  int64_t bytes = 0;     // that copies still bring, less those that came before they were announced
  Clock arrived, ended;  // what those knew that arrived in this phase, and in those before
  std::vector<Fiber*> waiting;
  char status[160];

  const char* describe(uint32_t address) {
    std::snprintf(status, sizeof status,
                  "the mbarrier at byte %u [phase %u lacks %u of %u arrivals and %lld bytes]",
                  address, phase, pending, arrivals, static_cast<long long>(bytes));
    return status;
  }
};

struct TensorCopy {
  std::vector<uint32_t> units;  // of 16 bytes in shared memory
  std::vector<char> data;
  uint32_t barrier, phase;
};

struct Hopper {
  std::map<uint32_t, MBarrier> barriers;  // by address
  std::vector<TensorCopy> copies;         // under way
  int registers[kMaxGroups];              // of each thread of a warpgroup
  int pool;                               // all of the block's
  std::vector<Fiber*> want_registers;
} h;

MBarrier& barrier_at(uint32_t address) {
  const auto found = h.barriers.find(address);
  if (found == h.barriers.end())
    fail("byte %u of shared memory is no initialised mbarrier", address);
  MBarrier& b = found->second;
  if (b.maker != current && known(current->clock, b.maker->number) < b.made)
    fail("race: an mbarrier at byte %u that thread %d initialised without a barrier between",
         address, b.maker->number);
  return b;
}

void end_phase(uint32_t address, MBarrier& b) {
  if (b.pending == 0 && b.bytes == 0) {
    ++b.phase;
    b.pending = b.arrivals;
    b.ended = b.arrived;  // what they know only grows
    for (Fiber* f : b.waiting) wake(f);
    b.waiting.clear();
  }
  b.describe(address);
}

void arrive_at(uint32_t address, int64_t bytes) {
  MBarrier& b = barrier_at(address);
  if (bytes < 0 || bytes > kMostBytes || b.bytes + bytes > kMostBytes)
    fail("too many bytes, %lld more, at %s", static_cast<long long>(bytes), b.describe(address));
  if (b.pending == 0) fail("an arrival too many at %s", b.describe(address));
  b.bytes += bytes;
  --b.pending;
  learn(b.arrived, current->clock);
  ++current->clock[current->number];
  end_phase(address, b);
}

}  // namespace

void begin_block_hopper() {
  h.barriers.clear();
  h.copies.clear();
  h.want_registers.clear();
  const int each = std::min(65536 / block_threads() / 8 * 8, 256);
  for (int& registers : h.registers) registers = each;
  h.pool = each * block_threads();
}

void end_thread_hopper() {
  const Fiber& f = *current;
  if (!f.products.empty()) fail("the thread ends with wgmmas under way");
  if (!f.bulks.empty()) fail("the thread ends with %zu bulk copies under way", f.bulks.size());
  bool last = true;
  for (int i = 0; i < block_threads(); ++i) last &= fiber(i).done || &fiber(i) == current;
  if (last && !h.copies.empty())
    fail("the block ends with %zu tensor copies under way, the first for %s", h.copies.size(),
         barrier_at(h.copies[0].barrier).describe(h.copies[0].barrier));
}

// ---- mbarriers

void barrier_init(uint32_t address, uint32_t arrivals) {
  EMU_HERE();
  if (address % 8) fail("an mbarrier at byte %u is misaligned", address);
  if (arrivals == 0 || arrivals > kMostArrivals) fail("an mbarrier of %u arrivals", arrivals);
  if (h.barriers.count(address)) fail("the mbarrier at byte %u is initialised twice", address);
  take_barrier(address);
  MBarrier& b = h.barriers[address];
  b.arrivals = b.pending = arrivals;
  b.number = static_cast<int>(h.barriers.size()) - 1;
  b.maker = current;
  b.made = current->clock[current->number];
  b.describe(address);
}

void fence_barrier_init() {
  EMU_HERE();
  for (auto& [address, b] : h.barriers)
    if (b.maker == current) b.fenced = current->clock[current->number];
}

void mbarrier_arrive(uint32_t address, uint32_t bytes) {
  EMU_HERE();
  arrive_at(address, bytes);
}

void mbarrier_wait(uint32_t address, uint32_t parity) {
  EMU_HERE();
  MBarrier& b = barrier_at(address);
  if (parity > 1) fail("parity %u of a phase", parity);
  while ((b.phase & 1) == parity) {
    b.waiting.push_back(current);
    wait(b.status);
  }
  learn(current->clock, b.ended);
  know(current->clock, mbarrier_agent(b.number), b.phase);
}

// ---- tensor copies

namespace {

struct Map {  // in the 128 bytes of a CUtensorMap
  uint64_t mark;
  const char* address;
  uint32_t element, rank;
  uint64_t sizes[5], strides[5];  // strides[0] is of the second dimension
  uint32_t box[5], span;          // bytes within which units of 16 are exchanged
};
static_assert(sizeof(Map) == sizeof(CUtensorMap));
constexpr uint64_t kMark = 0x70616d726f736e65;

// Bits 4 on of a shared address are exchanged by bits 7 on: as many as the span has units.
uint32_t swizzled(uint32_t address, uint32_t span) {
  return address ^ (address >> 7 & (span / 16 - 1)) << 4;
}

}  // namespace

void check_map(const void* map) {
  EMU_HERE();
  if (reinterpret_cast<uintptr_t>(map) % 64) fail("a tensor map that is not aligned to 64 bytes");
  if (static_cast<const Map*>(map)->mark != kMark)
    fail("a tensor map that cuTensorMapEncodeTiled did not write");
}

void load_box(uint32_t to, const void* map, uint32_t barrier, int column, int head, int token) {
  check_map(map);
  EMU_HERE();
  Map t;
  std::memcpy(&t, map, sizeof t);
  if (t.rank != 3) fail("three coordinates into a map of %u dimensions", t.rank);
  MBarrier& b = barrier_at(barrier);
  const Clock& clock = current->clock;
  const bool by_fence = b.fenced && known(clock, b.maker->number) >= b.fenced;
  if (!by_fence && known(clock, visible_agent(b.maker->number)) < b.made)
    fail("a tensor copy names the mbarrier at byte %u before a fence_barrier_init of thread %d",
         barrier, b.maker->number);
  if (to % 128) fail("a tensor copy to byte %u of shared memory, no multiple of 128", to);
  const uint32_t row_bytes = t.box[0] * t.element;
  if (t.span > 16 && row_bytes != t.span) fail("a box narrower than its swizzle's span");
  TensorCopy copy;
  copy.barrier = barrier, copy.phase = b.phase;
  copy.data.resize(size_t{row_bytes} * t.box[1] * t.box[2]);
  char* row = copy.data.data();
  const int64_t corner[] = {column, head, token};
  for (uint32_t z = 0; z < t.box[2]; ++z)
    for (uint32_t y = 0; y < t.box[1]; ++y, row += row_bytes) {
      const int64_t at[] = {0, corner[1] + y, corner[2] + z};
      bool inside = true;
      for (int i = 1; i < 3; ++i) inside &= at[i] >= 0 && at[i] < static_cast<int64_t>(t.sizes[i]);
      const int64_t start =
          at[2] * static_cast<int64_t>(t.strides[1]) + at[1] * static_cast<int64_t>(t.strides[0]);
      const uint32_t unit = 16 / t.element;
      for (uint32_t x = 0, count; inside && x < t.box[0]; x += count) {
        const int64_t element = corner[0] + x, size = static_cast<int64_t>(t.sizes[0]);
        const char* from = t.address + start + element * t.element;
        const bool whole = reinterpret_cast<uintptr_t>(from) % 16 == 0 && element >= 0 &&
                           element + unit <= size && x + unit <= t.box[0];
        count = whole ? unit : 1;
        if (element < 0 || element >= size) continue;
        check_global(from, static_cast<int>(count * t.element), Access::kConstant);
        std::memcpy(row + x * t.element, from, count * t.element);
      }
    }
  const uint32_t units = static_cast<uint32_t>(copy.data.size() / 16);
  for (uint32_t i = 0; i < units; ++i) {
    copy.units.push_back(swizzled(to + i * 16, t.span));
    start_arrival(copy.units.back(), mbarrier_agent(b.number), b.phase + 1);
  }
  h.copies.push_back(std::move(copy));
}

bool copy_arrives() {
  std::vector<size_t> wanted;
  for (size_t i = 0; i < h.copies.size(); ++i)
    if (!h.barriers[h.copies[i].barrier].waiting.empty()) wanted.push_back(i);
  if (wanted.empty()) return false;
  const size_t place = wanted[draw(wanted.size())];
  const TensorCopy copy = std::move(h.copies[place]);
  h.copies.erase(h.copies.begin() + static_cast<ptrdiff_t>(place));
  MBarrier& b = h.barriers[copy.barrier];
  if (b.phase != copy.phase)
    fail(
        "a tensor copy of %zu bytes arrives after the phase %u that it was started in, for which "
        "too few bytes were announced: %s",
        copy.data.size(), copy.phase, b.describe(copy.barrier));
  for (size_t i = 0; i < copy.units.size(); ++i) arrive(copy.units[i], &copy.data[i * 16]);
  b.bytes -= static_cast<int64_t>(copy.data.size());
  if (b.bytes < -kMostBytes) fail("too many bytes at %s", b.describe(copy.barrier));
  end_phase(copy.barrier, b);
  return true;
}

void fence_async_proxy() {
  EMU_HERE();
  Fiber& f = *current;
  know(f.clock, visible_agent(f.number), f.clock[f.number]);
  ++f.clock[f.number];
}

// ---- bulk copies, and counts by which blocks order them

void copy_bulk(float* to, uint32_t from, uint32_t bytes, bool adds) {
  EMU_HERE();
  if (reinterpret_cast<uintptr_t>(to) % 16 || bytes % 16 || bytes == 0)
    fail("a bulk copy of %u bytes to %p: multiples of 16", bytes, static_cast<void*>(to));
  if (current->unfenced) fail("a bulk copy after wait_count without a fence_async_proxy_global");
  for (uint32_t i = 0; i < bytes; i += 16) check_bulk(from + i);
  current->bulks.push_back({to, from, bytes, adds, false, {}});
}

void commit_bulk() {
  EMU_HERE();
  for (Bulk& b : current->bulks) b.committed = true;
}

void wait_bulk(bool read) {
  EMU_HERE();
  std::vector<Bulk> left;
  for (Bulk& b : current->bulks) {
    if (b.committed && b.data.empty()) {
      b.data.resize(b.bytes / 4);
      for (uint32_t i = 0; i < b.bytes; i += 16)
        std::memcpy(&b.data[i / 4], check_shared(b.from + i, 16, Access::kRead, "bulk copy"), 16);
    }
    for (size_t i = 0; b.committed && !read && i < b.data.size(); ++i) {
      if (b.adds) check_global(b.to + i, 4, Access::kRead);
      check_global(b.to + i, 4, Access::kWrite);
      b.to[i] = b.adds ? b.to[i] + b.data[i] : b.data[i];
    }
    if (!b.committed || read) left.push_back(std::move(b));
  }
  current->bulks = std::move(left);
}

void fence_async_proxy_global() { current->unfenced = false; }

void wait_count(const int* count, int value) {
  EMU_HERE();
  check_global(count, 4, Access::kAtomic);
  if (*count != value)
    fail("deadlock: a count is %d, and a thread waits for %d, which no block before it reached",
         *count, value);
  current->unfenced = true;
}

void count_up(int* count) {
  EMU_HERE();
  check_global(count, 4, Access::kAtomic);
  ++*count;
}

int next_number(int* counter) {
  EMU_HERE();
  check_global(counter, 4, Access::kAtomic);
  return (*counter)++;
}

// ---- registers

void set_registers(int count, bool more) {
  EMU_HERE();
  if (count % 8 || count < 24 || count > 256)
    fail("setmaxnreg to %d: multiples of 8 from 24 to 256", count);
  meet(more ? "setmaxnreg.inc" : "setmaxnreg.dec", current, [](void**) {}, kGroupLanes);
  int& own = h.registers[current->warpgroup()];
  if (own == count) return;  // another thread of the warpgroup has seen to it
  if (more != (count > own))
    fail("setmaxnreg.%s to %d of a warpgroup that has %d", more ? "inc" : "dec", count, own);
  for (;;) {
    int used = 0;
    for (int g = 0; g < block_threads() / kGroupLanes; ++g) used += h.registers[g] * kGroupLanes;
    if (own == count) return;
    if (used + (count - own) * kGroupLanes <= h.pool) break;
    h.want_registers.push_back(current);
    wait("setmaxnreg.inc, for registers");
  }
  own = count;
  for (Fiber* f : h.want_registers) wake(f);
  h.want_registers.clear();
}

// ---- products

namespace {

const uint32_t kUnderWay = 0x7fa5a5a5;  // a NaN that nobody computes

struct Multiply {
  Half type;
  int columns;
  float* c;
  const uint32_t* a;
  uint64_t a_matrix, b_matrix;
  bool add, deep;
};

// The unit of 16 bytes of a matrix behind a descriptor: depth contiguous, unit `half` of row `row`;
// otherwise of depth `row`, the 8 rows from 8 * `half` on. The strides as the PTX manual has them.
uint32_t unit_at(uint64_t matrix, bool depth_contiguous, int row, int half) {
  const auto field = [&](int at) { return static_cast<uint32_t>(matrix >> at & 0x3fff) << 4; };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  const uint32_t span = 256u >> (matrix >> 62);  // 1, 2, 3: 128, 64, 32 bytes
  const uint32_t in_span = span / 16;
  uint32_t at = start + row / 8 * stride + row % 8 * span;
  if (depth_contiguous)
    at += half * 16;
  else
    at += half / in_span * leading + half % in_span * 16;
  return swizzled(at, span);
}

void check_matrix(uint64_t matrix) {
  constexpr uint64_t kFields =
      uint64_t{0x3fff} | uint64_t{0x3fff} << 16 | uint64_t{0x3fff} << 32 | uint64_t{3} << 62;
  if (matrix & ~kFields)
    fail("a matrix descriptor with bits or a base offset that are not emulated");
  if (!(matrix >> 62)) fail("a matrix without a swizzle is not emulated");
  const uint32_t span = 256u >> (matrix >> 62), start = (matrix & 0x3fff) << 4;
  if (start % (8 * span) / span)
    fail("a matrix at byte %u, in the middle of 8 rows of %u bytes, needs a base offset", start,
         span);
}

float number(Half type, uint16_t bits) {
  return type == Half::kBFloat16 ? from_bf16(bits) : from_fp16(bits);
}

// All 128 threads are here: the last one reads the operands and computes.
void multiply_group(void** slots) {
  const Multiply& any = *static_cast<Multiply*>(slots[0]);
  const int first = current->warpgroup() * kGroupLanes;
  const uint32_t group = fiber(first).committed + 1;
  Clock common = fiber(first).clock;  // what all of them know
  for (int t = 0; t < kGroupLanes; ++t) {
    const auto& m = *static_cast<Multiply*>(slots[t]);
    const Fiber& f = fiber(first + t);
    if (m.a_matrix != any.a_matrix || m.b_matrix != any.b_matrix || m.add != any.add)
      fail("descriptors or the predicate of a wgmma differ between threads");
    if (!f.fenced) fail("a wgmma without a wgmma_fence before it");
    if (f.committed + 1 != group) fail("the warps of a warpgroup have committed different groups");
    if (common.size() > f.clock.size()) common.resize(f.clock.size());
    for (size_t i = 0; i < common.size(); ++i) common[i] = std::min(common[i], f.clock[i]);
  }
  static float a[64][16], b[256][16];
  const auto read = [&](float (*to)[16], uint64_t matrix, bool contiguous, int rows) {
    check_matrix(matrix);
    for (int r = 0; r < (contiguous ? rows : 16); ++r)
      for (int u = 0; u < (contiguous ? 2 : rows / 8); ++u) {
        uint16_t halves[8];
        std::memcpy(halves, read_matrix(unit_at(matrix, contiguous, r, u), common, group), 16);
        for (int e = 0; e < 8; ++e)
          (contiguous ? to[r][u * 8 + e] : to[u * 8 + e][r]) = number(any.type, halves[e]);
      }
  };
  if (!any.a) read(a, any.a_matrix, !any.deep, 64);
  read(b, any.b_matrix, !any.deep, any.columns);
  for (int t = 0; any.a && t < kGroupLanes; ++t) {  // as in mma.sync, 16 rows of each warp
    const auto& m = *static_cast<Multiply*>(slots[t]);
    for (int i = 0; i < 4; ++i)
      for (int e = 0; e < 2; ++e)
        a[t / 32 * 16 + t % 32 / 4 + i % 2 * 8][i / 2 * 8 + t % 4 * 2 + e] =
            number(any.type, static_cast<uint16_t>(m.a[i] >> 16 * e));
  }
  for (int t = 0; t < kGroupLanes; ++t) {
    const auto& m = *static_cast<Multiply*>(slots[t]);
    Fiber& f = fiber(first + t);
    const size_t count = static_cast<size_t>(any.columns) / 2;
    std::vector<float> before(m.c, m.c + count);
    for (const Product& p : f.products) {
      if (p.c == m.c && p.result.size() == count)
        before = p.result;  // the product before goes on in these
      else if (m.c < p.c + p.result.size() && p.c < m.c + count)
        fail("wgmmas of two shapes under way share accumulators");
    }
    Product p{m.c, std::vector<float>(count), m.a, {}, group};
    if (m.a) std::memcpy(p.left, m.a, sizeof p.left);
    for (size_t i = 0; i < count; ++i) {
      const size_t row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
      const size_t column = i / 4 * 8 + t % 4 * 2 + i % 2;
      double sum = m.add ? before[i] : 0.;
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[column][k];
      p.result[i] = static_cast<float>(sum);
      std::memcpy(m.c + i, &kUnderWay, 4);
    }
    f.products.push_back(std::move(p));
  }
}

}  // namespace

void wgmma_fence() {
  EMU_HERE();
  meet("wgmma.fence", current, [](void**) {}, kGroupLanes);
  current->fenced = true;
}

void wgmma(Half type, int columns, float* c, const uint32_t* a, uint64_t a_matrix,
           uint64_t b_matrix, bool add, bool deep) {
  EMU_HERE();
  if (columns % 8 || columns < 8 || columns > 256) fail("wgmma of %d columns", columns);
  Multiply mine{type, columns, c, a, a_matrix, b_matrix, add, deep};
  static char names[3][33][32];
  char* name = names[a ? 2 : deep][columns / 8];
  std::snprintf(name, sizeof names[0][0], "wgmma.m64n%dk16%s", columns,
                a      ? ", registers"
                : deep ? ", deep"
                       : "");
  meet(name, &mine, multiply_group, kGroupLanes);
}

void wgmma_commit() {
  EMU_HERE();
  meet("wgmma.commit_group", current, [](void**) {}, kGroupLanes);
  ++current->committed;
}

void wgmma_wait(int pending) {
  EMU_HERE();
  meet("wgmma.wait_group", current, [](void**) {}, kGroupLanes);
  Fiber& f = *current;
  const uint32_t over = f.committed > static_cast<uint32_t>(pending)
                            ? f.committed - static_cast<uint32_t>(pending)
                            : 0;
  std::vector<Product> left;
  for (size_t i = 0; i < f.products.size(); ++i) {
    Product& p = f.products[i];
    if (p.a && std::memcmp(p.a, p.left, sizeof p.left))
      fail("registers that a wgmma under way reads were changed");
    for (size_t e = 0; e < p.result.size(); ++e)
      if (std::memcmp(p.c + e, &kUnderWay, 4) && p.group > f.over)
        fail("accumulators of a wgmma under way were changed");
    if (p.group > over) left.push_back(std::move(p));
  }
  // The last product of an accumulator holds its value; one that goes on keeps it.
  for (const Product& p : f.products) {
    if (p.result.empty()) continue;  // moved to `left`
    bool goes_on = false;
    for (const Product& q : left) goes_on |= q.c == p.c;
    if (!goes_on) std::memcpy(p.c, p.result.data(), p.result.size() * 4);
  }
  f.products = std::move(left);
  if (over > f.over) {
    f.over = over;
    f.fenced = false;
  }
  know(f.clock, tensor_core_agent(f.warpgroup()), f.over);
}

}  // namespace emu

// ---- the driver's function, as its documentation has it

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type,
                                           cuuint32_t rank, void* address, const cuuint64_t* sizes,
                                           const cuuint64_t* strides, const cuuint32_t* box,
                                           const cuuint32_t* steps,
                                           CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill fill) {
  if (type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16)
    return CUDA_ERROR_NOT_SUPPORTED;
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    return CUDA_ERROR_NOT_SUPPORTED;
  if (!map || reinterpret_cast<uintptr_t>(map) % 64 || !address ||
      reinterpret_cast<uintptr_t>(address) % 16 || rank < 1 || rank > 5)
    return CUDA_ERROR_INVALID_VALUE;
  emu::Map m{};
  m.mark = emu::kMark, m.address = static_cast<const char*>(address), m.element = 2, m.rank = rank;
  m.span = 16u << swizzle;
  if (box[0] * 2 % 16 || (m.span > 16 && box[0] * 2 > m.span)) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (!sizes[i] || sizes[i] > uint64_t{1} << 32 || !box[i] || box[i] > 256 || !steps[i] ||
        steps[i] > 8)
      return CUDA_ERROR_INVALID_VALUE;
    if (steps[i] != 1) return CUDA_ERROR_NOT_SUPPORTED;
    m.sizes[i] = sizes[i], m.box[i] = box[i];
    if (i == 0) continue;
    if (strides[i - 1] % 16 || strides[i - 1] >> 40) return CUDA_ERROR_INVALID_VALUE;
    m.strides[i - 1] = strides[i - 1];
  }
  std::memcpy(map, &m, sizeof m);
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = !std::strcmp(symbol, "cuTensorMapEncodeTiled") && version >= 12000;
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
