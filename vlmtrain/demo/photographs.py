"""The demo's photographs: those that the wheels of scikit-image and scikit-learn carry.

Nothing is downloaded. The files are read from the installed packages without importing them
(importing scikit-learn takes seconds), made small, and written as JPEG beside conversations.json.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vlmtrain.core.errors import UserError
from vlmtrain.core.files import is_file

MARK = "<image>"  # in a text of the conversations: a photograph stands here
CONVERSATIONS = Path(__file__).with_name("conversations.json")

# 140 px is 5 visual tokens of 28 px: 15 to 25 tokens a photograph, and more than one attention
# window (112 px), so that the demo exercises windowed and full attention of Qwen2.5-VL. Of
# Qwen3-VL's 32 px it is 4 tokens: 8 to 16 a photograph.
LONG_SIDE = 140


@dataclass(frozen=True)
class Photograph:
    """A photograph inside an installed package."""

    name: str  # the exported file is <name>.jpg
    package: str  # the package to import
    distribution: str  # the package to install
    file: str  # below the package's folder

    def path(self) -> Path:
        """Where the file lies on this machine.

        Raises:
            UserError: the package is not installed, or its wheel does not carry the file.
        """
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"the demo's photograph {self.name} comes with {self.distribution}, which is not "
                f"installed: pip install {self.distribution}"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / self.file
        if not is_file(path):
            raise UserError(
                f"{path} is missing: the installed {self.distribution} does not carry the demo's "
                f"photograph {self.name}; install the version that constraints.txt names"
            )
        return path


def _skimage(name: str, file: str) -> Photograph:
    return Photograph(name, "skimage", "scikit-image", f"data/{file}")


def _sklearn(name: str, file: str) -> Photograph:
    return Photograph(name, "sklearn", "scikit-learn", f"datasets/images/{file}")


PHOTOGRAPHS = (
    _skimage("astronaut", "astronaut.png"),
    _skimage("brick", "brick.png"),
    _skimage("camera", "camera.png"),
    _skimage("chelsea", "chelsea.png"),
    _sklearn("china", "china.jpg"),
    _skimage("coffee", "coffee.png"),
    _skimage("coins", "coins.png"),
    _sklearn("flower", "flower.jpg"),
    _skimage("grass", "grass.png"),
    _skimage("gravel", "gravel.png"),
    _skimage("hubble_deep_field", "hubble_deep_field.jpg"),
    _skimage("moon", "moon.png"),
    _skimage("motorcycle", "motorcycle_left.png"),
    _skimage("page", "page.png"),
    _skimage("retina", "retina.jpg"),
    _skimage("rocket", "rocket.jpg"),
    _skimage("text", "text.png"),
)


def read_conversations() -> list[dict[str, Any]]:
    """The ShareGPT samples: `id`, `conversations`, and `image` (a name or a list)."""
    samples: list[dict[str, Any]] = json.loads(CONVERSATIONS.read_text(encoding="utf-8"))
    return samples


def image_names(sample: dict[str, Any]) -> list[str]:
    """File names of a sample's photographs, in the order of its `<image>` marks."""
    image = sample.get("image", [])
    return [image] if isinstance(image, str) else list(image)


def export(folder: Path, long_side: int = LONG_SIDE) -> Path:
    """Write every photograph as `<name>.jpg` (RGB, long side at most `long_side` pixels) and
    conversations.json to `folder`; returns the path of the JSON.

    Raises:
        UserError: a package of the `demo` extra is missing; names it and how to install it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for photograph in PHOTOGRAPHS:
        with Image.open(photograph.path()) as source:
            picture = source.convert("RGB")
        picture.thumbnail((long_side, long_side), Image.Resampling.LANCZOS)
        picture.save(folder / f"{photograph.name}.jpg", quality=92)
    return Path(shutil.copyfile(CONVERSATIONS, folder / CONVERSATIONS.name))
