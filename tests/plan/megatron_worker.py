"""Builds real megatron-core stages as any rank of any layout, in one process.

A "fake" process group of the wanted size answers every collective at once, so the buffers that a
rank of a large run would hold can be made and measured here. Run as
`python -m tests.plan.megatron_worker CASES.json`; prints one JSON line per case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.parity.reference import make_model
from vlmtrain.core import device
from vlmtrain.core.config import (
    FreezeSection,
    LoraSection,
    OptimizerSection,
    ParallelSection,
    RecomputeSection,
)
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.family import parse_spec
from vlmtrain.parallel.layout import make_layout


def states(case: dict[str, Any], backend: device.Backend) -> dict[str, Any]:
    """Bytes of parameters, gradients and optimizer state that one rank really allocates."""
    from megatron.core import parallel_state

    from vlmtrain.training import engine as engine_module
    from vlmtrain.training.engine import Engine
    from vlmtrain.training.optimizer import distributed_parts

    # it asks other ranks where they are, and a fake group does not answer
    engine_module.Multiplexer = lambda *arguments: None  # type: ignore[assignment,misc]

    spec = parse_spec(
        make_model(case["family"], vision_heads=case["heads"], tied=case["tied"]).config.to_dict()
    )
    world, rank = case["world"], case["rank"]
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    layout = make_layout(spec, world_size=world, **case["layout"])
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    recompute = RecomputeSection(*case.get("recompute", ("none", "none")))
    lora = LoraSection(**case.get("lora", {}))
    engine = Engine(spec, layout, backend, dtype=dtype, recompute=recompute, lora=lora)
    engine.bucket_size = case.get("bucket")
    overlap = "bucket" in case
    freeze = FreezeSection(**case.get("freeze", {}))
    engine.prepare(OptimizerSection(), freeze, ParallelSection(overlap_grad_reduce=overlap))
    counts = [sum(p.numel() for p in stage.parameters()) for stage in engine.stages]
    chunks = engine.wrapped
    buffers = [b for c in chunks for b in c.buffers + c.expert_parallel_buffers]
    frozen = sum(
        p.numel() * p.element_size()
        for part in engine.parts
        for p in part.parameters()
        if not p.requires_grad
    )
    optimizer = 0
    for part in distributed_parts(engine.optimizer):
        for group in part.shard_fp32_from_float16_groups:
            optimizer += sum(p.numel() * p.element_size() for p in group if p is not None)
        for state in part.optimizer.state.values():
            optimizer += sum(
                state[k].numel() * state[k].element_size() for k in ("exp_avg", "exp_avg_sq")
            )
    result = {
        "parameters": counts,
        "parameter_bytes": frozen
        + sum(b.param_data.numel() * b.param_data.element_size() for b in buffers),
        "gradient_bytes": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "optimizer_bytes": optimizer,
    }
    if case.get("activations"):
        result["activations"] = activations(engine, spec, case["activations"])
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return result


def activations(engine: Any, spec: ModelSpec, wanted: dict[str, Any]) -> dict[str, Any]:
    """Bytes that autograd keeps of one forward pass: every storage once, parameters left out."""
    batch = make_batch(spec, wanted["tokens"], wanted["grids"])
    stage = engine.stages[0]
    parameters = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    kept: dict[int, tuple[int, Any]] = {}
    output = stage(batch)
    assert output.requires_grad
    # not by hooks of saved tensors: under them the loss computes its gradients in the backward
    for tensor in saved_tensors(output.grad_fn):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and storage.nbytes():
            # holding the tensor keeps its address from being handed out again
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
    if wanted.get("list"):
        for size, tensor in kept.values():
            print(size, tuple(tensor.shape), tensor.dtype, file=sys.stderr)
    return {"bytes": sum(size for size, _ in kept.values())}


def saved_tensors(root: Any) -> Iterator[torch.Tensor]:
    """What each node of the graph behind root keeps."""
    nodes, seen = [root], {root}
    while nodes:
        node = nodes.pop()
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for value in (getattr(node, "saved_tensors", ()), *(getattr(node, n) for n in names)):
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield tensor
        behind = {following for following, _ in node.next_functions if following is not None}
        nodes += behind - seen
        seen |= behind


def make_batch(spec: ModelSpec, tokens: int, grids: list[list[int]]) -> Any:
    from vlmtrain.core.batch import PackedBatch

    visual = sum(t * h * w for t, h, w in grids) // spec.vision.merge_unit
    index = torch.full((tokens,), -1, dtype=torch.int32)
    index[:visual] = torch.arange(visual, dtype=torch.int32)
    ids = torch.full((tokens,), 9)
    ids[:visual] = spec.image_token_id
    return PackedBatch(
        input_ids=ids,
        labels=torch.full((tokens,), 9),
        position_ids=torch.arange(tokens).expand(3, tokens),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        visual_index=index,
        pixel_values=torch.randn(visual * spec.vision.merge_unit, spec.vision.patch_dim),
        grid_thw=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        sample_ids=["a"],
        target_tokens=tokens,
        image_tokens=visual,
        pad_tokens=0,
    )


def main() -> None:
    new_group = dist.new_group
    # Megatron asks for some gloo groups by name; here every group is a fake one.
    dist.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})
    cases = json.loads(open(sys.argv[1], encoding="utf-8").read())
    backend = device.setup()
    for case in cases:
        print(json.dumps(states(case, backend)), flush=True)


if __name__ == "__main__":
    main()
