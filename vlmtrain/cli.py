"""The command line: train, convert, data, plan, report, generate, evaluate, demo."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlmtrain.core.config import ParallelSection
from vlmtrain.core.errors import UserError

_USAGE = """usage: vlmtrain COMMAND [options]

  train      train a Qwen2-VL or Qwen2.5-VL model from and to a Hugging Face folder
  data       build: conversations to WebDataset shards; check: report broken samples; stats
  convert    Hugging Face folders to Megatron checkpoints and back; verify compares two
  plan       the best layouts for a model on GPUs that are not rented yet
  report     one HTML page about a run: loss, throughput, where the time went
  generate   ask a model about images and videos: a question, a chat, or a file of questions
  evaluate   loss and perplexity on held-out conversations, scores on questions
  demo       train a small model on real photographs and let it answer

'vlmtrain COMMAND --help' lists a command's options.
"""
# How gloo, NCCL and torch's store say that the process at the other end has ended.
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Did the remote server shutdown or crash",  # the store, in the launcher or on rank 0
    "NCCL communicator was aborted",
)
# Modules of the packages that `pip install .` leaves out and `pip install ".[train]"` brings.
_EXTRA = (
    *("megatron", "transformers", "safetensors", "tokenizers", "webdataset", "PIL", "av"),
    *("jinja2", "tyro", "tomli", "rich", "matplotlib", "psutil", "tensorboard"),
)
_RANK_0_FIRST = 5.0  # seconds
_ONE_PROCESS = ParallelSection()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a user's error, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "data": _data,
        "convert": _convert,
        "plan": _plan,
        "report": _report,
        "generate": _generate,
        "evaluate": _evaluate,
        "demo": _demo,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command not in commands:
        known = ", ".join(commands)
        return _fail(f"there is no command {command!r}; the commands are {known}", 2)
    try:
        code = commands[command](rest)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(str(error), 1)
    except ModuleNotFoundError as error:
        return _fail(_not_installed(command, error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # whoever read the output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _fail(message: str, code: int) -> int:
    print(f"vlmtrain: {message}", file=sys.stderr, flush=True)
    return code


def _not_installed(command: str, error: ModuleNotFoundError) -> str:
    """What to install; an error that has another cause goes on its way."""
    module = (error.name or "").split(".")[0]
    if module not in _EXTRA:
        raise error
    return (
        f"{command} needs the package {module}, which is not installed; in the source tree: "
        'pip install ".[train]"'
    )


def _train(arguments: list[str]) -> int:
    import tyro

    from vlmtrain.core import config as configuration
    from vlmtrain.core import launch

    arguments, recipe = _take(arguments, "--config")
    default: configuration.TrainConfig | None = None
    if recipe is not None:
        blank = configuration.TrainConfig(model=Path(), data="", output=Path())
        default = configuration.from_toml(Path(recipe), blank)
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
        configuration.TrainConfig,
        prog="vlmtrain train",
        args=arguments,
        description="Train a model. --config FILE reads a TOML recipe first; options override it.",
        default=tyro.MISSING_NONPROP if default is None else default,
        use_underscores=True,
    )
    config.validate()
    again = ["train", *(["--config", recipe] if recipe else []), *_drop(arguments, "--nproc")]

    def run(process: launch.Process) -> None:
        from vlmtrain.training.trainer import run

        run(config, process)

    return _on_ranks(run, again, config.nproc)


def _on_ranks(run: Callable[[Any], None], arguments: list[str], nproc: int) -> int:
    """`run(process)` in this process if it is one of several, or alone; with `nproc` above 1 and
    no launcher start `vlmtrain ARGUMENTS` that many times instead."""
    from vlmtrain.core import launch

    process = launch.joined()
    if process is None and nproc > 1:
        return launch.start([*arguments, "--nproc", "0"], nproc)
    if process is not None and nproc not in (0, process.world_size):
        raise UserError(
            f"--nproc {nproc} was given to a process that a launcher started as one of "
            f"{process.world_size}; leave --nproc out"
        )
    warnings.filterwarnings("ignore")
    if process is not None:
        launch.end_with_launcher(process.rank)
    process = process or launch.Process(0, 1, 0)
    try:
        run(process)
    except UserError as error:
        if process.rank and error.print_here and not _connected():
            # Found before the ranks could agree who says it: it is rank 0's to say, and its
            # launcher ends this process; what only this rank meets is said after the pause.
            time.sleep(_RANK_0_FIRST)
        return _leave(_fail(str(error), 1) if error.print_here else 1)
    except KeyboardInterrupt:  # our launcher says it itself
        return _leave(130 if process.rank or launch.launched() else _fail("interrupted", 130))
    except Exception as error:
        if any(sign in str(error) for sign in _PEER_GONE):
            return _leave(_fail(f"rank {process.rank} ends: another rank is gone", 1))
        print(f"vlmtrain: rank {process.rank} failed:", file=sys.stderr)
        traceback.print_exc()
        return _leave(1)
    return 0


def _connected() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _leave(code: int) -> int:
    """End at once where other ranks wait for this one: destructors could block on them."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)
    return code


def _data(arguments: list[str]) -> int:
    import tyro

    from vlmtrain.data import command as data

    def build(
        source: Path,
        target: Path,
        model: Path | None = None,
        media_root: Path | None = None,
        samples_per_shard: int = 1000,
        workers: int = 4,
        verify: bool = True,
        overwrite: bool = False,
    ) -> int:
        """Write conversations and their media as WebDataset shards, which Megatron-Energon reads
        too. Run again after an error, it goes on where it stopped.

        Args:
            source: conversation file (.json, .jsonl or .parquet).
            target: folder to write.
            model: Hugging Face folder; with it training starts without tokenizing everything first.
            media_root: folder that relative media paths start from; default: the source's own.
            samples_per_shard: samples in a shard, at most.
            workers: shards written at once.
            verify: decode every image and video once, to find broken ones now.
            overwrite: replace the folder if it holds a finished build.
        """
        summary = data.build(
            source,
            target,
            model=model,
            samples_per_shard=samples_per_shard,
            media_root=media_root,
            overwrite=overwrite,
            verify=verify,
            workers=workers,
            progress=True,
        )
        print(
            f"{summary.samples} samples, {summary.images} images, {summary.videos} videos in "
            f"{summary.shards} shards ({summary.bytes / 1e6:.1f} MB): {target}"
        )
        return 0

    def check(
        source: str,
        model: Path | None = None,
        pack_length: int | None = None,
        media_root: Path | None = None,
    ) -> int:
        """Report every broken sample; duplicates are warnings.

        Args:
            source: files or shard folders, comma-separated, or a .toml list.
            model: Hugging Face folder; with it lengths are checked too.
            pack_length: tokens per pack.
            media_root: folder that relative media paths start from; default: each file's own.
        """
        report = data.check(source, model=model, pack_length=pack_length, media_root=media_root)
        print(report.render())
        return 0 if report.ok else 1

    def stats(
        source: str,
        model: Path,
        target: Path | None = None,
        pack_length: int = 8192,
        media_root: Path | None = None,
    ) -> int:
        """Print, and plot, how text, images and costs are distributed.

        Args:
            source: files or shard folders, comma-separated, or a .toml list.
            model: Hugging Face folder.
            target: image file for the plot, e.g. stats.png.
            pack_length: tokens per pack.
            media_root: folder that relative media paths start from; default: each file's own.
        """
        found = data.stats(source, model, pack_length=pack_length, media_root=media_root)
        print(data.render_stats(found))
        if target is not None:
            print(f"plot: {data.plot_stats(found, target)}")
        return 0

    return tyro.extras.subcommand_cli_from_dict(
        {"build": build, "check": check, "stats": stats},
        prog="vlmtrain data",
        args=arguments,
        use_underscores=True,
    )


def _convert(arguments: list[str]) -> int:
    from vlmtrain.convert.command import convert

    warnings.filterwarnings("ignore")
    return convert(arguments)


def _plan(arguments: list[str]) -> int:
    import tyro

    from vlmtrain.plan.command import plan

    return tyro.cli(plan, prog="vlmtrain plan", args=arguments, use_underscores=True)


def _report(arguments: list[str]) -> int:
    from vlmtrain.telemetry.command import main as report

    return report(arguments)


def _generate(arguments: list[str]) -> int:
    import tyro

    from vlmtrain.generate.command import GenerateConfig, run

    config = tyro.cli(
        GenerateConfig, prog="vlmtrain generate", args=arguments, use_underscores=True
    )
    warnings.filterwarnings("ignore")
    return run(config)


def _evaluate(arguments: list[str]) -> int:
    import tyro

    from vlmtrain.evaluate.command import EvaluateConfig, run

    config = tyro.cli(
        EvaluateConfig, prog="vlmtrain evaluate", args=arguments, use_underscores=True
    )
    config.validate()
    again = ["evaluate", *_drop(arguments, "--nproc")]
    return _on_ranks(lambda process: run(config, process), again, config.nproc)


def _demo(arguments: list[str]) -> int:
    import tyro

    from vlmtrain.demo.command import run_demo

    def demo(
        output: Path = Path("demo_out"), nproc: int = 2, parallel: ParallelSection = _ONE_PROCESS
    ) -> int:
        """Train a small model on photographs and let transformers ask it about them.

        Args:
            output: folder to write.
            nproc: processes (pipeline stages, unless --parallel.* says otherwise).
            parallel: layout of the training run.
        """
        return run_demo(output, nproc=nproc, parallel=parallel)

    return tyro.cli(demo, prog="vlmtrain demo", args=arguments, use_underscores=True)


def _take(arguments: list[str], option: str) -> tuple[list[str], str | None]:
    """Remove `option VALUE` (or `option=VALUE`) and return the value."""
    for i, argument in enumerate(arguments):
        if argument == option:
            if i + 1 == len(arguments):
                raise UserError(f"{option} needs a value")
            return arguments[:i] + arguments[i + 2 :], arguments[i + 1]
        if argument.startswith(option + "="):
            return arguments[:i] + arguments[i + 1 :], argument.split("=", 1)[1]
    return arguments, None


def _drop(arguments: list[str], option: str) -> list[str]:
    return _take(arguments, option)[0]


if __name__ == "__main__":
    sys.exit(main())
