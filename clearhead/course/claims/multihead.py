"""Several heads: sizes, parameters, memory, what they can see and what they can do that one cannot."""

from __future__ import annotations

import math

import sympy as sp
import torch

from clearhead.attention import attend
from clearhead.course.claims import exact
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import jacobian_row, max_abs_diff, n_parameters
from clearhead.course.claims.registry import ANSWERED, EXERCISES, FINAL, HOMEWORK, claim
from clearhead.course.exercises.problem_types.counts import count_reachable
from clearhead.nn import MultiHeadAttention

n = sp.symbols("n", positive=True)  # tokens


def parameters(d_model: int, n_heads: int) -> dict[str, int]:
    """Return the parameter counts of the library's layer without biases, by part."""
    mha = MultiHeadAttention(d_model, n_heads, bias=False)
    return {name: m.weight.numel() for name, m in mha.named_children() if isinstance(m, torch.nn.Linear)}


@claim(
    ANSWERED,
    "Q2a.1",
    statement="With 8 heads and d_model = 512 each head is 64 wide, and after concatenation the width is 512 again.",
    method="The library's own layer: the width of its heads, and of what goes into W_O.",
)
def head_width(t: Experiment) -> None:
    mha = MultiHeadAttention(512, 8)
    t.record_case("h = 8: width of a head, together", f"{mha.d_head}, {mha.o_proj.in_features}", mha.d_head == 64)
    t.assert_equal("after concatenation", mha.o_proj.in_features, 512)
    t.note(f"where h does not divide the width something is lost: six heads of {512 // 6} are {512 // 6 * 6} wide")


@claim(
    ANSWERED,
    "Q2a.2",
    statement=(
        "Each projection of a head has 32,768 parameters, a head 98,304, all heads 786,432, W_O 262,144: "
        "1,048,576 in all."
    ),
    method="Counted in the library's own layer (8 heads, 512 wide, no biases).",
)
def head_parameters(t: Experiment) -> None:
    parts = parameters(512, 8)
    single_head = parts["q_proj"] // 8
    t.assert_equal("one projection of one head", single_head, 32_768, "{:,}")
    t.assert_equal("one head", 3 * single_head, 98_304, "{:,}")
    t.assert_equal("all heads", parts["q_proj"] + parts["k_proj"] + parts["v_proj"], 786_432, "{:,}")
    t.assert_equal("W_O", parts["o_proj"], 262_144, "{:,}")
    t.assert_equal("in all", sum(parts.values()), 1_048_576, "{:,}")


@claim(
    ANSWERED,
    "Q2a.3",
    statement="For n tokens 8 heads hold 1,536 n values of Q, K, V, 8 n² weights and 512 n outputs: 8 n² + 2,048 n.",
    method="Sum of the listed parts, symbolically in n.",
)
def head_memory(t: Experiment) -> None:
    qkv = 8 * 3 * n * 64
    weights = 8 * n**2
    out = 8 * n * 64
    t.assert_equal("Q, K, V", qkv, 1536 * n)
    t.assert_equal("outputs", out, 512 * n)
    t.assert_equal("total", sp.expand(qkv + weights + out), 8 * n**2 + 2048 * n)


def operations(h: int, *, output_projection: bool = True) -> sp.Expr:
    """Return the multiply-adds of attention over n tokens with d_model 512 and h heads."""
    d = sp.Integer(512) / h
    return sp.expand(3 * n * 512 * d * h + 2 * h * n**2 * d + (n * 512**2 if output_projection else 0))


@claim(
    ANSWERED,
    "Q2a.4",
    statement="Eight heads of 64 have the same computational complexity as one head of 512.",
    method="Multiply-adds of both, symbolically: equal with an output projection each, and of one order as listed.",
)
def heads_same_complexity(t: Experiment) -> None:
    t.assert_equal("both with W_O: difference in multiply-adds", sp.expand(operations(8) - operations(1)), 0)
    ratio = operations(8) / operations(1, output_projection=False)
    ends = sp.limit(ratio, n, 0), sp.limit(ratio, n, sp.oo)
    t.record_case(
        "as listed, W_O only for eight: ratio for short and for long texts", ends, 1 <= min(ends) <= max(ends) < 2
    )
    t.note(f"numbers to exponentiate and to store are {8 * n**2} against {n**2}")


@claim(
    HOMEWORK,
    "1.4c",
    statement="With heads of width d/h the total cost is similar to one head of full width.",
    method="Multiply-adds symbolically, h = 1 … 16: ratio to one head.",
)
def heads_same_cost_homework(t: Experiment) -> None:
    for h in (2, 4, 8, 16):
        t.assert_equal(f"h = {h}", sp.simplify(operations(h) / operations(1)), 1, "ratio {}")


@claim(
    HOMEWORK,
    "1.2b",
    statement=(
        "Splitting the width over heads, as small filters do in convolutional networks, is more parameter-efficient."
    ),
    method="Parameters of one head and of eight at width 512; of a 3 × 3 filter bank and of a dense map at 8 × 8.",
    condition="it refers to filters; heads have the same number of parameters however many there are",
)
def heads_parameter_efficient(t: Experiment) -> None:
    small = 16 * 9
    dense = (8 * 8 * 16) * (8 * 8)
    conv = n_parameters(torch.nn.Conv2d(1, 16, 3, padding=1, bias=False))
    case_name = "16 filters of 3 × 3 against a dense map of the same sizes"
    t.record_case(case_name, f"{conv} against {dense:,}", conv == small < dense)
    single_head = sum(parameters(512, 1).values())
    eight = sum(parameters(512, 8).values())
    t.record_case("8 heads against 1", f"{eight:,} against {single_head:,}", eight < single_head, in_scope=False)


def _shapes(t: Experiment, d: int, wide: int, m: int, n: int, h: int, dk: int, dv: int) -> None:
    q, k, v = torch.randn(d, n), torch.randn(d, m), torch.randn(wide, m)
    heads = []
    for _ in range(h):
        wq, wk, wv = torch.randn(dk, d), torch.randn(dk, d), torch.randn(dv, wide)
        a = ((wk @ k).T @ (wq @ q) / dk**0.5).softmax(0)
        heads.append(wv @ v @ a)
    joined = torch.cat(heads)
    out = torch.randn(wide, h * dv) @ joined
    t.assert_equal("concatenated", tuple(joined.shape), (h * dv, n))
    t.assert_equal("output", tuple(out.shape), (wide, n))


@claim(
    HOMEWORK,
    "1.2a",
    statement="With Q (d × n), K (d × m), V (t × m) the heads concatenate to (h·d_v) × n and the output is t × n.",
    method="The operations as listed, at sizes that are distinct primes.",
)
def multihead_shapes(t: Experiment) -> None:
    _shapes(t, d=7, wide=11, m=5, n=3, h=2, dk=13, dv=17)


@claim(
    HOMEWORK,
    "1.3a",
    statement="For self-attention over C (e × n) the output is e × n as well.",
    method="The operations as listed with Q = K = V = C, e = 7, n = 3.",
)
def self_attention_shapes(t: Experiment) -> None:
    _shapes(t, d=7, wide=7, m=3, n=3, h=2, dk=5, dv=11)


@claim(
    FINAL,
    "Part 1, Q8 (marked as not typical)",
    statement="Multi-head attention is not a single weighted average of the values.",
    method="Two values (1, 0) and (0, 1), hard heads that choose different tokens, W_O = I, in fractions.",
)
def not_one_average(t: Experiment) -> None:
    first, second = (exact.matmul([exact.hardest(scores)], exact.eye(2))[0] for scores in ([1, 0], [0, 1]))
    out, same = [first[0], second[1]], [first[0], first[1]]
    t.record_case(
        "output; an average of the values would sum to 1", f"{exact.show(out)}, sum {sum(out)}", sum(out) != 1
    )
    t.note(f"heads with the same choice give {exact.show(same)}, which is an average")


@claim(
    EXERCISES,
    "2(a)",
    statement=(
        "With argmax attention, k heads and residual connections, a node of layer n has a receptive field of "
        "(k + 1)^n inputs."
    ),
    method=("The set of inputs that reach a node, built layer by layer: choices without overlap, and choices with it."),
    condition=("no two paths meet and the sequence has at least (k + 1)^n tokens; otherwise it is only an upper bound"),
)
def receptive_field(t: Experiment) -> None:
    for k, n in ((1, 3), (2, 3), (3, 2)):
        t.assert_equal(
            f"k = {k}, n = {n}, {(k + 1) ** n} tokens, no overlap", count_reachable(k, n, (k + 1) ** n), (k + 1) ** n
        )
    t.assert_equal("k = 1, n = 1, one token", count_reachable(1, 1, 1), 2, "{}, not 2", in_scope=False)
    t.assert_equal("k = 1, n = 3, 5 tokens", count_reachable(1, 3, 5), 8, "{}, not 8", in_scope=False)
    curves = {f"{k} head{'s' if k > 1 else ''}": [count_reachable(k, n, 20) for n in range(1, 6)] for k in (1, 2, 3)}
    t.draw(Lines("Inputs reached, 20 tokens", "layers", "tokens", (1, 2, 3, 4, 5), curves))


@claim(
    ANSWERED,
    "Q2c.1",
    statement="Heads have independent matrices, and random initialization gives them different gradients.",
    method=(
        "Two heads of one layer with equal and with different initial values: gradients of their query projections."
    ),
)
def heads_differ_by_start(t: Experiment) -> None:
    x = t.normal(1, 5, 8)
    gaps = []
    for alike in (True, False):
        mha = MultiHeadAttention(8, 2, bias=False).double()
        if alike:
            with torch.no_grad():
                for part in (mha.q_proj.weight, mha.k_proj.weight, mha.v_proj.weight, mha.o_proj.weight.T):
                    part[4:] = part[:4]
        gaps.append(max_abs_diff(*jacobian_row(mha(x).square().sum(), mha.q_proj.weight).chunk(2)))
    t.assert_above("started apart: the gradients differ by", gaps[1], 1e-6, "{:.2e}")
    t.assert_below("equal initial values: the gradients are equal and remain equal", gaps[0], 1e-12)
    rank = int(torch.linalg.matrix_rank(mha.q_proj.weight))
    t.assert_equal("the subspaces of the two heads, 4 wide each, span together", rank, 8)


@claim(
    ANSWERED,
    "Q2b, the algorithm and its notes",
    statement=(
        "The algorithm without a mask is multi-head attention; it can be vectorized, and autodiff finds its gradients."
    ),
    method=(
        "Its loop, line by line, against the library's layer with the same weights (8 heads, 16 wide, 5 "
        "tokens): the output, and the gradient of the input, also by central differences."
    ),
)
def pseudocode_runs(t: Experiment) -> None:
    mha = MultiHeadAttention(16, 8, bias=False).double()
    x = t.normal(5, 16).requires_grad_()

    def algorithm(x: torch.Tensor) -> torch.Tensor:
        heads = []
        d_k = x.shape[1] // 8
        for i in range(8):
            at = slice(i * d_k, (i + 1) * d_k)
            q, k, v = (x @ part.weight[at].T for part in (mha.q_proj, mha.k_proj, mha.v_proj))
            heads.append((q @ k.T / math.sqrt(d_k)).softmax(-1) @ v)
        return torch.cat(heads, -1) @ mha.o_proj.weight.T

    looped = algorithm(x)
    at_once = mha(x[None])[0]
    t.assert_below("output: loop against all heads at once", max_abs_diff(looped, at_once), 1e-14)
    slopes = [jacobian_row(y.square().sum(), x) for y in (looped, at_once)]
    t.assert_below("gradient of the input", max_abs_diff(*slopes), 1e-13)
    step = torch.zeros_like(x)
    step[2, 3] = 1e-5
    numeric = (algorithm(x + step).square().sum() - algorithm(x - step).square().sum()) / 2e-5
    t.assert_below("one entry by differences", max_abs_diff(numeric, slopes[0][2, 3]), 1e-8)


@claim(
    ANSWERED,
    "Q2b, implementation notes",
    statement="If memory is short, the heads can be computed one after the other.",
    method=("8 heads of width 8 at once and one by one, 32 tokens: the outputs, and how many weights exist at a time."),
)
def heads_one_by_one(t: Experiment) -> None:
    q, k, v = (t.normal(1, 8, 32, 8) for _ in range(3))
    at_once = attend(q, k, v)
    one_by_one = torch.cat([attend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1]) for i in range(8)], 1)
    t.assert_below("difference of the outputs", max_abs_diff(at_once, one_by_one), 1e-14)
    scores = [(q[:, :h] @ k[:, :h].mT).numel() for h in (8, 1)]
    t.record_case("scores at a time", f"{scores[0]:,} against {scores[1]:,}", scores[0] == 8 * scores[1])


@claim(
    HOMEWORK,
    "1.4c.4",
    statement="Several heads are redundant: if one fails to catch something, others may make up for it.",
    method=(
        "Two hard heads over the values 3 and 5 in fractions that attend to the same token or to different ones; the "
        "output of one head is set to 0: which tokens does the rest still distinguish?"
    ),
)
def heads_redundancy(t: Experiment) -> None:
    # The first head attends to the first token and is set to 0; the second attends to the same token, or to the other.
    alike, other = (
        [[0, *exact.matmul([exact.hardest(scores)], exact.matrix([[first], [5]]))[0]] for first in (3, 4)]
        for scores in ([1, 0], [0, 1])
    )
    case_name = "heads that attend to the same token: outputs for a first value of 3 and of 4"
    t.record_case(case_name, exact.pair(alike[0], alike[1]), alike[0] != alike[1])
    t.note(f"heads that attend to different tokens: {exact.pair(other[0], other[1])}, so that the value is lost")


def log_gradient_ratios(gain: float, starts: int) -> torch.Tensor:
    """Return ln |gradient at the input| / |gradient at the output| of six layers of width 64: (starts, 2).

    The same matrices, inputs and gradients, with one head and with sixteen; `gain` multiplies W_Q and W_K.
    """
    logs = []
    for _ in range(starts):
        x, gradient = torch.randn(2, 1, 16, 64, dtype=torch.float64)
        matrices = [MultiHeadAttention(64, 1, bias=False).double().state_dict() for _ in range(6)]
        for weights in matrices:
            weights["q_proj.weight"] *= gain
            weights["k_proj.weight"] *= gain
        for n_heads in (1, 16):
            y = x.requires_grad_()
            for weights in matrices:
                layer = MultiHeadAttention(64, n_heads, bias=False).double()
                layer.load_state_dict(weights)
                y = layer(y)
            logs.append((jacobian_row(y, x, gradient).norm() / gradient.norm()).log())
    return torch.stack(logs).reshape(starts, 2)


@claim(
    HOMEWORK,
    "1.4c.5",
    statement=(
        "Several heads are parallel paths, which can improve the propagation of gradients and make training "
        "more stable."
    ),
    method=(
        "The norm of the gradient at the input of six layers of width 64, divided by its norm at the output, the same "
        "matrices read as 1 head and as 16: started as usual (48 starts), and with queries and keys ten times as large "
        "(8 starts). Better is nearer to 1, by more than two standard errors over the starts."
    ),
    condition=(
        "the scores are small, as at the usual start, where the gain is a few percent; with queries and keys ten times "
        "as large it is several heads that let gradients explode"
    ),
)
def heads_gradient_flow(t: Experiment) -> None:
    for name, gain, starts in (("started as usual", 1.0, 48), ("queries and keys ten times as large", 10.0, 8)):
        logs = log_gradient_ratios(gain, starts)
        single_head, many = logs.mean(0).exp().tolist()
        gains = logs[:, 0].abs() - logs[:, 1].abs()
        mean = gains.mean().item()
        error = 2 * gains.std().item() / math.sqrt(starts)
        result_text = f"{single_head:.3g}, {many:.3g}; nearer to 1 by {mean:+.3f} ± {error:.3f} (logarithm)"
        case_name = f"{name}: kept with 1 head, with 16"
        t.record_case(case_name, result_text, mean - error > 0, in_scope=gain == 1.0)


@claim(
    ANSWERED,
    "Q2c.3",
    statement="Different heads find different optima in parameter space.",
    method=(
        "Two heads of one layer and a loss: the gradient of head 1's query projection, before and after a change of "
        "head 2's. If each head had its own optimum, it would not depend on the other."
    ),
)
def heads_own_optima(t: Experiment) -> None:
    mha = MultiHeadAttention(8, 2, bias=False).double()
    x, target = t.normal(1, 5, 8), t.normal(1, 5, 8)

    def gradient_of_head_1() -> torch.Tensor:
        return jacobian_row((mha(x) - target).square().mean(), mha.q_proj.weight)[:4]

    before = gradient_of_head_1()
    with torch.no_grad():
        mha.q_proj.weight[4:] += t.normal(4, 8)
    change = max_abs_diff(gradient_of_head_1(), before)
    t.assert_below("head 2 changed: the gradient of head 1 changes by", change, 1e-12)
    t.correction(
        "All heads are parts of one parameter vector and minimize one loss: the best values of a head depend on the "
        "other heads.",
        change > 1e-6,
    )


@claim(
    ANSWERED,
    "Q2c.3",
    statement="Natural specialization of the heads emerges to minimize redundancy.",
    method=(
        "Two heads with the weights ½, ½ on two tokens and one step of gradient descent on the expected squared error: "
        "the overlap of their weights, Σ min(a₁, a₂), if each token is asked for, and if their mean is asked for."
    ),
    condition="different heads lower the loss; equal heads that already give the right output remain equal",
)
def specialization_redundancy(t: Experiment) -> None:
    targets = {"each token asked for": torch.eye(2), "their mean asked for": torch.full((1, 2), 0.5)}
    for name, target in targets.items():
        scores = torch.zeros(2, 2, requires_grad=True)
        read = torch.eye(2) if len(target) == 2 else torch.full((1, 2), 0.5)
        # The values are independent with variance 1, so the expected squared error is a sum of squares.
        gradient = jacobian_row((read @ scores.softmax(-1) - target).square().sum(), scores)
        overlap = (scores - gradient).softmax(-1).amin(0).sum().item()
        t.record_case(f"{name}: overlap", f"1.000 → {overlap:.3f}", overlap < 1, in_scope=len(target) == 2)
