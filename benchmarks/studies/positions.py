"""Position encodings (and none) within the trained length and beyond it.

Three tasks for a causal decoder: the token three positions back (relative), the token at position 3 (absolute), and
the one marked token before (independent of positions).
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch

from benchmarks.studies.learning import TEST_SEED, accuracy, decoder, fit_lengths, tokens
from benchmarks.studies.runner import Sizes, Study, StudyResults, Values
from clearhead.data.batch import TokenBatch
from clearhead.errors import ShapeError
from clearhead.nn.positions import ALiBi, LearnedPositions, NoPE, Positions, RelativeBias, Rotary, Sinusoidal

DISTANCE, POSITION, MARK = "three positions back", "the token at position 3", "the marked token"
INTERPOLATED = "learned, table interpolated"
SOLVED, LR = 0.95, 3e-3

ENCODINGS: dict[str, Positions] = {
    "none": NoPE(),
    "learned": LearnedPositions(),  # one row per trained position
    INTERPOLATED: LearnedPositions(),
    "sinusoidal": Sinusoidal(),
    "relative bias": RelativeBias(n_buckets=16, max_distance=32, bidirectional=False),
    "rotary": Rotary(),
    "linear bias": ALiBi(),
}


def draw(sizes: Sizes, task: str, rows: int, length: int, generator: torch.Generator) -> TokenBatch:
    """Draw rows of a task."""
    ids = torch.randint(sizes.symbols, (rows, length), generator=generator)
    position = torch.arange(length)
    if task == DISTANCE:
        return tokens(ids, ids.roll(3, dims=1), position >= 3)
    if task == POSITION:
        return tokens(ids, ids[:, 3:4].expand_as(ids), position > 3)
    marked = torch.randint((length + 1) // 2, (rows, 1), generator=generator)
    labels = ids.gather(1, marked).expand_as(ids)
    # Each symbol has a second id for the marked position.
    return tokens(ids + sizes.symbols * (position == marked), labels, position > marked)


def measure(sizes: Sizes, task: str, name: str, seed: int) -> tuple[Values, dict[str, Any]]:
    """Train and test one configuration; return values by x, and extra results."""
    encoding = ENCODINGS[name]
    encoding = LearnedPositions(max_len=sizes.trained) if isinstance(encoding, LearnedPositions) else encoding
    model = decoder(sizes, 2 * sizes.symbols, positions=encoding)
    fit_lengths(model, partial(draw, sizes, task), sizes, seed, least=5)
    test = torch.Generator().manual_seed(TEST_SEED)
    values: Values = {}
    table: Any = model.positions
    for length in sizes.lengths:
        if name == INTERPOLATED and length > sizes.trained:
            model.positions = table.resized(length)
        values[str(length)] = None  # a table of learned positions may have no row for the last position
        with suppress(ShapeError):
            values[str(length)] = accuracy(model, draw(sizes, task, sizes.tested, length, test))
    return values, {}


def conclude(sizes: Sizes, results: StudyResults) -> str:
    """Return the conclusion from all rows."""
    within, beyond = str(sizes.trained), str(max(sizes.lengths))
    parts = []
    for task in results.facets:
        solved = [name for name in results.series if (results.mean(task, name, within) or 0.0) >= SOLVED]
        shares = [
            f"{name} has {results.format_mean(task, name, beyond)}"
            if results.values(task, name, beyond)
            else f"{name} raises an error"
            for name in solved
        ]
        parts.append(
            f"{task}: {len(solved)} of {len(results.series)} encodings reach {SOLVED:.0%} at {within} tokens"
            + (f", of which at {beyond} tokens {'; '.join(shares)}" if shares else "")
        )
    return f"Trained on at most {within} tokens. {'. '.join(parts)}."


STUDY = Study(
    name="positions",
    question="Which position encodings solve a task within the trained length, and which beyond it?",
    statements=(
        "CENG 403 (Transformers and Attention), exam, Q4b: learned against trigonometric positions on longer sequences",
        "CENG 403 (Self-Attention and Transformers), answered exam, Q1d: kinds of positional encoding",
        "CSCI-GA 2572, Transformer homework, Problem 1.3b: relative for longer sequences and relations between tokens, "
        "absolute if the position itself matters",
        "Deep learning final exam of January 2025, Part 3, Problem 2, question 1: no positions if order is irrelevant",
    ),
    facet=("task", (DISTANCE, POSITION, MARK)),
    series=("encoding", tuple(ENCODINGS)),
    x="tokens",
    y="accuracy",
    sizes=Sizes(
        symbols=16,
        trained=16,
        lengths=(8, 16, 32, 64),
        width=32,
        heads=4,
        layers=2,
        steps=800,
        batch=32,
        tested=128,
        lr=LR,
    ),
    smoke=Sizes(symbols=5, trained=7, lengths=(7, 11), width=8, heads=2, layers=1, steps=3, batch=3, tested=2, lr=LR),
    measure=measure,
    conclude=conclude,
)
