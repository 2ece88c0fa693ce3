"""The scripts of examples/launch, run as a user would: two processes on gloo, two steps."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import ROOT, free_port
from vlmtrain import cli
from vlmtrain.core import device, launch
from vlmtrain.core.errors import UserError
from vlmtrain.demo import command, photographs, tiny_model

LAUNCH = ROOT / "examples" / "launch"
OPTIONS = """
    --train.steps 2 --train.pack_length 128 --train.global_batch_packs 2 --train.precision fp32
    --optimizer.lr 1e-3 --train.seed 3
""".split()

# What srun does as far as a task can see: the command, once a task, each told its number.
FAKE_SRUN = """#!{python}
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
tasks = int(os.environ["SLURM_NTASKS"])
started = [
    subprocess.Popen(
        command,
        env=dict(os.environ, SLURM_PROCID=str(i), SLURM_LOCALID=str(i), SLURM_NODEID="0",
                 SLURM_STEP_NODELIST="localhost", SLURM_STEP_ID="0"),
    )
    for i in range(tasks)
]
sys.exit(max(task.wait() for task in started))
"""


@pytest.fixture(scope="module")
def inputs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo's model folder and its conversations."""
    return tiny_folder, photographs.export(tmp_path_factory.mktemp("photographs"))


def _environment(inputs: tuple[Path, Path], output: Path, **more: object) -> dict[str, str]:
    """Ours without any launcher's variables, and what the scripts' comments ask for."""
    foreign = ("SLURM_", "OMPI_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MODEL": str(inputs[0]),
        "DATA": str(inputs[1]),
        "OUTPUT": str(output),
        **{name: str(value) for name, value in more.items()},
    }


def _run(commands: list[tuple[list[str], dict[str, str]]], limit: float = 120) -> list[str]:
    """Run commands side by side to their end; returns what each printed. All must succeed."""
    started = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, environment in commands
    ]
    try:
        printed = [process.communicate(timeout=limit)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for process, text in zip(started, printed, strict=True):
        assert process.returncode == 0, text
    return printed


def _check(output: Path, printed: str) -> list[float]:
    """Two steps by two processes were done and their model was written; returns the losses."""
    assert "2 processes" in printed, printed
    metrics = command.read_metrics(output / "metrics.jsonl")
    assert [entry["step"] for entry in metrics] == [1, 2]
    losses = [entry["loss"] for entry in metrics]
    # Random weights guess uniformly: the first loss is near the logarithm of the vocabulary.
    assert abs(losses[0] - math.log(tiny_model.VOCAB_SIZE)) < 0.5
    assert losses[1] < losses[0]
    config = json.loads((output / "hf" / "config.json").read_text())
    assert config["vocab_size"] == tiny_model.VOCAB_SIZE
    assert (output / "hf" / "tokenizer.json").is_file()
    assert list((output / "hf").glob("*.safetensors"))
    return losses


@pytest.fixture(scope="module")
def expected(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the one-node script: every launcher must give the same, to the bit."""
    output = tmp_path_factory.mktemp("one_node") / "out"
    environment = _environment(inputs, output, NPROC=2)
    printed = _run([([str(LAUNCH / "torchrun_one_node.sh"), *OPTIONS], environment)])
    return _check(output, printed[0])


@pytest.mark.slow
def test_torchrun_one_node(expected: list[float]) -> None:
    assert len(expected) == 2


@pytest.mark.slow
def test_torchrun_multi_node(
    inputs: tuple[Path, Path], tmp_path: Path, expected: list[float]
) -> None:
    """Two machines are two agents on this one."""
    common = {"NODES": 2, "NPROC": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    script = str(LAUNCH / "torchrun_multi_node.sh")
    printed = _run(
        [
            ([script, *OPTIONS], _environment(inputs, tmp_path / "out", NODE_RANK=rank, **common))
            for rank in range(2)
        ]
    )
    assert _check(tmp_path / "out", "".join(printed)) == expected


@pytest.mark.slow
def test_slurm(inputs: tuple[Path, Path], tmp_path: Path, expected: list[float]) -> None:
    """The real batch script; only srun is ours, and sbatch's variables."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(FAKE_SRUN.format(python=sys.executable))
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    environment = _environment(
        inputs,
        tmp_path / "out",
        SLURM_JOB_ID=free_port() - 20000,  # without MASTER_PORT the job's id decides the port
        SLURM_NTASKS=2,
        SLURM_CPUS_PER_TASK=1,
    )
    environment["PATH"] = f"{srun.parent}{os.pathsep}{environment['PATH']}"
    printed = _run([(["bash", str(LAUNCH / "slurm.sbatch"), *OPTIONS], environment)])
    assert _check(tmp_path / "out", printed[0]) == expected


def test_scripts_are_short_and_strict() -> None:
    scripts = sorted(LAUNCH.iterdir())
    assert {script.name for script in scripts} == {
        "slurm.sbatch",
        "torchrun_multi_node.sh",
        "torchrun_one_node.sh",
    }
    for script in scripts:
        lines = script.read_text().splitlines()
        assert len(lines) < 30, script.name
        assert "set -euo pipefail" in lines, script.name


@pytest.mark.parametrize("script", ["torchrun_one_node.sh", "torchrun_multi_node.sh"])
def test_scripts_say_what_is_not_set(script: str) -> None:
    done = subprocess.run(
        [str(LAUNCH / script)],
        env={"PATH": os.environ["PATH"], "NODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "MODEL: a Hugging Face folder" in done.stderr


@pytest.mark.parametrize(
    ("codes", "expected", "says"),
    [
        ((1, -15), 1, ""),  # torchrun ended the second after the first had failed
        ((-15, 1, -15), 1, ""),
        ((-15, -15), 143, "rank 0 was ended by SIGTERM"),
        ((1, -9), 137, "rank 1 was ended by SIGKILL (out of memory?)"),
    ],
)
def test_exit_code_is_that_of_the_cause(
    codes: tuple[int, ...],
    expected: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher import api

    failures = {
        rank: ProcessFailure(rank, rank + 1, code, str(tmp_path / "none"))
        for rank, code in enumerate(codes)
    }

    def elastic_launch(*_: object) -> Any:
        def work(*_: object) -> None:
            raise ChildFailedError("vlmtrain", failures)

        return work

    monkeypatch.setattr(api, "elastic_launch", elastic_launch)
    assert launch.start(["train"], len(codes)) == expected
    assert capsys.readouterr().err == (f"vlmtrain: {says}\n" if says else "")


RANK_OF_A_LAUNCHER = """
import os, subprocess, sys
os.environ["VLMTRAIN_LAUNCHER"] = str(os.getpid())
rank = "from vlmtrain.core import launch; import time; launch.end_with_launcher(0); " \\
    "print('runs', flush=True); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", rank]).wait()
"""


def test_a_rank_ends_with_its_launcher() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_OF_A_LAUNCHER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    process.kill()
    printed, _ = process.communicate(timeout=120)  # to the rank's end: it holds the pipe
    assert (
        printed == f"vlmtrain: process {process.pid}, which started the ranks, is gone: they end\n"
    )


def test_every_rank_watches_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    watching: list[int] = []
    monkeypatch.setattr(launch, "end_with_launcher", watching.append)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert launch.run_on_ranks(lambda process: watching.append(process.world_size), [], 0) == 0
    assert watching == [0, 1]


@pytest.mark.parametrize("port", ["abc", "0", "65536"])
def test_a_port_that_is_none(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(launch.LaunchError, match=f"MASTER_PORT is '{port}'; it must be"):
        launch.joined()


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_a_rank_that_is_none(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(launch.LaunchError, match=f"RANK is {rank} and WORLD_SIZE 2; ranks count"):
        launch.joined()


@pytest.mark.parametrize(
    "local, used", [(None, "LOCAL_RANK, by which"), ("1", 1), ("2", "is 2 and")]
)
def test_a_rank_takes_a_gpu_of_its_own(
    local: str | None, used: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that it sees; of one it takes that one, as a launcher may show each rank another."""
    chosen: list[int] = []
    device.setup()  # what Megatron needs without CUDA
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setenv("LOCAL_RANK", "")  # restored, as `joined` sets it
    monkeypatch.delenv("LOCAL_RANK")
    settings = dict(RANK="1", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for name, value in (settings | ({} if local is None else {"LOCAL_RANK": local})).items():
        monkeypatch.setenv(name, value)
    process = launch.joined()
    assert process is not None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device.setup(process.local_rank).device == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if isinstance(used, int):
        assert device.setup(process.local_rank).device == torch.device("cuda", used)
    else:
        with pytest.raises(UserError, match=used):
            device.setup(process.local_rank)


def connect_first(port: int, change: str = "", **environment: str) -> str:
    """What rank 0 of two says that connects alone."""
    code = (
        f"from datetime import timedelta\nfrom vlmtrain.core import launch\n{change}\n"
        "raise SystemExit(launch.run_on_ranks(lambda p: launch.connect(p, 'gloo'), [], 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", PYTHONPATH=str(ROOT))
        | dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_a_port_that_is_taken() -> None:
    """In one sentence, by the rank that listens."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = connect_first(port)
    expected = f"vlmtrain: MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: the ranks can't meet there"
    assert expected in said


def test_a_rank_that_does_not_come() -> None:
    change = "launch._TIMEOUT, launch._SILENT = timedelta(seconds=3), 0.5"
    port = free_port()
    waits, ends = (
        line
        for line in connect_first(port, change).splitlines()
        if line.startswith(f"vlmtrain: MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: ")
    )
    assert waits.endswith("rank 0 waits for other ranks of 2; see what they printed")
    assert "the ranks can't meet there" in ends and "1/2 clients joined" in ends


def test_ranks_that_torchrun_restarts_on_the_same_store() -> None:
    """There they would wait for the addresses of processes that have ended."""
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    said = connect_first(1, **restarted)
    assert "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment" in said


def test_one_process_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    launch.connect(launch.Process(0, 1, 0), "gloo")
    assert torch.distributed.get_world_size() == 1
    torch.distributed.destroy_process_group()


def test_nproc_in_a_shell_of_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `srun --pty` gives: it is no launcher of ranks."""
    started: list[object] = []
    monkeypatch.setattr(launch, "start", lambda *given: started.append(given) or 0)
    for name, value in (("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_NTASKS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "localhost")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert launch.run_on_ranks(lambda process: None, ["train"], 2) == 0
    assert started == [(["train", "--nproc", "0"], 2)]


def test_whose_pipe_is_broken() -> None:
    assert not launch.peer_gone(BrokenPipeError(32, "Broken pipe"))
    assert not launch.peer_gone(ConnectionResetError(104, "Connection reset by peer"))
    assert launch.peer_gone(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]"))


def test_rank_0_says_what_all_ranks_find(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["train", "--model", "m", "--data", "d", "--output", "o",
                         "--optimizer.lr=-1"]) == 1  # fmt: skip
    assert waited == [launch._RANK_0_FIRST]
    assert capsys.readouterr().err.count("--optimizer.lr is -1.0") == 2
