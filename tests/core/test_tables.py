"""Tests of tables for a terminal and a notebook: the same cells, aligned and escaped."""

from __future__ import annotations

from xml.etree import ElementTree

from clearhead._core.text_tables import PreformattedText, RawHTML, html_table, table

ROWS = [("name", "size"), ("a<b", "7"), ("longer", "1,234")]


def test_table_aligns_columns_left_or_right():
    assert table(ROWS, right=(1,)) == "name     size\na<b         7\nlonger  1,234"
    assert table(ROWS) == "name    size\na<b     7\nlonger  1,234"


def test_html_table_has_the_same_cells_and_alignment():
    page = ElementTree.fromstring(html_table(ROWS, right=(1,), caption="a & b"))
    assert [[cell.text for cell in row.iter() if cell.tag in ("th", "td")] for row in page.iter("tr")] == [
        list(row) for row in ROWS
    ]
    assert {cell.get("style") for row in page.iter("tr") for cell in list(row)[1:]} == {"text-align:right"}
    assert page.find("table/caption").text == "a & b"


def test_html_table_escapes_text_but_not_raw_html():
    page = html_table([("x",), (RawHTML("<svg/>"),), ("<svg/>",)])
    assert page.count("<svg/>") == 1
    assert page.count("&lt;svg/&gt;") == 1


def test_preformatted_text_is_escaped_html_in_notebooks():
    text = PreformattedText("a  b\n1 <2")
    assert text == "a  b\n1 <2"
    assert repr(text) == str(text)
    assert "a  b\n1 &lt;2" in text._repr_html_()
