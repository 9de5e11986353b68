"""Sparse patterns and other kinds of scores: what they save, and what they change."""

from __future__ import annotations

import torch

from clearhead.attention import Additive, Dot
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import MatrixFigure
from clearhead.course.claims.numerics import join_numbers, max_abs_diff, n_parameters
from clearhead.course.claims.registry import EXAM, claim
from clearhead.masks import every, full, window


@claim(
    EXAM,
    "Q6a",
    statement=(
        "Sparse patterns can reduce the cost of attention; asked for is one of itself, two tokens before and "
        "after, and every fourth token, at n = 16."
    ),
    method=(
        "The pattern counted at n = 16, by enumeration and by the mask's own count; then as n grows, with and "
        "without every fourth token."
    ),
)
def sparse_saves(t: Experiment) -> None:
    pattern = window(2, 2) | every(4)
    by_hand = sum(abs(i - j) <= 2 or j % 4 == 0 for i in range(16) for j in range(16))
    result_text = f"{by_hand} of 256, saving {1 - by_hand / 256:.1%}"
    t.record_case("pairs at n = 16", result_text, by_hand == pattern.count(16) and by_hand < 256)
    sizes = (16, 256, 4096, 65536)
    densities, local = ([p.count(m) / m for m in sizes] for p in (pattern, window(2, 2)))
    t.record_case("the window alone, pairs a token at n = 16 … 65,536", join_numbers(local, ".2f"), max(local) < 5)
    saved = "the whole pattern saves pairs and stays O(n²), for every fourth token is a quarter of all"
    t.note(f"{saved}: {join_numbers(densities, '.1f')} pairs a token")
    t.draw(MatrixFigure("The pattern at n = 16 (rows are queries)", pattern.dense(16).float().tolist()))


@claim(
    EXAM,
    "Q6b",
    statement="There is a trade-off between full attention and local windows.",
    method="Pairs and reach (farthest input after L layers) of a window of ±2 against full attention, 64 tokens.",
    is_asserted=False,
)
def local_windows(t: Experiment) -> None:
    local = window(2, 2).count(64)
    all_pairs = full().count(64)
    t.record_case("pairs", f"{local} against {all_pairs}", local < all_pairs)
    step = window(2, 2).dense(64).double()
    reach = [int((torch.linalg.matrix_power(step, layers)[0] > 0).sum()) for layers in (1, 2, 4, 8)]
    t.assert_equal("tokens that reach the first after 1, 2, 4, 8 layers", reach, [3, 5, 9, 17])


@claim(
    EXAM,
    "Q6b",
    statement="There is a trade-off between additive and multiplicative attention, in cost and in expressiveness.",
    method=(
        "Dot is linear in the query, Additive is not (score of 2q against twice the score of q); parameters counted."
    ),
    is_asserted=False,
)
def additive_multiplicative(t: Experiment) -> None:
    q, k = (t.normal(1, 1, m, 7) for m in (3, 5))
    additive = Additive(7, 7, 11).double()
    with torch.no_grad():
        linear, bent = (max_abs_diff(f(2 * q, k), 2 * f(q, k)) for f in (Dot(), additive))
    t.assert_below("score(2q) − 2 score(q): dot", linear, 1e-12)
    t.assert_above("the same: additive", bent, 1e-3, "{:.2f}")
    # A dot product has one multiply-add a width; the additive score one, and a tanh, for each hidden unit, and weights.
    t.assert_above("parameters of the score: dot, additive", n_parameters(additive), 0, "0, {}")
