"""Models in the shapes of released sizes, with random weights, written tensor by tensor.

python -m tests.checkpoint.full_size FOLDER [2B|7B]   makes a folder, converts it to Megatron and
back, compares, prints time and peak memory of each and stores them for benchmarks/RESULTS.md
(`make test-full`).
"""

from __future__ import annotations

import filecmp
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.harness import commit
from tests.checkpoint.test_mapping import shapes_of
from tests.released import released_config
from vlmtrain.checkpoint.hf.files import SHARD_BYTES, SafetensorsWriter, finish_hf_folder
from vlmtrain.models.family import read_spec

MODELS = {"2B": "qwen2_vl-2b", "7B": "qwen2_5_vl-7b"}
RSS_LIMIT_GB = {"2B": 1.5, "7B": 3.0}


def make(folder: Path, config: dict[str, Any]) -> None:
    """A folder with random bf16 weights of a model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    spec = read_spec(folder)
    table = shapes_of(spec)
    plan: list[list[str]] = [[]]
    filled = 0
    for name, shape in table.items():
        count = 2 * torch.Size(shape).numel()
        if filled + count > SHARD_BYTES:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += count
    files = []
    noise = torch.randn(1 << 24).mul_(0.02).bfloat16()
    for number, names in enumerate(plan):
        path = folder / f"part-{number}.safetensors"
        writer = SafetensorsWriter(path, [(n, torch.bfloat16, table[n]) for n in names])
        for i, name in enumerate(names):
            count = torch.Size(table[name]).numel()
            rolled = noise.roll(7919 * (i + 1))
            writer.add(name, rolled.repeat(-(-count // len(noise)))[:count].view(table[name]))
        writer.close()
        files.append((path.name, {n: 2 * torch.Size(table[n]).numel() for n in names}))
    finish_hf_folder(folder, files)


def timed(arguments: list[str]) -> tuple[float, float]:
    """Seconds and peak resident GB of `vlmtrain convert ARGUMENTS`."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "vlmtrain.cli", "convert", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, arguments
    return time.perf_counter() - start, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    folder, size = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "2B"
    hf, megatron, other, back = (folder / n for n in ("hf", "megatron", "resharded", "back"))
    try:
        make(hf, released_config(MODELS[size]))
        jobs = [
            ["hf-to-megatron", "--source", f"{hf}", "--target", f"{megatron}",
             "--parallel.tensor", "2", "--parallel.pipeline", "2"],
            ["reshard", "--source", f"{megatron}", "--target", f"{other}"],
            ["megatron-to-hf", "--source", f"{other}", "--target", f"{back}"],
            ["verify", "--source", f"{hf}", "--target", f"{back}", "--logits", "no"],
        ]  # fmt: skip
        actual: list[dict[str, Any]] = []
        total = sum(p.stat().st_size for p in hf.glob("*.safetensors")) / 1e9
        for arguments in jobs:
            seconds, rss = timed(arguments)
            print(
                f"{size} {arguments[0]}: {total:.2f} GB, {seconds:.1f} s "
                f"({1e3 * total / seconds:.0f} MB/s), peak RSS {rss:.2f} GB",
                flush=True,
            )
            assert rss < RSS_LIMIT_GB[size], f"{rss:.2f} GB is above {RSS_LIMIT_GB[size]} GB"
            actual.append(
                dict(
                    size=size, job=arguments[0], gigabytes=total, seconds=seconds, rss=rss,
                    limit=RSS_LIMIT_GB[size], date=date.today().isoformat(), commit=commit(),
                )
            )  # fmt: skip
            if arguments[0] == "reshard":
                shutil.rmtree(megatron)  # 2B needs 13 GB of disk, not 18
        assert filecmp.cmp(hf / "config.json", back / "config.json", shallow=False) or json.loads(
            (hf / "config.json").read_text()
        ) == json.loads((back / "config.json").read_text())
        report.store_conversions(report.describe_machine("cpu"), size, actual)
        report.write()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"whole test: {resource.getrusage(resource.RUSAGE_SELF).ru_utime:.0f} s user")


if __name__ == "__main__":
    main()
