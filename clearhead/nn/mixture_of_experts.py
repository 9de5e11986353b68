"""Mixture of experts: several feed-forwards, of which a router selects a few for each token.

Letters: N tokens, M model dim, n experts, k experts per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.tensor_state import is_concrete, is_wrapped
from clearhead._core.typed_module import Module
from clearhead._core.validation import PositiveInt, require
from clearhead.config import Validated
from clearhead.nn.feed_forward import FeedForward


@dataclass(frozen=True)
class Experts(Validated):
    """`n` feed-forwards, of which each token uses the `top_k` with the highest router scores (Shazeer et al., 2017).

    Their outputs are weighted by a softmax over these scores, as in Mixtral. Gradients flow through the weights, not
    through the selection."""

    n: PositiveInt
    top_k: PositiveInt = 2

    def validate(self) -> None:
        require(self.top_k <= self.n, f"Experts: top_k is {self.top_k} and n is {self.n}; expected at most n of n")


class ExpertsFeedForward(Module):
    """Σ weight · expert(x) over the `top_k` experts of each token; `build` returns a new expert."""

    def __init__(self, d_model: int, experts: Experts, build: Callable[[], FeedForward]) -> None:
        super().__init__()
        self.top_k = experts.top_k
        self.router = nn.Linear(d_model, experts.n, bias=False)
        self.experts = nn.ModuleList(build() for _ in range(experts.n))

    def forward(self, x: Float[Tensor, "... M"]) -> Float[Tensor, "... M"]:
        """Apply the selected experts to each token of x (…, M)."""
        scores, expert_ids = self.router(x).topk(self.top_k, dim=-1)  # (…, k)
        weights = scores.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        if not torch.compiler.is_compiling() and is_wrapped(x):
            return self._dense(x, weights, expert_ids)  # torch.func cannot read the number of tokens per expert
        return self._grouped(x, weights, expert_ids)

    def _dense(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Apply every expert to every token, with weight 0 for tokens that did not select it."""
        weights = torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], len(self.experts)).scatter(-1, expert_ids, weights)
        return (torch.stack([expert(x) for expert in self.experts], dim=-1) * weights[..., None, :]).sum(-1)

    def _grouped(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Apply each expert to the tokens that selected it; the same result as `_dense`."""
        order = expert_ids.flatten().argsort(stable=True)  # (N · k,), grouped by expert
        tokens = order // self.top_k
        parts = x.reshape(-1, x.shape[-1])[tokens].split(self._tokens_per_expert(expert_ids))
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        sums = torch.zeros_like(x).reshape(-1, x.shape[-1])
        return sums.index_add(0, tokens, outputs * weights.flatten()[order, None]).reshape(x.shape)

    def _tokens_per_expert(self, expert_ids: Tensor) -> list[int]:
        """Return the number of tokens per expert; an even split for fake tensors, as in `cost`."""
        n, total = len(self.experts), expert_ids.numel()
        if torch.compiler.is_compiling() or (is_concrete(expert_ids) and not expert_ids.is_meta):
            return expert_ids.flatten().bincount(minlength=n).tolist()
        return [total * (i + 1) // n - total * i // n for i in range(n)]
