"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL of transformers with this package's kernels, in one line.

    from vlmkernels.integrations import transformers as hf
    hf.enable(model)

after the model was made or loaded, before or after peft, torch.compile or a trainer wraps it.
`disable(model)` takes everything back. What is replaced:

- vision tower: `vision_attention`'s kernels over all segments of the batch at once, straight from
  the projection and with the rotary embedding inside, in place of a split, a rotation and one
  attention call per image, frame or window;
- its patch embedding: one matrix product in place of a Conv3d with strides as long as its kernel;
- embeddings: `visual_embedding` in place of a lookup of all tokens and a masked_scatter for images
  and another for videos. Where the embedding is not a plain torch.nn.Embedding (peft may wrap it)
  or has hooks, its rows are taken as they come and `scatter_visual` puts the visual rows over
  them. With `inputs_embeds` given, transformers' own code runs. Qwen3-VL's DeepStack features are
  added in place by `add_visual_` in place of a clone of the hidden states for each; where a layer
  has hooks, which may keep its result, to a copy;
- language model: the attention interface "vlmkernels" (also by itself:
  `attn_implementation="vlmkernels"` after `register()`): packed batches, by position ids as
  transformers detects them, and padded ones are segments of `varlen_attention`. What it is not made
  for goes to transformers' sdpa: decoding with a cache, masks with holes, dropout, float64, a
  compiled graph with padding, and on CUDA batches without padding. What neither computes is
  refused: docs/4-kernels.md has the table.
- loss: in training, with labels, `linear_cross_entropy` in place of lm_head and loss_function.
  **`logits` of the output is then None** (as with Liger-Kernel). `model(.., skip_logits=False)`
  gives them, skip_logits=True leaves them out in evaluation too, and enable(model, loss=False)
  keeps transformers' loss, for trainers that read logits. Where the head is more than a matrix
  (adapters, hooks, a bias) or the loss the user's, transformers' own code runs.

Weights, state dicts and results stay those of the model, up to the order of float sums; outputs at
padding positions differ, as they do between transformers' own implementations.
The tests run with transformers 5.24.0 and, on Python 3.10, 5.20.2; tried by hand: 5.23, 5.14, 5.10,
5.3, 4.57.6. It needs 4.53 or later, where attention became an interface; Qwen3-VL's embeddings need
5.3, its loss 5.18, continuous batching 5.24. `enable` says so.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PretrainedConfig

from vlmkernels.integrations.transformers.attention import MODEL_TYPES, NAME, register
from vlmkernels.integrations.transformers.head import ModelWithLoss
from vlmkernels.integrations.transformers.modules import (
    POSITION_ARGUMENTS,
    LanguageModel,
    Model,
    PatchEmbed,
    VisionAttention,
    check_forward,
    check_restorable,
    output_class,
    replace,
    restore,
    rotary_table,
)
from vlmkernels.rotary import rotate

__all__ = ["MODEL_TYPES", "NAME", "disable", "enable", "register"]

#: The class that holds vision tower and language model, of each family.
_MODELS = ("Qwen2VLModel", "Qwen2_5_VLModel", "Qwen3VLModel", "Qwen3VLMoeModel")


def enable(
    model: nn.Module,
    *,
    vision: bool = True,
    embedding: bool = True,
    language: bool = True,
    loss: bool = True,
) -> nn.Module:
    """Let a transformers Qwen2-VL, Qwen2.5-VL or Qwen3-VL model use the kernels; returns the model.

    Args:
        model: Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration, Qwen3VLFor..,
            Qwen3VLMoeFor.., their base models, or a wrapper (peft) that has one of them among its
            modules. Its modules get other classes of the same names and its config becomes a copy,
            so that a model that shares it keeps its attention. What holds `model` keeps its own:
            pass the outermost one.
        vision, embedding, language, loss: which parts; see the head of this file. A language model
            with sliding windows keeps its attention.

    Raises:
        ValueError: no such model is in `model`, or something else has replaced the `forward` of
            one of its modules.
    """
    host = _host(model)
    register()
    disable(model)
    try:
        if vision:
            attentions = _vision_attentions(host)
            _check_rotation(attentions[0])
            for attention in attentions:
                check_forward(attention, "vision")
                replace(attention, VisionAttention)
            check_forward(host.visual.patch_embed, "vision")
            replace(host.visual.patch_embed, PatchEmbed)
        text = host.language_model
        language &= "sliding_attention" not in (getattr(text.config, "layer_types", ()) or ())
        if embedding:
            _check_deepstack(host)
            replace(host, Model)
        if language or embedding:
            replace(text, LanguageModel)
        if language:
            _copy_configs(model)
            text.replaced_attention = text.config._attn_implementation
            text.config._attn_implementation = NAME
        if loss:
            for whole in _with_head(model, host):
                replace(whole, ModelWithLoss)
    except ValueError:
        disable(model)
        raise
    return model


def disable(model: nn.Module) -> nn.Module:
    """Take back what `enable` did; returns the model.

    Raises:
        ValueError: something else has changed the class of one of its modules since.
    """
    host = _host(model)
    for module in model.modules():
        check_restorable(module)
    text: Any = host.language_model
    if "replaced_attention" in vars(text):
        if text.config._attn_implementation == NAME:
            text.config._attn_implementation = text.replaced_attention
        del text.replaced_attention
    for module in model.modules():
        restore(module)
    return model


def _host(model: nn.Module) -> Any:
    for module in model.modules():
        if any(c.__name__ in _MODELS for c in type(module).__mro__) and hasattr(module, "visual"):
            return module
    raise ValueError(
        f"model is a {type(model).__name__}; it must be, or contain, one of transformers' "
        f"{' or '.join(_MODELS)} (transformers 4.53 or later)"
    )


def _with_head(model: nn.Module, host: nn.Module) -> list[nn.Module]:
    """The module that puts a head on `host`, if `model` has one.

    Raises:
        ValueError: its forward does not say what it returns, or its loss is another.
    """
    whole = [m for m in model.modules() if m._modules.get("model") is host]
    whole = [m for m in whole if "lm_head" in m._modules]
    for module in whole:
        check_forward(module, "loss")
        if output_class(getattr(type(module), "original", type(module))) is None:
            raise ValueError(
                f"{type(module).__name__}.forward does not say what it returns: this version of "
                "transformers is not known; use enable(model, loss=False)"
            )
        old = Version(transformers.__version__) < Version("5.18")
        if old and hasattr(host.visual, "deepstack_merger_list"):
            raise ValueError(
                "before transformers 5.18 a Qwen3-VL's loss leaves out num_items_in_batch and that "
                "of its routers, so ours would be another: use 5.18, or enable(model, loss=False)"
            )
    return whole


def _copy_configs(model: nn.Module) -> None:
    """Give the model's modules a copy of their configs, which they share as before."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(config := vars(module).get("config"), PretrainedConfig):
            module.config = copy.deepcopy(config, copies)


def _vision_attentions(host: Any) -> list[nn.Module]:
    attentions = [block.attn for block in host.visual.blocks]
    for attention in attentions:
        if type(attention).__name__ == "ModulesToSaveWrapper":
            raise ValueError(
                "peft has a copy of the vision tower's attention (modules_to_save): call enable "
                "before get_peft_model, or enable(model, vision=False)"
            )
        missing = [n for n in ("qkv", "proj", "num_heads") if not hasattr(attention, n)]
        if missing:
            raise ValueError(
                f"the vision tower's {type(attention).__name__} has no {' and no '.join(missing)}: "
                "this version of transformers is not known; use enable(model, vision=False)"
            )
    return attentions


def _check_deepstack(host: Any) -> None:
    """Qwen3VLModel.forward is the one that `Model` stands in for.

    Raises:
        ValueError: it is another one.
    """
    if not hasattr(host.visual, "deepstack_merger_list"):
        return
    check_forward(host, "embedding")
    positions = getattr(host, "compute_3d_position_ids", None)
    takes = inspect.signature(positions).parameters if positions else {}
    if (
        "mm_token_type_ids" not in takes
        or not set(takes) <= set(POSITION_ARGUMENTS)
        or not hasattr(host.language_model, "_deepstack_process")
        or output_class(type(host)) is None
    ):
        raise ValueError(
            f"{type(host).__name__} puts visual rows in in another way: this version of "
            "transformers is not known; use enable(model, embedding=False)"
        )


def _check_rotation(attention: nn.Module) -> None:
    """transformers' own rotation is the one that the kernel computes.

    Raises:
        ValueError: it is another one.
    """
    modules = [sys.modules[c.__module__] for c in type(attention).__mro__]
    name = "apply_rotary_pos_emb_vision"
    theirs = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    x = torch.linspace(-1, 1, 48, device="cpu").view(3, 2, 8)
    angles = torch.linspace(0, 3, 12, device="cpu").view(3, 4)
    cos, sin = (torch.cat((f, f), -1) for f in (angles.cos(), angles.sin()))
    table = rotary_table(cos, sin)
    if theirs is None or not torch.allclose(theirs(x, x, cos, sin)[1], rotate(x, table)):
        raise ValueError(
            f"the vision tower's {type(attention).__name__} rotates queries and keys in another "
            "way: this version of transformers is not known; use enable(model, vision=False)"
        )
