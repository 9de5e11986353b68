"""Changing a run from outside: what a module gives, or what single heads give, replaced while the model runs.

    with look.trace(model, "output") as t:
        t.intervene("blocks.2.attention", look.ZeroAblation(heads=[3]))      # ablate a head
        t.intervene("blocks.1", look.PatchActivation(clean, positions=[4]))    # take position 4 from another run
        model(ids)

An edit with `heads` works on what these heads of an attention layer give, (B, H, T, E), before the output projection;
one without works on the output of any module, (B, T, M). `positions` are places in the sequence, also in generation
with a cache, where a step computes only the newest. The attention itself runs as it always does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.look.recompute import Indices, resolve_indices
from clearhead.look.record import CallContext


@runtime_checkable
class ActivationSource(Protocol):
    """What edits take from another run: a trace that recorded the path in question."""

    def heads(self, path: str, *, heads: Indices = None, run: int = -1) -> Tensor: ...

    def output(self, path: str = "", *, run: int = -1) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Intervention(ABC):
    """Which heads (None: the module's output) and which positions (None: all) are changed."""

    heads: Indices = None
    positions: Indices = None

    @abstractmethod
    def new(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        """What stands in place of `part`, (…, h, r, E) or (…, r, M), whose rows are at `places` in the sequence."""

    def apply(self, x: Tensor, moment: CallContext) -> Tensor:
        """x with this edit made."""
        rows, path = self._rows(x, moment), moment.path
        if not rows:
            return x
        at = torch.tensor(rows, device=x.device)
        places = [(moment.past or 0) + row for row in rows]
        index: Any = (..., at, slice(None)) if x.dim() > 2 or self.heads is not None else (...,)
        if self.heads is not None:
            which = torch.tensor(resolve_indices(self.heads, x.shape[-3], "head"), device=x.device)
            index = (..., which[:, None], at, slice(None))
        part = x[index]
        new = self.new(part, path, places).to(x)
        changed = x.clone()
        try:
            changed[index] = new.expand_as(part)
        except RuntimeError as error:
            raise ShapeError(
                f"an edit of {path or 'the model'} gives {tuple(new.shape)} and replaces {tuple(part.shape)}; "
                "expected a shape that broadcasts to it"
            ) from error
        return changed

    def _rows(self, x: Tensor, moment: CallContext) -> list[int]:
        """The rows of this call that are meant."""
        if x.dim() < 3 and self.positions is not None:
            what = moment.path or "the model"
            raise ShapeError(f"{what} gives {tuple(x.shape)}, which has no positions; leave positions out")
        if x.dim() < 3:
            return [0]
        T = x.shape[-2]
        if moment.cache is None or self.positions is None:
            return resolve_indices(self.positions, T, "position")
        where, past = self.positions, moment.past or 0
        if isinstance(where, slice):
            where = range(where.start or 0, past + T if where.stop is None else where.stop, where.step or 1)
        wanted = [where] if isinstance(where, int) else list(where)
        if any(place < 0 for place in wanted):
            given = self.positions
            raise ShapeError(f"positions are {given!r}; with a cache the end is not known, so count from the front")
        return [place - past for place in wanted if past <= place < past + T]


@dataclass(frozen=True, kw_only=True, eq=False)
class ZeroAblation(Intervention):
    """Zeros: ablates heads, positions, or a whole module."""

    def new(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        return part.new_zeros(())


@dataclass(frozen=True, eq=False)
class MeanAblation(Intervention):
    """The mean over all sequences and positions of another run: ablates without leaving the usual range."""

    source: ActivationSource
    run: int = -1

    def new(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        x = _taken(self, self.source, path, self.run)  # (B, h, T, E) or (B, T, M)
        return x.mean(0) if x.dim() < 3 else x.mean(dim=(0, -2), keepdim=True).squeeze(0)


@dataclass(frozen=True, eq=False)
class ReplaceActivation(Intervention):
    """A tensor that broadcasts to what it replaces, or a function from what was there to what shall be."""

    value: Tensor | Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if not isinstance(self.value, Tensor) and not callable(self.value):
            raise DtypeError(f"Replace got a {type(self.value).__name__}; expected a tensor, or a function of one")

    def new(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        new = self.value if isinstance(self.value, Tensor) else self.value(part)
        if not isinstance(new, Tensor):
            kind, what = type(new).__name__, path or "the model"
            raise DtypeError(f"Replace gave a {kind} for {what}; its function must return a tensor")
        return new


@dataclass(frozen=True, eq=False)
class PatchActivation(Intervention):
    """The same heads and positions from another run; `path` says where there, if it is another module."""

    source: ActivationSource
    path: str | None = None
    run: int = -1

    def new(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        x = _taken(self, self.source, path if self.path is None else self.path, self.run)
        if x.dim() < 3:
            return x
        if max(places) >= x.shape[-2]:
            raise ShapeError(
                f"position {max(places)} of {path or 'the model'} is to be patched from a run of {x.shape[-2]} "
                "positions; give positions that both runs have"
            )
        return x[..., torch.tensor(places, device=x.device), :]


def _taken(edit: Intervention, source: ActivationSource, path: str, run: int) -> Tensor:
    if not isinstance(source, ActivationSource):
        raise ConfigError(f"{type(edit).__name__} got a {type(source).__name__}; expected the trace of another run")
    return source.output(path, run=run) if edit.heads is None else source.heads(path, heads=edit.heads, run=run)
