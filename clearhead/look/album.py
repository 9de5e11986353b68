"""Collect the attention maps and measures of one forward pass in an `AttentionReport` (H heads, T queries, S keys).

with look.trace(model, "**.attention.weights", "**.blocks.*.output") as t:
    model(ids)
album = look.build_report(t, tokens, title="A run")
album.html()                    # the page, as text
album.pictures[0].summary       # what the heads of the first layer do
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ConfigError, ShapeError
from clearhead.look.measures import entropy, rollout, value_norms
from clearhead.look.picture import AttentionMap, Layout
from clearhead.look.record import path_matches
from clearhead.look.trace import Trace

ROLLOUT_LIMIT = 1024  # tokens: a rollout multiplies T×T matrices
_CHECKED_ROWS = 256  # rows whose recomputed output is compared with the run's own

# The tokens of a run: one list where queries and keys are the same text; or, by pattern of module path, those of the
# queries and those of the keys. The first pattern that fits a layer counts. None: positions are named by their numbers.
Labels = Sequence[str] | Mapping[str, tuple[Sequence[str], Sequence[str]]] | None


@dataclass(frozen=True, kw_only=True)
class AttentionReport:
    """All that a page shows of one run: its pictures, and what else is known of it."""

    title: str
    maps: Sequence[AttentionMap]
    metadata: Mapping[str, str] = field(default_factory=dict)  # shown under the title
    norms: Sequence[tuple[str, Tensor]] = ()  # (T,) after each block: the residual stream
    image: Tensor | None = None  # (height, width) uint8: what an image model was shown, or a spectrogram
    query: int | None = None  # the query that a page shows first; None: the one in the middle

    def __post_init__(self) -> None:
        if not self.maps:
            raise ConfigError("an album needs at least one picture: trace at least one attention layer")

    @property
    def stacks(self) -> dict[str, list[AttentionMap]]:
        """The pictures by stack, in the order of their layers."""
        found: dict[str, list[AttentionMap]] = {}
        for attention_map in self.maps:
            found.setdefault(attention_map.stack, []).append(attention_map)
        return {stack: sorted(some, key=lambda attention_map: attention_map.layer) for stack, some in found.items()}

    @property
    def default_map(self) -> AttentionMap:
        """What views show first: of cross-attention the layer that aligns most sharply, else the last layer."""
        stacks = list(self.stacks.values())
        cross = next((stack for stack in stacks if stack[0].kind == "cross"), None)
        if cross is None:
            return stacks[-1][-1]
        return min(cross, key=lambda attention_map: float(entropy(attention_map.weights()).mean()))

    def rollouts(self) -> dict[str, Tensor]:
        """(T, T) for each stack of self-attention that was recorded whole and is no longer than 1,024 tokens."""
        result = {}
        for stack, some in self.stacks.items():
            first = some[0]
            whole = [attention_map.layer for attention_map in some] == list(range(len(some)))
            alike = all(attention_map.rows == first.rows == attention_map.columns for attention_map in some)
            short = len(first.rows) <= ROLLOUT_LIMIT
            if first.kind != "cross" and whole and alike and short and len(some) > 1:
                result[stack] = rollout([attention_map.all_heads() for attention_map in some])
        return result

    def to_dict(self) -> dict[str, Any]:
        """The measures of every head, for programs. Weights are not in it: ask a picture for those you want."""
        layers = []
        for attention_map in self.maps:
            heads = [
                {"head": head, "label": label.name, "scores": label.scores, "entropy": e, "distance": d}
                for head, (label, e, d) in enumerate(attention_map.summary.heads)
            ]
            plain = {name: getattr(attention_map, name) for name in ("path", "kind", "difference", "tolerance")}
            layers.append(
                plain | {"rows": list(attention_map.rows), "columns": list(attention_map.columns), "heads": heads}
            )
        norms = [{"path": path, "norms": norms.tolist()} for path, norms in self.norms]
        return {"title": self.title, "metadata": dict(self.metadata), "layers": layers, "norms": norms}

    def html(self) -> str:
        """The page: one self-contained HTML file that needs no network."""
        from clearhead.look.page import render_page

        return render_page(self)

    def _repr_html_(self) -> str:
        """In a notebook: the page in a frame of its own."""
        from clearhead.look.page import iframe

        return iframe(self.html(), self.title)


def build_report(
    trace: Trace,
    labels: Labels = None,
    *,
    title: str,
    metadata: Mapping[str, str] | None = None,
    image: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    batch: int = 0,
    run: int = -1,
) -> AttentionReport:
    """An album of one run of a trace; the residual stream is in it if the outputs of blocks were recorded."""
    try:
        norms = [(path, _of_batch(norm, batch, 1).float().cpu()) for path, norm in trace.norms(run=run)]
    except ConfigError:  # no outputs of blocks were asked for
        norms = []
    drawn = attention_maps(trace, labels, grid=grid, batch=batch, run=run)
    return AttentionReport(title=title, maps=drawn, metadata=metadata or {}, norms=norms, image=image)


def attention_maps(
    trace: Trace, labels: Labels = None, *, grid: tuple[int, int] | None = None, batch: int = 0, run: int = -1
) -> list[AttentionMap]:
    """A picture of every attention layer of a trace, for one sequence of the batch.

    `grid` is for models of images: the rows and columns of patches that the tokens stand for."""
    if not trace.paths:
        raise ConfigError(trace.report())
    return [_attention_map(trace, path, labels, grid, batch, run) for path in trace.paths]


def _attention_map(
    trace: Trace, path: str, labels: Labels, grid: tuple[int, int] | None, batch: int, run: int
) -> AttentionMap:
    H, T = trace.heads(path, run=run).shape[-3:-1]
    values = _of_batch(trace.values(path, run=run), batch, 3)  # (H, S, E)
    S = values.shape[-2]
    rows, columns, cross = _named(path, labels, T, S)

    def block(start: int, stop: int) -> Tensor:
        return _of_batch(trace.weights(path, rows=slice(start, stop), run=run), batch, 3)

    difference, tolerance = _checked(trace, path, T, run)
    return AttentionMap(
        path=path,
        rows=rows,
        columns=columns,
        n_heads=H,
        compute_rows=block,
        layout=Layout(T, S, cross=cross, grid=grid),
        value_norms=_lengths(trace.module(path), values),
        difference=difference,
        tolerance=tolerance,
    )


def _named(path: str, labels: Labels, T: int, S: int) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """The names of queries (after a cache, the last positions) and keys, and whether these are two different texts."""
    by_path = labels if isinstance(labels, Mapping) else {} if labels is None else {"**": (labels, labels)}
    found = next((names for pattern, names in by_path.items() if path_matches(pattern, path)), None)
    if found is None:
        cross = "cross" in path
        first = 0 if cross else S - T
        return tuple(map(str, range(first, first + T))), tuple(map(str, range(S))), cross
    rows, columns = map(tuple, found)
    cross = rows != columns
    rows = rows[len(rows) - T :] if not cross and len(rows) == S else rows
    if (len(rows), len(columns)) != (T, S):
        raise ShapeError(
            f"{path} has {T} queries and {S} keys, and there are names for {len(rows)} and {len(columns)}; give a "
            "token for each, by pattern of module path where layers differ"
        )
    return rows, columns, cross


def _checked(trace: Trace, path: str, T: int, run: int) -> tuple[float | None, float | None]:
    """How far the recomputed output is from the run's own, and how far it may be; of a long run, for some rows."""
    rows = None if T <= _CHECKED_ROWS else torch.linspace(0, T - 1, _CHECKED_ROWS).long().tolist()
    try:
        return trace.difference(path, rows=rows, run=run), trace.tolerance(path, rows=rows, run=run)
    except ConfigError:  # in training, weights were dropped at random: there is nothing to compare with
        return None, None


def _lengths(layer: nn.Module, values: Tensor) -> Tensor | None:
    """‖v W_O‖ where the layer has an output projection that we know."""
    projection = getattr(layer, "o_proj", getattr(layer, "out_proj", None))
    if not isinstance(projection, nn.Linear) or projection.in_features % values.shape[-1]:
        return None
    return value_norms(values.detach().float(), projection.weight.detach().float()).cpu()


def _of_batch(x: Tensor, batch: int, dims: int) -> Tensor:
    """One sequence of a batch; `dims` is what one has."""
    if x.dim() == dims:
        return x
    if not 0 <= batch < x.shape[0]:
        raise ShapeError(f"sequence {batch} was asked for and the batch has {x.shape[0]}: 0 … {x.shape[0] - 1}")
    return x[batch]
