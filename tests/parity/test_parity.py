"""float32 parity with transformers: logits, loss, every gradient, ten steps; weights and back.

Bounds are those of the project's contract: logits 1e-5, each gradient 1e-4, loss after ten
steps 1e-4, all relative. Measured errors are 2 to 50 times smaller.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import reference as ref
from tests.parity.matrix import (
    BOTH,
    FAMILIES,
    SEED,
    SMALL_BUCKETS,
    canonical,
    check_gradients,
    relative,
    run,
)


def from_disk(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    import transformers

    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **options
    )


FAST = ("qwen2_5_vl", "qwen3_vl")


class TestOneProcess:
    """Odd sizes: 3 vision heads, 6 query heads over 2 key/value heads, vocabulary 211."""

    @pytest.fixture(
        scope="class",
        params=[
            name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
            for name in FAMILIES
        ],
    )
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
        check_gradients(case["ours"]["gradients"], canonical(theirs), 1e-4, f"seed {SEED}")

    def test_packed_equals_unpacked(self, case):
        ours = case["ours"]
        assert ours["unpacked_loss"] == pytest.approx(ours["loss"], rel=1e-6)
        check_gradients(ours["unpacked_gradients"], ours["gradients"], 1e-4, f"seed {SEED}")

    def test_bf16_error_is_at_most_twice_that_of_transformers(self, case):
        import copy

        model = copy.deepcopy(case["model"]).bfloat16()
        ours, theirs = 0.0, 0.0
        with torch.no_grad():
            for pack, got, exact in zip(
                case["packs"], case["bf16"]["logits"], case["logits"], strict=True
            ):
                half = torch.cat([ref.reference_logits(model, s) for s in pack]).float()
                theirs += (half - exact).square().sum().item()
                ours += (got[: len(exact), : ref.VOCAB] - exact).square().sum().item()
        print(f"bf16 logits: ours {ours**0.5:.4f}, transformers {theirs**0.5:.4f}")
        assert theirs > 0 and ours**0.5 <= 2 * theirs**0.5

    def test_ten_steps_and_the_folder_they_leave(self, case):
        """Last: it trains the reference model."""
        start = {name: p.detach().clone() for name, p in case["model"].named_parameters()}
        steps = [ref.make_stream("mixed", SEED, i) for i in range(10)]
        theirs = ref.reference_training(case["model"], steps)
        for step, (got, want) in enumerate(zip(case["ours"]["losses"], theirs, strict=True)):
            assert got == pytest.approx(want, rel=1e-4), f"step {step}, seed {SEED}"
        loaded, report = from_disk(case["folder"] / "out")
        assert not report["missing_keys"] and not report["unexpected_keys"]
        trained = dict(case["model"].named_parameters())
        for name, parameter in loaded.named_parameters():
            # Where a gradient is all but zero Adam follows its rounding, by up to a step: single
            # elements may differ, most may not, nor the whole by a tenth of its way.
            want = trained[name].detach()
            difference = (parameter.detach() - want).abs()
            assert difference.median() <= 0.002 * ref.LR, f"{name}, seed {SEED}"
            moved = (want - start[name]).norm()
            assert difference.norm() <= 0.1 * moved, f"{name}, seed {SEED}"


def test_the_balance_loss_is_what_transformers_adds_to_a_batch():
    """The reference of the layouts' tests, which has samples one by one."""
    model = ref.make_model("qwen3_vl_moe balanced", seed=SEED)
    generator = torch.Generator().manual_seed(SEED)
    samples = [ref.make_sample([n], generator, learn) for n, learn in ((17, 9), (11, 4))]
    ids, labels, mask = torch.full((2, 17), ref.PAD), torch.full((2, 17), -100), torch.zeros(2, 17)
    for row, sample in enumerate(samples):
        n, learned = len(sample.input_ids), (sample.labels >= 0).roll(1)  # transformers shifts them
        ids[row, :n], mask[row, :n] = sample.input_ids, 1
        labels[row, :n] = sample.input_ids.masked_fill(~learned, -100)
    with torch.no_grad():
        batch = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        assert batch.aux_loss > 1
        ours = ref.reference_loss(model, [samples])
    torch.testing.assert_close(ours, batch.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        pytest.param(dict(pipeline=2), marks=pytest.mark.slow),
        pytest.param(dict(tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hf_to_megatron_to_hf_is_bitwise(layout, tmp_path):
    """Every tensor, all families, tied and untied; and transformers misses none."""
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


@pytest.mark.slow
def test_weights_are_saved_that_are_gathered_later(tmp_path):
    """Of stages and of the tower's replica, where gathers overlap with the next step."""
    folder = ref.save_model(ref.make_model("qwen2_5_vl", vision_heads=4, seed=SEED), tmp_path / "m")
    cases = [
        dict(
            model=folder,
            seed=SEED,
            layout=dict(pipeline=2, multiplexed=True),
            steps=2,
            only_steps=True,
            overlap=overlap,
            bucket_size=SMALL_BUCKETS,
            save=tmp_path / f"{len(overlap)}",
        )
        for overlap in ({}, BOTH)
    ]
    run(cases, 2, tmp_path)
    start, plain, overlapped = (
        dict(from_disk(place)[0].named_parameters())
        for place in (folder, *(case["save"] for case in cases))
    )
    for name, want in plain.items():
        assert not torch.equal(want, start[name]), name
        torch.testing.assert_close(overlapped[name], want, rtol=0, atol=0.01 * ref.LR, msg=name)
