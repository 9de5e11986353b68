"""Attention and its gradients from the definition, row by row in float64, and how far rounding may carry them.

    s = (scale · q·k + bias) / temperature     p = softmax(s)     out = Σ p v

Each quantity comes with a bound on what a computation may lose that rounds its inputs' products to `unit` and has
scores of `statistics` precision: the same sums over absolute values, and for a weight what its score may be off by.
Nothing here is the package's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Rounding:
    """`unit`: relative error of a product in the inputs' dtype; `statistics`: of a score; `least`: the least step."""

    unit: float
    statistics: float
    least: float


@dataclass
class Exact:
    """Values, and for each the bound; `inner` is the largest number that a backward pass meets on its way."""

    values: dict[str, np.ndarray]
    bounds: dict[str, np.ndarray]
    inner: float = 0.0
    unsure: list[tuple[int, int, int]] = field(default_factory=list)  # rows whose largest score is a matter of rounding


def attention(
    q: np.ndarray,  # (B, H, T, D)
    k: np.ndarray,  # (B, K, S, D)
    v: np.ndarray,  # (B, K, S, E)
    up: np.ndarray,  # (B, H, T, E), the upstream gradient
    allowed: np.ndarray,  # (B, H, T, S)
    bias: np.ndarray,  # (B, H, T, S)
    *,
    scale: float,
    temperature: float,
    rounding: Rounding,
) -> Exact:
    """All of it in float64, one query at a time."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    names = {"out": out, "dq": q, "dk": k, "dv": v, "dbias": bias}
    values = {name: np.zeros(x.shape) for name, x in names.items()}
    found = Exact(values, {name: np.zeros(x.shape) for name, x in names.items()})
    B, H, T, _ = q.shape
    groups = H // k.shape[1] if k.shape[1] else 1
    with np.errstate(all="ignore"):
        for b in range(B):
            for h in range(H):
                keys, vals = k[b, h // groups], v[b, h // groups]
                for i in range(T):
                    seen = np.flatnonzero(allowed[b, h, i] & (bias[b, h, i] != -np.inf))
                    if len(seen):
                        row = _Row(q[b, h, i], keys[seen], vals[seen], up[b, h, i], bias[b, h, i, seen])
                        row.solve(scale, temperature, rounding)
                        _add(found, (b, h, h // groups, i), seen, row)
    for name, value in values.items():
        found.bounds[name] += rounding.unit * abs(value) + rounding.least
    return found


def _add(found: Exact, at: tuple[int, int, int, int], seen: np.ndarray, row: _Row) -> None:
    b, h, kv, i = at
    if row.unsure:
        found.unsure.append((b, h, i))
    found.inner = max(found.inner, row.inner)
    for part, index in ((0, found.values), (1, found.bounds)):
        index["out"][b, h, i] += row.out[part]
        index["dq"][b, h, i] += row.dq[part]
        index["dk"][b, kv, seen] += row.dk[part]
        index["dv"][b, kv, seen] += row.dv[part]
        index["dbias"][b, h, i, seen] += row.dbias[part]


class _Row:
    """One query: each result is a pair of value and bound."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, up: np.ndarray, bias: np.ndarray) -> None:
        self.q, self.k, self.v, self.up, self.bias = q, k, v, up, bias

    def solve(self, scale: float, temperature: float, rounding: Rounding) -> None:
        q, k, v, up = self.q, self.k, self.v, self.up
        score = scale * (k @ q) + self.bias
        # What a score may be off by: each product and the bias, in the precision of the scores.
        off = rounding.statistics * (scale * (abs(k) @ abs(q)) + abs(self.bias) + abs(score))
        p, wrong = self._weights(score, off, temperature, rounding)
        self.out = p @ v, wrong @ abs(v)
        self.dv = p[:, None] * up, wrong[:, None] * abs(up)
        slope, steep = v @ up, abs(v) @ abs(up)  # dL/dp and the same without signs
        d = p * (slope - p @ slope)
        whole = p * (steep + p @ steep)
        missed = wrong @ steep
        lost = wrong * (steep + p @ steep + missed) + p * missed + 2 * rounding.unit * whole
        lost += rounding.least * (1 + steep.max())
        # At temperature 0 and ∞ the weights do not depend on the scores.
        warm = 1 / temperature if 0 < temperature < np.inf else 0.0
        self.inner = float(max(steep.max(), (whole * max(warm, 1.0)).max(), (abs(k) @ abs(q)).max() if warm else 0.0))
        c = scale * warm
        # c comes last: less than 1, it would turn the least step there is into 0 before q makes it larger. Where it is
        # more than 1, it makes larger by how much a product of the least size was rounded.
        step = max(c, 1.0) * rounding.least
        self.dq = c * (d @ k), c * (lost @ abs(k)) + len(k) * step if c else 0.0
        self.dk = c * d[:, None] * q, c * (lost[:, None] * abs(q)) + step if c else 0.0
        self.dbias = warm * d, warm * lost if warm else 0.0

    def _weights(
        self, score: np.ndarray, off: np.ndarray, temperature: float, rounding: Rounding
    ) -> tuple[np.ndarray, np.ndarray]:
        largest = score.max()
        self.unsure = False
        if temperature == 0:
            p = (score == largest).astype(float)
            near = score + off >= (score - off)[score == largest].max()
            self.unsure = bool((near != (p > 0)).any() or (near.sum() > 1 and off[near].max() > 0))
            p /= p.sum()
            return p, p * rounding.unit
        s = (score - largest) / temperature
        p = np.exp(s)
        p /= p.sum()
        # A weight lies between what it would be with its own score raised and all others lowered, and the reverse.
        top = (s + off / temperature).max()
        if not np.isfinite(top):
            return p, np.ones_like(p)
        high, low = (np.exp(s + sign * off / temperature - top) for sign in (1, -1))
        most = high / (high + (low.sum() - low))
        least = low / (low + (high.sum() - high))
        wrong = np.nan_to_num(np.maximum(most - p, p - least), nan=1.0)
        # A backward pass has a weight from its score and the row's sum as it was stored, and does not divide again.
        again = p * np.minimum(off / temperature, 1.0)
        return p, wrong + again + p * rounding.unit + rounding.least
