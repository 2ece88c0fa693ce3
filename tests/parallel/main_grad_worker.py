"""One rank of test_main_grad.py: a table's gradient under megatron-core's DistributedDataParallel,
added to main_grad by the embedding or handed to autograd whole. Both must come out the same."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.kernels.test_embedding import VOCABULARY, make
from tests.worker import one_rank
from vlmkernels import visual_embedding
from vlmtrain.models import weight_gradients

HIDDEN, MICROBATCHES = 24, 3


class Model(torch.nn.Module):
    """An embedding, a linear, and an output layer of its own or with the embedding's weights."""

    def __init__(self, config: Any, mode: Any, tied: bool, fused: bool) -> None:
        super().__init__()
        self.config, self.mode, self.fused = config, mode, fused
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN))
        self.middle = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 5)
        self.out = self.table if tied else torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN))
        if tied and fused:
            # As Megatron's LanguageModule marks it: its output layer then hands autograd zeros.
            self.table.zero_out_wgrad = True  # type: ignore[attr-defined]

    def forward(self, ids: Any, visual: Any, index: Any) -> Any:
        from megatron.core.tensor_parallel import layers

        x = visual_embedding(ids, self.table, visual, index, weight_grad=self.mode)
        x = torch.tanh(x @ self.middle)
        if not self.fused:
            return x @ self.out.t()
        return layers.linear_with_grad_accumulation_and_async_allreduce(
            x[:, None], self.out, None, True, False, False
        )[:, 0]


def gradients(mode: str, tied: bool, fused: bool, overlap: bool, seed: int) -> list[torch.Tensor]:
    """What is reduced over the ranks, of every parameter, after three microbatches; twice."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(seed)
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=400
    )
    ddp = DistributedDataParallel(config, settings, Model(config, mode, tied, fused))
    torch.manual_seed(seed + 1 + dist.get_rank())
    seen = []
    for _ in range(2):
        ddp.zero_grad_buffer()
        for microbatch in range(MICROBATCHES):
            # One microbatch of text only, one of visual rows only.
            ids, _, visual, index = make(16, HIDDEN, torch.float32, (0.6, 0.0, 1.0)[microbatch])
            last = microbatch == MICROBATCHES - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                ddp(ids, visual, index).square().mean().backward()
        ddp.finish_grad_sync()
        assert all(p.grad is None for p in ddp.parameters())
        seen += [p.main_grad.clone() for p in ddp.parameters()]
    return seen


def main() -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    weight_gradients.enable()
    for tied, fused, overlap in itertools.product((False, True), repeat=3):
        dense = gradients("dense", tied, fused, False, int(sys.argv[1]))
        ours = gradients("main_grad", tied, fused, overlap, int(sys.argv[1]))
        for number, (a, b) in enumerate(zip(ours, dense, strict=True)):
            where = f"parameter {number}, {tied=}, {fused=}, {overlap=}"
            assert b.abs().max() > 0, where
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=where)


if __name__ == "__main__":
    with one_rank():
        main()
