"""Self-attention that copies, permutes or convolves: when its weights can be an identity, a permutation, a band."""

from __future__ import annotations

from fractions import Fraction

import torch

from clearhead.attention import attend
from clearhead.claims import exact
from clearhead.claims.figure import Grid
from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import ANSWERED, HOMEWORK


def hard_weights(q: list[list[int]], k: list[list[int]]) -> exact.Matrix:
    scores = exact.times(exact.matrix(q), exact.transposed(exact.matrix(k)))
    return [exact.hardest(row) for row in scores]


@claim(
    "identity-layer",
    HOMEWORK,
    "1.3c",
    "If every token is most similar to itself and β → ∞, A = I; with W_V and W_O composing to I the "
    "layer is the identity.",
    method="Orthogonal tokens, exact limit β → ∞.",
)
def identity_layer(t: Trial) -> None:
    c = [[2, 0, 0], [0, 1, 0], [0, 0, 3]]
    a = hard_weights(c, c)
    eye = exact.matrix([[int(i == j) for j in range(3)] for i in range(3)])
    t.case("three orthogonal tokens: A", exact.show(a), a == eye)
    out = exact.times(a, exact.matrix(c))
    t.case("output", exact.show(out), out == exact.matrix(c))


@claim(
    "permutation-layer",
    HOMEWORK,
    "1.3c",
    "If every query has its greatest similarity with one specific key, A is a permutation matrix.",
    method="Two queries, two keys, exact limit β → ∞: rows and columns of A counted.",
)
def permutation_layer(t: Trial) -> None:
    a = hard_weights([[1], [2]], [[1], [0]])
    columns = [sum(col, Fraction(0)) for col in zip(*a, strict=False)]
    t.case(
        "queries 1, 2 and keys 1, 0: A (rows are queries)",
        f"{exact.show(a)}, column sums {exact.show(columns)}",
        all(c == 1 for c in columns),
    )
    b = hard_weights([[1, 0], [0, 1]], [[0, 1], [1, 0]])
    good = [sum(col, Fraction(0)) for col in zip(*b, strict=False)] == [1, 1]
    t.instead(
        "The chosen keys also have to be different for different queries; otherwise a value is "
        "copied twice and another lost.",
        good,
    )


@claim(
    "selected-value",
    HOMEWORK,
    "1.3c, example",
    "If the weight of key 2 for query 1 is 1 and all others of that query are 0, then h₁ = v₂.",
    method="Column 1 of V·A in fractions, with the homework's columns as queries.",
)
def selected_value(t: Trial) -> None:
    v = exact.matrix([[1, 4, 7], [2, 5, 8]])
    a = exact.matrix([[0, 1, 0], [1, 0, 0], [0, 0, 1]])
    h = exact.times(v, a)
    first, second = [row[0] for row in h], [row[1] for row in v]
    t.case("h₁ and v₂", f"{exact.show(first)} and {exact.show(second)}", first == second)


@claim(
    "attention-as-convolution",
    HOMEWORK,
    "1.3d, example",
    "With weights (¼, ½, ¼) on positions i − 1, i, i + 1 attention is a convolution with a kernel of size 3.",
    method="`attend` with a bias ln(kernel) on the distance against conv1d, positions 1 … 9.",
    when="the position is not at an edge, and the kernel is non-negative and sums to 1",
)
def attention_as_convolution(t: Trial) -> None:
    n, kernel = 9, torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    near = distance.abs() <= 1
    bias = torch.where(near, kernel[(distance + 1).clamp(0, 2)].log(), -torch.inf)
    v = torch.randn(1, 1, n, 2, generator=t.generator, dtype=torch.float64)
    q = torch.zeros(1, 1, n, 3, dtype=torch.float64)
    out = attend(q, q, v, bias=bias, impl="reference")[0, 0]
    conv = torch.nn.functional.conv1d(v[0, 0].T[:, None], kernel[None, None], padding=1)[:, 0].T
    gaps = (out - conv).abs().amax(1)
    t.case("positions 2 … 8", f"largest difference {gaps[1:-1].max():.1e}", gaps[1:-1].max() < 1e-12)
    t.case(
        "position 1",
        f"difference {gaps[0]:.3f}: its two weights are 2/3 and 1/3",
        gaps[0] < 1e-12,
        inside=False,
    )
    edge = (-1, 2, 0)  # sums to 1, as weights do, and finds edges
    t.case(
        f"kernel {edge}",
        f"needs a weight of {min(edge)}, and a softmax gives none below 0",
        min(edge) >= 0,
        inside=False,
    )
    t.draw(
        Grid(
            "Weights of a convolution by attention", bias.exp().div(bias.exp().sum(1, keepdim=True)).tolist()
        )
    )


@claim(
    "cats-to-mask",
    ANSWERED,
    "Q2c, head 1",
    "To predict the verb at [MASK], a head has high attention from 'cats' to [MASK].",
    method="One layer, rows are queries: does the prediction at [MASK] depend on the row of 'cats' "
    "or on that of [MASK]?",
)
def cats_to_mask(t: Trial) -> None:
    v = exact.matrix([[1, 0], [0, 1], [0, 0], [2, 2]])  # The, cats, [MASK], running
    flat = [exact.weights([0, 0, 0, 0]) for _ in range(4)]
    from_cats = [row[:] for row in flat]
    from_cats[1] = exact.matrix([[0, 0, 1, 0]])[0]  # 'cats' attends to [MASK]
    from_mask = [row[:] for row in flat]
    from_mask[2] = exact.matrix([[0, 1, 0, 0]])[0]  # [MASK] attends to 'cats'
    base = exact.times(flat, v)[2]
    one, other = exact.times(from_cats, v)[2], exact.times(from_mask, v)[2]
    t.case(
        "output at [MASK] once 'cats' attends to it", f"{exact.show(base)} → {exact.show(one)}", one != base
    )
    t.instead(
        "What reaches [MASK] is decided by its own query: the attention has to go from [MASK] to 'cats'.",
        other != base and other == v[1],
    )
