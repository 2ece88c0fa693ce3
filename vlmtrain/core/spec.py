"""What a Hugging Face config.json says about a Qwen2-VL or Qwen2.5-VL model, frozen and typed.

Sizes are read, never looked up in a table of model names, so every released size (and any
size in between) is accepted as long as its architecture is one of the two families.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmtrain.core.errors import UserError


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
    hidden_act: str  # "quick_gelu" (Qwen2-VL) or "silu" (Qwen2.5-VL)
    window_size: int | None  # pixels; None: every layer attends to the whole image
    full_attention_layers: tuple[int, ...]  # layers without windows; empty when window_size is None
    tokens_per_second: float | None  # M-RoPE time steps per second of video; None for Qwen2-VL

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

    family: str  # "qwen2_vl" or "qwen2_5_vl"
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

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        """Read `folder/config.json`.

        Raises:
            ModelConfigError: the folder or the file is missing, is not JSON, or describes
                another architecture; the message names the file and what to change.
        """
        path = Path(folder) / "config.json"
        if not Path(folder).is_dir():
            raise ModelConfigError(
                f"{folder}: no such folder; a model is a Hugging Face folder "
                "(config.json, *.safetensors, tokenizer.json)"
            )
        if not path.is_file():
            raise ModelConfigError(
                f"{path} is missing; a model is a folder with config.json and weights"
            )
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelConfigError(f"{path} can't be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise ModelConfigError(f"{path} holds a {type(config).__name__}; it must be an object")
        try:
            return cls.from_dict(config)
        except ModelConfigError as error:
            raise ModelConfigError(f"{path}: {error}") from None
        except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
            # A value of another type than every release writes there.
            raise ModelConfigError(f"{path} does not describe a model: {error}") from error

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelSpec:
        """Read a parsed config.json, nested (`text_config`, transformers >= 4.52) or flat."""
        family = config.get("model_type")
        if family not in ("qwen2_vl", "qwen2_5_vl"):
            raise ModelConfigError(
                f"model_type is {family!r}; this project trains 'qwen2_vl' and 'qwen2_5_vl'"
            )
        text = {**config, **(config.get("text_config") or {})}

        def need(source: dict[str, Any], key: str, where: str) -> Any:
            if source.get(key) is None:
                raise ModelConfigError(f"{where}{key} is missing")
            return source[key]

        hidden = int(need(text, "hidden_size", ""))
        heads = int(need(text, "num_attention_heads", ""))
        if hidden % heads:
            raise ModelConfigError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
            )
        head_dim = int(text.get("head_dim") or hidden // heads)
        rope = {
            **(text.get("rope_scaling") or {}),
            **(text.get("rope_parameters") or {}),
        }
        section = tuple(int(x) for x in need(rope, "mrope_section", "rope_scaling."))
        if len(section) != 3 or 2 * sum(section) != head_dim:
            raise ModelConfigError(
                f"mrope_section {list(section)} must be three numbers that sum to half of "
                f"head_dim {head_dim}"
            )
        if text.get("use_sliding_window"):
            raise ModelConfigError(
                "use_sliding_window is true; sliding-window language attention is not supported, "
                "set it to false"
            )
        return cls(
            family=family,
            vision=_vision_spec(family, need(config, "vision_config", ""), hidden),
            vocab_size=int(need(text, "vocab_size", "")),
            hidden_size=hidden,
            intermediate_size=int(need(text, "intermediate_size", "")),
            num_layers=int(need(text, "num_hidden_layers", "")),
            num_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            norm_eps=float(text.get("rms_norm_eps", 1e-5)),
            rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 1e6),
            mrope_section=section,
            max_position_embeddings=int(text.get("max_position_embeddings", 32768)),
            tie_word_embeddings=bool(
                config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
            ),
            image_token_id=int(need(config, "image_token_id", "")),
            video_token_id=int(need(config, "video_token_id", "")),
            vision_start_token_id=int(need(config, "vision_start_token_id", "")),
            vision_end_token_id=int(config.get("vision_end_token_id", 151653)),
        )


def _vision_spec(family: str, vision: dict[str, Any], text_hidden: int) -> VisionSpec:
    windowed = family == "qwen2_5_vl"
    # Qwen2-VL calls the tower's width embed_dim and uses hidden_size for the merger's output.
    hidden = int(vision.get("hidden_size", 1280) if windowed else vision.get("embed_dim", 1280))
    heads = int(vision.get("num_heads", 16))
    depth = int(vision.get("depth", 32))
    if hidden % heads:
        raise ModelConfigError(
            f"vision_config: width {hidden} is not a multiple of num_heads {heads}"
        )
    if (hidden // heads) % 4:
        raise ModelConfigError(
            f"vision_config: head_dim {hidden // heads} is not a multiple of 4, which the 2D "
            "rotary embedding needs"
        )
    out = int(vision.get("out_hidden_size" if windowed else "hidden_size", text_hidden))
    if out != text_hidden:
        raise ModelConfigError(
            f"vision_config: the merger's output width {out} differs from the language model's "
            f"hidden_size {text_hidden}"
        )
    act = vision.get("hidden_act", "silu" if windowed else "quick_gelu")
    if act != ("silu" if windowed else "quick_gelu"):
        raise ModelConfigError(f"vision_config: hidden_act {act!r} is not supported for {family}")
    full = tuple(sorted(int(i) for i in vision.get("fullatt_block_indexes", (7, 15, 23, 31))))
    return VisionSpec(
        depth=depth,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=int(
            vision.get("intermediate_size", 3420)
            if windowed
            else hidden * vision.get("mlp_ratio", 4)
        ),
        out_hidden_size=out,
        in_channels=int(vision.get("in_channels", vision.get("in_chans", 3))),
        patch_size=_square(vision.get("patch_size", 14), "patch_size"),
        temporal_patch_size=_square(vision.get("temporal_patch_size", 2), "temporal_patch_size"),
        spatial_merge_size=int(vision.get("spatial_merge_size", 2)),
        hidden_act=act,
        window_size=int(vision.get("window_size", 112)) if windowed else None,
        full_attention_layers=full if windowed else (),
        tokens_per_second=float(vision.get("tokens_per_second", 4)) if windowed else None,
    )


def _square(value: Any, name: str) -> int:
    """Accept 14 and [14, 14]; refuse anything else."""
    values = set(value) if isinstance(value, (list, tuple)) else {value}
    if len(values) != 1:
        raise ModelConfigError(f"vision_config: {name} {value} is not supported, one number only")
    return int(values.pop())


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding table in Megatron: a multiple of 128 x tensor-parallel size."""
    unit = 128 * tensor
    return -(-vocab_size // unit) * unit
