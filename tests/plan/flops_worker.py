"""Counts what a real megatron-core stage multiplies in a step: torch's FlopCounterMode around
forward and backward, with this project's attention counted pair by pair. Run as
`python -m tests.plan.flops_worker CASES.json`; prints one JSON line per case.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from tests.parity.reference import make_model
from tests.plan.megatron_worker import make_batch
from vlmkernels.loss import op as loss_op
from vlmtrain.core import device
from vlmtrain.core.batch import IGNORE
from vlmtrain.core.config import FreezeSection, LoraSection, OptimizerSection, RecomputeSection
from vlmtrain.models.family import parse_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.training.engine import Engine, _loss


def pairs_of(cu_seqlens: torch.Tensor, causal: bool) -> int:
    lengths = cu_seqlens.diff().tolist()
    return sum(n * (n + 1) // 2 if causal else n * n for n in lengths)


def _seen(arguments: tuple[Any, ...]) -> int:
    """Heads x head_dim x pairs: q is the first [T, H, D], cu_seqlens the int32."""
    q = next(a for a in arguments if torch.is_tensor(a) and a.dim() == 3)
    cu_seqlens = next(a for a in arguments if torch.is_tensor(a) and a.dtype == torch.int32)
    causal = next(a for a in arguments if isinstance(a, bool))
    return q.shape[1] * q.shape[2] * pairs_of(cu_seqlens, causal)


def _seen_by_patches(arguments: tuple[Any, ...]) -> int:
    """The same of a qkv [P, 3, H, D]; cu_seqlens is the first int32, all pairs are seen."""
    qkv = next(a for a in arguments if torch.is_tensor(a) and a.dim() == 4)
    cu_seqlens = next(a for a in arguments if torch.is_tensor(a) and a.dtype == torch.int32)
    return qkv.shape[2] * qkv.shape[3] * pairs_of(cu_seqlens, False)


def _seen_from_projection(arguments: tuple[Any, ...]) -> int:
    """The same of a qkv [T, Hkv, H / Hkv + 2, D]."""
    qkv = next(a for a in arguments if torch.is_tensor(a) and a.dim() == 4)
    cu_seqlens = next(a for a in arguments if torch.is_tensor(a) and a.dtype == torch.int32)
    causal = next(a for a in arguments if isinstance(a, bool))
    return qkv.shape[1] * (qkv.shape[2] - 2) * qkv.shape[3] * pairs_of(cu_seqlens, causal)


def forward_flops(*arguments: Any, **_: Any) -> int:
    """QK^T and PV."""
    return 4 * _seen(arguments)


def backward_flops(dout: Any, *arguments: Any, **_: Any) -> int:
    """QK^T again, dP, dV, dQ, dK."""
    return 10 * _seen(arguments)


def vision_forward_flops(*arguments: Any, **_: Any) -> int:
    return 4 * _seen_by_patches(arguments)


def vision_backward_flops(*arguments: Any, **_: Any) -> int:
    return 10 * _seen_by_patches(arguments)


def qkv_forward_flops(*arguments: Any, **_: Any) -> int:
    return 4 * _seen_from_projection(arguments)


def qkv_backward_flops(*arguments: Any, **_: Any) -> int:
    return 10 * _seen_from_projection(arguments)


def product_flops(total: Any, a: Any, b: Any, **_: Any) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


for counted in (
    forward_flops,
    backward_flops,
    vision_forward_flops,
    vision_backward_flops,
    qkv_forward_flops,
    qkv_backward_flops,
    product_flops,
):
    counted._get_raw = True  # type: ignore[attr-defined]


def measure(case: dict[str, Any], backend: device.Backend) -> dict[str, Any]:
    from megatron.core import parallel_state

    spec = parse_spec(make_model(case["family"], vision_heads=4).config.to_dict())
    engine = Engine(
        spec,
        make_layout(spec, world_size=1),
        backend,
        dtype=torch.float32,
        recompute=RecomputeSection(*case.get("recompute", ("none", "none"))),
        lora=LoraSection(**case.get("lora", {})),
    )
    engine.prepare(OptimizerSection(), FreezeSection(**case.get("freeze", {})))
    batch = make_batch(spec, case["tokens"], case["grids"])
    batch.labels[: -case["targets"]], batch.target_tokens = IGNORE, case["targets"]
    loss_op.linear_cross_entropy = loss_op._run  # its products, too, one by one
    stage = engine.stages[0]
    for name, parameter in stage.named_parameters():
        if "adapters" in name:  # B starts at 0, and with it the gradient of A
            torch.nn.init.normal_(parameter)
    mapping = {
        torch.ops.vlmkernels.varlen_attention: forward_flops,
        torch.ops.vlmkernels.varlen_attention_backward: backward_flops,
        torch.ops.vlmkernels.vision_attention: vision_forward_flops,
        torch.ops.vlmkernels.vision_attention_backward: vision_backward_flops,
        torch.ops.vlmkernels.qkv_attention: qkv_forward_flops,
        torch.ops.vlmkernels.qkv_attention_backward: qkv_backward_flops,
        torch.ops.aten.addmm_: product_flops,  # a weight's gradient, added to what is there
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with counter:
        loss, _, _ = _loss(batch, stage(batch))
        loss.backward()
    # those that learn have a gradient, and no others
    grads = sum(p.main_grad.abs().max() > 0 for p in stage.parameters() if p.requires_grad)
    learning = sum(p.requires_grad for p in stage.parameters())
    parallel_state.destroy_model_parallel()
    return {"flops": counter.get_total_flops(), "learning": int(learning), "grads": int(grads)}


def main() -> None:
    backend = device.setup()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    for case in json.loads(open(sys.argv[1], encoding="utf-8").read()):
        print(json.dumps(measure(case, backend)), flush=True)


if __name__ == "__main__":
    main()
