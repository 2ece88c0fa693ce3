"""add_visual_ against torch's index_add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.numeric import assert_bitwise, isa, poisoned
from tests.kernels.test_embedding import DTYPES, IMAGE, ISAS, make
from vlmkernels import add_visual_, visual_index
from vlmkernels.embedding.add import add_visual_reference


def summed(hidden: Tensor, visual: Tensor, index: Tensor) -> Tensor:
    """Position by position, in float64 and rounded once."""
    out = hidden.double()
    for position, row in enumerate(index.tolist()):
        if row >= 0:
            out[position] += visual[row].double()
    return out.to(hidden.dtype)


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("hidden", [1, 7, 100, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_sums(dtype: torch.dtype, hidden: int, name: str) -> None:
    """Each part of the sequence holds its own, once; rows of text keep their bits."""
    _, _, visual, index = make(48, hidden, dtype)
    before = torch.randn(48, hidden).to(dtype)
    want = summed(before, visual, index)
    assert_bitwise("reference", add_visual_reference(before, visual, index), want)
    for size in (1, 3):
        for rank in range(size):
            part = slice(48 // size * rank, 48 // size * (rank + 1))
            got = before[part].clone()
            with isa(name):
                out = add_visual_(got, visual, index, shard=(rank, size))
            assert out is got
            assert_bitwise("sum", got, want[part])


@pytest.mark.parametrize("shape", [(24, 33), (24, 1, 33), (2, 12, 33)])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_gradients(dtype: torch.dtype, share: float, shape: tuple[int, ...]) -> None:
    """Autograd's own of index_add, of the whole and of a part; hidden's is not copied."""
    _, _, visual, index = make(48, 33, dtype, share)
    visual.requires_grad_()
    for shard, wanted in (((1, 2), index[24:]), (None, index[:24].clone())):
        if shard is None:
            index = wanted
        source = torch.randn(shape).to(dtype).requires_grad_()
        dout = torch.randn(shape).to(dtype)
        seen: list[int] = []
        hidden = source * 2
        hidden.register_hook(lambda grad, seen=seen: seen.append(grad.data_ptr()))
        kw: dict[str, Any] = {"shard": shard}
        with poisoned():
            got = add_visual_(hidden, visual, index, **kw, allow_unused=True)
            ours = torch.autograd.grad(got, (source, visual), dout)
        theirs = torch.autograd.grad(
            add_visual_reference(source * 2, visual, index, **kw), (source, visual), dout
        )
        assert_bitwise("dhidden", ours[0], theirs[0])
        assert_bitwise("dvisual", ours[1], theirs[1])
        gathered = torch.zeros(visual.shape, dtype=dtype)
        gathered[wanted[wanted >= 0].long()] = dout.view(-1, 33)[wanted >= 0]
        assert_bitwise("rows", ours[1], gathered)
        assert seen == [dout.data_ptr()]


def test_reference_gradients_in_float64() -> None:
    index = visual_index(torch.tensor([IMAGE, 0, IMAGE, 1]), IMAGE)
    inputs = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2)]
    assert torch.autograd.gradcheck(lambda h, v: add_visual_reference(h, v, index), inputs)


def test_frozen_and_repeated() -> None:
    """A row at two positions is added twice, and has no gradient; without one it costs nothing."""
    index, hidden = torch.tensor([0, -1, 0], dtype=torch.int32), torch.ones(3, 4)
    visual = torch.ones(1, 4)
    assert not add_visual_(hidden, visual, index).requires_grad
    assert hidden[:, 0].tolist() == [2, 1, 2]
    out = add_visual_(hidden, visual.requires_grad_(), index)
    with pytest.raises(ValueError, match="names row 0 at positions 0 and 2"):
        out.sum().backward()
    add_visual_(torch.ones(0, 4), visual[:0], index[:0])


def test_bad_input() -> None:
    _, _, visual, index = make(12, 8, torch.float32)
    hidden, n = torch.randn(12, 8), len(visual)
    before = hidden.clone()

    def refuse(message: str, *arguments: Any, **kw: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            add_visual_(*arguments, **kw)

    wrong = index.clone()
    place = int((index >= 0).nonzero()[-1])
    wrong[place] = n
    refuse(rf"visual_index\[{place}\] is {n}, but visual has {n} rows", hidden, visual, wrong)
    refuse("hidden has 12 rows, but .* 6 for each of 2 shards", hidden, visual, index, shard=(0, 2))
    refuse(r"hidden is float64 .* \[B, S / B, h\]", hidden.double(), visual, index)
    refuse("hidden is a list", [1], visual, index)
    refuse("visual is float16 .* must be float32", hidden, visual.half(), index)
    refuse("visual has rows of 7 elements; .* hidden's, 8", hidden, visual[:, :7], index)
    refuse("visual_index is int64", hidden, visual, index.long())
    refuse("hidden is not contiguous.*hidden.clone", torch.randn(8, 12).t(), visual, index)
    refuse("hidden is a leaf", hidden.clone().requires_grad_(), visual, index)
    refuse("visual lies in the memory of hidden", hidden, hidden[:n], index)
    more = torch.cat([visual, visual])
    refuse(rf"{2 * n} rows, but visual_index has {n} positions", hidden, more, index)
    assert_bitwise("untouched", hidden, before)
    x = torch.randn(12, 8, requires_grad=True).exp()  # keeps its output for its own backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        add_visual_(x, visual, index).sum().backward()


@pytest.mark.parametrize("rank", [0, 1])
def test_compiled_parts_of_a_sequence(rank: int) -> None:
    """Values and gradients as of eager code."""
    for positions in (12, 20):
        _, _, visual, index = make(positions, 8, torch.bfloat16)
        hidden, dout = torch.randn(2, positions // 2, 8).bfloat16()
        results: list[list[Tensor]] = []
        for compiled in (False, True):
            torch.compiler.reset()

            def add(h: Tensor, v: Tensor, i: Tensor) -> Tensor:
                return add_visual_(h * 2, v, i, shard=(rank, 2))

            call = torch.compile(add, fullgraph=True, backend="aot_eager") if compiled else add
            leaves = [hidden.clone().requires_grad_(), visual.clone().requires_grad_()]
            out = call(*leaves, index)
            out.backward(dout)
            results.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        assert len(results[0]) == 3
        for eager, of_compiler in zip(*results, strict=True):
            assert_bitwise("compiled", of_compiler, eager)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_and_opcheck(dynamic: bool) -> None:
    compiled = torch.compile(
        lambda h, v, i: add_visual_(h * 2, v, i), fullgraph=True, backend="aot_eager",
        dynamic=dynamic,
    )  # fmt: skip
    for positions in (12, 20):
        _, _, visual, index = make(positions, 8, torch.bfloat16)
        hidden = torch.randn(positions, 8).bfloat16()
        want = add_visual_(hidden * 2, visual, index)
        assert_bitwise("compiled", compiled(hidden, visual, index), want)
        hidden.neg_().zero_()  # -0.0 stays where nothing is added
        want = add_visual_(hidden * 2, visual, index)
        assert_bitwise("compiled", compiled(hidden, visual, index), want)
    n = len(visual)
    with pytest.raises(ValueError, match=rf"{2 * n} rows, but visual_index has {n} positions"):
        compiled(hidden, torch.cat([visual, visual]), index)
    torch.library.opcheck(torch.ops.vlmkernels.add_visual_.default, (want, visual, index, 0, False))
