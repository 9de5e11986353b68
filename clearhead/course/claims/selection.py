"""Self-attention that copies, permutes or convolves: when its weights can be an identity, a permutation, a band."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import MatrixFigure
from clearhead.course.claims.numerics import join_numbers, max_abs_diff, single_head_attention
from clearhead.course.claims.registry import ANSWERED, HOMEWORK, claim
from clearhead.course.exercises.numbers import Number
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
    first = [row[0] for row in exact.matmul(v, a)]
    second = [row[1] for row in v]
    t.record_case("h₁ and v₂", exact.pair(first, second), first == second)


@claim(
    HOMEWORK,
    "1.3d, example",
    statement=(
        "With weights (¼, ½, ¼) on positions i − 1, i, i + 1 attention is a convolution with a kernel of size 3."
    ),
    method="`attend` with a bias ln(kernel) on the distance against `conv1d`, positions 1 … 9.",
    condition=(
        "the position is not at an edge, the kernel is non-negative and sums to 1, and it multiplies all channels by "
        "the same matrix at every offset"
    ),
)
def attention_as_convolution(t: Experiment) -> None:
    n = 9
    kernel = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    bias = torch.where(distance.abs() <= 1, kernel[(distance + 1).clamp(0, 2)].log(), -torch.inf)
    v = t.normal(n, 2)
    q = torch.zeros(n, 3, dtype=torch.float64)
    conv = torch.nn.functional.conv1d(v.T[:, None], kernel[None, None], padding=1)[:, 0].T
    gaps = (single_head_attention(q, q, v, bias=bias, impl="reference") - conv).abs().amax(1)
    t.assert_below("positions 2 … 8", gaps[1:-1].max(), 1e-12, "largest difference {:.1e}")
    t.record_case(
        "position 1", f"difference {gaps[0]:.3f}: its two weights are 2/3 and 1/3", gaps[0] < 1e-12, in_scope=False
    )
    edge = (-1, 2, 0)  # sums to 1, as weights do, and finds edges
    result_text = f"needs a weight of {min(edge)}, and a softmax gives none below 0"
    t.record_case(f"kernel {edge}", result_text, min(edge) >= 0, in_scope=False)
    before, after = (torch.where(distance == offset, 0.0, -torch.inf) for offset in (-1, 1))
    before[0], after[-1] = 0.0, 0.0  # the first has no token before, the last none after
    heads = [
        single_head_attention(q, q, w * v, bias=b.double(), impl="reference") for w, b in ((-1, before), (1, after))
    ]
    difference = torch.nn.functional.conv1d(v.T[:, None], torch.tensor([[[-1.0, 0.0, 1.0]]]).double(), padding=1)
    gap = max_abs_diff((heads[0] + heads[1])[1:-1], difference[:, 0].T[1:-1])
    t.note(f"two heads, with W_V = −1 for the token before and 1 for the one after, give (−1, 0, 1): off by {gap:.1e}")
    # A head computes Σ_o a_o W_V v_{i+o}: its kernels a_o W_V, one matrix per offset, are multiples of one matrix.
    matrices = torch.eye(2, dtype=torch.float64), torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    rank = int(torch.linalg.matrix_rank(torch.stack(matrices).flatten(1)))
    case_name = "two channels, kept at one offset and exchanged at another: heads needed, one per independent matrix"
    t.assert_equal(case_name, rank, 1, in_scope=False)
    t.draw(MatrixFigure("Weights of a convolution by attention", bias.softmax(1).tolist()))


@claim(
    HOMEWORK,
    "1.3d, first sentence",
    statement=(
        "Self-attention can behave like a convolution when its weights form a band: each position attends to itself "
        "and to a neighborhood of fixed size."
    ),
    method=(
        "A convolution answers an impulse at position 4 as one at position 3, one position later. Two bands of three "
        "weights per row, in fractions, 7 positions: the same weights in every row, and weights that alternate."
    ),
    condition="the weights within the band are the same at every position, so that they depend on the offset alone",
)
def band_as_convolution(t: Experiment) -> None:
    first, second = ([Fraction(x, 4) for x in row] for row in ((1, 2, 1), (2, 1, 1)))
    for name, rows in (("same weights", [first] * 7), ("alternating weights", [first, second] * 3 + [first])):
        a = [[row[j - i + 1] if abs(j - i) <= 1 else Fraction(0) for j in range(7)] for i, row in enumerate(rows)]
        third, fourth = ([a[i][at] for i in range(at - 1, at + 2)] for at in (2, 3))
        is_same = name == "same weights"
        case_name = f"{name}: outputs around an impulse at position 3 and at position 4"
        t.record_case(case_name, exact.pair(third, fourth), third == fourth, in_scope=is_same)


@claim(
    HOMEWORK,
    "1.1c, implementation",
    statement="A fully connected architecture implements hard attention by an argmax in place of the softmax.",
    method=(
        "Outputs of argmax attention over the values 3 and 5 for two pairs of keys, and of a fully connected layer "
        "over the positions, whose weights are one-hot and the same for every input, in fractions."
    ),
    condition="every input selects the same positions; the argmax depends on queries and keys, constant weights do not",
)
def argmax_fully_connected(t: Experiment) -> None:
    queries, values = exact.matrix("1 0; 0 1"), exact.matrix("3; 5")
    layer = exact.matmul(exact.eye(2), values)  # W = I
    for keys, is_same in (("1 0; 0 1", True), ("0 1; 1 0", False)):
        outputs = exact.attention(queries, exact.matrix(keys), values, by=exact.hardest)
        case_name = f"keys [{keys}]: argmax attention, and the layer with W = I"
        t.record_case(case_name, exact.pair(outputs, layer), outputs == layer, in_scope=is_same)


@claim(
    HOMEWORK,
    "1.3d",
    statement="Weights that are not zero where |j − i| ≤ ⌊k/2⌋ form a band of width k.",
    method="The keys of a query in the middle of such a band, counted by `window`, k = 1 … 8.",
    condition="k is odd; for an even k the band is k + 1 wide",
)
def band_width(t: Experiment) -> None:
    for k in (1, 3, 5, 7, 2, 4, 6, 8):
        t.assert_equal(f"k = {k}", int(window(k // 2, k // 2).dense(31)[15].sum()), k, "width {}", in_scope=k % 2 == 1)


@claim(
    ANSWERED,
    "Q2c, head 1",
    statement="To predict the verb at [MASK], a head has high attention from 'cats' to [MASK].",
    method=(
        "One layer, rows are queries: does the prediction at [MASK] depend on the row of 'cats' or on that of [MASK]?"
    ),
    condition="'from cats to [MASK]' is the direction of the information; the query is the one at [MASK]",
)
def cats_to_mask(t: Experiment) -> None:
    v = exact.matrix("1 0; 0 1; 0 0; 2 2")  # The, cats, [MASK], running
    flat, to_mask, to_cats = exact.matrix("1/4 1/4 1/4 1/4; 0 0 1 0; 0 1 0 0")
    rows = [flat] * 4, [flat, to_mask, flat, flat], [flat, flat, to_cats, flat]
    base, cats_output, other = (exact.matmul(weights, v)[2] for weights in rows)
    result_text = f"{exact.pair(base, other, ' → ')}, the value of 'cats'"
    case_name = "the query at [MASK] attends to 'cats': output at [MASK]"
    t.record_case(case_name, result_text, other != base and other == v[1])
    case_name = "the query at 'cats' attends to [MASK]: output at [MASK]"
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
    p = Fraction(1, 10)
    points = exact.simplex(4, 12)
    hard = exact.eye(4)[0]

    def error(a: Sequence[Number], values: tuple[int, ...], p: Fraction = p) -> Number:
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
    "1.4b",
    statement="In self-attention each position becomes a weighted combination of all positions, itself included.",
    method="Every weight of 1, 2 and 3 equal tokens and of three different ones, in fractions.",
)
def combination_of_all(t: Experiment) -> None:
    for tokens, rows in self_weights():
        t.record_case(f"tokens {exact.show(tokens)}: weights", exact.show(rows), is_combination_of_all(rows))


@claim(
    HOMEWORK,
    "1.4a.3",
    statement="In self-attention each position becomes a weighted combination of all other positions.",
    method="The weight of each position on itself, for 1, 2 and 3 equal tokens and for three different ones.",
)
def combination_of_others(t: Experiment) -> None:
    for tokens, rows in self_weights():
        diagonal = [row[i] for i, row in enumerate(rows)]
        t.record_case(f"tokens {exact.show(tokens)}: weights on themselves", exact.show(diagonal), not any(diagonal))
    correct = "It is a combination of all positions, itself included; a single token attends only to itself."
    t.correction(correct, all(is_combination_of_all(rows) for _, rows in self_weights()))


@claim(
    HOMEWORK,
    "1.4a.3, attention weights",
    statement="The weights by which a position combines the others are learned attention weights.",
    method="The weights of one layer with fixed parameters for two inputs of 5 tokens: do they differ?",
)
def attention_weights_learned(t: Experiment) -> None:
    w_q, w_k = t.normal(4, 4), t.normal(4, 4)
    first, second = (single_head_attention(x @ w_q, x @ w_k) for x in (t.normal(5, 4), t.normal(5, 4)))
    change = max_abs_diff(first, second)
    t.assert_below("same parameters, two inputs: largest difference of a weight", change, 1e-9, "{:.2f}")
    correct = "The projections are learned; the weights are computed with them from each input."
    t.correction(correct, change > 1e-3 and w_q.shape == w_k.shape == (4, 4))


def self_weights() -> list[tuple[exact.Matrix, exact.Matrix]]:
    """Return sequences of tokens with the self-attention weights of each."""
    sequences = [exact.matrix(rows) for rows in ("1 0", "1 0; 1 0", "1 0; 1 0; 1 0", "1 0; 0 1; 1 1")]
    return [(x, exact.attention(x, x, exact.eye(len(x)))) for x in sequences]


def is_combination_of_all(rows: exact.Matrix) -> bool:
    """Return whether all weights are positive and those of each row sum to 1."""
    return all(min(row) > 0 and sum(row) == 1 for row in rows)


@claim(
    HOMEWORK,
    "1.3d, positional encoding",
    statement=(
        "Self-attention acts as a convolution by relative encodings that bias the scores by the distance, higher for "
        "near positions and lower for distant ones."
    ),
    method=(
        "Weights of a query in the middle with the bias b(|j − i|) = ln of the kernel at that distance, in the "
        "library; kernels (¼, ½, ¼), (½, ¼, ¼) and (1, 0, 0)."
    ),
    condition=("the kernel is symmetric and falls from its middle; any other needs a bias on the signed offset j − i"),
)
def distance_bias_kernels(t: Experiment) -> None:
    n, middle = 7, 3
    distance = (torch.arange(n) - middle).abs()
    for kernel in ((0.25, 0.5, 0.25), (0.5, 0.25, 0.25), (1.0, 0.0, 0.0)):
        # The best that the distance allows: both neighbors get the mean of the two entries.
        side = (kernel[0] + kernel[2]) / 2
        by_distance = torch.tensor([kernel[1], side, *[0.0] * (n - 2)], dtype=torch.float64)
        q = torch.zeros(1, 2, dtype=torch.float64)
        bias = by_distance[distance].log()[None]
        weights = single_head_attention(q, torch.zeros(n, 2).double(), bias=bias, impl="reference")[0]
        used = tuple(weights[middle - 1 : middle + 2].tolist())
        is_symmetric = kernel[0] == kernel[2]
        same = all(abs(a - b) < 1e-12 for a, b in zip(used, kernel, strict=True))
        t.record_case(f"kernel {kernel}: weights", join_numbers(used, ".3f"), same, in_scope=is_symmetric)


@claim(
    HOMEWORK,
    "1.3d, learned projections",
    statement=("W_Q and W_K can be learned such that queries are most similar to the keys in their neighborhood."),
    method=(
        "Scores of 5 tokens: with one-hot positions as input and a banded W_K; then five equal tokens without "
        "positions, under 100 random W_Q and W_K."
    ),
    condition="the input contains positions; without them equal tokens have equal scores, whatever W_Q and W_K are",
)
def projections_favor_neighbors(t: Experiment) -> None:
    places = torch.arange(5)
    near = (places[:, None] - places).abs() <= 1
    positions = torch.eye(5, dtype=torch.float64)
    scores = positions @ (positions @ near.double()).T  # W_Q = I, W_K the band
    is_local = bool((scores[near] > scores[~near].max()).all())
    t.record_case("positions as input, W_Q = I, W_K a band: neighbors have the largest scores", is_local, is_local)
    tokens = t.normal(1, 5).expand(5, 5)
    spreads = [
        max_abs_diff(row_scores, row_scores[:, :1])
        for row_scores in ((tokens @ t.normal(5, 5)) @ (tokens @ t.normal(5, 5)).T for _ in range(100))
    ]
    case_name = "equal tokens, no positions: largest difference of two scores of a query"
    t.record_case(case_name, f"{max(spreads):.1e}", max(spreads) > 1e-9, in_scope=False)
