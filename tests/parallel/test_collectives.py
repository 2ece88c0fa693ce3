"""Ranks that wait for rank 0 longer than the process group's timeout, and for one that is gone."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks

SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from vlmtrain.core.errors import UserError
from vlmtrain.core import collectives

# They meet here, however late one of them starts.
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=4)
)
collectives._BEAT, collectives._SILENCE = 0.2, 3.0

def slow():
    time.sleep(5)
    return {"answer": 42}

assert collectives.on_first_rank(slow) == {"answer": 42}
assert collectives.on_first_rank(lambda: "at once") == "at once"

def bad():
    raise UserError("a bad file")

for _ in range(2):
    try:
        collectives.on_first_rank(bad)
        raise SystemExit("no error")
    except UserError as error:
        assert str(error) == "a bad file" and error.print_here == (rank == 0)

# Of work on every rank one may take longer than the others, and one that fails ends it.
def uneven(check):
    time.sleep(5 * rank)
    return rank

assert collectives.long_on_every_rank(uneven) == rank

def one_fails(check):
    if rank == 1:
        raise UserError("a bad question")
    for _ in range(100):
        check()
        time.sleep(0.1)
    raise SystemExit("not ended")

for _ in range(2):
    try:
        collectives.long_on_every_rank(one_fails)
        raise SystemExit("no error")
    except UserError as error:
        assert str(error) == "a bad question" and error.print_here == (rank == 0)

# Rank 0 stops without a word.
dist.barrier()
if rank == 0:
    time.sleep(10)
else:
    start = time.monotonic()
    try:
        collectives.on_first_rank(slow)
        raise SystemExit("no error")
    except UserError as error:
        assert "rank 0 has given no sign of life for 3 s" in str(error), error
    assert 3 <= time.monotonic() - start < 9
print("fine", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_waiting_for_the_first_rank() -> None:
    ranks = run_ranks(["-c", SCRIPT], 2, timeout=120)
    for rank in ranks:
        assert rank.code == 0 and rank.output.strip().endswith("fine"), rank.output[-2000:]
