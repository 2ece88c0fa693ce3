"""The rehearsal: it changes no bit, and no later step needs more memory."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import RUN_SEED
from tests.ranks import free_port, run_workers
from tests.train import mixed
from tests.train.conftest import losses
from vlmtrain.plan.hardware import find_gpu

LAYOUTS = {
    # with one replica gradients leave for the host as they are made, from the second step on
    "pipeline": (
        "--parallel.pipeline=2 --lora.rank=4 --lora.dropout=0.2 --lora.vision "
        "--optimizer.offload_fraction=1"
    ).split(),
    "tensor": "--parallel.tensor=2 --parallel.sequence --train.precision=bf16".split(),
    "data": (
        "--parallel.overlap_grad_reduce --parallel.overlap_param_gather --optimizer.clip=0 "
        "--optimizer.offload_fraction=0.5"
    ).split(),
    "multiplexed": ["--parallel.pipeline=2", "--parallel.vision=multiplexed"],
}
STEPS = 3


def run(
    model: Path,
    data: Path,
    folder: Path,
    layouts: dict[str, list[str]],
    ways: Sequence[str] = ("yes", "no"),
) -> None:
    """Each layout with and without a rehearsal, into FOLDER/LAYOUT-yes and -no."""
    cases = []
    for layout, more in layouts.items():
        for rehearse in ways:
            output = folder / f"{layout}-{rehearse}"
            arguments = ["train", f"--model={model}", f"--data={data}", f"--output={output}"]
            arguments += (
                "--train.pack_length=800 --train.global_batch_packs=4 --loader.workers=0".split()
            )
            arguments += [f"--train.steps={STEPS}", f"--checkpoint.every={STEPS}"]
            arguments += ["--optimizer.lr=1e-3", *more]
            arguments += ["--train.no_rehearse"] if rehearse == "no" else []
            case = {"port": free_port(), "arguments": arguments, "fault": "peaks", "rank": None}
            cases.append({**case, "output": str(output)})
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    heap = {"LD_PRELOAD": str(folder / "heap.so")}
    compiler = os.environ.get("CC", "cc").split()
    source = Path(__file__).with_name("heap.c")
    subprocess.run([*compiler, "-O2", "-shared", "-fPIC", "-o", *heap.values(), source], check=True)
    run_workers(["-m", "tests.train.forked_worker", str(path)], 2, timeout=1000, env=heap)
    for case in cases:
        for rank in range(2):
            child = json.loads(Path(f"{case['output']}.{rank}.json").read_text())
            assert child["code"] == 0, child["said"]


FEW = ("pipeline", "data")  # matrix.py has the others


@pytest.fixture(scope="module")
def done(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rehearsal")
    run(model, mixed.write(folder, RUN_SEED), folder, {name: LAYOUTS[name] for name in FEW})
    return folder


def check_peaks(folder: Path, layout: str, ways: Sequence[str] = ("yes", "no")) -> None:
    """What torch has allocated at the rehearsal's peak, beside all steps of runs with and without.
    heap.c's figures: a GPU's, without the packs that are decoded ahead into the host's memory."""
    states = []  # with what was in use before
    for rank in range(2):
        runs = [
            json.loads((folder / f"{layout}-{name}.peaks.{rank}.json").read_text()) for name in ways
        ]
        rehearsed = max(runs[0]["rehearsal"])
        states.append(sum(runs[0]["states"]))
        print(layout, rank, runs)
        for one in runs:
            assert len(one["steps"]) == STEPS
            assert max(one["steps"]) == pytest.approx(rehearsed, rel=0.03)
    facts = json.loads((folder / f"{layout}-yes" / "run.json").read_text())
    assert [peak["rank"] for peak in facts["rehearsal"]] == [0, 1]
    assert [peak["states"] for peak in facts["rehearsal"]] == states
    for peak in facts["rehearsal"]:
        assert 0 < peak["measured"] < peak["capacity"] and peak["samples"]
    off = [(p["measured"] - p["states"]) / (p["planned"] - p["states"]) for p in facts["rehearsal"]]
    kept = find_gpu(str(folder / f"{layout}-yes" / "gpu.toml"))
    assert kept.step_memory == pytest.approx(max(off), rel=1e-3)  # for the next start


@pytest.mark.slow
@pytest.mark.parametrize("layout", FEW)
def test_no_bit_changes(layout, done) -> None:
    check_bits(done, layout)


def check_bits(folder: Path, layout: str) -> None:
    with_it, without = folder / f"{layout}-yes", folder / f"{layout}-no"
    said = json.loads(Path(f"{with_it}.0.json").read_text())["said"]
    assert "rehearsed the heaviest steps in " in said and "rank 1: peak " in said, said
    assert losses(with_it) == losses(without)
    saved = f"checkpoints/step-{STEPS:08d}"
    files = sorted((with_it / saved).glob("*.distcp"))
    assert files
    for file in files:
        assert file.read_bytes() == (without / saved / file.name).read_bytes(), file
    states: list[Any] = [
        torch.load(path / saved / "common.pt", weights_only=False) for path in (with_it, without)
    ]
    for ours, theirs in zip(*(state["random"] for state in states), strict=True):
        assert torch.equal(ours["torch"], theirs["torch"])
        assert ours["numpy"] == theirs["numpy"] and ours["python"] == theirs["python"]
        for name, state in ours["megatron"].items():
            assert torch.equal(state, theirs["megatron"][name])


@pytest.mark.slow
@pytest.mark.parametrize("layout", FEW)
def test_its_peak_is_the_runs(layout, done) -> None:
    check_peaks(done, layout)
