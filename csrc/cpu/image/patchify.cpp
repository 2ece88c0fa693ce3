// A pixel is 8 bits, so that rescaling, normalising and the cast are one look-up in a table of 256
// values a channel (3 KB, in L1), made by the caller with the reference's own arithmetic.
//
// Bytes per patch row of 1176 values: 588 read from an image (1176 from a video), 4704 written in
// fp32, 2352 in bf16: the floor is the speed of writing. Every value of a still image is looked up
// once and written twice.
#include "cpu/image/patchify.h"

#include <algorithm>
#include <cstring>

namespace vlmk {
namespace {

// The pixels of one patch of one frame to kChannels planes, `plane` values apart.
template <class T>
inline void patch(const uint8_t* from, int64_t line, const T* table, T* to, int64_t plane,
                  int64_t side) {
  const T *red = table, *green = table + 256, *blue = table + 512;
  for (int64_t y = 0; y < side; ++y, from += line, to += side) {
    T *r = to, *g = to + plane, *b = to + 2 * plane;
    for (int64_t x = 0; x < side; ++x) {
      r[x] = red[from[3 * x]];
      g[x] = green[from[3 * x + 1]];
      b[x] = blue[from[3 * x + 2]];
    }
  }
}

template <class T>
void rows(const PatchifyParams& p) {
  const int64_t side = p.patch_size, merge = p.merge_size, steps = p.temporal_patch_size;
  const int64_t area = side * side, plane = steps * area, row = 3 * plane;
  const int64_t line = 3 * p.width, frame = line * p.height;
  const int64_t across = p.width / side / merge, down = p.height / side / merge;
  const int64_t slices = (p.frames + steps - 1) / steps;
  const T* table = static_cast<const T*>(p.table);
  // One task is a band of merged patches: consecutive rows, written in order.
  const int64_t bands = slices * down, threads = std::max<int64_t>(std::min(p.threads, bands), 1);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (threads > 1)
  for (int64_t band = 0; band < bands; ++band) {
    const int64_t slice = band / down, top = band % down * merge * side;
    T* out = static_cast<T*>(p.out) + band * across * merge * merge * row;
    for (int64_t i = 0; i < across * merge * merge; ++i, out += row) {
      const int64_t block = i / (merge * merge), inner = i % (merge * merge);
      const int64_t y = top + inner / merge * side, x = (block * merge + inner % merge) * side;
      const uint8_t* corner = p.pixels + y * line + x * 3;
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t wanted = slice * steps + step;
        if (wanted < p.frames) {
          patch(corner + wanted * frame, line, table, out + step * area, plane, side);
        } else {  // the last frame again; it is in this slice, just before
          for (int64_t c = 0; c < 3; ++c) {
            T* to = out + c * plane + step * area;
            std::memcpy(to, to - area, area * sizeof(T));
          }
        }
      }
    }
  }
}

}  // namespace

void patchify(const PatchifyParams& p) {
  if (p.dtype == DType::kFloat32)
    rows<float>(p);
  else
    rows<uint16_t>(p);
}

}  // namespace vlmk
