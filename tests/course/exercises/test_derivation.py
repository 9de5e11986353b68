"""Derivations: the expression language, its two evaluators against numpy, and each worksheet against a reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from clearhead.course.exercises import ProblemError, read, solve, solve_text
from clearhead.course.exercises.algebra import EXACT, FLOAT64, ExpressionError
from clearhead.course.exercises.expressions import Evaluator, format_expression, parse_expression
from clearhead.course.exercises.numbers import as_float, read_number, text


def cells(work, key):
    return np.array([[as_float(x) for x in row] for row in work.step(key).grid.cells])


def exact(work, key):
    return [[text(x) for x in row] for row in work.step(key).grid.cells]


def given_values(work):
    """Return the given values of a worksheet as arrays by name."""
    values = {step.key: cells(work, step.key) for step in work.steps if step.is_given and step.key != "given"}
    if any(step.key == "given" for step in work.steps):
        values |= dict(zip(work.step("given").grid.rows, cells(work, "given")[:, 0], strict=True))
    return values


# ---------------------------------------------------------------------- the language

A = np.array([[1.0, -2.0, 3.0], [0.0, 5.0, 7.0]])
B = np.array([[2.0, 1.0], [-1.0, 3.0], [0.0, 4.0]])
X = np.array([[1.0, 2.0, 4.0]])


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


EXPRESSIONS = {
    "A @ B": A @ B,
    "A.T + B * 2": A.T + 2 * B,
    "A - X": A - X,
    "-A / (X + 1)": -A / (X + 1),
    "softmax(A)": softmax(A),
    "softmax(A, 2)": softmax(A / 2),
    "softmax(A, 0)": np.array([[0.0, 0, 1], [0, 0, 1]]),
    "softmax(masked(A @ B, causal(2)))": np.array([[1.0, 0.0], softmax((A @ B)[1])]),
    "relu(A)": np.maximum(A, 0),
    "layer_norm(A)": (A - A.mean(1, keepdims=True)) / A.std(1, keepdims=True),
    "row_sums(A) + row_means(A)": A.sum(1, keepdims=True) + A.mean(1, keepdims=True),
    "max(abs(A)) + sum(A) + mean(A)": np.array([[7 + 14 + 14 / 6]]),
    "diag(X) + eye(3)": np.diag(X[0]) + np.eye(3),
    "rows(B, [3, 1])": B[[2, 0]],
    "columns(A, 2)": A[:, [1]],
    "beside(A, A)": np.hstack([A, A]),
    "below(A, X)": np.vstack([A, X]),
    "exp(X) + log(X) + sqrt(X)": np.exp(X) + np.log(X) + np.sqrt(X),
    "tanh(X) + sigmoid(X)": np.tanh(X) + 1 / (1 + np.exp(-X)),
    "[[1, 2 ** 3], [1/2, 0]]": np.array([[1, 8], [0.5, 0]]),
    "pick(A, [3, 2])": np.array([[3.0], [5.0]]),
    "sign(A) + nonzero(A)": np.sign(A) + (A != 0),
    "ceil(X / 3) - floor(X / 3)": np.ceil(X / 3) - np.floor(X / 3),
    "padding(2, 3, 1) * ones(2, 3)": np.array([[1.0, 0, 0], [1, 0, 0]]),
    "exp(band(3, log(X)))": np.array([[2.0, 4, 0], [1, 2, 4], [0, 1, 2]]),
    "shaped(flat(A), B)": A.reshape(3, 2),
    "at(A @ B, A, A + 1)": (A + 1) @ B,
    "grad(sum(X ** 3), X)": 3 * X**2,
    "jacobian(X * X, X)": np.diag(2 * X[0]),
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_exact_and_float64_agree_with_numpy(expression):
    values = {"A": A, "B": B, "X": X}
    tree = parse_expression(expression, set(values))
    numbers = {name: [[read_number(int(x)) for x in row] for row in value] for name, value in values.items()}
    worked = Evaluator({}, numbers, EXACT).evaluate(tree)
    np.testing.assert_allclose([[as_float(x) for x in row] for row in worked], EXPRESSIONS[expression], atol=1e-14)
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    result = Evaluator({}, tensors, FLOAT64).evaluate(tree)
    np.testing.assert_allclose(result.numpy(), EXPRESSIONS[expression], atol=1e-12)


def test_exact_and_float64_have_the_same_functions():
    assert set(EXACT.functions) == set(FLOAT64.functions)
    expressions = " ".join(EXPRESSIONS)
    assert [name for name in EXACT.functions if f"{name}(" not in expressions] == []


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("__import__('os')", "unknown function '__import__'"),
        ("A.__class__", "is not part of this language"),
        ("A.T.real", "is not part of this language"),
        ("(lambda: 1)()", "unknown function"),
        ("[x for x in A]", "is not part of this language"),
        ("A if A else A", "is not part of this language"),
        ("A[0]", "is not part of this language"),
        ("1.5", "expected whole numbers"),
        ("'A'", "expected whole numbers"),
        ("True", "expected whole numbers"),
        ("10 ** 10 + 99999999999", "expected whole numbers"),
        ("C + 1", "'C' in 'C + 1' is unknown"),
        ("softmx(A)", "unknown function 'softmx'; did you mean 'softmax'"),
        ("softmax(A, temperature=1)", "unknown function"),
        ("grad(A)", "takes 2 arguments"),
        ("grad(A, A + 1)", "the second a name"),
        ("A +", "cannot read"),
        ("A; A", "cannot read"),
        ("(" * 450 + "A" + ")" * 450, "cannot read"),
        ("A + " * 300 + "A", "at most 1000"),
    ],
)
def test_parse_expression_rejects_other_syntax(expression, why):
    with pytest.raises(ExpressionError) as caught:
        parse_expression(expression, {"A"})
    assert why in str(caught.value)


def test_format_expression_returns_mathematical_notation():
    tree = parse_expression("softmax((Q @ K.T) / sqrt(d)) @ V - (a - b) ** 2", set("QKVabd"))
    assert format_expression(tree, {"a": "α"}) == "softmax(Q·Kᵀ / √(d))·V − (α − b)²"
    assert format_expression(tree, {"a": "α"}, latex=True) == (
        r"\operatorname{softmax}\left(\frac{Q K^{\top}}{\sqrt{d}}\right) V - \left(\alpha - b\right)^{2}"
    )


# ---------------------------------------------------------------------- files

FILE = """kind = "derivation"
general = ["z"]
needs = ["max(z) > 0"]
[given]
z = [1, 1]
[[step]]
key = "p"
is = "softmax(z)"
equals = "1/2"
"""


def test_always_is_checked_with_symbols():
    assert exact(solve_text(FILE), "p") == [["1/2", "1/2"]]
    with pytest.raises(ProblemError, match=r"line 9: p is not 1/2: one cell is e\^z00/\(e\^z00 \+ e\^z01\)"):
        solve_text(FILE.replace("equals", "always"))
    assert (
        "both sides are the same: p"
        in solve_text(FILE.replace('equals = "1/2"', 'always = "1 - p * [0, 0] - 1 + p"')).remarks[0]
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("old", "new", "line", "why"),
    [
        ('equals = "1/2"', 'equals = "1/3"', 9, "p is not 1/3: one cell is 1/2, the other 1/3"),
        ('equals = "1/2"', 'at_most = "1/3"', 9, "p is above 1/3"),
        ('equals = "1/2"', 'equals = "ones(2, 3)"', 9, "p cannot be evaluated"),
        ('is = "softmax(z)"', 'is = "z @ z"', 8, "1×2 times 1×2 cannot be multiplied"),
        ('is = "softmax(z)"', 'is = "z + ones(2, 3)"', 8, "do not fit cell by cell"),
        ('is = "softmax(z)"', 'is = "z / 0"', 8, "divides by zero"),
        ('is = "softmax(z)"', 'is = "q"', 8, "'q' in 'q' is unknown"),
        ('is = "softmax(z)"', 'is = "rows(z, 2)"', 8, "expected numbers from 1 to 1"),
        ('is = "softmax(z)"', 'is = "layer_norm(z)"', 8, "divides by zero"),
        ('is = "softmax(z)"', 'is = "softmax(z)"\nrows = ["a", "b"]', 9, "rows has 2 labels; p has 1 rows"),
        ('key = "p"', 'key = "z"', 7, "expected an unused name"),
        ('key = "p"', 'key = "p p"', 7, "expected an unused name"),
        ("z = [1, 1]", 'z = [1, "x"]', 5, "'x' is unknown"),
        ("max(z) > 0", "max(z) > 5", 3, "do not meet 'max(z) > 5'"),
        ("max(z) > 0", "max(z)", 3, "expected two expressions"),
        ("[given]", 'model = "none"\n[given]', 4, "model is 'none'; expected one of"),
        ('[[step]]\nkey = "p"\nis = "softmax(z)"\nequals = "1/2"\n', "", 1, "there is no [[step]]"),
    ],
)
def test_invalid_derivation_raises_one_sentence_with_line(old, new, line, why):
    assert old in FILE
    with pytest.raises(ProblemError) as caught:
        solve_text(FILE.replace(old, new, 1), "mine.toml")
    assert str(caught.value).startswith(f"mine.toml, line {line}: "), str(caught.value)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- the sheets


def test_complexity_table_matches_formulas():
    work = solve("complexity-table")
    assert exact(work, "table")[0] == ["d·n^2", "1", "1"]
    n, d, k, r = 1000, 512, 5, 64
    assert cells(work, "numbers")[:, 0].tolist() == [n * n * d, n * d * d, k * n * d * d, r * n * d]
    assert exact(work, "crossing") == [["d"], ["d·k"], ["r"]]
    assert cells(work, "layers")[:, 0].tolist() == [1, n, 200, math.ceil(math.log(n, k)), 16]


def test_rnn_gradients_match_finite_differences():
    work = solve("rnn-two-steps")
    have = given_values(work)

    def loss(w, a):
        h = 0.0
        for x in have["x"][0]:
            h = math.tanh(w * h + a * x)
        return (h - have["y"]) ** 2 / 2

    e = 1e-6
    assert cells(work, "grad_w")[0][0] == pytest.approx(
        (loss(have["w"] + e, have["a"]) - loss(have["w"] - e, have["a"])) / (2 * e), abs=1e-9
    )
    assert cells(work, "grad_a")[0][0] == pytest.approx(
        (loss(have["w"], have["a"] + e) - loss(have["w"], have["a"] - e)) / (2 * e), abs=1e-9
    )
    assert (cells(work, "options")[:, 0] == 0).tolist() == [False, True, False, False], "the document's answer is B"


def test_infinity_norm_gradient_matches_finite_differences():
    work = solve("infinity-norm-step")
    have = given_values(work)

    def loss(w):
        p = 1 / (1 + np.exp(-w @ have["x"][0]))
        return -have["y"] * np.log(p) - (1 - have["y"]) * np.log(1 - p) + have["λ"] / 2 * np.abs(w).max() ** 2

    w, e = have["w"][0], 1e-6
    slope = [(loss(w + e * unit) - loss(w - e * unit)) / (2 * e) for unit in np.eye(3)]
    np.testing.assert_allclose(cells(work, "gradient")[0], slope, atol=1e-8)
    np.testing.assert_allclose(cells(work, "new_w")[0], w - have["η"] * np.array(slope), atol=1e-8)


def test_softmax_jacobian_and_temperatures_match_numpy():
    work = solve("softmax-jacobian")
    a = softmax(given_values(work)["s"])[0]
    np.testing.assert_allclose(cells(work, "J"), np.diag(a) - np.outer(a, a), atol=1e-15)
    assert cells(work, "norm")[0][0] < 9 * (1 - a.max()) ** 2
    cold = solve("softmax-temperature")
    for T, row in zip((0.5, 1, 2, 4), cells(cold, "p"), strict=True):
        np.testing.assert_allclose(row, softmax(np.array([4.0, 3, 2, 1]) / T), atol=1e-15)


def test_perturbed_and_scaled_keys_match_numpy():
    work = solve("perturb-key-query")
    have = given_values(work)

    def outputs(Q, K):
        return softmax(Q @ K.T) @ have["V"]

    moved = have["K"].copy()
    moved[0] += 1e-6 * have["ε"][0]
    slope = (outputs(have["Q"], moved) - outputs(have["Q"], have["K"])) / 1e-6
    np.testing.assert_allclose(cells(work, "first"), slope, atol=1e-6)
    assert cells(work, "by_key").tolist() == [[1], [1]]
    assert cells(work, "by_query").tolist() == [[0], [1]]
    longer = solve("scale-key")
    assert cells(longer, "gain")[:, 0].tolist() == [1, -1, 0], "the weight grows with positive scores only"


def test_permuting_and_convolving_attention_match_references():
    work = solve("permutation-by-attention")
    assert exact(work, "H_hard") == [["3", "0"], ["−1", "1"], ["1", "2"]]
    conv = solve("convolution-by-attention")
    x = torch.tensor(given_values(conv)["X"]).T[None]
    expected = torch.nn.functional.conv1d(
        x, torch.tensor([[[0.25, 0.5, 0.25]]], dtype=x.dtype).expand(2, 1, 3), padding=1, groups=2
    )
    np.testing.assert_allclose(cells(conv, "Y"), expected[0].T, atol=1e-15)
    np.testing.assert_allclose(cells(conv, "H")[1:-1], expected[0].T[1:-1], atol=1e-15)


def test_tables_match_answers_of_exercise_sheet():
    """Question 3a: layer norm (i) and (iii), batch norm (i) and (ii); 2b: padding, causal, padding, causal, padding."""
    assert exact(solve("layer-norm-batch-norm"), "depends") == [["1", "1"], ["0", "1"], ["1", "0"], ["0", "0"]]
    masks = solve("masks-by-architecture")
    assert exact(masks, "table") == [["1", "0"], ["0", "1"], ["1", "0"], ["0", "1"], ["1", "0"]]
    assert exact(masks, "left") == [["1"]]


def test_residual_jacobian_matches_autograd():
    work = solve("residual-gradient")
    have = {name: torch.tensor(value) for name, value in given_values(work).items()}
    x = have["x"].requires_grad_()
    y = x + torch.relu(x @ have["A"]) @ have["B"]
    z = y + torch.relu(y @ have["C"]) @ have["D"]
    for row, out in zip(cells(work, "J2"), z[0], strict=True):
        np.testing.assert_allclose(row, torch.autograd.grad(out, x, retain_graph=True)[0][0], atol=1e-14)


def test_score_variance_matches_samples():
    work = solve("score-variance")
    generator = torch.Generator().manual_seed(3)
    q = 1 + 2 * torch.randn(200_000, 64, generator=generator)
    k = torch.randn(200_000, 64, generator=generator)
    assert cells(work, "score")[0][0] == pytest.approx((q * k).sum(1).var().item(), rel=0.02)
    assert exact(work, "unit") == [["64", "1"]]


def test_vit_tokens_and_line_counts_match_known_values():
    """ViT-B/16: 197 tokens, 590,592 parameters of the projection and 151,296 of the positions."""
    vit = solve("vit-tokens")
    assert exact(vit, "tokens") == [["197"]]
    assert exact(vit, "projection") == [["590592"]]
    assert exact(vit, "embeddings") == [["768", "151296"]]
    lines = solve("theta-lines")
    assert read_number(exact(lines, "total")[0][0]) == read_number("2*t*d^2 + 2*s*d^2 + 2*t*s*d")
    assert exact(lines, "crossing") == [["2·d"]]
    heads = solve("multi-head-shapes")
    assert exact(heads, "total") == [["1048576"]]
    assert cells(heads, "shapes").tolist()[2] == [20, 64]


@pytest.mark.parametrize("name", ["encoder-decoder", "encoder-decoder-softmax"])
def test_encoder_decoder_matches_numpy(name):
    work = solve(name)
    h = given_values(work)

    def attend(x, y, side, mask=0.0):
        scores = (x @ h[f"Q_{side}"]) @ (y @ h[f"K_{side}"]).T + mask
        weights = softmax(scores / math.sqrt(2)) if name.endswith("softmax") else np.eye(2)[scores.argmax(1)]
        return weights @ (y @ h[f"V_{side}"]) @ h[f"O_{side}"]

    def norm(x):
        return (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)

    x = h["E_s"] + h["pos"]
    x = norm(x + attend(x, x, "e"))
    memory = norm(x + np.maximum(x @ h["A_e"], 0) @ h["B_e"])
    y = h["E_t"][:2] + h["pos"]
    y = norm(y + attend(y, y, "d", np.array([[0, -np.inf], [0, 0]])))
    y = norm(y + attend(y, memory, "c"))
    y = norm(y + np.maximum(y @ h["A_d"], 0) @ h["B_d"])
    p = softmax(y @ h["E_t"].T)
    np.testing.assert_allclose(cells(work, "memory"), memory, atol=1e-13)
    assert cells(work, "loss")[0][0] == pytest.approx(-math.log(p[0, 1]) - math.log(p[1, 2]), abs=1e-12)
    assert [check.by for check in work.checks][1].startswith("EncoderDecoder")


@pytest.mark.parametrize("name", ["encoder-decoder", "encoder-decoder-softmax"])
def test_encoder_decoder_writes_its_target(name):
    """The likeliest word after <start> is Hola, and after Hola it is mundo."""
    work = solve(name)
    rows = [[float(x) for x in row] for row in work.step("p").grid.cells]
    columns = work.step("p").grid.columns
    assert [columns[row.index(max(row))] for row in rows] == ["Hola", "mundo"]
    assert [int(x) for x in work.step("next").grid.flat] == [2, 3]


def test_needs_are_checked_before_exact_numbers():
    text = read("encoder-decoder").text.replace("[1, 0, 2, 0]", "[1, 0, 0, 2]")
    with pytest.raises(ProblemError, match=r"do not meet 'max\(rows\(logits, 1\)\)"):
        solve_text(text)
