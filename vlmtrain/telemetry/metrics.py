"""The run's record: one JSON object a step in metrics.jsonl, TensorBoard, Weights & Biases if asked
for, a progress line; run.json holds what stays the same."""

from __future__ import annotations

import importlib.util
import json
import secrets
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from vlmtrain.core.errors import UserError
from vlmtrain.core.files import is_file, write_text, writing
from vlmtrain.core.progress import time_left
from vlmtrain.telemetry.ledger import StepResult


def _cut(path: Path, step: int) -> int:
    """Keep the lines of a file up to this step; returns the last one's step, 0 for none."""
    kept: list[str] = []
    last = 0
    if step and is_file(path):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                of_line = json.loads(line)["step"]
            except (ValueError, KeyError):
                break  # the last line of a killed run may be half-written
            if of_line <= step:
                kept.append(line)
                last = of_line
    with writing(path):
        write_text(path, "".join(line + "\n" for line in kept))
    return last


class Metrics:
    """Written by rank 0 only.

    A run resumed at step k drops the lines after k, which will be made again.
    """

    def __init__(
        self,
        output: Path,
        resumed_step: int,
        total_steps: int,
        log_every: int,
        *,
        tensorboard: bool = True,
        wandb: str = "",
        facts: dict[str, Any] | None = None,
    ) -> None:
        """`tensorboard`: write OUTPUT/tensorboard; `wandb`: project to log to, or empty;
        `facts` go into run.json.

        Raises:
            UserError: a file can't be written, or Weights & Biases does not let the run in.
        """
        self.path = output / "metrics.jsonl"
        self.total_steps, self.log_every = total_steps, log_every
        self._seconds: deque[float] = deque(maxlen=50)  # of the last steps
        last = _cut(self.path, resumed_step)
        if last < resumed_step:
            print(
                f"{self.path} has no steps {last + 1} to {resumed_step}: the run had gone back to "
                "an earlier one, or the file is another",
                flush=True,
            )
        spikes = output / "spikes.jsonl"
        if is_file(spikes):
            _cut(spikes, resumed_step)
        with writing(self.path):
            self._file = open(self.path, "a", encoding="utf-8")
        self._board: Any = None
        self._board_path = output / "tensorboard"
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            with writing(self._board_path):
                self._board = SummaryWriter(str(self._board_path), purge_step=resumed_step + 1)
        self._facts_path, self.facts = output / "run.json", facts or {}
        self.write_facts()
        self._wandb: Any = None
        if wandb:
            import wandb as service

            own = output / "wandb_id"  # by which a resumed run goes on there
            if not resumed_step or not is_file(own):
                with writing(own):
                    write_text(own, secrets.token_hex(4))
            name = own.read_text(encoding="utf-8").strip()
            try:
                self._wandb = service.init(
                    project=wandb, dir=str(output), config=self.facts, id=name, resume="allow"
                )
            except service.Error as error:  # no account, no network
                raise UserError(f"--train.wandb {wandb}: {error}") from error

    def write_facts(self, **more: Any) -> None:
        """Write run.json again, with `more` in it."""
        self.facts.update(more)
        with writing(self._facts_path):
            write_text(self._facts_path, json.dumps(self.facts, indent=1) + "\n")

    def step(self, step: int, result: StepResult, lr: float, seconds: float, **more: Any) -> None:
        """Record 1-based `step`; `seconds` is its wall time."""
        self._seconds.append(seconds)
        all_tokens = result.tokens + result.pad_tokens
        row = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": result.tokens,
            "target_tokens": result.target_tokens,
            "image_tokens": result.image_tokens,
            "padding_share": result.pad_tokens / all_tokens if all_tokens else 0.0,
            "step_seconds": seconds,
            "tokens_per_second": result.tokens / seconds if seconds > 0 else 0.0,
            **more,
        }
        with writing(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        scalars = dict(_scalars(row))
        if self._board is not None:
            with writing(self._board_path):
                for name, value in scalars.items():
                    tag = f"train/{name}".replace("train/heldout_", "heldout/")
                    self._board.add_scalar(tag, value, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)
        if "heldout_loss" in more:
            print(
                f"step {step}: held-out loss {more['heldout_loss']:.4f}, "
                f"perplexity {more['heldout_perplexity']:.4g}",
                flush=True,
            )
        if step % self.log_every == 0 or step == self.total_steps:
            mfu = more.get("mfu")
            print(
                f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  "
                f"loss {result.loss:.4f}  grad {result.grad_norm:.3f}  lr {lr:.2e}  "
                f"{row['tokens_per_second']:,.0f} tokens/s  {result.tokens:,} tokens "
                f"({result.target_tokens:,} target, {result.image_tokens:,} image)  "
                f"padding {row['padding_share']:.1%}"
                + ("" if mfu is None else f"  MFU {mfu:.1%}")
                + self._left(step),
                flush=True,
            )

    def _left(self, step: int) -> str:
        left = mean(self._seconds) * (self.total_steps - step)
        return f"  {time_left(left)} left" if left else ""

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            with writing(self._board_path):
                self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def check_wandb(project: str) -> None:
    """Raise UserError where a project is named and the package is missing."""
    if project and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"--train.wandb {project} needs the package wandb, which is not installed; "
            "pip install wandb, or leave the option out"
        )


def _scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What a chart can show: numbers, those of inner objects as outer/inner."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", number) for inner, number in value.items())
        elif isinstance(value, (int, float)) and name != "step":
            yield name, value
