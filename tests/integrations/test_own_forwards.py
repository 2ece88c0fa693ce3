"""Forwards that are not transformers' own, and what wraps a model after enable(model)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from tests.integrations.test_transformers import batch, sample
from tests.kernels.numeric import assert_bitwise
from tests.parity import reference as ref
from vlmkernels.integrations import transformers as hf


@pytest.fixture
def model() -> Any:
    return ref.make_model("qwen3_vl").train()


def around(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return patched


PARTS = {
    "loss": lambda model: model,
    "embedding": lambda model: model.model,
    "vision": lambda model: model.model.visual.blocks[0].attn,
}


@pytest.mark.parametrize("way", ["subclass", "wrapped", "replaced"])
@pytest.mark.parametrize("part", PARTS)
def test_a_forward_of_ones_own_is_not_passed_over(
    model: Any, part: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = PARTS[part](model)
    kind = type(module)
    if way == "subclass":
        module.__class__ = type("Mine", (kind,), {"forward": around(kind.forward)})
    else:
        patched = around(kind.forward)
        if way == "replaced":
            vars(patched).pop("__wrapped__")
        monkeypatch.setattr(kind, "forward", patched)
    name = "Mine" if way == "subclass" else kind.__name__
    with pytest.raises(ValueError, match=f"{name}.forward is not .*; use enable.model, {part}=Fal"):
        hf.enable(model)
    hf.enable(model, **{part: False})
    assert model(**batch([sample("image")])).loss.isfinite()


def test_a_subclass_without_a_forward_is_taken(model: Any) -> None:
    model.__class__ = type("Mine", (type(model),), {})
    assert hf.enable(model)(**batch([sample("image")])).logits is None


def test_what_accelerate_wrapped_is_unwrapped_first(model: Any) -> None:
    plain, inputs = copy.deepcopy(model), batch([sample("text")])
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    accelerator.prepare(hf.enable(model))
    for change in (hf.disable, hf.enable):
        with pytest.raises(ValueError, match="wrapped after enable.*keep_fp32_wrapper=False"):
            change(model)
    model(**inputs).loss.backward()
    hf.disable(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    with torch.no_grad():
        assert_bitwise("loss", model(**inputs).loss, plain(**inputs).loss)


def test_ids_of_32_bits(model: Any) -> None:
    inputs = batch([sample("image")])
    losses = [
        hf.enable(model)(**{**inputs, "input_ids": inputs["input_ids"].to(dtype)}).loss
        for dtype in (torch.int64, torch.int32)
    ]
    assert_bitwise("loss", *losses)
