"""LoRA against peft: the same adapters, the same training, a folder that peft loads."""

from __future__ import annotations

import pytest
import torch

from tests.parity import reference as ref
from tests.parity.matrix import BOTH, SEED, relative, run
from tests.parity.test_parity import from_disk

STEPS = 3
QWEN3_VL = ("qkv", "proj", "linear_fc1", "linear_fc2", "q_proj", "v_proj", "up_proj")
# family, layout (with overlap, recompute), LoRA options
CASES = {
    1: [
        ("qwen2_5_vl", {}, dict(vision=True)),
        ("qwen2_vl", {}, dict(targets=("q_proj", "v_proj"))),
        # the first layer's input needs no gradient, its adapters' recomputation does
        ("qwen2_5_vl", dict(recompute=dict(language="selective")), dict(targets=("down_proj",))),
        ("qwen2_5_vl", dict(recompute=dict(language="full")), dict(targets=("down_proj",))),
    ],
    2: [
        ("qwen2_5_vl", dict(tensor=2, sequence=True), dict(vision=True)),
        (
            "qwen2_vl",
            dict(tensor=2),
            dict(vision=True, targets=("qkv", "proj", "fc1", "fc2", "q_proj", "up_proj", "o_proj")),
        ),
        (
            "qwen3_vl",
            dict(pipeline=2, vision_layers=(2, 2), text_layers=(0, 4)),
            dict(vision=True, targets=QWEN3_VL),
        ),
        ("qwen3_vl_moe", dict(expert=2), dict(targets=("q_proj", "v_proj", "o_proj"))),
        ("qwen2_5_vl", dict(pipeline=2), {}),  # the stage of the tower has nothing to train
        ("qwen2_5_vl", dict(pipeline=2, multiplexed=True), dict(vision=True)),
        ("qwen2_vl", dict(overlap=BOTH), dict(vision=True, targets=("qkv", "fc2", "v_proj"))),
    ],
}
# layout, LoRA options: with dropout, which no other implementation draws alike
DROPOUT = [
    (dict(tensor=2), dict(vision=True)),
    (dict(tensor=2, sequence=True), dict(vision=True)),
    (dict(pipeline=2, multiplexed=True), dict(vision=True)),
    (dict(tensor=2, multiplexed=True), dict(vision=True)),
]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_start(factors):
    """As peft draws them: A uniform up to 1 / sqrt(inputs) on either side, each its own; B 0."""
    a = [p for name, p in factors.items() if ".lora_A." in name]
    assert not any(p.any() for name, p in factors.items() if ".lora_A." not in name)
    assert 0 < 2 * len(a) == len(factors) == len({tuple(p.flatten().tolist()) for p in a}) * 2
    drawn = torch.cat([p.flatten() * p.shape[1] ** 0.5 for p in a])
    assert 0.99 < drawn.abs().max() <= 1 + 1e-6
    assert drawn.std() == pytest.approx(3**-0.5, rel=0.05) and abs(drawn.mean()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_same_as_peft(size, tmp_path):
    peft = pytest.importorskip("peft", reason="peft, which reads the adapters, is not installed")
    print(f"seed {SEED}")
    cases = []
    for n, (family, layout, more) in enumerate(CASES[size]):
        layout = dict(layout)
        folder = tmp_path / f"{n}"
        ref.save_model(ref.make_model(family, vision_heads=4, seed=SEED), folder / "hf")
        lora = {"rank": 4, "alpha": 8.0, "targets": TARGETS, **more}
        cases.append(
            dict(
                model=folder / "hf",
                seed=SEED,
                overlap=layout.pop("overlap", {}),
                recompute=layout.pop("recompute", {}),
                layout=layout,
                steps=STEPS,
                lora=lora,
                adapter=folder,
                save=folder / "merged",
                only_steps=True,
            )
        )
    for case, result in zip(cases, run(cases, size, tmp_path), strict=True):
        where = f"{case['layout']} {case['lora']} (seed {SEED})"
        base, _ = from_disk(case["model"], dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, case["adapter"] / "before", is_trainable=True)
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert trainable
        before = {n: p.detach().clone() for n, p in trainable.items()}
        check_start(before)
        steps = [ref.make_stream("mixed", SEED, i) for i in range(STEPS)]
        losses = ref.reference_training(model, steps)
        assert result["losses"] == pytest.approx(losses, rel=1e-5), where
        assert losses[-1] != losses[0]

        again, _ = from_disk(case["model"], dtype=torch.float32)
        saved = peft.PeftModel.from_pretrained(again, case["adapter"] / "after")
        for name, parameter in saved.named_parameters():
            if ".lora_" in name:
                # Nine elements of ten: Adam takes a full step also along a gradient that is
                # rounding error. There plain torch parts from float64, and pulls others along.
                want = trainable[name]
                way = (want - before[name]).abs().max()
                difference = (parameter - want).abs().flatten().quantile(0.9)
                assert difference <= 0.01 * way, f"{name}; {where}"
        merged, report = from_disk(case["save"], dtype=torch.float32)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        sample = ref.make_samples(SEED)[0][0]
        with torch.no_grad():
            ours = ref.reference_logits(merged, sample)
            theirs = ref.reference_logits(saved, sample)
            untouched = ref.reference_logits(from_disk(case["model"])[0].float(), sample)
        assert relative(ours, theirs) <= 1e-5, where
        assert relative(ours, untouched) > 1e-4, f"the adapters do nothing; {where}"


@pytest.mark.slow
def test_dropout(tmp_path):
    """It changes the training; factors that several ranks hold stay equal; a tower that encodes
    twice drops the same values twice."""
    folder = ref.save_model(
        ref.make_model("qwen2_5_vl", vision_heads=4, seed=SEED), tmp_path / "hf"
    )
    cases = [
        dict(
            model=folder,
            seed=SEED,
            layout=layout,
            steps=STEPS,
            lora={"rank": 4, "alpha": 8.0, "targets": TARGETS, "dropout": dropout, **more},
            adapter=tmp_path / f"{number}-{dropout}",
            only_steps=True,
        )
        for number, (layout, more, dropout) in enumerate(
            [(*one, 0.4) for one in DROPOUT] + [(*DROPOUT[0], 0.0)]
        )
    ]
    *results, plain = run(cases, 2, tmp_path)
    for (layout, _), dropped in zip(DROPOUT, results, strict=True):
        where = f"{layout} (seed {SEED})"
        assert dropped["replicas_agree"], where
        assert dropped.get("passes_agree", False) or not layout.get("multiplexed"), where
        # B starts at 0: the first step's loss does not see the adapters, later ones do
        first, *later = zip(dropped["losses"], plain["losses"], strict=True)
        assert first[0] == pytest.approx(first[1], rel=1e-5), where
        difference = max(abs(one / other - 1) for one, other in later)
        assert 1e-6 < difference < 0.05, f"{difference:.1e}; {where}"
