// Stands in for the CUDA runtime in a host library built by nvcc: keeps the kernels that the
// library registers, and hands every launch to a callback (the PTX interpreter). It refuses what
// the real runtime refuses: an unknown kernel, an empty or too large grid or block, more shared
// memory than was asked for.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
  unsigned x, y, z;
} dim3;
typedef int (*launch_callback)(const char* kernel, const unsigned* dims, size_t shared,
                               void** arguments);

enum {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidConfiguration = 9,
  kNoDriver = 35,
  kInvalidDeviceFunction = 98,
  kLaunchFailure = 719
};
enum { kMaxKernels = 1024, kMaxDynamicSharedMemory = 8, kDefaultShared = 48 << 10 };

static launch_callback callback;
static struct {
  const void* host;
  const char* name;
  size_t max_shared;
} kernels[kMaxKernels];
static int kernel_count;
static int last_error;
static dim3 pushed_grid, pushed_block;
static size_t pushed_shared;
static void* pushed_stream;

static int fail(int error) { return last_error = error; }

static int find(const void* host) {
  for (int i = 0; i < kernel_count; ++i)
    if (kernels[i].host == host) return i;
  return -1;
}

void fakecuda_set_callback(launch_callback new_callback) { callback = new_callback; }

// ---- what nvcc's generated code calls
// ------------------------------------------------------------

void** __cudaRegisterFatBinary(void* binary) {
  static void* handle;
  handle = binary;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
void __cudaUnregisterFatBinary(void** handle) { (void)handle; }
void __cudaRegisterVar(void** handle, char* host, char* address, const char* name, int external,
                       size_t size, int constant, int global) {
  (void)handle, (void)host, (void)address, (void)name;
  (void)external, (void)size, (void)constant, (void)global;
}
void __cudaRegisterFunction(void** handle, const char* host, char* device, const char* name,
                            int limit, void* thread, void* block, void* block_size, void* grid_size,
                            int* warp_size) {
  (void)handle, (void)device, (void)limit, (void)thread;
  (void)block, (void)block_size, (void)grid_size, (void)warp_size;
  if (kernel_count == kMaxKernels) return;
  kernels[kernel_count].host = host;
  kernels[kernel_count].name = name;
  kernels[kernel_count++].max_shared = kDefaultShared;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed_grid = grid;
  pushed_block = block;
  pushed_shared = shared;
  pushed_stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed_grid;
  *block = pushed_block;
  *shared = pushed_shared;
  *(void**)stream = pushed_stream;
  return kSuccess;
}
int __cudaGetKernel(const void** kernel, const void* host) {
  *kernel = host;
  return find(host) < 0 ? fail(kInvalidDeviceFunction) : kSuccess;
}

// ---- the runtime's interface
// ---------------------------------------------------------------------

int cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared,
                     void* stream) {
  (void)stream;
  const int kernel = find(host);
  if (kernel < 0) return fail(kInvalidDeviceFunction);
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return fail(kInvalidConfiguration);
  if (!block.x || !block.y || !block.z || block.z > 64 ||
      (uint64_t)block.x * block.y * block.z > 1024)
    return fail(kInvalidConfiguration);
  if (shared > kernels[kernel].max_shared) return fail(kInvalidValue);
  if (!callback) return fail(kNoDriver);
  const unsigned dims[6] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
  return callback(kernels[kernel].name, dims, shared, arguments) ? fail(kLaunchFailure) : kSuccess;
}
int __cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared,
                       void* stream) {
  return cudaLaunchKernel(host, grid, block, arguments, shared, stream);
}
int cudaFuncSetAttribute(const void* host, int attribute, int value) {
  const int kernel = find(host);
  if (kernel < 0) return fail(kInvalidDeviceFunction);
  if (attribute == kMaxDynamicSharedMemory) {
    if (value > 227 << 10) return fail(kInvalidValue);
    kernels[kernel].max_shared = (size_t)value;
  }
  return kSuccess;
}
int cudaGetLastError(void) {
  const int error = last_error;
  last_error = kSuccess;
  return error;
}
int cudaPeekAtLastError(void) { return last_error; }
const char* cudaGetErrorString(int error) {
  static char text[32];
  snprintf(text, sizeof text, "fake CUDA error %d", error);
  return text;
}
