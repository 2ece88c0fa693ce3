"""Processes with time limits, and what came of them, written down as it comes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PASS, FAIL, HANG, SKIP = "PASS", "FAIL", "HANG", "SKIP"


class Results:
    """A folder of results: log.txt, with all output, and outcomes.jsonl. Both are valid whenever
    the run is cut off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        self._lock = threading.Lock()

    def say(self, text: str, aloud: bool = True) -> None:
        """To the log, and aloud to the terminal."""
        with self._lock, self.log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
            if aloud:
                print(text, flush=True)

    def add(self, step: str, name: str, outcome: str, seconds: float, detail: str = "") -> None:
        text = f"{outcome}  {step}: {name}  {seconds:.1f} s" + (f"  {detail}" if detail else "")
        self.say(text, aloud=outcome != PASS or step != "accuracy")  # hundreds of tests
        row = {"step": step, "name": name, "outcome": outcome, "seconds": round(seconds, 2)}
        with self._lock, (self.folder / "outcomes.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "detail": detail}) + "\n")


def start(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """In a process group of its own; its output goes to the end of `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of its group. One that waits for a GPU may not die: it is left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def run(command: Sequence[str], limit: float, log: Path, **environment: str) -> int | None:
    """Its exit status, or None where it was killed after `limit` seconds."""
    process = start(command, log, **environment)
    try:
        return process.wait(max(limit, 0.1))
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def text_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").strip()


def last_line(log: Path) -> str:
    """What a failed process said last."""
    return text_of(log).rpartition("\n")[2].strip()[:300]


def ask(command: Sequence[str], limit: float) -> Any:
    """The JSON that a process prints on a line of its own. RuntimeError where it doesn't."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        status = run(command, limit, log)
        if status is None:
            raise RuntimeError(f"no answer within {limit:.0f} s from {shlex.join(command)[:100]}")
        for line in [] if status else reversed(text_of(log).splitlines()):
            with contextlib.suppress(ValueError):  # a warning
                return json.loads(line)
        raise RuntimeError(last_line(log))


def run_each(
    results: Results,
    step: str,
    commands: dict[str, Sequence[str]],
    *,
    until: float,
    limit: float = math.inf,
    at_once: int = 1,
    aloud: bool = False,
    **environment: str,
) -> bool:
    """Runs each command in a process of its own, for at most `limit` seconds and not after `until`
    (by time.monotonic). Whether all ended well."""

    def one(name: str) -> bool:
        began = time.monotonic()
        allowed = min(limit, until - began)
        if allowed < 1:
            results.add(step, name, SKIP, 0.0, "no time was left")
            return False
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            status = run(commands[name], allowed, log, **environment)
            results.say(f"---- {step}: {name}\n{text_of(log)}", aloud)
            detail = "" if status == 0 else last_line(log)
        outcome = HANG if status is None else FAIL if status else PASS
        if status is None and allowed < limit:
            outcome, detail = SKIP, "cut off: no time was left"
        results.add(step, name, outcome, time.monotonic() - began, detail)
        return status == 0

    with ThreadPoolExecutor(at_once) as pool:
        return all(list(pool.map(one, commands)))


def step_of(results: Results, name: str, limit: float, work: Callable[[float], bool | str]) -> bool:
    """One step: work(until) is to return by then whether all went well, or why it was left out. Its
    own errors are its failure, and never the next step's."""
    results.say(f"\n==== {name} (at most {limit:.0f} s)")
    began, detail = time.monotonic(), ""
    try:
        done = work(began + limit)
        outcome = SKIP if isinstance(done, str) else PASS if done else FAIL
        detail = done if isinstance(done, str) else ""
    except Exception as error:
        outcome, detail = FAIL, f"{type(error).__name__}: {error}"[:300]
    results.add("step", name, outcome, time.monotonic() - began, detail)
    return outcome == PASS
