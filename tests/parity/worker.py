"""One rank of a parity run: python worker.py CASES.pt; results go beside it, from rank 0.

Every case builds a fresh engine on one layout, takes loss, gradients and a few optimizer steps,
and gathers them under Hugging Face names. Several cases share one start-up.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parity import reference as ref  # noqa: E402
from vlmtrain import device, launch  # noqa: E402
from vlmtrain.config import (  # noqa: E402
    FreezeSection,
    LoraSection,
    OptimizerSection,
    RecomputeSection,
)
from vlmtrain.models.spec import ModelSpec  # noqa: E402
from vlmtrain.parallel.layout import make_layout  # noqa: E402


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Megatron's accumulated gradient; NaN where a frozen parameter has none."""
    if not parameter.requires_grad:
        return torch.full_like(parameter, float("nan"))
    return parameter.main_grad


def gather_gradients(engine: Any) -> None:
    """Undo the reduce-scatter of the distributed optimizer: every rank has whole gradients."""
    for chunk in [*engine.chunks, *([engine.tower] if engine.replica is not None else [])]:
        group = chunk.dp_cp_group
        for bucket in (bucket for buffer in chunk.buffers for bucket in buffer.buckets):
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def run_case(case: dict[str, Any], backend: device.Backend) -> dict[str, Any]:
    from megatron.core import parallel_state

    from vlmtrain.checkpoint.adapters import merged, save_adapters
    from vlmtrain.checkpoint.hf_export import gathered, save_weights
    from vlmtrain.checkpoint.hf_import import load_weights
    from vlmtrain.engine import Engine

    spec = ModelSpec.from_folder(case["model"])
    packs = ref.make_samples(case["seed"])
    length = ref.pack_length(packs)
    layout = make_layout(
        spec,
        world_size=dist.get_world_size(),
        pack_length=length,
        microbatches=len(packs),
        **case["layout"],
    )
    lora = LoraSection(**case.get("lora", {}))
    engine = Engine(
        spec,
        layout,
        backend,
        dtype=case.get("dtype", torch.float32),
        recompute=RecomputeSection(**case.get("recompute", {})),
        lora=lora,
    )
    load_weights(engine.parts, spec, case["model"])
    engine.prepare(
        OptimizerSection(
            lr=ref.LR,
            min_lr=ref.LR,
            weight_decay=ref.DECAY,
            beta1=ref.BETAS[0],
            beta2=ref.BETAS[1],
            eps=ref.EPS,
            clip=ref.CLIP,
        ),
        FreezeSection(**case.get("freeze", {})),
    )
    result: dict[str, Any] = {"layout": layout.describe()}

    def share(seed: int) -> list[Any]:
        samples = ref.make_samples(seed)
        return [ref.pack(p, length) for p in samples][engine.data_rank :: layout.data]

    def gradients(packs: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
        outputs = engine._forward_backward(packs, forward_only=False)
        loss = engine._result(packs, outputs, 0.0).loss
        gather_gradients(engine)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dict(gathered(engine.exported, spec, gradient)))
        return loss, {n: t for part in everyone for n, t in part.items()}

    if lora.rank:
        save_adapters(engine.exported, lora, case["model"], case["adapter"] / "before")
    if not case.get("only_steps"):
        result["loss"], result["gradients"] = gradients(share(case["seed"]))
        if case.get("unpacked"):
            alone = [ref.pack([s], length) for p in packs for s in p]
            result["unpacked_loss"], result["unpacked_gradients"] = gradients(alone)
        if layout.stages == 1 and layout.tensor == 1 and not layout.multiplexed:
            with torch.no_grad():
                result["logits"] = [
                    engine.stages[0](ref.pack(p, length), logits=True)[0].float() for p in packs
                ]
    result["losses"] = [
        engine.step(share(case["seed"] + i), ref.LR).loss for i in range(case.get("steps", 0))
    ]
    if lora.rank:
        save_adapters(engine.exported, lora, case["model"], case["adapter"] / "after")
    if case.get("save"):
        with merged(engine.exported):
            save_weights(engine.exported, spec, case["model"], case["save"])
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):  # or their threads pile up
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return result


def main() -> None:
    process = launch.joined() or launch.Process(0, 1, 0)
    torch.set_num_threads(1)
    backend = device.setup(process.local_rank)
    launch.connect(process, backend.process_group)
    path = Path(sys.argv[1])
    results = []
    for case in torch.load(path, weights_only=False):
        results.append(run_case(case, backend))
    if process.rank == 0:
        torch.save(results, path.with_suffix(".out"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
