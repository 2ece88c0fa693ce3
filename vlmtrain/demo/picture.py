"""demo.png: every photograph with its questions and the answers given, and the loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vlmtrain.demo.ask import Answer

# All lengths are inches; one set of axes with inches as its unit covers the whole figure.
COLUMNS = 4
CARD_WIDTH, CARD_HEIGHT = 5.0, 2.45
HEADER = 3.9  # title and loss curve
EDGE, GAP, PAD = 0.3, 0.12, 0.16  # of the page, between cards, inside a card
PHOTOGRAPH = 2.0  # the square a photograph is fitted into
FONT_SIZE = 11.5  # points
DPI = 100

INK, SOFT, PAPER, LINE = "#1b1f24", "#6a737d", "#f6f7f9", "#d9dde3"
RIGHT, WRONG, ACCENT = "#1a7f37", "#cf222e", "#0b62c4"


def group_by_photograph(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Answers about the same photographs together, in the order in which they first come."""
    groups: dict[tuple[str, ...], list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.photographs, []).append(answer)
    return list(groups.values())


def draw(
    path: Path,
    photographs: Path,
    answers: Sequence[Answer],
    metrics: Sequence[dict[str, float]],
    *,
    model: str,
    parameters: int,
    processes: int,
    training_seconds: float,
) -> Path:
    """Draw the demo's results to `path` (PNG) and return it.

    Args:
        photographs: folder of the image files that the answers name.
        answers: what was asked, expected and given.
        metrics: objects with `step` and `loss`, at least one.
        model, parameters: the model's title and size.
        processes, training_seconds: of the training run, start-up included.
    """
    from matplotlib.figure import Figure

    cards = group_by_photograph(answers)
    rows = -(-len(cards) // COLUMNS)
    width = 2 * EDGE + COLUMNS * (CARD_WIDTH + GAP) - GAP
    height = HEADER + rows * (CARD_HEIGHT + GAP) - GAP + EDGE
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    page = figure.add_axes((0, 0, 1, 1))
    page.set_xlim(0, width)
    page.set_ylim(0, height)
    page.axis("off")

    names = {name for answer in answers for name in answer.photographs}
    right = sum(answer.right for answer in answers)
    title = f"A small {model} that knows {len(names)} photographs by heart"
    page.text(EDGE, height - 0.6, title, fontsize=24, weight="bold", color=INK)
    story = (
        f"{parameters / 1e6:.1f} million parameters, trained from random weights by megatron-core "
        f"on {processes} processes in {training_seconds:.0f} s. The answers were given by "
        f"transformers, greedily: {right} of {len(answers)} are right word for word."
    )
    page.text(EDGE, height - 1.0, story, fontsize=13.5, color=SOFT)
    _draw_loss(page, (EDGE + 0.7, height - HEADER + 0.75, width - 2 * EDGE - 0.7, 1.85), metrics)
    for number, card in enumerate(cards):
        row, column = divmod(number, COLUMNS)
        left = EDGE + column * (CARD_WIDTH + GAP)
        _draw_card(page, left, height - HEADER - row * (CARD_HEIGHT + GAP), photographs, card)
    figure.savefig(path, dpi=DPI)
    return path


def _inset(page: Any, box: tuple[float, float, float, float]) -> Any:
    """Axes at (left, bottom, width, height) of the page."""
    return page.inset_axes(box, transform=page.transData)


def _draw_loss(
    page: Any, box: tuple[float, float, float, float], metrics: Sequence[dict[str, float]]
) -> None:
    axes = _inset(page, box)
    steps = [entry["step"] for entry in metrics]
    losses = [entry["loss"] for entry in metrics]
    low, high = min(losses) * 0.7, max(losses) * 1.8
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.plot(steps, losses, color=ACCENT, linewidth=2.2)
    axes.fill_between(steps, losses, low, color=ACCENT, alpha=0.08, linewidth=0)
    for index, align, shift in ((0, "left", 6), (-1, "right", -2)):
        axes.annotate(
            f"{losses[index]:.3g}",
            (steps[index], losses[index]),
            xytext=(shift, 6),
            textcoords="offset points",
            ha=align,
            fontsize=12,
            color=ACCENT,
            weight="bold",
        )
    axes.margins(x=0)
    axes.set_ylabel("loss", fontsize=12, color=SOFT)
    axes.set_xlabel("optimizer step", fontsize=12, color=SOFT)
    axes.tick_params(which="both", colors=SOFT, labelsize=11, length=0)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)


def _draw_card(
    page: Any, left: float, top: float, photographs: Path, answers: Sequence[Answer]
) -> None:
    from matplotlib.patches import FancyBboxPatch

    page.add_patch(
        FancyBboxPatch(
            (left, top - CARD_HEIGHT),
            CARD_WIDTH,
            CARD_HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.1",
            facecolor=PAPER,
            edgecolor=LINE,
        )
    )
    _draw_photographs(page, left + PAD, top - PAD, photographs, answers[0].photographs)
    x, y = left + PHOTOGRAPH + 2 * PAD, top - PAD
    room = CARD_WIDTH - PHOTOGRAPH - 3 * PAD
    size, paragraphs = _fit(_paragraphs(answers), room, CARD_HEIGHT - 2 * PAD)
    for lines, color, weight, space in paragraphs:
        text = "\n".join(lines)
        page.text(x, y, text, va="top", fontsize=size, color=color, weight=weight, linespacing=1.25)
        y -= _height(len(lines), size) + space


def _paragraphs(answers: Sequence[Answer]) -> list[tuple[str, str, str, float]]:
    """(text, color, weight, space below) of what a card says."""
    said = []
    for answer in answers:
        said.append((answer.question, INK, "bold", 0.0))
        # The mark repeats the colour, for readers who can't tell red from green.
        mark, color = ("\N{CHECK MARK}", RIGHT) if answer.right else ("\N{BALLOT X}", WRONG)
        said.append((f"{mark} {answer.given or '(nothing)'}", color, "normal", 0.0))
        if not answer.right:
            said.append((f"expected: {answer.expected}", SOFT, "normal", 0.0))
        said[-1] = (*said[-1][:3], 0.14)
    return said


def _fit(
    paragraphs: Sequence[tuple[str, str, str, float]], width: float, height: float
) -> tuple[float, list[tuple[list[str], str, str, float]]]:
    """The largest font size, FONT_SIZE at most and 4 points at least, at which the wrapped
    paragraphs fit; a wrong answer can be long."""
    size = FONT_SIZE
    while True:
        wrapped = [(_wrap(t, width, size, w), color, w, space) for t, color, w, space in paragraphs]
        needed = sum(_height(len(lines), size) + space for lines, _, _, space in wrapped)
        if needed <= height + 0.14 or size <= 4:
            return size, wrapped
        size -= 0.5


def _height(lines: int, size: float) -> float:
    return lines * size * 1.35 / 72


def _draw_photographs(
    page: Any, left: float, top: float, folder: Path, names: Sequence[str]
) -> None:
    """The photographs one above the other, fitted into a square whose upper left corner is given;
    several are numbered in the order in which the model gets them."""
    if not names:
        middle = (left + PHOTOGRAPH / 2, top - PHOTOGRAPH / 2)
        page.text(
            *middle,
            "no photograph",
            ha="center",
            va="center",
            fontsize=12,
            color=SOFT,
            style="italic",
        )
        return
    space = PHOTOGRAPH / len(names)
    for number, name in enumerate(names):
        with Image.open(folder / name) as source:
            picture = source.convert("RGB")
        zoom = min(PHOTOGRAPH / picture.width, (space - 0.04) / picture.height)
        width, height = picture.width * zoom, picture.height * zoom
        x = left + (PHOTOGRAPH - width) / 2
        y = top - number * space - (space + height) / 2
        axes = _inset(page, (x, y, width, height))
        axes.imshow(picture, interpolation="bicubic", aspect="auto")
        axes.axis("off")
        if len(names) > 1:
            page.text(
                x - 0.07,
                y + height / 2,
                str(number + 1),
                ha="right",
                va="center",
                fontsize=12,
                color=SOFT,
            )


def _wrap(text: str, room: float, size: float, weight: str) -> list[str]:
    """Break `text` into lines that are measured, not guessed, to fit into `room`."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(weight=weight, size=size)
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        points, _, _ = text_to_path.get_text_width_height_descent(longer, font, ismath=False)
        if lines and points <= room * 72:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
