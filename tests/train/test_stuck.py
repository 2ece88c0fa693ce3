"""A rank that stops, dies, waits for its disk or was started with something else: each is named,
and all ranks end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import free_port, run_workers
from tests.train.conftest import options
from vlmtrain.checkpoint.training import checkpoint as checkpoints
from vlmtrain.core.clock import Place
from vlmtrain.training import watchdog
from vlmtrain.training.watchdog import where

MINUTES = 0.25
LIMIT = 60 * MINUTES + 30  # seconds from the fault to the end of the last rank
#: What is planted in rank 1, the layout, and what the report must say.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "stopped": (
        ["--parallel.pipeline=2"],
        [
            "no progress for 15 s",
            "rank 1 does not answer (process ",
            ": stopped)",
            "rank 0: step 3",
        ],
    ),
    "slow disk": (
        ["--parallel.pipeline=2", "--parallel.vision=multiplexed"],
        [
            "the others wait for rank 1 in step 3, data",
            "rank 0: step 3, data",
            "waits in all_reduce, called at vlmtrain/data/collective_errors.py",
            "build: sample = self.index.load(position)",
        ],
    ),
    "silent": (
        ["--parallel.tensor=2"],
        ["rank 0 ends at step 3, ", "rank 1 is gone (process "],
    ),
    "other seed": ([], ["rank 1 on ", "--train.seed is 4 there and 3 on rank 0"]),
    "other version": ([], ["the source of vlmtrain is 0.0.9, checksum 0 there and "]),
    "no model": ([], ["rank 1 on ", "/no-such-folder: no such folder; a model is"]),
    "own output": ([], ["rank 1 on ", "what rank 0 wrote to --output own-output is not there"]),
    "other file": ([], ["has changed since the file was scanned", "as scanned, media of "]),
}
STARTED = ("stopped", "slow disk", "silent")  # these faults come in the third step


@pytest.fixture(scope="module")
def ended(model, conversations, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """For each case how its two ranks have ended."""
    folder = tmp_path_factory.mktemp("stuck")
    samples = json.loads(conversations.read_text())
    for sample in samples:  # as long as before
        sample["conversations"][-1]["value"] = sample["conversations"][-1]["value"][::-1]
    other = folder / "other.json"
    other.write_text(json.dumps(samples))
    cases = []
    for fault, (layout, _) in CASES.items():
        output = folder / fault.replace(" ", "-")
        common = [f"--train.timeout={MINUTES}", "--train.steps=60", "--loader.workers=0"]
        arguments = options(model, conversations, output, *common, *layout, "--checkpoint.every=1")
        if fault == "own output":  # by a name that is another folder where rank 1 runs
            arguments.append("--output=own-output")
        case = {"port": free_port(), "arguments": arguments, "fault": fault, "rank": 1}
        more = {
            "other seed": ["--train.seed=4"],
            "no model": [f"--model={folder}/no-such-folder"],
        }.get(fault, [])
        cases.append({**case, "output": str(output), "other": str(other), "more": more})
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    run_workers(["-m", "tests.train.forked_worker", str(path)], 2, timeout=500)
    return {
        case["fault"]: [
            {"output": case["output"], **json.loads(Path(f"{case['output']}.{r}.json").read_text())}
            for r in range(2)
        ]
        for case in cases
    }


@pytest.mark.slow
@pytest.mark.parametrize("fault", CASES)
def test_the_rank_at_fault_is_named(fault, ended) -> None:
    ranks = ended[fault]
    said = "\n".join(rank["said"] for rank in ranks)
    for text in CASES[fault][1]:
        assert text in said, said
    assert said.count("vlmtrain: ") == 1 and "Traceback" not in said, said
    codes = {"stopped": [1, -9], "silent": [1, 0]}.get(fault, [1, 1])
    assert [rank["code"] for rank in ranks] == codes, said


@pytest.mark.slow
@pytest.mark.parametrize("fault", STARTED)
def test_all_end_soon_and_the_checkpoint_stays(fault, ended) -> None:
    output = Path(ended[fault][0]["output"])
    steps = (output / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2
    assert max(r["end"] for r in ended[fault]) - os.stat(output / "metrics.jsonl").st_mtime < LIMIT
    found = checkpoints.find(output / "checkpoints", "latest")  # its checksums are right
    assert found is not None and found.name == "step-00000001"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stopped", "slow disk"])
def test_the_report_names_the_samples(fault, ended, conversations) -> None:
    ids = {str(sample["id"]) for sample in json.loads(conversations.read_text())}
    said = "\n".join(rank["said"] for rank in ended[fault])
    named = [line.split("; samples ")[1] for line in said.splitlines() if "; samples " in line]
    assert len(named) == (1 if fault == "stopped" else 2), said
    for line in named:
        assert set(line.split(" and ")[0].split(", ")) <= ids, line


def test_where_a_rank_is() -> None:
    place = Place()
    place.begin(7, [["a"], ["b", "c"]])
    assert where(place) == "step 7, data"
    place.enter("forward-recv")
    place.passes["forward"] = 1
    assert where(place) == "step 7, forward-recv (forward pass 1 of 2)"


def test_a_rank_whose_host_reads_from_its_gpu_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron's norm does: NCCL's collectives hold up no host before."""
    reading = "norm = total.item()  # where it stands"
    monkeypatch.setattr(watchdog, "_line", lambda stack, package="": f"clip.py:9 norm: {reading}")
    stack = [sys._getframe()]
    assert watchdog._waits(stack) == ""  # on a CPU it would not
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert watchdog._waits(stack).startswith("waits for its GPU at clip.py:9 norm")
