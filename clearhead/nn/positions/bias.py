"""Positions as a bias on the attention scores that depends on the distance between query and key.

`RelativeBias` is learned (Raffel et al., 2020), `ALiBi` is a fixed linear penalty (Press et al., 2022). Their modules
return expressions (`clearhead.attention.biases`), which attention computes without a tensor of all pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.validation import check_int
from clearhead.attention.biases import Alibi, Bias, Buckets, Relative
from clearhead.attention.biases.expressions import alibi_slopes, tabulate


@dataclass(frozen=True)
class RelativeBias(Buckets):
    """Learned biases, `n_buckets` per head, indexed by the distance from query p to key j.

    Small distances have a bucket each; larger ones share buckets whose width grows geometrically up to `max_distance`.

    With `bidirectional=True` (encoders), half of the buckets are for keys up to the query and half for keys after
    it. Otherwise all are for keys before it; later keys, which a causal mask hides, count as distance 0.

    Beyond the trained length: distances of at least `max_distance` share the last bucket, so every length is defined,
    but distant keys have the same bias."""

    kind: ClassVar[Literal["bias"]] = "bias"

    def build(self, n_heads: int) -> T5Bias:
        """Return the module for `n_heads` heads."""
        return T5Bias(self, n_heads)

    def __str__(self) -> str:
        return repr(self)


class T5Bias(nn.Module):
    """Module of `RelativeBias`; its parameter is `weight` (n_buckets, H)."""

    def __init__(self, choice: RelativeBias, n_heads: int) -> None:
        super().__init__()
        self.choice = choice
        self.weight = nn.Parameter(
            torch.empty(choice.n_buckets, check_int(n_heads, "RelativeBias: n_heads", minimum=1))
        )
        self._edges = choice.edges()
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, T: int, S: int, query_offset: int = 0, device: torch.device | str | None = None) -> Bias:
        """Return the bias of T queries from `query_offset` on and keys 0 … S − 1, for `attend`."""
        source = Relative(self.weight, self.choice, ("weight",), self._edges)
        where = self.weight.device if device is None else torch.device(device)
        return tabulate(source, T, S, query_offset, where)

    def extra_repr(self) -> str:
        return f"{self.choice}, n_heads={self.weight.shape[1]}"


@dataclass(frozen=True)
class ALiBi:
    """bias(h, p, j) = −slope(h) · |p − j|: heads with steep slopes attend to near keys.

    The slopes are those of `attention.biases.alibi`. The absolute value makes the bias symmetric, for encoders; with a
    causal mask it is that of the paper.

    Beyond the trained length: defined for every distance."""

    kind: ClassVar[Literal["bias"]] = "bias"

    def build(self, n_heads: int) -> ALiBiBias:
        """Return the module for `n_heads` heads."""
        return ALiBiBias(n_heads)


class ALiBiBias(nn.Module):
    """Module of `ALiBi`. Slopes are computed in each call, so casting the module does not round them."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = check_int(n_heads, "ALiBi: n_heads", minimum=1)

    def slopes(self, device: torch.device | str | None = None) -> Float[Tensor, " H"]:
        """Return one float32 slope per head."""
        return alibi_slopes(self.n_heads, device, torch.float32)

    def forward(self, T: int, S: int, query_offset: int = 0, device: torch.device | str | None = None) -> Bias:
        """Return the bias of T queries from `query_offset` on and keys 0 … S − 1, for `attend`."""
        where = None if device is None else torch.device(device)
        return tabulate(Alibi(self.n_heads), T, S, query_offset, where)

    def extra_repr(self) -> str:
        return f"n_heads={self.n_heads}"
