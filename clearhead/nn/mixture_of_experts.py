"""Mixture of experts: several feed-forwards, of which a router selects a few for each token.

Letters: N tokens, M model dim, n experts, k experts per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.tensor_state import is_concrete, is_wrapped
from clearhead._core.typed_module import Module
from clearhead._core.validation import NonNegativeInt, PositiveFloat, PositiveInt, require
from clearhead.config import Validated
from clearhead.nn.feed_forward import FeedForward

_TINY = 1e-20  # added to the sum of weights, which can be 0


@dataclass(frozen=True)
class Experts(Validated):
    """`n` feed-forwards, of which each token uses the `top_k` with the highest router scores (Shazeer et al., 2017).

    By default their outputs are weighted by a softmax over these scores, as in Mixtral. Gradients flow through the
    weights, not through the selection.

    Args:
        n: Number of experts.
        top_k: Number of experts per token.
        d_ff: Hidden width of an expert; None for that of the block.
        score: Function that turns router outputs into scores.
        normalize: Divide the weights of a token by their sum.
        scale: Factor of the weights.
        n_groups: Number of groups of experts, of equal size.
        top_groups: Number of groups that a token may use, those with the largest sum of their two highest scores.
        n_shared: Number of experts that all tokens use, which are stored as one wide feed-forward.
        router_bias: Whether the router has a bias.
        selection_bias: Whether a constant per expert is added to its score for the selection only, which balances the
            load without an auxiliary loss (DeepSeek-V3).
    """

    n: PositiveInt
    top_k: PositiveInt = 2
    d_ff: PositiveInt | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: PositiveFloat = 1.0
    n_groups: PositiveInt = 1
    top_groups: PositiveInt = 1
    n_shared: NonNegativeInt = 0
    router_bias: bool = False
    selection_bias: bool = False

    def validate(self) -> None:
        require(self.top_k <= self.n, f"Experts: top_k is {self.top_k} and n is {self.n}; expected at most n of n")
        require(
            self.n % self.n_groups == 0 and self.top_groups <= self.n_groups,
            f"Experts: top_groups is {self.top_groups}, n_groups {self.n_groups} and n {self.n}; expected groups of "
            "equal size, of which at most all are used",
        )
        require(
            self.n_groups == 1 or self.n // self.n_groups > 1,
            f"Experts: {self.n_groups} groups of one expert; expected groups of at least two",
        )
        require(
            self.top_k * self.n_groups <= self.n * self.top_groups,
            f"Experts: {self.top_groups} of {self.n_groups} groups have fewer than top_k={self.top_k} experts",
        )


class ExpertsFeedForward(Module):
    """Σ weight · expert(x) over the `top_k` experts of each token, plus the shared expert.

    Args:
        d_model: Width of inputs and outputs.
        experts: Number of experts, and how tokens select them.
        build: Returns a new expert.
        shared: The experts that all tokens use, as one feed-forward.
    """

    def __init__(
        self,
        d_model: int,
        experts: Experts,
        build: Callable[[], FeedForward],
        *,
        shared: FeedForward | None = None,
    ) -> None:
        super().__init__()
        self.config = experts
        self.top_k = experts.top_k
        self.router = nn.Linear(d_model, experts.n, bias=experts.router_bias)
        self.selection_bias: nn.Parameter | None = None
        if experts.selection_bias:  # set by a rule during training, not by gradients
            self.selection_bias = nn.Parameter(torch.zeros(experts.n), requires_grad=False)
        self.experts = nn.ModuleList(build() for _ in range(experts.n))
        self.shared = shared

    def forward(self, x: Float[Tensor, "... M"]) -> Float[Tensor, "... M"]:
        """Apply the selected experts to each token of x (…, M)."""
        weights, expert_ids = self.route(x)
        if not torch.compiler.is_compiling() and is_wrapped(x):
            out = self._dense(x, weights, expert_ids)  # torch.func cannot read the number of tokens per expert
        else:
            out = self._grouped(x, weights, expert_ids)
        return out if self.shared is None else out + self.shared(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (…, k) and the ids (…, k) of the experts of each token of x (…, M)."""
        config = self.config
        logits = self.router(x).to(torch.promote_types(x.dtype, torch.float32))
        if config.score == "softmax" and config.normalize and self.selection_bias is None and config.n_groups == 1:
            selected, expert_ids = logits.topk(self.top_k, dim=-1)  # their softmax is normalized
            return (selected.softmax(-1) * config.scale).to(x.dtype), expert_ids
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        expert_ids = self._selection_scores(scores.detach()).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, expert_ids)
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY) if config.normalize else weights
        return (weights * config.scale).to(x.dtype), expert_ids

    def _selection_scores(self, scores: Tensor) -> Tensor:
        """Return the scores (…, n) that select experts: −∞ outside of the best groups of each token."""
        scores = scores if self.selection_bias is None else scores + self.selection_bias.to(scores.dtype)
        n_groups = self.config.n_groups
        if n_groups == 1:
            return scores
        groups = scores.unflatten(-1, (n_groups, -1))  # (…, groups, n / groups)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.config.top_groups, dim=-1).indices
        is_best = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        selection: Tensor = groups.masked_fill(~is_best[..., None], -math.inf).flatten(-2)
        return selection

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
        n = len(self.experts)
        total = expert_ids.numel()
        if torch.compiler.is_compiling() or (is_concrete(expert_ids) and not expert_ids.is_meta):
            return expert_ids.flatten().bincount(minlength=n).tolist()
        return [total * (i + 1) // n - total * i // n for i in range(n)]
