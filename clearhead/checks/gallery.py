"""A gallery of mistakes: small modules, each wrong in one way that has been made in the field, and what finds it.

`CORRECT` holds the modules as they should be (`specimens.py`). Each bug is one of them with one method changed, so that
the mistake is all that there is to read. For lessons, and for the tests of `check` itself: every one of these is found,
and its cause is named.

    from clearhead.checks import check
    from clearhead.checks.gallery import GALLERY

    print(check(GALLERY["causal mask off by one"].subject()))

    B batch   H heads   T queries   S keys   D head width   M model width   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.attention import KVCache
from clearhead.checks.guess import subject_of
from clearhead.checks.specimens import ROOM, Attention, H, Language, M, Pair, Reader, Summary, V, Windowed
from clearhead.checks.subject import Caching, Embeddings, Ids, Subject, TrueIsReal
from clearhead.masks import causal, window

# ---------------------------------------------------------------------- masks


class InvertedPadding(Language):
    def padding(self, keep: Tensor) -> Tensor:
        return keep[:, None, None, :]


class InvertedCausal(Language):
    def hidden(self, T: int, start: int, keep: Tensor | None) -> Tensor:
        return torch.ones(T, T, dtype=torch.bool).tril()[None, None]  # True was meant as "may see"


class OffByOne(Language):
    def hidden(self, T: int, start: int, keep: Tensor | None) -> Tensor:
        return torch.ones(T, T, dtype=torch.bool).triu(2)[None, None]


class NoMask(Language):
    def hidden(self, T: int, start: int, keep: Tensor | None) -> Tensor:
        return torch.zeros(T, T, dtype=torch.bool)[None, None]


class AddsZeroOne(Attention):
    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return (scores + (~hidden).to(scores.dtype)).softmax(-1)


class SoftCapped(Attention):
    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return (30 * torch.tanh(scores / 30) + ~hidden).softmax(-1)


class MasksAfter(Attention):
    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return scores.softmax(-1) * ~hidden


class WrongAxis(Attention):
    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-2)


class EmptyRowIsNaN(Attention):
    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        return scores.softmax(-1) if hidden is None else scores.masked_fill(hidden, -math.inf).softmax(-1)


class ThousandMillion(Attention):
    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        return scores.softmax(-1) if hidden is None else scores.masked_fill(hidden, -1e9).softmax(-1)


class NarrowWindow(Language):
    before = 2  # "a window of 3" that counts the token itself


# ---------------------------------------------------------------------- heads, scale, norms, dropout, gradients


class SplitByView(Attention):
    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], H, x.shape[1], M // H)


class ScaledByModel(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(M)


class DropoutInEval(Attention):
    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        return F.dropout(super().weights(scores, hidden), 0.1)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(M)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class BatchNormed(Language):
    def norm(self) -> nn.Module:
        return BatchNorm()


class NormOverTime(Language):
    """Normalises every channel over the tokens: what BatchNorm1d without running statistics does to one row."""

    def norm(self) -> nn.Module:
        return TimeNorm()


class TimeNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(M, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2) if x.shape[1] > 1 else x


class Detached(Language):
    def last(self, x: Tensor) -> Tensor:
        return x.detach()


class TimeFirst(nn.Module):
    """torch's encoder, whose batch axis is the second unless it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(M, H, 17, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


# ---------------------------------------------------------------------- padding


class PaddingIgnored(Language):
    def padding(self, keep: Tensor) -> Tensor:
        return torch.zeros_like(keep)[:, None, None, :]


class PositionsFromPadding(Language):
    def positions(self, ids: Tensor, keep: Tensor | None, start: int) -> Tensor:
        return torch.arange(start, start + ids.shape[1]).expand_as(ids)


class CrossIgnoresPadding(Pair):
    def cross_hidden(self, keep: Tensor | None) -> Tensor | None:
        return None


class TargetPaddingIgnored(Pair):
    def hidden(self, T: int, keep: Tensor | None) -> Tensor:
        return super().hidden(T, None)


class PaddingForCausal(Pair):
    def hidden(self, T: int, keep: Tensor | None) -> Tensor:
        return super().hidden(T, None) if keep is None else ~keep[:, None, None, :]


class InvertedTargetPadding(Pair):
    def hidden(self, T: int, keep: Tensor | None) -> Tensor:
        return super().hidden(T, None if keep is None else ~keep)


class MeanOverPadding(Summary):
    def mean(self, y: Tensor, keep: Tensor) -> Tensor:
        return (y * keep[..., None]).sum(1) / y.shape[1]


# ---------------------------------------------------------------------- caches


class PositionsRestart(Language):
    def positions(self, ids: Tensor, keep: Tensor | None, start: int) -> Tensor:
        return super().positions(ids, keep, 0)


class ForgetsOffset(Language):
    def hidden(self, T: int, start: int, keep: Tensor | None) -> Tensor:
        if start and T > 1:
            return torch.ones(T, start + T, dtype=torch.bool).triu(1)[None, None]
        return super().hidden(T, start, keep)


class WindowForgotten(Windowed):
    def hidden(self, T: int, start: int, keep: Tensor | None) -> Tensor:
        if start and T == 1:
            return torch.zeros(1, 1, 1, start + 1, dtype=torch.bool)  # "one token sees all that is kept"
        return super().hidden(T, start, keep)


def _reorder_first_layer(cache: KVCache, rows: Tensor) -> None:
    cache.at(0).reorder(rows)


def _truncate_first_layer(cache: KVCache, length: int) -> None:
    cache.at(0).truncate(length)


# ---------------------------------------------------------------------- the list


_KEEP = TrueIsReal("keep")


@dataclass(frozen=True)
class Bug:
    """One mistake: the subject that has it, the property that finds it, and words that the named cause contains."""

    make: Callable[[], Subject]
    property: str
    cause: str

    def subject(self, seed: int = 0) -> Subject:
        """A fresh module with this mistake, its weights from `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()


def _language(kind: type[Language], *, sees: int | None = None, caching: Caching | None = None) -> Subject:
    mask = causal() if sees is None else causal() & window(sees, 0)
    caching = Caching(new=KVCache) if caching is None else caching
    how = {"inputs": Ids(V), "sees": mask, "layers": 2, "padding": _KEEP, "caching": caching}
    return subject_of(kind(), name=kind.__name__, positions=True, max_len=ROOM, **how)


def _with(layer: type[Attention]) -> Subject:
    kind = type(layer.__name__, (Language,), {"layer": lambda self: layer()})
    return _language(kind)


def _reader(kind: type[nn.Module], padding: TrueIsReal | None = _KEEP) -> Subject:
    return subject_of(kind(), inputs=Embeddings(M), causal=False, positions=False, layers=1, padding=padding)


def _reader_with(layer: type[Attention]) -> Subject:
    return _reader(type(layer.__name__, (Reader,), {"layer": lambda self: layer()}))


def _pair(kind: type[Pair]) -> Subject:
    return subject_of(
        kind(),
        inputs=Ids(V),
        source=Ids(V),
        causal=True,
        padding=_KEEP,
        target_padding=TrueIsReal("target_keep"),
        max_len=ROOM,
        positions=True,
    )


CORRECT: dict[str, Callable[[], Subject]] = {
    "language model": lambda: _language(Language),
    "windowed language model": lambda: _language(Windowed, sees=3),
    "reader": lambda: _reader(Reader),
    "summary": lambda: _reader(Summary),
    "encoder-decoder": lambda: _pair(Pair),
}

GALLERY: dict[str, Bug] = {
    "inverted padding mask": Bug(lambda: _language(InvertedPadding), "mask polarity", "inverted"),
    "inverted causal mask": Bug(lambda: _language(InvertedCausal), "future leak", "inverted"),
    "causal mask off by one": Bug(lambda: _language(OffByOne), "future leak", "off by one"),
    "no causal mask": Bug(lambda: _language(NoMask), "future leak", "no causal mask"),
    "mask added as 0/1": Bug(lambda: _with(AddsZeroOne), "future leak", "a 0/1 mask is added"),
    "bool mask added to soft-capped scores": Bug(
        lambda: _with(SoftCapped), "future leak", "soft-capped scores and then a bool mask"
    ),
    "mask after the softmax": Bug(lambda: _with(MasksAfter), "future leak", "after the softmax"),
    "softmax over the wrong axis": Bug(lambda: _with(WrongAxis), "future leak", "the wrong axis"),
    "NaN from an empty row": Bug(lambda: _reader_with(EmptyRowIsNaN), "finiteness", "NaN from an empty row"),
    "−1e9 in float16": Bug(lambda: _with(ThousandMillion), "dtype agreement", "does not fit float16"),
    "window one too narrow": Bug(lambda: _language(NarrowWindow, sees=3), "past reach", "narrower than it is said"),
    "heads split by view": Bug(lambda: _with(SplitByView), "future leak", "without a transpose"),
    "heads split by view, both ways": Bug(
        lambda: _reader_with(SplitByView), "permutation equivariance", "without a transpose"
    ),
    "scaled by d_model": Bug(lambda: _with(ScaledByModel), "score scale", "scaled by d_model"),
    "dropout in evaluation": Bug(lambda: _with(DropoutInEval), "determinism", "dropout"),
    "batch-norm in a decoder": Bug(lambda: _language(BatchNormed), "train = eval without dropout", "batch-norm"),
    "norm over time": Bug(lambda: _language(NormOverTime), "future leak", "over the time axis"),
    "detached output": Bug(lambda: _language(Detached), "gradients reach every parameter", "detach()"),
    "batch taken for time": Bug(lambda: _reader(TimeFirst, None), "batch invariance", "batch_first"),
    "padding ignored": Bug(
        lambda: _language(PaddingIgnored), "padding invariance", "does not reach the self-attention"
    ),
    "left padding with absolute positions": Bug(
        lambda: _language(PositionsFromPadding), "padding invariance", "counted from the padding"
    ),
    "padding ignored in cross-attention": Bug(
        lambda: _pair(CrossIgnoresPadding), "padding invariance", "ignored in cross-attention"
    ),
    "padding ignored in the target": Bug(
        lambda: _pair(TargetPaddingIgnored), "padding invariance", "the target's padding is seen"
    ),
    "padding mask in place of the causal mask": Bug(
        lambda: _pair(PaddingForCausal), "padding invariance", "takes the place of the causal mask"
    ),
    "inverted padding mask of the target": Bug(lambda: _pair(InvertedTargetPadding), "mask polarity", "inverted"),
    "mean over the padding": Bug(lambda: _reader(MeanOverPadding), "padding invariance", "a mean"),
    "cache positions restart": Bug(lambda: _language(PositionsRestart), "cache = no cache", "positions restart"),
    "chunk masked without offset": Bug(lambda: _language(ForgetsOffset), "cache = no cache", "offset"),
    "window ignored when decoding": Bug(
        lambda: _language(WindowForgotten, sees=3), "cache = no cache", "a window is ignored when decoding"
    ),
    "cache not reordered for beams": Bug(
        lambda: _language(Language, caching=Caching(new=KVCache, reorder=_reorder_first_layer)),
        "cache = no cache",
        "not reordered for beams",
    ),
    "cache not truncated": Bug(
        lambda: _language(Language, caching=Caching(new=KVCache, truncate=_truncate_first_layer)),
        "cache = no cache",
        "truncating leaves something behind",
    ),
}

__all__ = ["CORRECT", "GALLERY", "Bug"]
