// Working memory of one thread, kept between calls: a fresh large allocation costs a page fault per
// 4 KiB, which is as much as a small window's whole attention.
#pragma once
#include <cstddef>

namespace vlmk {

// At least `floats` floats, 64-byte aligned, contents undefined; valid until the thread's next
// call. Null when memory is short: callers stand in OpenMP regions, which no exception may leave.
float* scratch(size_t floats);

// Throws std::runtime_error naming the size: outside OpenMP regions, after a null.
[[noreturn]] void throw_out_of_memory(size_t floats);

// For tests: every scratch() returns memory filled with NaN.
void poison_scratch(bool on);

}  // namespace vlmk
