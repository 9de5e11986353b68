"""Multi-head latent attention (DeepSeek-AI, 2024): keys and values are projections of one latent vector per token.

    c = norm(W_DKV x)          k_h = [W_UK^h c ; rotate(W_KR x)]          v_h = W_UV^h c
    q_h = [W_UQ^h norm(W_DQ x) ; rotate(W_QR^h norm(W_DQ x))]

A cache stores the latent vector and the rotated part of the key, which all heads share, instead of keys and values.

    B batch   T tokens   S keys   M model width   H heads   D head width of queries and keys   E head width of values
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead._core.validation import PositiveInt
from clearhead.attention.scores import Scores
from clearhead.config import Validated
from clearhead.errors import ConfigError
from clearhead.nn.attention import Biases, MultiHeadAttention, Rotation
from clearhead.nn.kv_cache import KVCache
from clearhead.nn.norms import Norm, RMSNorm


@dataclass(frozen=True, kw_only=True)
class Latent(Validated):
    """Sizes of `MultiHeadLatentAttention`.

    Args:
        kv_rank: Width of the latent vector of keys and values.
        q_rank: Width of the latent vector of queries; None for a full projection.
        d_rope: Number of rotated features of a head, which follow the others; all keys of a token share them.
        d_value: Head width of values.
        norm: Norm of the latent vectors.
    """

    kv_rank: PositiveInt
    q_rank: PositiveInt | None = None
    d_rope: PositiveInt
    d_value: PositiveInt
    norm: Norm = RMSNorm()


class MultiHeadLatentAttention(MultiHeadAttention):
    """Self-attention with low-rank projections.

    Args:
        d_model: Width of inputs and outputs.
        n_heads: Number of heads.
        latent: Sizes of the latent vectors.
        d_head: Head width of queries and keys, including the rotated features.
        bias: Whether the projections of the input and of the output have biases; the others have none.
        dropout: Dropout of attention weights in training.
        rotary: Rotates the last `latent.d_rope` features of queries and keys.
        scores: Score function. Default: `ScaledDot()`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        latent: Latent,
        *,
        d_head: int,
        bias: bool | Biases = True,
        dropout: float = 0.0,
        rotary: Rotation | None = None,
        scores: Scores | None = None,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias, dropout=dropout, rotary=rotary, scores=scores)
        del self.k_proj, self.v_proj  # `kv_down` and `kv_up` replace them
        biases = Biases.of(bias)
        self.latent = latent
        q_width = self.n_heads * self.d_head
        self.q_down: nn.Linear | None = None
        self.q_latent_norm: nn.Module | None = None
        if latent.q_rank is None:
            self.q_proj = nn.Linear(d_model, q_width, bias=False)
        else:
            self.q_down = nn.Linear(d_model, latent.q_rank, bias=biases.q)
            self.q_latent_norm = latent.norm.build(latent.q_rank)
            self.q_proj = nn.Linear(latent.q_rank, q_width, bias=False)
        self.kv_down = nn.Linear(d_model, latent.kv_rank + latent.d_rope, bias=biases.k)
        self.kv_latent_norm = latent.norm.build(latent.kv_rank)
        d_key = self.d_head - latent.d_rope  # of the part that is not rotated
        self.kv_up = nn.Linear(latent.kv_rank, self.n_heads * (d_key + latent.d_value), bias=False)
        self.o_proj = nn.Linear(self.n_heads * latent.d_value, d_model, bias=biases.out)
        for layer in (self.q_down, self.q_proj, self.kv_down, self.kv_up, self.o_proj):
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def _queries(self, query: Tensor, start: int | None) -> Tensor:
        """Return the queries (B, H, T, D)."""
        if self.q_down is not None and self.q_latent_norm is not None:
            query = self.q_latent_norm(self.q_down(query))
        q = self._split(self.q_proj(query), self.n_heads)
        plain, rotated = q.split((self.d_head - self.latent.d_rope, self.latent.d_rope), dim=-1)
        return torch.cat((plain, self._rotate(rotated, start)), dim=-1)

    def _keys_values(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, start: int | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys (B, H, S, D) and values (B, H, S, E) from the latent vectors, of the cache if there is one."""
        if key is not None:
            raise ConfigError("latent attention is self-attention; expected one input")
        latent, rotated = self.kv_down(query).split((self.latent.kv_rank, self.latent.d_rope), dim=-1)
        latent = self.kv_latent_norm(latent).unsqueeze(-3)  # (B, 1, T, rank)
        rotated = self._rotate(rotated.unsqueeze(-3), start)
        if cache is not None:
            latent, rotated = cache.append(latent, rotated)
        heads = self._split(self.kv_up(latent.squeeze(-3)), self.n_heads)
        plain, v = heads.split((self.d_head - self.latent.d_rope, self.latent.d_value), dim=-1)
        k = torch.cat((plain, rotated.expand(*plain.shape[:-1], -1)), dim=-1)
        return k, v
