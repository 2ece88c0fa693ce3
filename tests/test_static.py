"""benchmarks/static.json against what the compiler makes of the CUDA kernels now."""

from __future__ import annotations

import copy
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from benchmarks import static
from tools.cudasim import CSRC, run
from tools.cudasim.ptx.toolchain import ARCHITECTURES, find_nvcc


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """What nvcc makes of the sources: minutes of compilation, unless they are those of the file."""
    if reason := static.hindrance():
        pytest.skip(f"static figures were not compared: {reason}")
    if recorded().get("sources") == static.sources_digest():
        return recorded()
    return static.measure()


def recorded() -> dict[str, Any]:
    return json.loads(static.FILE.read_text())


def test_no_figure_has_grown(measured: dict[str, Any]) -> None:
    lines = static.worse(measured, recorded())
    hint = "if that is meant, `python -m benchmarks.static` and commit the file"
    assert not lines, "\n".join([*lines, hint])


def test_nothing_spills(measured: dict[str, Any]) -> None:
    for architecture, kernels in measured["kernels"].items():
        assert len(kernels) >= 154
        for name, figures in kernels.items():
            assert figures["spilled bytes"] == 0, f"{name} spills on {architecture}"
            # Local memory is written for printf's arguments only.
            assert "LDL" not in figures["instructions"], f"{name} on {architecture}"


def test_exponentials_run_beside_products(measured: dict[str, Any]) -> None:
    """In the loops of the kernels for sm_90a, all but a few of the 66 or 32 in an iteration stand
    before the wait for the product that they overlap."""
    orders = {n: k["order"] for n, k in measured["kernels"]["sm_90a"].items() if "order" in k}
    assert len(orders) == 35
    for name, order in orders.items():
        assert "wait 1" in order and static.late_exponentials(order) <= 4, f"{name}: {order}"


def test_registers_that_were_given_back_are_not_used(measured: dict[str, Any]) -> None:
    """By the producers of the kernels for sm_90a, which keep 24, of the backward of one kernel 32:
    the hardware does not look."""
    name = "registers after giving"
    given = {n: k[name] for n, k in measured["kernels"]["sm_90a"].items() if name in k}
    kernels = {n for n in measured["kernels"]["sm_90a"] if n.startswith("sm90_")}
    plain = "sm90_backward_sum", "sm90_backward_join"
    assert given.keys() == {n for n in kernels if not n.startswith(plain)}
    for kernel, count in given.items():
        assert count <= (32 if "fused" in kernel else 24), f"{kernel}: {count}"


@pytest.mark.parametrize(
    "name", ["cuda/attention/tile.cuh", "cuda/embedding/embedding.cu", "common/params.h"]
)
def test_a_changed_source_is_built(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CSRC, tmp_path / "csrc")
    monkeypatch.setattr(static, "CSRC", tmp_path / "csrc")
    before = static.sources_digest()
    with (tmp_path / "csrc" / name).open("a") as file:
        file.write("\n")
    assert static.sources_digest() != before


def test_file_names_every_source() -> None:
    """Without nvcc: a kernel that was never recorded is seen."""
    names = {name.split("<")[0] for name in recorded()["kernels"]["sm_90a"]}
    for source in (CSRC / "cuda").rglob("*.cu*"):
        code = re.sub(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)", "", source.read_text())
        for kernel in re.findall(r"__global__\s+void\s+(\w+)\(", code):
            assert kernel in names, f"{kernel} of {source.name} is not in static.json"


def test_worse() -> None:
    """Growth, a loss of occupancy, a new instruction and a new kernel are named; less is fine."""
    old = {
        "kernels": {
            "sm_80": {
                "f<1>": {"registers": 40, "blocks of an SM": 8, "instructions": {"LDG": 4}},
                "g": {"registers": 10, "blocks of an SM": 16, "instructions": {}},
            }
        }
    }
    assert static.worse(old, old) == []
    new = copy.deepcopy(old)
    f = new["kernels"]["sm_80"]["f<1>"]
    f["registers"], f["blocks of an SM"], f["instructions"] = 41, 7, {"LDG": 3, "LDL": 1}
    new["kernels"]["sm_80"]["h"] = new["kernels"]["sm_80"].pop("g")
    assert static.worse(new, old) == [
        "f<1> on sm_80: LDL instructions 1, recorded 0",
        "f<1> on sm_80: blocks of an SM 7, recorded 8",
        "f<1> on sm_80: registers 41, recorded 40",
        "g on sm_80: not built any more",
        "h on sm_80: not recorded",
    ]


def test_late_exponentials() -> None:
    start = "fence, 5 HGMMA, wait 0, 66 EX2, fence, 13 HGMMA, wait 1, "
    for rest, late in (("wait 0, 66 EX2", 66), ("66 EX2, wait 0", 0), ("29 EX2, wait 0, 3 EX2", 3),
                       ("66 EX2, wait 0, fence, 5 HGMMA, wait 0, 8 EX2", 0)):  # fmt: skip
        assert static.late_exponentials(start + rest) == late


def test_given_registers() -> None:
    """Of instructions that a branch can reach, either way; by their operands, wide ones too."""
    give, ends, skips = (0x18_0000_79C8, 0x080E_0500), (0x794D, 0x380_0000), (0x947, 0x380_0000)
    add = 0x0000_0003_0200_7221  # FADD of R2 and R3, to the register of bits 16 to 23
    below = [give, (add | 11 << 16, 255), (skips[0] | 4 << 16, skips[1]), ends]  # @P0 BRA past ends

    def count(*rest: tuple[int, int]) -> int:
        code = [(add | 90 << 16, 255), *below, *rest, ends, (add | 91 << 16, 255)]
        return static.given_registers(b"".join(struct.pack("<QQ", *words) for words in code))

    assert count() == 12
    assert count((add | 30 << 16, 255)) == 31
    assert count((add, 40)) == 41 and count((0x23 << 32 | 0x7221, 255)) == 0x24
    assert count((0x0404_1381 & ~0x1FF | 0x181 | 20 << 16, 0x0C00)) == 24  # LDG.128 to R20
    assert count((0x7944, 0x3C0_0000)) == 256  # CALL
    assert static.given_registers(struct.pack("<QQ", add | 90 << 16, 255)) == 0


def test_operations() -> None:
    words = [0x0000_0000_0000_723C, 0x1234_0000_0000_7981, 0x0000_0000_0000_7918, 0x7FFF]
    code = b"".join(struct.pack("<QQ", word, 0x123C) for word in words)
    assert static.operations(code) == {"HMMA": 1, "LDG": 1, "all": 3}


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "sm_80", "sm_90a"),
    [(167, 128, 55040, 2, 3), (96, 128, 33792, 4, 5), (79, 128, 33792, 4, 6), (28, 128, 0, 16, 16)],
)  # of cuda_occupancy.h
def test_blocks_of_sm(registers: int, threads: int, shared: int, sm_80: int, sm_90a: int) -> None:
    actual = [static.blocks_of_sm(a, registers, threads, shared) for a in ARCHITECTURES]
    assert actual == [sm_80, sm_90a]


def machine_code_of(code: str, architecture: str, folder: Path) -> bytes:
    """Of a kernel called one, as nvcc makes it."""
    (folder / "one.cu").write_text(code)
    nvcc = find_nvcc()
    assert nvcc is not None
    run([nvcc, "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-cubin", "-I", str(CSRC)]
        + [str(folder / "one.cu"), "-o", str(folder / "one.cubin")])  # fmt: skip
    ((name, machine_code),) = static.kernel_codes((folder / "one.cubin").read_bytes())
    assert name == "one"
    return machine_code


def test_instructions_are_those_of_the_ptx(measured: dict[str, Any], tmp_path: Path) -> None:
    """The table of operations, on kernels whose PTX says what must be there."""
    ampere = machine_code_of(
        '#include "cuda/ptx/sm80.cuh"\n'
        "using namespace vlmk::ptx;\n"
        'extern "C" __global__ void one(uint4* p, float* f) {\n'
        "  extern __shared__ char tile[];\n"
        "  const uint32_t at = shared_address(tile) + threadIdx.x * 16;\n"
        "  copy_async(at, p, true); commit_copies(); wait_copies<0>(); __syncthreads();\n"
        "  uint32_t a[4]; load_matrices(a, at); float c[4] = {f[0], f[1], f[2], f[3]};\n"
        "  Bf16Math::multiply_add(c, a, a[0], a[1]);\n"
        "  f[threadIdx.x] = exp2_approx(exchange(c[0], 1));\n"
        "  store_shared(at, __float_as_uint(c[1])); store(p, load_shared(at ^ 16), true);\n"
        "}\n",
        "80",
        tmp_path,
    )
    counts = static.operations(ampere)
    expected = {"LDGSTS": 1, "BAR": 1, "LDSM": 1, "HMMA": 1, "SHFL": 1, "MUFU": 1, "STS": 1}
    expected |= {"LDS": 1, "STG": 2, "LDG": 4}
    assert {op: counts[op] for op in expected} == expected
    hopper = machine_code_of(
        '#include "cuda/ptx/sm90.cuh"\n'
        "using namespace vlmk::ptx;\n"
        'extern "C" __global__ void __launch_bounds__(128, 1)\n'
        "one(const __grid_constant__ CUtensorMap map, float* f) {\n"
        "  extern __shared__ char tile[];\n"
        "  const uint32_t at = shared_address(tile), full = at + 4096;\n"
        "  give_registers<24>(); take_registers<64>();\n"
        "  load_box(at, &map, full, 0, 0, 0); load_box(at + 1024, &map, full, 0, 0, 0);\n"
        "  barrier_arrive_expect(full, 2048); barrier_arrive(full + 8);\n"
        "  float c[32];\n"
        "  wgmma_fence();\n"
        "  const uint64_t m = matrix_descriptor<128, 0, 1024>(at);\n"
        "  Wgmma<Bf16Math, 64>::rows(c, m, m + 64, false);\n"
        "  Wgmma<Bf16Math, 64>::rows(c, m + 2, m + 66, true);\n"
        "  wgmma_commit(); wgmma_wait<0>(); wgmma_results(c);\n"
        "  for (int i = 0; i < 32; ++i) f[i * 128 + threadIdx.x] = exp2_approx(c[i]);\n"
        "}\n",
        "90a",
        tmp_path,
    )
    assert static.order_of_products(hopper) == "fence, 2 HGMMA, wait 0, 32 EX2"
    counts = static.operations(hopper)
    expected = {"HGMMA": 2, "UTMALDG": 2, "SYNCS": 2, "WARPGROUP": 2, "USETMAXREG": 2, "STG": 32}
    assert {op: counts[op] for op in expected} == expected
