"""python -m tests.gpu.gradients_worker DTYPE FILE: gradients of a step's packs, ours and those of
transformers, under the names of Hugging Face.

On the GPU, or without one on the CPU. Heads are as wide as the kernels have them, rows of the
tower's MLP no whole units of 16 bytes in 16 bits.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import train_peers, train_sizes, train_step
from benchmarks.train_peers import Plain
from vlmtrain.checkpoint.hf.save import gathered
from vlmtrain.checkpoint.mapping import canonical_name


def ours(folder: Path, size: train_sizes.Size, dtype: torch.dtype) -> dict[str, Tensor]:
    engine, packs, _ = train_step.our_step(folder, size, dtype)
    engine.passes_again(packs)
    return dict(gathered(engine.exported, engine.spec, lambda parameter: parameter.main_grad))


def theirs(folder: Path, size: train_sizes.Size, dtype: torch.dtype) -> dict[str, Tensor]:
    targets = sum(pack.target_tokens for pack in size.batches())
    plain = Plain(folder, targets, dtype, "cuda" if torch.cuda.is_available() else "cpu")
    batches = plain.on_device([train_peers.padded([sample]) for sample in size.samples])
    plain.gradients(batches, plain.half or plain.model, nullcontext())
    return {name: p.grad for name, p in plain.model.named_parameters()}


def main(name: str, out: str) -> None:
    torch.backends.cudnn.allow_tf32 = False  # transformers' patch embedding is a convolution
    dtype, size = train_step.DTYPES[name], train_sizes.mixed(8)
    size = replace(size, vision={**size.vision, "intermediate_size": 340})
    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        size.write_model(folder)
        found: dict[str, Any] = {
            "ours": ours(folder, size, dtype),
            "theirs": theirs(folder, size, dtype),
            "exact": theirs(folder, size, torch.float32),
        }
    torch.save(
        {
            kind: {canonical_name(n): grad.float().cpu() for n, grad in grads.items()}
            for kind, grads in found.items()
        },
        out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
