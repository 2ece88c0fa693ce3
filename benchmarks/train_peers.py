"""transformers' training step: sdpa attention, cross entropy, clipping, torch's fused AdamW.

Without flash-attn transformers has no packing, so it may take the samples in the way that suits it
best: one by one, in right-padded batches (no mask is needed: causal attention never looks at the
padding) or packed with a block-diagonal mask.

What is trained in bfloat16 has float32 masters, gradients and moments, and products in bfloat16,
as vlmtrain has it. Bytes a parameter:

- vlmtrain: float32 16 (weight, gradient, two moments); bfloat16 18 (2 + 4 + 4 for the master, 8).
- transformers, float32: 16.
- transformers, autocast: 18, float32 weights, of which torch.autocast makes bfloat16 copies in each
  forward pass.
- transformers, masters: 20, a bfloat16 model with its gradients, added to those of the float32
  masters after each batch; the weights are copies of the masters, made after each step.

Both bfloat16 forms share masters and optimizer here, so that they fit in memory together.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity import reference
from tests.parity.reference import Sample

LR, BETAS, EPS, DECAY, CLIP = 1e-7, (0.9, 0.95), 1e-8, 0.01, 1.0

Batch = tuple[dict[str, Any], Tensor]  # the model's inputs and labels [B, L]


class Plain:
    """The model of a Hugging Face folder, and one step over batches of it in each form."""

    def __init__(self, folder: Path, targets: int, dtype: torch.dtype, device: str = "cpu") -> None:
        import transformers

        model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model = model.to(device).train()
        self.device = device
        self.params = list(self.model.parameters())
        self.half: Any = None
        if dtype != torch.float32:
            self.half = copy.deepcopy(self.model).to(dtype)
        self.targets, self.dtype = targets, dtype
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.params if p.dim() > 1], "weight_decay": DECAY},
                {"params": [p for p in self.params if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=LR,
            betas=BETAS,
            eps=EPS,
            fused=True,
        )

    def steps(self, batches: list[Batch]) -> dict[str, Callable[[], float]]:
        """One step over `batches`, by the name of its form ("" for the only one)."""
        batches = self.on_device(batches)
        if self.half is None:
            return {"": partial(self._step, batches, self.model, contextlib.nullcontext())}
        autocast = torch.autocast(self.device, self.dtype)
        return {
            ", autocast": partial(self._step, batches, self.model, autocast),
            ", masters": partial(self._step, batches, self.half, contextlib.nullcontext()),
        }

    def on_device(self, batches: list[Batch]) -> list[Batch]:
        return [
            ({name: x.to(self.device) for name, x in inputs.items()}, labels.to(self.device))
            for inputs, labels in batches
        ]

    def gradients(self, batches: list[Batch], model: Any, cast: Any) -> float:
        """Added to those of `params`; the loss. model: `model` or `half`."""
        losses = []
        for inputs, labels in batches:
            with cast:
                logits = model(**inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            del logits
            (loss / self.targets).backward()
            losses.append(loss.detach())
            if model is self.half:
                self._take_gradients(model)
        return float(torch.stack(losses).sum()) / self.targets  # waits for a GPU once, as ours

    def _step(self, batches: list[Batch], model: Any, cast: Any) -> float:
        # Megatron's stand-in for CUDA, where it is installed, is not the peer's to pay for.
        with torch._C.DisableTorchFunction():
            loss = self.gradients(batches, model, cast)
            torch.nn.utils.clip_grad_norm_(self.params, CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if model is self.half:
                with torch.no_grad():
                    torch._foreach_copy_(list(model.parameters()), self.params)
        return loss

    def _take_gradients(self, model: Any) -> None:
        for master, half in zip(self.params, model.parameters(), strict=True):
            if half.grad is None:  # of the tower, where a batch has no image
                continue
            if master.grad is None:
                master.grad = half.grad.float()
            else:
                master.grad.add_(half.grad)
            half.grad = None


def batches(samples: Sequence[Sample], order: Sequence[int], tokens: int) -> list[list[int]]:
    """`order` cut into batches that have, padded, at most that many tokens."""
    found: list[list[int]] = [[]]
    longest = 0
    for i in order:
        longest = max(longest, len(samples[i].input_ids))
        if found[-1] and longest * (len(found[-1]) + 1) > tokens:
            found.append([])
            longest = len(samples[i].input_ids)
        found[-1].append(i)
    return found


def padded(samples: list[Sample]) -> Batch:
    """A right-padded batch: input_ids [B, L], position_ids [3, B, L], labels [B, L]."""
    length = max(len(s.input_ids) for s in samples)

    def stack(tensors: list[Tensor], value: int) -> Tensor:
        return torch.stack([F.pad(t, (0, length - t.shape[-1]), value=value) for t in tensors], -2)

    inputs = {
        "input_ids": stack([s.input_ids for s in samples], reference.PAD),
        "position_ids": stack([s.position_ids for s in samples], 0),
        **_media(samples),
    }
    return inputs, stack([s.labels for s in samples], -100)


def packed(samples: list[Sample]) -> Batch:
    """One sequence with a causal block-diagonal mask [1, 1, S, S]."""
    lengths = torch.tensor([len(s.input_ids) for s in samples])
    segment = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    same = segment[:, None] == segment[None, :]
    inputs = {
        "input_ids": torch.cat([s.input_ids for s in samples])[None],
        "position_ids": torch.cat([s.position_ids for s in samples], 1)[:, None],
        "attention_mask": same.tril()[None, None],
        **_media(samples),
    }
    return inputs, torch.cat([s.labels for s in samples])[None]


def _media(samples: list[Sample]) -> dict[str, Tensor]:
    media = [m for s in samples for m in s.media]
    if not media:
        return {}
    return {
        "pixel_values": torch.cat([m[2] for m in media]),
        "image_grid_thw": torch.tensor([m[1] for m in media]),
    }
