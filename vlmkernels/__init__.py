"""Kernels for training Qwen2-VL, Qwen2.5-VL and Qwen3-VL; see the docstring of each name."""

from __future__ import annotations

import torch as _torch  # noqa: F401  first: the native module then shares torch's OpenMP runtime

from .attention.api import varlen_attention, vision_attention
from .embedding.add import add_visual_
from .embedding.lookup import scatter_visual, scatter_visual_, visual_embedding
from .embedding.row_exchange import exchange_rows, row_exchange
from .embedding.visual_index import visual_index
from .image.patchify import patchify
from .image.resize import resize
from .layout import VisionLayout
from .loss.api import linear_cross_entropy
from .optim import CPUAdam, HybridDeviceOptimizer, PinnedArena

__all__ = [
    "CPUAdam",
    "HybridDeviceOptimizer",
    "PinnedArena",
    "VisionLayout",
    "add_visual_",
    "exchange_rows",
    "linear_cross_entropy",
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
