"""What functions of `clearhead.course.answers.computed` return: values, tables and figures.

A value is a string or a number. A figure is anything with `svg()` and `text(width)`: a drawn mask
(`masks.draw(...)`), a figure of a claim, or an `SvgFigure`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsFloat, runtime_checkable

# A number as text, such as −0.5, 12,345, 46.9 % or 2·10⁻⁹.
_NUMBER = re.compile(r"[−-]?\d[\d,]*(\.\d+)?(·10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)?( %)?")


@dataclass(frozen=True)
class AnswerTable:
    """A table of an answer.

    Attributes:
        header: Names of the columns.
        rows: Cells, row by row; numbers are right-aligned.
        caption: A sentence below the table.

    Example:
        >>> AnswerTable(["layer", "parameters"], [["attention", 4096]]).cells
        [['attention', '4,096']]
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]
    caption: str = ""

    @property
    def cells(self) -> list[list[str]]:
        """The cells as text."""
        return [[format_value(cell) for cell in row] for row in self.rows]

    @property
    def numeric_columns(self) -> list[bool]:
        """For each column, whether all of its cells are numbers or texts of numbers."""
        columns = zip(*self.cells, strict=True)
        return [all(_NUMBER.fullmatch(cell) for cell in column) for column in columns]


@runtime_checkable
class AnswerFigure(Protocol):
    """A drawing with a form for pages and a form for terminals."""

    def svg(self) -> str:
        """Return the drawing as a self-contained SVG element."""
        ...

    def text(self, width: int = 80) -> str:
        """Return the drawing as text of at most `width` columns."""
        ...


@dataclass(frozen=True)
class SvgFigure:
    """A drawing made by code.

    Attributes:
        markup: The SVG element, with xmlns, viewBox, width and height.
        drawing: The same in characters, at most 80 columns wide.
        caption: A sentence below the drawing.
    """

    markup: str
    drawing: str
    caption: str = ""

    def svg(self) -> str:
        """Return the SVG element."""
        return self.markup

    def text(self, width: int = 80) -> str:
        """Return the drawing in characters; it is not reflowed to `width`."""
        return self.drawing


def format_scientific(value: float, digits: int = 2) -> str:
    """Return a number with a power of ten, or "0".

    Example:
        >>> [format_scientific(x) for x in (0.00143, -2500.0, 0.5, 0.0)]
        ['1.4·10⁻³', '−2.5·10³', '0.50', '0']
    """
    if value == 0:
        return "0"
    if 0.1 <= abs(value) < 10:
        return f"{value:.{digits}f}".replace("-", "−")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}·10{_superscript(int(exponent))}".replace("-", "−")


def format_vector(values: Iterable[SupportsFloat], form: str = "g") -> str:
    """Return a vector as text, without negative zeros.

    Example:
        >>> format_vector([1.0, -0.0, -2.5]), format_vector([0.5], ".4f")
        ('(1, 0, −2.5)', '(0.5000)')
    """
    return "(" + ", ".join(format(float(value) + 0.0, form) for value in values).replace("-", "−") + ")"


def format_value(value: str | int | float) -> str:
    """Return a computed value as text: integers with separators, floats with four significant digits.

    Example:
        >>> format_value(12345), format_value(0.123456), format_value(-0.5), format_value(2e-9), format_value("1/3")
        ('12,345', '0.1235', '−0.5', '2·10⁻⁹', '1/3')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    digits, _, exponent = f"{value:.4g}".replace("-", "−").partition("e")
    return f"{digits}·10{_superscript(int(exponent.replace('−', '-')))}" if exponent else digits


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
