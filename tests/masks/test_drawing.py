"""Drawings of masks as text and SVG, with one pair per cell and shaded."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import MaskError, MaskTypeError
from clearhead.masks import (
    Drawing,
    allow,
    axis,
    blocks,
    causal,
    clamped,
    dilated,
    documents,
    draw,
    draw_on_grid,
    every,
    full,
    intervals,
    padding,
    prefix,
    scattered,
    selected,
    window,
)
from tests.support.mask_strategies import masks, sizes
from tests.support.work_counters import Effort

SVG = "{http://www.w3.org/2000/svg}"


def test_small_drawing_shows_labeled_matrix():
    assert str((causal() & window(3, 0)).draw(5, 7, query_offset=2)) == "\n".join(
        [
            "causal() & window(3, 0)",
            "queries 2 to 6 down, keys 0 to 6 across; ■ may attend, · may not",
            "  0       4",
            "2 ■ ■ ■ · · · ·",
            "3 ■ ■ ■ ■ · · ·",
            "4 · ■ ■ ■ ■ · ·",
            "5 · · ■ ■ ■ ■ ·",
            "6 · · · ■ ■ ■ ■",
        ]
    )


@given(masks, sizes)
def test_small_drawings_show_every_pair(mask, size):
    T, S, query_offset = size
    drawing = mask.draw(T, S, query_offset=query_offset)
    dense = mask.dense(T, S, query_offset=query_offset)
    expected = [" ".join("■" if x else "·" for x in row) for row in dense.tolist()] if S else []
    assert drawing.body() == expected
    assert drawing == draw(mask, T, S, query_offset=query_offset)
    picture = ElementTree.fromstring(drawing.svg())
    squares = sum(path.get("d").count("M") for path in picture.iter(SVG + "path"))
    assert squares == int(dense.sum())


def test_drawing_of_32_cells_fits_80_columns():
    pattern = causal() & (window(5, 0) | every(7))
    for n in (16, 32, 1009, 1_000_000):
        lines = str(pattern.draw(n)).splitlines()
        assert max(len(line) for line in lines) <= 80
        assert len(lines) <= 32 + 4


def test_large_drawings_shade_by_density():
    drawing = (causal() & blocks(500)).draw(1000)
    assert drawing.is_shaded
    body = drawing.body()
    assert body[31] == "  " * 16 + "██" * 15 + body[31][-2:]
    assert body[31][-1] in "░▒▓"
    assert body[0][0] in "░▒▓"
    assert body[0][2:] == "  " * 31
    assert "in 32 × 32 cells" in drawing.caption
    assert "sample" not in drawing.caption


@given(masks, st.integers(1, 60), st.integers(1, 60), st.integers(0, 9), st.integers(1, 13))
@settings(max_examples=60)
def test_shade_is_the_mean_of_its_cell(mask, T, S, query_offset, cells):
    drawing = mask.draw(T, S, query_offset=query_offset, cells=cells)
    dense = mask.dense(T, S, query_offset=query_offset).double()
    rows, columns = min(T, cells), min(S, cells)
    for r in range(rows):
        for c in range(columns):
            cell = dense[r * T // rows : (r + 1) * T // rows, c * S // columns : (c + 1) * S // columns]
            assert drawing.cells[r][c] == pytest.approx(float(cell.mean()))


def test_batches_are_averaged_with_a_note_in_the_caption():
    drawing = padding(torch.tensor([2, 3])).draw(2, 5)
    assert drawing.cells == ((1.0, 1.0, 0.5, 0.0, 0.0),) * 2
    assert drawing.is_shaded
    assert drawing.body() == ["████▒▒    "] * 2
    assert "averaged over batch and heads of shape (2, 1)" in drawing.caption
    table = torch.rand(3, 97, 89) < 0.3
    large = allow(table).draw(97, 89, cells=1)
    assert large.cells[0][0] == pytest.approx(float(table.double().mean()))


def test_long_drawing_samples_queries_without_aliasing():
    n = 32 * 4096 * 64  # a sample of evenly spaced rows would meet `every(64).T` in all of them, or in none
    with Effort() as took:
        drawing = (every(64).T | prefix(n // 32)).draw(n)
    assert took.nbytes < 256 * n  # of n · n pairs
    assert took.calls < n // 8
    assert drawing.n_sampled < n
    assert f"a sample of {drawing.n_sampled:,} queries" in drawing.caption
    for row in drawing.cells:
        assert row[0] == 1.0
        assert row[1] == pytest.approx(1 / 64, abs=5 * (1 / 64 / 4096) ** 0.5)


@pytest.mark.parametrize(
    "mask",
    [scattered(3, 1).T & causal(), scattered(3, 1) | dilated(101), ~scattered(2, 5) & scattered(9, 5).T],
    ids=str,
)
def test_large_scattered_drawing_shows_exact_density(mask):
    drawing = mask.draw(211, 307, query_offset=5, cells=1)
    assert drawing.cells[0][0] == pytest.approx(mask.density(211, 307, query_offset=5))


def test_empty_sizes_draw_an_empty_body():
    text = str(full().draw(0, 5))
    assert text.startswith("full()\nno queries down, keys 0 to 4 across")
    assert full().draw(5, 0).body() == []
    ElementTree.fromstring(full().draw(0).svg())
    assert "query 3 down, key 0 across" in full().draw(1, 1, query_offset=3).caption


def test_svg_is_self_contained_and_escaped():
    drawing = Drawing("a & <b>", 2, 2, 0, (), ((1.0, 0.0), (0.25, 1e-9)), 2)
    picture = ElementTree.fromstring(drawing.svg())
    assert picture.tag == SVG + "svg"
    assert picture.find(SVG + "title").text.startswith("a & <b>: ")
    assert sorted(path.get("fill-opacity") for path in picture.iter(SVG + "path")) == ["0.08", "0.25", "1.00"]
    assert [text.text for text in picture.iter(SVG + "text")] == ["0", "0", "1"]
    assert "href" not in drawing.svg()
    width, height = float(picture.get("width")), float(picture.get("height"))
    for rect in picture.iter(SVG + "rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height")) <= height


def test_repr_html_contains_expression_and_picture():
    for mask in (causal() & every(4), padding([3, 5]), documents([0, 0, 1]), allow(torch.eye(3, 5) > 0).T):
        page = ElementTree.fromstring(mask._repr_html_().replace("<br>", "<br/>"))
        assert page.tag == "figure"
        assert page.find(".//code").text == str(mask)
        assert page.find(SVG + "svg") is not None
    assert "queries 0 to 15 down" in causal()._repr_html_()
    assert "queries 0 to 4 down, keys 0 to 2 across" in allow(torch.eye(3, 5) > 0).T._repr_html_()
    clash = allow(torch.eye(3) > 0) & documents([0])
    assert clash._repr_html_() == "<code>allow(tensor) &amp; documents(ids)</code>"


@pytest.mark.bad_input
def test_invalid_number_of_cells_raises_mask_error():
    with pytest.raises(MaskError, match="cells is 1000; expected at most 128"):
        causal().draw(5, cells=1000)
    with pytest.raises(MaskError, match="cells is 0; expected a whole number of at least 1"):
        causal().draw(5, cells=0)


def test_draw_on_grid_shows_what_a_patch_sees():
    mask = axis(clamped(1, 1), 0, (4, 6)) & axis(clamped(1, 1), 1, (4, 6))
    drawing = draw_on_grid(mask, 6)
    assert drawing.body() == ["■ ■ ■ · · ·", "◆ ■ ■ · · ·", "■ ■ ■ · · ·", "· · · · · ·"]
    assert drawing.caption == "what position 6, at (1, 0), sees on a grid of 4 × 6"
    assert "◆" in str(drawing)
    assert drawing.svg().count("M") >= 9
    assert draw_on_grid(mask).coordinates == (2, 3)
    assert draw_on_grid(~mask, 6).body()[1] == "◇ · · ■ ■ ■"


@pytest.mark.bad_input
def test_draw_on_grid_of_another_object_raises_mask_type_error():
    with pytest.raises(MaskTypeError, match="got int as a mask; expected a Mask"):
        draw_on_grid(3)


def test_draw_on_grid_of_tiles_and_frames_uses_coordinates():
    tiled = axis(window(0, 0), 0, (4, 6), tile=(2, 3))
    assert draw_on_grid(tiled, 4).coordinates == (1, 1)
    assert draw_on_grid(tiled, 4).body() == ["· · · · · ·", "■ ◆ ■ ■ ■ ■", "· · · · · ·", "· · · · · ·"]
    video = axis(causal(), 0, (-1, 2, 2))
    assert draw_on_grid(video, 5, positions=12).body() == ["■ ■", "■ ■", "■ ◆", "■ ■", "· ·", "· ·"]
    assert "planes of 2 rows" in draw_on_grid(video, 5, positions=12).caption


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (causal(), {}, r"causal\(\) has no grid"),
        (axis(causal(), 0, (-1, 4)), {}, r"the grid grid=\(-1, 4\) has no fixed number of positions"),
        (axis(causal(), 0, (2, 4)), {"position": 8}, "the position is 8; expected less than 8"),
    ],
)
def test_draw_on_grid_of_invalid_position_raises(mask, options, message):
    with pytest.raises(MaskError, match=message):
        draw_on_grid(mask, **options)


@pytest.mark.parametrize(
    "mask",
    [axis(causal(), 0, (4, 8)), intervals([0, 3], [2, 7]), selected([[0], [4]], 3), intervals([0, 3], [2, 7]).T],
    ids=str,
)
def test_notebook_drawing_has_the_size_of_the_data(mask):
    assert "<svg" in mask._repr_html_()
