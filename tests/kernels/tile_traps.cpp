// Lets a processor without AMX run code with tile instructions: each is an illegal instruction
// there, which this file's signal handler decodes and carries out. So the very code that a
// processor with AMX will run is tested, its operands and configuration included; slowly. Where
// only AMX-FP16 is missing, its product alone is trapped, and works on the processor's tiles.
// Linux, x86-64.
#include <cpuid.h>
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct Tiles {
  uint8_t config[64];  // palette, start row, 14 reserved bytes, 16 row lengths, 16 numbers of rows
  alignas(64) float data[8][16][16];

  int row_bytes(int tile) const {
    uint16_t bytes;
    std::memcpy(&bytes, config + 16 + 2 * tile, 2);
    return bytes;
  }
  int rows(int tile) const { return config[48 + tile]; }
};
thread_local Tiles tiles;
struct sigaction previous;
bool processor_has_tiles;

[[noreturn]] void fail(const char* why) {
  const char* const parts[] = {"tile_traps.cpp: ", why, "\n"};
  for (const char* part : parts) (void)!write(2, part, std::strlen(part));
  std::abort();
}

void require(bool condition, const char* why) {
  if (!condition) fail(why);
}

void load_config(const void* from) {
  std::memset(&tiles, 0, sizeof tiles);
  std::memcpy(tiles.config, from, sizeof tiles.config);
  require(tiles.config[0] == 1, "ldtilecfg: the palette is not 1");
  for (int i = 1; i < 16; ++i) require(tiles.config[i] == 0, "ldtilecfg: reserved bytes");
  for (int i = 0; i < 16; ++i) {
    const bool none = tiles.rows(i) == 0 && tiles.row_bytes(i) == 0;
    require(i < 8 || none, "ldtilecfg: there are 8 tiles");
    require(tiles.rows(i) <= 16 && tiles.row_bytes(i) <= 64, "ldtilecfg: a tile is too large");
  }
}

// TDPBF16PS and TDPFP16PS: c += a b; two chains of FMAs and their sum, denormals of float32 and
// bf16 as 0 (the processor's mode in a signal handler is the handler's own).
void dot(int c, int a, int b, bool fp16) {
  const int depth = tiles.row_bytes(a) / 4;
  require(tiles.rows(c) > 0 && tiles.rows(c) == tiles.rows(a), "a product: rows of C and A");
  require(tiles.row_bytes(c) == tiles.row_bytes(b), "a product: columns of C and B");
  require(depth == tiles.rows(b), "a product: depth of A and B");
  const auto part = [fp16](float pair, int half) {
    uint32_t bits;
    std::memcpy(&bits, &pair, 4);
    if (fp16) return _cvtsh_ss(static_cast<uint16_t>(half ? bits >> 16 : bits));
    bits = half ? bits & 0xffff0000 : bits << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  _mm_setcsr(0x1f80 | 0x8040);
  asm volatile("" ::: "memory");
  for (int i = 0; i < tiles.rows(c); ++i) {
    for (int n = 0; n < tiles.row_bytes(c) / 4; ++n) {
      float chains[2] = {0, 0};
      for (int k = 0; k < depth; ++k) {
        for (int half = 0; half < 2; ++half) {
          chains[half] = __builtin_fmaf(part(tiles.data[a][i][k], half),
                                        part(tiles.data[b][k][n], half), chains[half]);
        }
      }
      tiles.data[c][i][n] += chains[0] + chains[1];
    }
  }
  asm volatile("" ::: "memory");
}

// The tiles of the interrupted code, as the kernel has saved them for the handler (XSAVE's standard
// format: what tells that it did, where the components lie, and which of them are not zero).
void dot_of_the_processors(char* saved, int c, int a, int b) {
  constexpr int kConfig = 17, kData = 18;
  uint32_t magic, offsets[2];
  std::memcpy(&magic, saved + 464, 4);
  require(magic == 0x46505853, "the kernel has saved no extended state");
  for (int i = 0; i < 2; ++i) {
    unsigned size, flags, reserved;
    __cpuid_count(0xd, kConfig + i, size, offsets[i], flags, reserved);
  }
  uint64_t present;
  std::memcpy(&present, saved + 512, 8);
  require(present >> kConfig & 1, "tdpfp16ps: no configuration");
  std::memset(&tiles, 0, sizeof tiles);
  std::memcpy(tiles.config, saved + offsets[0], sizeof tiles.config);
  if (present >> kData & 1) std::memcpy(tiles.data, saved + offsets[1], sizeof tiles.data);
  dot(c, a, b, true);
  std::memcpy(saved + offsets[1], tiles.data, sizeof tiles.data);
  present |= uint64_t{1} << kData;
  std::memcpy(saved + 512, &present, 8);
}

// VEX.128.0F38: 49 is configuration and tilezero, 4B load and store, 5C a product.
void on_illegal_instruction(int, siginfo_t*, void* context) {
  mcontext_t& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  greg_t* registers = machine.gregs;
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  const auto* code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  require(code[0] == 0xc4 && (code[1] & 0x1f) == 2 && !(code[2] & 0x84), "not on tiles");
  const int extend_index = code[1] & 0x40 ? 0 : 8, extend_base = code[1] & 0x20 ? 0 : 8;
  const int prefix = code[2] & 3, third = ~(code[2] >> 3) & 15, op = code[3];
  const int mode = code[4] >> 6, reg = code[4] >> 3 & 7, rm = code[4] & 7;
  const uint8_t* end = code + 5;
  constexpr int kNone = 0, kF3 = 2, kF2 = 3;
  if (mode == 3) {
    require(extend_base == 0 && reg < 8 && third < 8, "no such tile");
    if (processor_has_tiles) {
      require(op == 0x5c && prefix == kF2, "the processor knows that instruction");
      dot_of_the_processors(reinterpret_cast<char*>(machine.fpregs), reg, rm, third);
    } else if (op == 0x49 && prefix == kNone) {
      std::memset(&tiles, 0, sizeof tiles);  // tilerelease
    } else if (op == 0x49 && prefix == kF2) {
      require(tiles.rows(reg) > 0, "tilezero: no configuration");
      std::memset(tiles.data[reg], 0, sizeof tiles.data[reg]);
    } else if (op == 0x5c && (prefix == kF3 || prefix == kF2)) {
      dot(reg, rm, third, prefix == kF2);
    } else {
      fail("not an instruction of AMX-BF16 or AMX-FP16");
    }
    registers[REG_RIP] = reinterpret_cast<greg_t>(end);
    return;
  }
  char* address = nullptr;
  ptrdiff_t stride = 0;
  int base = rm + extend_base;
  if (rm == 4) {
    const int sib = *end++, index = (sib >> 3 & 7) + extend_index;
    base = (sib & 7) + extend_base;
    require(mode != 0 || (sib & 7) != 5, "an address without a base");
    if (index != 4) stride = registers[kOrder[index]] << (sib >> 6);
  } else {
    require(mode != 0 || rm != 5, "an address from rip");
  }
  address = reinterpret_cast<char*>(registers[kOrder[base]]);
  if (mode == 1) address += static_cast<int8_t>(*end++);
  if (mode == 2) {
    int32_t displacement;
    std::memcpy(&displacement, end, 4);
    address += displacement;
    end += 4;
  }
  if (op == 0x49 && prefix == kNone) {
    load_config(address + stride);
  } else {
    require(op == 0x4b && rm == 4 && (prefix == kF2 || prefix == kF3), "not a load or a store");
    require(tiles.rows(reg) > 0, "a load or a store: no configuration");
    if (prefix == kF2) std::memset(tiles.data[reg], 0, sizeof tiles.data[reg]);
    for (int i = 0; i < tiles.rows(reg); ++i) {
      char* row = address + i * stride;
      const size_t bytes = tiles.row_bytes(reg);
      if (prefix == kF2) {
        std::memcpy(tiles.data[reg][i], row, bytes);
      } else {
        std::memcpy(row, tiles.data[reg][i], bytes);
      }
    }
  }
  registers[REG_RIP] = reinterpret_cast<greg_t>(end);
}

}  // namespace

// has_tiles: only products of fp16 are illegal instructions.
extern "C" void trap_tile_instructions(bool on, bool has_tiles) {
  processor_has_tiles = has_tiles;
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  if (on) {
    sigaction(SIGILL, &action, &previous);
  } else {
    sigaction(SIGILL, &previous, nullptr);
  }
}
