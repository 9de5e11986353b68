"""Training of a deep, narrow stack with pre-norm and post-norm, and without warm-up, clipping or good initialization.

The learning rate is high on purpose.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.studies.learning import decoder, fit, tokens
from benchmarks.studies.runner import Sizes, Study, StudyResults, Values
from clearhead.data.batch import TokenBatch
from clearhead.nn import DepthScaled, Init, PostNorm, PreNorm, TruncatedNormal, Xavier
from clearhead.nn.positions import Rotary
from clearhead.training import WarmupCosine

LEARNED = 0.1  # nats: the task counts as learned below this loss; it starts at log 16 = 2.8
POINTS = 25

# Warm-up, clipping, initialization. Each recipe changes one of them, except one that changes two.
RECIPES: dict[str, tuple[bool, bool, Init]] = {
    "warm-up, clipping, Xavier": (True, True, Xavier()),
    "no warm-up": (False, True, Xavier()),
    "no clipping": (True, False, Xavier()),
    "neither of the two": (False, False, Xavier()),
    "initialized with std 0.02": (True, True, TruncatedNormal(0.02)),
    "std 0.02, scaled by depth": (True, True, DepthScaled(0.02)),
    "initialized with std 1": (True, True, TruncatedNormal(1.0)),
}


def measure(sizes: Sizes, norm: str, name: str, seed: int) -> tuple[Values, dict[str, Any]]:
    """Train and test one configuration; return values by x, and extra results."""
    generator, (warmup, clipped, init) = torch.Generator().manual_seed(seed), RECIPES[name]

    def draw_batch() -> TokenBatch:
        ids = torch.randint(sizes.symbols, (sizes.batch, sizes.length), generator=generator)
        return tokens(ids, ids.roll(3, dims=1), torch.arange(sizes.length) >= 3)

    residual = PreNorm() if norm == "pre-norm" else PostNorm()
    model = decoder(sizes, sizes.symbols, positions=Rotary(), residual=residual, init=init)
    losses: list[float] = []
    schedule = WarmupCosine(sizes.lr, sizes.warmup if warmup else 0, sizes.steps)
    fit(
        model,
        draw_batch,
        schedule,
        limit=sizes.limit if clipped else None,
        after=lambda step, loss: losses.append(loss),
    )
    every = max(1, sizes.steps // POINTS)
    values: Values = {}
    for start in range(0, sizes.steps, every):
        window = losses[start : start + every]
        is_complete = len(window) == min(every, sizes.steps - start)
        values[str(start + every)] = sum(window) / len(window) if is_complete else None
    return values, {"init": repr(init), "warmup": warmup, "clipped": clipped}


def conclude(sizes: Sizes, results: StudyResults) -> str:
    """Return the conclusion from all rows."""
    parts = []
    for norm in results.facets:
        last = results.xs(norm)[-1]
        learned = {name: sum(loss < LEARNED for loss in results.values(norm, name, last)) for name in results.series}
        exceptions = [
            f"; {name} in {seeds} of {results.n_seeds}, to {results.format_mean(norm, name, last, '.2g')}"
            for name, seeds in learned.items()
            if seeds < results.n_seeds
        ]
        parts.append(
            f"{norm}: {len(learned) - len(exceptions)} of {len(learned)} recipes in every seed{''.join(exceptions)}"
        )
    heading = (
        f"Recipes that reach a loss below {LEARNED} nats with {sizes.layers} layers at a learning rate of {sizes.lr:g}"
    )
    return f"{heading}. {'. '.join(parts)}."


STUDY = Study(
    name="stability",
    question="How do the position of the norm, warm-up, clipping and initialization affect training?",
    statements=(
        "CENG 403 (Transformers and Attention), exam, Q7a: warm-up with cosine decay",
        "CENG 403 (Transformers and Attention), exam, Q7b: why gradients are clipped, pre-norm against post-norm, and "
        "initialization",
        "CSCI-GA 2572, Transformer homework, Problem 1.4e: norms make training less sensitive to initialization and "
        "learning rate",
    ),
    facet=("norm", ("pre-norm", "post-norm")),
    series=("recipe", tuple(RECIPES)),
    x="step",
    y="loss, nats",
    sizes=Sizes(symbols=16, length=16, width=32, heads=4, layers=8, steps=250, warmup=50, batch=16, lr=5e-3, limit=1.0),
    smoke=Sizes(symbols=5, length=7, width=8, heads=2, layers=1, steps=5, warmup=2, batch=2, lr=5e-3, limit=1.0),
    measure=measure,
    conclude=conclude,
    log_y=True,
)
