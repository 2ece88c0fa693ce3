// Inside of the emulator: what runtime.cpp, memory.cpp, warp.cpp and hopper.cpp share.
#pragma once
#include <deque>
#include <vector>

#include "emulator.h"

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define EMU_ASAN 0
#endif

namespace emu {

// What is known of each agent; those past its end are at 0. Agents: the threads of the block, their
// writes as the asynchronous proxy sees them, the tensor core of each warpgroup (groups of products
// that are over), mbarriers (phases that are over).
using Clock = std::vector<uint32_t>;
inline constexpr int kGroupLanes = 128, kMaxGroups = 8;
int block_threads();
inline size_t visible_agent(int thread) { return block_threads() + thread; }
inline size_t tensor_core_agent(int group) { return 2 * block_threads() + group; }
inline size_t mbarrier_agent(int number) { return 2 * block_threads() + kMaxGroups + number; }
inline uint32_t known(const Clock& clock, size_t agent) {
  return agent < clock.size() ? clock[agent] : 0;
}
inline void know(Clock& clock, size_t agent, uint32_t epoch) {
  if (agent >= clock.size()) clock.resize(agent + 1, 0);
  if (clock[agent] < epoch) clock[agent] = epoch;
}

struct Copy {  // one cp.async
  uint32_t to;
  const char* from;
  int bytes, from_bytes;
};

struct Bulk {  // one bulk copy
  float* to;
  uint32_t from, bytes;
  bool adds, committed = false;
  std::vector<float> data;  // once it was read
};

struct Product {  // one wgmma under way, of one thread
  float* c;
  std::vector<float> result;
  const uint32_t* a;  // its registers, or null
  uint32_t left[4];   // what they held
  uint32_t group;
};

struct Fiber {
  int number = 0;  // in its block
  dim3 index;
  void* context = nullptr;  // its stack pointer while it does not run
  char* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  const char* waits_for = nullptr;
  bool done = false;
  const void* where = nullptr;  // the kernel's last instruction that came here
  // clock[u]: what this thread knows of thread u. Its own entry grows when others learn of it.
  Clock clock;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  std::vector<Product> products;
  std::vector<Bulk> bulks;
  bool unfenced = false;             // wait_count since the last fence_async_proxy_global
  uint32_t committed = 0, over = 0;  // groups of products
  bool fenced = false;               // wgmma.fence since the last wait

  int lane() const { return number % kLanes; }
  int warp() const { return number / kLanes; }
  int warpgroup() const { return number / kGroupLanes; }
};

extern Fiber* current;

// Adds what `other` knows.
void learn(Clock& clock, const Clock& other);

// Waits until all lanes of the warp, or of the warpgroup, are at the same instruction; the last one
// runs combine(slots), slots[lane] being what that lane handed in.
using Combine = void (*)(void** slots);
void meet(const char* instruction, void* slot, Combine combine, int lanes = kLanes);
// Lets others run until wake() is called for the running thread, in whatever order.
void wait(const char* what);
void wake(Fiber* fiber);
Fiber& fiber(int thread);
uint32_t draw(size_t below);  // random

// ---- hopper.cpp

void begin_block_hopper();
void end_thread_hopper();
// Nothing can run: a copy that a thread waits for arrives. False where there is none.
bool copy_arrives();

// ---- memory.cpp

void begin_launch_memory();
void begin_block_memory(size_t shared_bytes, int threads, int block);
void end_block_memory();
void set_stacks(const char* begin, size_t bytes);
void set_host_stack(const void* somewhere);
enum class Access { kRead, kConstant, kWrite, kAtomic };
// Checks and notes that the running thread touches these bytes of shared memory.
char* check_shared(uint32_t address, int bytes, Access access, const char* what);
void check_global(const void* address, int bytes, Access access);
// The asynchronous proxy, in units of 16 bytes of shared memory. A tensor copy takes its target
// when it is started: nobody may touch it until it arrives, and then who knows `epoch` of `agent`.
void start_arrival(uint32_t address, size_t agent, uint32_t epoch);
void arrive(uint32_t address, const void* data);
// A product of the running thread's warpgroup, whose threads all know `clock`, reads until the
// warpgroup's `group` is over.
const char* read_matrix(uint32_t address, const Clock& clock, uint32_t group);
// A bulk copy of the running thread is about to read 16 bytes.
void check_bulk(uint32_t address);
// The bytes of an mbarrier are no longer ordinary memory.
void take_barrier(uint32_t address);

}  // namespace emu

// The caller of a function of emulator.h, for error messages.
#define EMU_HERE() \
  (::emu::current ? void(::emu::current->where = __builtin_return_address(0)) : void())
