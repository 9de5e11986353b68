"""The architecture of a walkthrough as a figure: one box per step or branch, the first block of each stack in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearhead._core.plotting import new_figure, palette, plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clearhead.analysis.walkthrough.walkthrough import Section, Walkthrough

_LABELS = {
    "tokens": "Tokens and ids",
    "start": "Target tokens",
    "front": "Prefix token",
    "position": "Positions",
    "add": "+",
    "pool": "Pooling",
    "next": "Next token",
    "bias": "Position bias",
    "between": "…",
}
_WIDTH, _HEIGHT, _GAP, _COLUMN = 1.65, 0.26, 0.15, 2.7  # inches


@dataclass
class _Box:
    """A box of the drawing: the steps `first` to `last`, and its position in inches from the upper left corner."""

    first: int
    last: int
    label: str
    kind: str
    branch: str = ""
    section: str = ""
    column: int = 0
    y: float = 0.0

    @property
    def x(self) -> float:
        """The left edge."""
        return 0.45 + self.column * _COLUMN

    @property
    def middle(self) -> tuple[float, float]:
        """The center."""
        return self.x + _WIDTH / 2, self.y + _HEIGHT / 2


@plot_style()
def draw_architecture(walkthrough: Walkthrough) -> Figure:
    """Draw the architecture of the model as it ran; `analysis.views.figures.save` writes SVG, PDF or PNG."""
    boxes, frames = _layout(walkthrough)
    width = 0.9 + _WIDTH + _COLUMN * max(box.column for box in boxes)
    height = max(box.y for box in boxes) + _HEIGHT + 0.2
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for section, top, bottom, column in frames:
        _draw_frame(axes, section, top, bottom, column)
    for box in boxes:
        _draw_box(axes, box)
        _draw_edges(axes, walkthrough, box, boxes)
    return figure


def _stack(section: Section) -> str:
    """Return the stack of a section: "encoder" for "encoder.blocks.3"."""
    return section.path.rpartition(".")[0].rpartition(".")[0]


def _layout(walkthrough: Walkthrough) -> tuple[list[_Box], list[tuple[Section, float, float, int]]]:
    """Return the boxes, and section, top, bottom and column of each block that is drawn in full."""
    stacks = list(dict.fromkeys(_stack(section) for section in walkthrough.sections if section.block is not None))
    bottom = [0.15] * max(1, len(stacks))
    boxes: list[_Box] = []
    frames = []
    opened: set[str] = set()
    for section in walkthrough.sections:
        column = next((i for i, name in enumerate(stacks) if name and section.path.startswith(name)), 0)
        is_block = section.block is not None
        is_full = not is_block or _stack(section) not in opened
        opened |= {_stack(section)} if is_block else set()
        top = bottom[column]
        y = top + (0.3 if is_block and is_full else 0.0)
        for box in _boxes(walkthrough, section, is_full=is_full):
            box.column, box.y = column, y
            boxes.append(box)
            y += _HEIGHT + _GAP
        if is_block and is_full:
            frames.append((section, top, y - _GAP + 0.09, column))
            y += 0.09
        bottom[column] = y
    return boxes, frames


def _boxes(walkthrough: Walkthrough, section: Section, *, is_full: bool) -> list[_Box]:
    """Return the boxes of a section: one if it is folded, otherwise one per step or branch."""
    if not is_full:
        return [_Box(section.first, section.last, section.title, "folded", section=section.path)]
    boxes: list[_Box] = []
    for i in range(section.first, section.last + 1):
        step = walkthrough.steps[i]
        if step.branch and boxes and boxes[-1].branch == step.branch:
            boxes[-1].last = i
            continue
        kind = "attention" if "attention" in step.branch else step.role
        label = (step.branch or _LABELS.get(step.role, step.role)).replace("_", " ")
        boxes.append(_Box(i, i, label[0].upper() + label[1:], kind, step.branch, section.path))
    return boxes


def _draw_frame(axes: Any, section: Section, top: float, bottom: float, column: int) -> None:
    """Draw the background of a block, with its title."""
    from matplotlib.patches import FancyBboxPatch

    x = 0.45 + column * _COLUMN - 0.33
    shape = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch((x, top), _WIDTH + 0.5, bottom - top, shape, facecolor=palette().missing, edgecolor="none")
    )
    axes.text(x + 0.08, top + 0.14, section.title, fontsize=7, color=palette().soft, va="center")
    axes.text(x + _WIDTH + 0.42, top + 0.14, section.order, fontsize=7, color=palette().soft, va="center", ha="right")


def _draw_box(axes: Any, box: _Box) -> None:
    """Draw one box, or a circle for a sum."""
    from matplotlib.patches import Circle, FancyBboxPatch

    colors = palette()
    style: dict[str, Any] = {
        "facecolor": colors.missing if box.kind in ("folded", "norm") else colors.shades[0],
        "linewidth": 0.9,
    }
    edge = colors.heat if box.kind == "attention" else colors.soft
    if box.kind == "add":
        axes.add_patch(Circle(box.middle, 0.11, edgecolor=edge, zorder=3, **style))
    else:
        shape = "round,pad=0,rounding_size=0.06"
        axes.add_patch(FancyBboxPatch((box.x, box.y), _WIDTH, _HEIGHT, shape, edgecolor=edge, zorder=3, **style))
    axes.text(*box.middle, box.label, fontsize=8, ha="center", va="center", color=colors.ink, zorder=4)


def _draw_edges(axes: Any, walkthrough: Walkthrough, box: _Box, boxes: Sequence[_Box]) -> None:
    """Draw the arrows into a box: from above, around the side from earlier boxes, across from the other stack."""
    sources = {i for step in walkthrough.steps[box.first : box.last + 1] for i in step.sources}
    origins = [other for other in boxes if other is not box and any(other.first <= i <= other.last for i in sources)]
    column = [other for other in boxes if other.column == box.column]
    above = column[column.index(box) - 1] if box is not column[0] else None
    if not origins and above is not None:
        origins = [above]
    half = 0.11 if box.kind == "add" else _HEIGHT / 2
    x, y = box.middle
    side = 0
    for origin in origins:
        from_x, from_y = origin.middle
        if origin is above:
            start = from_y + (0.11 if origin.kind == "add" else _HEIGHT / 2)
            _arrow(axes, [(x, start), (x, y - half)], palette().soft)
        elif origin.column != box.column:
            channel = from_x + _WIDTH / 2 + 0.3
            points = [(from_x + _WIDTH / 2, from_y), (channel, from_y), (channel, y), (box.x, y)]
            _arrow(axes, points, palette().heat)
        else:
            left = box.x - 0.12 - 0.07 * side
            side += 1
            # An edge from outside of a block starts inside of it, below its title.
            first = next(other for other in boxes if other.section == box.section)
            start = origin.y + _HEIGHT + _GAP / 2 if origin.section == box.section else first.y - _GAP / 2
            end = x - 0.11 if box.kind == "add" else box.x
            _arrow(axes, [(x, start), (left, start), (left, y), (end, y)], palette().soft)


def _arrow(axes: Any, points: Sequence[tuple[float, float]], color: str) -> None:
    """Draw a line through points, with a head at its end."""
    axes.plot(*zip(*points, strict=True), color=color, linewidth=0.8, zorder=2)
    head = {"arrowstyle": "-|>", "color": color, "linewidth": 0.8, "mutation_scale": 6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", points[-1], points[-2], arrowprops=head, zorder=2)
