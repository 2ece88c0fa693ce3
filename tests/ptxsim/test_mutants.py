"""Planted bugs: each changes one thing in the kernels or their launchers, and must be noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .embedding_cases import Kernels, Pack, check_forward, small_suite
from .parser import parse_ptx
from .ptxtypes import SimError
from .toolchain import CSRC, Build, build_kernels, kernel_ptx

# (what, file, text, its replacement). Kernels: only the PTX is built anew.
KERNEL_MUTANTS = [
    ("one row too many", "embedding", "rows - first;", "rows - first + 1;"),
    ("rows of a warp overlap", "embedding", "kWarpSize) * kRowsPerWarp;", "kWarpSize) * 3;"),
    ("load past the row", "embedding", "nullptr && c < units);", "nullptr && c <= units);"),
    ("store past the row", "embedding", "k, c, c < units);", "k, c, c <= units);"),
    ("last units missing", "embedding", "k, c, c < units);", "k, c, c < units - 1);"),
    ("null source is read", "embedding", "from != nullptr && ", ""),
    ("batch stride", "embedding", "base += ptx::kWarpSize * kUnroll", "base += 33 * kUnroll"),
    ("one row for all", "embedding", "broadcast(mine, k)", "broadcast(mine, 0)"),
    ("next visual row", "embedding", "+ index * visual_bytes;", "+ (index + 1) * visual_bytes;"),
    (
        "32-bit offset",
        "embedding",
        "+ index * visual_bytes;",
        "+ index * static_cast<int>(visual_bytes);",
    ),
    ("range start ignored", "embedding", " - static_cast<uint64_t>(p.vocab_start)", ""),
    ("range end off by one", "embedding", "row >= static_cast", "row > static_cast"),
    ("row 0 taken for none", "embedding", "row < 0 ? nullptr", "row <= 0 ? nullptr"),
    ("position for row", "embedding", "static_cast<int>(i));", "static_cast<int>(position));"),
    ("sentinel not skipped", "embedding", "key >= p.vocab_rows ||", "key > p.vocab_rows ||"),
    ("all entries start runs", "embedding", "p.keys[j - 1] == key", "p.keys[j - 1] == key + 9"),
    ("run past the end", "embedding", "k + u < p.count && ", ""),
    ("runs not told apart", "embedding", " && p.keys[k + u] == key", ""),
    ("same row again", "embedding", "p.order[k + u] : 0", "p.order[k] : 0"),
    ("first tile only", "embedding", "blockIdx.y) * kThreads", "blockIdx.y) * 0"),
    ("low half twice", "embedding", "(words[w] >> 16)", "(words[w])"),
    ("bf16 widened wrong", "primitives", "(bits) << 16", "(bits) << 15"),
    (
        "two words of four",
        "primitives",
        "global.v4.b32 [%0], {%1, %2, %3, %4}",
        "global.v2.b32 [%0], {%1, %2}",
    ),
    ("table's type for visual rows", "embedding", "? p.visual_dtype : p", "? p.table_dtype : p"),
    (
        "first row's type for all",
        "embedding",
        "static_cast<int>(types), k)",
        "static_cast<int>(types), 0)",
    ),
    (
        "every fourth element",
        "embedding",
        "v.load(from, type, c * kCount, on)",
        "v.load(from, type, c, on)",
    ),
    (
        "high half lost",
        "embedding",
        "static_cast<uint16_t>(w.x >> 16)",
        "static_cast<uint16_t>(w.x)",
    ),
    (
        "bf16 read as fp16",
        "embedding",
        "type == DType::kBFloat16 ? ptx::from_bf16(bits[e])",
        "type != DType::kBFloat16 ? ptx::from_bf16(bits[e])",
    ),
    (
        "rounded to the other half type",
        "embedding",
        "kBFloat16 ? ptx::to_bf16",
        "kFloat16 ? ptx::to_bf16",
    ),
    (
        "what was there is lost",
        "embedding",
        "p.accumulate ? v.v[i] + sum[e + i] :",
        "p.accumulate ? sum[e + i] :",
    ),
    (
        "first four sums twice",
        "embedding",
        "= p.accumulate ? v.v[i] + sum[e + i]",
        "= p.accumulate ? v.v[i] + sum[i]",
    ),
    (
        "eight bytes as four",
        "primitives",
        "@p st.global.v2.b32 [%0], {%1, %2}",
        "@p st.global.b32 [%0], %1",
    ),
    (
        "rows of its own are written",
        "embedding",
        "return from == reinterpret",
        "return from != reinterpret",
    ),
    ("unguarded store", "primitives", '"@p st.global.v4', '"st.global.v4'),
    (
        "shard ignored",
        "embedding",
        "position = p.first + i;\n    const int32_t",
        "position = i;\n    const int32_t",
    ),
]
# Launchers: the host code is built too.
HOST_MUTANTS = [
    ("last block missing", "(work + per_block - 1) / per_block", "work / per_block"),
    ("16 bytes where 4 are aligned", "bits % 16 == 0 ? 16", "bits % 4 == 0 ? 16"),
    ("converted as if in one type", "p.visual_dtype == p.out_dtype) {", "true) {"),
    ("wide where rows are not", "access_bytes(p.hidden * 4, p.table", "access_bytes(0, p.table"),
    ("one tile of columns", "blocks(p.hidden / Vec::kCount, kThreads)", "1"),
    ("fp16 taken for bf16", "p.grad_dtype == DType::kBFloat16", "p.grad_dtype != DType::kFloat32"),
]


def _mutate(folder: Path, file: str, text: str, replacement: str) -> Path:
    """A copy of csrc with one change; the path of its embedding.cu."""
    cuda = folder / "csrc" / "cuda"
    cuda.mkdir(parents=True)
    (cuda.parent / "params.h").write_text((CSRC / "params.h").read_text())
    names = {"embedding": "embedding.cu", "primitives": "primitives.cuh"}
    for name in ("embedding.cu", "embedding.h", "primitives.cuh"):
        code = (CSRC / "cuda" / name).read_text()
        if name == names[file]:
            assert code.count(text) == 1, f"{text!r} is {code.count(text)} times in {name}"
            code = code.replace(text, replacement)
        (cuda / name).write_text(code)
    return cuda / "embedding.cu"


def _killed_by(kernels: Kernels, rng: np.random.Generator) -> str | None:
    """The first check of the suite that fails, and how; None where all pass."""
    for name, check in small_suite().items():
        try:
            check(kernels, rng)
        except (SimError, AssertionError) as error:
            return f"{name}: {str(error).splitlines()[0][:150]}"
    return None


@pytest.mark.parametrize(
    ("file", "text", "new"), [pytest.param(*m[1:], id=m[0]) for m in KERNEL_MUTANTS]
)
def test_kernel_mutant_is_killed(
    file: str,
    text: str,
    new: str,
    embedding_build: Build,
    fake_runtime: Path,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    source = _mutate(tmp_path, file, text, new)
    kernels = Kernels(embedding_build, fake_runtime, "80")
    kernels.module = parse_ptx(kernel_ptx(source, embedding_build, "80"))
    killed = _killed_by(kernels, rng)
    print(killed)
    assert killed, "the mutant passes every check"


@pytest.mark.parametrize(("text", "new"), [pytest.param(*m[1:], id=m[0]) for m in HOST_MUTANTS])
def test_launcher_mutant_is_killed(
    text: str, new: str, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    source = _mutate(tmp_path, "embedding", text, new)
    build = build_kernels(source, tmp_path / "build", ["80"])
    killed = _killed_by(Kernels(build, fake_runtime, "80"), rng)
    print(killed)
    assert killed, "the mutant passes every check"


def test_missing_bounds_check_is_seen(
    embedding_build: Build, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Without the kernel's own check, the interpreter reports the read out of bounds."""
    source = _mutate(tmp_path, "embedding", "if (index >= p.visual_rows) {\n        printf",
                     "if (false) {\n        printf")  # fmt: skip
    kernels = Kernels(embedding_build, fake_runtime, "80")
    kernels.module = parse_ptx(kernel_ptx(source, embedding_build, "80"))
    pack = Pack(rng, 10, 16, "float32", share=1.0)
    pack.index[4] = pack.visual_rows
    with pytest.raises(SimError, match="out of bounds: byte .* of 'visual'"):
        check_forward(kernels, pack)


def test_unchanged_source_survives(
    embedding_build: Build, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The quick way of building changes nothing by itself."""
    source = _mutate(tmp_path, "embedding", "kUnroll = 4;", "kUnroll = 4 ;")
    kernels = Kernels(embedding_build, fake_runtime, "80")
    kernels.module = parse_ptx(kernel_ptx(source, embedding_build, "80"))
    assert _killed_by(kernels, rng) is None
