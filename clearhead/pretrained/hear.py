"""How well a model hears: digits that are right, and how long after its end each one is written down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clearhead.data.batch import Split
from clearhead.data.ctc import compared, written
from clearhead.errors import ConfigError
from clearhead.models import SpeechEncoder


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What was written down of some recordings. Latencies are of the digits that are right, in seconds."""

    exact: int  # recordings of which every digit is right, and none is too many
    mistakes: int  # digits to be changed, added or left out
    digits: int
    recordings: int
    latencies: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        return self.exact / self.recordings

    @property
    def error_rate(self) -> float:
        return self.mistakes / self.digits

    def latency(self, share: float) -> float | None:
        """The latency that this share of the digits does not exceed."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


@torch.no_grad()
def hear(model: nn.Module, split: Split[Any], n: int | None = None, rows: int = 64) -> Heard:
    """Listens to the first `n` recordings of a part (None: all). A digit is written down when the likeliest class
    becomes it, and known when all that its moment sees has been heard."""
    assert isinstance(model, SpeechEncoder)
    try:
        step = model.pace.step
    except ConfigError:
        step = 0  # everything is known at the end, and nothing before
    exact = mistakes = digits = 0
    latencies = []
    device = next(model.parameters()).device
    order = split.lengths()[: len(split) if n is None else n].sum(1).argsort(stable=True)
    for some in order.split(rows):
        batch = split.batch(some).to(device)
        logits = batch.logits(model)
        stacked, mel = model.config.n_stacked, batch.mel
        answers = written(logits, batch.n_moments(logits))
        for answer, labels, spans, count, last in zip(
            answers, batch.labels.tolist(), batch.spans.tolist(), batch.counts, batch.n_moments(logits), strict=True
        ):
            errors, pairs = compared([symbol for symbol, _ in answer], labels[:count])
            exact, mistakes, digits = exact + (errors == 0), mistakes + errors, digits + count
            for i, j in pairs:
                moment = answer[i][1]
                known = min(last, (moment // step + 1) * step if step else last)  # moments that have to be there
                latencies.append(mel.end(known * stacked - 1) / mel.sample_rate - spans[j][1])
    return Heard(exact=exact, mistakes=mistakes, digits=digits, recordings=len(order), latencies=tuple(latencies))
