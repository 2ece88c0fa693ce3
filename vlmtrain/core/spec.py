"""What a Hugging Face config.json says about a model, frozen and typed (`models/family.py` reads).

Sizes are read, never looked up in a table of model names, so every released size (and any
size in between) is accepted as long as its architecture is one of the known families.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

from vlmtrain.core.errors import UserError

MediaKind = Literal["image", "video"]


class ModelConfigError(UserError):
    """A config.json that does not describe a model this project can train."""


@dataclass(frozen=True)
class VisionSpec:
    """Shape of the vision tower (ViT + merger)."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    hidden_act: str  # as transformers calls it
    gated: bool  # whether the MLP is (SwiGLU)
    normalization: Literal["LayerNorm", "RMSNorm"]
    window_size: int | None = None  # pixels; None: every layer attends to the whole image
    full_attention_layers: tuple[int, ...] = ()  # those without windows, where there are windows
    tokens_per_second: float | None = None  # M-RoPE time steps per second of video; None: slices
    patch_bias: bool = False  # of the patch embedding
    position_side: int = 0  # of the square table of learned positions; 0: there is none
    deepstack_layers: tuple[int, ...] = ()  # whose outputs the first language layers add, in order

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merge_unit(self) -> int:
        """Patches that become one language token (4)."""
        return self.spatial_merge_size**2

    @property
    def patch_dim(self) -> int:
        """Length of one patch row: channels x temporal patch x patch x patch (1176)."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class ModelSpec:
    """Shape of the whole model: vision tower, language model, token ids."""

    family: str  # model_type in config.json, a key of models.family.FAMILIES
    vision: VisionSpec
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    max_position_embeddings: int
    tie_word_embeddings: bool
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    qkv_bias: bool = True
    qk_norm: bool = False  # RMSNorm of each head's query and key
    interleaved_mrope: bool = False  # frequencies take turns between the axes: t h w t h w ...
    num_experts: int = 0  # in place of each layer's MLP; 0: it has one MLP
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of an expert
    router_aux_loss_coef: float = 0.0  # of the load-balancing loss; 0: there is none

    @property
    def visual_sets(self) -> int:
        """Rows of features that each visual token has: the merger's, and DeepStack's."""
        return 1 + len(self.vision.deepstack_layers)

    @property
    def ends_on_targets(self) -> bool:
        """Whether the last language layer goes on behind its attention with the target tokens
        alone: there the loss reads no others, but a router's statistics and DeepStack do."""
        return not self.num_experts and len(self.vision.deepstack_layers) < self.num_layers


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding table in Megatron: a multiple of 128 x tensor-parallel size."""
    unit = 128 * tensor
    return -(-vocab_size // unit) * unit


def first_difference(a: Any, b: Any, where: str = "") -> str | None:
    """Of two specs, in words; None: they are equal."""
    for name in a.__dataclass_fields__:
        one, other = getattr(a, name), getattr(b, name)
        if one == other:
            continue
        if is_dataclass(one) and type(one) is type(other):
            return first_difference(one, other, f"{where}{name}.")
        return f"{where}{name} is {one} and {other}"
    return None
