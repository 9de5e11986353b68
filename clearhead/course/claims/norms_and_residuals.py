"""Layer norm, batch norm and residual connections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

import sympy as sp
import torch
from torch import nn

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.figure import Lines
from clearhead.course.claims.numerics import fit, gradient_ratio, jacobian_row, max_abs_diff
from clearhead.course.claims.registry import EXAM, EXERCISES, FINAL, HOMEWORK, claim
from clearhead.nn import Block, BlockConfig, FeedForward, MultiHeadAttention, PostNorm, PreNorm, ReLU
from clearhead.nn import LayerNorm as LayerNormChoice


def dependence(norm: nn.Module, t: Experiment) -> set[str]:
    """Return the inputs on which y[0, 0] depends, by its gradient: own, same column, same row, elsewhere."""
    x = t.normal(5, 7).requires_grad_()
    moved = jacobian_row(norm(x)[0, 0], x).abs() > 1e-12
    parts = {"own": moved[0, 0], "other rows, same column": moved[1:, 0], "same row": moved[0, 1:]}
    return {name for name, part in (parts | {"elsewhere": moved[1:, 1:]}).items() if bool(part.any())}


@claim(
    EXERCISES,
    "3(a)",
    statement="Layer norm's y[i, j] depends on x[i, j] and on the rest of its row only.",
    method="Gradient of one output in every input, 5 × 7.",
)
def layer_norm_depends(t: Experiment) -> None:
    results = dependence(nn.LayerNorm(7).double(), t)
    t.record_case("depends on", ", ".join(sorted(results)), results == {"own", "same row"})


@claim(
    EXERCISES,
    "3(a)",
    statement="Batch norm's y[i, j] depends on x[i, j] and on the rest of its column only.",
    method="Gradient of one output in every input, 5 × 7, with the statistics of the batch, as the solution says.",
)
def batch_norm_depends(t: Experiment) -> None:
    norm = nn.BatchNorm1d(7).double()
    results = dependence(norm, t)
    t.record_case("training: depends on", ", ".join(sorted(results)), results == {"own", "other rows, same column"})
    results = dependence(norm.eval(), t)
    t.note(f"in evaluation, with fixed statistics, it depends on: {', '.join(sorted(results))}")


@claim(
    EXERCISES,
    "3(a), solution",
    statement="Layer normalization is elementwise: it is applied to each vector of the batch on its own.",
    method=(
        "nn.LayerNorm on a vector alone and in a batch; then, exactly, x = (0, 0, 3) and (0, 3, 3): does the "
        "first output depend on another entry?"
    ),
    condition=(
        "the elements are the vectors of the batch; 'elementwise' usually means entry by entry, and within a vector "
        "each output depends on every entry"
    ),
)
def layer_norm_elementwise(t: Experiment) -> None:
    batch = t.normal(5, 7)
    norm = LayerNormChoice().build(7).double()
    alone = torch.stack([norm(row) for row in batch])
    t.assert_below("five vectors alone and together", max_abs_diff(norm(batch), alone), 1e-14, "differ by {:.1g}")
    a, b = normalized((0, 0, 3)), normalized((0, 3, 3))
    case_name = "(0, 0, 3) and (0, 3, 3), which differ in their second entry: first outputs"
    t.record_case(case_name, f"{a[0]} and {b[0]}", a[0] == b[0], in_scope=False)


def normalized(x: Sequence[sp.Expr]) -> list[sp.Expr]:
    mean = sp.Rational(1, len(x)) * sum(x)
    variance = sp.Rational(1, len(x)) * sum((v - mean) ** 2 for v in x)
    return [sp.simplify((v - mean) / sp.sqrt(variance)) for v in x]


@claim(
    HOMEWORK,
    "1.4e.2",
    statement="Layer norm normalizes over the features, for each example independently.",
    method=(
        "nn.LayerNorm on 2 examples of 3 positions: does a change in one example reach the other, and does a change at "
        "one position reach the other positions of its example?"
    ),
    condition=(
        "an example is a single position: the positions of one sequence are normalized independently as well, each "
        "with its own mean and variance"
    ),
)
def layer_norm_per_example(t: Experiment) -> None:
    norm = nn.LayerNorm(5).double()
    x = t.normal(2, 3, 5)
    changed = x.clone()
    changed[0, 1] += t.normal(5)
    gaps = (norm(changed) - norm(x)).abs().amax(-1)
    t.assert_equal("position 2 of example 1 perturbed: change in example 2", gaps[1].max(), 0, "{:g}")
    other_gap = max(gaps[0, 0].item(), gaps[0, 2].item())
    case_name = "the same: change at the other positions of example 1, if they shared their statistics"
    t.record_case(case_name, f"{other_gap:g}", other_gap > 0, in_scope=False)


@claim(
    EXERCISES,
    "3(b)",
    statement="With scalar scale γ and shift β (ε = 0), ‖y − β1‖ = γ√d.",
    method="Squares in fractions, x = (1, 2, 4, 9) and others.",
    condition="γ ≥ 0 and x is not constant",
)
def layer_norm_length(t: Experiment) -> None:

    def length(x: tuple[int, ...], gamma: int) -> sp.Expr:
        return sp.simplify(sp.sqrt(sum((gamma * v) ** 2 for v in normalized(x))))

    for x, gamma in (((1, 2, 4, 9), 3), ((-5, 0, 5), 1)):
        t.assert_equal(f"x = {x}, γ = {gamma}", length(x, gamma), sp.simplify(gamma * sp.sqrt(len(x))))
    t.assert_equal("x = (0, 1), γ = −1", length((0, 1), -1), -sp.sqrt(2), f"{{}}, not {-sp.sqrt(2)}", in_scope=False)
    t.assert_equal("x = (2, 2), γ = 1", length((2, 2), 1), sp.sqrt(2), in_scope=False)


@claim(
    EXERCISES,
    "3(b), solution",
    statement="The normalized z is orthogonal to 1 and has length √d.",
    method="Symbolically for three free entries.",
)
def layer_norm_z(t: Experiment) -> None:
    z = normalized(sp.symbols("x:3", real=True))
    t.assert_equal("zᵀ1 · σ", sp.simplify(sum(z)), 0)
    t.assert_equal("‖z‖²", sp.simplify(sum(v**2 for v in z)), 3)


@claim(
    HOMEWORK,
    "1.4e.1",
    statement="The Jacobian of x + F(x) is I + ∂F/∂x.",
    method="Symbolically for a free two-dimensional F.",
)
def residual_gradient_formula(t: Experiment) -> None:
    x = sp.Matrix(sp.symbols("x y"))
    f = sp.Matrix([sp.Function("f")(*x), sp.Function("g")(*x)])
    gap = sp.simplify((x + f).jacobian(x) - sp.eye(2) - f.jacobian(x))
    t.record_case("difference", gap.tolist(), gap == sp.zeros(2))


@claim(
    HOMEWORK,
    "1.4e.1, with the block LayerNorm(x + Sublayer(x))",
    statement="In the block LayerNorm(x + F(x)) gradients can bypass the sub-layer through the identity connection.",
    method=(
        "Jacobians of LayerNorm(x + F(x)), post-norm, and of x + F(LayerNorm(x)), pre-norm, at x = (1, 2, 4, 9) with a "
        "sub-layer that passes nothing (F = 0): their rank, and whether they are the identity."
    ),
    condition=(
        "only F is bypassed: the norm after the sum is not, and changes every gradient on the way; in a pre-norm block "
        "x + F(LayerNorm(x)) the identity bypasses both"
    ),
)
def residual_bypass(t: Experiment) -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    norm = nn.LayerNorm(4, eps=0.0).double()

    def silent(h: torch.Tensor) -> torch.Tensor:
        return 0.0 * h

    def jacobian(block: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        result = torch.autograd.functional.jacobian(block, x)
        assert isinstance(result, torch.Tensor)
        return result

    post = jacobian(lambda h: norm(h + silent(h)))
    pre = jacobian(lambda h: h + silent(norm(h)))
    ranks = [int(torch.linalg.matrix_rank(matrix, tol=1e-9)) for matrix in (post, pre)]
    t.record_case("gradients of 4 directions that pass: post-norm, pre-norm", ranks, min(ranks) > 0)
    gaps = [max_abs_diff(matrix, torch.eye(4, dtype=torch.float64)) for matrix in (post, pre)]
    t.assert_below("pre-norm: distance of the Jacobian from the identity", gaps[1], 1e-12)
    t.assert_below("post-norm: the same", gaps[0], 1e-12, "{:.2f}", in_scope=False)
    t.note("the post-norm Jacobian is J_LN (I + ∂F/∂x): J_LN sends the direction 1 and the normalized vector to 0")


@claim(
    HOMEWORK,
    "1.4e.1",
    statement="The identity term ensures gradients of at least 1.",
    method="d/dx (x + F(x)) for F = −x, −x/2 and x, exactly.",
)
def residual_at_least_one(t: Experiment) -> None:
    x = sp.symbols("x", real=True)
    for f in (-x, -x / 2, x):
        gradient = sp.diff(x + f, x)
        t.record_case(f"F(x) = {f}", f"gradient {gradient}", gradient >= 1)
    correct = "It is 1 + F′(x): near 1 where the sub-layer's own gradient is small, and anything if it is not."
    t.correction(correct, sp.diff(x + sp.sin(x) / 10, x) == 1 + sp.cos(x) / 10)


@claim(
    EXAM,
    "Q5c",
    statement="Residual connections help to mitigate vanishing gradients in deep Transformers.",
    method=(
        "The norm of the gradient at the input of 12 layers of attention and feed-forward (without layer norm), "
        "divided by its norm at their output, without and with residual connections, three draws; then the gradient "
        "through 40 tanh layers (orthogonal weights times 0.5)."
    ),
)
def residual_deep(t: Experiment) -> None:
    weights = [torch.linalg.qr(t.normal(16, 16)).Q * 0.5 for _ in range(40)]
    x = t.normal(16).requires_grad_()
    depths = (1, 5, 10, 20, 40)
    sizes: dict[str, list[float]] = {"plain": [], "residual": []}
    for skip, results in enumerate(sizes.values()):
        for depth in depths:
            h = x
            for w in weights[:depth]:
                h = h * float(skip) + torch.tanh(h @ w)
            results.append(jacobian_row(h.sum(), x).norm().item())
    plain, residual = (results[-1] for results in sizes.values())
    t.record_case("40 layers: plain, residual", f"{plain:.1e}, {residual:.1e}", plain < 1e-6 < 1e-2 < residual)
    for draw in range(3):
        ratios = [_through_layers(skip, 3 * t.seed + draw) for skip in (0.0, 1.0)]
        case_name = f"12 Transformer layers, draw {draw + 1}: remaining without and with residual connections"
        t.record_case(case_name, f"{ratios[0]:.1e}, {ratios[1]:.1e}", ratios[0] < 1e-4 < 1 < ratios[1])
    t.draw(Lines("Gradient of the output in the input", "layers", "norm", depths, sizes, log_y=True))


def _through_layers(skip: float, seed: int) -> float:
    """Return |gradient at the input| / |gradient at the output| of 12 layers at initialization."""
    torch.manual_seed(seed)
    x = start = torch.randn(1, 7, 16, dtype=torch.float64, requires_grad=True)
    for _ in range(12):
        for part in (MultiHeadAttention(16, 2), FeedForward(16, 32, ReLU())):
            x = skip * x + part.double()(x)
    return gradient_ratio(x, start)


@claim(
    FINAL,
    "Part 2, Q3",
    statement=(
        "Skip connections safeguard against overfitting, as a form of regularization that encourages simpler features."
    ),
    method=(
        "The slope of y = w·x and of y = x + a·x by least squares, exactly, with and without a penalty λ on "
        "the weight; the points (1, 3) and (2, 2) are noisy ones of y = x. Then a two-layer network with and "
        "without a skip and no penalty, 8 starts: gap between test and training error."
    ),
    condition=(
        "weights are also pulled to 0 (decay) and the truth is near the identity; alone a skip excludes no function"
    ),
)
def skip_regularizes(t: Experiment) -> None:
    for penalty in (5, 0):
        plain, skipped = fitted_slopes(Fraction(penalty))
        case_name = f"λ = {penalty}: slope without and with the skip, truth 1"
        t.record_case(case_name, f"{plain} and {skipped}", abs(skipped - 1) < abs(plain - 1), in_scope=penalty > 0)
    more = _overfitting(t)
    mean = more.mean().item()
    error = (more.std() / 8**0.5).item()
    case_name = "test − training error, skip minus plain, no decay"
    t.record_case(case_name, f"{mean:+.3f} ± {2 * error:.3f}", mean + 2 * error < 0, in_scope=False)


def fitted_slopes(penalty: Fraction) -> tuple[Fraction, Fraction]:
    """Return the least-squares slopes of w·x and x + a·x at (1, 3) and (2, 2), with `penalty` times w² or a² added."""
    points = ((1, 3), (2, 2))
    size = sum(x * x for x, _ in points) + penalty
    return sum(x * y for x, y in points) / size, 1 + sum(x * (y - x) for x, y in points) / size


def _overfitting(t: Experiment) -> torch.Tensor:
    """Return how much more a skip overfits (test minus training error) for 8 initializations, trained in parallel."""
    x, far = (torch.randn(m, 4, generator=t.generator) for m in (24, 400))
    y, y_far = (a[:, :1] + 0.5 * torch.randn(len(a), 1, generator=t.generator) for a in (x, far))
    sizes = ((8, 4, 16), (8, 16, 16), (8, 16, 1))
    starts = [torch.randn(size, generator=t.generator) / size[1] ** 0.5 for size in sizes]
    columns = []
    for skip in (0.0, 1.0):
        weights = [w.clone().requires_grad_() for w in starts]

        def errors(a: torch.Tensor, b: torch.Tensor, w: list[torch.Tensor] = weights, s: float = skip) -> torch.Tensor:
            h = torch.tanh(a @ w[0])
            return ((s * h + torch.tanh(h @ w[1])) @ w[2] - b).square().mean((1, 2))

        fit(weights, lambda errors=errors: errors(x, y).sum(), 300, lr=0.02)  # type: ignore[misc]
        with torch.no_grad():
            columns.append(errors(far, y_far) - errors(x, y))
    return columns[1] - columns[0]


@claim(
    HOMEWORK,
    "1.4e.2",
    statement="Layer norm keeps activations from growing too large or becoming too small.",
    method="Size of the output of nn.LayerNorm (ε = 10⁻⁵) for inputs scaled by 10⁻⁶ … 10⁶.",
    condition="the input's variance is well above ε",
)
def layer_norm_range(t: Experiment) -> None:
    x = t.normal(64)
    norm = LayerNormChoice().build(64).double()
    scales = [10.0**p for p in range(-6, 7)]
    sizes = [norm(x * s).norm().item() / 8 for s in scales]
    case_name = "scale 1 … 10⁶: size against √d"
    t.record_case(case_name, f"{min(sizes[6:]):.4f} … {max(sizes[6:]):.4f}", max(abs(s - 1) for s in sizes[6:]) < 1e-3)
    t.record_case("scale 10⁻⁶", f"{sizes[0]:.4f}", abs(sizes[0] - 1) < 1e-3, in_scope=False)
    t.draw(Lines("Size after layer norm", "scale of the input", "norm / √d", scales, {"LayerNorm": sizes}, log_x=True))


@claim(
    HOMEWORK,
    "1.4e.2",
    statement="Layer norm makes a network less sensitive to initialization and learning rate.",
    method="LN(cWx) = LN(Wx) for c > 0, and the gradient in W shrinks by 1/c: symbolically, three outputs.",
)
def layer_norm_initialization(t: Experiment) -> None:
    c, x = sp.symbols("c x", positive=True)
    w = sp.symbols("w:3", real=True)
    scaled, plain = (normalized([scale * v * x for v in w])[0] for scale in (c, 1))
    t.assert_equal("LN(cWx) − LN(Wx)", sp.simplify(scaled - plain), 0)
    slope_at_1, ten = (sp.diff(plain, w[0]).subs({w[0]: n, w[1]: 4 * n, w[2]: 6 * n, x: 2}) for n in (1, 10))
    t.assert_equal("gradient at 10 W against W", sp.simplify(ten / slope_at_1), sp.Rational(1, 10))


@claim(
    HOMEWORK,
    "1.4e.2",
    statement="Layer norm helps to keep the size of gradients similar across layers.",
    method=(
        "The norm of the gradient at the input of 20 ReLU layers of width 32, divided by its norm at their output, "
        "weights at half, one and two times their usual size, with and without a norm after each; three draws."
    ),
    condition="the weights are not yet of the size that keeps gradients; where they are, the norm can enlarge them",
)
def layer_norm_gradients(t: Experiment) -> None:
    for draw in range(3):
        results: dict[bool, list[float]] = {False: [], True: []}
        for normed, gain in product((False, True), (0.5, 1.0, 2.0)):
            g = torch.Generator().manual_seed(3 * t.seed + draw)
            h = x = torch.randn(8, 32, generator=g, dtype=torch.float64, requires_grad=True)
            for _ in range(20):
                h = torch.relu(h @ torch.randn(32, 32, generator=g, dtype=torch.float64) * gain / 4)
                h = nn.functional.layer_norm(h, (32,)) if normed else h
            results[normed].append(gradient_ratio(h, x, g))
        bare, normed_sizes = (max(sizes) / min(sizes) for sizes in results.values())
        result_text = ", ".join(f"{size:.1e}" for sizes in results.values() for size in sizes)
        t.record_case(
            f"draw {draw + 1}: weights × ½, 1, 2 without, and with the norm", result_text, normed_sizes < 2 < 1e6 < bare
        )
        plain, normed_size = results[False][1], results[True][1]
        is_nearer = abs(math.log(normed_size)) <= abs(math.log(plain))
        case_name = f"draw {draw + 1}: weights × 1, without and with the norm, nearer to 1 with it"
        t.record_case(case_name, f"{plain:.2f}, {normed_size:.0f}", is_nearer, in_scope=False)


@claim(
    FINAL,
    "Part 2, Q3",
    statement="Skip connections let a network use features of earlier layers again.",
    method="A layer that keeps 2 of 5 directions, with and without a skip: how many can be read (rank)? 3 draws.",
)
def skip_reuses(t: Experiment) -> None:
    for draw in range(3):
        down, up = (t.normal(*size) for size in ((5, 2), (2, 5)))
        ranks = [int(torch.linalg.matrix_rank(skip * torch.eye(5).double() + down @ up)) for skip in (0, 1)]
        t.assert_equal(f"draw {draw + 1}: without and with the skip", ranks, [2, 5])


@claim(
    EXAM,
    "Q7b",
    statement="The position of layer norm (before or after the sublayer) matters for training.",
    method=(
        "12 blocks whose sublayers return zero: does the output equal the input, and is the gradient the "
        "identity? Then at their random start: how the size of the residual stream grows."
    ),
    is_asserted=False,
)
def norm_placement(t: Experiment) -> None:
    changed, growth = [], []
    for residual in (PreNorm(), PostNorm()):
        config = BlockConfig(d_model=32, n_heads=4, d_ff=64, residual=residual)
        blocks = nn.Sequential(*(Block(config) for _ in range(12))).double()
        x = t.normal(4, 7, 32)
        growth.append((blocks(x).norm() / blocks[0](x).norm()).item())
        with torch.no_grad():
            for part, p in blocks.named_parameters():
                if "o_proj" in part or "down" in part:
                    p.zero_()
        changed.append(max_abs_diff(blocks(x), x))
    (pre, post), (grown, steady) = changed, growth
    t.record_case("silent sub-layers change x by: pre-norm, post-norm", f"{pre:g}, {post:.2f}", pre == 0 < post)
    t.record_case("growth from block 1 to 12", f"{grown:.2f}, {steady:.2f}", grown > 1.05 and abs(steady - 1) < 1e-3)
