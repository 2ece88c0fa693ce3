"""The product of many experts against one expert after another in float64; the load-balancing loss
of layers on several stages against transformers'."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.released import released_spec
from vlmtrain.core.batch import empty_pack
from vlmtrain.models import message
from vlmtrain.models.common.balance import Routing, aux_loss, routed
from vlmtrain.models.common.experts import _Product

COUNTS = [3, 0, 5, 1]  # an expert that no row has chosen


@pytest.mark.parametrize("learns", ["main_grad", "grad", "nothing"])
def test_product(learns: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(COUNTS), 7, generator=generator, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(len(COUNTS), 6, 7, generator=generator))
    grad = torch.randn(sum(COUNTS), 6, generator=generator)
    before = torch.randn(weight.shape, generator=generator)
    weight.requires_grad_(learns != "nothing")
    if learns == "main_grad":
        weight.main_grad = before.clone()  # type: ignore[attr-defined]
    y = _Product.apply(x, weight, COUNTS)
    kept = y.grad_fn.saved_tensors
    assert (kept[0] is None) == (learns == "nothing")  # the input is kept for the weight alone
    y.backward(grad)

    x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    rows = x64.split(COUNTS)
    want = torch.cat([r @ w.t() for r, w in zip(rows, w64, strict=True)])
    want.backward(grad.double())
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.double(), want, **close)
    torch.testing.assert_close(x.grad.double(), x64.grad, **close)
    if learns == "main_grad":
        added = weight.main_grad - before  # type: ignore[attr-defined]
        torch.testing.assert_close(added.double(), w64.grad, **close)
        assert weight.grad.is_sparse and weight.grad._nnz() == 0  # what Megatron's hook adds
    elif learns == "grad":
        torch.testing.assert_close(weight.grad.double(), w64.grad, **close)
        assert not weight.grad[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_balance_loss(dtype: torch.dtype, seed: int) -> None:
    """A message of any type carries the sums and their gradient bit for bit."""
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

    spec = dataclasses.replace(released_spec("qwen3_vl_moe-30b"), num_layers=3, num_experts=6)
    pack = dataclasses.replace(empty_pack(11, 0, 1, dtype), pad_tokens=4)
    logits = [torch.randn(11, 6, requires_grad=True) for _ in range(3)]
    mask = torch.arange(11) < 7
    want = load_balancing_loss_func(tuple(logits), 6, 2, mask[None])
    expected = torch.autograd.grad(want, logits)

    sums = torch.zeros(2, 6)
    for layer in logits:
        hidden = torch.randn(5, 1, 3, dtype=dtype, requires_grad=True)  # an odd offset behind it
        joined = message.join([hidden, message.from_sums(sums, dtype)])
        _, part = message.split(joined, [(5, 3), (1, 4 * 6)])
        arrived = Routing.of(message.to_sums(part), pack, 0, 1)
        assert torch.equal(arrived.sums, sums) and torch.equal(arrived.padding, ~mask)
        chosen = torch.zeros(11, 6, dtype=torch.bool).scatter(1, layer.topk(2).indices, True)
        sums = arrived.sums + routed(layer, chosen, arrived.padding)
    loss = aux_loss(Routing(sums, arrived.padding), pack, spec, sequence=False)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    for ours, theirs in zip(torch.autograd.grad(loss, logits), expected, strict=True):
        assert theirs[:7].all()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
