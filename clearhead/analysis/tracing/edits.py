"""Intervene in a forward pass: replace the outputs of modules or heads while the model runs.

    with ch.trace(model, "output") as t:
        t.intervene("blocks.2.attention", ch.ZeroAblation(heads=[3]))       # ablate a head
        t.intervene("blocks.1", ch.PatchActivation(clean, positions=[4]))   # copy position 4 from another run
        model(ids)

An intervention with `heads` changes the outputs of these heads of an attention layer, (B, H, T, E), before the output
projection; one without changes the output of any module, (B, T, M). `positions` are positions in the sequence, also in
generation with a cache, where a step computes only the newest one. Attention itself runs unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from clearhead._core.keywords import explain_keywords
from clearhead.analysis.tracing.activation_store import CallContext
from clearhead.analysis.tracing.recompute import Indices, resolve_indices
from clearhead.errors import ConfigError, DtypeError, ShapeError


@runtime_checkable
class ActivationSource(Protocol):
    """The source of a patch: a trace that recorded the path."""

    def heads(self, path: str, *, heads: Indices = None, run: int = -1) -> Tensor: ...

    def output(self, path: str = "", *, run: int = -1) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Intervention(ABC):
    """Base class of interventions.

    Attributes:
        heads: Heads to change; None changes the module's output.
        positions: Positions to change; None changes all.
    """

    heads: Indices = None
    positions: Indices = None

    @abstractmethod
    def replacement(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        """Return the replacement for `part`, (…, h, r, E) or (…, r, M), whose rows are at `places` in the sequence."""

    def apply(self, x: Tensor, context: CallContext) -> Tensor:
        """Return x with this intervention applied."""
        rows = self._rows(x, context)
        path = context.path
        if not rows:
            return x
        row_index = torch.tensor(rows, device=x.device)
        places = [(context.past or 0) + row for row in rows]
        index: Any = (..., row_index, slice(None)) if x.dim() > 2 or self.heads is not None else (...,)
        if self.heads is not None:
            heads = resolve_indices(self.heads, x.shape[-3], "head")
            head_index = torch.tensor(heads, dtype=torch.long, device=x.device)
            index = (..., head_index[:, None], row_index, slice(None))
        part = x[index]
        replacement = self.replacement(part, path, places).to(x)
        changed = x.clone()
        try:
            changed[index] = replacement.expand_as(part)
        except RuntimeError as error:
            raise ShapeError(
                f"the intervention on {path or 'the model'} gave {tuple(replacement.shape)} for {tuple(part.shape)}; "
                "expected a shape that broadcasts to it"
            ) from error
        return changed

    def _rows(self, x: Tensor, context: CallContext) -> list[int]:
        """Return the rows of this call to change."""
        if x.dim() < 3 and self.positions is not None:
            name = context.path or "the model"
            raise ShapeError(f"{name} returns {tuple(x.shape)}, which has no positions; omit `positions`")
        if x.dim() < 3:
            return [0]
        T = x.shape[-2]
        if context.cache is None or self.positions is None:
            return resolve_indices(self.positions, T, "position")
        requested = self.positions
        past = context.past or 0
        if isinstance(requested, slice):
            requested = range(
                requested.start or 0, past + T if requested.stop is None else requested.stop, requested.step or 1
            )
        positions = [requested] if isinstance(requested, int) else list(requested)
        if any(place < 0 for place in positions):
            requested = self.positions
            raise ShapeError(
                f"positions are {requested!r}; with a cache the final length is unknown, so use non-negative positions"
            )
        return [place - past for place in positions if past <= place < past + T]


@explain_keywords
@dataclass(frozen=True, kw_only=True, eq=False)
class ZeroAblation(Intervention):
    """Replace heads, positions, or the output of a module by zeros.

    Args:
        heads: Heads to replace; None for the output of the module.
        positions: Positions to replace; None for all.
    """

    def replacement(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        return part.new_zeros(())


@explain_keywords
@dataclass(frozen=True, eq=False)
class MeanAblation(Intervention):
    """Replace by the mean over all sequences and positions of another run, which stays in the usual range of values.

    Args:
        source: Trace of the other run.
        run: Index of the run within the trace; −1 is the last.
        heads: Heads to replace; None for the output of the module.
        positions: Positions to replace; None for all.
    """

    source: ActivationSource
    run: int = -1

    def replacement(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        x = _source_activation(self, self.source, path, self.run)  # (B, h, T, E) or (B, T, M)
        return x.mean(0) if x.dim() < 3 else x.mean(dim=(0, -2), keepdim=True).squeeze(0)


@explain_keywords
@dataclass(frozen=True, eq=False)
class ReplaceActivation(Intervention):
    """Replace by a tensor, or by a function of the original activation.

    Args:
        value: A tensor that broadcasts to the activation, or a function that maps the original activation to
            its replacement.
        heads: Heads to replace; None for the output of the module.
        positions: Positions to replace; None for all.

    Raises:
        DtypeError: The value is neither a tensor nor a function.
    """

    value: Tensor | Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if not isinstance(self.value, Tensor) and not callable(self.value):
            raise DtypeError(f"ReplaceActivation got a {type(self.value).__name__}; expected a tensor or a function")

    def replacement(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        replacement = self.value if isinstance(self.value, Tensor) else self.value(part)
        if not isinstance(replacement, Tensor):
            kind = type(replacement).__name__
            name = path or "the model"
            raise DtypeError(f"the function of ReplaceActivation returned a {kind} for {name}; expected a tensor")
        return replacement


@explain_keywords
@dataclass(frozen=True, eq=False)
class PatchActivation(Intervention):
    """Replace by the same heads and positions of another run.

    Args:
        source: Trace of the other run.
        path: Module in that run, if it is another one.
        run: Index of the run within the trace; −1 is the last.
        heads: Heads to replace; None for the output of the module.
        positions: Positions to replace; None for all.
    """

    source: ActivationSource
    path: str | None = None
    run: int = -1

    def replacement(self, part: Tensor, path: str, places: list[int]) -> Tensor:
        x = _source_activation(self, self.source, path if self.path is None else self.path, self.run)
        if x.dim() < 3:
            return x
        if max(places) >= x.shape[-2]:
            raise ShapeError(
                f"position {max(places)} of {path or 'the model'} cannot be patched from a run of {x.shape[-2]} "
                "positions; give positions that exist in both runs"
            )
        return x[..., torch.tensor(places, device=x.device), :]


def _source_activation(edit: Intervention, source: ActivationSource, path: str, run: int) -> Tensor:
    if not isinstance(source, ActivationSource):
        raise ConfigError(f"{type(edit).__name__} got a {type(source).__name__}; expected a trace of another run")
    return source.output(path, run=run) if edit.heads is None else source.heads(path, heads=edit.heads, run=run)
