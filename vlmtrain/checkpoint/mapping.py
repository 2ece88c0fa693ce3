"""Which Hugging Face tensors make which Megatron tensor, and what to do on the way.

A row names the Hugging Face tensors (one or several), the Megatron tensor they make, and a
transform; all derive from the family's table (`models/common/table.py`). A whole Megatron tensor
is cut for one rank by `split`, and `pieces` says which slices of the Hugging Face tensors make one
rank's piece without the rest.

Hugging Face names are those that every transformers release writes to disk for the family:
`visual.*` and `model.*`, or `model.visual.*` and `model.language_model.*` (Qwen3-VL, and any
family in the memory of transformers >= 4.52). `canonical_name` folds the latter onto the former:
names are compared by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmtrain.core.errors import UserError
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.common.table import Experts, Linear, Lookup, Part
from vlmtrain.models.family import table_of


class WeightError(UserError):
    """A tensor or file of weights that does not fit; the message names it."""


@dataclass(frozen=True)
class Row:
    """Some Hugging Face tensors and the Megatron tensor that they make."""

    hf: tuple[str, ...]
    megatron: str
    transform: str
    split: int | None  # the dimension that tensor-parallel ranks divide; None: all hold it
    experts: bool = False  # whether expert-parallel ranks divide it instead
    sizes: tuple[tuple[int, int], ...] = ()  # of each of hf: its first dimension, and all others


def rows(spec: ModelSpec) -> Iterator[Row]:
    """Every row of a model, layer numbers filled in."""
    for part, layers in table_of(spec).parts(spec):
        table = list(_part_rows(part))
        for i in range(layers or 1):
            for row in table:
                yield Row(
                    tuple(name.replace("{i}", str(i)) for name in row.hf),
                    row.megatron.replace("{i}", str(i)),
                    row.transform,
                    row.split,
                    row.experts,
                    row.sizes,
                )


def _part_rows(part: Part) -> Iterator[Row]:
    for item in part.items:
        for kind in ("weight", "bias") if item.bias else ("weight",):
            experts = isinstance(item, Experts)
            end = "" if experts else f".{kind}"
            wide = item.inputs if kind == "weight" and isinstance(item, (Linear, Lookup)) else 1
            sizes = [(rows, wide) for rows in item.modules.values()]
            if isinstance(item, Experts):
                sizes = [(item.experts, rows * wide) for rows, _ in sizes]
            yield Row(
                tuple(f"{part.hf}{module}{end}" for module in item.modules),
                f"{part.megatron}{item.name}.{kind}",
                item.transform,
                None if item.split == 1 and kind == "bias" else item.split,
                experts,
                tuple(sizes),
            )


def fits_experts(spec: ModelSpec, shape: Sequence[int]) -> bool:
    """Whether a tensor of experts has one of the shapes that the "experts" transform reads."""
    ours = _expert_shapes(spec)
    return len(shape) == 3 and (tuple(shape[1:]) in ours or tuple(shape[:0:-1]) in ours)


def _expert_shapes(spec: ModelSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """[out, in] of one expert's two weights."""
    expert = spec.moe_intermediate_size
    return (2 * expert, spec.hidden_size), (spec.hidden_size, expert)


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

    # Experts: [experts, in, out] as released, [experts, out, in] as transformers 5 may write them;
    # none is square.
    ours = _expert_shapes(spec)

    def experts(tensors: Sequence[Tensor]) -> Tensor:
        (x,) = tensors
        return x if tuple(x.shape[1:]) in ours else x.transpose(1, 2)

    return {
        "same": Transform(lambda t: t[0], lambda x: [x]),
        # The rows that pad the vocabulary are zeros: added by `pad_rows`, cut off here.
        "vocab": Transform(lambda t: t[0], lambda x: [x[: spec.vocab_size]]),
        "patch_embed": Transform(
            lambda t: t[0].flatten(1) if t[0].dim() > 1 else t[0],
            lambda x: [x.reshape(-1, *kernel) if x.dim() > 1 else x],
        ),
        "vision_qkv": Transform(vision_qkv, vision_qkv_back, blocks=3),
        "text_qkv": Transform(text_qkv, text_qkv_back),
        "gate_up": Transform(lambda t: torch.cat(list(t)), lambda x: list(x.chunk(2)), parts=2),
        "experts": Transform(experts, lambda x: [x.transpose(1, 2)]),
    }


# --- splitting -----------------------------------------------------------------------------------
def parameter_split_dim(parameter: Tensor) -> int | None:
    """As `Row.split`, as a model's parameter says it; a test holds the two together."""
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
    """The one form of a Hugging Face tensor name."""
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
# And the experts of a layer, one tensor there as here, below one more word.
_EXPERTS = "mlp.experts."


def checkpoint_key(megatron: str) -> tuple[str, int | None]:
    """Key of a Megatron tensor in a distributed checkpoint, and its layer.

    The layers of a tower are one tensor there with the layer as first dimension.
    """
    match = _LAYER.match(megatron)
    if match is None:
        return megatron, None
    prefix, layer, name = match.groups()
    name = name.replace(_EXPERTS, _EXPERTS + "experts.")
    for norm, fused in _FUSED.items():
        if name.startswith(norm):
            name = fused + name[len(norm) :]
    return prefix + name, int(layer)
