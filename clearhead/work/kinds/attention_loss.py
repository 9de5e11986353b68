"""The losses of an attention problem, and the gradient of the first by W_Q, W_K and W_V, by the chain rule, exactly.

At temperature 0 and ∞ the weights do not move with the scores, so nothing reaches W_Q and W_K; values always pass
it on."""

from __future__ import annotations

import sympy

from clearhead.work.algebra import DIGITS, Matrix, beside, columns, softmax, times, transpose
from clearhead.work.kinds.attention_setting import Head, Loss, Setting
from clearhead.work.numbers import Number, close_to
from clearhead.work.sheet import Grid, Step
from clearhead.work.source import Source

_LATEX = r"\frac{\partial \ell}{\partial W_%s} = X^{\top} %s"
_SCORES = r"\frac{\partial \ell}{\partial S}"
_FORMULAS = {
    "V": ("∂ℓ/∂W_V = Xᵀ·(Pᵀ·∂ℓ/∂Z)", _LATEX % ("V", r"P^{\top} \frac{\partial \ell}{\partial Z}")),
    "Q": ("∂ℓ/∂W_Q = Xᵀ·(∂ℓ/∂S·K)", _LATEX % ("Q", _SCORES + " K")),
    "K": ("∂ℓ/∂W_K = Xᵀ·((∂ℓ/∂S)ᵀ·Q)", _LATEX % ("K", r"\left(" + _SCORES + r"\right)^{\top} Q")),
}


def loss_steps(source: Source, loss: Loss, logits: Matrix, labels: list[str], vocabulary: list[str]) -> list[Step]:
    """The probabilities of the words at the positions asked, those of the targets, and the loss."""
    all_of_them, of_targets = f"probabilities_{loss.name}", f"targets_{loss.name}"
    asked = [(t, vocabulary.index(word)) for t, word in loss.targets.items()]
    table = source.own(all_of_them, [_probabilities(logits[t]) for t in loss.targets])
    picked = source.own(of_targets, [row[word] for row, (_, word) in zip(table, asked, strict=True)])
    # −log softmax(row)[word] is log Σ exp − the word's logit, which stays short.
    total = sympy.Add(*[sympy.log(sympy.Add(*map(sympy.exp, logits[t]))) - logits[t][word] for t, word in asked])
    if {all_of_them, of_targets} & source.answered.keys():
        total = -sympy.Add(*map(sympy.log, picked))
    of, share = ("mean", rf"\tfrac{{1}}{{{len(picked)}}}") if loss.mean else ("sum", "")
    if loss.mean:
        total = total / len(picked)
    wanted = [f"{labels[t]} → {word}" for t, word in loss.targets.items()]
    return [
        Step(all_of_them, f"{loss.title}: probabilities", Grid.of(table, [labels[t] for t, _ in asked], vocabulary),
             "p", "p = softmax(row of L)", r"p_t = \operatorname{softmax}(L_{t,:})"),
        Step(of_targets, f"{loss.title}: probability of each target", Grid.of([[x] for x in picked], wanted, ["P"]),
             "P", "position → word it is asked for", r"P(y_t) = p_{t, y_t}"),
        Step(loss.name, f"{loss.title}: loss", Grid.one(total), "ℓ", f"ℓ = {of} of −log P over the targets",
             rf"\ell = -{share}\sum_t \log P(y_t)"),
    ]  # fmt: skip


def _probabilities(row: list[Number]) -> list[Number]:
    return softmax(row, [True] * len(row), sympy.S.One)


def _error(loss: Loss, logits: Matrix, vocabulary: list[str]) -> Matrix:
    """∂ℓ/∂logits: p − one-hot at the positions asked, zeros elsewhere."""
    error: Matrix = [[sympy.S.Zero for _ in row] for row in logits]
    share = sympy.Rational(1, len(loss.targets) if loss.mean else 1)
    for t, word in loss.targets.items():
        hit = vocabulary.index(word)
        error[t] = [share * (p - int(i == hit)) for i, p in enumerate(_probabilities(logits[t]))]
    return error


def gradient_steps(source: Source, setting: Setting, heads: list[Head], logits: Matrix) -> tuple[list[Step], list[str]]:
    error = source.own("grad_logits", _error(setting.losses[0], logits, setting.vocabulary))  # (T, V)
    steps = [
        Step("grad_logits", "Gradient at the logits", Grid.of(error, setting.labels, setting.vocabulary), "∂ℓ/∂L",
             "p − one-hot of the target, zeros where nothing is asked",
             r"\frac{\partial \ell}{\partial L_{t,:}} = p_t - \mathbf{1}_{y_t}")
    ]  # fmt: skip
    if setting.is_soft:
        error = _digits(error)
        heads = [Head(*[_digits(part) for part in vars(head).values()]) for head in heads]
    d_joined = times(error, transpose(setting.weights["U"]))
    if "O" in setting.weights:
        d_joined = times(d_joined, transpose(setting.weights["O"]))
    width = len(d_joined[0]) // len(heads)
    x, origin = transpose(setting.x), transpose(setting.source)
    parts: dict[str, list[Matrix]] = {"Q": [], "K": [], "V": []}
    for h, head in enumerate(heads):
        d_z = columns(d_joined, h * width, (h + 1) * width)
        d_s = _through_weights(setting, head, d_z)
        parts["V"].append(times(origin, times(transpose(head.weights), d_z)))
        parts["Q"].append(times(x, times(d_s, head.k)))
        parts["K"].append(times(origin, times(transpose(d_s), head.q)))
    for name in setting.gradients:
        whole, what, formulas = beside(parts[name]), f"W_{name}", _FORMULAS[name]
        rows = [f"x{i + 1}" for i in range(len(whole))]
        if setting.direct:  # X is the identity, and W_Q is Q
            what, rows = name, setting.labels if name == "Q" else setting.keys
            plain, latex = formulas
            formulas = plain.replace("Xᵀ·", "").replace("W_", ""), latex.replace(r"X^{\top} ", "").replace("W_", "")
        grid = Grid.of(whole, rows, [f"{name.lower()}{i + 1}" for i in range(len(whole[0]))])
        steps.append(Step(f"grad_{name}", f"Gradient of {what}", grid, f"∂ℓ/∂{what}", *formulas))
    return steps, _remarks(setting, heads)


def _digits(matrix: Matrix) -> Matrix:
    """Sixty digits in place of long expressions: the chain rule multiplies their lengths beyond all reading."""
    return [[x if x.is_Rational else close_to(x, DIGITS) for x in row] for row in matrix]


def _through_weights(setting: Setting, head: Head, d_z: Matrix) -> Matrix:
    """∂ℓ/∂S of one head: P ∘ (∂ℓ/∂P − its mean under P) / T, and zero where the weights are constant."""
    if not setting.is_soft:
        return [[sympy.S.Zero for _ in row] for row in head.weights]
    result: Matrix = []
    for weights, d_weights in zip(head.weights, times(d_z, transpose(head.v)), strict=True):
        mean = sympy.Add(*[p * d for p, d in zip(weights, d_weights, strict=True)])
        result.append([p * (d - mean) / setting.temperature for p, d in zip(weights, d_weights, strict=True)])
    return result


def _remarks(setting: Setting, heads: list[Head]) -> list[str]:
    if setting.is_soft:
        worked = f"the chain rule is worked with {DIGITS} digits, not symbols"
        return [f"The exact gradients are too long to read: {worked}."]
    if setting.temperature != 0:
        return []
    said = [
        "At temperature 0 the weights are constant between ties, so W_Q and W_K get no gradient; W_V does, since the "
        "output is P·V and P does not stand in its way."
    ]
    rows = enumerate(setting.labels)
    tied = [label for i, label in rows if any(sum(p != 0 for p in head.weights[i]) > 1 for head in heads)]
    if tied:
        said.append(
            f"Rows {', '.join(tied)} have ties: there the weights jump, no derivative exists, and zero is what "
            "automatic differentiation passes back."
        )
    return said
