"""What a page of docs/ asks its reader to do: files to write, commands to run, what they print.

In a page's source:

    <!-- file: NAME -->          the next block is to be saved under that name
    <!-- not run: REASON -->     the next block is not run by the tests
    ```sh                        commands, one a line; `# exit code N` where it is not 0
    ```text                      lines that the commands above print; ... stands for anything
    ```python                    run as it is; blocks of a page share their names
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
# In the order in which a newcomer reads: later pages use what earlier ones have made.
PATH = (
    "1-install.md",
    "2-train.md",
    "3-layout.md",
    "4-kernels.md",
    "5-when-it-fails.md",
    "evaluation.md",
    "data.md",
    "coming-from.md",
)
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>file|not run): (?P<value>[^\n]*?) -->\n)?```(?P<language>\w*)\n"
    r"(?P<body>.*?)```",
    re.DOTALL,
)
_CODE = re.compile(r"# exit code (\d+)$")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    language: str
    body: str
    file: str | None
    skipped: str | None  # why it is not run

    @property
    def commands(self) -> list[tuple[str, int]]:
        """(command, exit code) of each line."""
        actual = []
        for line in self.body.splitlines():
            code = _CODE.search(line)
            actual.append((_CODE.sub("", line).strip(), int(code[1]) if code else 0))
        return actual


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for match in _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
        value = {match["mark"]: match["value"]}
        yield Block(page, match["language"], match["body"], value.get("file"), value.get("not run"))


def printed(wanted: str, output: str) -> bool:
    """Whether a line of `output` reads as `wanted`, where ... stands for anything."""
    pattern = ".*".join(re.escape(part.strip()) for part in wanted.split("..."))
    return any(re.search(pattern, line) for line in output.splitlines())
