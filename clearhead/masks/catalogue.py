"""The catalogue of masks that `python -m benchmarks sparse` measures: the patterns people use, at any length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from clearhead.masks.base import Mask
from clearhead.masks.data import documents
from clearhead.masks.structural import blocks, causal, dilated, every, prefix, scattered, window


@dataclass(frozen=True)
class Pattern:
    """A mask for each length, and what it is held to: fractions of dense time, forward and forward + backward."""

    name: str
    mask: Callable[[int], Mask]
    forward: float | None = None
    both: float | None = None


def _fixed(mask: Mask) -> Callable[[int], Mask]:
    return lambda T: mask


def _documents(T: int) -> Mask:
    """Documents of mixed lengths, about 1/12 of the sequence on average, the same for every run."""
    generator = torch.Generator().manual_seed(403)
    cuts = torch.randint(1, T, (11,), generator=generator).sort().values
    ids = torch.zeros(T, dtype=torch.int64)
    ids[cuts] = 1
    return documents(ids.cumsum(0))


CATALOGUE = (
    Pattern("the course's pattern", _fixed(window(2, 2) | every(4)), 0.30, 0.33),
    Pattern("window and landmarks", _fixed(window(128, 128) | every(64)), 0.06, 0.08),
    Pattern("causal window and landmarks", _fixed(causal() & (window(256, 0) | every(128))), 0.05, 0.07),
    Pattern("window", _fixed(window(256, 256)), 0.06, 0.08),
    Pattern("causal", _fixed(causal())),
    Pattern("narrow window", _fixed(window(2, 2))),
    Pattern("packed documents", _documents),
    Pattern("packed documents, causal", lambda T: causal() & _documents(T)),
    Pattern("prefix language model", lambda T: causal() | prefix(T // 8)),
    Pattern("Longformer", _fixed(window(256, 256) | prefix(64) | prefix(64).T)),
    Pattern("BigBird", _fixed(window(96, 96) | prefix(64) | prefix(64).T | scattered(3, seed=1))),
    Pattern("Sparse Transformer, strided", _fixed(causal() & (window(128, 0) | dilated(128)))),
    Pattern("Sparse Transformer, fixed", _fixed(causal() & (blocks(128) | every(128, start=127)))),
    Pattern("dilated window", _fixed(window(1024, 1024) & dilated(4))),
    Pattern("sinks and a window", _fixed(causal() & (window(1024, 0) | prefix(4)))),
    Pattern("the landmarks look back", _fixed((window(128, 128) | every(64)).T)),
    Pattern("anti-causal window", _fixed((causal() & window(512, 0)).T)),
    Pattern("random scatter", _fixed(scattered(16, seed=7))),
)
