"""One head against many, on tasks that need one, two and four places at once.

One layer; the label says which symbols stand at 1, 2 or 4 given distances, in order. All tasks have 16 labels alike.
A head that weighs two places alike tells which two symbols stand there and not which is where: with 4 symbols that is
right 5 times out of 8."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.studies.learning import TESTED_WITH, decoder, fit, right, tokens
from benchmarks.studies.runner import Curve, Outcome, Sizes, Study
from clearhead.data.batch import TokenBatch
from clearhead.nn.positions import RelativeBias
from clearhead.training import WarmupCosine

# How many symbols there are, and at which distances the label looks.
TASKS = {"one place": (16, (2,)), "two places": (4, (2, 5)), "four places": (2, (1, 3, 4, 6))}
POINTS = 10
CLEARLY = 0.05  # a difference that is more than luck


def draw(sizes: Sizes, task: str, rows: int, generator: torch.Generator) -> TokenBatch:
    n, distances = TASKS[task]
    ids = torch.randint(n, (rows, sizes.length), generator=generator)
    labels = torch.zeros_like(ids)
    for distance in distances:
        labels = n * labels + ids.roll(distance, dims=1)
    return tokens(ids, labels, torch.arange(sizes.length) >= max(distances))


def measure(sizes: Sizes, task: str, heads: str, seed: int) -> tuple[Curve, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    places = RelativeBias(n_buckets=32, max_distance=32, bidirectional=False)
    model = decoder(sizes, 16, positions=places, n_heads=int(heads), n_layers=1)
    test = draw(sizes, task, sizes.tested, torch.Generator().manual_seed(TESTED_WITH))
    curve: Curve = {}

    def note(step: int, loss: float) -> None:
        if step % max(1, sizes.steps // POINTS) == 0:
            curve[str(step)] = right(model, test)

    schedule = WarmupCosine(sizes.lr, sizes.steps // 10, sizes.steps)
    fit(model, lambda: draw(sizes, task, sizes.batch, generator), schedule, after=note)
    return curve, {"parameters": sum(p.numel() for p in model.parameters())}


def finding(sizes: Sizes, found: Outcome) -> str:
    parts = []
    for task in found.panels:
        last = found.xs(task)[-1]
        told = [f"{heads} {found.said(task, heads, last)}" for heads in found.lines]
        both = found.seeds(task, ("1", last), ("2", last))
        better = sum(two - one > CLEARLY for one, two in both)
        more = f"two heads beat one by more than {CLEARLY:.0%} in {better} of {len(both)} seeds"
        parts.append(f"{task}: {', '.join(told)}; {more}")
    return f"Labels right by number of heads. {'. '.join(parts)}."


STUDY = Study(
    name="heads",
    asks="What can several heads of one layer do that one head of the same width in all cannot?",
    says=(
        "CENG 403 (Transformers and Attention), exam, Q6b: single-head against multi-head attention",
        "CENG 403 (Self-Attention and Transformers), answered exam, Q2a: the same cost and richer representations",
        "CSCI-GA 2572, Transformer homework, Problem 1.4c: heads attend to different positions jointly",
        "Transformer exercises, 2a: with argmax a head sees one other token, k heads see k",
    ),
    panel=("task", tuple(TASKS)),
    line=("heads", ("1", "2", "4", "8")),
    x="step",
    y="labels right",
    sizes=Sizes(length=16, width=32, steps=600, batch=32, tested=256, lr=3e-3),
    quick=Sizes(length=11, width=16, steps=2, batch=2, tested=2, lr=3e-3),
    measure=measure,
    finding=finding,
)
