"""The rehearsal: it changes no bit, and no later step needs more memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import RUN_SEED
from tests.ranks import free_port, run_workers
from tests.train import mixed
from tests.train.conftest import losses

LAYOUTS = {
    "pipeline": "--parallel.pipeline=2 --lora.rank=4 --lora.dropout=0.2 --lora.vision".split(),
    "tensor": "--parallel.tensor=2 --parallel.sequence --train.precision=bf16".split(),
    "data": (
        "--parallel.overlap_grad_reduce --parallel.overlap_param_gather --optimizer.clip=0 "
        "--optimizer.offload_fraction=0.5"
    ).split(),
    "multiplexed": ["--parallel.pipeline=2", "--parallel.vision=multiplexed"],
}
STEPS = 3


def run(model: Path, data: Path, folder: Path, layouts: dict[str, list[str]]) -> None:
    """Each layout with and without a rehearsal, into FOLDER/LAYOUT-yes and -no."""
    cases = []
    for layout, more in layouts.items():
        for rehearse in ("yes", "no"):
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
    run_workers(["-m", "tests.train.forked_worker", str(path)], 2, timeout=1000)
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


def check_peaks(folder: Path, layout: str) -> None:
    """What torch has allocated at the rehearsal's peak, beside all steps of the run without."""
    for rank in range(2):
        rehearsed, without = (
            json.loads((folder / f"{layout}-{name}.peaks.{rank}.json").read_text())
            for name in ("yes", "no")
        )
        steps = without["steps"]
        assert len(steps) == STEPS and not without["rehearsal"]
        print(layout, rank, rehearsed["rehearsal"], steps)
        assert max(rehearsed["rehearsal"]) == pytest.approx(max(steps), rel=0.03)
        assert max(rehearsed["steps"]) <= 1.03 * max(rehearsed["rehearsal"])
    facts = json.loads((folder / f"{layout}-yes" / "run.json").read_text())
    assert [peak["rank"] for peak in facts["rehearsal"]] == [0, 1]
    for peak in facts["rehearsal"]:
        assert 0 < peak["measured"] < peak["capacity"] and peak["samples"]


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
