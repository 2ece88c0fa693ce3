"""`make gpu-check` without a GPU: stubs that hang, trap and fail stand for its kernels, and for
nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import report
from tools.gpu_check import __main__ as gpu_check
from tools.gpu_check import kernels, processes
from tools.gpu_check.processes import Results, run_each
from tools.gpu_check.tests import Runner, collect

ROW = {
    "op": "attention, forward", "shape": "1,024 windows of 64", "dtype": "bfloat16",
    "device": "cuda", "threads": 16, "memory": "device", "ours_ms": 1.0, "best_peer": "flash-attn",
    "best_peer_ms": 2.0, "ratio": 2.0, "ceiling": None, "percent_of_ceiling": None,
    "peers_ms": {"flash-attn": 2.0}, "skipped": {}, "kept": 9, "rounds": 9, "date": "2026-01-01",
    "commit": "unknown",
}  # fmt: skip
#: Takes the place of Python: a machine with a GPU whose second kernel hangs, whose third traps and
#: whose last fails; whose benchmark hangs after a row.
STUB = """
import json, os, signal, sys, time
arguments = sys.argv[1:]
def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("before the hang", flush=True)
    time.sleep(600)
if arguments[0] == "-c" and "describe_machine" in arguments[1]:
    packages = {"torch": "2.11.0+cu130"}
    machine = {"cpu": "A CPU", "cores": 16, "kernels": "avx512", "system": "Linux x86_64",
               "python": "3.12.3", "packages": packages, "gpu": "NVIDIA Stub", "cuda": "13.0"}
    print(json.dumps([machine, ["windows", "frames"]]))
    print("[W1122 04:11:10 warning at the end]")
elif arguments[0] == "-c":
    print(json.dumps({"gpu": "NVIDIA Stub", "capability": [9, 0], "torch": "2.11.0+cu130"}))
elif arguments[0] == "setup.py":
    assert os.environ["CMAKE_ARGS"] == "-DVLMKERNELS_CUDA_ARCHS=90a"
    open(TARGET, "w").write("a library")
elif "--list" in arguments:
    print(json.dumps(["good", "hangs", "traps", "fails"]))
elif "tools.gpu_check.kernels" in arguments:
    if "hangs" in arguments:
        hang()
    if "traps" in arguments:
        print("vlmkernels: segment 0 is too long", flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    if "fails" in arguments:
        sys.exit("AssertionError: result 0: error 1, allowed 0.1")
elif "benchmarks.run" in arguments:
    with open(arguments[arguments.index("--child") + 1], "a") as file:
        file.write(json.dumps(ROW) + "\\n")
        if "frames" in arguments:
            file.write('{"op": "cut o')
            file.flush()
            hang()
elif "benchmarks.timeline" in arguments:
    folder = arguments[arguments.index("--output") + 1]
    open(f"{folder}/offload-nvidia-stub.json", "w").write(TIMELINE)
"""
TIMELINE = {
    "machine": {"cpu": "A CPU", "gpu": "NVIDIA Stub"},
    "steps": [{"name": "clipped", "title": "1 x 8 tokens", "seconds": {"step": 0.5}, "spans": []}],
    "memory": [{"fraction": 0.5, "bytes": 2e9, "theory": 1e9, "offloaded": 0.5}],
}


def running(text: str) -> list[str]:
    """The processes with this in their command."""
    actual = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            actual += [command] if text in command else []
    return actual


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tree in which gpu-check runs, with the stub for Python."""
    target = (
        tmp_path / "tree" / "vlmkernels" / f"_C{gpu_check.sysconfig.get_config_var('EXT_SUFFIX')}"
    )
    target.parent.mkdir(parents=True)
    (tmp_path / "tree" / "CMakeLists.txt").touch()
    values = {"TARGET": str(target), "ROW": ROW, "TIMELINE": json.dumps(TIMELINE)}
    python = tmp_path / "python"
    head = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    python.write_text(f"#!{sys.executable} -S\n{head}{STUB}")
    python.chmod(0o755)
    for module in (gpu_check, processes):
        monkeypatch.setattr(module, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(gpu_check, "LIBRARIES", tmp_path / "tree" / "build" / "gpu-check")
    monkeypatch.setattr(gpu_check, "missing", lambda *packages: "")
    monkeypatch.setattr(sys, "executable", str(python))
    yield tmp_path
    assert not running(str(python))


def outcomes(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = (folder / "outcomes.jsonl").read_text().splitlines()
    return {(o["step"], o["name"]): o for o in map(json.loads, lines)}


def of(folder: Path, step: str) -> dict[str, str]:
    return {k[1]: o["outcome"] for k, o in outcomes(folder).items() if k[0] == step}


def test_a_gpu_whose_kernels_hang_trap_and_fail(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step runs, within its time; what came before a hang is kept; the tables follow."""
    folder = stub / "out"
    monkeypatch.setenv("OUT", str(folder))
    monkeypatch.setattr(gpu_check, "KERNEL_SECONDS", 2)
    seconds = {"attention": 3}
    began = time.monotonic()
    status = gpu_check.main(
        ["build", "smoke", "attention", "timeline", "--results", str(folder)], limits=seconds
    )
    assert status == 1 and time.monotonic() - began < 30
    assert of(folder, "step") == {
        "build": "PASS", "smoke": "FAIL", "attention": "FAIL", "timeline": "PASS"
    }  # fmt: skip
    assert of(folder, "smoke") == {
        "good": "PASS", "hangs": "HANG", "traps": "FAIL", "fails": "FAIL"
    }  # fmt: skip
    actual = outcomes(folder)
    assert actual["smoke", "traps"]["detail"] == "vlmkernels: segment 0 is too long"
    assert actual["smoke", "fails"]["detail"] == "AssertionError: result 0: error 1, allowed 0.1"
    assert of(folder, "attention") == {"windows": "PASS", "frames": "SKIP"}
    assert actual["attention", "frames"]["detail"] == "cut off: no time was left"
    log = (folder / "log.txt").read_text()
    assert "before the hang" in log and "segment 0 is too long" in log
    said = capsys.readouterr().out
    assert "HANG  smoke: hangs" in said and "failed: smoke, attention" in said
    (library,) = folder.glob("_C-*-sm_90a-cpython-*.so")
    assert library.read_text() == "a library"
    assert len(list(folder.iterdir())) <= 8

    # A bare machine that is given the library, or finds it in the results, builds nothing.
    for other in (stub / "out2", folder):
        assert gpu_check.main(["timeline", "--results", str(other)]) == 0
        assert f"{library.name} serves; nothing was built" in capsys.readouterr().out
        (stub / "tree" / "build" / "gpu-check" / library.name).unlink(missing_ok=True)

    results = stub / "results"
    report.take_over(folder, results, stub / "libraries")
    report.take_over(stub / "out2", results, stub / "libraries")
    assert (stub / "libraries" / library.name).read_text() == "a library"
    _, rows = report.load(results / "nvidia-stub.json")
    assert [row.commit for row in rows] == ["sources " + library.name.split("-")[1]]
    monkeypatch.setattr(report, "REPORT", results / "RESULTS.md")
    report.write(results, results / "RESULTS.md")
    text = (results / "RESULTS.md").read_text()
    assert "## NVIDIA Stub" in text and "| 2.00x |" in text
    assert "## Checked on NVIDIA Stub" in text
    (smoke,) = (
        line for line in text.splitlines() if line.startswith("| smoke | FAIL | 1 | 2 | 1 | 0 |")
    )
    assert smoke.endswith(f"| {library.name} |")
    assert "- HANG smoke: hangs. before the hang" in text
    assert "at most 2.00 GB on the device, 1.00 GB in theory" in text


def test_sanitizers_leave_out_what_they_can_not_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program in their place that finds nothing."""
    good = shutil.which("true")
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: good)
    check = gpu_check.Check(Results(tmp_path), {})
    monkeypatch.setattr(check, "kernels", lambda: {"sm90-fused backward": ["a"], "loss": ["b"]})
    assert check.sanitizer(time.monotonic() + 60)
    actual = of(tmp_path, "sanitizer")
    assert len(actual) == 8
    assert [name for name, outcome in actual.items() if outcome != "PASS"] == [
        f"{tool}, sm90-fused backward" for tool in ("racecheck", "initcheck", "synccheck")
    ]
    skipped = outcomes(tmp_path)["sanitizer", "racecheck, sm90-fused backward"]
    assert "does not see that mbarriers order different warps" in skipped["detail"]


def test_without_time_or_library_it_says_what_to_do(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["smoke", "--results", str(stub / "out"), "--minutes", "0.1"]) == 1
    assert "not done, as no time was left: python -m tools.gpu_check build smoke" in (
        capsys.readouterr().out
    )
    monkeypatch.setattr(gpu_check, "missing", lambda *p: "python has no cmake; install it")
    assert gpu_check.main(["smoke", "--results", str(stub / "out")]) == 1
    said = capsys.readouterr().out
    assert "SKIP  step: build" in said and "no cmake; install it, or bring _C-" in said
    assert "not done, as there is no library: python -m tools.gpu_check smoke" in said
    with pytest.raises(ValueError, match="has no machine.json: gpu-check did not come as far"):
        report.take_over(stub / "out", stub / "results", stub / "libraries")


def test_a_step_that_breaks_does_not_end_the_next(tmp_path: Path) -> None:
    results = Results(tmp_path)

    def broken(until: float) -> bool:
        raise RuntimeError("no kernels")

    assert not processes.step_of(results, "first", 5, broken)
    assert processes.step_of(results, "second", 5, lambda until: True)
    assert outcomes(tmp_path)["step", "first"]["detail"] == "RuntimeError: no kernels"


def test_children_of_a_hanging_process_end_with_it(tmp_path: Path) -> None:
    seconds = str(90_000 + os.getpid() % 10_000)
    code = f"import subprocess; subprocess.run(['sleep', '{seconds}'])"
    commands = {"a": [sys.executable, "-c", code]}
    until = time.monotonic() + 60
    assert not run_each(Results(tmp_path), "s", commands, limit=1.5, until=until)
    assert of(tmp_path, "s") == {"a": "HANG"}
    until = time.monotonic() + 30  # it has its signal, and ends when it gets a core
    while running(f"sleep {seconds}"):
        assert time.monotonic() < until
        time.sleep(0.1)


TESTS = """
import os, time, pytest
@pytest.mark.parametrize("n", range(4))
def test_good(n): pass
def test_hangs(): time.sleep(600)
def test_fails(): assert 1 == 2, "wrong"
def test_traps(): os.abort()
def test_skipped(): pytest.skip("no such GPU")
@pytest.fixture
def context():
    yield
    raise RuntimeError("left behind")
def test_leaves(context): pass
"""


@pytest.mark.slow
def test_tests_that_hang_fail_and_trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes no other with it."""
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(report.ROOT))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_stub.py").write_text(textwrap.dedent(TESTS))
    ids = collect(["test_stub.py"])
    assert len(ids) == 9
    results, until = Results(tmp_path / "out"), time.monotonic() + 120
    runner = Runner(results, "accuracy", limit=3, until=until, processes=2)
    assert not runner.run(ids)
    actual = {name.split("::")[1]: o for (_, name), o in outcomes(tmp_path / "out").items()}
    expected = {f"test_good[{n}]": "PASS" for n in range(4)}
    expected |= {"test_hangs": "HANG", "test_fails": "FAIL", "test_traps": "FAIL"}
    expected |= {"test_leaves": "PASS", "test_leaves (teardown)": "FAIL"}
    assert {k: o["outcome"] for k, o in actual.items()} == expected | {"test_skipped": "SKIP"}
    assert "wrong" in actual["test_fails"]["detail"]
    assert actual["test_traps"]["detail"] == "its process ended with -6"
    assert "left behind" in actual["test_leaves (teardown)"]["detail"]
    assert "no such GPU" in actual["test_skipped"]["detail"]
    late = Runner(results, "late", limit=3, until=time.monotonic(), processes=1)
    assert not late.run(ids[:2])
    assert of(tmp_path / "out", "late") == dict.fromkeys(ids[:2], "SKIP")


@pytest.mark.parametrize("backward", [False, True])
def test_the_kernels_checks_on_the_cpu(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same functions with the CPU's kernels; and they notice a wrong one."""
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kernels.segments("cpu", backward, alone=False)
    kernels.vision("cpu", backward, alone=False)
    kernels.vision("cpu", backward, alone=True)
    kernels.embedding(backward, backward, alone=False)
    kernels.added(backward, alone=False)
    for layer in (kernels.loss, kernels.norm, kernels.swiglu, kernels.rotary):
        layer(alone=False)
    kernels.optimizer(alone=False)
    right = kernels.varlen_op
    monkeypatch.setattr(kernels, "varlen_op", lambda *a: (right(*a)[0] * 1.05, None))
    with pytest.raises(AssertionError, match="result 0: error .*, allowed"):
        kernels.segments("cpu", backward, alone=False)


def test_every_instance_of_a_gpu_is_named() -> None:
    assert {name.split()[0] for name in kernels.kernels((8, 0))} == {
        "window", "sm80", "vision", "embedding", "loss", "norm", "swiglu", "rotary", "optimizer"
    }  # fmt: skip
    assert {"sm90 backward", "vision sm90 forward"} <= set(kernels.kernels((9, 0)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", "--results", str(tmp_path / "out")],
        cwd=report.ROOT,
        env={k: v for k, v in os.environ.items() if k != "OUT"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "out").exists()
    assert done.stderr == (
        "gpu-check: torch finds no GPU on this machine, so there is nothing to check\n"
    )
