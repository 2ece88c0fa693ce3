// Inside of the emulator: what runtime.cpp, memory.cpp and warp.cpp share.
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

using Clock = std::vector<uint32_t>;  // one count per thread of the block

struct Copy {  // one cp.async
  uint32_t to;
  const char* from;
  int bytes, from_bytes;
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

  int lane() const { return number % kLanes; }
  int warp() const { return number / kLanes; }
};

extern Fiber* current;

// Adds what `other` knows.
void learn(Clock& clock, const Clock& other);

// Waits until all lanes of the warp are at the same instruction; the last one runs
// combine(slots, context), slots[lane] being what that lane handed in.
using Combine = void (*)(void** slots);
void meet(const char* instruction, void* slot, Combine combine);

// ---- memory.cpp

void begin_launch_memory();
void begin_block_memory(size_t shared_bytes, int threads, int block);
void end_block_memory();
void set_stacks(const char* begin, size_t bytes);
void set_host_stack(const void* somewhere);
enum class Access { kRead, kConstant, kWrite, kAtomic };
// Checks and notes that the running thread touches these bytes of shared memory.
char* check_shared(uint32_t address, int bytes, Access access, const char* what);

}  // namespace emu

// The caller of a function of emulator.h, for error messages.
#define EMU_HERE() \
  (::emu::current ? void(::emu::current->where = __builtin_return_address(0)) : void())
