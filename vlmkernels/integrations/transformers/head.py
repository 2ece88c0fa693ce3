"""The loss of a model with a head, without its logits: `linear_cross_entropy` in the place of
lm_head and loss_function.

B = batch, S = positions of a row, h = hidden size.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from vlmkernels import linear_cross_entropy
from vlmkernels.integrations.transformers.modules import (
    Replacement,
    has_hooks,
    is_plain,
    named_arguments,
    output_class,
    runs_on,
)


class ModelWithLoss(Replacement):
    """In training the loss comes without logits. `skip_logits` of a call says otherwise: False
    gives them, True leaves them out in evaluation too."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = super().forward  # type: ignore[misc]
        kwargs = named_arguments(self, args, kwargs)
        asked = kwargs.pop("skip_logits", None)
        with_labels = kwargs.get("labels") is not None
        skip = self.training and with_labels if asked is None else asked
        weight = _weight(self) if skip and with_labels and not _keeps(kwargs) else None
        if weight is None:
            if asked:
                raise ValueError(
                    "skip_logits is True, but the loss needs logits here: it takes labels, no "
                    "logits_to_keep, transformers' own loss_function, and an lm_head that is a "
                    "torch.nn.Linear without bias, hooks and adapters, in float32 or 16 bits"
                )
            return original(**kwargs)
        labels = kwargs.pop("labels")
        kwargs.pop("logits_to_keep", None)
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        with_routers = _with_routers(self, kwargs)
        outputs = self.model(**kwargs, return_dict=True)
        kind = output_class(self.original)
        assert kind is not None
        # dataclasses.fields of a class would break torch.compile's graph.
        values = {name: getattr(outputs, name, None) for name in kind.__dataclass_fields__}
        loss = _loss(outputs.last_hidden_state, weight, labels, kwargs)
        if with_routers:
            aux_loss = _aux_loss(self, outputs.router_logits, kwargs.get("attention_mask"))
            loss = loss + self.config.text_config.router_aux_loss_coef * aux_loss.to(loss.device)
            values["aux_loss"] = aux_loss
        values |= {"loss": loss, "logits": None}
        result = kind(**values)
        return result if return_dict else (result.loss, None, *result.to_tuple()[1:])


def _with_routers(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the loss has that of a mixture of experts' routers; their logits are asked for."""
    if "output_router_logits" not in inspect.signature(model.original.forward).parameters:
        return False
    asked = kwargs.get("output_router_logits")
    asked = model.config.text_config.output_router_logits if asked is None else asked
    kwargs["output_router_logits"] = asked
    return bool(asked)


def _aux_loss(model: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """transformers' own, from the module that the model's class stands in."""
    text = model.config.text_config
    loss = vars(sys.modules[model.original.__module__])["load_balancing_loss_func"]
    experts = text.num_experts, text.num_experts_per_tok
    return cast(Tensor, loss(router_logits, *experts, attention_mask))


def _keeps(kwargs: dict[str, Any]) -> bool:
    """Whether only some positions are to have logits."""
    keep = kwargs.get("logits_to_keep")
    return not (keep is None or (isinstance(keep, int) and keep == 0))


def _weight(model: Any) -> Tensor | None:
    """The matrix that makes all of the logits; None: the loss needs them."""
    head = model.lm_head
    if type(head).__name__ == "ModulesToSaveWrapper" and not has_hooks(head):  # peft's
        active = getattr(head, "active_adapters", [head.active_adapter])  # not in peft 0.14
        names = [] if head.disable_adapters else active
        saved = [head.modules_to_save[name] for name in names if name in head.modules_to_save]
        head = saved[0] if saved else head.original_module
    if not is_plain(head, nn.Linear) or head.bias is not None:
        return None
    weight = head.weight
    own_loss = model.loss_function is not ForCausalLMLoss
    if own_loss or not weight.is_contiguous() or not runs_on(weight.device):
        return None
    return weight


def _loss(hidden: Tensor, weight: Tensor, labels: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """What ForCausalLMLoss makes of the logits of hidden [B, S, h] and labels [B, S]."""
    ignore_index = kwargs.get("ignore_index", -100)
    shifted = kwargs.get("shift_labels")
    if shifted is None:
        shifted = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    x, weight = hidden.flatten(0, -2).to(weight.device, dtype), weight.to(dtype)
    targets, count = shifted.reshape(-1).to(x.device), kwargs.get("num_items_in_batch")
    if count is None:
        return linear_cross_entropy(x, weight, targets, ignore_index=ignore_index)
    count = count.to(x.device) if isinstance(count, Tensor) else count
    scale = None
    if x.dtype != torch.float16:  # whose gradients a GradScaler multiplies
        scale = (torch.ones((), dtype=torch.float32, device=x.device) / count).float().reshape(())
        scale = torch.where(scale.isinf(), 1.0, scale)  # no targets: NaN, and gradients of 0
    options: Any = dict(ignore_index=ignore_index, reduction="sum", grad_scale=scale)
    return linear_cross_entropy(x, weight, targets, **options) / count
