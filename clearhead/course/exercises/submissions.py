"""Read the answers of students: TOML, JSON and CSV files, or folders of them."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from clearhead.course.exercises.problem import read_text
from clearhead.course.exercises.source import ProblemError, ProblemSource
from clearhead.errors import StorageError

ENDINGS = (".toml", ".json", ".csv")


def answer_files(paths: list[Path]) -> list[Path]:
    """Return the files, with folders replaced by the answer files in them.

    Args:
        paths: Files and folders.

    Raises:
        StorageError: If a folder contains no answer files.
    """
    files: list[Path] = []
    for path in paths:
        entries = sorted(p for p in path.iterdir() if p.suffix.lower() in ENDINGS) if path.is_dir() else [path]
        if not entries:
            raise StorageError(f"{path} has no answer files; expected names ending in {', '.join(ENDINGS)}")
        files += entries
    return files


def read_answers(path: Path) -> list[tuple[str, ProblemSource]]:
    """Return the name (by default that of the file) and the answers of each student in a file."""
    text = read_text(path)
    ending = path.suffix.lower()
    if ending == ".csv":
        return _parse_csv(text, path)
    source = _parse_json(text, path.name) if ending == ".json" else ProblemSource.parse(text, path.name)
    student = source.values.pop("student", path.stem)
    return [(str(student), source)]


def _parse_json(text: str, name: str) -> ProblemSource:
    try:
        values = json.loads(text, parse_float=Decimal, parse_constant=str)
    except (ValueError, RecursionError, ArithmeticError) as error:
        line = getattr(error, "lineno", 1)
        raise ProblemError(f"{name}, line {line}: this is not JSON: {error}", line=line) from None
    if not isinstance(values, dict):
        raise ProblemError(f"{name}: got a list or a single value; expected an object of steps and answers")
    steps = values.get("steps")
    if isinstance(steps, list):  # a completed question sheet (`--questions-only --json`)
        whose = {"student": values["student"]} if "student" in values else {}
        filled = {s.get("key"): s.get("exact") for s in steps if isinstance(s, dict) and not s.get("given")}
        values = whose | {key: cells for key, cells in filled.items() if _is_nonempty(cells)}
    return ProblemSource(name, values)


def _is_nonempty(cells: object) -> bool:
    return any(map(_is_nonempty, cells)) if isinstance(cells, list) else cells not in ("", None)


def _parse_csv(text: str, path: Path) -> list[tuple[str, ProblemSource]]:
    """Parse lines with the name of a step and the cells of one row; several lines with the same name are a matrix."""
    try:
        lines = [[cell.strip() for cell in line] for line in csv.reader(io.StringIO(text, newline="")) if any(line)]
    except csv.Error as error:
        raise ProblemError(f"{path.name}: this is not CSV: {error}") from None
    has_students = bool(lines) and lines[0][0].lower() == "student"
    if lines and (has_students or lines[0][0].lower() == "step"):
        lines = lines[1:]
    students: dict[str, dict[str, list[Any]]] = {}
    for line in lines:
        student, *line = line if has_students else [path.stem, *line]
        step, *cells = line or [""]
        while cells and not cells[-1]:  # spreadsheets pad short lines
            cells.pop()
        if step and cells:
            students.setdefault(student, {}).setdefault(step, []).append(cells)
    return [
        (student, ProblemSource(path.name, {key: _cell_values(rows) for key, rows in steps.items()}))
        for student, steps in (students or {path.stem: {}}).items()
    ]


def _cell_values(rows: list[list[str]]) -> object:
    width = max(map(len, rows))
    if width == 1:
        return [row[0] for row in rows] if len(rows) > 1 else rows[0][0]
    return [row + [""] * (width - len(row)) for row in rows] if len(rows) > 1 else rows[0]
