"""Kernels for training Qwen2-VL and Qwen2.5-VL; see the docstring of each name."""

from __future__ import annotations

import torch as _torch  # noqa: F401  first: the native module then shares torch's OpenMP runtime

from .attention import varlen_attention
from .embedding import scatter_visual, visual_embedding, visual_index
from .optim import CPUAdam, HybridDeviceOptimizer, PinnedArena
from .patchify import patchify
from .resize import resize
from .vision_layout import VisionLayout

__all__ = [
    "CPUAdam",
    "HybridDeviceOptimizer",
    "PinnedArena",
    "VisionLayout",
    "patchify",
    "resize",
    "scatter_visual",
    "varlen_attention",
    "visual_embedding",
    "visual_index",
]

__version__ = "0.1.0"
