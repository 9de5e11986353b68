"""Why convolution does better on little data: from the same file as the claims about data."""

from __future__ import annotations

from clearhead.claims.data_efficiency import REDRAWN, contrast, mean, pictures_of, study
from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import HOMEWORK
from clearhead.claims.study import MOVED, WHOLE

_CONVOLUTIONS = {"exam-cnn": "the exam's network", "cnn": "residual network"}


@claim(
    "locality-helps",
    HOMEWORK,
    "1.5d, explanation",
    "Locality and the two-dimensional neighbourhood, which convolution has built in, help it when there are few data.",
    method=REDRAWN
    + "Every picture's 4 × 4 patches in one other order, the same for all pictures: neighbourhoods between patches "
    "are gone, nothing else. How much worse does a convolutional network learn? (To a Transformer with learned "
    "positions both are the same task: see `no-spatial-bias`.)",
)
def locality_helps(t: Trial) -> None:
    for network, name in _CONVOLUTIONS.items():
        for n in study().sizes([network], MOVED):
            drop = contrast([(1, (network, n, WHOLE)), (-1, (network, n, MOVED))])
            t.case(f"{name}, {pictures_of(n)}: whole − patches moved", drop, drop.above)
            if not drop.above:
                t.instead(f"With {pictures_of(n)} {name} does not need neighbouring patches: {drop}.", not drop.above)
            before, after = (100 * (mean(network, n, kind) - mean("vit", n)) for kind in (WHOLE, MOVED))
            t.note(f"{name}, {pictures_of(n)}: lead over the Transformer {before:.1f} → {after:.1f} points")
