"""How processes begin and end: started by our own torchrun on one machine, or by a launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from vlmtrain.core.errors import UserError, discard_output, said_by_system

# A peer that stops answering for this long ends the run where no watchdog has before.
_TIMEOUT = timedelta(minutes=30)
_LAUNCHER = "VLMTRAIN_LAUNCHER"  # to the processes of `start`: the process that started them
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")  # where launchers say a process's rank
# How gloo, NCCL and torch's store say that the process at the other end has ended.
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Did the remote server shutdown or crash",  # the store, in the launcher or on rank 0
    "NCCL communicator was aborted",
)
_RANK_0_FIRST = 5.0  # seconds
_SILENT = 30.0  # seconds that rank 0 waits for the others before it says so


class LaunchError(UserError):
    """Processes that can't be started or joined."""


@dataclass(frozen=True)
class Process:
    """This process among all."""

    rank: int
    world_size: int
    local_rank: int | None  # None: the launcher doesn't say


def joined() -> Process | None:
    """This process as a launcher described it; sets what torch.distributed reads; else None."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world, local = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    elif "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env:
        rank, world, local = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
        env.setdefault("MASTER_ADDR", _first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))
    elif "OMPI_COMM_WORLD_RANK" in env:
        rank, world, local = (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
        )
    else:
        return None
    try:
        size = int(env[world])
        here = int(env[local]) if local in env else 0 if size == 1 else None
        process = Process(int(env[rank]), size, here)
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"the launcher set {rank} but not usable {world} and {local} ({error})"
        ) from error
    if not 0 <= process.rank < process.world_size:
        raise LaunchError(
            f"{rank} is {process.rank} and {world} {process.world_size}; ranks count from 0 to "
            f"{world} - 1"
        )
    if process.world_size > 1 and "MASTER_ADDR" not in env:
        raise LaunchError(
            f"the launcher started {process.world_size} processes but MASTER_ADDR is not set; "
            "set MASTER_ADDR and MASTER_PORT to the first node's address and a free port"
        )
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    port = env.setdefault("MASTER_PORT", "29500")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"MASTER_PORT is {port!r}; it must be a port's number")
    env["RANK"], env["WORLD_SIZE"] = str(process.rank), str(process.world_size)
    env["LOCAL_RANK"] = str(process.local_rank or 0)
    return process


def group_timeout(minutes: float) -> timedelta:
    """Of process groups; `minutes`: after how long the watchdog reports a hang."""
    return max(_TIMEOUT, timedelta(minutes=2 * minutes))


def connect(process: Process, backend: str, minutes: float = 0.0) -> None:
    """Initialise torch.distributed for this process; alone it opens no port. `minutes`: after
    how long the watchdog reports a hang; the process group waits longer."""
    import torch.distributed as dist

    # Its functions take the default group as it is when they are defined. Imported later (images
    # do) they would keep the group, and the threads of gloo, which may then be at work while Python
    # ends: "terminate called without an active exception".
    import torch.distributed.nn  # noqa: F401

    alone = process.world_size == 1
    env = os.environ
    place = f"MASTER_ADDR {env.get('MASTER_ADDR')}, MASTER_PORT {env.get('MASTER_PORT')}"
    restarted = env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and not alone and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise LaunchError(
            "torchrun has restarted the ranks on the store of those that failed, whose addresses "
            "it still holds; start it with --standalone or --rdzv-backend c10d, and with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        )

    def wait() -> None:
        missing = f"{place}: rank 0 waits for other ranks of {process.world_size}"
        print(f"vlmtrain: {missing}; see what they printed", file=sys.stderr, flush=True)

    waiting = threading.Timer(_SILENT, wait)
    waiting.daemon = True
    if process.rank == 0 and not alone:
        waiting.start()
    try:
        dist.init_process_group(
            backend,
            rank=process.rank,
            world_size=process.world_size,
            timeout=group_timeout(minutes),
            **({"store": dist.HashStore()} if alone else {}),
        )
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "connectFullMesh" not in str(error):
            raise
        raise LaunchError(f"{place}: the ranks can't meet there: {error}") from error
    finally:
        waiting.cancel()


def _first_host(nodes: str) -> str:
    """node[003-007,9],other -> node003"""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise LaunchError(f"SLURM_STEP_NODELIST {nodes!r} can't be read; set MASTER_ADDR")
    return match[1] + (match[2] or "")


def start(arguments: Sequence[str], nproc: int) -> int:
    """Run `vlmtrain ARGUMENTS` in `nproc` processes on this machine; returns the exit code.

    When one process fails the others are ended; the cause is what that process printed, or a line
    here where it was killed.

    Raises:
        KeyboardInterrupt: SIGINT (Ctrl-C); the processes have ended.
    """
    import psutil
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // nproc)))
    # torchrun logs every ended worker at length; the worker has printed the one line that counts.
    for logger in ("torch.distributed.elastic", *logging.root.manager.loggerDict):
        if logger.startswith("torch.distributed.elastic"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)
    handled: dict[str, Any] = {}
    if "signals_to_handle" in {f.name for f in dataclasses.fields(LaunchConfig)}:
        handled["signals_to_handle"] = "SIGINT,SIGHUP,SIGQUIT"  # before torch 2.8 it takes all
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        **handled,
    )
    # SIGTERM goes on to the processes, which save and end by themselves; torchrun's own way
    # would kill them 30 seconds later.
    terminated: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        terminated.append(number)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "vlmtrain.cli", *arguments)
    except ChildFailedError as error:
        # A rank that was killed has said nothing; those it left behind may have ended before.
        killed = {rank: f.exitcode for rank, f in error.failures.items() if f.exitcode < 0}
        if not terminated and any(f.exitcode > 0 for f in error.failures.values()):
            # Those that torchrun ended after the first failure are not the cause.
            killed = {rank: code for rank, code in killed.items() if code != -signal.SIGTERM}
        if killed:
            rank, code = min(killed.items())
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            print(f"vlmtrain: rank {rank} was ended by {name}{hint}", file=sys.stderr, flush=True)
            return 128 - code
        said = [f for f in error.failures.values() if f.exitcode > 0]
        return min(said, key=lambda failure: failure.timestamp).exitcode
    except SignalException as error:  # it has ended the processes before
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        print(f"vlmtrain: ended by {error.sigval.name}", file=sys.stderr, flush=True)
        return 128 + error.sigval
    finally:
        os.environ.pop(_LAUNCHER, None)
        signal.signal(signal.SIGTERM, before)
    return 0


def launched() -> bool:
    """Whether `start` started this process and waits for it."""
    return os.environ.get(_LAUNCHER) == str(os.getppid())


def end_with_launcher(rank: int) -> None:
    """End this process when the `start` that it belongs to is gone: one that was killed could not
    end its processes, which would go on and write where the next start does. (They can't save:
    the store by which they agree was the launcher's.)"""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None:
        return

    def watch() -> None:
        while str(os.getppid()) == launcher:
            time.sleep(1.0)
        if rank == 0:
            message = f"vlmtrain: process {launcher}, which started the ranks, is gone: they end"
            print(message, file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def run_on_ranks(run: Callable[[Process], None], arguments: list[str], nproc: int) -> int:
    """`run(process)` in this process if it is one of several, or alone; with `nproc` above 1 and
    no launcher start `vlmtrain ARGUMENTS` that many times instead. Returns the exit code; the cause
    of one that is not 0 has been printed, once among all ranks where they share it."""
    process = joined()
    alone = process is None or (process.world_size == 1 and not launched())
    if alone and nproc > 1:  # in a shell of one task too, as srun --pty gives
        return start([*take_option(arguments, "--nproc")[0], "--nproc", "0"], nproc)
    if process is not None and nproc not in (0, process.world_size):
        raise LaunchError(
            f"--nproc {nproc} (or a recipe's nproc) was given to a process that a launcher started "
            f"as one of {process.world_size}; leave it out, or set a recipe's aside with --nproc 0"
        )
    warnings.filterwarnings("ignore")
    if process is not None:
        end_with_launcher(process.rank)
    process = process or Process(0, 1, 0)
    try:
        run(process)
    except UserError as error:
        if error.print_here:
            let_rank_0_speak()
        return leave(failed(str(error), 1) if error.print_here else 1)
    except KeyboardInterrupt:  # our launcher says it itself
        return leave(130 if process.rank or launched() else failed("interrupted", 130))
    except BrokenPipeError:  # of this process's own output
        raise
    except Exception as error:
        if peer_gone(error):
            return leave(failed(f"rank {process.rank} ends: another rank is gone", 1))
        if isinstance(error, OSError) and (said := said_by_system(error)):
            let_rank_0_speak()
            return leave(failed(said, 1))
        print(f"vlmtrain: rank {process.rank} failed:", file=sys.stderr)
        traceback.print_exc()
        return leave(1)
    return 0


def peer_gone(error: BaseException) -> bool:
    """Whether an error says that the process at the other end has ended. An OSError is of this
    process's own files and pipes."""
    return not isinstance(error, OSError) and any(sign in str(error) for sign in _PEER_GONE)


def let_rank_0_speak() -> None:
    """Wait before an error is printed that was found before the ranks could agree who says it: it
    is rank 0's to say, and its launcher ends this process; what only this rank meets is said after
    the pause."""
    if not _is_first() and not _connected():
        time.sleep(_RANK_0_FIRST)


def _is_first() -> bool:
    """Whether no launcher says that this process is another than rank 0."""
    ranks = (os.environ.get(name, "0") for name in _RANKS)
    return not any(rank.isdigit() and int(rank) for rank in ranks)


def say_once(message: str) -> None:
    """Print to stderr: not on every rank, and not again where `--nproc` has started this one."""
    if _is_first() and _LAUNCHER not in os.environ:
        print(f"vlmtrain: {message}", file=sys.stderr, flush=True)


def _connected() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def leave(code: int) -> int:
    """End at once where there are other ranks: destructors could block on those, and threads of a
    process group that something still holds may let go of a tensor while Python ends, which aborts
    the process. Returns `code` where this process is alone."""
    try:
        sys.stdout.flush()
    except OSError:  # why this process ends has been said
        discard_output()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)
    return code


def failed(message: str, code: int) -> int:
    """Say why the process ends; returns its exit code."""
    print(f"vlmtrain: {message}", file=sys.stderr, flush=True)
    return code


def take_option(arguments: list[str], option: str) -> tuple[list[str], str | None]:
    """The arguments without `option VALUE` (or `option=VALUE`), and the value."""
    for i, argument in enumerate(arguments):
        if argument == option:
            if i + 1 == len(arguments):
                raise UserError(f"{option} needs a value")
            return arguments[:i] + arguments[i + 2 :], arguments[i + 1]
        if argument.startswith(option + "="):
            return arguments[:i] + arguments[i + 1 :], argument.split("=", 1)[1]
    return arguments, None
