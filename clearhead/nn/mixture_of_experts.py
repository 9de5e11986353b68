"""A mixture of experts: several feed-forwards of which each token takes the few that a router picks for it.

Letters: N tokens, M model width, n experts, k of them a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float
from clearhead._core.tensor_state import is_concrete, is_wrapped
from clearhead._core.validation import PositiveInt, require
from clearhead.config import Validated
from clearhead.nn.feed_forward import FeedForward


@dataclass(frozen=True)
class Experts(Validated):
    """`n` feed-forwards, of which a token takes the `top_k` that its router scores highest, each as much as a softmax
    over those scores says (Shazeer et al., 2017, as Mixtral has it). Not which, but how much is differentiated."""

    n: PositiveInt
    top_k: PositiveInt = 2

    def validate(self) -> None:
        require(self.top_k <= self.n, f"Experts: top_k is {self.top_k} and n is {self.n}; expected at most n of n")


class ExpertsFeedForward(nn.Module):
    """Σ share · expert(x) over the `top_k` experts of each token; `make` makes one of them."""

    def __init__(self, d_model: int, experts: Experts, make: Callable[[], FeedForward]) -> None:
        super().__init__()
        self.top_k = experts.top_k
        self.router = nn.Linear(d_model, experts.n, bias=False)
        self.experts = nn.ModuleList(make() for _ in range(experts.n))

    def forward(self, x: Float[Tensor, "... M"]) -> Float[Tensor, "... M"]:
        """Each token by the experts that its router takes: (…, M) becomes (…, M)."""
        scores, chosen = self.router(x).topk(self.top_k, dim=-1)  # (…, k)
        shares = scores.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        if not torch.compiler.is_compiling() and is_wrapped(x):
            return self._all_for_all(x, shares, chosen)  # nobody can read there how many tokens an expert gets
        return self._each_for_its_own(x, shares, chosen)

    def _all_for_all(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """The equation itself: every expert reads every token, with no share in those that did not pick it."""
        shares = torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], len(self.experts)).scatter(-1, chosen, shares)
        return (torch.stack([expert(x) for expert in self.experts], dim=-1) * shares[..., None, :]).sum(-1)

    def _each_for_its_own(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """The same, where an expert reads the tokens that picked it and no others."""
        order = chosen.flatten().argsort(stable=True)  # (N · k,): the first expert's tokens, the second's, …
        tokens = order // self.top_k
        parts = x.reshape(-1, x.shape[-1])[tokens].split(self._loads(chosen))
        said = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        sums = torch.zeros_like(x).reshape(-1, x.shape[-1])
        return sums.index_add(0, tokens, said * shares.flatten()[order, None]).reshape(x.shape)

    def _loads(self, chosen: Tensor) -> list[int]:
        """How many tokens each expert gets; an even share of them where there are no numbers, as for `cost`."""
        n, total = len(self.experts), chosen.numel()
        if torch.compiler.is_compiling() or (is_concrete(chosen) and not chosen.is_meta):  # a graph ends here
            return chosen.flatten().bincount(minlength=n).tolist()
        return [total * (i + 1) // n - total * i // n for i in range(n)]
