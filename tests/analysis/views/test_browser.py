"""The page in a real browser: a script in the page clicks and types through it, and writes down what it finds.

Headless Chromium prints the page's final content; nothing else is needed to drive it.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from clearhead.analysis.measures import value_weighted_norms
from clearhead.analysis.views.attention_map import AttentionMap, AxisLayout
from clearhead.analysis.views.page import render_page
from clearhead.analysis.views.report import AttentionReport
from clearhead.masks import causal
from tests.analysis.views.test_views import softmax

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on this machine")

SCRIPTS = Path(__file__).parent / "browser"

# Runs before the page's own script: whatever goes wrong is written down.
WATCH = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));
addEventListener("unhandledrejection", (event) => wrong.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (event) => wrong.push(event.violatedDirective));
</script>"""
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1400,1000",
    "--virtual-time-budget=60000",
    "--dump-dom",
)


def clicked(folder: Path, made: AttentionReport, script: str, *, budget: int | None = None) -> dict:
    """What a script of `browser/` found in the page of an album."""
    return opened(folder, render_page(made) if budget is None else render_page(made, budget=budget), script)


def opened(folder: Path, text: str, script: str) -> dict:
    """What a script of `browser/` found in a page."""
    run = "\n".join((SCRIPTS / name).read_text(encoding="utf-8") for name in ("tools.js", script))
    path = folder / "page.html"
    path.write_text(
        text.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"<script>{run}</script></body>"),
        encoding="utf-8",
    )
    done = subprocess.run(
        [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'profile'}", path.as_uri()],
        capture_output=True,
        text=True,
        check=False,
    )
    result = re.search(r'<pre id="found">([^<]*)</pre>', done.stdout)
    assert result, f"the script did not come to its end:\n{done.stderr[-2000:]}"
    found = json.loads(base64.b64decode(result.group(1)))
    assert found["wrong"] == []
    assert found["fetched"] == 0
    return found


def shown(weight: float) -> str:
    """A weight as the page is to write it."""
    return f"{weight:.2f}" if weight >= 0.0995 else f"{weight:.3f}" if weight >= 0.0005 else "<0.001"


def top(weights: torch.Tensor, labels: list[str]) -> list[list[str]]:
    """The table of a row as the page is to show it: the eight keys of largest weight, and the weights."""
    best = weights.topk(min(8, len(labels)))
    return [
        [f"{labels[key]} {key}", shown(value)]
        for value, key in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        if value > 1e-6
    ]


def test_twelve_tokens(tmp_path):
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "looked", "at", "the", "moon", "."]
    mask = causal().dense(12)
    layers = [softmax(3, 12, 12, sharp=2.0, mask=mask), softmax(3, 12, 12, sharp=4.0, mask=mask)]
    read = ["el", "gato", "miró", "la", "luna"]
    cross = softmax(3, 12, 5, sharp=3.0)
    lengths = torch.rand(3, 12, generator=torch.Generator().manual_seed(1)) + 0.5
    made = AttentionReport(
        title="Twelve <tokens> & more",
        maps=[
            *(
                AttentionMap.of(w, words, path=f"decoder.blocks.{i}.attention", value_norms=lengths)
                for i, w in enumerate(layers)
            ),
            AttentionMap.of(cross, words, read, path="decoder.blocks.0.cross_attention", cross=True),
        ],
        metadata={"model": "made by hand"},
        norms=[("decoder.blocks.0", torch.rand(12) + 1), ("decoder.blocks.1", torch.rand(12) + 2)],
    )
    found = clicked(tmp_path, made, "twelve.js")
    added = [
        f"{words[one.key]} {one.key}head {one.head}{100 * one.share:.0f} %"
        for one in value_weighted_norms(layers[1][:, 9], lengths, top=6)
    ]
    assert found["title"] == "Twelve <tokens> & more"
    assert found["facts"] == "modelmade by hand"
    assert found["start"] == "Cross-attention, layer 0, mean of heads"
    assert found["thumbs"] == 3 * 4
    assert found["clicked"] == ["Decoder self-attention, layer 1, head 2", ["1/2"]]
    assert found["row9"] == top(layers[1][2, 9], words)
    assert found["chosen"] == ["the"]
    assert found["adds"] == added
    assert found["left"] == ["Decoder self-attention, layer 1, head 1", ["1/1"]]
    assert found["up"] == "Decoder self-attention, layer 0, head 1"
    assert found["row9above"] == top(layers[0][1, 9], words)
    assert found["mean"] == "Decoder self-attention, layer 0, mean of heads"
    assert found["back"] == found["up"]
    assert found["next"] == top(layers[0][1, 10], words)
    assert found["focused"] == "4"
    assert found["selected"] == ["4"]
    # The cursor starts at the largest key of the chosen row, then goes right and down by one.
    j = min(11, int(layers[0][1, 4].argmax()) + 1)
    weight = float(layers[0][1, 5, j])
    assert found["pointed"] == f"Under the pointer: {words[j]} {shown(weight)}"
    assert found["ink"] > 20
    drawn = sum(int((row.topk(8).values >= 0.03).sum()) for row in layers[0][1])
    assert found["paths"] == drawn
    assert found["labels"] == 24
    of_all = sum(int((row.topk(8).values >= 0.03).sum()) for head in layers[0] for row in head)
    assert found["together"] == ["Decoder self-attention, layer 0, all heads", of_all, 3]
    assert found["colors"] == ["head 0", "head 1", "head 2"]
    assert found["help"] is True
    assert found["sorted"] == sorted(found["sorted"], reverse=True)
    assert len(found["sorted"]) == 9
    assert found["current"] == 1
    assert "layer=decoder.blocks" in found["address"]
    assert len(found["more"]) == 2
    assert min(found["more"]) > 5
    assert found["named"] is True


def test_two_thousand_tokens_by_tiles(tmp_path):
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
    found = clicked(tmp_path, AttentionReport(title="long", maps=[attention_map]), "long.js", budget=2 << 20)
    # The page kept fewer keys than there are: the largest must be exact, to the eighth of a bit that it stores.
    expected = top(block(1501, 1502)[2, 0], words)
    assert [key for key, _ in found["row"]] == [key for key, _ in expected]
    for (_, shown), (_, wanted) in zip(found["row"], expected, strict=True):
        assert float(shown) == pytest.approx(float(wanted), abs=0.0021)
    assert found["warm"] > 3
    assert found["choices"] == ["largest", "mean", "−", "all", "+"]
    assert found["zoomed"] is True
    assert found["close"] == ["−", "all", "+"]
    assert found["stays"] is True  # another head at the same place
    assert found["out"] is True
    assert min(found["inks"]) > 20
    assert found["paths"] > 20
    assert "25 queries around the chosen one" in found["note"]


def test_patches_over_a_picture(tmp_path):
    weights = softmax(2, 13, 13, sharp=3.0)  # [CLS] and 3 × 4 patches
    names = ["[CLS]", *(f"({i}, {j})" for i in range(3) for j in range(4))]
    made = AttentionReport(
        title="a picture",
        maps=[AttentionMap.of(weights, names, path="blocks.0.attention", grid=(3, 4))],
        image=torch.arange(12 * 16, dtype=torch.uint8).view(12, 16),
    )
    found = clicked(tmp_path, made, "patches.js")
    assert found["start"].startswith("(1, 2)")  # the patch in the middle
    assert found["row"] == top(weights[0, 1 + 1 * 4 + 2], names)
    assert found["below"].startswith("(2, 2)")
    assert found["ink"] > 50
    assert found["plain"] > 50  # the picture itself, beside it
    assert found["legend"].startswith("0")
    assert "of its attention" in found["legend"]
    assert found["matrix"] > 20
