"""How a deep, narrow stack learns with the norm before or after the sum, and without warm-up, clipping or a fitting
start of the weights: one curve of losses each, at a learning rate that is high on purpose."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.studies.learning import decoder, fit, tokens
from benchmarks.studies.runner import Curve, Outcome, Sizes, Study
from clearhead.data.batch import TokenBatch
from clearhead.nn import DepthScaled, Init, PostNorm, PreNorm, TruncatedNormal, Xavier
from clearhead.nn.positions import Rotary
from clearhead.training import WarmupCosine

LEARNED = 0.1  # nats: a loss below this, of log 16 = 2.8 at the start, is a task that was learned
POINTS = 25

# Warm-up, clipping, and how weights begin: one thing is changed at a time, but for one that changes two.
RECIPES: dict[str, tuple[bool, bool, Init]] = {
    "warm-up, clipping, Xavier": (True, True, Xavier()),
    "no warm-up": (False, True, Xavier()),
    "no clipping": (True, False, Xavier()),
    "neither of the two": (False, False, Xavier()),
    "weights begin at std 0.02": (True, True, TruncatedNormal(0.02)),
    "0.02, scaled by depth": (True, True, DepthScaled(0.02)),
    "weights begin at std 1": (True, True, TruncatedNormal(1.0)),
}


def measure(sizes: Sizes, norm: str, name: str, seed: int) -> tuple[Curve, dict[str, Any]]:
    generator, (warmup, clipped, init) = torch.Generator().manual_seed(seed), RECIPES[name]

    def some() -> TokenBatch:
        ids = torch.randint(sizes.symbols, (sizes.batch, sizes.length), generator=generator)
        return tokens(ids, ids.roll(3, dims=1), torch.arange(sizes.length) >= 3)

    residual = PreNorm() if norm == "pre-norm" else PostNorm()
    model = decoder(sizes, sizes.symbols, positions=Rotary(), residual=residual, init=init)
    losses: list[float] = []
    schedule = WarmupCosine(sizes.lr, sizes.warmup if warmup else 0, sizes.steps)
    fit(model, some, schedule, limit=sizes.limit if clipped else None, after=lambda step, loss: losses.append(loss))
    every = max(1, sizes.steps // POINTS)
    curve: Curve = {}
    for start in range(0, sizes.steps, every):
        some_losses = losses[start : start + every]
        whole = len(some_losses) == min(every, sizes.steps - start)
        curve[str(start + every)] = sum(some_losses) / len(some_losses) if whole else None
    return curve, {"init": repr(init), "warmup": warmup, "clipped": clipped}


def finding(sizes: Sizes, found: Outcome) -> str:
    parts = []
    for norm in found.panels:
        last = found.xs(norm)[-1]
        learned = {name: sum(loss < LEARNED for loss in found.values(norm, name, last)) for name in found.lines}
        others = [
            f"; {name} in {seeds} of {found.n_seeds}, to {found.said(norm, name, last, '.2g')}"
            for name, seeds in learned.items()
            if seeds < found.n_seeds
        ]
        parts.append(f"{norm}: {len(learned) - len(others)} of {len(learned)} recipes in every seed{''.join(others)}")
    what = f"{sizes.layers} layers at a learning rate of {sizes.lr:g}"
    return f"What learns, to a loss below {LEARNED} nats, with {what}. {'. '.join(parts)}."


STUDY = Study(
    name="stability",
    asks="What do the place of the norm, warm-up, clipping and the start of the weights change in training?",
    says=(
        "CENG 403 (Transformers and Attention), exam, Q7a: warm-up with cosine decay",
        "CENG 403 (Transformers and Attention), exam, Q7b: why gradients are clipped, pre-norm against post-norm, and "
        "how weights begin",
        "CSCI-GA 2572, Transformer homework, Problem 1.4e: norms make training less sensitive to initialisation and "
        "learning rate",
    ),
    panel=("norm", ("pre-norm", "post-norm")),
    line=("recipe", tuple(RECIPES)),
    x="step",
    y="loss, nats",
    sizes=Sizes(symbols=16, length=16, width=32, heads=4, layers=8, steps=250, warmup=50, batch=16, lr=5e-3, limit=1.0),
    quick=Sizes(symbols=5, length=7, width=8, heads=2, layers=1, steps=5, warmup=2, batch=2, lr=5e-3, limit=1.0),
    measure=measure,
    finding=finding,
    log_y=True,
)
