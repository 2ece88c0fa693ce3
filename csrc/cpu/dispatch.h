// Which instruction set runs: chosen once from cpuid, VLMKERNELS_ISA overrides.
//
// CMakeLists.txt compiles every *kernel.cpp once per instruction set, with its flags and VLMK_ISA
// defined to its name, which is the namespace that the code stands in. What such a file includes
// and only makes sense there ends in .inl. Whatever it defines must have internal linkage or stand
// in that namespace, templates and inline functions too: the linker keeps one copy of a shared
// inline function, and it may keep the AVX-512 one. tests/kernels/test_build.py looks for that.
#pragma once

namespace vlmk {

// kAmxEmulated: the kernels of kAmxBf16 on what cpu/tile.h has in place of the tile instructions.
// For tests on machines without AMX: never chosen, only asked for by name.
enum class Isa : int { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16, kAmxEmulated };

// "generic", "avx2", "avx512", "avx512_bf16", "amx_bf16", "amx_emulated"
const char* isa_name(Isa isa);

// Compiled in and supported by this CPU and operating system. Of AMX, the first call asks Linux for
// leave to use the tile registers, which holds for the process and its children.
bool isa_available(Isa isa);

// "" if kAmxBf16 is available, else why not.
const char* why_no_amx();

// Whether the active instruction set, of those with tiles, multiplies fp16 on them: what stands in
// for the instructions does, a processor needs AMX-FP16 (Granite Rapids and later).
bool tiles_multiply_fp16();

// The best available one, or VLMKERNELS_ISA's. Throws std::invalid_argument for an unknown name or
// one that this machine can't run.
Isa active_isa();

// Whether that was VLMKERNELS_ISA or set_isa, not the best one.
bool isa_is_forced();

// Whether bf16 is multiplied by AVX-512 BF16's dot products, rather than in float32. Zen 4 and 5 do
// twice the work of FMAs by them, Intel's cores half or less: there only if forced.
bool uses_bf16_dots();

// Whether AMD made the processor.
bool is_amd();

// Whether it is AMD's Zen 4: its family, 25, is Zen 3's too, which has no AVX-512.
bool is_zen4();

// For tests: the same checks as VLMKERNELS_ISA; "" takes back what was set before. Not to be called
// while kernels run.
void set_isa(const char* name);

}  // namespace vlmk

#ifdef VLMKERNELS_HAVE_AVX2
#define VLMK_CASE_AVX2(function, ...) \
  case ::vlmk::Isa::kAvx2:            \
    return avx2::function(__VA_ARGS__);
#else
#define VLMK_CASE_AVX2(function, ...)
#endif
#ifdef VLMKERNELS_HAVE_AVX512
#define VLMK_CASE_AVX512(function, ...) \
  case ::vlmk::Isa::kAvx512:            \
  case ::vlmk::Isa::kAvx512Bf16:        \
  case ::vlmk::Isa::kAmxBf16:           \
  case ::vlmk::Isa::kAmxEmulated:       \
    return avx512::function(__VA_ARGS__);
#else
#define VLMK_CASE_AVX512(function, ...)
#endif

// Calls generic::function, avx2::function or avx512::function. An op that multiplies by AVX-512
// BF16 or AMX writes its own switch.
#define VLMK_DISPATCH(function, ...)         \
  switch (::vlmk::active_isa()) {            \
    VLMK_CASE_AVX512(function, __VA_ARGS__)  \
    VLMK_CASE_AVX2(function, __VA_ARGS__)    \
    default:                                 \
      return generic::function(__VA_ARGS__); \
  }

// The same of an op that is compiled for AVX-512 BF16 as well, where one instruction rounds to
// bf16: its kernels run on a processor with AMX too.
#ifdef VLMKERNELS_HAVE_AVX512_BF16
#define VLMK_DISPATCH_BF16(function, ...)                 \
  if (::vlmk::active_isa() == ::vlmk::Isa::kAvx512Bf16 || \
      ::vlmk::active_isa() == ::vlmk::Isa::kAmxBf16) {    \
    return avx512_bf16::function(__VA_ARGS__);            \
  }                                                       \
  VLMK_DISPATCH(function, __VA_ARGS__)
#else
#define VLMK_DISPATCH_BF16(function, ...) VLMK_DISPATCH(function, __VA_ARGS__)
#endif

// Declares the three entry points of one op, for <op>.h: VLMK_DECLARE(attention_forward, const
// AttentionParams&).
#define VLMK_DECLARE(function, ...) \
  namespace generic {               \
  void function(__VA_ARGS__);       \
  }                                 \
  namespace avx2 {                  \
  void function(__VA_ARGS__);       \
  }                                 \
  namespace avx512 {                \
  void function(__VA_ARGS__);       \
  }                                 \
  void function(__VA_ARGS__)
