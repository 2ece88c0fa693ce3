"""A CPU's peak: the best of products up to the model's own, so that no HFU is above 100%."""

from __future__ import annotations

import math

import pytest
import torch

from tests.released import released_spec
from vlmtrain.models.flops import utilization
from vlmtrain.plan import detect
from vlmtrain.plan.detect import Product


def matrix_units(product: Product, dtype: torch.dtype = torch.bfloat16) -> float:
    """Seconds on a machine whose rate grows with the shortest side up to 2,048, as on AMX: 0.4
    TFLOP/s at 512, 1.6 there."""
    return 2 * math.prod(product) / (4e11 * min(2048, *product) / 512)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", ["qwen2_vl-2b", "qwen2_5_vl-3b", "qwen2_5_vl-7b"])
def test_no_product_of_a_step_is_above_the_peak(name: str, tensor: int) -> None:
    """A step that did nothing but one kind of product: its HFU."""
    spec, pack = released_spec(name), 4096
    measured = detect.products(spec, pack, tensor)
    assert max(map(math.prod, measured)) <= 4096**3, "more would take long on a slow machine"
    peak, at = detect.best_rate(measured, torch.bfloat16, matrix_units)
    assert at in measured
    width = spec.num_heads * spec.head_dim
    for own in (
        (pack, spec.hidden_size, spec.intermediate_size // tensor),
        (pack, spec.hidden_size, width // tensor),
        (pack, spec.vision.hidden_size, spec.vision.intermediate_size // tensor),
        (pack, spec.vision.hidden_size, 3 * spec.vision.hidden_size // tensor),
    ):
        hfu = utilization(2 * math.prod(own), matrix_units(own), 1, peak)
        assert hfu <= 1 + 1e-9, f"{own}: {hfu:.0%}"


def test_a_small_model_is_measured_with_small_products() -> None:
    spec = released_spec("qwen2_vl-2b")
    assert detect.products(spec, 64, 1)[:2] == [(512, 512, 512), (64, 1536, 8960)]


def test_the_best_rate_of_this_machine() -> None:
    """FLOPs over seconds of what was measured, no more."""
    sizes: list[Product] = [(64, 64, 64), (128, 64, 32)]
    rate, at = detect.best_rate(sizes, torch.float32, lambda x, _: 2.0 if x == sizes[0] else 0.5)
    assert (rate, at) == (2 * 128 * 64 * 32 / 0.5, sizes[1])
    measured, _ = detect.best_rate(sizes, torch.float32)
    assert 1e6 < measured < 1e14
