"""The other problem types, each compared with an independent reference."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from clearhead.analysis.cost import AttentionSizes
from clearhead.analysis.cost import cost as predict
from clearhead.course.exercises import solve, solve_text, variant
from clearhead.course.exercises.numbers import as_float, text
from clearhead.course.exercises.problem_types.counts import reading_in_words


def cells(work, key):
    return [[x if isinstance(x, str) else as_float(x) for x in row] for row in work.step(key).grid.cells]


def first_cell(work, key):
    return cells(work, key)[0][0]


def test_layer_norm_matches_numpy():
    work = solve("layer-norm-identity")
    x = np.array([1.0, 2.0, 4.0, 7.0])
    y = 1.5 * (x - x.mean()) / x.std() + 0.5
    np.testing.assert_allclose(cells(work, "y")[0], y, atol=1e-14)
    assert text(work.step("variance").grid.cells[0][0]) == "21/4"
    assert text(work.step("length").grid.cells[0][0]) == "3"


@pytest.mark.parametrize(
    ("lines", "holds"),
    [
        ('x = ["sqrt(2)", 3, -5]\ngamma = -7\nbeta = 11', True),
        ("x = [1, 3, -5]\ngamma = 2\neps = 0.1", False),
        ("x = [1, 3, -5]\ngamma = [1, 2, 3]", None),
    ],
)
def test_layer_norm_identity_holds_conditionally(lines, holds):
    work = solve_text(f'kind = "layer-norm"\n{lines}\n')
    assert work.agrees
    if holds is None:
        assert all(step.key != "promised" for step in work.steps)
        assert "does not apply" in work.remarks[0]
    else:
        assert (first_cell(work, "length") == pytest.approx(first_cell(work, "promised"), abs=1e-14)) is holds
        assert ("is not |γ|·√d" in work.remarks[0]) is not holds


def test_position_encoding_matches_formula():
    work = solve("sinusoid-position-3")
    angle = 3 / 10000 ** (2 / 512)
    expected = [math.sin(3), math.cos(3), math.sin(angle), math.cos(angle)]
    np.testing.assert_allclose(cells(work, "encoding")[0], expected, atol=1e-15)
    assert text(work.step("divisors").grid.cells[0][1]) == "10^(1/64)"


def test_sparse_16_matches_enumeration():
    work = solve("sparse-16")
    expected = [[float(abs(i - j) <= 2 or j % 4 == 0) for j in range(16)] for i in range(16)]
    assert cells(work, "mask") == expected
    assert first_cell(work, "allowed") == sum(map(sum, expected)) == 120
    assert text(work.step("saving").grid.cells[0][0]) == "17/32"
    other = [
        sum(abs(i - j) <= 2 or j % 4 == 3 for i in range(16) for j in range(16)),
        sum(abs(i - j) <= 2 or (i - j) % 4 == 0 for i in range(16) for j in range(16)),
        sum(abs(i - j) <= 2 or i % 4 == 0 or j % 4 == 0 for i in range(16) for j in range(16)),
    ]
    assert [row[0] for row in cells(work, "also")] == other


def test_schedule_matches_formula():
    work = solve("schedule")
    steps = [int(name.replace(",", "")) for name in work.step("rate").grid.rows]
    for step, (rate,) in zip(steps, cells(work, "rate"), strict=True):
        expected = 0.001 * step / 4000 if step <= 4000 else 0.0005 * (1 + math.cos(math.pi * (step - 4000) / 96000))
        assert rate == pytest.approx(expected, abs=1e-18)
    assert text(work.step("rate").grid.cells[steps.index(28000)][0]) == "√2/4000 + 1/2000"


def test_cnn_digits_matches_torch():
    work = solve("cnn-digits")
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 5),
        torch.nn.AvgPool2d(4, 4),
        torch.nn.Conv2d(8, 16, 4, padding=1),
        torch.nn.AvgPool2d(2, 2),
        torch.nn.Flatten(),
        torch.nn.Linear(144, 10),
    )
    assert network(torch.zeros(1, 1, 32, 32)).shape == (1, 10)
    assert first_cell(work, "total") == sum(p.numel() for p in network.parameters())
    assert [row[0] for row in cells(work, "weights")] == [208, 0, 2064, 0, 0, 1450]


def test_receptive_field_that_includes_padding_adds_remark():
    """By gradient an output of the network for digits sees all 32 rows; the field, 40, is that of the padded input."""
    work = solve("cnn-digits")
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 5),
        torch.nn.AvgPool2d(4, 4),
        torch.nn.Conv2d(8, 16, 4, padding=1),
        torch.nn.AvgPool2d(2, 2),
        torch.nn.Flatten(),
        torch.nn.Linear(144, 10),
    )
    x = torch.zeros(1, 1, 32, 32, requires_grad=True)
    network(x)[0, 0].backward()
    assert int((x.grad[0, 0] != 0).any(1).sum()) == 32 < cells(work, "field")[-1][0]
    assert any("include zeros of the padding" in remark for remark in work.remarks)
    assert not solve("convolution-128").remarks


def test_convolution_receptive_field_matches_gradient():
    """One output's gradient reaches exactly the inputs that the sheet says."""
    work = solve_text(
        'kind = "convolution"\ninput = [1, 61, 59]\n'
        '[[layer]]\ntype = "convolution"\nfilters = 2\nkernel = [3, 5]\nstride = [1, 3]\n'
        '[[layer]]\ntype = "max-pool"\nkernel = 2\nstride = 2\n'
        '[[layer]]\ntype = "convolution"\nfilters = 3\nkernel = [4, 2]\nbias = false\n'
    )
    x = torch.zeros(1, 1, 61, 59, requires_grad=True)
    y = torch.nn.functional.conv2d(x, torch.ones(2, 1, 3, 5), stride=(1, 3))
    y = torch.nn.functional.avg_pool2d(y, 2, 2)  # reaches what max pooling may choose from
    y = torch.nn.functional.conv2d(y, torch.ones(3, 2, 4, 2))
    y[0, 0, 3, 2].backward()
    reached = x.grad[0, 0] != 0
    assert cells(work, "field")[-1] == [int(reached.any(1).sum()), int(reached.any(0).sum())]
    assert cells(work, "shapes")[-1] == list(y.shape[1:])
    assert cells(work, "weights")[-1] == [3 * 4 * 2 * 2]


def test_linear_layer_after_1x1_map_is_solved():
    work = solve_text(
        'kind = "convolution"\ninput = [3, 4, 5]\n[[layer]]\ntype = "max-pool"\nkernel = [4, 5]\nstride = 1\n'
        '[[layer]]\ntype = "linear"\noutputs = 7\n[[layer]]\ntype = "linear"\noutputs = 2\n'
    )
    assert cells(work, "shapes")[1:] == [[3, 1, 1], [7, 1, 1], [2, 1, 1]]
    assert cells(work, "weights") == [[0], [28], [16]]
    assert all(check.difference == 0 for check in work.checks)


def test_convolution_128_has_expected_shape():
    assert cells(solve("convolution-128"), "shapes")[-1] == [1, 126, 42]


@pytest.mark.parametrize(("name", "tokens"), [("attention-1000-512", 1000), ("eight-heads", 37)])
def test_cost_matches_cost_model(name, tokens):
    work = solve(name)
    prediction = predict(AttentionSizes(512, 1 if tokens == 1000 else 8, bias=False), tokens=tokens)
    from clearhead.course.exercises.numbers import N

    def number(key):
        return int(work.step(key).grid.cells[0][0].subs(N, tokens))

    assert number("parameters_total") == prediction.parameters.value == 1_048_576
    assert number("operations_total") == prediction.forward.value
    assert number("weights_bytes") == 4 * tokens**2 * (1 if tokens == 1000 else 8)


def test_cost_with_biases_and_without_output_projection():
    work = solve_text('kind = "cost"\nd_model = 21\nheads = 7\ntokens = 5\nbias = true\noutput = false\n')
    layer = torch.nn.Linear(21, 21)
    assert first_cell(work, "parameters_total") == 3 * sum(p.numel() for p in layer.parameters())
    assert work.agrees


def test_receptive_field_matches_path_enumeration():
    work = solve("receptive-field")
    # All paths of n choices among "stay" and k heads; each head attends to a fixed distance in each layer.
    for k, row in zip((1, 2, 3), cells(work, "sizes"), strict=False):
        reached = {0}
        for layer, size in enumerate(row):
            reached = {position - head * (k + 1) ** layer for position in reached for head in range(k + 1)}
            assert size == len(reached)
    assert cells(work, "capped")[-1] == [9, 81, 729, 1000, 1000]


def test_readings_of_a_mask_have_names_in_words():
    rows = solve("sparse-16").step("also").grid.rows
    assert rows == ("tokens 3, 7, 11, …", "distances 0, 4, 8, …", "tokens 0, 4, 8, …, which attend to all")
    assert reading_in_words("causal() | every(4)") == "causal() | every(4)"
    for seed in range(4):
        step = int(re.search(r"multiple of (\d+)", solve(variant("sparse-16", seed)).question)[1])
        fourth = solve(variant("sparse-16", seed)).step("also").grid.rows[0]
        assert fourth == f"tokens {step - 1}, {2 * step - 1}, {3 * step - 1}, …"
