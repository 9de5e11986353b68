"""Answer files: TOML, JSON or CSV, one student each, or a CSV with a whole class in it.

TOML   z = [[3, 0], [0, "3/4"]]            JSON   {"z": [[3, 0], [0, "3/4"]]}, or a blank sheet filled in
CSV    z,3,0                               a line for each row of a matrix; with the heading "student,step"
       z,0,3/4                             each line begins with whose it is
"""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from clearhead.errors import StorageError
from clearhead.work.problem import read_text
from clearhead.work.source import ProblemError, Source

ENDINGS = (".toml", ".json", ".csv")


def answer_files(paths: list[Path]) -> list[Path]:
    """The files, with the answer files of a folder in place of the folder."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in ENDINGS) if path.is_dir() else [path]
        if not inside:
            raise StorageError(f"{path} has no answer files in it; expected names that end in {', '.join(ENDINGS)}")
        found += inside
    return found


def read_answers(path: Path) -> list[tuple[str, Source]]:
    """Every student's answers in a file: whose they are (the file's name unless it says so), and what was answered."""
    text, ending = read_text(path), path.suffix.lower()
    if ending == ".csv":
        return _csv(text, path)
    source = _json(text, path.name) if ending == ".json" else Source.parse(text, path.name)
    student = source.values.pop("student", path.stem)
    return [(str(student), source)]


def _json(text: str, name: str) -> Source:
    try:
        values = json.loads(text, parse_float=Decimal, parse_constant=str)
    except (ValueError, RecursionError, ArithmeticError) as error:
        line = getattr(error, "lineno", 1)
        raise ProblemError(f"{name}, line {line}: this is not JSON: {error}", line=line) from None
    if not isinstance(values, dict):
        raise ProblemError(f"{name}: this is a list or a single value; expected an object of steps and answers")
    steps = values.get("steps")
    if isinstance(steps, list):  # a sheet of `--blank --format json`, filled in
        whose = {"student": values["student"]} if "student" in values else {}
        filled = {s.get("key"): s.get("exact") for s in steps if isinstance(s, dict) and not s.get("given")}
        values = whose | {key: cells for key, cells in filled.items() if _has_something(cells)}
    return Source(name, values)


def _has_something(cells: Any) -> bool:
    return any(map(_has_something, cells)) if isinstance(cells, list) else cells not in ("", None)


def _csv(text: str, path: Path) -> list[tuple[str, Source]]:
    """Lines of a step's name and the cells of one row; a step of several lines is a matrix, of one cell a number."""
    try:
        lines = [[cell.strip() for cell in line] for line in csv.reader(io.StringIO(text, newline="")) if any(line)]
    except csv.Error as error:
        raise ProblemError(f"{path.name}: this is not CSV: {error}") from None
    whole_class = bool(lines) and lines[0][0].lower() == "student"
    if lines and (whole_class or lines[0][0].lower() == "step"):
        lines = lines[1:]
    found: dict[str, dict[str, list[Any]]] = {}
    for line in lines:
        student, *line = line if whole_class else [path.stem, *line]
        step, *cells = line or [""]
        while cells and not cells[-1]:  # a spreadsheet fills short lines up
            cells.pop()
        if step and cells:
            found.setdefault(student, {}).setdefault(step, []).append(cells)
    return [
        (student, Source(path.name, {key: _value(rows) for key, rows in steps.items()}))
        for student, steps in (found or {path.stem: {}}).items()
    ]


def _value(rows: list[list[str]]) -> Any:
    width = max(map(len, rows))
    if width == 1:
        return [row[0] for row in rows] if len(rows) > 1 else rows[0][0]
    return [row + [""] * (width - len(row)) for row in rows] if len(rows) > 1 else rows[0]
