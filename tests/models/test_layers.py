"""The towers' MLP on the CPU computes the activation that its config names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlmtrain.models.common.configs import quick_gelu
from vlmtrain.models.common.layers import TowerMLP


class Product(torch.nn.Linear):
    """As megatron-core's linears: the bias is handed on."""

    skip_bias_add = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return F.linear(x, self.weight), self.bias


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [F.silu, F.gelu, quick_gelu, torch.tanh])
def test_the_activation_is_the_configured_one(activation: Any, gated: bool) -> None:
    torch.manual_seed(0)
    mlp = TowerMLP.__new__(TowerMLP)
    torch.nn.Module.__init__(mlp)
    mlp.config = SimpleNamespace(
        activation_func=activation,
        gated_linear_unit=gated,
        bias_activation_fusion=False,
        use_te_activation_func=False,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
    )
    mlp.activation_func = activation
    mlp.linear_fc1, mlp.linear_fc2 = Product(6, 2 * 10 if gated else 10), Product(10, 6)
    x = torch.randn(7, 6)
    middle = F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias)
    if gated:
        gate, up = middle.chunk(2, -1)
        middle = activation(gate) * up
    else:
        middle = activation(middle)
    output, bias = mlp(x)
    assert bias is mlp.linear_fc2.bias
    torch.testing.assert_close(output, F.linear(middle, mlp.linear_fc2.weight))
