"""Induction scores, PCA, charts as text, figures and pages, and docstring examples."""

from __future__ import annotations

import inspect
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import clearhead
from clearhead import analysis, hub
from clearhead.analysis.views import figures
from clearhead.analysis.views.chart import Chart, bar_chart, strip_common_prefix
from clearhead.analysis.views.page import chart_page
from clearhead.attention import attend
from clearhead.errors import ConfigError, ShapeError
from clearhead.models import Decoder, DecoderConfig

V = 31


def decoder():
    return Decoder(DecoderConfig(vocab_size=V, d_model=24, n_heads=6, n_layers=2)).eval()


class Inductive(nn.Module):
    """Constructed heads: the first attends to the previous token, the second to the previous occurrence of the same
    token, the third to the token after that."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.eye(V), requires_grad=False)

    def forward(self, ids):
        T = ids.shape[1]
        same = ids[:, :, None] == ids[:, None, :]
        earlier = torch.ones(T, T).tril(-1).bool()
        before = torch.eye(T).roll(-1, 1).bool().tril(-1).expand(ids.shape[0], T, T)
        after = torch.cat((torch.zeros_like(same[..., :1]), (same & earlier)[..., :-1]), -1)
        attended = torch.stack([before, same & earlier, after], 1)  # (B, 3, T, T)
        scores = torch.where(attended, 60.0, 0.0)
        scores = scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf)
        q = torch.zeros(ids.shape[0], 3, T, 4)
        attend(q, q, q, bias=scores)
        return self.table[ids]


def test_induction_scores_detect_constructed_heads():
    scores = analysis.induction_scores(Inductive().eval(), length=7, batch=3, seed=5)
    assert scores.rows == ("",)
    for score, head in ((scores.previous, 0), (scores.duplicate, 1), (scores.induction, 2)):
        assert score.shape == (1, 3)
        assert score[0, head] == pytest.approx(1.0, abs=1e-5)
        assert sum(score[0].tolist()) == pytest.approx(1.0, abs=0.2)


def test_induction_scores_equal_mean_of_diagonals():
    """Scores are mean weights on one diagonal of the second half."""
    model, length = decoder(), 5
    scores = analysis.induction_scores(model, length=length, batch=2, seed=3)
    generator = torch.Generator().manual_seed(3)
    half = torch.stack([torch.randperm(V, generator=generator)[:length] for _ in range(2)])
    with torch.no_grad(), analysis.trace(model) as t:
        model(half.repeat(1, 2))
    for i, path in enumerate(scores.rows):
        weights = t.weights(path)  # (B, H, 2n, 2n)
        for score, back in ((scores.induction, length - 1), (scores.duplicate, length), (scores.previous, 1)):
            expected = torch.stack([weights[:, :, q, q - back] for q in range(length, 2 * length)]).mean((0, 1))
            torch.testing.assert_close(score[i], expected)
    assert [chart.values.shape for chart in scores.charts()] == [(2, 6)] * 3


def test_classify_head_scores_induction():
    tokens = ["a", "b", "c", "a", "b", "c"]
    weights = torch.full((2, 6, 6), 1 / 6)
    weights[0] = 0.0
    for i in range(6):
        weights[0, i, i - 2 if i >= 3 else 0] = 1.0
    assert analysis.classify_head(weights, rows=tokens)[0].scores["induction"] == pytest.approx(3 / 6)


def test_pca_equals_covariance_eigenvectors():
    vectors = torch.randn(41, 7, dtype=torch.float64) @ torch.randn(7, 7, dtype=torch.float64)
    projection = analysis.pca(vectors, [f"v{i}" for i in range(41)])
    values, axes = torch.linalg.eigh(vectors.T.cov())
    expected = (vectors - vectors.mean(0)) @ axes[:, [-1, -2]]
    torch.testing.assert_close(projection.points.abs(), expected.abs())
    torch.testing.assert_close(
        torch.tensor(projection.shares), (values[[-1, -2]] / values.sum()).float(), check_dtype=False
    )
    torch.testing.assert_close(projection.of(vectors[3:5]), projection.points[3:5])
    assert (projection.axes.gather(1, projection.axes.abs().argmax(1, keepdim=True)) > 0).all()
    assert projection.to_dict()["names"][3] == "v3"
    assert "v40" in projection.text()
    assert projection.html().count("<circle") == 41


class Table(HTMLParser):
    """Collects the table cells and all addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.open, self.outside = [], False, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.outside += [value for name, value in attributes if name in ("src", "href")]
        self.open = tag == "td"

    def handle_data(self, text):
        if self.open:
            self.cells.append(text)
            self.open = False


class TestCharts:
    chart = Chart(
        title="A <b>", rows=["first", "second"], columns=[f"token{i}" for i in range(30)], signed=True,
        values=torch.linspace(-2, 1, 60).view(2, 30).index_fill(1, torch.tensor([4]), torch.nan), note="note & more",
    )  # fmt: skip

    def test_text_fits_width_and_contains_all_values(self):
        wide, narrow = self.chart.text(width=1000), self.chart.text(width=40)
        assert max(map(len, narrow.splitlines())) <= 40
        assert len(wide.splitlines()) == 3
        for text in (wide, narrow):
            assert sorted(re.findall(r"[+-]\d\.\d\d", text)) == sorted(
                f"{v:+.2f}" for v in self.chart.values.flatten().tolist() if abs(v) >= 0.005
            )
        assert "\x1b[48;2" in self.chart.text(color=True)

    def test_cells_show_significant_digits(self):
        chart = bar_chart("x", [("a", 0.00123), ("b", -0.00004), ("c", 0.0)])
        assert chart.cells() == [["+0.0012"], ["·"], ["·"]]
        assert bar_chart("x", [("a", 123.456), ("b", -1.0)]).text().splitlines()[1].endswith("█")

    def test_chart_page_contains_all_values_and_no_addresses(self):
        page = chart_page("Title </title>", [self.chart])
        parser = Table(page)
        assert parser.outside == []
        assert "<b>" not in page
        assert "</title><" in page
        assert page.count("</title>") == 1
        assert [cell for cell in parser.cells if cell != "·"] == [
            cell for row in self.chart.cells() for cell in row if cell not in ("", "·")
        ]

    def test_strip_common_prefix_shortens_paths(self):
        assert strip_common_prefix(["a.blocks.0", "a.blocks.1"]) == ["block 0", "block 1"]
        assert strip_common_prefix(["a.0.x", "a.1.y"]) == ["0.x", "1.y"]
        assert strip_common_prefix(["only.one"]) == ["only.one"]

    def test_chart_figures_contain_values(self, tmp_path):
        figure = figures.chart(self.chart)
        image = figure.axes[0].images[0].get_array()
        assert image.shape == (2, 30)
        assert float(image[0, 0]) == pytest.approx(-1.0)
        assert image.mask[0, 4] or image[0, 4] != image[0, 4]
        bars = figures.chart(bar_chart("x", [("a", 2.0), ("b", -1.0)]))
        assert [bar.get_width() for bar in bars.axes[0].patches] == [2.0, -1.0]
        dots = figures.chart(analysis.pca(torch.randn(5, 3)))
        assert len(dots.axes[0].texts) == 5
        assert figures.save(figure, tmp_path / "chart.svg").stat().st_size > 1000

    def test_arcs_have_one_color_per_head(self):
        weights = torch.eye(4).expand(3, 4, 4)
        axes = figures.arcs(weights, list("abcd"), list("abcd")).axes[0]
        assert len(axes.patches) == 12
        assert len({patch.get_edgecolor() for patch in axes.patches}) == 3


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: analysis.induction_scores(decoder(), length=V + 1), ConfigError, "from a vocabulary of 31"),
        (lambda: analysis.induction_scores(nn.Sequential(nn.Embedding(V, V)).eval()), ConfigError, "No attention"),
        (lambda: analysis.pca(torch.randn(1, 5)), ShapeError, "two or more vectors"),
        (lambda: analysis.pca(torch.randn(5, 3), ["a"]), ShapeError, "1 names"),
        (lambda: Chart(title="", rows=["a"], columns=["b"], values=torch.zeros(2, 1)), ShapeError, "one for each"),
    ],
)
def test_invalid_arguments_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


EXAMPLES = (
    analysis.LogitMetric, analysis.logit_lens, analysis.attribute, analysis.patch, analysis.ablate,
    analysis.induction_scores, analysis.pca,
    analysis.model_inputs, analysis.save_page,
)  # fmt: skip


@pytest.mark.parametrize("thing", EXAMPLES, ids=lambda thing: thing.__name__)
def test_docstring_example_runs(thing, tmp_path, monkeypatch):
    """The example before the sections of a docstring runs."""
    monkeypatch.chdir(tmp_path)
    text = re.split(r"^(?:Args|Attributes|Returns|Raises):$", inspect.getdoc(thing), flags=re.MULTILINE)[0]
    lines = text.splitlines()
    example = [line.strip() for line in lines if line.startswith("    ")]
    assert example
    ids = torch.randint(V, (1, 5))
    names = {"analysis": analysis, "ch": clearhead, "model": decoder(), "ids": ids, "clean_ids": ids}
    names |= {"corrupted_ids": ids.roll(1, 1), "trained": hub.pipeline("shakespeare")}
    exec("\n".join(example), names)
