// A GPU made of fibers: what the emulated CUDA headers of this folder call. One fiber per CUDA
// thread, the blocks of a launch one after another in random order, the threads of a block switched
// at barriers and warp-wide instructions only, in random order. Implemented in runtime.cpp
// (threads), memory.cpp (what is checked), warp.cpp (arithmetic of warps) and hopper.cpp.
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

// Which mutant is on (build.py puts them in); 0 for none.
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

// ---- Hopper: all 128 threads of a warpgroup must arrive at the same of set_registers and wgmma*

// mbarriers. A wait blocks until the phase of that parity is over; the one before the first counts
// as over. Arrivals release, waits acquire. `bytes`: announced with the arrival.
void barrier_init(uint32_t address, uint32_t arrivals);
void fence_barrier_init();
void mbarrier_arrive(uint32_t address, uint32_t bytes = 0);
void mbarrier_wait(uint32_t address, uint32_t parity);

// Tensor copies: a box of a three-dimensional map of cuTensorMapEncodeTiled. They arrive when
// nothing else can go on, those that are waited for in random order; until then their target holds
// NaN and may not be touched.
void check_map(const void* map);
void load_box(uint32_t to, const void* map, uint32_t barrier, int column, int head, int token);
// Makes the running thread's writes to shared memory visible to load_box and wgmma.
void fence_async_proxy();

// Bulk copies of shared memory to global memory, or sums of fp32 numbers there. They read at the
// wait for that and write at the wait for all.
void copy_bulk(float* to, uint32_t from, uint32_t bytes, bool adds);
void commit_bulk();
void wait_bulk(bool read);
// Asked for between a wait_count and a bulk copy.
void fence_async_proxy_global();
// Counts in global memory. Blocks run one after another here: a count that only a later block would
// reach is a deadlock.
void wait_count(const int* count, int value);
void count_up(int* count);
int next_number(int* counter);

// setmaxnreg; a warpgroup that wants more than there are waits.
void set_registers(int count, bool more);

// c [64, columns] (+)= a b, sums exact and rounded once; a in registers as for mma.sync, otherwise
// null and a matrix in shared memory. Matrices are [64, 16] and [columns, 16], if `deep` [16, 64]
// and [16, columns]. c holds NaN until the wait and may not be changed, nor may a.
void wgmma_fence();
void wgmma(Half type, int columns, float* c, const uint32_t* a, uint64_t a_matrix,
           uint64_t b_matrix, bool add, bool deep);
void wgmma_commit();
void wgmma_wait(int pending);

// Of the emulated GPU: 80, or what emu_capability set.
int capability();

// ---- 16-bit floats, round to nearest even

float from_bf16(uint16_t bits);
uint16_t to_bf16(float value);
float from_fp16(uint16_t bits);
uint16_t to_fp16(float value);
// ex2.approx.ftz.f32, exact here.
float exp2_flushed(float x);

}  // namespace emu
