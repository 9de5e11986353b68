"""Small correct Transformers in plain torch; the gallery changes one method at a time.

B batch   H heads   T queries   S keys   D head width   M model width   V vocabulary
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clearhead.nn import KVCache

V, M, H, ROOM = 29, 12, 3, 37


class Attention(nn.Module):
    """Multi-head attention: split into heads, score, mask, softmax, weighted sum, merge."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(M, M) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor | None, cache: KVCache | None = None) -> Tensor:
        # (B, H, T, D) each
        q = self.split(self.q(x))
        k = self.split(self.k(memory))
        v = self.split(self.v(memory))
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o(self.merge(self.weights(self.scores(q, k), hidden) @ v))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], H, M // H).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(M // H)

    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        """(B, H, T, S); `hidden` (B, 1, T, S) is True for hidden keys."""
        if hidden is None:
            return scores.softmax(-1)
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)


class Language(nn.Module):
    """A causal language model of two blocks. `keep` (B, T) is True for real tokens."""

    before: int = ROOM  # lookback of each token

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, M)
        self.places = nn.Embedding(ROOM, M)
        self.attention = nn.ModuleList(self.layer() for _ in range(2))
        self.norms = nn.ModuleList(self.norm() for _ in range(2))
        self.head = nn.Linear(M, V)

    def layer(self) -> Attention:
        return Attention()

    def norm(self) -> nn.Module:
        return nn.LayerNorm(M)

    def forward(self, ids: Tensor, keep: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        start = 0 if cache is None else cache.length
        x = self.embedding(ids) + self.places(self.positions(ids, keep, start))
        hidden = self.hidden(ids.shape[1], start, keep)
        for i, (attention, norm) in enumerate(zip(self.attention, self.norms, strict=True)):
            y = norm(x)
            x = x + attention(y, y, hidden, None if cache is None else cache[i])
        return self.head(self.last(x))

    def positions(self, ids: Tensor, keep: Tensor | None, start: int) -> Tensor:
        if keep is None:
            return torch.arange(start, start + ids.shape[1]).expand_as(ids)
        return (keep.long().cumsum(1) - 1).clamp(min=0)  # from the first real token

    def hidden(self, T: int, start: int, keep: Tensor | None) -> Tensor:
        """(B, 1, T, S), True for hidden keys: later tokens, tokens outside the window, and padding."""
        i = torch.arange(start, start + T)[:, None]
        j = torch.arange(start + T)
        hidden = ((j > i) | (j < i - self.before))[None, None]
        return hidden if keep is None else hidden | self.padding(keep)

    def padding(self, keep: Tensor) -> Tensor:
        return ~keep[:, None, None, :]

    def last(self, x: Tensor) -> Tensor:
        return x


class Windowed(Language):
    """A language model with a window: each token attends to itself and the three tokens before it."""

    before = 3


class Reader(nn.Module):
    """Self-attention over embeddings without positions: order does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.layer()
        self.norm = nn.LayerNorm(M)

    def layer(self) -> Attention:
        return Attention()

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        hidden = None if keep is None else ~keep[:, None, None, :]
        return x + self.attention(self.norm(x), self.norm(x), hidden)


class PooledReader(Reader):
    """Returns one vector per sequence: the mean over the real tokens."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        y = super().forward(x, keep)
        real = torch.ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        return self.mean(y, real)

    def mean(self, y: Tensor, keep: Tensor) -> Tensor:
        return (y * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)


class Pair(nn.Module):
    """An encoder-decoder with a causal target."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(V, M)
        self.target = nn.Embedding(V, M)
        self.places = nn.Embedding(ROOM, M)
        self.encoder = Reader()
        self.attention = Attention()
        self.cross = Attention()
        self.head = nn.Linear(M, V)

    def forward(
        self, source: Tensor, target: Tensor, keep: Tensor | None = None, target_keep: Tensor | None = None
    ) -> Tensor:
        memory = self.encoder(self.source(source), keep)
        x = self.target(target) + self.places(self.positions(target, target_keep))
        x = x + self.attention(x, x, self.hidden(target.shape[1], target_keep))
        return self.head(x + self.cross(x, memory, self.cross_hidden(keep)))

    def positions(self, target: Tensor, keep: Tensor | None) -> Tensor:
        real = torch.ones_like(target) if keep is None else keep.long()
        return (real.cumsum(1) - 1).clamp(min=0)

    def hidden(self, T: int, keep: Tensor | None) -> Tensor:
        """(B or 1, 1, T, T), True for hidden keys: later tokens and padding of the target."""
        future = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
        return future if keep is None else future | ~keep[:, None, None, :]

    def cross_hidden(self, keep: Tensor | None) -> Tensor | None:
        return None if keep is None else ~keep[:, None, None, :]
