"""Exact attention against fractions worked by hand, numpy and torch's autograd."""

from __future__ import annotations

import math
from fractions import Fraction as F

import numpy as np
import pytest
import sympy
import torch

from clearhead.course.exercises import ProblemError, solve, solve_text
from clearhead.course.exercises.algebra import softmax
from clearhead.course.exercises.numbers import as_float, text


def cells(work, key):
    return [[as_float(x) for x in row] for row in work.step(key).grid.cells]


def exact(work, key):
    return [[text(x) for x in row] for row in work.step(key).grid.cells]


def toml(matrix):
    return "[" + ", ".join("[" + ", ".join(f'"{x}"' for x in row) + "]" for row in matrix) + "]"


def test_sort_dedup_matches_hand_computation():
    work = solve("sort-dedup")
    # Worked by hand: D scores 9 with D, A with A; <START> and <STOP> score 0 with everything, so they look at all
    # they may.
    third, quarter, seventh = F(1, 3), F(1, 4), F(1, 7)
    weights = [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
        [0, F(1, 2), F(1, 2), 0, 0, 0, 0],
        [quarter] * 4 + [0] * 3,
        [0, third, third, 0, third, 0, 0],
        [F(1, 2), 0, 0, 0, 0, F(1, 2), 0],
        [seventh] * 7,
    ]
    assert exact(work, "weights") == [[str(x) for x in row] for row in weights]
    assert exact(work, "z") == [
        ["3", "0"],
        ["0", "3"],
        ["0", "3"],
        ["3/4", "3/2"],
        ["0", "3"],
        ["3", "0"],
        ["6/7", "9/7"],
    ]
    e = math.exp
    unshifted = 2 * math.log(2 + 4 * e(-3)) + math.log(2 * e(9 / 7) + 2 * e(6 / 7) + 2)
    shifted = math.log(2 * e(1.5) + 2 * e(0.75) + 2) - 1.5 + 2 * math.log(2 * e(3) + 4)
    assert cells(work, "loss_own")[0][0] == pytest.approx(unshifted, abs=1e-13)
    assert cells(work, "loss")[0][0] == pytest.approx(shifted, abs=1e-13)


def test_two_equal_heads_concatenate_equal_outputs():
    single, double = solve("sort-dedup"), solve("sort-dedup-two-heads")
    z = exact(single, "z")
    assert exact(double, "r") == [row + row for row in z]
    assert exact(single, "r") == [[b, a, b, a] for a, b in z]
    # Both targets fall from the largest logit, 3, to the smallest, 0: three nats each.
    assert cells(double, "loss_own")[0][0] - cells(single, "loss_own")[0][0] == pytest.approx(6, abs=1e-12)


def reference(x, weights, allowed, temperature, heads):
    """Attention in numpy, one row at a time."""
    out, all_weights = [], []
    for q, k, v in zip(*(np.split(x @ weights[n], heads, axis=1) for n in "QKV"), strict=True):
        rows = []
        for i in range(len(x)):
            row = np.zeros(len(x))
            open_ = [j for j in range(len(x)) if allowed(i, j)]
            scores = np.array([q[i] @ k[j] for j in open_])
            if open_:
                if temperature == 0:
                    share = (scores == scores.max()).astype(float)
                elif temperature == math.inf:
                    share = np.ones(len(open_))
                else:
                    share = np.exp((scores - scores.max()) / temperature)
                row[open_] = share / share.sum()
            rows.append(row)
        all_weights.append(np.array(rows))
        out.append(np.array(rows) @ v)
    return all_weights, np.concatenate(out, axis=1)


SIZES = {"T": 5, "M": 3, "D": 2, "E": 1}


def random_problem(rng, heads):
    def fractions(rows, columns):
        return [[F(int(rng.integers(-4, 5)), int(rng.integers(1, 4))) for _ in range(columns)] for _ in range(rows)]

    return {
        "x": fractions(SIZES["T"], SIZES["M"]),
        "Q": fractions(SIZES["M"], SIZES["D"] * heads),
        "K": fractions(SIZES["M"], SIZES["D"] * heads),
        "V": fractions(SIZES["M"], SIZES["E"] * heads),
        "O": fractions(SIZES["E"] * heads, 2),
        "U": fractions(2, 4),
    }


MASKS = {
    "full()": lambda i, j: True,
    "causal()": lambda i, j: j <= i,
    "window(1, 0) & ~prefix(2)": lambda i, j: i - 1 <= j <= i and j >= 2,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("temperature", "value"), [("0", 0.0), ("inf", math.inf), ('"sqrt(3)"', math.sqrt(3)), (None, None)]
)
@pytest.mark.parametrize("heads", [1, 2])
def test_random_problem_matches_numpy(mask, temperature, value, heads):
    values = random_problem(np.random.default_rng(17 * heads + len(mask)), heads)
    lines = [f'kind = "attention"\nx = {toml(values["x"])}\nmask = "{mask}"\nheads = {heads}']
    if temperature is not None:
        lines.append(f"temperature = {temperature}")
    lines.append("[weights]\n" + "\n".join(f"{n} = {toml(values[n])}" for n in "QKVO"))
    work = solve_text("\n".join(lines))
    assert work.agrees
    numbers = {name: np.array([[float(f) for f in row] for row in matrix]) for name, matrix in values.items()}
    expected, z = reference(
        numbers["x"], numbers, MASKS[mask], math.sqrt(SIZES["D"]) if value is None else value, heads
    )
    for h, weights in enumerate(expected):
        np.testing.assert_allclose(cells(work, f"weights{h + 1}" if heads > 1 else "weights"), weights, atol=1e-13)
    np.testing.assert_allclose(cells(work, "concat" if heads > 1 else "z"), z, atol=1e-12)
    np.testing.assert_allclose(cells(work, "r"), z @ numbers["O"], atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_loss_and_gradients_match_autograd(heads, reduction):
    values = random_problem(np.random.default_rng(5), heads)
    text_ = f'kind = "attention"\nx = {toml(values["x"])}\nmask = "causal()"\nheads = {heads}\ntemperature = 2\n'
    text_ += 'vocabulary = ["a", "b", "c", "d"]\ngradient = ["V", "K", "Q"]\n'
    text_ += "[weights]\n" + "\n".join(f"{n} = {toml(values[n])}" for n in "QKVOU")
    text_ += f'\n[[loss]]\ntargets = {{ 2 = "d", 5 = "a", 3 = "d" }}\nreduction = "{reduction}"\n'
    work = solve_text(text_)
    assert work.agrees
    t = {n: torch.tensor([[float(f) for f in row] for row in m], dtype=torch.float64) for n, m in values.items()}
    for n in "QKV":
        t[n].requires_grad_()
    hidden = torch.ones(SIZES["T"], SIZES["T"]).triu(1).bool()
    heads_out = []
    for h in range(heads):
        q, k, v = ((t["x"] @ t[n]).chunk(heads, -1)[h] for n in "QKV")
        heads_out.append((q @ k.T / 2).masked_fill(hidden, -math.inf).softmax(-1) @ v)
    logits = torch.cat(heads_out, -1) @ t["O"] @ t["U"]
    target_logprobs = logits.log_softmax(-1)[[1, 4, 2], [3, 0, 3]]
    loss = -target_logprobs.sum() if reduction == "sum" else -target_logprobs.mean()
    loss.backward()
    assert cells(work, "loss")[0][0] == pytest.approx(loss.item(), abs=1e-12)
    for n in "QKV":
        torch.testing.assert_close(
            torch.tensor(cells(work, f"grad_{n}"), dtype=torch.float64), t[n].grad, atol=1e-12, rtol=0
        )


def test_softmax_detects_irrational_ties():
    # 0.1 + 0.2 and 0.3 tie as numbers but not as floats; √2·√8 ties with 4.
    work = solve_text(
        'kind = "attention"\nx = [["1"], ["sqrt(2)"], ["sqrt(8)/2"], ["1"]]\ntemperature = 0\n'
        "[weights]\nQ = [[1]]\nK = [[1]]\nV = [[1]]\n"
    )
    assert exact(work, "weights") == [["0", "1/2", "1/2", "0"]] * 4
    assert exact(work, "z")[0] == ["√2"]


def test_softmax_variant_has_query_and_key_gradients():
    work = solve("sort-dedup-softmax")
    for name in "QKV":
        assert np.abs(cells(work, f"grad_{name}")).max() > 1e-3
    hard = solve("sort-dedup")
    assert not np.any(cells(hard, "grad_Q"))
    assert not np.any(cells(hard, "grad_K"))
    assert np.abs(cells(hard, "grad_V")).max() > 0.5


@pytest.mark.parametrize("heads", [1, 2])
def test_direct_q_k_v_are_solved(heads):
    """Three queries and five keys, against torch and its autograd."""
    rng = np.random.default_rng(11)

    def integers(rows, columns):
        return [[F(int(rng.integers(-3, 4))) for _ in range(columns)] for _ in range(rows)]

    values = {
        "Q": integers(3, 2 * heads),
        "K": integers(5, 2 * heads),
        "V": integers(5, heads),
        "U": integers(heads, 2),
    }
    text_ = 'kind = "attention"\nvocabulary = ["a", "b"]\ngradient = ["Q", "K", "V"]\n' + f"heads = {heads}\n"
    text_ += "".join(f"{n} = {toml(values[n])}\n" for n in "QKV") + f"[weights]\nU = {toml(values['U'])}\n"
    work = solve_text(text_ + '[[loss]]\ntargets = { 1 = "b", 3 = "a" }\n')
    assert work.agrees
    assert all(work.step(f"{n}{h}").is_given for n in "qkv" for h in (["1", "2"] if heads == 2 else [""]))
    t = {n: torch.tensor([[float(f) for f in row] for row in m], dtype=torch.float64) for n, m in values.items()}
    for n in "QKV":
        t[n].requires_grad_()
    q, k, v = (t[n].unflatten(1, (heads, -1)).transpose(0, 1) for n in "QKV")
    z = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    loss = -(z @ t["U"]).log_softmax(-1)[[0, 2], [1, 0]].sum()
    loss.backward()
    np.testing.assert_allclose(cells(work, "concat" if heads == 2 else "z"), z.detach(), atol=1e-13)
    assert cells(work, "loss")[0][0] == pytest.approx(loss.item(), abs=1e-12)
    for n in "QKV":
        np.testing.assert_allclose(cells(work, f"grad_{n}"), t[n].grad, atol=1e-12)
        assert "W_" not in work.step(f"grad_{n}").formula + work.step(f"grad_{n}").latex


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("lines", "line", "why"),
    [
        ("Q = [[1]]\nK = [[1]]\n", 1, "the key 'V' is missing"),
        ("Q = [[1]]\nK = [[1], [2]]\nV = [[1]]\n", 4, "K has 2 rows and V has 1; each key has one value"),
        ("Q = [[1, 2]]\nK = [[1]]\nV = [[1]]\n", 1, "give them the same number of columns"),
        ("Q = [[1]]\nK = [[1]]\nV = [[1]]\nx = [[1]]\n", 5, "x is given together with Q, K and V"),
        ("Q = [[1]]\nK = [[1]]\nV = [[1]]\n[weights]\nQ = [[1]]\n", 6, "the key 'Q' is unknown here"),
        ("Q = [[1]]\nK = [[1], [2]]\nV = [[1], [3]]\nmask = 'causal()'\n", 5, "mask: "),
    ],
)
def test_mismatched_shapes_raise_with_line(lines, line, why):
    with pytest.raises(ProblemError) as caught:
        solve_text('kind = "attention"\n' + lines)
    assert caught.value.line == line, str(caught.value)
    assert why in str(caught.value)


def test_softmax_weights_contain_no_power_of_e_that_cancels():
    half, e = sympy.Rational(1, 2), sympy.E
    assert softmax([3 * half, half, 5 * half]) == [x / (1 + e + e**2) for x in (e, 1, e**2)]
    assert softmax(sympy.sympify([-2, 0, -sympy.oo, -1])) == [
        1 / (1 + e + e**2),
        e**2 / (1 + e + e**2),
        0,
        e / (1 + e + e**2),
    ]
