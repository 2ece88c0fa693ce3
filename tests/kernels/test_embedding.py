"""visual_embedding and scatter_visual against what trainers do today."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.numeric import ISAS, assert_accurate, assert_bitwise, isa, poisoned
from vlmkernels import _native, scatter_visual, scatter_visual_, visual_embedding, visual_index
from vlmkernels.embedding import add, lookup
from vlmkernels.embedding import gradients as ops_of_gradients
from vlmkernels.embedding.lookup import visual_embedding_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMAGE = 3  # the placeholder's id in these tests
VOCABULARY = 13


def make_ids(positions: int, share: float) -> Tensor:
    """Ids of text that hold both ends of the vocabulary, and about `share` placeholders."""
    ids = torch.randint(0, VOCABULARY - 1, (positions,))
    ids += ids >= IMAGE  # no text token is the placeholder
    ids = torch.where(torch.rand(positions) < share, IMAGE, ids)
    text = (ids != IMAGE).nonzero()[:, 0]
    if len(text) >= 2:
        ids[text[0]], ids[text[-1]] = 0, VOCABULARY - 1
    return ids


def make(
    positions: int, hidden: int, dtype: torch.dtype, share: float = 0.6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, weight, visual, visual_index."""
    ids = make_ids(positions, share)
    index = visual_index(ids, IMAGE)
    weight = torch.randn(VOCABULARY, hidden).to(dtype)
    visual = torch.randn(int((ids == IMAGE).sum()), hidden).to(dtype)
    return ids, weight, visual, index


def today(
    ids: Tensor,
    weight: Tensor,
    visual: Tensor | None,
    vocab_range: tuple[int, int] | None = None,
    shard: tuple[int, int] | None = None,
) -> Tensor:
    """A vocabulary-parallel lookup, masked_scatter on the whole sequence, the slice of a shard."""
    start, end = vocab_range or (0, len(weight))
    outside = (ids < start) | (ids >= end)
    words = F.embedding((ids - start).masked_fill(outside, 0), weight)
    words = words.masked_fill(outside[:, None], 0.0)
    mask = (ids == IMAGE)[:, None].expand_as(words)
    if visual is None:
        whole = words.masked_fill(mask, 0.0)
    else:
        whole = words.masked_scatter(mask, visual)
    rank, size = shard or (0, 1)
    return whole.chunk(size)[rank] if len(ids) else whole


def check_forward(
    ids: Tensor, weight: Tensor, visual: Tensor | None, index: Tensor, **kw: Any
) -> None:
    with poisoned():
        out = visual_embedding(ids, weight, visual, index, **kw)
    assert_bitwise("visual_embedding", out, today(ids, weight, visual, **kw))
    reference = visual_embedding_reference(ids, weight, visual, index, **kw)
    assert_bitwise("reference", reference, out)


# ---- forward -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("hidden", [1, 7, 64, 100, 1536])
def test_forward(name: str, dtype: torch.dtype, hidden: int) -> None:
    ids, weight, visual, index = make(48, hidden, dtype)
    with isa(name):
        check_forward(ids, weight, visual, index)
        check_forward(ids, weight, None, index)
        for rank in range(4):
            check_forward(ids, weight, visual, index, shard=(rank, 4))
        # The first and the last id of the range, and ids on both sides of it.
        check_forward(ids, weight[2:9], visual, index, vocab_range=(2, 9), shard=(1, 2))


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("hidden", [2048, 2080, 2049])  # 64-byte rows, 32-byte rows, ragged rows
def test_forward_with_streaming_stores(name: str, hidden: int) -> None:
    """Large enough that whole rows are written past the cache, zero rows too."""
    ids, weight, visual, index = make(1100, hidden, torch.bfloat16)
    with isa(name):
        check_forward(ids, weight, visual, index)
        check_forward(ids, weight[:6], None, index, vocab_range=(0, 6))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_text_and_all_visual(share: float) -> None:
    ids, weight, visual, index = make(12, 40, torch.float32, share)
    check_forward(ids, weight, visual, index)
    check_forward(ids, weight, visual, index, shard=(2, 3))


def test_placeholders_at_both_ends_and_edges_of_shards() -> None:
    ids = torch.tensor([IMAGE, 0, 1, IMAGE, IMAGE, 2, VOCABULARY - 1, IMAGE])
    weight, visual = torch.randn(VOCABULARY, 24), torch.randn(4, 24)
    index = visual_index(ids, IMAGE, counts=4)
    for size in (1, 2, 4, 8):
        for rank in range(size):
            check_forward(ids, weight, visual, index, shard=(rank, size))


def test_empty() -> None:
    ids, weight, visual, index = make(0, 8, torch.float32)
    assert visual_embedding(ids, weight, visual, index).shape == (0, 8)
    assert visual_embedding(ids, weight, None, index, shard=(1, 2)).shape == (0, 8)
    weight.requires_grad_()
    visual_embedding(ids, weight, visual, index).sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() == 0


def test_vocabulary_parallel_parts_add_up() -> None:
    """The ranks' partial shards, visual rows from one of them, sum to the whole."""
    ids, weight, visual, index = make(30, 16, torch.float32)
    ranges = [(0, 5), (5, 6), (6, VOCABULARY)]
    for rank in range(2):
        parts = [
            visual_embedding(
                ids,
                weight[a:b],
                visual if a == 0 else None,
                index,
                vocab_range=(a, b),
                shard=(rank, 2),
            )
            for a, b in ranges
        ]
        assert_bitwise(
            "sum", torch.stack(parts).sum(0), today(ids, weight, visual, None, (rank, 2))
        )


def test_ids_under_visual_rows_are_never_used() -> None:
    ids, weight, visual, index = make(20, 8, torch.float32)
    expected = visual_embedding(ids, weight, visual, index)
    wild = torch.where(index >= 0, 1 << 50, ids)
    assert_bitwise("wild ids", visual_embedding(wild, weight, visual, index), expected)


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_scatter_visual(name: str, dtype: torch.dtype) -> None:
    ids, _, visual, index = make(24, 33, dtype)
    embeddings = torch.randn(24, 33).to(dtype)
    mask = (ids == IMAGE)[:, None].expand_as(embeddings)
    whole = embeddings.masked_scatter(mask, visual)
    before = embeddings.clone()
    with isa(name), poisoned():
        assert_bitwise("whole", scatter_visual(embeddings, visual, index), whole)
        for rank in range(3):
            rows = slice(rank * 8, rank * 8 + 8)
            out = scatter_visual(embeddings[rows], visual, index, shard=(rank, 3))
            assert_bitwise("shard", out, whole[rows])
    assert_bitwise("embeddings unchanged", embeddings, before)


# ---- backward ------------------------------------------------------------------------------------


def gradients(
    function: Callable, ids: Tensor, weight: Tensor, visual: Tensor, index: Tensor, dout: Tensor,
    **kw: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    weight, visual = weight.detach().requires_grad_(), visual.detach().requires_grad_()
    out = function(ids, weight, visual, index, **kw)
    return torch.autograd.grad(out, (weight, visual), dout)


SETTINGS = [
    {},
    {"shard": (1, 3)},
    {"vocab_range": (4, 9)},
    {"vocab_range": (0, 9), "shard": (0, 2)},
]


@pytest.mark.parametrize("kw", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_backward(dtype: torch.dtype, kw: Any) -> None:
    """dweight: error at most twice plain torch's, and the same bits on every instruction set."""
    ids, weight, visual, index = make(198, 70, dtype)
    start, end = kw.get("vocab_range", (0, VOCABULARY))
    weight = weight[start:end]
    rows = 198 // kw.get("shard", (0, 1))[1]
    dout = torch.randn(rows, 70).to(dtype)
    reference = visual_embedding_reference
    exact = gradients(reference, ids, weight.double(), visual.double(), index, dout.double(), **kw)
    plain = gradients(reference, ids, weight, visual, index, dout, **kw)
    first = None
    for name in ISAS:
        with isa(name), poisoned():
            ours = gradients(visual_embedding, ids, weight, visual, index, dout, **kw)
        assert_accurate("dweight", ours[0], plain[0], exact[0])
        assert_bitwise("dvisual", ours[1], exact[1].to(dtype))
        first = first if first is not None else ours[0]
        assert_bitwise(f"dweight on {name}", ours[0], first)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_dweight_is_an_fp32_sum_in_order(dtype: torch.dtype) -> None:
    """Bit for bit what a loop over the positions gives; repeated ids, 2 threads."""
    ids, weight, visual, index = make(300, 530, dtype, share=0.2)
    dout = (torch.randn(300, 530) * 10.0 ** torch.randint(-3, 4, (300, 1))).to(dtype)
    sums = torch.zeros(VOCABULARY, 530)
    for position in (index < 0).nonzero()[:, 0].tolist():
        sums[ids[position]] += dout[position].float()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        dweight, _ = gradients(visual_embedding, ids, weight, visual, index, dout)
        assert_bitwise("dweight", dweight, sums.to(dtype))


def with_long_runs(hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """As make's, and a gradient: ids at 64 positions, 65 and 400, and once, in random order."""
    ids = torch.arange(4).repeat_interleave(torch.tensor([64, 65, 400, 1])) + IMAGE + 1
    ids = torch.cat((ids[torch.randperm(len(ids))], torch.tensor([IMAGE])))
    rows = (torch.randn(n, hidden).to(dtype) for n in (VOCABULARY, 1, len(ids)))
    weight, visual, dout = rows
    return ids, weight, visual, visual_index(ids, IMAGE), dout


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_dweight_of_long_runs_is_a_sum_of_16_parts(name: str, dtype: torch.dtype) -> None:
    ids, weight, visual, index, dout = with_long_runs(530, dtype)
    sums = torch.zeros(VOCABULARY, 530)
    for token in ids[:-1].unique().tolist():
        rows = dout[ids == token].float()
        for part in rows.split(len(rows) if len(rows) <= 64 else -(-len(rows) // 16)):
            of_part = torch.zeros(530)
            for row in part:
                of_part += row
            sums[token] += of_part
    with isa(name):
        dweight, _ = gradients(visual_embedding, ids, weight, visual, index, dout)
    assert_bitwise("dweight", dweight, sums.to(dtype))


def test_fp16_and_bf16_conversions_are_exact() -> None:
    """Every finite 16-bit pattern as a gradient of its own row comes back unchanged."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        dout = patterns.view(dtype).view(-1, 256)
        dout = torch.where(dout.isnan() | (dout == 0), torch.ones((), dtype=dtype), dout)
        weight = torch.zeros(256, 256, dtype=dtype)
        index = torch.full((256,), -1, dtype=torch.int32)
        for name in ISAS:
            with isa(name):
                got, _ = gradients(
                    visual_embedding, torch.arange(256), weight, weight[:0], index, dout
                )
            assert_bitwise(f"{dtype} on {name}", got, dout)
        # Sums, too: rounding to nearest even, overflow to infinity, subnormals.
        pairs = torch.stack([dout, dout.flip(0)]).view(512, 256)
        ids = torch.arange(256).repeat(2)
        expected = (dout.float() + dout.flip(0).float()).to(dtype)
        expected = torch.where(expected.isnan(), 0, expected)
        for name in ISAS:
            with isa(name):
                got, _ = gradients(
                    visual_embedding, ids, weight, weight[:0], index.repeat(2), pairs
                )
            assert_bitwise(f"sums, {dtype} on {name}", torch.where(got.isnan(), 0, got), expected)


def test_rows_that_no_position_names_get_zeros() -> None:
    ids, weight, visual, index = make(16, 8, torch.float32)
    more = torch.cat([visual, torch.randn(3, 8)])
    dout = torch.randn(8, 8)
    for rank in range(2):
        with poisoned():
            _, got = gradients(visual_embedding, ids, weight, more, index, dout, shard=(rank, 2))
        expected = torch.zeros_like(more)
        for i in range(8):
            if (row := int(index[rank * 8 + i])) >= 0:
                expected[row] = dout[i]
        assert_bitwise("dvisual", got, expected)


def test_scatter_backward() -> None:
    ids, _, visual, index = make(24, 33, torch.bfloat16)
    embeddings = torch.randn(24, 33, dtype=torch.bfloat16)
    mask = (ids == IMAGE)[:, None].expand_as(embeddings)
    inputs = embeddings.requires_grad_(), visual.requires_grad_()
    dout = torch.randn(24, 33, dtype=torch.bfloat16)
    expected = torch.autograd.grad(embeddings.masked_scatter(mask, visual), inputs, dout)
    with poisoned():
        got = torch.autograd.grad(scatter_visual(embeddings, visual, index), inputs, dout)
    assert_bitwise("dembeddings", got[0], expected[0])
    assert_bitwise("dvisual", got[1], expected[1])
    shard = torch.autograd.grad(
        scatter_visual(embeddings[8:16], visual, index, shard=(1, 3)), visual, dout[8:16]
    )[0]
    local = (index >= 0) & (torch.arange(24) // 8 == 1)
    kept = torch.zeros_like(expected[1])
    kept[index[local].long()] = expected[1][index[local].long()]
    assert_bitwise("dvisual of a shard", shard, kept)


class _Calls(TorchDispatchMode):
    """Names of our ops, in the order in which they ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "vlmkernels":
            self.names.append(func.__name__.split(".")[0].removeprefix("visual_embedding_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("weight_grad", "visual_grad", "expected"),
    [(True, True, ["weight_grad", "visual_grad"]), (True, False, ["weight_grad"]),
     (False, True, ["visual_grad"])],
)  # fmt: skip
def test_frozen_inputs_cost_nothing(
    weight_grad: bool, visual_grad: bool, expected: list[str]
) -> None:
    ids, weight, visual, index = make(10, 4, torch.float32)
    weight.requires_grad_(weight_grad)
    visual.requires_grad_(visual_grad)
    out = visual_embedding(ids, weight, visual, index)
    with _Calls() as calls:
        out.sum().backward()
    assert calls.names == expected
    assert (weight.grad is not None, visual.grad is not None) == (weight_grad, visual_grad)
    with _Calls() as calls:
        frozen = visual_embedding(ids, weight.detach(), visual.detach(), index)
    assert not frozen.requires_grad and calls.names == ["visual_embedding"]


# ---- torch.library and torch.compile -------------------------------------------------------------


def test_opcheck() -> None:
    ids, weight, visual, index = make(12, 6, torch.float32)
    ops, kinds = torch.ops.vlmkernels, (torch.float32, torch.bfloat16)
    check = torch.library.opcheck
    for w, v in ((weight.requires_grad_(), visual.requires_grad_()), (weight.detach(), None)):
        for kind in kinds:
            check(ops.visual_embedding.default, (ids, w, v, index, 0, False, 6, 6, -1, kind, True))
    embeddings = torch.randn(6, 6, requires_grad=True)
    check(ops.scatter_visual.default, (embeddings, visual, index, 6, True))
    check(ops.scatter_visual.default, (embeddings, None, index, 6, True))
    plain, rows = embeddings.detach(), visual.detach()
    check(ops.scatter_visual_.default, (plain.clone(), rows, index, 6, True))
    dout = torch.randn(6, 6)
    for kind in kinds:
        check(ops.visual_embedding_visual_grad.default, (dout, index, 6, len(visual), kind))
        arguments = (dout, ids, index, 0, VOCABULARY, 6, 2, kind)
        check(ops.visual_embedding_weight_grad.default, arguments)
        check(ops.visual_embedding_weight_grad_sparse.default, arguments)
    main_grad = torch.randn(VOCABULARY, 6)
    check(ops.visual_embedding_weight_grad_into.default, (main_grad, dout, ids, index, 0, 6, 2))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    def model(ids: Tensor, weight: Tensor, visual: Tensor, index: Tensor) -> Tensor:
        hidden = visual_embedding(ids, weight, visual * 2, index, shard=(1, 2)) * 3
        return scatter_visual(hidden, visual, index, shard=(1, 2)).square()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for positions in (12, 20):
        ids, weight, visual, index = make(positions, 8, torch.float32)
        dout = torch.randn(positions // 2, 8)
        assert_bitwise(
            "out", compiled(ids, weight, visual, index), model(ids, weight, visual, index)
        )
        eager = gradients(model, ids, weight, visual, index, dout)
        for name, got, want in zip(
            ("dweight", "dvisual"),
            gradients(compiled, ids, weight, visual, index, dout),
            eager,
            strict=True,
        ):
            assert_bitwise(name, got, want)


# ---- refusals ------------------------------------------------------------------------------------


def test_out_of_range_ids_and_indices() -> None:
    """The message names argument, position, value and limit; nothing is read."""
    ids, weight, visual, index = make(20, 8, torch.float32)
    text, image = int((index < 0).nonzero()[-1]), int((index >= 0).nonzero()[-1])
    for bad in (VOCABULARY, 1 << 40):
        wrong = ids.clone()
        wrong[text] = bad
        message = rf"input_ids\[{text}\] is {bad}, but weight has {VOCABULARY} rows"
        with pytest.raises(ValueError, match=message):
            visual_embedding(wrong, weight, visual, index)
        visual_embedding(wrong, weight, visual, index, vocab_range=(0, VOCABULARY))
    wrong[text] = -1
    with pytest.raises(ValueError, match=rf"input_ids\[{text}\] is -1; it must not be negative"):
        visual_embedding(wrong, weight, visual, index)
    n = len(visual)
    wrong_index = index.clone()
    wrong_index[image] = n
    message = rf"visual_index\[{image}\] is {n}, but visual has {n} rows"
    with pytest.raises(ValueError, match=message):
        visual_embedding(ids, weight, visual, wrong_index)
    with pytest.raises(ValueError, match=message):
        scatter_visual(torch.randn(20, 8), visual, wrong_index)
    with pytest.raises(ValueError, match="but visual has 0 rows"):
        visual_embedding(ids, weight, visual[:0], index)
    visual_embedding(ids, weight, None, wrong_index)  # there no row of visual is read
    # A position of another shard is that rank's business.
    half = int(image < 10)
    visual_embedding(ids, weight, visual, wrong_index, shard=(half, 2))
    # In the other order: 0 stands at two positions, fine until a gradient must be split.
    wrong_index[image] = 0
    out = visual_embedding(ids, weight, visual.requires_grad_(), wrong_index)
    first = int((index == 0).nonzero()[0])
    with pytest.raises(ValueError, match=f"row 0 at positions {first} and {image};"):
        out.sum().backward()


def refuse(message: str, **changes: Any) -> None:
    ids, weight, visual, index = make(12, 8, torch.float32)
    arguments: dict[str, Any] = {"input_ids": ids, "weight": weight, "visual": visual,
                             "visual_index": index, **changes}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        visual_embedding(**arguments)


def test_wrong_arguments() -> None:
    ids, weight, visual, index = make(12, 8, torch.float32)
    n = len(visual)
    refuse(r"input_ids is int32 \[12\] on cpu; it must be int64 \[S\]", input_ids=ids.int())
    refuse(r"input_ids is int64 \[1, 12\]", input_ids=ids[None])
    refuse(r"visual_index is int64 \[12\].* must be int32", visual_index=index.long())
    refuse("input_ids has 12 positions and visual_index 11", visual_index=index[:11])
    refuse(r"weight is float64 \[13, 8\]", weight=weight.double())
    refuse("weight is not contiguous", weight=torch.randn(8, VOCABULARY).t())
    refuse(rf"visual is bfloat16 \[{n}, 8\].* must be float32", visual=visual.bfloat16())
    refuse("visual has rows of 7 elements.* weight's, 8", visual=torch.randn(n, 7))
    few = torch.where(index == n - 1, -1, index)
    refuse(
        rf"visual has {n} rows, but visual_index has {n - 1} positions",
        visual=visual,
        visual_index=few,
    )
    for padding_idx in (-14, 13):
        refuse(rf"padding_idx is {padding_idx}; .* -13 to 12", padding_idx=padding_idx)
    refuse("padding_idx is -1; with vocab_range", padding_idx=-1, vocab_range=(0, 13))
    refuse(r"vocab_range is \(0, 12\).* rows, 13", vocab_range=(0, 12))
    refuse(r"vocab_range is \(-1, 12\)", vocab_range=(-1, 12))
    refuse("12 positions, which 5 shards cannot share equally", shard=(0, 5))
    refuse("padding_idx is 1.5; it must be a whole number", padding_idx=1.5)
    pairs: tuple[Any, ...] = (1, "01", (0,), (0, 2.0), (False, 2), [(0, 2)], torch.tensor([0, 2]))
    for pair in pairs:
        message = "is " + re.escape(f"{pair!r}; it must be two whole numbers")
        refuse(f"vocab_range {message}", vocab_range=pair)
        refuse(f"shard {message}", shard=pair)
        refuse(f"contribute {message}", contribute=pair, vocab_range=(0, 13))
    for shard in ((2, 2), (-1, 2), (0, 0)):
        refuse(re.escape(f"shard is {shard}; it must be (rank, size)"), shard=shard)
    refuse(r"visual_index is int32 \[12\] on meta.* on cpu", visual_index=index.to("meta"))
    embeddings = torch.randn(12, 8)
    with pytest.raises(ValueError, match="embeddings has 12 rows, but .* 6 for each of 2 shards"):
        scatter_visual(embeddings, visual, index, shard=(0, 2))
    with pytest.raises(ValueError, match=r"visual is float16 .* must be float32"):
        scatter_visual(embeddings, visual.half(), index)
    for scatter in (scatter_visual, scatter_visual_):
        with pytest.raises(ValueError, match=rf"{n} rows, but .* {n - 1} positions.* allow_unused"):
            scatter(embeddings, visual, few)
        with pytest.raises(ValueError, match=rf"{n} rows, but visual_index has {n - 1} positions"):
            torch.compile(scatter, backend="aot_eager")(embeddings.clone(), visual, few)


def test_rows_that_are_not_for_here() -> None:
    """Of other ranks, or padding: with allow_unused, and always with a shard."""
    ids, weight, visual, index = make(12, 8, torch.float32)
    more = torch.cat([visual, torch.randn(2, 8)])
    whole = today(ids, weight, visual)
    out = visual_embedding(ids, weight, more, index, allow_unused=True)
    assert_bitwise("allow_unused", out, whole)
    for scatter in (scatter_visual, scatter_visual_):
        out = scatter(weight[ids], more, index, allow_unused=True)
        assert_bitwise("scatter, allow_unused", out, whole)
        out = scatter(weight[ids][6:], more, index, shard=(1, 2))
        assert_bitwise("scatter, shard", out, whole[6:])


def test_strided_inputs_are_taken_as_they_are() -> None:
    """Views of a batch: input_ids and visual_index with a step, visual with long rows."""
    ids, weight, visual, index = make(12, 8, torch.float32)
    expected = visual_embedding(ids, weight, visual, index)
    got = visual_embedding(
        torch.stack([ids, ids], 1)[:, 0],
        weight,
        torch.cat([visual, visual], 1)[:, :8],
        torch.stack([index, index], 1)[:, 1],
    )
    assert_bitwise("strided", got, expected)


def test_cuda_functions_take_what_the_launchers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a row there is nothing to launch, so the calls work without a GPU as well."""
    if not _native.has_cuda_kernels():
        pytest.skip("vlmkernels was built without CUDA kernels")
    names = []

    def launch(name: str, tensor: Tensor, *args: Any) -> None:
        names.append(name)
        getattr(_native._C, name + "_cuda")(*args, 0)

    for module in (add, lookup, ops_of_gradients):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(ops_of_gradients, "CLEARS_ROWS", ())
    ops = torch.ops.vlmkernels
    ids, weight, visual, index = make(0, 8, torch.bfloat16)
    none, kind = weight[:0], torch.float32
    out = ops.visual_embedding(ids, weight, visual, index, 0, False, 0, 0, -1, kind, True)
    assert (out.dtype, out.shape) == (kind, (0, 8))
    assert ops.scatter_visual(none, visual, index, 0, True).shape == (0, 8)
    assert ops.scatter_visual_(none, visual, index, 0, True) is None
    assert ops.add_visual_(none, visual, index, 0, True) is None
    assert ops.visual_embedding_visual_grad(none, index, 0, 0, kind).shape == (0, 8)
    arguments = (ids, index, 0, 13, 0, -1, kind)
    with poisoned():
        assert ops.visual_embedding_weight_grad(none, *arguments).abs().max() == 0
    assert ops.visual_embedding_weight_grad_sparse(none, *arguments)[1].shape == (0, 8)
    into = (weight.float(), none, ids, index, 0, 0, -1)
    assert ops.visual_embedding_weight_grad_into(*into) is None
    once = ["embedding_add", "embedding_gather"]
    assert names == ["embedding_forward"] * 3 + once + ["embedding_reduce"] * 3


# ---- any shape -------------------------------------------------------------------------------


@given(
    st.integers(0, 5), st.integers(1, 4), st.integers(1, 40), st.sampled_from(DTYPES),
    st.floats(0, 1), st.tuples(st.integers(0, 6), st.integers(7, VOCABULARY)) | st.none(),
    st.booleans(), st.data(),
)  # fmt: skip
@settings(max_examples=80)
def test_any_shape(
    rows: int, size: int, hidden: int, dtype: torch.dtype, share: float,
    vocab_range: tuple[int, int] | None, with_visual: bool, data: st.DataObject,
) -> None:  # fmt: skip
    ids, weight, visual, index = make(rows * size, hidden, dtype, share)
    if vocab_range is not None:
        weight = weight[slice(*vocab_range)]
    shard = data.draw(st.integers(0, size - 1)), size
    with isa(data.draw(st.sampled_from(ISAS))):
        check_forward(
            ids, weight, visual if with_visual else None, index,
            vocab_range=vocab_range, shard=shard,
        )  # fmt: skip
