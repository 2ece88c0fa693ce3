"""python -m tests.gpu.step_worker DTYPE: losses of four steps, ours and transformers', as JSON.

On the GPU, or without one on the CPU. Heads are as wide as the kernels have them, rows of the
tower's MLP no whole units of 16 bytes in 16 bits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import train_peers, train_sizes, train_step
from benchmarks.train_peers import Plain

STEPS, LR = 4, 1e-3


def size() -> train_sizes.Size:
    drawn: list[train_sizes.Parts] = [
        [9, ("image", (1, 12, 20)), 40],
        [30, 50],
        [5, ("image", (1, 24, 8)), 7, ("image", (1, 4, 4)), 33],
        [14, ("image", (1, 16, 26)), 90],
    ]
    return train_sizes.Size(
        name="step",
        text=train_sizes._text(256, 4, 704, 3),
        vision=train_sizes._tower(160, 2, 340, 3),
        vocabulary=1024,
        mrope_section=[8, 12, 12],
        drawn=drawn,
        packs=[[0, 1], [2, 3]],
        pack_length=512,
        bar=0.0,
    )


def main(name: str) -> None:
    train_step._quiet()
    train_step.LR = train_peers.LR = LR
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step, dtype = size(), train_step.DTYPES[name]
    with tempfile.TemporaryDirectory() as folder:
        step.write_model(Path(folder))
        _, packs, ours = train_step.our_step(Path(folder), step, dtype)
        targets = sum(pack.target_tokens for pack in packs)
        batches = [train_peers.padded([sample]) for sample in step.samples]
        runs = {"ours": ours}
        for kind in {"float32", name}:
            plain = Plain(Path(folder), targets, train_step.DTYPES[kind], device)
            runs[kind] = list(plain.steps(batches).values())[-1]
    print(json.dumps({kind: [run() for _ in range(STEPS)] for kind, run in runs.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
