"""Six ways to say where a token stands (and none), inside the trained length and beyond it.

Three tasks for a causal decoder: the token three places back (a distance), the token in place 3 (an absolute place),
and the one marked token before (neither: where it stands does not matter)."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch

from benchmarks.studies.learning import TESTED_WITH, decoder, fit_lengths, right, tokens
from benchmarks.studies.runner import Curve, Outcome, Sizes, Study
from clearhead.data.batch import TokenBatch
from clearhead.errors import ShapeError
from clearhead.nn.positions import ALiBi, LearnedPositions, NoPE, Positions, RelativeBias, Rotary, Sinusoidal

DISTANCE, PLACE, MARK = "three places back", "the token in place 3", "the marked token"
STRETCHED = "learned, table stretched"
SOLVED, LR = 0.95, 3e-3

ENCODINGS: dict[str, Positions] = {
    "none": NoPE(),
    "learned": LearnedPositions(),  # as many rows as are trained
    STRETCHED: LearnedPositions(),
    "sinusoidal": Sinusoidal(),
    "relative bias": RelativeBias(n_buckets=16, max_distance=32, bidirectional=False),
    "rotary": Rotary(),
    "linear bias": ALiBi(),
}


def draw(sizes: Sizes, task: str, rows: int, length: int, generator: torch.Generator) -> TokenBatch:
    ids = torch.randint(sizes.symbols, (rows, length), generator=generator)
    place = torch.arange(length)
    if task == DISTANCE:
        return tokens(ids, ids.roll(3, dims=1), place >= 3)
    if task == PLACE:
        return tokens(ids, ids[:, 3:4].expand_as(ids), place > 3)
    marked = torch.randint((length + 1) // 2, (rows, 1), generator=generator)
    labels = ids.gather(1, marked).expand_as(ids)
    # Each symbol has a second id, which says that it is the marked one.
    return tokens(ids + sizes.symbols * (place == marked), labels, place > marked)


def measure(sizes: Sizes, task: str, name: str, seed: int) -> tuple[Curve, dict[str, Any]]:
    encoding = ENCODINGS[name]
    encoding = LearnedPositions(max_len=sizes.trained) if isinstance(encoding, LearnedPositions) else encoding
    model = decoder(sizes, 2 * sizes.symbols, positions=encoding)
    fit_lengths(model, partial(draw, sizes, task), sizes, seed, least=5)
    test = torch.Generator().manual_seed(TESTED_WITH)
    curve: Curve = {}
    table: Any = model.positions
    for length in sizes.lengths:
        if name == STRETCHED and length > sizes.trained:
            model.positions = table.resized(length)
        curve[str(length)] = None  # where a table of learned positions has no row for the last place
        with suppress(ShapeError):
            curve[str(length)] = right(model, draw(sizes, task, sizes.tested, length, test))
    return curve, {}


def finding(sizes: Sizes, found: Outcome) -> str:
    inside, beyond = str(sizes.trained), str(max(sizes.lengths))
    parts = []
    for task in found.panels:
        solved = [name for name in found.lines if (found.mean(task, name, inside) or 0.0) >= SOLVED]
        told = [
            f"{name} has {found.said(task, name, beyond)}" if found.values(task, name, beyond) else f"{name} refuses"
            for name in solved
        ]
        parts.append(
            f"{task}: {len(solved)} of {len(found.lines)} encodings reach {SOLVED:.0%} at {inside} tokens"
            + (f", of which at {beyond} tokens {'; '.join(told)}" if told else "")
        )
    return f"Trained on at most {inside} tokens. {'. '.join(parts)}."


STUDY = Study(
    name="positions",
    asks="Which position encodings solve a task inside the trained length, and which still do beyond it?",
    says=(
        "CENG 403 (Transformers and Attention), exam, Q4b: learned against trigonometric positions on longer sequences",
        "CENG 403 (Self-Attention and Transformers), answered exam, Q1d: kinds of positional encoding",
        "CSCI-GA 2572, Transformer homework, Problem 1.3b: relative for longer sequences and relations between tokens, "
        "absolute where the place itself matters",
        "Deep learning final exam of January 2025, Part 3, Problem 2, question 1: no positions where order is nothing",
    ),
    panel=("task", (DISTANCE, PLACE, MARK)),
    line=("encoding", tuple(ENCODINGS)),
    x="tokens",
    y="labels right",
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
    quick=Sizes(symbols=5, trained=7, lengths=(7, 11), width=8, heads=2, layers=1, steps=3, batch=3, tested=2, lr=LR),
    measure=measure,
    finding=finding,
)
