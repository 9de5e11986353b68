"""Terminal views and figures contain the given values at the expected positions."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch

from clearhead.analysis.measures import ValueWeightedNorm
from clearhead.analysis.views import figures, terminal
from clearhead.analysis.views.attention_map import AttentionMap
from clearhead.errors import ConfigError, ShapeError
from tests.support.attention_weights import focused_weights, softmax

WORDS = ["Hola", " mundo", "␣", "."]


class TestTerminal:
    def test_heatmap_narrow_width_truncates_labels(self):
        weights = torch.eye(4, 5)
        columns = ["Hello", " wonderful", " world", "!", "<eos>"]
        rendered = terminal.heatmap(weights, WORDS, columns, width=31).splitlines()
        assert max(map(len, rendered)) <= 31
        assert rendered[0].split() == ["Hel…", "won…", "wor…", "!", "<eo…"]
        assert [line.index("█") for line in rendered[1:]] == [6, 11, 16, 21]
        wide = terminal.heatmap(weights, WORDS, columns, width=200).splitlines()
        assert wide[0].split() == ["Hello", "wonderful", "world", "!", "<eos>"]

    def test_heatmap_wide_characters_stay_aligned(self):
        rendered = terminal.heatmap(torch.eye(2), ["猫", "e\u0301t"], ["日本", "x"]).splitlines()
        assert rendered == ["   日本 x", "猫 ████", "e\u0301t      ██"]

    def test_heatmap_long_run_is_max_pooled(self):
        weights = torch.zeros(130, 300)
        weights[129, 0] = weights[0, 299] = 1.0
        rendered = terminal.heatmap(
            weights, [str(i) for i in range(130)], [str(i) for i in range(300)], width=60
        ).splitlines()
        assert len(rendered) == 1 + 64 + 1
        assert max(map(len, rendered)) <= 60
        full = [(y, line.index("█")) for y, line in enumerate(rendered) if "█" in line]
        assert [y for y, _ in full] == [1, 64]
        assert full[0][1] == 59  # the last character of the first line
        assert full[1][1] == min(line.index("█") for line in rendered if "█" in line)
        assert "130 × 300, each cell the maximum of 3 × 6" in rendered[-1]

    def test_heatmap_color_is_darker_for_smaller_weights(self):
        rendered = terminal.heatmap(torch.tensor([[0.0, 0.5, 1.0]]), ["a"], ["x", "y", "z"], color=True)
        shades = [sum(map(int, rgb)) for rgb in re.findall(r"48;2;(\d+);(\d+);(\d+)m", rendered)]
        assert len(shades) == 3
        assert shades == sorted(shades)
        assert shades[0] < 100 < 700 < shades[2]

    def test_head_grid_and_table_contain_patterns(self):
        previous = focused_weights((torch.arange(11) - 1).clamp(min=0), 11, 11)
        itself = focused_weights(torch.arange(11), 11, 11)
        attention_map = AttentionMap.of(torch.cat((previous, itself)), [str(i) for i in range(11)])
        lines = terminal.head_grid(attention_map, width=60).splitlines()
        assert lines[0].split("  ") == ["0 previous token", "1 diagonal"]
        assert len(lines) == 12
        for i in range(2, 11):
            assert lines[1 + i][i - 1] == "█"
            assert lines[1 + i][18 + i] == "█"
        assert len(terminal.head_grid(attention_map, width=20).splitlines()) == 12 + 1 + 12
        rows = terminal.head_table(attention_map)
        assert [row[:2] for row in rows] == [("0", "previous token"), ("1", "diagonal")]
        assert float(rows[1][4]) == pytest.approx(attention_map.summary.distance[1], abs=0.005)

    def test_link_list_contains_largest_weights(self):
        weights = torch.tensor([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05], [0.08, 0.07, 0.06]])
        assert terminal.link_list(weights, ["a", "b", "c"], ["x", " y", "z"]).splitlines() == [
            "a → x 0.70, y 0.20, z 0.10",
            "b → y 0.90",
            "c → (spread out)",
        ]

    def test_norm_bars_have_length_of_means(self):
        rendered = terminal.norm_bars(
            [("blocks.0", torch.tensor([1.0, 3.0])), ("blocks.1", torch.tensor([4.0, 8.0]))], width=76
        ).splitlines()
        assert [line.count("█") for line in rendered] == [10, 30]  # 40 characters for the largest value, 8
        assert rendered[1].endswith("6  (4 … 8)")

    def test_patch_map_draws_weights(self):
        image = torch.zeros(6, 8, dtype=torch.uint8)
        image[:2] = 255
        weights = torch.zeros(12)
        weights[11] = 0.25
        lines = terminal.patch_map(image, weights, (3, 4)).splitlines()
        assert lines[0] == lines[1] == "█" * 16
        assert lines[4] == lines[5] == " " * 16 + "   " + " " * 12 + "█" * 4

    def test_contribution_table_contains_rows(self):
        contributions = [ValueWeightedNorm(head=2, key=1, weight=0.5, norm=3.0, share=0.25)]
        assert terminal.contribution_table(contributions, WORDS) == [("mundo (1)", "2", "0.500", "25.0 %")]

    @pytest.mark.bad_input
    def test_patch_map_invalid_weights_raise_shape_error(self):
        with pytest.raises(ShapeError, match="7 weights for 3×4 patches"):
            terminal.patch_map(torch.zeros(6, 8, dtype=torch.uint8), torch.ones(7), (3, 4))


class TestFigures:
    def test_heat_contains_weights_and_labels(self):
        weights = softmax(4, 5)
        figure = figures.heat(weights, WORDS, list("vwxyz"), title="t")
        axes = figure.axes[0]
        assert torch.equal(torch.tensor(axes.images[0].get_array().data), weights)
        assert [label.get_text() for label in axes.get_yticklabels()] == ["Hola", "mundo", "␣", "."]
        assert [label.get_text() for label in axes.get_xticklabels()] == list("vwxyz")

    def test_arcs_draw_weights_above_threshold(self):
        weights = torch.tensor([[0.9, 0.1, 0.0], [0.02, 0.5, 0.48]])
        axes = figures.arcs(weights, ["a", "b"], ["x", "y", "$z"]).axes[0]
        assert [round(curve.get_alpha(), 2) for curve in axes.patches] == [0.9, 0.1, 0.5, 0.48]
        assert [text.get_text() for text in axes.texts] == ["a", "b", "x", "y", r"\$z"]

    def test_head_grid_and_measures_contain_each_head(self):
        maps = [AttentionMap.of(softmax(3, 5, 5, sharp=i + 1.0), list("abcde"), path=f"blocks.{i}.x") for i in range(2)]
        axes = figures.head_grid(maps).axes
        assert len(axes) == 6
        for i in range(2):
            for head in range(3):
                image = torch.tensor(axes[3 * i + head].images[0].get_array().data)
                torch.testing.assert_close(image, maps[i].weights(head).sqrt())
        entropy_axes, distance_axes = figures.measures(maps).axes
        for axes, values in ((entropy_axes, "entropy"), (distance_axes, "distance")):
            dots = sorted(float(y) for dots in axes.collections for _, y in dots.get_offsets())
            assert dots == pytest.approx(sorted(v for p in maps for v in getattr(p.summary, values)))

    def test_norms_contribution_bars_and_patches_contain_values(self):
        norms = [
            ("encoder.blocks.0", torch.tensor([1.0, 3.0])),
            ("decoder.blocks.0", torch.tensor([4.0, 8.0])),
        ]
        axes = figures.norms(norms).axes[0]
        assert [line.get_ydata() for line in axes.lines] == [[2.0], [6.0]]  # one line per stack
        matrix = softmax(3, 3)
        image = figures.heat(matrix, list("abc"), list("abc")).axes[0].images[0].get_array().data
        assert torch.equal(torch.tensor(image), matrix)
        bars = figures.contribution_bars(
            [ValueWeightedNorm(0, 1, 0.5, 2.0, 0.4), ValueWeightedNorm(1, 0, 0.5, 1.0, 0.2)], WORDS
        ).axes[0]
        assert [bar.get_width() for bar in bars.patches] == pytest.approx([40, 20])
        assert [label.get_text() for label in bars.get_yticklabels()] == ["mundo, head 0", "Hola, head 1"]
        weights = softmax(2, 12)
        rendered = figures.patches(torch.zeros(6, 8, dtype=torch.uint8), weights, (3, 4), query=5).axes
        alpha = torch.tensor(rendered[2].images[1].get_alpha())
        torch.testing.assert_close(alpha, 0.75 * (weights[1] / weights[1].max()).sqrt().view(3, 4))
        frame = rendered[2].patches[0]
        assert (frame.get_x(), frame.get_y(), frame.get_width(), frame.get_height()) == (2, 2, 2, 2)

    def test_save_formats_are_valid_and_deterministic(self, tmp_path):
        def figure():
            return figures.heat(softmax(3, 3), list("abc"), list("abc"))

        assert figures.save(figure(), tmp_path / "deep" / "a.png").read_bytes().startswith(b"\x89PNG")
        first = figures.save(figure(), tmp_path / "a.svg").read_bytes()
        assert ET.fromstring(first).tag.endswith("svg")
        assert figures.save(figure(), tmp_path / "b.svg").read_bytes() == first
        assert figures.save(figure(), tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")

    @pytest.mark.bad_input
    def test_figures_invalid_arguments_raise(self, tmp_path):
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
