"""What is built: of window attention two instances, of tiled attention one. All take minutes."""

from __future__ import annotations

from tests.ptxsim.attention_cases import keep_instances
from tests.ptxsim.planted import keep_head_dim

#: (head_dim, keys) of window attention, and the head_dim of tiled attention.
INSTANCES = ((80, 64), (64, 128))
TILED = 80


def _edits(instances: tuple[tuple[int, int], ...]) -> dict:
    return {
        "attention_window.cuh": lambda code: keep_instances(code, instances),
        "attention_tiles.cuh": lambda code: keep_head_dim(code, TILED),
    }


EDIT = _edits(INSTANCES)
#: With the sanitizers, whose code takes longest to compile.
EDIT_ONE = _edits(INSTANCES[:1])
SOURCES = (
    "embedding.cu",
    "attention_window.cu",
    "attention_window_vision.cu",
    "attention_flash.cu",
    "attention_flash_backward.cu",
    "attention_flash_hopper.cu",
    "attention_flash_hopper_backward.cu",
    "attention_flash_vision.cu",
    "attention_flash_vision_hopper.cu",
)
