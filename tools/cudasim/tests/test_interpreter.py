"""The interpreter itself: hand-written PTX that does each forbidden thing, and some that does not.

A checker that never fires would make every other test here pass.
"""

from __future__ import annotations

import numpy as np
import pytest

from ..ptx import access, arithmetic, hopper, matrix  # noqa: F401  they register the instructions
from ..ptx.machine import Block, launch
from ..ptx.memory import GlobalMemory
from ..ptx.parser import parse_ptx
from ..ptx.ptxtypes import Array, SimError, bf16_to_f32, f32_to_bf16

HEAD = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 in, .param .u64 out, .param .u32 n)
{
  .reg .pred %p<4>;
  .reg .b16 %h<8>;
  .reg .b32 %r<16>;
  .reg .f32 %f<8>;
  .reg .b64 %rd<16>;
  ld.param.u64 %rd1, [in];
  ld.param.u64 %rd2, [out];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %ntid.x;
  mad.lo.s32 %r5, %r3, %r4, %r2;   // number of the thread
  mul.wide.u32 %rd3, %r5, 4;
  add.s64 %rd4, %rd1, %rd3;        // &in[thread]
  add.s64 %rd5, %rd2, %rd3;        // &out[thread]
"""


def run(
    body: str, values: Array, outputs: int, *, blocks: int = 1, threads: int = 32, n: int = 0
) -> Array:
    """Runs `body` after HEAD on `blocks` x `threads`; returns out, uint32 [outputs]."""
    kernel = parse_ptx(HEAD + body + "\nret;\n}\n").kernels["kernel"]
    memory = GlobalMemory(1 << 16)
    place = memory.upload("in", values)
    out = memory.reserve("out", (outputs,), np.uint32)
    parameters = np.array([place, out, n], np.uint64).tobytes()[:20]
    launch(kernel, memory, {}, parameters, (blocks, 1, 1), (threads, 1, 1), [])
    return memory.array("out")


def test_divergent_loop_meets_again(rng: np.random.Generator) -> None:
    """Thread t adds up 1..in[t]: every thread leaves the loop at another time."""
    values = rng.integers(0, 20, 64).astype(np.uint32)
    body = """
      ld.global.u32 %r6, [%rd4];
      mov.u32 %r7, 0;
    $top:
      setp.eq.s32 %p1, %r6, 0;
      @%p1 bra $done;
      add.s32 %r7, %r7, %r6;
      add.s32 %r6, %r6, -1;
      bra.uni $top;
    $done:
      shfl.sync.idx.b32 %r8|%p2, %r7, 0, 31, -1;
      add.s32 %r7, %r7, %r8;
      st.global.u32 [%rd5], %r7;
    """
    sums = values * (values + 1) // 2
    want = sums + np.repeat(sums[::32], 32)  # each warp adds its first lane's sum
    assert run(body, values, 64, blocks=1, threads=64).tolist() == want.tolist()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r6, [%rd4+4];", "read of 4 bytes out of bounds: byte 128 of 'in'"),
        ("st.global.u32 [%rd5+4], %r5;", "write of 4 bytes out of bounds: byte 128 of 'out'"),
        ("ld.global.u32 %r6, [%rd4+-4];", "out of bounds: byte -4 of 'in'"),
        ("ld.global.u32 %r6, [%rd1+2];", "misaligned"),
        ("ld.global.v2.u32 {%r6, %r7}, [%rd1+4];", "misaligned"),
        ("ld.global.u32 %r6, [%rd5];", "read of never-written bytes of byte 0 of 'out'"),
        ("st.global.u32 [%rd2], %r5;", "race: two threads write the same address"),
        (
            "st.global.u32 [%rd5], %r5; ld.global.nc.u32 %r6, [%rd5];",
            "nc of bytes that this launch writes",
        ),
        ("setp.lt.u32 %p1, %r2, 5; @%p1 bra $a; bra.uni $b; $a: shfl.sync.idx.b32 "
         "%r6|%p2, %r5, 0, 31, -1; ret; $b: shfl.sync.idx.b32 %r6|%p2, %r5, 1, 31, -1;",
         "warp divergence"),
        ("setp.lt.u32 %p1, %r2, 5; @%p1 ret; shfl.sync.idx.b32 %r6|%p2, %r5, 0, 31, -1;",
         "has exited"),
        ("$top: bra.uni $top;", "endless loop"),
        ("trap;", "trap"),
        ("cos.approx.f32 %f1, %f2;", "not interpreted: cos.approx.f32"),
        ("add.sat.s32 %r6, %r5, %r5;", r"modifier .sat is not interpreted"),
        ("mov.u32 %r99x, 0;", "not declared"),
    ],
)  # fmt: skip
def test_forbidden(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "MAX_STEPS", 1000)
    with pytest.raises(SimError, match=message):
        run(body, np.zeros(32, np.uint32), 32)


def test_race_between_blocks() -> None:
    """Blocks are not ordered: what one writes no other may touch, but atomics may meet."""
    zeros = np.zeros(64, np.uint32)
    with pytest.raises(SimError, match="another block of this launch writes"):
        run("setp.eq.s32 %p1, %r2, 0; @%p1 st.global.u32 [%rd2], %r3;", zeros, 1, blocks=2)
    body = "atom.global.add.u32 %r6, [%rd1], 1; st.global.u32 [%rd5], %r6;"
    assert sorted(run(body, zeros, 64, blocks=2)) == list(range(64))


def test_unwritten_output_is_an_error() -> None:
    with pytest.raises(SimError, match="4 of 132 bytes of 'out' were never written.*element 32"):
        run("st.global.u32 [%rd5], %r5;", np.zeros(32, np.uint32), 33)


def test_integers_wrap_and_extend() -> None:
    """Sign and zero extension, 64-bit products, shifts beyond the width."""
    values = np.array([0xFFFFFFFF, 0x80000000, 7, 1 << 20], np.uint32)
    body = """
      ld.global.u32 %r6, [%rd4];
      cvt.s64.s32 %rd6, %r6;
      shr.s64 %rd7, %rd6, 63;
      cvt.u32.u64 %r7, %rd7;          // all ones where negative
      mul.wide.u32 %rd8, %r6, %r6;
      shr.u64 %rd9, %rd8, 32;
      cvt.u32.u64 %r8, %rd9;          // high half of the square
      xor.b32 %r9, %r7, %r8;
      shl.b32 %r10, %r6, 40;          // zero
      or.b32 %r9, %r9, %r10;
      st.global.u32 [%rd5], %r9;
    """
    want = []
    for value in values.tolist():
        sign = 0xFFFFFFFF if value >> 31 else 0
        want.append(sign ^ (value * value >> 32))
    assert run(body, values, 4, threads=4).tolist() == want


def test_bf16_rounds_to_nearest_even() -> None:
    """Every kind of float32 against the definition: the nearest of the two neighbours."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001], np.uint32)
    got = f32_to_bf16(bits.view(np.float32))
    assert [hex(x) for x in got] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0x0"]
    every = np.arange(1 << 16, dtype=np.uint16)
    numbers = every[~np.isnan(bf16_to_f32(every))]
    assert (f32_to_bf16(bf16_to_f32(numbers)) == numbers).all()
    assert f32_to_bf16(np.array([np.nan], np.float32))[0] == 0x7FFF


SHARED = """
  .shared .align 16 .b8 tile[512];
  mov.u32 %r6, tile;
  mad.lo.s32 %r7, %r2, 4, %r6;     // &tile[thread]
  xor.b32 %r8, %r2, 32;
  mad.lo.s32 %r8, %r8, 4, %r6;     // that of the same lane of the other warp
"""


def test_shared_memory_and_barrier() -> None:
    """Two warps exchange their numbers."""
    body = (
        SHARED
        + """
      st.shared.u32 [%r7], %r2;
      bar.sync 0;
      ld.shared.u32 %r9, [%r8];
      st.global.u32 [%rd5], %r9;
    """
    )
    got = run(body, np.zeros(64, np.uint32), 64, threads=64)
    assert got.tolist() == [t ^ 32 for t in range(64)]


def test_shared_atomics_of_several_warps() -> None:
    """Every thread takes a number of its own."""
    body = (
        SHARED
        + """
      mov.u32 %r9, 0;
      st.shared.u32 [%r7], %r9;
      bar.sync 0;
      atom.shared.add.u32 %r10, [%r6], 3;
      st.global.u32 [%rd5], %r10;
    """
    )
    got = run(body, np.zeros(64, np.uint32), 64, threads=64)
    assert sorted(got.tolist()) == [3 * t for t in range(64)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("atom.shared.add.u32 %r9, [%r7], 1;", "atomic on shared bytes that are not written"),
        ("st.shared.u32 [%r7], %r2; atom.shared.add.u32 %r9, [%r8], 1;",
         "race: shared atomic after another warp's write"),
        ("st.shared.u32 [%r7], %r2; bar.sync 0; ld.shared.u32 %r9, [%r7]; "
         "atom.shared.add.u32 %r9, [%r8], 1;", "race: shared atomic after another warp's read"),
        ("st.shared.u32 [%r7], %r2; bar.sync 0; atom.shared.add.u32 %r9, [%r8], 1; "
         "ld.shared.u32 %r9, [%r7];", "race: shared read after another warp's write"),
        ("atom.shared.cas.b32 %r9, [%r7], 0, 1;", "is not interpreted"),
        ("st.shared.u32 [%r7], %r2; ld.shared.u32 %r9, [%r8];",
         "race: shared read after another warp's write"),
        ("st.shared.u32 [%r7], %r2; bar.sync 0; ld.shared.u32 %r9, [%r8]; "
         "st.shared.u32 [%r7], %r2;", "race: shared write after another warp's read"),
        ("st.shared.u32 [%r7], %r2; st.shared.u32 [%r8], %r2;",
         "race: shared write after another warp's write"),
        ("ld.shared.u32 %r9, [%r7];", "read of never-written shared memory at byte 0"),
        ("st.shared.u32 [%r7+508], %r2;", "out of bounds of 512"),
        ("st.shared.u32 [%r7+2], %r2;", "misaligned shared write"),
        ("setp.lt.u32 %p1, %r2, 5; @%p1 bar.sync 0;", "exited|divergence|a part of a warp"),
        ("setp.lt.u32 %p1, %r2, 32; @%p1 bra $a; bar.sync 0; bra.uni $b; $a: bar.sync 0; $b: ret;",
         "different barriers"),
        ("cp.async.ca.shared.global [%r7], [%rd4], 4; ld.shared.u32 %r9, [%r7];",
         "asynchronous copy was not waited for"),
        ("cp.async.ca.shared.global [%r7], [%rd4], 4; cp.async.commit_group; "
         "cp.async.wait_group 1; ld.shared.u32 %r9, [%r7];", "was not waited for"),
        ("cp.async.ca.shared.global [%r7], [%rd4], 4; cp.async.commit_group; "
         "cp.async.wait_group 0; ld.shared.u32 %r9, [%r8];", "race: shared read after another"),
        ("cp.async.ca.shared.global [%r7], [%rd4], 4;", "copies that nobody waited for"),
    ],
)  # fmt: skip
def test_forbidden_in_shared_memory(body: str, message: str) -> None:
    with pytest.raises(SimError, match=message):
        run(SHARED + body, np.zeros(64, np.uint32), 64, threads=64)


@pytest.mark.parametrize("depth", [16, 8])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_is_a_matrix_product(kind: str, depth: int, rng: np.random.Generator) -> None:
    """Fragments as in the manual: registers hold rows g and g + 8, columns 2 t and 2 t + 8; of
    depth 8 the first half of them."""
    a, b = rng.integers(-8, 8, (16, 16)), rng.integers(-8, 8, (16, 8))

    def bits(x: int) -> int:
        f = np.array([x], np.float32)
        halves = f32_to_bf16(f) if kind == "bf16" else f.astype(np.float16).view(np.uint16)
        return int(halves[0])

    words = np.zeros((6, 32), np.uint32)
    for lane in range(32):
        g, t = lane // 4, lane % 4 * 2
        places = [(g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8)]
        for i, (r, c) in enumerate(places):
            words[i, lane] = bits(a[r, c]) | bits(a[r, c + 1]) << 16
        for i, r in enumerate((t, t + 8)):
            words[4 + i, lane] = bits(b[r, g]) | bits(b[r + 1, g]) << 16
    loads = "".join(f"ld.global.u32 %r{6 + i}, [%rd4+{128 * i}];" for i in range(6))
    zeros = "".join(f"mov.f32 %f{1 + i}, 0f3F800000;" for i in range(4))
    left, right = "%r6, %r7, %r8, %r9", "%r10, %r11"
    if depth == 8:
        left, right, a, b = "%r6, %r7", "%r10", a[:, :8], b[:8]
    body = f"""
      {loads} {zeros}
      mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32
        {{%f1, %f2, %f3, %f4}}, {{{left}}}, {{{right}}}, {{%f1, %f2, %f3, %f4}};
      mul.wide.u32 %rd6, %r2, 16;
      add.s64 %rd7, %rd2, %rd6;
      st.global.v4.f32 [%rd7], {{%f1, %f2, %f3, %f4}};
    """
    got = run(body, words.ravel(), 128).view(np.float32).reshape(32, 4)
    want = a @ b + 1
    for lane in range(32):
        g, t = lane // 4, lane % 4 * 2
        places = [(g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1)]
        assert got[lane].tolist() == [want[p] for p in places]
