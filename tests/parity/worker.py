"""One rank of a parity run (`ranks.run_cases`).

Every case builds a fresh engine on one layout, takes loss, gradients and a few optimizer steps,
and gathers them under Hugging Face names. Several cases share one start-up.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity import reference as ref
from tests.ranks import ROOT
from tests.worker import serve
from vlmkernels.loss import op as loss_op
from vlmtrain.checkpoint.hf.files import ModelFiles
from vlmtrain.checkpoint.mapping import canonical_name
from vlmtrain.core import device
from vlmtrain.core.batch import padded_length
from vlmtrain.core.config import (
    FreezeSection,
    LoraSection,
    OptimizerSection,
    ParallelSection,
    RecomputeSection,
)
from vlmtrain.core.spec import padded_vocab_size
from vlmtrain.cpu import shim
from vlmtrain.models.family import read_spec
from vlmtrain.parallel.layout import make_layout


def build(case: dict[str, Any], backend: device.Backend) -> tuple[Any, int]:
    """An engine with weights and optimizer, and the tokens of a padded pack."""
    from vlmtrain.checkpoint.load import load_weights
    from vlmtrain.training.engine import Engine

    spec = read_spec(case["model"])
    packs = ref.make_stream(case.get("stream", "mixed"), case.get("seed", 0), 0)
    length = ref.pack_length(packs)
    layout = make_layout(
        spec, world_size=dist.get_world_size(), microbatches=len(packs), **case["layout"]
    )
    Engine.bucket_size = case.get("bucket_size")
    engine = Engine(
        spec,
        layout,
        backend,
        dtype=case.get("dtype", torch.float32),
        recompute=RecomputeSection(**case.get("recompute", {})),
        lora=LoraSection(**case.get("lora", {})),
        vision_piece=case.get("vision_piece", ParallelSection.vision_piece),
    )
    load_weights(engine.parts, spec, case["model"])
    section = OptimizerSection(
        lr=ref.LR,
        min_lr=ref.LR,
        weight_decay=ref.DECAY,
        beta1=ref.BETAS[0],
        beta2=ref.BETAS[1],
        eps=ref.EPS,
        clip=ref.CLIP,
        offload_fraction=case.get("offload", 0.0),
        **case.get("rates", {}),
    )
    engine.prepare(
        section, FreezeSection(**case.get("freeze", {})), ParallelSection(**case.get("overlap", {}))
    )
    return engine, length


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Megatron's accumulated gradient; NaN where a frozen parameter has none."""
    if not parameter.requires_grad:
        return torch.full_like(parameter, float("nan"))
    return parameter.main_grad


def gather_gradients(engine: Any) -> None:
    """Undo the reduce-scatter of the distributed optimizer: every rank has whole gradients."""
    for chunk in engine.wrapped:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


# Where a number may be asked of a tensor inside a step: of grids and labels, which stay in host
# memory, and of offsets before they leave it.
_HOST = ("layout.py", "step_inputs.py", "batch.py:media_pixels", "batch.py:to")
_HOST += ("batch.py:target_rows",)
_HOST += ("vision.py:from_grid", "batch.py:_rows_before")
_HOST += ("row_exchange.py:__init__", "row_exchange.py:row_exchange")
_HOST += ("experts.py",)  # rows of each expert, which Megatron has fetched
_HOST += ("api.py:_expected",)  # of a grad_scale in host memory
_HOST += ("op.py:_run", "op.py:_check_labels", "op.py:_shares")
_ASKING = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")


@contextlib.contextmanager
def host_questions() -> Iterator[set[str]]:
    """Places in our own code that ask a tensor for its values while the block runs: on a GPU each
    would stop the host until the device has come so far."""
    actual: set[str] = set()

    def watched(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename == shim.__file__:
                frame = frame.f_back  # the shim stands between a caller and torch
            code = frame.f_code
            path = Path(code.co_filename)
            place = f"{path.name}:{code.co_name}"
            ours = any(path.is_relative_to(ROOT / name) for name in ("vlmtrain", "vlmkernels"))
            if ours and not place.startswith(_HOST):
                actual.add(f"{place} {name}")
            return original(self, *arguments, **options)

        return method

    before = {name: getattr(torch.Tensor, name) for name in _ASKING}
    for name in _ASKING:
        setattr(torch.Tensor, name, watched(name))
    try:
        yield actual
    finally:
        for name, original in before.items():
            setattr(torch.Tensor, name, original)


_LOGITS = loss_op._logits


class Logits(TorchDispatchMode):
    """Bytes of the largest block of the loss's logits, or of any tensor of rows by `classes`, while
    the block runs, where the loss makes logits of few tokens at a time. Seen on the last
    tensor-parallel rank: its number of classes is no other width."""

    CHUNK = 2 * ref.VOCAB * 4

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes, self.largest = classes, 0
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> Any:
        self.patch.setattr(loss_op, "linear_cross_entropy", loss_op._run)  # look inside
        self.patch.setattr(loss_op, "CHUNK_BYTES", self.CHUNK)
        self.patch.setattr(loss_op, "_logits", self.logits)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.undo()
        super().__exit__(*error)

    def logits(self, *arguments: Any) -> torch.Tensor:
        block = _LOGITS(*arguments)
        self.largest = max(self.largest, block.nbytes)
        return block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if torch.is_tensor(tensor) and not func.is_view and self.classes in tensor.shape[1:]:
                self.largest = max(self.largest, tensor.nbytes)
        return out


def replicas_agree(engine: Any) -> bool:
    """Whether the LoRA factors that all ranks of a tensor-parallel group hold whole are equal."""
    from megatron.core import parallel_state

    from vlmtrain.models.lora import adapted_linears

    group = parallel_state.get_tensor_model_parallel_group()
    for linear in adapted_linears(engine.stages):
        for adapter in linear.adapters:
            whole = (adapter.a if adapter.column else adapter.b).detach()
            copies = [torch.empty_like(whole) for _ in range(group.size())]
            dist.all_gather(copies, whole.contiguous(), group=group)
            if not all(torch.equal(copy, whole) for copy in copies):
                return False
    return True


def passes_agree(engine: Any, packs: list[Any]) -> bool:
    """Whether the tower's second pass over the images gives what the first gave, dropout too."""
    rows: list[torch.Tensor] = []
    hook = engine.replica.register_forward_hook(lambda *a: rows.append(a[2].detach().clone()))
    engine._forward_backward(packs, forward_only=False)
    hook.remove()
    half = len(rows) // 2
    return all(torch.equal(a, b) for a, b in zip(rows[:half], rows[half:], strict=True))


class SharedGroups:
    """Hands the process groups of one case on to the next.

    Every gloo group has threads that wake up all the time, also when it was destroyed: with new
    groups for each case they would soon take the machine. The n-th group over the same ranks in one
    case is the n-th in another.
    """

    def __init__(self) -> None:
        self._make = dist.new_group
        self._known: dict[tuple[tuple[int, ...], int], Any] = {}
        self._used: Counter[tuple[int, ...]] = Counter()
        self._destroy = dist.destroy_process_group
        dist.new_group, dist.destroy_process_group = self._group, self._keep

    def _keep(self, group: Any = None) -> None:
        """Megatron destroys some of its groups between cases; the end destroys all."""
        if group is None:
            self._destroy()

    def next_case(self) -> None:
        self._used.clear()

    def _group(self, ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        members = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        key = members, self._used[members]
        self._used[members] += 1
        if key not in self._known:
            self._known[key] = self._make(ranks, *arguments, **options)
        return self._known[key]


def run_case(case: dict[str, Any], backend: device.Backend) -> dict[str, Any]:
    from megatron.core import parallel_state

    from vlmtrain.checkpoint.hf.adapters import merged, save_adapters
    from vlmtrain.checkpoint.hf.save import gathered, save_weights

    engine, length = build(case, backend)
    spec, layout, lora = engine.spec, engine.layout, engine.lora
    packs = ref.make_stream(case.get("stream", "mixed"), case["seed"], 0)
    result: dict[str, Any] = {"layout": layout.describe()}

    def share(step: int) -> list[Any]:
        samples = ref.make_stream(case.get("stream", "mixed"), case["seed"], step)
        sizes = [sum(len(s.input_ids) for s in p) for p in samples]  # a pack has its own length
        packs = [
            ref.pack(p, padded_length(size, layout.tensor))
            for p, size in zip(samples, sizes, strict=True)
        ][engine.data_rank :: layout.data]
        shares = engine.decodes([p.grid_thw.numpy() for p in packs])
        return [ref.without_pixels(p, kept) for p, kept in zip(packs, shares, strict=True)]

    def gradients(packs: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
        outputs = engine._forward_backward(packs, forward_only=False)
        step = engine._result(packs, outputs, 0.0, 0.0, 0.0)
        result["balance"] = spec.router_aux_loss_coef * step.aux_loss
        gather_gradients(engine)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dict(gathered(engine.exported, spec, gradient)))
        return step.loss, {canonical_name(n): t for part in everyone for n, t in part.items()}

    files = ModelFiles(case["model"])
    if lora.rank:
        save_adapters(engine.exported, lora, files, case["adapter"] / "before")
    if not case.get("only_steps"):
        result["loss"], result["gradients"] = gradients(share(0))
        if case.get("vision_piece"):  # patches of the media that each rank encodes at once
            pieces = [grids.prod(1).tolist() for grids in engine.multiplexer.grids]
            result["pieces"] = [None] * dist.get_world_size()
            dist.all_gather_object(result["pieces"], pieces)
        if case.get("unpacked"):
            alone = [ref.pack([s], length) for p in packs for s in p]
            result["unpacked_loss"], result["unpacked_gradients"] = gradients(alone)
        if layout.stages == 1 and layout.tensor == 1 and not layout.multiplexed:
            with torch.no_grad():
                result["logits"] = [
                    engine.stages[0](ref.pack(p, length), logits=True)[0].float() for p in packs
                ]
    if case.get("host_questions"):
        runs: list[Any] = []
        towers = [stage.vision.blocks for stage in engine.stages if stage.vision is not None]
        hooks = [tower.register_forward_hook(lambda *a: runs.append(a[0])) for tower in towers]
        rows: list[int] = []  # that the last layer's MLP gets
        last = engine.stages[-1].language_model if engine.stages[-1].post_process else None
        if last is not None and len(last.decoder.layers):
            mlp = last.decoder.layers[-1].mlp
            hooks.append(mlp.register_forward_hook(lambda _, x, y: rows.append(len(x[0]))))
        packs = share(0)
        rank, size = engine.groups.tp.rank(), engine.groups.tp.size()
        first = padded_vocab_size(spec.vocab_size, size) // size * rank
        with Logits(spec.vocab_size - first) as watch, host_questions() as actual:
            engine._forward_backward(packs, forward_only=False)
        largest: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(largest, watch.largest)
        result["chunks"] = max(largest) / Logits.CHUNK
        for hook in hooks:
            hook.remove()
        due = [pack.target_tokens if spec.ends_on_targets else pack.length for pack in packs]
        if layout.tensor != 1 or not rows:  # else tests/models/test_target_rows.py
            rows, due = [], []
        seen: list[Any] = [None] * dist.get_world_size()
        runs_due = len(towers) * sum(len(pack.grid_thw) > 0 for pack in packs)
        dist.all_gather_object(seen, (actual, rows, due, len(runs), runs_due))
        result["host_questions"] = set().union(*(of_rank[0] for of_rank in seen))
        result["rows"] = [sum((of_rank[i] for of_rank in seen), []) for i in (1, 2)]
        result["tower_runs"], result["tower_runs_due"] = (
            sum(of_rank[i] for of_rank in seen) for i in (3, 4)
        )
    result["losses"] = [engine.step(share(i), ref.LR).loss for i in range(case.get("steps", 0))]
    if lora.dropout and engine.replica is not None:  # before a step adapters add 0
        result["passes_agree"] = passes_agree(engine, share(0))
    if case.get("after"):
        result["after"] = engine.evaluate(share(case["steps"])).loss
    engine.gather_weights()
    if lora.rank:
        result["replicas_agree"] = replicas_agree(engine)
        save_adapters(engine.exported, lora, files, case["adapter"] / "after")
    if case.get("save"):
        parts = engine.exported
        save_weights(parts, spec, files, case["save"], value=merged(parts))
    parallel_state.destroy_model_parallel()
    return result


def run_all(cases: list[dict[str, Any]], backend: device.Backend) -> list[dict[str, Any]]:
    results, groups = [], SharedGroups()
    for case in cases:
        groups.next_case()
        results.append(run_case(case, backend))
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
    assert threads < 200, f"{threads} threads: process groups pile up"
    return results


if __name__ == "__main__":
    serve(run_all)
