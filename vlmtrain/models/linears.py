"""What low-rank adapters cost: multiplications and parameters, as `models/lora.py` lays them out.

An adapter of rank r on a linear in -> out multiplies by A [r, in] and B [out, r]. The linear's own
weight is frozen: its backward pass is the input's gradient alone. Where nothing below a linear
learns, its input needs no gradient either: so the lowest adapted layer of a model is cheaper than
the others, and what lies below its first adapter has no backward pass at all.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from vlmtrain.core.config import LoraSection
from vlmtrain.core.errors import UserError
from vlmtrain.core.spec import ModelSpec


@dataclass(frozen=True)
class Linear:
    """A fused linear of a layer, in the order in which a layer runs them."""

    name: str  # megatron-core's
    inputs: int
    modules: dict[str, int]  # Hugging Face name -> output rows

    @property
    def weights(self) -> int:
        return self.inputs * sum(self.modules.values())


def layer_linears(spec: ModelSpec, *, vision: bool) -> list[Linear]:
    """The four linears of a layer."""
    if vision:
        wide, f = spec.vision.hidden_size, spec.vision.intermediate_size
        gated = spec.vision.gated
        return [
            Linear("linear_qkv", wide, {"qkv": 3 * wide}),
            Linear("linear_proj", wide, {"proj": wide}),
            Linear("linear_fc1", wide, {"gate_proj": f, "up_proj": f} if gated else {"fc1": f}),
            Linear("linear_fc2", f, {"down_proj" if gated else "fc2": wide}),
        ]
    h, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return [
        Linear("linear_qkv", h, {"q_proj": q, "k_proj": kv, "v_proj": kv}),
        Linear("linear_proj", q, {"o_proj": h}),
        Linear("linear_fc1", h, {"gate_proj": f, "up_proj": f}),
        Linear("linear_fc2", f, {"down_proj": h}),
    ]


def adapted(linear: Linear, lora: LoraSection, *, vision: bool) -> list[int]:
    """Output rows of the adapted modules of a linear."""
    if not lora.rank or (vision and not lora.vision):
        return []
    return [rows for name, rows in linear.modules.items() if name in lora.targets]


def adapters_learn(spec: ModelSpec, lora: LoraSection, *, vision: bool) -> bool:
    """Whether a tower has any adapters."""
    linears = layer_linears(spec, vision=vision)
    return any(adapted(linear, lora, vision=vision) for linear in linears)


@dataclass(frozen=True)
class LayerProducts:
    """Multiply-accumulates per row of a layer's input, adapters included."""

    forward: int
    mlp_forward: int  # contained in forward
    backward: int
    attention_learns: bool  # whether attention has a backward pass


def layer_products(
    spec: ModelSpec, lora: LoraSection, *, vision: bool, below: bool
) -> LayerProducts:
    """Of one layer with frozen weights; `below`: whether its input needs a gradient."""
    forward = mlp = backward = 0
    needs, attention = below, False
    for linear in layer_linears(spec, vision=vision):
        rows = adapted(linear, lora, vision=vision)
        into, out_of = lora.rank * linear.inputs * len(rows), lora.rank * sum(rows)
        forward += linear.weights + into + out_of
        if linear.name in ("linear_fc1", "linear_fc2"):
            mlp += linear.weights + into + out_of
        # the weights of A and B, and the gradient between them
        backward += into + 2 * out_of
        if needs:
            backward += linear.weights + into
        needs = needs or bool(rows)
        if linear.name == "linear_qkv":
            attention = needs
    return LayerProducts(forward, mlp, backward, attention)


def adapter_parameters(
    spec: ModelSpec, lora: LoraSection, tensor: int, *, vision: bool
) -> dict[str, list[int]]:
    """Sizes of A and B, one after the other, below each linear of a layer, on one
    tensor-parallel rank: column-parallel linears split B, row-parallel ones split A."""
    result = {}
    for linear in layer_linears(spec, vision=vision):
        column = linear.name in ("linear_qkv", "linear_fc1")
        sizes = []
        for rows in adapted(linear, lora, vision=vision):
            a, b = lora.rank * linear.inputs, lora.rank * rows
            sizes += [a, b // tensor] if column else [a // tensor, b]
        result[linear.name] = sizes
    return result


def check_targets(lora: LoraSection, spec: ModelSpec) -> None:
    """Raise UserError for targets that this model does not have, with the nearest one."""
    towers = (False, True) if lora.vision else (False,)
    known = {
        name
        for vision in towers
        for linear in layer_linears(spec, vision=vision)
        for name in linear.modules
    }
    for target in lora.targets:
        if target not in known:
            near = difflib.get_close_matches(target, known, 1, 0.0)[0]
            raise UserError(
                f"--lora.targets has {target}, which no linear of this model is called; the "
                f"nearest is {near} (known: {', '.join(sorted(known))})"
            )
    if not lora.targets:
        raise UserError(f"--lora.targets is empty; name some of {', '.join(sorted(known))}")
