"""Streaming speech recognition under four attention masks, for speakers in the training data and for unseen speakers.

Digits spoken by six people are joined to streams with pauses and noise, and recognized by the same small encoder under
four masks: once with all speakers in the training data, and once with each of the six held out.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.studies.runner import Sizes, Study, StudyResults, Values
from clearhead.hub.evaluate import score_recordings
from clearhead.masks import full
from clearhead.models import CTCEncoder, load_checkpoint
from clearhead.training import train
from clearhead.training.distributed import choose_device
from clearhead.training.recipe import Recipe
from clearhead.training.tasks import SpeechData

MASKS = {
    "unlimited": "full()",
    "past": "causal()",
    "1.3 s of the past": "causal() & window(64, 0)",
    "1.3 s of the past, 0.3 s ahead": "(causal() | blocks(16)) & window(64, 15)",
}
KNOWN_SPEAKERS = "known speakers"
SINGLE, STREAMS, LATENCY = "error rate, single digits", "error rate, streams", "latency in s (95 %)"
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")


def measure(sizes: Sizes, speakers: str, mask: str, seed: int, data: Path) -> tuple[Values, dict[str, Any]]:
    """Train and test with all speakers in the training data."""
    return train_and_test(sizes, {"model.mask": MASKS[mask], "seed": seed}, data)


def measure_unseen(sizes: Sizes, mask: str, speaker: str, seed: int, data: Path) -> tuple[Values, dict[str, Any]]:
    """Train and test with one speaker held out."""
    return train_and_test(sizes, {"model.mask": MASKS[mask], "held_out_speaker": speaker, "seed": seed}, data)


def train_and_test(sizes: Sizes, overrides: dict[str, Any], data: Path) -> tuple[Values, dict[str, Any]]:
    """Return error rates, and the 95th percentile of the latency (None if the mask needs the whole recording)."""
    settings: dict[str, Any] = {"d_model": sizes.width, "n_heads": sizes.heads, "n_layers": sizes.layers}
    settings |= {"steps": sizes.steps, "warmup_steps": sizes.warmup, "lr_max": sizes.lr}
    settings |= {"batch.examples": sizes.batch, "n_validation": sizes.tested}
    settings |= {"eval_every": sizes.steps, "checkpoint_every": sizes.steps + 1}
    with tempfile.TemporaryDirectory() as folder:
        result = train("speech", preset="spoken-digits", data=data, out=f"{folder}/run", overrides=settings | overrides)
        model = load_checkpoint(f"{folder}/run/model", device=choose_device("auto")).eval()
        recipe_data = Recipe.load(f"{folder}/run").data
    assert isinstance(recipe_data, SpeechData)
    assert isinstance(model, CTCEncoder)
    task = recipe_data.load(seed=0)  # the same streams for all seeds
    single, streams = score_recordings(model, task.singles), score_recordings(model, task.validation)
    latency, median_latency = (
        None if model.config.mask == full() else streams.latency_quantile(share) for share in (0.95, 0.5)
    )
    values: Values = {SINGLE: 1 - single.accuracy, STREAMS: streams.error_rate, LATENCY: latency}
    return values, {"median_latency": median_latency, "train_loss": result.train_loss}


def _summary(results: StudyResults, speakers: str, mask: str) -> str:
    """Format error rates and latency under one mask."""
    has_latency = results.values(speakers, mask, LATENCY)
    latency = f"{results.format_mean(speakers, mask, LATENCY, '.2f')} s" if has_latency else "the whole recording"
    streams = results.format_mean(speakers, mask, STREAMS, ".1%")
    single = results.format_mean(speakers, mask, SINGLE, ".1%")
    return f"{mask}: error rate {streams} in streams and {single} for single digits, 95 % latency {latency}"


def conclude(sizes: Sizes, results: StudyResults) -> str:
    """Return the conclusion from all rows."""
    summaries = [_summary(results, KNOWN_SPEAKERS, mask) for mask in results.series]
    return f"Results by context of a frame. {'. '.join(summaries)}."


def conclude_unseen(sizes: Sizes, results: StudyResults) -> str:
    """Return mean, best and worst error rate over the held-out speakers, per mask."""
    parts = []
    for mask in results.facets:
        rates = {speaker: results.mean(mask, speaker, STREAMS) or 0.0 for speaker in results.series}
        best, worst = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
        parts.append(
            f"{mask}: error rate {sum(rates.values()) / len(rates):.1%} in streams, from {rates[best]:.1%} ({best}) "
            f"to {rates[worst]:.1%} ({worst})"
        )
    return f"Results for unseen speakers by context of a frame. {'. '.join(parts)}."


_SIZES = Sizes(width=96, heads=4, layers=4, steps=1500, warmup=150, batch=64, tested=200, lr=2e-3)
_SHARED: dict[str, Any] = {
    "statements": ("CSCI-GA 2572, Transformer homework, Problem 1.3e: attention for streaming speech",),
    "x": "",
    "y": "error rate, or seconds",
    "smoke": Sizes(width=8, heads=2, layers=1, steps=1, warmup=1, batch=2, tested=1, lr=2e-3),
    "bars": True,
    "data_description": "recordings named like 7_jackson_32.wav, such as the Free Spoken Digit Dataset",
}
STUDY = Study(
    name="speech",
    question="How much accuracy does streaming speech recognition lose if attention is restricted to the past?",
    facet=("speakers", (KNOWN_SPEAKERS,)),
    series=("context", tuple(MASKS)),
    sizes=_SIZES,
    measure=measure,
    conclude=conclude,
    **_SHARED,
)
UNSEEN_SPEAKER = Study(
    name="unseen-speaker",
    question="How well does a speech model recognize a speaker that is not in its training data?",
    facet=("context", tuple(MASKS)),
    series=("held-out speaker", SPEAKERS),
    sizes=_SIZES,
    measure=measure_unseen,
    conclude=conclude_unseen,
    **_SHARED,
)
