"""Exams on paper: worksheets with points, in variants, as a question paper and a solution booklet.

An exam is built from a course document, or read from a file:

    title = "Attention, first test"
    [[question]]
    sheet = "sort-dedup"            # a bundled exercise, or a .toml file in the same folder
    points = 8
    steps = ["weights", "loss"]     # steps to ask for; default: all
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import sympy

from clearhead.course.exercises.problem import read_text, solve
from clearhead.course.exercises.render import Style, latex, markdown
from clearhead.course.exercises.render.latex import math, number_in_latex, symbol_in_latex, words
from clearhead.course.exercises.render.layout import TOO_LONG, StepBlock, step_blocks
from clearhead.course.exercises.sheet import Worksheet
from clearhead.course.exercises.source import ProblemSource
from clearhead.course.exercises.variants import variant
from clearhead.course.sources import document
from clearhead.errors import ConfigError, optional_dependency

FORMATS = (".pdf", ".typ", ".tex", ".md")
_RULES = (
    "Show your work on separate paper and hand it in; enter the results of (a), (b) and so on here.",
    "Give exact numbers (fractions, roots, powers of e) or decimals with at least three places.",
    "A step that follows correctly from an earlier wrong step gets full points.",
)


@dataclass(frozen=True)
class ExamTask:
    """An exercise of an exam: its points and the steps that are asked."""

    sheet: str
    points: int = 0
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exam:
    """An exam: title, questions and a note about its origin."""

    title: str
    tasks: tuple[ExamTask, ...]
    about: str = ""


def exam_from_document(slug: str) -> Exam:
    """Return an exam of the questions of a course document whose first answer is an exercise.

    Questions about the same exercise are merged.
    """
    source = document(slug)
    tasks: dict[str, ExamTask] = {}
    for question in source.questions:
        if question.answers[0].kind == "exercise":
            sheet = question.answers[0].command.split()[2]
            before = tasks.get(sheet, ExamTask(sheet))
            steps = before.steps + tuple(s for s in question.steps if s not in before.steps)
            tasks[sheet] = ExamTask(sheet, before.points + question.points, steps)
    return Exam("Exam", tuple(tasks.values()), f"After {source.name}")


def read_exam(path: Path) -> Exam:
    """Read an exam file; problem files are relative to its folder."""
    source = ProblemSource.parse(read_text(path), path.name)
    source.allow_keys("title", "about", "question")
    source.require_keys("title", "question")
    tasks = []
    for block in source.tables("question"):
        block.allow_keys("sheet", "points", "steps")
        block.require_keys("sheet")
        sheet = block.text("sheet")
        sheet = str(path.parent / sheet) if sheet.endswith(".toml") else sheet
        questions = {step.key for step in solve(sheet).steps if not step.is_given}
        steps = block.names("steps")
        for i, step in enumerate(steps):
            if step not in questions:
                block.fail(
                    ("steps", i), f"{sheet} has no step {step!r}; expected one of {', '.join(sorted(questions))}"
                )
        tasks.append(ExamTask(sheet, block.integer("points", 0, least=0, most=1000), tuple(steps)))
    return Exam(source.text("title"), tuple(tasks), source.text("about"))


def write_exam(exam: Exam, out: Path, *, seed: int | None = None, variants: int = 1) -> list[Path]:
    """Write the question paper and the solution booklet of each variant.

    Args:
        exam: The exam.
        out: Path of the paper, ending in .pdf, .typ, .tex or .md.
        seed: New numbers; None keeps those of the exercises unless there are several variants.
        variants: Number of variants, named A, B, C, …

    Returns:
        The paths of all files.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(
            f"{out.name or out} is not a name for an exam; expected a name ending in {', '.join(FORMATS)}"
        )
    if not exam.tasks:
        raise ConfigError(f"{exam.title} has no question with an exercise, so there is nothing to write")
    paths = []
    for i in range(variants):
        name = ascii_uppercase[i] if variants > 1 else ""
        # Exam seeds map to disjoint ranges of seeds, so that variants of two exams never coincide.
        variant_seed = None if seed is None and variants == 1 else (seed or 0) * len(ascii_uppercase) + i
        worksheets = [_select_steps(task, variant_seed) for task in exam.tasks]
        for solutions in (False, True):
            end = "".join(f"-{part}" for part in (name, "solutions" if solutions else "") if part)
            path = out.with_name(f"{out.stem}{end}{out.suffix}")
            path.write_bytes(_paper(exam, worksheets, variant_seed, name, solutions, out.suffix))
            paths.append(path)
    return paths


def _paper(exam: Exam, worksheets: list[Worksheet], seed: int | None, name: str, solutions: bool, ending: str) -> bytes:
    pairs, running = list(zip(worksheets, exam.tasks, strict=True)), exam.title + (f", variant {name}" if name else "")
    if ending in (".md", ".tex"):
        return _text(
            pairs, running + (", solutions" if solutions else ""), Style(questions_only=not solutions), ending
        ).encode()
    data = {
        "title": exam.title, "about": exam.about, "variant": name, "solutions": solutions, "rules": _RULES,
        "running": running, "total": sum(task.points for task in exam.tasks),
        "questions": [_question(i, worksheet, task, seed, solutions) for i, (worksheet, task) in enumerate(pairs, 1)],
    }  # fmt: skip
    template = (resources.files("clearhead.course.exercises.render") / "exam.typ").read_text(encoding="utf-8")
    document = json.dumps(data, ensure_ascii=False)
    if ending == ".typ":
        return template.replace("bytes(sys.inputs.data)", f"bytes({json.dumps(document)})").encode()
    with optional_dependency("a PDF needs typst: pip install 'clearhead[print]', or write .tex or .md"):
        import typst
    return bytes(typst.compile(template.encode(), sys_inputs={"data": document}))


def _select_steps(task: ExamTask, seed: int | None) -> Worksheet:
    """Return the worksheet with its data and the steps that are asked."""
    worksheet = solve(task.sheet if seed is None else variant(task.sheet, seed))
    steps = [step for step in worksheet.steps if step.is_given or not task.steps or step.key in task.steps]
    return replace(worksheet, steps=tuple(steps), comparisons=(), remarks=() if task.steps else worksheet.remarks)


def _text(pairs: list[tuple[Worksheet, ExamTask]], title: str, style: Style, ending: str) -> str:
    """Return all worksheets as one Markdown or LaTeX document."""
    headed = [
        replace(worksheet, title=f"{i}. {worksheet.title}" + (f" ({task.points} points)" if task.points else ""))
        for i, (worksheet, task) in enumerate(pairs, 1)
    ]
    if ending == ".md":
        return f"# {title}\n\n" + "\n".join(re.sub(r"(?m)^#", "##", markdown(worksheet, style)) for worksheet in headed)
    begin, end = r"\begin{document}", r"\end{document}"
    parts = [latex(worksheet, style).partition(begin) for worksheet in headed]
    sheets = "\\newpage\n".join(part[2].partition(end)[0] for part in parts)
    return f"{parts[0][0]}{begin}\n\\title{{{words(title)}}}\\date{{}}\\maketitle\n{sheets}{end}\n"


def _question(number: int, worksheet: Worksheet, task: ExamTask, seed: int | None, solutions: bool) -> dict[str, Any]:
    blocks = [
        (block, _cell_table(block))
        for block in step_blocks(worksheet, Style(questions_only=not solutions), number_in_latex)
    ]
    inputs = [single for block, table in blocks if block.step.is_given for single in _as_equations(block, table)]
    steps = [(block, table) for block, table in blocks if not block.step.is_given]
    points = [task.points // len(steps) + (i >= len(steps) - task.points % len(steps)) for i in range(len(steps))]
    questions = [
        table | {
            "label": ascii_lowercase[i], "title": block.step.title, "points": points[i] if min(points) > 0 else 0,
            "formula": None if block.step.latex.startswith(r"\text{") else _math(block.step.latex),
            "words": block.step.formula, "note": block.step.note if solutions else "",
            "legend": [[letter, _math(value)] for letter, value in block.legend if table["decimals"]],
        }
        for i, (block, table) in enumerate(steps)
    ]  # fmt: skip
    return {
        "number": number, "title": worksheet.title, "points": task.points, "text": " ".join(worksheet.question.split()),
        "given": inputs, "steps": questions, "remarks": list(worksheet.remarks),
        "command": f"clearhead exercise grade {task.sheet} FILES" + (f" --seed {seed}" if seed is not None else ""),
    }  # fmt: skip


def _as_equations(block: StepBlock, table: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one equation per number if the step lists single numbers; other tables unchanged."""
    if block.step.key != "given":
        return [table]
    return [
        table | {"symbol": _math(symbol_in_latex(name)) or f'"{name}"', "one": True, "cells": [row], "decimals": None}
        for name, row in zip(block.rows, table["cells"], strict=True)
    ]


def _math(latex: str) -> str | None:
    """Return mathematics for Typst, or None if Typst cannot express it and plain text is used."""
    try:
        return math(latex) if latex else None
    except LookupError:
        return None


def _cell_table(block: StepBlock) -> dict[str, Any]:
    """Return a table for the template: cells are mathematics, words, or None for an answer field."""
    step = block.step
    digits = any(not isinstance(x, str) and x.has(sympy.Float) for x in step.grid.flat)
    words = {j for j in range(len(step.grid.columns)) if all(isinstance(row[j], str) for row in step.grid.cells)}

    def cell(content: str, value: Any, exact: bool, column: int) -> dict[str, str | None] | None:
        content = content or (value if column in words else "")  # words are not questions
        if not content:
            return None
        plain = isinstance(value, str) or content == TOO_LONG or not exact
        return {"math": None if plain else _math(content), "text": content}

    def table(rows: list[list[str]] | None, exact: bool) -> Any:
        if rows is None:
            return None
        pairs = zip(rows, step.grid.cells, strict=True)
        return [[cell(x, v, exact, j) for j, (x, v) in enumerate(zip(*row, strict=True))] for row in pairs]

    return {
        "symbol": _math(symbol_in_latex(step.symbol)) if step.symbol else None,
        "rows": list(block.rows), "columns": list(block.columns), "one": step.grid.is_scalar,
        "cells": table(block.decimals if digits and block.decimals else block.exact, not digits),
        "decimals": None if digits else table(block.decimals, False),
    }  # fmt: skip
