"""Pages in headless Chromium: a script in the page clicks, types and stores its results in the DOM, which is dumped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clearhead.analysis.measures import value_weighted_norms
from clearhead.analysis.views.attention_map import AttentionMap, AxisLayout
from clearhead.analysis.views.page import render_page
from clearhead.analysis.views.report import AttentionReport, Sound
from clearhead.masks import causal
from tests.support.attention_weights import softmax
from tests.support.browser import BROWSER, run_script_in_page

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")


def run_script(folder: Path, report: AttentionReport, script: str, *, budget: int | None = None) -> dict:
    """Return the results of a script of `browser/` in the page of a report."""
    return run_script_in_page(
        folder, render_page(report) if budget is None else render_page(report, budget=budget), script
    )


def format_weight(weight: float) -> str:
    """Format a weight like the page."""
    return f"{weight:.2f}" if weight >= 0.0995 else f"{weight:.3f}" if weight >= 0.0005 else "<0.001"


def expected_table(weights: torch.Tensor, labels: list[str]) -> list[list[str]]:
    """Return the expected table of a row: the eight keys of largest weight, and the weights."""
    best = weights.topk(min(8, len(labels)))
    return [
        [f"{labels[key]} {key}", format_weight(value)]
        for value, key in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        if value > 1e-6
    ]


def test_page_short_report_in_browser(tmp_path):
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "looked", "at", "the", "moon", "."]
    mask = causal().dense(12)
    layers = [softmax(3, 12, 12, sharp=2.0, mask=mask), softmax(3, 12, 12, sharp=4.0, mask=mask)]
    source = ["el", "gato", "miró", "la", "luna"]
    cross = softmax(3, 12, 5, sharp=3.0)
    lengths = torch.rand(3, 12, generator=torch.Generator().manual_seed(1)) + 0.5
    report = AttentionReport(
        title="Twelve <tokens> & more",
        maps=[
            *(
                AttentionMap.of(w, words, path=f"decoder.blocks.{i}.attention", value_norms=lengths)
                for i, w in enumerate(layers)
            ),
            AttentionMap.of(cross, words, source, path="decoder.blocks.0.cross_attention", cross=True),
        ],
        metadata={"model": "constructed"},
        norms=[("decoder.blocks.0", torch.rand(12) + 1), ("decoder.blocks.1", torch.rand(12) + 2)],
    )
    results = run_script(tmp_path, report, "twelve.js")
    added = [
        f"{words[contribution.key]} {contribution.key}head {contribution.head}{100 * contribution.share:.0f} %"
        for contribution in value_weighted_norms(layers[1][:, 9], lengths, top=6)
    ]
    assert results["title"] == "Twelve <tokens> & more"
    assert results["facts"] == "modelconstructed"
    assert results["start"] == "Cross-attention, layer 0, mean of heads"
    assert results["thumbs"] == 3 * 4
    assert results["clicked"] == ["Decoder self-attention, layer 1, head 2", ["1/2"]]
    assert results["row9"] == expected_table(layers[1][2, 9], words)
    assert results["chosen"] == ["the"]
    assert results["adds"] == added
    assert results["left"] == ["Decoder self-attention, layer 1, head 1", ["1/1"]]
    assert results["up"] == "Decoder self-attention, layer 0, head 1"
    assert results["row9above"] == expected_table(layers[0][1, 9], words)
    assert results["mean"] == "Decoder self-attention, layer 0, mean of heads"
    assert results["back"] == results["up"]
    assert results["next"] == expected_table(layers[0][1, 10], words)
    assert results["focused"] == "4"
    assert results["selected"] == ["4"]
    # The cursor starts at the largest key of the chosen row, then goes right and down by one.
    j = min(11, int(layers[0][1, 4].argmax()) + 1)
    weight = float(layers[0][1, 5, j])
    assert results["pointed"] == f"Under the pointer: {words[j]} {format_weight(weight)}"
    assert results["ink"] > 20
    drawn = sum(int((row.topk(8).values >= 0.03).sum()) for row in layers[0][1])
    assert results["paths"] == drawn
    assert results["labels"] == 24
    of_all = sum(int((row.topk(8).values >= 0.03).sum()) for head in layers[0] for row in head)
    assert results["together"] == ["Decoder self-attention, layer 0, all heads", of_all, 3]
    assert results["colors"] == ["head 0", "head 1", "head 2"]
    assert results["help"] is True
    assert results["sorted"] == sorted(results["sorted"], reverse=True)
    assert len(results["sorted"]) == 9
    assert results["current"] == 1
    assert "layer=decoder.blocks" in results["address"]
    assert len(results["more"]) == 2
    assert min(results["more"]) > 5
    assert results["named"] is True


def test_page_long_report_in_browser(tmp_path):
    T, H = 2048, 3
    words = [f"w{i}" for i in range(T)]
    keys = torch.arange(T)
    noise = torch.randn(H, T, generator=torch.Generator().manual_seed(7))

    def block(start: int, stop: int) -> torch.Tensor:
        rows = torch.arange(start, stop)[:, None]
        near = -(rows - keys).abs() / torch.tensor([4.0, 40.0, 400.0])[:, None, None] + noise[:, None]
        return near.masked_fill(keys > rows, -torch.inf).softmax(-1)

    attention_map = AttentionMap(
        path="blocks.0.attention",
        rows=tuple(words),
        columns=tuple(words),
        n_heads=H,
        compute_rows=block,
        layout=AxisLayout(T, T),
    )
    results = run_script(tmp_path, AttentionReport(title="long", maps=[attention_map]), "long.js", budget=2 << 20)
    # The page stores only some keys per row; the largest are exact up to the quantization to 8 bits.
    expected = expected_table(block(1501, 1502)[2, 0], words)
    assert [key for key, _ in results["row"]] == [key for key, _ in expected]
    for (_, value), (_, expected_value) in zip(results["row"], expected, strict=True):
        assert float(value) == pytest.approx(float(expected_value), abs=0.0021)
    assert results["warm"] > 3
    assert results["choices"] == ["largest", "mean", "−", "all", "+"]
    assert results["zoomed"] is True
    assert results["close"] == ["−", "all", "+"]
    assert results["stays"] is True  # another head at the same zoom
    assert results["out"] is True
    assert min(results["inks"]) > 20
    assert results["paths"] > 20
    assert "25 queries around the selected one" in results["note"]


def test_page_image_report_in_browser(tmp_path):
    weights = softmax(2, 13, 13, sharp=3.0)  # [CLS] and 3 × 4 patches
    names = ["[CLS]", *(f"({i}, {j})" for i in range(3) for j in range(4))]
    report = AttentionReport(
        title="an image",
        maps=[AttentionMap.of(weights, names, path="blocks.0.attention", grid=(3, 4))],
        image=torch.arange(12 * 16, dtype=torch.uint8).view(12, 16),
    )
    results = run_script(tmp_path, report, "patches.js")
    assert results["start"].startswith("(1, 2)")  # the patch in the middle
    assert results["row"] == expected_table(weights[0, 1 + 1 * 4 + 2], names)
    assert results["below"].startswith("(2, 2)")
    assert results["ink"] > 50
    assert results["plain"] > 50  # the image without weights
    assert results["legend"].startswith("0")
    assert "of its attention" in results["legend"]
    assert results["matrix"] > 20


def test_page_sound_report_has_a_time_axis_and_a_player(tmp_path):
    ends = [0.25 * (n + 1) for n in range(8)]
    report = AttentionReport(
        title="a sound",
        maps=[
            AttentionMap.of(
                softmax(2, 8, 8, sharp=3.0), [f"{end} s" for end in ends], path="blocks.0.attention", grid=(1, 8)
            )
        ],
        image=torch.arange(6 * 16, dtype=torch.uint8).view(6, 16),
        sound=Sound(torch.sin(torch.arange(12000) / 5), 8000, ends, {1: "4", 5: "2"}),
    )
    results = run_script(tmp_path, report, "sound.js")
    assert results["captions"] == ["Mel spectrogram", "Attention of the selected frame"]
    assert results["axis"][:3] == ["0 s", "0.2 s", "0.4 s"]
    assert [text for text, _ in results["symbols"]] == ["4", "2"]
    expected = [results["width"] * end / 2 - 4 for end in (0.5, 1.5)]
    assert [x for _, x in results["symbols"]] == pytest.approx(expected)
    assert results["seconds"] == pytest.approx(1.5, abs=0.01)
