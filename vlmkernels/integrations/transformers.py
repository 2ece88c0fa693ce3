"""Qwen2-VL and Qwen2.5-VL of transformers with this package's kernels, in one line.

    from vlmkernels.integrations import transformers as hf
    hf.enable(model)

after the model was made or loaded, before or after peft, torch.compile or a trainer wraps it.
`disable(model)` takes everything back. What is replaced:

- vision tower: `vision_attention`'s kernels over all segments of the batch at once, straight from
  the projection and with the rotary embedding inside, in place of a split, a rotation and one
  attention call per image, frame or window;
- embeddings: `visual_embedding` in place of a lookup of all tokens and a masked_scatter for images
  and another for videos. Hooks of the embedding module run as before. Where it is not a plain
  torch.nn.Embedding (peft may wrap it), its rows are taken as they come and `scatter_visual` puts
  the visual rows over them. With `inputs_embeds` given, transformers' own code runs;
- language model: the attention interface "vlmkernels" (also by itself:
  `attn_implementation="vlmkernels"` after `register()`): packed batches, by position ids as
  transformers detects them, and padded ones are segments of `varlen_attention`. What it is not made
  for goes to transformers' sdpa: decoding with a cache, masks with holes, dropout, a compiled
  graph with padding, and on CUDA batches without padding.

Weights, state dicts and results stay those of the model, up to the order of float sums.
Tried with transformers 5.23.0 (the tests) and 4.57.6. It needs 4.53 or later, where attention
became an interface; `enable` says so where a name it needs is missing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vlmkernels import scatter_visual, varlen_attention, visual_embedding, visual_index
from vlmkernels._native import DTYPES
from vlmkernels.attention.api import longest_segment, rotated_attention
from vlmkernels.rotary import rotate

NAME = "vlmkernels"

#: The class that holds vision tower and language model, of each family.
_MODELS = ("Qwen2VLModel", "Qwen2_5_VLModel")


def enable(
    model: nn.Module, *, vision: bool = True, embedding: bool = True, language: bool = True
) -> nn.Module:
    """Let a transformers Qwen2-VL or Qwen2.5-VL model use the kernels; returns the model.

    Args:
        model: Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration, their base
            models, or a wrapper (peft) that has one of them among its modules.
        vision, embedding, language: which parts; see the head of this file. A language model with
            sliding windows keeps its attention.

    Raises:
        ValueError: no such model is in `model`, or something else has replaced the `forward` of
            one of its modules.
    """
    host = _host(model)
    register()
    disable(host)
    try:
        if vision:
            attentions = _vision_attentions(host)
            _check_rotation(attentions[0])
            for attention in attentions:
                _replace(attention, _vision_attention)
        if embedding:
            table = host.get_input_embeddings()
            if type(table) is nn.Embedding:
                _replace(table, _lookup)
            _replace(host, _model)
        config = host.language_model.config
        if language and "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            config._vlmkernels_replaced = config._attn_implementation
            config._attn_implementation = NAME
    except ValueError:
        disable(host)
        raise
    return model


def disable(model: nn.Module) -> nn.Module:
    """Take back what `enable` did; returns the model."""
    host = _host(model)
    for module in host.modules():
        for slot in ("forward", "_old_forward"):
            if getattr(module.__dict__.get(slot), "__func__", None) in _REPLACEMENTS:
                if slot == "forward":
                    del module.forward
                else:
                    module._old_forward = MethodType(type(module).forward, module)
    config = host.language_model.config
    if hasattr(config, "_vlmkernels_replaced"):
        config._attn_implementation = config._vlmkernels_replaced
        del config._vlmkernels_replaced
    return model


def register() -> None:
    """Make "vlmkernels" known to transformers as an attention implementation.

    For causal language models of any kind: `from_pretrained(.., attn_implementation="vlmkernels")`.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def _host(model: nn.Module) -> Any:
    for module in model.modules():
        if type(module).__name__ in _MODELS and hasattr(module, "visual"):
            return module
    raise ValueError(
        f"model is a {type(model).__name__}; it must be, or contain, one of transformers' "
        f"{' or '.join(_MODELS)} (transformers 4.53 or later)"
    )


def _vision_attentions(host: Any) -> list[nn.Module]:
    attentions = [block.attn for block in host.visual.blocks]
    for attention in attentions:
        missing = [n for n in ("qkv", "proj", "num_heads") if not hasattr(attention, n)]
        if missing:
            raise ValueError(
                f"the vision tower's {type(attention).__name__} has no {' and no '.join(missing)}: "
                "this version of transformers is not known; use enable(model, vision=False)"
            )
    return attentions


def _replace(module: nn.Module, function: Callable) -> None:
    """Make `function` the module's forward; under accelerate's hooks, if it has some."""
    slot = "_old_forward" if hasattr(module, "_old_forward") else "forward"
    if slot == "forward" and "forward" in module.__dict__:
        raise ValueError(
            f"the forward of a {type(module).__name__} was replaced by something else; call "
            "enable(model) before that"
        )
    setattr(module, slot, MethodType(function, module))


# ---- vision tower --------------------------------------------------------------------------------


def _vision_attention(
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
    qkv = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1))
    if cu_seqlens.is_cuda and max_seqlen is None and not torch.compiler.is_compiling():
        max_seqlen = _max_seqlen(cu_seqlens)
    table = _table(*position_embeddings)
    out = rotated_attention(qkv, table, cu_seqlens.to(torch.int32), max_seqlen=max_seqlen)
    return self.proj(out.flatten(1))


def _table(cos: Tensor, sin: Tensor) -> Tensor:
    """float32 [P, D] of cos and sin [P, D], whose halves are alike; made once for all layers."""
    known = getattr(cos, "_vlmkernels_table", None)
    if known is None:
        half = cos.shape[-1] // 2
        known = torch.cat((cos[:, :half], sin[:, :half]), -1).float()
        if not torch.compiler.is_compiling():
            cos._vlmkernels_table = known  # type: ignore[attr-defined]
    return known


def _check_rotation(attention: nn.Module) -> None:
    """transformers' own rotation is the one that the kernel computes.

    Raises:
        ValueError: it is another one.
    """
    theirs = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb_vision", None)
    x = torch.linspace(-1, 1, 48, device="cpu").view(3, 2, 8)
    angles = torch.linspace(0, 3, 12, device="cpu").view(3, 4)
    cos, sin = (torch.cat((f, f), -1) for f in (angles.cos(), angles.sin()))
    if theirs is None or not torch.allclose(theirs(x, x, cos, sin)[1], rotate(x, _table(cos, sin))):
        raise ValueError(
            f"the vision tower's {type(attention).__name__} rotates queries and keys in another "
            "way: this version of transformers is not known; use enable(model, vision=False)"
        )


def _max_seqlen(cu_seqlens: Tensor) -> int:
    """The longest segment; the device is asked once for all layers that get the same tensor."""
    known = getattr(cu_seqlens, "_vlmkernels_max_seqlen", None)
    if known is None:
        known = longest_segment(cu_seqlens)
        cu_seqlens._vlmkernels_max_seqlen = known  # type: ignore[attr-defined]
    return known


# ---- embeddings ----------------------------------------------------------------------------------


def _model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's forward with embeddings that have their visual rows already."""
    original = type(self).forward
    if args:
        names = list(inspect.signature(original).parameters)[1 : 1 + len(args)]
        kwargs.update(zip(names, args, strict=True))
    ids = kwargs.get("input_ids")
    if ids is None or kwargs.get("inputs_embeds") is not None:
        return original(self, **kwargs)
    rows, tokens = _visual_rows(self, kwargs, original)
    if not rows or rows[0].dtype not in DTYPES:
        return original(self, **kwargs)
    for name in ("pixel_values", "pixel_values_videos", "mm_encoder_outputs"):
        kwargs.pop(name, None)
    kwargs["inputs_embeds"] = _embeddings(self, ids, rows, tokens)
    return original(self, **kwargs)


def _visual_rows(
    self: Any, kwargs: dict[str, Any], original: Callable
) -> tuple[list[Tensor], list[int]]:
    """Features [n, h] of images and of videos, as far as there are any, and their token ids."""
    named = inspect.signature(original).parameters
    others = {name: value for name, value in kwargs.items() if name not in named}
    encoded = kwargs.get("mm_encoder_outputs") or {}
    rows, tokens = [], []
    for kind, pixels, token in (
        ("image", "pixel_values", "image_token_id"),
        ("video", "pixel_values_videos", "video_token_id"),
    ):
        features = encoded.get(kind)
        if features is None and kwargs.get(pixels) is not None:
            get = getattr(self, f"get_{kind}_features")
            takes = inspect.signature(get).parameters.values()
            more = {"return_dict": True, **others}
            if not any(p.kind == p.VAR_KEYWORD for p in takes):
                more = {}
            features = get(kwargs[pixels], kwargs.get(f"{kind}_grid_thw"), **more)
        if features is None:
            continue
        features = getattr(features, "pooler_output", features)
        rows.append(features if isinstance(features, Tensor) else torch.cat(list(features)))
        tokens.append(getattr(self.config, token))
    return rows, tokens


def _embeddings(self: Any, ids: Tensor, rows: list[Tensor], tokens: list[int]) -> Tensor:
    """[B, S, h] of ids [B, S]: words, with the visual rows at their placeholders."""
    counts = None if torch.compiler.is_compiling() else [len(r) for r in rows]
    index = visual_index(ids.reshape(-1), tokens, counts, separate=True)
    table = self.get_input_embeddings()
    if _is_plain(table):
        visual = torch.cat([r.to(table.weight.device, table.weight.dtype) for r in rows])
        return table(ids, visual=visual, visual_index=index.to(visual.device))
    words = table(ids)
    visual = torch.cat([r.to(words.device, words.dtype) for r in rows])
    flat = words.reshape(-1, words.shape[-1])
    return scatter_visual(flat, visual, index.to(visual.device)).view_as(words)


def _is_plain(table: Any) -> bool:
    """Whether this embedding is nothing but rows of one table, and its forward is `_lookup`."""
    slot = table.__dict__.get("_old_forward", table.__dict__.get("forward"))
    return (
        getattr(slot, "__func__", None) is _lookup
        and type(table) is nn.Embedding
        and type(table.weight) in (Tensor, nn.Parameter)
        and table.weight.dtype in DTYPES
        and table.max_norm is None
        and not table.sparse
        and not table.scale_grad_by_freq
    )


def _lookup(
    self: Any, input: Tensor, visual: Tensor | None = None, visual_index: Tensor | None = None
) -> Tensor:
    """nn.Embedding's forward, and with `visual` [n, h] and `visual_index` [input.numel()] both."""
    if visual is None or visual_index is None:
        return type(self).forward(self, input)
    flat = visual_embedding(
        input.reshape(-1), self.weight, visual, visual_index, padding_idx=self.padding_idx
    )
    return flat.view(*input.shape, -1)


# ---- language model ------------------------------------------------------------------------------


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S, D], key and value [B, Hkv, K, D] -> [B, S, H, D].

    attention_mask: None: causal; int32 [n + 1], from `_mask`: cu_seqlens of segments of the
    flattened batch, causal in each; else transformers' mask, for its sdpa.
    """
    batch, _, length, head_dim = query.shape
    segments = attention_mask is not None and attention_mask.dim() == 1
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    ours = segments or (
        attention_mask is None
        and key.shape[2] == length > 1
        and causal
        and not query.is_cuda
        and query.dtype in DTYPES
    )
    if not ours or dropout or kwargs.get("sliding_window") is not None or head_dim > 256:
        if segments:
            attention_mask = _block_mask(attention_mask, batch, length)  # type: ignore[arg-type]
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if segments:
        assert attention_mask is not None
        cu_seqlens = attention_mask
        max_seqlen = _max_seqlen(attention_mask) if query.is_cuda else None
    else:
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
        max_seqlen = length
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = varlen_attention(q, k, v, cu_seqlens, max_seqlen=max_seqlen, causal=True, scale=scaling)
    return out.view(batch, length, *out.shape[1:]), None  # unflatten: not on Python 3.10, compiled


def _mask(**options: Any) -> Tensor | None:
    """Called once a forward: None for plain causal attention, int32 [n + 1] where padding or
    packing cuts the flattened batch into segments, else sdpa's mask."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    batch, keys = options["batch_size"], options["kv_length"]
    queries = options["q_length"] if "q_length" in options else len(options["cache_position"])
    sees = options.get("mask_function") or causal_mask_function
    padding = options.get("attention_mask")
    if (
        queries != keys  # a cache with something in it
        or options.get("use_vmap")  # a mask function of the user's
        or torch.compiler.is_compiling()
    ):
        return sdpa_mask(**options)
    plain = sees is causal_mask_function and options.get("local_size") is None
    if plain and (padding is None or bool(padding.all())):
        return None
    device = options.get("device", "cpu") if padding is None else padding.device
    start = torch.zeros(batch, queries, dtype=torch.bool, device=device)
    start[:, 0] = True
    exact = plain or _add_packed(start, sees)
    if padding is not None and exact:
        exact = padding.shape == start.shape and _add_padded(start, padding.bool())
    if not exact:
        return sdpa_mask(**options)
    end = start.new_full((1,), batch * queries, dtype=torch.int64)
    return torch.cat([start.flatten().nonzero()[:, 0], end]).to(torch.int32)


def _add_packed(start: Tensor, sees: Callable) -> bool:
    """Mark the first token of every segment in `start` bool [B, S]; False where `sees` is not
    causal attention inside of segments.

    transformers' own mask functions let a token see an interval of tokens, so that its two ends
    tell all; only those of a user may have holes, and they come with use_vmap.
    """
    batch, length = start.shape
    b = torch.arange(batch, device=start.device)[:, None]
    q = torch.arange(length, device=start.device)[None].expand(batch, -1)

    def at(key: Tensor) -> Tensor:
        inside = (key >= 0) & (key < length)
        return inside & sees(b, 0, q, key.clamp(0, length - 1))

    start |= ~at(q - 1)
    first = torch.where(start, q, 0).cummax(1).values
    return bool((at(q) & at(first) & ~at(first - 1) & ~at(q + 1)).all())


def _add_padded(start: Tensor, real: Tensor) -> bool:
    """Mark where real tokens and padding meet; False where a row's real tokens are not in a row."""
    change = real[:, 1:] != real[:, :-1]
    runs = real[:, 0].long() + (change & real[:, 1:]).sum(1)
    start[:, 1:] |= change
    return bool((runs <= 1).all())


def _block_mask(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """bool [B, 1, S, S] of segments: for sdpa, where dropout is asked for."""
    positions = torch.arange(batch * length, device=cu_seqlens.device)
    segment = torch.bucketize(positions, cu_seqlens[1:], right=True).view(batch, length)
    return (segment[:, :, None] == segment[:, None, :]).tril()[:, None]


#: What `enable` may put in a module's place of `forward`; `disable` looks for these.
_REPLACEMENTS = (_vision_attention, _model, _lookup)
