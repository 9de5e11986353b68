"""The formulas of chapters 5 to 17 suffice to solve their worksheets: every cell is answered by hand and graded."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.course import exercises
from tests.docs.pages import read_page
from tests.docs.sheets import inputs_of, to_answer

SHEETS: dict[str, tuple[str, object]] = {}
"""Worksheet → the chapter that names it, and its solution."""


def solution_of(sheet, chapter):
    def register(function):
        SHEETS[sheet] = (chapter, function)
        return function

    return register


def standardize(x):
    """Shift and scale each row to mean 0 and variance 1."""
    centered = x - x.mean(-1, keepdim=True)
    return centered / centered.square().mean(-1, keepdim=True).sqrt()


@solution_of("permutation-equivariance", "05-positions")
def permutation_equivariance(P, X, W_Q, W_K, W_V):
    S, S_P = X @ W_Q @ (X @ W_K).T, P @ X @ W_Q @ (P @ X @ W_K).T
    A, A_P, V_P = S.softmax(-1), S_P.softmax(-1), P @ X @ W_V
    Z, Z_P = A @ X @ W_V, A_P @ V_P
    return {"PtP": P.T @ P, "S": S, "S_P": S_P, "A": A, "A_P": A_P, "V_P": V_P, "Z": Z, "Z_P": Z_P}


@solution_of("sinusoid-position-3", "05-positions")
def sinusoid(d, base):
    divisors = [base ** (2 * i / d) for i in (2, 10)]
    angles = [21 / c for c in divisors]
    encoding = [f(angle) for angle in angles for f in (math.sin, math.cos)]
    return {"divisors": [divisors], "angles": [angles], "encoding": [encoding]}


@solution_of("residual-gradient", "06-block")
def residual_gradient(x, A, B, C, D, f, L):
    F = (x @ A).relu() @ B
    y = x + F
    G = (y @ C).relu() @ D
    J_F = (A @ torch.diag((x @ A)[0] > 0).double() @ B).T
    J_G = (C @ torch.diag((y @ C)[0] > 0).double() @ D).T
    identity = torch.eye(2, dtype=torch.float64)
    return {
        "F": F,
        "y": y,
        "JF": J_F,
        "J1": identity + J_F,
        "G": G,
        "z": y + G,
        "JG": J_G,
        "J2": (identity + J_G) @ (identity + J_F),
        "without": J_G @ J_F,
        "deep": [[(1 + slope) ** L, slope**L] for slope in f[0].tolist()],
    }


def layer_norm(x, gamma, beta, eps):
    z = standardize(x)
    y = gamma * z + beta
    return {
        "mean": x.mean(),
        "centered": x - x.mean(),
        "variance": (x - x.mean()).square().mean(),
        "z": z,
        "y": y,
        "length": (y - beta).norm(),
        "promised": gamma[0, 0].abs() * math.sqrt(x.shape[1]),
    }


solution_of("layer-norm-identity", "06-block")(layer_norm)
solution_of("layer-norm-negative-scale", "17-course-errors")(layer_norm)


@solution_of("layer-norm-batch-norm", "06-block")
def layer_norm_batch_norm(X):
    row = [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    column = [[1, 0, 0], [1, 0, 0], [1, 0, 0]]
    depends = [[1, 1], [0, 1], [1, 0], [0, 0]]
    return {"L": standardize(X), "B": standardize(X.T).T, "by_L": row, "by_B": column, "depends": depends}


@solution_of("schedule", "09-training")
def schedule(lr_max, warmup, total):
    fractions, rates = [], []
    for step in (0, 1, 2000, 4000, 42_000, 61_000, 80_000, 118_000, 175_000, 232_000):
        is_rising = step <= warmup
        f = step / warmup if is_rising else (step - warmup) / (total - warmup)
        fractions.append([f])  # the column of words is not graded
        rates.append([lr_max * f if is_rising else lr_max / 2 * (1 + math.cos(math.pi * f))])
    return {"fraction": fractions, "rate": rates}


@solution_of("infinity-norm-step", "09-training")
def infinity_norm_step(w, x, y, λ, η):
    u = (w @ x.T).item()
    P = 1 / (1 + math.exp(-u))
    is_largest = (w.abs() == w.abs().max()).double()
    data, penalty = (P - y) * x, λ * w * is_largest
    return {
        "u": u,
        "P": P,
        "data": data,
        "e": is_largest,
        "norm": w.abs().max() ** 2,
        "penalty": penalty,
        "gradient": data + penalty,
        "new_w": w - η * (data + penalty),
    }


@solution_of("vit-tokens", "13-vision")
def vit_tokens(P, H, W, c, d):
    n_patches = H * W / P**2
    n_tokens, pixels = n_patches + 1, P**2 * c
    return {
        "grid": [[H / P, W / P]],
        "patches": n_patches,
        "tokens": n_tokens,
        "pixels": pixels,
        "projection": pixels * d + d,
        "embeddings": [[d, n_tokens * d]],
        "weights": n_tokens**2,
        "doubled": [[4 * n_patches + 1, (4 * n_patches + 1) ** 2]],
    }


@solution_of("attention-1000-512", "15-cost")
def attention_cost(d, h, n):
    projection, pairs = 2 * n * d * d, 2 * n * n * d
    return {
        "d_head": d / h,
        "per_head": 3 * d * d / h,
        "parameters": [[d * d]] * 4,
        "parameters_total": 4 * d * d,
        "stored": [[3 * n * d], [h * n * n], [n * d]],
        "stored_total": h * n * n + 4 * n * d,
        "weights_bytes": 4 * h * n * n,
        "operations": [[projection], [projection], [projection], [pairs], [pairs], [projection]],
        "operations_total": 4 * n * d * (2 * d + n),
    }


@solution_of("theta-lines", "15-cost")
def theta_lines(h, d, t, s):
    lines = ["t*d^2", "s*d^2", "s*d^2", "t*s*d", "t*s*d", "t*d^2"]
    numbers = [t * d * d, s * d * d, s * d * d, t * s * d, t * s * d, t * d * d]
    return {
        "lines": [[line] for line in lines],
        "total": "2*d^2*(s + t) + 2*d*s*t",
        "numbers": [[number] for number in numbers],
        "both": [[2 * d * d * (t + s)], [2 * t * s * d]],
        "short": 1 / (2 * d),
        "crossing": "2*d",
        "at_crossing": 1,
    }


@solution_of("complexity-table", "15-cost")
def complexity_table(n, d, k, r):
    operations = ["n^2*d", "n*d^2", "k*n*d^2", "r*n*d"]
    paths = ["1", "n", "n/k", "n/r"]
    counts = [n * n * d, n * d * d, k * n * d * d, r * n * d]
    path_lengths = [1, n, n / k, math.log(n, k), n / r]
    return {
        "table": [[o, q, p] for o, q, p in zip(operations, ["1", "n", "1", "1"], paths, strict=True)],
        "dilated": "log(n)/log(k)",
        "numbers": [[count] for count in counts],
        "layers": [[math.ceil(length)] for length in path_lengths],
        "crossing": [["d"], ["k*d"], ["r"]],
        "at_crossing": [[0], [0], [0]],
        "cheaper": n / d,
    }


@pytest.mark.parametrize("name", SHEETS)
def test_formulas_of_the_chapter_solve_its_exercise(name):
    chapter, solution = SHEETS[name]
    assert f"clearhead exercise solve {name} --seed 7" in read_page(f"book/{chapter}.md").text
    sheet = exercises.solve(exercises.variant(name, 7))
    answers = solution(**inputs_of(sheet))
    grades = exercises.grade_text(sheet, "\n".join(f"{key} = {to_answer(answer)}" for key, answer in answers.items()))
    assert grades.is_right, str(grades)
    assert not grades.unanswered
