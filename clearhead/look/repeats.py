"""What heads do with repetition: random tokens, said twice, and where each head looks in the second half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ConfigError
from clearhead.look.chart import Chart, HasCharts, head_chart, pad_ragged
from clearhead.look.picture import classify_head
from clearhead.look.question import run_logits
from clearhead.look.trace import trace
from clearhead.values import require, whole


@dataclass(frozen=True, eq=False)
class InductionScores(HasCharts):
    """For each layer (`rows`, by path) and head, (L, H), the share of its weight in the second half on the token after
    the same one before (`induction`), the same one itself (`duplicate`), and the token before (`previous`)."""

    rows: tuple[str, ...]
    induction: Tensor
    duplicate: Tensor
    previous: Tensor

    def charts(self) -> list[Chart]:
        """A chart a score."""
        return [
            head_chart("Induction: on the token after the same one before", self.rows, self.induction),
            head_chart("Duplicates: on the same token before", self.rows, self.duplicate),
            head_chart("On the previous token", self.rows, self.previous),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Each head's score as plain values, for JSON."""
        scores = {name: getattr(self, name).tolist() for name in ("induction", "duplicate", "previous")}
        return {"rows": list(self.rows), **scores}


def induction_scores(model: nn.Module, *, length: int | None = None, batch: int = 4, seed: int = 0) -> InductionScores:
    """Scores of every head for induction, duplicate tokens and the previous token, on random tokens said twice.

        look.induction_scores(model).induction.max()            # near 1: there is an induction head

    For models that read token numbers, (B, T). Tokens are drawn without repetition from all that the model knows, from
    `seed`: `length` of them (23, or all where there are fewer), `batch` times."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    words = run_logits(model, torch.zeros(1, 1, dtype=torch.long, device=device)).shape[-1]
    length = whole(min(words, 23) if length is None else length, "length", least=2)
    few = f"length is {length}, and of the {words} tokens that the model knows each is drawn once; shorten it"
    require(words >= length, few)
    luck = torch.Generator().manual_seed(seed)
    half = [torch.randperm(words, generator=luck)[:length] for _ in range(whole(batch, "batch", least=1))]
    with trace(model) as t:
        run_logits(model, torch.stack(half).repeat(1, 2).to(device))
    if not t.paths:
        raise ConfigError(t.report())
    tokens = [str(i % length) for i in range(2 * length)]  # all that matters of tokens is which are the same
    found = []
    for path in t.paths:
        weights = t.weights(path, rows=range(length, 2 * length)).mean(0).float().cpu()  # (H, r, S)
        found.append([one.scores for one in classify_head(weights, rows=tokens[length:], columns=tokens)])
    names = ("induction", "same token", "previous token")
    scores = (pad_ragged([one[name] for one in heads] for heads in found).float() for name in names)
    return InductionScores(tuple(t.paths), *scores)
