"""Parsing, computing and rendering of model answers, on small answers that are written here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction

import pytest

from clearhead import masks
from clearhead.course.answers.blocks import (
    Box,
    BulletList,
    Formula,
    Heading,
    Paragraph,
    Picture,
    Program,
    Sheet,
    Span,
    TableBlock,
    parse_blocks,
    plain,
    plain_text,
    walk,
)
from clearhead.course.answers.booklet import Booklet, ResolvedAnswer, ResolvedMark
from clearhead.course.answers.content import AnswerFigure, AnswerTable, SvgFigure, format_value
from clearhead.course.answers.model_answer import file_name, model_answer, parse_answer
from clearhead.course.answers.notation import runs
from clearhead.course.answers.placeholders import Placeholders
from clearhead.course.answers.render import html, markdown, pdf, terminal, to_dict, typst_source
from clearhead.course.claims.figure import Lines
from clearhead.course.exercises import solve
from clearhead.course.sources import document
from clearhead.errors import ClearheadError

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" width="9" height="9"><rect width="9"/></svg>'
TEXT = """A value {{value n}}, d_k and (x)_i, **bold {{value n}}** and `{{value n}}_code`.

## Heading

- first Σ_j a_{ij}
- second

  ```math
  e^{−x} = {{value n}}
  ```

1. one
   {{figure f}}

| a | b_i |
| --- | ---: |
| x | {{value n}} |

{{table t}}
{{figure f}}

```python run
assert {{value n}} == 7
```
"""


@dataclass
class Fake:
    """A resolver whose only value is 7."""

    def value(self, name):
        assert name == "n"
        return "7"

    def blocks(self, kind, name):
        return {
            "figure": (Picture(SvgFigure(SVG, "####"), "a square"),),
            "table": (TableBlock((plain("p"), plain("q")), ((plain("xx|yy"), plain("<3>")),), (False, True), "below"),),
            "exercise": (Sheet(solve("softmax-jacobian")),),
        }[kind]


BLOCKS = parse_blocks(TEXT, Fake())


def small_booklet() -> Booklet:
    box = Box("Tested " * 12, (Paragraph(plain("a * b_i")),), "clearhead claims show softmax-jacobian")
    blocks = (*BLOCKS, box, *Fake().blocks("exercise", ""))
    marks = (ResolvedMark(Fraction(3, 2), plain("the sum Σ_j")), ResolvedMark(Fraction(1, 2), plain("rest")))
    answer = ResolvedAnswer("Q1", "What is it?", blocks, marks, 2, False, (("clearhead masks", "the masks"),))
    return Booklet("exam", "An exam", (answer,), True)


def test_parse_blocks_builds_tree_with_values():
    kinds = [type(block) for block in BLOCKS]
    expected = [Paragraph, Heading, BulletList, BulletList, TableBlock, TableBlock, Picture, Program]
    assert kinds == expected
    assert BLOCKS[0].line == (
        Span("A value 7, d_k and (x)_i, "),
        Span("bold 7", "strong"),
        Span(" and "),
        Span("7_code", "code"),
        Span("."),
    )
    assert plain_text(BLOCKS[2].items[0][0].line) == "first Σ_j a_{ij}"
    assert Formula(("e^{−x} = 7",)) in tuple(walk(BLOCKS))
    assert BLOCKS[3].start == 1
    assert parse_blocks("**Bold.**", Fake()) == (Paragraph((Span("Bold.", "strong"),)),)
    assert BLOCKS[4].numeric == (False, True)
    assert BLOCKS[-1] == Program("assert 7 == 7\n", True)
    assert parse_blocks("```text\nx ← 1\n```", Fake()) == (Program("x ← 1\n", language="text"),)
    assert sum(isinstance(block, Picture) for block in walk(BLOCKS)) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("see {{table t}} here", "must be alone on its line"),
        ("> quoted", "blockquote_open"),
        ("![x](y)", "'image'"),
        ("```rust\nx\n```", "'rust'"),
    ],
)
def test_parse_blocks_rejects_unsupported_markdown(text, why):
    with pytest.raises(ClearheadError, match=why):
        parse_blocks(text, Fake())


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("picture", "x", "unknown kind of placeholder 'picture'"),
        ("table", "none", "no computed value of ceng403-exam is called 'none'"),
        ("table", "hello_world_query", "is a str, not an AnswerTable"),
        ("figure", "hello_world_query", "has no svg"),
        ("exercise", "none", "no bundled problem 'none'"),
        ("exercise", "softmax-jacobian: none", "no step 'none'"),
        ("claim", "none", "no claim is called 'none'"),
        ("solution", "none", "no starter is called 'none'"),
        ("proof", "none", "no proof"),
    ],
)
def test_placeholders_reject_unknown_names(kind, name, why):
    with pytest.raises(ClearheadError, match=why):
        Placeholders("ceng403-exam").blocks(kind, name)


def test_value_placeholder_rejects_tables_and_private_names():
    placeholders = Placeholders("ceng403-exam")
    with pytest.raises(ClearheadError, match="not a string or number"):
        placeholders.value("hello_world_attention")
    with pytest.raises(ClearheadError, match="no computed value"):
        placeholders.value("_hello_world")


def test_exercise_placeholder_selects_steps():
    whole = solve("softmax-jacobian")
    names = [step.key for step in whole.steps][1:3]
    (sheet,) = Placeholders("ceng403-exam").blocks("exercise", f"softmax-jacobian: {', '.join(names)}")
    assert [step.key for step in sheet.worksheet.steps] == names
    assert not sheet.worksheet.checks
    (sheet,) = Placeholders("ceng403-exam").blocks("exercise", "softmax-jacobian")
    assert sheet.worksheet.steps == whole.steps


def test_claim_placeholder_shows_verdict_evidence_and_command():
    (box,) = Placeholders("ceng403-exam").blocks("claim", "path-length")
    assert "holds" in plain_text(box.blocks[0].line)
    assert isinstance(box.blocks[-1], BulletList)
    assert box.command == "clearhead claims show path-length"


def test_runs_split_scripts_and_variables():
    def script(text, **kwargs):
        return [(run.text, run.script, run.is_variable) for run in runs(text, **kwargs)]

    assert script("a_ij is a b") == [
        ("a", 0, True), ("ij", -1, True), (" is a ", 0, False), ("b", 0, True),
    ]  # fmt: skip
    assert script("e^{−x}·W_Q") == [
        ("e", 0, True), ("−", 1, False), ("x", 1, True), ("·", 0, False), ("W", 0, True), ("Q", -1, True),
    ]  # fmt: skip
    assert [text for text, level, _ in script("10^(2i/d)") if level] == ["2", "i", "/", "d"]
    assert script("y_<t") == [("y", 0, True), ("<", -1, False), ("t", -1, True)]
    assert script("‖w‖_∞")[-1] == ("∞", -1, False)
    assert script("p_(i,2l)")[1:][0] == ("i", -1, True)
    assert script("_k")[-1] == ("k", -1, True)
    assert [part for part in script("δ_ce, q_uv and d_ff") if part[1]] == [
        ("ce", -1, True), ("uv", -1, True), ("ff", -1, False),
    ]  # fmt: skip
    assert script("A", is_formula=True) == [("A", 0, True)]
    assert script("option A") == [("option A", 0, False)]
    assert script("1.3d, ImageNet-1k by ViT-L/16: 1.4e-03") == [("1.3d, ImageNet-1k by ViT-L/16: 1.4e-03", 0, False)]
    assert ("e", 0, True) in script("2e + x")


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("the Jacobian diag(a) and ∂L/∂a", "aLa"),
        ("row a sums to a small number", "a"),
        ("z = (a, a, a) at a temperature", "zaaa"),
        ("w h_{t−1} + a x_t is a sum", "whtaxt"),
        ("a slope a(1 − a) of a/b", "aaab"),
        ("H = V A with the rows of C; C is e × n", "HVACCen"),
        ("shape (B, T, M), and 1/D of it", "BTMD"),
        ("D A A becomes A D: A for the row of D", ""),
        ("from 2(c), (a) and (b) of T5", ""),
        ("marks B, and no other option; over A, B, C, D, too", ""),
    ],
)
def test_runs_tell_variables_from_words_and_labels(text, letters):
    assert "".join(run.text for run in runs(text) if run.is_variable) == letters


def test_every_format_contains_the_answer():
    content = small_booklet()
    texts = [render(content) for render in (terminal, markdown, html, typst_source)]
    for text in (*texts, json.dumps(to_dict(content), ensure_ascii=False)):
        for part in ("An exam", "What is it?", "first", "second", "Jacobian", "claims show", "1.5"):
            assert part in text
    assert r"xx\|yy | \<3\>" in texts[1]
    assert "<td>xx|yy</td>" in texts[2]
    assert SVG in texts[2]
    assert "####" in texts[0]
    assert max(map(len, terminal(content, 60).splitlines())) <= 60
    assert to_dict(content)["answers"][0]["mark_scheme"][0] == {"points": 1.5, "text": "the sum Σ_j"}


def test_html_escapes_text():
    paragraph = Paragraph((Span("<script>x</script>"), Span("<b>", "code")))
    answer = ResolvedAnswer("Q", "<i>", (paragraph,), (), 1, True, ())
    page = html(Booklet("s", "<t>", (answer,), False))
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;t&gt;" in page


def test_titles_of_boxes_are_typeset():
    answer = ResolvedAnswer("Q", "?", (Box("Proof: Θ(n_t)", ()),), (), 1, True, ())
    content = Booklet("s", "t", (answer,), False)
    assert "Θ(<i>n</i><sub><i>t</i></sub>)" in html(content)
    assert "n_t" not in typst_source(content)


def test_typst_keeps_paragraphs_that_end_with_a_colon_with_the_next_block():
    paragraphs = tuple(Paragraph((Span(text),)) for text in ("It follows that:", "It follows."))
    answer = ResolvedAnswer("Q", "?", paragraphs, (), 1, True, ())
    source = typst_source(Booklet("s", "t", (answer,), False))
    assert '#introduction([#"It follows that:";])' in source
    assert '#par([#"It follows.";])' in source


def test_pdf_is_written_by_typst():
    pytest.importorskip("typst", reason="typst is an optional dependency")
    assert pdf(small_booklet()).startswith(b"%PDF")


def test_scheme_note_says_whose_marks_they_are():
    (answer,) = small_booklet().answers
    assert "ours" not in answer.scheme_note
    assert "not graded automatically" in answer.scheme_note
    assert "ours" in ResolvedAnswer("Q", "?", (), (), 10, True, ()).scheme_note


def test_figures_of_other_packages_are_answer_figures():
    for figure in (masks.draw(masks.causal(), 4), Lines("t", "x", "y", [0, 1], {"s": [0.0, 1.0]}), SvgFigure("", "")):
        assert isinstance(figure, AnswerFigure)


def test_answer_table_formats_numbers():
    table = AnswerTable(["a", "b"], [["x", 12345], ["y", -2]])
    assert table.cells == [["x", "12,345"], ["y", "−2"]]
    assert table.numeric_columns == [False, True]
    texts = AnswerTable(["a", "b", "c"], [["−0.17", "1,024", "3 heads"], ["2·10⁻⁹", "46.9 %", "4"]])
    assert texts.numeric_columns == [True, True, False]
    assert format_value(1 / 3) == "0.3333"
    assert format_value(-9.3571e-14) == "−9.357·10⁻¹⁴"
    assert format_value(1.5e12) == "1.5·10¹²"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("An answer.\n", "has no line '## Mark scheme'"),
        ("An answer.\n\n## Mark scheme\n\n- three: x\n", "expected '- POINTS: TEXT'"),
    ],
)
def test_parse_answer_rejects_invalid_files(text, why):
    question = document("ceng403-exam").questions[0]
    with pytest.raises(ClearheadError, match=why):
        parse_answer("ceng403-exam", question, text)


def test_model_answer_accepts_any_spelling_of_the_location():
    assert model_answer("ceng403-exam", "q1A").question.location == "Q1a"
    with pytest.raises(ClearheadError, match="ceng403-exam has no question 'Q9'"):
        model_answer("ceng403-exam", "Q9")
    assert file_name("Part 3, 1.1") == "Part-3-1.1.md"


def test_course_show_writes_every_format(cli, tmp_path):
    for ending in ("txt", "md", "html", "pdf", "typ", "json"):
        path = tmp_path / f"answer.{ending}"
        assert cli("course", "show", "ceng403-exam", "Q1a", "--out", str(path)).code == 0
        assert path.stat().st_size > 1000
    printed = cli("course", "show", "ceng403-exam", "Q1a", "--json").json
    assert printed == json.loads((tmp_path / "answer.json").read_text())
    assert "Mark scheme" in cli("course", "show", "ceng403-exam", "Q1a").out


@pytest.mark.bad_input
def test_course_show_rejects_unknown_files_and_printed_pdf(cli, tmp_path):
    result = cli("course", "show", "ceng403-exam", "Q1a", "--out", str(tmp_path / "answer.docx"))
    assert "'.docx'" in result.err
    assert "give a file" in cli("course", "show", "ceng403-exam", "Q1a", "--format", "pdf").err
    assert "give only one of them" in cli("course", "show", "ceng403-exam", "Q1a", "--booklet").err
