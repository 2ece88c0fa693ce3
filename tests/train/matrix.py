"""Each fault on each layout and rank, LoRA resumed and rehearsals on more layouts: the part of
`make test-layouts` that runs `vlmtrain train`; see test_faults.py, test_layouts.py and
test_rehearsal.py."""

from __future__ import annotations

import pytest

from tests.train import mixed, test_rehearsal
from tests.train.test_faults import FEW, LAYOUTS, fail_without_a_launcher
from tests.train.test_layouts import resume_lora

CASES = [
    (fault, layout, faulty)
    for fault in ("forward", "killed", "sample")
    for layout in LAYOUTS
    for faulty in (0, 1)
    if (fault, layout, faulty) not in FEW
    # of a pipeline the first stage decodes, of replicas those with images
    and (fault != "sample" or layout in ("tensor", "multiplexed"))
]


@pytest.mark.parametrize(("fault", "layout", "faulty"), CASES)
def test_fault(fault, layout, faulty, model, conversations, tmp_path):
    fail_without_a_launcher(fault, layout, faulty, model, conversations, tmp_path / "run")


@pytest.mark.parametrize("number", range(20))
def test_rehearsals(number, seed, model, tmp_path):
    """Twenty data sets, each on every layout; the first also without a rehearsal."""
    ways = ("yes",) if number else ("yes", "no")
    layouts = test_rehearsal.LAYOUTS
    test_rehearsal.run(model, mixed.write(tmp_path, seed), tmp_path, layouts, ways)
    for layout in layouts:
        if not number:
            test_rehearsal.check_bits(tmp_path, layout)
        test_rehearsal.check_peaks(tmp_path, layout, ways)


@pytest.mark.parametrize(
    "layout",
    [
        ["--parallel.tensor=2"],
        ["--parallel.tensor=2", "--parallel.sequence"],
        ["--parallel.tensor=2", "--parallel.sequence", "--parallel.vision=multiplexed"],
        ["--parallel.pipeline=2"],
        ["--parallel.pipeline=2", "--recompute.language=full", "--recompute.vision=full"],
        ["--parallel.pipeline=2", "--parallel.vision=multiplexed"],
        ["--parallel.overlap_grad_reduce", "--parallel.overlap_param_gather"],
    ],
    ids=[
        "tensor",
        "sequence",
        "sequence multiplexed",
        "pipeline",
        "pipeline recompute",
        "multiplexed",
        "data overlap",
    ],
)
def test_resumed_lora(layout, model, conversations, tmp_path):
    resume_lora(layout, model, conversations, tmp_path)
