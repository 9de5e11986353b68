"""One vector for the whole source, or attention to all of it: what is written right as the source gets longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from clearhead.bench.studies.engine import Curve, Outcome, Study
from clearhead.bench.studies.learning import TESTED_WITH, fit, pairs, right, symbols
from clearhead.config import Config
from clearhead.data.batch import PairBatch
from clearhead.layers import Xavier
from clearhead.models import EncoderDecoderConfig, RecurrentSeq2SeqConfig
from clearhead.models.recurrent import GRU
from clearhead.models.recurrent_seq2seq import AfterStep, FixedVector
from clearhead.training import WarmupCosine

FIXED, ATTENDING, TRANSFORMER = "recurrent, one fixed vector", "recurrent, attention", "Transformer"


@dataclass(frozen=True)
class Sizes:
    symbols: int = 16
    trained: int = 24  # the longest source in training; the shortest has 2 tokens
    lengths: tuple[int, ...] = (4, 8, 12, 16, 20, 24, 32)
    width: int = 48
    steps: int = 600
    batch: int = 32
    tested: int = 64
    lr: float = 5e-3


def model(sizes: Sizes, name: str) -> Config:
    """One layer each, of about as many parameters."""
    V, M = sizes.symbols + 1, sizes.width  # one more: where the target starts
    if name == TRANSFORMER:
        return EncoderDecoderConfig(
            vocab_size=V,
            d_model=M,
            n_heads=4,
            n_encoder_layers=1,
            n_decoder_layers=1,
            d_ff=2 * M,
            scaled_embedding=True,
            init=Xavier(),
        )
    looking = FixedVector() if name == FIXED else AfterStep()
    return RecurrentSeq2SeqConfig(vocab_size=V, d_model=M, cell=GRU(), attention=looking)


def draw(sizes: Sizes, task: str, rows: int, length: int, generator: torch.Generator) -> PairBatch:
    source = symbols(sizes.symbols, rows, length, generator)
    return pairs(source, source.flip(1) if task == "reverse" else source, start=sizes.symbols)


def measure(sizes: Sizes, task: str, name: str, seed: int) -> tuple[Curve, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def some() -> PairBatch:
        length = int(torch.randint(2, sizes.trained + 1, (), generator=generator))
        return draw(sizes, task, sizes.batch, length, generator)

    net: torch.nn.Module = model(sizes, name).build()
    fit(net, some, WarmupCosine(sizes.lr, sizes.steps // 10, sizes.steps))
    test = torch.Generator().manual_seed(TESTED_WITH)
    curve: Curve = {str(n): right(net, draw(sizes, task, sizes.tested, n, test)) for n in sizes.lengths}
    return curve, {"parameters": sum(p.numel() for p in net.parameters())}


def finding(sizes: Sizes, found: Outcome) -> str:
    short, long = str(sizes.lengths[0]), str(max(n for n in sizes.lengths if n <= sizes.trained))
    parts = []
    for task in found.panels:
        tokens = [
            f"{name} {found.said(task, name, short)} at {short} tokens and {found.said(task, name, long)} at {long}"
            for name in found.lines
        ]
        parts.append(f"{task}: {'; '.join(tokens)}")
    return f"Tokens written right, means of {found.n_seeds} seeds (least to most). {'. '.join(parts)}."


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
    sizes=Sizes(),
    quick=Sizes(symbols=5, trained=4, lengths=(3, 5), width=8, steps=3, batch=3, tested=2),
    measure=measure,
    finding=finding,
    mark="trained",
)
