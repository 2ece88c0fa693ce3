"""What low-rank adapters cost: multiplications and parameters, as `models/lora.py` lays them out.

An adapter of rank r on a linear in -> out multiplies by A [r, in] and B [out, r]. The linear's own
weight is frozen: its backward pass is the input's gradient alone. Where nothing below a linear
learns, its input needs no gradient either: so the lowest adapted layer of a model is cheaper than
the others, and what lies below its first adapter has no backward pass at all.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields

from vlmtrain.core.config import FreezeSection, LoraSection, check_ranges
from vlmtrain.core.errors import UserError
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.common.table import Linear
from vlmtrain.models.family import table_of


def adapted(linear: Linear, lora: LoraSection, *, vision: bool) -> list[int]:
    """Output rows of the adapted modules of a linear."""
    if not lora.rank or (vision and not lora.vision):
        return []
    return list(linear.adapted(lora.targets).values())


@dataclass(frozen=True)
class LayerProducts:
    """Multiply-accumulates per row of a layer's input, adapters included."""

    forward: int
    mlp_forward: int  # contained in forward
    backward: int
    forward_behind: int  # of forward, what is behind the attention; of backward
    backward_behind: int
    attention_learns: bool  # whether attention has a backward pass


def layer_products(
    spec: ModelSpec, lora: LoraSection, *, vision: bool, below: bool
) -> LayerProducts:
    """Of one layer with frozen weights; `below`: whether its input needs a gradient."""
    forward = mlp = backward = queries = queries_backward = 0
    needs, attention = below, False
    for linear in table_of(spec).layer(vision).linears:
        rows = adapted(linear, lora, vision=vision)
        into, out_of = lora.rank * linear.inputs * len(rows), lora.rank * sum(rows)
        forward += linear.weights + into + out_of
        if linear.is_mlp:
            mlp += linear.weights + into + out_of
        # the weights of A and B, and the gradient between them
        backward += into + 2 * out_of
        if needs:
            backward += linear.weights + into
        needs = needs or bool(rows)
        if linear.groups:  # queries, keys and values: attention follows
            attention, queries, queries_backward = needs, forward, backward
    behind = forward - queries, backward - queries_backward
    return LayerProducts(forward, mlp, backward, *behind, attention)


def adapter_parameters(spec: ModelSpec, lora: LoraSection, tensor: int, vision: bool) -> list[int]:
    """Sizes of A and B of a layer's adapters on one tensor-parallel rank, in megatron-core's order
    of registration: column-parallel linears split B, row-parallel ones split A."""
    sizes = []
    for linear in table_of(spec).layer(vision).registered():
        if isinstance(linear, Linear):
            for rows in adapted(linear, lora, vision=vision):
                a, b = lora.rank * linear.inputs, lora.rank * rows
                sizes += [a, b // tensor] if linear.split == 0 else [a // tensor, b]
    return sizes


def check_lora(lora: LoraSection, freeze: FreezeSection, spec: ModelSpec) -> None:
    """Raise UserError where nothing is left to train, for settings that can't be used, for targets
    that this model does not have, with the nearest one, and for adapters in a part that is to keep
    its weights."""
    check_ranges(lora, "--lora.")
    given = [f"--lora.{one.name}" for one in fields(lora) if getattr(lora, one.name) != one.default]
    if not lora.rank:
        if given:
            raise UserError(
                f"{' and '.join(given)} need --lora.rank, which is 0, so that all weights would be "
                "trained; set it, or leave the others out"
            )
        if freeze.vision and freeze.merger and freeze.language:
            raise UserError(
                "every part is frozen, there is nothing to train; drop one of --freeze.vision, "
                "--freeze.merger, --freeze.language"
            )
        return
    if not 0 < lora.alpha < math.inf or not 0 <= lora.dropout < 1:
        raise UserError(
            f"--lora.alpha {lora.alpha}, --lora.dropout {lora.dropout}: alpha must be above 0 and "
            "finite, dropout in [0, 1)"
        )
    known = table_of(spec).targets(lora.vision)
    for target in lora.targets:
        if target not in known and spec.num_experts and target.endswith("_proj"):
            raise UserError(
                f"--lora.targets has {target}, and adapters on experts are not supported; pass "
                "--lora.targets q_proj k_proj v_proj o_proj"
            )
        if target not in known:
            near = difflib.get_close_matches(target, known, 1, 0.0)[0]
            raise UserError(
                f"--lora.targets has {target}, which no linear of this model is called; the "
                f"nearest is {near} (known: {', '.join(known)})"
            )
    if not lora.targets:
        raise UserError(f"--lora.targets is empty; name some of {', '.join(known)}")
    if freeze.vision and lora.vision:
        raise UserError(
            "--freeze.vision and --lora.vision: one keeps the vision tower's weights, the other "
            "trains adapters on them; leave one out"
        )
    table = table_of(spec)
    tower = {m.rpartition(".")[2] for linear in table.vision_layer.linears for m in linear.modules}
    if lora.vision and not tower & set(lora.targets):
        raise UserError(
            f"--lora.vision puts adapters on {', '.join(sorted(tower))} of this model's vision "
            f"tower, and --lora.targets has none of them; name some of these too"
        )
    text = [target for target in lora.targets if target in table.targets(False)]
    if freeze.language and text:
        raise UserError(
            f"--freeze.language keeps the language model's weights, and --lora.targets has "
            f"{', '.join(text)}, which are there; leave one out"
        )
