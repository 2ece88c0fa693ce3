"""varlen_attention as an attention interface of transformers, for causal language models.

B = batch, S = positions of a row, H = heads, Hkv = key/value heads, D = head_dim, n = segments.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vlmkernels import varlen_attention
from vlmkernels._native import DTYPES
from vlmkernels.attention.api import longest_segment

#: The name of the interface: attn_implementation="vlmkernels".
NAME = "vlmkernels"

#: config.model_type of the models that the tests compare with transformers' own attention. Others
#: may pass arguments or read masks in ways of their own, so they are refused.
MODEL_TYPES = (
    *("gemma", "granite", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "smollm3", "starcoder2"),
    *("qwen2_vl", "qwen2_vl_text", "qwen2_vl_vision"),
    *("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_vl_vision"),
    *("qwen3_vl", "qwen3_vl_text", "qwen3_vl_vision"),
    *("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
)

#: transformers' own functions of some implementations.
_OWN = {"sdpa": sdpa_attention_forward, "flash_attention_2": flash_attention_forward}

#: Keyword arguments that don't change what attention computes.
NEUTRAL = {
    *("cache_position", "max_length_k", "max_length_q", "num_items_in_batch", "position_ids"),
    *("output_hidden_states", "output_router_logits", "use_cache"),
    *("ignore_index", "shift_labels"),  # of the loss: transformers hands all of them to all
    "sliding_window",  # the mask holds it, as for sdpa
}


def register() -> None:
    """Make "vlmkernels" known to transformers as an attention implementation.

    `from_pretrained(.., attn_implementation="vlmkernels")` then takes models of MODEL_TYPES.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S, D], key and value [B, Hkv, K, D] -> [B, S, H, D].

    attention_mask: None: causal; int32 [n + 1], from `mask`: cu_seqlens of segments of the
    flattened batch, causal in each; else transformers' mask, for its sdpa.

    Raises:
        ValueError: a model that is not one of MODEL_TYPES, or an argument that is not known.
    """
    check_model(module.config)
    batch, _, length, head_dim = query.shape
    if isinstance(kwargs.get("cu_seq_lens_k"), dict):  # which it takes from the cache
        raise ValueError(
            f"continuous batching (generate_batch) gives {NAME!r} its keys and values from "
            "transformers 5.24 on: use that, or enable(model, language=False)"
        )
    if attention_mask is None and kwargs.get("read_index") is not None:  # continuous batching
        lengths = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
        attention_mask = _paged_mask(*lengths, length, key.shape[2])
        options: dict[str, Any] = dict(scaling=scaling, dropout=dropout)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    segments = attention_mask is not None and attention_mask.dim() == 1
    kwargs.setdefault("output_attentions", getattr(module.config, "output_attentions", None))
    check_arguments(module, kwargs, segments)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and key.shape[2] == length > 1 and causal
    kind = query.device.type
    # As sdpa's autocast does; torch knows of none on the meta device.
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    if autocast and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    if (
        not (segments or plain and query.device.type == "cpu")
        or query.dtype not in DTYPES
        or dropout
        or head_dim > 256
    ):
        if segments:
            attention_mask = _block_mask(attention_mask, batch, length)  # type: ignore[arg-type]
        options = dict(scaling=scaling, dropout=dropout, is_causal=is_causal)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if segments:
        assert attention_mask is not None
        cu_seqlens = attention_mask
        max_seqlen = known_max_seqlen(attention_mask) if query.is_cuda else None
    else:
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
        max_seqlen = length
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = varlen_attention(q, k, v, cu_seqlens, max_seqlen=max_seqlen, causal=True, scale=scaling)
    return out.view(batch, length, *out.shape[1:]), None  # unflatten: not on Python 3.10, compiled


def check_model(config: Any) -> None:
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"attn_implementation is {NAME!r}, which is tested with {', '.join(MODEL_TYPES)} and "
            f"not with {config.model_type!r}: use another one for this model"
        )


def check_replaced() -> None:
    """Raises ValueError where another library has put itself into the place of transformers' own
    attention, as DeepSpeed's sequence parallelism does, and would be passed by."""
    for name, function in ALL_ATTENTION_FUNCTIONS.items():
        others = getattr(function, "__module__", "").startswith("deepspeed")
        if others or function is not _OWN.get(name, function):
            raise ValueError(
                f"something (DeepSpeed's sequence parallelism, say) has replaced transformers' "
                f"{name!r} attention, and {NAME!r} would pass it by: use enable(model, "
                "language=False), or another attn_implementation"
            )


def check_arguments(module: Any, kwargs: dict[str, Any], segments: bool = False) -> None:
    """Refuse what would change the result and is not computed.

    Raises:
        ValueError: an argument that is not known is neither None nor False.
    """
    for name, value in kwargs.items():
        if value is None or value is False or name in NEUTRAL:
            continue
        if name == "output_attentions":
            raise ValueError(
                f"output_attentions is {value}, but attention by {NAME!r} never forms its weights; "
                "call model.set_attn_implementation('eager')"
            )
        if name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
            # Samples of a packed row: told apart by position ids, or there is only one.
            if segments or (name != "seq_idx" and len(value) == 2):
                continue
            if name == "seq_idx" and (value == value[..., :1]).all():
                continue
            raise ValueError(
                f"{name} is given, but position_ids don't tell the samples of a row apart: pass "
                "position_ids that start again at every sample (to Qwen2-VL and Qwen2.5-VL as "
                "[4, B, S], text positions first), and no attention_mask"
            )
        raise ValueError(
            f"{type(module).__name__} passes {name} to its attention, which {NAME!r} does not "
            "compute: use another attn_implementation, or leave the argument out"
        )


def mask(**options: Any) -> Tensor | None:
    """Called once a forward: None for plain causal attention, int32 [n + 1] where padding or
    packing cuts the flattened batch into segments, else sdpa's mask.

    Raises:
        ValueError: a model that is not one of MODEL_TYPES.
    """
    check_model(options["config"])
    check_replaced()
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
    plain = sees is causal_mask_function
    if plain and options.get("allow_is_causal_skip") is False:
        return sdpa_mask(**options)  # the model reads the mask itself
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
    """bool [B, 1, S, S] of segments: for sdpa, where it serves instead."""
    positions = torch.arange(batch * length, device=cu_seqlens.device)
    segment = torch.bucketize(positions, cu_seqlens[1:], right=True).view(batch, length)
    return (segment[:, :, None] == segment[:, None, :]).tril()[:, None]


def _paged_mask(cu_queries: Tensor, cu_keys: Tensor, queries: int, keys: int) -> Tensor:
    """bool [1, 1, Q, K] of sequences whose queries are their last tokens: causal in each. Rows
    behind the last sequence see all, so that nothing of them is NaN."""
    cu_queries, cu_keys = cu_queries.long(), cu_keys.long()
    q, k = (torch.arange(n, device=cu_queries.device) for n in (queries, keys))
    of_q, of_k = (
        torch.bucketize(x, cu[1:], right=True) for x, cu in ((q, cu_queries), (k, cu_keys))
    )
    padding = of_q == len(cu_queries) - 1
    # From its end on, a sequence's keys are as its queries.
    before_end = cu_queries[1:][of_q.clamp(max=len(cu_queries) - 2)] - q
    sees = k < (cu_keys[1:][of_q.clamp(max=len(cu_keys) - 2)] - before_end + 1)[:, None]
    return ((of_q[:, None] == of_k) & sees | padding[:, None])[None, None]


def kept_beside(name: str, make: Callable[..., Any], first: Tensor, *others: Tensor) -> Any:
    """make(first, *others), kept as an attribute of `first`, for all layers that get the same
    tensors, until one of them is written to. Not while torch.compile traces, or a CUDA graph is
    captured, which is replayed with what they then hold."""
    tensors = first, *others
    if torch.compiler.is_compiling():
        return make(*tensors)
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return make(*tensors)
    # Inference mode counts no writes; transformers makes these tensors anew for each forward.
    versions = [None if x.is_inference() else x._version for x in tensors]
    known = getattr(first, name, None)
    if known is None or known[0] != versions or any(map(is_not, known[1], others)):
        known = versions, others, make(*tensors)
        setattr(first, name, known)
    return known[2]


def known_max_seqlen(cu_seqlens: Tensor) -> int:
    """Tokens of the longest segment; on CUDA the device is waited for, once for all layers."""
    return kept_beside("_vlmkernels_max_seqlen", longest_segment, cu_seqlens)
