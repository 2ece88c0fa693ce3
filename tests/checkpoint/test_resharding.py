"""Training checkpoints: what one layout wrote, every other reads, bit for bit."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parity import reference as ref
from tests.ranks import run_cases
from vlmtrain.checkpoint.convert import layout_for, to_hf, to_megatron
from vlmtrain.checkpoint.mapping import canonical_name
from vlmtrain.checkpoint.megatron.torch_dist import ChunkReader
from vlmtrain.checkpoint.tensors import flat_boxes
from vlmtrain.core.config import ParallelSection
from vlmtrain.core.files import verify_manifest
from vlmtrain.models.family import read_spec

pytestmark = pytest.mark.slow
SEED = random.SystemRandom().randrange(10**6)
# Each of four ranks' layouts reads what the one before it wrote, and writes it again.
CHAIN: list[tuple[str, dict[str, Any]]] = [
    ("tp2 pp2 sp", dict(tensor=2, pipeline=2, sequence=True, text_layers=(1, 3))),
    (
        "pp2 vpp2 dp2",
        dict(
            pipeline=2,
            virtual_pipeline=2,
            vision_layers=(2, 2, 0, 0),
            text_layers=(0, 1, 2, 1),
        ),
    ),
    ("pp4 spread vision", dict(pipeline=4, vision_layers=(3, 1, 0, 0), text_layers=(0, 1, 2, 1))),
    ("dp4", {}),
    ("tp2 sp dp2", dict(tensor=2, sequence=True)),
    ("multiplexed tp2 pp2", dict(tensor=2, pipeline=2, multiplexed=True)),
]
# The same of a mixture of experts.
EXPERT_CHAIN: list[tuple[str, dict[str, Any]]] = [
    ("tp2 sp ep4", dict(tensor=2, sequence=True, expert=4)),
    ("pp2 ep2", dict(pipeline=2, expert=2)),
    ("dp4 ep2", dict(expert=2)),
    ("tp2 pp2", dict(tensor=2, pipeline=2)),
]
KINDS = ("tied", "untied")
# What is frozen, on two pipeline stages: rank 0 has nothing to train, then rank 1 has not.
FROZEN: dict[str, tuple[dict[str, bool], dict[str, Any]]] = {
    "first stage": (
        dict(vision=True, merger=True),
        dict(pipeline=2, vision_layers=(3, 1), text_layers=(0, 4)),
    ),
    "last stage": (dict(language=True), dict(pipeline=2)),
}
BF16 = torch.bfloat16
WORKER = "tests.checkpoint.worker"


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], where: str) -> None:
    assert ours.keys() == theirs.keys(), where
    for name, want in theirs.items():
        got = ours[name]
        if not torch.equal(got, want) and not (got.isnan().all() and want.isnan().all()):
            at = (got != want).nonzero()[0].tolist()
            raise AssertionError(f"{where}: {name} differs first at {at} (seed {SEED})")


def nothing_of(state: dict[str, torch.Tensor]) -> list[str]:
    """What the worker found nothing of: of frozen parameters what an optimizer holds."""
    return [name for name, tensor in state.items() if tensor.isnan().all()]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """All cases by name, in two starts of processes: four ranks, then two."""
    print(f"seed {SEED}")
    folder = tmp_path_factory.mktemp("resharding")
    models = {
        kind: ref.save_model(
            ref.make_model(family, vision_heads=4, tied=kind == "tied", seed=SEED), folder / kind
        )
        for kind, family in (("tied", "qwen3_vl"), ("untied", "qwen2_5_vl"))
    }
    untied, steps, actual = models["untied"], [SEED, SEED + 1], {}

    # Small buckets: slices begin and end in many parameters.
    buckets = dict(bucket_size=5000, overlap=dict(overlap_grad_reduce=True))
    four: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        before = None
        for number, (name, layout) in enumerate(CHAIN, 1):
            path = folder / f"{kind}-chain" / f"step-{number:08d}"
            four[f"{kind} {name}"] = dict(model=models[kind], layout=layout, save=path)
            four[f"{kind} {name}"].update(load=before) if before else None
            if name == "dp4":
                four[f"{kind} dp4"].update(buckets)
            before = path
        four[f"{kind} {CHAIN[0][0]}"]["steps"] = steps
        models[f"{kind} chain"] = before
    actual.update(zip(four, run_cases(WORKER, list(four.values()), 4, folder), strict=True))

    # Offline: weights for two ranks, and the last checkpoint of a chain written anew.
    layout = layout_for(read_spec(untied), ParallelSection(tensor=2))
    to_megatron(untied, folder / "megatron", layout)
    to_megatron(models["untied chain"], folder / "offline" / "step-00000009", layout)
    to_hf(models["untied chain"], folder / "exported")
    two: dict[str, dict[str, Any]] = {
        "untied fewer ranks": dict(model=untied, layout=dict(tensor=2), load=before),
        "resharded offline": dict(
            model=untied, layout=dict(pipeline=2), load=folder / "offline" / "step-00000009"
        ),
        "started from Megatron": dict(model=folder / "megatron", layout=dict(pipeline=2)),
        "started from a checkpoint": dict(model=models["untied chain"], layout=dict(tensor=2)),
        "weights are no run": dict(model=untied, layout={}, load=folder / "megatron"),
    }
    for name, (freeze, layout) in FROZEN.items():
        path = folder / name / "step-00000002"
        same_freeze = dict(model=untied, freeze=freeze)
        two[f"{name} saved"] = dict(**same_freeze, layout=layout, steps=steps, save=path)
        two[f"{name} loaded"] = dict(**same_freeze, layout=dict(tensor=2), load=path)
        two[f"{name} thawed"] = dict(model=untied, layout={}, load=path)
    freeze, _ = FROZEN["last stage"]
    resaved = folder / "resaved" / "step-00000002"
    half_frozen = dict(model=untied, freeze=freeze)
    two["frozen on dp2"] = dict(**half_frozen, layout={}, load=path, save=resaved)
    two["frozen from dp2"] = dict(**half_frozen, layout=dict(pipeline=2), load=resaved)
    more = dict(language=True, vision=True)
    two["more frozen"] = dict(
        model=untied, layout={}, freeze=more, load=folder / "last stage" / "step-00000002"
    )
    path = folder / "meanwhile" / "step-00000002"
    half = dict(model=models["tied"], layout={}, dtype=BF16)
    two["plain"] = dict(**half, steps=steps)
    two["saved"] = dict(**half, steps=steps, save=path, meanwhile=[SEED + 2, SEED + 3])
    two["loaded"] = dict(**half, load=path)
    two["wider"] = dict(model=models["tied"], layout={}, load=path)
    tower = dict(vision=True, merger=True)
    two["wider, frozen"] = dict(
        model=models["tied"], layout=dict(tensor=2), freeze=tower, load=path
    )
    full = folder / "full" / "step-00000007"
    shutil.copytree(models["tied chain"], full.with_name("step-00000002"))
    half["layout"] = dict(pipeline=2)  # where rank 1 has something to write
    two["disk full"] = dict(**half, load=path, save=full, disk_full=1)
    actual.update(zip(two, run_cases(WORKER, list(two.values()), 2, folder), strict=True))
    actual["folders"] = dict(folder=folder, **models)
    return actual


def test_every_layout_reads_the_experts_of_every_other_bitwise(tmp_path):
    """Through checkpoints, and offline to Hugging Face and Megatron folders."""
    print(f"seed {SEED}")
    model = ref.make_model("qwen3_vl_moe", vision_heads=4, seed=SEED)
    model = ref.save_model(model, tmp_path / "hf")
    cases: list[dict[str, Any]] = []
    for number, (_, layout) in enumerate(EXPERT_CHAIN, 1):
        path = tmp_path / "chain" / f"step-{number:08d}"
        cases.append(dict(model=model, layout=layout, save=path))
        cases[-1].update(load=cases[-2]["save"] if number > 1 else None)
    cases[0]["steps"] = [SEED, SEED + 1]
    cases[2].update(bucket_size=5000, overlap=dict(overlap_grad_reduce=True))
    first, *others = run_cases(WORKER, cases, 4, tmp_path)
    for (name, _), other in zip(EXPERT_CHAIN[1:], others, strict=True):
        assert "error" not in other, other["error"]
        same(other["state"], first["state"], name)
    assert not nothing_of(first["state"])
    to_hf(path, tmp_path / "exported")
    to_megatron(path, tmp_path / "anew", layout_for(read_spec(path), ParallelSection(tensor=2)))
    to_hf(tmp_path / "anew", tmp_path / "again")
    for folder in ("exported", "again"):
        exported = load_file(tmp_path / folder / "model.safetensors")
        model = {n: t for n, t in first["state"].items() if n.startswith("model ")}
        same({f"model {name}": t for name, t in exported.items()}, model, folder)


@pytest.mark.parametrize("name", [name for name, _ in CHAIN[1:]] + ["fewer ranks"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_reads_every_other_bitwise(kind, name, results):
    """Weights, master weights, both moments and the step."""
    if name == "fewer ranks" and kind == "tied":
        return
    first, result = results[f"{kind} {CHAIN[0][0]}"], results[f"{kind} {name}"]
    assert "error" not in result, result["error"]
    same(result["state"], first["state"], f"{kind} {name}")
    assert not nothing_of(first["state"])
    assert result["step"] == 2 and result["extra"]["note"] == "kept"


def share_bytes(path: Path) -> list[int]:
    """What each rank wrote of a checkpoint's tensors, without the files' own overhead."""
    shares: dict[str, int] = {}
    for chunks in ChunkReader(path)._chunks.values():
        for chunk in chunks:
            size = math.prod(chunk.sizes) * chunk.dtype.itemsize
            shares[chunk.file] = shares.get(chunk.file, 0) + size
            assert 0 < size < chunk.length < size + 2500, chunk
    return [shares[name] for name in sorted(shares)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_data_parallel_rank_writes_and_reads_its_own_share(kind, results):
    """A quarter of weights and optimizer state each; nothing is gathered, a rank never makes more
    than its share, nor more at once than one tensor."""
    path = results["folders"]["folder"] / f"{kind}-chain" / "step-00000004"
    sizes = share_bytes(path)
    assert len(sizes) == 4 and max(sizes) < 1.05 * min(sizes), sizes
    result = results[f"{kind} dp4"]
    largest = max(t.numel() * 4 for t in result["state"].values())
    random_state = 200_000  # of all ranks, which all gather
    for size, saving, loading in zip(
        sizes, result["save bytes"], result["load bytes"], strict=True
    ):
        assert saving[0] < size + random_state and loading[0] < size, (size, saving, loading)
        assert saving[1] <= largest and loading[1] <= largest, (saving, loading, largest)


def test_a_range_of_elements_is_a_few_boxes():
    chance = random.Random(SEED)
    for _ in range(300):
        shape = tuple(chance.randint(1, 5) for _ in range(chance.randint(1, 4)))
        whole = torch.arange(math.prod(shape)).view(shape)
        start, stop = sorted(chance.randint(0, whole.numel()) for _ in range(2))
        boxes = flat_boxes(shape, start, stop)
        flat = [whole[tuple(slice(*bounds) for bounds in box)].reshape(-1) for box in boxes]
        assert len(boxes) < 2 * len(shape) and all(part.numel() for part in flat)
        assert torch.equal(torch.cat([torch.tensor([]), *flat]), torch.arange(start, stop)), shape


def test_resharded_offline(results):
    """The converter's checkpoint, with the optimizer's state."""
    same(results["resharded offline"]["state"], results["untied tp2 pp2 sp"]["state"], "offline")
    assert results["resharded offline"]["step"] == 2


def test_exported_offline(results):
    table = {}
    for file in (results["folders"]["folder"] / "exported").glob("*.safetensors"):
        table.update(load_file(file))
    state = results["untied tp2 pp2 sp"]["state"]
    assert {f"model {n}" for n in table} == {n for n in state if n.startswith("model ")}
    for name, tensor in table.items():
        assert torch.equal(tensor, state[f"model {name}"]), name


def test_training_starts_from_a_megatron_folder(results):
    stored = load_file(results["folders"]["untied"] / "model.safetensors")
    state = results["started from Megatron"]["state"]
    for name, tensor in stored.items():
        assert torch.equal(state[f"model {canonical_name(name)}"], tensor), name
        assert not state[f"exp_avg {canonical_name(name)}"].any()
    begun = results["started from a checkpoint"]
    trained = results["untied tp2 pp2 sp"]["state"]
    for name, tensor in begun["state"].items():
        if name.startswith("model "):
            assert torch.equal(tensor, trained[name]), name
    assert begun["step"] == 0
    message = results["weights are no run"]["error"]
    assert "weights only" in message and "--model" in message


def test_frozen_parts_of_data_parallel_ranks(results):
    """What learns all of them write, what does not the first of them."""
    same(results["frozen from dp2"]["state"], results["last stage saved"]["state"], "dp2")
    path = results["folders"]["folder"] / "resaved" / "step-00000002"
    first, second = share_bytes(path)
    state = results["frozen from dp2"]["state"].items()
    frozen = sum(t.numel() * 4 for n, t in state if n.startswith("param ") and t.isnan().all())
    assert 0.95 < (first - second) / frozen < 1.1, (first, second, frozen)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parts(name, results):
    saved, loaded = results[f"{name} saved"], results[f"{name} loaded"]
    same(loaded["state"], saved["state"], name)
    assert saved["step"] == loaded["step"] == 2
    frozen = [n for n, t in saved["state"].items() if t.isnan().all()]
    assert 100 < len(frozen) < len(saved["state"]) - 100
    message = results[f"{name} thawed"]["error"]
    assert "frozen" in message and "--model" in message, message
    assert ("vision" if name == "first stage" else "language_model") in message, message


def test_what_is_frozen_later_keeps_its_weights(results):
    saved, later = results["last stage saved"]["state"], results["more frozen"]["state"]
    for name, tensor in later.items():
        if name.startswith("model ") or not tensor.isnan().all():
            assert torch.equal(tensor, saved[name]), name


def test_a_save_does_not_see_the_training_that_goes_on(results):
    """Two steps were taken while it was written."""
    plain, saved = results["plain"]["state"], results["saved"]["state"]
    same(results["loaded"]["state"], plain, "loaded")
    assert sum(not torch.equal(saved[n], t) for n, t in plain.items()) > 100


def test_another_precision_takes_the_master_weights(results):
    wider = results["wider"]["state"]
    for name, tensor in results["plain"]["state"].items():
        if name.startswith("param "):
            assert torch.equal(wider[name], tensor), name
            assert torch.equal(wider[name.replace("param ", "model ")], tensor), name
            frozen = results["wider, frozen"]["state"][name.replace("param ", "model ")]
            assert torch.equal(frozen, tensor), name


def test_full_disk_on_one_rank_is_every_ranks_error(results):
    """The checkpoint before stays, whole, and nothing else does."""
    assert "No space left on device" in results["disk full"]["error"]
    folder = results["folders"]["folder"] / "full"
    assert [p.name for p in folder.iterdir()] == ["step-00000002"]
    verify_manifest(folder / "step-00000002")


def test_adapters_that_a_run_has_no_place_for_are_named(tmp_path):
    model = ref.save_model(ref.make_model("qwen2_5_vl", seed=SEED), tmp_path / "hf")
    path = tmp_path / "run" / "step-00000001"
    two, one = ({"rank": 2, "targets": targets} for targets in (("q_proj", "o_proj"), ("q_proj",)))
    cases = [
        dict(model=model, layout={}, lora=two, save=path),
        dict(model=model, layout={}, lora=two, load=path),
        dict(model=model, layout={}, lora=one, load=path),
    ]
    *same, fewer = run_cases(WORKER, cases, 1, tmp_path)
    assert not any("error" in result for result in same), same
    said = fewer.get("error", "nothing")
    assert f"{path} holds language_model." in said and "linear_proj.adapters" in said, said
    assert "for which this run has no place" in said
