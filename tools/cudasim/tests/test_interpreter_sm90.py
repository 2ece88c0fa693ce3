"""Hopper's instructions: a pipeline in hand-written PTX that is right, and its planted errors."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ..floats import from_float, to_float
from ..ptx import access, arithmetic, hopper, matrix  # noqa: F401  they register the instructions
from ..ptx.device import Device
from ..ptx.machine import Block, launch
from ..ptx.memory import GlobalMemory
from ..ptx.parser import parse_ptx
from ..ptx.products import matrix_addresses
from ..ptx.ptxtypes import Array, SimError
from ..ptx.toolchain import build_kernels
from .conformance import (
    COLUMN_PRODUCTS,
    ROW_PRODUCTS,
    Simulator,
    check_box,
    check_column_product,
    check_row_product,
)

# Four tiles of 64 rows of 64 bf16, through two buffers: warp 4 copies, warps 0 to 3 add up the
# products of each tile [64, 64] with the first 8 rows of itself. %r20 and %r21: barriers of a full
# and of an empty buffer; %r30: the buffer.
TILES, ROWS, DEPTH = 4, 64, 64
BYTES = ROWS * DEPTH * 2
PIPELINE = f"""
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .align 64 .b8 map[128], .param .u64 out)
.maxntid 256, 1, 1
.minnctapersm 2
{{
  .reg .pred %p<8>;
  .reg .b16 %h<8>;
  .reg .b32 %r<64>;
  .reg .f32 %f<8>;
  .reg .b64 %rd<16>;
  .shared .align 1024 .b8 tile[{2 * BYTES + 64}];
  mov.b64 %rd1, map;
  cvta.param.u64 %rd1, %rd1;
  ld.param.u64 %rd2, [out];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, tile;
  add.s32 %r3, %r2, {2 * BYTES};            // full[2], empty[2]
  setp.ne.s32 %p1, %r1, 0;
  @%p1 bra $made;
  mov.u32 %r4, 1;
  mov.u32 %r5, 4;
  mbarrier.init.shared::cta.b64 [%r3], %r4;
  mbarrier.init.shared::cta.b64 [%r3+8], %r4;
  mbarrier.init.shared::cta.b64 [%r3+16], %r5;
  mbarrier.init.shared::cta.b64 [%r3+24], %r5;
  fence.mbarrier_init.release.cluster;
$made:
  bar.sync 0;
  mov.f32 %f1, 0f00000000;
  mov.f32 %f2, 0f00000000;
  mov.f32 %f3, 0f00000000;
  mov.f32 %f4, 0f00000000;
  mov.u32 %r10, 0;
  setp.lt.u32 %p1, %r1, 128;
  @%p1 bra $consume;

  setmaxnreg.dec.sync.aligned.u32 40;
  setp.ne.s32 %p1, %r1, 128;
  @%p1 bra $end;
$produce:
  and.b32 %r11, %r10, 1;
  shr.u32 %r12, %r10, 1;
  and.b32 %r12, %r12, 1;
  xor.b32 %r13, %r12, 1;
  mad.lo.s32 %r20, %r11, 8, %r3;
  add.s32 %r21, %r20, 16;
  mad.lo.s32 %r30, %r11, {BYTES}, %r2;
$freed:
  mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r21], %r13;
  @!%p2 bra $freed;
  mov.u32 %r14, {BYTES};
  mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r20], %r14;
  mov.u32 %r15, 0;
  mul.lo.s32 %r16, %r10, {ROWS};
  cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r30], [%rd1, {{%r15, %r15, %r16}}], [%r20];
  add.s32 %r10, %r10, 1;
  setp.lt.u32 %p3, %r10, {TILES};
  @%p3 bra $produce;
  bra.uni $end;

$consume:
  setmaxnreg.inc.sync.aligned.u32 216;
$next:
  and.b32 %r11, %r10, 1;
  shr.u32 %r12, %r10, 1;
  and.b32 %r12, %r12, 1;
  mad.lo.s32 %r20, %r11, 8, %r3;
  add.s32 %r21, %r20, 16;
  mad.lo.s32 %r30, %r11, {BYTES}, %r2;
$filled:
  mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r20], %r12;
  @!%p2 bra $filled;
  shr.u32 %r31, %r30, 4;
  cvt.u64.u32 %rd3, %r31;
  or.b64 %rd3, %rd3, {1 << 62 | 1024 >> 4 << 32};
  setp.eq.u32 %p4, %r1, %r1;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {{%f1, %f2, %f3, %f4}}, %rd3, %rd3, %p4, 1, 1, 0, 0;
  add.s64 %rd4, %rd3, 2;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {{%f1, %f2, %f3, %f4}}, %rd4, %rd4, %p4, 1, 1, 0, 0;
  add.s64 %rd5, %rd3, 4;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {{%f1, %f2, %f3, %f4}}, %rd5, %rd5, %p4, 1, 1, 0, 0;
  add.s64 %rd6, %rd3, 6;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {{%f1, %f2, %f3, %f4}}, %rd6, %rd6, %p4, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  and.b32 %r32, %r1, 31;
  setp.eq.u32 %p5, %r32, 0;
  @%p5 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r21];
  add.s32 %r10, %r10, 1;
  setp.lt.u32 %p3, %r10, {TILES};
  @%p3 bra $next;
  mul.wide.u32 %rd7, %r1, 16;
  add.s64 %rd8, %rd2, %rd7;
  st.global.v4.f32 [%rd8], {{%f1, %f2, %f3, %f4}};
$end:
  ret;
}}
"""


def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], code: int
) -> bytes:
    """As fakecudart.c writes it, of 16-bit elements."""

    def five(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return (*numbers, 0, 0, 0, 0, 0)[:5]

    fields = (0x70616D726F736E65, address, 2, len(sizes), *five(sizes), *five(strides), *five(box))
    return struct.pack("<QQII5Q5Q5II", *fields, code)


def run(source: str, rng: np.random.Generator, box: tuple[int, int, int] = (64, 1, 64)) -> Array:
    """Runs the pipeline; returns c, float64, less its exact value."""
    kernel = parse_ptx(source).kernels["kernel"]
    memory = GlobalMemory(1 << 18)
    rows = from_float(rng.standard_normal((TILES * ROWS, DEPTH)), "bfloat16")
    address = memory.upload("rows", rows)
    out = memory.reserve("out", (128, 4), np.float32)
    span = {128: 3, 64: 2, 32: 1}[box[0] * 2]
    sizes, strides = (DEPTH, 1, TILES * ROWS), (DEPTH * 2, DEPTH * 2)
    parameters = tensor_map(address, sizes, strides, box, span) + struct.pack("<Q", out)
    launch(kernel, memory, {}, parameters, (1, 1, 1), (256, 1, 1), [])
    tiles = to_float(rows, "bfloat16").astype(np.float64).reshape(TILES, ROWS, DEPTH)
    exact = np.einsum("tik,tjk->ij", tiles, tiles[:, :8])
    got = np.empty((64, 8))
    lane, found = np.arange(128), memory.array("out")
    for i in range(4):
        row = lane // 32 * 16 + lane % 32 // 4 + i // 2 * 8
        got[row, lane % 4 * 2 + i % 2] = found[:, i]
    return got - exact


def test_pipeline(rng: np.random.Generator) -> None:
    """Whatever the order of warps and copies: 5 of them."""
    for _ in range(5):
        # 256 products in float32, summed in numpy's order.
        assert np.abs(run(PIPELINE, rng)).max() < 256 * 2**-24 * 64 * 4


MMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16\n    {%f1, %f2, %f3, %f4}, "
LAST = MMA + "%rd6, %rd6, %p4, 1, 1, 0, 0;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
COMMIT = "wgmma.commit_group.sync.aligned;"
ARRIVE = "@%p5 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r21];"
EXPECT = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r20], %r14;"
FILLED = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r20], %r12;\n  @!%p2 bra"
FREED = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r21], %r13;\n  @!%p2 bra"
FENCE = "wgmma.fence.sync.aligned;"
STORE = "mov.f32 %f5, 0f00000000;\n  st.shared.f32 [%r30], %f5;"
# One thread of the warpgroup writes to the tile before the products, and all meet.
WRITE = f"""and.b32 %r33, %r1, 127;
  setp.ne.u32 %p6, %r33, 0;
  @%p6 bra $written;
  {STORE}
  FENCE
$written:
  bar.sync 1, 128;
  {FENCE}"""

UNFENCED = "wgmma of shared byte 0, which thread 0 wrote without a fence.proxy.async"

ERRORS: dict[str, tuple[str, str, str]] = {
    # ---- copies and their barriers
    "the full buffer not waited for": (
        FILLED + " $filled;", "", "tensor copy to it is under way|never-written|did not wait"),
    "waited for the wrong phase": (
        "@!%p2 bra $filled", "xor.b32 %r12, %r12, 1;\n@!%p2 bra $filled",
        "under way|never-written|did not wait|deadlock"),
    "an answer no taken for yes": (
        "@!%p2 bra $filled;", "", "tensor copy to it is under way|never-written|did not wait"),
    "the empty buffer not waited for": (
        FREED + " $freed;", "", "which a wgmma reads|arrivals too many|did not wait"),
    "freed before the wait": (
        f"{WAIT}\n  and.b32 %r32, %r1, 31;\n  setp.eq.u32 %p5, %r32, 0;\n  {ARRIVE}",
        f"and.b32 %r32, %r1, 31;\n  setp.eq.u32 %p5, %r32, 0;\n  {ARRIVE}\n  {WAIT}",
        "which a wgmma reads"),
    "never freed": (ARRIVE, "", "deadlock: .*lacks 4 of 4 arrivals"),
    "freed by three warps": (
        ARRIVE, f"setp.eq.u32 %p5, %r1, 0;\n  {ARRIVE}", "deadlock: .*lacks 3 of 4 arrivals"),
    "freed by every lane": (
        ARRIVE, ARRIVE.replace("@%p5 ", ""), "32 arrivals too many: .*lacks 4 of 4"),
    "too many bytes announced": (
        f"mov.u32 %r14, {BYTES};", f"mov.u32 %r14, {BYTES + 16};",
        "deadlock: .*lacks 0 of 1 arrivals and 16 bytes"),
    "too few bytes announced": (
        f"mov.u32 %r14, {BYTES};", f"mov.u32 %r14, {BYTES - 16};",
        "deadlock: .*lacks 0 of 1 arrivals and -16 bytes"),
    "no bytes announced": (
        EXPECT, "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r20];",
        "arrives after the phase|under way|never-written"),
    "announced twice": (EXPECT, f"{EXPECT}\n{EXPECT}", "1 arrivals too many"),
    "more bytes than a barrier counts": (
        f"mov.u32 %r14, {BYTES};", f"mov.u32 %r14, {1 << 20};", "too many bytes, 1048576 more"),
    "no barrier there": ("add.s32 %r21, %r20, 16;\n  mad.lo.s32 %r30, %r11, 8192, %r2;\n$freed",
                         "add.s32 %r21, %r20, 32;\n  mad.lo.s32 %r30, %r11, 8192, %r2;\n$freed",
                         "is no initialised mbarrier"),
    "initialised twice": ("mbarrier.init.shared::cta.b64 [%r3+8]",
                          "mbarrier.init.shared::cta.b64 [%r3]", "is initialised twice"),
    "a misaligned barrier": ("mbarrier.init.shared::cta.b64 [%r3+8]",
                             "mbarrier.init.shared::cta.b64 [%r3+4]", "is misaligned"),
    "no arrivals": ("mov.u32 %r4, 1;", "mov.u32 %r4, 0;", "an mbarrier of 0 arrivals"),
    "barriers unknown to the other warps": ("bar.sync 0;", "", "race: warp . uses the mbarrier|"
                                            "is no initialised mbarrier"),
    "barriers unknown to the copies": (
        "fence.mbarrier_init.release.cluster;", "", "before a fence.mbarrier_init"),
    "the bytes of a barrier written": (
        EXPECT, f"st.shared.u32 [%r20], %r14;\n{EXPECT}", "belongs to an mbarrier"),
    "a copy nobody waits for": (
        "setp.lt.u32 %p3, %r10, 4;\n  @%p3 bra $next", "setp.lt.u32 %p3, %r10, 3;\n"
        "  @%p3 bra $next", "ended with 1 tensor copies under way, the first of 8192 bytes"),
    "a copy to a misaligned place": ("[%r30], [%rd1", "[%r30+64], [%rd1", "no multiple of 128"),
    "a copy past the shared memory": (
        "[%r30], [%rd1", "[%r30+8192], [%rd1",
        "belongs to an mbarrier|out of bounds|never-written"),
    "a map that is none": ("[%r30], [%rd1", "[%r30], [%rd2", "no __grid_constant__ parameter"),
    "a map that was not encoded": (
        "[%r30], [%rd1,", "[%r30], [%rd1+8,", "no __grid_constant__|no multiple of 64"),
    "too few coordinates": ("{%r15, %r15, %r16}", "{%r15, %r16}", "coordinates are missing"),
    # ---- products
    "accumulators read before the wait": (
        WAIT, f"mul.f32 %f5, %f1, %f1;\n  {WAIT}", "is the accumulator of a wgmma under way"),
    "accumulators written before the wait": (
        WAIT, f"mov.f32 %f1, %f5;\n  {WAIT}", "is the accumulator of a wgmma under way"),
    "one group too few waited for": (
        f"{WAIT}\n", "wgmma.wait_group.sync.aligned 1;\n  add.f32 %f5, %f1, %f2;\n",
        "is the accumulator of a wgmma under way"),
    "never waited for": (WAIT, "", "under way|which a wgmma reads"),
    "waited for before the commit": (
        f"{COMMIT}\n  {WAIT}", f"{WAIT}\n  {COMMIT}",
        "under way|which a wgmma reads"),
    "never committed": (f"{COMMIT}\n  {WAIT}", "",
                        "under way|which a wgmma reads"),
    "no fence": (FENCE, "", "a warpgroup's first wgmma without a wgmma.fence"),
    "a register written after the fence": (
        FENCE, f"{FENCE}\n  mul.f32 %f1, %f1, %f2;", "used since the last wgmma.fence"),
    "accumulators of two shapes": (
        LAST, "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4, %f5, %f6, "
        "%f7, %f0}, %rd6, %rd6, %p4, 1, 1, 0, 0;", "of two shapes under way share accumulators"),
    "a warp that leaves it out": (
        FENCE, f"setp.lt.u32 %p6, %r1, 32;\n  @%p6 bra $end;\n  {FENCE}",
        "has exited|warp divergence"),
    "half a warpgroup": (
        "setp.lt.u32 %p1, %r1, 128;", "setp.lt.u32 %p1, %r1, 192;", "has exited|warp divergence"),
    "two descriptors in a warpgroup": (
        "or.b64 %rd3,", "cvt.u64.u32 %rd9, %r1;\n  or.b64 %rd3, %rd3, %rd9;\n  or.b64 %rd3,",
        "a matrix descriptor differs"),
    "rows in the middle of a pattern": (
        "add.s64 %rd4, %rd3, 2;", "add.s64 %rd4, %rd3, 16;", "needs a base offset"),
    "a matrix past the shared memory": (
        "add.s64 %rd4, %rd3, 2;", "add.s64 %rd4, %rd3, 1024;",
        "out of bounds|mbarrier|never-|under way|did not wait"),
    "a plain write without a proxy fence": (
        FENCE, WRITE.replace("FENCE", ""), UNFENCED),
    "a proxy fence by another thread": (
        FENCE, WRITE.replace("FENCE", "").replace("bar.sync", "fence.proxy.async;\n  bar.sync")
        .replace("$written:\n  fence", "bra.uni $met;\n$written:\n  fence").replace(
            "bar.sync 1", "$met: bar.sync 1"), UNFENCED),
    "a copy over a plain write without a proxy fence": (
        WAIT, f"{WAIT}\n  setp.eq.u32 %p6, %r1, 0;\n  mov.f32 %f5, 0f00000000;\n"
        "  @%p6 st.shared.f32 [%r30], %f5;", "tensor copy of shared byte 0, .* wrote without"),
    "a plain write with no barrier": (
        FENCE, WRITE.replace("FENCE", "fence.proxy.async;").replace("bar.sync 1, 128;", ""),
        "race: shared wgmma read after another warp's write"),
    "a plain write while it is read": (
        WAIT, f"{STORE.replace('[%r30]', '[%r34]')}\n  {WAIT}".replace(
            "mov.f32 %f5", "mad.lo.s32 %r34, %r1, 4, %r30;\n  mov.f32 %f5"),
        "race: shared write .*which a wgmma reads"),
    # ---- registers and named barriers
    "registers that nobody gives": (
        "setmaxnreg.dec.sync.aligned.u32 40;", "", "deadlock: .*128 threads from 0 on wait for "
        "registers; warpgroups have 128, 128"),
    "too few given": ("aligned.u32 40;", "aligned.u32 48;", "deadlock: .*warpgroups have 128, 48"),
    "given where they are taken": ("setmaxnreg.dec", "setmaxnreg.inc", "inc to 40 of a warpgroup"),
    "registers of an unbounded kernel": (
        ".maxntid 256, 1, 1", "", "whose number of registers nothing bounds"),
    "an odd number of registers": ("aligned.u32 40;", "aligned.u32 44;", "multiples of 8"),
    "a barrier without its partners": (
        "$next:\n", "bar.sync 2, 256;\n$next:\n",
        "deadlock: .*128 of 256 threads are at barrier 2"),
    "a barrier for two counts": (
        "$next:\n", "setp.lt.u32 %p6, %r1, 64;\n  selp.u32 %r40, 64, 128, %p6;\n"
        "  mov.u32 %r41, 2;\n  bar.sync %r41, %r40;\n$next:\n", "barrier 2 is for .* at once"),
    "a barrier that is none": ("$next:\n", "bar.sync 16, 128;\n$next:\n", "there are 0 to 15"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of warps and copies: 3 of them."""
    monkeypatch.setattr(Block, "MAX_STEPS", 20_000)
    text, new, message = ERRORS[name]
    assert text in PIPELINE, f"{text!r} is not in the program"
    source = PIPELINE.replace(text, new, 1)
    for _ in range(3):
        with pytest.raises(SimError, match=message) as caught:
            run(source, rng)
        print(caught.value)


@pytest.mark.parametrize("span", [16, 32, 64, 128])
@pytest.mark.parametrize("depth_major", [True, False], ids=["depth", "rows"])
def test_matrix_layouts(depth_major: bool, span: int, rng: np.random.Generator) -> None:
    """The canonical layouts of CUTLASS's mma_traits_sm90_gmma.hpp, in units of 16 bytes:
    ((8,n),2):((w,SBO),1) with the depth contiguous, ((w,n),(8,k)):((1,LBO),(w,SBO)) without."""
    leading, stride = (int(n) for n in rng.integers(1, 1 << 10, 2))
    w = span // 16
    expected = []
    if depth_major:
        for row in range(64):
            for half in range(2):
                column = half * (leading if w == 1 else 1)
                expected.append(row % 8 * w + row // 8 * stride + column)
    else:
        mn, k = (stride, leading) if w == 1 else (leading, stride)
        for depth in range(16):
            for unit in range(8):
                expected.append(unit % w + unit // w * mn + depth % 8 * w + depth // 8 * k)
    start = 1 << 14
    code = {16: 0, 32: 3, 64: 2, 128: 1}[span]
    descriptor = start >> 4 | leading << 16 | stride << 32 | code << 62
    got = matrix_addresses(descriptor, 64, depth_major).ravel()
    at = start + 16 * np.array(expected)
    assert got.tolist() == (at ^ (at >> 7 & w - 1) << 4).tolist()


# ---- csrc/cuda/ptx/sm90.cuh as nvcc compiled it


@pytest.fixture(scope="module")
def simulator(
    fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Simulator]:
    source = Path(__file__).parent / "sm90_programs.cu"
    build = build_kernels(source, tmp_path_factory.mktemp("hopper") / "build", ["90a"])
    module = parse_ptx(build.ptx["90a"])
    return lambda: (Device(fake_runtime, module, 1 << 20), build.function)


@pytest.mark.parametrize("chunk", [64, 32, 16])
def test_boxes(chunk: int, simulator: Callable[[], Simulator], rng: np.random.Generator) -> None:
    for _ in range(6):
        check_box(simulator(), rng, chunk)


@pytest.mark.parametrize("case", ROW_PRODUCTS, ids=str)
def test_row_products(
    case: tuple[int, int, int, str],
    simulator: Callable[[], Simulator],
    rng: np.random.Generator,
) -> None:
    check_row_product(simulator(), rng, *case)


@pytest.mark.parametrize("case", COLUMN_PRODUCTS, ids=str)
def test_column_products(
    case: tuple[int, int, int, str],
    simulator: Callable[[], Simulator],
    rng: np.random.Generator,
) -> None:
    check_column_product(simulator(), rng, *case)
