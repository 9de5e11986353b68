"""Rendering of worksheets: Markdown and HTML are parsed, LaTeX structure is checked, JSON is read back."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess

import pytest
from lxml import html as lxml_html
from markdown_it import MarkdownIt

from clearhead.course.exercises import bundled_problems, grade_text, render, solve
from clearhead.course.exercises.render.layout import step_blocks

NAMES = list(bundled_problems())


@pytest.fixture(scope="module")
def works():
    return {name: solve(name) for name in NAMES}


def tables_of(work, style):
    """Return the expected tables of a worksheet in order: exact unless decimals say as much, then decimals if any."""
    tables = []
    for block in step_blocks(work, style):
        if not block.step.grid.is_scalar:
            if not block.is_decimal_only:
                tables.append((block, block.exact))
            if block.decimals is not None:
                tables.append((block, block.decimals))
    return tables


def parsed_tables(root):
    tables = []
    for table in root.iter("table"):
        rows = [[("".join(cell.itertext())) for cell in row if cell.tag in ("th", "td")] for row in table.iter("tr")]
        tables.append(rows)
    return tables


@pytest.mark.parametrize("questions_only", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", ["markdown", "html"])
def test_markdown_and_html_tables_contain_every_cell(works, name, format, questions_only):
    style = render.Style(5, questions_only)
    if format == "markdown":
        html_text = MarkdownIt("commonmark").enable("table").render(render.markdown(works[name], style))
    else:
        html_text = re.sub(r"<sub>(\w+)</sub>", r"_\1", render.html(works[name], style))  # as it was before it was set
        html_text = re.sub(r"<sup>(\w+)</sup>", r"^\1", html_text)
        html_text = re.sub(r"<sup>(.*?)</sup>", r"^(\1)", html_text)
    root = lxml_html.fromstring(f"<div>{html_text}</div>" if format == "markdown" else html_text)
    expected = [
        [["", *block.columns], *[[label, *row] for label, row in zip(block.rows, cells, strict=True)]]
        for block, cells in tables_of(works[name], style)
    ]
    assert parsed_tables(root) == expected
    text = "".join(root.itertext())
    for step in works[name].steps:
        assert step.title in text
    assert ("Checks in float64" in text) is not questions_only


def latex_faults(source):
    """What would stop LaTeX: unbalanced braces or environments, rows of unequal length, characters it does not know."""
    faults = []
    if not source.isascii():
        faults.append("not ASCII")
    plain = re.sub(r"\\[\\{}$&#%_]", "", source.replace(r"\\", ""))
    depth = 0
    for character in plain:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            faults.append("a } too many")
            break
    if depth > 0:
        faults.append("a { too many")
    if plain.count("$") % 2:
        faults.append("odd $")
    stack = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", source):
        if kind == "begin":
            stack.append(name)
        elif not stack or stack.pop() != name:
            faults.append(f"end of {name} without its begin")
    faults += [f"{name} is not ended" for name in stack]
    if source.count(r"\left") != source.count(r"\right"):
        faults.append("left without right")
    for shape, body in re.findall(r"\\begin\{array\}\{([lr|]+)\}(.*?)\\end\{array\}", source):
        columns = len(shape.replace("|", ""))
        for row in body.replace(r"\hline", "").split(r"\\"):
            if len(re.findall(r"(?<!\\)&", row)) != columns - 1:
                faults.append(f"a row of other than {columns} columns: {row}")
    return faults


@pytest.mark.parametrize(
    "broken",
    [
        r"\begin{array}{l|r} a & b \\ c \end{array}",
        r"\begin{document}",
        r"\frac{1}{2",
        "a $ b",
        "√",
        r"\text{a}}",
        r"\left(",
    ],
)
def test_latex_faults_detects_broken_latex(broken):
    assert latex_faults(broken)


@pytest.mark.parametrize("questions_only", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_latex_is_well_formed(works, name, questions_only, tmp_path):
    style = render.Style(4, questions_only)
    source = render.latex(works[name], style)
    assert latex_faults(source) == []
    assert "[U+" not in source, "every character has a way to be said"
    assert source.count(r"\begin{array}") == len(tables_of(works[name], style))
    if shutil.which("pdflatex"):
        (tmp_path / "sheet.tex").write_text(source)
        command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "sheet.tex"]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-2000:]


def test_latex_escapes_special_characters():
    from clearhead.course.exercises.render.latex import words

    assert words("50% of a_b & <c> {d} $5 #1 ~^\\") == (
        r"50\% of a\_b \& \textless{}c\textgreater{} \{d\} \$5 \#1 \textasciitilde{}\textasciicircum{}\textbackslash{}"
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sort-dedup-softmax"])
def test_exact_texts_of_json_are_graded_right(works, name):
    """Exact texts are parsed to the same numbers, so a worksheet is graded right against itself."""
    document = json.loads(json.dumps(render.to_dict(works[name])))
    answers = ""
    for step in document["steps"]:
        if not step["given"]:
            words = [j for j in range(len(step["columns"])) if all(row[j].isalpha() for row in step["exact"])]
            rows = [[cell for j, cell in enumerate(row) if j not in words] for row in step["exact"]]
            answers += f"{step['key']} = {json.dumps(rows, ensure_ascii=False)}\n"
    marks = grade_text(works[name], answers)
    assert marks.is_right, str(marks)
    assert not marks.unanswered
    assert document["agrees"] is True


@pytest.mark.parametrize("name", NAMES)
def test_questions_only_hides_answers(works, name):
    document = render.to_dict(works[name], render.Style(questions_only=True))
    for step in document["steps"]:
        if not step["given"]:
            assert {cell for row in step["exact"] for cell in row} == {""}
            assert "decimal" not in step
    assert "document" not in document
    text = render.terminal(works[name], render.Style(questions_only=True))
    parts = {
        part: [s for s in works[name].steps if f"   [{s.key}]" in part.replace("\n    [", "   [")]
        for part in text.split("\n\n")
    }
    question_parts = [part for part, steps in parts.items() if steps and not steps[0].is_given]
    assert len(question_parts) == sum(not step.is_given for step in works[name].steps)
    assert all("≈" not in part and "___" in part for part in question_parts)


def test_terminal_aligns_columns_and_rounds(works):
    text = render.terminal(works["sort-dedup"], render.Style(digits=6))
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "[weights]" in line)
    rows = [i for i, line in enumerate(lines) if i > start and line.startswith("   1 D")][:2]  # exact, and decimals
    assert all(len({len(line) for line in lines[i : i + 7]}) == 1 for i in rows)
    assert "≈ 8.797" in text
    assert f"{math.exp(3) / (2 * math.exp(3) + 4):.6f}" in text


@pytest.mark.parametrize("name", NAMES)
def test_terminal_fits_80_columns(works, name):
    lines = render.terminal(works[name]).splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_repr_html_returns_fragment(works):
    html_text = works["layer-norm-identity"]._repr_html_()
    assert html_text.startswith("<div")
    assert "<html" not in html_text
    assert "21/4" in html_text
    assert str(works["layer-norm-identity"]).count("21/4") == 1


def test_html_has_no_external_resources(works):
    page = render.html(works["sort-dedup"])
    assert not re.search(r"(src|href)\s*=|@import|url\(", page)
    assert "<START>" not in page
    assert "&lt;START&gt;" in page


@pytest.mark.parametrize("name", NAMES)
def test_worksheet_sentences_use_notation(works, name):
    """No code, no numbers of 60 digits, and no label that tells the answer."""
    text = " ".join(render.terminal(works[name]).split())
    assert not re.search(r"\d\.\d{25}", text)
    assert not re.search(r"\b(eye|flat|shaped|columns|grad|jacobian)\(", text)
    assert "window(" not in works[name].question
    assert not re.search(r"∂\([^()]*\)[·−+]", text), "a derivative of a sum needs parentheses around all of it"
    assert not re.search(r"Agrees\..*which agrees|\b1 keys\b|It is [A-Z]", text)


def test_question_lists_integers_as_words(works):
    assert "for the pairs i of 0 1" not in works["sinusoid-position-3"].question
    assert "0 and 1" in works["sinusoid-position-3"].question
    assert "numbered from 0. Each token attends to itself" in works["sparse-16"].question


def test_expression_of_derivative_keeps_its_parentheses(works):
    notes = [step.note for step in works["infinity-norm-step"].steps]
    assert any("∂(−y·log(P) − (1 − y)·log(1 − P))/∂w" in note for note in notes)
    assert works["infinity-norm-step"].step("norm").symbol == "‖w‖∞²"


def test_numbers_without_readable_exact_form_are_shown_in_decimals_only(works):
    work = works["encoder-decoder"]
    blocks = {block.step.key: block for block in step_blocks(work, render.Style())}
    assert blocks["p"].is_decimal_only
    assert blocks["loss"].is_decimal_only
    assert not blocks["memory"].is_decimal_only
    for page in (render.terminal(work), render.markdown(work), render.html(work)):
        assert "…" not in page
    assert "ℓ ≈ 0.3869" in render.terminal(work)
