"""Computed values in the answers to the deep learning final, against closed forms and a separate calculation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clearhead.course.answers.computed import deep_learning_final as final

TOKENS = "DAA<AD>"  # < and > are the start and stop symbols
EMBEDDINGS = np.array([[*row, 0, 0] for row in np.eye(4)]).T  # six symbols: A, B, C, D, start, stop


def logits(projection: np.ndarray, n_heads: int = 1) -> np.ndarray:
    """Return the logits of the sorting decoder, row by row, with zero-temperature attention."""
    x = EMBEDDINGS[["ABCD<>".index(token) for token in TOKENS]]
    q = x @ np.array([[0, 3], [1, 2], [2, 1], [3, 0]])
    outputs = []
    for i in range(len(TOKENS)):
        scores = q[: i + 1] @ q[i]
        outputs.append(np.tile(q[: i + 1][scores == scores.max()].mean(0), n_heads))
    return np.array(outputs) @ projection @ EMBEDDINGS.T


def loss(rows: np.ndarray, first: int) -> float:
    """Return the cross-entropy of A, D, stop, read from three rows."""
    probabilities = np.exp(rows) / np.exp(rows).sum(1, keepdims=True)
    return -sum(math.log(probabilities[first - 1 + i]["ABCD<>".index(token)]) for i, token in enumerate("AD>"))


ONE_HEAD = np.array([[0, 1, 0, 1], [1, 0, 1, 0]])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (final.loss_shifted, loss(logits(ONE_HEAD), 4)),
        (final.loss_own, loss(logits(ONE_HEAD), 5)),
        (final.mean_loss_shifted, loss(logits(ONE_HEAD), 4) / 3),
        (final.loss_two_heads, loss(logits(np.eye(4), 2), 4)),
        (final.loss_two_heads_own, loss(logits(np.eye(4), 2), 5)),
        (final.uniform_loss, math.log(6)),
    ],
)
def test_losses_equal_those_of_a_separate_decoder(value, expected):
    assert value() == f"{expected:.4f}"


def test_probabilities_give_the_loss():
    product = math.prod(float(value()) for value in (final.p_a, final.p_d, final.p_stop))
    assert -math.log(product) == pytest.approx(float(final.loss_shifted()), abs=1e-3)


def test_temperature_weights_sum_to_one_and_flatten():
    rows = [row[1:] for row in final.temperature_weights().rows]
    assert all(sum(row) == pytest.approx(1) for row in rows)
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True)
    at_one = next(row for row in final.temperature_weights().rows if row[0] == "1")
    assert at_one[1] / at_one[2] == pytest.approx(math.e)


def test_float32_zeros_counts_underflow():
    smallest = 2.0**-149
    assert final.float32_zeros() == sum(math.exp(-100 * gap) < smallest for gap in (0, 1, 2, 3))


def test_penalty_gradient_equals_first_option_only():
    table = final.penalty_options()
    assert [row[2] for row in table.rows] == ["yes", "yes", "no", "no", "no"]
    assert table.rows[0][1] == f"(0, −{0.7 * 1.5:g}, 0)"  # λ times the entry of largest size


def test_convolution_counts_equal_formulas():
    assert (final.conv_rows(), final.conv_columns()) == ((128 - 3) // 1 + 1, (128 - 5) // 3 + 1)
    assert final.conv1_weights() == 8 * (5 * 5 + 1)
    assert final.conv2_weights() == 16 * (4 * 4 * 8 + 1)
    assert final.flattened() == 3 * 3 * 16
    assert final.head_parameters() == 10 * (144 + 1)
    assert final.pointwise_parameters() == 10 * (16 + 1)
    assert "1x144 and 120x10" in final.mismatch_message()
    assert final.pooled_share() == "1/16"


def test_receptive_field_grows_by_the_stride_of_the_pooling():
    assert final.field_without_pooling() == 1 + (5 - 1) + (4 - 1)
    assert final.field_with_pooling() == 1 + (5 - 1) + (4 - 1) + (4 - 1) * 4


def test_pooling_patches_show_value_and_gradient():
    first, _, signed = final.pooling_patches().rows
    assert first == ["(0, 0, 0, 8)", "8", "(0, 0, 0, 1)", "2", "(0.25, 0.25, 0.25, 0.25)"]
    assert signed[1] == "1"  # not −8, the value of largest size


def test_minibatch_tradeoffs_scale_with_the_batch():
    rows = final.minibatch_tradeoffs().rows
    for size, _, work, stored, _ in rows:
        assert work == size * 30  # 5 · 3 multiply-adds forward and for the weights
        assert stored == size * 8  # 5 inputs and 3 outputs of tanh
    # E x² settles at η / (b (2 − η)): above 1/10 for b = 1, below it for b = 4.
    assert [row[4] for row in rows][:2] == ["never", "3"]


def test_activation_slopes_equal_derivatives():
    for label, sigmoid, tanh, relu in final.activation_slopes().rows:
        x = float(label.replace("−", "-"))
        assert sigmoid == pytest.approx(math.exp(-x) / (1 + math.exp(-x)) ** 2)
        assert tanh == pytest.approx(1 / math.cosh(x) ** 2)
        assert relu == (x > 0)
    assert final.sigmoid_ten_layers() == pytest.approx(2.0**-20)


def test_value_gradient_norm_is_that_of_linear_values():
    """The gradient is Xᵀ Pᵀ (p − one-hot) E W_Oᵀ over rows 4 to 6."""
    x = EMBEDDINGS[["ABCD<>".index(token) for token in TOKENS]]
    q = x @ np.array([[0, 3], [1, 2], [2, 1], [3, 0]])
    rows = logits(ONE_HEAD)
    gradient = np.zeros((4, 2))
    for row, target in zip((3, 4, 5), "AD>", strict=True):
        p = np.exp(rows[row]) / np.exp(rows[row]).sum()
        p["ABCD<>".index(target)] -= 1
        scores = q[: row + 1] @ q[row]
        ties = (scores == scores.max()) / (scores == scores.max()).sum()
        gradient += np.outer(x[: row + 1].T @ ties, p @ EMBEDDINGS @ ONE_HEAD.T)
    assert final.value_gradient_norm() == f"{np.linalg.norm(gradient):.4f}"


def test_remaining_values():
    assert final.equal_scores_weights() == "(1/4, 1/4, 1/4, 1/4)"
    assert final.printed_row_sum() == "8/7"
    assert (final.penalty_weights(), final.penalty_features()) == ("(0.3, −1.5, 0.2)", "(1, 0.5, 2)")
    assert final.penalty_lambda() == 0.7
