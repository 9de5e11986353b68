"""One vector for the whole source, or attention to all of it: what is written right as the source gets longer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.studies.learning import TESTED_WITH, fit_lengths, pairs, right
from benchmarks.studies.runner import Curve, Outcome, Sizes, Study
from clearhead.data.batch import PairBatch
from clearhead.models import EncoderDecoderConfig, RecurrentSeq2SeqConfig
from clearhead.models.baselines.recurrent import GRU
from clearhead.models.baselines.recurrent_seq2seq import AfterStep, FixedVector
from clearhead.nn import Xavier

FIXED, ATTENDING, TRANSFORMER = "recurrent, one fixed vector", "recurrent, attention", "Transformer"


def build(sizes: Sizes, name: str) -> torch.nn.Module:
    """One layer each, of about as many parameters."""
    both: dict[str, Any] = {"vocab_size": sizes.symbols + 1, "d_model": sizes.width}  # one more: the target's start
    if name == TRANSFORMER:
        layers: dict[str, Any] = {"n_encoder_layers": 1, "n_decoder_layers": 1, "n_heads": 4, "d_ff": 2 * sizes.width}
        return EncoderDecoderConfig(**both, **layers, scaled_embedding=True, init=Xavier()).build()
    looking = FixedVector() if name == FIXED else AfterStep()
    return RecurrentSeq2SeqConfig(**both, cell=GRU(), attention=looking).build()


def draw(sizes: Sizes, task: str, rows: int, length: int, generator: torch.Generator) -> PairBatch:
    source = torch.randint(sizes.symbols, (rows, length), generator=generator)
    return pairs(source, source.flip(1) if task == "reverse" else source, start=sizes.symbols)


def measure(sizes: Sizes, task: str, name: str, seed: int) -> tuple[Curve, dict[str, Any]]:
    model = build(sizes, name)
    fit_lengths(model, partial(draw, sizes, task), sizes, seed, least=2)
    test = torch.Generator().manual_seed(TESTED_WITH)
    curve: Curve = {str(n): right(model, draw(sizes, task, sizes.tested, n, test)) for n in sizes.lengths}
    return curve, {"parameters": sum(p.numel() for p in model.parameters())}


def finding(sizes: Sizes, found: Outcome) -> str:
    inside = [str(n) for n in sizes.lengths if n <= sizes.trained]
    short, long = inside[0], inside[-1]
    parts = []
    for task in found.panels:
        told = [f"{name} {found.said(task, name, short)} → {found.said(task, name, long)}" for name in found.lines]
        ends = found.seeds(task, (FIXED, short), (FIXED, long), (ATTENDING, short), (ATTENDING, long))
        worse = sum(a - b > c - d for a, b, c, d in ends)
        more = f"the fixed vector loses more than attention in {worse} of {len(ends)} seeds"
        parts.append(f"{task}: {'; '.join(told)}; {more}")
    return f"Tokens written right as the source grows from {short} to {long} tokens. {'. '.join(parts)}."


STUDY = Study(
    name="fixed-vector",
    asks="Does an encoder-decoder with one fixed vector lose more as the source gets longer than one with attention?",
    says=(
        "CENG 403 (Transformers and Attention), exam, Q1a: how attention differs from traditional encoder-decoders",
        "CSCI-GA 2572, Transformer homework, Problem 1.4a and b: direct connections instead of many steps between "
        "distant tokens",
    ),
    panel=("task", ("copy", "reverse")),
    line=("model", (FIXED, ATTENDING, TRANSFORMER)),
    x="tokens in the source",
    y="tokens written right",
    sizes=Sizes(
        symbols=16, trained=24, lengths=(4, 8, 12, 16, 20, 24, 32), width=48, steps=600, batch=32, tested=64, lr=5e-3
    ),
    quick=Sizes(symbols=5, trained=4, lengths=(3, 5), width=8, steps=3, batch=3, tested=2, lr=5e-3),
    measure=measure,
    finding=finding,
)
