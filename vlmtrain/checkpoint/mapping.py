"""The one table that maps Hugging Face tensors to Megatron tensors, and what to do on the way.

A row names the Hugging Face tensors (one or several), the Megatron tensor they make, and a
transform. `{i}` is the global layer number. The table knows nothing of tensor or pipeline
parallelism: `split` cuts a whole Megatron tensor for one rank, driven by the parameter itself.

Hugging Face names are those written to disk by every transformers release (`visual.*`,
`model.*`); names of transformers >= 4.52 in memory (`model.visual.*`,
`model.language_model.*`) are folded onto them by `canonical_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmtrain.errors import UserError
from vlmtrain.models.spec import ModelSpec


class WeightError(UserError):
    """A tensor or file of weights that does not fit; the message names it."""


@dataclass(frozen=True)
class Row:
    """One line of the table, with `{i}` filled in by `rows`."""

    hf: tuple[str, ...]
    megatron: str
    transform: str


# --- the table ---------------------------------------------------------------------------------
_T, _V = "model.layers.{i}.", "visual.blocks.{i}."
_MT, _MV = "language_model.decoder.layers.{i}.", "vision.blocks.layers.{i}."

_TEXT = [
    Row(("model.embed_tokens.weight",), "language_model.embedding.word_embeddings.weight", "vocab"),
    Row(("model.norm.weight",), "language_model.decoder.final_layernorm.weight", "same"),
]
_TEXT_HEAD = [Row(("lm_head.weight",), "language_model.output_layer.weight", "vocab")]
_TEXT_LAYER = [
    Row((_T + "input_layernorm.weight",), _MT + "input_layernorm.weight", "same"),
    *(
        Row(
            tuple(f"{_T}self_attn.{x}_proj.{kind}" for x in "qkv"),
            f"{_MT}self_attention.linear_qkv.{kind}",
            "text_qkv",
        )
        for kind in ("weight", "bias")
    ),
    Row((_T + "self_attn.o_proj.weight",), _MT + "self_attention.linear_proj.weight", "same"),
    Row((_T + "post_attention_layernorm.weight",), _MT + "pre_mlp_layernorm.weight", "same"),
    Row(
        (_T + "mlp.gate_proj.weight", _T + "mlp.up_proj.weight"),
        _MT + "mlp.linear_fc1.weight",
        "gate_up",
    ),
    Row((_T + "mlp.down_proj.weight",), _MT + "mlp.linear_fc2.weight", "same"),
]
_VISION = [Row(("visual.patch_embed.proj.weight",), "vision.patch_embed.weight", "patch_embed")] + [
    Row((f"visual.merger.{hf}.{kind}",), f"vision.{megatron}.{kind}", "same")
    for hf, megatron in (("mlp.0", "merger_fc1"), ("mlp.2", "merger_fc2"))
    for kind in ("weight", "bias")
]
_VISION_LAYER = [
    *(
        Row((f"{_V}attn.qkv.{kind}",), f"{_MV}self_attention.linear_qkv.{kind}", "vision_qkv")
        for kind in ("weight", "bias")
    ),
    *(
        Row((f"{_V}attn.proj.{kind}",), f"{_MV}self_attention.linear_proj.{kind}", "same")
        for kind in ("weight", "bias")
    ),
]
_VISION_MLP_GATED = [
    *(
        Row(
            (f"{_V}mlp.gate_proj.{kind}", f"{_V}mlp.up_proj.{kind}"),
            f"{_MV}mlp.linear_fc1.{kind}",
            "gate_up",
        )
        for kind in ("weight", "bias")
    ),
    *(
        Row((f"{_V}mlp.down_proj.{kind}",), f"{_MV}mlp.linear_fc2.{kind}", "same")
        for kind in ("weight", "bias")
    ),
]
_VISION_MLP_PLAIN = [
    Row((f"{_V}mlp.{fc}.{kind}",), f"{_MV}mlp.linear_{fc}.{kind}", "same")
    for fc in ("fc1", "fc2")
    for kind in ("weight", "bias")
]


def _vision_norms(kinds: Sequence[str]) -> tuple[list[Row], list[Row]]:
    layer = [
        Row((f"{_V}{hf}.{kind}",), f"{_MV}{megatron}.{kind}", "same")
        for hf, megatron in (("norm1", "input_layernorm"), ("norm2", "pre_mlp_layernorm"))
        for kind in kinds
    ]
    merger = [Row((f"visual.merger.ln_q.{k}",), f"vision.merger_norm.{k}", "same") for k in kinds]
    return layer, merger


def rows(spec: ModelSpec) -> Iterator[Row]:
    """Every row of a model, layer numbers filled in."""
    gated = spec.family == "qwen2_5_vl"
    layer_norms, merger_norm = _vision_norms(("weight",) if gated else ("weight", "bias"))
    yield from _TEXT
    if not spec.tie_word_embeddings:
        yield from _TEXT_HEAD
    yield from _VISION
    yield from merger_norm
    vision_layer = _VISION_LAYER + layer_norms + (_VISION_MLP_GATED if gated else _VISION_MLP_PLAIN)
    for table, layers in ((_TEXT_LAYER, spec.num_layers), (vision_layer, spec.vision.depth)):
        for i in range(layers):
            for row in table:
                yield Row(
                    tuple(name.replace("{i}", str(i)) for name in row.hf),
                    row.megatron.replace("{i}", str(i)),
                    row.transform,
                )


# --- transforms ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Transform:
    """How whole Hugging Face tensors become one whole Megatron tensor, and back."""

    to_megatron: Callable[[Sequence[Tensor]], Tensor]
    to_hf: Callable[[Tensor], list[Tensor]]
    parts: int = 1  # equal blocks along dim 0 that are each split over tensor-parallel ranks


def transforms(spec: ModelSpec, padded_vocab: int) -> dict[str, Transform]:
    """The named transforms of a model."""
    vision = spec.vision
    kernel = (
        vision.in_channels,
        vision.temporal_patch_size,
        vision.patch_size,
        vision.patch_size,
    )

    def pad_vocab(tensors: Sequence[Tensor]) -> Tensor:
        (table,) = tensors
        if table.shape[0] != spec.vocab_size:
            raise WeightError(f"has {table.shape[0]} rows, vocab_size is {spec.vocab_size}")
        return torch.cat([table, table.new_zeros(padded_vocab - spec.vocab_size, table.shape[1])])

    # Vision: [3, heads, head_dim, ...] <-> [heads, 3, head_dim, ...].
    def vision_qkv(tensors: Sequence[Tensor]) -> Tensor:
        (x,) = tensors
        tail = x.shape[1:]
        x = x.view(3, vision.num_heads, vision.head_dim, *tail).transpose(0, 1)
        return x.reshape(-1, *tail)

    def vision_qkv_back(x: Tensor) -> list[Tensor]:
        tail = x.shape[1:]
        x = x.view(vision.num_heads, 3, vision.head_dim, *tail).transpose(0, 1)
        return [x.reshape(-1, *tail)]

    # Language: per key/value group its queries, its key, its value.
    groups, dim = spec.num_kv_heads, spec.head_dim
    per_group = spec.num_heads // groups

    def text_qkv(tensors: Sequence[Tensor]) -> Tensor:
        tail = tensors[0].shape[1:]
        return torch.cat([t.view(groups, -1, dim, *tail) for t in tensors], 1).reshape(-1, *tail)

    def text_qkv_back(x: Tensor) -> list[Tensor]:
        tail = x.shape[1:]
        x = x.view(groups, per_group + 2, dim, *tail)
        return [t.reshape(-1, *tail) for t in x.split([per_group, 1, 1], 1)]

    return {
        "same": Transform(lambda t: t[0], lambda x: [x]),
        "vocab": Transform(pad_vocab, lambda x: [x[: spec.vocab_size]]),
        "patch_embed": Transform(
            lambda t: t[0].reshape(vision.hidden_size, vision.patch_dim),
            lambda x: [x.reshape(vision.hidden_size, *kernel)],
        ),
        "vision_qkv": Transform(vision_qkv, vision_qkv_back),
        "text_qkv": Transform(text_qkv, text_qkv_back),
        "gate_up": Transform(lambda t: torch.cat(list(t)), lambda x: list(x.chunk(2)), parts=2),
    }


# --- splitting -----------------------------------------------------------------------------------
def split(whole: Tensor, parameter: Tensor, parts: int, rank: int, size: int) -> Tensor:
    """The piece of a whole Megatron tensor that tensor-parallel `rank` of `size` holds."""
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    blocks = whole.chunk(parts, dim) if parts > 1 else (whole,)
    return torch.cat([b.chunk(size, dim)[rank] for b in blocks], dim)


def join(pieces: Sequence[Tensor], parameter: Tensor, parts: int) -> Tensor:
    """The whole Megatron tensor from the pieces of all tensor-parallel ranks."""
    if len(pieces) == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return pieces[0]
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    blocks = [piece.chunk(parts, dim) for piece in pieces]
    return torch.cat([b[i] for i in range(parts) for b in blocks], dim)


# --- names ---------------------------------------------------------------------------------------
_RENAMES = (
    ("model.visual.", "visual."),
    ("model.language_model.", "model."),
)


def canonical_name(name: str) -> str:
    """A Hugging Face tensor name as it stands in the table."""
    for new, old in _RENAMES:
        if name.startswith(new):
            return old + name[len(new) :]
    return name
