"""Ways of visual_embedding and scatter_visual beside the plain one: another dtype, a padding id, a
sparse gradient or one added to main_grad, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.numeric import assert_accurate, assert_bitwise, isa, poisoned
from tests.kernels.test_embedding import (
    DTYPES,
    IMAGE,
    ISAS,
    VOCABULARY,
    _Calls,
    gradients,
    make,
    today,
)
from vlmkernels import (
    add_visual_,
    scatter_visual,
    scatter_visual_,
    visual_embedding,
    visual_index,
)
from vlmkernels.embedding import gradients as ops_of_gradients
from vlmkernels.embedding.lookup import visual_embedding_reference
from vlmkernels.embedding.visual_index import visual_index_reference

SETTINGS = [
    {},
    {"shard": (1, 3)},
    {"vocab_range": (4, 9)},
    {"vocab_range": (0, 9), "shard": (2, 3)},
    {"padding_idx": 4, "vocab_range": (4, 9)},
]


def case(
    kw: dict[str, Any], dtype: torch.dtype, positions: int = 198, hidden: int = 70
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ids, this rank's table, visual, index, and a gradient of the shard's rows."""
    ids, weight, visual, index = make(positions, hidden, dtype)
    weight = weight[slice(*kw.get("vocab_range", (0, VOCABULARY)))].clone()
    rows = positions // kw.get("shard", (0, 1))[1]
    return ids, weight, visual, index, torch.randn(rows, hidden).to(dtype)


# ---- another dtype -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("out", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kind", DTYPES, ids=lambda d: str(d)[6:])
def test_dtype(kind: torch.dtype, out: torch.dtype, name: str) -> None:
    """Values and gradients are torch's conversions, whatever the types of table and visual."""
    hidden = 530  # more than one piece of the conversion, and ragged
    for other in DTYPES:
        ids, weight, visual, index, _ = case({}, kind, 44, hidden)
        visual = torch.randn(len(visual), hidden).to(other)
        kw: dict[str, Any] = {"shard": (1, 2), "dtype": out}
        with isa(name), poisoned():
            got = visual_embedding(ids, weight, visual, index, **kw)
        mask = (index >= 0)[:, None].expand(-1, hidden)
        words = F.embedding(ids, weight).to(out)
        assert_bitwise("out", got, words.masked_scatter(mask, visual.to(out))[22:])
        dout = torch.randn(22, hidden).to(out)
        with isa(name), poisoned():
            ours = gradients(visual_embedding, ids, weight, visual, index, dout, **kw)
        sums, rows = torch.zeros(VOCABULARY, hidden), torch.zeros(visual.shape, dtype=other)
        for i, row in enumerate(index[22:].tolist()):
            if row >= 0:
                rows[row] = dout[i].to(other)
            else:
                sums[ids[22 + i]] += dout[i].float()
        assert_bitwise("dweight", ours[0], sums.to(kind))
        assert_bitwise("dvisual", ours[1], rows)


def test_dtype_is_asked_for() -> None:
    ids, weight, visual, index, _ = case({}, torch.float32, 12, 8)
    with pytest.raises(ValueError, match="visual is bfloat16 .* must be float32"):
        visual_embedding(ids, weight, visual.bfloat16(), index)
    with pytest.raises(ValueError, match="dtype is torch.float64; it must be float32, bfloat16"):
        visual_embedding(ids, weight, visual, index, dtype=torch.float64)


# ---- where dweight goes --------------------------------------------------------------------------


@pytest.mark.parametrize("kw", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_sparse(dtype: torch.dtype, kw: Any) -> None:
    """The same bits as the dense gradient, and no row that no position names."""
    ids, weight, visual, index, dout = case(kw, dtype)
    dense, dvisual = gradients(visual_embedding, ids, weight, visual, index, dout, **kw)
    with poisoned():
        sparse, same = gradients(
            visual_embedding, ids, weight, visual, index, dout, weight_grad="sparse", **kw
        )
    assert sparse.is_sparse and sparse.is_coalesced() and sparse.dtype == dtype
    assert_bitwise("dweight", sparse.to_dense(), dense)
    assert_bitwise("dvisual", same, dvisual)
    start = kw.get("vocab_range", (0,))[0]
    here = slice(0, None) if "shard" not in kw else slice(*(len(dout) * r for r in _span(kw)))
    named = ids[here][index[here] < 0] - start
    named = named[(named >= 0) & (named < len(weight)) & (named + start != kw.get("padding_idx"))]
    assert sparse.indices()[0].tolist() == named.unique().tolist()


def _span(kw: dict[str, Any]) -> tuple[int, int]:
    return kw["shard"][0], kw["shard"][0] + 1


def test_sparse_optimizer() -> None:
    """A step of torch.optim.SGD with either gradient leaves the same table."""
    ids, weight, visual, index, dout = case({}, torch.float32)
    tables = []
    for mode in ("dense", "sparse"):
        table = weight.clone().requires_grad_()
        visual_embedding(ids, table, visual, index, weight_grad=mode).backward(dout)  # type: ignore
        torch.optim.SGD([table], lr=0.1).step()
        tables.append(table.detach())
    assert_bitwise("table", tables[1], tables[0])


@pytest.mark.parametrize("kw", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_main_grad(dtype: torch.dtype, kw: Any) -> None:
    """The float32 sum of each id is added to what main_grad holds, twice, on every instruction set;
    rows without a position keep their bits; autograd gets nothing of the table's size."""
    ids, weight, visual, index, dout = case(kw, dtype)
    ids[ids == 5] = 6  # a row of the table that no position names
    reference = visual_embedding_reference

    def of(kind: torch.dtype) -> tuple[Tensor, ...]:
        return gradients(
            reference, ids, weight.to(kind), visual.to(kind), index, dout.to(kind), **kw
        )

    (dweight, dvisual), (plain, _) = of(torch.float64), of(torch.float32)
    start = torch.randn(weight.shape)
    for name in ISAS:
        table = weight.clone().requires_grad_()
        table.main_grad = start.clone()  # type: ignore[attr-defined]
        rows = visual.clone().requires_grad_()
        with isa(name), poisoned():
            for _ in range(2):
                out = visual_embedding(ids, table, rows, index, weight_grad="main_grad", **kw)
                out.backward(dout)
        assert table.grad is not None and table.grad.is_sparse and table.grad._nnz() == 0
        got = table.main_grad  # type: ignore[attr-defined]
        assert_accurate("main_grad", got, start + plain + plain, start.double() + 2 * dweight)
        untouched = (dweight == 0).all(1)
        assert untouched.any()
        assert_bitwise("untouched rows", got[untouched], start[untouched])
        assert_bitwise("dvisual", rows.grad, 2 * dvisual.to(dtype))  # type: ignore[arg-type]


def test_main_grad_is_refused_where_it_does_not_fit() -> None:
    ids, weight, visual, index, _ = case({}, torch.float32, 12, 8)
    weight.requires_grad_()

    def run(mode: Any = "main_grad") -> Tensor:
        return visual_embedding(ids, weight, visual, index, weight_grad=mode)

    with pytest.raises(ValueError, match="weight.main_grad is a NoneType; .* float32"):
        run()
    for wrong in (torch.zeros(VOCABULARY, 9), torch.zeros(VOCABULARY, 8).bfloat16(),
                  torch.zeros(8, VOCABULARY).t()):  # fmt: skip
        weight.main_grad = wrong  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"needs a contiguous float32 \[13, 8\] on cpu"):
            run()
    with torch.no_grad():  # nothing will be added, so nothing is asked for
        run()
    with pytest.raises(ValueError, match="weight_grad is 'main'; it must be 'dense', 'sparse' or"):
        run("main")


@pytest.mark.parametrize("table", [1, 2048, 2049, 150_000, 5_000_000])
@pytest.mark.parametrize("padded", [False, True])
def test_positions_are_sorted_by_id(table: int, padded: bool) -> None:
    """Stably, as NumPy does; the kernel sorts by digits of 11 bits. Positions that are visual, or
    whose id is elsewhere or the padding's, are left out."""
    start, first, rows = 7, 11, 700
    some = torch.randint(start - 3, start + table + 3, (200,))
    some[:3] = torch.tensor([start - 1, start + table - 1, start + table])
    ids = some[torch.randint(200, (800,))]
    index = torch.where(torch.rand(800) < 0.2, 0, -1).int()
    padding = int(some[1]) if padded else -1
    found = ids[first : first + rows].numpy() - start
    text = index[first : first + rows].numpy() < 0
    kept = text & (found >= 0) & (found < table) & (found + start != padding)
    places = kept.nonzero()[0]
    order = places[found[places].argsort(kind="stable")]
    twice = torch.stack([ids, ids], 1)[:, 1]
    got = ops_of_gradients._sorted(torch.ones(rows, 1), twice, index, start, table, first, padding)
    assert_bitwise("rows", got[0], torch.from_numpy(found[order]))
    assert_bitwise("positions", got[1], torch.from_numpy(order))


def test_positions_that_are_not_there() -> None:
    """The op by itself, whose arguments nobody else has checked."""
    op, grad = torch.ops.vlmkernels.visual_embedding_weight_grad, torch.ones(5, 8)
    ids, index = torch.zeros(6, dtype=torch.int64), torch.full((6,), -1, dtype=torch.int32)
    rest = (VOCABULARY, 1, -1, torch.float32)
    assert op(grad, ids, index, 0, *rest)[0].tolist() == [5.0] * 8
    with pytest.raises(ValueError, match="5 rows from position 1 on, but input_ids 5 positions"):
        op(grad, ids[:5], index, 0, *rest)
    with pytest.raises(ValueError, match="positions and visual_index 5"):
        op(grad, ids, index[:5], 0, *rest)
    with pytest.raises(ValueError, match="input_ids is int32"):
        op(grad, ids.int(), index, 0, *rest)
    with pytest.raises(ValueError, match="visual_index is int64"):
        op(grad, ids, index.long(), 0, *rest)


@pytest.mark.parametrize("mode", ["dense", "sparse", "main_grad"])
def test_frozen_inputs_cost_nothing(mode: Any) -> None:
    ids, weight, visual, index, _ = case({}, torch.float32, 12, 4)
    work = {"dense": "weight_grad", "sparse": "weight_grad_sparse", "main_grad": "weight_grad_into"}
    for table, tower in ((True, True), (True, False), (False, True)):
        w, v = weight.clone().requires_grad_(table), visual.clone().requires_grad_(tower)
        w.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        out = visual_embedding(ids, w, v, index, weight_grad=mode)
        with _Calls() as calls:
            out.sum().backward()
        assert calls.names == [work[mode]] * table + ["visual_grad"] * tower
        assert (w.grad is not None, v.grad is not None) == (table, tower)


@pytest.mark.parametrize("mode", ["dense", "sparse", "main_grad"])
def test_padding_id_gets_no_gradient(mode: Any) -> None:
    """As torch.nn.Embedding(padding_idx=..), also where the id stands at the borders of a range."""
    for padding in (0, IMAGE + 1, VOCABULARY - 1, -1, -VOCABULARY):
        ids, weight, visual, index, dout = case({}, torch.float32, 60, 8)
        ids[(index < 0).nonzero()[:2, 0]] = padding % VOCABULARY
        table = weight.clone().requires_grad_()
        mask = (index >= 0)[:, None].expand(-1, 8)
        words = F.embedding(ids, table, padding_idx=padding).masked_scatter(mask, visual)
        (expected,) = torch.autograd.grad(words, table, dout)
        assert expected[padding].abs().max() == 0
        table.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        out = visual_embedding(ids, table, visual, index, padding_idx=padding, weight_grad=mode)
        assert_bitwise("out", out.detach(), words.detach())
        meant = visual_embedding_reference(ids, table, visual, index, padding_idx=padding)
        torch.testing.assert_close(torch.autograd.grad(meant, table, dout)[0], expected)
        out.backward(dout)
        got = table.main_grad if mode == "main_grad" else table.grad  # type: ignore[attr-defined]
        got = got.to_dense() if got.is_sparse else got
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        assert got[padding].abs().max() == 0


# ---- visual rows from exactly one rank -----------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_contributions_add_up(dtype: torch.dtype, share: float) -> None:
    """Tensor-parallel ranks: the sum of their rows is the whole, bit for bit, and each rank's
    gradients, from the gradient of that sum, are those of the whole: its rows, all of visual."""
    ids, weight, visual, index = make(24, 17, dtype, share)
    ids[(index < 0).nonzero()[:, 0][:1]] = VOCABULARY - 1
    dout = torch.randn(24, 17).to(dtype)
    ranges = [(0, 5), (5, 6), (6, VOCABULARY + 3)]  # the last with padded rows
    padded = torch.cat([weight, torch.zeros(3, 17).to(dtype)])
    expected = gradients(visual_embedding, ids, padded, visual, index, dout)
    for mode in ("dense", "sparse", "main_grad"):
        total = torch.zeros(24, 17)
        for rank, (a, b) in enumerate(ranges):
            table, rows = padded[a:b].clone().requires_grad_(), visual.clone().requires_grad_()
            table.main_grad = torch.zeros(table.shape)  # type: ignore[attr-defined]
            kw: Any = dict(vocab_range=(a, b), contribute=(rank, 3), weight_grad=mode)
            with poisoned():
                part = visual_embedding(ids, table, rows, index, **kw)
                part.backward(dout)
            local = torch.arange(24) // 8 == rank
            others = (index >= 0) & ~local
            assert part[others].abs().max() == 0 if others.any() else True
            total += part.detach().float()
            got = table.main_grad if mode == "main_grad" else table.grad  # type: ignore
            got = (got.to_dense() if got.is_sparse else got).to(dtype)
            assert_bitwise(f"dweight of rank {rank}", got, expected[0][a:b])
            assert_bitwise(f"dvisual on rank {rank}", rows.grad, expected[1])  # type: ignore
        assert_bitwise("sum", total.to(dtype), today(ids, weight, visual))


def test_contribute_needs_a_range() -> None:
    ids, weight, visual, index, _ = case({}, torch.float32, 12, 8)
    with pytest.raises(ValueError, match="contribute is given; it needs vocab_range and visual"):
        visual_embedding(ids, weight, visual, index, contribute=(0, 2))
    with pytest.raises(ValueError, match="12 positions, which 5 shards cannot share equally"):
        visual_embedding(ids, weight, visual, index, vocab_range=(0, VOCABULARY), contribute=(0, 5))


# ---- in place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("hidden", [33, 2048])  # below and above the size of streaming stores
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_in_place(dtype: torch.dtype, hidden: int, name: str) -> None:
    positions = 1200 if hidden > 100 else 24
    ids, _, visual, index = make(positions, hidden, dtype)
    embeddings = torch.randn(positions, hidden).to(dtype)
    whole = embeddings.masked_scatter((index >= 0)[:, None].expand(-1, hidden), visual)
    third = positions // 3
    for shard in (None, (0, 3), (2, 3)):
        begin, end = (0, positions) if shard is None else (shard[0] * third, (shard[0] + 1) * third)
        local = embeddings[begin:end].clone()
        with isa(name):
            out = scatter_visual_(local, visual, index, shard=shard)
        assert out is local
        assert_bitwise("in place", local, whole[begin:end])


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shard", [None, (1, 3)])
def test_in_place_gradients(shard: tuple[int, int] | None, share: float) -> None:
    """Those of the copy, where the embeddings are the output of a layer or a part of one."""
    ids, weight, visual, index = make(24, 33, torch.bfloat16, share)
    rows = 24 if shard is None else 8
    table = torch.randn(VOCABULARY, 33).bfloat16().requires_grad_()
    visual = visual.requires_grad_()
    dout = torch.randn(rows, 33).bfloat16()

    def words() -> Tensor:
        looked_up = F.embedding(ids, table)
        return looked_up if shard is None else looked_up[8:16]

    expected = scatter_visual(words(), visual, index, shard=shard)
    got = scatter_visual_(words(), visual, index, shard=shard)
    assert_bitwise("out", got.detach(), expected.detach())
    inputs = (table, visual)
    for name, ours, theirs in zip(
        ("dtable", "dvisual"),
        torch.autograd.grad(got, inputs, dout),
        torch.autograd.grad(expected, inputs, dout),
        strict=True,
    ):
        assert_bitwise(name, ours, theirs)


def test_in_place_is_refused_where_it_would_be_wrong() -> None:
    ids, _, visual, index = make(12, 8, torch.float32)
    leaf = torch.randn(12, 8, requires_grad=True)
    before = leaf.detach().clone()
    with pytest.raises(ValueError, match="leaf that requires a gradient.* use scatter_visual"):
        scatter_visual_(leaf, visual, index)
    assert_bitwise("untouched", leaf.detach(), before)
    with pytest.raises(ValueError, match="embeddings is not contiguous"):
        scatter_visual_(torch.randn(8, 12).t(), visual, index)
    with pytest.raises(ValueError, match="embeddings has 12 rows, but .* 6 for each of 2 shards"):
        scatter_visual_(torch.randn(12, 8), visual, index, shard=(0, 2))
    memory, two = torch.randn(24, 8), torch.tensor([-1, 0, 1] + [-1] * 9, dtype=torch.int32)
    kept = memory.clone()
    for start in (0, 1, 11):
        with pytest.raises(ValueError, match="visual lies in the memory of embeddings.*clone"):
            scatter_visual_(memory[:12], memory[start : start + 2], two)
    assert_bitwise("untouched", memory, kept)
    scatter_visual_(memory[:12], memory[12:14], two)  # side by side is fine
    assert_bitwise("rows", memory[1:3], kept[12:14])
    rest = leaf.exp()  # keeps its output for its own backward
    scatter_visual_(rest, visual, index)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rest.sum().backward()


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    """fullgraph: in place, with another dtype, and main_grad, which is the dense gradient there."""

    def model(ids: Tensor, weight: Tensor, visual: Tensor, index: Tensor) -> Tensor:
        hidden = visual_embedding(
            ids, weight, visual, index, dtype=torch.float32, weight_grad="main_grad"
        )
        return scatter_visual_(hidden * 2, visual.float(), index).square()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for positions in (12, 20):
        ids, weight, visual, index = make(positions, 8, torch.bfloat16)
        dout = torch.randn(positions, 8)
        weight.main_grad = torch.zeros(VOCABULARY, 8)  # type: ignore[attr-defined]
        got = gradients(compiled, ids, weight, visual, index, dout)

        # gradients() detaches, so in eager mode there is no main_grad: the dense gradient.
        def dense(ids: Tensor, weight: Tensor, visual: Tensor, index: Tensor) -> Tensor:
            hidden = visual_embedding(ids, weight, visual, index, dtype=torch.float32)
            return scatter_visual_(hidden * 2, visual.float(), index).square()

        want = gradients(dense, ids, weight, visual, index, dout)
        for name, a, b in zip(("dweight", "dvisual"), got, want, strict=True):
            assert_bitwise(name, a, b)

    def sparse(ids: Tensor, weight: Tensor, visual: Tensor, index: Tensor) -> Tensor:
        return visual_embedding(ids, weight, visual, index, weight_grad="sparse")

    def written(words: Tensor, visual: Tensor, index: Tensor) -> Tensor:
        return scatter_visual_(words, visual, index).sum()

    for grad in (False, True):  # into an input of the graph, which the caller has
        words, rows = torch.randn(20, 8), visual.float().detach().requires_grad_(grad)
        expected = scatter_visual(words, rows, index)
        compiled = torch.compile(written, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        total = compiled(words, rows, index)
        assert_bitwise("words", words.detach(), expected.detach())
        assert_bitwise("total", total.detach(), expected.sum().detach())
        if grad:
            (drows,) = torch.autograd.grad(total, rows)
            assert_bitwise("drows", drows, torch.ones_like(rows))

    with pytest.raises(Exception, match="weight_grad='sparse' can't be compiled"):
        torch.compile(sparse, fullgraph=True, backend="aot_eager")(ids, weight, visual, index)


# ---- visual_index: streams, samples --------------------------------------------------------------


def test_index_of_separate_streams() -> None:
    """Images and videos that are merged as transformers merges them: one after the other."""
    ids = torch.tensor([5, 7, 9, 7, 1, 9, 9, 7])
    assert visual_index(ids, [7, 9], separate=True).tolist() == [-1, 0, 3, 1, -1, 4, 5, 2]
    assert visual_index(ids, [9, 7], [[1, 2], 3], separate=True).tolist() == [
        -1, 3, 0, 4, -1, 1, 2, 5,
    ]  # fmt: skip
    for tokens in ([7], [100, 9], [9, 100, 7]):
        expected = visual_index_reference(ids, tokens, separate=True)
        assert visual_index(ids, tokens, separate=True).tolist() == expected.tolist()
    assert visual_index(ids[:0], [7, 9], [0, 0], separate=True).shape == (0,)
    with pytest.raises(ValueError, match=r"holds 3 placeholders .*\[9\].* 2 visual rows"):
        visual_index(ids, [7, 9], [3, 2], separate=True)
    with pytest.raises(ValueError, match="counts is 6; .* one entry for each of token_ids"):
        visual_index(ids, [7, 9], 6, separate=True)


def test_index_names_the_sample() -> None:
    ids = torch.tensor([7, 7, 1, 7, 9, 1, 1])
    cu = torch.tensor([0, 3, 5, 7], dtype=torch.int32)
    counts = [[1, 1], torch.tensor([2]), 0]
    whole = visual_index(ids, [7, 9], counts, cu_seqlens=cu)
    assert whole.tolist() == [0, 1, -1, 2, 3, -1, -1]
    message = r"sample 1 of input_ids holds 2 placeholders of token_ids \[7, 9\], .* 3 visual rows"
    with pytest.raises(ValueError, match=message):
        # One too many here and one too few in the next: the sums agree, the samples do not.
        visual_index(ids, [7, 9], [2, 3, -1], cu_seqlens=cu)
    with pytest.raises(ValueError, match="sample cat.json of input_ids holds 0 .* 4 visual rows"):
        visual_index(ids, [7, 9], [2, 2, 4], cu_seqlens=cu, names=["a", "b", "cat.json"])
    with pytest.raises(ValueError, match="counts is 4; with cu_seqlens .* its 3 samples"):
        visual_index(ids, [7, 9], 4, cu_seqlens=cu)
    with pytest.raises(ValueError, match=r"cu_seqlens is \[0, 3, 5, 6\]; it must rise from 0 to"):
        visual_index(ids, [7, 9], counts, cu_seqlens=[0, 3, 5, 6])
    with pytest.raises(ValueError, match="cu_seqlens is given with separate=True"):
        visual_index(ids, [7, 9], counts, cu_seqlens=cu, separate=True)


@pytest.mark.parametrize(
    "op", ["visual_embedding", "scatter_visual", "scatter_visual_", "add_visual_"]
)
def test_gradients_of_strided_inputs(op: str) -> None:
    """An index with a step, and a gradient with one, are what a dense one is to torch."""
    ids, weight, visual, index = make(12, 8, torch.float32)
    step = torch.stack([torch.full_like(index, 9), index], 1)[:, 1]
    ids_step = torch.stack([ids, ids], 1)[:, 0]
    upstream = torch.randn(8, 12).T
    base = torch.randn(12, 8)
    is_visual = (ids == IMAGE)[:, None]

    def ours(table: Tensor, x: Tensor) -> Tensor:
        if op == "visual_embedding":
            return visual_embedding(ids_step, table, x, step)
        scatters = (scatter_visual, scatter_visual_, add_visual_)
        return next(f for f in scatters if f.__name__ == op)(table.clone(), x, step)

    def plain(table: Tensor, x: Tensor) -> Tensor:
        rows = x[index.clamp_min(0).long()]
        if op == "add_visual_":
            return table + rows.masked_fill(~is_visual, 0.0)
        words = F.embedding(ids, table) if op == "visual_embedding" else table
        return torch.where(is_visual, rows, words)

    def gradients(of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        table = (weight if op == "visual_embedding" else base).clone().requires_grad_()
        x = visual.clone().requires_grad_()
        of(table, x).backward(upstream)
        return [table.grad, x.grad]

    for name, got, want in zip(("table", "visual"), gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
