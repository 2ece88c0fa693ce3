"""Offloaded DistributedOptimizer against the plain one: the same bits on every layout."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_resharding import same
from tests.parity import reference as ref
from tests.ranks import ROOT, run_cli, run_ranks
from tests.train.conftest import conversations, losses, model, options  # noqa: F401  fixtures
from tests.train.test_faults import environment
from vlmtrain.core.config import ConfigError, OptimizerSection, offload_fractions
from vlmtrain.training.optimizer import offload_fraction

SEED = random.SystemRandom().randrange(10**6)
STEPS = [SEED, SEED + 1, SEED + 2]
MIXED = [0.4, 1.0, 0.7]
DP2: dict[str, Any] = {}
TP2 = dict(tensor=2)
PP2 = dict(pipeline=2)
SP2 = dict(tensor=2, sequence=True)
BOTH = dict(overlap_grad_reduce=True, overlap_param_gather=True)


def run(cases: list[dict[str, Any]], folder: Path, size: int = 2) -> list[dict[str, Any]]:
    path = folder / "cases.pt"
    torch.save(cases, path)
    ranks = run_ranks(["tests/optim/megatron_worker.py", str(path)], size)
    assert all(r.code == 0 for r in ranks), "\n\n".join(r.output[-3000:] for r in ranks)
    results = torch.load(path.with_suffix(".out"), weights_only=False)
    assert not any("error" in r for r in results), [r.get("error") for r in results]
    return results


@pytest.mark.slow
def test_bits_of_the_plain_optimizer(tmp_path):
    """Two processes; fractions change at every step, copies are late and in random order, gradients
    are clipped (from norms of 1 to 4 to 0.7). A checkpoint of one fraction goes on with another."""
    print(f"seed {SEED}")
    small = ref.save_model(ref.make_model("qwen2_vl", vision_heads=4, seed=SEED), tmp_path / "m")
    saved = tmp_path / "checkpoints" / "step-00000002"
    wide = dict(dtype=torch.bfloat16, gradients=torch.float32)
    cases: dict[str, dict[str, Any]] = {
        "dp2": dict(layout=DP2, steps=STEPS),
        "dp2 offloaded": dict(layout=DP2, steps=STEPS, fractions=MIXED, delayed=True),
        "tp2": dict(layout=TP2, steps=STEPS),
        "tp2 offloaded": dict(layout=TP2, steps=STEPS, offload=1.0, fractions=[1.0] * 3),
        "pp2": dict(layout=PP2, steps=STEPS),
        "pp2 offloaded": dict(layout=PP2, steps=STEPS, fractions=MIXED[::-1]),
        "bf16": dict(layout=DP2, steps=STEPS, dtype=torch.bfloat16),
        "bf16 offloaded": dict(layout=DP2, steps=STEPS, fractions=MIXED, delayed=True, **wide),
        "bf16 on the way": dict(
            layout=DP2, steps=STEPS, fractions=[1.0] * 3, delayed=True, dtype=torch.bfloat16
        ),
        "scaled": dict(layout=DP2, steps=STEPS, loss_scale=64.0),
        "scaled offloaded": dict(
            layout=DP2, steps=STEPS, loss_scale=64.0, fractions=MIXED, delayed=True
        ),
        "saved": dict(layout=DP2, steps=STEPS[:2], fractions=[1.0, 1.0], save=saved),
        "resumed": dict(layout=DP2, steps=STEPS[2:], fractions=[0.3], load=saved),
        "resumed on tp2": dict(layout=TP2, steps=[], fractions=[1.0], load=saved, delayed=True),
    }
    results = dict(
        zip(cases, run([dict(c, model=small) for c in cases.values()], tmp_path), strict=True)
    )
    for name in ("dp2", "tp2", "pp2", "bf16", "scaled"):
        same(results[f"{name} offloaded"]["state"], results[name]["state"], name)
        assert results[f"{name} offloaded"]["losses"] == results[name]["losses"]
        assert results[f"{name} offloaded"]["step"] == (2 if name == "scaled" else 3)
    same(results["resumed"]["state"], results["dp2"]["state"], "resumed")
    same(results["resumed on tp2"]["state"], results["saved"]["state"], "resumed on tp2")
    # Gradients rounded to bfloat16 on the way: other last bits, the same training.
    plain, rounded = results["bf16"], results["bf16 on the way"]
    assert rounded["losses"] == pytest.approx(plain["losses"], rel=2e-3)
    moments = [n for n in plain["state"] if n.startswith("exp_avg ")]
    assert any(not torch.equal(rounded["state"][n], plain["state"][n]) for n in moments)
    for name in moments:
        a, b = rounded["state"][name], plain["state"][name]
        # Rounding moves a gradient by 2^-9 of its size; weights one rounding apart move it again.
        assert (a - b).norm() <= 0.1 * b.norm() + 1e-12, name


@pytest.mark.slow
def test_gradients_are_copied_during_backward(tmp_path):
    """Where Megatron reduces buckets beside the backward pass, or has nothing to reduce: copies
    begin with the first bucket, but for the gradients that are not final yet, late copies in random
    order read what they should, and bits are the plain optimizer's."""
    print(f"seed {SEED}")
    untied, tied, other = (
        ref.save_model(
            ref.make_model("qwen2_5_vl", vision_heads=4, tied=i == 1, seed=SEED + i),
            tmp_path / f"m{i}",
        )
        for i in range(3)
    )
    small = dict(overlap=BOTH, bucket_size=50_000)
    wide = dict(dtype=torch.bfloat16, gradients=torch.float32)
    on = dict(delayed=True, fractions=[1.0, 1.0, 0.6])
    plain: dict[str, dict[str, Any]] = {
        "data": dict(layout=DP2, model=untied, **small),
        "bf16": dict(layout=DP2, model=tied, **small, **wide),
        "pipeline": dict(layout=PP2, model=tied),
        "sequence": dict(layout=SP2, model=untied),
        "touched": dict(layout=DP2, model=untied, touched=True, freeze=dict(vision=True), **small),
        "unseen": dict(layout=DP2, model=untied, touched="unseen", **small),
        "weights": dict(layout=DP2, model=untied, dtype=torch.bfloat16, **small),
    }
    late = {
        "data": 0,
        "bf16": 0,
        "pipeline": 1,
        "sequence": 26,
    }  # the tied table; norms and added biases
    cases = []
    for name, case in plain.items():
        case["steps"] = STEPS
        alone = dict(overlap=dict(overlap_grad_reduce=True)) if "overlap" not in case else {}
        cases += [case, dict(case, **on, **alone)]
        if name in late:
            cases[-1]["early"] = late[name]
        if name == "weights":  # loaded into a model that was made from others
            cases[-1].update(model=other, weights=untied, gradients=torch.float32)
    results = run(cases, tmp_path)
    for name, expected, actual in zip(plain, results[::2], results[1::2], strict=True):
        same(actual["state"], expected["state"], name)
        assert actual["losses"] == expected["losses"], name


@pytest.mark.slow
def test_loading_and_moving_keep_the_steps(tmp_path):
    """Megatron's own load_state_dict after `offload`; an inner optimizer that counts by group."""
    (rank,) = run_ranks(["tests/optim/megatron_state.py", str(tmp_path)], 1)
    assert rank.output.endswith("as expected\n"), rank.output[-3000:]


CASES = ["skipped", "cleared", "moved", "loaded", "shared", "released", "zeros"]


@pytest.mark.parametrize("case", CASES)
def test_passes_without_a_step_and_moves_before_one(case):
    done = subprocess.run(
        [sys.executable, "-m", "tests.optim.megatron_passes", case],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", ["embed_tokens", "output_layer"])
def test_a_tied_table_of_a_pipeline_is_sent_late(name):
    """Whatever it is called, and whether or not it has Megatron's mark."""
    done = run_ranks(["tests/optim/megatron_tied.py", name], 2)
    for rank in done:
        assert rank.output.endswith("as expected\n"), rank.output[-3000:]


def test_what_cannot_be_offloaded_is_named():
    from vlmkernels.integrations.megatron import offload

    with pytest.raises(ValueError, match="fraction is 1.5; it must be from 0 to 1"):
        offload(None, 1.5)
    with pytest.raises(ValueError, match="gradients is torch.float16; it must be"):
        offload(None, 0.5, gradients=torch.float16)
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="has a AdamW; offload needs a DistributedOptimizer"):
        offload(adam, 0.5)


@pytest.mark.slow
def test_vlmtrain_trains_the_same_with_and_without(model, conversations, tmp_path):  # noqa: F811
    """Offloaded from the start, less from the third step on; killed while state moves then, and
    resumed from the checkpoint before: the losses of a run without any of that."""
    two = ["--nproc=2", "--parallel.pipeline=2", "--train.steps=4", "--checkpoint.every=1"]
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    done = run_cli(options(model, conversations, plain, *two))
    assert done.code == 0, done.output
    changing = [*two, "--optimizer.offload_fraction=1.0", "--optimizer.offload_schedule", "3:0.3"]
    arguments = options(model, conversations, broken, *changing)
    killed = run_cli(arguments, env=environment("moving", 1))
    assert "rank 1 was ended by SIGKILL" in killed.output, killed.output
    assert len(losses(broken)) == 2
    done = run_cli([*arguments, "--checkpoint.resume=latest"])
    assert done.code == 0, done.output
    assert "step 3: 30% of the optimizer is offloaded" in done.output
    assert losses(plain) == losses(broken)
    assert len(losses(plain)) == 4 and losses(plain)[-1] < losses(plain)[0]


def test_schedule_of_fractions():
    section = OptimizerSection(offload_fraction=1.0, offload_schedule=("3:0.5", "10:0"))
    shares = [offload_fraction(section, step) for step in range(11)]
    assert shares == [1.0] * 2 + [0.5] * 7 + [0.0] * 2
    assert offload_fraction(OptimizerSection(offload_schedule=("1:0.2",)), 0) == 0.2
    for bad in ("3", "3:", "0:1", "x:0.5", "3:1.5", "3:-0.1", "3:nan", ":0.5"):
        with pytest.raises(ConfigError, match=re.escape(f"has {bad!r}; an entry is STEP:FRACTION")):
            offload_fractions(OptimizerSection(offload_schedule=(bad,)))
    with pytest.raises(ConfigError, match="has '5:0.1'; an entry is"):
        offload_fractions(OptimizerSection(offload_schedule=("5:0.5", "5:0.1")))
