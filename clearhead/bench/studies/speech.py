"""What a stream of speech pays for not seeing the future: the same small encoder under four masks.

Digits spoken by six people, put together to streams with pauses and noise. Once everybody is known from training and
other recordings of them are heard; then each of the six is left out in turn, and all of their recordings are heard."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from clearhead.bench.studies.engine import Curve, Outcome, Sizes, Study
from clearhead.models import load
from clearhead.pretrained.hear import hear
from clearhead.training import train
from clearhead.training.distributed import choose_device
from clearhead.training.recipe import Recipe
from clearhead.training.tasks import SpeechData

MASKS = {
    "everything": "full()",
    "the past": "causal()",
    "1.3 s of the past": "causal() & window(64, 0)",
    "and up to 0.3 s ahead": "(causal() | blocks(16)) & window(64, 15)",
}
KNOWN, NEW = "known speakers", "a speaker who was left out"
SINGLE, STREAMS, WAIT = "single digits wrong", "digits wrong in streams", "seconds to wait (95 %)"
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")


def measure(sizes: Sizes, panel: str, mask: str, seed: int, data: Path) -> tuple[Curve, dict[str, Any]]:
    if panel == KNOWN:
        found = trained(sizes, mask, seed, data, None)
        return {SINGLE: found["single"], STREAMS: found["streams"], WAIT: found["waits"][1]}, found
    each = {speaker: trained(sizes, mask, seed, data, speaker) for speaker in SPEAKERS}
    return {speaker: found["streams"] for speaker, found in each.items()}, each


def trained(sizes: Sizes, mask: str, seed: int, data: Path, without: str | None) -> dict[str, Any]:
    """Error rates, and the waits that half and 95 % of the digits do not exceed (None where all is heard first)."""
    settings = {
        "model.mask": MASKS[mask],
        "d_model": sizes.width,
        "n_heads": sizes.heads,
        "n_layers": sizes.layers,
        "steps": sizes.steps,
        "warmup_steps": sizes.warmup,
        "lr_max": sizes.lr,
        "batch.examples": sizes.batch,
        "n_validation": sizes.tested,
        "without": without,
        "seed": seed,
        "eval_every": sizes.steps,
        "checkpoint_every": sizes.steps + 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        made = train("speech", preset="spoken-digits", data=data, out=f"{folder}/run", set=settings)
        model = load(f"{folder}/run/model", device=choose_device("auto")).eval()
        settled = Recipe.of(f"{folder}/run").data
    assert isinstance(settled, SpeechData)
    task = settled.load(seed=0)  # the same streams for every seed
    single, streams = hear(model, task.singles), hear(model, task.validation)
    waits = [None if mask == "everything" else streams.latency(share) for share in (0.5, 0.95)]
    return {"single": 1 - single.accuracy, "streams": streams.error_rate, "waits": waits, "loss": made.train_loss}


def finding(sizes: Sizes, found: Outcome) -> str:
    parts = []
    for mask in found.lines:
        waits = found.values(KNOWN, mask, WAIT)
        wait = f"after {found.said(KNOWN, mask, WAIT, '.2f')} s at most for 95 %" if waits else "at the end"
        told = f"{mask}: {found.said(KNOWN, mask, STREAMS, '.1%')} of the digits in streams wrong"
        told += f" and {found.said(KNOWN, mask, SINGLE, '.1%')} of single ones, written down {wait}"
        new = [v for x in found.xs(NEW) for v in found.values(NEW, mask, x)] if NEW in found.panels else []
        parts.append(
            told + (f"; of a new speaker {sum(new) / len(new):.0%} ({min(new):.0%} to {max(new):.0%})" if new else "")
        )
    return f"What a moment sees, and what comes of it. {'. '.join(parts)}."


STUDY = Study(
    name="speech",
    asks="What does attention to a stream of speech pay for seeing only the past?",
    says=("CSCI-GA 2572, Transformer homework, Problem 1.3e: attention for speech as it comes in",),
    panel=("speakers", (KNOWN, NEW)),
    line=("sees", tuple(MASKS)),
    x="",
    y="share of digits, or seconds",
    sizes=Sizes(width=96, heads=4, layers=4, steps=1500, warmup=150, batch=64, tested=200, lr=2e-3),
    quick=Sizes(width=8, heads=2, layers=1, steps=1, warmup=1, batch=2, tested=1, lr=2e-3),
    measure=measure,
    finding=finding,
    bars=True,
    reads="recordings named like 7_jackson_32.wav, such as the Free Spoken Digit Dataset",
)
