"""Collect the attention maps and measures of one forward pass in an `AttentionReport` (H heads, T queries, S keys).

with ch.trace(model, "**.attention.weights", "**.blocks.*.output") as t:
    model(ids)
report = analysis.build_report(t, tokens, title="A run")
report.html()                   # the page, as text
report.maps[0].summary          # measures of the heads of the first layer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from clearhead._core.json_types import JSONObject
from clearhead.analysis.measures import entropy, rollout, value_norms
from clearhead.analysis.tracing.activation_store import path_matches
from clearhead.analysis.tracing.trace import Trace
from clearhead.analysis.views.attention_map import AttentionMap, AxisLayout
from clearhead.errors import ConfigError, ShapeError

ROLLOUT_LIMIT = 1024  # tokens: a rollout multiplies T×T matrices
_CHECKED_ROWS = 256  # number of rows for which the recomputed output is checked

# The tokens of a run: one list if queries and keys are the same text, or query and key tokens by pattern of module
# path, of which the first match is used. None labels positions by numbers.
Labels = Sequence[str] | Mapping[str, tuple[Sequence[str], Sequence[str]]] | None


@dataclass(frozen=True)
class Sound:
    """The recording of a report.

    Attributes:
        samples: The samples, from −1 to 1.
        sample_rate: Samples per second.
        ends: End of each encoder frame, in seconds.
        symbols: The recognized symbols, by frame.
    """

    samples: Tensor
    sample_rate: int
    ends: Sequence[float]
    symbols: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class AttentionReport:
    """Everything that a page shows of one run.

    Attributes:
        title: Title of the page.
        maps: The attention maps.
        metadata: Names and values displayed under the title.
        norms: Norm of the residual stream after each block, (T,) each.
        image: Input image or spectrogram, (height, width) uint8.
        query: The query that a page selects first; None selects the middle one.
        sound: The recording whose spectrogram the image is.
    """

    title: str
    maps: Sequence[AttentionMap]
    metadata: Mapping[str, str] = field(default_factory=dict)
    norms: Sequence[tuple[str, Tensor]] = ()
    image: Tensor | None = None
    query: int | None = None
    sound: Sound | None = None

    def __post_init__(self) -> None:
        if not self.maps:
            raise ConfigError("an attention report needs at least one map; trace at least one attention layer")

    @property
    def stacks(self) -> dict[str, list[AttentionMap]]:
        """The maps by stack, in the order of their layers."""
        stacks: dict[str, list[AttentionMap]] = {}
        for attention_map in self.maps:
            stacks.setdefault(attention_map.stack, []).append(attention_map)
        return {
            stack: sorted(layer_maps, key=lambda attention_map: attention_map.layer)
            for stack, layer_maps in stacks.items()
        }

    @property
    def default_map(self) -> AttentionMap:
        """The map that views select first: the cross-attention layer with the lowest entropy, else the last layer."""
        stacks = list(self.stacks.values())
        cross = next((stack for stack in stacks if stack[0].kind == "cross"), None)
        if cross is None:
            return stacks[-1][-1]
        return min(cross, key=lambda attention_map: float(entropy(attention_map.weights()).mean()))

    def rollouts(self) -> dict[str, Tensor]:
        """Return the rollout (T, T) of each completely recorded stack of self-attention of at most 1,024 tokens."""
        result = {}
        for stack, layer_maps in self.stacks.items():
            first = layer_maps[0]
            is_complete = [attention_map.layer for attention_map in layer_maps] == list(range(len(layer_maps)))
            is_self_attention = all(
                attention_map.rows == first.rows == attention_map.columns for attention_map in layer_maps
            )
            is_short = len(first.rows) <= ROLLOUT_LIMIT
            if first.kind != "cross" and is_complete and is_self_attention and is_short and len(layer_maps) > 1:
                result[stack] = rollout([attention_map.all_heads() for attention_map in layer_maps])
        return result

    def to_dict(self) -> JSONObject:
        """Return the measures of every head for JSON. Weights are not included; a map returns those."""
        layers = []
        for attention_map in self.maps:
            heads = [
                {"head": head, "label": label.name, "scores": label.scores, "entropy": e, "distance": d}
                for head, (label, e, d) in enumerate(attention_map.summary.heads)
            ]
            fields = {name: getattr(attention_map, name) for name in ("path", "kind", "difference", "tolerance")}
            layers.append(
                fields | {"rows": list(attention_map.rows), "columns": list(attention_map.columns), "heads": heads}
            )
        norms = [{"path": path, "norms": norms.tolist()} for path, norms in self.norms]
        return {"title": self.title, "metadata": dict(self.metadata), "layers": layers, "norms": norms}

    def html(self) -> str:
        """Return the page: one self-contained HTML file."""
        from clearhead.analysis.views.page import render_page

        return render_page(self)

    def _repr_html_(self) -> str:
        """Return the page in an iframe."""
        from clearhead.analysis.views.page import iframe

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
    """Build the report of one run of a trace; it contains the residual stream if outputs of blocks were recorded.

    Args:
        trace: Trace with attention weights.
        labels: Tokens; by pattern of module path, a pair of query and key tokens; None labels positions by numbers.
        title: Title of the report.
        metadata: Names and values displayed under the title.
        image: Input image or spectrogram, (height, width) uint8.
        grid: Rows and columns of patches, for image models.
        batch: Index of the sequence in the batch.
        run: Run index.

    Returns:
        The report; `save` writes it as an HTML page.
    """
    try:
        norms = [(path, _select_sequence(norm, batch, 1).float().cpu()) for path, norm in trace.norms(run=run)]
    except ConfigError:  # no outputs of blocks were asked for
        norms = []
    maps = attention_maps(trace, labels, grid=grid, batch=batch, run=run)
    return AttentionReport(title=title, maps=maps, metadata=metadata or {}, norms=norms, image=image)


def attention_maps(
    trace: Trace, labels: Labels = None, *, grid: tuple[int, int] | None = None, batch: int = 0, run: int = -1
) -> list[AttentionMap]:
    """Return the map of every attention layer of a trace, for one sequence of the batch.

    Args:
        trace: Trace with attention weights.
        labels: Tokens, as in `build_report`.
        grid: Rows and columns of patches, for image models.
        batch: Index of the sequence in the batch.
        run: Run index.

    Raises:
        ConfigError: If the trace has no attention.
    """
    if not trace.paths:
        raise ConfigError(trace.report())
    return [_attention_map(trace, path, labels, grid, batch, run) for path in trace.paths]


def _attention_map(
    trace: Trace, path: str, labels: Labels, grid: tuple[int, int] | None, batch: int, run: int
) -> AttentionMap:
    H, T = trace.heads(path, run=run).shape[-3:-1]
    values = _select_sequence(trace.values(path, run=run), batch, 3)  # (H, S, E)
    S = values.shape[-2]
    rows, columns, cross = _token_labels(path, labels, T, S)

    def block(start: int, stop: int) -> Tensor:
        return _select_sequence(trace.weights(path, rows=slice(start, stop), run=run), batch, 3)

    difference, tolerance = _check_recomputation(trace, path, T, run)
    return AttentionMap(
        path=path,
        rows=rows,
        columns=columns,
        n_heads=H,
        compute_rows=block,
        layout=AxisLayout(T, S, cross=cross, grid=grid),
        value_norms=_value_norms(trace.module(path), values),
        difference=difference,
        tolerance=tolerance,
    )


def _token_labels(path: str, labels: Labels, T: int, S: int) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return the labels of queries (after a cache, the last positions) and keys, and whether it is cross-attention."""
    by_path = labels if isinstance(labels, Mapping) else {} if labels is None else {"**": (labels, labels)}
    stacks = next((names for pattern, names in by_path.items() if path_matches(pattern, path)), None)
    if stacks is None:
        cross = "cross" in path
        first = 0 if cross else S - T
        return tuple(map(str, range(first, first + T))), tuple(map(str, range(S))), cross
    rows, columns = map(tuple, stacks)
    cross = rows != columns
    rows = rows[len(rows) - T :] if not cross and len(rows) == S else rows
    if (len(rows), len(columns)) != (T, S):
        raise ShapeError(
            f"{path} has {T} queries and {S} keys, but the labels have {len(rows)} and {len(columns)}; pass one "
            "token for each, by pattern of module path if layers differ"
        )
    return rows, columns, cross


def _check_recomputation(trace: Trace, path: str, T: int, run: int) -> tuple[float | None, float | None]:
    """Return the error of the recomputed output and its tolerance; of a long run, for some rows."""
    rows = None if T <= _CHECKED_ROWS else torch.linspace(0, T - 1, _CHECKED_ROWS).long().tolist()
    try:
        return trace.difference(path, rows=rows, run=run), trace.tolerance(path, rows=rows, run=run)
    except ConfigError:  # dropout: there is nothing to compare with
        return None, None


def _value_norms(layer: nn.Module, values: Tensor) -> Tensor | None:
    """Return ‖v W_O‖ if the output projection is recognized."""
    projection = getattr(layer, "o_proj", getattr(layer, "out_proj", None))
    if not isinstance(projection, nn.Linear) or projection.in_features % values.shape[-1]:
        return None
    return value_norms(values.detach().float(), projection.weight.detach().float()).cpu()


def _select_sequence(x: Tensor, batch: int, dims: int) -> Tensor:
    """Return one sequence of a batch; `dims` is the number of dimensions without batch."""
    if x.dim() == dims:
        return x
    if not 0 <= batch < x.shape[0]:
        raise ShapeError(f"sequence {batch} is out of range; the batch has {x.shape[0]}: 0 … {x.shape[0] - 1}")
    return x[batch]
