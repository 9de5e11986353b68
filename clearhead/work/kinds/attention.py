"""Attention from tokens to loss: embeddings, projections, scores, mask, weights, heads, logits, loss, gradients.

    weights = softmax(Q Kᵀ / T) over the keys that the mask allows, T = √D unless the file says otherwise

Rows are queries. `heads = 2` splits the columns of Q, K and V in two, as multi-head attention does. All of it runs once
more through `attend` in float64, with autograd for the gradients.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

from clearhead.attention import attend
from clearhead.attention.scores import Dot
from clearhead.attention.weights import Softmax
from clearhead.work.algebra import Matrix, beside, columns, difference, softmax, tensor, times, transpose
from clearhead.work.draw import Draw
from clearhead.work.kinds.attention_loss import gradient_steps, loss_steps
from clearhead.work.kinds.attention_setting import Head, Setting, read
from clearhead.work.numbers import Number, as_float, text
from clearhead.work.sheet import Check, Grid, Solved, Step
from clearhead.work.source import Source

KEYS = (
    "tokens", "x", "Q", "K", "V", "embeddings", "weights", "mask", "temperature", "heads", "unembedding", "vocabulary",
    "loss", "gradient",
)  # fmt: skip


def solve(source: Source) -> Solved:
    setting = read(source)
    labels, numbers = setting.labels, setting.numbers
    heads = [_head(source, setting, h, number) for h, number in enumerate(numbers)]
    steps = _given(source, setting)
    for head, number in zip(heads, numbers, strict=True):
        steps += _head_steps(setting, head, number)
    r = beside([head.z for head in heads])
    if setting.heads > 1:
        r = source.own("concat", r)
        plain, latex = (", ".join(z.format(number) for number in numbers) for z in ("Z{}", "Z_{{{}}}"))
        steps.append(Step("concat", "The heads' outputs side by side", _table(r, labels, "z"), "Z",
                          f"Z = [{plain}]", f"Z = [{latex}]"))  # fmt: skip
    if "O" in setting.weights:
        r = source.own("r", times(r, setting.weights["O"]))
        steps.append(Step("r", "Output projection", _table(r, labels, "r"), "R", "R = Z·W_O", "R = Z W_O"))
    logits: Matrix = []
    if "U" in setting.weights:
        logits = source.own("logits", times(r, setting.weights["U"]))
        tied = source.values.get("unembedding") == "tied"
        plain, latex = ("L = R·Eᵀ", r"L = R E^{\top}") if tied else ("L = R·U", "L = R U")
        steps.append(Step("logits", "Logits", Grid.of(logits, labels, setting.vocabulary), "L", plain, latex))
    for loss in setting.losses:
        steps += loss_steps(source, loss, logits, labels, setting.vocabulary)
    empty = [label for label, row in zip(labels, setting.allowed, strict=True) if not any(row)]
    remarks = [f"{label} may attend to nothing: its weights are zeros." for label in empty]
    if setting.gradients:
        made, said = gradient_steps(source, setting, heads, logits)
        steps += made
        remarks += said
    found = _in_float64(setting)
    apart = {step.key: difference(step.grid.cells, found[step.key]) for step in steps if step.key in found}
    checks = [Check("attend in float64", max(apart.values()))]
    if setting.gradients:
        worst = max(worst for key, worst in apart.items() if key.startswith("grad_"))
        checks.append(Check("autograd through attend in float64", worst))
    return steps, checks, remarks


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


def _head(source: Source, setting: Setting, h: int, number: str) -> Head:
    x = source.own("x", setting.x)

    def part(name: str) -> Matrix:
        weight = setting.weights[name]
        width = len(weight[0]) // setting.heads
        rows = x if name == "Q" or setting.source is setting.x else setting.source
        return source.own(f"{name.lower()}{number}", times(rows, columns(weight, h * width, (h + 1) * width)))

    q, k, v = part("Q"), part("K"), part("V")
    scores = source.own(f"scores{number}", times(q, transpose(k)))
    masked = source.own(f"masked{number}", _masked(scores, setting.allowed))
    weights = [softmax(row, [score != -sympy.oo for score in row], setting.temperature) for row in masked]
    weights = source.own(f"weights{number}", weights)
    return Head(q, k, v, scores, weights, source.own(f"z{number}", times(weights, v)))


def _masked(scores: Matrix, allowed: list[list[bool]]) -> Matrix:
    return [[x if may else -sympy.oo for x, may in zip(*row, strict=True)] for row in zip(scores, allowed, strict=True)]


def _features(letter: str, matrix: Matrix) -> list[str]:
    """Names for the columns of a matrix."""
    return [f"{letter}{i + 1}" for i in range(len(matrix[0]))]


def _table(matrix: Matrix, rows: list[str], letter: str) -> Grid:
    return Grid.of(matrix, rows, _features(letter, matrix))


def _given(source: Source, setting: Setting) -> list[Step]:
    """What the problem gives: embeddings and weights; then X, which is a question only where tokens make it."""
    width = _features("x", setting.x)
    steps = []
    if not setting.direct and "x" not in source.values:
        table = source.table("embeddings")
        grid = _table([table.vector(name) for name in table.values], list(table.values), "x")
        steps.append(Step("E", "Embeddings", grid, "E", given=True))
    inputs = {} if setting.direct else {"Q": width, "K": width, "V": width}
    inputs["O"] = _features("z", setting.weights["V"])
    for name, rows in inputs.items():
        if name in setting.weights:
            grid = _table(setting.weights[name], rows, name.lower() if name != "O" else "r")
            steps.append(Step(f"W_{name}", f"The weights W_{name}", grid, f"W_{name}", given=True))
    if "U" in setting.weights and "unembedding" not in source.values:
        matrix = setting.weights["U"]
        grid = Grid.of(matrix, _features("r", transpose(matrix)), setting.vocabulary)
        steps.append(Step("U", "The unembedding U", grid, "U", given=True))
    if setting.direct:
        return steps
    grid = _table(setting.x, setting.labels, "x")
    if "x" in source.values:
        return [*steps, Step("x", "The inputs", grid, "X", given=True)]
    formula = "row i of X is the embedding of token i"
    return [*steps, Step("x", "Embeddings of the tokens", grid, "X", formula, r"X_{i,:} = E_{\mathrm{token}_i,:}")]


def _head_steps(setting: Setting, head: Head, h: str) -> list[Step]:
    labels, keys = setting.labels, setting.keys
    of, columns, sub = (f" of head {h}", f"[its columns of head {h}]", f"_{{{h}}}") if h else ("", "", "")
    steps = []
    for key, name, made in (("q", "Queries", head.q), ("k", "Keys", head.k), ("v", "Values", head.v)):
        big = key.upper()
        formulas = f"{big}{h} = X·W_{big}{columns}", rf"{big}{sub} = X W_{{{big}{',' + h if h else ''}}}"
        grid = _table(made, labels if key == "q" else keys, key)
        said = ("", "") if setting.direct else formulas
        steps.append(Step(f"{key}{h}", name + of, grid, f"{big}{h}", *said, given=setting.direct))
    scores, weights = Grid.of(head.scores, labels, keys), Grid.of(head.weights, labels, keys)
    formula, latex = _softmax_formula(setting.temperature)
    steps.append(Step(f"scores{h}", "Scores" + of, scores, f"S{h}", f"S{h} = Q{h}·K{h}ᵀ",
                      rf"S{sub} = Q{sub} K{sub}^{{\top}}"))  # fmt: skip
    if not all(may for row in setting.allowed for may in row):
        masked = Grid.of(_masked(head.scores, setting.allowed), labels, keys)
        said = "−∞ where a query may not attend", r"S_{ij} = -\infty \text{ where } i \text{ may not attend to } j"
        steps.append(Step(f"masked{h}", f"Scores{of} under the mask {setting.mask}", masked, f"S{h}", *said))
    return [
        *steps,
        Step(f"weights{h}", "Attention weights" + of, weights, f"P{h}", formula.format(h=h), latex.replace("SUB", sub)),
        Step(f"z{h}", "Weighted sums of the values" + of, _table(head.z, labels, "z"), f"Z{h}",
             f"Z{h} = P{h}·V{h}", f"Z{sub} = P{sub} V{sub}"),
    ]  # fmt: skip


def _softmax_formula(T: Number) -> tuple[str, str]:
    softmax = r"\operatorname{softmax}(SSUB / T)"
    if T == 0:
        plain = "P{h} = lim T→0 softmax(S{h} / T): all weight on the row's largest score, ties share it"
        return plain, r"PSUB = \lim_{T \to 0^{+}} " + softmax
    if T.is_infinite:
        plain = "P{h} = lim T→∞ softmax(S{h} / T): the same weight for every key that is allowed"
        return plain, r"PSUB = \lim_{T \to \infty} " + softmax
    return f"P{{h}} = softmax(S{{h}} / T), T = {text(T)}", rf"PSUB = {softmax}, \quad T = {sympy.latex(T)}"


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
