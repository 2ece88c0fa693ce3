"""`vlmtrain train`: reads the recipe and the options, and starts the processes."""

from __future__ import annotations

from pathlib import Path

import tyro

from vlmtrain.core.config import RENAMED, TrainConfig, from_toml
from vlmtrain.core.errors import UserError
from vlmtrain.core.launch import Process, run_on_ranks, take_option
from vlmtrain.core.options import spelled
from vlmtrain.core.run_folder import model_of


def main(arguments: list[str]) -> int:
    arguments, recipe = take_option(arguments, "--config")
    arguments = spelled(arguments, TrainConfig, RENAMED)
    default: TrainConfig | None = None
    if recipe is not None:
        blank = TrainConfig(model=Path(), data="", output=Path())
        default = from_toml(Path(recipe), blank)
        missing = [
            name
            for name, value in (
                ("model", default.model != Path()),
                ("data", default.data),
                ("output", default.output != Path()),
            )
            if not value and not any(a.split("=")[0] == f"--{name}" for a in arguments)
        ]
        if missing and not {"-h", "--help"} & set(arguments):
            raise UserError(f"{recipe} does not set {missing[0]}; pass --{missing[0]}")
    config = tyro.cli(
        TrainConfig,
        prog="vlmtrain train",
        args=arguments,
        description="Train a model. --config FILE reads a TOML recipe first; options override it.",
        default=tyro.MISSING_NONPROP if default is None else default,
        use_underscores=True,
    )
    config.validate()
    config.model = model_of(config.model)
    command = ["train", *(["--config", recipe] if recipe else []), *arguments]

    def run(process: Process) -> None:
        from vlmtrain.training import trainer  # torch and megatron-core: not for --help

        trainer.run(config, process)

    return run_on_ranks(run, command, config.nproc)
