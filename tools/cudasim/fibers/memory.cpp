// Memory: which bytes may be touched, which hold something, and which accesses race.
//
// The kernels are compiled with -fsanitize=thread, but linked to the hooks below instead of its
// runtime: every plain access of a kernel comes here too. Order between the threads of a block is
// kept as vector clocks that barriers join; an access that is not ordered after a conflicting one
// is a race, whatever the schedule happened to be; of the readers of a word of global memory the
// last of each block is known. In the AddressSanitizer build there are no hooks: that tool looks at
// the accesses, and copies under way are poisoned.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

#include "machine.h"

namespace emu {
namespace {

constexpr int kGranule = 2;  // bytes; no kernel touches single bytes
constexpr size_t kGuard = 4096;
constexpr size_t kArena = size_t{256} << 20;
constexpr bool kChecked = !EMU_ASAN;

struct Range {
  const char* begin = nullptr;
  size_t bytes = 0;
  bool has(const void* p) const {
    return static_cast<size_t>(static_cast<const char*>(p) - begin) < bytes;
  }
};

struct SharedCell {
  uint32_t write_clock = 0;
  int16_t writer = -1;
  int16_t copying = -1;  // the thread whose cp.async is under way
  bool atomic = false;
  bool arriving = false;  // a tensor copy is under way
  bool barrier = false;   // of an mbarrier
};
struct Read {
  uint32_t clock = 0;  // 0: none
  int16_t thread = 0;
};
struct GlobalCell {
  int32_t write_block = -1, read_block = -1;  // -2: read by several
  uint32_t write_clock = 0, read_clock = 0;
  int16_t writer = 0, reader = 0;
  bool written = false, constant = false, atomic = false;
};
struct Allocation {
  std::string name;
  char* begin;
  size_t bytes;
  void* owner;  // what to free
  std::vector<GlobalCell> cells;
};

char* arena = nullptr;
size_t arena_end = 0;
std::vector<std::unique_ptr<Allocation>> allocations;  // by address
Range stacks, host_stack, library;

char* shared = nullptr;
size_t shared_bytes = 0;
int shared_warps = 0, block_number = 0;
std::vector<SharedCell> shared_cells;
std::vector<Read> shared_reads;  // the last of each warp, by granule and warp
// The last group of products that reads a granule, by granule and warpgroup; empty before the
// first.
std::vector<uint32_t> product_reads;

// Did the running thread learn of this access of a thread, or another agent, of its block?
bool knows(const Fiber& f, int agent, uint32_t clock) {
  return f.number == agent || known(f.clock, agent) >= clock;
}
int warpgroups() { return (shared_warps * kLanes + kGroupLanes - 1) / kGroupLanes; }

Allocation* find(const void* p) {
  for (const auto& a : allocations)
    if (static_cast<size_t>(static_cast<const char*>(p) - a->begin) < a->bytes) return a.get();
  return nullptr;
}

const char* verb(Access access) {
  return access == Access::kRead || access == Access::kConstant ? "read" : "write";
}

}  // namespace

void check_global(const void* address, int bytes, Access access) {
  if (reinterpret_cast<uintptr_t>(address) % bytes)
    fail("misaligned %s of %d bytes of global memory", verb(access), bytes);
  if (!kChecked) return;
  const char* p = static_cast<const char*>(address);
  Allocation* a = find(p);
  if (!a || p + bytes > a->begin + a->bytes) {
    for (const auto& near : allocations) {
      const auto offset = p - near->begin;
      if (offset >= -static_cast<ptrdiff_t>(kGuard) &&
          offset < static_cast<ptrdiff_t>(near->bytes + kGuard))
        fail("out of bounds: %s of %d bytes at byte %td of '%s' [%zu bytes]", verb(access), bytes,
             offset, near->name.c_str(), near->bytes);
    }
    fail("wild %s of %d bytes at %p", verb(access), bytes, address);
  }
  const Fiber& f = *current;
  const char* name = a->name.c_str();
  const auto offset = static_cast<size_t>(p - a->begin);
  for (size_t i = offset / kGranule; i <= (offset + bytes - 1) / kGranule; ++i) {
    GlobalCell& c = a->cells[i];
    const bool writes = access == Access::kWrite || access == Access::kAtomic;
    const bool wrote = c.write_block >= 0;
    if (access != Access::kWrite && !c.written) fail("read of never-written bytes of '%s'", name);
    if (access == Access::kConstant && wrote)
      fail("ld.global.nc of bytes of '%s' that this launch writes", name);
    if (writes && c.constant)
      fail("write of bytes of '%s' that this launch reads by ld.global.nc", name);
    const bool both_atomic = access == Access::kAtomic && c.atomic;
    if (wrote && !both_atomic &&
        (c.write_block != block_number || !knows(f, c.writer, c.write_clock)))
      fail("race: %s of bytes of '%s' that another %s writes", verb(access), name,
           c.write_block == block_number ? "thread of the block" : "block");
    if (writes && c.read_block != -1 &&
        (c.read_block != block_number || !knows(f, c.reader, c.read_clock)))
      fail("race: write of bytes of '%s' that another %s reads", name,
           c.read_block == block_number ? "thread of the block" : "block");
    if (writes) {
      c.written = true;
      c.write_block = block_number;
      c.writer = static_cast<int16_t>(f.number);
      c.atomic = access == Access::kAtomic;
      c.write_clock = f.clock[f.number];
    } else {
      c.constant |= access == Access::kConstant;
      const bool other = c.read_block != -1 && c.read_block != block_number;
      c.read_block = other ? -2 : block_number;
      c.reader = static_cast<int16_t>(f.number);
      c.read_clock = f.clock[f.number];
    }
  }
}

namespace {

// Of a granule that the running thread wants to touch: nothing is under way there.
void check_settled(const SharedCell& c, const char* what, uint32_t byte) {
  if (c.copying >= 0)
    fail("%s of byte %u of shared memory while cp.async of thread %d is under way", what, byte,
         c.copying);
  if (c.arriving)
    fail("%s of byte %u of shared memory while a tensor copy to it is under way", what, byte);
  if (c.barrier) fail("%s of byte %u of shared memory, which belongs to an mbarrier", what, byte);
}

// And that it knows of the last write, by whatever agent.
void check_after_write(const SharedCell& c, const Fiber& f, const char* what, uint32_t byte) {
  if (c.writer < 0 || knows(f, c.writer, c.write_clock)) return;
  if (c.writer >= block_threads())
    fail(
        "race: %s of byte %u of shared memory by a thread that did not wait for the mbarrier of "
        "the tensor copy to it",
        what, byte);
  fail("race: %s of byte %u of shared memory, written by thread %d without a barrier between", what,
       byte, c.writer);
}

// And, to write, of all reads.
void check_after_reads(size_t cell, const Fiber& f, const char* what, uint32_t byte) {
  const Read* reads = &shared_reads[cell * shared_warps];
  for (int w = 0; w < shared_warps; ++w)
    if (reads[w].clock && !knows(f, reads[w].thread, reads[w].clock))
      fail("race: %s of byte %u of shared memory, read by thread %d without a barrier between",
           what, byte, reads[w].thread);
  if (product_reads.empty()) return;
  for (int g = 0; g < warpgroups(); ++g)
    if (known(f.clock, tensor_core_agent(g)) < product_reads[cell * warpgroups() + g])
      fail(
          "race: %s of byte %u of shared memory, which a wgmma of warpgroup %d reads that the "
          "thread is not ordered after",
          what, byte, g);
}

// A plain access of the kernel, from the compiler's instrumentation.
[[maybe_unused]] void plain(void* address, int bytes, bool write, const void* where) {
  if (!current || stacks.has(address)) return;
  if (library.has(address) || (!write && host_stack.has(address))) return;  // the parameters
  current->where = where;
  const auto offset = static_cast<const char*>(address) - shared;
  if (shared && offset >= -static_cast<ptrdiff_t>(kGuard) &&
      offset < static_cast<ptrdiff_t>(shared_bytes + kGuard)) {
    if (offset < 0) fail("out of bounds: byte %td of shared memory", offset);
    check_shared(static_cast<uint32_t>(offset), bytes, write ? Access::kWrite : Access::kRead,
                 write ? "write" : "read");
    return;
  }
  check_global(address, bytes, write ? Access::kWrite : Access::kRead);
}

}  // namespace

// ---- the machine's side

void set_stacks(const char* begin, size_t bytes) { stacks = {begin, bytes}; }
void set_host_stack(const void* somewhere) {
  host_stack = {static_cast<const char*>(somewhere), size_t{1} << 20};
}

void begin_launch_memory() {
  for (auto& a : allocations)
    for (GlobalCell& c : a->cells) {
      const bool written = c.written;
      c = {};
      c.written = written;
    }
  if (library.begin) return;
  // The library that holds this code: its constants may be read.
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void*) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          const char* begin = reinterpret_cast<const char*>(info->dlpi_addr);
          const Range all{begin, header.p_vaddr + header.p_memsz};
          if (header.p_type == PT_LOAD && all.has(reinterpret_cast<const void*>(&check_shared)))
            library = {begin, std::max(library.bytes, all.bytes)};
        }
        if (library.begin == reinterpret_cast<const char*>(info->dlpi_addr))
          for (int i = 0; i < info->dlpi_phnum; ++i)
            library.bytes = std::max<size_t>(
                library.bytes, info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
        return 0;
      },
      nullptr);
}

void begin_block_memory(size_t bytes, int threads, int block) {
  shared_bytes = bytes;
  shared_warps = threads / kLanes;
  block_number = block;
  void* memory = nullptr;
  if (posix_memalign(&memory, 1024, kChecked ? bytes + kGuard : bytes)) std::abort();
  shared = static_cast<char*>(memory);
  std::memset(shared, 0xff, bytes);  // NaN
  if (!kChecked) return;
  const size_t cells = (bytes + kGranule - 1) / kGranule;
  shared_cells.assign(cells, {});
  shared_reads.assign(cells * shared_warps, {});
  product_reads.clear();
}

void end_block_memory() {
#if EMU_ASAN
  __asan_unpoison_memory_region(shared, shared_bytes);
#endif
  std::free(shared);
  shared = nullptr;
}

char* check_shared(uint32_t address, int bytes, Access access, const char* what) {
  if (address + static_cast<size_t>(bytes) > shared_bytes)
    fail("out of bounds: %s of %d bytes at byte %u of %zu of shared memory", what, bytes, address,
         shared_bytes);
  if (address % bytes)
    fail("misaligned %s of %d bytes at byte %u of shared memory", what, bytes, address);
  if (!kChecked) return shared + address;
  const Fiber& f = *current;
  for (uint32_t i = address / kGranule; i <= (address + bytes - 1) / kGranule; ++i) {
    SharedCell& c = shared_cells[i];
    const uint32_t byte = i * kGranule;
    check_settled(c, what, byte);
    if (access != Access::kWrite && c.writer < 0)
      fail("%s of byte %u of shared memory, which was never written", what, byte);
    if (access != Access::kAtomic || !c.atomic) check_after_write(c, f, what, byte);
    if (access == Access::kRead) {
      shared_reads[static_cast<size_t>(i) * shared_warps + f.warp()] = {
          f.clock[f.number], static_cast<int16_t>(f.number)};
      continue;
    }
    check_after_reads(i, f, what, byte);
    c.writer = static_cast<int16_t>(f.number);
    c.write_clock = f.clock[f.number];
    c.atomic = access == Access::kAtomic;
  }
  return shared + address;
}

// ---- the asynchronous proxy

namespace {

void check_unit(uint32_t address, const char* what) {
  if (address % 16 || address + size_t{16} > shared_bytes)
    fail("out of bounds: %s of 16 bytes at byte %u of %zu of shared memory", what, address,
         shared_bytes);
}

// What a thread wrote itself reaches the asynchronous proxy through that thread's fence.
void check_visible(const SharedCell& c, const Clock& clock, const char* what, uint32_t byte) {
  if (c.writer >= 0 && c.writer < block_threads() &&
      known(clock, visible_agent(c.writer)) < c.write_clock)
    fail(
        "%s of byte %u of shared memory, which thread %d wrote without a fence_async_proxy after "
        "it",
        what, byte, c.writer);
}

}  // namespace

void start_arrival(uint32_t address, size_t agent, uint32_t epoch) {
  check_unit(address, "tensor copy");
  for (uint32_t i = address / kGranule; kChecked && i < (address + 16) / kGranule; ++i) {
    SharedCell& c = shared_cells[i];
    check_settled(c, "tensor copy", i * kGranule);
    check_after_write(c, *current, "tensor copy", i * kGranule);
    check_after_reads(i, *current, "tensor copy", i * kGranule);
    check_visible(c, current->clock, "tensor copy", i * kGranule);
    c = {};
    c.writer = static_cast<int16_t>(agent);
    c.write_clock = epoch;
    c.arriving = true;
  }
  std::memset(shared + address, 0xff, 16);
#if EMU_ASAN
  __asan_poison_memory_region(shared + address, 16);
#endif
}

void arrive(uint32_t address, const void* data) {
#if EMU_ASAN
  __asan_unpoison_memory_region(shared + address, 16);
#endif
  std::memcpy(shared + address, data, 16);
  for (uint32_t i = address / kGranule; kChecked && i < (address + 16) / kGranule; ++i)
    shared_cells[i].arriving = false;
}

const char* read_matrix(uint32_t address, const Clock& clock, uint32_t group) {
  check_unit(address, "wgmma");
  if (kChecked && product_reads.empty())
    product_reads.assign(shared_cells.size() * warpgroups(), 0);
  for (uint32_t i = address / kGranule; kChecked && i < (address + 16) / kGranule; ++i) {
    const SharedCell& c = shared_cells[i];
    check_settled(c, "wgmma", i * kGranule);
    if (c.writer < 0)
      fail("wgmma of byte %u of shared memory, which was never written", i * kGranule);
    if (known(clock, c.writer) < c.write_clock) {
      if (c.writer >= block_threads())
        fail(
            "race: wgmma of byte %u of shared memory by a warpgroup of which a thread did not wait "
            "for the mbarrier of the tensor copy to it",
            i * kGranule);
      fail(
          "race: wgmma of byte %u of shared memory, written by thread %d without a barrier between",
          i * kGranule, c.writer);
    }
    check_visible(c, clock, "wgmma", i * kGranule);
    product_reads[static_cast<size_t>(i) * warpgroups() + current->warpgroup()] = group;
  }
  return shared + address;
}

void check_bulk(uint32_t address) {
  check_unit(address, "bulk copy");
  for (uint32_t i = address / kGranule; kChecked && i < (address + 16) / kGranule; ++i) {
    const SharedCell& c = shared_cells[i];
    check_settled(c, "bulk copy", i * kGranule);
    if (c.writer < 0)
      fail("bulk copy of byte %u of shared memory, which was never written", i * kGranule);
    check_after_write(c, *current, "bulk copy", i * kGranule);
    check_visible(c, current->clock, "bulk copy", i * kGranule);
  }
}

void take_barrier(uint32_t address) {
  check_shared(address, 8, Access::kWrite, "mbarrier.init");
  for (uint32_t i = address / kGranule; kChecked && i < (address + 8) / kGranule; ++i)
    shared_cells[i].barrier = true;
}

// ---- the kernel's side

char* dynamic_shared() { return shared; }

uint32_t shared_address(const void* pointer) {
  EMU_HERE();
  const auto offset = static_cast<const char*>(pointer) - shared;
  if (offset < 0 || offset > static_cast<ptrdiff_t>(shared_bytes))
    fail("shared_address of a pointer that is not to shared memory");
  return static_cast<uint32_t>(offset);
}

void read_global(void* to, const void* from, int bytes, bool constant) {
  EMU_HERE();
  check_global(from, bytes, constant ? Access::kConstant : Access::kRead);
  std::memcpy(to, from, bytes);
}
void write_global(void* to, const void* from, int bytes) {
  EMU_HERE();
  check_global(to, bytes, Access::kWrite);
  std::memcpy(to, from, bytes);
}
void read_shared(void* to, uint32_t from, int bytes) {
  EMU_HERE();
  std::memcpy(to, check_shared(from, bytes, Access::kRead, "ld.shared"), bytes);
}
void write_shared(uint32_t to, const void* from, int bytes) {
  EMU_HERE();
  std::memcpy(check_shared(to, bytes, Access::kWrite, "st.shared"), from, bytes);
}
int compare_and_swap(int* address, int expected, int value) {
  EMU_HERE();
  check_global(address, 4, Access::kAtomic);
  const int before = *address;
  if (before == expected) *address = value;
  return before;
}
int add_shared(uint32_t address, int value) {
  EMU_HERE();
  int before;
  char* at = check_shared(address, 4, Access::kAtomic, "atom.shared");
  std::memcpy(&before, at, 4);
  const int after = static_cast<int>(static_cast<uint32_t>(before) + static_cast<uint32_t>(value));
  std::memcpy(at, &after, 4);
  return before;
}

void copy_async(uint32_t to, const void* from, int bytes, int from_bytes) {
  EMU_HERE();
  if ((bytes != 4 && bytes != 8 && bytes != 16) || from_bytes < 0 || from_bytes > bytes)
    fail("cp.async of %d bytes, %d of them from global memory", bytes, from_bytes);
  if (reinterpret_cast<uintptr_t>(from) % bytes) fail("misaligned source of cp.async");
  if (from_bytes) check_global(from, bytes, Access::kRead);
  char* at = check_shared(to, bytes, Access::kWrite, "cp.async");
  std::memset(at, 0xff, bytes);
  if (kChecked)
    for (int i = 0; i < bytes; i += kGranule)
      shared_cells[(to + i) / kGranule].copying = static_cast<int16_t>(current->number);
#if EMU_ASAN
  __asan_poison_memory_region(at, bytes);
#endif
  current->open.push_back({to, static_cast<const char*>(from), bytes, from_bytes});
}

void commit_copies() {
  EMU_HERE();
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}

void wait_copies(int pending) {
  EMU_HERE();
  Fiber& f = *current;
  while (f.groups.size() > static_cast<size_t>(pending)) {
    for (const Copy& c : f.groups.front()) {
      char* at = shared + c.to;
#if EMU_ASAN
      __asan_unpoison_memory_region(at, c.bytes);
#endif
      if (kChecked)
        for (int i = 0; i < c.bytes; i += kGranule) {
          SharedCell& cell = shared_cells[(c.to + i) / kGranule];
          cell.copying = -1;
          cell.write_clock = f.clock[f.number];
        }
      std::memset(at, 0, c.bytes);
      if (c.from_bytes) std::memcpy(at, c.from, c.from_bytes);
    }
    f.groups.pop_front();
  }
}

}  // namespace emu

#if !EMU_ASAN
// ---- what -fsanitize=thread calls

#define VLMK_HOOK(name, bytes, write)                               \
  extern "C" void __tsan_##name(void* address) {                    \
    emu::plain(address, bytes, write, __builtin_return_address(0)); \
  }
#define VLMK_HOOKS(bytes)              \
  VLMK_HOOK(read##bytes, bytes, false) \
  VLMK_HOOK(write##bytes, bytes, true)
VLMK_HOOKS(1)
VLMK_HOOKS(2)
VLMK_HOOKS(4)
VLMK_HOOKS(8)
VLMK_HOOKS(16)
// Accesses that the compiler can't prove aligned; those of packed fields, which kernels have none.
VLMK_HOOK(unaligned_read2, 2, false)
VLMK_HOOK(unaligned_read4, 4, false)
VLMK_HOOK(unaligned_read8, 8, false)
VLMK_HOOK(unaligned_read16, 16, false)
VLMK_HOOK(unaligned_write2, 2, true)
VLMK_HOOK(unaligned_write4, 4, true)
VLMK_HOOK(unaligned_write8, 8, true)
VLMK_HOOK(unaligned_write16, 16, true)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
// std::atomic, which launchers use and no kernel.
int __tsan_atomic32_load(const int* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
void __tsan_atomic32_store(int* address, int value, int) {
  __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
}
int64_t __tsan_atomic64_load(const int64_t* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
void __tsan_atomic64_store(int64_t* address, int64_t value, int) {
  __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
}
void __tsan_read_range(void* address, size_t bytes) {
  for (size_t i = 0; i + 4 <= bytes; i += 4)
    emu::plain(static_cast<char*>(address) + i, 4, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  for (size_t i = 0; i + 4 <= bytes; i += 4)
    emu::plain(static_cast<char*>(address) + i, 4, true, __builtin_return_address(0));
}
}
#endif

// ---- for Python

extern "C" {
// Device memory, `misalign` bytes off a multiple of 256; null where the arena is full.
void* emu_allocate(const char* name, size_t bytes, size_t misalign) {
  using namespace emu;
  void* owner = nullptr;
  char* begin;
  if (kChecked) {
    if (!arena) {
      arena = static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (arena == MAP_FAILED) std::abort();
    }
    const size_t offset = (arena_end + kGuard + 255) / 256 * 256 + misalign;
    if (offset + bytes + kGuard > kArena) return nullptr;
    arena_end = offset + bytes;
    begin = arena + offset;
  } else {
    if (posix_memalign(&owner, 256, misalign + bytes)) return nullptr;
    begin = static_cast<char*>(owner) + misalign;
  }
  std::memset(begin, 0xff, bytes);
  auto a = std::make_unique<Allocation>();
  a->name = name, a->begin = begin, a->bytes = bytes, a->owner = owner;
  if (kChecked) a->cells.resize((bytes + kGranule - 1) / kGranule);
  allocations.push_back(std::move(a));
  return begin;
}
void emu_free_all() {
  for (const auto& a : emu::allocations) std::free(a->owner);
  emu::allocations.clear();
  emu::arena_end = 0;
}
void emu_upload(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  if (emu::Allocation* a = emu::kChecked ? emu::find(to) : nullptr)
    for (auto& c : a->cells) c.written = true;
}
// The first byte that nothing wrote, or -1.
int64_t emu_unwritten(const void* begin) {
  const emu::Allocation* a = emu::kChecked ? emu::find(begin) : nullptr;
  for (size_t i = 0; a && i < a->cells.size(); ++i)
    if (!a->cells[i].written) return static_cast<int64_t>(i) * emu::kGranule;
  return -1;
}
}
