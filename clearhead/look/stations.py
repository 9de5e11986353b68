"""The stations of a walk, and the walk for the terminal: the way in and out and one block of each stack in full, a line
for each of the others."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.errors import ConfigError
from clearhead.look.terminal import heatmap, plain, shade
from clearhead.tables import table

if TYPE_CHECKING:
    from clearhead.look.walk import Section, Walkthrough

_ROWS = 8  # tokens that are shown of a longer line
_NUMBERS = 5  # of each vector
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True, eq=False)
class WalkthroughStep:
    """One thing that happens on the way, with the numbers of the run.

    `values` are those of one sequence, without the batch: a row a token, or a matrix a head, as `letters` say."""

    name: str
    role: str  # its kind, the same in every model: "embedding", "q", "scores", "add", …
    module: str  # the module path
    section: str  # the path of the block or stack that it is in
    formula: str
    symbols: tuple[str, ...]  # what each dimension of the values counts
    explanation: str
    values: Tensor
    rows: tuple[str, ...] = ()  # the tokens along the rows
    columns: tuple[str, ...] = ()  # and along the columns, where these are tokens too
    cells: tuple[tuple[str, ...], ...] = ()  # words that belong to the values, where there are any
    sources: tuple[int, ...] = ()  # the numbers of the stations that this one is made from
    branch: str = ""  # "self-attention", "masked self-attention", "cross-attention", "feed-forward"
    note: str = ""  # what is particular here

    @property
    def kind(self) -> str:
        """How it is shown: "vectors", "maps" (a matrix a head), "ids", "words" or "image"."""
        return _KINDS.get(self.role, "vectors")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def size(self) -> str:
        """The shape in letters and in numbers: "(H, T, S) = (8, 5, 4)"."""
        return f"({', '.join(self.symbols)}) = ({', '.join(f'{n:,}' for n in self.shape)})"


_KINDS = {
    **dict.fromkeys(("bias", "scores", "mask", "weights"), "maps"),
    **dict.fromkeys(("characters", "tokens", "start"), "ids"),
    **dict.fromkeys(("softmax", "next", "answer"), "words"),
    "pixels": "image",
}


@cache
def texts() -> dict[str, dict[str, str]]:
    """What is said at each kind of step."""
    return tomllib.loads((Path(__file__).parent / "assets" / "stations.toml").read_text(encoding="utf-8"))


def as_text(walk: Walkthrough, *, layer: str | int = 0, head: int = 0, width: int = 100, color: bool = False) -> str:
    """See `Walk.text`."""
    shown = selected_sections(walk, layer, head)
    said_of = texts()["symbols"]
    letters = [f"{letter} = {size:,} {said_of.get(letter, '')}".strip() for letter, size in walk.sizes.items()]
    metadata = "; ".join(f"{name}: {fact}" for name, fact in walk.metadata.items())
    lines = [walk.title, *textwrap.wrap(metadata, width), *textwrap.wrap(", ".join(letters), width)]
    said: set[str] = set()  # why a step is there is said once
    for section in walk.sections:
        if section.block is not None and section not in shown:
            lines += ["", *textwrap.wrap(_summary(walk, section), width, subsequent_indent="   ")]
            continue
        order = f" ({section.order})" if section.order else ""
        where = f"   {section.path}" if section.path else ""
        lines.append(f"\n━━ {section.title}{order}{where} ".ljust(width, "━"))
        for number in range(section.first, section.last + 1):
            step = walk.steps[number]
            lines += _step_lines(step, number, "" if step.explanation in said else step.explanation, head, width, color)
            said.add(step.explanation)
    return "\n".join(lines)


def selected_sections(walk: Walkthrough, layer: str | int, head: int) -> list[Section]:
    """The blocks that are shown in full; refuses layers and heads that are not there."""
    blocks = [section for section in walk.sections if section.block is not None]
    found = [section for section in blocks if str(layer) in (str(section.block), section.path)]
    if blocks and not found:
        most = max(section.block or 0 for section in blocks)
        raise ConfigError(
            f"there is no layer {str(layer)!r}; expected 0 to {most}, or one of: {', '.join(g.path for g in blocks)}"
        )
    heads = walk.sizes.get("H", 1)
    if not 0 <= head < heads:
        raise ConfigError(f"there is no head {head}; expected 0 to {heads - 1}")
    return found


def _summary(walk: Walkthrough, section: Section) -> str:
    """What a block that is not shown did to the stream."""
    steps = walk.steps[section.first : section.last + 1]
    first, last = walk.steps[steps[0].sources[0]].values, steps[-1].values
    lengths = [float(x.norm(dim=-1).mean()) for x in (first, last)]
    change = float((last - first).norm(dim=-1).mean())
    return (
        f"── {section.title}: {len(steps)} stations of the same kinds; x goes from length {lengths[0]:.3g} to "
        f"{lengths[1]:.3g}, changed by {change:.3g} (means over tokens)"
    )


def _step_lines(step: WalkthroughStep, number: int, why: str, head: int, width: int, color: bool) -> list[str]:
    branch = f" · {step.branch}" if step.branch else ""
    lines = ["", f"{number:>3}  {step.name}{branch}", f"     {step.formula}", f"     {step.size}"]
    if step.module:
        lines[-1] += f"   {step.module}"
    said = f"{why} {step.note}".strip()
    lines += textwrap.wrap(said, width - 1, initial_indent="     ", subsequent_indent="     ")
    return lines + [f"     {line}".rstrip() for line in _values(step, head, width - 5, color).split("\n")]


def _values(step: WalkthroughStep, head: int, width: int, color: bool) -> str:
    x, rows = step.values, step.rows
    if step.kind == "maps":
        own = head if len(x) > 1 else 0
        many = f"head {own} of {len(x)}" if len(x) > 1 else "the same for every head"
        return f"{many}\n{_matrix(step, x[own], width, color)}"
    if step.kind == "ids":
        numbered = [f"{label} {int(n)}" for label, n in zip(plain(rows), x, strict=True)]
        parts = list(rows) if step.role == "characters" else numbered
        return " │ ".join(parts[: 4 * _ROWS]) + (" │ …" if len(parts) > 4 * _ROWS else "")
    if step.kind == "words":
        return _words(step)
    if step.kind == "image":
        small = torch.nn.functional.adaptive_avg_pool2d(x[None].float() / 255, (16, 32))[0]
        return "\n".join("".join(map(shade, row)) for row in small.tolist())
    many = f"head {head} of {len(x)}\n" if x.dim() == 3 else ""
    x = x[min(head, len(x) - 1)] if x.dim() == 3 else x
    return many + _vectors(x if x.dim() > 1 else x[None], rows or ("",))


def _vectors(x: Tensor, rows: Sequence[str]) -> str:
    """The first numbers of each vector, and its length."""
    lines = []
    for label, row in list(zip(plain(rows), x, strict=True))[:_ROWS]:
        numbers = "  ".join(f"{value:7.3f}" for value in row[:_NUMBERS].tolist())
        lines.append((label, f"[{numbers}  …]", f"length {float(row.norm()):.3g}"))
    more = f"\n… and {len(rows) - _ROWS} more" if len(rows) > _ROWS else ""
    return table(lines, right=(0,)) + more


def _matrix(step: WalkthroughStep, x: Tensor, width: int, color: bool) -> str:
    """Numbers where they fit, else shades: of scores between the smallest and the largest."""
    if max(x.shape) <= _ROWS:
        digits = 0 if x.dtype == torch.bool else 2
        cells = [[f"{value:.{digits}f}" for value in row] for row in x.float().tolist()]
        lines = [(label, *row) for label, row in zip(plain(step.rows), cells, strict=True)]
        return table([("", *plain(step.columns)), *lines], right=range(len(step.columns) + 1))
    shades = x.float()
    if step.role in ("scores", "bias"):
        shades = (shades - shades.min()) / (shades.max() - shades.min()).clamp(min=1e-12)
    return heatmap(shades, step.rows, step.columns, width=width, color=color)


def _words(step: WalkthroughStep) -> str:
    """A line a step: the likeliest with their probabilities, or what was taken."""
    lines = []
    for i, words in enumerate(map(plain, step.cells)):
        if step.values.dim() > 1:
            shares = step.values[i].tolist()
            words = [f"{word} {_BARS[int(7.99 * p)]} {p:.3f}" for word, p in zip(words, shares, strict=True)]
        lines.append((f"{plain(step.rows)[i]} →" if step.rows else "→", *words))
    return table(lines, right=(0,))
