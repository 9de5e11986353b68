"""What a stream of speech pays for not seeing the future, and for a voice that it has never heard.

Digits spoken by six people, put together to streams with pauses and noise, and heard by the same small encoder under
four masks: once with everybody known from other recordings, and once with each of the six left out in turn."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.studies.runner import Curve, Outcome, Sizes, Study
from clearhead.hub.evaluate import score_recordings
from clearhead.masks import full
from clearhead.models import load_checkpoint
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
KNOWN = "known speakers"
SINGLE, STREAMS, WAIT = "single digits wrong", "digits wrong in streams", "seconds to wait (95 %)"
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")


def measure(sizes: Sizes, panel: str, mask: str, seed: int, data: Path) -> tuple[Curve, dict[str, Any]]:
    return trained(sizes, {"model.mask": MASKS[mask], "seed": seed}, data)


def measure_new(sizes: Sizes, mask: str, speaker: str, seed: int, data: Path) -> tuple[Curve, dict[str, Any]]:
    return trained(sizes, {"model.mask": MASKS[mask], "held_out_speaker": speaker, "seed": seed}, data)


def trained(sizes: Sizes, choices: dict[str, Any], data: Path) -> tuple[Curve, dict[str, Any]]:
    """Error rates, and the wait that 95 % of the digits do not exceed (None where all is heard first)."""
    settings: dict[str, Any] = {"d_model": sizes.width, "n_heads": sizes.heads, "n_layers": sizes.layers}
    settings |= {"steps": sizes.steps, "warmup_steps": sizes.warmup, "lr_max": sizes.lr}
    settings |= {"batch.examples": sizes.batch, "n_validation": sizes.tested}
    settings |= {"eval_every": sizes.steps, "checkpoint_every": sizes.steps + 1}
    with tempfile.TemporaryDirectory() as folder:
        made = train("speech", preset="spoken-digits", data=data, out=f"{folder}/run", overrides=settings | choices)
        model = load_checkpoint(f"{folder}/run/model", device=choose_device("auto")).eval()
        settled = Recipe.load(f"{folder}/run").data
    assert isinstance(settled, SpeechData)
    task = settled.load(seed=0)  # the same streams for every seed
    single, streams = score_recordings(model, task.singles), score_recordings(model, task.validation)
    wait, half = (None if model.config.mask == full() else streams.latency_quantile(share) for share in (0.95, 0.5))
    curve: Curve = {SINGLE: 1 - single.accuracy, STREAMS: streams.error_rate, WAIT: wait}
    return curve, {"median wait": half, "training loss": made.train_loss}


def _told(found: Outcome, panel: str, line: str) -> str:
    waits = found.values(panel, line, WAIT)
    when = f"after {found.said(panel, line, WAIT, '.2f')} s at most for 95 %" if waits else "at the end"
    wrong = f"{found.said(panel, line, STREAMS, '.1%')} of the digits in streams wrong"
    return f"{line}: {wrong} and {found.said(panel, line, SINGLE, '.1%')} of single ones, written down {when}"


def finding(sizes: Sizes, found: Outcome) -> str:
    return f"What a moment sees, and what comes of it. {'. '.join(_told(found, KNOWN, line) for line in found.lines)}."


def finding_new(sizes: Sizes, found: Outcome) -> str:
    """Of every mask, the mean over all who were left out, and the best and the worst understood."""
    told = []
    for panel in found.panels:
        wrong = {line: found.mean(panel, line, STREAMS) or 0.0 for line in found.lines}
        best, worst = min(wrong, key=wrong.__getitem__), max(wrong, key=wrong.__getitem__)
        told.append(
            f"{panel}: {sum(wrong.values()) / len(wrong):.1%} of the digits in streams wrong, from {wrong[best]:.1%} "
            f"({best}) to {wrong[worst]:.1%} ({worst})"
        )
    return f"What a moment sees, and what comes of a voice that was never heard. {'. '.join(told)}."


_SIZES = Sizes(width=96, heads=4, layers=4, steps=1500, warmup=150, batch=64, tested=200, lr=2e-3)
_SHARED: dict[str, Any] = {
    "says": ("CSCI-GA 2572, Transformer homework, Problem 1.3e: attention for speech as it comes in",),
    "x": "",
    "y": "share of digits, or seconds",
    "quick": Sizes(width=8, heads=2, layers=1, steps=1, warmup=1, batch=2, tested=1, lr=2e-3),
    "bars": True,
    "reads": "recordings named like 7_jackson_32.wav, such as the Free Spoken Digit Dataset",
}
STUDY = Study(
    name="speech",
    asks="What does attention to a stream of speech pay for seeing only the past?",
    panel=("speakers", (KNOWN,)),
    line=("sees", tuple(MASKS)),
    sizes=_SIZES,
    measure=measure,
    finding=finding,
    **_SHARED,
)
NEW_SPEAKER = Study(
    name="new-speaker",
    asks="What does a model of speech make of a voice that it has never heard?",
    panel=("sees", tuple(MASKS)),
    line=("left out", SPEAKERS),
    sizes=_SIZES,
    measure=measure_new,
    finding=finding_new,
    **_SHARED,
)
