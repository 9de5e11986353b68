"""Attention from tokens to loss: embeddings, projections, scores, mask, weights, heads, logits, loss, gradients.

    weights = softmax(Q Kᵀ / T) over the keys that the mask allows, T = √D unless the file says otherwise

Rows are queries. `heads = 2` splits the columns of Q, K and V in two, as multi-head attention does. Gradients are those
of the first loss, by the chain rule: at temperature 0 and ∞ the weights do not move with the scores, so nothing reaches
W_Q and W_K; values always pass it on. All of it runs once more through `attend` in float64, with autograd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from clearhead.attention import attend
from clearhead.attention.scores import Dot
from clearhead.attention.weights import Softmax
from clearhead.work.algebra import DIGITS, Matrix, beside, masked, softmax, tensor, times, transpose
from clearhead.work.draw import Draw
from clearhead.work.kinds.attention_setting import Loss, Setting, read
from clearhead.work.numbers import Number, as_float, close_to, text
from clearhead.work.sheet import Grid, Sheet
from clearhead.work.source import Source

KEYS = (
    "tokens", "x", "Q", "K", "V", "embeddings", "weights", "mask", "temperature", "heads", "unembedding", "vocabulary",
    "loss", "gradient",
)  # fmt: skip


class Head(NamedTuple):
    """What one head computes."""

    q: Matrix
    k: Matrix
    v: Matrix
    weights: Matrix
    z: Matrix


def solve(source: Source, sheet: Sheet) -> None:
    setting = read(source)
    labels, numbers = setting.labels, setting.numbers
    x = _given(source, setting, sheet)
    heads = [_head(setting, x, h, sheet) for h in range(setting.heads)]
    r = beside(*[head.z for head in heads])
    if setting.heads > 1:
        plain, latex = (", ".join(z.format(number) for number in numbers) for z in ("Z{}", "Z_{{{}}}"))
        said = f"Z = [{plain}]", f"Z = [{latex}]"
        r = sheet.add("concat", "The heads' outputs side by side", _table(r, labels, "z"), "Z", *said)
    if "O" in setting.weights:
        grid = _table(times(r, setting.weights["O"]), labels, "r")
        r = sheet.add("r", "Output projection", grid, "R", "R = Z·W_O", "R = Z W_O")
    logits: Matrix = []
    if "U" in setting.weights:
        tied = source.values.get("unembedding") == "tied"
        plain, latex = ("L = R·Eᵀ", r"L = R E^{\top}") if tied else ("L = R·U", "L = R U")
        grid = Grid.of(times(r, setting.weights["U"]), labels, setting.vocabulary)
        logits = sheet.add("logits", "Logits", grid, "L", plain, latex)
    for loss in setting.losses:
        _loss(setting, loss, logits, sheet)
    empty = [label for label, row in zip(labels, setting.allowed, strict=True) if not any(row)]
    sheet.remarks += [f"{label} may attend to nothing: its weights are zeros." for label in empty]
    if setting.gradients:
        _gradients(setting, heads, logits, sheet)
    found = _in_float64(setting)
    pairs = {step.key: (step.grid.cells, found[step.key]) for step in sheet.steps if step.key in found}
    sheet.check("attend in float64", *pairs.values())
    if setting.gradients:
        gradients = [pair for key, pair in pairs.items() if key.startswith("grad_")]
        sheet.check("autograd through attend in float64", *gradients)


def vary(source: Source, draw: Draw) -> dict[str, Any]:
    """Other numbers in every matrix, and other words in the same places: their order in the file is kept, so that what
    was sorted stays sorted."""
    values = source.values
    made: dict[str, Any] = {key: draw.like(values[key]) for key in ("x", "Q", "K", "V") if key in values}
    if "weights" in values:
        made["weights"] = {name: draw.like(matrix) for name, matrix in values["weights"].items()}
    vectors = source.table("embeddings").values
    if vectors:
        made["embeddings"] = dict(zip(vectors, draw.like(list(vectors.values())), strict=True))
    words = [word for word in vectors if not word.startswith("<")]
    used = [word for word in words if word in source.names("tokens")]
    renamed = dict(zip(used, draw.some(words, len(used)), strict=True))
    if used:
        made["tokens"] = [renamed.get(token, token) for token in source.names("tokens")]
        made["loss"] = [
            loss.values | {"targets": {at: renamed.get(word, word) for at, word in loss.values["targets"].items()}}
            for loss in source.tables("loss")
        ]
    return made


def _features(letter: str, matrix: Matrix) -> list[str]:
    """Names for the columns of a matrix."""
    return [f"{letter}{i + 1}" for i in range(len(matrix[0]))]


def _table(matrix: Matrix, rows: list[str], letter: str) -> Grid:
    return Grid.of(matrix, rows, _features(letter, matrix))


def _given(source: Source, setting: Setting, sheet: Sheet) -> Matrix:
    """What the problem gives: embeddings and weights; then X, which is a question only where tokens make it."""
    width = _features("x", setting.x)
    if not setting.direct and "x" not in source.values:
        table = source.table("embeddings")
        grid = _table([table.vector(name) for name in table.values], list(table.values), "x")
        sheet.add("E", "Embeddings", grid, "E", given=True)
    inputs = {} if setting.direct else {"Q": width, "K": width, "V": width}
    inputs["O"] = _features("z", setting.weights["V"])
    for name, rows in inputs.items():
        if name in setting.weights:
            grid = _table(setting.weights[name], rows, name.lower() if name != "O" else "r")
            sheet.add(f"W_{name}", f"The weights W_{name}", grid, f"W_{name}", given=True)
    if "U" in setting.weights and "unembedding" not in source.values:
        matrix = setting.weights["U"]
        grid = Grid.of(matrix, _features("r", transpose(matrix)), setting.vocabulary)
        sheet.add("U", "The unembedding U", grid, "U", given=True)
    if setting.direct:
        return setting.x
    grid = _table(setting.x, setting.labels, "x")
    if "x" in source.values:
        return sheet.add("x", "The inputs", grid, "X", given=True)
    formulas = "row i of X is the embedding of token i", r"X_{i,:} = E_{\mathrm{token}_i,:}"
    return sheet.add("x", "Embeddings of the tokens", grid, "X", *formulas)


def _head(setting: Setting, x: Matrix, number: int, sheet: Sheet) -> Head:
    labels, keys, h = setting.labels, setting.keys, setting.numbers[number]
    of, part, sub = (f" of head {h}", f"[its columns of head {h}]", f"_{{{h}}}") if h else ("", "", "")

    def projected(name: str, title: str) -> Matrix:
        weight, rows = setting.weights[name], setting.source if setting.direct and name != "Q" else x
        width = len(weight[0]) // setting.heads
        made = times(rows, [row[number * width : (number + 1) * width] for row in weight])
        grid = _table(made, labels if name == "Q" else keys, name.lower())
        formulas = f"{name}{h} = X·W_{name}{part}", rf"{name}{sub} = X W_{{{name}{',' + h if h else ''}}}"
        said = ("", "") if setting.direct else formulas
        return sheet.add(f"{name.lower()}{h}", title + of, grid, f"{name}{h}", *said, given=setting.direct)

    q, k, v = projected("Q", "Queries"), projected("K", "Keys"), projected("V", "Values")
    grid = Grid.of(times(q, transpose(k)), labels, keys)
    said = f"S{h} = Q{h}·K{h}ᵀ", rf"S{sub} = Q{sub} K{sub}^{{\top}}"
    scores = sheet.add(f"scores{h}", "Scores" + of, grid, f"S{h}", *said)
    if not all(map(all, setting.allowed)):
        grid = Grid.of(masked(scores, setting.allowed), labels, keys)
        title = f"Scores{of} under the mask {setting.mask}"
        said = "−∞ where a query may not attend", r"S_{ij} = -\infty \text{ where } i \text{ may not attend to } j"
        scores = sheet.add(f"masked{h}", title, grid, f"S{h}", *said)
    grid = Grid.of([softmax(row, setting.temperature) for row in scores], labels, keys)
    said = _softmax_formula(setting.temperature, h, sub)
    weights = sheet.add(f"weights{h}", "Attention weights" + of, grid, f"P{h}", *said)
    said = f"Z{h} = P{h}·V{h}", f"Z{sub} = P{sub} V{sub}"
    z = sheet.add(f"z{h}", "Weighted sums of the values" + of, _table(times(weights, v), labels, "z"), f"Z{h}", *said)
    return Head(q, k, v, weights, z)


def _softmax_formula(T: Number, h: str, sub: str) -> tuple[str, str]:
    plain, latex = f"softmax(S{h} / T)", rf"\operatorname{{softmax}}(S{sub} / T)"
    if T == 0:
        said = f"P{h} = lim T→0 {plain}: all weight on the row's largest score, ties share it"
        return said, rf"P{sub} = \lim_{{T \to 0^{{+}}}} {latex}"
    if T.is_infinite:
        said = f"P{h} = lim T→∞ {plain}: the same weight for every key that is allowed"
        return said, rf"P{sub} = \lim_{{T \to \infty}} {latex}"
    return f"P{h} = {plain}, T = {text(T)}", rf"P{sub} = {latex}, \quad T = {sympy.latex(T)}"


# ---------------------------------------------------------------------- loss and gradients


def _loss(setting: Setting, loss: Loss, logits: Matrix, sheet: Sheet) -> None:
    """The probabilities of the words at the positions asked, those of the targets, and the loss."""
    labels, vocabulary = setting.labels, setting.vocabulary
    all_of_them, of_targets = f"probabilities_{loss.name}", f"targets_{loss.name}"
    asked = [(t, vocabulary.index(word)) for t, word in loss.targets.items()]
    wanted = [f"{labels[t]} → {word}" for t, word in loss.targets.items()]
    grid = Grid.of([softmax(logits[t]) for t, _ in asked], [labels[t] for t, _ in asked], vocabulary)
    said = "p = softmax(row of L)", r"p_t = \operatorname{softmax}(L_{t,:})"
    table = sheet.add(all_of_them, f"{loss.title}: probabilities", grid, "p", *said)
    grid = Grid.of([[row[word]] for row, (_, word) in zip(table, asked, strict=True)], wanted, ["P"])
    said = "position → word it is asked for", r"P(y_t) = p_{t, y_t}"
    picked = sheet.add(of_targets, f"{loss.title}: probability of each target", grid, "P", *said)
    # −log softmax(row)[word] is log Σ exp − the word's logit, which stays short.
    total = sympy.Add(*[sympy.log(sympy.Add(*map(sympy.exp, logits[t]))) - logits[t][word] for t, word in asked])
    if {all_of_them, of_targets} & sheet.own.keys():
        total = -sympy.Add(*[sympy.log(p) for [p] in picked])
    of, share = ("mean", rf"\tfrac{{1}}{{{len(picked)}}}") if loss.mean else ("sum", "")
    if loss.mean:
        total = total / len(picked)
    said = f"ℓ = {of} of −log P over the targets", rf"\ell = -{share}\sum_t \log P(y_t)"
    sheet.add(loss.name, f"{loss.title}: loss", Grid.one(total), "ℓ", *said)


_LATEX = r"\frac{\partial \ell}{\partial W_%s} = X^{\top} %s"
_SCORES = r"\frac{\partial \ell}{\partial S}"
_FORMULAS = {
    "V": ("∂ℓ/∂W_V = Xᵀ·(Pᵀ·∂ℓ/∂Z)", _LATEX % ("V", r"P^{\top} \frac{\partial \ell}{\partial Z}")),
    "Q": ("∂ℓ/∂W_Q = Xᵀ·(∂ℓ/∂S·K)", _LATEX % ("Q", _SCORES + " K")),
    "K": ("∂ℓ/∂W_K = Xᵀ·((∂ℓ/∂S)ᵀ·Q)", _LATEX % ("K", r"\left(" + _SCORES + r"\right)^{\top} Q")),
}


def _gradients(setting: Setting, heads: list[Head], logits: Matrix, sheet: Sheet) -> None:
    """The gradients of the first loss, exactly, and what is to be said of them."""
    loss, vocabulary = setting.losses[0], setting.vocabulary
    error: Matrix = [[sympy.S.Zero for _ in row] for row in logits]  # ∂ℓ/∂logits, (T, V)
    share = sympy.Rational(1, len(loss.targets) if loss.mean else 1)
    for t, word in loss.targets.items():
        hit = vocabulary.index(word)
        error[t] = [share * (p - int(i == hit)) for i, p in enumerate(softmax(logits[t]))]
    grid, plain = Grid.of(error, setting.labels, vocabulary), "p − one-hot of the target, zeros where nothing is asked"
    latex = r"\frac{\partial \ell}{\partial L_{t,:}} = p_t - \mathbf{1}_{y_t}"
    error = sheet.add("grad_logits", "Gradient at the logits", grid, "∂ℓ/∂L", plain, latex)
    if setting.is_soft:
        error, heads = _digits(error), [Head(*map(_digits, head)) for head in heads]
    d_joined = times(error, transpose(setting.weights["U"]))
    if "O" in setting.weights:
        d_joined = times(d_joined, transpose(setting.weights["O"]))
    width = len(d_joined[0]) // len(heads)
    x, origin = transpose(setting.x), transpose(setting.source)
    parts: dict[str, list[Matrix]] = {"Q": [], "K": [], "V": []}
    for h, head in enumerate(heads):
        d_z = [row[h * width : (h + 1) * width] for row in d_joined]
        d_s = _through_weights(setting, head, d_z)
        parts["V"].append(times(origin, times(transpose(head.weights), d_z)))
        parts["Q"].append(times(x, times(d_s, head.k)))
        parts["K"].append(times(origin, times(transpose(d_s), head.q)))
    for name in setting.gradients:
        what, rows, said = f"W_{name}", _features("x", setting.x), list(_FORMULAS[name])
        if setting.direct:  # X is the identity, and W_Q is Q
            what, rows = name, setting.labels if name == "Q" else setting.keys
            said = [one.replace("Xᵀ·", "").replace(r"X^{\top} ", "").replace("W_", "") for one in said]
        grid = _table(beside(*parts[name]), rows, name.lower())
        sheet.add(f"grad_{name}", f"Gradient of {what}", grid, f"∂ℓ/∂{what}", *said)
    sheet.remarks += _said_of_gradients(setting, heads)


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


def _said_of_gradients(setting: Setting, heads: list[Head]) -> list[str]:
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


# ---------------------------------------------------------------------- float64


def _in_float64(setting: Setting) -> dict[str, Tensor]:
    """What `attend` makes of the problem, by key of a step."""
    x, source = tensor(setting.x), tensor(setting.source)
    weights = {name: tensor(matrix).requires_grad_() for name, matrix in setting.weights.items()}
    q, k, v = (
        (rows @ weights[name]).unflatten(-1, (setting.heads, -1)).transpose(0, 1)[None]  # (1, H, T or S, D)
        for name, rows in (("Q", x), ("K", source), ("V", source))
    )
    how = Softmax(temperature=as_float(setting.temperature))
    # The weights are what attend makes of values that are the identity.
    eye = torch.eye(source.shape[0], dtype=x.dtype).expand(1, setting.heads, -1, -1)
    p, z = (attend(q, k, values, setting.mask, scores=Dot(), weights=how)[0] for values in (eye, v))
    joined = z.transpose(0, 1).flatten(1)
    r = joined @ weights["O"] if "O" in weights else joined
    found = {"concat": joined, "r": r}
    for h, name in enumerate(setting.numbers):
        found |= {f"q{name}": q[0, h], f"weights{name}": p[h], f"z{name}": z[h]}
    if "U" not in weights:
        return found
    logits = found["logits"] = r @ weights["U"]
    for i, loss in enumerate(setting.losses):
        rows = torch.tensor(list(loss.targets))
        words = torch.tensor([setting.vocabulary.index(word) for word in loss.targets.values()])
        value = torch.nn.functional.cross_entropy(logits[rows], words, reduction="mean" if loss.mean else "sum")
        found |= {f"probabilities_{loss.name}": logits[rows].softmax(-1), loss.name: value.reshape(1, 1)}
        if i == 0 and setting.gradients:
            wanted = {"logits": logits} | {name: weights[name] for name in setting.gradients}
            made = torch.autograd.grad(
                value, list(wanted.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            found |= {f"grad_{name}": gradient for name, gradient in zip(wanted, made, strict=True)}
    return found
