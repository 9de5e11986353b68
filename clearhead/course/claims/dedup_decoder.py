"""The exam's decoder that sorts and removes repeats: every printed matrix, the loss, the variants, the gradients.

Everything is computed in fractions from the given parameters and compared with what is printed."""

from __future__ import annotations

import sympy as sp
import torch
from torch import Tensor

from clearhead.attention import HardMax, ScaledDot, Softmax
from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import MatrixFigure
from clearhead.course.claims.numerics import max_abs_diff, single_head_attention
from clearhead.course.claims.registry import FINAL, claim
from clearhead.masks import causal

W = exact.matrix("0 3; 1 2; 2 1; 3 0")
W_O = exact.matrix("0 1 0 1; 1 0 1 0")
E = [*exact.eye(4), *exact.matrix("0 0 0 0; 0 0 0 0")]
NAMES = ["A", "B", "C", "D", "<START>", "<STOP>"]
SEQUENCE = ["D", "A", "A", "<START>", "A", "D", "<STOP>"]
X = [E[NAMES.index(s)] for s in SEQUENCE]
Q = exact.matmul(X, W)
SCORES = exact.matmul(Q, exact.transpose(Q))


P = exact.attention(Q, Q, exact.eye(7), causal=True, by=exact.hardest)  # causal argmax attention


def logits(w_o: exact.Matrix | None = None, heads: int = 1) -> exact.Matrix:
    z = [row * heads for row in exact.matmul(P, Q)]
    return exact.matmul(exact.matmul(z, W_O if w_o is None else w_o), exact.transpose(E))


def loss(rows: exact.Matrix, first: int) -> sp.Expr:
    """Return the cross-entropy of A, D, <STOP> in three rows, starting at row `first` (from 1)."""
    return -sum(
        sp.log(exact.softmax(rows[first - 1 + i])[NAMES.index(name)]) for i, name in enumerate(("A", "D", "<STOP>"))
    )


PLACE = "Part 3, Problem 2"


@claim(
    FINAL,
    f"{PLACE}.2",
    statement="Q = K = V is the printed 7 × 2 matrix.",
    method="XW in fractions.",
)
def dedup_projections(t: Experiment) -> None:
    t.assert_equal("XW", Q, exact.matrix("3 0;0 3;0 3;0 0;0 3;3 0;0 0"), exact.show)


@claim(
    FINAL,
    f"{PLACE}.2",
    statement="Kᵀ and QKᵀ are the printed matrices, with eight columns.",
    method="QKᵀ in fractions against the printed 7 × 8 matrix.",
)
def dedup_scores(t: Experiment) -> None:
    d, a, neither = "9 0 0 0 0 9 0 0", "0 9 9 0 9 0 0 0", "0 0 0 0 0 0 0 0"
    p = exact.matrix(";".join((d, a, a, neither, a, d, neither)))
    t.record_case("columns of QKᵀ for seven tokens", f"{len(SCORES[0])}, printed {len(p[0])}", p == SCORES)
    correct = "Without the eighth column of zeros the printed product is right: it is 7 × 7."
    t.intended(correct, [row[:7] for row in p] == SCORES)


@claim(
    FINAL,
    f"{PLACE}.2, solution",
    statement="The causal argmax attention matrix has eight columns (and in its last row eight times 1/7).",
    method="Row sums of the printed matrix, in fractions, and comparison with the computed one.",
)
def dedup_attention_printed(t: Experiment) -> None:
    t.assert_equal("sum of the last printed row", sum([sp.Rational(1, 7)] * 8), 1)
    t.draw(MatrixFigure("Causal argmax attention", exact.to_tensor(P).tolist(), [s.strip("<>") for s in SEQUENCE]))
    t.intended("The last row has seven entries of 1/7: the matrix is 7 × 7.", P[-1] == [sp.Rational(1, 7)] * 7)


@claim(
    FINAL,
    f"{PLACE}.3, note",
    statement="The attention matrix is the 7 × 7 one of the note.",
    method="Causal argmax with shared ties, in fractions, and `attend` with HardMax() under causal().",
)
def dedup_attention(t: Experiment) -> None:
    expected = exact.matrix(
        "1 0 0 0 0 0 0;0 1 0 0 0 0 0;0 1/2 1/2 0 0 0 0;1/4 1/4 1/4 1/4 0 0 0;0 1/3 1/3 0 1/3 0 0;1/2 0 0 0 0 1/2 "
        "0;1/7 1/7 1/7 1/7 1/7 1/7 1/7"
    )
    t.assert_equal("rows that agree", sum(a == b for a, b in zip(expected, P, strict=True)), 7, "{} of 7")
    weights_of_attend = single_head_attention(
        exact.to_tensor(Q), exact.to_tensor(Q), mask=causal(), normalizer=HardMax()
    )
    t.assert_below(
        "attend with HardMax()",
        max_abs_diff(weights_of_attend, exact.to_tensor(expected)),
        1e-15,
        "largest difference {:.1e}",
    )


@claim(
    FINAL,
    f"{PLACE}.3",
    statement="Z = PV is the printed 7 × 2 matrix.",
    method="PV in fractions.",
)
def dedup_values(t: Experiment) -> None:
    t.assert_equal("PV", exact.matmul(P, Q), exact.matrix("3 0;0 3;0 3;3/4 3/2;0 3;3 0;6/7 9/7"), exact.show)


@claim(
    FINAL,
    f"{PLACE}.3",
    statement="R = Z W_O is the printed matrix.",
    method="Z W_O in fractions against the printed rows.",
)
def dedup_representations(t: Experiment) -> None:
    r = exact.matmul(exact.matmul(P, Q), W_O)
    p = exact.matrix("0 3 0 3;3 0 3 0;3/2 3/4 3/2 3/4;3 0 3 0;0 3 0 3;9/7 6/7 9/7 6/7")
    t.record_case("rows", f"{len(r)}, printed {len(p)}", r == p)
    correct = "One of the two equal rows (3 0 3 0) of the letters A is missing; with it the product is right."
    t.intended(correct, [*p[:2], p[1], *p[2:]] == r)


@claim(
    FINAL,
    f"{PLACE}.3",
    statement="The logits of rows 5, 6, 7 are (3,0,3,0,0,0), (0,3,0,3,0,0), (9/7,6/7,9/7,6/7,0,0).",
    method="R Eᵀ in fractions.",
)
def dedup_logits(t: Experiment) -> None:
    expected = exact.matrix("3 0 3 0 0 0;0 3 0 3 0 0;9/7 6/7 9/7 6/7 0 0")
    for i in range(3):
        t.assert_equal(f"row {i + 5}", logits()[i + 4], expected[i], exact.show)


@claim(
    FINAL,
    f"{PLACE}.3",
    statement="From these rows P(A) = P(D) = 0.4547 and P(<STOP>) = 0.0717.",
    method="Exact expressions, rounded to four digits.",
)
def dedup_probabilities(t: Experiment) -> None:
    for row, name, value in ((5, "A", "0.4547"), (6, "D", "0.4547"), (7, "<STOP>", "0.0717")):
        p = exact.softmax(logits()[row - 1])[NAMES.index(name)]
        t.record_case(f"P({name}) from row {row}", f"{sp.N(p, 8)}", f"{float(p):.4f}" == value)


@claim(
    FINAL,
    f"{PLACE}.3",
    statement="The sum of the three negative logarithms from rows 5, 6, 7 is 4.2114.",
    method="Exact expression to 20 digits.",
)
def dedup_loss_number(t: Experiment) -> None:
    value = float(sp.N(loss(logits(), 5), 20))
    t.record_case("−Σ log P", f"{value:.6f}", f"{value:.4f}" == "4.2114")


@claim(
    FINAL,
    f"{PLACE}.3",
    statement="The loss of A, D, <STOP> under teacher forcing is read from the last three rows (5, 6, 7).",
    method=(
        "A next-token loss may not depend on the token it predicts: is row 5's own input the label A? Then "
        "the loss from the rows whose inputs come before each label (4, 5, 6)."
    ),
)
def dedup_loss_rows(t: Experiment) -> None:
    for row, label in ((5, "A"), (6, "D"), (7, "<STOP>")):
        t.record_case(f"row {row} predicts {label}; its own input is", SEQUENCE[row - 1], SEQUENCE[row - 1] != label)
    right = loss(logits(), 4)
    t.note(f"from rows 4, 5, 6 the loss is {sp.N(right, 8)}")
    value = f"{float(right):.4f}"
    correct = f"A, D, <STOP> are predicted from the rows of <START>, A, D (4, 5, 6); the loss is {value}, not 4.2114."
    t.correction(correct, SEQUENCE[3:6] == ["<START>", "A", "D"] and value != "4.2114")


@claim(
    FINAL,
    f"{PLACE}.4",
    statement="With a second identical head and W_O the 4 × 4 identity, R and the loss are the same as before.",
    method="[Z Z]·I against Z W_O in fractions, and both losses.",
)
def dedup_two_heads(t: Experiment) -> None:
    one_head_logits = logits()
    two = logits(exact.eye(4), heads=2)
    t.record_case(
        "first row of the logits", exact.pair(one_head_logits[0][:4], two[0][:4]), one_head_logits[0] == two[0]
    )
    result_text = f"{float(loss(one_head_logits, 5)):.4f} and {float(loss(two, 5)):.4f}"
    t.record_case("loss from rows 5, 6, 7", result_text, sp.simplify(loss(one_head_logits, 5) - loss(two, 5)) == 0)
    swap = exact.matrix("0 1 0 0; 1 0 0 0; 0 0 0 1; 0 0 1 0")
    correct = "W_O swaps the two columns of Z, so the 4 × 4 matrix that changes nothing swaps columns 1, 2 and 3, 4."
    t.correction(correct, logits(swap, heads=2) == one_head_logits)


def gradients(normalizer: HardMax | Softmax, first: int) -> dict[str, Tensor]:
    """Return the gradients of the printed loss (rows 5-7) or the shifted one (rows 4-6) for the three projections."""
    x, e, w_o = (exact.to_tensor(m) for m in (X, E, W_O))
    parts = {name: exact.to_tensor(W).requires_grad_() for name in ("W_Q", "W_K", "W_V")}
    q, k, v = (x @ w for w in parts.values())
    out = single_head_attention(q, k, v, mask=causal(), scores=ScaledDot(), normalizer=normalizer) @ w_o @ e.T
    labels = torch.tensor([NAMES.index(s) for s in ("A", "D", "<STOP>")])
    value = torch.nn.functional.cross_entropy(out[first - 1 : first + 2], labels, reduction="sum")
    results = torch.autograd.grad(value, list(parts.values()), materialize_grads=True)
    return dict(zip(parts, results, strict=True))


@claim(
    FINAL,
    f"{PLACE}.5",
    statement="Argmax attention passes no gradient to the query and key projections.",
    method="Autograd through `attend` with HardMax() on the exam's example.",
)
def argmax_no_gradient(t: Experiment) -> None:
    results = gradients(HardMax(), 5)
    for name in ("W_Q", "W_K"):
        t.assert_equal(f"gradient of {name}", results[name].norm(), 0, "norm {:g}")


@claim(
    FINAL,
    f"{PLACE}.5",
    statement="With argmax attention none of W_Q, W_K, W_V is ever updated, because its gradient is zero.",
    method="Autograd through `attend` with HardMax() on the exam's example, both readings of the loss.",
)
def argmax_nothing_changes(t: Experiment) -> None:
    for first in (5, 4):
        size = gradients(HardMax(), first)["W_V"].norm().item()
        t.assert_equal(f"gradient of W_V (loss from rows {first}-{first + 2})", size, 0, "norm {:.4f}")
    q, k, v = (gradient.norm() for gradient in gradients(HardMax(), 5).values())
    correct = "Only W_Q and W_K stand still; the values are averaged with fixed weights, so W_V does learn."
    t.correction(correct, q == k == 0 < v)


@claim(
    FINAL,
    f"{PLACE}.5",
    statement="The usual softmax attention with T = √d fixes the problem: the projections are updated.",
    method="Autograd through `attend` with Softmax() on the exam's example, both readings of the loss.",
)
def softmax_fixes(t: Experiment) -> None:
    for first in (5, 4):
        sizes = {name: g.norm().item() for name, g in gradients(Softmax(), first).items()}
        case_name = f"gradients (rows {first}-{first + 2})"
        t.record_case(case_name, ", ".join(f"{k} {v:.4f}" for k, v in sizes.items()), min(sizes.values()) > 1e-6)
    limit = "<START> and <STOP> share a zero embedding, so with E fixed P(<STOP>) = P(<START>) ≤ ½"
    t.note(f"{limit}, and the task cannot be solved")
