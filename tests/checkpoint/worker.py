"""One rank of a checkpoint run (`ranks.run_cases`).

A case builds an engine on a layout from a model folder, perhaps loads a checkpoint, perhaps takes
steps, perhaps saves one, and returns the whole state under Hugging Face names: weights, master
weights and both moments, gathered by code that shares nothing with the checkpoints'.
"""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parity import reference as ref
from tests.parity.worker import build
from tests.worker import serve
from vlmtrain.checkpoint.hf.files import ModelFiles
from vlmtrain.core import device
from vlmtrain.core.errors import UserError


def optimizer_tensors(engine: Any, key: str) -> dict[torch.Tensor, torch.Tensor]:
    """Master weights or moments of every parameter here, shaped like it: all ranks' slices."""
    actual = {}
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        if part.is_stub_optimizer:
            continue
        order = [p for buffer in part.buffers for p in buffer.param_index_map]
        slices = []
        for ranges in part.gbuf_ranges:
            for buckets in ranges.values():
                for parameter, place_in_buffer in (
                    (p, h) for b in buckets for p, h in b["param_map"].items()
                ):
                    group, i = part.model_param_group_index_map[parameter]
                    main = part.optimizer.param_groups[group]["params"][i]
                    tensor = main if key == "param" else part.optimizer.state[main][key]
                    place = next(n for n, p in enumerate(order) if p is parameter)
                    slices.append((place, place_in_buffer["param"].start, tensor.detach().clone()))
        of_ranks: list[Any] = [None] * dist.get_world_size(part.data_parallel_group)
        dist.all_gather_object(of_ranks, slices, group=part.data_parallel_group)
        flat = [torch.full((p.numel(),), float("nan")) for p in order]
        for place, start, tensor in (s for rank in of_ranks for s in rank):
            flat[place][start : start + tensor.numel()] = tensor
        actual.update({p: t.view(p.shape) for p, t in zip(order, flat, strict=True)})
    return actual


def value_or_nan(table: dict[torch.Tensor, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """A frozen parameter has no optimizer state."""
    return table.get(parameter, torch.full(parameter.shape, float("nan")))


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    from vlmtrain.checkpoint.hf.save import gathered

    named = {f"model {n}": t for n, t in gathered(engine.exported, engine.spec)}
    for key in ("param", "exp_avg", "exp_avg_sq"):
        tensors = optimizer_tensors(engine, key)
        values = partial(value_or_nan, tensors)
        for name, tensor in gathered(engine.exported, engine.spec, values):
            named[f"{key} {name}"] = tensor
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, named)
    return {n: t for part in of_ranks for n, t in part.items()}


def fill_disk() -> None:
    """From here on every write fails as it does on a full disk."""
    from vlmtrain.core import files

    def write(self: Any, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    files.SummedFile.write = write  # type: ignore[method-assign]


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that are made inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if is_tensor(t)
        }
        for memory in (t.untyped_storage() for t in tree_leaves(out) if is_tensor(t)):
            if memory.data_ptr() not in known:
                self.total += memory.nbytes()
                self.largest = max(self.largest, memory.nbytes())
        return out

    def on_every_rank(self) -> list[tuple[int, int]]:
        """(total, largest) of each rank."""
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (self.total, self.largest))
        return of_ranks


def draw_apart() -> None:
    """As dropout of replicas and stages does, not that of tensor-parallel ranks."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    torch.rand(1 + 10 * stage + parallel_state.get_data_parallel_rank())


def check_draws_alike() -> None:
    """Tensor-parallel ranks, whatever layout wrote the checkpoint."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, torch.get_rng_state(), group=group)
    assert all(torch.equal(state, states[0]) for state in states), "dropout would differ"


def run_case(case: dict[str, Any], backend: device.Backend) -> dict[str, Any]:
    from megatron.core import parallel_state

    from vlmtrain.checkpoint.training import checkpoint
    from vlmtrain.checkpoint.training.optimizer_state import steps_taken

    engine, length = build(case, backend)
    result: dict[str, Any] = {}
    try:
        if case.get("load"):
            with Allocations() as allocations:
                path = Path(case["load"])
                result["extra"] = checkpoint.load(path, engine.parts, engine.optimizer)
            result["load bytes"] = allocations.on_every_rank()
            check_draws_alike()

        def share(seed: int) -> list[Any]:
            samples = ref.make_samples(seed)
            return [ref.pack(p, length) for p in samples][engine.data_rank :: engine.layout.data]

        seeds = case.get("steps", [])
        result["losses"] = [engine.step(share(s), ref.LR).loss for s in seeds]
        if case.get("save"):
            target = Path(case["save"])
            draw_apart()
            saver = checkpoint.Saver(target.parent, ModelFiles(case["model"]), keep=99)
            step = int(target.name.split("-")[1])
            if case.get("disk_full") == dist.get_rank():
                fill_disk()
            with Allocations() as allocations:
                saver.start(step, engine.parts, engine.optimizer, {"note": "kept"})
            result["save bytes"] = allocations.on_every_rank()
            # Training goes on while it is written: the checkpoint must not notice.
            for s in case.get("meanwhile", []):
                engine.step(share(s), ref.LR)
            saver.finish()
        engine.gather_weights()
        result["step"] = steps_taken(engine.optimizer)
        result["state"] = whole_state(engine)
    except UserError as error:
        result["error"] = str(error)
    parallel_state.destroy_model_parallel()
    return result


def main() -> None:
    serve(lambda cases, backend: [run_case(case, backend) for case in cases])


if __name__ == "__main__":
    main()
