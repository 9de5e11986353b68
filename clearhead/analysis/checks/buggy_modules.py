"""Small modules with one typical error each, and the property that detects it.

`CORRECT` holds the modules as they should be (`specimens.py`). Each bug is one of them with one method changed, so that
the mistake is all that there is to read. For lessons, and for the tests of `check` itself: every one of these is found,
and its cause is named.

    from clearhead.analysis.checks import check
    from clearhead.analysis.checks.buggy_modules import GALLERY

    print(check(GALLERY["causal mask off by one"].spec()))

    B batch   H heads   T queries   S keys   D head width   M model width   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead._core.call_types import Kwargs
from clearhead.analysis.checks.reference_modules import (
    ROOM,
    Attention,
    H,
    Language,
    M,
    Pair,
    PooledReader,
    Reader,
    V,
    Windowed,
)
from clearhead.analysis.inputs.infer_spec import spec_for
from clearhead.analysis.inputs.module_spec import Caching, Embeddings, Ids, KeepMask, ModuleSpec
from clearhead.masks import causal, window
from clearhead.nn import KVCache

_KEEP = KeepMask("keep")


@dataclass(frozen=True)
class Bug:
    """A typical error: its module, the property that detects it, and a part of the reported cause."""

    make: Callable[[], ModuleSpec]
    property: str
    cause: str

    def spec(self, seed: int = 0) -> ModuleSpec:
        """Return a new module with this error, initialized from `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()


# ---------------------------------------------------------------------- reference modules with changed methods

Make = Callable[[], ModuleSpec]


def _changed(kind: type[nn.Module], changes: Kwargs) -> type[nn.Module]:
    return type(kind.__name__, (kind,), changes)


def _language(
    kind: type[Language] = Language, *, lookback: int | None = None, caching: Caching | None = None, **changes: object
) -> Make:
    mask = causal() if lookback is None else causal() & window(lookback, 0)
    options = {
        "inputs": Ids(V),
        "mask": mask,
        "layers": 2,
        "padding": _KEEP,
        "caching": caching or Caching(new=KVCache),
    }
    return lambda: spec_for(_changed(kind, changes)(), positions=True, max_len=ROOM, **options)


def _reader(kind: type[nn.Module] = Reader, *, padding: KeepMask | None = _KEEP, **changes: object) -> Make:
    options = {"inputs": Embeddings(M), "causal": False, "positions": False, "layers": 1, "padding": padding}
    return lambda: spec_for(_changed(kind, changes)(), **options)


def _attention(of: Callable[..., Make] = _language, **changes: object) -> Make:
    """Return a model with a changed attention layer."""
    return of(layer=lambda self: _changed(Attention, changes)())


def _pair(**changes: object) -> Make:
    options = {"padding": _KEEP, "target_padding": KeepMask("target_keep"), "max_len": ROOM, "positions": True}
    return lambda: spec_for(_changed(Pair, changes)(), inputs=Ids(V), source=Ids(V), causal=True, **options)


CORRECT: dict[str, Make] = {
    "language model": _language(),
    "windowed language model": _language(Windowed, lookback=3),
    "reader": _reader(),
    "summary": _reader(PooledReader),
    "encoder-decoder": _pair(),
}

# ---------------------------------------------------------------------- incorrect parts


class NoMask(Language):
    """A language model without a causal mask."""

    def hidden(self, T: int, start: int, keep: Tensor | None) -> Tensor:
        return torch.zeros(T, T, dtype=torch.bool)[None, None]


class OverTime(nn.Module):
    """Applies a norm of channels, (B, M, T): over the batch or over time instead of a layer norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        alone = isinstance(self.norm, nn.InstanceNorm1d) and x.shape[1] == 1  # InstanceNorm1d raises for it
        return x if alone else self.norm(x.transpose(1, 2)).transpose(1, 2)


class TimeFirst(nn.Module):
    """A torch encoder with batch_first=False."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(M, H, 17, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def _square(T: int) -> Tensor:
    return torch.ones(1, 1, T, T, dtype=torch.bool)


def _decoded_without_offset(self: Language, T: int, start: int, keep: Tensor | None) -> Tensor:
    if start and T > 1:
        return torch.ones(T, start + T, dtype=torch.bool).triu(1)[None, None]
    return Language.hidden(self, T, start, keep)


def _decoded_without_window(self: Language, T: int, start: int, keep: Tensor | None) -> Tensor:
    if start and T == 1:
        return torch.zeros(1, 1, 1, start + 1, dtype=torch.bool)  # one token attends to the whole cache
    return Language.hidden(self, T, start, keep)


def _filled_with(number: float) -> Callable[..., Tensor]:
    """Return attention weights with this value for hidden scores."""
    return lambda self, scores, hidden: (scores if hidden is None else scores.masked_fill(hidden, number)).softmax(-1)


def _by_view(self: Attention, x: Tensor) -> Tensor:
    return x.view(x.shape[0], H, x.shape[1], M // H)


# ---------------------------------------------------------------------- bugs: mask, attention, padding, cache

GALLERY: dict[str, Bug] = {
    "inverted padding mask": Bug(
        _language(padding=lambda self, keep: keep[:, None, None, :]), "mask polarity", "inverted"
    ),
    "inverted causal mask": Bug(  # True was intended as "may attend"
        _language(hidden=lambda self, T, start, keep: _square(T).tril()), "causality", "inverted"
    ),
    "causal mask off by one": Bug(
        _language(hidden=lambda self, T, start, keep: _square(T).triu(2)), "causality", "off by one"
    ),
    "no causal mask": Bug(_language(NoMask), "causality", "no causal mask"),
    "mask added as 0/1": Bug(
        _attention(weights=lambda self, scores, hidden: (scores + (~hidden).to(scores.dtype)).softmax(-1)),
        "causality", "a 0/1 mask is added",
    ),
    "bool mask added to soft-capped scores": Bug(
        _attention(weights=lambda self, scores, hidden: (30 * torch.tanh(scores / 30) + ~hidden).softmax(-1)),
        "causality", "soft-capped scores and then a bool mask",
    ),
    "mask after the softmax": Bug(
        _attention(weights=lambda self, scores, hidden: scores.softmax(-1) * ~hidden),
        "causality", "after the softmax",
    ),
    "softmax over the wrong axis": Bug(
        _attention(
            weights=lambda self, scores, hidden: scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-2)
        ),
        "causality", "the wrong axis",
    ),
    "NaN from an empty row": Bug(
        _attention(_reader, weights=_filled_with(-math.inf)), "finiteness", "NaN from an empty row"
    ),
    "−1e9 in float16": Bug(_attention(weights=_filled_with(-1e9)), "dtype agreement", "does not fit float16"),
    # A window of 3 that includes the token itself.
    "window one too narrow": Bug(_language(lookback=3, before=2), "context use", "narrower than specified"),
    "heads split by view": Bug(_attention(split=_by_view), "causality", "without a transpose"),
    "heads split by view, both ways": Bug(
        _attention(_reader, split=_by_view), "permutation equivariance", "without a transpose"
    ),
    "scaled by d_model": Bug(
        _attention(scores=lambda self, q, k: q @ k.transpose(-2, -1) / math.sqrt(M)),
        "score scale", "scaled by d_model",
    ),
    "dropout in evaluation": Bug(
        _attention(weights=lambda self, scores, hidden: F.dropout(Attention.weights(self, scores, hidden), 0.1)),
        "determinism", "dropout",
    ),
    "batch-norm in a decoder": Bug(
        _language(norm=lambda self: OverTime(nn.BatchNorm1d(M))), "train/eval consistency", "batch-norm"
    ),
    "norm over time": Bug(  # like BatchNorm1d without running statistics on one row
        _language(norm=lambda self: OverTime(nn.InstanceNorm1d(M, affine=True))), "causality", "over the time axis"
    ),
    "detached output": Bug(
        _language(last=lambda self, x: x.detach()), "gradient flow", "detach()"
    ),
    "batch taken for time": Bug(_reader(TimeFirst, padding=None), "batch invariance", "batch_first"),
    "padding ignored": Bug(
        _language(padding=lambda self, keep: torch.zeros_like(keep)[:, None, None, :]),
        "padding invariance", "does not reach the self-attention",
    ),
    "left padding with absolute positions": Bug(
        _language(positions=lambda self, ids, keep, start: Language.positions(self, ids, None, start)),
        "padding invariance", "counted from the padding",
    ),
    "padding ignored in cross-attention": Bug(
        _pair(cross_hidden=lambda self, keep: None), "padding invariance", "not masked in cross-attention"
    ),
    "padding ignored in the target": Bug(
        _pair(hidden=lambda self, T, keep: Pair.hidden(self, T, None)),
        "padding invariance", "padding of the target is not masked",
    ),
    "padding mask in place of the causal mask": Bug(
        _pair(hidden=lambda self, T, keep: Pair.hidden(self, T, None) if keep is None else ~keep[:, None, None, :]),
        "padding invariance", "replaces the causal mask",
    ),
    "inverted padding mask of the target": Bug(
        _pair(hidden=lambda self, T, keep: Pair.hidden(self, T, None if keep is None else ~keep)),
        "mask polarity", "inverted",
    ),
    "mean over the padding": Bug(
        _reader(PooledReader, mean=lambda self, y, keep: (y * keep[..., None]).sum(1) / y.shape[1]),
        "padding invariance", "a mean",
    ),
    "cache positions restart": Bug(
        _language(positions=lambda self, ids, keep, start: Language.positions(self, ids, keep, 0)),
        "cache = no cache", "positions restart",
    ),
    "chunk masked without offset": Bug(_language(hidden=_decoded_without_offset), "cache = no cache", "offset"),
    "window ignored when decoding": Bug(
        _language(Windowed, lookback=3, hidden=_decoded_without_window),
        "cache = no cache", "a window is ignored when decoding",
    ),
    "cache not reordered for beams": Bug(  # only of the first layer
        _language(caching=Caching(new=KVCache, reorder=lambda cache, rows: cache[0].reorder(rows))),
        "cache = no cache", "not reordered for beams",
    ),
    "cache not truncated": Bug(
        _language(caching=Caching(new=KVCache, truncate=lambda cache, length: cache[0].crop(length))),
        "cache = no cache", "truncation is incomplete",
    ),
}  # fmt: skip

__all__ = ["CORRECT", "GALLERY", "Bug"]
