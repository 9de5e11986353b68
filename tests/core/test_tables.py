"""Tables for a terminal and a notebook: the same cells, aligned, and nothing in them taken for markup."""

from __future__ import annotations

from xml.etree import ElementTree

from clearhead._core.text_tables import PreformattedText, RawHTML, html_table, table

ROWS = [("name", "size"), ("a<b", "7"), ("longer", "1,234")]


def test_columns_end_or_begin_together():
    assert table(ROWS, right=(1,)) == "name     size\na<b         7\nlonger  1,234"
    assert table(ROWS) == "name    size\na<b     7\nlonger  1,234"


def test_html_has_the_same_cells_on_the_same_sides():
    page = ElementTree.fromstring(html_table(ROWS, right=(1,), caption="a & b"))
    assert [[cell.text for cell in row.iter() if cell.tag in ("th", "td")] for row in page.iter("tr")] == [
        list(row) for row in ROWS
    ]
    assert {cell.get("style") for row in page.iter("tr") for cell in list(row)[1:]} == {"text-align:right"}
    assert page.find("table/caption").text == "a & b"


def test_markup_alone_is_left_as_it_is():
    page = html_table([("x",), (RawHTML("<svg/>"),), ("<svg/>",)])
    assert page.count("<svg/>") == 1
    assert page.count("&lt;svg/&gt;") == 1


def test_a_notebook_shows_lines_and_not_one_line():
    text = PreformattedText("a  b\n1 <2")
    assert text == "a  b\n1 <2"
    assert repr(text) == str(text)
    assert "a  b\n1 &lt;2" in text._repr_html_()
