"""Plain sentences with mathematics in them, as HTML: indices, powers, minus signs, italic variables, matrices
as matrices.

Claims are written for a terminal first (`W_O`, `10000^(2i/d)`, `[1 0; 1/2 1/2]`). Nothing here changes what is said."""

from __future__ import annotations

import re
from html import escape

_MATRIX = re.compile(r"\[([^\[\];]+(?:;[^\[\];]+)+)\]|\[(\[[^\[\]]+\](?:, \[[^\[\]]+\])+)\]")
_CODE = re.compile(r"`([^`]+)`")
_POWER_OF_TEN = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)[eE]([+-]?)0*(\d+)\b")
_INDEX = re.compile(r"(?<![A-Za-z])([A-Za-zΣ]|lr)_(\{[^{}]+\}|[A-Za-z]+|\d+)")
_POWER = re.compile(r"\^(\([^()]*\)|\{[^{}]*\}|[A-Za-z0-9]+)")
_MINUS = re.compile(r"(?<![\w)\]²³′])-(?=\d|\w\b|√|<i>)")
# A single letter is a variable. "a", "A" and "I" are also words, unless mathematics stands beside them; A to D
# are tokens.
_VARIABLE = re.compile(r"(?<![A-Za-z_&;'’])([b-zE-HJ-Z]|[A-Za-z]{2}(?=[²³ᵀ]))(?![A-Za-z_'’])")
_BESIDE = re.compile(r"(?<![A-Za-z_&;'’])([aAI])(?=\s?[=·²³/|)⊙]|[(ᵀ′]|<su)")
_SUPERSCRIPTS = str.maketrans("0123456789+-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻")


def typeset(text: str) -> str:
    """The text as HTML. `code` in backticks is left as it is."""
    parts = _CODE.split(text)
    return "".join(f"<code>{escape(part)}</code>" if i % 2 else _prose(part) for i, part in enumerate(parts))


def _prose(text: str) -> str:
    pieces, end = [], 0
    for found in _MATRIX.finditer(text):
        # [1, 0], [0, 1] is the same as 1 0; 0 1
        body = found[1] or found[2][1:-1].replace("], [", ";").replace(",", " ")
        pieces += [_line(text[end : found.start()]), _matrix(body)]
        end = found.end()
    return "".join([*pieces, _line(text[end:])])


def _matrix(body: str) -> str:
    rows = (row.split() for row in body.split(";"))
    cells = "".join("<tr>" + "".join(f"<td>{_line(x)}</td>" for x in row) + "</tr>" for row in rows)
    return f'<span class="matrix"><table>{cells}</table></span>'


def _line(text: str) -> str:
    text = escape(text, quote=False)
    text = _POWER_OF_TEN.sub(_power_of_ten, text)
    text = _INDEX.sub(lambda found: f"{found[1]}<sub>{_bare(found[2])}</sub>", text)
    text = _POWER.sub(lambda found: f"<sup>{_bare(found[1])}</sup>", text)
    text = _VARIABLE.sub(r"<i>\1</i>", text)  # no tag so far is a single letter
    text = _BESIDE.sub(r"<i>\1</i>", text)
    return _MINUS.sub("−", text)


def _power_of_ten(found: re.Match[str]) -> str:
    """4.53e-04 is 4.53 · 10⁻⁴."""
    digits, sign, power = found.groups()
    if power == "0" or float(digits) == 0:
        return f"{float(digits):g}"
    sign = "-" if sign == "-" else ""
    return f"{digits}·10{(sign + power).translate(_SUPERSCRIPTS)}"


def _bare(text: str) -> str:
    """Without the brackets that only held it together."""
    return text[1:-1] if text[0] in "({" else text
