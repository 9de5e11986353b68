"""The functions and formulas of the first four chapters suffice to solve every cell of their exercises.

Answers are graded like a student's. Functions that a chapter defines are taken from the chapter; formulas are written
out here as in the chapter.
"""

from __future__ import annotations

import contextlib
import io
import math
import os

import pytest
import torch

from clearhead import masks
from clearhead.course import exercises
from tests.docs.pages import execute, read_page
from tests.docs.sheets import inputs_of, to_answer

SHEETS: dict[str, tuple[str, object]] = {}
"""Worksheet → its chapter, and a solution with the functions of that chapter."""


ALL_SHEETS = "WHOLE" in os.environ
SLOW = ("perturb-key-query", "softmax-jacobian", "sparse-16")
"""Worksheets that take seconds to solve: only `make docs` includes them."""


def solution_of(sheet, chapter):
    def keep(function):
        SHEETS[sheet] = (chapter, function)
        return function

    return keep


@solution_of("softmax-temperature", "01-lookup")
def softmax_temperature(book, z, T, c):
    p = torch.stack([book.softmax(z[0], tau) for tau in T[0]])
    ratio = p[:, :1] / p[:, 1:2]
    equal = torch.stack([book.softmax(torch.full((4,), c), tau) for tau in T[0]])
    return {"p": p, "ratio": ratio, "cold": book.hard(z[0])[None], "hot": torch.full((1, 4), 1 / 4), "equal": equal}


@solution_of("permutation-by-attention", "01-lookup")
def permutation_by_attention(book, b, P, C):
    S = b * P
    A, A_hard = book.softmax(S), torch.stack([book.hard(row) for row in S]).double()
    H, H_hard = A @ C, A_hard @ C
    return {"S": S, "A": A, "H": H, "A_hard": A_hard, "H_hard": H_hard, "identity": C, "off": (H - H_hard).abs().max()}


@solution_of("attention-by-hand", "02-scores")
def attention_by_hand(book, q, k, v):
    S = q @ k.T
    W = book.softmax(S / math.sqrt(q.shape[-1]))
    return {"scores": S, "weights": W, "z": W @ v}


@solution_of("score-variance", "02-scores")
def score_variance(book, d, μ, p, ν, r):
    variance = p**2 * r**2 + μ**2 * r**2 + ν**2 * p**2
    return {
        "products": torch.outer(torch.tensor([μ - p, μ + p]), torch.tensor([ν - r, ν + r])),
        "mean": μ * ν,
        "square": (μ**2 + p**2) * (ν**2 + r**2),
        "variance": variance,
        "two": 2 * variance,
        "score_mean": d * μ * ν,
        "score": d * variance,
        "deviation": math.sqrt(d * variance),
        "scaled": variance,
        "unit": [[d, 1]],
    }


@solution_of("softmax-jacobian", "02-scores")
def softmax_jacobian(book, s):
    a, sharper = book.softmax(s[0]), book.softmax(4 * s[0])
    J = book.jacobian(a)
    epsilon, norm = 1 - a.max(), J.square().sum()
    return {
        "a": a[None],
        "sums": a.sum(),
        "J": J,
        "rows_of_J": J.sum(-1, keepdim=True).round(decimals=9),
        "norm": norm,
        "epsilon": epsilon,
        "bound": len(a) ** 2 * epsilon**2,
        "within": norm / (len(a) ** 2 * epsilon**2),
        "sharper": sharper[None],
        "norm_sharper": book.jacobian(sharper).square().sum(),
    }


@solution_of("scale-key", "02-scores")
def scale_key(book, α, i, Q, K):
    i, scaled = int(i) - 1, K.clone()
    scaled[i] *= α
    S, S_scaled = Q @ K.T, Q @ scaled.T
    score = S[:, [i]]
    before, after = book.softmax(S), book.softmax(S_scaled)
    return {
        "S": S,
        "A": before,
        "score": score,
        "scaled": scaled,
        "S_scaled": S_scaled,
        "A_scaled": after,
        "gain": score.sign(),
    }


@solution_of("perturb-key-query", "02-scores")
def perturb_key_query(book, β, i, j, Q, K, V, ε):
    i, j, perturbed, other = int(i) - 1, int(j) - 1, K.clone(), Q.clone()
    perturbed[i] += ε[0]
    other[j] += ε[0]
    A, A_key, A_query = (book.softmax(β * q @ k.T) for q, k in ((Q, K), (Q, perturbed), (other, K)))
    H = A @ V
    changed = lambda weights: ((weights @ V - H).abs().sum(-1, keepdim=True) > 1e-12).double()  # noqa: E731
    return {
        "A": A,
        "H": H,
        "perturbed": perturbed,
        "A_key": A_key,
        "by_key": changed(A_key),
        "v_gap": V[i] - H,
        "first": β * (Q @ ε[0])[:, None] * A[:, [i]] * (V[i] - H),
        "A_query": A_query,
        "by_query": changed(A_query),
    }


@solution_of("sparse-16", "03-masks")
def sparse_16(book, mask, n, also):
    n, table = int(n), masks.parse(mask).dense(int(n), int(n))
    saving = lambda pairs: 1 - pairs / n**2  # noqa: E731
    counts = [masks.parse(text).count(n) for text in also]
    return {
        "mask": table.double(),
        "keys": table.sum(-1).double()[None],
        "allowed": table.sum(),
        "density": table.sum() / n**2,
        "saving": saving(table.sum()),
        "also": [[pairs, saving(pairs)] for pairs in counts],
    }


@solution_of("masks-by-architecture", "03-masks")
def masks_by_architecture(book, s, u, t, v):
    s, u, t, v = map(int, (s, u, t, v))
    encoder, decoder = masks.padding([u]).dense(s, s)[0, 0], masks.causal().dense(t, t)
    cross = masks.padding([u]).dense(t, s)[0, 0]
    words = masks.padding([v]).dense(t, t)[0, 0]
    leak = [[int(s > u)], [0], [int(s > u)], [0], [int(s > u)]]  # to the right of every word: causal hides it already
    future = [[0], [1], [0], [1], [0]]  # decoders predict the words that follow
    return {
        "source_words": encoder[:1].double(),
        "target_words": words[:1].double(),
        "leak": leak,
        "future": future,
        "table": [[*pad, *ahead] for pad, ahead in zip(leak, future, strict=True)],
        "encoder": encoder.double(),
        "decoder": decoder.double(),
        "cross": cross.double(),
        "pairs": [[s * u], [t * (t + 1) // 2], [t * u]],
        "same_rows": (decoder & ~words)[:v].sum(),
        "left": 1,
    }


@solution_of("convolution-by-attention", "03-masks")
def convolution_by_attention(book, w, X):
    n = len(X)
    distance = torch.arange(n)[None] - torch.arange(n)[:, None] + 1
    C = torch.where(masks.window(1, 1).dense(n, n), w[0][distance.clamp(0, 2)], 0.0)
    A = torch.softmax(C.log(), -1)
    share = C.sum(-1, keepdim=True)
    H, Y = A @ X, C @ X
    return {
        "S": C.log(),
        "A": A,
        "H": H,
        "C": C,
        "Y": Y,
        "inside": (H - Y)[1:-1].round(decimals=9),
        "shares": share,
        "ends": Y / share,
    }


@solution_of("multi-head-shapes", "04-heads")
def multi_head_shapes(book, h, d, n, m):
    h, d, n, m = map(int, (h, d, n, m))
    D = d // h
    shapes = [(n, d), (m, d), (n, D), (m, D), (m, D), (n, m), (n, m), (n, D), (n, d), (n, d)]
    return {
        "width": D,
        "shapes": shapes,
        "per_head": 3 * d * D,
        "heads": 3 * d * d,
        "total": 4 * d * d,
        "biased": 4 * d * d + 4 * d,
        "weights": h * n * m,
        "one_head": 4 * d * d,
    }


@solution_of("eight-heads", "04-heads")
def eight_heads(book, d, h, n):
    d, h = int(d), int(h)
    D, projection, products = d // h, f"{2 * d * d}*n", f"{2 * d}*n^2"
    return {
        "d_head": D,
        "per_head": 3 * d * D,
        "parameters": [[d * d]] * 4,
        "parameters_total": 4 * d * d,
        "stored": [[f"{3 * d}*n"], [f"{h}*n^2"], [f"{d}*n"]],
        "stored_total": f"{h}*n^2 + {4 * d}*n",
        "weights_bytes": f"{4 * h}*n^2",
        "operations": [[x] for x in (projection, projection, projection, products, products, projection)],
        "operations_total": f"{8 * d * d}*n + {4 * d}*n^2",
    }


@solution_of("receptive-field", "04-heads")
def receptive_field(book, heads, layers, tokens):
    sizes = [[(k + 1) ** n for n in range(1, layers + 1)] for k in heads]
    return {
        "branching": [[k + 1] for k in heads],
        "formula": [[f"{k + 1}^n"] for k in heads],
        "sizes": sizes,
        "capped": [[min(size, tokens) for size in row] for row in sizes],
    }


class ChapterFunctions:
    """The names that a chapter defines, as attributes."""

    def __init__(self, chapter):
        with contextlib.redirect_stdout(io.StringIO()):
            self.__dict__.update(execute(read_page(f"book/{chapter}.md")))


@pytest.fixture(scope="module")
def book():
    """Return a function that runs a chapter once and returns its names."""
    read = {}

    def chapter_of(name):
        if name not in read:
            read[name] = ChapterFunctions(name)
        return read[name]

    return chapter_of


@pytest.mark.parametrize("name", [name for name in SHEETS if ALL_SHEETS or name not in SLOW])
def test_chapter_functions_solve_its_exercise(name, book):
    chapter, solution = SHEETS[name]
    assert f"clearhead exercise solve {name} --seed 7" in read_page(f"book/{chapter}.md").text
    sheet = exercises.solve(exercises.variant(name, 7))
    answers = solution(book(chapter), **inputs_of(sheet))
    grades = exercises.grade_text(sheet, "\n".join(f"{key} = {to_answer(answer)}" for key, answer in answers.items()))
    assert grades.is_right, str(grades)
    assert not grades.unanswered


def test_every_exercise_of_the_first_four_chapters_has_a_solution():
    named = {}
    for chapter in ("01-lookup", "02-scores", "03-masks", "04-heads"):
        for words in read_page(f"book/{chapter}.md").commands:
            if words[1:3] == ["exercise", "solve"] and "--seed" in words:
                named[words[3]] = chapter
    assert named == {name: chapter for name, (chapter, _) in SHEETS.items()}
