"""Parse an attention problem and check every shape before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from clearhead import masks
from clearhead.course.exercises.algebra import Matrix, eye, transpose
from clearhead.course.exercises.numbers import Number, text
from clearhead.course.exercises.source import ProblemSource
from clearhead.errors import ClearheadError

_WEIGHTS = ("Q", "K", "V", "O", "U")
_DIRECT = ("Q", "K", "V")


@dataclass(frozen=True)
class LossSpec:
    """A sum (or mean) of −log P(word) over positions, which count from 0 here and from 1 in files."""

    name: str
    title: str
    targets: dict[int, str]
    mean: bool


@dataclass(frozen=True)
class AttentionProblem:
    """A validated attention problem.

    If the file contains Q, K and V (`direct`), they are the weights applied to identity matrices; there
    may be more or fewer keys than queries.
    """

    labels: list[str]
    keys: list[str]
    x: Matrix  # (T, M)
    source: Matrix  # (S, M), input of keys and values
    direct: bool
    weights: dict[str, Matrix]  # Q, K (M, H·D), V (M, H·E), perhaps O (H·E, M) and U (M, V)
    mask: masks.Mask
    allowed: list[list[bool]]
    temperature: Number
    heads: int
    vocabulary: list[str]
    losses: list[LossSpec]
    gradients: list[str]

    @property
    def is_soft(self) -> bool:
        """Whether the weights depend smoothly on the scores; false at temperatures 0 and ∞."""
        return self.temperature != 0 and not self.temperature.is_infinite

    @property
    def numbers(self) -> list[str]:
        """Suffixes of the heads; empty if there is only one head."""
        return [f"{h + 1}" for h in range(self.heads)] if self.heads > 1 else [""]


def parse_attention(source: ProblemSource) -> AttentionProblem:
    """Return the problem in a file; raise ProblemError if a shape does not fit."""
    embeddings = source.table("embeddings")
    vectors = {token: embeddings.vector(token) for token in embeddings.values}
    tokens = source.names("tokens")
    table = source.table("weights")
    direct = any(name in source.values for name in _DIRECT)
    if direct:
        weights = _read_direct(source, table)
        labels = [f"query {i + 1}" for i in range(len(weights["Q"]))]
        keys = [f"key {i + 1}" for i in range(len(weights["K"]))]
        x, origin = eye(len(labels)), eye(len(keys))
    else:
        labels, x = _inputs(source, tokens, vectors)
        keys, origin = labels, x
        table.allow_keys(*_WEIGHTS)
        table.require_keys("Q", "K", "V")
        weights = {name: table.matrix(name) for name in _WEIGHTS if name in table.values}
    heads = source.integer("heads", 1, most=64)
    vocabulary = source.names("vocabulary") or list(vectors)
    if "unembedding" in source.values:
        if source.text("unembedding") != "tied" or not vectors:
            options = "unembedding may only be 'tied', with [embeddings]"
            source.fail("unembedding", f"{options}; give others as U in [weights]")
        if "U" in weights:
            table.fail("U", "U is given and unembedding is 'tied'; give one of them")
        vocabulary = list(vectors)
        weights["U"] = transpose(list(vectors.values()))
    _check_shapes(table if "U" in table.values else source, table, weights, x, origin, heads, len(vocabulary))
    try:
        mask = masks.parse(source.text("mask", "full()"))
        allowed = mask.dense(len(x), len(origin)).tolist()
    except ClearheadError as error:
        source.fail("mask", f"mask: {str(error).splitlines()[0]}")
    losses = _losses(source, len(x), vocabulary, "U" in weights)
    gradients = source.names("gradient")
    for name in gradients:
        if name not in ("Q", "K", "V") or not losses:
            source.fail("gradient", "gradient lists some of 'Q', 'K', 'V' and needs a [[loss]] to differentiate")
    default = sympy.sqrt(sympy.Integer(len(weights["Q"][0]) // heads))
    temperature = source.number("temperature", default, infinite=True)
    if temperature.is_negative:
        source.fail("temperature", f"temperature is {text(temperature)}; expected 0, a positive number or 'inf'")
    return AttentionProblem(
        labels, keys, x, origin, direct, weights, mask, allowed, temperature, heads, vocabulary, losses, gradients
    )


def _read_direct(source: ProblemSource, table: ProblemSource) -> dict[str, Matrix]:
    """Return Q, K and V of the file, which replace tokens and projections."""
    source.require_keys(*_DIRECT)
    for key in ("x", "tokens", "embeddings"):
        if key in source.values:
            source.fail(key, f"{key} is given together with Q, K and V; give only one of them")
    table.allow_keys("O", "U")
    matrices = {name: source.matrix(name) for name in _DIRECT}
    if len(matrices["K"]) != len(matrices["V"]):
        source.fail("V", f"K has {len(matrices['K'])} rows and V has {len(matrices['V'])}; each key has one value")
    return matrices | {name: table.matrix(name) for name in table.values}


def _inputs(source: ProblemSource, tokens: list[str], vectors: dict[str, list[Number]]) -> tuple[list[str], Matrix]:
    if "x" in source.values:
        if vectors and tokens:
            source.fail("x", "x is given together with tokens and embeddings; give one of them")
        x = source.matrix("x")
        if tokens and len(tokens) != len(x):
            source.fail("tokens", f"there are {len(tokens)} tokens and x has {len(x)} rows; give a token for each row")
        names = tokens or ["x"] * len(x)
    else:
        source.require_keys("tokens", "embeddings")
        if not tokens:
            source.fail("tokens", "tokens is an empty list; expected at least one token")
        first = next(iter(vectors), "")
        for token, vector in vectors.items():
            if len(vector) != len(vectors[first]):
                sizes = f"{token!r} has {len(vector)} numbers and that of {first!r} has {len(vectors[first])}"
                source.fail(("embeddings", token), f"the embedding of {sizes}; give all the same length")
        for i, token in enumerate(tokens):
            if token not in vectors:
                options = ", ".join(map(repr, vectors))
                source.fail(("tokens", i), f"the token {token!r} has no embedding; expected one of {options}")
        x = [vectors[token] for token in tokens]
        names = tokens
    return [f"{i + 1} {name}" if name != "x" else f"{i + 1}" for i, name in enumerate(names)], x


def _check_shapes(
    unembedding: ProblemSource,
    table: ProblemSource,
    weights: dict[str, Matrix],
    x: Matrix,
    keys: Matrix,
    heads: int,
    words: int,
) -> None:
    """Raise ProblemError if the shapes of consecutive weights do not match."""

    def size(name: str) -> str:
        return f"{len(weights[name])}×{len(weights[name][0])}"

    for name in ("Q", "K", "V"):
        width = len((x if name == "Q" else keys)[0])
        if len(weights[name]) != width:
            table.fail(name, f"W_{name} is {size(name)} and X has width {width}; give W_{name} {width} rows")
        if len(weights[name][0]) % heads:
            shared = f"there are {heads} heads; its columns must divide among them"
            table.fail(name, f"W_{name} is {size(name)} and {shared}")
    if len(weights["Q"][0]) != len(weights["K"][0]):
        table.fail("K", f"W_Q is {size('Q')} and W_K is {size('K')}; give them the same number of columns")
    out = len(weights["V"][0])
    if "O" in weights:
        if len(weights["O"]) != out:
            table.fail("O", f"W_O is {size('O')} and Z has width {out}; give W_O {out} rows")
        out = len(weights["O"][0])
    if "U" in weights:
        if len(weights["U"]) != out:
            key = "U" if "U" in table.values else "unembedding"
            unembedding.fail(key, f"the unembedding is {size('U')} and R has width {out}; it needs {out} rows")
        if len(weights["U"][0]) != words:
            table.fail("U", f"U is {size('U')} and the vocabulary has {words} words; name each column in vocabulary")


def _losses(source: ProblemSource, length: int, vocabulary: list[str], has_logits: bool) -> list[LossSpec]:
    losses: list[LossSpec] = []
    for block in source.tables("loss"):
        block.allow_keys("name", "title", "targets", "reduction")
        block.require_keys("targets")
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
                options = ", ".join(map(repr, vocabulary))
                block.fail("targets", f"the target {word!r} is not in the vocabulary {options}")
            targets[int(position) - 1] = word
        name = block.text("name", "loss")
        if any(loss.name == name for loss in losses):
            block.fail("name", f"two losses are named {name!r}; give each its own name")
        mean = block.choice("reduction", ("sum", "mean"), "sum") == "mean"
        losses.append(LossSpec(name, block.text("title", "Cross-entropy"), targets, mean))
    return losses
