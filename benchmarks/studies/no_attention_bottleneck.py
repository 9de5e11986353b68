"""Encoder-decoders with a fixed context vector and with attention: accuracy by source length."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.studies.learning import TEST_SEED, accuracy, fit_lengths, pairs
from benchmarks.studies.runner import Sizes, Study, StudyResults, Values
from clearhead.data.batch import PairBatch
from clearhead.models import EncoderDecoderConfig, RecurrentSeq2SeqConfig
from clearhead.models.baselines.recurrent import GRU
from clearhead.models.baselines.recurrent_seq2seq import AfterStep, FixedVector
from clearhead.nn import Xavier

FIXED, ATTENTION, TRANSFORMER = "recurrent, one fixed vector", "recurrent, attention", "Transformer"


def build(sizes: Sizes, name: str) -> torch.nn.Module:
    """Build a model of one layer; all have about the same number of parameters."""
    shared: dict[str, Any] = {
        "vocab_size": sizes.symbols + 1,
        "d_model": sizes.width,
    }  # one additional id starts the target
    if name == TRANSFORMER:
        layers: dict[str, Any] = {"n_encoder_layers": 1, "n_decoder_layers": 1, "n_heads": 4, "d_ff": 2 * sizes.width}
        return EncoderDecoderConfig(**shared, **layers, scaled_embedding=True, init=Xavier()).build()
    attention = FixedVector() if name == FIXED else AfterStep()
    return RecurrentSeq2SeqConfig(**shared, cell=GRU(), attention=attention).build()


def draw(sizes: Sizes, task: str, rows: int, length: int, generator: torch.Generator) -> PairBatch:
    """Draw rows of a task."""
    source = torch.randint(sizes.symbols, (rows, length), generator=generator)
    return pairs(source, source.flip(1) if task == "reverse" else source, start=sizes.symbols)


def measure(sizes: Sizes, task: str, name: str, seed: int) -> tuple[Values, dict[str, Any]]:
    """Train and test one configuration; return values by x, and extra results."""
    model = build(sizes, name)
    fit_lengths(model, partial(draw, sizes, task), sizes, seed, least=2)
    test = torch.Generator().manual_seed(TEST_SEED)
    values: Values = {str(n): accuracy(model, draw(sizes, task, sizes.tested, n, test)) for n in sizes.lengths}
    return values, {"parameters": sum(p.numel() for p in model.parameters())}


def conclude(sizes: Sizes, results: StudyResults) -> str:
    """Return the conclusion from all rows."""
    trained_lengths = [str(n) for n in sizes.lengths if n <= sizes.trained]
    short, long = trained_lengths[0], trained_lengths[-1]
    parts = []
    for task in results.facets:
        changes = [
            f"{name} {results.format_mean(task, name, short)} → {results.format_mean(task, name, long)}"
            for name in results.series
        ]
        ends = results.by_seed(task, (FIXED, short), (FIXED, long), (ATTENTION, short), (ATTENTION, long))
        n_worse = sum(a - b > c - d for a, b, c, d in ends)
        summary = f"the fixed vector loses more than attention in {n_worse} of {len(ends)} seeds"
        parts.append(f"{task}: {'; '.join(changes)}; {summary}")
    return f"Token accuracy as the source grows from {short} to {long} tokens. {'. '.join(parts)}."


STUDY = Study(
    name="no-attention-bottleneck",
    question="Does a fixed context vector lose more accuracy with longer sources than attention?",
    statements=(
        "CENG 403 (Transformers and Attention), exam, Q1a: how attention differs from traditional encoder-decoders",
        "CSCI-GA 2572, Transformer homework, Problem 1.4a and b: direct connections instead of many steps between "
        "distant tokens",
    ),
    facet=("task", ("copy", "reverse")),
    series=("model", (FIXED, ATTENTION, TRANSFORMER)),
    x="source length",
    y="token accuracy",
    sizes=Sizes(
        symbols=16, trained=24, lengths=(4, 8, 12, 16, 20, 24, 32), width=48, steps=600, batch=32, tested=64, lr=5e-3
    ),
    smoke=Sizes(symbols=5, trained=4, lengths=(3, 5), width=8, steps=3, batch=3, tested=2, lr=5e-3),
    measure=measure,
    conclude=conclude,
)
