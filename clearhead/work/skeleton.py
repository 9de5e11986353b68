"""Programs to fill in: `clearhead exercise starter multi-head` prints one, `clearhead exercise grade` grades it filled.

Each is a text in `skeletons/`: the solution, with typical mistakes beneath the lines that they replace
(`#~ line :: what is wrong`). The skeleton is that text without its code; a program that goes wrong is compared with the
solution under one mistake, then under two, so that what is wrong can be said in words."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from clearhead.errors import ConfigError, StorageError
from clearhead.values import chosen

_MISTAKE = re.compile(r"\s*#~ (.*) :: (.*)")
_CLOSE = 1e-5  # a program may work in float32


@dataclass(frozen=True)
class Grade:
    """How a program did: each case with what is wrong there (nothing where it is right), and why, if known."""

    name: str
    cases: tuple[tuple[str, str], ...]
    because: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return not any(wrong for _, wrong in self.cases)

    def to_dict(self) -> dict[str, Any]:
        cases = [{"case": what, "right": not wrong, "wrong": wrong or None} for what, wrong in self.cases]
        return {"skeleton": self.name, "right": self.is_right, "cases": cases, "because": list(self.because)}

    def __str__(self) -> str:
        lines = [f"{'✗' if wrong else '✓'} {what}" + (f": {wrong}" if wrong else "") for what, wrong in self.cases]
        right = sum(not wrong for _, wrong in self.cases)
        return "\n".join([*lines, *self.because, f"{right} of {len(self.cases)} cases right"])


def skeletons() -> dict[str, str]:
    """The programs that can be filled in, and what each is."""
    return {name: text.lstrip('"').partition(".")[0] for name, text in _texts().items()}


def skeleton(name: str) -> str:
    """The program without its code: what it is given, what it has to do, step by step."""
    kept, inside = [], False
    for line in _text(name).partition("\n\n\ndef cases")[0].splitlines():
        words = line.strip()
        if not inside or words.startswith("# "):
            kept.append(line if not words.startswith("# ") else f"    {words}")
        inside = inside or (line.startswith("    ") and words.startswith('"""'))
    return "\n".join([*kept, '    raise NotImplementedError("fill this in")']) + "\n"


def grade(name: str, path: Path) -> Grade:
    """Runs a filled program, which is the caller's own act, and compares it with the solution case by case."""
    text, function = _text(name), re.findall(r"^def (\w+)", _text(name), re.MULTILINE)[0]
    right, mine = _defined(text, function), _loaded(path, function)
    draw = torch.Generator().manual_seed(7)
    cases = list(_defined(text, "cases")(lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)))
    tried = [(what, arguments, _run(mine, arguments, path)) for what, arguments in cases]
    found = tuple((what, _difference(got, torch.as_tensor(right(*given)))) for what, given, got in tried)
    graded = Grade(name, found)
    if graded.is_right:
        return graded
    like = (why for why, other in _mistaken(text, function)
            if all(_alike(got, _run(other, given, path)) for _, given, got in tried))  # fmt: skip
    return replace(graded, because=next(like, ()))


def _texts() -> dict[str, str]:
    folder = resources.files("clearhead.work") / "skeletons"
    texts = {entry.name.removesuffix(".txt"): entry.read_text(encoding="utf-8") for entry in folder.iterdir()}
    return dict(sorted(texts.items()))


def _text(name: str) -> str:
    return chosen(name, _texts(), "no skeleton is called")


def _defined(text: str, function: str) -> Callable[..., Any]:
    room: dict[str, Any] = {}
    exec(compile(text, "skeleton", "exec"), room)  # our own text
    return room[function]


def _loaded(path: Path, function: str) -> Callable[..., Any]:
    """The function of a user's file. This runs the file, which was asked for by naming it."""
    if not path.is_file():
        raise StorageError(f"there is no file {path}; write the skeleton to one and fill it in")
    if path.suffix != ".py":
        raise ConfigError(f"{path} is no Python program; end its name in .py")
    room: dict[str, Any] = {"__name__": "filled_in", "__file__": str(path)}
    try:
        # As it is now: an import would take a compiled file for it that is as old and as long.
        exec(compile(path.read_bytes(), path, "exec"), room)
    except Exception as error:
        raise ConfigError(f"{path.name} cannot be run: {_said(error, path)}") from error
    if not callable(room.get(function)):
        raise ConfigError(f"{path.name} has no function {function}; keep the name that the skeleton gives it")
    return room[function]


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], path: Path) -> Any:
    """What a program gives: a tensor, or a sentence where it gives none."""
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    try:
        return torch.as_tensor(function(*copies)).detach()
    except NotImplementedError:
        return "it is not filled in yet"
    except Exception as error:
        return _said(error, path)


def _said(error: Exception, path: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    at = "" if line is None else f" in line {line}"
    return f"{type(error).__name__}{at}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _difference(got: Any, expected: torch.Tensor) -> str:
    """What is wrong with an output, in words; nothing where it is right."""
    if isinstance(got, str):
        return got
    if got.shape != expected.shape:
        return f"the output is {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.isnan().any():
        return "the output has NaN in it"
    far, allowed = (got.double() - expected).abs().max().item(), _CLOSE * max(1.0, expected.abs().max().item())
    return "" if far <= allowed else f"it is up to {far:.2g} away from the solution"


def _alike(got: Any, made: Any) -> bool:
    """Whether two outputs are the same where they are finite: a row that hides all its keys may be NaN."""
    if isinstance(got, str) or isinstance(made, str) or got.shape != made.shape:
        return False
    known = got.isfinite() & made.isfinite()
    return bool(known.any()) and not _difference(got[known], made.double()[known])


def _mistaken(text: str, function: str) -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    """The solution under one mistake, then under two that are not in the same line."""
    lines = text.splitlines()
    found = []
    for i, line in enumerate(lines):
        if mistake := _MISTAKE.match(line):
            at = max(n for n in range(i) if not lines[n].strip().startswith("#"))
            found.append((at, mistake[1], mistake[2]))
    for some in (*[(one,) for one in found], *combinations(found, 2)):
        if len({at for at, _, _ in some}) == len(some):
            changed = list(lines)
            for at, code, _ in some:
                changed[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + code
            yield tuple(why for _, _, why in some), _defined("\n".join(changed), function)
