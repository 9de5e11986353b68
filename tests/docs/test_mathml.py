"""Equations of the site: bold Greek letters, norms, and punctuation next to inline equations."""

from __future__ import annotations

import importlib

import pytest

from tests.docs.pages import DOCS

pytest.importorskip("sphinx")


@pytest.fixture
def mathml(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("mathml")


def words(markup):
    """Return the tags and characters of an equation, without spaces."""
    return "".join(markup.split())


def test_bold_greek_letters_are_bold_and_end_at_their_braces(mathml):
    markup = words(mathml.mathml(r"\nabla_{\boldsymbol{\theta}}\, x", block=False))
    assert "<msub><mi>∇</mi><mi>𝛉</mi></msub>" in markup
    assert markup.endswith("<mi>x</mi></math>")


def test_bars_of_a_norm_do_not_stretch(mathml):
    markup = words(mathml.mathml(r"\lVert \mathbf{J} \rVert_F^2", block=True))
    assert markup.count('stretchy="false">‖') == 2


def test_label_of_an_underbrace_is_below_it(mathml):
    markup = words(mathml.mathml(r"\underbrace{a_1 b}_{\text{sum}} + x_i", block=True))
    assert "<mo>⏟</mo></munder><mtext>sum</mtext></munder><mo>+</mo><msub><mi>x</mi><mi>i</mi></msub>" in markup
    assert markup.count("<munder>") == 2


@pytest.mark.parametrize(
    ("tex", "n_spaces"),
    [(r"\log V", 1), (r"\log(V)", 0), (r"x \log V", 2), (r"(a)\operatorname{f}(x)", 0), (r"n \sin(x)", 1)],
)
def test_names_of_functions_have_thin_spaces(mathml, tex, n_spaces):
    assert mathml.mathml(tex, block=False).count("<mspace") == n_spaces


def test_punctuation_is_attached_to_inline_equations(mathml):
    from docutils import nodes, utils

    document = utils.new_document("page")
    equation = nodes.math("", "c")
    document += nodes.paragraph("", "", nodes.Text("so (see "), equation, nodes.Text("), and"))
    other = nodes.math("", "d")
    document += nodes.paragraph("", "", nodes.Text("a word ("), other, nodes.Text(" is plain"))
    mathml._attach_punctuation(None, document, "page")
    assert equation["after"] == "),"
    assert "before" not in equation
    assert other["before"] == "("
    assert "after" not in other
    assert document.astext() == "so (see c and\n\na word d is plain"
