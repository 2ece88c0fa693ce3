// Threads: fibers, barriers, launches.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "machine.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emu {

int mutant = 0;
Fiber* current = nullptr;

namespace {
int compute_capability = 80;
}
int capability() { return compute_capability; }

namespace {

constexpr size_t kStack = 256 << 10;
constexpr int kMaxThreads = 1024;
constexpr size_t kPlainShared = 48 << 10, kMaxShared = 227 << 10;

struct Barrier {
  int arrived = 0, expected = 0;
  Clock clock;
  std::vector<Fiber*> waiting;
};
struct Meeting {  // of a warp, or a warpgroup
  int arrived = 0;
  const char* instruction = nullptr;
  void* slots[kGroupLanes];
};

struct Machine {
  dim3 grid, block, block_index;
  void (*body)(const void*) = nullptr;
  const void* context = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready;
  std::vector<Meeting> warps, warpgroups;
  Barrier barriers[16];
  int alive = 0;
  int slow = 0, slow_end = 0;  // of two in three blocks a thread or a warp, drawn
  char* stacks = nullptr;
  void* host = nullptr;  // context of the launching thread
  void* host_fake_stack = nullptr;
  const void* host_stack = nullptr;
  size_t host_stack_bytes = 0;
  size_t allowed_shared = kPlainShared;
  uint64_t random = 1;
  std::string printed, error;
} m;

// ---- switching

#if defined(__x86_64__)
extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
void* prepare(char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStack);
  *--top = nullptr;  // the ABI's alignment at a function's first instruction
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
}
#else
void emu_switch(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
void* prepare(char* stack, void (*entry)()) {
  auto* c = reinterpret_cast<ucontext_t*>(stack);  // at the stack's far end
  getcontext(c);
  const size_t used = (sizeof(ucontext_t) + 63) / 64 * 64;
  c->uc_stack.ss_sp = stack + used;
  c->uc_stack.ss_size = kStack - used;
  makecontext(c, entry, 0);
  return c;
}
#endif

// Runs `to`, or the launching thread where null; comes back when something switches here.
void switch_to(Fiber* to, bool for_good) {
  Fiber* me = current;
  static void* lost;  // not on this stack, of which AddressSanitizer may unmap a part below
  void** save = for_good ? &lost : me ? &me->context : &m.host;
#if EMU_ASAN
  void** fake = for_good ? nullptr : me ? &me->fake_stack : &m.host_fake_stack;
  __sanitizer_start_switch_fiber(fake, to ? to->stack : m.host_stack,
                                 to ? kStack : m.host_stack_bytes);
#endif
  current = to;
  emu_switch(save, to ? to->context : m.host);
#if EMU_ASAN
  __sanitizer_finish_switch_fiber(me ? me->fake_stack : m.host_fake_stack, nullptr, nullptr);
#endif
}

std::string stuck() {
  std::string text;
  for (const Fiber& f : m.fibers) {
    if (f.done || !f.waits_for) continue;
    int alike = 0;
    for (const Fiber& g : m.fibers) alike += !g.done && g.waits_for == f.waits_for;
    if (text.find(f.waits_for) == std::string::npos)
      text += (text.empty() ? "" : ", ") + std::to_string(alike) + " at " + f.waits_for;
  }
  return text;
}

// A number among those that are ready: of one that is not slow, if there is one.
size_t choose_ready() {
  const size_t count = m.ready.size(), first = draw(count);
  for (size_t i = 0; i < count; ++i) {
    const int thread = m.ready[(first + i) % count]->number;
    if (thread < m.slow || thread >= m.slow_end) return (first + i) % count;
  }
  return count;
}

// Slow threads run when nothing else can, not even a copy arrive.
Fiber* next_ready() {
  size_t at = 0;
  while (m.ready.empty() || (at = choose_ready()) == m.ready.size())
    if (!copy_arrives()) break;
  if (m.ready.empty()) {
    const int left = static_cast<int>(m.fibers.size()) - m.alive;
    fail("deadlock: %s; %d of %d threads have left", stuck().c_str(), left,
         static_cast<int>(m.fibers.size()));
  }
  if (at == m.ready.size()) at = draw(m.ready.size());
  Fiber* f = m.ready[at];
  m.ready[at] = m.ready.back();
  m.ready.pop_back();
  return f;
}

void entry() {
#if EMU_ASAN
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (!m.host_stack) m.host_stack = stack, m.host_stack_bytes = bytes;
#endif
  m.body(m.context);
  for (const auto& group : current->groups)
    if (!group.empty()) fail("the thread ends with cp.async under way");
  if (!current->open.empty()) fail("the thread ends with cp.async never committed");
  end_thread_hopper();
  current->done = true;
  switch_to(--m.alive ? next_ready() : nullptr, true);
}

void release(Barrier& b) {
  for (Fiber* f : b.waiting) {
    learn(f->clock, b.clock);
    m.ready.push_back(f);
  }
  b.waiting.clear();
  b.arrived = b.expected = 0;
  b.clock.clear();
}

// True where this arrival completed the barrier.
bool arrive(Barrier& b, int id, int count) {
  const int threads = static_cast<int>(m.fibers.size());
  if (count == 0) count = threads;
  if (id < 0 || id > 15) fail("barrier %d: there are 0 to 15", id);
  if (count % kLanes || count > threads)
    fail("barrier %d for %d threads in a block of %d", id, count, threads);
  if (b.expected && b.expected != count)
    fail("barrier %d is for %d threads and for %d", id, b.expected, count);
  b.expected = count;
  learn(b.clock, current->clock);
  ++current->clock[current->number];
  return ++b.arrived == count;
}

const char* barrier_name(int id) {
  static char names[16][16];
  std::snprintf(names[id], sizeof names[id], "barrier %d", id);
  return names[id];
}

void run_block(size_t shared, int number) {
  const int threads = static_cast<int>(m.fibers.size());
  begin_block_memory(shared, threads, number);
  m.warps.assign(threads / kLanes, {});
  m.warpgroups.assign((threads + kGroupLanes - 1) / kGroupLanes, {});
  begin_block_hopper();
  for (Barrier& b : m.barriers) b = {};
  m.alive = threads;
  const int slow_threads = draw(3) ? (draw(2) ? kLanes : 1) : 0;
  m.slow = slow_threads ? static_cast<int>(draw(threads / slow_threads)) * slow_threads : 0;
  m.slow_end = m.slow + slow_threads;
  m.ready.clear();
  for (int i = 0; i < threads; ++i) {
    Fiber& f = m.fibers[i];
    f = {};
    f.number = i;
    f.index = {i % m.block.x, i / m.block.x % m.block.y, i / m.block.x / m.block.y};
    f.stack = m.stacks + i * kStack;
#if EMU_ASAN
    __asan_unpoison_memory_region(f.stack, kStack);
#endif
    f.context = prepare(f.stack, entry);
    f.clock.assign(threads, 0);
    f.clock[i] = 1;
    m.ready.push_back(&f);
  }
  m.host_stack = nullptr;
  switch_to(next_ready(), false);
  current = nullptr;
  end_block_memory();
}

}  // namespace

int block_threads() { return static_cast<int>(m.fibers.size()); }
Fiber& fiber(int thread) { return m.fibers[thread]; }
void wake(Fiber* fiber) { m.ready.push_back(fiber); }
uint32_t draw(size_t below) {  // xorshift64*
  m.random ^= m.random >> 12, m.random ^= m.random << 25, m.random ^= m.random >> 27;
  return static_cast<uint32_t>((m.random * 0x2545F4914F6CDD1Dull >> 32) % below);
}
void wait(const char* what) {
  current->waits_for = what;
  if (Fiber* next = next_ready(); next != current) switch_to(next, false);
  current->waits_for = nullptr;
}

void learn(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i)
    if (clock[i] < other[i]) clock[i] = other[i];
}

dim3 thread_index() { return current->index; }
dim3 block_index() { return m.block_index; }
dim3 block_size() { return m.block; }
dim3 grid_size() { return m.grid; }
void allow_shared(size_t bytes) { m.allowed_shared = std::max(kPlainShared, bytes); }

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (!current) std::fprintf(stderr, "emulator, outside of a kernel: %s\n", text), std::abort();
  m.error = text;
  const dim3& b = m.block_index;
  std::snprintf(text, sizeof text, " (block %u,%u,%u, thread %d", b.x, b.y, b.z, current->number);
  m.error += text;
  Dl_info library;
  if (current->where && dladdr(current->where, &library)) {
    const auto offset =
        static_cast<const char*>(current->where) - static_cast<const char*>(library.dli_fbase);
    std::snprintf(text, sizeof text, ", at +0x%zx", static_cast<size_t>(offset));
    m.error += text;
  }
  m.error += ")";
  switch_to(nullptr, true);
  std::abort();
}

int print(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  const int written = std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  m.printed += text;
  return written;
}

void trap() {
  EMU_HERE();
  fail("trap after printing %s", m.printed.c_str());
}

void run_grid(void (*body)(const void*), const void* context, const dim3& grid, const dim3& block,
              size_t shared) {
  if (!m.error.empty()) return;
  const size_t threads = static_cast<size_t>(block.x) * block.y * block.z;
  const size_t blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
  if (blocks == 0 || grid.y > 65535 || grid.z > 65535 || threads == 0 || threads > kMaxThreads ||
      shared > std::min(m.allowed_shared, kMaxShared)) {
    m.error = "launch refused: " + std::to_string(blocks) + " blocks of " +
              std::to_string(threads) + " threads with " + std::to_string(shared) +
              " bytes of shared memory, of which " + std::to_string(m.allowed_shared) +
              " are allowed";
    return;
  }
  if (threads % kLanes) {
    m.error =
        "blocks of " + std::to_string(threads) + " threads are not emulated: whole warps only";
    return;
  }
  m.grid = grid, m.block = block, m.body = body, m.context = context;
  if (!m.stacks) {
    m.stacks = static_cast<char*>(mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (m.stacks == MAP_FAILED) std::abort();
    set_stacks(m.stacks, kStack * kMaxThreads);
  }
  m.fibers.resize(threads);
  begin_launch_memory();
  set_host_stack(&threads);
  std::vector<int> order(blocks);
  for (size_t i = 0; i < blocks; ++i) order[i] = static_cast<int>(i);
  for (size_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
  for (const int b : order) {
    m.block_index = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    run_block(shared, b);
    if (!m.error.empty()) return;
  }
}

void barrier(int id, int count) {
  EMU_HERE();
  Barrier& b = m.barriers[id & 15];
  if (arrive(b, id, count)) {
    learn(current->clock, b.clock);
    release(b);
  } else {
    b.waiting.push_back(current);
    wait(barrier_name(id));
  }
}

void barrier_arrive(int id, int count) {
  EMU_HERE();
  if (arrive(m.barriers[id & 15], id, count)) release(m.barriers[id & 15]);
}

void meet(const char* instruction, void* slot, Combine combine, int lanes) {
  const int group = current->number / lanes, first = group * lanes;
  if (first + lanes > block_threads()) fail("%s of a part of a warpgroup", instruction);
  Meeting& w = lanes == kLanes ? m.warps[group] : m.warpgroups[group];
  if (w.arrived == 0) w.instruction = instruction;
  if (std::strcmp(w.instruction, instruction))
    fail("a lane is at %s while others of its warp are at %s", instruction, w.instruction);
  w.slots[current->number - first] = slot;
  if (++w.arrived < lanes) return wait(instruction);
  w.arrived = 0;
  combine(w.slots);
  for (int i = first; i < first + lanes; ++i)
    if (i != current->number) m.ready.push_back(&m.fibers[i]);
}

void sync_warp(uint32_t mask) {
  EMU_HERE();
  if (mask != 0xffffffffu) fail("__syncwarp with mask %#x is not emulated", mask);
  meet("__syncwarp", current, [](void** slots) {
    Clock joined;
    for (int lane = 0; lane < kLanes; ++lane)
      learn(joined, static_cast<Fiber*>(slots[lane])->clock);
    for (int lane = 0; lane < kLanes; ++lane) {
      auto* f = static_cast<Fiber*>(slots[lane]);
      learn(f->clock, joined);
      ++f->clock[f->number];
    }
  });
}

}  // namespace emu

// ---- for Python

extern "C" {
void emu_begin(uint64_t seed, int mutant) {
  emu::m.random = seed * 0x9E3779B97F4A7C15ull + 1;
  emu::m.allowed_shared = emu::kPlainShared;
  emu::m.printed.clear();
  emu::m.error.clear();
  emu::mutant = mutant;
}
// Of the GPU from here on, 90 for 9.0.
void emu_capability(int capability) { emu::compute_capability = capability; }
const char* emu_error() { return emu::m.error.c_str(); }
}
