"""Attention from tokens to loss: embeddings, projections, scores, mask, weights, heads, logits, loss, gradients.

    weights = softmax(Q Kᵀ / T) over the keys that the mask allows, T = √D unless the file says otherwise

Rows are queries. `heads = 2` splits the columns of Q, K and V in two, as multi-head attention does. Gradients are those
of the first loss, by the chain rule: at temperature 0 and ∞ the weights are locally constant, so W_Q and W_K get no
gradient, but W_V does. Everything is computed again with `attend` in float64 and autograd.
"""

from __future__ import annotations

from typing import NamedTuple

import sympy
import torch
from torch import Tensor

from clearhead import masks
from clearhead.attention import attend
from clearhead.attention.normalizers import Softmax
from clearhead.attention.scores import Dot
from clearhead.course.exercises.algebra import (
    DIGITS,
    Matrix,
    hstack,
    mask_scores,
    matmul,
    softmax,
    to_tensor,
    transpose,
)
from clearhead.course.exercises.numbers import Number, as_float, evaluate, text
from clearhead.course.exercises.problem_types.attention_setting import AttentionProblem, LossSpec, parse_attention
from clearhead.course.exercises.random_values import RandomValues
from clearhead.course.exercises.sheet import ExactGrid, WorksheetBuilder
from clearhead.course.exercises.source import ProblemSource, ProblemValues

KEYS = (
    "tokens", "x", "Q", "K", "V", "embeddings", "weights", "mask", "temperature", "heads", "unembedding", "vocabulary",
    "loss", "gradient", "follows", "keep",
)  # fmt: skip


class HeadValues(NamedTuple):
    """The matrices of one head."""

    q: Matrix
    k: Matrix
    v: Matrix
    weights: Matrix
    z: Matrix


def solve(source: ProblemSource, sheet: WorksheetBuilder) -> None:
    problem = parse_attention(source)
    labels, numbers = problem.labels, problem.numbers
    x = _add_inputs(source, problem, sheet)
    heads = [_head(problem, x, h, sheet) for h in range(problem.heads)]
    r = hstack(*[head.z for head in heads])
    if problem.heads > 1:
        plain, latex = (", ".join(z.format(number) for number in numbers) for z in ("Z{}", "Z_{{{}}}"))
        formulas = f"Z = [{plain}]", f"Z = [{latex}]"
        r = sheet.add("concat", "The heads' outputs side by side", _table(r, labels, "z"), "Z", *formulas)
    if "O" in problem.weights:
        grid = _table(matmul(r, problem.weights["O"]), labels, "r")
        r = sheet.add("r", "Output projection", grid, "R", "R = Z·W_O", "R = Z W_O")
    logits: Matrix = []
    if "U" in problem.weights:
        tied = source.values.get("unembedding") == "tied"
        plain, latex = ("L = R·Eᵀ", r"L = R E^{\top}") if tied else ("L = R·U", "L = R U")
        grid = ExactGrid.of(matmul(r, problem.weights["U"]), labels, problem.vocabulary)
        logits = sheet.add("logits", "Logits", grid, "L", plain, latex)
    for loss in problem.losses:
        _loss(problem, loss, logits, sheet)
    empty = [label for label, row in zip(labels, problem.allowed, strict=True) if not any(row)]
    sheet.remarks += [f"{label} may not attend to any key: its weights are zeros." for label in empty]
    if problem.gradients:
        _gradients(problem, heads, logits, sheet)
    results = _in_float64(problem)
    pairs = {step.key: (step.grid.cells, results[step.key]) for step in sheet.steps if step.key in results}
    sheet.check("attend in float64", *pairs.values())
    if problem.gradients:
        gradients = [pair for key, pair in pairs.items() if key.startswith("grad_")]
        sheet.check("autograd through attend in float64", *gradients)


def vary(source: ProblemSource, rng: RandomValues) -> dict[str, object]:
    """Return other numbers for every matrix and other words at the same positions.

    The order of words in the file is kept, so that sorted sequences stay sorted. Weights named in `keep` stay as well.
    """
    values, constant = source.values, source.names("keep")
    variant: ProblemValues = {key: rng.similar(values[key]) for key in ("x", "Q", "K", "V") if key in values}
    if "weights" in values:
        variant["weights"] = {
            name: matrix if name in constant else rng.similar(matrix) for name, matrix in values["weights"].items()
        }
    vectors = source.table("embeddings").values
    if vectors:
        variant["embeddings"] = dict(zip(vectors, rng.similar(list(vectors.values())), strict=True))
    words = [word for word in vectors if not word.startswith("<")]
    used = [word for word in words if word in source.names("tokens")]
    renamed_words = dict(zip(used, rng.sample(words, len(used)), strict=True))
    if used:
        variant["tokens"] = [renamed_words.get(token, token) for token in source.names("tokens")]
        variant["loss"] = [
            loss.values
            | {"targets": {at: renamed_words.get(word, word) for at, word in loss.values["targets"].items()}}
            for loss in source.tables("loss")
        ]
    return variant


def take_numbers(source: ProblemSource, followed: ProblemValues) -> ProblemValues:
    """Return the numbers and words of another problem of one head, with that head copied as often as there are heads.

    Args:
        source: The problem that takes the numbers; it keeps its output projection.
        followed: The values of the other problem.

    Returns:
        The changed values of the problem.
    """
    heads = source.integer("heads", 1)
    copies = {name: [list(row) * heads for row in followed["weights"][name]] for name in ("Q", "K", "V")}
    numbers = {key: followed[key] for key in ("tokens", "embeddings", "loss")}
    return numbers | {"weights": source.values["weights"] | copies}


def _features(letter: str, matrix: Matrix) -> list[str]:
    """Return names for the columns of a matrix."""
    return [f"{letter}{i + 1}" for i in range(len(matrix[0]))]


def _table(matrix: Matrix, rows: list[str], letter: str) -> ExactGrid:
    return ExactGrid.of(matrix, rows, _features(letter, matrix))


def _add_inputs(source: ProblemSource, problem: AttentionProblem, sheet: WorksheetBuilder) -> Matrix:
    """Add embeddings and weights as data, then X, which is a question only if it is computed from tokens."""
    width = _features("x", problem.x)
    if not problem.direct and "x" not in source.values:
        table = source.table("embeddings")
        grid = _table([table.vector(name) for name in table.values], list(table.values), "x")
        sheet.add("E", "Embeddings", grid, "E", is_given=True)
    inputs = {} if problem.direct else {"Q": width, "K": width, "V": width}
    inputs["O"] = _features("z", problem.weights["V"])
    for name, rows in inputs.items():
        if name in problem.weights:
            grid = _table(problem.weights[name], rows, name.lower() if name != "O" else "r")
            sheet.add(f"W_{name}", f"The weights W_{name}", grid, f"W_{name}", is_given=True)
    if "U" in problem.weights and "unembedding" not in source.values:
        matrix = problem.weights["U"]
        grid = ExactGrid.of(matrix, _features("r", transpose(matrix)), problem.vocabulary)
        sheet.add("U", "The unembedding U", grid, "U", is_given=True)
    if problem.direct:
        return problem.x
    grid = _table(problem.x, problem.labels, "x")
    if "x" in source.values:
        return sheet.add("x", "The inputs", grid, "X", is_given=True)
    formulas = "row i of X is the embedding of token i", r"X_{i,:} = E_{\mathrm{token}_i,:}"
    return sheet.add("x", "Embeddings of the tokens", grid, "X", *formulas)


def _head(problem: AttentionProblem, x: Matrix, number: int, sheet: WorksheetBuilder) -> HeadValues:
    labels = problem.labels
    keys = problem.keys
    h = problem.numbers[number]
    suffix, part, sub = (f" of head {h}", f"[its columns of head {h}]", f"_{{{h}}}") if h else ("", "", "")

    def projected(name: str, title: str) -> Matrix:
        weight = problem.weights[name]
        rows = problem.source if problem.direct and name != "Q" else x
        width = len(weight[0]) // problem.heads
        product = matmul(rows, [row[number * width : (number + 1) * width] for row in weight])
        grid = _table(product, labels if name == "Q" else keys, name.lower())
        formulas = f"{name}{h} = X·W_{name}{part}", rf"{name}{sub} = X W_{{{name}{',' + h if h else ''}}}"
        formulas = ("", "") if problem.direct else formulas
        return sheet.add(f"{name.lower()}{h}", title + suffix, grid, f"{name}{h}", *formulas, is_given=problem.direct)

    q = projected("Q", "Queries")
    k = projected("K", "Keys")
    v = projected("V", "Values")
    grid = ExactGrid.of(matmul(q, transpose(k)), labels, keys)
    formulas = f"S{h} = Q{h}·K{h}ᵀ", rf"S{sub} = Q{sub} K{sub}^{{\top}}"
    scores = sheet.add(f"scores{h}", "Scores" + suffix, grid, f"S{h}", *formulas)
    if not all(map(all, problem.allowed)):
        grid = ExactGrid.of(mask_scores(scores, problem.allowed), labels, keys)
        title = f"Scores{suffix} under the {_mask_name(problem.mask)}"
        formulas = "−∞ where a query may not attend", r"S_{ij} = -\infty \text{ where } i \text{ may not attend to } j"
        scores = sheet.add(f"masked{h}", title, grid, f"S{h}", *formulas)
    grid = ExactGrid.of([softmax(row, problem.temperature) for row in scores], labels, keys)
    formulas = _softmax_formula(problem.temperature, h, sub)
    weights = sheet.add(f"weights{h}", "Attention weights" + suffix, grid, f"P{h}", *formulas)
    formulas = f"Z{h} = P{h}·V{h}", f"Z{sub} = P{sub} V{sub}"
    z = sheet.add(
        f"z{h}", "Weighted sums of the values" + suffix, _table(matmul(weights, v), labels, "z"), f"Z{h}", *formulas
    )
    return HeadValues(q, k, v, weights, z)


def _softmax_formula(T: Number, h: str, sub: str) -> tuple[str, str]:
    plain, latex = f"softmax(S{h} / T)", rf"\operatorname{{softmax}}(S{sub} / T)"
    if T == 0:
        formulas = f"P{h} = lim T→0 {plain}: all weight on the row's largest score, ties share it"
        return formulas, rf"P{sub} = \lim_{{T \to 0^{{+}}}} {latex}"
    if T.is_infinite:
        formulas = f"P{h} = lim T→∞ {plain}: the same weight for every key that is allowed"
        return formulas, rf"P{sub} = \lim_{{T \to \infty}} {latex}"
    return f"P{h} = {plain}, T = {text(T)}", rf"P{sub} = {latex}, \quad T = {sympy.latex(T)}"


# ---------------------------------------------------------------------- loss and gradients


def _loss(problem: AttentionProblem, loss: LossSpec, logits: Matrix, sheet: WorksheetBuilder) -> None:
    """Add the probabilities at the target positions, those of the targets, and the loss."""
    labels, vocabulary = problem.labels, problem.vocabulary
    all_of_them, of_targets = f"probabilities_{loss.name}", f"targets_{loss.name}"
    targets = [(t, vocabulary.index(word)) for t, word in loss.targets.items()]
    target_labels = [f"{labels[t]} → {word}" for t, word in loss.targets.items()]
    grid = ExactGrid.of([softmax(logits[t]) for t, _ in targets], [labels[t] for t, _ in targets], vocabulary)
    formulas = "p = softmax(row of L)", r"p_t = \operatorname{softmax}(L_{t,:})"
    table = sheet.add(all_of_them, f"{loss.title}: probabilities", grid, "p", *formulas)
    grid = ExactGrid.of([[row[word]] for row, (_, word) in zip(table, targets, strict=True)], target_labels, ["P"])
    formulas = "position → target word", r"P(y_t) = p_{t, y_t}"
    target_probabilities = sheet.add(of_targets, f"{loss.title}: probability of each target", grid, "P", *formulas)
    # −log softmax(row)[word] is log Σ exp − the word's logit, a shorter form.
    total = sympy.Add(*[sympy.log(sympy.Add(*map(sympy.exp, logits[t]))) - logits[t][word] for t, word in targets])
    if {all_of_them, of_targets} & sheet.student_values.keys():
        total = -sympy.Add(*[sympy.log(p) for [p] in target_probabilities])
    suffix, share = ("mean", rf"\tfrac{{1}}{{{len(target_probabilities)}}}") if loss.mean else ("sum", "")
    if loss.mean:
        total = total / len(target_probabilities)
    formulas = f"ℓ = {suffix} of −log P over the targets", rf"\ell = -{share}\sum_t \log P(y_t)"
    sheet.add(loss.name, f"{loss.title}: loss", ExactGrid.scalar(total), "ℓ", *formulas)


_LATEX = r"\frac{\partial \ell}{\partial W_%s} = X^{\top} %s"
_SCORES = r"\frac{\partial \ell}{\partial S}"
_FORMULAS = {
    "V": ("∂ℓ/∂W_V = Xᵀ·(Pᵀ·∂ℓ/∂Z)", _LATEX % ("V", r"P^{\top} \frac{\partial \ell}{\partial Z}")),
    "Q": ("∂ℓ/∂W_Q = Xᵀ·(∂ℓ/∂S·K)", _LATEX % ("Q", _SCORES + " K")),
    "K": ("∂ℓ/∂W_K = Xᵀ·((∂ℓ/∂S)ᵀ·Q)", _LATEX % ("K", r"\left(" + _SCORES + r"\right)^{\top} Q")),
}


def _gradients(problem: AttentionProblem, heads: list[HeadValues], logits: Matrix, sheet: WorksheetBuilder) -> None:
    """Add the exact gradients of the first loss, and remarks about them."""
    loss = problem.losses[0]
    vocabulary = problem.vocabulary
    grad_logits: Matrix = [[sympy.S.Zero for _ in row] for row in logits]  # ∂ℓ/∂logits, (T, V)
    share = sympy.Rational(1, len(loss.targets) if loss.mean else 1)
    for t, word in loss.targets.items():
        hit = vocabulary.index(word)
        grad_logits[t] = [share * (p - int(i == hit)) for i, p in enumerate(softmax(logits[t]))]
    grid = ExactGrid.of(grad_logits, problem.labels, vocabulary)
    plain = "p − one-hot of the target, zeros at positions without a target"
    latex = r"\frac{\partial \ell}{\partial L_{t,:}} = p_t - \mathbf{1}_{y_t}"
    grad_logits = sheet.add("grad_logits", "Gradient at the logits", grid, "∂ℓ/∂L", plain, latex)
    if problem.is_soft:
        grad_logits = _round_entries(grad_logits)
        heads = [HeadValues(*map(_round_entries, head)) for head in heads]
    d_joined = matmul(grad_logits, transpose(problem.weights["U"]))
    if "O" in problem.weights:
        d_joined = matmul(d_joined, transpose(problem.weights["O"]))
    width = len(d_joined[0]) // len(heads)
    x, origin = transpose(problem.x), transpose(problem.source)
    parts: dict[str, list[Matrix]] = {"Q": [], "K": [], "V": []}
    for h, head in enumerate(heads):
        d_z = [row[h * width : (h + 1) * width] for row in d_joined]
        d_s = _through_weights(problem, head, d_z)
        parts["V"].append(matmul(origin, matmul(transpose(head.weights), d_z)))
        parts["Q"].append(matmul(x, matmul(d_s, head.k)))
        parts["K"].append(matmul(origin, matmul(transpose(d_s), head.q)))
    for name in problem.gradients:
        name_of_gradient = f"W_{name}"
        rows = _features("x", problem.x)
        formulas = list(_FORMULAS[name])
        if problem.direct:  # X is the identity, and W_Q is Q
            name_of_gradient = name
            rows = problem.labels if name == "Q" else problem.keys
            formulas = [formula.replace("Xᵀ·", "").replace(r"X^{\top} ", "").replace("W_", "") for formula in formulas]
        grid = _table(hstack(*parts[name]), rows, name.lower())
        sheet.add(f"grad_{name}", f"Gradient of {name_of_gradient}", grid, f"∂ℓ/∂{name_of_gradient}", *formulas)
    sheet.remarks += _gradient_remarks(problem, heads)


def _mask_name(mask: masks.Mask) -> str:
    return "causal mask" if mask == masks.causal() else f"mask {mask}"


def _round_entries(matrix: Matrix) -> Matrix:
    """Round long expressions to 60 digits, because the chain rule would multiply their lengths."""
    return [[x if x.is_Rational else evaluate(x, DIGITS) for x in row] for row in matrix]


def _through_weights(problem: AttentionProblem, head: HeadValues, d_z: Matrix) -> Matrix:
    """Return ∂ℓ/∂S of one head: P ∘ (∂ℓ/∂P − its mean under P) / T, or zero if the weights are constant."""
    if not problem.is_soft:
        return [[sympy.S.Zero for _ in row] for row in head.weights]
    result: Matrix = []
    for weights, d_weights in zip(head.weights, matmul(d_z, transpose(head.v)), strict=True):
        mean = sympy.Add(*[p * d for p, d in zip(weights, d_weights, strict=True)])
        result.append([p * (d - mean) / problem.temperature for p, d in zip(weights, d_weights, strict=True)])
    return result


def _gradient_remarks(problem: AttentionProblem, heads: list[HeadValues]) -> list[str]:
    if problem.is_soft:
        worked = f"the chain rule uses {DIGITS} digits instead of symbols"
        return [f"The exact gradients are too long to read: {worked}."]
    if problem.temperature != 0:
        return []
    remarks = [
        "At temperature 0 the weights are constant between ties, so W_Q and W_K get no gradient; W_V does, because "
        "the output P·V is linear in V."
    ]
    rows = enumerate(problem.labels)
    tied = [label for i, label in rows if any(sum(p != 0 for p in head.weights[i]) > 1 for head in heads)]
    if tied:
        remarks.append(
            f"Rows {', '.join(tied)} have ties: there the weights jump, no derivative exists, and zero is what "
            "automatic differentiation passes back."
        )
    return remarks


# ---------------------------------------------------------------------- float64


def _in_float64(problem: AttentionProblem) -> dict[str, Tensor]:
    """Return the results of `attend`, by key of a step."""
    x, source = to_tensor(problem.x), to_tensor(problem.source)
    weights = {name: to_tensor(matrix).requires_grad_() for name, matrix in problem.weights.items()}
    q, k, v = (
        (rows @ weights[name]).unflatten(-1, (problem.heads, -1)).transpose(0, 1)[None]  # (1, H, T or S, D)
        for name, rows in (("Q", x), ("K", source), ("V", source))
    )
    normalizer = Softmax(temperature=as_float(problem.temperature))
    # With the identity as values, attend returns the weights.
    eye = torch.eye(source.shape[0], dtype=x.dtype).expand(1, problem.heads, -1, -1)
    p, z = (attend(q, k, values, problem.mask, scores=Dot(), normalizer=normalizer)[0] for values in (eye, v))
    joined = z.transpose(0, 1).flatten(1)
    r = joined @ weights["O"] if "O" in weights else joined
    results = {"concat": joined, "r": r}
    for h, name in enumerate(problem.numbers):
        results |= {f"q{name}": q[0, h], f"weights{name}": p[h], f"z{name}": z[h]}
    if "U" not in weights:
        return results
    logits = results["logits"] = r @ weights["U"]
    for i, loss in enumerate(problem.losses):
        rows = torch.tensor(list(loss.targets))
        words = torch.tensor([problem.vocabulary.index(word) for word in loss.targets.values()])
        value = torch.nn.functional.cross_entropy(logits[rows], words, reduction="mean" if loss.mean else "sum")
        results |= {f"probabilities_{loss.name}": logits[rows].softmax(-1), loss.name: value.reshape(1, 1)}
        if i == 0 and problem.gradients:
            inputs = {"logits": logits} | {name: weights[name] for name in problem.gradients}
            gradients = torch.autograd.grad(
                value, list(inputs.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            results |= {f"grad_{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}
    return results
