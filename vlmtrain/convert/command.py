"""`vlmtrain convert`: options, progress, results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Literal

from vlmtrain.core.config import ParallelSection
from vlmtrain.core.errors import UsageError, UserError
from vlmtrain.core.progress import progress

PAGE = """usage: vlmtrain convert ACTION --source FOLDER --target FOLDER [options]

Weights from one form into the other, tensor by tensor: memory stays a small multiple of the
largest tensor, whatever the model's size. Training needs none of this: `vlmtrain train --model`
reads both kinds of folder and writes a Hugging Face folder at the end.

  hf-to-megatron   a Hugging Face folder becomes a Megatron checkpoint (torch_dist)
  megatron-to-hf   a Megatron checkpoint, also OUTPUT/checkpoints/step-N of a training run,
                   becomes a Hugging Face folder that from_pretrained loads, LoRA merged
  reshard          a Megatron checkpoint is written anew for another layout, the optimizer's
                   state with it; any layout can read any checkpoint, this only saves it reads
  verify           compare two folders of either kind: every tensor bitwise, and the logits of a
                   fixed input (transformers for Hugging Face folders); exit code 1 if they differ

options
  --source FOLDER              folder to read (OUTPUT/checkpoints: the newest checkpoint in it)
  --target FOLDER              folder to write (verify: to compare with)
  --dtype keep|bf16|fp16|fp32  type of the weights written; keep: as they are (default)
  --overwrite                  replace --target if it exists; only when the new one is complete
  --logits auto|yes|no         verify: run the models; auto: if below 0.6 G weights (default)

layout of the Megatron checkpoint (hf-to-megatron, reshard); one file a rank
  --parallel.tensor N                    tensor-parallel size
  --parallel.pipeline N                  pipeline stages
  --parallel.virtual_pipeline N          chunks per pipeline rank
  --parallel.vision_layers N [N ...]     vision layers per stage
  --parallel.text_layers N [N ...]       language layers per stage
  --parallel.vision pipelined|multiplexed
  --parallel.sequence                    has no bearing on weights
  --parallel.expert N                    ranks that share a mixture's experts; likewise

The target gets its name when all of it is on disk: an interrupted conversion leaves
TARGET.incomplete at most, which the next one replaces. docs/weights.md has the mapping table.
"""
# Of each action the options that mean nothing to it.
_WITHOUT = {
    "hf-to-megatron": ("logits",),
    "megatron-to-hf": ("logits", "parallel"),
    "reshard": ("logits",),
    "verify": ("dtype", "overwrite", "parallel"),
}
# Of the section parallel what says nothing of where weights lie.
_WITHOUT_LAYOUT = (
    "vision_piece",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "tensor_overlap",
)
ACTIONS = tuple(_WITHOUT)


@dataclass
class Options:
    """Options of `vlmtrain convert`."""

    source: Path
    target: Path
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = "keep"
    overwrite: bool = False
    logits: Literal["auto", "yes", "no"] = "auto"
    parallel: ParallelSection = field(default_factory=ParallelSection)


def main(arguments: list[str]) -> int:
    """Run `vlmtrain convert ARGUMENTS`; returns the exit code.

    Raises:
        UsageError: an unknown action, or an option that it has no use for.
        UserError: what else the user can mend, in one sentence.
    """
    warnings.filterwarnings("ignore")
    if not arguments or {"-h", "--help"} & set(arguments):
        print(PAGE, end="")
        return 0 if arguments else 2
    action, rest = arguments[0], arguments[1:]
    if action not in ACTIONS:
        raise UsageError(f"there is no conversion {action!r}; the actions are {', '.join(ACTIONS)}")
    import tyro

    options = tyro.cli(Options, prog=f"vlmtrain convert {action}", args=rest, use_underscores=True)
    unused = Options(options.source, options.target)
    for name in (*_WITHOUT[action], *(f"parallel.{name}" for name in _WITHOUT_LAYOUT)):
        value_of = attrgetter(name)
        if value_of(options) != value_of(unused):
            raise UsageError(f"convert {action} has no use for --{name}; leave it out")
    from vlmtrain.checkpoint import convert as conversions
    from vlmtrain.checkpoint.model_folder import newest

    options.source = newest(options.source)
    if action == "verify":
        options.target = newest(options.target)
        return _verify(options)

    from vlmtrain.checkpoint.megatron.torch_dist import is_checkpoint
    from vlmtrain.models.family import read_spec

    spec = read_spec(options.source)
    megatron = is_checkpoint(options.source)
    if action == "hf-to-megatron" and megatron:
        raise UserError(f"{options.source} is a Megatron checkpoint already; use reshard")
    if action != "hf-to-megatron" and not megatron:
        raise UserError(f"{options.source} is no Megatron checkpoint: it has no .metadata")
    convert = conversions.to_hf
    if action != "megatron-to-hf":
        layout = conversions.layout_for(spec, options.parallel)
        convert = partial(conversions.to_megatron, layout=layout)
    with _progress(action) as progress:
        done = convert(
            options.source,
            options.target,
            dtype=conversions.DTYPES[options.dtype],
            overwrite=options.overwrite,
            progress=progress,
        )
    print(done.describe())
    return 0


def _verify(options: Options) -> int:
    import logging

    import transformers
    from rich.console import Console

    from vlmtrain.convert.verify import compare, compare_logits

    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    with _progress("verify") as progress:
        result = compare(options.source, options.target, progress)
    if options.logits != "no":
        compare_logits(result, options.source, options.target, force=options.logits == "yes")
    else:
        result.logits_note = "not run"
    Console().print(result.table())
    for group in result.groups.values():
        for name in group.different[:5]:
            print(f"different: {name}")
    print("the same model" if result.equal else "not the same")
    return 0 if result.equal else 1


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Progress over bytes, of whose number a conversion tells first."""
    with progress(title, "MB") as update:
        yield lambda total: lambda done: update(done // 10**6, total // 10**6)
