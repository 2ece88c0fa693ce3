"""float32 parity with transformers: logits, loss, every gradient, ten steps; then every layout.

Bounds are those of the project's contract: logits 1e-5, each gradient 1e-4, loss after ten
steps 1e-4, all relative. Measured errors are 2 to 50 times smaller.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import reference as ref
from tests.ranks import run_ranks
from vlmtrain.checkpoint.mapping import canonical_name

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
# world size -> name -> layout
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "pp2": dict(pipeline=2),
        "pp2 uneven": dict(pipeline=2, text_layers=(1, 3)),
        "pp2 spread vision": dict(pipeline=2, vision_layers=(3, 1), text_layers=(0, 4)),
        "pp2 vpp2": dict(
            pipeline=2,
            virtual_pipeline=2,
            vision_layers=(2, 2, 0, 0),
            text_layers=(0, 1, 2, 1),
        ),
        "tp2": dict(tensor=2),
        "tp2 sp": dict(tensor=2, sequence=True),
        "dp2": dict(),
        "tp2 sp recompute": dict(
            tensor=2, sequence=True, recompute=dict(vision="full", language="selective")
        ),
        "pp2 recompute": dict(pipeline=2, recompute=dict(vision="selective", language="full")),
        "pp2 multiplexed": dict(pipeline=2, multiplexed=True),
        "tp2 sp multiplexed": dict(tensor=2, sequence=True, multiplexed=True),
    },
    4: {
        "tp2 pp2 sp": dict(tensor=2, pipeline=2, sequence=True, text_layers=(1, 3)),
        "pp2 dp2 multiplexed": dict(pipeline=2, multiplexed=True),
    },
}
STEPS = 3
SEED = random.SystemRandom().randrange(10**6)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()


def canonical(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {canonical_name(name): tensor for name, tensor in named.items()}


def run(cases: list[dict[str, Any]], size: int, folder: Path) -> list[dict[str, Any]]:
    path = folder / f"cases{size}.pt"
    torch.save(cases, path)
    ranks = run_ranks(["tests/parity/worker.py", str(path)], size, timeout=600)
    assert all(r.code == 0 for r in ranks), "\n\n".join(r.output[-3000:] for r in ranks)
    return torch.load(path.with_suffix(".out"), weights_only=False)


def check_gradients(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    bound: float = 1e-4,
    where: str = "",
) -> None:
    assert ours.keys() == theirs.keys(), where
    for name, want in theirs.items():
        error = relative(ours[name], want)
        assert error <= bound, f"gradient of {name} is off by {error:.2e}; {where} (seed {SEED})"


def from_disk(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    import transformers

    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **options
    )


class TestOneProcess:
    """Odd sizes: 3 vision heads, 6 query heads over 2 key/value heads, vocabulary 211."""

    @pytest.fixture(scope="class", params=FAMILIES)
    def case(self, request, tmp_path_factory):
        print(f"seed {SEED}")
        folder = tmp_path_factory.mktemp(request.param)
        model = ref.make_model(request.param, seed=SEED)
        ref.save_model(model, folder / "hf")
        cases = [
            dict(
                model=folder / "hf",
                seed=SEED,
                layout={},
                steps=10,
                unpacked=True,
                save=folder / "out",
            ),
            dict(model=folder / "hf", seed=SEED, layout={}, dtype=torch.bfloat16),
        ]
        float32, bfloat16 = run(cases, 1, folder)
        packs = ref.make_samples(SEED)
        with torch.no_grad():
            logits = [torch.cat([ref.reference_logits(model, s) for s in p]) for p in packs]
        return dict(
            folder=folder, model=model, packs=packs, logits=logits, ours=float32, bf16=bfloat16
        )

    def test_logits(self, case):
        for ours, theirs in zip(case["ours"]["logits"], case["logits"], strict=True):
            assert relative(ours[: len(theirs), : ref.VOCAB], theirs) <= 1e-5, f"seed {SEED}"

    def test_gradients(self, case):
        theirs = ref.reference_gradients(case["model"], case["packs"])
        check_gradients(case["ours"]["gradients"], canonical(theirs))

    def test_packed_equals_unpacked(self, case):
        ours = case["ours"]
        assert ours["unpacked_loss"] == pytest.approx(ours["loss"], rel=1e-6)
        check_gradients(ours["unpacked_gradients"], ours["gradients"])

    def test_bf16_error_is_at_most_twice_that_of_transformers(self, case):
        import copy

        model = copy.deepcopy(case["model"]).bfloat16()
        ours, theirs = 0.0, 0.0
        with torch.no_grad():
            for pack, mine, exact in zip(
                case["packs"], case["bf16"]["logits"], case["logits"], strict=True
            ):
                half = torch.cat([ref.reference_logits(model, s) for s in pack]).float()
                theirs += (half - exact).square().sum().item()
                ours += (mine[: len(exact), : ref.VOCAB] - exact).square().sum().item()
        print(f"bf16 logits: ours {ours**0.5:.4f}, transformers {theirs**0.5:.4f}")
        assert theirs > 0 and ours**0.5 <= 2 * theirs**0.5

    def test_ten_steps_and_the_folder_they_leave(self, case):
        """Last: it trains the reference model."""
        steps = [ref.make_samples(SEED + i) for i in range(10)]
        theirs = ref.reference_training(case["model"], steps)
        for step, (mine, want) in enumerate(zip(case["ours"]["losses"], theirs, strict=True)):
            assert mine == pytest.approx(want, rel=1e-4), f"step {step}, seed {SEED}"
        loaded, report = from_disk(case["folder"] / "out")
        assert not report["missing_keys"] and not report["unexpected_keys"]
        trained = dict(case["model"].named_parameters())
        for name, parameter in loaded.named_parameters():
            # Adam divides by the root of a tiny second moment: compare against the step size.
            assert (parameter - trained[name]).abs().max() <= 0.2 * ref.LR, name


class TestLayouts:
    """One checkpoint, every safe kind of layout, against transformers in one process."""

    @pytest.fixture(scope="class")
    def references(self, tmp_path_factory):
        print(f"seed {SEED}")
        table = {}
        for family in FAMILIES:
            for tied in (False, True):
                folder = tmp_path_factory.mktemp(f"{family}-{'tied' if tied else 'untied'}")
                model = ref.make_model(family, vision_heads=4, tied=tied, seed=SEED)
                ref.save_model(model, folder / "hf")
                packs = ref.make_samples(SEED)
                gradients = canonical(ref.reference_gradients(model, packs))
                loss = ref.reference_loss(model, packs).item()
                steps = [ref.make_samples(SEED + i) for i in range(STEPS)]
                losses = ref.reference_training(model, steps)
                table[family, tied] = (folder, loss, gradients, losses)
        return table

    @pytest.mark.parametrize("size", sorted(LAYOUTS))
    def test_layouts(self, size, references, tmp_path):
        cases, names = [], []
        for (family, tied), (folder, *_) in references.items():
            for name, layout in LAYOUTS[size].items():
                layout = dict(layout)
                recompute = layout.pop("recompute", {})
                case = dict(model=folder / "hf", seed=SEED, layout=layout, steps=STEPS)
                cases.append(dict(case, recompute=recompute))
                names.append((family, tied, name))
        for (family, tied, name), result in zip(names, run(cases, size, tmp_path), strict=True):
            _, loss, gradients, losses = references[family, tied]
            where = f"{family} tied={tied} {name} (seed {SEED})"
            assert result["loss"] == pytest.approx(loss, rel=1e-6), where
            check_gradients(result["gradients"], gradients, 1e-5, where)
            assert result["losses"] == pytest.approx(losses, rel=1e-5), where


@pytest.mark.parametrize("layout", [{}, dict(pipeline=2), dict(tensor=2)], ids=str)
def test_hf_to_megatron_to_hf_is_bitwise(layout, tmp_path):
    """Every tensor, both families, tied and untied; and transformers misses none."""
    from safetensors.torch import load_file

    cases = []
    for family in FAMILIES:
        for tied in (False, True):
            folder = tmp_path / f"{family}-{tied}"
            ref.save_model(ref.make_model(family, vision_heads=4, tied=tied), folder)
            cases.append(
                dict(model=folder, seed=0, layout=layout, save=tmp_path / f"{folder.name}-out")
            )
    run(cases, 2 if layout else 1, tmp_path)
    for case in cases:
        before, after = {}, {}
        for table, folder in ((before, case["model"]), (after, case["save"])):
            for file in folder.glob("*.safetensors"):
                table.update(canonical(load_file(file)))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
        _, report = from_disk(case["save"])
        assert not report["missing_keys"] and not report["unexpected_keys"]
