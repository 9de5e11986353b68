"""Steps of a walkthrough, and their text for the terminal.

Input, output and one block of each stack are shown in full, and every other block in one line.
"""

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

from clearhead._core.text_tables import table
from clearhead.analysis.views.terminal import heatmap, plain, shade
from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from clearhead.analysis.walkthrough.walkthrough import Section, Walkthrough

_ROWS = 8  # maximum number of displayed tokens
_NUMBERS = 5  # displayed values per vector
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True, eq=False)
class WalkthroughStep:
    """One step of the computation, with the values of the run.

    Attributes:
        name: Display name.
        role: Kind of the step, the same in every model: "embedding", "q", "scores", "add", …
        module: Module path.
        section: Path of the block or stack.
        formula: Equation of the step.
        symbols: Symbol of each dimension of the values.
        explanation: Why the step exists.
        values: Values of one sequence, without the batch: one row per token, or one matrix per head.
        rows: Tokens of the rows.
        columns: Tokens of the columns, if these are tokens.
        cells: Texts of the values, if any.
        sources: Indices of the steps from which this one is computed.
        branch: "self-attention", "masked self-attention", "cross-attention" or "feed-forward".
        note: Specifics of this run.
    """

    name: str
    role: str
    module: str
    section: str
    formula: str
    symbols: tuple[str, ...]
    explanation: str
    values: Tensor
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    cells: tuple[tuple[str, ...], ...] = ()
    sources: tuple[int, ...] = ()
    branch: str = ""
    note: str = ""

    @property
    def kind(self) -> str:
        """How the step is displayed: "vectors", "maps" (one matrix per head), "ids", "words" or "image"."""
        return _KINDS.get(self.role, "vectors")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def size(self) -> str:
        """The shape in symbols and numbers: "(H, T, S) = (8, 5, 4)"."""
        return f"({', '.join(self.symbols)}) = ({', '.join(f'{n:,}' for n in self.shape)})"


_KINDS = {
    **dict.fromkeys(("bias", "scores", "mask", "weights"), "maps"),
    **dict.fromkeys(("characters", "tokens", "start"), "ids"),
    **dict.fromkeys(("softmax", "next", "answer"), "words"),
    "pixels": "image",
}


@cache
def texts() -> dict[str, dict[str, str]]:
    """Return the names, formulas and explanations by role."""
    return tomllib.loads((Path(__file__).parent / "steps.toml").read_text(encoding="utf-8"))


def as_text(
    walkthrough: Walkthrough, *, layer: str | int = 0, head: int = 0, width: int = 100, color: bool = False
) -> str:
    """Return the text of `Walkthrough.text`."""
    expanded = selected_sections(walkthrough, layer, head)
    symbol_names = texts()["symbols"]
    letters = [
        f"{letter} = {size:,} {symbol_names.get(letter, '')}".strip() for letter, size in walkthrough.sizes.items()
    ]
    metadata = "; ".join(f"{name}: {fact}" for name, fact in walkthrough.metadata.items())
    lines = [walkthrough.title, *textwrap.wrap(metadata, width), *textwrap.wrap(", ".join(letters), width)]
    explained: set[str] = set()  # each explanation is printed once
    for section in walkthrough.sections:
        if section.block is not None and section not in expanded:
            lines += ["", *textwrap.wrap(_summary(walkthrough, section), width, subsequent_indent="   ")]
            continue
        order = f" ({section.order})" if section.order else ""
        where = f"   {section.path}" if section.path else ""
        lines.append(f"\n━━ {section.title}{order}{where} ".ljust(width, "━"))
        for number in range(section.first, section.last + 1):
            step = walkthrough.steps[number]
            lines += _step_lines(
                step, number, "" if step.explanation in explained else step.explanation, head, width, color
            )
            explained.add(step.explanation)
    return "\n".join(lines)


def selected_sections(walkthrough: Walkthrough, layer: str | int, head: int) -> list[Section]:
    """Return the blocks to display in full; raise ConfigError for a missing layer or head."""
    blocks = [section for section in walkthrough.sections if section.block is not None]
    sections = [section for section in blocks if str(layer) in (str(section.block), section.path)]
    if blocks and not sections:
        most = max(section.block or 0 for section in blocks)
        raise ConfigError(
            f"unknown layer {str(layer)!r}; expected 0 to {most}, or one of: {', '.join(g.path for g in blocks)}"
        )
    heads = walkthrough.sizes.get("H", 1)
    if not 0 <= head < heads:
        raise ConfigError(f"unknown head {head}; expected 0 to {heads - 1}")
    return sections


def _summary(walkthrough: Walkthrough, section: Section) -> str:
    """Return one line about a block that is not displayed in full."""
    steps = walkthrough.steps[section.first : section.last + 1]
    first = walkthrough.steps[steps[0].sources[0]].values
    last = steps[-1].values
    lengths = [float(x.norm(dim=-1).mean()) for x in (first, last)]
    change = float((last - first).norm(dim=-1).mean())
    return (
        f"── {section.title}: {len(steps)} steps with the same roles; the norm of x changes from {lengths[0]:.3g} to "
        f"{lengths[1]:.3g}, the difference has norm {change:.3g} (means over tokens)"
    )


def _step_lines(step: WalkthroughStep, number: int, explanation: str, head: int, width: int, color: bool) -> list[str]:
    branch = f" · {step.branch}" if step.branch else ""
    lines = ["", f"{number:>3}  {step.name}{branch}", f"     {step.formula}", f"     {step.size}"]
    if step.module:
        lines[-1] += f"   {step.module}"
    explained = f"{explanation} {step.note}".strip()
    lines += textwrap.wrap(explained, width - 1, initial_indent="     ", subsequent_indent="     ")
    return lines + [f"     {line}".rstrip() for line in _values(step, head, width - 5, color).split("\n")]


def _values(step: WalkthroughStep, head: int, width: int, color: bool) -> str:
    x, rows = step.values, step.rows
    if step.kind == "maps":
        head_index = head if len(x) > 1 else 0
        title = f"head {head_index} of {len(x)}" if len(x) > 1 else "the same for every head"
        return f"{title}\n{_matrix(step, x[head_index], width, color)}"
    if step.kind == "ids":
        numbered = [f"{label} {int(n)}" for label, n in zip(plain(rows), x, strict=True)]
        parts = list(rows) if step.role == "characters" else numbered
        return " │ ".join(parts[: 4 * _ROWS]) + (" │ …" if len(parts) > 4 * _ROWS else "")
    if step.kind == "words":
        return _words(step)
    if step.kind == "image":
        small = torch.nn.functional.adaptive_avg_pool2d(x[None].float() / 255, (16, 32))[0]
        return "\n".join("".join(map(shade, row)) for row in small.tolist())
    title = f"head {head} of {len(x)}\n" if x.dim() == 3 else ""
    x = x[min(head, len(x) - 1)] if x.dim() == 3 else x
    return title + _vectors(x if x.dim() > 1 else x[None], rows or ("",))


def _vectors(x: Tensor, rows: Sequence[str]) -> str:
    """Return the first values of each vector, and its norm."""
    lines = []
    for label, row in list(zip(plain(rows), x, strict=True))[:_ROWS]:
        numbers = "  ".join(f"{value:7.3f}" for value in row[:_NUMBERS].tolist())
        lines.append((label, f"[{numbers}  …]", f"norm {float(row.norm()):.3g}"))
    more = f"\n… and {len(rows) - _ROWS} more" if len(rows) > _ROWS else ""
    return table(lines, right=(0,)) + more


def _matrix(step: WalkthroughStep, x: Tensor, width: int, color: bool) -> str:
    """Return numbers if they fit, else shades; those of scores are relative to minimum and maximum."""
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
    """Return one line per prediction."""
    lines = []
    for i, words in enumerate(map(plain, step.cells)):
        if step.values.dim() > 1:
            shares = step.values[i].tolist()
            words = [f"{word} {_BARS[int(7.99 * p)]} {p:.3f}" for word, p in zip(words, shares, strict=True)]
        lines.append((f"{plain(step.rows)[i]} →" if step.rows else "→", *words))
    return table(lines, right=(0,))
