"""The files by which Megatron-Energon knows a folder of shards, as `energon prepare` writes them.

`shard-*.tar.idx` hold where each sample begins (uint64, little-endian, and the end); `.nv-meta`
holds the shards' sample counts, their split, the dataset's class and a database of all members.
Nothing of energon is needed to write them. A test opens the result with energon itself and
compares it with what its own `prepare` makes.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import uuid
from pathlib import Path
from typing import Any

META_FOLDER = ".nv-meta"
ENERGON_VERSION = "7.4.1"  # whose layout this is

_SCHEMA = """
CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE,
  sample_index INTEGER NOT NULL, byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT,
  content_byte_offset INTEGER, content_byte_size INTEGER);
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq
  ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full
  ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""
_DATASET = """\
__module__: megatron.energon
__class__: CrudeWebdataset
subflavors:
  format: vlmtrain
"""
# `energon info` asks every dataset for a type of sample, which the class above does not take.
_INFO = (
    _DATASET
    + """\
sample_type:
  __module__: megatron.energon
  __class__: CrudeSample
"""
)


def write_energon(folder: Path, parts: list[dict[str, Any]]) -> None:
    """Write energon's files beside the shards.

    Args:
        folder: holds the shards.
        parts: of each shard its `name`, `end` (where its last sample ends) and `lines`, each with
            `key`, `json` ([offset, size] of the member's bytes) and `media` (`names`, `parts`).
    """
    meta = folder / META_FOLDER
    meta.mkdir(exist_ok=True)
    samples: list[tuple[Any, ...]] = []
    members: list[tuple[Any, ...]] = []
    for shard, part in enumerate(parts):
        # A member's header is the 512 bytes before its content.
        starts = [line["json"][0] - 512 for line in part["lines"]] + [part["end"]]
        (folder / part["name"]).with_suffix(".tar.idx").write_bytes(
            struct.pack(f"<{len(starts)}Q", *starts)
        )
        for place, line in enumerate(part["lines"]):
            size = starts[place + 1] - starts[place]
            samples.append((shard, line["key"], place, starts[place], size))
            members.append((shard, place, "json", *line["json"]))
            for media in line["media"]:
                for name, content in zip(media["names"], media["parts"], strict=True):
                    members.append((shard, place, name.split(".", 1)[1], *content))
    database = meta / "index.sqlite"
    temporary = meta / "index.sqlite.tmp"
    temporary.unlink(missing_ok=True)
    with sqlite3.connect(temporary) as connection:
        connection.executescript(_SCHEMA)
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", samples)
        connection.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", members)
    connection.close()
    os.replace(temporary, database)
    counts = {part["name"]: len(part["lines"]) for part in parts}
    info = {"energon_version": ENERGON_VERSION, "shard_counts": counts}
    (meta / ".info.json").write_text(json.dumps(info, indent=2) + "\n")
    names = json.dumps(list(counts))  # JSON is YAML
    (meta / "split.yaml").write_text(
        f"exclude: []\nsplit_parts:\n  train: {names}\n  val: []\n  test: []\n"
    )
    (meta / "dataset.yaml").write_text(_DATASET)
    (meta / "info.yaml").write_text(_INFO)
    # Names the contents, so that the same build has the same name.
    identity = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([counts, [s[1:] for s in samples]]))
    (meta / "index.uuid").write_text(str(identity))
