"""One rank of test_linear_cross_entropy_ranks.py: a vocabulary in parts against all of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kernels.test_linear_cross_entropy import compare, make  # noqa: E402
from vlmkernels import linear_cross_entropy  # noqa: E402
from vlmkernels.loss import op  # noqa: E402

CLASSES = 301


def check(
    ends: list[int], dtype: torch.dtype, chunk: int, weight_grad: str, **options: Any
) -> None:
    rank = dist.get_rank()
    op.CHUNK_BYTES = chunk
    x, weight, targets = make(29, CLASSES, 24, dtype, 0.8)
    targets[0] = 1
    part = slice(0 if rank == 0 else ends[rank - 1], ends[rank])
    local = weight.detach()[part].contiguous().requires_grad_()
    local.main_grad = torch.zeros(local.shape)  # type: ignore[attr-defined]
    dout = torch.rand(29) + 0.5 if options["reduction"] == "none" else torch.ones(())
    loss = linear_cross_entropy(
        x,
        local,
        targets,
        group=dist.group.WORLD,
        vocab_range=(part.start, part.stop),
        weight_grad=weight_grad,  # type: ignore[arg-type]
        **options,
    )
    loss.backward(dout)
    partial = local.main_grad if weight_grad == "main_grad" else local.grad  # type: ignore
    whole = torch.zeros(weight.shape)
    whole[part] = partial.float()
    dist.all_reduce(whole)
    got = {"loss": loss.detach(), "dhidden": x.grad, "dweight": whole.to(dtype)}
    options.pop("grad_scale", None)
    compare(got, x.detach(), weight.detach(), targets, dout, **options)  # type: ignore[arg-type]


def check_refusals() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    x, weight, targets = make(5, 12, 4, torch.float32)
    half = weight.detach()[:6]

    def run(hidden: Tensor, part: tuple[int, int]) -> None:
        linear_cross_entropy(hidden, half, targets[: len(hidden)], group=group, vocab_range=part)

    for message, hidden, part in (
        (r"\[0, 6, 6, 5, 4, 1, 0, 0\]; \[7, 13, 6, ", x, (7 * rank, 7 * rank + 6)),
        (r"\[0, 6, 6, 5, 4, 1, 0, 0\]; \[6, 11, 6, ", x, (6 * rank, 6 * rank + 6 - rank)),
        (r"\[0, 6, 6, 5, 4, 1, 0, 0\]; \[0, 6, 6, ", x, (0, 6)),
        (r"; \[6, 12, 6, 4, 4, 1, 0, 0\] on the ranks", x[: 5 - rank], (6 * rank, 6 * rank + 6)),
        (r"; \[6, 12, 6, 5, 4, 0, 0, 0\] on", x.detach() if rank else x, (6 * rank, 6 * rank + 6)),
    ):
        with pytest.raises(ValueError, match=message):
            run(hidden, part)
    wrong = targets.clone()
    wrong[3] = 12
    with pytest.raises(ValueError, match=r"targets\[3\] is 12; it must be 0 to 11"):
        linear_cross_entropy(x, half, wrong, group=group, vocab_range=(6 * rank, 6 * rank + 6))
    with pytest.raises(ValueError, match="give both, or neither"):
        linear_cross_entropy(x, half, targets, group=group)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(int(sys.argv[1]))
    cases: list[dict[str, Any]] = [
        {"reduction": "mean"},
        {"reduction": "mean", "label_smoothing": 0.1, "z_loss": 1e-2},
        {"reduction": "sum", "grad_scale": 1.0},
        {"reduction": "none", "label_smoothing": 0.1},
    ]
    for ends in ([150, 301], [37, 301], [301, 301]):  # the last rank may have none
        for dtype in (torch.float32, torch.bfloat16):
            for chunk in (1 << 20, 20_000 if dtype == torch.float32 else 2000):
                for options in cases:
                    for weight_grad in ("dense", "main_grad"):
                        check(ends, dtype, chunk, weight_grad, **options)
    check_refusals()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
