#include "cpu/dispatch.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vlmk {
namespace {

constexpr Isa kAll[] = {Isa::kGeneric,    Isa::kAvx2,    Isa::kAvx512,
                        Isa::kAvx512Bf16, Isa::kAmxBf16, Isa::kAmxEmulated};

// "" if this process may use the tile registers and the processor multiplies bf16 there.
const char* why_no_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  static const std::string why = []() -> std::string {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || ~edx & (kAmxBf16 | kAmxTile)) {
      return "this processor, or its hypervisor, offers none";
    }
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, asm/prctl.h
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
      return std::string(
                 "Linux refuses the tile registers, which it has since 5.16 (arch_prctl: ") +
             std::strerror(errno) + ")";
    }
    return "";
  }();
  return why.c_str();
#else
  return "not an x86-64 Linux";
#endif
}

bool cpu_has(Isa isa) {
  if (isa == Isa::kGeneric) return true;
#if defined(__x86_64__)
  // The builtins ask the operating system too (xgetbv); they don't know F16C and AVX512_BF16 on the
  // oldest compilers allowed here.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::kAvx2) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (isa == Isa::kAvx512 || isa == Isa::kAmxEmulated) return avx512;
  const bool bf16 = avx512 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
  return isa == Isa::kAvx512Bf16 ? bf16 : bf16 && !*why_no_tiles();
#else
  return false;
#endif
}

bool compiled(Isa isa) {
  switch (isa) {
    case Isa::kGeneric:
      return true;
    case Isa::kAvx2:
#ifdef VLMKERNELS_HAVE_AVX2
      return true;
#else
      return false;
#endif
    case Isa::kAvx512:
#ifdef VLMKERNELS_HAVE_AVX512
      return true;
#else
      return false;
#endif
    case Isa::kAvx512Bf16:
#if defined(VLMKERNELS_HAVE_AVX512) && defined(VLMKERNELS_HAVE_AVX512_BF16)
      return true;
#else
      return false;
#endif
    case Isa::kAmxBf16:
#if defined(VLMKERNELS_HAVE_AVX512) && defined(VLMKERNELS_HAVE_AMX_BF16)
      return true;
#else
      return false;
#endif
    case Isa::kAmxEmulated:
#if defined(VLMKERNELS_HAVE_AVX512) && defined(VLMKERNELS_HAVE_AMX_EMULATED)
      return true;
#else
      return false;
#endif
  }
  return false;
}

Isa parse(const std::string& name, const char* what) {
  std::string available;
  for (Isa isa : kAll) {
    if (!isa_available(isa)) continue;
    if (name == isa_name(isa)) return isa;
    available += std::string(available.empty() ? "" : ", ") + isa_name(isa);
  }
  throw std::invalid_argument(std::string(what) + " is '" + name + "', but this machine runs " +
                              available);
}

Isa choose() {
  const char* name = std::getenv("VLMKERNELS_ISA");
  if (name && *name) return parse(name, "VLMKERNELS_ISA");
  Isa best = Isa::kGeneric;
  for (Isa isa : kAll) {
    if (isa != Isa::kAmxEmulated && isa_available(isa)) best = isa;
  }
  return best;
}

std::atomic<int> active{-1};  // -1: not chosen yet
std::atomic<bool> forced{false};

}  // namespace

const char* isa_name(Isa isa) {
  static constexpr const char* kNames[] = {"generic",     "avx2",     "avx512",
                                           "avx512_bf16", "amx_bf16", "amx_emulated"};
  return kNames[static_cast<int>(isa)];
}

bool isa_available(Isa isa) { return compiled(isa) && cpu_has(isa); }

const char* why_no_amx() {
  return compiled(Isa::kAmxBf16) ? why_no_tiles() : "the compiler of this build has no tiles";
}

bool tiles_multiply_fp16() {
#if defined(__x86_64__)
  static const bool amx_fp16 = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 21 & 1);
  }();
  return amx_fp16 || active_isa() == Isa::kAmxEmulated;
#else
  return false;
#endif
}

Isa active_isa() {
  int isa = active.load(std::memory_order_relaxed);
  if (isa < 0) {
    isa = static_cast<int>(choose());
    active.store(isa, std::memory_order_relaxed);
  }
  return static_cast<Isa>(isa);
}

bool isa_is_forced() {
  const char* name = std::getenv("VLMKERNELS_ISA");
  return forced.load(std::memory_order_relaxed) || (name && *name);
}

bool is_amd() {
#if defined(__x86_64__)
  static const bool amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return amd;
#else
  return false;
#endif
}

bool is_zen4() {
#if defined(__x86_64__)
  static const bool zen4 = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!is_amd() || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
    return (eax >> 8 & 0xf) + (eax >> 20 & 0xff) == 25 && cpu_has(Isa::kAvx512);
  }();
  return zen4;
#else
  return false;
#endif
}

bool uses_bf16_dots() { return active_isa() == Isa::kAvx512Bf16 && (is_amd() || isa_is_forced()); }

void set_isa(const char* name) {
  const Isa isa = *name ? parse(name, "the instruction set") : choose();
  forced.store(*name != 0, std::memory_order_relaxed);
  active.store(static_cast<int>(isa), std::memory_order_relaxed);
}

}  // namespace vlmk
