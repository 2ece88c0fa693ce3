"""Lists of rows to send and to receive, by hand and on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from vlmkernels import row_exchange


def test_by_hand() -> None:
    """Rows 0 to 4, owned by ranks 1, 0, 1, 0, 1; sequence cut in two."""
    index = torch.tensor([-1, 2, 0, -1, 1, 4, -1, 3], dtype=torch.int32)
    owner = torch.tensor([1, 0, 1, 0, 1])
    with torch.device("meta"):  # torch's default device changes nothing
        zero = row_exchange(index, owner, [(0, 2), (1, 2)], 0)
    one = row_exchange(index, owner, [(0, 2), (1, 2)], 1)
    assert [s.tolist() for s in zero.send] == [[], [0, 1]]
    assert [s.tolist() for s in one.send] == [[1, 0], [2]]
    assert zero.receive == [0, 2] and one.receive == [2, 1]
    # Rank 1 gets rows 1 and 3 from rank 0, then row 4 of its own.
    assert zero.visual_index.tolist() == [-1, 0, 1, -1, -1, -1, -1, -1]
    assert one.visual_index.tolist() == [-1, -1, -1, -1, 0, 2, -1, 1]
    assert one.visual_index.dtype == torch.int32


def test_wrong_arguments() -> None:
    index = torch.tensor([-1, 0, 1, -1], dtype=torch.int32)
    owner = torch.tensor([0, 1])
    halves = [(0, 2), (1, 2)]
    with pytest.raises(ValueError, match=r"rank is 2; shards has 2 entries"):
        row_exchange(index, owner, halves, 2)
    with pytest.raises(ValueError, match=r"owner\[1\] is 2; shards has 2 entries.* 0 to 1"):
        row_exchange(index, torch.tensor([0, 2]), halves, 0)
    with pytest.raises(ValueError, match=r"visual_index\[2\] is 1, but owner has 1 rows"):
        row_exchange(index, owner[:1], halves, 0)
    with pytest.raises(ValueError, match="4 positions, which 3 shards cannot share equally"):
        row_exchange(index, owner, [(0, 3), (1, 3), (2, 3)], 0)
    with pytest.raises(ValueError, match=r"owner is float32 \[2\]"):
        row_exchange(index, owner.float(), halves, 0)
    wrong: Any
    for wrong, message in (
        (5, "shards is 5; it must hold a part"),
        ([(0, 2), 1], r"shards\[1\] is 1; it must be two whole numbers"),
        ([(0, 2), (2, 2)], r"shards\[1\] is \(2, 2\); it must be \(rank, size\)"),
    ):
        with pytest.raises(ValueError, match=message):
            row_exchange(index, owner, wrong, 0)
    wrong = "0"
    with pytest.raises(ValueError, match="rank is '0'; it must be a whole number"):
        row_exchange(index, owner, halves, wrong)


def test_ranks(seed: int) -> None:
    """On four ranks and on two pairs of them: embeddings and gradients of rows that lie on other
    ranks are those of rows that don't."""
    ranks = run_ranks(["tests/kernels/row_exchange_worker.py", str(seed)], 4)
    assert all(r.code == 0 for r in ranks), "\n\n".join(r.output[-3000:] for r in ranks)
