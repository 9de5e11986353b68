"""From one sample rate to another by a windowed sinc, whole or piece by piece with the same samples.

Output n stands at input n · source / target and is a weighted sum of the inputs around it. As the ratio is that of two
whole numbers, the weights repeat: a row for each phase. Every output is summed by itself, in float64, so that it does
not matter in which pieces the input came."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead._shapes import Float
from clearhead.values import whole

_SLOWEST, _FASTEST = 1_000, 384_000  # Hz
_CROSSINGS, _KAISER = 32, 8.6  # zeros of the sinc at each side, and a window that falls to about −85 dB beyond them
_PASSED = 0.92  # of the lower Nyquist frequency: the filter has fallen where the new one begins
_AT_ONCE = 1 << 13


class Resampler:
    """Samples at `source` Hz in pieces of any size, out at `target` Hz.

    `feed` gives what can be told so far, which is a few milliseconds behind, and `end` the rest: ⌈N · target / source⌉
    samples in all."""

    def __init__(self, source: int, target: int) -> None:
        for given in (source, target):
            whole(given, "the sample rate", least=_SLOWEST, most=_FASTEST)
        common = math.gcd(source, target)
        self._up, self._down = target // common, source // common
        self._rows, self._half = (torch.zeros(0), 0) if source == target else _weights(self._up, self._down)
        # Silence before the beginning. `_kept` begins at input `_first`.
        self._first = min(0, 1 - self._half)
        self._kept = torch.zeros(-self._first, dtype=torch.float64)
        self._heard = self._made = 0

    def feed(self, samples: Float[Tensor, " N"]) -> Float[Tensor, " M"]:
        """Every output whose inputs have all come."""
        if self._half == 0:
            return samples.float()
        self._heard += len(samples)
        self._kept = torch.cat((self._kept, samples.double().cpu()))
        # Output n needs the inputs up to ⌊n · down / up⌋ + half.
        return self._until(-(-(self._heard - self._half) * self._up // self._down))

    def end(self) -> Float[Tensor, " M"]:
        """What is left, with silence after the end."""
        if self._half == 0:
            return torch.zeros(0)
        self._kept = torch.cat((self._kept, self._kept.new_zeros(self._half)))
        return self._until(-(-self._heard * self._up // self._down))

    def _until(self, stop: int) -> Tensor:
        parts = [torch.zeros(0)]
        while self._made < stop:
            places = torch.arange(self._made, min(stop, self._made + _AT_ONCE)) * self._down
            begins = places // self._up - (self._half - 1) - self._first
            windows = self._kept.unfold(0, self._rows.shape[1], 1)[begins]  # (M, inputs)
            parts.append((windows * self._rows[places % self._up]).sum(-1).float())
            self._made += len(places)
        done = min(len(self._kept), self._made * self._down // self._up - (self._half - 1) - self._first)
        self._kept, self._first = self._kept[done:].clone(), self._first + done
        return torch.cat(parts)


def resample(samples: Float[Tensor, " N"], source: int, target: int) -> Float[Tensor, " M"]:
    """All samples at once; the very ones that a `Resampler` gives in pieces."""
    going = Resampler(source, target)
    return torch.cat((going.feed(samples), going.end()))


def _weights(up: int, down: int) -> tuple[Tensor, int]:
    """(phases, inputs): for each place between two inputs, the weights of those around it; and half their number."""
    cut = _PASSED * min(1.0, up / down)  # of the source's Nyquist frequency
    half = math.ceil(_CROSSINGS / cut)
    away = torch.arange(up).double()[:, None] / up + (half - 1) - torch.arange(2 * half)
    rows = torch.sinc(cut * away) * torch.i0(_KAISER * (1 - (away / half) ** 2).clamp(min=0).sqrt())
    return rows / rows.sum(-1, keepdim=True), half
