"""Problem 1.1: attention with columns as queries, S = KᵀQ; the softmax acts on each column."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.course.answers.content import AnswerTable, format_vector

KEYS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)  # d × m
QUERIES = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)  # d × n
VALUES = torch.tensor([[2.0, 0.0, 1.0], [0.0, 2.0, 1.0]], dtype=torch.float64)  # t × m


def _weights(scores: Tensor, beta: float = 1.0) -> Tensor:
    return (beta * scores).softmax(0)


def example_inputs() -> str:
    """Return the keys, queries and values of the example."""
    names = {"keys": KEYS, "queries": QUERIES, "values": VALUES}
    return "; ".join(f"{name} {', '.join(map(format_vector, matrix.T))}" for name, matrix in names.items())


def example_scores() -> str:
    """Return S = KᵀQ of the example, row by row."""
    return _rows(KEYS.T @ QUERIES, "g")


def example_weights() -> str:
    """Return the weights of the example, row by row."""
    return _rows(_weights(KEYS.T @ QUERIES), ".3f")


def example_output() -> str:
    """Return H = VA of the example, row by row."""
    return _rows(VALUES @ _weights(KEYS.T @ QUERIES), ".3f")


def _rows(matrix: Tensor, form: str) -> str:
    return "; ".join(", ".join(format(x, form) for x in row) for row in matrix.tolist())


BETAS = (0.0, 0.5, 1.0, 2.0, 8.0)
SCORES = (4.0, 3.0, 1.0)


def weights_by_beta() -> AnswerTable:
    """Return the weights and the entropy of three scores for several β."""
    rows: list[list[str | float]] = []
    for beta in BETAS:
        weights = _weights(torch.tensor(SCORES, dtype=torch.float64), beta)
        entropy = -(weights * weights.log()).nansum().item()
        rows.append([f"{beta:g}", *(f"{weight:.4f}" for weight in weights), f"{abs(entropy):.4f}"])
    header = ["β", *(f"weight of score {score:g}" for score in SCORES), "entropy (nats)"]
    return AnswerTable(header, rows, f"Uniform weights have an entropy of ln 3 = {math.log(3):.4f}.")


GAP, N_KEYS, TARGETS = 1.0, 5, (0.5, 0.9, 0.99, 0.999)


def beta_for_weight() -> AnswerTable:
    """Return the β that gives the best of five keys a weight, if all other scores are lower by 1."""
    rows: list[list[str | float]] = []
    for target in TARGETS:
        beta = math.log((N_KEYS - 1) * target / (1 - target)) / GAP
        scores = torch.tensor([GAP, *[0.0] * (N_KEYS - 1)], dtype=torch.float64)
        rows.append([f"{target:g}", f"{beta:.3f}", f"{_weights(scores, beta)[0].item():.6f}"])
    caption = "Five keys; the best score is larger than the other four by g = 1."
    return AnswerTable(["wanted weight", "β = ln((m − 1)a/(1 − a))/g", "weight with this β"], rows, caption)


def uniformity_by_beta() -> AnswerTable:
    """Return the largest and smallest weight of three scores, with their bounds."""
    spread = max(SCORES) - min(SCORES)
    rows: list[list[str]] = []
    for beta in (1.0, 0.1, 0.01, 0.001):
        weights = _weights(torch.tensor(SCORES, dtype=torch.float64), beta)
        numbers = (weights.min(), weights.max(), math.exp(-beta * spread) / 3, math.exp(beta * spread) / 3)
        rows.append([f"{beta:g}", *(f"{float(number):.4f}" for number in numbers)])
    header = ["β", "smallest weight", "largest weight", "lower bound e^{−βΔ}/m", "upper bound e^{βΔ}/m"]
    return AnswerTable(header, rows, f"Scores 4, 3, 1: m = 3 and Δ = {spread:g}.")


def perturbed_key() -> AnswerTable:
    """Return the weights of one query before and after a step on its first key."""
    moved = KEYS.clone()
    moved[:, 0] += torch.tensor([0.1, 0.0])
    before, after = _weights(KEYS.T @ QUERIES), _weights(moved.T @ QUERIES)
    rows = [[f"a_{key + 1}1", f"{before[key, 0]:.4f}", f"{after[key, 0]:.4f}"] for key in range(3)]
    outputs_before, outputs_after = VALUES @ before, VALUES @ after
    predicted = outputs_before[:, 0] + 0.1 * QUERIES[0, 0] * before[0, 0] * (VALUES[:, 0] - outputs_before[:, 0])
    rows.append(["h_1", *(format_vector(outputs[:, 0], ".4f") for outputs in (outputs_before, outputs_after))])
    caption = f"The key k_1 moves by ε = (0.1, 0). To first order, h_1 becomes {format_vector(predicted, '.4f')}."
    return AnswerTable(["", "before", "after"], rows, caption)


def perturbed_query() -> AnswerTable:
    """Return the outputs before and after a step on the first query."""
    step = torch.tensor([0.1, 0.0], dtype=torch.float64)
    moved = QUERIES.clone()
    moved[:, 0] += step
    before, after = (_weights(KEYS.T @ queries) for queries in (QUERIES, moved))
    outputs_before, outputs_after = VALUES @ before, VALUES @ after
    centered = VALUES - outputs_before[:, :1]
    covariance = (before[:, 0] * centered) @ KEYS.T  # Σ a (v − h) kᵀ
    predicted = outputs_before[:, 0] + covariance @ step
    both = (outputs_before, outputs_after)
    rows = [[f"h_{j + 1}", *(format_vector(outputs[:, j], ".4f") for outputs in both)] for j in range(2)]
    caption = f"The query q_1 moves by ε = (0.1, 0). To first order, h_1 becomes {format_vector(predicted, '.4f')}."
    return AnswerTable(["", "before", "after"], rows, caption)


def scaled_key() -> AnswerTable:
    """Return the weight of a scaled key for scores of both signs."""
    factors = (1, 2, 5, 20)
    rows: list[list[str]] = []
    for score in (2.0, 0.5, 0.0, -1.0):
        scores = [torch.tensor([factor * score, 1.0, 0.0], dtype=torch.float64) for factor in factors]
        rows.append([f"{score:g}".replace("-", "−"), *(f"{_weights(s)[0].item():.4f}" for s in scores)])
    header = ["score of the key", *(f"α = {factor}" for factor in factors)]
    return AnswerTable(header, rows, "Weight of the key next to two other keys with scores 1 and 0; β = 1.")
