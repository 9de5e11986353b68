"""Figures of claims, as text and as SVG."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

from clearhead.course.claims.figure import Lines, MatrixFigure

SVG = "{http://www.w3.org/2000/svg}"
CURVES = Lines("a <title>", "x", "y", (1, 10, 100), {"up": (0.0, 1.0, 2.0), "down": (3.0, math.nan, 1.0)}, log_x=True)
MATRIX = MatrixFigure("a matrix", [[0.0, 1.0], [0.5, 0.25]], ["first", "second"])


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_lines_text_contains_a_bar_per_point():
    title, up, down = CURVES.text().splitlines()
    assert title == "a <title> (y over x, 1 … 100)"
    assert up.split() == ["up", "▁▄█", "0", "…", "2"]
    assert down.startswith("down  █ ▁")  # a gap where the value is NaN


def test_lines_svg_contains_labels_ticks_and_legend():
    written = texts(CURVES.svg())
    assert {"a <title>", "x", "y", "up", "down", "1", "10", "100"} <= set(written)


def test_single_curve_has_no_legend():
    single = Lines("title", "x", "y", (1, 2), {"the only curve": (0.0, 1.0)})
    assert "the only curve" not in texts(single.svg())


def test_spread_draws_a_bar_per_point():
    bars = Lines("t", "x", "y", (1, 2), {"a": (1.0, 2.0)}, spread={"a": ((0.5, 1.5), (math.nan, math.nan))})
    plain = Lines("t", "x", "y", (1, 2), {"a": (1.0, 2.0)})
    assert bars.svg().count("<path") == plain.svg().count("<path") + 1


def test_matrix_text_and_svg_show_the_values():
    assert MATRIX.text().splitlines()[1:] == ["  ██", "▒▒░░"]
    assert {"a matrix", "first", "second", "1", "0.5", "0.25"} == set(texts(MATRIX.svg()))


def test_svg_is_the_same_every_time_and_self_contained():
    for figure in (CURVES, MATRIX):
        svg = figure.svg()
        assert svg == figure.svg()
        assert set(re.findall(r"https?://[^\s\"]+", svg)) == {"http://www.w3.org/2000/svg"}
        assert "<style" not in svg  # it would style the whole page
        assert "<image" not in svg


def test_ids_of_two_figures_in_a_page_differ():
    ids = [set(re.findall(r' id="([^"]+)"', figure.svg())) for figure in (CURVES, MATRIX)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for figure, defined_ids in zip((CURVES, MATRIX), ids, strict=True):
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', figure.svg())) == defined_ids


def test_ticks_are_listed_only_if_their_labels_do_not_touch():
    near = Lines("t", "x", "y", (0, 0.25, 8), {"a": (0.0, 10.0, 20.0)}).svg()
    apart = Lines("t", "x", "y", (0.125, 1, 1e6), {"a": (0.0, 10.0, 20.0)}, log_x=True).svg()
    assert "0.25</text>" not in near
    assert "0.125</text>" in apart
    assert "1,000,000</text>" in apart


def test_values_of_matrices_have_the_typographic_minus_sign():
    assert "−0.5</text>" in MatrixFigure("t", [[-0.5, 1.0]]).svg()
