"""Files that may not be opened or removed, and standard output that is closed, full or of another
encoding: one sentence, or no trouble at all."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.ranks import ROOT
from tests.train.conftest import options


def as_user() -> None:
    """Root may read and write everything by these two capabilities, which a program that it starts
    no longer has."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        if os.geteuid() == 0 and ctypes.CDLL(None).prctl(24, capability, 0, 0, 0):
            raise OSError("PR_CAPBSET_DROP")


def run(arguments: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        text=True,
        timeout=120,
        preexec_fn=as_user,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings},
    )


def test_what_may_not_be_read_is_named(model, conversations, tmp_path):
    mine, data = tmp_path / "model", tmp_path / "data"
    for folder, source in ((mine, model), (data, conversations.parent)):
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).symlink_to(file)
    names = "preprocessor_config.json", "model.safetensors"
    for name in names:
        (mine / name).unlink()
        (mine / name).write_bytes((model / name).read_bytes())
    arguments = options(mine, data / conversations.name, tmp_path / "run", "--loader.no_verify")
    script = (
        "import json, os, sys; from vlmtrain import cli\n"
        "for path in sys.argv[2:]:\n"
        "    mode = os.stat(path).st_mode\n"
        "    os.chmod(path, 0)\n"
        "    print('code', cli.main(json.loads(sys.argv[1])), file=sys.stderr)\n"
        "    os.chmod(path, mode)\n"
    )
    closed = [*(str(mine / name) for name in names), str(mine), str(data)]
    ended = run(["-c", script, json.dumps(arguments), *closed])
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("code 1\n") == len(closed), ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("vlmtrain: ")]
    assert len(lines) == len(closed), ended.stderr
    for line, path in zip(lines, closed, strict=True):
        assert line.startswith(f"vlmtrain: {path}"), line  # or a file in it
        assert line.endswith(": Permission denied"), line


def test_a_peak_that_can_not_be_reset_is_not_measured(model, conversations, tmp_path):
    """As in a container that may not write to /proc: the rehearsal looks at the losses alone."""
    arguments = options(model, conversations, tmp_path / "run", "--train.rehearse")
    arguments.remove("--train.no_rehearse")
    script = (
        "import json, sys; from vlmtrain import cli; from vlmtrain.core.device import Backend\n"
        "Backend.reset_peak_memory = lambda self: False\n"
        "sys.exit(cli.main(json.loads(sys.argv[1])))\n"
    )
    ended = run(["-c", script, json.dumps([*arguments, "--train.steps=1"])])
    assert ended.returncode == 0, ended.stderr
    assert "peaks of memory can't be measured on this system" in ended.stdout
    assert not (tmp_path / "run" / "gpu.toml").exists()


def test_a_folder_that_stays_does_not_stop_the_next(tmp_path):
    """As on NFS, where files that are open stay. An interrupted replacement is undone still, and
    what is left of a folder that was to go is not taken for it."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from vlmtrain.core.files import replace_folder, start_folder\n"
        "target = Path(sys.argv[1])\n"
        "for content in '123':\n"
        "    work = start_folder(target)\n"
        "    (work / 'file').write_text(content)\n"
        "    replace_folder(work, target)\n"
        "    os.chmod(target, 0o555)\n"
        "os.rename(target, f'{target}.vlmtrain-replaced')\n"  # and killed
        "work = start_folder(target)\n"
        "(work / 'file').write_text('4')\n"
        "os.chmod(work, 0o555)\n"
        "start_folder(target)\n"
    )
    target = tmp_path / "hf"
    ended = run(["-c", script, str(target)])
    assert ended.returncode == 0, ended.stderr
    first, second = (f"{target}.vlmtrain-removed{i}" for i in (1, 2))
    work = f"{target}.incomplete.vlmtrain-removed1"
    said = [f"{path} can't be removed; it is not needed" for path in (first, first, second, work)]
    assert ended.stderr.splitlines() == said
    assert (target / "file").read_text() == "3"
    for folder in (first, second, work, target):
        os.chmod(folder, 0o755)


@pytest.mark.parametrize("kind", ["closed", "full", "ascii"])
def test_standard_output(kind, conversations, tmp_path):
    samples = json.loads(conversations.read_text())[:2]
    samples[0]["id"] = "größe"
    samples[0]["image"] = "none.jpg"
    data = tmp_path / "ä.json"
    data.write_text(json.dumps(samples))
    arguments = ["-m", "vlmtrain.cli", "data", "check", "--data", str(data)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    if kind == "ascii":
        ended = run(arguments, env=environment)
        assert ended.returncode == 1 and "gr\\xf6\\xdfe" in ended.stdout, ended
    elif kind == "full":
        with open("/dev/full", "w") as full:
            ended = run(arguments, stdout=full)
        assert ended.returncode == 1 and "Traceback" not in ended.stderr
        assert ended.stderr.endswith(
            "vlmtrain: standard output can't be written: No space left on device\n"
        )
    else:
        command = " ".join(["exec", sys.executable, *arguments, ">&-"])
        ended = subprocess.run(["sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
