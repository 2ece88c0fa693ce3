"""Each wrapper of csrc/cuda/ptx beside its atom of CUTLASS: the same instructions.

CUTLASS comes from PyPI (the extra `cutlass`; its own dependencies are not needed) and is an oracle
only: nothing of it is built into this package.
"""

from __future__ import annotations

import importlib.util
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.static import kernel_codes
from tools.cudasim import CSRC, run
from tools.cudasim.ptx.toolchain import find_nvcc, missing_tool

TYPES = {"Bf16Math": "BF16", "Fp16Math": "F16"}


@dataclass(frozen=True)
class Pair:
    """Two calls that should compile to one code, in kernels that differ in nothing else. Known
    there: `at`, an address in shared memory, and `there`, the pointer to it; `from`, a global one;
    `map`; `on`; registers a, b and c."""

    ours: str
    theirs: str
    why: str = ""  # not the same: in what; the header says why ours stays


def _first(count: int) -> str:
    return f"reinterpret_cast<float(&)[{count}]>(c)"


def _list(name: str, count: int) -> str:
    return ", ".join(f"{name}[{i}]" for i in range(count))


AMPERE = {
    "copy_async": Pair(
        "copy_async(at, from, on);",
        "cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(*(uint4*)from, *(uint4*)there, on);",
        "theirs asks L2 for 128 bytes at once",
    ),
    "copy_word_async": Pair(
        "copy_word_async(at, from, on);",
        "cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<int>::copy(*(int*)from, *(int*)there, on);",
        "as copy_async",
    ),
    "commit_copies": Pair("commit_copies();", "cute::cp_async_fence();"),
    "wait_copies<1>": Pair("wait_copies<1>();", "cute::cp_async_wait<1>();"),
    "wait_copies<0>": Pair(
        "wait_copies<0>();",
        "cute::cp_async_wait<0>();",
        "theirs is wait_all, which waits for copies that were not committed too",
    ),
    "load_matrices, 4": Pair(
        "load_matrices(a, at);",
        "cute::SM75_U32x4_LDSM_N::copy(*(cute::uint128_t*)there, a[0], a[1], a[2], a[3]);",
    ),
    "load_matrices, 2": Pair(
        "load_matrices(b, at);",
        "cute::SM75_U32x2_LDSM_N::copy(*(cute::uint128_t*)there, b[0], b[1]);",
    ),
    "load_matrices_transposed, 4": Pair(
        "load_matrices_transposed(a, at);",
        "cute::SM75_U16x8_LDSM_T::copy(*(cute::uint128_t*)there, a[0], a[1], a[2], a[3]);",
    ),
    "load_matrices_transposed, 2": Pair(
        "load_matrices_transposed(b, at);",
        "cute::SM75_U16x4_LDSM_T::copy(*(cute::uint128_t*)there, b[0], b[1]);",
    ),
    **{
        f"multiply_add, {depth}, {math}": Pair(
            f"{math}::multiply_add({_first(4)}, {ours});",
            f"cute::SM80_16x8x{depth}_F32{kind}{kind}F32_TN::fma({_list('c', 4)}, "
            f"{_list('a', depth // 4)}, {_list('b', depth // 8)}, {_list('c', 4)});",
        )
        for math, kind in TYPES.items()
        for depth, ours in (
            (16, "a, b[0], b[1]"),
            (8, "reinterpret_cast<uint32_t(&)[2]>(a), b[0]"),
        )
    },
}

BARRIER = "cutlass::arch::ClusterTransactionBarrier::"
NAMED = "cutlass::arch::NamedBarrier::"
GMMA = "cute::SM90::GMMA::"
HOPPER = {
    "barrier_init": Pair("barrier_init(at, a[0]);", f"{BARRIER}init((uint64_t*)there, a[0]);"),
    "fence_barrier_init": Pair("fence_barrier_init();", "cutlass::arch::fence_barrier_init();"),
    "barrier_arrive": Pair("barrier_arrive(at);", f"{BARRIER}arrive((uint64_t*)there);"),
    "barrier_arrive_expect": Pair(
        "barrier_arrive_expect(at, a[0]);",
        f"{BARRIER}arrive_and_expect_tx((uint64_t*)there, a[0]);",
    ),
    "barrier_wait": Pair(
        "barrier_wait(at, on);",
        f"{BARRIER}wait((uint64_t*)there, on);",
        "theirs says after how long the hardware answers at the latest",
    ),
    "prefetch_map": Pair("prefetch_map(&map);", "cute::prefetch_tma_descriptor(&map);"),
    "load_box": Pair(
        "load_box(at, &map, at + 64, 1, 2, 3);",
        "cute::SM90_TMA_LOAD_3D::copy(&map, (uint64_t*)(there + 64), 1ull << 60, there, 1, 2, 3);",
        "theirs says how L2 is to keep the bytes",
    ),
    "fence_async_proxy": Pair("fence_async_proxy();", "cutlass::arch::fence_view_async_shared();"),
    "store_bulk": Pair(
        "store_bulk((float*)from, at, a[0]);",
        "cute::SM90_BULK_COPY_S2G::copy(there, from, a[0]);",
    ),
    "commit_bulk": Pair("commit_bulk();", "cute::tma_store_arrive();"),
    "wait_bulk_read": Pair("wait_bulk_read();", "cute::tma_store_wait<0>();"),
    "give_registers": Pair("give_registers<24>();", "cutlass::arch::warpgroup_reg_dealloc<24>();"),
    "take_registers": Pair("take_registers<240>();", "cutlass::arch::warpgroup_reg_alloc<240>();"),
    "named_barrier_sync": Pair(
        "named_barrier_sync(3, 256);",
        f"{NAMED}sync(256, cutlass::arch::ReservedNamedBarriers(3));",
    ),
    "named_barrier_arrive": Pair(
        "named_barrier_arrive(3, 256);",
        f"{NAMED}arrive(256, cutlass::arch::ReservedNamedBarriers(3));",
    ),
    **{
        f"Wgmma<{math}, {width}>::{which}": Pair(
            f"wgmma_fence(); Wgmma<{math}, {width}>::{which}({_first(width // 2)}, {ours}); "
            "wgmma_commit(); wgmma_wait<0>(); wgmma_results(c);",
            f"cute::warpgroup_arrive(); {GMMA}MMA_64x{width}x16_F32{kind}{kind}_{form}::fma("
            f"{operands}, {_list('c', width // 2)}, {GMMA}ScaleOut({add})); "
            "cute::warpgroup_commit_batch(); cute::warpgroup_wait<0>(); "
            "for (int i = 0; i < 64; ++i) cute::warpgroup_fence_operand(c[i]);",
        )
        for math, kind in TYPES.items()
        for width in (16, 32, 64, 96, 128)
        for which, ours, form, operands, add in (
            ("rows", "x, y, on", "SS<Major::K, Major::K>", "x, y", "on"),
            ("deep", "x, y, on", "SS<Major::MN, Major::MN>", "x, y", "on"),
            ("columns", "a, y", "RS<Major::K, Major::MN>", f"{_list('a', 4)}, y", "1"),
        )
    },
}

#: What CUTLASS has no atom for.
NO_ATOM = {"add_bulk", "wait_bulk", "fence_async_proxy_global", "wait_count", "count_up"}

PROLOGUE = """
#include <cute/tensor.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include "cuda/ptx/sm90.cuh"
using namespace vlmk::ptx;
using cute::SM90::GMMA::Major;
"""
KERNEL = """
extern "C" __global__ void __launch_bounds__(384, 1)
{name}(const __grid_constant__ CUtensorMap map, char* from, uint32_t* r, float* f, bool on) {{
  extern __shared__ __align__(1024) char bytes[];
  char* const there = bytes + 16 * threadIdx.x;
  [[maybe_unused]] const uint32_t at = shared_address(there);
  [[maybe_unused]] const uint64_t x = *(const uint64_t*)from, y = x + 8;
  uint32_t a[4], b[2];
  float c[64];
  for (int i = 0; i < 4; ++i) a[i] = r[i];
  for (int i = 0; i < 2; ++i) b[i] = r[4 + i];
  for (int i = 0; i < 64; ++i) c[i] = f[i];
  __syncthreads();
  asm volatile("" ::: "memory");  // which not all of theirs say
  {call}
  asm volatile("" ::: "memory");
  __syncthreads();
  for (int i = 0; i < 4; ++i) r[i] = a[i];
  for (int i = 0; i < 2; ++i) r[4 + i] = b[i];
  for (int i = 0; i < 64; ++i) f[i] = c[i];
}}
"""


def include_options() -> list[str]:
    """nvcc's, or a skip with its reason."""
    if reason := missing_tool():
        pytest.skip(f"not compared with CUTLASS: {reason}")
    wheel = importlib.util.find_spec("cutlass_library")
    if wheel is None or not wheel.submodule_search_locations:
        pytest.skip("not compared with CUTLASS: pip install --no-deps nvidia-cutlass==4.2.0.0")
    headers = Path(wheel.submodule_search_locations[0]) / "source" / "include"
    return [
        "-std=c++17",
        "-DNDEBUG",
        "--expt-relaxed-constexpr",
        "-w",
        "-I",
        str(headers),
        "-I",
        str(CSRC),
    ]


SECOND_REGISTER = (0x181, 0x186, 0x188, 0x1A7, 0x1B2, 0x1B4)


def instructions(code: bytes) -> list[tuple[int, int]]:
    """A kernel's, sorted: operation, modifiers and constants, without registers and timing."""
    found = []
    for low, high in struct.iter_unpack("<QQ", code):
        # LDG, STG, STS, SYNCS and UTMALDG name a register there too.
        register = low >> 9 & 7 in (1, 6, 7) or low & 0x1FF in SECOND_REGISTER
        fields = 0xFFFF0000 | (0xFF_0000_0000 if register else 0)
        found.append((low & ~fields, high >> 8 & 0x1FFFFFFFF))
    return sorted(found)


def codes(folder: Path, architecture: str, pairs: dict[str, Pair]) -> dict[str, Any]:
    """The instructions of each kernel, "ours_0", "theirs_0" and so on."""
    options, source, cubin = include_options(), folder / "pairs.cu", folder / "pairs.cubin"
    kernels = [
        KERNEL.format(name=f"{side}_{i}", call=getattr(pair, side))
        for i, pair in enumerate(pairs.values())
        for side in ("ours", "theirs")
    ]
    source.write_text(PROLOGUE + "".join(kernels))
    nvcc = find_nvcc()
    assert nvcc is not None
    run(
        [nvcc, "-O3", f"-arch=sm_{architecture}", "-cubin", *options, str(source), "-o", str(cubin)]
    )
    return {name: instructions(code) for name, code in kernel_codes(cubin.read_bytes())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "pairs"), [("80", AMPERE), ("90a", HOPPER)], ids=["sm_80", "sm_90a"]
)
def test_machine_code(architecture: str, pairs: dict[str, Pair], tmp_path: Path) -> None:
    found = codes(tmp_path, architecture, pairs)
    ours, theirs = (
        [found[f"{side}_{i}"] for i in range(len(pairs))] for side in ("ours", "theirs")
    )
    names = list(pairs)
    twice = [n for i, n in enumerate(names) if ours[i] in ours[:i]]
    assert not twice, f"the same instructions as another, or none: {twice}"
    for i, (name, pair) in enumerate(pairs.items()):
        same = ours[i] == theirs[i]
        assert same != bool(pair.why), f"{name}: {'the same' if same else 'not the same'}"


#: Of the tiles of sm90/common.cuh: chunks of kRows rows of kRowBytes bytes, the depth or not.
DESCRIPTORS = r"""
template <int kRowBytes, int kRows, bool kDeep>
void compare() {
  using namespace cute;
  using namespace cute::SM90::GMMA;
  constexpr int kChunk = kRowBytes / 2;
  const auto atom = [] {
    if constexpr (kDeep && kRowBytes == 128) return Layout_MN_SW128_Atom<half_t>{};
    else if constexpr (kDeep && kRowBytes == 64) return Layout_MN_SW64_Atom<half_t>{};
    else if constexpr (kDeep) return Layout_MN_SW32_Atom<half_t>{};
    else if constexpr (kRowBytes == 128) return Layout_K_SW128_Atom<half_t>{};
    else if constexpr (kRowBytes == 64) return Layout_K_SW64_Atom<half_t>{};
    else return Layout_K_SW32_Atom<half_t>{};
  }();
  const auto pointer = make_smem_ptr(static_cast<half_t*>(nullptr));
  uint64_t theirs;
  if constexpr (kDeep) {  // two chunks of columns, 16 of the rows
    const auto layout = tile_to_shape(atom, Shape<Int<2 * kChunk>, Int<kRows>>{}, Step<_2, _1>{});
    const auto tile = make_tensor(pointer, layout);
    using Part = Shape<Int<2 * kChunk>, _16>;
    theirs = make_gmma_desc<Major::MN>(local_tile(tile, Part{}, Coord<_0, _0>{}));
  } else {
    const auto tile = make_tensor(pointer, tile_to_shape(atom, Shape<Int<kRows>, Int<kChunk>>{}));
    theirs = make_gmma_desc<Major::K>(local_tile(tile, Shape<Int<kRows>, _16>{}, Coord<_0, _0>{}));
  }
  const uint64_t ours = kDeep ? matrix_descriptor<kRowBytes, kRows * kRowBytes, 8 * kRowBytes>(0)
                              : matrix_descriptor<kRowBytes, 16, 8 * kRowBytes>(0);
  std::printf("descriptor %d %d %d %llx %llx\n", kRowBytes, kRows, kDeep, (unsigned long long)ours,
              (unsigned long long)theirs);
}
int main() {
  compare<128, 64, false>(), compare<128, 128, false>(), compare<64, 64, false>();
  compare<64, 128, false>(), compare<128, 64, true>(), compare<128, 128, true>();
  compare<64, 64, true>(), compare<64, 128, true>(), compare<32, 64, false>();
  compare<32, 128, false>(), compare<32, 64, true>(), compare<32, 128, true>();
}
"""


@pytest.mark.slow
def test_descriptors(tmp_path: Path) -> None:
    """Bit for bit, of addresses of 0: CUTLASS has none on the host, and says so a few times."""
    options, source, program = include_options(), tmp_path / "main.cu", tmp_path / "main"
    source.write_text(PROLOGUE + DESCRIPTORS)
    nvcc = find_nvcc()
    assert nvcc is not None
    run([nvcc, "-arch=sm_90a", *options, str(source), "-o", str(program)])
    found = re.findall(r"^descriptor (\d+ \d+ [01]) (\w+) (\w+)$", run([str(program)]), re.M)
    assert len(found) == 12
    for name, ours, theirs in found:
        assert ours == theirs, f"{name}: {ours}, theirs {theirs}"


def test_every_wrapper_has_an_atom() -> None:
    """Of the sections of the headers that CUTLASS has atoms for; descriptors are compared above."""
    compared = " ".join(pair.ours for pair in (AMPERE | HOPPER).values()) + DESCRIPTORS
    ampere, hopper = ((CSRC / "cuda" / "ptx" / f"sm{n}.cuh").read_text() for n in (80, 90))
    ampere = ampere.partition("// Starts a copy of 16 bytes")[2]
    ampere = (
        ampere.partition("store_shared(")[0]
        + ampere.partition("MULTIPLY_ADD(")[2].partition("#undef")[0]
    )
    names = re.findall(r"__forceinline__ (?:void|uint64_t) (\w+)\(", ampere + hopper)
    assert len(names) > 25
    names.remove("name")  # of a macro: rows and deep
    assert {n for n in names if not re.search(rf"\b{n}\b", compared)} == NO_ATOM
