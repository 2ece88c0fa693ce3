"""A data set of everything that makes packs differ: text alone, one image as large as they get, a
long video, many small images. No pack of it is like another."""

from __future__ import annotations

import random
from pathlib import Path

from tests.data.helpers import conversation, save_image, write_json


def write(folder: Path, seed: int) -> Path:
    """Conversations and their files; the texts, sizes and order follow from the seed."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(rng.choice(("cup", "cat", "red", "tall", "seen")) for _ in range(count))

    def image(name: str, width: int, height: int) -> str:
        return str(save_image(folder / f"{name}.png", width, height, rng.randrange(100)))

    size = 28 * rng.randint(18, 26)
    frames = [image("frame", 112, 84)] * (2 * rng.randint(3, 5))
    small = [image(f"small-{i}", 28 * rng.randint(2, 5), 28 * rng.randint(2, 5)) for i in range(20)]
    records = [
        conversation("<image>\nWhat?", words(20), image=[image("large", size, size - 56)]),
        conversation("<video>\nWhat?", words(20), video=[{"frames": frames, "fps": 2}]),
        conversation("<image>" * len(small) + "\nWhat?", words(30), image=small),
        *(conversation(words(rng.randint(50, 400)), words(100)) for _ in range(12)),
        *(conversation("<image>\nWhat?", words(50), image=[rng.choice(small)]) for _ in range(6)),
    ]
    rng.shuffle(records)
    for number, record in enumerate(records):
        record["id"] = f"mixed-{number}"
    return write_json(folder / "mixed.json", records)
