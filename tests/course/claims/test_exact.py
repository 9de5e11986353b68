"""The exact helpers against torch and against closed forms."""

from __future__ import annotations

import math
from fractions import Fraction

import sympy as sp
import torch

from clearhead.attention import Dot, Softmax, attend
from clearhead.course.claims import exact
from clearhead.masks import causal


def test_exact_attention_equals_attention_with_beta_ln_2():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randint(-3, 4, (5, width), generator=g) for width in (2, 2, 3))
    for masked in (False, True):
        output = exact.attention(*(exact.matrix(x.tolist()) for x in (q, k, v)), causal=masked)
        a, b, c = (x.double()[None, None] for x in (q, k, v))
        expected = attend(
            a, b, c, causal() if masked else None, scores=Dot(), normalizer=Softmax(temperature=1 / math.log(2))
        )
        actual = torch.tensor([[float(x) for x in row] for row in output], dtype=torch.float64)
        torch.testing.assert_close(actual, expected[0, 0], rtol=1e-12, atol=1e-12)


def test_hardest_shares_ties():
    assert exact.hardest([5, -2, 5, -sp.oo]) == [Fraction(1, 2), 0, Fraction(1, 2), 0]


def test_expectation_of_normal_powers():
    x, y = sp.symbols("x y")
    normal = (1, 0, 1, 0, 3)
    assert exact.expectation((x * y) ** 2 + x**4 - 7 * x * y, (x, y), normal) == 4


def test_simplex_counts():
    points = exact.simplex(4, 12)
    assert len(points) == len(set(points)) == math.comb(15, 3)
    assert all(sum(p) == 1 for p in points)


def test_probability_of_no_winner_matches_enumeration():
    from itertools import product

    from clearhead.course.claims.scores_and_scaling import chance_of_no_winner

    signs = list(product((-1, 1), repeat=2))
    gaps = [sum(a * (b - c) for a, b, c in zip(q, k, l, strict=True)) for q in signs for k in signs for l in signs]
    expected = Fraction(sum(abs(x) <= math.log(99) for x in gaps), len(gaps))
    assert chance_of_no_winner(2, 99) == expected


def test_readable_formats_formulas():
    from clearhead.course.claims.experiment import readable

    n, d = sp.symbols("n d")
    assert readable(str(2 * n * d**2 + sp.sqrt(2))) == "2·d²·n + √2"
    assert readable(str(sp.oo)) == "∞"
    assert readable("along w* = (0, 1), too") == "along w* = (0, 1), too"
