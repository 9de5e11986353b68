"""Self-attention that copies, permutes or convolves: when its weights can be an identity, a permutation, a band."""

from __future__ import annotations

from fractions import Fraction

import torch

from clearhead.attention import attend
from clearhead.claims import exact
from clearhead.claims.figure import Grid
from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import ANSWERED, HOMEWORK
from clearhead.masks import window


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
    when="different queries have different such keys; otherwise one value is copied twice and another is lost",
)
def permutation_layer(t: Trial) -> None:
    for queries, keys, apart in (([[1, 0], [0, 1]], [[0, 1], [1, 0]], True), ([[1], [2]], [[1], [0]], False)):
        a = hard_weights(queries, keys)
        columns = [sum(column, Fraction(0)) for column in zip(*a, strict=True)]
        t.case(
            f"queries {exact.show(queries)}, keys {exact.show(keys)}: A (rows are queries)",
            f"{exact.show(a)}, column sums {exact.show(columns)}",
            all(c == 1 for c in columns),
            inside=apart,
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
    method="`attend` with a bias ln(kernel) on the distance against `conv1d`, positions 1 … 9.",
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
    t.case("position 1", f"difference {gaps[0]:.3f}: its two weights are 2/3 and 1/3", gaps[0] < 1e-12, inside=False)
    edge = (-1, 2, 0)  # sums to 1, as weights do, and finds edges
    t.case(
        f"kernel {edge}",
        f"needs a weight of {min(edge)}, and a softmax gives none below 0",
        min(edge) >= 0,
        inside=False,
    )
    t.draw(Grid("Weights of a convolution by attention", bias.exp().div(bias.exp().sum(1, keepdim=True)).tolist()))


@claim(
    "band-width",
    HOMEWORK,
    "1.3d",
    "Weights that are not zero where |j − i| ≤ ⌊k/2⌋ form a band of width k.",
    method="The keys of a query in the middle of such a band, counted by `window`, k = 1 … 8.",
    when="k is odd; for an even k the band is k + 1 wide",
)
def band_width(t: Trial) -> None:
    for k in (1, 3, 5, 7, 2, 4, 6, 8):
        wide = int(window(k // 2, k // 2).dense(31)[15].sum())
        t.case(f"k = {k}", f"{wide} keys", wide == k, inside=k % 2 == 1)


@claim(
    "cats-to-mask",
    ANSWERED,
    "Q2c, head 1",
    "To predict the verb at [MASK], a head has high attention from 'cats' to [MASK].",
    method="One layer, rows are queries: does the prediction at [MASK] depend on the row of 'cats' "
    "or on that of [MASK]?",
    when="'from cats to [MASK]' is the way that information goes; the query that looks is the one at [MASK]",
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
        "the query at [MASK] looks at 'cats': output at [MASK]",
        f"{exact.show(base)} → {exact.show(other)}, the value of 'cats'",
        other != base and other == v[1],
    )
    t.case(
        "the query at 'cats' looks at [MASK]: output at [MASK]",
        f"{exact.show(base)} → {exact.show(one)}",
        one != base,
        inside=False,
    )


@claim(
    "weights-interpretable",
    HOMEWORK,
    "1.4b.5",
    "Attention weights show what the model looks at in its input when it makes an output.",
    method="What a token adds to the output is its weight times its value. Two tokens in fractions: weights against "
    "the share of the output that each is responsible for.",
    when="the values are of like size; a large weight on a value of zero adds nothing",
)
def weights_interpretable(t: Trial) -> None:
    a = exact.weights([3, 0])
    for values, alike in (((1, 1), True), ((0, 1), False)):
        parts = [w * v for w, v in zip(a, values, strict=True)]
        shares = [part / sum(parts) for part in parts]
        t.case(
            f"values {exact.show(values)}, weights {exact.show(a)}: shares of the output",
            exact.show(shares),
            (shares[0] > shares[1]) == (a[0] > a[1]),
            inside=alike,
        )


@claim(
    "dropout-diffuses",
    HOMEWORK,
    "1.1d, implementation",
    "Dropout on the attention weights encourages them to spread over several values.",
    method="With dropout p on the weights (and division by 1 − p) the expected squared error for an answer 1 is "
    "exactly (Σ a v − 1)² + p/(1 − p) · Σ a² v². All weights of 4 keys in twelfths, p = 1/10: which are best?",
)
def dropout_diffuses(t: Trial) -> None:
    p, points = Fraction(1, 10), exact.simplex(4, 12)
    alike = min(points, key=lambda a: dropout_error(a, (1, 1, 1, 1), p))
    t.case("four equal values: best weights", exact.show(alike), alike == (Fraction(1, 4),) * 4)
    hard = dropout_error((Fraction(1), Fraction(0), Fraction(0), Fraction(0)), (1, 1, 1, 1), p)
    t.note(f"expected error there {dropout_error(alike, (1, 1, 1, 1), p)}, with one key alone {hard}")
    one = min(points, key=lambda a: dropout_error(a, (1, 0, 0, 0), p))
    t.case("only the first carries the answer, the others 0: best weights", exact.show(one), one[0] < 1)
    alone = min(points, key=lambda a: dropout_error(a, (1, 0, 0, 0), Fraction(0)))
    t.note(f"without dropout the best weights there are {exact.show(alone)}")


def dropout_error(a: tuple[Fraction, ...], values: tuple[int, ...], p: Fraction) -> Fraction:
    """E (Σ m a v / (1 − p) − 1)² where each m is 0 with chance p: bias² + variance."""
    mean = sum((w * v for w, v in zip(a, values, strict=True)), Fraction(0))
    variance = p / (1 - p) * sum((w * w * v * v for w, v in zip(a, values, strict=True)), Fraction(0))
    return (mean - 1) ** 2 + variance


@claim(
    "combination-of-others",
    HOMEWORK,
    "1.4a.3 and 1.4b",
    "In self-attention what a position becomes is a weighted combination of all positions, itself included (as 1.4b "
    "says; 1.4a speaks of all others).",
    method="Every weight of 1, 2 and 3 equal tokens and of three different ones, in fractions.",
)
def combination_of_others(t: Trial) -> None:
    for tokens in ([[1, 0]], [[1, 0]] * 2, [[1, 0]] * 3, [[1, 0], [0, 1], [1, 1]]):
        x = exact.matrix(tokens)
        rows = [exact.weights(row) for row in exact.times(x, exact.transposed(x))]
        whole = all(min(row) > 0 and sum(row) == 1 for row in rows)
        t.case(f"tokens {exact.show(x)}: weights", exact.show(rows), whole)
    t.note("a token that is alone sees itself: there are no others")
