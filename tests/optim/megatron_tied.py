"""Two stages of a pipeline with one table, whose gradients Megatron's finalize_model_grads adds up
after the reduction: sent early or not, weights are plain Megatron's. Run by test_megatron.py."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))
from vlmkernels.integrations.megatron import offload  # noqa: E402
from vlmtrain.core import device  # noqa: E402


def train(name: str, marked: bool, early: bool | None) -> Tensor:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    torch.manual_seed(0)
    module: Any = MegatronModule(config)
    module.share_embeddings_and_output_weights = True
    module.pre_process, module.post_process = dist.get_rank() == 0, dist.get_rank() == 1
    table, other = nn.Linear(16, 24, bias=False), nn.Linear(24, 8)
    module.add_module(name, table)
    module.other = other
    module.shared_embedding_or_output_weight = lambda: table.weight
    if marked:  # as LanguageModule does
        table.weight.shared_embedding = True  # type: ignore[attr-defined]
    if not module.pre_process:
        table.weight.shared = True  # type: ignore[attr-defined]
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=100,
    )
    model = DistributedDataParallel(config, settings, module)
    options = dict(optimizer="adam", lr=0.01, clip_grad=0.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(**options), [model])
    if early is not None:
        offload(optimizer, 1.0, early=early)
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model.zero_grad_buffer()
        x = torch.randn(7, 16, generator=generator)
        other(table(x)).square().sum().backward()
        finalize_model_grads([model])
        optimizer.step()
    return table.weight.detach().clone()


def main() -> None:
    from megatron.core import parallel_state

    device.setup(0)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    plain = train(sys.argv[1], True, None)
    for marked in (True, False):
        for early in (False, True):
            got = train(sys.argv[1], marked, early)
            torch.testing.assert_close(got, plain)
    print("as expected")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
