"""The learning rate of each step is transformers' and Megatron's; bad settings of it and of
held-out evaluation are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from transformers import get_scheduler

from tests.released import released_spec
from vlmtrain.core.config import (
    ConfigError,
    EvaluateSection,
    FreezeSection,
    LoraSection,
    OptimizerSection,
    TrainConfig,
)
from vlmtrain.core.errors import UserError
from vlmtrain.models.lora_costs import check_lora
from vlmtrain.training.learning_rate import learning_rate

LR, STEPS, WARMUP = 3e-4, 50, 7


def ours(**options: object) -> list[float]:
    section = OptimizerSection(lr=LR, **options)
    return [learning_rate(section, step, STEPS) for step in range(STEPS + 2)]


@pytest.mark.parametrize("warmup", [dict(), dict(warmup_steps=WARMUP), dict(warmup_ratio=0.13)])
@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("constant_with_warmup", dict(lr_scheduler_type="constant"), {}),
        ("linear", dict(lr_scheduler_type="linear"), {}),
        ("cosine", dict(lr_scheduler_type="cosine"), {}),
        ("cosine_with_min_lr", dict(min_lr=1e-5), dict(min_lr=1e-5)),
        *(
            (
                "warmup_stable_decay",
                dict(lr_scheduler_type="wsd", decay_ratio=0.25, decay_type=shape),
                dict(num_decay_steps=13, decay_type=shape),
            )
            for shape in ("linear", "cosine", "1-sqrt")
        ),
    ],
)
def test_schedules_are_those_of_transformers(name, options, more, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = get_scheduler(
        name, optimizer, WARMUP if warmup else 0, STEPS, scheduler_specific_kwargs=more
    )
    theirs = []
    for _ in range(STEPS + 2):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert ours(**options, **warmup)[:STEPS] == pytest.approx(theirs[:STEPS], rel=1e-12, abs=1e-20)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
def test_schedules_with_min_lr_are_those_of_megatron(shape):
    """Beyond the last step too, which a run that goes on for longer may ask for."""
    optimizer = SimpleNamespace(param_groups=[{}])
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=2e-5,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=STEPS,
        lr_decay_style=shape.replace("wsd", "WSD"),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=10,
        lr_wsd_decay_style="minus_sqrt",
    )
    theirs = []
    for _ in range(STEPS + 2):
        theirs.append(optimizer.param_groups[0]["lr"])
        schedule.step(1)
    options = dict(decay_ratio=0.2, decay_type="1-sqrt", warmup_steps=WARMUP, min_lr=2e-5)
    assert ours(lr_scheduler_type=shape, **options) == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("warmup", [STEPS, 2 * STEPS])
def test_a_warm_up_as_long_as_the_run(warmup):
    assert ours(warmup_steps=warmup)[:STEPS] == pytest.approx([LR * i / warmup for i in range(50)])


@pytest.mark.parametrize(
    ("evaluate", "keep_best", "said"),
    [
        (dict(every=3), False, "--evaluate.every 3 needs held-out"),
        (dict(every="epoch"), False, "--evaluate.every epoch needs held-out"),
        (dict(), True, "--checkpoint.keep_best True needs held-out"),
        (dict(data="a", split_ratio=0.1), False, "both say what is held out"),
        (dict(split_ratio=1.0), False, "--evaluate.split_ratio is 1.0; it must be below 1"),
        (dict(every=-1, data="a"), False, "--evaluate.every is -1; it must be at least 0"),
    ],
)
def test_bad_settings_of_evaluation(evaluate, keep_best, said, tmp_path):
    config = TrainConfig(tmp_path, "a", tmp_path, evaluate=EvaluateSection(**evaluate))
    config.checkpoint.keep_best = keep_best
    with pytest.raises(ConfigError) as error:
        config.validate()
    assert said in str(error.value)
    config.evaluate = EvaluateSection("epoch", split_ratio=0.1)
    config.validate()


@pytest.mark.parametrize(
    ("options", "other", "said"),
    [
        (dict(warmup_steps=3, warmup_ratio=0.1), {}, "warmup_ratio 0.1 both say"),
        (dict(warmup_ratio=1.5), {}, "--optimizer.warmup_ratio is 1.5; it must be at most 1"),
        (dict(eps=0.0), {}, "--optimizer.eps is 0.0; it must be at least 1e-30"),
        (dict(decay_ratio=-0.1), {}, "--optimizer.decay_ratio is -0.1; it must be at least 0"),
        (dict(vision_lr=-1e-5), {}, "--optimizer.vision_lr is -1e-05; it must be at least 0"),
        (dict(merger_lr=float("nan")), {}, "--optimizer.merger_lr is nan; it must be at least 0"),
        (dict(vision_layer_decay=0.0), {}, "vision_layer_decay is 0.0; it must be at least 0.01"),
        (dict(lr=0.0, vision_lr=1e-5), {}, "a multiple of --optimizer.lr, which is 0"),
        (
            dict(vision_layer_decay=0.9),
            dict(freeze="vision"),
            "vision_layer_decay is 0.9, but that",
        ),
        (dict(merger_lr=0.0), dict(freeze="merger"), "--optimizer.merger_lr is 0.0, but that"),
        (dict(vision_lr=1e-5), dict(rank=8), "--optimizer.vision_lr is 1e-05, but that"),
    ],
)
def test_bad_settings(options, other, said, tmp_path):
    config = TrainConfig(tmp_path, "a", tmp_path, optimizer=OptimizerSection(**options))
    if "freeze" in other:
        setattr(config.freeze, other["freeze"], True)
    config.lora.rank = other.get("rank", 0)
    with pytest.raises(ConfigError) as error:
        config.validate()
    assert said in str(error.value)
    config.optimizer = OptimizerSection()
    config.validate()


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        (dict(alpha=64.0), "--lora.alpha need"),
        (dict(dropout=0.1, vision=True), "--lora.dropout and --lora.vision need"),
        (dict(targets=("q_proj",)), "--lora.targets need"),
    ],
)
def test_adapters_without_a_rank_are_refused(lora, named):
    spec = released_spec("qwen2_5_vl-7b")
    with pytest.raises(UserError, match=f"^{named} --lora.rank, which is 0"):
        check_lora(LoraSection(**lora), FreezeSection(), spec)
    check_lora(LoraSection(rank=4, **lora), FreezeSection(), spec)


def test_adapters_of_the_tower_need_one_of_its_linears():
    for name, there in (("qwen2_vl-7b", False), ("qwen2_5_vl-7b", True), ("qwen3_vl-8b", False)):
        spec, lora = released_spec(name), LoraSection(rank=4, vision=True)
        if there:  # its MLP's linears have the names of the language model's
            check_lora(lora, FreezeSection(), spec)
        else:
            with pytest.raises(UserError, match="tower, and --lora.targets has none of them"):
                check_lora(lora, FreezeSection(), spec)
        lora.targets += ("qkv",)
        check_lora(lora, FreezeSection(), spec)


@pytest.mark.parametrize("frozen", ["vision", "merger", "language"])
def test_adapters_in_a_frozen_part_are_refused(frozen):
    spec, freeze = released_spec("qwen2_5_vl-7b"), FreezeSection(**{frozen: True})
    towers = {"language": ("q_proj",), "vision": ("qkv",)}
    for part, targets in towers.items():
        lora = LoraSection(rank=4, targets=targets, vision=part == "vision")
        if part == frozen:
            with pytest.raises(UserError, match=f"^--freeze.{frozen}.* leave one out"):
                check_lora(lora, freeze, spec)
        else:
            check_lora(lora, freeze, spec)
