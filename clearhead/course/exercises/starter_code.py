"""Starter code, printed by `clearhead exercise starter` and graded by `clearhead exercise grade`.

Each starter is a reference solution with typical mistakes below the lines that they replace
(`#~ line :: explanation`); the starter is the solution without its code. The output of a wrong program is compared with
the solution under each mistake and each pair of mistakes, so that the error can be named."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import torch

from clearhead._core.validation import lookup
from clearhead.errors import ConfigError, StorageError

Function: TypeAlias = Callable[..., Any]
Output: TypeAlias = torch.Tensor | str
"""The output of a function, or a sentence if it failed."""

_MISTAKE = re.compile(r"\s*#~ (.*) :: (.*)")
_TOLERANCE = 1e-5  # relative; programs may use float32


@dataclass(frozen=True)
class ProgramGrade:
    """The grade of a program: each case with its error (empty if right), and the explanations of known mistakes."""

    name: str
    cases: tuple[tuple[str, str], ...]
    because: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return not any(wrong for _, wrong in self.cases)

    def to_dict(self) -> dict[str, object]:
        cases = [{"case": description, "right": not wrong, "wrong": wrong or None} for description, wrong in self.cases]
        return {"starter": self.name, "right": self.is_right, "cases": cases, "because": list(self.because)}

    def __str__(self) -> str:
        lines = [
            f"{'✗' if wrong else '✓'} {description}" + (f": {wrong}" if wrong else "")
            for description, wrong in self.cases
        ]
        reference = sum(not wrong for _, wrong in self.cases)
        return "\n".join([*lines, *self.because, f"{reference} of {len(self.cases)} cases right"])


def starters() -> dict[str, str]:
    """Return the names and titles of the starters."""
    return {name: text.lstrip('"').partition(".")[0] for name, text in _texts().items()}


def starter_code(name: str) -> str:
    """Return the starter code: signature, docstring and comments of the solution, without its body."""
    lines = []
    in_body = False
    for line in _text(name).partition("\n\n\ndef cases")[0].splitlines():
        words = line.strip()
        if not in_body or words.startswith("# "):
            lines.append(line if not words.startswith("# ") else f"    {words}")
        in_body = in_body or (line.startswith("    ") and words.startswith('"""'))
    return "\n".join([*lines, '    raise NotImplementedError("fill this in")']) + "\n"


def solution_code(name: str) -> str:
    """Return the solution of a starter as a program, without the explanations of typical mistakes.

    Example:
        >>> "softmax" in solution_code("attention")
        True
    """
    program = _text(name).partition("\n\n\ndef cases")[0].partition('"""\n\n')[2]
    return "\n".join(line for line in program.splitlines() if not _MISTAKE.match(line)) + "\n"


def grade_program(name: str, path: Path) -> ProgramGrade:
    """Run a completed program and compare it with the solution case by case.

    This executes the file, so grade only files that you trust.
    """
    text = _text(name)
    function = re.findall(r"^def (\w+)", _text(name), re.MULTILINE)[0]
    reference = _compile_function(text, function)
    submitted = _load_function(path, function)
    draw = torch.Generator().manual_seed(7)
    cases = list(
        _compile_function(text, "cases")(lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64))
    )
    results = [(arguments, _run(submitted, arguments, path)) for _, arguments in cases]
    expected = [torch.as_tensor(reference(*arguments)) for _, arguments in cases]
    # Relative to the largest output of all cases: the outputs of some starters are small, and some cases are 0.
    allowed = _TOLERANCE * max(float(x.abs().max()) for x in expected)
    errors = [_difference(got, right, allowed) for (_, got), right in zip(results, expected, strict=True)]
    descriptions = [description for description, _ in cases]
    graded = ProgramGrade(name, tuple(zip(descriptions, errors, strict=True)))
    if graded.is_right:
        return graded
    explanations = (
        why
        for why, other in _with_mistakes(text, function)
        if all(_is_close(got, _run(other, arguments, path), allowed) for arguments, got in results)
    )
    return replace(graded, because=next(explanations, ()))


def _texts() -> dict[str, str]:
    folder = resources.files("clearhead.course.exercises") / "starters"
    texts = {entry.name.removesuffix(".txt"): entry.read_text(encoding="utf-8") for entry in folder.iterdir()}
    return dict(sorted(texts.items()))


def _text(name: str) -> str:
    return lookup(name, _texts(), "no starter is called")


def _compile_function(text: str, function: str) -> Function:
    namespace: dict[str, Any] = {}
    exec(compile(text, "skeleton", "exec"), namespace)  # bundled text, not a user's file
    return namespace[function]


def _load_function(path: Path, function: str) -> Function:
    """Execute a user's file, which was named for this purpose, and return its function."""
    if not path.is_file():
        raise StorageError(f"file {path} does not exist; write the starter to a file and complete it")
    if path.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file; expected a name ending in .py")
    namespace: dict[str, Any] = {"__name__": "filled_in", "__file__": str(path)}
    try:
        # Compiled from the source: an import could use a cached .pyc with the same time and size.
        exec(compile(path.read_bytes(), path, "exec"), namespace)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path.name} cannot be run: {_describe_error(error, path)}") from error
    if not callable(namespace.get(function)):
        raise ConfigError(f"{path.name} has no function {function}; keep the name in the starter")
    return namespace[function]


def _run(function: Function, arguments: tuple[object, ...], path: Path) -> Output:
    """Return the output of a program as a tensor, or a sentence if it failed."""
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    try:
        return torch.as_tensor(function(*copies)).detach()
    except NotImplementedError:
        return "the function is not implemented yet"
    except (Exception, SystemExit) as error:
        return _describe_error(error, path)


def _describe_error(error: BaseException, path: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    at = "" if line is None else f" in line {line}"
    return f"{type(error).__name__}{at}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _difference(got: Output, expected: torch.Tensor, allowed: float) -> str:
    """Describe the error of an output; empty if it is right."""
    if isinstance(got, str):
        return got
    if got.shape != expected.shape:
        return f"the output is {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.is_complex():
        return "the output is complex, expected real numbers"
    if got.isnan().any():
        return "the output contains NaN"
    error = (got.double() - expected).abs().max().item()
    return "" if error <= allowed else f"the output is up to {error:.2g} away from the solution"


def _is_close(got: Output, expected: Output, allowed: float) -> bool:
    """Return whether the finite entries of two outputs agree; fully masked rows may be NaN."""
    if isinstance(got, str) or isinstance(expected, str) or got.shape != expected.shape:
        return False
    finite = got.isfinite() & expected.isfinite()
    return bool(finite.any()) and not _difference(got[finite], expected.double()[finite], allowed)


def _with_mistakes(text: str, function: str) -> Iterator[tuple[tuple[str, ...], Function]]:
    """Yield the solution under each mistake, then under each pair of mistakes in different lines."""
    lines = text.splitlines()
    mistakes = []
    for i, line in enumerate(lines):
        if match := _MISTAKE.match(line):
            position = max(n for n in range(i) if not lines[n].strip().startswith("#"))
            mistakes.append((position, match[1], match[2]))
    for subset in (*[(mistake,) for mistake in mistakes], *combinations(mistakes, 2)):
        if len({position for position, _, _ in subset}) == len(subset):
            program = list(lines)
            for position, code, _ in subset:
                program[position] = lines[position][: len(lines[position]) - len(lines[position].lstrip())] + code
            yield tuple(reason for _, _, reason in subset), _compile_function("\n".join(program), function)
