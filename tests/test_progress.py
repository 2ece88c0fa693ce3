"""What long work says of itself in a log, and that it says nothing too often."""

from __future__ import annotations

import pytest

from vlmtrain.core import progress


@pytest.mark.parametrize(
    ("done", "total", "seconds", "said"),
    [
        (300, 1200, 60.0, "scan: 300 of 1,200 samples (25%), 0:03:00 left"),
        (1, 100_001, 1.0, "scan: 1 of 100,001 samples (0%), 1 day, 3:46:40 left"),
        (1200, 1200, 60.0, "scan: 1,200 of 1,200 samples (100%), 0:00:00 left"),
        (4500, 0, 3.0, "scan: 4,500 samples, 1,500 a second"),
    ],
)
def test_a_line(done, total, seconds, said):
    assert progress.describe("scan", "samples", done, total, seconds) == said


def test_lines_of_a_log(monkeypatch, capsys):
    """One a minute, on the one rank that shows them."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    for shown in (True, False):
        now = 0.0
        with progress.progress("build", "samples", shown=shown) as update:
            for done in range(150):
                update(done, 150)
                now += 1.0
        printed = capsys.readouterr()
        assert printed.out == ""
        said = printed.err.splitlines()
        if shown:
            assert said == [
                "build: 60 of 150 samples (40%), 0:01:30 left",
                "build: 120 of 150 samples (80%), 0:00:30 left",
            ]
        else:
            assert said == []


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.progress("convert", "MB") as update:
        update(3, 4)
    assert "3/4" in capsys.readouterr().err
