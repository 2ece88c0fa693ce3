"""The table of weights against the modules of the transformers models."""

from __future__ import annotations

import pytest

from tests.parity.reference import make_model
from vlmtrain.checkpoint.mapping import canonical_name
from vlmtrain.models.common.table import Experts, Linear, Lookup
from vlmtrain.models.family import FAMILIES, parse_spec, table_of


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_model_is_in_the_table_once(family: str, tied: bool) -> None:
    model = make_model(family, tied=tied)
    spec = parse_spec(model.config.to_dict())
    real = {canonical_name(name): list(t.shape) for name, t in model.named_parameters()}
    real["visual.patch_embed.proj.weight"][1:] = [spec.vision.patch_dim]  # a Conv3d there
    table = {}
    for part, layers in table_of(spec).parts(spec):
        for layer in range(layers or 1):
            for item in part.items:
                for module, rows in item.modules.items():
                    name = canonical_name(part.hf.replace("{i}", str(layer)) + module)
                    if isinstance(item, Experts):
                        table[name] = [item.experts, rows, item.inputs]
                        continue
                    columns = [item.inputs] if isinstance(item, Linear | Lookup) else []
                    assert name + ".weight" not in table
                    table[name + ".weight"] = [rows, *columns]
                    if item.bias:
                        table[name + ".bias"] = [rows]
    assert table == real
