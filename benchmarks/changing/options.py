"""Options of `python -m benchmarks sparse --changing`, and calls that all of its sections use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import and_, invert, or_

import torch
from torch import Tensor

from clearhead.attention import attend
from clearhead.attention.observe import Impl
from clearhead.masks import Atom, Causal, Documents, Mask, documents, fold, leaves
from clearhead.masks.catalogue import CATALOGUE, Pattern

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Options:
    """Sizes, device and time of a run.

    Attributes:
        device: "cpu" or "cuda".
        dtype: Data type of the inputs.
        heads: Number of heads.
        width: Head dim.
        lengths: Only these lengths, if given; else those of each section.
        batches: Only these batch sizes, if given; else those of each section.
        name_filter: Only rows whose name contains this.
        seconds: Time for each implementation of a row.
        peers: Also measure FlexAttention, varlen attention and transformers, which are compiled first.
        smoke: Tiny sizes, which show that every section runs; timings are not meaningful.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    heads: int = 16
    width: int = 64
    lengths: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    name_filter: str = ""
    seconds: float = 0.15
    peers: bool = True
    smoke: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return torch.device(self.device).type == "cuda"

    @property
    def catalogue(self) -> tuple[Pattern, ...]:
        """Return the selected masks of the catalogue; only a few for a smoke test."""
        return tuple(p for p in CATALOGUE[: 3 if self.smoke else None] if self.name_filter in p.name)

    def lengths_or(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the requested lengths, a tiny one for a smoke test, or `default`."""
        return self.lengths or ((96,) if self.smoke else default)

    def batches_or(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the requested batch sizes, 2 for a smoke test, or `default`."""
        return self.batches or ((2,) if self.smoke else default)


def tensors(options: Options, batch: int, length: int) -> tuple[QKV, Tensor]:
    """Return random queries, keys and values, (B, H, T, D), that require gradients, and the output's gradient."""
    shape = (batch, options.heads, length, options.width)
    generator = torch.Generator(options.device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(shape, generator=generator, device=options.device, dtype=options.dtype) for _ in range(4)
    )
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), grad


def forward_backward(attention: Callable[..., Tensor], qkv: QKV, grad: Tensor) -> None:
    """Run attention and compute the gradients of queries, keys and values."""
    torch.autograd.grad(attention(*qkv), qkv, grad)


def attend_under(mask: Mask, impl: Impl) -> Callable[..., Tensor]:
    """Return `attend` under a mask."""
    return partial(attend, mask=mask, impl=impl)


def sparse_impl(mask: Mask) -> Impl:
    """Return "sparse", or "sdpa" for causal(), which has a kernel there."""
    return "sdpa" if isinstance(mask, Causal) else "sparse"


def move_data(mask: Mask, device: str) -> Mask:
    """Return the mask with its document ids on a device."""

    def leaf(atom: Atom) -> Mask:
        inner = documents(atom.leaf.ids.to(device)) if isinstance(atom.leaf, Documents) else atom.leaf
        return inner.T if atom.swapped else inner

    if not any(isinstance(atom.leaf, Documents) for atom in leaves(mask)):
        return mask
    return fold(mask, leaf=leaf, and_=and_, or_=or_, not_=invert)
