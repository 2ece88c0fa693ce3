"""Layouts: what runs, how it is balanced, what is refused and in which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.released import released_spec
from vlmtrain.core.config import ConfigError, ParallelSection, TrainConfig, from_toml
from vlmtrain.core.errors import UserError
from vlmtrain.core.layout import LayoutError
from vlmtrain.parallel.layout import make_layout
from vlmtrain.parallel.overlap import check_tensor_overlap, prepare_tensor_overlap

SPEC_7B = released_spec("qwen2_5_vl-7b")


def test_settings_of_layers_per_stage(tmp_path):
    """`auto`, flat lists, and lists nested by pipeline rank and virtual chunk, from a recipe."""
    blank = TrainConfig(model=Path("m"), data="d", output=Path("o"))

    def read(value: str) -> Any:
        path = tmp_path / "recipe.toml"
        path.write_text(f"[parallel]\ntext_layers = {value}\n")
        return from_toml(path, blank).parallel.text_layers

    assert read('"auto"') == "auto"
    assert read("[0, 1, 2, 1]") == (0, 1, 2, 1)
    assert read("[[0, 2], [1, 1]]") == (0, 1, 2, 1)  # stage = chunk * pipeline + rank
    with pytest.raises(ConfigError, match=r"parallel.text_layers must be one flat list"):
        read("[[0, 2], [1]]")
    with pytest.raises(ConfigError, match=r"text_layers must be of type tuple"):
        read('"balanced"')


def test_overlap_is_refused_where_it_can_not_be_had():
    both = ParallelSection(tensor=2, tensor_overlap=True)
    environment: dict[str, str] = {}
    check_tensor_overlap(both, environment)
    prepare_tensor_overlap(both, environment)
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    check_tensor_overlap(both, environment)
    with pytest.raises(UserError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1 .* sets it to 8"):
        check_tensor_overlap(both, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    with pytest.raises(UserError, match=r"parallel.tensor of at least 2, it is 1"):
        check_tensor_overlap(ParallelSection(tensor_overlap=True), {})
    off: dict[str, str] = {}
    prepare_tensor_overlap(ParallelSection(tensor=2), off)
    assert not off
    config = TrainConfig(model=Path("m"), data="d", output=Path("o"))
    config.parallel.overlap_param_gather = True
    with pytest.raises(ConfigError, match="needs --parallel.overlap_grad_reduce"):
        config.validate()


def test_defaults_put_the_tower_first_and_balance_the_rest():
    layout = make_layout(SPEC_7B, world_size=8, pipeline=4)
    assert layout.data == 2
    assert layout.vision_layers == (32, 0, 0, 0)
    assert sum(layout.text_layers) == 28
    first, *middle, last = layout.text_layers
    assert first < last <= max(middle)  # the tower and the head count for layers
    assert max(middle) - min(middle) <= 1


def test_text_layout_for_megatron():
    layout = make_layout(
        SPEC_7B,
        world_size=4,
        pipeline=4,
        vision_layers=[16, 16, 0, 0],
        text_layers=[0, 8, 10, 10],
    )
    rows = layout.megatron_text_layout()
    assert rows is not None
    assert [row.count("decoder") for row in rows] == [0, 8, 10, 10]
    assert "embedding" in rows[1] and rows[3][-1] == "loss"  # untied: beside the merger
    tied = make_layout(
        dataclasses.replace(SPEC_7B, tie_word_embeddings=True),
        world_size=4,
        pipeline=4,
        vision_layers=[16, 16, 0, 0],
        text_layers=[0, 8, 10, 10],
    )
    assert tied.embedding_stage == 0 and tied.merger_stage == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(world_size=6, tensor=4), ["6 processes", "4", "multiple of 4"]),
        (dict(world_size=8, tensor=8), ["parallel.tensor 8", "[1, 2, 4]"]),
        (dict(world_size=1, sequence=True), ["parallel.sequence", "parallel.tensor"]),
        (dict(world_size=2, virtual_pipeline=2), ["virtual_pipeline 2", "pipeline"]),
        (
            dict(world_size=2, pipeline=2, virtual_pipeline=2, microbatches=3),
            ["3 per step", "multiple of"],
        ),
        (
            dict(world_size=2, pipeline=2, text_layers=[10, 10]),
            ["[10, 10]", "sum to 28", "20"],
        ),
        (dict(world_size=2, pipeline=2, text_layers=[28]), ["2 numbers", "1 that"]),
        (dict(world_size=2, pipeline=2, text_layers=[30, -2]), ["[30, -2]", "at least 0"]),
        (dict(world_size=2, pipeline=2, vision_layers=[0, 32]), ["stage 0"]),
        (
            dict(world_size=4, pipeline=4, vision_layers=[16, 0, 16, 0]),
            ["[16, 0, 16, 0]", "stage 1"],
        ),
        (
            dict(world_size=2, pipeline=2, vision_layers=[16, 16], text_layers=[4, 24]),
            ["[4, 24]", "stage 0", "[0, 28]"],
        ),
        (dict(world_size=2, pipeline=0), ["parallel.pipeline is 0"]),
        # the nearest valid choice stands in the sentence
        (dict(world_size=7, tensor=4), ["e.g. 8"]),
        (dict(world_size=2, virtual_pipeline=2), ["virtual_pipeline 1", "pipeline 2"]),
        (
            dict(world_size=4, pipeline=2, virtual_pipeline=2, microbatches=5),
            ["5 per step", "e.g. 8"],
        ),
        (dict(world_size=4, pipeline=4, text_layers=[7, 7, 7]), ["[1, 9, 9, 9]"]),
        (dict(world_size=2, pipeline=2, vision_layers=[0, 32]), ["[32, 0]"]),
        (dict(world_size=4, pipeline=4, vision_layers=[8, 0, 8, 16]), ["[32, 0, 0, 0]"]),
        (
            dict(world_size=2, pipeline=2, vision_layers=[16, 16], text_layers=[28, 0]),
            ["[28, 0]", "[0, 28]"],
        ),
        (dict(world_size=64, pipeline=64), ["64 stages", "32 vision", "28 language", "60"]),
        (
            dict(world_size=2, pipeline=2, multiplexed=True, text_layers=[28, 1]),
            ["[28, 1]", "sum to 29", "[14, 14]"],
        ),
    ],
)
def test_refused(options, words):
    with pytest.raises(LayoutError) as error:
        make_layout(SPEC_7B, **options)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(world_size=6, expert=4), ["128 experts", "6 ranks", "[1, 2]", "nearest is 2"]),
        (dict(world_size=4, expert=4, pipeline=2), ["2 ranks", "[1, 2]"]),
        (dict(world_size=2, expert=0), ["parallel.expert is 0"]),
        (dict(world_size=2, expert=2, tensor=2), ["parallel.sequence", "parallel.expert 1"]),
    ],
)
def test_refused_of_a_mixture_of_experts(options, words):
    spec = released_spec("qwen3_vl_moe-30b")
    with pytest.raises(LayoutError) as error:
        make_layout(spec, **options)
    for word in words:
        assert word in str(error.value), str(error.value)
    with pytest.raises(LayoutError, match="parallel.expert 2 needs a mixture of experts"):
        make_layout(SPEC_7B, world_size=2, expert=2)


def test_ranks_that_share_experts():
    """They are not split, so a width that tensor does not divide is none of its concern."""
    spec = dataclasses.replace(released_spec("qwen3_vl_moe-30b"), intermediate_size=6145)
    layout = make_layout(spec, world_size=16, tensor=2, pipeline=2, sequence=True, expert=4)
    assert (layout.data, layout.expert, layout.expert_data) == (4, 4, 2)
    assert "data 4, expert 4;" in layout.describe()
