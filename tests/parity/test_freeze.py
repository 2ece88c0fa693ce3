"""Freezing parts of the model, on every kind of layout, against transformers with the same parts
frozen: losses of three steps, gradients of what learns, no gradient of what does not."""

from __future__ import annotations

import pytest
import torch

from tests.parity import reference as ref
from tests.parity.matrix import BOTH, FAMILIES, SEED, run
from vlmtrain.checkpoint.mapping import canonical_name

FROZEN = [
    dict(vision=True),
    dict(language=True),
    dict(vision=True, merger=True),
    dict(vision=True, language=True),
    dict(merger=True, language=True),
]
LAYOUTS = {
    1: [{}],
    2: [
        dict(pipeline=2),  # the tower alone on stage 0: frozen, it has no trainable parameter
        dict(pipeline=2, vision_layers=(2, 2), text_layers=(0, 4)),
        dict(tensor=2, sequence=True),
        dict(overlap=BOTH),  # two data-parallel ranks
    ],
}
STEPS = 3
# The mixture with a load-balancing loss, whose gradient is asked of frozen routers too.
MODELS = [f"{name} balanced" if name == "qwen3_vl_moe" else name for name in FAMILIES]


def part(name: str) -> str:
    if "merger" in name:
        return "merger"
    return "vision" if name.startswith("visual.") else "language"


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(family, frozen) -> model folder, gradients, losses."""
    print(f"seed {SEED}")
    table = {}
    for family in MODELS:
        tied = family == "qwen2_vl"
        folder = ref.save_model(
            ref.make_model(family, vision_heads=4, tied=tied, seed=SEED),
            tmp_path_factory.mktemp(family),
        )
        for i, frozen in enumerate(FROZEN):
            model = ref.make_model(family, vision_heads=4, tied=tied, seed=SEED)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not frozen.get(part(canonical_name(name)), False))
            ref.reference_loss(model, ref.make_samples(SEED)).backward()
            gradients = {
                canonical_name(n): None if p.grad is None else ref.as_released(n, p.grad.clone())
                for n, p in model.named_parameters()
            }
            model.zero_grad()
            steps = [ref.make_stream("mixed", SEED, k) for k in range(STEPS)]
            table[family, i] = (folder, gradients, ref.reference_training(model, steps))
    return table


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_frozen_parts(size, references, tmp_path):
    chosen = [
        (family, i, dict(layout))
        for family, i in references
        for layout in LAYOUTS[size]
        if family == "qwen2_vl" or size == 2
        if family == "qwen2_5_vl" or "overlap" not in layout
        if family != "qwen3_vl" or layout != dict(pipeline=2)
        if "moe" not in family or "tensor" in layout or layout == dict(pipeline=2)
    ]
    cases = [
        dict(
            model=references[family, i][0],
            seed=SEED,
            overlap=layout.pop("overlap", {}),
            layout=layout,
            steps=STEPS,
            freeze=FROZEN[i],
            offload=0.5 if family == "qwen2_vl" and "pipeline" in layout else 0.0,
            save=tmp_path / f"out{n}",
        )
        for n, (family, i, layout) in enumerate(chosen)
    ]
    for (family, i, layout), case, result in zip(
        chosen, cases, run(cases, size, tmp_path), strict=True
    ):
        folder, gradients, losses = references[family, i]
        where = f"{FROZEN[i]} {family} {layout} (seed {SEED})"
        assert result["losses"] == pytest.approx(losses, rel=1e-5), where
        for name, want in gradients.items():
            ours = result["gradients"][name]
            if want is None:
                assert ours.isnan().all(), f"{name} is frozen but has a gradient; {where}"
            else:
                error = ((ours - want).norm() / want.norm().clamp_min(1e-12)).item()
                assert error <= 1e-5, f"gradient of {name} is off by {error:.1e}; {where}"
        check_moved(folder, case["save"], FROZEN[i])


def check_moved(before, after, frozen) -> None:
    """Frozen tensors are bitwise what they were, all others have moved."""
    from safetensors.torch import load_file

    old, new = {}, {}
    for table, folder in ((old, before), (new, after)):
        for file in folder.glob("*.safetensors"):
            table.update({canonical_name(n): t for n, t in load_file(file).items()})
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert torch.equal(tensor, new[name]) == frozen.get(part(name), False), name
