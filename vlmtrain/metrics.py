"""The run's record: one JSON object a step in metrics.jsonl, TensorBoard, a progress line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmtrain.engine import StepResult


class Metrics:
    """Written by rank 0 only.

    A run resumed at step k drops the lines after k, which will be made again.
    """

    def __init__(self, output: Path, resumed_step: int, total_steps: int, log_every: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = output / "metrics.jsonl"
        self.total_steps, self.log_every = total_steps, log_every
        kept = []
        if resumed_step and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= resumed_step:
                        kept.append(line)
                except (ValueError, KeyError):
                    break  # the last line of a killed run may be half-written
        self.path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = open(self.path, "a", encoding="utf-8")
        self._board = SummaryWriter(str(output / "tensorboard"), purge_step=resumed_step + 1)

    def step(self, step: int, result: StepResult, lr: float, seconds: float, **more: Any) -> None:
        """Record 1-based `step`; `seconds` is its wall time."""
        every = result.tokens + result.pad_tokens
        row = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": result.tokens,
            "target_tokens": result.target_tokens,
            "image_tokens": result.image_tokens,
            "padding_share": result.pad_tokens / every if every else 0.0,
            "step_seconds": seconds,
            "tokens_per_second": result.tokens / seconds if seconds > 0 else 0.0,
            **more,
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in row.items():
            if name != "step":
                tag = f"train/{name}".replace("train/heldout_", "heldout/")
                self._board.add_scalar(tag, value, step)
        if "heldout_loss" in more:
            print(
                f"step {step}: held-out loss {more['heldout_loss']:.4f}, "
                f"perplexity {more['heldout_perplexity']:.4g}",
                flush=True,
            )
        if step % self.log_every == 0 or step == self.total_steps:
            print(
                f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  "
                f"loss {result.loss:.4f}  grad {result.grad_norm:.3f}  lr {lr:.2e}  "
                f"{row['tokens_per_second']:,.0f} tokens/s  {result.tokens:,} tokens "
                f"({result.target_tokens:,} target, {result.image_tokens:,} image)  "
                f"padding {row['padding_share']:.1%}",
                flush=True,
            )

    def close(self) -> None:
        self._file.close()
        self._board.close()
