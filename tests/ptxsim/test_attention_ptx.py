"""Window attention as nvcc compiled it, against float64, and planted bugs that must be noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from . import vision_cases
from .attention_cases import Case, WindowKernels, check_window, keep_instances, small_suite
from .parser import parse_ptx
from .ptxtypes import SimError
from .toolchain import (
    CSRC,
    Build,
    build_kernels,
    kernel_ptx,
)
from .vision_cases import VisionCase, check_vision

SOURCE, VISION = "attention_window.cu", "attention_window_vision.cu"
KERNELS, ROWS = "attention_window.cuh", "attention_rows.cuh"
HEADERS = (KERNELS, ROWS, "attention_window.h", "primitives.cuh")
#: Instances that are built here: the rest take most of nvcc's time.
QUICK = (80, 64)
LARGE = (64, 128)


def _copy(
    folder: Path,
    file: str,
    changes: list[tuple[str, str]],
    instance: tuple[int, int],
    source: str = SOURCE,
) -> Path:
    """A copy of csrc with one instance, (head_dim, keys), and changes in one file.

    Returns the path of its `source`.
    """
    cuda = folder / "csrc" / "cuda"
    cuda.mkdir(parents=True)
    (cuda.parent / "params.h").write_text((CSRC / "params.h").read_text())
    for name in (source, *HEADERS):
        code = (CSRC / "cuda" / name).read_text()
        if name == KERNELS:
            code = keep_instances(code, [instance])
        for text, replacement in changes if name == file else []:
            assert code.count(text) == 1, f"{text!r} is {code.count(text)} times in {name}"
            code = code.replace(text, replacement)
        (cuda / name).write_text(code)
    return cuda / source


@pytest.fixture(scope="session")
def window_build(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("window")
    return build_kernels(_copy(folder, SOURCE, [], QUICK), folder / "build", ["80"])


@pytest.fixture(scope="session")
def vision_build(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("vision")
    return build_kernels(_copy(folder, VISION, [], QUICK, VISION), folder / "build", ["80"])


@pytest.fixture
def window(window_build: Build, fake_runtime: Path) -> WindowKernels:
    return WindowKernels(window_build, fake_runtime, "80")


@pytest.fixture
def vision(vision_build: Build, fake_runtime: Path) -> WindowKernels:
    return WindowKernels(vision_build, fake_runtime, "80", "vision_window")


@pytest.mark.parametrize("name", vision_cases.small_suite())
def test_vision_accuracy(name: str, vision: WindowKernels, rng: np.random.Generator) -> None:
    vision_cases.small_suite()[name](vision, rng)


def test_a_bad_order_is_trapped(vision: WindowKernels, rng: np.random.Generator) -> None:
    case = VisionCase(rng, [3, 4], 1, 80)
    case.order[5] = -1
    with pytest.raises(SimError, match=r"window_order.5. is -1, but there are 7 rows"):
        check_vision(vision, case)


@pytest.mark.parametrize("name", small_suite())
def test_accuracy(name: str, window: WindowKernels, rng: np.random.Generator) -> None:
    small_suite()[name](window, rng)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_attention_of_nothing(
    lengths: list[int], window: WindowKernels, vision: WindowKernels, rng: np.random.Generator
) -> None:
    check_window(window, Case(rng, lengths, 2, 1, 80, max_length=0))
    check_vision(vision, VisionCase(rng, lengths, 1, 80, max_length=0))


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
    ("keys beyond the window", KERNELS, "key < length && (!p.causal || key <= row",
     "(!p.causal || key <= row"),
    ("causal off by one", KERNELS, "key <= row + e / 2 * 8)", "key < row + e / 2 * 8)"),
    ("rows read past the window", KERNELS,
     "from + rows.of(inside ? row : 0) * x.token_stride + unit * 8, inside);",
     "from + row * x.token_stride + unit * 8, true);"),
    ("values not waited for", KERNELS, "ptx::wait_copies<0>();\n  __syncthreads();\n  float out",
     "__syncthreads();\n  float out"),
    ("no barrier before values", KERNELS,
     "ptx::wait_copies<0>();\n  __syncthreads();\n  float out",
     "ptx::wait_copies<0>();\n  float out"),
    ("no barrier before keys", KERNELS, "ptx::wait_copies<1>();\n  }\n  __syncthreads();",
     "ptx::wait_copies<1>();\n  }"),
    ("maximum over half a row", KERNELS, "top[r] = fmaxf(top[r], ptx::exchange(top[r], 2));", ""),
    ("sum over half a row", KERNELS, "sum[r] += ptx::exchange(sum[r], 1);", ""),
    ("sign of the scale", KERNELS, "s[n][e] * scale.sign : -INFINITY", "s[n][e] : -INFINITY"),
    ("natural exponent", KERNELS, "* 1.44269504f, 1e-30f)", ", 1e-30f)"),
    ("operand halves swapped", KERNELS,
     "a[1] = Math::pack(c0[2], c0[3]);\n  a[2] = Math::pack(c1[0], c1[1]);",
     "a[2] = Math::pack(c0[2], c0[3]);\n  a[1] = Math::pack(c1[0], c1[1]);"),
    ("dS not awaited", KERNELS,
     "    __syncthreads();  // dS is whole; queries and douts are free\n", ""),
    ("next head too early", KERNELS,
     "    __syncthreads();  // before the next head's rows arrive\n", ""),
    ("delta left out", KERNELS, "(dp[n][e] - delta[query])", "(dp[n][e])"),
    ("delta of half a row", KERNELS, "return sum + ptx::exchange(sum, 1);", "return sum;"),
    ("key gradients unscaled", KERNELS,
     "const float factor[2] = {p.scale, p.scale}, one[2]",
     "const float factor[2] = {1.f, 1.f}, one[2]"),
    ("keys beyond the window, backward", KERNELS, "mine < length && (!p.causal || mine <= query)",
     "(!p.causal || mine <= query)"),
    ("causal transposed, backward", KERNELS, "mine <= query);", "mine >= query);"),
    ("wrong key head", KERNELS, "const int64_t kv_head = head / (p.heads / p.kv_heads);",
     "const int64_t kv_head = head % p.kv_heads;"),
    ("store past the window", KERNELS, "const bool inside = r < length;\n    ptx::store(",
     "const bool inside = r <= length;\n    ptx::store("),
    ("second part of dq at the first's place", KERNELS,
     "+ column * 2 + unit * 16)", "+ unit * 16)"),
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


#: Two: tests/emulation has 14 more, which cost less there.
VISION_MUTANTS = [
    ("next row's angles, backward", KERNELS, "turn.template load<kDim>(table, token,",
     "turn.template load<kDim>(table, token ^ 1,"),
    ("half of the pairs", KERNELS, "index >= kKeys * kPairs", "index >= kKeys * kPairs / 2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "text", "new"), [pytest.param(*m[1:], id=m[0]) for m in VISION_MUTANTS]
)
def test_vision_mutant_is_killed(
    file: str,
    text: str,
    new: str,
    vision: WindowKernels,
    vision_build: Build,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    source = _copy(tmp_path, file, [(text, new)], QUICK, VISION)
    vision.module = parse_ptx(kernel_ptx(source, vision_build, "80"))
    killed = None
    for name, check in vision_cases.small_suite().items():
        try:
            check(vision, rng)
        except (SimError, AssertionError) as error:
            killed = f"{name}: {str(error).splitlines()[0][:150]}"
            break
    print(killed)
    assert killed, "the mutant passes every check"
