"""Permutations: attention with rearranged inputs, with and without positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations, product

import torch

from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.numerics import join_numbers, max_abs_diff, single_head_attention
from clearhead.course.claims.registry import ANSWERED, EXAM, FINAL, HOMEWORK, claim
from clearhead.course.claims.vision import patches_moved, small
from clearhead.nn import MultiHeadAttention
from clearhead.nn.positions import NoPE, Sinusoidal

WORDS = {"cat": [1, 0], "chased": [1, 1], "dog": [0, 2]}


def self_attention(x: exact.Matrix, *, causal: bool = False) -> exact.Matrix:
    """Return the output of one layer in fractions; its projections are neither symmetric nor the identity."""
    q, k, v = (exact.matmul(x, exact.matrix(w)) for w in ("1 0; 1 1", "0 1; 1 0", "1 2; 0 1"))
    return exact.attention(q, k, v, causal=causal)


FOUR = exact.matrix("1 0; 0 1; 2 1; -1 1")


def rearranged(x: exact.Matrix, order: Sequence[int]) -> exact.Matrix:
    return [x[i] for i in order]


def equivariant(causal: bool = False) -> int:
    """Return for how many of the 24 orders of 4 tokens f(πX) = π f(X)."""
    y = self_attention(FOUR, causal=causal)
    orders = permutations(range(4))
    return sum(self_attention(rearranged(FOUR, o), causal=causal) == rearranged(y, o) for o in orders)


# Three places state it in nearly the same words and get the same verdict.
INVARIANCE_METHOD = (
    "f(πX) against f(X): 4 tokens in all 24 orders, summed and read at one token that stays; 2 tokens, swapped."
)
INVARIANCE_CONDITION = (
    "the outputs are pooled or taken at one token such as [CLS]; the outputs themselves move with their inputs"
)


def invariant(t: Experiment) -> None:
    """Return whether f(πX) = f(X): pooled, at one token, and for the whole output."""
    rows = {order: self_attention(rearranged(FOUR, order)) for order in permutations(range(4))}
    sums = {tuple(sum(column) for column in zip(*y, strict=True)) for y in rows.values()}
    t.assert_equal("summed over the tokens, 24 orders", len(sums), 1, "distinct sums: {}")
    first = {tuple(y[order.index(0)]) for order, y in rows.items()}
    t.assert_equal("at token 1, wherever it stands", len(first), 1, "distinct outputs: {}")
    y, swapped = (self_attention(rearranged(FOUR, order)) for order in ((0, 1), (1, 0)))
    t.record_case("two tokens, swapped", exact.pair(y, swapped, " → "), y == swapped, in_scope=False)
    t.note(f"it is equivariant, f(πX) = π f(X), in {equivariant()} of 24 orders")


@claim(
    ANSWERED,
    "Q1d",
    statement="Self-attention is permutation invariant.",
    method=INVARIANCE_METHOD,
    condition=INVARIANCE_CONDITION,
)
def permutation_invariant_answered(t: Experiment) -> None:
    invariant(t)


@claim(
    HOMEWORK,
    "1.3b",
    statement="The operations of self-attention are permutation-invariant.",
    method=INVARIANCE_METHOD,
    condition=INVARIANCE_CONDITION,
)
def permutation_invariant_homework(t: Experiment) -> None:
    invariant(t)


@claim(
    HOMEWORK,
    "1.5b",
    statement="The Transformer is inherently permutation-invariant.",
    method=INVARIANCE_METHOD,
    condition=INVARIANCE_CONDITION,
)
def permutation_invariant_vision(t: Experiment) -> None:
    invariant(t)


@claim(
    EXAM,
    "Q3b",
    statement="Self-attention is permutation-equivariant: f(PX) = P f(X).",
    method="All 24 orders of 4 tokens in fractions; all 120 orders of 5 through MultiHeadAttention in float64.",
)
def equivariance(t: Experiment) -> None:
    t.assert_equal("4 tokens, exactly", equivariant(), 24, "{} of 24 orders")
    mha = MultiHeadAttention(6, 2).double()
    x = t.normal(1, 5, 6)
    y = mha(x)
    gap = max(max_abs_diff(mha(x[:, list(o)]), y[:, list(o)]) for o in permutations(range(5)))
    t.assert_below("5 tokens, two heads, biases", gap, 1e-12, "largest difference {:.1e}")
    t.note(f"under a causal mask only {equivariant(causal=True)} of 24 orders agree")


@claim(
    ANSWERED,
    "Q1d",
    statement="Swapping positions i and j does not change the final representations.",
    method="Three tokens in fractions, the first two swapped: compared token by token, then position by position.",
    condition="a token's representation is compared at its new position; position by position, i and j are swapped",
)
def swap_changes_nothing(t: Experiment) -> None:
    x = exact.matrix(list(WORDS.values()))
    order = (1, 0, 2)
    y = self_attention(x)
    swapped = self_attention(rearranged(x, order))
    for i, token in enumerate(order):
        case_name = f"token {token + 1}, now at position {i + 1}"
        t.record_case(case_name, exact.pair(y[token], swapped[i], " → "), y[token] == swapped[i])
    for i in range(3):
        t.record_case(f"position {i + 1}", exact.pair(y[i], swapped[i], " → "), y[i] == swapped[i], in_scope=False)


@claim(
    ANSWERED,
    "Q1d, 'mathematical proof'",
    statement="f(π(X)) = π(f(X)) for any permutation π.",
    method="All 24 orders of 4 tokens, in fractions.",
)
def equivariance_formula(t: Experiment) -> None:
    t.assert_equal("4 tokens", equivariant(), 24, "{} of 24 orders")
    t.note("this is equivariance, though it is offered as the proof of invariance")


@claim(
    ANSWERED,
    "Q1d, 'mathematical proof' of permutation invariance",
    statement="That f(π(X)) = π(f(X)) for any permutation π proves that f is permutation invariant.",
    method=(
        "The functions self-attention and f(X) = X, which both satisfy the formula for all 24 orders of 4 tokens: in "
        "how many orders is f(π(X)) = f(X)?"
    ),
)
def formula_proves_invariance(t: Experiment) -> None:
    orders = list(permutations(range(4)))

    def fixed(f: Callable[[exact.Matrix], exact.Matrix]) -> int:
        """Return for how many orders the output stays as it is."""
        return sum(f(rearranged(FOUR, order)) == f(FOUR) for order in orders)

    t.assert_equal("f(X) = X: orders in which f(π(X)) = f(X)", fixed(lambda x: x), 24, "{} of 24")
    t.assert_equal("self-attention: the same", fixed(self_attention), 24, "{} of 24")
    pooled = {tuple(sum(column) for column in zip(*self_attention(rearranged(FOUR, o)), strict=True)) for o in orders}
    t.correction(
        "The formula says equivariance: the outputs move with the inputs. Invariance, f(π(X)) = f(X), holds for their "
        "sum or mean.",
        equivariant() == 24 and len(pooled) == 1,
    )


@claim(
    ANSWERED,
    "Q1d, illustration",
    statement="Without positions 'cat chased dog' and 'dog chased cat' give identical embeddings.",
    method="Both sentences in fractions, compared word by word, pooled, and position by position.",
    condition="the embeddings are compared word by word or pooled, and no causal mask is used",
)
def cat_chased_dog(t: Experiment) -> None:
    first_order, two = ["cat", "chased", "dog"], ["dog", "chased", "cat"]
    y, z = (self_attention(exact.matrix([WORDS[w] for w in s])) for s in (first_order, two))
    words = dict(zip(first_order, y, strict=True))
    again = dict(zip(two, z, strict=True))
    t.record_case("word by word", f"cat: {exact.pair(words['cat'], again['cat'])}", words == again)
    pooled, same = ([sum(c) for c in zip(*m, strict=True)] for m in (y, z))
    t.assert_equal("summed over the sentence", pooled, same, exact.show)
    t.record_case("place by place", f"first place {exact.pair(y[0], z[0])}", y == z, in_scope=False)


@claim(
    ANSWERED,
    "Q1d",
    statement="Attention weights depend only on content similarity: they are proportional to exp(q·k).",
    method=(
        "`attend` on 5 random tokens of width 4, in every order: is the weight of a token for a token the same at all "
        "positions? Then ratios of weights against exp((q·k − q·l)/√4) and against exp(q·k − q·l)."
    ),
    condition="q·k stands for the scaled score q·k/√d_k of the document's own eq. 4",
)
def weights_by_content(t: Experiment) -> None:
    x = t.normal(5, 4)
    outputs = single_head_attention(x, x)
    moved = [
        max_abs_diff(single_head_attention(x[[*o]], x[[*o]]), outputs[[*o]][:, [*o]]) for o in permutations(range(5))
    ]
    t.assert_below("120 orders: largest change of a weight", max(moved), 1e-12)
    ratios = (outputs / outputs[:, :1]).log()
    for name, scale in (("scaled", 2), ("as the line has it, without the scale", 1)):
        scores = x @ x.T / scale
        gap = max_abs_diff(ratios, scores - scores[:, :1])
        case_name = f"{name}: logarithms of the ratios of weights, largest difference"
        t.assert_below(case_name, gap, 1e-12, "{:.2g}", in_scope=scale == 2)


@claim(
    HOMEWORK,
    "1.3b",
    statement="The weights of self-attention depend only on the pairwise dot products of the embeddings.",
    method=(
        "Three tokens and the same turned by 90°, which keeps every dot product: weights in fractions, with "
        "W_Q and W_K the identity, and with two other matrices."
    ),
    condition="W_Q and W_K leave angles alone, or the dot products are those of the projected queries and keys",
)
def weights_from_dot_products(t: Experiment) -> None:
    x = exact.matrix("1 0; 0 1; 2 1")
    rotated = exact.matmul(x, exact.matrix("0 1; -1 0"))
    unit = "1 0; 0 1"
    for name, wq, wk in (("W_Q = W_K = 1", unit, unit), ("W_Q = (1 0; 1 1), W_K = (0 1; 1 0)", "1 0; 1 1", "0 1; 1 0")):
        sides = [[exact.matmul(y, exact.matrix(w)) for w in (wq, wk)] for y in (x, rotated)]
        before, after = (exact.attention(q, k, exact.eye(3)) for q, k in sides)
        case_name = f"{name}: first row before and after"
        t.record_case(case_name, exact.pair(before[0], after[0]), before == after, in_scope=wq == unit)


@claim(
    ANSWERED,
    "Q1d, effectiveness",
    statement=(
        "Adding position encodings breaks the symmetry: the same tokens in another order give other representations."
    ),
    method=(
        "MultiHeadAttention over x + a table, sinusoidal and as learned ones begin: no order but the first of "
        "24 is equivariant."
    ),
)
def positions_break_symmetry(t: Experiment) -> None:
    mha = MultiHeadAttention(8, 2).double()
    x = t.normal(1, 4, 8)
    learned = t.normal(4, 8)
    for name, table in (("sinusoidal", Sinusoidal().table(4, 8).double()), ("learned", learned)):
        y = mha(x + table)
        gaps = [max_abs_diff(mha(x[:, [*o]] + table), y[:, [*o]]) for o in permutations(range(4))]
        t.assert_above(f"{name}: 23 orders other than the first", min(gaps[1:]), 1e-6, "smallest difference {:.1e}")


@claim(
    HOMEWORK,
    "1.5b",
    statement=(
        "Without positional embeddings a vision Transformer cannot tell apart arrangements of the same patches."
    ),
    method="A small VisionTransformer without positions on an image and on its patches shuffled: logits of [CLS].",
)
def patches_shuffled(t: Experiment) -> None:
    image = t.normal(1, 1, 8, 12)
    shuffled = patches_moved(image, torch.randperm(6, generator=t.generator).tolist())
    without, learned = (small(positions=positions) for positions in (NoPE(), None))
    t.assert_below("no positions: logits", max_abs_diff(without(image), without(shuffled)), 1e-12, "differ by {:.1e}")
    case_name = "learned positions, for comparison"
    t.assert_above(case_name, max_abs_diff(learned(image), learned(shuffled)), 1e-6, "differ by {:.1e}")


@claim(
    FINAL,
    "Part 3, Problem 2.1",
    statement=(
        "Without positional encodings the Transformer treats its input as a bag of symbols and ignores the "
        "sequential structure."
    ),
    method="Last output for every order of D, A, A before a <START>, one causal layer, in fractions; then two.",
    condition="it has one layer, as in this exam; a second causal layer sees the order",
)
def bag_of_symbols(t: Experiment) -> None:
    letters = {"A": [1, 0], "D": [0, 1], "S": [0, 0]}
    first_order = []
    two = []
    orders = sorted(set(permutations("DAA")))
    for order in orders:
        x = exact.matrix([letters[c] for c in (*order, "S")])
        first = self_attention(x, causal=True)
        first_order.append(first[-1])
        # Whole numbers again, so that the second layer's scores are whole: the map is the same for every order.
        second = exact.matrix([[round(12 * c) for c in row] for row in first])
        two.append(self_attention(second, causal=True)[-1])
    t.record_case(
        f"one layer, {', '.join(map(''.join, orders))}",
        exact.show(first_order[0]),
        first_order[0] == first_order[1] == first_order[2],
    )
    first_entries = [float(row[0]) for row in two]
    case_name = "two causal layers, the same orders: first entry of the last output"
    t.record_case(case_name, join_numbers(first_entries, ".4f"), len(set(first_entries)) == 1, in_scope=False)


@claim(
    FINAL,
    "Part 3, Problem 2.1",
    statement=(
        "The right output (sorted, without repeats) does not depend on the order of the input: DAA, ADA, AAD give AD."
    ),
    method="Every string of up to 5 letters over A, B, C, D, against all strings with the same letters.",
)
def dedup_order_free(t: Experiment) -> None:
    words = [word for length in range(1, 6) for word in product("ABCD", repeat=length)]
    by_letters: dict[str, set[str]] = {}
    for word in words:
        by_letters.setdefault("".join(sorted(word)), set()).add("".join(sorted(set(word))))
    most = max(map(len, by_letters.values()))
    t.assert_equal(f"{len(words)} inputs in {len(by_letters)} bags", most, 1, "most outputs in a bag: {}")
    t.assert_equal("DAA", min(by_letters["AAD"]), "AD")


@claim(
    HOMEWORK,
    "1.4b",
    statement="The same word gets different representations in different contexts.",
    method="'dog' after two contexts, in fractions.",
)
def same_word_other_context(t: Experiment) -> None:
    a, b = (self_attention(exact.matrix([WORDS[other], WORDS["dog"]]))[-1] for other in ("cat", "chased"))
    t.record_case("'dog' after 'cat' and after 'chased'", exact.pair(a, b), a != b)
