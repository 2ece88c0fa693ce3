"""Window attention as nvcc compiled it, against float64, and planted bugs that must be noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .attention_cases import Case, WindowKernels, check_window, keep_instances, small_suite
from .parser import parse_ptx
from .ptxtypes import SimError
from .toolchain import (
    CSRC,
    Build,
    build_kernels,
    kernel_ptx,
)

SOURCE = "attention_window.cu"
#: Instances that are built here: the rest take most of nvcc's time.
QUICK = (80, 64)
LARGE = (64, 128)


def _copy(
    folder: Path, file: str, changes: list[tuple[str, str]], instance: tuple[int, int]
) -> Path:
    """A copy of csrc with one instance, (head_dim, keys), and changes in one file.

    Returns the path of its attention_window.cu.
    """
    cuda = folder / "csrc" / "cuda"
    cuda.mkdir(parents=True)
    (cuda.parent / "params.h").write_text((CSRC / "params.h").read_text())
    for name in (SOURCE, "attention_window.h", "primitives.cuh"):
        code = (CSRC / "cuda" / name).read_text()
        if name == SOURCE:
            code = keep_instances(code, [instance])
        for text, replacement in changes if name == file else []:
            assert code.count(text) == 1, f"{text!r} is {code.count(text)} times in {name}"
            code = code.replace(text, replacement)
        (cuda / name).write_text(code)
    return cuda / SOURCE


@pytest.fixture(scope="session")
def window_build(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("window")
    return build_kernels(_copy(folder, SOURCE, [], QUICK), folder / "build", ["80"])


@pytest.fixture
def window(window_build: Build, fake_runtime: Path) -> WindowKernels:
    return WindowKernels(window_build, fake_runtime, "80")


@pytest.mark.parametrize("name", small_suite())
def test_accuracy(name: str, window: WindowKernels, rng: np.random.Generator) -> None:
    small_suite()[name](window, rng)


def test_128_keys(fake_runtime: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """The larger instance, as built for sm_90a."""
    build = build_kernels(_copy(tmp_path, SOURCE, [], LARGE), tmp_path / "build", ["90a"])
    kernels = WindowKernels(build, fake_runtime, "90a")
    check_window(kernels, Case(rng, [100], 1, 1, 64, "float16", causal=True))


def test_random_shapes(window: WindowKernels, rng: np.random.Generator) -> None:
    for _ in range(2):
        kv_heads = int(rng.integers(1, 3))
        case = Case(
            rng,
            rng.integers(0, 65, int(rng.integers(1, 4))).tolist(),
            kv_heads * int(rng.integers(1, 3)),
            kv_heads,
            80,
            str(rng.choice(["bfloat16", "float16"])),
            bool(rng.random() < 0.5),
            float(rng.choice([0.1, 0.3, -0.2])),
        )
        print(case.lengths, case.heads, case.kv_heads, case.dim, case.dtype, case.causal)
        check_window(window, case)


def test_a_too_long_segment_is_trapped(window: WindowKernels, rng: np.random.Generator) -> None:
    with pytest.raises(SimError, match="segment 1 is tokens 3 to 13 of 13, and max_seqlen is 5"):
        check_window(window, Case(rng, [3, 10], 1, 1, 80, max_length=5))


MUTANTS = [
    ("keys beyond the window", SOURCE, "key < length && (!p.causal || key <= row",
     "(!p.causal || key <= row"),
    ("causal off by one", SOURCE, "key <= row + e / 2 * 8)", "key < row + e / 2 * 8)"),
    ("rows read past the window", SOURCE, "from + (inside ? row : 0) * stride + unit * 8, inside);",
     "from + row * stride + unit * 8, true);"),
    ("values not waited for", SOURCE, "ptx::wait_copies<0>();\n  __syncthreads();\n  float out",
     "__syncthreads();\n  float out"),
    ("no barrier before values", SOURCE,
     "ptx::wait_copies<0>();\n  __syncthreads();\n  float out",
     "ptx::wait_copies<0>();\n  float out"),
    ("no barrier before keys", SOURCE, "ptx::wait_copies<1>();\n  __syncthreads();",
     "ptx::wait_copies<1>();"),
    ("maximum over half a row", SOURCE, "top[r] = fmaxf(top[r], ptx::exchange(top[r], 2));", ""),
    ("sum over half a row", SOURCE, "sum[r] += ptx::exchange(sum[r], 1);", ""),
    ("sign of the scale", SOURCE, "s[n][e] * scale.sign : -INFINITY", "s[n][e] : -INFINITY"),
    ("natural exponent", SOURCE, "* 1.44269504f, 1e-30f)", ", 1e-30f)"),
    ("operand halves swapped", SOURCE,
     "a[1] = Math::pack(c0[2], c0[3]);\n  a[2] = Math::pack(c1[0], c1[1]);",
     "a[2] = Math::pack(c0[2], c0[3]);\n  a[1] = Math::pack(c1[0], c1[1]);"),
    ("dS not awaited", SOURCE,
     "    __syncthreads();  // dS is whole; queries and douts are free\n", ""),
    ("next head too early", SOURCE,
     "    __syncthreads();  // before the next head's rows arrive\n", ""),
    ("delta left out", SOURCE, "(dp[n][e] - delta[query])", "(dp[n][e])"),
    ("delta of half a row", SOURCE, "return sum + ptx::exchange(sum, 1);", "return sum;"),
    ("key gradients unscaled", SOURCE,
     "const float factor[2] = {p.scale, p.scale}, one[2]",
     "const float factor[2] = {1.f, 1.f}, one[2]"),
    ("keys beyond the window, backward", SOURCE, "mine < length && (!p.causal || mine <= query)",
     "(!p.causal || mine <= query)"),
    ("causal transposed, backward", SOURCE, "mine <= query);", "mine >= query);"),
    ("wrong key head", SOURCE, "const int64_t kv_head = head / (p.heads / p.kv_heads);",
     "const int64_t kv_head = head % p.kv_heads;"),
    ("store past the window", SOURCE, "const bool inside = r < length;",
     "const bool inside = r <= length;"),
    ("second part of dq at the first's place", SOURCE, "queries, first, kPart,",
     "queries, first, 0,"),
    ("low and high swapped", "primitives.cuh",
     'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));',
     'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(low), "f"(high));'),
    ("not transposed", "primitives.cuh", "m8n8.x4.trans.shared", "m8n8.x4.shared"),
    ("one group too few", "primitives.cuh", '"n"(kPending)', '"n"(kPending + 1)'),
    ("wrong lanes exchanged", "primitives.cuh", "__shfl_xor_sync(kAllLanes, value, mask)",
     "__shfl_xor_sync(kAllLanes, value, mask, 2)"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "text", "new"), [pytest.param(*m[1:], id=m[0]) for m in MUTANTS])
def test_mutant_is_killed(
    file: str,
    text: str,
    new: str,
    window: WindowKernels,
    window_build: Build,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    source = _copy(tmp_path, file, [(text, new)], QUICK)
    window.module = parse_ptx(kernel_ptx(source, window_build, "80"))
    killed = None
    for name, check in small_suite().items():
        try:
            check(window, rng)
        except (SimError, AssertionError) as error:
            killed = f"{name}: {str(error).splitlines()[0][:150]}"
            break
    print(killed)
    assert killed, "the mutant passes every check"
