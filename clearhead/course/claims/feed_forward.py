"""The feed-forward layer, and what attention alone cannot do."""

from __future__ import annotations

from fractions import Fraction

import torch

from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import max_abs_diff
from clearhead.course.claims.registry import HOMEWORK, claim
from clearhead.nn import FeedForward, ReLU


@claim(
    HOMEWORK,
    "1.4d.1",
    statement="Attention is primarily a linear operation, a weighted sum.",
    method="f(2X) against 2 f(X), with weights that follow X and with fixed weights, in fractions.",
    condition="the weights are held fixed (linear in the values); as a function of its input it is not linear",
)
def attention_linear(t: Experiment) -> None:
    x, double = exact.eye(2), exact.matrix("2 0; 0 2")
    twice = exact.matmul(exact.attention(x, x, x), double)
    t.assert_equal("values doubled", exact.attention(x, x, double), twice, exact.show)
    outputs = exact.attention(double, double, double)
    t.record_case("input doubled", exact.pair(outputs, twice, ", not "), outputs == twice, in_scope=False)


@claim(
    HOMEWORK,
    "1.4d",
    statement=(
        "The feed-forward layer (512 → 2048 → 512, ReLU) treats each position separately and alike; 2048 is 4 × 512."
    ),
    method="One position perturbed; positions permuted; widths read from the library's layer.",
)
def ffn_positionwise(t: Experiment) -> None:
    ffn = FeedForward(512, 4 * 512, ReLU()).double()
    wide = ffn.up.out_features
    t.record_case("widths", f"{ffn.up.in_features} → {wide} → {ffn.down.out_features}", wide == 2048)
    x = t.normal(1, 5, 512)
    y = ffn(x)
    moved = x.clone()
    moved[0, 2] += 1.0
    changed = [i + 1 for i in range(5) if not torch.equal(ffn(moved)[0, i], y[0, i])]
    t.assert_equal("position 3 perturbed: outputs changed", changed, [3])
    order = [3, 1, 4, 0, 2]
    t.assert_below("positions permuted", max_abs_diff(ffn(x[:, order]), y[:, order]), 1e-12)


@claim(
    HOMEWORK,
    "1.4d.3",
    statement="The feed-forward layer is a bottleneck structure: it expands and then compresses.",
    method=(
        "Is the middle of the library's layer narrower than its ends, as a bottleneck is? Then the rank of the two "
        "matrices without the ReLU, for a middle of 128 and of 2048."
    ),
)
def ffn_bottleneck(t: Experiment) -> None:
    ranks = {}
    for middle in (128, 2048):
        ffn = FeedForward(512, middle, ReLU())
        ranks[middle] = int(torch.linalg.matrix_rank(ffn.down.weight.double() @ ffn.up.weight.double()))
    ends = FeedForward(512, 2048, ReLU()).up
    widths = f"{ends.in_features} → {ends.out_features} → {ends.in_features}"
    t.record_case("widths", widths, ends.out_features < ends.in_features)
    correct = (
        f"It is an inverted bottleneck, wider in the middle. A bottleneck of 128 would leave {ranks[128]} of 512 "
        f"directions; a middle of 2048 leaves {ranks[2048]}."
    )
    t.correction(correct, ranks == {128: 128, 2048: 512})


@claim(
    HOMEWORK,
    "1.4d.4",
    statement=(
        "Self-attention mixes information across positions, the feed-forward layer across the features of one position."
    ),
    method=(
        "Which features of which positions change when feature 1 of position 1 of 3 grows by 1: attention in "
        "fractions, and the library's FeedForward."
    ),
)
def ffn_mixes_features(t: Experiment) -> None:
    x, moved = exact.matrix("1 0; 0 1; 1 1"), exact.matrix("2 0; 0 1; 1 1")

    def touched(before: exact.Matrix, after: exact.Matrix) -> str:
        """Return positions and features that differ."""
        cells = [(i, j) for i in range(3) for j in range(2) if before[i][j] != after[i][j]]
        where, which = (sorted({axis + 1 for axis in axes}) for axes in zip(*cells, strict=True))
        return f"positions {where}, features {which}"

    for name, w_v, fixed in (
        ("attention, weights fixed, W_V = 1", "1 0; 0 1", True),
        ("attention, weights fixed, W_V = (1 2; 0 1)", "1 2; 0 1", True),
        ("attention, weights of the tokens, W_V = 1", "1 0; 0 1", False),
    ):
        values = [exact.matmul(tokens, exact.matrix(w_v)) for tokens in (x, moved)]
        matched = [exact.matrix("0; 0; 0")] * 2 if fixed else [x, moved]
        result_text = touched(*(exact.attention(m, m, v) for m, v in zip(matched, values, strict=True)))
        t.record_case(name, result_text, "positions [1, 2, 3]" in result_text)
    t.note("attention mixes features as well where W_V does, or where the weights follow the tokens")
    ffn = FeedForward(2, 8, ReLU()).double()
    with torch.no_grad():
        for weight in (ffn.up.weight, ffn.down.weight):
            weight.fill_(1.0)
        before, after = (ffn(exact.to_tensor(tokens)).tolist() for tokens in (x, moved))
    t.assert_equal("the feed-forward layer", touched(before, after), "positions [1], features [1, 2]")


@claim(
    HOMEWORK,
    "1.4d.1",
    statement="The two layers with a ReLU between them provide the universal approximation capability.",
    method=(
        "x² on [0, 1] by w ReLUs that join its values at w + 1 even places: the largest error of a chord is "
        "1/(4w²), in fractions; the library's FeedForward with these weights gives the same numbers. Then a bound for "
        "one unit with any weights: it makes two pieces, and a line over half of the interval misses x² by 1/32."
    ),
    condition="the hidden layer may be as wide as the accuracy requires; with a fixed width an error remains",
)
def ffn_universal(t: Experiment) -> None:
    for w in (1, 2, 4, 8, 16):
        middles = [Fraction(2 * i + 1, 2 * w) for i in range(w)]
        error = max(broken_line(x, w) - x * x for x in middles)  # a chord is furthest from x² half way
        t.assert_equal(f"{units(w)}: largest error", error, Fraction(1, 4 * w * w))
    layer = FeedForward(1, 4, ReLU()).double()
    bends = torch.tensor([[float(bend(i, 4)) for i in range(4)]])
    layer.up.load_state_dict({"weight": torch.ones(4, 1), "bias": -torch.arange(4) / 4})
    layer.down.load_state_dict({"weight": bends, "bias": torch.zeros(1)})
    ys = layer(torch.linspace(0, 1, 33, dtype=torch.float64)[:, None]).flatten().tolist()
    gap = max(abs(float(broken_line(Fraction(i, 32), 4)) - y) for i, y in enumerate(ys))
    t.assert_below("FeedForward with the weights for 4 units: difference", gap, 1e-12)
    # The errors at the ends and in the middle of a piece add up to its second difference with the weights 1, 2 and 1.
    piece = Fraction(1, 2)
    least = (piece**2 - 2 * (piece / 2) ** 2) / 4
    t.assert_equal("1 unit with any weights: least possible error", least, Fraction(0), in_scope=False)
    grid = [i / 64 for i in range(65)]
    curves = {units(w): [float(broken_line(Fraction(i, 64), w)) for i in range(65)] for w in (1, 2, 4)}
    t.draw(Lines("x² by ReLUs", "x", "output", grid, curves | {"x²": [x * x for x in grid]}))


def units(w: int) -> str:
    return f"{w} unit{'s' if w > 1 else ''}"


def bend(i: int, w: int) -> Fraction:
    """Return the change of the slope at i/w, where unit i becomes active."""
    return Fraction(1, w) if i == 0 else Fraction(2, w)


def broken_line(x: Fraction, w: int) -> Fraction:
    return sum((bend(i, w) * max(x - Fraction(i, w), Fraction(0)) for i in range(w)), Fraction(0))
