"""HTML of traces, reports and comparisons in a notebook."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch

from clearhead import analysis
from clearhead.models import Decoder, tiny_decoder


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Decoder(tiny_decoder()).eval()


def traced(model, tokens, *patterns):
    with analysis.trace(model, *patterns) as t:
        model(torch.arange(tokens)[None])
    return t


def test_trace_html_contains_layers_and_weights(model):
    t = traced(model, 5, "blocks.*.attention.weights", "")
    page = ElementTree.fromstring(t._repr_html_())
    rows = [[cell.text for cell in row.iter("td")] for row in page.iter("tr")][1:]
    assert [row[:3] for row in rows[:2]] == [["blocks.0.attention", "4", "5 × 5"], ["blocks.1.attention", "4", "5 × 5"]]
    assert rows[2][0] == "the model output"
    assert rows[2][2] == "(1, 5, 101)"

    drawn = torch.zeros(5, 5)
    for square in next(page.iter("svg")).iter("rect"):
        drawn[int(square.get("y")), int(square.get("x"))] = float(square.get("fill-opacity"))
    assert (drawn - t.weights("blocks.0.attention")[0].mean(0)).abs().max() <= 0.01


def test_trace_html_of_long_run_has_no_thumbnails(model):
    html = traced(model, 49)._repr_html_()
    assert "49 × 49" in html
    assert "<svg" not in html


def test_trace_html_before_run_is_repr(model):
    assert analysis.trace(model)._repr_html_() == "<p>Trace(2 attention layers, 0 outputs, 0 runs)</p>"


def test_trace_report_is_text_with_html_lines(model):
    t = traced(model, 5)
    assert isinstance(t.report(), str)
    assert repr(t.report()).startswith("layer ")
    assert "\n" in re.search(r"<pre[^>]*>(.*)</pre>", t.report()._repr_html_(), re.DOTALL)[1]


def test_comparison_html_is_table(model):
    t = traced(model, 5, "blocks.*.attention.weights", "")
    html = analysis.compare(t, t)._repr_html_()
    assert html.count("<tr>") == 5  # header, model output, two layers, logits
