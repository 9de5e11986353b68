"""Why convolution does better on little data: from the same file as the claims about data."""

from __future__ import annotations

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
