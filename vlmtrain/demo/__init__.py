"""`make demo`: real photographs, a small Qwen2.5-VL, trained here and asked in transformers."""

from __future__ import annotations

from vlmtrain.demo.command import run_demo

__all__ = ["run_demo"]
