"""How a deep, narrow stack learns with the norm before or after the sum, and without warm-up, clipping or a fitting
start of the weights: one curve of losses each, at a learning rate that is high on purpose."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from clearhead.bench.studies.engine import Curve, Outcome, Study
from clearhead.bench.studies.learning import each, fit, symbols, tokens
from clearhead.data.batch import TokenBatch
from clearhead.layers import DepthScaled, Init, PostNorm, PreNorm, TruncatedNormal, Xavier
from clearhead.models import DecoderConfig
from clearhead.positions import Rotary
from clearhead.training import WarmupCosine

LEARNED = 0.1  # nats: a loss below this, of log 16 = 2.8 at the start, is a task that was learned
POINTS = 25


@dataclass(frozen=True)
class Sizes:
    symbols: int = 16
    length: int = 16
    width: int = 32
    heads: int = 4
    layers: int = 8
    steps: int = 250
    warmup: int = 50
    batch: int = 16
    lr: float = 5e-3
    limit: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """What is changed, one thing at a time but for one that changes two."""

    warmup: bool = True
    clipped: bool = True
    init: Init = Xavier()


RECIPES = {
    "warm-up, clipping, Xavier": Recipe(),
    "no warm-up": Recipe(warmup=False),
    "no clipping": Recipe(clipped=False),
    "neither of the two": Recipe(warmup=False, clipped=False),
    "weights begin at std 0.02": Recipe(init=TruncatedNormal(0.02)),
    "0.02, scaled by depth": Recipe(init=DepthScaled(0.02)),
    "weights begin at std 1": Recipe(init=TruncatedNormal(1.0)),
}


def measure(sizes: Sizes, norm: str, name: str, seed: int) -> tuple[Curve, dict[str, Any]]:
    generator, recipe = torch.Generator().manual_seed(seed), RECIPES[name]

    def some() -> TokenBatch:
        ids = symbols(sizes.symbols, sizes.batch, sizes.length, generator)
        return tokens(ids, ids.roll(3, dims=1), torch.arange(sizes.length) >= 3)

    model = DecoderConfig(
        vocab_size=sizes.symbols,
        max_len=sizes.length,
        d_model=sizes.width,
        n_heads=sizes.heads,
        n_layers=sizes.layers,
        d_ff=2 * sizes.width,
        positions=Rotary(),
        tied=False,
        scaled_embedding=True,
        residual=PreNorm() if norm == "pre-norm" else PostNorm(),
        init=recipe.init,
    ).build()
    losses: list[float] = []
    fit(
        model,
        some,
        WarmupCosine(sizes.lr, sizes.warmup if recipe.warmup else 0, sizes.steps),
        limit=sizes.limit if recipe.clipped else None,
        after=lambda step, loss: losses.append(loss),
    )
    every = each(sizes.steps, POINTS)
    curve: Curve = {}
    for start in range(0, sizes.steps, every):
        some_losses = losses[start : start + every]
        whole = len(some_losses) == min(every, sizes.steps - start)
        curve[str(start + every)] = sum(some_losses) / len(some_losses) if whole else None
    return curve, {"init": repr(recipe.init), "warmup": recipe.warmup, "clipped": recipe.clipped}


def finding(sizes: Sizes, found: Outcome) -> str:
    parts = []
    for norm in found.panels:
        last = found.xs(norm)[-1]
        ends = {name: found.values(norm, name, last) for name in found.lines}
        learned = {name: sum(loss < LEARNED for loss in losses) for name, losses in ends.items()}
        told = [f"{name} {learned[name]} of {found.n_seeds}" for name in found.lines]
        parts.append(f"{norm}: {', '.join(told)}")
    return (
        f"Seeds whose last loss is below {LEARNED} nats, {sizes.layers} layers at a learning rate of {sizes.lr:g}. "
        f"{'. '.join(parts)}."
    )


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
    sizes=Sizes(),
    quick=dataclasses.replace(Sizes(), symbols=5, length=7, width=8, heads=2, layers=1, steps=5, warmup=2, batch=2),
    measure=measure,
    finding=finding,
    log_y=True,
)
