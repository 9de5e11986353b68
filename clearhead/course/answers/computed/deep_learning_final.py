"""Values and tables in the answers to the deep learning final exam of January 2025."""

from __future__ import annotations

from fractions import Fraction

import sympy as sp
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from clearhead.attention import HardMax
from clearhead.course.answers.content import AnswerTable, format_vector
from clearhead.course.claims import convnet, dedup_decoder, exact
from clearhead.course.claims.numerics import n_parameters, saved_tensors
from clearhead.course.claims.training import PATIENCE, iterations_until
from clearhead.models.baselines.convnet import conv_output

# ---------------------------------------------------------------------- Part 1, Q1: softmax at a temperature

SCORES = (4, 3, 2, 1)


def equal_scores_weights() -> str:
    """Return the weights of four equal scores, for any a and any T > 0."""
    a = sp.symbols("a", real=True)
    temperature = sp.symbols("T", positive=True)
    return exact.show(exact.softmax([a] * 4, temperature))


def temperature_weights() -> AnswerTable:
    """Return the weights of the scores of the third statement at several temperatures."""
    rows: list[list[str | float]] = []
    for temperature in (0.1, 0.5, 1.0, 2.0, 10.0, 100.0):
        weights = (torch.tensor(SCORES, dtype=torch.float64) / temperature).softmax(0)
        rows.append([f"{temperature:g}", *weights.tolist()])
    header = ["T", *(f"weight of {score}" for score in SCORES)]
    return AnswerTable(header, rows, f"softmax(z/T) of z = {SCORES}: from the largest score alone to uniform weights.")


def float32_zeros() -> int:
    """Return how many weights are exactly zero in float32 at T = 0.01."""
    return int((torch.tensor(SCORES, dtype=torch.float32) / 0.01).softmax(0).eq(0).sum())


# ---------------------------------------------------------------------- Part 1, Q3: the penalty

_WEIGHTS, _FEATURES, _LAMBDA = (0.3, -1.5, 0.2), (1.0, 0.5, 2.0), 0.7


def penalty_weights() -> str:
    """Return the weights of the example."""
    return format_vector(_WEIGHTS)


def penalty_features() -> str:
    """Return the features of the example; the largest is not where the largest weight is."""
    return format_vector(_FEATURES)


def penalty_lambda() -> float:
    """Return λ of the example."""
    return _LAMBDA


def penalty_options() -> AnswerTable:
    """Return the gradient of the penalty by autograd, compared with the four options."""
    w = torch.tensor(_WEIGHTS, dtype=torch.float64, requires_grad=True)
    (_LAMBDA / 2 * w.abs().max() ** 2).backward()
    assert w.grad is not None
    unit = torch.eye(len(_WEIGHTS), dtype=torch.float64)
    largest_weight = unit[max(range(3), key=lambda i: abs(_WEIGHTS[i]))]
    largest_feature = unit[max(range(3), key=lambda i: abs(_FEATURES[i]))]
    v = w.detach()
    gradients = {
        "automatic differentiation": w.grad,
        "first: λ w ⊙ e_k, k from |w|": _LAMBDA * v * largest_weight,
        "second: λ w ⊙ e_k, k from |x|": _LAMBDA * v * largest_feature,
        "third: λ e_k, k from |w|": _LAMBDA * largest_weight,
        "fourth: λ e_k, k from |x|": _LAMBDA * largest_feature,
    }
    rows = [[name, format_vector(g), "yes" if torch.allclose(g, w.grad) else "no"] for name, g in gradients.items()]
    return AnswerTable(["gradient of the penalty", "value", "equal"], rows)


# ---------------------------------------------------------------------- Part 1, Q4


def _output_size(size: int, kernel: int, stride: int) -> int:
    output = conv_output(size, kernel, stride)
    assert isinstance(output, int)
    return output


def conv_rows() -> int:
    """Return the output size along the first dimension."""
    return _output_size(128, 3, 1)


def conv_columns() -> int:
    """Return the output size along the second dimension."""
    return _output_size(128, 5, 3)


# ---------------------------------------------------------------------- Part 2


def minibatch_tradeoffs() -> AnswerTable:
    """Return noise, work, memory and iterations by minibatch size."""
    rows: list[list[str | int | float]] = []
    for size in (1, 4, 16, 64):
        work, n_stored = _update_cost(size)
        n_iterations = iterations_until(Fraction(1, 10), Fraction(1, 2), size)
        iterations = "never" if n_iterations == PATIENCE else str(n_iterations)
        rows.append([size, f"1/{size}" if size > 1 else "1", work, n_stored, iterations])
    header = ["b", "Var g / σ²", "multiply-adds", "values stored", "updates until E x² < 1/10"]
    caption = (
        "Work and memory of one update of a linear layer (5 → 3), counted while it runs; updates of gradient descent "
        "on x²/2 from x = 1 with η = 1/2 and gradient noise of variance 1/b."
    )
    return AnswerTable(header, rows, caption)


def _update_cost(batch: int) -> tuple[int, int]:
    """Return the multiply-adds of one update, and the number of values stored for its backward pass."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh())
    with FlopCounterMode(display=False) as counter, saved_tensors() as tensors:
        model(torch.ones(batch, 5)).sum().backward()
    return counter.get_total_flops() // 2, sum(tensor.numel() for tensor in tensors)


def sigmoid_ten_layers() -> float:
    """Return the largest product of ten slopes of the sigmoid."""
    return 0.25**10


def activation_slopes() -> AnswerTable:
    """Return the slopes of three activations at several inputs."""
    x = torch.tensor([-10.0, -5.0, -2.0, 0.5, 2.0, 5.0, 10.0], dtype=torch.float64, requires_grad=True)
    slopes = [torch.autograd.grad(f(x).sum(), x)[0].tolist() for f in (torch.sigmoid, torch.tanh, torch.relu)]
    rows = [[format_vector([place])[1:-1], a, b, c] for place, a, b, c in zip(x.tolist(), *slopes, strict=True)]
    return AnswerTable(["x", "slope of the sigmoid", "slope of tanh", "slope of ReLU"], rows)


# ---------------------------------------------------------------------- Part 3, Problem 1


def field_with_pooling() -> int:
    """Return the side of the receptive field of a unit after Conv-2, with AvgPool-1."""
    return convnet.field_after_conv2(4)


def field_without_pooling() -> int:
    """Return the same without AvgPool-1."""
    return convnet.field_after_conv2(1)


def pooled_share() -> str:
    """Return the share of values that AvgPool-1 leaves."""
    share = sp.Rational(_output_size(28, 4, 4) ** 2, 28**2)
    return str(share)


def pooling_patches() -> AnswerTable:
    """Return maximum, mean and gradients of four patches."""
    rows = []
    for patch in ([0.0, 0.0, 0.0, 8.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 0.0, -8.0]):
        outputs = []
        for pool in (nn.MaxPool1d(4), nn.AvgPool1d(4)):
            x = torch.tensor([[patch]], requires_grad=True)
            y = pool(x)
            gradient = torch.autograd.grad(y.sum(), x)[0].flatten().tolist()
            outputs += [f"{y.item():g}".replace("-", "−"), format_vector(gradient)]
        rows.append([format_vector(patch), *outputs])
    return AnswerTable(["patch", "maximum", "its gradient", "mean", "its gradient"], rows)


def conv1_weights() -> int:
    """Return the trainable weights of Conv-1."""
    return n_parameters(convnet.network(144)[0])


def conv2_weights() -> int:
    """Return the trainable weights of Conv-2."""
    return n_parameters(convnet.network(144)[3])


def flattened() -> int:
    """Return the width of the flattened map of a 32 × 32 image."""
    return int(convnet.network(144)[:7](torch.zeros(1, 1, 32, 32)).shape[1])


def mismatch_message() -> str:
    """Return the error of the network with the printed 120 inputs of the linear layer."""
    try:
        convnet.network(120)(torch.zeros(1, 1, 32, 32))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    raise AssertionError("the network with 120 inputs ran")


def head_parameters() -> int:
    """Return the parameters of the linear layer, equal to those of the 3 × 3 convolution."""
    linear, conv = n_parameters(nn.Linear(144, 10)), n_parameters(nn.Conv2d(16, 10, 3))
    assert linear == conv
    return conv


def pointwise_parameters() -> int:
    """Return the parameters of the 1 × 1 convolution."""
    return n_parameters(nn.Conv2d(16, 10, 1))


# ---------------------------------------------------------------------- Part 3, Problem 2


def printed_row_sum() -> str:
    """Return the sum of the last printed row of the attention matrix, with eight entries."""
    return str(8 * sp.Rational(1, 7))


def loss_shifted() -> str:
    """Return the loss by teacher forcing: rows 4, 5 and 6."""
    return _four_digits(dedup_decoder.loss(dedup_decoder.logits(), 4))


def loss_own() -> str:
    """Return the loss from rows 5, 6 and 7, as printed."""
    return _four_digits(dedup_decoder.loss(dedup_decoder.logits(), 5))


def mean_loss_shifted() -> str:
    """Return the loss by teacher forcing per token."""
    return _four_digits(dedup_decoder.loss(dedup_decoder.logits(), 4) / 3)


def uniform_loss() -> str:
    """Return the loss per token of a uniform distribution over the vocabulary."""
    return _four_digits(sp.log(len(dedup_decoder.NAMES)))


def loss_two_heads() -> str:
    """Return the loss by teacher forcing with two heads and the identity."""
    return _four_digits(dedup_decoder.loss(_two_head_logits(), 4))


def loss_two_heads_own() -> str:
    """Return the same from rows 5, 6 and 7."""
    return _four_digits(dedup_decoder.loss(_two_head_logits(), 5))


def p_a() -> str:
    """Return the probability of A in the row of <START>."""
    return _probability(4, "A")


def p_d() -> str:
    """Return the probability of D in the row of A."""
    return _probability(5, "D")


def p_stop() -> str:
    """Return the probability of <STOP> in the row of D."""
    return _probability(6, "<STOP>")


def value_gradient_norm() -> str:
    """Return the norm of the gradient of W_V with argmax attention, by teacher forcing."""
    return f"{dedup_decoder.gradients(HardMax(), 4)['W_V'].norm().item():.4f}"


def _two_head_logits() -> exact.Matrix:
    return dedup_decoder.logits(exact.eye(4), heads=2)


def _probability(row: int, name: str) -> str:
    weights = exact.softmax(dedup_decoder.logits()[row - 1])
    return f"{float(weights[dedup_decoder.NAMES.index(name)]):.4g}"


def _four_digits(value: sp.Expr) -> str:
    return f"{float(value):.4f}"
