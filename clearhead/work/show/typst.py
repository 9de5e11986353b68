"""Mathematics for Typst, from the LaTeX that steps and sympy have: the small part of LaTeX that they use."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clearhead.work.show.latex import MATH, TEXT

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\s+|.", re.DOTALL)
_SIGNS = {code: sign for sign, code in MATH.items() if code.startswith("\\")} | {
    r"\top": "⊤", r"\sum": "sum", r"\prod": "product", r"\quad": "quad", r"\odot": "⊙", r"\lVert": "‖", r"\rVert": "‖",
    r"\lvert": "|", r"\rvert": "|", r"\|": "‖", r"\textstyle": "", r"\,": "thin", r"\{": r"\{", r"\}": r"\}",
    r"\surd": "√", r"\_": r"\_", r"\neq": "≠", r"\ne": "≠", r"\in": "∈", r"\mid": "|", r"\;": "med",
    r"\lceil": "⌈", r"\rceil": "⌉", r"\dots": "…", r"\cdots": "⋯",
}  # fmt: skip
_NAMES = re.compile(
    "alpha|beta|gamma|delta|epsilon|eta|lambda|mu|nu|pi|sigma|tau|phi|rho|theta|omega|Sigma|Delta|Theta|lim|max|min|log|exp|"
    "sin|cos|tanh|det"
)
_PLAIN = {"/": r"\/", ",": r"\,", ";": r"\;", '"': r"\"", "#": r"\#", "$": r"\$", "&": r"\&", "@": r"\@", "~": ""}


def math(latex: str) -> str:
    """LaTeX mathematics as Typst's; `LookupError` for a command that is not known here."""
    return _group(iter(_TOKEN.findall(re.sub(r"(?<=frac)(\d)(\d)", r"{\1}{\2}", latex))))


def _group(tokens: Iterator[str], end: str = "") -> str:
    parts: list[str] = []
    for token in tokens:
        if token == end:
            break
        parts.append(_one(token, tokens))
    return " ".join(part for part in parts if part)


def _one(token: str, tokens: Iterator[str]) -> str:
    """What a token stands for, with the groups that belong to it."""
    if token == "{":
        return _group(tokens, "}")
    if token in "^_":
        return f"{token}({_next(tokens)})"
    if token in (r"\frac", r"\tfrac", r"\dfrac"):
        return f"frac({_next(tokens)}, {_next(tokens)})"
    if token == r"\sqrt" and (first := next(tokens, "")) == "[":
        return f"root({_group(tokens, ']')}, {_next(tokens)})"
    if token == r"\sqrt":
        return f"sqrt({_one(first, tokens)})"
    if token == r"\mathbf":
        return f"bold({_next(tokens)})"
    if token in (r"\text", r"\mathrm", r"\operatorname"):
        return f'op("{_words(tokens)}")' if token == r"\operatorname" else f'"{_words(tokens)}"'
    if token in (r"\left", r"\right"):
        return _one(next(tokens), tokens).replace(".", "")
    if token in _SIGNS:
        return _SIGNS[token]
    if token.startswith("\\"):
        name = token[1:].removeprefix("var")
        if not _NAMES.fullmatch(name):
            raise LookupError(f"{token} is not known here")
        return name
    if token.isdigit() and len(token) > 4:
        return f"{int(token):,}".replace(",", " thin ")
    return _PLAIN.get(token, token.strip())


def _next(tokens: Iterator[str]) -> str:
    """The group or the single token that comes next."""
    token = next(tokens, "")
    return _next(tokens) if token.isspace() else _one(token, tokens)


def _words(tokens: Iterator[str]) -> str:
    """Prose in braces, with what LaTeX escapes said plainly again."""
    depth, said = 0, ""
    for token in tokens:
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth == 0:
            break
        said += token if depth > 1 or token != "{" else ""
    for sign, code in {**{s: f"${c}$" for s, c in MATH.items()}, **TEXT}.items():
        said = said.replace(code, sign)
    return said.replace("\\", "\\\\").replace('"', r"\"")
