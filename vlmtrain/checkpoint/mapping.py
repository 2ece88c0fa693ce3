"""The one table that maps Hugging Face tensors to Megatron tensors, and what to do on the way.

A row names the Hugging Face tensors (one or several), the Megatron tensor they make, and a
transform. `{i}` is the global layer number. The table knows nothing of tensor or pipeline
parallelism: a whole Megatron tensor is cut for one rank by `split`, and `pieces` says which slices
of the Hugging Face tensors make one rank's piece without the rest.

Hugging Face names are those written to disk by every transformers release (`visual.*`,
`model.*`); names of transformers >= 4.52 in memory (`model.visual.*`,
`model.language_model.*`) are folded onto them by `canonical_name`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmtrain.core.errors import UserError
from vlmtrain.core.spec import ModelSpec


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
    gated = spec.vision.gated
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
    """How Hugging Face tensors become one Megatron tensor, and back.

    `to_megatron` also takes one tensor-parallel rank's slices (`pieces`): it then returns that
    rank's piece. Both directions accept tensors on the meta device, to learn shapes.
    """

    to_megatron: Callable[[Sequence[Tensor]], Tensor]
    to_hf: Callable[[Tensor], list[Tensor]]
    parts: int = 1  # equal blocks of the Megatron tensor along dim 0, each split over ranks
    blocks: int = 1  # the same of each Hugging Face tensor


def transforms(spec: ModelSpec) -> dict[str, Transform]:
    """The named transforms of a model."""
    vision = spec.vision
    kernel = (
        vision.in_channels,
        vision.temporal_patch_size,
        vision.patch_size,
        vision.patch_size,
    )

    # Vision: [3, heads, head_dim, ...] <-> [heads, 3, head_dim, ...].
    def vision_qkv(tensors: Sequence[Tensor]) -> Tensor:
        (x,) = tensors
        tail = x.shape[1:]
        return x.view(3, -1, vision.head_dim, *tail).transpose(0, 1).reshape(-1, *tail)

    def vision_qkv_back(x: Tensor) -> list[Tensor]:
        tail = x.shape[1:]
        return [x.view(-1, 3, vision.head_dim, *tail).transpose(0, 1).reshape(-1, *tail)]

    # Language: per key/value group its queries, its key, its value.
    dim, queries = spec.head_dim, spec.num_heads // spec.num_kv_heads

    def text_qkv(tensors: Sequence[Tensor]) -> Tensor:
        tail = tensors[0].shape[1:]
        q, k, v = tensors
        grouped = [x.view(-1, n, dim, *tail) for x, n in ((q, queries), (k, 1), (v, 1))]
        return torch.cat(grouped, 1).reshape(-1, *tail)

    def text_qkv_back(x: Tensor) -> list[Tensor]:
        tail = x.shape[1:]
        x = x.view(-1, queries + 2, dim, *tail)
        return [t.reshape(-1, *tail) for t in x.split([queries, 1, 1], 1)]

    return {
        "same": Transform(lambda t: t[0], lambda x: [x]),
        # The rows that pad the vocabulary are zeros: added by `pad_rows`, cut off here.
        "vocab": Transform(lambda t: t[0], lambda x: [x[: spec.vocab_size]]),
        "patch_embed": Transform(
            lambda t: t[0].reshape(vision.hidden_size, vision.patch_dim),
            lambda x: [x.reshape(vision.hidden_size, *kernel)],
        ),
        "vision_qkv": Transform(vision_qkv, vision_qkv_back, blocks=3),
        "text_qkv": Transform(text_qkv, text_qkv_back),
        "gate_up": Transform(lambda t: torch.cat(list(t)), lambda x: list(x.chunk(2)), parts=2),
    }


# --- splitting -----------------------------------------------------------------------------------
_SPLIT_ROWS = re.compile(
    r".*\.(linear_qkv|linear_fc1|merger_fc1)\.(weight|bias)$|.*\.(word_embeddings|output_layer)\..*"
)
_SPLIT_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2|merger_fc2)\.weight$")


def split_dim(megatron: str) -> int | None:
    """The dimension along which tensor-parallel ranks share a Megatron tensor; None: all hold it.

    For tools that build no model. A parameter in a model says it itself (`split`, `join`), and a
    test holds the two together.
    """
    if _SPLIT_ROWS.match(megatron):
        return 0
    return 1 if _SPLIT_COLUMNS.match(megatron) else None


def parameter_split_dim(parameter: Tensor) -> int | None:
    """The same, as a model's parameter says it."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return parameter.partition_dim  # type: ignore[attr-defined]


Box = tuple[tuple[int, int], ...]  # (start, stop) per dimension


def pieces(shape: Sequence[int], dim: int | None, blocks: int, rank: int, size: int) -> list[Box]:
    """The boxes of a whole tensor of `shape` that `rank` of `size` holds, in order of dim 0.

    `blocks` equal blocks along dim 0 are each split, where `dim` is 0.

    Raises:
        WeightError: the sizes can't be divided.
    """
    whole = [(0, n) for n in shape]
    if dim is None or size == 1:
        return [tuple(whole)]
    count = blocks if dim == 0 else 1
    if dim >= len(shape) or shape[dim] % (count * size):
        raise WeightError(f"{list(shape)} can't be split into {count * size} along dim {dim}")
    block, part = shape[dim] // count, shape[dim] // (count * size)
    boxes = []
    for i in range(count):
        start = i * block + rank * part
        boxes.append((*whole[:dim], (start, start + part), *whole[dim + 1 :]))
    return boxes


def pad_rows(table: Tensor, rows: int) -> Tensor:
    """`table` with zero rows appended up to `rows`; the table itself where it has them."""
    if table.shape[0] == rows:
        return table
    return torch.cat([table, table.new_zeros(rows - table.shape[0], *table.shape[1:])])


def split(whole: Tensor, dim: int | None, parts: int, rank: int, size: int) -> Tensor:
    """The piece of a whole Megatron tensor that tensor-parallel `rank` of `size` holds."""
    boxes = pieces(whole.shape, dim, parts, rank, size)
    cut = [whole[tuple(slice(*bounds) for bounds in box)] for box in boxes]
    return cut[0] if len(cut) == 1 else torch.cat(cut)


def join(shards: Sequence[Tensor], dim: int | None, parts: int) -> Tensor:
    """The whole Megatron tensor from the pieces of all tensor-parallel ranks."""
    if len(shards) == 1 or dim is None:
        return shards[0]
    blocks = [shard.chunk(parts, dim) for shard in shards]
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


_LAYER = re.compile(r"(.*\.layers\.)(\d+)\.(.*)")
# Megatron's checkpoints name a layer's norms after the linear layer that follows them, so that
# fused and unfused models can read each other's.
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def checkpoint_key(megatron: str) -> tuple[str, int | None]:
    """Key of a Megatron tensor in a distributed checkpoint, and its layer.

    The layers of a tower are one tensor there with the layer as first dimension.
    """
    match = _LAYER.match(megatron)
    if match is None:
        return megatron, None
    prefix, layer, name = match.groups()
    for norm, fused in _FUSED.items():
        if name.startswith(norm):
            name = fused + name[len(norm) :]
    return prefix + name, int(layer)
