"""One rank of test_linear_cross_entropy_ranks.py: a vocabulary in parts against all of it."""

from __future__ import annotations

import itertools
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

CLASSES, TOKENS = 301, 30


def check(
    ends: list[int],
    dtype: torch.dtype,
    chunk: int,
    weight_grad: str,
    shard: bool,
    targetless: bool = False,
    **options: Any,
) -> None:
    """`shard`: each rank has half of hidden. Weights are padded; NaN there must not matter."""
    rank = dist.get_rank()
    op.CHUNK_BYTES = chunk
    x, weight, targets = make(TOKENS, CLASSES, 24, dtype, 0.8)
    targets[TOKENS - 1] = 1
    if targetless:
        targets[: TOKENS // 2] = -100  # the first rank's
    part = slice(0 if rank == 0 else ends[rank - 1], ends[rank])
    padding = torch.full((3, 24), float("nan"), dtype=dtype)
    local = torch.cat([weight.detach()[part], padding]).requires_grad_()
    local.main_grad = torch.zeros(local.shape)  # type: ignore[attr-defined]
    dout = torch.rand(TOKENS) + 0.5 if options["reduction"] == "none" else torch.ones(())
    half = TOKENS // 2
    rows = slice(half * rank, half * (rank + 1)) if shard else slice(None)
    hidden = x.detach()[rows].clone().requires_grad_()
    every = list(itertools.pairwise([0, *ends]))
    loss = linear_cross_entropy(
        hidden,
        local,
        targets,
        group=dist.group.WORLD,
        vocab_range=every if shard else every[rank],
        shard=(rank, 2) if shard else None,
        weight_grad=weight_grad,  # type: ignore[arg-type]
        **options,
    )
    loss.backward(dout)
    partial = local.main_grad if weight_grad == "main_grad" else local.grad  # type: ignore
    whole = torch.zeros(weight.shape)
    whole[part] = partial[: part.stop - part.start].float()
    assert partial[part.stop - part.start :].abs().max() == 0
    dist.all_reduce(whole)
    dhidden = torch.zeros(x.shape, dtype=dtype)
    dhidden[rows] = hidden.grad
    if shard:
        dist.all_reduce(dhidden)
    got = {"loss": loss.detach(), "dhidden": dhidden, "dweight": whole.to(dtype)}
    options.pop("grad_scale", None)
    compare(got, x.detach(), weight.detach(), targets, dout, **options)  # type: ignore[arg-type]


def check_exchange() -> None:
    """Rows without a target stay where they are; the others go out once and come back once."""
    rank = dist.get_rank()
    x, weight, targets = make(TOKENS, CLASSES, 24, torch.float32, 0.5)
    sent: list[int] = []

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(len(tensor))
            return original(tensor, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast", "reduce"):
            patch.setattr(dist, name, counted(name))
        linear_cross_entropy(
            x.detach()[TOKENS // 2 * rank :][: TOKENS // 2].requires_grad_(),
            weight.detach()[rank * 150 :][:151],
            targets,
            group=dist.group.WORLD,
            vocab_range=[(0, 150), (150, CLASSES)],
            shard=(rank, 2),
        )
    assert sum(sent) == 2 * int((targets != -100).sum())


def check_refusals() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    x, weight, targets = make(5, 12, 4, torch.float32)
    half = weight.detach()[:6]

    def run(hidden: Tensor, part: tuple[int, int]) -> None:
        linear_cross_entropy(hidden, half, targets[: len(hidden)], group=group, vocab_range=part)

    for message, hidden, part in (
        (r"\[0, 6, 6, 5, 4, 1, 0, 0\]; \[7, 13, 6, ", x, (7 * rank, 7 * rank + 6)),
        (r"\[0, 6, 6, 5, 4, 1, 0, 0\]; \[6, 13, 6, ", x, (6 * rank, 6 * rank + 6 + rank)),
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
    for message, options in (
        ("group is given and vocab_range is None", {}),
        (r"\(7, 12\)\] and weight has 6 rows on rank", {"vocab_range": [(0, 6), (7, 12)]}),
        (r"\(0, 7\), .* the 2 ranges must adjoin", {"vocab_range": [(0, 7), (7, 14)]}),
        (r"is \[\(0, 6\)\] and .* the 2 ranges", {"vocab_range": [(0, 6)]}),
        (rf"of group it must be \({rank}, 2\)", {"shard": (1 - rank, 2)}),
        ("it must have 2 x hidden's 5 rows", {"shard": (rank, 2)}),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(x, half, targets, group=group, **options)


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
                    for number, weight_grad in enumerate(("dense", "main_grad", "main_grad")):
                        check(ends, dtype, chunk, weight_grad, number != 1, **options)
    check([150, 301], torch.float32, 1 << 20, "dense", True, True, reduction="sum")
    check_exchange()
    check_refusals()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
