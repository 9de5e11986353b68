"""Exams: every question of a document on paper, solution booklets, variants and seeds."""

from __future__ import annotations

import json
import re
import sys

import pytest
import sympy

from clearhead.cli.app import run as run_command
from clearhead.course.answers import render
from clearhead.course.answers.blocks import Sheet, plain_text
from clearhead.course.answers.booklet import GRADING_NOTE
from clearhead.course.answers.model_answer import model_answer
from clearhead.course.exams import FORMATS, Exam, ExamPart, ExamQuestion, exam_from_document, read_exam, write_exam
from clearhead.course.exams.booklet import solution_booklet
from clearhead.course.exams.content import network_program, paper
from clearhead.course.exams.exam import share_points
from clearhead.course.exams.typeset import typst_source
from clearhead.course.exercises import ProblemError, solve, variant
from clearhead.course.exercises.render.latex import math
from clearhead.course.sources import SLUGS, document
from clearhead.errors import ClearheadError

SMALL = Exam(
    "Two questions",
    (
        ExamQuestion(
            "The norm of a vector",
            "Calculate.",
            (ExamPart("Mean.", 2, ("mean",)), ExamPart("Normalized vector.", 5, ("z",))),
            7,
            "layer-norm-identity",
        ),
        ExamQuestion(
            "Positions",
            "",
            (
                ExamPart("Which is true?", 3, choices=("Two.", "Three.", "Four."), correct=2),
                ExamPart("Prove that 1 + 1 = 2.", 4, answer="proof", solution="By definition."),
            ),
            7,
        ),
    ),
)


def data(path) -> dict:
    """What a .typ file carries."""
    return json.loads(json.loads(re.search(r'json\(bytes\((".*?(?<!\\)")\)\)', path.read_text())[1]))


def words(runs) -> str:
    return "".join(run["text"] for run in runs)


@pytest.mark.parametrize(
    ("latex", "typst"),
    [
        (r"\frac{3}{2} \sqrt{x}", "frac(3, 2) sqrt(x)"),
        (r"\tfrac12 \mathrm{lr}_{\max}", 'frac(1, 2) "lr" _(max)'),
        (r"\left\lfloor \frac{n + 2p}{s} \right\rfloor", "⌊ frac(n + 2 p, s) ⌋"),
        (r"\sqrt[64]{10}", "root(64, 10)"),
        (r"S_{ij} = -\infty \text{ where \_x}", 'S _(i j) = - ∞ " where _x"'),
        (
            r"\operatorname{softmax}(S / T), \quad T = 1048576",
            r'op("softmax") ( S \/ T ) \, quad T = 1 class("normal", \,) 048 class("normal", \,) 576',
        ),
        (r"e^{2}", "e ^(2)"),
    ],
)
def test_math_translates_latex_to_typst(latex, typst):
    assert math(latex) == typst


def test_math_with_unknown_command_raises():
    with pytest.raises(LookupError, match=r"\\wombat"):
        math(r"\wombat{3}")


def test_typst_compiles_mathematics_of_worksheets():
    typst = pytest.importorskip("typst")
    formulas = []
    for name in ("sort-dedup", "schedule", "eight-heads", "softmax-jacobian", "score-variance", "sinusoid-position-3"):
        for step in solve(name).steps:
            numbers = [x for row in step.grid.cells for x in row if not isinstance(x, str) and sympy.count_ops(x) < 30]
            formulas += [math(latex) for latex in (step.latex, *map(sympy.latex, numbers[:4])) if latex]
    lines = '#let d = json(bytes(sys.inputs.d))\n#for m in d { [$#eval(m, mode: "math")$ \\ ] }'
    assert len(typst.compile(lines.encode(), sys_inputs={"d": json.dumps(formulas)})) > 1000


@pytest.mark.parametrize("slug", SLUGS)
def test_exam_from_document_has_every_question_and_point(slug):
    exam, source = exam_from_document(slug), document(slug)
    assert [question.location for question in exam.questions] == [question.location for question in source.questions]
    for question, original in zip(exam.questions, source.questions, strict=True):
        assert question.points == (original.points or 10)
        assert sum(part.points for part in question.parts) == question.points


@pytest.mark.parametrize("slug", SLUGS)
def test_booklet_marks_every_part_by_lines_of_the_mark_scheme(slug):
    sheet = paper(exam_from_document(slug))
    answers = solution_booklet(sheet).answers
    for question, answer in zip(sheet.questions, answers, strict=True):
        scheme = model_answer(slug, question.question.location).marks
        for part in question.parts:
            prefix = f"({part.label}) " if part.label else ""
            lines = [mark for mark in answer.marks if plain_text(mark.line).startswith(prefix)]
            assert sum(mark.points for mark in lines) == part.part.points
            if part.part.marks and not part.options:
                assert [mark.points for mark in lines] == [scheme[number - 1].points for number in part.part.marks]
            else:
                assert part.fields or part.options
        assert sum(mark.points for mark in answer.marks) == question.question.points


def test_booklet_of_a_variant_marks_results_without_the_original_numbers():
    whole = exam_from_document("deep-learning-final")
    exam = Exam("Two", tuple(q for q in whole.questions if q.location in ("Part 1, Q1", "Part 3, 1.2")))
    sheet = paper(exam, seed=5)
    choice, weights = ([plain_text(mark.line) for mark in a.marks] for a in solution_booklet(sheet).answers)
    assert choice == [f"marks {sheet.questions[0].parts[0].correct}, and no other option"]
    assert weights == ["trainable weights, with biases: in proportion to the correct entries"]
    original = [plain_text(mark.line) for mark in solution_booklet(paper(exam)).answers[1].marks]
    assert "208" in original[0]


def test_booklet_of_a_variant_shows_results_of_answers_on_blank_space():
    whole = exam_from_document("deep-learning-final")
    locations = ("Part 3, 1.3", "Part 3, 1.4", "Part 3, 2.2")
    exam = Exam("Three", tuple(q for q in whole.questions if q.location in locations))
    sheet = paper(exam, seed=5)
    for question, answer in zip(sheet.questions, solution_booklet(sheet).answers, strict=True):
        first = next(block for block in answer.blocks if isinstance(block, Sheet)).worksheet
        for part in question.parts:
            for key in part.part.results:
                assert first.step(key).grid == question.worksheet.step(key).grid
            lines = [plain_text(mark.line) for mark in answer.marks]
            assert all(any(line.endswith(text) for line in lines) for text in part.part.variant_marks)
    flat = sheet.questions[0].worksheet.step("shapes").grid.cells[5][0]
    text = render.markdown(solution_booklet(sheet))
    assert f"| Flatten | {flat} | 1 | 1 |" in text
    scheme = [plain_text(mark.line) for answer in solution_booklet(sheet).answers for mark in answer.marks]
    assert not any("144" in line or "nines" in line for line in scheme)
    original = [plain_text(mark.line) for answer in solution_booklet(paper(exam)).answers for mark in answer.marks]
    assert any("144" in line for line in original)


def test_paper_prints_selected_rows_and_default_sizes():
    exam = exam_from_document("deep-learning-final")
    network = next(q for q in paper(exam).questions if q.question.location == "Part 3, 1.2")
    layers = next(step for step in network.data if step.key == "layers")
    assert [str(cell) for cell in layers.grid.cells[0]] == ["convolution", "8", "5", "1", "0", "-"]
    schedule = next(q for q in paper(exam_from_document("ceng403-exam")).questions if q.question.location == "Q7a")
    (rates,) = (part.fields[0] for part in schedule.parts if part.fields)
    assert list(rates.grid.rows) == ["2,000", "20,000", "52,000"]


def test_totals_of_exams_match_documents():
    totals = {"ceng403-exam": 150, "ceng403-answered": 55, "deep-learning-final": 100}
    assert {slug: exam_from_document(slug).points for slug in totals} == totals
    assert "gives no points" in exam_from_document("csci2572-homework").about


@pytest.mark.parametrize("slug", SLUGS)
def test_paper_has_room_for_every_answer_and_gives_none_away(slug):
    sheet = paper(exam_from_document(slug))
    for question in sheet.questions:
        for part in question.parts:
            assert part.options or part.fields or part.size >= 24
            assert bool(part.options) == bool(part.correct)
            cells = sum(len(step.grid.numbers) for step in part.fields if step.key != "mask")
            assert cells <= 12 * part.part.points + 2
            for step in part.fields:
                assert not step.is_given
            text = question.text + part.part.text
            assert not re.search(r"\{\w+\}|clearhead|window\(|every\(", text)


@pytest.mark.parametrize("slug", SLUGS)
def test_paper_compiles(slug, tmp_path):
    typst = pytest.importorskip("typst")
    from clearhead.course.exams import typeset

    source = typeset.typst_source(paper(exam_from_document(slug)))
    assert typst.compile(source.encode()).startswith(b"%PDF")


def test_write_exam_writes_fields_and_solutions(tmp_path):
    path, booklet = write_exam(SMALL, tmp_path / "exam.typ", seed=3)
    assert (path.name, booklet.name) == ("exam.typ", "exam-solutions.typ")
    content = data(path)
    assert content["total"] == 14
    first, second = content["questions"]
    assert [part["points"] for part in first["parts"]] == [2, 5]
    assert all(
        cell is None for part in first["parts"] for field in part["fields"] for row in field["cells"] for cell in row
    )
    assert [letter for letter, _ in second["parts"][0]["options"]] == ["A", "B", "C"]
    assert second["parts"][1]["answer"] == "proof"
    work = solve(variant("layer-norm-identity", 3 * 26))
    mean = work.step("mean").grid.cells[0][0]
    solutions = render.terminal(solution_booklet(paper(SMALL, seed=78)))
    assert f"{mean}".replace("-", "−") in solutions
    assert "--seed 78" in " ".join(solutions.split())
    assert "solutions (seed 78)" in solutions
    assert "By definition." in solutions


def test_booklet_names_the_correct_option_of_each_variant():
    letters = set()
    for seed in range(8):
        sheet = paper(SMALL, seed=seed)
        part = sheet.questions[1].parts[0]
        assert dict(part.options)[part.correct] == "Three."
        assert f"Correct option: {part.correct}." in render.terminal(solution_booklet(sheet))
        letters.add(part.correct)
    assert len(letters) > 1, "options are shuffled"


def test_booklet_contains_model_answer_and_mark_scheme():
    whole = exam_from_document("deep-learning-final")
    exam = Exam("One", tuple(q for q in whole.questions if q.location == "Part 1, Q4"))
    text = render.markdown(solution_booklet(paper(exam)))
    assert "126" in text
    assert "Mark scheme" in text
    other = render.markdown(solution_booklet(paper(exam, seed=5)))
    assert "numbers of the original exercise" in other


def test_exam_variants_differ_and_repeat_with_seed(tmp_path):
    names = [path.name for path in write_exam(SMALL, tmp_path / "a.typ", seed=3, variants=2)]
    assert names == ["a-A.typ", "a-A-solutions.typ", "a-B.typ", "a-B-solutions.typ"]
    write_exam(SMALL, tmp_path / "b.typ", seed=3, variants=2)
    first, second, again = (data(tmp_path / name) for name in ("a-A.typ", "a-B.typ", "b-A.typ"))
    assert (first["variant"], second["variant"]) == ("A", "B")
    assert first["questions"] == again["questions"]
    assert first["questions"][0]["given"] != second["questions"][0]["given"]


def test_write_exam_writes_every_format(tmp_path):
    pytest.importorskip("typst")
    begins = {".pdf": b"%PDF", ".typ": b"// Layout", ".tex": b"\\documentclass", ".md": b"# Two questions"}
    assert set(begins) == set(FORMATS)
    for ending, begin in begins.items():
        path, booklet = (path.read_bytes() for path in write_exam(SMALL, tmp_path / f"exam{ending}"))
        assert path.startswith(begin)
        assert path != booklet
    text, solved = ((tmp_path / name).read_text() for name in ("exam.md", "exam-solutions.md"))
    assert "## 1. The norm of a vector (7 points)" in text
    assert "- [ ] B. Three." in text
    assert "5.2500" not in text
    assert "Correct option: B." in solved
    for name in ("exam.tex", "exam-solutions.tex"):
        tex = (tmp_path / name).read_text()
        assert tex.count(r"\begin{document}") == tex.count(r"\end{document}") == 1
        assert tex.isascii()


@pytest.mark.parametrize(("points", "cells"), [(10, [1, 256, 16]), (8, [4, 4]), (7, [1, 1, 1, 49, 49]), (2, [9, 9, 9])])
def test_share_points_favors_larger_tables(points, cells):
    shares = share_points(points, cells)
    assert sum(shares) in (0, points)
    assert (min(shares) > 0) == (points >= len(cells))
    by_size = [share for _, share in sorted(zip(cells, shares, strict=True))]
    assert by_size == sorted(by_size)


def test_network_program_builds_layers_with_a_wrong_input_width():
    import torch
    from torch import nn

    model = eval(network_program(solve("cnn-digits")), {"nn": nn})
    assert model[:-1](torch.zeros(1, 1, 32, 32)).shape[1] == 144
    assert model[-1].in_features == 120, "the width in the document"
    for seed in range(12):
        sheet = solve(variant("cnn-digits", seed))
        model = eval(network_program(sheet), {"nn": nn})
        features = model[:-1](torch.zeros(1, *sheet.problem["input"])).shape[1]
        assert model[-1].in_features != features


def test_exam_file_is_written_by_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.toml").write_text('kind = "layer-norm"\ntitle = "Mine"\nx = [1, 3, 5]\n')
    (tmp_path / "exam.toml").write_text(
        'title = "My test"\n[[question]]\nsheet = "mine.toml"\npoints = 4\nsteps = ["mean"]\n'
        '[[question]]\nsheet = "convolution-128"\n'
        '[[question]]\ntitle = "In words"\n[[question.part]]\ntext = "Why?"\npoints = 3\nanswer = "code"\n'
    )
    out = tmp_path / "new" / "paper.typ"
    monkeypatch.setattr(
        sys, "argv", ["clearhead", "exam", "--from", str(tmp_path / "exam.toml"), "--out", str(out), "--json"]
    )
    with pytest.raises(SystemExit) as stop:
        run_command()
    assert not stop.value.code
    document = json.loads(capsys.readouterr().out)
    assert document["files"] == [str(out), str(out.with_name("paper-solutions.typ"))]
    questions = data(out)["questions"]
    assert [len(q["parts"]) for q in questions] == [1, 4, 1]
    assert [q["points"] for q in questions] == [4, 0, 3]
    assert questions[2]["parts"][0]["answer"] == "code"
    assert document["points"] == 7


@pytest.mark.bad_input
def test_invalid_exams_raise(tmp_path, monkeypatch):
    path = tmp_path / "exam.toml"
    part = 'title = "x"\n[[question]]\ntitle = "y"\n[[question.part]]\ntext = "z"\n'
    for text, why in [
        ('title = "x"\n', "the key 'question' is missing"),
        ('title = "x"\n[[question]]\npoints = 3\n', "line 2: the key 'sheet' is missing"),
        (
            'title = "x"\n[[question]]\nsheet = "sparse-16"\nsteps = ["keys", "kees"]\n',
            "line 4: sparse-16 has no step 'kees'",
        ),
        ('title = "x"\n[[question]]\nsheet = "sparse-16"\npoints = -1\n', "line 4: points is -1"),
        (part + 'answer = "song"\n', "line 6: answer is 'song'"),
        (part + "marks = [1]\n", "line 6: marks holds 1"),
        (part + 'variant_marks = ["x"]\n', "line 6: there are 1 lines; expected 0"),
        (part + 'results = ["mean"]\n', "line 6: results need an exercise"),
        (part + 'choices = ["a"]\n', "line 6: there are 1 choices"),
        (part + 'choices = ["a", "b"]\ncorrect = 3\n', "line 7: correct is 3"),
        (part + 'steps = ["mean"]\n', "line 6: steps need an exercise"),
        ('title = "x"\n[[question]]\npoints = 5\n[[question.part]]\ntext = "z"\npoints = 3\n', "3 points; expected 5"),
    ]:
        path.write_text(text)
        with pytest.raises(ProblemError, match=re.escape(why)):
            read_exam(path)
    with pytest.raises(ClearheadError, match=r"expected a name ending in \.pdf"):
        write_exam(SMALL, tmp_path / "exam.doc")
    with pytest.raises(ClearheadError, match="no course document"):
        exam_from_document("7")
    monkeypatch.setitem(sys.modules, "typst", None)
    with pytest.raises(ClearheadError, match=r"clearhead\[course\]"):
        write_exam(SMALL, tmp_path / "exam.pdf")
    assert not (tmp_path / "exam.pdf").exists()


def test_scheme_of_a_variant_states_results_and_keeps_lines_without_numbers():
    whole = exam_from_document("ceng403-exam")
    exam = Exam("Two", tuple(q for q in whole.questions if q.location in ("Q2a", "Q2b")))
    sheet = paper(exam, seed=5)
    table, numbers = ([plain_text(mark.line) for mark in a.marks] for a in solution_booklet(sheet).answers)
    assert table == [plain_text(mark.line) for mark in solution_booklet(paper(exam)).answers[0].marks]
    total = sheet.questions[1].worksheet.step("weights_bytes").grid.cells[0][0]
    assert f"(c) bytes of the attention weights, 4 each: {int(total):,}" in numbers


def test_scheme_without_free_text_has_no_note_about_it():
    exam = exam_from_document("deep-learning-final")
    answers = solution_booklet(paper(Exam("Two", exam.questions[:1] + exam.questions[8:9]))).answers
    assert [answer.scheme_note for answer in answers] == ["", GRADING_NOTE]


def test_data_of_a_paper_show_decimals_and_grouped_digits():
    whole = exam_from_document("ceng403-exam")
    exam = Exam("One", tuple(q for q in whole.questions if q.location == "Q7a"))
    assert "0.001" in typst_source(paper(exam))
    assert math("10000^{2 i / d}").startswith('"10000" ^')
    assert math("100000") == r'100 class("normal", \,) 000'


def test_scheme_of_a_variant_uses_lines_without_numbers_for_drawings():
    whole = exam_from_document("ceng403-exam")
    exam = Exam("One", tuple(q for q in whole.questions if q.location == "Q7a"))
    marks = {}
    for seed in (None, 5):
        (answer,) = solution_booklet(paper(exam, seed=seed)).answers
        marks[seed] = next(text for mark in answer.marks if (text := plain_text(mark.line)).startswith("(b)"))
    assert "100,000" in marks[None]
    assert "last warm-up step" in marks[5]
