"""Values in the answers to the homework and to the answered exam, compared with independent computations."""

from __future__ import annotations

import json
import math
from importlib import resources

import pytest
import torch
from torch import nn

from clearhead.course.answers.computed import ceng403_answered as answered
from clearhead.course.answers.computed.csci2572_homework import attention, self_attention, transformer, vision


def cell(table, row, column):
    """Return a cell, found by the first cell of its row and the name of its column."""
    (cells,) = [cells for cells in table.cells if cells[0] == row]
    return cells[list(table.header).index(column)]


def numbers(text):
    """Return the numbers of "(1.0, 2.0)"."""
    return [float(part) for part in text.strip("()").split(", ")]


def scientific(text):
    """Return the number of "1.4·10⁻³"."""
    mantissa, _, power = text.partition("·10")
    return float(mantissa) * 10.0 ** int(power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or 0)


def test_example_output_equals_loops():
    expected = []
    for query in attention.QUERIES.T.tolist():
        scores = [sum(k * q for k, q in zip(key, query, strict=True)) for key in attention.KEYS.T.tolist()]
        total = sum(map(math.exp, scores))
        weights = [math.exp(score) / total for score in scores]
        expected.append([sum(a * v for a, v in zip(weights, row, strict=True)) for row in attention.VALUES.tolist()])
    columns = zip(*(row.split(", ") for row in attention.example_output().split("; ")), strict=True)
    for column, reference in zip(columns, expected, strict=True):
        assert [float(x) for x in column] == pytest.approx(reference, abs=5e-4)


def test_beta_for_weight_reaches_wanted_weight():
    table = attention.beta_for_weight()
    for target, beta, _ in table.cells:
        assert 1 / (1 + 4 * math.exp(-float(beta))) == pytest.approx(float(target), abs=2e-3)


def test_weights_by_beta_at_zero_are_uniform():
    assert attention.weights_by_beta().cells[0][1:4] == ["0.3333"] * 3


def test_uniformity_by_beta_bounds_contain_weights():
    for _, smallest, largest, low, high in attention.uniformity_by_beta().cells:
        assert float(low) <= float(smallest) <= float(largest) <= float(high)


@pytest.mark.parametrize("table", [attention.perturbed_key, attention.perturbed_query])
def test_perturbation_first_order_prediction_is_close(table):
    """The prediction is much closer to the output after the step than the output before the step is."""
    result = table()
    predicted = numbers(result.caption.rsplit("becomes ", 1)[1].rstrip("."))
    before, after = (numbers(cell(result, "h_1", name)) for name in ("before", "after"))
    change = max(abs(a - b) for a, b in zip(after, before, strict=True))
    assert change > 0.01
    assert max(abs(a - p) for a, p in zip(after, predicted, strict=True)) < change / 10


def test_perturbed_query_leaves_other_output():
    table = attention.perturbed_query()
    assert cell(table, "h_2", "before") == cell(table, "h_2", "after")


def test_scaled_key_moves_weight_by_sign_of_score():
    weights = {row[0]: [float(x) for x in row[1:]] for row in attention.scaled_key().cells}
    assert weights["2"] == sorted(weights["2"])
    assert weights["−1"] == sorted(weights["−1"], reverse=True)
    assert len(set(weights["0"])) == 1


def test_convolution_by_heads_equals_conv1d():
    x = torch.randn(9, 4, dtype=torch.float64)
    matrices = torch.randn(3, 4, 3, dtype=torch.float64)
    expected = nn.functional.conv1d(x.T[None], matrices.permute(2, 1, 0), padding=1)[0].T
    assert torch.allclose(self_attention._convolve(x, list(matrices)), expected)
    assert scientific(self_attention.convolution_by_heads()) < 1e-12


def test_convolution_by_bias_equals_kernel_inside_and_is_rescaled_at_end():
    assert scientific(self_attention.convolution_by_bias()) < 1e-12
    assert self_attention.convolution_by_bias_at_end() == "0.6667, 0.3333"


def test_sharpness_of_permutation_equals_formula():
    for factor, four, many in self_attention.sharpness_of_permutation().cells:
        for n, text in ((4, four), (64, many)):
            assert scientific(text) == pytest.approx((n - 1) / (n - 1 + math.exp(float(factor))), rel=0.05)


def test_layer_costs_equal_flop_counter():
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.empty(1, 64, 512, device="meta")
    weights = torch.empty(512, 512, device="meta")
    with FlopCounterMode(display=False) as counter:
        q, k, v = x @ weights, x @ weights, x @ weights
        ((q @ k.mT) @ v) @ weights
    row = transformer.layer_costs().rows[0]
    assert counter.get_total_flops() == 2 * (row[2] + row[3])


def test_common_word_starts_equal_and_moves_apart():
    table = transformer.similarity_by_layer()
    similarities = [float(value) for value in table.cells[0][1:]]
    assert similarities[0] == 1.0
    assert similarities == sorted(similarities, reverse=True)
    assert similarities[-1] < 0.9


def test_feed_forward_parameters_equal_formula():
    rows = {row[0]: row[1] for row in transformer.feed_forward_parameters().rows}
    assert rows["feed-forward network"] == 512 * 2048 + 2048 + 2048 * 512 + 512
    assert rows["multi-head attention"] == 4 * (512 * 512 + 512)


def test_bottleneck_ranks_are_bounded_by_middle():
    assert [row[1] for row in transformer.bottleneck_ranks().rows] == [128, 512, 512]


def test_gradients_through_depth_vanish_without_skip_only():
    rows = {row[0]: row[1] for row in transformer.gradients_through_depth().cells}
    assert scientific(rows["F(x)"]) < 1e-12
    assert 0.5 < scientific(rows["x + F(x)"]) < 2


def test_rank_collapse_needs_attention_alone():
    rows = transformer.rank_collapse().cells
    assert scientific(rows[-1][1]) < 1e-9
    assert scientific(rows[-1][2]) > 0.5


def test_heads_and_filters_equal_formulas():
    for count, of_heads, of_filters in self_attention.heads_and_filters().rows:
        assert of_heads == 4 * 512**2
        assert of_filters == count * 64 * 9


def test_few_data_equals_stored_study():
    document = json.loads((resources.files("clearhead.course.claims") / "results" / "vit-against-cnn.json").read_text())
    for n, *cells, _ in vision.few_data().rows:
        for network, text in zip(("vit", "cnn"), cells, strict=True):
            accuracies = [
                row["validation"]
                for row in document["rows"]
                if (row["network"], row["n_train"], row["pictures"]) == (network, n, "whole")
            ]
            assert text == f"{sum(accuracies) / len(accuracies):.1%}"


def test_masks_of_streams_show_past_and_one_ahead():
    past, ahead = (
        figure().text().splitlines() for figure in (self_attention.streaming_mask, self_attention.lookahead_mask)
    )
    assert past[-1].split()[1:] == ["·"] * 6 + ["■"] * 4
    assert ahead[-2].split()[1:] == ["·"] * 5 + ["■"] * 5


def test_norm_of_positions_normalizes_each_position():
    assert len(set(transformer.norm_of_positions().split("; "))) == 1


def test_classified_seven_is_a_seven():
    table = vision.classified_seven()
    probabilities = {name: float(probability) for name, _, probability in table.cells}
    assert max(probabilities, key=probabilities.__getitem__) == "7"
    assert vision.sum_of_probabilities() == "1.0000"


def test_base_model_sizes_equal_vision_transformer():
    from clearhead.models import VisionConfig
    from clearhead.models.vision import ClsPooling

    config = VisionConfig(
        d_model=768,
        n_heads=12,
        n_layers=1,
        image_size=(224, 224),
        patch_size=16,
        n_classes=1000,
        n_channels=3,
        pooling=ClsPooling(),
    )
    with torch.device("meta"):
        model = config.build()
    sizes = {row[0]: row[2].replace(",", "") for row in vision.base_model_sizes().cells}
    assert int(sizes["embedded patches"]) == sum(p.numel() for p in model.embedding.parameters())
    assert int(sizes["plus positions"]) == sum(p.numel() for p in model.positions.parameters())
    assert int(sizes["logits of the linear head"]) == sum(p.numel() for p in model.head.parameters())


def test_scale_and_saturation_scaled_deviation_is_one():
    for row in answered.scale_and_saturation().rows:
        width, deviation, scaled = int(row[0]), row[1], row[4]
        assert deviation == pytest.approx(width**0.5, rel=0.1)
        assert scaled == pytest.approx(1, rel=0.1)


def test_weights_of_shifted_scores_are_equal():
    assert answered.weights_of_shifted_scores() == answered.weights_of_four_scores()
    assert answered.sum_of_weights() == "1"


def test_head_parameters_equal_those_of_torch():
    layer = nn.MultiheadAttention(512, 8, bias=False, device="meta")
    assert answered.projection_parameters() == layer.in_proj_weight.numel()
    assert answered.output_parameters() == layer.out_proj.weight.numel()
    assert answered.layer_parameters() == sum(parameter.numel() for parameter in layer.parameters())
    assert answered.head_parameters() * 8 == answered.projection_parameters()


def test_two_orders_differ_with_positions_only():
    without, with_positions = answered.two_orders().cells
    assert all(scientific(x) < 1e-12 for x in without[1:])
    assert all(scientific(x) > 0.1 for x in with_positions[1:])


def test_heads_and_relations_examples_exceed_other_heads():
    rows = {(row[0], row[1]): (float(row[3]), float(row[4])) for row in answered.heads_and_relations().cells}
    assert all(weight > 5 * others or weight > 0.9 for weight, others in rows.values())


def test_mask_times_infinity_is_not_a_number():
    assert answered.mask_times_infinity() == "NaN, ∞"
