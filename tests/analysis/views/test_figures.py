"""Views in the terminal and as figures: what stands where, and that what was drawn is what was given."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch

from clearhead.analysis.measures import ValueWeightedNorm
from clearhead.analysis.views import figures, terminal
from clearhead.analysis.views.attention_map import AttentionMap
from clearhead.errors import ConfigError, ShapeError
from tests.analysis.views.test_views import only, softmax

WORDS = ["Hola", " mundo", "␣", "."]


class TestTerminal:
    def test_a_narrow_terminal_cuts_labels_first(self):
        weights = torch.eye(4, 5)
        columns = ["Hello", " wonderful", " world", "!", "<eos>"]
        drawn = terminal.heatmap(weights, WORDS, columns, width=31).splitlines()
        assert max(map(len, drawn)) <= 31
        assert drawn[0].split() == ["Hel…", "won…", "wor…", "!", "<eo…"]
        assert [line.index("█") for line in drawn[1:]] == [6, 11, 16, 21]
        wide = terminal.heatmap(weights, WORDS, columns, width=200).splitlines()
        assert wide[0].split() == ["Hello", "wonderful", "world", "!", "<eos>"]

    def test_wide_letters_keep_the_columns(self):
        drawn = terminal.heatmap(torch.eye(2), ["猫", "e\u0301t"], ["日本", "x"]).splitlines()
        assert drawn == ["   日本 x", "猫 ████", "e\u0301t      ██"]

    def test_a_long_run_is_put_together_by_its_largest(self):
        weights = torch.zeros(130, 300)
        weights[129, 0] = weights[0, 299] = 1.0
        drawn = terminal.heatmap(
            weights, [str(i) for i in range(130)], [str(i) for i in range(300)], width=60
        ).splitlines()
        assert len(drawn) == 1 + 64 + 1
        assert max(map(len, drawn)) <= 60
        full = [(y, line.index("█")) for y, line in enumerate(drawn) if "█" in line]
        assert [y for y, _ in full] == [1, 64]
        assert full[0][1] == 59  # the last letter of the first line
        assert full[1][1] == min(line.index("█") for line in drawn if "█" in line)
        assert "130 × 300, a letter for 3 × 6 cells" in drawn[-1]

    def test_colour_is_darker_for_less(self):
        drawn = terminal.heatmap(torch.tensor([[0.0, 0.5, 1.0]]), ["a"], ["x", "y", "z"], color=True)
        shades = [sum(map(int, found)) for found in re.findall(r"48;2;(\d+);(\d+);(\d+)m", drawn)]
        assert len(shades) == 3
        assert shades == sorted(shades)
        assert shades[0] < 100 < 700 < shades[2]

    def test_head_grid_and_table_name_the_patterns(self):
        previous = only((torch.arange(11) - 1).clamp(min=0), 11, 11)
        itself = only(torch.arange(11), 11, 11)
        attention_map = AttentionMap.of(torch.cat((previous, itself)), [str(i) for i in range(11)])
        lines = terminal.head_grid(attention_map, width=60).splitlines()
        assert lines[0].split("  ") == ["0 previous t", "1 diagonal"]
        assert len(lines) == 12
        for i in range(2, 11):
            assert lines[1 + i][i - 1] == "█"
            assert lines[1 + i][14 + i] == "█"
        assert len(terminal.head_grid(attention_map, width=20).splitlines()) == 12 + 1 + 12
        rows = terminal.head_table(attention_map)
        assert [row[:2] for row in rows] == [("0", "previous token"), ("1", "diagonal")]
        assert float(rows[1][4]) == pytest.approx(attention_map.summary.distance[1], abs=0.005)

    def test_links(self):
        weights = torch.tensor([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05], [0.08, 0.07, 0.06]])
        assert terminal.link_list(weights, ["a", "b", "c"], ["x", " y", "z"]).splitlines() == [
            "a → x 0.70, y 0.20, z 0.10",
            "b → y 0.90",
            "c → (spread out)",
        ]

    def test_norm_bars_are_as_long_as_the_means(self):
        drawn = terminal.norm_bars(
            [("blocks.0", torch.tensor([1.0, 3.0])), ("blocks.1", torch.tensor([4.0, 8.0]))], width=76
        ).splitlines()
        assert [line.count("█") for line in drawn] == [10, 30]  # 40 letters for the longest, 8
        assert drawn[1].endswith("6  (4 … 8)")

    def test_patches(self):
        image = torch.zeros(6, 8, dtype=torch.uint8)
        image[:2] = 255
        weights = torch.zeros(12)
        weights[11] = 0.25
        lines = terminal.patch_map(image, weights, (3, 4)).splitlines()
        assert lines[0] == lines[1] == "█" * 16
        assert lines[4] == lines[5] == " " * 16 + "   " + " " * 12 + "█" * 4

    def test_contributions(self):
        found = [ValueWeightedNorm(head=2, key=1, weight=0.5, norm=3.0, share=0.25)]
        assert terminal.contribution_table(found, WORDS) == [("mundo (1)", "2", "0.500", "25.0 %")]

    @pytest.mark.bad_input
    def test_mistakes(self):
        with pytest.raises(ShapeError, match="7 weights for 3×4 patches"):
            terminal.patch_map(torch.zeros(6, 8, dtype=torch.uint8), torch.ones(7), (3, 4))


class TestFigures:
    def test_a_heat_map_shows_its_weights(self):
        weights = softmax(4, 5)
        figure = figures.heat(weights, WORDS, list("vwxyz"), title="t")
        axes = figure.axes[0]
        assert torch.equal(torch.tensor(axes.images[0].get_array().data), weights)
        assert [label.get_text() for label in axes.get_yticklabels()] == ["Hola", "mundo", "␣", "."]
        assert [label.get_text() for label in axes.get_xticklabels()] == list("vwxyz")

    def test_arcs_are_the_weights_that_can_be_seen(self):
        weights = torch.tensor([[0.9, 0.1, 0.0], [0.02, 0.5, 0.48]])
        axes = figures.arcs(weights, ["a", "b"], ["x", "y", "$z"]).axes[0]
        assert [round(curve.get_alpha(), 2) for curve in axes.patches] == [0.9, 0.1, 0.5, 0.48]
        assert [text.get_text() for text in axes.texts] == ["a", "b", "x", "y", r"\$z"]

    def test_every_head_of_every_layer(self):
        maps = [AttentionMap.of(softmax(3, 5, 5, sharp=i + 1.0), list("abcde"), path=f"blocks.{i}.x") for i in range(2)]
        axes = figures.head_grid(maps).axes
        assert len(axes) == 6
        for i in range(2):
            for head in range(3):
                shown = torch.tensor(axes[3 * i + head].images[0].get_array().data)
                torch.testing.assert_close(shown, maps[i].weights(head).sqrt())
        left, right = figures.measures(maps).axes
        for axes, values in ((left, "entropy"), (right, "distance")):
            dots = sorted(float(y) for dots in axes.collections for _, y in dots.get_offsets())
            assert dots == pytest.approx(sorted(v for p in maps for v in getattr(p.summary, values)))

    def test_norms_rollout_contributions_patches(self):
        found = [
            ("encoder.blocks.0", torch.tensor([1.0, 3.0])),
            ("decoder.blocks.0", torch.tensor([4.0, 8.0])),
        ]
        axes = figures.norms(found).axes[0]
        assert [line.get_ydata() for line in axes.lines] == [[2.0], [6.0]]  # a line for each stack
        matrix = softmax(3, 3)
        shown = figures.heat(matrix, list("abc"), list("abc")).axes[0].images[0].get_array().data
        assert torch.equal(torch.tensor(shown), matrix)
        bars = figures.contribution_bars(
            [ValueWeightedNorm(0, 1, 0.5, 2.0, 0.4), ValueWeightedNorm(1, 0, 0.5, 1.0, 0.2)], WORDS
        ).axes[0]
        assert [bar.get_width() for bar in bars.patches] == pytest.approx([40, 20])
        assert [label.get_text() for label in bars.get_yticklabels()] == ["mundo, head 0", "Hola, head 1"]
        weights = softmax(2, 12)
        drawn = figures.patches(torch.zeros(6, 8, dtype=torch.uint8), weights, (3, 4), query=5).axes
        over = torch.tensor(drawn[2].images[1].get_alpha())
        torch.testing.assert_close(over, 0.75 * (weights[1] / weights[1].max()).sqrt().view(3, 4))
        frame = drawn[2].patches[0]
        assert (frame.get_x(), frame.get_y(), frame.get_width(), frame.get_height()) == (2, 2, 2, 2)

    def test_files(self, tmp_path):
        def figure():
            return figures.heat(softmax(3, 3), list("abc"), list("abc"))

        assert figures.save(figure(), tmp_path / "deep" / "a.png").read_bytes().startswith(b"\x89PNG")
        first = figures.save(figure(), tmp_path / "a.svg").read_bytes()
        assert ET.fromstring(first).tag.endswith("svg")
        assert figures.save(figure(), tmp_path / "b.svg").read_bytes() == first
        assert figures.save(figure(), tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")

    @pytest.mark.bad_input
    def test_mistakes(self, tmp_path):
        with pytest.raises(ShapeError, match=r"\(2, 3\) and there are 1 row"):
            figures.heat(torch.zeros(2, 3), ["a"], ["b"])
        with pytest.raises(ShapeError, match="readable up to 64"):
            figures.arcs(torch.zeros(70, 2), [""] * 70, ["a", "b"])
        with pytest.raises(ConfigError, match="there are no norms"):
            figures.norms([])
        with pytest.raises(ShapeError, match="5 weights for 3×4"):
            figures.patches(torch.zeros(6, 8, dtype=torch.uint8), torch.ones(2, 5), (3, 4))
        with pytest.raises(ConfigError, match=r"unknown figure format of a\.txt"):
            figures.save(figures.heat(torch.zeros(1, 1), ["a"], ["b"]), tmp_path / "a.txt")
