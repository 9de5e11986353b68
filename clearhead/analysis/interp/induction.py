"""Induction scores of heads on a repeated sequence of random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead._core.json_types import JSONObject
from clearhead._core.keywords import explain_keywords
from clearhead._core.validation import check_int, require
from clearhead.analysis.inputs.model_inputs import run_logits
from clearhead.analysis.tracing.trace import trace
from clearhead.analysis.views.attention_map import classify_head
from clearhead.analysis.views.chart import Chart, HasCharts, head_chart, pad_ragged
from clearhead.errors import ConfigError
from clearhead.hub import Pipeline


@dataclass(frozen=True, eq=False)
class InductionScores(HasCharts):
    """Scores of each layer (`rows`, by path) and head, (L, H).

    Each is the share of the head's weight in the second half of the sequence: on the token after the previous
    occurrence of the query's token (`induction`), on that occurrence (`duplicate`), and on the previous
    token (`previous`).

    Args:
        rows: Paths of the layers.
        induction: Share on the token after the previous occurrence of the query's token, (L, H).
        duplicate: Share on that occurrence, (L, H).
        previous: Share on the previous token, (L, H).
    """

    rows: tuple[str, ...]
    induction: Tensor
    duplicate: Tensor
    previous: Tensor

    def charts(self) -> list[Chart]:
        """Return one chart per score."""
        return [
            head_chart("Induction: weight on the token after the previous occurrence", self.rows, self.induction),
            head_chart("Duplicate token: weight on the previous occurrence", self.rows, self.duplicate),
            head_chart("Previous token", self.rows, self.previous),
        ]

    def to_dict(self) -> JSONObject:
        """Return the scores as plain data for JSON."""
        scores = {name: getattr(self, name).tolist() for name in ("induction", "duplicate", "previous")}
        return {"rows": list(self.rows), **scores}


@explain_keywords
def induction_scores(
    model: nn.Module | Pipeline, *, length: int | None = None, batch: int = 4, seed: int = 0
) -> InductionScores:
    """Score every head for induction, duplicate tokens and the previous token on repeated random tokens.

        analysis.induction_scores(model).induction.max()     # near 1: there is an induction head

    Args:
        model: Model that takes token ids (B, T), in evaluation mode, or a pipeline.
        length: Number of tokens in each half, sampled without replacement; default: 23, or the vocabulary size if
            smaller.
        batch: Number of sequences.
        seed: Seed of the tokens.

    Returns:
        Three scores per layer and head, each from 0 to 1.
    """
    if isinstance(model, Pipeline):
        model = model.model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    vocab_size = run_logits(model, torch.zeros(1, 1, dtype=torch.long, device=device)).shape[-1]
    length = check_int(min(vocab_size, 23) if length is None else length, "length", minimum=2)
    message = (
        f"length is {length}, but tokens are sampled without replacement from a vocabulary of {vocab_size}; reduce it"
    )
    require(vocab_size >= length, message)
    generator = torch.Generator().manual_seed(seed)
    half = [
        torch.randperm(vocab_size, generator=generator)[:length] for _ in range(check_int(batch, "batch", minimum=1))
    ]
    with trace(model) as t:
        run_logits(model, torch.stack(half).repeat(1, 2).to(device))
    if not t.paths:
        raise ConfigError(t.report())
    tokens = [str(i % length) for i in range(2 * length)]  # only the equality of tokens matters
    labels_by_layer = []
    for path in t.paths:
        weights = t.weights(path, rows=range(length, 2 * length)).mean(0).float().cpu()  # (H, r, S)
        labels_by_layer.append([label.scores for label in classify_head(weights, rows=tokens[length:], columns=tokens)])
    names = ("induction", "same token", "previous token")
    scores = (pad_ragged([label[name] for label in heads] for heads in labels_by_layer).float() for name in names)
    return InductionScores(tuple(t.paths), *scores)
