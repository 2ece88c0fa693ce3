// Stands in for the CUDA runtime in a host library built by nvcc: keeps the kernels that the
// library registers, and hands every launch to a callback (the PTX interpreter). It refuses what
// the real runtime refuses: an unknown kernel, an empty or too large grid or block, more shared
// memory than was asked for.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

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
  kInvalidDevice = 101,
  kLaunchFailure = 719,
  kNotSupported = 801
};
enum { kMaxKernels = 1024, kMaxDynamicSharedMemory = 8, kDefaultShared = 48 << 10, kDevices = 2 };

static launch_callback callback;
static struct {
  const void* host;
  const char* name;
  size_t max_shared[kDevices];
} kernels[kMaxKernels];
static int kernel_count;
static int last_error;
static dim3 pushed_grid, pushed_block;
static size_t pushed_shared;
static void *pushed_stream, *launch_stream;
static int current_device;
static int capability_major = 8, capability_minor = 0;

static int fail(int error) { return last_error = error; }

static int find(const void* host) {
  for (int i = 0; i < kernel_count; ++i)
    if (kernels[i].host == host) return i;
  return -1;
}

void fakecuda_set_callback(launch_callback new_callback) { callback = new_callback; }
// Of both devices; 8.0 unless told otherwise.
void fakecuda_set_capability(int major, int minor) {
  capability_major = major;
  capability_minor = minor;
}

void fakecuda_set_device(int device) { current_device = device; }
void* fakecuda_launch_stream(void) { return launch_stream; }

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
  for (int i = 0; i < kDevices; ++i) kernels[kernel_count].max_shared[i] = kDefaultShared;
  ++kernel_count;
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
  launch_stream = stream;
  const int kernel = find(host);
  if (kernel < 0) return fail(kInvalidDeviceFunction);
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return fail(kInvalidConfiguration);
  if (!block.x || !block.y || !block.z || block.z > 64 ||
      (uint64_t)block.x * block.y * block.z > 1024)
    return fail(kInvalidConfiguration);
  if (shared > kernels[kernel].max_shared[current_device]) return fail(kInvalidValue);
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
    kernels[kernel].max_shared[current_device] = (size_t)value;
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

// ---- the devices

int cudaGetDevice(int* device) {
  *device = current_device;
  return kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  if (device < 0 || device >= kDevices) return fail(kInvalidDevice);
  switch (attribute) {
    case 16:  // multiprocessors: few, so that a block that takes several tiles does
      *value = 3 + 2 * device;
      return kSuccess;
    case 75:
      *value = capability_major;
      return kSuccess;
    case 76:
      *value = capability_minor;
      return kSuccess;
    case 97:  // shared memory that a block may ask for
      *value = 227 << 10;
      return kSuccess;
    default:
      return fail(kInvalidValue);
  }
}

// ---- tensor maps: what the driver's documentation asks for, kept in a form of this file that
// tensor_copy.py reads.

typedef struct {
  uint64_t mark, address;
  uint32_t element, rank;
  uint64_t sizes[5], strides[5];
  uint32_t box[5], swizzle;
} map;
_Static_assert(sizeof(map) == 128, "CUtensorMap's size");

static int encode(void* result, int type, uint32_t rank, void* address, const uint64_t* sizes,
                  const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                  int interleave, int swizzle, int promotion, int fill) {
  static const uint32_t elements[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  static const uint32_t spans[] = {0, 32, 64, 128};
  if (!result || (uintptr_t)result % 64 || !address || (uintptr_t)address % 16 || !sizes || !box ||
      !steps || rank < 1 || rank > 5 || (rank > 1 && !strides))
    return kInvalidValue;
  if (type < 0 || type > 12 || promotion < 0 || promotion > 3) return kNotSupported;
  if (interleave != 0 || swizzle < 0 || swizzle > 3 || fill != 0) return kNotSupported;
  map m = {.mark = 0x70616d726f736e65, .address = (uintptr_t)address};
  m.element = elements[type], m.rank = rank, m.swizzle = (uint32_t)swizzle;
  const uint64_t inner = (uint64_t)box[0] * m.element;
  if (inner % 16 || (swizzle && inner > spans[swizzle])) return kInvalidValue;
  for (uint32_t i = 0; i < rank; ++i) {
    if (!sizes[i] || sizes[i] > (uint64_t)1 << 32 || !box[i] || box[i] > 256) return kInvalidValue;
    if (!steps[i] || steps[i] > 8) return kInvalidValue;
    if (steps[i] != 1) return kNotSupported;
    m.sizes[i] = sizes[i], m.box[i] = box[i];
    if (i == 0) continue;
    if (strides[i - 1] % 16 || strides[i - 1] >= (uint64_t)1 << 40) return kInvalidValue;
    m.strides[i - 1] = strides[i - 1];
  }
  *(map*)result = m;
  return kSuccess;
}

int cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                     unsigned long long flags, int* status) {
  (void)flags;
  *function = NULL;
  const int known = !strcmp(symbol, "cuTensorMapEncodeTiled");
  const int found = known ? (version >= 12000 ? 0 : 2) : 1;  // of cudaDriverEntryPointQueryResult
  if (status) *status = found;
  if (found == 0) *function = (void*)encode;
  return kSuccess;
}
