"""The exam's decoder that sorts and removes repeats: every printed matrix, the loss, the variants, the gradients.

Everything is computed in fractions from the given parameters and compared with what is printed.
"""

from __future__ import annotations

from fractions import Fraction

import sympy as sp
import torch
from torch import Tensor

from clearhead.attention import Hard, ScaledDot, Softmax, attend
from clearhead.claims import exact
from clearhead.claims.figure import Grid
from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import FINAL
from clearhead.masks import causal

W = exact.matrix([[0, 3], [1, 2], [2, 1], [3, 0]])
W_O = exact.matrix([[0, 1, 0, 1], [1, 0, 1, 0]])
E = exact.matrix([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
NAMES = ["A", "B", "C", "D", "<START>", "<STOP>"]
SEQUENCE = ["D", "A", "A", "<START>", "A", "D", "<STOP>"]
X = [E[NAMES.index(s)] for s in SEQUENCE]
Q = exact.times(X, W)
SCORES = exact.times(Q, exact.transposed(Q))


def printed(text: str) -> exact.Matrix:
    return exact.matrix([row.split() for row in text.split(";")])


def attention_matrix() -> exact.Matrix:
    return [exact.hardest([None if j > i else s for j, s in enumerate(row)]) for i, row in enumerate(SCORES)]


def logits(w_o: exact.Matrix | None = None, heads: int = 1) -> exact.Matrix:
    z = exact.times(attention_matrix(), Q)
    return exact.times(exact.times([row * heads for row in z], W_O if w_o is None else w_o), exact.transposed(E))


def probability(row: list[Fraction], name: str) -> sp.Expr:
    powers = [sp.exp(sp.Rational(x.numerator, x.denominator)) for x in row]
    return powers[NAMES.index(name)] / sum(powers)


def loss(rows: exact.Matrix, first: int) -> sp.Expr:
    """Cross-entropy of A, D, <STOP> read from three rows, the first being `first` (from 1)."""
    return -sum(sp.log(probability(rows[first - 1 + i], name)) for i, name in enumerate(("A", "D", "<STOP>")))


PLACE = "Part 3, Problem 2"


@claim("dedup-projections", FINAL, f"{PLACE}.2", "Q = K = V is the printed 7 × 2 matrix.", method="XW in fractions.")
def dedup_projections(t: Trial) -> None:
    expected = printed("3 0;0 3;0 3;0 0;0 3;3 0;0 0")
    t.case("XW", exact.show(Q), expected == Q)


@claim(
    "dedup-scores",
    FINAL,
    f"{PLACE}.2",
    "Kᵀ and QKᵀ are the printed matrices, with eight columns.",
    method="QKᵀ in fractions against the printed 7 × 8 matrix.",
)
def dedup_scores(t: Trial) -> None:
    p = printed(
        "9 0 0 0 0 9 0 0;0 9 9 0 9 0 0 0;0 9 9 0 9 0 0 0;0 0 0 0 0 0 0 0;0 9 9 0 9 0 0 0;9 0 0 0 0 9 "
        "0 0;0 0 0 0 0 0 0 0"
    )
    t.case("columns of QKᵀ for seven tokens", f"{len(SCORES[0])}, printed {len(p[0])}", p == SCORES)
    t.meant(
        "Without the eighth column of zeros the printed product is right: it is 7 × 7.",
        [row[:7] for row in p] == SCORES,
    )


@claim(
    "dedup-attention-printed",
    FINAL,
    f"{PLACE}.2, solution",
    "The causal argmax attention matrix has eight columns (and in its last row eight times 1/7).",
    method="Row sums of the printed matrix, in fractions, and comparison with the computed one.",
)
def dedup_attention_printed(t: Trial) -> None:
    last = [Fraction(1, 7)] * 8
    t.case("sum of the last printed row", sum(last), sum(last) == 1)
    found = attention_matrix()
    t.draw(
        Grid("Causal argmax attention", [[float(x) for x in row] for row in found], [s.strip("<>") for s in SEQUENCE])
    )
    t.meant("The last row has seven entries of 1/7: the matrix is 7 × 7.", found[-1] == [Fraction(1, 7)] * 7)


@claim(
    "dedup-attention",
    FINAL,
    f"{PLACE}.3, note",
    "The attention matrix is the 7 × 7 one of the note.",
    method="Causal argmax with shared ties, in fractions, and `attend` with Hard() under causal().",
)
def dedup_attention(t: Trial) -> None:
    expected = printed(
        "1 0 0 0 0 0 0;0 1 0 0 0 0 0;0 1/2 1/2 0 0 0 0;1/4 1/4 1/4 1/4 0 0 0;0 1/3 1/3 0 1/3 0 0;1/2 0 0 0 0 1/2 "
        "0;1/7 1/7 1/7 1/7 1/7 1/7 1/7"
    )
    t.case(
        "rows that agree",
        f"{sum(a == b for a, b in zip(expected, attention_matrix(), strict=True))} of 7",
        expected == attention_matrix(),
    )
    q = torch.tensor([[float(x) for x in row] for row in Q], dtype=torch.float64)[None, None]
    ours = attend(q, q, torch.eye(7, dtype=torch.float64)[None, None], causal(), weights=Hard())[0, 0]
    gap = (ours - torch.tensor([[float(x) for x in row] for row in expected], dtype=torch.float64)).abs().max().item()
    t.case("attend with Hard()", f"largest difference {gap:.1e}", gap < 1e-15)


@claim("dedup-values", FINAL, f"{PLACE}.3", "Z = PV is the printed 7 × 2 matrix.", method="PV in fractions.")
def dedup_values(t: Trial) -> None:
    z = exact.times(attention_matrix(), Q)
    expected = printed("3 0;0 3;0 3;3/4 3/2;0 3;3 0;6/7 9/7")
    t.case("PV", exact.show(z), z == expected)


@claim(
    "dedup-representations",
    FINAL,
    f"{PLACE}.3",
    "R = Z W_O is the printed matrix.",
    method="Z W_O in fractions against the printed rows.",
)
def dedup_representations(t: Trial) -> None:
    r = exact.times(exact.times(attention_matrix(), Q), W_O)
    p = printed("0 3 0 3;3 0 3 0;3/2 3/4 3/2 3/4;3 0 3 0;0 3 0 3;9/7 6/7 9/7 6/7")
    t.case("rows", f"{len(r)}, printed {len(p)}", r == p)
    t.meant(
        "One of the two equal rows (3 0 3 0) of the letters A is missing; with it the product is right.",
        [*p[:2], p[1], *p[2:]] == r,
    )


@claim(
    "dedup-logits",
    FINAL,
    f"{PLACE}.3",
    "The logits of rows 5, 6, 7 are (3,0,3,0,0,0), (0,3,0,3,0,0), (9/7,6/7,9/7,6/7,0,0).",
    method="R Eᵀ in fractions.",
)
def dedup_logits(t: Trial) -> None:
    expected = printed("3 0 3 0 0 0;0 3 0 3 0 0;9/7 6/7 9/7 6/7 0 0")
    for i in range(3):
        t.case(f"row {i + 5}", exact.show(logits()[i + 4]), logits()[i + 4] == expected[i])


@claim(
    "dedup-probabilities",
    FINAL,
    f"{PLACE}.3",
    "From these rows P(A) = P(D) = 0.4547 and P(<STOP>) = 0.0717.",
    method="Exact expressions, rounded to four digits.",
)
def dedup_probabilities(t: Trial) -> None:
    for row, name, value in ((5, "A", "0.4547"), (6, "D", "0.4547"), (7, "<STOP>", "0.0717")):
        p = probability(logits()[row - 1], name)
        t.case(f"P({name}) from row {row}", f"{sp.N(p, 8)}", f"{float(p):.4f}" == value)


@claim(
    "dedup-loss-number",
    FINAL,
    f"{PLACE}.3",
    "The sum of the three negative logarithms from rows 5, 6, 7 is 4.2114.",
    method="Exact expression to 20 digits.",
)
def dedup_loss_number(t: Trial) -> None:
    value = sp.N(loss(logits(), 5), 20)
    t.case("−Σ log P", f"{float(value):.6f}", f"{float(value):.4f}" == "4.2114")


@claim(
    "dedup-loss-rows",
    FINAL,
    f"{PLACE}.3",
    "The loss of A, D, <STOP> under teacher forcing is read from the last three rows (5, 6, 7).",
    method="A next-token loss may not depend on the token it predicts: is row 5's own input the label A? Then the "
    "loss from the rows whose inputs come before each label (4, 5, 6).",
)
def dedup_loss_rows(t: Trial) -> None:
    for row, label in ((5, "A"), (6, "D"), (7, "<STOP>")):
        t.case(f"row {row} predicts {label}; its own input is", SEQUENCE[row - 1], SEQUENCE[row - 1] != label)
    right = loss(logits(), 4)
    before = [SEQUENCE[row - 1] for row in (4, 5, 6)]
    t.note(f"from rows 4, 5, 6 the loss is {sp.N(right, 8)}")
    t.instead(
        "A, D, <STOP> are predicted from the rows of <START>, A, D (4, 5, 6); the loss is "
        f"{float(right):.4f}, not 4.2114.",
        before == ["<START>", "A", "D"] and f"{float(right):.4f}" != "4.2114",
    )


@claim(
    "dedup-two-heads",
    FINAL,
    f"{PLACE}.4",
    "With a second identical head and W_O the 4 × 4 identity, R and the loss are the same as before.",
    method="[Z Z]·I against Z W_O in fractions, and both losses.",
)
def dedup_two_heads(t: Trial) -> None:
    eye = exact.matrix([[int(i == j) for j in range(4)] for i in range(4)])
    one, two = logits(), logits(eye, heads=2)
    t.case("first row of the logits", f"{exact.show(one[0][:4])} and {exact.show(two[0][:4])}", one[0] == two[0])
    t.case(
        "loss from rows 5, 6, 7",
        f"{float(loss(one, 5)):.4f} and {float(loss(two, 5)):.4f}",
        sp.simplify(loss(one, 5) - loss(two, 5)) == 0,
    )
    swap = exact.matrix([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])
    t.instead(
        "W_O swaps the two columns of Z, so the 4 × 4 matrix that changes nothing swaps columns 1, 2 and 3, 4.",
        logits(swap, heads=2) == one,
    )


def gradients(weights: Hard | Softmax, first: int) -> dict[str, Tensor]:
    """Gradients of the printed loss (rows 5-7) or of the shifted one (rows 4-6) in the three projections."""
    x, e, w_o = (torch.tensor([[float(v) for v in row] for row in m], dtype=torch.float64) for m in (X, E, W_O))
    parts = {
        name: torch.tensor([[float(v) for v in row] for row in W], dtype=torch.float64).requires_grad_()
        for name in ("W_Q", "W_K", "W_V")
    }
    q, k, v = ((x @ w)[None, None] for w in parts.values())
    out = attend(q, k, v, causal(), scores=ScaledDot(), weights=weights)[0, 0] @ w_o @ e.T
    labels = torch.tensor([NAMES.index(s) for s in ("A", "D", "<STOP>")])
    value = torch.nn.functional.cross_entropy(out[first - 1 : first + 2], labels, reduction="sum")
    found = torch.autograd.grad(value, list(parts.values()), allow_unused=True)
    return {name: torch.zeros(4, 2) if g is None else g for name, g in zip(parts, found, strict=True)}


@claim(
    "argmax-no-gradient",
    FINAL,
    f"{PLACE}.5",
    "Argmax attention passes no gradient to the query and key projections.",
    method="Autograd through `attend` with Hard() on the exam's example.",
)
def argmax_no_gradient(t: Trial) -> None:
    found = gradients(Hard(), 5)
    for name in ("W_Q", "W_K"):
        t.case(f"gradient of {name}", f"norm {found[name].norm():g}", found[name].norm() == 0)


@claim(
    "argmax-nothing-changes",
    FINAL,
    f"{PLACE}.5",
    "With argmax attention none of W_Q, W_K, W_V is ever updated, because its gradient is zero.",
    method="Autograd through `attend` with Hard() on the exam's example, both readings of the loss.",
)
def argmax_nothing_changes(t: Trial) -> None:
    for first in (5, 4):
        size = gradients(Hard(), first)["W_V"].norm().item()
        t.case(f"gradient of W_V (loss from rows {first}-{first + 2})", f"norm {size:.4f}", size == 0)
    found = gradients(Hard(), 5)
    t.instead(
        "Only W_Q and W_K stand still; the values are averaged with fixed weights, so W_V does learn.",
        found["W_Q"].norm() == 0 and found["W_K"].norm() == 0 and found["W_V"].norm() > 0,
    )


@claim(
    "softmax-fixes",
    FINAL,
    f"{PLACE}.5",
    "The usual softmax attention with T = √d fixes the problem: the projections are updated.",
    method="Autograd through `attend` with Softmax() on the exam's example, both readings of the loss.",
)
def softmax_fixes(t: Trial) -> None:
    for first in (5, 4):
        found = gradients(Softmax(), first)
        sizes = {name: g.norm().item() for name, g in found.items()}
        t.case(
            f"gradients (rows {first}-{first + 2})",
            ", ".join(f"{k} {v:.4f}" for k, v in sizes.items()),
            min(sizes.values()) > 1e-6,
        )
    t.note(
        "<START> and <STOP> share a zero embedding, so with E fixed P(<STOP>) = P(<START>) ≤ ½: the "
        "task itself stays out of reach"
    )
