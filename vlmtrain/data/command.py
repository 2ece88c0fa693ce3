"""`vlmtrain data build`, `check` and `stats`: options, progress, results.

Each imports what it needs when it runs: torch and transformers are not for --help.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import tyro

from vlmtrain.core.config import MediaSection, check_ranges
from vlmtrain.core.errors import UsageError
from vlmtrain.core.options import spelled
from vlmtrain.core.progress import progress
from vlmtrain.core.run_folder import model_of

_MODEL_SIZES = MediaSection()


def main(arguments: list[str]) -> int:
    actions: dict[str, Callable[..., int]] = {
        "build": build_command,
        "check": check_command,
        "stats": stats_command,
    }
    if arguments and arguments[0] in actions:
        former = {"source": "data", "target": "output"}
        arguments = [arguments[0], *spelled(arguments[1:], actions[arguments[0]], former)]
    return tyro.extras.subcommand_cli_from_dict(
        actions, prog="vlmtrain data", args=arguments, use_underscores=True
    )


def _check_counted(model: Path | None, template: str, system: str) -> None:
    if model is None and (template or system):
        raise UsageError("--template and --system are for counting tokens; pass --model too")


def build_command(
    data: Path,
    output: Path,
    model: Path | None = None,
    media_root: Path | None = None,
    ignore_keys: tuple[str, ...] = (),
    template: str = "",
    system: str = "",
    pack_length: int = 8192,
    media: MediaSection = _MODEL_SIZES,
    samples_per_shard: int = 1000,
    workers: int = 4,
    verify: bool = True,
    unreadable: Literal["raise", "skip"] = "raise",
    overwrite: bool = False,
) -> int:
    """Write conversations and their media as WebDataset shards, which Megatron-Energon reads
    too. Run again after an error, it goes on where it stopped.

    Args:
        data: conversation file (.json, .jsonl, .parquet or .tar).
        output: folder to write.
        model: Hugging Face folder; with it training starts without tokenizing everything first.
        media_root: folder that relative media paths start from; default: the data file's own.
        ignore_keys: keys and marks of records that are not looked at; others that are not read are
            errors.
        template: file with a Jinja chat template, instead of the model's own.
        system: system prompt of conversations that have none, instead of the template's own.
        pack_length: that of the training; with a model, for the sizes that fit.
        media: sizes of images and videos, as in training.
        samples_per_shard: samples in a shard, at most.
        workers: shards written at once.
        verify: decode every image and video once, to find broken ones now.
        unreadable: what a bad sample means: the end, or a line in OUTPUT/left_out.jsonl.
        overwrite: replace the folder if it holds a finished build.
    """
    from vlmtrain.data.formats.webdataset import LEFT_OUT, build_shards
    from vlmtrain.data.processor import Processor
    from vlmtrain.models.family import read_spec

    check_ranges(media, "--media.")
    processor = None
    _check_counted(model, template, system)
    if model is not None:
        model = model_of(model)
        processor = Processor.from_folder(
            model,
            read_spec(model),
            section=media,
            pack_length=pack_length,
            template=template or None,
            system=system,
        )
    with progress("build", "samples") as update:
        summary = build_shards(
            data,
            output,
            samples_per_shard=samples_per_shard,
            verify=verify,
            skip=unreadable == "skip",
            media_root=media_root,
            ignored=ignore_keys,
            overwrite=overwrite,
            processor=processor,
            workers=workers,
            progress=update,
        )
    print(
        f"{summary.samples} samples, {summary.images} images, {summary.videos} videos in "
        f"{summary.shards} shards ({summary.bytes / 1e6:.1f} MB): {output}"
    )
    if summary.left_out:
        print(f"{summary.left_out} bad samples left out: {output / LEFT_OUT}")
    return 0


def check_command(
    data: str,
    model: Path | None = None,
    pack_length: int | None = None,
    media_root: Path | None = None,
    ignore_keys: tuple[str, ...] = (),
    template: str = "",
    system: str = "",
    media: MediaSection = _MODEL_SIZES,
    write_good: Path | None = None,
) -> int:
    """Report every broken sample; duplicates are warnings.

    Args:
        data: files or shard folders, comma-separated, or a .toml list.
        model: Hugging Face folder; with it lengths are checked too.
        pack_length: tokens that a pack holds at most.
        media_root: folder that relative media paths start from; default: each file's own.
        ignore_keys: keys and marks of records that are not looked at; others that are not read are
            errors.
        template: file with a Jinja chat template, instead of the model's own.
        system: system prompt of conversations that have none, instead of the template's own.
        media: sizes of images and videos, as in training.
        write_good: JSONL file to write with the records that have no problem.
    """
    from vlmtrain.data.check import check

    check_ranges(media, "--media.")
    _check_counted(model, template, system)
    report = check(
        data,
        model=None if model is None else model_of(model),
        pack_length=pack_length,
        media_root=media_root,
        ignored=ignore_keys,
        media=media,
        template=template or None,
        system=system,
        write_good=write_good,
    )
    print(report.render())
    return 0 if report.ok else 1


def stats_command(
    data: str,
    model: Path,
    output: Path | None = None,
    pack_length: int = 8192,
    media_root: Path | None = None,
    ignore_keys: tuple[str, ...] = (),
    template: str = "",
    system: str = "",
    media: MediaSection = _MODEL_SIZES,
) -> int:
    """Print, and plot, how text, images and costs are distributed.

    Args:
        data: files or shard folders, comma-separated, or a .toml list.
        model: Hugging Face folder.
        output: image file for the plot, e.g. stats.png.
        pack_length: tokens that a pack holds at most.
        media_root: folder that relative media paths start from; default: each file's own.
        ignore_keys: keys and marks of records that are not looked at; others that are not read are
            errors.
        template: file with a Jinja chat template, instead of the model's own.
        system: system prompt of conversations that have none, instead of the template's own.
        media: sizes of images and videos, as in training.
    """
    from vlmtrain.data.stats import plot_stats, render_stats, stats

    check_ranges(media, "--media.")
    figures = stats(
        data,
        model_of(model),
        pack_length=pack_length,
        media_root=media_root,
        ignored=ignore_keys,
        media=media,
        template=template or None,
        system=system,
    )
    print(render_stats(figures))
    if output is not None:
        print(f"plot: {plot_stats(figures, output)}")
    return 0
