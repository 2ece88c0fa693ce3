"""What `enable` puts in the place of transformers' modules: subclasses, one for each part.

`replace` changes the class of a module, not its `forward`: copies of the module, replicas, pickles
and processes that receive one run the kernels, each on its own weights.

B = batch, S = positions of a row, P = patches, n = visual rows, h = hidden size.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import typing
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers.utils import ModelOutput, can_return_tuple

from vlmkernels import add_visual_, scatter_visual, visual_embedding, visual_index
from vlmkernels._native import DTYPES
from vlmkernels._native import is_plain as is_plain_tensor
from vlmkernels.attention.api import rotated_attention
from vlmkernels.attention.select import machine_of
from vlmkernels.embedding.add import add_visual_reference
from vlmkernels.embedding.lookup import scatter_visual_reference
from vlmkernels.integrations.transformers.attention import (
    NAME,
    check_arguments,
    kept_beside,
    known_max_seqlen,
    register,
)

# ---- classes in the place of classes -------------------------------------------------------------


class Replacement:
    """What stands before a module's own class in its new one."""

    replacement: Any  # the subclass of this that is meant
    original: Any  # the module's class

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = super().__reduce_ex__(protocol)[2:]
        return _new, (self.replacement, self.original), *state


def _new(replacement: Any, original: Any) -> nn.Module:
    """An empty module, for pickle and copy to fill."""
    register()
    combined = _combined(replacement, original)
    return combined.__new__(combined)


@functools.cache
def _combined(replacement: Any, original: Any) -> Any:
    """A subclass of both that shows the name and the signature of `original`."""
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    if "forward" in vars(replacement):

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement.forward(self, *args, **kwargs)

        forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
        names["forward"] = forward
    names.update(replacement=replacement, original=original)
    return type(original.__name__, (replacement, original), names)


def replace(module: nn.Module, replacement: Any) -> None:
    """Put `replacement` before the module's class, under accelerate's hooks, if it has some.

    Raises:
        ValueError: something else has replaced the module's forward.
    """
    if _wrapped(module):
        raise ValueError(
            f"the forward of a {type(module).__name__} was replaced by something else; call "
            "enable(model) before that"
        )
    original: Any = type(module)
    _change_class(module, _combined(replacement, original))


def check_forward(module: nn.Module, part: str) -> None:
    """The forward that a replacement of this part of `enable` stands in for is transformers' own.

    Raises:
        ValueError: it is a subclass's, or one put in its place.
    """
    kind = next(c for c in type(module).__mro__ if "forward" in vars(c))
    of_module = getattr(sys.modules.get(kind.__module__), "__file__", None)
    forward = vars(kind)["forward"]
    while hasattr(forward, "__wrapped__"):  # by decorators of transformers and torch
        own = _file_of(forward).startswith(_LIBRARIES) or _file_of(forward) == of_module
        forward = forward.__wrapped__ if own else None
    overrides = any("forward" in vars(c) for c in kind.__mro__[1:] if c is not nn.Module)
    if overrides or _file_of(forward) != of_module:
        raise ValueError(
            f"{kind.__name__}.forward is not transformers' own and would not run; use "
            f"enable(model, {part}=False)"
        )


#: Where functions come from that may be around a forward of transformers.
_LIBRARIES = tuple(os.path.dirname(str(library.__file__)) for library in (transformers, torch))


def _file_of(function: Any) -> str:
    return getattr(getattr(function, "__code__", None), "co_filename", "")


def check_restorable(module: Any) -> None:
    """Nothing stands before the class that `replace` gave, or holds its forward.

    Raises:
        ValueError: something does, such as fully_shard's class or accelerate's mixed precision.
    """
    if not isinstance(module, Replacement):
        return
    if type(module) is not _combined(module.replacement, module.original):
        raise ValueError(
            f"the class of a {type(module).__name__} was changed after enable(model); enable and "
            "disable it before that"
        )
    if _wrapped(module):
        raise ValueError(
            f"the forward of a {type(module).__name__} was wrapped after enable(model), by "
            "accelerate or a Trainer; take that back before it is enabled again or disabled: "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )


def restore(module: nn.Module) -> None:
    """Give a module back its class, if `replace` has changed it."""
    if isinstance(module, Replacement):
        _change_class(module, module.original)


def _wrapped(module: nn.Module) -> bool:
    """Whether a forward that nobody knows stands before that of the module's class."""
    return not (_is_own(vars(module).get("forward"), module) or _hooked(module))


def _is_own(forward: Any, module: nn.Module) -> bool:
    """accelerate leaves the class's own behind, bound, when it unwraps a model."""
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def _hooked(module: nn.Module) -> bool:
    """Whether accelerate has wrapped the forward of the module's class."""
    wrapped = getattr(vars(module).get("_old_forward"), "__func__", None)
    return wrapped is type(module).forward


def _change_class(module: nn.Module, to: Any) -> None:
    hooked = _hooked(module)
    if _is_own(vars(module).get("forward"), module):
        vars(module).pop("forward", None)
    module.__class__ = to
    if hooked:
        module._old_forward = MethodType(to.forward, module)


# ---- language model ------------------------------------------------------------------------------


class LanguageModel(Replacement):
    """Its config may name our attention interface, which unpickling registers."""

    #: the attention implementation that it had, where it has ours
    replaced_attention: str | None

    def _deepstack_process(self: Any, hidden: Tensor, where: Tensor, rows: Tensor) -> Tensor:
        """hidden [B, S, h] and rows [n, h] added at their placeholders, for Qwen3-VL.

        where: int32 [B * S], from `Model`; or bool [B, S], transformers' own mask, whose rows are
        in the order of the sequence.
        """
        where, rows = where.to(hidden.device), rows.to(hidden.device, hidden.dtype)
        if where.dtype == torch.bool:
            mask = where.flatten()
            where = torch.where(mask, mask.cumsum(0) - 1, -1).to(torch.int32)
        if hidden.dtype not in DTYPES or not runs_on(hidden.device):
            return add_visual_reference(hidden, rows, where)
        if any(map(has_hooks, self.layers)):  # one that keeps what a layer returned
            hidden = hidden.clone(memory_format=torch.contiguous_format)
        return add_visual_(hidden, rows, where)


# ---- vision tower --------------------------------------------------------------------------------


class VisionAttention(Replacement):
    """vision_attention's kernels over all segments of the batch at once."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        rotary_pos_emb: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states [P, D] of all images and videos -> [P, D]; segments by cu_seqlens."""
        if position_embeddings is None:
            raise ValueError("position_embeddings is None; the vision tower must pass (cos, sin)")
        # What transformers records as a tower's attentions are these modules' results, and what
        # tells samples apart is the language model's.
        check_arguments(self, {**kwargs, "output_attentions": None, "seq_idx": None})
        drops = self.training and getattr(self, "attention_dropout", 0.0)
        if drops or (qkv := self.qkv(hidden_states)).dtype not in DTYPES:
            kwargs.update(position_embeddings=position_embeddings)
            return super().forward(hidden_states, cu_seqlens, **kwargs)  # type: ignore[misc]
        qkv = qkv.unflatten(1, (3, self.num_heads, -1))
        if torch.compiler.is_compiling() and max_seqlen is None:
            if qkv.device.type == "cuda":  # a bound: what it is would be asked of the device
                max_seqlen = qkv.shape[0]
        elif max_seqlen is None:
            learns = qkv.requires_grad and torch.is_grad_enabled()
            recorded = torch._C._len_torch_dispatch_stack() or not is_plain_tensor(cu_seqlens)
            if cu_seqlens.is_cuda or (learns and not recorded):
                max_seqlen = known_max_seqlen(cu_seqlens)
        table = rotary_table(*position_embeddings)
        out = rotated_attention(qkv, table, cu_seqlens.to(torch.int32), max_seqlen=max_seqlen)
        return self.proj(out.flatten(1))


class PatchEmbed(Replacement):
    """Patches that don't overlap: a convolution is one matrix product."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """[P, channels x frames x height x width] -> [P, D]."""
        proj = self.proj
        if not is_plain(proj, nn.Conv3d) or not _is_product(proj):
            return super().forward(hidden_states)  # type: ignore[misc]
        weight = proj.weight.flatten(1)
        x = hidden_states.reshape(-1, weight.shape[1]).to(weight.dtype)
        return nn.functional.linear(x, weight, proj.bias)


def _is_product(conv: nn.Conv3d) -> bool:
    """Of inputs as large as its kernel."""
    return conv.groups == 1 and conv.padding == (0, 0, 0) and conv.dilation == (1, 1, 1)


def rotary_table(cos: Tensor, sin: Tensor) -> Tensor:
    """float32 [P, D] of cos and sin [P, D], whose halves are alike; made once for all layers."""
    return kept_beside("_vlmkernels_table", _rotary_table, cos, sin)


def _rotary_table(cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1] // 2
    return torch.cat((cos[:, :half], sin[:, :half]), -1).float()


# ---- embeddings ----------------------------------------------------------------------------------


class Model(Replacement):
    """The model that holds both towers: its embeddings come with their visual rows."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = super().forward  # type: ignore[misc]
        names = _names(self)
        kwargs = named_arguments(self, args, kwargs)
        # transformers 4 says nothing of it to the attention's function.
        if self.language_model.config._attn_implementation == NAME:
            check_arguments(self, {"output_attentions": kwargs.get("output_attentions")})
        if "cache" in names and "past_key_values" in kwargs:  # its name before transformers 5.24
            kwargs.setdefault("cache", kwargs.pop("past_key_values"))
        ids = kwargs.get("input_ids")
        pixels = [kwargs.get(name) is not None for name in ("pixel_values", "pixel_values_videos")]
        if (
            ids is None
            or kwargs.get("inputs_embeds") is not None
            or (any(pixels) and kwargs.get("mm_encoder_outputs") is not None)  # refused there
        ):
            return original(**kwargs)
        features = _features(self, kwargs, names)
        if not features:
            return original(**kwargs)
        for name in ("pixel_values", "pixel_values_videos", "mm_encoder_outputs"):
            kwargs.pop(name, None)
        rows = {kind: _joined(getattr(f, "pooler_output", f)) for kind, f in features.items()}
        kwargs["inputs_embeds"], index = _embeddings(self, ids, rows)
        levels = [
            [_joined(level) for level in getattr(f, "deepstack_features", ())]
            for f in features.values()
        ]
        if deepstack := [torch.cat(parts) for parts in zip(*levels, strict=True)]:
            original = functools.partial(_with_deepstack, self, index, deepstack)
        return _with_features(self, original, features, **kwargs)


@can_return_tuple
def _with_features(model: Any, forward: Any, features: dict[str, Any], **kwargs: Any) -> Any:
    """What forward returns behind the embeddings; from transformers 5.24 on with the towers'
    outputs."""
    out = forward(**kwargs, return_dict=True)
    kind = _class_with_features(model.original.forward.__module__, type(out))
    if kind is None:
        return out
    found = {f"{modality}_outputs": features.get(modality) for modality in ("image", "video")}
    return kind(**{**out, **found})


def _class_with_features(module: str, output: Any) -> Any:
    """The module's class of the same fields and the towers' outputs, if it has one."""
    names = {"image_outputs", "video_outputs"}.union(output.__dataclass_fields__)
    classes = [c for c in vars(sys.modules[module]).values() if isinstance(c, type)]
    outputs: list[Any] = [c for c in classes if issubclass(c, ModelOutput) and c is not ModelOutput]
    fitting = [c for c in reversed(outputs) if names <= set(c.__dataclass_fields__)]
    return min(fitting, key=lambda c: len(c.__dataclass_fields__), default=None)


#: Arguments of compute_3d_position_ids that _with_deepstack gives it.
POSITION_ARGUMENTS = (
    *("input_ids", "inputs_embeds", "image_grid_thw", "video_grid_thw", "mm_token_type_ids"),
    *("attention_mask", "past_key_values", "cache"),
)


def _with_deepstack(model: Any, index: Tensor, deepstack: list[Tensor], **kwargs: Any) -> Any:
    """Qwen3VLModel.forward behind the embeddings; `deepstack`: rows for the first layers."""
    position_ids = kwargs.pop("position_ids", None)
    if position_ids is None:
        takes = inspect.signature(model.compute_3d_position_ids).parameters
        given = {name: kwargs.get(name) for name in POSITION_ARGUMENTS if name in takes}
        position_ids = model.compute_3d_position_ids(**given)
    for name in ("input_ids", "image_grid_thw", "video_grid_thw", "mm_token_type_ids"):
        kwargs.pop(name, None)
    if has_hooks(model.language_model):  # they see what transformers' own forward passes
        deepstack = [rows[index[index >= 0].to(rows.device)] for rows in deepstack]
        index = (index >= 0).view(kwargs["inputs_embeds"].shape[:2])
    out = model.language_model(
        input_ids=None,
        position_ids=position_ids,
        visual_pos_masks=index,
        deepstack_visual_embeds=deepstack,
        **kwargs,
    )
    kind = output_class(model.original)
    if "rope_deltas" in kind.__dataclass_fields__:  # before transformers 5.23
        return kind(**out, rope_deltas=model.rope_deltas)
    return out


def _names(module: Any) -> list[str]:
    return list(inspect.signature(module.original.forward).parameters)[1:]


def output_class(original: Any) -> Any:
    """What the forward of a class returns, a ModelOutput; None: it does not say so."""
    options = typing.get_args(inspect.signature(original.forward).return_annotation)
    kinds = [c for c in options if isinstance(c, type) and issubclass(c, ModelOutput)]
    return kinds[0] if len(kinds) == 1 else None


def named_arguments(module: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a replaced module's forward by their names."""
    return kwargs | dict(zip(_names(module)[: len(args)], args, strict=True))


def _features(model: Any, kwargs: dict[str, Any], named: list[str]) -> dict[str, Any]:
    """What the vision tower returns for "image" and "video", as far as there are any."""
    others = {k: v for k, v in kwargs.items() if k not in named and k != "return_dict"}
    encoded = kwargs.get("mm_encoder_outputs") or {}
    found = {}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        features = encoded.get(kind)
        if features is None and kwargs.get(pixels) is not None:
            get = getattr(model, f"get_{kind}_features")
            takes = inspect.signature(get).parameters.values()
            more = {"return_dict": True, **others}
            if not any(p.kind == p.VAR_KEYWORD for p in takes):
                more = {}
            features = get(kwargs[pixels], kwargs.get(f"{kind}_grid_thw"), **more)
        if features is not None:
            found[kind] = features
    return found


def runs_on(device: torch.device) -> bool:
    """Whether the kernels have code for a device: a build without CUDA, or for other GPUs, leaves
    its work to torch."""
    return device.type == "cpu" or (device.type == "cuda" and machine_of(device).has_code)


def _joined(features: Any) -> Tensor:
    return features if isinstance(features, Tensor) else torch.cat(list(features))


def _embeddings(model: Any, ids: Tensor, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[B, S, h] of ids [B, S]: words, with the features [n, h] of "image" and "video" at their
    placeholders; and the row at each position, int32 [B * S]."""
    rows = list(features.values())
    tokens = [getattr(model.config, f"{kind}_token_id") for kind in features]
    counts = None if torch.compiler.is_compiling() else [len(r) for r in rows]
    ids = ids.long()  # torch's embedding takes int32 too
    index = visual_index(ids.reshape(-1), tokens, counts, separate=True)
    table = model.get_input_embeddings()
    if is_plain(table, nn.Embedding) and _is_table(table) and runs_on(table.weight.device):
        weight = table.weight
        visual = _together(rows, weight)
        flat_ids, index = ids.reshape(-1).to(weight.device), index.to(weight.device)
        padding_idx = table.padding_idx
        flat = visual_embedding(flat_ids, weight, visual, index, padding_idx=padding_idx)
        return flat.view(*ids.shape, -1), index
    words = table(ids)
    visual = _together(rows, words)
    ours = words.dtype in DTYPES and runs_on(words.device)
    scatter = scatter_visual if ours else scatter_visual_reference
    flat = words.reshape(-1, words.shape[-1])
    return scatter(flat, visual, index.to(words.device)).view_as(words), index


def _together(rows: list[Tensor], like: Tensor) -> Tensor:
    """Cast to like's type when they are one tensor: under autocast torch.cat refuses the other type
    of 16 bits, which that may be."""
    return torch.cat([r.to(like.device, rows[0].dtype) for r in rows]).to(like.dtype)


def is_plain(module: Any, kind: Any) -> bool:
    """Whether a module of class `kind` is nothing but its weight: no hook waits to see words alone
    (NEFTune), to move the weight here (accelerate) or to gather it (FSDP, DeepSpeed)."""
    return (
        type(module) is kind
        and not has_hooks(module)
        and type(module.weight) in (Tensor, nn.Parameter)
        and module.weight.dtype in DTYPES
    )


def has_hooks(module: Any) -> bool:
    """Its own, or those of all modules."""
    hooks = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    held = any(getattr(module, f"_{name}") for name in hooks)
    everywhere = any(getattr(torch_modules, f"_global_{name}") for name in hooks)
    return held or "forward" in vars(module) or everywhere


def _is_table(table: Any) -> bool:
    plain = table.max_norm is None and not table.sparse and not table.scale_grad_by_freq
    return plain and table.weight.is_contiguous()
