"""The loss of an attention problem: which position is asked for which word, its probability, its cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from clearhead.work.algebra import Matrix, softmax
from clearhead.work.numbers import Number
from clearhead.work.sheet import Grid, Step
from clearhead.work.source import Source


@dataclass(frozen=True)
class Loss:
    """A sum (or mean) of −log P(word) over positions, which count from 0 here and from 1 in files."""

    name: str
    title: str
    targets: dict[int, str]
    mean: bool


def read_losses(source: Source, length: int, vocabulary: list[str], has_logits: bool) -> list[Loss]:
    losses: list[Loss] = []
    for block in source.tables("loss"):
        block.only("name", "title", "targets", "reduction")
        block.need("targets")
        if not has_logits:
            block.fail(None, "a loss needs logits; give unembedding = 'tied' or U in [weights]")
        table = block.table("targets")
        if not table.values:
            block.fail("targets", "targets is empty; expected positions and words, such as { 4 = 'A' }")
        targets = {}
        for position, word in table.values.items():
            if not position.isdecimal() or not 1 <= int(position) <= length:
                block.fail("targets", f"targets names position {position!r}; expected a number from 1 to {length}")
            if word not in vocabulary:
                known = ", ".join(map(repr, vocabulary))
                block.fail("targets", f"the target {word!r} is not in the vocabulary {known}")
            targets[int(position) - 1] = word
        name = block.text("name", "loss")
        if any(loss.name == name for loss in losses):
            block.fail("name", f"two losses are named {name!r}; give each its own name")
        mean = block.choice("reduction", ("sum", "mean"), "sum") == "mean"
        losses.append(Loss(name, block.text("title", "Cross-entropy"), targets, mean))
    return losses


def loss_steps(source: Source, loss: Loss, logits: Matrix, labels: list[str], vocabulary: list[str]) -> list[Step]:
    """The probabilities of the words at the positions asked, those of the targets, and the loss."""
    table = source.own(f"probabilities_{loss.name}", [_probabilities(logits[t]) for t in loss.targets])
    rows = [labels[t] for t in loss.targets]
    picked = [row[vocabulary.index(word)] for row, word in zip(table, loss.targets.values(), strict=True)]
    picked = source.own(f"targets_{loss.name}", picked)
    wanted = [f"{labels[t]} → {word}" for t, word in loss.targets.items()]
    total = sympy.Add(*[_surprise(logits[t], vocabulary.index(word)) for t, word in loss.targets.items()])
    if {f"probabilities_{loss.name}", f"targets_{loss.name}"} & source.answered.keys():
        total = -sympy.Add(*[sympy.log(p) for p in picked])
    if loss.mean:
        total = total / len(loss.targets)
    of = "mean" if loss.mean else "sum"
    return [
        Step(f"probabilities_{loss.name}", f"{loss.title}: probabilities",
             Grid.of(table, rows, vocabulary), "p",
             "p = softmax(row of L)", r"p_t = \operatorname{softmax}(L_{t,:})"),
        Step(f"targets_{loss.name}", f"{loss.title}: probability of each target",
             Grid.of([[x] for x in picked], wanted, ["P"]), "P", "position → word it is asked for",
             r"P(y_t) = p_{t, y_t}"),
        Step(loss.name, f"{loss.title}: loss", Grid.one(total), "ℓ", f"ℓ = {of} of −log P over the targets",
             r"\ell = -" + (rf"\tfrac{{1}}{{{len(picked)}}}" if loss.mean else "") + r"\sum_t \log P(y_t)"),
    ]  # fmt: skip


def _probabilities(row: list[Number]) -> list[Number]:
    return softmax(row, [True] * len(row), sympy.Integer(1))


def _surprise(row: list[Number], word: int) -> Number:
    """−log softmax(row)[word] as log Σ exp − the word's logit, which stays short."""
    return sympy.log(sympy.Add(*[sympy.exp(x) for x in row])) - row[word]


def error_of(loss: Loss, logits: Matrix, vocabulary: list[str]) -> Matrix:
    """∂ℓ/∂logits: p − one-hot at the positions asked, zeros elsewhere."""
    zero = sympy.Integer(0)
    rows: Matrix = []
    for t, row in enumerate(logits):
        if t not in loss.targets:
            rows.append([zero for _ in row])
            continue
        hit = vocabulary.index(loss.targets[t])
        share = sympy.Rational(1, len(loss.targets)) if loss.mean else sympy.Integer(1)
        rows.append([share * (p - int(i == hit)) for i, p in enumerate(_probabilities(row))])
    return rows
