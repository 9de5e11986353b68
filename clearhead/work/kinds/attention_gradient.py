"""The gradient of the first loss with respect to W_Q, W_K and W_V, by the chain rule, exactly.

At temperature 0 and ∞ the weights do not move with the scores, so nothing reaches W_Q and W_K; values always pass
it on."""

from __future__ import annotations

import sympy

from clearhead.work.algebra import Matrix, beside, columns, times, transpose
from clearhead.work.kinds.attention_loss import error_of
from clearhead.work.kinds.attention_setting import Head, Setting
from clearhead.work.numbers import close_to
from clearhead.work.sheet import Grid, Step
from clearhead.work.source import Source

_LATEX = r"\frac{\partial \ell}{\partial W_%s} = X^{\top} %s"
_SCORES = r"\frac{\partial \ell}{\partial S}"
_FORMULAS = {
    "V": ("∂ℓ/∂W_V = Xᵀ·(Pᵀ·∂ℓ/∂Z)", _LATEX % ("V", r"P^{\top} \frac{\partial \ell}{\partial Z}")),
    "Q": ("∂ℓ/∂W_Q = Xᵀ·(∂ℓ/∂S·K)", _LATEX % ("Q", _SCORES + " K")),
    "K": ("∂ℓ/∂W_K = Xᵀ·((∂ℓ/∂S)ᵀ·Q)", _LATEX % ("K", r"\left(" + _SCORES + r"\right)^{\top} Q")),
}

DIGITS = 60


def gradient_steps(source: Source, setting: Setting, heads: list[Head], logits: Matrix) -> tuple[list[Step], list[str]]:
    error = source.own("grad_logits", error_of(setting.losses[0], logits, setting.vocabulary))  # (T, V)
    shown = error
    if not (setting.temperature == 0 or setting.temperature.is_infinite):
        error = _digits(error)
        heads = [Head(*[_digits(part) for part in vars(head).values()]) for head in heads]
    d_r = times(error, transpose(setting.weights["U"]))
    d_joined = times(d_r, transpose(setting.weights["O"])) if "O" in setting.weights else d_r
    width = len(d_joined[0]) // len(heads)
    parts: dict[str, list[Matrix]] = {"Q": [], "K": [], "V": []}
    for h, head in enumerate(heads):
        d_z = columns(d_joined, h * width, (h + 1) * width)
        d_s = _through_weights(setting, head, d_z)
        x, origin = transpose(setting.x), transpose(setting.source)
        parts["V"].append(times(origin, times(transpose(head.weights), d_z)))
        parts["Q"].append(times(x, times(d_s, head.k)))
        parts["K"].append(times(origin, times(transpose(d_s), head.q)))
    steps = [
        Step("grad_logits", "Gradient at the logits", Grid.of(shown, setting.labels, setting.vocabulary), "∂ℓ/∂L",
             "p − one-hot of the target, zeros where nothing is asked",
             r"\frac{\partial \ell}{\partial L_{t,:}} = p_t - \mathbf{1}_{y_t}")
    ]  # fmt: skip
    for name in setting.gradients:
        whole = beside(parts[name])
        rows = [f"x{i + 1}" for i in range(len(whole))]
        if setting.direct:
            rows = setting.labels if name == "Q" else setting.keys
        grid = Grid.of(whole, rows, [f"{name.lower()}{i + 1}" for i in range(len(whole[0]))])
        what, plain, latex = f"W_{name}", *_FORMULAS[name]
        if setting.direct:  # X is the identity, and W_Q is Q
            what = name
            plain, latex = (
                way.replace("Xᵀ·", "").replace(r"X^{\top} ", "").replace("W_", "") for way in (plain, latex)
            )
        steps.append(Step(f"grad_{name}", f"Gradient of {what}", grid, f"∂ℓ/∂{what}", plain, latex))
    return steps, _remarks(setting, heads)


def _digits(matrix: Matrix) -> Matrix:
    """Sixty digits in place of long expressions: the chain rule multiplies their lengths beyond all reading."""
    return [[x if x.is_Rational else close_to(x, DIGITS) for x in row] for row in matrix]


def _through_weights(setting: Setting, head: Head, d_z: Matrix) -> Matrix:
    """∂ℓ/∂S of one head: P ∘ (∂ℓ/∂P − its mean under P) / T, and zero where the weights are constant."""
    if setting.temperature == 0 or setting.temperature.is_infinite:
        return [[sympy.Integer(0) for _ in row] for row in head.weights]
    result: Matrix = []
    for weights, d_weights in zip(head.weights, times(d_z, transpose(head.v)), strict=True):
        mean = sympy.Add(*[p * d for p, d in zip(weights, d_weights, strict=True)])
        result.append([p * (d - mean) / setting.temperature for p, d in zip(weights, d_weights, strict=True)])
    return result


def _remarks(setting: Setting, heads: list[Head]) -> list[str]:
    if setting.temperature != 0 and not setting.temperature.is_infinite:
        return [
            f"The exact gradients are too long to read: the chain rule is worked with {DIGITS} digits, not symbols."
        ]
    if setting.temperature != 0:
        return []
    said = [
        "At temperature 0 the weights are constant between ties, so W_Q and W_K get no gradient; W_V does, since the "
        "output is P·V and P does not stand in its way."
    ]
    tied = [
        label
        for i, label in enumerate(setting.labels)
        if any(sum(1 for p in head.weights[i] if p != 0) > 1 for head in heads)
    ]
    if tied:
        said.append(
            f"Rows {', '.join(tied)} have ties: there the weights jump, no derivative exists, and zero is what "
            "automatic differentiation passes back."
        )
    return said
