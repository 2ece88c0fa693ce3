"""The newcomer's pages are followed to the letter, on a small model and real pictures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.helpers import save_image
from tests.docs.pages import DOCS, PATH, blocks, printed
from tests.ranks import ROOT
from tests.test_cli import names
from vlmtrain.core.config import TrainConfig

MODEL = "Qwen2.5-VL-3B-Instruct"  # what the pages call the reader's model
LANGUAGES = {"sh", "text", "python", "json", "toml", ""}


@pytest.fixture(scope="module")
def followed(tiny_folder, tmp_path_factory) -> list[tuple[str, str, int, int, str]]:
    """Every command of the path: page, command, exit code wanted, exit code, output."""
    desk = tmp_path_factory.mktemp("desk")
    shutil.copytree(tiny_folder, desk / MODEL)
    save_image(desk / "cup.jpg", 90, 70, 1)
    save_image(desk / "cat.jpg", 70, 90, 2)
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("follow.py")), "results.json"],
        cwd=desk,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return [tuple(row) for row in json.loads((desk / "results.json").read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", PATH)
def test_commands_end_as_the_page_says(followed, page) -> None:
    local = [row for row in followed if row[0] == page]
    assert local
    for _, line, wanted, code, output in local:
        assert code == wanted, f"{line}\n{output}"
        if wanted:  # a mistake: one line, no traceback
            assert "vlmtrain: " in output or "problem" in output, output
        assert "Traceback" not in output, f"{line}\n{output}"


@pytest.mark.slow
def test_they_print_what_the_page_shows(followed) -> None:
    outputs = {(page, command): output for page, command, _, _, output in followed}
    shown = 0
    for page in PATH:
        before = ""
        for block in blocks(page):
            if block.language == "sh" and block.skipped is None:
                before = "\n".join(outputs[page, command] for command, _ in block.commands)
            elif block.language == "text":
                for line in block.body.splitlines():
                    assert printed(line, before), f"{page}: {line!r} is not in\n{before}"
                    shown += 1
    assert shown >= 12


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_and_options_exist(page) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (DOCS / target).exists(), target
    sections = {name.split(".")[0] for name in names(TrainConfig) if "." in name}
    for option in re.findall(r"--((?:\w+)\.(?:\w+))", text):
        if option.split(".")[0] in sections:
            assert option.replace(".no_", ".") in names(TrainConfig), option
    for block in blocks(page):
        assert block.language in LANGUAGES, block.language
        assert block.skipped is None or len(block.skipped) > 10, "say why it is not run"


def test_the_readme_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PATH:
        assert f"docs/{page}" in readme


def test_the_readme_names_commands_and_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([\w-]+)[`\n]", readme):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    commands = re.findall(r"`pytest (\S+?)(?: -k \"?([\w ]+)\"?)?`", readme)
    assert len(commands) >= 6
    for path, words in commands:
        tests = re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE)
        for word in words.split(" or "):
            assert any(word in name for name in tests), (path, word)
    for option in re.findall(r"--(\w+\.\w+)", readme):
        assert option in names(TrainConfig), option


def test_the_page_of_families_names_files_that_exist() -> None:
    text = (DOCS / "new-family.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", text.partition("outside\n")[2])
    assert len(paths) > 25
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "vlmtrain" / path).exists(), path


def test_what_counts_as_printed() -> None:
    assert printed("step 4/4  loss ...", "x\nstep 4/4  loss 1.2 grad")
    assert printed("a ... b ...", "a x b y")
    assert not printed("a ... b", "b x a")
    assert not printed("step 5", "step 4\n")
