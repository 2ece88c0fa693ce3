"""The command line: dispatch and exit codes. Each command's options stand in its package's
command.py, which is imported when it is asked for, so that no `--help` waits for another command's
packages."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from vlmtrain.core.errors import UsageError, UserError, discard_output, said_by_system
from vlmtrain.core.launch import failed, leave, let_rank_0_speak

_USAGE = """usage: vlmtrain COMMAND [options]

  train      train a Qwen2-VL, Qwen2.5-VL or Qwen3-VL model from and to a Hugging Face folder
  data       build: conversations to WebDataset shards; check: report broken samples; stats
  convert    Hugging Face folders to Megatron checkpoints and back; verify compares two
  plan       the best layouts for a model on GPUs that are not rented yet
  report     one HTML page about a run: loss, throughput, where the time went
  generate   ask a model about images and videos: a question, a chat, or a file of questions
  evaluate   loss and perplexity on held-out conversations, scores on questions
  demo       train a small model on real photographs and let it answer

'vlmtrain COMMAND --help' lists a command's options.
"""
# The package whose command.py has it.
_COMMANDS = {
    "train": "training",
    "data": "data",
    "convert": "convert",
    "plan": "plan",
    "report": "telemetry",
    "generate": "generate",
    "evaluate": "evaluate",
    "demo": "demo",
}
# Modules of the packages that `pip install .` leaves out and `pip install ".[train]"` brings.
_EXTRA = (
    *("megatron", "transformers", "safetensors", "tokenizers", "PIL", "av"),
    *("jinja2", "tyro", "tomli", "rich", "matplotlib", "psutil", "scipy", "tensorboard"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a user's error, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        return failed(f"there is no command {command!r}; the commands are {known}", 2)
    if os.environ.get("VLMKERNELS_ISA"):
        try:
            import_module("vlmkernels")
        except ValueError as error:  # this machine has not these instructions
            return failed(str(error), 1)
    try:
        code = import_module(f"vlmtrain.{_COMMANDS[command]}.command").main(rest)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return failed(str(error), 2)
    except UserError as error:
        let_rank_0_speak()
        return failed(str(error), 1)
    except ModuleNotFoundError as error:
        return failed(_not_installed(command, error), 1)
    except KeyboardInterrupt:
        return failed("interrupted", 130)
    except BrokenPipeError:  # whoever read the output has left, as `| head` does
        discard_output()
        return 1
    except OSError as error:
        if not (said := said_by_system(error)):
            raise
        return failed(said, 1)


def _not_installed(command: str, error: ModuleNotFoundError) -> str:
    """What to install; an error that has another cause goes on its way."""
    module = (error.name or "").split(".")[0]
    if module not in _EXTRA or find_spec(module) is not None:
        raise error
    return (
        f"{command} needs the package {module}, which is not installed; in the source tree: "
        'pip install ".[train]"'
    )


def _open_standard_streams() -> None:
    """Those that are closed lead nowhere, or the next files that are opened would be in their
    places; what their encoding has not is written as an escape."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run() -> None:
    """The command `vlmtrain`: `main`, and the end of this process.

    Its processes (`python -m vlmtrain.cli`) get the packages that this one has, and not those of
    the current folder, which may be a clone beside an installed package (Python 3.11 and later).
    """
    _open_standard_streams()
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.exit(leave(main()))


if __name__ == "__main__":
    run()
