"""Predicted beside measured on this machine: trains one model on several layouts of two processes
and compares ratios of step times with the planner's. `python -m tests.plan.compare FOLDER`.

The first run's gpu.toml tells the planner how fast this machine is; all other runs are predicted
from it. Of each run the median of its faster half of steps counts: a shared machine only adds.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.ranks import run_cli
from vlmtrain.core.config import ParallelSection, RecomputeSection, TrainConfig, TrainSection
from vlmtrain.data.index import scan_sources
from vlmtrain.data.processor import Processor
from vlmtrain.demo import command, photographs, tiny_model
from vlmtrain.models.family import read_spec
from vlmtrain.parallel.layout import section_layout
from vlmtrain.plan import hardware, workload
from vlmtrain.telemetry import drift

STEPS, PACK, BATCH = 14, 512, 8
BOUND = 0.15
VISION = {"depth": 6, "hidden_size": 256, "num_heads": 8, "intermediate_size": 768}
TEXT = {"num_hidden_layers": 8, "hidden_size": 384, "num_attention_heads": 12}
FULL = [2, 5]
# name, options, whether it is judged: tensor parallelism on gloo is latency, which is assumed
LAYOUTS: list[tuple[str, dict[str, dict[str, Any]], bool]] = [
    ("data 2", {}, True),
    ("data 2, recompute", {"recompute": {"language": "full", "vision": "full"}}, True),
    ("pipeline 2, even", {"parallel": {"pipeline": 2, "text_layers": (3, 5)}}, True),
    ("pipeline 2, all text last", {"parallel": {"pipeline": 2, "text_layers": (0, 8)}}, True),
    (
        "pipeline 2 x 2",
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2, "text_layers": (1, 2, 3, 2)}},
        True,
    ),
    (
        "pipeline 2, multiplexed",
        {"parallel": {"pipeline": 2, "vision": "multiplexed", "text_layers": (4, 4)}},
        True,
    ),
    ("tensor 2", {"parallel": {"tensor": 2}}, False),
]


def write_model(folder: Path) -> Path:
    tiny_model.VISION.update(VISION, fullatt_block_indexes=FULL)
    tiny_model.TEXT.update(TEXT, intermediate_size=1536)
    return tiny_model.write_folder(folder, command.training_texts())


def arguments(options: dict[str, dict[str, Any]]) -> list[str]:
    words = []
    for section, values in options.items():
        for name, value in values.items():
            words += [f"--{section}.{name}"]
            words += [str(v) for v in value] if isinstance(value, tuple) else [str(value)]
    return words


def measure(model: Path, data: Path, output: Path, options: dict[str, dict[str, Any]]) -> float:
    """Seconds of a step."""
    paths = ["--model", str(model), "--data", str(data), "--output", str(output), "--nproc", "2"]
    numbers = [f"--train.steps={STEPS}", f"--train.pack_length={PACK}"]
    numbers += [f"--train.global_batch_packs={BATCH}", "--train.precision=fp32"]
    done = run_cli(["train", *paths, *numbers, *arguments(options)], timeout=900)
    if done.code:
        raise SystemExit(f"{output.name} failed:\n{done.output[-3000:]}")
    lines = (output / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][2:-1]  # the last one saves
    seconds = sorted(row["step_seconds"] - row["waterfall"]["data_wait"] for row in rows)
    return statistics.median(seconds[: (len(seconds) + 1) // 2])


def main() -> int:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model, data = write_model(folder / "model"), photographs.export(folder / "photographs")
    spec = read_spec(model)
    index = scan_sources([str(data)], Processor.from_folder(model, spec), spec, PACK, verify=False)
    lengths = workload.from_index(index, "photographs")
    gpu: hardware.Gpu | None = None
    first: tuple[float, float] | None = None
    worst = 0.0
    print(f"{'layout':28}{'measured':>10}{'planned':>10}{'ratio':>8}{'planned':>9}{'off':>8}")
    for number, (name, options, judged) in enumerate(LAYOUTS):
        output = folder / f"run{number}"
        measured = measure(model, data, output, options)
        if gpu is None:
            gpu = dataclasses.replace(hardware.find_gpu(str(output / "gpu.toml")), name="cpu")
        config = TrainConfig(
            model=model,
            data=str(data),
            output=output,
            train=TrainSection(pack_length=PACK, global_batch_packs=BATCH, precision="fp32"),
            parallel=ParallelSection(**options.get("parallel", {})),
            recompute=RecomputeSection(**options.get("recompute", {})),
        )
        layout = section_layout(spec, config.parallel, 2)
        planned = drift.plan_of_run(config, spec, layout, gpu, lengths).step_seconds
        first = first or (measured, planned)
        ratios = measured / first[0], planned / first[1]
        off = ratios[1] / ratios[0] - 1
        worst = max(worst, abs(off) if judged else 0.0)
        print(
            f"{name:28}{measured:9.3f}s{planned:9.3f}s{ratios[0]:8.2f}{ratios[1]:9.2f}{off:+8.0%}"
            f"{'' if judged else '  (not judged)'}",
            flush=True,
        )
    print(f"ratios are within {worst:.0%} of the planned ones; {BOUND:.0%} is the bound")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
