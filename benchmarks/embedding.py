"""visual_embedding and scatter_visual beside the lookups and scatters of stock torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ceilings
from benchmarks.harness import Comparison, Context, Row, compare, difference
from vlmkernels import scatter_visual, visual_embedding, visual_index

PLACEHOLDER = 151655


@dataclass
class Inputs:
    """A pack of S tokens with n visual ones in a few runs, as images lie."""

    ids: Tensor  # int64 [S]
    weight: Tensor  # [V, h]
    visual: Tensor  # [n, h]
    index: Tensor  # int32 [S], row of visual or -1
    mask: Tensor  # bool [S]
    positions: Tensor  # int64 [n]
    dout: Tensor  # [S, h]

    @property
    def row_bytes(self) -> int:
        return self.weight.shape[1] * self.weight.element_size()


def make(tokens: int, hidden: int, vocabulary: int, device: str) -> Inputs:
    """75% visual tokens in eight runs, bf16."""
    generator = torch.Generator().manual_seed(0)
    placeholder = min(PLACEHOLDER, vocabulary - 1)
    ids = torch.randint(0, placeholder, (tokens,), generator=generator)
    shares = [1024, 256, 2048, 512, 4096, 1444, 768, 2140]  # of 16,384, with text between
    start = 0
    for share in shares:
        start += tokens // 32
        ids[start : start + share * tokens // 16384] = placeholder
        start += share * tokens // 16384
    index = visual_index(ids, placeholder)
    count = int(index.max()) + 1

    def random(*shape: int) -> Tensor:
        out = torch.empty(*shape, dtype=torch.bfloat16, device=device)
        return out.normal_(0, 0.02)

    mask = (index >= 0).to(device)
    return Inputs(
        ids=ids.to(device),
        weight=random(vocabulary, hidden),
        visual=random(count, hidden),
        index=index.to(device),
        mask=mask,
        positions=mask.nonzero().squeeze(1),
        dout=random(tokens, hidden),
    )


Place = Callable[[Tensor, Tensor], Tensor]


def places(x: Inputs) -> dict[str, Place]:
    """Ways to put visual rows into a fresh embedding [S, h]; those that may write into it do."""
    whole = x.mask[:, None].expand(-1, x.weight.shape[1])
    rank = (x.mask.cumsum(0) - 1).clamp_min(0)

    def boolean(embeddings: Tensor, visual: Tensor) -> Tensor:
        embeddings[x.mask] = visual
        return embeddings

    return {
        "masked_scatter": lambda e, v: e.masked_scatter(whole, v),
        "index_put by a boolean mask": boolean,
        "index_put by positions": lambda e, v: e.index_put_((x.positions,), v),
        "index_copy": lambda e, v: e.index_copy_(0, x.positions, v),
        "where and gather": lambda e, v: torch.where(x.mask[:, None], v[rank], e),
    }


def _megatron_bridge(x: Inputs) -> Tensor:
    """Lookup, [S, 1, h] <-> [1, S, h] transposes around masked_scatter, as Megatron-Bridge does."""
    embeddings = F.embedding(x.ids[None], x.weight).transpose(0, 1).contiguous()
    embeddings = embeddings.transpose(0, 1).contiguous()
    mask = x.mask[None, :, None].expand_as(embeddings)
    embeddings = embeddings.masked_scatter(mask, x.visual)
    return embeddings.transpose(0, 1).contiguous().squeeze(1)


def _same(theirs: Any, ours: Any) -> str | None:
    """Forward and dvisual move bits; dweight is a sum, compared by norm."""
    if isinstance(ours, Tensor):
        theirs, ours = (theirs,), (ours,)
    return difference(theirs, ours, 1e-2)


def _no_grad(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return torch.no_grad()(run)


def _graph(build: Callable[[], Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> Callable:
    """A backward pass to be timed alone: the graph is built once and kept."""
    out = build()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def forward(x: Inputs, context: Context) -> Iterator[Comparison]:
    tokens = x.ids.shape[0]
    traffic = 2 * tokens * x.row_bytes  # every row read once and written once
    common: dict[str, Any] = dict(
        shape=_shape(x), dtype="bfloat16", check=_same, ceilings=ceilings.copy(traffic, context)
    )
    cuda = context.device == "cuda"

    def looked_up(place: Place) -> Callable[[], Tensor]:
        return _no_grad(lambda: place(F.embedding(x.ids, x.weight), x.visual))

    peers = {f"F.embedding, {name}": looked_up(place) for name, place in places(x).items()}
    if cuda:
        peers["Megatron-Bridge's sequence"] = _no_grad(lambda: _megatron_bridge(x))
    yield Comparison(
        op="visual_embedding, forward",
        ours=_no_grad(lambda: visual_embedding(x.ids, x.weight, x.visual, x.index)),
        peers=peers,
        bar=(5.0 if cuda else 2.0) if context.has_bars else None,
        ceiling_bar=(90.0 if cuda else 85.0) if context.has_bars else None,
        **common,
    )
    embeddings = F.embedding(x.ids, x.weight)

    def out_of_place(place: Place) -> Callable[[], Tensor]:
        copies = place is not functions["masked_scatter"] and place is not functions[gather]
        source = embeddings.clone if copies else (lambda: embeddings)
        return _no_grad(lambda: place(source(), x.visual))

    functions, gather = places(x), "where and gather"
    yield Comparison(
        op="scatter_visual, forward",
        ours=_no_grad(lambda: scatter_visual(embeddings, x.visual, x.index)),
        peers={name: out_of_place(place) for name, place in functions.items()},
        bar=1.8 if context.has_bars else None,
        ceiling_bar=90.0 if context.has_bars else None,
        **common,
    )


def backward(x: Inputs, context: Context) -> Iterator[Comparison]:
    """Of the lookup with and without the table's gradient, and of the scatter."""
    visual_rows, tokens = x.visual.shape[0], x.ids.shape[0]
    bar = 2.5 if context.has_bars and context.device == "cpu" else None
    frozen, weight = x.weight.detach(), x.weight.detach().requires_grad_()
    visual = x.visual.detach().requires_grad_()
    # Written whole, the words' gradients read once.
    dense = (x.weight.shape[0] + tokens - visual_rows) * x.row_bytes
    gather = 2 * visual_rows * x.row_bytes  # read and written once

    def lookup(table: Tensor, leaves: tuple[Tensor, ...], place: Place | None) -> Callable:
        """The backward pass of ours, or of a lookup and `place`."""
        if place is None:
            return _graph(lambda: visual_embedding(x.ids, table, visual, x.index), leaves, x.dout)
        return _graph(lambda: place(F.embedding(x.ids, table), visual), leaves, x.dout)

    for op, used, leaves, traffic in (
        ("visual_embedding, backward, frozen table", frozen, (visual,), gather),
        ("visual_embedding, backward", weight, (weight, visual), gather + dense),
    ):
        yield Comparison(
            op=op,
            shape=_shape(x),
            dtype="bfloat16",
            ours=lookup(used, leaves, None),
            peers={
                f"of F.embedding, {name}": lookup(used, leaves, place)
                for name, place in places(x).items()
            },
            ceilings=ceilings.copy(traffic, context),
            check=_same,
            bar=bar,
        )
    yield _into_main_grad(x, context, bar)
    embeddings = F.embedding(x.ids, x.weight).requires_grad_()
    both = (embeddings, visual)

    def scattered(place: Place) -> Callable:
        return _graph(lambda: place(embeddings.clone(), visual), both, x.dout)

    yield Comparison(
        op="scatter_visual, backward",
        shape=_shape(x),
        dtype="bfloat16",
        ours=_graph(lambda: scatter_visual(embeddings, visual, x.index), both, x.dout),
        peers={f"of {name}": scattered(place) for name, place in places(x).items()},
        # All rows read, all rows and the visual ones written, zeros among them.
        ceilings=ceilings.copy((2 * tokens + visual_rows) * x.row_bytes, context),
        check=_same,
        bar=bar,
    )


def _into_main_grad(x: Inputs, context: Context, bar: float | None) -> Comparison:
    """What a Megatron trainer needs: the table's gradient added to a float32 buffer."""
    weight = x.weight.detach().requires_grad_()
    visual = x.visual.detach().requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    theirs = torch.zeros_like(weight, dtype=torch.float32)
    ours = _graph(
        lambda: visual_embedding(x.ids, weight, visual, x.index, weight_grad="main_grad"),
        (weight, visual),
        x.dout,
    )

    def added(place: Place) -> Callable:
        backward = _graph(
            lambda: place(F.embedding(x.ids, weight), visual), (weight, visual), x.dout
        )

        def run() -> Tensor:
            dweight, dvisual = backward()
            theirs.add_(dweight)
            return dvisual

        return run

    def same(dvisual: Tensor, of_ours: Tensor) -> str | None:
        """Asked after the first run of ours and of each peer: what they added too."""
        wrong = _same((theirs, dvisual), (weight.main_grad, of_ours))
        theirs.zero_()
        return wrong

    words, rows = int((~x.mask).sum()), x.visual.shape[0]
    different = int(x.ids[~x.mask].unique().numel())
    # Gradients read, dvisual written, the table's rows that there are read and written in float32.
    traffic = (words + 2 * rows) * x.row_bytes + 2 * different * 2 * x.row_bytes
    return Comparison(
        op="visual_embedding, backward into main_grad",
        shape=_shape(x),
        dtype="bfloat16, float32 main_grad",
        ours=lambda: ours()[1],
        peers={f"of F.embedding, {name}; add": added(place) for name, place in places(x).items()},
        ceilings=ceilings.copy(traffic, context),
        check=same,
        bar=bar,
    )


# ---- in a training step --------------------------------------------------------------------------


def in_a_step(packs: list[tuple[Tensor, Tensor]], vocabulary: int, hidden: int) -> Comparison:
    """Forward and backward of the embeddings of one step, float32, the table trained: as a trainer
    with Megatron's main_grad has it, by one kernel and by torch's ops in Megatron-Bridge's order.

    packs: input_ids and visual_index [S] of each microbatch.
    """
    weight = torch.randn(vocabulary, hidden).requires_grad_()
    weight.main_grad = torch.zeros(vocabulary, hidden)  # type: ignore[attr-defined]
    theirs = torch.zeros(vocabulary, hidden)
    cases = []
    for ids, index in packs:
        visual = torch.randn(int((index >= 0).sum()), hidden).requires_grad_()
        cases.append((ids, index, index >= 0, visual, torch.randn(len(ids), hidden)))

    def ours() -> tuple[Tensor, ...]:
        gradients = []
        for ids, index, _, visual, dout in cases:
            out = visual_embedding(ids, weight, visual, index, weight_grad="main_grad")
            gradients.append(torch.autograd.grad(out, (weight, visual), dout)[1])
        return tuple(gradients)

    def bridge() -> tuple[Tensor, ...]:
        gradients = []
        for ids, _, mask, visual, dout in cases:
            x = F.embedding(ids[None], weight).transpose(0, 1).contiguous()
            x = x.transpose(0, 1).contiguous()
            x = x.masked_scatter(mask[None, :, None].expand_as(x), visual)
            x = x.transpose(0, 1).contiguous().squeeze(1)
            dweight, dvisual = torch.autograd.grad(x, (weight, visual), dout)
            theirs.add_(dweight)
            gradients.append(dvisual)
        return tuple(gradients)

    def same(of_bridge: tuple[Tensor, ...], of_ours: tuple[Tensor, ...]) -> str | None:
        """Asked after the first run of each: what they added too."""
        return _same((theirs, *of_bridge), (weight.main_grad, *of_ours))

    tokens = sum(len(ids) for ids, _ in packs)
    return Comparison(
        op="visual embedding in a training step",
        shape=f"{len(packs)} packs, {tokens} tokens in all, h {hidden}, table of {vocabulary}",
        dtype="float32",
        ours=ours,
        peers={"F.embedding, transposes, masked_scatter, add": bridge},
        check=same,
    )


def repeated(x: Inputs, ids: Tensor, what: str, context: Context) -> Comparison:
    """The table's gradient where few ids stand at many positions: their rows are sums of many."""
    index = torch.full(ids.shape, -1, dtype=torch.int32, device=ids.device)
    # On the CPU torch adds in the gradient's type, which in bfloat16 is another result.
    dtype = torch.bfloat16 if context.device == "cuda" else torch.float32
    weight, dout = x.weight.detach().to(dtype).requires_grad_(), x.dout.to(dtype)
    # Written whole; gradients read once.
    dense = (weight.shape[0] + len(ids)) * weight.shape[1] * weight.element_size()
    return Comparison(
        op=f"visual_embedding, backward, {what}",
        shape=f"[{len(ids)}, {x.weight.shape[1]}], text, table of {x.weight.shape[0]}",
        dtype=str(dtype)[6:],
        ours=_graph(lambda: visual_embedding(ids, weight, None, index), (weight,), dout),
        peers={"of F.embedding": _graph(lambda: F.embedding(ids, weight), (weight,), dout)},
        ceilings=ceilings.copy(dense, context),
        check=_same,
    )


def repetitions(x: Inputs, context: Context) -> Iterator[Comparison]:
    """Text as it is, by Zipf's law, and all of one id, as padding has it."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, tokens = x.weight.shape[0], x.ids.shape[0]
    weights = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    zipf = torch.multinomial(weights, tokens, replacement=True, generator=generator)
    yield repeated(x, zipf.to(x.ids.device), "ids by Zipf's law", context)
    yield repeated(x, torch.zeros_like(x.ids), "one id", context)


def _shape(x: Inputs) -> str:
    tokens, share = x.ids.shape[0], x.visual.shape[0] / x.ids.shape[0]
    return f"[{tokens}, {x.weight.shape[1]}], {share:.0%} visual, table of {x.weight.shape[0]}"


PARTS = {"forward": forward, "backward": backward, "repetitions": repetitions}


def parts(context: Context) -> list[str]:
    """A process each: gradients of gigabytes must not stay for the next."""
    return list(PARTS)


def rows(context: Context) -> Iterator[Row]:
    sizes = (2048, 512, 8192) if context.quick else (16384, 3584, 152064)
    inputs = make(*sizes, context.device)
    for part in [context.part] if context.part else parts(context):
        for comparison in PARTS[part](inputs, context):
            yield compare(comparison, context)
