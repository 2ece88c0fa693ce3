// A GPU made of fibers: what the emulated CUDA headers of this folder call. One fiber per CUDA
// thread, the blocks of a launch one after another in random order, the threads of a block switched
// at barriers and warp-wide instructions only, in random order. Implemented in runtime.cpp
// (threads), memory.cpp (what is checked) and warp.cpp (arithmetic of warps).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emu {

inline constexpr int kLanes = 32;

// Which planted bug is on (build.py puts them in); 0 for none.
extern int mutant;

// ---- threads

dim3 thread_index();
dim3 block_index();
dim3 block_size();
dim3 grid_size();

// Runs body(context) once per thread of the grid. A launch after a failed one does nothing.
void run_grid(void (*body)(const void*), const void* context, const dim3& grid, const dim3& block,
              size_t shared);
template <class Body>
void launch(const Body& body, const dim3& grid, const dim3& block, size_t shared = 0,
            const void* /*stream*/ = nullptr) {
  run_grid([](const void* context) { (*static_cast<const Body*>(context))(); }, &body, grid, block,
           shared);
}
// Dynamic shared memory that launches may ask for from here on.
void allow_shared(size_t bytes);

// Ends the launch with an error: printf's arguments.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
// The kernel's printf, kept for the message of trap().
__attribute__((format(printf, 1, 2))) int print(const char* format, ...);
[[noreturn]] void trap();

// bar.sync id, count; count 0 is the whole block. barrier_arrive does not wait.
void barrier(int id = 0, int count = 0);
void barrier_arrive(int id, int count);
// Orders memory between the lanes of a warp; the other warp-wide instructions do not.
void sync_warp(uint32_t mask);

// ---- memory

char* dynamic_shared();
uint32_t shared_address(const void* pointer);

// Checks an access and performs it. `constant`: ld.global.nc, which must see no write of its
// launch.
void read_global(void* to, const void* from, int bytes, bool constant);
void write_global(void* to, const void* from, int bytes);
void read_shared(void* to, uint32_t from, int bytes);
void write_shared(uint32_t to, const void* from, int bytes);
int compare_and_swap(int* address, int expected, int value);
float atomic_add(float* address, float value);
int add_shared(uint32_t address, int value);

// cp.async: `bytes` of shared memory, the first `from_bytes` from global memory, the rest zeros.
// They arrive at the wait, not before; until then they hold NaN and may not be touched.
void copy_async(uint32_t to, const void* from, int bytes, int from_bytes);
void commit_copies();
void wait_copies(int pending);

// ---- warp-wide instructions: every lane must arrive at the same one

// The value of lane `from`.
uint64_t shuffle(uint64_t value, int from);

// ldmatrix.m8n8.x<count>.shared.b16.
void load_matrices(uint32_t* m, int count, uint32_t row, bool transposed);

// mma.sync.m16n8k<depth>.row.col.f32: c += a b, depth 8 or 16. Sums are exact, rounded once.
enum class Half { kBFloat16, kFloat16 };
void multiply_add(Half type, int depth, float* c, const uint32_t* a, const uint32_t* b);

// ---- 16-bit floats, round to nearest even

float from_bf16(uint16_t bits);
uint16_t to_bf16(float value);
float from_fp16(uint16_t bits);
uint16_t to_fp16(float value);
// ex2.approx.ftz.f32, exact here.
float exp2_flushed(float x);

}  // namespace emu
