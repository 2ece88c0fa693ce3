"""All gloo groups of a process on one network thread."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from vlmtrain.cpu.gloo import _Group

WORKER = """
import glob
import torch
import torch.distributed as dist
from vlmtrain.core import device, launch

device.setup()
dist.init_process_group(device.setup().process_group)
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group(range(size)) for _ in range(5)]
groups += [dist.new_group([0, size - 1]), dist.new_group([rank], use_local_synchronization=True)]

# Of all groups at once, larger than what a socket takes.
inputs = [torch.full((1 << 18,), float(1 + rank + 10 * i)) for i in range(len(groups))]
mine = [i for i, group in enumerate(groups) if isinstance(group, dist.ProcessGroup)]
works = [dist.all_reduce(inputs[i], group=groups[i], async_op=True) for i in reversed(mine)]
received = torch.empty(1 << 18)
to, of = (rank + 1) % size, (rank - 1) % size
sent = dist.isend(torch.full((1 << 18,), float(rank)), to)
dist.recv(received, of)
for work in (*works, sent):
    work.wait()
for i in mine:
    members = dist.get_process_group_ranks(groups[i])
    expected = float(sum(1 + r + 10 * i for r in members))
    assert (inputs[i] == expected).all(), (i, inputs[i], expected)
assert (received == of).all(), received
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank}, group=groups[0])
assert objects == [{"rank": r} for r in range(size)], objects
assert dist.get_backend(groups[1]) == "gloo"
names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
print(f"network threads: {names.count('gloo_tcp_loop')}, groups: {len(mine) + 1}")
dist.destroy_process_group()
launch.leave(0)
"""


@pytest.mark.parametrize("named", [False, True])
def test_groups_share_a_thread_and_exchange_at_once(named: bool) -> None:
    linux = sys.platform == "linux"
    env = {"CUDA_VISIBLE_DEVICES": ""}  # with a GPU torch's groups are as they were
    if named:
        env["GLOO_SOCKET_IFNAME"] = "lo" if linux else "lo0"
    for number, rank in enumerate(run_ranks(["-c", WORKER], 3, timeout=120, env=env)):
        assert rank.code == 0, rank.output
        if linux:  # where threads have names
            groups = 7 if number == 1 else 8
            assert f"network threads: 1, groups: {groups}\n" in rank.output, rank.output


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroupGloo._Options(), "global_ranks_in_group"),
    reason="this torch has no other options",
)
def test_options_that_a_later_torch_gives_are_handed_on() -> None:
    """torch 2.14 gives one more, enable_reconfigure."""
    arguments = dist.HashStore(), 0, 1, timedelta(seconds=9)
    options = _Group(*arguments, global_ranks_in_group=[0]).options
    assert options.global_ranks_in_group == [0] and options._timeout == timedelta(seconds=9)
    with pytest.raises(AttributeError, match="unheard_of"):
        _Group(*arguments, unheard_of=True)


ENDS = """
import glob, sys
import torch
import torch.distributed as dist
from vlmtrain.core import launch

assert "torch.distributed.nn" not in sys.modules, "imported before: nothing is tested"
launch.connect(launch.Process(0, 1, 0), "gloo")
import torch.distributed.nn.functional
def names():
    return [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]

dist.all_reduce(torch.ones(3))
assert "pt_gloo_runloop" in names(), names()
dist.destroy_process_group()
assert "pt_gloo_runloop" not in names(), names()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names on Linux")
def test_no_thread_outlives_its_group() -> None:
    """One that lets go of a tensor while Python ends aborts the process."""
    run = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
