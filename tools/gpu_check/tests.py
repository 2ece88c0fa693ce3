"""Tests in several processes, a time limit each: one that hangs or traps takes no other with it."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .processes import FAIL, HANG, PASS, SKIP, Results, end, last_line, run, start, text_of

OUTCOMES = {"passed": PASS, "failed": FAIL, "skipped": SKIP}
#: Seconds for a process to begin its first test.
STARTUP = 90.0
LATE = "no time was left"


def pytest() -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def collect(paths: Sequence[str]) -> list[str]:
    """The tests' ids. Raises RuntimeError where pytest can't tell."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "log"
        status = run([*pytest(), "--collect-only", "-o", "addopts=", *paths], STARTUP, found)
        text = text_of(found)
    ids = re.findall(r"^\S+\.py::.*$", text, re.M)
    if status or not ids:
        raise RuntimeError(f"pytest collects nothing: {text[-200:]}")
    return ids


class Runner:
    """Runs tests and adds their outcomes to `results` under `step`."""

    def __init__(
        self,
        results: Results,
        step: str,
        *,
        limit: float,
        until: float,
        processes: int,
        **environment: str,
    ) -> None:
        self.results, self.step, self.environment = results, step, environment
        self.limit, self.until, self.processes = limit, until, processes
        self.failed = 0
        self._lock = threading.Lock()

    def run(self, ids: list[str]) -> bool:
        """Whether all passed or were skipped by themselves, in time."""
        with ThreadPoolExecutor(self.processes) as pool:
            list(pool.map(self._share, [ids[i :: self.processes] for i in range(self.processes)]))
        return not self.failed

    def _add(self, test: str, outcome: str, seconds: float, detail: str = "") -> None:
        with self._lock:
            self.failed += outcome in (FAIL, HANG) or detail == LATE
        self.results.add(self.step, test, outcome, seconds, detail)

    def _share(self, ids: list[str]) -> None:
        """A process after the other until all are done. A failure ends one (-x): a kernel that
        trapped takes the CUDA context with it."""
        while ids:
            if time.monotonic() > self.until:
                for test in ids:
                    self._add(test, SKIP, 0.0, LATE)
                return
            before = len(ids)
            with tempfile.TemporaryDirectory() as folder:
                said = self._process(ids, Path(folder))
            if len(ids) == before and said != LATE:
                self._add(ids.pop(0), FAIL, 0.0, said)

    def _process(self, ids: list[str], folder: Path) -> str:
        """One process of pytest; takes the tests that ended, or were ended, from `ids`."""
        events, log = folder / "events", folder / "log"
        events.touch()
        command = [*pytest(), "-x", "-p", "tools.gpu_check.events", *ids]
        process = start(command, log, GPU_CHECK_EVENTS=str(events), **self.environment)
        current, since, lines = "", time.monotonic(), tail(events)
        try:
            while True:
                ended = process.poll() is not None
                for event in lines:
                    if event is None:
                        break
                    test = event["test"]
                    if event["outcome"] == "started":
                        current, since = test, time.monotonic()
                    elif test in ids:
                        ids.remove(test)
                        outcome, seconds = OUTCOMES[event["outcome"]], time.monotonic() - since
                        self._add(test, outcome, seconds, event["detail"][:300])
                        current, since = "", time.monotonic()
                    elif event["outcome"] == "failed":  # behind its call
                        self._add(f"{test} (teardown)", FAIL, 0.0, event["detail"][:300])
                if ended:
                    break
                now = time.monotonic()
                if now > self.until:
                    return LATE
                if now - since > (self.limit if current else STARTUP):
                    if current:
                        ids.remove(current)
                        self._add(current, HANG, now - since)
                    return "pytest did not begin"
                time.sleep(0.05)
        finally:
            end(process)
            self.results.say(text_of(log), aloud=False)
        if current:
            ids.remove(current)
            status = process.returncode
            self._add(current, FAIL, time.monotonic() - since, f"its process ended with {status}")
        return last_line(log)


def tail(path: Path) -> Iterator[dict | None]:
    """The JSON lines of a file that grows; None where there is no whole one yet."""
    with path.open(encoding="utf-8") as file:
        rest = ""
        while True:
            rest += file.readline()
            if rest.endswith("\n"):
                yield json.loads(rest)
                rest = ""
            else:
                yield None
