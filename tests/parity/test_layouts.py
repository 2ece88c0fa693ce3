"""A cut of the matrix of layouts (matrix.py) , each kind of layout once; fewer in make test."""

from __future__ import annotations

import pytest

from tests.parity.matrix import Case, check, layouts, references

__all__ = ["references"]  # a fixture

_RECOMPUTE = {
    "tp2 sp": dict(vision="full", language="full"),
    "pp2": dict(vision="selective", language="selective"),
}
BALANCED = "qwen3_vl_moe balanced"  # with a load-balancing loss
RATES = dict(vision_lr=4e-3, merger_lr=2.5e-4, vision_layer_decay=0.7)
_OPTIMIZERS = {  # each parameter has the learning rate it has on one process
    ("qwen2_5_vl", "pp2 spread"): dict(rates=RATES),
    ("qwen2_vl", "tp2 sp multiplexed overlap"): dict(rates=RATES, offload=0.4),
    ("qwen3_vl", "dp2 overlap"): dict(rates=RATES),
    ("qwen3_vl", "pp4 empty stages"): dict(offload=0.4),
}
FAST = [
    ("qwen2_5_vl", True, "mixed", "pp2"),
    ("qwen2_5_vl", True, "mixed", "pp2 vpp2 spread"),
    ("qwen2_vl", True, "mixed", "tp2 sp"),
    ("qwen2_vl", True, "weighted", "tp2 sp"),
    ("qwen2_5_vl", True, "mixed", "dp2 overlap"),
    ("qwen2_5_vl", True, "mixed", "pp2 multiplexed"),
    ("qwen3_vl", False, "mixed", "pp2 vpp2 spread"),
    ("qwen3_vl", False, "mixed", "tp2 multiplexed"),
    (BALANCED, False, "mixed", "ep2 overlap"),
]
SLOW = {
    2: [
        ("qwen2_vl", False, "mixed", "pp2"),
        ("qwen2_5_vl", False, "mixed", "tp2"),
        ("qwen2_vl", False, "text", "dp2 overlap"),
        ("qwen3_vl", True, "mixed", "pp2 vpp2 spread"),
        ("qwen3_vl", True, "weighted", "pp2 vpp2 spread"),
        ("qwen2_5_vl", True, "weighted", "tp2 multiplexed"),
        ("qwen2_5_vl", False, "weighted", "dp2"),
        ("qwen2_vl", False, "mixed", "pp2 uneven"),
        ("qwen2_vl", True, "mixed", "pp2 spread"),
        ("qwen2_5_vl", False, "mixed", "pp2 spread"),
        ("qwen2_5_vl", False, "text", "pp2 spread"),  # each slice of the tower is skipped
        ("qwen2_vl", False, "mixed", "pp2 vpp2"),
        ("qwen2_5_vl", False, "text", "tp2 sp"),
        ("qwen2_vl", True, "mixed", "tp2 sp multiplexed overlap"),
        ("qwen2_5_vl", False, "mixed", "dp2 multiplexed overlap"),
        ("qwen3_vl", False, "mixed", "tp2 sp"),
        ("qwen3_vl", False, "mixed", "dp2 overlap"),
        (BALANCED, False, "mixed", "tp2"),
        (BALANCED, True, "mixed", "tp2 sp"),
        (BALANCED, False, "mixed", "tp2 multiplexed"),
        (BALANCED, True, "mixed", "pp2"),
        (BALANCED, False, "mixed", "pp2 vpp2 spread"),
        (BALANCED, True, "mixed", "dp2 overlap"),
        ("qwen3_vl_moe", False, "mixed", "ep2"),
        ("qwen3_vl_moe", True, "mixed", "tp2 sp ep2"),
    ],
    4: [
        ("qwen2_5_vl", False, "mixed", "pp4 auto"),
        ("qwen2_5_vl", True, "mixed", "tp2 pp2 sp spread"),
        ("qwen2_vl", False, "mixed", "dp2 pp2 overlap"),
        ("qwen2_5_vl", False, "mixed", "dp2 pp2 multiplexed"),
        ("qwen3_vl", False, "mixed", "pp4 empty stages"),
        ("qwen3_vl", True, "mixed", "tp2 pp2 vpp2 sp spread"),
        ("qwen3_vl_moe", True, "mixed", "dp2 ep2 overlap"),
        (BALANCED, False, "mixed", "pp2 ep2"),
        ("qwen3_vl_moe", True, "mixed", "pp2 vpp2 ep2 multiplexed"),
        ("qwen3_vl_moe", False, "mixed", "dp2 tp2 sp ep4"),
        ("qwen3_vl_moe", True, "mixed", "dp2 tp2"),
    ],
}


@pytest.mark.parametrize(
    ("size", "cut"),
    [(2, FAST), *(pytest.param(*more, marks=pytest.mark.slow) for more in SLOW.items())],
)
def test_layouts(size, cut, references, tmp_path):
    table = layouts(size)
    cases = [Case(*case, table[case[-1]][0], dict(table[case[-1]][1])) for case in cut]
    for case in list(cases):
        if case.name in _RECOMPUTE and case.stream == "mixed":
            more = dict(case.more, recompute=_RECOMPUTE[case.name])
            cases.append(case._replace(name=f"{case.name} recompute", more=more))
        if case.stream == "mixed":
            case.more.update(_OPTIMIZERS.get((case.family, case.name), {}))
            if "multiplexed" in case.name:
                case.more["vision_piece"] = 60  # patches; images have 4 to 216
            case.more["host_questions"] = True  # and where logits are made
    check(cases, size, references, tmp_path)
