"""`vlmtrain evaluate`: reads the options and starts the processes."""

from __future__ import annotations

import tyro

from vlmtrain.core.launch import Process, run_on_ranks
from vlmtrain.core.options import spelled
from vlmtrain.evaluate.config import EvaluateConfig


def main(arguments: list[str]) -> int:
    former = {"global_batch": "global_batch_packs"}
    arguments = spelled(arguments, EvaluateConfig, former)
    config = tyro.cli(
        EvaluateConfig, prog="vlmtrain evaluate", args=arguments, use_underscores=True
    )
    config.validate()

    def run(process: Process) -> None:
        from vlmtrain.evaluate import measure  # torch and megatron-core: not for --help

        measure.run(config, process)

    return run_on_ranks(run, ["evaluate", *arguments], config.nproc)
