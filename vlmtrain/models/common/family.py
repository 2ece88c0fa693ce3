"""What a model family is: the base class of the objects that `models/family.py` lists.

Importable without torch: the planner and `--help` read configurations only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vlmtrain.core.spec import MediaKind, ModelConfigError, ModelSpec, VisionSpec
from vlmtrain.models.common.table import (
    Norm,
    Part,
    Table,
    merger,
    patch_embed,
    text_layer,
    vision_layer,
    vocabulary,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vlmtrain.models.common.vision import VisionTower


@dataclass(frozen=True)
class MediaDefaults:
    """How pixels become patches where the model folder's processor files do not say it."""

    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # CLIP's
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    image_pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280)  # least and most of an image
    video_pixels: tuple[int, int] = (128 * 28 * 28, 768 * 28 * 28)  # of a frame, or:
    timed_videos: bool = False  # of all frames together, and sampled as Qwen3-VL samples
    # How boxes are written: in 1 / box_scale of the image's sides, or None: in pixels of the
    # resized image; between special tokens, or as a JSON list.
    box_scale: int | None = 1000
    box_tokens: bool = False


class Family:
    """One family of models. The methods here are those of Qwen2-VL's relatives; a family in its
    own folder overrides what differs."""

    name: str  # model_type in config.json
    title: str  # for people
    media = MediaDefaults()
    system_prompt = True  # whether a conversation without one gets the usual one
    # The tower: its only activation, as transformers calls it, and its blocks.
    hidden_act: str
    gated: bool
    normalization: Literal["LayerNorm", "RMSNorm"]
    # What Hugging Face calls the linears of the tower's MLP and the merger's norm and linears.
    vision_mlp: tuple[tuple[str, ...], str]
    vision_defaults: ClassVar[dict[str, Any]] = {}  # where vision_config does not say it
    merger_names = "ln_q", "mlp.0", "mlp.2"
    # Where its tensors lie in a Hugging Face folder.
    vision_prefix, text_prefix = "visual.", "model."
    # The language model, where its config.json does not say it.
    qkv_bias, qk_norm, interleaved_mrope = True, False, False

    def tower_sizes(self, vision: dict[str, Any], text_hidden: int) -> dict[str, Any]:
        """Of a parsed `vision_config` what each family writes in its own way, as fields of
        VisionSpec: at least hidden_size, out_hidden_size and intermediate_size."""
        raise NotImplementedError

    def read_vision(self, vision: dict[str, Any], text_hidden: int) -> VisionSpec:
        """The tower of a parsed `vision_config`; the language model is `text_hidden` wide."""
        vision = {**self.vision_defaults, **vision}
        sizes = self.tower_sizes(vision, text_hidden)
        width, out = sizes["hidden_size"], sizes["out_hidden_size"]
        heads = int(vision.get("num_heads", 16))
        if width % heads:
            raise ModelConfigError(
                f"vision_config: width {width} is not a multiple of num_heads {heads}"
            )
        if (width // heads) % 4:
            raise ModelConfigError(
                f"vision_config: head_dim {width // heads} is not a multiple of 4, which the 2D "
                "rotary embedding needs"
            )
        if out != text_hidden:
            raise ModelConfigError(
                f"vision_config: the merger's output width {out} differs from the language "
                f"model's hidden_size {text_hidden}"
            )
        act = vision.get("hidden_act", self.hidden_act)
        if act != self.hidden_act:
            raise ModelConfigError(
                f"vision_config: hidden_act {act!r} is not supported for {self.name}"
            )
        return VisionSpec(
            depth=int(vision.get("depth", 32)),
            num_heads=heads,
            in_channels=int(vision.get("in_channels", vision.get("in_chans", 3))),
            patch_size=_square(vision, "patch_size", 14),
            temporal_patch_size=_square(vision, "temporal_patch_size", 2),
            spatial_merge_size=int(vision.get("spatial_merge_size", 2)),
            hidden_act=act,
            gated=self.gated,
            normalization=self.normalization,
            **sizes,
        )

    def read(self, config: dict[str, Any]) -> ModelSpec:
        """Read a parsed config.json, nested (`text_config`, transformers >= 4.52) or flat.

        Raises:
            ModelConfigError: a value is missing or describes what is not supported.
        """
        text = config.get("text_config") or config  # transformers takes no key from both
        hidden = int(need(text, "hidden_size"))
        heads = int(need(text, "num_attention_heads"))
        if hidden % heads and not text.get("head_dim"):
            raise ModelConfigError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
            )
        head_dim = int(text.get("head_dim") or hidden // heads)
        rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
        section = tuple(int(x) for x in need(rope, "mrope_section", "rope_scaling."))
        if len(section) != 3 or 2 * sum(section) != head_dim:
            raise ModelConfigError(
                f"mrope_section {list(section)} must be three numbers that sum to half of "
                f"head_dim {head_dim}"
            )
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise ModelConfigError(
                f"rope_scaling.rope_type is {kind!r}; only 'default' is supported"
            )
        if text.get("hidden_act", "silu") != "silu":
            raise ModelConfigError(
                f"hidden_act is {text['hidden_act']!r}; only 'silu' is supported"
            )
        if text.get("attention_dropout"):
            raise ModelConfigError(
                f"attention_dropout is {text['attention_dropout']}; only 0 is supported, set it to "
                "that"
            )
        if text.get("use_sliding_window"):
            raise ModelConfigError(
                "use_sliding_window is true; sliding-window language attention is not supported, "
                "set it to false"
            )
        return ModelSpec(
            family=self.name,
            vision=self.read_vision(need(config, "vision_config"), hidden),
            vocab_size=int(need(text, "vocab_size")),
            hidden_size=hidden,
            intermediate_size=int(need(text, "intermediate_size")),
            num_layers=int(need(text, "num_hidden_layers")),
            num_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            norm_eps=float(text.get("rms_norm_eps", 1e-5)),
            rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 1e6),
            mrope_section=section,
            max_position_embeddings=int(text.get("max_position_embeddings", 32768)),
            # Older folders say it in text_config alone, where transformers still looks.
            tie_word_embeddings=bool(
                config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
            ),
            image_token_id=int(need(config, "image_token_id")),
            video_token_id=int(need(config, "video_token_id")),
            vision_start_token_id=int(need(config, "vision_start_token_id")),
            vision_end_token_id=int(config.get("vision_end_token_id", 151653)),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            interleaved_mrope=self.interleaved_mrope,
        )

    def table(self, spec: ModelSpec) -> Table:
        """All weights of a model of this family."""
        text, vision = self.text_prefix, self.vision_prefix
        norm = Norm("decoder.final_layernorm", {f"{text}norm": spec.hidden_size})
        return Table(
            embedding=vocabulary(spec, f"{text}embed_tokens", "embedding.word_embeddings"),
            final_norm=Part("", "language_model.", (norm,)),
            head=vocabulary(spec, "lm_head", "output_layer"),
            patch_embed=patch_embed(spec, vision),
            merger=merger(spec, f"{vision}merger.", "merger", self.merger_names),
            text_layer=text_layer(spec, text),
            vision_layer=vision_layer(spec, vision, *self.vision_mlp),
            deepstack=tuple(
                merger(
                    spec,
                    f"{vision}deepstack_merger_list.{n}.",
                    f"deepstack_mergers.{layer}",
                    self.merger_names,
                    joined=True,
                )
                for n, layer in enumerate(spec.vision.deepstack_layers)
            ),
        )

    def video_placeholders(self, times: Sequence[float]) -> str:
        """What the processor writes where the chat template wrote <|video_pad|>: one <|video_pad|>
        for each run of the video's tokens, all runs of one length.

        times: the second of the file at which each temporal slice stands.
        """
        return "<|video_pad|>"

    def positions(
        self,
        input_ids: Tensor,
        grids: Sequence[tuple[int, int, int]],
        kinds: Sequence[MediaKind],
        spec: ModelSpec,
        seconds_per_grid: Sequence[float] | None = None,
    ) -> Tensor:
        """M-RoPE positions of a sample: see `mrope_positions`."""
        from vlmtrain.models.common.positions import mrope_positions  # torch

        return mrope_positions(input_ids, grids, kinds, spec, seconds_per_grid)

    @property
    def tower(self) -> type[VisionTower]:
        """The class of the vision tower."""
        from vlmtrain.models.common.vision import VisionTower  # megatron-core

        return VisionTower


def need(source: dict[str, Any], key: str, where: str = "") -> Any:
    """`source[key]`. Raises ModelConfigError where it is missing or null."""
    if source.get(key) is None:
        raise ModelConfigError(f"{where}{key} is missing")
    return source[key]


def _square(vision: dict[str, Any], name: str, default: int) -> int:
    """Accept 14 and [14, 14]; refuse anything else."""
    value = vision.get(name, default)
    values = set(value) if isinstance(value, (list, tuple)) else {value}
    if len(values) != 1:
        raise ModelConfigError(f"vision_config: {name} {value} is not supported, one number only")
    return int(values.pop())
