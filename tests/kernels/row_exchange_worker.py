"""One rank of test_row_exchange.py: rows that other ranks own, embedded on this one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kernels.numeric import assert_bitwise  # noqa: E402
from tests.kernels.test_embedding import make  # noqa: E402
from vlmkernels import exchange_rows, row_exchange, visual_embedding  # noqa: E402


def owners(kind: str, rows: int, ranks: int) -> torch.Tensor:
    if kind == "random":
        return torch.randint(0, ranks, (rows,))
    if kind == "one":
        return torch.full((rows,), ranks - 1)
    return torch.arange(rows) * ranks // max(rows, 1)  # "blocks": the tower split over the group


def check(kind: str, shards: list[Any], share: float, group: dist.ProcessGroup | None) -> None:
    rank = dist.get_rank(group)
    ids, weight, visual, index = make(8 * len(shards), 24, torch.bfloat16, share)
    owner = owners(kind, len(visual), len(shards))
    dout = torch.randn(len(ids), 24).bfloat16()
    local = visual[owner == rank]
    local.requires_grad_(len(local) > 0 or len(visual) == 0)  # of the others some do
    plan = row_exchange(index, owner, shards, rank)
    assert [len(s) for s in plan.send] == counts(index, owner, shards, rank)
    got = exchange_rows(local, plan, group)
    assert len(got) == sum(plan.receive) and got.requires_grad
    assert not exchange_rows(local.detach(), plan, group).requires_grad

    everything = visual.clone().requires_grad_()
    total = torch.zeros_like(visual)
    for member, shard in enumerate(shards):
        if shard is None:
            continue
        whole = visual_embedding(ids, weight, everything, index, shard=shard)
        first, rows = shard[0] * len(whole), len(whole)
        here = dout[first : first + rows]
        total += torch.autograd.grad(whole, everything, here)[0]
        if member == rank:
            out = visual_embedding(ids, weight, got, plan.visual_index, shard=shard)
            assert_bitwise("embeddings", out.detach(), whole.detach())
            out.backward(here)
    if shards[rank] is None:
        assert len(got) == 0
        got.sum().backward()  # it must answer the others all the same
    if local.requires_grad:
        assert local.grad is not None
        assert_bitwise("gradient of own rows", local.grad, total[owner == rank])
    # A gradient with strides of 0 counts how often each row has been taken.
    exchange_rows(local, plan, group).sum().backward()
    if local.requires_grad:
        taken = torch.zeros(len(visual))
        for shard in shards:
            part, parts = shard or (0, 1)
            here = index.chunk(parts)[part] if shard and len(index) else index[:0]
            taken.index_add_(0, here[here >= 0].long(), torch.ones(int((here >= 0).sum())))
        want = total[owner == rank] + taken[owner == rank, None].bfloat16()
        assert_bitwise("gradient of a sum", local.grad, want)


def counts(index: torch.Tensor, owner: torch.Tensor, shards: list[Any], rank: int) -> list[int]:
    """By brute force: rows that `rank` sends to each."""
    sent = []
    for shard in shards:
        part, parts = shard or (0, 1)
        size = len(index) // parts
        here = index[part * size : (part + 1) * size].tolist() if shard else []
        sent.append(sum(row >= 0 and int(owner[row]) == rank for row in here))
    return sent


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(int(sys.argv[1]))
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    for group in (None, pair):
        ranks = dist.get_world_size(group)
        sequence = [(r, ranks) for r in range(ranks)]
        elsewhere = [None] * (ranks - 1) + [(0, 1)]  # the embedding on one rank only
        twice = [(r // 2, ranks // 2) for r in range(ranks)]  # every part on two ranks
        for shards in (sequence, elsewhere, twice):
            for kind in ("random", "one", "blocks"):
                for share in (0.6, 0.0, 1.0):
                    check(kind, shards, share, group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
