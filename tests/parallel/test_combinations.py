"""The table of layouts in docs/parallelism.md: what it promises is accepted and is a case of the
parity matrix; what it denies is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.test_layout import SPEC_7B
from tests.parity.matrix import PIPELINED, layouts
from vlmtrain.core.layout import Layout, LayoutError
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.flops import IMAGE_SHARE, TARGET_SHARE
from vlmtrain.parallel.layout import make_layout

DOCUMENT = Path(__file__).parents[2] / "docs" / "parallelism.md"
KINDS = ("tower on stage 0", "tower spread", "multiplexed")
# Sizes that tensor 2 divides; few layers, so that every stage count is tight.
VISION = dataclasses.replace(SPEC_7B.vision, depth=4, full_attention_layers=(1, 3))
SMALL = dataclasses.replace(SPEC_7B, vision=VISION, num_layers=4)


def table() -> list[tuple[dict[str, Any], str, bool]]:
    """(sizes, kind of vision, supported) of every cell."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"| layout | {' | '.join(KINDS)} |") + 2
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        name, *answers = (cell.strip() for cell in line.strip("|").split("|"))
        sizes: dict[str, Any] = {
            key: int(value) if value else True
            for key, value in re.findall(r"([a-z_]+)(?: (\d+))?", name)
        }
        assert len(answers) == len(KINDS), line
        for kind, answer in zip(KINDS, answers, strict=True):
            assert answer.startswith(("yes", "no")), line
            cells.append((sizes, kind, answer.startswith("yes")))
    return cells


TABLE = table()


def arguments(sizes: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "multiplexed":
        return dict(sizes, multiplexed=True)
    if kind == "tower on stage 0":
        return sizes
    stages = sizes.get("pipeline", 1) * sizes.get("virtual_pipeline", 1)
    zeros = [0] * (stages - 2)
    return dict(sizes, vision_layers=[3, 1, *zeros], text_layers="auto")


def check(layout: Layout, spec: ModelSpec) -> None:
    """Every layer is on one stage, in the order in which a pack meets them."""
    assert sum(layout.text_layers) == spec.num_layers
    assert len(layout.text_layers) == len(layout.vision_layers) == layout.stages
    assert not any(layout.text_layers[: layout.merger_stage])
    assert layout.embedding_stage <= layout.merger_stage
    if layout.multiplexed:
        assert not any(layout.vision_layers)
    else:
        assert sum(layout.vision_layers) == spec.vision.depth
        assert not any(layout.vision_layers[layout.merger_stage + 1 :])
    rows = layout.megatron_text_layout()
    if rows is not None:
        flat = [part for row in rows for part in row]
        assert flat.count("decoder") == spec.num_layers and flat[-1] == "loss"
        assert "embedding" in rows[layout.embedding_stage]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_table_is_what_is_accepted(replicas, tied):
    spec = dataclasses.replace(SMALL, tie_word_embeddings=tied)
    assert len(TABLE) >= 30 and sum(supported for *_, supported in TABLE) >= 20
    for sizes, kind, supported in TABLE:
        processes = replicas * sizes.get("tensor", 1) * sizes.get("pipeline", 1)
        where = f"{sizes} {kind}"
        try:
            made = make_layout(spec, world_size=processes, microbatches=4, **arguments(sizes, kind))
        except LayoutError as error:
            assert not supported, f"{where}: {error}"
        else:
            assert supported, where
            assert made.data == replicas
            check(made, spec)


def test_table_is_what_is_tested():
    """Each supported cell has a case in the parity matrix."""
    tested = set()
    for size in PIPELINED:
        for layout, _ in layouts(size).values():
            sizes = {k: v for k, v in layout.items() if k in ("tensor", "pipeline", "sequence")}
            sizes["virtual_pipeline"] = layout.get("virtual_pipeline", 1)
            kind = KINDS[0]
            if layout.get("multiplexed"):
                kind = KINDS[2]
            elif isinstance(layout.get("vision_layers"), tuple) and layout["vision_layers"][1]:
                kind = KINDS[1]
            tested.add((_key(sizes), kind))
    for sizes, kind, supported in TABLE:
        assert not supported or (_key(sizes), kind) in tested, f"{sizes} {kind}"


def _key(sizes: dict[str, Any]) -> tuple[int, int, int, bool]:
    return (
        sizes.get("tensor", 1),
        sizes.get("pipeline", 1),
        sizes.get("virtual_pipeline", 1),
        sizes.get("sequence", False),
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("given", [None, "vision", "text"])
def test_auto_balances(stages, given):
    """`auto` is never slower than the tower on stage 0, by the costs of the documentation, and no
    single layer moved to another stage makes it faster."""
    first = make_layout(SPEC_7B, world_size=stages, pipeline=stages)
    options: dict[str, Any] = dict(vision_layers="auto", text_layers="auto")
    if given == "vision":
        options["vision_layers"] = first.vision_layers
    if given == "text":
        options["text_layers"] = first.text_layers
    made = make_layout(SPEC_7B, world_size=stages, pipeline=stages, **options)
    check(made, SPEC_7B)
    assert slowest(made) <= slowest(first) + 1e-9
    if given == "text":
        assert made.text_layers == first.text_layers
    for counts in ("vision_layers", "text_layers"):
        if counts == f"{given}_layers":
            continue  # not ours to move
        for source in range(stages):
            for target in (source - 1, source + 1):
                moved = list(getattr(made, counts))
                if not 0 <= target < stages or moved[source] == 0:
                    continue
                moved[source] -= 1
                moved[target] += 1
                if counts == "text_layers" and moved[-1] == 0:
                    continue  # the head's stage keeps one
                try:
                    other = make_layout(
                        SPEC_7B,
                        world_size=stages,
                        pipeline=stages,
                        **{
                            "vision_layers": made.vision_layers,
                            "text_layers": made.text_layers,
                            counts: moved,
                        },
                    )
                except LayoutError:
                    continue
                assert slowest(made) <= slowest(other) * (1 + 1e-3), (made, other)


def slowest(layout: Layout) -> float:
    """Multiply-accumulates a token of the slowest stage: 2.8 patches through a vision layer; the
    head, and the output projection and MLP of the last layer, for targets alone."""
    v, spec = SPEC_7B.vision, SPEC_7B
    vision = 2.8 * (4 * v.hidden_size**2 + 3 * v.hidden_size * v.intermediate_size)
    h, kv = spec.hidden_size, spec.num_kv_heads * spec.head_dim
    text = 2 * h * h + 2 * h * kv + 3 * h * spec.intermediate_size
    loads = [
        a * vision + b * text for a, b in zip(layout.vision_layers, layout.text_layers, strict=True)
    ]
    targets = (1 - IMAGE_SHARE) * TARGET_SHARE
    loads[-1] += targets * h * spec.vocab_size
    loads[-1] -= (1 - targets) * (h * h + 3 * h * spec.intermediate_size)
    return max(loads)
