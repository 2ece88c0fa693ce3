"""Every kind of layout against transformers in one process, in float32, from one checkpoint:
the loss to 1e-6, each gradient to 1e-5, and the losses of three optimizer steps and after them to
1e-5, all relative.

`make test-layouts` runs all of `CASES`: every layout, with overlapped gradient reduction too where
there are data-parallel ranks, for all families and three streams of data. `test_layouts.py` runs
a cut of them in `make test`. Layouts of one number of processes share a start-up.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.parity import reference as ref
from tests.ranks import run_cases
from vlmtrain.checkpoint.mapping import canonical_name
from vlmtrain.models import family as families

FAMILIES = tuple(families.FAMILIES)
STREAMS = ("image", "mixed", "text")
STEPS = 3
SEED = int(os.environ["VLMKERNELS_TEST_SEED"]) % 10**6  # set by tests/conftest.py

BOTH = dict(overlap_grad_reduce=True, overlap_param_gather=True)
# The toy towers have layers of 36 to 47 thousand weights: several buckets, each of a layer or more.
SMALL_BUCKETS = 50_000
_VPP = dict(virtual_pipeline=2)

# number of processes -> name -> layout
PIPELINED: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp2": dict(tensor=2),
        "tp2 sp": dict(tensor=2, sequence=True),
        "pp2": dict(pipeline=2),
        "pp2 uneven": dict(pipeline=2, text_layers=(1, 3)),
        "pp2 vpp2": dict(pipeline=2, **_VPP),
        "pp2 vpp2 spread": dict(
            pipeline=2, vision_layers=(2, 2, 0, 0), text_layers=(0, 1, 2, 1), **_VPP
        ),
        "pp2 spread": dict(pipeline=2, vision_layers=(3, 1), text_layers=(0, 4)),
        "dp2": dict(),
        "ep2": dict(expert=2),
        "tp2 sp ep2": dict(tensor=2, sequence=True, expert=2),
    },
    4: {
        "pp4": dict(pipeline=4),
        "pp4 auto": dict(pipeline=4, vision_layers="auto", text_layers="auto"),
        "pp4 spread": dict(pipeline=4, vision_layers=(2, 2, 0, 0), text_layers=(0, 1, 2, 1)),
        "tp2 pp2 sp": dict(tensor=2, pipeline=2, sequence=True),
        "tp2 pp2 vpp2 sp": dict(tensor=2, pipeline=2, sequence=True, **_VPP),
        "tp2 pp2 sp spread": dict(
            tensor=2, pipeline=2, sequence=True, vision_layers=(3, 1), text_layers=(0, 4)
        ),
        "tp2 pp2 vpp2 sp spread": dict(
            tensor=2,
            pipeline=2,
            sequence=True,
            vision_layers=(1, 3, 0, 0),
            text_layers=(0, 1, 1, 2),
            **_VPP,
        ),
        "pp4 empty stages": dict(pipeline=4, vision_layers=(4, 0, 0, 0), text_layers=(2, 0, 2, 0)),
        "dp2 pp2": dict(pipeline=2),
        "dp2 pp2 vpp2": dict(pipeline=2, **_VPP),
        "dp2 tp2": dict(tensor=2),
        "dp2 ep2": dict(expert=2),
        "pp2 ep2": dict(pipeline=2, expert=2),
        "pp2 vpp2 ep2": dict(pipeline=2, expert=2, **_VPP),
        "dp2 tp2 sp ep4": dict(tensor=2, sequence=True, expert=4),
    },
}


class Case(NamedTuple):
    """One engine: a layout, a model and a stream of data."""

    family: str
    tied: bool
    stream: str
    name: str
    layout: dict[str, Any]
    more: dict[str, Any]  # recompute, overlap, rates

    def __str__(self) -> str:
        return f"{self.family}{' tied' * self.tied} {self.stream} {self.name} (seed {SEED})"


def layouts(size: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """All layouts of `size` processes: as they are, multiplexed, and with overlap for data-parallel
    ranks (where vision is multiplexed, all ranks are such to the tower)."""
    table: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for name, layout in PIPELINED[size].items():
        kinds = [(name, layout)]
        if "vision_layers" not in layout and "uneven" not in name:
            kinds.append((f"{name} multiplexed", dict(layout, multiplexed=True)))
        for kind, made in kinds:
            table[kind] = (made, {})
            if "dp2" in kind or "ep2" in kind or "multiplexed" in kind:
                more = dict(overlap=BOTH, bucket_size=SMALL_BUCKETS)
                table[f"{kind} overlap"] = (made, more)
    return table


def full(size: int) -> list[Case]:
    """The whole matrix; models with tied word embeddings take turns with untied ones.

    Overlap is tried where some microbatches have no images.
    """
    return [
        Case(family, (i + j + k) % 2 == 0, stream, name, *made)
        for i, family in enumerate(FAMILIES)
        for j, stream in enumerate(STREAMS)
        for k, (name, made) in enumerate(layouts(size).items())
        if stream != "image" or "overlap" not in name
        if "ep" not in name or family == "qwen3_vl_moe"
    ]


class References:
    """What transformers says of a model and a stream, computed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def model(self, family: str, tied: bool) -> Path:
        path = self.folder / f"{family}-{'tied' if tied else 'untied'}"
        if not path.exists():
            ref.save_model(ref.make_model(family, vision_heads=4, tied=tied, seed=SEED), path)
        return path

    def get(self, case: Case) -> tuple[float, float, dict, list[float], float]:
        """Loss of the first step, what load balancing adds to it, its gradients, losses of STEPS
        steps, the held-out loss after them."""
        family, tied, stream, rates = case.family, case.tied, case.stream, case.more.get("rates")
        key = (family, tied, stream, repr(rates))
        if key not in self._known:
            model = ref.make_model(family, vision_heads=4, tied=tied, seed=SEED)
            steps = [ref.make_stream(stream, SEED, i) for i in range(STEPS + 1)]
            loss = ref.reference_loss(model, steps[0]).item()
            balance = 0.0
            if family.endswith("balanced"):
                balance = loss - ref.reference_loss(model, steps[0], heldout=True).item()
            gradients = canonical(ref.reference_gradients(model, steps[0]))
            losses = ref.reference_training(model, steps[:-1], rates)
            with torch.no_grad():
                after = ref.reference_loss(model, steps[-1], heldout=True).item()
            self._known[key] = (loss, balance, gradients, losses, after)
        return self._known[key]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()


def canonical(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {canonical_name(name): tensor for name, tensor in named.items()}


def run(
    cases: list[dict[str, Any]], size: int, folder: Path, timeout: float = 600
) -> list[dict[str, Any]]:
    """The results of worker.py for `cases`, all in one start of `size` processes."""
    return run_cases("tests.parity.worker", cases, size, folder, timeout)


def check_gradients(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    bound: float,
    where: object = "",
) -> float:
    """The largest relative error, which must be within `bound`."""
    assert ours.keys() == theirs.keys(), where
    largest = 0.0
    for name, want in theirs.items():
        error = relative(ours[name], want)
        assert error <= bound, f"gradient of {name} is off by {error:.2e}; {where}"
        largest = max(largest, error)
    return largest


def check(
    cases: list[Case], size: int, references: References, folder: Path, timeout: float = 600
) -> None:
    """Run the cases and hold them to the bounds of this file's head."""
    start = time.perf_counter()
    todo = [
        dict(
            model=references.model(case.family, case.tied),
            seed=SEED,
            layout=case.layout,
            stream=case.stream,
            steps=STEPS,
            after=True,
            **case.more,
        )
        for case in cases
    ]
    results = run(todo, size, folder, timeout)
    worst = [0.0, 0.0, 0.0]
    for case, result in zip(cases, results, strict=True):
        loss, balance, gradients, losses, after = references.get(case)
        asked = result.get("host_questions")  # of tensors that may be on a device
        assert not asked, f"{asked}; {case}"
        if "chunks" in result:
            assert 0 < result["chunks"] <= 1, f"logits of {result['chunks']} chunks; {case}"
        # behind the last layer's attention are the tokens with a loss, and no others
        seen, due = result.get("rows", ((), ()))
        assert list(seen) == list(due), case
        # images are encoded in the fewest pieces within the bound, but for a larger image
        for pieces in result.get("pieces", ()):
            most = case.more["vision_piece"]
            assert all(len(piece) == 1 or sum(piece) <= most for piece in pieces), (
                f"{pieces} {case}"
            )
            joined = (sum(one) + other[0] for one, other in itertools.pairwise(pieces))
            assert all(size > most for size in joined), f"{pieces} {case}"
        # a pack without images costs nothing in the tower
        assert result.get("tower_runs") == result.get("tower_runs_due"), case
        assert result["loss"] == pytest.approx(loss, rel=1e-6), case
        assert result["balance"] == pytest.approx(balance, rel=1e-5), case
        worst[1] = max(worst[1], check_gradients(result["gradients"], gradients, 1e-5, case))
        trained = [*result["losses"], result["after"]]
        assert trained == pytest.approx([*losses, after], rel=1e-5), case
        worst[0] = max(worst[0], abs(result["loss"] / loss - 1))
        errors = [abs(a / b - 1) for a, b in zip(trained, [*losses, after], strict=True)]
        worst[2] = max(worst[2], *errors)
    print(
        f"{len(cases)} cases on {size} processes in {time.perf_counter() - start:.0f} s; largest "
        "relative errors: loss {:.1e}, gradient {:.1e}, training {:.1e}".format(*worst)
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    print(f"seed {SEED}")
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("size", sorted(PIPELINED))
def test_matrix(size: int, part: int, references: References, tmp_path: Path) -> None:
    """In three parts, so that a hang costs one of them."""
    cases = list(itertools.islice(full(size), part, None, 3))
    check(cases, size, references, tmp_path, timeout=900)
