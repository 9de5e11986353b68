"""Self-attention that copies, permutes or convolves: when its weights can be an identity, a permutation, a band."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Grid
from clearhead.course.claims.numerics import single_head_attention
from clearhead.course.claims.registry import ANSWERED, HOMEWORK, claim
from clearhead.masks import window


@claim(
    HOMEWORK,
    "1.3c",
    statement=(
        "If every token is most similar to itself and β → ∞, A = I; with W_V and W_O composing to I the layer "
        "is the identity."
    ),
    method="Orthogonal tokens, exact limit β → ∞.",
)
def identity_layer(t: Experiment) -> None:
    c = exact.matrix("2 0 0; 0 1 0; 0 0 3")
    t.assert_equal(
        "three orthogonal tokens: A", exact.attention(c, c, exact.eye(3), by=exact.hardest), exact.eye(3), exact.show
    )
    t.assert_equal("output", exact.attention(c, c, c, by=exact.hardest), c, exact.show)


@claim(
    HOMEWORK,
    "1.3c",
    statement="If every query has its greatest similarity with one specific key, A is a permutation matrix.",
    method="Two queries, two keys, exact limit β → ∞: rows and columns of A counted.",
    condition="different queries have different such keys; otherwise one value is copied twice and another is lost",
)
def permutation_layer(t: Experiment) -> None:
    for queries, keys, is_distinct in (("1 0; 0 1", "0 1; 1 0", True), ("1; 2", "1; 0", False)):
        a = exact.attention(exact.matrix(queries), exact.matrix(keys), exact.eye(2), by=exact.hardest)
        columns = [sum(column) for column in zip(*a, strict=True)]
        case_name = f"queries [{queries}], keys [{keys}]: A (rows are queries)"
        t.record_case(
            case_name,
            f"{exact.show(a)}, column sums {exact.show(columns)}",
            all(c == 1 for c in columns),
            in_scope=is_distinct,
        )


@claim(
    HOMEWORK,
    "1.3c, example",
    statement="If the weight of key 2 for query 1 is 1 and all others of that query are 0, then h₁ = v₂.",
    method="Column 1 of V·A in fractions, with the homework's columns as queries.",
)
def selected_value(t: Experiment) -> None:
    v, a = exact.matrix("1 4 7; 2 5 8"), exact.matrix("0 1 0; 1 0 0; 0 0 1")
    first, second = [row[0] for row in exact.matmul(v, a)], [row[1] for row in v]
    t.record_case("h₁ and v₂", exact.pair(first, second), first == second)


@claim(
    HOMEWORK,
    "1.3d, example",
    statement=(
        "With weights (¼, ½, ¼) on positions i − 1, i, i + 1 attention is a convolution with a kernel of size 3."
    ),
    method="`attend` with a bias ln(kernel) on the distance against `conv1d`, positions 1 … 9.",
    condition="the position is not at an edge, and the kernel is non-negative and sums to 1",
)
def attention_as_convolution(t: Experiment) -> None:
    n, kernel = 9, torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    bias = torch.where(distance.abs() <= 1, kernel[(distance + 1).clamp(0, 2)].log(), -torch.inf)
    v, q = t.normal(n, 2), torch.zeros(n, 3, dtype=torch.float64)
    conv = torch.nn.functional.conv1d(v.T[:, None], kernel[None, None], padding=1)[:, 0].T
    gaps = (single_head_attention(q, q, v, bias=bias, impl="reference") - conv).abs().amax(1)
    t.assert_below("positions 2 … 8", gaps[1:-1].max(), 1e-12, "largest difference {:.1e}")
    t.record_case(
        "position 1", f"difference {gaps[0]:.3f}: its two weights are 2/3 and 1/3", gaps[0] < 1e-12, in_scope=False
    )
    edge = (-1, 2, 0)  # sums to 1, as weights do, and finds edges
    result_text = f"needs a weight of {min(edge)}, and a softmax gives none below 0"
    t.record_case(f"kernel {edge}", result_text, min(edge) >= 0, in_scope=False)
    t.draw(Grid("Weights of a convolution by attention", bias.softmax(1).tolist()))


@claim(
    HOMEWORK,
    "1.3d",
    statement="Weights that are not zero where |j − i| ≤ ⌊k/2⌋ form a band of width k.",
    method="The keys of a query in the middle of such a band, counted by `window`, k = 1 … 8.",
    condition="k is odd; for an even k the band is k + 1 wide",
)
def band_width(t: Experiment) -> None:
    for k in (1, 3, 5, 7, 2, 4, 6, 8):
        t.assert_equal(f"k = {k}", int(window(k // 2, k // 2).dense(31)[15].sum()), k, "{} keys", in_scope=k % 2 == 1)


@claim(
    ANSWERED,
    "Q2c, head 1",
    statement="To predict the verb at [MASK], a head has high attention from 'cats' to [MASK].",
    method=(
        "One layer, rows are queries: does the prediction at [MASK] depend on the row of 'cats' or on that of [MASK]?"
    ),
    condition="'from cats to [MASK]' is the way that information goes; the query that looks is the one at [MASK]",
)
def cats_to_mask(t: Experiment) -> None:
    v = exact.matrix("1 0; 0 1; 0 0; 2 2")  # The, cats, [MASK], running
    flat, to_mask, to_cats = exact.matrix("1/4 1/4 1/4 1/4; 0 0 1 0; 0 1 0 0")
    rows = [flat] * 4, [flat, to_mask, flat, flat], [flat, flat, to_cats, flat]
    base, cats_output, other = (exact.matmul(weights, v)[2] for weights in rows)
    result_text = f"{exact.pair(base, other, ' → ')}, the value of 'cats'"
    t.record_case("the query at [MASK] looks at 'cats': output at [MASK]", result_text, other != base and other == v[1])
    case_name = "the query at 'cats' looks at [MASK]: output at [MASK]"
    t.record_case(case_name, exact.pair(base, cats_output, " → "), cats_output != base, in_scope=False)


@claim(
    HOMEWORK,
    "1.4b.5",
    statement="Attention weights show what the model looks at in its input when it makes an output.",
    method=(
        "What a token adds to the output is its weight times its value. Two tokens in fractions: weights "
        "against the share of the output that each is responsible for."
    ),
    condition="the values are of like size; a large weight on a value of zero adds nothing",
)
def weights_interpretable(t: Experiment) -> None:
    a = exact.weights([3, 0])
    for values, is_equal in (((1, 1), True), ((0, 1), False)):
        parts = [w * v for w, v in zip(a, values, strict=True)]
        shares = [part / sum(parts) for part in parts]
        case_name = f"values {exact.show(values)}, weights {exact.show(a)}: shares of the output"
        t.record_case(case_name, exact.show(shares), (shares[0] > shares[1]) == (a[0] > a[1]), in_scope=is_equal)


@claim(
    HOMEWORK,
    "1.1d, implementation",
    statement="Dropout on the attention weights encourages them to spread over several values.",
    method=(
        "With dropout p on the weights (and division by 1 − p) the expected squared error for an answer 1 is "
        "exactly (Σ a v − 1)² + p/(1 − p) · Σ a² v². All weights of 4 keys in twelfths, p = 1/10: which are "
        "best?"
    ),
)
def dropout_diffuses(t: Experiment) -> None:
    p, points, hard = Fraction(1, 10), exact.simplex(4, 12), exact.eye(4)[0]

    def error(a: Sequence[Any], values: tuple[int, ...], p: Fraction = p) -> Any:
        """Return E (Σ m a v / (1 − p) − 1)² if each m is 0 with probability p: bias² + variance."""
        parts = [w * v for w, v in zip(a, values, strict=True)]
        return (sum(parts) - 1) ** 2 + p / (1 - p) * sum(x * x for x in parts)

    best_weights = min(points, key=lambda a: error(a, (1, 1, 1, 1)))
    t.assert_equal("four equal values: best weights", best_weights, (Fraction(1, 4),) * 4, exact.show)
    t.note(f"expected error there {error(best_weights, (1, 1, 1, 1))}, with one key alone {error(hard, (1, 1, 1, 1))}")
    cats_output, alone = (min(points, key=lambda a: error(a, (1, 0, 0, 0), p)) for p in (p, Fraction(0)))
    t.record_case(
        "only the first carries the answer, the others 0: best weights", exact.show(cats_output), cats_output[0] < 1
    )
    t.note(f"without dropout the best weights there are {exact.show(alone)}")


@claim(
    HOMEWORK,
    "1.4a.3 and 1.4b",
    statement=(
        "In self-attention what a position becomes is a weighted combination of all positions, itself "
        "included (as 1.4b says; 1.4a speaks of all others)."
    ),
    method="Every weight of 1, 2 and 3 equal tokens and of three different ones, in fractions.",
)
def combination_of_others(t: Experiment) -> None:
    for tokens in ([[1, 0]], [[1, 0]] * 2, [[1, 0]] * 3, [[1, 0], [0, 1], [1, 1]]):
        x = exact.matrix(tokens)
        rows = exact.attention(x, x, exact.eye(len(x)))
        is_convex = all(min(row) > 0 and sum(row) == 1 for row in rows)
        t.record_case(f"tokens {exact.show(x)}: weights", exact.show(rows), is_convex)
    t.note("a single token attends only to itself")
