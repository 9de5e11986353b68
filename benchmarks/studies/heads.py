"""One head compared with several, on tasks that need one, two and four positions at once.

The model has one layer. The label encodes the symbols at 1, 2 or 4 fixed distances, in order; all tasks have 16 labels.
A head with equal weights on two positions determines the two symbols but not their order: with 4 symbols it is right
5 times out of 8.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.studies.learning import TEST_SEED, accuracy, decoder, fit, tokens
from benchmarks.studies.runner import Sizes, Study, StudyResults, Values
from clearhead.data.batch import TokenBatch
from clearhead.nn.positions import RelativeBias
from clearhead.training import WarmupCosine

# Number of symbols, and the distances that the label encodes.
TASKS = {"one place": (16, (2,)), "two places": (4, (2, 5)), "four places": (2, (1, 3, 4, 6))}
POINTS = 10
MIN_DIFFERENCE = 0.05  # smaller differences are attributed to chance


def draw(sizes: Sizes, task: str, rows: int, generator: torch.Generator) -> TokenBatch:
    """Draw rows of a task."""
    n, distances = TASKS[task]
    ids = torch.randint(n, (rows, sizes.length), generator=generator)
    labels = torch.zeros_like(ids)
    for distance in distances:
        labels = n * labels + ids.roll(distance, dims=1)
    return tokens(ids, labels, torch.arange(sizes.length) >= max(distances))


def measure(sizes: Sizes, task: str, heads: str, seed: int) -> tuple[Values, dict[str, Any]]:
    """Train and test one configuration; return values by x, and extra results."""
    generator = torch.Generator().manual_seed(seed)
    positions = RelativeBias(n_buckets=32, max_distance=32, bidirectional=False)
    model = decoder(sizes, 16, positions=positions, n_heads=int(heads), n_layers=1)
    test = draw(sizes, task, sizes.tested, torch.Generator().manual_seed(TEST_SEED))
    values: Values = {}

    def record(step: int, loss: float) -> None:
        if step % max(1, sizes.steps // POINTS) == 0:
            values[str(step)] = accuracy(model, test)

    schedule = WarmupCosine(sizes.lr, sizes.steps // 10, sizes.steps)
    fit(model, lambda: draw(sizes, task, sizes.batch, generator), schedule, after=record)
    return values, {"parameters": sum(p.numel() for p in model.parameters())}


def conclude(sizes: Sizes, results: StudyResults) -> str:
    """Return the conclusion from all rows."""
    parts = []
    for task in results.facets:
        last = results.xs(task)[-1]
        shares = [f"{heads} {results.format_mean(task, heads, last)}" for heads in results.series]
        pairs = results.by_seed(task, ("1", last), ("2", last))
        n_better = sum(two - single > MIN_DIFFERENCE for single, two in pairs)
        summary = f"two heads beat one by more than {MIN_DIFFERENCE:.0%} in {n_better} of {len(pairs)} seeds"
        parts.append(f"{task}: {', '.join(shares)}; {summary}")
    return f"Accuracy by number of heads. {'. '.join(parts)}."


STUDY = Study(
    name="heads",
    question="Which tasks can several heads of one layer solve that one head of the same total width cannot?",
    statements=(
        "CENG 403 (Transformers and Attention), exam, Q6b: single-head against multi-head attention",
        "CENG 403 (Self-Attention and Transformers), answered exam, Q2a: the same cost and richer representations",
        "CSCI-GA 2572, Transformer homework, Problem 1.4c: heads attend to different positions jointly",
        "Transformer exercises, 2a: with argmax a head attends to one other token, k heads to k",
    ),
    facet=("task", tuple(TASKS)),
    series=("heads", ("1", "2", "4", "8")),
    x="step",
    y="accuracy",
    sizes=Sizes(length=16, width=32, steps=600, batch=32, tested=256, lr=3e-3),
    smoke=Sizes(length=11, width=16, steps=2, batch=2, tested=2, lr=3e-3),
    measure=measure,
    conclude=conclude,
)
