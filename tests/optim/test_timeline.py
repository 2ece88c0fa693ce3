"""benchmarks.timeline on the stand-in for a GPU: what overlaps does, and is drawn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import timeline


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("timeline")
    assert timeline.main(["--microbatches=2", f"--output={folder}"]) == 0
    (path,) = folder.glob("*.json")
    pictures = sorted(p.name for p in folder.glob("*.png"))
    assert pictures == [f"{path.stem}-{name}.png" for name in ("clipped", "in-backward")]
    return json.loads(path.read_text())


def spans(step: dict[str, Any], name: str) -> list[timeline.Span]:
    return [timeline.Span(**s) for s in step["spans"] if s["name"] == name]


def test_what_overlaps(actual: dict[str, Any]):
    for step in actual["steps"]:
        forward, backward = spans(step, "forward"), spans(step, "backward")
        d2h, host, h2d = (spans(step, name) for name in ("d2h", "host", "h2d"))
        # A bucket of 1 MiB is two weights, which go up together.
        assert len(forward) == len(backward) == 2 and (len(d2h), len(h2d)) == (12, 6)
        # Of the last backward pass only: the first one's gradients are added to.
        last = backward[-1]
        assert last.start < d2h[0].start < d2h[0].end < last.end
        # A bucket's bar begins when the host begins to wait for its gradients.
        assert d2h[0].end <= host[0].end and host[0].start < h2d[0].start
        early = sum(span.start < last.end for span in host)
        assert early >= 3 if step["name"] == "in backward" else early == 0
        seconds = step["seconds"]
        # 6 MB each way at 2 GB/s.
        assert seconds["d2h"] >= 0.003 and seconds["h2d"] >= 0.003
        assert 0 < seconds["d2h during passes"] <= seconds["d2h"]
        assert (seconds["host during passes"] > 0) == (early > 0)


def test_memory_beside_theory(actual: dict[str, Any]):
    n = 12 * 512 * 512
    assert [(row["fraction"], row["bytes"]) for row in actual["memory"]] == [
        (0.0, 12 * n),
        (0.5, 6 * n),
        (1.0, 0),
    ]
    assert all(row["theory"] == row["bytes"] for row in actual["memory"])
