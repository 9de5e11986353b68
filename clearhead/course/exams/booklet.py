"""Solution booklets: the model answers and mark schemes of an exam, with the results of each variant's numbers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from clearhead.course.answers import booklet as model_booklet
from clearhead.course.answers.blocks import Block, Box, Line, Paragraph, Program, Sheet, Span, plain, walk
from clearhead.course.answers.booklet import Booklet, ResolvedAnswer, ResolvedMark
from clearhead.course.answers.model_answer import has_answer
from clearhead.course.exams.content import Paper, PaperPart, PaperQuestion
from clearhead.course.exams.exam import ExamQuestion
from clearhead.course.exercises import Worksheet, WorksheetStep, solve
from clearhead.course.exercises.numbers import exact_and_decimal

_OTHER_ORDER = "The model answer counts the options in the order of the original exam."
_OTHER_NUMBERS = (
    "The model answer uses the numbers of the original exercise; the results above are those of this paper."
)


def solution_booklet(paper: Paper) -> Booklet:
    """Return the answers to a paper; render it with `clearhead.course.answers.render`.

    Args:
        paper: One variant of an exam.

    Returns:
        A booklet with, for each question, the results of its numbers, the model answer and the mark scheme.
    """
    seed = f" (seed {paper.seed})" if paper.seed is not None else ""
    title = f"{paper.title}: solutions{seed}"
    answers = tuple(_answer(paper, question) for question in paper.questions)
    return Booklet(paper.exam.title, title, answers, is_whole=True)


def _answer(paper: Paper, question: PaperQuestion) -> ResolvedAnswer:
    source = question.question
    model = _model_answer(source)
    blocks = _choices(question)
    if model is not None and paper.seed is not None and any(part.options for part in question.parts):
        blocks.append(Paragraph((Span(_OTHER_ORDER, "emphasis"),)))
    sheet = _results(question, is_original=paper.seed is None)
    is_shown = model is not None and paper.seed is None and sheet is not None and _contains(model, sheet)
    if sheet is not None and not is_shown:
        blocks.append(Sheet(sheet))
        if any(part.fields for part in question.parts):
            grade = f"clearhead exercise grade {source.exercise} FILES"
            grade += f" --seed {paper.seed}" if paper.seed is not None else ""
            blocks.append(Paragraph((Span("To mark answers in files: "), Span(grade, "code"))))
    if model is not None:
        if sheet is not None and paper.seed is not None:
            blocks.append(Paragraph((Span(_OTHER_NUMBERS, "emphasis"),)))
        blocks += model.blocks
    blocks += [
        Box(f"Answer{f' ({part.label})' if part.label else ''}", (Paragraph(plain(part.part.solution)),))
        for part in question.parts
        if part.part.solution
    ]
    marks = tuple(
        mark
        for part in question.parts
        for mark in _marks(part, model, keeps_numbers=paper.seed is None or _keeps(part, question))
    )
    return ResolvedAnswer(
        location=f"{question.number}. {source.title}",
        question=_question_text(question),
        blocks=tuple(blocks),
        marks=marks,
        total=source.points,
        uses_default_total=model is not None and model.uses_default_total,
        commands=model.commands if model is not None else (),
        has_free_text=any(not part.options and not part.fields for part in question.parts),
    )


def _question_text(question: PaperQuestion) -> str:
    """Return the words of a question and of its parts."""
    parts = [f"({part.label}) {part.part.text}" if part.label else part.part.text for part in question.parts]
    return " ".join(" ".join([question.text, *parts]).split())


def _model_answer(question: ExamQuestion) -> ResolvedAnswer | None:
    if not question.slug or not has_answer(question.slug, question.location):
        return None
    return model_booklet.booklet(question.slug, question.location).answers[0]


def _choices(question: PaperQuestion) -> list[Block]:
    """Return a sentence per multiple-choice part, with the letter that it has in this variant."""
    blocks: list[Block] = []
    for part in question.parts:
        if part.correct:
            text = dict(part.options)[part.correct]
            label = f"({part.label}) " if part.label else ""
            blocks.append(Paragraph((Span(f"{label}Correct option: {part.correct}.", "strong"), Span(f" {text}"))))
    if question.program:
        blocks.append(Program(question.program))
    return blocks


def _results(question: PaperQuestion, *, is_original: bool) -> Worksheet | None:
    """Return the worksheet with its data and the steps that are asked, or None if no step is asked.

    A variant also shows steps that are part of answers on blank space; those of the original are in its model answer.
    """
    if question.worksheet is None:
        return None
    selected = {step.key: step for part in question.parts for step in part.fields}
    if not is_original:
        keys = [key for part in question.parts for key in part.part.results]
        selected |= {key: question.worksheet.step(key) for key in keys}
    if not selected:
        return None
    steps = tuple(
        selected.get(step.key, step)
        for step in question.worksheet.steps
        if step.key in selected or (step.is_given and step in question.data)
    )
    return replace(question.worksheet, steps=steps, comparisons=(), remarks=(), checks=(), source="", question="")


def _contains(answer: ResolvedAnswer, sheet: Worksheet) -> bool:
    """Return whether a model answer already shows these steps."""
    keys = {
        (block.worksheet.name, step.key)
        for block in walk(answer.blocks)
        if isinstance(block, Sheet)
        for step in block.worksheet.steps
    }
    return all((sheet.name, step.key) in keys for step in sheet.steps if not step.is_given)


def _result(step: WorksheetStep) -> str:
    """Return the title of a step, and its result if that is one number."""
    title = f"{step.title[0].lower()}{step.title[1:]}"
    if not step.grid.is_scalar:
        return title
    value = step.grid.cells[0][0]
    return f"{title}: {int(value):,}" if value.is_Integer else f"{title}: {exact_and_decimal(value)}"


def _keeps(part: PaperPart, question: PaperQuestion) -> bool:
    """Return whether the results of a part are those of the original exercise, as in its mark scheme."""
    if part.part.variant_marks or question.worksheet is None:
        return not part.part.variant_marks
    original = solve(question.question.exercise)
    keys = [*[step.key for step in part.fields], *part.part.results]
    return all(question.worksheet.step(key).grid == original.step(key).grid for key in keys)


def _marks(part: PaperPart, model: ResolvedAnswer | None, *, keeps_numbers: bool) -> list[ResolvedMark]:
    """Return the lines of the mark scheme that belong to a part; other results than the original's are stated."""
    label: Line = (Span(f"({part.label}) "),) if part.label else ()
    points = Fraction(part.part.points)
    if part.correct:
        return [ResolvedMark(points, (*label, *plain(f"marks {part.correct}, and no other option")))]
    if part.part.marks and model is not None and (keeps_numbers or not part.fields):
        selected = [model.marks[number - 1] for number in part.part.marks]
        lines = [mark.line for mark in selected]
        if part.part.variant_marks and not keeps_numbers:
            lines = [plain(text) for text in part.part.variant_marks]
        return [replace(mark, line=(*label, *line)) for mark, line in zip(selected, lines, strict=True)]
    if part.fields and model is not None:
        results = "; ".join(map(_result, part.fields))
        between = ";" if any(step.grid.is_scalar for step in part.fields) else ":"
        note = f"{between} in proportion to the correct entries" if part.n_entries > 1 else ""
        return [ResolvedMark(points, (*label, *plain(results + note)))]
    return [ResolvedMark(points, (*label, *plain(" ".join(part.part.text.split()))))]
