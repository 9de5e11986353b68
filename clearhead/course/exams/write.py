"""Write the question papers and the solution booklets of an exam."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import ascii_uppercase

from clearhead.course.answers import render
from clearhead.course.answers.booklet import Booklet
from clearhead.course.exams import text, typeset
from clearhead.course.exams.booklet import solution_booklet
from clearhead.course.exams.content import Paper, paper
from clearhead.course.exams.exam import Exam
from clearhead.course.exams.solutions_latex import latex
from clearhead.errors import ConfigError

_PAPERS: dict[str, Callable[[Paper], str | bytes]] = {
    ".pdf": typeset.pdf,
    ".typ": typeset.typst_source,
    ".tex": text.latex,
    ".md": text.markdown,
}
_BOOKLETS: dict[str, Callable[[Booklet], str | bytes]] = {
    ".pdf": render.pdf,
    ".typ": render.typst_source,
    ".tex": latex,
    ".md": render.markdown,
}
FORMATS = tuple(_PAPERS)


def write_exam(exam: Exam, out: Path, *, seed: int | None = None, variants: int = 1) -> list[Path]:
    """Write the question paper and the solution booklet of each variant.

    Args:
        exam: The exam.
        out: Path of the paper, ending in .pdf, .typ, .tex or .md.
        seed: New numbers; None keeps those of the exercises unless there are several variants.
        variants: Number of variants, named A, B, C, …

    Returns:
        The paths of all files.

    Raises:
        ConfigError: If the name of the file has another ending, or the exam has no question.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(
            f"{out.name or out} is not a name for an exam; expected a name ending in {', '.join(FORMATS)}"
        )
    if not exam.questions:
        raise ConfigError(f"{exam.title} has no question, so there is nothing to write")
    contents: list[tuple[str, str, str | bytes]] = []  # all computed before any is written
    for i in range(variants):
        name = ascii_uppercase[i] if variants > 1 else ""
        # Exam seeds map to disjoint ranges of seeds, so that variants of two exams never coincide.
        variant_seed = None if seed is None and variants == 1 else (seed or 0) * len(ascii_uppercase) + i
        sheet = paper(exam, name, variant_seed)
        contents.append((name, "", _PAPERS[out.suffix](sheet)))
        contents.append((name, "solutions", _BOOKLETS[out.suffix](solution_booklet(sheet))))
    return [_write(out, *content) for content in contents]


def _write(out: Path, variant: str, ending: str, content: str | bytes) -> Path:
    suffix = "".join(f"-{part}" for part in (variant, ending) if part)
    path = out.with_name(f"{out.stem}{suffix}{out.suffix}")
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
