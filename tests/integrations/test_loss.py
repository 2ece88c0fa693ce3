"""The loss of an enabled model without logits, and its patch embedding without a convolution."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import RUN_SEED
from tests.integrations.test_transformers import FAMILIES, assert_same_step, batch, sample, step
from tests.kernels.test_embedding import _Calls
from tests.parity import reference as ref
from vlmkernels.integrations import transformers as hf


@pytest.fixture(params=FAMILIES)
def plain(request: pytest.FixtureRequest) -> Any:
    model = ref.make_model(request.param, seed=RUN_SEED)
    model.set_attn_implementation("sdpa")
    return model.train()


def compare(plain: Any, ours: Any, inputs: dict[str, Any], calls: int = 1) -> None:
    """The same loss and gradients; `calls`: of linear_cross_entropy."""
    want = step(plain, inputs)
    with _Calls() as seen:
        got = step(ours, inputs)
    assert seen.names.count("linear_cross_entropy") == calls
    assert_same_step(got, want)


COUNTS: dict[str, dict[str, Any]] = {
    "mean": {},
    "count": {"num_items_in_batch": 7},
    "counted": {"num_items_in_batch": torch.tensor(31)},
    "ignored": {"ignore_index": 17, "num_items_in_batch": torch.tensor([5.0])},
    "tuple": {"return_dict": False, "use_cache": False},
}


@pytest.mark.parametrize("name", COUNTS)
def test_loss_and_gradients(plain: Any, name: str) -> None:
    ours = hf.enable(copy.deepcopy(plain))
    inputs = {**batch([sample("image"), sample("text")]), **COUNTS[name]}
    if name == "ignored":
        inputs["labels"][inputs["labels"] == -100] = 17
    if name != "tuple":
        return compare(plain, ours, inputs)
    want, by_argument = plain(**inputs), ours(**inputs)
    ours.config.return_dict = inputs.pop("return_dict")
    for got in (by_argument, ours(**inputs)):
        assert type(got) is tuple and len(got) == len(want) and got[1] is None
        torch.testing.assert_close(got[0], want[0])


@pytest.mark.parametrize("count", [0, torch.tensor(0)])
def test_no_label_at_all(plain: Any, count: Any) -> None:
    """A loss of NaN and gradients of 0, as transformers has them: weights stay finite."""
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("text")])
    inputs = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    for model in (plain, ours):
        model.zero_grad()
        loss = model(**inputs, num_items_in_batch=count).loss
        loss.backward()
        assert loss.isnan()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_shifted_labels(plain: Any) -> None:
    inputs = batch([sample("text")])
    shifted = inputs["labels"].roll(-1)
    compare(plain, hf.enable(copy.deepcopy(plain)), {**inputs, "shift_labels": shifted})


def test_when_there_are_logits(plain: Any) -> None:
    """Liger's convention: none in training with labels, unless asked for."""
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("image")])
    want = plain(**inputs)
    out = ours(**inputs)
    assert out.logits is None and "logits" not in out and type(out) is type(want)
    torch.testing.assert_close(ours(**inputs, skip_logits=False).logits, want.logits)
    torch.testing.assert_close(ours(**inputs, logits_to_keep=0).loss, want.loss)
    ours.eval()
    torch.testing.assert_close(ours(**inputs).logits, want.logits)
    out = ours(**inputs, skip_logits=True)
    torch.testing.assert_close(out.loss, want.loss)
    assert out.logits is None
    inputs.pop("labels")
    torch.testing.assert_close(ours.train()(**inputs).logits, want.logits)
    with pytest.raises(ValueError, match="skip_logits is True, but the loss needs logits here"):
        ours(**inputs, skip_logits=True)


@pytest.mark.parametrize("change", ["loss", "hook", "option", "bias"])
def test_what_needs_logits_has_them(plain: Any, change: str) -> None:
    ours = hf.enable(copy.deepcopy(plain), loss=change != "option")
    for model in (plain, ours):
        if change == "loss":
            model.loss_function = lambda logits, labels, **_: logits.float().square().mean()
        elif change == "hook":
            model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
        elif change == "bias":
            model.lm_head.bias = nn.Parameter(torch.ones(ref.VOCAB) / 3)
    inputs = batch([sample("image")])  # no padding, whose logits differ
    compare(plain, ours, inputs, calls=0)
    torch.testing.assert_close(ours(**inputs).logits, plain(**inputs).logits)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        (dict(target_modules=["q_proj"]), 1),
        (dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), 1),
        (dict(target_modules=["q_proj", "lm_head"]), 0),
    ],
    ids=["frozen", "saved", "adapted"],
)
def test_peft(plain: Any, options: dict[str, Any], calls: int) -> None:
    """A frozen head, one that peft trains whole, and one with an adapter: it keeps its logits."""
    peft = pytest.importorskip("peft", reason="adapters need peft")
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(plain, peft.LoraConfig(r=4, init_lora_weights=False, **options))
    ours = hf.enable(copy.deepcopy(wrapped))
    inputs = batch([sample("image"), sample("text")])
    compare(wrapped, ours, inputs, calls)
    if options.get("modules_to_save"):
        with torch.no_grad():
            saved = ours.base_model.model.lm_head
            saved.modules_to_save["default"].weight.mul_(2)
            different = ours(**inputs).loss
            with ours.disable_adapter(), wrapped.disable_adapter():
                torch.testing.assert_close(ours(**inputs).loss, wrapped(**inputs).loss)
        assert not torch.allclose(different, wrapped(**inputs).loss)


def test_autocast(plain: Any) -> None:
    """Products of bfloat16 over float32 weights; gradients arrive in float32."""
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("image")])
    exact = step(copy.deepcopy(plain), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, got = step(plain, inputs), step(ours, inputs)
    for name in ("loss", "lm_head.weight"):
        assert got[name].dtype == torch.float32
        error = (theirs[name] - exact[name]).norm()
        if name == "loss":  # one number: transformers' may be right by chance; bfloat16 has 8 bits
            error = torch.maximum(error, 2**-9 * exact[name])
        assert (got[name] - exact[name]).norm() <= 2 * error, name


class _Convolutions(_Calls):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.names.append("convolution")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patch_embedding(plain: Any, dtype: torch.dtype) -> None:
    ours = hf.enable(copy.deepcopy(plain)).to(dtype)
    exact, theirs = copy.deepcopy(plain).double(), plain.to(dtype)
    pixels = torch.randn(24, 1176)
    results: list[tuple[Tensor, Tensor, int]] = []
    for model in (exact, theirs, ours):
        embed = model.model.visual.patch_embed
        with _Convolutions() as seen:
            out = embed(pixels.to(torch.float64 if model is exact else torch.float32))
        out.square().sum().backward()
        results.append((out.detach(), embed.proj.weight.grad, len(seen.names)))
    (out, grad, _), (their_out, their_grad, convolutions), (our_out, our_grad, none) = results
    assert convolutions > 0 and none == 0
    assert (our_out - out).norm() <= 2 * (their_out - out).norm()
    assert (our_grad - grad).norm() <= 2 * (their_grad - grad).norm()
    assert ours.state_dict().keys() == plain.state_dict().keys()
