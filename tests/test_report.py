"""`vlmtrain report`: one file, no network, every figure from the run's own record."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vlmtrain import cli
from vlmtrain.core.errors import UserError
from vlmtrain.telemetry import charts, report
from vlmtrain.telemetry.drift import COEFFICIENTS
from vlmtrain.telemetry.ledger import ROWS


def fake_run(folder: Path, steps: int = 40, plan: bool = True) -> Path:
    """A run's record with known figures."""
    folder.mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        seconds = 0.5 if step > 2 else 5.0
        shares = (0.5, 0.05, 0.2, 0.1, 0.02, 0.03, 0.06, 0.0, 0.0, 0.04)
        rows.append(
            {
                "step": step,
                "loss": 6.0 / step,
                "grad_norm": 1.0,
                "lr": 1e-4,
                "tokens": 900,
                "padding_share": 0.1,
                "step_seconds": seconds,
                "tokens_per_second_per_gpu": 450 / seconds,
                "samples_per_second": 12 / seconds,
                "samples": 12,
                "images": 7,
                "videos": 1,
                "mfu": 0.4 if plan else None,
                "hfu": 0.5 if plan else None,
                "waterfall": {
                    name: share * seconds for name, share in zip(ROWS, shares, strict=True)
                },
                "replica_balance": 1.1,
                "stage_balance": 1.2,
                "rank_balance": 1.01,
                "microbatch_balance": 1.3,
                "peak_memory_gb": 40.0,
                "memory_gb": [40.0, 30.0],
                **({"predicted_seconds": 0.49} if step > 10 else {}),
            }
        )
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"step": 41, "los')  # was killed
    memory = {"states": 20e9, "activations": 10e9, "transient": 1e9, "batch": 1e9, "host": 0.0}
    facts = {
        "family": "qwen2_vl",
        "device": "gpu",
        "config": {"model": "a<b>&c", "train": {"steps": steps}},
        "processes": 4,
        "pipeline": 2,
        "replicas": 2,
        "layout": "tensor 1, pipeline 2, data 2",
        "peak_flops": 989e12 if plan else None,
        "peak": "989 TFLOP/s, dense bf16 of h100",
        "fit": {**dict.fromkeys(COEFFICIENTS, 2e-5), "patches": 0.0},
        "plan": {
            "gpu": "h100",
            "step_seconds": 0.4,
            "uncertainty": 0.15,
            "tokens_per_second_per_gpu": 1100.0,
            "mfu": 0.48,
            "bubble": 0.1,
            "memory_bytes": [memory, memory],
            "waterfall": {
                "compute": 0.2,
                "tensor": 0.05,
                "bubble": 0.05,
                "imbalance": 0.04,
                "gradients": 0.03,
                "optimizer": 0.03,
            },
        }
        if plan
        else None,
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


class _Page(HTMLParser):
    """Tags that open and close, and everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.fetched += [v for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag in ("script", "link", "img", "iframe"):
            self.fetched.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.mark.parametrize("plan", [True, False])
def test_the_page_is_whole_and_needs_nothing_else(
    plan: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run(tmp_path / "my-run", plan=plan)
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    html = (run / "report.html").read_text(encoding="utf-8")
    parsed = _Page()
    parsed.feed(html)
    assert parsed.open == [] and parsed.fetched == []
    units = ("step", "token", "pair of tokens", "pair of patches", "target token")
    assert " + ".join(f"2.00e-05 s a {unit}" for unit in units) + "." in parsed.text
    assert not re.search(r"https?://|@import|url\(", html)
    assert "a<b>" not in html and "a<b>&c" in parsed.text
    for title in ("Loss", "Throughput", "Where a step's seconds go", "Balance", "Memory"):
        assert title in parsed.text
    assert ("HFU 50.0%" in parsed.text) == plan
    assert ("no peak for this device" in parsed.text) != plan
    assert ("Planned for h100, within 15%" in parsed.text) == plan
    assert "40 steps in 29 s" in " ".join(parsed.text.split())
    assert "nan" not in html.lower().replace("tenan", "")


def test_figures_are_those_of_the_record(tmp_path: Path) -> None:
    rows, facts = report.read_run(fake_run(tmp_path / "run"))
    assert len(rows) == 40
    mean = report.mean_waterfall(report.steady(rows))
    assert mean == pytest.approx(
        dict(zip(ROWS, (0.25, 0.025, 0.1, 0.05, 0.01, 0.015, 0.03, 0.0, 0.0, 0.02), strict=True))
    )
    html = report.render(rows, facts, "run")
    table = re.search(r"<table><tr><td><i.*?</table>", html, re.S)
    assert table is not None
    cells = re.findall(r"</i>([a-z ]+)</td><td>(.*?)</td><td>(.*?)</td>", table.group())
    assert [name.replace(" ", "_") for name, _, _ in cells] == list(ROWS)
    assert cells[0][1:] == ("0.25 s", "50.0%") and cells[5][1:] == ("15 ms", "3.0%")
    tiles = dict(re.findall(r"<b>([^<]*)</b><span>[^<]*</span><small>([^<]*)</small>", html))
    assert tiles == {
        "40": "in 29 s",  # 2 of 5 s, 38 of 0.5
        "0.1500": "from 6.0000",
        "900": "median, padding left out",
        "40.0%": "HFU 50.0%",
        "0.5 s": "10.0% padding",
        "36,000": "480 samples",
        "280": "40 videos",
    }
    for share in ("50.0%", "62.5%"):  # measured, and planned with communication in it
        assert f"compute: 0.25 s, {share}" in html
    # planned 0.4 s, measured 0.5 s
    assert re.search(r"<td>step</td><td>0.4 s</td><td>0.5 s</td>\s*<td>\+25%</td>", html)
    # bars are as long as what they stand for: 40 GB measured, 32 GB planned
    widths = [
        sum(float(w) for w in re.findall(r'<rect x="[\d.]+" y="\d+" width="([\d.]+)"', bar))
        for bar in re.findall(r"rank 0 measured.*?planned.*?rank 1", html, re.S)
    ]
    assert len(widths) == 1
    scale = (charts.WIDTH - 118 - 76) / 40
    assert widths[0] == pytest.approx((40 + 32) * scale, abs=0.5)


def test_a_start_on_fewer_stages_has_no_step_yet(tmp_path: Path) -> None:
    """Its plan has other ranks than the steps before it."""
    run = fake_run(tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    facts["plan"]["memory_bytes"] = facts["plan"]["memory_bytes"][:1]
    (run / "run.json").write_text(json.dumps(facts))
    page = report.render(*report.read_run(run), "run")
    assert "rank 1 measured" in page


@pytest.mark.parametrize("steps", [10, 40])
def test_steps_before_the_peak_was_known(steps: int, tmp_path: Path) -> None:
    """A run that went on where its GPU is in the planner's table."""
    run = fake_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    for row in rows[:steps]:
        row["mfu"] = row["hfu"] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report.write_report(run).read_text()
    assert ("<td>MFU</td><td>48.0%</td><td>40.0%</td>" in page) == (steps < 40)


def test_refusals_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path / "runs" / "first")
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (fake_run(tmp_path / "older plan") / "run.json").write_text("{}")
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "metrics.jsonl").write_text("")
    for name, message in (
        ("nowhere", "nowhere holds no metrics.jsonl; name the --output of vlmtrain train"),
        ("empty", "empty holds no metrics.jsonl"),
        ("runs", "did you mean"),
        ("old", "line 1 has no waterfall: it was written by an older version"),
        ("older plan", "run.json names no device: it was written by an older version"),
        ("young", "has no steps yet"),
    ):
        assert cli.main(["report", str(tmp_path / name)]) == 1
        text = capsys.readouterr().err
        assert message in text and text.count("\n") == 1


def test_a_full_disk_leaves_the_page_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_run(tmp_path / "run")
    page = report.write_report(folder)
    before, files = page.read_text(), sorted(folder.iterdir())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() * 2)
    with pytest.raises(UserError, match="report.html can't be written: No space left on device"):
        report.write_report(folder)
    assert page.read_text() == before and sorted(folder.iterdir()) == files


# --- charts -----------------------------------------------------------------------------------


def test_points_stand_where_their_values_are() -> None:
    svg = charts.lines([0, 10], [charts.Series("x", "red", [0.0, 2.0])])
    points = re.search(r'points="([\d.]+),([\d.]+) ([\d.]+),([\d.]+)"', svg)
    assert points is not None
    x0, y0, x1, y1 = (float(v) for v in points.groups())
    assert (x0, x1) == (58, charts.WIDTH - 14)
    assert y0 == charts.HEIGHT - 26  # 0 stands on the axis
    assert y1 == pytest.approx(12 + 0.08 / 2.08 * (charts.HEIGHT - 12 - 26), abs=0.1)


def test_bars_stand_end_to_end() -> None:
    parts = [("a", "red", 3.0), ("b & c", "blue", 1.0), ("none", "grey", 0.0)]
    svg = charts.bars([("row", parts)], "a <b>", "GB")
    rects = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', svg)
    assert len(rects) == 2
    (x0, w0), (x1, w1) = ((float(x), float(w)) for x, w in rects)
    assert x1 == pytest.approx(x0 + w0, abs=0.2) and w0 == pytest.approx(3 * w1, abs=0.2)
    assert "b &amp; c: 1 GB, 25.0%" in svg and "a &lt;b&gt;" in svg and "4 GB" in svg
    assert "a &lt;b&gt;" in charts.legend([("a <b>", "red")])


def test_ticks_are_round() -> None:
    assert charts.ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert charts.ticks(0, 0.013) == pytest.approx([0, 0.005, 0.01])
    assert charts.ticks(3, 3) == [3]


def test_many_points_are_averaged_and_none_are_left_out() -> None:
    values: list[float | None] = [float(i) for i in range(1000)]
    values[3] = None
    thinned = charts.thin(list(range(1000)), values)
    assert len(thinned) == 400
    assert sum(y for _, y in thinned) / 400 == pytest.approx(499.5, rel=0.01)
    assert charts.thin([1, 2], [None, 5.0]) == [(2, 5.0)]
    assert charts.lines([1], [charts.Series("x", "red", [None])]).startswith("<p")


def test_smoothing_starts_at_the_first_value() -> None:
    assert charts.smooth([4.0, 4.0, 4.0], 10) == pytest.approx([4, 4, 4])
    assert charts.smooth([4.0, 0.0], 2) == pytest.approx([4, 4 / 3])


def test_numbers_for_people() -> None:
    assert [charts.number(v) for v in (0, 0.01234, 12.3, 123.4, 12345, 1.5e6)] == [
        "0",
        "0.0123",
        "12.3",
        "123",
        "12,345",
        "1.5M",
    ]
    assert [charts.seconds(v) for v in (0.0123, 0.0999, 2.5)] == ["12.3 ms", "0.0999 s", "2.5 s"]


def test_a_mean_goes_on_behind_what_is_no_number() -> None:
    values = [4.0, 2.0, math.nan, 2.0, math.inf, 2.0]
    finite = charts.smooth([v for v in values if math.isfinite(v)], 3)
    got = charts.smooth(values, 3)
    assert [got[i] for i in (0, 1, 3, 5)] == finite
    assert got[2] == got[1] and got[4] == got[3]
    assert math.isnan(charts.smooth([math.nan, 1.0], 3)[0])
