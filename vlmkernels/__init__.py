"""Kernels for training Qwen2-VL and Qwen2.5-VL; see the docstring of each name."""

from __future__ import annotations

import torch as _torch  # noqa: F401  first: the native module then shares torch's OpenMP runtime

from .attention import varlen_attention
from .embedding import scatter_visual, scatter_visual_, visual_embedding
from .optim import CPUAdam, HybridDeviceOptimizer, PinnedArena
from .patchify import patchify
from .resize import resize
from .routing import exchange_rows, row_exchange, visual_index
from .vision_attention import vision_attention
from .vision_layout import VisionLayout

__all__ = [
    "CPUAdam",
    "HybridDeviceOptimizer",
    "PinnedArena",
    "VisionLayout",
    "exchange_rows",
    "patchify",
    "resize",
    "row_exchange",
    "scatter_visual",
    "scatter_visual_",
    "varlen_attention",
    "vision_attention",
    "visual_embedding",
    "visual_index",
]

__version__ = "0.1.0"
