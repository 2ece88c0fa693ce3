"""Runs a module of this folder on a list of cases, all in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def results(module: str, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The JSON line that the module prints for each case."""
    path = folder / "cases.json"
    path.write_text(json.dumps(cases), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.plan.{module}", str(path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
