"""Offloading by Megatron's own optimizer with a small module of one replica: passes whose update is
skipped, and moves before the first step. Run as `python -m tests.optim.megatron_passes CASE`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.numeric import assert_bitwise
from tests.optim.megatron_state import duplicate
from tests.worker import one_rank
from vlmkernels.integrations.megatron import offload


class Run:
    """A module in Megatron's DistributedDataParallel with its distributed optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32, per_token: bool = False) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import MegatronModule

        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            calculate_per_token_loss=per_token,
        )
        torch.manual_seed(0)
        module = MegatronModule(config)
        module.share_embeddings_and_output_weights = False
        module.text, module.image = nn.Linear(16, 24), nn.Linear(16, 24)
        self.dtype, self.per_token = dtype, per_token
        self.module = module.to(dtype)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=True,
                bucket_size=100,  # a bucket for each linear
            ),
            self.module,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        (part,) = self.optimizer.chained_optimizers
        for group in part.optimizer.param_groups:  # whose steps ours have the bits of
            group.update(fused=True, foreach=False)

    def gradients(self, seed: int, image: bool = True) -> None:
        """Of one pass, as Megatron's schedules leave them."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(7, 16, generator=generator).to(self.dtype)
        self.model.zero_grad_buffer()
        out = self.module.text(x)
        if image:
            out = out * self.module.image(x)
        out.float().square().sum().backward()
        self.model.finish_grad_sync()
        if self.per_token:
            self.model.scale_gradients(torch.tensor(1 / 7))

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


def check_same(got: Run, want: Run) -> None:
    for number, (a, b) in enumerate(zip(got.weights(), want.weights(), strict=True)):
        assert_bitwise(f"parameter {number}", a, b)


def skipped(dtype: torch.dtype, per_token: bool) -> None:
    """A pass without a step leaves nothing to be stepped. Of a first pass Megatron knows no counts;
    one without images leaves a bucket unused."""
    runs = []
    for fraction in (None, 1.0):
        run = Run(dtype, per_token)
        if fraction:
            offload(run.optimizer, fraction, gradients=torch.float32, early=True)
        run.gradients(0, image=False)
        for seed in (1, 2):
            run.gradients(seed)
            run.optimizer.step()
        runs.append(run)
    check_same(runs[1], runs[0])


def cleared() -> None:
    """Nor does one change how the next step's gradients are rounded."""
    runs = []
    for twice in (False, True):
        run = Run(torch.bfloat16, per_token=True)
        offload(run.optimizer, 1.0, early=True)
        for seed in range(3):
            if twice:
                run.gradients(9)
            run.gradients(seed)
            run.optimizer.step()
        runs.append(run)
    check_same(runs[1], runs[0])


def moved(dtype: torch.dtype, fractions: Sequence[float], cpu_adam: bool) -> None:
    """Shards that leave the host before the first step there, or after it, go on counting."""
    from vlmtrain.cpu.adam import use_cpu_adam

    plain, run = Run(dtype), Run(dtype)
    for part in run.optimizer.chained_optimizers if cpu_adam else []:
        use_cpu_adam(part)
    for seed, fraction in enumerate(fractions):
        offload(run.optimizer, fraction, gradients=torch.float32)
        for one in (plain, run):
            one.gradients(seed)
            one.optimizer.step()
    check_same(run, plain)


def loaded(fraction: float, before: bool) -> None:
    """A checkpoint of plain Megatron's after two steps, in what dist_checkpointing gives back, into
    a fresh optimizer that is offloaded before or after: the third step is the uninterrupted run's,
    and all shards have counted it."""
    plain = Run()
    for seed in (0, 1):
        plain.gradients(seed)
        plain.optimizer.step()
    (part,) = plain.optimizer.chained_optimizers
    state = part.get_parameter_state_dp_reshardable()
    for buffer in (v for k, v in state.items() if isinstance(k, int)):
        for entry in (e for buckets in buffer.values() for bucket in buckets for e in bucket):
            entry["padding"] = False
    saved = {**part.state_dict(), "param_state": state}
    saved = duplicate({**saved, "param_state_sharding_type": "dp_reshardable"})
    weights = plain.weights()
    plain.gradients(2)
    plain.optimizer.step()

    run = Run()
    (part,) = run.optimizer.chained_optimizers
    with torch.no_grad():
        for mine, theirs in zip(run.module.parameters(), weights, strict=True):
            mine.copy_(theirs)
        if before:
            offload(run.optimizer, fraction)
        part.load_state_dict(saved)
    offload(run.optimizer, fraction)
    run.gradients(2)
    run.optimizer.step()
    check_same(run, plain)
    assert {float(state["step"]) for state in part.optimizer.state.values()} == {3.0}
    part.state_dict()


def shared() -> None:
    """A checkpoint worker that reads state while steps change it is refused, until the state has
    memory of its own again."""
    run: Any = Run()
    (part,) = run.optimizer.chained_optimizers
    for number, name in enumerate(("master", "exp_avg", "exp_avg_sq")):
        offload(run.optimizer, 1.0)
        run.gradients(number)
        run.optimizer.step()
        main, shard = next(iter(part._host.shards.items()))
        (main if name == "master" else shard.state[name]).detach().share_memory_()
        with pytest.raises(ValueError, match="was sent to another process.*save without it"):
            run.optimizer.step()
        offload(run.optimizer, 0.0)


def released() -> None:
    """CPUAdam, which copies masters to the weights in its step, keeps none that has moved."""
    from vlmtrain.cpu.adam import use_cpu_adam

    run: Any = Run(torch.bfloat16)
    (part,) = run.optimizer.chained_optimizers
    use_cpu_adam(part)
    assert part.optimizer._low
    offload(run.optimizer, 1.0)
    assert not part.optimizer._low


def zeros() -> None:
    """Counting zeros is refused later too, as is Megatron's own offloading."""
    run: Any = Run()
    offload(run.optimizer, 1.0)
    run.optimizer.chained_optimizers[0].config.log_num_zeros_in_grad = True
    with pytest.raises(ValueError, match="together with log_num_zeros_in_grad"):
        offload(run.optimizer, 0.5)
    run.optimizer.chained_optimizers[0].config.log_num_zeros_in_grad = False
    run.optimizer.chained_optimizers[0].config.optimizer_cpu_offload = True
    with pytest.raises(ValueError, match="together with optimizer_cpu_offload"):
        offload(run.optimizer, 0.5)


TYPES = (torch.float32, torch.bfloat16)
FRACTIONS = ((1.0, 0.0), (0.5, 0.0), (1.0, 0.5), (0.0, 1.0, 0.0))
CASES = {
    "skipped": [partial(skipped, *given) for given in itertools.product(TYPES, (False, True))],
    "cleared": [cleared],
    "moved": [
        partial(moved, *given) for given in itertools.product(TYPES, FRACTIONS, (False, True))
    ],
    "loaded": [partial(loaded, *given) for given in itertools.product((0.5, 1.0), (True, False))],
    "shared": [shared],
    "released": [released],
    "zeros": [zeros],
}


if __name__ == "__main__":
    with one_rank():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        for case in CASES[sys.argv[1]]:
            case()
        parallel_state.destroy_model_parallel()
