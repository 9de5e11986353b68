"""Why convolution does better on little data, and what its restrictions cost."""

from __future__ import annotations

import torch

from clearhead.course.claims.data_efficiency import REDRAWN, beyond_chance, contrast, mean, study
from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.registry import HOMEWORK, claim
from clearhead.course.claims.study import ORIGINAL, PERMUTED

_CONVOLUTIONS = {"exam-cnn": "the exam's network", "cnn": "residual network"}


@claim(
    HOMEWORK,
    "1.5d, explanation",
    statement=(
        "Locality and the two-dimensional neighborhood, which convolution has built in, help it when there "
        "are few data."
    ),
    method=(
        f"{REDRAWN}Every picture's 4 × 4 patches in one other order, the same for all pictures: neighborhoods "
        "between patches are gone, nothing else. How much worse does a convolutional network learn? (To a "
        "Transformer with learned positions both are the same task: see `no-spatial-bias`.)"
    ),
)
def locality_helps(t: Experiment) -> None:
    for network, name in _CONVOLUTIONS.items():
        for n in study().sizes([network], PERMUTED):
            drop = contrast([(1, (network, n, ORIGINAL)), (-1, (network, n, PERMUTED))])
            otherwise = f"With {n:,} pictures {name} does not need neighboring patches"
            beyond_chance(t, f"{name}, {n:,} pictures: whole − patches moved", drop, otherwise)
            before, after = (100 * (mean(network, n, kind) - mean("vit", n)) for kind in (ORIGINAL, PERMUTED))
            t.note(f"{name}, {n:,} pictures: lead over the Transformer {before:.1f} → {after:.1f} points")


@claim(
    HOMEWORK,
    "1.2b",
    statement=(
        "Heads of reduced width and small filters are more parameter-efficient than one large transformation while "
        "they maintain its expressiveness."
    ),
    method=(
        "Dimension of the space of all maps from 9 to 9 positions that a filter of width 3 can compute, and that a "
        "dense layer can; rank of the scores of 8 tokens of width 8 for one head, and for a head of four."
    ),
)
def efficient_and_expressive(t: Experiment) -> None:
    inputs = torch.eye(9, dtype=torch.float64)[:, None]
    kernels = torch.eye(3, dtype=torch.float64)[:, None, None]
    maps = [torch.nn.functional.conv1d(inputs, kernel[None, 0], padding=1).flatten() for kernel in kernels]
    filters, dense = int(torch.linalg.matrix_rank(torch.stack(maps))), 9 * 9
    t.assert_equal(f"maps of 9 positions: dimension {dense} for a dense layer; for a filter of width 3", filters, dense)
    x = t.normal(8, 8)
    single, split = (
        int(torch.linalg.matrix_rank((x @ t.normal(8, width)) @ (x @ t.normal(8, width)).T)) for width in (8, 2)
    )
    t.assert_equal(f"rank of the scores: {single} for one head; for a head of four", split, single)
    t.correction(
        "Fewer parameters represent fewer maps: filters are local and the same at every position, and the scores of a "
        "head of width d/h have rank d/h at most.",
        filters == 3 < dense and split == 2 < single == 8,
    )
