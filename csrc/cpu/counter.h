// A counter by which threads do the parts of a sum in order: the one that adds part n waits until n
// parts are counted. Ends where parts are taken in order too: the thread of the earliest does not
// wait.
#pragma once
#include <sched.h>

#include <cstdint>

namespace vlmk {

inline void wait_until(const int32_t* counter, int32_t parts) {
  for (int i = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != parts; ++i) {
    if (i > 4096) sched_yield();
  }
}

inline void set_counter(int32_t* counter, int32_t parts) {
  __atomic_store_n(counter, parts, __ATOMIC_RELEASE);
}

}  // namespace vlmk
