"""megatron-core's own pipeline schedules over gloo with layers that only sleep, as one rank
(`ranks.run_cases`). Of each case the fastest of a few steps (a loaded machine only adds to them):
its wall seconds, and the seconds that every piece of work has really taken, by stage and
microbatch.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.worker import serve

SHAPE = (4, 1, 8)
TRIES = 3  # and one step before, in which ranks find each other


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, chunk: Any, microbatch: int) -> torch.Tensor:
        ctx.chunk, ctx.microbatch = chunk, microbatch
        chunk.sleep("forward", microbatch)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.chunk.sleep("backward", ctx.microbatch)
        return grad * 1.0, None, None


class Sleeper(MegatronModule):
    """A stage: forward and backward of each microbatch take what the case says."""

    def __init__(self, config: Any, case: dict[str, Any], stage: int, stages: int) -> None:
        super().__init__(config=config)
        self.case, self.stage, self.last = case, stage, stage == stages - 1
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.model_type = ModelType.encoder_or_decoder
        self.input_tensor: Any = None
        self.taken: list[tuple[str, int, int, float]] = []

    def set_input_tensor(self, tensor: Any) -> None:
        self.input_tensor = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, microbatch: int) -> torch.Tensor:
        x = self.input_tensor
        x = torch.ones(SHAPE) * self.weight if x is None else x
        return _Sleep.apply(x, self, microbatch)

    def sleep(self, kind: str, microbatch: int) -> None:
        start = time.perf_counter()
        time.sleep(self.case[kind][self.stage][microbatch])
        self.taken.append((kind, self.stage, microbatch, time.perf_counter() - start))


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return output.sum(), {}


def _step(microbatches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    return model(next(microbatches)), _loss


def run(case: dict[str, Any]) -> dict[str, Any]:
    pipeline, virtual = case["pipeline"], case["virtual"]
    count, stages = len(case["forward"][0]), pipeline * virtual
    parallel_state.initialize_model_parallel(1, pipeline, virtual if virtual > 1 else None)
    options: dict[str, Any] = dict(deallocate_pipeline_outputs=False)
    if virtual > 1:
        options.update(
            virtual_pipeline_model_parallel_size=virtual,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
        )
    config = TransformerConfig(
        num_layers=stages,
        hidden_size=SHAPE[2],
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        **options,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = [Sleeper(config, case, c * pipeline + rank, stages) for c in range(virtual)]
    one = len(chunks) == 1
    step = partial(
        get_forward_backward_func(),
        forward_step_func=_step,
        model=chunks[0] if one else chunks,
        num_microbatches=count,
        seq_length=SHAPE[0],
        micro_batch_size=SHAPE[1],
        forward_only=False,
    )
    best: tuple[float, list[Any]] | None = None
    for attempt in range(TRIES + 1):
        for chunk in chunks:
            chunk.taken = []
        dist.barrier()
        start = time.perf_counter()
        step(data_iterator=iter(range(count)) if one else [iter(range(count)) for _ in chunks])
        local = (time.perf_counter() - start, [entry for chunk in chunks for entry in chunk.taken])
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, local)
        seconds = max(s for s, _ in ranks)
        if attempt and (best is None or seconds < best[0]):
            best = seconds, [entry for _, entries in ranks for entry in entries]
    parallel_state.destroy_model_parallel()
    assert best is not None
    result: dict[str, Any] = {"seconds": best[0]}
    for kind in ("forward", "backward"):
        table = [[0.0] * count for _ in range(stages)]
        for which, stage, microbatch, took in best[1]:
            if which == kind:
                table[stage][microbatch] = took
        result[kind] = table
    return result


if __name__ == "__main__":
    serve(lambda cases, backend: [run(case) for case in cases])
