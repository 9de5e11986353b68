"""From one sample rate to another: a windowed sinc, whole or piece by piece with the same samples.

Output n stands at input n · source / target. Its value is a weighted sum of the inputs around it; as the ratio is that
of two whole numbers, the weights repeat, and each phase has a row of them in a table. Every output is summed by itself
in float64, so that it does not matter which pieces the input came in.

    N samples   P phases   W weights
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead._shapes import Float
from clearhead.values import whole

__all__ = ["SLOWEST", "Resampler", "resample"]

SLOWEST, FASTEST = 1_000, 384_000  # Hz
_CROSSINGS, _KAISER = 32, 8.6  # zeros of the sinc at each side, and a window that falls to about −85 dB beyond them
_PASSED = 0.92  # of the lower Nyquist frequency: the filter has fallen where the new one begins
_AT_ONCE = 1 << 13


class Resampler:
    """Samples at `source` Hz in pieces of any size, out at `target` Hz.

    `feed` gives what can be told so far, which is a few milliseconds behind, and `end` the rest: ⌈N · target / source⌉
    samples in all.
    """

    def __init__(self, source: int, target: int) -> None:
        source = whole(source, "the sample rate", least=SLOWEST, most=FASTEST)
        target = whole(target, "the sample rate", least=SLOWEST, most=FASTEST)
        common = math.gcd(source, target)
        self._up, self._down = target // common, source // common
        self._rows, self._half = (np.ones(0), 0) if source == target else _weights(self._up, self._down)
        # Silence before the beginning. `_kept` begins at input `_first`.
        self._kept, self._first = np.zeros(max(self._half - 1, 0), np.float32), -max(self._half - 1, 0)
        self._heard = self._made = 0

    def feed(self, samples: Float[Tensor, " N"]) -> Float[Tensor, " M"]:
        """Every output whose inputs have all come."""
        if self._half == 0:
            return samples.float()
        self._heard += len(samples)
        self._kept = np.concatenate((self._kept, samples.float().cpu().numpy()))
        # Output n needs the inputs up to ⌊n · down / up⌋ + half.
        return self._until(-(-(self._heard - self._half) * self._up // self._down))

    def end(self) -> Float[Tensor, " M"]:
        """What is left, with silence after the end."""
        if self._half == 0:
            return torch.zeros(0)
        self._kept = np.concatenate((self._kept, np.zeros(self._half + 1, np.float32)))
        return self._until(-(-self._heard * self._up // self._down))

    def _until(self, stop: int) -> Tensor:
        parts = []
        while self._made < stop:
            places = np.arange(self._made, min(stop, self._made + _AT_ONCE)) * self._down
            begins = places // self._up - (self._half - 1) - self._first
            windows = np.lib.stride_tricks.sliding_window_view(self._kept, self._rows.shape[1])[begins]  # (N, W)
            parts.append((windows * self._rows[places % self._up]).sum(-1).astype(np.float32))
            self._made += len(places)
        needed = self._made * self._down // self._up - (self._half - 1) - self._first
        self._kept, self._first = self._kept[needed:], self._first + min(needed, len(self._kept))
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)


def resample(samples: Float[Tensor, " N"], source: int, target: int) -> Float[Tensor, " M"]:
    """All samples at once; the very ones that a `Resampler` gives in pieces."""
    going = Resampler(source, target)
    return torch.cat((going.feed(samples), going.end()))


def _weights(up: int, down: int) -> tuple[NDArray[np.float64], int]:
    """(P, W): for each place between two inputs, the weights of the inputs around it; and half of W."""
    cut = _PASSED * min(1.0, up / down)  # of the source's Nyquist frequency
    half = math.ceil(_CROSSINGS / cut)
    away = np.arange(up)[:, None] / up + (half - 1) - np.arange(2 * half)[None]
    window = np.i0(_KAISER * np.sqrt(np.clip(1 - (away / half) ** 2, 0, None)))
    rows = np.sinc(cut * away) * window
    return rows / rows.sum(-1, keepdims=True), half
