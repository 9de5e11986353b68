"""Linear mathematics in text, such as d_k, e^{−x} and Σ_{j≤i}, split into letters, subscripts and superscripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_INDEX = r"\{[^{}]*\}|\([^()]*\)|[<>≤≥]?[A-Za-z0-9α-ωΑ-Ω′]+|∞"
_POWER = r"\{[^{}]*\}|\([^()]*\)|[−-]?[A-Za-z0-9α-ωΑ-Ω]+"
_SCRIPT = re.compile(rf"(?<!\s)(?:_({_INDEX})|\^({_POWER}))")
_INDICES = re.compile(r"[a-z]|[abcehijklmnpqrstuv]{2}")
# Products of two variables that occur in sentences, next to any two letters before ᵀ or ².
_PRODUCTS = "nd|kd|AV|PV|PX|XW|ZW|Wx|wx|ax"
_SYMBOL = re.compile(rf"(?<![A-Za-z'’])([A-Za-z]|[A-Za-z]{{2}}(?=[ᵀ²])|{_PRODUCTS})(?![A-Za-z'’])")
_IS_EQUATION = re.compile(r"\s?[=≥≤≈·ᵀ∈≠]")
# Single letters that are words or the names of options in sentences, and what marks them as variables all the same:
# ∂a, 1/D, H = V A, row a, rows of C; a(1 − a), A V, C is e × n; diag(a), (a, a), (B, T, M), (1 − a), a x_t.
_WORDS = frozenset("aIABCD")
_VARIABLE_AFTER = re.compile(r"(?:[∂√]|\d/|[=·] ?[A-Z] |\b(?:row|matrix) |\b(?:rows|columns) of )$")
_VARIABLE_BEFORE = re.compile(r"[(²]|/[a-z]\b| V\b| is [a-z] ?×")
_VARIABLE_BETWEEN = re.compile(r"[a-z]\(a\)|[(,] ?a[,)]$|\([B-D],|[−+] a\)")
# What precedes a letter that belongs to a name (ImageNet-1k, ViT-L/16, question 1.3d) or to a number (1.4e-03).
_NAME_BEFORE = re.compile(r"(?:[A-Za-z]-|\d\.)\d*$")
# A letter that is a token in quotation marks, or the label of a part in parentheses, such as (b) or (i).
_LABEL = re.compile(r"(?:“.”|(?<![^\s\d])\([a-hi]\)(?=[\s,.;:]|$)|T5)")
_EXPONENT = re.compile(r"(?<=\d)e[+-]\d")


@dataclass(frozen=True)
class Run:
    """A piece of text: `script` is 0 on the line, −1 below it, 1 above it."""

    text: str
    script: int = 0
    is_variable: bool = False


def runs(text: str, *, is_formula: bool = False) -> Iterator[Run]:
    """Split text into runs.

    Args:
        text: A sentence or a formula in linear notation.
        is_formula: Whether every single letter is a variable; in sentences "a", "I" and "A" to "D" are words.

    Example:
        >>> [(run.text, run.script) for run in runs("√d_k and e^{−x}")]
        [('√', 0), ('d', 0), ('k', -1), (' and ', 0), ('e', 0), ('−', 1), ('x', 1)]
    """
    end = 0
    text = text.replace("‖∞", "‖_∞")
    for match in _SCRIPT.finditer(text):
        yield from _letters(text[end : match.start()], 0, is_formula, has_script=True)
        content = match[1] or match[2]
        is_braced = content[0] in "{("
        yield from _letters(content[1:-1] if is_braced else content, -1 if match[1] else 1, is_formula)
        end = match.end()
    yield from _letters(text[end:], 0, is_formula)


def _letters(text: str, script: int, is_formula: bool, *, has_script: bool = False) -> Iterator[Run]:
    """Split a piece without scripts into variables and other text."""
    if script and _INDICES.fullmatch(text):
        yield Run(text, script, is_variable=True)
        return
    end = 0
    for match in _SYMBOL.finditer(text):
        is_base = (has_script and match.end() == len(text)) or _IS_EQUATION.match(text, match.end())
        is_sure = is_formula or script or is_base or _is_variable(text, match, has_script=has_script)
        if match[1] in _WORDS and not is_sure:
            continue
        if (not is_formula and _NAME_BEFORE.search(text[: match.start()])) or _EXPONENT.match(text, match.start()):
            continue
        if not is_formula and (_LABEL.match(text, match.start()) or _LABEL.match(text, max(0, match.start() - 1))):
            continue
        if match.start() > end:
            yield Run(text[end : match.start()], script)
        yield Run(match[1], script, is_variable=True)
        end = match.end()
    if end < len(text):
        yield Run(text[end:], script)


def _is_variable(text: str, match: re.Match[str], *, has_script: bool) -> bool:
    """Return whether the text around a letter shows that it is a variable and not a word."""
    start, end = match.span()
    between = text[max(0, start - 2) : end + 1]
    return bool(
        _VARIABLE_AFTER.search(text, 0, start)
        or _VARIABLE_BEFORE.match(text, end)
        or _VARIABLE_BETWEEN.search(between)
        or (has_script and match[1] == "a" and re.fullmatch(r" [a-z]", text[end:]))
    )
