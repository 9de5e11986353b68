"""Several heads: sizes, parameters, memory, what they can see and what they can do that one cannot."""

from __future__ import annotations

import math
from fractions import Fraction

import sympy as sp
import torch

from clearhead.attention import MultiHeadAttention, attend
from clearhead.claims import exact
from clearhead.claims.figure import Lines
from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import ANSWERED, EXERCISES, FINAL, HOMEWORK


def parameters(d_model: int, n_heads: int) -> dict[str, int]:
    """Of the library's layer without biases, by part."""
    mha = MultiHeadAttention(d_model, n_heads, bias=False)
    return {name: m.weight.numel() for name, m in mha.named_children() if isinstance(m, torch.nn.Linear)}


@claim(
    "head-width",
    ANSWERED,
    "Q2a.1",
    "With 8 heads and d_model = 512 each head is 64 wide, and after concatenation the width is 512 again.",
    method="The library's own layer: the width of its heads, and of what goes into W_O.",
)
def head_width(t: Trial) -> None:
    mha = MultiHeadAttention(512, 8)
    t.case("h = 8: width of a head, together", f"{mha.d_head}, {mha.o_proj.in_features}", mha.d_head == 64)
    t.case("after concatenation", mha.o_proj.in_features, mha.o_proj.in_features == 512)
    t.note(f"where h does not divide the width something is lost: six heads of {512 // 6} are {512 // 6 * 6} wide")


@claim(
    "head-parameters",
    ANSWERED,
    "Q2a.2",
    "Each projection of a head has 32,768 parameters, a head 98,304, all heads 786,432, W_O 262,144: 1,048,576 in all.",
    method="Counted in the library's own layer (8 heads, 512 wide, no biases).",
)
def head_parameters(t: Trial) -> None:
    parts = parameters(512, 8)
    one = parts["q_proj"] // 8
    t.case("one projection of one head", f"{one:,}", one == 32_768)
    t.case("one head", f"{3 * one:,}", 3 * one == 98_304)
    heads = parts["q_proj"] + parts["k_proj"] + parts["v_proj"]
    t.case("all heads", f"{heads:,}", heads == 786_432)
    t.case("W_O", f"{parts['o_proj']:,}", parts["o_proj"] == 262_144)
    t.case("in all", f"{sum(parts.values()):,}", sum(parts.values()) == 1_048_576)


@claim(
    "head-memory",
    ANSWERED,
    "Q2a.3",
    "For n tokens 8 heads hold 1,536 n values of Q, K, V, 8 n² weights and 512 n outputs: 8 n² + 2,048 n.",
    method="Sum of the listed parts, symbolically in n.",
)
def head_memory(t: Trial) -> None:
    n = sp.symbols("n", positive=True)
    qkv, weights, out = 8 * 3 * n * 64, 8 * n**2, 8 * n * 64
    t.case("Q, K, V", qkv, qkv == 1536 * n)
    t.case("outputs", out, out == 512 * n)
    total = sp.expand(qkv + weights + out)
    t.case("total", total, sp.expand(total - (8 * n**2 + 2048 * n)) == 0)


def operations(h: int, *, output_projection: bool = True) -> sp.Expr:
    """Multiply-adds of attention over n tokens, 512 wide, in h heads."""
    n = sp.symbols("n", positive=True)
    d = sp.Integer(512) / h
    return sp.expand(3 * n * 512 * d * h + 2 * h * n**2 * d + (n * 512**2 if output_projection else 0))


@claim(
    "heads-same-complexity",
    ANSWERED,
    "Q2a.4",
    "Eight heads of 64 have the same computational complexity as one head of 512.",
    method="Multiply-adds of both, symbolically: equal with an output projection each, and of one order as listed.",
)
def heads_same_complexity(t: Trial) -> None:
    n = sp.symbols("n", positive=True)
    gap = sp.expand(operations(8) - operations(1))
    t.case("both with W_O: difference in multiply-adds", gap, gap == 0)
    ratio = operations(8) / operations(1, output_projection=False)
    ends = sp.limit(ratio, n, 0), sp.limit(ratio, n, sp.oo)
    t.case("as listed, W_O only for eight: ratio for short and for long texts", ends, 1 <= min(ends) <= max(ends) < 2)
    t.note(f"numbers to exponentiate and to store are {8 * n**2} against {n**2}")


@claim(
    "heads-same-cost-homework",
    HOMEWORK,
    "1.4c",
    "With heads of width d/h the total cost is similar to one head of full width.",
    method="Multiply-adds symbolically, h = 1 … 16: ratio to one head.",
)
def heads_same_cost_homework(t: Trial) -> None:
    for h in (2, 4, 8, 16):
        ratio = sp.simplify(operations(h) / operations(1))
        t.case(f"h = {h}", f"ratio {ratio}", ratio == 1)


@claim(
    "heads-parameter-efficient",
    HOMEWORK,
    "1.2b",
    "Splitting the width over heads, as small filters do in convolutional networks, is more parameter-efficient.",
    method="Parameters of one head and of eight at width 512; of a 3 × 3 filter bank and of a dense map at 8 × 8.",
    when="it is said of the filters; heads have the same number of parameters however many there are",
)
def heads_parameter_efficient(t: Trial) -> None:
    small, dense = 16 * 9, (8 * 8 * 16) * (8 * 8)
    conv = sum(p.numel() for p in torch.nn.Conv2d(1, 16, 3, padding=1, bias=False).parameters())
    t.case(
        "16 filters of 3 × 3 against a dense map of the same sizes", f"{conv} against {dense:,}", conv == small < dense
    )
    one, eight = sum(parameters(512, 1).values()), sum(parameters(512, 8).values())
    t.case("8 heads against 1", f"{eight:,} against {one:,}", eight < one, inside=False)


def _shapes(t: Trial, d: int, wide: int, m: int, n: int, h: int, dk: int, dv: int) -> None:
    q, k, v = torch.randn(d, n), torch.randn(d, m), torch.randn(wide, m)
    heads = []
    for _ in range(h):
        wq, wk, wv = torch.randn(dk, d), torch.randn(dk, d), torch.randn(dv, wide)
        a = ((wk @ k).T @ (wq @ q) / dk**0.5).softmax(0)
        heads.append(wv @ v @ a)
    joined = torch.cat(heads)
    out = torch.randn(wide, h * dv) @ joined
    t.case("concatenated", tuple(joined.shape), tuple(joined.shape) == (h * dv, n))
    t.case("output", tuple(out.shape), tuple(out.shape) == (wide, n))


@claim(
    "multihead-shapes",
    HOMEWORK,
    "1.2a",
    "With Q (d × n), K (d × m), V (t × m) the heads concatenate to (h·d_v) × n and the output is t × n.",
    method="The operations as listed, at sizes that are distinct primes.",
)
def multihead_shapes(t: Trial) -> None:
    _shapes(t, d=7, wide=11, m=5, n=3, h=2, dk=13, dv=17)


@claim(
    "self-attention-shapes",
    HOMEWORK,
    "1.3a",
    "For self-attention over C (e × n) the output is e × n as well.",
    method="The operations as listed with Q = K = V = C, e = 7, n = 3.",
)
def self_attention_shapes(t: Trial) -> None:
    _shapes(t, d=7, wide=7, m=3, n=3, h=2, dk=5, dv=11)


@claim(
    "not-one-average",
    FINAL,
    "Part 1, Q8 (marked as not typical)",
    "Multi-head attention is not a single weighted average of the values.",
    method="Two values (1, 0) and (0, 1), hard heads that choose different tokens, W_O = I, in fractions.",
)
def not_one_average(t: Trial) -> None:
    v = exact.matrix([[1, 0], [0, 1]])
    first, second = exact.hardest([1, 0]), exact.hardest([0, 1])
    out = [exact.times([first], v)[0][0], exact.times([second], v)[0][1]]
    t.case("output; an average of the values would sum to 1", f"{exact.show(out)}, sum {sum(out)}", sum(out) != 1)
    same = [exact.times([first], v)[0][0], exact.times([first], v)[0][1]]
    t.note(f"heads that choose alike give {exact.show(same)}, which is an average")


@claim(
    "receptive-field",
    EXERCISES,
    "2(a)",
    "With argmax attention, k heads and residual connections, a node of layer n has a receptive "
    "field of (k + 1)^n inputs.",
    method="The set of inputs that reach a node, built layer by layer: choices without overlap, and choices with it.",
    when="no two paths meet and the sequence has at least (k + 1)^n tokens; otherwise it is only an upper bound",
)
def receptive_field(t: Trial) -> None:
    def field(k: int, layers: int, length: int) -> int:
        """Node 0; head j of layer l looks j·(k+1)^l places ahead (around the end): no overlap while there is room."""
        reached = {0}
        for layer in range(layers):
            reached |= {(p + j * (k + 1) ** layer) % length for p in reached for j in range(1, k + 1)}
        return len(reached)

    for k, n in ((1, 3), (2, 3), (3, 2)):
        size = field(k, n, (k + 1) ** n)
        t.case(f"k = {k}, n = {n}, {(k + 1) ** n} tokens, no overlap", f"{size}", size == (k + 1) ** n)
    t.case("k = 1, n = 1, one token", f"{field(1, 1, 1)}, not 2", field(1, 1, 1) == 2, inside=False)
    t.case("k = 1, n = 3, 5 tokens", f"{field(1, 3, 5)}, not 8", field(1, 3, 5) == 8, inside=False)
    t.draw(
        Lines(
            "Inputs reached, 20 tokens",
            "layers",
            "tokens",
            (1, 2, 3, 4, 5),
            {f"{k} head{'s' if k > 1 else ''}": [field(k, n, 20) for n in range(1, 6)] for k in (1, 2, 3)},
        )
    )


@claim(
    "heads-differ-by-start",
    ANSWERED,
    "Q2c.1",
    "Heads have independent matrices, and random initialisation gives them different gradients.",
    method="Two heads of one layer started alike and started apart: gradients of their query projections.",
)
def heads_differ_by_start(t: Trial) -> None:
    x = torch.randn(1, 5, 8, generator=t.generator, dtype=torch.float64)
    gaps = {}
    for alike in (True, False):
        mha = MultiHeadAttention(8, 2, bias=False).double()
        if alike:
            with torch.no_grad():
                for part in (mha.q_proj, mha.k_proj, mha.v_proj):
                    part.weight[4:] = part.weight[:4]
                mha.o_proj.weight[:, 4:] = mha.o_proj.weight[:, :4]
        mha(x).square().sum().backward()
        slope = mha.q_proj.weight.grad
        assert slope is not None
        gaps[alike] = (slope[:4] - slope[4:]).abs().max().item()
    t.case("started apart: the gradients differ by", f"{gaps[False]:.2e}", gaps[False] > 1e-6)
    t.case("started alike: they are equal and stay so", f"{gaps[True]:.1e}", gaps[True] < 1e-12)
    rank = int(torch.linalg.matrix_rank(mha.q_proj.weight))
    t.case("the subspaces of the two heads, 4 wide each, span together", rank, rank == 8)


@claim(
    "pseudocode-runs",
    ANSWERED,
    "Q2b, the algorithm and its notes",
    "The algorithm without a mask is multi-head attention; it can be vectorised, and autodiff finds its gradients.",
    method="Its loop, line by line, against the library's layer with the same weights (8 heads, 16 wide, 5 tokens): "
    "the output, and the gradient of the input, also by central differences.",
)
def pseudocode_runs(t: Trial) -> None:
    mha = MultiHeadAttention(16, 8, bias=False).double()
    x = torch.randn(5, 16, generator=t.generator, dtype=torch.float64, requires_grad=True)

    def algorithm(x: torch.Tensor) -> torch.Tensor:
        d_k = x.shape[1] // 8
        heads = []
        for i in range(8):
            at = slice(i * d_k, (i + 1) * d_k)
            q, k, v = (x @ part.weight[at].T for part in (mha.q_proj, mha.k_proj, mha.v_proj))
            heads.append((q @ k.T / math.sqrt(d_k)).softmax(-1) @ v)
        return torch.cat(heads, -1) @ mha.o_proj.weight.T

    looped, at_once = algorithm(x), mha(x[None])[0]
    t.case("output: loop against all heads at once", f"{(gap := (looped - at_once).abs().max()):.1e}", gap < 1e-14)
    slopes = [torch.autograd.grad(y.square().sum(), x)[0] for y in (looped, at_once)]
    t.case("gradient of the input", f"{(gap := (slopes[0] - slopes[1]).abs().max()):.1e}", gap < 1e-13)
    step = torch.zeros_like(x)
    step[2, 3] = 1e-5
    numeric = (algorithm(x + step).square().sum() - algorithm(x - step).square().sum()) / 2e-5
    t.case("one entry by differences", f"{(gap := (numeric - slopes[0][2, 3]).abs()):.1e}", gap < 1e-8)


@claim(
    "heads-one-by-one",
    ANSWERED,
    "Q2b, implementation notes",
    "If memory is short, the heads can be computed one after the other.",
    method="8 heads of width 8 at once and one by one, 32 tokens: the outputs, and how many weights exist at a time.",
)
def heads_one_by_one(t: Trial) -> None:
    q, k, v = (torch.randn(1, 8, 32, 8, generator=t.generator, dtype=torch.float64) for _ in range(3))
    at_once = attend(q, k, v)
    one_by_one = torch.cat([attend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1]) for i in range(8)], 1)
    gap = (at_once - one_by_one).abs().max().item()
    t.case("difference of the outputs", f"{gap:.1e}", gap < 1e-14)
    scores = [(q[:, :h] @ k[:, :h].mT).numel() for h in (8, 1)]
    t.case("scores at a time", f"{scores[0]:,} against {scores[1]:,}", scores[0] == 8 * scores[1])


@claim(
    "heads-redundancy",
    HOMEWORK,
    "1.4c.4",
    "Several heads are redundant: if one fails to catch something, others may make up for it.",
    method="Two hard heads over the values 3 and 5 in fractions, looking at the same token and at different ones; one "
    "is silenced, and what is left says which tokens can still be told apart.",
)
def heads_redundancy(t: Trial) -> None:
    def heads(first: int, choices: tuple[int, int], silent: int | None) -> list[Fraction]:
        """What each head gives for the values (first, 5); a silent one gives 0."""
        values = exact.matrix([[first], [5]])
        outs = [exact.times([exact.hardest([1 - c, c])], values)[0][0] for c in choices]
        return [Fraction(0) if number == silent else out for number, out in enumerate(outs)]

    alike, apart = ([heads(first, choices, silent=0) for first in (3, 4)] for choices in ((0, 0), (0, 1)))
    what = "heads that look at the same token: outputs for a first value of 3 and of 4"
    t.case(what, f"{exact.show(alike[0])} and {exact.show(alike[1])}", alike[0] != alike[1])
    t.note(f"heads that look at different tokens: {exact.show(apart[0])} and {exact.show(apart[1])}, which is lost")


def _kept(gain: float, starts: int = 16) -> tuple[float, float]:
    """|gradient at the input| / |gradient at the output| of six layers of 64, the geometric mean of a few starts.

    The same matrices, inputs and gradients, read as one head and as sixteen.
    """
    logs = []
    for _ in range(starts):
        x, slope = torch.randn(2, 1, 16, 64, dtype=torch.float64)
        matrices = [MultiHeadAttention(64, 1, bias=False).double().state_dict() for _ in range(6)]
        for weights in matrices:
            weights["q_proj.weight"] *= gain
            weights["k_proj.weight"] *= gain
        for n_heads in (1, 16):
            x.requires_grad_()
            y = x
            for weights in matrices:
                layer = MultiHeadAttention(64, n_heads, bias=False).double()
                layer.load_state_dict(weights)
                y = layer(y)
            (reached,) = torch.autograd.grad(y, x, slope)
            logs.append((reached.norm() / slope.norm()).log())
    one, many = torch.stack(logs).reshape(starts, 2).mean(0).exp().tolist()
    return one, many


@claim(
    "heads-gradient-flow",
    HOMEWORK,
    "1.4c.5",
    "Several heads are parallel paths, which can improve the propagation of gradients and make training more stable.",
    method="The gradient's length at the input of six layers of width 64 by its length at the output, the same "
    "matrices read as 1 head and as 16: started as usual, and with queries and keys ten times as large. Better is "
    "nearer to 1; the geometric mean of 16 starts.",
)
def heads_gradient_flow(t: Trial) -> None:
    one, many = _kept(1.0)
    better = abs(math.log(many)) < abs(math.log(one))
    t.case("started as usual: kept with 1 head, with 16", f"{one:.3g}, {many:.3g}", better)
    one, many = _kept(10.0, starts=4)
    t.note(f"started ten times as large it is the other way round: {one:.3g}, {many:.3g}")
