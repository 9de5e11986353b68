"""Values of the answers to the CENG 403 exam and the Transformer exercises against counts and formulas."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import pytest

from clearhead.course.answers.computed import transformer_exercises
from clearhead.course.answers.computed.ceng403_exam import (
    costs,
    drawing,
    mechanisms,
    positions,
    program,
    training,
    translator,
)

PAIRS = [(i, j) for i in range(16) for j in range(16)]


def test_hello_world_weights_are_softmax_of_scores():
    rows = translator.hello_world_attention().rows
    scores, weights = ([float(row[i].replace("−", "-")) for row in rows] for i in (1, 2))
    total = sum(math.exp(score) for score in scores)
    assert weights == pytest.approx([math.exp(score) / total for score in scores], abs=2e-4)
    assert translator.hello_world_weight_sum() == "1.0000"
    assert rows[2][0] == f"“{translator.hello_world_query()}”"


def test_cross_attention_rows_sum_to_one():
    table = translator.cross_attention()
    assert [row[0] for row in table.rows][-1] == "“<stop>”"
    for row in table.rows:
        assert sum(float(cell) for cell in row[1:]) == pytest.approx(1, abs=0.03)
    assert translator.translation().startswith("Hola mundo")


def test_costs_follow_formulas():
    n, d = 1000, 512
    assert costs.attention_parameters() == 4 * d * d
    assert costs.attention_parameters_without_output() == 3 * d * d
    assert costs.attention_weight_bytes() == 4 * n * n == costs.attention_weight_bytes_8() / 8
    assert costs.attention_operations() == 8 * n * d * d + 4 * n * n * d == 2 * costs.attention_multiply_adds()
    assert costs.attention_share() == f"{round(100 * 4 * n * n * d / (8 * n * d * d + 4 * n * n * d))} %"
    assert (costs.table_length(), costs.table_width(), costs.table_kernel()) == (1000, 512, 5)


def test_masks_of_program_leak_nothing():
    assert program.padding_leak() == "0"
    assert program.causal_leak() == "0"
    assert program.unmasked_leak() > 1e-3


def test_position_values_follow_formulas():
    wavelengths = [2 * math.pi * 10_000 ** (2 * i / 512) for i in range(256)]
    assert positions.slow_pairs() == sum(w > 1000 for w in wavelengths)
    assert positions.slowest_turn() == pytest.approx(1000 / max(wavelengths))
    assert positions.sinusoid_norm() == "16"
    neighbors = math.sqrt(sum(2 - 2 * math.cos(2 * math.pi / w) for w in wavelengths))  # law of cosines on each circle
    assert positions.closest_positions() == pytest.approx(neighbors)
    row = positions.bases().rows[3]
    assert row[0] == "10,000"
    similarity = sum(math.cos(2 * math.pi * 100 / w) for w in wavelengths) / 256
    assert float(row[-2]) == pytest.approx(similarity, abs=0.006)
    assert positions.learned_parameters() == 1000 * 512
    assert positions.sinusoid_parameters() == 0
    assert positions.encoding_3().startswith(f"({math.sin(3):.4f}, {math.cos(3):.4f}".replace("-", "−"))


def test_sparse_pattern_counts_match_enumeration():
    band = {(i, j) for i, j in PAIRS if abs(i - j) <= 2}
    columns = {(i, j) for i, j in PAIRS if j % 4 == 0}
    assert mechanisms.band_pairs() == len(band)
    assert mechanisms.column_pairs() == len(columns)
    assert mechanisms.overlap_pairs() == len(band & columns)
    assert mechanisms.sparse_pairs() == len(band | columns)
    reach, layers = {i: {i} for i in range(16)}, 0
    while any(len(tokens) < 16 for tokens in reach.values()):
        reach = {i: {k for j in range(16) if (i, j) in band | columns for k in reach[j]} for i in range(16)}
        layers += 1
    assert mechanisms.sparse_layers() == layers
    two = {i: {k for j in range(16) if (i, j) in band | columns for k in range(16) if (j, k) in band | columns}
           for i in range(16)}  # fmt: skip
    far = [str(k) for k in range(16) if any(k not in tokens for tokens in two.values())]
    assert mechanisms.sparse_far_tokens() == ", ".join(far) == "15"
    assert mechanisms.sparse_growth().rows[0][:3] == ["16", f"{len(band) / 16:.2f}", f"{len(band | columns) / 16:.1f}"]


def test_window_values_match_enumeration():
    n, reach = mechanisms.window_length(), mechanisms.window_width() // 2
    assert mechanisms.window_pairs() == sum(min(n, i + reach + 1) - max(0, i - reach) for i in range(n))
    assert [row[1] for row in mechanisms.window_reach().rows] == [min(64, 2 * k + 1) for k in (1, 2, 4, 8, 16, 32)]


def test_score_forms_show_that_only_the_dot_product_is_linear():
    dot, additive = mechanisms.score_forms().rows
    assert float(dot[1]) == 0
    assert float(additive[1]) > 0.1
    assert (dot[2], additive[2]) == (0, 2 * 8 * 8 + 8)


def test_last_gradient_falls_with_depth_for_pre_norm_only():
    pre, post = ([float(cell) for cell in row[1:]] for row in training.norm_placements().rows)
    assert pre == sorted(pre, reverse=True)
    assert pre[-1] < 0.5
    assert all(0.7 < ratio < 1.5 for ratio in post)


def test_initial_scores_saturate_without_scaled_weights():
    xavier, large = training.initial_scores().rows
    assert float(xavier[1]) == pytest.approx(1, abs=0.2)
    assert float(large[1].replace(",", "")) == pytest.approx(128**2, rel=0.1)
    assert float(large[2]) > 0.9
    assert "·10⁻" in large[3], "a gradient that is tiny is not printed as 0"


def test_schedule_curve_reaches_its_maximum_after_the_warm_up():
    curve = training.schedule_curve()
    (rates,) = curve.series.values()
    assert max(rates) == pytest.approx(0.001)
    assert curve.x[list(rates).index(max(rates))] == 4000
    assert training.half_rate_step() == "52,000"
    drawing_in_characters = curve.text(80).splitlines()
    assert max(map(len, drawing_in_characters)) <= 80
    assert [line.split()[0] for line in drawing_in_characters[1:12:5]] == ["0.0010", "0.0005", "0.0000"]
    assert drawing_in_characters[1].index("•") == drawing_in_characters[1].index("┤") + 3  # step 4,000 of 100,000
    assert drawing_in_characters[-1].split() == ["0", "50,000", "100,000"]


def test_encoder_decoder_drawing_is_complete():
    figure = drawing.encoder_decoder()
    root = ET.fromstring(figure.svg())
    texts = " ".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))
    for label in ("Hello", "world", "Hola", "mundo", "<start>", "Multi-head", "Masked multi-head", "cross-attention",
                  "positional encoding", "Feed-forward", "Add & layer norm", "K, V", "pre-norm", "post-norm", "causal",
                  "Softmax", "Linear", "Input embedding", "Output embedding"):  # fmt: skip
        assert label in texts, label
    assert texts.count("h heads") == 3
    assert max(map(len, figure.text().splitlines())) <= 80


def test_labels_of_drawing_are_not_crossed_by_lines():
    root = ET.fromstring(drawing.encoder_decoder().svg())
    lines = [element.get("points").split() for element in root.iter("{http://www.w3.org/2000/svg}polyline")]
    points = [[tuple(map(float, point.split(","))) for point in line] for line in lines]
    segments = [(a, b) for line in points for a, b in itertools.pairwise(line)]
    for label in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y, size = (float(label.get(key)) for key in ("x", "y", "font-size"))
        width = 0.56 * size * len(label.text)  # of a wide sans-serif
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[label.get("text-anchor")]
        for (x1, y1), (x2, y2) in segments:
            is_outside = max(x1, x2) <= left or min(x1, x2) >= left + width
            assert is_outside or max(y1, y2) <= y - 0.7 * size or min(y1, y2) >= y, label.text


def test_bottlenecks_cross_at_twice_the_width():
    shares = {row[0]: row[3] for row in transformer_exercises.bottlenecks().rows}
    assert shares["1,024"] == "50.0 %"
    assert transformer_exercises.bottleneck_length() == 2 * transformer_exercises.bottleneck_width()
