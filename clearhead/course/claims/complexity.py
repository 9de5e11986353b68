"""Operation counts, memory, sequential steps and path lengths, against recurrent layers."""

from __future__ import annotations

import sympy as sp
import torch

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import jacobian_row, saved_tensors
from clearhead.course.claims.registry import ANSWERED, EXAM, EXERCISES, HOMEWORK, claim

n, d = sp.symbols("n d", positive=True)

# Multiply-adds of one layer over n tokens of width d.
PROJECTIONS = 4 * n * d**2
PRODUCTS = 2 * n**2 * d
ATTENTION = PROJECTIONS + PRODUCTS
RECURRENT = 2 * n * d**2  # input to hidden and hidden to hidden


def bounded(count: sp.Expr, by: sp.Expr, *sizes: sp.Symbol) -> bool:
    """Return whether count = O(by) as each of these sizes → ∞ with the others fixed."""
    return all(sp.limit(count / by, size, sp.oo).is_finite for size in sizes)


@claim(
    EXAM,
    "Q2a, table",
    statement="Self-attention costs O(n²·d).",
    method="Exact count 4nd² + 2n²d of multiply-adds against n²d, as one size grows; and at n = 1000, d = 512.",
    condition="n grows at least as fast as d, or the projections are not counted",
)
def attention_n2d(t: Experiment) -> None:
    t.record_case("n → ∞", "ratio stays finite", bounded(ATTENTION, n**2 * d, n))
    t.record_case("the products alone, d → ∞", "ratio stays finite", bounded(PRODUCTS, n**2 * d, d))
    ratio = sp.limit(ATTENTION / (n**2 * d), d, sp.oo)
    t.record_case("d → ∞ at fixed n", f"ratio → {ratio}", ratio.is_finite, in_scope=False)
    projections, products = (int(count.subs({n: 1000, d: 512})) for count in (PROJECTIONS, PRODUCTS))
    held = f"parameters {4 * 512**2:,}, weights {1000**2:,} values per head"
    t.note(f"n = 1000, d = 512: projections {projections:,}, products {products:,} multiply-adds; {held}")


@claim(
    ANSWERED,
    "Q1c",
    statement="Projections O(nd²), scores O(n²d), softmax O(n²), output O(n²d): in all O(n²d + nd²).",
    method="Each exact count against its bound, both sizes growing in turn.",
)
def attention_total(t: Experiment) -> None:
    for name, count, bound in (
        ("projections", 3 * n * d**2, n * d**2),
        ("scores", n**2 * d, n**2 * d),
        ("softmax", 3 * n**2, n**2),
        ("output", n**2 * d, n**2 * d),
        ("all", ATTENTION + 3 * n**2, n**2 * d + n * d**2),
    ):
        t.record_case(name, f"{count} = O({bound})", bounded(count, bound, n, d))


@claim(
    ANSWERED,
    "Q1c",
    statement="Self-attention needs O(n² + nd) space.",
    method="Values of Q, K, V, weights and output against n² + nd.",
)
def attention_space(t: Experiment) -> None:
    held = 4 * n * d + n**2
    t.record_case("Q, K, V, output and weights", held, bounded(held, n**2 + n * d, n, d))


@claim(
    ANSWERED,
    "Q1c, the answer's first line",
    statement="Self-attention takes O(n²d) time, a recurrent network O(nd²).",
    method="Exact counts; the same document's total is O(n²d + nd²).",
    condition="n is not much smaller than d",
)
def attention_against_rnn(t: Experiment) -> None:
    t.record_case("recurrent, both sizes", f"{RECURRENT} = O(nd²)", bounded(RECURRENT, n * d**2, n, d))
    result_text = f"{ATTENTION.subs(n, d)} against n²d = {(n**2 * d).subs(n, d)}"
    t.record_case("attention with n = d", result_text, bounded(ATTENTION.subs(n, d), d**3, d))
    ratio_limit = sp.limit(ATTENTION.subs(n, 1) / d, d, sp.oo)
    t.record_case("attention with n = 1, d → ∞", f"ratio to n²d → {ratio_limit}", ratio_limit.is_finite, in_scope=False)


@claim(
    ANSWERED,
    "Q1c",
    statement=(
        "A recurrent network holds O(nd) values if its states are kept for the backward pass, O(d) if they are not."
    ),
    method=("What autograd keeps of torch's cell over n steps of width 7, without its parameters; and the last state."),
)
def rnn_space(t: Experiment) -> None:
    cell = torch.nn.RNNCell(7, 7)
    parameter_pointers = {p.untyped_storage().data_ptr() for p in cell.parameters()}
    for learning in (True, False):
        saved_sizes = []
        for steps in (4, 8, 16, 32):
            with torch.set_grad_enabled(learning), saved_tensors() as held:
                x, h = torch.zeros(1, 7), torch.zeros(1, 7)
                for _ in range(steps):
                    h = cell(x, h)
            values = {v.untyped_storage().data_ptr(): v.numel() for v in [*held, h]}
            saved_sizes.append(sum(size for place, size in values.items() if place not in parameter_pointers))
        grown = (
            (saved_sizes[-1] - saved_sizes[-2]) / (saved_sizes[1] - saved_sizes[0])
            if learning
            else 1 + saved_sizes[-1] - saved_sizes[0]
        )
        case_name = "kept for the backward pass" if learning else "not kept"
        t.record_case(f"{case_name}, n = 4, 8, 16, 32: values", saved_sizes, grown == (4 if learning else 1))


@claim(
    ANSWERED,
    "Q1c, n ≪ d",
    statement="For n ≪ d both cost O(nd²) and are similar.",
    method="Limit of the ratio of the exact counts as d → ∞.",
)
def short_sequences_similar(t: Experiment) -> None:
    ratio = sp.limit(ATTENTION / RECURRENT, d, sp.oo)
    t.record_case("attention / recurrent", f"→ {ratio}", ratio.is_finite and ratio > 0)


@claim(
    ANSWERED,
    "Q1c, practical implications",
    statement="Recurrent networks are better for extremely long sequences.",
    method=(
        "Operations by exact count; sequential steps; and the gradient of the last state in the first input "
        "(tanh cell, width 16, weights of spectral size 0.9, length 200)."
    ),
    condition=(
        "'better' means fewer operations and less memory; not in sequential steps, nor for what must be remembered"
    ),
)
def rnn_for_long(t: Experiment) -> None:
    t.assert_above(
        "operations: attention / recurrent", sp.limit(ATTENTION / (RECURRENT * n), n, sp.oo), 0, "grows as n · {}"
    )
    rnn, attention = (longest_path(1000, recurrent=recurrent) for recurrent in (True, False))
    t.record_case(
        "steps from the first to the last of 1,000", f"{rnn} against {attention}", rnn <= attention, in_scope=False
    )
    x = t.normal(200, 16).requires_grad_()
    w = torch.linalg.qr(t.normal(16, 16)).Q * 0.9
    h = torch.zeros(16, dtype=torch.float64)
    for step in x:
        h = torch.tanh(h @ w + step)
    out = (x @ x[-1] / 4).softmax(0) @ x
    through, direct = (jacobian_row(y.sum(), x)[0].norm().item() for y in (h, out))
    case_name = "gradient reaching the first of 200 inputs: recurrent, attention"
    t.record_case(case_name, f"{through:.1e}, {direct:.1e}", through >= direct, in_scope=False)
    lengths = [10**i for i in range(1, 7)]
    layers = {"self-attention": ATTENTION, "recurrent": RECURRENT}
    curves = {name: [float(count.subs({n: x, d: 512})) for x in lengths] for name, count in layers.items()}
    title = "Multiply-adds of one layer, d = 512"
    t.draw(Lines(title, "tokens", "operations", lengths, curves, log_x=True, log_y=True))


def longest_path(n: int, *, recurrent: bool) -> int:
    """Return the length of the shortest path from the first of n positions to the farthest reachable one."""
    far = {0}
    edge = {0}
    steps = -1
    while edge:
        reached = {p + 1 for p in edge if p + 1 < n} if recurrent else set(range(n))
        edge = reached - far
        steps = steps + 1
        far |= edge
    return steps


@claim(
    HOMEWORK,
    "1.4a.2",
    statement="Between two positions a signal takes O(n) steps in a recurrent network and O(1) in self-attention.",
    method="Breadth-first search over the graph of one layer, 8 … 128 positions.",
)
def path_length(t: Experiment) -> None:
    rnn, attention = ([longest_path(m, recurrent=recurrent) for m in (8, 32, 128)] for recurrent in (True, False))
    t.assert_equal("recurrent, n = 8, 32, 128", rnn, [7, 31, 127])
    t.assert_equal("self-attention", attention, [1, 1, 1])


@claim(
    EXAM,
    "Q2a, table",
    statement="A recurrent layer needs O(n) sequential operations and has a maximum path length of O(n).",
    method="Longest chain of steps in the graph h₁ → h₂ → … → h_n.",
)
def recurrent_sequential(t: Experiment) -> None:
    for m in (4, 16, 64):
        length = longest_path(m, recurrent=True)
        t.record_case(f"n = {m}", f"{length + 1} states in a chain, path {length}", length + 1 == m)


@claim(
    HOMEWORK,
    "1.4a.5",
    statement="For n < d self-attention, O(n²d), is efficient compared with a recurrent layer, O(nd²).",
    method="The inequality of exact counts solved for n, without and with the projections.",
    condition="the projections of attention are not counted",
)
def short_is_efficient(t: Experiment) -> None:
    t.assert_equal("products alone are fewer for n below", sp.solve(sp.Eq(PRODUCTS, RECURRENT), n), [d])
    both = sp.expand(ATTENTION - RECURRENT)
    t.record_case("with projections: attention − recurrent", both, (both < 0) == True, in_scope=False)  # noqa: E712


@claim(
    EXERCISES,
    "2(c)",
    statement=(
        "Multi-head attention is Θ(n_t d²h² + n_s d²h² + n_t n_s d h), which is Θ((n_t + n_s) d_model² + n_t "
        "n_s d_model)."
    ),
    method="Sum of the line-by-line counts; both forms after d_model = d·h; ratio bounded on both sides.",
)
def multihead_theta(t: Experiment) -> None:
    nt, ns, dh, h = sp.symbols("n_t n_s d h", positive=True)
    m = dh * h
    lines = 2 * nt * m**2 + 2 * ns * m**2 + (nt + 2 * ns) * m + 2 * h * nt * ns * dh + h * nt * ns + nt * m
    printed = nt * dh**2 * h**2 + ns * dh**2 * h**2 + nt * ns * dh * h
    t.assert_equal("the two forms", sp.expand(printed - (nt + ns) * m**2 - nt * ns * m), 0, "difference {}")
    for name in (nt, ns, dh, h):
        ratio = sp.limit(lines / printed, name, sp.oo)
        at_one = ratio.subs(dict.fromkeys((nt, ns, dh, h), 1))
        t.record_case(f"{name} → ∞: lines / printed", f"{at_one} with the others 1", at_one.is_finite and at_one > 0)


# The listing's statements by their lines: from, to, what is done.
LISTING = ((2, 2, "q"), (3, 3, "k"), (4, 4, "v"), (5, 6, "rearrange q"), (7, 8, "rearrange k"), (9, 10, "rearrange v"))


@claim(
    EXERCISES,
    "2(c), the lines for rearranging",
    statement="Queries are rearranged in line 5, keys and values in lines 6 and 7.",
    method="The lines at which the statements of the printed listing begin.",
)
def theta_line_numbers(t: Experiment) -> None:
    begins = {case_name: first for first, _, case_name in LISTING}
    for case_name, line in (("q", 5), ("k", 6), ("v", 7)):
        t.assert_equal(
            f"{case_name} is rearranged in line", begins[f"rearrange {case_name}"], line, f"{{}}, printed {line}"
        )
    correct = "Each rearrangement takes two lines there: queries 5-6, keys 7-8, values 9-10; their costs are right."
    t.intended(
        correct,
        [(a, b) for a, b, case_name in LISTING if case_name.startswith("rearrange")] == [(5, 6), (7, 8), (9, 10)],
    )


@claim(
    EXERCISES,
    "2(d)",
    statement=(
        "With a large width and short sequences the projections dominate; with long sequences and a small "
        "width the products do."
    ),
    method="Limits of the ratio of the two exact counts.",
)
def bottlenecks(t: Experiment) -> None:
    ratio = PROJECTIONS / PRODUCTS
    t.assert_equal("d → ∞: projections / products", sp.limit(ratio, d, sp.oo), sp.oo)
    t.assert_equal("n → ∞: projections / products", sp.limit(ratio, n, sp.oo), 0)
    t.note(f"they are equal at n = {sp.solve(sp.Eq(ratio, 1), n)[0]}")
