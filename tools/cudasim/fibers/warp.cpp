// Warp-wide instructions and 16-bit floats.
#include <cmath>

#include "machine.h"

namespace emu {

uint64_t shuffle(uint64_t value, int from) {
  EMU_HERE();
  struct Slot {
    uint64_t value, result;
    int from;
  } mine{value, 0, from};
  meet("shfl.sync", &mine, [](void** slots) {
    for (int lane = 0; lane < kLanes; ++lane) {
      auto* s = static_cast<Slot*>(slots[lane]);
      s->result = static_cast<Slot*>(slots[s->from & (kLanes - 1)])->value;
    }
  });
  return mine.result;
}

void load_matrices(uint32_t* m, int count, uint32_t row, bool transposed) {
  EMU_HERE();
  struct Slot {
    uint32_t* m;
    const uint16_t* row;
    int count;
    bool transposed;
  } mine{m, nullptr, count, transposed};
  if (count != 1 && count != 2 && count != 4) fail("ldmatrix.x%d", count);
  if (current->lane() < 8 * count)  // the rest of the addresses is not looked at
    mine.row = reinterpret_cast<const uint16_t*>(
        check_shared(row, 16, Access::kRead, transposed ? "ldmatrix.trans" : "ldmatrix"));
  static const char* const kNames[2][5] = {
      {"", "ldmatrix.x1", "ldmatrix.x2", "", "ldmatrix.x4"},
      {"", "ldmatrix.x1.trans", "ldmatrix.x2.trans", "", "ldmatrix.x4.trans"}};
  meet(kNames[transposed][count], &mine, [](void** slots) {
    const auto& any = *static_cast<Slot*>(slots[0]);
    for (int i = 0; i < any.count; ++i) {
      const uint16_t* rows[8];
      for (int r = 0; r < 8; ++r) rows[r] = static_cast<Slot*>(slots[i * 8 + r])->row;
      for (int lane = 0; lane < kLanes; ++lane) {
        const int g = lane / 4, c = lane % 4 * 2;
        const uint32_t low = any.transposed ? rows[c][g] : rows[g][c];
        const uint32_t high = any.transposed ? rows[c + 1][g] : rows[g][c + 1];
        static_cast<Slot*>(slots[lane])->m[i] = low | high << 16;
      }
    }
  });
}

namespace {

struct Fragments {
  Half type;
  int depth;
  float* c;
  const uint32_t* a;
  const uint32_t* b;
};

float element(const Fragments& f, uint32_t pair, int which) {
  const auto bits = static_cast<uint16_t>(pair >> 16 * which);
  return f.type == Half::kBFloat16 ? from_bf16(bits) : from_fp16(bits);
}

// Fragments as in the PTX manual, m16n8k8 and m16n8k16: with g = lane / 4 and t = lane % 4,
// register i of a holds row g + i % 2 * 8, columns i / 2 * 8 + 2 t and the next; register i of b
// holds rows i * 8 + 2 t and the next of column g; c holds rows g and g + 8, columns 2 t and the
// next.
void multiply(void** slots) {
  float a[16][16], b[8][16];
  const int depth = static_cast<Fragments*>(slots[0])->depth;
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& f = *static_cast<Fragments*>(slots[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < depth / 4; ++i)
      for (int e = 0; e < 2; ++e) a[g + i % 2 * 8][i / 2 * 8 + 2 * t + e] = element(f, f.a[i], e);
    for (int i = 0; i < depth / 8; ++i)
      for (int e = 0; e < 2; ++e) b[g][i * 8 + 2 * t + e] = element(f, f.b[i], e);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    float* c = static_cast<Fragments*>(slots[lane])->c;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = c[i];
      for (int k = 0; k < depth; ++k) sum += static_cast<double>(a[row][k]) * b[column][k];
      c[i] = static_cast<float>(sum);
    }
  }
}

}  // namespace

void multiply_add(Half type, int depth, float* c, const uint32_t* a, const uint32_t* b) {
  EMU_HERE();
  if (depth != 8 && depth != 16) fail("mma.m16n8k%d", depth);
  Fragments mine{type, depth, c, a, b};
  const bool bf16 = type == Half::kBFloat16;
  meet(depth == 8 ? (bf16 ? "mma.m16n8k8.bf16" : "mma.m16n8k8.f16")
                  : (bf16 ? "mma.m16n8k16.bf16" : "mma.m16n8k16.f16"),
       &mine, multiply);
}

float from_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
uint16_t to_bf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
float from_fp16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                          : std::ldexp(1024.f + fraction, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}
uint16_t to_fp16(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return 0x7fff;
  const float x = std::fabs(value);
  if (x == 0.f) return sign;
  if (x >= 65520.f) return sign | 0x7c00;  // rounds to infinity
  int exponent;
  std::frexp(x, &exponent);  // x < 2^exponent
  // Units of the last place: 2^(exponent - 11), or 2^-24 where subnormal. nearbyint is to even.
  const int unit = exponent < -13 ? -24 : exponent - 11;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(x, -unit)));
  // 1024 to 2048 steps of a normal number: the implicit bit adds one to the exponent's field.
  return sign | static_cast<uint16_t>(unit == -24 ? steps : ((unit + 24) << 10) + steps);
}
float exp2_flushed(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.f : y;
}

}  // namespace emu
