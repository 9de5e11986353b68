"""Attention and its gradients from the definition, row by row in float64, with bounds on rounding errors.

    s = (scale · q·k + bias) / temperature     p = softmax(s)     out = Σ p v

Each value has a bound on the error of a computation that rounds products to `unit` and scores to `statistics`: the same
sums over absolute values, with errors of scores propagated to weights. No code is shared with the package.
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
    """Values and bounds; `inner` is the largest intermediate value of the backward pass."""

    values: dict[str, np.ndarray]
    bounds: dict[str, np.ndarray]
    inner: float = 0.0
    unsure: list[tuple[int, int, int]] = field(default_factory=list)  # rows whose largest score depends on rounding


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
    """Compute outputs, gradients and bounds in float64, one query at a time."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    names = {"out": out, "dq": q, "dk": k, "dv": v, "dbias": bias}
    values = {name: np.zeros(x.shape) for name, x in names.items()}
    exact = Exact(values, {name: np.zeros(x.shape) for name, x in names.items()})
    B, H, T, _ = q.shape
    groups = H // k.shape[1] if k.shape[1] else 1
    with np.errstate(all="ignore"):
        for b in range(B):
            for h in range(H):
                keys, vals = k[b, h // groups], v[b, h // groups]
                for i in range(T):
                    columns = np.flatnonzero(allowed[b, h, i] & (bias[b, h, i] != -np.inf))
                    if len(columns):
                        row = _Row(q[b, h, i], keys[columns], vals[columns], up[b, h, i], bias[b, h, i, columns])
                        row.solve(scale, temperature, rounding)
                        _add(exact, (b, h, h // groups, i), columns, row)
    for name, value in values.items():
        exact.bounds[name] += rounding.unit * abs(value) + rounding.least
    return exact


def _add(exact: Exact, index: tuple[int, int, int, int], columns: np.ndarray, row: _Row) -> None:
    b, h, kv, i = index
    if row.unsure:
        exact.unsure.append((b, h, i))
    exact.inner = max(exact.inner, row.inner)
    for part, arrays in ((0, exact.values), (1, exact.bounds)):
        arrays["out"][b, h, i] += row.out[part]
        arrays["dq"][b, h, i] += row.dq[part]
        arrays["dk"][b, kv, columns] += row.dk[part]
        arrays["dv"][b, kv, columns] += row.dv[part]
        arrays["dbias"][b, h, i, columns] += row.dbias[part]


class _Row:
    """One query; each result is a pair of value and bound."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, up: np.ndarray, bias: np.ndarray) -> None:
        self.q, self.k, self.v, self.up, self.bias = q, k, v, up, bias

    def solve(self, scale: float, temperature: float, rounding: Rounding) -> None:
        q, k, v, up = self.q, self.k, self.v, self.up
        score = scale * (k @ q) + self.bias
        # Error of a score: each product and the bias, in the precision of the scores.
        score_error = rounding.statistics * (scale * (abs(k) @ abs(q)) + abs(self.bias) + abs(score))
        p, p_error = self._weights(score, score_error, temperature, rounding)
        self.out = p @ v, p_error @ abs(v)
        self.dv = p[:, None] * up, p_error[:, None] * abs(up)
        slope, size = v @ up, abs(v) @ abs(up)  # dL/dp and the same without signs
        d = p * (slope - p @ slope)
        magnitude = p * (size + p @ size)
        slope_error = p_error @ size
        d_error = p_error * (size + p @ size + slope_error) + p * slope_error + 2 * rounding.unit * magnitude
        d_error += rounding.least * (1 + size.max())
        # At temperatures 0 and ∞ the weights have no gradient.
        beta = 1 / temperature if 0 < temperature < np.inf else 0.0
        self.inner = float(
            max(
                size.max(),
                (magnitude * max(beta, 1.0)).max(),
                (abs(k) @ abs(q)).max() if beta else 0.0,
            )
        )
        c = scale * beta
        # c comes last: if it is less than 1 it would round the smallest step to 0 before q enlarges it; if it is more
        # than 1 it enlarges the rounding error of a product of the smallest size.
        step = max(c, 1.0) * rounding.least
        self.dq = c * (d @ k), c * (d_error @ abs(k)) + len(k) * step if c else 0.0
        self.dk = c * d[:, None] * q, c * (d_error[:, None] * abs(q)) + step if c else 0.0
        self.dbias = beta * d, beta * d_error if beta else 0.0

    def _weights(
        self, score: np.ndarray, score_error: np.ndarray, temperature: float, rounding: Rounding
    ) -> tuple[np.ndarray, np.ndarray]:
        largest = score.max()
        self.unsure = False
        if temperature == 0:
            p = (score == largest).astype(float)
            near = score + score_error >= (score - score_error)[score == largest].max()
            self.unsure = bool((near != (p > 0)).any() or (near.sum() > 1 and score_error[near].max() > 0))
            p /= p.sum()
            return p, p * rounding.unit
        s = (score - largest) / temperature
        p = np.exp(s)
        p /= p.sum()
        # Bounds of a weight: its own score raised and all others lowered, and the reverse.
        top = (s + score_error / temperature).max()
        if not np.isfinite(top):
            return p, np.ones_like(p)
        high, low = (np.exp(s + sign * score_error / temperature - top) for sign in (1, -1))
        most = high / (high + (low.sum() - low))
        least = low / (low + (high.sum() - high))
        p_error = np.nan_to_num(np.maximum(most - p, p - least), nan=1.0)
        # The backward pass recomputes weights from scores and the stored row sums, without normalizing again.
        again = p * np.minimum(score_error / temperature, 1.0)
        return p, p_error + again + p * rounding.unit + rounding.least
