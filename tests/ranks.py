"""Run a script as several ranks on this machine, as a launcher would."""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
MEMORY = 32 << 30  # address space; a rank uses less than 1 GB of memory


@dataclass
class Rank:
    """One ended rank."""

    code: int
    output: str


def free_port() -> int:
    """A port that no outgoing connection can take meanwhile: below the ephemeral range."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def run_ranks(
    arguments: Sequence[str], size: int, *, timeout: float = 300, env: dict[str, str] | None = None
) -> list[Rank]:
    """`python ARGUMENTS` as `size` ranks.

    Waits for all; kills what is left after `timeout`, or 30 s after a rank has failed.
    """
    port = str(free_port())
    processes = []
    for rank in range(size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", *arguments],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=_limit_memory,
            )
        )
    end = time.monotonic() + timeout
    threading.Thread(target=_shorten, args=(processes, end), daemon=True).start()
    ranks = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\n[killed after {timeout} s]"
        ranks.append(Rank(process.returncode, output))
    return ranks


def run_workers(
    arguments: Sequence[str], size: int, *, timeout: float = 300, env: dict[str, str] | None = None
) -> list[Rank]:
    """The same; every rank must end well."""
    ranks = run_ranks(arguments, size, timeout=timeout, env=env)
    assert all(r.code == 0 for r in ranks), "\n\n".join(r.output[-3000:] for r in ranks)
    return ranks


def run_cases(module: str, cases: Any, size: int, folder: Path, timeout: float = 600) -> Any:
    """What rank 0 of a module that calls `worker.serve` makes of `cases`."""
    path = folder / f"cases{size}-{len(list(folder.glob('cases*.pt')))}.pt"
    torch.save(cases, path)
    run_workers(["-m", module, str(path)], size, timeout=timeout)
    return torch.load(path.with_suffix(".out"), weights_only=False)


def _limit_memory() -> None:
    """A rank that runs away fails alone instead of taking the machine with it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _shorten(processes: list[subprocess.Popen], end: float) -> None:
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes):
            time.sleep(30)
            break
        time.sleep(0.2)
    for process in processes:
        if process.poll() is None:
            process.kill()


def run_cli(
    arguments: Sequence[str], *, timeout: float = 300, env: dict[str, str] | None = None
) -> Rank:
    """`python -m vlmtrain ARGUMENTS` as a user types it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "vlmtrain", *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return Rank(done.returncode, done.stdout)
