"""The optimizer's state in and out of checkpoints, exact on every layout.

Megatron's distributed optimizer keeps float32 weights and moments as flat slices of gradient
buffers, each data-parallel rank its own. A checkpoint holds them by parameter, shaped like it: the
keys and shapes of megatron-core's `fully_reshardable` form, so that any layout can read them. Each
rank writes its own slices and reads its own (sharding.py); nothing is gathered.

What of megatron-core 0.16.1 (without transformer-engine or apex) must not be trusted on the way is
worked around here and only here; each has a test in tests/checkpoint/test_workarounds.py that also
notices when it is no longer needed:

1. Saving or loading before the first step asserts or loses moments: they exist from the start
   (`create_state`).
2. Its loader asks each parameter's saved tensors for a 'step', which is not among them (KeyError):
   it is given one (`load`).
3. Its `load_state_dict` leaves one step tensor shared by all parameters, which every update then
   advances once per parameter: it is not called; each parameter has its own (`load`).
4. It saves step and parameter groups as rank 0 has them; a rank without trainable parameters has
   none. The step is agreed on by all ranks; groups are made from the configuration at each start.
5. Its `fully_reshardable` form gathers the state on one rank of each data-parallel group, and gets
   it wrong: it closes the gaps between buckets but goes on to use positions that count them. Where
   a bucket's size is no multiple of 128, and a tied embedding alone makes two buckets, what lies
   behind is mixed up and its end is lost, with no more than a warning ("which can lead to data
   corruption"). It is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from vlmtrain.checkpoint.megatron.source import STATES, state_prefix
from vlmtrain.checkpoint.training.sharding import Piece, ShardedLocation


def distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """This rank's optimizers; where nothing is trained they may have groups without parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def create_state(part: DistributedOptimizer) -> None:
    """Zero moments from the start (workaround 1)."""
    inner = part.optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                where = parameter.device if group.get("fused") else "cpu"  # as torch has it
                inner.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=where),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def pieces(
    optimizer: MegatronOptimizer, locations: dict[Tensor, ShardedLocation]
) -> Iterator[Piece]:
    """What this rank writes of the optimizer's parameters: its slices of the weights, the master
    weights and both moments, in host memory of their own.

    At most one slice is copied at a time; all of them are 12 bytes for each number in this rank's
    share of the optimizer and its weights.
    """
    for part in distributed_parts(optimizer):
        for parameter, start, stop in _slices(part):
            location = locations[parameter]
            if location.is_duplicate:
                continue
            yield from location.pieces(_host_copy(parameter.view(-1)[start:stop]), start)
            state = part._get_main_param_and_optimizer_states(parameter)
            for name in STATES:
                yield from location.pieces(
                    _host_copy(state[name].float()), start, state_prefix(name)
                )


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def parameters(optimizer: MegatronOptimizer) -> set[Tensor]:
    """The parameters that this rank's optimizers share with other ranks."""
    return {
        parameter
        for part in distributed_parts(optimizer)
        for buffer in part.buffers
        for parameter in buffer.param_index_map
    }


@torch.no_grad()
def load(
    optimizer: MegatronOptimizer,
    locations: dict[Tensor, ShardedLocation],
    fill: Callable[[Piece], None],
    step: int,
) -> None:
    """Restore this rank's slices, one parameter after the other, each piece read by `fill`.

    `finish_load` must follow on all ranks.
    """
    for part in distributed_parts(optimizer):
        for parameter, start, stop in _slices(part):
            state = {"step": torch.tensor(float(step))}  # workaround 2
            for name in STATES:
                state[name] = torch.empty(stop - start, dtype=torch.float32)
                for piece in locations[parameter].pieces(state[name], start, state_prefix(name)):
                    fill(piece)
            part._set_main_param_and_optimizer_states(parameter, state)
    set_steps(optimizer, step)


def set_steps(optimizer: MegatronOptimizer, step: int) -> None:
    """The number of updates that the moments have seen."""
    for part in distributed_parts(optimizer):
        for entry in part.optimizer.state.values():
            entry["step"] = torch.full_like(entry["step"], float(step))  # workaround 3
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = step


def finish_load(optimizer: MegatronOptimizer) -> None:
    """In float32 the slices that were loaded are the model's own; give all ranks all of them.
    Collective."""
    for part in distributed_parts(optimizer):
        for chunk in part.model_chunks:
            chunk.start_param_sync(force_sync=True)


def _slices(part: DistributedOptimizer) -> Iterator[tuple[Tensor, int, int]]:
    """Parameters of which this rank holds a slice, and which of their elements it is."""
    for ranges in part.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, location in bucket["param_map"].items():
                    yield parameter, location["param"].start, location["param"].end


def steps_taken(optimizer: MegatronOptimizer) -> int:
    """Updates that the moments have seen, the same on all ranks (workaround 4). Collective.

    Raises:
        RuntimeError: parameters disagree; the state is not one that training can have left.
    """
    local = {
        int(entry["step"])
        for part in distributed_parts(optimizer)
        for entry in part.optimizer.state.values()
        if "step" in entry
    }
    all_steps: list[set[int]] = [set()] * dist.get_world_size()
    dist.all_gather_object(all_steps, local)
    steps = set().union(*all_steps)
    if len(steps) > 1:
        raise RuntimeError(f"parameters have taken different numbers of steps: {sorted(steps)}")
    return steps.pop() if steps else 0
