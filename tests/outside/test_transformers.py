"""transformers' own tests of a model, run with the kernels switched in (`make test-outside`).

The installed wheel has no tests. TRANSFORMERS_TESTS names the folder `tests` of its source, of the
same version: a checkout, or what `pip download --no-deps --no-binary :all: transformers==..` brings
(without the tests of generation); `pip install parameterized` is what they need besides.

Each test runs twice: as it is, and with `enable` called on every model that is made. Where it
passes first, it must pass then, but for differences.py.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
import unittest
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vlmkernels.integrations import transformers as hf

FAMILIES = {
    "qwen2_vl": ("Qwen2VLModel", "Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": ("Qwen2_5_VLModel", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("Qwen3VLModel", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("Qwen3VLMoeModel", "Qwen3VLMoeForConditionalGeneration"),
}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": dict(embed_dim=32),
    "qwen2_5_vl": dict(out_hidden_size=32, fullatt_block_indexes=[1], window_size=56),
    "qwen3_vl": dict(out_hidden_size=32, deepstack_visual_indexes=[0], num_position_embeddings=16),
}
VISION["qwen3_vl_moe"] = VISION["qwen3_vl"]
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
IMAGE, VIDEO, START, END, PAD = 3, 4, 5, 6, 0


def folder() -> Path:
    place = os.environ.get("TRANSFORMERS_TESTS", "")
    if not place or importlib.util.find_spec("parameterized") is None:
        pytest.skip(
            "TRANSFORMERS_TESTS must name the folder tests of the source of transformers "
            f"{transformers.__version__}, and `parameterized` must be installed",
            allow_module_level=True,
        )
    return Path(place)


class _Missing:
    """For mixins whose folders a source distribution leaves out."""


def load(tests: Path) -> types.ModuleType:
    """tests/test_modeling_common.py, as part of a package that is not called like ours."""
    package = types.ModuleType("transformers_tests")
    package.__path__ = [str(tests)]
    sys.modules["transformers_tests"] = package
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        if not (tests / (name.replace(".", "/") + ".py")).exists():
            missing = types.ModuleType(f"transformers_tests.{name}")
            setattr(missing, mixin, type(mixin, (_Missing,), {}))
            sys.modules[f"transformers_tests.{name.split('.')[0]}"] = types.ModuleType("missing")
            sys.modules[f"transformers_tests.{name}"] = missing
    with unittest.mock.patch.object(pytest.mark, "_config", None):  # marks that are not ours
        return importlib.import_module("transformers_tests.test_modeling_common")


COMMON = load(folder())


class Tester:
    """What the mixins ask for: small models, and a batch of three with an image each."""

    batch_size, seq_length, is_training = 3, 12, True
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 32
    patch_size, image_size = 14, 56

    def __init__(self, family: str) -> None:
        self.family = family

    def get_config(self) -> Any:
        text: dict[str, Any] = dict(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4),
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=PAD,
        )
        if self.family.startswith("qwen3"):
            text |= dict(head_dim=8)
            text |= EXPERTS if self.family == "qwen3_vl_moe" else {}
        vision: dict[str, Any] = dict(depth=2, hidden_size=32, num_heads=4, intermediate_size=37)
        vision |= dict(patch_size=self.patch_size) | VISION[self.family]
        ids = dict(image_token_id=IMAGE, video_token_id=VIDEO)
        ids |= dict(vision_start_token_id=START, vision_end_token_id=END)
        name = FAMILIES[self.family][0].replace("Model", "Config")
        return getattr(transformers, name)(text_config=text, vision_config=vision, **ids)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(7, 99, shape)
        ids[:, 1], ids[:, 2:6], ids[:, 6] = START, IMAGE, END
        return self.get_config(), dict(
            input_ids=ids,
            attention_mask=torch.ones(shape, dtype=torch.long),
            mm_token_type_ids=(ids == IMAGE).int(),
            pixel_values=torch.rand(16 * self.batch_size, 3 * 2 * self.patch_size**2),
            image_grid_thw=torch.tensor([[1, 4, 4]] * self.batch_size),
        )


@functools.cache
def case(family: str) -> type[unittest.TestCase]:
    mixins = (COMMON.ModelTesterMixin, COMMON.GenerationTesterMixin)
    classes = tuple(getattr(transformers, name) for name in FAMILIES[family])
    own = dict(
        all_model_classes=classes,
        _is_composite=True,
        model_split_percents=[0.7, 0.9],
        setUp=lambda self: setattr(self, "model_tester", Tester(family)),
    )
    return type(family, (*mixins, unittest.TestCase), own)


@contextmanager
def kernels(family: str) -> Iterator[None]:
    """Call `enable` on every model of the family as it is made."""
    classes = [getattr(transformers, name) for name in FAMILIES[family]]
    depth = [0]

    def enabling(init: Any) -> Any:
        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            depth[0] += 1
            try:
                init(self, *args, **kwargs)
            finally:
                depth[0] -= 1
            if not depth[0]:  # not the model inside of another
                hf.enable(self)

        return __init__

    with pytest.MonkeyPatch.context() as patch:
        for cls in classes:
            patch.setattr(cls, "__init__", enabling(cls.__init__))
        yield


def run(family: str, name: str) -> tuple[str, str]:
    """passed, skipped or failed, and why."""
    torch.manual_seed(0)
    result = unittest.TestResult()
    case(family)(name).run(result)
    for _, text in [*result.failures, *result.errors]:
        return "failed", text
    for _, text in result.skipped:
        return "skipped", text
    return "passed", ""


NAMES = sorted(n for n in dir(case("qwen2_vl")) if n.startswith("test_"))
NAMES = [name for name in NAMES if callable(getattr(case("qwen2_vl"), name))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_of_transformers(family: str, name: str) -> None:
    verdict, why = run(family, name)
    if verdict != "passed":
        pytest.skip(f"{verdict} without the kernels: {why.strip().splitlines()[-1]}")
    with kernels(family):
        verdict, why = run(family, name)
    assert verdict == "passed", why
