"""megatron-core: the packed attention as a layer's `core_attention`, and a DistributedOptimizer
with part of its state in host memory.

In a layer spec, `spec.submodules.self_attention.submodules.core_attention = VarlenCoreAttention`;
after the optimizer was made and the weights were loaded, `offload(optimizer, 0.5)`.
"""

from __future__ import annotations

from .attention import (
    PackedSelfAttention,
    RotaryPackedSeqParams,
    VarlenCoreAttention,
    VisionPackedSeqParams,
    VisionSelfAttention,
)
from .optimizer import OffloadedOptimizer, check_masters, offload

__all__ = [
    "OffloadedOptimizer",
    "PackedSelfAttention",
    "RotaryPackedSeqParams",
    "VarlenCoreAttention",
    "VisionPackedSeqParams",
    "VisionSelfAttention",
    "check_masters",
    "offload",
]
