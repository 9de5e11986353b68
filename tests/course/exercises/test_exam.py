"""Exams: question papers, solution booklets, variants and seeds."""

from __future__ import annotations

import json
import re
import sys

import pytest
import sympy

from clearhead.cli.app import run as run_command
from clearhead.course.exercises import ProblemError, bundled_problems, solve, variant
from clearhead.course.exercises.exam import FORMATS, Exam, ExamTask, exam_from_document, read_exam, write_exam
from clearhead.course.exercises.render.latex import math
from clearhead.course.sources import documents
from clearhead.errors import ClearheadError

SMALL = Exam(
    "Two questions", (ExamTask("layer-norm-identity", 7, ("mean", "variance", "z")), ExamTask("convolution-128", 3))
)


def data(path) -> dict:
    """What a .typ file carries."""
    return json.loads(json.loads(re.search(r'json\(bytes\((".*?(?<!\\)")\)\)', path.read_text())[1]))


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
            r'op("softmax") ( S \/ T ) \, quad T = 1 thin 048 thin 576',
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


def test_write_exam_writes_questions_and_solutions(tmp_path):
    paper, booklet = write_exam(SMALL, tmp_path / "exam.typ", seed=3)
    assert (paper.name, booklet.name) == ("exam.typ", "exam-solutions.typ")
    questions, solutions = data(paper), data(booklet)
    assert questions["total"] == 10
    assert [step["points"] for step in questions["questions"][0]["steps"]] == [2, 2, 3], (
        "later steps get the remaining points"
    )
    for question, answer in zip(questions["questions"], solutions["questions"], strict=True):
        assert question["given"] == answer["given"]
        assert all(cell is None for step in question["steps"] for row in step["cells"] for cell in row)
        assert all(cell for step in answer["steps"] for row in step["cells"] for cell in row)
    work = solve(variant("layer-norm-identity", 3 * 26))
    mean = solutions["questions"][0]["steps"][0]["cells"][0][0]["math"]
    assert mean == math(sympy.latex(work.step("mean").grid.cells[0][0]))
    assert "--seed 78" in solutions["questions"][0]["command"]


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
        paper, booklet = (path.read_bytes() for path in write_exam(SMALL, tmp_path / f"exam{ending}"))
        assert paper.startswith(begin)
        assert paper != booklet
    text, solved = ((tmp_path / name).read_text() for name in ("exam.md", "exam-solutions.md"))
    assert "## 1. The norm of a layer-normalized vector (7 points)" in text
    assert "5.2500" in solved
    assert "5.2500" not in text
    tex = (tmp_path / "exam-solutions.tex").read_text()
    assert tex.count(r"\begin{document}") == tex.count(r"\end{document}") == 1


def test_exam_from_document_contains_distinct_exercises():
    for slug, document in documents().items():
        exam = exam_from_document(slug)
        assert len({task.sheet for task in exam.tasks}) == len(exam.tasks)
        assert {task.sheet for task in exam.tasks} <= set(bundled_problems())
        assert document.name in exam.about
    assert sum(task.points for task in exam_from_document("ceng403-exam").tasks) == 70


def test_exam_file_is_written_by_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.toml").write_text('kind = "layer-norm"\ntitle = "Mine"\nx = [1, 3, 5]\n')
    (tmp_path / "exam.toml").write_text(
        'title = "My test"\n[[question]]\nsheet = "mine.toml"\npoints = 4\nsteps = ["mean"]\n'
        '[[question]]\nsheet = "convolution-128"\n'
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
    assert [len(q["steps"]) for q in questions] == [1, 4]
    assert [q["points"] for q in questions] == [4, 0]


@pytest.mark.bad_input
def test_invalid_exams_raise(tmp_path, monkeypatch):
    path = tmp_path / "exam.toml"
    for text, why in [
        ('title = "x"\n', "the key 'question' is missing"),
        ('title = "x"\n[[question]]\npoints = 3\n', "line 2: the key 'sheet' is missing"),
        (
            'title = "x"\n[[question]]\nsheet = "sparse-16"\nsteps = ["keys", "kees"]\n',
            "line 4: sparse-16 has no step 'kees'",
        ),
        ('title = "x"\n[[question]]\nsheet = "sparse-16"\npoints = -1\n', "line 4: points is -1"),
    ]:
        path.write_text(text)
        with pytest.raises(ProblemError, match=why):
            read_exam(path)
    with pytest.raises(ClearheadError, match=r"expected a name ending in \.pdf"):
        write_exam(SMALL, tmp_path / "exam.doc")
    with pytest.raises(ClearheadError, match="no course document"):
        exam_from_document("7")
    monkeypatch.setitem(sys.modules, "typst", None)
    with pytest.raises(ClearheadError, match=r"clearhead\[print\]"):
        write_exam(SMALL, tmp_path / "exam.pdf")
    assert not (tmp_path / "exam.pdf").exists()
